"""Draws emoji: converts SVG files of the installed packages to trimmed PNGs in several styles.

As a script this module is a worker process: it reads tasks as lines of JSON from stdin and writes drawings
to stdout. It does not import swjax, so workers start fast and need no guarded main module.
"""

import base64
import io
import json
import signal
import sys
import xml.etree.ElementTree as ElementTree

import resvg_py
from PIL import Image

SIZE = 96  # pixels, height = width
OPENMOJI_STYLES = ("colour", "line", "flat", "thin")
TWEMOJI_STYLE = "twemoji"

_PROBE = 48  # pixels; size of the rendering from which the bounding box is measured
_VISIBLE = 16  # smallest visible opacity, of 255
_FILLED = ("color", "skin", "hair")  # prefixes of the ids of OpenMoji's filled groups
_STROKED = ("line",)
_THIN = "* { stroke-width: 1 }"  # OpenMoji's own stroke width is 2


def draw(svg: str, styles: tuple[str, ...]) -> dict[str, bytes]:
    """Returns a PNG for each style, except for styles in which nothing is visible.

    All styles share one frame: the smallest square around the whole drawing.

    Args:
      svg: contents of the SVG file.
      styles: keys of OPENMOJI_STYLES, or TWEMOJI_STYLE for the unchanged file.
    """
    root = ElementTree.fromstring(svg)
    frame = _frame(root)
    if frame is None:
        return {}
    root.set("viewBox", " ".join(f"{value:g}" for value in frame))
    drawings = {}
    for style in styles:
        hidden = {"line": _FILLED, "flat": _STROKED}.get(style, ())
        png = _render(_without(root, hidden), SIZE, style_sheet=_THIN if style == "thin" else None)
        if _bounding_box(png) is not None:
            drawings[style] = png
    return drawings


def _render(root, size: int, style_sheet: str | None = None) -> bytes:
    for name in ("width", "height"):
        root.attrib.pop(name, None)
    svg = ElementTree.tostring(root, encoding="unicode")
    return resvg_py.svg_to_bytes(
        svg_string=svg, width=size, height=size, style_sheet=style_sheet, skip_system_fonts=True
    )


def _bounding_box(png: bytes) -> tuple[int, int, int, int] | None:
    opacity = Image.open(io.BytesIO(png)).convert("RGBA").getchannel("A")
    return opacity.point(lambda value: 255 * (value >= _VISIBLE)).getbbox()


def _frame(root) -> tuple[float, float, float, float] | None:
    """Returns the viewBox that trims a drawing, or None if nothing is visible."""
    left, top, width, height = map(float, root.get("viewBox").split())
    box = _bounding_box(_render(root, _PROBE))
    if box is None:
        return None
    unit = max(width, height) / _PROBE
    x0, y0, x1, y1 = (value * unit for value in box)
    side = max(x1 - x0, y1 - y0)
    return left + (x0 + x1 - side) / 2, top + (y0 + y1 - side) / 2, side, side


def _without(root, prefixes: tuple[str, ...]):
    """Returns the drawing without the groups whose id starts with one of the prefixes."""
    if not prefixes:
        return root
    kept = ElementTree.Element(root.tag, root.attrib)
    kept.extend(e for e in root if not e.get("id", "").startswith(prefixes))
    return kept


def main() -> None:
    """Answers each task [path, styles] with {style: PNG in base64}, one line each, until stdin ends."""
    if hasattr(signal, "SIGPIPE"):  # Windows has none
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end when the reader has ended
    for line in sys.stdin:
        path, styles = json.loads(line)
        with open(path, encoding="utf-8") as file:
            drawings = draw(file.read(), tuple(styles))
        print(
            json.dumps({k: base64.b64encode(v).decode() for k, v in drawings.items()}), flush=True
        )


if __name__ == "__main__":
    main()
