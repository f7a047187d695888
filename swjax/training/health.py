"""Quantization health of a run: a program of its own, now and then."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from swjax.diagnostics import Packer, taps
from swjax.models import sharding
from swjax.training.step import make_loss_and_grad


class Health:
    """Quantization health every `diagnostics.every_steps` steps, on the batch and parameters of the step.

    It is a program of its own, so that the train step is the same with and without it, and one that compiles
    fast rather than runs fast: blocks are scanned.

    Args:
      config: the run's.
      graphdef: of the model.
      params: of the model, or ShapeDtypeStructs like them, with shardings.
      steps: of the run.
    """

    def __init__(self, config, graphdef, params, *, steps: int):
        self._every, self._packer, self._pending = config.diagnostics.every_steps, Packer(), {}
        model = nnx.merge(graphdef, params)
        if self._every > steps or not taps.quantized_layers(model):
            self._every = 0
        if not self._every:
            return
        for module in (model, model.vision, model.text):
            module.cfg = dataclasses.replace(module.cfg, scan_layers=True)
        tapped, zeros = nnx.split(taps.insert(model))
        loss_and_grad = make_loss_and_grad(config, tapped)

        def measure(state, batch):
            key = jax.random.fold_in(jax.random.key(config.train.seed), state["step"])
            inserted, frozen = _beside(nnx.to_pure_dict(zeros), state["params"])
            _, _, sums = loss_and_grad(inserted, frozen, batch, key)
            return self._packer.pack(taps.read(sums))

        mesh = jax.tree.leaves(params)[0].sharding.mesh
        everywhere = NamedSharding(mesh, P())  # so that every process can read it
        self._measure, self._compiled = jax.jit(measure, out_shardings=everywhere), None

    def compile(self, state, batch):
        """The program (state, batch) -> measurements as one vector."""
        return self._measure.lower(state, batch).compile()

    def before(self, step: int, state, batch) -> None:
        """Measures, if the step with this number is one of those; it takes `state` afterwards."""
        if not self._every:
            return
        if self._compiled is None:  # at the first step, like the train step: not in mid-run
            self._compiled = self.compile(state, batch)
        if step % self._every == 0:
            self._pending[step] = self._compiled(state, batch)

    def records(self, last: int) -> dict[int, dict]:
        """{step: its measurements} since the last call, up to a step."""
        done = [step for step in self._pending if step <= last]
        fetched = jax.device_get({step: self._pending.pop(step) for step in done})
        return {record["step"]: record for record in self._packer.records(fetched)}


def _beside(all_variables, params):
    """Two trees like `all_variables`: taps, with None for parameters, and parameters, with None for taps."""
    named = {sharding.path_name(p): x for p, x in jax.tree_util.tree_leaves_with_path(params)}

    def lookup(path, _):
        return named.get(sharding.path_name(path))

    def tap(path, x):
        return None if sharding.path_name(path) in named else jnp.zeros(x.shape, x.dtype)

    each = jax.tree_util.tree_map_with_path
    return each(tap, all_variables), each(lookup, all_variables)
