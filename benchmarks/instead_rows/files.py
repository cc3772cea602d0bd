"""Reading text files, beside scipy and numpy."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import torch

import sparsetc as stc
from instead_rows.calls import versioned
from instead_rows.operands import scattered
from instead_rows.row import CPU, Call, Row, Task

KEPT: list[tempfile.TemporaryDirectory[str]] = []
"""Folders that last until the program ends."""


def read(suffix: str, nnz: int) -> Task:
    """Read a file that is in the page cache."""
    shape = (5000, 6000) if suffix == ".mtx" else (2000, 3000, 4000)
    x = scattered(shape, nnz)
    KEPT.append(tempfile.TemporaryDirectory())
    path = Path(KEPT[-1].name) / f"x{suffix}"
    stc.write(path, x)
    whole = x.to_torch(torch.sparse_coo).double()
    instead: dict[str, Call] = {"numpy.loadtxt": lambda: from_text(path, shape)}
    if suffix == ".mtx":
        from scipy.io import mmread

        instead = {f"{versioned('scipy')} mmread": lambda: mmread(path)}
    return Task(lambda: stc.read(path, progress=False), instead, lambda: whole)


def from_text(path: Path, shape: tuple[int, ...]) -> torch.Tensor:
    """Read lines of 1-based coordinates and a value."""
    table = torch.as_tensor(np.loadtxt(path))
    return torch.sparse_coo_tensor(table[:, :-1].T.long() - 1, table[:, -1], shape)


ROWS = [
    Row(".mtx, 1 M nonzeros", "reading text", partial(read, ".mtx", 1_000_000), CPU),
    Row(".tns, order 3, 300 K nonzeros", "reading text", partial(read, ".tns", 300_000), CPU),
]
