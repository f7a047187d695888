"""The arithmetic of a linear layer on one device: the only calls of `swjax.kernels.dispatch` by the layer."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from swjax.kernels import dispatch, reference
from swjax.kernels.reference import QTensor
from swjax.linear.prologues import add
from swjax.recipes import LONGEST_INT8_SUM, Product


class Arithmetic(NamedTuple):
    """Settings of the computation on one device; static.

    Attributes:
      implementation: implementation of the quantized operations, see `swjax.kernels.dispatch`; None chooses.
      precision: precision of the products without quantization, see `jax.lax.dot_general`.
    """

    implementation: str | None = None
    precision: jax.lax.PrecisionLike = None

    def run(self, operation: str, *arrays: Any, **options: Any) -> Any:
        """Calls `dispatch.run` with this implementation."""
        return dispatch.run(operation, *arrays, implementation=self.implementation, **options)

    def _has_kernel(self, operation: str, *arrays: Any, **options: Any) -> bool:
        """Calls `dispatch.has_kernel` with this implementation."""
        return dispatch.has_kernel(
            operation, *arrays, implementation=self.implementation, **options
        )

    @property
    def reads_last_axis(self) -> bool:
        """Whether quantized operands are transposed, so that products sum over their last axis.

        GPU kernels need this order. XLA for CPUs supports either axis, and is slow after a transpose.
        """
        return jax.default_backend() == "gpu" and self.implementation != "xla"

    def product(
        self,
        a: jax.Array | QTensor,
        b: jax.Array | QTensor,
        bias: jax.Array | None = None,
        addend: jax.Array | None = None,
        *,
        axes: tuple[int, int],
        out_dtype: str,
    ) -> jax.Array:
        """``a b + bias + addend``, summed over `axes`.

        Args:
          a: [..., k] array or QTensor, or [k, n] if its summed axis is 0.
          b: [k, n] or [n, k] array or QTensor; a and b are both quantized or both not.
          bias: [n] or None.
          addend: [..., n] or None.
          axes: the summed axis of a and of b.
          out_dtype: dtype of the result.

        >>> from jax.numpy import ones
        >>> Arithmetic().product(ones((2, 3)), ones((3, 4)), axes=(-1, 0), out_dtype="float32").shape
        (2, 4)
        """
        if isinstance(a, QTensor) and isinstance(b, QTensor):
            return self._quantized_product(a, b, bias, addend, axes, out_dtype)
        assert not (isinstance(a, QTensor) or isinstance(b, QTensor)), (
            "both are quantized, or neither"
        )
        contract = (axes[0] % a.ndim,), (axes[1] % b.ndim,)
        y = reference.dot(a, b, contract, bias, out_dtype=out_dtype, precision=self.precision)
        if addend is None:
            return y
        # XLA for GPUs adds an array of the product's dtype in the product's epilogue.
        return y + addend if addend.dtype == y.dtype else add(y, addend)

    def _quantized_product(self, a: QTensor, b: QTensor, bias, addend, axes, out_dtype):
        """Splits an int8 sum that could overflow int32, and adds the parts in float32."""
        length = a.values.shape[axes[0]]
        if _sum_fits_int32(a, axes[0]):
            return self.run("matmul", a, b, bias, addend, out_dtype=out_dtype, contract=axes)

        def part(start: int) -> jax.Array:
            stop = min(start + LONGEST_INT8_SUM, length)
            operands = (
                q._replace(values=lax.slice_in_dim(q.values, start, stop, axis=axis))
                for q, axis in zip((a, b), axes)
            )
            terms = (bias, addend) if start == 0 else ()
            return self.run("matmul", *operands, *terms, out_dtype="float32", contract=axes)

        others = range(LONGEST_INT8_SUM, length, LONGEST_INT8_SUM)
        return sum(map(part, others), part(0)).astype(out_dtype)

    def products_or_sum(
        self,
        pairs: Sequence[tuple[jax.Array | QTensor, jax.Array | QTensor]],
        *,
        axes: Sequence[tuple[int, int]],
        out_dtype: str,
    ) -> tuple[jax.Array, ...]:
        """The product of each pair; or, if a kernel adds the products, their sum.

        Args:
          pairs: a and b of each product, see `product`.
          axes: the summed axes of each pair.
          out_dtype: dtype of the results.

        Returns:
          A tuple with one array for each pair, or with one array: the sum.
        """
        operands: Any = tuple(zip(*pairs))
        options: dict[str, Any] = {"out_dtype": out_dtype, "contract": axes[0]}
        fit = len(pairs) > 1 and len(set(axes)) == 1
        fit = fit and all(
            isinstance(a, QTensor) and isinstance(b, QTensor) and _sum_fits_int32(a, axes[0][0])
            for a, b in pairs
        )
        if fit and self._has_kernel("matmul_sum", *operands, **options):
            return (dispatch.run("matmul_sum", *operands, **options),)
        return tuple(
            self.product(*pair, axes=each, out_dtype=out_dtype) for pair, each in zip(pairs, axes)
        )

    def weight_gradients(
        self,
        x: jax.Array | QTensor,
        gs: Sequence[jax.Array | QTensor],
        *,
        axes: Sequence[tuple[int, int]],
        out_dtype: str,
    ) -> tuple[jax.Array, ...]:
        """``xT g`` for each g, summed over all tokens.

        Args:
          x: [..., k]; a QTensor is already a matrix. x and every g are quantized, or none is.
          gs: [..., n] each.
          axes: the token axes of QTensors x and each g.
          out_dtype: dtype of the results.

        Returns:
          [k, n] for each g.
        """
        if any(isinstance(operand, QTensor) for operand in (x, *gs)):
            each = zip(gs, axes)
            return tuple(self.product(x, g, axes=of, out_dtype=out_dtype) for g, of in each)
        options = {"out_dtype": out_dtype, "precision": self.precision}
        return self._weight_gradients("weight_gradient", x, gs, options)

    def block_weight_gradients(
        self, x: jax.Array, gs: Sequence[jax.Array], product: Product, *, out_dtype: str
    ) -> tuple[jax.Array, ...]:
        """``xT g`` for each g, from operands that are quantized here, in blocks of tokens.

        Args:
          x: [..., k].
          gs: [..., n] each.
          product: its two sides have equal blocks and rotations, which `swjax.recipes.Recipe` checks.
          out_dtype: dtype of the results.

        Returns:
          [k, n] for each g.
        """
        options = {
            "dtypes": (product.lhs.dtype, product.rhs.dtype),
            "block": product.lhs.block,
            "rotation": product.lhs.rotation,
            "out_dtype": out_dtype,
        }
        return self._weight_gradients("block_weight_gradient", x, gs, options)

    def _weight_gradients(
        self, operation: str, x, gs: Sequence, options: dict[str, Any]
    ) -> tuple[jax.Array, ...]:
        """Calls an operation for each g, or once for all if there is a kernel for a group."""
        rows: Any = as_rows(x), tuple(map(as_rows, gs))
        group = f"{operation}_group"
        if len(gs) > 1 and self._has_kernel(group, *rows, **options):
            return dispatch.run(group, *rows, **options)
        return tuple(self.run(operation, rows[0], g, **options) for g in rows[1])


def _sum_fits_int32(a: QTensor, axis: int) -> bool:
    """Whether int32 holds every sum of products of int8 values along an axis; fp8 is summed in float32."""
    return a.values.dtype != jnp.int8 or a.values.shape[axis] <= LONGEST_INT8_SUM


def as_rows(x: jax.Array) -> jax.Array:
    """Reshapes [..., k] to [tokens, k], because XLA for GPUs fails on some int8 sums over several axes."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
