"""The fuzzer's inputs of runs and models: configs, weights, checkpoints, workdirs, reports and mirrors.

Each function takes a folder and a random generator, and returns a function that reads the next input.
"""

import contextlib
import importlib.util
import io
import json
import os
import random
import shutil
import zipfile
from pathlib import Path

import numpy as np

from benchmarks.reliability.malformed import (
    HOSTILE_NAMES,
    damage,
    damaged_json,
    mutate,
    photograph,
    remove,
)
from swjax.training import optimizer, setup
from swjax.training.state.mirror import Mirror


def configs(place: Path, rng: random.Random):
    """Command lines, files of Python, and the config.json of a run."""
    from swjax.training import config

    root = Path(__file__).resolve().parent.parent.parent
    good = config.load(f"{root}/configs/openmoji.py")
    keys = [f"{section}.{key}" for section in good for key in good[section]]
    values = ("1" + "0" * 15, "",
              "0", "-1", "nan", "inf", "1e999", "[]", "()", "{}", "True", "None", "../x",
              "\0", "__import__('os')", "9" * 5000, "\ud800", "standard", "1.5", "(",
              "a" * 10_000)  # fmt: skip

    def read():
        choice = rng.random()
        if choice < 0.6:
            chosen = [(rng.choice(keys), rng.choice(values)) for _ in range(rng.randint(1, 3))]
            found = config.load(f"{root}/configs/openmoji.py", chosen)
            setup.check_config(found)
            optimizer.make_schedule(found, max(found.train.steps, 1), found.schedule.warmup_steps)
        elif choice < 0.8:
            path = place / "config.py"
            text = (root / "configs" / "vitb32_int8.py").read_bytes()
            path.write_bytes(damage(text, rng))
            if b"import" in path.read_bytes().replace(b"from configs import common", b""):
                path.write_bytes(b"def get_config(: pass")  # random Python is not executed
            config.load(str(path))
        else:
            config.changes(
                damage(config.to_json(good).encode(), rng).decode(errors="replace"), good
            )
        return "a config"

    return read


def weights(place: Path, rng: random.Random):
    """safetensors: header, lengths, offsets, dtypes, and the config next to it; .npz; files of PyTorch."""
    from flax import nnx

    from swjax import interop
    from swjax.models import clip

    tiny = {"width": 16, "layers": 1, "heads": 2}
    cfg = clip.config("tiny", vision=tiny | {"patch_size": 8, "image_size": 16},
                      text=tiny | {"vocab_size": 50, "context_length": 4}, embed_dim=8)  # fmt: skip
    siglip = clip.config(
        cfg, architecture="siglip", gelu="tanh", embed_dim=16, init_logit_bias=-1.0,
        vision={"resize_mode": "squash"},
    )  # fmt: skip
    for layout in ("open_clip", "huggingface"):
        interop.save(place / layout, clip.CLIP(cfg, rngs=nnx.Rngs(0)), layout)
    for layout in ("siglip", "big_vision"):
        interop.save(place / layout, clip.CLIP(siglip, rngs=nnx.Rngs(0)), layout)
    if importlib.util.find_spec("torch"):
        _save_with_torch(place / "open_clip", place / "torch")
    files = {path: path.read_bytes() for path in sorted(place.rglob("*")) if path.is_file()}

    def bomb() -> bytes:
        file = io.BytesIO()
        np.savez_compressed(file, x=np.zeros(2**25, np.float32))
        return file.getvalue()

    def read():
        for path, data in files.items():
            path.write_bytes(data)
        path = rng.choice(list(files))
        if path.suffix == ".npz":
            path.write_bytes(damage(files[path], rng) if rng.random() < 0.8 else bomb())
            return interop.load(path).cfg.embed_dim
        if path.suffix == ".json":
            path.write_bytes(damaged_json(json.loads(files[path]), rng))
            return interop.load(path.parent).cfg.embed_dim
        data, size = files[path], 8 + int.from_bytes(files[path][:8], "little")
        if path.suffix == ".safetensors" and rng.random() < 0.7:  # the header is a small part
            header = damage(data[8:size], rng)
            data = len(header).to_bytes(8, "little") + header + data[size:]
        else:
            data = damage(data, rng)
        path.write_bytes(data)
        return interop.load(path.parent).cfg.embed_dim

    return read


def _save_with_torch(folder: Path, to: Path) -> None:
    """Writes the weights and the config of open_clip's layout as open_clip did before safetensors."""
    import torch
    from safetensors.torch import load_file

    to.mkdir()
    shutil.copy(folder / "open_clip_config.json", to)
    state = load_file(folder / "open_clip_model.safetensors")
    torch.save(state, to / "open_clip_pytorch_model.bin")


def checkpoints(place: Path, rng: random.Random):
    """Two checkpoints, one damaged: the other one, or the same bits, must be restored."""
    import jax
    import jax.numpy as jnp

    from swjax.training.state.checkpoint import Checkpoints

    def state(step):
        return {"params": {"w": jnp.full((300, 8), step, jnp.float32)}, "step": jnp.int32(step)}

    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state(0)
    )
    saved = Checkpoints(place, keep=2)
    for step in (1, 2):
        saved.save(step, state(step), {"batches": step})
    saved.close()
    files = [path for path in (place / "checkpoints" / "2").rglob("*") if path.is_file()]

    def read():
        path = rng.choice(files)
        data = path.read_bytes()
        path.unlink() if rng.random() < 0.1 else path.write_bytes(damage(data, rng))
        try:
            found, position = Checkpoints(place, keep=0).restore(like)
        finally:
            path.write_bytes(data)
        step = position["batches"]
        same = jax.tree.map(lambda a, b: bool((a == b).all()), found, state(step))
        assert step in (1, 2) and all(jax.tree.leaves(same)), "another state was restored"
        return "as it was" if step == 2 else "the one before"

    return read


def workdirs(place: Path, rng: random.Random):
    """The files of a run: config.json, metrics.jsonl, results.json."""
    from swjax.diagnostics import recorder
    from swjax.training import config
    from swjax.training.log import results

    root = Path(__file__).resolve().parent.parent.parent
    good = config.load(f"{root}/configs/openmoji.py")
    lines = [json.dumps({"step": step, "time": 1.0, "train/loss": 0.5}) for step in range(1, 30)]
    files = {
        "config.json": config.to_json(good),
        "metrics.jsonl": "".join(line + "\n" for line in lines),
        "results.json": json.dumps({"step": 29, "scores": {"a_top1": 0.5, "a_chance_top1": 0.1}}),
    }

    def read():
        for name, text in files.items():
            (place / name).write_text(text)
        name = rng.choice(list(files))
        content = damage(files[name].encode(), rng)
        if name.endswith(".json") and rng.random() < 0.5:
            content = damaged_json(json.loads(files[name]), rng)
        (place / name).write_bytes(content)
        with contextlib.redirect_stdout(io.StringIO()):
            with config.blame_damage():
                recorder.truncate(place / "metrics.jsonl", 20, time=int | float)
            results.is_finished(good, place)
            results.tell_results(place)
        return name

    return read


def reports(place: Path, rng: random.Random):
    """A received run with hostile values, names and links; its report, its spikes, and the list of runs."""
    from swjax import report
    from swjax.report import charts, runs, spikes

    charts.pngs(lambda figure, *_: "", None)  # matplotlib writes its caches
    picture = photograph(rng, "PNG")
    metrics = [{"step": step, "time": 1.0, "train/loss": 0.5} for step in range(1, 4)]
    files = {
        "config.json": {
            "model": {"name": "tiny", "recipe": "standard"},
            "train": {"batch_size": 2},
        },
        "results.json": {"step": 3, "scores": {"a_top1": 0.5, "a_chance_top1": 0.1}},
        "report/results.json": {
            "results": {"zeroshot/a_top1": 0.5, "zeroshot/a_chance_top1": 0.1},
            "predictions": [{"image": "images/00.png", "name": "cat", "guesses": ["cat", "dog"]}],
            "nearest_images": [{"caption": "a cat", "images": ["images/00.png"], "own": [True]}],
            "attribution": "by us",
        },
    }
    texts = {
        "env.txt": b"command: python train.py\njax: 0.10\n",
        "metrics.jsonl": "".join(json.dumps(line) + "\n" for line in metrics).encode(),
    }

    def read() -> str:
        run = place / "run"
        (run / "report" / "images").mkdir(parents=True)
        try:
            contents = {name: json.dumps(tree).encode() for name, tree in files.items()} | texts
            name = rng.choice([*contents, "link"])
            if name in files:
                contents[name] = damaged_json(files[name], rng)
            elif name == "env.txt":
                contents[name] = damage(texts[name], rng)
            elif name == "metrics.jsonl":
                lines = [json.dumps(mutate(line, rng)) for line in metrics]
                text = "\n".join(lines).encode("utf-8", "surrogatepass")
                contents[name] = text if rng.random() < 0.7 else damage(texts[name], rng)
            for path, content in contents.items():
                (run / path).write_bytes(content)
            (run / "report" / "images" / "00.png").write_bytes(picture)
            (run / "report" / "link").symlink_to(place.parent / "secret")
            if name == "link":
                link_out(run, place, rng)
            runs.read(run, "run")
            make = rng.choice((report.write, spikes.write))
            make(run)
            return name
        finally:
            remove(run)

    return read


def mirrors(place: Path, rng: random.Random):
    """Mirrors with hostile names, damaged lists of checkpoints, and links here and there."""
    files = {
        "config.json": b"{}",
        "metrics.jsonl": b"",
        "checkpoints/3/manifest": b"1",
        "report/index.html": b"page",
    }
    index = {"checkpoints": [1, 3]}

    def archive(path: Path) -> str:
        with zipfile.ZipFile(path, "w") as file:
            for name, content in files.items():
                name = name if rng.random() < 0.7 else rng.choice(HOSTILE_NAMES)
                file.writestr(name.strip("\0\ud800") or "x", content)
            file.writestr(
                "mirror.json", damaged_json(index, rng) if rng.random() < 0.5 else json.dumps(index)
            )
        return f"zip://::{path}"

    def tree(path: Path) -> str:
        for name, content in files.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(content)
        (path / "mirror.json").write_bytes(
            damaged_json(index, rng) if rng.random() < 0.7 else json.dumps(index).encode()
        )
        if rng.random() < 0.5:
            (path / "linked").symlink_to(place.parent / "secret")
        return str(path)

    def read() -> str:
        run, address = place / "run", place / "address"
        run.mkdir()
        try:
            fetches = rng.random() < 0.7
            if fetches and rng.random() < 0.6:
                text = archive(address)
            else:
                text = tree(address) if fetches else str(address)
            if rng.random() < 0.5:
                link_out_of_workdir(run, place, rng)
            mirror = Mirror(text, run)
            with contextlib.redirect_stdout(io.StringIO()):
                mirror.fetch() if fetches else mirror.push()
            return "fetched" if fetches else "pushed"
        finally:
            remove(run)
            remove(address)

    return read


def link_out(run: Path, place: Path, rng: random.Random) -> None:
    """Replaces a file or folder of a run, or one that is written there, by a link out of it or to itself."""
    names = ("config.json", "env.txt", "metrics.jsonl", "results.json", "report/results.json", "report",
             "report/index.html", "report/spikes.html", "report/loss.png", "report/images/00.png",
             f"report/index.html.{os.getpid()}.part", ".lock", "report/images", "checkpoints")  # fmt: skip
    name = rng.choice(names)
    path = run / name
    remove(path)
    path.symlink_to(rng.choice((place.parent / "secret", place.parent, Path(path.name))))


def link_out_of_workdir(run: Path, place: Path, rng: random.Random) -> None:
    """Puts a link out of the workdir where a mirror reads or writes."""
    name = rng.choice(
        ("config.json", "metrics.jsonl", "checkpoints", "mirror.part", "report", "linked")
    )
    (run / name).symlink_to(rng.choice((place.parent / "secret", place.parent)))


RECEIVED = (reports, mirrors)  # read no file outside of the folder, not even through links
