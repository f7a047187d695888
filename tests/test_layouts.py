"""Errors of `Layout`, shardings under `jax.vmap`, and the XLA options for sharded programs."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import swjax
import swjax.linen
import swjax.nnx
from swjax import Layout
from swjax.linear.sharding import vary_alike
from swjax.models import sharding
from swjax.testing import assert_quantized_gathers


def options(platform, fsdp, **settings):
    device = SimpleNamespace(platform=platform, device_kind="H100" if platform == "gpu" else "cpu")
    abstract = SimpleNamespace(empty=False, abstract_device=device)
    mesh = SimpleNamespace(abstract_mesh=abstract, shape={"fsdp": fsdp})
    return sharding.compiler_options(mesh, **settings)


def test_xla_knows_the_options(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    every = options("gpu", 4, concurrent=True)
    assert len(every) == 4
    assert jax.jit(lambda x: x, compiler_options=every)(3) == 3


def test_the_options_of_a_step_on_gpus_unless_told_otherwise(monkeypatch):
    triton = "xla_gpu_enable_triton_gemm"
    gather, scatter = (
        f"xla_gpu_{op}_combine_threshold_bytes" for op in ("all_gather", "reduce_scatter")
    )
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert options("cpu", 4) == {}
    assert options("gpu", 1) == {triton: "False"}
    concurrent = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
    assert options("gpu", 1, concurrent=True) == {triton: "False"} | concurrent
    assert options("cpu", 1, concurrent=True) == {}
    assert options("gpu", 4) == {triton: "False", gather: "134217728", scatter: "134217728"}
    monkeypatch.setenv("XLA_FLAGS", f"--{gather}=31457280 --{triton}=true")
    assert options("gpu", 4) == {scatter: "134217728"}
    monkeypatch.setenv("XLA_FLAGS", f"--{gather}_of_another_option=1")
    assert options("gpu", 1) == {triton: "False"} and gather in options("gpu", 4)


def test_a_jax_without_the_axes_that_arrays_vary_over_is_named(monkeypatch):
    monkeypatch.setattr(jax, "typeof", lambda x: SimpleNamespace(shape=x.shape))
    with pytest.raises(RuntimeError, match=f"manual_axis_type, got {jax.__version__}: install"):
        vary_alike(np.ones(2))


def test_layouts_refuse_other_specs_and_dtypes_of_sums():
    with pytest.raises(ValueError, match="must be None or one of float32, .* got 'int4'"):
        Layout(reduce_dtype="int4")
    with pytest.raises(ValueError, match="tokens must be a .*PartitionSpec, got 'data': pass P"):
        Layout(tokens="data")
    with pytest.raises(ValueError, match="w must have the entries of one weight .*, got P.*'fsdp'"):
        Layout(jax.P(None, "fsdp", "tensor"))


@pytest.mark.parametrize("axes", [("data",), ("data", "tensor")])
@pytest.mark.parametrize("spec", [P("data"), P(None, "data")])
def test_vmap_over_an_axis_that_shards_w(axes, spec):
    """w is not an argument of the mapped function, so that its type keeps the axis."""
    x, w = jnp.arange(64.0).reshape(2, 4, 8), jnp.arange(64.0).reshape(8, 8)
    total = lambda x, w: jnp.sum(jax.vmap(lambda x: swjax.switchback(x, w))(x) ** 2)
    want = jax.jit(jax.grad(total, (0, 1)))(x, w)
    sizes = (2,) + (1,) * (len(axes) - 1)
    mesh = jax.make_mesh(sizes, axes, axis_types=(AxisType.Explicit,) * len(axes))
    with jax.set_mesh(mesh):
        x, w = jax.device_put(x, P("data")), jax.device_put(w, spec)
        got = jax.jit(jax.grad(total, (0, 1)))(x, w)
    for a, b in zip(got, want):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def named(*names):
    init = nnx.initializers.lecun_normal()
    return {"kernel_init": nnx.with_partitioning(init, names, eager_sharding=False)}


def test_kernels_of_several_axes_take_their_layout_from_flax():
    stack = nnx.split_rngs(splits=2)(
        nnx.vmap(lambda rngs: nnx.Linear(8, 8, rngs=rngs, **named("fsdp", "tensor")))
    )
    rngs = nnx.Rngs(0)
    general = nnx.LinearGeneral
    layers = {
        "stack": (stack(rngs), P("fsdp", "tensor")),
        "in": (general(8, (2, 4), rngs=rngs, **named("fsdp", "tensor", None)), P("fsdp", "tensor")),
        "out": (
            general((2, 4), 8, axis=(-2, -1), rngs=rngs, **named("tensor", None, "fsdp")),
            P("tensor", "fsdp"),
        ),
        "einsum": (
            nnx.Einsum("btd,ndh->btnh", (2, 8, 4), rngs=rngs, **named("tensor", "fsdp", None)),
            P("fsdp", "tensor"),
        ),
        "inner": (general(8, (2, 4), rngs=rngs, **named(None, None, "tensor")), None),
        "experts": (
            nnx.Einsum("ebd,edn->ebn", (2, 8, 4), rngs=rngs, **named("fsdp", None, None)),
            None,
        ),
        "plain": (nnx.Linear(8, 8, rngs=rngs), None),
    }
    model = nnx.Dict({name: layer for name, (layer, _) in layers.items()})
    swjax.nnx.quantize_model(model, {".*": "switchback"})
    for name, (layer, want) in layers.items():
        layout = swjax.nnx.product_of(layer).layout
        assert (layout and layout.w) == want, name
    reasons = {matrix.path: matrix.reason for matrix in swjax.nnx.describe_model(model)}
    falls_back = "no layout: XLA multiplies on meshes of type Auto"
    assert {path for path, reason in reasons.items() if reason == falls_back} == {
        "inner",
        "experts",
    }
    report = swjax.nnx.describe_model(nnx.Sequential(layers["inner"][0]), jnp.ones((2, 8)))
    assert [product.reason for product in report] == [falls_back]


def test_a_layout_from_the_sharding_of_the_array():
    mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(AxisType.Auto,))
    layer = nnx.LinearGeneral(8, (2, 4), use_bias=False, rngs=nnx.Rngs(0))
    x = jnp.arange(32.0).reshape(4, 8)
    want = swjax.switchback(x, layer.kernel[...].reshape(8, 8)).reshape(4, 2, 4)
    layer.kernel[...] = jax.device_put(layer.kernel[...], jax.NamedSharding(mesh, P(None, "fsdp")))
    swjax.nnx.quantize_model(layer, {".*": "switchback"})
    assert swjax.nnx.product_of(layer).layout == Layout(P(None, "fsdp"))
    with jax.set_mesh(mesh):
        run = jax.jit(lambda layer, x: layer(x))
        np.testing.assert_allclose(run(layer, x), want, rtol=1e-6)
        assert_quantized_gathers(run, layer, x, weights=[(8, 8)])


def test_linen_takes_it_from_boxes():
    mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(AxisType.Auto,))
    init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "fsdp"))
    model = nn.Dense(8, kernel_init=init)
    x = jnp.arange(32.0).reshape(4, 8)
    params = model.init(jax.random.key(0), x)

    def apply(params, x):
        with swjax.linen.quantized({".*": "switchback"}):
            return model.apply(params, x)

    want = apply(params, x)
    kernel = params["params"]["kernel"]
    array = jax.device_put(kernel.value, jax.NamedSharding(mesh, P(None, "fsdp")))
    params = {"params": params["params"] | {"kernel": kernel.replace_boxed(array)}}
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(jax.jit(apply)(params, x), want, rtol=1e-6)
        assert_quantized_gathers(jax.jit(apply), params, x, weights=[(8, 8)])
