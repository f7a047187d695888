"""What a run logs while it trains, and when."""

import gc
import json
import os
import re
import subprocess
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest
from micro_run import train
from processes import file_size_limit

from swjax.training import setup as setup_lib
from swjax.training.config import ConfigError
from swjax.training.log import console, metric_log
from swjax.training.log.health import Health
from swjax.training.log.timing import CoreQueue, StepClock, Timing


class Write(NamedTuple):
    """What a run had done when it wrote to its log."""

    steps: list[int]  # of the records
    begun: int  # steps
    frozen: int  # objects that garbage collections leave out


@pytest.fixture(scope="module")
def written(micro, tmp_path_factory) -> list[Write]:
    """The writes of a run that saves after step 5 of 6."""
    begun, written = [], []
    compile_step, write = setup_lib.compile_step, metric_log.MetricLog.write

    def counted(*args, **options):
        step = compile_step(*args, **options)
        return lambda *args: [begun.append(1), step(*args)][1]

    def noted(self, records, **options):
        steps = [record["step"] for record in records]
        written.append(Write(steps, len(begun), gc.get_freeze_count()))
        write(self, records, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup_lib, "compile_step", counted)
        patch.setattr(metric_log.MetricLog, "write", noted)
        train(micro(checkpoint__every_steps=5), tmp_path_factory.mktemp("written"))
    return written


@pytest.mark.release
def test_log_is_written_while_the_next_step_runs(written):
    """Metrics are fetched after the next step has started, so that the device is not idle."""
    # At a checkpoint the log is written at once.
    assert [write[:2] for write in written] == [([1, 2], 3), ([3, 4, 5], 5), ([6], 6)]


@pytest.mark.release
def test_collections_leave_out_what_compiling_left(written):
    assert written[0].frozen > 100_000 and gc.get_freeze_count() == 0


class Stream:
    def __init__(self, terminal):
        self.text, self._terminal = "", terminal

    def isatty(self):
        return self._terminal

    def write(self, text):
        self.text += text

    def flush(self):
        pass


@pytest.mark.parametrize(
    "laps, saving, reason",
    [
        ({"data": 2.0, "device": 1.0}, True, None),
        ({"data": 2.0, "device": 1.1}, False, "data"),
        ({"data": 0.1, "device": 3.0}, True, "device while a checkpoint was written"),
        # A part that is always long, such as the device's, is no reason.
        ({"data": 0.1, "device": 1.6, "log": 1.4}, False, "log"),
        ({"data": 0.8, "device": 1.6, "log": 0.8}, False, "log, data"),
        ({"queue": 2.0, "data": 2.2, "device": 0.9}, False, "waiting for a core"),
    ],
)
def test_a_slow_step_says_where_its_time_went(monkeypatch, laps, saving, reason):
    """A slow step after 30 steps of one second, of which 0.9 s are on the device."""
    now, queued = [0.0], [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(CoreQueue, "seconds", lambda self: queued[0])
    with closing(StepClock()) as clock:

        def take(laps, saving=False):
            for name, seconds in laps.items():
                if name == "queue":  # time that is part of the next lap
                    queued[0] += seconds
                else:
                    now[0] += seconds
                    clock.lap(name)
            return clock.step(saving=saving)

        for _ in range(30):
            assert take({"data": 0.1, "device": 0.9}) == {"perf/seconds": pytest.approx(1.0)}
        told = take(laps, saving)
        assert told["perf/seconds"] == pytest.approx(sum(laps.values()) - laps.get("queue", 0.0))
        assert told.get("perf/slow") == reason


def counts_waiting() -> bool:
    """Whether the system counts it: Linux does, except old versions, whose file is 0 0 0."""
    file = Path("/proc/thread-self/schedstat")
    return file.exists() and file.read_text().split()[0] != "0"


@pytest.mark.skipif(not counts_waiting(), reason="this system does not count it")
def test_waiting_for_a_core_is_counted():
    """A thread that shares its core with a busy process waits for it."""
    core = min(os.sched_getaffinity(0))
    rests_never = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"

    def compute(until):
        os.sched_setaffinity(0, {core})  # pins only this thread
        with closing(CoreQueue()) as queue:
            before = queue.seconds()
            while queue.seconds() < before + 0.1 and time.monotonic() < until:
                pass
            return queue.seconds() - before

    with ThreadPoolExecutor(1) as pool:
        process = subprocess.Popen([sys.executable, "-c", rests_never])
        try:
            assert pool.submit(compute, time.monotonic() + 60).result() >= 0.1
        finally:
            process.kill()
            process.wait()


def test_console_rewrites_a_terminals_line_and_prints_plain_ones_elsewhere():
    record = {"step": 5, "train/loss": 1.5, "perf/step_seconds": 2.0,
              "perf/samples_per_sec_per_device": 32.0, "perf/data_wait_frac": 0.25}  # fmt: skip
    for terminal in (True, False):
        stream = Stream(terminal)
        progress = console.Console(65, stream)
        progress.update(record)
        progress.update(record | {"step": 6})
        progress.say("saved")
        assert stream.text.count("\n") == (1 if terminal else 3)
        assert ("\x1b" in stream.text) == terminal
        assert "step 5/65  loss 1.5000  64 samples/s  data wait 25%  ETA 2:00" in stream.text


def test_console_shows_memory_where_the_backend_tells(monkeypatch):
    def devices(*stats):
        found = [types.SimpleNamespace(memory_stats=lambda stats=s: stats) for s in stats]
        monkeypatch.setattr(jax, "local_devices", lambda: found)

    devices(None)
    assert console.device_memory() == ""
    devices(
        {"bytes_in_use": 2**30, "peak_bytes_in_use": 3 * 2**30},
        {"bytes_in_use": 2**31, "peak_bytes_in_use": 5 * 2**30},
    )
    assert console.device_memory() == "2.0 GiB, peak 5.0"
    stream = Stream(terminal=False)
    console.Console(65, stream).update({"step": 5, "train/loss": 1.5, "perf/step_seconds": None})
    assert stream.text == "step 5/65  loss 1.5000  memory 2.0 GiB, peak 5.0\n"


def test_console_keeps_the_first_ranks_of_an_evaluation():
    scores = {"val/image_to_text_R@1": 0.25, "val/image_to_text_R@5": 0.5,
              "val/image_to_text_chance_R@1": 0.05, "zeroshot/pets_top1": 0.75}  # fmt: skip
    stream = Stream(terminal=True)
    record = {"step": 5, "train/loss": 1.5, "perf/step_seconds": None}
    console.Console(65, stream).update(record | scores)
    assert stream.text.startswith("step 5: val/image_to_text_R@1 25.0%, zeroshot/pets_top1 75.0%\n")


def test_a_terminals_line_fits_and_is_ended(monkeypatch):
    """A wrapped line could not be overwritten, and later output must start on a new line."""
    monkeypatch.setenv("COLUMNS", "10")
    stream = Stream(terminal=True)
    progress = console.Console(65, stream)
    progress.show("a line of text that is too long")
    progress.close()
    progress.close()
    assert stream.text == "\r\x1b[Ka line of\n"


def test_throughput_counts_training_only(micro, monkeypatch):
    now = np.zeros(1)
    monkeypatch.setattr(time, "perf_counter", lambda: float(now[0]))
    with closing(Timing(10, setup_lib.model_config(micro()))) as timing:
        now += 20  # the time of compilation
        assert timing.restart() == 20
        now += 30
        timing.lap("evaluation")  # of a run that resumes; the lap began before the window
        assert timing.restart() == 0
        now += 1
        assert set(timing.window().values()) == {None}
        with timing.waiting():
            now += 1
        for name, seconds in (("device", 3), ("evaluation", 30), ("saving", 40)):
            now += seconds
            timing.lap(name)
        read = timing.window()
    rate = 10 / read["perf/step_seconds"] / jax.device_count()
    assert read["perf/samples_per_sec_per_device"] == pytest.approx(rate)
    assert read["perf/step_seconds"] == 4 and read["perf/data_wait_frac"] == 0.25


@pytest.mark.release
def test_health_is_compiled_when_it_is_due(micro, monkeypatch, tmp_path, capsys):
    """The first step does not wait for it, and throughput excludes it."""
    compile_ = Health.compile

    def slowly(self, state, batch):
        time.sleep(2)
        return compile_(self, state, batch)

    monkeypatch.setattr(Health, "compile", slowly)
    train(micro(diagnostics__every_steps=3), tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    said = re.findall(
        r"^step (\d+)(?:: compiling quantization health)? took", capsys.readouterr().out, re.M
    )
    assert said == ["1", "3"]
    assert lines[2]["perf/seconds"] > 2
    assert all(line["perf/step_seconds"] < 2 for line in lines)


def test_wandb_missing_is_one_line(micro, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="pip install wandb"):
        metric_log.MetricLog(tmp_path, micro(log__wandb="project"), last_step=0)


def test_wandb_is_told_the_newest_record(micro, tmp_path, monkeypatch):
    calls, axes = [], []

    class Run:
        define_metric = staticmethod(lambda *name, **axis: axes.append((*name, axis)))
        log = staticmethod(calls.append)
        finish = staticmethod(lambda: calls.append("finished"))

    fake = types.SimpleNamespace(init=lambda **options: calls.append(options) or Run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for _ in range(2):  # the second command resumes the run
        log = metric_log.MetricLog(tmp_path, micro(log__wandb="project"), last_step=0)
        first_step = {"step": 1, "train/loss": 0.5, "quantization/zeros/fc/x": 0.1}
        log.write([first_step, {"step": 2, "train/loss": 0.25}])
        log.close()
    first, told, finished, second = calls[:4]
    # Health, which not every step has, is told with the newest step.
    assert told == {"step": 2, "train/loss": 0.25, "quantization/zeros/fc/x": 0.1}
    assert finished == "finished"
    assert axes[:2] == [("step", {}), ("*", {"step_metric": "step"})]  # steps may repeat
    assert first["project"] == "project" and first["id"] == second["id"]


def test_a_full_disk_leaves_whole_records(micro, tmp_path):
    """Half of a record stayed, and closing the file wrote the other half after the disk had room."""
    log = metric_log.MetricLog(tmp_path, micro(), last_step=0)
    with file_size_limit(9), pytest.raises(OSError, match="File too large"):
        log.write([{"step": 1, "train/loss": 0.5}])
    log.close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_tensorboard_gets_the_newest_record(micro, tmp_path, monkeypatch):
    added, add = [], metric_log.Board._add
    monkeypatch.setattr(
        metric_log.Board, "_add", lambda board, event: added.append(event) or add(board, event)
    )
    log = metric_log.MetricLog(tmp_path, micro(log__tensorboard="true"), last_step=0)
    log.write([{"step": 1, "train/loss": float("nan")}, {"step": 2, "train/loss": 0.1}])
    log.rewind(2)  # a rollback: TensorBoard still showed the dropped steps
    log.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["train/loss"] for line in lines] == [None, 0.1]
    assert list((tmp_path / "tensorboard").iterdir())
    assert [event.step for event in added if event.HasField("session_log")] == [1, 3]
