"""Model configs: sizes, parameters, initial values, parameter trees, and errors."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import thinning
from clip_oracle import abstract, compiled, inputs, random_model, small_config
from flax import nnx
from jax.extend.core import jaxprs_in_params

from swjax.models import clip

SIZES = {
    "vit_b32": 151_277_313,
    "vit_b16": 149_620_737,
    "vit_l14": 427_616_513,
    "vit_h14": 986_109_441,
}


def names(params):
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
    plain = params if isinstance(params, dict) else nnx.to_pure_dict(params)
    leaves = jax.tree_util.tree_leaves_with_path(plain, is_leaf=lambda x: x is None)
    return {name(path): leaf for path, leaf in leaves}


@pytest.mark.parametrize("name", SIZES)
def test_parameter_counts_are_open_clips(name):
    _, params = abstract(clip.CONFIGS[name])
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == SIZES[name]
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}


def both_towers(cfg, batch):
    """Returns a function that embeds images, with patch dropout, and texts, and its arguments."""
    graph, params = abstract(cfg)

    def run(params, images, tokens, key):
        model = nnx.merge(graph, params)
        image, _ = model.encode_image(images, deterministic=False, dropout_key=key)
        return image, model.encode_text(tokens)[0]

    side = cfg.vision.image_size
    images = jax.ShapeDtypeStruct((batch, side, side, 3), jnp.float32)
    tokens = jax.ShapeDtypeStruct((batch, cfg.text.context_length), jnp.int32)
    return run, (params, images, tokens, jax.random.key(0))


@pytest.mark.parametrize("name", thinning.kept(clip.CONFIGS, ["tiny", "vit_h14"]))
def test_every_size_runs_abstractly_with_every_option(name):
    for options in (
        {"recipe": "standard", "remat": "full"},
        {"recipe": "switchback_m", "remat": "save_quantized"},
        {"recipe": "fp8_tensorwise", "layer_scale": 0.0, "qk_norm": True, "patch_dropout": 0.5},
        {"dtype": "bfloat16", "gelu": "tanh", "init_logit_bias": -10.0},
    ):
        cfg = clip.config(name, scan_layers=True, **options)
        run, arguments = both_towers(cfg, batch=2)
        for embedding in jax.eval_shape(run, *arguments):
            assert embedding.shape == (2, cfg.embed_dim) and embedding.dtype == jnp.float32


@pytest.mark.release
def test_rematerialisation_keeps_what_it_says():
    """Counts the bytes that the vision tower saves for the backward pass, without parameters."""

    def kept(recipe, remat):
        cfg = clip.config("tiny", recipe=recipe, dtype="bfloat16", remat=remat)
        graph, params = abstract(cfg)
        images = jnp.zeros((8, 64, 64, 3))
        encode = lambda params: nnx.merge(graph, params).encode_image(images)[0]
        residuals = jax.eval_shape(lambda params: jax.vjp(encode, params)[1], params)
        return sum(
            leaf.size * leaf.dtype.itemsize
            for leaf in jax.tree.leaves(residuals)
            if leaf.shape[:2] == (8, 17)
        )

    token = 8 * 17 * 128  # elements of one activation of width 128
    full, layers = kept("switchback", "full"), 4
    assert full == 2 * token * (layers + 1)  # the input of each block and of the first LayerNorm
    assert kept("switchback", "dots") == full + layers * 2 * token * (4 + 4)  # q, k, v, out; fc1
    int8 = layers * token * (1 + 1)  # the inputs of q, k and v together and of fc1
    assert kept("switchback_m", "save_quantized") == pytest.approx(
        full + int8, rel=0.05
    )  # the scales are the difference
    # A block saves 10 activations of width 128 in 16 bits: the residual stream twice, q, k, v, attention's
    # output and fc1's output (4). `standard` also saves the inputs of weight gradients, which the others
    # recompute: LayerNorm's output twice, GELU's (4).
    assert kept("switchback", "none") == 2 * token * (layers * 10 + 1)
    assert kept("standard", "none") == 2 * token * (layers * 16 + 1)
    assert kept("switchback_m", "none") == kept("switchback", "none")


@pytest.mark.parametrize("remat", thinning.first(["none", "full"]))
def test_nothing_is_left_for_switchback_m_to_save(remat):
    """Prologues recompute the inputs that `switchback_m` would save: it needs the memory of `switchback`."""
    images = jax.ShapeDtypeStruct((8, 64, 64, 3), jnp.float32)

    def program(recipe):
        cfg = clip.config("tiny", recipe=recipe, remat=remat, scan_layers=True)
        graph, params = abstract(cfg)
        loss = lambda params, images: nnx.merge(graph, params).encode_image(images)[0].sum()
        return jax.jit(jax.grad(loss)).lower(params, images)

    m, plain, q = (program(recipe) for recipe in ("switchback_m", "switchback", "switchback_q"))
    assert plain.as_text() != q.as_text()
    if remat == "none":
        assert m.as_text() == plain.as_text()
    else:  # with zeros that no operation reads
        sizes = [each.compile().memory_analysis().temp_size_in_bytes for each in (m, plain)]
        assert sizes[0] == pytest.approx(sizes[1], rel=0.01)


@pytest.mark.parametrize("recipe", thinning.first(["switchback_m", "switchback", "fp8_switchback"]))
def test_each_weight_is_quantized_once(recipe):
    """One quantization serves the forward product, the input gradient and the block's recomputation."""
    graph, params = abstract(clip.config("tiny", recipe=recipe, remat="full", scan_layers=True))
    shapes = {leaf.shape[1:] for leaf in jax.tree.leaves(params["vision"]["blocks"]["mlp"])}
    loss = lambda params, images: nnx.merge(graph, params).encode_image(images)[0].sum()
    images = jax.ShapeDtypeStruct((8, 64, 64, 3), jnp.float32)
    jaxpr = jax.make_jaxpr(jax.grad(loss))(params, images)
    dtype = "float8_e4m3fn" if recipe.startswith("fp8") else "int8"
    casts = [
        out.aval.shape
        for out in outputs(jaxpr.jaxpr, "convert_element_type")
        if out.aval.dtype == dtype
    ]
    for shape in ((128, 512), (512, 128)):
        assert shape in shapes and casts.count(shape) == 1, casts


def outputs(jaxpr, primitive):
    """Yields the outputs of every equation of a primitive, also in nested programs."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == primitive:
            yield from equation.outvars
        for inner in jaxprs_in_params(equation.params):
            yield from outputs(inner, primitive)


def test_initial_values_are_open_clips():
    cfg = clip.config(
        "tiny", vision={"image_size": 128}, text={"vocab_size": 2000, "layers": 4, "width": 192}
    )
    params = names(compiled(lambda: nnx.state(clip.CLIP(cfg, rngs=nnx.Rngs(0))))())
    v, t, sqrt3 = 128, 192, math.sqrt(3)
    deviations = {
        "vision/patch_embed/kernel": (3 * 16 * 16) ** -0.5 / sqrt3,
        "vision/class_embedding": v**-0.5,
        "vision/position_embedding": v**-0.5,
        "vision/projection/kernel": v**-0.5,
        "vision/blocks/attn/k/kernel": math.sqrt(6 / (4 * v)) / sqrt3,
        "vision/blocks/attn/out/kernel": v**-0.5 / sqrt3,
        "vision/blocks/mlp/fc1/kernel": v**-0.5 / sqrt3,
        "vision/blocks/mlp/fc1/bias": v**-0.5 / sqrt3,
        "vision/blocks/mlp/fc2/kernel": (4 * v) ** -0.5 / sqrt3,
        "text/token_embedding/embedding": 0.02,
        "text/position_embedding": 0.01,
        "text/projection/kernel": t**-0.5,
        "text/blocks/attn/q/kernel": t**-0.5,
        "text/blocks/attn/out/kernel": (t * 8) ** -0.5,
        "text/blocks/mlp/fc1/kernel": (2 * t) ** -0.5,
        "text/blocks/mlp/fc2/kernel": (t * 8) ** -0.5,
        "text/blocks/mlp/fc2/bias": (4 * t) ** -0.5 / sqrt3,
    }
    for name, expected in deviations.items():
        values = np.asarray(params[name], np.float64)
        assert values.std() == pytest.approx(expected, rel=3 / math.sqrt(values.size) + 0.002), name
    for name, value in params.items():
        if "ln_" in name:
            assert np.all(value == (1 if name.endswith("scale") else 0)), name
        if "attn" in name and name.endswith("bias"):
            assert np.all(value == 0), name
        if "blocks" in name and name.endswith("kernel"):
            assert np.mean(value[0] == value[1]) < 0.01, f"{name}: layers have equal initial values"
    assert float(params["logit_scale"]) == pytest.approx(math.log(1 / 0.07))


def test_parameter_trees_for_the_optimizer():
    _, params = random_model(small_config(layer_scale=0.0, qk_norm=True, init_logit_bias=-10.0))
    axes, decay = names(clip.block_axes(params)), names(clip.weight_decay_mask(params))
    assert axes.keys() == decay.keys() == names(params).keys()
    for name, leaf in names(params).items():
        assert axes[name] == (0 if "/blocks/" in name else None), name
        if "/blocks/" in name:
            assert leaf.shape[0] == (3 if name.startswith("vision") else 2), name
        assert decay[name] is (name.endswith(("kernel", "token_embedding/embedding"))), name
    # and also from a plain dict, as the trainer stores it
    plain = nnx.to_pure_dict(params)
    assert names(clip.weight_decay_mask(plain)) == decay and names(clip.block_axes(plain)) == axes


@pytest.mark.parametrize("value, clamped", [(-1.0, 0.0), (3.0, 3.0), (5.0, math.log(100))])
def test_logit_scale_is_clamped(value, clamped):
    _, params = random_model(small_config())
    params["logit_scale"][...] = jnp.float32(value)
    after = clip.clamp_logit_scale(params)
    assert float(after["logit_scale"][...]) == pytest.approx(clamped)
    rest = lambda tree: {k: v for k, v in names(tree).items() if k != "logit_scale"}
    jax.tree.map(np.testing.assert_array_equal, rest(params), rest(after))


@pytest.mark.parametrize("name", clip.CONFIGS)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.release
def test_flops_are_those_of_the_traced_products(name, dropout):
    cfg = clip.config(name, recipe="standard", patch_dropout=dropout)
    run, arguments = both_towers(cfg, batch=1)
    jaxpr = jax.make_jaxpr(run)(*arguments)
    assert count_flops(jaxpr.jaxpr) == clip.flops_per_example(cfg)
    if dropout:
        assert clip.flops_per_example(cfg, training=False) > clip.flops_per_example(cfg)


def count_flops(jaxpr):
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            contracted = eqn.params["dimension_numbers"][0][0]
            lhs = eqn.invars[0].aval.shape
            total += (
                2
                * math.prod(eqn.outvars[0].aval.shape)
                * math.prod(lhs[axis] for axis in contracted)
            )
        total += sum(count_flops(inner) for inner in jaxprs_in_params(eqn.params))
    return total


@pytest.mark.parametrize(
    "overrides, message",
    [
        ({"vision": {"heads": 5}}, "heads must divide width, got width=128 and heads=5: try heads=4"),
        ({"vision": {"patch_size": 10}}, "got image_size=64 and patch_size=10: try image_size=60"),
        ({"vision": {"patch_size": 0}}, "patch_size must divide"),
        ({"text": {"layers": 0}}, "layers and heads must be at least 1, got 128, 0 and 4"),
        ({"text": {"context_length": 0}}, "context_length and vocab_size must be at least 1"),
        ({"text": {"mlp_ratio": 0.0}}, "mlp_ratio must be finite and give at least 1 feature, got 0.0"),
        ({"text": {"mlp_ratio": math.nan}}, "mlp_ratio must be finite and give at least 1 feature, got nan"),
        ({"text": {"mlp_ratio": math.inf}}, "mlp_ratio must be finite and give at least 1 feature, got inf"),
        ({"text": {"depth": 3}}, "TextConfig has no field 'depth': it has width"),
        ({"widht": 3}, "CLIPConfig has no field 'widht'"),
        ({"lora": {"rnak": 3}}, "LoRA has no field 'rnak': it has rank, alpha, pattern"),
        ({"lora": {"alpha": 3.0}}, "rank must be a whole number of at least 1, got None"),
        ({"embed_dim": 0}, "embed_dim must be at least 1, got 0"),
        ({"patch_dropout": 1.0}, r"patch_dropout must be in \[0, 1\), got 1.0"),
        ({"dtype": "int8"}, "dtype must be one of float32, bfloat16, float16, got 'int8'"),
        ({"gelu": "relu"}, "gelu must be one of exact, tanh, quick, got 'relu'"),
        ({"remat": "some"}, "remat must be one of none, full, dots, save_quantized, save_linear, got 'some'"),
        ({"attention": "flash"}, "attention must be one of None, xla, cudnn, fused, got 'flash'"),
        ({"attention": "cudnn"}, "attention='cudnn' needs a 16-bit dtype, got dtype='float32'"),
        ({"recipe": "int4"}, "recipe must be one of standard, switchback"),
        ({"recipe": {".*mlp.*": "int4"}}, "recipe must be one of standard, switchback"),
        ({"recipe": {"mpl": "standard"}}, "pattern 'mpl' matches no linear layer"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_clear_line(overrides, message):
    with pytest.raises(ValueError, match=message) as error:
        clip.config("tiny", **overrides)
    assert "\n" not in str(error.value)


def test_unknown_model():
    with pytest.raises(ValueError, match="model must be one of tiny, vit_b32, .* got 'vit_g'"):
        clip.config("vit_g")


def test_wrong_inputs_are_one_clear_line():
    cfg = small_config()
    graph, params = random_model(cfg)
    model = nnx.merge(graph, params)
    images, tokens = inputs(cfg)
    for call, message in (
        (lambda: model.encode_image(images[:, :16]), r"must be \[batch, 32, 32, 3\], got \(3, 16, 32, 3\)"),
        (lambda: model.encode_image(images.astype(jnp.uint8)), "must be floating, got uint8: normalize"),
        (lambda: model.encode_text(jnp.zeros((2, 10), int)), r"must be \[batch, 1 to 9\], got \(2, 10\)"),
        (lambda: model.encode_text(tokens[0]), r"must be \[batch, 1 to 9\], got \(9,\)"),
        (lambda: model.encode_text(tokens.astype(jnp.float32)), "must be integers, got float32"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call()
