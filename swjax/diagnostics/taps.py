"""Measures operands and outputs of layers of an NNX model inside the step, without changing the model's code.

A tap is an additional variable of a module. No output depends on its value, but its *gradient* is the
measurement. So measurements leave the model as gradients do: through `jax.lax.scan`, `jax.checkpoint`,
`nnx.vmap`, micro-batches and several devices, and without saved activations.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from swjax.diagnostics.names import FEATURE_MAX, FEATURE_MEAN
from swjax.diagnostics.values import magnitudes
from swjax.kernels import reference
from swjax.nnx import Linear
from swjax.optax import path_name
from swjax.recipes import Recipe, first_match

QUANTIZATION, FEATURES = "tap_quantization", "tap_features"
OPERANDS = ("x", "w", "g")


class Tap(nnx.Variable):
    """A variable whose gradient carries a measurement, summed over the calls of its module.

    For quantization it is [..., 3, 5] float32. For each operand in `OPERANDS` it counts the nonzero elements,
    and among them those that quantize to zero and to the largest value; then come the sum of squares and the
    sum of squared errors. For features it is [..., 3]: number of calls, mean |y|, max |y|. Leading axes stack
    the module.
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
      features: the same for modules of any kind whose output is measured. None measures none.

    Returns:
      {name: float32 scalar, or [layers] for stacked modules}; NaN if no gradient reached the module.

      quantization/sqnr_db/<path>/<x, w or g>: signal to quantization noise, 10 log10 of power ratios.
      quantization/zeros/...: share of the nonzero elements that quantize to zero.
      quantization/saturated/...: share of the nonzero elements that quantize to the format's largest value.
      stability/feature_mean_abs/<path>, stability/feature_max_abs/<path>: magnitudes of the module's output.

      x and w are operands of the forward product, g is the gradient that the backward pass quantizes.

    Raises:
      ValueError: an expression matches no module that can be measured.

    >>> layer = Linear(64, 32, recipe="switchback", rngs=nnx.Rngs(0))
    >>> x = jax.random.normal(jax.random.key(0), (16, 64))
    >>> found = measure(lambda model, x: jnp.mean(model(x) ** 2), nnx.Sequential(layer), x)
    >>> {name: round(float(value)) for name, value in found.items() if "sqnr" in name}
    {'quantization/sqnr_db/layers/0/x': 44, 'quantization/sqnr_db/layers/0/w': 46,
     'quantization/sqnr_db/layers/0/g': 46}
    """
    tapped = insert(nnx.clone(model), quantization=quantization, features=features)
    return read(nnx.grad(loss_fn, argnums=nnx.DiffState(0, Tap))(tapped, *args))


def insert(
    model: nnx.Module, *, quantization: str | None = r".*", features: str | None = None
) -> nnx.Module:
    """Inserts taps into a model, in place; `measure` inserts them into a copy.

    Use it in code that computes gradients itself: differentiate with respect to the `Tap` variables, and
      `read`
    the gradient.

    Args:
      model: modified in place; its outputs stay the same.
      quantization, features: see `measure`.

    Returns:
      `model`.

    Raises:
      ValueError: an expression matches no module that can be measured.
    """
    modules, quantized = _modules(model), quantized_layers(model)
    for path in first_match({quantization: ""} if quantization is not None else {}, quantized):
        module = quantized[path]
        call = _call_linear if isinstance(module, Linear) else _call_product
        attach(module, call, QUANTIZATION, (*_stacked(module), 3, 5))
    for path in first_match({features: ""} if features is not None else {}, modules):
        attach(modules[path], _call_for_features, FEATURES, (*_stacked(modules[path]), 3))
    return model


def quantized_layers(model: nnx.Module) -> dict[str, nnx.Module]:
    """{path: module} of the linear layers whose recipe quantizes the forward or the backward pass."""
    return {path: module for path, module in _modules(model).items() if _is_quantized(module)}


def _modules(model: nnx.Module) -> dict[str, nnx.Module]:
    return {"/".join(map(str, path)): module for path, module in nnx.iter_modules(model)}


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
            for i, operand in enumerate(OPERANDS):
                for name, value in _summary(sums[..., i, :]).items():
                    found["/".join(("quantization", name, *names, operand))] = value
    return found


def _summary(sums: jax.Array) -> dict[str, jax.Array]:
    nonzero, zeros, largest, signal, noise = jnp.moveaxis(sums, -1, 0)
    noise = jnp.maximum(noise, 1e-20 * signal)  # at most 200 dB
    return {
        "zeros": zeros / nonzero,
        "saturated": largest / nonzero,
        "sqnr_db": 10 * jnp.log10(signal / noise),
    }


def operand_sums(
    x: jax.Array, axes: tuple[int, ...], dtype: str, kept: jax.Array | None = None
) -> jax.Array:
    """The five sums of one operand, see `Tap`.

    Args:
      x: the operand.
      axes, dtype: see `swjax.quantize`.
      kept: bool, broadcast to x: elements that are excluded from quantization. None excludes none.

    Returns:
      [5] float32.
    """
    given = x.astype(jnp.float32)
    exact = given if kept is None else jnp.where(kept, 0.0, given)
    q = reference.quantize(exact, axes, dtype)
    magnitude = jnp.abs(q.values.astype(jnp.float32))
    nonzero = exact != 0
    counts = (nonzero, nonzero & (magnitude == 0), magnitude >= reference.LARGEST[dtype])
    squares = (jnp.square(given), jnp.square(exact - reference.dequantize(q)))
    return jnp.stack([jnp.sum(a, dtype=jnp.float32) for a in (*counts, *squares)])


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


def _report_forward(of_gradient, y, tap, seen):
    return y, seen


def _report_backward(of_gradient, seen, g):
    return g, of_gradient(seen, g), jnp.zeros_like(seen)


report.defvjp(_report_forward, _report_backward)


def _report_product(y, x, w, tap, recipe: Recipe, x_axes, w_axes, g_axes):
    """Returns `y`, the product of x and w, and reports all three operands.

    Args:
      x_axes, w_axes, g_axes: axes of x, w (forward) and g (input gradient) that a product sums over.
    """
    fwd, dgrad = recipe.fwd, recipe.dgrad
    seen = jnp.zeros((2, 5), jnp.float32)
    if fwd is not None:
        x, w = jax.lax.stop_gradient((x, w))
        kept = None
        if fwd.outlier_threshold:
            tokens = tuple(i for i in range(x.ndim) if i not in {a % x.ndim for a in x_axes})
            kept = jnp.max(jnp.abs(x), tokens, keepdims=True) >= fwd.outlier_threshold
        seen = jnp.stack(
            [
                operand_sums(x, _spanned(fwd.lhs, x, x_axes), fwd.lhs.dtype, kept),
                operand_sums(w, _spanned(fwd.rhs, w, w_axes), fwd.rhs.dtype),
            ]
        )

    def of_gradient(seen, g):
        third = jnp.zeros(5, jnp.float32)
        if dgrad is not None:
            third = operand_sums(g, _spanned(dgrad.lhs, g, g_axes), dgrad.lhs.dtype)
        return jnp.concatenate([seen, third[None]])

    return report(of_gradient, y, tap, seen)


def _spanned(quantizer, x: jax.Array, axes: tuple[int, ...]) -> tuple[int, ...]:
    """The axes that one scale spans."""
    return tuple(range(x.ndim)) if quantizer.scope == "tensor" else axes


def _call_linear(self, call: Callable, inputs, *args, prologue=None, **kwargs):
    """Taps a `swjax.nnx.Linear`, which quantizes its kernel, and its inputs after the prologue."""
    y, kernel = call(self, inputs, *args, prologue=prologue, **kwargs), self.kernel[...]
    (x,) = self.promote_dtype((inputs,), dtype=self.dtype)
    if prologue is not None:
        x, _ = prologue.forward(x, quantize_to=None, implementation="xla")
    tap = getattr(self, QUANTIZATION)[...]
    return _report_product(y, x, kernel, tap, self.recipe, (-1,), (0,), (-1,))


def _call_product(self, call: Callable, *args, **kwargs):
    """Taps a module with a `dot_general` from `quantize_model`, which quantizes the arguments of that."""
    product, tap = self.dot_general, getattr(self, QUANTIZATION)[...]

    def tapped(x, w, dimension_numbers, *args, **kwargs):
        y = product(x, w, dimension_numbers, *args, **kwargs)
        (x_axes, w_axes), (_, w_batch) = dimension_numbers
        free = w.ndim - len(w_axes) - len(w_batch)
        g_axes = tuple(range(y.ndim - free, y.ndim))
        return _report_product(y, x, w, tap, product.recipe, x_axes, w_axes, g_axes)

    self.dot_general = tapped
    try:
        return call(self, *args, **kwargs)
    finally:
        self.dot_general = product


def _call_for_features(self, call: Callable, *args, **kwargs):
    y = call(self, *args, **kwargs)
    if not isinstance(y, jax.Array):
        raise ValueError(
            f"features can be measured where a module returns an array, got {type(y).__name__} of "
            f"{type(self).__name__}: match a module inside of it"
        )
    found = magnitudes(y)
    seen = jnp.stack([jnp.ones(()), found[FEATURE_MEAN], found[FEATURE_MAX]])
    return report(_ignore_gradient, y, getattr(self, FEATURES)[...], seen)


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


def _is_quantized(module: nnx.Module) -> bool:
    holder = module if isinstance(module, Linear) else getattr(module, "dot_general", None)
    recipe = getattr(holder, "recipe", None)
    return recipe is not None and (recipe.fwd is not None or recipe.dgrad is not None)


def _stacked(module: nnx.Module) -> tuple[int, ...]:
    """The leading axes of a stack of modules, from its first linear layer; () for a single module."""
    for _, layer in nnx.iter_modules(module):
        if isinstance(layer, nnx.Linear | nnx.LinearGeneral):
            own = np.size(layer.in_features), np.size(layer.out_features)  # numbers or tuples
            return layer.kernel.shape[: layer.kernel.ndim - sum(own)]
    return ()
