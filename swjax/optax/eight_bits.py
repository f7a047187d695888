"""Moments of optimizers in 8 bits."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from swjax.optax.checks import require_transformation
from swjax.optax.codes import (
    BLOCK,
    EightBitMomentsState,
    EightBits,
    Ranges,
    decode,
    encode,
    has_eight_bits,
)
from swjax.optax.scaling import PerTensorGuardState
from swjax.optax.stable import StableAdamWState
from swjax.optax.tensors import join

# Smaller arrays stay as they are: their moments need little memory.
_SMALLEST_SIZE = 4096
_SHORTEST_AXIS = 64


def eight_bit_moments(
    optimizer: optax.GradientTransformation,
    fields: Sequence[str] = ("mu", "nu"),
) -> optax.GradientTransformationExtraArgs:
    """Stores the moments of an optimizer in 8 bits between updates.

    A moment takes 1.06 bytes an element in place of 4. Each block of 128 elements of the last axis has its
    own range, from its smallest to its largest magnitude, which 127 magnitudes cover in nearly equal ratios.
    For ranges of 10^3 and 10^6 these are 1.04 to 1.08 and 1.08 to 1.16. Rounding to them is stochastic and
    unbiased, so that averages move even if one update changes them by less than a ratio. An element that is
    not 0 does not become 0, so no second moment vanishes under a first one. Rounding depends on the number of
    updates and the place of an element only, so a resumed run has the same bits, as has every sharding.

    Wrap it around `per_tensor_guard`, not inside: the guard restores moments tensor by tensor.

    An update of `stable_adamw` takes about as long on an H200 as with float32 moments. Wrappers between the
    two see `EightBits` in place of its moments, except for `per_tensor_guard`. XLA writes the decoded moments
    of other optimizers as temporary arrays, which takes longer than with float32 moments: for AdamW use
    `stable_adamw(clip_threshold=math.inf)`. The loss of large models was not studied in this project.

    Codes have the shape and the place of their moment, so rules for the sharding of parameters fit them. The
    ranges, 0.06 bytes an element, are replicated.

    Args:
      optimizer: for example `stable_adamw`, `muon` or `optax.adamw`.
      fields: names of the fields of the optimizer's states whose arrays are moments. The names are those of
        `swjax.optax` and of optax's Adam, Lion, RMSProp and Muon. Do not name copies of parameters.

    Returns:
      An `optax.GradientTransformationExtraArgs`. Arrays of fewer than 4,096 elements, with a last axis below
      64, or of 64 bits stay as they are.

    Raises:
      TypeError: `optimizer` is not a transformation.
      ValueError: `fields` is empty or a single string, or the state of the optimizer has none of the fields
        or has moments in 8 bits already.

    >>> params = {"w": jnp.ones((64, 128))}
    >>> optimizer = eight_bit_moments(optax.adam(1e-3))
    >>> state = optimizer.init(params)
    >>> print(state.inner[0].nu["w"].dtype, state.block_ranges.shape)
    int8 (2, 128)

    References:
      Dettmers et al., "8-bit optimizers via block-wise quantization", 2021, https://arxiv.org/abs/2110.02861.
      Xi et al., "COAT", 2024, https://arxiv.org/abs/2410.19313: a range of its own for each block.
    """
    if isinstance(fields, str) or not fields:
        raise ValueError(
            f"eight_bit_moments's fields must be names of fields, got {fields!r}: pass a tuple such as "
            "('mu', 'nu')"
        )
    optimizer = require_transformation("eight_bit_moments", "optimizer", optimizer)

    def encoded(inner: optax.OptState, count: jax.Array) -> EightBitMomentsState:
        is_encoded = lambda x: isinstance(x, EightBits)
        named, structure = jax.tree_util.tree_flatten_with_path(inner, is_leaf=is_encoded)
        has_field = lambda node: not set(fields).isdisjoint(getattr(node, "_fields", ()))
        if not any(map(has_field, jax.tree.leaves(inner, is_leaf=has_field))):
            raise ValueError(
                f"eight_bit_moments finds none of the fields {', '.join(fields)} in the state "
                f"{type(inner).__name__}: name those of its moments in `fields`"
            )
        leaves, found = [], []
        for number, (path, x) in enumerate(named):
            if not is_encoded(x) and _is_in(path, fields) and _fits(x):
                x = encode(x, seed=count * len(named) + number)
            if is_encoded(x):
                found.append(x)
                x = x.codes
            leaves.append(x)
        ranges = [join([x[i] for x in found], jnp.int32) for i in (1, 2)]
        return EightBitMomentsState(count, jax.tree.unflatten(structure, leaves), jnp.stack(ranges))

    def init(params):
        # Without the barrier, XLA would round the zeros while it compiles.
        inner = jax.lax.optimization_barrier(optimizer.init(params))
        if has_eight_bits(inner):
            raise ValueError(
                "eight_bit_moments needs an optimizer with float moments, got one that eight_bit_moments "
                "wraps already: remove one of the two"
            )
        return encoded(inner, jnp.zeros([], jnp.int32))

    def update(grads, state, params=None, **extra_args):
        inner = _decoded(_with_ranges(state), StableAdamWState)
        updates, inner = optimizer.update(grads, inner, params, **extra_args)
        return updates, encoded(inner, optax.safe_increment(state.count))

    return optax.GradientTransformationExtraArgs(init, update)


def decoded_moments(opt_state: optax.OptState) -> optax.OptState:
    """A state with float32 arrays in place of moments in 8 bits, for functions that read moments.

    Args:
      opt_state: any state that contains that of `eight_bit_moments`, or none in 8 bits.

    Raises:
      ValueError: the state is that of an ensemble, with several counts.
    """

    def decoded(state):
        if not isinstance(state, EightBitMomentsState):
            return state
        if jnp.ndim(state.count):
            raise ValueError(
                f"moments in 8 bits must have a single step count, got {jnp.shape(state.count)}: decode the "
                "states of an ensemble under jax.vmap"
            )
        return state._replace(inner=_decoded(_with_ranges(state)))

    return jax.tree.map(decoded, opt_state, is_leaf=lambda x: isinstance(x, EightBitMomentsState))


def _with_ranges(state: EightBitMomentsState) -> optax.OptState:
    """The state of the optimizer, with `EightBits` in place of codes."""
    leaves, structure = jax.tree.flatten(state.inner)
    start = 0
    for number, x in enumerate(leaves):
        if x.dtype == jnp.int8 and _is_large(x):
            shape = (*x.shape[:-1], -(-x.shape[-1] // BLOCK))
            stop = start + math.prod(shape)
            ranges = Ranges(*(of[start:stop].reshape(shape) for of in state.block_ranges))
            leaves[number] = EightBits(x, *ranges)
            start = stop
    return jax.tree.unflatten(structure, leaves)


def _decoded(inner: optax.OptState, *kept: type) -> optax.OptState:
    """Decodes `EightBits`, except inside states of the types `kept` that no guard restores."""

    def decoded(x):
        if isinstance(x, PerTensorGuardState):
            return x._replace(inner=_decoded(x.inner))
        return decode(x) if isinstance(x, EightBits) else x

    special = (EightBits, PerTensorGuardState, *kept)
    return jax.tree.map(decoded, inner, is_leaf=lambda x: isinstance(x, special))


def _is_in(path: tuple[Any, ...], fields: Sequence[str]) -> bool:
    """Whether a leaf is inside one of the fields of a named tuple."""
    return any(isinstance(k, jax.tree_util.GetAttrKey) and k.name in fields for k in path)


def _fits(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize <= 4 and _is_large(x)


def _is_large(x: Any) -> bool:
    return x.size >= _SMALLEST_SIZE and x.shape[-1] >= _SHORTEST_AXIS
