"""The config keys of configs/common.py: what each accepts, which `swjax.training.config` checks before a run.

An interval, such as "[1, 4096]" or "(0, inf)", contains neither infinity nor NaN.
"""

import difflib
import json
import math
import runpy
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from swjax.training.faults.errors import ConfigError

# configs/ is at the top level of the checkout, and is installed as swjax.configs.
_ROOT = Path(__file__).resolve().parents[1]
INSTALLED = _ROOT / "configs" / "common.py"
COMMON = INSTALLED if INSTALLED.exists() else _ROOT.parent / "configs" / "common.py"
_NOUNS = {bool: "true or false", int: "a whole number", float: "a finite number", str: "a text"}
_SWITCH = {"true": True, "1": True, "false": False, "0": False}


class Key(NamedTuple):
    """A config key.

    Attributes:
      kind: bool, int, float, str, or tuple.
      interval: the range of a number, such as "[0, 1)"; "" allows any finite number. A tuple with an interval
        holds as many numbers as its default, or is empty or holds two whole numbers if the default is empty;
        two numbers are the first and the last of a range. A tuple without one holds texts.
      choices: the accepted texts; () accepts any text.
      default: the value in configs/common.py.
      meaning: one sentence for the reference.
    """

    kind: type
    interval: str = ""
    choices: tuple[str, ...] = ()
    default: Any = None
    meaning: str = ""

    @property
    def element(self) -> "Key":
        """The key of one number of a tuple."""
        return Key(type(self.default[0]) if self.default else int, self.interval)

    @property
    def length(self) -> int:
        """How many numbers a tuple holds."""
        return len(self.default or (0, 0))

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
                one = self.element.rule().removeprefix("a ")
                count = "FIRST,LAST: two" if self.length == 2 else f"{self.length}"
                order = ", FIRST <= LAST" if self.length == 2 else ""
                nothing = "" if self.default else ", or nothing"
                return f"{count} {one.replace('number', 'numbers', 1)}{order}{nothing}"
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
        >>> KEYS["train.profile_steps"].read("(100, 105)")
        (100, 105)
        """
        if self.kind is bool:
            if text.lower() not in _SWITCH:
                raise ValueError(self.rule())
            return _SWITCH[text.lower()]
        if self.kind is tuple and self.interval:
            parts = text.strip("()").split(",") if text.strip("()") else ()
            numbers = tuple(self.element.kind(part) for part in parts)
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
            if not isinstance(value, tuple) or not all(map(self.element.accepts, value)):
                return False
            if not value:
                return not self.default
            return len(value) == self.length and (len(value) != 2 or value[0] <= value[1])
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


def _table() -> dict[str, Key]:
    rows = runpy.run_path(str(COMMON))["KEYS"]
    keys = {}
    for name, (default, accepted, meaning) in rows.items():
        interval = accepted if isinstance(accepted, str) else ""
        choices = accepted if isinstance(accepted, tuple) else ()
        keys[name] = Key(type(default), interval, choices, default, meaning)
    return keys


KEYS = _table()
SOURCES = tuple(name for name in KEYS["data.name"].choices if name != "mixture")


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

    >>> suggest("repot", ["report", "export"])
    "did you mean 'report'?"
    """
    near = difflib.get_close_matches(name, list(known), n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"choose from {', '.join(repr(n) if not n else n for n in known)}"
