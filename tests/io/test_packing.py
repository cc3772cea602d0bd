"""Packing: the same file whatever the memory, within the limit, and nothing left of a call that was interrupted."""

from __future__ import annotations

import errno
import gzip
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
import torch

import sparsetc as stc
from sparsetc import __main__ as command_line
from sparsetc.io import lines, packed, packing


@pytest.fixture(params=[packing.HELD, 1 << 40], ids=["in memory", "by DuckDB"])
def frugal(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Small blocks of what is read, and row groups of some hundred nonzeros, which are sorted in either way."""
    monkeypatch.setattr(packing, "HELD", request.param)
    monkeypatch.setattr(lines, "BLOCK", 3000)
    monkeypatch.setattr(packed, "NUMBERS", 2000)


def entries(n: int = 5000, shape: tuple[int, ...] = (20, 300, 70_000)) -> tuple[torch.Tensor, torch.Tensor]:
    """Nonzeros in no order, a third of them twice and one of them many times."""
    g = torch.Generator().manual_seed(0)
    coords = torch.stack([torch.randint(0, size, (n,), generator=g) for size in shape])
    coords[:, n // 3 : 2 * (n // 3)] = coords[:, : n // 3].flip(1)
    coords[:, :: n // 50 or 1] = coords[:, :1]
    return coords, torch.randn(n, generator=g)


def text(path: Path, coords: torch.Tensor, values: torch.Tensor, head: str = "") -> Path:
    rows = [" ".join(map(str, [c + 1 for c in row])) for row in coords.T.tolist()]
    body = head + "".join(f"{row} {value!r}\n" for row, value in zip(rows, values.tolist(), strict=True))
    data = body.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def packed_bytes(source: Path, **options: Any) -> bytes:
    """The packed file, beside which nothing is left."""
    target = source.with_name("packed.parquet")
    stc.pack(source, target, **options)
    assert sorted(p.name for p in source.parent.iterdir() if p.name.startswith(".")) == []
    with stc.open_packed(target) as file:
        file.verify()
    return target.read_bytes()


def is_as_read(source: Path, dtype: torch.dtype | None = None) -> None:
    x, y = stc.read(source, dtype=dtype), stc.read(source.with_name("packed.parquet"))
    assert (x.shape, x.dtype) == (y.shape, y.dtype)
    assert torch.equal(x.coords, y.coords)
    assert torch.equal(x.values, y.values)


# ---- what comes out ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x.tns", "x.tns.gz"])
def test_text(tmp_path: Path, name: str, frugal: None) -> None:
    source = text(tmp_path / name, *entries())
    found = packed_bytes(source)
    is_as_read(source)
    for limit in ("128MiB", "200MB", "2GB"):
        assert packed_bytes(source, memory_limit=limit) == found
    threads = torch.get_num_threads()
    try:
        for number in (1, 2, 4):
            torch.set_num_threads(number)
            assert packed_bytes(source) == found
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int64])
def test_dtypes(tmp_path: Path, dtype: torch.dtype, frugal: None) -> None:
    coords, values = entries(900)
    integers = not dtype.is_floating_point
    source = text(tmp_path / "x.tns", coords, values.sign().long() if integers else values)
    packed_bytes(source, dtype=dtype)
    is_as_read(source, dtype)


@pytest.mark.parametrize("order", range(1, 7))
def test_orders(tmp_path: Path, order: int, frugal: None) -> None:
    shape = (2**40, 2**40, 3, 400, 70_000, 2)[-order:]  # whose product passes 2**63 at order 6
    source = text(tmp_path / "x.tns", *entries(1500, shape), head=f"# shape: {' '.join(map(str, shape))}\n")
    packed_bytes(source)
    is_as_read(source)


def test_few_nonzeros_and_order(tmp_path: Path, frugal: None) -> None:
    coords, values = entries(600)
    ascending = stc.SparseTensor(coords, values, (20, 300, 70_000)).coords
    for found in (coords[:, :0], coords[:, :1], ascending, ascending.flip(1), coords[:, :1].expand(-1, 600)):
        source = text(tmp_path / "x.tns", found, values[: found.shape[1]], "# shape: 20 300 70000\n")
        packed_bytes(source)
        is_as_read(source)


@pytest.mark.parametrize(
    "head",
    [
        "coordinate real general",
        "coordinate real symmetric",
        "coordinate integer skew-symmetric",
        "coordinate pattern general",
    ],
)
def test_matrix_market(tmp_path: Path, head: str, frugal: None) -> None:
    coords, values = entries(1000, (500, 500))
    if "general" not in head:  # each pair once, below the diagonal
        coords = torch.unique(torch.stack((coords.amax(0), coords.amin(0)))[:, coords[0] != coords[1]], dim=1)
    n = coords.shape[1]
    rows = [f"{i + 1} {j + 1}" for i, j in coords.T.tolist()]
    if "pattern" not in head:
        rows = [
            f"{row} {int(9 * v) if 'integer' in head else v}" for row, v in zip(rows, values.tolist(), strict=False)
        ]
    source = tmp_path / "x.mtx"
    source.write_text(f"%%MatrixMarket matrix {head}\n500 500 {n}\n" + "\n".join(rows) + "\n")
    packed_bytes(source)
    is_as_read(source)
    for entries_said, what in ((n + 1, "truncated"), (n - 1, "too long")):
        source.write_text(f"%%MatrixMarket matrix {head}\n500 500 {entries_said}\n" + "\n".join(rows) + "\n")
        with pytest.raises(stc.IOFormatError, match=what):
            stc.pack(source, tmp_path / "other.parquet")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_arrays(tmp_path: Path, dtype: torch.dtype, frugal: None) -> None:
    coords, values = entries(1000)
    stc.write(tmp_path / "x.npz", stc.SparseTensor(coords, values.to(dtype), (20, 300, 70_000), coalesce=False))
    packed_bytes(tmp_path / "x.npz")
    is_as_read(tmp_path / "x.npz")


@pytest.mark.parametrize("form", ["coo", "csr"])
def test_arrays_of_scipy(tmp_path: Path, form: str, frugal: None) -> None:
    sparse = pytest.importorskip("scipy.sparse")
    sparse.save_npz(tmp_path / "x.npz", sparse.random(50, 60, 0.3, format=form, random_state=0, dtype="float32"))
    packed_bytes(tmp_path / "x.npz")
    is_as_read(tmp_path / "x.npz")


def test_dense_modes_become_coordinates(tmp_path: Path) -> None:
    stc.write(tmp_path / "x.npz", stc.SparseTensor([[2, 0]], torch.arange(6.0).reshape(2, 3), (3, 3)))
    packed_bytes(tmp_path / "x.npz")
    assert stc.read(tmp_path / "packed.parquet").nnz == 6


def test_integers_are_summed_exactly(tmp_path: Path, frugal: None) -> None:
    coords = torch.zeros((2, 900), dtype=torch.int64)
    values = torch.full((900,), 2**62)
    values[1::2] *= -1
    source = text(tmp_path / "x.tns", coords, values.sort().values)  # which passes 64 bits on the way
    packed_bytes(source, dtype=torch.int64)
    assert stc.read(tmp_path / "packed.parquet").values.tolist() == [0]
    with pytest.raises(stc.IOFormatError, match=r"x\.tns: a sum of duplicates holds .*int64 cannot"):
        stc.pack(text(source, coords, values.abs()), tmp_path / "other.parquet", dtype=torch.int64)
    assert not (tmp_path / "other.parquet").exists()


def test_another_default_device(tmp_path: Path) -> None:
    coords, values = entries(100, (500, 500))
    x = stc.SparseTensor(coords, values, (500, 500))
    names = ("x.tns", "x.mtx", "x.npz")
    with torch.device("meta"):
        for name in names:
            stc.write(tmp_path / name, x)
            packed_bytes(tmp_path / name)
            is_as_read(tmp_path / name)
            assert stc.read(tmp_path / name).device.type == "cpu"
        with stc.open_packed(tmp_path / "packed.parquet") as file:
            assert file.rows(0, 500)[0].device.type == "cpu"


def test_many_duplicates(tmp_path: Path, frugal: None) -> None:
    """Row groups are not made of what little is left of many rows."""
    coords, values = entries(20_000, (3, 4, 5))
    source = text(tmp_path / "x.tns", coords, values)
    packed_bytes(source)
    is_as_read(source)
    with stc.open_packed(tmp_path / "packed.parquet") as file:
        assert len(file.starts) == 2


@pytest.mark.skipif(os.name != "posix", reason="FIFOs")
def test_text_comes_through_a_pipe(tmp_path: Path) -> None:
    source, target = text(tmp_path / "y.tns", *entries()), tmp_path / "packed.parquet"
    os.mkfifo(tmp_path / "x.tns")
    writer = subprocess.Popen(["cp", str(source), str(tmp_path / "x.tns")])
    stc.pack(tmp_path / "x.tns", target)
    assert writer.wait() == 0
    is_as_read(source)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file whose nonzeros do not fit in the least limit, in no order."""
    g = torch.Generator().manual_seed(0)
    coords = torch.stack([torch.randint(0, size, (1_000_000,), generator=g) for size in (3000, 5000, 40)])
    path = tmp_path_factory.mktemp("large") / "x.tns"
    stc.write(path, stc.SparseTensor(coords, torch.ones(1_000_000, dtype=torch.int64), coalesce=False))
    return path


# ---- memory -----------------------------------------------------------------------------------------------------

MEASURED = r"""
import re, sys
import sparsetc as stc, sparsetc.io.packing
from sparsetc.support import files
def peak():
    with open("/proc/self/status") as lines:
        return int(re.search(r"VmHWM:\s*(\d+) kB", lines.read())[1]) * 1024
held, sparsetc.io.packing.HELD = sparsetc.io.packing.HELD, 1 << 40
files.MANY = files.ENOUGH = 0
stc.pack(sys.argv[3], sys.argv[2])  # by DuckDB and numba
sparsetc.io.packing.HELD = held
before = peak()
stc.pack(sys.argv[1], sys.argv[2], memory_limit="128MiB")
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_the_limit_holds(tmp_path: Path, large: Path) -> None:
    """A table of 32 MB, of which sorting takes several times as much, beside what libraries take once."""
    small = text(tmp_path / "x.tns", *entries(10))
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(large), str(tmp_path / "x.parquet"), str(small)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert 1_000_000 < int(done.stdout) < 1 << 27
    assert stc.read(tmp_path / "x.parquet").nnz == stc.read(large).nnz


def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = text(tmp_path / "x.tns", *entries(10))
    with pytest.raises(stc.OutOfMemoryError, match=r"x\.tns: packing would take 134,217,728 .* is 1,000,000"):
        stc.pack(source, tmp_path / "x.parquet", memory_limit="1MB")
    with pytest.raises(stc.PlanError, match="memory_limit must be"):
        stc.pack(source, tmp_path / "x.parquet", memory_limit="much")
    np.savez_compressed(tmp_path / "x.npz", coords=np.zeros((1, 8_000_000), int), values=np.zeros(8_000_000), shape=[1])
    with pytest.raises(stc.OutOfMemoryError, match=r"x\.npz: the tensor would take 320,000,008 bytes"):
        stc.pack(tmp_path / "x.npz", tmp_path / "x.parquet", memory_limit="128MiB")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.npz", "x.tns"]


@pytest.mark.parametrize("room", [1 << 20, 5 << 20])
def test_what_does_not_fit_is_told(tmp_path: Path, large: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """While nonzeros are taken, and while they are sorted."""
    monkeypatch.setattr(packing, "THREAD", 1 << 20)
    with pytest.raises(stc.OutOfMemoryError, match=r"x\.tns: packing does not fit in the limit of [\d,]+ bytes"):
        stc.pack(large, tmp_path / "x.parquet", memory_limit=packing.FIXED + room)
    assert left(tmp_path) == []


# ---- interruptions ----------------------------------------------------------------------------------------------


def left(folder: Path) -> list[str]:
    """Names of what is beside the source."""
    return sorted(p.name for p in folder.iterdir() if p.name != "x.tns")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), RuntimeError("another")])
@pytest.mark.parametrize(("module", "name"), [(packing, "_batch"), (packed, "columns")])
def test_an_interrupted_call_leaves_nothing(
    tmp_path: Path, frugal: None, module: Any, name: str, error: BaseException
) -> None:
    source, target = text(tmp_path / "x.tns", *entries()), tmp_path / "x.parquet"
    target.write_bytes(b"old")
    right, called = getattr(module, name), iter(range(10**6))

    def wrong(*arguments: Any) -> Any:
        if next(called) == 3:
            raise error
        return right(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, wrong)
        with pytest.raises((type(error), stc.OutOfMemoryError)):
            stc.pack(source, target)
    assert target.read_bytes() == b"old"
    assert left(tmp_path) == ["x.parquet"]


PACKED = """
import signal, sys, time, sparsetc as stc
from sparsetc.io import packing

signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background processes ignore

def waiting(*arguments):
    print("sorted", flush=True)
    while True:
        time.sleep(0.1)

packing._batch = waiting
stc.pack(*sys.argv[1:3], memory_limit="128MiB")
"""


def spilling(source: Path, target: Path) -> subprocess.Popen[str]:
    """A process that packs, has written beside the target, and waits for a signal before it goes on."""
    command = [sys.executable, "-c", PACKED, str(source), str(target)]
    process = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == "sorted\n", process.communicate()[1]
    assert list(target.parent.glob(".sparsetc-*.spill/*"))
    return process


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_an_interrupt_of_a_process(tmp_path: Path, large: Path) -> None:
    process = spilling(large, tmp_path / "x.parquet")
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "KeyboardInterrupt" in said
    assert left(tmp_path) == []


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_a_killed_process_leaves_no_file_that_could_be_taken_for_one(tmp_path: Path, large: Path) -> None:
    source, target = tmp_path / "x.tns", tmp_path / "x.parquet"
    process = spilling(large, target)
    process.kill()
    process.communicate(timeout=120)
    assert all(name.startswith(".sparsetc-") for name in left(tmp_path))
    stc.pack(text(source, *entries(10)), target)
    assert stc.read(target).nnz


FULL = """
import resource, sys, sparsetc as stc
small = int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_FSIZE, (small, small))
try:
    stc.pack(*sys.argv[1:3], memory_limit="128MiB")
except OSError as error:
    assert error.filename == sys.argv[2] and error.errno, error
    print(error)
"""


@pytest.mark.skipif(os.name != "posix", reason="limits of POSIX")
@pytest.mark.parametrize("most", [8 << 20, 100_000])
def test_a_full_disk(tmp_path: Path, large: Path, most: int) -> None:
    """While many nonzeros are sorted, and while few are written."""
    source, target = large, tmp_path / "x.parquet"
    if most == 100_000:
        source = text(tmp_path / "x.tns", *entries(100_000, (3000, 5000, 40)))
    done = processes.run(["-c", FULL, source, target, most])
    assert done.returncode == 0, done.stderr
    assert str(target) in done.stdout
    assert left(tmp_path) == []


def test_a_disk_that_is_full_for_duckdb(tmp_path: Path, large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks how much is free when it begins, and calls that a limit of memory once it is used up."""
    duckdb = pytest.importorskip("duckdb")
    connect, target = duckdb.connect, tmp_path / "x.parquet"
    monkeypatch.setattr(
        duckdb, "connect", lambda name, config: connect(name, config=config | {"max_temp_directory_size": "1MB"})
    )
    with pytest.raises(OSError, match="No space left on device for what does not fit in memory") as caught:
        stc.pack(large, target, memory_limit="128MiB")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(target))
    assert left(tmp_path) == []


def test_a_source_that_changes_meanwhile(tmp_path: Path, frugal: None) -> None:
    source, target = text(tmp_path / "x.tns", *entries()), tmp_path / "packed.parquet"
    right = packed.columns

    def changing(*arguments: Any) -> Any:
        os.utime(source, ns=(0, 0))
        return right(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed, "columns", changing)
        with pytest.raises(stc.IOFormatError, match=r"x\.tns: changed while it was read"):
            stc.pack(source, target)
    assert left(tmp_path) == []
    stc.pack(source, target)
    is_as_read(source)


# ---- refusals ---------------------------------------------------------------------------------------------------


def test_a_bad_line_is_named(tmp_path: Path, frugal: None) -> None:
    source = text(tmp_path / "x.tns", *entries())
    with source.open("a") as more:
        more.write("1 1 one 1.0\n")
    with pytest.raises(stc.IOFormatError, match=r"x\.tns, line 5001: coordinate 'one' of mode 2"):
        stc.pack(source, tmp_path / "x.parquet")
    assert left(tmp_path) == []


def test_names(tmp_path: Path) -> None:
    source = text(tmp_path / "x.tns", *entries(10))
    for name in ("x.npz", "x.txt"):
        with pytest.raises(stc.IOFormatError, match=r"a packed file is called \.parquet"):
            stc.pack(source, tmp_path / name)
    (tmp_path / "x.npz.gz").write_bytes(b"")
    with pytest.raises(stc.IOFormatError, match="unknown suffix"):
        stc.pack(tmp_path / "x.npz.gz", tmp_path / "x.parquet")
    with pytest.raises(FileNotFoundError, match=r"absent\.tns"):
        stc.pack(tmp_path / "absent.tns", tmp_path / "x.parquet")
    with pytest.raises(FileNotFoundError, match="cannot write to the folder"):
        stc.pack(source, tmp_path / "absent" / "x.parquet")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.npz.gz", "x.tns"]


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    source = text(tmp_path / "x.tns", *entries(10))
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(PermissionError, match="cannot write to the folder"):
            stc.pack(source, tmp_path / "x.parquet")
    finally:
        tmp_path.chmod(0o700)


def test_a_folder_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a folder that cannot be written to does, for root too."""

    def refuse(*arguments: Any, **options: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), arguments[0])

    source = text(tmp_path / "x.tns", *entries(10))
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(PermissionError, match="cannot write to the folder: Permission denied") as caught:
        stc.pack(source, tmp_path / "x.parquet")
    assert caught.value.filename == str(tmp_path)


def test_what_is_in_the_way_is_told_before_anything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = text(tmp_path / "x.tns", *entries()), tmp_path / "x.parquet"
    target.mkdir()
    monkeypatch.setattr(packing, "_opened", None)
    with pytest.raises(IsADirectoryError):
        stc.pack(source, target)


# ---- the command ------------------------------------------------------------------------------------------------


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = text(tmp_path / "x.tns", *entries(100)), tmp_path / "packed.parquet"
    assert command_line.main(["pack", str(source), str(target), "--memory-limit", "256MiB", "--dtype", "float64"]) == 0
    assert "nonzeros" in capsys.readouterr().out
    is_as_read(source, torch.float64)
    assert command_line.main(["info", str(target)]) == 0
    assert "packed, order 3" in capsys.readouterr().out
    assert command_line.main(["pack", str(source), str(target), "--memory-limit", "1MB"]) == 2
    assert capsys.readouterr().err.startswith(f"sparsetc: {source}: packing would take 134,217,728 bytes")


@pytest.mark.parametrize("path", [None, 7, b"x\0.tns", "x\0.tns", object()])
def test_what_names_no_file_is_refused_alike(tmp_path: Path, path: Any) -> None:
    x, good = stc.SparseTensor([[0]], [1.0]), tmp_path / "x.parquet"
    stc.write(good, x)
    packing_it: tuple[Any, ...] = (lambda p: stc.pack(p, good), lambda p: stc.pack(good, p))
    for call in (stc.read, stc.open_packed, lambda p: stc.write(p, x), *packing_it):
        with pytest.raises(stc.IOFormatError, match=r"names no file|a path of a file is"):
            call(path)
    for columns in (5, "ijk"):
        for call in (stc.read, lambda p, **names: stc.pack(p, tmp_path / "y.parquet", **names)):
            with pytest.raises(stc.IOFormatError, match="columns is a list of names"):
                call(good, columns=columns)
    assert left(tmp_path) == ["x.parquet"]
