"""Writes table.tsv, the names and keywords of emoji. Run it by hand when Unicode adds emoji.

  npm pack emojibase-data@17.0.0
  python make_table.py emojibase-data-17.0.0.tgz

emojibase-data (MIT) contains the English names, keywords and groups of Unicode CLDR (Unicode License v3).
The table is committed, so that every Python version trains on the same words.
"""

import json
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

HEADER = """\
# Emoji: code points, English name, keywords, group, subgroup. Made by make_table.py.
# Names and keywords are from Unicode CLDR, Copyright 1991-2025 Unicode, Inc., Unicode License v3,
# https://www.unicode.org/license.txt, by way of emojibase-data (MIT, Copyright Miles Johnson).
"""


def rows(archive: str) -> Iterator[tuple]:
    """Yields a row for every emoji that has a group, in Unicode's order, without skin tones."""
    with tarfile.open(archive) as tar:

        def read(path):
            member = tar.extractfile(f"package/{path}")
            assert member is not None, f"{path} is not a file"
            return json.load(member)

        emoji, groups = read("en/data.json"), read("meta/groups.json")
    for entry in sorted(emoji, key=lambda entry: entry.get("order", 0)):
        if "group" in entry:
            yield (
                entry["hexcode"],
                entry["label"],
                ",".join(entry.get("tags", ())),
                groups["groups"][str(entry["group"])],
                groups["subgroups"][str(entry["subgroup"])],
            )


def main(archive: str) -> None:
    text = "".join("\t".join(row) + "\n" for row in rows(archive))
    (Path(__file__).parent / "table.tsv").write_text(HEADER + text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
