"""Files that are there whole or not at all.

In: a path. Out: a binary file to write to (and to read again), under a temporary name in the same folder, which takes
the path's place when all went well and is removed when anything did not.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

PREFIX, SUFFIX = ".sparsetc-", ".tmp"
"""Of the names of files that are being written; between them are hexadecimal digits."""


@contextmanager
def replacing(path: str | os.PathLike[str], *, private: bool = False) -> Iterator[BinaryIO]:
    """A new file that replaces ``path`` at the end of the block; after an exception the old one is untouched.

    A new file has the mode that the umask gives, one that replaces another has that one's. A link goes on pointing at
    what it did.

    Args:
        path: of the file.
        private: whether the file is the user's alone, and can be made again: of mode 0600, in the place of a link too,
            and not waited for until it is on the disk.

    Raises:
        OSError: naming ``path``, also where its folder is missing or may not be written to.
    """
    target = Path(path if private else os.path.realpath(path))
    old = None if private else regular(path)
    mode = stat.S_IMODE(old.st_mode) if old else 0o600
    created = 0o600 if private or old else 0o666  # less the umask; what is replaced may be private
    temporary = target.with_name(f"{PREFIX}{secrets.token_hex(8)}{SUFFIX}")
    try:
        with open(temporary, "x+b", opener=lambda name, flags: os.open(name, flags, created)) as file:
            if private or old:
                os.chmod(temporary, mode)
            yield file
            file.flush()
            if not private:
                os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        # A full disk names no file, and a missing folder the temporary one.
        if isinstance(error, OSError) and error.errno is not None and error.filename in (None, str(temporary)):
            raise OSError(error.errno, error.strerror, os.fspath(path)) from error
        raise


def regular(path: str | os.PathLike[str]) -> os.stat_result | None:
    """Return what is to be replaced, None if nothing is; OSError if it is a folder, a pipe or a device."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file, so it cannot be replaced by one", os.fspath(path))
    return status
