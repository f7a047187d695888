"""Draws the charts of the README and of the result pages from recorded results, without measuring anything.

  python benchmarks/charts.py    # every chart, and the drawing of the method, into docs/images

A chart shows results of one run on one GPU, unless its page says otherwise.
"""

import argparse
import itertools
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks" / "studies"))

import language  # noqa: E402
import optimizers  # noqa: E402
import paired  # noqa: E402
import study  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
OURS, PEER, OURS_16_BIT, OTHER = "#2a6fbb", "#b8bec6", "#8fb6e0", "#c8571b"
ROTATED = "#2e8b57"  # int8 weight gradients of rotated tokens

# {implementation in the result: its label}, from top to bottom.
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
    "swjax switchback_hadamard": "swjax, int8, weight gradients too",
}
# {arm in the results of language models: its label}, from top to bottom; the panels: {part of the names of
# the files: title}.
LANGUAGE_MODELS = {
    "torch bf16": "PyTorch, bf16",
    "torch float8_tensorwise": "torchao, float8 tensorwise",
    "flax": "Flax, bf16",
    "flax_fp8": "Flax's own fp8 products",
    "switchback_hadamard": "swjax, int8, converted in one line",
    "switchback_hadamard+fused": "swjax, int8, fused norms and MLP",
}
LANGUAGE_PANELS = {
    "8b": "two blocks of Llama-3-8B on one H200, forward and backward, 4 x 4,096 tokens",
    "8b_fsdp4": "Llama-3-8B, whole training steps on four H200s (FSDP), 8 x 8,192 tokens",
}
# Panels of the chart of training steps: (kind, model, title).
STEP_PANELS = (
    ("encoder", "vit_h14", "ViT-H/14's image tower, forward and backward, batch 128"),
    ("step", "vit_h14", "ViT-H/14, whole CLIP step, batch 256"),
    ("step", "vit_l14", "ViT-L/14, whole CLIP step, batch 256"),
)
# Studies of paired runs, from top to bottom, and the recipes that they compare with bf16.
PAIRED = {
    "emoji_accuracy_h200": "emoji drawings, width 128\n(sums of 4,352 tokens)",
    "icons_pairs": "icons, ViT-B's width\n(sums of 67,584 tokens)",
    "icons_large_batch_shared_700": "icons, width 128\n(sums of 1,064,960 tokens)",
}
RECIPES = {"switchback": OURS, "switchback_hadamard": ROTATED, "llm_int8": OTHER}
FEWEST = 3  # pairs for which an interval is drawn
TOKENS = 65_536
SCALED = {"vit_h14": "ViT-H/14, 256 pairs a GPU", "vit_b16": "ViT-B/16, 256 pairs a GPU"}
TITLES = {"standard": "standard, fp32 (products in TF32)", "switchback": "switchback, int8"}
# (devices, layout, dtype of the sums of gradients if not float32): colour and label
SETUPS = {
    (1, "one", ""): ("black", "1 GPU, again"),
    (2, "data", ""): (OURS_16_BIT, "2 GPUs, data parallel"),
    (4, "data", ""): (OURS, "4 GPUs, data parallel"),
    (4, "data", "bfloat16"): ("#6a51a3", "4 GPUs, data parallel, sums in bf16"),
    (4, "fsdp", ""): (OTHER, "4 GPUs, FSDP"),
}
OPTIMIZERS = {
    "adamw 0.999": "AdamW, β2 = 0.999",
    "adamw 0.99": "AdamW, 0.99",
    "adamw 0.95": "AdamW, 0.95",
    "stable 0.99": "StableAdamW, 0.99",
}
SWEEPS = {
    "width 128, emoji, 1,000 steps": ["optimizers_gpu"],
    "ViT-B's width, icons, 600 steps": ["icons_optimizers_h100", "icons_optimizers_h200"],
}
OPTIMIZERS_BY_RATE = {
    "adamw 0.999": ("AdamW", "0.55"),
    "adamw 0.999, clip 1": ("AdamW, clipped at norm 1", OURS),
    "stable 0.999": ("StableAdamW", OTHER),
    "muon": ("Muon", ROTATED),
}
ERRORS = {
    "switchback": ("switchback: dW's product exact, the others in int8", OURS),
    "llm_int8": ("llm_int8: dW's product alone in int8", OTHER),
    "switchback_hadamard": ("switchback_hadamard: the same with rotated tokens", ROTATED),
    "fp8_tensorwise": ("fp8_tensorwise: dW's product alone in fp8", PEER),
}


def read(name: str) -> dict:
    """Reads a recorded result."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def tower_rows() -> dict[str, dict]:
    """Returns {label: row} of ViT-H/14's image tower, forward and backward, without remat."""
    rows = {
        row["implementation"]: row
        for row in read("train_step_h200")["rows"]
        if (row["kind"], row["model"], row["remat"]) == ("encoder", "vit_h14", "none")
    }
    return {label: rows[name] for name, label in TOWER.items()}


def draw_tower(figure) -> None:
    """Draws the speed of ViT-H/14's tower compared with timm and torchao."""
    rows = tower_rows()
    figure.set_size_inches(7.2, 2.6)
    axes = figure.subplots()
    rates = {label: row["images_per_second"] for label, row in rows.items()}
    draw_bars(axes, rates, "{:,.0f}")
    axes.set_xlabel("images per second, one H200, batch 128", fontsize=9)
    ratio = rows[TOWER["swjax switchback"]]["ratio_to_torch"]
    say(figure, f"int8 trains ViT-H/14's image tower at {ratio:.2f} times the rate of timm in bf16")


def draw_steps(figure) -> None:
    """Draws training steps compared with timm and open_clip; the tower with and without recomputed blocks."""
    rows = read("train_step_h200")["rows"]
    figure.set_size_inches(7.2, 5.8)
    ratios = [
        row["ratio_to_torch"]
        for row in rows
        if row["model"] == "vit_h14" and "ratio_to_torch" in row and "ratio" in row
    ]
    span = f"{min(ratios):.2f} to {max(ratios):.2f}"
    say(figure, f"int8 trains ViT-H/14 {span} times as fast as compiled PyTorch in bf16")
    panels = figure.subplots(3, 1, height_ratios=(7, 4, 4))
    for axes, (kind, model, title) in zip(panels, STEP_PANELS, strict=True):
        rates = {}
        for remat, note in (("none", ""), ("full", ", blocks recomputed")):
            some = [r for r in rows if (r["kind"], r["model"], r["remat"]) == (kind, model, remat)]
            found = {row["implementation"]: row["images_per_second"] for row in some}
            rates |= {STEPS[name] + note: found[name] for name in STEPS if name in found}
        draw_bars(axes, rates, "{:,.0f}")
        axes.set_title(title, loc="left", fontsize=9)
    cards = "image tower on one card, steps on another"
    axes.set_xlabel(f"images per second, H200s ({cards})", fontsize=8)


def draw_language_models(figure) -> None:
    """Draws the tokens per second of Llama in PyTorch, torchao, Flax and swjax."""
    figure.set_size_inches(7.2, 4.2)
    rates = {}
    for axes, (name, title) in zip(figure.subplots(2, 1), LANGUAGE_PANELS.items(), strict=True):
        files = f"language_models_torch_{name}_h200", f"language_models_{name}_h200"
        rows = [row for file in files for row in read(file)["rows"]]
        rates[name] = {row["arm"]: row["tokens_per_second"] for row in rows}
        known = {arm: label for arm, label in LANGUAGE_MODELS.items() if arm in rates[name]}
        bars = {label: rates[name][arm] / 1e3 for arm, label in known.items()}
        draw_bars(axes, bars, "{:,.0f}")
        axes.set_title(title, loc="left", fontsize=9)
    axes.set_xlabel("thousand tokens per second", fontsize=9)
    ours = rates["8b_fsdp4"]["switchback_hadamard+fused"]
    over = [ours / rates["8b_fsdp4"][peer] for peer in ("flax", "torch float8_tensorwise")]
    answer = (
        "Whole steps in int8: {:.2f} times as fast as Flax's bf16, {:.2f} times torchao's float8"
    )
    say(figure, answer.format(*over))


def say(figure, answer: str) -> None:
    """Writes the title of a chart: the answer to its question."""
    figure.suptitle(answer, x=0.01, ha="left", fontsize=11, fontweight="bold")


def draw_bars(axes, values: dict[str, float], number: str) -> None:
    """Draws horizontal bars, the first at the top: other libraries grey, swjax blue, int8 dark."""
    colors = [
        PEER if not label.startswith("swjax") else OURS if "int8" in label else OURS_16_BIT
        for label in values
    ]
    drawn = axes.barh(list(values), list(values.values()), color=colors, height=0.7)
    axes.bar_label(drawn, fmt=number, padding=3, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.18 * max(values.values()))
    clear(axes)
    axes.tick_params(axis="y", length=0)


def clear(axes) -> None:
    """Removes the frame and makes labels small."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)


def draw_layers(figure) -> None:
    """Draws the speed-up of one linear layer by width, and of two widths against XLA with a fused bias."""
    times: dict[tuple[int, str], float] = {}
    rows = [row for row in read("kernels_h200_layers")["rows"] if row["op"] == "layer grid"]
    for row in rows:
        tokens, k, n = map(int, re.findall(r"\d+", row["shape"]))
        if tokens == TOKENS:
            cell = min(k, n), row["implementation"]
            times[cell] = times.get(cell, 0) + row["us"]
    widths = sorted({width for width, _ in times})
    speedups = [times[width, "xla bf16"] / times[width, "switchback"] for width in widths]
    figure.set_size_inches(7.2, 3.4)
    say(figure, "The wider the layer, the more int8 gains")
    axes = figure.subplots()
    axes.plot(
        widths, speedups, "o-", color=OURS, label="over XLA, which adds the bias in a separate pass"
    )
    axes.plot([1280], [fused_bias()], "s", color=OTHER, label="over XLA with a fused bias")
    axes.axhline(1, color="0.6", linewidth=0.8)
    axes.text(widths[0], 1.01, "XLA, bf16", fontsize=8, color="0.4")
    axes.set_xscale("log", base=2)
    axes.set_xticks(widths, [f"{width:,}" for width in widths])
    axes.minorticks_off()
    axes.set_ylim(0.9, 1.65)
    axes.set_xlabel(
        "width: layers of width -> 4 width and back, 65,536 tokens, one H200", fontsize=9
    )
    axes.set_ylabel("speed-up, forward and backward", fontsize=9)
    axes.legend(fontsize=8, loc="center right", frameon=False)
    clear(axes)


def fused_bias() -> float:
    """Returns the speed-up of 1280 -> 5120 and back against XLA with a fused bias."""
    times = {"xla bf16": 0.0, "switchback": 0.0}
    for row in read("kernels_h200_layers_bias")["rows"]:
        up_or_down = row["shape"] in (f"{TOKENS}x1280->5120", f"{TOKENS}x5120->1280")
        if row["op"] == "layer plain" and up_or_down and row["implementation"] in times:
            times[row["implementation"]] += row["us"]
    return times["xla bf16"] / times["switchback"]


def draw_scaling(figure) -> None:
    """Draws the efficiency of four GPUs by model, recipe and mesh."""
    rows = read("scaling_h200")["rows"]
    rates = {
        tuple(row["case"][key] for key in ("model", "recipe", "layout", "devices")): row
        for row in rows
        if "xla" not in row["case"]
    }
    figure.set_size_inches(7.2, 3.8)
    say(figure, "Four GPUs reach 89 to 96 % of four times the rate of one")
    for axes, (model, title) in zip(
        figure.subplots(2, 1, sharex=True), SCALED.items(), strict=True
    ):
        kept = {}
        for recipe, dtype in (("switchback", "int8"), ("standard", "bf16")):
            one = rates[model, recipe, "one", 1]["samples_per_s"]
            for layout, mesh in (("fsdp", "FSDP"), ("data", "data parallel")):
                four = rates[model, recipe, layout, 4]["samples_per_s"]
                kept[f"swjax, {dtype}, {mesh}"] = 100 * four / (4 * one)
        draw_bars(axes, kept, "{:.1f} %")
        axes.set_yticks(range(len(kept)), [label.removeprefix("swjax, ") for label in kept])
        axes.set_xlim(0, 115)
        axes.set_title(title, loc="left", fontsize=9)
    axes.set_xlabel("% of 4 times one H200's samples per second", fontsize=9)


def draw_scaling_losses(figure) -> None:
    """Draws how losses on several GPUs, and of a second run on one GPU, differ from those of one run."""
    rows = read("scaling_losses_h200")["rows"]
    figure.set_size_inches(7.8, 3.4)
    say(
        figure,
        "In int8 with data parallelism, losses differ about twice as much as two runs on one GPU",
    )
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (recipe, title) in zip(panels, TITLES.items(), strict=True):
        mine = [row for row in rows if row["case"]["recipe"] == recipe]
        first = next(row for row in mine if row["case"]["devices"] == 1)
        for row in mine:
            case = row["case"]
            if row is first:
                continue
            far = [abs(a - b) for a, b in zip(row["loss"], first["loss"], strict=True)]
            means = [sum(far[at : at + 10]) / 10 for at in range(0, len(far), 10)]
            color, label = SETUPS[case["devices"], case["layout"], case.get("reduce_dtype", "")]
            width = 2.2 if case["devices"] == 1 else 1.2
            steps = range(5, 5 + 10 * len(means), 10)
            axes.semilogy(steps, means, color=color, linewidth=width, label=label)
        axes.set_title(title, loc="left", fontsize=9)
        axes.set_xlabel("step", fontsize=9)
        axes.legend(fontsize=7, loc="lower right", frameon=False)
        clear(axes)
    panels[0].set_ylabel("difference of losses,\nmean of ten steps", fontsize=9)


def draw_spikes(figure) -> None:
    """Draws loss spikes by optimizer: those that follow an RMS event of the patch embedding, and others."""
    counts = dict.fromkeys(OPTIMIZERS, (0, 0))
    for run in (run for part in read("spikes_gpu")["runs"] for run in part["result"]["runs"]):
        followed, spikes = counts[run["arm"]]
        followed += run["alignment"]["patch"]["followed"]
        counts[run["arm"]] = followed, spikes + run["spikes"]
    figure.set_size_inches(7.2, 2.6)
    say(figure, "AdamW with a high β2 spikes most, and most of its spikes follow an RMS event")
    axes = figure.subplots()
    labels = list(OPTIMIZERS.values())
    follow = [followed for followed, _ in counts.values()]
    others = [spikes - followed for followed, spikes in counts.values()]
    axes.barh(labels, follow, color=OTHER, height=0.6, label="1 to 8 steps after an RMS event")
    axes.barh(labels, others, left=follow, color=PEER, height=0.6, label="other spikes")
    axes.invert_yaxis()
    axes.set_xlabel(
        "loss spikes in 34 runs each (136 runs, learning rates 0.001 to 0.008)", fontsize=9
    )
    axes.legend(fontsize=8, loc="lower right", frameon=False)
    clear(axes)
    axes.tick_params(axis="y", length=0)


def draw_optimizers(figure) -> None:
    """Draws final losses of four optimizers by learning rate, of a small and a large model."""
    from matplotlib.ticker import LogLocator

    figure.set_size_inches(7.2, 3.2)
    say(figure, "At its best learning rate Muon ends at the lowest loss, in both models")
    for axes, (title, files) in zip(figure.subplots(1, 2), SWEEPS.items(), strict=True):
        runs = study.merge([RESULTS / f"{name}.json" for name in files])["runs"]
        arms = optimizers.whole_seeds(optimizers.by_arm(runs))
        for arm, (label, color) in OPTIMIZERS_BY_RATE.items():
            losses = optimizers.finals(arms[arm])
            rates = [f"{rate:g}" for rate in losses]
            axes.plot(rates, list(losses.values()), ".-", color=color, label=label)
        axes.set_yscale("log")
        axes.yaxis.set_minor_locator(LogLocator(subs=(2, 3, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.set_title(title, loc="left", fontsize=9)
        axes.set_xlabel("highest learning rate", fontsize=9)
        clear(axes)
        axes.tick_params(which="minor", labelsize=8)
    figure.axes[0].set_ylabel("final training loss", fontsize=9)
    figure.axes[0].legend(fontsize=8, frameon=False)


def draw_weight_gradients(figure) -> None:
    """Draws the error of dW over K in a trained model, median of its layers."""
    figure.set_size_inches(7.2, 3.2)
    say(figure, "Rotated tokens: the error of an int8 dW no longer grows with the batch")
    axes = figure.subplots()
    points: dict[str, list[tuple[int, float]]] = {arm: [] for arm in ERRORS}
    for run in read("weight_gradients")["runs"]:
        if run["key"]["moment"] == "trained":
            result = run["result"]
            points[run["key"]["arm"]].append((result["K"], 100 * result["median"]))
    for arm, (label, color) in ERRORS.items():
        axes.plot(*zip(*sorted(points[arm]), strict=True), "o-", color=color, label=label)
    axes.set_xscale("log")
    axes.set_ylim(0, 11)
    axes.set_xlabel("K: tokens of the batch", fontsize=9)
    axes.set_ylabel("error of dW, %, median layer", fontsize=9)
    axes.legend(fontsize=8, loc="upper left", frameon=False)
    clear(axes)


def draw_pairs(figure) -> None:
    """Draws the mean paired differences of top-1 from bf16 of three studies, with their 95% intervals."""
    figure.set_size_inches(7.2, 3.6)
    axes = figure.subplots()
    rows = 0.0
    for name, title in PAIRED.items():
        runs, first = read(name)["runs"], rows
        for arm, color in RECIPES.items():
            pairs = paired.differences(runs, arm, "test", "top1")
            if not pairs:
                continue
            mean, half = study.interval(pairs)
            axes.errorbar(mean, rows, xerr=half, fmt="o", color=color, markersize=6, capsize=4)
            found = f"{mean:+.2f} ± {half:.2f}, {len(pairs)} pairs"
            axes.text(1.0, rows, f"{arm}: {found}", va="center", fontsize=8.5, color=color)
            rows += 1
        axes.text(-1.55, (first + rows - 1) / 2, title, va="center", ha="right", fontsize=9)
        rows += 0.6  # a gap between studies
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks([])
    axes.set_ylim(rows - 0.8, -0.6)
    axes.set_xlim(-1.5, 3.5)
    axes.set_xticks([-1.5, -1, -0.5, 0, 0.5, 1])
    axes.set_xlabel(
        "top-1 minus that of bf16, points: mean and 95% interval over pairs", fontsize=9
    )
    clear(axes)
    say(figure, "int8 SwitchBack: no difference from bf16 is found in three studies")


def draw_language(figure) -> None:
    """Draws the paired differences of a language model's loss, their means and 95% intervals."""
    figure.set_size_inches(7.2, 4.2)
    axes = figure.subplots()
    new = [run for name in ("second", "llm_int8") for run in read(f"language_{name}")["runs"]]
    parts = {"": read("language")["runs"], ", new seeds": new}
    found = {
        (row["arm"], part): row for part, runs in parts.items() for row in language.summary(runs)
    }
    shown = [each for each in itertools.product(language.ARMS, parts) if each in found]
    for y, (arm, part) in enumerate(shown):
        pairs, row = language.differences(parts[part], arm, "val"), found[arm, part]
        color = PEER if arm == paired.CONTROL else OTHER if "fp8" in arm else OURS
        axes.plot(pairs, [y] * len(pairs), "|", color=color, markersize=9, alpha=0.6)
        axes.errorbar(row["mean"], y, xerr=row["half"], fmt="o", color=color, capsize=4)
        said = f"{row['mean']:+.4f} ± {row['half']:.4f}, {row['pairs']} pairs"
        axes.text(0.0119, y, said, va="center", fontsize=8.5)
    axes.axvspan(-language.MARGIN, language.MARGIN, color="black", alpha=0.06, linewidth=0)
    axes.axvline(0, color="black", linewidth=0.8)
    names = {paired.CONTROL: "control, minus bf16"}
    axes.set_yticks(range(len(shown)), [names.get(arm, arm) + part for arm, part in shown])
    axes.invert_yaxis()
    axes.set_xlim(-0.0085, 0.0215)
    axes.set_xticks([-0.006, -0.003, 0, 0.003, 0.006, 0.009])
    said = "loss minus the mean of bf16 and its control, nats a byte; shaded: margin"
    axes.set_xlabel(said, fontsize=9)
    clear(axes)
    say(figure, "On average int8 SwitchBack ends within 0.003 of a language model's loss in bf16")


def draw_icons(figure) -> None:
    """Draws the losses of paired runs on the icons at ViT-B's width, and differences of final losses."""
    runs = read("icons_pairs")["runs"]
    figure.set_size_inches(7.2, 3.2)
    left, right = figure.subplots(1, 2, width_ratios=(4, 5))
    styles = {"standard": ("bf16", "0.75", 3.5, 2), "switchback": ("switchback", OURS, 0.9, 3)}
    for run in runs:
        key, loss = run["key"], run["result"]["loss"]
        if key["arm"] not in styles:
            continue
        label, color, width, order = styles[key["arm"]]
        steps = [key["shared"] + step for step in study.thinned_steps(loss)]
        label = label if key["seed"] == runs[0]["key"]["seed"] else ""
        left.plot(steps, loss, color=color, linewidth=width, zorder=order, label=label)
    left.set_xlabel("step of 2,048 drawings; 600 are shared", fontsize=9)
    seeds = {run["key"]["seed"] for run in runs}
    left.set_ylabel(f"training loss, {len(seeds)} seeds", fontsize=9)
    left.legend(fontsize=8, frameon=False)
    arms = [arm for arm in dict.fromkeys(run["key"]["arm"] for run in runs) if arm != "standard"]
    labels = []
    for y, arm in enumerate(arms):
        pairs = paired.minus(runs, arm, paired.final_loss)
        color = RECIPES.get(arm, "0.35")
        found = ", ".join(f"{pair:+.3f}" for pair in sorted(pairs))
        if len(pairs) >= FEWEST:
            mean, half = study.interval(pairs)
            found = f"{mean:+.3f} ± {half:.3f}"
            right.errorbar(mean, y, xerr=half, fmt="o", color=color, markersize=7, capsize=4)
        right.plot(pairs, [y - 0.25] * len(pairs), "o", color=PEER, markersize=3.5)
        right.text(0.053, y, found, va="center", fontsize=9, color=color)
        labels.append(f"{arm}\n{len(pairs)} pairs")
    right.axvline(0, color="black", linewidth=0.8)
    right.set_yticks(range(len(arms)), labels, fontsize=9)
    right.set_ylim(len(arms) - 0.5, -0.5)
    right.set_xlim(-0.03, 0.1)
    right.set_xticks([-0.02, 0, 0.02, 0.04])
    right.set_xlabel("final training loss minus that of bf16", fontsize=9)
    for axes in (left, right):
        clear(axes)
    say(figure, "ViT-B's width: llm_int8 ends above bf16; SwitchBack shows no difference")


def draw_icons_h(figure) -> None:
    """Draws the losses of paired runs at ViT-H's width, and their means over 50 steps minus those of bf16."""
    runs = read("icons_h_h100")["runs"]
    figure.set_size_inches(7.2, 3.2)
    left, right = figure.subplots(1, 2)
    styles = {
        "standard": ("bf16", "0.75", 3.5),
        "llm_int8": ("llm_int8", OTHER, 1.4),
        "switchback": ("switchback", OURS, 0.7),
        "switchback_hadamard": ("switchback_hadamard", RECIPES["switchback_hadamard"], 0.7),
        paired.CONTROL: ("control", "0.5", 1.4),
    }
    window = 50 // study.THIN
    of = {(run["key"]["seed"], run["key"]["arm"]): run for run in runs}
    labeled: set[str] = set()
    for (seed, arm), run in of.items():
        label, color, width = styles[arm]
        label = "" if arm in labeled else label
        labeled.add(arm)
        loss = np.asarray(run["result"]["loss"])
        steps = run["key"]["shared"] + np.asarray(study.thinned_steps(loss))
        if arm != paired.CONTROL:
            left.plot(steps, loss, color=color, linewidth=width, label=label)
        if arm != "standard":
            gap = loss - np.asarray(of[seed, "standard"]["result"]["loss"])
            ends = steps.reshape(-1, window)[:, -1]
            means = gap.reshape(-1, window).mean(1)
            right.plot(ends, means, "o-", color=color, markersize=3, linewidth=0.9, label=label)
    right.axhline(0, color="black", linewidth=0.8)
    left.set_ylabel("training loss, four seeds", fontsize=9)
    right.set_ylabel("training loss minus that of bf16,\neach pair of runs", fontsize=9)
    for axes in (left, right):
        axes.set_xlabel("step of 512 drawings; 800 are shared", fontsize=9)
        clear(axes)
    right.set_ylim(top=0.0056)
    left.legend(fontsize=8, frameon=False)
    right.legend(fontsize=8, frameon=False, loc="upper left")
    say(figure, "ViT-H's width: llm_int8 ends further above bf16 than switchback, in all pairs")


ROWWISE, ONE = "a scale per token", "one scale"
# The products of a linear layer under SwitchBack: title, left and right operand, result, contracted axis.
# An operand is (name, shape, is int8, the part that shares a scale).
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
    """Draws the three products of a linear layer under SwitchBack, and which operands are int8."""
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
    "language_models_h200": draw_language_models,
    "icons_pairs": draw_icons,
    "icons_h": draw_icons_h,
    "accuracy_pairs": draw_pairs,
    "language_pairs": draw_language,
    "layers_h200": draw_layers,
    "scaling_h200": draw_scaling,
    "scaling_losses_h200": draw_scaling_losses,
    "spikes_by_optimizer_h200": draw_spikes,
    "optimizers": draw_optimizers,
    "weight_gradients": draw_weight_gradients,
}
DRAWINGS = {"method": draw_method}  # written as SVG


def draw(folder: Path, names: Iterable[str] = tuple(CHARTS)) -> None:
    """Writes the named charts as PNG files into a folder, and the drawings as SVG."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "swjax"  # so that SVG files are reproducible
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
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
