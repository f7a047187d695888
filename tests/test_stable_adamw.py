"""stable_adamw, compared with an independent transcription of the paper and with known misreadings of it."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import stable_adamw_oracle as oracle

from swjax.optax import TensorValues, rms_by_path, stable_adamw
from swjax.optax.stable import one_minus_power

SHAPES = {"matrix": (6, 5), "stack": (3, 4, 5), "vector": (7,), "scalar": (), "tiny": (4, 3)}
HYPER = {"b1": 0.9, "b2": 0.99, "eps": 1e-6}
STEPS = 14
MASK = {name: name != "vector" for name in SHAPES}
AXES = {name: 0 if name == "stack" else None for name in SHAPES}


def draw(seed=0, dtype=np.float32):
    """Returns parameters, and gradients that surge at steps 6 and 10, differently by layer and row."""
    rng = np.random.default_rng(seed)

    def normal(shape):
        if np.issubdtype(dtype, np.complexfloating):
            return (rng.normal(size=shape) + 1j * rng.normal(size=shape)).astype(dtype)
        return np.asarray(rng.normal(size=shape), dtype)

    params = {name: normal(shape) for name, shape in SHAPES.items()}
    grads = []
    for t in range(STEPS):
        surge = 8.0 if t >= 10 else 3.0 if t >= 6 else 1.0
        step = {name: normal(shape) * np.asarray(surge, dtype) for name, shape in SHAPES.items()}
        step["matrix"][:2] *= 3.0 if t == 10 else 1.0
        step["stack"][1] /= surge  # this layer of the stack does not surge
        step["tiny"] *= np.asarray(1e-6, dtype)  # as large as eps
        grads.append(step)
    return params, grads


def schedule(count):
    return 0.1 / (1.0 + count.astype(float))


RATES = [0.1 / (1.0 + t) for t in range(STEPS + 1)]


def expect(params, grads, reading="", weight_decay=0.2, threshold=1.0, **hyper):
    decay = {name: weight_decay * MASK[name] for name in params}
    options = {**HYPER, "decay": decay, "threshold": threshold, "stacked": ("stack",), **hyper}
    return oracle.run(params, grads, RATES, reading=reading, **options)


def train(params, grads, **options):
    """Returns the parameters, m, v and RMS at the end."""
    options = {"mask": MASK, "block_axes": AXES, "weight_decay": 0.2} | options
    params, state = run(stable_adamw(schedule, **options), params, grads)
    return params, state.mu, state.nu, rms_by_path(state)


def run(optimizer, params, grads):
    params = jax.tree.map(jnp.asarray, params)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for g in grads:
        updates, state = update(jax.tree.map(jnp.asarray, g), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def error(actual, expected, start):
    """Returns the largest deviation of any tensor, relative to its expected change."""
    deviations = []
    for name, want in expected.items():
        scale = np.max(np.abs(want - start[name]))
        deviations.append(np.max(np.abs(np.asarray(actual[name]) - want)) / scale)
    return max(deviations)


ZERO = dict.fromkeys(SHAPES, 0.0)


@pytest.fixture(scope="module")
def trained():
    params, grads = draw()
    return params, grads, train(params, grads)


@pytest.mark.parametrize(
    "options, dtype",
    [
        ({"b1": 0.8, "b2": 0.95, "eps": 1e-3}, np.float32),
        ({"b1": 0.0, "b2": 0.0}, np.float32),
        ({"clip_threshold": 2.0}, np.float32),
        ({"clip_threshold": math.inf}, np.complex64),
        ({"weight_decay": 0.0}, np.complex64),
        ({}, np.complex64),
    ],
    ids=str,
)
def test_follows_algorithm_2(options, dtype):
    params, grads = draw(dtype=dtype)
    known = {("threshold" if k == "clip_threshold" else k): v for k, v in options.items()}
    want = expect(params, grads, **known)
    p, m, v, rms = train(params, grads, **options)
    assert error(p, want[0], params) < 1e-5
    for actual, expected in zip((m, v, rms), want[1:]):
        assert error(actual, expected, ZERO) < 1e-5


def test_defaults_follow_algorithm_2(trained):
    params, grads, (p, *_) = trained
    assert error(p, expect(params, grads)[0], params) < 1e-5


@pytest.mark.parametrize("reading", oracle.WRONG_READINGS)
def test_differs_from_every_wrong_reading(reading, trained):
    params, grads, (p, *_) = trained
    assert error(p, expect(params, grads, reading)[0], params) > 1e-2


def test_follows_algorithm_2_in_float64():
    with jax.enable_x64(True):
        params, grads = draw(dtype=np.float64)
        want = expect(params, grads)
        p, m, v, rms = train(params, grads)
        assert {x.dtype for x in (p["matrix"], m["matrix"], v["matrix"])} == {jnp.dtype("float64")}
        assert error(p, want[0], params) < 1e-12
        assert error(rms, want[3], ZERO) < 1e-12


def test_rms_stays_below_its_bound():
    """After zero gradients, RMS is at most sqrt(1 / (1 - b2_t)), the bound that validation uses."""
    grads = [jnp.full(8, 1e10 if t == 20 else 0.0) for t in range(1, 21)]
    _, state = run(stable_adamw(1.0, b2=0.95), jnp.ones(8), grads)
    bound = math.sqrt((1 - 0.95**20) / (1 - 0.95))
    np.testing.assert_allclose(rms_by_path(state)[""], bound, rtol=1e-5)


@jax.numpy_dtype_promotion("standard")  # optax's Adam raises a float to an int32 power
def test_chained_optax_parts_never_clip():
    """adam followed by clip_by_block_rms does not clip after a surge, so no chain of these is StableAdamW."""
    params, grads = draw()
    params, grads = params["matrix"], [g["matrix"] for g in grads]
    adam = (optax.scale_by_adam(**HYPER), optax.scale_by_learning_rate(0.01))
    chained, _ = run(optax.chain(adam[0], optax.clip_by_block_rms(2.0), adam[1]), params, grads)
    plain, _ = run(optax.chain(*adam), params, grads)
    ours, _ = run(stable_adamw(0.01, weight_decay=0.0, clip_threshold=2.0, **HYPER), params, grads)
    np.testing.assert_array_equal(chained, plain)
    assert np.max(np.abs(ours - chained)) > 1e-3


@jax.numpy_dtype_promotion("standard")
def test_without_clipping_it_is_adamw():
    params, grads = draw()
    adamw, _ = run(optax.adamw(schedule, weight_decay=0.2, mask=MASK, **HYPER), params, grads)
    ours = train(params, grads, clip_threshold=math.inf)[0]
    assert error(ours, jax.tree.map(np.asarray, adamw), params) < 1e-5


def test_decoupled_lr_decays_at_the_unclipped_rate():
    params, grads = draw()
    p, *_ = train(params, grads, decoupled_lr=True)
    assert error(p, expect(params, grads, "decay at the unclipped rate")[0], params) < 1e-5


@pytest.mark.parametrize("traced", [False, True], ids=["static", "traced"])
@pytest.mark.parametrize("b", [0.0, 0.5, 0.9, 0.9999, 0.999999])
def test_weight_of_a_new_gradient_is_accurate(b, traced):
    """(1 - b) / (1 - b^t) is accurate, although 1 - b**t in float32 can lose all digits."""
    b = float(np.float32(b)) if traced else b
    given = jnp.float32(b) if traced else b
    for t in (1, 2, 17, 1000, 10**6, 2**31 - 1):
        want = 1 - b * (1 - b ** (t - 1)) / (1 - b**t)
        got = one_minus_power(given, 1) / one_minus_power(given, t)
        np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize(
    "axes, shape",
    [(0, (2,)), (-1, (3,)), ((0, 2), (2, 3)), ((-1, 0), (2, 3)), ((), ()), (None, ())],
    ids=str,
)
def test_block_axes_in_every_form(axes, shape):
    """Block axes may be a tree, a prefix of one, a single value or a function."""
    params = {"x": {"y": jnp.ones((2, 4, 3)), "z": None}}
    for form in ({"x": axes}, {"x": {"y": axes, "z": None}}, axes, lambda params: {"x": axes}):
        state = stable_adamw(0.1, block_axes=form).init(params)
        assert rms_by_path(state)["x/y"].shape == shape


def test_each_block_is_a_tensor_of_its_own():
    rng = np.random.default_rng(0)
    grads = (
        rng.normal(size=(5, 2, 4, 3)).astype(np.float32) * 4.0 ** np.arange(5)[:, None, None, None]
    )
    grads[:, 1] *= np.linspace(1, 3, 5, dtype=np.float32)[:, None, None]
    grads = grads.astype(np.float32)
    p, state = run(stable_adamw(0.1, block_axes=(2, 0)), np.ones((2, 4, 3), np.float32), grads)
    alone = [{str((i, j)): g[i, :, j] for i, j in np.ndindex(2, 3)} for g in grads]
    q, alone_state = run(stable_adamw(0.1), dict.fromkeys(alone[0], np.ones(4, np.float32)), alone)
    for i, j in np.ndindex(2, 3):
        np.testing.assert_allclose(p[i, :, j], q[str((i, j))], rtol=1e-6)
        rms = rms_by_path(alone_state)[str((i, j))]
        np.testing.assert_allclose(rms_by_path(state)[""][i, j], rms, rtol=1e-6)


def test_mask_is_a_tree_a_prefix_or_a_function():
    params = {"a": {"w": jnp.ones(2), "b": jnp.ones(2)}, "c": jnp.ones(2)}
    grads = jax.tree.map(jnp.zeros_like, params)
    for mask in (
        {"a": {"w": True, "b": True}, "c": False},
        {"a": True, "c": False},
        lambda params: {"a": jax.tree.map(lambda x: x.ndim > 0, params["a"]), "c": False},
    ):
        optimizer = stable_adamw(0.5, weight_decay=0.1, mask=mask)
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
        np.testing.assert_allclose(updates["a"]["w"], -0.05)
        np.testing.assert_allclose(updates["a"]["b"], -0.05)
        np.testing.assert_array_equal(updates["c"], 0.0)


@pytest.mark.parametrize(
    "dtype, mu_dtype", [("bfloat16", None), ("float16", None), ("float16", "bfloat16")]
)
def test_half_precision_parameters(dtype, mu_dtype):
    """Arithmetic and v are float32, updates have the parameter's dtype, m has mu_dtype.

    By default m has the parameter's dtype, except for float16.
    """
    params, grads = draw()
    half = lambda tree: {k: jnp.asarray(tree[k], dtype) for k in ("matrix", "stack", "vector")}
    p, g = half(params), half(grads[0])
    optimizer = stable_adamw(0.1, mu_dtype=mu_dtype, weight_decay=0.0)
    updates, state = jax.jit(optimizer.update)(g, optimizer.init(p), p)
    assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype(dtype)}
    assert {x.dtype for x in jax.tree.leaves(state.mu)} == {
        jnp.dtype(mu_dtype or {"float16": "float32"}.get(dtype, dtype))
    }
    assert {x.dtype for x in jax.tree.leaves(state.nu)} == {jnp.dtype("float32")}
    exact = np.square(np.asarray(g["matrix"], np.float64))
    np.testing.assert_allclose(state.nu["matrix"], exact, rtol=1e-6)  # float16 has 3 digits
    signs = -0.1 * np.sign(np.asarray(g["matrix"], np.float32))
    np.testing.assert_allclose(np.asarray(updates["matrix"], np.float32), signs, rtol=1e-2)


def test_float32_gradients_of_bfloat16_parameters():
    p = {"w": jnp.ones(3, jnp.bfloat16)}
    optimizer = stable_adamw(0.1)
    updates, state = optimizer.update({"w": jnp.ones(3)}, optimizer.init(p), p)
    assert updates["w"].dtype == jnp.bfloat16 and state.nu["w"].dtype == jnp.float32


def test_complex_moments():
    p = {"c": jnp.ones(2, jnp.complex64), "r": jnp.ones(2)}
    state = stable_adamw(0.1, mu_dtype=jnp.bfloat16).init(p)
    assert (state.mu["c"].dtype, state.mu["r"].dtype) == (jnp.complex64, jnp.bfloat16)
    assert state.nu["c"].dtype == jnp.float32


def test_unusual_leaves():
    """None, empty and 0-d leaves, an empty stack and a zero gradient do not give NaN."""
    p = {
        "none": None,
        "empty": jnp.zeros((0, 3)),
        "blocks": jnp.ones((2, 0)),
        "scalar": jnp.ones(()),
        "still": jnp.ones((2, 3)),
        "nested": {"none": None, "list": [jnp.ones(2), None]},
    }
    g = jax.tree.map(jnp.ones_like, p) | {"still": jnp.zeros((2, 3))}
    optimizer = stable_adamw(0.1, weight_decay=0.0, block_axes={**dict.fromkeys(p), "blocks": 0})
    updates, state = jax.jit(optimizer.update)(g, optimizer.init(p), p)
    assert jax.tree.structure(updates) == jax.tree.structure(p)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((updates, state)))
    np.testing.assert_array_equal(updates["still"], 0.0)
    rms = rms_by_path(state)
    assert list(rms) == ["blocks", "empty", "nested/list/0", "scalar", "still"]
    np.testing.assert_array_equal(rms["blocks"], [0.0, 0.0])
    assert (rms["empty"], rms["still"]) == (0.0, 0.0)
    np.testing.assert_allclose([rms["scalar"], rms["nested/list/0"]], 1.0)
    none, no_state = optimizer.update({}, stable_adamw(0.1).init({}), {})
    assert none == {} and rms_by_path(no_state) == {}


def test_python_scalars_and_names_that_collide():
    p = {"a/b": 1.0, "a": {"b": 2.0}}
    optimizer = stable_adamw(0.1, weight_decay=0.0)
    updates, state = optimizer.update(p, optimizer.init(p), p)
    np.testing.assert_allclose(updates["a/b"], -0.1, rtol=1e-5)
    assert set(rms_by_path(state)) == {"a/b", "['a/b']"}


def test_a_tiny_eps_does_not_underflow_to_nan():
    p = jnp.ones(3)
    optimizer = stable_adamw(0.1, eps=1e-30)  # its square is 0 in float32
    updates, state = optimizer.update(jnp.zeros(3), optimizer.init(p), p)
    assert np.isfinite(updates).all() and rms_by_path(state)[""] == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
def test_a_gradient_whose_square_overflows_is_the_largest_one(dtype):
    p = {"w": jnp.ones(3, dtype)}
    optimizer = stable_adamw(0.1)

    def after(first):
        g, state = {"w": jnp.asarray([first, 1.0, 1.0], dtype)}, optimizer.init(p)
        for _ in range(3):
            updates, state = optimizer.update(g, state, p)
        return updates, state

    jax.tree.map(np.testing.assert_array_equal, after(-1e30), after(-(2.0**63)))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(after(1e38)))
    assert not np.isfinite(after(np.inf)[0]["w"]).any()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"b1": 1.0}, r"b1 must be in \[0, 1\), got 1.0"),
        ({"b1": -0.1}, r"b1 must be in"),
        ({"b2": 1.5}, r"b2 must be in \[0, 1\), got 1.5"),
        ({"b2": math.nan}, r"b2 must be in"),
        ({"b2": "0.99"}, r"b2 must be in \[0, 1\), got '0.99'"),
        ({"b2": jnp.float32(1.0)}, r"b2 must be in"),
        ({"eps": 0.0}, r"eps must be at least 2\^-126"),
        ({"eps": 1e-40}, r"eps must be at least 2\^-126 .*, got 1e-40"),  # 0 to XLA: 0/0
        ({"mu_dtype": "int8"}, r"mu_dtype must be a floating-point dtype .* got 'int8'"),
        ({"mu_dtype": jnp.ones(())}, "mu_dtype must be a dtype, got the array 1.0: .* static_args"),
        ({"weight_decay": -1.0}, r"weight_decay must be at least 0, got -1.0"),
        ({"clip_threshold": 0.0}, r"clip_threshold must be positive, got 0.0"),
        ({"clip_threshold": 11.0}, r"clip_threshold=11.0 never clips: at b2=0.99 .* below 10\. "),
        ({"clip_threshold": 4.6, "b2": 0.95}, r"never clips"),
    ],
    ids=str,
)
def test_refuses_hyper_parameters_out_of_range(options, message):
    with pytest.raises(ValueError, match=message) as caught:
        stable_adamw(0.1, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("rate", [-0.1, math.nan, math.inf, "0.1", None, np.ones(2)], ids=str)
def test_refuses_a_learning_rate_that_is_a_mistake(rate):
    with pytest.raises(ValueError, match="learning_rate must be a schedule, or a finite number"):
        stable_adamw(rate)


@pytest.mark.parametrize("rate", [jnp.ones(3), lambda step: jnp.ones(3)], ids=["array", "schedule"])
def test_refuses_a_learning_rate_with_a_shape(rate):
    """It would be another rate for each column."""
    optimizer, p = stable_adamw(rate), {"w": jnp.ones((2, 3))}
    with pytest.raises(ValueError, match=r"learning_rate must be a scalar, got the shape \(3,\)"):
        optimizer.update(p, optimizer.init(p), p)


def test_a_schedule_may_round_below_0_under_inject_hyperparams():
    optimizer = optax.inject_hyperparams(stable_adamw)(lambda step: jnp.float32(-1e-9))
    p = {"w": jnp.ones(3)}
    optimizer.update(p, optimizer.init(p), p)  # not compiled, so the value is known


def test_arrays_of_another_shape_than_their_parameter_are_refused():
    """Arithmetic would broadcast them: every row would get the gradient of one."""
    optimizer, p, row = stable_adamw(0.1), {"w": jnp.ones((2, 3))}, {"w": jnp.ones(3)}
    state, foreign = optimizer.init(p), optimizer.init(row)
    with pytest.raises(ValueError, match=r"gradient of shape \(2, 3\) .* 'w', got \(3,\): pass"):
        optimizer.update(row, state, p)
    with pytest.raises(ValueError, match=r"first moment of shape \(2, 3\) .* got \(3,\): pass"):
        optimizer.update(p, foreign, p)
    with pytest.raises(ValueError, match=r"gradient of shape \(2, 3\) .* 'w', got None: pass"):
        optimizer.update({"w": None}, state, p)
    with pytest.raises(ValueError, match=r"needs a first moment of each .*present keys: .*: pass"):
        optimizer.update(p, optimizer.init(p | {"b": jnp.ones(3)}), p)


def test_accepts_the_edges_of_the_ranges():
    stable_adamw(0.0, b1=0.0, b2=0.0, weight_decay=0.0)
    stable_adamw(0.1, b2=0.99, clip_threshold=10.0)
    stable_adamw(0.1, clip_threshold=math.inf)


def test_other_errors_are_one_line():
    p = {"layer": jnp.ones((2, 3))}
    optimizer = stable_adamw(0.1)
    with pytest.raises(ValueError, match="needs the parameters, got params=None"):
        optimizer.update(p, optimizer.init(p))
    with pytest.raises(ValueError, match=r"block_axes=2 is .* parameter 'layer' of shape \(2, 3\)"):
        stable_adamw(0.1, block_axes={"layer": 2}).init(p)
    with pytest.raises(ValueError, match="block_axes must be None, an int .* to static_args"):
        optax.inject_hyperparams(stable_adamw)(0.1, block_axes=0).init(p)
    for axes in ("layer", {"layer": True}):  # a TypeError; the axis 1
        with pytest.raises(ValueError, match="block_axes must be None, an int or a tuple of ints"):
            stable_adamw(0.1, block_axes=axes).init(p)
    with pytest.raises(ValueError, match=r"'steps' is int32: cast it"):
        optimizer.init({"steps": jnp.ones(2, jnp.int32)})
    state = optimizer.init(p)
    with pytest.raises(ValueError, match="the names of 1 values are unknown"):
        rms_by_path(state._replace(rms=TensorValues(state.rms.values, {})))
    with pytest.raises(ValueError, match="no StableAdamW state"):
        rms_by_path(optax.adamw(0.1).init(p))
    with pytest.raises(ValueError, match="one RMS for each name, got several for 'layer'"):
        rms_by_path((optimizer.init(p), optimizer.init(p)))
