"""The report of a run: one page with its training curves, scores and predictions.

`python -m swjax report WORKDIR` rewrites the page, during or after a run.
"""

import io
import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from swjax.report import charts, page, records
from swjax.safe_files import make_folder, mask_credentials, read_inside, write_atomically

__all__ = ["write"]

_THUMBNAIL = 96  # largest height and width in pixels of an image under a caption
METRICS = re.compile("|".join(charts.METRICS))
# The content of report/results.json, see `records.check`.
_SAVED = {
    "results": {str: float},
    "predictions": [{"image": str, "name": str, "guesses": [str]}],
    "nearest_images": [{"caption": str, "images": [str], "own": [bool]}],
    "attribution": str,
}


def write(
    workdir: str | Path,
    *,
    results: dict[str, float] | None = None,
    predictions: Sequence | None = None,
    nearest_images: Sequence | None = None,
    attribution: str | None = None,
) -> Path:
    """Writes WORKDIR/report/index.html, a self-contained page, and its pictures as PNGs next to it.

    The curves come from metrics.jsonl, the rest from config.json and env.txt. The page names missing parts.
    The arguments are saved in report/results.json; for an argument that is None, the function uses the saved
    value. Only files in `workdir` are read and written, and no link out of it is followed.

    Args:
      workdir: directory of a run.
      results: final scores by name, see `swjax.evaluators`.
      predictions: see `swjax.evaluators.ZeroShot.predictions`.
      nearest_images: see `swjax.evaluators.Retrieval.nearest_images`.
      attribution: authors and license of the data.

    Returns:
      Path of the page.

    Raises:
      ValueError: `workdir` is not a directory, or a file in it is damaged or a link out of it.
      OSError: a file cannot be read or written.
    """
    workdir = Path(workdir)
    if not workdir.is_dir():
        raise ValueError(f"{workdir} is not a directory: name the workdir of a run")
    folder = make_folder(workdir, "report")
    final = _remember(folder, results, predictions, nearest_images, attribution)
    metrics = records.read(workdir / "metrics.jsonl", METRICS)
    pictures = page.Pictures(folder)
    text = page.render(
        config=_json(workdir / "config.json"),
        changes=records.config_changes(workdir / "config_history.jsonl"),
        environment=_environment(workdir / "env.txt"),
        metrics=metrics,
        charts=charts.draw_all(metrics, folder),
        results=final["results"],
        predictions=[p | {"image": pictures.url(p["image"])} for p in final["predictions"]],
        nearest_images=[
            each | {"images": [pictures.url(name) for name in each["images"]]}
            for each in final["nearest_images"]
        ],
        left_out=pictures.left_out,
        attribution=final["attribution"],
    )
    return write_atomically(folder / "index.html", text)


def _remember(folder: Path, results, predictions, nearest_images, attribution) -> dict:
    """Merges the arguments into report/results.json, and writes images to report/images/."""
    path = folder / "results.json"
    empty = {"results": {}, "predictions": [], "nearest_images": [], "attribution": ""}
    final = empty | _json(path)
    records.check(final, _SAVED, str(path))
    if any(len(each["images"]) != len(each["own"]) for each in final["nearest_images"]):
        raise ValueError(
            f"{path} is damaged: images and own must be equally many: {records.REMEDY}"
        )
    if results is not None:
        final["results"] = dict(results)
    if attribution is not None:
        final["attribution"] = attribution
    if predictions is not None:
        from PIL import Image  # imported here, because rewriting the page does not need it

        final["predictions"] = [
            {
                "image": _write_image(folder, f"{i:02}.png", Image.fromarray(prediction.image)),
                "name": prediction.name,
                "guesses": list(prediction.guesses),
                "cosines": list(prediction.cosines),
            }
            for i, prediction in enumerate(predictions)
        ]
    if nearest_images is not None:
        final["nearest_images"] = [
            {
                "caption": each.caption,
                "images": [
                    _write_thumbnail(folder, f"caption-{i:02}-{j}.jpg", image)
                    for j, image in enumerate(each.images)
                ],
                "own": list(each.own),
                "cosines": list(each.cosines),
            }
            for i, each in enumerate(nearest_images)
        ]
    write_atomically(path, json.dumps(final, indent=2, ensure_ascii=False) + "\n")
    return final


def _write_thumbnail(folder: Path, name: str, image: np.ndarray) -> str:
    """Writes a small JPEG on white to images/; returns its path relative to the report folder."""
    from PIL import Image

    picture = Image.fromarray(image).convert("RGBA")
    picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
    picture = picture.convert("RGB")
    picture.thumbnail((_THUMBNAIL, _THUMBNAIL))
    return _write_image(folder, name, picture)


def _write_image(folder: Path, name: str, picture) -> str:
    """Writes a picture to images/; returns its path relative to the report folder."""
    file = io.BytesIO()
    picture.save(file, "PNG" if name.endswith(".png") else "JPEG", quality=75)
    write_atomically(make_folder(folder, "images") / name, file.getvalue())
    return f"images/{name}"


def _json(path: Path) -> dict:
    return records.read_object(path) if records.exists(path) else {}


def _environment(path: Path) -> dict[str, str]:
    """Reads the "name: value" lines of env.txt, without the credentials in addresses."""
    text = read_inside(path.parent, path.name) if records.exists(path) else b""
    lines = mask_credentials(text.decode(errors="replace")).splitlines()
    pairs = (line.partition(": ") for line in lines if ": " in line)
    return {name.strip(): value.strip() for name, _, value in pairs}
