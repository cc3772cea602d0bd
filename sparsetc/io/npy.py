"""Arrays of a .npz file by NumPy, after their headers were compared with the archive and with the memory limit.

In: a path. Out: headers by name, and arrays. No pickle is read, and no more is unpacked than the limit allows.
"""

from __future__ import annotations

import io
import os
import stat
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO

import numpy as np

from sparsetc.errors import IOFormatError
from sparsetc.io import memory
from sparsetc.support import FilePath

_HEADER = 1 << 14  # bytes that hold the longest header that numpy reads
_DEFLATED_TIMES = 1032  # bytes that a byte of deflate can stand for at most


class Archive:
    """The arrays of an open .npz file.

    Attributes:
        names: of the arrays, in the order of the archive.
    """

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self.path, self._size = path, os.fstat(file.fileno()).st_size
        self._zip = zipfile.ZipFile(file)
        self._members = {info.filename.removesuffix(".npy"): info for info in self._zip.infolist()}
        self.names = list(self._members)
        self.header = cache(self._header)

    def array(self, name: str) -> np.ndarray:
        """Return the array, in the machine's byte order."""
        self.header(name)
        with self._zip.open(self._members[name]) as member:
            array = np.lib.format.read_array(member, allow_pickle=False)
        return array if array.dtype.isnative else array.byteswap(inplace=True).view(array.dtype.newbyteorder("="))

    def _header(self, name: str) -> np.ndarray:
        """Return an array of the shape and dtype of one here, whose elements are one in memory.

        Raises:
            ValueError: it is no plain array, or its header contradicts the archive.
        """
        if name not in self._members:
            raise ValueError(f"no array {name} among {', '.join(self.names)[:200] or 'none'}")
        info = self._members[name]
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"{name} is compressed in another way than numpy does")
        if info.file_size > _DEFLATED_TIMES * self._size:
            raise ValueError(f"{name} cannot have the {info.file_size:,} bytes that the archive claims")
        with self._zip.open(info) as member:
            begin = io.BytesIO(member.read(_HEADER))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is Python's in a header
            try:
                major, _ = np.lib.format.read_magic(begin)
                reads = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
                shape, _, dtype = reads(begin)
                header = np.broadcast_to(np.empty((), dtype), shape)
            except Exception as error:  # whatever it is that the header makes Python's parser raise
                raise ValueError(f"{name} is no plain array: {error}") from None
        start = begin.tell()
        if dtype.hasobject:
            raise ValueError(f"{name} holds Python objects, as a pickle, which is not read")
        if dtype.kind not in "biufcSU" or not dtype.itemsize:
            raise ValueError(f"{name} is no plain array: {dtype} of shape {shape}")
        if start + header.nbytes != info.file_size:
            raise ValueError(
                f"{name} should have {header.nbytes:,} bytes by its header, the archive has {info.file_size - start:,}"
            )
        return header


@contextmanager
def opened(path: FilePath) -> Iterator[Archive]:
    """The arrays of a .npz file; whatever is wrong with it, found in the block too, becomes an IOFormatError."""
    with on_disk(path) as file, memory.of_file(path, Exception):
        if file.read(6) == b"\x93NUMPY":
            raise ValueError("a single array, not coords, values and shape")
        yield Archive(Path(path), file)


def on_disk(path: FilePath) -> IO[bytes]:
    """Open a file that is read from its end; raises IOFormatError for a pipe."""
    if not stat.S_ISREG(os.stat(path).st_mode) and not os.path.isdir(path):
        raise IOFormatError(f"{os.fspath(path)}: it is read from its end, so it must be a file on disk, not a pipe")
    return open(path, "rb")
