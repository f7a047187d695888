"""Loader processes: chunks do not depend on which process makes them; no process or memory is leaked."""

import itertools
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from collections import deque
from multiprocessing.context import SpawnProcess
from pathlib import Path

import numpy as np
import pytest
import thinning

from swjax import data
from swjax.data import batches
from swjax.data.processes import LostProcess, Processes

LARGE = 2**16  # bytes of an example


class Rows:
    """Examples that contain their index. A process that makes one creates a file in `folder`, if given."""

    def __init__(self, count, bad=(), folder=None):
        self._count, self._bad, self._folder = count, bad, folder

    def __len__(self):
        return self._count

    def __getitem__(self, index):
        if index in self._bad:
            raise ArithmeticError(f"row {index} cannot be made")
        if self._folder and multiprocessing.parent_process():
            (Path(self._folder) / str(os.getpid())).touch()
        number = np.full(LARGE, index % 251, np.uint8)
        maker = np.int64(os.getpid())
        return {
            "number": number,
            "index": np.int64(index),
            "ok": np.bool_(index % 2),
            "maker": maker,
        }


def chunks_of(rows, **options):
    return Processes(rows, **({"chunk": 2, "count": 2, "held": 2} | options))


def check(chunk, number):
    """Asserts that this is the `number`-th chunk of two examples."""
    index = np.arange(2 * number, 2 * number + 2)
    np.testing.assert_array_equal(chunk["index"], index)
    np.testing.assert_array_equal(chunk["ok"], index % 2 == 1)
    assert chunk["number"].shape == (2, LARGE)
    np.testing.assert_array_equal(chunk["number"], np.repeat(index % 251, LARGE).reshape(2, LARGE))


def test_what_is_left_over_is_no_chunk():
    chunks = chunks_of(Rows(41), count=1)
    for number in range(20):
        check(next(chunks), number)
    with pytest.raises(StopIteration):
        next(chunks)
    chunks.close()
    with pytest.raises(StopIteration):
        next(chunks)


@pytest.mark.release
def test_processes_start_at_the_same_time(monkeypatch):
    """Starting a process writes its arguments to a pipe. More than 64 KB would wait until it reads them."""
    start, sizes = SpawnProcess.start, []

    def noted(self):
        sizes.append(len(pickle.dumps(self._args[1:])))
        start(self)

    monkeypatch.setattr(SpawnProcess, "start", noted)
    rows = Rows(8)
    rows.large = bytes(2**20)
    chunks = chunks_of(rows)
    check(next(chunks), 0)
    chunks.close()
    assert len(sizes) == 2 and max(sizes) < 1000


def test_none_of_no_chunk():
    assert list(chunks_of(Rows(1))) == []


@pytest.mark.release
def test_chunks_that_are_kept_stay_as_they_are():
    chunks = chunks_of(Rows(80), count=1, held=1)
    kept = list(chunks)
    assert len(kept) == 40
    for number, chunk in enumerate(kept):
        check(chunk, number)


@pytest.mark.release
def test_memory_is_used_again():
    chunks = chunks_of(Rows(200), count=1, held=1)
    places = set()
    for _ in range(100):
        chunk = next(chunks)
        places.add(chunk["number"].ctypes.data)
        del chunk
    assert len(places) <= 5
    chunks.close()


class SlowStart(Rows):
    """Row 0 is made only after row 19."""

    def __getitem__(self, index):
        last = Path(self._folder) / "row 19"
        if index == 19:
            last.touch()
        deadline = time.monotonic() + 60
        while index == 0 and multiprocessing.parent_process() and not last.exists():
            assert time.monotonic() < deadline, "row 19 waits for row 0"
            time.sleep(0.01)
        return super().__getitem__(index)


@pytest.mark.release
def test_a_slow_process_makes_fewer(tmp_path):
    chunks = chunks_of(SlowStart(40, folder=str(tmp_path)))
    makers = []
    for number in range(20):
        check(chunk := next(chunks), number)
        makers += chunk["maker"][:1].tolist()
    slow, quick = makers[:2]
    assert makers[:10] == [slow, quick, slow, *[quick] * 7]  # two were assigned at the start
    chunks.close()


@pytest.mark.release
def test_they_give_way_to_the_process_that_asks():
    own = os.getpriority(os.PRIO_PROCESS, 0)
    chunks = chunks_of(Rows(8))
    for maker in {maker for chunk in chunks for maker in chunk["maker"].tolist()}:
        assert os.getpriority(os.PRIO_PROCESS, maker) == min(own + 5, 19)
    chunks.close()


def test_says_what_went_wrong_in_a_process():
    chunks = chunks_of(Rows(20, bad=[9]), count=1)
    with pytest.raises(RuntimeError, match="(?s)a loader process failed.*row 9 cannot be made"):
        list(chunks)
    assert next(chunks, None) is None  # the iteration has ended and does not hang


def test_an_example_unlike_the_first_is_refused():
    class Odd(Rows):
        def __getitem__(self, index):
            row = super().__getitem__(index)
            return row | ({"index": np.int32(index)} if index == 3 else {})

    with pytest.raises(RuntimeError, match="Cannot cast"):
        list(chunks_of(Odd(20), count=1))


def children():
    return {child for child in multiprocessing.active_children() if child.is_alive()}


def test_a_killed_process_is_named_and_the_others_end():
    before = children()
    chunks = chunks_of(Rows(10**9))
    next(chunks)
    victim, *_ = mine = children() - before
    os.kill(victim.pid, signal.SIGKILL)
    message = f"loader process {victim.pid} ended with exit code -9 .killed, probably because"
    with pytest.raises(LostProcess, match=message):
        deque(chunks, maxlen=0)
    chunks.close()
    assert not any(child.is_alive() for child in mine)


@pytest.mark.parametrize("kind", thinning.first([signal.SIGINT, signal.SIGTERM, signal.SIGHUP]))
def test_signals_leave_them_at_work_and_they_end_when_they_are_forgotten(kind, tmp_path):
    before = children()
    chunks = chunks_of(Rows(10**9, folder=str(tmp_path)))
    for number in itertools.count():
        check(next(chunks), number)
        if len(list(tmp_path.iterdir())) == 2:  # both processes have started
            break
    mine = children() - before
    for child in mine:
        os.kill(child.pid, kind)
    for more in range(1, 100):
        check(next(chunks), number + more)
    del chunks
    assert len(mine) == 2 and not any(child.is_alive() for child in mine)


@pytest.mark.release
def test_a_script_that_starts_them_again_and_again_is_told(tmp_path):
    script = """
from swjax import data
source = data.source("synthetic", "train", image_size=16, examples=8)
next(data.loader(source, batch_size=8, image_size=16, workers=1))
"""
    (tmp_path / "script.py").write_text(script)
    command = [sys.executable, str(tmp_path / "script.py")]
    path = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=path, capture_output=True, text=True, timeout=120)
    last = done.stderr.splitlines()[-1]
    assert "exit code 1: see its output" in last and 'below `if __name__ == "__main__":`' in last


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


class Stuck(Rows):
    """Rows after the first chunk take an hour."""

    def __getitem__(self, index):
        if index >= 2:
            time.sleep(3600)
        return super().__getitem__(index)


@pytest.mark.parametrize(
    "end, rows",
    thinning.kept(
        itertools.product(
            ["os.kill(os.getpid(), signal.SIGKILL)", "sys.exit()"], ["Rows", "Stuck"]
        ),
        [("os.kill(os.getpid(), signal.SIGKILL)", "Stuck")],
    ),
)
def test_they_end_with_the_process_that_asked(end, rows):
    script = f"""
import multiprocessing, os, signal, sys
from test_data_processes import Rows, Stuck, chunks_of

if __name__ == "__main__":
    chunks = chunks_of({rows}(10_000))
    next(chunks)
    print(*[child.pid for child in multiprocessing.active_children()], flush=True)
    {end}
"""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2, done.stderr
    assert "Traceback" not in done.stderr
    deadline = time.monotonic() + 60
    while any(map(runs, pids)):
        assert time.monotonic() < deadline, "loader processes still run"
        time.sleep(0.1)


@pytest.mark.release
def test_no_more_processes_than_cores(monkeypatch, caplog):
    monkeypatch.setattr(batches.os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    source = data.source("synthetic", "val", image_size=16, classes=7, examples=8)
    before = children()
    loader = data.loader(
        source, batch_size=4, train=False, context_length=6, image_size=16, workers=100_000
    )
    assert len(children() - before) == 2
    assert (
        "workers=100000 is more than the 2 cores of this machine: 2 processes load" in caplog.text
    )
    assert next(loader)["index"].tolist() == [0, 1, 2, 3]
    loader.close()
