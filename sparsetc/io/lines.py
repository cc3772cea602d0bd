"""Lines of a text file, plain or gzip, from disk or from a pipe: one reader under every text format.

In: a path, and the character that starts a comment. Out: the lines of the file's head one at a time, as fields, then
the rest in blocks of whole lines. A line ends in ``\\n``, ``\\r\\n`` or ``\\r``, the last one may end with the file. No
more is unpacked than is looked at next, and `bounds` holds for what is passed over.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from sparsetc.errors import IOFormatError
from sparsetc.io import bounds
from sparsetc.support import FilePath, required
from sparsetc.support.entry import bar

# Large enough that the cost of a numpy call vanishes, small enough that a block and its columns stay in cache:
# 512 KB to 2 MB were equally fast, 128 KB half as fast, 4 MB a tenth slower (benchmarks/io_speed.py).
BLOCK = 512 * 1024


def _zstd(raw: BinaryIO) -> Any:
    arrow = required("pyarrow", '.zst is read by pyarrow: pip install "sparsetc[files]"')
    return arrow.CompressedInputStream(arrow.PythonFile(raw, "r"), "zstd")


UNZIPPED: dict[str, Callable[[BinaryIO], Any]] = {
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
    ".zst": _zstd,
}
"""Files of what a compressed file holds, by its suffix."""


class LineReader:
    """A text file, read once from its first line to its last.

    Attributes:
        line: number of the line that is read next.
        numbers: numbers read so far; who takes a block of `blocks` adds its own, and its lines to `line`.
        head: the text that `peek` and `take` have passed, comments and blank lines included.
    """

    def __init__(self, path: Path, comment: bytes, file: BinaryIO, told: Callable[[], None]) -> None:
        self.path = path
        self.line = 1
        self.numbers = 0
        self.head = b""
        self._content = re.compile(rb"^[ \t\v\f]*[^ \t\v\f\n" + re.escape(comment) + rb"]", re.MULTILINE)
        self._comment = re.compile(re.escape(comment) + rb"[^\n]*")
        self._sign, self._chunks = comment, self._whole_lines(file, told)
        self._text, self._read = b"", 0  # what is read next, and bytes up to its end

    def peek(self) -> list[bytes] | None:
        """Return the fields of the next line that has any, None at the end of the file; `take` moves past it."""
        while self._more():
            match = self._content.search(self._text)
            self._pass(match.start() if match else len(self._text))
            if match:
                return self.shown().partition(self._sign)[0].split()
        return None

    def take(self) -> list[bytes]:
        """Move past the line that `peek` shows, and return its fields; none at the end of the file."""
        fields = self.peek() or []
        self.numbers += len(fields)
        self._pass(len(self.shown()))
        return fields

    def shown(self) -> bytes:
        """Return the next line as it stands in the file."""
        return self._text[: self._text.index(b"\n") + 1] if self._more() else b""

    def blocks(self) -> Iterator[bytes]:
        """Yield the rest of the file, whole lines at a time, without what follows the sign of a comment."""
        while self._more():
            block, self._text = self._text, b""
            yield self._comment.sub(b"", block) if self._sign in block else block

    def fault(self, reason: str, line: int | None = None, text: bytes = b"") -> IOFormatError:
        """Return the error that names the file, and the line and its text where they are given."""
        if line is None:
            return IOFormatError(f"{self.path}: {reason}")
        shown = text[:200].strip().decode("utf-8", "replace")
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        return IOFormatError(f"{self.path}, line {line}: {reason}: {shown!r}")

    def _pass(self, end: int) -> None:
        passed, self._text = self._text[:end], self._text[end:]
        self.line += passed.count(b"\n")
        self.head += passed

    def _more(self) -> bool:
        """True if there is more text."""
        if not self._text:
            if self._read > bounds.SLACK + bounds.PER_NUMBER * self.numbers:
                rule = f"beyond {bounds.SLACK:,} bytes, {bounds.PER_NUMBER} may be spent on a number"
                raise self.fault(f"too few numbers in too much text: {rule}, blanks and comments included")
            self._text = next(self._chunks, b"")
            self._read += len(self._text)
        return bool(self._text)

    def _whole_lines(self, file: BinaryIO, told: Callable[[], None]) -> Iterator[bytes]:
        """Yield about BLOCK bytes at a time, cut at the ends of lines, which become ``\\n``."""
        rest = b""  # a line begun
        decoder, returns = io.IncrementalNewlineDecoder(None, translate=True), False
        while chunk := self._chunk(file):
            returns |= b"\r" in chunk
            if returns:
                chunk = decoder.decode(chunk.decode("latin-1")).encode("latin-1")
            text = rest + chunk
            good = self._short_lines(text)
            if cut := text.rfind(b"\n", 0, good) + 1:
                yield text[:cut]
            rest = text[cut:]
            if good < len(text):
                raise self.fault(f"longer than {bounds.LINE:,} bytes", self.line, rest)
            told()
        if rest:
            yield rest + b"\n"

    def _short_lines(self, text: bytes) -> int:
        """Return where the first line that is too long begins, wherever blocks of the file end; else the text's end."""
        start = 0
        while len(text) - start > bounds.LINE:
            end = text.rfind(b"\n", start, start + bounds.LINE + 1) + 1
            if not end:
                return start
            start = end
        return len(text)

    def _chunk(self, file: BinaryIO) -> bytes:
        try:
            return file.read(BLOCK)
        except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
            if getattr(error, "errno", None) is not None:  # of the disk
                raise
            raise self.fault(f"truncated or damaged {self.path.suffix[1:]} file ({error})") from error


@contextmanager
def opened(path: FilePath, comment: bytes, show: bool | None = None) -> Iterator[LineReader]:
    """Yield a reader of the file, decompressed as its suffix says. ``show`` is as in `entry.bar`."""
    path = Path(path)
    with open(path, "rb") as raw:
        status = os.fstat(raw.fileno())
        on_disk = stat.S_ISREG(status.st_mode)  # a pipe has neither a size nor a position
        with bar(status.st_size, path.name, show if on_disk else False) as at:
            unzipped = UNZIPPED.get(path.suffix.lower())
            text = raw if unzipped is None else cast(BinaryIO, unzipped(raw))
            yield LineReader(path, comment, text, lambda: at(raw.tell()) if on_disk else None)
