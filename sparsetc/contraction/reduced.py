"""Means, extrema and products over the entries of a sparse operand, in place of sums: ``einsum(…, reduce="amax")``.

In: an einsum of one sparse operand, and what is done over its modes that the result has not. Out: its result, in the
form that a sum would have. A dense mean is a sum of a kernel's, divided. The other products are those of an einsum that
keeps all modes, a row of dense letters an entry; rows of one result are reduced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparsetc.contraction.contraction import parsed
from sparsetc.contraction.operands import Operands
from sparsetc.contraction.output import Result, check_form, narrowed, sparse_result
from sparsetc.contraction.request import Request
from sparsetc.errors import EquationError
from sparsetc.options import Options
from sparsetc.support import among, outside
from sparsetc.tensor.groups import check_reduction
from sparsetc.tensor.sparse_tensor import SparseTensor
from sparsetc.tensor.sums import accumulator

REDUCTIONS = ("sum", "mean", "amax", "amin", "prod")


def reduced(
    einsum: Callable[..., Any], text: str, operands: Operands, reduce: str, output: str, settings: Options
) -> Result:
    """The result of an einsum, reduced over the modes of its sparse operand that it does not keep.

    Args:
        einsum: called with an equation, operands and ``output=``.
        text: the equation.
        operands: of it.
        reduce: one of `REDUCTIONS`.
        output: of `einsum`; where no entry goes, a dense result is 0, and 1 of products, as PyTorch Geometric's are.
        settings: the memory limit.

    Raises:
        EquationError: another number of sparse operands than one, a letter twice in it, or another `reduce`.
        PlanError, OutOfMemoryError: as of a sum.
        DtypeError: a mean of integers, the order of complex numbers, or an integer that does not fit.
    """
    if reduce not in REDUCTIONS:
        raise EquationError(f"reduce must be one of {', '.join(REDUCTIONS)}, found {reduce!r:.80}")
    bound = parsed(text, operands)
    e = bound.einsum
    own = e.inputs[e.sparse[0]]
    if len(e.sparse) != 1 or len({*own}) < len(own):
        raise EquationError(f'reduce="{reduce}" takes one sparse operand, each letter once in it; "{text}" has others')
    x = operands[e.sparse[0]]
    assert isinstance(x, SparseTensor)
    check_reduction(reduce, x.dtype)
    check_form(output, e)
    divided = reduce == "mean" and output == "dense"  # what a sum checks, it checks itself
    sparse = not divided and sparse_result(Request(bound, operands, settings, output), expanded=False)
    dtype = x.dtype
    x = x.expand_dense().to(accumulator(dtype)).coalesce()
    operands = [x if isinstance(o, SparseTensor) else o.to(x.dtype) for o in operands]
    gone, free = [m for m, c in enumerate(own) if c not in e.output], outside(e.output, own)
    letters = (*among(own, e.output), *free)
    places = [letters.index(c) for c in e.output]

    def counts() -> Tensor:
        """Count the entries of each group, with a mode of size 1 for each letter of dense operands."""
        each = x.map(torch.ones_like).sum(gone, output="dense")
        return each.reshape((*each.shape, *[1] * len(free)))  # type: ignore[no-any-return]

    if reduce == "mean" and not sparse:
        key = "counts", *gone, tuple(places), x.dtype
        each = x.pattern._once(key, lambda: counts().clamp(min=1).permute(places))
        return einsum(text, *operands, output="dense").div(each).to(dtype)  # type: ignore[no-any-return]
    entries = einsum(f"{str(e).partition('->')[0]}->{''.join((*own, *free))}", *operands, output="sparse")
    result = getattr(entries, reduce)(gone, entries=True, output="sparse" if sparse else "dense")
    if reduce == "prod" and not sparse:
        result = result + (counts() == 0)
    return narrowed(result.permute(places), dtype, f'the result of "{e.text}"')
