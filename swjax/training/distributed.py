"""One run as several processes: how they connect and agree on their config.

Start the same command once for each GPU (docs/scaling.md). Each process computes on its own devices and
reads its own part of the data; process 0 alone writes files and prints.
"""

import contextlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from ml_collections import ConfigDict

from swjax.training import lost_peers
from swjax.training.config import differences, to_json
from swjax.training.errors import ConfigError, RunError

# Of launchers whose processes JAX finds itself: the number of them, and by what JAX knows the launcher.
_DETECTED = (
    ("SLURM_NTASKS", "SLURM_STEP_NODELIST"),  # a step of srun; a batch script is alone
    ("OMPI_COMM_WORLD_SIZE", "OMPI_MCA_orte_hnp_uri"),  # Open MPI up to version 4
)
# Other MPIs set fewer variables: the package mpi4py asks them.
_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_PLAIN = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
# Seconds without a sign of life after which a process counts as dead, and the others end; and that one
# which fails waits for the others. Together less than a minute.
_HEARTBEAT, _SHUTDOWN = 30, 20
_SILENCE = 5  # seconds of waiting for the others until this process says so
# Messages of collectives and of JAX's service when a process has ended: the errors have one type, no code.
_LOST = (
    r"Gloo|NCCL|nccl|Connection (reset|closed)|UNAVAILABLE|DEADLINE_EXCEEDED|coordination service"
)


def start() -> None:
    """Joins the other processes of this run, if it was started as one of several; else does nothing.

    Call it before anything asks JAX for its devices. If `jax.distributed` is initialized already, it is used
    as it is.

    Raises:
      ConfigError: the environment says that there are several, but not enough to find them.
    """
    if jax.distributed.is_initialized():
        return
    arguments = read_environment(os.environ)
    if arguments is None:
        return
    with _said_after(_SILENCE, f"train.py: {_waiting(arguments)}"):
        timeouts: dict[str, Any] = {
            "heartbeat_timeout_seconds": _HEARTBEAT,
            "shutdown_timeout_seconds": _SHUTDOWN,
        }
        jax.distributed.initialize(**arguments, **timeouts)
    lost_peers.watch(f"train.py: {_lost('it gives no sign of life')}")


@contextlib.contextmanager
def _said_after(seconds: float, line: str):
    """Prints a line if its body takes longer."""
    timer = threading.Timer(seconds, lambda: print(line, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _waiting(arguments: Mapping) -> str:
    """The process that a process waits for at its start, and its address.

    >>> _waiting({"process_id": 1, "num_processes": 2, "coordinator_address": "node1:1234"})
    'process 1 of 2 waits for process 0 at node1:1234'
    """
    if "process_id" not in arguments:
        return "this process waits for the others that its launcher names"
    index, count = arguments["process_id"], arguments["num_processes"]
    others = "process 0" if index else "process 1" if count == 2 else f"processes 1 to {count - 1}"
    return f"process {index} of {count} waits for {others} at {arguments['coordinator_address']}"


def _lost(reason: str) -> str:
    return (
        f"process {jax.process_index()} of {jax.process_count()} lost another one: {reason}; see what the "
        f"others say, then start all again: they go on from the last checkpoint"
    )


# These may differ between machines; every other key decides what the processes compute or when they meet.
_LOCAL = ("data.dir:", "data.workers:", "train.compilation_cache:")


def check_same_config(config: ConfigDict) -> None:
    """Checks that all processes were started with the config of process 0.

    Raises:
      ConfigError: in a process with another one: the keys that differ; in the rest: which process it is.
    """
    own = to_json(config)
    first = bytes(of_first(list(own.encode()))).decode()
    with all_or_none():
        found = differences(json.loads(first), json.loads(own))
        found = [change for change in found if not change.startswith(_LOCAL)]
        if found:
            raise ConfigError(
                f"process {jax.process_index()} has another config than process 0: "
                f"{'; '.join(found[:3])}: start all processes with the same command"
            )


def read_environment(environment: Mapping[str, str]) -> dict | None:
    """The arguments of `jax.distributed.initialize`; None: this process is alone.

    Args:
      environment: JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, or what SLURM's srun or
        an MPI sets.

    Raises:
      ConfigError: something is missing, or is no number.

    >>> read_environment({"SLURM_STEP_NODELIST": "gpu[01-04]", "SLURM_NTASKS": "32"})
    {}
    >>> read_environment({"SLURM_NTASKS": "1", "SLURM_STEP_NODELIST": "gpu01"}) is None
    True
    """
    given = [name for name in _PLAIN if environment.get(name)]
    if "JAX_NUM_PROCESSES" in given or "JAX_PROCESS_ID" in given:
        return _plain(environment, given)
    for size, other in _DETECTED:
        if other in environment and _number(environment, size) > 1:
            return {}
    if sizes := [size for size in _MPI_SIZES if _number(environment, size) > 1]:
        if find_spec("mpi4py") is None:
            raise ConfigError(
                f"{sizes[0]}={environment[sizes[0]]} processes of an MPI need the package mpi4py to find "
                f"each other: pip install mpi4py, or set {', '.join(_PLAIN)} for each"
            )
        return {"cluster_detection_method": "mpi4py"}
    if given:
        return _plain(environment, given)
    return None


def _plain(environment: Mapping[str, str], given: list[str]) -> dict | None:
    missing = [name for name in _PLAIN if name not in given]
    if missing:
        raise ConfigError(
            f"{' and '.join(given)} set but not {' and '.join(missing)}: every process needs the host:port "
            f"of process 0, the number of processes, and its own number from 0"
        )
    address, *numbers = _PLAIN
    count, index = (_number(environment, name) for name in numbers)
    if not 0 <= index < count:
        raise ConfigError(
            f"JAX_PROCESS_ID={index} must be at least 0 and below JAX_NUM_PROCESSES={count}"
        )
    if count == 1:
        return None
    return {
        "coordinator_address": environment[address],
        "num_processes": count,
        "process_id": index,
        "cluster_detection_method": "deactivate",
    }


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "0")
    if not text.isdigit():
        raise ConfigError(f"{name}={text!r} must be a whole number")
    return int(text)


@contextlib.contextmanager
def blame_peers() -> Iterator[None]:
    """Reports in one line that another process of the run has ended."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1 or not re.search(_LOST, str(error)):
            raise
        lost_peers.told()
        raise RunError(_lost(" ".join(str(error).split())[:160])) from error


def leave(code: int) -> int:
    """Ends a process whose run failed, if it is one of several: the others may have ended.

    Returns:
      `code`, if it is alone.
    """
    if not jax.distributed.is_initialized():
        return code
    lost_peers.finish()
    sys.stdout.flush()
    sys.stderr.flush()
    if is_first():
        # When the service of process 0 ends, JAX aborts those that have not reported their error.
        time.sleep(1)
    os._exit(code)  # an orderly end would wait for all, and abort when they do not come


def is_first() -> bool:
    """Whether this is the process that writes files and prints."""
    return jax.process_index() == 0


@contextlib.contextmanager
def all_or_none() -> Iterator[None]:
    """If its body fails in one process, it fails in all, after all have reached it: no process waits in vain.

    The body itself must not wait for other processes.

    Raises:
      Exception: in the first process that failed, its own error, which it alone reports.
      ConfigError: in the others, if that one's is; RunError: if it is anything else.
    """
    error = None
    try:
        yield
    except Exception as caught:  # any error, so that the others do not wait
        error = caught
    own = 0 if error is None else 2 if isinstance(error, ConfigError) else 1
    kinds = all_processes(np.array([own], np.int64))[:, 0]
    teller = int(np.argmax(kinds))
    if jax.process_index() == teller and error is not None:
        raise error
    if kinds.any():
        kind = ConfigError if kinds.max() == 2 else RunError
        raise kind(f"process {teller} could not go on: see there what it says") from error


def first_does(action: Callable[[], object]) -> None:
    """Runs `action` in process 0 while the others wait; where it fails, all fail, see `all_or_none`."""
    with all_or_none():
        if is_first():
            action()


def of_first(numbers: list[int]) -> list[int]:
    """The list that process 0 has, on all."""
    count = int(all_processes(np.array([len(numbers)], np.int64))[0, 0])
    padded = (numbers + count * [0])[:count]
    return all_processes(np.array(padded, np.int64))[0].tolist() if count else []


def all_processes(own: np.ndarray) -> np.ndarray:
    """int64 [n] of every process as [processes, n] on each; JAX would cut it to int32."""
    return np.asarray(multihost_utils.process_allgather(own.view(np.int32))).view(np.int64)


def shall_stop(step: int, requested: bool) -> bool:
    """Whether all processes stop after this step; all must ask after each.

    Args:
      step: the number of finished steps.
      requested: whether the only process of a run was asked to stop. For several, JAX watches SIGTERM: a
        second or two after any of them received it, all get the same step.
    """
    if jax.process_count() == 1:
        return requested
    return multihost_utils.reached_preemption_sync_point(step)
