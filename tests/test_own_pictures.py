"""docs/own_pictures.md: its table and flags train a smaller model, and `swjax classify` reads the run."""

import re
import shlex
import textwrap

import pytest
from micro_run import MICRO, ROOT, train
from photographs import jpeg

from swjax.inference.classify import main as classify
from swjax.training import config as config_lib

SIZES = ("model.", "schedule.", "log.", "report.", "data.image_size", "data.context_length")


@pytest.mark.release
def test_the_commands_of_the_page(tmp_path, shared_cache, monkeypatch, capsys):
    page = (ROOT / "docs" / "own_pictures.md").read_text()
    table, command = (
        textwrap.dedent(re.search(rf" *```{kind}\n(.*?) *```", page, re.DOTALL)[1])
        for kind in ("csv", "bash")
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures.csv").write_text(table)
    for number, path in enumerate(re.findall(r"^pictures/\S+\.jpg", table, re.MULTILINE)):
        (tmp_path / path).write_bytes(jpeg(number))
    argv = shlex.split(command.replace("\\\n", " "))[1:]
    argv[1] = f"--config={ROOT}/configs/openmoji.py"
    small = {key: value for key, value in MICRO.items() if key.startswith(SIZES)}
    small |= {"train.steps": 2, "train.compilation_cache": shared_cache, "report.enabled": True}
    config, workdir = config_lib.parse(argv + [f"--config.{k}={v}" for k, v in small.items()])
    workdir.parent.mkdir()
    assert train(config, workdir) == 0
    capsys.readouterr()
    assert classify([str(workdir), "pictures/fox.jpg", "fox", "owl", "toad"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    page = (workdir / "report" / "index.html").read_text()
    assert "Captions and their nearest images" in page and "data:image/jpeg;base64," in page
