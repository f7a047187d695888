"""Loss scaling: after an overflow, only the tensor concerned or the whole step is skipped."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from test_stable_adamw_optax import AXES, assert_close, problem, train

from swjax.optax import (
    adamw_rms_by_path,
    dynamic_loss_scale,
    eight_bit_moments,
    from_adamw_state,
    loss_scale,
    muon,
    path_name,
    per_tensor_guard,
    power_decay,
    rms_by_path,
    skipped_by_path,
    stable_adamw,
    unscale,
)

SCALE = 256.0
# {step: the gradient element that is made infinite}: the head once, the second block twice.
SPOILED = {0: ("head", "w", (0, 0)), 2: ("blocks", "w", (1, 2, 1)), 3: ("blocks", "w", (1, 0, 0))}


def schedule(count):
    return 0.1 / (1.0 + jnp.asarray(count, jnp.float32))


OPTIMIZERS = {
    "stable_adamw": lambda: stable_adamw(schedule, weight_decay=0.1),
    "adamw": lambda: optax.adamw(schedule, weight_decay=0.1),
    "sgd": lambda: optax.sgd(schedule, momentum=0.9),
}


def scaled_problem(steps=6):
    params, grads = problem(steps=steps)
    return params, [jax.tree.map(lambda g: SCALE * g, each) for each in grads]


def spoil(grads, bad=(jnp.inf, jnp.nan)):
    for t, (part, name, place) in SPOILED.items():
        part = grads[t][part]
        part[name] = part[name].at[place].set(bad[t % 2])
    return grads


run = jax.numpy_dtype_promotion("standard")(train)  # optax's own optimizers need it
close = partial(assert_close, rtol=2e-6)


def restored(optimizer, params, grads):
    """Runs `optimizer` on gradients with zeros for bad blocks, and restores these blocks by hand."""
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for t, g in enumerate(grads):
        bad = {"head/w": ...} if t == 0 else {"blocks/w": 1} if t in (2, 3) else {}

        def restore(path, x, old, bad=bad):
            for name, block in bad.items():
                x = x.at[block].set(old[block]) if path_name(path).endswith(name) else x
            return x

        restored = partial(jax.tree_util.tree_map_with_path, restore)
        zeros = jax.tree.map(jnp.zeros_like, g)
        with jax.numpy_dtype_promotion("standard"):
            clean = jax.tree.map(lambda g: g / SCALE, restored(g, zeros))
            updates, new = update(clean, state, params)
            params = restored(optax.apply_updates(params, updates), params)
        state = restored(new, state)
    return params, state


OTHERS = {
    "muon": lambda: muon(schedule, {"blocks": True, "head": False}, weight_decay=0.1),
    "clipped": lambda: optax.chain(
        optax.clip_by_global_norm(0.5), stable_adamw(schedule, block_axes=AXES)
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS | OTHERS)
def test_only_what_overflows_sits_out(name):
    """Its parameters and moments stay; all others are updated, with zeros for what is bad."""
    params, grads = scaled_problem()
    optimizer = (OPTIMIZERS | OTHERS)[name]()
    guarded = per_tensor_guard(optimizer, SCALE, block_axes=AXES)
    after, state = run(guarded, params, spoil([jax.tree.map(jnp.copy, g) for g in grads]))
    assert {path: count.tolist() for path, count in skipped_by_path(state).items()} == {
        "blocks/w": [0, 2], "head/b": 0, "head/w": 1,
    }  # fmt: skip
    want, want_state = restored(optimizer, params, grads)
    close(after, want)
    close(state.inner, want_state)
    assert float(jnp.max(jnp.abs(after["head"]["w"] - params["head"]["w"]))) > 0.01


def test_what_tensors_share_waits_while_all_sit_out():
    params = {"a": jnp.ones(2), "b": jnp.ones(3)}
    guarded = per_tensor_guard(stable_adamw(0.1))
    bad = jax.tree.map(lambda p: p * jnp.nan, params)
    _, state = run(guarded, params, [bad, params, bad | {"a": params["a"]}])
    assert state.inner.count == 2
    assert {name: int(n) for name, n in skipped_by_path(state).items()} == {"a": 1, "b": 2}


@pytest.mark.parametrize("guard", [per_tensor_guard, dynamic_loss_scale])
def test_integer_gradients_are_refused_in_one_line(guard):
    params = {"count": jnp.array([1, 2])}
    optimizer = guard(optax.sgd(0.1))
    with pytest.raises(ValueError, match="must be real or complex, got int32: cast it"):
        optimizer.update(params, optimizer.init(params), params)


def test_rms_has_one_value_for_each_block():
    params, grads = scaled_problem()
    plain = stable_adamw(schedule, weight_decay=0.1, block_axes=AXES)
    guarded = per_tensor_guard(plain, SCALE, block_axes=AXES)
    rms = rms_by_path(run(guarded, params, grads)[1])
    close(rms, rms_by_path(run(plain, params, [unscale(g, SCALE) for g in grads])[1]))
    assert rms["blocks/w"].shape == (2,) and rms["head/w"].shape == ()


@pytest.mark.parametrize("axis", [1, (0, 2)])
def test_blocks_lie_along_any_axes(axis):
    params, grads = scaled_problem()
    params, grads = params["blocks"], [g["blocks"] for g in grads]
    grads[2]["w"] = grads[2]["w"].at[1, 3, 2].set(jnp.nan)
    after, state = run(per_tensor_guard(optax.sgd(1.0), SCALE, block_axes=axis), params, grads)
    skipped = skipped_by_path(state)["w"]
    where = {1: (3,), (0, 2): (1, 2)}[axis]
    assert skipped[where] == 1 and skipped.sum() == 1
    block = {1: np.s_[:, 3], (0, 2): np.s_[1, :, 2]}[axis]
    expected = params["w"] - sum(unscale(g, SCALE)["w"] for g in grads)
    others = sum(g["w"][block] / SCALE for t, g in enumerate(grads) if t != 2)
    expected = expected.at[block].set(params["w"][block] - others)
    np.testing.assert_allclose(after["w"], expected, rtol=1e-5, atol=1e-5)


def test_the_guard_works_in_nnx():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, per_tensor_guard(stable_adamw(0.1), SCALE), wrt=nnx.Param)
    before = jax.tree.map(jnp.copy, nnx.state(model))

    @nnx.jit
    def step(model, optimizer, x):
        scale = loss_scale(optimizer.opt_state)
        grads = nnx.grad(lambda model: jnp.mean(model(x) ** 2) * scale)(model)
        grads["kernel"] = jax.tree.map(lambda g: g.at[0, 0].set(jnp.nan), grads["kernel"])
        optimizer.update(model, grads)

    step(model, optimizer, jnp.ones((4, 3)))
    after = nnx.state(model)
    np.testing.assert_array_equal(after["kernel"][...], before["kernel"][...])
    assert jnp.all(after["bias"][...] != before["bias"][...])


def test_dynamic_scaling_skips_all_and_is_the_inner_optimizer_otherwise():
    params, grads = scaled_problem()
    optimizer = OPTIMIZERS["stable_adamw"]()
    scaled = dynamic_loss_scale(optimizer, SCALE, growth_steps=100)
    after, state = run(scaled, params, grads)
    close(after, run(optimizer, params, [unscale(g, SCALE) for g in grads])[0])
    assert float(loss_scale(state)) == SCALE and int(state.skipped) == 0
    after, state = run(scaled, params, spoil(grads)[:1])
    jax.tree.map(np.testing.assert_array_equal, after, params)
    assert int(state.inner.count) == 0
    assert float(loss_scale(state)) == SCALE / 2 and int(state.skipped) == 1


def test_dynamic_scaling_is_what_brings_a_small_gradient_back():
    """The scale grows until the gradient is no longer 0 in float16, and stays below overflow."""
    optimizer = dynamic_loss_scale(optax.sgd(1.0), 1.0, growth_steps=1)
    params = {"w": jnp.zeros(())}
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    scales, changes = [], []
    for _ in range(60):
        scales.append(float(loss_scale(state)))
        g = (jnp.float32(1e-9) * loss_scale(state)).astype(jnp.float16)
        updates, state = update({"w": g}, state, params)
        changes.append(-float(updates["w"]))
    assert changes[0] == 0 and changes[20] == pytest.approx(1e-9, rel=1e-2)
    largest = max(scales)
    assert 65504 / 2 < 1e-9 * largest / 2 <= 65504 < 1e-9 * largest


def nested(guard):
    return guard(per_tensor_guard(optax.sgd(1.0)), 8.0).init({"w": jnp.ones(2)})


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: per_tensor_guard(optax.sgd(1.0), 0.0), "scale must be a number .*, got 0.0"),
        (lambda: per_tensor_guard(optax.sgd(1.0), jnp.inf), "finite in float32, got inf"),
        (lambda: dynamic_loss_scale(optax.sgd(1.0), 0.5), "of at least 1 .*, got 0.5"),
        (lambda: dynamic_loss_scale(optax.sgd(1.0), 1e39), "finite in float32, got 1e.39"),
        (lambda: per_tensor_guard(optax.sgd(1.0), np.ones(2)), "scale must be .*, got array"),
        (lambda: per_tensor_guard(optax.sgd(1.0), "8"), "scale must be .*, got '8'"),
        (lambda: dynamic_loss_scale(optax.sgd(1.0), factor=1.0), "factor must be above 1 .* 1.0"),
        (lambda: dynamic_loss_scale(optax.sgd(1.0), factor=1 + 1e-9), "in float32, got 1.00"),
        (lambda: dynamic_loss_scale(optax.sgd(1.0), factor=jnp.inf), "in float32, got inf"),
        (lambda: dynamic_loss_scale(optax.sgd(1.0), growth_steps=0), "growth_steps .* got 0"),
        (lambda: dynamic_loss_scale(optax.sgd(1.0), growth_steps=np.inf), "growth_steps .* inf"),
        (lambda: dynamic_loss_scale(optax.sgd(1.0), growth_steps=1.5), "whole number .* got 1.5"),
        (lambda: loss_scale(optax.sgd(1.0).init({})), "got 0: wrap the whole optimizer once"),
        (lambda: loss_scale(nested(dynamic_loss_scale)), "got 2: wrap the whole optimizer once"),
        (lambda: skipped_by_path(nested(per_tensor_guard)), "one PerTensorGuardState, got 2"),
        (lambda: power_decay(1.5), "exponent must be in .0, 1., got 1.5"),
    ],
)
def test_mistakes_are_one_line(make, message):
    with pytest.raises(ValueError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("guard", [per_tensor_guard, dynamic_loss_scale])
@pytest.mark.parametrize(
    "grads, message",
    [
        ({"a": None, "b": None}, r"needs a gradient of shape \(2,\) .* 'a', got None"),
        ({"a": jnp.ones((2, 1)), "b": None}, r"of shape \(2,\) .* 'a', got \(2, 1\)"),
        ({"a": jnp.ones(2), "b": jnp.ones(2)}, "a gradient of each .*Expected None, got Array"),
    ],
)
def test_gradients_of_other_parameters_are_refused(guard, grads, message):
    optimizer, params = guard(optax.adam(1.0)), {"a": jnp.ones(2), "b": None}
    with pytest.raises(ValueError, match=message):
        optimizer.update(grads, optimizer.init(params), params)


def test_moments_without_the_block_axes_are_one_line():
    params = {"w": jnp.ones((2, 128, 128))}
    optimizer = per_tensor_guard(optax.adafactor(0.1), block_axes=0)
    with pytest.raises(ValueError, match="must store .* with the block axes .* got a") as error:
        run(optimizer, params, [params])
    assert "\n" not in str(error.value)


@pytest.mark.release
def test_states_on_the_host_are_read_and_updated():
    """As those that flax.serialization.from_bytes restores."""
    params = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}
    optimizer = per_tensor_guard(stable_adamw(0.1))
    _, state = optimizer.update(params, optimizer.init(params), params)
    on_host = jax.device_get(state)
    close(skipped_by_path(on_host), skipped_by_path(state))
    got, want = (optimizer.update(params, each, params)[0] for each in (on_host, state))
    close(got, want)


@pytest.mark.parametrize("guard", [per_tensor_guard, dynamic_loss_scale])
def test_a_program_may_contain_init_and_update_on_an_explicit_mesh(guard):
    optimizer = guard(stable_adamw(0.1))  # its count is created without a mesh

    def two_steps(params):
        def step(carry, _):
            updates, state = optimizer.update(carry[0], carry[1], carry[0])
            return (optax.apply_updates(carry[0], updates), state), None

        return jax.lax.scan(step, (params, optimizer.init(params)), None, length=2)[0][0]

    params = {"w": jnp.ones((4, 2)), "b": jnp.ones(2)}
    want = jax.jit(two_steps)(params)
    mesh = jax.make_mesh((2,), ("x",), (AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        specs = {"w": jax.P("x"), "b": jax.P()}
        put = {
            name: jax.device_put(p, NamedSharding(mesh, specs[name])) for name, p in params.items()
        }
        close(jax.jit(two_steps)(put), want)


@pytest.mark.parametrize("wrap", [per_tensor_guard, dynamic_loss_scale, eight_bit_moments])
def test_a_wrapper_of_no_optimizer_is_refused(wrap):
    with pytest.raises(TypeError, match=r"r must be an optax.GradientTransformation, got 0.001"):
        wrap(1e-3)


def test_unscale_takes_python_numbers():
    assert unscale({"a": 4.0, "b": jnp.inf}, 2.0) == {"a": 2.0, "b": 0.0}


@pytest.mark.parametrize("exponent", [0.45, 0.65])
def test_power_decay_is_the_weight_of_the_old_second_moment(exponent):
    params, grads = scaled_problem(steps=4)
    state = run(stable_adamw(0.1, b2=power_decay(exponent)), params, grads)[1]
    v = 0.0
    for t, g in enumerate(grads, 1):
        keep = 1 - t**-exponent
        v = keep * v + (1 - keep) * np.square(g["head"]["w"])
    np.testing.assert_allclose(state.nu["head"]["w"], v, rtol=1e-5)


@pytest.mark.parametrize("axes", [0, (0, 2)], ids=str)
def test_blocks_are_mapped_along_sharded_axes(axes):
    """On explicit meshes jax.vmap refuses arrays with different shardings."""
    params, grads = {"w": jnp.ones((2, 3, 2))}, {"w": jnp.ones((2, 3, 2)).at[1, 0, 0].set(jnp.nan)}
    guarded = per_tensor_guard(stable_adamw(0.1), block_axes=axes)
    want, want_state = run(guarded, params, [grads])
    mesh = jax.make_mesh((2,), ("x",), (AxisType.Explicit,), devices=jax.devices()[:2])
    for spec in (jax.P("x"), jax.P(None, None, "x")):
        with jax.set_mesh(mesh):
            put = lambda tree, spec=spec: jax.device_put(tree, NamedSharding(mesh, spec))
            after, state = run(guarded, put(params), [put(grads)])
            assert jax.typeof(state.inner.mu["w"]) == jax.typeof(put(params)["w"])
        close(after, want)
        close(skipped_by_path(state), skipped_by_path(want_state))


def test_dynamic_scaling_takes_a_donated_state():
    params = {"w": jnp.ones(3)}
    optimizer = dynamic_loss_scale(stable_adamw(0.1), jnp.float32(8.0))  # must not be donated
    step = jax.jit(optimizer.update, donate_argnums=1)
    for _ in range(2):
        step(params, optimizer.init(params), params)


@pytest.mark.parametrize("guard", [per_tensor_guard, dynamic_loss_scale])
def test_python_scalars_are_parameters(guard):
    params = {"x": 1.0, "y": 2.0}
    optimizer = guard(stable_adamw(0.1), 1.0)
    updates, _ = optimizer.update({"x": 1.0, "y": 1.0}, optimizer.init(params), params)
    assert float(updates["x"]) == pytest.approx(-0.1, rel=1e-2)


def test_a_state_from_adamw_may_be_guarded():
    params = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}
    guarded = per_tensor_guard(stable_adamw(0.1), block_axes={"w": 0, "b": None})
    old = optax.adamw(0.1).init(params)
    state = from_adamw_state(old, guarded.init(params), b1=0.9, b2=0.999)
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, guarded.init(params))
    ensemble = jax.vmap(optax.adamw(0.1).init)(jax.tree.map(lambda p: jnp.stack([p, p]), params))
    with pytest.raises(ValueError, match=r"must have a single step count, got \(2,\)"):
        from_adamw_state(ensemble, guarded.init(params), b1=0.9, b2=0.999)
    with pytest.raises(ValueError, match=r"must have a single step count"):
        adamw_rms_by_path(ensemble, jax.tree.map(lambda p: jnp.stack([p, p]), params))
