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
    """Products a bᵀ that are known to be symmetric, plus a symmetric array and a multiple of the identity.

    out[i] = f[i, 0] a[i] b[i]ᵀ + f[i, 1] addend[i] + f[i, 2] I, where f are the factors.

    a bᵀ is symmetric if a is b, which gives the Gram matrix of the rows of a, and if a and b are symmetric
    and commute, as polynomials of one symmetric matrix do. Kernels compute the tiles on and below the
    diagonal, and write those below to both triangles. XLA computes all. So the result is symmetric apart from
    rounding.

    Args:
      a, b: [batch, m, k] of one floating-point dtype; [batch, k, m] if `contract` is -2.
      addend: [batch, m, m] of the same dtype, symmetric; None: zeros.
      factors: [batch, 3] float32; None: 1, 0 and 0.
      contract: the axis of a and b that is summed over, -1 or -2.

    Returns:
      [batch, m, m] of the dtype of a, rounded once from float32.

    >>> x = jnp.arange(6.0).reshape(1, 2, 3)
    >>> symmetric_product(x, x).tolist()
    [[[5.0, 14.0], [14.0, 50.0]]]
    >>> symmetric_product(x, x, None, jnp.array([[1.0, 0.0, -5.0]])).tolist()
    [[[0.0, 14.0], [14.0, 45.0]]]
    """
    rows = "kij,klj->kil" if contract == -1 else "kji,kjl->kil"
    if factors is None and addend is None:
        return jnp.einsum(rows, a, b, preferred_element_type=a.dtype)
    out = jnp.einsum(rows, a, b, preferred_element_type=jnp.float32)
    if factors is None:
        factors = jnp.ones((1, 3), jnp.float32).at[:, 2].set(0)
    product, added, identity = (factors[:, i, None, None] for i in range(3))
    out *= product
    if addend is not None:
        out += added * addend.astype(jnp.float32)
    return (out + identity * jnp.eye(out.shape[-1], dtype=out.dtype)[None]).astype(a.dtype)
