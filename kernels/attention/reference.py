"""Softmax attention of every head, forward and backward."""

import jax
import jax.numpy as jnp

from swjax.kernels.formats import to_float32


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Softmax attention of every head.

    ``s = q k^T / sqrt(d)``, ``lse = log sum_keys exp s``, ``out = exp(s - lse) v``.

    Args:
      q, k, v: [b, t, h, d].
      causal: whether a query attends only to keys up to its own position.

    Returns:
      (out [b, t, h, d] in the dtype of q, lse float32 [b, h, t]).

    >>> q = jnp.zeros((1, 2, 1, 4))
    >>> attention(q, q, jnp.eye(2, 4)[None, :, None])[0][0, 0, 0].tolist()
    [0.5, 0.5, 0.0, 0.0]
    """
    scores = _scores(q, k, causal)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - lse[..., None])
    return _heads_product("bhqk,bkhd->bqhd", weights, v).astype(q.dtype), lse


def attention_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    gradient: jax.Array,
    *,
    causal: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes the gradients of `attention`.

    Args:
      q, k, v: arguments of `attention`, [b, t, h, d].
      out, lse: results of `attention`, [b, t, h, d] and [b, h, t].
      gradient: gradient of out, [b, t, h, d].
      causal: as in the forward pass.

    Returns:
      (dq, dk, dv), with the shapes and dtypes of q, k and v.

    >>> q = jnp.zeros((1, 2, 1, 4))
    >>> out, lse = attention(q, q, q)
    >>> attention_backward(q, q, q, out, lse, jnp.ones(q.shape))[2][0, 0, 0].tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    weights = jnp.exp(_scores(q, k, causal) - lse[..., None])
    delta = jnp.einsum("bqhd,bqhd->bhq", to_float32(out), to_float32(gradient))
    slopes = weights * (_heads_product("bqhd,bkhd->bhqk", gradient, v) - delta[..., None])
    slopes *= jnp.float32(q.shape[-1] ** -0.5)
    dq = _heads_product("bhqk,bkhd->bqhd", slopes, k)
    dk = _heads_product("bhqk,bqhd->bkhd", slopes, q)
    dv = _heads_product("bhqk,bqhd->bkhd", weights, gradient)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


def _scores(q: jax.Array, k: jax.Array, causal: bool) -> jax.Array:
    scores = _heads_product("bqhd,bkhd->bhqk", q, k) * jnp.float32(q.shape[-1] ** -0.5)
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return jnp.where(seen, scores, -jnp.inf) if causal else scores


def _heads_product(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, to_float32(a), to_float32(b), precision="highest")
