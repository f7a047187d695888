"""Feeds malformed files to everything that reads files, and watches for side effects.

Each input is a valid file with seeded damage, or random bytes. Reading it must end within seconds, with a
result or with a documented one-line error. It must write nothing outside the folder, unpickle nothing, start
no program, and not leak memory.
"""

import collections
import contextlib
import io
import itertools
import json
import os
import random
import resource
import signal
import sys
import tarfile
import time
from pathlib import Path

import numpy as np

from swjax.training import optimizer, setup
from swjax.training.config import ConfigError

TIMEOUT = 20  # seconds, for a busy machine
MOST_GROWTH = 100  # MiB of memory growth in the second half
NAMES = ("../escape.jpg", "/tmp/swjax_escape.jpg", "a/../../escape.jpg", "\0.jpg", "x" * 300 + ".jpg",
         "..\\escape.jpg", "\udcff.jpg", ".", "a.jpg/b.txt")  # fmt: skip
NUMBERS = (b"\xff\xff\xff\xff", b"\x00\x00\x00\x00", b"\x7f\xff\xff\xff", b"\x80\x00\x00\x00")


def measure(folder: Path, inputs: int = 1000, seed: int = 0) -> dict:
    """Reads malformed inputs, equally many of each kind.

    Args:
      folder: for the files.
      inputs: number of inputs.
      seed: of the damage.
    """
    refusals = {
        tars: (ValueError,),  # which the trainer turns into a ConfigError
        images: (ValueError,),
        configs: (ConfigError,),
        weights: (ValueError, FileNotFoundError),
        checkpoints: (ConfigError,),
        workdirs: (ConfigError,),
    }
    share = -(-inputs // len(refusals))
    results, faults, slowest = {}, [], 0.0
    memory = []
    for reader, allowed in refusals.items():
        kind = reader.__name__
        place = folder / kind
        place.mkdir(parents=True)
        rng, counts = random.Random(f"{kind} {seed}"), collections.Counter()
        read = reader(place, rng)
        with watch(place) as broken:
            for number in range(share):
                start = time.perf_counter()
                outcome = attempt(read, allowed)
                slowest = max(slowest, time.perf_counter() - start)
                counts[outcome.split(":")[0]] += 1
                if outcome.startswith("fault"):
                    faults.append(f"{kind} {number}: {outcome}")
                if number == share // 2:
                    memory.append(resident())
        faults += [f"{kind}: {event}" for event in broken]
        results[kind] = dict(counts) | {"MiB_grown_in_second_half": round(resident() - memory[-1])}
    grown = max(result["MiB_grown_in_second_half"] for result in results.values())
    return {
        "ok": not faults and grown < MOST_GROWTH,
        "inputs": share * len(refusals),
        "faults": len(faults),
        "slowest_seconds": round(slowest, 2),
        "results": results,
        "first_faults": faults[:20],
    }


def attempt(read, allowed: tuple[type[Exception], ...]) -> str:
    """Reads one input; returns how that ended."""

    def alarm(*_):
        raise TimeoutError

    signal.signal(signal.SIGALRM, alarm)
    signal.alarm(TIMEOUT)
    try:
        return f"read: {read()}"
    except allowed as error:
        text = str(error)
        return "refused" if text and "\n" not in text else f"fault: not one line: {text!r}"
    except Exception as error:
        return f"fault: {type(error).__name__}: {error}"
    finally:
        signal.alarm(0)


_broken: list[str] | None = None  # events recorded by the hook; None: not recording
_allowed = ""


def _hook(event: str, args: tuple) -> None:
    if _broken is None:
        return
    if event in ("pickle.find_class", "subprocess.Popen", "os.system", "marshal.loads"):
        if event != "marshal.loads" or "importlib" not in str(sys._getframe(1).f_code.co_filename):
            _broken.append(f"{event} {str(args)[:100]}")
    writes = event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+")
    changes = event in (
        "os.mkdir",
        "os.rename",
        "os.remove",
        "os.symlink",
        "os.link",
        "os.truncate",
    )
    if (writes or changes) and isinstance(args[0], str | bytes | Path):
        path = os.path.abspath(os.fsdecode(args[0]))
        if not path.startswith((_allowed, "/dev/", "/proc/")) and "__pycache__" not in path:
            _broken.append(f"{event} {path}")


sys.addaudithook(_hook)


@contextlib.contextmanager
def watch(place: Path):
    """Yields a list to which unpickling, started programs and writes outside of a folder are added."""
    global _broken, _allowed
    _broken, _allowed = [], os.path.abspath(place)
    try:
        yield _broken
    finally:
        _broken = None


def resident() -> float:
    """Returns the resident memory of this process in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def damage(data: bytes, rng: random.Random) -> bytes:
    """Damages a file in one to four places, or replaces it by random bytes."""
    if rng.random() < 0.05:
        return rng.randbytes(rng.randrange(4096))
    for _ in range(rng.randint(1, 4)):
        at, size = rng.randrange(len(data) + 1), rng.choice((1, 4, 64, 700))
        head, tail = data[:at], data[at:]
        data = rng.choice((
            lambda: head,  # noqa: B023
            lambda: head + rng.randbytes(size) + tail[size:],  # noqa: B023
            lambda: head + tail[size:],  # noqa: B023
            lambda: head + rng.randbytes(size) + tail,  # noqa: B023
            lambda: head + bytes(size) + tail[size:],  # noqa: B023
            lambda: head + rng.choice(NUMBERS) + tail[4:],  # noqa: B023
            lambda: head + head[-size:] + tail,  # noqa: B023
        ))()  # fmt: skip
    return data


# --------------------------------------------------------------------------------- the readers


def photograph(rng: random.Random, file_format: str = "JPEG") -> bytes:
    from PIL import Image

    pixels = np.frombuffer(rng.randbytes(5 * 6 * 3), np.uint8).reshape(5, 6, 3)
    file = io.BytesIO()
    Image.fromarray(pixels).resize((48, 40)).save(file, file_format)
    return file.getvalue()


def tars(place: Path, rng: random.Random):
    """Tars with hostile names and links, and damaged ones; their samples are read by the loader."""
    from swjax import data

    numbers = itertools.count()

    def archive() -> bytes:
        file = io.BytesIO()
        options = {
            "format": rng.choice((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)),
            "errors": "surrogateescape",
        }
        with tarfile.open(fileobj=file, mode="w", **options) as tar:
            for sample in range(6):
                for end, content in (("jpg", photograph(rng)), ("txt", b"a caption")):
                    name = f"{sample:04d}.{end}" if rng.random() < 0.7 else rng.choice(NAMES)
                    info = tarfile.TarInfo(name.replace("\0", "0") or "x")
                    info.size = len(content)
                    if rng.random() < 0.1:
                        info.type, info.size = rng.choice((tarfile.SYMTYPE, tarfile.LNKTYPE)), 0
                        info.linkname = "/etc/passwd"
                    tar.addfile(info, io.BytesIO(content) if info.size else None)
        return file.getvalue()

    def read() -> int:
        path = place / f"{next(numbers)}.tar"
        path.write_bytes(damage(archive(), rng) if rng.random() < 0.8 else archive())
        source = data.source("webdataset", str(path), data_dir=str(place / "data"))
        batches = data.loader(source, batch_size=2, train=False, image_size=16, max_bad_share=1.0)
        try:
            return sum(int(batch["mask"].sum()) for batch in batches)
        finally:
            batches.close()
            path.unlink()

    return read


def images(place: Path, rng: random.Random):
    from swjax.data.decoding import decode

    def read() -> tuple:
        data = photograph(rng, rng.choice(("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")))
        try:
            return decode(damage(data, rng)).shape
        except Exception as error:  # Pillow's errors are documented; the loader logs them
            if isinstance(error, TimeoutError | MemoryError):
                raise
            raise ValueError(" ".join(str(error).split()) or type(error).__name__) from error

    return read


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
    """safetensors: header, lengths, offsets, dtypes, and the config next to it."""
    from flax import nnx

    from swjax import interop
    from swjax.models import clip

    tiny = {"width": 16, "layers": 1, "heads": 2}
    cfg = clip.config("tiny", vision=tiny | {"patch_size": 8, "image_size": 16},
                      text=tiny | {"vocab_size": 50, "context_length": 4}, embed_dim=8)  # fmt: skip
    interop.save(place, clip.CLIP(cfg, rngs=nnx.Rngs(0)))
    files = {path: path.read_bytes() for path in place.iterdir()}

    def read():
        for path, data in files.items():
            path.write_bytes(data)
        path = rng.choice(list(files))
        data, size = files[path], 8 + int.from_bytes(files[path][:8], "little")
        if path.suffix == ".safetensors" and rng.random() < 0.7:  # the header is a small part
            header = damage(data[8:size], rng)
            data = len(header).to_bytes(8, "little") + header + data[size:]
        else:
            data = damage(data, rng)
        path.write_bytes(data)
        return interop.load(place).cfg.embed_dim

    return read


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
    from swjax.training import config
    from swjax.training.log import metric_log, results

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
        (place / name).write_bytes(damage(files[name].encode(), rng))
        with contextlib.redirect_stdout(io.StringIO()):
            metric_log.truncate(place / "metrics.jsonl", 20, metric_log.parse_line)
            results.is_finished(good, place)
            results.tell_results(place)
        return name

    return read
