"""Groups of entries that agree in some modes, and reductions of their values.

In: a pattern, values of its entries and the modes that are kept. Out: a value a group, differentiable. Groups are found
once for a pattern. Extrema and products are taken over segments of a group, of a few hundred entries, and over what
these give, until one is left: so no group, however large, is one thread's work, and nothing is written by atomics. Sums
of large groups are made in float64.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from sparsetc.errors import DtypeError
from sparsetc.support import Ints, volume
from sparsetc.tensor import coords as crd
from sparsetc.tensor.dtypes import LONG, segments, wide
from sparsetc.tensor.pattern import Pattern, followed, once, transforming

SEGMENT = 256
"""Entries of a segment of a group, at most."""
NARROW = 16
"""Values of a row up to which a GPU takes them one by one, as torch has a block of threads a row, however narrow; and
up to which segments are faster on a CPU (2 to 10 times, 64 values 3 times slower)."""


class Groups(NamedTuple):
    """Groups of entries that agree in the kept modes.

    Attributes:
        pattern: distinct coordinates in these modes, an entry a group.
        of_entry: (nnz,) the number of each entry's group.
        sizes: (groups,) int64: how many entries each has.
        largest: how many the largest has.
    """

    pattern: Pattern
    of_entry: Tensor
    sizes: Tensor
    largest: int


@once
def groups_of(pattern: Pattern, kept: Ints) -> Groups:
    """The groups by some modes; found once for a pattern."""
    rows, shape = crd.of_modes(pattern.coords, pattern.shape, kept)
    distinct = crd.numbered(rows, shape, pattern.nnz, pattern.coords[0])
    coords = torch.stack(distinct.coords) if kept else pattern.coords[:0]
    sizes = crd.histogram(distinct.rank, distinct.count)
    largest = int(sizes.max()) if distinct.count else 0
    return Groups(Pattern(coords, shape, True, labels=pattern.labels_of(kept)), distinct.rank, sizes, largest)


def check_reduction(kind: str, dtype: torch.dtype) -> None:
    """Raise `DtypeError` for a mean or a norm of integers, and for an extremum of complex numbers."""
    if kind in ("mean", "norm", "variance") and not (dtype.is_floating_point or dtype.is_complex):
        raise DtypeError(f"the {kind} of {dtype} is no {dtype}: convert the values first")
    if kind in ("amax", "amin") and dtype.is_complex:
        raise DtypeError(f"{dtype} has no order, and so no {kind}")


def reduced_groups(
    values: Tensor, pattern: Pattern, kept: Ints, kind: str, positions: int = 0, dims: Ints = ()
) -> Tensor:
    """Reduce the (nnz, *sizes) values of entries to (groups, *sizes), one for each group.

    Args:
        values: of the entries.
        pattern: of the entries.
        kept: modes in which those of a group agree.
        kind: of reduction: ``"sum"``, ``"mean"``, ``"amax"``, ``"amin"`` or ``"prod"``.
        positions: of a group, of which those without an entry are 0; 0 where entries alone count.
        dims: of the values, reduced too and left with size 1.
    """
    every = kept == tuple(range(pattern.order))
    if every or kind not in ("amax", "amin"):
        values = _over(values, kind, dims)
    if every:
        return values
    if kind == "sum":
        return added(values, pattern, kept)
    each = groups_of(pattern, kept).sizes.view(-1, *[1] * (values.ndim - 1))
    if kind == "mean":
        return added(values, pattern, kept) / (float(positions) or each.to(values.dtype))
    absent = float(positions) - each.double() if positions else None  # sizes may pass 2**63
    if kind == "prod":
        out = _products(values, pattern, kept)
        return out if absent is None else torch.where(absent > 0, out * 0, out)
    return _extrema(values, pattern, kept, kind, absent, dims)


def _over(values: Tensor, kind: str, dims: Ints) -> Tensor:
    """Reduce dimensions of values, and leave them with size 1."""
    if kind != "prod":
        kind = kind if values.numel() else "sum"  # entries of no elements give 0
        return getattr(torch, kind)(values, dims, keepdim=True) if dims else values  # type: ignore[no-any-return]
    for at in dims:
        values = values.prod(at, keepdim=True)
    return values


def _extrema(values: Tensor, pattern: Pattern, kept: Ints, kind: str, absent: Tensor | None, dims: Ints) -> Tensor:
    """The largest or least values of groups, of which `absent` zeros are.

    Gradients are shared by all that are equal to it, absent zeros among them, as those of torch's dense extrema are.
    """
    if absent is None and not dims and not followed([]) and groups_of(pattern, kept).largest <= SEGMENT:
        return _reduced(values, pattern, kept, kind)  # torch's gradients are even within a segment
    rows, fixed = groups_of(pattern, kept).of_entry, values.detach()
    most = _reduced(_over(fixed, kind, dims), pattern, kept, kind)
    if absent is not None:
        with_zeros = most.clamp(**{"min" if kind == "amax" else "max": 0})
        most = torch.where(absent > 0, with_zeros, most)
    if not (values.is_floating_point() and followed([values])):
        return most
    equal = fixed == gathered(most, rows)
    ties = added(_over(equal.to(values.dtype), "sum", dims), pattern, kept)
    if absent is not None:
        ties = ties + absent * volume(values.shape, dims) * (most == 0)
    shares = values.where(equal, 0) / gathered(ties.to(values.dtype), rows)
    of_ties = added(_over(shares, "sum", dims), pattern, kept)
    return of_ties + torch.where(of_ties == most, 0, most - of_ties).detach()  # by which equal shares were rounded


def _products(values: Tensor, pattern: Pattern, kept: Ints) -> Tensor:
    """Multiply the values of each group; with gradients, by a tree of products of neighbours."""
    if not followed([values]):
        return _reduced(values, pattern, kept, "prod")
    order, levels = _segments(pattern, kept, 2)
    products = crd.picked(values, order)
    for lengths in levels:
        first = lengths.cumsum(0) - lengths
        second = torch.where(lengths == 2, first + 1, products.shape[0])
        padded = torch.cat((products, products.new_ones(1, *products.shape[1:])))
        products = padded.index_select(0, first) * padded.index_select(0, second)
    return products


def gathered(source: Tensor, rows: Tensor) -> Tensor:
    """``source.index_select(0, rows)``, of rows of any width."""
    single = _single(source, rows)
    if single is None:
        return source.index_select(0, rows)
    return source.reshape(-1).gather(0, single).view(rows.numel(), *source.shape[1:])


def added(values: Tensor, pattern: Pattern, kept: Ints) -> Tensor:
    """(groups, *sizes): sums of the values of each group; in float64 where a group is large."""
    _, rows, sizes, largest = groups_of(pattern, kept)
    count = len(sizes)
    if not kept:
        return values.sum(0, keepdim=True, dtype=values.dtype)[:count]
    if values.is_complex():
        return torch.view_as_complex(added(torch.view_as_real(values.resolve_conj()), pattern, kept))
    terms = values.to(wide(values.dtype)) if largest > LONG else values
    single = rows if values.ndim == 1 else _single(terms, rows)
    if single is None:
        return terms.new_zeros(count, *values.shape[1:]).index_add(0, rows, terms).to(values.dtype)
    out = terms.new_zeros(count * prod(values.shape[1:]))
    return out.scatter_add(0, single, terms.reshape(-1)).view(count, *values.shape[1:]).to(values.dtype)


def _single(values: Tensor, rows: Tensor) -> Tensor | None:
    """Return the number of each single value of narrow rows, on a GPU; None for others."""
    width = prod(values.shape[1:])
    if not values.is_cuda or not 1 < width <= NARROW:
        return None
    return (rows[:, None] * width + torch.arange(width, device=rows.device)).reshape(-1)


def _reduced(values: Tensor, pattern: Pattern, kept: Ints, kind: str) -> Tensor:
    """Reduce groups by an extremum or a product: by segments if these beat a scatter and its slow gradients."""
    rows, sizes = groups_of(pattern, kept)[1:3]
    by_segments = values.is_floating_point() and values.numel() and not transforming()
    width = prod(values.shape[1:])
    narrow = isinstance(width, torch.SymInt) or width <= NARROW  # of a symbol nothing is asked: it would be fixed
    if not by_segments or not (values.is_cuda or values.requires_grad or narrow):
        index = rows.view(-1, *[1] * (values.ndim - 1)).expand_as(values)
        return values.new_zeros(len(sizes), *values.shape[1:]).scatter_reduce(
            0, index, values, kind, include_self=False
        )
    order, levels = _segments(pattern, kept, SEGMENT)
    grouped = crd.picked(values, order).reshape(values.shape[0], -1)
    for lengths in levels:
        grouped = torch.segment_reduce(grouped, kind.removeprefix("a"), lengths=lengths, axis=0, unsafe=True)
    return grouped.reshape(-1, *values.shape[1:])


@once
def _segments(pattern: Pattern, kept: Ints, most: int) -> tuple[Tensor | None, list[Tensor]]:
    """Return the entries sorted by groups (None if they are), and the lengths of segments, level by level."""
    rows, sizes = groups_of(pattern, kept)[1:3]
    order = None if bool((rows[1:] >= rows[:-1]).all()) else torch.sort(rows, stable=True).indices
    return order, [*segments(sizes, most)]
