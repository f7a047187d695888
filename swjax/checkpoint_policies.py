"""Policies for `jax.checkpoint` that select by name the arrays that swjax's layers save.

JAX's own policies work as well, and save the outputs of layers: see docs/transformations.md. Those below know
the other arrays of a layer too. Each saves the quantized weights, so that recomputing a layer does not
quantize its weight again: one byte per parameter, and two on GPUs. `store_in_8_bits` stores in 8 bits what a
policy saves, and `finish_gradients` frees it earlier on several devices.
"""

import math
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from swjax.kernels import reference
from swjax.kernels.reference import QTensor

# Of the scales of tokens, int8 weight gradients need to know which tokens are padding.
_ALWAYS = ("swjax_w_q", "swjax_w_scale", "swjax_x_scale")

# Recompute everything else.
save_weights = jax.checkpoint_policies.save_only_these_names(*_ALWAYS)

# Save the int8 or fp8 activations of recipes with `save_quantized`, recompute the rest.
save_quantized = jax.checkpoint_policies.save_only_these_names(*_ALWAYS, "swjax_x_q")

# Save every linear layer's output, so that no forward product runs twice.
save_outputs = jax.checkpoint_policies.save_only_these_names(*_ALWAYS, "swjax_y")

# Save the quantized activations and the outputs.
save_linear = jax.checkpoint_policies.save_only_these_names(*_ALWAYS, "swjax_x_q", "swjax_y")

# Features. The fp32 scale of a group this small takes a quarter of the bytes of its int8 values.
_SMALLEST_GROUP = 16


def store_in_8_bits(function: Callable[..., Any], *, group: int = 128) -> Callable[..., Any]:
    """Returns `function` with a backward pass that reads activations from int8.

    The values of `function` do not change. Between the forward and the backward pass, each array
    [*tokens, ..., n] of floats is stored in int8, with a float32 scale for each token and group of features.
    This takes half of the memory of bfloat16, and two passes over the array. `tokens` are the axes of the
    first result before its last; other arrays, such as parameters, are stored as they are. With a single axis
    of tokens, the cast of a weight [tokens, n] cannot be told from an activation, and is stored in int8.

    Gradients have the error of the rounding, about 0.7% of a group of normal values. A feature much larger
    than the others of its group increases it. Derivatives of the gradients treat rounding as a constant.

    Args:
      function: a function of trees of arrays, such as a block of a model, or its `jax.checkpoint`, whose
        policy then selects what is stored. It must not refer to other arrays that are differentiated.
      group: largest number of neighbouring features that share a scale. The group of an array with n features
        is the greatest common divisor of both; arrays with a group below 16 are stored as they are.

    Raises:
      ValueError: `group` is below 16; or, in a derivative, the first result has fewer than two axes, so that
        no axis tells activations from parameters.
      TypeError: in a call, `function` changes a variable of an NNX model, such as a random counter.

    >>> layer = lambda w, x: jnp.sin(x @ w)
    >>> w, x = jnp.eye(64), jnp.ones((2, 3, 64))
    >>> gradient = jax.grad(lambda w, layer: jnp.sum(layer(w, x)))
    >>> error = gradient(w, store_in_8_bits(layer)) - gradient(w, layer)
    >>> bool(jnp.max(jnp.abs(error)) < 0.02)
    True

    References:
      Xi et al., "COAT: Compressing optimizer states and activation for memory-efficient FP8 training", 2024,
      https://arxiv.org/abs/2410.19313
    """
    if group < _SMALLEST_GROUP:
        raise ValueError(
            f"group must be at least {_SMALLEST_GROUP} features, got {group}: pass 128"
        )
    call = _unchanging(function)
    stored = jax.custom_vjp(call)

    def forward(*args):
        y, backward = jax.vjp(call, *args)
        tokens = jax.tree.leaves(y)[0].shape[:-1]
        if not tokens:
            raise ValueError(
                "store_in_8_bits needs a function whose first result is [*tokens, n], got "
                f"{jax.tree.leaves(y)[0].shape}: wrap the blocks of a model, not its loss"
            )
        # A weight [k, n] looks like the activations of k tokens.
        kept = {id(leaf) for leaf in jax.tree.leaves(args)} if len(tokens) < 2 else set()
        leaves, structure = jax.tree.flatten(backward)
        # An array that several derivatives read is stored once.
        arrays = {id(leaf): leaf for leaf in leaves}
        packed = {
            key: _pack(leaf, group) if key not in kept and _fits(leaf, tokens, group) else leaf
            for key, leaf in arrays.items()
        }
        return y, jax.tree.unflatten(structure, [packed[id(leaf)] for leaf in leaves])

    def backward(saved, g):
        # Without the barrier, XLA may dequantize in the forward pass and store the result.
        saved, g = lax.optimization_barrier((saved, g))
        is_packed = lambda leaf: isinstance(leaf, _Packed)
        return jax.tree.map(lambda a: a.unpack() if is_packed(a) else a, saved, is_leaf=is_packed)(
            g
        )

    stored.defvjp(forward, backward)
    return lambda *args, **kwargs: stored(args, kwargs)


def _unchanging(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`; a call that changes an NNX variable, which would be lost, raises a TypeError."""

    def call(args, kwargs):
        nnx = sys.modules.get("flax.nnx")
        kind = nnx.Variable if nnx else ()
        nodes = jax.tree.leaves((args, kwargs), is_leaf=lambda node: isinstance(node, kind))
        before = [(node, node.get_value()) for node in nodes if isinstance(node, kind)]
        y = function(*args, **kwargs)
        for variable, value in before:
            if variable.get_value() is not value:
                raise TypeError(
                    "store_in_8_bits needs a function that changes no variable of an NNX model, got one that "
                    f"changes a {type(variable).__name__}: pass random numbers and states as arrays, and "
                    "return new states"
                )
        return y

    return call


@jax.custom_vjp
def finish_gradients(params: Any, x: Any) -> tuple[Any, Any]:
    """Returns its arguments; in the backward pass, the gradients of x wait for those of `params`.

    On several GPUs, XLA runs the weight gradients of all blocks after the input gradients of all blocks, and
    keeps their operands until then. To limit this to one block, call the function at the input of each block,
    with the parameters of the next one. Values and gradients do not change. The next block's gradients are
    still reduced over devices while this block's are computed. Forward mode, such as `jax.jvp`, is not
    supported.

    Args:
      params: tree of arrays, the parameters of the next block.
      x: tree of arrays, the input of this block.

    >>> def model(blocks, x):
    ...     for i, w in enumerate(blocks):
    ...         if i + 1 < len(blocks):
    ...             blocks[i + 1], x = finish_gradients(blocks[i + 1], x)
    ...         x = jnp.tanh(x @ w)
    ...     return jnp.sum(x)
    >>> jax.grad(model)([jnp.eye(2), jnp.eye(2)], jnp.zeros((1, 2)))[1].tolist()
    [[0.0, 0.0], [0.0, 0.0]]
    """
    return params, x


def _wait(_, gradients: Any) -> Any:
    leaves, structure = jax.tree.flatten(gradients)
    exist = [i for i, leaf in enumerate(leaves) if leaf.dtype != jax.dtypes.float0]
    for i, leaf in zip(exist, lax.optimization_barrier([leaves[i] for i in exist]), strict=True):
        leaves[i] = leaf
    return jax.tree.unflatten(structure, leaves)


finish_gradients.defvjp(lambda params, x: ((params, x), None), _wait)


@jax.tree_util.register_pytree_node_class
class _Packed:
    """An activation in int8: values [..., n / group, group], and the shape and dtype of the array."""

    def __init__(self, q: QTensor, shape: tuple[int, ...], dtype: str):
        self.q, self.shape, self.dtype = q, shape, dtype

    def unpack(self) -> jax.Array:
        return reference.dequantize(self.q, self.dtype).reshape(self.shape)

    def tree_flatten(self):
        return (self.q,), (self.shape, self.dtype)

    @classmethod
    def tree_unflatten(cls, static, children):
        return cls(*children, *static)


def _fits(leaf: Any, tokens: tuple[int, ...], group: int) -> bool:
    if not jnp.issubdtype(leaf.dtype, jnp.floating) or leaf.dtype.itemsize not in (2, 4):
        return False
    is_activation = leaf.ndim > len(tokens) and leaf.shape[: len(tokens)] == tokens
    return is_activation and math.gcd(leaf.shape[-1], group) >= _SMALLEST_GROUP


def _pack(x: jax.Array, group: int) -> _Packed:
    size = math.gcd(x.shape[-1], group)
    groups = x.reshape(*x.shape[:-1], x.shape[-1] // size, size)
    return _Packed(reference.quantize(groups, (-1,), "int8"), x.shape, x.dtype.name)
