"""Tests runs with damaged checkpoints, a full disk and a read-only disk.

Needs permission to mount a tmpfs (root, or `unshare` with user namespaces).
"""

import json
import random
import subprocess
from collections import Counter
from pathlib import Path

from benchmarks.reliability.runs import Run, compare, finished_checkpoints, resumed_at

SMALL = 10  # MiB; a checkpoint of the tiny run takes 6 MiB


def measure(folder: Path, flips: int = 200, seed: int = 0) -> dict:
    """Flips bits, truncates files, fills a disk and makes it read-only.

    Args:
      folder: for the workdirs.
      flips: number of bits of the newest checkpoint to flip, one at a time; a fifth as many files are cut.
      seed: of the positions.
    """
    keys = ("train.steps=6", "checkpoint.every_steps=2", "log.every_steps=2",
            f"train.compilation_cache={folder / 'cache'}")  # fmt: skip
    alone = folder / "alone"
    Run(alone, *keys).to_its_end()
    found = {"flipped_bits": damage(alone, flips, seed, flip),
             "cut_files": damage(alone, flips // 5, seed, cut)}  # fmt: skip
    disk = folder / "small"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SMALL}M", "tmpfs", disk], check=True)
    try:
        full = Run(disk / "run", *keys, name="full", folder=folder)
        said = full.to_its_end(code=3).splitlines()
        kept = finished_checkpoints(disk / "run")
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        refused = (
            Run(disk / "run", *keys, name="readonly", folder=folder).to_its_end(code=3).splitlines()
        )
        subprocess.run(["mount", "-o", "remount,rw,size=100M", disk], check=True)
        again = Run(disk / "run", *keys, name="again", folder=folder).to_its_end()
        same = compare(alone, disk / "run")["identical"]
    finally:
        subprocess.run(["umount", disk], check=True)
    good = all(set(ends) <= {"as it was", "the one before"} for ends in found.values())
    return {
        "ok": good and kept == [2] and same and resumed_at(again) == kept[0],
        **found,
        "full_disk": [line for line in said if line.startswith("train.py:")],
        "lines_in_all": len(said),
        "checkpoints_kept": kept,
        "read_only": refused,
        "with_room_again_identical": same,
    }


def damage(workdir: Path, times: int, seed: int, change) -> dict[str, int]:
    """Changes one file of the newest checkpoint at a time; counts which checkpoint is then restored."""
    import jax
    import numpy as np

    from swjax.models import sharding
    from swjax.training import config as config_lib
    from swjax.training import optimizer as optimizer_lib
    from swjax.training import setup
    from swjax.training.state.checkpoint import Checkpoints

    config = config_lib.load("configs/openmoji.py")
    config.unlock()
    config.update(json.loads((workdir / "config.json").read_text()))
    optimizer = optimizer_lib.make_optimizer(config, optimizer_lib.make_schedule(config, 6, 1))
    init, _ = setup.make_init(config, setup.model_config(config), optimizer)
    like = sharding.abstract_state(jax.eval_shape(init), sharding.make_mesh())

    def restore():
        state, position = Checkpoints(workdir, keep=0).restore(like)
        return position["batches"], [np.asarray(x).tobytes() for x in jax.tree.leaves(state)]

    newest = restore()
    files = [p for p in (workdir / "checkpoints" / str(newest[0])).rglob("*") if p.is_file()]
    sizes = [path.stat().st_size for path in files]
    rng, ends = random.Random(seed), Counter()
    # Half of the damage is at random bytes, half in random files, since one file has most bytes.
    for number in range(times):
        path = rng.choices(files, sizes if number % 2 else None)[0]
        data = path.read_bytes()
        path.write_bytes(change(data, rng))
        step, arrays = restore()
        same = arrays == newest[1]
        ends["as it was" if same else "the one before" if step == 4 else "something else"] += 1
        path.write_bytes(data)
    return dict(ends)


def flip(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]
