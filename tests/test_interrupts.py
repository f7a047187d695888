"""Signals to a run, and processes that it loses."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from micro_run import ROOT, records


def test_sigterm_saves_and_says_how_to_go_on(started, tmp_path):
    process = started()
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 0
    last = records(tmp_path)[-1]["step"]
    assert f"interrupted: step {last} is saved" in output
    assert (tmp_path / "checkpoints" / str(last)).is_dir()


def loaders_of(process) -> list[int]:
    """The processes that load for one."""
    found = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            parent = int((command.parent / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent == process.pid and "spawn_main" in command.read_text():
                found.append(int(command.parent.name))
    return found


def test_sigterm_to_loader_processes_too_saves(started, tmp_path):
    process = started(data__workers=1)
    loaders = loaders_of(process)
    assert loaders
    for pid in [*loaders, process.pid]:
        os.kill(pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 0
    assert f"interrupted: step {records(tmp_path)[-1]['step']} is saved" in output


def test_a_lost_loader_process_is_one_line(started):
    process = started(data__workers=1)
    for pid in loaders_of(process):
        os.kill(pid, signal.SIGKILL)
    _, errors = process.communicate(timeout=180)
    assert process.returncode == 3
    last = errors.splitlines()[-1]
    assert "train.py: loader process" in last and "exit code -9, killed, as by a machine" in last
    assert "the same command goes on" in last and "Traceback" not in errors


def test_second_interrupt_ends_at_once():
    code = (
        "import signal, time\n"
        "from swjax.training.interrupt import catch\n"
        "with catch() as interrupt:\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "    assert interrupt.requested\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "    time.sleep(60)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT, timeout=50)
    assert done.returncode == 130 and b"again" in done.stdout
