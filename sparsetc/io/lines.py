"""Lines of a text file, plain or gzip, from disk or from a pipe: one reader under every text format.

In: a path, and the character that starts a comment. Out: the lines of the file's head one at a time, as fields, then
the rest in blocks of whole lines. A line ends in ``\\n``, ``\\r\\n`` or ``\\r``, the last one may end with the file. No
more is unpacked than is looked at next, and `bounds` holds for what is passed over.
"""

from __future__ import annotations

import gzip
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from sparsetc.errors import IOFormatError
from sparsetc.io import bounds, digits
from sparsetc.support import notices

# Large enough that the cost of a numpy call vanishes, small enough that a block and its columns stay in cache:
# 512 KB to 2 MB were equally fast, 128 KB half as fast, 4 MB a tenth slower (benchmarks/io_speed.py).
BLOCK = 512 * 1024
_GZIP_ERRORS = (EOFError, gzip.BadGzipFile, zlib.error)
WASTE = (
    f"too few numbers in too much text: beyond {bounds.SLACK:,} bytes, {bounds.PER_NUMBER} may be spent on a number, "
    "blanks and comments included"
)


@dataclass(frozen=True)
class TextBlock:
    """Whole lines, each ending in ``\\n``, and where in the file they are.

    Attributes:
        line: number of the first line, from 1.
        read: bytes of text before the block.
        numbers: numbers before the block.
    """

    text: bytes
    line: int
    read: int
    numbers: int

    def part(self, start: int, end: int, line: int, numbers: int) -> TextBlock:
        """Bytes ``start`` to ``end``, which follow ``line`` lines and ``numbers`` numbers of this block."""
        return TextBlock(self.text[start:end], self.line + line, self.read + start, self.numbers + numbers)


class LineReader:
    """A text file, read once from its first line to its last.

    Attributes:
        line: number of the line that is read next.
        comments: comments and blank lines that `peek` has passed over, each run with the number of its first line.
        numbers: numbers read so far.
    """

    def __init__(self, path: Path, comment: bytes, chunks: Iterator[bytes]) -> None:
        """``chunks`` are whole lines; `opened` makes them."""
        self.path = path
        self.line = 1
        self.comments: list[tuple[int, bytes]] = []
        self.numbers = 0
        self._chunks = chunks
        self._text = b""
        self._at = 0
        self._read = 0
        self._comment = comment
        self._content = re.compile(rb"^[ \t\v\f]*[^ \t\v\f\n" + re.escape(comment) + rb"]", re.MULTILINE)

    def peek(self) -> list[bytes] | None:
        """The fields of the next line that has any, None at the end of the file; `take` moves past it."""
        while self._more():
            found = self._content.search(self._text, self._at)
            start = found.start() if found else len(self._text)
            if start > self._at:
                self.comments.append((self.line, self._text[self._at : start]))
                self._pass(start)
            if found:
                return digits.without(self._comment, self.shown()).split()
        return None

    def take(self) -> None:
        """Move past the line that `peek` has shown."""
        self.numbers += len(self.peek() or ())
        self._pass(self._line_end())

    def shown(self) -> bytes:
        """The next line as it stands in the file."""
        return self._text[self._at : self._line_end()] if self._more() else b""

    def blocks(self) -> Iterator[TextBlock]:
        """The rest of the file; who takes a block adds its lines and numbers to those of the reader."""
        while self._more():
            block = TextBlock(self._text[self._at :], self.line, self._read, self.numbers)
            self._read += len(block.text)
            self._at = len(self._text)
            yield block

    def skip(self, blocks: int, line: int, numbers: int) -> None:
        """Move past so many of `blocks`, to the line and the count of numbers that were found there before."""
        passed = self.blocks()
        for _ in range(blocks):
            next(passed, None)
        self.line, self.numbers = line, numbers

    def fault(self, reason: str, line: int | None = None, text: bytes = b"") -> IOFormatError:
        """The error that names the file, and the line and its text where they are given."""
        where = f"{self.path}, line {line}" if line else f"{self.path}"
        return IOFormatError(f"{where}: {reason}: {_abridged(text)}" if line else f"{where}: {reason}")

    def _line_end(self) -> int:
        return self._text.index(b"\n", self._at) + 1

    def _pass(self, end: int) -> None:
        self.line += self._text.count(b"\n", self._at, end)
        self._read += end - self._at
        self._at = end
        if self._read > bounds.SLACK + bounds.PER_NUMBER * self.numbers:
            raise self.fault(WASTE)

    def _more(self) -> bool:
        """Whether there is text from ``_at`` on, of lines that are not too long."""
        if self._at < len(self._text):
            return True
        text = next(self._chunks, b"")
        long = _overlong(text)
        if long is not None:
            if not long:
                raise self.fault(f"longer than {bounds.LINE:,} bytes", self.line, text[: bounds.LINE])
            self._chunks = iter((text[long:],))  # what comes before is read before the line is refused
            text = text[:long]
        self._text, self._at = text, 0
        return bool(text)


@contextmanager
def opened(path: str | os.PathLike[str], comment: bytes, show: bool | None = None) -> Iterator[LineReader]:
    """A reader of the file, decompressed if its name ends in ``.gz``. ``show`` is as in `notices.bar`."""
    path = Path(path)
    with open(path, "rb") as raw:
        status = os.fstat(raw.fileno())
        on_disk = stat.S_ISREG(status.st_mode)  # a pipe has neither a size nor a position
        with notices.bar(status.st_size, path.name, show if on_disk else False) as at:
            zipped = path.name.lower().endswith(".gz")
            text = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if zipped else raw
            yield LineReader(path, comment, _whole_lines(path, text, lambda: at(raw.tell()) if on_disk else None))


def _whole_lines(path: Path, file: BinaryIO, told: Callable[[], None]) -> Iterator[bytes]:
    """About BLOCK bytes at a time, cut at the ends of lines, which become ``\\n``.

    A line that is longer than the bound ends the text as soon as that is seen.
    """
    rest: list[bytes] = []
    held = 0
    carried = b""  # a carriage return, whose newline may come next
    while chunk := _chunk(path, file):
        chunk, carried = carried + chunk, b""
        if b"\r" in chunk:
            if chunk.endswith(b"\r"):
                chunk, carried = chunk[:-1], b"\r"
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        cut = chunk.rfind(b"\n") + 1
        if cut:
            yield b"".join((*rest, chunk[:cut]))
            rest, held = [], 0
        rest.append(chunk[cut:])
        held += len(chunk) - cut
        if held > bounds.LINE:
            yield b"".join(rest)
            return
        told()
    if held or carried:
        yield b"".join((*rest, b"\n"))


def _chunk(path: Path, file: BinaryIO) -> bytes:
    try:
        return file.read(BLOCK)
    except _GZIP_ERRORS as error:
        raise IOFormatError(f"{path}: truncated or damaged gzip file ({error})") from error


def _overlong(text: bytes) -> int | None:
    """Where the first line starts that is too long, or None; a few looks a block, since each skips many lines."""
    at = 0
    while at < len(text):
        newline = text.rfind(b"\n", at, at + bounds.LINE + 1)
        if newline < 0:
            return at
        at = newline + 1
    return None


def _abridged(line: bytes) -> str:
    text = line.strip().decode("utf-8", "replace")
    return repr(text if len(text) <= 80 else text[:77] + "...")
