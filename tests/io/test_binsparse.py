"""Binsparse files: every format of the specification, encoded here from its text, and what contradicts it."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import processes
import pytest
import torch

import sparsetc as stc
from sparsetc.errors import IOFormatError, OutOfMemoryError
from sparsetc.io import lines

h5py = pytest.importorskip("h5py")
binsparse = pytest.importorskip("binsparse")

Level = dict[str, Any]
Arrays = dict[str, np.ndarray]
ELEMENT: Level = {"level_desc": "element"}
SUFFIXES = (".bsp.h5", ".bsp.npz")


def dense(level: Level, rank: int = 1) -> Level:
    return {"level_desc": "dense", "rank": rank, "level": level}


def sparse(level: Level, rank: int = 1) -> Level:
    return {"level_desc": "sparse", "rank": rank, "level": level}


PREDEFINED: dict[str, tuple[Level, tuple[int, ...] | None]] = {
    "DVEC": (dense(ELEMENT), None),
    "CVEC": (sparse(ELEMENT), None),
    "DMAT": (dense(dense(ELEMENT)), None),
    "DMATR": (dense(dense(ELEMENT)), None),
    "DMATC": (dense(dense(ELEMENT)), (1, 0)),
    "CSR": (dense(sparse(ELEMENT)), None),
    "CSC": (dense(sparse(ELEMENT)), (1, 0)),
    "DCSR": (sparse(sparse(ELEMENT)), None),
    "DCSC": (sparse(sparse(ELEMENT)), (1, 0)),
    "COO": (sparse(ELEMENT, 2), None),
    "COOR": (sparse(ELEMENT, 2), None),
    "COOC": (sparse(ELEMENT, 2), (1, 0)),
}
"""Section "Equivalent formats" of the specification."""
VALUES = ("int8", "int16", "int32", "int64", "float32", "float64", "complex[float32]", "complex[float64]")
INDICES = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")


def encoded(level: Level, entries: dict[tuple[int, ...], float], shape: tuple[int, ...]) -> tuple[Arrays, list[Any]]:
    """The arrays of a level format, and the coordinates and values in the order in which they are stored."""
    arrays: Arrays = {}
    positions: list[tuple[tuple[int, ...], dict[tuple[int, ...], float]]] = [((), entries)]
    depth = 0
    while level["level_desc"] != "element":
        rank = level["rank"]
        below, pointers = [], [0]
        for at, held in positions:
            every = itertools.product(*map(range, shape[depth : depth + rank]))
            kept = {coord[:rank] for coord in held}
            for index in every if level["level_desc"] == "dense" else sorted(kept):
                below.append((at + index, {c[rank:]: v for c, v in held.items() if c[:rank] == index}))
            pointers.append(len(below))
        if level["level_desc"] == "sparse":
            for mode in range(depth, depth + rank):
                arrays[f"indices_{mode}"] = np.array([at[mode] for at, _ in below], np.int64)
            if depth:
                arrays[f"pointers_to_{depth}"] = np.array(pointers)
        positions, depth, level = below, depth + rank, level["level"]
    return arrays, [(at, held.get((), 0)) for at, held in positions]


def save(path: Path, descriptor: dict[str, Any], arrays: Arrays) -> None:
    """A container as the specification has it, without the package."""
    text = json.dumps({"binsparse": {"version": "0.1.0", **descriptor}, "author": "a test"})
    if path.name.endswith(".npz"):
        np.savez(path, binsparse=np.array(text), **arrays)  # type: ignore[arg-type]
        return
    with h5py.File(path, "w") as file:
        file.attrs["binsparse"] = text
        for name, array in arrays.items():
            file.create_dataset(name, data=array)


def values_of(kind: str, stored: list[Any]) -> np.ndarray:
    numbers = [value for _, value in stored]
    if kind.startswith("complex"):
        return np.array([[v, -v / 2] for v in numbers]).reshape(-1).astype(kind[8:-1])
    return np.array(numbers, kind)


def check(path: Path, format: Any, level: Level, transpose: Any, shape: Any, random: Random, iso: bool = False) -> None:
    order = transpose or tuple(range(len(shape)))
    inner = tuple(shape[mode] for mode in order)
    everywhere = list(itertools.product(*map(range, inner)))
    chosen = sorted(random.sample(everywhere, random.randint(0, len(everywhere))))
    arrays, stored = encoded(level, {at: 7 if iso else random.randint(1, 60) for at in chosen}, inner)
    kind = random.choice(VALUES)
    if iso:
        stored = [(at, 7) for at, _ in stored]
    values = values_of(kind, stored[:1] or [((), 7)] if iso else stored)
    arrays = {name: array.astype(random.choice(INDICES)) for name, array in arrays.items()}
    descriptor = {
        "format": format,
        "shape": shape,
        "number_of_stored_values": len(stored),
        "data_types": {name: str(array.dtype) for name, array in arrays.items()}
        | {"values": f"iso[{kind}]" if iso else kind},
    }
    if format == "custom":
        descriptor["custom"] = {"level": level} | ({"transpose": transpose} if transpose else {})
    save(path, descriptor, {**arrays, "values": values})
    x = stc.read(path)
    wanted = {tuple(at[order.index(mode)] for mode in range(len(shape))): value for at, value in stored}
    found = dict(zip(map(tuple, x.coords.T.tolist()), x.values.real.tolist(), strict=True))
    assert x.shape == tuple(shape)
    assert x.is_coalesced
    assert found == wanted
    if kind.startswith("complex"):
        assert x.values.imag.tolist() == [-value / 2 for value in x.values.real.tolist()]
    else:
        assert str(x.dtype) == f"torch.{kind}"


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("iso", [False, True])
@pytest.mark.parametrize("format", PREDEFINED)
def test_predefined_formats(tmp_path: Path, format: str, iso: bool, suffix: str) -> None:
    level, transpose = PREDEFINED[format]
    for seed in range(6):
        random = Random(seed)
        shape = [random.randint(0, 5) for _ in range(1 if "VEC" in format else 2)]
        check(tmp_path / f"x{suffix}", format, level, transpose, shape, random, iso)


def formats(order: int) -> Iterator[Level]:
    """All level formats of that order."""
    if not order:
        yield ELEMENT
    for rank in range(1, order + 1):
        for level in formats(order - rank):
            yield dense(level, rank)
            yield sparse(level, rank)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_custom_formats(tmp_path: Path, order: int, suffix: str) -> None:
    random = Random(order)
    for level in formats(order):
        transpose = random.choice((None, tuple(random.sample(range(order), order))))
        shape = [random.randint(0, 4) if random.random() < 0.2 else random.randint(1, 4) for _ in range(order)]
        check(tmp_path / f"x{suffix}", "custom", level, transpose, shape, random, random.random() < 0.3)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(
    ("shape", "format"), [((9,), "CVEC"), ((9, 8), "COOR"), ((4, 5, 6), "custom"), ((3,) * 6, "custom")]
)
def test_what_is_written_is_read_by_the_package(
    tmp_path: Path, shape: tuple[int, ...], format: str, suffix: str
) -> None:
    rng = torch.Generator().manual_seed(0)
    coords = torch.stack([torch.randint(0, size, (20,), generator=rng) for size in shape])
    x = stc.SparseTensor(coords, torch.randn(20, generator=rng), shape)
    stc.write(tmp_path / f"x{suffix}", x)
    plain = tmp_path / f"x{suffix[4:]}"
    plain.write_bytes((tmp_path / f"x{suffix}").read_bytes())
    tensor = binsparse.load_binsparse(plain)
    assert (tensor.format, tensor.shape, tensor.number_of_stored_values) == (format, shape, x.nnz)
    custom = binsparse.load_binsparse(plain, alias=False)
    assert np.array_equal(np.stack(custom.level.indices), x.coords)
    assert np.array_equal(custom.level.level.values, x.values)


CSR = {"pointers_to_1": np.array([0, 1, 3, 3, 5, 6]), "indices_1": np.array([3, 1, 4, 1, 2, 3])}
LOWER = {
    "pointers_to_1": np.array([0, 1, 3, 5, 7, 9]),
    "indices_1": np.array([0, 0, 1, 0, 2, 1, 3, 2, 4]),
    "values": np.array([1, 2, 9, 7, 2, 2, 3, 3, 7], np.int8),
}
TYPES = {"pointers_to_1": "int64", "indices_1": "int64"}


def test_the_examples_of_the_specification(tmp_path: Path) -> None:
    """All values the same, and a symmetric matrix."""
    about = {"format": "CSR", "shape": [5, 5], "number_of_stored_values": 6}
    save(
        tmp_path / "x.bsp.h5",
        {**about, "data_types": {**TYPES, "values": "iso[int8]"}},
        {**CSR, "values": np.array([7], np.int8)},
    )
    dense = torch.zeros(5, 5, dtype=torch.int8)
    dense[[0, 1, 1, 3, 3, 4], [3, 1, 4, 1, 2, 3]] = 7
    assert torch.equal(stc.read(tmp_path / "x.bsp.h5").to_dense(), dense)
    about = {"format": "CSR", "shape": [5, 5], "number_of_stored_values": 9, "structure": "symmetric_lower"}
    save(tmp_path / "x.bsp.h5", {**about, "data_types": {**TYPES, "values": "int8"}}, LOWER)
    whole = [[1, 2, 7, 0, 0], [2, 9, 0, 2, 0], [7, 0, 2, 0, 3], [0, 2, 0, 3, 0], [0, 0, 3, 0, 7]]
    assert stc.read(tmp_path / "x.bsp.h5").to_dense().tolist() == whole


@pytest.mark.parametrize("triangle", ["lower", "upper"])
@pytest.mark.parametrize(
    ("kind", "mirrored"), [("symmetric", 1 + 2j), ("hermitian", 1 - 2j), ("skew_symmetric", -1 - 2j)]
)
def test_structures(tmp_path: Path, kind: str, mirrored: complex, triangle: str) -> None:
    at = ([2], [1]) if triangle == "lower" else ([1], [2])
    arrays = {"indices_0": np.array(at[0]), "indices_1": np.array(at[1]), "values": np.array([1.0, 2.0])}
    types = {"indices_0": "int64", "indices_1": "int64", "values": "complex[float64]"}
    about = {"format": "COO", "shape": [3, 3], "number_of_stored_values": 1, "data_types": types}
    save(tmp_path / "x.bsp.npz", {**about, "structure": f"{kind}_{triangle}"}, arrays)
    x = stc.read(tmp_path / "x.bsp.npz").to_dense()
    other = "upper" if triangle == "lower" else "lower"
    assert x[at[0][0], at[1][0]] == 1 + 2j
    assert x[at[1][0], at[0][0]] == mirrored
    save(tmp_path / "x.bsp.npz", {**about, "structure": f"{kind}_{other}"}, arrays)
    with pytest.raises(IOFormatError, match=f"entries in the other triangle of a matrix of structure {kind}_{other}"):
        stc.read(tmp_path / "x.bsp.npz")


GOOD: dict[str, Any] = {"format": "CSR", "shape": [5, 5], "number_of_stored_values": 6}
FAULTS: dict[str, tuple[dict[str, Any], Arrays, str]] = {
    "fill": ({"fill": True}, {"fill_value": np.array([2.0])}, "fill value is 2.0; that of a sparse tensor is 0"),
    "nan": ({"fill": True}, {"fill_value": np.array([np.nan])}, "fill value is nan"),
    "structure": ({"structure": "triangular"}, {}, "structure triangular of a tensor of order 2"),
    "version": ({"version": "2.0.0"}, {}, "version"),
    "format": ({"format": "ELL"}, {}, "unrecognized format 'ELL'"),
    "no shape": ({"shape": None}, {}, "x.bsp"),
    "another shape": ({"shape": [4, 5]}, {}, "pointers to level 1 do not divide its 6 indices"),
    "a small shape": ({"shape": [5, 4]}, {}, "size of mode 1 is 4"),
    "negative": ({"shape": [5, -5]}, {}, "non-negative"),
    "many modes": ({"shape": [1] * 65, "format": "custom", "custom": {"level": sparse(ELEMENT, 65)}}, {}, "x.bsp"),
    "no modes": ({"shape": [], "format": "custom", "custom": {"level": ELEMENT}}, {}, "a tensor of 0 modes"),
    "nested": ({"format": "custom", "custom": json.loads("[" * 900 + "]" * 900)}, {}, "x.bsp"),
    "pointers": ({}, {"pointers_to_1": np.array([0, 4, 3, 3, 5, 6])}, "negative"),
    "far pointers": ({}, {"pointers_to_1": np.array([0, 2**62, 3, 3, 5, 6])}, "x.bsp"),
    "an end": ({}, {"pointers_to_1": np.array([0, 1, 3, 3, 5, 7])}, "do not divide"),
    "floats": ({}, {"indices_1": np.array([3.5, 1, 4, 1, 2, 3])}, "integers of int64, found float64"),
    "outside": ({}, {"indices_1": np.array([3, 1, 4, 1, 2, 5])}, "size of mode 1 is 5"),
    "below": ({}, {"indices_1": np.array([3, 1, 4, 1, 2, -1])}, "out of range in mode 1"),
    "few values": ({}, {"values": np.ones(5)}, "has size 5, expected 6"),
    "a number": ({"number_of_stored_values": 7}, {"values": np.ones(7)}, "6 values should be stored, found 7"),
}  # fmt: skip


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("fault", FAULTS)
def test_faults(tmp_path: Path, fault: str, suffix: str) -> None:
    change, replaced, words = FAULTS[fault]
    arrays = {**CSR, "values": np.ones(6), **replaced}
    types = {name: str(array.dtype) for name, array in arrays.items()}
    save(tmp_path / f"x{suffix}", {**GOOD, "data_types": types, **change}, arrays)
    with pytest.raises(IOFormatError, match=words) as caught:
        stc.read(tmp_path / f"x{suffix}")
    assert f"x{suffix}" in str(caught.value)
    assert len(str(caught.value)) < 500


def test_dtypes_that_torch_lacks(tmp_path: Path) -> None:
    for kind, values in (("uint64", np.ones(6, np.uint64)), ("uint16", np.ones(6, np.uint16))):
        save(tmp_path / "x.bsp.h5", {**GOOD, "data_types": {**TYPES, "values": kind}}, {**CSR, "values": values})
        assert stc.read(tmp_path / "x.bsp.h5").dtype == (torch.int64 if kind == "uint64" else torch.int32)
        assert stc.read(tmp_path / "x.bsp.h5", dtype=torch.float32).values.tolist() == [1.0] * 6


def test_memory_is_asked_for_before_it_is_taken(tmp_path: Path) -> None:
    save(
        tmp_path / "x.bsp.h5",
        {
            "format": "DMAT",
            "shape": [10**6, 10**6],
            "number_of_stored_values": 10**12,
            "data_types": {"values": "iso[int8]"},
        },
        {"values": np.ones(1, np.int8)},
    )
    with pytest.raises(OutOfMemoryError, match=r"x.bsp.h5: 1,000,000,000,000 values would take 16,000,000,"):
        stc.read(tmp_path / "x.bsp.h5")
    with h5py.File(tmp_path / "y.bsp.h5", "w") as file:  # a million times smaller on disk
        file.attrs["binsparse"] = json.dumps(
            {
                "binsparse": {
                    "version": "0.1.0",
                    "format": "DVEC",
                    "shape": [10**10],
                    "number_of_stored_values": 10**10,
                    "data_types": {"values": "int8"},
                }
            }
        )
        file.create_dataset("values", (10**10,), np.int8, chunks=(10**6,), compression="gzip")
    with (
        stc.options(memory_limit=10**9),
        pytest.raises(OutOfMemoryError, match="10,000,000,000 values would take 160,000,"),
    ):
        stc.read(tmp_path / "y.bsp.h5")


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("size", [10**9, 2**62])
@pytest.mark.parametrize("below", [dense(ELEMENT), dense(dense(ELEMENT)), dense(ELEMENT, 2)])
def test_a_dense_level_of_nothing_takes_nothing(tmp_path: Path, suffix: str, size: int, below: Level) -> None:
    """Its size is in the descriptor alone: a file of a kilobyte took 8 bytes a position."""
    shape = [3, *[size] * str(below).replace("'rank': 2", "rank rank").count("rank")]
    descriptor = {
        "format": "custom",
        "custom": {"level": sparse(below)},
        "shape": shape,
        "number_of_stored_values": 0,
        "data_types": {"indices_0": "int64", "values": "float32"},
    }
    save(tmp_path / f"x{suffix}", descriptor, {"indices_0": np.zeros(0, np.int64), "values": np.zeros(0, np.float32)})
    with stc.options(memory_limit=100_000):
        x = stc.read(tmp_path / f"x{suffix}")
    assert (x.shape, x.nnz) == (tuple(shape), 0)


def test_one_value_for_all_is_counted_before_it_is_written_out(tmp_path: Path) -> None:
    kinds = {"values": "complex[iso[float32]]"}
    descriptor = {"format": "DVEC", "shape": [10**9], "data_types": kinds, "number_of_stored_values": 10**9}
    save(tmp_path / "x.bsp.npz", descriptor, {"values": np.ones(1, np.float32)})
    with stc.options(memory_limit="1GB"), pytest.raises(OutOfMemoryError, match=r"x\.bsp\.npz: 1,000,000,000 values"):
        stc.read(tmp_path / "x.bsp.npz")


def test_arrays_together_heed_the_limit(tmp_path: Path) -> None:
    stc.write(tmp_path / "x.bsp.npz", stc.SparseTensor(torch.arange(4000).repeat(3, 1), torch.ones(4000)))
    with stc.options(memory_limit=100_000), pytest.raises(OutOfMemoryError, match=r"x\.bsp\.npz: "):
        stc.read(tmp_path / "x.bsp.npz")


def test_other_files_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(bytes(48))
    for link in ("external", "soft", "elsewhere"):
        path = tmp_path / "x.bsp.h5"
        save(path, {**GOOD, "data_types": {**TYPES, "values": "float64"}}, dict(CSR))
        with h5py.File(tmp_path / "y.h5", "w") as other:
            other["values"] = np.ones(6)
        with h5py.File(path, "a") as file:
            if link == "external":
                file.create_dataset("values", (6,), np.float64, external=[(str(tmp_path / "secret"), 0, 48)])
            else:
                file["values"] = h5py.ExternalLink("y.h5", "values") if link == "elsewhere" else h5py.SoftLink("/x")
        with pytest.raises(IOFormatError, match=r"values (lies in other files|is no array)"):
            stc.read(path)


@pytest.mark.parametrize("missing", ["binsparse", "h5py"])
def test_the_extra_is_named(tmp_path: Path, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    for call in (
        lambda: stc.read(tmp_path / "x.bsp.h5"),
        lambda: stc.write(tmp_path / "x.bsp.h5", stc.SparseTensor([[0]], [1.0])),
    ):
        with pytest.raises(ImportError, match=r'pip install "sparsetc\[binsparse\]"'):
            call()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("index", [0, 7])
def test_a_heap_of_texts_that_has_no_end_is_refused(tmp_path: Path, index: int) -> None:
    """HDF5 goes from object to object by their sizes: by one of 0 bytes it never arrives, nor by one of 2**64 - 16."""
    path = tmp_path / "x.bsp.h5"
    stc.write(path, stc.SparseTensor([[0, 1], [1, 2]], [1.0, 2.0], (2, 3)))
    data = bytearray(path.read_bytes())
    text = data.index(b"GCOL") + 16
    free = text + 16 + -(-int.from_bytes(data[text + 8 : text + 16], "little") // 8) * 8
    assert data[free : free + 2] == b"\0\0"
    data[free : free + 16] = index.to_bytes(8, "little") + (2**64 - 16 if index else 0).to_bytes(8, "little")
    path.write_bytes(data)
    done = processes.run(["-c", f"import sparsetc as stc; stc.read({str(path)!r})"], timeout=100)
    assert "IOFormatError" in done.stderr
    assert "a damaged heap of HDF5" in done.stderr


@pytest.mark.parametrize("kind", [0x25, 0x10, 0x13])
def test_a_description_that_is_no_text_is_refused(tmp_path: Path, kind: int) -> None:
    """Of sequences of another type HDF5 reads addresses, at which there may be anything."""
    path = tmp_path / "x.bsp.h5"
    stc.write(path, stc.SparseTensor([[0, 1], [1, 2]], [1.0, 2.0], (2, 3)))
    data = bytearray(path.read_bytes())
    data[data.index(b"\x19\x01\x01\0\x10\0\0\0") + 1] = kind
    path.write_bytes(data)
    done = processes.run(["-c", f"import sparsetc as stc; stc.read({str(path)!r})"], timeout=100)
    assert "IOFormatError" in done.stderr


@pytest.mark.parametrize("block", [lines.BLOCK, 37, 41, 64])
@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_a_description_longer_than_the_file_is_refused_before_memory_is_taken(
    tmp_path: Path, libver: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any version of the message, wherever it lies in the blocks that are read."""
    monkeypatch.setattr(lines, "BLOCK", block)
    h5py = pytest.importorskip("h5py")
    path, again = tmp_path / "x.bsp.h5", tmp_path / "again.bsp.h5"
    x = stc.SparseTensor([[0, 1], [1, 2]], [1.0, 2.0], (2, 3))
    stc.write(path, x)
    with h5py.File(path) as old, h5py.File(again, "w", libver=libver) as new:
        text = old.attrs["binsparse"]
        new.attrs["binsparse"] = text
        for name in old:
            old.copy(name, new)
    assert torch.equal(stc.read(again).to_dense(), x.to_dense())
    data = again.read_bytes()
    length = len(text).to_bytes(4, "little")
    again.write_bytes(data.replace(length, (2**31 - 1).to_bytes(4, "little")))
    with pytest.raises(IOFormatError, match="a description longer than the file"):
        stc.read(again)
