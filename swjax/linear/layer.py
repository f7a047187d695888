"""The parts that the rules of a linear layer share.

`Layer` is the static description of a layer, `Operand` the representations of one of its arrays. Each of the
quantizers is a step of its own in a `jax.shard_map`, so that `jax.checkpoint` can save its result. Scales
equal those on one device, because absolute maxima are maxima over the devices that share a scale, except in
the block quantizer of weight gradients.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from swjax import auto
from swjax.kernels import dispatch, reference, targets
from swjax.kernels.block_formats.reference import (
    Blocks,
    clamped,
    emulated,
    for_matrix_units,
    quantize_blocks,
    random_bits,
)
from swjax.kernels.reference import QTensor
from swjax.linear.layouts import Spec, as_matrix, block_specs, quantized_specs, specs_of
from swjax.linear.sharding import Sharding
from swjax.recipes import Product, Quantizer, Recipe


@dataclass(frozen=True)
class Layer:
    """One linear layer without its arrays; static.

    Layers that share an input differ in `sharding`, `w_dtype` and the rotation of `recipe.dgrad` only.

    Attributes:
      recipe: recipe of the products, with the rotations of this layer's features.
      sharding: the mesh axes that shard x, w and y.
      dtype: dtype of x and of the products without quantization.
      out_dtype: dtype of y.
      w_dtype: dtype of the gradient of w; None if w is quantized, and has no gradient.
      addend_dtype: dtype of the array that is added to y, or None.
      implementation: implementation of the quantized operations, see `swjax.kernels.dispatch`; None chooses.
      precision: precision of the products without quantization, see `jax.lax.dot_general`.
    """

    recipe: Recipe
    sharding: Sharding
    dtype: str
    out_dtype: str
    w_dtype: str | None
    addend_dtype: str | None = None
    implementation: str | None = None
    precision: jax.lax.PrecisionLike = None

    @property
    def rotated_weight(self) -> int:
        """The rotation along k of a weight that is quantized already; 1 for no rotation."""
        fwd = self.recipe.fwd
        return 1 if self.w_dtype or fwd is None else fwd.rhs.rotation

    @property
    def reads_last_axis(self) -> bool:
        """Whether quantized operands are transposed, so that products sum over their last axis.

        GPU kernels need this order. XLA for CPUs supports either axis, and is slow after a transpose.
        """
        return targets.platform(self.sharding.mesh) == "gpu" and self.implementation != "xla"

    def multiplies_blocks(self, quantizer: Quantizer, *lengths: int) -> bool:
        """Whether operands of this block format, whose sum has this length, are multiplied without emulation.

        Blocks must divide the part of each device, also along the other axis of squares if that is given;
        otherwise a warning says so.
        """
        mesh = self.sharding.mesh
        if self.implementation == "xla":
            return False
        if quantizer.block_format not in targets.block_formats(mesh):
            return False
        parts = quantizer.block * (1 if mesh is None else mesh.size)
        # Symbolic lengths of `jax.export` are no integers.
        known = [length for length in lengths if isinstance(length, int)]
        for length in known:
            auto.warn_of_length(length, parts)
        return len(known) == len(lengths) and not any(length % parts for length in known)


class Operand(NamedTuple):
    """The available representations of an array [..., n]; a representation that was not computed is None.

    Attributes:
      array: the array itself.
      quantized: the quantized matrix, a QTensor; in a product of blocks that is not emulated, Blocks.
      transposed: the quantized transpose of a matrix without leading axes, as `quantize_weight` returns it.
      token_sum: of a gradient [..., n], the sum over all tokens, [n] float32: the gradient of a bias.
    """

    array: jax.Array | None = None
    quantized: Any = None
    transposed: Any = None
    token_sum: jax.Array | None = None


def as_array(operand: Operand, dtype: str) -> jax.Array:
    """The matrix itself, or its dequantized form; also of a stack of matrices."""
    if operand.array is not None:
        return operand.array.astype(dtype)
    if operand.quantized is not None:
        return reference.dequantize(operand.quantized, dtype)
    assert operand.transposed is not None, "a matrix has at least one form"
    return reference.dequantize(operand.transposed.T, dtype)


def quantizes_rows(product: Product | None) -> TypeGuard[Product]:
    """Whether the left operand is quantized row-wise as it is, as in the fused quantizers."""
    if product is None or product.lhs.rotation > 1:
        return False
    return product.lhs.scope == "row" and not product.outlier_threshold


# --- the form that a product reads --------------------------------------------------------------------


def read(
    quantizer: Quantizer | None, operand: Operand, spec: Spec, axis: int, layer: Layer
) -> Operand:
    """Returns an `Operand` with one representation, the one that this side of the product reads.

    Quantizes the array if no representation fits.

    Args:
      quantizer: of this side of the product; None reads the array in the layer's dtype.
      operand: the representations of the matrix.
      spec: sharding of the matrix.
      axis: axis that the product sums over, 0 or -1; for an array of tokens, 0 stands for all token axes.
      layer: the layer.
    """
    if quantizer is None:
        return Operand(as_array(operand, layer.dtype))
    known = [Operand(quantized=operand.quantized), Operand(transposed=operand.transposed)]
    if quantizer.in_blocks:
        only = known[axis == 0]
        if isinstance(stored(only, axis)[0], Blocks):
            return only
        known = []
    for only in reversed(known) if axis == 0 else known:
        q, along = stored(only, axis)
        if q is None or q.values.dtype != quantizer.dtype or q.scale.shape[along] != 1:
            continue
        if axis == -1 or q.values.ndim == 2:
            return only
    array = as_array(operand, "float32") if operand.array is None else operand.array
    if quantizer.in_blocks:
        q = quantize_in_blocks(quantizer, array, spec, axis, layer)
        transpose = axis == 0 and isinstance(q, Blocks)
    else:
        transpose = axis == 0 and layer.reads_last_axis
        q = quantize_sharded(quantizer, array, spec, axis, layer, transpose=transpose)
    return Operand(transposed=q) if transpose else Operand(quantized=q)


def stored(only: Operand, axis: int) -> tuple[Any, int]:
    """Returns the array or QTensor of an operand with one representation, and which of its axes is `axis`."""
    if only.transposed is not None:
        return only.transposed, -1 - axis
    return (only.quantized if only.array is None else only.array), axis


def specs_of_operand(operand: Operand, spec: Spec) -> Operand:
    """The shardings of an operand's arrays, for the sharding of the matrix."""
    array, q, transposed, _ = operand
    return Operand(
        None if array is None else spec,  # type: ignore[arg-type]  # a spec for an array
        None if q is None else specs_of(q, spec if q.values.ndim > 2 else as_matrix(spec, False)),
        None if transposed is None else specs_of(transposed, as_matrix(spec, True)),
    )


# --- quantizers ---------------------------------------------------------------------------------------


def quantize_sharded(
    quantizer: Quantizer,
    x: jax.Array,
    spec: Spec,
    axis: int,
    layer: Layer,
    *,
    transpose: bool = False,
) -> QTensor:
    """Rotates and quantizes x for a product that sums over `axis`; for axis 0, as a matrix of all tokens."""
    sharding, per_tensor = layer.sharding, quantizer.has_one_scale
    out_spec = as_matrix(spec, False) if axis == 0 else spec
    shared = out_spec if per_tensor else (out_spec[axis],)
    options: dict[str, Any] = {"dtype": quantizer.dtype, "transpose": transpose}
    options["implementation"] = layer.implementation
    rotation, whole = quantizer.rotation, not sharding.sharded_axes(*shared)
    static_scale = quantizer.static_scale(x.shape) if quantizer.is_static else None

    def step(x):
        x = as_rows(x) if axis == 0 else x
        if static_scale is not None:
            absmax = reference.static_absmax(static_scale, quantizer.dtype, x.ndim)
            return dispatch.run("quantize_by", x, absmax, clip=True, **options)
        if rotation > 1 and quantizer.scope == "row" and whole:
            rotated: dict[str, Any] = {"rotation": rotation, "dtype": quantizer.dtype}
            rotated["implementation"] = layer.implementation
            return dispatch.run("quantize_rotated", x, **rotated)
        x = reference.rotate_features(x, rotation, axis)
        axes = tuple(range(x.ndim)) if per_tensor else (axis % x.ndim,)
        if whole:
            return dispatch.run("quantize", x, axes=axes, **options)
        absmax = sharding.maximum(reference.absolute_maximum(x, axes), *shared)
        return dispatch.run("quantize_by", x, absmax, **options)

    spanned = range(len(out_spec)) if per_tensor else (axis % len(out_spec),)
    scale_spec = Spec(() if i in spanned else axes for i, axes in enumerate(out_spec))
    specs = quantized_specs(out_spec, scale_spec)
    if transpose:
        specs = quantized_specs(*(Spec(reversed(spec)) for spec in (out_spec, scale_spec)))
    q = sharding.map_shards(step, (x,), (spec,), specs)
    return _with_fixed_scale(q) if per_tensor else q


def quantize_in_blocks(
    quantizer: Quantizer, x: jax.Array, spec: Spec, axis: int, layer: Layer
) -> QTensor | Blocks:
    """Rounds x to a block format for a product that sums over `axis`; for axis 0, as a matrix of all tokens.

    Returns a QTensor whose values include the scales; or Blocks, with the axis last, for products that are
    not emulated.

    Each device forms blocks of its own elements. To rotate tokens, zeros fill the last group of a device, for
    both operands of the weight gradient alike. The elements of a device seed its stochastic rounding.
    """
    axis = 0 if quantizer.scope == "column" else axis
    sharding, whole = layer.sharding, as_matrix(spec, False) if axis == 0 else spec
    rotation = quantizer.rotation
    length = x.shape[-1] if axis == -1 else math.prod(x.shape[:-1])
    matrix_units = layer.multiplies_blocks(quantizer, length)
    by_kernel = _has_block_quantizer(quantizer, x.shape, length, layer)

    def step(x):
        given = x
        if by_kernel:
            return _run_block_quantizer(quantizer, x, (axis,), layer)[0]
        if axis == 0:
            x = rotated_tokens(as_rows(x), rotation)
        else:
            x = reference.rotate_features(x, rotation, axis)
        absmax = bits = None
        if quantizer.stochastic:  # rotated elements may differ in the last bit between platforms
            bits = random_bits(given, x.shape, stream=axis + 1)
        if sharding.sharded_axes(*whole):
            absmax = reference.absolute_maximum(x, tuple(range(x.ndim)))
            absmax = sharding.maximum(absmax, *whole)
        return _in_blocks(x, absmax, bits, axis, quantizer, matrix_units)

    specs: Any = quantized_specs(whole, Spec(() for _ in whole))
    if matrix_units:
        specs = block_specs(whole if axis == -1 else Spec(reversed(whole)))
    return sharding.map_shards(step, (x,), (spec,), specs)


def quantize_blocks_both_ways(
    quantizers: tuple[Quantizer, Quantizer], x: jax.Array, spec: Spec, layer: Layer
) -> tuple[Blocks, Blocks] | None:
    """x for a product that sums over its last axis, and for one that sums over the others, from one reading.

    None if the products read different formats, or if no kernel writes both.
    """
    quantizer, whole = quantizers[0], as_matrix(spec, False)
    lengths = x.shape[-1], math.prod(x.shape[:-1])
    if quantizer != quantizers[1]:
        return None
    if not all(_has_block_quantizer(quantizer, x.shape, length, layer) for length in lengths):
        return None
    step = partial(_run_block_quantizer, quantizer, axes=(-1, 0), layer=layer)
    specs: Any = block_specs(spec), block_specs(Spec(reversed(whole)))
    return layer.sharding.map_shards(step, (x,), (spec,), specs)


def _has_block_quantizer(
    quantizer: Quantizer, shape: tuple[int, ...], length: int, layer: Layer
) -> bool:
    """Whether an operation of `dispatch` quantizes x of a shape to blocks, for a sum of a length."""
    lengths = (length, *shape) if quantizer.scope == "square" else (length,)
    plain = quantizer.rotation == 1 and not quantizer.stochastic
    return plain and quantizer.scale == "float32" and layer.multiplies_blocks(quantizer, *lengths)


def _run_block_quantizer(
    quantizer: Quantizer, x: jax.Array, axes: tuple[int, ...], layer: Layer
) -> tuple[Blocks, ...]:
    options: dict[str, Any] = {"dtype": quantizer.dtype, "block": quantizer.block}
    options["implementation"] = layer.implementation
    if quantizer.scope == "segment":
        return dispatch.run("quantize_segments", x, axes=axes, **options)
    over_first, over_last = dispatch.run("quantize_squares", x, **options)
    return tuple(over_last if axis == -1 else over_first for axis in axes)


# One program also outside `jax.jit`, instead of one for each of its 40 operations.
@partial(jax.jit, static_argnames=("axis", "quantizer", "matrix_units"))
def _in_blocks(
    x: jax.Array,
    absmax: jax.Array | None,
    bits: jax.Array | None,
    axis: int,
    quantizer: Quantizer,
    matrix_units: bool,
) -> QTensor | Blocks:
    block, square = quantizer.block or max(x.shape[axis], 1), quantizer.scope == "square"
    options: dict[str, Any] = {"dtype": quantizer.dtype, "block": block, "square": square}
    options["scale"] = quantizer.scale
    blocks = quantize_blocks(x, axis, ceil=quantizer.ceil, absmax=absmax, bits=bits, **options)
    if matrix_units:
        return for_matrix_units(blocks, axis, **options)
    dtype = "float32" if quantizer.scale == "float32" else "bfloat16"
    return emulated(blocks, axis, block, square=square, dtype=dtype)


def rotated_tokens(x: jax.Array, rotation: int) -> jax.Array:
    """Rotates groups of rows of x [m, n]; zeros fill the last group.

    >>> import jax.numpy as jnp
    >>> rotated_tokens(jnp.ones((3, 1)), 4).shape
    (4, 1)
    """
    if rotation > 1:
        x = jnp.pad(x, ((0, -x.shape[0] % rotation), (0, 0)))
    return reference.rotate_features(x, rotation, 0)


def quantize_both_ways(
    quantizer: Quantizer, x: jax.Array, spec: Spec, layer: Layer
) -> tuple[QTensor, QTensor]:
    """Quantizes x with one scale; returns x, and the transpose of the matrix of its rows, both quantized."""
    sharding = layer.sharding
    options: dict[str, Any] = {"dtype": quantizer.dtype, "implementation": layer.implementation}
    options |= {"clip": True} if quantizer.is_static else {}
    static_scale = quantizer.static_scale(x.shape) if quantizer.is_static else None

    def maxima(x):
        if static_scale is not None:
            return reference.static_absmax(static_scale, quantizer.dtype, 1)
        # XLA needs one pass for the maxima of parts, and two passes for the maximum of the whole.
        parts = math.gcd(x.size, 256)
        absmax = reference.absolute_maximum(x.reshape(parts, -1), (1,)).reshape(parts)
        if not sharding.sharded_axes(*spec):
            return absmax
        return sharding.maximum(reference.absolute_maximum(absmax, (0,)), *spec)

    def step(x):
        absmax = maxima(x)
        q, transposed = dispatch.run("quantize_both", as_rows(x), absmax, **options)
        q = QTensor(q.values.reshape(x.shape), q.scale.reshape((1,) * x.ndim))
        return q, transposed

    specs = (
        quantized_specs(spec, Spec(() for _ in spec)),
        quantized_specs(as_matrix(spec, True), Spec(((), ()))),
    )
    q, transposed = sharding.map_shards(step, (x,), (spec,), specs)
    return _with_fixed_scale(q), _with_fixed_scale(transposed)


def quantize_gradient(g: jax.Array, dtype: str, layer: Layer) -> tuple[QTensor, jax.Array]:
    """Quantizes g row-wise, and sums it over all tokens, which gives the gradient of a bias."""
    sharding = layer.sharding

    def step(g):
        q, total = dispatch.run(
            "quantize_and_sum", g, dtype=dtype, implementation=layer.implementation
        )
        return q, sharding.sum(total, *sharding.tokens)

    return sharding.map_shards(
        step, (g,), (sharding.y,), (row_specs(sharding.y), Spec((sharding.n,)))
    )


def split_outliers(
    x: jax.Array, product: Product, spec: Spec, layer: Layer
) -> tuple[jax.Array, jax.Array]:
    """Splits x into a sum of two, of which the first is quantized.

    With a threshold, the first term keeps the features that are below it for every token. With a quantile, it
    holds the clipped rows of a device, and the second what was clipped off.
    """
    sharding = layer.sharding

    def step(x):
        if product.outlier_quantile:
            inside = clamped(x, product.outlier_quantile)
            return inside, x - inside
        features = reference.absolute_maximum(x, tuple(range(x.ndim - 1)))
        # NaN counts as an outlier, on every platform.
        outlier = ~(sharding.maximum(features, *sharding.tokens) < product.outlier_threshold)
        zero = jnp.zeros((), x.dtype)
        return jnp.where(outlier, zero, x), jnp.where(outlier, x, zero)

    return sharding.map_shards(step, (x,), (spec,), (spec, spec))


def as_rows(x: jax.Array) -> jax.Array:
    """Reshapes [..., k] to [tokens, k], because XLA for GPUs fails on some int8 sums over several axes."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def add(*arrays: jax.Array | None) -> jax.Array:
    """Sums in float32, and rounds once to the dtype of the first array; None counts as zero.

    >>> import jax.numpy as jnp
    >>> float(add(jnp.float32(1), None, jnp.float32(2)))
    3.0
    """
    first, *others = (array for array in arrays if array is not None)
    total = sum((other.astype("float32") for other in others), first.astype("float32"))
    return total.astype(first.dtype)


def row_specs(spec: Spec) -> QTensor:
    """The specs of an array quantized row-wise."""
    return quantized_specs(spec, Spec((*spec[:-1], ())))


def _with_fixed_scale(q: QTensor) -> QTensor:
    """Keeps XLA before jax 0.12 from moving constants between the factors of a product of scales. Without the
    barrier, the last bit of y depends on whether the program computes the scale of w or receives it."""
    return q._replace(scale=jax.lax.optimization_barrier(q.scale))


# --- arrays that `jax.checkpoint` may save ------------------------------------------------------------


def name_for_checkpoint(q: QTensor, name: str) -> QTensor:
    """Names a quantized array for `swjax.checkpoint_policies`; fp8 values are saved as bytes."""
    values = checkpoint_name(to_bytes(q.values), f"{name}_q")
    return QTensor(from_bytes(values, q.values.dtype), checkpoint_name(q.scale, f"{name}_scale"))


def to_bytes(values: jax.Array) -> jax.Array:
    """Reinterprets fp8 values as uint8; returns other arrays unchanged.

    `jax.checkpoint` rounds the floats that it saves with `jax.lax.reduce_precision`, whose largest e4m3
    value is 240, not 448: larger values become NaN.
    """
    if values.dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2):
        return jax.lax.bitcast_convert_type(values, jnp.uint8)
    return values


def from_bytes(values: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """The inverse of `to_bytes` for values of a dtype."""
    if values.dtype == jnp.uint8:
        return jax.lax.bitcast_convert_type(values, dtype)
    return values
