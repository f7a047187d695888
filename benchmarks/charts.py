"""Draws the README's chart from a recorded result.

python benchmarks/charts.py    # docs/images/vith_tower_h200.png
"""

import argparse
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "train_step_torchao_h200.json"
# {implementation in the result: its label}, from the top.
LABELS = {
    "timm torch.compile": "timm, torch.compile, bf16",
    "timm torchao float8 torch.compile": "timm, torchao float8",
    "timm torchao int8 torch.compile": "timm, torchao int8",
    "swjax standard": "swjax, bf16",
    "swjax switchback": "swjax, int8 (SwitchBack)",
}


def bars() -> dict[str, float]:
    """Images per second by label: ViT-H/14's image tower, forward and backward, no block recomputed."""
    rows = {
        row["implementation"]: row["images_per_second"]
        for row in json.loads(RESULT.read_text())["rows"]
        if row["remat"] == "none"
    }
    return {label: rows[name] for name, label in LABELS.items()}


def draw(path: Path) -> None:
    """Writes the chart as a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    heights = bars()
    figure, axes = plt.subplots(figsize=(7.2, 2.6), dpi=150)
    colors = ["#2a6fbb" if label.startswith("swjax") else "#b8bec6" for label in heights]
    drawn = axes.barh(list(heights), list(heights.values()), color=colors, height=0.68)
    axes.bar_label(drawn, fmt="%.0f", padding=4)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max(heights.values()))
    axes.set_xlabel("images per second, one H200, batch 128")
    ratio = heights[LABELS["swjax switchback"]] / heights[LABELS["timm torch.compile"]]
    title = (
        f"ViT-H/14's image tower, forward and backward: int8 runs at {ratio:.2f} times timm's rate"
    )
    axes.set_title(title, loc="left", x=-0.37, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.tight_layout()
    figure.savefig(path, metadata={"Software": None})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draws the README's chart from a recorded result.")
    default = ROOT / "docs" / "images" / "vith_tower_h200.png"
    parser.add_argument("--out", type=Path, default=default, help="PNG file")
    draw(parser.parse_args().out)
