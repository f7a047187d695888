"""The specification of products of rows that are sorted by group: the layers of experts."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import RaggedDotDimensionNumbers

from swjax.kernels import targets
from swjax.kernels.formats import QTensor, to_float32
from swjax.kernels.products.reference import matmul
from swjax.kernels.quantizers.reference import quantize
from swjax.kernels.ragged.schedule import ALIGNMENT, blocks_of_groups, bounds, group_of_rows
from swjax.kernels.rotations.reference import rotate

# Sums over the rows of each group: the product of a weight gradient.
_SUM_OF_ROWS = RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())


def ragged_matmul(
    a: jax.Array | QTensor,
    b: jax.Array | QTensor,
    group_sizes: jax.Array,
    addend: jax.Array | None = None,
    *,
    axis: int,
    out_dtype: str,
    precision: lax.PrecisionLike = None,
) -> jax.Array:
    """Multiplies each row of a with the matrix of its group: ``y[i] = a[i] b[group of i] + addend[i]``.

    The first ``group_sizes[0]`` rows belong to group 0, the next to group 1, and so on. Rows beyond the
    groups are zero, also with an addend. A negative size counts as zero; groups end at row m.

    Args:
      a: [m, k], a floating array; or a QTensor with scale [m, 1].
      b: [e, n, k] if `axis` is 2, [e, k, n] if it is 1; an array in the dtype of a, or a QTensor whose scale
        has one element for each group, or for each group and column of y. int8 with int8, or fp8 with fp8.
      group_sizes: [e] integers.
      addend: [m, n], an array to add to the result, or None.
      axis: the axis of b to sum over. Tensor cores read 8-bit matrices along the last axis.
      out_dtype: "float32", "bfloat16" or "float16".
      precision: of products without quantization, see `jax.lax.dot_general`.

    Returns:
      [m, n] in `out_dtype`. int8 products are summed in int32, others in float32.

    >>> a, b = jnp.ones((3, 2)), jnp.stack([jnp.ones((2, 2)), jnp.full((2, 2), 5.0)])
    >>> ragged_matmul(a, b, jnp.array([1, 1]), axis=1, out_dtype="float32")[:, 0].tolist()
    [2.0, 10.0, 0.0]
    """
    dimension_numbers = RaggedDotDimensionNumbers((((1,), (axis,)), ((), ())), (0,), (0,))
    m = (a.values if isinstance(a, QTensor) else a).shape[0]
    starts, ends = bounds(group_sizes, m)
    if isinstance(a, QTensor):
        assert isinstance(b, QTensor), "both operands are quantized, or none"
        lhs, rhs, dtype, highest = a.values, b.values, "int32", None
        if lhs.dtype != jnp.int8:  # as in `matmul`
            exact = "float32" if targets.platform() == "cpu" else "bfloat16"
            lhs, rhs, dtype = lhs.astype(exact), rhs.astype(exact), "float32"
    else:
        assert not isinstance(b, QTensor), "both operands are quantized, or none"
        lhs, rhs, highest = a, b, precision
        dtype = out_dtype if addend is None else "float32"
    y = lax.ragged_dot_general(
        lhs,
        rhs,
        ends - starts,
        dimension_numbers,
        precision=highest,
        preferred_element_type=jnp.dtype(dtype),
    )
    if isinstance(a, QTensor):
        assert isinstance(b, QTensor), "see above"
        groups = group_of_rows(group_sizes, m)
        scale = jnp.take(b.scale.squeeze(axis), groups, axis=0, mode="clip")  # [m, 1] or [m, n]
        y = y.astype("float32") * (a.scale * scale)
    if addend is not None:
        y = y + to_float32(addend)
    if isinstance(a, QTensor) or addend is not None:
        y = jnp.where((jnp.arange(m, dtype=ends.dtype) < ends[-1])[:, None], y, 0)
    return y.astype(out_dtype)


def ragged_weight_gradient(
    x: jax.Array,
    g: jax.Array,
    group_sizes: jax.Array,
    *,
    out_dtype: str,
    precision: lax.PrecisionLike = None,
) -> jax.Array:
    """``xT g`` of the rows of each group: the weight gradients of experts.

    Args:
      x: [m, k] float16, bfloat16 or float32.
      g: [m, n] in the dtype of x.
      group_sizes: [e] integers, see `ragged_matmul`.
      out_dtype: dtype of the result; the sums are in float32.
      precision: see `jax.lax.dot_general`.

    Returns:
      [e, k, n] in `out_dtype`; zeros for a group without rows.

    >>> x, g = jnp.ones((4, 1)), jnp.ones((4, 2))
    >>> dw = ragged_weight_gradient(x, g, jnp.array([3, 0, 1]), out_dtype="float32")
    >>> dw[:, 0, 0].tolist()
    [3.0, 0.0, 1.0]
    """
    starts, ends = bounds(group_sizes, x.shape[0])
    return lax.ragged_dot_general(
        x,
        g,
        ends - starts,
        _SUM_OF_ROWS,
        precision=precision,
        preferred_element_type=jnp.dtype(out_dtype),
    )


def ragged_block_weight_gradient(
    x: jax.Array,
    gs: tuple[jax.Array, ...],
    group_sizes: jax.Array,
    *,
    dtypes: tuple[str, str],
    block: int,
    rotation: int,
    out_dtype: str,
) -> tuple[jax.Array, ...]:
    """``xT g`` of the rows of each group, for each g, from 8-bit products: see `block_weight_gradient`.

    The rows of a group are cut into blocks of `block` rows, which start at multiples of 8; the last may be
    shorter. Each `rotation` consecutive rows of a block are rotated together. Zeros stand for rows of other
    groups, and fill up the last rotation.

    Args:
      x: [m, k] float16, bfloat16 or float32.
      gs: [m, n] each, in the dtype of x.
      group_sizes: [e] integers, see `ragged_matmul`.
      dtypes, rotation, out_dtype: see `block_weight_gradient`.
      block: largest number of rows that share the scale of a column, a multiple of `rotation`.

    Returns:
      [e, k, n] in `out_dtype` for each g; zeros for a group without rows. int8 products are summed in int32
      within a block, and in float32 over blocks.

    >>> x, options = jnp.ones((4, 1)), {"block": 2, "rotation": 2, "out_dtype": "float32"}
    >>> sizes = jnp.array([3, 1])
    >>> [dw] = ragged_block_weight_gradient(x, (x,), sizes, dtypes=("int8", "int8"), **options)
    >>> dw.ravel().tolist()
    [3.0, 1.0]
    """
    m, groups = x.shape[0], len(group_sizes)
    dws = tuple(jnp.zeros((groups, x.shape[1], g.shape[1]), jnp.float32) for g in gs)
    if not m:
        return tuple(dw.astype(out_dtype) for dw in dws)
    alignment = math.gcd(ALIGNMENT, rotation)
    longest = -(-(m + alignment - 1) // rotation) * rotation
    row = jnp.arange(min(block, longest), dtype=jnp.int32)
    blocks = blocks_of_groups(group_sizes, m, block, rotation, alignment)

    def add_block(dws, of_block):
        group, first, start, end = of_block
        known = ((first + row >= start) & (first + row < end))[:, None]

        def quantized(a, dtype):
            rows = jnp.where(known, jnp.take(a, first + row, axis=0, mode="clip"), 0)
            return quantize(rotate(rows, rotation), (0,), dtype)

        a = quantized(x, dtypes[0])
        products = (
            matmul(a, quantized(g, dtypes[1]), out_dtype="float32", contract=(0, 0)) for g in gs
        )
        return tuple(dw.at[group].add(y, mode="drop") for dw, y in zip(dws, products)), None

    dws, _ = lax.scan(add_block, dws, blocks[:4])
    return tuple((dw / rotation).astype(out_dtype) for dw in dws)
