"""swjax's CLIP compared with open_clip's and transformers', with random weights saved by either side."""

import functools
import itertools
import json

import jax.numpy as jnp
import numpy as np
import pytest
import siglip_files
import thinning
import torch_peers
from clip_oracle import compiled, inputs, random_model, shapes, small_config
from flax import nnx
from safetensors.numpy import load_file, save_file
from test_interop import CASES, PLAIN, SIGLIP, VARIANTS

from swjax import data, inference, interop
from swjax.interop import hub
from swjax.interop.layouts import LAYOUTS, tensors
from swjax.models import clip
from swjax.training.state.initialization import interpolate_positions

ATOL = 3e-6  # for unit vectors in float32, as in test_models.py
NAMES = {"vit_b32": "ViT-B-32", "vit_b16": "ViT-B-16", "vit_l14": "ViT-L-14", "vit_h14": "ViT-H-14"}


@pytest.fixture(scope="module", autouse=True)
def libraries():
    """Imports the libraries, which takes half a minute, only where a test needs them."""
    global torch, open_clip, transformers
    peers = torch_peers.load()
    torch, open_clip, transformers = peers.torch, peers.open_clip, peers.transformers


def config(variant):
    return clip.config(small_config(), **PLAIN, **VARIANTS[variant][0])


def held(state):
    """A module that has the tensors of a state dict under their names."""
    root = torch.nn.Module()
    for name, value in state.items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, torch.nn.Module())
            module = getattr(module, part)
        module.register_buffer(last, value.detach())
    root.forward = lambda x: x
    return root


def open_theirs(folder, layout):
    """Opens a folder with the other library, which must use every tensor."""
    if layout == "open_clip":
        return open_clip.create_model(f"local-dir:{folder}").eval()
    model, info = transformers.CLIPModel.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


def make_theirs(cfg, layout, folder):
    """Returns the other library's model with random weights, which its own code has saved to `folder`."""
    interop.save(folder, nnx.merge(*random_model(cfg)), layout)  # for the config file
    (folder / LAYOUTS[layout].weights).unlink()
    torch.manual_seed(0)
    if layout == "huggingface":
        described = transformers.CLIPConfig.from_pretrained(folder)
        model = transformers.CLIPModel(described)
    else:
        described = json.loads((folder / LAYOUTS[layout].config).read_text())["model_cfg"]
        model = open_clip.CLIP(**described)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim:  # no bias stays 0, no scale 1
                parameter.add_(0.1 * torch.randn_like(parameter))
    if layout == "huggingface":
        model.save_pretrained(folder)
    else:
        from safetensors.torch import save_file as save_torch

        save_torch(model.state_dict(), folder / LAYOUTS[layout].weights)
    return model.eval()


def ours_of(model, images, tokens):
    """Returns swjax's embeddings of images and texts, and the logits per image."""

    def run(state):
        model = nnx.merge(graph, state)
        image, text = model.encode_image(images)[0], model.encode_text(tokens)[0]
        logits = jnp.exp(model.logit_scale[...]) * image @ text.T
        return image, text, logits + (model.logit_bias[...] if hasattr(model, "logit_bias") else 0)

    graph, state = nnx.split(model)
    return compiled(run, state)(state)


def theirs_of(model, images, tokens):
    pixels = torch.from_numpy(np.array(images.transpose(0, 3, 1, 2)))
    ids = torch.from_numpy(np.array(tokens, np.int64))
    with torch.no_grad():
        if isinstance(model, transformers.CLIPModel):
            out = model(input_ids=ids, pixel_values=pixels)
            results = out.image_embeds, out.text_embeds, out.logits_per_image
        else:
            results = (
                model.encode_image(pixels, normalize=True),
                model.encode_text(ids, normalize=True),
                model.get_logits(pixels, ids)[0],
            )
    return [result.numpy() for result in results]


def assert_parity(ours, theirs):
    images, tokens = inputs(ours.cfg)
    mine, other = ours_of(ours, images, tokens), theirs_of(theirs, images, tokens)
    scale = float(np.exp(ours.logit_scale[...]))
    for value, expected, atol in zip(mine, other, (ATOL, ATOL, ATOL * scale), strict=True):
        assert np.linalg.matrix_rank(expected) > 1  # rows differ
        np.testing.assert_allclose(value, expected, rtol=0, atol=atol)


@pytest.mark.parametrize(
    "variant, layout", thinning.kept(CASES, [("plain", "open_clip"), ("quick gelu", "huggingface")])
)
def test_our_weights_in_their_model(tmp_path, variant, layout):
    model = nnx.merge(*random_model(config(variant)))
    interop.save(tmp_path, model, layout)
    assert_parity(model, open_theirs(tmp_path, layout))


@pytest.mark.parametrize(
    "variant, layout",
    thinning.kept(CASES, [("plain", "huggingface"), ("layer scale", "open_clip")]),
)
def test_their_weights_in_our_model(tmp_path, variant, layout):
    cfg = config(variant)
    theirs = make_theirs(cfg, layout, tmp_path)
    ours = interop.load(tmp_path)
    assert ours.cfg == cfg
    assert_parity(ours, theirs)
    interop.save(tmp_path / "back", ours, layout)
    back = load_file(tmp_path / "back" / LAYOUTS[layout].weights)
    state = theirs.state_dict()
    assert back.keys() == state.keys()
    for name, value in state.items():
        np.testing.assert_array_equal(back[name], value.numpy(), strict=True)


@pytest.mark.parametrize("kind", ["state dict", "checkpoint", "half", "TorchScript", "shards"])
def test_files_of_torch(tmp_path, kind):
    """They hold what safetensors of the same model hold, bit for bit, and are read without torch."""
    cfg = config("plain")
    model = make_theirs(cfg, "open_clip", tmp_path)
    if kind == "half":
        model = model.half()
    state, file = model.state_dict(), tmp_path / "open_clip_pytorch_model.bin"
    save_file(
        {n: v.float().numpy() for n, v in state.items()}, tmp_path / LAYOUTS["open_clip"].weights
    )
    expected = interop.read(tmp_path)
    (tmp_path / LAYOUTS["open_clip"].weights).unlink()
    if kind == "checkpoint":
        rest = {"epoch": 3, "optimizer": {"param_groups": [{"lr": 1e-3, "betas": (0.9, 0.98)}]}}
        state = rest | {"state_dict": {f"module.{name}": value for name, value in state.items()}}
    if kind == "TorchScript":
        with pytest.warns(DeprecationWarning, match="torch.jit"):
            torch.jit.save(torch.jit.trace(held(state), torch.zeros(1)), file)
    elif kind == "shards":
        names, file = list(state), tmp_path / "pytorch_model.bin.index.json"
        parts = {f"pytorch_model-0000{i + 1}-of-00002.bin": names[i::2] for i in range(2)}
        for part, some in parts.items():
            torch.save({name: state[name] for name in some}, tmp_path / part)
        file.write_text(
            json.dumps(
                {"weight_map": {name: part for part, some in parts.items() for name in some}}
            )
        )
    else:
        torch.save(state, file)
    found_cfg, found = interop.read(tmp_path)
    assert found_cfg == expected[0] and found.keys() == expected[1].keys()
    for name, value in expected[1].items():
        np.testing.assert_array_equal(found[name], value)


def test_a_tensor_with_another_sign_than_its_storage_is_refused(tmp_path):
    negated = torch.view_as_complex(torch.ones(3, 2)).conj().imag
    torch.save({"logit_scale": negated}, tmp_path / "a.bin")
    with pytest.raises(ValueError, match="has a tensor of an unknown form: save its state dict"):
        interop.read(tmp_path / "a.bin")


def test_openai_weights(tmp_path):
    """OpenAI's files: 16-bit matrices, 32-bit vectors, no config; heads of 64 features, quick GELU."""
    sizes = {"vision": {"width": 128, "heads": 2}, "text": {"width": 64, "heads": 1}}
    cfg = clip.config(small_config(), **PLAIN, gelu="quick", **sizes)
    interop.save(tmp_path, nnx.merge(*random_model(cfg)))
    state = load_file(tmp_path / LAYOUTS["open_clip"].weights)
    build = open_clip.model.build_model_from_openai_state_dict
    theirs = build({name: torch.from_numpy(value) for name, value in state.items()})
    held = {name: value.numpy() for name, value in theirs.state_dict().items()}
    assert {value.dtype for value in held.values()} == {np.dtype("float16"), np.dtype("float32")}
    for name, size in (("input_resolution", 32), ("context_length", 9), ("vocab_size", 60)):
        held[name] = np.array(size)
    save_file(held, tmp_path / "openai.safetensors")
    (tmp_path / LAYOUTS["open_clip"].config).unlink()
    assert_parity(interop.load(tmp_path / "openai.safetensors", cfg), theirs.float())


@pytest.mark.parametrize(
    "name, quick",
    thinning.kept(itertools.product(NAMES, [False, True]), [("vit_b32", False), ("vit_h14", True)]),
)
def test_real_sizes_hold_the_same_tensors(name, quick):
    """Compares shapes only; no weight is allocated."""
    gelu = "quick" if quick else "exact"
    cfg = clip.config(name, gelu=gelu)
    published = open_clip.get_model_config(NAMES[name])
    with torch.device("meta"):
        theirs = {
            "open_clip": open_clip.CLIP(**published, quick_gelu=quick),
            "huggingface": transformers.CLIPModel(
                transformers.CLIPConfig(**interop.configs.to_hugging_face(cfg))
            ),
        }
    assert interop.configs.from_open_clip(published | {"quick_gelu": quick}) == cfg
    for layout, model in theirs.items():
        expected = {key: tuple(value.shape) for key, value in model.state_dict().items()}
        assert {t.name: t.shape for t in tensors(LAYOUTS[layout], shapes(cfg))} == expected


def siglip():
    text = SIGLIP["text"] | {"mlp_ratio": 3.0}
    return clip.config(small_config(), **PLAIN, **SIGLIP | {"text": text})


def assert_siglip_parity(ours, theirs, unseen=0):
    """Both models get the same pixels, each normalised in its own way; theirs gets `unseen` more."""
    images, tokens = inputs(ours.cfg)
    pixels = np.asarray(images) * data.images.STD + data.images.MEAN
    pixels = np.pad(pixels, [(0, 0), (0, unseen), (0, unseen), (0, 0)])
    rescaled = torch.from_numpy(np.float32((pixels - 0.5) / 0.5).transpose(0, 3, 1, 2).copy())
    with torch.no_grad():
        out = theirs(input_ids=torch.from_numpy(np.array(tokens, np.int64)), pixel_values=rescaled)
    expected = out.image_embeds, out.text_embeds, out.logits_per_image
    scale = float(np.exp(ours.logit_scale[...]))
    for value, other, atol in zip(
        ours_of(ours, images, tokens), expected, (ATOL, ATOL, ATOL * scale), strict=True
    ):
        assert np.linalg.matrix_rank(other.numpy()) > 1
        np.testing.assert_allclose(value, other.numpy(), rtol=0, atol=atol)


def test_our_siglip_in_transformers(tmp_path):
    model = nnx.merge(*random_model(siglip()))
    interop.save(tmp_path, model, "siglip")
    theirs, info = transformers.SiglipModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert_siglip_parity(model, theirs.eval())


@pytest.mark.parametrize("unseen", thinning.first([0, 5]))
def test_transformers_siglip_in_ours(tmp_path, unseen):
    """Of google/siglip-so400m-patch14-384, the last pixels that are no whole patch are not seen."""
    interop.save(tmp_path, nnx.merge(*random_model(siglip())), "siglip")  # for the config file
    (tmp_path / LAYOUTS["siglip"].weights).unlink()
    described = json.loads((tmp_path / "config.json").read_text())
    described["vision_config"]["image_size"] += unseen
    (tmp_path / "config.json").write_text(json.dumps(described))
    torch.manual_seed(0)
    theirs = transformers.SiglipModel(transformers.SiglipConfig.from_pretrained(tmp_path)).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path)
    ours = interop.load(tmp_path)
    assert ours.cfg.siglip
    assert_siglip_parity(ours, theirs, unseen)
    interop.save(tmp_path / "npz", ours, "big_vision")
    assert_siglip_parity(interop.load(tmp_path / "npz" / "model.npz"), theirs, unseen)


def test_open_clips_siglip_in_ours(tmp_path):
    """Its image tower is timm's, its text tower its own; small ones, under the names of its files."""
    from timm.models.vision_transformer import VisionTransformer

    cfg = clip.config(siglip(), gelu="exact")
    vision, text = cfg.vision, cfg.text
    torch.manual_seed(0)
    trunk = VisionTransformer(
        img_size=vision.image_size, patch_size=vision.patch_size, embed_dim=vision.width,
        depth=vision.layers, num_heads=vision.heads, class_token=False, global_pool="map", num_classes=0,
    )  # fmt: skip
    texts = open_clip.transformer.TextTransformer(
        context_length=text.context_length, vocab_size=text.vocab_size, width=text.width, heads=text.heads,
        layers=text.layers, mlp_ratio=text.mlp_ratio, output_dim=cfg.embed_dim, no_causal_mask=True,
        proj_bias=True, pool_type="last", norm_layer=functools.partial(torch.nn.LayerNorm, eps=1e-6),
    )  # fmt: skip
    with torch.no_grad():
        for parameter in (*trunk.parameters(), *texts.parameters()):
            parameter.add_(0.1 * torch.randn_like(parameter))
    state = {f"visual.trunk.{name}": value for name, value in trunk.state_dict().items()}
    state |= {f"text.{name}": value for name, value in texts.state_dict().items()}
    held = {name: value.numpy() for name, value in state.items() if name != "text.attn_mask"}
    held |= {"logit_scale": np.float32(2.0), "logit_bias": np.float32(-9.0)}
    save_file({n: np.asarray(x) for n, x in held.items()}, tmp_path / "open_clip_model.safetensors")
    ours = interop.load(tmp_path / "open_clip_model.safetensors", cfg)
    images, tokens = inputs(cfg)
    pixels = (np.asarray(images) * data.images.STD + data.images.MEAN - 0.5) / 0.5
    with torch.no_grad():
        image = trunk.eval()(torch.from_numpy(np.float32(pixels).transpose(0, 3, 1, 2).copy()))
        told = texts.eval()(torch.from_numpy(np.array(tokens, np.int64)))
    unit = torch.nn.functional.normalize
    found = ours_of(ours, images, tokens)
    for value, other in zip(found[:2], (unit(image), unit(told)), strict=True):
        assert np.linalg.matrix_rank(other.numpy()) > 1
        np.testing.assert_allclose(value, other.numpy(), rtol=0, atol=ATOL)
    assert (float(ours.logit_scale[...]), float(ours.logit_bias[...])) == (2.0, -9.0)


SIGLIPS = [name for name in hub.OPEN_CLIP if "SigLIP" in name]


@pytest.mark.parametrize(
    "name", thinning.kept(SIGLIPS, ["ViT-B-16-SigLIP2", "ViT-SO400M-14-SigLIP-384"])
)
def test_open_clips_siglips_hold_the_same_tensors(name):
    published = open_clip.get_model_config(name)
    cfg = interop.configs.from_open_clip_siglip(published)
    published.pop("custom_text")
    with torch.device("meta"):
        theirs = open_clip.CustomTextCLIP(**published)
    expected = {key: tuple(value.shape) for key, value in theirs.state_dict().items()}
    layout = LAYOUTS["open_clip_siglip"]
    assert {t.name: t.shape for t in tensors(layout, shapes(cfg))} == expected


def test_siglips_tokens_are_those_of_transformers(tmp_path):
    """On texts without an underscore, which SigLIP's code turns into a blank and transformers drops."""
    pytest.importorskip("sentencepiece")
    siglip_files.t5_model(tmp_path / "spiece.model")
    siglip_files.gemma_json(tmp_path / "tokenizer.json")
    texts = [
        "A photo of a Füchsin!",
        "  кош,  写真の猫",
        "",
        "x y" * 20,
        "don't  \n stop",
        "\uff21",
    ]
    options = {
        "padding": "max_length",
        "max_length": 16,
        "truncation": True,
        "return_tensors": "np",
    }
    first = transformers.SiglipTokenizer(str(tmp_path / "spiece.model"))
    expected = first(texts, **options).input_ids
    found = data.tokenize(texts, 16, str(tmp_path / "spiece.model"))
    np.testing.assert_array_equal(found, expected)
    second = transformers.Siglip2Tokenizer.from_pretrained(tmp_path, padding_side="right")
    expected = [[*row[:15], 1, *(0,) * (15 - len(row[:15]))] for row in second(texts).input_ids]
    found = data.tokenize(texts, 16, str(tmp_path / "tokenizer.json"))
    np.testing.assert_array_equal(found, expected)


def test_positions_are_interpolated_as_open_clip_does():
    from types import SimpleNamespace

    from open_clip.model import resize_pos_embed

    positions = np.random.default_rng(0).normal(size=(1 + 14**2, 8)).astype(np.float32)
    for grid in (7, 16):
        state = {"visual.positional_embedding": torch.from_numpy(positions)}
        like = SimpleNamespace(visual=SimpleNamespace(grid_size=(grid, grid)))
        resize_pos_embed(state, like)
        expected = state["visual.positional_embedding"].numpy()
        ours = interpolate_positions(positions, 1 + grid**2)
        np.testing.assert_allclose(ours, expected, atol=2e-5)


def test_names_of_open_clip_are_its_own():
    from open_clip.pretrained import get_pretrained_cfg

    for architecture, tags in hub.OPEN_CLIP.items():
        for tag, repository in tags.items():
            theirs = get_pretrained_cfg(architecture, tag)
            assert theirs["hf_hub"].strip("/") == repository, (architecture, tag)
            squashed = tag in ("dfn5b", "webli")  # as the files in these repositories say
            assert theirs["resize_mode"] == ("squash" if squashed else "shortest")


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_image_processors_that_we_write_prepare_as_we_do(tmp_path, kind):
    """A CLIP crops and a SigLIP squashes; transformers reads both from the file next to the weights."""
    cfg = siglip() if kind == "siglip" else clip.config(small_config(), **PLAIN)
    interop.save(
        tmp_path, nnx.merge(*random_model(cfg)), "siglip" if kind == "siglip" else "huggingface"
    )
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    picture = np.zeros((60, 90, 3), np.uint8)
    picture[:, :30], picture[20:40] = (250, 60, 10), (20, 220, 90)
    theirs = processor(picture, return_tensors="np")["pixel_values"][0].transpose(1, 2, 0)
    loaded = interop.load(tmp_path).cfg
    ours = inference.pixels(picture, 32, data.Fitting.of(loaded.vision)) / 255
    mean, std = processor.image_mean, processor.image_std
    np.testing.assert_allclose(theirs, (ours - mean) / std, rtol=0, atol=0.02)
