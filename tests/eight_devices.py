"""Meshes of eight devices, sharded arrays and comparisons, shared by tests/test_sharded_*.py."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from micro_run import MICRO, ROOT
from numeric import floor_db, snr_db

import swjax
import swjax.losses
import swjax.nnx
from swjax import LayerNorm, Layout
from swjax.models import sharding
from swjax.training import config as config_lib
from swjax.training import setup
from swjax.training.optimizer import make_optimizer, make_schedule
from swjax.training.step import make_train_step

release = partial(pytest.param, marks=pytest.mark.release)


AXES = ("data", "fsdp", "tensor")


TOKENS, WHOLE = P(("data", "fsdp")), P()


BATCH, TOKENS_EACH, K, N = 8, 5, 48, 80  # so that no shard of a weight has 5 rows


# {name: (devices along data, fsdp and tensor, partition spec of w [k, n])}
CASES = {
    "data": ((8, 1, 1), P()),
    "fsdp_rows": ((1, 8, 1), P("fsdp")),
    "fsdp_columns": ((1, 8, 1), P(None, "fsdp")),
    "hybrid": ((2, 4, 1), P("fsdp")),
    "column": ((2, 1, 4), P(None, "tensor")),
    "row": ((2, 1, 4), P("tensor")),
    "fsdp_column": ((2, 2, 2), P("fsdp", "tensor")),
    "fsdp_row": ((2, 2, 2), P("tensor", "fsdp")),
    "fsdp_and_row_in_one": ((1, 4, 2), P(("tensor", "fsdp"))),
}


KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


def draw(*shape, seed=0, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def arrays(dtype="float32", k=K, n=N, batch=BATCH):
    """Returns x, w, bias and g; feature 1 of x is an outlier."""
    x = draw(batch, TOKENS_EACH, k, dtype=dtype).at[..., 1].multiply(8)
    w, bias = draw(k, n, seed=1) / np.sqrt(k), draw(n, seed=2)
    return x, w, bias, draw(batch, TOKENS_EACH, n, seed=3, dtype=dtype)


def make_mesh(sizes, kind=AxisType.Auto):
    return jax.make_mesh(sizes, AXES, axis_types=(kind,) * 3)


def put(array, mesh, spec=WHOLE):
    fitting = (
        axes if axes and size % np.prod([mesh.shape[a] for a in np.atleast_1d(axes)]) == 0 else None
        for axes, size in zip(spec, array.shape)
    )
    return jax.device_put(array, NamedSharding(mesh, P(*fitting)))


def gradients(layer, args, g):
    """Returns y and the gradients with respect to the layer's arguments."""
    y, vjp = jax.vjp(layer, *args)
    spec = jax.typeof(y).sharding.spec
    return y, *vjp(jax.reshard(g, spec) if any(spec) else g)


def sharded(case, kind="auto", **changes):
    """Returns the mesh of a case, its layout, and arguments sharded over it."""
    sizes, spec = CASES[case]
    mesh = make_mesh(sizes, KINDS[kind])
    x, w, bias, g = arrays(**changes)
    args = (
        put(x, mesh, TOKENS),
        put(w, mesh, spec),
        put(bias, mesh, P(*("tensor" for axis in spec[1:] if axis == "tensor"))),
    )
    return mesh, Layout(w=spec), args, put(g, mesh, TOKENS)


def compiled(fn, *args):
    """Returns the compiled program of fn, which tests run and whose text they inspect."""
    return jax.jit(fn).lower(*args).compile()


def compare(got, want, dtype="float32", exact=()):
    for i, (a, b) in enumerate(zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)):
        assert a.dtype == b.dtype and a.shape == b.shape
        if i in exact:
            np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
        assert snr_db(a, b) > floor_db(dtype, max(K, N)), i


@cache
def one_device(name, **changes):
    x, w, bias, g = arrays(**changes)
    return jax.jit(partial(gradients, partial(swjax.switchback, recipe=name)))((x, w, bias), g)


def mlp_arguments(mesh=None, dtype="bfloat16"):
    x, w1, b1, _ = arrays(dtype)
    w2, b2 = draw(N, K, seed=6) / np.sqrt(N), draw(K, seed=7)
    args, g = (
        (x, w1, b1, w2, b2, draw(K, seed=4), draw(K, seed=5)),
        draw(*x.shape, seed=8, dtype=dtype),
    )
    if mesh is None:
        return args, g
    specs = (TOKENS, P("fsdp", "tensor"), P("tensor"), P("tensor", "fsdp"), P(), P(), P())
    return tuple(put(a, mesh, spec) for a, spec in zip(args, specs)), put(g, mesh, TOKENS)


def mlp(layouts, x, w1, b1, w2, b2, scale, shift, **options):
    prologue = LayerNorm(scale, shift)
    return swjax.mlp(x, w1, b1, w2, b2, prologue=prologue, layouts=layouts, **options)


MLP_LAYOUTS = (Layout(P("fsdp", "tensor")), Layout(P("tensor", "fsdp")))


def train_program(**changes):
    """Returns the config, compiled program, state shapes, state and batch of a small CLIP's train step."""
    changes = MICRO | {"train.compilation_cache": ""} | changes
    pairs = [(key, str(value)) for key, value in changes.items()]
    config = config_lib.load(f"{ROOT}/configs/openmoji.py", pairs)
    mesh, cfg = setup.check_config(config)
    schedule = make_schedule(config, 6, 1)
    optimizer = make_optimizer(config, schedule)
    init, graphdef = setup.make_init(config, cfg, optimizer)
    like = sharding.abstract_state(jax.eval_shape(init), mesh)
    where = jax.tree.map(lambda x: x.sharding, like)
    rng, size = np.random.default_rng(0), config.train.batch_size
    batch = {
        "image": rng.integers(0, 256, (size, 16, 16, 3), np.uint8),
        "text": rng.integers(1, 100, (size, 8), np.int32),
        "label": np.arange(size, dtype=np.int32),
    }
    batch = sharding.shard_batch(batch, mesh)
    step = make_train_step(config, graphdef, optimizer, schedule)
    step = jax.jit(step, out_shardings=(where, None)).lower(like, batch).compile()
    state = lambda: jax.jit(init, out_shardings=where)()
    return config, cfg, step, like, state, batch


def loss_of(layer, g):
    return lambda x, w, bias: jnp.sum(layer(x, w, bias) * g)
