"""Writing a file so that it is there whole, or not at all.

In: a path. Out: a binary file to write to, under a temporary name in the same folder, which takes the path's place
when all went well and is removed when anything did not.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A new file that replaces ``path`` at the end of the block; after an exception the old one is untouched."""
    target = Path(os.path.realpath(path))  # a link goes on pointing at what it did
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(6)}.tmp")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with suppress(FileNotFoundError):
            temporary.unlink()
        raise
