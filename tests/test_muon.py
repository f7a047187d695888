"""swjax.optax.muon: optax's updates, stacks, bad input. test_sharded_collectives.py has meshes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import thinning
from flax import nnx, traverse_util
from optax import contrib

from benchmarks.studies import gram_matrices, minimax_polynomials
from swjax.optax import (
    guess_matrices,
    muon,
    path_name,
    rms_by_path,
    stable_adamw,
    stacked_axes,
)
from swjax.optax.matrices import MatrixAxes
from swjax.optax.newton_schulz import (
    COEFFICIENTS,
    STEPS,
    coefficients_of,
    orthogonalize,
)
from swjax.optax.orthogonal import scale_neurons

STACKS = {"fewer_rows": (3, 16, 24), "more_rows": (3, 40, 16), "matrix": (16, 24)}
# Stacked along axis 1, as in MaxText; experts of layers; along the axes between and behind the matrix's.
STACKS |= {"maxtext": (32, 3, 16), "experts": (2, 3, 16, 24), "apart": (16, 2, 24, 3)}
BLOCKS = {"maxtext": 1, "experts": (0, 1), "apart": (1, -1)}


@pytest.mark.parametrize("dtype, atol", thinning.first([("float32", 1e-6), ("bfloat16", 0.006)]))
def test_muon_is_that_of_optax(dtype, atol):
    """Also the decay, and each matrix of a stack along any axes."""
    known = {1: (0, 2), (0, 1): (2, 3), (1, -1): (0, 2)}
    matrices = {name: known.get(BLOCKS.get(name), (-2, -1)) for name in STACKS}
    dimensions = {name: contrib.MuonDimensionNumbers(*axes) for name, axes in matrices.items()}
    key = jax.random.key(1)
    params = {name: jax.random.normal(key, shape) for name, shape in STACKS.items()}
    blocks = {name: BLOCKS.get(name) for name in STACKS}
    every = lambda params: jax.tree.map(lambda _: True, params)
    ours = muon(
        0.1, every, weight_decay=0.3, dtype=dtype, block_axes=blocks, coefficients="quintic"
    )
    theirs = contrib.muon(
        0.1,
        weight_decay=0.3,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=lambda params: dimensions,
    )
    own, other = ours.init(params), theirs.init(params)
    our_update, their_update = jax.jit(ours.update), jax.jit(theirs.update)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # as optax needs
        for key in jax.random.split(jax.random.key(0), 3):
            grads = jax.tree.map(lambda p, key=key: jax.random.normal(key, p.shape), params)
            got, own = our_update(grads, own, params)
            want, other = their_update(grads, other, params)
            jax.tree.map(partial(np.testing.assert_allclose, atol=atol), got, want)


def test_no_matrix_at_all_is_one_line():
    """A wrapper that reshapes parameters, such as optax.flatten, would leave AdamW for all of them."""
    params = {"w": jnp.ones((3, 4, 2)), "b": jnp.ones(3)}
    optimizer = muon(0.1, lambda params: jax.tree.map(lambda p: p.ndim == 3, params))
    members = jax.tree.map(lambda p: p[0], params)  # what jax.vmap over the stack passes
    for init in (optax.flatten(optimizer).init, lambda _: optimizer.init(members)):
        with pytest.raises(ValueError, match="must name a parameter, got none of .: use") as error:
            init(params)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "name, dtype, margin, shape",
    [
        pytest.param("quintic", "float32", 0.003, (96, 256), marks=pytest.mark.release),
        ("quintic", "float16", 0.02, (96, 256)),
        pytest.param("quintic", "bfloat16", 0.04, (96, 256), marks=pytest.mark.release),
        ("quintic", "bfloat16", 0.04, (96, 96)),
        ("polar_express", "float16", 0.025, (256, 96)),
        ("polar_express", "bfloat16", 0.06, (96, 256)),
        ("nonic", "float16", 0.03, (96, 256)),
        ("nonic", "float16", 0.03, (96, 96)),
        pytest.param("nonic", "float32", 0.003, (96, 256), marks=pytest.mark.release),
    ],
)
def test_singular_values_end_in_the_published_band(name, dtype, margin, shape, device):
    """Those above 0.2 % of the norm; below, the polynomials of the exact values, which rise from 0.

    Also in float32, whose products a GPU rounds to TF32. With one Gram matrix for all steps the values of the
    last matrix would exceed 5 in float16, and 1000 in bfloat16.
    """
    x = gram_matrices.matrices(min(shape), max(shape))
    x = x if shape[0] <= shape[1] else x.mT
    u, values, vt = np.linalg.svd(x, full_matrices=False)
    values /= np.linalg.norm(values, axis=1, keepdims=True)
    want = gram_matrices.wanted(values, name)
    bands = {"quintic": (0.68, 1.21), "polar_express": (0.86, 1.13), "nonic": (0.73, 1.21)}
    low, high = bands[name]
    assert ((low < want) & (want < high))[values >= 0.002].all()
    steps = STEPS[name]
    data = x.astype("float32"), coefficients_of(name, steps)
    run = jax.jit(partial(orthogonalize, dtype=dtype, steps=steps))
    found = np.asarray(run(*jax.device_put(data, jax.devices(device)[0])), np.float64)
    kept = np.einsum("bji,bjk,bik->bi", u, found, vt)  # along the singular vectors of x
    assert np.abs(kept - want)[values >= 0.002].max() < margin
    assert np.linalg.norm(found, 2, axis=(1, 2)).max() < high + margin
    assert np.abs(kept - want)[values < 0.002].max() < margin


def test_nonic_is_what_the_study_prints():
    steps = minimax_polynomials.composed(minimax_polynomials.NONIC)
    np.testing.assert_allclose(COEFFICIENTS["nonic"], steps, rtol=1e-5)


def test_equal_matrices_run_as_one_stack():
    """Single matrices of one shape share their products, and have the bits of each alone."""
    x = jax.random.normal(jax.random.key(0), (3, 16, 40))
    tree = {"a": x[0], "b": {"c": x[1], "d": x[2]}, "other": x[0, :8]}
    run = partial(orthogonalize, coefficients=coefficients_of("quintic", 5))
    got = jax.jit(run)(tree)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), got, jax.tree.map(run, tree))
    products = str(jax.make_jaxpr(run)(tree)).count("dot_general")
    assert products == 2 * str(jax.make_jaxpr(run)(x[0])).count("dot_general")


def test_neurons_are_divided_by_the_size_of_their_updates():
    """In NumPy, as in NorMuon's algorithm 1, with stacks along any axes."""
    x = np.random.default_rng(0).normal(size=(2, 5, 4, 3)) * np.array([1.0, 5.0, 0.1])
    transformation = scale_neurons(0.9, [(0, 1)])
    state, v = transformation.init(jnp.asarray(x[0][None], jnp.float32)), 0.0
    for each in x:
        update = jnp.asarray(each[None], jnp.float32)
        got, state = transformation.update(update, state)
        v = 0.9 * v + 0.1 * np.mean(each**2, 1, keepdims=True)
        want = each / np.sqrt(v)
        want *= 0.2 * np.sqrt(12) / np.linalg.norm(want, axis=(1, 2), keepdims=True)
        np.testing.assert_allclose(got[0], want, rtol=1e-5)
    assert state.nu.shape == (1, 5, 1, 3)
    params = {"w": jnp.ones((4, 3))}
    optimizer = muon(1.0, {"w": True}, weight_decay=0.0, neuron_b2=0.95)
    update, _ = jax.jit(optimizer.update)({"w": jnp.eye(4, 3)}, optimizer.init(params), params)
    assert np.sqrt(np.mean(np.square(update["w"]))) == pytest.approx(0.2, rel=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("shape", [(3, 16, 16), (3, 16, 40)])
def test_a_matrix_of_zeros_stays_so(shape, dtype):
    """Beside one with a single element, and one whose elements differ by 40 decades."""
    x = jnp.zeros(shape).at[1, 2, 3].set(1e-30).at[2].set(1e-20).at[2, 0, 0].set(1e20)
    got = np.asarray(orthogonalize(x, coefficients_of("quintic", 5), dtype))
    assert np.isfinite(got).all() and not got[0].any()
    for i in (1, 2):
        assert np.count_nonzero(np.abs(got[i]) > 0.01) == 1
        assert 0.68 < np.abs(got[i]).max() < 1.21


def test_both_parts_decay_and_follow_the_schedule():
    params = {"w": jnp.ones((4, 3)), "embedding": jnp.ones((5, 3)), "bias": jnp.ones(3)}
    zeros = jax.tree.map(jnp.zeros_like, params)
    kinds = {"w": True, "embedding": False, "bias": False}
    decay = lambda params: jax.tree.map(lambda p: p.ndim > 1, params)
    optimizer = muon(lambda step: 0.1 / (1.0 + step), kinds, weight_decay=0.5, mask=decay)
    state = optimizer.init(params)
    for rate in (0.1, 0.05):
        updates, state = optimizer.update(zeros, state, params)
        want = {"w": -0.5 * rate, "embedding": -0.5 * rate, "bias": 0.0}
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), updates, want)


def test_an_array_that_is_no_matrix_is_one_line():
    params = {"attention": {"kernel": jnp.ones((2, 3, 4, 5))}}
    optimizer = muon(0.1, lambda params: jax.tree.map(lambda _: True, params))
    with pytest.raises(ValueError, match="got 'attention/kernel' of shape .* or set it to False"):
        optimizer.init(params)
    optimizer = muon(0.1, {"w": True}, block_axes={"w": (0, 1)})
    with pytest.raises(ValueError, match=r"'w' of shape \(2, 3, 4\) .* axes \(0, 1\): name"):
        optimizer.init({"w": jnp.ones((2, 3, 4))})


BAD = {
    "matrices must be 'auto', .*, got '.*kernel'": {"matrices": ".*kernel"},  # was taken for "auto"
    "learning_rate must be a schedule, or a finite": {"learning_rate": -0.1},
    r"b2 must be in \[0, 1\), got 1.0": {"b2": 1.0},
    r"momentum must be in \[0, 1\), got 1.5": {"momentum": 1.5},
    "eps must be at least 2": {"eps": 0.0},
    "weight_decay must be at least 0": {"weight_decay": -1},
    "dtype must be a floating-point dtype of at least 16 bits, got 'int8'": {"dtype": "int8"},
    "dtype must be a floating-point dtype of at least 16 bits, got": {"dtype": jnp.float8_e4m3fn},
    "dtype must be a floating-point dtype of at least 16 bits, got None": {"dtype": None},
    "coefficients must be one of auto, quintic, polar_express, nonic, got 'cubic'": {
        "coefficients": "cubic"
    },
    "steps must be None or an int of at least 1, got 0: .*static_args": {"steps": 0},
    r"neuron_b2 must be in \[0, 1\), or None, got 1": {"neuron_b2": 1},
    "dtype must be a dtype, got the array .* add 'dtype' to static_args": {"dtype": jnp.ones(())},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_settings_are_one_line(message):
    with pytest.raises(ValueError, match=f"muon's {message}"):
        muon(**{"learning_rate": 0.1, "matrices": {"w": True}} | BAD[message])


def test_bad_trees_and_arrays_are_one_line():
    params = {"w": jnp.ones((4, 3)), "b": jnp.ones(3)}
    with pytest.raises(ValueError, match="matrices must be a .* bools .* add 'matrices' to static"):
        muon(0.1, True).init(params)
    injected = optax.inject_hyperparams(muon)(
        0.1, lambda params: jax.tree.map(lambda p: p.ndim == 2, params)
    )
    with pytest.raises(ValueError, match="add 'matrices' to static_args"):
        injected.init(params)
    for dtype in ("int32", "complex64"):
        with pytest.raises(
            ValueError, match=f"real floating-point matrices, 'w' is {dtype}: cast it"
        ):
            muon(0.1, {"w": True}).init({"w": jnp.ones((4, 3), dtype)})
    optimizer = muon(0.1, {"w": True, "b": False})
    with pytest.raises(ValueError, match="needs the parameters"):
        optimizer.update(params, optimizer.init(params))
    with pytest.raises(ValueError, match=r"shape \(4, 3\) for parameter 'w', got \(1, 3\)"):
        optimizer.update(params | {"w": jnp.ones((1, 3))}, optimizer.init(params), params)


def test_a_prefix_and_absent_parameters():
    params = {"blocks": {"a": jnp.ones((4, 3)), "none": None}, "head": {"w": jnp.ones((3, 2))}}
    whole = {"blocks": {"a": True, "none": True}, "head": {"w": False}}
    results = []
    for matrices in ({"blocks": True, "head": False}, lambda _: whole):
        optimizer = muon(0.1, matrices)
        results.append(optimizer.update(params, optimizer.init(params), params)[0])
    jax.tree.map(np.testing.assert_array_equal, *results)


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e19])
def test_the_size_of_a_gradient_does_not_matter(size):
    optimizer, grads = muon(0.1, {"w": True}, weight_decay=0.0), {"w": jnp.eye(4, 3)}
    state = optimizer.init(grads)
    small, _ = optimizer.update({"w": size * grads["w"]}, state, grads)
    want, _ = optimizer.update(grads, state, grads)
    np.testing.assert_allclose(small["w"], want["w"], rtol=1e-5)


def test_a_gradient_that_is_not_finite_stays_in_its_layer():
    optimizer, grads = muon(0.1, {"w": True}, weight_decay=0.0), {"w": jnp.ones((2, 4, 3))}
    bad = {"w": grads["w"].at[0, 1].set(jnp.nan)}
    update, _ = optimizer.update(bad, optimizer.init(grads), grads)
    assert np.isnan(update["w"][0]).all() and np.isfinite(update["w"][1]).all()


MASKS = {
    "dict": lambda params: {name: x.ndim > 1 for name, x in params.items()},
    "paths": lambda params: traverse_util.path_aware_map(lambda path, x: x.ndim > 1, params),
    "tree": {"w": True, "embedding": True, "bias": False},
}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_sees_all_parameters(name):
    """Not those of one part, with placeholders for the other."""
    params = {"w": jnp.ones((4, 3)), "embedding": jnp.ones((5, 3)), "bias": jnp.ones(3)}
    kinds = {"w": True, "embedding": False, "bias": False}
    optimizer = muon(0.1, kinds, weight_decay=0.5, mask=MASKS[name])
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    decay = {name: round(float(u.mean()), 6) for name, u in updates.items()}
    assert decay == {"w": -0.05, "embedding": -0.05, "bias": 0.0}


def test_a_mask_of_one_bool_is_one_line():
    """Under optax.inject_hyperparams a mask function that is not static becomes such a bool."""
    params = {"w": jnp.ones((4, 3)), "b": jnp.ones(3)}
    kinds, mask = {"w": True, "b": False}, lambda params: jax.tree.map(lambda x: x.ndim > 1, params)
    injected = optax.inject_hyperparams(muon, static_args=("matrices",))
    for optimizer in (muon(0.1, kinds, mask=False), injected(0.1, kinds, mask=mask)):
        with pytest.raises(ValueError, match="mask must be .* of bools .* add 'mask' to static"):
            optimizer.init(params)


@pytest.mark.parametrize(
    "dtypes, size",
    [
        (("float16", "float32"), 2e-8),  # float16 does not hold such gradients
        (("float16", "float16"), 1e-7),
        (("float32", "float16"), 300.0),
        (("bfloat16", "float32"), 1e5),
    ],
    ids=str,
)
def test_16_bits_give_the_steps_of_float32(dtypes, size):
    """The moments of AdamW would underflow or overflow in float16. Stored dtypes do not change."""
    params, grads = ({"w": jnp.ones((4, 3), d), "b": jnp.ones(3, d)} for d in dtypes)
    grads = jax.tree.map(lambda g: g * jnp.asarray(size, g.dtype), grads)
    optimizer = muon(1e-2, {"w": True, "b": False}, weight_decay=0.0)
    float32 = partial(jax.tree.map, lambda x: x.astype("float32"))
    state, other = optimizer.init(params), optimizer.init(float32(params))
    update = jax.jit(optimizer.update)
    for _ in range(8):
        before = jax.tree.map(lambda x: x.dtype, state)
        updates, state = update(grads, state, params)
        assert jax.tree.map(lambda x: x.dtype, state) == before
        assert jax.tree.map(jnp.result_type, updates) == jax.tree.map(jnp.result_type, params)
        want, other = update(float32(grads), other, float32(params))
        jax.tree.map(partial(np.testing.assert_allclose, rtol=0.02), float32(updates), want)


def test_what_fits_in_shape_only_by_broadcasting_is_one_line():
    params, kinds = {"w": jnp.ones((6, 10)), "b": jnp.ones(10)}, {"w": True, "b": False}
    optimizer = muon(0.1, kinds)
    state = optimizer.init(params)
    with pytest.raises(ValueError, match="momentum of shape .* for parameter 'w', got .1, 10."):
        optimizer.update(params, optimizer.init(params | {"w": jnp.ones((1, 10))}), params)
    with pytest.raises(ValueError, match="moment of shape .10,. for parameter 'b', got .1,."):
        optimizer.update(params, optimizer.init(params | {"b": jnp.ones(1)}), params)
    for rate in (jnp.ones(10), lambda step: jnp.ones(10)):
        with pytest.raises(ValueError, match="muon's learning_rate .* a scalar, got the shape"):
            muon(rate, kinds).update(params, muon(rate, kinds).init(params), params)
    with pytest.raises(ValueError, match="needs a floating gradient for parameter '.', got int32"):
        optimizer.update(jax.tree.map(jnp.int32, params), state, params)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 4, 4), (2, 0, 3)])
def test_empty_matrices(shape):
    params = {"w": jnp.ones(shape)}
    optimizer = muon(0.1, {"w": True})
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    assert updates["w"].shape == shape


def test_the_rms_of_the_other_parameters():
    params = {"w": jnp.ones((4, 3)), "blocks": {"bias": jnp.ones((2, 3))}}
    axes = lambda params: {"w": None, "blocks": {"bias": 0}}
    optimizer = muon(0.1, {"w": True, "blocks": False}, block_axes=axes)
    _, state = optimizer.update(params, optimizer.init(params), params)
    assert {name: rms.tolist() for name, rms in rms_by_path(state).items()} == {
        "blocks/bias": [1.0, 1.0]
    }


@pytest.mark.parametrize("name", ["matrices", "mask"])
def test_leaves_that_are_no_bools_are_one_line(name):
    """Every string counts as true."""
    options = {"matrices": {"w": True, "b": False}} | {name: {"w": "muon", "b": "adamw"}}
    with pytest.raises(
        ValueError, match=f"{name} must be a tree of bools .*, got the leaf 'adamw'"
    ):
        muon(0.1, **options).init({"w": jnp.ones((4, 3)), "b": jnp.ones(3)})


def test_a_module_is_a_tree_of_parameters():
    """It is callable, which does not make it a function of the parameters."""
    layer = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    optimizer = muon(0.1, lambda layer: jax.tree.map(lambda x: x.ndim == 2, layer))
    updates, _ = optimizer.update(layer, optimizer.init(layer), layer)
    assert isinstance(updates, nnx.Linear) and updates.kernel.shape == (4, 3)


def test_a_state_with_trees_of_bools_is_mapped():
    params, kinds = {"w": jnp.ones((4, 3)), "b": jnp.ones(3)}, {"w": True, "b": False}
    optimizer = muon(
        0.1, kinds, mask=lambda params: {name: x.ndim > 1 for name, x in params.items()}
    )
    state = optimizer.init(params)
    doubled = optax.tree.map_params(optimizer, lambda x: x + 1, state)
    want = jax.tree.map(
        lambda x: x + 1 if x.ndim else x, state.inner_states["muon"].inner_state[0].mu
    )
    jax.tree.map(
        np.testing.assert_array_equal, doubled.inner_states["muon"].inner_state[0].mu, want
    )


def test_matrices_are_guessed_from_names_and_metadata(capsys):
    """Stacks, and attention's kernels of three axes; the update is that of the matrix."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    names = {"out_sharding": ("embed", "layers", "mlp"), "eager_sharding": False}
    grads = {
        "embed_tokens": draw(9, 8),
        "layers": {
            "attn": {
                "query": {"kernel": draw(3, 8, 2, 6), "bias": draw(3, 2, 6)},
                "out": {"kernel": draw(3, 2, 6, 8)},
            },
            "mlp": {"kernel": nnx.Param(draw(8, 3, 5), **names)},
            "norm": {"scale": draw(3, 8)},
        },
        "one": {"q_einsum": {"w": draw(2, 8, 6)}},
        "conv": {"kernel": draw(3, 3, 4, 8)},
        "lm_head": {"kernel": draw(8, 9)},
    }
    params = jax.tree.map(jnp.ones_like, grads)

    def first_updates(optimizer, grads, params):
        return jax.jit(lambda g, p: optimizer.update(g, optimizer.init(p), p)[0])(grads, params)

    optimizer = muon(0.1, weight_decay=0.0)
    updates = first_updates(optimizer, grads, params)
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert stacked_axes({"relative_position_bias": jnp.ones((8, 3, 3))}) == {
        "relative_position_bias": ()
    }
    axes = stacked_axes(params)["layers"]
    assert axes["attn"]["query"] == {"kernel": (0,), "bias": (0,)}
    assert axes["mlp"]["kernel"].get_value() == (1,)
    attn, of = grads["layers"]["attn"], updates["layers"]["attn"]
    stacks = {
        "query": (
            attn["query"]["kernel"].reshape(3, 8, 12),
            of["query"]["kernel"].reshape(3, 8, 12),
        ),
        "out": (attn["out"]["kernel"].reshape(3, 12, 8), of["out"]["kernel"].reshape(3, 12, 8)),
        "mlp": [tree["layers"]["mlp"]["kernel"][...].swapaxes(0, 1) for tree in (grads, updates)],
        "q": [
            tree["one"]["q_einsum"]["w"].swapaxes(0, 1).reshape(8, 12) for tree in (grads, updates)
        ],
    }
    by_hand = {name: stack for name, (stack, _) in stacks.items()}
    wanted = muon(0.1, jax.tree.map(lambda _: True, by_hand), weight_decay=0.0)
    want = first_updates(wanted, by_hand, by_hand)
    for name, (_, got) in stacks.items():
        np.testing.assert_allclose(got, want[name], rtol=1e-5, atol=1e-7)
    adam = stable_adamw(0.1, weight_decay=0.0, clip_threshold=np.inf)
    others = {name: grads[name] for name in ("embed_tokens", "conv", "lm_head")}
    others |= {"norm": grads["layers"]["norm"]}
    want = first_updates(adam, others, others)
    for name in ("embed_tokens", "conv", "lm_head"):
        jax.tree.map(np.testing.assert_allclose, updates[name], want[name])
    np.testing.assert_allclose(updates["layers"]["norm"]["scale"], want["norm"]["scale"])
    first_updates(optimizer, grads, params)
    assert capsys.readouterr().out == ""


def test_a_stack_is_known_by_its_norm():
    """The kernels of its attention have three axes, and are matrices; the gate of an MLP is one too."""
    ones = lambda *shape: {"kernel": jnp.ones(shape)}
    block = {"q_proj": ones(3, 8, 8), "out": ones(3, 8, 8), "norm": {"scale": jnp.ones((3, 8))}}
    mlp = {"gate": ones(3, 8, 16), "up": ones(3, 8, 16), "scaled": jnp.ones((3, 8))}
    params = {"layers": block | {"mlp": mlp}, "last": ones(8, 2), "norm": {"scale": jnp.ones(8)}}
    guessed = dict(
        zip(
            map(path_name, dict(jax.tree_util.tree_leaves_with_path(params))),
            guess_matrices(params),
        )
    )
    stack = MatrixAxes((0,), (1,), (2,))
    kernels = [f"layers/{name}/kernel" for name in ("q_proj", "out", "mlp/gate", "mlp/up")]
    assert {name for name, axes in guessed.items() if axes} == {*kernels, "last/kernel"}
    assert all(guessed[name] == stack for name in kernels)
    axes = stacked_axes(params)
    assert set(jax.tree.leaves(axes["layers"])) == {0} and axes["norm"] == {"scale": ()}


def test_an_explicit_axis_of_one_device_changes_nothing():
    """Code for a cluster failed on one GPU."""
    grads = {"w": jax.random.normal(jax.random.key(0), (2, 8, 12))}
    optimizer = muon(0.1, {"w": True}, block_axes={"w": 0})
    want, _ = optimizer.update(grads, optimizer.init(grads), grads)
    kinds = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((1, 1), ("fsdp", "tensor"), kinds, devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        spread = jax.device_put(grads["w"], jax.sharding.PartitionSpec(None, "fsdp", "tensor"))
        update = jax.jit(lambda g: optimizer.update(g, optimizer.init(g), g)[0])
        got = update({"w": spread})["w"]
    np.testing.assert_allclose(got, want["w"], rtol=1e-5, atol=1e-7)
