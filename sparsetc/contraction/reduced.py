"""Means, extrema and products over the entries of a sparse operand, in place of sums: ``einsum(…, reduce="amax")``.

In: an einsum of one sparse operand, and what is done over its modes that the result has not. Out: its result. The
products are those of an einsum that keeps all modes, a row of dense letters an entry; rows of one result are reduced.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch

from sparsetc.contraction.canonical import Operands
from sparsetc.errors import DtypeError, EquationError
from sparsetc.ir.equation.parse import parse
from sparsetc.tensor import coords as crd
from sparsetc.tensor.pattern import Pattern
from sparsetc.tensor.sparse_tensor import SparseTensor

REDUCTIONS = ("sum", "mean", "amax", "amin", "prod")


def reduced(
    einsum: Callable[..., Any], text: str, operands: Operands, reduce: str, output: str
) -> torch.Tensor | SparseTensor:
    """The result of an einsum, reduced over the modes of its sparse operand that it does not keep.

    Args:
        einsum: called with an equation, operands and ``output=``.
        text: the equation.
        operands: of it.
        reduce: one of `REDUCTIONS`.
        output: of `einsum`; a result that has no entry anywhere is 0 there, as of `torch.scatter_reduce` on zeros.

    Raises:
        EquationError: another number of sparse operands than one, a letter twice in it, or another `reduce`.
        DtypeError: a mean of integers, or the order of complex numbers.
    """
    if reduce not in REDUCTIONS:
        raise EquationError(f"reduce must be one of {', '.join(REDUCTIONS)}, found {reduce!r:.80}")
    sparse = [isinstance(o, SparseTensor) for o in operands]
    e = parse(text, [tuple(o.shape) for o in operands], sparse).einsum
    own = e.inputs[e.sparse[0]]
    if len(e.sparse) != 1 or len({*own}) < len(own):
        raise EquationError(f'reduce="{reduce}" takes one sparse operand, each letter once in it; "{text}" has others')
    x = operands[e.sparse[0]]
    assert isinstance(x, SparseTensor)
    if reduce == "mean" and not (x.dtype.is_floating_point or x.dtype.is_complex):
        raise DtypeError(f"the mean of {x.dtype} is no {x.dtype}: convert the values first")
    if reduce in ("amax", "amin") and x.dtype.is_complex:
        raise DtypeError(f"{x.dtype} has no order, and so no {reduce}")
    operands = [o.expand_dense().coalesce() if isinstance(o, SparseTensor) else o for o in operands]
    free, kept = [c for c in e.output if c not in own], [own.index(c) for c in e.output if c in own]
    entries = einsum(f"{str(e).partition('->')[0]}->{''.join((*own, *free))}", *operands, output="sparse")
    pattern, rows, count = _rows_of(entries.pattern, tuple(kept))
    found = _over(entries.values, rows, count, reduce)
    written = SparseTensor._make(pattern, found) if kept else None
    if output == "sparse" and (written is None or [*e.output] != [own[m] for m in kept] + free):
        raise EquationError(f'a sparse result has the modes of the sparse operand first; "{text}" has not')
    if written is not None and (output == "sparse" or (output == "auto" and len(kept) == len(own))):
        return written
    dense = written.to_dense() if written is not None else found.new_zeros(found.shape[1:]) if not count else found[0]
    letters = [*(own[m] for m in kept), *free]
    return dense.permute([letters.index(c) for c in e.output])


def _rows_of(pattern: Pattern, kept: tuple[int, ...]) -> tuple[Pattern, torch.Tensor, int]:
    """The pattern of the kept modes, the number of the result of each entry, and how many there are; made once."""

    def made() -> tuple[Pattern | None, torch.Tensor, int]:
        rows, shape = [pattern.coords[m] for m in kept], tuple(pattern.shape[m] for m in kept)
        found = crd.numbered(rows, shape, pattern.nnz, pattern.coords[0])
        coords = torch.stack(found.coords) if kept else pattern.coords[:0]
        return Pattern(coords, shape, True), found.rank, found.count

    return pattern._once(("rows of", kept), made)  # type: ignore[arg-type, return-value]


def _over(values: torch.Tensor, rows: torch.Tensor, count: int, reduce: str) -> torch.Tensor:
    """(count, *sizes) of (nnz, *sizes) values, each of which belongs to a row of the result; differentiable."""
    out = values.new_zeros(count, *values.shape[1:])
    if reduce in ("sum", "mean"):
        sums = out.index_add(0, rows, values)
        if reduce == "sum":
            return sums
        each = torch.zeros(count, dtype=torch.int64, device=rows.device).index_add_(0, rows, torch.ones_like(rows))
        return sums / each.clamp(min=1).view(-1, *[1] * (values.ndim - 1)).to(values.dtype)
    if not prod(values.shape):
        return out
    index = rows.view(-1, *[1] * (values.ndim - 1)).expand_as(values)
    return out.scatter_reduce(0, index, values, reduce, include_self=False)
