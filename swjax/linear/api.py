"""The public functions of the linear layer: `switchback`, `mlp`, `gated_mlp`, and `quantize_weight`."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from swjax import auto, recipes
from swjax.kernels import dispatch, reference, targets
from swjax.kernels.reference import QTensor
from swjax.kernels.rotations.reference import rotate_features
from swjax.linear.checks import (
    PLAIN_DTYPES,
    check_activation,
    check_addend,
    check_dtypes,
    check_prologue,
    check_same_shape,
    check_shapes,
    dtype_of_output,
    gate_and_up,
    weight_array,
    weight_quantizer,
)
from swjax.linear.interception import intercepted, is_active
from swjax.linear.layer import Layer
from swjax.linear.layouts import Layout, device_count
from swjax.linear.prologues import Gated, Gelu, Prologue, input_spec
from swjax.linear.rules import LayerArrays, MLPLayers, fused_mlp, linears
from swjax.linear.sharding import (
    Sharding,
    gathered_over_mapped_axes,
    placed_weight,
    sharding_of_layer,
    sharding_of_next,
    vary_alike,
)
from swjax.recipes import Product, Recipe


def switchback(
    x: jax.Array,
    w: jax.Array | QTensor | tuple[jax.Array | QTensor, ...],
    bias: jax.Array | tuple[jax.Array | None, ...] | None = None,
    *,
    addend: jax.Array | None = None,
    recipe: str | Recipe = "switchback",
    prologue: Prologue | None = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    precision: jax.lax.PrecisionLike = None,
    residual: bool = False,
    implementation: str | None = None,
    layout: Layout | None = None,
) -> jax.Array | tuple:
    """Linear layer ``y = x w + bias`` with quantized products, forward and backward.

    The default recipe is SwitchBack (Alg. 1 of the paper, `swjax.linear.algorithm`): one scale per token
    of x and g, one scale for w::

        y  = int8(x) int8(w)  * scale_x scale_w + bias
        dx = int8(g) int8(wT) * scale_g scale_w
        dw = xT g                                     in the dtype of x

    int8 operands are multiplied as int8 and summed in int32. The weight is quantized from `w` as given: pass
    the fp32 parameter, not a 16-bit copy. Higher derivatives are straight-through: they equal those of exact
    products, see docs/transformations.md.

    If the largest magnitude of a row, channel or tensor is below 2^-92 (2e-28), the scale of 2^-92 is used.
    The absolute error is then up to 8e-31 (int8), and smaller elements become zero. Scale the loss if
    gradients are that small.

    Args:
      x: [..., k] float16, bfloat16 or float32; any leading dimensions, also of size 0. Products without
        quantization are computed in its dtype. The recipe "standard" also supports float64 and complex, if w,
        bias and y have the same dtype and neither `prologue` nor `layout` is given.
      w: [k, n], dtypes as for x; its gradient has the dtype of w. A tuple contains the weights of several
        layers with the same input, such as queries, keys and values, for which x is quantized once. A weight
        from `quantize_weight` has no gradient; y is the same, and so is dx if the recipe has one scale for w.
      bias: [n] or None; a tuple of these if w is one.
      addend: [..., n] float16, bfloat16 or float32 array to add to y, such as a residual stream, or None. The
        kernel of a quantized product adds it in float32, which saves a pass over memory. Not for several
        weights.
      recipe: a name in `swjax.recipes.RECIPES`, a `swjax.recipes.Recipe`, or "auto" for the fastest on the
        chip, see `swjax.auto`.
      prologue: a `swjax.LayerNorm`, `swjax.RMSNorm` or `swjax.Gelu` to apply to x first, fused with the
        quantizer.
      out_dtype: dtype of y; None uses the dtype of x.
      precision: precision of the products without quantization, see `jax.lax.dot_general`.
      residual: whether to return x as well, for a residual connection. The prologue's backward pass then adds
        the residual's gradient, which saves a pass over memory.
      implementation: implementation of the quantized products, see `swjax.kernels.dispatch`; None chooses.
      layout: shardings of x and w, see `swjax.Layout`; not needed on one device and on explicit meshes.

    Returns:
      y: [..., n] in `out_dtype`; a tuple of outputs if w is a tuple. With `residual`: (y, x).

    Raises:
      ValueError: an argument is not an array, shapes or dtypes do not fit, or the recipe or the
        implementation does not exist.

    >>> x, w = jnp.ones((2, 5, 3)), jnp.full((3, 4), 0.5)
    >>> y = switchback(x, w)
    >>> y.shape, float(y[0, 0, 0])
    ((2, 5, 4), 1.5)
    >>> [y.shape for y in switchback(x, (w, w[:, :1]), (None, None))]
    [(2, 5, 4), (2, 5, 1)]

    References:
      Wortsman et al., "Stable and low-precision training for large-scale vision-language models",
      NeurIPS 2023, https://arxiv.org/abs/2304.13013
    """
    several = isinstance(w, tuple) and not isinstance(w, QTensor)
    ws: Any = w if several else (w,)
    if not ws:
        raise ValueError(
            "w must be an array or a tuple of several, got (): pass at least one weight"
        )
    biases: Any = _biases(ws, bias) if several else (bias,)
    for each in zip(ws, biases, strict=True):
        check_shapes(x, *each, recipe)
    ws, biases = gathered_over_mapped_axes((tuple(ws), biases))
    check_addend(x, ws, addend)
    check_prologue(x, prologue)
    settings: dict[str, Any] = {"recipe": _one_recipe(recipe, ws), "precision": precision}
    settings |= {"out_dtype": out_dtype, "implementation": implementation}
    if is_active():
        options = settings | {"layout": layout}
        ys = tuple(_beside_qwix(x, *each, addend, prologue, options) for each in zip(ws, biases))
        y = ys if several else ys[0]
        return (y, x) if residual else y
    shardings = [sharding_of_layer(x, weight_array(w), layout) for w in ws]
    layers = tuple(
        _layer(x, w, sharding, addend=addend, **settings) for w, sharding in zip(ws, shardings)
    )
    if _has_no_tokens(x, layers[0]):
        ys = tuple(_no_outputs(x, *each) for each in zip(ws, layers))
    elif prologue is None and all(_is_plain(x, *each, addend) for each in zip(ws, biases, layers)):
        ys = tuple(_plain_output(x, *each, addend, precision) for each in zip(ws, biases))
    else:
        for each in zip(ws, biases):
            check_dtypes(x, *each, addend)
        inputs = _placed(x, ws, biases, prologue, layers)
        addends = (shardings[0].place(addend, shardings[0].y), *(None for _ in ws[1:]))
        ys, kept = linears(*vary_alike(inputs, addends), layers, residual)
        x = x if kept is None else kept
    y = ys if several else ys[0]
    return (y, x) if residual else y


def _biases(ws: tuple, bias) -> tuple:
    """The bias of each of several weights."""
    if bias is None:
        return (None,) * len(ws)
    if not isinstance(bias, tuple | list) or len(bias) != len(ws):
        got = len(bias) if isinstance(bias, tuple | list) else "one for all"
        raise ValueError(
            f"{len(ws)} weights need None or a tuple of {len(ws)} biases, "
            f"each an array or None, got {got}"
        )
    return tuple(bias)


def _beside_qwix(x, w, bias, addend, prologue: Prologue | None, options: dict) -> jax.Array:
    """Computes one layer as a product that Qwix intercepts, so that its LoRA can add a delta."""
    if prologue is not None:
        x, _ = prologue.forward(x, quantize_to=None, implementation="xla")
    product: Any = lambda: switchback(x, w, bias, addend=addend, **options)
    contract = ((x.ndim - 1,), (0,)), ((), ())
    return intercepted("dot_general", product, w, x, w, contract)


def mlp(
    x: jax.Array,
    w1: jax.Array | QTensor,
    b1: jax.Array | None,
    w2: jax.Array | QTensor,
    b2: jax.Array | None,
    *,
    recipe: str | Recipe = "switchback",
    prologue: Prologue | None = None,
    approximate: bool = False,
    precision: jax.lax.PrecisionLike = None,
    residual: bool = False,
    add_input: bool = False,
    implementation: str | None = None,
    layouts: tuple[Layout | None, Layout | None] = (None, None),
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """``gelu(x w1 + b1) w2 + b2``: two `switchback` layers that share memory passes with the GELU.

    The result equals that of the two layers. In the backward pass, one memory pass writes the GELU's gradient
    in 16 bits and quantized, and sums it for b1.

    Args:
      x: [..., k] float16, bfloat16 or float32.
      w1: [k, h]; b1: [h] or None; w2: [h, n]; b2: [n] or None; weights as in `switchback`.
      recipe, prologue, precision, residual, implementation: see `switchback`; they apply to both layers.
      approximate: whether to use the tanh form of the GELU.
      add_input: whether to add x to y. The kernel of the second product adds it; the prologue's backward
        pass adds its gradient. Each saves a pass over memory.
      layouts: the layout of x and w1, and the layout of w2; see `swjax.Layout`.

    Returns:
      y: [..., n] in the dtype of x. With `residual`: (y, x).

    Raises:
      ValueError: an argument is not an array, shapes or dtypes do not fit, or the recipe or the
        implementation does not exist.

    >>> x, w1, w2 = jnp.ones((2, 3)), jnp.ones((3, 8)), jnp.ones((8, 3))
    >>> mlp(x, w1, None, w2, None).shape
    (2, 3)
    """
    return _mlp(
        x,
        ((w1, b1),),
        Gelu(approximate),
        (w2, b2),
        prologue=prologue,
        add_input=add_input,
        residual=residual,
        layouts=layouts,
        recipe=recipe,
        precision=precision,
        implementation=implementation,
    )


def gated_mlp(
    x: jax.Array,
    w_gate: jax.Array | QTensor,
    w_up: jax.Array | QTensor | None,
    w_down: jax.Array | QTensor,
    *,
    activation: str = "silu",
    prologue: Prologue | None = None,
    recipe: str | Recipe = "switchback",
    add_input: bool = False,
    residual: bool = False,
    precision: jax.lax.PrecisionLike = None,
    implementation: str | None = None,
    layouts: tuple[Layout | None, Layout | None] = (None, None),
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """``(activation(x w_gate) * (x w_up)) w_down``: SwiGLU or GeGLU, the MLP of language models.

    The result equals that of three `switchback` layers that share memory passes: x is quantized once, one
    pass computes and quantizes the product of activation and up, and one pass of the backward pass computes
    and quantizes the gradients of gate and up. Activation and product are computed in float32 and rounded
    once. The forward pass saves gate and up, and no other array of that size.

    Args:
      x: [..., k] float16, bfloat16 or float32.
      w_gate, w_up: [k, h] each, weights as in `switchback`; or both in w_gate, gate first, as [2, k, h] or
        [k, 2 h], with w_up=None. Two arrays save a copy of the weights.
      w_down: [h, n], a weight as in `switchback`.
      activation: "silu", "gelu" (the exact form) or "gelu_tanh".
      prologue: a `swjax.RMSNorm` or `swjax.LayerNorm` to apply to x first, fused with the quantizer.
      recipe, precision, residual, implementation: see `switchback`; they apply to all layers.
      add_input: whether to add x to y, see `mlp`.
      layouts: the layout of x, w_gate and w_up, and the layout of w_down; see `swjax.Layout`.

    Returns:
      y: [..., n] in the dtype of x. With `residual`: (y, x).

    Raises:
      ValueError: an argument is not an array, shapes or dtypes do not fit, or the activation, the recipe or
        the implementation does not exist.

    >>> x, w, w_down = jnp.ones((2, 3)), jnp.ones((3, 8)), jnp.ones((8, 3))
    >>> y = gated_mlp(x, w, w, w_down)
    >>> y.shape, bool(jnp.all(y == gated_mlp(x, jnp.stack([w, w]), None, w_down)))
    ((2, 3), True)

    References:
      Shazeer, "GLU variants improve Transformer", 2020, https://arxiv.org/abs/2002.05202
    """
    check_activation(activation)
    return _mlp(
        x,
        tuple((w, None) for w in gate_and_up(w_gate, w_up)),
        Gated(activation),
        (w_down, None),
        prologue=prologue,
        add_input=add_input,
        residual=residual,
        layouts=layouts,
        recipe=recipe,
        precision=precision,
        implementation=implementation,
    )


def _mlp(
    x: jax.Array,
    first: tuple[tuple[Any, jax.Array | None], ...],
    activation: Gelu | Gated,
    last: tuple[Any, jax.Array | None],
    *,
    prologue: Prologue | None,
    add_input: bool,
    residual: bool,
    layouts: tuple[Layout | None, Layout | None],
    recipe: str | Recipe,
    **settings: Any,
) -> Any:
    """`mlp` and `gated_mlp`; `first` and `last` are (weight, bias)."""
    for w, bias in first:
        check_shapes(x, w, bias, recipe)
        check_dtypes(x, w, bias)
    w2 = last[0]
    hidden = jax.ShapeDtypeStruct((*x.shape[:-1], weight_array(first[0][0]).shape[1]), x.dtype)
    check_shapes(hidden, *last, recipe)
    check_addend(hidden, (w2,), x if add_input else None, "x (add_input=True)")
    check_prologue(x, prologue)
    check_dtypes(hidden, *last)
    check_same_shape(tuple(w for w, _ in first))
    first, (w2, b2) = gathered_over_mapped_axes((first, last))
    ws, biases = zip(*first)
    settings["recipe"] = _one_recipe(recipe, (*ws, w2))
    if is_active():
        between: Any = switchback(x, ws, biases, prologue=prologue, layout=layouts[0], **settings)
        between = between if len(ws) > 1 else between[0]
        h: Any = activation.forward(between, quantize_to=None, implementation="xla")[0]
        options = settings | {"addend": x if add_input else None, "layout": layouts[1]}
        y: Any = switchback(h, w2, b2, **options)
        return (y, x) if residual else y
    sharding = sharding_of_layer(x, weight_array(ws[0]), layouts[0])
    next_sharding = sharding_of_next(sharding, weight_array(w2), layouts[1])
    settings = settings | {"out_dtype": None}
    layers = MLPLayers(
        tuple(_layer(x, w, sharding, addend=None, **settings) for w in ws),
        _layer(x, w2, next_sharding, addend=x if add_input else None, **settings),
    )
    if _has_no_tokens(x, layers.last):
        y = _no_outputs(x, w2, layers.last)
        return (y, x) if residual else y
    inputs = _placed(x, ws, biases, prologue, layers.first)
    inputs2 = _placed(None, (w2,), (b2,), activation, (layers.last,))
    y, kept = fused_mlp(*vary_alike(inputs, inputs2), layers, residual, add_input)
    return y if kept is None else (y, kept)


def _one_recipe(recipe: str | Recipe, ws: tuple[jax.Array | QTensor, ...]) -> Recipe:
    """The recipe of layers that share an input or memory passes, which "auto" chooses for all of them."""
    return recipes.get(recipe, *(weight_array(w).shape for w in ws))


def _layer(
    x, w, sharding: Sharding, *, addend, recipe: Recipe, out_dtype, precision, implementation
) -> Layer:
    recipe = _rotating(recipe, w, sharding)
    if isinstance(w, QTensor):
        recipe = recipe.with_constant_weight()
    formats = () if implementation == "xla" else targets.block_formats()
    # A layer that names XLA asks for the emulation.
    emulated = implementation != "xla" and recipe.is_emulated(formats)
    auto.warn_if_slow(recipe.dtypes, emulated)
    dispatch.check_products(implementation, _products(recipe, formats))
    return Layer(
        recipe,
        sharding,
        dtype=x.dtype.name,
        out_dtype=dtype_of_output(x, out_dtype),
        w_dtype=None if isinstance(w, QTensor) else w.dtype.name,
        addend_dtype=None if addend is None else addend.dtype.name,
        implementation=implementation,
        precision=precision,
    )


def _rotating(recipe: Recipe, w, sharding: Sharding) -> Recipe:
    """The recipe with rotations of features that are on one device."""
    whole = weight_array(w).shape
    shards = (
        (1, 1)
        if sharding.mesh is None
        else (device_count(sharding.mesh, axes) for axes in sharding.w)
    )
    fitting = recipe.rotating(*(n // count for n, count in zip(whole, shards)))
    given = recipe.rotating(*whole).fwd
    if isinstance(w, QTensor) and given is not None and fitting.fwd != given:
        raise ValueError(
            f"this quantized w [n, k] rotates groups of {given.lhs.rotation} features, "
            f"which its shards split, got k={whole[0]}: pass w itself, or shard other axes"
        )
    return fitting


def _products(recipe: Recipe, formats: tuple[targets.BlockFormat, ...]) -> list[str]:
    """The names of a layer's products in `swjax.kernels.dispatch`; only XLA computes "dot".

    `formats`: the block formats that are not emulated.
    """
    wgrad = "weight_gradient"
    if recipe.wgrad is not None:
        wgrad = "block_weight_gradient" if recipe.wgrad.lhs.scope == "block" else "matmul"
    products = [recipe.fwd, recipe.dgrad] + [recipe.wgrad] * (wgrad == "matmul")

    def name(product: Product | None) -> str:
        if product is None or not product.in_blocks:
            return "matmul" if product else "dot"
        return "block_matmul" if product.lhs.block_format in formats else "dot"

    names = list(map(name, products))
    return names if wgrad == "matmul" else [*names, wgrad]


def _has_no_tokens(x, layer: Layer) -> bool:
    """Whether a sharded x is empty.

    XLA cannot compile a `jax.shard_map` with constant results, such as sums over zero tokens.
    """
    return layer.sharding.mesh is not None and 0 in x.shape[:-1]


def _no_outputs(x, w, layer: Layer) -> Any:
    y = jnp.zeros((*x.shape[:-1], weight_array(w).shape[1]), layer.out_dtype)
    return layer.sharding.place(y, layer.sharding.y)


def _placed(
    x, ws, biases, prologue: Prologue | Gated | None, layers: tuple[Layer, ...]
) -> LayerArrays:
    """Reshards the arguments outside of the `custom_vjp`, so that JAX reshards the gradients back."""
    x = layers[0].sharding.place(x, input_spec(prologue, layers[0]))
    ws, biases = zip(*map(placed_weight, ws, biases, (layer.sharding for layer in layers)))
    return LayerArrays(x, ws, biases, prologue)


# --- layers without quantization, as products that JAX differentiates in every mode and to any order --


def _is_plain(x, w, bias, layer: Layer, addend) -> bool:
    """Whether JAX's derivatives of the plain product equal those of `swjax.linear.rules`.

    This holds if nothing is quantized or sharded, and all arrays have one dtype with at least 32 bits. For
    16-bit arrays, the rules sum gradients in float32, and may compute the weight gradient in a kernel.
    """
    if layer.recipe != Recipe() or isinstance(w, QTensor) or layer.sharding.mesh is not None:
        return False
    dtypes = {jnp.dtype(layer.out_dtype), *(a.dtype for a in (x, w, bias, addend) if a is not None)}
    return len(dtypes) == 1 and x.dtype in (jnp.float32, *PLAIN_DTYPES)


def _plain_output(x, w, bias, addend, precision) -> jax.Array:
    contract = ((x.ndim - 1,), (0,))
    y = reference.dot(x, w, contract, bias, out_dtype=x.dtype.name, precision=precision)
    return checkpoint_name(y if addend is None else y + addend, "swjax_y")


def plain_weight(w: jax.Array | QTensor, x: jax.Array) -> jax.Array | QTensor:
    """The weight of a layer that casts its parameters to float64 or complex inputs, as Flax's layers do."""
    return w if isinstance(w, QTensor) or x.dtype not in PLAIN_DTYPES else w.astype(x.dtype)


def quantize_weight(
    w: jax.Array, recipe: str | Recipe = "switchback", *, implementation: str | None = None
) -> QTensor:
    """Quantizes `w` for the forward product of a recipe, for inference: a quarter of the bytes of fp32.

    `switchback` and `mlp` accept the result instead of w, with the same recipe, and return the same values.
    Without it they quantize w at every call.

    Args:
      w: [k, n] float16, bfloat16 or float32.
      recipe: a name in `swjax.recipes.RECIPES` or a `swjax.recipes.Recipe`.
      implementation: see `swjax.kernels.dispatch`; None chooses.

    Returns:
      A QTensor with values [n, k], the transpose, which tensor cores read, and scale [1, 1], or [n, 1] if the
      recipe has one scale per output channel.

    Raises:
      ValueError: w is not an array [k, n], or the recipe's forward product is not quantized, or keeps
        outliers in 16 bits.

    >>> x, w = jnp.ones((2, 3)), jnp.full((3, 4), 0.5)
    >>> q = quantize_weight(w)
    >>> q.values.shape, bool(jnp.all(switchback(x, q) == switchback(x, w)))
    ((4, 3), True)
    """
    if not hasattr(w, "dtype"):
        remedy = "it is quantized already" if isinstance(w, QTensor) else "pass jnp.asarray(w)"
        raise ValueError(f"w must be an array, got a {type(w).__name__}: {remedy}")
    if w.ndim != 2:
        raise ValueError(
            f"quantize_weight needs w [k, n], got {w.shape}: use jax.vmap for a stack of weights"
        )
    quantizer = weight_quantizer(recipes.get(recipe).rotating(*w.shape))
    if quantizer.is_static:
        absmax = reference.static_absmax(quantizer.static_scale(w.shape), quantizer.dtype, 2)
        options = {"dtype": quantizer.dtype, "transpose": True, "clip": True}
        return dispatch.run("quantize_by", w, absmax, implementation=implementation, **options)
    axes = (0, 1) if quantizer.scope == "tensor" else (0,)
    return dispatch.run(
        "quantize",
        rotate_features(w, quantizer.rotation, 0),
        axes=axes,
        dtype=quantizer.dtype,
        transpose=True,
        implementation=implementation,
    )


def dequantize_weight(q: QTensor, recipe: str | Recipe = "switchback") -> jax.Array:
    """The weight that the result of `quantize_weight` stands for.

    Args:
      q: values [n, k] and their scales.
      recipe: the recipe that w was quantized for.

    Returns:
      [k, n] float32, which differs from w by the rounding error of the quantizer.

    >>> dequantize_weight(quantize_weight(jnp.full((3, 4), 0.5))).round(3)[0]
    Array([0.5, 0.5, 0.5, 0.5], dtype=float32)
    """
    n, k = q.values.shape
    rotation = weight_quantizer(recipes.get(recipe).rotating(k, n)).rotation
    return rotate_features(reference.dequantize(q.T), rotation, 0, inverse=True)
