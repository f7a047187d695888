"""`checkpoint.mirror`: a copy of a run at an fsspec address, from which another machine continues it.

A run itself is local: it locks its folder, appends to its metrics and renames what is complete, which object
stores cannot do. `mirror.json` at the address lists the checkpoints that are whole there. It is written after
them, so a copy that is cut short is never read.
"""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from swjax.data import files
from swjax.training import distributed
from swjax.training.config import blame
from swjax.training.errors import RunError

INDEX = "mirror.json"
_STAY = (".lock", "damaged")  # in the workdir; "checkpoints" are copied one by one


class Mirror:
    """Copies a run to an address while it trains, and from there to an empty workdir; process 0 does.

    Args:
      address: an fsspec address or a path; "": nothing is copied.
      workdir: directory of the run.

    Raises:
      ConfigError: there is no such protocol, or a package that it needs is not installed.
    """

    def __init__(self, address: str, workdir: Path):
        self._address, self._workdir = address.rstrip("/"), workdir
        self._sent: dict[str, tuple[int, int]] = {}  # size and time of each file, as it was copied
        self._seen: set[int] = set()  # checkpoints when the last copy began
        self._copy: Future[None] | None = None
        if address:
            with blame("checkpoint.mirror"):
                files.check_protocol(address)
            import fsspec

            self._fs, self._root = fsspec.core.url_to_fs(self._address)
            self._thread = ThreadPoolExecutor(1, "mirror")

    def fetch(self) -> None:
        """Copies the run into the workdir, if its newest checkpoint at the address is newer than there.

        Raises:
          RunError: the address cannot be read or written.
        """
        if not self._address:
            return
        with self._blame():
            whole = self._whole()
            if whole is None:
                self._write([])  # an address that cannot be written is known before a run starts
            newest = max(whole or [], default=-1)
            if newest <= max(_steps(self._workdir), default=-1):
                return
            part = self._workdir / "mirror.part"
            shutil.rmtree(part, ignore_errors=True)
            for name, path in self._held():
                folder, _, rest = name.partition("/")
                if folder != "checkpoints":
                    self._get(path, self._workdir / name)
                elif rest.startswith(f"{newest}/"):
                    self._get(path, part / rest)
            target = self._workdir / "checkpoints" / str(newest)
            target.parent.mkdir(exist_ok=True)
            (part / str(newest)).rename(target)  # last: what is cut short is fetched again
            part.rmdir()
        print(
            f"the run comes from {self._address}, with the checkpoint of step {newest}", flush=True
        )

    def update(self, say: Callable[[str], None]) -> None:
        """Begins a copy in the background if there is a new checkpoint and no copy is under way.

        Args:
          say: prints why the last copy failed; the next one copies what is missing.
        """
        if not self._address or not distributed.is_first():
            return
        if self._copy and not self._copy.done():
            return
        if self._copy and (failed := self._copy.exception()):
            say(f"{failed}; it is tried again with the next checkpoint")
        self._copy = None
        steps = _steps(self._workdir)
        if steps != self._seen:
            self._seen = steps
            self._copy = self._thread.submit(self._push)

    def push(self) -> None:
        """Copies what has changed, after a copy that is under way.

        Raises:
          RunError: the address cannot be written.
        """
        if self._address:
            self._thread.submit(self._push).result()

    def _push(self) -> None:
        with self._blame():
            here, there = _steps(self._workdir), set(self._whole() or [])
            for path in sorted(self._workdir.rglob("*")):
                name = path.relative_to(self._workdir).as_posix()
                if name.partition("/")[0] not in (*_STAY, "checkpoints"):
                    self._put(path, name)
            for step in sorted(here - there):
                folder = self._workdir / "checkpoints" / str(step)
                paths = sorted(folder.rglob("*"))
                for path in paths:
                    self._put(path, path.relative_to(self._workdir).as_posix())
                if sorted(folder.rglob("*")) != paths:  # `checkpoint.keep` removes it meanwhile
                    here.remove(step)
            self._write(sorted(here))
            for step in there - here:
                self._fs.rm(f"{self._root}/checkpoints/{step}", recursive=True)

    def _put(self, path: Path, name: str) -> None:
        """Copies a file that has changed since it was copied."""
        target = f"{self._root}/{name}"
        try:
            status = path.stat()
            stamp = status.st_size, status.st_mtime_ns
            if path.is_dir() or self._sent.get(name) == stamp:
                return
            self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
            self._fs.put_file(str(path), target)
            self._sent[name] = stamp
        except FileNotFoundError:
            if path.exists():  # else it was removed meanwhile
                raise

    def _get(self, path: str, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        self._fs.get_file(path, str(target))

    def _held(self) -> Iterator[tuple[str, str]]:
        """(name, path in the file system) of the files at the address, without the index."""
        for path in self._fs.find(self._root):
            name = path.removeprefix(self._root).lstrip("/")
            if name != INDEX:
                yield name, path

    def _whole(self) -> list[int] | None:
        """The checkpoints at the address; None: there is no mirror yet."""
        try:
            return json.loads(self._fs.cat_file(f"{self._root}/{INDEX}"))["checkpoints"]
        except FileNotFoundError:
            return None

    def _write(self, steps: list[int]) -> None:
        self._fs.makedirs(self._root, exist_ok=True)
        self._fs.pipe_file(f"{self._root}/{INDEX}", json.dumps({"checkpoints": steps}).encode())

    @contextlib.contextmanager
    def _blame(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever the file systems of others raise
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise RunError(
                f"config.checkpoint.mirror={self._address!r} cannot be used: {reason}; with that "
                f"fixed, the same command continues"
            ) from error


def _steps(workdir: Path) -> set[int]:
    """The complete checkpoints of a run: those whose folder has its final name."""
    folder = workdir / "checkpoints"
    return {int(path.name) for path in folder.glob("[0-9]*") if path.name.isdigit()}
