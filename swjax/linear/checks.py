"""Checks of arguments; each one-line error names the invariant, the value and the remedy."""

from typing import Any

import jax
import jax.numpy as jnp

from swjax import recipes
from swjax.kernels.gated.reference import ACTIVATIONS
from swjax.kernels.reference import QTensor
from swjax.linear.prologues import Gelu, LayerNorm, Prologue
from swjax.recipes import Quantizer, Recipe

OPERAND_DTYPES = (jnp.float16, jnp.bfloat16, jnp.float32)
# Supported only by the recipe "standard".
PLAIN_DTYPES = (jnp.float64, jnp.complex64, jnp.complex128)


def check_shapes(
    x: jax.Array | jax.ShapeDtypeStruct,
    w: jax.Array | QTensor,
    bias: jax.Array | None,
    recipe: str | Recipe,
) -> None:
    """Raises a ValueError if these are not arrays with the shapes of a linear layer."""
    check_arrays(x=x, w=w, bias=bias, may_be_tuple=True)
    if isinstance(w, QTensor):
        check_quantized(w, recipe)
    w = weight_array(w)
    if w.ndim != 2 or x.ndim < 1 or x.shape[-1] != w.shape[0]:
        raise ValueError(
            f"switchback needs x [..., k] and w [k, n], got x {x.shape} and w {w.shape}: "
            "for other contractions use swjax.dot_general"
        )
    if bias is not None and bias.shape != w.shape[1:]:
        raise ValueError(f"bias must have the shape {w.shape[1:]} of w's columns, got {bias.shape}")


def check_arrays(*, may_be_tuple: bool = False, **operands: Any) -> None:
    """Raises a ValueError if an operand is no array; w may be quantized, and bias None.

    `may_be_tuple`: whether the caller accepts a tuple of weights.
    """
    besides: dict[str, Any] = {"w": QTensor, "bias": type(None)}
    for name, array in operands.items():
        if hasattr(array, "dtype") or isinstance(array, besides.get(name, ())):
            continue
        remedy = f"pass jnp.asarray({name})"
        if name == "w" and may_be_tuple:
            remedy += ", or a tuple of several weights"
        elif isinstance(array, QTensor):
            remedy = "only w may be quantized"
        raise ValueError(f"{name} must be an array, got a {type(array).__name__}: {remedy}")


def check_addend(
    x: jax.Array | jax.ShapeDtypeStruct,
    ws: tuple[jax.Array | QTensor, ...],
    addend: jax.Array | None,
    name: str = "addend",
) -> None:
    """Raises a ValueError if this is not an addend of the output of a layer with one weight."""
    if addend is None:
        return
    if len(ws) > 1:
        raise ValueError(
            f"{name} is for one weight, got {len(ws)}: add arrays to the outputs instead"
        )
    shape = (*x.shape[:-1], weight_array(ws[0]).shape[1])
    if getattr(addend, "shape", None) != shape:
        got = getattr(addend, "shape", type(addend).__name__)
        raise ValueError(
            f"{name} must be an array of the shape {shape} of y, got {got}: add other shapes to y instead"
        )


def check_prologue(x: jax.Array, prologue: Prologue | None) -> None:
    """Raises a ValueError if this is not a prologue of x [..., k]."""
    if not isinstance(prologue, Prologue | None):
        raise ValueError(
            "prologue must be a swjax.LayerNorm, a swjax.RMSNorm, a swjax.Gelu or None, got "
            f"{prologue!r}: apply other functions to x"
        )
    if prologue is None or isinstance(prologue, Gelu):
        return
    # Kernels read k values of each, without bounds checks.
    for name in ("scale", "bias") if isinstance(prologue, LayerNorm) else ("scale",):
        array = getattr(prologue, name)
        if getattr(array, "shape", None) != x.shape[-1:]:
            got = getattr(array, "shape", type(array).__name__)
            raise ValueError(
                f"{type(prologue).__name__}'s {name} must be an array of the shape {x.shape[-1:]} of x's "
                f"features, got {got}"
            )


def check_activation(activation: str) -> None:
    """Raises a ValueError if `swjax.gated_mlp` has no such activation."""
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}: apply others between "
            "swjax.switchback layers"
        )


def gate_and_up(
    w_gate: jax.Array | QTensor, w_up: jax.Array | QTensor | None
) -> tuple[jax.Array | QTensor, jax.Array | QTensor]:
    """The weights of gate and up, given as two, or as one array [2, k, h] or [k, 2 h].

    Raises:
      ValueError: w_up is None, and w_gate is no such array.
    """
    if w_up is not None:
        return w_gate, w_up
    shape = getattr(w_gate, "shape", None)  # a QTensor has none
    if not isinstance(w_gate, QTensor) and shape:
        if len(shape) == 3 and shape[0] == 2:
            return w_gate[0], w_gate[1]
        if len(shape) == 2 and shape[1] % 2 == 0:
            return w_gate[:, : shape[1] // 2], w_gate[:, shape[1] // 2 :]
    raise ValueError(
        "w_gate must be an array [2, k, h] or [k, 2 h] if w_up is None, "
        f"got {shape or type(w_gate).__name__}: pass both weights"
    )


def check_same_shape(ws: tuple[jax.Array | QTensor, ...]) -> None:
    """Raises a ValueError if weights, gate and up, have several shapes."""
    shapes = [weight_array(w).shape for w in ws]
    if len({*shapes}) > 1:
        raise ValueError(
            f"w_gate and w_up must have one shape, got {shapes[0]} and {shapes[1]}: pass two [k, h]"
        )


def check_dtypes(
    x: jax.Array | jax.ShapeDtypeStruct,
    w: jax.Array | QTensor,
    bias: jax.Array | None,
    addend: jax.Array | None = None,
) -> None:
    """Raises a ValueError if a layer cannot compute with these dtypes.

    The recipe "standard" supports more dtypes where `swjax.linear.api` needs no quantization.
    """
    for name, array in {"x": x, "w": w, "bias": bias, "addend": addend}.items():
        if array is None or isinstance(array, QTensor) or array.dtype in OPERAND_DTYPES:
            continue
        needs = f"{name} must be float16, bfloat16 or float32, got {array.dtype}: cast it first"
        if array.dtype in PLAIN_DTYPES:
            needs += (
                "; float64 and complex are for swjax.switchback and the recipe 'standard' with operands "
                "and result of one dtype, without prologue and layout"
            )
        raise ValueError(needs)


def dtype_of_output(x: jax.Array, out_dtype: jax.typing.DTypeLike | None) -> str:
    """The name of the dtype of y: `out_dtype`, or that of x for None.

    Raises:
      ValueError: it is not a floating dtype, nor, for a complex x, a complex one.
    """
    dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    kind = jnp.inexact if jnp.iscomplexobj(x) else jnp.floating
    if out_dtype is not None and not jnp.issubdtype(dtype, kind):
        raise ValueError(f"out_dtype must be a floating dtype, got {dtype}: cast y instead")
    return dtype.name


def check_quantized(w: QTensor, recipe: str | Recipe) -> None:
    """Raises a ValueError if w is not what `swjax.quantize_weight` returns for a recipe, or a stack of it."""
    quantizer = weight_quantizer(recipe)
    *experts, n, _ = w.values.shape
    scale = (*experts, 1 if quantizer.has_one_scale else n, 1)
    if w.values.dtype != quantizer.dtype or w.scale.shape != scale:
        raise ValueError(
            f"a quantized w must be {quantizer.dtype} [{'e, ' * len(experts)}n, k] with a scale {scale} for "
            f"this recipe, got {w.values.dtype} {w.values.shape} and {w.scale.shape}: make it by "
            "swjax.quantize_weight(w, recipe)"
        )


def weight_quantizer(recipe: str | Recipe) -> Quantizer:
    """The quantizer of w in the forward product, if that product reads only the quantized w.

    Raises:
      ValueError: the forward product reads w itself.
    """
    fwd = recipes.get(recipe).fwd
    if fwd is None or fwd.outlier_threshold or fwd.in_blocks:
        needs = "multiplies w itself" if fwd is None else "multiplies outliers with w itself"
        if fwd is not None and fwd.in_blocks:
            needs = "quantizes w along another axis in each product"
        raise ValueError(f"this recipe {needs}, and has no quantized w: pass w itself")
    return fwd.rhs


def weight_array(w: jax.Array | QTensor) -> jax.Array:
    """An array [..., k, n] with the shape and the sharding of a weight."""
    return w.values.mT if isinstance(w, QTensor) else w
