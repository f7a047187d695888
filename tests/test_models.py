"""CLIP compared with a float64 transcription, and with itself under other options."""

import dataclasses
import math
import re
from functools import partial

import implementations
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import thinning
from clip_oracle import (
    abstract,
    compiled,
    encode_image,
    encode_text,
    float64,
    inputs,
    random_model,
    small_config,
)
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from numeric import snr_db

from swjax.kernels import targets
from swjax.models import clip
from swjax.models.vit import random_order
from swjax.recipes import RECIPES
from swjax.testing import matrix_products

OPTIONS = {
    "plain": {},
    "quick": {"gelu": "quick"},
    "tanh": {"gelu": "tanh"},
    "layer scale and qk-norm": {"layer_scale": 0.0, "qk_norm": True},
    "scan": {"scan_layers": True},
}
# Options that do not change the results.
SAME = {
    "scan": {"scan_layers": True},
    "full": {"remat": "full", "attention": "xla"},
    "dots": {"remat": "dots"},
    "scan, save_quantized": {"scan_layers": True, "remat": "save_quantized"},
    "scan, save_linear": {"scan_layers": True, "remat": "save_linear"},
}


# Parameters with zero gradient: a softmax does not change if the same vector is added to all keys.
BLIND = re.compile(r"'k'\]\['bias'")


def forward(graph, images, tokens, **kwargs):
    def run(params):
        model = nnx.merge(graph, params)
        return model.encode_image(images, **kwargs), model.encode_text(tokens)

    return run


def value_and_gradient(loss, params):
    """Returns a loss and its gradient with respect to the vision tower's parameters."""
    value, gradient = compiled(jax.value_and_grad(loss), params)(params)
    return value, nnx.to_pure_dict(gradient)["vision"]


def image_loss(graph, images, **kwargs):
    """Returns a loss that depends on every feature of every embedding."""

    def loss(params):
        embedding, _ = nnx.merge(graph, params).vision(images, **kwargs)
        return jnp.vdot(embedding, jnp.arange(1.0, 1 + embedding.size).reshape(embedding.shape))

    return loss


@pytest.mark.parametrize(
    "name", thinning.kept(OPTIONS, ["plain", "layer scale and qk-norm", "scan"])
)
def test_forward_equals_the_float64_transcription(name):
    cfg = small_config(**OPTIONS[name])
    graph, params = random_model(cfg)
    images, tokens = inputs(cfg)
    (image_emb, image_out), (text_emb, text_out) = compiled(forward(graph, images, tokens), params)(
        params
    )
    exact = float64(params)
    for example in range(len(images)):
        for embedding, (expected, _) in (
            (image_emb, encode_image(exact, cfg, np.float64(images[example]))),
            (text_emb, encode_text(exact, cfg, np.asarray(tokens[example]))),
        ):
            assert embedding.dtype == jnp.float32
            np.testing.assert_allclose(embedding[example], expected, atol=3e-6)
    runs = [encode_text(exact, cfg, np.asarray(row))[1] for row in tokens]
    outputs = np.abs(np.array(runs)).swapaxes(0, 1).reshape(cfg.text.layers, -1)
    np.testing.assert_allclose(text_out["blocks"]["feature_mean_abs"], outputs.mean(1), rtol=1e-5)
    np.testing.assert_allclose(text_out["blocks"]["feature_max_abs"], outputs.max(1), rtol=1e-5)
    assert image_out["blocks"]["feature_mean_abs"].shape == (cfg.vision.layers,)
    assert image_out["pre_logits"].shape == (len(images), cfg.vision.width)


@pytest.fixture(scope="module")
def straight():
    """Gradients of the unrolled model without rematerialization, with a recipe that saves int8 residuals."""
    cfg = small_config(recipe="switchback_m")
    graph, params = random_model(cfg)
    images, _ = inputs(cfg)
    return params, images, value_and_gradient(image_loss(graph, images), params)


@pytest.mark.parametrize("name", thinning.kept(SAME, ["full", "scan, save_linear"]))
def test_every_way_to_run_gives_the_same_gradients(straight, name):
    params, images, (value, gradient) = straight
    graph, _ = abstract(small_config(recipe="switchback_m", **SAME[name]))
    other_value, other = value_and_gradient(image_loss(graph, images), params)
    np.testing.assert_allclose(other_value, value, rtol=1e-5)
    # A difference of one float32 rounding can move a quantized value by one step.
    paths = [
        jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(gradient)
    ]
    for path, a, b in zip(paths, jax.tree.leaves(gradient), jax.tree.leaves(other), strict=True):
        assert BLIND.search(path) or snr_db(b, a) > 40, path


@pytest.mark.parametrize("recipe", thinning.kept(RECIPES, ["switchback", "switchback_hadamard"]))
def test_every_recipe_trains_in_bfloat16(recipe):
    options = dict(qk_norm=True, layer_scale=0.5, patch_dropout=0.5, scan_layers=True, remat="full")
    cfg = small_config(recipe=recipe, dtype="bfloat16", **options)
    graph, params = random_model(cfg)
    images, _ = inputs(cfg)

    loss = image_loss(graph, images, deterministic=False, dropout_key=jax.random.key(0))
    value, gradient = value_and_gradient(loss, params)
    assert np.isfinite(value)
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        name = jax.tree_util.keystr(path)
        assert leaf.dtype == jnp.float32 and np.isfinite(leaf).all(), name
        assert np.any(leaf) or BLIND.search(name), name


def test_bfloat16_stays_close_to_float32():
    graph, params = random_model(small_config())
    narrow, _ = abstract(small_config(dtype="bfloat16"))
    batch = inputs(small_config())
    runs = [compiled(forward(g, *batch), params)(params) for g in (graph, narrow)]
    for (exact, _), (rounded, _) in zip(*runs, strict=True):
        assert 25 < snr_db(rounded, exact) < 70


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cudnn", "fused"])
def test_fused_attention_equals_xlas(name):
    """cuDNN needs multiples of 8: heads have 16 features; 17 and 9 tokens are padded to 24 and 16."""
    implementations.require("triton" if name == "fused" else None)
    tower = dict(width=64, heads=4)
    options = dict(dtype="bfloat16", vision=small_config().vision, text=small_config().text)
    options |= {part: dataclasses.replace(options[part], **tower) for part in ("vision", "text")}
    graph, params = random_model(small_config(**options, attention="xla"))
    fused, _ = abstract(small_config(**options, attention=name))
    batch = inputs(small_config())
    runs = [compiled(forward(g, *batch), params)(params) for g in (graph, fused)]
    for (a, _), (b, _) in zip(*runs, strict=True):
        assert snr_db(b, a) > 30
    (_, want), (_, got) = (
        value_and_gradient(image_loss(g, batch[0]), params) for g in (graph, fused)
    )
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(want), jax.tree.leaves(got), strict=True
    ):
        assert BLIND.search(jax.tree_util.keystr(path)) or snr_db(b, a) > 25, path


def test_recipes_by_pattern_reach_the_layers_they_name():
    patterns = {"vision/.*fc1": "standard", ".*mlp.*": "switchback", "text/.*attn/[qk]": "llm_int8"}
    cfg = small_config(recipe=patterns, scan_layers=True)
    graph, params = abstract(cfg)
    model = nnx.merge(graph, params)
    for tower, quantized in (
        (model.vision, {"fc2": "switchback"}),
        (model.text, {"fc1": "switchback", "fc2": "switchback", "q": "llm_int8", "k": "llm_int8"}),
    ):
        for part, names in (
            (tower.blocks.attn, ("q", "k", "v", "out")),
            (tower.blocks.mlp, ("fc1", "fc2")),
        ):
            for name in names:
                assert getattr(part, name).recipe == RECIPES[quantized.get(name, "standard")], name
    found = matrix_products(forward(graph, *inputs(cfg)), params)
    # one in the scan body of each tower
    assert sum(count for types, count in found.items() if types[0] in ("s8", "s32")) == 5


def test_causal_text_ignores_what_follows_the_end():
    cfg = small_config(scan_layers=True)
    graph, params = random_model(cfg)
    _, tokens = inputs(cfg)
    end = int(jnp.argmax(tokens[1]))
    assert end + 2 < tokens.shape[1]
    encode = jax.jit(lambda tokens: nnx.merge(graph, params).encode_text(tokens)[0])
    base = encode(tokens)
    np.testing.assert_array_equal(encode(tokens.at[1, end + 1 :].set(7))[1], base[1])
    assert snr_db(encode(tokens.at[1, end - 1].add(1))[1], base[1]) < 40
    np.testing.assert_allclose(encode(tokens[:2, : end + 1])[1], base[1], atol=1e-6)


def test_patch_dropout_is_a_random_subset():
    draws = [np.asarray(random_order(jax.random.key(seed), 2, 16)) for seed in range(64)]
    for order in draws:
        np.testing.assert_array_equal(np.sort(order), [range(16)] * 2)
    counts = [np.bincount(np.concatenate([order[row, :8] for order in draws])) for row in (0, 1)]
    # each patch is kept with probability 1/2: within five standard deviations
    assert np.all(np.abs(np.array(counts) - 32) < 5 * math.sqrt(64 / 4))
    assert np.any(draws[0][0] != draws[0][1]), "both images drop the same patches"


@pytest.mark.parametrize("like_gpus", [False, True])
@pytest.mark.release
def test_kept_patches_enter_the_blocks_as_without_dropout(monkeypatch, like_gpus):
    """Compares the tokens that the blocks read, and their gradients, with a choice from all tokens."""
    if like_gpus:
        target = targets.Target("gpu", "NVIDIA H100", "9.0")
        monkeypatch.setattr(targets, "current", lambda mesh=None: target)
    monkeypatch.setattr("swjax.models.vit.apply_blocks", lambda blocks, x, cfg: (x, {"tokens": x}))
    cfg = small_config(patch_dropout=0.5)
    graph, params = random_model(cfg)
    images, _ = inputs(cfg)
    key, keep = jax.random.key(5), cfg.vision.kept_patches(0.5)
    chosen = random_order(key, images.shape[0], cfg.vision.patches)[:, :keep, None]

    def tokens(params, **options):
        return nnx.merge(graph, params).vision(images, **options)[1]["blocks"]["tokens"]

    def dropped(params):
        return tokens(params, deterministic=False, dropout_key=key)

    def selected(params):
        x = tokens(params)
        return jnp.concatenate([x[:, :1], jnp.take_along_axis(x[:, 1:], chosen, axis=1)], axis=1)

    got, want = (
        jax.jit(jax.value_and_grad(lambda p, f=f: jnp.sum(jnp.sin(f(p)) ** 2)))(params)
        for f in (dropped, selected)
    )
    np.testing.assert_allclose(dropped(params), selected(params), rtol=1e-5, atol=1e-5)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), got, want)


def test_patch_dropout_is_for_training_only():
    cfg = small_config(patch_dropout=0.5, scan_layers=True)
    graph, params = random_model(cfg)
    plain, _ = abstract(small_config(scan_layers=True))
    images, _ = inputs(cfg)
    encode = lambda graph, **kwargs: nnx.merge(graph, params).encode_image(images, **kwargs)[0]
    train = jax.jit(lambda key: encode(graph, deterministic=False, dropout_key=key))
    without, evaluation = jax.jit(lambda: (encode(plain), encode(graph)))()
    np.testing.assert_array_equal(evaluation, without)
    first, again, other = (train(jax.random.key(seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert snr_db(other, first) < 30 and snr_db(first, without) < 30
    with pytest.raises(ValueError, match="needs dropout_key"):
        encode(graph, deterministic=False)


def test_layer_scale_zero_makes_blocks_the_identity():
    cfg = small_config(layer_scale=0.0, scan_layers=True)

    def run(images):
        model = clip.CLIP(cfg, rngs=nnx.Rngs(0))
        return model.encode_image(images)[1]["blocks"], model.vision.blocks.ls_1.gamma[...]

    images, _ = inputs(cfg)
    magnitudes, gamma = compiled(run, images)(images)
    assert (
        np.ptp(magnitudes["feature_mean_abs"]) == 0 and np.ptp(magnitudes["feature_max_abs"]) == 0
    )
    assert gamma.shape == (3, 32) and not np.any(gamma)


def test_zero_embeddings_have_finite_gradients():
    value, gradient = jax.value_and_grad(lambda x: clip.normalize(x).sum())(jnp.zeros((2, 4)))
    assert value == 0 and np.isfinite(gradient).all()


@pytest.mark.release
def test_data_parallel_forward_needs_no_collective():
    cfg = small_config(recipe="switchback", patch_dropout=0.5, scan_layers=True)
    graph, params = random_model(cfg)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())

    def embed(params, images, tokens):
        key = jax.random.key(0)
        outs = forward(graph, images, tokens, deterministic=False, dropout_key=key)(params)
        return [embedding for embedding, _ in outs]

    one = jax.jit(embed)(params, *inputs(cfg, batch=4))
    sharded = jax.jit(embed, in_shardings=(whole, rows, rows), out_shardings=rows)
    arguments = (jax.device_put(params, whole), *jax.device_put(inputs(cfg, batch=4), rows))
    program = sharded.lower(*arguments).compile({"xla_backend_optimization_level": 0})
    for collective in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
        assert collective not in program.as_text()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), one, program(*arguments))


def test_two_builds_are_the_same_program():
    """Two models of one config have the same graph, so a compiled step is reused."""
    graphs = [abstract(small_config())[0] for _ in range(2)]
    assert graphs[0] == graphs[1] and hash(graphs[0]) == hash(graphs[1])
    changed = dataclasses.replace(small_config(), gelu="quick")
    assert abstract(changed)[0] != graphs[0]
