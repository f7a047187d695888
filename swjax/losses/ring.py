"""All pairs of two batches sharded over many devices, a block of pairs at a time.

Each device keeps its rows of one batch; the rows of the other batch are passed around. Neighbours on the mesh
first all-gather their rows, as many devices as memory allows (`group`); the groups' rows then go around in a
ring. A few devices gather everything at once. Thousands of devices take few hops, and buffers do not grow
with their number. One device is a ring of one: the same loop, without collectives.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax

from swjax.linear.layouts import Axes
from swjax.linear.plans import Plan


class Ring(NamedTuple):
    """How the rows of a batch go around the devices of a mesh; static.

    Attributes:
      axes: mesh axes that shard the batch; the collectives run inside of a `jax.shard_map`.
      devices: number of them along these axes.
      group: neighbouring devices that all-gather their rows; divides `devices`.
      parts: in which a device processes the rows that visit it.
    """

    axes: Axes
    devices: int
    group: int
    parts: int

    def start(self, tree: Any) -> Any:
        """All-gathers arrays [b, ...] within each group: the first visiting rows, [group b, ...]."""
        if self.group == 1:
            return tree
        gather = lambda x: lax.all_gather(x, self.axes, axis_index_groups=self._groups, tiled=True)
        return jax.tree.map(gather, tree)

    def visit(self, see: Callable, own: Any, visiting: Any) -> tuple[Any, Any]:
        """Folds `see` over all blocks of visiting rows, which return to their device at the end.

        Args:
          see: (own, block) -> (own, block), with the structure and shapes that it was given.
          own: the tree that stays on this device.
          visiting: arrays [group b, ...], from `start` or equal in all of a group.

        Returns:
          (own, visiting), as the last calls left them.
        """
        hops = self.devices // self.group
        if hops == 1:
            return self._look(see, own, visiting)

        def hop(_, carry):
            own, visiting = self._look(see, *carry)
            return own, lax.ppermute(visiting, self.axes, self._next)

        return lax.fori_loop(0, hops, hop, (own, visiting))

    def home(self, tree: Any) -> Any:
        """The results for this device's own rows, one of each device of the group: [group, b, ...]."""

        def exchange(x):
            x = x.reshape(self.group, -1, *x.shape[1:])
            if self.group == 1:
                return x
            return lax.all_to_all(x, self.axes, 0, 0, axis_index_groups=self._groups)

        return jax.tree.map(exchange, tree)

    def sum(self, tree: Any) -> Any:
        """The sum over all devices."""
        return lax.psum(tree, self.axes) if self.devices > 1 else tree

    def _look(self, see, own, visiting):
        if self.parts == 1:
            return see(own, visiting)
        split = lambda x: x.reshape(self.parts, -1, *x.shape[1:])
        own, seen = lax.scan(see, own, jax.tree.map(split, visiting))
        return own, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), seen)

    @property
    def _groups(self) -> list[list[int]]:
        starts = range(0, self.devices, self.group)
        return [list(range(start, start + self.group)) for start in starts]

    @property
    def _next(self) -> list[tuple[int, int]]:
        return [(i, (i - self.group) % self.devices) for i in range(self.devices)]


def make_ring(plan: Plan, rows: int, width: int, *, pairs: int, numbers: int) -> Ring:
    """The ring for a batch [rows, width] that is sharded as the plan says, with blocks as large as allowed.

    Args:
      plan: see `swjax.linear.planning.plan_batch`.
      rows, width: of the whole batch.
      pairs: at most this many at once on a device.
      numbers: at most this many of visiting rows on a device.
    """
    axes = plan.splits(plan.token_axes)
    devices = 1 if plan.mesh is None else math.prod(plan.mesh.shape[axis] for axis in axes)
    own = rows // devices
    fits = lambda group: own * own * group <= pairs and own * group * width <= numbers
    group = max(n for n in _divisors(devices) if n == 1 or fits(n))
    parts = min(
        n for n in _divisors(own * group) if own * own * group <= n * pairs or n == own * group
    )
    return Ring(axes, devices, group, parts)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
