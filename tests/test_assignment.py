"""Blocks of threads that are not persistent compute the same bits, and are chosen for several devices."""

from functools import partial

import interpreters
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from swjax.kernels import reference, saved_programs
from swjax.kernels.block_formats.reference import quantize_segments, quantize_squares
from swjax.kernels.mosaic_gpu.assignment import assign, is_persistent, units_of_a_block


@pytest.mark.parametrize(
    "most, at_once, total", [(0, 4, 9), (1, 4, 9), (2, 66, 500), (3, 66, 1024), (5, 4, 1)]
)
def test_clusters_process_every_unit_once_in_windows_of_neighbours(most, at_once, total):
    with units_of_a_block(most):
        assignment = assign(total, 32, multiprocessors=at_once)
    clusters, units = np.arange(assignment.clusters), np.arange(most or total)
    count = np.asarray(jax.vmap(partial(assignment.count, total))(clusters))
    number = np.asarray(jax.vmap(lambda i: assignment.number(i, units))(clusters))
    processed = units < count[:, None]
    assert sorted(number[processed].tolist()) == list(range(total))
    # The clusters that run at the same time: each of their units is one behind that of the cluster before.
    for first in range(0, len(clusters), at_once):
        window = number[first : first + at_once]
        assert (np.diff(window, axis=0) == 1).all()


def traced(devices, function):
    """The value of a function while a program for some devices is traced."""
    mesh = jax.make_mesh((devices,), ("data",), (AxisType.Auto,), devices=jax.devices()[:devices])
    found = []

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    def program(x):
        found.append(function())
        return x

    program.trace(jax.ShapeDtypeStruct((2,), jnp.float32))
    return found[0]


@pytest.mark.parametrize(
    "total, steps, most",
    [(1024, 32, 3), (1024, 112, 1), (256, 32, 1), (4096, 8, 12), (128, 8, 4), (10, 200, 1)],
)
def test_a_block_has_about_75_us_of_work_and_long_kernels_several_rounds(total, steps, most):
    found = traced(2, partial(assign, total, steps, cluster=2, multiprocessors=132))
    assert found.most == most and found.clusters * most >= total


def test_blocks_are_persistent_for_one_device():
    assert is_persistent() and traced(1, is_persistent) and not traced(2, is_persistent)
    name = partial(saved_programs._name, ("mosaic_gpu",), ())
    assert name() == traced(1, name) != traced(2, name)  # a saved kernel is for one of them


OPERATIONS = [
    "matmul",
    "matmul_sum",
    "block_matmul",
    "block_weight_gradient",
    "ragged_matmul",
    "ragged_weight_gradient",
    "ragged_block_weight_gradient",
    "symmetric_product",
]


def random(*shape, dtype="bfloat16"):
    return jax.random.normal(jax.random.key(sum(shape)), shape, dtype)


def operands(operation):
    """Small arrays and options of an operation, with tiles past the edges."""
    rows, k, n = 328, 128, 600
    if operation == "block_matmul":
        e4m3 = {"dtype": "float8_e4m3fn", "block": 128}
        a, b = quantize_segments(random(rows, k), axes=(-1,), **e4m3)[0], random(k, 640)
        return (a, quantize_squares(b, **e4m3)[0]), {"out_dtype": "bfloat16"}
    a = reference.quantize(random(rows, k))
    b = reference.quantize(random(n, k), axes=(0, 1))
    sizes = jnp.array([40, 0, 200, 80], jnp.int32)
    blocks = {"dtypes": ("int8", "int8"), "block": 128, "rotation": 128, "out_dtype": "float32"}
    return {
        "matmul": ((a, b), {"out_dtype": "bfloat16"}),
        "matmul_sum": (((a, a), (b, b)), {"out_dtype": "bfloat16"}),
        "block_weight_gradient": ((random(rows, 128), random(rows, 320)), blocks),
        "ragged_matmul": (
            (random(rows, 128), random(4, 128, 320), sizes),
            {"axis": 1, "out_dtype": "bfloat16"},
        ),
        "ragged_weight_gradient": (
            (random(rows, 128), random(rows, 320), sizes),
            {"out_dtype": "float32"},
        ),
        "ragged_block_weight_gradient": (
            (random(rows, 128), (random(rows, 192),), sizes),
            blocks,
        ),
        "symmetric_product": ((random(2, 448, 128),) * 2, {}),
    }[operation]


@pytest.mark.parametrize(
    "operation, most",
    [
        pytest.param(*case, marks=[*interpreters.SKIPS["mosaic_gpu"], *marks])
        for case, marks in [
            (("matmul", 2), []),
            *(((operation, 1), [pytest.mark.release]) for operation in OPERATIONS),
            (("symmetric_product", 3), [pytest.mark.release]),
        ]
    ],
)
def test_more_blocks_than_multiprocessors_compute_the_same_bits(operation, most):
    arrays, options = operands(operation)
    kernel = partial(interpreters.run, "mosaic_gpu", operation, *arrays, **options)
    expected = kernel()
    with units_of_a_block(most):
        found = kernel()
    jax.tree.map(np.testing.assert_array_equal, found, expected)
