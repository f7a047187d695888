"""`ragged_switchback` and `gated_ragged_mlp`: layers of experts, each of which multiplies its own rows."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax

from swjax.kernels import dispatch
from swjax.kernels.reference import QTensor
from swjax.linear import experts, ragged_rules
from swjax.linear.checks import check_activation, check_prologue, dtype_of_output, weight_array
from swjax.linear.layer import Layer
from swjax.linear.layouts import Layout, Spec
from swjax.linear.prologues import Prologue, input_spec
from swjax.linear.sharding import Sharding, placed_weight, sharding_of_layer, vary_alike
from swjax.recipes import Recipe


def ragged_switchback(
    x: jax.Array,
    w: jax.Array | QTensor,
    group_sizes: jax.Array,
    *,
    recipe: str | Recipe = "switchback",
    prologue: Prologue | None = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    precision: jax.lax.PrecisionLike = None,
    implementation: str | None = None,
    layout: Layout | None = None,
) -> jax.Array:
    """`jax.lax.ragged_dot` with quantized products, forward and backward: the linear layer of experts.

    Row i of x belongs to the group e that ``cumsum(group_sizes)`` tells, and is multiplied with w[e], as by
    `swjax.switchback`: one scale per row of x and of the gradient, one scale per expert's weight (or one per
    expert and channel). The weight gradient is a product in the dtype of x. `switchback_hadamard` computes it
    in int8, from rotated rows, if an average expert has 512 rows and ``k n / (k + n)`` is at least 768; on
    other GPUs than Hopper only if `implementation` names Triton, where that is not faster. Rows beyond the
    sum of the groups are zero, in y and in the gradient of x. Inside `jax.jit` no group size is an error:
    negative sizes count as zero, and groups end at the last row.

    Kernels compute the products on NVIDIA GPUs, in Mosaic on Hopper and in Triton from Ampere on, also those
    of the recipe "standard" in 16 bits. Elsewhere, and in float32, XLA computes them; on CPUs it expands a
    ragged product to a dense one over all experts. There `jax.vmap` works as for `jax.lax.ragged_dot`: over
    all three arrays together, and not with gradients.

    Args:
      x: [m, k] float16, bfloat16 or float32, rows sorted by expert.
      w: [e, k, n], dtypes as for x; its gradient has the dtype of w. Or the QTensor of
        ``jax.vmap(swjax.quantize_weight)(w)``, which has no gradient.
      group_sizes: [e] integers, the number of rows of each expert.
      recipe: a name in `swjax.recipes.RECIPES` or a `swjax.recipes.Recipe` that quantizes x row by row,
        without rotated features and outliers. Its weight gradient is in 16 bits or in blocks of tokens. Or
        "auto", see `swjax.auto`: 16 bits if an average expert has fewer than 600 rows, or 1,200 with weights
        in 16 bits, because quantizing the weights takes as long for few rows as for many. Other recipes warn
        then.
      prologue: a `swjax.LayerNorm`, `swjax.RMSNorm` or `swjax.Gelu` to apply to x first, fused with the
        quantizer, such as the GELU between two layers. All experts share its parameters.
      out_dtype: dtype of y; None uses the dtype of x.
      precision: precision of the products without quantization, see `jax.lax.dot_general`.
      implementation: see `swjax.switchback`; None chooses.
      layout: shardings on meshes with axes of type Auto, see `swjax.Layout`. The axes of its tokens and of
        its experts shard the rows, if their devices divide m. Each device multiplies its own rows, and
        gathers the weights of all experts in 8 bits over these axes.

    Returns:
      y: [m, n] in `out_dtype`.

    Raises:
      ValueError: shapes or dtypes do not fit, a group size is negative or their sum exceeds m (checked if
        `group_sizes` is concrete), or the recipe, the prologue or the implementation does not exist or is not
        supported.

    >>> import jax.numpy as jnp
    >>> x, w = jnp.ones((5, 3)), jnp.stack([jnp.ones((3, 2)), jnp.full((3, 2), 2.0)])
    >>> ragged_switchback(x, w, jnp.array([1, 3]))[:, 0].tolist()
    [3.0, 6.0, 6.0, 6.0, 0.0]
    """
    recipe = experts.check("ragged_switchback", x, w, group_sizes, recipe)
    check_prologue(x, prologue)
    settings = _settings(recipe, precision, implementation)
    sharding = replace(sharding_of_layer(x, weight_array(w), layout), reduce_later=False)
    layer = _layer(x, w, sharding, out_dtype=out_dtype, **settings)
    rows = sharding.place(x, input_spec(prologue, layer))
    sizes = sharding.place(group_sizes, Spec(((),)))
    w, _ = placed_weight(w, None, sharding)
    before = ragged_rules.RaggedInput(rows, prologue)
    return ragged_rules.ragged(*vary_alike(before, w, sizes), layer)


def gated_ragged_mlp(
    x: jax.Array,
    w_gate: jax.Array | QTensor,
    w_up: jax.Array | QTensor,
    w_down: jax.Array | QTensor,
    group_sizes: jax.Array,
    *,
    activation: str = "silu",
    recipe: str | Recipe = "switchback",
    precision: jax.lax.PrecisionLike = None,
    implementation: str | None = None,
) -> jax.Array:
    """``(activation(x w_gate) * (x w_up)) w_down`` with the weights of each row's expert: a mixture's MLP.

    The result equals that of three `ragged_switchback` layers that share memory passes, as `gated_mlp`
    does: x is quantized once, one pass computes and quantizes the product of activation and up, and one pass
    of the backward pass computes and quantizes the gradients of gate and up. The forward pass saves gate and
    up, and no other array of that size. Rows beyond the sum of the groups are zero.

    Args:
      x: [m, k] float16, bfloat16 or float32, rows sorted by expert.
      w_gate, w_up: [e, k, h] each, weights as in `ragged_switchback`.
      w_down: [e, h, n], a weight as in `ragged_switchback`.
      group_sizes: [e] integers, the number of rows of each expert.
      activation: "silu", "gelu" (the exact form) or "gelu_tanh".
      recipe, precision, implementation: see `ragged_switchback`; they apply to all layers.

    Returns:
      y: [m, n] in the dtype of x.

    Raises:
      ValueError: as `ragged_switchback`, or the activation does not exist.

    >>> import jax.numpy as jnp
    >>> x, w, w_down = jnp.ones((3, 4)), jnp.ones((2, 4, 8)), jnp.ones((2, 8, 4))
    >>> y = gated_ragged_mlp(x, w, w, w_down, jnp.array([2, 0]))
    >>> y.shape, bool(jnp.any(y[0])), bool(jnp.any(y[2]))
    ((3, 4), True, False)
    """
    check_activation(activation)
    check = partial(experts.check, "gated_ragged_mlp")
    for w in (w_gate, w_up):
        recipe = check(x, w, group_sizes, recipe)
    shape, of_up = weight_array(w_gate).shape, weight_array(w_up).shape
    if shape != of_up:
        raise ValueError(
            f"w_gate and w_up must have one shape, got {shape} and {of_up}: pass two [e, k, h]"
        )
    hidden = jax.ShapeDtypeStruct((len(x), shape[2]), x.dtype)
    settings = _settings(check(hidden, w_down, group_sizes, recipe), precision, implementation)
    ws = w_gate, w_up, w_down
    sharding = Sharding(None, ((),), w=Spec(((),) * 3))
    layers = ragged_rules.GatedLayers(
        *(_layer(x, w, sharding, out_dtype=None, **settings) for w in ws)
    )
    return ragged_rules.gated_mlp(*vary_alike(x, ws, group_sizes), layers, activation)


def _settings(recipe: Recipe, precision: Any, implementation: str | None) -> dict[str, Any]:
    dispatch.check_products(implementation, experts.PRODUCTS)
    return {"recipe": recipe, "precision": precision, "implementation": implementation}


def _layer(x, w, sharding: Sharding, *, out_dtype, **settings: Any) -> Layer:
    return Layer(
        sharding=sharding,
        dtype=x.dtype.name,
        out_dtype=dtype_of_output(x, out_dtype),
        w_dtype=None if isinstance(w, QTensor) else w.dtype.name,
        **settings,
    )
