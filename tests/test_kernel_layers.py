"""Layers in every recipe and every implementation of its kernels, and under transformations."""

import itertools
from functools import partial

import implementations
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import thinning
from jax.sharding import AxisType, PartitionSpec
from numeric import FLOOR_DB, snr_db

import swjax
from swjax import checkpoint_policies
from swjax.recipes import RECIPES

TOKENS, WIDTH = (4, 64), 128
# XLA for GPUs skips roundings to bf16 inside fusions, so about one quantized value in a hundred differs from
# that of a kernel. A CPU without these roundings shows the same: gradients agree to 39 dB in int8, to 30 in
# fp8, and to 48 without quantization.
AGREE_DB = {recipe: 27 if "fp8" in recipe else 36 for recipe in RECIPES}
AGREE_DB |= {"standard": 46, "fp8_hadamard": 25, "nvfp4": 14, "fp4_dge": 14}


def arrays(*shapes, dtype="float32"):
    rng = np.random.default_rng(0)
    scales = [shape[0] ** -0.5 if len(shape) == 2 else 1.0 for shape in shapes]
    return [
        jnp.asarray(rng.standard_normal(shape) * scale, dtype)
        for shape, scale in zip(shapes, scales)
    ]


def layer_arguments():
    """Returns the arguments of a block and the output's gradient: activations bfloat16, parameters fp32."""
    x, g = arrays((*TOKENS, WIDTH), (*TOKENS, WIDTH), dtype="bfloat16")
    w1, w2 = arrays((WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))
    b1, b2, gamma, beta = arrays((4 * WIDTH,), (WIDTH,), (WIDTH,), (WIDTH,))
    return (x, w1, b1, w2, b2, swjax.LayerNorm(gamma, beta)), g


def fused(x, w1, b1, w2, b2, norm, **options):
    return swjax.mlp(x, w1, b1, w2, b2, prologue=norm, **options)


def apart(x, w1, b1, w2, b2, norm, **options):
    """Computes the block as separate layers, with LayerNorm and GELU in JAX."""
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, -1, keepdims=True)
    deviation = jnp.sqrt(jnp.mean(centred**2, -1, keepdims=True) + norm.epsilon)
    normalized = centred / deviation * norm.scale[None, None] + norm.bias[None, None]
    h = swjax.switchback(normalized.astype(x.dtype), w1, b1, **options)
    h = jax.nn.gelu(h.astype(jnp.float32), approximate=False).astype(x.dtype)
    return swjax.switchback(h, w2, b2, **options)


def linear(x, w1, b1, w2, b2, norm, **options):
    h = swjax.switchback(x, w1, b1, **options)
    return swjax.switchback(h, w2, b2, prologue=swjax.Gelu(approximate=True), **options)


@partial(jax.jit, static_argnames=("block", "recipe", "implementation"))
def results(arguments, g, *, block, recipe, implementation):
    y, vjp = jax.vjp(partial(block, recipe=recipe, implementation=implementation), *arguments)
    return [y, *jax.tree.leaves(vjp(g))]


def assert_agree(got, want, floor):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype and snr_db(a, b) > floor


def gated(x, w1, b1, w2, b2, norm, **options):
    prologue = swjax.RMSNorm(norm.scale)
    return swjax.gated_mlp(x, w1, w1[::-1], w2, prologue=prologue, add_input=True, **options)


def gated_apart(x, w1, b1, w2, b2, norm, **options):
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + norm.epsilon)
    normalized = (wide * (inverse * norm.scale[None, None])).astype(x.dtype)
    gate, up = (
        swjax.switchback(normalized, w, **options).astype(jnp.float32) for w in (w1, w1[::-1])
    )
    h = (jax.nn.silu(gate) * up).astype(x.dtype)
    return swjax.switchback(h, w2, addend=x, **options)


# {fused block: (its layers, dB below `AGREE_DB`)}; products of two arrays with errors agree less.
BLOCKS = {fused: (apart, 0), gated: (gated_apart, 3)}


@pytest.mark.parametrize("implementation", implementations.OF_LAYERS)
@pytest.mark.parametrize(
    "block, recipe",
    thinning.kept(
        itertools.product(BLOCKS, RECIPES),
        [
            (fused, "switchback_m"),
            (fused, "switchback_hadamard"),
            (gated, "switchback"),
            (gated, "switchback_hadamard"),
        ],
    ),
)
def test_mlp_is_its_layers(block, recipe, implementation):
    """The fused block gives the values and gradients of separate layers in XLA."""
    implementations.require(implementation, recipe)
    arguments, g = layer_arguments()
    got = results(arguments, g, block=block, recipe=recipe, implementation=implementation)
    layers, less = BLOCKS[block]
    want = results(arguments, g, block=layers, recipe=recipe, implementation="xla")
    assert_agree(got, want, AGREE_DB[recipe] - less)


@pytest.mark.parametrize("implementation", implementations.OF_LAYERS[1:])  # on a GPU
@pytest.mark.parametrize("recipe", thinning.kept(RECIPES, thinning.RECIPES))
def test_layers_agree_with_xla(recipe, implementation):
    implementations.require(implementation, recipe)
    arguments, g = layer_arguments()
    got, want = (
        results(arguments, g, block=linear, recipe=recipe, implementation=name)
        for name in (implementation, "xla")
    )
    assert_agree(got, want, AGREE_DB[recipe])


def added(x, w1, b1, w2, b2, norm, **options):
    """A block whose residual additions are part of the layers."""
    (y,), x = swjax.switchback(x, (w1,), (b1,), prologue=norm, residual=True, **options)
    x = swjax.switchback(y, w2, b2, addend=x, **options)
    return swjax.mlp(x, w1, b1, w2, b2, prologue=norm, add_input=True, **options)


def added_outside(x, w1, b1, w2, b2, norm, **options):
    """Computes what `added` does, with plain additions."""
    y = swjax.switchback(x, w1, b1, prologue=norm, **options)
    x = swjax.switchback(y, w2, b2, **options) + x
    return swjax.mlp(x, w1, b1, w2, b2, prologue=norm, **options) + x


@pytest.mark.parametrize("implementation", implementations.OF_LAYERS)
@pytest.mark.parametrize("recipe", thinning.kept(RECIPES, thinning.RECIPES))
def test_layers_that_add_the_residual_stream(recipe, implementation):
    implementations.require(implementation, recipe)
    arguments, g = layer_arguments()
    got, want = (
        results(arguments, g, block=block, recipe=recipe, implementation=implementation)
        for block in (added, added_outside)
    )
    # One side rounds the sums of the first addition twice, and the next quantizer reads them.
    assert_agree(got, want, AGREE_DB[recipe] - 3)


def group(x, w1, b1, w2, b2, norm, **options):
    """Computes layers of one width, which share kernels in the backward pass, and then a narrower layer."""
    ws, biases = (w1, w1[::-1], 2 * w1), (b1, None, -b1)
    ys = swjax.switchback(x, ws, biases, prologue=norm, **options)
    return (*ys, *swjax.switchback(x, (w1[:, ::2], w1), prologue=norm, **options))


def each_layer(x, w1, b1, w2, b2, norm, **options):
    """Computes what `group` does, one layer a call."""
    ws, biases = (w1, w1[::-1], 2 * w1, w1[:, ::2], w1), (b1, None, -b1, None, None)
    return tuple(
        swjax.switchback(x, w, bias, prologue=norm, **options) for w, bias in zip(ws, biases)
    )


@pytest.mark.parametrize("implementation", implementations.OF_LAYERS)
@pytest.mark.parametrize("recipe", thinning.kept(RECIPES, thinning.RECIPES))
def test_layers_of_one_width_share_an_input(recipe, implementation):
    implementations.require(implementation, recipe)
    arguments, _ = layer_arguments()
    wide, narrow = ((*TOKENS, width * WIDTH) for width in (4, 2))
    gradients = tuple(arrays(wide, wide, wide, narrow, wide, dtype="bfloat16"))
    got, want = (
        results(arguments, gradients, block=block, recipe=recipe, implementation=implementation)
        for block in (group, each_layer)
    )
    # One side adds the gradients of x in float32, the other in bfloat16.
    assert_agree(got, want, AGREE_DB[recipe])


# --- transformations ----------------------------------------------------------------------------------


def loss(x, w, bias, g, implementation):
    y = swjax.switchback(x, w, bias, implementation=implementation)
    return jnp.sum(y.astype(jnp.float32) * g)


@pytest.fixture(params=implementations.OF_LAYERS)
def gradients(request):
    """A function that returns the loss and its gradients with respect to x, w and bias."""
    implementations.require(request.param)
    return jax.value_and_grad(partial(loss, implementation=request.param), (0, 1, 2))


@pytest.fixture(scope="module")
def square():
    """x [4, 64, 128], w [128, 128], bias and g."""
    x, g, w, bias = arrays((*TOKENS, WIDTH), (*TOKENS, WIDTH), (WIDTH, WIDTH), (WIDTH,))
    return x.astype(jnp.bfloat16), w, bias, g


def test_jit(gradients, square):
    assert_agree(jax.jit(gradients)(*square), gradients(*square), FLOOR_DB["bfloat16"])


def test_vmap_over_layers(gradients, square):
    x, w, bias, g = square
    stack, biases = jnp.stack([w, 2 * w[::-1], w.T]), jnp.stack([bias, -bias, 2 * bias])
    got = jax.jit(jax.vmap(gradients, (None, 0, 0, None)))(x, stack, biases, g)
    one = jax.jit(gradients)
    each = [one(x, w, bias, g) for w, bias in zip(stack, biases)]
    assert_agree(got, jax.tree.map(lambda *leaves: jnp.stack(leaves), *each), FLOOR_DB["bfloat16"])


@pytest.mark.parametrize("implementation", implementations.OF_LAYERS)
def test_vmap_over_layers_of_one_input(implementation, square):
    implementations.require(implementation)
    x, w, _, g = square

    def loss(x, *ws):
        ys = swjax.switchback(x, ws, implementation=implementation)
        return sum(jnp.sum(y.astype(jnp.float32) * g) for y in ys)

    run = jax.grad(loss, (0, 1, 2))
    stack = jnp.stack([w, 2 * w[::-1], w.T])
    got = jax.jit(jax.vmap(run, (None, 0, 0)))(x, stack, -stack)
    each = [run(x, w, -w) for w in stack]
    assert_agree(got, jax.tree.map(lambda *leaves: jnp.stack(leaves), *each), FLOOR_DB["bfloat16"])


@pytest.mark.parametrize("implementation", implementations.OF_LAYERS)
@pytest.mark.parametrize("recipe", ["switchback", "switchback_m"])
def test_checkpoint_changes_nothing(recipe, implementation):
    implementations.require(implementation, recipe)
    arguments, g = layer_arguments()
    options = {"recipe": recipe, "implementation": implementation}
    want = results(arguments, g, block=fused, **options)
    for policy in (checkpoint_policies.save_quantized, checkpoint_policies.save_linear):
        block = jax.checkpoint(partial(fused, **options), policy=policy)
        y, vjp = jax.vjp(block, *arguments)
        assert_agree([y, *jax.tree.leaves(vjp(g))], want, AGREE_DB[recipe])


@pytest.mark.parametrize("implementation", implementations.OF_LAYERS)
def test_scan_over_layers(implementation, square):
    implementations.require(implementation)
    x, w, bias, g = square
    stack = jnp.stack([w, w[::-1], w.T])
    layer = partial(swjax.switchback, bias=bias, implementation=implementation)

    def scanned(x, stack):
        return jax.lax.scan(lambda h, w: (layer(h, w), None), x, stack)[0]

    def unrolled(x, stack):
        for w in stack:
            x = layer(x, w)
        return x

    def both(network):
        y, vjp = jax.vjp(network, x, stack)
        return y, vjp(g.astype(y.dtype))

    assert_agree(jax.jit(both, static_argnums=0)(scanned), both(unrolled), FLOOR_DB["bfloat16"])


def test_inside_shard_map(gradients, square):
    """On one device, which every implementation supports, results equal those outside shard_map."""
    mesh = jax.make_mesh((1,), ("data",), (AxisType.Auto,), devices=jax.devices()[:1])
    rows, whole = PartitionSpec("data"), PartitionSpec()
    sharded = jax.shard_map(
        gradients,
        mesh=mesh,
        in_specs=(rows, whole, whole, rows),
        out_specs=(whole, (rows, whole, whole)),
        check_vma=False,
    )
    assert_agree(jax.jit(sharded)(*square), jax.jit(gradients)(*square), FLOOR_DB["bfloat16"])
