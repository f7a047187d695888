"""Measures the quantization health of a run every few steps, in a separate program."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from swjax.diagnostics import taps
from swjax.models import sharding
from swjax.optax import path_name
from swjax.training.log.packed import PackedMetrics, fetch, pack
from swjax.training.log.timing import is_due
from swjax.training.step import Batch, State, factor_of_loss, make_loss_and_grad, step_key


class Health:
    """Measures quantization health every `diagnostics.every_steps` steps, on the step's batch and parameters.

    The measurement is a separate program, so the train step does not depend on it. The program scans over
    blocks, which compiles faster but runs slower. It is compiled when a measurement is first due, so that the
    first step does not wait for it.

    Args:
      config: the config of the run.
      graphdef: graph definition of the model.
      params: parameters of the model, or ShapeDtypeStructs like them, with shardings.
      steps: number of steps of the run.
    """

    def __init__(self, config: ConfigDict, graphdef: nnx.GraphDef, params: Any, *, steps: int):
        self._every = config.diagnostics.every_steps
        self._pending: dict[int, PackedMetrics] = {}
        self._compiled: jax.stages.Compiled | None = None
        model = nnx.merge(graphdef, params)
        if self._every > steps or not taps.quantized_layers(model):
            self._every = 0
        if not self._every:
            return
        for module in (model, model.vision, model.text):
            module.cfg = dataclasses.replace(module.cfg, scan_layers=True)
        tapped, zeros = nnx.split(taps.insert(model))
        loss_and_grad = make_loss_and_grad(config, tapped)

        def measure(state: State, batch: Batch) -> PackedMetrics:
            key = step_key(config, state["step"])
            inserted, frozen = _split_taps(nnx.to_pure_dict(zeros), state["params"])
            scale = factor_of_loss(config, state)
            return pack(taps.read(loss_and_grad(inserted, frozen, batch, key, scale).grads))

        mesh = jax.tree.leaves(params)[0].sharding.mesh
        everywhere = NamedSharding(mesh, P())  # replicated, so that every process can read it
        options = sharding.compiler_options(mesh)
        self._measure = jax.jit(measure, out_shardings=everywhere, compiler_options=options)

    def compiles_at(self, step: int) -> bool:
        """Whether a measurement is due at this step and the program is not compiled yet."""
        return is_due(step, self._every) and self._compiled is None

    def compile(self, state: State, batch: Batch) -> jax.stages.Compiled:
        """Compiles the program (state, batch) -> measurements."""
        with _explain_failure():
            self._compiled = self._measure.lower(state, batch).compile()
        return self._compiled

    def before(self, step: int, state: State, batch: Batch) -> None:
        """Measures, if the step with this number is due. The train step may donate `state` afterwards."""
        if is_due(step, self._every):
            compiled = self._compiled or self.compile(state, batch)
            with _explain_failure():
                self._pending[step] = compiled(state, batch)

    def records(self, last: int) -> dict[int, dict[str, float]]:
        """Returns {step: measurements} of the steps since the last call, up to the step `last`."""
        done = [step for step in self._pending if step <= last]
        fetched = fetch({step: self._pending.pop(step) for step in done})
        return {record["step"]: record for record in fetched}


@contextlib.contextmanager
def _explain_failure() -> Iterator[None]:
    """Adds to an error of XLA, such as a lack of memory, which program failed and how to disable it."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        error.add_note(
            "The measurement of quantization health failed, not the train step. "
            "--config.diagnostics.every_steps=0 disables it."
        )
        raise


def _split_taps(variables: dict, params: Any) -> tuple[Any, Any]:
    """Splits all variables into (taps, parameters): two trees like `variables`, each with None elsewhere."""
    named = {path_name(p): x for p, x in jax.tree_util.tree_leaves_with_path(params)}

    def lookup(path, _):
        return named.get(path_name(path))

    def tap(path, x):
        return None if path_name(path) in named else jnp.zeros(x.shape, x.dtype)

    each = jax.tree_util.tree_map_with_path
    return each(tap, variables), each(lookup, variables)
