"""What the command line refuses: one message on stderr and status 2, never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import processes
import pytest
import torch

import sparsetc as stc
from sparsetc import __main__ as command_line


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of small tensors, the current one."""
    monkeypatch.chdir(tmp_path)
    at = torch.tensor([[0, 1], [1, 2]])
    for name, dtype in [("float", torch.float32), ("int64", torch.int64), ("int8", torch.int8)]:
        stc.write(f"{name}.npz", stc.SparseTensor(at, torch.tensor([5, 7], dtype=dtype), (2, 3)))
    stc.write("huge.npz", stc.SparseTensor(at, torch.tensor([5.0, 7.0]), (2, 10**13)))
    Path("junk.npz").write_bytes(b"junk")
    Path("folder.npz").mkdir()
    return tmp_path


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        status = command_line.main(arguments)
    except SystemExit as exit:  # as argparse leaves
        status = exit.code if isinstance(exit.code, int) else -1
    said = capsys.readouterr()
    return status, said.out, said.err


@pytest.mark.parametrize("dtype", ["int64", "int8", "float"])
def test_explain_takes_any_dtype(files: Path, capsys: pytest.CaptureFixture[str], dtype: str) -> None:
    status, out, err = _run(capsys, "explain", "ij,jr->ir", f"{dtype}.npz")
    assert (status, err) == (0, "")
    assert "considered" in out


REFUSALS = [
    (["explain", "ij,jr->ir", "float.npz", "--rank", "-1"], "--rank: must be an integer from 1"),
    (["explain", "ij,jr->ir", "float.npz", "--rank", "0"], "--rank: must be an integer from 1"),
    (["explain", "ij,jr->ir", "float.npz", "--rank", "9" * 5000], "--rank: must be an integer from 1"),
    (["explain", "ij,jr->ir", "float.npz", "--rank", "1" + "0" * 15], "dense operands of 3 x 1"),
    (
        ["explain", "ij,jr->ir", "huge.npz"],
        "dense operands of 10000000000000 x 32 would take 1,280,000,000,000,000 bytes",
    ),
    (["explain", "ij->j", "huge.npz"], "would take 40,000,000,000,000 bytes"),
    (["explain", "ij,jr->ir", "absent.npz"], "absent.npz"),
    (["explain", "ijk,jr->ir", "float.npz"], "of order 2"),
    (["explain", "ij,jr->ir", "float.npz", "--plan", "none"], "no plan is called 'none'"),
    (["explain", "ij,jr->ir", "float.npz", "--precision", "low"], "--precision: invalid choice: 'low'"),
    (["info", "junk.npz"], "junk.npz"),
    (["info", "folder.npz"], "folder.npz"),
    (["info", "float.txt"], "unknown suffix"),
    (["blocking", "float.npz", "--width", "0"], "--width: must be an integer from 1"),
    (["blocking", "float.npz", "--tau", "0"], "--tau: must be above 0 and at most 1, found '0'"),
    (["blocking", "float.npz", "--tau", "0.5", "x"], "--tau: must be above 0 and at most 1, found 'x'"),
    (["blocking", "float.npz", "--tau", "nan"], "--tau: must be above 0 and at most 1"),
    (["blocking", "float.npz", "--mode", "2"], "a mode from 0 to 1, found mode 2"),
    (["blocking", "junk.npz"], "junk.npz"),
    (["explain", "ij,jr->ir", "float.npz", "--rank", "x"], "--rank: must be an integer from 1"),
    (["unheard-of"], "invalid choice: 'unheard-of'"),
    ([], "required: command"),
]


@pytest.mark.parametrize(("arguments", "says"), REFUSALS, ids=lambda v: " ".join(v)[:60] if isinstance(v, list) else "")
def test_what_is_refused_is_said_in_one_line(
    files: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    status, _, err = _run(capsys, *arguments)
    assert status == 2
    assert err.startswith("sparsetc: ")
    assert says in err
    assert err.count("\n") == 1


def test_a_table_is_packed_by_its_columns(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What refuses it without names the option, and so does what refuses a limit."""
    pandas = pytest.importorskip("pandas")
    table = {"item": [1, 3, 1], "user": [0, 0, 2], "rating": [4.0, 2.5, 5.0]}
    pandas.DataFrame(table).to_parquet("ratings.parquet")
    status, _, err = _run(capsys, "pack", "ratings.parquet", "x.parquet")
    assert status == 2
    assert "name its columns=" in err
    assert _run(capsys, "pack", "ratings.parquet", "x.parquet", "--columns", "user", "item", "rating")[0] == 0
    assert stc.read("x.parquet").to_dense().tolist() == [[0, 4, 0, 2.5], [0] * 4, [0, 5, 0, 0]]
    said = _run(capsys, "pack", "float.npz", "y.parquet", "--memory-limit", "1MB")[2]
    assert said.endswith("raise it with --memory-limit\n")
    said = _run(capsys, "pack", "--help")[1]
    assert all(f"--{name.replace('_', '-')}" in said for name in ("memory_limit", "columns", "dtype"))


@pytest.mark.parametrize("name", ["int8", "float", "huge"])
def test_blocking_prints_a_line_a_similarity(files: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    status, out, err = _run(capsys, "blocking", f"{name}.npz", "--width", "2", "--tau", "0.25", "1")
    assert (status, err) == (0, "")
    head, columns, *lines = out.splitlines()
    assert head.startswith(f"{name}.npz: blockings of 2 x ")
    assert columns.split()[0] == "tau"
    assert [line.split()[:3] for line in lines] == [["0.25", "2", "2"], ["1", "2", "2"]]
    assert _run(capsys, "blocking", f"{name}.npz")[1].count("\n") == 12


def test_every_error_of_the_package_is_said_in_one_line(
    files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for error in (stc.PlanError("a plan"), OSError("a disk"), ImportError("a module"), MemoryError()):

        def fail(*_: object, raised: Exception = error, **__: object) -> None:
            raise raised

        monkeypatch.setattr(stc, "read", fail)
        status, _, err = _run(capsys, "info", "float.npz")
        assert (status, err) == (2, f"sparsetc: {str(error) or 'MemoryError'}\n")
    monkeypatch.setattr(stc, "read", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    assert _run(capsys, "info", "float.npz")[0] == 130


@pytest.mark.skipif(os.name != "posix", reason="no such pipes, nor such names")
def test_a_reader_that_leaves_and_a_name_that_cannot_be_shown_are_no_errors(files: Path) -> None:
    name = os.fsdecode(b"\xff.npz")
    os.rename("float.npz", name)
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    arguments = ["-m", "sparsetc", "info", name]
    done = processes.run(arguments, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("\\udcff.npz: order 2")
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=environment, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=300)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")
