"""Block formats: bits equal to independent definitions, and rounding without bias."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from numeric import floor_db, snr_db

import swjax
from swjax.kernels import targets
from swjax.kernels.block_formats.reference import emulated, quantize_blocks
from swjax.recipes import RECIPES, Product, Quantizer, Recipe

pytestmark = pytest.mark.usefixtures("compiles_as_users_do")

E4M3, E5M2, E2M1 = (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float4_e2m1fn)
LARGEST = {E4M3: np.float32(448), E5M2: np.float32(57344), E2M1: np.float32(6)}
EXPONENT = {E4M3: 8, E5M2: 15, E2M1: 2}


def drawn(*shape, seed=0):
    """Values of many magnitudes, with zeros, a block of zeros and ties."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-20, 20, (shape[0], 1)))
    x[rng.random(shape) < 0.05] = 0
    x[-1, :32] = 0
    x[-2] = np.resize([448, 17.0, 18.0, 19.0, 0.25, 6.0, 5.0, 2.5], shape[1])
    return x.astype(np.float32)


def blocks_of(x, block):
    """[m, n] as [m, n / block, block]."""
    return x.reshape(len(x), -1, block)


def rounded(x, dtype):
    return np.clip(x, -LARGEST[dtype], LARGEST[dtype]).astype(dtype).astype(np.float32)


def ocp(x, dtype, block=32):
    """OCP MX 1.0, section 6.3: the scale is the largest power of two in the block over that of the format."""
    blocks = blocks_of(x.astype(np.float64), block)
    maxima = np.maximum(np.abs(blocks).max(-1, keepdims=True), 2.0**-92)
    scale = np.exp2(np.floor(np.log2(maxima)) - EXPONENT[dtype])
    return rounded((blocks / scale).astype(np.float32), dtype).reshape(x.shape), scale[..., 0]


def transformer_engine(x, block, square=False):
    """NVFP4 as in Transformer Engine's Python reference: two scales, every operation rounded to float32."""
    one = np.float32(1)
    encode = np.float32(448) * np.float32(6) / np.abs(x).max()
    decode = one / encode
    maxima = np.abs(blocks_of(x, block)).max(-1, keepdims=True)
    if square:
        over_rows = maxima.reshape(-1, block, maxima.shape[1]).max(1)
        maxima = np.repeat(over_rows, block, axis=0)[..., None]
    scale = np.minimum(maxima / np.float32(6) * encode, np.float32(448)).astype(E4M3)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        inverse = np.minimum(one / (scale.astype(np.float32) * decode), np.finfo(np.float32).max)
        values = rounded(blocks_of(x, block) * inverse, E2M1)
    return values.reshape(x.shape), scale.astype(np.float32)[..., 0], decode


@pytest.mark.parametrize("dtype", [E4M3, E5M2, E2M1])
def test_mx_follows_the_ocp_specification(dtype):
    x, name = drawn(64, 128), np.dtype(dtype).name
    q = jax.jit(quantize_blocks, static_argnames=("dtype", "block", "scale"))(
        x, dtype=name, block=32, scale="float8_e8m0fnu"
    )
    values, scale = ocp(x, dtype)
    np.testing.assert_array_equal(q.values, values)
    np.testing.assert_array_equal(q.scales, scale)
    assert np.all(np.asarray(q.scale) == 1)


def test_mx_scales_that_are_rounded_up_are_those_of_jax():
    """`jax.nn.scaled_matmul` clips nothing: some blocks have twice the scale of the OCP specification."""
    from jax._src.cudnn.scaled_matmul_stablehlo import e8m0_to_dtype, quantize

    x = drawn(64, 128)[:-2]
    config = jax.nn.get_scaled_dot_general_config("mxfp8")
    theirs, scales = jax.jit(lambda x: quantize(x, config))(jnp.asarray(x)[None])
    scales = np.asarray(e8m0_to_dtype(np.asarray(scales).view(np.uint8), np.float32))[0]
    ours, down = (
        jax.jit(partial(quantize_blocks, **FORMATS["mx"], ceil=ceil))(x) for ceil in (True, False)
    )
    np.testing.assert_array_equal(ours.scales, scales)
    np.testing.assert_array_equal(ours.values, np.asarray(theirs, np.float32)[0])
    clipped = np.abs(blocks_of(x, 32)).max(-1) > 448 * np.asarray(down.scales)
    np.testing.assert_array_equal(scales / np.asarray(down.scales), np.where(clipped, 2, 1))
    assert 0.1 < clipped.mean() < 0.4  # mantissas of maxima above 1.75


def test_mxfp8_with_gradients_in_e5m2_and_scales_rounded_up():
    """The recipe of docs/recipes.md."""
    x, g = (
        Quantizer(f"float8_{kind}", "segment", 32, scale="float8_e8m0fnu", ceil=True)
        for kind in ("e4m3fn", "e5m2")
    )
    recipe = Recipe(fwd=Product(x, x), dgrad=Product(g, x), wgrad=Product(x, g))
    rng = np.random.default_rng(0)
    x, w, g = (rng.normal(size=s).astype(np.float32) for s in ((40, 48), (48, 24), (40, 24)))
    layer = jax.jit(lambda x, w, g: jax.vjp(partial(swjax.switchback, recipe=recipe), x, w)[1](g))
    of_x, of_g = (
        lambda a, fmt=fmt: oracle.in_blocks(a, partial(oracle.mx, fmt=fmt, ceil=True), 32)
        for fmt in ("e4m3", "e5m2")
    )
    dx, dw = layer(x, w, g)
    assert snr_db(dx, of_g(g) @ of_x(w).T) > floor_db("float32", 24)
    assert snr_db(dw, of_x(x.T) @ of_g(g.T).T) > floor_db("float32", 40)


@pytest.mark.parametrize("square", [False, True])
def test_nvfp4_follows_transformer_engine(square):
    x = drawn(64, 128) if square else drawn(48, 128, seed=1)
    q = jax.jit(quantize_blocks, static_argnames=("dtype", "block", "scale", "square"))(
        x, dtype="float4_e2m1fn", block=16, scale="float8_e4m3fn", square=square
    )
    values, scale, decode = transformer_engine(x, 16, square)
    got = np.repeat(q.scales, 16, axis=0) if square else q.scales
    np.testing.assert_array_equal(got, scale)
    np.testing.assert_array_equal(q.values, values)
    np.testing.assert_array_equal(q.scale, np.full((1, 1), decode))


@pytest.mark.parametrize("square", [False, True])
def test_float32_scales(square):
    """absmax / 448 in float32, values x * (448 / absmax) rounded to e4m3, as in `swjax.quantize`."""
    x = drawn(256, 384, seed=2)
    rows = x.reshape(2, 128, 3, 128) if square else x.reshape(256, 1, 3, 128)
    maxima = np.maximum(np.abs(rows).max((1, 3)), np.float32(2.0**-92))
    q = jax.jit(partial(quantize_blocks, **FORMATS["128"], square=square))(x)
    np.testing.assert_array_equal(q.scales, maxima * np.float32(1 / 448))
    spread = np.repeat(maxima, 128, axis=1)
    spread = np.repeat(spread, 128, axis=0) if square else spread
    np.testing.assert_array_equal(q.values, rounded(x * (np.float32(448) / spread), E4M3))


FORMATS = {
    "mx": {"dtype": "float8_e4m3fn", "block": 32, "scale": "float8_e8m0fnu"},
    "nv": {"dtype": "float4_e2m1fn", "block": 16, "scale": "float8_e4m3fn"},
    "128": {"dtype": "float8_e4m3fn", "block": 128, "scale": "float32"},
}


@pytest.mark.parametrize("name, square", [("mx", False), ("nv", True), ("128", True)])
def test_short_last_blocks_equal_padding(name, square):
    options = FORMATS[name] | {"square": square}
    quantize = jax.jit(partial(quantize_blocks, **options), static_argnums=1)
    block, x = options["block"], jnp.asarray(drawn(200, 77, seed=3))
    padded = jnp.pad(x, ((0, -200 % block if square else 0), (0, -77 % block)))
    got, want = (quantize(each, 1) for each in (x, padded))
    np.testing.assert_array_equal(got.values, want.values[:200, :77])
    np.testing.assert_array_equal(got.scales, want.scales)
    along_rows = quantize(x.T, 0)
    np.testing.assert_array_equal(along_rows.values, got.values.T)


@pytest.mark.parametrize("name", FORMATS)
def test_emulated_values(name):
    """The values of small scales are exact in bfloat16; bfloat16 inputs give the same as float32."""
    options = FORMATS[name]
    x = jnp.asarray(drawn(16, 256, seed=4), "bfloat16")
    quantize = jax.jit(partial(quantize_blocks, **options))
    q, again = quantize(x), quantize(x.astype("float32"))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.all(a == b)), q, again))
    block = options["block"]
    exact = np.asarray(q.values, np.float64) * np.repeat(q.scales, block, axis=1)
    if name != "128":
        values = emulated(q, -1, block, dtype="bfloat16").values
        np.testing.assert_array_equal(values.astype("float32"), exact)
    values = emulated(q, -1, block, dtype="float32").values
    np.testing.assert_allclose(values, exact, rtol=2**-24)


@pytest.mark.parametrize("name", FORMATS)
def test_non_finite_elements_spoil_their_block(name):
    options = FORMATS[name]
    quantize = jax.jit(partial(quantize_blocks, **options))
    for bad in (np.nan, np.inf):
        q = np.asarray(quantize(jnp.ones((2, 256)).at[0, 3].set(bad)).values)
        assert np.isnan(q[0, : options["block"]]).all()
        if name != "nv":
            assert np.isfinite(q[0, options["block"] :]).all() and np.isfinite(q[1]).all()


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
def test_empty_arrays(shape):
    for options in FORMATS.values():
        assert quantize_blocks(jnp.zeros(shape), **options).values.shape == shape


def test_bad_arguments():
    x = jnp.ones((2, 4, 4))
    ceil = {"scale": "float32", "ceil": True}
    for wrong in ({"dtype": "int8"}, {"scale": "bfloat16"}, {"block": 0}, {"square": True}, ceil):
        with pytest.raises(ValueError, match="quantize_blocks needs a dtype of .* got"):
            quantize_blocks(x, **FORMATS["mx"] | wrong)


@pytest.mark.parametrize("name", FORMATS)
def test_stochastic_rounding_has_no_bias(name):
    """The mean of 10^5 draws is within five standard errors of x, everywhere in the range of the format."""
    draws, options = 100_000, FORMATS[name]
    block = options["block"]
    scale = 6.0 if "float4" in options["dtype"] else 448.0
    x = np.linspace(-1, 1, block, dtype=np.float32) * scale
    x[1::4] *= 0.01  # near zero and among the subnormals

    @jax.jit
    def statistics(x, key):
        bits = jax.random.bits(key, (draws, block), "uint32")
        q = quantize_blocks(jnp.broadcast_to(x, (draws, block)), **options, bits=bits)
        values = q.values * q.scales * q.scale
        neighbours = (values == values.min(0, keepdims=True)) | (
            values == values.max(0, keepdims=True)
        )
        return values.mean(0), values.std(0), neighbours.all()

    mean, deviation, neighbours = statistics(x, jax.random.key(0))
    error = np.abs(np.asarray(mean) - x)
    assert np.all(error <= 5 * np.asarray(deviation) / np.sqrt(draws) + 1e-6 * scale)
    assert neighbours


def test_gradients_of_a_layer_are_rounded_without_bias():
    """The gradients of `nvfp4`, of 10^5 tokens or columns with the same g, average to that of g itself.

    Every block has the same largest magnitude: otherwise scales that are rounded down clip it.
    """
    rng, draws = np.random.default_rng(0), 100_000
    w, g = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((16, 32), (1, 32)))
    g = g.at[0, (5, 30)].set((3.5, -3.5))
    layer = partial(swjax.switchback, recipe="nvfp4")
    dxs = jax.jit(lambda g: jax.vjp(lambda x: layer(x, w), jnp.zeros((draws, 16)))[1](g)[0])(
        jnp.broadcast_to(g, (draws, 32))
    )
    want = np.asarray(g, np.float64) @ oracle.nv(np.asarray(w), square=True).T
    check_mean(dxs, want[0])
    x, g = (jnp.asarray(rng.normal(size=(16, 1 + m)), jnp.float32) for m in range(2))
    g = jnp.broadcast_to(g[:, :1], (16, draws))
    dws = jax.jit(lambda g: jax.vjp(lambda w: layer(x, w), jnp.zeros((1, draws)))[1](g)[0])(g)
    rotated = oracle.hadamard(16) @ np.asarray(x, np.float64)
    want = oracle.nv(rotated.T) @ (oracle.hadamard(16) @ np.asarray(g[:, 0], np.float64))
    check_mean(dws.T, want)


def check_mean(draws, want):
    """The mean of [draws, n] is within five standard errors of `want`, and the draws differ."""
    draws = np.asarray(draws, np.float64)
    error = np.abs(draws.mean(0) - want)
    deviation = draws.std(0)
    assert np.all(deviation > 0.01 * np.abs(want).max())
    assert np.all(error <= 5 * deviation / np.sqrt(len(draws)) + 1e-6 * np.abs(want).max())


def test_a_gradient_seeds_its_rounding():
    """Equal gradients round alike, also batched and recomputed; one changed element changes all roundings."""
    g = jnp.asarray(np.random.default_rng(0).normal(size=(48, 32)), jnp.float32)
    x, w = jnp.ones((48, 16)), jnp.eye(16, 32)

    def dx(g, wrap=lambda layer: layer):
        layer = wrap(lambda x: swjax.switchback(x, w, recipe="nvfp4"))
        return jax.vjp(layer, x)[1](g)[0]

    want = jax.jit(dx)(g)
    batched, other = jax.jit(jax.vmap(dx))(jnp.stack([g, g.at[47, 31].multiply(1.0001)]))
    recomputed = jax.jit(partial(dx, wrap=jax.checkpoint))(g)
    for got in (batched, recomputed):
        np.testing.assert_array_equal(got, want)
    assert np.mean(np.asarray(other[:32] != want[:32])) > 0.3


@pytest.mark.parametrize(
    "name, chip, sizes",
    [
        ("mxfp8", "B200", [(64, 40, 32)]),
        ("nvfp4", "B200", [(64, 40, 32)]),
        ("fp8_block128", "H100", [(256, 384, 96), (256, 200, 128)]),
    ],
)
def test_values_are_those_of_the_emulation(name, chip, sizes, monkeypatch):
    """The program of a chip that multiplies the format, compiled for CPUs; also a NaN, and lengths that
    blocks do not divide."""
    layer = partial(swjax.switchback, recipe=name)

    def run(x, w, g):
        y, vjp = jax.vjp(partial(layer, bias=jnp.ones(g.shape[-1]), addend=g), x, w)
        return y, *vjp(g), layer(x.at[1, 2, 3].set(jnp.nan), w)

    def results():
        rng, found = np.random.default_rng(0), []
        for tokens, k, n in sizes:
            shapes = (2, tokens // 2, k), (k, n), (2, tokens // 2, n)
            arrays = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
            found += jax.jit(partial(run))(*arrays)  # traced anew for each chip
        return found

    wanted = results()
    with targets.compiling_for(chip):
        formats = targets.block_formats()
    monkeypatch.setattr(targets, "block_formats", lambda mesh=None: formats)
    got = results()
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    x = w = jnp.ones((sizes[0][0],) * 2)
    of = lambda **options: str(jax.make_jaxpr(partial(layer, **options))(x, w))
    assert "block_matmul" in of() and "block_matmul" not in of(implementation="xla")


E4M3_ROW, SQUARE = Quantizer("float8_e4m3fn", "row"), Quantizer("float8_e4m3fn", "square", 128)
MX, NV = RECIPES["mxfp8"], RECIPES["nvfp4"]
X, W = jnp.ones((4, 8)), jnp.ones((8, 4))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: Quantizer("int8", "segment", 32), "one of .*e2m1fn'.* for 'segment', got 'int8'"),
        (lambda: Quantizer("float4_e2m1fn", "row"), "dtype must be one of .*, got 'float4_e2m1fn'"),
        (lambda: Quantizer("float8_e5m2", "square"), "needs a positive block, .* got block=0"),
        (lambda: Quantizer("float8_e5m2", "row", scale="float8_e8m0fnu"),
         "scale must be float32, .* got 'float8_e8m0fnu' for 'row'"),
        (lambda: Quantizer("float8_e4m3fn", "segment", 16, ceil=True),
         "rounds scales in float8_e8m0fnu, got 'float32': use ceil=False"),
        (lambda: Quantizer("float8_e4m3fn", "square", 16, stochastic=True),
         "rounds segments only, got scope='square': use stochastic=False"),
        (lambda: Quantizer("float4_e2m1fn", "column", 16),
         "needs a positive block, or 0 for segments and columns, .* got block=16"),
        (lambda: Product(E4M3_ROW, E4M3_ROW, outlier_quantile=0.99),
         "is at least 0.5 and below 1, for block formats .* got 0.99: 0 turns outliers off"),
        (lambda: Recipe(NV.fwd, estimator=5.0),
         "needs a power of at least 1 and a w with scope='column' in fwd, got 5.0: 0 turns it off"),
        (lambda: Product(NV.fwd.lhs, MX.fwd.rhs),
         "same block and format of scales .* got 16 float8_e4m3fn and 32 float8_e8m0fnu"),
        (lambda: Product(E4M3_ROW, SQUARE), "segments with segments .* got row and square"),
        (lambda: Recipe(MX.fwd, MX.dgrad, save_quantized=True), "saves no block formats"),
        (lambda: Recipe(wgrad=NV.fwd), "use 'segment' rather than 'square'"),
        (lambda: swjax.quantize_weight(W, recipe="mxfp8"), "has no quantized w: pass w itself"),
        (lambda: swjax.switchback(X, W, recipe="nvfp4", implementation="triton"),
         "'triton' has none of the products of this layer"),
        (lambda: swjax.ragged_switchback(X, W[None], jnp.array([4]), recipe="mxfp8"),
         "ragged_switchback needs a recipe that quantizes rows of x"),
    ],
)  # fmt: skip
def test_errors_name_the_invariant_the_value_and_the_remedy(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)
