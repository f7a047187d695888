"""Launches Triton kernels in Triton's interpreter, on NumPy arrays: no GPU, no PyTorch, no jax-triton."""

import importlib.util
from contextlib import contextmanager
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from triton.runtime import interpreter


class Pointer:
    """What the interpreter asks of a tensor."""

    def __init__(self, array: np.ndarray):
        self.array, self.dtype = array, array.dtype

    def data_ptr(self) -> int:
        return self.array.ctypes.data


class Executor(interpreter.GridExecutor):
    """Of arrays that are on the host already."""

    def _init_args_hst(self, args, kwargs):
        return args, kwargs

    def _restore_args_dev(self, *_):
        pass


class Results(list):
    get_result = list.__getitem__


def inline_asm(_, text, constraints, values, types, is_pure, pack):
    """The instructions that swjax's kernels write as assembly."""
    x = values[0].data
    if "rcp.approx" in text:
        found = [np.float32(1) / x]
    elif "shl.b32 $0" in text:
        found = [x.view(jnp.bfloat16).astype(np.float32)]
    elif "cvt.rn.bf16x2" in text:
        narrow = x.astype(jnp.bfloat16)
        found = [narrow.view(np.uint16), narrow.astype(np.float32)]
    else:
        raise ValueError(f"instructions that are not known here: {text}")
    return Results(
        interpreter.TensorHandle(data, dtype.scalar if hasattr(dtype, "scalar") else dtype)
        for data, dtype in zip(found, types, strict=True)
    )


def call(*arrays, kernel, out_type, grid, num_warps, **constants):
    """`triton_gpu._call`; what no program writes stays NaN, or 99."""
    inputs = [Pointer(np.ascontiguousarray(array)) for array in arrays]
    outputs = jax.tree.map(lambda out: Pointer(poisoned(out.shape, out.dtype)), out_type)
    Executor(kernel.rewrite(), kernel.arg_names, grid)(
        *inputs, *jax.tree.leaves(outputs), **constants
    )
    return jax.tree.map(lambda pointer: jnp.asarray(pointer.array), outputs)


def poisoned(shape, dtype) -> np.ndarray:
    dtype = np.dtype(dtype)
    return np.full(shape, 99 if dtype.kind in "iu" else np.nan, dtype)


def patch_language(lang, scope, patch=interpreter._patch_lang_core):
    """Counts of `tl.range` are tensors, as they are when compiled; the interpreter has integers."""
    patch(lang, scope)
    count, tensor = lang.range, interpreter.interpreter_semantic.to_tensor
    scope.set_attr(lang, "range", lambda *bounds, **_: map(tensor, count(*map(int, bounds))))


@contextmanager
def interpreted(module: ModuleType):
    """A copy of a module of Triton kernels whose `_call` interprets them. Triton must have been imported with
    TRITON_INTERPRET=1."""
    spec = importlib.util.spec_from_file_location(f"{module.__name__}_interpreted", module.__file__)
    copy = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(interpreter.interpreter_builder), "create_inline_asm", inline_asm)
        patch.setattr(interpreter, "_patch_lang_core", patch_language)
        spec.loader.exec_module(copy)
        copy._call = call
        yield copy
