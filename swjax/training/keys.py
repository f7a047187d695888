"""Type and range of every config key, which `swjax.training.config` checks before a run starts.

configs/common.py has the defaults and the meanings, in the same order. A range is an interval, such as
"[1, 4096]" or "(0, inf)"; no interval contains infinity or NaN.
"""

import difflib
import json
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from swjax.training.faults.errors import ConfigError

_NOUNS = {bool: "true or false", int: "a whole number", float: "a finite number", str: "a text"}
_SWITCH = {"true": True, "1": True, "false": False, "0": False}


class Key(NamedTuple):
    """The values that a config key accepts.

    Attributes:
      kind: bool, int, float, str, or tuple.
      interval: the range of a number, such as "[0, 1)"; "" allows any finite number. A tuple with an interval
        is empty or holds the first and the last of a range of whole numbers. A tuple without one holds texts.
      choices: the accepted texts; () accepts any text.
    """

    kind: type
    interval: str = ""
    choices: tuple[str, ...] = ()

    def rule(self) -> str:
        """Describes the accepted values in words.

        >>> Key(int, "[1, 4096]").rule()
        'a whole number, at least 1, at most 4096'
        >>> Key(float, "(0, inf)").rule()
        'a finite number, above 0'
        """
        if self.choices:
            return "one of " + ", ".join(repr(choice) for choice in self.choices)
        if self.kind is tuple:
            if self.interval:
                return "FIRST,LAST: two whole numbers, 1 <= FIRST <= LAST, or nothing"
            return "texts, separated by commas, or a JSON list of them"
        opening, low, high, closing = _parse(self.interval)
        lower = "at least" if opening == "[" else "above"
        upper = "at most" if closing == "]" else "below"
        bounds = ((lower, low), (upper, high))
        limits = [f"{word} {bound:.10g}" for word, bound in bounds if math.isfinite(bound)]
        return ", ".join([_NOUNS[self.kind], *limits])

    def read(self, text: str) -> Any:
        """Parses a text from the command line.

        Raises:
          ValueError: the text has another type.

        >>> Key(tuple).read('text/.*,logit_scale'), Key(tuple).read('["a{1,2}"]')
        (('text/.*', 'logit_scale'), ('a{1,2}',))
        >>> _range().read("(100, 105)"), _range().read("")
        ((100, 105), ())
        """
        if self.kind is bool:
            if text.lower() not in _SWITCH:
                raise ValueError(self.rule())
            return _SWITCH[text.lower()]
        if self.kind is tuple and self.interval:
            numbers = tuple(int(part) for part in text.strip("()").split(",") if text.strip("()"))
            if not self.accepts(numbers):
                raise ValueError(self.rule())
            return numbers
        if self.kind is tuple:
            patterns = json.loads(text) if text.startswith('["') else text.split(",")
            return tuple(patterns) if text else ()
        return self.kind(text)

    def accepts(self, value: Any) -> bool:
        """Whether a value has the type and is in the range; an int is accepted as a float."""
        if self.kind is tuple and self.interval:
            whole = Key(int, self.interval)
            ranged = isinstance(value, tuple) and all(whole.accepts(part) for part in value)
            return ranged and (not value or (len(value) == 2 and value[0] <= value[1]))
        if self.kind is tuple:
            return isinstance(value, tuple) and all(isinstance(part, str) for part in value)
        kinds = (int, float) if self.kind is float else self.kind
        if not isinstance(value, kinds) or (isinstance(value, bool) and self.kind is not bool):
            return False
        if not isinstance(value, (int, float)) or self.kind is bool:
            return value in self.choices if self.choices else True
        opening, low, high, closing = _parse(self.interval)
        above = low <= value if opening == "[" else low < value
        below = value <= high if closing == "]" else value < high
        return math.isfinite(value) and above and below


def _parse(interval: str) -> tuple[str, float, float, str]:
    """Splits an interval into the opening bracket, the two bounds and the closing bracket."""
    low, high = (interval or "(-inf, inf)")[1:-1].split(",")
    return (interval or "(")[0], float(low), float(high), (interval or ")")[-1]


def _flag() -> Key:
    return Key(bool)


def _whole(interval: str) -> Key:
    return Key(int, interval)


def _number(interval: str) -> Key:
    return Key(float, interval)


def _text(*choices: str) -> Key:
    return Key(str, choices=choices)


def _range() -> Key:
    return Key(tuple, _FROM_1)


_FROM_0, _FROM_1 = "[0, 1e9]", "[1, 1e9]"  # for numbers of steps, classes, examples

SOURCES = ("emoji", "icons", "synthetic", "tfds", "webdataset", "table", "parquet", "folders",
           "huggingface")  # fmt: skip
ICON_SPLITS = ("train", "val", "test", "test_sets", "test_both")

KEYS: dict[str, Key] = {
    "model.name": _text("tiny", "vit_b32", "vit_b16", "vit_l14", "vit_h14"),
    "model.architecture": _text("clip", "siglip"),
    "model.vision.width": _whole("[0, 65536]"),
    "model.vision.layers": _whole("[0, 1024]"),
    "model.vision.heads": _whole("[0, 1024]"),
    "model.vision.patch_size": _whole("[0, 4096]"),
    "model.text.width": _whole("[0, 65536]"),
    "model.text.layers": _whole("[0, 1024]"),
    "model.text.heads": _whole("[0, 1024]"),
    "model.embed_dim": _whole("[0, 65536]"),
    "model.recipe": _text(
        "standard",
        "switchback",
        "switchback_m",
        "switchback_q",
        "switchback_hadamard",
        "llm_int8",
        "llm_int8_outlier6",
        "fp8_switchback",
        "fp8_tensorwise",
    ),
    "model.dtype": _text("float32", "bfloat16", "float16"),
    "model.attention": _text("", "xla", "cudnn", "triton"),
    "model.remat": _text("none", "full", "dots", "save_quantized", "save_linear"),
    "model.scan_layers": _flag(),
    "model.layer_scale": _flag(),
    "model.qk_norm": _flag(),
    "model.gelu": _text("exact", "tanh", "quick"),
    "model.patch_dropout": _number("[0, 1)"),
    "data.name": _text(*SOURCES, "mixture"),
    "data.emoji.task": _text("mixed", "strict"),
    "data.icons.config": _text("full", "slice"),
    "data.icons.archive": _text(),
    "data.icons.splits.train": _text(*ICON_SPLITS),
    "data.icons.splits.val": _text("", *ICON_SPLITS),
    "data.icons.splits.test": _text("", *ICON_SPLITS),
    "data.synthetic.classes": _whole(_FROM_1),
    "data.synthetic.examples": _whole(_FROM_1),
    "data.tfds.builder": _text(),
    "data.tfds.image_key": _text(),
    "data.tfds.text_key": _text(),
    "data.tfds.splits.train": _text(),
    "data.tfds.splits.val": _text(),
    "data.tfds.splits.test": _text(),
    "data.webdataset.image_key": _text(),
    "data.webdataset.text_key": _text(),
    "data.webdataset.splits.train": _text(),
    "data.webdataset.splits.val": _text(),
    "data.webdataset.splits.test": _text(),
    "data.table.image_key": _text(),
    "data.table.text_key": _text(),
    "data.table.splits.train": _text(),
    "data.table.splits.val": _text(),
    "data.table.splits.test": _text(),
    "data.parquet.image_key": _text(),
    "data.parquet.text_key": _text(),
    "data.parquet.splits.train": _text(),
    "data.parquet.splits.val": _text(),
    "data.parquet.splits.test": _text(),
    "data.folders.template": _text(),
    "data.folders.splits.train": _text(),
    "data.folders.splits.val": _text(),
    "data.folders.splits.test": _text(),
    "data.huggingface.image_key": _text(),
    "data.huggingface.text_key": _text(),
    "data.huggingface.splits.train": _text(),
    "data.huggingface.splits.val": _text(),
    "data.huggingface.splits.test": _text(),
    "data.dir": _text(),
    "data.image_size": _whole("[1, 4096]"),
    "data.context_length": _whole("[2, 4096]"),  # the start token and the end token
    "data.augment": _flag(),
    "data.workers": _whole("[0, 4096]"),
    "data.shuffle": _text("global", "shard"),
    "data.shuffle_shards": _whole(_FROM_1),
    "data.on_bad": _text("skip", "stop"),
    "data.max_bad_share": _number("[0, 1]"),
    "optimizer.name": _text("stable_adamw", "adamw", "muon"),
    "optimizer.learning_rate": _number("(0, 1e6]"),
    "optimizer.b1": _number("[0, 1)"),
    "optimizer.b2": _number("[0, 1)"),
    "optimizer.b2_power": _number("[0, 1]"),
    # Below 1.2e-38 eps is 0 in float32, and a zero gradient gives 0/0.
    "optimizer.eps": _number("[1.2e-38, 1]"),
    "optimizer.weight_decay": _number("[0, 1e6]"),
    "optimizer.clip_threshold": _number("[0, inf)"),
    "optimizer.grad_clip_norm": _number("[0, inf)"),
    "optimizer.loss_scaling": _text("", "per_tensor", "dynamic"),
    "optimizer.loss_scale": _number("[1, 1e30]"),
    "optimizer.loss_scale_growth_steps": _whole(_FROM_1),
    "optimizer.freeze": Key(tuple),
    "schedule.name": _text("cosine", "linear", "constant", "wsd", "rsqrt"),
    "schedule.floor": _number("[0, 1]"),
    "schedule.decay": _number("(0, 1]"),
    "schedule.warmup_steps": _whole(_FROM_0),
    "schedule.warmup_epochs": _number("[0, 1e6]"),
    "schedule.warmup_examples": _whole("[0, 1e15]"),
    "train.batch_size": _whole("[1, 1e8]"),
    "train.steps": _whole(_FROM_0),
    "train.epochs": _number("[0, 1e6]"),
    "train.examples": _whole("[0, 1e15]"),
    "train.accumulation": _whole("[1, 65536]"),
    "train.loss": _text("softmax", "sigmoid"),
    "train.reduce_dtype": _text("float32", "bfloat16"),
    "train.reduce_once": _flag(),
    "train.concurrent_kernels": _flag(),
    "train.ema_decay": _number("[0, 1)"),
    "train.nan_policy": _text("stop", "skip", "rollback"),
    "train.seed": _whole("[0, 2147483647]"),
    "train.compilation_cache": _text(),
    "train.profile_steps": _range(),
    "eval.data": _text(),
    "eval.zeroshot": Key(tuple),
    "eval.every_steps": _whole(_FROM_0),
    "eval.batch_size": _whole("[1, 1e8]"),
    "eval.captions_per_image": _whole("[0, 1e6]"),
    "mesh.data": _whole("[-1, 1e6]"),
    "mesh.fsdp": _whole("[-1, 1e6]"),
    "mesh.tensor": _whole("[-1, 1e6]"),
    "checkpoint.every_steps": _whole(_FROM_0),
    "checkpoint.keep": _whole("[1, 1e6]"),
    "checkpoint.resume": _text(),
    "checkpoint.init_from": _text(),
    "checkpoint.mirror": _text(),
    "log.every_steps": _whole(_FROM_1),
    "log.tensorboard": _flag(),
    "log.wandb": _text(),
    "diagnostics.rms": _flag(),
    "diagnostics.features": _flag(),
    "diagnostics.norms": _flag(),
    "diagnostics.every_steps": _whole(_FROM_0),
    "report.enabled": _flag(),
}


def check_values(values: dict) -> None:
    """Checks the type and the range of values by key, such as {"train.steps": 20}.

    Raises:
      ConfigError: names the first wrong key, its value and the accepted values.
    """
    for name, value in values.items():
        key = KEYS.get(name)
        if key is None:
            continue  # belongs to a part of a mixture: sources check their own options
        if isinstance(value, str) and key.choices:
            choice(name, value, key.choices)
        elif not key.accepts(value):
            raise ConfigError(f"config.{name}={value!r} must be {key.rule()}")


def choice(name: str, value: str, known: Iterable[str]) -> str:
    """Returns `value` if it is one of `known`.

    Raises:
      ConfigError: `value` is unknown; the message names the key and the nearest choice, or all choices.

    >>> choice("optimizer.name", "adamw", ("stable_adamw", "adamw"))
    'adamw'
    """
    if value in known:
        return value
    raise ConfigError(f"config.{name}={value!r} is unknown: {suggest(value, known)}")


def suggest(name: str, known: Iterable[str]) -> str:
    """Suggests the known name nearest to a misspelt one, or lists all known names.

    >>> suggest("repot", ["report", "convert"])
    "did you mean 'report'?"
    """
    near = difflib.get_close_matches(name, list(known), n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"choose from {', '.join(repr(n) if not n else n for n in known)}"
