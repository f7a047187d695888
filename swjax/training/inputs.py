"""Opens the data of a run according to its config."""

import logging
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from swjax import data
from swjax.data.batches import check_augmentation
from swjax.data.survey import Survey, refusal, survey
from swjax.models import sharding
from swjax.training import distributed
from swjax.training.config import ConfigError, blame
from swjax.training.faults.failures import blame_data, blame_data_path
from swjax.training.log.timing import Timing
from swjax.training.setup import Parts, augmentation, fitting

logger = logging.getLogger("swjax.training.inputs")

# Keys in a data position: fingerprints of the splits; whether it is that of `checkpoint.resume`; the record
# that waits for its scores.
_PRINTS, RESUMED, UNSCORED = "fingerprints", "resumed", "unscored"


def open_source(config: ConfigDict, split: str) -> Any:
    """Opens the examples of a split by index; a data set is prepared at its first use.

    Args:
      config: the config of the run.
      split: "train", "val" or "test".

    Returns:
      The source, or None if the config has no such split and `split` is not "train".

    Raises:
      ConfigError: the data set does not exist, or cannot be read.
    """
    c = config.data
    name = c.name if split == "train" else config.eval.data or c.name
    if name != "mixture":
        return open_part(c, name, split)
    if split != "train":
        raise ConfigError(
            "config.eval.data='' but a mixture has no val and test splits: name the data set to "
            f"evaluate on, {', '.join([*c.mixture, 'or another'])}"
        )
    parts = {part: (open_part(c, part, split), c.mixture[part].weight) for part in c.mixture}
    with blame("data.mixture"):
        return data.Mixture(parts)


def open_part(c: ConfigDict, name: str, split: str) -> Any:
    """Opens a split of a data set, or of a part of the mixture.

    Args:
      c: the section config.data.
      name: name of the data set or of the part.
      split: see `open_source`, also for the result and the errors.
    """
    part = c.mixture[name].to_dict() if name in c.mixture else {"name": name}
    kind = part.pop("name")
    options = c[kind].to_dict() if kind in c else {}
    splits = options.pop("splits", {}) | part.pop("splits", {})
    options |= {key: value for key, value in part.items() if key != "weight"}
    if kind == "synthetic":
        options["image_size"] = c.image_size
    where = splits.get(split, split)
    if not where and split != "train":
        return None
    with blame("data"), blame_data_path():
        if not where:
            raise ValueError(f"{name}.splits.{split} is empty: name the data to train on")
        return data.source(kind, where, data_dir=c.dir, **options)


def open_splits(config: ConfigDict) -> dict[str, Any]:
    """Opens all splits of a run, so that a mistake shows at once in every process.

    Returns:
      {"train", and "val" and "test" if the config has them: examples by index}.

    Raises:
      ConfigError: see `open_source`; or the processes have splits of different lengths.
    """
    with distributed.all_or_none():
        splits = {split: open_source(config, split) for split in ("train", "val", "test")}
        with blame("data.augment"):
            check_augmentation(augmentation(config), splits["train"])
    splits = {split: source for split, source in splits.items() if source is not None}
    lengths = {split: len(source) for split, source in splits.items()}
    distributed.check_same("data", "{} examples", lengths)
    return splits


def fingerprints(splits: Mapping[str, Any]) -> dict[str, str]:
    """Returns a hash of what each split's source reads: see `swjax.data.fingerprint`.

    Raises:
      ConfigError: the processes read different data.
    """
    with distributed.all_or_none(), blame_data_path():
        found = {split: data.fingerprint(source) for split, source in splits.items()}
    numbers = {split: int(text[:15], 16) for split, text in found.items()}  # below 2**63
    distributed.check_same("data", "other examples (fingerprint {:x})", numbers)
    return found


def check_pictures(config: ConfigDict, sets: Mapping[str, Any]) -> list[str]:
    """Reads examples of photographs before the first step: all of small sets, a sample of others.

    All processes must call it; each reads its share. See `swjax.data.survey`.

    Args:
      config: the config of the run.
      sets: the splits and labelled sets of the run, by name.

    Returns:
      A line for each set with unusable examples, or whose examples could not all be read in time.

    Raises:
      ConfigError: the run would end because of unusable examples of a set.
    """
    said = []
    for name, source in sets.items():
        if not source.photographs:
            continue
        part = {"part": jax.process_index(), "parts": jax.process_count()}
        found = survey(source, **part)
        own = np.array([found.chosen, found.read, len(found.bad)], np.int64)
        chosen, read, bad = distributed.all_processes(own).sum(axis=0).tolist()
        with distributed.all_or_none():
            _check_survey(config.data, name, found, read, bad)
        if bad or read < chosen:
            which = ": ".join(found.bad[0]) if found.bad else ""
            said.append(
                f"{name}: {read:,} of {len(source):,} examples were read before the first step; {bad:,} "
                f"cannot be used and will be skipped{which and f', such as {which}'}"
            )
    return said


def _check_survey(c: ConfigDict, name: str, found: Survey, read: int, bad: int) -> None:
    """Raises a ConfigError in the processes that have seen bad examples, if these would end the run."""
    which = ": ".join(found.bad[0]) if found.bad else ""
    if which and c.on_bad == "stop":
        raise ConfigError(
            f"config.data: {name}: cannot read {which}: repair it, or set config.data.on_bad=skip"
        )
    why = refusal(bad, read, found.examples, c.max_bad_share)
    if which and why:
        raise ConfigError(
            f"config.data: {name}: {why}, such as {which}: `swjax data check` lists them; repair them, or "
            f"set config.data.max_bad_share"
        )


def check_fingerprints(position: Mapping[str, Any], own: Mapping[str, str]) -> None:
    """Compares the data of a resumed run with the data that it was saved with.

    Args:
      position: the saved data position.
      own: fingerprints of the current data.

    Raises:
      ConfigError: the training data differ. For other splits, or a run resumed from `checkpoint.resume` in
        another workdir, logs a warning instead.
    """
    saved = position[_PRINTS]
    changed = [split for split in own if saved.get(split, own[split]) != own[split]]
    if "train" in changed and not position.get(RESUMED):
        raise ConfigError(
            "config.data: the training data differ from those that this run was saved with, in their order, "
            "names, captions, sizes or pictures: give it the same data; to go on with other data, set "
            "checkpoint.resume=WORKDIR and another --workdir"
        )
    for split in changed if distributed.is_first() else ():
        logger.warning("the %s data differ from those that this run was saved with", split)


class Feed:
    """The training batches of a run, on its devices.

    Args:
      config: the config of the run.
      parts: the parts of the run.
      prints: see `fingerprints`.
      position: position at which an earlier feed ended; None starts at the beginning, as does that of a run
        in another workdir with another number of examples.
      timing: clock of the run; it measures how long the loop waits for data.

    Raises:
      ConfigError: the position belongs to other data.
    """

    def __init__(
        self,
        config: ConfigDict,
        parts: Parts,
        prints: dict[str, str],
        position: dict[str, Any] | None,
        timing: Timing,
    ):
        examples = len(parts.source)
        if position and position["examples"] == examples:  # otherwise the loader says so
            check_fingerprints(position, prints)
        elif position and position.get(RESUMED):
            position = None
            if distributed.is_first():
                logger.warning(
                    "the %d training examples are other data: read from the start", examples
                )
        self._mesh, self._timing, self._prints = parts.mesh, timing, prints
        self._error: data.BadData | data.LostProcess | None = None
        share = sharding.batch_share(parts.mesh)
        self._readers = list(share.readers)
        self._batches = open_batches(config, parts.source, position, share)
        self._progress = self._batches.progress
        self._ahead: _Ahead | None = None

    def __next__(self) -> dict[str, jax.Array]:
        """The next batch, sharded over the devices.

        Raises:
          StopIteration: in all processes, if too many examples of one are unreadable, or one has lost a
            loader process; `check` says which.
        """
        ahead = self._ahead or self._read()
        if not ahead.all_have:
            raise StopIteration
        if distributed.several():
            # The processes compute this step while they find out about the next batch.
            self._ahead = self._read()
        self._progress = ahead.progress
        return sharding.shard_batch(ahead.batch, self._mesh)

    def _read(self) -> "_Ahead":
        """Reads a batch, and starts to find out whether all processes have theirs."""
        batch = None
        try:
            with self._timing.waiting():
                batch = next(self._batches)
        except (data.BadData, data.LostProcess) as error:
            self._error = error
        return _Ahead(batch, self._batches.progress, self._mesh)

    def check(self) -> None:
        """Raises the error that has ended the feed, if any; all processes must call it.

        Raises:
          ConfigError: too many examples are unreadable.
          RunError: a loader process was lost.
        """
        with distributed.all_or_none(), blame_data():
            if self._error:
                raise self._error

    @property
    def skipped(self) -> int:
        """The number of unreadable examples that this process has skipped in the run."""
        return self._progress.skipped

    def of_readers(self, own: np.ndarray) -> np.ndarray:
        """Gathers int64 [n] of every process into [batch shards, n]; all processes must call it."""
        return distributed.all_processes(own)[self._readers]

    def position(self) -> dict[str, Any]:
        """The position after the batches so far, JSON-serializable; all processes must call it."""
        return self._progress.position(self.of_readers) | {_PRINTS: self._prints}

    def close(self) -> None:
        """Ends the loader's threads and processes."""
        self._batches.close()


class _Ahead:
    """A batch of this process, or None, and whether all processes have theirs.

    The processes compute the answer on their devices, in the order of the steps, so that asking for it waits
    for the step before the last one and not for the last one.

    Args:
      batch: the batch, or None if the data of this process have ended.
      progress: progress of this process after the batch.
      mesh: mesh of all devices.
    """

    def __init__(self, batch: dict[str, np.ndarray] | None, progress: Any, mesh: jax.sharding.Mesh):
        self.batch, self.progress = batch, progress
        several = distributed.several()
        self._all = distributed.all_say(batch is not None, mesh) if several else None

    @property
    def all_have(self) -> bool:
        """Whether all processes have their batch."""
        return self.batch is not None if self._all is None else bool(self._all)


def open_batches(
    config: ConfigDict, source: Any, position: dict | None, share: sharding.Share
) -> Any:
    """Returns an iterator over this process's shard of every training batch, in host memory.

    Args:
      config: the config of the run.
      source: the training examples.
      position: position at which an earlier iterator ended; None starts at the beginning.
      share: this process's share, from `sharding.batch_share`.

    Raises:
      ConfigError: the position belongs to other data.
    """
    c = config.data
    with blame("data"):
        return data.loader(
            source,
            batch_size=config.train.batch_size // share.count,
            seed=config.train.seed,
            position=position,
            context_length=c.context_length,
            tokenizer=c.tokenizer,
            image_size=c.image_size,
            fitting=fitting(config),
            augmentation=augmentation(config),
            process_index=share.index,
            process_count=share.count,
            workers=c.workers,
            shuffle=c.shuffle,
            shuffle_shards=c.shuffle_shards,
            on_bad=c.on_bad,
            max_bad_share=c.max_bad_share,
        )
