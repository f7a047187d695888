"""Weights in other libraries' layouts: they are read back bit for bit, and every tensor is used."""

import json
import pickle
import re
import resource
import time
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import thinning
from clip_oracle import random_model, shapes, small_config
from flax import nnx
from safetensors.numpy import load_file, save_file

from swjax import interop
from swjax.data import Fitting
from swjax.data.images import MEAN, STD
from swjax.interop import configs
from swjax.interop.layouts import LAYOUTS, for_our_images, tensors
from swjax.models import clip

CLIPS = ("open_clip", "huggingface")
PLAIN = {"recipe": "standard", "dtype": "float32"}
# {name: (options that change the parameters or the activation, layouts that can store them)}
VARIANTS = {
    "plain": ({}, CLIPS),
    "quick gelu": ({"gelu": "quick"}, CLIPS),
    "tanh gelu": ({"gelu": "tanh"}, CLIPS),
    "wider mlp": ({"vision": {"mlp_ratio": 49 / 32}, "text": {"mlp_ratio": 3.0}}, CLIPS),
    "layer scale": ({"layer_scale": 0.5}, ["open_clip"]),
    "logit bias": ({"init_logit_bias": -10.0}, ["open_clip"]),
}
CASES = [(variant, layout) for variant, (_, layouts) in VARIANTS.items() for layout in layouts]
SIGLIP = {
    "architecture": "siglip",
    "gelu": "tanh",
    "embed_dim": 32,
    "init_logit_bias": -10.0,
    "vision": {"resize_mode": "squash"},
    "text": {"width": 32, "layers": 2, "heads": 4, "context_length": 9, "vocab_size": 60},
}


def make(**options) -> clip.CLIP:
    cfg = clip.config(small_config(), **{**PLAIN, **options})
    return nnx.merge(*random_model(cfg))


def same(model, other):
    assert jax.tree.structure(nnx.state(model)) == jax.tree.structure(nnx.state(other))
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), nnx.state(other))


def weights(folder, layout):
    return folder / LAYOUTS[layout].weights


@pytest.fixture
def saved(tmp_path):
    """A model, its open_clip file, and a function that changes the tensors of the file."""
    model = make()
    interop.save(tmp_path, model)
    file = weights(tmp_path, "open_clip")

    def change(function):
        held = load_file(file)
        function(held)
        save_file(held, file)

    return model, file, change


@pytest.mark.parametrize(
    "variant, layout",
    thinning.kept(
        CASES,
        [("plain", "open_clip"), ("wider mlp", "huggingface"), ("logit bias", "open_clip")],
    ),
)
def test_round_trip_is_bit_exact(tmp_path, variant, layout):
    model = make(**VARIANTS[variant][0])
    interop.save(tmp_path, model, layout)
    files = {LAYOUTS[layout].config, LAYOUTS[layout].weights}
    files |= {"preprocessor_config.json"} if layout == "huggingface" else set()
    assert {path.name for path in tmp_path.iterdir()} == files
    for path in (tmp_path, str(weights(tmp_path, layout))):
        loaded = interop.load(path)
        same(loaded, model)
        assert loaded.cfg == clip.config(model.cfg, layer_scale=loaded.cfg.layer_scale)
    first = load_file(weights(tmp_path, layout))
    interop.save(tmp_path / "again", loaded, layout)
    second = load_file(weights(tmp_path / "again", layout))
    assert list(first) == list(second)
    for name, value in first.items():
        np.testing.assert_array_equal(value, second[name], strict=True)


@pytest.mark.parametrize("name, layout", thinning.thinned(list(clip.CONFIGS), CLIPS, full=[]))
def test_every_parameter_has_one_place(name, layout):
    """For every named model, all tensors together contain each parameter exactly once."""
    ours = shapes(clip.CONFIGS[name])
    held = list(tensors(LAYOUTS[layout], ours))
    assert len({tensor.name for tensor in held}) == len(held)
    assert {path for tensor in held for path in tensor.paths} == set(ours)
    count = lambda shapes: sum(int(np.prod(shape, dtype=np.int64)) for shape in shapes)
    assert count(tensor.shape for tensor in held) == count(ours.values())


def test_layout_of_one_block_by_hand(tmp_path):
    """open_clip's in_proj stacks q, k and v; its weights are [out, in], Flax's kernels [in, out]."""
    model = make()
    interop.save(tmp_path, model)
    held = load_file(weights(tmp_path, "open_clip"))
    attn = model.text.blocks.attn
    q, k, v = (np.asarray(linear.kernel[...][1]).T for linear in (attn.q, attn.k, attn.v))
    np.testing.assert_array_equal(
        held["transformer.resblocks.1.attn.in_proj_weight"], np.vstack([q, k, v])
    )
    conv, kernel = held["visual.conv1.weight"], np.asarray(model.vision.patch_embed.kernel[...])
    assert conv.shape == (32, 3, 8, 8) and conv[5, 2, 3, 7] == kernel[3, 7, 2, 5]
    np.testing.assert_array_equal(held["text_projection"], model.text.projection.kernel[...])
    interop.save(tmp_path, model, "huggingface")
    held = load_file(weights(tmp_path, "huggingface"))
    np.testing.assert_array_equal(held["text_model.encoder.layers.1.self_attn.k_proj.weight"], k)
    np.testing.assert_array_equal(
        held["text_projection.weight"].T, model.text.projection.kernel[...]
    )


@pytest.mark.parametrize("dtype", thinning.first([ml_dtypes.bfloat16, np.float16]))
def test_16_bits_are_widened_exactly(saved, dtype):
    model, file, change = saved
    change(lambda held: held.update({name: value.astype(dtype) for name, value in held.items()}))
    narrow = jax.tree.map(lambda x: x.astype(dtype).astype(jnp.float32), nnx.state(model))
    loaded = interop.load(file)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(loaded), narrow)


def test_what_openai_and_older_files_hold_besides_parameters(saved, tmp_path):
    model, file, change = saved
    change(lambda held: held.update(input_resolution=np.array(32), vocab_size=np.array(60)))
    same(interop.load(file), model)
    interop.save(tmp_path / "hf", model, "huggingface")
    file = weights(tmp_path / "hf", "huggingface")
    held = load_file(file)
    held["text_model.embeddings.position_ids"] = np.arange(9)[None]
    save_file(held, file)
    same(interop.load(file), model)


def test_model_can_be_given_and_changed(saved):
    model, file, _ = saved
    (file.parent / LAYOUTS["open_clip"].config).unlink()
    with pytest.raises(ValueError, match=r"no open_clip_config.json next to it.*clip.config\("):
        interop.load(file)
    loaded = interop.load(file, model.cfg, recipe="switchback", dtype="bfloat16")
    assert loaded.vision.blocks.mlp.fc1.recipe.dgrad is not None
    assert loaded.cfg.dtype == "bfloat16"
    same(loaded, model)
    with pytest.raises(ValueError, match="CLIPConfig has no field 'reciep'"):
        interop.load(file, model.cfg, reciep="switchback")


@pytest.mark.parametrize(
    "options, name",
    [
        ({"vision": {"image_size": 16}}, "vision/position_embedding"),
        ({"vision": {"layers": 1}}, "vision/blocks/attn/k/bias"),
        ({"text": {"context_length": 5}}, "text/position_embedding"),
        ({"embed_dim": 4}, "text/projection/kernel"),
        ({"init_logit_bias": -10.0}, "logit_bias"),
    ],
)
def test_options_that_the_weights_do_not_fit(tmp_path, options, name):
    """The model sliced positions, and its configuration described another model."""
    interop.save(tmp_path, make())
    with pytest.raises(ValueError, match=f"does not fit the given configuration: .*{name!r}"):
        interop.load(tmp_path, **options)


def test_configurations_that_big_visions_arrays_do_not_fit(tmp_path):
    model = make(**SIGLIP)
    interop.save(tmp_path, model, "big_vision")
    file = tmp_path / "model.npz"
    assert_near(model, interop.load(file, model.cfg))
    for vision, message in (
        ({"image_size": 16}, "does not fit .*'vision/position_embedding'"),
        ({"heads": 2}, "has 4 .vision. and 4 .text. heads, got a configuration with 2 and 4"),
    ):
        with pytest.raises(ValueError, match=message):
            interop.load(file, clip.config(model.cfg, vision=vision))


def test_a_folder_with_both_layouts_is_read_once(tmp_path):
    model = make()
    for layout in CLIPS:
        interop.save(tmp_path, model, layout)
    same(interop.load(tmp_path), model)


CHANGES = {
    "missing": (
        lambda held: [held.pop("ln_final.bias"), held.pop("visual.proj")],
        r"lacks the tensor 'visual.proj' \(and 1 more\): pass this model",
    ),
    "unexpected": (
        lambda held: held.update({"visual.attn_pool.probe": np.zeros(3, np.float32)}),
        "has an unexpected tensor 'visual.attn_pool.probe': pass this model",
    ),
    "another depth": (
        lambda held: held.update(
            {n.replace("resblocks.1", "resblocks.3"): v for n, v in held.items() if "visual" in n}
        ),
        r"unexpected tensor 'visual.transformer.resblocks.3.attn.in_proj_bias' \(and 11 more\)",
    ),
    "shape": (
        lambda held: held.update({"visual.proj": np.zeros((24, 32), np.float32)}),
        r"tensor 'visual.proj' of .* must be \[32, 24\], got \[24, 32\]: pass this model",
    ),
    "dtype": (
        lambda held: held.update({"visual.proj": np.zeros((32, 24))}),
        "tensor 'visual.proj' of .* must be one of F32, F16, BF16, got F64: convert",
    ),
    "no clip": (
        lambda held: [held.pop(name) for name in list(held) if name.startswith("visual.conv1")],
        "has neither a tensor 'visual.conv1.weight' nor 'vision_model.* give a CLIP ViT",
    ),
}


@pytest.mark.parametrize("change, message", CHANGES.values(), ids=CHANGES.keys())
def test_every_tensor_is_accounted_for(saved, change, message):
    _, file, apply = saved
    apply(change)
    with pytest.raises(ValueError, match=message) as error:
        interop.load(file)
    assert "\n" not in str(error.value)


def prepared(folder, layout, change) -> Path:
    """Writes the model of `make` into a folder whose file prepares pictures in another way; returns it."""
    interop.save(folder, make(), layout)
    file = folder / (
        LAYOUTS["open_clip"].config if layout == "open_clip" else "preprocessor_config.json"
    )
    config = json.loads(file.read_text())
    if layout == "open_clip":
        config["preprocess_cfg"] |= change
    else:
        config = change
    file.write_text(json.dumps(config))
    return folder


def assert_fits(folder, layout, fitting):
    """Asserts how the pictures of a model are fitted, also after it is saved again."""
    model = make()
    model.cfg = interop.configuration(folder)
    assert Fitting.of(model.cfg.vision) == fitting
    interop.save(folder / "again", model, layout)
    assert interop.configuration(folder / "again") == model.cfg


@pytest.mark.parametrize(
    "change, fitting",
    [
        ({"resize_mode": "squash", "interpolation": "bilinear"}, Fitting("squash", "bilinear")),
        ({"resize_mode": "longest", "fill_color": 7}, Fitting("longest", fill_color=7)),
        ({"interpolation": "random"}, Fitting(interpolation="random")),
        ({"resize_mode": "shortest", "interpolation": "bicubic", "size": [32, 32], "mode": "RGB",
          "fill_color": 0}, Fitting()),
        ({"size": 32, "resize_mode": None}, Fitting()),
    ],
)  # fmt: skip
def test_how_open_clip_fits_pictures_is_read_and_written(tmp_path, change, fitting):
    """They were cropped without a word."""
    assert_fits(prepared(tmp_path, "open_clip", change), "open_clip", fitting)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"resize_mode": "stretch"}, "resize_mode must be one of shortest, longest, squash, got 'str"),
        ({"interpolation": "nearest"}, "interpolation must be one of bicubic, bilinear, random, got"),
        ({"mode": "L"}, "mode must be 'RGB'"),
        ({"size": 48}, "preprocess_cfg.size must be 32"),
        ({"crop_pct": 0.9}, "preprocess_cfg.crop_pct=0.9 is not supported"),
        ({"fill_color": 256}, "fill_color must be a whole number from 0 to 255, got 256"),
        ({"mean": [0.5, 0.5]}, "preprocess_cfg.mean must be three numbers from 0 on"),
        ({"std": [1, 1, 0]}, "preprocess_cfg.std must be three numbers from 1e-06 on"),
    ],
)  # fmt: skip
def test_unknown_preparations_of_open_clip_are_refused(tmp_path, change, message):
    with pytest.raises(ValueError, match=f"open_clip_config.json: .*{message}") as error:
        interop.configuration(prepared(tmp_path, "open_clip", change))
    assert "\n" not in str(error.value)


def test_weights_of_an_unknown_preparation_are_read_with_a_configuration(tmp_path):
    model = make()
    same(model, interop.load(prepared(tmp_path, "open_clip", {"mode": "L"}), model.cfg))


@pytest.mark.parametrize(
    "layout, keys", [("open_clip", "mean std"), ("huggingface", "image_mean image_std")]
)
def test_other_means_and_deviations_are_folded_into_the_patch_embedding(tmp_path, layout, keys):
    """The loaded model takes images normalised as CLIP's, and computes what the file's model would."""
    mean, std = (0.5, 0.4, 0.3), (0.5, 0.2, 0.4)
    folder = prepared(tmp_path, layout, dict(zip(keys.split(), (mean, std), strict=True)))
    loaded = interop.load(folder)
    levels = np.random.default_rng(0).random((2, 32, 32, 3), np.float32)
    encode = nnx.jit(lambda model, x: model.encode_image(x)[0])
    theirs = encode(make(), jnp.asarray((levels - mean) / std, jnp.float32))
    ours = encode(loaded, jnp.asarray((levels - MEAN) / STD, jnp.float32))
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5)
    interop.save(tmp_path / "again", loaded, layout)
    again = interop.load(tmp_path / "again")
    same(loaded, again)


@pytest.mark.parametrize(
    "change, expected",
    [
        ({"resample": 1}, "resample must be 3 or 2, got 1: prepare the images"),
        ({"do_center_crop": False}, "size must be the shortest edge with a center crop, or"),
        ({"size": {"longest_edge": 32}}, "size must be the shortest edge"),
        ({"size": 48}, "size must be .* all 32, got size=48"),
        ({"do_normalize": False}, "do_normalize must be True"),
        ({"rescale_factor": 1 / 127.5}, "rescale_factor must be 1 / 255, got 0.0078"),
        ({"rescale_factor": 0.00392156862745098}, Fitting()),
        ({"image_mean": 0}, Fitting()),
        ({"resample": 2, "size": None}, Fitting(interpolation="bilinear")),
        ({"size": {"height": 32, "width": 32}}, Fitting("squash")),
        ({"size": {"height": 32, "width": 32}, "do_center_crop": False}, Fitting("squash")),
        ({"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}, Fitting()),
        ({"size": 32, "resample": 3, "image_processor_type": "CLIPImageProcessor"}, Fitting()),
    ],
)
def test_image_processors_of_hugging_face_are_read(tmp_path, change, expected):
    if isinstance(expected, Fitting):
        assert_fits(prepared(tmp_path, "huggingface", change), "huggingface", expected)
        return
    with pytest.raises(ValueError, match=f"preprocessor_config.json: {expected}"):
        interop.configuration(prepared(tmp_path, "huggingface", change))


def test_pictures_that_a_layout_cannot_describe(tmp_path):
    for layout, vision, message in (
        (
            "huggingface",
            {"resize_mode": "longest"},
            "no resize_mode='longest': use layout='open_clip'",
        ),
        ("big_vision", {}, "needs vision.resize_mode='squash' .* got 'shortest' and 'bicubic'"),
        (
            "big_vision",
            SIGLIP["vision"] | {"interpolation": "bilinear"},
            "got 'squash' and 'bilinear'",
        ),
    ):
        options = SIGLIP if layout == "big_vision" else {}
        with pytest.raises(ValueError, match=message):
            interop.save(tmp_path / layout, make(**options | {"vision": vision}), layout)


@pytest.mark.parametrize("text", ["[" * 100_000, "", "[1]", '"a"', "{" + " " * 2**24 + "}"])
def test_malformed_configs_are_one_line(tmp_path, text):
    interop.save(tmp_path, make())
    (tmp_path / LAYOUTS["open_clip"].config).write_text(text)
    with pytest.raises((ValueError, OSError), match="open_clip_config.json") as error:
        interop.load(tmp_path)
    assert "\n" not in str(error.value)


def test_the_largest_sizes_are_refused_at_once(tmp_path):
    interop.save(tmp_path, make())
    file = tmp_path / LAYOUTS["open_clip"].config
    config = json.loads(file.read_text())
    config["model_cfg"]["vision_cfg"] |= {"layers": 1000, "image_size": 2**13, "patch_size": 1}
    config["model_cfg"]["text_cfg"] |= {
        "layers": 1000,
        "context_length": 2**17,
        "vocab_size": 2**24,
    }
    file.write_text(json.dumps(config))
    start = time.process_time()
    with pytest.raises(ValueError, match="lacks the tensor"):
        interop.load(tmp_path)
    assert time.process_time() - start < 10


@pytest.mark.parametrize("layout, shape", [("open_clip", (1,)), ("siglip", ())])
def test_scalars_of_either_shape_are_read(tmp_path, layout, shape):
    model = make(**SIGLIP) if layout == "siglip" else make()
    interop.save(tmp_path, model, layout)
    held = load_file(weights(tmp_path, layout))
    held["logit_scale"] = held["logit_scale"].reshape(shape)
    save_file(held, weights(tmp_path, layout))
    found = interop.load(tmp_path).logit_scale[...]
    assert found.shape == () and found == model.logit_scale[...]


@pytest.mark.parametrize("kind", ["bomb", "array", "pickle", "cut", "lie"])
def test_malformed_npz_files_are_one_line(tmp_path, kind):
    path = tmp_path / "model.npz"
    if kind == "bomb":
        np.savez_compressed(path, x=np.zeros(2**25, np.float32))
    elif kind == "array":
        with path.open("wb") as file:
            np.save(file, np.zeros(3))
    elif kind == "pickle":
        np.savez(path, x=np.array([print], object))
    else:
        np.savez(path, x=np.zeros(1000))
        data = path.read_bytes()
        data = data[:500] if kind == "cut" else data.replace(b"(1000,)", b"(10**13,)"[:7])
        path.write_bytes(data)
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match="model.npz is not a complete .npz of arrays: ") as error:
        interop.load(path)
    assert "\n" not in str(error.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start < 2**16  # KiB


def test_files_that_are_not_there_or_not_whole(tmp_path):
    with pytest.raises(FileNotFoundError, match="absent does not exist: give a file of weights"):
        interop.load(tmp_path / "absent")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(FileNotFoundError, match="holds neither .*, only notes.txt: give the"):
        interop.load(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ValueError, match="pytorch_model.bin is not .* of torch.save, or is incom"):
        interop.load(tmp_path)
    interop.save(tmp_path, make())
    file = weights(tmp_path, "open_clip")
    for size in (0, 7, 100, file.stat().st_size - 1):
        (tmp_path / "cut.safetensors").write_bytes(file.read_bytes()[:size])
        with pytest.raises(ValueError, match="cut.safetensors is not a .* safetensors file: "):
            interop.load(tmp_path / "cut.safetensors")


def test_what_a_layout_cannot_hold(tmp_path):
    for options, parameter in (
        ({"qk_norm": True}, "blocks/attn/ln_k/bias"),
        ({"layer_scale": 0.0}, "blocks/ls_1/gamma"),
        ({"init_logit_bias": 0.0}, "logit_bias"),
    ):
        with pytest.raises(ValueError, match=f"model.safetensors has no name for .*{parameter}'"):
            interop.save(tmp_path / "none", make(**options), "huggingface")
    with pytest.raises(ValueError, match="layout must be one of .*, big_vision, got 'hf'"):
        interop.save(tmp_path / "none", make(), "hf")
    with pytest.raises(ValueError, match="gelu must be 'tanh', .* got 'exact'"):
        interop.save(tmp_path / "none", make(**SIGLIP | {"gelu": "exact"}), "siglip")
    assert not (tmp_path / "none").exists()


# Config files as the libraries publish them; they omit the library's defaults.
OPEN_CLIP = {
    "vit_b32": {"embed_dim": 512, "vision_cfg": {"layers": 12, "width": 768, "patch_size": 32},
                "text_cfg": {"context_length": 77, "width": 512, "heads": 8, "layers": 12}},
    "vit_l14": {"embed_dim": 768, "vision_cfg": {"layers": 24, "width": 1024, "patch_size": 14},
                "text_cfg": {"width": 768, "heads": 12, "layers": 12}},
    "vit_h14": {"embed_dim": 1024,
                "vision_cfg": {"layers": 32, "width": 1280, "head_width": 80, "patch_size": 14},
                "text_cfg": {"width": 1024, "heads": 16, "layers": 24}},
}  # fmt: skip
HUGGING_FACE = {
    "vit_b32": {"projection_dim": 512, "text_config": {}, "vision_config": {}},
    "vit_b16": {"projection_dim": 512, "text_config": {}, "vision_config": {"patch_size": 16}},
    "vit_l14": {
        "projection_dim": 768,
        "text_config": {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12},
        "vision_config": {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16,
                          "num_hidden_layers": 24, "patch_size": 14},
    },
}  # fmt: skip


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("name", OPEN_CLIP)
def test_published_open_clip_configs(name, quick):
    model = OPEN_CLIP[name] | ({"quick_gelu": True} if quick else {})
    expected = clip.config(name, gelu="quick" if quick else "exact")
    assert configs.from_open_clip({"model_cfg": model}) == expected
    assert configs.from_open_clip(model) == expected  # as in open_clip's own folder of models
    assert configs.from_open_clip(configs.to_open_clip(expected)) == expected


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_published_hugging_face_configs(name):
    model = {"model_type": "clip"} | HUGGING_FACE[name]
    expected = clip.config(name, gelu="quick")
    assert configs.from_hugging_face(model) == expected
    older = model | {"text_config": {}, "text_config_dict": model["text_config"]}
    assert configs.from_hugging_face(older) == expected
    assert configs.from_hugging_face(configs.to_hugging_face(expected)) == expected


@pytest.mark.parametrize("width, hidden", [(1664, 8192), (49, 1), (1280, 5119), (6, 29)])
def test_hidden_widths_survive_the_ratio(width, hidden):
    file = configs.to_hugging_face(small_config())
    file["text_config"] |= {"hidden_size": width, "intermediate_size": hidden}
    file["text_config"]["num_attention_heads"] = 1
    assert configs.from_hugging_face(file).text.mlp_width == hidden


REFUSED = {
    "open_clip": [
        (
            {"vision_cfg": {"timm_model_name": "vit"}},
            "vision_cfg.timm_model_name='vit' is not supported",
        ),
        ({"vision_cfg": {"pool_type": "avg"}}, "vision_cfg.pool_type='avg' is not supported"),
        ({"text_cfg": {"hf_model_name": "roberta"}}, "text_cfg.hf_model_name='roberta'"),
        ({"text_cfg": {"norm_kwargs": {"eps": 1e-6}}}, "text_cfg.norm_kwargs={'eps': 1e-06}"),
        ({"custom_text": True}, "model_cfg.custom_text=True"),
        ({"text_cfg": {"act_kwargs": {"approximate": "tanh"}}}, "text_cfg.act_kwargs must be {}"),
        ({"vision_cfg": {"layers": [3, 4, 6, 3]}}, "vision_cfg.layers must be one number"),
        ({"vision_cfg": None}, "TypeError: "),
        (
            {"vision_cfg": {"layers": 10**9}},
            "layers must be a whole number from 1 to 1000, got 1000000000",
        ),
        ({"text_cfg": {"heads": True}}, "text_cfg.heads must be a whole number"),
        ({"text_cfg": {"context_length": 2**17 + 1}}, "text_cfg.context_length must be a whole"),
        ({"embed_dim": -1}, "model_cfg.embed_dim must be a whole number from 1"),
        ({"vision_cfg": {"mlp_ratio": float("nan")}}, "mlp_ratio must be finite"),
    ],
    "huggingface": [
        (
            {"vision_config": {"hidden_size": "x"}},
            "vision_config.hidden_size must be a whole number from 1 to 65536, got 'x'",
        ),
        (
            {"vision_config": {"intermediate_size": 1e300}},
            "intermediate_size must be a whole number",
        ),
        ({"text_config": {"vocab_size": 10**400}}, "text_config.vocab_size must be a whole number"),
        ({"model_type": "siglip"}, "model_type must be 'clip', the only value that swjax"),
        ({"text_config": {"hidden_act": "relu"}}, "text_config.hidden_act must be 'quick_gelu'"),
        ({"text_config": {"eos_token_id": 7}}, "text_config.eos_token_id must be 59, the only"),
        ({"vision_config": {"layer_norm_eps": 1e-6}}, "vision_config.layer_norm_eps must be 1e-05"),
    ],
}


@pytest.mark.parametrize(
    "layout, change, message",
    [(layout, *case) for layout, cases in REFUSED.items() for case in cases],
)
def test_configs_of_other_models_are_refused(tmp_path, layout, change, message):
    interop.save(tmp_path, make(gelu="quick"), layout)
    file = tmp_path / LAYOUTS[layout].config
    config = json.loads(file.read_text())
    model = config["model_cfg"] if layout == "open_clip" else config
    for key, value in change.items():
        model[key] = model[key] | value if isinstance(value, dict) else value
    if "act_kwargs" in str(change):
        del model["quick_gelu"]
    file.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=re.escape(f"{file}: ")) as error:
        interop.load(tmp_path)
    assert message in str(error.value) and "\n" not in str(error.value)


def assert_near(model, other):
    """Asserts that models are equal, up to rounding in the patch embedding.

    The conversion folds the mean and the deviation of the pixels into it.
    """
    first, second = (nnx.to_pure_dict(nnx.state(m)) for m in (model, other))
    embeddings = [tree["vision"].pop("patch_embed") for tree in (first, second)]
    jax.tree.map(np.testing.assert_array_equal, first, second)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6), *embeddings)


@pytest.mark.parametrize("layout, file", [("siglip", ""), ("big_vision", "model.npz")])
def test_siglip_round_trip(tmp_path, layout, file):
    model = make(**SIGLIP)
    interop.save(tmp_path, model, layout)
    loaded = interop.load(tmp_path / file)
    assert_near(model, loaded)
    scale = {"init_logit_scale": model.cfg.init_logit_scale}
    assert clip.config(loaded.cfg, **scale) == model.cfg


OPEN_CLIP_SIGLIP = {
    "embed_dim": 1152,
    "init_logit_bias": -10,
    "custom_text": True,
    "vision_cfg": {
        "image_size": 384,
        "timm_model_name": "vit_so400m_patch14_siglip_384",
        "timm_model_pretrained": False,
        "timm_pool": "map",
        "timm_proj": "none",
    },
    "text_cfg": {
        "context_length": 64,
        "vocab_size": 32000,
        "hf_tokenizer_name": "timm/ViT-B-16-SigLIP",
        "tokenizer_kwargs": {"clean": "canonicalize"},
        "width": 1152,
        "heads": 16,
        "layers": 27,
        "mlp_ratio": 3.7362,
        "no_causal_mask": True,
        "proj_bias": True,
        "pool_type": "last",
        "norm_kwargs": {"eps": 1e-6},
    },
}


def test_open_clips_siglips_are_described_by_names_of_timm(tmp_path):
    """The picture of 384 pixels has 27 whole patches of 14 on a side; the model does not see the rest."""
    cfg = configs.from_open_clip_siglip({"model_cfg": OPEN_CLIP_SIGLIP})
    sizes = [(t.width, t.layers, t.heads, t.mlp_width) for t in (cfg.vision, cfg.text)]
    assert sizes == 2 * [(1152, 27, 16, 4304)]
    assert (cfg.vision.image_size, cfg.vision.patches, cfg.gelu) == (378, 729, "tanh")
    assert (cfg.text.vocab_size, cfg.embed_dim, cfg.init_logit_bias) == (32000, 1152, -10)
    hugging_face = {"size": {"height": 384, "width": 384}, "resample": 2}
    assert configs.hugging_face_preparation(hugging_face, cfg).fitting.resize_mode == "squash"
    for section, key, value, message in (
        (
            "vision_cfg",
            "timm_model_name",
            "vit_tiny",
            "must be that of a SigLIP, such as 'vit_base_",
        ),
        ("vision_cfg", "timm_pool", "avg", "vision_cfg.timm_pool must be 'map'"),
        ("text_cfg", "proj_bias", None, "text_cfg.proj_bias must be True"),
        (
            "text_cfg",
            "hf_model_name",
            "roberta-base",
            "text_cfg.hf_model_name='roberta-base' is not",
        ),
    ):
        changed = OPEN_CLIP_SIGLIP | {section: OPEN_CLIP_SIGLIP[section] | {key: value}}
        with pytest.raises(ValueError, match=message):
            configs.from_open_clip_siglip(changed)


def test_open_clips_siglip_is_read_bit_for_bit(tmp_path):
    model = make(**SIGLIP)
    layout, file = LAYOUTS["open_clip_siglip"], tmp_path / "open_clip_model.safetensors"
    parameters = {
        name: np.asarray(value) for name, value in interop.files._flat(nnx.state(model)).items()
    }
    save_file({t.name: t.pack(parameters) for t in tensors(layout, shapes(model.cfg))}, file)
    loaded = interop.load(file, model.cfg)
    expected = for_our_images(parameters, (0.5,) * 3, (0.5,) * 3)
    for name, value in interop.files._flat(nnx.state(loaded)).items():
        np.testing.assert_array_equal(value, expected[name])
    with pytest.raises(ValueError, match="layout must .* of open_clip, huggingface, siglip, big_v"):
        interop.save(tmp_path, model, "open_clip_siglip")


def test_an_mlp_whose_ratio_rounds_down(tmp_path):
    """28 * (61 / 28) is less than 61 in floating point."""
    text = SIGLIP["text"] | {"width": 28, "mlp_ratio": configs.mlp_ratio(28, 61)}
    model = make(**SIGLIP | {"text": text})
    for layout, file in (("siglip", "siglip"), ("big_vision", "big_vision/model.npz")):
        interop.save(tmp_path / layout, model, layout)
        assert interop.load(tmp_path / file).cfg.text.mlp_width == 61


def test_big_visions_layout_by_hand(tmp_path):
    """In big_vision's files heads are an axis, and blocks are separate or stacked by a scan."""
    model = make(**SIGLIP)
    interop.save(tmp_path, model, "big_vision")
    held = dict(np.load(tmp_path / "model.npz"))
    attention = "params/txt/Encoder_0/encoderblock_1/MultiHeadDotProductAttention_0"
    assert held[f"{attention}/query/kernel"].shape == (32, 4, 8)
    assert held[f"{attention}/query/bias"].shape == (4, 8)
    assert held[f"{attention}/out/kernel"].shape == (4, 8, 32)
    assert held["params/img/pos_embedding"].shape == (1, 16, 32)
    assert held["params/img/MAPHead_0/probe"].shape == (1, 1, 32)
    assert held["params/t"].shape == held["params/b"].shape == (1,)
    k = np.asarray(model.text.blocks.attn.k.kernel[...][1])
    np.testing.assert_array_equal(held[f"{attention}/key/kernel"][3, 2, 5], k[3, 2 * 8 + 5])
    scanned = {}
    for name, value in held.items():
        scanned.setdefault(re.sub(r"encoderblock_\d+", "encoderblock", name), []).append(value)
    arrays = {n: np.stack(v) if "encoderblock/" in n else v[0] for n, v in scanned.items()}
    np.savez(tmp_path / "scanned.npz", **arrays)
    assert_near(model, interop.load(tmp_path / "scanned.npz"))
    for change, message in (
        (lambda: arrays.update(extra=np.zeros(1)), "unexpected array 'extra'"),
        (lambda: arrays.pop("params/img/MAPHead_0/probe"), "lacks the array 'img/MAPHead_0/probe'"),
    ):
        change()
        np.savez(tmp_path / "other.npz", **arrays)
        with pytest.raises(ValueError, match=message):
            interop.load(tmp_path / "other.npz")
    lost = "params/img/Transformer/encoderblock_0/LayerNorm_0/bias"
    np.savez(tmp_path / "other.npz", **{n: value for n, value in held.items() if n != lost})
    with pytest.raises(ValueError, match=f"lacks the array '{lost.removeprefix('params/')}'"):
        interop.load(tmp_path / "other.npz")
    np.savez(tmp_path / "other.npz", **held | {lost: held[lost][1:]})
    with pytest.raises(ValueError, match="other.npz has an array whose shape does not fit the oth"):
        interop.load(tmp_path / "other.npz")
    embedding = "params/img/embedding/kernel"
    np.savez(tmp_path / "other.npz", **held | {embedding: held[embedding][..., 1:]})
    with pytest.raises(ValueError, match="other.npz does not fit .* 'vision/patch_embed/kernel'"):
        interop.load(tmp_path / "other.npz")
    (tmp_path / "cut.npz").write_bytes((tmp_path / "model.npz").read_bytes()[:1000])
    with pytest.raises(ValueError, match="is not a complete .npz"):
        interop.load(tmp_path / "cut.npz")


def test_a_siglip_has_no_place_in_a_clips_layout(tmp_path):
    for layout in CLIPS:
        with pytest.raises(ValueError, match="has no name for the parameter '"):
            interop.save(tmp_path, make(**SIGLIP), layout)
    with pytest.raises(ValueError, match="has no name for the parameter"):
        interop.save(tmp_path, make(), "siglip")
    with pytest.raises(ValueError, match="needs architecture='siglip' with .* got 'clip'"):
        interop.save(tmp_path / "new", make(), "big_vision")
    assert not (tmp_path / "new").exists()


def test_pickles_are_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return Path.touch, (tmp_path / "run",)

    for tree in ({"x": Evil()}, {"state_dict": [Evil()]}):
        with zipfile.ZipFile(tmp_path / "evil.pt", "w") as file:
            file.writestr("evil/data.pkl", pickle.dumps(tree))
        with pytest.raises(ValueError, match="evil.pt: its .* needs pathlib.*, which is not read"):
            interop.load(tmp_path / "evil.pt")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "index, message",
    [
        ({"weight_map": {"x": "../model.safetensors"}}, "index of .* .it must name files of its"),
        (
            {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}},
            "names a.safetensors, which is",
        ),
        ({"weight_map": {"x": "model.safetensors"}}, "says that model.safetensors .* which it"),
        ([], "is not an index of weights"),
    ],
)
def test_wrong_indices_of_shards(index, message, tmp_path):
    interop.save(tmp_path, make(), layout="huggingface")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises((ValueError, FileNotFoundError), match=message) as error:
        interop.load(tmp_path / "model.safetensors.index.json")
    assert "\n" not in str(error.value)


def test_shards(tmp_path):
    whole = make()
    interop.save(tmp_path, whole, layout="huggingface")
    held = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(held)
    files = {f"model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    for file, some in files.items():
        save_file({name: held[name] for name in some}, tmp_path / file)
    index = {"weight_map": {name: file for file, some in files.items() for name in some}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for a, b in zip(
        *(jax.tree.leaves(nnx.state(m, nnx.Param)) for m in (whole, interop.load(tmp_path)))
    ):
        np.testing.assert_array_equal(a, b)
