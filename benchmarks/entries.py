"""Sparse operands with dense modes: einsums of their entries against the same on the expanded operand.

python benchmarks/entries.py

``plan_s`` is a first compilation, ``us`` a call of the kernel. The two are compared with one another first.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from common import DEVICE, microseconds, record, relative_error

import sparsetc as stc

CASES = (
    ("ijh,jhd->ihd", 100_000, (5000, 5000), (4,), [(5000, 4, 32)]),
    ("ijh,ihd,jhd->ijh", 100_000, (5000, 5000), (4,), [(5000, 4, 32), (5000, 4, 32)]),
    ("ijh,hd->ijd", 100_000, (5000, 5000), (16,), [(16, 16)]),
    ("IJij,Jjr->Iir", 100_000, (1000, 1000), (4, 4), [(1000, 4, 16)]),
    ("IJij,Jjr->Iir", 100_000, (1000, 1000), (8, 8), [(1000, 8, 16)]),
    ("IJij,Jjr->Iir", 20_000, (1000, 1000), (16, 16), [(1000, 16, 16)]),
    ("IJij,Jjr->Iir", 5_000, (1000, 1000), (32, 32), [(1000, 32, 16)]),
)


def entries(count: int, shape: tuple[int, ...], dense: tuple[int, ...]) -> stc.SparseTensor:
    """Random entries with dense modes."""
    g = torch.Generator().manual_seed(0)
    coords = torch.stack([torch.randint(0, n, (count,), generator=g) for n in shape])
    return stc.SparseTensor(coords, torch.randn(count, *dense, generator=g), (*shape, *dense)).to(DEVICE)


def timed(equation: str, x: stc.SparseTensor, dense: list[torch.Tensor]) -> tuple[dict[str, float], torch.Tensor]:
    """Times of compiling and of calling, and the result in full."""
    start = time.perf_counter()
    k = stc.compile(equation, x, *dense)
    found = k(*dense)
    whole = (found.to_dense() if isinstance(found, stc.SparseTensor) else found).double()
    plan_s = time.perf_counter() - start
    return {"plan_s": round(plan_s, 3), "us": round(microseconds(lambda: k(*dense)), 1)}, whole


def main() -> None:
    """Every case, as entries and expanded."""
    rows: list[dict[str, Any]] = []
    for equation, count, shape, sizes, given in CASES:
        x = entries(count, shape, sizes)
        dense = [torch.randn(*own, device=DEVICE) for own in given]
        own, found = timed(equation, x, dense)
        expanded, expected = timed(equation, x.expand_dense(), dense)
        error = relative_error(found, expected)
        assert error < 1e-5, (equation, error)
        rows.append({"equation": equation, "entries": count, "dense": sizes, "by_entries": own, "expanded": expanded})
        print(rows[-1], flush=True)
    record("entries", rows)


if __name__ == "__main__":
    main()
