"""Files that are there whole or not at all.

In: a path. Out: a binary file to write to (and to read again), under a temporary name in the same folder, which takes
the path's place when all went well and is removed when anything did not.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from sparsetc.support import FilePath
from sparsetc.support.files import PREFIX, renamed


@contextmanager
def replacing(path: FilePath) -> Iterator[BinaryIO]:
    """A new file that replaces ``path`` at the end of the block; after an exception the old one is untouched.

    A new file has the mode that the umask gives, one that replaces another has that one's. A link goes on pointing at
    what it did.

    Raises:
        OSError: naming ``path``, or its folder where that is missing or may not be written to.
    """
    target = Path(os.path.realpath(path))
    old = os.stat(path).st_mode if target.exists() else None
    if old is not None and not stat.S_ISREG(old):
        number = errno.EISDIR if stat.S_ISDIR(old) else errno.EINVAL
        raise OSError(number, "not a regular file, so it cannot be replaced by one", os.fspath(path))
    try:
        with renamed(target, 0o666 if old is None else 0o600) as file:  # what is replaced may be private
            if old is not None:
                os.chmod(file.name, stat.S_IMODE(old))
            yield file
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if error.errno is not None and error.filename is None:  # as of a full disk
            raise OSError(error.errno, error.strerror, os.fspath(path)) from error
        if error.errno is not None and os.path.basename(error.filename).startswith(PREFIX):
            folder = target.parent if os.path.islink(path) else Path(path).parent
            raise OSError(error.errno, f"cannot write to the folder: {error.strerror}", str(folder)) from error
        raise
