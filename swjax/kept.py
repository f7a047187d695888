"""The parameters of language models that stay in 16 bits, by the names in their paths."""

import re
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

# Parts of paths of parameters that language models keep in 16 bits; a part is what stands between slashes.
_KEPT = {
    "lora": r"\w*lora[_/.]?(?:[ab]|down|up)(?:_\w+)?",
    "head": r"(?!(?:multi|single|attn|attention)_head)(?:\w+_)?head|(?:\w+_)?logits?(?:dense|_\w+)?"
    r"|classifier|embed_out|unembed\w*|output_(?:layer|projection)",
    "router": r"\w*router\w*|\w*expert_gate|gating",
    "gate": r"gate",
    "embedding": r"\w*embed\w*|wte|wpe|(?:\w+_)?emb",
    "norm": r"\w*norm(?:_?\d+|_\w)?|ln(?:_?\w)?",
}
_NAMES = {
    "output": "head",
    "gate": "router",
    "embedding": "embedding or tied head",
    "lora": "matrix of LoRA",
}  # of kinds, in reports
LLM = "llm"  # the expression that matches the paths of all others, see `expanded`
LLM_RULES = {LLM: "switchback"}  # what the string "llm" stands for
# A regular expression of these parameters: see `swjax.quantized`.
KEPT_IN_LLMS = (
    r"(?i)(?:.*[/.])?(?:"
    + "|".join(f"(?P<{kind}>{part})" for kind, part in _KEPT.items())
    + r")(?:[/.].*)?|(?P<output>(?:params/|model[/.])*output(?:[/.]\w+)?)"
)


def kept_kind(path: str) -> str:
    """The kind of parameter that `KEPT_IN_LLMS` finds in a path; "" if it does not match.

    >>> kept_kind("layers/3/mlp/router/kernel"), kept_kind("layers/3/mlp/gate_proj/kernel")
    ('router', '')
    """
    match = re.fullmatch(KEPT_IN_LLMS, path)
    return (match and match.lastgroup) or ""


def kept_kind_among(path: str, paths: Collection[str]) -> str:
    """`kept_kind`, but "" for a `gate` next to an `up`: it is an MLP's, not that of experts.

    >>> [kept_kind_among("mlp/gate", ["mlp/gate", other]) for other in ("mlp/up", "mlp/experts")]
    ['', 'gate']
    """
    kind = kept_kind(path)
    if kind == "gate":
        up = re.sub(r"(?i)\bgate\b(?!.*\bgate\b).*", "up", path)
        if any(re.match(rf"{re.escape(up)}(?:_proj)?\b", other) for other in paths):
            return ""
    return kind


def is_named(rules: Any) -> bool:
    """Whether rules are "llm", or have this expression."""
    return rules == LLM or (isinstance(rules, Mapping) and LLM in rules)


def expanded(rules: Mapping[str, T], paths: Collection[str]) -> dict[str, T]:
    """Rules in which an expression of `paths` stands for "llm"; without it, if they keep all paths.

    >>> expanded({"llm": "int8_hadamard"}, ["mlp/up", "mlp/down", "lm_head"])
    {'(?:mlp/up|mlp/down)': 'int8_hadamard'}
    """
    own = [re.escape(path) for path in paths if not kept_kind_among(path, paths)]
    return {
        f"(?:{'|'.join(own)})" if pattern == LLM else pattern: rule
        for pattern, rule in rules.items()
        if own or pattern != LLM
    }


def reason(kind: str) -> str:
    """The reason in reports why a parameter of this kind has no recipe.

    >>> reason("output")
    'the head stays in 16 bits'
    """
    return f"the {_NAMES.get(kind, kind)} stays in 16 bits"
