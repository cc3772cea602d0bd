"""Plans between which the cost model has to choose, timed by name: tiles or runs, runs or rows, at each precision.

    python benchmarks/choices.py [tensor ...]

Tensors are made here: SpMM of matrices of every density, by runs and with all tiles dense; MTTKRP of a small tensor;
chains and tensor-matrix products whose rows are short. Times are of the launches. A number stands for `plan_hls` of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import synthetic
import torch
from common import DEVICE, kernel_microseconds, record

import sparsetc as stc

PRECISIONS = ("highest", "high", "medium")
Case = tuple[str, dict[str, int], list[tuple[Any, str]]]
"""(equation, sizes of dense letters, (plan, precision) that are timed)."""


def random(shape: tuple[int, ...], share: float) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Nonzeros anywhere, so many of all positions."""
    g = torch.Generator(device=DEVICE).manual_seed(0)
    return torch.nonzero(torch.rand(shape, device=DEVICE, generator=g) < share).T.contiguous(), shape


def by(*plans: Any, precisions: tuple[str, ...] = ("highest",)) -> list[tuple[Any, str]]:
    """Each plan at each precision."""
    return [(plan, precision) for plan in plans for precision in precisions]


def spmm(*columns: int, plans: list[tuple[Any, str]]) -> list[Case]:
    """Products with dense matrices of so many columns."""
    return [("ij,jr->ir", {"r": n}, plans) for n in columns]


TILES = spmm(8, 32, 128, 512, 4096, plans=by("coo") + by(1, precisions=PRECISIONS))
SHORT_ROWS = by("coo", "rows", "coo+rows")
TENSORS: dict[str, tuple[Callable[[], Any], list[Case]]] = {
    "random 2048 .5": (lambda: random((2048, 2048), 0.5), TILES),
    "random 2048 .1": (lambda: random((2048, 2048), 0.1), TILES),
    "random 2048 .02": (lambda: random((2048, 2048), 0.02), TILES),
    "random 2048 .004": (lambda: random((2048, 2048), 0.004), TILES),
    "random 512 .1": (lambda: random((512, 512), 0.1), TILES),
    "blocks .1 .1": (lambda: synthetic.block_matrix(8192, 64, 0.1, 0.1, scramble=False, device=DEVICE), TILES),
    "blocks .01 .1, scrambled": (lambda: synthetic.block_matrix(8192, 64, 0.01, 0.1, device=DEVICE), TILES),
    "R-MAT 14 x32": (lambda: synthetic.rmat(14, 32, device=DEVICE), [*TILES, *spmm(32, 4096, plans=SHORT_ROWS)]),
    "R-MAT 14 x128": (
        lambda: synthetic.rmat(14, 128, device=DEVICE),
        spmm(512, 4096, plans=by("coo", "coo+rows", 32, 45, 64)),
    ),
    "R-MAT 14 x5": (lambda: synthetic.rmat(14, 5, device=DEVICE), spmm(8, 32, 128, plans=SHORT_ROWS)),
    "clustered 600": (
        lambda: synthetic.clustered(per_tile=600, device=DEVICE),
        [("ijk,kr->ijr", {"r": 16}, by("rows", "coo+rows") + by(1, precisions=("medium",)))],
    ),
    "random 39 x 39 x 686 .165": (
        lambda: random((39, 39, 686), 0.165),
        [("ijk,jr,kr->ir", {"r": r}, by("coo", "fiber", 1, precisions=PRECISIONS)) for r in (32, 64, 128)],
    ),
    "flickr x0.1": (
        lambda: synthetic.like("flickr", 0.1, device=DEVICE),
        [
            ("ijk,jr,ks->irs", {"r": 32, "s": 32}, by("fiber", "coo", precisions=("high", "medium"))),
            ("ijk,ir,js->krs", {"r": 32, "s": 32}, by("rows", "coo")),
        ],
    ),
}


def main() -> None:
    """Time every plan of every case."""
    rows: list[dict[str, Any]] = []
    for name in [a for a in sys.argv[1:] if a in TENSORS] or TENSORS:
        make, cases = TENSORS[name]
        coords, shape = make()
        x = stc.SparseTensor(coords, torch.rand(coords.shape[1], device=DEVICE) + 0.1, shape)
        for equation, sizes, plans in cases:
            letters, *terms = equation.split("->")[0].split(",")
            extent = dict(zip(letters, shape, strict=True)) | sizes
            dense = [torch.randn([extent[c] for c in term], device=DEVICE) for term in terms]
            us: dict[str, float] = {}
            for plan, precision in plans:
                wanted = stc.plan_hls(plan) if isinstance(plan, int) else plan
                kernel = stc.compile(equation, x, *dense, plan=wanted, precision=precision)
                label = f"hls {plan}" if isinstance(plan, int) else plan
                us[f"{label}, {precision}"] = round(kernel_microseconds(kernel, dense), 1)
            rows.append({"tensor": name, "nnz": x.nnz, "equation": equation, "sizes": sizes, "us": us})
            print(name, equation, sizes, us, flush=True)
        x.pattern.clear()
    record("choices", rows)


if __name__ == "__main__":
    main()
