"""Metrics of every step in a file, for any training loop, without a step waiting for them."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np


class Packer:
    """One step's metrics as one float32 vector: one array to fetch, whatever their number.

    >>> packer = Packer()
    >>> vector = jax.jit(packer.pack)({"loss": jnp.float32(2), "rms": jnp.ones(2)})
    >>> packer.records({7: np.asarray(vector)})
    [{'step': 7, 'loss': 2.0, 'rms/0': 1.0, 'rms/1': 1.0}]
    """

    def __init__(self):
        self.names: list[str] = []  # known once `pack` has been traced
        self.tensors: list[str] = []  # that "train/nonfinite" counts

    def pack(self, metrics: dict) -> jax.Array:
        """Scalars and vectors, by name; element i of a vector is named "<name>/<i>"."""
        self.names = []
        for name in sorted(metrics):
            scalar, size = metrics[name].ndim == 0, metrics[name].size
            self.names += [name] if scalar else [f"{name}/{i}" for i in range(size)]
        return jnp.concatenate([jnp.ravel(metrics[n]).astype(jnp.float32) for n in sorted(metrics)])

    def records(self, vectors: dict[int, np.ndarray]) -> list[dict]:
        """One record {"step": int, name: number, ...} for each step's vector.

        "train/nonfinite", of `first_nonfinite`, becomes the name of the first tensor that is not finite,
        and is left out if there is none.
        """
        records = []
        for step, vector in vectors.items():
            record = {"step": step} | dict(zip(self.names, vector.tolist(), strict=True))
            index = int(record.pop("train/nonfinite", -1))
            bad = {"train/nonfinite": self.tensors[index]} if index >= 0 else {}
            records.append(record | bad)
        return records


class Recorder:
    """Appends one line of JSON a step to a file that `python -m swjax.diagnostics report` reads.

    Metrics stay on the device, as they come from a jitted step, and are fetched many steps at a time. What
    was measured at some steps only, as by `measure`, is added to those.

    Args:
      path: of the file, as "runs/mine/metrics.jsonl"; its directory is created.
      last_step: goes on with the file after this step, and removes what a killed run left beyond it.
      fetch_every: steps.

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
        """Takes metrics of a step: scalars, or vectors, whose element i is named "<name>/<i>".

        Args:
          step: not below that of the call before.
          metrics: on the device; they are not waited for.

        Raises:
          ValueError: the step is written already.
        """
        if step < self._last or (step == self._last and step not in self._pending):
            raise ValueError(
                f"steps must not fall, got {step} after {self._last}: where a run goes back, open the file "
                f"again with last_step"
            )
        self._last = step
        if step not in self._pending and len(self._pending) >= self._every:
            self.flush()
        names = tuple(sorted(metrics))
        if names not in self._packers:
            packer = Packer()
            self._packers[names] = packer, jax.jit(packer.pack)
        packer, pack = self._packers[names]
        self._pending.setdefault(step, []).append((packer, pack(metrics)))

    def flush(self) -> None:
        """Writes what has been added."""
        vectors = jax.device_get({s: [v for _, v in parts] for s, parts in self._pending.items()})
        for step, parts in self._pending.items():
            line = {"step": step}
            for (packer, _), vector in zip(parts, vectors[step], strict=True):
                line |= dict(zip(packer.names, map(number, vector), strict=True))
            self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        self._pending = {}

    def close(self) -> None:
        """Writes the rest."""
        self.flush()
        self._file.close()

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *error) -> None:
        self.close()


def number(value) -> float | int | str | None:
    """A number for JSON: the shortest that is the same float32; None for NaN and infinity. Names stay.

    >>> number(np.float32(0.1)), number(float("nan"))
    (0.1, None)
    """
    if value is None or isinstance(value, int | str):
        return value
    return float(str(np.float32(value))) if math.isfinite(value) else None


def read_line(number: int, line: str) -> dict:
    """A record from a line of the file."""
    return json.loads(line)


def truncate(path: Path, last_step: int, read: Callable[[int, str], dict] = read_line) -> float:
    """Removes records after `last_step` and a half-written line; returns the last one's time."""
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
