"""Where a choice changes, and the rates it is made by: what comments of `sparsetc/products` and of the planner quote.

    SPARSETC_DATA=<folder of .npz> python benchmarks/switches.py

Rows by ``switch``:

- ``sums``: the scalar path with additions by atomics and with ordered ones, around `scalar.FEW` sums and `scalar.MANY`
  tasks a sum; picoseconds a task of both. Matrices made for it, and contractions of `pair.py`.
- ``fibers``: TTMc of rank 32 x 32 on fibers of one length, around the rule `long_fiber`, the schedule being that of
  tf32 and the products in tf32, bf16 and tf32x3.
- ``blocks``: products of pairs of whole blocks alone, blocks made before and not gathered after.
- ``products``: torch's dense product alone, of the sizes to which contractions of `pair.py` unfold.

Results are compared with float64. Without a GPU the sizes are tiny, and the times mean nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from math import isqrt, prod
from typing import Any
from unittest import mock

import torch
from common import DEVICE, factors, kernel_microseconds, microseconds, record, relative_error, tensor
from pair import entry_values, pair_of, reference
from ttmc import reference as ttmc_reference

import sparsetc as stc
from sparsetc.ir.program.operands import MIN_DOT
from sparsetc.products import scalar
from sparsetc.products.blocks import BlockPath
from sparsetc.support.entry import matmul_precision

GPU = DEVICE == "cuda"
TINY = (("tiny graph", "tiny graph", "ij,jk->ik"),)
SUMS = (1 << 12, 1 << 14, 1 << 16) if GPU else (1 << 6, 1 << 8)
TASKS = (1 << 6, 1 << 8, 1 << 10) if GPU else (1 << 4, 1 << 6)
"""Tasks a sum."""
PARTNERS = 16 if GPU else 4
"""Entries of y that an entry of the matrices' x meets."""
SUMMED = (
    ("uber_amj_4d", "uber_amj_4d", "ijkl,mjkl->im"),
    ("uber_amj_4d", "uber_amj_4d", "ijkl,ijml->km"),
    ("guanine_TEoo_3d", "guanine_TEoo_3d", "ijk,abk->ijab"),
    ("guanine_TEoo_3d", "guanine_TEov_3d", "ijk,abk->ijab"),
    ("uber_amj_4d", "uber_amj_4d", "ijkl,mnkl->ijmn"),
    ("R-MAT 14 x8", "R-MAT 14 x8", "ij,jk->ik"),
)
LENGTHS = (1, 2, 4, 8, 16, 32)
FIBERS = (4096, 1024, 1024) if GPU else (16, 32, 64)
"""Shape of the tensors of fibers; powers of two. They have as many nonzeros as the first two modes have places."""
BLOCKS = (
    ("guanine_TEov_3d", "guanine_TEov_3d", "ijk,abk->ijab"),
    ("uber_amj_4d", "uber_amj_4d", "ijkl,mnkl->ijmn"),
    ("blocks 1220x51", "blocks 1220x51", "ijk,ljm->iklm"),
)
PRODUCTS = ((1277, 686, 6700), (6700, 686, 6700), (26985, 686, 6700), (2184, 39586, 2184)) if GPU else ((60, 70, 80),)
"""Rows, inner side and columns: guanine oo x ov, ov x ov, vv x ov, and Uber keeping modes 0 and 1."""
ERROR = {"highest": 1e-5, "high": 4e-3, "medium": 2e-2}
DOTS = {"tf32": "high", "bf16": "medium", "tf32x3": "highest"}
"""How a dot multiplies, and whose error it keeps."""

Row = dict[str, Any]
Operands = tuple[str, str, stc.SparseTensor, stc.SparseTensor]
"""Their names, the equation, and the two."""


def spread(count: int, length: int, size: int, g: torch.Generator) -> torch.Tensor:
    """(count, length) places below `size`, a power of two: those of a line differ, and lie apart."""
    start = torch.randint(0, size, (count, 1), generator=g, device=DEVICE)
    stride = torch.randint(0, size // 2, (count, 1), generator=g, device=DEVICE) * 2 + 1
    return (start + stride * torch.arange(length, device=DEVICE)) % size


def with_values(coords: torch.Tensor, shape: tuple[int, ...], g: torch.Generator) -> stc.SparseTensor:
    """Random values in [0.1, 1.1)."""
    return stc.SparseTensor(coords, torch.rand(coords.shape[1], generator=g, device=DEVICE) + 0.1, shape)


def matrices(sums: int, tasks: int) -> Operands:
    """Matrices whose product has `sums` entries, each the sum of about `tasks` products."""
    g, n = torch.Generator(device=DEVICE).manual_seed(0), isqrt(sums)
    inner = sums * tasks // PARTNERS**2
    at = torch.arange(inner, device=DEVICE).repeat_interleave(PARTNERS)
    rows, columns = (spread(inner, PARTNERS, n, g).flatten() for _ in range(2))
    x = with_values(torch.stack([rows, at]), (n, inner), g)
    y = with_values(torch.stack([at, columns]), (inner, n), g)
    return f"matrices of {n} x {inner}", "ij,jk->ik", x, y


def contractions(named: tuple[tuple[str, str, str], ...]) -> Iterator[Operands]:
    """Those whose tensors there are; a small one without a GPU."""
    for left, right, equation in named if GPU else TINY:
        x, y = tensor(left), tensor(right, seed=1)
        if x is not None and y is not None:
            yield f"{left} x {right}", equation, x, y


def sums() -> Iterator[Row]:
    """Additions by atomics, and ordered."""
    for wanted in SUMS:
        for tasks in TASKS:
            yield sums_row(*matrices(wanted, tasks))
    for operands in contractions(SUMMED):
        yield sums_row(*operands)


def sums_row(tensors: str, equation: str, x: stc.SparseTensor, y: stc.SparseTensor) -> Row:
    """Both forms of one contraction."""
    expected, us = reference(equation, x, y), {}
    for form in ("atomic", "ordered"):
        k = stc.compile(equation, x, y, plan="scalar", precision="highest")
        step, values = pair_of(k), entry_values(k)
        with mock.patch.object(scalar, "waits", lambda *_, form=form: form == "ordered"):
            error = relative_error(k().values, expected)  # the first call decides
        assert error < ERROR["highest"], (tensors, equation, form, error)
        assert step.task_sums.of("z").ordered == (GPU and form == "ordered"), form  # torch's programs have one form
        us[form] = microseconds(lambda: step.numeric.run(*values))  # noqa: B023
    tasks = step.task_sums.tasks.join_order.tasks
    return {
        "switch": "sums",
        "tensors": tensors,
        "equation": equation,
        "sums": k.nnz,
        "tasks": tasks,
        "tasks_a_sum": round(tasks / k.nnz),
        "us": {form: round(t, 1) for form, t in us.items()},
        "ps_a_task": {form: round(1e6 * t / tasks, 2) for form, t in us.items()},
        "taken": "ordered" if scalar.waits(k.nnz, tasks) else "atomic",
    }


def fibers() -> Iterator[Row]:
    """One schedule and packing, three ways to multiply."""
    for length in LENGTHS:
        x = tensor_of_fibers(length)
        (b, c), rows, us = factors(x, 32)[1:], min(64, FIBERS[0]), {}
        expected = ttmc_reference(x, b, c, (0, 1, 2), rows)
        for dot, precision in DOTS.items():
            k = stc.compile("ijk,jr,ks->irs", x, b, c, plan=fiber_plan(x, b, c, dot), precision=precision)
            error = relative_error(k(b, c)[:rows], expected)
            assert error < ERROR[precision], (length, dot, error)
            us[dot] = round(kernel_microseconds(k, [b, c]), 1)
        yield {"switch": "fibers", "length": length, "nnz": x.nnz, "us": us}


def tensor_of_fibers(length: int) -> stc.SparseTensor:
    """Fibers of `length` nonzeros along the last mode, at places of the first two drawn at random."""
    g, (i, j, k) = torch.Generator(device=DEVICE).manual_seed(length), FIBERS
    at = torch.randperm(i * j, generator=g, device=DEVICE)[: i * j // length]
    own = at.repeat_interleave(length)
    return with_values(torch.stack([own // j, own % j, spread(at.numel(), length, k, g).flatten()]), FIBERS, g)


def fiber_plan(x: stc.SparseTensor, b: torch.Tensor, c: torch.Tensor, dot: str) -> stc.plans.Plan:
    """That of tf32 along the last mode, whatever the planner would take, but for how a dot multiplies."""
    plan = stc.compile("ijk,jr,ks->irs", x, b, c, plan="fiber", precision="high").plan
    (part,) = plan.parts
    storage = replace(part.storage, item=(0,), lane=(1,), leaf=(2,))
    return replace(plan, parts=(replace(part, storage=storage, schedule=replace(part.schedule, precision=dot)),))


def blocks() -> Iterator[Row]:
    """Pairs of blocks at every precision."""
    for tensors, equation, x, y in contractions(BLOCKS):
        expected = reference(equation, x, y)
        for precision, limit in ERROR.items():
            k = stc.compile(equation, x, y, plan=stc.plans.plan_bcb(storage="whole"), precision=precision)
            error = relative_error(k().values, expected)
            assert error < limit, (tensors, equation, precision, error)
            yield {"switch": "blocks", "tensors": tensors, "equation": equation, **blocks_of(k)}


def blocks_of(k: stc.Kernel) -> Row:
    """The time of the launches, and what it makes a pair and an operation; padding is multiplied too."""
    path = pair_of(k).numeric
    assert isinstance(path, BlockPath)
    blocking, values = path.blocking, entry_values(k)
    with mock.patch.object(path, "_multiplied", wraps=path._multiplied) as multiplied:
        list(path._made(values[0], values[1], path.halves(values[0], values[1])))
    launch, arrays = multiplied.call_args.args
    us, pairs = microseconds(lambda: list(path._multiplied(launch, arrays))), blocking.pairs.tasks
    flops = 2 * pairs * prod(max(MIN_DOT, n) for n in blocking.extents)
    return {
        "precision": launch.program.schedule.precision,
        "pairs": pairs,
        "rows_columns_inner": blocking.extents,
        "block_bytes": sum(a.numel() * a.element_size() for a in arrays[0]),
        "us": round(us, 1),
        "pairs_a_second": round(1e6 * pairs / us),
        "tflops": round(flops / us / 1e6, 1),
    }


def products() -> Iterator[Row]:
    """Dense products at every precision."""
    g = torch.Generator(device=DEVICE).manual_seed(0)
    for rows, inner, columns in PRODUCTS:
        a, b = (torch.randn(shape, generator=g, device=DEVICE) for shape in ((rows, inner), (inner, columns)))
        expected = a[:64].double() @ b.double()
        for precision, limit in ERROR.items():
            with matmul_precision(precision):
                error = relative_error((a @ b)[:64], expected)
                assert error < limit, (rows, inner, columns, precision, error)
                us = microseconds(lambda: a @ b)  # noqa: B023
            gflop = 2 * rows * inner * columns / 1e9
            yield {
                "switch": "products",
                "rows_inner_columns": (rows, inner, columns),
                "precision": precision,
                "gflop": round(gflop, 3),
                "us": round(us, 1),
                "tflops": round(1e3 * gflop / us, 1),
            }


def main() -> None:
    """All of them, into one record."""
    warnings.simplefilter("ignore")
    rows = []
    for measure in (sums, fibers, blocks, products):
        for row in measure():
            rows.append(row)
            print(row, flush=True)
    record("switches", rows)


if __name__ == "__main__":
    main()
