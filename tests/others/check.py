"""Converts one project's model by `swjax.quantized` and checks it: ``check.py NAME`` prints a JSON row.

It runs in the environment of the project, see `projects.py`.
"""

import json
import re
import sys
import warnings
from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P
from projects import PROJECTS, Case

import swjax

LARGEST_ERROR = 0.05  # of the gradient of a leaf, relative norm
SMALLEST_LEAF = (
    1e-2  # of the largest norm: smaller leaves, such as biases of keys, are compared with that
)
STEPS = 5


def loss(apply, params, *inputs):
    """Cross-entropy of the next token, or the mean square of other outputs."""
    y, tokens = apply(params, *inputs).astype(jnp.float32), inputs[0]
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        return jnp.mean((y - 1) ** 2)
    losses = optax.softmax_cross_entropy_with_integer_labels(y[:, :-1], tokens[:, 1:])
    return losses.mean()


def is_trained(leaf) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.floating)


def value_and_grad(case: Case, apply):
    """The loss and the gradients of the floats among the parameters, and these floats."""
    leaves, tree = jax.tree.flatten(case.params)
    trained = [i for i, leaf in enumerate(leaves) if is_trained(leaf)]

    def of(floats, *inputs):
        whole = list(leaves)
        for i, leaf in zip(trained, floats):
            whole[i] = leaf
        return loss(apply, jax.tree.unflatten(tree, whole), *inputs)

    return jax.jit(jax.value_and_grad(of)), [leaves[i] for i in trained]


def largest_error(case: Case, got, want) -> tuple[float, str]:
    """The largest relative error of a leaf's gradient, and its path."""
    leaves = jax.tree_util.tree_leaves_with_path(case.params)
    paths = [jax.tree_util.keystr(path) for path, leaf in leaves if is_trained(leaf)]
    norms = [float(jnp.linalg.norm(w)) for w in want]
    floor = SMALLEST_LEAF * max(norms)
    errors = [float(jnp.linalg.norm(g - w)) / max(n, floor) for g, w, n in zip(got, want, norms)]
    return max(zip(errors, paths))


def train(step, floats, inputs) -> list[float]:
    optimizer, losses = optax.adamw(1e-3), []
    state = optimizer.init(floats)
    for _ in range(STEPS):
        value, grads = step(floats, *inputs)
        updates, state = optimizer.update(grads, state, floats)
        floats = optax.apply_updates(floats, updates)
        losses.append(float(value))
    return losses


def sharded(array, mesh):
    """FSDP and tensor parallelism of anything: the last axes that the devices divide."""
    spec: list[str | None] = [None] * array.ndim
    for name in reversed([axis for axis in mesh.axis_names if mesh.shape[axis] > 1]):
        free = [i for i, n in enumerate(array.shape) if n % mesh.shape[name] == 0 and not spec[i]]
        if array.ndim > 1 and free:
            spec[free[-1]] = name
    return jax.device_put(array, jax.NamedSharding(mesh, P(*spec)))


def check(name: str) -> dict:
    """Raises an AssertionError if something is wrong."""
    project = PROJECTS[name]
    case = project.make()
    int8 = swjax.quantized(jax.checkpoint(case.apply), case.rules)
    report = int8.report(case.params, *case.inputs)
    stays = [
        (p.path, p.reason)
        for p in report
        if p.path and p.flops and not p.quantized
        if not re.search("stays in 16 bits|^a convolution|^its rule is", p.reason)
        and not re.fullmatch(swjax.KEPT_IN_LLMS, p.path)  # MaxText's norms are einsums with 1 + w
    ]
    assert not stays, f"not in int8: {stays}"
    step, floats = value_and_grad(case, int8)
    plain, _ = value_and_grad(case, case.apply)
    value, grads = step(floats, *case.inputs)
    error, leaf = largest_error(case, grads, plain(floats, *case.inputs)[1])
    losses = train(step, floats, case.inputs)
    assert np.isfinite(losses).all() and losses[-1] < losses[0], f"losses {losses}"
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = case.mesh or jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=auto)
    only_value = jax.jit(lambda floats, *inputs: step(floats, *inputs)[0])
    on_mesh = only_value([sharded(leaf, mesh) for leaf in floats], *case.inputs)
    np.testing.assert_allclose(on_mesh, value, rtol=1e-3)
    assert error < LARGEST_ERROR, f"the gradient of {leaf} differs by {error:.1%}"
    return {
        "project": name,
        "version": f"{project.package} {version(project.package)}",
        "jax": jax.__version__,
        "share": round(report.share, 3),
        "products": len([p for p in report if p.quantized]),
        "error": round(error, 4),
        "losses": [round(each, 4) for each in losses],
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_default_matmul_precision", "highest")
    jax.config.update("jax_disable_most_optimizations", True)  # compilation dominates
    print(json.dumps(check(sys.argv[1])))
