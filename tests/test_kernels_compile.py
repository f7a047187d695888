"""Kernels compile, without a GPU, to the expected instructions, for every supported GPU generation.

The tests compile what the functions of `dispatch.kernel` would launch, with the same tiles.
"""

import os
import re
import subprocess
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from implementations import release

from benchmarks.kernels import shapes
from swjax.kernels import dispatch, tiles
from swjax.kernels.block_formats.reference import Blocks
from swjax.kernels.mosaic_gpu.slices import Slices
from swjax.kernels.reference import QTensor

triton = pytest.importorskip("triton", reason="needs Triton, which is made for Linux only")
launcher = pytest.importorskip("swjax.kernels.triton_gpu.launcher")
in_triton = partial(dispatch.kernel, "triton")
in_mosaic = partial(dispatch.kernel, "mosaic_gpu")

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
POINTERS = {
    "bfloat16": "*bf16",
    "float16": "*fp16",
    "float32": "*fp32",
    "int32": "*i32",
    "int8": "*i8",
    "float8_e4m3fn": "*fp8e4nv",
    "float8_e5m2": "*fp8e5",
}
FC1 = shapes.block(1280)["fc1"]
IN_BLOCKS = {"dtypes": ("int8", "int8"), "block": 1024, "rotation": 128}


def array(shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def quantized(rows, columns, dtype="int8", scales=None):
    return QTensor(array((rows, columns), dtype), array((scales or rows, 1)))


@pytest.fixture
def compiled(monkeypatch):
    """compiled(capability, Triton function, *arrays, **options): the kernel of its last launch."""
    monkeypatch.setenv("TRITON_CACHE_DIR", os.environ["SWJAX_TEST_CACHE"] + "/triton")
    launches = []

    def record(*arrays, kernel, out_type, **options):
        launches.append((kernel, [*arrays, *jax.tree.leaves(out_type)], options))
        return jax.tree.map(lambda out: jnp.zeros(out.shape, out.dtype), out_type)

    monkeypatch.setattr(launcher, "call", record)

    def compile_(capability, function, *arrays, **options):
        monkeypatch.setattr(tiles, "compute_capability", lambda: divmod(capability, 10))
        launches.clear()
        jax.eval_shape(partial(function, **options), *arrays)
        return as_jax_triton_does(capability, *launches[-1])

    return compile_


def instructions(kernel, pattern) -> Counter:
    return Counter(
        re.findall(rf"^\s*(?:@%?\w+ )?((?:{pattern})\S*)", kernel.asm["ptx"], re.MULTILINE)
    )


def assert_wide_loads(product):
    """Asserts that operands are copied to shared memory 16 bytes at a time; only scales and bias are not."""
    loads = instructions(product, r"cp\.async\.c[ag]|ld\.global")
    assert loads.pop("cp.async.cg.shared.global", 0), loads
    assert loads.keys() <= {"ld.global.b32", "ld.global.v2.b32"} and loads.total() <= 16, loads


def assert_no_spills(kernel, tmp_path, stack=0):
    """Asserts that the assembled kernel spills no register to local memory, or at most `stack` bytes."""
    (tmp_path / "cubin").write_bytes(kernel.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", tmp_path / "cubin"]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = [int(number) for number in re.findall(r"(?:STACK|LOCAL):(\d+)", usage)]
    assert len(used) == 2 and sum(used) <= stack, usage


def compiled_product(compiled, capability, dtypes=("int8", "int8"), k=FC1.k, n=FC1.n, m=FC1.tokens):
    a, b = quantized(m, k, dtypes[0]), quantized(n, k, dtypes[1], scales=1)
    return compiled(capability, in_triton("matmul"), a, b, array((n,)), out_dtype="bfloat16")


@pytest.mark.parametrize(
    "capability, dtypes, instruction",
    [
        release(80, ("int8", "int8"), "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32"),
        release(89, ("int8", "int8"), "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32"),
        (89, (E5M2, E4M3), "mma.sync.aligned.m16n8k32.row.col.f32.e5m2.e4m3.f32"),
        (90, ("int8", "int8"), "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8"),
        release(90, (E4M3, E4M3), "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3"),
        release(90, (E4M3, E5M2), "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e5m2"),
    ],
)
def test_products_run_on_tensor_cores_with_wide_loads(
    compiled, capability, dtypes, instruction, tmp_path
):
    product = compiled_product(compiled, capability, dtypes)
    assert instructions(product, r"wgmma\.mma|mma\.sync").keys() == {instruction}
    assert_wide_loads(product)
    assert instructions(product, r"st\.global").keys() == {"st.global.v4.b32"}
    assert_no_spills(product, tmp_path)


@pytest.mark.parametrize("capability", [release(80), 90])
def test_products_add_an_array(compiled, capability, tmp_path):
    a, b = quantized(FC1.tokens, FC1.k), quantized(FC1.n, FC1.k, scales=1)
    addend = array((FC1.tokens, FC1.n), "bfloat16")
    product = compiled(capability, in_triton("matmul"), a, b, None, addend, out_dtype="bfloat16")
    assert instructions(product, r"st\.global").keys() == {"st.global.v4.b32"}
    assert_no_spills(product, tmp_path)


def test_ragged_products(compiled):
    """Loads have 16 bytes if the tiles are ragged; the check fails for a K that does not allow it."""
    assert_wide_loads(compiled_product(compiled, 90, k=1008, n=264, m=257))
    with pytest.raises(AssertionError, match="cp.async.ca"):
        assert_wide_loads(compiled_product(compiled, 90, k=1000))


X, HIDDEN = array((65_536, 1280), "bfloat16"), array((65_536, 5120), "bfloat16")
VECTOR = array((1280,))
# Widths of Llama-3-8B.
D, FF = array((16_384, 4096), "bfloat16"), array((16_384, 14_336), "bfloat16")
D_VECTOR = array((4096,))
ROWS = {
    "quantize": ((X,), {}),
    "quantize_and_sum": ((HIDDEN,), {"dtype": E5M2}),
    "quantize_rotated": ((X,), {"rotation": 128}),
    "layer_norm": ((X, VECTOR, VECTOR), {"epsilon": 1e-6, "quantize_to": "int8"}),
    "layer_norm_backward": ((X, VECTOR, X), {"epsilon": 1e-6}),
    "rms_norm": ((D, D_VECTOR), {"epsilon": 1e-6, "offset": 1.0, "quantize_to": "int8"}),
    "rms_norm_backward": ((D, D_VECTOR, D), {"epsilon": 1e-6, "recompute": True}),
    "rms_norm_backward, recomputing": (
        (D, D_VECTOR, (D,) * 3, D),
        {"epsilon": 1e-6, "recompute": True},
    ),
    "layer_norm_backward, recomputing": ((X, VECTOR, (X,) * 3, X, VECTOR), {"epsilon": 1e-6}),
    "gelu": ((HIDDEN,), {"quantize_to": E4M3}),
    "gelu_backward": ((HIDDEN, HIDDEN), {"quantize_to": "int8"}),
    "gated": ((FF, FF), {"quantize_to": "int8"}),
    "gated, gelu": ((FF, FF), {"quantize_to": "int8", "activation": "gelu_tanh"}),
    "gated_backward": ((FF, FF, FF), {"quantize_to": "int8", "recompute": True}),
    "gelu_backward, recomputing": ((HIDDEN, HIDDEN), {"quantize_to": "int8", "recompute": True}),
}


@pytest.mark.parametrize("capability", [release(80), 90])
@pytest.mark.parametrize(
    "case", [release(case) if f"{case}, recomputing" in ROWS else case for case in ROWS]
)
def test_row_kernels_move_16_bytes_at_a_time(compiled, case, capability, tmp_path):
    arrays, options = ROWS[case]
    operation = case.split(",")[0]
    if capability < 89:
        options = {key: "int8" if str(v).startswith("float8") else v for key, v in options.items()}
    kernel = compiled(capability, in_triton(operation), *arrays, **options)
    assert instructions(kernel, r"ld\.global").keys() == {"ld.global.v4.b32"}
    stores = instructions(kernel, r"st\.global")
    assert stores.keys() <= {"st.global.v4.b32", "st.global.v2.b32", "st.global.b32"}, stores
    assert stores["st.global.b32"] <= (2 if operation == "gated_backward" else 1)  # scales of a row
    if not operation.startswith("quantize"):
        assert instructions(kernel, r"cvt\.rn\.bf16").keys() == {"cvt.rn.bf16x2.f32"}
    assert_no_spills(kernel, tmp_path)


@pytest.mark.parametrize("stages", [2, release(3)])
def test_row_kernels_read_ahead(compiled, stages, monkeypatch, tmp_path):
    """16-bit inputs are prefetched with asynchronous copies; fp32 inputs, which may not fit, are not."""
    tile = tiles.RowTile(rows=1, chunk=1024, warps=4, stages=stages)
    monkeypatch.setattr(tiles, "row_tile", lambda producer, width: tile)
    options = {"quantize_to": "int8", "recompute": True}
    kernel = compiled(90, in_triton("gelu_backward"), HIDDEN, HIDDEN, **options)
    assert instructions(kernel, r"cp\.async\.c[ag]|ld\.global").keys() == {
        "cp.async.cg.shared.global"
    }
    assert kernel.metadata.shared >= (stages - 1) * 2 * 2 * HIDDEN.shape[-1]
    assert_no_spills(kernel, tmp_path)
    wide = array(HIDDEN.shape)
    kernel = compiled(90, in_triton("gelu_backward"), wide, wide, **options)
    assert not instructions(kernel, r"cp\.async")


def test_quantizers_compute_what_is_written(compiled):
    """Quantizers contain no fused multiply-add, no approximate division and no maximum that ignores NaN."""
    kernel = compiled(90, in_triton("quantize"), X)
    arithmetic = instructions(kernel, r"(?:mul|add|fma|div|max)\.(?:\w+\.)*f32")
    assert arithmetic.keys() == {"mul.rn.f32", "add.rn.f32", "div.rn.f32", "max.NaN.f32"}


@pytest.mark.parametrize(
    "function, arrays, options",
    [
        (in_triton("quantize"), (), {"axes": (0, 1), "transpose": True}),
        (in_triton("quantize"), (), {"axes": (0,)}),
        (in_triton("quantize_both"), (array((256,)),), {}),
        (in_triton("quantize_both"), (array((1,)),), {"dtype": E5M2, "clip": True}),
    ],
)
def test_matrices_are_quantized_with_wide_loads_and_stores(compiled, function, arrays, options):
    kernel = compiled(90, function, array((1280, 5120)), *arrays, **options)
    for moves in (instructions(kernel, r"ld\.global"), instructions(kernel, r"st\.global")):
        few = ("ld.global.b32", "ld.global.v2.b32", "st.global.b32")  # scales and maxima
        scales = sum(moves.pop(name, 0) for name in few)
        assert moves.keys() <= {"ld.global.v4.b32", "st.global.v4.b32"} and scales <= 1, moves


@pytest.mark.parametrize("v", [128_256, release(151_936)])
def test_cross_entropy_moves_16_bytes_at_a_time(compiled, v, tmp_path):
    arrays = array((4096, v), "bfloat16"), array((4096,), "int32"), array((4096,), "int32")
    kernel = compiled(90, in_triton("cross_entropy"), *arrays)
    loads = instructions(kernel, r"ld\.global")
    assert sum(loads.pop(name, 0) for name in ("ld.global.b32", "ld.global.b16")) == 3, loads
    assert loads.keys() == {"ld.global.v4.b32"}
    stores = instructions(kernel, r"st\.global")
    assert stores.pop("st.global.b32") == 1 and stores.keys() == {"st.global.v4.b32"}
    assert_no_spills(kernel, tmp_path)


@pytest.mark.parametrize(
    "operation, x, options",
    [
        ("quantize_segments", D, {"axes": (-1, 0)}),
        release("quantize_segments", FF, {"axes": (-1,)}),
        release("quantize_segments", FF, {"axes": (0,)}),
        ("quantize_squares", array((4096, 14_336)), {}),
    ],
)
def test_blocks_are_quantized_with_wide_loads_and_stores(compiled, operation, x, options, tmp_path):
    options = {"dtype": E4M3, "block": 128} | options
    kernel = compiled(90, in_triton(operation), x, **options)
    assert instructions(kernel, r"ld\.global").keys() == {"ld.global.v4.b32"}
    stores = instructions(kernel, r"st\.global")
    scales = stores.pop("st.global.b32")
    assert stores.keys() == {"st.global.v4.b32"} and scales <= 2, stores
    assert_no_spills(kernel, tmp_path)


def test_ragged_rows_compile(compiled):
    x = array((77, 333), "float16")
    compiled(80, in_triton("gelu_backward"), x, x, quantize_to="int8", approximate=True)
    compiled(89, in_triton("quantize"), x, dtype=E5M2, axes=(0,), transpose=True)


@pytest.mark.parametrize(
    "tokens, width, causal, stack",
    [
        (77, 64, True, 0),
        release(257, 80, False, 160),
        release(197, 64, False, 64),
        release(129, 80, False, 128),
    ],
)
def test_attention_runs_on_tensor_cores_from_wide_loads(
    compiled, tokens, width, causal, stack, tmp_path
):
    q, lse = array((128, tokens, 16, width), "bfloat16"), array((128, 16, tokens))
    forward = compiled(90, in_triton("attention"), q, q, q, causal=causal)
    of_keys = compiled(90, in_triton("attention_backward"), q, q, q, q, lse, q, causal=causal)
    for kernel in (forward, of_keys):
        assert instructions(kernel, r"wgmma\.mma").total() > 8
        assert "ld.global.b16" not in instructions(kernel, r"ld\.global")
    if tokens > 128:  # the next columns are prefetched
        assert instructions(of_keys, r"cp\.async\.cg")
    assert_no_spills(of_keys, tmp_path, stack)


@pytest.mark.parametrize(
    "capability, shape",
    [
        (90, (65_536, 1280, 5120)),
        *(release(capability, (65_536, 1280, 5120)) for capability in (80, 86)),
        *(release(capability, (1000, 72, 40)) for capability in (80, 90)),
    ],
)
def test_int8_weight_gradients_compile(compiled, capability, shape, tmp_path):
    tokens, k, n = shape
    x, g = array((tokens, k), "bfloat16"), array((tokens, n), "bfloat16")
    options = IN_BLOCKS | {"out_dtype": "float32"}
    product = compiled(capability, in_triton("block_weight_gradient"), x, g, **options)
    assert instructions(product, r"wgmma.*s32\.s8" if capability == 90 else r"mma\.sync.*s32\.s8")
    cut = {"BLOCKS": -(-tokens // 1024), "LENGTH": 1024}
    module = dispatch.module_of("triton", "block_weight_gradient")
    quantize = partial(module.quantize_rotated_blocks, dtype="int8", **cut)
    present = array((tokens,), "bfloat16")
    quantizers = [compiled(capability, quantize, x, given) for given in (None, present)]
    if capability == 90:
        for kernel in (product, *quantizers):
            assert_no_spills(kernel, tmp_path)


@pytest.mark.parametrize("contract", [-1, release(-2)])
@pytest.mark.parametrize("capability", [release(80), 90])
def test_symmetric_products_run_on_tensor_cores_with_wide_loads(
    compiled, capability, contract, tmp_path
):
    x = array((32, 1280, 5120) if contract == -1 else (32, 5120, 1280), "float16")
    gram, factors = array((32, 1280, 1280), "float16"), array((32, 3))
    function = in_triton("symmetric_product")
    for kernel in (
        compiled(capability, function, x, x, None, factors, contract=contract),
        compiled(capability, function, gram, gram, gram, factors),
    ):
        assert instructions(kernel, r"wgmma\.mma.*f16\.f16|mma\.sync.*f16\.f16")
        assert instructions(kernel, r"cp\.async\.c[ag]").keys() == {"cp.async.cg.shared.global"}
        assert instructions(kernel, r"st\.global").keys() == {"st.global.v4.b32"}
        assert_no_spills(kernel, tmp_path)


# Mixtral-8x7B: rows, width, width of the hidden layer, experts.
M, WIDTH, INNER, EXPERTS = 32_768, 4096, 14_336, 8
SIZES = array((EXPERTS,), "int32")
STACK = QTensor(array((EXPERTS, INNER, WIDTH), "int8"), array((EXPERTS, 1, 1)))
ROWS_X, ROWS_G = array((M, WIDTH), "bfloat16"), array((M, INNER), "bfloat16")
RAGGED = {
    "int8": ("ragged_matmul", (quantized(M, WIDTH), STACK, SIZES), {"axis": 2}),
    "16 bits": (
        "ragged_matmul",
        (ROWS_X, array((EXPERTS, WIDTH, INNER), "bfloat16"), SIZES),
        {"axis": 1},
    ),
    "16 bits, input gradient": (
        "ragged_matmul",
        (ROWS_G, array((EXPERTS, WIDTH, INNER), "bfloat16"), SIZES, ROWS_X),
        {"axis": 2},
    ),
    "weight gradient": ("ragged_weight_gradient", (ROWS_X, ROWS_G, SIZES), {}),
    "rotated weight gradient": (
        "ragged_block_weight_gradient",
        (ROWS_X, (ROWS_G,), SIZES),
        IN_BLOCKS,
    ),
}


@pytest.mark.parametrize(
    "capability, case",
    [
        *((90, case) for case in ("int8", "16 bits", "weight gradient")),
        *(release(90, case) for case in ("16 bits, input gradient", "rotated weight gradient")),
        *(release(80, case) for case in RAGGED),
    ],
)
def test_ragged_products_run_on_tensor_cores_with_wide_loads(compiled, capability, case, tmp_path):
    operation, arrays, options = RAGGED[case]
    kernel = compiled(capability, in_triton(operation), *arrays, out_dtype="bfloat16", **options)
    kind = "s32.*s8" if case in ("int8", "rotated weight gradient") else "f32.*bf16"
    found = instructions(kernel, r"wgmma\.mma|mma\.sync")
    assert found and all(re.search(kind, name) for name in found)
    assert all(name.startswith("wgmma") for name in found) or capability == 80
    loads = instructions(kernel, r"cp\.async\.c[ag]|ld\.global")
    assert loads.pop("cp.async.cg.shared.global")
    # Tables, scales and the addend.
    assert loads.keys() <= {"ld.global.b32", "ld.global.v2.b32", "ld.global.v4.b32"}, loads
    assert instructions(kernel, r"st\.global").keys() == {"st.global.v4.b32"}
    if capability == 90:
        assert_no_spills(kernel, tmp_path)


# --- Blackwell: compiled, not timed -----------------------------------------------------------------------

INT8 = "s32.s8.s8.s32"
# {capability: instructions of int8 and of fp8 products}: B200, B300 and the RTX cards. B300 has no int8 unit
# of its generation, and multiplies with the instruction of Ampere.
BLACKWELL = {
    100: ("tcgen05.mma.cta_group::1.kind::i8", "tcgen05.mma.cta_group::1.kind::f8f6f4"),
    103: (
        f"mma.sync.aligned.m16n8k32.row.col.satfinite.{INT8}",
        "tcgen05.mma.cta_group::1.kind::f8f6f4",
    ),
    120: (
        f"mma.sync.aligned.m16n8k32.row.col.satfinite.{INT8}",
        "mma.sync.aligned.m16n8k32.row.col.f32.e5m2.e4m3.f32",
    ),
}
each_blackwell = pytest.mark.parametrize("capability", [release(each) for each in BLACKWELL])


@each_blackwell
def test_products_on_blackwell(compiled, capability, tmp_path):
    for dtypes, instruction in zip((("int8", "int8"), (E5M2, E4M3)), BLACKWELL[capability]):
        product = compiled_product(compiled, capability, dtypes)
        assert instructions(product, r"tcgen05\.mma|mma\.sync").keys() == {instruction}
        assert_wide_loads(product)
        assert_no_spills(product, tmp_path)
        memory = {100: 227, 103: 227, 120: 99}[capability]
        assert product.metadata.shared <= memory * 1024


@each_blackwell
@pytest.mark.parametrize("case", ROWS)
def test_row_kernels_on_blackwell(compiled, case, capability, tmp_path):
    arrays, options = ROWS[case]
    assert_no_spills(
        compiled(capability, in_triton(case.split(",")[0]), *arrays, **options), tmp_path
    )


# {capability: bytes of stack of attention, of its gradient, and of the weight gradient of rotated tokens}.
STACKS = {100: (144, 184, 304), 103: (160, 184, 0), 120: (2048, 64, 0)}


@each_blackwell
def test_spills_on_blackwell_are_bounded(compiled, capability, tmp_path):
    of_attention, of_gradient, of_weights = STACKS[capability]
    q, lse = array((128, 257, 16, 80), "bfloat16"), array((128, 16, 257))
    assert_no_spills(compiled(capability, in_triton("attention"), q, q, q), tmp_path, of_attention)
    backward = compiled(capability, in_triton("attention_backward"), q, q, q, q, lse, q)
    assert_no_spills(backward, tmp_path, of_gradient)
    options = IN_BLOCKS | {"out_dtype": "float32"}
    product = compiled(capability, in_triton("block_weight_gradient"), X, HIDDEN, **options)
    assert_no_spills(product, tmp_path, of_weights)


# --- Mosaic -------------------------------------------------------------------------------------------


needs_jax_11 = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="the kernel needs jax 0.11, as dispatch says"
)


def lowered(function, *arrays, **options) -> str:
    traced = jax.jit(partial(function, **options)).trace(*arrays)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    "dtypes, scales, out_dtype",
    [
        (("int8", "int8"), 1, "bfloat16"),
        pytest.param((E5M2, E4M3), 2560, "float32", marks=needs_jax_11),
        release(("int8", "int8"), 2560, "float16"),
        release((E4M3, E4M3), 2560, "float32"),
        pytest.param((E4M3, E5M2), 1, "bfloat16", marks=[needs_jax_11, pytest.mark.release]),
    ],
)
def test_mosaic_products_lower_for_hopper(dtypes, scales, out_dtype):
    a, b = quantized(1088, 1280, dtypes[0]), quantized(2560, 1280, dtypes[1], scales)
    terms = {"bias": array((2560,)), "addend": array((1088, 2560), out_dtype)}
    for names in ([], ["bias"], ["addend"]):
        given = [terms[name] if name in names else None for name in terms]
        program = lowered(in_mosaic("matmul"), a, b, *given, out_dtype=out_dtype)
        assert "mosaic_gpu" in program


@pytest.mark.parametrize(
    "case", ["int8", *(release(case) for case in RAGGED if case not in ("int8", "weight gradient"))]
)
def test_mosaic_ragged_products_lower_for_hopper(case):
    operation, arrays, options = RAGGED[case]
    program = lowered(in_mosaic(operation), *arrays, out_dtype="bfloat16", **options)
    assert "mosaic_gpu" in program


@pytest.mark.parametrize("scales, out_dtype", [(20, "bfloat16"), release(2560, "float32")])
def test_mosaic_products_of_blocks_lower_for_hopper(scales, out_dtype):
    def blocks(rows, scales):
        return Blocks(array((rows, 1280), E4M3), array((scales, 10)), array((1, 1)))

    operands = blocks(1088, 1088), blocks(2560, scales), array((2560,))
    assert "mosaic_gpu" in lowered(in_mosaic("block_matmul"), *operands, out_dtype=out_dtype)


@needs_jax_11
@pytest.mark.parametrize(
    "contract, addend, m", [(-2, False, 1280), (-1, True, 256), release(-1, True, 1280)]
)
def test_mosaic_symmetric_products_lower_for_hopper(contract, addend, m):
    x, gram = array((32, 4 * m, m), "float16"), array((32, m, m), "float16")
    terms = gram if addend else None, array((32, 3))
    x = gram if addend else x
    function = in_mosaic("symmetric_product")
    assert "mosaic_gpu" in lowered(function, x, x, *terms, contract=contract)


ONE_SLICE = Slices(0, 0.0, 1)


@pytest.mark.parametrize(
    "operation, slices",
    [
        ("weight_gradient", Slices(132, 0.5, 3)),
        ("block_weight_gradient", Slices(264, 0.5, 1)),
        release("weight_gradient", ONE_SLICE),
        release("block_weight_gradient", ONE_SLICE),
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", release("float16")])
def test_mosaic_weight_gradients_lower_for_hopper(operation, slices, dtype):
    x, g, present = (array((5000, *of), dtype) for of in ((1280,), (5120,), ()))
    arrays, options, kernels = (x, g), {}, 1
    if operation == "block_weight_gradient":
        arrays, options, kernels = (x, g, present), IN_BLOCKS | {"out_dtype": dtype}, 3
    program = lowered(in_mosaic(operation), *arrays, slices=slices, **options)
    assert program.count("custom_call @mosaic_gpu") == kernels  # 3: two rotations and a product


# Passes take different lengths. {pass: (tokens, width, causal); the first two are lowered in every run}
ATTENTION = {
    "attention": [
        (257, 80, False),
        (200, 64, True),
        *((tokens, 64, False) for tokens in (257, 197, 99)),
        *((tokens, 80, False) for tokens in (129, 264)),
    ],
    "attention_backward": [
        (257, 80, False),
        (77, 64, True),
        (129, 80, True),
        (260, 80, False),
        *((tokens, 64, False) for tokens in (257, 197, 320, 99)),
    ],
}


@needs_jax_11
@pytest.mark.parametrize("dtype", ["bfloat16", release("float16")])
@pytest.mark.parametrize(
    "operation, tokens, width, causal",
    [
        (release if i > 1 else pytest.param)(operation, *case)
        for operation, cases in ATTENTION.items()
        for i, case in enumerate(cases)
    ],
)
def test_mosaic_attention_lowers_for_hopper(operation, tokens, width, causal, dtype):
    q, lse = array((128, tokens, 16, width), dtype), array((128, 16, tokens))
    arrays = (q, q, q) if operation == "attention" else (q, q, q, q, lse, q)
    assert "mosaic_gpu" in lowered(in_mosaic(operation), *arrays, causal=causal)


def as_jax_triton_does(capability: int, kernel, arrays, options):
    """Compiles a kernel as jax-triton does: pointers aligned to 16 bytes, constants, no fused multiply-add.

    Args:
      capability: of the GPU, such as 90.
      kernel: a function of `triton.jit` whose arguments are pointers, named "..._ptr", and constants.
      arrays: the arrays that the pointers point to.
      options: constants, and Triton's options of the call.
    """
    from triton.backends.compiler import GPUTarget

    options = {name: value for name, value in options.items() if name != "grid"}
    if "registers" in options:
        options["maxnreg"] = options.pop("registers")
    pointers = [param for param in kernel.params if param.name.endswith("_ptr")]
    signature = {param.name: "constexpr" for param in kernel.params}
    signature |= {p.name: POINTERS[str(a.dtype)] for p, a in zip(pointers, arrays, strict=True)}
    constants = {(p.num,): options.pop(p.name) for p in kernel.params if p not in pointers}
    aligned = {(param.num,): [["tt.divisibility", 16]] for param in pointers}
    return triton.compile(
        triton.compiler.ASTSource(kernel, signature, constants, aligned),
        target=GPUTarget("cuda", capability, 32),
        options={"enable_fp_fusion": False, **options},
    )
