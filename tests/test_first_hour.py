"""The pages of a newcomer: an installed wheel runs their commands as printed, away from the checkout.

Only `swjax train` gets more flags, for a small model and few steps. Weights are random, pictures and sets are
small, in the forms that the pages name.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap

import pytest
from clip_oracle import write_weights
from micro_run import ENVIRONMENT, MICRO, ROOT
from photographs import jpeg, photograph, write_coco, write_tars, write_tfds
from test_hub import OPEN_CLIP, store
from test_packaging import dists, wheel  # noqa: F401  fixtures
from test_packaging import run as run_python
from test_printed_commands import lines

from swjax import inference

pytestmark = pytest.mark.release
SIZES = {key: value for key, value in MICRO.items() if key.startswith(("model.", "schedule."))}
SIZES |= {"data.image_size": 16, "data.context_length": 8, "train.steps": 4, "eval.every_steps": 0}


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):  # noqa: F811
    folder = tmp_path_factory.mktemp("site")
    options = ("--quiet", "--no-deps", "--no-index", "--target", folder)
    run_python("-m", "pip", "install", *options, wheel, cwd=folder)
    return folder


@pytest.fixture
def swjax(installed, tmp_path, shared_cache):
    """A function that runs a command `swjax ...` in `tmp_path` and returns what it prints."""
    paths = {"PYTHONPATH": str(installed), "HF_HUB_CACHE": str(tmp_path / "hub")}
    environment = ENVIRONMENT | paths | {"HF_HUB_OFFLINE": "1", "JAX_PLATFORMS": "cpu"}

    def run(words, **keys):
        keys = {"train.compilation_cache": shared_cache, **keys} if words[1] == "train" else {}
        flags = [f"--config.{key}={value}" for key, value in keys.items()]
        command = [sys.executable, "-m", *words, *flags]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    return run


def commands(page: str) -> list[list[str]]:
    """Returns the commands `swjax ...` of a page, in their order; names of commands are left out."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    found = [shlex.split(line, comments=True) for line in in_order(text) if line[:6] == "swjax "]
    return [words for words in found if len(words) > 2]


def in_order(text: str) -> list[str]:
    """Returns the lines of shell blocks and inline code, in the order of the page."""
    parts = re.split(r"^(?= *```)", text, flags=re.MULTILINE)  # blocks, and what follows them
    return [line for part in whole_blocks(parts) for line in lines(part)]


def whole_blocks(parts: list[str]) -> list[str]:
    """Joins the opening and the closing fence of each block."""
    return [parts[0], *("".join(pair) for pair in zip(parts[1::2], parts[2::2]))]


def test_own_pictures(swjax, tmp_path):
    page = (ROOT / "docs" / "own_pictures.md").read_text()
    table = textwrap.dedent(re.search(r" *```csv\n(.*?) *```", page, re.DOTALL)[1])
    (tmp_path / "pictures.csv").write_text(table)
    for number, path in enumerate(re.findall(r"^pictures/\S+\.jpg", table, re.MULTILINE)):
        for name in (path, f"labelled/{os.path.basename(path)[:-4]}/1.jpg"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(jpeg(number))
    check, train, classify, evaluate, search = commands("own_pictures")
    assert "4 read, 0 bad" in swjax(check)
    printed = swjax(train, **SIZES)
    assert "val/image_to_text_R@1" in printed and "report: runs/own/report/index.html" in printed
    report = (tmp_path / "runs" / "own" / "report" / "index.html").read_text()
    assert "Captions and their nearest images" in report and "data:image/jpeg;base64," in report
    assert len(swjax(classify).splitlines()) == 3
    assert "zeroshot/labelled_top1" in json.loads(swjax(evaluate))
    swjax(search)
    assert "fox.jpg" in (tmp_path / "search.html").read_text()


def test_fine_tuning(swjax, tmp_path):
    """500 pictures, and weights in Hugging Face's cache under open_clip's name."""
    write_tars(tmp_path / "pairs", [*[40] * 10, 100])
    for path in (tmp_path / "pairs").iterdir():
        path.rename(path.with_name(path.name[2:]))
    write_weights(tmp_path / "made")
    store(tmp_path / "hub", OPEN_CLIP, tmp_path / "made")
    shutil.rmtree(tmp_path / "made")
    train, adapt, export = commands("fine_tuning")
    keys = {"train.steps": 6, "train.batch_size": 64, "model.dtype": "float32"}
    assert "val/text_to_image_R@10" in swjax(train, **keys)
    results = (tmp_path / "runs" / "tuned" / "results.json").read_text()
    assert "val/image_to_text_R@1" in results and '"step": 6' in results
    swjax(adapt, **keys)
    assert "open_clip.create_model('local-dir:exported')" in swjax(export)
    tuned, merged = (inference.load(tmp_path / name) for name in ("runs/lora", "exported"))
    assert tuned.cfg.lora.rank == 16 and merged.cfg.lora is None


def test_evaluation(swjax, tmp_path):
    import tensorflow_datasets as tfds

    for number in range(40):
        split = "val" if number < 8 else "train"
        folder = tmp_path / "pets" / split / f"pet {number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        photograph(number).save(folder / f"{number}.png")
    names = [f"n{number:08d}" for number in range(1000)]
    features = {"image": tfds.features.Image(), "label": tfds.features.ClassLabel(names=names)}
    examples = [{"image": jpeg(n), "label": 500 * n} for n in range(2)]
    write_tfds(tmp_path / "data", "imagenet2012", "validation", features, examples)
    write_coco(tmp_path / "data", "test")
    train, evaluate, of_weights, probe, coco = commands("evaluation")
    small = {"data.synthetic.examples": 40, "train.batch_size": 8}
    printed = swjax(train, **SIZES | small)
    assert "zeroshot/imagenet2012_top1" in printed and "zeroshot/pets_top1" in printed
    scores = json.loads(swjax(evaluate))
    assert {"zeroshot/imagenet2012_top5", "zeroshot/pets_chance_top1"} <= set(scores)
    weights = inference.load(tmp_path / "runs" / "b32", prequantize=True)
    inference.save(tmp_path / "clip.safetensors", weights)
    assert "zeroshot/pets_top1" in json.loads(swjax(of_weights))
    assert "top1" in swjax(probe)
    assert "test/image_to_text_R@1" in json.loads(swjax(coco))
