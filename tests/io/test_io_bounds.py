"""What reading depends on, and what it may cost: blocks, line ends, bounds, memory, pipes."""

from __future__ import annotations

import gzip
import io
import os
import resource
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch

import sparsetc.io as sio
from sparsetc.errors import IOFormatError, OutOfMemoryError, ShapeError
from sparsetc.io import bounds, lines
from sparsetc.options import options
from sparsetc.tensor.sparse_tensor import SparseTensor

MB = 2**20
BANNER = b"%%MatrixMarket matrix coordinate real general\n"


def told(path: Path, data: bytes, dtype: torch.dtype | None = None) -> object:
    """What reading gives: shape, coordinates and bits of the values, or the words of the error."""
    path.write_bytes(data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            x = sio.read(path, dtype=dtype)
        except IOFormatError as error:
            return str(error)
    return x.shape, x.coords.tolist(), x.values.double().numpy().tobytes()


def zipped(parts: Iterable[bytes]) -> bytes:
    made = io.BytesIO()
    with gzip.GzipFile(fileobj=made, mode="wb", compresslevel=6) as file:
        for part in parts:
            file.write(part)
    return made.getvalue()


# ---- blocks and line ends ---------------------------------------------------------------------------------------

TEXTS = [
    b"3\n4 5 6",
    b"3\n4 5 6\n",
    b"3\n\n# c\n 4 5 6\n\n1 1 1 2\n",
    b"# shape: 4 5\n# shape: 4 5\n1 1 1\n",
    b"# shape: 4 5\n# shape: 4 6\n1 1 1\n",
    b"# shape: 4 5\n2\n4 5\n1 1 1\n",
    b"# shape: 4 5\n2\n4 6\n1 1 1\n",
    b"2\n# shape: 4 6\n4 5\n1 1 1\n",
    b"1 1 1\n# shape: 9 9\n2 2 2\n",
    b"1 1 1\r\n2 2 2\r\n\r\n3 3 3",
    b"1 1 1\r2 2 2\r",
    b"1 1 1\r2 2 2\r\n3 3 3\n\r4 4",
    b"1 1 1\r\r\n2 2 x\r",
    b"2\r4 5\r1 2 3\r",
    b"# c\r# shape: 7 8\r1 2 3",
    b"1 1 1 # a\n2 2 2 #\n # b\n3 3 x # c\n4 4 4\n",
    b"1 1 1\n2 2 2 2\n3 x 3\n",
    b"1 1 1\n0 2 2\n3 x 3\n",
    b"1 1 1\n\x001 2 2\n",
    b"1 1\x1c1 1\n",
    b"1 1 1\n1 2 1e39\n1 1 x\n",
    b"1 1 1\n1 2 -inf\n1 3 nan\n",
    b"5\n6\n",
    b"3\n4 5\n1 1 1\n",
    b"3\n",
    b"",
    b"\r\n\r\n",
]


@pytest.mark.parametrize("text", TEXTS)
def test_blocks_decide_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    wanted = told(tmp_path / "x.tns", text)
    for block in (1, 2, 3, 5, 8, 13):
        monkeypatch.setattr(lines, "BLOCK", block)
        assert told(tmp_path / "x.tns", text) == wanted, block


@pytest.mark.parametrize(
    "text",
    [
        BANNER + b"% c\n2 3 3\n1 1 1.5\n2 3 -2\n1 1 1",
        BANNER + b"2 3 1\n1 1 1.5\n2 3 -2\n1 1 x\n",
        BANNER + b"2 3 5\n1 1 1.5\n2 3 -2\n1 1 x\n3 1 1\n",
        BANNER.replace(b"\n", b"\r") + b"2 3 2\r1 1 1\r2 3 -2 % c\r",
        b"hello\n" + BANNER,
    ],
)
def test_blocks_decide_nothing_of_a_matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    wanted = told(tmp_path / "x.mtx", text)
    for block in (1, 2, 7, 50):
        monkeypatch.setattr(lines, "BLOCK", block)
        assert told(tmp_path / "x.mtx", text) == wanted, block


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("last", ["", "end"])
def test_line_ends(tmp_path: Path, end: str, last: str) -> None:
    text = end.join(("# c", "1 2 1.5", "", "3 1 -2")) + (end if last else "")
    assert told(tmp_path / "x.tns", text.encode()) == told(tmp_path / "x.tns", b"# c\n1 2 1.5\n\n3 1 -2\n")
    found = told(tmp_path / "x.tns", text.replace(" -2", "").encode())
    assert "line 4: expected 3 fields, 2 coordinates and a value, found 2" in str(found)
    assert str(found).endswith(": '3 1'")


def test_sizes_on_two_lines_need_no_last_newline(tmp_path: Path) -> None:
    for text in (b"3\n4 5 6", b"3\n4 5 6\n"):
        (tmp_path / "x.tns").write_bytes(text)
        assert sio.read(tmp_path / "x.tns").shape == (4, 5, 6)


def test_sizes_that_disagree_are_refused(tmp_path: Path) -> None:
    assert "line 3: other sizes than were given before, 4 5: '# shape: 4 6'" in str(
        told(tmp_path / "x.tns", b"# shape: 4 5\n\n# shape: 4 6\n1 1 1\n")
    )
    assert "line 1: other sizes" in str(told(tmp_path / "x.tns", b"# shape: 4 5\n2\n4 6\n1 1 1\n"))


# ---- values that a dtype cannot hold ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "dtype", "held"),
    [
        ("1e39", torch.float32, False),
        ("3.4028236e38", torch.float32, False),
        ("3.4028235e38", torch.float32, True),
        ("-1e39", torch.float64, True),
        ("1e400", torch.float64, False),
        ("1" + "0" * 400, torch.float64, False),
        ("65520", torch.float16, False),
        ("65519", torch.float16, True),
        ("1e39", torch.bfloat16, False),
        ("inf", torch.float16, True),
        ("-Infinity", torch.float32, True),
        ("1e-400", torch.float32, True),
    ],
)
def test_no_number_becomes_infinite(tmp_path: Path, value: str, dtype: torch.dtype, held: bool) -> None:
    found = told(tmp_path / "x.tns", f"1 1 nan\n1 2 {value}\n".encode(), dtype)
    if held:
        assert isinstance(found, tuple)
        return
    assert isinstance(found, str)
    assert f"line 2: the value {value[:27]!r}"[:-1] in found
    words = "is beyond the largest float64; write inf" if dtype == torch.float64 else f"does not fit {dtype}; read it"
    assert words in found
    assert ("dtype=torch.float64" in found) == (dtype != torch.float64)
    matrix = BANNER.replace(b"real", b"complex") + f"1 1 1\n1 1 0 {value}\n".encode()
    if dtype == torch.float64:
        assert "line 3" in str(told(tmp_path / "x.mtx", matrix, torch.complex128))


# ---- bounds -----------------------------------------------------------------------------------------------------


def test_the_longest_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for block in (lines.BLOCK, 1000, bounds.LINE):
        monkeypatch.setattr(lines, "BLOCK", block)
        for length, fits in ((bounds.LINE, True), (bounds.LINE + 1, False)):
            found = told(tmp_path / "x.tns", b"1 1 1\n" + b"1 2 2 #".ljust(length, b"c") + b"\n1 x 1\n")
            assert ("line 3: coordinate 'x'" if fits else "line 2: longer than 65,536 bytes") in str(found)
            first = told(tmp_path / "x.tns", b" shape: 3\n" + b" " * (bounds.LINE + 1))
            assert "line 1: coordinate 'shape:'" in str(first)


def test_the_longest_number(tmp_path: Path) -> None:
    for count in (40, 5_000, bounds.LINE - 10):
        start = time.process_time()
        text = f"1 1 1\n1 2 1.{'0' * count}1\n".encode() * 8 + b"1 3 2." + b"5" * count + b"x\n"
        assert "line 17: the value '2.5" in str(told(tmp_path / "x.tns", text))
        assert isinstance(told(tmp_path / "x.tns", text.replace(b"x", b"")), tuple)
        assert time.process_time() - start < 2


def test_long_numbers_cost_what_they_are(tmp_path: Path) -> None:
    """A table of all tokens as wide as the longest would take 800 MB."""
    text = b"1 1 nan\n" * 60_000 + b"1 2 " + b"0" * 4_000 + b"5\n"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert isinstance(told(tmp_path / "x.tns", text), tuple)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 150_000


def test_the_highest_order(tmp_path: Path) -> None:
    for order, fits in ((64, True), (65, False), (30_000, False)):
        found = told(tmp_path / "x.tns", b"1 " * order + b"5\n")
        assert isinstance(found, tuple) == fits
        found = told(tmp_path / "x.tns", b"# shape:" + b" 1" * order + b"\n")
        assert isinstance(found, tuple) == fits
        np.savez(tmp_path / "x.npz", coords=np.zeros((order, 1), int), values=np.ones(1), shape=np.ones(order, int))
        assert isinstance(told(tmp_path / "x.npz", (tmp_path / "x.npz").read_bytes()), tuple) == fits
    assert "a file holds at most 64" in str(told(tmp_path / "x.tns", b"1 " * 65 + b"5\n"))
    for suffix in sio.SUFFIXES:
        with pytest.raises(ShapeError, match="at most 64 modes" if suffix[1] != "m" else "64|matrix"):
            sio.write(tmp_path / f"y{suffix}", SparseTensor([[0]] * 65, [1.0]))


BOMBS = {
    "one line of blanks": [b" " * MB] * 64,
    "one line of digits": [b"1" * MB] * 64,
    "empty lines": [b"\n" * MB] * 64,
    "carriage returns": [b"\r" * MB] * 64,
    "comments": [b"# nothing\n" * (MB // 10)] * 64,
    "blanks after a nonzero": [b"1 1 1\n", *[(b" " * 1000 + b"\n") * 1000] * 64],
    "long zeros": [(b"1 1 " + b"0" * 4000 + b"\n") * 256] * 64,
}


@pytest.mark.parametrize("parts", BOMBS.values(), ids=BOMBS)
def test_bombs_are_refused_early(tmp_path: Path, parts: list[bytes]) -> None:
    path = tmp_path / "x.tns.gz"
    data = zipped(parts)
    start, peak = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = told(path, data)
    assert "longer than 65,536 bytes" in str(found) or "too few numbers in too much text" in str(found)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 100_000
    assert time.process_time() - start < 5


def test_one_long_line_is_refused_at_once(tmp_path: Path) -> None:
    for text in (b"1 " * (MB // 2), b"1 1 1\n" + b"7" * MB, b"#" * MB, b"1 1 1" + b" " * MB):
        start = time.process_time()
        assert "longer than 65,536 bytes" in str(told(tmp_path / "x.tns", text))
        assert time.process_time() - start < 1


@pytest.mark.parametrize("filler", [b"   \n", b"#  \n", b"1 1    1\n"])
@pytest.mark.parametrize("at_head", [True, False])
def test_what_may_be_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, filler: bytes, at_head: bool) -> None:
    """Text without numbers is bounded, to within a block, before the first number and between numbers."""
    monkeypatch.setattr(bounds, "SLACK", 3000)
    monkeypatch.setattr(bounds, "PER_NUMBER", 2)
    nonzeros = b"1 1 1\n" * 40
    for block in (7, 64, 500):
        monkeypatch.setattr(lines, "BLOCK", block)
        for nbytes, fits in ((2500, True), (3700, False)):
            waste = b"   \n" * (nbytes // 4) if b"1" not in filler else filler * (nbytes // 3)
            text = waste + nonzeros if at_head else nonzeros + waste + nonzeros
            found = told(tmp_path / "x.tns", text)
            assert isinstance(found, tuple) == fits
            assert fits or "too few numbers in too much text" in str(found)


def test_entries_beyond_those_declared_are_not_read(tmp_path: Path) -> None:
    data = zipped([BANNER + b"2 2 3\n", *[b"1 1 1\n" * (MB // 6)] * 100])
    start = time.process_time()
    assert "too long: the header declares 3 entries, the file has 4 or more" in str(told(tmp_path / "x.mtx.gz", data))
    assert time.process_time() - start < 1


# ---- memory -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("suffix", "nbytes"), [(".tns", 60_000), (".mtx", 60_000), (".npz", 48_044)])
def test_memory_limit(tmp_path: Path, suffix: str, nbytes: int) -> None:
    """A nonzero has 20 bytes in the tensor; those of the file, and what puts them in order, are there before that."""
    path = tmp_path / f"x{suffix}"
    coords = torch.stack((torch.arange(1000), torch.arange(1000)))
    sio.write(path, SparseTensor(coords, torch.ones(1000), (1000, 1000)))
    with options(memory_limit=nbytes):
        assert sio.read(path).nnz == 1000
    wanted = rf"x\..*{nbytes:,} bytes.*memory_limit"
    with options(memory_limit=nbytes - 1), pytest.raises(OutOfMemoryError, match=wanted):
        sio.read(path)


def test_memory_limit_of_both_triangles(tmp_path: Path) -> None:
    entries = b"".join(b"%d 1 1\n" % row for row in range(2, 1002))
    (tmp_path / "x.mtx").write_bytes(BANNER.replace(b"general", b"symmetric") + b"1001 1001 1000\n" + entries)
    with options(memory_limit=400_000):
        assert sio.read(tmp_path / "x.mtx").nnz == 2000
    with options(memory_limit=99_999), pytest.raises(OutOfMemoryError, match=r"both triangles would take 100,000"):
        sio.read(tmp_path / "x.mtx")


STARVED = """
import os, resource, sys
import sparsetc.io as sio
for path in sys.argv[1:]:
    sio.read(path.replace("large", "small"))  # what is imported late is there
for path in sys.argv[1:]:
    if os.fork():  # so that none has what another freed
        os.wait()
        continue
    with open("/proc/self/statm") as file:
        held = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + 12 * 2**20,) * 2)
    try:
        sio.read(path)
    except MemoryError as error:
        print(type(error).__name__, error, flush=True)
    os._exit(0)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_that_runs_out(tmp_path: Path) -> None:
    """The error names the file and the bytes, whoever's allocation failed."""
    large = [tmp_path / f"large{suffix}" for suffix in (".tns", ".tns.gz", ".mtx", ".npz")]
    for path in large:
        sio.write(path.with_name(path.name.replace("large", "small")), SparseTensor([[0], [1]], [1.0], (2, 2)))
        sio.write(path, SparseTensor(torch.arange(1_200_000).reshape(2, -1), torch.ones(600_000)))
    run = [sys.executable, "-c", STARVED, *map(str, large)]
    out = subprocess.run(run, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    said = out.stdout.splitlines()
    assert len(said) == len(large), out
    for line, path in zip(said, large, strict=True):
        assert line.startswith(f"OutOfMemoryError {path}: out of memory: ")
        assert "bytes" in line


# ---- pipes ------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
@pytest.mark.parametrize("name", ["x.tns", "x.tns.gz", "x.mtx", "x.mtx.gz"])
def test_text_through_a_pipe(tmp_path: Path, name: str) -> None:
    text = b"1 2 3\n2 1 x\n" if "tns" in name else BANNER + b"2 2 2\n1 2 3\n2 1 x\n"
    for data, faulty in ((text.replace(b" x", b" 4"), False), (text, True)):
        path = tmp_path / f"{faulty}{name}"
        os.mkfifo(path)
        raw = gzip.compress(data) if name.endswith("gz") else data
        writer = threading.Thread(target=path.write_bytes, args=(raw,))
        writer.start()
        if faulty:
            with pytest.raises(IOFormatError, match="the value 'x' is not a number: '2 1 x'"):
                sio.read(path)
        else:
            assert sio.read(path, progress=True).values.tolist() == [3, 4]
        writer.join()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_arrays_through_a_pipe_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.npz")  # nobody writes: opening it would wait for ever
    with pytest.raises(IOFormatError, match="a file on disk, not a pipe"):
        sio.read(tmp_path / "x.npz")


@pytest.mark.parametrize("suffix", sio.SUFFIXES)
def test_folders_are_not_read(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"x{suffix}").mkdir()
    with pytest.raises(IsADirectoryError, match=f"x{suffix}"):
        sio.read(tmp_path / f"x{suffix}")
