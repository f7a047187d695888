"""A run of a tiny CLIP in a separate process, and the comparison of two runs."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
# A step takes milliseconds, so a run spends most of its time on starting, logging and saving.
TINY = """
  data.name=synthetic data.image_size=16 data.context_length=8 data.synthetic.classes=20
  data.synthetic.examples=40 model.vision.width=32 model.vision.layers=1 model.vision.heads=2
  model.vision.patch_size=8 model.text.width=32 model.text.layers=1 model.text.heads=2
  model.embed_dim=16 train.batch_size=8 eval.every_steps=0 eval.batch_size=16
  schedule.name=constant schedule.warmup_steps=1 report.enabled=false log.tensorboard=false
""".split()


class Run:
    """A process that runs train.py; its output goes to the end of WORKDIR.txt.

    Args:
      workdir: of the run.
      more: keys to set, as in "train.steps=10".
      name, folder: of the output file, instead of the workdir's.
      environment: of the process; None: this process's.
    """

    def __init__(
        self,
        workdir: Path,
        *more: str,
        name: str = "",
        folder: Path | None = None,
        environment: dict | None = None,
    ):
        self.output = (folder or workdir.parent) / f"{name or workdir.name}.txt"
        self._said_before = self.output.stat().st_size if self.output.exists() else 0
        keys = [f"--config.{key}" for key in (*TINY, *more)]
        command = [sys.executable, "train.py", "--config=configs/openmoji.py", *keys]
        with open(self.output, "a") as output:
            options = {"stdout": output, "stderr": output, "cwd": ROOT, "env": environment}
            self.process = subprocess.Popen([*command, f"--workdir={workdir}"], **options)

    def said(self) -> str:
        """Returns what the process has written to stdout and stderr."""
        return self.output.read_text(errors="replace")[self._said_before :]

    def to_its_end(self, code: int = 0) -> str:
        """Waits for the process to end; returns its output.

        Raises:
          RuntimeError: it ended with another code.
        """
        if self.process.wait(600) != code:
            raise RuntimeError(f"exit code {self.process.returncode}: {self.said()[-2000:]}")
        return self.said()


def resumed_at(said: str) -> int | None:
    """Returns the step at which a process resumed its run, from its output; None: it did not say so."""
    from swjax.training.log.results import RESUMING

    found = re.search(rf"{RESUMING} (\d+)", said)
    return int(found[1]) if found else None


def records(workdir: Path) -> list[dict]:
    """Returns the complete lines of metrics.jsonl, without times."""
    path = workdir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    loaded = [json.loads(line) for line in lines if line.endswith("}\n")]
    return [{k: v for k, v in r.items() if k != "time" and "perf/" not in k} for r in loaded]


def finished_checkpoints(workdir: Path) -> list[int]:
    """Returns the steps of completely written checkpoints."""
    return sorted(int(p.name) for p in (workdir / "checkpoints").glob("*") if p.name.isdigit())


def is_saving(workdir: Path) -> bool:
    """Whether a checkpoint is being written."""
    return any((workdir / "checkpoints").glob("*tmp*"))


def compare(alone: Path, other: Path) -> dict:
    """Counts differences between two finished runs: arrays, position in the data, metrics."""
    (a, position_a), (b, position_b) = (checkpoint(workdir) for workdir in (alone, other))
    arrays = sorted(name for name in a.keys() | b.keys() if not same_bits(a.get(name), b.get(name)))
    left, right = records(alone), records(other)
    steps = [x["step"] for x, y in zip(left, right, strict=False) if x != y]
    same = not arrays and not steps and len(left) == len(right) > 0 and position_a == position_b
    return {
        "identical": same,
        "arrays": len(a),
        "arrays_that_differ": arrays,
        "same_position_in_the_data": position_a == position_b,
        "metrics_per_step": len(left[-1]) - 1 if left else 0,
        "steps_that_differ": steps,
        "steps_recorded": [len(left), len(right)],
    }


def checkpoint(workdir: Path) -> tuple[dict[str, np.ndarray], dict]:
    """Returns the arrays of the last checkpoint by path, and the position in the data."""
    import orbax.checkpoint as ocp

    last = workdir / "checkpoints" / str(finished_checkpoints(workdir)[-1])
    with ocp.StandardCheckpointer() as checkpointer:
        tree = checkpointer.restore(last / "state")
    position = json.loads((last / "manifest" / "metadata").read_text())["position"]
    position.pop("unscored", None)  # a record of the log, with measured times
    return dict(flatten(tree, "")), position


def flatten(tree, prefix: str):
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in items:
        if isinstance(value, dict | list | tuple):
            yield from flatten(value, f"{prefix}{key}/")
        elif value is not None:
            yield f"{prefix}{key}", np.asarray(value)


def same_bits(a, b) -> bool:
    if a is None or b is None or a.dtype != b.dtype or a.shape != b.shape:
        return False
    return a.tobytes() == b.tobytes()
