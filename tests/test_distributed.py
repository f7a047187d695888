"""Runs of several processes: how they start, agree and stop; losses equal those of one process."""

import contextlib
import json
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from micro_run import ENVIRONMENT, ROOT, command_of, final_state, records, train
from photographs import encoded, photograph
from processes import two_processes

from swjax import data
from swjax.models import sharding
from swjax.training import distributed, inputs, setup
from swjax.training.config import ConfigError
from swjax.training.distributed import read_environment
from swjax.training.log.timing import Timing
from swjax.training.state.checkpoint import Checkpoints
from swjax.training.state.restore import require_equal_replicas

PLAIN = {"JAX_COORDINATOR_ADDRESS": "node1:1234", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
SLURM = {"SLURM_STEP_NODELIST": "node[1-2]", "SLURM_NTASKS": "2", "SLURM_PROCID": "1"}
OPEN_MPI_4 = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:1"}


def test_start_is_read_from_the_environment():
    assert read_environment({}) is None
    assert read_environment(PLAIN) == {
        "coordinator_address": "node1:1234",
        "num_processes": 2,
        "process_id": 1,
        "cluster_detection_method": "deactivate",
    }
    assert read_environment(SLURM) == read_environment(OPEN_MPI_4) == {}  # JAX detects the rest
    assert read_environment(SLURM | {"JAX_COORDINATOR_ADDRESS": "node1:1234"}) == {}
    for alone in ({"SLURM_NTASKS": "4"}, SLURM | {"SLURM_NTASKS": "1"}, {"PMI_SIZE": "1"}):
        assert read_environment(alone) is None
    assert read_environment(PLAIN | {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}) is None


@pytest.mark.parametrize(
    "environment, message",
    [
        ({"JAX_PROCESS_ID": "0"}, "not JAX_COORDINATOR_ADDRESS and JAX_NUM_PROCESSES"),
        ({"JAX_COORDINATOR_ADDRESS": "a:1"}, "not JAX_NUM_PROCESSES and JAX_PROCESS_ID"),
        (PLAIN | {"JAX_PROCESS_ID": "2"}, "JAX_PROCESS_ID=2 must be at least 0 and below"),
        (PLAIN | {"JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES='two' must be a whole number"),
    ],
)
def test_start_names_what_is_missing(environment, message):
    with pytest.raises(ConfigError, match=message):
        read_environment(environment)


def test_start_by_an_mpi_that_only_mpi4py_knows(monkeypatch):
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):  # Open MPI 5; MPICH, Intel MPI
        monkeypatch.setattr("swjax.training.distributed.find_spec", lambda name: object())
        assert read_environment({name: "8"}) == {"cluster_detection_method": "mpi4py"}
        monkeypatch.setattr("swjax.training.distributed.find_spec", lambda name: None)
        with pytest.raises(ConfigError, match=f"{name}=8 .* need the package mpi4py"):
            read_environment({name: "8"})


def mesh_of(data, fsdp, tensor, devices_each):
    """Returns a stand-in for a mesh of processes with this many devices each."""
    processes = np.arange(data * fsdp * tensor) // devices_each
    devices = np.array([SimpleNamespace(process_index=int(p)) for p in processes], object)
    return SimpleNamespace(
        devices=devices.reshape(data, fsdp, tensor),
        shape={"data": data, "fsdp": fsdp, "tensor": tensor},
        local_devices=devices[:devices_each],
    )


@pytest.mark.parametrize(
    "sizes, devices_each, shares",
    [
        ((2, 2, 1), 1, [(0, 4), (1, 4), (2, 4), (3, 4)]),
        ((2, 2, 1), 2, [(0, 2), (1, 2)]),
        ((1, 2, 2), 2, [(0, 2), (1, 2)]),  # tensor within a process
        ((1, 2, 2), 1, [(0, 2), (0, 2), (1, 2), (1, 2)]),  # tensor over two processes
        ((1, 1, 4), 2, [(0, 1), (0, 1)]),
    ],
)
def test_every_process_reads_the_rows_of_its_devices(sizes, devices_each, shares):
    mesh = mesh_of(*sizes, devices_each)
    found = [sharding.batch_share(mesh, process) for process in range(len(shares))]
    assert [(share.index, share.count) for share in found] == shares
    for process, share in enumerate(found):
        assert share.readers[share.index] == process
        assert [found[p].index for p in share.readers] == list(range(share.count))


def test_rows_that_overlap_or_alternate_are_one_line():
    alternating = mesh_of(2, 2, 1, 2)
    alternating.devices = alternating.devices.transpose(1, 0, 2)
    for mesh in (mesh_of(1, 2, 3, 2), alternating):
        with pytest.raises(ValueError, match="make tensor a divisor or a multiple of the 2"):
            sharding.batch_share(mesh, 0)


def test_devices_are_ordered_by_process(monkeypatch):
    """TPUs are numbered by position: evaluation assigned the rows of one process to another."""
    devices = [SimpleNamespace(process_index=i % 2) for i in range(4)]
    monkeypatch.setattr("jax.devices", lambda: devices)
    monkeypatch.setattr(sharding, "Mesh", lambda devices, axes: devices)
    assert [d.process_index for d in sharding.make_mesh().ravel()] == [0, 0, 1, 1]


def test_processes_with_other_data_end_in_one_line(monkeypatch):
    """They would train on some examples twice and on others never, and wait for each other in evaluation."""
    lengths = {"train": 60, "val": 13}
    distributed.check_same("data", "{} examples", lengths)
    distributed.check_same("eval.zeroshot", "{} examples", {})
    monkeypatch.setattr(distributed, "all_processes", lambda own: np.stack([own, own - [0, 1]]))
    with pytest.raises(ConfigError, match="config.data: val .* process 1 and 13 .* process 0"):
        distributed.check_same("data", "{} examples", lengths)
    monkeypatch.setattr(distributed, "all_processes", lambda own: np.stack([own, own - own]))
    splits = {"train": data.source("synthetic", "train", image_size=8, examples=10)}
    with pytest.raises(ConfigError, match="train has other examples .* 1 and other .* process 0"):
        inputs.fingerprints(splits)


def test_processes_that_would_compute_other_programs_end_in_one_line(micro, monkeypatch):
    """JAX's generator, 64-bit types and the partitioning of random numbers changed replicas, or aborted."""
    config, send = micro(), distributed.of_first
    distributed.check_same_start(config)
    with jax.default_prng_impl("rbg"):
        sent = []
        monkeypatch.setattr(distributed, "of_first", lambda own: [sent.append(own), send(own)][1])
        distributed.check_same_start(config)
    monkeypatch.setattr(distributed, "of_first", lambda own: sent[0])
    rule = "process 0 differs from process 0 in jax.config.jax_default_prng_impl: .*rbg.* -> .*same"
    with pytest.raises(ConfigError, match=rule):
        distributed.check_same_start(config)
    unequal = [SimpleNamespace(process_index=int(i > 1)) for i in range(8)]
    monkeypatch.setattr(jax, "devices", lambda: unequal)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match="process 1 has 6 devices and process 0 has 2: give all"):
        distributed.check_same_start(config)


def test_replicas_that_differ_are_refused(monkeypatch):
    """Two processes initialized a replicated kernel with two generators, and trained to the end."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(distributed, "all_processes", lambda own: np.stack([own, own]))
    everywhere = jax.NamedSharding(sharding.make_mesh(), jax.P())
    bias, ones = (jax.device_put(jnp.full(3, x), everywhere) for x in (0.0, 1.0))
    state = {"params": {"bias": bias, "kernel": ones}}
    require_equal_replicas(state)
    refused = pytest.raises(ConfigError, match="1 of 2 arrays .* replicas, such as params/kernel: ")
    pieces = [jax.device_put(jnp.full(3, i), device) for i, device in enumerate(jax.devices())]
    unequal = jax.make_array_from_single_device_arrays((3,), everywhere, pieces)
    with refused:  # between the devices of one process
        require_equal_replicas({"params": {"bias": bias, "kernel": unequal}})
    shift = np.array([0, 0, 1, 1])
    monkeypatch.setattr(distributed, "all_processes", lambda own: np.stack([own, own + shift]))
    with refused:  # between processes
        require_equal_replicas(state)


# --------------------------------------------------------------------------- other meshes

CHANGES = {
    "model.recipe": "standard",
    "optimizer.learning_rate": 1e-4,
    "train.steps": 10**6,
    "checkpoint.every_steps": 0,
}


def assert_same_losses(got, want):
    assert [r["step"] for r in got] == [r["step"] for r in want]
    for name in ("train/loss", "train/grad_norm", "train/update_norm", "data/skipped"):
        np.testing.assert_allclose(
            [r[name] for r in got], [r[name] for r in want], rtol=2e-4, err_msg=name
        )


@pytest.mark.release
def test_a_run_goes_on_with_another_mesh(micro, tmp_path):
    """A run with sharded parameters resumes with replicated ones: the same bits, the same data position."""
    split, whole = CHANGES | {"mesh.data": 1, "mesh.fsdp": 2}, CHANGES
    straight, first, second = (tmp_path / name for name in ("straight", "first", "second"))
    train(micro(**split), straight, after=5)
    train(micro(**split), first, after=2)
    saved, position = final_state(micro(**split), first)
    found, same = final_state(micro(**whole), first)
    assert position == same
    kernel = lambda state: state["params"]["text"]["blocks"]["mlp"]["fc1"]["kernel"]
    assert not kernel(saved).sharding.is_fully_replicated
    assert kernel(found).sharding.is_fully_replicated
    jax.tree.map(np.testing.assert_array_equal, found, saved)
    train(micro(**whole, checkpoint__resume=first), second, after=2)
    assert_same_losses(records(first) + records(second), records(straight))


# ------------------------------------------------------------------------- two real processes


@pytest.mark.release
def test_two_processes_train_stop_and_go_on_as_one(micro, shared_cache, tmp_path):
    """SIGTERM is sent to one of two processes; both save the same step, and one process resumes from it."""
    two, one, rest = (tmp_path / name for name in ("two", "one", "rest"))
    command = command_of(two, **CHANGES, train__compilation_cache=shared_cache)
    flags = ENVIRONMENT["XLA_FLAGS"] + " --xla_force_host_platform_device_count=1"
    environment = ENVIRONMENT | {"XLA_FLAGS": flags}
    with two_processes(command, environment) as both:
        log, deadline = two / "metrics.jsonl", time.monotonic() + 180
        while not (log.exists() and log.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.05)
        both[1].send_signal(signal.SIGTERM)
        printed = [process.communicate(timeout=180)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], printed
    last = json.loads(log.read_text().splitlines()[-1])["step"]
    assert (
        f"interrupted: step {last} is saved" in printed[0]
        and "step" not in printed[1].split("SIGTERM")[0]
    )
    assert sorted(p.name for p in two.iterdir()) == [
        ".lock", "checkpoints", "config.json", "config_history.jsonl", "env.txt", "metrics.jsonl",
    ]  # fmt: skip
    train(micro(**CHANGES), one, after=last + 2)  # this process has two devices
    assert_same_losses(records(two), records(one)[:last])
    train(micro(**CHANGES, checkpoint__resume=two), rest, after=2)
    assert_same_losses(records(rest), records(one)[last:])


# A run whose data are not read before the first step, as if they were damaged after it.
UNSEEN = (
    "import sys; from swjax.training import command, loop; loop.check_pictures = lambda *_: []; "
)
UNSEEN += "sys.exit(command.main(['train.py', *sys.argv[1:]]))"


@pytest.mark.release
def test_two_processes_save_together_when_the_data_of_one_end(micro, shared_cache, tmp_path):
    """The other waited for it in a collective, and both lost the steps since the last checkpoint."""
    images = [encoded(photograph(number), "PNG") for number in range(64)]
    images[37] = b"no picture"
    for number, image in enumerate(images):
        (tmp_path / f"{number}.png").write_bytes(image)
    rows = [f"{number}.png,picture {number}" for number in range(64)]
    (tmp_path / "pairs.csv").write_text("\n".join(["image,caption", *rows]))
    command = command_of(
        tmp_path / "run",
        **CHANGES,
        data__name="table",
        data__table__splits__train=tmp_path / "pairs.csv",
        data__on_bad="stop",
        train__compilation_cache=shared_cache,
    )
    flags = ENVIRONMENT["XLA_FLAGS"] + " --xla_force_host_platform_device_count=1"
    environment = ENVIRONMENT | {"XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
    with two_processes([sys.executable, "-c", UNSEEN, *command[2:]], environment) as both:
        printed = [process.communicate(timeout=180)[0] for process in both]
    assert [process.returncode for process in both] == [2, 2], printed
    (step,) = Checkpoints(tmp_path / "run", keep=0).steps()
    assert f"interrupted: step {step} is saved" in printed[0] and step < 8
    failed = "37.png" not in printed[0]
    assert "train.py: config.data: cannot read 37.png: not an image" in printed[failed]
    assert f"train.py: process {int(failed)} failed: see the output" in printed[not failed]
    _, position = final_state(micro(**CHANGES), tmp_path / "run")
    assert position["taken"] == [4 * step, 4 * step]


def test_batches_are_agreed_on_one_ahead(micro, tmp_path, monkeypatch):
    """In a run of several processes; position and counts are those of the batches that were given out."""
    monkeypatch.setattr(distributed, "several", lambda: True)
    config = micro()
    splits = inputs.open_splits(config)
    parts = setup.assemble(config, splits["train"])
    with contextlib.ExitStack() as stack:
        timing = stack.enter_context(contextlib.closing(Timing(8, parts.model)))
        feed = stack.enter_context(contextlib.closing(inputs.Feed(config, parts, {}, None, timing)))
        for steps in range(1, 4):
            next(feed)
            assert feed.position()["batches"] == steps and feed.position()["taken"] == [8 * steps]
        monkeypatch.setattr(feed, "_batches", Ended())
        next(feed)
        assert next(feed, None) is None and feed.position()["batches"] == 4
        with pytest.raises(ConfigError, match="config.data: torn"):
            feed.check()


class Ended:
    """Batches of which there are no more."""

    progress = None

    def __next__(self):
        raise data.BadData("torn")

    def close(self):
        """Nothing is open."""


def test_two_processes_with_other_configs_end_in_one_line(tmp_path):
    program = (
        "import os, sys, train; rank = os.environ['JAX_PROCESS_ID']; "
        "os.environ['JAX_THREEFRY_PARTITIONABLE'] = rank; "
        "sys.exit(train.main([*sys.argv, f'--config.train.seed={rank}']))"
    )
    command = [sys.executable, "-c", program, *command_of(tmp_path / "run")[2:]]
    with two_processes(command, ENVIRONMENT | {"PYTHONPATH": str(ROOT)}) as both:
        printed = [process.communicate(timeout=120)[0].splitlines() for process in both]
    assert [process.returncode for process in both] == [2, 2], printed
    lines = [[line for line in lines if line.startswith("train.py: ")] for lines in printed]
    assert lines[0] == ["train.py: process 1 failed: see the output of that process"]
    assert (
        len(lines[1]) == 1
        and "differs from process 0 in config.train.seed: 0 -> 1; jax.config.jax_threefry_partition"
        in lines[1][0]
    )
    assert not (tmp_path / "run").exists()


LOSES_A_PEER = """
import os, sys, time
import jax
from swjax.training import distributed, inputs, setup
distributed.start()
jax.devices()
print("up", flush=True)
if os.environ["JAX_PROCESS_ID"] == "0":
    time.sleep(1)
    os.kill(os.getpid(), 9)
os.write(2, b"from C++\\n")
time.sleep(60)
"""


@pytest.mark.release
def test_losing_process_0_is_one_line_and_no_abort():
    """Without swjax's handler JAX aborts with a C++ stack trace."""
    command = [sys.executable, "-c", LOSES_A_PEER]
    with two_processes(command, ENVIRONMENT | {"PYTHONPATH": str(ROOT)}) as both:
        printed = [process.communicate(timeout=60)[0] for process in both][1].splitlines()
    assert both[1].returncode == 3
    assert printed[0] == "up" and printed[-1].startswith(
        "train.py: process 1 of 2 lost another process"
    )
    assert printed[1:-1] in ([], ["from C++"])


@pytest.mark.release
def test_waiting_for_a_process_that_does_not_come_is_said(tmp_path):
    environment = ENVIRONMENT | PLAIN | {"JAX_COORDINATOR_ADDRESS": "localhost:1"}
    process = subprocess.Popen(
        command_of(tmp_path / "run"), env=environment, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr.readline() == (
            "train.py: process 1 of 2 waits for process 0 at localhost:1\n"
        )
    finally:
        process.kill()
        process.communicate()
