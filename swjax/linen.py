"""SwitchBack for Flax Linen: a drop-in `Dense`, and an interceptor for models that exist already."""

import re
from collections.abc import Mapping
from contextlib import contextmanager

import jax
from flax import linen as nn

from swjax.partition import Layout
from swjax.recipes import Recipe, get
from swjax.switchback import dot_general, switchback


class Dense(nn.Dense):
    """`flax.linen.Dense` whose three matrix products are computed as `recipe` says.

    Parameters and checkpoints are those of `flax.linen.Dense`. The weight is quantized from the parameter
    in `param_dtype`, not from a copy in `dtype`.

    Attributes:
      recipe: a name in `swjax.recipes.RECIPES` or a `swjax.recipes.Recipe`.
      implementation: see `swjax.kernels.dispatch`; None chooses.
      layout: where input and kernel lie, see `swjax.Layout`.
      The others are those of `flax.linen.Dense`.

    >>> import jax.numpy as jnp
    >>> layer = Dense(4, recipe="switchback")
    >>> params = layer.init(jax.random.key(0), jnp.ones((2, 3)))
    >>> layer.apply(params, jnp.ones((2, 3))).shape
    (2, 4)
    """

    recipe: str | Recipe = "switchback"
    implementation: str | None = None
    layout: Layout | None = None

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """``inputs w + bias``: [..., k] -> [..., n]."""
        if self.dot_general is not None or self.dot_general_cls is not None:
            raise ValueError(
                "swjax.linen.Dense computes its own product and takes no dot_general: "
                "give it to flax.linen.Dense, or choose a recipe here"
            )
        shape = (inputs.shape[-1], self.features)
        kernel = self.param("kernel", self.kernel_init, shape, self.param_dtype)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype)
        x, _, bias = self.promote_dtype(inputs, kernel, bias, dtype=self.dtype)
        return switchback(
            x,
            kernel,
            bias,
            recipe=self.recipe,
            precision=self.precision,
            implementation=self.implementation,
            layout=self.layout,
        )


@contextmanager
def quantize_model(recipes: Mapping[str, str | Recipe], *, implementation: str | None = None):
    """Within it, the linear layers of any Linen model compute as recipes say.

    A linear layer is a `Dense` or `DenseGeneral`, and so is each projection of an attention module.
    Parameters stay as they are, and so do checkpoints. It acts while a model is traced: use it inside
    the function you jit.

    Args:
      recipes: {regular expression: recipe}. An expression has to match a module's whole path, written as
        in "encoder/layer_0/mlp/Dense_0"; the first that matches counts. The others stay as they are.
      implementation: see `swjax.kernels.dispatch`; None chooses.

    Raises:
      ValueError: there is no such recipe, or model code ran and an expression matched none of its layers.

    >>> import jax.numpy as jnp
    >>> model = nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(2)])
    >>> params = model.init(jax.random.key(0), jnp.ones((4, 3)))
    >>> @jax.jit
    ... def predict(params, x):
    ...     with quantize_model({r"layers_.*": "switchback"}):
    ...         return model.apply(params, x)
    >>> predict(params, jnp.ones((4, 3))).shape
    (4, 2)
    """
    products = {
        pattern: dot_general(get(recipe), implementation=implementation)
        for pattern, recipe in recipes.items()
    }
    seen, unmatched = set(), set(recipes)

    def intercept(call, args, kwargs, context):
        module = context.module
        if context.method_name != "__call__" or not isinstance(module, (nn.Dense, nn.DenseGeneral)):
            return call(*args, **kwargs)
        path = "/".join(module.path)
        seen.add(path)
        for pattern, product in products.items():
            if re.fullmatch(pattern, path):
                unmatched.discard(pattern)
                return _call_with(module, product, call, args, kwargs)
        return call(*args, **kwargs)

    with nn.intercept_methods(intercept):
        yield
    if seen and unmatched:
        raise ValueError(
            f"pattern {min(unmatched)!r} matches no linear layer as a whole: "
            f"the paths are {', '.join(map(repr, sorted(seen)))}"
        )


def _call_with(module, product, call, args, kwargs):
    """Calls a bound module's method while its `dot_general` is another; bound modules are frozen."""
    before = module.dot_general
    object.__setattr__(module, "dot_general", product)
    try:
        return call(*args, **kwargs)
    finally:
        object.__setattr__(module, "dot_general", before)
