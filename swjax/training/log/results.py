"""The files and messages of a run at its start and at its end."""

import json
import re
from pathlib import Path

import jax
from ml_collections import ConfigDict

from swjax import report
from swjax.safe_files import mask_credentials, write_atomically
from swjax.training import config as config_lib
from swjax.training.config import ConfigError
from swjax.training.evaluation import Evaluation
from swjax.training.log import environment
from swjax.training.log.console import Console
from swjax.training.setup import Parts, model_title

HISTORY = "config_history.jsonl"
RESUMING = "resuming at step"  # precedes the step in the message; benchmarks.reliability reads it


def record_setup(config: ConfigDict, workdir: Path, console: Console, step: int) -> None:
    """Writes config.json, config_history.jsonl and env.txt; prints the run's setup and the config's changes.

    A line of the history is {"step": last step before a config applies, "changes": ["key: old -> new"],
    "config": {...}}. Steps that a resumed run computes again leave no line.

    Args:
      config: the config of the run.
      workdir: directory of the run.
      console: prints the messages.
      step: the last step that an earlier process has finished; 0 at the beginning.
    """
    entries, now = configs_before(workdir, step), json.loads(config_lib.to_json(config))
    resumed = config.checkpoint.resume
    changes: list[str] = []
    if entries:
        last = entries[-1]["config"]
        changes = config_lib.differences(last, now)
        for change in config_lib.changes(json.dumps(last), config):
            console.say(f"the config changes after step {step}: {change}")
    elif step and resumed:
        for change in config_lib.changes_of_run(Path(resumed), config):
            console.say(f"the config differs from that of {resumed}: {change}")
    if changes or not entries:
        entries.append({"step": step, "changes": changes, "config": now})
    lines = "".join(json.dumps(entry) + "\n" for entry in entries)
    write_atomically(workdir / HISTORY, lines)
    write_atomically(workdir / "config.json", config_lib.to_json(config))
    write_atomically(workdir / "env.txt", mask_credentials(environment.describe()))
    console.say(
        f"{model_title(config)} in {config.model.recipe} on {jax.device_count()} x "
        f"{jax.devices()[0].device_kind}, {config.data.name}, {workdir}"
        + (f": {RESUMING} {step}" if step else "")
    )


def configs_before(workdir: Path, step: int) -> list[dict]:
    """The configs of a run before its step `step`, as in `HISTORY`; [] at its beginning."""
    path, remedy = workdir / HISTORY, "remove the file"
    if not path.exists():
        return []
    lines = enumerate(path.read_text(errors="replace").splitlines(), 1)
    entries = [
        config_lib.read_json(f"{HISTORY}, line {n},", x, remedy=remedy, step=int, config=dict)
        for n, x in lines
    ]
    return [entry for entry in entries if entry["step"] < step]


def is_finished(config: ConfigDict, workdir: Path) -> bool:
    """Whether the run is already finished.

    Args:
      config: the config of the run.
      workdir: directory of the run.

    Raises:
      ConfigError: the workdir holds a finished run with another config.
    """
    if not (workdir / "results.json").exists():
        return False
    if changed := config_lib.changes_of_run(workdir, config):
        raise ConfigError(
            f"{workdir} holds a finished run with another config ({'; '.join(changed[:3])}): "
            f"use another --workdir"
        )
    return (workdir / "report" / "index.html").exists() or not config.report.enabled


def write_results(
    config: ConfigDict, workdir: Path, parts: Parts, unseen: Evaluation, *, step: int, skipped: int
) -> None:
    """Writes the report, and then results.json, which marks the run as finished.

    Args:
      config: the config of the run.
      workdir: directory of the run.
      parts: the parts of the run.
      unseen: result of `evaluate_unseen`.
      step: the last step.
      skipped: number of skipped steps, see `NanPolicy`.
    """
    if config.report.enabled:
        report.write(
            workdir,
            results=unseen.scores,
            predictions=unseen.predictions,
            nearest_images=unseen.nearest_images,
            attribution=parts.source.attribution,
        )
    results = {"step": step, "skipped": skipped, "scores": unseen.scores}
    write_atomically(workdir / "results.json", json.dumps(results, indent=2) + "\n")


def tell_results(workdir: Path, *, has_report: bool = True) -> None:
    """Prints the final scores next to the scores of chance, and the path of the report.

    Args:
      workdir: directory of a finished run.
      has_report: whether the run writes a report.

    Raises:
      ConfigError: results.json is damaged.
    """
    text = (workdir / "results.json").read_text(errors="replace")
    remedy = "remove it; the same command then writes it again"
    results = config_lib.read_json("results.json", text, remedy=remedy, step=int, scores=dict)
    lines = []
    for name, score in results["scores"].items():
        chance = results["scores"].get(re.sub(r"_(top\d+|R@\d+)$", r"_chance_\1", name))
        if isinstance(score, float) and isinstance(chance, float):
            lines.append(f"  {name:32} {score:7.2%}   {chance:7.2%}")
    skipped = f", of which {results['skipped']} were skipped" if results.get("skipped") else ""
    heading = "; scores, with chance:" if lines else ""
    print("\n".join([f"finished after {results['step']} steps{skipped}{heading}", *lines]))
    page = workdir / "report" / "index.html"
    if has_report and page.exists():
        print(f"report: {page}")
