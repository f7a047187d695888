"""Checksums of arrays, computed on device: independent of the mesh, and read in one pass."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}  # by element size in bytes


def checksums(arrays: dict) -> dict[str, int]:
    """Computes a 32-bit checksum of each array, which depends on every bit and its index.

    The checksum is the sum modulo 2**32 of a bijective mix of each element's bits with its index. A change of
    one element always changes the checksum. A change of several elements does so with probability 1 - 2**-32.
    Integer addition is order-independent, so each device sums its own shard, and every mesh gives the same
    checksum.

    Args:
      arrays: {name: array}; integers and floats of 1 to 8 bytes, of any shape and sharding.

    Returns:
      The checksums by name, on every process.

    >>> sums = checksums({"a": jnp.zeros(3), "b": jnp.array([0.0, -0.0, 0.0])})
    >>> sums["a"] == sums["b"]
    False
    """
    names = sorted(arrays)
    sums = _sums([arrays[name] for name in names])
    return dict(zip(names, map(int, jax.device_get(sums)), strict=True))


def of_devices(arrays: dict) -> dict[str, list[int]]:
    """Computes the checksum of each array from the replica on each of this process's devices.

    JAX assumes that replicas are equal, and copies any of them to the host.
    """
    names = sorted(arrays)
    sums = _sums([arrays[name] for name in names])
    return {
        name: [int(shard.data) for shard in x.addressable_shards]
        for name, x in zip(names, sums, strict=True)
    }


def named(tree: Any) -> dict[str, Any]:
    """Flattens a tree to {path: leaf}."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(p, simple=True, separator="/"): x for p, x in leaves}


@jax.jit
def _sums(arrays: list) -> list:
    return [_sum(x) for x in arrays]


def _sum(x) -> jax.Array:
    words = jax.lax.bitcast_convert_type(x, _WORDS[x.dtype.itemsize]).astype(jnp.uint32)
    return jnp.sum(_mix(words ^ _mix(_index(words.shape))), dtype=jnp.uint32)


def _index(shape: tuple[int, ...]) -> jax.Array:
    """The flat index of each element, modulo 2**32: a sum of one iota per axis, sharded like x."""
    index = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        stride = np.uint32(math.prod(shape[axis + 1 :]) % 2**32)
        index += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * stride
    return index + np.uint32(1)


def _mix(x) -> jax.Array:
    """A bijection of 32-bit words: the MurmurHash3 finalizer, in which every bit affects every other."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return x ^ (x >> np.uint32(16))
