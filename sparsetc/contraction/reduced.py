"""Einsums that combine entries by a mean, a product or an extremum: ``reduce=``.

In: an equation and operands, one of them sparse. Out: its result, from an einsum that keeps all modes of that operand.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from sparsetc.contraction.contraction import parsed
from sparsetc.contraction.request import Operands, Request, Result, check_form, narrowed
from sparsetc.errors import EquationError
from sparsetc.options import of_call
from sparsetc.support import among, outside
from sparsetc.tensor.arithmetic import einsum
from sparsetc.tensor.convert import laid_out
from sparsetc.tensor.dtypes import accumulator, multiplied
from sparsetc.tensor.groups import check_reduction, groups_of, reduced_groups
from sparsetc.tensor.sparse_tensor import SparseTensor

REDUCTIONS = ("sum", "mean", "amax", "amin", "prod")


def reduced(text: str, operands: Operands, reduce: str, output: str, settings: Mapping[str, Any]) -> Result:
    """Return the result of an einsum, reduced over the modes of its sparse operand that it does not keep.

    A dense mean is a sum of a kernel's, divided. The other products are those of an einsum that keeps all modes, a row
    of dense letters an entry; rows of one result are reduced. Where no entry goes, a dense result is 0, and 1 of
    products, as PyTorch Geometric's are.

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
    sparse = not divided and Request(bound, operands, of_call(settings), output).is_sparse(expanded=False)
    dtype = x.dtype
    x = x.expand_dense().to(accumulator(dtype)).coalesce()
    operands = [x if isinstance(o, SparseTensor) else o.to(x.dtype) for o in operands]
    kept, free = tuple(m for m, c in enumerate(own) if c in e.output), outside(e.output, own)
    letters = (*among(own, e.output), *free)
    places = [letters.index(c) for c in e.output]
    groups = groups_of(x.pattern, kept)

    def dense(values: Tensor) -> Tensor:
        """Lay out the values of groups, with 0 in the empty places."""
        return laid_out(SparseTensor._make(groups.pattern, values)) if kept else values.sum(0, dtype=values.dtype)

    def counts() -> Tensor:
        """Count the entries of each group, with a mode of size 1 for each letter of dense operands."""
        each = dense(groups.sizes.to(x.dtype))
        return each.reshape((*each.shape, *[1] * len(free)))

    if reduce == "mean" and not sparse:
        key = "counts", kept, tuple(places), x.dtype
        each = x.pattern._once(key, lambda: counts().clamp(min=1).permute(places))
        return einsum(text, *operands, output="dense", **settings).div(each).to(dtype)  # type: ignore[no-any-return]
    entries = einsum(f"{str(e).partition('->')[0]}->{''.join((*own, *free))}", *operands, output="sparse", **settings)
    over_groups = partial(reduced_groups, pattern=x.pattern, kept=kept, kind=reduce)
    values = multiplied(over_groups, x.dtype, entries.values) if reduce == "prod" else over_groups(entries.values)
    result = SparseTensor._make(groups.pattern, values) if sparse else dense(values)
    if reduce == "prod" and not sparse:
        result = result + (counts() == 0)
    return narrowed(result.permute(places), dtype, f'the result of "{e.text}"')
