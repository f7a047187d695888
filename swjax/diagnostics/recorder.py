"""Writes the metrics of every step to a file, for any training loop, without making a step wait."""

import io
import json
import math
import operator
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from swjax.diagnostics.values import NamedIndex
from swjax.safe_files import one_line

Metrics = Mapping[str, jax.Array | jax.ShapeDtypeStruct | NamedIndex]


class Packer:
    """Packs the metrics of one step into one vector, so that one transfer fetches them.

    The vector holds the bits of int32 and of float32 numbers. Integers that int32 holds stay exact; all other
    numbers are float32.

    >>> def step(x):
    ...     return {"loss": jnp.sum(x), "rms": jnp.sqrt(x)}
    >>> packer = Packer.of(jax.eval_shape(step, jnp.ones(2)))
    >>> packer.names
    ('loss', 'rms/0', 'rms/1')
    >>> vector = jax.jit(lambda x: packer.pack(step(x)))(jnp.ones(2))
    >>> packer.records({7: np.asarray(vector)})
    [{'step': 7, 'loss': 2.0, 'rms/0': 1.0, 'rms/1': 1.0}]
    """

    def __init__(
        self, names: Sequence[str], whole: Sequence[bool], choices: Mapping[str, Sequence[str]]
    ) -> None:
        self.names, self._whole, self._choices = tuple(names), tuple(whole), dict(choices)

    @classmethod
    def of(cls, metrics: Metrics) -> "Packer":
        """Creates the packer for these metrics.

        Args:
          metrics: {name: scalar, vector or `NamedIndex`}, or their shapes, from `jax.eval_shape`.
            Element i of a vector is named "<name>/<i>".

        Raises:
          ValueError: two values have the same name, or one is named "step", as the number of the step.
        """
        names: list[str] = []
        whole: list[bool] = []
        choices = {}
        for name, value in sorted(metrics.items()):
            if isinstance(value, NamedIndex):
                choices[name], value = value.names, value.index
            shape = np.shape(value)
            names += [f"{name}/{i}" for i in range(math.prod(shape))] if shape else [name]
            whole += [_is_whole(value)] * math.prod(shape)
        repeated = [name for name, count in Counter(["step", *names]).items() if count > 1]
        if repeated:
            raise ValueError(
                f"metrics must have different names, and none the name 'step' of the step's number, got "
                f"{repeated[0]!r} twice: rename one or leave it out"
            )
        return cls(names, whole, choices)

    def pack(self, metrics: Metrics) -> jax.Array:
        """[len(names)] int32."""
        leaves = jax.tree.leaves(metrics)  # the leaves of a dict are sorted by name
        if not leaves:
            return jnp.zeros(0, jnp.int32)
        return jnp.concatenate([_bits(leaf) for leaf in leaves])

    def records(self, vectors: Mapping[int, np.ndarray]) -> list[dict[str, Any]]:
        """Returns one record {"step": int, name: number, ...} for the vector of each step.

        A `NamedIndex` is recorded as the name that it selects, and omitted if it selects none.
        """
        records = []
        for step, vector in vectors.items():
            pairs = zip(self._whole, vector.tolist(), vector.view(np.float32).tolist())
            values = [bits if whole else real for whole, bits, real in pairs]
            record = {"step": step} | dict(zip(self.names, values, strict=True))
            selected = {name: record.pop(name) for name in self._choices}
            named = {name: self._choices[name][i] for name, i in selected.items() if i >= 0}
            records.append(record | named)
        return records


def _is_whole(value: Any) -> bool:
    """Whether int32 holds all integers of a value's dtype."""
    return np.can_cast(jnp.result_type(value), np.int32)


def _bits(value: Any) -> jax.Array:
    """The bits of a value as a flat int32 vector, see `Packer`."""
    value = jnp.ravel(value)
    if _is_whole(value):
        return value.astype(jnp.int32)
    return jax.lax.bitcast_convert_type(value.astype(jnp.float32), jnp.int32)


class Recorder:
    """Appends one line of JSON per step to a file that `python -m swjax diagnostics report` reads.

    Metrics of a jitted step stay on the device and are fetched many steps at a time. Metrics that are
    measured only at some steps, as by `measure`, are added to the records of those steps.

    Args:
      path: path of the file, such as "runs/mine/metrics.jsonl"; its directory is created.
      last_step: continues the file after this step, and removes later lines that a killed run left. A file
        that has records needs it.
      fetch_every: number of steps between two fetches.

    Raises:
      ValueError: the file has records and `last_step` is 0, or a line of the file is damaged.

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
        path, last_step = Path(path), operator.index(last_step)
        if last_step < 0:
            raise ValueError(f"last_step must be at least 0, got {last_step}: 0 starts a new file")
        if last_step == 0 and _has_records(path):
            raise ValueError(
                f"{path} must have no records if last_step is 0: pass last_step=N to continue after step N, "
                "or remove the file"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        truncate(path, last_step)
        self._file = open(path, "ab", buffering=0)
        self._every, self._last = fetch_every, last_step
        self._packers: dict[tuple, tuple[Packer, Callable]] = {}
        self._pending: dict[int, list[tuple[Packer, jax.Array]]] = {}

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Adds metrics of a step: scalars, or vectors, whose element i is named "<name>/<i>".

        Args:
          step: number of the step, from 1, and at least that of the previous call.
          metrics: arrays on the device, for which the call does not wait; or numbers and NumPy arrays.

        Raises:
          TypeError: a metric is not a number or an array, or is traced by a jitted function.
          ValueError: the recorder is closed; the step is below 1, or already written; or two metrics of the
            step have the same name, or one is named "step".
        """
        step = operator.index(step)
        if self._file.closed:
            raise ValueError(
                f"the recorder must be open, but was closed before step {step}: open the file again with "
                f"last_step={self._last}"
            )
        if step < 1:
            raise ValueError(f"steps count from 1, got {step}: add 1 to a step that counts from 0")
        if step < self._last or (step == self._last and step not in self._pending):
            raise ValueError(
                f"steps must not decrease, got {step} after {self._last}: after a rollback, open the file "
                f"again with last_step"
            )
        metrics = {name: _as_array(name, value) for name, value in metrics.items()}
        shapes = ((np.shape(x), x.dtype) for x in jax.tree.leaves(metrics))
        structure = jax.tree.structure(metrics), *shapes
        if structure not in self._packers:
            packer = Packer.of(metrics)
            self._packers[structure] = packer, jax.jit(packer.pack)
        packer, pack = self._packers[structure]
        for before, _ in self._pending.get(step, ()):
            if both := set(before.names) & set(packer.names):
                raise ValueError(
                    f"metrics of one step must have different names, got {min(both)!r} twice at step {step}: "
                    "rename one or leave it out"
                )
        if step not in self._pending and len(self._pending) >= self._every:
            self.flush()
        self._last = step
        self._pending.setdefault(step, []).append((packer, pack(metrics)))

    def flush(self) -> None:
        """Writes all added metrics; an error, as of a full disk, leaves them and the file unchanged."""
        vectors = jax.device_get({s: [v for _, v in parts] for s, parts in self._pending.items()})
        lines = []
        for step, parts in self._pending.items():
            line: dict[str, Any] = {"step": step}
            for (packer, _), vector in zip(parts, vectors[step], strict=True):
                (record,) = packer.records({step: vector})
                line |= {name: number(value) for name, value in record.items()}
            lines.append(json.dumps(line) + "\n")
        append(self._file, "".join(lines).encode())
        self._pending = {}

    def close(self) -> None:
        """Writes the remaining metrics, and closes the file even if that fails, as on a full disk."""
        if not self._file.closed:
            with self._file:
                self.flush()

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def append(file: io.FileIO, data: bytes) -> None:
    """Appends all of the data, or nothing: a part of a line would damage the line that follows it."""
    end = file.seek(0, io.SEEK_END)
    try:
        while data:
            data = data[file.write(data) :]
    except OSError:
        file.truncate(end)
        raise


def number(value: float | str | None) -> float | int | str | None:
    """Converts a number for JSON: the shortest equal float32, or None if that is not finite. Keeps names.

    >>> number(np.float32(0.1)), number(float("nan")), number(1e39)
    (0.1, None, None)
    """
    if value is None or isinstance(value, int | str):
        return value
    with np.errstate(over="ignore"):
        rounded = np.float32(value)
    return float(str(rounded)) if np.isfinite(rounded) else None


def _as_array(name: str, value: Any) -> Any:
    """Converts a number or a NumPy array of any dtype to int32 or float32; keeps arrays on the device."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value)):
        raise TypeError(
            f"metric {name!r} must have a value, got a traced array of a jitted function: return it from the "
            "function and add it outside"
        )
    if isinstance(value, NamedIndex):
        return value
    if isinstance(value, jax.Array) and not jnp.iscomplexobj(value):
        return value
    try:
        array = np.asarray(value)
        if array.dtype.kind in "iu" and np.all(array == array.astype(np.int32)):
            return array.astype(np.int32)
        with np.errstate(over="ignore"):  # an overflow is recorded as a value that is not finite
            return array.astype(np.float32, casting="same_kind")
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"metric {name!r} must be a number or an array of numbers, got {type(value).__name__}: "
            "convert it or leave it out"
        ) from error


def _has_records(path: Path) -> bool:
    """Whether the file has a complete line."""
    if not path.exists():
        return False
    with open(path, errors="replace") as file:
        return file.readline().endswith("\n")


def read_lines(path: Path, **types: Any) -> Iterator[tuple[dict, int]]:
    """Yields each record of the file, and the byte after its line; an incomplete last line is left out.

    Args:
      path: the file, which may not exist.
      **types: required keys besides "step", and the type of each.

    Raises:
      ValueError: a line is damaged.
    """
    if not path.exists():
        return
    end = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            what, remedy = f"{path}, line {number},", "correct the line, or remove it"
            text, end = line.decode(errors="replace"), end + len(line)
            yield json_object(what, text, remedy=remedy, step=int, **types), end


def json_object(what: str, text: str, *, remedy: str, **types: Any) -> dict:
    """Parses the JSON object in a file of a run.

    Args:
      what: description of the text, for the message.
      text: the text.
      remedy: what the message tells the user to do if the text is damaged.
      **types: required keys and the type of each.

    Raises:
      ValueError: the text is no such object, so the file is damaged.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} is damaged: {one_line(error)}: {remedy}") from error
    whole = isinstance(found, dict)
    if not whole or not all(isinstance(found.get(key), kind) for key, kind in types.items()):
        keys = f" with {' and '.join(types)}" if types else ""
        raise ValueError(f"{what} is damaged: it holds no JSON object{keys}: {remedy}")
    return found


def truncate(path: Path, last_step: int, **types: Any) -> dict[str, Any]:
    """Removes records after `last_step` and an incomplete line; returns the last record, or {}.

    Args:
      path: the file; the function does nothing if it does not exist.
      last_step: number of the last step to keep.
      **types: see `read_lines`. If a line is damaged, the file is unchanged.
    """
    last: dict[str, Any] = {}
    end = 0
    for record, after in read_lines(path, **types):
        if record["step"] > last_step:
            break
        last, end = record, after
    if path.exists():
        os.truncate(path, end)
    return last
