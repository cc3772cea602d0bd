"""Errors that name the file: of its path, of memory, refused before it is taken if that is known, of what is in it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from sparsetc.errors import IOFormatError, OutOfMemoryError, SparsetcError
from sparsetc.options import current
from sparsetc.support.entry import lacks_memory


def limit() -> int:
    """Return the bytes that the tensor of a file may take: ``options(memory_limit=)``, or what is available now."""
    return current().memory_on(torch.device("cpu"))


def text_of(path: str | os.PathLike[str]) -> str:
    """Return a path as text; `IOFormatError` for what names no file."""
    if not isinstance(path, str | bytes | os.PathLike):
        raise IOFormatError(f"a path of a file is a str or an os.PathLike, found {type(path).__name__}")
    text = os.fsdecode(path)
    if "\0" in text:
        raise IOFormatError(f"{text!r} names no file: it has a NUL")
    return text


def check(path: str | os.PathLike[str], what: str, nbytes: int, most: int | None = None) -> None:
    """Raise `OutOfMemoryError` when ``what`` would pass the limit: ``most`` bytes, or those of `limit`."""
    most = limit() if most is None else most
    if nbytes > most:
        raise OutOfMemoryError(
            f"{os.fspath(path)}: {what} would take {nbytes:,} bytes of memory, the limit is {most:,}; raise it with "
            "sparsetc.options(memory_limit=...)"
        )


@contextmanager
def named(path: str | os.PathLike[str], needed: Callable[[], str]) -> Iterator[None]:
    """`OutOfMemoryError` with the path, and with what ``needed`` says, for an allocation that fails in the block."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if os.fspath(path) in str(error) or not (lacks_memory(error) or isinstance(error, OutOfMemoryError)):
            raise
        raise OutOfMemoryError(f"{os.fspath(path)}: out of memory: {needed()}") from error


@contextmanager
def of_file(path: str | os.PathLike[str], kinds: type[Exception] = SparsetcError) -> Iterator[None]:
    """An error of ``kinds``, of a tensor that is made of what a file holds, is an IOFormatError of the file."""
    try:
        yield
    except (IOFormatError, OutOfMemoryError, ImportError):
        raise
    except kinds as error:
        if isinstance(error, (MemoryError, RuntimeError)) and lacks_memory(error):
            raise
        said = str(error).partition("\n")[0][:300]
        raise IOFormatError(f"{os.fspath(path)}: {said}") from error
