"""Which implementation of each operation runs: the table, and the one place that chooses from it."""

from collections.abc import Callable

from swjax.kernels import reference

# {operation: {implementation: function}}. Every implementation of an operation has the signature and the
# result of its specification in `reference`, which is the one named "xla".
IMPLEMENTATIONS: dict[str, dict[str, Callable]] = {
    "quantize": {"xla": reference.quantize},
    "matmul": {"xla": reference.matmul},
}


def choose(operation: str, implementation: str | None = None) -> Callable:
    """The function that computes `operation`.

    Args:
      operation: "quantize" or "matmul".
      implementation: the name of one; None leaves the choice to swjax.

    Returns:
      A function with the signature of its specification in `swjax.kernels.reference`.

    Raises:
      ValueError: no implementation of that name exists.

    >>> choose("matmul") is reference.matmul
    True
    """
    known = IMPLEMENTATIONS[operation]
    if implementation is None:
        return known["xla"]
    if implementation not in known:
        raise ValueError(
            f"implementation of {operation!r} must be one of {sorted(known)} or None (automatic), "
            f"got {implementation!r}"
        )
    return known[implementation]
