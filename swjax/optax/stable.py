"""StableAdamW: AdamW that lowers the learning rate of each tensor whose second moment lags."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

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
    """The scalars of a step, as scalar arrays, because each may be traced."""

    learning_rate: jax.Array
    new1: jax.Array  # weight of the new gradient in m: 1 - b1 of Alg. 2
    new2: jax.Array  # weight of the new squared gradient in v
    eps: jax.Array
    weight_decay: jax.Array
    threshold: jax.Array

    @classmethod
    def of(cls, *numbers: jax.typing.ArrayLike) -> "Scalars":
        return cls(*(jnp.asarray(x, jnp.result_type(float)) for x in numbers))


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
      b2: in [0, 1); a lower value is steadier and slower. Or a function from the step, [] float32 starting at
        1, to c2 itself, which must be 0 at step 1: see `power_decay`.
      eps: at least 2^-126 = 1.2e-38, below which float32 is 0.
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
    _validate(learning_rate, b1, b2, eps, weight_decay, clip_threshold)
    _check_mu_dtype(mu_dtype)

    def init(params):
        params = _inexact(params)
        blocks = blocks_by_name(params, resolve_block_axes(block_axes, params))
        return StableAdamWState(
            count=jnp.zeros([], jnp.int32),
            mu=jax.tree.map(lambda p: jnp.zeros_like(p, _mu_dtype(p, mu_dtype)), params),
            nu=jax.tree.map(lambda p: jnp.zeros_like(p, _real(_compute_dtype(p))), params),
            rms=TensorValues.zeros(blocks, jnp.result_type(float)),
        )

    def update(grads, state, params=None, **extra_args):
        del extra_args
        if params is None:
            raise ValueError(
                "stable_adamw needs the parameters, got params=None: "
                "call update(grads, state, params)"
            )
        grads, params = as_arrays(grads), _inexact(params)
        count = optax.safe_increment(state.count)
        rate = rate_at("stable_adamw", learning_rate, state.count)
        new1, new2 = (_new_weight(b, count) for b in (b1, b2))
        scalars = Scalars.of(rate, new1, new2, eps, weight_decay, clip_threshold)

        treedef: jax.tree_util.PyTreeDef
        leaves, treedef = jax.tree.flatten(params)
        moments = {"first moment": state.mu, "second moment": state.nu}
        require_shapes("stable_adamw", params, {"gradient": grads, **moments})
        trees = [treedef.flatten_up_to(tree) for tree in (grads, state.mu, state.nu)]
        axes = resolve_block_axes(block_axes, params)
        steps = [
            _step(p, g, m, v, scalars, decays, kept, decoupled_lr)
            for p, g, m, v, decays, kept in zip(
                leaves, *trees, resolve_mask(mask, params), axes, strict=True
            )
        ]
        updates, mu, nu, rms = zip(*steps) if steps else ((), (), (), ())
        updates, mu, nu = (treedef.unflatten(column) for column in (updates, mu, nu))
        updates, mu = cast_like(updates, params), cast_like(mu, state.mu)
        rms = TensorValues.of(blocks_by_name(params, axes), rms, state.rms.values.dtype)
        return updates, StableAdamWState(count, mu, nu, rms)

    return optax.GradientTransformationExtraArgs(init, update)


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
    return stable_adamw(
        lambda step: -1.0,  # the update, not its negative
        b1,
        b2,
        eps,
        weight_decay=0.0,
        mask=lambda params: jax.tree.map(lambda _: False, params),
        clip_threshold=clip_threshold,
        mu_dtype=mu_dtype,
        block_axes=block_axes,
    )


def _step(p, g, m, v, scalars: Scalars, decays: bool, axes: tuple[int, ...], decoupled_lr: bool):
    """Algorithm 2 for one tensor. Returns (update, m, v, RMS of each block), not yet in stored dtypes.

    The rate needs the RMS of the whole tensor. So a compiled step makes two memory passes, and stores only v
    between them: read g, v, write v; read p, g, m, v, write p, m. That is 36 bytes per float32 parameter, the
    minimum. XLA reaches it without a kernel: 36.0 bytes on an H200, at the speed of a copy (4.3 TB/s).
    """
    dtype = _compute_dtype(p)
    s = Scalars(*(x.astype(_real(dtype)) for x in scalars))
    cast = lambda x: x.astype(dtype)  # converts real to complex for complex parameters
    p, g = cast(p), _with_finite_square(cast(g))
    squared = (g * g.conj()).real
    new_m = cast(1 - s.new1) * cast(m) + cast(s.new1) * g
    new_v = (1 - s.new2) * v + s.new2 * squared

    reduced = tuple(axis for axis in range(p.ndim) if axis not in axes)
    size = max(1, math.prod(p.shape[axis] for axis in reduced))  # an empty tensor has RMS 0
    floor = jnp.maximum(jnp.square(s.eps), jnp.finfo(dtype).tiny)  # the square may underflow
    ratio = squared / jnp.maximum(new_v, floor)
    rms = jnp.sqrt(jnp.sum(ratio, reduced, keepdims=True) / size)
    rate = s.learning_rate / jnp.maximum(1, rms / s.threshold)

    change = cast(rate / (jnp.sqrt(new_v) + s.eps)) * new_m
    if decays:
        change += cast((s.learning_rate if decoupled_lr else rate) * s.weight_decay) * p
    return -change, new_m, new_v, jnp.squeeze(rms, reduced)


def _with_finite_square(g):
    """Limits finite entries to half of the largest exponent: 2^63 = 9.2e18 in float32. Inf and NaN stay."""
    if jnp.iscomplexobj(g):
        return jax.lax.complex(_with_finite_square(g.real), _with_finite_square(g.imag))
    limit = 2.0 ** (jnp.finfo(g.dtype).maxexp // 2 - 1)
    return jnp.where(jnp.isfinite(g), jnp.clip(g, -limit, limit), g)


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
    """1 - b_i of Alg. 2: the weight of the new gradient in a moment."""
    if callable(b):
        return 1 - b(count.astype(jnp.result_type(float)))
    return one_minus_power(b, 1) / one_minus_power(b, count)


def one_minus_power(b: jax.typing.ArrayLike, t: jax.typing.ArrayLike) -> jax.Array:
    """1 - b^t, accurate even if b^t is near 1, where the subtraction would lose digits.

    With it, the weight of the new gradient in Alg. 2, 1 - b_i, is (1 - b) / (1 - b^t).

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


def _check_mu_dtype(mu_dtype):
    if isinstance(mu_dtype, jax.Array):
        raise ValueError(
            f"stable_adamw's mu_dtype must be a dtype, got the array {mu_dtype}: under "
            "optax.inject_hyperparams add 'mu_dtype' to static_args"
        )
    if mu_dtype is not None and not jnp.issubdtype(mu_dtype, jnp.inexact):
        raise ValueError(
            f"stable_adamw's mu_dtype must be a floating dtype, got {jnp.dtype(mu_dtype)}, which would "
            "truncate the first moment: pass 'bfloat16', or None for that of the parameters"
        )


def _mu_dtype(p, mu_dtype):
    same_kind = mu_dtype and jnp.iscomplexobj(p) == jnp.issubdtype(mu_dtype, jnp.complexfloating)
    if same_kind:
        return mu_dtype
    return jnp.dtype(jnp.float32) if p.dtype == jnp.float16 else p.dtype


def _validate(learning_rate, b1, b2, eps, weight_decay, clip_threshold):
    """Checks the concrete values; traced values and functions of the step are not checked."""
    require = functools.partial(require_number, "stable_adamw")
    require_learning_rate("stable_adamw", learning_rate)
    require("b1", b1, lambda x: 0 <= x < 1, "in [0, 1)")
    if not callable(b2):
        require("b2", b2, lambda x: 0 <= x < 1, "in [0, 1)")
    rule = "at least 2^-126 (1.2e-38); below it float32 is 0, and a zero gradient gives 0/0"
    require("eps", eps, lambda x: float(x) >= 2.0**-126, rule)
    require("weight_decay", weight_decay, lambda x: x >= 0, "at least 0")
    require("clip_threshold", clip_threshold, lambda x: x > 0, "positive")
    if callable(b2) or any(isinstance(x, jax.core.Tracer) for x in (b2, clip_threshold)):
        return
    if never_clips(clip_threshold, b2) and clip_threshold < math.inf:
        raise ValueError(
            f"stable_adamw's clip_threshold={clip_threshold} never clips: at b2={b2} the RMS stays below "
            f"{largest_rms(b2):.4g}. Lower it, or pass math.inf for no clipping"
        )


def require_number(
    optimizer: str, name: str, value: Any, holds: Callable[[Any], bool], rule: str
) -> None:
    """Raises a ValueError unless a hyper-parameter is traced, or a number for which `holds` is true."""
    if isinstance(value, jax.core.Tracer):
        return
    number = isinstance(value, int | float) or (hasattr(value, "dtype") and np.ndim(value) == 0)
    if not number or not holds(value):
        raise ValueError(f"{optimizer}'s {name} must be {rule}, got {value!r}")


def rate_at(
    optimizer: str, learning_rate: optax.ScalarOrSchedule, count: jax.Array
) -> jax.typing.ArrayLike:
    """Returns the learning rate after `count` steps.

    Raises:
      ValueError: it is not a scalar, and would broadcast along the last axes of each parameter.
    """
    rate = learning_rate(count) if callable(learning_rate) else learning_rate
    if jnp.ndim(rate):
        raise ValueError(
            f"{optimizer}'s learning_rate must be a scalar, got the shape {jnp.shape(rate)}"
        )
    return rate


def require_learning_rate(optimizer: str, learning_rate: Any) -> None:
    """Raises a ValueError unless the learning rate is a schedule, an array or a number of at least 0."""
    # Under optax.inject_hyperparams an array may be the value of a schedule, rounded below 0.
    if not callable(learning_rate) and not isinstance(learning_rate, jax.Array):
        rule = "a schedule, or a finite number that is at least 0"
        holds = lambda x: 0 <= x < math.inf
        require_number(optimizer, "learning_rate", learning_rate, holds, rule)


def largest_rms(b2: float) -> float:
    """The bound of RMS at a constant b2."""
    return math.sqrt(1 / (1 - b2))


def never_clips(clip_threshold: float, b2: float) -> bool:
    """Whether RMS never exceeds the threshold at a constant b2."""
    return clip_threshold > largest_rms(b2) * (1 + 1e-6)
