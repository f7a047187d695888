"""The report of a run: one page with its training curves, scores and predictions.

`python -m swjax report WORKDIR` rewrites the page, during or after a run.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from swjax.report import charts, page, records
from swjax.safe_files import write_atomically

__all__ = ["write"]

_THUMBNAIL = 96  # largest height and width in pixels of an image under a caption
METRICS = re.compile("|".join(charts.METRICS))


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
    value.

    Args:
      workdir: directory of a run.
      results: final scores by name, see `swjax.evaluators`.
      predictions: see `swjax.evaluators.ZeroShot.predictions`.
      nearest_images: see `swjax.evaluators.Retrieval.nearest_images`.
      attribution: authors and license of the data.

    Returns:
      Path of the page.

    Raises:
      ValueError: `workdir` is not a directory.
    """
    workdir = Path(workdir)
    if not workdir.is_dir():
        raise ValueError(f"{workdir} is not a directory: name the workdir of a run")
    folder = workdir / "report"
    folder.mkdir(exist_ok=True)
    final = _remember(folder, results, predictions, nearest_images, attribution)
    metrics = records.read(workdir / "metrics.jsonl", METRICS)
    pictures = charts.draw_all(metrics, folder)
    text = page.render(
        config=_json(workdir / "config.json"),
        environment=_environment(workdir / "env.txt"),
        metrics=metrics,
        charts=[
            (chart, {k: page.data_url(p) for k, p in paths.items()}) for chart, paths in pictures
        ],
        results=final["results"],
        predictions=[
            p | {"image": page.data_url(folder / p["image"])} for p in final["predictions"]
        ],
        nearest_images=[
            each | {"images": [page.data_url(folder / name) for name in each["images"]]}
            for each in final["nearest_images"]
        ],
        attribution=final["attribution"],
    )
    return write_atomically(folder / "index.html", text)


def _remember(folder: Path, results, predictions, nearest_images, attribution) -> dict:
    """Merges the arguments into report/results.json, and writes images to report/images/."""
    path = folder / "results.json"
    empty = {"results": {}, "predictions": [], "nearest_images": [], "attribution": ""}
    final = empty | _json(path)
    if results is not None:
        final["results"] = dict(results)
    if attribution is not None:
        final["attribution"] = attribution
    if predictions is not None:
        from PIL import Image  # imported here, because rewriting the page does not need it

        (folder / "images").mkdir(exist_ok=True)
        final["predictions"] = []
        for i, prediction in enumerate(predictions):
            name = f"images/{i:02}.png"
            Image.fromarray(prediction.image).save(folder / name)
            final["predictions"].append(
                {
                    "image": name,
                    "name": prediction.name,
                    "guesses": list(prediction.guesses),
                    "cosines": list(prediction.cosines),
                }
            )
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
    (folder / "images").mkdir(exist_ok=True)
    picture.save(folder / "images" / name, "JPEG", quality=75)
    return f"images/{name}"


def _json(path: Path) -> dict:
    return records.read_object(path) if path.exists() else {}


def _environment(path: Path) -> dict[str, str]:
    """Reads the "name: value" lines of env.txt."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    pairs = (line.partition(": ") for line in lines if ": " in line)
    return {name.strip(): value.strip() for name, _, value in pairs}
