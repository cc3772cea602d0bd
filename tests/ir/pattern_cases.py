"""Sparse operands of ones whose values are not stored, packed and lowered as a kernel packs and lowers those that have.

Nothing here imports triton, so that the interpreter's tests may set their environment first.
"""

from __future__ import annotations

from dataclasses import replace

import reference
import torch
from cases import Problem, explicit_plan, wrapped

import sparsetc as stc
from sparsetc.contraction.kernel import Kernel
from sparsetc.contraction.prepare import BoundPart, bound_part
from sparsetc.ir.nest.values import Ones

CASES: dict[str, tuple[str, str, str]] = {
    "neighbours": ("ij,jr->ir", "coo", "0||1"),
    "neighbours in chunks": ("ij,jr->ir", "coo", "||01"),
    "neighbours, a row a lane": ("ij,jr->ir", "fiber", "|0|1"),
    "MTTKRP": ("ijk,jr,kr->ir", "coo", "0||12"),
    "MTTKRP of fibers": ("ijk,jr,kr->ir", "fiber", "0|1|2"),
    "degrees": ("ij->i", "coo", "0||1"),
    "degrees, a row a lane": ("ij->i", "fiber", "|0|1"),
    "how many": ("ijk->", "coo", "||012"),
    "of the row alone": ("ij,i->i", "coo", "0||1"),
    "of the fiber alone": ("ijk,jr->ir", "fiber", "0|1|2"),
    "sampled": ("ij,ir,jr->ij", "coo", "||01"),
    "scaled": ("ij,i->ij", "coo", "0||1"),
}
"""Equation, format, levels of modes."""


def kernel(name: str, lanes: int, dtype: torch.dtype = torch.float64) -> tuple[Kernel, list[torch.Tensor]]:
    """A kernel for an operand of ones, with the dense operands."""
    equation, format, levels = CASES[name]
    blocks = {"r": 8} if "r" in equation else {}
    plan = explicit_plan(format, levels, blocks, lanes=lanes, max_item_nnz=16)
    x, *dense = Problem(equation, {"i": 11, "j": 9, "k": 7, "r": 5}, "skewed", dtype).operands()
    x = x.with_values(torch.ones_like(x.values))
    backend = "torch" if lanes == 1 else "triton"
    return stc.compile(equation, x, *dense, plan=plan, backend=backend), dense


def without_values(kernel: Kernel) -> list[BoundPart]:
    """Its parts, as patterns."""
    made = []
    for part in kernel.step.parts:
        view = replace(part.packed.view, values=Ones())
        number = part.program.number
        packed, alone = replace(part.packed, view=view), len(kernel.step.parts) == 1
        strides = kernel.step.executable.strides or ()
        bound = bound_part(
            kernel.plan.parts[number], packed, number, alone, kernel.step.problem, kernel.step.output, strides
        )
        made.append(bound)
    return made


def expected(kernel: Kernel, dense: list[torch.Tensor]) -> torch.Tensor:
    """The dense result, by the reference."""
    return reference.run(kernel.contraction.bound.einsum, kernel.operand, *dense)


def finished(kernel: Kernel, rows: torch.Tensor) -> torch.Tensor:
    """What a kernel's programs have added up, as a dense result."""
    found = wrapped(kernel, rows)
    return found.to_dense() if isinstance(found, stc.SparseTensor) else found


def zeros(kernel: Kernel, dtype: torch.dtype) -> torch.Tensor:
    """An output to add to."""
    return torch.zeros((kernel.step.output.rows, *kernel.step.output.width_shape), dtype=dtype)
