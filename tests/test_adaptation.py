"""LoRA over frozen quantized towers, and learning rates that differ between layers."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from micro_run import (
    ROOT,
    UNDIAGNOSED,
    assert_close,
    assert_same_bits,
    batch_of,
    final_state,
    init_and_step,
    make_init,
    optimizer_of,
    paths,
    products_of,
    records,
    step_of,
    train,
)
from test_fine_tuning import foreign, shapes

import swjax
from swjax import inference, interop
from swjax.kernels.reference import QTensor
from swjax.models import lora, sharding
from swjax.models.config import LoRA
from swjax.nnx import Linear
from swjax.testing import assert_quantized
from swjax.tools import plan
from swjax.training import config as config_lib
from swjax.training import setup
from swjax.training.config import ConfigError
from swjax.training.optimizer import split_frozen
from swjax.training.state import restore
from swjax.training.state.restore import first_state

IS_LORA = re.compile(r"/lora_[ab]$")


def adapted(micro, **changes):
    return micro(optimizer__lora__rank=4, **changes)


@pytest.mark.parametrize("recipe", ["standard", "switchback_q"])
def test_a_layer_adds_the_product_of_its_matrices(recipe):
    """Output and gradients are those of ``x w + scale (x a) b``; w is quantized in no call."""
    keys = jax.random.split(jax.random.key(1), 3)
    x, b, bias = (jax.random.normal(key, s) for key, s in zip(keys, ((2, 8, 32), (2, 48), (48,))))
    model = nnx.Dict(fc=Linear(32, 48, recipe=recipe, rngs=nnx.Rngs(0)))
    w, model.fc.bias[...] = model.fc.kernel[...], bias
    lora.adapt(model, LoRA(rank=2, alpha=6.0), nnx.Rngs(2))
    a, model.fc.lora_b[...] = model.fc.lora_a[...], b
    norm, residual = swjax.LayerNorm(jnp.ones(32), jnp.zeros(32)), jnp.ones((32, 48))
    graph, params = nnx.graphdef(model), nnx.to_pure_dict(nnx.state(model))
    assert isinstance(params["fc"]["kernel"], QTensor) == (recipe == "switchback_q")

    def ours(a, b, x):
        changed = {"fc": params["fc"] | {"lora_a": a, "lora_b": b}}
        return nnx.merge(graph, changed).fc(x, prologue=norm, addend=x @ residual)

    def want(a, b, x):
        kernel = swjax.quantize_weight(w, recipe) if recipe != "standard" else w
        h, _ = norm.forward(x, quantize_to=None, implementation="xla")
        y = swjax.switchback(x, kernel, bias, recipe=recipe, prologue=norm)
        return y + 3 * (h @ a) @ b + x @ residual

    loss = lambda f: jax.jit(jax.value_and_grad(lambda *args: jnp.sum(f(*args) ** 2), (0, 1, 2)))
    assert_close(loss(ours)(a, b, x), loss(want)(a, b, x), rtol=1e-4, atol=1e-3)
    if recipe != "standard":
        assert_quantized(loss(ours), a, b, x, count=2)
    merged = lora.merged_parameters(model)["fc"]
    rounding = jnp.max(jnp.abs(w)) / 254 if recipe != "standard" else 1e-6
    np.testing.assert_allclose(merged["kernel"], w + 3 * a @ b, atol=1.01 * rounding)
    assert merged.keys() == {"bias", "kernel"}


def test_training_starts_at_the_weights_and_moves_the_matrices_alone(micro, tmp_path):
    """The kernels are those of `quantize_weight`, also in the average of the parameters.

    Frozen matrices stay: a pattern of them matches no parameter of the weights, and was refused.
    """
    theirs = foreign(micro(), tmp_path)
    weights = {"checkpoint__init_from": str(tmp_path), "train__ema_decay": 0.9}
    weights["optimizer__freeze"] = frozen = "text/.*/lora_a"
    config = adapted(micro, **weights, **UNDIAGNOSED, optimizer__lora__pattern="attn/[qv]$|mlp")
    init, _ = make_init(config)
    state, batch = first_state(config, init, shapes(init)), batch_of(config)
    stored = state["params"]["text"]["blocks"]["mlp"]["fc1"]["kernel"]
    w = theirs["text"]["blocks"]["mlp"]["fc1"]["kernel"][0]
    assert_same_bits(jax.tree.map(lambda x: x[0], stored), swjax.quantize_weight(w))
    _, step = init_and_step(config)
    after, metrics = step(step(state, batch)[0], batch)
    assert np.isfinite(metrics["train/loss"])
    for tree in ("params", "ema"):
        moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), state[tree], after[tree])
        found = {path for path, x in zip(paths(moved), jax.tree.leaves(moved)) if x}
        trained = {p for p in paths(moved) if IS_LORA.search(p) and not re.search(frozen, p)}
        assert found == {"logit_scale", *trained}
        assert not any("attn/k/lora" in path for path in found) and len(found) == 13
    assert not any(re.search("kernel|bias|embedding", path) for path in paths(after["opt_state"]))


@pytest.mark.release
def test_frozen_kernels_have_no_gradients(micro):
    sizes = {"model__vision__width": 56, "model__text__width": 56} | UNDIAGNOSED
    kernels = {"[56,224]", "[224,56]", "[56,56]"}
    assert kernels <= products_of(micro(**sizes))
    assert not kernels & products_of(adapted(micro, **sizes))


@pytest.mark.release
def test_a_run_resumes_and_is_read_merged_and_exported(micro, tmp_path, caplog):
    """From the config to files of open_clip, which have the scores of the run within int8's error."""
    workdir, theirs = tmp_path / "whole", foreign(micro(), tmp_path / "weights")
    address = str(tmp_path / "weights")
    config = adapted(
        micro,
        checkpoint__init_from=address,
        optimizer__learning_rate=0.02,
        diagnostics__every_steps=2,
        diagnostics__rms="true",
    )
    assert train(config, workdir) == 0
    assert train(config, tmp_path / "parts", after=3) == train(config, tmp_path / "parts") == 0
    assert records(tmp_path / "parts") == records(workdir)
    state, _ = final_state(config, workdir)
    assert_same_bits(final_state(config, tmp_path / "parts")[0], state)
    health = {k: v for record in records(workdir) for k, v in record.items() if "quantization" in k}
    assert health["quantization/sqnr_db/text/blocks/mlp/fc1/w/0"] == 200  # nothing more to lose
    assert health["quantization/sqnr_db/text/blocks/mlp/fc1/x/0"] < 60

    encoder = inference.load(workdir)
    texts = ["a red cross", "a blue dot"]
    graph = make_init(config)[1]
    want = inference.Encoder(nnx.merge(graph, state["params"])).encode_text(texts)
    np.testing.assert_allclose(encoder.encode_text(texts), want, atol=1e-6)
    inference.save(tmp_path / "encoder.safetensors", encoder)
    again = inference.load(tmp_path / "encoder.safetensors")
    np.testing.assert_array_equal(again.encode_text(texts), encoder.encode_text(texts))
    assert inference.load(workdir, prequantize=True).cfg.lora == LoRA(rank=4)

    plain = inference.load(workdir, recipe="standard")
    interop.save(tmp_path / "exported", encoder.model)
    exported = inference.load(tmp_path / "exported", dtype=encoder.cfg.dtype)
    np.testing.assert_allclose(plain.encode_text(texts), want, atol=0.03)
    np.testing.assert_allclose(exported.encode_text(texts), plain.encode_text(texts), atol=1e-5)
    before = inference.load(address, recipe="switchback").encode_text(texts)
    assert np.abs(before - want).max() > 0.1  # what training changed

    caplog.clear()
    next_run = micro(checkpoint__init_from=str(workdir))
    init, _ = make_init(next_run)
    params = first_state(next_run, init, shapes(init))["params"]
    assert not caplog.records
    assert_close(params, nnx.to_pure_dict(nnx.state(plain.model)), atol=1e-6)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, theirs)
    other = adapted(micro, checkpoint__init_from=address, model__embed_dim=24)
    init, _ = make_init(other)
    with pytest.raises(ConfigError, match="has no text/projection/kernel, vision/projection/kern"):
        first_state(other, init, shapes(init))
    with pytest.raises(ConfigError, match="optimizer.lora.rank: 4 -> 8: change the keys back"):
        train(micro(optimizer__lora__rank=8), workdir)


def test_frozen_kernels_keep_their_recipe_and_dtype(micro, tmp_path):
    """Neither kernels that are rotated otherwise, nor those of another dtype, are read as they are."""
    config = adapted(micro, train__steps=2, **UNDIAGNOSED)
    assert train(config, tmp_path / "int8") == 0
    config.model.recipe = "int8_hadamard"
    with pytest.raises(
        ConfigError, match="quantized for config.model.recipe='switchback', not 'int8_h"
    ):
        train(config, tmp_path / "int8")
    config.model.recipe = "fp8_switchback"
    with pytest.raises(ConfigError, match="model.recipe: 'switchback' -> 'fp8_switchback': change"):
        train(config, tmp_path / "int8")
    config.model.recipe, config.model.dtype = "standard", "bfloat16"
    with jax.numpy_dtype_promotion("standard"):  # jax.nn's attention promotes
        assert train(config, tmp_path / "bf16") == 0
        found = [inference.load(tmp_path / "bf16", dtype=d) for d in ("bfloat16", "float32")]
        assert_close(*(encoder.encode_text(["a fox"]) for encoder in found), atol=0.02)


@pytest.mark.release
def test_devices_share_the_kernels_and_repeat_the_matrices(micro):
    """With FSDP over two devices, a step has the loss and the updates of one device."""
    sizes = {"model__vision__layers": 2} | UNDIAGNOSED
    config = adapted(micro, **sizes)
    init, step = step_of(config)
    mesh = sharding.make_mesh(1, 2)
    like = sharding.abstract_state(jax.eval_shape(init), mesh)
    fc1 = like["params"]["vision"]["blocks"]["mlp"]["fc1"]
    assert fc1["kernel"].values.sharding.spec == jax.P(None, "tensor", "fsdp")
    assert fc1["lora_a"].sharding.is_fully_replicated
    batch, state = batch_of(config), jax.jit(init)()
    placed = jax.tree.map(lambda x, s: jax.device_put(x, s.sharding), state, like)
    got, _ = jax.jit(step)(placed, sharding.shard_batch(batch, mesh))
    assert_close(got["params"], jax.jit(step)(state, batch)[0]["params"], atol=1e-5)


def test_a_pattern_and_a_rank_are_checked_in_one_line(micro):
    for changes, message in (
        (
            {"pattern": "visoin"},
            r"lora: pattern='visoin' matches no linear layer of the blocks: they are",
        ),
        ({"pattern": "("}, r"lora: pattern='\(' is not a regular expression"),
        (
            {"rank": 0, "pattern": "attn"},
            "lora.pattern='attn' has no effect with rank=0: set config",
        ),
        ({"rank": 0, "alpha": 8}, "lora.alpha=8.0 has no effect with rank=0: set config"),
        ({"rank": -1}, "lora.rank=-1 must be a whole number, at least 0"),
        ({"rank": 2.5}, "lora.rank='2.5' must be a whole number"),
    ):
        options = {f"optimizer__lora__{key}": value for key, value in changes.items()}
        with pytest.raises(ConfigError, match=message) as error:
            plan.show(micro(**{"optimizer__lora__rank": 4} | options), "")
        assert "\n" not in str(error.value)
    config = adapted(micro, optimizer__freeze="lora_")
    params = jax.eval_shape(make_init(adapted(micro))[0])["params"]
    with pytest.raises(ConfigError, match="matches every matrix of LoRA, so none is trained"):
        split_frozen(params, config.optimizer.freeze)


def test_lora_of_random_weights_is_said(micro, caplog, monkeypatch):
    monkeypatch.setattr(restore, "compile_init", lambda init, like: dict)
    first_state(adapted(micro), *[None] * 2)
    (record,) = caplog.records
    assert "lora.rank=4 adapts random weights, which stay frozen: set" in record.getMessage()


def test_the_plan_counts_what_is_trained():
    """LoRA of ViT-B/32 needs a fifth of the train state."""
    settings = [("data.name", "synthetic"), ("train.batch_size", "256")]

    def planned(rank):
        config = config_lib.load(
            f"{ROOT}/configs/vitb32_int8.py", [*settings, ("optimizer.lora.rank", str(rank))]
        )
        return plan.make(config, plan.Hardware.parse("h200:1"))

    full, small = planned(0), planned(16)
    assert full.parameters == small.parameters == full.trained == 151_277_313
    assert small.trained == 16 * 12 * (4 * 2 + 2 * 5) * (768 + 512) + 1
    text = "\n".join(plan.lines(small))
    assert f"151,277,313 parameters, {small.trained:,} trained, LoRA of rank 16, switchback" in text
    assert small.state_bytes < 0.2 * full.state_bytes
    assert small.memory.weights == 0 and small.memory.activations == full.memory.activations


@pytest.mark.parametrize("name", ["stable_adamw", "adamw", "muon"])
def test_learning_rates_fall_towards_the_input(micro, name):
    """As in BEiT: decay^2 and decay for two blocks, decay^3 for the embeddings, 1 for the rest."""
    sizes = {"model__vision__layers": 2, "optimizer__name": name}
    shapes = {"class_embedding": (3,), "ln_pre": {"scale": (3,)}, "projection": {"kernel": (3, 4)}}
    shapes = {"vision": shapes | {"blocks": {"q": {"kernel": (2, 3, 4), "bias": (2, 4)}}}}
    shapes |= {"logit_scale": (), "text": {"token_embedding": {"embedding": (5, 3)}}}
    rng = np.random.default_rng(0)
    is_shape = lambda x: isinstance(x, tuple)
    draw = lambda: jax.tree.map(
        lambda s: rng.standard_normal(s).astype("float32"), shapes, is_leaf=is_shape
    )
    params, grads = draw(), draw()
    with jax.numpy_dtype_promotion("standard"):  # optax needs it
        got, want = (
            jax.jit(lambda g, p, o=optimizer: o.update(g, o.init(p), p)[0])(grads, params)
            for _, optimizer in map(
                optimizer_of, (micro(**sizes, optimizer__layer_decay=0.5), micro(**sizes))
            )
        )
    of_blocks = {"kernel": np.array([[[0.25]], [[0.5]]]), "bias": np.array([[0.25], [0.5]])}
    factors = {"class_embedding": 0.125, "ln_pre": {"scale": 0.125}, "projection": {"kernel": 1}}
    factors = {"vision": factors | {"blocks": {"q": of_blocks}}}
    factors |= {"logit_scale": 1, "text": {"token_embedding": {"embedding": 0.25}}}
    for path, ratio in jax.tree_util.tree_leaves_with_path(jax.tree.map(np.divide, got, want)):
        factor = factors
        for key in path:
            factor = factor[key.key]
        np.testing.assert_allclose(ratio, np.broadcast_to(factor, ratio.shape), rtol=1e-5)


def test_a_mesh_that_splits_rotated_features_is_one_line(micro):
    config = adapted(micro, model__recipe="int8_hadamard", mesh__data=1, mesh__fsdp=2)
    with pytest.raises(ConfigError, match=r"groups of 32, which config.mesh.fsdp=2 splits: set it"):
        setup.check_config(config)
    setup.check_config(adapted(micro, model__recipe="int8_hadamard"))
