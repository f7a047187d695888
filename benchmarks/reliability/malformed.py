"""Damages files, and replaces values in JSON by hostile ones, for the fuzzer."""

import copy
import io
import json
import random
import shutil
from pathlib import Path

import numpy as np

NAMES = ("../escape.jpg", "/tmp/swjax_escape.jpg", "a/../../escape.jpg", "\0.jpg", "x" * 300 + ".jpg",
         "..\\escape.jpg", "\udcff.jpg", ".", "a.jpg/b.txt")  # fmt: skip
# Names of files outside of a folder, of links out of it, and of what cannot be a file.
HOSTILE_NAMES = ("../secret", "../../secret", "/etc/hostname", "images/../../../secret", "link", ".", "",
                 "a" * 300, "\0", "\ud800", "\x1b[31m")  # fmt: skip
VALUES = (1e300, -1, 0, 10**400, 10**9, 2**63, None, True, [], {}, "", "x" * 5000, "\ud800", "$\\frac",
          "\x1b[2J", float("nan"), float("inf"), [[["deep"]]], *HOSTILE_NAMES)  # fmt: skip
NUMBERS = (b"\xff\xff\xff\xff", b"\x00\x00\x00\x00", b"\x7f\xff\xff\xff", b"\x80\x00\x00\x00")


def damage(data: bytes, rng: random.Random) -> bytes:
    """Damages a file in one to four places, or replaces it by random bytes."""
    if rng.random() < 0.05:
        return rng.randbytes(rng.randrange(4096))
    for _ in range(rng.randint(1, 4)):
        at, size = rng.randrange(len(data) + 1), rng.choice((1, 4, 64, 700))
        head, tail = data[:at], data[at:]
        data = rng.choice((
            lambda: head,  # noqa: B023
            lambda: head + rng.randbytes(size) + tail[size:],  # noqa: B023
            lambda: head + tail[size:],  # noqa: B023
            lambda: head + rng.randbytes(size) + tail,  # noqa: B023
            lambda: head + bytes(size) + tail[size:],  # noqa: B023
            lambda: head + rng.choice(NUMBERS) + tail[4:],  # noqa: B023
            lambda: head + head[-size:] + tail,  # noqa: B023
        ))()  # fmt: skip
    return data


def mutate(tree, rng: random.Random):
    """Returns a copy of JSON in which one to three values are replaced, removed or added."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.randint(1, 3)):
        holders = [tree]
        for each in holders:  # grows
            children = each.values() if isinstance(each, dict) else each
            holders += [child for child in children if isinstance(child, dict | list) and child]
        holder, value = rng.choice(holders), rng.choice(VALUES)
        key = rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        choice = rng.random()
        if choice < 0.8 or len(holder) < 2:
            holder[key] = value
        elif choice < 0.9:
            del holder[key]
        elif isinstance(holder, dict):
            holder[str(value)[:50]] = value
        else:
            holder.append(value)
    return tree


def damaged_json(tree, rng: random.Random) -> bytes:
    """JSON with hostile values, or its text damaged, or too deep."""
    choice = rng.random()
    if choice < 0.05:
        return b"[" * 100_000
    if choice < 0.7:
        return json.dumps(mutate(tree, rng)).encode("utf-8", "surrogatepass")
    return damage(json.dumps(tree).encode(), rng)


def photograph(rng: random.Random, file_format: str = "JPEG") -> bytes:
    from PIL import Image

    pixels = np.frombuffer(rng.randbytes(5 * 6 * 3), np.uint8).reshape(5, 6, 3)
    file = io.BytesIO()
    Image.fromarray(pixels).resize((48, 40)).save(file, file_format)
    return file.getvalue()


def remove(path: Path) -> None:
    """Removes a file, a link or a folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
