"""The 1,914 emoji and their words. Each family of similar emoji belongs to one split."""

import dataclasses
import functools
import hashlib
import re
from importlib import resources

_GENDER = re.compile(
    r"\b(man|men|woman|women|person|people|boy|girl|child|male|female)\b|: facing right"
)
_GROUPS_OF_PEOPLE = re.compile(r"(family|kiss|couple with heart)(?=:|$)")
# Emoji that belong to a family although their names do not show it.
_FAMILIES = {
    **dict.fromkeys(("old", "older"), "old"),
    **dict.fromkeys(("holding hands", "and holding hands"), "holding hands"),
    **dict.fromkeys(("prince", "princess", "with crown"), "royalty"),
    **dict.fromkeys(("merperson", "merman", "mermaid"), "merperson"),
    **dict.fromkeys(("mx claus", "mrs. claus", "santa claus"), "claus"),
    **dict.fromkeys(("breast-feeding", "feeding baby"), "feeding baby"),
}


@dataclasses.dataclass(frozen=True)
class Concept:
    """One emoji, independent of its drawings.

    Attributes:
      code: code points, such as "1F44B" or "2764-FE0F".
      name: English name from Unicode CLDR.
      keywords: English keywords from Unicode CLDR.
      group: one of Unicode's ten groups, such as "animals-nature".
      subgroup: subgroup within the group, such as "animal-bird".
    """

    code: str
    name: str
    keywords: tuple[str, ...]
    group: str
    subgroup: str

    @property
    def family(self) -> str:
        """A name shared with the emoji that differ from this one only in gender or direction.

        >>> {c.family for c in concepts() if c.name in ("man judge", "judge")}
        {'judge'}
        """
        people = _GROUPS_OF_PEOPLE.match(self.name)
        if people:
            return people[0]
        name = " ".join(_GENDER.sub(" ", self.name.lower()).split()).removeprefix(": ")
        return _FAMILIES.get(name, name)

    @property
    def split(self) -> str:
        """The split: train, val and test get 70, 10 and 20 % of the families, by a hash of the family."""
        digest = hashlib.sha256(self.family.encode()).digest()
        percentile = int.from_bytes(digest[:8]) * 100 >> 64
        return "test" if percentile < 20 else "val" if percentile < 30 else "train"


@functools.cache
def concepts() -> tuple[Concept, ...]:
    """Returns all concepts in Unicode's order, without skin tones and components."""
    table = resources.files(__package__).joinpath("table.tsv").read_text(encoding="utf-8")
    rows = (line.split("\t") for line in table.splitlines() if not line.startswith("#"))
    return tuple(
        Concept(code, name, tuple(keywords.split(",")), group, subgroup)
        for code, name, keywords, group, subgroup in rows
        if group != "component"
    )


def file_key(code: str) -> str:
    """Returns a key for the file of an emoji, which does not depend on the naming of a set.

    >>> file_key("0031-FE0F-20E3"), file_key("31-20e3")
    ('31-20E3', '31-20E3')
    """
    points = (point.lstrip("0") for point in code.upper().split("-"))
    return "-".join(point for point in points if point != "FE0F")
