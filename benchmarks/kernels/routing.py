"""The numbers of rows of each expert in benchmarks; no JAX, because PyTorch's program imports it too."""

import numpy as np

ROUTINGS = ("equal", "uniform", "zipf")


def sizes_of(shape, tokens: int, routing: str) -> np.ndarray:
    """Returns the number of rows of each expert, which add up to ``tokens * shape.chosen``.

    Each token has different experts. "equal" has equal sizes, "uniform" equal probabilities, and the
    probability of expert i in "zipf" is 1 / i.

    >>> from benchmarks.kernels.shapes import ExpertShape
    >>> sizes_of(ExpertShape(4, 2, 8, 8), 6, "equal").tolist()
    [3, 3, 3, 3]
    """
    experts, chosen = shape.experts, shape.chosen
    if routing == "equal":
        return np.full(experts, tokens * chosen // experts)
    rng = np.random.default_rng(0)
    scores = rng.gumbel(size=(tokens, experts))  # the largest: a draw without replacement
    if routing == "zipf":
        scores -= np.log(np.arange(1, experts + 1))
    best = np.argpartition(scores, -chosen, axis=1)[:, -chosen:]
    return np.bincount(best.ravel(), minlength=experts)
