"""Qwix, Google's quantization library, as an oracle: a rule makes it compute as SwitchBack does.

The rules are those of benchmarks/comparison.py. Both agree to fp32 rounding, far below quantization noise.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from numeric import snr_db

import swjax
from swjax.nnx import Linear, gated_mlp, linears, mlp, quantize_model

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))
import comparison

qwix = pytest.importorskip("qwix", reason="needs Qwix: pip install qwix")
# Qwix may promote dtypes and warn.
pytestmark = pytest.mark.filterwarnings("ignore")

RULES = {
    "switchback": comparison.SWITCHBACK_Q | comparison.PER_TENSOR,
    "switchback_q": comparison.SWITCHBACK_Q,
    "llm_int8": None,  # Qwix's default int8 training: scales of absmax / 127.5, weight gradient in int8
}


@pytest.mark.parametrize("recipe", ["switchback", "switchback_q"])
def test_a_layer_of_qwix_agrees(recipe):
    theirs, ours = gradients(recipe)
    for name, value in ours.items():
        assert snr_db(value, theirs[name]) > 100, name
    np.testing.assert_array_equal(ours["dw"], theirs["dw"])


def test_qwix_agrees_only_as_far_as_its_rule_does():
    """Another rule disagrees, so the test above does not pass with just any int8."""
    theirs, ours = gradients("llm_int8")
    for name, value in ours.items():
        assert 30 < snr_db(value, theirs[name]) < 50, name


@pytest.mark.release
def test_only_rotated_blocks_keep_the_error_of_int8_weight_gradients():
    """Log-normal tokens: docs/comparison.md has these errors, in percent, for 16 and 1,024 sequences."""
    few, many = weight_gradient_errors(16), weight_gradient_errors(1024)
    for name, expected in {
        "qwix": (4.2, 11.7),
        "qwix in tiles": (4.2, 11.7),
        "switchback_hadamard": (1.4, 1.2),
    }.items():
        np.testing.assert_allclose((few[name], many[name]), expected, atol=0.1, err_msg=name)


def weight_gradient_errors(batch: int) -> dict[str, float]:
    shape = (batch, 64, 64)

    def drawn(seed):
        rng = np.random.default_rng(seed)
        x = rng.standard_normal((batch * 64, 64))
        return jnp.asarray(x * np.exp(rng.standard_normal((batch * 64, 1))), jnp.float32)

    x, g, w = drawn(1), drawn(2), jnp.ones((64, 64))
    exact = np.float64(x).T @ np.float64(g)
    x, g = x.reshape(shape), g.reshape(shape)
    int8 = dict.fromkeys(("weight_qtype", "act_qtype", "bwd_qtype"), "int8")

    def theirs(tile):
        rule = qwix.QtRule(module_path=".*", **int8, bwd_weight_grad_tile_size=tile)
        dense = nn.Dense(64, use_bias=False)
        return comparison.flax_layer(qwix.quantize_model(dense, qwix.QtProvider([rule])))

    def error(layer):
        dw = jax.jit(lambda w, x, g: jax.vjp(lambda w: layer(w, x), w)[1](g)[0])(w, x, g)
        return 100 * np.linalg.norm(dw - exact) / np.linalg.norm(exact)

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return {
            "qwix": error(theirs(None)),
            "qwix in tiles": error(theirs(64)),
            "switchback_hadamard": error(comparison.ours("switchback_hadamard", x, w, g)),
        }


def gradients(recipe: str) -> tuple[dict, dict]:
    rng = np.random.default_rng(0)
    shapes = {"x": (4, 16, 128), "w": (128, 96), "g": (4, 16, 96)}
    x, w, g = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes.values())
    x = x.at[0, 0].mul(50)  # an outlier

    @jax.jit
    def run(w, x, g):
        results = []
        for layer in (
            comparison.qwix_layer(RULES[recipe], x, w, g),
            comparison.ours(recipe, x, w, g),
        ):
            y, vjp = jax.vjp(layer, w, x)
            results.append(dict(zip(("y", "dw", "dx"), (y, *vjp(g)))))
        return tuple(results)

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return run(w, x, g)


# --- LoRA of Qwix over layers with a recipe -----------------------------------------------------------


class Model(nnx.Module):
    """Every way in which a model calls our layers."""

    def __init__(self, rngs):
        self.flax = nnx.Linear(16, 16, rngs=rngs)
        self.einsum = nnx.Einsum("btd,dh->bth", (16, 16), rngs=rngs)
        for name in OURS:
            setattr(self, name, Linear(16, 16, use_bias=len(name) < 4, rngs=rngs))

    def __call__(self, x):
        return self.last(self.einsum(self.flax(x)))

    def last(self, x):
        norm = swjax.LayerNorm(jnp.ones(16), jnp.zeros(16))
        q, k = linears((self.q, self.k), x, prologue=norm)
        x = mlp(self.fc1, self.fc2, q * k, add_input=True)
        norm = swjax.RMSNorm(jnp.ones(16))
        layers = self.gate, self.wide, self.down
        return gated_mlp(*layers, x, prologue=norm, add_input=True)


OURS = "q", "k", "fc1", "fc2", "gate", "wide", "down"
LAYERS = "flax", "einsum", *OURS


@pytest.mark.parametrize("lora_first", [True, False])
def test_lora_adds_its_exact_delta_to_quantized_layers(lora_first):
    """The int8 products do not change, and the delta of each layer is x a b."""
    rng = np.random.default_rng(0)
    x, new_b = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((2, 4, 16), (2, 16)))
    convert = lambda model: quantize_model(model, {".*": "switchback"})
    model, want = Model(nnx.Rngs(0)), convert(Model(nnx.Rngs(0)))
    rule = qwix.LoraRule(module_path=".*", rank=2, alpha=2.0)
    if not lora_first:
        model = convert(model)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        model = qwix.apply_lora_to_model(model, qwix.LoraProvider([rule]), x, rngs=nnx.Rngs(1))
        model = convert(model) if lora_first else model
        np.testing.assert_array_equal(model(x), want(x))  # b is 0

        def output(changed):
            for name in LAYERS:
                layer = getattr(model, name)
                bs = [key for key in vars(layer) if key.endswith("_lora_b")]
                assert len(bs) == 1, f"{name} has {bs}"
                b = getattr(layer, bs[0])
                b.set_value(new_b if name == changed else 0 * new_b)
            return model(x)

        h = want.flax(x)
        for name, before in {"flax": x, "einsum": h}.items():
            layer = getattr(model, name)
            a = next(getattr(layer, key)[...] for key in vars(layer) if key.endswith("_lora_a"))
            y = getattr(want, name)(before) + before @ a @ new_b
            rest = want.einsum(y) if name == "flax" else y
            np.testing.assert_allclose(output(name), want.last(rest), rtol=1e-3, atol=1e-3)
        grads = nnx.grad(lambda model: jnp.sum(model(x) ** 2))(model)
        for name in LAYERS:
            got = [v for key, v in nnx.to_pure_dict(grads)[name].items() if key.endswith("_lora_b")]
            assert jnp.any(got[0] != 0)


def test_a_rule_of_qwix_that_quantizes_a_layer_again_is_refused():
    layer = nnx.Sequential(nnx.Linear(16, 16, rngs=nnx.Rngs(0)))
    model = quantize_model(layer, {".*": "switchback"})
    rule = qwix.QtRule(module_path=".*", weight_qtype="int8", act_qtype="int8")
    refused = pytest.raises(ValueError, match="a rule of Qwix matches it")
    with refused, jax.numpy_dtype_promotion("standard"):
        qwix.quantize_model(model, qwix.QtProvider([rule]), jnp.ones((4, 16)))
