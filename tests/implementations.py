"""The implementations of each operation of `swjax.kernels` as test parameters, and `run`, which calls one.

Besides "xla", which runs everywhere, and the kernels, which run on GPUs, CPUs have "triton interpreted" and
"mosaic_gpu interpreted": the same kernels in the interpreters of Triton and Pallas, at small sizes.
"""

import os
from functools import partial

import interpreters
import jax
import jax.numpy as jnp
import pytest

from swjax.kernels import dispatch
from swjax.kernels.reference import QTensor

# Compiler options that restore the optimizations which tests/conftest.py disables.
AS_USERS_COMPILE = {}
if jax.config.values["jax_disable_most_optimizations"]:
    AS_USERS_COMPILE |= {
        "xla_backend_optimization_level": 3,
        "xla_llvm_disable_expensive_passes": False,
    }
if "--xla_cpu_use_fusion_emitters" in os.environ["XLA_FLAGS"]:
    AS_USERS_COMPILE["xla_cpu_use_fusion_emitters"] = True

INTERPRETED = " interpreted"


def of(*operations):
    """Returns (operation, implementation) parameters of all compiled implementations."""
    return [
        pytest.param(operation, name, marks=[pytest.mark.gpu] * (name != "xla"))
        for operation in operations
        for name in ("xla", *dispatch.IMPLEMENTATIONS[operation])
    ]


def each(*operations, compiled, interpreted, name="shape"):
    """Parametrizes a test by (operation, implementation, shape).

    Args:
      operations: keys of `dispatch.IMPLEMENTATIONS`.
      compiled: shapes for compiled implementations, or {implementation: shapes}.
      interpreted: shapes for kernels in interpreters, or {kernel: shapes}.
      name: of the test's third argument.
    """
    if not isinstance(interpreted, dict):
        interpreted = dict.fromkeys(dispatch.NAMES, interpreted)
    if not isinstance(compiled, dict):
        compiled = dict.fromkeys(("xla", *dispatch.NAMES), compiled)
    kinds = [
        (parameter.values, parameter.marks, compiled[parameter.values[1]])
        for parameter in of(*operations)
    ] + [
        ((operation, kernel + INTERPRETED), interpreters.SKIPS[kernel], interpreted[kernel])
        for operation in operations
        for kernel in dispatch.IMPLEMENTATIONS[operation]
    ]
    parameters = [
        pytest.param(*values, shape, marks=marks, id="-".join([*values, name_of(shape)]))
        for values, marks, shapes in kinds
        for shape in shapes
    ]
    return pytest.mark.parametrize(f"operation, implementation, {name}", parameters)


def name_of(shape):
    return shape if isinstance(shape, str) else "x".join(map(str, shape))


def at(*operations, shapes, xla, name="shape"):
    """Parametrizes a test of compiled implementations by (operation, implementation, shape).

    Args:
      operations: keys of `dispatch.IMPLEMENTATIONS`.
      shapes: those for kernels, whose tiles differ between shapes.
      xla: the few of them for XLA, which has no tiles.
      name: of the test's third argument.
    """
    compiled = dict.fromkeys(dispatch.NAMES, shapes) | {"xla": xla}
    return each(*operations, compiled=compiled, interpreted=[], name=name)


# Implementations of a layer. An operation without an implementation of that name uses XLA; None chooses
# automatically.
OF_LAYERS = [
    "xla",
    *(pytest.param(name, marks=pytest.mark.gpu) for name in ("triton", "mosaic_gpu", None)),
]


def require(implementation):
    """Skips a test, with the reason, if no layer can run in `implementation` on this machine."""
    if implementation not in ("xla", None):
        eye = jnp.eye(128, dtype=jnp.int8)
        q = QTensor(eye, jnp.ones((128, 1)))
        if reason := dispatch.why_not(implementation, "matmul", q, q):
            pytest.skip(f"{implementation} {reason}")


def run(operation, *arrays, implementation, **options):
    """Runs the operation. Skips the test, with the reason, if the implementation cannot run it."""
    if implementation and implementation.endswith(INTERPRETED):
        name = implementation.removesuffix(INTERPRETED)
        return interpreters.run(name, operation, *arrays, **options)
    if implementation not in ("xla", None):
        if reason := dispatch.why_not(implementation, operation, *arrays, **options):
            pytest.skip(f"{implementation} {reason}")
    function = partial(dispatch.run, operation, implementation=implementation, **options)
    # Quantizers must give the same bits as the oracle; other operations are compared within tolerances.
    options = (
        AS_USERS_COMPILE if operation in ("quantize", "quantize_by", "quantize_both") else None
    )
    return jax.jit(function, compiler_options=options)(*arrays)
