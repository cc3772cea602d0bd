"""Other operations, float32, "highest": SpMM, SpMV, TTV, TTM, sampled products, order-4 TTM chains, against torch.

The torch time is `torch.sparse.mm` for a matrix product, and for the rest gather, multiply and index_add over chunks
of nonzeros, which is what a torch user can write.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import synthetic
import torch
from common import DEVICE, kernel_microseconds, microseconds, record, tensor

import sparsetc as stc
from sparsetc.ir.equation.parse import parse

sys.path.append(str(Path(__file__).parent.parent / "tests"))

from reference import run, sampled

CASES: list[tuple[str, str, dict[str, int]]] = [
    ("c2000_5_mat", "ij,jr->ir", {"r": 128}),
    ("rmat 14 32", "ij,jr->ir", {"r": 128}),
    ("rmat 14 32", "ij,j->i", {}),
    ("rmat 14 32", "ij,ir,jr->ij", {"r": 64}),
    ("nell-2 x0.25", "ijk,k->ij", {}),
    ("nell-2 x0.25", "ijk,i->jk", {}),
    ("nell-2 x0.25", "ijk,kr->ijr", {"r": 16}),
    ("nell-2 x0.25", "ijk,ir,jr,kr->ijk", {"r": 32}),
    ("nell-2 x0.25", "ijk,jr,kr->ir", {"r": 128}),
    ("nell-2 x0.25", "ijk,jr,kr->ir", {"r": 5}),
    ("nell-2 x0.25", "ijk,i,j,k->", {}),
    ("uber_amj_4d", "ijkl,jr,ks,lt->irst", {"r": 8, "s": 8, "t": 8}),
    ("flickr x0.1", "ijk,k->ij", {}),
]


def operand(name: str) -> stc.SparseTensor | None:
    """A tensor of `common`, or an R-MAT graph."""
    if not name.startswith("rmat"):
        return tensor(name)
    coords, shape = synthetic.rmat(*map(int, name.split()[1:]), device=DEVICE)
    return stc.SparseTensor(coords, torch.rand(coords.shape[1], device=DEVICE) + 0.1, shape)


def torch_call(x: stc.SparseTensor, equation: str, dense: list[torch.Tensor]) -> Callable[[], object] | None:
    """What torch offers for a matrix; None for the rest."""
    if equation == "ij,jr->ir":
        matrix = x.to_torch(torch.sparse_csr)
        return lambda: torch.sparse.mm(matrix, dense[0])
    if equation == "ij,j->i":
        matrix = x.to_torch(torch.sparse_csr)
        return lambda: matrix @ dense[0]
    return None


def error_of(
    found: stc.SparseTensor | torch.Tensor, x: stc.SparseTensor, equation: str, dense: list[torch.Tensor]
) -> float:
    """Norm of the error over the norm of the same einsum of absolute values.

    A sampled result is compared nonzero by nonzero; any other sparse one by its sum over the pattern.
    """
    shapes = [x.shape, *(tuple(d.shape) for d in dense)]
    absolute = [x.with_values(x.values.abs()), *(d.abs() for d in dense)]
    if isinstance(found, stc.SparseTensor):
        if found.values.dim() == 1 and found.nnz == x.nnz:
            e = parse(equation, shapes, [True, *(False for _ in dense)]).einsum
            scale = sampled(e, *absolute).norm()
            return float((found.values.double() - sampled(e, x, *dense).flatten()).norm() / scale)
        kept = equation.split(",")[0]
        equation = equation.split("->")[0] + "->" + "".join(c for c in equation.split("->")[1] if c not in kept)
        found = found.values.double().sum(0)
    e = parse(equation, shapes, [True, *(False for _ in dense)]).einsum
    return float((found.double() - run(e, x, *dense)).norm() / run(e, *absolute).norm())


def main() -> None:
    only = sys.argv[1:] or ["auto"]
    rows = []
    for name, equation, ranks in CASES:
        x = operand(name)
        if x is None:
            continue
        left = equation.split("->")[0].split(",")
        sizes = dict(zip(left[0], x.shape, strict=True)) | ranks
        dense = [torch.randn([sizes[c] for c in term], device=DEVICE) for term in left[1:]]
        for plan in only:
            try:
                k = stc.compile(equation, x, *dense, plan=plan, precision="highest")
            except stc.PlanError:
                continue
            error = error_of(k(*dense), x, equation, dense)
            assert error < 1e-5, (name, equation, plan, error)
            e = k.explain()
            call = torch_call(x, equation, dense)
            rows.append(
                {
                    "tensor": name,
                    "equation": equation,
                    "sizes": ranks,
                    "plan": k.plan.name,
                    "call_us": round(microseconds(lambda: k(*dense)), 1),  # noqa: B023, F821
                    "kernel_us": round(kernel_microseconds(k, dense), 1),
                    "predicted_us": round(sum(p.predicted_us for p in e.parts), 1),
                    "floor_us": round(sum(p.roofline_us for p in e.parts), 1),
                    "bound_by": [p.bound_by for p in e.parts],
                    "torch_us": round(microseconds(call), 1) if call else None,
                    "error": error,
                }
            )
            print(rows[-1], flush=True)
            del k
        del x
    record("ops" if only == ["auto"] else "ops_plans", rows)


if __name__ == "__main__":
    main()
