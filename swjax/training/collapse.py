"""Detects a run that learns nothing because all its embeddings have become equal."""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

STEPS = 100
_TOLERANCE = 2e-3  # relative to the chance loss
_SMALL_GRADIENT = 0.02  # gradient norm; a CLIP model that learns has a norm above 0.3


class Collapse:
    """Watches for a loss at the value of equal embeddings, with a vanishing gradient.

    Equal embeddings have equal logits, so the softmax loss of a batch of b pairs is ``ln(b)``, and its
    gradient is almost 0. Deep towers collapse in their first steps if the learning rate rises too fast or
    is too high for the batch size, and may not recover before the run ends.

    Args:
      loss: `train.loss`; the class ignores a sigmoid loss.
      batch_size: b, the number of pairs.

    >>> watch = Collapse("softmax", batch_size=8)
    >>> records = [{"step": i, "train/loss": 2.0794, "train/grad_norm": 1e-3} for i in range(100)]
    >>> print(watch.update(records)[0])
    step 99: the embeddings have collapsed: for 100 steps the loss has been ln(batch_size) = 2.079, with a \
gradient norm of 0.001; lower optimizer.learning_rate or raise schedule.warmup_steps, and start again
    """

    def __init__(self, loss: str, batch_size: int):
        self._chance = math.log(batch_size) if loss == "softmax" and batch_size > 1 else math.nan
        self._norms: deque[float] = deque(maxlen=STEPS)
        self._told = False

    def restart(self) -> None:
        """Discards all records, for a run that returns to an earlier step; a warning is not repeated."""
        self._norms.clear()

    def update(self, records: Iterable[Mapping[str, Any]]) -> list[str]:
        """Returns a line for the terminal the first time the run has collapsed, else no lines.

        Args:
          records: the records of the next steps, oldest first.
        """
        for record in records:
            loss, norm = record["train/loss"], record["train/grad_norm"]
            if loss is None or norm is None or not self._is_chance(loss):
                self._norms.clear()
                continue
            self._norms.append(norm)
            if (
                len(self._norms) == STEPS
                and median(self._norms) < _SMALL_GRADIENT
                and not self._told
            ):
                self._told = True
                return [
                    f"step {record['step']}: the embeddings have collapsed: for {STEPS} steps the loss has "
                    f"been ln(batch_size) = {self._chance:.3f}, with a gradient norm of "
                    f"{median(self._norms):.2g}; lower optimizer.learning_rate or raise "
                    "schedule.warmup_steps, and start again"
                ]
        return []

    def _is_chance(self, loss: float) -> bool:
        return abs(loss - self._chance) <= _TOLERANCE * self._chance
