"""The icon sets of Iconify's collection, with words for each drawing.

The collection is one npm package, `PACKAGE`. Excluded are sets whose license forbids commercial use or is
GPL, emoji sets, which the default task draws, and the sets in `RESERVED`.
"""

import hashlib
import json
import re
import tarfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = "iconify-json-2.2.535.tgz"
COMMAND = "npm pack @iconify/json@2.2.535"  # writes PACKAGE into the working directory
SHA256 = "1a545f86fa224d6531d8fb101dcbe83aac2b28689a21cbed6fc68318a5af4d91"

# No model has been trained, tuned or tested on these sets, which are reserved for one final test.
RESERVED = frozenset(
    "healthicons streamline-ultimate glyphs icon-park flat-color-icons material-icon-theme skill-icons "
    "carbon".split()
)
# A small data set of 15,000 drawings for a CPU: six sets for training, and two held-out sets, eva and ep.
SLICE = frozenset("tabler lucide bi iconoir octicon fa6-solid eva ep".split())

_LICENSES_LEFT_OUT = re.compile(r"NC|GPL")
# Words at the end of an icon's name that describe its style, not its subject.
_STYLES = frozenset(
    "outline outlined solid fill filled bold light thin regular linear line broken duotone twotone two tone "
    "sharp round rounded baseline flat duo remix remixed stroke stroked fat alt ltr rtl px".split()
)
_SIZE = re.compile(r"\d{1,3}(px)?")
_HELD_OUT_SETS = 8  # percent of the families of sets
_HELD_OUT_NAMES = 6  # percent of the names
_VALIDATION_NAMES = 2


class IconSet(NamedTuple):
    """A set of icons by one author in one style.

    Attributes:
      prefix: short name of the set.
      name, author, license, url: attribution; the license is an SPDX identifier.
      colored: whether the icons have colors; otherwise they are drawn in black.
    """

    prefix: str
    name: str
    author: str
    license: str
    url: str
    colored: bool

    @property
    def held_out(self) -> bool:
        """Whether the set is excluded from training. Sets of one family are held out together.

        >>> [IconSet(prefix, "", "", "", "", False).held_out for prefix in ("tabler", "eva")]
        [False, True]
        """
        return _percentile(re.split(r"[-0-9]", self.prefix)[0]) < _HELD_OUT_SETS


class Icon(NamedTuple):
    """A drawing before it is rendered.

    Attributes:
      key: "SET:NAME", such as "tabler:home-filled".
      body: SVG elements inside the frame; currentColor stands for the text color.
      frame: left, top, width and height of the view box.
      category: the set's category of the icon, such as "Account / User"; "" without one.
    """

    key: str
    body: str
    frame: tuple[float, float, float, float]
    category: str

    def svg(self) -> str:
        """The drawing in a centered square frame, in black unless it has its own colors."""
        left, top, width, height = self.frame
        side = max(width, height)
        square = left - (side - width) / 2, top - (side - height) / 2, side, side
        return (
            '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
            f'viewBox="{" ".join(f"{value:g}" for value in square)}" color="black">{self.body}</svg>'
        )


def concept_and_style(name: str) -> tuple[str, str]:
    """Splits an icon's name into the words for its subject and the words for its style, without sizes.

    >>> concept_and_style("arrow-up-outline-24"), concept_and_style("home"), concept_and_style("outline")
    (('arrow up', 'outline'), ('home', ''), ('outline', ''))
    """
    words = [word for word in name.lower().split("-") if word]
    style: list[str] = []
    while len(words) > 1 and (words[-1] in _STYLES or _SIZE.fullmatch(words[-1])):
        word = words.pop()
        if word in _STYLES:
            style.insert(0, word)
    return " ".join(words), " ".join(style)


def fold(concept: str) -> str:
    """ "train", "val" or "test": 92, 2 and 6 % of the concepts, by a hash of their words.

    >>> [fold(concept) for concept in ("home", "rocket", "tree")]
    ['train', 'train', 'train']
    """
    percentile = _percentile(concept)
    if percentile < _HELD_OUT_NAMES:
        return "test"
    return "val" if percentile < _HELD_OUT_NAMES + _VALIDATION_NAMES else "train"


def _percentile(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") * 100 >> 64


def read(archive: str | Path, only: Collection[str] = ()) -> Iterator[tuple[IconSet, list[Icon]]]:
    """Yields the sets of the package, each with its icons sorted by name.

    Args:
      archive: path of the npm package.
      only: prefixes of the sets to read; () reads all.

    Raises:
      ValueError: the file does not exist, or is not the package; the message contains the download command.
    """
    if not Path(archive).is_file():
        raise ValueError(
            f"the data set icons needs {str(archive)!r}, which does not exist: run `{COMMAND}` and "
            "move the file there, or set config.data.icons.archive"
        )
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                found = re.fullmatch(r"package/json/([\w-]+)\.json", member.name)
                if not found or found[1] in RESERVED or (only and found[1] not in only):
                    continue
                file = tar.extractfile(member)
                content = json.load(file) if file else {}
                if _usable(content["info"]):
                    yield _icon_set(content), list(_icons(content))
    except (tarfile.TarError, EOFError, OSError, KeyError) as error:
        raise ValueError(
            f"{str(archive)!r} is not {PACKAGE} ({error}): run `{COMMAND}` again"
        ) from None


def _usable(info: dict) -> bool:
    license = info["license"].get("spdx", "")
    is_emoji = info.get("category") == "Emoji" or "emoji" in info["name"].lower()
    return bool(license) and not _LICENSES_LEFT_OUT.search(license) and not is_emoji


def _icon_set(content: dict) -> IconSet:
    info = content["info"]
    author, license = info["author"], info["license"]
    return IconSet(
        content["prefix"],
        info["name"],
        author["name"],
        license["spdx"],
        author.get("url", license.get("url", "")),
        bool(info.get("palette")),
    )


def _icons(content: dict) -> Iterator[Icon]:
    category_of = {
        name: category
        for category, names in content.get("categories", {}).items()
        for name in names
    }
    for name, icon in sorted(content["icons"].items()):
        if icon.get("hidden"):
            continue
        left, top, width, height = (
            float(icon.get(key, content.get(key, default)))
            for key, default in (("left", 0), ("top", 0), ("width", 16), ("height", 16))
        )
        yield Icon(
            f"{content['prefix']}:{name}",
            icon["body"],
            (left, top, width, height),
            category_of.get(name, ""),
        )
