"""Every optimizer of swjax.optax under every transformation of JAX and every optimizer wrapper.

`KNOWN` lists the combinations that fail, with reasons. `table()` makes the table of docs/transformations.md.
"""

import functools
import inspect
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
import optax.contrib
import pytest
from flax import nnx, serialization
from flax.training import checkpoints
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from orbax import checkpoint as orbax

from swjax.optax import dynamic_loss_scale, from_adamw_state, muon, per_tensor_guard, stable_adamw

PAGE = Path(__file__).parents[1] / "docs" / "transformations.md"


def layers(params):
    """Returns the block axes: a parameter with three axes is a stack of matrices."""
    return jax.tree.map(lambda p: 0 if p.ndim == 3 else None, params)


def matrices(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


def layers_only(params):
    return jax.tree.map(lambda p: p.ndim == 3, params)


def converted(learning_rate):
    """Returns a stable_adamw whose state is converted from AdamW's."""
    adamw, ours = optax.adamw(1e-2), stable_adamw(learning_rate)
    init = lambda params: from_adamw_state(adamw.init(params), ours.init(params), b1=0.9, b2=0.999)
    return optax.GradientTransformationExtraArgs(init, ours.update)


OPTIMIZERS = {
    "stable_adamw": partial(stable_adamw, 1e-2),
    "stable_adamw, every option": partial(
        stable_adamw,
        optax.constant_schedule(1e-2),
        mask=matrices,
        mu_dtype=jnp.bfloat16,
        block_axes=layers,
        decoupled_lr=True,
    ),
    "from_adamw_state": partial(converted, 1e-2),
    "muon": partial(muon, 1e-2, layers_only, mask=matrices),
    "per_tensor_guard(stable_adamw)": partial(
        per_tensor_guard,
        stable_adamw(1e-2),
        8.0,
        across=optax.clip_by_global_norm(1.0),
        block_axes=layers,
    ),
    "per_tensor_guard(adamw)": partial(per_tensor_guard, optax.adamw(1e-2), 8.0),
    "per_tensor_guard(sgd)": partial(per_tensor_guard, optax.sgd(1e-2, momentum=0.9), 8.0),
    "per_tensor_guard(noisy_sgd)": partial(
        per_tensor_guard, optax.noisy_sgd(1e-2, key=jax.random.key(0)), 8.0, block_axes=layers
    ),
    "per_tensor_guard(muon)": partial(per_tensor_guard, muon(1e-2, layers_only), 8.0),
    "dynamic_loss_scale(muon)": partial(dynamic_loss_scale, muon(1e-2, layers_only), 8.0),
    "dynamic_loss_scale(stable_adamw)": partial(dynamic_loss_scale, stable_adamw(1e-2), 8.0),
    "dynamic_loss_scale(adamw)": partial(dynamic_loss_scale, optax.adamw(1e-2), 8.0),
    "dynamic_loss_scale(sgd)": partial(dynamic_loss_scale, optax.sgd(1e-2), 8.0),
}


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
    return OPTIMIZERS[name]()


@functools.cache
def after_one_step(optimizer):
    params = params_of()
    return jax.jit(optimizer.update)(params, optimizer.init(params), params)[1]


def trains(optimizer, params=None, steps=2, moves=True):
    """Asserts that compiled steps keep all types, give finite updates, and move the parameters."""
    params = params_of() if params is None else params
    state = start = optimizer.init(params)
    update = jax.jit(lambda *args: optimizer.update(*args))  # a new function, with its own cache
    for _ in range(steps):
        updates, state = update(params, state, params)
    assert types(updates) == types(params)
    assert types(state) == types(start)
    assert update._cache_size() == 1
    assert all(np.isfinite(np.asarray(u, np.float32)).all() for u in jax.tree.leaves(updates))
    assert not moves or any(np.asarray(u, np.float32).any() for u in jax.tree.leaves(updates))


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
    trained = state.apply_gradients(grads=params_of())
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
        lambda a, b: np.testing.assert_allclose(plain(a[1]), plain(b), rtol=1e-5),
        together,
        alone,
    )


def sixteen_bits(optimizer):
    for dtype in ("bfloat16", "float16"):
        trains(optimizer, params_of(dtype))


def sharded(optimizer, kind):
    """The state and the updates are sharded like the parameters."""
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
        optax.tree.map_params(optimizer, like, after, params, is_leaf=is_masked)


def sharded_automatically(optimizer):
    sharded(optimizer, AxisType.Auto)


def sharded_explicitly(optimizer):
    sharded(optimizer, AxisType.Explicit)


def nnx_optimizer(optimizer):
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    holder = nnx.Optimizer(model, optimizer, wrt=nnx.Param)

    @nnx.jit
    def step(model, holder):
        grads = nnx.grad(lambda model: jnp.sum(model(jnp.ones((1, 3))) ** 2))(model)
        holder.update(model, grads)

    before = model.kernel[...]
    step(model, holder)
    assert np.any(model.kernel[...] != before)


# -------------------------------------------------------------------------------------
# Wrappers
# -------------------------------------------------------------------------------------


def wrapped(wrap, moves=True):
    """Returns a check that an optimizer wrapped by `wrap` trains and supports map_params."""

    def check(optimizer):
        outer = wrap(optimizer)
        trains(outer, moves=moves)  # mechanize's first updates round to 0
        maps(outer)

    return check


def maps(optimizer):
    state = jax.eval_shape(optimizer.init, params_of())
    mapped = optax.tree.map_params(optimizer, lambda x: x, state, is_leaf=is_masked)
    assert jax.tree.structure(mapped) == jax.tree.structure(state)


def injected(make):
    """All numeric hyperparameters are traced, and `init` can be compiled."""
    static = {"inner", "across", "mask", "mu_dtype", "block_axes", "decoupled_lr", "matrices"}
    static &= set(inspect.signature(make.func).parameters)
    inject = optax.inject_hyperparams(make.func, static_args=static)
    outer = inject(*make.args, **make.keywords)
    start = jax.jit(outer.init)(params_of())
    assert types(start) == types(outer.init(params_of()))
    trains(outer)


def lookahead(optimizer):
    outer = optax.lookahead(optimizer, sync_period=2, slow_step_size=0.5)
    params = optax.LookaheadParams.init_synced(params_of())
    state = outer.init(params)
    updates, after = jax.jit(outer.update)(params.fast, state, params)
    assert types(after) == types(state) and types(updates) == types(params)


def skip_not_finite(optimizer):
    outer = optax.MultiSteps(optimizer, 2, should_skip_update_fn=optax.skip_not_finite)
    trains(outer.gradient_transformation(), steps=4)


def conditional(optimizer):
    for outer in (
        optax.conditionally_transform(optimizer, lambda step, **_: step < 5),
        optax.conditionally_mask(optimizer, lambda step, **_: step < 5),
    ):
        trains(outer)
        trains(outer, params_of("bfloat16"))


def if_finite(optimizer):
    outer = optax.apply_if_finite(optimizer, 3)
    trains(outer)
    trains(outer, params_of("float16"))


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
    "`optax.MultiSteps`": wrapped(lambda o: optax.MultiSteps(o, 1).gradient_transformation()),
    "`optax.skip_not_finite`": skip_not_finite,
    "`optax.apply_if_finite`": if_finite,
    "`optax.conditionally_transform`, `conditionally_mask`": conditional,
    "`optax.flatten`": lambda o: trains(optax.flatten(o)),
    "`optax.tree.map_params` of `optax.flatten`": lambda o: maps(optax.flatten(o)),
    "`optax.inject_hyperparams`": injected,
    "`optax.lookahead`": lookahead,
    "`optax.contrib.sam`": wrapped(
        lambda o: optax.contrib.sam(
            o, optax.chain(optax.contrib.normalize(), optax.sgd(0.05)), sync_period=2
        )
    ),
    "`optax.contrib.schedule_free`": wrapped(lambda o: optax.contrib.schedule_free(o, 1e-2)),
    "`optax.contrib.mechanize`": wrapped(optax.contrib.mechanize, moves=False),
    "`optax.contrib.split_real_and_imaginary`": wrapped(optax.contrib.split_real_and_imaginary),
}

NO_KEYS = (
    "JAX array with PRNGKey dtype cannot be converted to a NumPy array",
    "The state of `noisy_sgd` holds a random key. Flax's bytes format cannot store JAX's random keys",
)

# {check: (part of the optimizers' names, error, reason as on the page)}
KNOWN = {
    "`flax.serialization` bytes": ("noisy_sgd", *NO_KEYS),
    "`flax.training.train_state.TrainState`": ("noisy_sgd", *NO_KEYS),
    "`optax.tree.map_params` of `optax.flatten`": (
        "",
        "Need at least one array to concatenate",
        "`optax.tree.map_params` calls `init` with a placeholder for the parameters, which holds no"
        " array. `optax.flatten` then has nothing to concatenate. optax's own optimizers fail too",
    ),
    "`optax.contrib.sam`": (
        "noisy_sgd",
        "multiply does not accept dtypes bool, key",
        "`optax.contrib.sam` multiplies every leaf of the optimizer's state. A random key, as in the"
        " state of `noisy_sgd`, cannot be multiplied",
    ),
}


def known(check: str, name: str) -> tuple[str, str] | None:
    """Returns (error, reason) of a combination that fails, else None."""
    part, error, reason = KNOWN.get(check, ("", None, None))
    return (error, reason) if error and part in name else None


def label(name: str) -> str:
    """Returns the name of an optimizer for the page: "a, b" becomes "`a` with b"."""
    code, *options = name.split(", ")
    return " with ".join([f"`{code}`", *options])


def table() -> str:
    """Returns the page's table in Markdown; optimizers with equal entries share a column."""
    reasons = list(dict.fromkeys(reason for _, _, reason in KNOWN.values()))

    def cell(check, name):
        found = known(check, name)
        return f"no ({reasons.index(found[1]) + 1})" if found else "yes"

    columns: dict[tuple[str, ...], list[str]] = {}
    for name in OPTIMIZERS:
        entries = tuple(cell(check, name) for check in CHECKS)
        columns.setdefault(entries, []).append(label(name))
    head = ["transformation or wrapper", *(", ".join(names) for names in columns.values())]
    rows = [list(row) for row in zip(CHECKS, *columns, strict=True)]
    lines = [f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows]]
    return "\n".join([*lines, "", *(f"{i}. {reason}." for i, reason in enumerate(reasons, 1))])


@jax.numpy_dtype_promotion("standard")  # optax's optimizers need it
@pytest.mark.parametrize("check", CHECKS, ids=lambda name: name.replace("`", ""))
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.filterwarnings("ignore:Sharding info not provided")  # Orbax warns on one device
def test_composes(check, name):
    make, found = OPTIMIZERS[name], known(check, name)
    expected = pytest.raises(Exception, match=re.escape(found[0])) if found else nullcontext()
    with expected:
        CHECKS[check](make if check == "`optax.inject_hyperparams`" else optimizer_of(name))


BEGIN, END = "<!-- optimizers: begin -->", "<!-- optimizers: end -->"


def with_table(page: str) -> str:
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


def test_the_page_has_this_table():
    page = PAGE.read_text()
    assert page == with_table(page), "run: python tests/test_optimizer_invariants.py"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
