"""Ragged products, the layers of experts: every implementation against float64, and the tables of tiles."""

from functools import partial
from itertools import pairwise

import implementations
import interpreters
import jax
import kernel_oracle as oracle
import numpy as np
import pytest
from implementations import run
from kernel_cases import PRODUCTS, normal
from numeric import FLOOR_DB, FP8_SUM_DB, snr_db

from swjax.kernels import reference
from swjax.kernels.ragged.schedule import ALIGNMENT, aligned_tiles, bounds, group_of_rows, row_tiles
from swjax.kernels.reference import QTensor

# (rows, k, n) and group sizes: uneven, empty, one token, rows beyond; sizes that steps do not divide.
SIZES = {
    "uneven": (np.array([130, 0, 1, 70, 0]), 232),
    "one token": (np.array([0, 1]), 1),
    "none": (np.array([0, 0, 0]), 5),
    "all to the last": (np.array([0, 0, 300]), 300),
    "long": (np.array([0, 700, 3]), 712),
    "wrong": (np.array([40, -7, 2**31 - 1, 2**31 - 1]), 96),
    "two blocks": (np.array([2003, 2100]), 4112),  # of a cluster share a matrix
}
RIGHT = {"wrong": (40, 0, 56, 0)}  # where groups end at the last row
CASES = list(SIZES)
SHAPES = [("uneven", 200, 72), *((case, 256, 320) for case in CASES)]
# Those that Mosaic's kernel takes: rows a multiple of 8, and k of 128.
ALIGNED = [shape for shape in SHAPES[1:] if SIZES[shape[0]][1] % 8 == 0]
EACH = {
    "compiled": {"xla": [SHAPES[0], ("wrong", 40, 24)], "triton": SHAPES, "mosaic_gpu": ALIGNED},
    "interpreted": {
        "triton": [SHAPES[0], ("wrong", 40, 24), *SHAPES[1:-1]],
        "mosaic_gpu": [ALIGNED[0], ("wrong", 128, 128), *ALIGNED[1:]],
    },
}


def groups_of(case):
    """Returns group sizes [e], the number of rows, and [(first row, row after the last)] of each group."""
    sizes, m = SIZES[case]
    ends = np.cumsum(RIGHT.get(case, sizes))
    return sizes.astype(np.int32), m, list(pairwise([0, *ends]))


def quantized(x, axes, dtype):
    return QTensor(*oracle.quantize(x, axes, dtype))


def products(a, b, spans, n):
    """The product of each row with the matrix [n, k] of its group, in float64."""
    y = np.zeros((len(a), n))
    for (start, end), matrix in zip(spans, b, strict=True):
        y[start:end] = a[start:end] @ matrix.T
    return y


OPTIONS = [
    (*dtypes, channels, out_dtype, axis)
    for dtypes in PRODUCTS
    for channels, out_dtype, axis in ((False, "bfloat16", 2), (True, "float32", 1))
]


@implementations.each(
    "ragged_matmul",
    **EACH,
    kept=2,
    options=("a_dtype, b_dtype, channels, out_dtype, axis", OPTIONS),
    few_options=[OPTIONS[0], OPTIONS[3]],
)
def test_quantized_products(
    operation, implementation, shape, a_dtype, b_dtype, channels, out_dtype, axis
):
    case, k, n = shape
    sizes, m, spans = groups_of(case)
    x, w = normal((m, k)), normal((len(sizes), n, k), seed=1)
    w *= np.float32(10.0) ** np.arange(len(sizes), dtype="float32")[:, None, None]
    a, b = quantized(x, (1,), a_dtype), quantized(w, (2,) if channels else (1, 2), b_dtype)
    a_wide, b_wide = (oracle.wide(q.values) * q.scale for q in (a, b))
    if axis == 1:
        b = QTensor(*(np.ascontiguousarray(part.swapaxes(1, 2)) for part in b))
    options = {"implementation": implementation, "axis": axis, "out_dtype": out_dtype}
    want = products(a_wide, b_wide, spans, n)
    floor = FLOOR_DB[out_dtype]
    if a_dtype != "int8" and jax.default_backend() == "gpu":
        floor = min(floor, FP8_SUM_DB)
    y = run(operation, a, b, sizes, **options)
    assert y.dtype == out_dtype and not np.asarray(y[spans[-1][1] :], np.float32).any()
    for start, end in spans:  # experts differ in magnitude
        assert snr_db(y[start:end], want[start:end]) > floor


@implementations.each(
    "ragged_matmul",
    **EACH,
    options=("dtype, axis", [("bfloat16", 1), ("float16", 2)]),
    few_options=[("bfloat16", 1)],
)
def test_products_in_16_bits_with_an_addend(operation, implementation, shape, dtype, axis):
    case, k, n = shape
    sizes, m, spans = groups_of(case)
    x, w = normal((m, k), dtype), normal((len(sizes), n, k), dtype, seed=1)
    addend = normal((m, n), dtype, seed=2)
    want = products(oracle.wide(x), oracle.wide(w), spans, n)
    inside = np.arange(m)[:, None] < spans[-1][1]
    x[~inside[:, 0]] = np.nan  # rows beyond the groups are not read
    w = w if axis == 2 else np.ascontiguousarray(w.swapaxes(1, 2))
    options = {"implementation": implementation, "axis": axis, "out_dtype": dtype}
    for term, total in ((None, want), (addend, np.where(inside, want + oracle.wide(addend), 0))):
        y = run(operation, x, w, sizes, term, **options)
        assert y.dtype == dtype
        assert snr_db(y, total) > FLOOR_DB[dtype]


@implementations.each(
    "ragged_weight_gradient",
    **EACH,
    options=("dtype, out_dtype", [("bfloat16", "float32"), ("float16", "float16")]),
    few_options=[("bfloat16", "float32")],
)
def test_weight_gradients(operation, implementation, shape, dtype, out_dtype):
    case, k, n = shape
    sizes, m, spans = groups_of(case)
    x, g = normal((m, k), dtype), normal((m, n), dtype, seed=1)
    x[spans[-1][1] :] = g[spans[-1][1] :] = np.nan
    options = {"implementation": implementation, "out_dtype": out_dtype}
    dw = run(operation, x, g, sizes, **options)
    assert dw.dtype == out_dtype and dw.shape == (len(sizes), k, n)
    for got, (start, end) in zip(dw, spans, strict=True):
        assert snr_db(got, oracle.weight_gradient(x[start:end], g[start:end])) > FLOOR_DB[out_dtype]


ROTATED = {
    "compiled": {"xla": [("uneven", 72, 40)], "triton": SHAPES, "mosaic_gpu": ALIGNED},
    "interpreted": {
        "triton": [("uneven", 72, 40), ("wrong", 40, 24), ("long", 40, 24), SHAPES[0]],
        "mosaic_gpu": [("wrong", 64, 64), ("long", 64, 64), ("uneven", 256, 320)],
    },
}


@implementations.each("ragged_block_weight_gradient", **ROTATED)
def test_rotated_weight_gradients(operation, implementation, shape):
    check_rotated_weight_gradients(implementation, *shape)


def test_tiles_of_empty_groups_race_with_no_copy():
    """They have no steps, so one block of threads writes them at once after tiles of other groups.

    On a GPU, the last piece of such a tile, of an odd number, was overwritten.
    """
    options = {"detect_races": True, "multiprocessors": 1}
    check_rotated_weight_gradients("mosaic_gpu interpreted", "uneven", 64, 320, **options)


test_tiles_of_empty_groups_race_with_no_copy.pytestmark = (
    interpreters.SKIPS["mosaic_gpu"] + interpreters.SKIPS["triton"]
)


def check_rotated_weight_gradients(implementation, case, k, n, **interpreter):
    """Within a group they are those of the operation of a single layer, where its blocks are the same."""
    sizes, m, spans = groups_of(case)
    # Tokens of very different magnitude.
    x, *gs = (normal((m, width), "bfloat16", i) for i, width in enumerate((k, n, n)))
    x *= np.exp(normal((m, 1), seed=5)).astype("bfloat16")
    x[spans[-1][1] :] = np.nan
    options = {"dtypes": ("int8", "int8"), "block": 256, "rotation": 128}
    options["out_dtype"] = "bfloat16" if case == "long" else "float32"
    run_it = partial(run, "ragged_block_weight_gradient", implementation=implementation)
    single = jax.jit(partial(reference.block_weight_gradient, **options))
    dws = run_it(x, tuple(gs), sizes, **options, **interpreter)
    for g, dw in zip(gs, dws, strict=True):
        assert dw.shape == (len(sizes), k, n)
        for got, (start, end) in zip(dw, spans, strict=True):
            exact = oracle.weight_gradient(x[start:end], g[start:end])
            assert snr_db(got, exact) > 34
            before = start % ALIGNMENT  # rows of the group before, for which zeros stand
            if 0 < end - start <= 256 - before:
                one = single(*(np.pad(a[start:end], ((before, 0), (0, 0))) for a in (x, g)))
                floor = {"float32": 70, "bfloat16": FLOOR_DB["bfloat16"]}[options["out_dtype"]]
                assert snr_db(got, np.asarray(one, np.float64)) > floor


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rows", [1, 32, 128])
def test_tiles_cover_every_row_once_and_none_outside(case, rows):
    sizes, m, spans = groups_of(case)
    found, table = jax.jit(lambda sizes: (bounds(sizes, m).T, row_tiles(sizes, m, rows)))(sizes)
    np.testing.assert_array_equal(found, spans)
    group, first, end = np.asarray(table)
    seen = np.zeros(m, int)
    for e, start, stop in zip(group, first, np.minimum(first + rows, end)):
        assert 0 <= start <= m and stop <= m
        seen[start:stop] += 1
        if e < len(sizes):
            assert spans[e][0] <= start < stop <= spans[e][1]
        elif stop > start:
            assert start >= spans[-1][1]
    np.testing.assert_array_equal(seen, 1)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16"])
def test_group_sizes_of_few_bits_add_up_to_many_rows(dtype):
    sizes = jax.numpy.full(400, 100, dtype)
    np.testing.assert_array_equal(bounds(sizes, 50_000)[1], 100 * np.arange(1, 401))


@pytest.mark.parametrize("case", CASES)
def test_aligned_tiles_write_every_row_once(case):
    sizes, m, _ = groups_of(case)
    compute = lambda sizes: (aligned_tiles(sizes, m, 128, ALIGNMENT), group_of_rows(sizes, m))
    (count, *tiles), groups = jax.tree.map(np.asarray, jax.jit(compute)(sizes))
    assert count[0] <= len(tiles[0])
    owner = np.full(m, -1)
    for group, first, start, end in np.transpose(tiles)[: count[0]]:
        assert first % ALIGNMENT == 0 and first <= m
        rows = slice(max(first, start), min(first + 128, end))
        assert (owner[rows] == -1).all()
        owner[rows] = group
    np.testing.assert_array_equal(owner, groups)
