"""The report as one HTML page.

The templates are files for `string.Template` in this folder. A report library would load scripts and fonts
from other hosts, but the page must also open from disk, in an e-mail, and years later.
"""

import argparse
import base64
import io
import re
import string
from collections.abc import Iterable
from html import escape
from importlib import resources
from pathlib import Path

import numpy as np

from swjax.report.charts import Chart, Metrics, percent
from swjax.safe_files import mask_credentials, read_inside

_SIGNATURES = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "jpeg"}
_THUMBNAIL = 160  # largest height and width in pixels
_MOST_EMBEDDED = 64 * 2**20  # bytes of saved pictures in one page
HEADLINES = ("_top1", "/image_to_text_R@10", "/text_to_image_R@10")


def render(
    *,
    config: dict,
    changes: list[tuple[str, str]],
    environment: dict[str, str],
    metrics: Metrics,
    charts: list[Chart],
    results: dict[str, float],
    predictions: list[dict],
    nearest_images: list[dict],
    left_out: list[str],
    attribution: str,
) -> str:
    """Renders the page; all external text is escaped.

    Args:
      config: the config of the run.
      changes: when the config changed, and each change.
      environment: {name: value} from env.txt.
      metrics: columns of the log.
      charts: the charts.
      results: {name: score}, the final scores and the chance scores.
      predictions: {"image": URL, "name", "guesses"} each.
      nearest_images: {"caption", "images": URLs, "own": whether each is the caption's own} each.
      left_out: why pictures are missing, see `Pictures`.
      attribution: authors and license of the data.
    """
    return fill(
        "run.html",
        title=_title(config),
        subtitle=_subtitle(config, metrics),
        tiles="".join(_tiles(results, metrics)),
        predictions=_predictions(predictions)
        + _nearest_images(nearest_images)
        + _left_out(left_out),
        charts="".join(map(chart, charts)),
        scores=_scores(results),
        command=escape(environment.get("command", "unknown: the run has no env.txt")),
        environment=_table((k, v) for k, v in environment.items() if k != "command" and v)
        + _changes(changes),
        config=_table(flatten(config)),
        attribution=_paragraphs(attribution),
    )


def fill(body: str, *, title: str, subtitle: str, tiles: str, **parts: str) -> str:
    """Renders a self-contained page: a title and tiles, then the template `body` with `parts` filled in.

    Args:
      body: name of a template file in this folder.
      title, subtitle: plain text, which the function escapes.
      tiles, **parts: HTML.
    """
    return string.Template(asset("page.html")).substitute(
        style=asset("page.css"),
        title=escape(title),
        subtitle=escape(subtitle),
        tiles=tiles,
        body=string.Template(asset(body)).substitute(parts),
    )


def new_page(path: str) -> Path:
    """Checks the path of a page before the work that the page shows; a `type` for argparse.

    Raises:
      argparse.ArgumentTypeError: the path is a folder, or its folder does not exist.
    """
    page = Path(path)
    if page.is_dir():
        raise argparse.ArgumentTypeError(f"{path!r} is a folder: name a file, such as page.html")
    if not page.parent.is_dir():
        raise argparse.ArgumentTypeError(f"the folder {str(page.parent)!r} does not exist: make it")
    return page


def _title(config: dict) -> str:
    model, data = _section(config, "model"), _section(config, "data")
    recipe = model.get("recipe", "unknown recipe")
    return f"CLIP {model.get('name', '')} in {recipe} on {data.get('name', 'unknown data')}"


def _section(config: dict, name: str) -> dict:
    found = config.get(name)
    return found if isinstance(found, dict) else {}


def _subtitle(config: dict, metrics: Metrics) -> str:
    parts = []
    if loss := metrics.get("train/loss"):
        parts.append(
            f"{loss.step[-1]:,} steps of {_section(config, 'train').get('batch_size', '?')}"
        )
    if time := metrics.get("time"):
        parts.append(duration(time.last))
    optimizer = _section(config, "optimizer").get("name")
    return " · ".join([*parts, *([str(optimizer)] if optimizer else [])]) or "no steps yet"


def _tiles(results: dict[str, float], metrics: Metrics) -> Iterable[str]:
    """The headline scores, each with its chance score."""
    for ending in HEADLINES:
        for name, value in results.items():
            if name.endswith(ending) and "chance" not in name:
                chance = results.get(chance_name(name))
                note = f"chance {percent(chance)}" if chance else ""
                yield tile(label(name), percent(value), note)
    rate = metrics.get("perf/samples_per_sec_per_device")
    # The only step of a process has no throughput.
    if rate and (newest := rate.last_finite) is not None:
        yield tile("Throughput", f"{newest:,.0f}", "samples per second and device")
    if skipped := metrics.get("data/skipped"):
        note = "unreadable: see skipped.log" if skipped.last else "all were read"
        yield tile("Skipped examples", f"{skipped.last:,.0f}", note)


def tile(title: str, value: str, note: str) -> str:
    return (
        f'<div class="tile"><div class="what">{escape(title)}</div>'
        f'<div class="value">{escape(value)}</div><div class="note">{escape(note)}</div></div>'
    )


def _predictions(predictions: list[dict]) -> str:
    if not predictions:
        return (
            "<p class='missing'>No predictions: the run has no test split, or has not finished.</p>"
        )
    first = sum(p["guesses"][:1] == [p["name"]] for p in predictions)
    within = sum(p["name"] in p["guesses"] for p in predictions)
    cards = "".join(_prediction(p) for p in predictions)
    return (
        f"<p>{len(predictions)} evenly spaced images of the split, not selected: {first} right at "
        f"the first guess, {within} within {len(predictions[0]['guesses'])}.</p>"
        f'<div class="gallery">{cards}</div>'
    )


def _prediction(prediction: dict) -> str:
    name, guesses = prediction["name"], prediction["guesses"]
    rows = "".join(
        f'<li class="right"><span>{escape(g)} <b>✓</b></span></li>'
        if g == name
        else f"<li><span>{escape(g)}</span></li>"
        for g in guesses
    )
    state = "right" if guesses[:1] == [name] else "near" if name in guesses else "wrong"
    mark = {"right": "✓", "near": "~", "wrong": "✗"}[state]
    return (
        f'<figure class="{state}" title="{escape(name)}">{_image(prediction["image"], name)}'
        f"<figcaption><strong><i>{mark}</i> {escape(name)}</strong><ol>{rows}</ol></figcaption></figure>"
    )


def _nearest_images(captions: list[dict]) -> str:
    if not captions:
        return ""
    rows = "".join(_images_of_caption(each) for each in captions)
    first = sum(each["own"][:1] == [True] for each in captions)
    return (
        f"<h3>Captions and their nearest images</h3><p>{len(captions)} evenly spaced captions of the "
        f"split, not selected: for {first} the nearest image is correct. ✓ marks a caption's own "
        f"images.</p>{rows}"
    )


def _images_of_caption(found: dict) -> str:
    figures = "".join(
        f"<figure>{_image(url, 'own image' if own else 'image of another caption')}"
        f'<figcaption class="right">{"<b>✓</b>" if own else ""}</figcaption></figure>'
        for url, own in zip(found["images"], found["own"], strict=True)
    )
    return (
        f'<section class="card found" title="{escape(found["caption"])}">'
        f"<strong>{escape(found['caption'])}</strong>"
        f"<div>{figures}</div></section>"
    )


def _image(url: str, text: str) -> str:
    return f'<img src="{url}" alt="{escape(text)}">' if url else ""


def _left_out(reasons: list[str]) -> str:
    if not reasons:
        return ""
    s = "" if len(reasons) == 1 else "s"
    return f"<p class='missing'>{len(reasons)} picture{s} left out: {escape(reasons[0])}</p>"


def chart(shown: Chart) -> str:
    """A chart as an HTML card, or the reason for its absence."""
    title, caption = escape(shown.title), escape(shown.caption)
    if not shown.pictures:
        return f'<section class="card"><h3>{title}</h3><p class="missing">{caption}</p></section>'
    drawn = picture(shown.pictures, shown.title)
    return f'<section class="card"><h3>{title}</h3>{drawn}<p>{caption}</p></section>'


def picture(pictures: dict[str, bytes], title: str) -> str:
    """A picture that follows the light or dark colors of the page."""
    urls = {theme: data_url(png) for theme, png in pictures.items()}
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{urls["dark"]}">'
        f'<img src="{urls["light"]}" alt="{escape(title)}"></picture>'
    )


def data_url(picture: bytes) -> str:
    """Encodes a PNG or JPEG as a data URL.

    Raises:
      ValueError: the bytes are of another kind.
    """
    for signature, kind in _SIGNATURES.items():
        if picture.startswith(signature):
            return f"data:image/{kind};base64," + base64.b64encode(picture).decode()
    raise ValueError("a picture of a page must be a PNG or a JPEG")


def thumbnail(image: np.ndarray) -> str:
    """A small version of a picture, uint8 [height, width, 3 or 4], as a data URL."""
    from PIL import Image

    small, data = Image.fromarray(image), io.BytesIO()
    small.thumbnail((_THUMBNAIL, _THUMBNAIL))
    small.save(data, "PNG" if small.mode == "RGBA" else "JPEG", quality=80)
    return data_url(data.getvalue())


class Pictures:
    """Embeds the pictures that a file of a run names, if they are in the run's own folder.

    Args:
      folder: the folder of the pictures.

    Attributes:
      left_out: the reasons why pictures were left out.
    """

    def __init__(self, folder: Path):
        self._folder, self._left, self.left_out = folder, _MOST_EMBEDDED, list[str]()

    def url(self, name: str) -> str:
        """The data URL of a picture; "" for one that is left out."""
        try:
            data = read_inside(self._folder, name, self._left)
            url = data_url(data)
        except (ValueError, OSError) as error:
            self.left_out.append(str(error))
            return ""
        self._left -= len(data)
        return url


def _scores(results: dict[str, float]) -> str:
    if not results:
        return "<p class='missing'>No scores: the run has no test split, or has not finished.</p>"
    return numbers(["Score", "Run", "Chance", "Ratio"], _score_rows(results))


def numbers(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table of numbers as HTML; the first cell of a row is text. All cells are escaped."""
    first = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    rest = "".join(f"<tr>{row}</tr>" for row in cells)
    return f'<table class="numbers"><tr>{first}</tr>{rest}</table>'


def _score_rows(results: dict[str, float]) -> Iterable[list[str]]:
    for name, value in results.items():
        if "chance" in name:
            continue
        cells = [f"{value:.4g}", "", ""]
        if chance := results.get(chance_name(name)):
            ratio = value / chance
            cells = [percent(value), percent(chance), f"{ratio:.{0 if ratio >= 10 else 1}f}×"]
        yield [label(name), *cells]


def label(name: str) -> str:
    """The readable name of a score.

    >>> label("zeroshot/emoji_top1"), label("test/image_to_text_R@10"), label("val/loss")
    ('Zero-shot top-1, emoji', 'Image to text R@10', 'val/loss')
    """
    if match := re.fullmatch(r"zeroshot/(.*)_top(\d+)", name):
        return f"Zero-shot top-{match[2]}, {match[1]}"
    if match := re.fullmatch(r".*/(image_to_text|text_to_image)_(R@\d+)", name):
        return f"{match[1].replace('_', ' ').capitalize()} {match[2]}"
    return name


def chance_name(name: str) -> str:
    """The name of the chance score that belongs to a score.

    >>> chance_name("zeroshot/emoji_top1"), chance_name("val/text_to_image_R@5")
    ('zeroshot/emoji_chance_top1', 'val/text_to_image_chance_R@5')
    """
    return re.sub(r"_(top\d+|R@\d+)$", r"_chance_\1", name)


def duration(seconds: float) -> str:
    """
    >>> duration(42), duration(410), duration(7300)
    ('42 s', '6 min 50 s', '2 h 1 min')
    """
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


def flatten(tree: dict, prefix: str = "") -> Iterable[tuple[str, str]]:
    """Yields the keys and values of a config as text, without the credentials in addresses.

    >>> list(flatten({"train": {"steps": 20}, "data": {"dir": "ftp://bob:PASSWORD@host"}}))
    [('train.steps', '20'), ('data.dir', 'ftp://***@host')]
    """
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, mask_credentials(str(value))


def _changes(changes: list[tuple[str, str]]) -> str:
    shown = _table((when, mask_credentials(change)) for when, change in changes)
    return f"<p>The config changed when the run was resumed:</p>{shown}" if changes else ""


def _table(pairs: Iterable[tuple[str, str]]) -> str:
    rows = "".join(f"<tr><th>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in pairs)
    return f"<table>{rows}</table>" if rows else "<p class='missing'>Not recorded.</p>"


def _paragraphs(text: str) -> str:
    lines = "".join(f"<p>{escape(line)}</p>" for line in text.splitlines() if line.strip())
    return lines or "<p class='missing'>Not recorded.</p>"


def asset(name: str) -> str:
    return resources.files("swjax.report").joinpath(name).read_text(encoding="utf-8")
