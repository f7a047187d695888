"""Kernels for TPUs that compute blocks of whole rows: a function of blocks, the specification in most cases.

A grid step copies a block of each array to the vector memory (VMEM) while the step before it computes.
Weights are copied once and stay. A block has the arithmetic of `swjax.kernels.formats`, in float32.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from swjax.kernels import chips, formats, targets
from swjax.kernels.availability import Unavailable
from swjax.kernels.formats import QTensor

# Bytes of VMEM that a kernel may use, of the 128 MiB of the chips for which the kernels were compiled.
VMEM = dict.fromkeys(("TPU v5e", "TPU v6e"), 100 << 20)

ROWS = 128  # of a block; 256 need 5 % fewer instructions, and twice as long to compile
LANES, SUBLANES = 128, 8  # columns and rows of a tile
# Bytes of VMEM per row and column of a block. libtpu 0.0.50 used up to 9, see benchmarks/tpu.py.
COLUMN_BYTES = 12


def over_rows(name: str, function: Callable, arrays: Any, whole: Any = ()) -> Any:
    """Runs ``function(arrays, whole)`` on blocks of the rows of `arrays`.

    Args:
      name: of the kernel in profiles.
      function: maps trees of blocks to a tree. Its matrices are blocks of results. Its vectors [n] float32
        are summed over all blocks. The blocks of `arrays` are given in float32.
      arrays: a tree of arrays [..., k] with the same leading dimensions; vectors in it are as in `whole`.
      whole: a tree of arrays that each block reads, such as weights.

    Returns:
      The tree of the function's results, [..., n] and [n].
    """
    given, tree = jax.tree.flatten((arrays, whole))
    count = len(jax.tree.leaves(arrays))
    is_rows = [i < count and x.ndim > 1 for i, x in enumerate(given)]
    leading = next(x for x in given if x.ndim > 1).shape[:-1]

    def of_blocks(*blocks: jax.Array) -> Any:
        parts = (
            x.astype(jnp.float32) if rows else x.reshape(like.shape)
            for x, rows, like in zip(blocks, is_rows, given)
        )
        with jax.default_matmul_precision("default"):  # of int8 products, which are exact
            return function(*jax.tree.unflatten(tree, parts))

    swapped = _is_stored_by_token(leading)
    given = [as_matrix(x, swapped) if rows else x for x, rows in zip(given, is_rows)]
    matrices = [jnp.atleast_2d(x) for x in given]
    m = matrices[is_rows.index(True)].shape[0]
    blocks = [
        jax.ShapeDtypeStruct((ROWS, x.shape[1]) if rows else x.shape, x.dtype)
        for x, rows in zip(matrices, is_rows)
    ]
    outs, out_tree = jax.tree.flatten(jax.eval_shape(of_blocks, *blocks))

    def kernel(*refs: Any) -> None:
        results = jax.tree.leaves(of_blocks(*(ref[...] for ref in refs[: len(blocks)])))
        for ref, result in zip(refs[len(blocks) :], results):
            if result.ndim > 1:
                ref[...] = result
            else:
                is_first = pl.program_id(0) == 0
                ref[...] = jnp.where(is_first, 0, ref[...]) + result[None]

    by_rows = lambda n: pl.BlockSpec((ROWS, n), lambda i: (i, 0))
    at_once = lambda shape: pl.BlockSpec(shape, lambda i: (0, 0), pipeline_mode=pl.Buffered(1))
    results = pl.pallas_call(
        kernel,
        grid=(m // ROWS,),
        in_specs=[
            by_rows(x.shape[1]) if rows else at_once(x.shape) for x, rows in zip(matrices, is_rows)
        ],
        out_specs=[
            by_rows(x.shape[1]) if x.ndim > 1 else pl.BlockSpec((1, x.size), lambda i: (0, 0))
            for x in outs
        ],
        out_shape=[
            jax.ShapeDtypeStruct((m if x.ndim > 1 else 1, x.shape[-1]), x.dtype) for x in outs
        ],
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=_vmem()),
        name=f"swjax_{name}",
    )(*matrices)
    if swapped:
        leading = leading[::-1]
    shaped = [
        y.reshape((*leading, y.shape[1]) if x.ndim > 1 else -1) for x, y in zip(outs, results)
    ]
    shaped = [y.swapaxes(0, 1) if swapped and y.ndim > 1 else y for y in shaped]
    return jax.tree.unflatten(out_tree, shaped)


def as_matrix(x: jax.Array, swapped: bool) -> jax.Array:
    """Reshapes [..., k] to rows."""
    return (x.swapaxes(0, 1) if swapped else x).reshape(-1, x.shape[-1])


def _is_stored_by_token(leading: tuple[int, ...]) -> bool:
    """Whether XLA stores [batch, tokens, k] with the tokens outermost, for tiles without padding.

    The rows of a kernel are then in this order, which needs no copy.
    """
    return len(leading) == 2 and leading[1] % SUBLANES > 0 and leading[0] % SUBLANES == 0


def quantizing(
    name: str,
    function: Callable,
    arrays: Any,
    quantize_to: str | None,
    high_precision: bool,
    *,
    of_elements: bool = False,
) -> tuple[jax.Array | None, QTensor | None]:
    """`over_rows` of a row operation, fused with the quantizer of its result as in its specification.

    Args:
      name: of the operation.
      function: maps float32 `arrays` to the result.
      arrays: of the operation; the first has the dtype of the result.
      quantize_to, high_precision: see the specification. Without `quantize_to`, XLA computes the operation
        where its result is read.
      of_elements: whether the result's elements depend on one element of each array.
    """
    dtype = arrays[0].dtype
    if quantize_to is None:
        return function(*(x.astype(jnp.float32) for x in arrays)).astype(dtype), None

    def block(arrays: Any, _: Any) -> tuple[jax.Array | None, QTensor]:
        y = by_columns(function, *arrays) if of_elements else function(*arrays)
        y = rounded(y, dtype)
        return y.astype(dtype) if high_precision else None, quantize(y)

    return over_rows(name, block, arrays)


def by_specification(
    name: str, specification: Callable, *, of_elements: bool = False
) -> Callable[..., tuple[jax.Array | None, QTensor | None]]:
    """The kernel of a row operation whose specification computes its blocks; see `quantizing`."""

    def operation(
        *arrays: Any, quantize_to: str | None = None, high_precision: bool = True, **settings: Any
    ) -> tuple[jax.Array | None, QTensor | None]:
        block = lambda *arrays: specification(*arrays, **settings)[0]
        options = quantize_to, high_precision
        return quantizing(name, block, arrays, *options, of_elements=of_elements)

    return operation


def why_not(arrays: Any, whole: Any = ()) -> Unavailable | None:
    """Returns why `over_rows` cannot compute these arrays, or None if it can."""
    every = [*jax.tree.leaves(arrays), *jax.tree.leaves(whole)]
    if not _vmem():
        return Unavailable(f"was not compiled for this chip, but for {', '.join(VMEM)}: use 'xla'")
    kinds = ("bfloat16", "float32", "int8")
    if other := next((x.dtype.name for x in every if x.dtype.name not in kinds), None):
        return Unavailable(f"supports bfloat16 and float32, got {other}: use 'xla'")
    ragged = next(
        (x.shape for x in every if x.size > 1 and (x.ndim < 1 or x.shape[-1] % LANES)), None
    )
    if ragged or every[0].ndim < 2:
        return Unavailable(
            f"needs matrices with a multiple of {LANES} columns, got {every[0].shape}: use 'xla'"
        )
    blocks = [x for x in jax.tree.leaves(arrays) if x.ndim > 1]
    weights = [w for w in jax.tree.leaves(whole) if w.ndim > 1]
    rows = blocks[0].size // blocks[0].shape[-1]
    if rows % ROWS:
        return Unavailable(f"needs a multiple of {ROWS} rows, got {rows}: use 'xla'")
    leading = blocks[0].shape[:-1]
    if len(leading) > 1 and leading[-1] % SUBLANES and not _is_stored_by_token(leading):
        return Unavailable(
            f"needs a multiple of {SUBLANES} tokens or sequences, got {leading}: use 'xla'"
        )
    columns = sum(x.shape[-1] for x in blocks) + sum(sum(w.shape) for w in weights)
    needed = sum(w.size * w.dtype.itemsize for w in weights) + COLUMN_BYTES * ROWS * columns
    if needed > _vmem():
        return Unavailable(f"needs {needed >> 20} MiB of {_vmem() >> 20} MiB of VMEM: use 'xla'")
    return None


def why_not_quantizing(
    *arrays: Any, quantize_to: str | None = None, **_: Any
) -> Unavailable | None:
    """`why_not` of a row operation without weights."""
    if quantize_to not in (None, "int8"):
        return Unavailable(f"quantizes to int8, got {quantize_to}: use 'xla'")
    return why_not(arrays)


def _vmem() -> int:
    """Bytes of VMEM that a kernel may use on the chip that the program is for; 0 if no kernel is for it.

    In the interpreter on a CPU it is that of a TPU v6e.
    """
    target = targets.current()
    chip = chips.find("TPU v6e" if target.platform == "cpu" else target.device_kind)
    return VMEM.get(chip.name, 0) if chip else 0


# --- on a block, in float32 ---------------------------------------------------------------------------


def by_columns(function: Callable, *arrays: jax.Array) -> Any:
    """Applies a function of elements to few columns at a time, whose intermediate results registers hold.

    Sums over rows may be among its results.
    """
    width = arrays[0].shape[-1]
    parts = [function(*(x[:, i : i + LANES] for x in arrays)) for i in range(0, width, LANES)]
    return jax.tree.map(lambda *each: jnp.concatenate(each, axis=-1), *parts)


def quantize(x: jax.Array) -> QTensor:
    """`reference.quantize` of rows [m, n] float32 to int8; its maximum is one of signed integers."""
    of_magnitudes = lambda x: lax.bitcast_convert_type(jnp.abs(x), jnp.int32)
    parts = (of_magnitudes(x[:, i : i + LANES]) for i in range(0, x.shape[-1], LANES))
    largest = jnp.max(functools.reduce(jnp.maximum, parts), axis=-1, keepdims=True)
    absmax = lax.bitcast_convert_type(largest, jnp.float32)
    absmax = jnp.maximum(absmax, formats.SMALLEST_ABSMAX)
    factor = formats.divide(formats.LARGEST["int8"], absmax)
    values = by_columns(lambda x: jnp.round(x * factor).astype(jnp.int8), x)
    return QTensor(values, formats.scale_of(absmax, "int8"))


def rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """float32 `x`, rounded to a dtype and back."""
    return x.astype(dtype).astype(jnp.float32)
