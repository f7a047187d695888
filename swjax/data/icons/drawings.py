"""Draws icons: SVG -> PNG.

Run as a script it is a worker process: tasks come as lines of JSON on stdin, drawings go to stdout. It
imports nothing of swjax, so that workers start fast and need no guarded main module.
"""

import base64
import hashlib
import io
import json
import sys

import numpy as np
import resvg_py
from PIL import Image

SIZE = 96  # pixels, height = width
_VISIBLE = 16  # of 255, opacity


def draw(svg: str) -> tuple[bytes, str] | None:
    """The PNG of a drawing and a digest of its pixels; None where nothing is seen or it is malformed.

    Drawings with equal digests look the same on white.
    """
    try:
        png = resvg_py.svg_to_bytes(svg_string=svg, width=SIZE, height=SIZE, skip_system_fonts=True)
    except ValueError:
        return None
    image = Image.open(io.BytesIO(png)).convert("RGBA")
    if np.asarray(image)[:, :, 3].max() < _VISIBLE:
        return None
    on_white = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return png, hashlib.sha256(on_white.tobytes()).hexdigest()[:32]


def main() -> None:
    """Answers each list of SVGs with a list of [PNG in base64, digest] or null, a line each."""
    for line in sys.stdin:
        drawn = map(draw, json.loads(line))
        answers = [each and (base64.b64encode(each[0]).decode(), each[1]) for each in drawn]
        print(json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
