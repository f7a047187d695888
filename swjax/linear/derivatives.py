"""Second and higher derivatives.

The recipe determines the first derivative of a layer: products of quantized operands. The derivative of
rounding is zero almost everywhere, so higher derivatives treat every product as exact. This is the
straight-through estimate: the derivatives of ``prologue(x) w + bias`` in high precision.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def differentiated_as(exact: Callable, value: Any, *operands: Any) -> Any:
    """Returns `value` with the derivatives of ``exact(*operands)``; adds no operations to the program.

    Args:
      exact: a differentiable function whose result has the structure, shapes and dtypes of `value`.
      value: a tree of arrays, computed from `jax.lax.stop_gradient` of the operands.
      operands: trees of arrays.

    >>> import jax.numpy as jnp
    >>> rounded = lambda x: differentiated_as(jnp.sin, jnp.round(jax.lax.stop_gradient(x)), x)
    >>> float(rounded(0.9)), float(jax.grad(rounded)(0.0))
    (1.0, 1.0)
    """
    del exact, operands
    return value


@differentiated_as.defjvp
def _derivative(exact, primals, tangents):
    _, tangent = jax.jvp(exact, primals[1:], tangents[1:])
    return differentiated_as(exact, *primals), tangent


def may_be_differentiated(tree: Any) -> bool:
    """Whether a transformation may differentiate with respect to any array; concrete arrays are constants."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))
