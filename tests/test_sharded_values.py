"""Sharded layers compute the same values as one device."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import thinning
from eight_devices import (
    BATCH,
    CASES,
    KINDS,
    MLP_LAYOUTS,
    TOKENS_EACH,
    K,
    arrays,
    compare,
    compiled,
    draw,
    gradients,
    make_mesh,
    mlp,
    mlp_arguments,
    one_device,
    put,
    release,
    sharded,
)
from flax import nnx
from jax.sharding import PartitionSpec as P
from numeric import snr_db

import swjax
import swjax.losses
import swjax.nnx
from swjax import Gelu, LayerNorm, Layout, RMSNorm
from swjax.attention import with_kernels
from swjax.diagnostics import measure
from swjax.kernels import targets
from swjax.recipes import RECIPES
from swjax.testing import collectives

pytestmark = pytest.mark.eight_devices

ROW, COLUMN = ("row", "fsdp_row", "fsdp_and_row_in_one"), ("column", "fsdp_column")


INT8 = ("switchback", "switchback_m", "switchback_q", "llm_int8")
# Agreement, in dB, of recipes that form groups of features on each device, with those on one device.
OWN_DB = {"int8_hadamard": 30, "fp8_hadamard": 20, "fp8_block128": 20, "mxfp8": 20, "nvfp4": 10}
OWN_DB["fp4_dge"] = 0  # so is the estimate of its weight gradient


@pytest.mark.parametrize(
    "name, case, kind",
    thinning.kept(
        [("switchback", case, kind) for case in CASES for kind in KINDS]
        + [(name, case, "auto") for name in RECIPES for case in ("fsdp_column", "fsdp_row")]
        + [("llm_int8_outlier6", "fsdp_column", "explicit")],
        [
            *(("switchback", case, kind) for case, kind in zip(CASES, itertools.cycle(KINDS))),
            ("switchback_hadamard", "fsdp_row", "auto"),
            ("fp8_tensorwise", "fsdp_column", "auto"),
        ],
    ),
)
def test_values_are_those_of_one_device(name, case, kind):
    mesh, layout, args, g = sharded(case, kind)
    layer = partial(swjax.switchback, recipe=name, layout=layout)
    with jax.set_mesh(mesh):
        got = jax.jit(partial(gradients, layer))(args, g)
    # Bits are equal if integer sums are not split: y unless rows of w stay sharded, dx unless columns do.
    exact = [i for i, where in enumerate((ROW, COLUMN)) if case not in where and name in INT8]
    want = one_device(name)
    assert got[2].sharding.is_equivalent_to(args[1].sharding, 2)
    # Each device rotates its own tokens or features, and forms blocks of its own elements.
    own = [2] if name == "switchback_hadamard" else [0, 1, 2] if name in OWN_DB else []
    for i in own:
        assert snr_db(got[i], want[i]) > OWN_DB.get(name, 30)
    got, want = ([a for i, a in enumerate(arrays) if i not in own] for arrays in (got, want))
    compare(got, want, exact=exact)


@pytest.mark.parametrize(
    "name, k, chip",
    [
        ("nvfp4", 128, "H100"),
        ("mxfp8", 256, "B200"),
        ("fp8_block128", 1024, "H100"),
        release("nvfp4", 128, "B200"),
        release("mxfp8", 256, "H100"),
        release("fp8_block128", 1024, "B200"),
    ],
)
def test_shards_of_whole_blocks_have_the_blocks_of_one_device(name, k, chip, monkeypatch):
    sizes = {"k": k, "n": 64}
    want = one_device(name, **sizes)
    with targets.compiling_for(chip):
        formats = targets.block_formats()
    monkeypatch.setattr(targets, "block_formats", lambda mesh=None: formats)
    mesh, layout, args, g = sharded("fsdp_rows", **sizes)
    layer = partial(swjax.switchback, recipe=name, layout=layout)
    with jax.set_mesh(mesh):
        got = jax.jit(partial(gradients, layer))(args, g)
    seeded = name == "nvfp4"  # the elements of a device seed its rounding of g
    assert snr_db(got[1], want[1]) > OWN_DB[name]
    compare(got[: 2 - seeded], want[: 2 - seeded])


def test_each_device_quantizes_blocks_of_its_own_tokens():
    """The weight gradient of `switchback_hadamard` is the sum of those of each device's tokens."""
    mesh, layout, (x, w, _), g = sharded("data")

    def dw(x, w, g, layout=None):
        layer = partial(swjax.switchback, recipe="switchback_hadamard", layout=layout)
        return jax.vjp(partial(layer, x), w)[1](g)[0]

    with jax.set_mesh(mesh):
        got = jax.jit(partial(dw, layout=layout))(x, w, g)
    plain_x, plain_w, _, plain_g = arrays()
    parts = [dw(a, plain_w, b) for a, b in zip(jnp.split(plain_x, 8), jnp.split(plain_g, 8))]
    np.testing.assert_allclose(got, sum(parts), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case, kind", thinning.thinned(["data", "fsdp_row"], list(KINDS), full=[]))
def test_each_device_measures_the_blocks_that_it_quantizes(case, kind):
    """Diagnostics of `switchback_hadamard`: the noise is the sum of those of each device's tokens."""
    mesh, layout, (x, w, _), _ = sharded(case, kind)

    def noise(x, w):
        options = {"recipe": "switchback_hadamard", "layout": layout, "use_bias": False}
        layer = swjax.nnx.Linear(*w.shape, kernel_init=lambda *_: w, rngs=nnx.Rngs(0), **options)
        found = measure(lambda layer, x: jnp.sum(layer(x)), layer, x)
        return found["quantization/sqnr_db/wgrad_x"]

    with jax.set_mesh(mesh):
        got = jax.jit(noise)(x, w)
    plain = np.asarray(arrays()[0], np.float64)
    parts = np.split(plain, 8 if case == "data" else 4)
    rotated = np.concatenate([oracle.rotated(part.reshape(-1, K)) for part in parts])
    want = snr_db(oracle.int8(rotated, 1), rotated)
    assert got == pytest.approx(want, abs=0.01)
    whole = oracle.rotated(plain.reshape(-1, K))
    assert abs(want - snr_db(oracle.int8(whole, 1), whole)) > 0.1


@pytest.mark.parametrize(
    "odd, case",
    thinning.thinned(
        [{"k": 47, "n": 83}, {"batch": 3}, {"batch": 1, "k": 1, "n": 1}],
        ["hybrid", "fsdp_row", "fsdp_column"],
        full=[],
    ),
)
def test_values_of_odd_sizes(case, odd):
    """A dimension that the mesh axis does not divide is replicated."""
    mesh, layout, args, g = sharded(case, **odd)
    layer = partial(swjax.switchback, layout=layout)
    with jax.set_mesh(mesh):
        got = jax.jit(partial(gradients, layer))(args, g)
    compare(got, one_device("switchback", **odd))


PROLOGUES = {"layer_norm": LayerNorm, "rms_norm": RMSNorm, "gelu": Gelu}
PARAMETERS = {"layer_norm": 2, "rms_norm": 1, "gelu": 0}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "prologue, case",
    thinning.thinned(list(PROLOGUES), ["hybrid", "fsdp_row", "fsdp_column"], full=[]),
)
@pytest.mark.parametrize("name", ["switchback", release("switchback_m"), release("standard")])
def test_values_after_a_prologue(name, prologue, case, kind):
    if kind == "explicit" and name != "switchback":
        pytest.skip("how the layer learns of shardings does not depend on the recipe")
    mesh, layout, args, g = sharded(case, kind)
    plain = arrays()

    def layer(layout, x, w, bias, affine):
        before = PROLOGUES[prologue](*affine)
        return swjax.switchback(x, w, bias, recipe=name, prologue=before, layout=layout)

    affine = tuple(draw(K, seed=4 + i) for i in range(PARAMETERS[prologue]))
    want = jax.jit(partial(gradients, partial(layer, None)))((*plain[:3], affine), plain[3])
    with jax.set_mesh(mesh):
        affine = tuple(put(t, mesh) for t in affine)
        got = jax.jit(partial(gradients, partial(layer, layout)))((*args, affine), g)
    compare(got, want)


@pytest.mark.parametrize(
    "case, kind", thinning.thinned(["fsdp_row", "fsdp_column"], list(KINDS), full=[])
)
@pytest.mark.parametrize("name", ["switchback", release("standard")])
def test_values_with_an_addend(name, case, kind):
    mesh, layout, args, g = sharded(case, kind)
    layer = lambda layout, x, w, bias, addend: swjax.switchback(
        x, w, bias, addend=addend, recipe=name, layout=layout
    )
    (*plain, plain_g), addend = arrays(), draw(*g.shape, seed=9)
    want = jax.jit(partial(gradients, partial(layer, None)))((*plain, addend), plain_g)
    with jax.set_mesh(mesh):
        arguments = (*args, jax.device_put(addend, g.sharding))
        got = jax.jit(partial(gradients, partial(layer, layout)))(arguments, g)
    compare(got, want)


@pytest.mark.parametrize("residual", [False, True])
def test_an_mlp_whose_output_is_sharded_unlike_its_input(residual):
    def loss(*args):
        outputs = swjax.mlp(*args, add_input=True, residual=residual)
        return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(outputs))

    args = mlp_arguments(dtype="float32")[0][:5]
    want = jax.jit(jax.value_and_grad(loss, range(5)))(*args)
    mesh = make_mesh((2, 2, 2), KINDS["explicit"])
    specs = (P("data", None, "tensor"), P("tensor"), P(), P(None, "fsdp"), P())
    with jax.set_mesh(mesh):
        args = [put(a, mesh, spec) for a, spec in zip(args, specs)]
        got = jax.jit(jax.value_and_grad(loss, range(5)))(*args)
    compare(got, want)


@pytest.mark.parametrize("sizes", [release((8, 1, 1)), release((2, 4, 1)), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("add_input, kind", thinning.thinned([False, True], list(KINDS), full=[]))
def test_values_of_an_mlp(add_input, sizes, kind):
    mesh = make_mesh(sizes, KINDS[kind])
    alone, whole = (partial(mlp, each, add_input=add_input) for each in ((None, None), MLP_LAYOUTS))
    want = jax.jit(partial(gradients, alone))(*mlp_arguments())
    with jax.set_mesh(mesh):
        got = jax.jit(partial(gradients, whole))(*mlp_arguments(mesh))
    compare(got, want, "bfloat16")


@pytest.mark.parametrize("kind", [release("auto"), "explicit"])
@pytest.mark.parametrize("sizes", [release((2, 4, 1)), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("name", ["switchback", release("switchback_hadamard")])
def test_values_of_a_gated_mlp(name, sizes, kind):
    """The weights of gate and up may be sharded differently on explicit meshes."""
    mesh = make_mesh(sizes, KINDS[kind])

    def block(layouts, x, w1, b1, w2, b2, scale, shift):
        options = {"prologue": RMSNorm(scale), "recipe": name, "layouts": layouts}
        return swjax.gated_mlp(x, w1, w1 * b1[None], w2, add_input=True, **options)

    want = jax.jit(partial(gradients, partial(block, (None, None))))(*mlp_arguments())
    with jax.set_mesh(mesh):
        got = jax.jit(partial(gradients, partial(block, MLP_LAYOUTS)))(*mlp_arguments(mesh))
    if name == "switchback":
        compare(got, want, "bfloat16")
    else:  # each device quantizes its own tokens for the weight gradients
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape and snr_db(a, b) > 30


@pytest.mark.parametrize("kind", [release("auto"), "explicit"])
@pytest.mark.parametrize("first", [P("tensor"), P()], ids=str)
def test_values_of_an_mlp_whose_layers_are_sharded_differently(first, kind):
    """On explicit meshes, the gradient of b1 had the sharding of w2, which was an error."""
    mesh = make_mesh((2, 2, 2), KINDS[kind])
    (x, w1, b1, *others), g = mlp_arguments(mesh, "float32")
    want = jax.jit(partial(gradients, partial(mlp, (None, None))))(*mlp_arguments(dtype="float32"))
    with jax.set_mesh(mesh):
        args = x, put(w1, mesh, first), put(b1, mesh, P()), *others
        got = jax.jit(partial(gradients, partial(mlp, (Layout(first), MLP_LAYOUTS[1]))))(args, g)
    compare(got, want)


@pytest.mark.parametrize("kind", [release("auto"), "explicit"])
@pytest.mark.parametrize("sizes, heads", [((2, 2, 2), 4), release((2, 1, 4), 4), ((2, 2, 2), 3)])
def test_values_of_attention_whose_heads_are_split(sizes, heads, kind):
    """Images and heads are sharded; heads that devices do not divide are replicated, or all arrays are."""
    mesh = make_mesh(sizes, KINDS[kind])
    split = heads % sizes[2] == 0
    arrays = [draw(BATCH, TOKENS_EACH, heads, 16, seed=seed) for seed in range(4)]
    run = partial(gradients, partial(with_kernels, is_causal=True))
    want = jax.jit(run)(arrays[:3], arrays[3])
    layout = Layout(w=P("fsdp", "tensor"))
    spec = P(("data", "fsdp"), None, "tensor" if split else None)
    placed = [put(a, mesh, spec) for a in arrays]
    run = partial(gradients, partial(with_kernels, is_causal=True, layout=layout))
    with jax.set_mesh(mesh):
        fn = compiled(run, placed[:3], placed[3])
        compare(fn(placed[:3], placed[3]), want)
        assert not collectives(fn)
        whole = partial(with_kernels, is_causal=True, layout=Layout(tokens=P()))
        compare(jax.jit(whole)(*placed[:3]), want[0])
