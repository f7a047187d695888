"""The reason why an implementation cannot compute an operation."""

from typing import NamedTuple


class Unavailable(NamedTuple):
    """Why an implementation cannot compute an operation on given arrays.

    Attributes:
      reason: the end of a sentence that starts with the implementation; it ends with the remedy.
      missing_package: whether the remedy is to install a package. If so, the automatic choice warns.

    >>> print("implementation 'triton'", Unavailable("takes no empty arrays: use 'xla'"))
    implementation 'triton' takes no empty arrays: use 'xla'
    """

    reason: str
    missing_package: bool = False

    def __str__(self) -> str:
        return self.reason
