"""Models for inference: weights in 8 bits, in memory, in files and in exported programs.

`prequantize` does once what the forward pass of a quantized layer does with its weight at every call, and
keeps nothing else of it. `save` and `load` are files of the result, `export` programs that need no Flax:

  from swjax import serving
  serving.prequantize(model)
  serving.save("model.safetensors", model)
  program = serving.export(lambda model, x: model(x), model, jax.ShapeDtypeStruct((8, 64), "float32"))
  Path("model.jax").write_bytes(program.serialize())
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from swjax.kernels.reference import QTensor
from swjax.nnx import Linear, describe_model
from swjax.recipes import Recipe
from swjax.switchback import quantize_weight

__all__ = ["QuantizedKernel", "export", "load", "prequantize", "read_metadata", "save", "weights"]

_FORMAT = "swjax"  # in the metadata of our files
_ARRAYS = nnx.Not(nnx.RngState)


class QuantizedKernel(nnx.Variable):
    """The kernel of a linear layer as a `QTensor`: values [*out_features, *in_features] and their scale."""

    def __getitem__(self, key):
        return self.get_value()


def prequantize(model: nnx.Module) -> nnx.Module:
    """Quantizes the weights of a model's quantized linear layers for good, in place.

    For layers that are `swjax.nnx.Linear`, and those of Flax that `swjax.nnx.quantize_model` has converted.
    Their kernels become 8-bit values and scales; the fp32 ones are dropped. The forward pass gives the same
    values, bit for bit, for it quantizes weights in the same way, whether a recipe has one scale a tensor
    (`switchback`, `switchback_m`, `fp8_switchback`, `fp8_tensorwise`) or one a channel (`switchback_q`,
    `llm_int8`). It cannot be undone, and these kernels are no `nnx.Param`: they take no gradient.

    What keeps its weights: embeddings, norms, biases, `standard` layers, those with an outlier threshold,
    and any `nnx.LinearGeneral` with batch axes.

    Args:
      model: any NNX model; it is changed. Layers may be stacked, as by `nnx.vmap`.

    Returns:
      `model`.

    Raises:
      ValueError: no layer has a recipe whose forward product is quantized.

    >>> import swjax.nnx
    >>> model = nnx.Sequential(swjax.nnx.Linear(64, 256, rngs=nnx.Rngs(0)))
    >>> x = jnp.linspace(-1.0, 1.0, 64)[None]
    >>> before = model(x)
    >>> {name: str(value.dtype) for name, value in sorted(weights(prequantize(model)).items())}
    {'layers/0/bias': 'float32', 'layers/0/kernel/scale': 'float32', 'layers/0/kernel/values': 'int8'}
    >>> bool(jnp.all(model(x) == before))
    True
    """
    modules = {"/".join(map(str, path)): module for path, module in nnx.iter_modules(model)}
    layers = {
        matrix.path: matrix.recipe
        for matrix in describe_model(model)
        if matrix.name == "kernel" and _is_quantized(matrix.recipe, modules[matrix.path])
    }
    if not layers:
        raise ValueError(
            "prequantize needs a model with quantized linear layers, got none that is a float yet: "
            "choose their recipes by swjax.nnx.quantize_model first"
        )
    for path, recipe in layers.items():
        _prequantize(modules[path], recipe)
    return model


def _is_quantized(recipe: Recipe | None, module: nnx.Module) -> bool:
    if recipe is None or recipe.fwd is None or recipe.fwd.outlier_threshold:
        return False
    return isinstance(module, nnx.Linear | nnx.LinearGeneral) and not getattr(
        module, "batch_axis", None
    )


def _prequantize(layer: nnx.Linear | nnx.LinearGeneral, recipe: Recipe) -> None:
    kernel = layer.kernel[...]
    ins, outs = (
        (features,) if isinstance(features, int) else tuple(features)
        for features in (layer.in_features, layer.out_features)
    )
    stack = kernel.shape[: kernel.ndim - len(ins) - len(outs)]
    w = kernel.reshape(*stack, math.prod(ins), math.prod(outs))
    if not isinstance(layer, Linear):  # Flax casts a kernel before its product
        w = w.astype(layer.dtype or w.dtype)
    quantize = partial(quantize_weight, recipe=recipe)
    for _ in stack:
        quantize = jax.vmap(quantize)
    q = jax.jit(quantize)(w)
    scale_outs = outs if q.scale.shape[-2] > 1 else (1,) * len(outs)
    layer.kernel = QuantizedKernel(
        QTensor(
            q.values.reshape(*stack, *outs, *ins),
            q.scale.reshape(*stack, *scale_outs, *(1,) * len(ins)),
        )
    )
    layer.promote_dtype = _PromoteOthers(layer.promote_dtype, kernel.dtype.name)


@dataclasses.dataclass(frozen=True)
class _PromoteOthers:
    """A layer's `promote_dtype` that leaves the kernel alone, and the others as they were promoted before."""

    promote: Callable
    kernel_dtype: str

    def __call__(self, arrays, **options):
        inputs, kernel, bias = arrays
        like = jnp.zeros((), self.kernel_dtype)
        inputs, _, bias = self.promote((inputs, like, bias), **options)
        return inputs, kernel, bias


# --- files --------------------------------------------------------------------------------------------


def weights(model: nnx.Module) -> dict[str, jax.Array]:
    """The arrays of a model by name, as its file has them; states of random numbers are left out.

    Args:
      model: any NNX model.

    Returns:
      {"blocks/fc/bias": ..., "blocks/fc/kernel/values": ..., "blocks/fc/kernel/scale": ...}. The values of
      a prequantized kernel are [*out_features, *in_features].
    """
    return _named(nnx.to_pure_dict(nnx.state(model, _ARRAYS)))


def _named(tree) -> dict[str, jax.Array]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _fill(state, arrays: Mapping[str, jax.Array]):
    """A state like that one, of arrays by name."""
    state = jax.tree.map(lambda array: array, state)  # a copy
    own = nnx.to_pure_dict(state)
    values = jax.tree.unflatten(jax.tree.structure(own), [arrays[name] for name in _named(own)])
    nnx.replace_by_pure_dict(state, values)
    return state


def save(path: str | Path, model: nnx.Module, metadata: Mapping[str, str] | None = None) -> None:
    """Writes a model's arrays as safetensors; see `weights` for their names.

    Args:
      path: of the file, which is replaced if it is there.
      model: any NNX model, prequantized or not.
      metadata: texts to keep with it.

    Raises:
      ModuleNotFoundError: safetensors is not installed.
    """
    _require_safetensors()
    from safetensors.numpy import save_file

    path = Path(path)
    part = path.with_name(path.name + ".part")
    arrays = {name: np.asarray(array) for name, array in weights(model).items()}
    save_file(arrays, part, metadata={"format": _FORMAT, **(metadata or {})})
    part.rename(path)


def load(path: str | Path, model: nnx.Module) -> nnx.Module:
    """Fills a model with the arrays of a file that `save` wrote.

    Args:
      path: of the file.
      model: like the one that was saved; it is changed. It may be of shapes alone, as of
        `nnx.eval_shape(lambda: prequantize(Model(...)))`: then no fp32 weight is ever made.

    Returns:
      `model`.

    Raises:
      ModuleNotFoundError: safetensors is not installed.
      ValueError: the file is of another model: the line names the first array that differs.

    >>> import tempfile, swjax.nnx
    >>> make = lambda: prequantize(swjax.nnx.Linear(3, 4, rngs=nnx.Rngs(0)))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(f"{folder}/layer.safetensors", make())
    ...     load(f"{folder}/layer.safetensors", nnx.eval_shape(make))(jnp.ones((2, 3))).shape
    (2, 4)
    """
    with _open(path) as file:
        expected, names = weights(model), file.keys()
        for name in sorted(expected.keys() | names):
            here = _kind(expected[name]) if name in expected else None
            there = _kind(file.get_tensor(name)) if name in names else None
            if here != there:
                raise ValueError(
                    f"{path} is of another model: its array {name!r} is {there} there and {here} here "
                    f"(None: no such array): build the model that was saved"
                )
        arrays = {name: jnp.asarray(file.get_tensor(name)) for name in names}
    nnx.update(model, _fill(nnx.state(model, _ARRAYS), arrays))
    return model


def _kind(array) -> str:
    return f"{array.dtype}{list(array.shape)}"


def read_metadata(path: str | Path) -> dict[str, str] | None:
    """The texts in a file that `save` wrote; None: it is another safetensors file."""
    with _open(path) as file:
        metadata = file.metadata() or {}
    return metadata if metadata.get("format") == _FORMAT else None


def _open(path: str | Path):
    _require_safetensors()
    import safetensors

    try:
        return safetensors.safe_open(path, framework="np")
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from error


def _require_safetensors() -> None:
    try:
        import safetensors  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'swjax.serving needs safetensors for files: pip install "swjax[train]"',
            name="safetensors",
        ) from error


# --- programs -----------------------------------------------------------------------------------------


def export(
    function: Callable,
    model: nnx.Module,
    *inputs: jax.ShapeDtypeStruct,
    platforms: Sequence[str] = ("cpu", "cuda"),
) -> jax.export.Exported:
    """`function` of a model as a program that runs with jax alone, without this library and Flax.

    It takes the arrays of the file that `save` writes, and the inputs::

        program = jax.export.deserialize(bytearray(Path("model.jax").read_bytes()))
        y = program.call(safetensors.numpy.load_file("model.safetensors"), x)

    int8 products are int8 in it, through XLA: our own kernels are tied to a version of jax.

    Args:
      function: of (model, *inputs).
      model: any NNX model, prequantized or not.
      *inputs: shapes and dtypes; `jax.export.symbolic_shape("b, 224, 224, 3")` leaves a size open.
      platforms: "cpu", "cuda", "rocm", "tpu": those it is to run on.

    Returns:
      A `jax.export.Exported`, a function of (`weights(model)`, *inputs); its `serialize()` are bytes.

    Raises:
      ValueError: a layer would run one of our kernels: give it implementation="xla".
    """
    graph, state, others = nnx.split(model, _ARRAYS, ...)

    @jax.jit
    def program(arrays, *inputs):
        return function(nnx.merge(graph, _fill(state, arrays), others), *inputs)

    like = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), weights(model))
    try:
        return jax.export.export(program, platforms=platforms)(like, *inputs)
    except ValueError as error:
        if "custom call" not in str(error):
            raise
        raise ValueError(
            "an exported program must be XLA's alone, got one with other kernels in it: choose "
            'implementation="xla" for the layers, and no cuDNN attention'
        ) from error
