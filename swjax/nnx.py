"""SwitchBack for Flax NNX: a drop-in `Linear`, and `quantize_model` for models that exist already."""

import re
from collections.abc import Mapping

import jax
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype

from swjax.recipes import Recipe, get
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
      rngs: as for `flax.nnx.Linear`.
      **kwargs: use_bias, dtype, param_dtype, precision, kernel_init, bias_init, preferred_element_type,
        kernel_metadata, bias_metadata: as for `flax.nnx.Linear`.

    Raises:
      ValueError: there is no such recipe.

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
        rngs: nnx.Rngs,
        **kwargs,
    ):
        super().__init__(in_features, out_features, rngs=rngs, **kwargs)
        self.recipe = get(recipe)
        self.implementation = implementation

    def __call__(self, inputs: jax.Array, out_sharding=None) -> jax.Array:
        """``inputs w + bias``: [..., k] -> [..., n]."""
        kernel = self.kernel[...]
        bias = None if self.bias is None else self.bias[...]
        x, narrow_kernel, bias = promote_dtype((inputs, kernel, bias), dtype=self.dtype)
        y = switchback(
            x,
            narrow_kernel if self.recipe.fwd is None else kernel,
            bias,
            recipe=self.recipe,
            out_dtype=self.preferred_element_type,
            precision=self.precision,
            implementation=self.implementation,
        )
        return y if out_sharding is None else jax.reshard(y, out_sharding)
