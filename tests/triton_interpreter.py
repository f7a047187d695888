"""Runs the Triton kernels of swjax in Triton's interpreter, on NumPy arrays: no GPU, PyTorch or jax-triton.

Imported by the process of `interpreters`, with TRITON_INTERPRET=1.
"""

import jax
import jax.numpy as jnp
import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from swjax.kernels import dispatch, tiles
from swjax.kernels.triton_gpu import arithmetic, launcher


def run(operation, *arrays, **options):
    """Runs a Triton kernel; returns its results as NumPy arrays."""
    function = getattr(dispatch.module_of("triton", operation), operation)
    return jax.tree.map(np.asarray, function(*arrays, **options))


class Pointer:
    """An array with the attributes of a tensor that the interpreter reads."""

    def __init__(self, array: np.ndarray):
        self.array, self.dtype = array, array.dtype

    def data_ptr(self) -> int:
        return self.array.ctypes.data


class Executor(interpreter.GridExecutor):
    """Runs a kernel on arrays that are already on the host."""

    def _init_args_hst(self, args, kwargs):
        return args, kwargs

    def _restore_args_dev(self, *_):
        pass


class Results(list):
    get_result = list.__getitem__


def inline_asm(_, text, constraints, values, types, is_pure, pack):
    """Computes the inline assembly of swjax's kernels in NumPy."""
    x = values[0].data
    if "rcp.approx" in text:
        found = [np.float32(1) / x]
    elif "shl.b32 $0" in text:
        found = [x.view(jnp.bfloat16).astype(np.float32)]
    elif "cvt.rn.bf16x2" in text:
        rounded = x.astype(jnp.bfloat16)
        found = [rounded.view(np.uint16), rounded.astype(np.float32)]
    else:
        raise ValueError(f"instructions that are not known here: {text}")
    return Results(
        interpreter.TensorHandle(data, dtype.scalar if hasattr(dtype, "scalar") else dtype)
        for data, dtype in zip(found, types, strict=True)
    )


def call(*arrays, kernel, out_type, grid, num_warps, num_stages=1, registers=None, **constants):
    """Replaces `launcher.call`. Results that the kernel does not write are NaN, or 99 for integers."""
    inputs = [Pointer(np.array(array[...], order="C")) for array in arrays]
    outputs = jax.tree.map(lambda out: Pointer(poisoned(out.shape, out.dtype)), out_type)
    Executor(kernel.rewrite(), kernel.arg_names, grid)(
        *inputs, *jax.tree.leaves(outputs), **constants
    )
    for array, pointer in zip(arrays, inputs):
        if isinstance(array, jax.Ref):
            array[...] = jnp.asarray(pointer.array)
    return jax.tree.map(lambda pointer: jnp.asarray(pointer.array), outputs)


def poisoned(shape, dtype) -> np.ndarray:
    dtype = np.dtype(dtype)
    return np.full(shape, 99 if dtype.kind in "iu" else np.nan, dtype)


class Reductions(interpreter.ReduceOps):
    """The interpreter calls the functions of reductions for each element; this takes NumPy for maxima."""

    def apply_impl(self, arrays):
        if self.combine_fn is arithmetic.nan_maximum:
            return self.min_max(arrays, val_reduce_op=np.max)
        return super().apply_impl(arrays)


def patch_language(lang, scope, patch=interpreter._patch_lang_core):
    """Makes loop variables of `tl.range` tensors, as in compiled kernels; the interpreter has integers."""
    patch(lang, scope)
    count, tensor = lang.range, interpreter.interpreter_semantic.to_tensor
    scope.set_attr(lang, "range", lambda *bounds, **_: map(tensor, count(*map(int, bounds))))


# Dtypes that the interpreter stores as integers.
AS_INTEGERS = {
    tl.bfloat16: jnp.bfloat16,
    tl.float8e4nv: jnp.float8_e4m3fn,
    tl.float8e5: jnp.float8_e5m2,
}


class Builder(type(interpreter.interpreter_builder)):
    """The interpreter with casts that round as GPUs do (its own truncate), and with products of bf16."""

    create_inline_asm = inline_asm

    def cast_impl(self, source, to):
        if source.dtype.scalar == tl.float32 and to.scalar in AS_INTEGERS:
            data = source.data.astype(AS_INTEGERS[to.scalar])
            return interpreter.TensorHandle(data.view(f"u{data.itemsize}"), to.scalar)
        return super().cast_impl(source, to)

    def create_fp_to_fp(self, source, to, rounding_mode):
        if source.dtype.scalar == tl.float32:
            return self.cast_impl(source, to)
        return super().create_fp_to_fp(source, to, rounding_mode)

    def create_dot(self, a, b, *rest):
        return super().create_dot(to_float32(a), to_float32(b), *rest)


def to_float32(handle):
    if handle.dtype.scalar not in AS_INTEGERS:
        return handle
    data = handle.data.view(AS_INTEGERS[handle.dtype.scalar]).astype(np.float32)
    return interpreter.TensorHandle(data, tl.float32)


def install():
    """Replaces the launcher in this process. Not done on import, since pytest imports every file."""
    interpreter.interpreter_builder.__class__ = Builder
    interpreter._patch_lang_core = patch_language
    interpreter.ReduceOps = Reductions
    launcher.call = call
    tiles.multiprocessors = lambda: 1  # so that each program handles several blocks
