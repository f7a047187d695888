"""Tests that need a GPU: uninitialized memory, large sizes, slices of sums, and the automatic choice."""

from functools import partial

import implementations
import jax
import jax.numpy as jnp
import kernel_oracle as oracle
import numpy as np
import pytest
from kernel_cases import (
    QUANTIZING,
    ROW_OPERATIONS,
    attention_arguments,
    blocks,
    cross_entropy_arguments,
    normal,
    operands,
    row_arguments,
)
from numeric import FLOOR_DB, snr_db

import swjax
from swjax.kernels import dispatch, reference, tiles
from swjax.kernels.mosaic_gpu.slices import Slices
from swjax.kernels.reference import QTensor

pytestmark = pytest.mark.gpu
IN_BLOCKS = {"dtypes": ("int8", "int8"), "block": 1024, "rotation": 128, "out_dtype": "float32"}


def calls():
    """Returns {operation: (arrays, options)}, with sizes that are no multiples of tiles, in several waves."""
    x, g = normal((1000, 1344), "bfloat16"), normal((1000, 576), "bfloat16", seed=1)
    cases = {
        operation: (row_arguments(operation, x), options)
        for operation, options in ROW_OPERATIONS.items()
    }
    for operation in QUANTIZING:
        cases[operation] = (cases[operation][0], cases[operation][1] | {"quantize_to": "int8"})
    cases["quantize"] = ((x,), {"axes": (0, 1), "transpose": True})
    cases["quantize_by"] = ((x, normal((1000, 1)) ** 2), {})
    cases["quantize_rotated"] = ((x,), {"rotation": 64})
    cases["quantize_both"] = ((x, np.full(256, 8, "float32")), {})
    cases["matmul"] = (operands((1000, 1280, 576)), {"out_dtype": "bfloat16"})
    cases["block_matmul"] = (blocks((1000, 1280, 576)), {"out_dtype": "bfloat16"})
    of_blocks = {"dtype": "float8_e4m3fn", "block": 128}
    cases["quantize_segments"] = ((x[:896, :1280],), of_blocks | {"axes": (-1, 0)})
    cases["quantize_squares"] = ((x[:896, :1280],), of_blocks)
    pairs = (operands((1000, 1280, 576), seed=seed) for seed in range(3))
    cases["matmul_sum"] = (tuple(zip(*pairs)), {"out_dtype": "bfloat16"})
    cases["weight_gradient"] = ((x, g), {"out_dtype": "float32"})
    cases["weight_gradient_group"] = ((x, (g, g, g)), {"out_dtype": "float32"})
    cases["block_weight_gradient"] = ((x, g), IN_BLOCKS)
    cases["block_weight_gradient_group"] = ((x, (g, g, g)), IN_BLOCKS)
    sizes = np.array([300, 0, 7, 553, 60], "int32")
    a, b = operands((1000, 1280, 5 * 576))
    w = QTensor(
        b.values.reshape(5, 576, 1280), np.linspace(1, 2, 5, dtype="float32")[:, None, None]
    )
    cases["ragged_matmul"] = ((a, w, sizes), {"axis": 2, "out_dtype": "bfloat16"})
    cases["ragged_weight_gradient"] = ((x, g, sizes), {"out_dtype": "float32"})
    cases["ragged_block_weight_gradient"] = ((x, (g, g), sizes), IN_BLOCKS)
    stack = normal((3, 1000, 576), "float16") / 24
    cases["symmetric_product"] = ((stack, stack, None, np.ones((3, 3), "float32")), {})
    cases["cross_entropy"] = (cross_entropy_arguments((1000, 5000)), {})
    cases["attention"] = (attention_arguments("attention", (16, 257, 4, 80)), {})
    cases["attention_backward"] = (attention_arguments("attention_backward", (16, 257, 4, 80)), {})
    return cases


def poison(results):
    """Fills memory of the size of `results` with NaN and frees it, so that the next results reuse it."""
    nan = [
        jnp.full(-(-leaf.nbytes // 4), jnp.nan, jnp.float32)
        for leaf in jax.tree.leaves(results)
        for _ in range(4)
    ]
    jax.block_until_ready(nan)
    for array in nan:
        array.delete()


@pytest.mark.parametrize(
    "operation, implementation", implementations.of(*implementations.OPERATIONS)
)
def test_every_run_writes_every_element_the_same(operation, implementation):
    """Whatever the memory of the results contained before, they have the same bits and are finite."""
    check_runs(operation, implementation, *calls()[operation])


@pytest.mark.parametrize("operation, implementation", implementations.of("attention_backward"))
def test_every_run_over_a_short_sequence_writes_the_same(operation, implementation):
    """Its backward pass is another kernel."""
    check_runs(operation, implementation, attention_arguments(operation, (16, 129, 4, 80)), {})


def check_runs(operation, implementation, arrays, options):
    arrays = jax.device_put(arrays)
    call = partial(
        implementations.run, operation, *arrays, implementation=implementation, **options
    )
    first = jax.device_get(call())
    assert all(np.isfinite(np.asarray(a, np.float32)).all() for a in jax.tree.leaves(first))
    for _ in range(5):
        poison(first)
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(call()), first)


MILLION = 16_384 * 65  # tokens


def kernels_of(*operations):
    return [kernel for kernel in implementations.of(*operations) if kernel.values[1] != "xla"]


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("operation, implementation", kernels_of("quantize", *ROW_OPERATIONS))
def test_narrow_rows_of_a_million_tokens(operation, implementation, width):
    arrays = row_arguments(operation, normal((MILLION, width), "bfloat16"))
    options = ROW_OPERATIONS.get(operation, {})
    check_by_xla(operation, implementation, arrays, options)
    if operation in QUANTIZING:
        check_by_xla(operation, implementation, arrays, options | {"quantize_to": "int8"})


@pytest.mark.parametrize("k, n", [(64, 64), (64, 256), (256, 64), (128, 128), (512, 128)])
@pytest.mark.parametrize("operation, implementation", kernels_of("matmul"))
def test_narrow_products_of_a_million_tokens(operation, implementation, k, n):
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-127, 128, (rows, k), "int8") for rows in (MILLION, n))
    scale = rng.uniform(0.5, 2, (MILLION, 1)).astype("float32") / (127 * k**0.5)
    arrays = QTensor(a, scale), QTensor(b, np.full((1, 1), 1 / 127, "float32")), normal(n)
    check_by_xla(operation, implementation, arrays, {"out_dtype": "bfloat16"})


def check_by_xla(operation, implementation, arrays, options):
    """Compares with the specification, which XLA computes on the same device, without copies to the host."""
    arrays = jax.device_put(arrays)
    got = implementations.run(operation, *arrays, implementation=implementation, **options)
    want = jax.jit(partial(getattr(reference, operation), **options))(*arrays)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        error = jnp.linalg.norm(a - b) / jnp.linalg.norm(b)
        assert error < 0.01, f"{operation} {a.dtype}{list(a.shape)}: relative error {error:.1e}"


def cuts(shape, columns):
    """Slices of a weight gradient on 7 multiprocessors, with and without an early slice."""
    _, k, n = shape
    tile_count = -(-k // 128) * -(-n // columns)
    whole = tile_count // 7 * 7
    uncut = [Slices(0, 0.0, count) for count in (1, 2, 4)]
    return [*uncut, Slices(whole, 0.4, 1), Slices(whole, 0.5, 3)]


@pytest.mark.parametrize("cut", range(5))
@pytest.mark.parametrize("shape", [(4104, 192, 320), (8192, 1280, 576), (1000, 768, 3072)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_slices_of_the_weight_gradient_add_up(cut, shape, dtype, monkeypatch):
    implementations.require("mosaic_gpu")
    tokens, k, n = shape
    x, g = normal((tokens, k), dtype), normal((tokens, n), dtype, seed=1)
    options = {"slices": cuts(shape, 256)[cut]}
    monkeypatch.setattr(tiles, "multiprocessors", lambda: 7)
    call = jax.jit(partial(dispatch.kernel("mosaic_gpu", "weight_gradient"), **options))
    dw = jax.device_get(call(x, g))
    assert snr_db(dw, oracle.weight_gradient(x, g)) > FLOOR_DB["float32"]
    poison(dw)
    np.testing.assert_array_equal(call(x, g), dw)


@pytest.mark.parametrize("cut", range(5))
@pytest.mark.parametrize("shape", [(4104, 192, 320), (8192, 1280, 576)])
def test_slices_of_the_int8_weight_gradient_add_up(cut, shape, monkeypatch):
    implementations.require("mosaic_gpu")
    from swjax.kernels.reference import block_weight_gradient

    tokens, k, n = shape
    x, g = normal((tokens, k), "bfloat16"), normal((tokens, n), "bfloat16", seed=1)
    options = {"slices": cuts(shape, 160)[cut]}
    monkeypatch.setattr(tiles, "multiprocessors", lambda: 7)
    kernel = dispatch.kernel("mosaic_gpu", "block_weight_gradient")
    call = jax.jit(partial(kernel, **options, **IN_BLOCKS))
    dw = jax.device_get(call(x, g))
    assert snr_db(dw, block_weight_gradient(x, g, **IN_BLOCKS)) > 70
    poison(dw)
    np.testing.assert_array_equal(call(x, g), dw)


LAST = 100  # the rows compared, whose offsets exceed 2**31


def test_rows_beyond_2_to_the_31_elements():
    tokens, width = 2**31 // tiles.WIDEST_ROW + LAST, tiles.WIDEST_ROW
    last = normal((LAST, width), "bfloat16")
    x = jnp.zeros((tokens, width), jnp.bfloat16).at[-LAST:].set(last)
    q = implementations.run("quantize", x, implementation="triton")
    np.testing.assert_array_equal(q.values[-LAST:], oracle.quantize(last)[0])


@pytest.mark.parametrize("implementation", ["triton", "mosaic_gpu"])
def test_products_beyond_2_to_the_31_elements(implementation):
    n = 4096
    a, b = operands((2**31 // n + LAST + 4, 128, n))
    y = implementations.run("matmul", a, b, implementation=implementation, out_dtype="bfloat16")
    want = oracle.matmul(QTensor(a.values[-LAST:], a.scale[-LAST:]), b)
    assert snr_db(y[-LAST:], want) > FLOOR_DB["bfloat16"]


def test_long_sums_of_int8_products():
    """Sums of more than 2**17 products could overflow int32, so the layer splits them."""
    tokens, width = 2**18 + 128, 256
    x, w = jnp.ones((tokens, width), jnp.bfloat16), jnp.ones((width, width))
    dw = jax.grad(lambda w: jnp.sum(swjax.switchback(x, w, recipe="llm_int8").astype(jnp.float32)))(
        w
    )
    np.testing.assert_allclose(dw, tokens, rtol=1e-5)


@pytest.mark.parametrize("operation", implementations.OPERATIONS)
def test_none_chooses_what_can_run_here(operation):
    """None chooses the first implementation that can run, or the one in the device's tuned table."""
    if jax.device_count() > 1:
        pytest.skip("several devices: outside shard_map everything runs through XLA")
    arrays, options = calls()[operation]
    arrays = jax.device_put(arrays)
    able = [
        name
        for name in dispatch.IMPLEMENTATIONS[operation]
        if dispatch.why_not(name, operation, *arrays, **options) is None
    ]
    chosen = dispatch.choose(operation, *arrays, **options)
    preferred = tiles.preferred_implementation(operation, dispatch.shape_key(operation, *arrays))
    assert chosen == (preferred if preferred in ("xla", *able) else (*able, "xla")[0])


def test_a_named_implementation_that_cannot_run_says_why():
    implementations.require("mosaic_gpu")
    a, b = operands((130, 145, 264))
    with pytest.raises(ValueError, match="'mosaic_gpu' of 'matmul' .* be a multiple of 8, got 130"):
        dispatch.run("matmul", a, b, implementation="mosaic_gpu", out_dtype="float32")
    x = normal((40, 48))
    with pytest.raises(ValueError, match="is for 16-bit operands, got float32: use 'xla'"):
        dispatch.run("weight_gradient", x, x, implementation="mosaic_gpu", out_dtype="float32")
