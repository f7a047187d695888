"""The tables of the scaling benchmark."""

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
    """Returns relative differences of loss curves from the first curve of one device, by recipe and seed."""
    rows = [row for row in rows if "loss" in row]
    start = lambda case: (case["recipe"], case.get("seed", 0))
    alone: dict[tuple, list] = {}
    for case, loss in ((row["case"], row["loss"]) for row in rows):
        if case["devices"] == 1:
            alone.setdefault(start(case), loss)
    for case, loss in ((row["case"], row["loss"]) for row in rows):
        if alone.get(start(case)) in (None, loss):
            continue
        far = [abs(a - b) / abs(b) for a, b in zip(loss, alone[start(case)], strict=True)]
        until = [n for n in (1, 10, 50, 100) if n < len(far)] + [len(far)]
        parts = ", ".join(f"{max(far[:n]):.1e} in {n} steps" for n in until)
        yield f"{case['recipe']} on {place(case)} and on 1 device differ by at most {parts}"


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
