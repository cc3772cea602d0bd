"""Packing: the same file whatever the memory, within the limit, and on from where an interrupted call was."""

from __future__ import annotations

import errno
import gzip
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import sparsetc as stc
from sparsetc import __main__ as command_line
from sparsetc.io import lines
from sparsetc.io.packing import budget, runs, sources
from sparsetc.io.packing.budget import PackingBudget
from sparsetc.io.packing.folder import Folder
from sparsetc.io.stc_writer import PackedWriter

SMALL = PackingBudget(run=300, fan_in=4, block=48)
"""About 16 runs of the 5,000 nonzeros below, merged twice."""


@pytest.fixture
def frugal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little memory, and small blocks of what is read."""
    monkeypatch.setattr(budget, "of", lambda *_: SMALL)
    monkeypatch.setattr(lines, "BLOCK", 3000)
    monkeypatch.setattr(sources, "ROWS", 100)


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


def packed(source: Path, **options: Any) -> bytes:
    """The packed file, beside which nothing is left."""
    target = source.with_name("packed.stc")
    stc.pack(source, target, **options)
    assert sorted(p.name for p in source.parent.iterdir() if p.name.startswith(".")) == []
    with stc.open_packed(target) as file:
        file.verify()
    return target.read_bytes()


def is_as_read(source: Path, dtype: torch.dtype | None = None) -> None:
    x, y = stc.read(source, dtype=dtype), stc.read(source.with_name("packed.stc"))
    assert (x.shape, x.dtype) == (y.shape, y.dtype)
    assert torch.equal(x.coords, y.coords)
    assert torch.equal(x.values, y.values)


# ---- what comes out ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x.tns", "x.tns.gz"])
def test_text(tmp_path: Path, name: str, frugal: None, monkeypatch: pytest.MonkeyPatch) -> None:
    source = text(tmp_path / name, *entries())
    found = packed(source)
    is_as_read(source)
    for other in (PackingBudget(10**6, 64, 1000), PackingBudget(1000, 2, 37), PackingBudget(700, 3, 1000)):
        monkeypatch.setattr(budget, "of", lambda *_, other=other: other)
        assert packed(source) == found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int64])
def test_dtypes(tmp_path: Path, dtype: torch.dtype, frugal: None) -> None:
    coords, values = entries(900)
    integers = not dtype.is_floating_point
    source = text(tmp_path / "x.tns", coords, values.sign().long() if integers else values)
    packed(source, dtype=dtype)
    is_as_read(source, dtype)


@pytest.mark.parametrize("order", range(1, 7))
def test_orders(tmp_path: Path, order: int, frugal: None) -> None:
    shape = (2**40, 2**40, 3, 400, 70_000, 2)[-order:]  # whose product passes 2**63 at order 6
    source = text(tmp_path / "x.tns", *entries(1500, shape), head=f"# shape: {' '.join(map(str, shape))}\n")
    packed(source)
    is_as_read(source)


def test_few_nonzeros_and_order(tmp_path: Path, frugal: None) -> None:
    coords, values = entries(600)
    ascending = stc.SparseTensor(coords, values, (20, 300, 70_000)).coords
    for found in (coords[:, :0], coords[:, :1], ascending, ascending.flip(1), coords[:, :1].expand(-1, 600)):
        source = text(tmp_path / "x.tns", found, values[: found.shape[1]], "# shape: 20 300 70000\n")
        packed(source)
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
    packed(source)
    is_as_read(source)
    for entries_said, what in ((n + 1, "truncated"), (n - 1, "too long")):
        source.write_text(f"%%MatrixMarket matrix {head}\n500 500 {entries_said}\n" + "\n".join(rows) + "\n")
        with pytest.raises(stc.IOFormatError, match=what):
            stc.pack(source, tmp_path / "other.stc")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_arrays(tmp_path: Path, dtype: torch.dtype, frugal: None) -> None:
    coords, values = entries(1000)
    stc.write(tmp_path / "x.npz", stc.SparseTensor(coords, values.to(dtype), (20, 300, 70_000), coalesce=False))
    packed(tmp_path / "x.npz")
    is_as_read(tmp_path / "x.npz")


@pytest.mark.parametrize("form", ["coo", "csr"])
def test_arrays_of_scipy(tmp_path: Path, form: str, frugal: None) -> None:
    sparse = pytest.importorskip("scipy.sparse")
    sparse.save_npz(tmp_path / "x.npz", sparse.random(50, 60, 0.3, format=form, random_state=0, dtype="float32"))
    packed(tmp_path / "x.npz")
    is_as_read(tmp_path / "x.npz")


def test_dense_modes_become_coordinates(tmp_path: Path) -> None:
    stc.write(tmp_path / "x.npz", stc.SparseTensor([[2, 0]], torch.arange(6.0).reshape(2, 3), (3, 3)))
    packed(tmp_path / "x.npz")
    assert stc.read(tmp_path / "packed.stc").nnz == 6


def test_integers_are_summed_exactly(tmp_path: Path, frugal: None) -> None:
    coords = torch.zeros((2, 900), dtype=torch.int64)
    values = torch.full((900,), 2**62)
    values[1::2] *= -1
    source = text(tmp_path / "x.tns", coords, values.sort().values)  # which passes 64 bits on the way
    packed(source, dtype=torch.int64)
    assert stc.read(tmp_path / "packed.stc").values.tolist() == [0]
    with pytest.raises(stc.IOFormatError, match=r"x\.tns: duplicates sum to .*int64 cannot hold"):
        stc.pack(text(source, coords, values.abs()), tmp_path / "other.stc", dtype=torch.int64)
    assert not (tmp_path / "other.stc").exists()


def test_another_default_device(tmp_path: Path) -> None:
    coords, values = entries(100, (500, 500))
    x = stc.SparseTensor(coords, values, (500, 500))
    names = ("x.tns", "x.mtx", "x.npz")
    with torch.device("meta"):
        for name in names:
            stc.write(tmp_path / name, x)
            packed(tmp_path / name)
            is_as_read(tmp_path / name)
            assert stc.read(tmp_path / name).device.type == "cpu"
        with stc.open_packed(tmp_path / "packed.stc") as file:
            assert file.rows(0, 500)[0].device.type == "cpu"


# ---- memory -----------------------------------------------------------------------------------------------------

MEASURED = r"""
import re, sys
import sparsetc as stc, sparsetc.io
def peak():
    with open("/proc/self/status") as lines:
        return int(re.search(r"VmHWM:\s*(\d+) kB", lines.read())[1]) * 1024
before = peak()
stc.pack(sys.argv[1], sys.argv[2], memory_limit="40MB")
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_the_limit_holds(tmp_path: Path) -> None:
    """A tensor of 28 MB, of which sorting takes several times as much, in 40 MB with all that Python takes."""
    g = torch.Generator().manual_seed(0)
    coords = torch.stack([torch.randint(0, size, (700_000,), generator=g) for size in (3000, 5000, 40, 60)])
    x = stc.SparseTensor(coords, torch.ones(700_000, dtype=torch.int64), coalesce=False)
    stc.write(tmp_path / "x.npz", x)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(tmp_path / "x.npz"), str(tmp_path / "x.stc")],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert 1_000_000 < int(done.stdout) < 40_000_000
    assert stc.read(tmp_path / "x.stc").nnz == x.coalesce().nnz


def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = text(tmp_path / "x.tns", *entries(10))
    with pytest.raises(stc.OutOfMemoryError, match=r"x\.tns: packing takes at least 33,554,432 bytes"):
        stc.pack(source, tmp_path / "x.stc", memory_limit="1MB")
    with pytest.raises(stc.PlanError, match="memory_limit must be"):
        stc.pack(source, tmp_path / "x.stc", memory_limit="much")
    assert [p.name for p in tmp_path.iterdir()] == ["x.tns"]
    monkeypatch.setattr(budget, "available_memory", lambda _: 10**9)
    assert [budget.limit(None, before) for before in (None, 10**8, 10**9)] == [25 * 10**7, 10**8, 25 * 10**7]
    for limit in (2**25, 2**28, 2**34):
        share = budget.of(source, limit, 3, torch.float32)
        assert share.fan_in >= 2
        assert share.block * share.fan_in * 28 * 3 + budget.FIXED < limit
        assert share.run * 28 * 2 + budget.FIXED < limit


# ---- interruptions ----------------------------------------------------------------------------------------------


class Stopped(Exception):
    """What stops a call."""


def stopping(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, after: int, error: BaseException) -> None:
    """Let a function fail when it has been called so often."""
    right, called = getattr(module, name), iter(range(10**6))

    def wrong(*arguments: Any) -> Any:
        if next(called) >= after:
            raise error
        return right(*arguments)

    monkeypatch.setattr(module, name, wrong)


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The blocks of text that were parsed."""
    found: list[int] = []
    right = sources.table._parse
    monkeypatch.setattr(
        sources.table, "_parse", lambda block, layout: (found.append(block.line), right(block, layout))[1]
    )
    return found


@pytest.mark.parametrize(
    ("module", "name", "after"),
    [
        (runs, "_keep", 0),
        (runs, "_keep", 9),
        (PackedWriter, "append", 5),
        (PackedWriter, "append", 60),
        (PackedWriter, "append", 140),
    ],
)
@pytest.mark.parametrize("suffix", [".tns", ".npz"])
def test_an_interrupted_call_goes_on(
    tmp_path: Path, frugal: None, suffix: str, module: Any, name: str, after: int
) -> None:
    source = text(tmp_path / "x.tns", *entries())
    if suffix == ".npz":
        coords, values = entries()
        source = tmp_path / "x.npz"
        stc.write(source, stc.SparseTensor(coords, values, (20, 300, 70_000), coalesce=False))
    wanted = packed(source)
    target = tmp_path / "again.stc"
    target.write_bytes(b"old")
    with pytest.MonkeyPatch.context() as patch:
        stopping(patch, module, name, after, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            stc.pack(source, target)
    assert target.read_bytes() == b"old"
    stc.pack(source, target)
    assert target.read_bytes() == wanted
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_what_was_sorted_is_not_parsed_again(tmp_path: Path, frugal: None, parsed: list[int]) -> None:
    source = text(tmp_path / "x.tns", *entries())
    stc.pack(source, tmp_path / "whole.stc")
    blocks = list(parsed)
    with pytest.MonkeyPatch.context() as patch:
        stopping(patch, runs, "_keep", 9, Stopped())
        with pytest.raises(Stopped):
            stc.pack(source, tmp_path / "x.stc")
    parsed.clear()
    stc.pack(source, tmp_path / "x.stc")
    assert 0 < len(parsed) < 0.6 * len(blocks)
    assert parsed == blocks[-len(parsed) :]  # the lines that errors would name included


@pytest.mark.parametrize("change", ["source", "dtype", "fresh", "manifest", "run", "limit"])
def test_what_does_not_serve_is_made_anew(tmp_path: Path, frugal: None, change: str, parsed: list[int]) -> None:
    source, target = text(tmp_path / "x.tns", *entries()), tmp_path / "x.stc"
    with pytest.MonkeyPatch.context() as patch:
        stopping(patch, runs, "_keep", 9, Stopped())
        with pytest.raises(Stopped):
            stc.pack(source, target, memory_limit="1GB")
    parsed.clear()
    (folder,) = (p for p in tmp_path.iterdir() if p.is_dir())
    options: dict[str, Any] = {"memory_limit": "1GB"}
    if change == "source":
        coords, values = entries()
        text(source, coords, -values)
    elif change == "manifest":
        (folder / "manifest.json").write_text('{"runs": [1], "about"')
    elif change == "run":
        run = folder / "run-0.stc"
        run.write_bytes(run.read_bytes()[:5000] + b"?" + run.read_bytes()[5001:])
    else:
        options.update({"dtype": torch.float64} if change == "dtype" else {"fresh": True} if change == "fresh" else {})
        options["memory_limit"] = "900MB" if change == "limit" else "1GB"
    stc.pack(source, target, **options)
    assert parsed[0] == 1
    target.rename(tmp_path / "packed.stc")
    is_as_read(source, options.get("dtype"))
    assert not folder.exists()


KILLED = """
import os, signal, sys
import sparsetc.io
from sparsetc.io import lines
from sparsetc.io.packing import budget, pack, runs, sources
lines.BLOCK, sources.ROWS = 3000, 100
budget.of = lambda *_: budget.PackingBudget(300, 4, 48)
right = runs._keep
def keep(held, folder, *more):
    if len(folder.runs) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    right(held, folder, *more)
runs._keep = keep
pack(*sys.argv[1:])
"""


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_a_killed_process_leaves_its_runs(tmp_path: Path, frugal: None, parsed: list[int]) -> None:
    source, target = text(tmp_path / "x.tns", *entries()), tmp_path / "packed.stc"
    done = subprocess.run([sys.executable, "-c", KILLED, str(source), str(target)], timeout=300)
    assert done.returncode == -signal.SIGKILL
    assert not target.exists()
    stc.pack(source, target)
    assert parsed[0] > 1000
    is_as_read(source)


def test_a_disk_that_was_full_before(tmp_path: Path, frugal: None) -> None:
    source = text(tmp_path / "x.tns", *entries())
    with pytest.MonkeyPatch.context() as patch:
        stopping(patch, PackedWriter, "append", 0, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        with pytest.raises(OSError, match=r"no space left to pack [^;]*$"):
            stc.pack(source, tmp_path / "x.stc")
    assert [p.name for p in tmp_path.iterdir()] == ["x.tns"]


@pytest.mark.parametrize("after", [3, 60, 140])
def test_a_full_disk(tmp_path: Path, frugal: None, after: int) -> None:
    source, target = text(tmp_path / "x.tns", *entries()), tmp_path / "packed.stc"
    with pytest.MonkeyPatch.context() as patch:
        stopping(patch, PackedWriter, "append", after, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        with pytest.raises(OSError, match=r"no space left to pack .*x\.tns; [\d,]+ sorted nonzeros stay in") as caught:
            stc.pack(source, target)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(target)
    assert not target.exists()
    (folder,) = (p for p in tmp_path.iterdir() if p.is_dir())
    assert not [p for p in folder.iterdir() if p.suffix == ".tmp"]
    stc.pack(source, target)
    is_as_read(source)


def test_a_source_that_changes_meanwhile(tmp_path: Path, frugal: None) -> None:
    source, target = text(tmp_path / "x.tns", *entries()), tmp_path / "packed.stc"
    right = runs._keep

    def keep(*arguments: Any) -> None:
        right(*arguments)
        os.utime(source, ns=(0, 0))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "_keep", keep)
        with pytest.raises(stc.IOFormatError, match=r"x\.tns: changed while it was read"):
            stc.pack(source, target)
    assert not target.exists()
    stc.pack(source, target)
    is_as_read(source)


# ---- refusals ---------------------------------------------------------------------------------------------------


def test_a_bad_line_is_named_wherever_the_call_began(tmp_path: Path, frugal: None) -> None:
    source = text(tmp_path / "x.tns", *entries())
    with source.open("a") as more:
        more.write("1 1 one 1.0\n")
    for _ in range(2):  # the second time from the runs of the first
        with pytest.raises(stc.IOFormatError, match=r"x\.tns, line 5001: coordinate 'one' of mode 2"):
            stc.pack(source, tmp_path / "x.stc")
    assert not (tmp_path / "x.stc").exists()


def test_names(tmp_path: Path) -> None:
    source = text(tmp_path / "x.tns", *entries(10))
    with pytest.raises(stc.IOFormatError, match=r"a packed file is called \.stc"):
        stc.pack(source, tmp_path / "x.npz")
    with pytest.raises(stc.IOFormatError, match="unknown suffix"):
        stc.pack(tmp_path / "x.npz.gz", tmp_path / "x.stc") if (tmp_path / "x.npz.gz").write_bytes(b"") == 0 else None
    with pytest.raises(FileNotFoundError, match=r"absent\.tns"):
        stc.pack(tmp_path / "absent.tns", tmp_path / "x.stc")
    with pytest.raises(FileNotFoundError, match="cannot write to the folder"):
        stc.pack(source, tmp_path / "absent" / "x.stc")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.npz.gz", "x.tns"]


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    source = text(tmp_path / "x.tns", *entries(10))
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(PermissionError, match="cannot write to the folder"):
            stc.pack(source, tmp_path / "x.stc")
    finally:
        tmp_path.chmod(0o700)


def test_a_folder_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a folder that cannot be written to does, for root too."""

    def refuse(*arguments: Any, **options: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    source = text(tmp_path / "x.tns", *entries(10))
    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(PermissionError, match="cannot write to the folder: Permission denied") as caught:
        stc.pack(source, tmp_path / "x.stc")
    assert caught.value.filename == str(tmp_path)


@pytest.mark.skipif(os.name != "posix", reason="owners and locks of POSIX")
def test_a_folder_that_others_may_write_to_or_that_is_in_use(tmp_path: Path, frugal: None) -> None:
    source, target = text(tmp_path / "x.tns", *entries()), tmp_path / "x.stc"
    with pytest.MonkeyPatch.context() as patch:

        def twice(*_: Any) -> None:
            with pytest.raises(OSError, match="another process packs into this file"):
                stc.pack(source, target)
            raise Stopped

        patch.setattr(runs, "_keep", twice)
        with pytest.raises(Stopped):
            stc.pack(source, target)
    with pytest.MonkeyPatch.context() as patch:
        stopping(patch, runs, "_keep", 3, Stopped())
        with pytest.raises(Stopped):
            stc.pack(source, target)
    (folder,) = (p for p in tmp_path.iterdir() if p.is_dir())
    folder.chmod(0o777)
    with pytest.raises(PermissionError, match="others may write to it"):
        stc.pack(source, target)


# ---- the command ------------------------------------------------------------------------------------------------


@pytest.mark.skipif(os.name != "posix", reason="locks of POSIX")
def test_a_lock_on_a_folder_that_is_gone_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    flock, removed = fcntl.flock, []

    def late(descriptor: int, operation: int) -> None:
        """The process that had the lock removes the folder between our opening and locking it."""
        if not removed:
            removed.append(os.readlink(f"/proc/self/fd/{descriptor}"))
            os.rmdir(removed[0])
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with Folder.claimed(tmp_path / "x.stc", fresh=False) as ours:
        assert removed == [str(ours.path)]
        with pytest.raises(OSError, match="another process"), Folder.claimed(tmp_path / "x.stc", fresh=False):
            pass


def test_what_is_in_the_way_is_told_first_and_stays(tmp_path: Path, parsed: list[int]) -> None:
    source, target, other = text(tmp_path / "x.tns", *entries()), tmp_path / "x.stc", tmp_path / "other"
    other.mkdir()
    (other / "kept").write_text("kept")
    with Folder.claimed(target, fresh=False) as folder:
        place = folder.path
    place.symlink_to(other)
    with pytest.raises(OSError, match="is a link, where a folder of sorted runs is to be"):
        stc.pack(source, target, fresh=True)
    assert (other / "kept").read_text() == "kept"
    place.unlink()
    target.mkdir()
    with pytest.raises(IsADirectoryError):
        stc.pack(source, target)
    assert not parsed


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = text(tmp_path / "x.tns", *entries(100)), tmp_path / "packed.stc"
    assert command_line.main(["pack", str(source), str(target), "--memory", "64MiB", "--dtype", "float64"]) == 0
    assert "nonzeros" in capsys.readouterr().out
    is_as_read(source, torch.float64)
    assert command_line.main(["info", str(target)]) == 0
    assert "packed, order 3" in capsys.readouterr().out
    assert command_line.main(["pack", str(source), str(target), "--memory", "1MB"]) == 2
    assert capsys.readouterr().err.startswith(f"sparsetc: {source}: packing takes at least")
    with pytest.MonkeyPatch.context() as patch:
        stopping(patch, runs, "_keep", 0, KeyboardInterrupt())
        assert command_line.main(["pack", str(source), str(target)]) == 130
    assert "the same command goes on" in capsys.readouterr().err
