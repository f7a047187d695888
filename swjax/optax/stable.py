"""StableAdamW: AdamW that lowers the learning rate of each tensor whose second moment lags."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from swjax.optax.checks import rate_at, require_dtype, require_learning_rate, require_number
from swjax.optax.codes import EightBits, Ranges, decode, encode, ranges_of
from swjax.optax.tensors import (
    TensorValues,
    as_arrays,
    blocks_by_name,
    cast_like,
    path_name,
    require_shapes,
    resolve_block_axes,
    resolve_mask,
)


class StableAdamWState(NamedTuple):
    """State of `stable_adamw`. Both moments are stored debiased.

    Attributes:
      count: [] int32, number of steps taken.
      mu: first moment m, like the parameters, in `mu_dtype`.
      nu: second moment v, like the parameters, real, float32 (float64 for float64 parameters).
      rms: float32 (float64 with `jax_enable_x64`), RMS of the last step; read it with `rms_by_path`.
    """

    count: jax.Array  # type: ignore[assignment]  # hides tuple.count, as in optax's states
    mu: optax.Updates
    nu: optax.Updates
    rms: TensorValues


class Scalars(NamedTuple):
    """The numbers of a step, [] arrays. Each may be traced."""

    learning_rate: jax.Array
    new1: jax.Array  # 1 - c1, the weight of the new gradient in m
    new2: jax.Array  # 1 - c2, the weight of the new squared gradient in v
    eps: jax.Array
    weight_decay: jax.Array
    threshold: jax.Array


def algorithm_2(
    p: jax.Array,
    g: jax.Array,
    m: jax.Array,
    v: jax.Array,
    s: Scalars,
    *,
    reduced: tuple[int, ...],
    decays: bool,
    decoupled: bool,
    rms: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """One step of the paper's algorithm 2 for one tensor, in the notation of `stable_adamw`.

    Args:
      p, g, m, v: parameter, gradient and moments; v is real.
      s: the numbers of the step.
      reduced: the axes over which RMS is a mean: all, except those that enumerate blocks.
      decays: whether the parameter decays.
      decoupled: whether the decay uses the unclipped rate.
      rms: RMS, if it is known.

    Returns:
      (what to subtract from p, m, v, RMS with size 1 along `reduced`).
    """
    like = lambda x: x.astype(p.dtype)  # converts real to complex for complex parameters
    squared = (g * g.conj()).real
    m = like(1 - s.new1) * m + like(s.new1) * g
    v = (1 - s.new2) * v + s.new2 * squared
    rms = rms_of(squared, v, s.eps, reduced) if rms is None else rms
    rate = s.learning_rate / jnp.maximum(1, rms / s.threshold)
    change = like(rate / (jnp.sqrt(v) + s.eps)) * m
    if decays:
        change += like((s.learning_rate if decoupled else rate) * s.weight_decay) * p
    return change, m, v, rms


def rms_of(squared: jax.Array, v: jax.Array, eps: jax.Array, reduced: tuple[int, ...]) -> jax.Array:
    """sqrt(mean(squared / max(v, eps^2))), with size 1 along the axes `reduced`; 0 for an empty tensor."""
    return _root_mean(rms_terms(squared, v, eps), v.shape, reduced)


def rms_terms(squared: jax.Array, v: jax.Array, eps: jax.Array) -> jax.Array:
    """The numbers whose mean is the square of RMS."""
    floor = jnp.maximum(jnp.square(eps), jnp.finfo(v.dtype).tiny)  # the square may underflow
    return squared / jnp.maximum(v, floor)


def _root_mean(terms: jax.Array, shape: tuple[int, ...], reduced: tuple[int, ...]) -> jax.Array:
    """The root of the mean over the axes `reduced` of an array of this shape; `terms` may be partial sums."""
    size = max(1, math.prod(shape[axis] for axis in reduced))
    return jnp.sqrt(jnp.sum(terms, reduced, keepdims=True) / size)


def stable_adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike | Callable[[jax.Array], jax.Array] = 0.99,
    eps: jax.typing.ArrayLike = 1e-6,
    weight_decay: jax.typing.ArrayLike = 1e-4,
    mask: Any | Callable[[optax.Params], Any] | None = None,
    *,
    clip_threshold: jax.typing.ArrayLike = 1.0,
    mu_dtype: jax.typing.DTypeLike | None = None,
    block_axes: Any | Callable[[optax.Params], Any] | None = None,
    decoupled_lr: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """AdamW with AdaFactor's update clipping.

    For every tensor separately, with gradient g at step t = 1, 2, ...::

      c1   = b1 (1 - b1^(t-1)) / (1 - b1^t)          and c2 from b2 in the same way
      m    = c1 m + (1 - c1) g
      v    = c2 v + (1 - c2) |g|^2
      RMS  = sqrt(mean(|g|^2 / max(v, eps^2)))
      rate = learning_rate / max(1, RMS / clip_threshold)
      p    = p - rate weight_decay p - rate m / (sqrt(v) + eps)

    RMS is near 1 while v matches the squared gradients, and rises when they outgrow v; the steps of plain
    AdamW are then too large. RMS never exceeds sqrt(1 / (1 - b2)).

    Finite gradients above 2^63 = 9.2e18 (2^511 in float64) count as this value, so that their squares are
    finite. A gradient with Inf or NaN makes its parameter NaN: see `per_tensor_guard`.

    Statistics span whole arrays under jit, for every sharding. Inside `jax.shard_map` an array is the local
    shard, and so its RMS would be local: update the parameters outside `jax.shard_map`.

    Under `optax.inject_hyperparams` every number may be traced. List the other arguments that you pass in
    `static_args`: "mask", "mu_dtype", "block_axes", and "b2" if it is a function. For parameters below
    float32 add `hyperparam_dtype=jnp.float32`, because b2 = 0.999 rounds to 1 in bfloat16.

    Args:
      learning_rate: a number, at least 0, or a schedule of the number of previous steps.
      b1: in [0, 1).
      b2: in [0, 1); in the paper, lower values have fewer spikes and train more slowly. Or a function from
        the step, [] float32 starting at 1, to c2 itself, which must be 0 at step 1: see `power_decay`.
      eps: at least 2^-126 = 1.2e-38, the smallest normal float32; XLA may flush smaller numbers to 0.
      weight_decay: at least 0; multiplied by the learning rate. Its default is that of `optax.adamw`, because
        the paper's 0.2 assumes a mask without decay of 1-D parameters. The other defaults are the paper's.
      mask: the decayed parameters: a tree of bools like the parameters, a prefix of it, or a function from
        the parameters to such a tree. A single bool is refused. Default: all parameters.
      clip_threshold: above 0. `math.inf` turns clipping off, which gives AdamW; any other value above the
        bound of RMS would never clip, and raises an error.
      mu_dtype: dtype of the stored m; default the parameter's dtype, and float32 for float16, whose range
        is too small for the m of small gradients. A complex parameter keeps a complex m.
      block_axes: for parameters that stack several tensors, such as the layers of a scanned model, the
        axis or axes that enumerate them: None, an int or a tuple of ints, as a tree like `mask`. Each
        block has its own RMS and rate. A tuple of ints always means axes, never a node of the tree.
      decoupled_lr: whether the decay uses the unclipped rate: p - learning_rate weight_decay p. Divide
        weight_decay by the peak of the schedule for the fully decoupled decay of other libraries.

    Returns:
      An `optax.GradientTransformationExtraArgs`. Updates have the dtype of the parameters.

    Raises:
      ValueError: a hyper-parameter is not a scalar or out of range (unless traced), a parameter lacks a block
        axis or is an integer array, the mask is a single bool, an update receives no parameters, or a
        gradient or moment has another shape than its parameter.

    >>> params = {"w": jnp.array([1.0, -2.0, 3.0])}
    >>> optimizer = stable_adamw(learning_rate=0.1)
    >>> state = optimizer.init(params)
    >>> loss = lambda params: jnp.sum(params["w"] ** 2)
    >>> for _ in range(60):
    ...     updates, state = optimizer.update(jax.grad(loss)(params), state, params)
    ...     params = optax.apply_updates(params, updates)
    >>> bool(loss(params) < 0.1)
    True

    References:
      Wortsman et al., "Stable and low-precision training for large-scale vision-language models", 2023,
      https://arxiv.org/abs/2304.13013, algorithm 2.
      Shazeer and Stern, "Adafactor", 2018, https://arxiv.org/abs/1804.04235, section 6: update clipping.
    """
    require_learning_rate("stable_adamw", learning_rate)
    require_number("stable_adamw", "weight_decay", weight_decay, lambda x: x >= 0, "at least 0")
    adam = scale_by_stable_adam(
        b1, b2, eps, clip_threshold=clip_threshold, mu_dtype=mu_dtype, block_axes=block_axes
    )

    def update(grads, state, params=None, **extra_args):
        del extra_args
        rate = rate_at("stable_adamw", learning_rate, state.count)
        descent = Descent(rate, weight_decay, mask, decoupled_lr)
        changes, state = adam.update(grads, state, params, descent=descent)
        return jax.tree.map(jnp.negative, changes), state

    return optax.GradientTransformationExtraArgs(adam.init, update)


class Descent(NamedTuple):
    """What `stable_adamw` adds to `scale_by_stable_adam`: the rate of this step, and its decay arguments."""

    learning_rate: jax.typing.ArrayLike = 1.0
    weight_decay: jax.typing.ArrayLike = 0.0
    mask: Any = lambda params: jax.tree.map(lambda _: False, params)
    decoupled_lr: bool = False


def scale_by_stable_adam(
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike | Callable[[jax.Array], jax.Array] = 0.99,
    eps: jax.typing.ArrayLike = 1e-6,
    *,
    clip_threshold: jax.typing.ArrayLike = 1.0,
    mu_dtype: jax.typing.DTypeLike | None = None,
    block_axes: Any | Callable[[optax.Params], Any] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """`stable_adamw` without learning rate and weight decay, in place of `optax.scale_by_adam` in a chain.

    The update of a tensor is m / (sqrt(v) + eps) / max(1, RMS / clip_threshold). A weight decay that a chain
    adds is not shortened with the step, as with `stable_adamw(decoupled_lr=True)`.

    Args:
      b1, b2, eps, clip_threshold, mu_dtype, block_axes: see `stable_adamw`.

    Returns:
      An `optax.GradientTransformationExtraArgs`, whose state is a `StableAdamWState`.

    Raises:
      ValueError: see `stable_adamw`.

    >>> chain = optax.chain(
    ...     scale_by_stable_adam(), optax.add_decayed_weights(0.1), optax.scale_by_learning_rate(1e-3)
    ... )
    >>> params = jnp.array([1.0, -2.0])
    >>> updates, _ = chain.update(params, chain.init(params), params)
    >>> [round(float(u), 6) for u in updates]
    [-0.0011, 0.0012]
    """
    _check(b1, b2, eps, clip_threshold, mu_dtype)
    unscaled = Descent()

    def init(params):
        params = _inexact(params)
        blocks = blocks_by_name(params, resolve_block_axes(block_axes, params))
        return StableAdamWState(
            count=jnp.zeros([], jnp.int32),
            mu=jax.tree.map(lambda p: jnp.zeros_like(p, _mu_dtype(p, mu_dtype)), params),
            nu=jax.tree.map(lambda p: jnp.zeros_like(p, _real(_compute_dtype(p))), params),
            rms=TensorValues.zeros(blocks, jnp.result_type(float)),
        )

    def update(grads, state, params=None, *, descent: Descent = unscaled, **extra_args):
        del extra_args
        if params is None:
            raise ValueError(
                "stable_adamw needs the parameters, got params=None: "
                "call update(grads, state, params)"
            )
        grads, params = as_arrays(grads), _inexact(params)
        moments = {"first moment": state.mu, "second moment": state.nu}
        require_shapes("stable_adamw", params, {"gradient": grads, **moments})
        count = optax.safe_increment(state.count)
        new1, new2 = (_new_weight(b, count) for b in (b1, b2))
        rate, decay, mask, decoupled = descent
        numbers = (rate, new1, new2, eps, decay, clip_threshold)
        s = Scalars(*(jnp.asarray(x, jnp.result_type(float)) for x in numbers))

        treedef: jax.tree_util.PyTreeDef = jax.tree.structure(params)
        columns = [treedef.flatten_up_to(tree) for tree in (params, grads, state.mu, state.nu)]
        axes, masks = resolve_block_axes(block_axes, params), resolve_mask(mask, params)
        results = [
            _step(
                p, g, m, v, s, own_axes, count * len(axes) + i, decays=decays, decoupled=decoupled
            )
            for i, (p, g, m, v, own_axes, decays) in enumerate(
                zip(*columns, axes, masks, strict=True)
            )
        ]
        changes, mu, nu, rms = zip(*results) if results else ((), (), (), ())
        changes, mu, nu = (treedef.unflatten(column) for column in (changes, mu, nu))
        changes, mu = cast_like(changes, params), cast_like(mu, state.mu)
        rms = TensorValues.of(blocks_by_name(params, axes), rms, state.rms.values.dtype)
        return changes, StableAdamWState(count, mu, nu, rms)

    return optax.GradientTransformationExtraArgs(init, update)


def _step(p, g, m, v, s: Scalars, block_axes: tuple[int, ...], seed, *, decays, decoupled):
    """`algorithm_2` in at least float32; returns the change, m, v and the RMS of each block in that dtype.

    The rate needs the RMS of the whole tensor. So a compiled step makes two memory passes, and stores only v
    between them: read g, v, write v; read p, g, m, v, write p, m. That is 36 bytes per float32 parameter, the
    minimum. XLA reaches it without a kernel: 36.0 bytes on an H200, at the speed of a copy (4.3 TB/s).

    Moments in 8 bits take two passes, which both decode them: read g, m, v for RMS and the ranges of the new
    moments; read p, g, m, v, write p, m, v. That is 23 bytes. Without the barriers XLA would compute the new
    moments once, and store them in float32; so it would v, if RMS and the range of v read the same one.
    """
    dtype = _compute_dtype(p)
    s = Scalars(*(x.astype(_real(dtype)) for x in s))
    reduced = tuple(axis for axis in range(p.ndim) if axis not in block_axes)
    p, g = p.astype(dtype), _with_finite_square(g.astype(dtype))

    def step(m, v, rms=None):
        m, v = (decode(x) if isinstance(x, EightBits) else x for x in (m, v))
        options = {"reduced": reduced, "decays": decays, "decoupled": decoupled}
        return algorithm_2(p, g, m.astype(dtype), v, s, rms=rms, **options)

    rms: jax.Array | None = None
    ranges: Sequence[Ranges | None] = (None, None)
    if isinstance(m, EightBits) and isinstance(v, EightBits) and p.ndim - 1 in reduced:
        _, new_m, new_v, _ = step(m, v)
        _, _, same_v, _ = step(*jax.lax.optimization_barrier((m, v)))
        ranges, (sums,) = ranges_of(new_m, new_v, summed=[rms_terms(g * g, same_v, s.eps)])
        rms = _root_mean(sums, p.shape, reduced)
        m, v, rms, ranges = jax.lax.optimization_barrier((m, v, rms, ranges))
    change, *new, rms = step(m, v, rms)
    # In the form of the old ones: `optax.MultiSteps` and others select between the two.
    m, v = (
        encode(x, seed, ranges[half], half) if isinstance(old, EightBits) else x
        for half, (old, x) in enumerate(zip((m, v), new))
    )
    return change, m, v, jnp.squeeze(rms, reduced)


def _with_finite_square(g):
    """Limits finite entries to half of the largest exponent: 2^63 = 9.2e18 in float32. Inf and NaN stay."""
    if jnp.iscomplexobj(g):
        return jax.lax.complex(_with_finite_square(g.real), _with_finite_square(g.imag))
    limit = 2.0 ** (jnp.finfo(g.dtype).maxexp // 2 - 1)
    return jnp.where(jnp.isfinite(g), jnp.clip(g, -limit, limit), g)


def _inexact(params):
    """The parameters as arrays; raises an error for integer arrays."""
    params = as_arrays(params)
    for path, p in jax.tree_util.tree_leaves_with_path(params):
        if not jnp.issubdtype(p.dtype, jnp.inexact):
            raise ValueError(
                f"stable_adamw updates real and complex parameters, {path_name(path)!r} is {p.dtype}: "
                f"cast it, or exclude it with optax.masked"
            )
    return params


def _compute_dtype(p):
    return p.dtype if jnp.finfo(p.dtype).bits >= 32 else jnp.dtype(jnp.float32)


def _real(dtype):
    return jnp.finfo(dtype).dtype


def _mu_dtype(p, mu_dtype):
    same_kind = mu_dtype and jnp.iscomplexobj(p) == jnp.issubdtype(mu_dtype, jnp.complexfloating)
    if same_kind:
        return mu_dtype
    return jnp.dtype(jnp.float32) if p.dtype == jnp.float16 else p.dtype


def power_decay(exponent: float) -> Callable[[jax.Array], jax.Array]:
    """The schedule c2 = 1 - t^-exponent for `stable_adamw(b2=...)`.

    v averages over few steps at first, and over more and more later; RMS stays below t^(exponent / 2).

    Args:
      exponent: in (0, 1]. The paper tried 0.45, 0.5 and 0.65 and found no gain; 1 averages all steps.

    Raises:
      ValueError: the exponent is out of range.

    >>> [round(float(power_decay(0.5)(jnp.float32(t))), 3) for t in (1, 4, 100)]
    [0.0, 0.5, 0.9]

    References:
      Shazeer and Stern, "Adafactor", 2018, https://arxiv.org/abs/1804.04235, section 7.2.
    """
    if not 0 < exponent <= 1:
        raise ValueError(f"power_decay's exponent must be in (0, 1], got {exponent}")

    def schedule(t):
        if isinstance(t, jax.Array) and jnp.issubdtype(t.dtype, jnp.integer):
            raise ValueError(
                f"power_decay's step must be a float, counted from 1, got {t.dtype}: under "
                "optax.inject_hyperparams add 'b2' to static_args, or optax calls it as a schedule"
            )
        return 1 - t**-exponent

    return schedule


def _new_weight(b, count) -> jax.Array:
    """1 - c1 or 1 - c2: the weight of the new gradient in a moment."""
    if callable(b):
        return 1 - b(count.astype(jnp.result_type(float)))
    return one_minus_power(b, 1) / one_minus_power(b, count)


def one_minus_power(b: jax.typing.ArrayLike, t: jax.typing.ArrayLike) -> jax.Array:
    """1 - b^t, accurate even if b^t is near 1, where the subtraction would lose digits.

    With it, 1 - c1 of `stable_adamw` is (1 - b1) / (1 - b1^t).

    Args:
      b: [] in [0, 1), traced or not.
      t: [] integer.

    >>> f"{one_minus_power(0.999999, 3):.4g}"  # the subtraction gives 3.04e-06 in float32
    '3e-06'
    """
    dtype = jnp.result_type(float)
    tiny = float(jnp.finfo(dtype).tiny)  # for b = 0, log(0) * 0 would be NaN
    log_b: float | jax.Array
    if isinstance(b, jax.Array):
        log_b = jnp.log(jnp.maximum(b.astype(dtype), tiny))
    else:  # in double precision, because 0.999999 is not a float32
        log_b = math.log(max(float(np.asarray(b)), tiny))
    return -jnp.expm1(jnp.asarray(t, dtype) * log_b)


def _check(b1, b2, eps, clip_threshold, mu_dtype) -> None:
    """Checks the concrete values; traced values and functions of the step are not checked."""
    require = functools.partial(require_number, "stable_adamw")
    require("b1", b1, lambda x: 0 <= x < 1, "in [0, 1)")
    if not callable(b2):
        require("b2", b2, lambda x: 0 <= x < 1, "in [0, 1)")
    rule = (
        "at least 2^-126 (1.2e-38), the smallest normal float32: a smaller eps may be flushed to 0, and a "
        "zero gradient then gives 0/0"
    )
    require("eps", eps, lambda x: float(x) >= 2.0**-126, rule)
    require("clip_threshold", clip_threshold, lambda x: x > 0, "positive")
    if mu_dtype is not None:
        require_dtype("stable_adamw", "mu_dtype", mu_dtype, jnp.inexact)
    if callable(b2) or any(isinstance(x, jax.core.Tracer) for x in (b2, clip_threshold)):
        return
    if never_clips(clip_threshold, b2) and clip_threshold < math.inf:
        raise ValueError(
            f"stable_adamw's clip_threshold={clip_threshold} never clips: at b2={b2} the RMS stays below "
            f"{largest_rms(b2):.4g}. Lower it, or pass math.inf for no clipping"
        )


def largest_rms(b2: float) -> float:
    """The bound of RMS at a constant b2."""
    return math.sqrt(1 / (1 - b2))


def never_clips(clip_threshold: float, b2: float) -> bool:
    """Whether RMS never exceeds the threshold at a constant b2."""
    return clip_threshold > largest_rms(b2) * (1 + 1e-6)
