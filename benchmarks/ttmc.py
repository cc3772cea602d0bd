"""TTM chain, R1 = R2 = 32, on a tensor like nell-2 (77 M nonzeros): time against the torch expression.

`probe` is a gathered matrix product in Triton measured on an H200 (tf32x3 for "highest", tf32 for "high").
"""

from __future__ import annotations

import sys

import torch
from common import DEVICE, factors, kernel_microseconds, microseconds, record, relative_error, tensor

import sparsetc as stc

EQUATIONS = ("ijk,jr,ks->irs", "ijk,ir,ks->jrs", "ijk,ir,js->krs")
PROBE_US = {"highest": 3300, "high": 2000}


def reference(
    x: stc.SparseTensor, b: torch.Tensor, c: torch.Tensor, modes: tuple[int, int, int], rows: int
) -> torch.Tensor:
    """float64 result of the first `rows` output rows."""
    i, j, k = modes
    keep = torch.nonzero(x.coords[i] < rows).flatten()
    out = torch.zeros(rows, b.shape[1] * c.shape[1], dtype=torch.float64, device=x.device)
    for part in keep.split(1 << 18):
        left = b[x.coords[j, part]].double() * x.values[part, None].double()
        out.index_add_(0, x.coords[i, part], torch.einsum("nr,ns->nrs", left, c[x.coords[k, part]].double()).flatten(1))
    return out.view(rows, b.shape[1], c.shape[1])


def torch_expression(x: stc.SparseTensor, b: torch.Tensor, c: torch.Tensor, count: int = 2_000_000) -> float:
    """Microseconds a torch user's chunked gather, einsum and index_add would take, from its first `count` nonzeros."""
    out = torch.zeros(x.shape[0], b.shape[1] * c.shape[1], device=x.device)

    def run() -> None:
        for s in range(0, count, 500_000):
            p = slice(s, s + 500_000)
            left = b[x.coords[1, p]] * x.values[p, None]
            out.index_add_(0, x.coords[0, p], torch.einsum("nr,ns->nrs", left, c[x.coords[2, p]]).flatten(1))

    return microseconds(run) * x.nnz / count


def main() -> None:
    plans = sys.argv[1:] or ["auto"]
    x = tensor("nell-2" if DEVICE == "cuda" else "nell-2 x0.25")
    assert x is not None
    f, rows = factors(x, 32), []
    baseline = torch_expression(x, f[1], f[2])
    for mode, equation in enumerate(EQUATIONS):
        others = [m for m in range(3) if m != mode]
        dense = [f[m] for m in others]
        expected = reference(x, *dense, (mode, *others), 64)
        for precision in ("highest", "high"):
            for plan in plans:
                k = stc.compile(equation, x, *dense, plan=plan, precision=precision)
                error = relative_error(k(*dense)[:64], expected)
                assert error < (1e-5 if precision == "highest" else 3e-3), (equation, precision, error)
                row = {
                    "equation": equation,
                    "precision": precision,
                    "plan": k.plan.name,
                    "error": error,
                    "call_us": round(microseconds(lambda: k(*dense)), 1),  # noqa: B023, F821
                    "kernel_us": round(kernel_microseconds(k, dense), 1),
                    "floor_us": round(sum(p.roofline_us for p in k.explain().parts), 1),
                    "probe_us": PROBE_US[precision],
                    "torch_us": round(baseline),
                    "instruction": [p.instruction for p in k.explain().parts],
                }
                rows.append(row)
                print(row, flush=True)
                del k
        x.pattern.clear()
    record("ttmc", rows, nnz=x.nnz)


if __name__ == "__main__":
    main()
