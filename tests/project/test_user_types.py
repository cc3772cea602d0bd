"""What type checkers say of a script that a user would write: nothing, and of a misspelt keyword where it is."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import processes
import pytest

SCRIPT = """
import torch
import sparsetc as stc
from sparsetc.decomposition import cp_als

x = stc.SparseTensor(torch.tensor([[0, 1], [1, 0], [0, 2]]), torch.tensor([1.0, 2.0]), shape=(2, 2, 3))
b, c = torch.rand(2, 4), torch.rand(3, 4)

dense: torch.Tensor = stc.einsum("ijk,jr,kr->ir", x, b, c, output="dense", precision="high")
sampled: stc.SparseTensor = stc.einsum("ijk,ir,jr,kr->ijk", x, b, b, c, output="sparse", drop_zeros=True)
means = stc.einsum("ijk,jr->ir", x, b, reduce="mean", plan="fiber")
one: torch.Tensor = stc.mttkrp(x, [None, b, c], 0, precision="highest")
each: tuple[torch.Tensor, ...] = stc.mttkrp(x, [b, b, c])
matrix: stc.SparseTensor = stc.ttv(x, torch.rand(3), 2, output="sparse")
rows: torch.Tensor = stc.spmm(matrix, b, deterministic=True)
places: stc.SparseTensor = stc.sddmm(matrix, b, b)
total: stc.SparseTensor = (matrix + places * 2).T.clip(0, 1)
weights: stc.SparseTensor = stc.softmax(total, dim=1)
kernel: stc.Kernel = stc.compile("ij,jr->ir", weights, b, memory_limit="1GiB")
with stc.options(precision="medium", tune="now"):
    layer = stc.nn.SparseLinear.from_dense(torch.eye(4), blocksize=(2, 2), plan="auto")
    print(kernel(b), layer(rows), stc.explain("ij,jr->ir", weights, b).plan)
print(cp_als(x, 2, backend="torch").fit, dense, means, one, each)
"""
MISSPELT = """
stc.einsum("ij,jr->ir", matrix, b, precison="high")
stc.einsum("ij,jr->ir", matrix, b, precision="hihg")
stc.spmm(matrix, b, determinstic=True)
stc.compile("ij,jr->ir", matrix, b, memory=1)
stc.options(precison="high")
stc.options(tune="later")
matrix.sum(0, output="dens")
cp_als(x, 2, plam="auto")
stc.nn.SparseLinear.from_dense(torch.eye(4), ouput="dense")
stc.softmax(matrix, dm=1)
"""
BAD = range(SCRIPT.count("\n") + 2, (SCRIPT + MISSPELT).count("\n") + 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script, with the lines that are wrong behind it."""
    made: Path = tmp_path_factory.mktemp("user")
    (made / "script.py").write_text(SCRIPT + MISSPELT)
    (made / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}')
    return made


def test_mypy(folder: Path) -> None:
    kept = f"--cache-dir={os.environ['SPARSETC_CACHE_DIR']}/mypy"  # to read torch takes it twenty seconds
    said = _run(folder, "mypy", kept, "--config-file=", "--strict", "--ignore-missing-imports", "--no-error-summary")
    assert [int(line) for line in dict.fromkeys(re.findall(r"^script\.py:(\d+): error", said, re.M))] == list(BAD), said


def test_pyright(folder: Path) -> None:
    said = _run(folder, "basedpyright", "--level", "error", "--pythonpath", sys.executable, "--outputjson")
    found = json.loads(said)["generalDiagnostics"]
    assert sorted({one["range"]["start"]["line"] + 1 for one in found}) == list(BAD), said


def test_the_script_runs(folder: Path) -> None:
    (folder / "right.py").write_text(SCRIPT)
    done = processes.run(["right.py"], cwd=folder)
    assert done.returncode == 0, done.stderr


def _run(folder: Path, tool: str, *options: str) -> str:
    """What a checker prints of the script."""
    command = [sys.executable, "-m", tool, *options, "script.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout
