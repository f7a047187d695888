"""The optimizer of a config: schedule, clipping, loss scale, frozen parameters."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from micro_run import assert_same_bits, final_state, paths, records, train

from swjax.models import sharding
from swjax.training import optimizer as optimizer_lib
from swjax.training import setup
from swjax.training.config import ConfigError
from swjax.training.optimizer import combine, split_frozen
from swjax.training.step import measure_scaling, rms


def test_a_dynamic_scale_is_the_other_way(micro):
    config = micro(optimizer__loss_scaling="dynamic", optimizer__loss_scale=1024)
    optimizer = optimizer_lib.make_optimizer(config, lambda count: 1e-3)
    params = {"kernel": jnp.ones((4, 3)), "bias": jnp.ones(3)}
    _, state = optimizer.update(
        params | {"bias": jnp.full(3, jnp.inf)}, optimizer.init(params), params
    )
    measured = {name: float(x) for name, x in measure_scaling("dynamic", state).items()}
    assert measured == {"train/loss_scale": 512.0, "train/scaling_skipped": 1.0}


@pytest.mark.parametrize("name", ["adamw", "stable_adamw", "muon"])
def test_a_block_that_overflows_sits_out_with_every_optimizer(micro, name):
    config = micro(
        optimizer__name=name, optimizer__loss_scaling="per_tensor", optimizer__grad_clip_norm=1.0
    )
    optimizer = optimizer_lib.make_optimizer(config, lambda count: 1e-3)
    params = {"blocks": {"kernel": jnp.ones((2, 4, 3))}, "bias": jnp.ones(3)}
    grads = jax.tree.map(jnp.copy, params)
    grads["blocks"]["kernel"] = grads["blocks"]["kernel"].at[1, 0, 0].set(jnp.inf)
    with jax.numpy_dtype_promotion("standard"):  # optax.adamw needs it
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
    moved = [bool(jnp.all(u != 0)) for u in (*updates["blocks"]["kernel"], updates["bias"])]
    assert moved == [True, False, True] and not np.any(updates["blocks"]["kernel"][1])


def test_a_name_without_a_branch_trains_with_no_other_optimizer(micro):
    config = micro()
    config.optimizer.name = "lion"
    with pytest.raises(ConfigError, match="config.optimizer.name='lion' has no branch"):
        optimizer_lib.make_optimizer(config, lambda count: 1e-3)


def test_split_frozen_and_combine_are_inverse():
    params = {"a": {"kernel": 1, "bias": 2}, "b": 3}
    trainable, frozen = split_frozen(params, ("bias$",))
    assert trainable == {"a": {"kernel": 1, "bias": None}, "b": 3}
    assert combine(trainable, frozen) == params


def test_a_pattern_that_matches_nothing_gets_the_nearest_paths():
    params = {"text": {f"fc{n}": n for n in range(40)}, "vision": {"patch_embed": 1}}
    with pytest.raises(ConfigError, match="none of 41 parameters; .* vision/patch_embed,") as error:
        split_frozen(params, ("visoin/patch",))
    assert len(str(error.value)) < 250


@pytest.mark.parametrize("name", ["adamw", "stable_adamw"])
def test_gradient_clipping_is_the_other_arm(micro, name):
    config = micro(
        optimizer__name=name, optimizer__grad_clip_norm=1e-3, optimizer__clip_threshold=0
    )
    optimizer = optimizer_lib.make_optimizer(config, lambda count: 1e-3)
    params = {"kernel": jnp.ones((4, 3)), "bias": jnp.ones(3)}
    with jax.numpy_dtype_promotion("standard"):  # optax.adamw needs it
        _, state = optimizer.update(params, optimizer.init(params), params)
    first = [x for path, x in zip(paths(state), jax.tree.leaves(state)) if "mu" in path.split("/")]
    norm = float(jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in first)))
    kept = {"adamw": 0.1, "stable_adamw": 1.0}[name]  # m / first gradient
    np.testing.assert_allclose(norm, kept * 1e-3, rtol=1e-5)


@pytest.mark.parametrize("coefficients", ["quintic", "nonic"])
def test_muon_orthogonalizes_the_matrices_of_blocks(micro, coefficients):
    """The other parameters have AdamW's updates."""
    config = micro(optimizer__name="muon", optimizer__coefficients=coefficients)
    adamw = micro(optimizer__name="adamw")
    shapes = {"blocks": {"kernel": (2, 6, 4), "bias": (2, 4)}, "embedding": (5, 3), "bias": (3,)}
    keys = iter(jax.random.split(jax.random.key(0), 8))
    is_shape = lambda x: isinstance(x, tuple)
    params, grads = (
        jax.tree.map(lambda shape: jax.random.normal(next(keys), shape), shapes, is_leaf=is_shape)
        for _ in range(2)
    )
    with jax.numpy_dtype_promotion("standard"):  # optax needs it
        got, want = (
            optimizer.update(grads, optimizer.init(params), params)[0]
            for optimizer in (
                optimizer_lib.make_optimizer(c, lambda _: 1e-3) for c in (config, adamw)
            )
        )
    decay = config.optimizer.weight_decay * params["blocks"]["kernel"]
    step = got["blocks"].pop("kernel") + 1e-3 * decay
    del want["blocks"]["kernel"]
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), got, want)
    values = np.linalg.svd(step / (1e-3 * 0.2 * 6**0.5), compute_uv=False)
    assert values.shape == (2, 4) and np.all((0.6 < values) & (values < 1.3))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_dtype_of_muons_products(micro, dtype):
    config = micro(optimizer__name="muon", model__dtype=dtype)
    optimizer = optimizer_lib.make_optimizer(config, lambda count: 1e-3)
    params = {"blocks": {"kernel": jnp.ones((2, 6, 4))}}
    program = str(jax.make_jaxpr(optimizer.update)(params, optimizer.init(params), params))
    assert set(re.findall(r"\bb?f16\b", program)) == (set() if dtype == "float32" else {"f16"})


@pytest.mark.parametrize(
    "name, scaling", [("adamw", ""), ("stable_adamw", "per_tensor"), ("muon", "dynamic")]
)
def test_moments_in_8_bits_are_sharded_like_parameters(micro, name, scaling):
    config = micro(
        optimizer__name=name, optimizer__eight_bit_moments=True, optimizer__loss_scaling=scaling
    )
    optimizer = optimizer_lib.make_optimizer(config, lambda count: 1e-3)
    params = {"blocks": {"kernel": jnp.ones((2, 64, 128))}}
    with jax.numpy_dtype_promotion("standard"):  # optax.adamw needs it
        updates, opt_state = optimizer.update(params, optimizer.init(params), params)
    assert np.all(np.asarray(updates["blocks"]["kernel"]) < 0)
    if scaling:
        assert measure_scaling(scaling, opt_state)["train/loss_scale"] == 2**16
    state = {"params": params, "opt_state": opt_state}
    mesh, rules = jax.make_mesh((2,), ("fsdp",)), [(".*", jax.P(None, "fsdp"))]
    placed = sharding.abstract_state(state, mesh, rules)
    if name == "adamw":
        measured = rms(config.optimizer, opt_state, params)
        np.testing.assert_allclose(measured["stability/rms/blocks/kernel"], 1, rtol=0.1)
    codes = [x.sharding.spec for x in jax.tree.leaves(placed) if x.dtype == jnp.int8]
    assert codes == [jax.P(None, "fsdp", None)] * (1 if name == "muon" else 2)


def test_muon_without_trained_matrices_is_one_line(micro):
    config = micro(optimizer__name="muon", optimizer__freeze="/blocks/")
    with pytest.raises(
        ConfigError, match="config.optimizer: muon's matrices must name a parameter"
    ):
        setup.assemble(config, range(40))


@pytest.mark.release
@pytest.mark.parametrize("eight_bits", [False, True])
def test_a_run_with_muon(micro, tmp_path, eight_bits):
    """It clips, freezes and resumes; the RMS that it records are those of AdamW's tensors."""
    config = micro(
        optimizer__name="muon",
        optimizer__grad_clip_norm=1.0,
        optimizer__freeze="^text/",
        diagnostics__rms="true",
        optimizer__eight_bit_moments=eight_bits,
    )
    with jax.numpy_dtype_promotion("standard"):
        assert train(config, tmp_path / "whole") == 0
        assert train(config, tmp_path / "parts", after=3) == train(config, tmp_path / "parts") == 0
    assert records(tmp_path / "parts") == records(tmp_path / "whole")
    (a, _), (b, _) = (final_state(config, tmp_path / each) for each in ("parts", "whole"))
    assert_same_bits(a, b)
    measured = {name for name in records(tmp_path / "whole")[-1] if "/rms/" in name}
    assert any("vision/patch_embed" in name for name in measured)
    assert not any("blocks" in name and "kernel" in name for name in measured)


SCHEDULES = {  # {name: rates at steps 60, 99 and 110}; warm-up until 10, decay from 88
    "cosine": [0.5, 0.0295, 0.0],
    "linear": [0.5, 0.11, 0.0],
    "constant": [1.0, 1.0, 1.0],
    "wsd": [1.0, 1 - 0.5**0.5, 0.0],
    "rsqrt": [(10 / 60) ** 0.5, 0.5 * (10 / 99) ** 0.5, 0.0],
}


def schedule_of(micro, name, total=110, warmup=10, **options):
    settings = {f"schedule__{key}": value for key, value in options.items()}
    config = micro(schedule__name=name, optimizer__learning_rate=1.0, **settings)
    return optimizer_lib.make_schedule(config, total, warmup)


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule(micro, name):
    schedule = schedule_of(micro, name, decay=0.2)
    rates = np.array([schedule(step) for step in (0, 4, 9, 10, 60, 99, 110)])
    np.testing.assert_allclose(rates, [0.1, 0.46, 0.91, 1.0, *SCHEDULES[name]], atol=1e-4)
    assert all(rate.dtype == np.float32 for rate in rates)


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "constant"])
def test_a_schedule_ends_at_its_floor(micro, name):
    schedule = schedule_of(micro, name, decay=0.2, floor=0.25)
    last = 0.25 * (10 / 110) ** 0.5 if name == "rsqrt" else 0.25
    assert float(schedule(110)) == pytest.approx(last, rel=1e-5)


def test_a_second_run_continues_a_stable_phase(micro):
    """A constant run of 88 steps has the rates of a longer wsd run before its decay."""
    stable = schedule_of(micro, "constant", total=88)
    decaying = schedule_of(micro, "wsd", total=110, decay=0.2)
    assert [float(stable(step)) for step in range(88)] == [
        float(decaying(step)) for step in range(88)
    ]
    assert float(decaying(89)) < 1


@pytest.mark.parametrize("name", ["wsd", "rsqrt"])
def test_a_decay_before_the_warmup_ends_is_refused(micro, name):
    with pytest.raises(ConfigError, match="decays in the last 99 of 110 steps, .* warm up: lower"):
        schedule_of(micro, name, warmup=12, decay=0.9)
