"""Files that are there whole or not at all, and files and folders that nobody but the user may write to.

In: paths and bytes. Out: a binary file to write to (and to read again), under a temporary name in the same folder,
which takes the path's place when all went well and is removed when anything did not (`replacing`); folders of mode 0700
and files of mode 0600, and the bytes of such files, up to a bound; the folder of generated source and measured
profiles, which is of that kind.

A temporary of `replacing` is never open to more users than the file it becomes: a new file has the mode that the umask
gives, and one that replaces another has that one's mode, owner and group, or less where the owner or group cannot be
had. While a writer lives it holds a lock (``flock``) on its temporary. So what a killed writer left is told from what
is being written, on whatever host or in whatever container, and the next writer of the same target removes it.

What is private is never reached through a link, and neither a file nor a folder is trusted that belongs to another user
or that others may write to. Every refusal is an `OSError` that says why, as a failure of the disk is. Where the system
has no owners and modes (Windows), what they would say is taken as granted.
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
from itertools import takewhile
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # Windows, where a file that is open cannot be removed: no lock is needed
    fcntl = None  # type: ignore[assignment]

STALE = 60.0
"""Seconds since its last write after which a temporary that nobody locks is removed: it takes a writer far less to lock
what it has created."""
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
ROOT = 0
"""The user who may place links anywhere already."""
_POSIX = os.name == "posix"
_PLAIN = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_AT_ONCE = getattr(os, "O_NONBLOCK", 0)
"""Opens a FIFO without waiting for its writer."""
TEMPORARY = ".tmp"
"""Suffix of files that are being written."""


# -- the folder of the cache -------------------------------------------------------------------------------------------


def default_directory() -> Path | None:
    """``$SPARSETC_CACHE_DIR``, else ``sparsetc`` in ``$XDG_CACHE_HOME`` or ``~/.cache``; None without a home."""
    chosen = os.environ.get("SPARSETC_CACHE_DIR")
    return Path(chosen) if chosen else _standard()


def cache_folder(directory: Path | None) -> Path | None:
    """The absolute path of a folder that was given, or of the default one; None where it needs a home and has none."""
    directory = directory or default_directory()
    try:
        return directory.expanduser().absolute() if directory else None
    except RuntimeError:  # ~ of nobody
        return None


def _standard() -> Path | None:
    """The place that the XDG base directory specification gives; a relative ``$XDG_CACHE_HOME`` is invalid there."""
    base = os.environ.get("XDG_CACHE_HOME")
    if base and os.path.isabs(base):
        return Path(base) / "sparsetc"
    try:
        return Path.home() / ".cache" / "sparsetc"
    except RuntimeError:  # neither HOME nor an entry in passwd
        return None


# -- what is private ---------------------------------------------------------------------------------------------------


def claim(folder: Path, *, tighten: bool | None = None) -> None:
    """Make the folder, and those above it, where they are absent; raise `OSError` unless it is the user's alone.

    Args:
        folder: an absolute path. A link to a folder is followed if the link, too, is the user's or root's.
        tighten: take the right to write from others in place of refusing a folder of the user's that they have it to.
            By default that of the standard folder, which is the package's. One that was named may hold more than a
            cache: it is left as it is.
    """
    tighten = folder == _standard() if tighten is None else tighten
    absent = list(takewhile(lambda f: not f.exists(), (folder, *folder.parents)))
    for missing in reversed(absent):
        with suppress(FileExistsError):  # another process was first
            missing.mkdir(mode=0o700)
    if tighten and _POSIX:
        found = os.lstat(folder)
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and found.st_mode & OTHERS_WRITE:
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
    """Replace the file by one of these bytes and of mode 0600, whatever the umask; a link in its place goes."""
    temporary = path.with_name(f".{secrets.token_hex(8)}{TEMPORARY}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _PLAIN, 0o600)
    try:
        with open(handle, "wb") as file:
            if _POSIX:
                os.fchmod(handle, 0o600)
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def read_private(path: Path, limit: int) -> bytes:
    """The bytes of a file; `OSError` for a link, a file of others, one that is not regular or is over the limit."""
    handle = os.open(path, os.O_RDONLY | _PLAIN | _AT_ONCE)
    with open(handle, "rb") as file:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{path} is not a regular file")
        _check_owner(path, found)
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(f"{path} has more than {limit:,} bytes")
    return data


def _check_owner(path: Path, found: os.stat_result) -> None:
    if not _POSIX:
        return
    if found.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to another user, number {found.st_uid}")
    if found.st_mode & OTHERS_WRITE:
        raise PermissionError(f"{path} has mode {stat.S_IMODE(found.st_mode):04o}, so others may write to it")


# -- what replaces a file ----------------------------------------------------------------------------------------------


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
    with open(os.open(path, os.O_RDWR | _PLAIN | _AT_ONCE), "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError while the writer lives
        os.unlink(path)
