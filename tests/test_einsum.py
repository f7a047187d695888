"""Einsums with a recipe: `DotGeneral.einsum`, `flax.nnx.Einsum` and `flax.linen.Einsum`."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import thinning
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from numeric import snr_db

import swjax
import swjax.linen
import swjax.nnx
from swjax.diagnostics import taps

# (equation, shape of the activation, of the kernel, of the bias)
CASES = [
    ("btd,dnh->btnh", (2, 6, 32), (32, 4, 8), (4, 8)),
    ("BTD,NDH->BNTH", (2, 6, 32), (4, 32, 8), None),
    ("btnh, nhd -> btd", (2, 6, 4, 8), (4, 8, 32), (32,)),
    ("btnh,hnd->btd", (2, 6, 4, 8), (8, 4, 32), None),
    ("...d,df->...f", (2, 3, 32), (32, 8), (8,)),
    ("ebd,edf->ebf", (3, 8, 32), (3, 32, 16), None),  # three experts
    ("bed,edf->bfe", (8, 3, 32), (3, 32, 16), None),
]


def arrays(x_shape, w_shape):
    x, w = jax.random.split(jax.random.key(0))
    return jax.random.normal(x, x_shape), jax.random.normal(w, w_shape)


@pytest.mark.parametrize(("equation", "x_shape", "w_shape", "_"), CASES)
def test_products_and_gradients_are_those_of_einsum(equation, x_shape, w_shape, _):
    x, w = arrays(x_shape, w_shape)
    g = jax.random.normal(jax.random.key(1), jnp.einsum(equation, x, w).shape)

    @partial(jax.jit, static_argnums=0)
    def results(einsum):
        y, vjp = jax.vjp(lambda x, w: einsum(equation, x, w), x, w)
        return y, *vjp(g)

    exact = results(jnp.einsum)
    for value, want in zip(results(swjax.dot_general("standard").einsum), exact):
        np.testing.assert_allclose(value, want, rtol=1e-4, atol=1e-4)
    y, dx, dw = results(swjax.dot_general("switchback").einsum)
    assert 30 < snr_db(y, exact[0]) < 60
    assert 30 < snr_db(dx, exact[1]) < 60
    np.testing.assert_allclose(dw, exact[2], rtol=1e-4, atol=1e-4)


def test_numpy_s_optimize_changes_nothing():
    x, w = jnp.ones((2, 3)), jnp.ones((3, 4))
    einsum = swjax.dot_general("switchback").einsum
    y = einsum("ik,kj->ij", x, w, optimize=True)
    np.testing.assert_array_equal(y, einsum("ik,kj->ij", x, w))


def test_experts_have_their_own_scales():
    x, w = arrays((2, 4, 32), (2, 32, 16))
    w = w.at[0].multiply(1000.0)
    y = swjax.dot_general("switchback").einsum("ebd,edf->ebf", x, w)
    assert (y[1] == swjax.switchback(x[1], w[1])).all()


@pytest.mark.parametrize(("equation", "x_shape", "w_shape", "b_shape"), thinning.first(CASES, 3))
def test_flax_modules_are_converted_and_restored(equation, x_shape, w_shape, b_shape):
    x, w = arrays(x_shape, w_shape)
    bias = None if b_shape is None else jax.random.normal(jax.random.key(2), b_shape)
    layer = nnx.Einsum(equation, w_shape, b_shape, rngs=nnx.Rngs(0))
    layer.kernel[...] = w
    if bias is not None:
        layer.bias[...] = bias
    before = layer(x)
    swjax.nnx.quantize_model(model := nnx.Dict(layer=layer), {"layer": "switchback"})
    after = layer(x)
    assert 30 < snr_db(after, before) < 60
    assert [matrix.recipe for matrix in swjax.nnx.describe_model(model)] == [layer_recipe(model)]

    module = nn.Einsum(w_shape, equation, use_bias=bias is not None)
    params = {"params": {"kernel": w} | ({} if bias is None else {"bias": bias})}
    with swjax.linen.quantized({"": "switchback"}) as conversion:
        np.testing.assert_array_equal(module.apply(params, x), after)
        initial, _ = module.init_with_output(jax.random.key(0), x)
    assert initial.shape == after.shape
    assert [matrix.recipe.wgrad for matrix in conversion] == [None]

    swjax.nnx.restore_model(model)
    assert layer.einsum_op is jnp.einsum
    np.testing.assert_array_equal(layer(x), before)


def layer_recipe(model):
    return swjax.nnx.product_of(model.layer).recipe


def test_an_equation_given_in_the_call():
    x, w = arrays((2, 32), (32, 8))
    params = {"params": {"kernel": w}}
    layer = nn.Einsum((32, 8), use_bias=False)
    with swjax.linen.quantized({"": "switchback"}):
        assert (layer.apply(params, x, "bd,df->bf") == swjax.switchback(x, w)).all()


def test_a_product_given_to_the_module_is_described():
    rngs = nnx.Rngs(0)
    product = swjax.dot_general("llm_int8")
    model = nnx.Dict(
        einsum=nnx.Einsum("bd,df->bf", (8, 8), einsum_op=product.einsum, rngs=rngs),
        linear=nnx.Linear(8, 8, dot_general=product, rngs=rngs),
    )
    described = str(swjax.nnx.describe_model(model)).split("\n")
    assert [line.split()[-1] for line in described[:2]] == ["llm_int8"] * 2


@pytest.mark.parametrize("equation", thinning.first(["btd,ndh->nbth", "btd,ndh->btnh"]))
def test_health_is_that_of_the_product_of_matrices(equation):
    x, w = arrays((2, 6, 32), (4, 32, 8))
    layer = nnx.Einsum(equation, w.shape, rngs=nnx.Rngs(0))
    linear = swjax.nnx.Linear(32, 32, use_bias=False, rngs=nnx.Rngs(0))
    layer.kernel[...], linear.kernel[...] = w, w.transpose(1, 0, 2).reshape(32, 32)
    swjax.nnx.quantize_model(model := nnx.Dict(layer=layer), {"layer": "switchback"})
    loss = lambda model, x: jnp.sum(model.layer(x) ** 2)
    measured = lambda model: jax.jit(lambda x: taps.measure(loss, model, x))(x)
    found, want = measured(model), measured(nnx.Dict(layer=linear))
    assert found.keys() == want.keys() and len(found) == 9
    for name, value in want.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-3, atol=1e-6, err_msg=name)


@pytest.mark.release
def test_health_of_experts_is_summed_over_them():
    x, w = arrays((2, 8, 32), (2, 32, 16))
    layer = nnx.Einsum("ebd,edf->ebf", w.shape, rngs=nnx.Rngs(0))
    swjax.nnx.quantize_model(model := nnx.Dict(layer=layer), {"layer": "switchback"})
    found = taps.measure(lambda model, x: jnp.sum(model.layer(x) ** 2), model, x)
    assert all(value.shape == () for value in found.values())
    assert 30 < found["quantization/sqnr_db/layer/w"] < 60


def test_on_a_mesh_with_explicit_axes():
    x, w = arrays((4, 6, 32), (32, 4, 8))
    product = swjax.dot_general("switchback")
    want = product.einsum("btd,dnh->btnh", x, w)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        sharded = jax.device_put(x, P("data")), jax.device_put(w, P(None, "data"))
        y = product.einsum("btd,dnh->btnh", *sharded, out_sharding=P("data"))
    assert jax.typeof(y).sharding.spec[0] == "data"
    np.testing.assert_allclose(y, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "equation, x_shape, w_shape, x_spec, w_spec",
    [
        ("btd,cndh->cbtnh", (2, 6, 32), (3, 4, 32, 8), P(), P(None, "x")),
        ("btf,cfh->cbth", (2, 6, 32), (2, 32, 8), P(), P(None, None, "x")),
        ("btd,dnh->btnh", (2, 6, 32), (32, 4, 8), P(), P(None, None, "x")),
        ("btnh,nhd->btd", (2, 6, 4, 8), (4, 8, 32), P(None, None, None, "x"), P(None, "x")),
    ],
)
def test_any_merged_dimension_may_be_sharded_explicitly(equation, x_shape, w_shape, x_spec, w_spec):
    """As in Gemma's products of queries, keys and values, where jax.numpy.einsum works too."""
    x, w = arrays(x_shape, w_shape)
    product = swjax.dot_general("switchback")

    def results(x, w):
        y, vjp = jax.vjp(lambda x, w: product.einsum(equation, x, w), x, w)
        return y, *vjp(jnp.sin(y))

    want = jax.jit(results)(x, w)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        sharded = jax.device_put(x, x_spec), jax.device_put(w, w_spec)
        got = jax.jit(results)(*sharded)
        if x_spec == P():  # with sharded sums jax.numpy.einsum needs out_sharding
            plain = jax.eval_shape(lambda x, w: jnp.einsum(equation, x, w), *sharded)
            assert got[0].sharding.spec == plain.sharding.spec
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "w_spec", thinning.first([P(None, "x", "y"), P(None, "y", "x"), P(None, None, "x", "y")])
)
def test_several_columns_may_be_sharded_explicitly(w_spec):
    x, w = arrays((2, 6, 32), (32, 4, 2, 8))
    product = swjax.dot_general("switchback")
    want = product.einsum("btd,dcnh->btcnh", x, w)
    mesh = jax.make_mesh((2, 1), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        got = product.einsum("btd,dcnh->btcnh", jax.device_put(x, P()), jax.device_put(w, w_spec))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_different_sharded_sums_are_refused_in_one_line():
    x, w = arrays((2, 6, 4, 8), (4, 8, 32))
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x, w = jax.device_put(x, P(None, None, "x")), jax.device_put(w, P(None, "x"))
        with pytest.raises(ValueError, match="along the same contracted dimensions, got") as error:
            swjax.dot_general("switchback").einsum("btnh,nhd->btd", x, w)
    assert "\n" not in str(error.value)


class Scaled(nn.Einsum):
    @nn.compact
    def __call__(self, x):
        return super().__call__(x) * self.param("gain", nn.initializers.constant(3.0), ())


def test_the_code_of_a_subclass_runs():
    x, w = arrays((2, 32), (32, 8))
    layer = Scaled((32, 8), "bd,df->bf", use_bias=False)
    params = {"params": {"kernel": w, "gain": jnp.float32(2.0)}}
    with swjax.linen.quantized({"": "switchback"}) as conversion:
        y, vjp = jax.vjp(lambda params: layer.apply(params, x), params)
        assert layer.init(jax.random.key(0), x)["params"]["gain"] == 3
    np.testing.assert_array_equal(y, 2 * swjax.switchback(x, w))
    (gradient,) = vjp(jnp.ones_like(y))
    np.testing.assert_allclose(gradient["params"]["gain"], jnp.sum(y) / 2, rtol=1e-5)
    assert [matrix.recipe is not None for matrix in conversion] == [True]


class Own(nn.Einsum):
    @nn.compact
    def __call__(self, x):
        return x @ self.param("kernel", self.kernel_init, self.shape)


def test_a_subclass_with_a_product_of_its_own_is_not_listed_as_converted():
    x, layer = arrays((2, 32), (32, 8))[0], Own((32, 8), "bd,df->bf", use_bias=False)
    params = layer.init(jax.random.key(0), x)
    with swjax.linen.quantized({"": "switchback"}) as conversion:
        np.testing.assert_array_equal(layer.apply(params, x), x @ params["params"]["kernel"])
    assert "has code of its own" in str(conversion) and "0 of 1 matrices" in str(conversion)


@pytest.mark.parametrize("equation", ["bd,df->f", "bbd,df->bf", "bd,dfg->bf"])
def test_other_einsums_are_refused(equation):
    operands = (jnp.ones((4,) * len(part)) for part in equation.split("->")[0].split(","))
    with pytest.raises(ValueError, match=r"'.' is repeated or summed in one operand: exclude"):
        swjax.dot_general("switchback").einsum(equation, *operands)


def test_batch_dimensions_of_other_sizes_are_refused():
    """The sizes have the same product, so that a reshape of the weight would fit."""
    x, w, message = *arrays((2, 3, 6, 32), (3, 2, 32, 8)), r"got \(2, 3\) and \(3, 2\)"
    dimension_numbers = (((3,), (2,)), ((0, 1), (0, 1)))
    for product in (jax.lax.dot_general, swjax.dot_general("standard")):
        with pytest.raises(TypeError, match=message):
            product(x, w, dimension_numbers)
    with pytest.raises(TypeError, match=message):
        swjax.dot_general("switchback").einsum("abti,abij->abtj", x, w)


def test_a_recipe_without_an_expression_is_refused():
    message = "recipes must map regular expressions of layer paths to recipes, .* got 'switchback'"
    with pytest.raises(TypeError, match=message):
        swjax.nnx.quantize_model(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), "switchback")
    with pytest.raises(TypeError, match=message), swjax.linen.quantized("switchback"):
        pass
