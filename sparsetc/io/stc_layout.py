"""Where everything in a packed file lies: its header, byte by byte, and the arrays that follow.

In: a shape, a number of nonzeros, a dtype. Out: offsets, and the 4,096 bytes of the header; or these read back. All
offsets follow from shape, nonzeros and dtype, so a header that says others is refused, as is a file of another size:
nothing is allocated by what a header claims. `docs/packed_files.md` describes the format.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

import numpy as np
import torch

from sparsetc.io import bounds
from sparsetc.support.lru import cached_property
from sparsetc.tensor.coords import INT64_SIZES

MAGIC = b"\x89STC\r\n\x1a\n"
"""First bytes of a file, like those of PNG: no text, and changed by whatever changes the ends of lines."""
VERSION = 1
PAGE = 4096
"""Bytes of the header, and of what every array's offset is a multiple of, so that arrays can be mapped."""
BLOCK = 1 << 16
"""Nonzeros that one checksum of an array covers."""
LEAST_BLOCK = 16
"""Nonzeros of a checksum, at least: each takes 0.1 ms to read and compare."""
COALESCED = 1
"""The flag of nonzeros that are in lexicographic order and unique."""

_FIXED = struct.Struct("<8sHHHBBQIIQ")
_ARRAY = struct.Struct("<QQQ")
_ARRAYS_AT = 64
_CHECK = struct.Struct("<I")

CODES = {
    1: (torch.float64, "<f8"),
    2: (torch.float32, "<f4"),
    3: (torch.float16, "<f2"),
    4: (torch.bfloat16, "<i2"),
    5: (torch.complex64, "<c8"),
    6: (torch.complex128, "<c16"),
    7: (torch.int8, "<i1"),
    8: (torch.int16, "<i2"),
    9: (torch.int32, "<i4"),
    10: (torch.int64, "<i8"),
}
"""The number of each dtype, and what numpy calls it; of bfloat16, which it lacks, the bits."""
_CODE = {dtype: code for code, (dtype, _) in CODES.items()}


def index_dtype(size: int) -> np.dtype:
    """The narrowest little-endian type that holds the coordinates of a mode."""
    return np.dtype(next((f"<u{width}" for width in (1, 2, 4) if size <= 1 << 8 * width), "<i8"))


@dataclass(frozen=True)
class Array:
    """One array: the coordinates of a mode, or the values; an element a nonzero."""

    name: str
    offset: int
    dtype: np.dtype
    nbytes: int

    @property
    def end(self) -> int:
        """The offset of the first byte after the array."""
        return self.offset + self.nbytes


@dataclass(frozen=True)
class FileLayout:
    """What a header says, and what follows from it."""

    shape: tuple[int, ...]
    nnz: int
    dtype: torch.dtype
    block: int = BLOCK
    coalesced: bool = True

    @cached_property
    def arrays(self) -> tuple[Array, ...]:
        """One array a mode, then the values."""
        kinds = [(f"mode {mode}", index_dtype(size)) for mode, size in enumerate(self.shape)]
        kinds.append(("values", np.dtype(CODES[_CODE[self.dtype]][1])))
        made, at = [], PAGE
        for name, kind in kinds:
            made.append(Array(name, at, kind, self.nnz * kind.itemsize))
            at = _aligned(made[-1].end)
        return tuple(made)

    @property
    def blocks(self) -> int:
        """Blocks of each array."""
        return -(-self.nnz // self.block)

    @property
    def checks(self) -> Array:
        """The table of checksums: (arrays, blocks)."""
        at = _aligned(self.arrays[-1].end)
        return Array("checksums", at, np.dtype("<u4"), 4 * self.blocks * len(self.arrays))

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.checks.end

    @property
    def row_bytes(self) -> int:
        """Bytes that a nonzero takes in a SparseTensor."""
        return 8 * len(self.shape) + self.dtype.itemsize

    def header(self, table: bytes) -> bytes:
        """The first 4,096 bytes of a file with this table of checksums."""
        fixed = _FIXED.pack(
            MAGIC,
            VERSION,
            COALESCED if self.coalesced else 0,
            len(self.shape),
            _CODE[self.dtype],
            0,
            self.nnz,
            self.block,
            zlib.crc32(table),
            self.checks.offset,
        )
        entries = [
            _ARRAY.pack(size, array.offset, array.dtype.itemsize)
            for size, array in zip((*self.shape, 0), self.arrays, strict=True)
        ]
        page = (fixed.ljust(_ARRAYS_AT, b"\0") + b"".join(entries)).ljust(PAGE - _CHECK.size, b"\0")
        return page + _CHECK.pack(zlib.crc32(page))


def parsed(page: bytes, size: int) -> tuple[FileLayout, int, int]:
    """What the first bytes of a file of ``size`` bytes say.

    Returns:
        The layout; the checksum of the table of checksums; that of the header itself.

    Raises:
        ValueError: they are no header, or of another file.
    """
    if page[: len(MAGIC)] != MAGIC:
        raise ValueError("header: not a packed file; it does not begin with the eight bytes of one")
    if len(page) < PAGE:
        raise ValueError(f"header: truncated, {len(page)} of {PAGE} bytes")
    (crc,) = _CHECK.unpack_from(page, PAGE - _CHECK.size)
    _, version, flags, order, code, _, nnz, block, table_crc, _ = _FIXED.unpack_from(page)
    if version != VERSION:
        raise ValueError(f"header: version {version} of the format; this is version {VERSION}")
    if zlib.crc32(page[: -_CHECK.size]) != crc:
        raise ValueError("header: damaged, its checksum is another")
    if not 1 <= order <= bounds.ORDER:
        raise ValueError(f"header: a tensor of {order} modes; a file holds 1 to {bounds.ORDER}")
    if code not in CODES or flags & ~COALESCED or not block:
        raise ValueError(f"header: dtype {code}, flags {flags}, blocks of {block}, which no file has")
    shape = tuple(_ARRAY.unpack_from(page, _ARRAYS_AT + _ARRAY.size * mode)[0] for mode in range(order))
    if any(n >= INT64_SIZES for n in shape) or (nnz and 0 in shape) or nnz >= INT64_SIZES:
        raise ValueError(f"header: {nnz} nonzeros in shape {shape}")
    if block < LEAST_BLOCK:
        raise ValueError(f"header: a checksum every {block} nonzeros; a file has one every {LEAST_BLOCK} or more")
    layout = FileLayout(shape, nnz, CODES[code][0], block, bool(flags & COALESCED))
    _check_size(layout, size)  # before anything is made of the numbers
    if layout.header(b"")[_ARRAYS_AT : -_CHECK.size] != page[_ARRAYS_AT : -_CHECK.size] or not _same_fixed(
        layout, page
    ):
        raise ValueError("header: offsets or widths that do not follow from its shape, nonzeros and dtype")
    return layout, table_crc, crc


def _same_fixed(layout: FileLayout, page: bytes) -> bool:
    """Whether the fixed fields are what `FileLayout.header` writes, but for the checksum of the table."""
    own, found = (_FIXED.unpack_from(data) for data in (layout.header(b""), page))
    blank = page[_FIXED.size : _ARRAYS_AT]
    return own[:8] == found[:8] and own[9] == found[9] and not any(blank)


def _check_size(layout: FileLayout, size: int) -> None:
    if size == layout.size:
        return
    if size > layout.size:
        raise ValueError(f"{size - layout.size:,} bytes follow the end; by its header the file has {layout.size:,}")
    cut = next(array for array in (*layout.arrays, layout.checks) if size < array.end or array.name == "checksums")
    block = max(size - cut.offset, 0) // max(cut.dtype.itemsize * layout.block, 1)
    where = f"{cut.name}, block {block}" if cut.name != "checksums" else cut.name
    raise ValueError(f"truncated in {where}: {size:,} bytes, by its header the file has {layout.size:,}")


def _aligned(offset: int) -> int:
    return -(-offset // PAGE) * PAGE
