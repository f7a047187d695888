"""The specification of symmetric products."""

import jax
import jax.numpy as jnp


def symmetric_product(
    a: jax.Array,
    b: jax.Array,
    addend: jax.Array | None = None,
    factors: jax.Array | None = None,
    *,
    contract: int = -1,
) -> jax.Array:
    """Products a bᵀ that are nearly symmetric, made symmetric, plus terms of an addend and of the identity.

    out[i] is the lower triangle of f[i, 0] a[i] b[i]ᵀ + f[i, 1] addend[i] + f[i, 2] I, where f are the
    factors, copied to the upper triangle.

    a bᵀ is symmetric if a is b, which gives the Gram matrix of the rows of a, and if a and b are polynomials
    of one symmetric matrix. Kernels compute only the tiles on and below the diagonal.

    Args:
      a, b: [batch, m, k] of one floating-point dtype; [batch, k, m] if `contract` is -2.
      addend: [batch, m, m] of the same dtype, symmetric; None: zeros.
      factors: [batch, 3] float32; None: 1, 1 and 0.
      contract: the axis of a and b that is summed over, -1 or -2.

    Returns:
      [batch, m, m] of the dtype of a, symmetric, rounded once from float32.

    >>> x = jnp.arange(6.0).reshape(1, 2, 3)
    >>> symmetric_product(x, x).tolist()
    [[[5.0, 14.0], [14.0, 50.0]]]
    >>> symmetric_product(x, x, None, jnp.array([[1.0, 0.0, -5.0]])).tolist()
    [[[0.0, 14.0], [14.0, 45.0]]]
    """
    rows = "kij,klj->kil" if contract == -1 else "kji,kjl->kil"
    out = jnp.einsum(rows, a, b, preferred_element_type=jnp.float32)
    if factors is not None:
        out *= factors[:, 0, None, None]
    if addend is not None:
        added = addend.astype(jnp.float32)
        out += added if factors is None else factors[:, 1, None, None] * added
    if factors is not None:
        out += factors[:, 2, None, None] * jnp.eye(out.shape[-1], dtype=out.dtype)[None]
    return rounded(jnp.tril(out) + jnp.tril(out, -1).mT, a.dtype)


def rounded(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Converts to a dtype, and lets no reader see the unrounded values.

    XLA may leave out a pair of conversions, so that two readers of one array would see different values.
    """
    return jax.lax.optimization_barrier(x.astype(dtype))
