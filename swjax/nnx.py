"""SwitchBack for Flax NNX: a drop-in `Linear`, and `quantize_model` for models that exist already."""

from collections.abc import Callable, Mapping

import jax
from flax import nnx
from jax.sharding import PartitionSpec as P

from swjax.kernels import dispatch
from swjax.partition import TOKENS, Layout
from swjax.recipes import Recipe, first_match, get
from swjax.switchback import dot_general, switchback


class Linear(nnx.Linear):
    """`flax.nnx.Linear` whose three matrix products are computed as `recipe` says.

    The parameters, their names, shapes, dtypes and initial values are those of `flax.nnx.Linear`, so
    checkpoints go both ways. The weight is quantized from the parameter in `param_dtype`, not from a copy
    in `dtype`.

    Args:
      in_features, out_features: k and n.
      recipe: a name in `swjax.recipes.RECIPES` or a `swjax.recipes.Recipe`.
      implementation: see `swjax.kernels.dispatch`; None chooses.
      layout: where input and kernel lie, see `swjax.Layout`; None: the kernel where Flax's metadata
        says (`kernel_metadata={"out_sharding": ("fsdp", "tensor")}`), if it does.
      rngs: as for `flax.nnx.Linear`.
      **kwargs: use_bias, dtype, param_dtype, precision, kernel_init, bias_init, promote_dtype,
        preferred_element_type, kernel_metadata, bias_metadata: as for `flax.nnx.Linear`.

    Raises:
      ValueError: there is no such recipe or implementation.

    >>> import jax.numpy as jnp
    >>> layer = Linear(3, 4, recipe="switchback", rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 3))).shape
    (2, 4)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        recipe: str | Recipe = "switchback",
        implementation: str | None = None,
        layout: Layout | None = None,
        rngs: nnx.Rngs,
        **kwargs,
    ):
        if "dot_general" in kwargs:
            raise ValueError(
                "swjax.nnx.Linear computes its own product and takes no dot_general: "
                "give it to flax.nnx.Linear, or choose a recipe here"
            )
        super().__init__(in_features, out_features, rngs=rngs, **kwargs)
        self.set_recipe(recipe, implementation)
        self.layout = layout if layout is not None else _layout(self.kernel)

    def set_recipe(self, recipe: str | Recipe, implementation: str | None = None):
        """Computes as `recipe` says from now on."""
        dispatch.check(implementation)
        self.recipe, self.implementation = get(recipe), implementation

    def __call__(self, inputs: jax.Array, out_sharding=None) -> jax.Array:
        """``inputs w + bias``: [..., k] -> [..., n]."""
        kernel = self.kernel[...]
        bias = None if self.bias is None else self.bias[...]
        x, _, bias = self.promote_dtype((inputs, kernel, bias), dtype=self.dtype)
        y = switchback(
            x,
            kernel,
            bias,
            recipe=self.recipe,
            out_dtype=self.preferred_element_type,
            precision=self.precision,
            implementation=self.implementation,
            layout=self.layout,
        )
        return y if out_sharding is None else jax.reshard(y, out_sharding)


def quantize_model(
    model: nnx.Module, recipes: Mapping[str, str | Recipe], *, implementation: str | None = None
) -> nnx.Module:
    """Makes the linear layers of an existing NNX model compute as recipes say, in place.

    A linear layer is a module that takes a `dot_general`: `nnx.Linear`, `nnx.LinearGeneral` and so the
    projections of `nnx.MultiHeadAttention`. Parameters stay as they are, and so do checkpoints.

    Args:
      model: any NNX model; it is changed.
      recipes: {regular expression: recipe}. An expression has to match a module's whole path, written
        as in "encoder/layers/0/mlp/fc1"; the first that matches counts. The others stay as they are.
      implementation: see `swjax.kernels.dispatch`; None chooses.

    Returns:
      `model`.

    Raises:
      ValueError: an expression matches no linear layer, or there is no such recipe.

    >>> mlp = nnx.Sequential(nnx.Linear(3, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 2, rngs=nnx.Rngs(1)))
    >>> mlp = quantize_model(mlp, {r"layers/.*": "switchback"})
    """
    linears = {
        "/".join(map(str, path)): module
        for path, module in nnx.iter_modules(model)
        if hasattr(module, "dot_general")
    }
    for path, recipe in first_match(recipes, linears).items():
        if isinstance(linears[path], Linear):
            linears[path].set_recipe(recipe, implementation)
        else:
            linears[path].dot_general = dot_general(
                recipe, implementation=implementation, layout=_layout(linears[path].kernel)
            )
    return model


def set_layouts(model: nnx.Module, spec_of: Callable[[str], P], tokens: P = TOKENS) -> nnx.Module:
    """Tells the `Linear` layers of a model where their operands lie, in place.

    For parameters that are put in place by a table of rules rather than by Flax's metadata.

    Args:
      model: an NNX model; it is changed.
      spec_of: the partition spec of the parameter with a path, as "blocks/mlp/fc1/kernel". Of kernels that
        are stacked, as for `jax.lax.scan`, the last two dimensions count.
      tokens: the spec of the leading dimensions of every layer's input.

    Returns:
      `model`.

    >>> model = set_layouts(nnx.Dict(fc=Linear(4, 8, rngs=nnx.Rngs(0))), {"fc/kernel": P("fsdp")}.get)
    >>> model.fc.layout.w
    P('fsdp', None)
    """
    for path, module in nnx.iter_modules(model):
        if isinstance(module, Linear):
            spec = spec_of("/".join(map(str, (*path, "kernel"))))
            whole = (*spec, *(None,) * module.kernel.ndim)[: module.kernel.ndim]
            module.layout = Layout(P(*whole[-2:]), tokens)
    return model


def _layout(kernel: nnx.Param) -> Layout | None:
    """From the kernel's metadata."""
    if not kernel.get_metadata("out_sharding", None) or kernel.ndim != 2:
        return None
    return Layout(nnx.get_partition_spec(kernel).get_value())
