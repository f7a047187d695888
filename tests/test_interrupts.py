"""Signals to a run, and the death of its processes."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import thinning
from micro_run import ROOT, command_of, records

from swjax.training.faults.interrupt import catch


def loaders_of(process) -> list[int]:
    """Returns the ids of a run's loader processes."""
    found = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            parent = int((command.parent / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent == process.pid and "spawn_main" in command.read_text():
                found.append(int(command.parent.name))
    return found


def test_a_signal_saves_and_says_how_to_go_on(started, tmp_path):
    """Schedulers send the signal to loader processes too."""
    process = started(data__workers=1)
    loaders = loaders_of(process)
    assert loaders
    for pid in [*loaders, process.pid]:
        os.kill(pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 0
    last = records(tmp_path)[-1]["step"]
    assert f"interrupted: step {last} is saved" in output
    assert (tmp_path / "checkpoints" / str(last)).is_dir()


@pytest.mark.release
@pytest.mark.parametrize("interrupted", [True, False], ids=["with Ctrl-C", "alone"])
def test_closed_output_loses_nothing(interrupted, started, tmp_path):
    """In `train.py | tee log`, Ctrl-C ends tee as well. Standard error then says what was saved."""
    # With 500, nothing is printed between closing the output and the signal.
    process = started(log__every_steps=500 if interrupted else 2)
    process.stdout.close()
    if interrupted:
        process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=180)
    assert process.returncode == (0 if interrupted else 3)
    last = records(tmp_path)[-1]["step"]
    assert (tmp_path / "checkpoints" / str(last)).is_dir()
    first = (
        "saving after this step or compilation; Ctrl-C again"
        if interrupted
        else "writing the output failed (Broken pipe)"
    )
    assert errors.index(first) < errors.index(f"interrupted: step {last} is saved")
    assert "Traceback" not in errors


def test_a_closed_terminal_is_a_signal_except_under_nohup():
    before = signal.getsignal(signal.SIGHUP)
    try:
        for handler in (signal.SIG_DFL, signal.SIG_IGN):  # SIG_IGN under nohup
            signal.signal(signal.SIGHUP, handler)
            with catch() as interrupt:
                interrupt.handle()
                signal.raise_signal(signal.SIGHUP)
                assert interrupt.requested == (handler == signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.release
def test_a_lost_loader_process_is_one_line(started):
    process = started(data__workers=1)
    for pid in loaders_of(process):
        os.kill(pid, signal.SIGKILL)
    _, errors = process.communicate(timeout=180)
    assert process.returncode == 3
    last = errors.splitlines()[-1]
    assert "train.py: loader process" in last and "exit code -9 (killed, probably because" in last
    assert "the same command resumes" in last and "Traceback" not in errors


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads what a process has loaded")
@pytest.mark.parametrize("library", thinning.first(["jaxlib", "yaml", "tensorstore"]))
def test_an_interrupt_while_libraries_load_ends_the_run(library, tmp_path):
    """SIGINT ends the process at once, since an import may suppress a KeyboardInterrupt."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(command_of(tmp_path), stdout=pipe, stderr=pipe, text=True)
    maps = Path(f"/proc/{process.pid}/maps")
    deadline = time.monotonic() + 60
    while library not in maps.read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=20)
    assert process.returncode == -signal.SIGINT  # exit code 130 in a shell
    assert "Traceback" not in errors and "finished" not in output


def ended(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT, timeout=50)


# The clock of the module has the times of an iterator, one for each reading: the first signal, and each
# Ctrl-C after it.
CLOCK = """
import ctypes, signal, sys, threading, time, types
from swjax.training.faults import interrupt as module
module.time = types.SimpleNamespace(monotonic=lambda: next(times))
"""


def test_second_interrupt_ends_at_once():
    done = ended(f"""{CLOCK}
times = iter((1.0, 1.2, 2.0))
with module.catch() as interrupt:
    interrupt.handle()
    for kind in (signal.SIGINT, signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.raise_signal(kind)  # a launcher and a shutdown send several
        assert interrupt.requested
    print("not ended", flush=True)
    signal.raise_signal(signal.SIGINT)
    time.sleep(60)
""")
    assert done.returncode == 130
    assert b"again" in done.stdout and b"not ended" in done.stdout


def test_an_interrupt_while_xla_compiles_is_answered_at_once():
    """The main thread runs no handler while it waits in C++, as for a compilation: here for a lock."""
    done = ended(f"""{CLOCK}
times = iter((1.0, 2.0))
with module.catch() as interrupt:
    interrupt.handle()
    def press():
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        while not interrupt.requested: time.sleep(0.01)
        print("requested", file=sys.__stdout__, flush=True)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    threading.Thread(target=press).start()
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)  # 0: an unlocked mutex
    libc.pthread_mutex_lock(mutex), libc.pthread_mutex_lock(mutex)  # waits through signals
""")
    assert done.returncode == 130
    line = b"swjax: saving after this step or compilation; Ctrl-C again ends at once"
    assert {line, b"requested"} <= set(done.stdout.splitlines())


@pytest.mark.parametrize("kind", thinning.first([signal.SIGINT, signal.SIGTERM]))
def test_a_signal_before_the_first_step_ends_at_once(kind):
    done = ended(f"""
import signal, time
from swjax.training.faults.interrupt import catch
signal.signal(signal.SIGINT, signal.SIG_DFL)  # as train.py
with catch():
    signal.raise_signal({int(kind)})
    time.sleep(60)
""")
    assert (done.returncode, done.stderr) == (-kind, b"")


def test_a_notebook_survives_an_interrupt_before_the_first_step():
    """Where Python's own handler was installed, Ctrl-C raises KeyboardInterrupt."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), catch():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.release
def test_a_workdir_that_disappears_ends_the_run(started, tmp_path):
    process = started(checkpoint__every_steps=100_000)
    tmp_path.rename(tmp_path.with_name(f"{tmp_path.name}-moved"))
    _, errors = process.communicate(timeout=180)
    assert process.returncode == 3
    assert "must stay in place" in errors.splitlines()[-1] and "Traceback" not in errors
    assert not tmp_path.exists()
