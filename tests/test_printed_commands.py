"""Every command that a page prints, run as far as a machine without GPU and data can.

Flags parse, configs build, data sources open on small files of the named format, the batch divides among the
devices that a comment names and its pairs fit into their memory, scripts accept their flags, make knows its
targets and pip the extras.
"""

import argparse
import importlib.util
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest
from photographs import write_tars

import train
from swjax.training import config as config_lib
from swjax.training import inputs

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "benchmarks" / "notes").glob("*.md")),
]
PROGRAMS = ("python", "make", "pip", "srun", "mpirun", "swjax")
# Pairs of a whole training step that one GPU of 80 GB holds (docs/speed.md), rounded down to a power of two.
FITTING_PAIRS = {"vit_h14": 256, "vit_l14": 512, "vit_b16": 1024, "vit_b32": 4096, "tiny": 8192}
# Scripts that read their arguments by hand.
WITHOUT_PARSER = ("benchmarks/kernels/torch_layers.py", "tests/test_config_keys.py")
# A module that reads them so, and then finds that there is no such run or file.
EVALUATE = "swjax.evaluate"
HARDWARE = re.compile(r"# (one|\d+) H[12]00\s*$")


class Printed(NamedTuple):
    """A command of a page.

    Attributes:
      page: relative to the repository.
      words: without what sets the environment or starts several processes.
      devices: that its comment names; 0: none.
    """

    page: str
    words: tuple[str, ...]
    devices: int

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.words)}"


def commands() -> list[Printed]:
    found = {}
    for page in PAGES:
        for line in lines(page.read_text()):
            command = parse(str(page.relative_to(ROOT)), line)
            if command:
                found.setdefault((command.words, command.devices), command)
    return list(found.values())


def lines(text: str) -> list[str]:
    """Of fenced blocks that are not Python's, and of inline code; continued lines as one."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    blocks = [block for language, block in fenced if language in ("", "bash", "console")]
    outside = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    inline = [code.replace("\n", " ") for code in re.findall(r"`([^`]+)`", outside)]
    return re.sub(r"\\\n\s*", " ", "\n".join(blocks)).splitlines() + inline


def parse(page: str, line: str) -> Printed | None:
    hardware = HARDWARE.search(line)
    devices = int(hardware[1].replace("one", "1")) if hardware else 0
    if "..." in line.replace("..0", "").split("#")[0] or "$" in line:
        return None  # a pattern, not a command
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        return None
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    if words[:1] in (["srun"], ["mpirun"]) and "python" in words:
        words = words[words.index("python") :]
    if words[:1] == ["swjax"]:
        words = ["python", "-m", *words]
    if not words or len(words) < 2 or Path(words[0]).name not in PROGRAMS:
        return None
    return Printed(page, (Path(words[0]).name, *words[1:]), devices)


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
    # Two tars stand for however many.
    flags = [re.sub(r"\{(\d+)\.\.\d+\}", lambda m: f"{{{m[1]}..{_next(m[1])}}}", f) for f in flags]
    config, _ = config_lib.parse(["train.py", *flags])
    config_lib.validate(config, batch_shards=max(command.devices, 1))
    pairs = config.train.batch_size // config.train.accumulation // max(command.devices, 1)
    if command.devices:
        assert pairs <= FITTING_PAIRS[config.model.name], f"{pairs} pairs a device do not fit"
    monkeypatch.chdir(tmp_path)
    for folder, first in re.findall(r"=([^=\s]*)\{(\d+)\.\.\d+\}\.tar", " ".join(flags)):
        write_stand_in(tmp_path / folder, first)
    if config.data.name != "emoji":  # which is prepared once for the whole suite elsewhere
        with config.unlocked():
            config.data.dir = str(tmp_path / "data")
        assert len(inputs.open_source(config, "train")) > 0


def write_stand_in(folder: Path, first: str) -> None:
    """Two tars that are named as those of a page, from number `first`."""
    made = folder.parent / f"made-{first}"
    write_tars(made, [4, 4])
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate((first, _next(first))):
        (made / f"{number:05d}.tar").rename(folder / f"{name}.tar")


def _next(number: str) -> str:
    """The next number, of as many digits."""
    return f"{int(number) + 1:0{len(number)}d}"


class Parsed(Exception):
    """Flags were accepted."""


@pytest.mark.parametrize(
    "command",
    [c for c in of("python") if c.values[0].words[1] not in ("train.py", "-c")],
)
@pytest.mark.filterwarnings("ignore:.* found in sys.modules")  # another test imported it
def test_scripts_accept_their_flags(command, monkeypatch, capsys):
    """Up to where the script has parsed them."""
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
    if not flags:  # nothing to parse: it exists
        found = importlib.util.find_spec(name) if module else (ROOT / name).exists()
        assert found, f"there is no {name}"
        return None
    if name in WITHOUT_PARSER:
        assert (ROOT / name).exists()
        return None
    path = name if module else str(ROOT / name)
    monkeypatch.setattr(sys, "argv", [path, *(flag.replace("RATE", "921") for flag in flags)])
    monkeypatch.syspath_prepend(str(ROOT if module else (ROOT / name).parent))
    run = runpy.run_module if module else runpy.run_path
    if name == EVALUATE:
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
        assert not named or set(named[2].split(",")) <= extras, f"no extra of {word}"


def test_what_does_not_fit_is_found(tmp_path, monkeypatch):
    flags = "--config=configs/vith_int8.py --workdir=r --config.train.accumulation=4"
    command = parse("page", f"python train.py {flags}  # one H200")
    assert command.devices == 1
    with pytest.raises(AssertionError, match="4096 pairs a device do not fit"):
        test_train(command, tmp_path, monkeypatch, None)
