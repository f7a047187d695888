"""8-bit weights for inference: equal results, a quarter of the bytes, files and exported programs."""

import dataclasses
import json
import re
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import thinning
from clip_oracle import random_model, small_config
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file

import swjax
import swjax.linen
import swjax.nnx
from swjax import inference, serving
from swjax.inference.encoder import _config
from swjax.recipes import RECIPES, Product, Quantizer, Recipe
from swjax.serving import tensor_files
from swjax.testing import assert_quantized, assert_quantized_gathers, matrix_products

RNG = np.random.default_rng(0)


def normal(*shape, dtype="float32"):
    return jnp.asarray(RNG.normal(size=shape), dtype)


def same_bits(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


# --- one layer ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "recipe, dtype",
    [
        ("switchback", "float32"),
        ("switchback_m", "bfloat16"),
        ("fp8_switchback", "bfloat16"),
        ("switchback_q", "float32"),
    ],
)
def test_a_layer_computes_the_same(recipe, dtype):
    x, w, bias = normal(4, 6, 32, dtype=dtype), normal(32, 16), normal(16, dtype=dtype)
    g = normal(4, 6, 16, dtype=dtype)
    q = jax.jit(partial(swjax.quantize_weight, recipe=recipe))(w)

    @jax.jit
    def run(x, w, bias):
        y, vjp = jax.vjp(lambda x: swjax.switchback(x, w, bias, recipe=recipe), x)
        return y, vjp(g)[0]

    (y, dx), (y_q, dx_q) = run(x, w, bias), run(x, q, bias)
    same_bits(y, y_q)
    if recipe != "switchback_q":
        same_bits(dx, dx_q)
    else:  # switchback_q requantizes the 8-bit weight along its other axis
        assert jnp.linalg.norm(dx - dx_q) < 0.02 * jnp.linalg.norm(dx)


def test_an_mlp_with_its_prologue_computes_the_same():
    x, w1, w2, b1, b2 = normal(8, 32), normal(32, 64), normal(64, 32), normal(64), normal(32)
    norm = swjax.LayerNorm(normal(32), normal(32))

    @jax.jit
    def run(x, w1, w2):
        return jax.vjp(lambda x: swjax.mlp(x, w1, b1, w2, b2, prologue=norm), x)

    (y, vjp), (y_q, vjp_q) = run(x, w1, w2), run(x, *map(swjax.quantize_weight, (w1, w2)))
    same_bits(y, y_q)
    same_bits(vjp(y), vjp_q(y))


def test_a_quantized_weight_needs_a_matrix_for_each_entry_of_a_batch():
    q = swjax.quantize_weight(normal(32, 16))
    with pytest.raises(TypeError, match=r"batch dimensions to have the same .* \(2,\) and \(16,\)"):
        swjax.dot_general()(normal(2, 8, 32), q, (((2,), (0,)), ((0,), (1,))))


def test_weights_that_a_recipe_has_no_use_for():
    x, w = normal(8, 32), normal(32, 16)
    q = swjax.quantize_weight(w)
    for recipe, reason in (("standard", "multiplies w itself"), ("llm_int8_outlier6", "outliers")):
        with pytest.raises(ValueError, match=reason + r".*pass w itself"):
            swjax.quantize_weight(w, recipe)
        with pytest.raises(ValueError, match=reason):
            swjax.switchback(x, q, recipe=recipe)
    with pytest.raises(ValueError, match=r"must be int8 \[n, k\] with a scale \(16, 1\)"):
        swjax.switchback(x, q, recipe="switchback_q")
    with pytest.raises(ValueError, match=r"must be float8_e4m3fn .* got int8 \(16, 32\)"):
        swjax.switchback(x, q, recipe="fp8_switchback")
    with pytest.raises(ValueError, match=r"needs x \[\.\.\., k\] and w \[k, n\], got x \(8, 16\)"):
        swjax.switchback(x[:, :16], q)
    with pytest.raises(ValueError, match=r"quantize_weight needs w \[k, n\], got \(32,\)"):
        swjax.quantize_weight(w[:, 0])
    with pytest.raises(ValueError, match=r"w must be an array, got a list: pass jnp.asarray\(w\)"):
        swjax.quantize_weight([[1.0, 2.0]])
    with pytest.raises(ValueError, match="w must be an .* got a QTensor: it is quantized already"):
        swjax.quantize_weight(q)


def test_an_input_of_another_width_is_refused_as_by_jax():
    layer = nnx.Linear(32, 16, rngs=nnx.Rngs(0))
    swjax.nnx.quantize_model(layer, {"": "switchback"})
    for model in (layer, serving.prequantize(layer)):
        with pytest.raises(TypeError, match=r"dot_general requires .* got \(16,\) and \(32,\)"):
            model(normal(8, 16))


@pytest.mark.parametrize(
    "spec, recipe",
    thinning.thinned(
        [P("fsdp", None), P(None, "fsdp"), P("tensor", None), P(None, "tensor")],
        ["switchback", "switchback_q"],
        full=[],
    ),
)
def test_two_devices_compute_the_same(spec, recipe):
    """Weights sharded over "fsdp" are gathered in int8; those sharded over "tensor" are not gathered."""
    axis = "fsdp" if "fsdp" in spec else "tensor"
    mesh = jax.make_mesh((2,), (axis,), axis_types=(jax.sharding.AxisType.Auto,))
    layout = swjax.Layout(spec, P("fsdp"))
    x, w = normal(8, 32), normal(32, 16)
    expected = jax.jit(partial(swjax.switchback, recipe=recipe))(x, w)
    run = jax.jit(partial(swjax.switchback, recipe=recipe, layout=layout))
    with jax.set_mesh(mesh):
        q = jax.jit(partial(swjax.quantize_weight, recipe=recipe))(w)
        values = jax.device_put(q.values, jax.NamedSharding(mesh, P(*reversed(spec))))
        q = q._replace(values=values)
        if axis == "fsdp":
            assert_quantized_gathers(run, x, q, weights=[w.shape])
        np.testing.assert_allclose(run(x, q), expected, rtol=1e-6, atol=1e-5)


# --- models -------------------------------------------------------------------------------------------


class Model(nnx.Module):
    """A model with all kinds of linear layers: those that can be prequantized, and those that cannot."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap
        def stack(rngs):
            return swjax.nnx.Linear(16, 16, recipe="switchback_q", rngs=rngs)

        self.stack = stack(rngs)
        self.attention = nnx.MultiHeadAttention(4, 16, decode=False, rngs=rngs)
        self.cast = nnx.Linear(16, 16, dtype=jnp.bfloat16, rngs=rngs)  # casts its kernel too
        self.dropout = nnx.Dropout(0.5, deterministic=True, rngs=rngs)
        self.batched = nnx.LinearGeneral(16, 16, batch_axis={0: 2}, rngs=rngs)
        self.outliers = swjax.nnx.Linear(16, 16, recipe="llm_int8_outlier6", rngs=rngs)
        self.untouched = swjax.nnx.Linear(16, 4, recipe="mxfp8", rngs=rngs)  # weights in blocks
        swjax.nnx.quantize_model(self, {"cast|attention/.*|batched": "switchback"})

    def __call__(self, x):
        graph, state = nnx.split(self.stack)
        x, _ = jax.lax.scan(lambda x, layer: (nnx.merge(graph, layer)(x), None), x, state)
        x = self.dropout(self.cast(self.attention(x)).astype(x.dtype))
        return self.untouched(self.outliers(self.batched(x)))


KEPT = ("batched", "outliers", "untouched")


def test_a_model_computes_the_same():
    model = Model(nnx.Rngs(0))
    run, x = nnx.jit(lambda model, x: model(x)), normal(2, 5, 16)
    before, kernels = run(model, x), len(jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert serving.prequantize(model) is model
    same_bits(run(model, x), before)
    quantized = nnx.to_flat_state(nnx.state(model, serving.QuantizedKernel))
    assert len(list(quantized)) == 6
    assert len(jax.tree.leaves(nnx.state(model, nnx.Param))) == kernels - 6
    arrays = serving.weights(model)
    for name, array in arrays.items():
        if array.ndim > 1 and "bias" not in name and not name.startswith(KEPT):
            assert array.dtype == jnp.int8 or name.endswith("/scale"), name
    assert arrays["stack/kernel/scale"].shape == (3, 16, 1)
    assert arrays["attention/query/kernel/values"].shape == (4, 4, 16)
    products = matrix_products(run, model, x)
    assert products["s8", "s8"] + products["s32", "s32"] >= 6


def test_a_file_names_the_order_of_loading_and_prequantizing(tmp_path):
    def make():
        model = nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0)))
        return swjax.nnx.quantize_model(model, {".*": "switchback"})

    serving.save(tmp_path / "float.safetensors", make())
    for place in (tmp_path / "missing" / "x.safetensors", tmp_path):
        with pytest.raises(OSError, match=f"cannot write {place}: "):
            serving.save(place, make())
    assert not tmp_path.with_name(f"{tmp_path.name}.part").exists()
    with pytest.raises(ValueError, match="got two named 'a/b'"):  # one of them was lost
        serving.save(tmp_path / "x.safetensors", {"a/b": jnp.ones(2), "a": {"b": jnp.ones(2)}})
    serving.save(tmp_path / "int8.safetensors", serving.prequantize(make()))
    with pytest.raises(ValueError, match="so prequantize the model before loading"):
        serving.load(tmp_path / "int8.safetensors", make())
    with pytest.raises(ValueError, match="so prequantize after loading"):
        serving.load(tmp_path / "float.safetensors", serving.prequantize(make()))


def test_a_prequantized_model_is_not_restored():
    model = nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0)))
    swjax.nnx.quantize_model(model, {".*": "switchback"})
    x = jnp.ones((2, 8))
    y = serving.prequantize(model)(x)
    with pytest.raises(ValueError, match="'layers/0' is prequantized and has no float weights"):
        swjax.nnx.restore_model(model)
    assert jnp.array_equal(model(x), y)


def test_prequantized_kernels_are_described():
    rngs = nnx.Rngs(0)
    model = nnx.Dict(fc=swjax.nnx.Linear(16, 8, rngs=rngs), plain=nnx.Linear(8, 4, rngs=rngs))
    first, second, summary, _ = str(swjax.nnx.describe_model(serving.prequantize(model))).split(
        "\n"
    )
    assert first.split() == "fc Linear.kernel 8 x 16 switchback".split()
    assert second.split()[:2] == ["plain", "Linear.kernel"]
    assert summary == "1 of 2 matrices converted, 128 of 160 elements (80%)"


def test_a_report_of_a_prequantized_model_has_its_recipe():
    """The recipe was unknown, and so no input gradient was listed in 8 bits."""
    model = nnx.Sequential(nnx.Linear(16, 8, rngs=nnx.Rngs(0)))
    swjax.nnx.quantize_model(model, {".*": "int8_hadamard"})
    report = swjax.nnx.describe_model(serving.prequantize(model), jnp.ones((4, 16)))
    assert [product.recipe and product.recipe.name for product in report] == ["int8_hadamard"]
    assert (report.share, report.input_gradient_share, report.weight_gradient_share) == (1, 1, 0)


def test_a_model_is_prequantized_once():
    model = serving.prequantize(nnx.Dict(fc=swjax.nnx.Linear(16, 16, rngs=nnx.Rngs(0))))
    with pytest.raises(ValueError, match="got none with float weights: choose their recipes"):
        serving.prequantize(model)
    swjax.nnx.quantize_model(model, {"fc": "switchback_q"})
    with pytest.raises(ValueError, match=r"must be int8 \[n, k\] with a scale \(16, 1\)"):
        model.fc(normal(2, 16))


# --- Linen --------------------------------------------------------------------------------------------


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return swjax.linen.Dense(16, recipe="switchback_q", name="fc")(x), None


class LinenModel(nn.Module):
    """The same kinds of layers as in `Model`, in Linen."""

    @nn.compact
    def __call__(self, x):
        stack = nn.scan(
            LinenBlock, variable_axes={"params": 0}, split_rngs={"params": True}, length=3
        )
        x, _ = stack(name="stack")(x, None)
        x = x + nn.MultiHeadDotProductAttention(4, name="attention")(x)
        x = nn.Dense(16, dtype=jnp.bfloat16, use_bias=False, name="cast")(x).astype(x.dtype)
        x = nn.DenseGeneral(16, axis=-1, batch_dims=0, name="batched")(x)
        return nn.Dense(4, name="untouched")(
            swjax.linen.Dense(16, recipe="llm_int8_outlier6", name="outliers")(x)
        )


LINEN = LinenModel()


def predict(variables, x):
    with swjax.linen.quantized({"cast|attention/.*|batched": "switchback"}):
        return LINEN.apply(variables, x)


@pytest.fixture(scope="module")
def linen_variables():
    return jax.jit(LINEN.init)(jax.random.key(0), jnp.ones((2, 5, 16)))


def test_a_linen_model_computes_the_same(linen_variables):
    x = normal(2, 5, 16)
    small = serving.prequantize_variables(predict, linen_variables, x)
    run = jax.jit(predict)
    same_bits(run(small, x), run(linen_variables, x))
    changed = {
        name.removesuffix("/values").removesuffix("/kernel").removeprefix("params/")
        for name, array in serving.weights(small).items()
        if array.dtype == jnp.int8
    }
    attention = {f"attention/{name}" for name in ("query", "key", "value", "out")}
    assert changed == {"stack/fc", "cast", *attention}
    arrays = serving.weights(small)
    assert arrays["params/stack/fc/kernel/scale"].shape == (3, 16, 1)
    assert arrays["params/attention/query/kernel/values"].shape == (4, 4, 16)
    products = matrix_products(run, small, x)
    assert products["s8", "s8"] + products["s32", "s32"] >= 6
    with pytest.raises(ValueError, match="'attention/query' is .* and needs its recipe, but"):
        with swjax.linen.quantized({"cast": "switchback"}):
            jax.eval_shape(LINEN.apply, small, x)


class LoRA(nn.Dense):
    @nn.compact
    def __call__(self, x):
        y = super().__call__(x)
        a = self.param("a", nn.initializers.normal(1.0), (x.shape[-1], 2))
        return y + x @ a @ self.param("b", nn.initializers.normal(1.0), (2, self.features))


def test_the_code_of_a_subclass_of_dense_runs():
    x, layer = normal(4, 16), LoRA(8)
    variables, predict = layer.init(jax.random.key(0), x), partial(quantized, layer)
    small = serving.prequantize_variables(predict, variables, x)
    same_bits(jax.jit(predict)(small, x), jax.jit(predict)(variables, x))


class OwnKernel(nn.Dense):
    @nn.compact
    def __call__(self, x):
        w = self.param("kernel", self.kernel_init, (x.shape[-1], self.features))
        product = self.dot_general or jax.lax.dot_general
        return product(x, w, (((x.ndim - 1,), (0,)), ((), ())))


def test_a_subclass_that_reads_a_quantized_kernel_itself_is_one_line():
    x, layer = normal(4, 16), OwnKernel(8, use_bias=False)
    variables, predict = layer.init(jax.random.key(0), x), partial(quantized, layer)
    small = serving.prequantize_variables(predict, variables, x)
    with pytest.raises(ValueError, match="and OwnKernel reads it in code of its own: ") as error:
        predict(small, x)
    assert "\n" not in str(error.value)


def test_a_quantized_weight_of_several_axes_may_keep_its_one_scale():
    x, w = normal(6, 16), normal(16, 8)
    q = swjax.quantize_weight(w)
    shaped = q._replace(values=q.values.reshape(4, 2, 16))
    y = swjax.dot_general("switchback")(x, shaped, (((1,), (0,)), ((), ())))
    same_bits(y.reshape(6, 8), swjax.switchback(x, q))


def test_arrays_of_any_strides_are_saved(tmp_path):
    kernel = np.arange(6, dtype=np.float32).reshape(2, 3).T  # as an imported weight of PyTorch
    serving.save(tmp_path / "model.safetensors", {"params": {"kernel": kernel}})
    shapes = {"params": {"kernel": jax.ShapeDtypeStruct((3, 2), jnp.float32)}}
    loaded = serving.load(tmp_path / "model.safetensors", shapes)
    np.testing.assert_array_equal(loaded["params"]["kernel"], kernel)


@pytest.mark.release
def test_linen_through_a_file_and_a_program(linen_variables, tmp_path):
    pytest.importorskip("flatbuffers", reason="needs flatbuffers: pip install flatbuffers")
    x = normal(2, 5, 16)
    prequantize = partial(serving.prequantize_variables, predict)
    small = prequantize(linen_variables, x)
    serving.save(tmp_path / "model.safetensors", small)
    shapes = jax.eval_shape(lambda: prequantize(LINEN.init(jax.random.key(0), x), x))
    loaded = serving.load(tmp_path / "model.safetensors", shapes)
    same_bits(loaded, small)
    program = serving.export(predict, loaded, jax.ShapeDtypeStruct(x.shape, x.dtype))
    program = jax.export.deserialize(program.serialize())
    same_bits(program.call(serving.weights(small), x), jax.jit(predict)(linen_variables, x))


def test_linen_variables_that_cannot_be_prequantized():
    x, plain, ours = normal(2, 16), nn.Dense(8), swjax.linen.Dense(8)
    variables = ours.init(jax.random.key(0), x)
    small = serving.prequantize_variables(ours.apply, variables, x)
    cast = jax.tree.map(lambda w: w.astype(jnp.bfloat16), variables)
    for function, arrays, message in (
        (plain.apply, variables, "got none with float weights: apply the model within"),
        (ours.apply, small, "got none with float weights"),
        (ours.apply, cast, r"must be float32\[16, 8\] .*, got bfloat16\[16, 8\]: pass the"),
        (lambda v, x: ours.apply(v["ema"], x), {"ema": variables}, "got none: pass the model's"),
    ):
        inputs = x.astype(jnp.bfloat16) if arrays is cast else x
        with pytest.raises(ValueError, match=message):
            serving.prequantize_variables(function, arrays, inputs)


def quantized(model, variables, x):
    with swjax.linen.quantized({".*": "switchback"}):
        return model.apply(variables, x)


class Stack(nn.Module):
    axis: int

    @nn.compact
    def __call__(self, x):
        layer = lambda _, x, __: (nn.Dense(16, name="fc")(x), None)
        options = {"variable_axes": {"params": self.axis}, "split_rngs": {"params": True}}
        return nn.scan(layer, length=3, **options)(self, x, None)[0]


@pytest.mark.parametrize("axis", [0, 1])
def test_linen_stacks_on_any_axis(axis):
    x, model = normal(4, 16), Stack(axis)
    variables = model.init(jax.random.key(0), x)
    predict = partial(quantized, model)
    small = serving.prequantize_variables(predict, variables, x)
    assert small["params"]["fc"]["kernel"].values.shape == ((3, 16, 16), (16, 3, 16))[axis]
    same_bits(jax.jit(predict)(small, x), jax.jit(predict)(variables, x))


def test_a_stack_that_may_be_on_two_axes_is_refused():
    x, model = normal(4, 3), swjax.linen.Dense(8)
    variables = model.init(jax.random.key(0), x)
    stacked = jax.tree.map(lambda w: jnp.stack([w] * 3), variables)

    def predict(variables, x):
        return jax.vmap(model.apply, (0, None))(variables, x)

    with pytest.raises(ValueError, match=r"\[3, 3, 8\] may be stacked on axis \(0,\) or \(1,\)"):
        serving.prequantize_variables(predict, stacked, x)


class Normalized(nn.Module):
    norm: type
    options: dict

    @nn.compact
    def __call__(self, x):
        x = self.norm(nn.Dense(16, name="inner"))(x, **self.options)
        return nn.Dense(8, name="outer")(x)


@pytest.mark.parametrize(
    "norm, options", [(nn.WeightNorm, {}), (nn.SpectralNorm, {"update_stats": False})]
)
def test_kernels_that_another_module_normalizes_stay_float(norm, options):
    """A `QTensor` there failed at the next call."""
    x, model = normal(4, 16), Normalized(norm, options)
    variables = model.init(jax.random.key(0), x)
    predict = partial(quantized, model)
    small = serving.prequantize_variables(predict, variables, x)
    assert {name for name, array in serving.weights(small).items() if array.dtype == jnp.int8} == {
        "params/outer/kernel/values"
    }
    same_bits(jax.jit(predict)(small, x), jax.jit(predict)(variables, x))


@pytest.mark.parametrize("norm", [nnx.WeightNorm, nnx.SpectralNorm])
def test_nnx_kernels_that_another_module_normalizes_stay_float(norm):
    """The quantized kernel of the layer was no longer normalized, without a word."""
    make = lambda: nnx.Sequential(
        norm(nnx.Linear(16, 16, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1)),
        nnx.Linear(16, 8, rngs=nnx.Rngs(2)),
    )
    x = normal(4, 16)
    models = [swjax.nnx.quantize_model(make(), {".*": "switchback"}) for _ in range(2)]
    serving.prequantize(models[1])
    assert [name for name in serving.weights(models[1]) if "values" in name] == [
        "layers/1/kernel/values"
    ]
    same_bits(models[1](x), models[0](x))


def test_errors_of_an_exported_function_are_its_own():
    pytest.importorskip("flatbuffers", reason="needs flatbuffers: pip install flatbuffers")
    x = jax.ShapeDtypeStruct((4, 16), jnp.float32)
    with pytest.raises(ZeroDivisionError):
        serving.export(lambda model, x: 1 // 0, {"w": jnp.ones(3)}, x)
    with pytest.raises(ValueError, match="custom call") as error:
        serving.export(_raise_value_error, {"w": jnp.ones(3)}, x)
    assert str(error.value) == "a custom call of mine"
    kernel = lambda model, x: jax.ffi.ffi_call("a_kernel", jax.ShapeDtypeStruct(x.shape, x.dtype))(
        x
    )
    with pytest.raises(ValueError, match="must contain only XLA operations, got other kernels"):
        serving.export(kernel, {"w": jnp.ones(3)}, x)


def _raise_value_error(model, x):
    raise ValueError("a custom call of mine")


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "{"])
def test_malformed_metadata_are_one_line(tmp_path, text):
    path = tmp_path / "model.safetensors"
    tensor_files.write(path, {"w": np.zeros(3, np.float32)}, {"format": "swjax", "float8": text})
    with pytest.raises(ValueError, match="model.safetensors is damaged: .* it again") as error:
        serving.load(path, {"w": jnp.zeros(3)})
    assert "\n" not in str(error.value)


class Dropped(nnx.Module):
    def __init__(self):
        self.fc = swjax.nnx.Linear(16, 8, rngs=nnx.Rngs(0), recipe="switchback")
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.dropout(self.fc(x))

    def encode(self, x):
        return self(x)


def test_models_with_dropout_in_training_are_quantized():
    model, x = Dropped(), normal(4, 16)
    for function, *args in ((model, x), (model.encode, x), (lambda model, x: model(x), model, x)):
        assert_quantized(function, *args, count=1)


# --- CLIP ---------------------------------------------------------------------------------------------

OWN = Recipe(fwd=Product(Quantizer("int8", "row"), Quantizer("int8", "channel")))
CFG = small_config(
    recipe={"vision/.*": "switchback", "text/.*/mlp/.*": OWN},
    vision={"width": 32, "layers": 2, "heads": 4, "image_size": 32, "patch_size": 8},
    text={"layers": 1, "vocab_size": 49408},
)
IMAGES = [RNG.integers(0, 256, (32, 32, 3), np.uint8) for _ in range(4)]
TEXTS = ["a cat", "a dog"]


@pytest.fixture(scope="module")
def embeddings():
    encoder = inference.Encoder(nnx.merge(*random_model(CFG)), batch_size=4)
    return encoder.encode_image(IMAGES), encoder.encode_text(TEXTS)


@pytest.fixture(scope="module")
def encoder():
    model = serving.prequantize(nnx.merge(*random_model(CFG)))
    return inference.Encoder(model, batch_size=4)


def test_clip_embeds_the_same_in_a_quarter_of_the_bytes(encoder, embeddings):
    same_bits((encoder.encode_image(IMAGES), encoder.encode_text(TEXTS)), embeddings)
    plain = nnx.merge(*random_model(CFG))
    ratio = nbytes(encoder.model.vision.blocks) / nbytes(plain.vision.blocks)
    assert 0.25 < ratio < 0.3


def nbytes(model):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))


def test_clip_through_a_file(encoder, tmp_path):
    path = tmp_path / "clip.safetensors"
    inference.save(path, encoder)
    loaded = inference.load(path)
    assert loaded.cfg == encoder.cfg
    same_bits(serving.weights(loaded.model), serving.weights(encoder.model))
    assert nnx.graphdef(loaded.model) == nnx.graphdef(encoder.model)
    assert inference.load(path, attention="xla").cfg.attention == "xla"
    with pytest.raises(ValueError, match="is a file by swjax.inference.save and has its own"):
        inference.load(path, CFG)


@pytest.mark.release
def test_clip_is_prequantized_as_it_is_loaded(encoder, tmp_path):
    inference.save(tmp_path / "floats", inference.Encoder(nnx.merge(*random_model(CFG))))
    floats = inference.load(tmp_path / "floats")
    assert not nnx.state(floats.model, serving.QuantizedKernel)
    swjax.interop.save(tmp_path / "theirs", floats.model)
    loaded = inference.load(tmp_path / "theirs", CFG, prequantize=True)
    same_bits(serving.weights(loaded.model), serving.weights(encoder.model))
    with pytest.raises(ValueError, match="prequantize needs a model with quantized linear layers"):
        inference.load(tmp_path / "theirs", CFG, prequantize=True, recipe="standard")


ROTATED = {"vision/.*": "int8_hadamard", "text/.*/mlp/.*": OWN}  # the same shapes and dtypes


@pytest.mark.parametrize("recipe", ["standard", "llm_int8", ROTATED])
def test_a_prequantized_file_does_not_fit_another_recipe(recipe, encoder, tmp_path):
    path = tmp_path / "clip.safetensors"
    inference.save(path, encoder)
    given = re.escape(f"recipe={recipe!r}")
    with pytest.raises(ValueError, match=f"prequantized weights .* {given}: leave that out"):
        inference.load(path, recipe=recipe)


def test_other_libraries_get_no_prequantized_weights(encoder, tmp_path):
    """The file would lack the kernels of the linear layers."""
    with pytest.raises(ValueError, match="open_clip needs float weights, got a prequantized model"):
        swjax.interop.save(tmp_path, encoder.model)


def test_files_of_other_models(encoder, tmp_path):
    path = tmp_path / "clip.safetensors"
    inference.save(path, encoder)
    with pytest.raises(ValueError, match="was saved by swjax, .* give what it was saved"):
        swjax.interop.load(path)
    with pytest.raises(ValueError, match=r"'blocks/attn/k/bias' is None .* float32\[2, 32\] here"):
        serving.load(path, encoder.model.vision)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match="is not a complete safetensors file"):
        inference.load(path)
    assert [file.name for file in tmp_path.iterdir()] == ["clip.safetensors"]


def test_a_file_without_a_model_configuration_is_not_loaded(tmp_path):
    file = tmp_path / "model.safetensors"
    serving.save(file, nnx.Linear(4, 3, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="file by swjax.serving.save, .* to swjax.serving.load"):
        inference.load(file)


@pytest.mark.parametrize("recipe", ["switchback", "fp8_switchback"])
@pytest.mark.release
def test_every_dtype_goes_through_a_file_and_a_program(recipe, tmp_path):
    pytest.importorskip("flatbuffers", reason="needs flatbuffers: pip install flatbuffers")
    path, x = tmp_path / "model.safetensors", normal(2, 32, dtype="bfloat16")

    def make():
        fc = swjax.nnx.Linear(32, 16, recipe=recipe, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        half = nnx.Linear(16, 4, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(1))
        return serving.prequantize(nnx.Sequential(fc, half))

    run = nnx.jit(lambda model, x: model(x))
    expected = run(make(), x)
    serving.save(path, make())
    same_bits(run(serving.load(path, nnx.eval_shape(make)), x), expected)
    program = serving.export(run, make(), jax.ShapeDtypeStruct(x.shape, x.dtype))
    same_bits(program.call(load_file(path), x), expected)


def test_a_float8_format_is_not_read_as_another(tmp_path):
    """A file stores both as bytes, which decode to other weights in the other format."""

    def make(dtype):
        recipe = Recipe(fwd=Product(Quantizer(dtype, "row"), Quantizer(dtype, "tensor")))
        return serving.prequantize(swjax.nnx.Linear(8, 4, recipe=recipe, rngs=nnx.Rngs(0)))

    serving.save(tmp_path / "a", make("float8_e5m2"))
    serving.load(tmp_path / "a", make("float8_e5m2"))
    said = r"is float8_e5m2\[4, 8\] in the file and float8_e4m3fn\[4, 8\] here"
    with pytest.raises(ValueError, match=said):
        serving.load(tmp_path / "a", make("float8_e4m3fn"))


@pytest.mark.release
def test_clip_through_orbax(encoder, tmp_path):
    """Orbax saves and restores QTensors as part of the tree."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "model", nnx.to_pure_dict(nnx.state(encoder.model)))
    shapes = nnx.eval_shape(lambda: serving.prequantize(nnx.merge(*random_model(CFG))))
    graph, state = nnx.split(shapes)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), nnx.to_pure_dict(state)
    )
    with ocp.StandardCheckpointer() as checkpointer:
        nnx.replace_by_pure_dict(state, checkpointer.restore(tmp_path / "model", like))
    same_bits(serving.weights(nnx.merge(graph, state)), serving.weights(encoder.model))


FRESH = """
import sys
from pathlib import Path
import jax, numpy as np
from safetensors.numpy import load_file
folder = Path(sys.argv[1])
inputs = np.load(folder / "inputs.npz")
weights, vectors = load_file(folder / "model.safetensors"), {}
for name in ("encode_image", "encode_text"):
    program = jax.export.deserialize(bytearray((folder / f"{name}.jax").read_bytes()))
    assert program.platforms == ("cpu", "cuda")
    assert "i8>, tensor" in program.mlir_module()
    vectors[name] = program.call(weights, inputs[name])
assert not {"swjax", "flax"} & sys.modules.keys()
np.savez(folder / "vectors.npz", **vectors)
"""


@pytest.mark.release
def test_a_program_runs_without_this_library(encoder, embeddings, tmp_path):
    pytest.importorskip("flatbuffers", reason="needs flatbuffers: pip install flatbuffers")
    inference.export(tmp_path, encoder)
    tokens = swjax.data.tokenize(TEXTS, CFG.text.context_length)
    np.savez(tmp_path / "inputs.npz", encode_image=np.stack(IMAGES), encode_text=tokens)
    subprocess.run([sys.executable, "-c", FRESH, tmp_path], check=True, cwd=tmp_path)
    images, texts = embeddings
    with np.load(tmp_path / "vectors.npz") as vectors:
        same_bits(vectors["encode_image"], images)
        # Texts are normalised twice.
        np.testing.assert_allclose(vectors["encode_text"], texts, rtol=1e-6)


def test_any_recipe_goes_through_json():
    for recipe in (*RECIPES, *RECIPES.values(), {"text/.*": OWN, ".*": "standard"}):
        cfg = small_config(recipe=recipe)
        text = json.dumps(dataclasses.asdict(cfg))
        assert _config(json.loads(text)) == cfg
