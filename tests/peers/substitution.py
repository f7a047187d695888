"""A pytest plugin that replaces parts of optax and Flax by swjax's before their tests are imported.

`suites.py` loads it in a separate process; the environment variable SWJAX_SUBSTITUTION names the part.
"""

import functools
import os
import re

VARIABLE, SELECT = "SWJAX_SUBSTITUTION", "SWJAX_SELECT"


def pytest_configure():
    name = os.environ[VARIABLE]
    if name != "nothing":
        {"linen": _linen, "nnx": _nnx}.get(name, functools.partial(_optax, name))()


def pytest_collection_modifyitems(items):
    """Selects tests by their parameters. -k cannot: absl names parametrized tests by number."""
    pattern = re.compile(os.environ[SELECT])
    items[:] = [
        item
        for item in items
        if pattern.search(getattr(item.function, "__x_params_repr__", "") + item.name)
    ]


def _optax(name: str) -> None:
    """Replaces Adam and AdamW by StableAdamW, or wraps every optimizer of the suite."""
    import optax
    from optax._src import alias

    from swjax.optax import dynamic_loss_scale, per_tensor_guard, stable_adamw

    def stable(learning_rate, b1=0.9, b2=0.999, eps=1e-8, **options):
        known = {k: v for k, v in options.items() if k in ("weight_decay", "mask", "mu_dtype")}
        return stable_adamw(learning_rate, b1=b1, b2=b2, eps=eps, **known)

    def guarded(guard, original):
        @functools.wraps(original)  # `inject_hyperparams` reads the signature of the factory
        def make(*args, **kwargs):
            return guard(original(*args, **kwargs), 1.0)

        return make

    # These tests do not scale their losses, so the loss scale must stay 1.
    fixed = functools.partial(dynamic_loss_scale, growth_steps=2**30)
    guards = {"per_tensor_guard": per_tensor_guard, "dynamic_loss_scale": fixed}
    replaced = ("adam", "adamw") if name == "stable_adamw" else ("adam", "adamw", "sgd", "rmsprop")
    for original in replaced:
        new = stable if name == "stable_adamw" else guarded(guards[name], getattr(alias, original))
        for module in (alias, optax):
            setattr(module, original, new)


def _linen() -> None:
    """Replaces `flax.linen.Dense` by `swjax.linen.Dense` in the recipe that computes as Flax does."""
    import flax.linen
    import flax.linen.linear

    import swjax.linen

    class Dense(swjax.linen.Dense):
        recipe: str = "standard"

    flax.linen.Dense = flax.linen.linear.Dense = Dense


def _nnx() -> None:
    """Replaces `flax.nnx.Linear` by `swjax.nnx.Linear` in the recipe that computes as Flax does."""
    import flax.nnx
    import flax.nnx.nn.linear

    import swjax.nnx

    class Linear(swjax.nnx.Linear):
        def __init__(self, *args, recipe="standard", **kwargs):
            super().__init__(*args, recipe=recipe, **kwargs)

    flax.nnx.Linear = flax.nnx.nn.linear.Linear = Linear
