"""Checkpoints on a failing disk: a damaged checkpoint is not used, the one before it is."""

import random
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from processes import file_size_limit, two_processes

from swjax.models import sharding
from swjax.training import config as config_lib
from swjax.training.config import ConfigError, RunError
from swjax.training.state.checkpoint import Checkpoints
from swjax.training.state.checksums import checksums

# Orbax does not await its other coroutines when one has failed.
pytestmark = [
    pytest.mark.usefixtures("collect"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
]
ROOT = Path(__file__).resolve().parent.parent
SHAPES = {"scalar": (), "bias": (7,), "kernel": (16, 8), "embedding": (400, 16)}


def state_of(step: int):
    keys = jax.random.split(jax.random.key(step), len(SHAPES))
    arrays = {n: jax.random.normal(k, SHAPES[n]) for n, k in zip(SHAPES, keys, strict=True)}
    return {"params": arrays, "step": jnp.int32(step)}


LIKE = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state_of(0)
)


def save(workdir, *steps, keep=2):
    checkpoints = Checkpoints(workdir, keep=keep)
    for step in steps:
        checkpoints.save(step, state_of(step), {"batches": step})
    checkpoints.close()


def restored_step(workdir, keep=0) -> int:
    """Restores a checkpoint, checks every bit, and returns its step."""
    state, position = Checkpoints(workdir, keep=keep).restore(LIKE)
    step = position["batches"]
    jax.tree.map(np.testing.assert_array_equal, state, state_of(step))
    return step


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("saved")
    save(workdir, 2, 4)
    return workdir


@contextmanager
def damaged(path, data: bytes):
    old = path.read_bytes()
    path.write_bytes(data)
    yield
    path.write_bytes(old)


def files(workdir, step):
    found = (p for p in (workdir / "checkpoints" / str(step)).rglob("*") if p.is_file())
    return sorted(found, key=lambda p: p.stat().st_size)


def test_no_flipped_bit_gets_through(saved):
    rng, seen = random.Random(0), set()
    for path in files(saved, 4):
        data = path.read_bytes()
        for _ in range(3 if len(data) < 10_000 else 12):
            at = rng.randrange(len(data))
            flipped = data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
            with damaged(path, flipped):
                seen.add(restored_step(saved))  # step 4 if the flip is harmless, else 2
    assert seen == {2, 4}


def test_a_flipped_bit_in_an_array_is_said_with_its_name(saved, caplog):
    path = files(saved, 4)[-1]
    data = path.read_bytes()
    with damaged(path, data[:9000] + bytes([data[9000] ^ 1]) + data[9001:]):
        assert restored_step(saved) == 2
        params = Checkpoints(saved, keep=0).restore_params(LIKE["params"])
        np.testing.assert_array_equal(params["kernel"], state_of(2)["params"]["kernel"])
    assert "4 is damaged: the checksum of params/embedding is" in caplog.text
    assert "using the previous checkpoint, of step 2" in caplog.text


def test_a_damaged_checkpoint_is_moved_aside_and_written_again(tmp_path):
    save(tmp_path, 2, 4)
    path = files(tmp_path, 4)[-1]
    path.write_bytes(path.read_bytes()[:5000])
    assert restored_step(tmp_path) == 2
    assert not (tmp_path / "damaged").exists()  # restored without changing the folder
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.restore(LIKE)[1] == {"batches": 2}
    assert [p.name[:2] for p in (tmp_path / "damaged").iterdir()] == ["4-"]
    checkpoints.save(4, state_of(4), {"batches": 4})
    checkpoints.close()
    assert restored_step(tmp_path) == 4


def test_when_all_are_damaged_nothing_is_begun_again(tmp_path, caplog):
    save(tmp_path, 2, 4)
    for step in (2, 4):
        (tmp_path / f"checkpoints/{step}/manifest/metadata").write_text("{}")
    with pytest.raises(ConfigError, match=r"every checkpoint.*damaged \(steps \[4, 2\]\)"):
        restored_step(tmp_path, keep=2)
    assert caplog.text.count("its manifest does not match its own checksum") == 2
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["2", "4"]


@pytest.mark.release
def test_what_one_of_two_processes_cannot_read_neither_uses(saved, tmp_path):
    """Process 1 has a truncated file. Both processes must restore the older checkpoint; neither may hang.

    Each process has its own workdir, so that only one file is damaged. The trainer refuses such workdirs.
    """
    for rank in "01":
        shutil.copytree(saved, tmp_path / rank)
    largest = files(tmp_path / "1", 4)[-1]
    largest.write_bytes(largest.read_bytes()[:5000])
    worker = str(Path(__file__).parent / "restore_worker.py")
    with two_processes([sys.executable, worker, str(tmp_path)]) as both:
        printed = [process.communicate(timeout=180)[0] for process in both]
    assert all("restored 2 2\n" in text for text in printed), printed
    assert all("is another folder for process 1 than for process 0" in text for text in printed)
    assert "damaged: process 1 failed: see the output of that process" in printed[0]
    assert "damaged: Requested byte range" in printed[1]


def test_a_full_disk_is_one_line_and_costs_no_checkpoint(tmp_path, caplog):
    save(tmp_path, 2, keep=1)
    checkpoints = Checkpoints(tmp_path, keep=1)
    with file_size_limit(8000):
        checkpoints.save(4, state_of(4), {"batches": 4})
        with pytest.raises(RunError, match="step 2 is saved.*File too large") as error:
            checkpoints.close()
    assert "\n" not in str(error.value)
    assert "Traceback" not in caplog.text and "deprecated" not in caplog.text
    assert restored_step(tmp_path) == 2
    save(tmp_path, 4, keep=1)
    assert restored_step(tmp_path) == 4
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["4"]


def test_checksums_see_every_bit_and_place():
    rng = np.random.default_rng(0)
    values = rng.integers(0, 2**32, 999, np.uint32)
    first = checksums({"x": jnp.asarray(values)})["x"]
    for bit in range(32):
        other = values.copy()
        other[rng.integers(999)] ^= np.uint32(1 << bit)
        assert checksums({"x": jnp.asarray(other)})["x"] != first
    assert checksums({"x": jnp.asarray(values[::-1].copy())})["x"] != first


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8, jnp.int32])
def test_checksums_are_those_of_any_mesh(dtype):
    x = jnp.arange(4 * 6 * 10).reshape(4, 6, 10).astype(dtype)
    mesh = sharding.make_mesh(1, 2, 1, devices=jax.devices()[:2])
    specs = (jax.P(), jax.P("fsdp"), jax.P(None, None, "fsdp"))
    placed = [jax.device_put(x, jax.NamedSharding(mesh, spec)) for spec in specs]
    assert len({checksums({"x": x})["x"] for x in [x, *placed]}) == 1


@pytest.mark.parametrize(
    "key, value, told",
    [
        ("train.ema_decay", "0.9", "0.0 -> 0.9"),
        ("optimizer.eight_bit_moments", "True", "False -> True"),
        ("optimizer.coefficients", "quintic", "'auto' -> 'quintic'"),
    ],
)
def test_other_arrays_name_the_key_that_changed(tmp_path, key, value, told):
    save(tmp_path, 1)
    config = config_lib.load(f"{ROOT}/configs/openmoji.py")
    (tmp_path / "config.json").write_text(config_lib.to_json(config))
    now = config_lib.load(f"{ROOT}/configs/openmoji.py", [(key, value)])
    more = LIKE | {"ema": LIKE["params"]}
    with (
        pytest.raises(ConfigError, match=f"config.{key}: {told}: change the keys back"),
        config_lib.blame_changes(tmp_path, now),
    ):
        Checkpoints(tmp_path, keep=0).restore(more)
