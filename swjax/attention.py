"""Multi-head attention: `jax.nn`'s implementation, or a kernel for short sequences on each device's shard."""

import operator
from functools import partial

import jax
import jax.numpy as jnp

from swjax.kernels import dispatch, targets, tiles
from swjax.linear.layouts import Layout, Spec
from swjax.linear.sharding import Sharding, is_sharded, sharding_of_heads, vary_alike

NAMES = ("xla", "cudnn", "fused")
CUDNN_MULTIPLE = 8  # cuDNN needs a multiple of this many tokens; padding is masked


def choose(
    x: jax.Array,
    heads: int,
    implementation: str | None = None,
    *,
    length: int | None = None,
    layout: Layout | None = None,
) -> str:
    """Chooses the implementation for tokens x [b, t, w]; those at positions `length` and above are padding.

    None means XLA. For 16-bit tokens on Hopper GPUs it means swjax's kernels ("fused") if they can run, and
    on other NVIDIA GPUs, cuDNN.

    Raises:
      ValueError: the heads do not divide the features of x; the kernel was requested and cannot run (the
        message says why); or the implementation does not exist.

    >>> choose(jnp.ones((1, 3, 8)), 2)
    'xla'
    """
    batch, tokens, width = x.shape
    if heads < 1 or width % heads:
        raise ValueError(f"heads must divide the {width} features of x, got {heads}: try heads=1")
    shape = (batch, length or tokens, heads, width // heads)
    return _choose(shape, x, implementation, layout)


def _choose(shape, like, implementation, layout, unsupported: str = ""):
    """Chooses for queries of the given shape, with the dtype and the mesh of the array `like`.

    `unsupported` says why swjax's kernels cannot run, "" if they can.
    """
    if implementation not in (None, *NAMES):
        raise ValueError(
            f"attention must be one of {', '.join(NAMES)} or None (automatic), got {implementation!r}"
        )
    q = jax.ShapeDtypeStruct(shape, like.dtype)
    if implementation == "fused":
        if reason := unsupported or dispatch.why_not("triton", "attention", q, q, q):
            raise ValueError(f"attention 'fused' {reason}")
    if implementation is not None:
        return implementation
    if targets.platform() != "gpu" or q.dtype.itemsize != 2:
        return "xla"
    # On Blackwell the kernels compile, but were not timed: they run there only if the caller names them.
    able = not unsupported and tiles.compute_capability() == (9, 0)
    able = able and dispatch.why_not("triton", "attention", q, q, q) is None
    if able and (is_sharded(like, layout) or not dispatch.warn_if_gathering()):
        return "fused"
    return "cudnn" if tiles.compute_capability() >= (8, 0) else "xla"


def dot_product_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    is_causal: bool = False,
    length: int | None = None,
    segment_ids: jax.Array | None = None,
    implementation: str | None = None,
    layout: Layout | None = None,
) -> jax.Array:
    """``softmax(q k^T / sqrt(d)) v`` for every head, with the softmax in float32.

    Args:
      q: [b, t, h, d].
      k, v: [b, t, h, d], or [b, t, hk, d] where h is a multiple of hk; h / hk successive heads of q then
        share a head of k and v (grouped queries).
      is_causal: each token attends to itself and the tokens before it.
      length: number of tokens that are not padding, from 1 to t; no token attends to padding. None means t.
      segment_ids: [b, t] integers, for several texts packed in a sequence: a token attends only to tokens
        with its number. The mask is an array [b, 1, t, t], in the dtype of q for cuDNN. None: one segment.
      implementation: "xla", "cudnn", or "fused", swjax's kernels for Hopper in Triton or Mosaic GPU, which
        need h heads of k and v and no segments; None chooses like `choose`. For cuDNN, tokens are padded to a
        multiple of 8.
      layout: layout of the linear layer that computed q, for meshes with automatic axes.

    Returns:
      [b, t, h, d] in the dtype of q; zeros for padding.

    Raises:
      ValueError: q, k and v do not fit or are not floating; `length` is no int or out of range;
        `segment_ids` are not integers [b, t]; or the implementation does not exist or cannot run (the message
        says why).

    >>> x = jnp.ones((1, 2, 1, 4))
    >>> dot_product_attention(x, x, x).shape
    (1, 2, 1, 4)
    >>> q = jnp.ones((1, 2, 6, 4))
    >>> dot_product_attention(q, x, x, is_causal=True, segment_ids=jnp.array([[0, 1]])).shape
    (1, 2, 6, 4)
    """
    kinds = [f"{x.dtype}{list(x.shape)}" for x in (q, k, v)]
    fits = q.ndim == k.ndim == 4 and (*q.shape[:2], q.shape[3]) == (*k.shape[:2], k.shape[3])
    fits = fits and k.shape[2] > 0 and q.shape[2] % k.shape[2] == 0
    if not fits or kinds[1] != kinds[2] or q.dtype != k.dtype:
        raise ValueError(
            "q must be [b, t, h, d], and k and v [b, t, hk, d] of its dtype where hk > 0 divides h, got "
            f"{', '.join(kinds)}: use jax.nn.dot_product_attention for other arrays"
        )
    if segment_ids is not None and (
        segment_ids.shape != q.shape[:2] or not jnp.issubdtype(segment_ids.dtype, jnp.integer)
    ):
        raise ValueError(
            f"segment_ids must be integers {list(q.shape[:2])} like the tokens of q, got "
            f"{segment_ids.dtype}{list(segment_ids.shape)}"
        )
    if not jnp.issubdtype(q.dtype, jnp.floating):  # an integer dtype would truncate the softmax
        raise ValueError(f"q, k and v must have a floating dtype, got {q.dtype}: cast them first")
    tokens = q.shape[1]
    try:
        length = tokens if length is None else operator.index(length)
    except TypeError as error:  # also for traced numbers
        raise ValueError(
            f"length must be an int, one for all sequences, got a {type(length).__name__}: for lengths in an "
            "array use jax.nn.dot_product_attention(key_value_seq_lengths=...)"
        ) from error
    if not min(1, tokens) <= length <= tokens:
        raise ValueError(f"length must be from 1 to the {tokens} tokens of q, got {length}")
    unsupported = ""
    if segment_ids is not None or q.shape != k.shape:
        unsupported = "has no grouped queries and no segments: use 'cudnn' or 'xla'"
    shape = (q.shape[0], length, *q.shape[2:])
    implementation = _choose(shape, q, implementation, layout, unsupported)
    if implementation == "fused":
        return with_kernels(q, k, v, is_causal=is_causal, length=length, layout=layout)
    mask = lengths = None
    if implementation != "cudnn" or segment_ids is not None:
        # Padding may hold anything: a weight of 0 times NaN is NaN.
        q, k, v = (x[:, :length] for x in (q, k, v))
    if implementation == "cudnn":
        q, k, v = (pad_tokens(x) for x in (q, k, v))
    if segment_ids is not None:
        mask = _mask(segment_ids[:, :length], q.shape[1])
    elif length < q.shape[1]:  # of cuDNN
        lengths = jnp.full(q.shape[0], length, jnp.int32)
    # JAX's own code promotes 16-bit queries to float32 scores, strict promotion or not.
    with jax.numpy_dtype_promotion("standard"):
        out = jax.nn.dot_product_attention(
            q,
            k,
            v,
            mask=mask,
            is_causal=is_causal,
            query_seq_lengths=lengths,
            key_value_seq_lengths=lengths,
            implementation="cudnn" if implementation == "cudnn" else "xla",
        )
    return _pad_to(tokens, out[:, : tokens if lengths is not None else length])


def _mask(segment_ids: jax.Array, tokens: int) -> jax.Array:
    """Whether tokens see each other, [b, 1, tokens, tokens]; padding sees only padding."""
    ids = jnp.pad(segment_ids, ((0, 0), (0, tokens - segment_ids.shape[1])))
    padding = jnp.arange(tokens) >= segment_ids.shape[1]
    same = ids[:, :, None] == ids[:, None, :]
    return (same & (padding[:, None] == padding[None])[None])[:, None]


def with_kernels(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    is_causal: bool = False,
    length: int | None = None,
    layout: Layout | None = None,
) -> jax.Array:
    """`dot_product_attention` with swjax's kernels, or their specification through XLA where none can run."""
    sharding = sharding_of_heads(q, layout)
    arrays = (sharding.place(x[:, :length], _heads(sharding)) for x in vary_alike(q, k, v))
    out = _attention(*arrays, is_causal, sharding)
    return _pad_to(q.shape[1], out)


def _pad_to(tokens: int, x: jax.Array) -> jax.Array:
    """Adds tokens of zeros at the end: [b, t, h, d] -> [b, tokens, h, d]."""
    return jnp.pad(x, ((0, 0), (0, tokens - x.shape[1]), (0, 0), (0, 0)))


def pad_tokens(x: jax.Array) -> jax.Array:
    """Pads x [b, t, ...] with zero tokens to a multiple of 8 tokens, which cuDNN needs."""
    padding = [(0, 0)] * x.ndim
    padding[1] = (0, -x.shape[1] % CUDNN_MULTIPLE)
    return jnp.pad(x, padding)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _attention(q, k, v, causal: bool, sharding: Sharding):
    return _forward(q, k, v, causal, sharding)[0]


def _forward(q, k, v, causal, sharding):
    step = partial(dispatch.run, "attention", causal=causal)
    heads = _heads(sharding)
    out, lse = sharding.map_shards(step, (q, k, v), (heads,) * 3, (heads, _rows(sharding)))
    return out, (q, k, v, out, lse)


def _backward(causal, sharding, residuals, gradient):
    step = partial(dispatch.run, "attention_backward", causal=causal)
    heads = _heads(sharding)
    in_specs = (*(heads,) * 4, _rows(sharding), heads)
    return sharding.map_shards(step, (*residuals, gradient), in_specs, (heads,) * 3)


_attention.defvjp(_forward, _backward)


def _heads(sharding: Sharding) -> Spec:
    """The spec of [b, t, h, d]."""
    return Spec((sharding.token_axes, (), sharding.n, ()))


def _rows(sharding: Sharding) -> Spec:
    """The spec of [b, h, t]."""
    return Spec((sharding.token_axes, sharding.n, ()))
