"""For mkdocs: shows examples and literal blocks in docstrings as code."""

import re
import textwrap

import griffe

EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)
# An indented block after a line that ends in "::".
LITERAL = re.compile(r"^(\S.*:):\n\n((?:(?: .*)?\n)* .*)", re.MULTILINE)


class Doctests(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_) -> None:
        if obj.docstring:
            text = EXAMPLE.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
            obj.docstring.value = LITERAL.sub(literal, text)


def literal(found: re.Match) -> str:
    return f"{found[1]}\n\n```text\n{textwrap.dedent(found[2])}\n```"
