"""Contrastive losses of a batch that is sharded over devices."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import thinning
from eight_devices import AXES, KINDS, TOKENS, WHOLE, compiled, draw, make_mesh, put
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import swjax
import swjax.losses
import swjax.nnx
from swjax.testing import collectives

pytestmark = pytest.mark.eight_devices

LOSSES = {"softmax": swjax.losses.softmax_contrastive, "sigmoid": swjax.losses.sigmoid_contrastive}


def full_matrix(name, image, text, log_scale, bias, labels):
    """Computes the losses from the whole similarity matrix; JAX differentiates them."""
    logits = jnp.exp(log_scale) * jnp.matmul(image, text.T, precision="highest")
    match = labels[:, None] == labels[None]
    if name == "sigmoid":
        logits = logits + bias
        return -jnp.mean(jnp.sum(jax.nn.log_sigmoid(jnp.where(match, logits, -logits)), axis=1))
    target = match.astype(jnp.float32) / jnp.sum(match, axis=1, dtype=jnp.float32)[:, None]
    log_p = (jax.nn.log_softmax(logits, axis=1) + jax.nn.log_softmax(logits, axis=0)) / 2
    return -jnp.mean(jnp.sum(target * log_p, axis=1))


def loss_arguments(batch=48):
    image, text = draw(batch, 24), draw(batch, 24, seed=1)
    text = text + image
    unit = lambda x: x / jnp.linalg.norm(x, axis=1, keepdims=True)
    labels = jnp.arange(batch) % (batch - 7)
    return unit(image), unit(text), jnp.float32(2.5), jnp.float32(-3), labels


def contrast(name, image, text, log_scale, bias, labels, **options):
    extra = (bias,) if name == "sigmoid" else ()
    return LOSSES[name](image, text, log_scale, *extra, labels=labels, **options)[0]


LOSS_CASES = (
    ((1, 1, 1), 48 * 48),
    ((2, 1, 1), 48 * 48),  # all-gather
    ((2, 2, 2), 12 * 24),  # pairs of devices all-gather, then exchange in a ring of two
    ((4, 2, 1), 6 * 6),  # eight hops
    ((1, 8, 1), 6 * 2),  # eight hops, each in three parts
)


@pytest.mark.parametrize(
    "name, sizes, pairs, kind",
    thinning.kept(
        [(name, *case, "auto") for name in LOSSES for case in LOSS_CASES]
        + [("softmax", *case, "explicit") for case in LOSS_CASES[::2]],
        [
            *(("softmax", *case, "auto") for case in LOSS_CASES[1::2]),
            *(("softmax", *case, "explicit") for case in LOSS_CASES[2::2]),
            ("sigmoid", *LOSS_CASES[4], "auto"),
        ],
    ),
)
def test_losses_are_those_of_the_whole_matrix(sizes, pairs, name, kind):
    args = loss_arguments()
    differentiate = lambda fn: jax.value_and_grad(fn, argnums=(0, 1, 2, 3))
    want = jax.jit(differentiate(partial(full_matrix, name)))(*args)
    devices = jax.devices()[: int(np.prod(sizes))]
    mesh = jax.make_mesh(sizes, AXES, axis_types=(KINDS[kind],) * 3, devices=devices)
    with jax.set_mesh(mesh):
        placed = [put(a, mesh, TOKENS if a.ndim else WHOLE) for a in args]
        fn = compiled(differentiate(partial(contrast, name, pairs=pairs)), *placed)
        got = fn(*placed)
        hops = 1 if pairs == 48 * 48 else {12 * 24: 2}.get(pairs, 8)
        found = {op for op, _, _ in collectives(fn)}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), got, want)
    assert got[1][0].sharding.is_equivalent_to(placed[0].sharding, 2)
    assert ("collective-permute" in found) == (hops > 1)
    assert ("all-gather" in found) == (len(devices) > 1 and hops < 8)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_need_no_more_memory_on_more_devices(name):
    """With 64 pairs a device, memory grows from one device to two by the ring's buffers, and then no more."""
    used = {}
    for devices in (1, 2, 8):
        mesh = jax.make_mesh(
            (devices,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices]
        )
        args = [put(a, mesh, P("data") if a.ndim else P()) for a in loss_arguments(64 * devices)]
        fn = jax.jit(jax.grad(partial(contrast, name, pairs=64 * 64), argnums=(0, 1, 2, 3)))
        used[devices] = fn.lower(*args).compile().memory_analysis().temp_size_in_bytes
    matrix = 4 * (64 * 8) ** 2
    assert used[1] <= used[2] == used[8] < matrix / 4, used


@pytest.mark.parametrize("name, kind", thinning.thinned(list(LOSSES), list(KINDS), full=[]))
def test_losses_for_several_scales_by_vmap(name, kind):
    images, texts, _, bias, labels = args = loss_arguments()
    scales = jnp.array([0.0, 1.0, 2.5])
    mapped = lambda fn: jax.vmap(jax.value_and_grad(fn, (0, 2)), (None, None, 0, None, None))
    want = mapped(partial(full_matrix, name))(images, texts, scales, bias, labels)
    mesh = jax.make_mesh((2, 4, 1), AXES, axis_types=(KINDS[kind],) * 3)
    with jax.set_mesh(mesh):
        placed = [put(a, mesh, TOKENS if a.ndim else WHOLE) for a in args]
        placed[2] = put(scales, mesh, WHOLE)
        got = jax.jit(mapped(partial(contrast, name)))(*placed)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), got, want)


def test_losses_of_a_batch_that_devices_do_not_divide():
    args, mesh = loss_arguments(13), make_mesh((2, 4, 1))
    with jax.set_mesh(mesh):
        got = jax.jit(partial(contrast, "softmax"))(*args)
    np.testing.assert_allclose(got, full_matrix("softmax", *args), rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", ["standard", "switchback"])
def test_cross_entropy_is_that_of_one_device(kind, recipe):
    """Rows of x are sharded, w on both axes; the chunks are along the sequence."""
    x, w = draw(8, 12, 16), draw(16, 32, seed=1)
    labels = jnp.arange(96).reshape(8, 12) % 32
    loss = partial(swjax.losses.linear_cross_entropy, chunk=4, recipe=recipe)
    differentiate = jax.value_and_grad(loss, argnums=(0, 1))
    want = jax.jit(differentiate)(x, w, labels)
    mesh = make_mesh((2, 2, 2), KINDS[kind])
    with jax.set_mesh(mesh):
        placed = [
            put(a, mesh, s) for a, s in ((x, TOKENS), (w, P("fsdp", "tensor")), (labels, TOKENS))
        ]
        got = compiled(differentiate, *placed)(*placed)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), got, want)
