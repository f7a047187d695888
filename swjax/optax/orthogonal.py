"""Muon for the weight matrices of hidden layers, and AdamW for the other parameters."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from swjax.optax.checks import rate_at, require_dtype, require_learning_rate, require_number
from swjax.optax.matrices import MatrixAxes, guess_matrices
from swjax.optax.newton_schulz import (
    CHOICES,
    STEPS,
    choose_coefficients,
    coefficients_of,
    orthogonalize,
)
from swjax.optax.stable import stable_adamw
from swjax.optax.tensors import (
    as_arrays,
    bools_like,
    cast_like,
    path_name,
    require_shapes,
    resolve_block_axes,
    resolve_mask,
)

SCALE = 0.2  # RMS of AdamW's updates, to which those of Muon are scaled


def muon(
    learning_rate: optax.ScalarOrSchedule,
    matrices: Any | Callable[[optax.Params], Any] = "auto",
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.99,
    eps: jax.typing.ArrayLike = 1e-6,
    weight_decay: jax.typing.ArrayLike = 1e-4,
    mask: Any | Callable[[optax.Params], Any] | None = None,
    *,
    momentum: jax.typing.ArrayLike = 0.95,
    dtype: jax.typing.DTypeLike = "float32",
    block_axes: Any | Callable[[optax.Params], Any] | None = None,
    coefficients: str = "auto",
    steps: int | None = None,
    neuron_b2: jax.typing.ArrayLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Muon for the weight matrices of hidden layers, and AdamW for the other parameters.

    The rows or the columns of an update of Muon are nearly orthonormal. The update is scaled to an RMS of
    about 0.2, that of AdamW's updates, if the gradient has full rank. So both parts use one learning rate.
    In two comparisons the best rate of Muon was three to four times that of AdamW.

    With `coefficients="quintic"` the Muon part is that of `optax.contrib.muon` with `consistent_rms=0.2`,
    apart from rounding and from matrices whose gradients are near 0, below 1e-7. Its products have operands
    of `dtype`. Matrices whose long side is at least 1.5 times the short one are iterated on their Gram
    matrix, which takes fewer products. On NVIDIA GPUs kernels compute one triangle of symmetric products of
    16 bits.

    On a mesh the devices share the matrices under `jax.jit`. Each device gathers a whole stack, in `dtype`,
    and orthogonalizes a part of its matrices. Single matrices of one shape and sharding are stacked for this.
    With explicit axes, every device computes a whole stack if the devices do not divide its matrices.
    optax's function keeps the sharding of the parameters: with data parallelism every device repeats all
    products, and with FSDP XLA gathers the intermediate results of each iteration. Inside `jax.shard_map` a
    matrix is the local shard: update the parameters outside `jax.shard_map`. On a mesh with automatic axes
    `jax.vmap` works without `spmd_axis_name`.

    The AdamW part is `stable_adamw` without clipping. That of `optax.contrib.muon` has Nesterov momentum and
    a weight decay of its own.

    Under `optax.inject_hyperparams` every number may be traced. List the other arguments that you pass in
    `static_args`: "matrices", "mask", "dtype", "block_axes" and "steps". For parameters below float32 add
    `hyperparam_dtype=jnp.float32`, because b2 = 0.999 rounds to 1 in bfloat16.

    Args:
      learning_rate: a number, at least 0, or a schedule of the number of previous steps.
      matrices: the parameters that Muon updates. "auto" guesses from names and Flax's metadata, also the axes
        of stacks and of attention's kernels of three axes, and prints once what it guessed, see
        `swjax.optax.matrices`. Or a tree of bools like the parameters, a prefix of it, or a
        function from the parameters to such a tree, which `flax.nnx.Optimizer` needs. They are matrices,
        [m, n], or stacks of matrices, whose other axes `block_axes` names. Without it, an array of three axes
        is a stack [layers, m, n]. Leave out embeddings and the last layer, and arrays of three axes that are
        no stack, such as the kernels of `flax.nnx.MultiHeadAttention`.
      b1, b2: of AdamW, in [0, 1).
      eps: of AdamW, at least 2^-126 = 1.2e-38.
      weight_decay: at least 0; decoupled weight decay of both parts, multiplied by the learning rate.
      mask: the decayed parameters, as in `stable_adamw`. Default: all parameters.
      momentum: of Muon, in [0, 1), with Nesterov's correction.
      dtype: of the operands of Muon's products, of at least 16 bits; sums are in float32. On a GPU take
        float16: it needs fewer products than bfloat16, which Jordan et al. use, and their errors are an
        eighth. Operands are scaled, so that no gradient is too large or too small for it.
      block_axes: the axis or axes that enumerate stacked tensors, as in `stable_adamw`. Muon orthogonalizes
        each matrix of a stack; for parameters that AdamW updates, the axes set the RMS of `rms_by_path`.
      coefficients: of the Newton-Schulz iterations: "quintic", those of Jordan et al.; "nonic", for three
        polynomials of degree 9, which end in the same band after a fifth fewer operations; "polar_express",
        those of Amsel et al., which end nearer to 1; or "auto": "nonic", and in bfloat16, whose rounding
        "nonic" amplifies, "quintic".
      steps: number of iterations, at least 1; None: 3 with "nonic", otherwise 5. With "quintic" each
        multiplies the smallest singular values by 3.4.
      neuron_b2: in [0, 1), NorMuon's: divides the update of each output neuron, along the last axis of m x n,
        by the root of a moving average of its mean square, and scales the update of each matrix to an RMS of
        0.2. NorMuon's authors use 0.95. None: no such division. Not studied in this project.

    Returns:
      An `optax.GradientTransformationExtraArgs`. Updates have the dtype of the parameters.

    Raises:
      ValueError: a hyper-parameter is not a scalar or out of range (unless traced), `matrices` or `mask` is a
        single bool for a tree of parameters, `matrices` is another string than "auto", or names no parameter
        (as under `optax.flatten`), or an array that is no matrix, no stack of matrices, or not real, an
        update receives no parameters, a gradient is an integer, or a gradient or a moment has another shape
        than its parameter.

    >>> params = {"hidden": jnp.ones((4, 3)), "bias": jnp.ones(3)}
    >>> optimizer = muon(0.1, matrices={"hidden": True, "bias": False}, weight_decay=0.0)
    >>> grads = {"hidden": 5 * jnp.eye(4, 3), "bias": jnp.ones(3)}
    >>> updates, state = optimizer.update(grads, optimizer.init(params), params)
    >>> print(-updates["hidden"].round(3))
    [[0.045 0.    0.   ]
     [0.    0.045 0.   ]
     [0.    0.    0.045]
     [0.    0.    0.   ]]

    References:
      Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024,
      https://kellerjordan.github.io/posts/muon/.
      Liu et al., "Muon is scalable for LLM training", 2025, https://arxiv.org/abs/2502.16982: the scale.
      Amsel et al., "The Polar Express", 2025, https://arxiv.org/abs/2505.16932: the other coefficients.
      Li et al., "NorMuon", 2025, https://arxiv.org/abs/2510.05491: `neuron_b2`.
    """
    require_learning_rate("muon", learning_rate)
    for name, value in (("b1", b1), ("b2", b2), ("momentum", momentum)):
        require_number("muon", name, value, lambda x: 0 <= x < 1, "in [0, 1)")
    require_number("muon", "eps", eps, lambda x: float(x) >= 2.0**-126, "at least 2^-126 (1.2e-38)")
    require_number("muon", "weight_decay", weight_decay, lambda x: x >= 0, "at least 0")
    require_dtype("muon", "dtype", dtype, bits=16)
    _validate_iterations(coefficients, steps, neuron_b2)
    if isinstance(matrices, str) and matrices != "auto":
        raise ValueError(
            f"muon's matrices must be 'auto', a tree of bools or a function, got {matrices!r}: select "
            "parameters by a function of the tree"
        )
    rate = functools.partial(rate_at, "muon", learning_rate)

    def both(params) -> optax.GradientTransformationExtraArgs:
        """The optimizer of both parts."""
        structure = jax.tree.structure(params)
        axes = resolve_block_axes(block_axes, params)
        guessed: list[MatrixAxes | None] = [None] * len(axes)
        by_muon = matrices
        if isinstance(matrices, str):
            guessed = guess_matrices(params)
            by_muon = jax.tree.unflatten(structure, [each is not None for each in guessed])
            if block_axes is None:
                axes = [() if each is None else each.blocks for each in guessed]
        named = jax.tree_util.tree_leaves_with_path(params)
        by_muon = jax.tree.leaves(bools_like("matrices", by_muon, params))
        names = [
            _name_of_optimizer(path, x, is_matrix, blocks, guess is not None)
            for (path, x), is_matrix, blocks, guess in zip(named, by_muon, axes, guessed)
        ]
        if set(names) == {"adamw"}:
            raise ValueError(
                f"muon's matrices must name a parameter, got none of {len(axes)}: use "
                "stable_adamw for AdamW alone, and no wrapper that hides matrices, such as optax.flatten"
            )

        def part(name, values):
            """The values of one part, one for each parameter, with placeholders for the other part.

            They are a function's result, because optax would call a tree that is callable.
            """
            pairs = zip(names, values)
            chosen = [value if own == name else optax.MaskedNode() for own, value in pairs]
            return lambda _: jax.tree.unflatten(structure, chosen)

        decays = resolve_mask(mask, params)
        stacks = [
            guess or blocks for guess, blocks, name in zip(guessed, axes, names) if name == "muon"
        ]
        of_matrices = optax.chain(
            scale_by_muon(momentum, dtype, stacks, coefficients, steps),
            # An empty state is in checkpoints.
            optax.identity() if neuron_b2 is None else scale_neurons(neuron_b2, stacks),
            optax.add_decayed_weights(weight_decay, part("muon", decays)),
            optax.scale_by_learning_rate(rate),
        )
        others = stable_adamw(
            rate,
            b1,
            b2,
            eps,
            weight_decay,
            part("adamw", decays),
            clip_threshold=math.inf,
            block_axes=part("adamw", axes),
        )
        labels = jax.tree.unflatten(structure, names)
        return optax.partition({"muon": of_matrices, "adamw": others}, lambda _: labels)

    def init(params):
        params = as_arrays(params)
        return both(params).init(params)

    def update(grads, state, params=None, **extra_args):
        if params is None:
            raise ValueError("muon needs the parameters: call update(grads, state, params)")
        grads, params = as_arrays(grads), as_arrays(params)
        require_shapes("muon", params, {"gradient": grads})
        jax.tree_util.tree_map_with_path(_require_floating, params, grads)
        with jax.numpy_dtype_promotion("standard"):  # optax adds arrays of different dtypes
            updates, state = both(params).update(grads, state, params, **extra_args)
        return cast_like(updates, params), state

    return optax.GradientTransformationExtraArgs(init, update)


def _validate_iterations(coefficients, steps, neuron_b2):
    if coefficients not in CHOICES:
        raise ValueError(
            f"muon's coefficients must be one of {', '.join(CHOICES)}, got {coefficients!r}"
        )
    if steps is not None and (type(steps) is not int or steps < 1):
        raise ValueError(
            f"muon's steps must be None or an int of at least 1, got {steps!r}: under "
            "optax.inject_hyperparams add 'steps' to static_args"
        )
    if neuron_b2 is not None:
        require_number("muon", "neuron_b2", neuron_b2, lambda x: 0 <= x < 1, "in [0, 1), or None")


def _name_of_optimizer(
    path: tuple, x: jax.Array, by_muon: bool, axes: tuple[int, ...], is_guessed: bool
) -> str:
    if not by_muon:
        return "adamw"
    if not is_guessed and jnp.ndim(x) - len(axes) != 2 and (axes or jnp.ndim(x) != 3):
        raise ValueError(
            f"muon needs two axes [m, n] and block axes, got {path_name(path)!r} of shape "
            f"{jnp.shape(x)} with block axes {axes}: name the axes of its stack in `block_axes`, or "
            "set it to False in `matrices`"
        )
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"muon needs real floating-point matrices, {path_name(path)!r} is {x.dtype}: cast it, or set it "
            "to False in `matrices`"
        )
    return "muon"


def _require_floating(path: tuple, parameter: jax.Array, gradient: jax.Array) -> None:
    kind = jnp.inexact if jnp.iscomplexobj(parameter) else jnp.floating
    if not jnp.issubdtype(gradient.dtype, kind):
        raise ValueError(
            f"muon needs a {kind.__name__} gradient for parameter {path_name(path)!r}, got {gradient.dtype}: "
            "pass gradients of jax.grad"
        )


def scale_by_muon(
    momentum: jax.typing.ArrayLike = 0.95,
    dtype: jax.typing.DTypeLike = jnp.float32,
    stacks: Sequence[tuple[int, ...] | MatrixAxes] = (),
    coefficients: str = "auto",
    steps: int | None = None,
) -> optax.GradientTransformation:
    """`optax.contrib.scale_by_muon(consistent_rms=0.2)` for matrices and stacks of matrices; see `muon`.

    Args:
      momentum, dtype, coefficients, steps: see `muon`.
      stacks: for each parameter its `MatrixAxes`, or the axes that enumerate its matrices; (): all but the
        last two.
    """
    reference = contrib.scale_by_muon(beta=momentum)
    coefficients = choose_coefficients(coefficients, dtype)
    steps = steps or STEPS[coefficients]
    chosen = coefficients_of(coefficients, steps)  # also if a restored state has others

    def init(params):
        state = reference.init(params)
        # The range of float16 is too small for the momentum of small gradients.
        stored = lambda m: m.astype(jnp.float32) if m.dtype == jnp.float16 else m
        return state._replace(mu=jax.tree.map(stored, state.mu), ns_coeffs=chosen)

    def update(grads, state, params=None):
        del params
        require_shapes("muon", grads, {"momentum": state.mu})
        count = optax.safe_increment(state.count)
        step, beta = count.astype(jnp.float32), jnp.asarray(momentum, jnp.float32)
        float32 = functools.partial(jax.tree.map, lambda x: x.astype(jnp.float32))

        def nesterov(g, m):
            """The debiased average of Nesterov's method, times (1 - beta^step) (1 - beta^(step + 1)).

            `orthogonalize` ignores such a factor. A division would overflow for large gradients.
            """
            ahead, now = m * (1 - beta**step), g * (1 - beta ** (step + 1))
            return beta * ahead + (1 - beta) * now

        mu = jax.tree.map(lambda g, m: beta * m + (1 - beta) * g, float32(grads), float32(state.mu))
        directions = jax.tree.map(nesterov, float32(grads), mu)
        leaves, structure = jax.tree.flatten(directions)
        axes = _matrix_axes(stacks, leaves)
        in_front = [each.as_stack(x) for x, each in zip(leaves, axes)]
        leaves = [
            each.restore(x * (SCALE * math.sqrt(max(x.shape[-2:]))), before.shape)
            for x, each, before in zip(
                orthogonalize(in_front, chosen, dtype, steps=steps), axes, leaves
            )
        ]
        updates = jax.tree.unflatten(structure, leaves)
        return updates, state._replace(count=count, mu=cast_like(mu, state.mu), ns_coeffs=chosen)

    return optax.GradientTransformation(init, update)


def _matrix_axes(stacks: Sequence[tuple[int, ...] | MatrixAxes], leaves: Sequence[jax.Array]):
    """The `MatrixAxes` of each array, from the argument of `scale_by_muon`."""
    return [
        each if isinstance(each, MatrixAxes) else MatrixAxes.of_blocks(each, x.ndim)
        for each, x in zip(stacks or [()] * len(leaves), leaves)
    ]


class ScaleNeuronsState(NamedTuple):
    """State of `scale_neurons`.

    Attributes:
      nu: for each matrix [m, n] the moving average of the mean square of each column, like the parameters
        with size 1 along the axes of m, float32.
    """

    nu: optax.Updates


def scale_neurons(
    b2: jax.typing.ArrayLike, stacks: Sequence[tuple[int, ...] | MatrixAxes] = ()
) -> optax.GradientTransformation:
    """NorMuon's division of orthogonalized updates by the size of each output neuron's updates.

    With O [m, n], the update of a matrix::

      v = b2 v + (1 - b2) mean over m of O^2
      N = O / sqrt(v)
      O = 0.2 sqrt(m n) N / |N|

    Args:
      b2: in [0, 1).
      stacks: see `scale_by_muon`.
    """

    def init(params):
        leaves, structure = jax.tree.flatten(params)
        nu = [
            jnp.zeros([1 if i in axes.rows else n for i, n in enumerate(x.shape)], jnp.float32)
            for x, axes in zip(leaves, _matrix_axes(stacks, leaves))
        ]
        return ScaleNeuronsState(jax.tree.unflatten(structure, nu))

    def update(updates, state, params=None):
        del params
        leaves, structure = jax.tree.flatten(updates)
        beta, tiny = jnp.asarray(b2, jnp.float32), jnp.finfo(jnp.float32).tiny
        scaled, nu = [], []
        for x, v, axes in zip(leaves, jax.tree.leaves(state.nu), _matrix_axes(stacks, leaves)):
            squares = jnp.square(x)
            v = beta * v + (1 - beta) * jnp.mean(squares, axes.rows, keepdims=True)
            x = x * jax.lax.rsqrt(jnp.maximum(v, tiny))
            matrix = (*axes.rows, *axes.columns)
            rms = jnp.sqrt(jnp.mean(jnp.square(x), matrix, keepdims=True))
            scaled.append(SCALE * x / jnp.maximum(rms, tiny))
            nu.append(v)
        new = ScaleNeuronsState(jax.tree.unflatten(structure, nu))
        return jax.tree.unflatten(structure, scaled), new

    return optax.GradientTransformation(init, update)
