"""Means, extrema and products over the entries of a sparse operand, in place of sums: ``einsum(…, reduce="amax")``.

In: an einsum of one sparse operand, and what is done over its modes that the result has not. Out: its result, in the
form that a sum would have. A dense mean is a sum of a kernel's, divided. The other products are those of an einsum that
keeps all modes, a row of dense letters an entry; rows of one result are reduced.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from torch import Tensor

from sparsetc.contraction.contraction import parsed
from sparsetc.contraction.operands import Operands
from sparsetc.contraction.output import Result, check_form, narrowed, sparse_result
from sparsetc.contraction.request import Request
from sparsetc.errors import EquationError
from sparsetc.options import Options
from sparsetc.support import outside
from sparsetc.tensor.coords import sort_keys
from sparsetc.tensor.groups import check_reduction, groups_of, reduced_groups
from sparsetc.tensor.sparse_tensor import SparseTensor
from sparsetc.tensor.sums import accumulator, multiplied

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
    kept, free = tuple(own.index(c) for c in e.output if c in own), outside(e.output, own)
    letters = [*(own[m] for m in kept), *free]
    places = [letters.index(c) for c in e.output]
    groups, shape = groups_of(x.pattern, kept).pattern, bound.extents(letters)

    def dense(values: Tensor, absent: int) -> Tensor:
        """Scatter the values of groups into a dense result, with `absent` in the empty places."""
        row = sort_keys(groups.coords, groups.shape)[0] if kept else groups.coords.new_zeros(len(values))
        filled = values.new_full((prod(groups.shape), *values.shape[1:]), absent)
        return filled.index_put((row.long(),), values).reshape(shape[: len(kept)] + values.shape[1:])

    if reduce == "mean" and not sparse:

        def counts() -> Tensor:
            entries = dense(groups_of(x.pattern, kept).sizes.to(x.dtype), 1)
            return entries.reshape((*shape[: len(kept)], *[1] * len(free))).permute(places)

        each = x.pattern._once(("counts", kept, tuple(places), x.dtype), counts)
        return einsum(text, *operands, output="dense").div(each).to(dtype)  # type: ignore[no-any-return]
    entries = einsum(f"{str(e).partition('->')[0]}->{''.join((*own, *free))}", *operands, output="sparse")

    def over_groups(values: Tensor) -> Tensor:
        return reduced_groups(values, x.pattern, kept, reduce)

    values = multiplied(over_groups, x.dtype, entries.values) if reduce == "prod" else over_groups(entries.values)
    result = SparseTensor._make(groups, values).permute(places) if sparse else dense(values, int(reduce == "prod"))
    return narrowed(result if sparse else result.permute(places), dtype, f'the result of "{e.text}"')
