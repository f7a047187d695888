"""Notices a run that learns nothing because all its embeddings have become equal."""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

STEPS = 100
_TOLERANCE = 2e-3  # of the loss of chance
_SMALL_GRADIENT = 0.02  # norm; while a CLIP learns it is above 0.3


class Collapse:
    """Watches the loss for the value that equal embeddings have, with a vanishing gradient.

    Equal embeddings have equal logits, so the softmax loss of a batch of b pairs is ``ln(b)``, and their
    gradient is almost 0. Towers of many blocks end there in their first steps if the learning rate rises too
    fast, and may stay there until the end of the run.

    Args:
      loss: `train.loss`; a sigmoid loss is not watched.
      batch_size: b.

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

    def update(self, records: Iterable[Mapping[str, Any]]) -> list[str]:
        """A line for the terminal if the run has collapsed, once.

        Args:
          records: of the next steps, oldest first.
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
