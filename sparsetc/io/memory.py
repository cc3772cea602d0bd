"""Memory that reading a file takes: refused before it is taken where that is known, named where it is found out.

In: a path and a number of bytes. Out: `OutOfMemoryError` with both.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from sparsetc.errors import OutOfMemoryError
from sparsetc.options import current
from sparsetc.support.entry import lacks_memory


def limit() -> int:
    """Bytes that the tensor of a file may take: ``options(memory_limit=)``, or what is available now."""
    return current().memory_on(torch.device("cpu"))


def check(path: str | os.PathLike[str], what: str, nbytes: int) -> None:
    """Raise `OutOfMemoryError` when ``what`` would pass the limit."""
    most = limit()
    if nbytes > most:
        raise refused(path, what, nbytes, most)


def refused(path: str | os.PathLike[str], what: str, nbytes: int, most: int) -> OutOfMemoryError:
    """The error for what would pass the limit."""
    return OutOfMemoryError(
        f"{os.fspath(path)}: {what} would take {nbytes:,} bytes of memory, the limit is {most:,}; raise it with "
        "sparsetc.options(memory_limit=...)"
    )


@contextmanager
def named(path: str | os.PathLike[str], needed: Callable[[], str]) -> Iterator[None]:
    """`OutOfMemoryError` with the path, and with what ``needed`` says, for an allocation that fails in the block."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not lacks_memory(error):
            raise
        raise OutOfMemoryError(f"{os.fspath(path)}: out of memory: {needed()}") from error
