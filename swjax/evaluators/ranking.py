"""Ranks of the correct candidates, recall at k, and expected recall by chance."""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from swjax.models import sharding

# Cosines that differ by less count as a tie. float32 rounds sums differently at different positions of a
# matrix, so otherwise a model with equal embeddings would win some comparisons by chance.
TIE = 1e-6
# Similarities in memory at once: 64 MiB in float32, regardless of the number of queries.
CHUNK = 2**24


def ranks(
    queries: np.ndarray, candidates: np.ndarray, correct: Sequence[Sequence[int]]
) -> np.ndarray:
    """Counts the wrong candidates that score at least as high as the best correct candidate of each query.

    Query i is answered within the first k if and only if its rank is less than k. Ties and NaN count against
    the model: equal embeddings, and embeddings of a diverged model, have the worst rank.

    Args:
      queries: [n, e] float32, rows of length 1.
      candidates: [m, e] float32, rows of length 1.
      correct: for each query the indices of its correct candidates; an empty list is never answered.

    Returns:
      Ranks [n], from 0 (answered first) to m.

    >>> x = np.eye(3, dtype=np.float32)
    >>> ranks(x, x, [[0], [1], [2]]), ranks(x, x, [[0], [0, 1], [0]])
    (array([0, 0, 0]), array([0, 0, 2]))
    """
    n, m = len(queries), len(candidates)
    rows = max(1, min(n, CHUNK // max(m, 1)))
    out = np.empty(n, np.int64)
    for start in range(0, n, rows):
        part = queries[start : start + rows]
        mask = np.zeros((rows, m), bool)
        for row, indices in enumerate(correct[start : start + rows]):
            mask[row, indices] = True
        # A constant shape compiles only once.
        padded = np.pad(part, ((0, rows - len(part)), (0, 0)))
        out[start : start + rows] = _jit(_ranks)(padded, candidates, mask)[: len(part)]
    return out


def _ranks(queries, candidates, correct):
    similarity = _similarity(queries, candidates)
    best = jnp.max(jnp.where(correct, similarity, -jnp.inf), axis=1, keepdims=True)
    below = similarity < best - TIE  # false for NaN
    return jnp.sum(~(below | correct), axis=1)


def top(queries: np.ndarray, candidates: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Finds the k candidates most similar to each query, best first; NaN comes last.

    Args:
      queries: [n, e] float32, rows of length 1; all n x m similarities are in memory at once.
      candidates: [m, e] float32, rows of length 1; m >= k.
      k: number of candidates per query.

    Returns:
      (indices [n, k], cosines [n, k]).
    """
    cosines, indices = _jit(_top, "k")(queries, candidates, k)
    return np.asarray(indices), np.asarray(cosines)


def _top(queries, candidates, k):
    similarity = _similarity(queries, candidates)
    # `top_k` takes NaN for the largest.
    _, indices = jax.lax.top_k(jnp.where(jnp.isnan(similarity), -jnp.inf, similarity), k)
    return jnp.take_along_axis(similarity, indices, axis=1), indices


@functools.cache
def _jit(function, static=()):
    """The function, compiled without XLA's Triton products, which take 5 s each to compile on a GPU."""
    options = sharding.compiler_options()
    return jax.jit(function, static_argnames=static, compiler_options=options)


def _similarity(queries, candidates):
    return jnp.matmul(queries, candidates.T, precision="highest")


def recall(ranks: np.ndarray, k: int) -> float:
    """The fraction of queries that are answered within the first k.

    >>> recall(np.array([0, 3, 1, 9]), 3)
    0.5
    """
    return float(np.mean(np.asarray(ranks) < k))


def chance(correct: Sequence[Sequence[int]], candidates: int, k: int) -> float:
    """The expected recall at k of a uniformly random order.

    For a query with c correct ones among m candidates, the miss probability is C(m - c, k) / C(m, k).

    Args:
      correct: for each query the indices of its correct candidates.
      candidates: m, the number of candidates.
      k: number of candidates that count.

    >>> chance([[0], [1]], candidates=10, k=5), chance([[0, 1]], candidates=4, k=2)
    (0.5, 0.8333333333333334)
    """
    k = min(k, candidates)
    counts, repeats = np.unique([len(set(c)) for c in correct], return_counts=True)
    total = math.comb(candidates, k)
    misses = sum(
        r * (math.comb(candidates - c, k) / total) for c, r in zip(counts.tolist(), repeats)
    )
    return float(1 - misses / len(correct))
