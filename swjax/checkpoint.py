"""Checkpoints of a run: the train state and the data position, saved while training goes on."""

import fcntl
import logging
import os
from pathlib import Path

import jax
import orbax.checkpoint as ocp

from swjax.config import ConfigError


class Checkpoints:
    """The checkpoints `workdir`/checkpoints/<step>: asynchronous, atomic, for any mesh.

    Args:
      workdir: directory of the run.
      keep: how many of the newest are kept; 0: this run is only read.
    """

    def __init__(self, workdir: str | Path, *, keep: int):
        self.directory = Path(workdir).absolute() / "checkpoints"
        self._manager = ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(max_to_keep=keep or None, read_only=keep == 0),
            item_handlers={
                "state": ocp.StandardCheckpointHandler(),
                "position": ocp.JsonCheckpointHandler(),
            },
        )

    @classmethod
    def of(cls, key: str, workdir: str) -> "Checkpoints":
        """Those of another run, to be read.

        Raises:
          ConfigError: there are none; `key` is the config key that named the run.
        """
        if not any((Path(workdir) / "checkpoints").glob("[0-9]*")):
            raise ConfigError(f"config.{key}={workdir!r} holds no checkpoint: give a run's workdir")
        logger = logging.getLogger("absl")
        level = logger.level
        logger.setLevel(logging.ERROR)  # Orbax warns that what is only read is only read
        try:
            return cls(workdir, keep=0)
        finally:
            logger.setLevel(level)

    def latest_step(self) -> int | None:
        """The newest complete checkpoint's step, or None."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, rising."""
        return sorted(self._manager.all_steps())

    def position(self, step: int) -> dict:
        """That of the data in one of them."""
        return self._manager.restore(
            step, args=ocp.args.Composite(position=ocp.args.JsonRestore())
        ).position

    def save(self, step: int, state, position: dict) -> None:
        """Starts saving; returns once the state is copied, so that it may be donated.

        Args:
          step: the number of finished steps.
          state: tree of arrays.
          position: of the data, as JSON has it.
        """
        items = {
            "state": ocp.args.StandardSave(state),
            "position": ocp.args.JsonSave(position),
        }
        self._manager.save(step, args=ocp.args.Composite(**items), force=True)

    def restore(self, like, step: int | None = None):
        """Restores one of them.

        Args:
          like: tree of ShapeDtypeStructs with shardings.
          step: which; None: the newest.

        Returns:
          (state, position) as saved.

        Raises:
          ConfigError: it holds other arrays, or other shapes, than `like`.
        """
        self._manager.wait_until_finished()
        step = self.latest_step() if step is None else step
        self._check(step, like)
        items = {"state": ocp.args.StandardRestore(like), "position": ocp.args.JsonRestore()}
        restored = self._manager.restore(step, args=ocp.args.Composite(**items))
        return restored.state, restored.position

    def restore_params(self, like, name: str = "params"):
        """Restores nothing but the parameters of the newest one, or their average "ema"; see `restore`."""
        step, like = self.latest_step(), {name: like}
        self._check(step, like, within=f"{name}/")
        arguments = ocp.checkpoint_utils.construct_restore_args(like)
        args = ocp.args.PyTreeRestore(like, restore_args=arguments, partial_restore=True)
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            path = self.directory / str(step) / "state"
            return checkpointer.restore(path, args=args)[name]

    def _check(self, step: int, like, within: str = "") -> None:
        """Raises a ConfigError if the arrays of `like` are not those of the checkpoint."""
        saved = _shapes(self._manager.item_metadata(step).state.tree)
        saved = {name: shape for name, shape in saved.items() if name.startswith(within)}
        here = _shapes(like)
        for name in sorted(saved.keys() | here.keys()):
            if saved.get(name) != here.get(name):
                raise ConfigError(
                    f"{self.directory / str(step)} is of another model or optimizer: the shape of "
                    f"{name} is {saved.get(name)} there and {here.get(name)} here (None: no such "
                    f"array): use its config, or another --workdir"
                )

    def close(self) -> None:
        """Waits until everything is on disk."""
        self._manager.wait_until_finished()
        self._manager.close()


def _shapes(tree) -> dict[str, tuple]:
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: hasattr(x, "shape"))
    return {jax.tree_util.keystr(p, simple=True, separator="/"): tuple(x.shape) for p, x in leaves}


def lock(workdir: Path):
    """Takes the workdir for this process; the system frees it when the process ends, however.

    Returns:
      The open lock file: keep it.

    Raises:
      ConfigError: another live process holds it.
    """
    file = open(workdir / ".lock", "a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        owner = file.read().strip() or "unknown"
        file.close()
        raise ConfigError(
            f"workdir {str(workdir)!r} is in use by process {owner}: "
            f"wait for it, or use another --workdir"
        ) from error
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file
