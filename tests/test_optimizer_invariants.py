"""The optimizers of swjax.optax under every transformation of JAX and every optimizer wrapper.

Two of different structure get every check, and each other one a few. Wrappers must give the updates that they
give for the same optimizer of optax. `KNOWN` lists what fails, with reasons, and `table()` makes the table of
docs/transformations.md.
"""

import functools
import inspect
import math
import pickle
import re
import tempfile
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import thinning
from flax import nnx, serialization
from flax.training import checkpoints
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from optax import contrib
from orbax import checkpoint as orbax

from swjax.optax import (
    dynamic_loss_scale,
    from_adamw_state,
    muon,
    per_tensor_guard,
    scale_by_stable_adam,
    stable_adamw,
)

PAGE = Path(__file__).parents[1] / "docs" / "transformations.md"


def layers(params):
    """Returns the block axes: a parameter with three axes is a stack of matrices."""
    return jax.tree.map(lambda p: 0 if p.ndim == 3 else None, params)


def matrices(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


def layers_only(params):
    return jax.tree.map(lambda p: p.ndim == 3, params)


HYPER = {
    "b1": 0.9,
    "b2": 0.99,
    "eps": 1e-6,
    "weight_decay": 0.1,
}  # optax and swjax differ in defaults
NO_CLIPPING = HYPER | {"clip_threshold": math.inf}


def converted(learning_rate):
    """Returns a stable_adamw whose state is converted from AdamW's."""
    adamw, ours = optax.adamw(1e-2), stable_adamw(learning_rate, **NO_CLIPPING)
    init = lambda params: from_adamw_state(adamw.init(params), ours.init(params), b1=0.9, b2=0.999)
    return optax.GradientTransformationExtraArgs(init, ours.update)


def muon_of_optax():
    """The Muon of optax for the stacks of matrices, and its AdamW for the rest."""
    dimensions = lambda params: jax.tree.map(
        lambda x: None if is_masked(x) else contrib.MuonDimensionNumbers(1, 2),
        params,
        is_leaf=is_masked,
    )
    matrices = contrib.muon(
        1e-2, weight_decay=0.1, consistent_rms=0.2, muon_weight_dimension_numbers=dimensions
    )
    groups = {True: matrices, False: optax.adamw(1e-2, **HYPER)}
    return optax.partition(groups, layers_only)


def scaled(optimizer):
    """What a guard with the scale 8 gives without an overflow."""
    return optax.chain(optax.scale(1 / 8), optimizer)


our_muon = partial(muon, 1e-2, layers_only, **HYPER, coefficients="quintic")
schedule = optax.linear_schedule(1e-2, 1e-3, 3)
AdamW = partial(optax.adamw, 1e-2, **HYPER)

# {name: (our factory, the same optimizer of optax)}
EVERY_CHECK = {
    "stable_adamw": (
        partial(stable_adamw, schedule, mask=matrices, block_axes=layers, **NO_CLIPPING),
        lambda: optax.adamw(schedule, mask=matrices, **HYPER),
    ),
    "per_tensor_guard(muon)": (
        partial(per_tensor_guard, our_muon(), 8.0, block_axes=layers),
        lambda: scaled(muon_of_optax()),
    ),
}
OTHERS = {
    "stable_adamw, every option": (
        partial(
            stable_adamw,
            schedule,
            mask=matrices,
            mu_dtype=jnp.float32,
            block_axes=layers,
            decoupled_lr=True,
            **NO_CLIPPING,
        ),
        lambda: optax.adamw(schedule, mask=matrices, **HYPER),
    ),
    "scale_by_stable_adam": (
        partial(scale_by_stable_adam, clip_threshold=math.inf),
        lambda: optax.scale_by_adam(b2=0.99, eps=1e-6),
    ),
    "from_adamw_state": (partial(converted, 1e-2), AdamW),
    "muon": (our_muon, muon_of_optax),
    "per_tensor_guard(stable_adamw)": (
        partial(per_tensor_guard, stable_adamw(1e-2, **NO_CLIPPING), 8.0, block_axes=layers),
        lambda: scaled(AdamW()),
    ),
    "per_tensor_guard(noisy_sgd)": (
        partial(per_tensor_guard, optax.noisy_sgd(1e-2, key=jax.random.key(0)), 8.0),
        lambda: scaled(optax.noisy_sgd(1e-2, key=jax.random.key(0))),
    ),
    "dynamic_loss_scale(muon)": (
        partial(dynamic_loss_scale, our_muon(), 8.0),
        lambda: scaled(muon_of_optax()),
    ),
    "dynamic_loss_scale(stable_adamw)": (
        partial(dynamic_loss_scale, stable_adamw(1e-2, **NO_CLIPPING), 8.0),
        lambda: scaled(AdamW()),
    ),
}
OPTIMIZERS = EVERY_CHECK | OTHERS


@functools.cache
def params_of(dtype="float32"):
    rng = np.random.default_rng(0)
    return {
        "blocks": {"w": jnp.asarray(rng.normal(size=(2, 4, 2)), dtype)},
        "head": {"b": jnp.asarray(0.5, dtype), "w": jnp.asarray(rng.normal(size=4), dtype)},
    }


def is_masked(x):
    """Whether a node of a state stands for a parameter that `optax.masked` or `partition` leaves out."""
    return isinstance(x, optax.MaskedNode)


def types(tree):
    return jax.tree.map(jax.typeof, tree)


def same(actual, expected):
    """Asserts that structures, dtypes and values are equal."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(plain(a), plain(b))


def plain(x):
    """Converts an array to a dtype that NumPy supports."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(x)
    return np.asarray(x, np.float32) if jnp.issubdtype(x.dtype, jnp.inexact) else x


@functools.cache
def optimizer_of(name):
    return OPTIMIZERS[name][0]()


@functools.cache
def after_one_step(optimizer):
    params = params_of()
    return jax.jit(optimizer.update)(params, optimizer.init(params), params)[1]


def updates_of(optimizer, params, steps=4):
    """Returns the updates of compiled steps with different gradients, which keep all types."""
    state = start = optimizer.init(params)
    update = jax.jit(lambda *args: optimizer.update(*args))  # a new function, with its own cache
    found = []
    for t in range(steps):
        grads = jax.tree.map(lambda p, t=t: jnp.cos((t + 1) * p), params)
        updates, state = update(grads, state, params)
        assert types(updates) == types(params) and types(state) == types(start)
        params = optax.apply_updates(params, updates)
        found.append(updates)
    assert update._cache_size() == 1
    return found


def close(actual, expected, rtol=1e-3):
    """Asserts that updates agree to a thousandth of the largest of their tensor."""

    def leaf(a, b):
        a, b = plain(a), plain(b)
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.max(np.abs(b)))

    jax.tree.map(leaf, actual, expected)


# -------------------------------------------------------------------------------------
# The state
# -------------------------------------------------------------------------------------


def flax_state_dict(optimizer):
    state = after_one_step(optimizer)
    restored = serialization.from_state_dict(
        optimizer.init(params_of()), serialization.to_state_dict(state)
    )
    same(restored, state)


def flax_msgpack(optimizer):
    state = after_one_step(optimizer)
    restored = serialization.from_bytes(optimizer.init(params_of()), serialization.to_bytes(state))
    same(restored, state)
    jax.jit(optimizer.update)(params_of(), restored, params_of())


def flax_train_state(optimizer):
    state = TrainState.create(apply_fn=None, params=params_of(), tx=optimizer)
    trained = jax.jit(lambda state, grads: state.apply_gradients(grads=grads))(state, params_of())
    same(
        serialization.from_bytes(state, serialization.to_bytes(trained)).opt_state,
        trained.opt_state,
    )


def flax_checkpoints(optimizer):
    state = after_one_step(optimizer)
    with tempfile.TemporaryDirectory() as folder:
        checkpoints.save_checkpoint(folder, state, 1)
        same(checkpoints.restore_checkpoint(folder, optimizer.init(params_of())), state)


def orbax_checkpoint(optimizer):
    state = after_one_step(optimizer)
    with tempfile.TemporaryDirectory() as folder, orbax.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(Path(folder) / "state", state)
        same(checkpointer.restore(Path(folder) / "state", item=optimizer.init(params_of())), state)


def pickled(optimizer):
    state = after_one_step(optimizer)
    same(pickle.loads(pickle.dumps(state)), state)


def map_params(optimizer):
    params = params_of()
    state = after_one_step(optimizer)
    same(optax.tree.map_params(optimizer, lambda x: x, state), state)

    def check(x, p):
        assert is_masked(x) or x.shape == p.shape
        return x

    zeros = lambda x: jnp.zeros(x.shape)
    mapped = optax.tree.map_params(
        optimizer, check, state, params, transform_non_params=zeros, is_leaf=is_masked
    )
    assert jax.tree.structure(mapped) == jax.tree.structure(state)


# -------------------------------------------------------------------------------------
# JAX
# -------------------------------------------------------------------------------------


def jit_with_donation(optimizer):
    params = jax.tree.map(jnp.copy, params_of())
    state = optimizer.init(params)
    step = jax.jit(lambda g, s, p: optimizer.update(g, s, p), donate_argnums=(1, 2))
    for _ in range(2):
        params, state = step(params_of(), state, params)


def jit_and_eval_shape_of_init(optimizer):
    params = params_of()
    state = optimizer.init(params)
    assert types(jax.jit(optimizer.init)(params)) == types(state)
    assert types(jax.eval_shape(optimizer.init, params)) == types(state)


def scan_and_cond(optimizer):
    params = params_of()

    def step(carry, turn):
        params, state = carry
        new = lambda: optimizer.update(params, state, params)
        updates, state = jax.lax.cond(
            turn, new, lambda: (jax.tree.map(jnp.zeros_like, params), state)
        )
        return (optax.apply_updates(params, updates), state), None

    turns = jnp.array([True, False, True])
    start = params, optimizer.init(params)
    end, _ = jax.jit(lambda start: jax.lax.scan(step, start, turns))(start)
    assert types(end) == types(start)


def vmap(optimizer):
    """Each member of a vmapped ensemble is updated as if it were alone."""
    members = jax.tree.map(lambda p: jnp.stack([p, 2 * p]), params_of())

    def run(params):
        updates, state = optimizer.update(params, optimizer.init(params), params)
        return updates, optimizer.update(params, state, params)[1]

    together = jax.jit(jax.vmap(run))(members)
    alone = jax.jit(run)(jax.tree.map(lambda p: p[1], members))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(plain(a[1]), plain(b), rtol=1e-5), together, alone
    )


def sixteen_bits(optimizer):
    """The first update is that of float32."""
    want = updates_of(optimizer, params_of(), steps=1)
    for dtype in ("bfloat16", "float16"):
        close(updates_of(optimizer, params_of(dtype), steps=1), want, rtol=0.03)


def sharded(optimizer, kind):
    """The state and the updates are sharded like the parameters, and have the values of one device."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(kind,), devices=jax.devices()[:2])
    specs = {
        "blocks": {"w": PartitionSpec("x")},
        "head": {"b": PartitionSpec(), "w": PartitionSpec("x")},
    }
    unsharded = params_of()  # outside of the mesh, because they are cached
    with jax.set_mesh(mesh):
        params = jax.tree.map(
            lambda p, spec: jax.device_put(p, NamedSharding(mesh, spec)), unsharded, specs
        )
        state = optimizer.init(params)
        updates, after = jax.jit(optimizer.update)(params, state, params)
        if kind == AxisType.Explicit:
            assert types(updates) == types(params) and types(after) == types(state)

        def like(x, p):
            assert is_masked(x) or x.sharding.is_equivalent_to(p.sharding, p.ndim)
            return x

        jax.tree.map(like, updates, params)
        updates = jax.device_get(updates)
        optax.tree.map_params(optimizer, like, after, params, is_leaf=is_masked)
    close(updates, jax.jit(optimizer.update)(unsharded, optimizer.init(unsharded), unsharded)[0])


def sharded_automatically(optimizer):
    sharded(optimizer, AxisType.Auto)


def sharded_explicitly(optimizer):
    sharded(optimizer, AxisType.Explicit)


def nnx_optimizer(optimizer):
    """The parameters of a model change as a tree of arrays does."""
    model = nnx.LinearGeneral(3, (2, 4), rngs=nnx.Rngs(0))
    holder = nnx.Optimizer(model, optimizer, wrt=nnx.Param)
    arrays = lambda: nnx.to_pure_dict(nnx.state(model, nnx.Param))

    @nnx.jit
    def step(model, holder):
        grads = nnx.grad(lambda model: jnp.sum(model(jnp.ones((1, 3))) ** 2))(model)
        holder.update(model, grads)
        return nnx.to_pure_dict(grads)

    before = arrays()
    updates, _ = optimizer.update(step(model, holder), optimizer.init(before), before)
    close(jax.tree.map(lambda a, b: a - b, arrays(), before), updates)


# -------------------------------------------------------------------------------------
# Wrappers
# -------------------------------------------------------------------------------------


def wrapped(wrap):
    """Returns a check that a wrapper gives the updates that it gives for the same optimizer of optax."""

    def check(optimizer, same):
        params = params_of()
        with jax.numpy_rank_promotion("allow"):  # optax's Muon needs it
            want = updates_of(wrap(same), params)
        close(updates_of(wrap(optimizer), params), want)
        assert any(np.any(plain(u)) for u in jax.tree.leaves(want))

    check.wraps = wrap
    return check


def maps(optimizer):
    state = jax.eval_shape(optimizer.init, params_of())
    mapped = optax.tree.map_params(optimizer, lambda x: x, state, is_leaf=is_masked)
    assert jax.tree.structure(mapped) == jax.tree.structure(state)


def map_params_of_wrappers(optimizer):
    for name, check in CHECKS.items():
        if hasattr(check, "wraps") and name != "`optax.flatten`":
            maps(check.wraps(optimizer))


def injected(make):
    """All numeric hyperparameters are traced, and `init` can be compiled."""
    static = {"inner", "mask", "mu_dtype", "block_axes", "decoupled_lr", "matrices"}
    static &= set(inspect.signature(make.func).parameters)
    inject = optax.inject_hyperparams(make.func, static_args=static)
    outer = inject(*make.args, **make.keywords)
    start = jax.jit(outer.init)(params_of())
    assert types(start) == types(outer.init(params_of()))
    close(updates_of(outer, params_of()), updates_of(make(), params_of()))


def lookahead(optimizer, same):
    def run(inner):
        outer = optax.lookahead(inner, sync_period=2, slow_step_size=0.5)
        params = start = optax.LookaheadParams.init_synced(params_of())
        state = outer.init(params)
        for _ in range(3):
            grads = jax.tree.map(jnp.cos, params.fast)
            updates, after = jax.jit(outer.update)(grads, state, params)
            assert types(after) == types(state) and types(updates) == types(params)
            params, state = optax.apply_updates(params, updates), after
        return jax.tree.map(lambda a, b: a - b, params, start)

    with jax.numpy_rank_promotion("allow"):
        close(run(optimizer), run(same))


def some_steps(step, **_):
    return step % 2 == 0


CHECKS = {
    "`flax.serialization` state dict": flax_state_dict,
    "`flax.serialization` bytes": flax_msgpack,
    "`flax.training.train_state.TrainState`": flax_train_state,
    "`flax.training.checkpoints`": flax_checkpoints,
    "Orbax checkpoint": orbax_checkpoint,
    "`pickle`": pickled,
    "`optax.tree.map_params`": map_params,
    "`jax.jit` with donation": jit_with_donation,
    "`jax.jit`, `jax.eval_shape` of `init`": jit_and_eval_shape_of_init,
    "`jax.lax.scan`, `jax.lax.cond`": scan_and_cond,
    "`jax.vmap`": vmap,
    "bfloat16 and float16 parameters": sixteen_bits,
    "sharded parameters, automatic axes": sharded_automatically,
    "sharded parameters, explicit axes": sharded_explicitly,
    "`flax.nnx.Optimizer`": nnx_optimizer,
    "`optax.chain`": wrapped(lambda o: optax.chain(optax.clip_by_global_norm(1.0), o)),
    "`optax.masked`": wrapped(
        lambda o: optax.masked(o, {"blocks": True, "head": {"b": False, "w": True}})
    ),
    "`optax.partition`": wrapped(
        lambda o: optax.partition(
            {"ours": o, "sgd": optax.sgd(0.1)}, {"blocks": "ours", "head": "sgd"}
        )
    ),
    "`optax.MultiSteps`": wrapped(lambda o: optax.MultiSteps(o, 2).gradient_transformation()),
    "`optax.skip_not_finite`": wrapped(
        lambda o: optax.MultiSteps(
            o, 2, should_skip_update_fn=optax.skip_not_finite
        ).gradient_transformation()
    ),
    "`optax.apply_if_finite`": wrapped(lambda o: optax.apply_if_finite(o, 3)),
    "`optax.conditionally_transform`": wrapped(
        lambda o: optax.conditionally_transform(o, some_steps)
    ),
    "`optax.conditionally_mask`": wrapped(lambda o: optax.conditionally_mask(o, some_steps)),
    "`optax.flatten`": wrapped(optax.flatten),
    "`optax.inject_hyperparams`": injected,
    "`optax.lookahead`": lookahead,
    "`optax.contrib.sam`": wrapped(
        lambda o: optax.contrib.sam(
            o, optax.chain(optax.contrib.normalize(), optax.sgd(0.05)), sync_period=2
        )
    ),
    "`optax.contrib.schedule_free`": wrapped(lambda o: optax.contrib.schedule_free(o, 1e-2)),
    "`optax.contrib.mechanize`": wrapped(optax.contrib.mechanize),
    "`optax.contrib.split_real_and_imaginary`": wrapped(optax.contrib.split_real_and_imaginary),
    "`optax.tree.map_params` of these wrappers": map_params_of_wrappers,
}

# {check: (part of the optimizers' names, what the page says, error, reason as on the page)}
KNOWN = {
    "`flax.serialization` bytes": (
        "noisy_sgd",
        "no random keys",
        "JAX array with PRNGKey dtype cannot be converted to a NumPy array",
        "The state of `optax.noisy_sgd` in a guard holds a random key. Flax's bytes format cannot store JAX's"
        " random keys",
    ),
    "`optax.flatten`": (
        "muon",
        "not `muon`",
        "muon's matrices must name a parameter, got none of 1",
        "`optax.flatten` joins all parameters in one vector, which has no matrices. For `stable_adamw` the"
        " vector is one tensor, with one RMS, and a guard skips it as a whole",
    ),
}

# {optimizer: its checks}; those of `EVERY_CHECK` have all.
DIAGONAL = {
    "stable_adamw, every option": ("`optax.inject_hyperparams`", "bfloat16 and float16 parameters"),
    "scale_by_stable_adam": ("`optax.masked`", "`jax.vmap`"),
    "from_adamw_state": ("Orbax checkpoint", "`jax.lax.scan`, `jax.lax.cond`"),
    "muon": ("`optax.inject_hyperparams`", "`optax.contrib.schedule_free`", "`optax.flatten`"),
    "per_tensor_guard(stable_adamw)": ("sharded parameters, explicit axes", "`optax.lookahead`"),
    "per_tensor_guard(noisy_sgd)": (
        "`flax.serialization` state dict",
        "`flax.serialization` bytes",
    ),
    "dynamic_loss_scale(muon)": ("sharded parameters, explicit axes", "`optax.MultiSteps`"),
    "dynamic_loss_scale(stable_adamw)": (
        "`flax.training.train_state.TrainState`",
        "`optax.inject_hyperparams`",
    ),
}
# `make test` runs each check with one of the two, and the first check of each other optimizer.
CASES = thinning.thinned(list(CHECKS), list(EVERY_CHECK), full=[])
CASES += [
    pytest.param(check, name, marks=() if check == checks[0] else pytest.mark.release)
    for name, checks in DIAGONAL.items()
    for check in checks
]


def table() -> str:
    """Returns the page's list in Markdown: what works with every optimizer, and the exceptions."""
    everywhere = "; ".join(check for check in CHECKS if check not in KNOWN)
    others = [f"- {check}: {says}. {why}." for check, (_, says, _, why) in KNOWN.items()]
    lines = [f"Every optimizer works with: {everywhere}.", "", "With exceptions:", "", *others]
    return "\n".join(lines)


@jax.numpy_dtype_promotion("standard")  # optax's optimizers need it
@pytest.mark.parametrize("check, name", CASES, ids=lambda name: name.replace("`", ""))
@pytest.mark.filterwarnings("ignore:Sharding info not provided")  # Orbax warns on one device
def test_composes(check, name):
    make, same = OPTIMIZERS[name]
    part, _, error, _ = KNOWN.get(check, ("none", "", "", ""))
    expected = pytest.raises(Exception, match=re.escape(error)) if part in name else nullcontext()
    function = CHECKS[check]
    with expected:
        if function is injected:
            function(make)
        elif len(inspect.signature(function).parameters) == 2:
            function(optimizer_of(name), same())
        else:
            function(optimizer_of(name))


BEGIN, END = "<!-- optimizers: begin -->", "<!-- optimizers: end -->"


def with_table(page: str) -> str:
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


def test_the_page_has_this_table():
    page = PAGE.read_text()
    assert page == with_table(page), "run: python tests/test_optimizer_invariants.py"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
