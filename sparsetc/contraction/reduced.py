"""Means, extrema and products over the entries of a sparse operand, in place of sums: ``einsum(…, reduce="amax")``.

In: an einsum of one sparse operand, and what is done over its modes that the result has not. Out: its result. The
products are those of an einsum that keeps all modes, a row of dense letters an entry; rows of one result are reduced.
A mean is a sum of entries that were divided first.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch

from sparsetc.contraction.canonical import Operands
from sparsetc.contraction.output import KEEP_SPARSE
from sparsetc.errors import EquationError
from sparsetc.ir.equation.parse import parse
from sparsetc.support import memory
from sparsetc.tensor.groups import check_reduction, groups_of, reduced_groups, sizes_of
from sparsetc.tensor.sparse_tensor import SparseTensor
from sparsetc.tensor.sums import fitted, summed_dtype

REDUCTIONS = ("sum", "mean", "amax", "amin", "prod")


def reduced(
    einsum: Callable[..., Any], text: str, operands: Operands, reduce: str, output: str, limit: int | None = None
) -> torch.Tensor | SparseTensor:
    """The result of an einsum, reduced over the modes of its sparse operand that it does not keep.

    Args:
        einsum: called with an equation, operands and ``output=``.
        text: the equation.
        operands: of it.
        reduce: one of `REDUCTIONS`.
        limit: bytes that a dense result may take, if not those of the options in force.
        output: of `einsum`; where no entry goes, a dense result is 0, and 1 of products, as PyTorch Geometric's are.

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
    check_reduction(reduce, x.dtype)
    operands = [o.expand_dense().coalesce() if isinstance(o, SparseTensor) else o for o in operands]
    free, kept = [c for c in e.output if c not in own], [own.index(c) for c in e.output if c in own]
    if reduce == "mean":  # a sum of entries that are divided by how many of them go to one place
        operands = [_shared(o, kept) if isinstance(o, SparseTensor) else o for o in operands]
        return einsum(text, *operands, output=output)  # type: ignore[no-any-return]
    if reduce == "prod":
        operands = [o.to(summed_dtype(x.dtype)) for o in operands]
    entries = einsum(f"{str(e).partition('->')[0]}->{''.join((*own, *free))}", *operands, output="sparse")
    found = fitted(reduced_groups(entries.values, entries.pattern, tuple(kept), reduce), x.dtype, "a product")
    pattern, _, count = groups_of(entries.pattern, tuple(kept))
    written = SparseTensor._make(pattern, found) if kept else None
    letters = [*(own[m] for m in kept), *free]
    places = [letters.index(c) for c in e.output]
    if output == "sparse" and written is None:
        raise EquationError(f'a sparse result has a mode of the sparse operand; "{text}" has none')
    if written is not None and (output == "sparse" or (output == "auto" and len(kept) == len(own))):
        return written.permute(places)
    shape = *pattern.shape, *found.shape[1:]
    memory.check(f"the result of {text}", prod(shape) * found.itemsize, found.device, limit, KEEP_SPARSE)
    dense = found.new_full(shape, 1 if reduce == "prod" else 0)
    if kept:
        dense = dense.index_put(tuple(pattern.coords), found)
    else:
        dense = found[0] if count else dense + found.sum(0)  # a function of no values too
    return dense.permute(places)


def _shared(x: SparseTensor, kept: list[int]) -> SparseTensor:
    """Its entries divided by how many of them have the same indices of some modes."""
    each = sizes_of(x.pattern, tuple(kept))[groups_of(x.pattern, tuple(kept)).of_entry].to(x.dtype)
    return x.with_values(x.values / each.view(-1, *[1] * (x.values.ndim - 1)))
