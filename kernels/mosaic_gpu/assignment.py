"""Which block of threads processes which units of a kernel.

In programs of one device blocks are persistent: one on each multiprocessor, with an equal share of the units.
A block starts once, and copies the next unit while it writes one.

Collectives of NCCL occupy multiprocessors for as long as they run. Persistent blocks that find no place start
when the others end, so the kernel takes up to twice as long, and a collective waits for a whole kernel. So in
programs of several devices a kernel has more blocks than multiprocessors, each with a few units. The GPU
starts them in the order of their numbers, each one where another block has ended. Blocks of collectives come
first, because XLA gives their stream the highest priority.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import jax
from jax import lax

from swjax.kernels import targets, tiles

# The work of a block that is not persistent, in steps of `pipeline`. Those of 128 x 256 sums take 0.8 us on
# an H200. A block starts in 2 to 3 us: 4% of MOST_STEPS, 12% of LEAST_STEPS.
MOST_STEPS, LEAST_STEPS = 96, 32
# Blocks that each multiprocessor runs. With fewer, most multiprocessors wait for the last blocks.
ROUNDS = 4


@dataclass(frozen=True)
class Assignment:
    """The units of each cluster of blocks.

    Clusters that run at the same time process neighbouring units, which share operands in the L2 cache.
    Cluster i of the first `at_once` ones has the units i, i + at_once, i + 2 at_once, ... The next `at_once`
    clusters have the units after those.

    Attributes:
      at_once: number of clusters that run at the same time if nothing else uses the GPU.
      most: largest number of units of a cluster.
      clusters: number of clusters of the kernel; `at_once` if they are persistent.
    """

    at_once: int
    most: int
    clusters: int

    def count(self, total: int | jax.Array, cluster: jax.Array) -> jax.Array:
        """The number of units of a cluster, of `total` units."""
        count = (total - self._first(cluster) + self.at_once - 1) // self.at_once
        return count if self.clusters == self.at_once else lax.clamp(0, count, self.most)

    def number(self, cluster: jax.Array, unit: jax.Array) -> jax.Array:
        """The number of a unit of a cluster; `unit` counts its units."""
        return self._first(cluster) + unit * self.at_once

    def _first(self, cluster: jax.Array) -> jax.Array:
        if self.clusters == self.at_once:
            return cluster
        turn = lax.div(cluster, self.at_once)
        return cluster + turn * (self.at_once * (self.most - 1))


def assign(
    total: int, steps: int, *, cluster: int = 1, multiprocessors: int | None = None
) -> Assignment:
    """Assigns the units of a kernel that the program being traced launches.

    Args:
      total: number of units, or a bound of it.
      steps: the work of a unit, see `MOST_STEPS`.
      cluster: number of blocks of a cluster, which process a unit together.
      multiprocessors: those of the GPU; None: see `tiles`.

    >>> assign(1024, 32, cluster=2, multiprocessors=132)
    Assignment(at_once=66, most=16, clusters=66)
    >>> with units_of_a_block(2):
    ...     assign(1024, 32, cluster=2, multiprocessors=132)
    Assignment(at_once=66, most=2, clusters=528)
    """
    at_once = (multiprocessors or tiles.multiprocessors()) // cluster
    share = -(-total // at_once)
    most = share if is_persistent() else most_units()
    if most is None:
        work = min(MOST_STEPS, max(LEAST_STEPS, share * steps // ROUNDS))
        most = max(1, work // max(1, steps))
    rounds = -(-total // (at_once * most))
    return Assignment(at_once, most, rounds * at_once)


def is_persistent() -> bool:
    """Whether the blocks of the program being traced are persistent: it is for one device."""
    return most_units() == 0


def most_units() -> int | None:
    """The largest number of units of a block of the program; 0: persistent blocks; None: `assign` chooses."""
    if _chosen.value is None and not targets.is_distributed():
        return 0
    return _chosen.value


# JAX traces a function again if the value differs from that of an earlier trace.
_chosen = jax.make_user_context()


@contextlib.contextmanager
def units_of_a_block(most: int) -> Iterator[None]:
    """A context in which kernels are traced for blocks of at most `most` units; 0: persistent blocks.

    For measurements and tests; otherwise `assign` chooses.
    """
    with _chosen(most):
        yield
