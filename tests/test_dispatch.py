"""The rules that choose an implementation, tested without a GPU: the platform is monkeypatched."""

import re
import warnings
from collections import Counter
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec
from thinning import thinned

import swjax.testing
from swjax.kernels import dispatch, reference, saved_programs, targets, tiles
from swjax.kernels.products.tiles import triton_tile
from swjax.kernels.reference import QTensor
from swjax.optax.newton_schulz import coefficients_of, orthogonalize
from swjax.recipes import RECIPES


def array(shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


def quantized(rows, columns, dtype="int8"):
    return QTensor(array((rows, columns), dtype), array((rows, 1), "float32"))


def heads(batch, tokens, width, dtype="bfloat16"):
    return (array((batch, tokens, 4, width), dtype),) * 3


@pytest.fixture
def gpu(monkeypatch):
    """`gpu(capability)` makes the rules see one GPU with jax-triton."""
    pytest.importorskip("triton", reason="needs Triton, which is made for Linux only")

    def pretend(capability=(9, 0), missing=None, devices=1):
        target = targets.Target("gpu", "NVIDIA GPU", ".".join(map(str, capability)))
        monkeypatch.setattr(targets, "current", lambda mesh=None: target)
        monkeypatch.setattr(targets, "device_count", lambda: devices)
        monkeypatch.setattr(dispatch, "_missing_triton", lambda: missing)
        # Saved kernels are lowered when they are traced, which jax-triton cannot do without a GPU.
        monkeypatch.setattr(saved_programs, "_folder", lambda: None)
        dispatch._warn_once.cache_clear()

    yield pretend
    dispatch._warn_once.cache_clear()


X, A, B = array((128, 256)), quantized(128, 256), quantized(128, 256)
X128 = array((1024, 128))
ROTATED = {"dtypes": ("int8", "int8"), "rotation": 128}
ONE = QTensor(array((128, 256), "int8"), array((1, 1), "float32"))
SYMMETRIC = array((2, 1280, 1280))
GRADIENTS = heads(3, 257, 80) * 2
E5M2 = quantized(128, 256, "float8_e5m2")
E4M3 = quantized(128, 256, "float8_e4m3fn")
OLD_JAX = jax.__version_info__ < (0, 11)
SYMMETRIC_KERNEL = "triton" if OLD_JAX else "mosaic_gpu"
ATTENTION = "mosaic_gpu" if (0, 11) <= jax.__version_info__[:2] <= (0, 12) else "triton"


@pytest.mark.parametrize("operation", dispatch.IMPLEMENTATIONS)
def test_without_a_gpu_everything_is_xla(operation):
    arrays = {"matmul": (A, B), "matmul_sum": ((A, A), (B, B))}.get(operation, (X,))
    arrays = (X, X) if operation.endswith("weight_gradient") else arrays
    arrays = (SYMMETRIC,) * 2 if operation == "symmetric_product" else arrays
    arrays = (X, (X, X)) if operation.endswith("_group") else arrays
    arrays = heads(2, 77, 64) * 2 if operation.startswith("attention") else arrays
    assert dispatch.choose(operation, *arrays) == "xla"
    for name in dispatch.IMPLEMENTATIONS[operation]:
        chip = "a TPU" if name == "pallas_tpu" else "an NVIDIA GPU"
        with pytest.raises(ValueError, match=f"'{name}' of '{operation}' needs {chip}, .*cpu"):
            dispatch.choose(operation, *arrays, implementation=name)


@pytest.mark.parametrize(
    "capability, operation, arrays, options, chosen",
    [
        ((9, 0), "matmul", (A, B), {}, "mosaic_gpu"),
        ((9, 0), "matmul", (E4M3, E4M3), {}, "mosaic_gpu"),
        ((9, 0), "matmul", (E5M2, E4M3), {}, "triton" if OLD_JAX else "mosaic_gpu"),
        ((9, 0), "matmul", (quantized(128, 250), quantized(64, 250)), {}, "triton"),
        ((9, 0), "matmul", (A, quantized(63, 256)), {}, "triton"),
        ((9, 0), "matmul", (A, quantized(64, 256)), {}, "triton"),
        ((9, 0), "matmul", (A, quantized(64, 256)), {"out_dtype": "float32"}, "mosaic_gpu"),
        ((9, 0), "matmul", (A, quantized(32, 256)), {"out_dtype": "float32"}, "triton"),
        ((9, 0), "matmul", (quantized(0, 256), B), {}, "xla"),
        ((8, 9), "matmul", (A, B), {}, "triton"),
        ((8, 9), "matmul", (E5M2, E4M3), {}, "triton"),
        ((8, 0), "matmul", (A, B), {}, "triton"),
        ((8, 0), "matmul", (E5M2, E4M3), {}, "xla"),
        ((7, 5), "matmul", (A, B), {}, "xla"),
        ((9, 0), "weight_gradient", (X, X), {}, "xla"),
        ((9, 0), "weight_gradient", (array((8, 8), "float32"),) * 2, {}, "xla"),
        ((9, 0), "weight_gradient", (array((128, 40)), X), {}, "xla"),
        ((9, 0), "weight_gradient", (array((100, 64)),) * 2, {}, "xla"),
        ((9, 0), "matmul", (quantized(100, 256), B), {}, "triton"),
        ((9, 0), "matmul_sum", ((A, A), (ONE, ONE)), {}, "mosaic_gpu"),
        ((9, 0), "matmul_sum", ((A, E4M3), (ONE, ONE)), {}, "xla"),
        ((9, 0), "matmul_sum", ((A, A), (B, B)), {}, "xla"),
        ((8, 0), "matmul_sum", ((A, A), (ONE, ONE)), {}, "xla"),
        ((9, 0), "weight_gradient_group", (X, (X, X)), {}, "mosaic_gpu"),
        ((9, 0), "weight_gradient_group", (X, (X, array((128, 64)))), {}, "xla"),
        ((9, 0), "weight_gradient_group", (array((8, 2048)), (array((8, 2048)),) * 2), {}, "xla"),
        ((8, 0), "weight_gradient_group", (X, (X, X)), {}, "xla"),
        ((8, 0), "weight_gradient", (X, X), {}, "xla"),
        ((9, 0), "symmetric_product", (SYMMETRIC,) * 2, {}, SYMMETRIC_KERNEL),
        ((9, 0), "symmetric_product", (array((2, 1280, 1000)),) * 2, {}, "triton"),
        ((8, 0), "symmetric_product", (SYMMETRIC,) * 2, {}, "triton"),
        ((9, 0), "symmetric_product", (array((2, 1280, 1280), "float32"),) * 2, {}, "xla"),
        ((9, 0), "symmetric_product", (array((2, 128, 512)),) * 2, {}, "xla"),
        ((8, 0), "quantize", (X,), {"dtype": "int8"}, "triton"),
        ((8, 6), "quantize", (X,), {"dtype": "float8_e4m3fn"}, "xla"),
        ((9, 0), "quantize", (array((4, 5, 6)),), {"axes": (1,)}, "xla"),
        ((9, 0), "quantize", (array((4, 5, 6)),), {"axes": (-2, 0)}, "triton"),
        ((9, 0), "quantize_by", (array((4, 6)), array((4, 1), "float32")), {}, "triton"),
        ((9, 0), "quantize_by", (array((4, 6)), array((4, 6), "float32")), {}, "xla"),
        ((9, 0), "quantize", (array((2**22, 64)),), {"axes": (0, 1)}, "xla"),
        ((9, 0), "quantize", (array((2**22, 64)),), {}, "triton"),
        ((9, 0), "quantize_by", (array((2**22, 64)), array((1, 1), "float32")), {}, "xla"),
        ((9, 0), "gelu", (array((4, tiles.WIDEST_ROW + 1)),), {}, "xla"),
        ((9, 0), "gated", (array((4, 28_672)),) * 2, {}, "triton"),
        ((9, 0), "gated", (array((4, tiles.WIDEST_ROW + 1)),) * 2, {}, "xla"),
        ((8, 0), "block_weight_gradient", (array((2**24, 64)),) * 2, ROTATED, "triton"),
        ((8, 0), "block_weight_gradient", (array((2**24 + 1, 64)),) * 2, ROTATED, "xla"),
        ((8, 6), "layer_norm", (X,), {"quantize_to": "float8_e4m3fn"}, "xla"),
        ((9, 0), "attention", heads(8, 257, 80), {}, ATTENTION),
        ((9, 0), "attention", heads(8, 77, 64), {"causal": True}, "triton"),
        ((9, 0), "attention_backward", GRADIENTS, {}, ATTENTION),
        ((9, 0), "attention_backward", heads(8, 50, 64) * 2, {}, "triton"),
        ((9, 0), "attention", heads(8, 257, 64, "float32"), {}, "xla"),
    ],
)
def test_none_falls_back_to_what_can_run(gpu, capability, operation, arrays, options, chosen):
    gpu(capability)
    assert dispatch.choose(operation, *arrays, **options) == chosen


@pytest.mark.parametrize(
    "capability, name, operation, arrays, options, reason",
    [
        ((8, 0), "mosaic_gpu", "matmul", (A, B), {},
         r"is for Hopper \(compute capability 9.0\), and this GPU has \(8, 0\): use 'triton'"),
        ((9, 0), "mosaic_gpu", "matmul", (quantized(128, 250), quantized(64, 250)), {},
         "needs k to be a multiple of 128, got 250: use 'triton'"),
        ((9, 0), "mosaic_gpu", "matmul", (A, quantized(64, 256)), {"out_dtype": "bfloat16"},
         "needs n above 64, got 64: use 'triton'"),
        ((9, 0), "mosaic_gpu", "weight_gradient", (array((8, 8), "float32"),) * 2, {},
         "is for 16-bit operands, got float32: use 'xla'"),
        ((8, 6), "triton", "matmul", (E5M2, E4M3), {},
         r"needs compute capability 8.9 for fp8, and this GPU has \(8, 6\): use 'xla'"),
        ((7, 5), "triton", "gelu", (X,), {},
         r"needs compute capability 8.0 \(Ampere\), and this GPU has \(7, 5\): use 'xla'"),
        ((9, 0), "triton", "quantize", (array((4, 5, 6)),), {"axes": (1,)},
         r"supports scales over the last axis, the other axes or all axes, got axes \[1\]: use 'xla'"),
        ((9, 0), "triton", "gelu", (array((4, 20_000)),), {},
         "supports rows of up to 16384, got 20000: use 'xla'"),
        ((9, 0), "triton", "gelu", (array((0, 8)),), {}, "takes no empty arrays: use 'xla'"),
    ],
)  # fmt: skip
def test_a_named_implementation_that_cannot_run_says_why(
    gpu, capability, name, operation, arrays, options, reason
):
    gpu(capability)
    with pytest.raises(ValueError, match=f"^implementation '{name}' of '{operation}' {reason}$"):
        dispatch.choose(operation, *arrays, implementation=name, **options)


@pytest.mark.skipif(not OLD_JAX, reason="newer jax multiplies two fp8 formats")
def test_two_fp8_formats_need_jax_0_11(gpu):
    gpu()
    with pytest.raises(ValueError, match="needs jax 0.11 .* float8_e5m2 and float8_e4m3fn"):
        dispatch.choose("matmul", E5M2, E4M3, implementation="mosaic_gpu")


def test_a_name_that_an_operation_does_not_have_is_xla(gpu):
    """Hence a whole layer can be given one name."""
    gpu()
    assert dispatch.choose("quantize", X, implementation="mosaic_gpu") == "xla"
    assert dispatch.choose("weight_gradient", X, X, implementation="triton") == "xla"
    assert dispatch.choose("matmul", A, B, implementation="xla") == "xla"


def test_a_layer_whose_products_lack_the_named_implementation_raises():
    quantized_products, others = ["matmul", "weight_gradient"], ["dot", "weight_gradient"]
    for name in (None, "xla", "mosaic_gpu"):
        dispatch.check_products(name, quantized_products)
        dispatch.check_products(name, others)
    dispatch.check_products("triton", quantized_products)
    with pytest.raises(ValueError, match=r"^implementation 'triton' has none of .* \(dot, weight"):
        dispatch.check_products("triton", others)
    with pytest.raises(ValueError, match="one of xla, .* mosaic_gpu, pallas_tpu or None .* 'cuda'"):
        dispatch.check_products("cuda", quantized_products)


def test_what_ran_is_recorded_also_of_functions_that_jax_has_traced():
    x, w = jnp.ones((8, 32)), jnp.ones((32, 16))
    step = jax.jit(jax.grad(lambda w: jnp.sum(swjax.switchback(x, w))))
    step(w)
    for _ in range(2):
        with dispatch.record() as calls:
            with dispatch.record() as inner:
                step(w)
        assert {name for name, _ in inner} == {"quantize", "matmul", "weight_gradient"}
        assert {implementation for _, implementation in inner} == {"xla"} and not calls
    assert swjax.testing.implementations(step, w) == Counter(inner)


@pytest.mark.parametrize(
    "dtype, shape, calls",
    [
        ("float16", (2, 512, 1024), {SYMMETRIC_KERNEL: 13}),  # 2 + 3 steps on a Gram matrix
        ("bfloat16", (2, 512, 1024), {SYMMETRIC_KERNEL: 12}),  # 2 + 2 + 1
        ("float16", (2, 512, 512), {SYMMETRIC_KERNEL: 10}),
        ("float16", (2, 128, 512), {"xla": 13}),
        ("float32", (2, 512, 1024), {"xla": 12}),
    ],
)
def test_kernels_of_muon(gpu, dtype, shape, calls, monkeypatch):
    """A Gram matrix and a polynomial for each segment and step, and products of polynomials."""
    gpu()
    specified = lambda name, operation, **options: partial(getattr(reference, operation), **options)
    monkeypatch.setattr(dispatch, "_jitted", specified)  # kernels need jax-triton
    run = partial(orthogonalize, dtype=dtype, coefficients=coefficients_of("quintic", 5))
    found = swjax.testing.implementations(run, array(shape, "float32"))
    assert found == {("symmetric_product", name): number for name, number in calls.items()}


def test_missing_jax_triton_is_said_once_with_the_command(gpu):
    gpu(missing=f"needs jax-triton, which is not installed: {dispatch.INSTALL}")
    with pytest.warns(UserWarning, match=r"quantize runs through XLA.* pip install 'swjax\[gpu\]'"):
        assert dispatch.choose("quantize", X) == "xla"
    assert dispatch.why_not("triton", "quantize", X).missing_package
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dispatch.choose("quantize", X) == "xla"
        assert dispatch.choose("matmul", A, B) == "mosaic_gpu"
    with pytest.raises(ValueError, match=r"'triton' of 'quantize' needs jax-triton.* pip install"):
        dispatch.choose("quantize", X, implementation="triton")


def test_no_package_is_asked_for_where_the_kernels_cannot_run(gpu):
    gpu((7, 5), missing="needs jax-triton")
    assert dispatch.choose("quantize", X) == "xla"  # warnings are errors


@pytest.mark.parametrize(
    "installed, version, message",
    [
        (False, None, r"needs jax-triton, which is not installed: pip install 'swjax\[gpu\]'"),
        (True, "3.8.0", r"needs Triton 3.9 or newer, got 3.8.0: .*pip install 'swjax\[gpu\]'"),
        (True, "3.10.1", None),
        (True, None, r"needs the package triton, .*pip install 'swjax\[gpu\]'"),
    ],
)
def test_what_is_missing_of_triton(monkeypatch, installed, version, message):
    def version_of(name):
        if version is None:
            raise dispatch.importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda name: installed or None)
    monkeypatch.setattr(dispatch.importlib.metadata, "version", version_of)
    missing = dispatch._missing_triton.__wrapped__()
    assert missing is None if message is None else re.match(message, missing)


def test_int8_products_through_xla_on_a_gpu_are_warned_of(gpu, monkeypatch):
    gpu()
    run = partial(dispatch.run, "matmul", implementation="xla", out_dtype="float32")
    a, b = (reference.quantize(jnp.ones((2, 4))) for _ in range(2))
    monkeypatch.setenv("XLA_FLAGS", "")
    with pytest.warns(
        UserWarning, match=f"sum small ones wrongly: set XLA_FLAGS={dispatch.SAFE_XLA_FLAG}"
    ):
        run(a, b)
    dispatch._warn_once.cache_clear()
    run(*(reference.quantize(jnp.ones((2, 4)), dtype="float8_e4m3fn") for _ in range(2)))
    for spelling in ("false", "False", "0", "true --xla_gpu_enable_triton_gemm=false"):  # as XLA's
        monkeypatch.setenv("XLA_FLAGS", dispatch.SAFE_XLA_FLAG.replace("false", spelling, 1))
        run(a, b)  # warnings are errors
    monkeypatch.setenv("XLA_FLAGS", f"{dispatch.SAFE_XLA_FLAG} --xla_gpu_enable_triton_gemm=true")
    with pytest.warns(UserWarning, match="sum small ones wrongly"):
        run(a, b)
    dispatch._warn_once.cache_clear()
    monkeypatch.setenv("XLA_FLAGS", "")
    gpu((7, 5))
    run(a, b)


def test_several_devices_take_xla_outside_shard_map(gpu):
    gpu(devices=2)
    with pytest.warns(UserWarning, match="2 devices, .* inside jax.shard_map, or with one visible"):
        assert dispatch.choose("matmul", A, B) == "xla"
    assert dispatch.choose("matmul", A, B, implementation="triton") == "triton"


def test_several_devices_take_kernels_inside_shard_map(gpu, monkeypatch):
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,))
    gpu(devices=2)
    chosen = []

    def body(x):
        chosen.append(dispatch.choose("quantize", x))
        return x

    spec = PartitionSpec("data")
    sharded = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    jax.eval_shape(sharded, jnp.ones((4, 8)))
    assert chosen == ["triton"]


def test_the_tuned_table_has_the_first_word(gpu, monkeypatch):
    gpu()
    for preferred, chosen in {"triton": "triton", "xla": "xla", None: "mosaic_gpu"}.items():
        monkeypatch.setattr(
            tiles, "preferred_implementation", lambda operation, key, name=preferred: name
        )
        assert dispatch.choose("matmul", A, B) == chosen


ACCEPTED = {"attention": heads(8, 257, 80), "attention_backward": GRADIENTS}


@pytest.mark.skipif(ATTENTION == "triton", reason="Mosaic's attention needs jax 0.11 or 0.12")
@pytest.mark.parametrize(
    "operation, arrays, options, reason",
    [
        ("attention", heads(4, 257, 80), {}, "b [*] t to be a multiple of 8, got 1028"),
        ("attention", heads(8, 77, 64), {"causal": True}, "of 128 to 200 tokens, got 77"),
        ("attention", heads(8, 77, 64), {}, "supports sequences of 96 to 265 tokens, got 77"),
        ("attention", heads(8, 257, 88), {}, r"heads of \(64, 80\) features, got 88"),
        ("attention", heads(8, 320, 64), {}, "sequences of 96 to 265 tokens, got 320"),
        ("attention", heads(8, 257, 64, "float32"), {}, "a 16-bit dtype, got float32"),
        ("attention", (array((8, 257, 1, 80)),) * 3, {}, "several heads of 80 features, got one"),
        ("attention_backward", heads(2, 257, 80, "float32") * 2, {}, "got float32: use 'xla'"),
        ("attention_backward", heads(2, 257, 88) * 2, {}, r"heads of \(64, 80\) features, got 88"),
        (
            "attention_backward",
            heads(2, 64, 64) * 2,
            {},
            "more than 64 tokens, got 64: use 'triton'",
        ),
        ("attention_backward", (array((2, 99, 1, 80)),) * 6, {}, "several heads of 80 .*, got one"),
        ("attention_backward", heads(2, 264, 80) * 2, {}, "264 tokens of 80 features exceed"),
    ],
)
def test_what_attention_in_mosaic_refuses(gpu, operation, arrays, options, reason):
    gpu((9, 0))
    choose = partial(dispatch.choose, operation, implementation="mosaic_gpu")
    assert choose(*ACCEPTED[operation]) == "mosaic_gpu"
    with pytest.raises(ValueError, match=reason):
        choose(*arrays, **options)


# --- tiles --------------------------------------------------------------------------------------------


def test_an_amd_gpu_runs_everything_through_xla(monkeypatch):
    device = SimpleNamespace(device_kind="AMD Instinct MI300X", compute_capability="gfx942")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(dispatch, "_missing_triton", lambda: "is not installed")
    with warnings.catch_warnings(action="ignore"):
        assert dispatch.choose("quantize", X) == dispatch.choose("matmul", A, B) == "xla"
    with pytest.raises(ValueError, match="is for Hopper"):
        dispatch.choose("matmul", A, B, implementation="mosaic_gpu")


def test_a_gpu_without_a_table_uses_that_of_its_compute_capability():
    h200, h100, a100, cpu = (
        SimpleNamespace(device_kind=kind, compute_capability=capability)
        for kind, capability in [
            ("NVIDIA H200", "9.0"),
            ("NVIDIA H100 of another make", "9.0"),
            ("NVIDIA A100", "8.0"),
            ("cpu", ""),
        ]
    )
    assert tiles.table(h100) == tiles.table(h200) != {}
    assert tiles.table(a100) == tiles.table(cpu) == {}


@pytest.mark.parametrize("width", [1, 8, 77, 333, 768, 1024, 1280, 4096, 5120, tiles.WIDEST_ROW])
@pytest.mark.parametrize("operation", ["none", "layer_norm", "gelu_backward"])
def test_row_tiles_are_powers_of_two_that_cover_a_row(operation, width):
    tile = tiles.row_tile(operation, width)
    for size in (tile.rows, tile.chunk, tile.warps):
        assert size >= 1 and size & (size - 1) == 0
    chunks = -(-width // tile.chunk)
    assert (chunks - 1) * tile.chunk < width <= chunks * tile.chunk
    assert tile.chunk == 64 or chunks * tile.chunk <= width * 9 / 8  # at most an eighth is padding
    assert tiles.row_programs(tile) == 132 * min(16, 32 // tile.warps)


@pytest.mark.parametrize("capability, memory", [((8, 0), 163), ((8, 9), 99), ((9, 0), 227)])
@pytest.mark.parametrize("m", [1, 64, 65, 65_536])
def test_product_tiles_fit_shared_memory(monkeypatch, capability, memory, m):
    target = targets.Target("gpu", "", ".".join(map(str, capability)))
    monkeypatch.setattr(targets, "current", lambda: target)
    tile = triton_tile(m, 5120, 1280)
    assert (tile.m + tile.n) * tile.k * tile.stages <= memory * 1024
    assert tile.m == (64 if m <= 64 else 128)


@pytest.mark.parametrize(
    "recipe, implementation", thinned([*RECIPES], [None, "mosaic_gpu", "triton"], full=[None])
)
def test_layers_fit_together_as_on_a_gpu(gpu, recipe, implementation):
    """Traces layers without running them: kernels take other operand layouts than XLA does."""
    pytest.importorskip("jax_triton", reason="needs jax-triton, which is for Python 3.12")
    gpu()
    emulated = RECIPES[recipe].is_emulated(targets.block_formats())
    without = emulated and recipe != "fp4_dge"  # whose weight gradient is fp8
    no_products = without or (recipe in ("standard", "fp8_block128") and implementation == "triton")
    if no_products and implementation:
        with pytest.raises(ValueError, match="has none of the products of this layer"):
            swjax.switchback(X, array((256, 64)), recipe=recipe, implementation=implementation)
        return
    if recipe == "fp8_hadamard" and implementation:
        pytest.skip("kernels for the weight gradient of rotated tokens are int8 only")

    def loss(x, w1, b1, w2, norm):
        options = {"recipe": recipe, "prologue": norm, "implementation": implementation}
        y = swjax.mlp(x, w1, b1, w2, None, **options)
        options["prologue"] = swjax.RMSNorm(norm.scale)
        y = swjax.gated_mlp(y, w1, w1, w2, **options)
        return jnp.sum(y.astype(jnp.float32))

    vector = array((128,), "float32")
    norm = swjax.LayerNorm(vector, vector)
    weights = array((128, 512), "float32"), array((512,), "float32"), array((512, 128), "float32")
    trace = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2, 3, 4)))
    with warnings.catch_warnings(action="ignore" if emulated else "error"):
        traced = trace(array((4, 64, 128)), *weights, norm)
    text = str(traced)
    assert ("triton_kernel_call" in text) == (implementation != "mosaic_gpu")
    # Without a tuned table, Mosaic kernels that nobody names multiply quantized matrices, and compute the
    # weight gradients of gate and up.
    mosaic = implementation != "triton" and not without
    assert ("mpmd_map" in text) == mosaic  # the primitive of Pallas's kernels


@pytest.mark.parametrize(
    "implementation, devices",
    [(None, 1), ("triton", 1), ("mosaic_gpu", 1), ("mosaic_gpu", 2), ("xla", 1)],
)
@pytest.mark.parametrize(
    "recipe", ["standard", "switchback", "switchback_q", "switchback_hadamard"]
)
def test_layers_of_one_input_share_kernels(gpu, recipe, implementation, devices):
    """Queries, keys and values have one kernel each for their input's gradient and their weight gradients.

    Several devices do not change what a named implementation computes.
    """
    pytest.importorskip("jax_triton", reason="needs jax-triton, which is for Python 3.12")
    gpu(devices=devices)

    def loss(x, *ws):
        ys = swjax.switchback(x, ws, recipe=recipe, implementation=implementation)
        return sum(jnp.sum(y.astype(jnp.float32)) for y in ys)

    weight = array((128, 128), "float32")
    trace = lambda: jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2, 3)))(X128, *(weight,) * 3)
    if (recipe, implementation) == ("standard", "triton"):
        with pytest.raises(ValueError, match="'triton' has none of the products of this layer"):
            trace()
        return
    traced = str(trace())
    mosaic = implementation in (None, "mosaic_gpu")
    # `switchback_q` has several scales for a weight.
    per_tensor = recipe in ("switchback", "switchback_hadamard")
    assert ("name=swjax_matmul_sum" in traced) == (mosaic and per_tensor)
    in_blocks = recipe == "switchback_hadamard"
    assert ("name=swjax_weight_gradient_group" in traced) == (mosaic and not in_blocks)
    assert ("name=swjax_block_weight_gradient_group" in traced) == (mosaic and in_blocks)
