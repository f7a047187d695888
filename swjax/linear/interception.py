"""Our products beside Qwix, which intercepts `jax.lax.dot_general` and `jax.numpy.einsum` while a model runs.

Its LoRA adds a delta to each intercepted product of a weight. It must see a layer's product as a whole, not
the int8 product inside of it, whose result is not scaled yet.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax import lax
from jax import numpy as jnp

F = TypeVar("F", bound=Callable)


def is_active() -> bool:
    """Whether Qwix intercepts functions that this thread calls."""
    if (qwix := _qwix()) is None:
        return False
    disabled = qwix.interception_manager.disable_interception()
    qwix.interception_manager.enable_interception(disabled)
    return bool(disabled)


def without_interception(fn: F) -> F:
    """Returns `fn`, inside of which nothing is intercepted."""

    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        qwix = _qwix()
        return (qwix.disable_interceptions(fn) if qwix else fn)(*args, **kwargs)

    return wrapper  # type: ignore[return-value]  # the type of fn


def intercepted(
    name: str, product: Callable[[], jax.Array], w: Any, *args: Any, **kwargs: Any
) -> jax.Array:
    """Our product of a weight, to which Qwix applies its rule for this module, if it has one.

    Args:
      name: "dot_general" or "einsum".
      product: computes our product.
      w: the weight.
      *args, **kwargs: arguments of the function of JAX that computes the same product, w among them.

    Raises:
      ValueError: the rule computes the product itself, instead of adding to it, or w is quantized.
    """
    product = without_interception(product)
    if not is_active() or sys.modules["qwix._src.qconfig"].get_current_rule(name) is None:
        return product()
    module, ran = {"dot_general": lax, "einsum": jnp}[name], []

    def replacement(*called, **options):
        if not any(arg is w for arg in called):  # one of the products of LoRA's delta
            return getattr(module, name)(*called, **options)
        ran.append(name)
        return product()

    if isinstance(w, jax.Array):
        mapping = {f"{module.__name__}.{name}": replacement}
        interceptor = _qwix().Interceptor(mapping=mapping, id=id(replacement))
        call = lambda: getattr(module, name)(*args, **kwargs)
        y = _qwix().wrap_func_intercepted(call, lambda: interceptor, disable_jit=False)()
    if not ran:
        raise ValueError(
            "a layer with a recipe of swjax must have a float weight and no quantization by Qwix, but a rule "
            "of Qwix matches it: exclude it from one of them"
        )
    return y


def _qwix() -> Any:
    """Qwix's module of interception, which has no public name; None if Qwix is not imported."""
    return sys.modules.get("qwix._src.interception")
