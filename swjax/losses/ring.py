"""Visits all pairs of two batches sharded over many devices, one block of pairs at a time.

Each device keeps its rows of one batch, and the rows of the other batch move between devices. First, groups
of neighboring devices all-gather their rows; a group is as large as memory allows (`group`). Then the
groups' rows move around a ring. A small mesh gathers everything at once. A mesh of thousands of devices needs
few hops, and buffers do not grow with the number of devices. One device is a ring of one: the same loop
without collectives.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax

from swjax.linear.layouts import Axes
from swjax.linear.sharding import Sharding


class Ring(NamedTuple):
    """The static plan of how the rows of a batch move around the devices of a mesh.

    Attributes:
      axes: mesh axes that shard the batch; the collectives run inside `jax.shard_map`.
      devices: number of devices along these axes.
      group: number of neighboring devices that all-gather their rows; divides `devices`.
      parts: number of parts in which a device processes visiting rows.
    """

    axes: Axes
    devices: int
    group: int
    parts: int

    def start(self, tree: Any) -> Any:
        """All-gathers arrays [b, ...] within each group; returns the first visiting rows, [group b, ...]."""
        if self.group == 1:
            return tree
        gather = lambda x: lax.all_gather(x, self.axes, axis_index_groups=self._groups, tiled=True)
        return jax.tree.map(gather, tree)

    def visit(self, see: Callable, own: Any, visiting: Any) -> tuple[Any, Any]:
        """Folds `see` over all blocks of visiting rows, which return to their device at the end.

        Args:
          see: a function (own, block) -> (own, block) that preserves structure and shapes.
          own: tree that stays on this device.
          visiting: arrays [group b, ...], from `start`, or equal on all devices of a group.

        Returns:
          (own, visiting) after the last call.
        """
        hops = self.devices // self.group
        if hops == 1:
            return self._look(see, own, visiting)

        def hop(_, carry):
            own, visiting = self._look(see, *carry)
            return own, lax.ppermute(visiting, self.axes, self._next)

        return lax.fori_loop(0, hops, hop, (own, visiting))

    def home(self, tree: Any) -> Any:
        """Sends results to the devices of their rows: [group, b, ...], one result from each group member."""

        def exchange(x):
            x = x.reshape(self.group, -1, *x.shape[1:])
            if self.group == 1:
                return x
            return lax.all_to_all(x, self.axes, 0, 0, axis_index_groups=self._groups)

        return jax.tree.map(exchange, tree)

    def sum(self, tree: Any) -> Any:
        """Sums a tree over all devices."""
        return lax.psum(tree, self.axes) if self.devices > 1 else tree

    def _look(self, see, own, visiting):
        if self.parts == 1:
            return see(own, visiting)
        split = lambda x: x.reshape(self.parts, -1, *x.shape[1:])
        own, seen = lax.scan(see, own, jax.tree.map(split, visiting))
        return own, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), seen)

    @property
    def _groups(self) -> list[list[int]] | None:
        if self.group == self.devices:
            return None  # JAX cannot map an all-to-all within groups by `jax.vmap`
        starts = range(0, self.devices, self.group)
        return [list(range(start, start + self.group)) for start in starts]

    @property
    def _next(self) -> list[tuple[int, int]]:
        return [(i, (i - self.group) % self.devices) for i in range(self.devices)]


def make_ring(sharding: Sharding, rows: int, width: int, *, pairs: int, numbers: int) -> Ring:
    """Builds the ring for a batch [rows, width] with the given sharding and the largest allowed blocks.

    Args:
      sharding: see `swjax.linear.sharding.sharding_of_batch`.
      rows, width: size of the whole batch.
      pairs: largest number of pairs on a device at once.
      numbers: largest number of elements of visiting rows on a device.
    """
    axes = sharding.sharded_axes(sharding.token_axes)
    devices = 1 if sharding.mesh is None else math.prod(sharding.mesh.shape[axis] for axis in axes)
    own = rows // devices
    fits = lambda group: own * own * group <= pairs and own * group * width <= numbers
    group = max(n for n in _divisors(devices) if n == 1 or fits(n))
    parts = min(
        n for n in _divisors(own * group) if own * own * group <= n * pairs or n == own * group
    )
    return Ring(axes, devices, group, parts)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
