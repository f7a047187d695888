"""Draws icons: converts SVGs to PNGs.

As a script this module is a worker process: it reads tasks as lines of JSON from stdin and writes drawings
to stdout. It does not import swjax, so workers start fast and need no guarded main module.
"""

import base64
import hashlib
import io
import json
import signal
import sys

import numpy as np
import resvg_py
from PIL import Image

SIZE = 96  # pixels, height = width
_VISIBLE = 16  # smallest visible opacity, of 255


def draw(svg: str) -> tuple[bytes, str] | None:
    """Returns the PNG of a drawing and a digest of its pixels; None if it is invisible or malformed.

    Drawings with equal digests look identical on white.
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
    """Answers each list of SVGs with a list of [PNG in base64, digest] or null, one line each."""
    if hasattr(signal, "SIGPIPE"):  # Windows has none
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end when the reader has ended
    for line in sys.stdin:
        drawn = map(draw, json.loads(line))
        answers = [each and (base64.b64encode(each[0]).decode(), each[1]) for each in drawn]
        print(json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
