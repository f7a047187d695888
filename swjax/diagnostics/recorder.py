"""Writes the metrics of every step to a file, for any training loop, without making a step wait."""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from swjax.diagnostics.values import NamedIndex

Metrics = Mapping[str, jax.Array | jax.ShapeDtypeStruct | NamedIndex]


class Packer:
    """Packs the metrics of one step into one float32 vector, so that one transfer fetches them.

    >>> def step(x):
    ...     return {"loss": jnp.sum(x), "rms": jnp.sqrt(x)}
    >>> packer = Packer.of(jax.eval_shape(step, jnp.ones(2)))
    >>> packer.names
    ('loss', 'rms/0', 'rms/1')
    >>> vector = jax.jit(lambda x: packer.pack(step(x)))(jnp.ones(2))
    >>> packer.records({7: np.asarray(vector)})
    [{'step': 7, 'loss': 2.0, 'rms/0': 1.0, 'rms/1': 1.0}]
    """

    def __init__(self, names: Sequence[str], choices: Mapping[str, Sequence[str]]) -> None:
        self.names, self._choices = tuple(names), dict(choices)

    @classmethod
    def of(cls, metrics: Metrics) -> "Packer":
        """Creates the packer for these metrics.

        Args:
          metrics: {name: scalar, vector or `NamedIndex`}, or their shapes, from `jax.eval_shape`.
            Element i of a vector is named "<name>/<i>".
        """
        names, choices = [], {}
        for name, value in sorted(metrics.items()):
            if isinstance(value, NamedIndex):
                choices[name], value = value.names, value.index
            names += [f"{name}/{i}" for i in range(value.size)] if value.ndim else [name]
        return cls(names, choices)

    def pack(self, metrics: Metrics) -> jax.Array:
        """[len(names)] float32."""
        leaves = jax.tree.leaves(metrics)  # the leaves of a dict are sorted by name
        return jnp.concatenate([jnp.ravel(leaf).astype(jnp.float32) for leaf in leaves])

    def records(self, vectors: Mapping[int, np.ndarray]) -> list[dict[str, Any]]:
        """Returns one record {"step": int, name: number, ...} for the vector of each step.

        A `NamedIndex` is recorded as the name that it selects, and omitted if it selects none.
        """
        records = []
        for step, vector in vectors.items():
            record = {"step": step} | dict(zip(self.names, vector.tolist(), strict=True))
            selected = {name: int(record.pop(name)) for name in self._choices}
            named = {name: self._choices[name][i] for name, i in selected.items() if i >= 0}
            records.append(record | named)
        return records


class Recorder:
    """Appends one line of JSON per step to a file that `python -m swjax diagnostics report` reads.

    Metrics of a jitted step stay on the device and are fetched many steps at a time. Metrics that are
    measured only at some steps, as by `measure`, are added to the records of those steps.

    Args:
      path: path of the file, such as "runs/mine/metrics.jsonl"; its directory is created.
      last_step: continues the file after this step, and removes later lines that a killed run left.
      fetch_every: number of steps between two fetches.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "metrics.jsonl")
    >>> with Recorder(path) as recorder:
    ...     for step in (1, 2):
    ...         recorder.add(step, {"train/loss": jnp.float32(0.5), "stability/rms/w": jnp.ones(2)})
    ...     recorder.add(2, {"quantization/sqnr_db/fc/x": jnp.float32(40)})
    >>> print(path.read_text().splitlines()[1])
    {"step": 2, "stability/rms/w/0": 1.0, "stability/rms/w/1": 1.0, "train/loss": 0.5,
     "quantization/sqnr_db/fc/x": 40.0}
    """

    def __init__(self, path: str | Path, *, last_step: int = 0, fetch_every: int = 50):
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        truncate(path, last_step)
        self._file = open(path, "a", encoding="utf-8")
        self._every, self._last = fetch_every, last_step
        self._packers: dict[tuple, tuple[Packer, Callable]] = {}
        self._pending: dict[int, list[tuple[Packer, jax.Array]]] = {}

    def add(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Adds metrics of a step: scalars, or vectors, whose element i is named "<name>/<i>".

        Args:
          step: number of the step, at least that of the previous call.
          metrics: arrays on the device; the call does not wait for them.

        Raises:
          ValueError: the step is already written.
        """
        if step < self._last or (step == self._last and step not in self._pending):
            raise ValueError(
                f"steps must not decrease, got {step} after {self._last}: after a rollback, open the file "
                f"again with last_step"
            )
        self._last = step
        if step not in self._pending and len(self._pending) >= self._every:
            self.flush()
        structure = jax.tree.structure(metrics), *(np.shape(x) for x in jax.tree.leaves(metrics))
        if structure not in self._packers:
            packer = Packer.of(metrics)
            self._packers[structure] = packer, jax.jit(packer.pack)
        packer, pack = self._packers[structure]
        self._pending.setdefault(step, []).append((packer, pack(metrics)))

    def flush(self) -> None:
        """Writes all added metrics."""
        vectors = jax.device_get({s: [v for _, v in parts] for s, parts in self._pending.items()})
        for step, parts in self._pending.items():
            line: dict[str, Any] = {"step": step}
            for (packer, _), vector in zip(parts, vectors[step], strict=True):
                (record,) = packer.records({step: vector})
                line |= {name: number(value) for name, value in record.items()}
            self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        self._pending = {}

    def close(self) -> None:
        """Writes the remaining metrics."""
        self.flush()
        self._file.close()

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def number(value: float | str | None) -> float | int | str | None:
    """Converts a number for JSON: the shortest equal float32, or None if not finite. Keeps names.

    >>> number(np.float32(0.1)), number(float("nan"))
    (0.1, None)
    """
    if value is None or isinstance(value, int | str):
        return value
    return float(str(np.float32(value))) if math.isfinite(value) else None


def read_line(number: int, line: str) -> dict:
    """Parses a record from a line of the file."""
    return json.loads(line)


def truncate(path: Path, last_step: int, read: Callable[[int, str], dict] = read_line) -> float:
    """Removes records after `last_step` and an incomplete line; returns the time of the last record."""
    if not path.exists():
        return 0.0
    seconds, part = 0.0, path.with_suffix(".part")
    with open(path, errors="replace") as old, open(part, "w") as new:
        for number, line in enumerate(old, 1):
            if not line.endswith("\n"):
                break
            record = read(number, line)
            if record["step"] > last_step:
                break
            seconds = record.get("time", 0.0)
            new.write(line)
    os.replace(part, path)
    return seconds
