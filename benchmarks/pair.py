"""Contractions of two sparse tensors by every path, against the dense product and torch's sparse one in the same run.

SPARSETC_DATA=<folder of .npz> python benchmarks/pair.py [--first] [words that a case's name must have]

Values are compared with those of the torch programs in float64 before any time is taken. Phases apart: ``pair_ms``
matches nonzeros (and blocks), ``symbolic_ms`` finds the result's pattern and whatever the path keeps for calls,
``numeric_us`` is the sum over tasks or blocks alone, replayed from a CUDA graph: what the device takes, however slow
the CPU that launches it; ``us`` is a call. ``compile_ms`` is all that is done once, by the second of two compilations.
``first_ms`` is the wall time of a first call of ``plan="auto"`` on operands not seen before, all from the join to a
result that is there, Triton's binaries being on disk; of torch, that of the product of matrices that are CSR already.
With ``--first`` these alone are taken. ``bcb_bytes`` and ``coo_bytes`` are those of both operands' matched entries,
coordinates of 32 bits.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from common import DEVICE, device_microseconds, microseconds, record, relative_error, tensor

import sparsetc as stc
from sparsetc.contraction.kernel import Kernel
from sparsetc.contraction.pair import Pair
from sparsetc.join.blocking import Blocking
from sparsetc.join.join import Join
from sparsetc.join.order import pattern_of
from sparsetc.products import WAYS

CASES = (
    ("guanine_TEoo_3d", "guanine_TEoo_3d", "ijk,abk->ijab"),
    ("guanine_TEoo_3d", "guanine_TEov_3d", "ijk,abk->ijab"),
    ("guanine_TEov_3d", "guanine_TEov_3d", "ijk,abk->ijab"),
    ("guanine_TEvv_3d", "guanine_TEov_3d", "ijk,abk->ijab"),
    ("uber_amj_4d", "uber_amj_4d", "ijkl,mjkl->im"),
    ("uber_amj_4d", "uber_amj_4d", "ijkl,mnkl->ijmn"),
    ("uber_amj_4d", "uber_amj_4d", "ijkl,ijml->km"),
    ("uber_amj_4d", "uber_amj_4d", "ijkl,ijmn->klmn"),
    ("nips", "nips", "ijkl,mnkl->ijmn"),
    ("R-MAT 14 x8", "R-MAT 14 x8", "ij,jk->ik"),
    ("R-MAT 14 x32", "R-MAT 14 x32", "ij,jk->ik"),
    ("flickr x0.01", "flickr x0.01", "ijk,ljk->il"),
    ("flickr x0.01", "flickr x0.01", "ijk,ljm->iklm"),
    ("bands 430x57", "bands 430x57", "ijk,ljk->il"),
    ("bands 430x57", "bands 430x57", "ijk,ljm->iklm"),
    ("blocks 1220x51", "blocks 1220x51", "ijk,ljk->il"),
    ("blocks 1220x51", "blocks 1220x51", "ijk,ljm->iklm"),
)
LIMIT = {"highest": 1e-5, "high": 2e-3}
PLANS = ("scalar", "dense", "bcb", stc.plans.plan_bcb(storage="bitmap"), "bcb+scalar")
MOST_TASKS = 2_000_000_000
"""Tasks above which the scalar path is not timed."""


def reference(equation: str, x: stc.SparseTensor, y: stc.SparseTensor) -> torch.Tensor:
    """(nnz,) the result's values in float64, by the torch programs."""
    return stc.compile(equation, *(o.with_values(o.values.double()) for o in (x, y)), backend="torch")().values


@dataclass(frozen=True)
class Case:
    """A contraction, and what is known of it before any plan is timed."""

    tensors: str
    equation: str
    x: stc.SparseTensor
    y: stc.SparseTensor
    expected: torch.Tensor
    """(nnz,) float64."""
    auto: dict[str, str]
    """What plan auto takes, by precision."""
    tasks: int

    @classmethod
    def of(cls, tensors: str, equation: str, x: stc.SparseTensor, y: stc.SparseTensor) -> Case:
        """Contract in float64, and ask the cost model."""
        auto = {precision: stc.compile(equation, x, y, precision=precision).plan.name for precision in LIMIT}
        tasks = pair_of(stc.compile(equation, x, y)).join.tasks
        return cls(tensors, equation, x, y, reference(equation, x, y), auto, tasks)

    def error(self, found: stc.SparseTensor, precision: str) -> float:
        """The relative error, once it is known to be below the limit."""
        error = relative_error(found.values, self.expected)
        assert error < LIMIT[precision], (self.tensors, self.equation, precision, error)
        return float(f"{error:.1e}")

    def named(self, plan: str) -> dict[str, str]:
        """What a row begins with."""
        return {"tensors": self.tensors, "equation": self.equation, "plan": plan}


def unfolded(x: stc.SparseTensor, term: str, rows: list[str]) -> torch.Tensor:
    """CSR, the letters `rows` down, all others across."""
    across = [c for c in term if c not in rows]
    key = torch.zeros(2, x.nnz, dtype=torch.long, device=x.device)
    for line, letters in enumerate((rows, across)):
        for c in letters:
            key[line] = key[line] * x.shape[term.index(c)] + x.coords[term.index(c)]
    shape = [prod(x.shape[term.index(c)] for c in letters) for letters in (rows, across)]
    return torch.sparse_coo_tensor(key, x.values, shape).to_sparse_csr()


def matrices(equation: str, x: stc.SparseTensor, y: stc.SparseTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The contraction as a product of two CSR matrices; of equations without batch letters."""
    terms, output = equation.split("->")
    left, right = terms.split(",")
    return (
        unfolded(x, left, [c for c in output if c in left]),
        unfolded(y, right, [c for c in right if c not in output]),
    )


def synchronised() -> None:
    """Wait for the device."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def milliseconds(call: Callable[[], Any], times: int = 3) -> float:
    """Median wall time of something that waits for the device on its way."""
    found = []
    for _ in range(times):
        synchronised()
        start = time.perf_counter()
        call()
        synchronised()
        found.append((time.perf_counter() - start) * 1e3)
    return sorted(found)[times // 2]


def first_ms(call: Callable[[], Any]) -> float:
    """Median wall time of a call that has been made before, and of which nothing is kept but what is on disk."""
    found = []
    for _ in range(5):
        gc.collect()  # so that no call pays for what earlier ones left behind
        found.append(milliseconds(call, 1))
    return round(statistics.median(found), 2)


def unseen(x: stc.SparseTensor) -> stc.SparseTensor:
    """The same nonzeros as a tensor for which nothing is packed, planned or compiled."""
    return stc.SparseTensor._make(x.pattern.bare(), x.values)


def pairing(step: Pair) -> None:
    """The join of nonzeros, and of blocks where the path is of blocks."""
    m = step.join
    again = Join.of(m.x, m.y, m.roles)
    if step.choice.plan.name.startswith("bcb"):
        Blocking.of(again)


def symbolic(step: Pair) -> None:
    """The pattern of the result."""
    places = WAYS[step.choice.plan.name](step.problem, step.choice.plan).places()
    pattern_of(step.join, places, step.bound.output_shape)


def pair_of(kernel: Kernel) -> Pair:
    """The step of a contraction of two operands."""
    (step,) = kernel.steps
    assert isinstance(step, Pair)
    return step


def entry_values(kernel: Kernel) -> list[torch.Tensor]:
    """Values of the entries of both operands of a step: what its path takes."""
    step = pair_of(kernel)
    given = [o.values for o in (kernel.operands[::-1] if step.problem.swapped else kernel.operands)]
    return [own.values(values) for own, values in zip((step.join.x, step.join.y), given, strict=True)]


def phases(kernel: Kernel) -> dict[str, float]:
    """Times of the phases of a contraction of two operands."""
    step = pair_of(kernel)
    x, y = entry_values(kernel)
    numeric = device_microseconds(lambda: step.numeric.run(x, y, step.numeric.halves(x, y)))
    return {
        "us": round(microseconds(kernel), 1),
        "numeric_us": round(numeric, 1),
        "pair_ms": round(milliseconds(lambda: pairing(step)), 2),
        "symbolic_ms": round(milliseconds(lambda: symbolic(step)), 2),
    }


def stored(step: Pair) -> dict[str, int]:
    """Bytes of both operands, values included, as blocks and as coordinates."""
    m, itemsize = step.join, step.dtype.itemsize
    sizes = [(len(own.letters), keys.numel()) for own, keys in ((m.x, m.x_key), (m.y, m.y_key))]
    values = sum(n for _, n in sizes) * itemsize
    return {
        "bcb_bytes": step.problem.blocking.x.nbytes + step.problem.blocking.y.nbytes + values,
        "coo_bytes": sum(order * n * 4 for order, n in sizes) + values,
    }


def plan_rows(case: Case, plan: str | stc.plans.Plan) -> list[dict[str, Any]]:
    """One plan at every precision at which it differs, fits and is not too slow."""
    rows = []
    for precision in LIMIT:
        if plan == "scalar" and (case.tasks > MOST_TASKS or precision != "highest"):
            continue
        settings = {"plan": plan, "precision": precision}
        try:
            k = stc.compile(case.equation, case.x, case.y, **settings)
        except stc.SparsetcError as refused:
            print(f"{case.tensors} {case.equation} {plan}: {refused}", flush=True)
            continue
        error, step = case.error(k(), precision), pair_of(k)
        compiling = milliseconds(lambda: stc.compile(case.equation, case.x, case.y, **settings), 1)  # noqa: B023
        rows.append(
            {
                **case.named(plan if isinstance(plan, str) else f"bcb, {plan.option('storage', 'auto')[0]}"),
                "precision": precision,
                "nnz": k.nnz,
                "tasks": case.tasks,
                "pairs": step.problem.blocking.pairs.tasks,
                **phases(k),
                "compile_ms": round(compiling, 1),
                "expected_us": round(dict(k.explain().steps[0].considered)[k.plan.name] or 0, 1),
                "error": error,
                "auto": case.auto[precision],
                **stored(step),
            }
        )
        print(rows[-1], flush=True)
    return rows


def auto_rows(case: Case) -> list[dict[str, Any]]:
    """First calls of plan auto at every precision."""
    rows = []
    for precision, takes in case.auto.items():

        def first(precision: str = precision) -> stc.SparseTensor:
            return stc.einsum(case.equation, unseen(case.x), unseen(case.y), precision=precision)

        error = case.error(first(), precision)
        row = {**case.named("auto"), "precision": precision, "first_ms": first_ms(first), "error": error, "auto": takes}
        rows.append(row)
        print(row, flush=True)
    return rows


def torch_rows(case: Case) -> list[dict[str, Any]]:
    """The product of CSR matrices by torch; none where it fails."""
    try:
        a, b = matrices(case.equation, case.x, case.y)
        us = microseconds(lambda: a @ b)
        row = {**case.named("torch.sparse"), "us": round(us, 1), "first_ms": first_ms(lambda: a @ b)}
    except RuntimeError as refused:
        print(f"{case.tensors} {case.equation} torch.sparse: {refused}", flush=True)
        return []
    print(row, flush=True)
    return [row]


def case_rows(case: Case, first: bool) -> list[dict[str, Any]]:
    """Every plan and precision that fits, or first calls alone."""
    plans = () if first else PLANS
    return [row for plan in plans for row in plan_rows(case, plan)] + auto_rows(case) + torch_rows(case)


def main(words: list[str]) -> None:
    """Every case whose name has the words."""
    warnings.simplefilter("ignore")
    rows: list[dict[str, Any]] = []
    first, words = "--first" in words, [word for word in words if word != "--first"]
    for left, right, equation in CASES:
        if not all(word in f"{left} x {right} {equation}" for word in words):
            continue
        x, y = tensor(left), tensor(right, seed=1)
        if x is not None and y is not None:
            rows += case_rows(Case.of(f"{left} x {right}", equation, x, y), first)
    if not words:
        record("pair_first" if first else "pair", rows)


if __name__ == "__main__":
    main(sys.argv[1:])
