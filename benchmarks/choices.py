"""Plans between which the cost model has to choose, timed by name: tiles or runs, runs or rows, at each precision.

    python benchmarks/choices.py [tensor ...]
    python benchmarks/choices.py --held-out [tensor ...]

Tensors are made here: SpMM of matrices of every density, by runs and with all tiles dense; MTTKRP of a small tensor;
chains and tensor-matrix products whose rows are short. Times are of the launches. A number stands for `plan_hls` of it.

Held out are tensors that no law was fitted to, with ``"auto"`` beside every plan by name: recorded is how many times
the time of the best plan auto's took, zeros and conversions included.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import synthetic
import torch
from common import DEVICE, device_microseconds, kernel_microseconds, record

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
NAMES = ("auto", "coo", "fiber", "rows", "coo+rows", "fiber+rows", "hls", "mm-csf", "window", "1-sa", "dense")
MATRIX = spmm(16, 128, 1024, plans=by(*NAMES, precisions=("highest", "high")))
SDDMM: list[Case] = [("ij,ir,jr->ij", {"r": r}, by("auto", "coo", "fiber", "dense")) for r in (32, 256)]


def tensor_cases(order: int, mode: int, ranks: tuple[int, ...]) -> list[Case]:
    """MTTKRP of a mode."""
    own = "ijkl"[:order]
    equation = ",".join([own, *(f"{c}r" for c in own if c != own[mode])]) + f"->{own[mode]}r"
    return [(equation, {"r": r}, by(*NAMES[:9], precisions=("highest", "high"))) for r in ranks]


HELD_OUT: dict[str, tuple[Callable[[], Any], list[Case]]] = {
    "R-MAT 13 x20": (lambda: synthetic.rmat(13, 20, seed=7, device=DEVICE), [*MATRIX, *SDDMM]),
    "R-MAT 15 x6": (lambda: synthetic.rmat(15, 6, (0.45, 0.22, 0.22, 0.11), seed=8, device=DEVICE), [*MATRIX, *SDDMM]),
    "power law 60 K": (lambda: synthetic.power_law(60_000, 500_000, 0.5, seed=9, device=DEVICE), MATRIX),
    "blocks 48, .03 .4": (lambda: synthetic.block_matrix(6144, 48, 0.03, 0.4, seed=5, device=DEVICE), MATRIX),
    "blocks 24, .2 .15": (lambda: synthetic.block_matrix(3072, 24, 0.2, 0.15, seed=6, device=DEVICE), MATRIX),
    "pruned 3072 x 1024 .85": (
        lambda: synthetic.pruned_weights(3072, 1024, 0.85, seed=4, device=DEVICE),
        [*MATRIX, *SDDMM],
    ),
    "random 1500 .3": (lambda: random((1500, 1500), 0.3), [*MATRIX, *SDDMM]),
    "random 40000 x 600 .003": (lambda: random((40_000, 600), 0.003), MATRIX),
    "hexahedral 20": (lambda: synthetic.hexahedral((20, 18, 16), 3, device=DEVICE), MATRIX),
    "nell-1 x.01": (lambda: synthetic.like("nell-1", 0.01, seed=3, device=DEVICE), tensor_cases(3, 0, (16, 64))),
    "delicious x.01": (lambda: synthetic.like("delicious", 0.01, seed=3, device=DEVICE), tensor_cases(3, 1, (32, 128))),
    "random 80 x 90 x 70 .2": (lambda: random((80, 90, 70), 0.2), tensor_cases(3, 2, (32, 128))),
    "clustered, other": (
        lambda: synthetic.clustered((300, 200, 400), 600_000, per_tile=90, seed=2, device=DEVICE),
        tensor_cases(3, 1, (32, 128)),
    ),
}


def main() -> None:
    """Time every plan of every case."""
    rows: list[dict[str, Any]] = []
    held_out = "--held-out" in sys.argv
    known = HELD_OUT if held_out else TENSORS
    for name in [a for a in sys.argv[1:] if a in known] or known:
        make, cases = known[name]
        coords, shape = make()
        x = stc.SparseTensor(coords, torch.rand(coords.shape[1], device=DEVICE) + 0.1, shape)
        for equation, sizes, plans in cases:
            letters, *terms = equation.split("->")[0].split(",")
            extent = dict(zip(letters, shape, strict=True)) | sizes
            dense = [torch.randn([extent[c] for c in term], device=DEVICE) for term in terms]
            us: dict[str, float] = {}
            for plan, precision in plans:
                wanted = stc.plans.plan_hls(plan) if isinstance(plan, int) else plan
                try:
                    kernel = stc.compile(equation, x, *dense, plan=wanted, precision=precision)
                except stc.PlanError:  # not every plan applies to every case
                    continue
                label = f"hls {plan}" if isinstance(plan, int) else plan
                whole = partial(device_microseconds, partial(kernel, *dense))
                us[f"{label}, {precision}"] = round(whole() if held_out else kernel_microseconds(kernel, dense), 1)
            row = {"tensor": name, "nnz": x.nnz, "equation": equation, "sizes": sizes, "us": us}
            rows.append(row | (beside_best(us) if held_out else {}))
            print(rows[-1], flush=True)
        x.pattern.clear()
    record("choices_held_out" if held_out else "choices", rows)


def beside_best(us: dict[str, float]) -> dict[str, dict[str, float]]:
    """Auto's time over that of the best plan by name, by precision; a more exact plan counts at a lower precision."""
    exact = min((time for label, time in us.items() if label.endswith("highest") and "auto" not in label), default=0.0)
    ratios: dict[str, float] = {}
    for precision in PRECISIONS:
        if (auto := us.get(f"auto, {precision}")) is not None:
            named = [time for label, time in us.items() if label.endswith(precision) and not label.startswith("auto")]
            ratios[precision] = round(auto / min(named if precision == "highest" else [*named, exact]), 3)
    return {"ratio": ratios}


if __name__ == "__main__":
    main()
