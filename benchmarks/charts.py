"""Draws the charts of the README and of the result pages from recorded results, without measuring anything.

  python benchmarks/charts.py    # every chart, and the drawing of the method, into docs/images

A chart shows rows of one run on one card, unless its page says otherwise.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
OURS, PEER, OURS_16_BIT = "#2a6fbb", "#b8bec6", "#8fb6e0"

# {implementation in the result: its label}, from the top.
TOWER = {
    "timm torch.compile": "timm, torch.compile, bf16",
    "timm torchao float8 torch.compile": "timm, torchao float8",
    "timm torchao int8 torch.compile": "timm, torchao int8",
    "swjax standard": "swjax, bf16",
    "swjax switchback": "swjax, int8 (SwitchBack)",
}
STEPS = {
    "timm torch.compile": "timm, bf16",
    "open_clip torch.compile": "open_clip, bf16",
    "swjax standard": "swjax, bf16",
    "swjax switchback": "swjax, int8",
}
# Panels of the chart of training steps: (kind, model, title).
STEP_PANELS = (
    ("encoder", "vit_h14", "ViT-H/14's image tower,\nforward and backward, batch 128"),
    ("step", "vit_h14", "ViT-H/14, whole CLIP step,\nbatch 256"),
    ("step", "vit_l14", "ViT-L/14, whole CLIP step,\nbatch 256"),
)
RECIPES = ("standard", "switchback", "llm_int8", "fp8_tensorwise", "fp8_switchback")
TOP1 = "zeroshot/emoji_test_top1"


def read(name: str) -> dict:
    """A recorded result."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def tower_rates() -> dict[str, float]:
    """Images per second by label: ViT-H/14's image tower, forward and backward, no block recomputed."""
    rows = {
        row["implementation"]: row["images_per_second"]
        for row in read("train_step_torchao_h200")["rows"]
        if row["remat"] == "none"
    }
    return {label: rows[name] for name, label in TOWER.items()}


def draw_tower(figure) -> None:
    """ViT-H/14's tower beside timm and torchao."""
    rates = tower_rates()
    figure.set_size_inches(7.2, 2.6)
    axes = figure.subplots()
    draw_bars(axes, rates, "%.0f")
    axes.set_xlabel("images per second, one H200, batch 128")
    ratio = rates[TOWER["swjax switchback"]] / rates[TOWER["timm torch.compile"]]
    title = (
        f"ViT-H/14's image tower, forward and backward: int8 runs at {ratio:.2f} times timm's rate"
    )
    axes.set_title(title, loc="left", x=-0.37, fontsize=10)


def draw_steps(figure) -> None:
    """Training steps beside timm and open_clip; the tower with and without recomputed blocks."""
    rows = read("train_step_h200")["rows"]
    figure.set_size_inches(10, 3.2)
    for axes, (kind, model, title) in zip(figure.subplots(1, 3), STEP_PANELS, strict=True):
        rates = {}
        for remat, note in (("none", ""), ("full", ", blocks recomputed")):
            some = [r for r in rows if (r["kind"], r["model"], r["remat"]) == (kind, model, remat)]
            found = {row["implementation"]: row["images_per_second"] for row in some}
            rates |= {STEPS[name] + note: found[name] for name in STEPS if name in found}
        draw_bars(axes, rates, "%.0f")
        axes.set_title(title, loc="left", fontsize=9)
        axes.set_xlabel("images per second")


def draw_bars(axes, values: dict[str, float], number: str) -> None:
    """Horizontal bars, the first at the top: peers grey, ours blue, int8 dark."""
    colors = [
        PEER if not label.startswith("swjax") else OURS if "int8" in label else OURS_16_BIT
        for label in values
    ]
    drawn = axes.barh(list(values), list(values.values()), color=colors, height=0.7)
    axes.bar_label(drawn, fmt=number, padding=3, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.18 * max(values.values()))
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0, labelsize=8)
    axes.tick_params(axis="x", labelsize=8)


def draw_recipes(figure) -> None:
    """Zero-shot accuracy of every recipe on the default task, a point for each seed."""
    groups = {group["recipe"]: group for group in read("accuracy_mixed_gpu")["groups"]}
    figure.set_size_inches(7.2, 2.8)
    axes = figure.subplots()
    for y, recipe in enumerate(RECIPES):
        scores = [100 * score for score in groups[recipe]["scores"][TOP1].values()]
        color = PEER if recipe == "standard" else OURS
        axes.plot(scores, [y] * len(scores), "o", color=color, markersize=7, alpha=0.8)
        axes.plot([sum(scores) / len(scores)], [y], "|", color="black", markersize=18)
    axes.set_yticks(range(len(RECIPES)), RECIPES)
    axes.invert_yaxis()
    axes.set_xlim(0, 33)
    axes.axvline(0.26, color="0.6", linewidth=0.8)
    axes.text(0.6, 2.1, "chance: 0.26", fontsize=8, color="0.4")
    axes.set_xlabel("zero-shot top-1 on 381 unseen drawings, %; a point for each seed, | the mean")
    axes.spines[["top", "right"]].set_visible(False)


ROWWISE, ONE = "a scale per token", "one scale"
# The products of a linear layer under SwitchBack: title, left and right operand, result, what is summed.
# An operand is (name, shape, is int8, what shares a scale).
PRODUCTS = (
    ("forward", ("x", "tokens x k", True, ROWWISE), ("w", "k x n", True, ONE), "y", "k"),
    ("input gradient", ("g", "tokens x n", True, ROWWISE), ("wT", "n x k", True, ONE), "dx", "n"),
    (
        "weight gradient",
        ("xT", "k x tokens", False, ""),
        ("g", "tokens x n", False, ""),
        "dw",
        "tokens",
    ),
)


def draw_method(figure) -> None:
    """The three products of a linear layer under SwitchBack, and what is int8."""
    from matplotlib.patches import Rectangle

    figure.set_size_inches(8.4, 3.6)
    axes = figure.subplots()
    axes.set(xlim=(0, 10.4), ylim=(0.1, 4.2))
    axes.set_axis_off()

    def box(x, y, name, shape, int8, note):
        color = OURS if int8 else PEER
        axes.add_patch(Rectangle((x, y), 2.1, 0.82, facecolor=color, edgecolor="none"))
        ink = "white" if int8 else "black"
        kind = "int8" if int8 else "16 bits"
        axes.text(x + 1.05, y + 0.55, f"{name}  {kind}", ha="center", va="center", color=ink)
        lines = f"{shape}, {note}" if note else shape
        axes.text(x + 1.05, y + 0.22, lines, ha="center", va="center", color=ink, fontsize=7)

    for row, (title, left, right, result, summed) in enumerate(PRODUCTS):
        y = 3.1 - 1.35 * row
        axes.text(0, y + 0.41, title, va="center", fontsize=11)
        box(2.4, y, *left)
        axes.text(4.75, y + 0.41, "×", ha="center", va="center", fontsize=12)
        box(5.0, y, *right)
        axes.text(7.35, y + 0.41, "=", ha="center", va="center", fontsize=12)
        box(7.6, y, result, f"sums of length {summed}", False, "")


CHARTS = {
    "vith_tower_h200": draw_tower,
    "training_steps_h200": draw_steps,
    "recipes_default_h200": draw_recipes,
}
DRAWINGS = {"method": draw_method}  # written as SVG


def draw(folder: Path, names: Iterable[str] = tuple(CHARTS)) -> None:
    """Writes the named charts as PNG files into a folder, and the drawings as SVG."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "swjax"  # the same bytes every time
    import matplotlib.pyplot as plt

    for name in names:
        figure = plt.figure(dpi=150, layout="constrained")
        CHARTS[name](figure)
        figure.savefig(folder / f"{name}.png", metadata={"Software": None})
        plt.close(figure)
    for name, drawing in DRAWINGS.items():
        figure = plt.figure(layout="constrained")
        drawing(figure)
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
        plt.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images", help="folder")
    draw(parser.parse_args().out)
