"""The implementations of each operation of `swjax.kernels` as test parameters, and `run`, which calls one.

Besides "xla", which runs everywhere, and the kernels, which run on GPUs, CPUs have "triton interpreted" and
"mosaic_gpu interpreted": the same kernels in the interpreters of Triton and Pallas, at small sizes.
"""

import itertools
import os
import sys
from functools import partial

import interpreters
import jax
import jax.numpy as jnp
import pytest

from swjax.kernels import dispatch, targets
from swjax.kernels.reference import QTensor
from swjax.recipes import RECIPES

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
# Kernels for GPUs; tests/test_kernels_tpu.py has those for TPUs.
KERNELS = ("triton", "mosaic_gpu")


def kernels_of(operation):
    """The kernels for GPUs of an operation."""
    return [name for name in dispatch.IMPLEMENTATIONS[operation] if name in KERNELS]


OPERATIONS = [operation for operation in dispatch.IMPLEMENTATIONS if kernels_of(operation)]


def of(*operations):
    """Returns (operation, implementation) parameters of all compiled implementations."""
    return [
        pytest.param(operation, name, marks=[pytest.mark.gpu] * (name != "xla"))
        for operation in operations
        for name in ("xla", *kernels_of(operation))
    ]


def release(*values):
    """A parameter that is tested only before a release."""
    return pytest.param(*values, marks=pytest.mark.release)


def each(
    *operations, compiled, interpreted, name="shape", kept=1, options=("", [()]), few_options=None
):
    """Parametrizes a test by (operation, implementation, shape, *options).

    GPUs compute all cases. Elsewhere XLA computes few options, and interpreters, which are slow, one shape
    with few options, or with one option for each operation if every option still meets an operation; the
    others before a release.

    Args:
      operations: keys of `dispatch.IMPLEMENTATIONS`.
      compiled: shapes for compiled implementations, or {implementation: shapes}.
      interpreted: shapes for kernels in interpreters, or {kernel: shapes}.
      name: of the test's third argument.
      kept: number of first interpreted shapes that every run of the tests computes.
      options: names of further arguments, and their values, tuples.
      few_options: the values that every run of the tests computes without a GPU; None: all.
    """
    names, values = options
    if not isinstance(interpreted, dict):
        interpreted = dict.fromkeys(KERNELS, interpreted)
    if not isinstance(compiled, dict):
        compiled = dict.fromkeys(("xla", *KERNELS), compiled)
    few = values if few_options is None else few_options
    in_turn = few_options is not None and len(operations) >= len(few)
    kinds = [
        (parameter.values, parameter.marks, compiled[parameter.values[1]], sys.maxsize)
        for parameter in of(*operations)
    ] + [
        ((operation, kernel + INTERPRETED), interpreters.SKIPS[kernel], interpreted[kernel], kept)
        for operation in operations
        for kernel in kernels_of(operation)
    ]
    parameters = []
    for kind, marks, shapes, first in kinds:
        chosen = few
        if in_turn and kind[1].endswith(INTERPRETED):
            chosen = [few[operations.index(kind[0]) % len(few)]]
        for (number, shape), option in itertools.product(enumerate(shapes), values):
            rare = number >= first or (on_cpu(kind[1]) and option not in chosen)
            parameters.append(
                pytest.param(
                    *kind,
                    shape,
                    *option,
                    marks=[*marks, *[pytest.mark.release] * rare],
                    id="-".join([*kind, name_of(shape), *map(name_of, option)]),
                )
            )
    names = ", ".join(["operation, implementation", name, *([names] if names else [])])
    return pytest.mark.parametrize(names, parameters)


def on_cpu(implementation):
    return implementation == "xla" or implementation.endswith(INTERPRETED)


def name_of(value):
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def at(*operations, shapes, xla, name="shape"):
    """Parametrizes a test of compiled implementations by (operation, implementation, shape).

    Args:
      operations: keys of `dispatch.IMPLEMENTATIONS`.
      shapes: those for kernels, whose tiles differ between shapes.
      xla: the few of them for XLA, which has no tiles.
      name: of the test's third argument.
    """
    compiled = dict.fromkeys(KERNELS, shapes) | {"xla": xla}
    return each(*operations, compiled=compiled, interpreted=[], name=name)


# Implementations of a layer. An operation without an implementation of that name uses XLA; None chooses
# automatically.
OF_LAYERS = [
    "xla",
    *(pytest.param(name, marks=pytest.mark.gpu) for name in ("triton", "mosaic_gpu", None)),
]


def require(implementation, recipe="switchback"):
    """Skips a test, with the reason, if no layer of `recipe` can run in `implementation` on this machine."""
    if implementation == "triton" and recipe in ("standard", "fp8_block128"):
        pytest.skip("Triton has none of this recipe's products")
    formats = targets.block_formats()
    if RECIPES[recipe].is_emulated(formats) and jax.default_backend() != "cpu":
        pytest.skip("products in block formats are emulated through XLA, which warns")
    if recipe == "fp8_hadamard" and implementation not in ("xla", None):
        pytest.skip("kernels for the weight gradient of rotated tokens are int8 only")
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
