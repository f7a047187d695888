"""ImageNet's class names in words that CLIP understands, and prompts for them.

OpenAI made both lists. They edited names that misled zero-shot classification (a nail is a "metal nail") and
found the prompts by trial. Published accuracies of CLIP models on ImageNet use these lists. They are part of
the package, so nothing is downloaded. THIRD_PARTY.md has their source and license.
"""

import functools
from importlib import resources


@functools.cache
def class_names() -> tuple[str, ...]:
    """The names of the 1,000 classes, in the order of their labels; two of them occur twice.

    >>> names = class_names()
    >>> len(names), names[0], names[134], names[517]
    (1000, 'tench', 'crane bird', 'construction crane')
    """
    return _lines("imagenet_class_names.txt")


@functools.cache
def templates() -> tuple[str, ...]:
    """The 80 prompts, with "{}" for the class name.

    >>> len(templates()), templates()[0].format("tench")
    (80, 'a bad photo of a tench.')

    References:
      Radford et al., "Learning transferable visual models from natural language supervision", 2021,
      section 3.1.4, https://arxiv.org/abs/2103.00020
    """
    return _lines("imagenet_templates.txt")


def _lines(name: str) -> tuple[str, ...]:
    return tuple(resources.files(__package__).joinpath(name).read_text().splitlines())
