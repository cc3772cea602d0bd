"""Torch programs on a GPU: what the planner chose beside every plan by name, over random einsums.

    python benchmarks/torch_on_gpu.py [--seed N] [--seconds S]

A GPU runs the generated torch programs of complex numbers, and of ``backend="torch"``. Recorded is how many times the
time of the best plan the chosen one's took. With ``--counts FILE`` a line of JSON for each program is written: its
seconds, and what `Cost.loops` counts, to which ``"loops"`` of ``nvidia-h200.json`` were fitted.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import DEVICE, record

import sparsetc as stc
from sparsetc.calibration import counted

EQUATIONS = {
    2: ("ij,jr->ir", "ij,ir,jr->ij", "ij,j->i", "ij,ir->jr", "ij,ij->", "ij->i"),
    3: ("ijk,jr,kr->ir", "ijk,jr,ks->irs", "ijk,kr->ijr", "ijk,k->ij", "ijk,ir,kr->jr", "ijk,ijr->kr"),
    4: ("ijkl,jr,kr,lr->ir", "ijkl,lr->ijkr", "ijkl,pi,qj->pqkl"),
}
LONGEST = {2: 50_000, 3: 4000, 4: 300}
"""Largest size of a mode, by order."""
PLANS = ("coo", "rows", "fiber", "dense")
DTYPES = (torch.float32, torch.float64, torch.complex64)
MOST = 5e8
"""Elements of a dense operand, a result, or all products, at most."""


def random_einsums(seed: int) -> Iterator[tuple[str, torch.Tensor, tuple[int, ...], list[torch.Tensor], torch.dtype]]:
    """Yield equations, coordinates, shapes, dense operands and dtypes."""
    g = torch.Generator().manual_seed(seed)

    def below(least: float, most: float) -> int:
        return int(least * (most / least) ** torch.rand((), generator=g).item())

    def one_of(things: Any) -> Any:
        return things[int(torch.randint(len(things), (), generator=g))]

    while True:
        order, nnz, rank, dtype = one_of((2, 2, 3, 3, 4)), below(1000, 2e6), below(2, 128), one_of(DTYPES)
        equation, shape = one_of(EQUATIONS[order]), tuple(below(20, LONGEST[order]) for _ in range(order))
        few = min(rank, 32)
        sizes = dict(zip("ijkl", shape, strict=False)) | {"r": rank, "s": few, "p": few, "q": few}
        inputs, output = equation.split("->")
        first, *terms = inputs.split(",")
        largest = max(math.prod(sizes[c] for c in term) for term in (*terms, output))
        products = nnz * math.prod(sizes[c] for c in {*"".join(terms), *output}.difference(first))
        if nnz > 0.6 * math.prod(shape) or max(largest, products) > MOST:
            continue
        power = one_of((1, 1, 3))  # even, or crowded at the first coordinates
        rows = [(n * torch.rand(nnz, generator=g) ** power).long().clamp(max=n - 1) for n in shape]
        dense = [torch.rand([sizes[c] for c in term], generator=g).to(DEVICE, dtype) for term in terms]
        yield equation, torch.unique(torch.stack(rows), dim=1).to(DEVICE), shape, dense, dtype


def seconds(kernel: stc.Kernel, dense: list[torch.Tensor]) -> float:
    """Seconds of a call among calls that follow one another."""
    for _ in range(3):
        kernel(*dense)
    torch.cuda.synchronize()
    start = time.perf_counter()
    kernel(*dense)
    torch.cuda.synchronize()
    calls = max(3, min(40, int(4e-3 / (time.perf_counter() - start))))
    least = math.inf
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(calls):
            kernel(*dense)
        torch.cuda.synchronize()
        least = min(least, (time.perf_counter() - start) / calls)
    return least


def main() -> None:
    """Time einsums until the seconds are over, and record them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--counts", type=Path)
    asked = parser.parse_args()
    stop, rows, lines = time.monotonic() + asked.seconds, list[dict[str, Any]](), list[str]()
    for equation, coords, shape, dense, dtype in random_einsums(asked.seed):
        if time.monotonic() > stop:
            break
        x = stc.SparseTensor(coords, torch.rand(coords.shape[1], device=DEVICE).to(dtype), shape)
        chosen = stc.compile(equation, x, *dense, backend="torch", plan="one-pass").plan.name
        us = dict[str, float]()
        for plan in dict.fromkeys((*PLANS, chosen)):
            try:
                kernel = stc.compile(equation, x, *dense, backend="torch", plan=plan)
                taken = seconds(kernel, dense)
            except (stc.SparsetcError, torch.OutOfMemoryError):
                continue
            us[plan] = round(1e6 * taken, 1)
            if plan not in ("dense", "positions") and len(kernel.step.parts) == 1:
                lines.append(json.dumps({"seconds": taken, "counts": counted(kernel)}))
        row = {"equation": equation, "shape": shape, "nnz": x.nnz, "dtype": str(dtype), "chosen": chosen, "us": us}
        rows.append(row | {"times_the_best": round(us[chosen] / min(us.values()), 3)})
        print(rows[-1], flush=True)
    if asked.counts:
        asked.counts.write_text("\n".join(lines))
    regrets = [row["times_the_best"] for row in rows]
    mean = math.exp(sum(map(math.log, regrets)) / len(regrets))
    record("torch_on_gpu", rows, seed=asked.seed, mean_times_the_best=round(mean, 3), most=max(regrets))
    print(f"{len(rows)} einsums: {mean:.3f} times the best, at most {max(regrets)}")


if __name__ == "__main__":
    main()
