"""Packed files: what is written is read, by any range; one that was altered is refused, and says where."""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import random
import re
import sys
import threading
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pyarrow
import pytest
import torch
from cases import WIDE
from pyarrow import parquet as pyarrow_parquet

import sparsetc as stc
from sparsetc.io import packed, parquet
from sparsetc.tensor.dtypes import DTYPES


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
    """Row groups of a few dozen nonzeros in what is written."""
    monkeypatch.setattr(packed, "NUMBERS", 200)


# ---- round trips ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape",
    [
        *((7,), (256, 257), (256, 2**31, 2**31 + 1), (2**32, 2**32 + 1, 3, 5)),
        *((2**62, 2**62, 2**62, 4, 1), (9, 8, 7, 6, 5, 4), *WIDE),
    ],
)
def test_shapes(tmp_path: Path, shape: tuple[int, ...], small: None) -> None:
    x = tensor(shape)
    stc.write(tmp_path / "x.parquet", x)
    assert same(stc.read(tmp_path / "x.parquet"), x)
    with stc.open_packed(tmp_path / "x.parquet") as file:
        file.verify()
        assert (file.shape, file.order, file.nnz, file.dtype) == (x.shape, x.order, x.nnz, x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    x = tensor((300, 40), dtype=dtype)
    stc.write(tmp_path / "x.parquet", x)
    assert same(stc.read(tmp_path / "x.parquet"), x)


@pytest.mark.parametrize("nnz", [0, 1])
def test_few_nonzeros(tmp_path: Path, nnz: int) -> None:
    x = stc.SparseTensor(torch.ones((2, nnz), dtype=torch.int64), torch.full((nnz,), -0.0), (3, 2))
    stc.write(tmp_path / "x.parquet", x)
    assert same(stc.read(tmp_path / "x.parquet"), x)
    assert not nnz or stc.read(tmp_path / "x.parquet").values.signbit().all()
    file = stc.open_packed(tmp_path / "x.parquet")
    file.verify()
    assert file.block(0, nnz)[0].shape == (2, nnz)
    assert file.rows(0, 3)[1].shape == (nnz,)
    assert file.rows(2, 3)[1].shape == (0,)


def test_a_size_of_zero_and_what_is_not_sorted(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    stc.write(path, stc.SparseTensor(torch.zeros((2, 0), dtype=torch.int64), torch.zeros(0), (0, 4)))
    assert stc.read(path).shape == (0, 4)
    stc.write(path, stc.SparseTensor([[2, 0, 2]], [1.0, 2.0, 4.0], (3,), coalesce=False))
    assert stc.read(path).values.tolist() == [2.0, 5.0]
    semi = stc.SparseTensor([[2, 0]], torch.arange(6.0).reshape(2, 3), (3, 3))
    stc.write(path, semi)
    assert torch.equal(stc.read(path).to_dense(), semi.to_dense())


def test_values_of_every_bit(tmp_path: Path) -> None:
    bits = torch.tensor([0x7FC00000, 0x7F800000, -0x800000, 0, -(2**31), 1, 0x7F7FFFFF], dtype=torch.int32)
    x = stc.SparseTensor(torch.arange(7)[None], bits.view(torch.float32), (7,))
    stc.write(tmp_path / "x.parquet", x)
    assert torch.equal(stc.read(tmp_path / "x.parquet").values.view(torch.int32), bits)
    x = stc.SparseTensor(torch.arange(4)[None], torch.complex(bits[:4].view(torch.float32), torch.ones(4)).conj(), (4,))
    stc.write(tmp_path / "x.parquet", x)
    assert torch.equal(stc.read(tmp_path / "x.parquet").values.real.view(torch.int32), bits[:4])
    assert stc.read(tmp_path / "x.parquet").values.imag.tolist() == [-1] * 4


def test_ranges(tmp_path: Path, small: None) -> None:
    x = tensor((20, 300), 1000)
    stc.write(tmp_path / "x.parquet", x)
    with stc.open_packed(tmp_path / "x.parquet") as file:
        group = file.starts[1]
        for start, stop in ((0, x.nnz), (0, group), (group, 2 * group), (group - 1, group + 1), (200, 200), (997, 997)):
            stop = min(stop, x.nnz)
            start = min(start, stop)
            coords, values = file.block(start, stop)
            assert torch.equal(coords, x.coords[:, start:stop])
            assert torch.equal(values, x.values[start:stop])
        for first in range(21):
            for last in range(first, 21):
                coords, values = file.rows(first, last)
                inside = (x.coords[0] >= first) & (x.coords[0] < last)
                assert torch.equal(coords, x.coords[:, inside])
                assert torch.equal(values, x.values[inside])
        for start, stop in ((-1, 3), (3, 2), (0, x.nnz + 1), (0, 1.5), ("a", 3)):
            with pytest.raises(stc.CoordinateError, match="nonzeros"):
                file.block(start, stop)
        with pytest.raises(stc.CoordinateError, match="rows 0 to 21 of 20"):
            file.rows(0, 21)


def test_several_threads(tmp_path: Path, small: None) -> None:
    x = tensor((20, 300), 2000)
    stc.write(tmp_path / "x.parquet", x)
    wrong: list[int] = []
    with stc.open_packed(tmp_path / "x.parquet") as file:

        def look(seed: int) -> None:
            choose = random.Random(seed)
            for _ in range(40):
                start = choose.randrange(x.nnz)
                stop = choose.randrange(start, x.nnz)
                if not torch.equal(file.block(start, stop)[0], x.coords[:, start:stop]):
                    wrong.append(start)

        threads = [threading.Thread(target=look, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_a_worker_that_was_spawned(tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    x = tensor((30, 40, 5))
    stc.write(tmp_path / "x.parquet", x)
    monkeypatch.chdir(tmp_path)
    inside = (x.coords[0] >= 3) & (x.coords[0] < 9)
    with stc.open_packed("x.parquet") as file:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as workers:
            coords, values = workers.submit(parquet.PackedFile.rows, file, 3, 9).result()
        monkeypatch.chdir("/")
        copied = copy.copy(file)
    assert torch.equal(coords, x.coords[:, inside])
    assert torch.equal(values, x.values[inside])
    assert torch.equal(copied.rows(3, 9)[1], values)


def test_the_dtype_wanted(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    stc.write(path, stc.SparseTensor([[0, 1]], [1.0, 2.5]))
    assert stc.read(path, dtype=torch.float64).dtype == torch.float64
    with pytest.raises(stc.IOFormatError, match=r"x\.parquet: the value 2\.5 does not fit"):
        stc.read(path, dtype=torch.int8)
    with stc.options(memory_limit=10), pytest.raises(stc.OutOfMemoryError):
        stc.read(path)


def test_uber_is_small(tmp_path: Path) -> None:
    stc.write(tmp_path / "x.parquet", stc.datasets.uber())
    assert (tmp_path / "x.parquet").stat().st_size < 600_000


# ---- other programs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int8, torch.int64, torch.bfloat16])
def test_other_programs_read_ours(tmp_path: Path, dtype: torch.dtype) -> None:
    duckdb, pandas, polars = map(pytest.importorskip, ("duckdb", "pandas", "polars"))
    x, path = tensor((300, 70_000, 2**40), 500, dtype), tmp_path / "x.parquet"
    stc.write(path, x)
    wanted = [*x.coords.tolist(), x.values.tolist()]
    frame = pandas.read_parquet(path)
    assert list(frame.columns) == ["i0", "i1", "i2", "value"]
    assert [frame[name].tolist() for name in frame] == wanted
    assert [column.to_list() for column in polars.read_parquet(path)] == wanted
    rows = duckdb.sql(f"FROM '{path}'").fetchall()
    assert list(map(list, zip(*rows, strict=True))) == wanted


def test_files_of_other_programs_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    columns: dict[str, Any] = {
        "user": [3, 0, 3, 3],
        "item": np.array([1, 2, 1, 0], np.uint8),
        "count": [1.5, 2.0, 3.0, 4.0],
    }
    pyarrow_parquet.write_table(pyarrow.table(columns), path, row_group_size=2)
    names = tuple(columns)
    x = stc.read(path, columns=names)
    assert (x.shape, x.dtype) == ((4, 3), torch.float64)
    assert x.to_dense()[3].tolist() == [4.0, 4.5, 0.0]
    assert torch.equal(stc.read(path, columns=("item", "user", "count")).to_dense(), x.to_dense().T)
    assert stc.read(path, columns=("item", "user"), dtype=torch.int32).shape == (3,)
    pyarrow_parquet.write_table(pyarrow.table({**columns, "user": ["b", "a", "b", "b"]}), tmp_path / "named.parquet")
    named = stc.SparseTensor.from_table(pyarrow_parquet.read_table(tmp_path / "named.parquet"), names[:2], names[2])
    assert named["b"].values.tolist() == [4.0, 4.5]
    stc.pack(tmp_path / "named.parquet", tmp_path / "packed.parquet", columns=names)
    for found in (stc.read(tmp_path / "named.parquet", columns=names), stc.read(tmp_path / "packed.parquet")):
        assert same(found, named)
        assert [None if of is None else of.tolist() for of in found.labels.values()] == [["a", "b"], None]
    assert stc.read(path, columns=("user", None)).values.tolist() == [1, 3]  # rows
    users = pyarrow.DictionaryArray.from_arrays([1, 2, 1, 1], ["never", "b", "a"])
    categories = pyarrow.table({**columns, "user": users})
    pyarrow_parquet.write_table(categories, tmp_path / "categories.parquet", row_group_size=2)
    stc.pack(tmp_path / "categories.parquet", tmp_path / "packed.parquet", columns=names)
    for found in (stc.read(tmp_path / "categories.parquet", columns=names), stc.read(tmp_path / "packed.parquet")):
        assert same(found, named)
        assert found.labels["user"].tolist() == ["a", "b"]  # type: ignore[union-attr]
    for call in (stc.open_packed, stc.read, lambda path: stc.pack(path, tmp_path / "packed.parquet")):
        with pytest.raises(stc.IOFormatError, match="not of a packed file; to read or pack another, name its columns"):
            call(path)
    stc.pack(path, tmp_path / "packed.parquet", columns=names, dtype=torch.float32)
    assert same(stc.read(tmp_path / "packed.parquet"), stc.read(path, columns=names, dtype=torch.float32))
    with pytest.raises(stc.IOFormatError, match="a packed file already"):
        stc.pack(tmp_path / "packed.parquet", tmp_path / "again.parquet")


@pytest.mark.parametrize(
    ("columns", "named", "what"),
    [
        ({"i": [0, None], "v": [1.0, 2.0]}, None, "null"),
        ({"i": [0, 1], "v": [1.0, None]}, None, "null"),
        ({"i": [0, -1], "v": [1.0, 2.0]}, None, "coordinates are from 0 to"),
        ({"i": np.array([0, 2**63], np.uint64), "v": [1.0, 2.0]}, None, "coordinates are from 0 to"),
        ({"i": [0.5, 1], "v": [1.0, 2.0]}, None, "coordinates are integers"),
        ({"i": [["a"], ["b"]], "v": [1.0, 2.0]}, None, "column 'i' holds no labels|dictionary_encode"),
        ({"i": [0, 1], "v": ["a", "b"]}, None, "values are numbers"),
        ({"i": [0, 1], "v": [[1.0], [2.0]]}, None, "values are numbers"),
        ({"i": [0, 1], "v": [1.0, 2.0]}, ("i", "w"), "no column 'w' among 'i', 'v'"),
        ({"i": [0, 1], "v": [1.0, 2.0]}, ("i",), "1 columns"),
        ({"i": [2**63 - 1], "v": [1.0]}, None, r"the size of mode 0 must be an integer below 2\*\*63"),
        ({"i": np.zeros(0, np.int64), "v": np.zeros(0)}, None, "no rows"),
        ({"v": [1.0]}, None, "1 columns"),
    ],
)
def test_tables_that_are_no_tensor(tmp_path: Path, columns: dict[str, Any], named: Any, what: str) -> None:
    path = tmp_path / "x.parquet"
    pyarrow_parquet.write_table(pyarrow.table(columns), path)
    for call in (stc.read, lambda path, columns: stc.pack(path, tmp_path / "packed.parquet", columns=columns)):
        with pytest.raises(stc.IOFormatError, match=what) as error:
            call(path, columns=named or tuple(columns))
        assert "x.parquet" in str(error.value)
    assert [p.name for p in tmp_path.iterdir()] == ["x.parquet"]


def test_a_file_is_verified_as_it_is_now_and_not_once_it_was_closed(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    stc.write(path, tensor((20, 300), 2000))
    with stc.open_packed(path) as file:
        file.block(0, 2)
        with open(path, "r+b") as raw:
            raw.seek(4)
            raw.write(b"\xff" * 200)
        with pytest.raises(stc.IOFormatError, match="row group 0: damaged"):
            file.verify()
    with pytest.raises(stc.IOFormatError, match="the file was closed"):
        file.rows(0, 1)


def test_columns_are_of_tables_alone(tmp_path: Path) -> None:
    with pytest.raises(stc.IOFormatError, match=r"columns are those of a"):
        stc.read(tmp_path / "x.tns", columns=("i", "v"))
    (tmp_path / "x.tns").write_text("1 1 1\n")
    with pytest.raises(stc.IOFormatError, match=r"columns are those of a"):
        stc.pack(tmp_path / "x.tns", tmp_path / "x.parquet", columns=("i", "v"))


# ---- files that are refused -------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path, small: None) -> Path:
    """A file of several row groups."""
    stc.write(tmp_path / "x.parquet", tensor((300, 70_000, 3), 500))
    return tmp_path / "x.parquet"


def refused(path: Path, data: bytes | None = None) -> str:
    """What is said of a file, of these bytes, by `read` and by `verify`."""
    if data is not None:
        path.write_bytes(data)
    with pytest.raises((stc.IOFormatError, stc.OutOfMemoryError)) as read:
        stc.read(path)
    with pytest.raises((stc.IOFormatError, stc.OutOfMemoryError)) as verified, stc.open_packed(path) as opened:
        opened.verify()
    assert str(path) in str(read.value)
    assert str(path) in str(verified.value)
    return str(verified.value)


def page(path: Path, group: int, column: int) -> int:
    """The offset of a byte within a page."""
    about = pyarrow_parquet.read_metadata(path).row_group(group).column(column)
    return about.data_page_offset + about.total_compressed_size // 2


def test_truncated_anywhere(path: Path) -> None:
    data = path.read_bytes()
    for size in (0, 3, 4, 8, 100, len(data) // 2, len(data) - 8, len(data) - 1):
        assert "its footer: damaged" in refused(path, data[:size])
    assert "its footer: damaged" in refused(path, data + b"\0")


def test_only_the_row_group_that_is_damaged_is_refused(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[page(path, 1, 1)] ^= 1
    assert "row group 1: damaged" in refused(path, data)
    with stc.open_packed(path) as opened:
        first, second = opened.starts[1:3]
        opened.block(0, first)
        opened.block(second, opened.nnz)
        with pytest.raises(stc.IOFormatError, match="row group 1: damaged"):
            opened.block(first, first + 1)


def said(path: Path, **changes: Any) -> None:
    """Let a file say something else of itself, with the right checksum."""
    table = pyarrow_parquet.read_table(path)
    about = {**json.loads(pyarrow_parquet.read_metadata(path).metadata[packed.KEY]), **changes}
    del about["crc"]
    about = about if "crc" in changes else {**about, "crc": packed._crc(about)}
    pyarrow_parquet.write_table(table.replace_schema_metadata({packed.KEY: json.dumps(about)}), path)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"shape": [299, 70_000, 3]}, "a coordinate of mode 0 outside its size, 299"),
        ({"shape": [300, 70_000]}, "columns that do not follow"),
        ({"shape": [300, 70_000, 3, 1]}, "columns that do not follow"),
        ({"shape": [300, 2**40, 3]}, "columns that do not follow"),
        *(({"shape": s}, "no shape and dtype") for s in (None, 3, "abc", [-1, 2, 3], [2**63, 1, 1], [1.5, 2, 3])),
        ({"shape": []}, "a tensor of 0 modes"),
        ({"shape": [1] * 65}, "a tensor of 65 modes"),
        *(({"dtype": d}, "no shape and dtype") for d in ("float8", None, [], "object")),
        ({"dtype": "float64"}, "columns that do not follow"),
        ({"version": 2}, "version 2 of the format; this is version 1"),
        ({"crc": 0}, "no shape and dtype"),
    ],
)
def test_what_a_file_says_that_is_not_so(path: Path, changes: dict[str, Any], what: str) -> None:
    said(path, **changes)
    assert what in refused(path)


@pytest.mark.parametrize("text", [b"", b"{", b"[" * 100_000, b"[]", b"1", b"\xff", b'{"shape": ' + b"9" * 5000 + b"}"])
def test_a_description_that_is_none(path: Path, text: bytes) -> None:
    table = pyarrow_parquet.read_table(path).replace_schema_metadata({packed.KEY: text})
    pyarrow_parquet.write_table(table, path)
    assert "no shape and dtype" in refused(path)


@pytest.mark.parametrize(
    ("coords", "what"),
    [
        ([0, 1, 5], "outside its size, 3"),
        ([0, -1, 2], "outside its size, 3"),
        ([0, 2, 1], "order"),
        ([0, 1, 1], "order"),
        ([0, 1, None], "columns that do not follow|null"),
    ],
)
def test_contents_that_no_writer_makes(tmp_path: Path, coords: list[Any], what: str) -> None:
    """Checksums that are right, of coordinates that are not."""
    path = tmp_path / "x.parquet"
    stc.write(path, stc.SparseTensor([[0, 1, 2]], torch.ones(3), (3,)))
    about = pyarrow_parquet.read_metadata(path).metadata[packed.KEY]
    schema = pyarrow.schema(
        [("i0", pyarrow.int32()), pyarrow.field("value", pyarrow.float32(), False)], {packed.KEY: about}
    )
    schema = schema if None in coords else schema.set(0, pyarrow.field("i0", pyarrow.int32(), False))
    table = pyarrow.table([pyarrow.array(coords, "int32"), pyarrow.array([1.0] * 3, "float32")], schema=schema)
    pyarrow_parquet.write_table(table, path)
    assert re.search(what, refused(path))


def test_foreign_files(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    for data in (b"1 1 1.0\n" * 1000, b"\x93NUMPY" + bytes(9000), bytes(9000), b"PAR1" + bytes(9000), b"PAR1" * 3):
        assert "footer" in refused(path, data)
    with pytest.raises(FileNotFoundError):
        stc.open_packed(tmp_path / "absent.parquet")
    with pytest.raises(IsADirectoryError):
        stc.open_packed(tmp_path)


@pytest.mark.skipif(os.name != "posix", reason="FIFOs")
def test_a_pipe_is_refused_without_being_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.parquet")
    with pytest.raises(stc.IOFormatError, match="must be a file on disk"):
        stc.read(tmp_path / "x.parquet")


def test_a_file_that_is_shortened_while_it_is_open(path: Path) -> None:
    with stc.open_packed(path) as opened:
        with path.open("r+b") as shorter:
            shorter.truncate(100)
        with pytest.raises(stc.IOFormatError, match="row group 0: damaged"):
            opened.block(0, opened.nnz)


def test_few_bytes_of_many_rows(tmp_path: Path) -> None:
    """A hundred million equal rows take 100 KB in a file and 1.6 GB in memory, which is said before it is taken."""
    path, n = tmp_path / "x.parquet", 100_000_000
    one = pyarrow.table({"i": np.zeros(n // 100, np.int32), "v": np.ones(n // 100, np.float32)})
    with pyarrow_parquet.ParquetWriter(path, one.schema, compression="zstd") as writer:
        for _ in range(100):
            writer.write_table(one)
    assert path.stat().st_size < 10**6
    with (
        stc.options(memory_limit="1GB"),
        pytest.raises(stc.OutOfMemoryError, match=r"x\.parquet: the tensor and its table"),
    ):
        stc.read(path, columns=("i", "v"))


def test_row_groups_of_a_row(tmp_path: Path) -> None:
    """Each takes its time however little it holds, so that there may be few of them."""
    path, table = tmp_path / "x.parquet", pyarrow.table({"i": np.arange(3000), "v": np.ones(3000, np.float32)})
    pyarrow_parquet.write_table(table, path, row_group_size=1)
    with pytest.raises(stc.IOFormatError, match=r"x\.parquet: its footer: 3,000 row groups of 3,000 rows: "):
        stc.read(path, columns=("i", "v"))
    pyarrow_parquet.write_table(table, path, row_group_size=3)
    assert torch.equal(stc.read(path, columns=("i", "v")).coords, torch.arange(3000)[None])


MUTATED = r"""
import random, resource, sys, time
import torch, sparsetc as stc
path, data, choose = sys.argv[1], open(sys.argv[1], "rb").read(), random.Random(int(sys.argv[2]))
x, slowest = stc.read(path), 0.0
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for number in range(int(sys.argv[3])):
    made, kind = bytearray(data), choose.random()
    for _ in range(1 if kind < 0.6 else choose.randint(2, 6)):
        # half of them in the footer, where sizes are
        at = choose.choice((choose.randrange(len(made)), choose.randrange(len(made) * 2 // 3, len(made))))
        made[at] = choose.choice((0, 1, 127, 128, 255, made[at] ^ 1 << choose.randrange(8), choose.randrange(256)))
    if kind > 0.9:
        made = made[: choose.randrange(len(made))] + made[choose.randrange(len(made)) :]
    with open(path, "wb") as file:
        file.write(made)
    start = time.process_time()
    try:
        with stc.options(memory_limit=50_000_000):
            y = stc.read(path)
        assert (y.shape, y.dtype) == (x.shape, x.dtype), (number, "another tensor", y)
        assert torch.equal(y.coords, x.coords) and torch.equal(y.values, x.values), (number, "another tensor", y)
    except (stc.IOFormatError, stc.OutOfMemoryError) as error:
        assert path in str(error) and str(error).isprintable(), (number, str(error))
    slowest = max(slowest, time.process_time() - start)
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
assert slowest < 2 and grown < 200_000, (slowest, grown)
"""


@pytest.mark.skipif(os.name != "posix", reason="what a process took")
def test_mutated_files(path: Path) -> None:
    """Altered bytes are refused or change nothing; in a process of its own, which they must not end."""
    done = processes.run(["-c", MUTATED, path, 0, 400])
    assert done.returncode == 0, done.stderr


# ---- libraries that are not there -------------------------------------------------------------------------------


def test_a_missing_library_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, source = stc.SparseTensor([[0]], [1.0]), path.parent / "x.tns"
    source.write_text("1 1 1.0\n")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "duckdb", None)  # which an import finds and refuses
        patch.setattr("sparsetc.io.packing.HELD", 1 << 40)  # what takes little is sorted without it
        with pytest.raises(ImportError, match=r'packing needs DuckDB: pip install "sparsetc\[files\]"'):
            stc.pack(source, path.parent / "y.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for call in (stc.read, stc.open_packed, lambda path: stc.write(path, x), lambda path: stc.pack(source, path)):
        with pytest.raises(ImportError, match=r'\.parquet files need pyarrow: pip install "sparsetc\[files\]"'):
            call(path)
    assert sorted(p.name for p in path.parent.iterdir()) == ["x.parquet", "x.tns"]
