"""Arrays of a .npz file, whose size is known from their headers before any of them is unpacked.

In: a path. Out: headers by name, and arrays. Headers are matched, never evaluated, and pickles are not read. The zip
archive must agree with the headers, and claim no more than its bytes can hold.
"""

from __future__ import annotations

import math
import os
import re
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from sparsetc.errors import IOFormatError, OutOfMemoryError, SparsetcError
from sparsetc.support.entry import lacks_memory

_DAMAGE = (
    *(zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, ValueError, KeyError, TypeError),
    *(NotImplementedError, OverflowError),
)
"""What zipfile, zlib and numpy raise over a damaged file; zipfile also has plain RuntimeErrors."""
_HEADER_BYTES = 10_000  # numpy's own bound
_PASSED = 1 << 16  # bytes that are passed over at a time
_DEFLATED_TIMES = 1032  # bytes that a byte of deflate can stand for at most
_KEY = rb"\s*'(descr|fortran_order|shape)'\s*:\s*('[^'\\]{1,20}'|True|False|\([\d\s,]{0,2000}\))"
_HEADER = re.compile(rb"\{%b\s*,%b\s*,%b\s*(?:,\s*)?\}\s*" % (_KEY, _KEY, _KEY))
_DESCR = re.compile(r"'([<>|=]?[biufcSU][1-9]\d{0,3})'")


@dataclass(frozen=True)
class ArrayHeader:
    """What an array in the archive is.

    Attributes:
        order: ``C`` or ``F``, of the elements.
        start: bytes before the elements.
    """

    info: zipfile.ZipInfo
    dtype: np.dtype
    shape: tuple[int, ...]
    order: str
    start: int

    @property
    def count(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.count * self.dtype.itemsize


class Archive:
    """The arrays of an open .npz file."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self.path = path
        self._size = os.fstat(file.fileno()).st_size
        self._zip = zipfile.ZipFile(file)
        self._members = {info.filename.removesuffix(".npy"): info for info in self._zip.infolist()}
        self._headers: dict[str, ArrayHeader] = {}

    @property
    def names(self) -> list[str]:
        """Names of the arrays, in the order of the archive."""
        return list(self._members)

    @property
    def listed(self) -> str:
        """The names for a message: a file may have chosen characters that a terminal obeys."""
        return ", ".join(name if name.isprintable() else repr(name) for name in self._members)[:200]

    def header(self, name: str) -> ArrayHeader:
        """What the array is; ValueError if it is none."""
        if name not in self._headers:
            self._headers[name] = self._read_header(name, self._members[name])
        return self._headers[name]

    def array(self, name: str) -> np.ndarray:
        """The array, in the machine's byte order."""
        header = self.header(name)
        made = np.empty(header.count, header.dtype)
        with self._zip.open(header.info) as member:
            member.read(header.start)
            at = memoryview(made.data).cast("B") if header.nbytes else memoryview(b"")
            while len(at):
                got = member.readinto(at)  # type: ignore[attr-defined]
                if not got:
                    raise EOFError(f"{name} ends early")
                at = at[got:]
            if member.read(1):  # and at the end zipfile compares the checksum
                raise ValueError(f"{name} is longer than its header says")
        made = made.astype(made.dtype.newbyteorder("="), copy=False)
        return made.reshape(header.shape, order=header.order)  # type: ignore[call-overload,no-any-return]

    def stream(self, name: str, first: int) -> Callable[[int], np.ndarray]:
        """What gives the next so many elements of an array from number ``first`` on, as the file orders them.

        The array is unpacked from its beginning, no further than it is asked for; zipfile compares the checksum at its
        end. Elements are in the machine's byte order.
        """
        header, left = self.header(name), self.header(name).count - first
        member = self._zip.open(header.info)

        def read(nbytes: int) -> bytes:
            data = member.read(nbytes)
            if len(data) < nbytes:
                raise EOFError("an array ends early")
            return data

        def take(count: int) -> np.ndarray:
            nonlocal left
            data = read(count * header.dtype.itemsize)
            left -= count
            if not left and member.read(1):
                raise ValueError("an array is longer than its header says")
            elements = np.frombuffer(data, header.dtype)
            return elements.astype(elements.dtype.newbyteorder("="))

        before = header.start + first * header.dtype.itemsize
        for at in range(0, before, _PASSED):
            read(min(_PASSED, before - at))
        return take

    def _read_header(self, name: str, info: zipfile.ZipInfo) -> ArrayHeader:
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"{name} is compressed in another way than numpy does")
        most = info.compress_size * (1 if info.compress_type == zipfile.ZIP_STORED else _DEFLATED_TIMES)
        if info.compress_size > self._size or info.file_size > most:
            raise ValueError(f"{name} cannot have the {info.file_size:,} bytes that the archive claims")
        with self._zip.open(info) as member:
            header = _parsed(name, info, member)
        if header.start + header.nbytes != info.file_size:
            raise ValueError(
                f"{name} should have {header.nbytes:,} bytes by its header, the archive has "
                f"{info.file_size - header.start:,}"
            )
        return header


def _parsed(name: str, info: zipfile.ZipInfo, member: IO[bytes]) -> ArrayHeader:
    magic = member.read(8)
    if magic[:6] != b"\x93NUMPY":
        raise ValueError(f"{name} is no array")
    width = 2 if magic[6:7] == b"\x01" else 4
    length = int.from_bytes(member.read(width), "little")
    if length > _HEADER_BYTES:
        raise ValueError(f"the header of {name} is too long")
    text = member.read(length)
    if b"'|O'" in text or b"'O'" in text:
        raise ValueError(f"{name} holds Python objects, as a pickle, which is not read")
    found = _HEADER.fullmatch(text)
    entries = dict(zip(found.groups()[::2], found.groups()[1::2], strict=True)) if found else {}
    descr = _DESCR.fullmatch(entries.get(b"descr", b"").decode("latin-1"))
    order = {b"True": "F", b"False": "C"}.get(entries.get(b"fortran_order", b""))
    shape = re.fullmatch(rb"\((?:\s*\d{1,20}\s*,)*(?:\s*\d{1,20}\s*)?\)", entries.get(b"shape", b""))
    if not (descr and order and shape):
        raise ValueError(f"{name} has a header that is not of a plain array: {text[:60].decode('latin-1')!r}")
    sizes = tuple(map(int, re.findall(rb"\d+", shape[0])))
    return ArrayHeader(info, np.dtype(descr[1]), sizes, order, 8 + width + length)


@contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[Archive]:
    """The arrays of a .npz file; whatever is wrong with it, found in the block too, becomes an IOFormatError."""
    path = Path(path)
    if not stat.S_ISREG(os.stat(path).st_mode) and not path.is_dir():
        raise IOFormatError(f"{path}: an .npz file is read from its end, so it must be a file on disk, not a pipe")
    with open(path, "rb") as file:
        if file.read(6) == b"\x93NUMPY":
            raise IOFormatError(f"{path}: a single array, not coords, values and shape")
        try:
            yield Archive(path, file)
        except (IOFormatError, OutOfMemoryError):
            raise
        except SparsetcError as error:
            raise IOFormatError(f"{path}: {error}") from error
        except _DAMAGE as error:
            raise IOFormatError(f"{path}: not a readable .npz file ({str(error)[:200]})") from error
        except RuntimeError as error:
            if lacks_memory(error):
                raise
            raise IOFormatError(f"{path}: not a readable .npz file ({str(error)[:200]})") from error
