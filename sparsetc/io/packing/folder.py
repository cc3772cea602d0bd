"""The folder beside the target in which sorted runs wait to be merged, and what it says of them.

In: the path of a packed file to be. Out: a `Folder` that no other process uses, with the runs of an interrupted call
where they are of the same source. Runs are believed when their bytes agree with their checksums, and a header's
checksum with the manifest; the folder is the user's alone.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparsetc.errors import SparsetcError
from sparsetc.io.stc import PackedFile
from sparsetc.support import files

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

MANIFEST = "manifest.json"
LARGEST = 1 << 26
"""Bytes of a manifest that is read; a run takes about 150."""


@dataclass(frozen=True)
class RunsPlace:
    """How far a source was read: a number of its blocks, and what was counted in them."""

    blocks: int = 0
    rows: int = 0
    line: int = 1
    numbers: int = 0


@dataclass(frozen=True)
class SortedRun:
    """A file of sorted nonzeros, duplicates included, those before ``place`` and after that of the run before.

    Attributes:
        crc: checksum of its header, on which every byte depends.
    """

    name: str
    rows: int
    crc: int
    place: RunsPlace


class Folder:
    """Runs of one target, in the order of the source.

    Attributes:
        done: whether the runs are all of the source.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs: list[SortedRun] = []
        self.done = False
        self._about: dict[str, Any] = {}
        self._kept = self._manifest()
        self._names = 0

    @classmethod
    @contextmanager
    def claimed(cls, target: str | os.PathLike[str], fresh: bool) -> Iterator[Folder]:
        """The folder of a target, made where there is none, and removed again where nothing is in it.

        Raises:
            OSError: it cannot be made, is not the user's alone, or another process uses it.
        """
        real = Path(os.path.realpath(target))
        path = real.with_name(f".sparsetc-pack-{hashlib.sha256(os.fsencode(real.name)).hexdigest()[:12]}")
        with _locked(path, target):
            if fresh:
                _remove_files(path)
            folder = cls(path)
            try:
                yield folder
            finally:
                if not folder.runs and not folder._kept:
                    folder.remove()

    @property
    def rows(self) -> int:
        """Nonzeros in all runs."""
        return sum(run.rows for run in self.runs)

    @property
    def place(self) -> RunsPlace:
        """How far the source was read."""
        return self.runs[-1].place if self.runs else RunsPlace()

    @property
    def limit(self) -> int | None:
        """The limit of memory of the call that was interrupted, if there was one."""
        found = self._kept.get("limit")
        return found if isinstance(found, int) else None

    def resume(self, about: dict[str, Any], limit: int) -> None:
        """Take over the runs that were kept, if they are of this source and made in no more memory; else start anew."""
        kept, self._kept = self._kept, {}
        with suppress(KeyError, TypeError, ValueError):  # a manifest that is not as written is of no use
            if kept["about"] == about and kept["limit"] <= limit:
                found = [SortedRun(**{**run, "place": RunsPlace(**run["place"])}) for run in kept["runs"]]
                self.runs = list(_sound(self.path, found))
                self.done = kept["done"] is True and len(self.runs) == len(found)
        self._about = {"about": about, "limit": limit}
        names = {run.name for run in self.runs}
        _remove_files(self.path, {*names, MANIFEST})
        self._names = 1 + max((int(name[4:-4]) for name in names), default=-1)
        self.save()

    def new(self) -> Path:
        """A name for another run."""
        self._names += 1
        return self.path / f"run-{self._names - 1}.stc"

    def replace(self, first: int, last: int, run: SortedRun) -> None:
        """Have one run in place of those from number ``first`` to below ``last``, whose files are removed."""
        gone = self.runs[first:last]
        self.runs[first:last] = [run]
        self.save()
        for other in gone:
            (self.path / other.name).unlink()

    def save(self) -> None:
        """Write down which runs there are."""
        found = {**self._about, "done": self.done, "runs": [asdict(run) for run in self.runs]}
        files.write_private(self.path / MANIFEST, json.dumps(found).encode())

    def remove(self) -> None:
        """Remove the folder and what is in it."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _manifest(self) -> dict[str, Any]:
        try:
            found = json.loads(files.read_private(self.path / MANIFEST, LARGEST))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


def _make(path: Path, parent: Path) -> None:
    try:
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
    except OSError as error:
        raise OSError(error.errno, f"cannot write to the folder: {error.strerror}", str(parent)) from None
    if path.is_symlink():
        raise OSError(errno.ELOOP, "is a link, where a folder of sorted runs is to be", str(path))
    files.check(path)


@contextmanager
def _locked(path: Path, target: str | os.PathLike[str]) -> Iterator[None]:
    """Make the folder where there is none, and hold a lock on it; a file system that has no locks goes without."""
    descriptor = _opened(path, target)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _opened(path: Path, target: str | os.PathLike[str]) -> int | None:
    """The folder with a lock on it; None on a system that has none."""
    while True:
        _make(path, Path(target).parent)
        if not fcntl:
            return None
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise OSError(errno.EBUSY, "another process packs into this file", os.fspath(target)) from None
        except OSError:
            return descriptor
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        os.close(descriptor)  # of a folder that whoever had the lock has removed in the meantime


def _sound(folder: Path, runs: list[SortedRun]) -> Iterator[SortedRun]:
    """Runs up to the first whose file is not what was written."""
    for run in runs:
        if not run.name.startswith("run-") or not run.name.endswith(".stc") or not run.name[4:-4].isdecimal():
            return
        try:
            with PackedFile(folder / run.name) as file:
                if (file.crc, file.nnz) != (run.crc, run.rows):
                    return
                file.verify()
        except (OSError, SparsetcError):
            return
        yield run


def _remove_files(folder: Path, but: set[str] | None = None) -> None:
    for entry in os.scandir(folder):
        if entry.is_file(follow_symlinks=False) and entry.name not in (but or ()):
            os.unlink(entry.path)
