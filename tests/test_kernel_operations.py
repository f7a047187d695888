"""Every operation in every available implementation, compared with `kernel_oracle`.

On CPUs these are XLA and, at small sizes, the kernels in their interpreters.
"""

import itertools
from functools import partial

import implementations
import jax
import jax.numpy as jnp
import kernel_oracle as oracle
import numpy as np
import pytest
from implementations import KERNELS, run
from kernel_cases import (
    DTYPES,
    LAYERS,
    PRODUCTS,
    QUANTIZING,
    RAGGED_ROWS,
    ROW_OPERATIONS,
    ROWS,
    SMALL_RAGGED_ROWS,
    TARGETS,
    XLA_LAYERS,
    XLA_ROWS,
    blocks,
    cross_entropy_arguments,
    normal,
    operands,
    row_arguments,
)
from numeric import FLOOR_DB, FP8_SUM_DB, snr_db

from swjax.kernels import tiles
from swjax.kernels.reference import LARGEST, QTensor, static_absmax

# Kernels convert inputs and outputs separately, so not every pair is tested.
FORMATS = (
    *(("bfloat16", target) for target in TARGETS),
    ("float16", "int8"),
    ("float32", "int8"),
    ("float32", "float8_e4m3fn"),
    ("float16", "float8_e5m2"),
)
# Every dtype and every target once.
FEW_FORMATS = (("bfloat16", "int8"), ("float32", "float8_e4m3fn"), ("float16", "float8_e5m2"))
SCOPES = [((-1,), *of) for of in FORMATS]
SCOPES += [(axes, *of) for axes in ((0,), (0, 1)) for of in FEW_FORMATS]
FEW_SCOPES = [(axes, *of) for axes, of in zip(((-1,), (0,), (0, 1)), FEW_FORMATS)]
IN_SCOPES = {"options": ("axes, dtype, target", SCOPES), "few_options": FEW_SCOPES}
IN_FORMATS = {"options": ("dtype, target", FORMATS), "few_options": FEW_FORMATS}
IN_DTYPES = {"options": ("dtype", [(dtype,) for dtype in DTYPES]), "few_options": [("bfloat16",)]}
TANH = {"approximate": True}
# A shape that tiles do not divide.
RAGGED = {"compiled": [RAGGED_ROWS], "interpreted": [SMALL_RAGGED_ROWS]}


def same(*shapes):
    return {"compiled": shapes, "interpreted": shapes}


def assert_same_bits(q, expected):
    """Asserts that a QTensor equals a NumPy pair (values, scale), bit for bit."""
    for got, want in zip(q, expected):
        got = np.asarray(got)
        assert got.dtype == want.dtype and got.shape == want.shape
        np.testing.assert_array_equal(got.view(np.uint8), np.ascontiguousarray(want).view(np.uint8))


def check_row_operation(operation, implementation, x, quantize_to=None, **options):
    """Compares results with float64, and sums and quantized values with those of the computed result."""
    arrays = row_arguments(operation, x)
    exact = getattr(oracle, operation)(*arrays, **options)
    if quantize_to:
        options["dtype" if operation == "quantize_and_sum" else "quantize_to"] = quantize_to
    got = run(operation, *arrays, implementation=implementation, **options)
    read = iter([x] if operation == "quantize_and_sum" else got)  # by the quantizers, in order
    for value, want in zip(got, exact):
        if isinstance(value, QTensor):
            assert_same_bits(value, oracle.quantize(next(read), dtype=quantize_to or "int8"))
        elif want is not None:
            cancels = 6 if value.size == 1 else 0  # the terms of a gradient may
            assert snr_db(value, want) > FLOOR_DB[value.dtype.name] - cancels
    if operation == "gelu_backward":
        assert snr_db(got[2], oracle.column_sums(got[0])) > FLOOR_DB["float32"]


@implementations.at("quantize", shapes=ROWS, xla=XLA_ROWS)
def test_rows_of_every_layer_quantize_to_the_same_bits(operation, implementation, shape):
    x = normal(shape, "bfloat16")
    assert_same_bits(run(operation, x, implementation=implementation), oracle.quantize(x))


@implementations.each("quantize", **RAGGED, **IN_SCOPES)
def test_every_scope_and_format_gives_the_same_bits(
    operation, implementation, shape, axes, dtype, target
):
    x = normal(shape, dtype)
    for transpose in (False, True):
        options = {"axes": axes, "dtype": target, "transpose": transpose}
        got = run(operation, x, implementation=implementation, **options)
        assert_same_bits(got, oracle.quantize(x, **options))


@implementations.each("quantize_by", **RAGGED, **IN_SCOPES)
def test_known_maxima_give_the_same_bits(operation, implementation, shape, axes, dtype, target):
    """Two parts of an array, quantized with the maxima of the whole array, have the bits of the whole."""
    x = normal(shape, dtype)
    absmax = jnp.max(jnp.abs(x.astype(jnp.float32)), axes, keepdims=True)
    values, scale = oracle.quantize(x, axes, target)
    for rows, transpose in ((slice(0, 3), True), (slice(3, None), False)):
        known, wanted = (t if len(t) == 1 else t[rows] for t in (absmax, scale))
        options = {"dtype": target, "transpose": transpose}
        got = run(operation, x[rows], known, implementation=implementation, **options)
        want = (values[rows].T, wanted.T) if transpose else (values[rows], wanted)
        assert_same_bits(got, want)


@implementations.each("quantize_both", **RAGGED)
@pytest.mark.parametrize("dtype, target", FEW_FORMATS)
def test_both_forms_of_a_weight_have_the_same_bits(operation, implementation, shape, dtype, target):
    x = normal(shape, dtype)
    rows = jnp.max(jnp.abs(x.astype(jnp.float32)), 1)
    for absmax in (rows[:4].at[0].max(rows.max()), rows, rows.max()[None]):
        got = run(operation, x, absmax, implementation=implementation, dtype=target)
        for q, transpose in zip(got, (False, True), strict=True):
            assert_same_bits(q, oracle.quantize(x, (0, 1), target, transpose=transpose))
    stack = np.stack([x, x * np.asarray(3, dtype)])
    absmax = jnp.max(jnp.abs(stack.astype(jnp.float32)), 2)
    got = run(operation, stack, absmax, implementation=implementation, dtype=target)
    for number, matrix in enumerate(stack):
        for q, transpose in zip(got, (False, True), strict=True):
            one = QTensor(*(np.asarray(part)[number] for part in q))
            assert_same_bits(one, oracle.quantize(matrix, (0, 1), target, transpose=transpose))


@implementations.each(
    "quantize_segments",
    "quantize_squares",
    compiled=[(256, 384)],
    interpreted=[(256, 128), (256, 384)],
    options=("dtype", [("bfloat16",), ("float32",)]),
    few_options=[("bfloat16",), ("float32",)],
)
def test_blocks_have_the_same_bits(operation, implementation, shape, dtype):
    """Also with rows of zeros and blocks with NaN and infinities, which spoil their block alone."""
    x = normal(shape, dtype) * np.exp2(np.arange(shape[0])[:, None] // 8 - 12).astype(dtype)
    x[-1] = 0
    poisoned = x.copy()
    poisoned[3, 5], poisoned[140, -100] = np.nan, -np.inf
    square = operation == "quantize_squares"
    options = {"dtype": "float8_e4m3fn", "block": 128, "implementation": implementation}
    cases = [(0, -1)] if square else [(-1,), (0,), (-1, 0)]
    for axes in cases:
        options |= {} if square else {"axes": axes}
        good, bad = (run(operation, each, **options) for each in (x, poisoned))
        for q, spoilt, axis in zip(good, bad, axes, strict=True):
            assert_same_bits(q[:2], oracle.quantize_blocks(x, axis, square))
            nan = np.isnan(np.asarray(spoilt.scales))
            assert nan.sum() == 2
            whole = np.repeat(np.repeat(nan, 128, 1), len(q.values) // len(nan), 0)
            values = np.asarray(spoilt.values, np.float32)
            assert np.isnan(values[whole]).all()
            np.testing.assert_array_equal(values[~whole], np.asarray(q.values, np.float32)[~whole])


@implementations.each("quantize_by", "quantize_both", **RAGGED)
@pytest.mark.parametrize("target", TARGETS[1:])
@pytest.mark.parametrize("scale", [1.0, 2.0**-5])
def test_constant_scales_clip_and_keep_what_is_not_finite(
    operation, implementation, shape, target, scale
):
    largest = LARGEST[target]
    x = normal(shape) * np.float32(largest * scale / 2)
    x[0, :6] = np.inf, -np.inf, np.nan, largest * scale, -2 * largest * scale, -0.0
    x[1] *= 1e-6  # below the smallest normal value of e4m3
    absmax = static_absmax(scale, target, ndim=2 if operation == "quantize_by" else 1)
    assert np.sum(np.abs(x) > largest * scale) > 10
    values = np.clip(x / np.float32(scale), -largest, largest)
    values = np.where(np.isfinite(x), values, np.float32(np.nan)).astype(target)
    options = {"dtype": target, "clip": True}
    if operation == "quantize_both":
        got = run(operation, x, absmax, implementation=implementation, **options)
    else:
        call = partial(run, operation, x, absmax, implementation=implementation, **options)
        got = call(), call(transpose=True)
    one = np.full((1, 1), scale, "float32")
    for q, want in zip(got, (values, values.T), strict=True):
        nan = np.isnan(np.asarray(q.values, np.float32))
        np.testing.assert_array_equal(nan, np.isnan(want.astype("float32")))
        # e5m2 has several NaNs, and devices choose differently.
        known = np.where(nan, want, np.asarray(q.values))
        assert_same_bits(q._replace(values=known), (want, one))


@implementations.each("quantize", **same((3, 5, 48)))
@pytest.mark.parametrize("axes", [(-1,), (0, 1), (0, 1, 2)])
def test_leading_axes_are_rows(operation, implementation, shape, axes):
    x = normal(shape, "bfloat16")
    got = run(operation, x, implementation=implementation, axes=axes)
    assert_same_bits(got, oracle.quantize(x, axes))


@implementations.each("quantize", **same((64,), (77,)))
@pytest.mark.parametrize("axes", [(-1,), ()])
def test_a_vector_has_one_scale_or_one_per_element(operation, implementation, shape, axes):
    x = normal(shape, "bfloat16")
    got = run(operation, x, implementation=implementation, axes=axes)
    assert_same_bits(got, oracle.quantize(x, axes))


@implementations.at(*ROW_OPERATIONS, shapes=ROWS, xla=XLA_ROWS)
def test_row_operations_at_the_widths_of_every_layer(operation, implementation, shape):
    x = normal(shape, "bfloat16")
    check_row_operation(operation, implementation, x, **ROW_OPERATIONS[operation])


@implementations.each(
    *(name for name in ROW_OPERATIONS if "norm_backward" not in name), **RAGGED, **IN_FORMATS
)
def test_row_operations_in_every_format(operation, implementation, shape, dtype, target):
    x = normal(shape, dtype)
    check_row_operation(operation, implementation, x, target, **ROW_OPERATIONS[operation])
    if "gelu" in operation and (dtype, target) in FEW_FORMATS:
        check_row_operation(operation, implementation, x, target, **TANH)
    if "gated" in operation and (dtype, target) in FEW_FORMATS:
        for activation in ("gelu", "gelu_tanh"):
            check_row_operation(operation, implementation, x, target, activation=activation)


@implementations.each(
    "gated",
    "gated_backward",
    compiled=[(3, 28_672)],
    interpreted=[(1, tiles.WIDEST_ROW + 4096)],
    kept=0,
)
def test_rows_that_registers_do_not_hold(operation, implementation, shape):
    check_row_operation(operation, implementation, normal(shape, "bfloat16"), "int8")


@implementations.each("layer_norm_backward", "rms_norm_backward", **RAGGED, **IN_DTYPES)
def test_gradients_of_norms_in_every_format(operation, implementation, shape, dtype):
    """They are not quantized."""
    options = ROW_OPERATIONS[operation]
    check_row_operation(operation, implementation, normal(shape, dtype), **options)


@implementations.each(
    "layer_norm",
    "rms_norm",
    "gelu",
    "gated",
    **same((3, 5, 48)),
    kept=0,
    options=("target", [(target,) for target in TARGETS]),
    few_options=[("int8",)],
)
def test_what_is_quantized_does_not_depend_on_what_is_written(
    operation, implementation, shape, target
):
    arrays = row_arguments(operation, normal(shape, "bfloat16"))
    options = ROW_OPERATIONS[operation] | {"quantize_to": target, "implementation": implementation}
    written, q = run(operation, *arrays, **options)
    nothing, alone = run(operation, *arrays, high_precision=False, **options)
    assert nothing is None
    assert_same_bits(alone, [np.asarray(part) for part in q])
    only, no_q = run(operation, *arrays, **options | {"quantize_to": None})
    assert no_q is None
    np.testing.assert_array_equal(only, written)


@implementations.each(
    *(name for name in ROW_OPERATIONS if name.endswith("_backward")),
    compiled=[RAGGED_ROWS, (8, 1280)],
    interpreted={
        "triton": [SMALL_RAGGED_ROWS, (2, 1280)],
        "mosaic_gpu": [SMALL_RAGGED_ROWS, (8, 1280)],
    },
    **IN_DTYPES,
)
def test_what_a_backward_pass_recomputes_is_what_the_forward_pass_wrote(
    operation, implementation, shape, dtype
):
    forward, x = operation.removesuffix("_backward"), normal(shape, dtype)
    inputs, arrays = row_arguments(forward, x), row_arguments(operation, x)
    options = ROW_OPERATIONS[operation] | {"implementation": implementation}
    written, _ = run(forward, *inputs, **options)
    *once, nothing = run(operation, *arrays, **options)
    if operation == "layer_norm_backward":
        arrays = (*arrays, None, inputs[-1])
    else:
        options["recompute"] = True
    *twice, recomputed = run(operation, *arrays, **options)
    assert nothing is None
    if implementation != "xla":  # XLA may round differently in each program
        jax.tree.map(np.testing.assert_array_equal, twice, once)
    if implementation != "xla" and "norm" not in operation:
        np.testing.assert_array_equal(recomputed, written)
    else:  # the two passes of norms have different tiles, which sum in different orders
        assert snr_db(recomputed, np.asarray(written, np.float64)) > FLOOR_DB[dtype]


@pytest.mark.parametrize("operation, implementation", implementations.of("gelu", "gelu_backward"))
@pytest.mark.parametrize("approximate", [False, True])
def test_gelu_of_every_bfloat16(operation, implementation, approximate):
    """Results are within two roundings of the exact value, or of the smallest normal number."""
    x = np.arange(2**16, dtype=np.uint16).view("bfloat16")
    # For larger values the derivative of the tanh form is infinity times zero in fp32.
    x = np.where(np.abs(x.astype(np.float32)) < 1e12, x, 0).astype("bfloat16").reshape(256, 256)
    arrays = (x,) if operation == "gelu" else (x, np.ones_like(x))
    got, *_ = run(operation, *arrays, implementation=implementation, approximate=approximate)
    want = getattr(oracle, operation)(*arrays, approximate=approximate)[0]
    # The tanh form computes 1 + tanh in fp32, so its error is absolute; that of the exact form is relative.
    atol = 1e-5 if approximate else 1e-36
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2.0**-8, atol=atol)


# --- products -----------------------------------------------------------------------------------------

# Odd and even numbers of steps, tiles past the edges, several tiles for each thread block, and one tile.
BLOCK_PRODUCTS = [(264, 384, 256), (1032, 256, 1408), (64, 128, 128), (1000, 1280, 640)]


@implementations.each(
    "block_matmul",
    compiled={"xla": BLOCK_PRODUCTS[:1], "mosaic_gpu": BLOCK_PRODUCTS, "triton": []},
    interpreted=BLOCK_PRODUCTS,
    options=("square, out_dtype", list(itertools.product((False, True), ("bfloat16", "float32")))),
    few_options=[(False, "float32"), (True, "bfloat16")],
)
def test_products_of_blocks(operation, implementation, shape, square, out_dtype):
    a, b = blocks(shape, square)
    bias, addend = normal(shape[-1]), normal((shape[0], shape[-1]), "bfloat16", seed=1)
    options = {"implementation": implementation, "out_dtype": out_dtype}
    floor = min(FLOOR_DB[out_dtype], FP8_SUM_DB)
    for terms in ((), (bias, addend)):
        y = run(operation, a, b, *terms, **options)
        assert y.dtype == out_dtype
        assert snr_db(y, oracle.block_matmul(a[:2], b[:2], *terms)) > floor


def check_row_of_nan(operation, implementation, a, b, scale):
    """Asserts that NaN in `scale`, a view of a's scales of row 70, changes this row of the product only."""
    product = partial(run, operation, a, b, implementation=implementation, out_dtype="bfloat16")
    good = np.asarray(product(), np.float32)
    scale[...] = np.nan
    bad = np.asarray(product(), np.float32)
    assert np.isnan(bad[70]).all()
    np.testing.assert_array_equal(np.delete(good, 70, 0), np.delete(bad, 70, 0))


@implementations.each(
    "block_matmul", compiled=[(264, 512, 256)], interpreted=[(136, 384, 128)], kept=0
)
def test_a_non_finite_block_stays_in_its_row(operation, implementation, shape):
    a, b = blocks(shape, square=True)
    check_row_of_nan(operation, implementation, a, b, a.scales[70, 1:2])


# Sizes that tiles of 128 x 256 and steps of 128 do not divide, halves of tiles past the edge, more tiles than
# thread blocks, and a single row.
SMALL_PRODUCTS = [(300, 144, 264), (320, 128, 64), (520, 256, 512), (1, 128, 256), (130, 400, 8)]
PRODUCT = {"compiled": [LAYERS["tiles past the edges"]], "interpreted": [(200, 144, 264)]}


def check_product(implementation, a, b, bias, out_dtype):
    y = run("matmul", a, b, bias, implementation=implementation, out_dtype=out_dtype)
    assert y.dtype == out_dtype
    floor = FLOOR_DB[out_dtype]
    on_tensor_cores = jax.default_backend() == "gpu"
    if a.values.dtype != np.int8 and on_tensor_cores:
        floor = min(floor, FP8_SUM_DB)
    assert snr_db(y, oracle.matmul(a, b, bias)) > floor


@implementations.at("matmul", shapes=LAYERS, xla=XLA_LAYERS, name="layer")
def test_product_of_every_layer(operation, implementation, layer):
    shape = LAYERS[layer]
    check_product(implementation, *operands(shape), normal(shape.n), "bfloat16")


@implementations.each(
    "matmul",
    **PRODUCT,
    options=("dtypes, out_dtype", list(itertools.product(PRODUCTS, DTYPES))),
    few_options=list(zip(PRODUCTS, DTYPES)),
)
def test_product_in_every_format(operation, implementation, shape, dtypes, out_dtype):
    bias = normal(shape[-1], out_dtype)
    check_product(implementation, *operands(shape, dtypes), bias, out_dtype)


@pytest.mark.parametrize("operation, implementation", implementations.of("matmul"))
@pytest.mark.parametrize("dtypes", PRODUCTS[:2])
@pytest.mark.parametrize("scopes", [("row", "channel"), ("tensor", "tensor")])
def test_product_of_every_scope(operation, implementation, dtypes, scopes):
    shape = LAYERS["tiles past the edges"]
    check_product(implementation, *operands(shape, dtypes, *scopes), None, "bfloat16")


# Whole tiles, whose addend the Mosaic kernel adds itself, with an odd number of rows of tiles; other sizes.
ADDENDS = {"compiled": [(1088, 1280, 512)], "interpreted": [(320, 128, 256)]}


ADDEND_OPTIONS = [
    (*of, has_bias, whole_tiles)
    for *of, has_bias, whole_tiles in itertools.product(
        PRODUCTS[:2],
        [("bfloat16", "bfloat16"), ("float32", "float16")],
        [True, False],
        [True, False],
    )
]


@implementations.each(
    "matmul",
    **ADDENDS,
    options=("dtypes, addend_and_out, has_bias, whole_tiles", ADDEND_OPTIONS),
    few_options=[ADDEND_OPTIONS[i] for i in (0, 7, 11)],
)
def test_addend_of_a_product(
    operation, implementation, shape, dtypes, addend_and_out, has_bias, whole_tiles
):
    dtype, out_dtype = addend_and_out
    m, k, n = shape if whole_tiles else (shape[0] + 8, shape[1], shape[2] - 96)
    a, b = operands((m, k, n), dtypes)
    bias, addend = (normal(n) if has_bias else None), 30 * normal((m, n), dtype)
    y = run(operation, a, b, bias, addend, implementation=implementation, out_dtype=out_dtype)
    assert y.dtype == out_dtype
    assert snr_db(y, oracle.matmul(a, b, bias, addend)) > FLOOR_DB[out_dtype]
    poisoned = addend.copy()
    poisoned[70, 33] = np.nan
    bad = run(operation, a, b, bias, poisoned, implementation=implementation, out_dtype=out_dtype)
    assert np.argwhere(~np.isfinite(np.asarray(bad, np.float32))).tolist() == [[70, 33]]


# Tiles divide neither the rows nor the columns. The second result is narrower than a tile. The last product
# has one step.
SUM_OPTIONS = [
    (dtypes, *of)
    for dtypes in PRODUCTS
    for of in ((2, "bfloat16"), (3, "bfloat16"), (3, "float32"))
]
SUMS = [(520, 256, 512), (200, 384, 128), (1, 128, 256)]


@implementations.each(
    "matmul_sum",
    compiled=[(1000, 1280, 576), *SUMS],
    interpreted=SUMS[::-1],
    options=("dtypes, count, out_dtype", SUM_OPTIONS),
    few_options=[SUM_OPTIONS[i] for i in (0, 8)],
    kept=2,
)
def test_sum_of_products(operation, implementation, shape, dtypes, count, out_dtype):
    m, k, n = shape
    if "mosaic" in implementation:
        m = -(-m // 8) * 8
    pairs = [operands((m, k, n), dtypes, seed=seed) for seed in range(count)]
    # The largest scale is that of another product in each row.
    pairs = [(a._replace(scale=a.scale * 10.0**i), b) for i, (a, b) in enumerate(pairs)]
    a, b = zip(*pairs)
    y = run(operation, a, b, implementation=implementation, out_dtype=out_dtype)
    assert y.dtype == out_dtype and y.shape == (m, n)
    floor = FLOOR_DB[out_dtype]
    if dtypes[0] != "int8" and jax.default_backend() == "gpu":
        floor = min(floor, FP8_SUM_DB)
    want = sum(oracle.matmul(*pair, None) for pair in pairs)
    assert snr_db(y, want) > floor


@implementations.each(
    "matmul", compiled=[(264, 5120, 320), (130, 1008, 256)], interpreted=SMALL_PRODUCTS
)
@pytest.mark.parametrize("b_scope", ["tensor", "channel"])
def test_int8_products_are_exact(operation, implementation, shape, b_scope):
    """Sums are int32, rounded to fp32 once and multiplied once by the product of the scales."""
    a, b = operands(shape, b_scope=b_scope)
    a.values[::3] = 127
    y = run(operation, a, b, implementation=implementation, out_dtype="float32")
    total = np.asarray(a.values, np.int64) @ np.asarray(b.values, np.int64).T
    want = total.astype(np.float32) * (np.asarray(a.scale) * np.asarray(b.scale).reshape(1, -1))
    np.testing.assert_allclose(y, want, rtol=2.0**-23 if "mosaic" in implementation else 0)


@implementations.each("matmul", **same((6, 48, 16)))
def test_leading_axes_of_a_product(operation, implementation, shape):
    a, b = operands(shape)
    options = {"implementation": implementation, "out_dtype": "float32"}
    flat = run(operation, a, b, **options)
    stacked = QTensor(a.values.reshape(2, 3, 48), a.scale.reshape(2, 3, 1))
    np.testing.assert_array_equal(run(operation, stacked, b, **options), flat.reshape(2, 3, 16))


# Tiles of one size divide the rows of the first and of the layer. [batch, m, k]
SYMMETRIC = [(2, 256, 128), (3, 200, 72), (1, 1, 1)]
SYMMETRIC_LAYER = [(4, 1280, 5120)]


@implementations.each(
    "symmetric_product",
    compiled=dict.fromkeys(KERNELS, SYMMETRIC + SYMMETRIC_LAYER) | {"xla": SYMMETRIC},
    interpreted={"triton": SYMMETRIC, "mosaic_gpu": [(1, 320, 128)]},
    kept=2,
    options=("dtype, contract", [("bfloat16", -1), ("float16", -2)]),
    few_options=[("float16", -2)],
)
def test_symmetric_products(operation, implementation, shape, dtype, contract):
    """Gram matrices, and products of commuting matrices with all terms."""
    batch, m, k = shape
    x = (normal(shape) / k**0.5).astype(dtype)
    x = x if contract == -1 else x.mT
    how = {"implementation": implementation}
    if implementation == "mosaic_gpu interpreted":
        how |= {"detect_races": True}
    gram = np.asarray(run(operation, x, x, contract=contract, **how))
    factors = np.float32([[2, -1, 0.5]] * batch) * np.float32([[1], [2], [3], [4]])[:batch]
    got = run(operation, gram, gram, gram, factors, **how)
    x, exact = (array.astype(np.float64) for array in (x, gram))
    product, added, identity = (factors[:, i, None, None].astype(np.float64) for i in range(3))
    cases = [
        (gram, x @ x.mT if contract == -1 else x.mT @ x),
        (got, product * exact @ exact + added * exact + identity * np.eye(m)),
    ]
    for value, want in cases:
        assert value.dtype == dtype
        assert snr_db(value, want) > FLOOR_DB[dtype] - (
            6 if m == 1 else 0
        )  # the error of one element
        if implementation != "xla":  # XLA sums both triangles, in orders of its own
            np.testing.assert_array_equal(value, np.asarray(value).mT)


@implementations.at("weight_gradient", shapes=LAYERS, xla=XLA_LAYERS, name="layer")
def test_weight_gradient_of_every_layer(operation, implementation, layer):
    tokens, k, n = LAYERS[layer]
    x, g = normal((tokens, k), "bfloat16"), normal((tokens, n), "bfloat16", seed=1)
    dw = run(operation, x, g, implementation=implementation, out_dtype="float32")
    assert dw.dtype == np.float32
    assert snr_db(dw, oracle.weight_gradient(x, g)) > FLOOR_DB["float32"]


@implementations.each(
    "weight_gradient",
    compiled=[(264, 256, 320)],
    interpreted=[(200, 136, 264), (320, 136, 520)],
    options=("dtype", [(dtype,) for dtype in DTYPES[:2]]),
    few_options=[("bfloat16",)],
)
def test_weight_gradient_in_every_format(operation, implementation, shape, dtype):
    tokens, k, n = shape
    x, g = normal((tokens, k), dtype), normal((tokens, n), dtype, seed=1)
    dw = run(operation, x, g, implementation=implementation, out_dtype="float32")
    assert snr_db(dw, oracle.weight_gradient(x, g)) > FLOOR_DB["float32"]


GROUPS = {
    "compiled": {
        "xla": [(2056, 256, 576)],
        **dict.fromkeys(("triton", "mosaic_gpu"), ((2056, 256, 576), (2056, 1280, 1280))),
    },
    "interpreted": [(200, 128, 264), (320, 136, 328)],
    "options": ("count", [(2,), (3,)]),
    "few_options": [(3,)],
}


@implementations.each("weight_gradient_group", "block_weight_gradient_group", **GROUPS)
def test_weight_gradients_of_a_group(operation, implementation, shape, count):
    tokens, k, n = shape
    x = normal((tokens, k), "bfloat16")
    gs = tuple(normal((tokens, n), "bfloat16", seed=1 + i) for i in range(count))
    options = {"implementation": implementation, "out_dtype": "float32"}
    if operation.startswith("block"):
        options |= {"dtypes": ("int8", "int8"), "block": 1024, "rotation": 128}
    dws = run(operation, x, gs, **options)
    if operation.startswith("block"):
        wanted = [run("block_weight_gradient", x, g, **options) for g in gs]
    else:
        wanted = [oracle.weight_gradient(x, g) for g in gs]
    assert [dw.shape for dw in dws] == [(k, n)] * count
    for dw, want in zip(dws, wanted):
        assert snr_db(dw, np.asarray(want, np.float64)) > FLOOR_DB["float32"]


# --- extreme values -----------------------------------------------------------------------------------


def extremes(shape, dtype):
    """Returns rows of zeros, subnormals, the largest values, ties, and normal values, one with an outlier."""
    info, width = jnp.finfo(dtype), shape[1]
    x = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    x[0] = 0
    x[1] = -0.0
    x[2] = x[2] * info.smallest_subnormal * 4
    x[3] = info.smallest_normal * np.arange(-width // 2, width // 2).astype(dtype)
    x[4] = np.where(x[4] > 0, info.max, info.min)
    x[5], x[5, 7] = x[5] * np.asarray(1e-3, dtype), 6e4
    x[6] = np.resize([127, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5], width)
    return x


@implementations.each("quantize", **same((12, 160)), **IN_FORMATS)
def test_extreme_values_quantize_to_the_same_bits(operation, implementation, shape, dtype, target):
    x = extremes(shape, dtype)
    for axes in ((-1,), (0,), (0, 1)):
        got = run(operation, x, implementation=implementation, axes=axes, dtype=target)
        assert_same_bits(got, oracle.quantize(x, axes, target))


@implementations.each(*ROW_OPERATIONS, **same((12, 160)), **IN_DTYPES)
def test_extreme_rows(operation, implementation, shape, dtype):
    x = extremes(shape, dtype)
    if "norm" in operation or "gated" in operation:  # squares and products overflow in fp32
        x[4] = np.sign(x[4]) * 1000
    for rows in (x[:2], x[4:5], x[5:]):  # one SNR for each magnitude
        check_row_operation(operation, implementation, rows, **ROW_OPERATIONS[operation])


@implementations.each("quantize", *ROW_OPERATIONS, **same((9, 160)), kept=0)
def test_non_finite_rows_stay_visible_and_alone(operation, implementation, shape):
    options = dict(ROW_OPERATIONS.get(operation, {}), implementation=implementation)
    if operation in QUANTIZING:
        options["quantize_to"] = "int8"

    def rows(*arrays):
        results = run(operation, *arrays, **options)
        return [a for a in map(np.asarray, jax.tree.leaves(results)) if a.ndim == 2]

    x = normal(shape, "bfloat16")
    arrays, bad = row_arguments(operation, x), [2, 4, 6]
    expected = rows(*arrays)
    for place in range(2) if operation == "gated" else range(1):  # in gate, and in up
        poisoned = [array.copy() for array in arrays]
        poisoned[place][bad, 33] = np.nan, np.inf, -np.inf
        for good, got in zip(expected, rows(*poisoned)):
            np.testing.assert_array_equal(np.delete(good, bad, 0), np.delete(got, bad, 0))
            if got.dtype != np.int8:
                assert not np.isfinite(got[bad]).all(1).any()


@implementations.each(
    "matmul",
    compiled=[(136, 256, 320)],
    interpreted=[(72, 128, 64)],
    options=("dtypes", [(dtypes,) for dtypes in PRODUCTS]),
    few_options=[(PRODUCTS[1],)],
)
def test_a_non_finite_scale_stays_in_its_row(operation, implementation, shape, dtypes):
    a, b = operands(shape, dtypes)
    check_row_of_nan(operation, implementation, a, b, a.scale[70])


@implementations.each(
    "layer_norm_backward",
    "rms_norm_backward",
    **RAGGED,
    options=("count", [(1,), (3,), (4,)]),
    few_options=[(3,)],
)
def test_gradients_that_norms_add_in_passing(operation, implementation, shape, count):
    x, gamma = normal(shape, "float16"), normal(shape[1], seed=1)
    *gradients, residual = (normal(x.shape, "float16", seed=seed) for seed in range(2, count + 3))
    options, total = ROW_OPERATIONS[operation], np.sum(gradients, 0, np.float64)
    dx, *sums = getattr(oracle, operation)(x, gamma, total, **options)
    arrays = x, gamma, tuple(gradients), residual
    *got, nothing = run(operation, *arrays, implementation=implementation, **options)
    assert nothing is None
    for a, b in zip(got, (dx + residual, *sums), strict=True):
        assert snr_db(a, b) > FLOOR_DB["float16"]


@implementations.each(
    "cross_entropy",
    compiled=[(77, 333), (3, 5, 17), (64, 128_256)],
    interpreted=[(7, 333), (3, 2, 17), (2, 70_000)],
    **IN_DTYPES,
)
def test_cross_entropy_and_its_gradient(operation, implementation, shape, dtype):
    logits, labels, where = cross_entropy_arguments(shape, dtype)
    call = partial(run, operation, implementation=implementation)
    got = call(logits, labels, where)
    assert got[1].dtype == dtype
    want = oracle.cross_entropy(logits, labels, where)
    for value, exact, kind in zip(got, want, ("float32", dtype)):
        assert snr_db(value, exact) > FLOOR_DB[kind]
    losses, none = call(logits, labels, where, gradient=False)
    np.testing.assert_array_equal(losses, got[0])
    assert none is None


@implementations.each("cross_entropy", compiled=[(6, 40)], interpreted=[(6, 40)])
def test_what_is_no_class_or_not_finite_stays_visible(operation, implementation, shape):
    logits, labels, where = cross_entropy_arguments(shape, "float32")
    where[:] = [1, 1, 1, 1, 0, 1]
    labels[:2] = -1, 40
    logits[2, 3], logits[3, 5], logits[4, 0] = np.nan, np.inf, np.nan
    logits[5, :39] = -np.inf
    labels[5] = 39
    losses, gradient = run(operation, logits, labels, where, implementation=implementation)
    np.testing.assert_array_equal(np.isfinite(losses), [0, 0, 0, 0, 1, 1])
    np.testing.assert_array_equal(gradient[4:], 0)
    assert np.isfinite(gradient[:2]).all() and losses[4] == losses[5] == 0
