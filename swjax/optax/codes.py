"""Arrays in 8 bits: block-wise, nearly logarithmic, with stochastic rounding."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

BLOCK = 128
_LEVELS = 127  # magnitudes of an int8 besides 0
# In bits of float32, of which 2^23 are a factor of 2.
_LARGEST_RANGE = 40 << 23  # elements below 2^-40 of the largest of their block are stored as that
_NORMAL = 1 << 23  # the smallest normal number; smaller ones count as this
_INFINITY, _NAN = 0x7F800000, 0x7FC00000
_SIGN = -(1 << 31)


class EightBits(NamedTuple):
    """An array in 8 bits: sign(codes) float32(largest - step (127 - |codes|)), and 0 for the code 0.

    float32(i) is the number whose bits are those of the integer i: a logarithm, linear between powers of two.
    Neighbouring magnitudes so differ by nearly equal ratios, and integers alone define the result.

    Attributes:
      codes: int8, with the shape of the array.
      largest: bits of the largest magnitude of each block of 128 along the last axis, [..., blocks] int32; 0
        for a block of zeros, and those of NaN for a block with Inf or NaN.
      step: distance of two neighbouring magnitudes of each block, in bits, [..., blocks] int32.
    """

    codes: jax.Array
    largest: jax.Array
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
    """`EightBits.largest` and `EightBits.step`."""

    largest: jax.Array
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
    is_state = lambda x: isinstance(x, EightBitMomentsState)
    return any(map(is_state, jax.tree.leaves(opt_state, is_leaf=is_state)))


def ranges_of(
    *arrays: jax.Array, terms: jax.Array | None = None
) -> tuple[list[Ranges], jax.Array | None]:
    """The ranges of the blocks of arrays, and the sums of the blocks of other numbers.

    One reduction computes all and reads each array once. If two read it, XLA writes it to memory first.

    Args:
      *arrays: [..., n] of at most 32 bits.
      terms: [..., n], or None.

    Returns:
      The ranges of each array, and the sums [..., blocks], or None.
    """
    sizes = [_blocks(_size_bits(x)) for x in arrays]
    operands = [each for size in sizes for each in (size, size)]
    merge: list[Callable] = [jnp.maximum, _smaller_but_not_0] * len(sizes)
    if terms is not None:
        operands.append(_blocks(terms))
        merge.append(jnp.add)
    results = jax.lax.reduce(
        operands,
        [jnp.zeros([], x.dtype) for x in operands],
        lambda a, b: [function(x, y) for function, x, y in zip(merge, a, b)],
        (operands[0].ndim - 1,),
    )
    ranges = []
    for i in range(0, 2 * len(sizes), 2):
        ends = (jnp.where(x > 0, jnp.maximum(x, _NORMAL), 0) for x in results[i : i + 2])
        largest, smallest = ends
        width = jnp.minimum(largest - smallest, _LARGEST_RANGE)
        step = jnp.maximum((width + _LEVELS - 2) // (_LEVELS - 1), 1)
        is_finite = largest < _INFINITY
        ranges.append(Ranges(jnp.where(is_finite, largest, _NAN), jnp.where(is_finite, step, 0)))
    return ranges, None if terms is None else results[-1]


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
    largest, step = (_each(of_blocks, x) for of_blocks in ranges)
    per_bit = _each(1.0 / ranges.step.astype(jnp.float32), x)
    size = _size_bits(x)
    steps = ((largest - size).astype(jnp.float32) * per_bit).astype(jnp.int32)
    steps = jnp.clip(steps, 0, _LEVELS - 2)
    upper_bits = largest - steps * step
    lower = _float32(upper_bits - step)
    width = _float32(upper_bits) - lower
    # The chance of the larger neighbour is that with which the expectation is x.
    is_larger = _uniform(x.shape, seed, half) * width < _float32(size) - lower
    code = _LEVELS - 1 - steps + is_larger.astype(jnp.int32)
    code = jnp.where(size == 0, 0, jnp.where(x < 0, -code, code))
    return EightBits(code.astype(jnp.int8), *ranges)


def decode(x: EightBits) -> jax.Array:
    """The float32 array of `encode`.

    >>> x = jnp.array([[0.0, -1.0, 4.0]])
    >>> decode(encode(x, seed=0)).tolist()
    [[0.0, -1.0, 4.0]]
    """
    codes = x.codes.astype(jnp.int32)
    bits = _each(x.largest, codes) - _each(x.step, codes) * (_LEVELS - jnp.abs(codes))
    return _float32(jnp.where(codes == 0, 0, bits | (codes & _SIGN)))


def _size_bits(x: jax.Array) -> jax.Array:
    """The bits of |x| as float32."""
    return jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32) & ~_SIGN


def _float32(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _smaller_but_not_0(a: jax.Array, b: jax.Array) -> jax.Array:
    """The smaller of two non-negative int32; 0 counts as the largest."""
    a, b = (x.astype(jnp.uint32) - jnp.uint32(1) for x in (a, b))
    return (jnp.minimum(a, b) + jnp.uint32(1)).astype(jnp.int32)


def _blocks(x: jax.Array) -> jax.Array:
    """[..., n] -> [..., blocks, BLOCK], with zeros past the end."""
    missing = -x.shape[-1] % BLOCK
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x
    return x.reshape(*x.shape[:-1], -1, BLOCK)


def _each(of_blocks: jax.Array, x: jax.Array) -> jax.Array:
    """The value of the block of each element of x."""
    return jnp.repeat(of_blocks, BLOCK, axis=-1)[..., : x.shape[-1]]


def _uniform(shape: tuple[int, ...], seed: jax.typing.ArrayLike, half: int) -> jax.Array:
    """Multiples of 2^-16 in [0, 1), 16 bits of a hash of the place of each element and the seed.

    A few integer operations, which XLA fuses into the rounding. `jax.random` would take longer.
    """
    place = jnp.zeros(shape, jnp.uint32)
    for axis, _ in enumerate(shape):
        after = math.prod(shape[axis + 1 :]) % 2**32
        place += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(after)
    x = place ^ (jnp.asarray(seed).astype(jnp.uint32) * jnp.uint32(0x9E3779B9))
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        x = (x ^ (x >> jnp.uint32(shift))) * jnp.uint32(factor)
    x = x & jnp.uint32(0xFFFF) if half else x >> jnp.uint32(16)
    return x.astype(jnp.float32) * 2.0**-16
