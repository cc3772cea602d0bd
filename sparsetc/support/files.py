"""Private files and folders, and functions compiled by numba, which are kept in such files.

Private is what nobody but the user may write to. In: paths and bytes. Out: folders of mode 0700 and files of mode 0600,
and the bytes of such files, up to a bound; the cache folder, of generated source and profiles, which is of that kind.

What is private is never reached through a link, and neither a file nor a folder is trusted that belongs to another user
or that others may write to. Every refusal is an `OSError` that says why, as a failure of the disk is. Where the system
has no owners and modes (Windows), what they would say is taken as granted.

In: a function of Python over numpy arrays. Out: the same of tensors, as machine code; None where it is not worth that.
What the compiler made is kept in the cache folder by the digest of all that it was made from. What cannot be read is
compiled anew; what cannot be written is compiled again by the next process. Compiled functions hold no lock of Python.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import pickle
import re
import secrets
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from sparsetc.support import installed
from sparsetc.support.entry import traced_by_modes, warn

PREFIX, SUFFIX = ".sparsetc-", ".tmp"
"""Prefix and suffix of the names of unfinished files, with hexadecimal digits in between."""
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
ROOT = 0
"""The user who may place links anywhere already."""
_POSIX = os.name == "posix"
_PLAIN = getattr(os, "O_NOFOLLOW", 0)
_AT_ONCE = getattr(os, "O_NONBLOCK", 0)
"""Opens a FIFO without waiting for its writer."""


# -- the folder of the cache -------------------------------------------------------------------------------------------


def default_directory() -> Path | None:
    """``$SPARSETC_CACHE_DIR``, else ``sparsetc`` in ``$XDG_CACHE_HOME`` or ``~/.cache``; None without a home."""
    return _path(chosen) if (chosen := os.environ.get("SPARSETC_CACHE_DIR")) else _standard()


def cache_folder(directory: Path | None) -> Path | None:
    """Return the absolute path of the given or the default folder; None if a home directory is needed and missing."""
    directory = directory or default_directory()
    with suppress(RuntimeError):  # ~ of nobody
        return directory.expanduser().absolute() if directory else None
    return None


def _standard() -> Path | None:
    """The place that the XDG base directory specification gives; a relative ``$XDG_CACHE_HOME`` is invalid there."""
    base = os.environ.get("XDG_CACHE_HOME")
    if base and os.path.isabs(base):
        return _path(os.path.join(base, "sparsetc"))
    home = os.path.expanduser("~")  # the same if there is neither HOME nor an entry in passwd
    return None if home == "~" else _path(os.path.join(home, ".cache", "sparsetc"))


_path = lru_cache(Path)  # to parse a path takes longer than to look for the folder's name


# -- what is private ---------------------------------------------------------------------------------------------------


def claim(folder: Path, *, tighten: bool | None = None) -> None:
    """Make the folder and its parents if they are missing. Raise `OSError` unless only the user can write to it.

    Args:
        folder: an absolute path. A link to a folder is followed if the link, too, is the user's or root's.
        tighten: where others may write to a folder of the user's, take that right from them, in place of refusing the
            folder. By default this is done to the standard folder, which is the package's alone. A folder that was
            named may hold more than a cache, and is left as it is.
    """
    tighten = folder == _standard() if tighten is None else tighten
    absent = list(takewhile(lambda f: not f.exists(), (folder, *folder.parents)))
    for missing in reversed(absent):
        with suppress(FileExistsError):  # another process was first
            missing.mkdir(mode=0o700)
    if tighten and _POSIX:
        status = os.lstat(folder)
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and status.st_mode & OTHERS_WRITE:
            folder.chmod(0o700)
    check(folder)


def check(folder: Path) -> None:
    """Raise `OSError` unless the folder is there and the user's alone to write to."""
    if not folder.is_dir():
        raise (NotADirectoryError if os.path.lexists(folder) else FileNotFoundError)(f"{folder} is not a folder")
    link = os.lstat(folder)
    if _POSIX and stat.S_ISLNK(link.st_mode) and link.st_uid not in (os.geteuid(), ROOT):
        raise PermissionError(f"{folder} is a link that belongs to another user, number {link.st_uid}")
    _check_owner(folder, os.stat(folder))


def write_private(path: Path, data: bytes) -> None:
    """Replace the file, or a link in its place, by one with these bytes and mode 0600, whatever the umask."""
    with renamed(path, 0o600) as file:
        os.chmod(file.name, 0o600)
        file.write(data)


@contextmanager
def renamed(path: Path, mode: int) -> Iterator[BinaryIO]:
    """Write a temporary file that replaces ``path`` at the end of the block, a link itself too, or is removed on error.

    It is created with ``mode``, less the umask.
    """
    temporary = path.with_name(f"{PREFIX}{secrets.token_hex(8)}{SUFFIX}")
    try:
        with open(temporary, "x+b", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_private(path: Path, limit: int) -> bytes:
    """The bytes of a file; `OSError` for a link, a file of others, one that is not regular or is over the limit."""
    with open_private(path, "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(f"{path} has more than {limit:,} bytes")
    return data


def open_private(path: Path, mode: str, flags: int = 0) -> BinaryIO:
    """Open a file, with mode 0600 if ``flags`` make it; `OSError` for a link, a file of others or one not regular."""
    file = open_regular(path, mode, flags | _PLAIN)
    try:
        _check_owner(path, os.fstat(file.fileno()))
    except OSError:
        file.close()
        raise
    return file


def open_regular(path: Path, mode: str = "rb", flags: int = 0) -> BinaryIO:
    """Open a file on disk. Raise `OSError` for anything else, such as a FIFO, without waiting for its other end."""
    file = open(path, mode, opener=lambda name, usual: os.open(name, usual | flags | _AT_ONCE, 0o600))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(f"{path} is not a regular file")
    return cast(BinaryIO, file)


def claim_record(path: Path) -> None:
    """`claim` the cache folder and the folder in it that a record is in: a profile, or times of plans."""
    claim(path.parent.parent)
    claim(path.parent, tighten=True)


def read_record(path: Path, limit: int) -> bytes:
    """`read_private`, of a record whose folders are the user's alone too."""
    data = read_private(path, limit)
    check(path.parent.parent)
    check(path.parent)
    return data


def _check_owner(path: Path, status: os.stat_result) -> None:
    if not _POSIX:
        return
    if status.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to another user, number {status.st_uid}")
    if status.st_mode & OTHERS_WRITE:
        raise PermissionError(f"{path} has mode {stat.S_IMODE(status.st_mode):04o}, so others may write to it")


# -- eviction from a cache folder -------------------------------------------------------------------------------------

MAX_FILES = 4096
"""Files kept in a folder."""
WRITES_AN_EVICTION = 256
"""New files, on average, between two looks for files to remove: a look takes a call for each file."""
STALE_SECONDS = 3600
"""Age from which a temporary file is taken to be left over from a killed writer."""
DIGITS = 20
"""Hexadecimal digits of the digest in a file name."""
COMPILED = ".native"
"""The end of the name of a file of machine code."""
SOURCE = re.compile(rf"\w+_[0-9a-f]{{{DIGITS}}}\.(?:py|{COMPILED[1:]})")
"""Names of files that are removed; a folder that was named may hold a user's own."""
UNFINISHED = re.compile(rf"{re.escape(PREFIX)}[0-9a-f]+{re.escape(SUFFIX)}")
"""Names of files that are being written."""


def evict_sometimes(path: Path) -> None:
    """`evict` after one written file in `WRITES_AN_EVICTION`: its digest is as good as a random number."""
    if int(path.stem[-DIGITS:], 16) % WRITES_AN_EVICTION == 0:
        evict(path.parent)


def evict(folder: Path) -> None:
    """Remove the least recently used files above the bound, and what killed writers left; others may be at it too."""
    sources, unfinished = _files(folder, SOURCE), _files(folder, UNFINISHED)
    stale = time.time() - STALE_SECONDS
    oldest = sources[: max(0, len(sources) - MAX_FILES)]
    for _, path in [*oldest, *(file for file in unfinished if file[0] < stale)]:
        with suppress(OSError):
            os.unlink(path)


def _files(folder: Path, names: re.Pattern[str]) -> list[tuple[float, str]]:
    """Return (time of last use, path) of the files with such names, oldest first."""
    files_by_age = []
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if names.fullmatch(entry.name):
                with suppress(OSError):
                    files_by_age.append((entry.stat(follow_symlinks=False).st_mtime, entry.path))
    return sorted(files_by_age)


# -- compiled functions ------------------------------------------------------------------------------------------------

MOST_BYTES = 1 << 26
"""Most bytes of a compiled function's file; one takes 20 to 100 kB."""
ENOUGH, MANY = 1 << 12, 1 << 16
"""Least elements of a loop for running it natively, and for importing numba for it, which takes .3 s."""


@lru_cache
def usable() -> bool:
    """Return True if numba can be imported; where it is installed and cannot, as for a later numpy, say so once."""
    try:
        import_module("numba")
    except Exception as error:  # whatever a library raises that is not made for another
        why = str(error)[:200]
        warn(f"numba is installed and cannot be imported ({why}); torch's operations run in place of native loops")
        return False
    return True


def native(function: Callable[..., Any], device: torch.device, elements: int) -> Callable[..., Any] | None:
    """Return a function as machine code, which is made at its first call with arguments of some types.

    It is None on a GPU, without numba, where ``SPARSETC_BACKEND`` names other programs, while a graph is traced or a
    transform is active, and where there are too few elements to make up for a compiler.

    Args:
        function: of arrays, numbers and nothing else; it calls no function of the package.
        device: of the tensors.
        elements: that it goes over.

    Returns:
        A function of tensors on the CPU, in place of arrays, and numbers.
    """
    if device.type != "cpu" or os.environ.get("SPARSETC_BACKEND", "auto") not in ("auto", "numba"):
        return None
    seen = torch.compiler.is_compiling() or traced_by_modes() or torch._C._are_functorch_transforms_active()
    if seen:  # by what knows torch's operations alone
        return None
    enough = ENOUGH if "numba" in sys.modules else MANY
    return _native(function) if elements >= enough and installed("numba") and usable() else None


@lru_cache
def _native(function: Callable[..., Any]) -> Callable[..., Any]:
    from numba import njit

    compiled: Any = njit(nogil=True, error_model="numpy")(function)
    text = inspect.getsource(sys.modules[function.__module__])
    compiled._cache = Kept(function.__name__, text, cache_folder(None))

    def call(*arguments: Any) -> Any:
        return compiled(*[a.detach().numpy() if isinstance(a, Tensor) else a for a in arguments])

    return call


class Kept:
    """The compiled forms of one function on disk, one for each signature: a cache for numba's dispatcher."""

    def __init__(self, name: str, text: str, folder: Path | None) -> None:
        """Set the text to compile, which with the name determines the result up to compiler and types."""
        self.name = name
        self.text = text
        self.folder = folder
        self.cache_path = str(folder)

    def path(self, signature: Any, target: Any) -> Path:
        """Return the file of a form: named by the text, the compiler, the processor and the types."""
        import llvmlite
        import numba

        assert self.folder is not None
        versions = sys.version, numba.__version__, llvmlite.__version__, target.codegen().magic_tuple()
        made_from = repr((self.text, self.name, versions, str(signature)))
        digest = hashlib.sha256(made_from.encode()).hexdigest()[:DIGITS]
        return self.folder / f"{self.name}_{digest}{COMPILED}"

    def load_overload(self, signature: Any, target: Any) -> Any:
        """Return the compiled form for the types of a signature; None where no file of the user's own has it."""
        if self.folder is None:
            return None
        from numba.core.compiler import CompileResult
        from numba.core.runtime import rtsys

        rtsys.initialize(target)  # what is loaded calls it; all that a compiler needs beside takes .3 s to import
        try:
            check(self.folder)
            data = read_private(self.path(signature, target), MOST_BYTES)
            return CompileResult._rebuild(target, *pickle.loads(data))
        except Exception:  # absent, of others, or damaged in whatever way: it is compiled
            return None

    def save_overload(self, signature: Any, compiled: Any) -> None:
        """Keep a compiled form, where the folder can be written to."""
        if self.folder is None:
            return
        from numba.core import serialize

        with suppress(OSError):
            path = self.path(signature, compiled.target_context)
            claim(self.folder)
            write_private(path, serialize.dumps(compiled._reduce()))
            evict_sometimes(path)
