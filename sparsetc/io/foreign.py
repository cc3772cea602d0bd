"""Files of other programs, read and never written: one table of suffixes and readers, and what they have in common.

In: a path. Out: a SparseTensor. Each reader calls the library of its files where that is installed.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from sparsetc.io import lines, memory, npz, numbers, parquet
from sparsetc.support import required
from sparsetc.tensor.inputs import as_values
from sparsetc.tensor.sparse_tensor import SparseTensor

PARTS = ("data", "indices", "indptr"), ("data", "ir", "jc")
"""Names of a matrix's values, inner indices and starts in HDF5: of AnnData and 10x Genomics, and of MATLAB."""
HEAP = b"GCOL\x01\0\0\0"
"""The first bytes of a heap of texts in HDF5."""
TEN_X = "matrix.mtx.gz", "matrix.mtx"
"""The matrix in a folder of 10x Genomics."""
SAME = [(0, 1, 2, 3), (1, 0, 2, 3), (0, 1, 3, 2), (1, 0, 3, 2)]
"""Orders of indices in which an integral (ij|kl) over real orbitals is the same, but for exchanging the pairs."""


def read(path: str, suffix: str, dtype: torch.dtype | None) -> SparseTensor:
    """Return the tensor in a file whose suffix `WHOLE` has, of ``dtype``, or of the file's own.

    Raises:
        IOFormatError: a file that its library refuses, or that holds no one sparse tensor, or values of another dtype.
        OutOfMemoryError: the tensor would pass the memory limit, or memory did not suffice.
        FileNotFoundError: no such file.
        ImportError: the library is not installed.
    """
    memory.on_disk(path).close()  # else some libraries say in words of their own that there is no such file
    with memory.of_file(path, Exception if suffix in READERS else ValueError):  # of libraries anything may come
        x = WHOLE[suffix](path)
        if dtype is not None:
            memory.check(path, f"its values as {dtype}", x.values.numel() * (2 * dtype.itemsize + 2))
        return numbers.with_dtype(x, dtype)


def matrix_of_folder(path: str) -> str:
    """Return the path of the matrix in a folder of 10x Genomics; any other path is returned as it is."""
    inside = [Path(path, name) for name in TEN_X]
    return next((os.fspath(file) for file in inside if file.is_file()), path)


def _scipy_io(path: str) -> Any:
    return required("scipy.io", f'{path} is read by scipy.io: pip install "sparsetc[io]"')


def _hdf5(path: str) -> SparseTensor:
    """A matrix of AnnData, of 10x Genomics or of MATLAB 7.3: by columns unless it says that it is by rows."""
    h5py = required("h5py", f"{path} is read by h5py: pip install h5py")

    def array(group: Any, name: str) -> np.ndarray:
        data = group[name]
        here = isinstance(group.get(name, getlink=True), h5py.HardLink) and not (data.external or data.is_virtual)
        if not here or data.ndim != 1 or data.dtype.kind not in "biuf":
            raise ValueError(f"{name} is no array of numbers of one dimension in this file")
        memory.check(path, f"array {name}", 3 * data.nbytes)
        return data[()]  # type: ignore[no-any-return]

    with memory.on_disk(path) as raw, h5py.File(_checked(raw), "r") as file:
        groups = {name: file[name] for name in file if isinstance(file.get(name, getlink=True), h5py.HardLink)}
        parts = {name: _parts(group) for name, group in groups.items() if isinstance(group, h5py.Group)}
        matrices = [name for name, names in parts.items() if names]
        name = _only("X" if "X" in matrices else "", matrices, f"h5py.File({path!r})[name]")
        group, attributes = groups[name], groups[name].attrs
        data, inner, outer = (array(group, part) for part in parts[name])
        by_rows = str(attributes.get("encoding-type", attributes.get("h5sparse_format", ""))).startswith("csr")
        shape = attributes.get("shape", attributes.get("h5sparse_shape"))
        if shape is None:
            shape = array(group, "shape") if "shape" in group else (attributes["MATLAB_sparse"], outer.size - 1)
    compressed: Any = torch.sparse_csr_tensor if by_rows else torch.sparse_csc_tensor
    starts, indices = (torch.from_numpy(index.astype(np.int64)) for index in (outer, inner))
    values, sizes = as_values(data), tuple(map(int, shape))
    return SparseTensor.from_torch(compressed(starts, indices, values, sizes, check_invariants=True))


def _checked(raw: IO[bytes]) -> IO[bytes]:
    """Return the file; ValueError for a heap with an object of no bytes, in front of which HDF5 stays for ever."""
    begin, seen = 0, set[int]()
    while text := raw.read(lines.BLOCK):
        for heap in re.finditer(re.escape(HEAP), text):
            raw.seek(begin + heap.start() + 8)
            end = begin + heap.start() + int.from_bytes(raw.read(8), "little")
            at = begin + heap.start() + 16
            while at + 16 <= end and at not in seen:
                seen.add(at)
                raw.seek(at)
                number, size = struct.unpack("<H6xQ", raw.read(16).ljust(16, b"\1"))
                step = (size + 23) // 8 * 8 % 2**64 if number else size  # number 0 is what is free
                if step == 0:
                    raise ValueError("a damaged heap of HDF5")
                at += step
        begin += len(text) - (len(HEAP) - 1 if len(text) == lines.BLOCK else 0)
        raw.seek(begin)
    raw.seek(0)
    return raw


def _parts(group: Any) -> tuple[str, ...]:
    return next((names for names in PARTS if all(name in group for name in names)), ())


def _only(preferred: str, matrices: list[str], how: str) -> str:
    """Return the only name. Raise ValueError, with advice how to read one of several, if there is not exactly one."""
    if preferred or len(matrices) == 1:
        return preferred or matrices[0]
    names = ", ".join(map(repr, matrices))[:100]
    held = f"{len(matrices)} sparse matrices: {names}" if matrices else "no sparse matrices"
    raise ValueError(
        f"holds {held}; read what you want by {how}, and give scipy's matrices to SparseTensor.from_scipy, others to "
        "SparseTensor.from_dense"
    )


def _matlab(path: str) -> SparseTensor:
    try:
        variables = _scipy_io(path).loadmat(path)
    except NotImplementedError:  # version 7.3, which is HDF5
        return _hdf5(path)
    sparse = [name for name, variable in variables.items() if hasattr(variable, "tocoo")]
    return SparseTensor.from_scipy(variables[_only("", sparse, f"scipy.io.loadmat({path!r})[name]")])


def _torch(path: str) -> SparseTensor:
    loaded = torch.load(path, map_location="cpu", weights_only=True)
    sparse = SparseTensor.coerce(loaded)
    if sparse is None:
        raise ValueError(f"holds no sparse tensor but a {type(loaded).__name__}; torch.load gives it")
    return sparse


def _smtx(path: str) -> SparseTensor:
    """A pattern of DLMC: a line of rows, columns and entries, one of starts of rows, one of columns. Values are 1."""
    head, starts, columns = [*_text(path).replace(",", " ").split("\n"), "", ""][:3]
    rows, width, entries = map(int, head.split())
    outer, inner = (torch.from_numpy(np.array(line.split(), np.int64)) for line in (starts, columns))
    return SparseTensor.from_torch(
        torch.sparse_csr_tensor(outer, inner, torch.ones(entries), (rows, width), check_invariants=True)
    )


def _fcidump(path: str) -> SparseTensor:
    """The integrals (ij|kl) over real orbitals, in all eight orders of their indices."""
    head, *body = re.split(r"&END|^\s*/\s*$", _text(path), maxsplit=1, flags=re.MULTILINE | re.IGNORECASE)
    orbitals = re.search(r"NORB\s*=\s*(\d+)", head, re.IGNORECASE)
    if orbitals is None or not body or re.search(r"UHF\s*=\s*\.?T|IUHF\s*=\s*1", head, re.IGNORECASE):
        raise ValueError("no FCIDUMP of restricted orbitals, '&FCI NORB=..., &END' and lines 'value i j k l'")
    table = np.array(body[0].replace("D", "E").replace("d", "e").split(), np.float64).reshape(-1, 5)
    pairs = table[(table[:, 1:] > 0).all(1)]
    once = pairs[:, 1:].astype(np.int64).T - 1
    coords = np.concatenate([once[[*order]] for same in SAME for order in (same, same[2:] + same[:2])], 1)
    coords, first = np.unique(coords, axis=1, return_index=True)
    return SparseTensor(coords, pairs[first % len(pairs), 0], (int(orbitals[1]),) * 4)


def _text(path: str) -> str:
    memory.check(path, "its text and numbers", 20 * os.path.getsize(path))
    return Path(path).read_text(encoding="utf-8")


READERS: dict[str, Callable[[str], SparseTensor]] = {
    **dict.fromkeys((".h5", ".h5ad", ".hdf5"), _hdf5),
    ".mat": _matlab,
    **dict.fromkeys(
        (".rua", ".rsa", ".pua", ".psa", ".hb", ".rb"),
        lambda path: SparseTensor.from_scipy(_scipy_io(path).hb_read(path)),
    ),
    **dict.fromkeys((".pt", ".pth"), _torch),
    ".smtx": _smtx,
    "fcidump": _fcidump,
}
"""Readers by suffix."""
WHOLE = {**READERS, ".npz": npz.read, ".parquet": parquet.read}
"""Readers of all files that are arrays, and are read as a whole."""
