"""Runs as several processes: how they connect and agree on their config.

Start the same command once for each GPU (docs/scaling.md). Each process computes on its own devices and
reads its own shard of the data; only process 0 writes files and prints.
"""

import contextlib
import functools
import json
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from ml_collections import ConfigDict

from swjax.safe_files import mask_credentials, one_line
from swjax.training.config import differences
from swjax.training.faults import lost_peers
from swjax.training.faults.errors import ConfigError, RunError
from swjax.training.log.environment import PACKAGES, version

# Launchers that JAX detects: the variable with the number of processes, and the variable that JAX checks.
_DETECTED = (
    ("SLURM_NTASKS", "SLURM_STEP_NODELIST"),  # set in srun steps, but not in a batch script
    ("OMPI_COMM_WORLD_SIZE", "OMPI_MCA_orte_hnp_uri"),  # Open MPI up to version 4
)
# Other MPIs set fewer variables, so the package mpi4py has to query them.
_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_PLAIN = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
# A process counts as dead after _HEARTBEAT seconds of silence, and then the others end. A process that fails
# waits _SHUTDOWN seconds for the others. The sum is less than a minute.
_HEARTBEAT, _SHUTDOWN = 30, 20
_SILENCE = 5  # seconds of waiting before a process prints what it waits for


def start() -> None:
    """Joins the other processes of the run if the environment names several; otherwise does nothing.

    Call it before anything asks JAX for its devices. If `jax.distributed` is already initialized, the
    function keeps that connection.

    Raises:
      ConfigError: the environment names several processes, but lacks the values needed to connect them.
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
    lost_peers.watch(f"train.py: {_lost('it no longer responds')}")


@contextlib.contextmanager
def _said_after(seconds: float, line: str):
    """Prints a line if the body of the `with` statement takes longer than `seconds`."""
    timer = threading.Timer(seconds, lambda: print(line, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _waiting(arguments: Mapping) -> str:
    """Describes which process this one waits for at start-up, and the address.

    >>> _waiting({"process_id": 1, "num_processes": 2, "coordinator_address": "node1:1234"})
    'process 1 of 2 waits for process 0 at node1:1234'
    """
    if "process_id" not in arguments:
        return "this process waits for the other processes of its launcher"
    index, count = arguments["process_id"], arguments["num_processes"]
    others = "process 0" if index else "process 1" if count == 2 else f"processes 1 to {count - 1}"
    return f"process {index} of {count} waits for {others} at {arguments['coordinator_address']}"


def _lost(reason: str) -> str:
    return (
        f"process {jax.process_index()} of {jax.process_count()} lost another process: {reason}; see the "
        f"output of the others, then restart all: they resume from the last checkpoint"
    )


# These keys may differ between machines. All other keys affect results or synchronization points.
_LOCAL = ("data.dir:", "data.workers:", "train.compilation_cache:")
# So may these flags of JAX and XLA. All others may change the program, and with it the values of replicas.
_LOCAL_FLAGS = re.compile(
    r"cache|log|dump|trace|pprint|visible_devices|timeout|address|device_count|cpu_devices|platform|mock"
)


def check_same_start(config: ConfigDict) -> None:
    """Checks that all processes compute the same program: devices, config, software and flags.

    Raises:
      ConfigError: processes have different numbers of devices; or a process differs from process 0. That
        process names what differs; the others name the process.
    """
    counts = Counter(device.process_index for device in jax.devices())
    for index in range(jax.process_count()):
        if counts[index] != counts[0]:  # `process_allgather` needs equal numbers
            raise ConfigError(
                f"process {index} has {counts[index]} devices and process 0 has {counts[0]}: give all "
                "processes the same number of devices"
            )
    own = json.dumps({"config": config.to_dict(), "environment": _environment()})
    first = json.loads(bytes(of_first(list(own.encode()))))
    with all_or_none():
        mine = json.loads(own)
        changed = differences(first["config"], mine["config"])
        found = [f"config.{change}" for change in changed if not change.startswith(_LOCAL)]
        found += differences(first["environment"], mine["environment"])
        if found:
            raise ConfigError(
                f"process {jax.process_index()} differs from process 0 in "
                f"{mask_credentials('; '.join(found[:3]))}: start all processes with the same command, "
                "software and environment"
            )


def _environment() -> dict[str, Any]:
    """What determines the program that JAX builds, besides the config."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    return {
        "jax.config": {
            name: value if isinstance(value, str | int | float) else repr(value)
            for name, value in jax.config.values.items()
            if not _LOCAL_FLAGS.search(name)
        },
        "XLA_FLAGS": sorted(flag for flag in flags if not _LOCAL_FLAGS.search(flag)),
        "version": {name: version(name) for name in PACKAGES},
        "devices": jax.local_devices()[0].device_kind,
    }


def check_same(key: str, what: str, numbers: Mapping[str, int]) -> None:
    """Checks that data sets agree in every process, since processes share the examples by position.

    Args:
      key: the config key that names the data.
      what: describes a number, such as "{} examples".
      numbers: a number of each data set in this process; all processes have the same names.

    Raises:
      ConfigError: names the first data set whose number differs, and the process.
    """
    if not numbers:
        return
    of_all = all_processes(np.array(list(numbers.values()), np.int64))
    for name, counts in zip(numbers, of_all.T.tolist(), strict=True):
        other = next((i for i, count in enumerate(counts) if count != counts[0]), None)
        if other is not None:
            raise ConfigError(
                f"config.{key}: {name} has {what.format(counts[other])} for process {other} and "
                f"{what.format(counts[0])} for process 0: give all processes the same files"
            )


def read_environment(environment: Mapping[str, str]) -> dict | None:
    """The arguments of `jax.distributed.initialize`, or None for a single process.

    Args:
      environment: has JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, or the variables that
        SLURM's srun or an MPI sets.

    Raises:
      ConfigError: a variable is missing or is not a number.

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
    """Re-raises an error that shows the end of another process, as a one-line RunError."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1 or not lost_peers.is_loss(str(error), of="error"):
            raise
        lost_peers.told()
        raise RunError(_lost(one_line(error)[:160])) from error


def leave(code: int) -> int:
    """Ends the process of a failed run if it is one of several, because the other processes may have ended.

    Returns:
      `code`, if this is the only process.
    """
    if not jax.distributed.is_initialized():
        return code
    lost_peers.finish()
    sys.stdout.flush()
    sys.stderr.flush()
    if is_first():
        # When process 0's service ends, JAX aborts processes that have not reported their error yet.
        time.sleep(1)
    os._exit(code)  # a normal exit waits for all processes and aborts without them


def is_first() -> bool:
    """Whether this is the process that writes files and prints."""
    return jax.process_index() == 0


@contextlib.contextmanager
def all_or_none() -> Iterator[None]:
    """If the body fails in one process, raises in all processes after all have run it.

    The body itself must not wait for other processes.

    Raises:
      Exception: the first process that failed raises its own error, and is the only one to report it.
      ConfigError: the other processes raise it if the first error is a ConfigError, else a RunError.
    """
    error = None
    try:
        yield
    except Exception as caught:  # every error must reach the other processes
        error = caught
    own = 0 if error is None else 2 if isinstance(error, ConfigError) else 1
    kinds = all_processes(np.array([own], np.int64))[:, 0]
    teller = int(np.argmax(kinds))
    if jax.process_index() == teller and error is not None:
        raise error
    if kinds.any():
        kind = ConfigError if kinds.max() == 2 else RunError
        raise kind(f"process {teller} failed: see the output of that process") from error


def first_does(action: Callable[[], object]) -> None:
    """Runs `action` in process 0 while the others wait; a failure raises in all, see `all_or_none`."""
    with all_or_none():
        if is_first():
            action()


def of_first(numbers: list[int]) -> list[int]:
    """Broadcasts the list of process 0 to all processes."""
    count = int(all_processes(np.array([len(numbers)], np.int64))[0, 0])
    padded = (numbers + count * [0])[:count]
    return all_processes(np.array(padded, np.int64))[0].tolist() if count else []


def all_processes(own: np.ndarray) -> np.ndarray:
    """Gathers int64 [n] of every process into [processes, n] on each process, without JAX's cast to int32."""
    return np.asarray(multihost_utils.process_allgather(own.view(np.int32))).view(np.int64)


def several() -> bool:
    """Whether the run has several processes."""
    return jax.process_count() > 1


def all_say(own: bool, mesh: jax.sharding.Mesh) -> jax.Array:
    """Starts to compute on the devices whether all processes pass True; all processes must call it.

    Args:
      own: the answer of this process.
      mesh: mesh of all devices.

    Returns:
      bool [], replicated. The call does not wait for it; `bool` of it does.
    """
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(mesh.axis_names))
    answers = jax.make_array_from_callback((mesh.size,), spread, lambda _: np.array([own]))
    return _all(jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))(answers)


@functools.cache
def _all(everywhere: jax.sharding.NamedSharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(jnp.all, out_shardings=everywhere)


def should_stop(step: int, requested: bool) -> bool:
    """Whether all processes stop after this step. All processes must call it after each step.

    Args:
      step: the number of finished steps.
      requested: whether the only process of a run was asked to stop. In a run of several processes, JAX
        watches SIGTERM instead: all get the same step, a second or two after any of them receives it.
    """
    if jax.process_count() == 1:
        return requested
    return multihost_utils.reached_preemption_sync_point(step)
