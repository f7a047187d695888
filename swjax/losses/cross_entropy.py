"""The cross-entropy of a language model's head, without the logits of all tokens at once."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from swjax import recipes
from swjax.kernels import dispatch, reference
from swjax.linear.api import switchback
from swjax.linear.layouts import Layout
from swjax.linear.rules import differentiated_as
from swjax.recipes import Recipe


def linear_cross_entropy(
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    *,
    chunk: int = 512,
    where: jax.Array | None = None,
    recipe: str | Recipe = "standard",
    logits_dtype: jax.typing.DTypeLike = jnp.float32,
    implementation: str | None = None,
    layout: Layout | None = None,
) -> jax.Array:
    """Mean cross-entropy of ``softmax(x w)``, computed for `chunk` positions of each sequence at a time.

    With ``l_i = x_i w``, over the tokens i that count::

        loss = mean_i (log sum_j exp l_ij - l_i,labels_i)

    The forward pass also computes the gradients of x and w, chunk by chunk, when they are needed. So each
    logit is computed once, and the largest arrays have the shapes of w and of a chunk's logits. The gradient
    of w is summed in float32. Forward-mode differentiation is not supported.

    Args:
      x: [..., t, d] float16, bfloat16 or float32, such as [b, t, d].
      w: [d, v], for example the transpose of an embedding table; its gradient has its dtype.
      labels: [..., t] integers from 0 to v - 1; a label out of range makes the loss NaN.
      chunk: largest number of positions along t whose logits [..., chunk, v] exist at a time.
      where: [..., t] booleans, the tokens that count; None counts all. x and labels of other tokens have no
        effect. Without any token the loss is 0.
      recipe: recipe of the products with w, see `swjax.switchback`.
      logits_dtype: dtype of the stored logits. The softmax is in float32 for any. bfloat16 halves the memory
        traffic and rounds each logit to 8 bits, as a head with 16-bit outputs does.
      implementation: see `swjax.kernels.dispatch`; None chooses.
      layout: shardings of x and w, see `swjax.Layout`; not needed on one device and on explicit meshes. t
        must not be sharded. Each chunk gathers w and reduces its gradient: with many devices, choose large
        chunks.

    Returns:
      A float32 scalar.

    Raises:
      ValueError: shapes or dtypes do not fit, or `chunk` is not positive.

    >>> x, w = jnp.eye(4)[None], 9.0 * jnp.eye(4)
    >>> bool(linear_cross_entropy(x, w, jnp.arange(4)[None], chunk=2) < 1e-3)
    True
    """
    _check(x, labels, where, chunk)
    tokens = x.shape[-2]
    count = max(1, math.ceil(tokens / chunk))
    where = jnp.ones(labels.shape, bool) if where is None else where
    # 8 or 16 bits may not hold v, with which labels are compared.
    labels = labels.astype(jnp.int32) if labels.dtype.itemsize < 4 else labels
    x = jnp.where(where[..., None], x, 0)
    chunks = tuple(_split(count, a, axis=labels.ndim - 1) for a in (x, labels, where))
    options: dict[str, Any] = {"recipe": recipe, "implementation": implementation, "layout": layout}
    product = partial(switchback, out_dtype=logits_dtype, **options)
    head = _Head(product, recipes.get(recipe) != Recipe(), implementation)
    return _mean(head, chunks[0], w, *chunks[1:])


def _check(x, labels, where, chunk) -> None:
    if x.ndim < 2 or labels.shape != x.shape[:-1]:
        raise ValueError(
            f"x must be [..., t, d] and labels [..., t], got {x.shape} and {labels.shape}: "
            "reshape them to the same leading axes"
        )
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(f"labels must be integers, got {labels.dtype}: cast them first")
    if where is not None and (where.shape != labels.shape or where.dtype != bool):
        raise ValueError(
            f"where must be booleans {list(labels.shape)} like labels, got {where.dtype}{list(where.shape)}"
        )
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1 position, got {chunk}")


def _split(count: int, x: jax.Array, axis: int) -> jax.Array:
    """Pads an axis with zeros and splits it into `count` equal chunks along a new leading axis."""
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, -x.shape[axis] % count)
    x = jnp.pad(x, padding)
    x = x.reshape(*x.shape[:axis], count, x.shape[axis] // count, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


class _Head(NamedTuple):
    """How the logits and their losses are computed; static.

    Attributes:
      product: (x, w) -> logits.
      is_quantized: whether the product rounds w.
      implementation: that of the losses.
    """

    product: Callable
    is_quantized: bool
    implementation: str | None

    def read(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """The w that all chunks multiply. Without quantization it is rounded once, not in each chunk."""
        return w if self.is_quantized else w.astype(x.dtype)

    def losses(self, logits, labels, where, *, gradient: bool):
        """`reference.cross_entropy`. XLA would gather sharded logits for a kernel, and partitions its own."""
        options: dict[str, Any] = {"gradient": gradient}
        implementation = "xla" if dispatch.would_gather() else self.implementation
        constants = jax.lax.stop_gradient((logits, labels, where))
        value = dispatch.run("cross_entropy", *constants, implementation=implementation, **options)
        exact = partial(reference.cross_entropy, **options)
        return differentiated_as(exact, value, logits, labels, where)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mean(head: _Head, x, w, labels, where) -> jax.Array:
    read = head.read(x, w)

    def step(loss, chunk):
        x, labels, where = chunk
        losses, _ = head.losses(head.product(x, read), labels, where, gradient=False)
        return loss + jnp.sum(losses), None

    return jax.lax.scan(step, jnp.float32(0), (x, labels, where))[0] / _count(where)


def _forward(head, x, w, labels, where):
    product, read = head.product, head.read(x, w)

    def step(carry, chunk):
        loss, dw = carry
        x, labels, where = chunk
        logits, pull_x = jax.vjp(lambda x: product(x, read), x)
        losses, d_logits = head.losses(logits, labels, where, gradient=True)
        # Nothing reads this product, so it is not computed. The gradient has the dtype of w.
        _, pull_w = jax.vjp(lambda w: product(x, w), w)
        (dx,), (d_chunk,) = pull_x(d_logits), pull_w(d_logits)
        return (loss + jnp.sum(losses), dw + d_chunk.astype(jnp.float32)), dx

    start = jnp.float32(0), jnp.zeros_like(w, jnp.float32)
    (loss, dw), dx = jax.lax.scan(step, start, (x, labels, where))
    count = _count(where)
    return loss / count, (dx, dw.astype(w.dtype), count)


def _backward(head, residuals, g):
    *gradients, count = residuals  # of the sum of the losses, so that float16 does not underflow
    dx, dw = ((g / count * d.astype(jnp.float32)).astype(d.dtype) for d in gradients)
    return dx, dw, None, None


_mean.defvjp(_forward, _backward)


def _count(where) -> jax.Array:
    return jnp.maximum(jnp.sum(where, dtype=jnp.float32), 1)
