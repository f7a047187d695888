"""The data of a run, opened as its config says."""

from swjax import data
from swjax.models import sharding
from swjax.training import distributed
from swjax.training.config import ConfigError, blame


def open_source(config, split: str):
    """The examples of a split, "train", "val" or "test", by number; prepared at first use.

    Returns:
      The source; None if the config names no such split, and that is not "train".
    """
    c = config.data
    name = c.name if split == "train" else config.eval.data or c.name
    if name != "mixture":
        return open_part(c, name, split)
    if split != "train":
        raise ConfigError(
            "config.eval.data='' but a mixture has no val and test splits: name the data set to "
            f"evaluate on, {', '.join(c.mixture)} or another"
        )
    for part, settings in c.mixture.items():
        if not {"name", "weight"} <= set(settings):
            raise ConfigError(
                f"config.data.mixture.{part} needs a name, of a data set, and a weight; it has "
                f"{', '.join(settings)}"
            )
    parts = {part: (open_part(c, part, split), c.mixture[part].weight) for part in c.mixture}
    with blame("data.mixture"):
        return data.Mixture(parts)


def open_part(c, name: str, split: str):
    """A split of a data set, or of a part of the mixture; see `open_source`."""
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
    with blame("data"):
        if not where:
            raise ValueError(f"{name}.splits.{split} is empty: name the data to train on")
        return data.source(kind, where, data_dir=c.dir, **options)


def open_batches(config, source, position: dict | None, share: sharding.Share):
    """This process's part of every training batch, from a position on."""
    c = config.data
    with blame("data"):
        return data.loader(
            source,
            batch_size=config.train.batch_size // share.count,
            seed=config.train.seed,
            position=position,
            context_length=c.context_length,
            image_size=c.image_size,
            process_index=share.index,
            process_count=share.count,
            workers=c.workers,
            shuffle=c.shuffle,
            shuffle_shards=c.shuffle_shards,
            on_bad=c.on_bad,
            max_bad_share=c.max_bad_share,
        )


def make_gather(share: sharding.Share):
    """Returns a function: int64 [n] of every process -> [parts of the batch, n] on each."""
    return lambda own: distributed.gather(own)[list(share.readers)]
