"""Bytes of a tensor as plans store it for the MTTKRPs of all modes: a copy a mode, one tree of fibers, and MM-CSF.

    python benchmarks/bytes.py                       # the Uber tensor
    python benchmarks/bytes.py nell-2=0.01 x.tns     # one like a published tensor, at a scale; one of a file
    python benchmarks/bytes.py uracil3_t2_4d.npz     # arrays `coords`, `values` and `shape`

Of each: bytes a nonzero of index arrays, and of values as they are stored, padding included. What a GPU would read is
packed on the CPU.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from common import mttkrp_equation
from synthetic import like

import sparsetc as stc
from sparsetc.packing.base import Packed, pack
from sparsetc.planner.problem import Counts

RANK = 32


def tensor(name: str) -> stc.SparseTensor:
    """The tensor that an argument names, of float32."""
    if "=" in name:
        published, scale = name.split("=")
        coords, shape = like(published, float(scale))
    elif name.endswith(".npz") and "coords" in (found := np.load(name)).files:
        coords, shape = torch.from_numpy(found["coords"].astype(np.int64)), tuple(map(int, found["shape"]))
    else:
        return stc.read(name)
    return stc.SparseTensor(coords, torch.ones(coords.shape[1]), shape)


def by_plan(x: stc.SparseTensor, plan: str, backend: str) -> list[Packed]:
    """What the MTTKRPs of all modes store by a plan, each part once."""
    table = [torch.empty(1, RANK).expand(n, RANK) for n in x.shape]
    equations = [mttkrp_equation(x.order, mode) for mode in range(x.order)]
    operands = [table[:m] + table[m + 1 :] for m in range(x.order)]
    kernels = [stc.compile(e, x, *own, plan=plan, backend=backend) for e, own in zip(equations, operands, strict=True)]
    return list({part.packed.token: part.packed for k in kernels for part in k.step.parts}.values())


def one_tree(x: stc.SparseTensor) -> list[Packed]:
    """Fibers along the mode that has fewest, those of a slice together, as CSF."""
    counts, modes = Counts(x.coords, x.shape), range(x.order)
    leaf = min(modes, key=lambda m: counts.distinct(tuple(n for n in modes if n != m)))
    root, *between = sorted((m for m in modes if m != leaf), key=lambda m: counts.distinct((m,)))
    item, lane = ((root,), tuple(between)) if between else ((), (root,))
    return [pack(x.coords, x.shape, "fiber", stc.plans.Storage(item, lane, (leaf,)))]


def fibers_in_words(x: stc.SparseTensor) -> float:
    """Bytes a nonzero of the partition's fibers by the paper's count, d words a fiber and one a nonzero."""
    words = x.nnz
    for along, share in enumerate(Counts(x.coords, x.shape).shares("mixed_mode")):
        words += x.order * share.distinct(tuple(m for m in range(x.order) if m != along))
    return 4 * words / x.nnz


def row(name: str, parts: list[Packed], nnz: int) -> str:
    """One line of the table."""
    index, values = (sum(p.nbytes for p in parts) / nnz, 4 * sum(p.stored for p in parts) / nnz)
    return f"  {name:34}{index:10.2f}{values:10.2f}{index + values:10.2f}"


def main() -> None:
    """A table a tensor."""
    for name in sys.argv[1:] or ["uber"]:
        x = stc.datasets.uber() if name == "uber" else tensor(name)
        print(f"{name}: {' x '.join(map(str, x.shape))}, {x.nnz:,} nonzeros; bytes a nonzero")
        print(f"  {'':34}{'index':>10}{'values':>10}{'all':>10}")
        print(f"  {'coordinates, 4 bytes each':34}{4 * x.order:10.2f}{4:10.2f}{4 * x.order + 4:10.2f}")
        for plan in ("coo", "fiber"):
            print(row(f"{plan}, a copy a mode, on a GPU", by_plan(x, plan, "triton"), x.nnz))
        print(row("one tree of fibers (CSF)", one_tree(x), x.nnz))
        for backend, where in (("triton", "on a GPU"), ("torch", "on a CPU")):
            print(row(f"mm-csf, {where}", by_plan(x, "mm-csf", backend), x.nnz))
        paper = fibers_in_words(x)
        print(f"  {'mm-csf, in the words of the paper':34}{paper:10.2f}{4:10.2f}{paper + 4:10.2f}")


if __name__ == "__main__":
    main()
