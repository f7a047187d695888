"""`checkpoint.mirror`: copies a run to an fsspec address, so that another machine can continue it.

A run itself needs a local workdir, because it locks the folder, appends to its metrics and renames complete
files, which object stores cannot do. `mirror.json` at the address lists the complete checkpoints. It is
written after them, so nobody reads an incomplete copy. An address may belong to others: names that leave the
workdir are refused before anything is written, and links out of the workdir are not copied.
"""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from swjax.data import files
from swjax.safe_files import inside, is_inside, mask_credentials, parse_json, replacing
from swjax.training import distributed
from swjax.training.config import ConfigError, blame
from swjax.training.faults.errors import RunError
from swjax.training.state.checkpoint import saved_steps, set_aside

INDEX = "mirror.json"
_STAY = (".lock", "damaged", "mirror.part")  # never copied; "checkpoints" are copied one by one


class Mirror:
    """Copies a run to an address while it trains, and from there to an empty workdir. Only process 0 copies.

    Args:
      address: an fsspec address or a path; "" copies nothing.
      workdir: directory of the run.

    Raises:
      ConfigError: fsspec does not know the protocol, a package that the protocol needs is missing, or the
        address is the workdir or a folder in it.
      RunError: the file system of the address cannot be reached.
    """

    def __init__(self, address: str, workdir: Path):
        self._address, self._workdir = address.rstrip("/"), workdir
        self._key = f"config.checkpoint.mirror={mask_credentials(address)!r}"
        # Size and modification time of each copied file.
        self._sent: dict[str, tuple[int, int]] = {}
        self._seen: set[int] = set()  # steps with a checkpoint when the last copy began
        self._links: set[str] = set()  # names that lead out of the workdir
        self._said = 0  # number of them that were said
        self._copy: Future[None] | None = None
        if address:
            with self._blame():  # some protocols connect here
                with blame("checkpoint.mirror"):
                    files.check_protocol(address)
                import fsspec.implementations.local

                self._fs, self._root = fsspec.core.url_to_fs(self._address)
            local = isinstance(self._fs, fsspec.implementations.local.LocalFileSystem)
            self._is_local = local
            if local and Path(self._root).resolve().is_relative_to(workdir.resolve()):
                raise ConfigError(
                    f"{self._key} is in the workdir, which it copies: give another folder"
                )
            self._thread = ThreadPoolExecutor(1, "mirror")

    def __bool__(self) -> bool:
        """Whether there is an address."""
        return bool(self._address)

    def fetch(self, damaged: int | None = None) -> None:
        """Copies the run into the workdir, if the address has a newer checkpoint than the workdir.

        Args:
          damaged: step of the checkpoint that does not count, which its copy replaces.

        Raises:
          RunError: the address cannot be read or written.
        """
        if not self._address:
            return
        with self._blame():
            whole = self._whole()
            if whole is None:
                self._write([])  # fails before the run starts if the address is not writable
            newest = max(whole or [], default=-1)
            if newest <= max(saved_steps(self._workdir) - {damaged}, default=-1):
                return
            part = inside(self._workdir, "mirror.part")
            shutil.rmtree(part, ignore_errors=True)
            copies = []
            for name, path in self._held():
                if self._is_local:
                    inside(self._root, name)  # refuses a link out of the mirror
                target = inside(self._workdir, name)
                folder, _, rest = name.partition("/")
                if folder == "checkpoints" and rest.startswith(f"{newest}/"):
                    copies.append((path, inside(self._workdir, f"mirror.part/{rest}")))
                elif folder not in ("checkpoints", *_STAY):
                    copies.append((path, target))
            for path, target in copies:
                self._get(path, target)
            target = inside(self._workdir, f"checkpoints/{newest}")
            target.parent.mkdir(exist_ok=True)
            if target.exists():
                set_aside(target)
            # Renamed last, so that an incomplete fetch is repeated.
            (part / str(newest)).rename(target)
            part.rmdir()
        address = mask_credentials(self._address)
        print(f"copied the run from {address}, with the checkpoint of step {newest}", flush=True)

    def update(self, say: Callable[[str], None]) -> None:
        """Starts a copy in the background if there is a new checkpoint and no copy is running.

        Args:
          say: called with the reason if the last copy failed. The next copy includes the missing files.
        """
        if not self._address or not distributed.is_first():
            return
        if self._copy and not self._copy.done():
            return
        if self._copy and (failed := self._copy.exception()):
            say(f"{failed}; the next checkpoint triggers another attempt")
        self._copy = None
        self._say_links(say)
        steps = saved_steps(self._workdir)
        if steps != self._seen:
            self._seen = steps
            self._copy = self._thread.submit(self._push)

    def push(self) -> None:
        """Copies all changes, after waiting for a running copy.

        Raises:
          RunError: the address cannot be written.
        """
        if self._address:
            self._thread.submit(self._push).result()
            self._say_links(print)

    def _say_links(self, say: Callable[[str], None]) -> None:
        if len(self._links) > self._said:
            self._said = len(self._links)
            say(
                f"{self._said} links lead out of the workdir and are not copied to the mirror, such as "
                f"{min(self._links)!r}"
            )

    def _push(self) -> None:
        with self._blame():
            here, there = saved_steps(self._workdir), set(self._whole() or [])
            for path in sorted(self._workdir.rglob("*")):
                name = path.relative_to(self._workdir).as_posix()
                if name.partition("/")[0] not in (*_STAY, "checkpoints"):
                    self._put(path, name)
            for step in sorted(here - there):
                folder = self._workdir / "checkpoints" / str(step)
                paths = sorted(folder.rglob("*"))
                for path in paths:
                    self._put(path, path.relative_to(self._workdir).as_posix())
                # `checkpoint.keep` removed it during the copy.
                if sorted(folder.rglob("*")) != paths:
                    here.remove(step)
            self._write(sorted(here))
            for step in there - here:
                self._fs.rm(f"{self._root}/checkpoints/{step}", recursive=True)

    def _put(self, path: Path, name: str) -> None:
        """Copies a file unless the address has its current version."""
        target = f"{self._root}/{name}"
        if not is_inside(path, self._workdir):
            self._links.add(name)
            return
        try:
            status = path.stat()
            stamp = status.st_size, status.st_mtime_ns
            if path.is_dir() or self._sent.get(name) == stamp:
                return
            self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
            self._fs.put_file(str(path), target)
            self._sent[name] = stamp
        except FileNotFoundError:
            if path.exists():  # otherwise it was removed during the copy
                raise

    def _get(self, path: str, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        with self._fs.open(path, "rb") as source, replacing(target) as file:
            shutil.copyfileobj(source, file, 2**20)

    def _held(self) -> Iterator[tuple[str, str]]:
        """Yields (name, path in the file system) of the files at the address, without the index."""
        for path in self._fs.find(self._root):
            name = path.removeprefix(self._root).lstrip("/")
            if name != INDEX:
                yield name, path

    def _whole(self) -> list[int] | None:
        """The steps of the complete checkpoints at the address, or None if the address has no mirror yet."""
        try:
            index = parse_json(self._fs.cat_file(f"{self._root}/{INDEX}"))
        except FileNotFoundError:
            return None
        steps = index.get("checkpoints") if isinstance(index, dict) else None
        if not isinstance(steps, list) or not all(type(step) is int for step in steps):
            raise ValueError(f"its {INDEX} must list the steps of its checkpoints")
        return steps

    def _write(self, steps: list[int]) -> None:
        self._fs.makedirs(self._root, exist_ok=True)
        self._fs.pipe_file(f"{self._root}/{INDEX}", json.dumps({"checkpoints": steps}).encode())

    @contextlib.contextmanager
    def _blame(self) -> Iterator[None]:
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:  # third-party file systems may raise anything
            reason = mask_credentials(" ".join(f"{type(error).__name__}: {error}".split()))[:200]
            raise RunError(
                f"{self._key} cannot be used: {reason}; with that fixed, the same command continues"
            ) from error
