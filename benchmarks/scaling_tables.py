"""The tables and plots of the scaling benchmark."""

from pathlib import Path

NAMES = {"standard": "bf16", "switchback": "int8"}


def describe(case: dict, row: dict) -> str:
    name = f"{case.get('model', 'losses')} {case['recipe']} {arranged(case)} x{case['devices']}"
    told = (
        "error",
        "compile_s",
        "samples_per_s",
        "step_ms",
        "first_run_ms",
        "collective_ms",
        "exposed_collective_ms",
        "peak_gib",
    )
    parts = [f"{key} {row[key]}" for key in told if row.get(key) is not None]
    return f"{name}: {', '.join(parts) or 'last loss ' + str(row.get('loss', [None])[-1])}"


def table(rows: list[dict]) -> str:
    """Returns a Markdown table of throughput, or of the differences between loss curves."""
    if any(row["case"].get("losses") for row in rows):
        return "\n".join(differences(rows))
    head = "model|precision|layout|GPUs|samples/s|efficiency|step ms|NCCL ms|exposed ms|gathers MB|peak GiB"
    lines = [f"|{head}|", "|" + "---|" * len(head.split("|"))]
    for row in rows:
        case, ratio = row["case"], None
        if "error" in row:
            cells = [row["error"]] + [""] * 6
        else:
            ratio = efficiency(rows, row)
            moved = row["collective_mb"].get("all-gather", {})
            gathers = ", ".join(f"{mb:.0f} {dtype}" for dtype, mb in moved.items() if mb >= 0.5)
            cells = [row["samples_per_s"], f"{ratio:.3f}" if ratio else "", row["step_ms"]]
            cells += [row["collective_ms"], row["exposed_collective_ms"], gathers, row["peak_gib"]]
        names = [case["model"], NAMES.get(case["recipe"], case["recipe"]), arranged(case)]
        lines.append(f"|{'|'.join(map(str, [*names, case['devices'], *cells]))}|")
    return "\n".join(lines)


def efficiency(rows: list[dict], row: dict) -> float | None:
    """Returns samples/s relative to as many single devices; None if a row is missing."""
    # Options of collectives do not affect one device.
    unlike = ("devices", "layout", "reduce_dtype", "reduce_once", "xla")
    same = {key: value for key, value in row["case"].items() if key not in unlike}
    for one in rows:
        single = {key: value for key, value in one["case"].items() if key not in unlike}
        if one["case"]["devices"] == 1 and single == same and "samples_per_s" in one:
            return row["samples_per_s"] / (row["case"]["devices"] * one["samples_per_s"])
    return None


def differences(rows: list[dict]):
    """Returns relative differences of loss curves from the first curve of one device, for each recipe."""
    rows = [row for row in rows if "loss" in row]
    alone: dict[str, list] = {}
    for case, loss in ((row["case"], row["loss"]) for row in rows):
        if case["devices"] == 1:
            alone.setdefault(case["recipe"], loss)
    for case, loss in ((row["case"], row["loss"]) for row in rows):
        if alone.get(case["recipe"]) in (None, loss):
            continue
        far = [abs(a - b) / abs(b) for a, b in zip(loss, alone[case["recipe"]], strict=True)]
        until = [n for n in (1, 10, 50, 100) if n < len(far)] + [len(far)]
        parts = ", ".join(f"{max(far[:n]):.1e} in {n} steps" for n in until)
        yield f"{case['recipe']} on {place(case)} and on 1 device differ by at most {parts}"


def plot(rows: list[dict], path: Path) -> None:
    """Draws loss curves; or the step's time, its collectives and the efficiency, with one bar per case."""
    import matplotlib.pyplot as plt

    losses = [row for row in rows if "loss" in row]
    timed = [row for row in rows if "step_ms" in row]
    if losses:
        plot_losses(losses, path)
        return
    figure, axes = plt.subplots(figsize=(8, 1.2 + 0.28 * len(timed)), layout="constrained")
    alone = [row["exposed_collective_ms"] or 0 for row in timed]
    rest = [row["step_ms"] - ms for row, ms in zip(timed, alone)]
    axes.barh(range(len(timed)), rest, label="everything else")
    drawn = axes.barh(range(len(timed)), alone, left=rest, label="collectives alone")
    axes.bar_label(drawn, [f"{efficiency(rows, row) or 0:.3f}" for row in timed], padding=2)
    axes.set_yticks(range(len(timed)), [short(row["case"]) for row in timed], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set(xlabel="ms a step; the number: weak scaling efficiency")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def plot_losses(rows: list[dict], path: Path) -> None:
    """Draws the loss on one device, and the difference from it for each layout, as means over ten steps."""
    import matplotlib.pyplot as plt

    alone: dict[str, list[float]] = {}
    for row in rows:
        if row["case"]["devices"] == 1:
            alone.setdefault(row["case"]["recipe"], row["loss"])
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 4), layout="constrained")
    for recipe, loss in alone.items():
        left.plot(range(1, len(loss) + 1), loss, label=f"{recipe}, 1 device", linewidth=1)
    left.set(xlabel="step", ylabel="loss", title="on one device")
    left.legend(fontsize=8)
    for row in rows:
        base = alone[row["case"]["recipe"]]
        if row["loss"] is base:
            continue
        far = [abs(a - b) for a, b in zip(row["loss"], base, strict=True)]
        parts = [far[at : at + 10] for at in range(0, len(far), 10)]
        name = f"{row['case']['recipe']}, {place(row['case'])}"
        means = [sum(part) / len(part) for part in parts]
        right.plot(range(5, 5 + 10 * len(means), 10), means, ".-", linewidth=1, label=name)
    right.set(xlabel="step", ylabel="distance from one device's loss", yscale="log")
    right.set_title("repeated on one device, and on several")
    right.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1))
    figure.savefig(path, dpi=110)


def arranged(case: dict) -> str:
    """Returns the layout and the XLA options of a case."""
    options = [f"{key}={value}" for key, value in case.get("xla", {}).items()]
    sums = [f"sums in {case['reduce_dtype']}"] if "reduce_dtype" in case else []
    sums += ["at once"] if "reduce_once" in case else []
    return " ".join([case.get("layout", ""), *sums, *options])


def place(case: dict) -> str:
    count = case["devices"]
    layout = "" if count == 1 else f", {arranged(case)}"
    return f"{count} device{'s' * (count > 1)}{layout}"


def short(case: dict) -> str:
    """Returns a label of the case, without the names of XLA's options."""
    values = sorted(set(case.get("xla", {}).values()))
    options = f"XLA options: {', '.join(values)}" if values else ""
    sums = "16-bit sums" if "reduce_dtype" in case else ""
    sums += " at once" if "reduce_once" in case else ""
    names = (case["model"], NAMES.get(case["recipe"], case["recipe"]), case["layout"], sums)
    return f"{' '.join(names)} x{case['devices']}\n{options}".strip()
