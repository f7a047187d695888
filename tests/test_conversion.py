"""The description of a conversion, and its undoing."""

import copy
import pickle
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import swjax
import swjax.linen
import swjax.nnx
import swjax.serving
import swjax.testing
from swjax import nnx_blocks
from swjax.kernels import dispatch
from swjax.recipes import RECIPES, Product, Quantizer, Recipe

X = jnp.ones((4, 8))
OTHER = Recipe(fwd=Product(Quantizer("int8", "row"), Quantizer("int8", "channel")))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.plain = nnx.Linear(8, 8, rngs=rngs)
        self.ours = swjax.nnx.Linear(8, 8, recipe="switchback_m", rngs=rngs)
        self.general = nnx.LinearGeneral(8, (2, 4), rngs=rngs)
        self.own = nnx.Linear(8, 8, dot_general=lax_dot_general, rngs=rngs)
        self.table = nnx.Embed(5, 8, rngs=rngs)
        self.mixing = nnx.Param(jnp.eye(8))

    def __call__(self, x):
        x = self.own(self.ours(self.plain(x))) @ self.mixing[...]
        return self.general(x).reshape(x.shape) + self.table(jnp.array([1]))


lax_dot_general = partial(jax.lax.dot_general)


def test_a_table_of_every_matrix():
    model = swjax.nnx.quantize_model(Model(nnx.Rngs(0)), {"plain": "llm_int8", "own": OTHER})
    table = """
        general  LinearGeneral.kernel  8 x 2 x 4  -             no expression matches its path
        ours     Linear.kernel         8 x 8      switchback_m
        own      Linear.kernel         8 x 8      a Recipe
        plain    Linear.kernel         8 x 8      llm_int8
        table    Embed.embedding       5 x 8      -             takes no dot_general
        .        Model.mixing          8 x 8      -             takes no dot_general
        3 of 6 matrices converted, 192 of 360 elements (53%)
        switchback_m: fwd int8 row x int8 tensor, dgrad int8 row x int8 tensor, wgrad not quantized
        a Recipe: fwd int8 row x int8 channel, dgrad not quantized, wgrad not quantized
        llm_int8: fwd int8 row x int8 channel, dgrad int8 row x int8 channel,
          wgrad int8 row x int8 channel
        1 that Model may multiply: only swjax.quantized(lambda model, *args: model(*args), "llm")
        converts them"""
    assert str(swjax.nnx.describe_model(model)).split() == table.split()


def test_with_inputs_a_report_of_every_product():
    model = swjax.nnx.quantize_model(Model(nnx.Rngs(0)), {"plain": "llm_int8", "own": OTHER})
    report = swjax.nnx.describe_model(model, jax.ShapeDtypeStruct(X.shape, X.dtype))
    flops = 2 * X.size * 8
    reached = "takes no dot_general; swjax.quantized reaches it"
    assert [(p.path, p.recipe, p.reason, p.flops) for p in report] == [
        ("plain/kernel", RECIPES["llm_int8"], "", flops),
        ("ours/kernel", RECIPES["switchback_m"], "", flops),
        ("own/kernel", OTHER, "", flops),
        ("mixing", None, reached, flops),
        ("general/kernel", None, "no expression matches its path", flops),
        ("table/embedding", None, "a lookup", 0),
    ]
    shares = report.share, report.input_gradient_share, report.weight_gradient_share
    assert shares == (3 / 5, 2 / 5, 1 / 5)
    assert "swjax.quantized reaches 20.0% of the forward FLOPs more: swjax.qu" in str(report)
    assert report[3].site.startswith("test_conversion.py:")

    linen, rules = LinenModel(), {"plain": "switchback"}
    params = jax.eval_shape(linen.init, jax.random.key(0), X)
    of_linen = swjax.linen.describe_model(linen, params, X, recipes=rules)
    assert [(p.path, p.reason) for p in of_linen if p.flops] == [
        ("params/plain/kernel", ""),
        ("params/ours/kernel", ""),
        ("params/general/kernel", "no expression matches its path"),
        ("params/mixing", reached),
    ]
    assert of_linen.share == 2 / 4


def test_a_layer_that_ignores_its_recipe_is_not_reported_as_int8():
    class Ignoring(nnx.Linear):
        def __call__(self, x):
            return x @ self.kernel[...]

    class OfTheModel(nnx.Module):  # not a layer of Flax
        __call__ = Ignoring.__call__

        def __init__(self):
            self.kernel, self.dot_general = nnx.Param(jnp.ones((8, 8))), jax.lax.dot_general

    for layer in (Ignoring(8, 8, rngs=nnx.Rngs(0)), OfTheModel()):
        model = nnx.Sequential(layer)
        swjax.nnx.quantize_model(model, {".*": "switchback"})
        (matrix,) = swjax.nnx.describe_model(model)
        assert matrix.reason == "unless its own code ignores dot_general"
        (product,) = swjax.nnx.describe_model(model, X)
        assert (product.quantized, product.reason) == (
            False,
            "code of its own; swjax.quantized reaches it",
        )

    class Own(nn.Dense):
        @nn.compact
        def __call__(self, x):
            return x @ self.param("kernel", self.kernel_init, (8, self.features))

    class Obeying(nn.Dense):
        def __call__(self, x):
            return super().__call__(x)

    for kind, reason in ((Own, matrix.reason), (Obeying, "")):
        with swjax.linen.quantized({".*": "switchback"}) as conversion:
            kind(8).init(jax.random.key(0), X)
        assert [m.reason for m in conversion] == [reason]
    swjax.nnx.restore_model(model)


def test_a_tied_head_is_named_by_a_rule():
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.embed, self.up = nnx.Embed(16, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, tokens):
            return self.embed.attend(self.up(self.embed(tokens)))

    model, tokens = Tied(nnx.Rngs(0)), jnp.ones((2, 4), jnp.int32)
    swjax.nnx.quantize_model(model, {"up": "switchback"})
    before = swjax.nnx.describe_model(model, tokens)
    assert before.share == 1 / 3
    assert list(before)[-1].reason.endswith('the rules "llm" keep it in 16 bits')
    assert "FLOPs more" not in str(before)  # than "llm" would reach
    call = lambda model, tokens: model(tokens)
    head = swjax.quantized(call, {"embed/embedding": "switchback"}).report(model, tokens)
    assert head.share == 1
    assert [p.reason for p in head if not p.flops] == ["a lookup"]


def test_undone_however_often_it_was_done():
    model, plain = Model(nnx.Rngs(0)), Model(nnx.Rngs(0))
    for recipe in ("switchback", "llm_int8", "switchback_q"):
        swjax.nnx.quantize_model(model, {".*": recipe})
        assert model.ours.recipe is RECIPES[recipe]
        assert nnx.graphdef(model) != nnx.graphdef(plain)
    assert jnp.any(model(X) != plain(X))
    for _ in range(2):
        assert swjax.nnx.restore_model(model) is model
        assert nnx.graphdef(model) == nnx.graphdef(plain)
        assert model.own.dot_general is lax_dot_general
    assert jnp.all(model(X) == plain(X))
    assert model.ours.recipe is RECIPES["switchback_m"]


class OwnLayer(nnx.Module):
    """A layer of a model's own with a `dot_general`, whose weight is not called `kernel`."""

    def __init__(self, rngs):
        self.w = nnx.Param(rngs.params.normal((8, 4)))
        self.dot_general = lax_dot_general

    def __call__(self, x):
        return self.dot_general(x, self.w[...], (((1,), (0,)), ((), ())))


def test_a_layer_of_the_models_own_is_converted_and_restored():
    model = nnx.Sequential(OwnLayer(nnx.Rngs(0)))
    before = model(X)
    swjax.nnx.quantize_model(model, {"layers/0": "switchback"})
    (matrix,) = swjax.nnx.describe_model(model)
    assert (matrix.name, matrix.recipe) == ("w", RECIPES["switchback"])
    assert jnp.all(model(X) == swjax.switchback(X, model.layers[0].w[...]))
    assert jnp.all(swjax.nnx.restore_model(model)(X) == before)


def test_options_of_the_product_that_a_recipe_replaces_are_kept():
    """Heads in bfloat16 whose logits are float32: they became bfloat16."""
    product = partial(jax.lax.dot_general, preferred_element_type=jnp.float32)
    options = {"dtype": "bfloat16", "use_bias": False, "dot_general": product}
    head = nnx.Linear(8, 4, rngs=nnx.Rngs(0), **options)
    mlp = GatedMLP(nnx.Rngs(0), **options)
    swjax.nnx.quantize_model(nnx.List([head, mlp]), {".*": "switchback"})
    (together,) = swjax.nnx.linears((head,), X)
    assert head(X).dtype == together.dtype == mlp(X).dtype == jnp.float32
    layer, want = nn.Dense(4, **options), swjax.dot_general("switchback")
    params = layer.init(jax.random.key(0), X)
    with swjax.linen.quantized({".*": "switchback"}):
        got = layer.apply(params, X)
    x, w = (a.astype("bfloat16") for a in (X, params["params"]["kernel"]))
    want = want(x, w, (((X.ndim - 1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    assert got.dtype == jnp.float32 and jnp.all(got == want)

    own = lambda *args, **options: jax.lax.dot_general(*args, **options).astype(jnp.float32)
    head = nnx.Linear(8, 4, dot_general=own, rngs=nnx.Rngs(0))
    layer = nn.Dense(4, use_bias=False, dot_general=own)
    with pytest.warns(UserWarning, match="'head' replaces its product '<lambda>' of test_conv"):
        swjax.nnx.quantize_model(nnx.Dict(head=head, mlp=mlp), {".*": "switchback"})
    with pytest.warns(UserWarning, match="replaces its product"):
        with swjax.linen.quantized({".*": "switchback"}):
            layer.apply(params, X)


def test_equal_conversions_share_a_compiled_program():
    first, second = (Model(nnx.Rngs(seed)) for seed in range(2))
    for model in (first, second):
        swjax.nnx.quantize_model(model, {"plain": "switchback"})
    assert nnx.graphdef(first) == nnx.graphdef(second)
    assert hash(nnx.graphdef(first)) == hash(nnx.graphdef(second))


def test_nothing_is_converted_when_something_is_wrong():
    class DotGeneral:
        def __call__(self, *args, **kwargs):
            return jax.lax.dot_general(*args, **kwargs)

    model = nnx.Sequential(
        nnx.Linear(8, 8, rngs=nnx.Rngs(0)),
        nnx.LinearGeneral(8, 8, dot_general_cls=DotGeneral, rngs=nnx.Rngs(0)),
    )
    graph = nnx.graphdef(model)
    message = "layer 'layers/1' has a dot_general_cls, which overrides any dot_general: build it"
    for rules, error in (
        ({"layers/.*": "switchback"}, message),
        ({"layers/0": "switchback", "layers/1": "swichback"}, "recipe must be one of"),
        (
            {"layers/0": "switchback", "layers/2": "switchback"},
            "'layers/2' matches no linear layer",
        ),
    ):
        with pytest.raises(ValueError, match=error):
            swjax.nnx.quantize_model(model, rules)
        assert nnx.graphdef(model) == graph
    dense = nn.Dense(8, dot_general_cls=DotGeneral)
    params = dense.init(jax.random.key(0), X)
    with pytest.raises(ValueError, match="has a dot_general_cls, which overrides"):
        with swjax.linen.quantized({".*": "switchback"}):
            dense.apply(params, X)


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = swjax.linen.Dense(8, recipe="switchback_m", name="ours")(nn.Dense(8, name="plain")(x))
        x = nn.DenseGeneral((2, 4), name="general")(x).reshape(x.shape)
        x = x @ self.param("mixing", nn.initializers.ones, (8, 8))
        return x + nn.Embed(5, 8, name="table")(jnp.array([1]))


PRODUCTS = {
    "standard": "fwd not quantized, dgrad not quantized, wgrad not quantized",
    "switchback_hadamard": """fwd int8 row x int8 tensor, dgrad int8 row x int8 tensor,
        wgrad int8 block x int8 block (1024 tokens, rotation 128)""",
    "llm_int8_outlier6": """fwd int8 row x int8 channel (features from 6 not quantized),
        dgrad int8 row x int8 channel,
        wgrad int8 row x int8 channel (features from 6 not quantized)""",
}


@pytest.mark.parametrize("recipe", PRODUCTS)
def test_linen_says_the_same(recipe):
    model = LinenModel()
    params = jax.jit(model.init)(jax.random.key(0), X)
    apply = lambda: np.asarray(jax.jit(lambda params: model.apply(params, X))(params))
    before = apply()
    with swjax.linen.quantized({"plain|ours": recipe}) as conversion:
        for _ in range(2):  # every matrix has one row, however often the model is called
            jax.eval_shape(model.apply, params, X)
        converted = apply()
    count, elements = (
        (0, "0 of 296 elements (0%)") if recipe == "standard" else (2, "128 of 296 elements (43%)")
    )
    table = f"""
        plain    Dense.kernel         8 x 8      {recipe}
        ours     Dense.kernel         8 x 8      {recipe}
        general  DenseGeneral.kernel  8 x 2 x 4  -             no expression matches its path
        table    Embed.embedding      5 x 8      -             takes no dot_general
        .        LinenModel.mixing    8 x 8      -             takes no dot_general
        {count} of 5 matrices converted, {elements}
        {recipe}: {PRODUCTS[recipe]}
        1 that LinenModel may multiply: only swjax.quantized(model.apply, "llm") converts them"""
    assert str(conversion).split() == table.split()
    assert np.any(converted != before)
    assert np.all(apply() == before)
    with swjax.linen.quantized({"plain": recipe}) as conversion:
        jax.eval_shape(model.apply, params, X)
    assert [m.recipe for m in conversion if m.path == "ours"] == [RECIPES["switchback_m"]]


def linen_rows(model, recipes, *args, **kwargs):
    """The report on a Linen model: path, name, shape, whether it has a recipe, and reason of each matrix."""
    params = jax.eval_shape(model.init, jax.random.key(0), X)
    with swjax.linen.quantized(recipes) as conversion:
        jax.eval_shape(lambda params: model.apply(params, X, *args, **kwargs), params)
    return [(m.path, m.name, m.shape, m.recipe is not None, m.reason) for m in conversion]


def test_linen_lists_a_product_that_model_code_gives():
    product = swjax.dot_general("switchback")
    attention = nn.MultiHeadDotProductAttention(2, qkv_dot_general=product)
    rows = linen_rows(attention, {"out": "llm_int8"})
    assert {path: converted for path, _, _, converted, _ in rows} == dict.fromkeys(
        ("query", "key", "value", "out"), True
    )


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return nn.Dense(8, name="fc")(x), None


class LinenStacks(nn.Module):
    """Stacks along either axis, as in big_vision, whose blocks are in nn.remat, and in MaxText."""

    @nn.compact
    def __call__(self, x):
        split = {"params": True}
        for axis in (0, 1):
            stack = nn.scan(
                nn.remat(LinenBlock), variable_axes={"params": axis}, split_rngs=split, length=3
            )
            x, _ = stack(name=f"scan_{axis}")(x, None)
        heads = nn.vmap(
            nn.Dense, variable_axes={"params": 0}, split_rngs=split, in_axes=None, axis_size=5
        )
        return heads(4, name="vmap")(x)


def test_linen_lists_whole_stacks():
    """A layer in nn.scan or nn.vmap counts as often as it has parameters."""
    rows = linen_rows(LinenStacks(), {"scan_.*|vmap": "switchback"})
    assert rows == [
        ("scan_0/fc", "kernel", (3, 8, 8), True, ""),
        ("scan_1/fc", "kernel", (8, 3, 8), True, ""),
        ("vmap", "kernel", (5, 8, 4), True, ""),
    ]


class LinenOwn(nn.Module):
    """Layers of a model's own, with parameters in the scope of their parent, as in Gemma."""

    def setup(self):
        self.table = LinenTable()

    @nn.compact
    def __call__(self, x):
        weight = LinenWeight("gate")
        nn.share_scope(self, weight)
        return self.table.encode(jnp.array([1])) + weight(x)


class LinenWeight(nn.Module):
    weight: str

    @nn.compact
    def __call__(self, x):
        return jnp.einsum("...d,df->...f", x, self.param(self.weight, nn.initializers.ones, (8, 8)))


class LinenTable(nn.Module):
    def setup(self):
        self.rows = self.param("rows", nn.initializers.ones, (5, 8))

    def encode(self, x):
        return self.rows[x]


def test_a_model_without_layers_of_flax_is_refused():
    """The error names the way out, and the report has every matrix once."""
    with pytest.raises(ValueError, match="the model has none of Flax's: swjax.quantized"):
        linen_rows(LinenOwn(), {".*": "switchback"})
    own = nnx.Dict(weight=nnx.Param(jnp.ones((8, 8))))
    for rules in ("llm", {".*": "switchback"}):
        with pytest.raises(ValueError, match="swjax.quantized.* converts layers of any kind"):
            swjax.nnx.quantize_model(own, rules)
    assert linen_rows(LinenOwn(), {}) == [
        ("table", "rows", (5, 8), False, "takes no dot_general"),
        ("", "gate", (8, 8), False, "takes no dot_general"),
    ]


def test_an_nnx_module_in_linen_is_refused():
    """MaxText's Linen model is one NNX module; `swjax.nnx.quantize_model` converts those."""
    bridged = nnx.bridge.to_linen(nnx.Linear, 8, 4)
    with pytest.raises(ValueError, match="matches no linear layer"):
        linen_rows(bridged, {".*": "switchback"})
    assert linen_rows(bridged, {}) == [("", "kernel", (8, 4), False, "in an NNX module")]


def test_linen_and_nnx_are_told_apart():
    with pytest.raises(TypeError, match="the Linen module LinenModel: use swjax.linen.quantized"):
        swjax.nnx.quantize_model(LinenModel(), {".*": "switchback"})
    with pytest.raises(TypeError, match="needs an NNX model, got the Linen module"):
        swjax.nnx.describe_model(LinenModel())
    with pytest.warns(UserWarning, match="converts nothing: .*quantize_model converts NNX models"):
        with swjax.linen.quantized({"x|.*": "switchback"}) as conversion:
            Model(nnx.Rngs(0))(X)
    assert "no Linen module with matrices ran here" in str(conversion)
    assert str(swjax.nnx.describe_model(nnx.Dict())).endswith("0 elements (0%)")


def test_a_function_that_runs_after_its_context_is_told():
    """It computed in 16 bits, without a warning; one that was compiled in an equal context is converted."""
    model = nn.Dense(4)
    params = model.init(jax.random.key(0), jnp.ones((2, 8)))
    with pytest.warns(UserWarning, match="converts nothing: .* call the model inside the context"):
        with swjax.linen.quantized({"": "switchback"}, implementation="xla"):
            apply = jax.jit(model.apply)
    for _ in range(2):
        with swjax.linen.quantized({"": "switchback"}, implementation="xla"):
            swjax.testing.assert_quantized(apply, params, jnp.ones((2, 8)))
            apply(params, jnp.ones((2, 8)))


class LinenTowers(nn.Module):
    def setup(self):
        self.image, self.text = nn.Dense(8), LinenJitted()

    def __call__(self, x, towers="image text"):
        return sum(getattr(self, tower)(x) for tower in towers.split())


class LinenJitted(nn.Module):
    @nn.jit
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8, name="fc")(x)


def test_linen_code_that_does_not_run():
    """An unused tower or a compiled one is listed as such, and its expressions are not in error."""
    recipes = {"image": "switchback", "text/.*": "switchback"}
    image = ("image", "kernel", (8, 8), True, "")
    text = ("text/fc", "kernel", (8, 8), True, "")
    idle = (*text[:3], False, "its code did not run: unused, or compiled before")
    assert linen_rows(LinenTowers(), recipes, towers="image") == [image, idle]
    assert linen_rows(LinenTowers(), recipes) == [image, text]
    assert linen_rows(LinenTowers(), recipes) == [image, idle]  # nn.jit has compiled it
    with pytest.raises(ValueError, match="'txt/.*' matches no linear layer"):
        linen_rows(LinenTowers(), {"txt/.*": "switchback"})

    model = LinenTowers()
    params = model.init(jax.random.key(0), X)
    with swjax.linen.quantized({"image|text/.*": "switchback_q"}) as conversion:
        for towers in ("image", "text", "image text"):
            model.apply(params, X, towers)
    assert [(m.path, m.kind) for m in conversion] == [("image", "Dense"), ("text/fc", "Dense")]


# --- gated MLPs that are recognised -------------------------------------------------------------------


class GatedMLP(nnx.Module):
    def __init__(self, rngs, **options):
        for name, sizes in {"gate_proj": (8, 16), "up_proj": (8, 16), "down_proj": (16, 8)}.items():
            setattr(self, name, nnx.Linear(*sizes, rngs=rngs, **({"use_bias": False} | options)))
        self.factor = 1.0

    def __call__(self, x):
        return self.block(x) if self.factor == 1 else self.factor * self.block(x)

    def block(self, x):
        return self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x))


class InAnotherOrder(GatedMLP):
    """With the activation of the layer that is named up_proj."""

    def block(self, x):
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(gate * nnx.gelu(up))


class WithoutActivation(GatedMLP):
    def block(self, x):
        return self.down_proj(self.gate_proj(x) * self.up_proj(x))


class Sowing(GatedMLP):
    def block(self, x):
        gate = nnx.silu(self.gate_proj(x))
        self.sow(nnx.Intermediate, "gate", gate)
        return self.down_proj(gate * self.up_proj(x))


class Dropping(GatedMLP):
    def block(self, x):
        y = super().block(x)
        return y * jax.random.bernoulli(jax.random.key(0), 0.5, y.shape).astype(y.dtype)


def operations(model, x):
    with dispatch.record() as calls:
        jax.eval_shape(lambda x: model(x), x)
    return [name for name, _ in calls]


@pytest.mark.parametrize("kind", [GatedMLP, InAnotherOrder])
def test_gated_mlps_of_other_projects_are_recognised(kind):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 8)), jnp.float32)
    loss = lambda model: jnp.sum(jnp.sin(model.mlp(x)))
    model, alone = (nnx.Dict(mlp=kind(nnx.Rngs(0))) for _ in range(2))
    for each in (model, alone):
        swjax.nnx.quantize_model(each, {".*": "switchback"})
    nnx_blocks.restore(alone.mlp)
    assert "gated" in operations(model.mlp, x) and "gated" not in operations(alone.mlp, x)
    assert "\nfused gated MLPs: mlp\n" in str(swjax.nnx.describe_model(model))
    results = nnx.jit(lambda model: (model.mlp(x), nnx.grad(loss)(model)))
    both = (jax.tree.leaves(results(each)) for each in (model, alone))
    for got, want in zip(*both, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    # What the block computes is decided at each call.
    model.mlp.factor = 2.0
    assert "gated" not in operations(model.mlp, x)
    np.testing.assert_allclose(model.mlp(x), 2 * alone.mlp(x))
    model.mlp.factor = 1.0
    swjax.nnx.quantize_model(model, {"mlp/up_proj": "llm_int8"})
    assert "gated" not in operations(model.mlp, x)
    assert not swjax.nnx.describe_model(model).fused
    swjax.nnx.restore_model(model)
    assert type(model.mlp) is kind and nnx.graphdef(model) == nnx.graphdef(
        nnx.Dict(mlp=kind(nnx.Rngs(0)))
    )


@pytest.mark.parametrize(
    "make",
    [
        WithoutActivation,
        Sowing,
        Dropping,
        partial(GatedMLP, use_bias=True),
        lambda rngs: nnx.Dict(gate_proj=None),
    ],
)
def test_other_blocks_are_not(make):
    model = nnx.Dict(mlp=make(nnx.Rngs(0)), out_proj=nnx.Linear(8, 8, rngs=nnx.Rngs(0)))
    assert not swjax.nnx.describe_model(swjax.nnx.quantize_model(model, {".*": "switchback"})).fused


def test_a_layer_in_standard_is_not_counted_as_converted():
    model = nnx.Dict({name: nnx.Linear(8, 8, rngs=nnx.Rngs(0)) for name in ("a", "b")})
    swjax.nnx.quantize_model(model, {"a": "standard", "b": "switchback"})
    report = str(swjax.nnx.describe_model(model))
    assert "1 of 2 matrices converted, 64 of 128 elements (50%)" in report


def test_prequantized_gated_mlps_stay_fused():
    kinds, x = {"mlp": GatedMLP, "other": WithoutActivation}, X.astype(jnp.bfloat16)
    model = nnx.Dict({name: kind(nnx.Rngs(0), dtype=jnp.bfloat16) for name, kind in kinds.items()})
    want = swjax.nnx.quantize_model(model, {".*": "switchback"}).mlp(x)
    swjax.nnx.quantize_model(swjax.serving.prequantize(model), {".*": "switchback"})
    assert "gated" in operations(model.mlp, x)
    assert swjax.nnx.describe_model(model).fused == ["mlp"]
    np.testing.assert_array_equal(model.mlp(x), want)


def test_recognised_blocks_are_pickled_and_copied():
    model = swjax.nnx.quantize_model(GatedMLP(nnx.Rngs(0)), {".*": "switchback"})
    graphdef, state = nnx.split(model)
    copies = pickle.loads(pickle.dumps(model)), copy.deepcopy(model), nnx.clone(model)
    for each in (*copies, nnx.merge(pickle.loads(pickle.dumps(graphdef)), state)):
        assert type(each) is type(model)
        np.testing.assert_array_equal(each(X), model(X))


def test_stacks_of_gated_mlps_are_recognised():
    make = nnx.split_rngs(splits=3)(nnx.vmap(GatedMLP))
    model = swjax.nnx.quantize_model(make(nnx.Rngs(0)), {".*": "switchback"})
    assert swjax.nnx.describe_model(model).fused == [""]
    run = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    with dispatch.record() as calls:
        y = run(X, model)
    assert y.shape == X.shape and ("gated", "xla") in calls


def test_the_rules_of_language_models():
    """The head and the gate of experts stay in 16 bits, the gate of an MLP does not."""
    names = ("mlp_0/gate", "mlp_0/up", "experts/gate", "lm_head")

    class Model(nnx.Module):
        def __init__(self, rngs):
            linear = lambda: nnx.Linear(8, 8, rngs=rngs)
            self.mlp_0, self.experts = nnx.Dict(gate=linear(), up=linear()), nnx.Dict(gate=linear())
            self.lm_head = linear()

    model = swjax.nnx.quantize_model(Model(nnx.Rngs(0)), "llm")
    report = {matrix.path: matrix for matrix in swjax.nnx.describe_model(model)}
    recipes = [report[name].recipe for name in names]
    assert recipes == [RECIPES["switchback"], RECIPES["switchback"], None, None]
    reasons = [report[name].reason for name in names]
    assert reasons == ["", "", "the router stays in 16 bits", "the head stays in 16 bits"]
    swjax.nnx.quantize_model(model, {"lm_head": "llm_int8", "llm": "int8_hadamard"})
    by_path = {m.path: m.recipe for m in swjax.nnx.describe_model(model)}
    recipes = [by_path[name] for name in names]
    assert recipes == [RECIPES["int8_hadamard"]] * 2 + [None, RECIPES["llm_int8"]]

    class Experts(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones((8, 8, 8)))

    model.experts.stack = Experts()
    with pytest.warns(UserWarning, match="because Experts multiplies experts/stack/w itself"):
        swjax.nnx.quantize_model(model, "llm")
    with pytest.raises(TypeError, match=r"use swjax.quantized\(model.apply, \"llm\"\)"):
        with swjax.linen.quantized({"llm": "int8_hadamard"}):
            pass


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_a_conversion_of_only_routers_and_heads_warns(kind):
    """As in models whose other layers are code of their own."""

    class Mixture(nnx.Module):
        def __init__(self, rngs):
            self.router = nnx.Linear(8, 4, rngs=rngs)
            self.experts = nnx.Param(jnp.ones((4, 8, 8)))

        def __call__(self, x):
            return jnp.einsum("be,bd,edh->bh", self.router(x), x, self.experts[...])

    class Router(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(4, name="router")(x)

    def convert(rules):
        if kind == "nnx":
            swjax.nnx.quantize_model(Mixture(nnx.Rngs(0)), rules)
        else:
            with swjax.linen.quantized(rules):
                Router().init(jax.random.key(0), jnp.ones((2, 8)))

    with pytest.warns(UserWarning, match="only 'router', a router, an embedding or a head; print"):
        convert({".*": "switchback"})
    convert({".*": "standard"})  # warnings are errors
