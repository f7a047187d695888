"""Int8 weight gradients of rotated tokens: against float64, error bounds, sharding, refusals."""

from functools import partial

import implementations
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import thinning
from numeric import snr_db

import swjax
from swjax.kernels.reference import block_weight_gradient
from swjax.kernels.rotations.reference import rotate, rotation_matrix
from swjax.recipes import RECIPES, Product, Quantizer, Recipe
from swjax.testing import matrix_products

OPTIONS = {"dtypes": ("int8", "int8"), "block": 1024, "rotation": 128, "out_dtype": "float32"}
KINDS = ("normal", "log-normal", "student", "class token", "constant")
TOKENS = (1, 127, 128, 129, 1000, 1024, 1025, 3000)


def drawn(kind, tokens, features, seed):
    """Returns random tokens: `kind` says how much their magnitudes differ."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, features))
    if kind == "log-normal":
        x *= np.exp(rng.standard_normal((tokens, 1)))
    elif kind == "student":
        x = rng.standard_t(3, x.shape)
    elif kind == "class token":
        x[::257] *= 20
    elif kind == "constant":
        x += 5
    return x


def error(got, x, g):
    exact = np.float64(x).T @ np.float64(g)
    return np.linalg.norm(np.float64(got) - exact) / np.linalg.norm(exact)


@pytest.mark.parametrize(
    "tokens, dtype", thinning.thinned(TOKENS, ["float32", "bfloat16", "float16"], full=[])
)
def test_is_the_transcription_in_float64(tokens, dtype):
    layer = jax.jit(partial(block_weight_gradient, **OPTIONS))
    for kind in KINDS:
        x, g = (jnp.asarray(drawn(kind, tokens, n, tokens + n), dtype) for n in (5, 7))
        wide = [np.asarray(a.astype("float32"), np.float64) for a in (x, g)]
        want = sum(
            oracle.int8(a, 0).T @ oracle.int8(b, 0)
            for a, b in zip(*map(oracle.rotated, wide), strict=True)
        )
        # A rotation in float32 may round a value to the neighbouring integer.
        assert snr_db(layer(x, g), want) > 60, kind


SHAPES = [(100, 40, 24), (104, 64, 192), (3000, 256, 192)]
# More blocks than one thread block of a kernel takes. XLA has no such limit.
KERNEL_SHAPES = [*SHAPES, (34_816, 320, 256)]


@implementations.each(
    "block_weight_gradient",
    compiled={"xla": SHAPES, "triton": KERNEL_SHAPES, "mosaic_gpu": KERNEL_SHAPES},
    interpreted={
        "triton": [(100, 40, 136), (1300, 8, 72)],
        "mosaic_gpu": [(104, 64, 192), (1304, 128, 64)],
    },
    options=("dtype", [("bfloat16",), ("float16",)]),
    few_options=[("bfloat16",)],
)
def test_kernels_are_the_transcription_in_float64(operation, implementation, shape, dtype):
    tokens, k, n = shape
    x, g = (
        jnp.asarray(drawn("log-normal", tokens, features, features), dtype) for features in (k, n)
    )
    out_dtype, floor = {"bfloat16": ("float32", 55), "float16": ("bfloat16", 46)}[dtype]
    options = OPTIONS | {"out_dtype": out_dtype}
    got = implementations.run(operation, x, g, implementation=implementation, **options)
    rotated = [oracle.rotated(np.asarray(a.astype("float32"), np.float64)) for a in (x, g)]
    want = sum(oracle.int8(a, 0).T @ oracle.int8(b, 0) for a, b in zip(*rotated, strict=True))
    assert got.dtype == out_dtype and snr_db(got, want) > floor


@implementations.each(
    "block_weight_gradient",
    compiled=[(104, 64, 192), (3000, 256, 192)],
    interpreted=[(104, 64, 64), (2056, 64, 64)],
)
def test_absent_tokens_count_as_zero(operation, implementation, shape):
    """As if x and g were zero there, to the bit; in the second shape in one of several blocks only."""
    tokens, k, n = shape
    x, g = (
        jnp.asarray(drawn("log-normal", tokens, features, 1), "bfloat16") for features in (k, n)
    )
    present = jnp.ones(tokens, "bfloat16").at[7:90:3].set(0)
    run = partial(implementations.run, operation, implementation=implementation, **OPTIONS)
    masked = run(*(a * present[:, None] for a in (x, g)))
    np.testing.assert_array_equal(run(x, g, present), masked)
    assert snr_db(run(x, g), masked) < 50


@pytest.mark.parametrize("recipe", thinning.first(["switchback_hadamard", "int8_hadamard"]))
def test_padding_does_not_change_the_weight_gradient(recipe):
    """Tokens whose g is zero, with x 30 times as large, and tokens whose x is zero, with a large g."""
    rng, tokens = np.random.default_rng(0), 2048
    x, g1, g2 = (rng.standard_normal((tokens, n)) for n in (64, 32, 32))
    padding, empty = rng.random(tokens) < 0.25, rng.random(tokens) < 0.1
    x[padding] *= 30
    x[empty] = 0
    for g in (g1, g2):
        g[empty] *= 30
        g[padding] = 0
    g1[:50] = 0  # only one of two layers has these tokens
    x, g1, g2 = (jnp.asarray(a, "bfloat16").reshape(4, -1, a.shape[1]) for a in (x, g1, g2))
    w = jnp.ones((64, 32)) / 8
    layer = lambda *ws: swjax.switchback(x, ws if len(ws) > 1 else ws[0], recipe=recipe)
    (alone,) = jax.jit(lambda w: jax.vjp(layer, w)[1](g1))(w)
    both = jax.jit(lambda w: jax.vjp(layer, w, w)[1]((g1, g2)))(w)
    rows = lambda a: np.asarray(a.astype("float32")).reshape(tokens, -1)
    for dw, g in zip((alone, *both), (g1, g1, g2)):
        assert error(dw, rows(x), rows(g)) < 0.012  # with all tokens in the scales 0.2
    bad = x.reshape(tokens, -1).at[int(np.argmax(padding)), 3].set(np.inf).reshape(x.shape)
    dw = jax.jit(lambda w: jax.vjp(partial(swjax.switchback, bad, recipe=recipe), w)[1](g1)[0])(w)
    assert not np.isfinite(dw[3]).any()  # infinity times a gradient of zero


@pytest.mark.parametrize(
    "kind, tokens",
    thinning.thinned(["normal", "log-normal", "student", "class token"], [1024, 16_384], full=[]),
)
def test_the_error_depends_neither_on_the_length_nor_on_the_tokens(kind, tokens):
    """In contrast, the error with one scale a column depends on the tokens."""
    x, g = (jnp.asarray(drawn(kind, tokens, 64, n), "float32") for n in (1, 2))
    columns = [oracle.int8(np.asarray(a), 0) for a in (x, g)]
    assert error(jax.jit(partial(block_weight_gradient, **OPTIONS))(x, g), x, g) < 0.015
    if kind in ("log-normal", "student"):
        assert error(columns[0].T @ columns[1], x, g) > 0.03


def test_the_rotation_is_orthogonal_and_mixes_equal_tokens():
    matrix = rotation_matrix(128).astype(int)
    np.testing.assert_array_equal(matrix @ matrix.T, 128 * np.eye(128))
    alike = np.asarray(rotate(jnp.ones((128, 1)), 128))
    assert np.abs(alike).max() < 5 * np.sqrt(128)  # without random signs the maximum would be 128


@pytest.mark.parametrize("rotation", thinning.first([2, 1, 16]))
def test_other_blocks_and_rotations(rotation):
    x, g = (jnp.asarray(drawn("normal", 100, n, n), "float32") for n in (6, 4))
    options = OPTIONS | {"block": 32, "rotation": rotation}
    got = jax.jit(partial(block_weight_gradient, **options))(x, g)
    assert error(got, x, g) < 0.02


def test_the_longest_block_does_not_overflow():
    x = jnp.ones((2**17, 1))
    got = block_weight_gradient(x, x, **OPTIONS | {"block": 2**17, "rotation": 1})
    np.testing.assert_allclose(got, 2.0**17, rtol=1e-6)


def test_a_single_block_without_jit():
    """A scan without steps fails under jax.disable_jit."""
    x, g = (jnp.asarray(drawn("normal", 8, n, n), "float32") for n in (5, 7))
    with jax.disable_jit():
        assert error(block_weight_gradient(x, g, **OPTIONS), x, g) < 0.02


def test_fp8_in_blocks():
    """A user's recipe may quantize in blocks to fp8."""
    blocks = [Quantizer(dtype, "block", 1024, 128) for dtype in ("float8_e4m3fn", "float8_e5m2")]
    recipe = Recipe(wgrad=Product(*blocks))
    x, w, g = (jnp.asarray(drawn("log-normal", 300, n, n), "float32") for n in (8, 6, 6))
    dw = jax.vjp(partial(swjax.switchback, x, recipe=recipe), w[:8])[1](g)[0]
    assert error(dw, x, g) < 0.12  # e5m2 has two bits of mantissa


def test_every_product_of_the_layer_is_int8():
    """All other products are rotations, which contract groups of 128 tokens."""
    x, w, g = jnp.ones((256, 64)), jnp.ones((64, 32)), jnp.ones((256, 32))

    def both(x, w, g):
        return jax.vjp(partial(swjax.switchback, recipe="switchback_hadamard"), x, w)[1](g)

    found = matrix_products(both, x, w, g)
    assert sum(count for kind, count in found.items() if kind[0] in ("s8", "s32")) == 2
    assert set(found) <= {("s8", "s8"), ("s32", "s32"), ("f32", "f32")}


BLOCK = Quantizer("int8", "block", 1024, 128)
ROW = Quantizer("int8", "row")


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Quantizer("int8", "block"), "at most 131072, got rotation=1 and block=0"),
        (lambda: Quantizer("int8", "block", 1024, 48), "rotation must be one of .* got 48"),
        (lambda: Quantizer("int8", "block", 100, 8), "rotation=8 and block=100"),
        (lambda: Quantizer("int8", "block", 2**18), "at most .* got rotation=1 and block=262144"),
        (lambda: Quantizer("int8", "row", 1024), "scope='row'.*has no blocks"),
        (lambda: Recipe(fwd=Product(BLOCK, BLOCK)), "use 'block' in wgrad"),
        (lambda: Recipe(dgrad=Product(ROW, BLOCK)), "use 'block' in wgrad"),
        (lambda: Recipe(wgrad=Product(BLOCK, ROW)), "the same block and rotation"),
        (lambda: Recipe(wgrad=Product(BLOCK, BLOCK, 6.0)), "outlier_threshold=0"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ValueError, match=message) as raised:
        make()
    assert "\n" not in str(raised.value)


def test_the_recipe_is_switchback_but_for_its_weight_gradient():
    ours, paper = RECIPES["switchback_hadamard"], RECIPES["switchback"]
    assert (ours.fwd, ours.dgrad) == (paper.fwd, paper.dgrad) and paper.wgrad is None
