"""Models of other projects: converted in one line, described, trained in int8, and converted back."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

import swjax
import swjax.linen
import swjax.nnx
from swjax.optax import rms_by_path, stable_adamw
from swjax.recipes import RECIPES
from swjax.testing import matrix_products

# These models may promote dtypes and warn.
pytestmark = [pytest.mark.usefixtures("as_others_run"), pytest.mark.filterwarnings("ignore")]

RNG = np.random.default_rng(0)
IMAGES = jnp.asarray(RNG.normal(size=(8, 16, 16, 3)), jnp.float32)
LABELS = jnp.arange(8)
TOKENS = jnp.asarray(RNG.integers(1, 20, (4, 32)))
STEPS = 6


@pytest.fixture
def as_others_run():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def package(name):
    name_there = name.replace("_", "-")
    return pytest.importorskip(name, reason=f"needs {name_there}: pip install {name_there}")


class Block(nnx.Module):
    def __init__(self, rngs):
        linear = partial(nnx.Linear, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 32, decode=False, rngs=rngs)
        self.mlp = nnx.Sequential(linear(32, 128), nnx.gelu, linear(128, 32))

    def __call__(self, x):
        x = x + self.attention(x)
        return x + self.mlp(x)


class ViT(nnx.Module):
    """A vision transformer of Flax's own modules."""

    def __init__(self, rngs):
        self.patches = nnx.Conv(3, 32, (8, 8), strides=8, rngs=rngs)
        self.blocks = nnx.List(Block(rngs) for _ in range(2))
        self.norm, self.head = nnx.LayerNorm(32, rngs=rngs), nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, images):
        x = self.patches(images).reshape(len(images), -1, 32)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def small_vit():
    model = ViT(nnx.Rngs(0))
    rules = {r"blocks/\d/attention/(query|key|value)": "switchback", "blocks/.*": "switchback_q"}
    return model, rules, 12, lambda model: cross_entropy(model(IMAGES), LABELS)


def mamba2():
    """The Mamba-2 language model of a package on PyPI; Google's Bonsai has the same code."""
    mamba = package("mamba2_jax")
    model = mamba.Mamba2ForCausalLM(mamba.Mamba2Config.tiny(), rngs=nnx.Rngs(0))
    rules = {".*mixer/(in|out)_proj": "switchback"}
    return model, rules, 4, lambda model: model(TOKENS, labels=TOKENS)["loss"]


def int8_products(loss, model) -> int:
    graph, state = nnx.split(model)
    found = matrix_products(lambda state: loss(nnx.merge(graph, state)), state)
    return found["s8", "s8"] + found["s32", "s32"]


def train_nnx(model, loss) -> list[float]:
    optimizer = nnx.Optimizer(model, stable_adamw(3e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    return [float(step(model, optimizer)) for _ in range(STEPS)]


@pytest.mark.parametrize("make", [small_vit, mamba2])
@pytest.mark.release
def test_an_nnx_model_of_others(make):
    model, rules, count, loss = make()
    graph, plain = nnx.graphdef(model), train_nnx(make()[0], loss)
    swjax.nnx.quantize_model(model, rules)

    conversion = swjax.nnx.describe_model(model)
    assert sum(matrix.recipe is not None for matrix in conversion) == count
    for matrix in conversion:
        named = [RECIPES[rules[rule]] for rule in rules if re.fullmatch(rule, matrix.path)]
        assert matrix.recipe is (named[0] if named else None)
        assert bool(matrix.reason) == (matrix.recipe is None)
    assert int8_products(loss, model) == count

    swjax.nnx.restore_model(model)
    assert nnx.graphdef(model) == graph  # so compiled programs are reused

    losses = train_nnx(swjax.nnx.quantize_model(model, rules), loss)
    assert losses[-1] < 0.9 * losses[0]
    assert losses != plain
    np.testing.assert_allclose(losses, plain, rtol=0.03)


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        x = x + nn.MultiHeadDotProductAttention(2, name="attention")(nn.LayerNorm()(x))
        y = nn.gelu(nn.Dense(64, name="up")(nn.LayerNorm()(x)))
        return x + nn.Dense(32, name="down")(y), None


class LinenViT(nn.Module):
    """A vision transformer of Linen's modules, with blocks that are scanned on demand, as in big_vision."""

    scan: bool = False

    @nn.compact
    def __call__(self, images):
        x = nn.Conv(32, (8, 8), strides=8, name="patches")(images)
        x = x.reshape(len(x), -1, x.shape[-1])
        shape = (1, x.shape[1], x.shape[2])
        x = x + self.param("positions", nn.initializers.normal(0.02), shape)
        if self.scan:
            block = nn.remat(LinenBlock, prevent_cse=False)
            split = {"params": True}
            x, _ = nn.scan(block, variable_axes={"params": 0}, split_rngs=split, length=2)(
                name="block"
            )(x, None)
        for number in range(0 if self.scan else 2):
            x, _ = LinenBlock(name=f"block_{number}")(x)
        return nn.Dense(8, name="head")(nn.LayerNorm()(x).mean(axis=1))


def linen_vit():
    rules = {r"block_\d/attention/\w+": "switchback_m", r"block_\d/(up|down)": "switchback"}
    return LinenViT(), rules, 12, IMAGES, lambda logits: cross_entropy(logits, LABELS)


def scanned_vit():
    _, rules, count, images, loss = linen_vit()
    rules = {rule.replace(r"block_\d", "block"): recipe for rule, recipe in rules.items()}
    return LinenViT(scan=True), rules, count // 2, images, loss


@pytest.mark.parametrize("make", [linen_vit, scanned_vit])
@pytest.mark.release
def test_a_linen_model_of_others(make):
    """A Linen model trains with TrainState and stable_adamw; outside the context it is unchanged."""
    model, rules, count, inputs, loss = make()
    state = TrainState.create(
        apply_fn=model.apply,
        params=model.init(jax.random.key(0), inputs)["params"],
        tx=stable_adamw(3e-3),
    )
    conversions = []

    def plain(params):
        return loss(state.apply_fn({"params": params}, inputs))

    def quantized(params):
        with swjax.linen.quantized(rules) as conversion:
            value = plain(params)
        conversions.append(conversion)
        return value

    def train(objective):
        @jax.jit
        def step(state):
            value, grads = jax.value_and_grad(objective)(state.params)
            return value, state.apply_gradients(grads=grads)

        losses, now = [], state
        for _ in range(STEPS):
            value, now = step(now)
            losses.append(float(value))
        return losses

    found = matrix_products(quantized, state.params)
    assert found["s8", "s8"] + found["s32", "s32"] == count
    described = conversions[0]
    assert sum(matrix.recipe is not None for matrix in described) == count
    leaves = jax.tree_util.tree_leaves_with_path(state.params)
    held = [
        leaf for path, leaf in leaves if leaf.ndim >= 2 and not re.search("bias|scale", str(path))
    ]
    assert sorted(matrix.shape for matrix in described) == sorted(leaf.shape for leaf in held)
    losses, others = train(quantized), train(plain)
    assert losses[-1] < 0.9 * losses[0]
    assert losses != others
    np.testing.assert_allclose(losses, others, rtol=0.03)


def test_stable_adamw_in_equinox():
    eqx = package("equinox")
    model = eqx.nn.MLP(4, 2, 16, 2, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (32, 4))
    y = jnp.stack([x[:, 0] * x[:, 1], x[:, 2]], axis=1)
    optimizer = stable_adamw(1e-2, weight_decay=0.1)
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model, state):
        loss = lambda model: jnp.mean((jax.vmap(model)(x) - y) ** 2)
        value, grads = eqx.filter_value_and_grad(loss)(model)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, state = optimizer.update(grads, state, params)
        return eqx.apply_updates(model, updates), state, value

    losses = []
    for _ in range(40):
        model, state, value = step(model, state)
        losses.append(float(value))
    assert losses[-1] < 0.4 * losses[0]
    names = {f"layers/{i}/{name}" for i in range(3) for name in ("weight", "bias")}
    rms = rms_by_path(state)
    assert set(rms) == names and all(0 < value < 10 for value in rms.values())
