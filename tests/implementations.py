"""The implementations of each operation of `swjax.kernels` as test parameters, and how tests call one."""

from functools import partial

import jax
import pytest

from swjax.kernels import dispatch


def of(*operations):
    """(operation, implementation) parameters. XLA runs everywhere, the others on GPUs."""
    return [
        pytest.param(operation, name, marks=[pytest.mark.gpu] * (name != "xla"))
        for operation in operations
        for name in ("xla", *dispatch.IMPLEMENTATIONS[operation])
    ]


def run(operation, *arrays, implementation, **options):
    """The operation, compiled. Skips, saying why, where the implementation is not for these arguments."""
    if implementation not in ("xla", None):
        reason = dispatch.why_not(implementation, operation, *arrays, **options)
        if reason:
            pytest.skip(f"{implementation} {reason}")
    return jax.jit(partial(dispatch.run, operation, implementation=implementation, **options))(
        *arrays
    )
