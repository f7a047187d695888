"""Every command that a page or a config prints, run as far as possible without GPU and data.

Flags parse, configs build, and data sources open small files of the named format. The mesh and the batch fit
the devices that the command's comment names, and so does the memory. Scripts accept their flags; targets of
make and extras of pip exist.
"""

import argparse
import importlib.util
import re
import runpy
import shlex
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from clip_oracle import write_weights
from ml_collections import ConfigDict
from photographs import jpeg, write_coco, write_tars

import train
from swjax.data import files
from swjax.tools import plan
from swjax.training import config as config_lib
from swjax.training import inputs

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = ("python", "make", "pip", "srun", "mpirun", "swjax")
# A program without argparse: it ends with an error because the run or file does not exist.
EVALUATE = ("-m", "swjax", "evaluate")
HARDWARE = re.compile(r"# (one|\d+) (H100|H200)\s*$")
KINDS = {"H100": "h100", "H200": "h200"}
COUNTED = re.compile(r"\{(\d+)\.\.\d+\}")


class Printed(NamedTuple):
    """A command of a page.

    Attributes:
      page: its path in the repository.
      words: the command without environment variables and launchers such as srun.
      hardware: named by its comment, in the form of `--plan`, such as "h200:8"; "": none.
    """

    page: str
    words: tuple[str, ...]
    hardware: str

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.words)}"


def commands() -> list[Printed]:
    found = {}
    for page in PAGES:
        for line in lines(page.read_text()):
            for command in parse(str(page.relative_to(ROOT)), line):
                found.setdefault((command.words, command.hardware), command)
    return list(found.values())


def lines(text: str) -> list[str]:
    """Returns the lines of shell blocks, with continued lines joined, and of inline code."""
    fence = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
    blocks = [
        textwrap.dedent(block)
        for _, language, block in fence.findall(text)
        if language in ("", "bash", "console")
    ]
    inline = [code.replace("\n", " ") for code in re.findall(r"`([^`]+)`", fence.sub("", text))]
    return re.sub(r"\\\n\s*", " ", "\n".join(map(unrolled, blocks))).splitlines() + inline


def unrolled(block: str) -> str:
    """Replaces the variable of a shell loop by its first value."""
    for name, value in re.findall(r"^for (\w+) in (\S+)", block, re.MULTILINE):
        block = block.replace(f"${name}", value)
    return block


def parse(page: str, line: str) -> Iterator[Printed]:
    named = HARDWARE.search(line)
    hardware = f"{KINDS[named[2]]}:{named[1].replace('one', '1')}" if named else ""
    if "..." in COUNTED.sub("", line).split("#")[0] or "$" in line:
        return  # a placeholder, not a command
    try:
        all_words = shlex.split(line, comments=True)
    except ValueError:
        return
    while all_words:
        end = all_words.index("&&") if "&&" in all_words else len(all_words)
        words, all_words = all_words[:end], all_words[end + 1 :]
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        if words[:1] in (["srun"], ["mpirun"]) and "python" in words:
            words = words[words.index("python") :]
        if words[:2] == ["swjax", "train"]:
            words = ["python", "train.py", *words[2:]]
        if words and re.match(r"--config\.[a-z].*=", words[0]):  # keys to add to a command
            words = ["python", "train.py", "--config=configs/common.py", "--workdir=r", *words]
        if words[:1] == ["swjax"]:
            words = ["python", "-m", *words]
        if len(words) > 1 and Path(words[0]).name in PROGRAMS:
            yield Printed(page, (Path(words[0]).name, *words[1:]), hardware)


COMMANDS = commands()


def of(*start: str) -> list:
    return [
        pytest.param(command, id=str(command))
        for command in COMMANDS
        if command.words[: len(start)] == start
    ]


def test_pages_print_commands_of_every_kind():
    assert len(COMMANDS) > 60
    assert of("python", "train.py") and of("python", "-m") and of("make") and of("pip")


@pytest.mark.parametrize("command", of("python", "train.py"))
def test_train(command, tmp_path, monkeypatch, capsys):
    flags = list(command.words[2:])
    monkeypatch.chdir(ROOT)
    if {"--help", "--plan"} & set(flags):
        assert train.main(["train.py", *flags]) == 0
        return
    # Two files replace any number of tars.
    flags = [
        COUNTED.sub(lambda found: f"{{{found[1]}..{_next(found[1])}}}", flag) for flag in flags
    ]
    config, _ = config_lib.parse(["train.py", *flags])
    config_lib.validate(config, batch_shards=1)
    assert command.hardware or config.model.name == "tiny", "name the hardware: # 8 H100"
    monkeypatch.chdir(tmp_path)
    with config.unlocked():
        config.data.dir = str(tmp_path / "data")
    write_stand_ins(config)
    if command.hardware:
        plan.check(plan.make(config, plan.Hardware.parse(command.hardware)))
    elif config.data.name not in ("emoji", "icons"):  # prepared in other tests
        assert len(inputs.open_source(config, "train")) > 0
    if (config.eval.data or config.data.name) in ("webdataset", "table", "tfds"):
        val = inputs.open_source(config, "val")
        assert val is None or val[0]["captions"]


def write_stand_ins(config: ConfigDict) -> None:
    """Writes small data sets to the config's paths, relative to the working directory."""
    if config.checkpoint.init_from:
        write_weights(Path(config.checkpoint.init_from))
    c = config.data
    paths = [path for split in c.webdataset.splits.values() for path in files.expand(split or "{}")]
    for number, path in enumerate(filter(None, paths)):
        made = Path(f"made-{number}")
        write_tars(made, [4])
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        (made / "00000.tar").rename(path)
    for path in filter(None, c.table.splits.values()):
        Path("picture.jpg").write_bytes(jpeg(0))
        Path(path).write_text(
            "image,caption\npicture.jpg,a picture\n" + 3 * "picture.jpg,another\n"
        )
    if c.tfds.builder:
        assert c.tfds.builder == "coco_captions"
        write_coco(Path(c.dir), c.tfds.splits.val)
        c.tfds.splits.test = ""  # COCO has one, the stand-in has not


def _next(number: str) -> str:
    """Returns the next number with as many digits."""
    return f"{int(number) + 1:0{len(number)}d}"


@pytest.mark.parametrize("flags", [(), ("model.recipe=standard", "model.remat=full")], ids=str)
@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs").glob("vit*.py")), ids=lambda path: path.stem
)
def test_a_config_fits_the_hardware_that_it_names(path, flags):
    """Also in bf16, as its docstring says."""
    devices, gigabytes = re.search(r"(\d+) GPUs of (\d+) GB", path.read_text()).groups()
    kind = {"40": "a100-40", "80": "h100"}[gigabytes]
    flags = [f"--config.{flag}" for flag in flags]
    config, _ = config_lib.parse(["train.py", f"--config={path}", "--workdir=r", *flags])
    plan.check(plan.make(config, plan.Hardware.parse(f"{kind}:{devices}")))


class Parsed(Exception):
    """Raised after the flags of a script were parsed."""


@pytest.mark.parametrize(
    "command", [c for c in of("python") if c.values[0].words[1] not in ("train.py", "-c")]
)
@pytest.mark.filterwarnings("ignore:.* found in sys.modules")  # imported by another test
def test_scripts_accept_their_flags(command, monkeypatch, capsys):
    """Runs each script until it has parsed its flags."""
    words = [word for word in command.words[1:] if word != "-P"]
    real = argparse.ArgumentParser.parse_known_args

    def parse(self, *args, **kwargs):
        real(self, *args, **kwargs)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse)
    monkeypatch.chdir(ROOT)
    module = words[0] == "-m"
    name, flags = (words[1], words[2:]) if module else (words[0], words[1:])
    if name == "pip":
        return check_extras(flags)
    if not flags:  # without flags: checks only that it exists
        found = importlib.util.find_spec(name) if module else (ROOT / name).exists()
        assert found, f"there is no {name}"
        return None
    path = name if module else str(ROOT / name)
    monkeypatch.setattr(sys, "argv", [path, *(flag.replace("RATE", "921") for flag in flags)])
    monkeypatch.syspath_prepend(str(ROOT if module else (ROOT / name).parent))
    run = runpy.run_module if module else runpy.run_path
    if command.words[1:4] == EVALUATE:
        with pytest.raises(SystemExit):
            run(path, run_name="__main__", alter_sys=True)
        assert "unexpected argument" not in capsys.readouterr().err
        return None
    with pytest.raises(Parsed):
        run(path, run_name="__main__")


@pytest.mark.parametrize("command", of("make"))
def test_make_knows_its_targets(command):
    words = [word for word in command.words[1:] if not word.startswith("ARGS")]
    done = subprocess.run(
        ["make", "--dry-run", *words], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", of("pip"))
def test_extras_exist(command):
    check_extras(command.words[1:])


def check_extras(words) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(project["optional-dependencies"])
    for word in words:
        named = re.fullmatch(r"(\.|swjax)\[([\w,]+)\]", word)
        assert not named or set(named[2].split(",")) <= extras, f"an extra of {word} does not exist"


@pytest.mark.parametrize(
    "line, message",
    [
        ("--config.train.accumulation=4  # one H200", "4,096 pairs per device need"),
        ("--config.train.accumulation=4", "name the hardware"),
        ("--config.mesh.fsdp=16  # 8 H100", "config.mesh"),
        ("--config.train.batch_size=1000  # 64 H100", "config.train.batch_size"),
    ],
)
def test_what_does_not_fit_is_found(line, message, tmp_path, monkeypatch):
    (command,) = parse("page", f"python train.py --config=configs/vith_int8.py --workdir=r {line}")
    with pytest.raises((AssertionError, config_lib.ConfigError), match=message):
        test_train(command, tmp_path, monkeypatch, None)
