"""Checkpoints of a run: the train state and the data position, saved in the background.

Orbax writes and commits the checkpoints. TensorStore verifies only few of the bytes that it reads, so each
checkpoint has a manifest with the shape, the dtype and the checksum of every array. A checkpoint that differs
from its manifest is not used.
"""

import contextlib
import fcntl
import glob
import json
import logging
import os
import platform
import time
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from swjax.safe_files import one_line
from swjax.training import distributed
from swjax.training.faults.errors import ConfigError, OtherArrays, RunError
from swjax.training.state.checksums import arrays_by_name, checksums

logger = logging.getLogger("swjax.training.state.checkpoint")


# What a run writes in its workdir.
WRITTEN = (".lock", "checkpoints", "config.json", "config_history.jsonl", "damaged", "env.txt",
           "metrics.jsonl", "mirror.part", "profile", "report", "results.json", "skipped.log",
           "tensorboard")  # fmt: skip


class DamagedCheckpoint(ValueError):
    """The arrays of a checkpoint differ from the saved state."""


class _SaidOnce(logging.Filter):
    """Drops the tracebacks that Orbax logs (once per thread) of errors that it also raises."""

    def filter(self, record):
        said = "/orbax/" in record.pathname or "never retrieved" in record.getMessage()
        return record.levelno < logging.ERROR or not said


for _name in ("absl", "asyncio"):
    logging.getLogger(_name).addFilter(_SaidOnce())


def saved_steps(workdir: str | Path) -> set[int]:
    """The steps of the complete checkpoints of a run, whose folders have their final name."""
    paths = (Path(workdir) / "checkpoints").glob("*")
    return {int(path.name) for path in paths if path.name.isdecimal()}


def set_aside(checkpoint: Path) -> None:
    """Moves a damaged checkpoint to the folder "damaged" of its run."""
    aside = checkpoint.parent.parent / "damaged"
    aside.mkdir(exist_ok=True)
    checkpoint.rename(aside / f"{checkpoint.name}-{time.time_ns()}")


def require_checkpoint(key: str, workdir: str) -> None:
    """Raises a ConfigError if a run, which the config key `key` names, has no complete checkpoint."""
    if not saved_steps(workdir):
        raise ConfigError(f"config.{key}={workdir!r} holds no checkpoint: give a run's workdir")


class Checkpoints:
    """The checkpoints in `workdir`/checkpoints/<step>: asynchronous, atomic, verified, readable on any mesh.

    A damaged checkpoint is reported and moved to `workdir`/damaged; its copy from a mirror, or the previous
    checkpoint, is used instead.

    Args:
      workdir: directory of the run.
      keep: how many of the newest checkpoints are kept; 0 opens them read-only.
    """

    def __init__(self, workdir: str | Path, *, keep: int):
        self.directory = Path(workdir).absolute() / "checkpoints"
        self._read_only = keep == 0
        self._manager = ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep or None, read_only=self._read_only
            ),
            item_handlers={
                "state": ocp.StandardCheckpointHandler(),
                "manifest": ocp.JsonCheckpointHandler(),
            },
        )

    @classmethod
    def of(cls, key: str, workdir: str) -> "Checkpoints":
        """Opens the checkpoints of another run read-only.

        Raises:
          ConfigError: the run has no checkpoints. `key` is the config key that named the run.
        """
        with distributed.all_or_none():
            require_checkpoint(key, workdir)
        absl = logging.getLogger("absl")
        level = absl.level
        absl.setLevel(logging.ERROR)  # Orbax warns that a reader cannot save
        try:
            return cls(workdir, keep=0)
        finally:
            absl.setLevel(level)

    def latest_step(self) -> int | None:
        """The step of the newest complete checkpoint, or None."""
        return max(self.steps(), default=None)

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, in ascending order, as process 0 lists them."""
        self._manager.reload()  # Orbax drops steps from its list before it deletes their files
        return distributed.of_first(sorted(self._manager.all_steps()))

    def position(self, step: int) -> dict:
        """Reads the data position that was saved at a step."""
        return _read_manifest(self.directory / str(step))["position"]

    def save(self, step: int, state: Any, position: dict) -> None:
        """Starts saving, unless the step is saved. Returns once the caller may donate the state.

        Args:
          step: the number of finished steps.
          state: tree of arrays.
          position: the data position, JSON-serializable.

        Raises:
          RunError: see `check`.
        """
        if step in self._manager.all_steps():  # including one that is being saved
            return
        items = {
            "state": ocp.args.StandardSave(_storable(state)),
            "manifest": ocp.args.JsonSave(_manifest(state, position)),
        }
        with self._blame_disk():
            self._manager.save(step, args=ocp.args.Composite(**items), force=True)

    def is_saving(self) -> bool:
        """Whether a checkpoint is being written in the background."""
        return self._manager.is_saving_in_progress()

    def check(self) -> None:
        """Checks that the background save has not failed.

        Raises:
          RunError: the last checkpoint could not be written.
        """
        with self._blame_disk():
            self._manager.check_for_errors()

    def restore(
        self, like: Any, step: int | None = None, fetch: Callable[[int], None] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Restores a checkpoint.

        Args:
          like: tree of ShapeDtypeStructs with shardings.
          step: the step to restore; None restores the newest undamaged checkpoint.
          fetch: called with the newest step if it is damaged, to replace it; see `Mirror.fetch`.

        Returns:
          (state, position) as saved.

        Raises:
          ConfigError: the checkpoint has other arrays or shapes than `like`, or all checkpoints are damaged.
          Exception: the checkpoint of the given `step` is damaged: a DamagedCheckpoint, or an error of Orbax.
        """
        self._wait()
        return self._newest(like, fetch=fetch) if step is None else self._load(step, like)

    def shapes(self, within: str) -> dict[str, tuple[int, ...]]:
        """Reads the shapes of the saved arrays whose names start with a prefix.

        The shapes come from the newest checkpoint with a valid manifest.

        Args:
          within: the prefix, such as "params/".

        Returns:
          {name without the prefix: shape}.

        Raises:
          ConfigError: no checkpoint has a valid manifest.
        """
        for step in reversed(self.steps()):
            # `restore_params` says which checkpoints are damaged.
            with contextlib.suppress(OSError, ValueError):
                arrays = _read_manifest(self.directory / str(step))["arrays"]
                return {
                    name.removeprefix(within): tuple(array["shape"])
                    for name, array in arrays.items()
                    if name.startswith(within)
                }
        raise ConfigError(
            f"every checkpoint in {self.directory} is damaged: restore one from a copy"
        )

    def restore_params(self, like: Any, name: str = "params") -> Any:
        """Restores only the parameters of the newest checkpoint, or their average "ema"; see `restore`."""
        return self._newest({name: like}, within=f"{name}/")[0][name]

    def _newest(self, like: Any, within: str = "", fetch=None) -> tuple[Any, dict[str, Any]]:
        """Loads the newest checkpoint that is not damaged, see `_load` and `restore`."""
        damaged = []
        for step in reversed(self.steps()):
            try:
                found = self._load(step, like, within)
            except (ConfigError, MemoryError, jax.errors.JaxRuntimeError):
                raise
            except Exception as error:  # Orbax and TensorStore raise many types for broken files
                # Process 0 reports the damage, and so does the process that found it.
                tell = self._say if isinstance(error, RunError) else logger.warning
                tell("checkpoint %s is damaged: %s", self.directory / str(step), _reason(error))
                if fetch:
                    distributed.first_does(partial(fetch, step))
                    return self._newest(like, within)
                damaged.append(step)
                continue
            if damaged:
                self._say("using the previous checkpoint, of step %d", step)
                self._set_aside(damaged)
            return found
        raise ConfigError(
            f"every checkpoint in {self.directory} is damaged (steps {damaged}): restore one "
            f"from a copy, or remove the folder to start again"
        )

    def _load(self, step: int, like: Any, within: str = "") -> tuple[Any, dict[str, Any]]:
        """Loads (arrays, position) of a step; if one process finds damage, all reject the checkpoint.

        Args:
          step, like: see `restore`.
          within: prefix of the names of the arrays to load.
        """
        path = self.directory / str(step)
        with distributed.all_or_none():
            manifest = _read_manifest(path)
            _compare(path, manifest["arrays"], like, within)
            arrays = _read_arrays(path / "state", like)
        with distributed.all_or_none():
            _verify(arrays, manifest["arrays"])
        return arrays, manifest["position"]

    def _say(self, message: str, *args) -> None:
        logger.log(logging.WARNING if distributed.is_first() else logging.DEBUG, message, *args)

    def _set_aside(self, steps: list[int]) -> None:
        """Moves damaged checkpoints away, so that training can rewrite their steps."""

        def move():
            for step in steps:
                set_aside(self.directory / str(step))

        if not self._read_only:
            distributed.first_does(move)
            self._manager.reload()

    def close(self) -> None:
        """Waits until all checkpoints are written to disk.

        Raises:
          RunError: see `check`.
        """
        try:
            self._wait()
        finally:
            self._manager.close()

    def _wait(self) -> None:
        with self._blame_disk():
            self._manager.wait_until_finished()

    @contextlib.contextmanager
    def _blame_disk(self):
        """Raises a one-line RunError if a checkpoint could not be written."""
        try:
            yield
        except (OSError, ValueError) as error:  # TensorStore raises ValueErrors
            if isinstance(error.__cause__, jax.errors.JaxRuntimeError):
                raise error.__cause__ from error  # a process ended: `distributed.blame_peers`
            self._manager.reload()  # Orbax unlists a step, then deletes it
            steps = self._manager.all_steps()
            kept = f"step {max(steps)} is saved" if steps else "none is saved yet"
            raise RunError(
                f"a checkpoint could not be written in {self.directory}, {kept}: {_reason(error)}; "
                f"make room or repair the disk; the same command then resumes the run"
            ) from error


def _manifest(state, position: dict) -> dict:
    arrays = arrays_by_name(state)
    sums = checksums(arrays)
    held = {
        name: {"shape": list(x.shape), "dtype": str(x.dtype), "checksum": sums[name]}
        for name, x in arrays.items()
    }
    manifest = {"position": position, "arrays": held}
    return manifest | {"crc32": _crc32(manifest)}


def _reason(error: BaseException) -> str:
    """A short reason: TensorStore's messages start with file names and end with the cause."""
    while error.__cause__ is not None and not isinstance(error, RunError):
        error = error.__cause__
    if isinstance(error, DamagedCheckpoint | RunError):
        return str(error)
    text = one_line(error).partition(" See full TensorStore")[0]
    return f"{type(error).__name__}: {text}".rpartition('": ')[2][:160]


def _read_manifest(path: Path) -> dict:
    manifest = json.loads((path / "manifest" / "metadata").read_text())
    if manifest.pop("crc32", None) != _crc32(manifest):
        raise DamagedCheckpoint("its manifest does not match its own checksum")
    return manifest


def _compare(path: Path, arrays: dict, like, within: str) -> None:
    """Raises `OtherArrays` if the manifest lists other arrays, shapes or dtypes than `like`."""
    here = {name: f"{x.dtype}{list(x.shape)}" for name, x in arrays_by_name(like).items()}
    saved = {
        name: f"{x.get('dtype') or here.get(name, '').partition('[')[0]}{x['shape']}"  # older: no dtype
        for name, x in arrays.items()
        if name.startswith(within)
    }
    for name in sorted(saved.keys() | here.keys()):
        if saved.get(name) != here.get(name):
            raise OtherArrays(
                f"{path} belongs to another model or optimizer: {name} is {saved.get(name)} in the "
                f"checkpoint and {here.get(name)} here (None: no such array): use the config of the "
                f"checkpoint, or another --workdir"
            )


def _read_arrays(path: Path, like):
    """Reads this process's shards of the arrays, without waiting for other processes."""
    own = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=own, active_processes={own})
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    stored = _storable(like)
    arguments = ocp.checkpoint_utils.construct_restore_args(stored)
    args = ocp.args.PyTreeRestore(stored, restore_args=arguments, partial_restore=True)
    with ocp.Checkpointer(handler, multiprocessing_options=alone) as checkpointer:
        found = checkpointer.restore(path, args=args)
    if len(jax.tree.leaves(stored)) == len(jax.tree.leaves(like)):
        return found

    def fill(x, value):
        whole = x is None or x.size
        return value if whole else jnp.zeros(x.shape, x.dtype, device=x.sharding)

    return jax.tree.map(fill, like, found, is_leaf=lambda x: x is None)


def _storable(tree):
    """The tree with None in place of arrays without elements, which Orbax cannot store."""
    return jax.tree.map(lambda x: x if x.size else None, tree)


def _crc32(manifest: dict) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


def _verify(arrays, held: dict) -> None:
    """Raises a DamagedCheckpoint that names the first array whose checksum differs."""
    for name, found in checksums(arrays_by_name(arrays)).items():
        saved = held[name]["checksum"]
        if found != saved:
            raise DamagedCheckpoint(f"the checksum of {name} is {found:08x}, not {saved:08x}")


def lock_workdir(workdir: Path) -> IO:
    """Creates the workdir if it does not exist, and locks it for this process.

    The operating system releases the lock when the process ends, even if it is killed.

    Returns:
      The open lock file. The caller must keep a reference, because closing it releases the lock.

    Raises:
      ConfigError: another live process holds it, the file system has no locks, one of its files is a link,
        or Orbax would read the path as a pattern, and not find the arrays that it has written.
    """
    path = str(workdir.absolute())
    if glob.has_magic(path) or "\\" in path:
        raise ConfigError(
            f"workdir {path!r} must have no *, ?, [ or backslash in its path, which Orbax reads as a "
            f"pattern: give another path"
        )
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError, FileNotFoundError) as error:
        raise ConfigError(
            f"workdir {str(workdir)!r} cannot be created ({error.strerror}): give another path"
        ) from error
    for link in (name for name in WRITTEN if (workdir / name).is_symlink()):
        raise ConfigError(
            f"workdir {str(workdir)!r} has the link {link!r}, and a run writes through no link: replace it "
            "by what it names"
        )
    file = open(workdir / ".lock", "a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        owner = file.read().strip() or "unknown"
        file.close()
        raise ConfigError(
            f"workdir {str(workdir)!r} is in use by process {owner}: "
            f"wait for it, or use another --workdir"
        ) from error
    except OSError as error:
        file.close()
        raise ConfigError(
            f"workdir {str(workdir)!r} cannot be locked ({error.strerror}): mount its file system with "
            f"locks (flock), or use another --workdir"
        ) from error
    file.truncate(0)
    file.write(f"{os.getpid()} on {platform.node()}")
    file.flush()
    os.fsync(file.fileno())  # for `check_shared` on other machines
    return file


def check_shared(workdir: Path) -> None:
    """Checks that all processes see the workdir that process 0 has locked, since all write checkpoints there.

    Raises:
      ConfigError: a process sees another folder, where it would wait forever for the files of process 0.
    """
    path = workdir / ".lock"
    own = zlib.crc32(path.read_bytes()) if path.exists() else -1
    seen = distributed.all_processes(np.array([own], np.int64))[:, 0]
    if np.any(seen != seen[0]):
        raise ConfigError(
            f"workdir {str(workdir)!r} is another folder for process {np.argmax(seen != seen[0])} than for "
            f"process 0: give a path on a file system that all processes share"
        )
