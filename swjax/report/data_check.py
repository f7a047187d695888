"""`swjax data check WHERE`: reads a data set as training would, and reports problems before training.

  python -m swjax data check 'cc12m/{00000..00009}.tar'
  python -m swjax data check pairs.csv --context_length=16 --page=check.html
  python -m swjax data check photos --all
  python -m swjax data verify data/icons/full-2.2.535-1

WHERE names tars, a .csv, .tsv, .jsonl or .parquet file, or a folder of pictures; --source names another
source. All bad examples are listed next to the page, one "key, tab, reason" per line. `verify` compares the
files of prepared icons with their recorded checksums. Exit codes: 0 everything that was read is usable, 1
training would skip examples or a file is damaged, 2 nothing is readable, or training would refuse the set.
"""

import argparse
import io
import math
import os
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from swjax.data.examples import fault, look
from swjax.data.icons import shards
from swjax.data.sources import Source, source, spread
from swjax.data.survey import SAMPLE, refusal, sample
from swjax.data.tokenizer import tokenize, vocabulary_of
from swjax.report import page
from swjax.safe_files import explain, printable, write_atomically

KINDS = {
    r".*\.(tar|tar\.gz|tgz)$": "webdataset",
    r".*\.(csv|tsv|jsonl)$": "table",
    r".*\.parquet$": "parquet",
}
_LEFT_OUT = ("damage", "damaged_share", "notes")  # attributes of sources that may be incomplete
_KEYS_SHOWN = 3  # per reason
_SHOWN = 40  # number of thumbnails, and of bad examples with reasons


class Seen(NamedTuple):
    """The findings about one example.

    Attributes:
      key: name of the example in messages.
      reason: why training would skip the example; "" if it is usable.
      size: width and height in pixels; (0, 0) if the example is unusable.
      kind: format of the file, such as "JPEG".
      bytes: size of the file in bytes.
      captions: texts of the example.
      thumbnail: a small picture as a data URL, or "".
      digest: digest of the decoded pixels.
    """

    key: str
    reason: str
    size: tuple[int, int] = (0, 0)
    kind: str = ""
    bytes: int = 0
    captions: tuple[str, ...] = ()
    thumbnail: str = ""
    digest: int = 0


class Check(NamedTuple):
    """The findings about a data set.

    Attributes:
      examples: number of examples in the data set.
      seen: findings about the examples that were read.
      seconds: time of reading and decoding in one thread, including waits for disks and networks.
      damage: (file, reason) of partly readable files.
      damaged_share: share of the data set's bytes in their unreadable parts.
      notes: one line each about files that the source leaves out.
    """

    examples: int
    seen: list[Seen]
    seconds: float
    damage: tuple[tuple[str, str], ...] = ()
    damaged_share: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def good(self) -> list[Seen]:
        return [each for each in self.seen if not each.reason]

    @property
    def bad(self) -> list[Seen]:
        return [each for each in self.seen if each.reason]

    def refusal(self, max_bad_share: float) -> str:
        """Returns why training would refuse the data set, or "".

        If not all examples were read, see `swjax.data.survey.refusal`.
        """
        why = refusal(len(self.bad), len(self.seen), self.examples, max_bad_share)
        if why:
            return f"{why}: repair them"
        if self.damage and self.damaged_share > max_bad_share:
            return (
                f"{self.damaged_share:.2%} of the bytes are in damaged files, more than the share of "
                f"{max_bad_share} that training skips (max_bad_share): copy these files again"
            )
        return ""


def kind_of(where: str) -> str:
    """The source that reads a path, by the ending of the path; a folder has its own source.

    Raises:
      ValueError: no source has this ending.

    >>> kind_of("cc12m/{00000..00009}.tar"), kind_of("PAIRS.CSV")
    ('webdataset', 'table')
    """
    for ending, kind in KINDS.items():
        if re.fullmatch(ending, where, re.IGNORECASE):
            return kind
    if os.path.isdir(where):
        return "folders"
    raise ValueError(
        f"{where!r} is neither a folder nor tars (.tar), a table (.csv, .tsv, .jsonl) or Parquet files "
        "(.parquet): check the path, or name another source with --source"
    )


def check(pairs: Source, *, most: int = SAMPLE, shown: int = _SHOWN) -> Check:
    """Reads random examples of a source as training does.

    Args:
      pairs: the source.
      most: largest number of examples to read; 0 reads all.
      shown: number of thumbnails.

    Returns:
      The findings, in the order of the examples.
    """
    wanted = sample(pairs, most or len(pairs))
    count = len(wanted)
    thumbnails = set(spread(count, shown))
    seen, live = [], sys.stderr.isatty()
    if count:
        _see(pairs, 0, shown=True)  # a first read, so that imports are not timed
    start = time.monotonic()
    for number, index in enumerate(wanted):
        seen.append(_see(pairs, index, number in thumbnails))
        if live and number % 20 == 0:
            print(f"\rreading {number + 1} of {count}", end="", file=sys.stderr)
    if live:
        print("\r\x1b[K", end="", file=sys.stderr)
    left_out = {name: getattr(pairs, name) for name in _LEFT_OUT if hasattr(pairs, name)}
    return Check(len(pairs), seen, time.monotonic() - start, **left_out)


def _see(pairs: Source, index: int, shown: bool) -> Seen:
    try:
        example, image = look(pairs, index)
        kind, size = "pixels", 0
        if isinstance(example["image"], bytes):
            kind, size = _format(example["image"]), len(example["image"])
        height, width = image.shape[:2]
        captions = tuple(example["captions"])
        key = pairs.key(index) if hasattr(pairs, "key") else f"example {index}"
        thumbnail = page.thumbnail(image) if shown else ""
        digest = hash((image.shape, image.tobytes()))
        return Seen(key, "", (width, height), kind, size, captions, thumbnail, digest)
    except Exception as error:  # any error makes the example bad, as in training
        return Seen(*fault(pairs, index, error))


def _format(image: bytes) -> str:
    from PIL import Image

    with Image.open(io.BytesIO(image)) as opened:
        return f"{opened.format} {opened.mode}"


# --- what it means ------------------------------------------------------------------------------------


def lines(
    found: Check, context_length: int, max_bad_share: float = 0.01, tokenizer: str = ""
) -> list[str]:
    """Formats the findings as one screen of text.

    Args:
      found: result of `check`.
      context_length: tokens per caption in training, including the start and end tokens.
      max_bad_share: share of bad examples that training skips.
      tokenizer: see `swjax.data.tokenize`.
    """
    good, bad = found.good, found.bad
    out = [f"examples     {found.examples:,}; {len(found.seen):,} read, {len(bad):,} bad"]
    out += [f"damaged      {printable(f'{path}: {why}')}" for path, why in found.damage[:3]]
    out += [f"left out     {printable(note)}" for note in found.notes]
    if good:
        widths, heights = np.array([each.size for each in good]).T
        kinds = Counter(each.kind for each in good).most_common()
        out.append(f"pixels       {_quantiles(widths)} wide, {_quantiles(heights)} high")
        out.append(f"formats      {', '.join(f'{kind} {n:,}' for kind, n in kinds)}")
        if any(each.bytes for each in good):
            out.append(f"file sizes   {_quantiles([each.bytes for each in good])} bytes")
        out += _about_captions(good, context_length, tokenizer)
        copies = len(good) - len({each.digest for each in good})
        out.append(
            f"duplicates   {copies:,} of {len(good):,} images have the same pixels as another image"
        )
        rate = len(found.seen) / max(found.seconds, 1e-9)
        out.append(
            f"reading      {rate:,.0f} images/s in one process, to full size: training at 1,000 images/s "
            f"needs about {math.ceil(1000 / rate)} loader processes"
        )
    reasons = defaultdict[str, list[Seen]](list)
    for each in bad:
        reasons[re.sub(r"\d+", "#", each.reason)].append(each)  # sizes and positions differ
    for alike in sorted(reasons.values(), key=len, reverse=True)[:5]:
        out.append(f"bad          {len(alike):,} x {alike[0].reason}")
        out += [f"             {each.key}" for each in alike[:_KEYS_SHOWN]]
    why = found.refusal(max_bad_share)
    return out + [f"refused      {why}"] * bool(why)


def _about_captions(good: list[Seen], context_length: int, tokenizer: str) -> list[str]:
    texts = [text for each in good for text in each.captions]
    # Twice the context length shows which captions do not fit.
    ids = tokenize(texts, 2 * context_length, tokenizer)
    tokens = (ids == vocabulary_of(tokenizer).end).argmax(axis=1) + 1  # up to the end token
    cut = int((tokens > context_length).sum())
    most, count = Counter(texts).most_common(1)[0]
    out = [
        f"captions     {len(texts) / len(good):.1f} per image, {_quantiles(tokens)} tokens; {cut:,} "
        f"({cut / len(texts):.0%}) are truncated at context_length={context_length}"
    ]
    if count > 1:
        out.append(f"most common  {most[:60]!r}, {count:,} times")
    return out


def _quantiles(values: Any) -> str:
    low, middle, high = np.min(values), np.median(values), np.max(values)
    shown = [f"{value:,.0f}" for value in (low, high, middle)]
    return shown[0] if shown[0] == shown[1] else "{} to {} (median {})".format(*shown)


def write_bad(path: Path, found: Check) -> None:
    """Writes the key and the reason of each bad example; an empty file replaces that of another check."""
    if found.bad or path.exists():
        write_atomically(path, "".join(f"{each.key}\t{each.reason}\n" for each in found.bad))


def write_page(
    path: Path,
    where: str,
    found: Check,
    context_length: int,
    max_bad_share: float = 0.01,
    tokenizer: str = "",
) -> None:
    """Writes a self-contained page with thumbnails, captions and bad examples."""
    figures = "".join(
        f'<figure><img src="{each.thumbnail}" alt="">'
        f"<figcaption>{'<br>'.join(map(escape, each.captions[:3]))}</figcaption></figure>"
        for each in found.good
        if each.thumbnail
    )
    rows = "".join(
        f"<tr><td>{escape(each.key)}</td><td>{escape(each.reason)}</td></tr>"
        for each in found.bad[:_SHOWN]
    )
    text = page.fill(
        "data_check.html",
        title=where,
        subtitle=f"{found.examples:,} examples, {len(found.seen):,} read",
        tiles="",
        facts=escape("\n".join(lines(found, context_length, max_bad_share, tokenizer))),
        figures=figures or "<p>No example is usable.</p>",
        bad=f"<table>{rows}</table>" if rows else "<p>No bad examples.</p>",
    )
    write_atomically(path, text)


def _verify(folder: Path) -> int:
    if not (folder / shards.COMPLETE).is_file():
        print(
            f"swjax data verify: {folder} has no {shards.COMPLETE}: give the folder of prepared icons",
            file=sys.stderr,
        )
        return 2
    damaged = shards.verify(folder)
    for path in damaged:
        description = Path(path).with_suffix(".json")
        print(
            f"damaged: {path}; remove {description} and {folder / shards.COMPLETE} to render it again"
        )
    if not damaged:
        print(f"all files of {folder} match their checksums")
    return 1 if damaged else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks a data set, prints the findings and writes a page.

    Args:
      arguments: arguments of the command line; None uses `sys.argv`.

    Returns:
      The exit code, see the module.
    """
    parser = argparse.ArgumentParser(
        prog="swjax data", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("check", "verify"))
    parser.add_argument(
        "where", help="tars, a table, Parquet files or a folder; for verify, prepared icons"
    )
    parser.add_argument("--source", default="", help="name of a source (docs/data.md)")
    parser.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE", help="its keys"
    )
    parser.add_argument(
        "--sample", type=int, default=SAMPLE, help="number of random examples to read"
    )
    parser.add_argument("--all", action="store_true", help="read all examples")
    parser.add_argument("--context_length", type=int, default=77, help="tokens per caption")
    parser.add_argument("--tokenizer", default="", help="file of a SigLIP's; default: CLIP's")
    parser.add_argument(
        "--max_bad_share",
        type=float,
        default=0.01,
        help="share of bad examples that training skips",
    )
    parser.add_argument("--data_dir", default="data", help="directory of prepared data sets")
    parser.add_argument(
        "--page", type=page.new_page, default="data_check.html", help="page to write"
    )
    options = parser.parse_args(arguments)
    if options.command == "verify":
        return _verify(Path(options.where))
    if options.sample < 1 or options.context_length < 2:
        parser.error(
            f"--sample={options.sample} must be at least 1 and --context_length="
            f"{options.context_length} at least 2"
        )
    if not 0 <= options.max_bad_share <= 1:
        parser.error(f"--max_bad_share={options.max_bad_share} must be in [0, 1]")
    for option in options.option:
        if "=" not in option:
            parser.error(f"--option={option} must be KEY=VALUE, such as --option=text_key=title")
    try:
        pairs = source(
            options.source or kind_of(options.where),
            options.where,
            data_dir=options.data_dir,
            **dict(option.split("=", 1) for option in options.option),
        )
        found = check(pairs, most=0 if options.all else options.sample)
        limits = options.context_length, options.max_bad_share, options.tokenizer
        text = "\n".join(lines(found, *limits))
        write_page(options.page, options.where, found, *limits)
        listed = options.page.with_name(f"{options.page.stem}_bad.tsv")
        write_bad(listed, found)
    except (OSError, ValueError) as error:
        print(f"swjax data check: {explain(error)}", file=sys.stderr)
        return 2
    print(text)
    if found.bad:
        print(f"all bad      {listed}")
    print(f"page         {options.page}")
    if not found.good or found.refusal(options.max_bad_share):
        return 2
    return 1 if found.bad or found.damage else 0


if __name__ == "__main__":
    sys.exit(main())
