"""Packs the metrics of a step into one array, together with their names."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax

from swjax.diagnostics import NamedIndex, Packer


@partial(jax.tree_util.register_dataclass, data_fields=["vector"], meta_fields=["packer"])
@dataclasses.dataclass(frozen=True)
class PackedMetrics:
    """All metrics of a step in one array, so that one transfer fetches them; a pytree with static names.

    A jitted function can return it, so names and values stay together without side effects during tracing.

    Attributes:
      vector: [n] int32, from `Packer.pack`.
      packer: holds the names of the n values.
    """

    vector: jax.Array
    packer: Packer


def pack(metrics: Mapping[str, jax.Array | NamedIndex]) -> PackedMetrics:
    """Packs metrics, inside or outside a jitted function.

    Args:
      metrics: {name: scalar, vector or `NamedIndex`}; element i of a vector is named "<name>/<i>".

    >>> import jax.numpy as jnp
    >>> step = jax.jit(lambda x: pack({"loss": jnp.sum(x), "rms": jnp.sqrt(x)}))
    >>> fetch({7: step(jnp.ones(2))})
    [{'step': 7, 'loss': 2.0, 'rms/0': 1.0, 'rms/1': 1.0}]
    """
    packer = Packer.of(metrics)
    return PackedMetrics(packer.pack(metrics), packer)


def fetch(packed: Mapping[int, PackedMetrics]) -> list[dict[str, Any]]:
    """Copies metrics to the host, all steps at once.

    Args:
      packed: {step: its metrics}.

    Returns:
      One record {"step": int, name: number, ...} for each step, in the given order.
    """
    fetched = jax.device_get(dict(packed))
    return [
        record
        for step, metrics in fetched.items()
        for record in metrics.packer.records({step: metrics.vector})
    ]
