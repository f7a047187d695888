"""Derivatives beyond the first.

The first derivative of a layer is what its recipe says: products of quantized operands. Rounding has the
derivative zero almost everywhere, so further derivatives treat every product as if it were exact, which is
the straight-through estimate: those of ``prologue(x) w + bias`` in high precision.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def differentiated_as(exact: Callable, value: Any, *operands: Any) -> Any:
    """`value`, with the derivative of ``exact(*operands)`` by the operands; it compiles to nothing.

    Args:
      exact: a function that JAX can differentiate, whose result has the structure, shapes and dtypes of
        `value`.
      value: a tree of arrays. Compute it from `jax.lax.stop_gradient` of the operands.
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
    """Whether a transformation may differentiate by any of these arrays. Concrete arrays are constants."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))
