"""Runs tests marked `eight_devices` in a process that has eight CPU devices; pytest's own process has two.

Each pytest process starts one such process with its first marked test. That process collects the marked
tests, runs those that pytest requests, and sends their reports back.
"""

import functools
import os
import subprocess
import sys
import tempfile
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol

HERE = Path(__file__).parent
SOCKET = "SWJAX_TEST_SOCKET"  # environment variable with the address of the connection


def run(item: pytest.Item) -> list[pytest.TestReport]:
    """Runs a test in the process; returns the reports of its set-up, call and tear-down."""
    connection, _ = _process()
    connection.send(item.nodeid)
    try:
        reports = connection.recv()
    except EOFError:
        pytest.exit(f"the process with eight devices ended in {item.nodeid}", returncode=3)
    from_data = item.config.hook.pytest_report_from_serializable
    return [from_data(config=item.config, data=data) for data in reports]


def stop() -> None:
    """Ends the process if it was started."""
    if _process.cache_info().currsize:
        connection, process = _process()
        connection.close()
        process.wait()


@functools.cache
def _process() -> tuple[Connection, subprocess.Popen]:
    """Starts the process; returns the connection and it. It ends when the connection closes."""
    address = str(Path(tempfile.mkdtemp()) / "socket")
    environment = os.environ | {
        SOCKET: address,
        # XLA uses the last of repeated flags
        "XLA_FLAGS": os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # compilation dominates the time of the tests
    }
    for name in [name for name in environment if name.startswith("PYTEST_")]:
        del environment[name]  # otherwise xdist takes the process for one of its workers
    options = ["-q", "-m", "eight_devices", "-p", "no:cacheprovider", "-p", "device_process"]
    files = map(str, sorted(HERE.glob("test_sharded_*.py")))
    with Listener(address) as listener:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *files],
            env=environment | {"PYTHONPATH": str(HERE)},
            cwd=HERE.parent,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        return listener.accept(), process


def is_serving() -> bool:
    """Whether this code runs in the process with eight devices."""
    return SOCKET in os.environ


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """In the process with eight devices: runs the requested tests until its input ends."""
    if not is_serving():
        return None
    items = {item.nodeid: item for item in session.items}
    to_data = session.config.hook.pytest_report_to_serializable
    with Client(os.environ[SOCKET]) as connection:
        while True:
            try:
                item = items[connection.recv()]
            except EOFError:
                return True
            reports = runtestprotocol(item, log=False, nextitem=None)
            connection.send([to_data(config=session.config, report=each) for each in reports])
