"""Moments of optimizers in 8 bits: block-wise, logarithmic, with stochastic rounding."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from swjax.optax.tensors import join

BLOCK = 128
# Smaller arrays stay as they are: their moments need little memory.
_SMALLEST_SIZE = 4096
_SHORTEST_AXIS = 64
_LEVELS = 127  # magnitudes of an int8 besides 0
# Elements below 2^-40 of the largest of their block are stored as that.
_LARGEST_RANGE = 40.0


class EightBits(NamedTuple):
    """An array in 8 bits: sign(codes) 2^(largest + step (|codes| - 127)), and 0 for the code 0.

    Attributes:
      codes: int8, with the shape of the array.
      largest: log2 of the largest magnitude of each block along the last axis, [..., blocks] float32; -inf
        for a block of zeros.
      step: log2 of the ratio of two neighbouring magnitudes of each block, [..., blocks] float32.
    """

    codes: jax.Array
    largest: jax.Array
    step: jax.Array


class EightBitMomentsState(NamedTuple):
    """State of `eight_bit_moments`.

    Attributes:
      count: [] int32, number of updates, from which stochastic rounding takes its numbers.
      inner: state of the optimizer, with the codes of `EightBits` in place of moments.
      ranges: [2, blocks] float32, `largest` and `step` of the blocks of all moments, in their order.
    """

    count: jax.Array  # type: ignore[assignment]  # hides tuple.count, as in optax's states
    inner: optax.OptState
    ranges: jax.Array


def eight_bit_moments(
    optimizer: optax.GradientTransformation,
    fields: Sequence[str] = ("mu", "nu"),
    block: int = BLOCK,
) -> optax.GradientTransformationExtraArgs:
    """Stores the moments of an optimizer in 8 bits between updates.

    A moment takes 1.06 bytes an element in place of 4. Each block of the last axis has its own range, from
    its smallest to its largest magnitude, which 127 magnitudes cover in equal ratios. For ranges of 10^3 and
    10^6 these ratios are 1.06 and 1.12. Rounding to them is stochastic and unbiased, so that averages move
    even if one update changes them by less than a ratio. An element that is not 0 does not become 0, so no
    second moment vanishes under a first one. Rounding depends on the number of updates and the place of an
    element only, so a resumed run has the same bits, as has every sharding.

    Wrap it around `per_tensor_guard`, not inside: the guard restores moments tensor by tensor.

    It saves memory between updates, not time: XLA writes decoded moments as temporary arrays, and an update
    of StableAdamW takes about twice as long (benchmarks/notes/speed.md). The loss of large models was not
    studied in this project.

    Codes have the shape and the place of their moment, so rules for the sharding of parameters fit them. The
    ranges, 0.06 bytes an element, are replicated.

    Args:
      optimizer: for example `stable_adamw`, `muon` or `optax.adamw`.
      fields: names of the fields of the optimizer's states whose arrays are moments. The names are those of
        `swjax.optax` and of optax's Adam, Lion, RMSProp and Muon. Do not name copies of parameters.
      block: elements of a block, at least 1.

    Returns:
      An `optax.GradientTransformationExtraArgs`. Arrays of fewer than 4,096 elements, with a last axis below
      64, or of 64 bits stay as they are.

    Raises:
      ValueError: `block` is not an int of at least 1; `fields` is empty or a single string; or the state of
        the optimizer has none of the fields.

    >>> params = {"w": jnp.ones((64, 128))}
    >>> optimizer = eight_bit_moments(optax.adam(1e-3))
    >>> state = optimizer.init(params)
    >>> print(state.inner[0].nu["w"].dtype, state.ranges.shape)
    int8 (2, 128)

    References:
      Dettmers et al., "8-bit optimizers via block-wise quantization", 2021, https://arxiv.org/abs/2110.02861.
      Xi et al., "COAT", 2024, https://arxiv.org/abs/2410.19313: a range of its own for each block.
    """
    if type(block) is not int or block < 1:
        raise ValueError(f"eight_bit_moments's block must be an int of at least 1, got {block!r}")
    if isinstance(fields, str) or not fields:
        raise ValueError(
            f"eight_bit_moments's fields must be names of fields, got {fields!r}: pass a tuple such as "
            "('mu', 'nu')"
        )
    optimizer = optax.with_extra_args_support(optimizer)

    def encoded(inner: optax.OptState, count: jax.Array) -> EightBitMomentsState:
        named, structure = jax.tree_util.tree_flatten_with_path(inner)
        has_field = lambda node: not set(fields).isdisjoint(getattr(node, "_fields", ()))
        if not any(map(has_field, jax.tree.leaves(inner, is_leaf=has_field))):
            raise ValueError(
                f"eight_bit_moments finds none of the fields {', '.join(fields)} in the state "
                f"{type(inner).__name__}: name those of its moments in `fields`"
            )
        leaves, found = [], []
        for number, (path, x) in enumerate(named):
            if _is_in(path, fields) and _fits(x):
                found.append(encode(x, block, seed=count * len(named) + number))
                x = found[-1].codes
            leaves.append(x)
        ranges = [join([x[i] for x in found], (), jnp.float32) for i in (1, 2)]
        return EightBitMomentsState(count, jax.tree.unflatten(structure, leaves), jnp.stack(ranges))

    def init(params):
        # Without the barrier, XLA would round the zeros while it compiles.
        inner = jax.lax.optimization_barrier(optimizer.init(params))
        return encoded(inner, jnp.zeros([], jnp.int32))

    def update(grads, state, params=None, **extra_args):
        inner = decoded_moments(state, block).inner
        updates, inner = optimizer.update(grads, inner, params, **extra_args)
        return updates, encoded(inner, optax.safe_increment(state.count))

    return optax.GradientTransformationExtraArgs(init, update)


def decoded_moments(opt_state: optax.OptState, block: int = BLOCK) -> optax.OptState:
    """A state with float32 arrays in place of moments in 8 bits, for functions that read moments.

    Args:
      opt_state: any state that contains that of `eight_bit_moments`, or none in 8 bits.
      block: the argument of `eight_bit_moments`.
    """

    def decoded(state):
        if not isinstance(state, EightBitMomentsState):
            return state
        leaves, structure = jax.tree.flatten(state.inner)
        start = 0
        for number, x in enumerate(leaves):
            if x.dtype != jnp.int8 or not _is_large(x):
                continue
            shape = (*x.shape[:-1], -(-x.shape[-1] // block))
            stop = start + math.prod(shape)
            largest, step = (of[start:stop].reshape(shape) for of in state.ranges)
            leaves[number] = decode(EightBits(x, largest, step), block)
            start = stop
        return state._replace(inner=jax.tree.unflatten(structure, leaves))

    return jax.tree.map(decoded, opt_state, is_leaf=lambda x: isinstance(x, EightBitMomentsState))


def has_eight_bits(opt_state: optax.OptState) -> bool:
    """Whether a state has moments in 8 bits."""
    is_state = lambda x: isinstance(x, EightBitMomentsState)
    return any(map(is_state, jax.tree.leaves(opt_state, is_leaf=is_state)))


def _is_in(path: tuple[Any, ...], fields: Sequence[str]) -> bool:
    """Whether a leaf is inside one of the fields of a named tuple."""
    return any(isinstance(k, jax.tree_util.GetAttrKey) and k.name in fields for k in path)


def _fits(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize <= 4 and _is_large(x)


def _is_large(x: Any) -> bool:
    return x.size >= _SMALLEST_SIZE and x.shape[-1] >= _SHORTEST_AXIS


def encode(x: jax.Array, block: int, seed: jax.typing.ArrayLike) -> EightBits:
    """Rounds an array to 8 bits. The expectation of the result over seeds is x.

    Args:
      x: [..., n] of at most 32 bits; a block with Inf or NaN becomes NaN.
      block: elements of a block of the last axis; the last block may have fewer.
      seed: [] integer.
    """
    x = x.astype(jnp.float32)
    size = jnp.abs(_blocks(x, block))
    # Of sizes, not of their logarithms, which XLA would write. log2(0) is -inf.
    largest = jnp.log2(jnp.max(size, -1))
    smallest = jnp.log2(jnp.min(jnp.where(size > 0, size, jnp.inf), -1))
    step = jnp.clip(largest - smallest, 1e-6, _LARGEST_RANGE) / (_LEVELS - 1)
    step = jnp.where(jnp.isneginf(largest), 1.0, step)
    steps = (jnp.log2(jnp.abs(x)) - _each(largest, block, x)) / _each(step, block, x)
    below = jnp.clip(jnp.floor(steps), 1 - _LEVELS, 0)
    # The chance of the larger neighbour, with which the expectation is x.
    log_step = _each(step, block, x) * math.log(2)
    chance = jnp.expm1((steps - below) * log_step) / jnp.expm1(log_step)
    code = below + _LEVELS + (_uniform(x.shape, seed) < chance).astype(jnp.float32)
    code = jnp.where(x == 0, 0, jnp.minimum(code, _LEVELS)) * jnp.sign(x)
    # NaN has no code.
    return EightBits(jnp.nan_to_num(code).astype(jnp.int8), largest, step)


def decode(x: EightBits, block: int) -> jax.Array:
    """The float32 array of `encode`.

    >>> x = jnp.array([[0.0, -1.0, 4.0]])
    >>> decode(encode(x, block=3, seed=0), block=3).tolist()
    [[0.0, -1.0, 4.0]]
    """
    codes = x.codes.astype(jnp.float32)
    log2 = _each(x.largest, block, codes) + _each(x.step, block, codes) * (jnp.abs(codes) - _LEVELS)
    unknown = ~jnp.isfinite(_each(x.largest, block, codes)) & ~jnp.isneginf(
        _each(x.largest, block, codes)
    )
    return jnp.where(unknown, jnp.nan, jnp.where(codes == 0, 0, jnp.sign(codes) * jnp.exp2(log2)))


def _blocks(x: jax.Array, block: int) -> jax.Array:
    """[..., n] -> [..., blocks, block], with zeros past the end."""
    missing = -x.shape[-1] % block
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x
    return x.reshape(*x.shape[:-1], -1, block)


def _each(of_blocks: jax.Array, block: int, x: jax.Array) -> jax.Array:
    """The value of the block of each element of x."""
    return jnp.repeat(of_blocks, block, axis=-1)[..., : x.shape[-1]]


def _uniform(shape: tuple[int, ...], seed: jax.typing.ArrayLike) -> jax.Array:
    """Numbers in [0, 1), a hash of the place of each element and the seed.

    A few integer operations, which XLA fuses into the rounding. `jax.random` would take longer.
    """
    place = jnp.zeros(shape, jnp.uint32)
    for axis, _ in enumerate(shape):
        after = math.prod(shape[axis + 1 :]) % 2**32
        place += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(after)
    x = place ^ (jnp.asarray(seed).astype(jnp.uint32) * jnp.uint32(0x9E3779B9))
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        x = (x ^ (x >> jnp.uint32(shift))) * jnp.uint32(factor)
    return (x >> jnp.uint32(8)).astype(jnp.float32) * 2.0**-24
