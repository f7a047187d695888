"""swjax.optax.eight_bit_moments: rounding, parity, resuming, sharding, bad input."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import thinning
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from swjax.optax import (
    adamw_rms_by_path,
    decoded_moments,
    eight_bit_moments,
    from_adamw_state,
    muon,
    per_tensor_guard,
    rms_by_path,
    stable_adamw,
)
from swjax.optax.codes import decode, encode

run = jax.jit(lambda x, seed: decode(encode(x, seed)))


def test_rounding_is_within_one_ratio_and_unbiased():
    """Against float64, over ten decades, with a last block that is not whole, zeros and signs."""
    rng = np.random.default_rng(0)
    x = rng.choice([-1, 1], (40, 200)) * 10.0 ** rng.uniform(-10, 0, (40, 200))
    x[:, ::7] = 0
    x[3] = 0  # a whole block
    x = x.astype("float32")
    results = np.stack([np.asarray(run(x, seed), np.float64) for seed in range(400)])
    assert (np.sign(results) == np.sign(x)).all()
    ratio = np.abs(results[:, x != 0] / x[x != 0])
    # Ten decades in 126 steps; a step is linear between powers of two, so ratios differ by up to a half.
    largest = 1 + 10 * np.log2(10) / 126
    assert 1 / largest < ratio.min() and ratio.max() < largest
    assert np.abs(ratio.mean(0) - 1).max() < 5 * 0.09 / 20  # of 400 numbers in [0.9, 1.1]
    assert abs(ratio.mean() - 1) < 5e-4


def test_blocks_that_are_not_finite_are_nan_and_small_elements_stay():
    x = np.full((3, 256), 1e-6, "float32")
    x[0, 3], x[1, 200], x[2, 0] = np.inf, np.nan, 1e20
    got = np.asarray(run(x, 0))
    assert np.isnan(got).tolist() == [[i == 0] * 128 + [i == 1] * 128 for i in range(3)]
    assert got[2, 0] == pytest.approx(1e20, rel=1e-5)
    assert (got[2, 1:128] >= 1e-6).all()  # 2^-40 of the largest
    np.testing.assert_allclose(got[2, 128:], 1e-6, rtol=1e-5)


PARAMS = {"w": (96, 128), "v": (128, 64), "b": (128,)}
OPTIMIZERS = {
    "stable_adamw": partial(stable_adamw, 3e-3, b2=0.99, weight_decay=0.0),
    "muon": partial(muon, 3e-3, {"w": True, "v": False, "b": False}, weight_decay=0.0),
    "adamw": partial(optax.adamw, 3e-3),
}


def problem():
    """A network of two layers that fits another one: parameters, loss and batches."""
    rng = np.random.default_rng(0)
    new = lambda: {
        n: jnp.asarray(rng.normal(size=s) / s[0] ** 0.5, "float32") for n, s in PARAMS.items()
    }
    apply = lambda p, x: jnp.tanh(x @ p["w"] + p["b"][None]) @ p["v"]
    params, target = new(), new()
    loss = lambda p, x: jnp.mean((apply(p, x) - apply(target, x)) ** 2)
    return params, loss, jnp.asarray(rng.normal(size=(200, 64, 96)), "float32")


def train(optimizer, params, loss, batches, state=None):
    def step(carry, x):
        params, state = carry
        value, grads = jax.value_and_grad(loss)(params, x)
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    with jax.numpy_dtype_promotion("standard"):  # optax.adamw mixes dtypes
        state = optimizer.init(params) if state is None else state
        return jax.jit(lambda *carry: jax.lax.scan(step, carry, batches))(params, state)


@pytest.mark.parametrize("name", thinning.kept(OPTIMIZERS, ["stable_adamw"]))
def test_training_is_that_of_float32_and_resumes_with_the_same_bits(name):
    params, loss, batches = problem()
    (_, state), losses = train(OPTIMIZERS[name](), params, loss, batches)
    optimizer = eight_bit_moments(OPTIMIZERS[name]())
    (end, small), in_8_bits = train(optimizer, params, loss, batches)
    want = float(losses[-20:].mean())
    assert want < 0.2 * float(losses[0])
    assert float(in_8_bits[-20:].mean()) == pytest.approx(want, rel=0.05)
    size = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))
    assert size(small) < 0.33 * size(state)
    half, _ = train(optimizer, params, loss, batches[:100])
    (again, after), _ = train(optimizer, half[0], loss, batches[100:], half[1])
    jax.tree.map(np.testing.assert_array_equal, (again, after), (end, small))
    if name != "adamw":
        assert rms_by_path(small)


def test_small_arrays_and_other_fields_stay():
    """And optax finds the arrays that belong to parameters."""
    optimizer = eight_bit_moments(stable_adamw(1e-3), fields=("mu",))
    state = optimizer.init({n: jnp.ones(s) for n, s in PARAMS.items()})
    jax.tree.map(
        np.testing.assert_array_equal, optax.tree.map_params(optimizer, lambda x: x, state), state
    )
    mu, nu = state.inner.mu, state.inner.nu
    assert mu["w"].dtype == jnp.int8 and state.block_ranges.shape == (2, 96 + 128)
    assert mu["b"].dtype == nu["w"].dtype == jnp.float32


@pytest.mark.parametrize(
    "settings, wrap",
    [
        ({}, lambda optimizer: optimizer),
        ({"block_axes": {"w": 0, "v": None, "b": None}}, partial(per_tensor_guard, scale=1.0)),
        (
            {"block_axes": {"w": 2, "v": (), "b": None}},
            partial(optax.apply_if_finite, max_consecutive_errors=1),
        ),
    ],
    ids=["plain", "guard", "columns"],
)
def test_stable_adamw_updates_as_from_float32_moments(settings, wrap):
    """From the decoded state: updates and RMS, and moments up to their rounding. NaN and Inf are not lost."""
    shapes = {"w": (3, 32, 200), "v": (96, 128), "b": (128,)}
    rng = np.random.default_rng(0)
    draw = lambda size: {
        n: jnp.asarray(size * rng.normal(size=s), "float32") for n, s in shapes.items()
    }
    plain = wrap(stable_adamw(1e-2, weight_decay=0.0, **settings))
    optimizer = eight_bit_moments(plain)
    params = draw(1.0)
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for step in range(3):
        grads, before = draw(0.1 * 4**step), state
        updates, state = update(grads, before, params)
    want, plain_state = jax.jit(plain.update)(grads, decoded_moments(before).inner, params)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-9), updates, want)
    after = decoded_moments(state).inner
    for path, rms in rms_by_path(plain_state).items():
        np.testing.assert_allclose(rms_by_path(after)[path], rms, rtol=1e-5)
    # The magnitudes of a block differ by less than 2^25, so neighbours by less than a fifth.
    jax.tree.map(partial(np.testing.assert_allclose, rtol=0.2), after, plain_state)
    updates, _ = update({**grads, "w": grads["w"].at[0, 0, 0].set(jnp.inf)}, state, params)
    if not settings:
        assert jnp.isnan(updates["w"]).all() and jnp.isfinite(updates["v"]).all()


def test_every_sharding_has_the_same_bits():
    params = {"w": jax.random.normal(jax.random.key(0), (64, 512))}
    optimizer = eight_bit_moments(stable_adamw(1e-3))
    update = jax.jit(optimizer.update)
    want = update(params, optimizer.init(params), params)[1]
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(kind,))
        for spec in (PartitionSpec("fsdp", None), PartitionSpec(None, "fsdp")):
            with jax.set_mesh(mesh):
                placed = jax.device_put(params, NamedSharding(mesh, spec))
                got = update(placed, jax.jit(optimizer.init)(placed), placed)[1]
            assert got.inner.nu["w"].sharding.is_equivalent_to(placed["w"].sharding, 2)
            np.testing.assert_array_equal(got.block_ranges, want.block_ranges)
            np.testing.assert_array_equal(got.inner.nu["w"], want.inner.nu["w"])


def test_nnx_and_ensembles():
    model = nnx.Linear(64, 128, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, eight_bit_moments(stable_adamw(1e-2)), wrt=nnx.Param)
    loss = lambda model: jnp.mean((model(jnp.ones((2, 64))) - 1) ** 2)

    @nnx.jit
    def step(model, optimizer):
        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    losses = [float(step(model, optimizer)) for _ in range(20)]
    assert losses[-1] < 0.1 * losses[0]
    one = {"w": jax.random.normal(jax.random.key(0), (64, 128))}
    two = jax.tree.map(lambda x: jnp.stack([x, x]), one)
    optimizer = eight_bit_moments(muon(1e-2, {"w": True}))
    first = jax.jit(lambda params: optimizer.update(params, optimizer.init(params), params)[0])
    want, got = first(one), jax.vmap(first)(two)
    np.testing.assert_allclose(got["w"][1], want["w"], atol=1e-6)
    with pytest.raises(ValueError, match=r"single step count, got \(2,\): decode the states"):
        decoded_moments(jax.vmap(optimizer.init)(two))


@jax.numpy_dtype_promotion("standard")  # optax's Adam raises a float to an int32 power
def test_functions_that_read_adamw_decode_its_moments():
    params = {"w": jax.random.normal(jax.random.key(0), (64, 128))}
    adamw, ours = optax.adamw(1e-2), stable_adamw(1e-2).init(params)
    _, want = adamw.update(params, adamw.init(params), params)
    _, state = eight_bit_moments(adamw).update(
        params, eight_bit_moments(adamw).init(params), params
    )
    np.testing.assert_allclose(adamw_rms_by_path(state, params)["w"], 1, atol=0.02)
    got, want = (from_adamw_state(s, ours, b1=0.9, b2=0.999).mu["w"] for s in (state, want))
    np.testing.assert_allclose(got, want, rtol=0.2)
    encoded = eight_bit_moments(stable_adamw(1e-2)).init(params)
    with pytest.raises(ValueError, match="opt_state must have float moments: remove eight_bit_mom"):
        from_adamw_state(state, encoded, b1=0.9, b2=0.999)


def test_an_init_outside_of_jit_compiles_few_operations():
    """Each shape took 2.4 s of a CPU, because JAX compiled 190 operations one by one."""
    init = eight_bit_moments(stable_adamw(1e-3)).init
    assert len(jax.make_jaxpr(init)({"w": jnp.ones((64, 128))}).eqns) < 30


def test_moments_in_8_bits_twice_are_one_line():
    inside = optax.chain(eight_bit_moments(stable_adamw(1e-3)))
    with pytest.raises(ValueError, match="wraps already: remove one of the two"):
        eight_bit_moments(inside).init({"w": jnp.ones((64, 128))})


def test_a_guard_inside_is_one_line():
    inside = per_tensor_guard(eight_bit_moments(stable_adamw(1e-3)), 8.0)
    with pytest.raises(ValueError, match="wrap eight_bit_moments around it"):
        inside.init({"w": jnp.ones((64, 128))})


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"fields": "mu"}, r"names of fields, got 'mu': pass a tuple"),
        ({"fields": ("trace",)}, "none of the fields trace in the state .*: name those"),
    ],
)
def test_bad_arguments_are_one_line(arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        eight_bit_moments(stable_adamw(1e-3), **arguments).init({"w": jnp.ones((64, 128))})
    assert "\n" not in str(error.value)
