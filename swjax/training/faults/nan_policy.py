"""Decides how a run reacts to non-finite values and to skipped steps."""

import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from swjax.training.log.console import Console
from swjax.training.log.step_log import StepLog
from swjax.training.state.checkpoint import Checkpoints
from swjax.training.step import State

MAX_ROLLBACKS = 3  # rollbacks to one checkpoint
MAX_SKIPPED = 50  # consecutive steps, which lower a dynamic loss scale by 2**50
_KEY = "updates_skipped"  # key in the saved data position


class Action(enum.Enum):
    """The action of the loop after it has read records."""

    GO_ON = enum.auto()
    ROLL_BACK = enum.auto()  # return to the last checkpoint
    STOP = enum.auto()


class NanPolicy:
    """Applies `train.nan_policy` to non-finite values.

    A step counts as skipped if more than half of the parameters stay unchanged, because a value is not
    finite and `train.nan_policy` is "skip", or because scaled gradients overflow. A run stops when its last
    50 steps, or all steps of a shorter run, were skipped.

    Args:
      config: the config of the run.
      steps: number of steps of the run.
      position: data position saved with a checkpoint, with `position` of the policy that saved it; None
        starts a new run.
      console: prints which steps were skipped.

    Attributes:
      reason: one line that explains the last decision other than to continue.
      skipped: number of skipped steps in the run.
    """

    def __init__(
        self,
        config: ConfigDict,
        *,
        steps: int,
        position: Mapping[str, Any] | None,
        console: Console,
    ):
        self._policy = config.train.nan_policy
        self._most = min(MAX_SKIPPED, steps)
        self._console, self._rollbacks, self.reason = console, 0, ""
        self._restore(position)

    def _restore(self, position: Mapping[str, Any] | None) -> None:
        self.skipped, self._in_a_row = (position or {}).get(_KEY, (0, 0))

    @property
    def rolls_back(self) -> bool:
        """Whether the policy rolls back, so that the run needs a checkpoint before its first step."""
        return self._policy == "rollback"

    def position(self) -> dict[str, Any]:
        """Returns the values to save with the data position."""
        return {_KEY: [self.skipped, self._in_a_row]}

    def reset_rollbacks(self) -> None:
        """Allows `MAX_ROLLBACKS` rollbacks again, because the run has saved a new checkpoint."""
        self._rollbacks = 0

    def roll_back(self, checkpoints: Checkpoints, like: State, log: StepLog) -> tuple[State, int]:
        """Returns to the last checkpoint. The feed does not rewind, so the run skips the data since then.

        Args:
          checkpoints: the checkpoints of the run.
          like: the train state as ShapeDtypeStructs with shardings.
          log: the log; it drops the steps after the checkpoint.

        Returns:
          (state, step of the checkpoint).
        """
        state, position = checkpoints.restore(like)
        step = int(state["step"])
        self._restore(position)
        log.rewind(step)
        self._console.say(f"{self.reason}: back to step {step}, skipping the data of these steps")
        return state, step

    def decide(self, records: Sequence[dict[str, Any]]) -> Action:
        """Decides what to do after some steps.

        Args:
          records: records since the last call, oldest first. Where steps can be skipped, the function adds
            "train/skipped_total" to each.
        """
        self._count(records)
        bad = first_bad(records)
        if bad and self._policy == "skip":
            self._console.say(f"{bad}: skipped, {self.skipped} in total")
            # Skipping cannot repair a non-finite parameter.
            bad = first_bad(records, kind="parameter")
        if bad and self.rolls_back and self._rollbacks < MAX_ROLLBACKS:
            self.reason, self._rollbacks = bad, self._rollbacks + 1
            return Action.ROLL_BACK
        if bad:
            self.reason = f"{bad}: stopped; config.train.nan_policy={self._policy!r}"
            return Action.STOP
        if self._in_a_row >= self._most:
            self.reason = (
                f"the last {self._in_a_row} steps were all skipped, {self.skipped} in total: stopped; lower "
                f"config.optimizer.learning_rate or config.optimizer.loss_scale"
            )
            return Action.STOP
        return Action.GO_ON

    def _count(self, records: Sequence[dict[str, Any]]) -> None:
        for record in records:
            skipped = record.get("train/skipped", 0.0) > 0.5
            self.skipped += skipped
            self._in_a_row = self._in_a_row + 1 if skipped else 0
            if "train/skipped" in record:
                record["train/skipped_total"] = self.skipped


def first_bad(records: Sequence[Mapping[str, Any]], kind: str = "") -> str:
    """Names the first step with a non-finite value, and the tensor in which it originated.

    Args:
      records: records of steps, oldest first.
      kind: restricts the search to tensors of this kind, such as "parameter"; "" searches all values.

    Returns:
      One line without a full stop, or "" if all values are finite.

    >>> first_bad([{"step": 3, "train/loss": 1.0, "train/grad_norm": math.inf}])
    'train/grad_norm is inf at step 3'
    """
    for record in records:
        tensor, where = record.get("train/nonfinite", ""), f"at step {record['step']}"
        if kind and not tensor.startswith(kind):
            continue
        for name in ("train/loss", "train/grad_norm"):
            if not math.isfinite(record[name]):
                began = f", where {tensor} is not finite" if tensor else ""
                return f"{name} is {record[name]} {where}{began}"
        if tensor:
            return f"{tensor} is not finite {where}"
    return ""
