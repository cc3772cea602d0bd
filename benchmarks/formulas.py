"""Write docs/how/formulas.md: what each plan costs, as expressions; no GPU is needed.

python benchmarks/formulas.py > docs/how/formulas.md
"""

from __future__ import annotations

from typing import Any

import torch

import sparsetc as stc
from sparsetc.planner.registry import PLANS

CASES = {
    "MTTKRP of order 3, `ijk,jr,kr->ir`": ("ijk,jr,kr->ir", (4000, 3000, 2000), ("coo", "rows", "fiber", "mm-csf")),
    "SpMM, `ij,jr->ir`": ("ij,jr->ir", (4000, 3000), ("coo", "rows", "window", "dense")),
}
INTRODUCTION = """\
# Formulas

This page holds what plans cost, as sparsetc itself says it: `k.cost` of a compiled kernel maps what is counted to
[sympy](https://www.sympy.org) expressions, `k.explain(symbolic=True)` prints them, and `k.cost.at(nonzeros=10**9,
r=128)` gives the numbers with other sizes. It is written by `python benchmarks/formulas.py`.

Letters are sizes of modes. `items`, `fibers` and `nonzeros` are work items, fibers (of tiles: tiles) and values as
they are stored, padding included, numbered where a plan has several parts; `itemsize` is the bytes of a value,
`chain` the rounds of dependent loads of the longest item, `runs_j` how often coordinate j changes. Other names are
fields and constants of the device's [profile](devices.md), here of an NVIDIA H200, tables with the precision behind
the name. *Bytes* are those that device memory moves at least, *atomics* elements that are added by atomics,
*products* multiplications and additions. An expression for *seconds* holds as long as the model decides as it did
here: what fits into a cache, which of two bounds is larger.
"""


def kernel(equation: str, shape: tuple[int, ...], plan: str) -> Any:
    """A kernel of 300,000 random nonzeros and 32 columns."""
    g = torch.Generator().manual_seed(0)
    coords = torch.stack([torch.randint(0, n, (300_000,), generator=g) for n in shape])
    x = stc.SparseTensor(coords, torch.ones(300_000), shape).coalesce()
    dense = [torch.ones(n, 32) for n in shape[1:]]
    return stc.compile(equation, x, *dense, plan=plan, backend="triton")


def page() -> str:
    """The page."""
    import sympy

    lines = [INTRODUCTION]
    for title, (equation, shape, plans) in CASES.items():
        lines.append(f"## {title}\n")
        for plan in filter(PLANS.__contains__, plans):
            cost = kernel(equation, shape, plan).cost
            lines += [f"### `{plan}`\n", "```"]
            for name, found in cost.items():
                short = found.xreplace({f: sympy.Float(f, 4) for f in found.atoms(sympy.Float)})
                lines.append(f"{name:<13} {short}")
            lines.append("```\n")
    return "\n".join(lines).rstrip()


if __name__ == "__main__":
    print(page())
