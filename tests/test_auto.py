"""The recipe "auto": what it stands for on each chip, where it is accepted, and that runs keep it."""

import json
import logging
import re
import warnings
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx

import swjax
import swjax.linen
import swjax.nnx
from configs import common
from swjax import auto, recipes
from swjax.kernels import chips, dispatch, targets
from swjax.models import clip
from swjax.training.config import ConfigError
from swjax.training.setup import settle_recipe

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="what the host is stands in the expected messages"
)

X = jax.ShapeDtypeStruct((1024, 2048), jnp.bfloat16)
WIDE, NARROW = (jax.ShapeDtypeStruct((2048, n), jnp.float32) for n in (2048, 256))


@pytest.fixture(autouse=True)
def says_it_again():
    auto._tell.cache_clear()
    auto._warn.cache_clear()


@pytest.mark.parametrize(
    "chip, recipe",
    [
        ("V100", "standard"),
        ("A100", "switchback"),
        ("RTX 4090", "switchback"),
        ("L4", "switchback"),
        ("H200", "switchback_hadamard"),
        ("B200", "switchback"),
        ("B300", "fp8_switchback"),
        ("RTX 5090", "switchback"),
        ("TPU v4", "standard"),
        ("TPU v5e", "switchback"),
        ("TPU v5p", "switchback"),
        ("TPU v6e", "switchback"),
        ("TPU v7", "fp8_switchback"),
        ("TPU 8i", "fp8_switchback"),
    ],
)
def test_the_choice_for_a_chip(chip, recipe, capsys):
    with targets.compiling_for(chip):
        assert auto.choose(WIDE.shape) == recipe
        assert recipes.get("auto", WIDE.shape) == recipes.RECIPES[recipe]
    said = capsys.readouterr().err
    assert (
        said.count("\n") == 1
        and repr(recipe) in said
        and f"int8 {chips.named(chip).int8 or 0}" in said
    )


def test_the_page_has_the_table():
    page = (Path(__file__).parents[1] / "docs" / "chips.md").read_text()
    rows = {row.split("|")[1].strip(): row for row in page.splitlines() if row.startswith("| ")}
    for chip in chips.CHIPS:
        _, _, *peaks, formats, chosen, _, tried, _ = map(str.strip, rows[chip.name].split("|"))
        numbers = [f"{peak:,g}" if peak else "-" for peak in (chip.bf16, chip.fp8, chip.int8)]
        assert peaks == numbers and formats == (", ".join(chip.block_formats) or "-")
        with targets.compiling_for(chip.name):
            best = {auto.choose(*shapes, quietly=True) for shapes in ((), (WIDE.shape,))}
        assert set(re.findall(r"`(\w+)`", chosen)) == best and tried


def test_it_is_said_once(capsys):
    for _ in range(3):
        swjax.switchback(jnp.ones((2, 8)), jnp.ones((8, 4)), recipe="auto")
    assert capsys.readouterr().err == (
        f"swjax: the recipe 'auto' is 'switchback' on {jax.devices()[0].device_kind}: CPUs compute every "
        "recipe\n"
    )


def test_unknown_devices():
    known = targets.Target("gpu", "NVIDIA H300 of another make", "9.0")
    assert auto.chip_of(known).compute_capability == "9.0"
    for target in (
        targets.Target("gpu", "AMD Instinct MI300X", "gfx942"),
        targets.Target("tpu", "TPU9"),
    ):
        assert auto.chip_of(target) is None and auto._of(target)[0] == "standard"


def operations(*ws):
    """The operations of layers with these weights and one input, forward and backward."""
    layers = lambda x, *ws: swjax.switchback(x, ws, recipe="auto", implementation="xla")
    gradients = lambda x, ws: tuple(x[:, : w.shape[1]] for w in ws)
    with dispatch.record() as calls:
        jax.eval_shape(lambda x, *ws: jax.vjp(layers, x, *ws)[1](gradients(x, ws)), X, *ws)
    return {operation for operation, _ in calls}


def test_a_layer_depends_on_the_chip_and_its_width():
    with targets.compiling_for("H200"), warnings.catch_warnings(action="ignore"):
        assert operations(NARROW) >= {"matmul", "weight_gradient"}
        assert operations(WIDE) >= {"matmul", "block_weight_gradient"}
        assert operations(WIDE, NARROW) == operations(NARROW, WIDE) == operations(NARROW)
    with targets.compiling_for("TPU v4"):
        assert "matmul" not in operations(WIDE)


def experts(rows, weights, recipe="auto"):
    """The operations of experts of so many rows each, forward and backward."""
    ws = tuple(jax.ShapeDtypeStruct((8, *of), weights) for of in ((2048, 1408), (1408, 2048)))
    x, sizes = jax.ShapeDtypeStruct((8 * rows, 2048), jnp.bfloat16), jnp.zeros(8, jnp.int32)

    def mlp(x, gate, down):
        options = {"recipe": recipe, "implementation": "xla"}
        return swjax.gated_ragged_mlp(x, gate, gate, down, sizes, **options)

    with dispatch.record() as calls:
        jax.eval_shape(lambda *ws: jax.vjp(mlp, *ws)[1](ws[0]), x, *ws)
    return {operation for operation, _ in calls}


@pytest.mark.parametrize(
    "rows, weights, quantized",
    [(64, "float32", 0), (1024, "float32", 1), (1024, "bfloat16", 0), (1536, "bfloat16", 1)],
)
def test_experts_of_few_rows_stay_in_16_bits(rows, weights, quantized, capsys):
    with targets.compiling_for("H200"), warnings.catch_warnings(action="ignore"):
        found = experts(rows, weights)
    assert ("ragged_block_weight_gradient" in found) == ("quantize" in found) == quantized
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and (f"{rows} rows an expert" in said) != quantized
    assert "quantize" in experts(rows, weights)


def test_other_recipes_warn_of_few_rows():
    with targets.compiling_for("H200"):
        with pytest.warns(UserWarning, match="64 rows an expert: .* 600: use the recipe 'auto'"):
            assert "quantize" in experts(64, "float32", "switchback")


def test_rules_keep_experts_of_few_rows():
    params = {"w": jax.ShapeDtypeStruct((8, 2048, 1408), jnp.float32)}
    sizes = jnp.zeros(8, jnp.int32)
    apply = lambda params, x: jax.lax.ragged_dot(x, params["w"].astype(x.dtype), sizes)
    for rules in ("llm", {".*": "auto"}):
        for rows, reason in ((64, "64 rows an expert: "), (1024, "")):
            x = jax.ShapeDtypeStruct((8 * rows, 2048), jnp.bfloat16)
            with targets.compiling_for("H200"):
                (product,) = swjax.quantized(apply, rules).report(params, x)
            assert product.reason.startswith(reason) and (product.recipe is None) == bool(reason)


@pytest.mark.filterwarnings("ignore:.*rows an expert")
def test_one_traced_function_follows_the_rule_of_each_parameter():
    block = jax.checkpoint(lambda w, x: jax.lax.ragged_dot(x, w, jnp.array([8, 8])))
    rules = {"automatic": "auto", "named": "switchback"}
    params, x = dict.fromkeys(rules, jnp.ones((2, 64, 64))), jnp.ones((16, 64))
    layers = lambda params, x: block(params["named"], block(params["automatic"], x))
    with targets.compiling_for("H200"), dispatch.record() as calls:
        jax.eval_shape(swjax.quantized(layers, rules, implementation="xla"), params, x)
    assert calls.count(("ragged_matmul", "xla")) == 1


def test_models_accept_it():
    with targets.compiling_for("H200"), warnings.catch_warnings(action="ignore"):
        model = nnx.eval_shape(lambda: nnx.Linear(2048, 2048, rngs=nnx.Rngs(0)))
        swjax.nnx.quantize_model(model, {".*": "auto"})
        assert swjax.nnx.product_of(model).recipe == recipes.RECIPES["switchback_hadamard"]
        assert clip.config("vit_h14", recipe="auto").recipe == "switchback_hadamard"
        assert clip.config("vit_l14", recipe="auto").recipe == "switchback"
        apply = lambda params, x: x @ params["w"].astype(x.dtype)
        (product,) = swjax.quantized(apply, {".*": "auto"}).report({"w": WIDE}, X)
        assert product.recipe == recipes.RECIPES["switchback_hadamard"]
        for layer, rules in (
            (linen.Dense(2048, dtype=X.dtype), {".*": "auto"}),
            (swjax.linen.Dense(2048, dtype=X.dtype, recipe="auto"), {}),
        ):
            params = jax.eval_shape(layer.init, jax.random.key(0), X)
            (product,) = swjax.linen.describe_model(layer, params, X, recipes=rules)
            assert product.recipe == recipes.RECIPES["switchback_hadamard"]
    assert clip.config("tiny", recipe="auto").recipe == "switchback"


@pytest.mark.parametrize(
    "chip, recipe", [("B300", "switchback"), ("TPU v7", "switchback"), ("A100", "fp8_switchback")]
)
def test_a_recipe_that_is_slow_on_the_chip_warns_once(chip, recipe):
    layer = lambda x, w: swjax.switchback(x, w, recipe=recipe, implementation="xla")
    with (
        targets.compiling_for(chip),
        pytest.warns(UserWarning, match="not faster than bf16") as found,
    ):
        jax.eval_shape(lambda x, w, n: (layer(x, w), layer(x, n)), X, WIDE, NARROW)
    assert sum("not faster" in str(each.message) for each in found) == 1
    with targets.compiling_for(chip), warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.eval_shape(
            lambda x, w: swjax.switchback(x, w, recipe="auto", implementation="xla"), X, NARROW
        )


def test_lengths_that_blocks_do_not_divide_warn_once():
    x = jnp.ones((200, 200))
    layer = partial(swjax.switchback, recipe="fp8_block128")
    with targets.compiling_for("H100"):
        with pytest.warns(UserWarning, match="length of 200: use a multiple of 128") as found:
            jax.eval_shape(lambda x: layer(layer(x, x), x), x)
        assert len(found) == 1
        with warnings.catch_warnings(action="error"):  # a named XLA is no surprise
            jax.eval_shape(partial(layer, implementation="xla"), x, x)


def test_a_run_keeps_its_recipe(tmp_path, caplog):
    config = common.get_config()
    with config.unlocked():
        config.model.recipe = "auto"
    begun = settle_recipe(config, tmp_path)
    assert (config.model.recipe, begun.model.recipe) == ("auto", "switchback")
    (tmp_path / "config.json").write_text(begun.to_json())
    with targets.compiling_for("TPU v7"), caplog.at_level(logging.WARNING):
        assert settle_recipe(config, tmp_path / "other").model.recipe == "fp8_switchback"
        assert not caplog.records
        assert settle_recipe(config, tmp_path).model.recipe == "switchback"
        assert "'auto' stays 'switchback'" in caplog.text and "'fp8_switchback'" in caplog.text
    (tmp_path / "config.json").write_text(json.dumps({"model": {"recipe": "int9"}}))
    with pytest.raises(ConfigError, match="int9"):
        settle_recipe(config, tmp_path)
