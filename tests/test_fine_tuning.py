"""Runs that start from the weights of another run or of files in other libraries' layouts."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import thinning
from clip_oracle import random_model
from flax import nnx
from micro_run import (
    ENVIRONMENT,
    ROOT,
    UNDIAGNOSED,
    assert_same_bits,
    batch_of,
    command_of,
    final_state,
    init_and_step,
    make_init,
    paths,
    products_of,
)
from safetensors.numpy import save_file

from swjax import inference, interop
from swjax.models import clip, sharding
from swjax.tools import plan
from swjax.training import config as config_lib
from swjax.training import setup
from swjax.training.config import ConfigError
from swjax.training.state import restore
from swjax.training.state.initialization import (
    first_parameters,
    interpolate_positions,
    model_of_run,
)
from swjax.training.state.model_of_weights import settle_model
from swjax.training.state.restore import first_state


def shapes(init):
    return sharding.abstract_state(jax.eval_shape(init), sharding.make_mesh())


def refusal(config) -> str:
    """Returns why the weights that a run would start from are refused; initializes no parameters."""
    cfg, like = setup.model_config(config), shapes(make_init(config)[0])
    with pytest.raises(ConfigError) as error:
        first_parameters(config.checkpoint.init_from, cfg, like["params"])
    assert "\n" not in str(error.value) and "checkpoint.init_from" in str(error.value)
    return str(error.value)


def start(config):
    """Returns the initial parameters of a run."""
    init, _ = make_init(config)
    return first_state(config, init, shapes(init))["params"]


def foreign(config, folder, layout="open_clip", **options):
    """Writes the weights of a model with other sizes to a file; returns its parameters."""
    cfg = clip.config(setup.model_config(config), **options)
    model = nnx.merge(*random_model(cfg))
    interop.save(folder, model, layout)
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


@pytest.mark.parametrize("layout", thinning.first(["huggingface", "open_clip"]))
def test_weights_of_others_are_the_first_parameters(micro, tmp_path, layout):
    theirs = foreign(micro(), tmp_path, layout)
    assert_same_bits(start(micro(checkpoint__init_from=str(tmp_path))), theirs)


@pytest.mark.release
def test_average_starts_from_the_weights_too(micro, tmp_path):
    theirs = foreign(micro(), tmp_path)
    config = micro(checkpoint__init_from=str(tmp_path), train__ema_decay=0.9)
    init, _ = make_init(config)
    assert_same_bits(first_state(config, init, shapes(init))["ema"], theirs)


def test_a_logit_scale_beyond_the_limit_is_said(micro, caplog):
    """It was 112.33 in SigLIP's weights and 100 after a step, frozen or not, without a word."""
    params = {"logit_scale": jnp.log(112.33), "logit_bias": jnp.float32(-10)}
    restore._say_limit(micro(train__loss="sigmoid"), params, params)
    restore._say_limit(micro(), params, params | {"logit_scale": None})
    assert not caplog.records
    restore._say_limit(micro(checkpoint__init_from="siglip"), params, params)
    assert "init_from siglip: the logit scale 112.33 becomes 100, a limit of the" in caplog.text


@pytest.mark.release
def test_a_file_without_a_config_is_described_by_the_run(micro, tmp_path, caplog):
    theirs = foreign(micro(), tmp_path)
    (tmp_path / "open_clip_config.json").unlink()
    assert_same_bits(start(micro(checkpoint__init_from=str(tmp_path))), theirs)
    (record,) = caplog.records
    assert "have no config, so config.model.gelu='tanh' is assumed" in record.getMessage()


@pytest.mark.release
def test_what_differs_is_adapted_and_said_in_one_line_each(micro, tmp_path, caplog):
    """Each difference (image size, context length, embedding size, loss) is logged on one line."""
    theirs = foreign(micro(), tmp_path)
    config = micro(
        checkpoint__init_from=str(tmp_path),
        data__image_size=32,
        data__context_length=6,
        model__embed_dim=24,
        train__loss="sigmoid",
    )
    params, new = start(config), start(micro(data__image_size=32, model__embed_dim=24))
    expected = interpolate_positions(np.asarray(theirs["vision"]["position_embedding"]), 17)
    np.testing.assert_array_equal(params["vision"]["position_embedding"], expected)
    text = theirs["text"]["position_embedding"]
    np.testing.assert_array_equal(params["text"]["position_embedding"], text[:6])
    assert_same_bits(params["vision"]["blocks"], theirs["vision"]["blocks"])
    assert_same_bits(params["vision"]["projection"], new["vision"]["projection"])
    assert float(params["logit_bias"]) == -10
    said = [record.getMessage().partition(": ")[2] for record in caplog.records]
    assert said == [
        "logit_bias [] is newly initialized: the weights have no such parameter",
        "text/position_embedding: the first 6 positions are kept: [8, 32] in the weights, [6, 32] here",
        "text/projection/kernel is newly initialized: [32, 16] in the weights, [32, 24] here",
        "vision/position_embedding is interpolated: [5, 32] in the weights, [17, 32] here",
        "vision/projection/kernel is newly initialized: [32, 16] in the weights, [32, 24] here",
    ]
    caplog.clear()
    longer = start(micro(checkpoint__init_from=str(tmp_path), data__context_length=12))
    np.testing.assert_array_equal(longer["text"]["position_embedding"][:8], text)
    assert "the first 8 positions are kept and 4 are new" in caplog.text


def test_a_run_without_a_key_of_its_config_is_one_line(micro, tmp_path):
    saved = json.loads(config_lib.to_json(micro()))
    del saved["model"]["architecture"]
    (tmp_path / "config.json").write_text(json.dumps(saved))
    with pytest.raises(ConfigError, match="config.json without .* 'architecture': train it again"):
        model_of_run(str(tmp_path))


def test_positions_of_the_same_grid_stay():
    positions = np.random.default_rng(0).normal(size=(10, 4)).astype(np.float32)
    np.testing.assert_allclose(interpolate_positions(positions, 10), positions, atol=1e-6)
    flat = np.tile(positions[:1], (10, 1))
    np.testing.assert_allclose(
        interpolate_positions(flat, 26), np.tile(flat[:1], (26, 1)), rtol=1e-5
    )


OTHERS = {
    "another activation": ({"gelu": "quick"}, {}, "is 'quick' in the weights and 'tanh' here: set config"),
    "other heads": ({"vision": {"heads": 4}}, {}, "heads is 4 in the weights and 2 here: set config.model."),
    "another width": ({"text": {"width": 48}}, {}, "text.width is 48 in the weights and 32 here"),
    "another patch": ({"vision": {"patch_size": 4}}, {}, "vision.patch_size is 4 in the weights and 8 here"),
    "another vocabulary": (
        {"text": {"vocab_size": 50}},
        {},
        "its tokenizer has 50 tokens, and that of this run 49408: set config.model.text.vocab_size=50",
    ),
    "layer scale here": ({}, {"model__layer_scale": "true"}, "set config.model.layer_scale=False"),
    "layer scale there": ({"layer_scale": 0.5}, {}, "set config.model.layer_scale=True"),
}  # fmt: skip


@pytest.mark.parametrize(
    "theirs, ours, message", thinning.first(list(OTHERS.values()), 2), ids=OTHERS
)
def test_weights_of_another_architecture_are_one_line(micro, tmp_path, theirs, ours, message):
    foreign(micro(), tmp_path, **theirs)
    assert message in refusal(micro(checkpoint__init_from=str(tmp_path), **ours))


def test_no_weights_are_one_line(micro, tmp_path):
    for address in (tmp_path, tmp_path / "absent"):
        told = refusal(micro(checkpoint__init_from=str(address)))
        assert "no checkpoint and no weights: give a run" in told


def test_a_file_for_inference_is_one_line(micro, tmp_path):
    config, file = micro(), tmp_path / "clip.safetensors"
    inference.save(file, inference.Encoder(nnx.merge(*random_model(setup.model_config(config)))))
    told = refusal(micro(checkpoint__init_from=str(file)))
    assert "was saved by swjax" in told and "such as a run's workdir" in told


@pytest.mark.parametrize(
    "recipe, pattern", [("standard", "^vision/"), ("switchback", "^vision/blocks/mlp/")]
)
@pytest.mark.release
def test_frozen_layers_have_no_moments_and_no_weight_gradients(micro, recipe, pattern):
    """A frozen kernel has no optimizer state, and the compiled step computes no gradient of its shape."""
    sizes = {"model__vision__width": 56, "model__recipe": recipe} | UNDIAGNOSED
    kernels = {"[56,224]", "[224,56]", "[1,56,224]", "[1,224,56]"}  # of the image tower's MLP
    assert kernels & products_of(micro(**sizes))
    config = micro(**sizes, optimizer__freeze=pattern)
    assert not kernels & products_of(config)
    moments = paths(jax.eval_shape(make_init(config)[0])["opt_state"])
    assert not any(re.search(pattern[1:], path) for path in moments)


def test_all_differences_are_named_at_once_and_plan_names_them_too(micro, tmp_path, reference):
    """Each start named one differing key, and --plan accepted the weights."""
    foreign(micro(), tmp_path, gelu="quick", vision={"heads": 4}, text={"layers": 2})
    wide = {"model__vision__width": 64, "model__gelu": "exact"}
    for config, keys in (
        (
            micro(checkpoint__init_from=str(tmp_path)),
            ("gelu=quick", "vision.heads=4", "text.layers=2"),
        ),
        (micro(checkpoint__init_from=str(reference[1]), **wide), ("gelu=tanh", "vision.width=32")),
    ):
        told = refusal(config)
        assert all(f"set config.model.{key}" in told for key in keys)
        with pytest.raises(ConfigError) as error:
            plan.show(config, "")
        assert str(error.value) == told


def settled(*settings, folder="none"):
    """Returns the config of configs/finetune.py with the model of the weights."""
    config = config_lib.load(f"{ROOT}/configs/finetune.py", settings)
    return settle_model(config, Path(folder))


def test_the_model_comes_from_the_weights(tmp_path):
    """Also how pictures are prepared; the config of a run needs the weights no more."""
    options = {"gelu": "quick", "layer_scale": 0.5, "init_logit_bias": -10.0, "embed_dim": 24}
    vision = {
        "width": 48,
        "heads": 3,
        "mlp_ratio": 49 / 48,
        "image_size": 32,
        "resize_mode": "squash",
    }
    cfg = clip.config(
        "tiny", **options, vision=vision, text={"context_length": 9, "layers": 1, "width": 32}
    )
    interop.save(tmp_path / "weights", nnx.merge(*random_model(cfg)))
    weights = ("checkpoint.init_from", str(tmp_path / "weights"))
    config = settled(weights)
    model = setup.model_config(config)
    same = {
        "recipe": "switchback",
        "dtype": "bfloat16",
        "layer_scale": 0.0,
        "init_logit_scale": model.init_logit_scale,
    }
    assert model == clip.config(cfg, **same)
    assert (config.train.loss, config.model.name) == ("sigmoid", "weights")
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.json").write_text(config_lib.to_json(config))
    shutil.rmtree(tmp_path / "weights")
    assert setup.model_config(settled(weights, folder=run)) == model  # a run that resumes
    resumed = settled(("checkpoint.resume", str(run)), folder=tmp_path)
    with pytest.raises(ConfigError, match="checkpoint.init_from=.* holds no .* and no weights"):
        settled(weights)
    assert setup.model_config(resumed) == model
    by_hand = settled(weights, ("data.image_size", "64"), ("train.loss", "softmax"), folder=run)
    assert (by_hand.data.image_size, by_hand.train.loss) == (64, "softmax")


def test_keys_that_contradict_the_weights_are_named_at_once(micro, tmp_path):
    foreign(micro(), tmp_path)
    weights = ("checkpoint.init_from", str(tmp_path))
    assert settled(weights).model.vision.width == 32
    keys = {"model.vision.width": "64", "model.gelu": "quick", "model.text.heads": "4"}
    config = config_lib.load(f"{ROOT}/configs/finetune.py", [weights, *keys.items()])
    for refused in (lambda: settled(weights, *keys.items()), lambda: plan.show(config, "h200:1")):
        with pytest.raises(ConfigError) as error:
            refused()
        assert all(f"config.{key} is " in str(error.value) for key in keys)
        assert "\n" not in str(error.value) and str(error.value).count("in the weights") == 3
    for settings, message in (
        ((), "config.model.name='weights' needs weights: set config.checkpoint.init_from"),
        ((("checkpoint.init_from", str(tmp_path / "no")),), "holds no checkpoint and no weights"),
    ):
        with pytest.raises(ConfigError, match=message):
            settled(*settings)
    (tmp_path / "open_clip_config.json").unlink()
    with pytest.raises(ConfigError, match="has no config file that describes the .* set config"):
        settled(weights)
    with pytest.raises(ConfigError, match="model.gelu='', .* must be the value of weights"):
        setup.model_config(config_lib.load(f"{ROOT}/configs/finetune.py", [("model.name", "tiny")]))


def test_weights_of_a_named_size_have_its_name(tmp_path):
    (tmp_path / "open_clip_config.json").write_text(
        json.dumps(interop.configs.to_open_clip(clip.config("vit_b16")))
    )
    save_file({"visual.conv1.weight": np.zeros(1)}, tmp_path / "open_clip_model.safetensors")
    config = settled(("checkpoint.init_from", str(tmp_path)))
    assert (config.model.name, config.model.vision.patch_size) == ("vit_b16", 16)
    assert (config.data.image_size, config.data.context_length) == (224, 77)


SIGLIP = {"model__architecture": "siglip", "model__embed_dim": 0, "train__loss": "sigmoid"}
SIGLIP |= {"model__vision__resize_mode": "squash"}


@pytest.mark.parametrize("layout", ["siglip", "big_vision"])
@pytest.mark.release
def test_a_siglip_is_the_start_of_a_run(micro, tmp_path, layout, caplog):
    theirs = foreign(micro(**SIGLIP), tmp_path, layout)
    address = tmp_path / "model.npz" if layout == "big_vision" else tmp_path
    config = micro(**SIGLIP, checkpoint__init_from=str(address), data__image_size=24)
    params = start(config)
    assert_same_bits(params["vision"]["pool"], theirs["vision"]["pool"])
    assert_same_bits(params["text"], theirs["text"])
    assert "is interpolated: [4, 32] in the weights, [9, 32] here" in caplog.text
    told = refusal(micro(checkpoint__init_from=str(address)))
    assert "architecture is 'siglip' in the weights and 'clip' here" in told
    if layout == "siglip":  # a run takes the same steps from both
        init, step = init_and_step(config)
        state, metrics = step(init() | {"params": params}, batch_of(config))
        assert np.isfinite(metrics["train/loss"]) and int(state["step"]) == 1


@pytest.mark.release
def test_fine_tuning_from_the_command_to_the_scores(shared_cache, micro, tmp_path):
    """train.py tunes the text tower of weights that it finds by name, at another image size, and scores it.

    The run is resumed without the weights, whose model is in its config.json.
    """
    workdir, cache = (
        tmp_path / "run",
        tmp_path / "hub" / "models--own--weights" / "snapshots" / "main",
    )
    theirs = foreign(micro(), cache)
    command = command_of(
        workdir,
        **{"checkpoint.init_from": "own/weights", "data.image_size": 24, "model.name": "weights"},
        **{"optimizer.freeze": "^vision/", "train.compilation_cache": shared_cache},
        **{"train.loss": "", "data.context_length": 0, "model.gelu": "", "train.steps": 2},
        **UNDIAGNOSED,
    )
    own = re.compile(
        r"--config\.model\.(vision|text|embed_dim)"
    )  # the sizes are those of the weights
    command = [flag for flag in command if not own.match(flag)]
    environment = ENVIRONMENT | {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    options = {"capture_output": True, "text": True, "env": environment}
    done = subprocess.run(command, **options)
    assert done.returncode == 0, done.stderr
    assert (
        "vision/position_embedding is interpolated: [5, 32] in the weights, [10, 32] here"
        in done.stderr
    )
    scores = json.loads((workdir / "results.json").read_text())
    assert any("top1" in name for name in str(scores).split("'")), scores
    config = micro(data__image_size=24, optimizer__freeze="^vision/", **UNDIAGNOSED)
    params = final_state(config, workdir)[0]["params"]
    assert_same_bits(params["vision"]["blocks"], theirs["vision"]["blocks"])
    moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), params["text"], theirs["text"])
    assert all(jax.tree.leaves(moved))
    assert inference.load(workdir).cfg.vision.image_size == 24
    shutil.rmtree(tmp_path / "hub")
    (workdir / "results.json").unlink()  # as if it had been interrupted
    again = subprocess.run([*command, "--config.train.steps=3"], **options)
    assert again.returncode == 0, again.stderr
    assert final_state(config, workdir)[1]["batches"] == 3


@pytest.mark.release
def test_weights_at_an_address(micro, tmp_path):
    """A file or a folder at an fsspec address; one line if there are no weights."""
    fsspec = pytest.importorskip("fsspec")
    theirs = foreign(micro(), tmp_path)
    memory = fsspec.filesystem("memory")
    memory.put(f"{tmp_path}/", "/weights/", recursive=True)
    for address in (
        "memory://weights",
        "memory://weights/open_clip_model.safetensors",
        f"file://{tmp_path}",
    ):
        assert_same_bits(start(micro(checkpoint__init_from=address)), theirs)
    memory.touch("/empty/notes.txt")
    for address, message in (
        ("memory://empty", "holds no weights"),
        ("memory://absent", "cannot be read: FileNotFoundError"),
        ("gopher://weights", "checkpoint.init_from"),
        ("ftp://bob:PASSWORD@localhost:1/w", "cannot read ftp://***@localhost:1/w: Connection"),
    ):
        assert message in refusal(micro(checkpoint__init_from=address))


@pytest.mark.parametrize("key", ["workdir", "config.data.dir", "config.checkpoint.resume"])
def test_what_cannot_be_remote_is_one_line(tmp_path, monkeypatch, key):
    monkeypatch.chdir(tmp_path)
    flags = [f"--config={ROOT}/configs/openmoji.py", "--workdir=w", f"--{key}=gs://bucket/run"]
    with pytest.raises(ConfigError, match="must be local, because a run locks .* mount gs://"):
        config_lib.validate(config_lib.parse(["train.py", *flags])[0], batch_shards=1)
    assert not list(tmp_path.iterdir())
