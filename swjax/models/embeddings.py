"""Table lookups with deterministic gradients.

The gradient of a lookup adds the gradients of equal indices. XLA for GPUs does so by atomic additions. Their
order varies, and with it the last bits of the sums. On GPUs the functions here sort and multiply matrices
instead, and do not support forward-mode differentiation.
"""

from functools import partial

import jax
import jax.numpy as jnp

from swjax.kernels import targets
from swjax.linear.layouts import TOKENS, Spec
from swjax.linear.sharding import Sharding, sharding_of_batch, vary_alike

CHUNK = 128  # sorted tokens whose gradients one product adds


def lookup(table: jax.Array, tokens: jax.Array, gradient_dtype: str) -> jax.Array:
    """The rows of a table, as `jnp.take` returns them.

    On GPUs the gradient sorts the tokens, so that equal tokens are neighbours, and adds the gradients of 128
    neighbours at a time by a matrix product. So a NaN or an infinity in the gradient of one token makes the
    gradients of other tokens NaN too.

    Args:
      table: [v, w].
      tokens: integers [b, ...]. Negative tokens count from the end; tokens out of range give rows of NaN.
      gradient_dtype: on GPUs, the incoming gradient is rounded to this dtype, and summed in float32.

    Returns:
      [b, ..., w], in the dtype of the table.

    >>> lookup(jnp.eye(3), jnp.array([2, 0]), "bfloat16")
    Array([[0., 0., 1.],
           [1., 0., 0.]], dtype=float32)
    """
    if targets.platform() != "gpu":
        return jnp.take(table, tokens, axis=0)
    sharding = sharding_of_batch(TOKENS, tokens, table)
    like = jax.ShapeDtypeStruct(table.shape, table.dtype)
    return _lookup(sharding, gradient_dtype, like, *vary_alike(table, tokens))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _lookup(sharding: Sharding, gradient_dtype: str, like: jax.ShapeDtypeStruct, table, tokens):
    return jnp.take(table, tokens, axis=0)


def _forward(sharding, gradient_dtype, like, table, tokens):
    return jnp.take(table, tokens, axis=0), tokens


def _backward(sharding, gradient_dtype, like, tokens, g):
    def step(tokens, g):
        rows = g.reshape(-1, g.shape[-1]).astype(gradient_dtype)
        sums = sum_by_token(rows, tokens.reshape(-1), like.shape[0])
        return sharding.sum(sums, *sharding.tokens).astype(like.dtype)

    rest = ((),) * (tokens.ndim - len(sharding.tokens))
    shards = Spec((*sharding.tokens, *rest))
    specs = shards, Spec((*shards, ()))
    return sharding.map_shards(step, (tokens, g), specs, Spec(((), ()))), None


_lookup.defvjp(_forward, _backward)


def sum_by_token(rows: jax.Array, tokens: jax.Array, count: int) -> jax.Array:
    """Sums the rows of equal tokens in float32, in an order that depends on the tokens only.

    Args:
      rows: [n, w].
      tokens: integers [n], from -count to count - 1; negative ones count from the end, and rows of others are
        dropped.
      count: number of different tokens, v.

    Returns:
      [v, w] float32, with zeros for missing tokens.

    >>> sum_by_token(jnp.array([[1.], [2.], [4.]]), jnp.array([1, 0, 1]), 3)
    Array([[2.],
           [5.],
           [0.]], dtype=float32)
    """
    n, w = rows.shape
    tokens = tokens.astype(jnp.int32)
    tokens = jnp.where(tokens < 0, tokens + count, tokens)
    order = jnp.argsort(tokens)
    padding = -n % CHUNK if n else CHUNK
    ids = jnp.pad(tokens[order], (0, padding), constant_values=count).reshape(-1, CHUNK)
    neighbours = jnp.pad(rows[order], ((0, padding), (0, 0))).reshape(-1, CHUNK, w)

    # Each row becomes the sum over the equal tokens of its chunk.
    equal = ids[:, :, None] == ids[:, None, :]
    sums = _product("cij,cjw->ciw", equal.astype(rows.dtype), neighbours)

    # Equal tokens of earlier chunks continue only in the first tokens of a chunk. Each of the earlier chunks
    # ends with them, so its last row has its sum.
    continued = ids[:, :1] == ids[None, :, -1]
    earlier = jnp.tril(continued, -1).astype(jnp.float32)
    carried = _product("ca,aw->cw", earlier, sums[:, -1])

    # The total of a token is at its last position: the sum over that chunk, and over earlier chunks if the
    # chunk starts with the token.
    flat = ids.reshape(-1)
    position = jnp.arange(flat.size)
    is_last = flat != jnp.append(flat[1:], -1)
    place = jnp.where(is_last & (flat >= 0) & (flat < count), flat, count + position)
    last = jnp.full(count, -1).at[place].set(position, mode="drop", unique_indices=True)
    exists, is_first = last >= 0, ids[last // CHUNK, 0] == jnp.arange(count)
    own = jnp.where(exists[:, None], sums.reshape(-1, w)[last], 0)
    return own + jnp.where((exists & is_first)[:, None], carried[last // CHUNK], 0)


def first_rows(table: jax.Array, order: jax.Array, count: int, gradient_dtype: str) -> jax.Array:
    """Returns ``table[order[:, :count]]``.

    On GPUs a NaN or an infinity in the gradient makes the gradient of every row NaN.

    Args:
      table: [n, w].
      order: integers [b, n], permutations of 0 to n - 1.
      count: number of rows, static.
      gradient_dtype: as for `lookup`.

    Returns:
      [b, count, w], in the dtype of the table.

    >>> first_rows(jnp.array([[1.], [2.], [3.]]), jnp.array([[2, 0, 1]]), 2, "float32")
    Array([[[3.],
            [1.]]], dtype=float32)
    """
    if targets.platform() != "gpu":
        return table[order[:, :count]]
    like = jax.ShapeDtypeStruct(table.shape, table.dtype)
    return _rows(gradient_dtype, like, *vary_alike(table, order[:, :count]))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _rows(gradient_dtype: str, like: jax.ShapeDtypeStruct, table, chosen):
    return table[chosen]


def _rows_forward(gradient_dtype, like, table, chosen):
    return table[chosen], chosen


def _rows_backward(gradient_dtype, like, chosen, g):
    equal = chosen[:, :, None] == jnp.arange(like.shape[0])[None, None]
    sums = _product("bkn,bkw->nw", equal.astype(gradient_dtype), g.astype(gradient_dtype))
    return sums.astype(like.dtype), None


_rows.defvjp(_rows_forward, _rows_backward)


def _product(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """A product with a matrix of zeros and ones: it is exact except for the float32 sums."""
    return jnp.einsum(
        equation, a, b, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
