"""Feeds malformed files to everything that reads files, and watches for side effects.

Each input is a valid file or folder with seeded damage, hostile names, values and links, or random bytes.
Reading it must end within seconds, with a result or with a documented one-line error. It must write nothing
outside the folder, read no secret through a received run, unpickle nothing, start no program, and not leak
memory.
"""

import collections
import contextlib
import os
import random
import resource
import signal
import sys
import time
from pathlib import Path

from benchmarks.reliability import fuzz_data, fuzz_runs
from swjax.training.config import ConfigError
from swjax.training.faults.errors import RunError

TIMEOUT = 20  # seconds, for a busy machine
MOST_GROWTH = 100  # MiB of memory growth in the second half


def measure(folder: Path, inputs: int = 1000, seed: int = 0) -> dict:
    """Reads malformed inputs, equally many of each kind.

    Args:
      folder: for the files.
      inputs: number of inputs.
      seed: of the damage.
    """
    refusals = {
        fuzz_data.tars: (ValueError,),  # which the trainer turns into a ConfigError
        fuzz_data.images: (ValueError,),
        fuzz_runs.configs: (ConfigError,),
        fuzz_runs.weights: (ValueError, OSError),
        fuzz_runs.checkpoints: (ConfigError,),
        fuzz_runs.workdirs: (ConfigError,),
        fuzz_runs.reports: (ValueError, OSError),
        fuzz_runs.mirrors: (ConfigError, RunError),
        fuzz_data.layouts: (ValueError, OSError),
        fuzz_data.class_folders: (ValueError, OSError),
    }
    share = -(-inputs // len(refusals))
    results, faults, slowest = {}, [], 0.0
    memory = []
    for reader, allowed in refusals.items():
        kind = reader.__name__
        place = folder / kind / "place"
        place.mkdir(parents=True)
        secret = place.parent / "secret"
        secret.write_text("SECRET: 1\n")
        rng, counts = random.Random(f"{kind} {seed}"), collections.Counter()
        read = reader(place, rng)
        with watch(place, secret if reader in fuzz_runs.RECEIVED else None) as broken:
            for number in range(share):
                start = time.perf_counter()
                outcome = attempt(read, allowed)
                slowest = max(slowest, time.perf_counter() - start)
                counts[outcome.split(":")[0]] += 1
                if outcome.startswith("fault"):
                    faults.append(f"{kind} {number}: {outcome}")
                if number == share // 2:
                    memory.append(resident())
        if secret.read_text() != "SECRET: 1\n":
            broken.append("the file outside has changed")
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
_allowed, _secret = "", ""


def _hook(event: str, args: tuple) -> None:
    if _broken is None:
        return
    if event in ("pickle.find_class", "subprocess.Popen", "os.system", "marshal.loads"):
        if event != "marshal.loads" or "importlib" not in str(sys._getframe(1).f_code.co_filename):
            _broken.append(f"{event} {str(args)[:100]}")
    opens = event == "open" and isinstance(args[0], str | bytes | Path)
    if opens and _secret and os.path.realpath(os.fsdecode(args[0])) == _secret:
        _broken.append(f"read {os.fsdecode(args[0])}")
    mode = args[1] if event == "open" else ""
    writes = opens and (
        bool(set(mode) & set("wax+")) if isinstance(mode, str) else bool(args[2] & _WRITE)
    )
    if writes:
        changed = [os.path.realpath(os.fsdecode(args[0]))]  # opening follows a link
    else:
        changed = [_in_real_folder(os.fsdecode(args[i])) for i in _CHANGES.get(event, ())
                   if isinstance(args[i], str | bytes | Path) and args[-1] in (-1, None)]  # fmt: skip
    for path in changed:
        if event == "os.mkdir" and os.path.isdir(path):
            continue  # which `exist_ok` allows
        if not path.startswith((_allowed, "/dev/", "/proc/")) and "__pycache__" not in path:
            _broken.append(f"{event} {path}")


# {event: positions of the paths that it changes}; other arguments, or -1 and None, are open folders.
_CHANGES = {"os.mkdir": (0,), "os.remove": (0,), "shutil.rmtree": (0,), "os.truncate": (0,),
            "os.rename": (0, 1), "os.symlink": (1,), "os.link": (1,)}  # fmt: skip
_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def _in_real_folder(path: str) -> str:
    folder, name = os.path.split(os.path.abspath(path))
    return os.path.join(os.path.realpath(folder), name)


sys.addaudithook(_hook)


@contextlib.contextmanager
def watch(place: Path, secret: Path | None = None):
    """Yields a list to which unpickling, started programs and writes outside of a folder are added.

    Args:
      place: the folder.
      secret: a file whose reading is added too.
    """
    global _broken, _allowed, _secret
    _broken, _allowed = [], os.path.realpath(place)
    _secret = os.path.realpath(secret) if secret else ""
    try:
        yield _broken
    finally:
        _broken = None


def resident() -> float:
    """Returns the resident memory of this process in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20
