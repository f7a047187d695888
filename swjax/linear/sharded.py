"""The steps of a linear layer on sharded arrays. Each step runs in a `jax.shard_map`, with its collectives.

`swjax.linear.arithmetic` has the computation of a step on one device, and `swjax.linear.products` the purpose
of the steps. Steps are separate, so that `jax.checkpoint` can save the arrays between them.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from swjax.kernels import reference
from swjax.kernels.reference import QTensor
from swjax.linear.arithmetic import Arithmetic, as_rows
from swjax.linear.layouts import Spec, SpecTree, as_matrix, quantized_specs, specs_of
from swjax.linear.plans import Plan
from swjax.linear.prologues import Gradient, Prologue, PrologueGradients, add
from swjax.recipes import Product, Quantizer


class Operand(NamedTuple):
    """An operand of a product.

    Attributes:
      value: an array or a QTensor.
      spec: sharding of the value; for a QTensor, a QTensor of specs.
      axis: the axis that the product sums over; for an array of tokens, 0 stands for all token axes.
    """

    value: jax.Array | QTensor
    spec: Spec | QTensor
    axis: int


class Sharded(NamedTuple):
    """The steps for arrays that are sharded by a plan; static."""

    plan: Plan
    arithmetic: Arithmetic

    def place_input(self, x: jax.Array, prologue: Prologue | None) -> jax.Array:
        """Reshards x, or its gradient, as `Plan.place` does."""
        spec = self.plan.x if prologue is None else self.prologue_spec(prologue)
        placed = self.plan.place(x, spec)
        assert placed is not None, "it is an array"
        return placed

    # --- products -------------------------------------------------------------------------------------

    def output(
        self,
        x: Operand,
        w: Operand,
        bias: jax.Array | None,
        addend: jax.Array | None = None,
        *,
        out_dtype: str,
    ) -> jax.Array:
        """y = x w + bias + addend, where the product is all-reduced if the plan splits k."""
        plan, arithmetic = self.plan, self.arithmetic
        later = addend is not None and bool(plan.splits(plan.k))

        def step(x_value, w_value, bias, addend):
            bias = None if bias is None else plan.once(bias, plan.k)
            terms = bias, None if later else addend
            w_value = plan.gather_weight(w_value, w.spec)
            axes = x.axis, w.axis
            y = arithmetic.product(x_value, w_value, *terms, axes=axes, out_dtype=out_dtype)
            y = plan.sum(y, plan.k)
            return add(y, addend) if later else y

        arrays = x.value, w.value, bias, addend
        return plan.run(step, arrays, (x.spec, w.spec, Spec((plan.n,)), plan.y), plan.y)

    def input_gradient(self, g: Operand, w: Operand, *, out_dtype: str, summed: bool) -> jax.Array:
        """dx = g wT of one layer; see `input_gradients`."""
        return self.input_gradients((g,), (w,), out_dtype=out_dtype, summed=summed)[0]

    def input_gradients(
        self,
        gs: tuple[Operand, ...],
        ws: tuple[Operand, ...],
        *,
        out_dtype: str,
        summed: bool,
    ) -> tuple[jax.Array, ...]:
        """dx = g wT of each layer; or, if a kernel adds them, one array: their sum.

        They are all-reduced where the plan splits n. If `summed=False`, they are per-device partial sums
        along a new leading axis, for `sum_partial`.
        """
        plan = self.plan

        def step(g_values, w_values):
            gathered = (plan.gather_weight(value, w.spec) for value, w in zip(w_values, ws))
            dxs = self.arithmetic.products_or_sum(
                list(zip(g_values, gathered)),
                axes=[(g.axis, w.axis) for g, w in zip(gs, ws)],
                out_dtype=out_dtype,
            )
            return plan.sum(dxs, plan.n) if summed else tuple(dx[None] for dx in dxs)

        values = tuple(g.value for g in gs), tuple(w.value for w in ws)
        specs = tuple(g.spec for g in gs), tuple(w.spec for w in ws)
        return plan.run(step, values, specs, plan.x if summed else self._partial_spec)

    def sum_partial(self, dxs: tuple[jax.Array, ...]) -> jax.Array:
        """Sums the partial input gradients of several layers with one all-reduce."""
        plan = self.plan

        def step(*dxs):
            return plan.sum(add(*(dx[0] for dx in dxs)), plan.n)

        return plan.run(step, dxs, (self._partial_spec,) * len(dxs), plan.x)

    @property
    def _partial_spec(self) -> Spec:
        return Spec((self.plan.n, *self.plan.x))

    def weight_gradient(
        self, x: Operand, g: Operand, *, out_dtype: str, blocks: Product | None = None
    ) -> jax.Array:
        """dw = xT g of one layer; see `weight_gradients`."""
        return self.weight_gradients(x, (g,), out_dtype=out_dtype, blocks=blocks)[0]

    def weight_gradients(
        self,
        x: Operand,
        gs: tuple[Operand, ...],
        *,
        out_dtype: str,
        blocks: Product | None = None,
    ) -> tuple[jax.Array, ...]:
        """dw = xT g of each layer.

        They are reduce-scattered over the axes that shard tokens and w, and all-reduced over the others. With
        `blocks`, each device quantizes its own tokens in the blocks of that product.
        """
        plan, arithmetic = self.plan, self.arithmetic
        reduce_dtype = plan.reduce_dtype if plan.splits(plan.token_axes) else None

        def step(x_value, g_values):
            dtype = reduce_dtype or out_dtype
            if blocks:
                dws = arithmetic.block_weight_gradients(x_value, g_values, blocks, out_dtype=dtype)
            else:
                axes = [(x.axis, g.axis) for g in gs]
                dws = arithmetic.weight_gradients(x_value, g_values, axes=axes, out_dtype=dtype)
            return tuple(plan.scatter_sum(dw).astype(out_dtype) for dw in dws)

        values, specs = tuple(g.value for g in gs), tuple(g.spec for g in gs)
        return plan.run(step, (x.value, values), (x.spec, specs), plan.w)

    # --- quantizers -----------------------------------------------------------------------------------

    def quantize(
        self, quantizer: Quantizer, x: jax.Array, spec: Spec, axis: int, *, transpose: bool = False
    ) -> QTensor:
        """Quantizes `x` for a product that sums over `axis`; for axis 0, as a matrix of all tokens.

        Scales equal those on one device, because absolute maxima are maxima over the devices that share a
        scale.
        """
        plan, run, per_tensor = self.plan, self.arithmetic.run, quantizer.scope == "tensor"
        out_spec = as_matrix(spec, False) if axis == 0 else spec
        shared = out_spec if per_tensor else (out_spec[axis],)
        options = {"dtype": quantizer.dtype, "transpose": transpose}

        def step(x):
            x = as_rows(x) if axis == 0 else x
            axes = tuple(range(x.ndim)) if per_tensor else (axis % x.ndim,)
            if not plan.splits(*shared):
                return run("quantize", x, axes=axes, **options)
            absmax = plan.maximum(reference.absolute_maximum(x, axes), *shared)
            return run("quantize_by", x, absmax, **options)

        spanned = range(len(out_spec)) if per_tensor else (axis % len(out_spec),)
        scale_spec = Spec(() if i in spanned else axes for i, axes in enumerate(out_spec))
        specs = quantized_specs(out_spec, scale_spec)
        if transpose:
            specs = quantized_specs(*(Spec(reversed(spec)) for spec in (out_spec, scale_spec)))
        q = plan.run(step, (x,), (spec,), specs)
        return _with_fixed_scale(q) if per_tensor else q

    def quantize_both(self, w: jax.Array, dtype: str) -> tuple[QTensor, QTensor]:
        """Quantizes w [k, n] with one scale; returns the quantized matrix and its quantized transpose."""
        plan, one = self.plan, Spec(((), ()))

        def step(w):
            # XLA needs one pass for the maxima of parts, and two passes for the maximum of the whole.
            parts = math.gcd(w.size, 256)
            absmax = reference.absolute_maximum(w.reshape(parts, -1), (1,)).reshape(parts)
            if plan.splits(*plan.w):
                absmax = plan.maximum(reference.absolute_maximum(absmax, (0,)), *plan.w)
            return self.arithmetic.run("quantize_both", w, absmax, dtype=dtype)

        specs = quantized_specs(plan.w, one), quantized_specs(as_matrix(plan.w, True), one)
        q, transposed = plan.run(step, (w,), (plan.w,), specs)
        return _with_fixed_scale(q), _with_fixed_scale(transposed)

    def quantize_and_sum(self, g: jax.Array, dtype: str) -> tuple[QTensor, jax.Array]:
        """Quantizes g row-wise, and sums it over all tokens, which gives the gradient of a bias."""
        plan = self.plan

        def step(g):
            q, total = self.arithmetic.run("quantize_and_sum", g, dtype=dtype)
            return q, plan.sum(total, *plan.tokens)

        return plan.run(step, (g,), (plan.y,), (_row_specs(plan.y), Spec((plan.n,))))

    def split_outliers(
        self, x: jax.Array, threshold: float, spec: Spec
    ) -> tuple[jax.Array, jax.Array]:
        """Splits x into a sum of two: features below `threshold` for every token, and the other features."""
        plan = self.plan

        def step(x):
            features = reference.absolute_maximum(x, tuple(range(x.ndim - 1)))
            # NaN counts as an outlier, on every platform.
            outlier = ~(plan.maximum(features, *plan.tokens) < threshold)
            zero = jnp.zeros((), x.dtype)
            return jnp.where(outlier, zero, x), jnp.where(outlier, x, zero)

        return plan.run(step, (x,), (spec,), (spec, spec))

    # --- prologues ------------------------------------------------------------------------------------

    def prologue_spec(self, prologue: Prologue) -> Spec:
        """The sharding of a prologue's input."""
        return Spec((*self.plan.tokens, ())) if prologue.whole_rows else self.plan.x

    def apply(
        self, prologue: Prologue, x: jax.Array, *, quantize_to: str | None
    ) -> tuple[jax.Array | None, QTensor | None]:
        """Returns (prologue's output, None), or with `quantize_to` (None, output quantized row-wise)."""
        spec = self.prologue_spec(prologue)

        def step(prologue, x):
            implementation = self.arithmetic.implementation
            return prologue.forward(x, quantize_to=quantize_to, implementation=implementation)

        out_specs = (None, _row_specs(spec)) if quantize_to else (spec, None)
        return self.plan.run(step, (prologue, x), (Spec(), spec), out_specs)

    def apply_backward(
        self,
        prologue: Prologue,
        x: jax.Array,
        gradients: tuple[jax.Array, ...],
        residual_gradient: jax.Array | None,
        *,
        quantize_to: str | None,
        recompute: bool,
    ) -> PrologueGradients:
        """Computes the gradients of a prologue; see `LayerNorm.backward`."""
        plan, spec = self.plan, self.prologue_spec(prologue)
        whole: SpecTree = Spec()

        def step(prologue, x, gradients, residual_gradient):
            of = prologue.backward(
                x,
                gradients,
                residual_gradient,
                quantize_to=quantize_to,
                recompute=recompute,
                implementation=self.arithmetic.implementation,
            )
            token_sum, parameters = plan.sum((of.input.token_sum, of.prologue), *plan.tokens)
            return PrologueGradients(
                of.input._replace(token_sum=token_sum), parameters, of.recomputed
            )

        tree: SpecTree = spec
        forms = Gradient(tree)
        if not prologue.whole_rows and residual_gradient is None:
            columns: SpecTree = Spec(spec[-1:])
            forms = Gradient(tree, _row_specs(spec) if quantize_to else None, columns)
        out_specs = PrologueGradients(forms, whole, tree if recompute else None)
        arrays = (prologue, x, gradients, residual_gradient)
        return plan.run(step, arrays, (Spec(), spec, (spec,) * len(gradients), spec), out_specs)


def _row_specs(spec: Spec) -> QTensor:
    """The specs of an array quantized row-wise."""
    return quantized_specs(spec, Spec((*spec[:-1], ())))


def _with_fixed_scale(q: QTensor) -> QTensor:
    """Keeps XLA before jax 0.12 from moving constants between the factors of a product of scales. Without the
    barrier, the last bit of y depends on whether the program computes the scale of w or receives it."""
    return q._replace(scale=jax.lax.optimization_barrier(q.scale))


def transposed_operand(q: QTensor, spec: Spec, axis: int, *, transposed: bool) -> Operand:
    """A quantized matrix, possibly stored transposed, for a product that sums over `axis` of the matrix.

    `spec` is the sharding of the matrix itself.
    """
    spec = as_matrix(spec, True) if transposed else spec
    return Operand(q, specs_of(q, spec), -1 - axis if transposed else axis)
