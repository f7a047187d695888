"""The command line: help, one clear line for each mistake, exit codes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import thinning

import train
from swjax import __main__ as swjax_commands
from swjax.evaluate import __main__ as evaluate
from swjax.training import config as config_lib
from swjax.training import loop
from swjax.training.state.checkpoint import lock_workdir

ROOT = Path(__file__).resolve().parent.parent
OPENMOJI = f"--config={ROOT}/configs/openmoji.py"


def run(*flags, cwd=ROOT):
    command = [sys.executable, str(ROOT / "train.py"), *flags]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=120)


def test_help_shows_examples_and_loads_no_library():
    code = "import sys, train; print(train.main(['train.py', '--help']), 'jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "0 False" and not done.stderr
    assert done.stdout.count("python train.py --config=configs/") >= 4


def test_library_without_training_packages_is_one_line(tmp_path):
    code = "import sys; sys.modules['ml_collections'] = None; import train; sys.exit(train.main(sys.argv))"
    command = [sys.executable, "-c", code, OPENMOJI, f"--workdir={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "pip install 'swjax[train]'" in done.stderr


@pytest.mark.parametrize(
    "missing, command",
    thinning.first(
        [
            ("safetensors", "classify weights picture.png cat dog"),
            ("ml_collections", "search clip.safetensors fox"),
            ("fsspec", "data check gs://bucket/pairs.csv"),
        ]
    ),
)
def test_a_command_names_the_package_that_is_missing(missing, command, tmp_path):
    code = f"""import sys; sys.modules[{missing!r}] = None
from swjax.__main__ import main; sys.argv[1:] = {command.split()}; sys.exit(main())"""
    (tmp_path / "weights").write_text("")
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=120
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert missing in done.stderr and done.stderr.count("pip install") == 1


MISTAKES = {
    "no config": (["--workdir=w"], "--config=configs/openmoji.py"),
    "no workdir": ([OPENMOJI], "--workdir"),
    "missing file": ([f"--config={ROOT}/configs/openmojy.py", "--workdir=w"], "openmoji.py'?"),
    "unknown flag": ([OPENMOJI, "--wrkdir=w"], "workdir"),
    "stray word": ([OPENMOJI, "--workdir=w", "strict"], "'strict'"),
    "unknown section": ([OPENMOJI, "--workdir=w", "--config.modle.name=tiny"], "'model'"),
    "unknown key": ([OPENMOJI, "--workdir=w", "--config.model.recip=standard"], "'recipe'"),
    "strange key": (
        [OPENMOJI, "--workdir=w", "--config.model.zzz=1"],
        "choose from architecture, ",
    ),
    "word for a number": ([OPENMOJI, "--workdir=w", "--config.train.steps=many"], "'many'"),
    "fraction of a step": ([OPENMOJI, "--workdir=w", "--config.train.steps=1.5"], "'1.5'"),
    "section for a key": ([OPENMOJI, "--workdir=w", "--config.model=tiny"], "recipe"),
}


def refused(flags, capsys):
    """Returns the output and the error, a line, of a command that `train.py` refuses."""
    assert train.main(["train.py", *flags]) == 2
    out, error = capsys.readouterr()
    assert error.count("\n") == 1 and error.startswith("train.py: ")
    return out, error


@pytest.mark.parametrize("name", MISTAKES)
def test_command_line_mistake_is_one_line(name, capsys, tmp_path, monkeypatch):
    flags, hint = MISTAKES[name]
    monkeypatch.chdir(tmp_path)
    out, error = refused(flags, capsys)
    assert hint in error and not out
    assert not list(tmp_path.iterdir())  # a refused run creates no file


def test_a_config_file_without_get_config_is_one_line(capsys, tmp_path):
    (tmp_path / "own.py").write_text("learning_rate = 1e-3")
    _, error = refused([f"--config={tmp_path}/own.py", "--workdir=w"], capsys)
    assert "own.py': AttributeError: it has no get_config: define a function" in error


def test_a_misspelt_key_in_a_config_file_is_named_alone(capsys, tmp_path):
    text = "from configs.common import get_config as common\n\ndef get_config():\n"
    (tmp_path / "own.py").write_text(f"{text}    config = common()\n    config.train.stepz = 3\n")
    assert train.main(["train.py", f"--config={tmp_path}/own.py", "--workdir=w"]) == 2
    error = capsys.readouterr().err
    assert 'Key "stepz" does not exist' in error and 'Did you mean "steps"' in error
    assert error.count("\n") == 1 and "batch_size" not in error and "\\n" not in error


BAD_CONFIGS = {
    "unknown recipe": (["model.recipe=switchbak"], "'switchback'"),
    "unknown model": (["model.name=vit_b33"], "'vit_b32'"),
    "unknown dtype": (["model.dtype=float61"], "'float16'"),
    "float16 unscaled": (["model.dtype=float16"], "optimizer.loss_scaling"),
    "loss scale below 1": (["optimizer.loss_scale=0.5"], "at least 1"),
    "a schedule AdamW lacks": (["optimizer.name=adamw", "optimizer.b2_power=0.5"], "stable_adamw"),
    "a threshold AdamW lacks": (
        ["optimizer.name=adamw", "optimizer.clip_threshold=2"],
        "no effect with config.optimizer.name='adamw': set config.optimizer.name to stable_adamw",
    ),
    "unknown data": (["data.name=emojis"], "emoji"),
    "unknown task": (["data.emoji.task=strickt"], "'strict'"),
    "unknown optimizer": (["optimizer.name=adam"], "'adamw'"),
    "unknown schedule": (["schedule.name=cos"], "cosine"),
    "unknown policy": (["train.nan_policy=ignore"], "rollback"),
    "image and patch": (["data.image_size=65"], "patch_size"),
    "heads and width": (["model.vision.heads=5"], "heads"),
    "concurrent recomputation": (
        ["train.concurrent_kernels=True", "model.remat=full"],
        "needs config.model.remat='none'",
    ),
    "batch and accumulation": (["train.batch_size=10", "train.accumulation=4"], "multiple of"),
    "steps and epochs": (["train.epochs=2"], "epochs=2.0"),
    "no duration": (["train.steps=0"], "train.steps"),
    "two warm-ups": (["schedule.warmup_epochs=1"], "warmup_epochs=1.0"),
    "warm-up past the end": (["schedule.warmup_steps=100000"], "warmup_steps"),
    "two clippings": (["optimizer.grad_clip_norm=1"], "set one of them to 0"),
    "frozen nothing": (["optimizer.freeze=visoin/.*"], "visoin"),
    "broken pattern": (["optimizer.freeze=("], "regular expression"),
    "beta of 1": (["optimizer.b2=1"], "optimizer.b2"),
    "an eps that is 0 in float32": (["optimizer.eps=1e-40"], "at least 1.2e-38"),
    "clipping that never clips": (["optimizer.clip_threshold=11"], "RMS stays below 10: lower it"),
    "negative decay": (["optimizer.weight_decay=-1"], "optimizer.weight_decay"),
    "too many devices": (["mesh.data=3"], "device"),
    "two open meshes": (["mesh.fsdp=-1"], "mesh"),
    "no device": (["mesh.fsdp=0"], "fsdp=0"),
    "nothing to resume": (["checkpoint.resume=nowhere"], "nowhere"),
    "no negative pairs": (["train.batch_size=1"], "no negative pairs"),
    "resumed and initialized": (["checkpoint.resume=a", "checkpoint.init_from=b"], "exclude"),
    "nothing to evaluate on": (["eval.data=webdataset"], "config.data.webdataset.splits.val"),
    "unknown data to evaluate on": (["eval.data=webdatset"], "'webdataset'"),
    "an epoch that is no step": (["train.steps=0", "train.epochs=0.001"], "0.391 steps of 256"),
    "everything frozen": (["optimizer.freeze=.*"], "every parameter"),
    "cuDNN without a GPU": (["model.attention=cudnn", "model.dtype=bfloat16"], "GPU"),
}

LATE = ("unknown data", "steps and epochs", "no duration", "two warm-ups", "warm-up past the end",
        "frozen nothing", "everything frozen", "an epoch that is no step", "nothing to resume")  # fmt: skip


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_impossible_config_is_one_line(name, capsys, tmp_path, monkeypatch):
    overrides, hint = BAD_CONFIGS[name]
    monkeypatch.chdir(tmp_path)
    changes = [f"--config.{change}" for change in ("data.name=synthetic", *overrides)]
    _, error = refused([OPENMOJI, "--workdir=w", *changes], capsys)
    assert hint in error
    if name not in LATE:
        assert not list(tmp_path.iterdir())  # a refused run creates no file


def test_a_process_exits_with_2_and_no_traceback(tmp_path):
    done = run(OPENMOJI, "--workdir=w", "--config.model.recip=standard", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr


def test_patterns_can_be_written_bare():
    flags = [OPENMOJI, "--workdir=w", "--config.optimizer.freeze=text/.*,logit_scale"]
    config, workdir = config_lib.parse(["train.py", *flags])
    assert config.optimizer.freeze == ("text/.*", "logit_scale")
    assert str(workdir) == "w"


def test_a_pattern_with_a_comma_is_written_in_a_json_list():
    flags = [OPENMOJI, "--workdir=w", '--config.optimizer.freeze=["blocks/.{1,2}", "scale"]']
    assert config_lib.parse(["train.py", *flags])[0].optimizer.freeze == ("blocks/.{1,2}", "scale")


@pytest.mark.parametrize("steps, warmup", [(20, 8), (300, 120), (301, 300), (2000, 300)])
def test_a_warmup_that_was_not_set_fits_into_a_shorter_run(steps, warmup, caplog):
    """make train ARGS=--config.train.steps=20, a likely first experiment, works."""
    config = config_lib.load(f"{ROOT}/configs/openmoji.py", [("train.steps", str(steps))])
    assert config.schedule.warmup_steps == warmup
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (warmup != 300)
    if said:
        assert f"warmup_steps=300 does not fit into config.train.steps={steps}" in said[0]


def test_a_warmup_that_was_set_stays():
    overrides = [("train.steps", "20"), ("schedule.warmup_steps", "300")]
    config = config_lib.load(f"{ROOT}/configs/openmoji.py", overrides)
    assert config.schedule.warmup_steps == 300


def test_durations():
    config, _ = config_lib.parse(["train.py", OPENMOJI, "--workdir=w", "--config.train.steps=0"])
    sizes = {"batch_size": 128, "dataset_size": 1000}
    config.train.epochs = 2.0
    assert config_lib.steps(config.train, "", **sizes) == round(2 * 1000 / 128)
    config.train.epochs, config.train.examples = 0.0, 1280
    assert config_lib.steps(config.train, "", **sizes) == 10
    config.train.epochs, config.train.examples = 0.001, 0
    with pytest.raises(config_lib.ConfigError, match=r"config.train.epochs=0.001 is 0.00781 steps"):
        config_lib.steps(config.train, "", **sizes)


@pytest.mark.parametrize("make", [lambda p: p.write_text(""), lambda p: p.symlink_to("/proc/none")])
def test_a_workdir_that_cannot_be_made_is_one_line(make, tmp_path, capsys):
    make(tmp_path / "w")
    flags = [OPENMOJI, f"--workdir={tmp_path}/w", "--config.data.name=synthetic"]
    assert train.main(["train.py", *flags]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "cannot be created" in error


@pytest.mark.parametrize("name", ["lr[1]", "a*b", "back\\slash"])
def test_a_workdir_that_orbax_reads_as_a_pattern_is_refused(name, tmp_path):
    """Checkpoints in lr[1] were written without their arrays."""
    with pytest.raises(config_lib.ConfigError, match="in its path, which Orbax reads as a pattern"):
        lock_workdir(tmp_path / name / "run")
    assert not list(tmp_path.iterdir())


def test_home_is_expanded_after_an_equals_sign(tmp_path, monkeypatch, capsys):
    """Shells leave ~ in --workdir=~/run, which made a folder named ~."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "file").write_text("")
    flags = [OPENMOJI, "--workdir=~/file/run", "--config.data.name=synthetic"]
    refused = f"workdir '{tmp_path}/file/run' cannot be created"
    assert train.main(["train.py", *flags]) == 2
    assert refused in capsys.readouterr().err
    assert evaluate.main(["python -m swjax.evaluate", "--workdir=~/none"]) == 2
    assert f"'{tmp_path}/none' is not a run" in capsys.readouterr().err
    config, _ = config_lib.parse(["train.py", *flags])
    with pytest.raises(config_lib.ConfigError, match=refused):
        loop.train_and_evaluate(config, "~/file/run")
    monkeypatch.setattr(sys, "argv", ["swjax", "runs", "--page=~/none/page.html"])
    monkeypatch.delitem(sys.modules, "swjax.report.runs", raising=False)  # runpy warns of it
    with pytest.raises(SystemExit):
        swjax_commands.main()
    assert f"the folder '{tmp_path}/none' does not exist" in capsys.readouterr().err


def test_home_in_a_config_is_refused():
    config = config_lib.load(f"{ROOT}/configs/openmoji.py", [("data.dir", "~/data")])
    with pytest.raises(config_lib.ConfigError, match=r"^config.data.dir='~/data' must have no ~"):
        config_lib.validate(config, batch_shards=1)


@pytest.mark.release
def test_train_is_a_command_too(tmp_path):
    def swjax_train(*flags):
        command = [sys.executable, "-m", "swjax", "train", *flags]
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)

    assert "swjax train --config=" in swjax_train("--help").stdout
    wrong = swjax_train("--config=configs/openmoji.py", f"--workdir={tmp_path}/w", "--config.x=1")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("swjax train: config.x does not exist: choose from checkpoint, ")
    assert wrong.stderr.count("\n") == 1 and not list(tmp_path.iterdir())
    synthetic = "--config.data.name=synthetic"  # otherwise it would render all emoji
    plan = swjax_train("--config=configs/openmoji.py", synthetic, "--plan", "--hardware=l4")
    assert plan.returncode == 0 and plan.stdout.startswith("plan for 1 x l4")


@pytest.mark.parametrize(
    "name, meant", [("repot", "report"), ("replay", "diagnostics replay"), ("verfy", "data verify")]
)
def test_a_misspelt_command_is_one_line(name, meant, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["swjax", name])
    assert swjax_commands.main() == 2
    error = capsys.readouterr().err
    assert error == f"swjax: there is no command {name!r}: did you mean {meant!r}?\n"


@pytest.mark.parametrize(
    "flag, told", [("--version", r"swjax \d+\.\d+\.\d+\n"), ("--help", r"(?s).*diagnostics.*")]
)
def test_flags_of_the_command(flag, told, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["swjax", flag])
    assert swjax_commands.main() == 0
    assert re.fullmatch(told, capsys.readouterr().out)


def test_the_recorded_command_runs_again():
    """A module of a package is recorded as `-m NAME`: the path of its file would not run."""
    program = (
        "from swjax.training.log import environment; print(environment.describe().split('\\n')[0])"
    )
    done = subprocess.run(
        [sys.executable, "-m", "timeit", "-n1", "-r1", "-s", program, "pass"],
        capture_output=True, text=True, cwd=ROOT, timeout=120,
    )  # fmt: skip
    assert done.stdout.startswith("command: python -m timeit -n1"), done.stderr


@pytest.mark.parametrize(
    "command", thinning.first([["-m", "swjax", "--help"], ["train.py", "--plan"]])
)
def test_output_that_nobody_reads(command):
    """Output into a closed pipe, as in `... | head`, ends with SIGPIPE's exit code and without traceback."""
    config = ["--config=configs/openmoji.py", "--config.data.name=synthetic"]
    rest = [] if "--help" in command else config
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, *command, *rest],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")
