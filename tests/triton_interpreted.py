"""The kernels of `triton_gpu` on CPUs, in Triton's interpreter: every value they write, at small sizes.

`test_kernels_interpreted.py` runs these in a process of their own: Triton interprets what is imported while
TRITON_INTERPRET is set, and other tests compile its kernels. Not here: quantizing to fp8, which the
interpreter rounds otherwise than GPUs.
"""

import kernel_oracle as oracle
import pytest
import test_kernel_operations as on_gpus
from kernel_cases import DTYPES, PRODUCTS, ROW_OPERATIONS, normal, operands
from numeric import FLOOR_DB, snr_db
from triton_interpreter import interpreted

from swjax.kernels import tiles, triton_gpu

RAGGED = (7, 77)


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """`triton_gpu`, interpreted; the tests for GPUs run that, too."""
    monkeypatch.setattr(tiles, "multiprocessors", lambda: 1)
    with interpreted(triton_gpu) as module:
        run = lambda operation, *arrays, implementation, **options: getattr(module, operation)(
            *arrays, **options
        )
        monkeypatch.setattr(on_gpus, "run", run)
        monkeypatch.setattr(on_gpus.implementations, "run", run)
        monkeypatch.setattr(on_gpus, "RAGGED_ROWS", RAGGED)
        yield module


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operation", ROW_OPERATIONS)
def test_rows(operation, dtype):
    to = None if operation == "layer_norm_backward" else "int8"
    options = ROW_OPERATIONS[operation]
    on_gpus.check_row_operation(operation, "triton", normal(RAGGED, dtype), to, **options)


@pytest.mark.parametrize("count", [1, 3, 4])
def test_gradients_that_layer_norm_adds_in_passing(count):
    on_gpus.test_gradients_that_layer_norm_adds_in_passing("layer_norm_backward", "triton", count)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axes", [(-1,), (0,), (0, 1)])
def test_every_scope_gives_the_same_bits(axes, dtype):
    test = on_gpus.test_every_scope_and_format_gives_the_same_bits
    test("quantize", "triton", axes, dtype, "int8")


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_forms_of_a_weight(dtype):
    on_gpus.test_both_forms_of_a_weight_have_the_same_bits("quantize_both", "triton", dtype, "int8")
    on_gpus.test_known_maxima_give_the_same_bits("quantize_by", "triton", (0,), dtype, "int8")


@pytest.mark.parametrize("operation", ["layer_norm_backward", "gelu_backward"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_written_again(operation, dtype):
    on_gpus.test_what_a_backward_pass_writes_again_is_what_was_written(
        operation, "triton", RAGGED, dtype
    )


@pytest.mark.parametrize("dtypes, out_dtype", list(zip(PRODUCTS, DTYPES)))
def test_products(kernels, dtypes, out_dtype):
    a, b = operands((70, 40, 136), dtypes)
    bias = normal(136, out_dtype)
    y = kernels.matmul(a, b, bias, out_dtype=out_dtype)
    assert snr_db(y, oracle.matmul(a, b, bias)) > FLOOR_DB[out_dtype]
