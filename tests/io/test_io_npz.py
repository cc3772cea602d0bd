"""Arrays of .npz files: those of other libraries, and those that are damaged or claim too much."""

from __future__ import annotations

import copy
import io
import re
import resource
import struct
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import LIMITS, fits

import sparsetc.io as sio
from sparsetc.errors import DtypeError, IOFormatError, OutOfMemoryError
from sparsetc.io import npz
from sparsetc.options import options
from sparsetc.tensor.sparse_tensor import SparseTensor

GOOD: dict[str, Any] = {
    "coords": np.array([[0, 1], [1, 2]], np.uint8),
    "values": np.array([1.0, 2.0], np.float32),
    "shape": np.array([2, 3]),
}

CSR: dict[str, Any] = {
    "format": "csr",
    "data": np.ones(1),
    "indices": np.zeros(1, int),
    "indptr": np.array([0, 1, 1]),
    "shape": np.array([2, 2]),
}


def refused(path: Path, words: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(IOFormatError, match=words) as caught:
            sio.read(path)
    assert path.name in str(caught.value)
    assert len(str(caught.value)) < 500


def equal(x: SparseTensor, y: SparseTensor) -> bool:
    same = x.shape == y.shape and x.dtype == y.dtype and torch.equal(x.coords, y.coords)
    return same and torch.equal(x.values, y.values)


# ---- files of scipy.sparse and pydata/sparse --------------------------------------------------------------------


def random_matrix(dtype: Any = np.float64) -> Any:
    scipy_sparse = pytest.importorskip("scipy.sparse")
    made = scipy_sparse.random(24, 36, 0.1, random_state=0, format="coo")
    made.data = (made.data * 100).astype(dtype)
    return made


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.complex128, np.int8])
@pytest.mark.parametrize("form", ["csr", "csc", "coo", "bsr", "dia"])
def test_scipy(tmp_path: Path, form: str, dtype: Any, compressed: bool) -> None:
    scipy_sparse = pytest.importorskip("scipy.sparse")
    for array in (False, True):
        matrix = random_matrix(dtype).asformat(form)
        matrix = matrix.tobsr((4, 3)) if form == "bsr" else matrix
        matrix = getattr(scipy_sparse, f"{form}_array")(matrix) if array else matrix
        scipy_sparse.save_npz(tmp_path / "x.npz", matrix, compressed=compressed)
        assert equal(sio.read(tmp_path / "x.npz"), SparseTensor.from_scipy(matrix))


def test_scipy_arrays_of_other_orders(tmp_path: Path) -> None:
    pytest.importorskip("scipy", minversion="1.15")
    scipy_sparse = pytest.importorskip("scipy.sparse")
    line, cube = np.array([0, 1.5, 0, 2]), np.arange(24.0).reshape(2, 3, 4) % 3
    for array in (scipy_sparse.csr_array(line), scipy_sparse.coo_array(line), scipy_sparse.coo_array(cube)):
        scipy_sparse.save_npz(tmp_path / "x.npz", array)
        assert equal(sio.read(tmp_path / "x.npz"), SparseTensor.from_scipy(array))


def test_scipy_matrices_that_are_empty_or_unsorted(tmp_path: Path) -> None:
    scipy_sparse = pytest.importorskip("scipy.sparse")
    for form in ("csr", "csc", "coo", "bsr", "dia"):
        scipy_sparse.save_npz(tmp_path / "x.npz", scipy_sparse.coo_matrix((3, 4)).asformat(form))
        found = sio.read(tmp_path / "x.npz")
        assert (found.shape, found.nnz) == ((3, 4), 0)
    doubled = scipy_sparse.csr_matrix((np.ones(4), np.array([2, 0, 2, 1]), np.array([0, 3, 4])), shape=(2, 3))
    scipy_sparse.save_npz(tmp_path / "x.npz", doubled)
    assert torch.equal(sio.read(tmp_path / "x.npz").to_dense(), torch.from_numpy(doubled.toarray()))


def test_pydata(tmp_path: Path) -> None:
    sparse = pytest.importorskip("sparse")
    cube = sparse.random((6, 7, 8, 5), density=0.05, random_state=0)
    arrays = [cube, sparse.random((9,), density=0.5, random_state=1), cube.astype(np.int32)]
    arrays += [sparse.GCXS.from_coo(cube, compressed_axes=axes) for axes in ((0,), (1, 3), (0, 1, 2), (2,))]
    arrays += [sparse.GCXS.from_coo(sparse.COO(np.array([0, 1, 0, 2.0]))), sparse.zeros((3, 4), format="gcxs")]
    for array in arrays:
        sparse.save_npz(str(tmp_path / "x.npz"), array)
        coo = array if isinstance(array, sparse.COO) else array.tocoo()
        assert equal(sio.read(tmp_path / "x.npz"), SparseTensor.from_pydata(coo))


def test_a_fill_value_is_zero(tmp_path: Path) -> None:
    sparse = pytest.importorskip("sparse")
    for fill, text in ((1.0, "1.0"), (np.nan, "nan")):
        sparse.save_npz(str(tmp_path / "x.npz"), sparse.COO(np.array([1, 2, 3.0]), fill_value=fill))
        refused(tmp_path / "x.npz", f"must have fill value 0, found {text}")


@pytest.mark.parametrize(
    ("form", "change", "words"),
    [
        ("csr", {"indptr": np.array([0, 2, 1, 3])}, "indptr must be a non-decreasing"),
        ("csr", {"indptr": np.array([0, 1, 2, 2**62])}, "Last value of index pointer"),
        ("csr", {"indptr": np.array([0, 2**63 - 1, -(2**63), 3])}, "indptr must be a non-decreasing"),
        (
            "csr",
            {"indptr": np.array([0, 2**20, 0, 0]), "indices": np.zeros(0, int), "data": np.zeros(0)},
            "indptr must",
        ),
        ("csr", {"indptr": np.array([0, 3])}, "index pointer size 2 should be 4"),
        ("csr", {"indptr": np.array([0.0, 1, 2, 3])}, "indptr should be integers, found float64"),
        ("csr", {"indices": np.array([[0, 1, 2]])}, "should be 1-D"),
        ("csr", {"indices": np.array([0, 1, 4])}, "indices must be < 4"),
        ("csr", {"indices": np.array([0, -1, 1])}, "indices must be >= 0"),
        ("csr", {"data": np.ones(2)}, "indices and data should have the same size"),
        ("csr", {"data": np.ones((3, 1))}, "should be 1-D"),
        ("csr", {"format": np.array("lil")}, "format lil"),
        ("csr", {"format": np.array(["csr", "csr"])}, "scalar"),
        ("csr", {"format": np.array(7)}, "'int' object"),
        ("csr", {"shape": np.array([3, 4, 5])}, "shape must have length"),
        ("csr", {"shape": np.array([2**62, 4])}, "index pointer size 4 should be 4611686018427387905"),
        ("csr", {"shape": np.array([3.0, 4.0])}, "shape should be integers"),
        ("csr", {"fill_value": np.array("0")}, "attribute name"),
        ("coo", {"row": np.array([0, 1])}, "must have the same length"),
        ("coo", {"coords": np.zeros((3, 3), int)}, "mismatching number of index arrays"),
        ("coo", {"col": np.array([0, 1, 9])}, "axis 1 index 9 exceeds"),
        ("bsr", {"data": np.ones(3)}, "must be 3-dimensional"),
        ("bsr", {"data": np.ones((1, 0, 2))}, "division"),
        ("bsr", {"indices": np.array([2**61])}, "column index values must be < 1"),
        ("dia", {"offsets": np.array([0, 1, 2, 3, 4])}, "does not match the number of offsets"),
    ],
)
def test_arrays_that_contradict_each_other(tmp_path: Path, form: str, change: dict[str, Any], words: str) -> None:
    scipy_sparse = pytest.importorskip("scipy.sparse")
    matrix = scipy_sparse.csr_matrix(np.eye(3, 4))
    scipy_sparse.save_npz(tmp_path / "x.npz", matrix.tobsr((3, 4)) if form == "bsr" else matrix.asformat(form))
    with np.load(tmp_path / "x.npz") as file:
        arrays = dict(file)
    for name in arrays:
        np.savez(tmp_path / "x.npz", **{key: arrays[key] for key in arrays if key != name})
        if name not in ("format", "_is_array"):
            missing = "values" if name == "data" else name
            refused(tmp_path / "x.npz", f"no array {missing} among|{name} is not a file in the archive")
    np.savez(tmp_path / "x.npz", **{**arrays, **change})
    refused(tmp_path / "x.npz", words)


def test_compressed_axes_that_are_no_modes(tmp_path: Path) -> None:
    sparse = pytest.importorskip("sparse")
    sparse.save_npz(str(tmp_path / "x.npz"), sparse.GCXS.from_coo(sparse.random((4, 5, 6), 0.1, random_state=0)))
    with np.load(tmp_path / "x.npz") as file:
        arrays = dict(file)
    for change, words in (
        ({"compressed_axes": np.array([3])}, "axis out of range"),
        ({"compressed_axes": np.array([0, 0])}, "without repeats"),
        ({"indices": arrays["indices"] + 1000}, "out of bounds"),
        ({"indices": arrays["indices"] - 1000}, "out of bounds"),
        ({"indptr": arrays["indptr"][::-1].copy()}, "not sorted"),
        ({"indptr": arrays["indptr"] + 2**40}, "out of bounds"),
    ):
        np.savez(tmp_path / "x.npz", **{**arrays, **change})
        refused(tmp_path / "x.npz", words)


# ---- dtypes -----------------------------------------------------------------------------------------------------


def test_dtypes_that_only_numpy_has(tmp_path: Path) -> None:
    for dtype in (np.uint32, np.uint16, np.uint64):
        np.savez(tmp_path / "x.npz", **{**GOOD, "values": np.array([1, 1], dtype)})
        assert sio.read(tmp_path / "x.npz").dtype == (torch.int32 if dtype == np.uint16 else torch.int64)
        assert sio.read(tmp_path / "x.npz", dtype=torch.float32).values.tolist() == [1, 1]
    np.savez(tmp_path / "x.npz", **{**GOOD, "values": np.array([1, 2**63], np.uint64)})
    with pytest.raises(IOFormatError, match="9223372036854775808 does not fit"):
        sio.read(tmp_path / "x.npz", dtype=torch.float32)


@pytest.mark.parametrize("number", LIMITS[:3])  # which numpy has
def test_integers_around_the_limits_of_int64(tmp_path: Path, number: int) -> None:
    path = tmp_path / "x.npz"
    array = np.array([number, 1], np.int64 if fits(number) else np.uint64)
    np.savez(path, **{**GOOD, "values": array})
    if fits(number):
        assert sio.read(path, dtype=torch.int64).values.tolist() == array.tolist()
    else:
        refused(path, f"the value {number} does not fit int64")
        with pytest.raises(IOFormatError, match=f"{number} does not fit int64"):
            sio.read(path, dtype=torch.int64)
    np.savez(path, **{**GOOD, "values": array.astype(np.float64)})
    if number < 0:
        assert sio.read(path, dtype=torch.int64).values.tolist() == [number, 1]
    else:  # float64 has no 2**63 - 1, but 2**63
        with pytest.raises(IOFormatError, match="does not fit"):
            sio.read(path, dtype=torch.int64)
    np.savez(path, **{**GOOD, "coords": np.stack((array, array)), "shape": np.full(2, 2**63 - 1)})
    refused(path, str(number))
    np.savez(path, **{**GOOD, "coords": np.array([[0, 1]]), "shape": array[:1]})
    if number == 2**63 - 1:
        assert sio.read(path).shape == (number,)
    else:
        refused(path, str(number))


@pytest.mark.filterwarnings("error")
def test_values_are_not_changed_by_another_dtype(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    for values, dtype, words in (
        ([1.0, 1e39], torch.float32, r"the value 1e\+39 does not fit torch.float32"),
        ([1.0, 1.5], torch.int64, "the value 1.5 does not fit torch.int64"),
        ([1.0, 2.0**63], torch.int64, "does not fit"),
        ([1.0, np.nan], torch.int8, "the value nan does not fit"),
        ([1, 128], torch.int8, "the value 128 does not fit torch.int8"),
        ([1, 2j], torch.float64, "complex values cannot be read as torch.float64"),
    ):
        np.savez(path, **{**GOOD, "values": np.array(values)})
        with pytest.raises(IOFormatError, match=words):
            sio.read(path, dtype=dtype)
    np.savez(path, **{**GOOD, "values": np.array([np.inf, 0.1])})
    assert sio.read(path, dtype=torch.float16).values.tolist() == [np.inf, torch.tensor(0.1).half().item()]
    with pytest.raises(DtypeError):
        sio.read(path, dtype=torch.uint16)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8], ids=str)
@pytest.mark.parametrize("suffix", [".npz", ".tns", ".mtx", ".parquet"])
def test_bools_and_bytes(tmp_path: Path, dtype: torch.dtype, suffix: str) -> None:
    x = SparseTensor([[0, 1], [2, 0]], torch.tensor([1, 0], dtype=dtype), (3, 4))
    sio.write(tmp_path / f"x{suffix}", x)
    assert equal(sio.read(tmp_path / f"x{suffix}"), x)
    assert x.to_scipy().dtype == x.to_numpy()[1].dtype
    for same in (SparseTensor.from_scipy(x.to_scipy()), SparseTensor.from_torch(x.to_torch()), copy.deepcopy(x)):
        assert equal(same, x)


def test_byte_orders_and_orders_of_elements(tmp_path: Path) -> None:
    for coords, values in (
        (np.asfortranarray(GOOD["coords"]).astype(">u8"), GOOD["values"].astype(">f4")),
        (np.array([[0, 1], [1, 2]], ">i2", order="F"), np.array([1, 2], ">f4")),
    ):
        np.savez(tmp_path / "x.npz", coords=coords, values=values, shape=GOOD["shape"].astype(">i4"))
        assert equal(sio.read(tmp_path / "x.npz"), SparseTensor([[0, 1], [1, 2]], [1.0, 2.0], (2, 3)))


# ---- damage -----------------------------------------------------------------------------------------------------


def member(array: np.ndarray) -> bytes:
    made = io.BytesIO()
    np.save(made, array)
    return made.getvalue()


def archive(path: Path, replaced: str, data: bytes, method: int = zipfile.ZIP_DEFLATED) -> Path:
    """A good file but for one member."""
    with zipfile.ZipFile(path, "w", method) as file:
        for name, array in GOOD.items():
            file.writestr(f"{name}.npy", data if name == replaced else member(array))
    return path


def header(text: str, version: int = 1) -> bytes:
    length = struct.pack("<H" if version == 1 else "<I", len(text))
    return b"\x93NUMPY" + bytes([version, 0]) + length + text.encode()


HEADERS = {
    "no array": (b"hello", "values is no plain array: EOF"),
    "empty": (b"", "values is no plain array: EOF"),
    "unbalanced": (header("{'descr': '<f4', 'fortran_order': False, 'shape': (2,"), "values is no plain array"),
    "a call": (header("{'descr': print(1), 'fortran_order': False, 'shape': (2,), }"), "values is no plain array"),
    "a keyword": (header("{'descr': '<f4', 'fortran_order': 1if 1else 2, 'shape': (2,)}"), "values is no plain array"),
    "an escape": (header("{'descr': '\\d', 'fortran_order': False, 'shape': (2,), }"), "values is no plain array"),
    "nested": (header("(" * 5000), "values is no plain array"),
    "blank": (header("{'descr': '<f4'" + " " * 9000), "values is no plain array"),
    "too long": (header(" " * 20_000), "values is no plain array: EOF"),
    "huge header": (header("{}", 2).replace(b"\2\0\0\0{}", b"\xff\xff\xff\xff{}"), "no plain array: EOF"),
    "a record": (header("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (2,), }"), "no plain array"),
    "odd dtype": (header("{'descr': '<f3', 'fortran_order': False, 'shape': (2,), }"), "not a valid dtype descriptor"),
    "zero dtype": (header("{'descr': '|S0', 'fortran_order': False, 'shape': (2,), }"), "values is no plain array"),
    "twice": (header("{'descr': '<f4', 'descr': '<f4', 'shape': (2,), }"), "values is no plain array"),
    "huge": (header(f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({10**18},), }}"), "should have .* bytes"),
    "many": (
        header(f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({'2,' * 900}), }}"),
        "values is no plain array",
    ),
    "more": (
        header(f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({'1,' * 3000}), }}"),
        "values is no plain array",
    ),
    "negative": (header("{'descr': '<f4', 'fortran_order': False, 'shape': (-2,), }"), "values is no plain array"),
    "hollow": (
        header(f"{{'descr': '<f4', 'fortran_order': False, 'shape': (0, {10**19}), }}"),
        "values is no plain array",
    ),
    "long": (member(np.ones(2)) + b"more", "should have 16 bytes by its header, the archive has 20"),
    "short": (member(np.ones(2))[:-1], "should have 16 bytes"),
    "text": (member(np.array(["a", "b"])), "numpy.str_"),
    "objects": (member(np.array([1.0, 2.0]).view("V8")), "values is no plain array"),
    "dates": (member(np.array(["2020", "2021"], "M8[s]")), "values is no plain array"),
}


@pytest.mark.parametrize(("data", "words"), HEADERS.values(), ids=HEADERS)
def test_members_that_are_no_plain_arrays(tmp_path: Path, data: bytes, words: str) -> None:
    refused(archive(tmp_path / "x.npz", "values", data), words)
    if data:
        refused(archive(tmp_path / "x.npz", "values", data, zipfile.ZIP_STORED), words)


def test_headers_as_others_write_them(tmp_path: Path) -> None:
    elements = member(GOOD["values"])[-8:]
    for text in (
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }\n",
        "{'descr': '<f4', 'fortran_order': True, 'shape': (2,)}   ",
        "{'shape': (2,), 'descr':'<f4','fortran_order':False}",
    ):
        for version in (1, 2, 3):
            path = archive(tmp_path / "x.npz", "values", header(text, version) + elements)
            assert sio.read(path).values.tolist() == [1, 2]


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_compression_is_refused(tmp_path: Path, method: int) -> None:
    refused(archive(tmp_path / "x.npz", "values", member(GOOD["values"]), method), "compressed in another way")


def patched(raw: bytes, field: int, value: bytes) -> bytes:
    """A zip file with a field of the central directory of its second member changed."""
    at = [found.start() for found in re.finditer(b"PK\x01\x02", raw)][1] + field
    return raw[:at] + value + raw[at + len(value) :]


def test_an_archive_that_claims_too_much(tmp_path: Path) -> None:
    path = archive(tmp_path / "x.npz", "values", member(np.ones(2)))
    raw = path.read_bytes()
    for field, value, words in (
        (24, struct.pack("<I", 2**31), "values cannot have the 2,147,483,648 bytes that the archive claims"),
        (24, struct.pack("<I", 100), "should have 16 bytes by its header, the archive has|Bad CRC"),
        (16, b"\0\0\0\0", "Bad CRC"),
        (8, struct.pack("<H", 1), "encrypted|password"),
        (42, struct.pack("<I", 2**30), "x.npz"),
    ):
        path.write_bytes(patched(raw, field, value))
        refused(path, words)


@pytest.mark.parametrize(
    "arrays",
    [
        {**GOOD, "values": np.zeros(100_000_000, np.int8)},
        {**GOOD, "coords": np.zeros((2, 100_000_000), np.int8)},
        {**GOOD, "coords": np.zeros((100_000_000, 2), np.int8), "shape": np.array([1])},
        {**GOOD, "shape": np.ones(100_000_000, np.int8)},
        {**GOOD, "dtype": np.zeros(100_000_000, "S1")},
        {"format": np.array("csr"), "data": np.ones(1), "shape": np.ones(100_000_000, np.int8)},
        {**CSR, "indices": np.zeros(100_000_000, np.int8)},
        {**CSR, "indptr": np.zeros(100_000_000, np.int8)},
        {**CSR, "fill_value": np.zeros(100_000_000, np.int8)},
        {**CSR, "format": "coo", "coords": np.zeros((2, 100_000_000), np.int8)},
        {**CSR, "format": "gcxs", "compressed_axes": np.zeros(100_000_000, np.int8)},
    ],
    ids=["values", "coords", "modes", "shape", "dtype", "sizes", "indices", "indptr", "fill", "coo", "axes"],
)
def test_bombs_are_not_unpacked(tmp_path: Path, arrays: dict[str, Any]) -> None:
    np.savez_compressed(tmp_path / "x.npz", **arrays)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with options(memory_limit=10**7), pytest.raises((OutOfMemoryError, IOFormatError), match=r"x\.npz: ") as caught:
        sio.read(tmp_path / "x.npz")
    assert re.search("the tensor would take [0-9,]{11,} bytes|at most 64|more than modes", str(caught.value))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 20_000


def test_diagonals_of_a_tall_matrix(tmp_path: Path) -> None:
    scipy_sparse = pytest.importorskip("scipy.sparse")
    tall = scipy_sparse.dia_matrix((np.ones((1, 2)), np.array([0])), shape=(10**9, 2))
    scipy_sparse.save_npz(tmp_path / "x.npz", tall)
    with options(memory_limit=10**9), pytest.raises(OutOfMemoryError, match=r"x\.npz: the rows of diagonals"):
        sio.read(tmp_path / "x.npz")


def test_members_nobody_asked_for_are_not_unpacked(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "x.npz", other=np.zeros(10**8, np.int8), notes=np.array([{}]), **GOOD)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert sio.read(tmp_path / "x.npz").nnz == 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 20_000


def test_what_fits_no_memory_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small numbers in the file are int64 in memory, and a csr matrix may be all rows."""
    nonzeros = 1_000_000
    np.savez_compressed(
        tmp_path / "x.npz",
        coords=np.indices((100, 100, 100), np.int8).reshape(3, nonzeros),
        values=np.zeros(nonzeros, np.int8),
        shape=np.array([100, 100, 100]),
    )
    np.savez_compressed(
        tmp_path / "y.npz",
        format=np.array("csr"),
        data=np.zeros(0),
        indices=np.zeros(0, int),
        indptr=np.zeros(nonzeros + 1, int),
        shape=np.array([nonzeros, 1]),
    )
    unpacked: list[str] = []
    array = npz.array
    monkeypatch.setattr(npz, "array", lambda archive, name: unpacked.append(name) or array(archive, name))
    for name, nbytes in (("x", 52_000_024), ("y", 24_000_108)):
        with options(memory_limit=nbytes - 1), pytest.raises(OutOfMemoryError, match=f"{name}.npz: .*{nbytes:,} bytes"):
            sio.read(tmp_path / f"{name}.npz")
        assert not unpacked
        with options(memory_limit=nbytes):
            sio.read(tmp_path / f"{name}.npz")
        unpacked.clear()
