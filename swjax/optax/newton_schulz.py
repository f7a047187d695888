"""Moves the singular values of matrices near 1, by Newton-Schulz iterations on their Gram matrices."""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from swjax.kernels import dispatch
from swjax.kernels.symmetric.reference import rounded

Reshard = Callable[[jax.Array], jax.Array]

# Terms of degree 1, 3, 5, ... of each step; the last tuple is that of all further steps.
_POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
# Its authors divide the argument of all polynomials but the last by this number, so that singular values that
# rounding lifts above 1 do not leave the interval.
_SAFETY = 1.01
# Of benchmarks/studies/minimax_polynomials.py.
_NONIC = (
    (14.792114, -141.98395, 463.16787, -583.609, 248.91104),
    (6.7164881, -15.943678, 13.234264, -4.2699199, 0.46743569),
    (4.0916692, -8.5084094, 7.5611554, -2.7552773, 0.34818821),
)
COEFFICIENTS: dict[str, tuple[tuple[float, ...], ...]] = {
    "quintic": ((3.4445, -4.7750, 2.0315),),
    "polar_express": (
        *((a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in _POLAR_EXPRESS[:-1]),
        _POLAR_EXPRESS[-1],
    ),
    "nonic": _NONIC,
}
STEPS = {"quintic": 5, "polar_express": 5, "nonic": 3}
CHOICES = ("auto", *COEFFICIENTS)

# Powers of two by which Gram matrices of iterates, and iterates, are multiplied, so that float16 holds their
# small elements with all digits: singular values are at most about 1, and elements of large matrices far
# below.
_GRAM_SCALE = 2.0**10
_ITERATE_SCALE = 2.0**6

# Steps on one Gram matrix, in turn, by dtype and number of coefficients; the last number repeats. A Gram
# matrix squares the condition, and its error grows with each step on it: see "Gram matrices of Muon" in
# benchmarks/notes/accuracy.md.
_SEGMENTS = {("float16", 3): (2, 3), ("float16", 5): (1, 2)}
_OTHER_SEGMENTS = {3: (2,), 5: (1,)}

# A matrix is iterated on its Gram matrix if its long side is at least this multiple of the short one. Below,
# one step on each Gram matrix takes no more products, and rounds less.
_LONG = 1.5


def choose_coefficients(name: str, dtype: jax.typing.DTypeLike) -> str:
    """The coefficients that "auto" means for products of this dtype.

    >>> choose_coefficients("auto", "float16"), choose_coefficients("auto", "bfloat16")
    ('nonic', 'quintic')
    """
    if name != "auto":
        return name
    # The errors of "nonic" in bfloat16 reach 0.2.
    return "quintic" if jnp.dtype(dtype) == jnp.bfloat16 else "nonic"


def coefficients_of(name: str, steps: int) -> jax.Array:
    """The coefficients of each step, [terms] if all steps have the same, otherwise [steps, terms] float32.

    >>> coefficients_of("polar_express", 2)[1].round(3)
    Array([ 4.066, -2.861,  0.518], dtype=float32)
    """
    table = COEFFICIENTS[name]
    if len(table) == 1:
        return jnp.asarray(table[0], jnp.float32)
    return jnp.asarray([table[min(i, len(table) - 1)] for i in range(steps)], jnp.float32)


def orthogonalize(
    tree: Any,
    coefficients: jax.Array,
    dtype: jax.typing.DTypeLike = jnp.float32,
    *,
    steps: int = 5,
    implementation: str | None = None,
) -> Any:
    """Moves the singular values of each matrix near 1, by Newton-Schulz iterations.

    Singular values of at least 0.2 % of the Frobenius norm end between 0.68 and 1.21 with five steps of
    "quintic", between 0.73 and 1.21 with three of "nonic", and between 0.86 and 1.13 with five of
    "polar_express".

    Arrays of one shape and sharding are stacked, so that few products run, several at a time, so that stacks
    need little memory. If several devices share the work, they share stacks that exist, and each computes one
    of the single matrices.

    Args:
      tree: of arrays [..., m, n].
      coefficients: of the terms of degree 1, 3 and 5, or 1, 3, 5, 7 and 9, float32: [terms], or
        [steps, terms]. See `coefficients_of`.
      dtype: of the operands of the products.
      steps: number of iterations.
      implementation: of `symmetric_product`; None chooses.

    Returns:
      float32 arrays with these shapes.
    """
    leaves, structure = jax.tree.flatten(tree)
    leaves = [_with_unit_elements(x, dtype) for x in leaves]
    run = functools.partial(
        _orthogonalize, coefficients=coefficients, steps=steps, implementation=implementation
    )
    alike: dict[Any, list[int]] = {}  # by type, the numbers of arrays
    for number, x in enumerate(leaves):
        is_stacked = x.ndim == 2 or _sharing(x).devices == 1
        alike.setdefault(jax.typeof(x) if is_stacked else number, []).append(number)
    for numbers in alike.values():
        first, sharing = leaves[numbers[0]], _sharing(leaves[numbers[0]])
        size = _stacked_at_a_time(len(numbers), first, sharing)
        for start in range(0, len(numbers), size):
            some = numbers[start : start + size]
            # Devices share whole stacks only.
            missing = size - len(some) if sharing.devices > 1 else 0
            if len(some) + missing == 1:
                leaves[some[0]] = run(leaves[some[0]])
                continue
            padding = [jnp.zeros_like(first)] * missing
            stacked = run(jnp.stack([*(leaves[i] for i in some), *padding]))
            for i, number in enumerate(some):
                leaves[number] = stacked[i]
    return jax.tree.unflatten(structure, leaves)


# Elements of the arrays that are stacked on one device: 64 matrices of 1280 x 1280.
_STACKED_ELEMENTS = 2**27


def _stacked_at_a_time(number: int, x: jax.Array, sharing: "_Sharing") -> int:
    """How many of a number of arrays like x are orthogonalized together."""
    if number == 1:
        return 1
    if sharing.devices == 1:
        return min(number, max(1, _STACKED_ELEMENTS // max(x.size, 1)))
    # Explicit axes must divide the stack. Padding few matrices would need much memory.
    whole = number > sharing.devices or (sharing.is_explicit and number > sharing.devices // 2)
    return sharing.devices if whole else number


@functools.partial(jax.jit, static_argnames="dtype")
def _with_unit_elements(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Divides each matrix by its largest element, so that no square overflows or underflows."""
    if not x.size:
        return x.astype(dtype)
    largest = jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True)
    return (x / jnp.where(largest > 0, largest, 1)).astype(dtype)


# Compiled, because the constraints of `_resharding` need jax.jit.
@functools.partial(jax.jit, static_argnames=("steps", "implementation"))
def _orthogonalize(
    x: jax.Array, coefficients: jax.Array, *, steps: int, implementation: str | None
) -> jax.Array:
    """`orthogonalize` for a matrix or stack from `_with_unit_elements`."""
    if not x.size:
        return x.astype(jnp.float32)
    if x.ndim == 2:
        stack = _orthogonalize(x[None], coefficients, steps=steps, implementation=implementation)
        return stack[0]
    given, shape = jax.typeof(x).sharding, x.shape
    # On an explicit mesh, JAX refuses products along a sharded axis, also of one device.
    spec = _without_single_devices(given)
    x = x if spec == given.spec else jax.reshard(x, spec)
    replicate, on_shares, restore = _resharding(x)
    x = jax.lax.optimization_barrier(x)  # see `rounded`
    table = jnp.broadcast_to(coefficients.astype(jnp.float32), (steps, coefficients.shape[-1]))
    run = functools.partial(iterate, implementation=implementation)
    x = on_shares(run, replicate(x).reshape(-1, *shape[-2:]), table)
    x = restore(replicate(x).reshape(shape)).astype(jnp.float32) / _ITERATE_SCALE
    return x if spec == given.spec else jax.reshard(x, given)


def iterate(x: jax.Array, table: jax.Array, implementation: str | None = None) -> jax.Array:
    """Newton-Schulz iterations X <- P X with a polynomial P of the Gram matrix G of the short side of X.

    P is a + b G + c G², or a polynomial of degree 4. The Gram matrix of P X is P G P. So several steps need
    no product with X but one with Q, the product of their polynomials. P, Q and G are symmetric, and commute.
    One rounded P enters both Q and G, so that G stays the Gram matrix of Q X: the rounding of P exceeds small
    eigenvalues of G.

    Args:
      x: [batch, m, n]; the largest element of a matrix is 1, or 0.
      table: [steps, 3 or 5] float32.
      implementation: see `orthogonalize`.

    Returns:
      The iterate times `_ITERATE_SCALE`, in the dtype of x.
    """
    if implementation is None and dispatch.would_gather():  # XLA partitions these products
        implementation = "xla"
    symmetric = functools.partial(dispatch.run, "symmetric_product", implementation=implementation)
    has_fewer_rows = x.shape[-2] <= x.shape[-1]
    contract, times_x = (-1, "bik,bkj->bij") if has_fewer_rows else (-2, "bkj,bik->bij")
    ones, zeros = jnp.ones(len(x)), jnp.zeros(len(x))
    times = lambda factor: jnp.stack([factor * ones, zeros, zeros], 1)
    for segment in _segments(x, *table.shape):
        if segment.start:
            gram_scale, rescale = _GRAM_SCALE * ones, ones
            gram = symmetric(x, x, None, times(_GRAM_SCALE / _ITERATE_SCALE**2), contract=contract)
        else:
            # Elements are at most 2^12, and those of products with polynomials at most 2^16.
            factor = 2.0 ** (12 - math.ceil(math.log2(max(x.shape[1:]))))
            gram = symmetric(x, x, None, times(factor), contract=contract)
            # The trace is the square of the Frobenius norm, which is below 1 for zeros only.
            # `jnp.trace` would read whole matrices.
            diagonal = gram.reshape(len(x), -1)[:, :: gram.shape[1] + 1]
            gram_scale = jnp.maximum(jnp.sum(diagonal.astype(jnp.float32), 1), factor)
            rescale = _ITERATE_SCALE / jnp.sqrt(gram_scale / factor)
        q = None
        for i in segment:
            is_last = i == segment[-1]
            scale = rescale if is_last and q is None else ones
            p = _polynomial(symmetric, gram, gram_scale, table[i], scale)
            if q is None:
                q = p
            elif is_last:
                q = symmetric(q, p, None, times(rescale))
            else:
                q = symmetric(q, p)
            if not is_last:
                # Not symmetric: its rounding errors, made symmetric, would exceed small eigenvalues.
                p_gram = jnp.einsum("bij,bjk->bik", p, gram, preferred_element_type=x.dtype)
                gram = symmetric(p, rounded(p_gram, x.dtype))
        x = rounded(jnp.einsum(times_x, q, x, preferred_element_type=x.dtype), x.dtype)
    return x


def _polynomial(
    symmetric: Callable[..., jax.Array],
    gram: jax.Array,
    gram_scale: jax.Array,
    terms: jax.Array,
    scale: jax.Array,
) -> jax.Array:
    """The polynomials of one step, times a scale.

    A polynomial of degree 4 takes two products: a + b G + c G² + d G³ + e G⁴ = e H² + (b - e d/e h) G +
    (a - e h²) with H = G² + d/2e G + h. Those of "nonic" are near e H², so H² loses no digits.

    Args:
      symmetric: `symmetric_product`.
      gram: [batch, m, m], G times `gram_scale`.
      gram_scale: [batch].
      terms: [3 or 5], a, b, c, ...
      scale: [batch].
    """
    factors = lambda *of: jnp.stack([jnp.broadcast_to(each, scale.shape) for each in of], 1)
    constant, linear, square, *higher = terms
    if not higher:
        p = factors(square / gram_scale**2, linear / gram_scale, constant)
        return symmetric(gram, gram, gram, p * scale[:, None])
    cube, fourth = higher
    tilt = cube / fourth / 2
    shift = (square / fourth - tilt**2) / 2
    half = symmetric(gram, gram, gram, factors(gram_scale**-2, tilt / gram_scale, shift))
    linear, constant = linear - 2 * fourth * tilt * shift, constant - fourth * shift**2
    p = factors(fourth, linear / gram_scale, constant)
    return symmetric(half, half, gram, p * scale[:, None])


def _segments(x: jax.Array, steps: int, terms: int) -> Iterator[range]:
    """The steps that each Gram matrix serves."""
    short, long = sorted(x.shape[-2:])
    found = _SEGMENTS.get((x.dtype.name, terms), _OTHER_SEGMENTS[terms])
    lengths = found if long >= _LONG * short else (1,)
    start = 0
    while start < steps:
        stop = min(start + lengths[0], steps)
        yield range(start, stop)
        start, lengths = stop, lengths[1:] or lengths


def _without_single_devices(sharding: NamedSharding) -> P:
    """The spec without axes of the mesh that have one device."""
    sizes = sharding.mesh.shape
    named = [axes if isinstance(axes, tuple) else (axes,) for axes in sharding.spec]
    kept = [tuple(axis for axis in axes if axis and sizes[axis] > 1) for axes in named]
    return P(*((axes if len(axes) > 1 else axes[0]) if axes else None for axes in kept))


class _Sharing(NamedTuple):
    """How devices share the matrices of a stack.

    Attributes:
      axes: the axes of the mesh along which the layers of a stack are sharded.
      devices: number of devices along these axes.
      is_explicit: whether the axes are explicit.
    """

    axes: tuple[str, ...]
    devices: int
    is_explicit: bool


def _sharing(x: jax.Array) -> _Sharing:
    mesh = jax.typeof(x).sharding.mesh
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    kinds = {axis: kind for axis, kind in kinds.items() if mesh.shape[axis] > 1}
    is_explicit = AxisType.Explicit in kinds.values()
    wanted = AxisType.Explicit if is_explicit else AxisType.Auto
    axes = tuple(axis for axis, kind in kinds.items() if kind == wanted)
    # Constraints on automatic axes need jax.jit. They have no meaning inside jax.shard_map, where arrays are
    # local.
    is_local = AxisType.Manual in mesh.axis_types or not isinstance(x, jax.core.Tracer)
    if is_local and not is_explicit:
        axes = ()
    return _Sharing(axes, math.prod(mesh.shape[axis] for axis in axes), is_explicit)


def _resharding(x: jax.Array) -> tuple[Reshard, Callable[..., jax.Array], Reshard]:
    """Functions for a stack like `x`: one replicates it, one runs a function of each device's share of
    its layers and further arrays, and one shards it like `x`.

    An array is replicated before its layers are shared, because XLA moves from one sharded axis to another
    by several gathers in float32.
    """
    same: Reshard = lambda x: x
    alone = lambda run, *arrays: run(*arrays)
    sharing, before = _sharing(x), jax.typeof(x).sharding
    layers = math.prod(x.shape[:-2])
    divides = layers % sharing.devices == 0
    replicated = NamedSharding(before.mesh, P())
    # Without the barrier, XLA gathers the array before it is converted to another dtype.
    barrier = jax.lax.optimization_barrier

    def on_shares(run, x, *arrays):
        spec = P(sharing.axes)
        local = jax.shard_map(
            run,
            mesh=before.mesh,
            in_specs=(spec, *[P()] * len(arrays)),
            out_specs=spec,
            check_vma=False,
        )
        if divides:
            return local(jax.reshard(x, spec) if sharing.is_explicit else x, *arrays)
        missing = -layers % sharing.devices
        return local(jnp.pad(x, ((0, missing), (0, 0), (0, 0))), *arrays)[:layers]

    if sharing.is_explicit:
        return (
            lambda x: jax.reshard(barrier(x), replicated),
            on_shares if divides else alone,
            lambda x: jax.reshard(x, before),
        )
    if sharing.devices == 1 or layers == 1:
        return same, alone, same
    constrain = jax.lax.with_sharding_constraint
    return lambda x: constrain(barrier(x), replicated), on_shares, same
