"""stable_adamw with optax's wrappers, with Flax and under jit."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from swjax.optax import (
    StableAdamWState,
    dynamic_loss_scale,
    eight_bit_moments,
    from_adamw_state,
    per_tensor_guard,
    power_decay,
    rms_by_path,
    scale_by_stable_adam,
    skipped_by_path,
    stable_adamw,
)


def problem(steps=6):
    """Returns parameters, one of them a stack of matrices, and gradients that surge."""
    rng = np.random.default_rng(0)
    shapes = {"blocks": {"w": (2, 4, 3)}, "head": {"w": (4, 2), "b": (2,)}}
    draw = lambda: jax.tree.map(
        lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    params = draw()
    grads = [jax.tree.map(lambda g, t=t: g * 3.0**t, draw()) for t in range(steps)]
    return params, grads


AXES = {"blocks": 0, "head": None}


def train(optimizer, params, grads):
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for g in grads:
        updates, state = update(g, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def assert_close(actual, expected, rtol=1e-6, atol=1e-7):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), actual, expected
    )


def types(tree):
    return jax.tree.map(jax.typeof, tree)


# -------------------------------------------------------------------------------------
# optax's expectations of every optimizer
# -------------------------------------------------------------------------------------


def leaves_of_containers(tree):
    """The leaves that code finds which knows containers but not JAX's registry, as in big_vision."""
    if isinstance(tree, (dict, tuple)):
        children = tree.values() if isinstance(tree, dict) else tree
        return [leaf for child in children for leaf in leaves_of_containers(child)]
    return [tree]


def test_containers_hold_the_leaves_that_jax_finds():
    params, _ = problem()
    inner = stable_adamw(0.1, block_axes=AXES)
    for optimizer in (per_tensor_guard(inner, block_axes=AXES), dynamic_loss_scale(inner)):
        state = optimizer.init(params)
        found = leaves_of_containers(state)
        assert sorted(map(id, found)) == sorted(map(id, jax.tree.leaves(state)))


def test_init_from_shapes_alone():
    shapes = {"x": jax.ShapeDtypeStruct((2, 4), jnp.bfloat16)}
    optimizer = stable_adamw(0.1)
    assert types(optimizer.init(shapes)) == types(
        optimizer.init({"x": jnp.ones((2, 4), "bfloat16")})
    )
    assert types(jax.eval_shape(optimizer.init, shapes)) == types(optimizer.init(shapes))


def test_takes_arguments_meant_for_others():
    optimizer = stable_adamw(0.1)
    params = jnp.ones(3)
    optimizer.update(params, optimizer.init(params), params, value=jnp.float32(1), unknown=2)


def test_a_mask_that_was_called_as_a_schedule_is_refused():
    """optax.inject_hyperparams calls it with the step, and one bool would hold for all parameters."""
    params, grads = problem()
    mask = lambda params: jax.tree.map(lambda p: p.ndim > 1, params)
    injected = optax.inject_hyperparams(stable_adamw)(0.05, mask=mask)
    with pytest.raises(ValueError, match="mask must be a tree of bools .* 'mask' to static_args"):
        injected.update(grads[0], injected.init(params), params)
    one = stable_adamw(0.05, mask=False)  # a tree like a single parameter
    one.update(jnp.ones(3), one.init(jnp.ones(3)), jnp.ones(3))


def test_inject_hyperparams_with_every_number_traced():
    params, grads = problem()
    numbers = {"b1": 0.8, "b2": 0.95, "eps": 1e-5, "weight_decay": 0.1, "clip_threshold": 1.5}
    inject = optax.inject_hyperparams(stable_adamw, static_args=("block_axes", "mask"))
    mask = lambda params: jax.tree.map(lambda p: p.ndim > 1, params)
    static = {"mask": mask, "block_axes": AXES}
    want, want_state = train(stable_adamw(0.05, **numbers, **static), params, grads)
    injected = inject(0.05, **numbers, **static)
    got, state = train(injected, params, grads)
    assert set(state.hyperparams) == {"learning_rate", *numbers}
    assert_close(got, want, rtol=1e-5)
    assert_close(state.inner_state, want_state, rtol=1e-5)

    # a changed hyperparameter changes the update
    update = jax.jit(injected.update)
    before = update(grads[-1], state, params)[0]
    for name, value in state.hyperparams.items():
        changed = state._replace(hyperparams=state.hyperparams | {name: 0.5 * value})
        after = update(grads[-1], changed, params)[0]
        deviation = jax.tree.map(lambda a, b: np.max(np.abs(a - b)), after, before)
        assert max(jax.tree.leaves(deviation)) > 0, name

    rate = optax.linear_schedule(0.1, 0.0, 4)
    want, _ = train(stable_adamw(rate, b2=0.9), params, grads)
    scheduled = optax.inject_hyperparams(stable_adamw)(rate, b2=optax.constant_schedule(0.9))
    assert_close(train(scheduled, params, grads)[0], want, rtol=1e-5)


def test_inject_hyperparams_refuses_a_function_as_b2():
    """optax calls it with the count from 0, and would pass c2 as if it were b2."""
    optimizer = optax.inject_hyperparams(stable_adamw)(0.1, b2=power_decay(0.5))
    with pytest.raises(ValueError, match="a float, counted from .* int32: .* 'b2' to static_args"):
        jax.eval_shape(optimizer.init, jnp.ones(2))
    inject = optax.inject_hyperparams(stable_adamw, static_args=("b2",))
    assert "b2" not in inject(0.1, b2=power_decay(0.5)).init(jnp.ones(2)).hyperparams


def test_inject_hyperparams_refuses_what_rounds_out_of_range():
    """inject_hyperparams casts to the parameters' dtype, and 0.999 rounds to 1 in bfloat16."""
    params = jnp.ones(2, jnp.bfloat16)
    with pytest.raises(ValueError, match="b2 must be in"):
        optax.inject_hyperparams(stable_adamw)(0.1, b2=0.999).init(params)
    inject = optax.inject_hyperparams(stable_adamw, hyperparam_dtype=jnp.float32)
    updates, _ = train(inject(0.1, b2=0.999), params, [params])
    assert updates.dtype == jnp.bfloat16


def test_a_chain_of_parts():
    """The chain of big_vision and Scenic, which ends with a schedule and the sign."""
    params, grads = problem()
    decays = jax.tree.map(lambda p: p.ndim > 1, params)
    trains = {"blocks": {"w": True}, "head": {"w": True, "b": False}}
    schedule = optax.linear_schedule(1.0, 0.2, 5)
    axes = lambda params: jax.tree_util.tree_map_with_path(
        lambda path, _: 0 if "blocks" in jax.tree_util.keystr(path) else None, params
    )
    options = {"b1": 0.8, "b2": 0.95, "eps": 1e-5, "clip_threshold": 0.9, "block_axes": axes}
    chain = optax.chain(
        optax.masked(scale_by_stable_adam(**options), trains),
        optax.scale(0.05),
        optax.add_decayed_weights(0.01, decays),
        optax.masked(optax.scale_by_schedule(schedule), trains),
        optax.masked(
            optax.set_to_zero(), {"blocks": {"w": False}, "head": {"w": False, "b": True}}
        ),
        optax.scale(-1.0),
    )
    whole = optax.partition(
        {
            True: stable_adamw(
                lambda step: 0.05 * schedule(step), weight_decay=0.2, decoupled_lr=True, **options
            ),
            False: optax.set_to_zero(),
        },
        trains,
    )
    got, state = train(chain, params, grads)
    want, want_state = train(whole, params, grads)
    assert_close(got, want, rtol=1e-5)
    assert_close(rms_by_path(state), rms_by_path(want_state), rtol=1e-5)
    assert rms_by_path(state)["blocks/w"].shape == (2,)


def test_a_mapped_state_keeps_the_names_of_its_values():
    """Also where a compiled function has seen one of both states, of an optimizer or of a guard."""
    params, grads = problem()
    for optimizer, read in (
        (stable_adamw(0.1, block_axes=AXES), rms_by_path),
        (per_tensor_guard(stable_adamw(0.1), block_axes=AXES), skipped_by_path),
    ):
        state = train(optimizer, params, grads)[1]
        want = read(state)
        mapped = optax.tree.map_params(optimizer, lambda x: x, state)
        assert_close(read(mapped), want)
        placed = optax.tree.map_params(
            optimizer, lambda x: x + 1, state, transform_non_params=lambda x: 2 * x
        )
        assert_close(read(placed), jax.tree.map(lambda x: 2 * x, want))
        for first, second in ((mapped, state), (state, mapped)):
            same = jax.jit(lambda state: jax.tree.map(jnp.copy, state))
            assert_close(read(same(first)), want)
            assert_close(read(same(second)), want)
        other = optimizer.init(
            params | {"head": {"w": params["head"]["w"], "c": params["head"]["b"]}}
        )
        assert jax.tree.structure(other) != jax.tree.structure(state)


# -------------------------------------------------------------------------------------
# Flax
# -------------------------------------------------------------------------------------


class Model(nnx.Module):
    def __init__(self, rngs):
        make = nnx.vmap(lambda rngs: nnx.Linear(3, 3, rngs=rngs), in_axes=0)
        self.blocks = make(rngs.split(2))
        self.head = nnx.Linear(3, 2, rngs=rngs)

    def __call__(self, x):
        return self.head(x)


def test_nnx_optimizer():
    """nnx.Optimizer gives the names and numbers of plain trees, eagerly and under nnx.jit."""
    model = Model(nnx.Rngs(0))
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    axes = lambda params: jax.tree_util.tree_map_with_path(
        lambda path, _: 0 if "blocks" in str(path) else None, params
    )
    make = lambda: stable_adamw(0.05, mu_dtype=jnp.bfloat16, block_axes=axes)
    optimizer = nnx.Optimizer(model, make(), wrt=nnx.Param)

    def loss(model, x):
        return jnp.mean(model(x) ** 2) + jnp.sum(model.blocks.kernel[...] ** 3)

    @nnx.jit
    def step(model, optimizer, x):
        grads = nnx.grad(loss)(model, x)
        optimizer.update(model, grads)
        return nnx.to_pure_dict(grads)

    grads = [step(model, optimizer, jnp.full((4, 3), 2.0**t)) for t in range(3)]
    want, state = train(make(), params, grads)
    assert_close(nnx.to_pure_dict(nnx.state(model, nnx.Param)), want, rtol=1e-5)
    rms = rms_by_path(optimizer.opt_state)
    assert rms["blocks/kernel"].shape == (2,)
    assert_close(rms, rms_by_path(state), rtol=1e-5)


def test_rms_by_path_of_a_state_on_the_host():
    params, grads = problem()
    _, state = train(stable_adamw(0.05), params, grads)
    assert_close(rms_by_path(jax.device_get(state)), rms_by_path(state))


# -------------------------------------------------------------------------------------
# From AdamW
# -------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps_before, wrapped", [(0, False), (1, True), (3, False)])
@jax.numpy_dtype_promotion("standard")  # optax's Adam raises a float to an int32 power
def test_training_goes_on_from_an_adamw_state(steps_before, wrapped):
    params, grads = problem()
    hyper = {"b1": 0.8, "b2": 0.95, "eps": 1e-6, "weight_decay": 0.1}
    schedule = optax.linear_schedule(0.1, 0.0, 10)
    wrap = lambda inner: optax.chain(optax.identity(), inner) if wrapped else inner
    adamw = wrap(optax.adamw(schedule, **hyper))
    ours = wrap(stable_adamw(schedule, clip_threshold=math.inf, block_axes=AXES, **hyper))

    params, old = train(adamw, params, grads[:steps_before])
    state = from_adamw_state(old, ours.init(params), b1=0.8, b2=0.95)
    assert types(state) == types(ours.init(params))
    p, q = params, params
    step_adamw, step_ours = jax.jit(adamw.update), jax.jit(ours.update)
    for g in grads[steps_before:]:
        updates, old = step_adamw(g, old, p)
        p = optax.apply_updates(p, updates)
        updates, state = step_ours(g, state, q)
        q = optax.apply_updates(q, updates)
    assert_close(q, p, rtol=1e-5)
    assert rms_by_path(state)["blocks/w"].shape == (2,)


@jax.numpy_dtype_promotion("standard")  # optax's Adam raises a float to an int32 power
def test_the_state_of_an_nnx_optimizer_is_converted():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    grads = nnx.grad(lambda model: jnp.sum(model(jnp.ones((4, 3))) ** 2))(model)
    old = nnx.Optimizer(model, optax.adamw(0.1, b2=0.95), wrt=nnx.Param)
    old.update(model, grads)
    new = nnx.Optimizer(model, stable_adamw(0.1), wrt=nnx.Param)
    new.opt_state = from_adamw_state(old.opt_state, new.opt_state, b1=0.9, b2=0.95)
    new.update(model, grads)
    (count,) = (leaf for leaf in jax.tree.leaves(new.opt_state) if leaf.dtype == jnp.int32)
    assert count == 2


def test_conversion_needs_one_state_of_each_kind():
    params = jnp.ones(2)
    adamw, ours = optax.adamw(0.1).init(params), stable_adamw(0.1).init(params)
    with pytest.raises(ValueError, match="adamw_state must contain one ScaleByAdamState, got 0"):
        from_adamw_state(ours, ours, b1=0.9, b2=0.99)
    with pytest.raises(ValueError, match="opt_state must contain one StableAdamWState, got 2"):
        from_adamw_state(adamw, (ours, ours), b1=0.9, b2=0.99)
    with pytest.raises(ValueError, match=r"b1 must be .*, in \[0, 1\), got 1.0"):
        from_adamw_state(adamw, ours, b1=1.0, b2=0.99)
    other = stable_adamw(0.1).init(jnp.ones((1, 2)))
    with pytest.raises(ValueError, match=r"of the same parameters, .* \(2,\) and \(1, 2\): mask"):
        from_adamw_state(adamw, other, b1=0.9, b2=0.99)
    params = {"w": jnp.ones(2), "b": jnp.ones(3)}
    masked = optax.masked(stable_adamw(0.1), {"w": True, "b": False}).init(params)
    with pytest.raises(ValueError, match=r"got 'b' of the shapes \(3,\) and None: mask"):
        from_adamw_state(optax.adamw(0.1).init(params), masked, b1=0.9, b2=0.99)
    assert isinstance(from_adamw_state(adamw, ours, b1=0.9, b2=0.99), StableAdamWState)


@pytest.mark.gpu
@pytest.mark.parametrize("wrap, limit", [(lambda x: x, 36.5), (eight_bit_moments, 30)])
def test_bytes_that_a_step_moves_for_a_parameter(wrap, limit):
    params = {"blocks": jnp.ones((4, 1024, 1024)), "matrix": jnp.ones((1024, 4096))}
    optimizer = wrap(stable_adamw(0.1, block_axes={"blocks": 0, "matrix": None}))

    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(params, optimizer.init(params), params)
    cost = lowered.compile().cost_analysis()
    assert cost["bytes accessed"] / sum(p.size for p in params.values()) < limit
