"""Files of other programs, each made by the library that it belongs to where that is installed."""

from __future__ import annotations

import bz2
import gzip
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
import torch

import sparsetc as stc
from sparsetc.io import foreign

DENSE = torch.tensor([[0.0, 1.5, 0, 0], [2.0, 0, 0, -3.0], [0, 0, 4.0, 0]], dtype=torch.float64)


def holds(path: Path, expected: torch.Tensor = DENSE, **settings: Any) -> None:
    found = stc.read(path, **settings)
    torch.testing.assert_close(found.to_dense(), expected.to(found.dtype))


# -- single cells ------------------------------------------------------------------------------------------------------


def compressed(layout: str) -> tuple[Any, Any]:
    sparse = pytest.importorskip("scipy.sparse")
    h5py = pytest.importorskip("h5py")
    return h5py, getattr(sparse, f"{layout}_array")(DENSE.numpy())


@pytest.mark.parametrize("layout", ["csr", "csc"])
@pytest.mark.parametrize("old", [False, True])
def test_h5ad(tmp_path: Path, layout: str, old: bool) -> None:
    """As AnnData lays it out, today and before version 0.7; a layer beside X does not matter."""
    h5py, matrix = compressed(layout)
    with h5py.File(tmp_path / "cells.h5ad", "w") as file:
        for name in ("X", "layers"):
            group = file.create_group(name)
            for part in ("data", "indices", "indptr"):
                group[part] = getattr(matrix, part)
            group.attrs["h5sparse_format" if old else "encoding-type"] = layout if old else f"{layout}_matrix"
            group.attrs["h5sparse_shape" if old else "shape"] = matrix.shape
    holds(tmp_path / "cells.h5ad")
    holds(tmp_path / "cells.h5ad", dtype=torch.float32)


def test_h5ad_of_anndata(tmp_path: Path) -> None:
    anndata = pytest.importorskip("anndata")
    sparse = pytest.importorskip("scipy.sparse")
    anndata.AnnData(sparse.csr_matrix(DENSE.numpy())).write_h5ad(tmp_path / "cells.h5ad")
    holds(tmp_path / "cells.h5ad")


def test_10x(tmp_path: Path) -> None:
    """A matrix of genes and cells, as Cell Ranger writes it: HDF5, and a folder."""
    h5py, matrix = compressed("csc")
    with h5py.File(tmp_path / "filtered.h5", "w") as file:
        group = file.create_group("matrix")
        for part in ("data", "indices", "indptr"):
            group[part] = getattr(matrix, part)
        group["shape"], group["barcodes"] = matrix.shape, [b"AAAC-1", b"AAAG-1", b"AAAT-1", b"AACA-1"]
        group.create_group("features")
    holds(tmp_path / "filtered.h5")
    scipy_io = pytest.importorskip("scipy.io")
    scipy_io.mmwrite(tmp_path / "matrix.mtx", matrix.tocoo())
    holds(tmp_path)
    (tmp_path / "matrix.mtx.gz").write_bytes(gzip.compress((tmp_path / "matrix.mtx").read_bytes()))
    (tmp_path / "matrix.mtx").unlink()
    holds(tmp_path)


def test_what_hdf5_does_not_hold(tmp_path: Path) -> None:
    h5py, matrix = compressed("csr")
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file["dense"] = DENSE.numpy()
    with pytest.raises(stc.IOFormatError, match=r"holds no sparse matrices; read what you want by h5py"):
        stc.read(path)
    with h5py.File(path, "w") as file:
        for name in ("a", "b"):
            for part in ("data", "indices", "indptr"):
                file[f"{name}/{part}"] = getattr(matrix, part)
    with pytest.raises(stc.IOFormatError, match="holds 2 sparse matrices: 'a', 'b'; read"):
        stc.read(path)
    for part, wrong in (("indptr", [0, 9, 9, 9]), ("indices", [9, 9, 9, 9]), ("indptr", [0, 3, 1, 4])):
        with h5py.File(path, "w") as file:
            for one in ("data", "indices", "indptr"):
                file[f"X/{one}"] = wrong if one == part else getattr(matrix, one)
            file["X"].attrs["shape"], file["X"].attrs["encoding-type"] = matrix.shape, "csr_matrix"
        with pytest.raises(stc.IOFormatError, match=r"x\.h5"):
            stc.read(path)
    with h5py.File(path, "w") as file:
        for one in ("data", "indices", "indptr"):
            file.create_dataset(f"X/{one}", 10**9, "i8", chunks=(10**6,), compression="gzip")
    with pytest.raises(stc.OutOfMemoryError), stc.options(memory_limit="1GB"):
        stc.read(path)
    path.write_bytes(b"no HDF5 at all")
    with pytest.raises(stc.IOFormatError, match=r"x\.h5"):
        stc.read(path)


# -- matrices of MATLAB, Harwell-Boeing, DLMC and torch ----------------------------------------------------------------


def test_matlab(tmp_path: Path) -> None:
    scipy_io = pytest.importorskip("scipy.io")
    _, matrix = compressed("csc")
    scipy_io.savemat(tmp_path / "x.mat", {"A": matrix, "b": np.ones(3)})
    holds(tmp_path / "x.mat")
    scipy_io.savemat(tmp_path / "x.mat", {"A": matrix, "B": matrix})
    with pytest.raises(stc.IOFormatError, match=r"holds 2 sparse matrices: 'A', 'B'; read .* scipy.io.loadmat"):
        stc.read(tmp_path / "x.mat")


def test_matlab_7_3(tmp_path: Path) -> None:
    """MATLAB's HDF5: 512 bytes of its own, then a group of data, row numbers and starts of columns."""
    h5py, matrix = compressed("csc")
    pytest.importorskip("scipy")
    path = tmp_path / "x.mat"
    with h5py.File(path, "w", userblock_size=512) as file:
        group = file.create_group("A")
        group["data"], group["ir"] = matrix.data, matrix.indices.astype(np.uint64)
        group["jc"], group.attrs["MATLAB_sparse"] = matrix.indptr.astype(np.uint64), np.uint64(3)
        file["b"] = np.ones((1, 3))
    with path.open("r+b") as raw:
        raw.write(b"MATLAB 7.3 MAT-file".ljust(124) + b"\x00\x02IM")
    holds(path)


def test_harwell_boeing(tmp_path: Path) -> None:
    scipy_io = pytest.importorskip("scipy.io")
    _, matrix = compressed("csc")
    scipy_io.hb_write(tmp_path / "x.rua", matrix)
    holds(tmp_path / "x.rua")
    text = (tmp_path / "x.rua").read_text().replace("RUA", "RSA")
    (tmp_path / "x.rsa").write_text(text)
    with pytest.raises(stc.IOFormatError, match="Only unsymmetric"):
        stc.read(tmp_path / "x.rsa")


def test_smtx(tmp_path: Path) -> None:
    (tmp_path / "x.smtx").write_text("3, 4, 4\n0 1 3 4\n1 0 3 2\n")
    holds(tmp_path / "x.smtx", (DENSE != 0).float())
    for wrong in ("3, 4, 4\n0 1 3 4\n1 0 3 4\n", "3, 4\n0 1\n", "", "3, 4, 5\n0 1 3 4\n1 0 3 2\n"):
        (tmp_path / "x.smtx").write_text(wrong)
        with pytest.raises(stc.IOFormatError, match=r"x\.smtx"):
            stc.read(tmp_path / "x.smtx")


def test_tensors_of_torch(tmp_path: Path) -> None:
    x = stc.SparseTensor.from_dense(DENSE)
    for saved in (x, x.to_torch(), DENSE.to_sparse_csr()):
        torch.save(saved, tmp_path / "x.pt")
        holds(tmp_path / "x.pt")
    for other in ({"a": DENSE}, DENSE):
        torch.save(other, tmp_path / "x.pt")
        with pytest.raises(stc.IOFormatError, match="holds no sparse tensor"):
            stc.read(tmp_path / "x.pt")
    torch.save(Path, tmp_path / "x.pt")  # nothing is executed that a file names
    with pytest.raises(stc.IOFormatError, match=r"x\.pt"):
        stc.read(tmp_path / "x.pt")


# -- integrals ---------------------------------------------------------------------------------------------------------


def test_fcidump(tmp_path: Path) -> None:
    """Of two orbitals, as PySCF writes it: unique integrals, one-electron ones, the energy of the core."""
    head = " &FCI NORB=   2,NELEC= 2,MS2=0,\n  ORBSYM=1,1,\n  ISYM=1,\n &END\n"
    unique = {(1, 1, 1, 1): 0.5, (2, 1, 1, 1): 0.25, (2, 1, 2, 1): 0.125, (2, 2, 1, 1): 0.375, (2, 2, 2, 2): 1.5}
    lines = [f"  {value:.16E}    {' '.join(map(str, at))}\n" for at, value in unique.items()]
    lines += [" -1.25D+00 1 1 0 0\n", "  0.7 0 0 0 0\n"]
    expected = torch.zeros(2, 2, 2, 2, dtype=torch.float64)
    for (i, j, k, m), value in unique.items():
        for a, b in ((i, j), (j, i)):
            for c, d in ((k, m), (m, k)):
                expected[a - 1, b - 1, c - 1, d - 1] = expected[c - 1, d - 1, a - 1, b - 1] = value
    for name, end in (("FCIDUMP", " &END\n"), ("water.fcidump", " /\n")):
        (tmp_path / name).write_text(head.replace(" &END\n", end) + "".join(lines))
        holds(tmp_path / name, expected)
    for wrong in (head.replace("MS2", "UHF=.TRUE.,MS2"), "1 2 3\n", head + "0.5 1 1 1\n", head + "0.5 3 3 3 3\n"):
        (tmp_path / "FCIDUMP").write_text(wrong)
        with pytest.raises(stc.IOFormatError, match="FCIDUMP"):
            stc.read(tmp_path / "FCIDUMP")


def test_fcidump_of_pyscf(tmp_path: Path) -> None:
    fcidump = pytest.importorskip("pyscf.tools.fcidump")
    rng = np.random.default_rng(0)
    pairs = rng.random((6, 6))  # of three orbitals, by fours in all symmetries
    fcidump.from_integrals(str(tmp_path / "FCIDUMP"), np.eye(3), pairs + pairs.T, 3, 2)
    restored = pytest.importorskip("pyscf.ao2mo").restore(1, pairs + pairs.T, 3)
    holds(tmp_path / "FCIDUMP", torch.from_numpy(restored))


# -- text --------------------------------------------------------------------------------------------------------------

ZIPPED = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}


@pytest.mark.parametrize("zipped", [*ZIPPED, "zst"])
@pytest.mark.parametrize("suffix", ["tns", "mtx"])
def test_compressed_text(tmp_path: Path, suffix: str, zipped: str) -> None:
    stc.write(tmp_path / f"x.{suffix}", stc.SparseTensor.from_dense(DENSE))
    text = (tmp_path / f"x.{suffix}").read_bytes()
    if zipped == "zst":
        arrow = pytest.importorskip("pyarrow")
        compress = lambda raw: arrow.compress(raw, "zstd", asbytes=True)  # noqa: E731
    else:
        compress = ZIPPED[zipped]
    path = tmp_path / f"x.{suffix}.{zipped}"
    path.write_bytes(compress(text))
    holds(path)
    for damaged in (compress(text)[:-9], compress(text)[:12] + b"\x55" * 20, b"plain text"):
        path.write_bytes(damaged)
        with pytest.raises(stc.IOFormatError, match=path.name):
            stc.read(path)


def test_packing_files_of_others(tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    pytest.importorskip("pyarrow")
    torch.save(DENSE.to_sparse_csr(), tmp_path / "x.pt")
    (tmp_path / "x.tns.bz2").write_bytes(bz2.compress(b"# shape: 3 4\n1 2 1.5\n2 1 2\n2 4 -3\n3 3 4\n"))
    for source in ("x.pt", "x.tns.bz2"):
        stc.pack(tmp_path / source, tmp_path / "x.parquet")
        holds(tmp_path / "x.parquet")


def test_text_of_pyttb(tmp_path: Path) -> None:
    pyttb = pytest.importorskip("pyttb")
    x = stc.SparseTensor.from_dense(DENSE)
    theirs = pyttb.sptensor(x.coords.numpy().T, x.values.numpy()[:, None], x.shape)
    pyttb.export_data(theirs, str(tmp_path / "x.tns"))
    holds(tmp_path / "x.tns")


def test_extended_frostt(tmp_path: Path) -> None:
    """As MLIR writes it."""
    body = "1 2 1.5\n2 1 2\n2 4 -3\n3 3 4\n"
    (tmp_path / "x.tns").write_text(f"# extended FROSTT format\n2 4\n3 4\n{body}")
    holds(tmp_path / "x.tns")
    (tmp_path / "x.tns").write_text(f"# extended FROSTT format\n2 5\n3 4\n{body}")
    with pytest.raises(stc.IOFormatError, match="declares 5 entries, the file has 4"):
        stc.read(tmp_path / "x.tns")
    for wrong in ("sptensor\n2\n3 4\n", "sptensor\n2\n3 4\nx\n1 1 1\n", "sptensor\n3\n3 4\n1\n1 1 1\n", "sptensor\n"):
        (tmp_path / "x.tns").write_text(wrong)
        with pytest.raises(stc.IOFormatError, match=r"x\.tns"):
            stc.read(tmp_path / "x.tns")


def test_what_is_answered_with_a_way(tmp_path: Path) -> None:
    (tmp_path / "x.tns").write_text("0 1 1.5\n1 0 2\n")
    with pytest.raises(stc.IOFormatError, match=r"line 1: .*counts from 0: t = numpy\.loadtxt") as caught:
        stc.read(tmp_path / "x.tns")
    names: dict[str, Any] = {"numpy": np, "path": tmp_path / "x.tns", "SparseTensor": stc.SparseTensor}
    loaded, made = str(caught.value).partition("from 0: ")[2].rpartition(": '")[0].split("; ")
    exec(loaded, names)
    assert eval(made, names).to_dense().tolist() == [[0, 1.5], [2, 0]]
    scipy_io = pytest.importorskip("scipy.io")
    scipy_io.mmwrite(tmp_path / "x.mtx", DENSE.numpy())
    with pytest.raises(stc.IOFormatError, match=r"a dense matrix, for .*mmread") as caught:
        stc.read(tmp_path / "x.mtx")
    assert torch.equal(stc.SparseTensor.from_dense(scipy_io.mmread(tmp_path / "x.mtx")).to_dense(), DENSE)


@pytest.mark.parametrize("suffix", foreign.READERS)
def test_missing_files_and_dtypes(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(FileNotFoundError):
        stc.read(tmp_path / f"x{suffix}")
    with pytest.raises(stc.DtypeError):
        stc.read(tmp_path / f"x{suffix}", dtype=torch.complex32)
    with pytest.raises(stc.IOFormatError, match="unknown suffix"):
        stc.write(tmp_path / f"x{suffix}", stc.eye(3))


def test_who_reads_what_we_write(tmp_path: Path) -> None:
    """As the page says."""
    scipy = pytest.importorskip("scipy")
    pandas = pytest.importorskip("pandas")
    sparse = pytest.importorskip("sparse")
    x = stc.SparseTensor.from_dense(DENSE)
    rows = np.column_stack((*x.coords.numpy(), x.values.numpy()))
    for suffix in ("mtx", "mtx.gz", "tns", "npz", "parquet"):
        stc.write(tmp_path / f"x.{suffix}", x)
    for suffix in ("mtx", "mtx.gz"):
        assert (scipy.io.mmread(tmp_path / f"x.{suffix}").toarray() == DENSE.numpy()).all()
    table = pandas.read_parquet(tmp_path / "x.parquet")
    assert [*table.columns] == ["i0", "i1", "value"]
    assert (table.to_numpy() == rows).all()
    assert (np.loadtxt(tmp_path / "x.tns") - [1, 1, 0] == rows).all()
    arrays = np.load(tmp_path / "x.npz")
    assert (np.column_stack((*arrays["coords"], arrays["values"])) == rows).all()
    scipy.sparse.save_npz(tmp_path / "scipy.npz", x.to_scipy())
    sparse.save_npz(tmp_path / "pydata.npz", x.to_pydata())
    assert (scipy.sparse.load_npz(tmp_path / "scipy.npz").toarray() == DENSE.numpy()).all()
    assert (sparse.load_npz(tmp_path / "pydata.npz").todense() == DENSE.numpy()).all()


@pytest.mark.parametrize("index", [0, 7])
def test_a_heap_of_texts_that_has_no_end_is_refused(tmp_path: Path, index: int) -> None:
    """HDF5 goes from object to object by their sizes: by one of 0 bytes it never arrives, nor by one of 2**64 - 16."""
    h5py, matrix = compressed("csr")
    path = tmp_path / "cells.h5ad"
    with h5py.File(path, "w") as file:
        group = file.create_group("X")
        group.attrs.update({"encoding-type": "csr_matrix", "shape": matrix.shape})
        for name in ("data", "indices", "indptr"):
            group[name] = getattr(matrix, name)
    holds(path)
    data = bytearray(path.read_bytes())
    text = data.index(b"GCOL") + 16
    free = text + 16 + -(-int.from_bytes(data[text + 8 : text + 16], "little") // 8) * 8
    assert data[free : free + 2] == b"\0\0"
    data[free : free + 16] = index.to_bytes(8, "little") + (2**64 - 16 if index else 0).to_bytes(8, "little")
    path.write_bytes(data)
    done = processes.run(["-c", f"import sparsetc as stc; stc.read({str(path)!r})"], timeout=100)
    assert "IOFormatError" in done.stderr
    assert "a damaged heap of HDF5" in done.stderr
