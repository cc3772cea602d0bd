"""Packed files: what is written is read, by any range; one that was altered anywhere is refused, and says where."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import pytest
import torch
from cases import WIDE

import sparsetc as stc
from sparsetc.io import stc as packed
from sparsetc.io import stc_layout
from sparsetc.io.stc_layout import PAGE, FileLayout, index_dtype
from sparsetc.tensor.inputs import DTYPES


def tensor(shape: tuple[int, ...], nnz: int = 200, dtype: torch.dtype = torch.float32) -> stc.SparseTensor:
    """Random nonzeros, the first and last position of every mode among them."""
    g = torch.Generator().manual_seed(len(shape))
    coords = torch.stack([torch.randint(0, n, (nnz,), generator=g) for n in shape])
    coords[:, 0], coords[:, 1] = 0, torch.tensor(shape) - 1
    coords = torch.unique(coords, dim=1)
    values = torch.randn(coords.shape[1], generator=g, dtype=torch.float64) * 50
    return stc.SparseTensor(coords, values.to(dtype), shape)


def same(x: stc.SparseTensor, y: stc.SparseTensor) -> bool:
    return (
        (x.shape, x.dtype) == (y.shape, y.dtype) and torch.equal(x.coords, y.coords) and torch.equal(x.values, y.values)
    )


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 64 nonzeros in what is written."""
    monkeypatch.setattr(packed, "BLOCK", 64)
    monkeypatch.setattr(packed, "FileLayout", lambda *fields: FileLayout(*fields, block=64))


# ---- round trips ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape",
    [
        *((7,), (256, 257), (256, 2**16, 2**16 + 1), (2**32, 2**32 + 1, 3, 5)),
        *((2**62, 2**62, 2**62, 4, 1), (9, 8, 7, 6, 5, 4), *WIDE),
    ],
)
def test_shapes(tmp_path: Path, shape: tuple[int, ...], small: None) -> None:
    x = tensor(shape)
    stc.write(tmp_path / "x.stc", x)
    assert same(stc.read(tmp_path / "x.stc"), x)
    with stc.open_packed(tmp_path / "x.stc") as file:
        file.verify()
        assert (file.shape, file.order, file.nnz, file.dtype) == (x.shape, x.order, x.nnz, x.dtype)
        assert [array.offset % PAGE for array in file.layout.arrays] == [0] * (x.order + 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    x = tensor((300, 40), dtype=dtype)
    stc.write(tmp_path / "x.stc", x)
    assert same(stc.read(tmp_path / "x.stc"), x)


def test_index_widths() -> None:
    sizes = (0, 1, 256, 257, 2**16, 2**16 + 1, 2**32, 2**32 + 1, 2**63 - 1)
    assert [index_dtype(size).itemsize for size in sizes] == [1, 1, 1, 2, 2, 4, 4, 8, 8]


@pytest.mark.parametrize("nnz", [0, 1])
def test_few_nonzeros(tmp_path: Path, nnz: int) -> None:
    x = stc.SparseTensor(torch.ones((2, nnz), dtype=torch.int64), torch.full((nnz,), -0.0), (3, 2))
    stc.write(tmp_path / "x.stc", x)
    assert same(stc.read(tmp_path / "x.stc"), x)
    file = stc.open_packed(tmp_path / "x.stc")
    file.verify()
    assert file.block(0, nnz)[0].shape == (2, nnz)
    assert file.rows(0, 3)[1].shape == (nnz,)
    assert file.rows(2, 3)[1].shape == (0,)


def test_a_size_of_zero_and_what_is_not_sorted(tmp_path: Path) -> None:
    stc.write(tmp_path / "x.stc", stc.SparseTensor(torch.zeros((2, 0), dtype=torch.int64), torch.zeros(0), (0, 4)))
    assert stc.read(tmp_path / "x.stc").shape == (0, 4)
    stc.write(tmp_path / "x.stc", stc.SparseTensor([[2, 0, 2]], [1.0, 2.0, 4.0], (3,), coalesce=False))
    assert stc.read(tmp_path / "x.stc").values.tolist() == [2.0, 5.0]
    semi = stc.SparseTensor([[2, 0]], torch.arange(6.0).reshape(2, 3), (3, 3))
    stc.write(tmp_path / "x.stc", semi)
    assert torch.equal(stc.read(tmp_path / "x.stc").to_dense(), semi.to_dense())


def test_ranges(tmp_path: Path, small: None) -> None:
    x = tensor((20, 300), 1000)
    stc.write(tmp_path / "x.stc", x)
    with stc.open_packed(tmp_path / "x.stc") as file:
        for start, stop in ((0, x.nnz), (0, 64), (64, 128), (63, 65), (200, 200), (x.nnz - 3, x.nnz)):
            coords, values = file.block(start, stop)
            assert torch.equal(coords, x.coords[:, start:stop])
            assert torch.equal(values, x.values[start:stop])
        for first in range(21):
            for last in range(first, 21):
                coords, values = file.rows(first, last)
                inside = (x.coords[0] >= first) & (x.coords[0] < last)
                assert torch.equal(coords, x.coords[:, inside])
                assert torch.equal(values, x.values[inside])
        for start, stop in ((-1, 3), (3, 2), (0, x.nnz + 1)):
            with pytest.raises(IndexError):
                file.block(start, stop)
        with pytest.raises(IndexError):
            file.rows(0, 21)


def test_the_dtype_wanted(tmp_path: Path) -> None:
    stc.write(tmp_path / "x.stc", stc.SparseTensor([[0, 1]], [1.0, 2.5]))
    assert stc.read(tmp_path / "x.stc", dtype=torch.float64).dtype == torch.float64
    with pytest.raises(stc.IOFormatError, match=r"x\.stc: the value 2\.5 does not fit"):
        stc.read(tmp_path / "x.stc", dtype=torch.int8)
    with stc.options(memory_limit=10), pytest.raises(stc.OutOfMemoryError):
        stc.read(tmp_path / "x.stc")


# ---- files that are refused -------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path, small: None) -> tuple[Path, FileLayout]:
    """A file of several blocks."""
    stc.write(tmp_path / "x.stc", tensor((300, 70_000, 3), 500))
    return tmp_path / "x.stc", stc.open_packed(tmp_path / "x.stc").layout


def refused(path: Path, data: bytes) -> str:
    """What is said of a file of these bytes by `read` and by `verify`."""
    path.write_bytes(data)
    with pytest.raises(stc.IOFormatError) as read:
        stc.read(path)
    with pytest.raises(stc.IOFormatError) as verified, stc.open_packed(path) as opened:
        opened.verify()
    assert str(path) in str(read.value)
    assert str(path) in str(verified.value)
    return str(verified.value)


def sealed(page: bytes) -> bytes:
    """A header whose checksum is right again."""
    return page[:-4] + struct.pack("<I", zlib.crc32(page[:-4]))


def test_truncated_anywhere(file: tuple[Path, FileLayout]) -> None:
    path, layout = file
    data = path.read_bytes()
    for size, where in ((0, "header"), (5, "header"), (8, "header: truncated"), (PAGE - 1, "header: truncated")):
        assert where in refused(path, data[:size])
    for array in layout.arrays:
        assert f"truncated in {array.name}, block 0" in refused(path, data[: array.offset])
        assert f"truncated in {array.name}, block 1" in refused(path, data[: array.offset + 64 * array.dtype.itemsize])
        assert f"truncated in {array.name}" in refused(path, data[: array.end - 1])
    assert "truncated in checksums" in refused(path, data[: layout.checks.offset])
    assert "truncated in checksums" in refused(path, data[:-1])
    assert "1 bytes follow the end" in refused(path, data + b"\0")


def test_a_bit_flipped_anywhere(file: tuple[Path, FileLayout]) -> None:
    path, layout = file
    data = path.read_bytes()

    def flipped(at: int) -> str:
        return refused(path, data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :])

    for at in (0, 3, 8, 12, 20, 40, 64, 200, PAGE - 5, PAGE - 1):
        assert "header" in flipped(at)
    for array in layout.arrays:
        for at in (array.offset, array.offset + 64 * array.dtype.itemsize, array.end - 1):
            block = (at - array.offset) // (64 * array.dtype.itemsize)
            assert f"{array.name}, block {block}: damaged" in flipped(at)
        assert f"{array.name}: bytes that are not zero" in flipped(array.end)
    assert "checksums" in flipped(layout.checks.offset)
    assert "checksums" in flipped(layout.size - 1)


def test_only_the_block_that_is_damaged_is_refused(file: tuple[Path, FileLayout]) -> None:
    path, layout = file
    data = bytearray(path.read_bytes())
    data[layout.arrays[1].offset + 64 * 4] ^= 1
    path.write_bytes(data)
    with stc.open_packed(path) as opened:
        opened.block(0, 64)
        opened.block(128, opened.nnz)
        with pytest.raises(stc.IOFormatError, match="mode 1, block 1: damaged"):
            opened.block(100, 101)


def test_hostile_headers(file: tuple[Path, FileLayout]) -> None:
    path, layout = file
    data = path.read_bytes()
    fields = {  # offset: (struct, values)
        8: ("<H", (0, 2, 65535)),
        10: ("<H", (2, 65535)),
        12: ("<H", (0, 1, 2, 4, 65, 65535)),
        14: ("<B", (0, 1, 3, 11, 255)),
        15: ("<B", (1,)),
        16: ("<Q", (0, 1, layout.nnz - 1, layout.nnz + 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)),
        24: ("<I", (0, 1, 63, 2**32 - 1)),
        28: ("<I", (0,)),
        32: ("<Q", (0, 4096, 2**64 - 1)),
        40: ("<B", (1,)),
        64: ("<Q", (0, 1, 200, 2**33, 2**63, 2**64 - 1)),  # size, offset and width of mode 0
        72: ("<Q", (0, 8192, 2**64 - 1)),
        80: ("<Q", (0, 1, 8, 2**64 - 1)),
        64 + 24 * 3: ("<Q", (1,)),  # the size of values, which have none
        64 + 24 * 4: ("<Q", (1,)),
    }
    for at, (form, values) in fields.items():
        for value in values:
            page = bytearray(data[:PAGE])
            struct.pack_into(form, page, at, value)
            with stc.options(memory_limit=10**6):
                refused(path, sealed(bytes(page)) + data[PAGE:])


def test_contents_that_no_writer_makes(tmp_path: Path) -> None:
    """Checksums that are right, of coordinates that are not."""
    path = tmp_path / "x.stc"
    for coords, what in (([[0, 1, 5]], "outside its size, 3"), ([[0, 2, 1]], "order"), ([[0, 1, 1]], "order")):
        x = stc.SparseTensor._of(torch.tensor(coords), torch.ones(3), (3,), True)
        packed.write(path, x)
        assert what in refused(path, path.read_bytes())
    packed.write(path, stc.SparseTensor._of(torch.tensor([[0, -1]]), torch.ones(2), (2**40,), True))
    assert "outside its size" in refused(path, path.read_bytes())


def test_foreign_files(tmp_path: Path) -> None:
    path = tmp_path / "x.stc"
    for data in (b"1 1 1.0\n" * 1000, b"\x93NUMPY" + bytes(9000), bytes(9000), stc_layout.MAGIC + bytes(9000)):
        assert "header" in refused(path, data)
    with pytest.raises(FileNotFoundError):
        stc.open_packed(tmp_path / "absent.stc")
    with pytest.raises(IsADirectoryError):
        stc.open_packed(tmp_path)


def test_a_file_that_is_shortened_while_it_is_open(file: tuple[Path, FileLayout]) -> None:
    path, layout = file
    with stc.open_packed(path) as opened:
        with path.open("r+b") as shorter:
            shorter.truncate(layout.size // 2)
        with pytest.raises(stc.IOFormatError, match="shortened"):
            opened.block(0, 1)


def test_a_checksum_for_each_nonzero_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "FileLayout", lambda *fields: FileLayout(*fields, block=1))
    stc.write(tmp_path / "x.stc", stc.SparseTensor([[0, 1], [1, 0]], [1.0, 2.0], (2, 2)))
    with pytest.raises(stc.IOFormatError, match="a checksum every 1 nonzeros; a file has one every 16 or more"):
        stc.read(tmp_path / "x.stc")


def test_duplicates_whose_sum_overflows_are_refused_with_the_file_s_name(tmp_path: Path) -> None:
    path = tmp_path / "x.stc"
    with path.open("wb") as file:
        writer = packed.PackedWriter(file, FileLayout((3,), 2, torch.int8, coalesced=False))
        writer.append([torch.tensor([1, 1])], torch.tensor([100, 100], dtype=torch.int8))
        writer.finish()
    with pytest.raises(stc.IOFormatError, match=r"x\.stc.*duplicates holds 200"):
        stc.read(path)
