"""Files that are there whole or not at all.

In: a path. Out: a binary file to write to (and to read again), under a temporary name in the same folder, which takes
the path's place when all went well and is removed when anything did not.

A temporary is never open to more users than the file it becomes: a new file has the mode that the umask gives, and one
that replaces another has that one's mode, owner and group, or less where the owner or group cannot be had. While a
writer lives it holds a lock (``flock``) on its temporary. So what a killed writer left is told from what is being
written, on whatever host or in whatever container, and the next writer of the same target removes it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # Windows, where a file that is open cannot be removed: no lock is needed
    fcntl = None  # type: ignore[assignment]

STALE = 60.0
"""Seconds since its last write after which a temporary that nobody locks is removed: it takes a writer far less to lock
what it has created."""
_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
"""Opens no link, and a FIFO without waiting for its writer."""


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A new file that replaces ``path`` at the end of the block; after an exception the old one is untouched.

    Raises:
        OSError: naming ``path``, or its folder where that is missing or may not be written to.
    """
    target = Path(os.path.realpath(path))  # a link goes on pointing at what it did
    old = regular(path)
    prefix = f".sparsetc-{hashlib.sha256(os.fsencode(target.name)).hexdigest()[:12]}-"  # short, however long the name
    _remove_stale(target.parent, prefix)
    temporary = target.with_name(f"{prefix}{secrets.token_hex(6)}.tmp")
    created = _created(temporary, old, path)
    try:
        with created as file:
            if fcntl:  # held for as long as the file is open; a file system that has no locks goes without
                with suppress(OSError):
                    fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            _share(file.fileno(), old)
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.utime(temporary)  # so that it is not stale between here, where the lock ends, and its new name
        os.replace(temporary, target)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        # A full disk names no file, and a rename the temporary one.
        if isinstance(error, OSError) and error.errno is not None and error.filename in (None, str(temporary)):
            raise OSError(error.errno, error.strerror, os.fspath(path)) from error
        raise


def regular(path: str | os.PathLike[str]) -> os.stat_result | None:
    """What is to be replaced, None if nothing is; OSError if it is a folder, a pipe or a device."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file, so it cannot be replaced by one", os.fspath(path))
    return status


def _created(temporary: Path, old: os.stat_result | None, path: str | os.PathLike[str]) -> BinaryIO:
    # The kernel takes the umask off. What is replaced may be private, so its successor begins as that.
    mode = 0o666 if old is None else 0o600
    try:
        return open(temporary, "x+b", opener=lambda name, flags: os.open(name, flags, mode))
    except OSError as error:
        given = Path(path).parent
        folder = given if temporary.parent == Path(os.path.realpath(given)) else temporary.parent
        raise OSError(error.errno, f"cannot write to the folder: {error.strerror}", str(folder)) from None


def _share(descriptor: int, old: os.stat_result | None) -> None:
    """Owner, group and mode of what is replaced; bits of an owner or a group that cannot be set are left out."""
    if old is None or not hasattr(os, "fchown"):
        return
    mode, new = stat.S_IMODE(old.st_mode), os.fstat(descriptor)
    if new.st_gid != old.st_gid:
        try:
            os.fchown(descriptor, -1, old.st_gid)
        except OSError:
            mode &= ~(stat.S_IRWXG | stat.S_ISGID)
    if new.st_uid != old.st_uid:
        try:
            os.fchown(descriptor, old.st_uid, -1)
        except OSError:
            mode &= ~stat.S_ISUID
    with suppress(OSError):  # on a file system that has no modes
        os.fchmod(descriptor, mode)


def _remove_stale(folder: Path, prefix: str) -> None:
    """Remove what killed writers of the same target have left; what cannot be looked at is left alone."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(prefix) and entry.is_file(follow_symlinks=False):
                with suppress(OSError):
                    _remove_if_stale(entry.path)


def _remove_if_stale(path: str) -> None:
    if time.time() - os.lstat(path).st_mtime < STALE:
        return
    if not fcntl:
        os.unlink(path)
        return
    with open(os.open(path, os.O_RDWR | _NO_LINK), "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError while the writer lives
        os.unlink(path)
