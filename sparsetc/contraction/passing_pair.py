"""The product of two sparse operands whose patterns are used once or a few times, by torch's operations on a GPU.

In: an einsum of two sparse operands, and their entries in any order. Out: its result, differentiable; None if a kernel
is to be compiled. Pairs of entries with equal shared coordinates are made, sorted by their place in the result, and
added up: some thirty launches, where to plan the product takes two hundred.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsetc.contraction.output import is_sparse
from sparsetc.ir.equation.einsum import Bound
from sparsetc.support import Names, among, outside
from sparsetc.tensor.coords import INT64_SIZES, decoded, joint_keys, markable, meeting, narrowed
from sparsetc.tensor.pattern import Pattern, lasting
from sparsetc.tensor.sparse_tensor import SparseTensor
from sparsetc.tensor.sums import accumulator, add_rows

PAIRS = 1 << 22
"""Most pairs of entries: 400 MB while they are sorted. Planning takes little beside more of them."""
PLACES = 1 << 27
"""Most elements of a dense result."""


def product(
    bound: Bound, coords: Sequence[Tensor], values: Sequence[Tensor], form: str, in_order: bool = False
) -> Tensor | SparseTensor | None:
    """Return the product of two sparse operands from (order, entries) coordinates and (entries,) values of each.

    Those of the second may be known to be `in_order`. None of an operand without letters or with a repeated one, and
    where there are too many pairs, or shared coordinates to count.
    """
    e = bound.einsum
    shape = bound.output_shape
    dtype = values[0].dtype
    places, dense = bound.elements(e.output), not is_sparse(form, e, e.inputs)
    distinct = all(term and len(set(term)) == len(term) for term in e.inputs)
    if not distinct or places >= (PLACES if dense else INT64_SIZES):
        return None
    with lasting():
        pairs = _pairs(bound, coords, in_order)
        if pairs is None:
            return None
        p, q, place = pairs
        count = places
        if not dense:
            distinct, place = torch.unique(narrowed(place, places), return_inverse=True)
            count = len(distinct)
            pattern = Pattern(torch.stack(decoded(distinct.long(), shape)), shape, True)
    x, y = (v.to(accumulator(dtype)) for v in values)
    terms = x.index_select(0, p) * y.index_select(0, q)
    sums = add_rows(terms.new_zeros(count), place, terms).to(dtype)
    return sums.view(shape) if dense else SparseTensor._make(pattern, sums)


def _pairs(bound: Bound, coords: Sequence[Tensor], in_order: bool) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the entry of each operand of each pair, and its row-major place in the result; waits for the device."""
    e = bound.einsum
    shared = among(*e.inputs)
    counts = coords[0].shape[1], coords[1].shape[1]
    if not markable(bound.elements(shared), sum(counts)):
        return None
    x, y = (dict(zip(term, rows, strict=True)) for term, rows in zip(e.inputs, coords, strict=True))
    keys = joint_keys([x[c] for c in shared], [y[c] for c in shared], bound.extents(shared), coords[0], counts)
    pairs = meeting(*keys, PAIRS, in_order and e.inputs[1][: len(shared)] == shared)
    if pairs is None:
        return None
    p, q = pairs
    of_x = among(e.output, x)
    offsets = [
        _offsets(bound, at, letters).index_select(0, entry)
        for at, letters, entry in ((x, of_x, p), (y, outside(e.output, of_x), q))
        if letters
    ]
    return p, q, sum(offsets[1:], start=offsets[0]) if offsets else torch.zeros_like(p)


def _offsets(bound: Bound, at: dict[str, Tensor], letters: Names) -> Tensor:
    """Return what an entry's coordinates in some letters of the result add to the number of its place."""
    output = bound.einsum.output
    strides = [bound.elements(output[output.index(c) + 1 :]) for c in letters]
    first, *others = (at[c] if stride == 1 else at[c] * stride for c, stride in zip(letters, strides, strict=True))
    return sum(others, start=first)
