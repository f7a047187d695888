"""Measures operands and outputs of layers of an NNX model inside the step, without changing the model's code.

A tap is an additional variable of a module. No output depends on its value, but its *gradient* is the
measurement. So measurements leave the model as gradients do: through `jax.lax.scan`, `jax.checkpoint`,
`nnx.vmap`, micro-batches and several devices, and without saved activations.
"""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

from swjax.diagnostics.names import FEATURE_MAX, FEATURE_MEAN, OPERANDS
from swjax.diagnostics.values import magnitudes
from swjax.kernels import reference
from swjax.kernels.block_formats.reference import (
    ELEMENTS,
    clamped,
    emulated,
    quantize_blocks,
    random_bits,
)
from swjax.kernels.block_weight_gradients.reference import rotated_blocks
from swjax.kernels.reference import QTensor
from swjax.kernels.rotations.reference import rotate_features
from swjax.linear.api import dequantize_weight
from swjax.linear.contraction import DotGeneral, as_linear
from swjax.linear.layer import as_rows, rotated_tokens
from swjax.linear.layouts import Layout, Spec
from swjax.linear.sharding import Sharding, sharding_of_layer
from swjax.nnx import Linear, modules_of, product_name, product_of
from swjax.optax import path_name
from swjax.recipes import Product, Quantizer, Recipe, first_match

QUANTIZATION, FEATURES = "tap_quantization", "tap_features"


class Tap(nnx.Variable):
    """A variable whose gradient carries a measurement, summed over the calls of its module.

    For quantization it is [..., 3, 9] float32, or [..., 5, 9] if the weight gradient is quantized. For each
    operand in `OPERANDS` it counts the nonzero elements, and among them those that quantize to zero and to
    the largest value; then come the `sums_of_squares` of the operand and of its errors. For features it is
    [..., 3]: number of calls, mean |y|, max |y|. Leading axes stack the module.
    """


def measure(
    loss_fn: Callable,
    model: nnx.Module,
    *args: Any,
    quantization: str | None = r".*",
    features: str | None = None,
) -> dict[str, jax.Array]:
    """Measures the layers of a model on one batch; costs about a forward and a backward pass.

    The model is not modified. Weight gradients are not computed.

    Args:
      loss_fn: (model, *args) -> scalar loss, as for `nnx.grad`.
      model: any NNX model.
      *args: further arguments of loss_fn.
      quantization: regular expression that matches the whole path of linear layers whose operands are
        measured: layers of `swjax.nnx.Linear` and `quantize_model` with a recipe. None measures none.
      features: the same for modules of any kind whose output is measured. None measures none. The number of
        layers of a stack is read from a linear layer in the module or above it; a stack without one, such as
        a scan over norms, cannot be measured.

    Returns:
      {name: float32 scalar, or [layers] for stacked modules}; NaN if no gradient reached the module.

      quantization/sqnr_db/<path>/<operand>: signal to quantization noise, 10 log10 of power ratios, at most
        200. It does not depend on the magnitude of an operand whose largest elements are above 2**-92, the
        least that scales allow for. NaN if the operand is all zero or not finite.
      quantization/zeros/...: share of the nonzero elements that quantize to zero.
      quantization/saturated/...: share of the nonzero elements that quantize to the format's largest value.
      stability/feature_mean_abs/<path>, stability/feature_max_abs/<path>: magnitudes of the module's output,
        including an `addend`; of a module that is called several times, the mean over the calls.

      x and w are operands of the forward product, and g is the gradient operand of the input gradient. A
      recipe that quantizes the weight gradient adds wgrad_x and wgrad_g. Blocks of rotated tokens are
      measured after the rotation, which multiplies the power of signal and noise by the same factor.

    Raises:
      TypeError: the model is not an NNX model.
      ValueError: an expression matches no module that can be measured.

    >>> layer = Linear(64, 32, recipe="switchback", rngs=nnx.Rngs(0))
    >>> x = jax.random.normal(jax.random.key(0), (16, 64))
    >>> found = measure(lambda model, x: jnp.mean(model(x) ** 2), nnx.Sequential(layer), x)
    >>> {name: round(float(value)) for name, value in found.items() if "sqnr" in name}
    {'quantization/sqnr_db/layers/0/x': 44, 'quantization/sqnr_db/layers/0/w': 46,
     'quantization/sqnr_db/layers/0/g': 46}
    """
    _check_model(model)
    tapped = insert(nnx.clone(model), quantization=quantization, features=features)
    return read(nnx.grad(loss_fn, argnums=nnx.DiffState(0, Tap))(tapped, *args))


def insert(
    model: nnx.Module, *, quantization: str | None = r".*", features: str | None = None
) -> nnx.Module:
    """Inserts taps into a model, in place; `measure` inserts them into a copy.

    Use it in code that computes gradients itself: differentiate with respect to the `Tap` variables, and
    `read` the gradient.

    Args:
      model: modified in place; its outputs stay the same.
      quantization, features: see `measure`.

    Returns:
      `model`.

    Raises:
      TypeError: the model is not an NNX model.
      ValueError: an expression matches no module that can be measured.
    """
    _check_model(model)
    modules, quantized = modules_of(model), quantized_layers(model)
    if quantization is not None and not quantized:
        raise ValueError(
            f"the model must have a layer with a quantized product, got {type(model).__name__} without one: "
            "call swjax.nnx.quantize_model first, or pass quantization=None to measure features only"
        )
    for path in first_match({quantization: ""} if quantization is not None else {}, quantized):
        module = quantized[path]
        call = _call_linear if isinstance(module, Linear) else _call_product
        operands = OPERANDS if _recipe_of(module).wgrad else OPERANDS[:3]
        shape = (*(_axes_of_linear(module) or ()), len(operands), 3 + 2 * _RANGES)
        attach(module, call, QUANTIZATION, shape)
    # Containers such as nnx.List have no output.
    called = [path for path, module in modules.items() if callable(module)]
    wanted = {} if features is None else {features: ""}
    for path in first_match(wanted, called, kind="module that can be called"):
        attach(modules[path], _call_for_features, FEATURES, (*_stack_axes(path, modules), 3))
    return model


def _check_model(model: Any) -> None:
    if isinstance(model, linen.Module):
        raise TypeError(
            f"model must be an NNX model, got the Linen module {type(model).__name__}: "
            "diagnostics measure NNX models only"
        )
    if next(iter(nnx.iter_modules(model)), None) is None:
        raise TypeError(
            f"model must be an NNX model, got {type(model).__name__}: call measure(loss_fn, model, *args)"
        )


def quantized_layers(model: nnx.Module) -> dict[str, nnx.Module]:
    """{path: module} of the linear layers whose recipe quantizes a product."""
    modules = modules_of(model).items()
    return {path: module for path, module in modules if _recipe_of(module) != Recipe()}


def read(gradients: Any) -> dict[str, jax.Array]:
    """Extracts the measurements from a gradient with respect to `Tap` variables; see `measure`.

    Args:
      gradients: a tree with the model's paths; leaves that are not taps are ignored.
    """
    found = {}
    for path, sums in jax.tree_util.tree_leaves_with_path(gradients):
        *names, tap = path_name(path).split("/")
        if tap == FEATURES:
            for i, name in enumerate((FEATURE_MEAN, FEATURE_MAX), 1):
                found["/".join(("stability", name, *names))] = sums[..., i] / sums[..., 0]
        elif tap == QUANTIZATION:
            for i, operand in enumerate(OPERANDS[: sums.shape[-2]]):
                for name, value in _summary(sums[..., i, :]).items():
                    found["/".join(("quantization", name, *names, operand))] = value
    return found


def _summary(sums: jax.Array) -> dict[str, jax.Array]:
    nonzero, zeros, largest = jnp.moveaxis(sums[..., :3], -1, 0)
    signal, noise = sums[..., 3 : 3 + _RANGES], sums[..., 3 + _RANGES :]
    decibels = 10 / math.log(10) * (_log_of_sum(signal) - _log_of_sum(noise))
    return {
        "zeros": zeros / nonzero,
        "saturated": largest / nonzero,
        "sqnr_db": jnp.minimum(decibels, 200),
    }


def operand_sums(
    x: jax.Array, axes: tuple[int, ...], dtype: str, inside: jax.Array | None = None
) -> jax.Array:
    """The sums of one operand, see `Tap`.

    Args:
      x: the operand.
      axes, dtype: see `swjax.quantize`.
      inside: x without its outliers, which are not quantized. None: there are none.

    Returns:
      [9] float32.
    """
    exact = (x if inside is None else inside).astype(jnp.float32)
    q = reference.quantize(exact, axes, dtype)
    return _counts_and_squares(
        x, exact, q.values, reference.dequantize(q), reference.LARGEST[dtype]
    )


def _block_sums(quantizer: Quantizer, x: jax.Array, axis: int, inside: jax.Array) -> jax.Array:
    """`operand_sums` of an operand in a block format, of which one axis is contracted."""
    exact, block = inside.astype(jnp.float32), quantizer.block or max(x.shape[axis], 1)
    spread: dict[str, Any] = {"square": quantizer.scope == "square"}
    options: dict[str, Any] = {"dtype": quantizer.dtype, "scale": quantizer.scale} | spread
    bits = random_bits(exact, exact.shape, stream=axis + 1) if quantizer.stochastic else None
    blocks = quantize_blocks(exact, axis, block=block, ceil=quantizer.ceil, bits=bits, **options)
    q = emulated(blocks, axis, block, dtype="float32", **spread)
    largest = ELEMENTS[quantizer.dtype]
    return _counts_and_squares(x, exact, blocks.values, reference.dequantize(q), largest)


def _counts_and_squares(given, exact, values, rounded, largest: float) -> jax.Array:
    """The sums of `operand_sums` from quantized values and the rounded operand."""
    magnitude, nonzero = jnp.abs(values.astype(jnp.float32)), exact != 0
    kinds = (nonzero, nonzero & (magnitude == 0), magnitude >= largest)
    counts = jnp.stack([jnp.sum(kind, dtype=jnp.float32) for kind in kinds])
    signal = sums_of_squares(given.astype(jnp.float32))
    return jnp.concatenate([counts, signal, sums_of_squares(exact - rounded)])


# Ranges of an array's largest magnitude, with separate sums of squares: below 2**-42, up to 2**42, and above.
# Squares in float32 have half the range of exponents, so powers of two scale the first and the last.
_RANGES, _EDGE, _SCALE = 3, 2.0**42, 2.0**84


def sums_of_squares(x: jax.Array) -> jax.Array:
    """The sum of squares of an array of any magnitude. Those of several arrays add up.

    Args:
      x: float32.

    Returns:
      [3] float32, one element for each range; those of the two other ranges are 0. The sum of the lowest
      range is scaled by 2**168, that of the highest by 2**-168. NaN if x is not finite.

    >>> [sums_of_squares(jnp.array([0.0, x])).tolist() for x in (2.0**-84, 3.0, 2.0**84)]
    [[1.0, 0.0, 0.0], [0.0, 9.0, 0.0], [0.0, 0.0, 1.0]]
    """
    largest = jnp.max(jnp.abs(x), initial=0.0)
    small, large = largest < 1 / _EDGE, largest > _EDGE
    scale = jnp.where(small, _SCALE, jnp.where(large, 1 / _SCALE, 1.0))
    total = jnp.sum(jnp.square(x * scale))
    return jnp.where(jnp.stack([small, ~(small | large), large]), total, 0.0)


def _log_of_sum(squares: jax.Array) -> jax.Array:
    """The natural logarithm of the sum of `sums_of_squares` [..., 3], which float32 may not represent."""
    small, others, large = jnp.moveaxis(jnp.log(squares), -1, 0)
    scale = 2 * math.log(_SCALE)
    return jax.nn.logsumexp(jnp.stack([small - scale, others, large + scale]), axis=0)


# ----------------------------------------------------------------------------------- how taps work


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def report(of_gradient: Callable, y: jax.Array, tap: jax.Array, seen: jax.Array) -> jax.Array:
    """Attaches a measurement to the gradient at the point where `y` is computed.

    Args:
      of_gradient: (seen, gradient of y) -> the gradient of `tap`, with its shape and dtype.
      y: the output of the module; its gradient passes unchanged.
      tap: the value of a `Tap`.
      seen: values that the forward pass saves for `of_gradient`; they have no gradient.

    Returns:
      y.
    """
    return y


def _report_backward(of_gradient, seen, g):
    return g, of_gradient(seen, g), jnp.zeros_like(seen)


report.defvjp(lambda of_gradient, y, tap, seen: (y, seen), _report_backward)


def _report_product(y, x, w, tap, recipe: Recipe, layout: Layout | None):
    """Returns `y`, the product of x and w, and reports the operands of all three products.

    Args:
      x, w: [*tokens, k] and [k, n]; y has the elements of [*tokens, n].
      layout: shardings of x and w.
    """
    fwd, dgrad, wgrad = recipe.fwd, recipe.dgrad, recipe.wgrad
    sharding, g_shape = sharding_of_layer(x, w, layout), (*x.shape[:-1], w.shape[-1])
    x, w = jax.lax.stop_gradient((x, w))
    x_quantizer, w_quantizer = (fwd.lhs, fwd.rhs) if fwd else (None, None)
    seen = [_sums(x_quantizer, x, (-1,), _inside(fwd, x)), _sums(w_quantizer, w, (0,))]
    if wgrad is not None:
        seen.append(_sums_of_tokens(wgrad.lhs, x, sharding, sharding.x, _inside(wgrad, x)))

    def of_gradient(seen, g):
        g = g.reshape(g_shape)
        rows = [seen[0], seen[1], _sums(dgrad.lhs if dgrad else None, g, (-1,))]
        if wgrad is not None:
            rows += [seen[2], _sums_of_tokens(wgrad.rhs, g, sharding, sharding.y)]
        return jnp.stack(rows)

    return report(of_gradient, y, tap, jnp.stack(seen))


def _sums(
    quantizer: Quantizer | None, x: jax.Array, axes: tuple[int, ...], inside: Any = None
) -> jax.Array:
    """`operand_sums` of an operand of a product that sums over `axes`; zeros if it is not quantized."""
    if quantizer is None:
        return jnp.zeros(3 + 2 * _RANGES, jnp.float32)
    spanned = tuple(range(x.ndim)) if quantizer.scope == "tensor" else axes
    inside = x if inside is None else inside
    if quantizer.scope != "block":
        rotation = math.gcd(x.shape[axes[0]], quantizer.rotation)
        x, inside = (rotate_features(a, rotation, axes[0]) for a in (x, inside))
    if quantizer.in_blocks:
        return _block_sums(quantizer, x, axes[0], inside)
    if quantizer.is_static:
        absmax = reference.static_absmax(quantizer.static_scale(x.shape), quantizer.dtype, x.ndim)
        q = reference.quantize_by(x, absmax, quantizer.dtype, clip=True)
        given, largest = x.astype(jnp.float32), reference.LARGEST[quantizer.dtype]
        return _counts_and_squares(given, given, q.values, reference.dequantize(q), largest)
    return operand_sums(x, spanned, quantizer.dtype, inside)


def _sums_of_tokens(
    quantizer: Quantizer, x: jax.Array, sharding: Sharding, spec: Spec, inside: Any = None
) -> jax.Array:
    """`_sums` of an operand [*tokens, n] of the weight gradient, with the sharding `spec`.

    Like the weight gradient, each device forms blocks of its own tokens.
    """
    if not (quantizer.scope == "block" or quantizer.in_blocks):
        return _sums(quantizer, x, tuple(range(x.ndim - 1)), inside)

    def step(x):
        if quantizer.in_blocks:
            x = rotated_tokens(as_rows(x), quantizer.rotation)
            return sharding.sum(_block_sums(quantizer, x, 0, x), *spec)
        blocks = rotated_blocks(as_rows(x), quantizer.block, quantizer.rotation)
        return sharding.sum(operand_sums(blocks, (1,), quantizer.dtype), *spec)

    return sharding.map_shards(step, (x,), (spec,), Spec(((),)))


def _inside(product: Product | None, x: jax.Array) -> jax.Array:
    """x [*tokens, k] without its outliers: what is quantized of it."""
    if product is None or not product.has_outliers:
        return x
    if product.outlier_quantile:
        return clamped(x, product.outlier_quantile)
    # The same comparison as in `swjax.linear.layer.split_outliers`.
    features = reference.absolute_maximum(x, tuple(range(x.ndim - 1)))
    return jnp.where(features < product.outlier_threshold, x, jnp.zeros((), x.dtype))


def _call_linear(self, call: Callable, inputs, *args, prologue=None, **kwargs):
    """Taps a `swjax.nnx.Linear`, which quantizes its kernel, and its inputs after the prologue.

    The layer adds an `addend` itself: the sum has the gradient of the product.
    """
    y = call(self, inputs, *args, prologue=prologue, **kwargs)
    x, kernel, _ = self._operands(inputs)
    if isinstance(kernel, QTensor):
        kernel = dequantize_weight(kernel, self.recipe)
    if prologue is not None:
        x, _ = prologue.forward(x, quantize_to=None, implementation="xla")
    return _report_product(y, x, kernel, getattr(self, QUANTIZATION)[...], self.recipe, self.layout)


def _call_product(self, call: Callable, *args, **kwargs):
    """Taps a Flax module whose product follows a recipe; the product quantizes its own arguments."""
    name, product = product_name(self), product_of(self)
    assert product is not None, "insert taps modules that have a recipe"
    tapped = _TappedProduct(product, getattr(self, QUANTIZATION)[...])
    before = getattr(self, name)
    setattr(self, name, tapped.einsum if name == "einsum_op" else tapped)
    try:
        return call(self, *args, **kwargs)
    finally:
        setattr(self, name, before)


class _TappedProduct(DotGeneral):
    """A product that reports its operands to a tap."""

    tap: jax.Array

    def __init__(self, product: DotGeneral, tap: jax.Array):
        super().__init__(product.recipe, product.implementation, product.layout)
        object.__setattr__(self, "tap", tap)

    def multiply(self, lhs, rhs, dimension_numbers, **options):
        y = super().multiply(lhs, rhs, dimension_numbers, **options)
        x, w, *_ = as_linear(lhs, rhs, dimension_numbers)

        def report_one(y, x, w):
            return _report_product(y, x, w, self.tap, self.recipe, self.layout)

        _, (batch, _) = dimension_numbers
        for _ in batch:
            report_one = jax.vmap(report_one)
        return report_one(y, x, w)


def _call_for_features(self, call: Callable, *args, **kwargs):
    y = call(self, *args, **kwargs)
    if not isinstance(y, jax.Array):
        raise ValueError(
            f"features can be measured where a module returns an array, got {type(y).__name__} of "
            f"{type(self).__name__}: match a module inside of it"
        )
    tap = getattr(self, FEATURES)[...]
    if tap.shape != (3,):
        raise ValueError(
            f"features of a stack must be measured where a single layer is called, got a call of "
            f"{type(self).__name__} with a tap of shape {tap.shape}: match a module inside of it"
        )
    found = magnitudes(y)
    seen = jnp.stack([jnp.ones(()), found[FEATURE_MEAN], found[FEATURE_MAX]])
    return report(_ignore_gradient, y, tap, seen)


def _ignore_gradient(seen, g):
    return seen


@cache  # equal graphs share compiled functions
def _subclass(kind: type, tapped_call: Callable) -> type:
    """Creates the class of a tapped module."""

    def __call__(self, *args, **kwargs):
        return tapped_call(self, kind.__call__, *args, **kwargs)

    return type(kind.__name__, (kind,), {"__call__": __call__, "__module__": __name__})


def attach(module: nnx.Module, call: Callable, name: str, shape: tuple[int, ...]) -> None:
    """Adds a tap to a module, in place, and replaces the module's call by one that can `report` to it.

    Args:
      module: the module or its stack, modified in place.
      call: (module, the module's own `__call__`, *args, **kwargs) -> the module's output.
      name: attribute name of the tap.
      shape: shape of the tap, starting with the axes that stack the module.
    """
    object.__setattr__(module, "__class__", _subclass(type(module), call))
    setattr(module, name, Tap(jnp.zeros(shape, jnp.float32)))


def _recipe_of(module: nnx.Module) -> Recipe:
    """The recipe of a linear layer; for other modules, a recipe that quantizes nothing."""
    holder = module if isinstance(module, Linear) else product_of(module)
    return Recipe() if holder is None else holder.recipe


def _stack_axes(path: str, modules: dict[str, nnx.Module]) -> tuple[int, ...]:
    """The leading axes of a stack of modules; () for a single module.

    They are those of the first linear layer of the module, or of its nearest parent with one, if all
    parameters have them.
    """
    names = path.split("/") if path else []
    for length in range(len(names), -1, -1):
        holder = modules.get("/".join(names[:length]))
        axes = None if holder is None else _axes_of_linear(holder)
        if axes is not None:
            shapes = (np.shape(leaf) for leaf in jax.tree.leaves(nnx.state(holder, nnx.Param)))
            return axes if all(shape[: len(axes)] == axes for shape in shapes) else ()
    return ()


def _axes_of_linear(module: nnx.Module) -> tuple[int, ...] | None:
    """The leading axes of the first linear layer of a module; None if it has no linear layer."""
    for _, layer in nnx.iter_modules(module):
        if isinstance(layer, nnx.Linear | nnx.LinearGeneral):
            own = np.size(layer.in_features), np.size(layer.out_features)  # numbers or tuples
            kernel: Any = layer.kernel.get_value()
            shape = (kernel.values if isinstance(kernel, QTensor) else kernel).shape
            return shape[: len(shape) - sum(own)]
        if isinstance(layer, nnx.Einsum):
            return layer.kernel.shape[: layer.kernel.ndim - len(layer.kernel_shape)]
    return None
