"""Arrays in 8 bits: block-wise, nearly logarithmic, with stochastic rounding."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from swjax.optax.tensors import nodes_of

BLOCK = 128
_LEVELS = 127  # magnitudes of an int8 besides 0
# The bits of a float32 number as an integer; twice the number has 2^23 more.
_LARGEST_RANGE = 40 << 23  # elements below 2^-40 of the largest of their block are stored as that
_NORMAL = 1 << 23  # the smallest normal number; smaller ones count as this
_INFINITY, _NAN = 0x7F800000, 0x7FC00000
_SIGN = -(1 << 31)


class EightBits(NamedTuple):
    """An array in 8 bits: sign(codes) float32(base + step |codes|), and 0 for the code 0.

    float32(i) is the number whose bits are those of the integer i: a logarithm, linear between powers of two.
    So neighbouring magnitudes differ by nearly equal ratios, and integers alone define the result.

    Attributes:
      codes: int8, with the shape of the array.
      base: [..., blocks] int32, one for each block of 128 along the last axis: the bits of the largest
        magnitude minus 127 steps; those of NaN for a block with Inf or NaN, 0 for a block of zeros.
      step: [..., blocks] int32, the distance of two neighbouring magnitudes, in bits.
    """

    codes: jax.Array
    base: jax.Array
    step: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self.codes.shape

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the decoded array."""
        return jnp.dtype(jnp.float32)


class Ranges(NamedTuple):
    """`EightBits.base` and `EightBits.step`."""

    base: jax.Array
    step: jax.Array


class EightBitMomentsState(NamedTuple):
    """State of `swjax.optax.eight_bit_moments`.

    Attributes:
      count: [] int32, number of updates, from which stochastic rounding takes its numbers.
      inner: state of the optimizer, with the codes of `EightBits` in place of moments.
      block_ranges: [2, blocks] int32, `Ranges` of the blocks of all moments, in their order.
    """

    count: jax.Array  # type: ignore[assignment]  # hides tuple.count, as in optax's states
    inner: optax.OptState
    block_ranges: jax.Array


def has_eight_bits(opt_state: optax.OptState) -> bool:
    """Whether a state has moments in 8 bits."""
    return bool(nodes_of(opt_state, EightBitMomentsState))


def ranges_of(
    *arrays: jax.Array, summed: Sequence[jax.Array] = ()
) -> tuple[list[Ranges], list[jax.Array]]:
    """The ranges of the blocks of some arrays, and the sums of the blocks of others.

    One reduction computes all and reads each array once. If two read it, XLA writes it to memory first.

    Args:
      *arrays: [..., n] of at most 32 bits.
      summed: [..., n] each.

    Returns:
      The ranges of each of the arrays, and sums [..., blocks].
    """
    # Minus 1, because 0 then is the largest of unsigned numbers, and the smallest of signed ones.
    sizes = [_blocks(_size_bits(x)) - 1 for x in arrays]
    operands = [each for size in sizes for each in (size, size)] + [_blocks(x) for x in summed]
    merge: list[Callable] = [jnp.maximum, _unsigned_minimum] * len(sizes)
    merge += [jnp.add] * len(summed)
    results = jax.lax.reduce(
        operands,
        [jnp.int32(-1)] * 2 * len(sizes) + [jnp.zeros([], x.dtype) for x in summed],
        lambda a, b: [function(x, y) for function, x, y in zip(merge, a, b)],
        (operands[0].ndim - 1,),
    )
    ends = [results[2 * i : 2 * i + 2] for i in range(len(sizes))]
    ranges = [_range(largest + 1, smallest + 1) for largest, smallest in ends]
    return ranges, results[2 * len(sizes) :]


def _range(largest: jax.Array, smallest: jax.Array) -> Ranges:
    """The range of a block, from the bits of its magnitudes other than 0."""
    largest, smallest = (
        jnp.where(bits > 0, jnp.maximum(bits, _NORMAL), 0) for bits in (largest, smallest)
    )
    width = jnp.minimum(largest - smallest, _LARGEST_RANGE)
    step = jnp.maximum((width + _LEVELS - 2) // (_LEVELS - 1), 1)
    base = jnp.where(largest > 0, largest - _LEVELS * step, 0)
    is_finite = largest < _INFINITY
    return Ranges(jnp.where(is_finite, base, _NAN), jnp.where(is_finite, step, 0))


@partial(jax.jit, static_argnames="half")  # else an eager `init` compiles every operation
def encode(
    x: jax.Array, seed: jax.typing.ArrayLike, ranges: Ranges | None = None, half: int = 0
) -> EightBits:
    """Rounds an array to 8 bits. The expectation of the result over seeds is x.

    Args:
      x: [..., n] of at most 32 bits; if a block has Inf or NaN, all its elements but 0 become NaN.
      seed: [] integer.
      ranges: those of x, or of an array that differs from x by rounding errors. Default: computed.
      half: 0 or 1; two arrays of one shape and seed then share a hash, but not its bits.
    """
    ranges = ranges_of(x)[0][0] if ranges is None else ranges
    base, step = (_each(of_blocks, x) for of_blocks in ranges)
    per_bit = _each(1.0 / ranges.step.astype(jnp.float32), x)
    size = _size_bits(x)
    # Added to 2^23, a number is rounded to an integer, which its bits hold. A conversion would be slower.
    code = (size - base).astype(jnp.float32) * per_bit + (2.0**23 - 0.5)
    code = jnp.clip(jax.lax.bitcast_convert_type(code, jnp.int32) - (150 << 23), 1, _LEVELS - 1)
    lower_bits = base + step * code
    lower = _float32(lower_bits)
    width = _float32(lower_bits + step) - lower
    # The chance of the larger neighbour is that with which the expectation is x.
    is_larger = _random(x.shape, seed, half) * width - width < _float32(size) - lower
    code += is_larger.astype(jnp.int32)
    code = jnp.where(size == 0, 0, jnp.where(x < 0, -code, code))
    return EightBits(code.astype(jnp.int8), *ranges)


@jax.jit
def decode(x: EightBits) -> jax.Array:
    """The float32 array of `encode`.

    >>> x = jnp.array([[0.0, -1.0, 4.0]])
    >>> decode(encode(x, seed=0)).round(3).tolist()
    [[0.0, -1.0, 4.0]]
    """
    codes = x.codes.astype(jnp.int32)
    bits = _each(x.base, codes) + _each(x.step, codes) * jnp.abs(codes)
    return _float32(jnp.where(codes == 0, 0, bits | (codes & _SIGN)))


def _size_bits(x: jax.Array) -> jax.Array:
    """The bits of |x| as float32."""
    return jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32) & ~_SIGN


def _float32(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _unsigned_minimum(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.minimum(a.astype(jnp.uint32), b.astype(jnp.uint32)).astype(jnp.int32)


def _blocks(x: jax.Array) -> jax.Array:
    """[..., n] -> [..., blocks, BLOCK], with zeros past the end."""
    missing = -x.shape[-1] % BLOCK
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x
    return x.reshape(*x.shape[:-1], -1, BLOCK)


def _each(of_blocks: jax.Array, x: jax.Array) -> jax.Array:
    """The value of the block of each element of x."""
    # jnp.repeat would need the sharding of the result on an explicit mesh.
    each = jnp.broadcast_to(of_blocks[..., None], (*of_blocks.shape, BLOCK))
    return each.reshape(*of_blocks.shape[:-1], -1)[..., : x.shape[-1]]


def _random(shape: tuple[int, ...], seed: jax.typing.ArrayLike, half: int) -> jax.Array:
    """Multiples of 2^-16 in [1, 2), with 16 bits of a hash of the place of each element and the seed.

    A few integer operations, which XLA fuses into the rounding. `jax.random` would take longer.
    """
    place = jnp.zeros(shape, jnp.uint32)
    for axis, _ in enumerate(shape):
        after = math.prod(shape[axis + 1 :]) % 2**32
        place += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(after)
    x = place ^ (jnp.asarray(seed).astype(jnp.uint32) * jnp.uint32(0x9E3779B9))
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        x = (x ^ (x >> jnp.uint32(shift))) * jnp.uint32(factor)
    x = x << jnp.uint32(7) if half else x >> jnp.uint32(9)
    return jax.lax.bitcast_convert_type(
        x & jnp.uint32(0xFFFF << 7) | jnp.uint32(127 << 23), jnp.float32
    )
