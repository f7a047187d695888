"""The progress of a run through its data, as a few numbers that do not depend on the number of processes."""

import dataclasses
from collections.abc import Callable

import numpy as np


class Position:
    """The consumed positions of an order.

    These are all positions before `start` except the positions in `left`. Processes skip unreadable examples,
    so one process may be a few examples ahead of another. When the number of processes changes, the examples
    that slower processes have not taken go into `left` and are taken first.

    Attributes:
      left: positions before `start` that are still to be taken, in order.
      start: no position from here on has been taken.
    """

    def __init__(self, left: tuple[int, ...] = (), start: int = 0):
        self.left, self.start = tuple(left), start

    def of(self, turn: int) -> int:
        """Returns the position that follows after `turn` positions, counted over all processes."""
        beyond = turn - len(self.left)
        return self.left[turn] if beyond < 0 else self.start + beyond

    def after(self, taken: list[int]) -> "Position":
        """Returns the position after each process has taken the given number of examples, in turn.

        >>> after = Position().after([3, 1])  # process 0 took 0, 2, 4 and process 1 took 1
        >>> after.left, after.start
        ((3,), 5)
        """
        count = len(taken)
        turns = max(0, *(process + (n - 1) * count + 1 for process, n in enumerate(taken)))
        passed_over = [
            self.of(turn)
            for turn in range(min(taken) * count, turns)
            if turn // count >= taken[turn % count]
        ]
        beyond = max(0, turns - len(self.left))
        return Position((*passed_over, *self.left[turns:]), self.start + beyond)


@dataclasses.dataclass(frozen=True)
class Progress:
    """The progress of one process through its share of an order.

    Attributes:
      examples: length of the source, to detect another source.
      processes: number of processes that share the order.
      base: the consumed positions when the number of processes last changed.
      taken: positions that this process has taken since then.
      batches: number of batches of the run so far.
      read, skipped: numbers of examples of the run that this process accounts for.
    """

    examples: int
    processes: int
    base: Position
    taken: int = 0
    batches: int = 0
    read: int = 0
    skipped: int = 0

    @classmethod
    def of(
        cls, position: dict, examples: int, process_index: int, process_count: int
    ) -> "Progress":
        """Continues from a value that `position` returned."""
        if position["examples"] != examples:
            raise ValueError(
                f"the data set has {examples} examples; when this run was saved, it had "
                f"{position['examples']}: give it the same data"
            )
        base, taken = Position(position["left"], position["start"]), position["taken"]
        own = {name: position[name] for name in ("taken", "read", "skipped")}
        if len(taken) == process_count:
            own = {name: counts[process_index] for name, counts in own.items()}
        else:
            base, own["taken"] = base.after(taken), [0]
            own = {  # the total, divided among the processes
                name: (sum(counts) + process_count - 1 - process_index) // process_count
                for name, counts in own.items()
            }
        return cls(examples, process_count, base, batches=position["batches"], **own)

    def position(self, gather: Callable) -> dict:
        """See `TrainBatches.position`."""
        own = np.array([self.taken, self.read, self.skipped], np.int64)
        taken, read, skipped = np.asarray(gather(own)).T.tolist()
        if len(taken) != self.processes:
            raise ValueError(
                f"a position of {self.processes} processes needs the counts of all; gather returned "
                f"{len(taken)}: pass a gather function that collects all"
            )
        return {
            "examples": self.examples,
            "batches": self.batches,
            "left": list(self.base.left),
            "start": self.base.start,
            "taken": taken,
            "read": read,
            "skipped": skipped,
        }
