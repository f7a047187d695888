"""`compare_precision`: errors appear only where a recipe rounds; the page; one line for each mistake."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from micro_run import MICRO, ROOT

from swjax.models import clip
from swjax.report import precision
from swjax.tools import compare_precision, layer_errors
from swjax.training import config as config_lib
from swjax.training.setup import model_config

FLAGS = [f"--config={ROOT}/configs/openmoji.py", *(f"--config.{k}={v}" for k, v in MICRO.items())]


SMALL = {
    "recipe": "standard",
    "vision": {"width": 16, "layers": 2, "heads": 2, "image_size": 16, "patch_size": 8},
    "text": {"width": 16, "layers": 1, "heads": 2, "context_length": 4},
}


@pytest.mark.release
def test_probes_see_outputs_and_their_gradients():
    cfg = clip.config("tiny", **SMALL)
    graphdef, params = layer_errors.probed(cfg, 3, seed=0)
    images = jax.random.normal(jax.random.key(0), (3, 16, 16, 3))

    def loss(params):
        embedding, _ = nnx.merge(graphdef, params).encode_image(images)
        return jnp.sum(embedding[:, 0])

    grads = jax.jit(jax.grad(loss))(params)
    mlp = grads["vision"]["blocks"]["mlp"]
    kernel = params["vision"]["blocks"]["mlp"]["fc2"]
    output, gradient = mlp["fc2"]["probe"][1]  # block 1, the second
    hidden, _ = mlp["fc1"]["probe"][1]
    by_hand = (
        jax.nn.gelu(hidden, approximate=False) @ kernel["kernel"][1] + kernel["bias"][1][None, None]
    )
    np.testing.assert_allclose(output, by_hand, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        jnp.sum(gradient, (0, 1)), mlp["fc2"]["bias"][1], rtol=1e-4, atol=1e-6
    )


def test_probes_fit_a_siglip():
    """It has no class token."""
    cfg = clip.config("tiny", architecture="siglip", embed_dim=16, **SMALL)
    graphdef, params = layer_errors.probed(cfg, 3, seed=0)

    def loss(params):
        return jnp.sum(nnx.merge(graphdef, params).encode_image(jnp.ones((3, 16, 16, 3)))[0])

    probe = jax.eval_shape(jax.grad(loss), params)["vision"]["blocks"]["mlp"]["fc2"]["probe"]
    assert probe.shape == (2, 2, 3, 4, 16)


@pytest.mark.release
def test_layers_training_and_page(tmp_path, capsys):
    """Compares one arm only, without quantization: compilation dominates the time."""
    command = ["compare_precision", *FLAGS, f"--workdir={tmp_path}", "--arms", "standard:float16"]
    command += ["--config.optimizer.loss_scale=256"]
    sizes = ["--steps=2", "--seeds=2", "--batch-size=8", "--examples=4"]
    assert compare_precision.main([*command, *sizes]) == 0
    result = json.loads((tmp_path / "compare_precision.json").read_text())
    (arm,) = result["layers"]
    for kind in precision.KINDS:
        assert 1e-5 < precision.middle(result, arm, kind) < 3e-2, kind
    assert len([name for name in result["layers"][arm] if name.startswith("output/")]) == 12
    assert len(result["losses"][arm]) == 2
    assert np.isfinite(precision.gap(result, arm)) and np.ptp(result["seeds"]) > 0
    page = (tmp_path / "compare_precision.html").read_text()
    assert page.count("<section") == 5 and 'src="data:image/png' in page
    assert not re.search(r"\$\w+", page.partition("</style>")[2])
    assert {path.suffix for path in tmp_path.iterdir()} == {".html", ".json"}
    assert "standard:float16: median relative error" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags, hint",
    [
        (["--arms", "switchbak:float32"], "'switchback'"),
        (["--arms", "switchback:float33"], "'float32'"),
        (["--seeds=0"], "at least 1"),
        (["--arms", "standard:float32"], "compares the reference with itself"),
        (["--arms", "standard"], "compares the reference with itself"),
        (["--examples=20", "--batch-size=8"], "at most the 8 pairs"),
        (["--config.optimizer.lora.rank=4"], "no float32 reference: set it to 0"),
        (["--config.data.name=folders", "--config.data.on_bad=stop"], "config.data: cannot read "),
    ],
)
def test_mistakes_are_one_line(flags, hint, tmp_path, capsys):
    (tmp_path / "cat").mkdir()
    for number in range(8):
        (tmp_path / "cat" / f"{number}.png").write_bytes(b"no picture")
    data = f"--config.data.folders.splits.train={tmp_path}"
    sizes = ["--batch-size=8", f"--workdir={tmp_path}", data]
    assert compare_precision.main(["_", *FLAGS, *sizes, *flags]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and hint in error


def test_what_is_not_finite_is_not_passed_over():
    errors = {"output/a": [0.1, 0.2], "gradient/b": [0.3, float("nan")], "weight/c": [0.5]}
    curve = [2.0, 1.0]
    losses = {"arm": curve, "bad": [2.0, float("nan")]}
    result = {"layers": {"arm": errors}, "losses": losses, "reference": "fp32", "seeds": [curve]}
    assert list(precision.summary(result)) == [
        "arm: median relative error output 15.00%, gradient nan%, weight 50.00%; largest nan%, gradient/b",
        "arm: loss +0.0000 from the reference",
        "bad: loss +nan from the reference; bad is not finite at step 2",
    ]


def test_arms_have_one_name():
    """Without a dtype an arm has that of the config, so no arm is compared with itself."""
    config = config_lib.load(str(ROOT / "configs" / "openmoji.py"), [])
    names = [
        compare_precision.of_arm(config, arm)[0] for arm in ("standard", "switchback:bfloat16")
    ]
    assert names == [compare_precision.REFERENCE, "switchback:bfloat16"]


def test_a_comparison_has_no_profile():
    """Its 20 steps may end before the steps that the config traces."""
    config = config_lib.load(FLAGS[0].partition("=")[2], [("train.profile_steps", "100,105")])
    prepared = compare_precision.prepare(config, compare_precision.parser().parse_args([]))
    assert prepared.train.steps == 20 and not prepared.train.profile_steps


@pytest.mark.release
def test_layers_start_from_the_weights_of_the_config(reference):
    config, workdir = reference
    cfg = model_config(config)
    _, params = layer_errors.probed(cfg, 2, seed=0, init_from=str(workdir))
    _, other = layer_errors.probed(cfg, 2, seed=0)
    _, again = layer_errors.probed(cfg, 2, seed=1, init_from=str(workdir))
    first, second, third = (
        p["vision"]["blocks"]["mlp"]["fc1"]["kernel"] for p in (params, other, again)
    )
    assert np.array_equal(first, third) and not np.array_equal(first, second)


def test_a_workdir_that_is_a_file_is_told_before_the_work(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert compare_precision.main(["_", *FLAGS, f"--workdir={tmp_path}/file"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("swjax compare: ") and error.count("\n") == 1
    assert "give a directory, not a file" in error


def test_results_that_cannot_be_written_are_one_line(tmp_path, capsys, monkeypatch):
    """The summary is printed all the same."""
    (tmp_path / "compare_precision.json").mkdir()
    monkeypatch.setattr(compare_precision, "compare", lambda *_: {"layers": {}, "losses": {}})
    monkeypatch.setattr("swjax.report.precision.summary", lambda _: ["the summary"])
    assert compare_precision.main(["_", *FLAGS, f"--workdir={tmp_path}"]) == 2
    out, error = capsys.readouterr()
    assert out == "the summary\n"
    assert error.startswith("swjax compare: ") and error.count("\n") == 1
