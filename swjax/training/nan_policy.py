"""What a run does about values that are not finite, and about steps that change nothing."""

import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from swjax.training.checkpoint import Checkpoints
from swjax.training.console import Console
from swjax.training.step import State
from swjax.training.step_log import StepLog

MAX_ROLLBACKS = 3  # to one checkpoint
MAX_SKIPPED = 50  # steps in a row; a dynamic loss scale falls by 2**50 meanwhile
_KEY = "updates_skipped"  # in the position of a checkpoint


class Action(enum.Enum):
    """What the loop does after it has read records."""

    GO_ON = enum.auto()
    ROLL_BACK = enum.auto()  # to the last checkpoint
    STOP = enum.auto()


class NanPolicy:
    """Decides by `train.nan_policy` what to do about a value that is not finite.

    A step counts as skipped if it leaves more than half of the parameters as they are: because a value is
    not finite and `train.nan_policy` is "skip", or because gradients overflow with the loss scale. A run
    stops when its last 50 steps, or all of a shorter run, were skipped.

    Args:
      config: the run's.
      steps: of the run.
      position: as saved with a checkpoint, see `saved`; None: the run begins.
      console: prints which steps were skipped.

    Attributes:
      reason: in one line why the last decision was not to go on.
      skipped: steps of the run that were skipped.
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
        """Whether the run goes back to its last checkpoint, which it then needs from the beginning."""
        return self._policy == "rollback"

    def saved(self) -> dict[str, Any]:
        """What a checkpoint keeps with its position; a new one may be rolled back to 3 times."""
        self._rollbacks = 0
        return {_KEY: [self.skipped, self._in_a_row]}

    def roll_back(self, checkpoints: Checkpoints, like: State, log: StepLog) -> tuple[State, int]:
        """Goes back to the last checkpoint; the data since then are left out, for the feed goes on.

        Args:
          checkpoints: of the run.
          like: the train state as ShapeDtypeStructs with shardings.
          log: forgets the steps since then.

        Returns:
          (state, its step).
        """
        state, position = checkpoints.restore(like)
        step = int(state["step"])
        self._restore(position)
        log.rewind(step)
        self._console.say(f"{self.reason}: back to step {step}, past the data of these steps")
        return state, step

    def decide(self, records: Sequence[dict[str, Any]]) -> Action:
        """Decides what to do after some steps.

        Args:
          records: of the steps since the last call, oldest first; where steps can be skipped,
            "train/skipped_total" is added to each.
        """
        self._count(records)
        bad = first_bad(records)
        if bad and self._policy == "skip":
            self._console.say(f"{bad}: skipped, {self.skipped} in all")
            bad = first_bad(records, kind="parameter")  # skipping does not repair that
        if bad and self.rolls_back and self._rollbacks < MAX_ROLLBACKS:
            self.reason, self._rollbacks = bad, self._rollbacks + 1
            return Action.ROLL_BACK
        if bad:
            self.reason = f"{bad}: stopped; config.train.nan_policy={self._policy!r}"
            return Action.STOP
        if self._in_a_row >= self._most:
            self.reason = (
                f"the last {self._in_a_row} steps were all skipped, {self.skipped} in all: stopped; lower "
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
    """Names the first step with a value that is not finite, and the tensor where it began.

    Args:
      records: of steps, oldest first.
      kind: looks only for tensors of this kind, as in "parameter"; "": for any value.

    Returns:
      One line without a full stop; "": all is finite.

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
