"""Models for inference: 8-bit weights in memory, in files and in exported programs.

Quantized layers normally quantize their weights at every call. `prequantize` quantizes them once and drops
the originals. `save` and `load` write and read the result. `export` creates programs that do not need Flax:

  from swjax import serving
  serving.prequantize(model)
  serving.save("model.safetensors", model)
  program = serving.export(lambda model, x: model(x), model, jax.ShapeDtypeStruct((8, 64), "float32"))
  Path("model.jax").write_bytes(program.serialize())
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx, traverse_util
from flax.core import unfreeze

from swjax import linen
from swjax.kernels.reference import QTensor
from swjax.linear.api import quantize_weight
from swjax.nnx import Linear, describe_model, modules_of
from swjax.recipes import Recipe
from swjax.safe_files import parse_json
from swjax.serving import tensor_files

Model = nnx.Module | Mapping  # a Mapping contains the variables of a Linen model
NNXModel = TypeVar("NNXModel", bound=nnx.Module)
AnyModel = TypeVar("AnyModel", bound=Model)

_FORMAT = "swjax"  # format name in the metadata of swjax's files
_FLOAT8 = "float8"  # entry of the metadata: {name of an array of 8-bit floats: its dtype}, as JSON
_ROTATIONS = "rotations"  # another: {path of a layer: rotation of its 8-bit kernel}
_ARRAYS = nnx.Not(nnx.RngState)


class QuantizedKernel(nnx.Variable):
    """The kernel of a linear layer as a `QTensor`: values [*out_features, *in_features] and their scales."""

    def __getitem__(self, key: Any) -> Any:
        return self.get_value()


def is_prequantized(model: nnx.Module) -> bool:
    """Whether `prequantize` has quantized weights of this model."""
    return any(isinstance(leaf, QuantizedKernel) for _, leaf in nnx.iter_graph(model))


def prequantize(model: NNXModel) -> NNXModel:
    """Quantizes the weights of a model's quantized linear layers irreversibly, in place.

    It supports `swjax.nnx.Linear`, and Flax layers that `swjax.nnx.quantize_model` has converted. Their
    kernels become 8-bit values and scales, and the fp32 kernels are dropped. The forward pass gives
    bit-identical values, because it would quantize the weights in the same way, with one scale per tensor
    (`switchback`, `switchback_m`, `fp8_switchback`, `fp8_tensorwise`) or one per channel (`switchback_q`,
    `llm_int8`). `int8_hadamard` and `fp8_hadamard` rotate a kernel in its own dtype, so the values differ
    where Flax would first promote a 16-bit kernel to the float32 of its inputs. The change cannot be undone.
    The new kernels are not `nnx.Param`s, so they have no gradient.

    Embeddings, norms, biases, `standard` layers, layers with an outlier threshold or a block format, layers
    in an `nnx.WeightNorm` or `nnx.SpectralNorm`, `nnx.Einsum`, and `nnx.LinearGeneral` layers with batch axes
    keep their weights.

    Args:
      model: any NNX model, modified in place. It may consist of shapes, as by `nnx.eval_shape`. Layers may be
        stacked, as by `nnx.vmap`.

    Returns:
      `model`.

    Raises:
      ValueError: no layer has a recipe with a quantized forward product.

    >>> import swjax.nnx
    >>> model = nnx.Sequential(swjax.nnx.Linear(64, 256, rngs=nnx.Rngs(0)))
    >>> x = jnp.linspace(-1.0, 1.0, 64)[None]
    >>> before = model(x)
    >>> {name: str(value.dtype) for name, value in sorted(weights(prequantize(model)).items())}
    {'layers/0/bias': 'float32', 'layers/0/kernel/scale': 'float32', 'layers/0/kernel/values': 'int8'}
    >>> bool(jnp.all(model(x) == before))
    True
    """
    modules = modules_of(model)
    normalizers = nnx.WeightNorm | nnx.SpectralNorm
    normalized = tuple(
        path and f"{path}/" for path, one in modules.items() if isinstance(one, normalizers)
    )
    layers = [
        (module, matrix.recipe)
        for matrix in describe_model(model)
        if matrix.name == "kernel"
        and isinstance(module := modules[matrix.path], nnx.Linear | nnx.LinearGeneral)
        and not getattr(module, "batch_axis", None)
        and not matrix.path.startswith(normalized)
        and isinstance(module.kernel, nnx.Param)  # not prequantized already
        and _can_be_quantized(matrix.recipe)
    ]
    if not layers:
        raise ValueError(
            "prequantize needs a model with quantized linear layers, got none with float weights: "
            "choose their recipes first, with swjax.nnx.quantize_model or by recipe=, "
            "and prequantize once; llm_int8_outlier6 and block formats keep their float weights"
        )
    for layer, recipe in layers:
        _prequantize(layer, recipe)
    return model


def _can_be_quantized(recipe: Recipe | None) -> TypeGuard[Recipe]:
    fwd = None if recipe is None else recipe.fwd
    return fwd is not None and not fwd.outlier_threshold and not fwd.in_blocks


def _prequantize(layer: nnx.Linear | nnx.LinearGeneral, recipe: Recipe) -> None:
    w = layer.kernel.get_value()
    cast_to = None if isinstance(layer, Linear) else layer.dtype
    outs = 1 if isinstance(layer.out_features, int) else len(layer.out_features)
    ins = 1 if isinstance(layer.in_features, int) else len(layer.in_features)
    quantize = partial(
        _quantize, stack=range(w.ndim - ins - outs), outs=outs, cast_to=cast_to, recipe=recipe
    )
    q = jax.eval_shape(quantize, w) if isinstance(w, jax.ShapeDtypeStruct) else quantize(w)
    layer.kernel = QuantizedKernel(q)  # type: ignore[assignment]  # no gradient, so not a Param
    layer.promote_dtype = _PromoteOthers(layer.promote_dtype, w.dtype.name)


def _quantize(w: jax.Array, *, stack: Sequence[int], outs: int, cast_to, recipe: Recipe) -> QTensor:
    """Quantizes a kernel [*in_features, *out_features] to [*out_features, *in_features].

    Args:
      w: the kernel.
      stack: axes that enumerate layers, ascending; they keep their places.
      outs: number of axes of out_features.
      cast_to: the dtype to which Flax casts a kernel before its product; None keeps the dtype.
      recipe: recipe of the product.
    """
    if tuple(stack) != tuple(range(len(stack))):
        front = tuple(range(len(stack)))
        q = _quantize(
            jnp.moveaxis(w, stack, front), stack=front, outs=outs, cast_to=cast_to, recipe=recipe
        )
        return QTensor(*(jnp.moveaxis(x, front, tuple(stack)) for x in q))
    n = len(stack)
    sizes, ins, out_sizes = w.shape[:n], w.shape[n : w.ndim - outs], w.shape[-outs:]
    w = w.reshape(*sizes, math.prod(ins), math.prod(out_sizes)).astype(cast_to or w.dtype)
    quantize = partial(quantize_weight, recipe=recipe)
    for _ in sizes:
        quantize = jax.vmap(quantize)
    q = jax.jit(quantize)(w)
    scale_outs = out_sizes if q.scale.shape[-2] > 1 else (1,) * outs
    return QTensor(
        q.values.reshape(*sizes, *out_sizes, *ins),
        q.scale.reshape(*sizes, *scale_outs, *(1,) * len(ins)),
    )


@dataclasses.dataclass(frozen=True)
class _PromoteOthers:
    """Replaces a layer's `promote_dtype`: leaves the kernel unchanged, and promotes the others as before."""

    promote: Callable
    kernel_dtype: str

    def __call__(self, arrays, **options):
        inputs, kernel, bias = arrays
        like = jnp.zeros((), self.kernel_dtype)
        inputs, _, bias = self.promote((inputs, like, bias), **options)
        return inputs, kernel, bias


def prequantize_variables(function: Callable, variables: Mapping, *inputs: Any) -> dict:
    """Like `prequantize`, for Linen: returns variables with 8-bit kernels that the same function accepts.

    It supports `swjax.linen.Dense`, and Flax layers that `swjax.linen.quantized` converts. The same weights
    as in `prequantize` stay unquantized. A function that changes a kernel before its layer reads it, as
    `nn.map_variables` can, needs the float weights.

    Args:
      function: a function of (variables, *inputs), such as a Linen model's `apply`, inside `quantized` if
        that chooses the recipes. It is traced, not run.
      variables: variables of the model, {"params": ...}, not modified. Layers may be stacked on any axes, as
        by `nn.scan`.
      *inputs: arrays, or `jax.ShapeDtypeStruct`s, of any size that the model accepts.

    Returns:
      The same tree, with `swjax.QTensor`s instead of kernels.

    Raises:
      ValueError: no layer has a recipe with a quantized forward product, `function` applies a model to other
        variables than these, or the axis that enumerates stacked layers is as long as one next to it.

    >>> from flax import linen as nn
    >>> import swjax.linen
    >>> model, x = nn.Dense(256), jnp.linspace(-1.0, 1.0, 64)[None]
    >>> def predict(variables, x):
    ...     with swjax.linen.quantized({".*": "switchback"}):
    ...         return model.apply(variables, x)
    >>> variables = model.init(jax.random.key(0), x)
    >>> small = prequantize_variables(predict, variables, x)
    >>> small["params"]["kernel"].values.dtype, bool(jnp.all(predict(small, x) == predict(variables, x)))
    (dtype('int8'), True)
    """
    normalized = []  # paths of layers whose kernels another module computes from the variables

    def note(next_function, args, kwargs, context):
        if isinstance(context.module, nn.WeightNorm | nn.SpectralNorm):
            normalized.append(context.module.layer_instance.path)
        return next_function(*args, **kwargs)

    # Without jit, because a cached trace would not run the modules.
    with linen.kernels_used() as kernels, nn.intercept_methods(note), jax.disable_jit():
        jax.eval_shape(lambda *args: function(*args), variables, *inputs)
    kernels = {
        path: kernel
        for path, kernel in kernels.items()
        if _can_be_quantized(kernel.recipe)
        and not any(path[: len(outer)] == outer for outer in normalized)
    }
    if not kernels:
        raise ValueError(
            "prequantize_variables needs a function with quantized linear layers, got none with float "
            "weights: apply the model within swjax.linen.quantized"
        )
    flat = traverse_util.flatten_dict(unfreeze(dict(variables)), keep_empty_nodes=True)
    for path, kernel in kernels.items():
        name = ("params", *path, "kernel")
        w = nn.meta.unbox(flat.get(name))
        stacks = [] if w is None else _stacks(w.shape, kernel.shape)
        if w is None or not stacks or w.dtype != kernel.dtype:
            there = "none" if w is None else _kind(w)
            raise ValueError(
                f"{'/'.join(name)!r} must be {kernel.dtype}{list(kernel.shape)} as in its module, or a stack "
                f"of these, got {there}: pass the model's own variables unchanged"
            )
        if len(stacks) > 1:
            raise ValueError(
                f"{'/'.join(name)!r} {list(w.shape)} may be stacked on axis {stacks[0]} or {stacks[1]}, "
                "which are equally long: stack another number of layers, or apply them one by one"
            )
        flat[name] = _quantize(
            w, stack=stacks[0], outs=kernel.outs, cast_to=kernel.cast_to, recipe=kernel.recipe
        )
    return traverse_util.unflatten_dict(flat)


def _stacks(shape: tuple[int, ...], one: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The sets of axes that may enumerate layers: those without which `shape` is the shape of one layer.

    >>> _stacks((64, 3, 32), (64, 32)), _stacks((64, 32), (64, 32)), _stacks((8, 8, 32), (8, 32))
    ([(1,)], [()], [(0,), (1,)])
    """
    axes = itertools.combinations(range(len(shape)), max(len(shape) - len(one), 0))
    return [a for a in axes if tuple(np.delete(shape, a)) == tuple(one)]


# --- files --------------------------------------------------------------------------------------------


def weights(model: Model) -> dict[str, jax.Array]:
    """The arrays of a model, named as in its file, without random-number states.

    Args:
      model: any NNX model, or the variables of a Linen model.

    Returns:
      {"blocks/fc/bias": ..., "blocks/fc/kernel/values": ..., "blocks/fc/kernel/scale": ...}. The values of a
      prequantized kernel are [*out_features, *in_features].

    Raises:
      ValueError: two arrays have the same name.
    """
    if isinstance(model, nnx.Module):
        model = nnx.to_pure_dict(nnx.state(model, _ARRAYS))
    named: dict[str, jax.Array] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(model):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name in named:
            raise ValueError(
                f"the arrays of a model must have different names, got two named {name!r}: rename one"
            )
        named[name] = leaf
    return named


def _fill(tree, arrays: Mapping[str, jax.Array]):
    """Builds a tree like `tree` from arrays by name."""
    return jax.tree.unflatten(jax.tree.structure(tree), [arrays[name] for name in weights(tree)])


def _fill_state(state, arrays: Mapping[str, jax.Array]):
    """Builds an NNX state like `state` from arrays by name."""
    state = jax.tree.map(lambda array: array, state)  # a copy
    nnx.replace_by_pure_dict(state, _fill(nnx.to_pure_dict(state), arrays))
    return state


def save(path: str | Path, model: Model, metadata: Mapping[str, str] | None = None) -> None:
    """Writes a model's arrays as safetensors, named as in `weights`. The file stores 8-bit floats as uint8.

    Args:
      path: path of the file; an existing file is replaced.
      model: any NNX model, or the variables of a Linen model, prequantized or not.
      metadata: texts to store in the file.

    Raises:
      ModuleNotFoundError: safetensors is not installed.
      ValueError: two arrays have the same name.
    """
    found = weights(model)
    # safetensors writes the memory of an array, whatever its strides.
    contiguous = {name: np.asarray(x, order="C") for name, x in found.items()}
    arrays = {name: x.view(_stored(x.dtype)) for name, x in contiguous.items()}
    float8 = {name: str(x.dtype) for name, x in found.items() if x.dtype != _stored(x.dtype)}
    own = {
        "format": _FORMAT,
        _FLOAT8: json.dumps(float8),
        _ROTATIONS: json.dumps(_rotations(model)),
    }
    tensor_files.write(Path(path), arrays, own | dict(metadata or {}))


def _rotations(model: Model) -> dict[str, int]:
    """How the kernels that `prequantize` quantized are rotated, which their shapes and dtypes do not show."""
    if not isinstance(model, nnx.Module) or not is_prequantized(model):
        return {}
    found = ((m.path, m.recipe.fwd) for m in describe_model(model) if _can_be_quantized(m.recipe))
    return {path: fwd.rhs.rotation for path, fwd in found if fwd}


def _stored(dtype) -> np.dtype:
    """The dtype with the same bits in a file, because safetensors has no 8-bit floats for NumPy."""
    is_float8 = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 1
    return np.dtype(np.uint8) if is_float8 else dtype


def load(path: str | Path, model: AnyModel) -> AnyModel:
    """Loads the arrays of a file that `save` wrote into a model.

    Args:
      path: path of the file.
      model: a model like the saved one. It may consist of shapes, such as
        `nnx.eval_shape(lambda: prequantize(Model(...)))`, so that no fp32 weights are created. An NNX model
        is modified in place; the variables of a Linen model are not.

    Returns:
      The NNX model, or new variables.

    Raises:
      ModuleNotFoundError: safetensors is not installed.
      ValueError: the file belongs to another model; the message names the first array that differs.

    >>> import tempfile, swjax.nnx
    >>> make = lambda: prequantize(swjax.nnx.Linear(3, 4, rngs=nnx.Rngs(0)))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(f"{folder}/layer.safetensors", make())
    ...     load(f"{folder}/layer.safetensors", nnx.eval_shape(make))(jnp.ones((2, 3))).shape
    (2, 4)
    """
    with tensor_files.open_file(path) as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}
        metadata = file.metadata() or {}
    float8, rotations = (_read_entry(path, metadata, key) for key in (_FLOAT8, _ROTATIONS))
    expected = weights(model)
    for name in sorted(expected.keys() | arrays.keys()):
        here = _kind(expected[name], name in float8) if name in expected else None
        there = _kind(arrays[name]) if name in arrays else None
        if name in arrays and name in float8:
            there = f"{float8[name]}{list(arrays[name].shape)}"
        if here != there:
            raise ValueError(
                f"{path} belongs to another model: array {name!r} is {there} in the file and {here} here "
                f"(None: no such array): {_remedy(name, arrays, expected)}"
            )
    for name, rotation in _rotations(model).items():
        if (saved := rotations.get(name, rotation)) != rotation:  # older files lack it
            raise ValueError(
                f"{path} belongs to another model: its recipe rotates the kernel of {name!r} in groups of "
                f"{saved}, not {rotation} (1: not at all): build the saved model"
            )
    arrays = {name: jnp.asarray(arrays[name].view(like.dtype)) for name, like in expected.items()}
    if not isinstance(model, nnx.Module):
        return _fill(model, arrays)
    nnx.update(model, _fill_state(nnx.state(model, _ARRAYS), arrays))
    return model


def _read_entry(path: str | Path, metadata: Mapping[str, str], key: str) -> dict[str, Any]:
    """Parses an entry of the metadata."""
    try:
        found = parse_json(metadata.get(key, "{}"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: in its metadata, {error}: save it again") from error
    if not isinstance(found, dict):
        raise ValueError(
            f"{path} is damaged: {key} of its metadata must be an object: save it again"
        )
    return found


def _remedy(name: str, there, here) -> str:
    """What to do about an array that a file and a model do not share."""
    if f"{name}/scale" in there:
        return "the file is prequantized, so prequantize the model before loading"
    if f"{name}/scale" in here:
        return "the model is prequantized and the file is not, so prequantize after loading"
    return "build the saved model"


def _kind(array, float8: bool = False) -> str:
    """The dtype and the shape of an array in a file; with `float8`, an 8-bit float keeps its dtype."""
    return f"{array.dtype if float8 else _stored(array.dtype)}{list(array.shape)}"


def read_metadata(path: str | Path) -> dict[str, str] | None:
    """Reads the texts in a file that `save` wrote; returns None for other safetensors files."""
    with tensor_files.open_file(path) as file:
        metadata = file.metadata() or {}
    return metadata if metadata.get("format") == _FORMAT else None


# --- programs -----------------------------------------------------------------------------------------


def export(
    function: Callable,
    model: Model,
    *inputs: jax.ShapeDtypeStruct,
    platforms: Sequence[str] = ("cpu", "cuda"),
) -> jax.export.Exported:
    """Exports a function of a model as a program that needs only jax, neither this library nor Flax.

    The arguments of the program are the arrays in the file that `save` writes, and the inputs::

        program = jax.export.deserialize(bytearray(Path("model.jax").read_bytes()))
        y = program.call(safetensors.numpy.load_file("model.safetensors"), x)

    The program computes int8 products through XLA, because swjax's kernels depend on the version of jax.

    Args:
      function: a function of (model, *inputs).
      model: any NNX model, or the variables of a Linen model, prequantized or not.
      *inputs: shapes and dtypes; `jax.export.symbolic_shape("b, 224, 224, 3")` makes a size symbolic.
      platforms: platforms of the program: "cpu", "cuda", "rocm", "tpu".

    Returns:
      A `jax.export.Exported`, a function of (arrays of the file by name, *inputs), whose `serialize()`
      returns bytes.

    Raises:
      ValueError: a layer would run one of swjax's kernels; set implementation="xla" for it.
    """
    if isinstance(model, nnx.Module):
        graph, state, *others = nnx.split(model, _ARRAYS, ...)
        filled = lambda arrays: nnx.merge(graph, _fill_state(state, arrays), *others)
    else:
        filled = partial(_fill, model)

    @jax.jit
    def program(arrays, *inputs):
        bits = jax.lax.bitcast_convert_type
        arrays = {name: bits(array, dtypes[name]) for name, array in arrays.items()}
        return function(filled(arrays), *inputs)

    arrays = weights(model)
    dtypes = {name: array.dtype for name, array in arrays.items()}
    like = {
        name: jax.ShapeDtypeStruct(array.shape, _stored(array.dtype))
        for name, array in arrays.items()
    }
    program.trace(like, *inputs)  # raises the errors of `function`; `export` then reuses the trace
    try:
        return jax.export.export(program, platforms=platforms)(like, *inputs)
    except ValueError as error:  # JAX has no other type for programs that it does not export
        raise ValueError(
            "an exported program must contain only XLA operations, got other kernels: choose "
            'implementation="xla" for the layers, and attention="xla" for the models of swjax'
        ) from error
