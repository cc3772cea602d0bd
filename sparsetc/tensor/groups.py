"""Groups of entries that agree in some modes, and what their values are reduced to.

In: a pattern, values of its entries and the modes that are kept. Out: a value a group, differentiable. Groups are found
once for a pattern. Extrema and products are taken over pieces of a group of a few hundred entries, and over what these
give, until one is left: so no group, however large, is one thread's work, and nothing is written by atomics.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import NamedTuple

import torch

from sparsetc.errors import DtypeError
from sparsetc.tensor import coords as crd
from sparsetc.tensor.pattern import Pattern, transforming
from sparsetc.tensor.sums import refuse_wrapped

PIECE = 256
"""Entries of a piece of a group, at most."""
NARROW = 16
"""Values of a row up to which a GPU takes them one by one, as torch has a block of threads a row, however narrow; and
up to which pieces are faster on a CPU (2 to 10 times, 64 values 3 times slower)."""


class Groups(NamedTuple):
    """Groups of entries that agree in the modes that are kept.

    Attributes:
        pattern: distinct coordinates in these modes, an entry a group.
        of_entry: (nnz,) the number of each entry's group.
        number: how many groups there are.
    """

    pattern: Pattern
    of_entry: torch.Tensor
    number: int


def groups_of(pattern: Pattern, kept: tuple[int, ...]) -> Groups:
    """The groups by some modes; found once for a pattern."""

    def made() -> Groups:
        rows, shape = [pattern.coords[m] for m in kept], tuple(pattern.shape[m] for m in kept)
        distinct = crd.numbered(rows, shape, pattern.nnz, pattern.coords[0])
        coords = torch.stack(distinct.coords) if kept else pattern.coords[:0]
        return Groups(Pattern(coords, shape, True), distinct.rank, distinct.count)

    return pattern._once(("groups of", kept), made)


def check_reduction(kind: str, dtype: torch.dtype) -> None:
    """Raise `DtypeError` for a mean or a norm of integers, and for an extremum of complex numbers."""
    if kind in ("mean", "norm") and not (dtype.is_floating_point or dtype.is_complex):
        raise DtypeError(f"the {kind} of {dtype} is no {dtype}: convert the values first")
    if kind in ("amax", "amin") and dtype.is_complex:
        raise DtypeError(f"{dtype} has no order, and so no {kind}")


def reduced_groups(
    values: torch.Tensor, pattern: Pattern, kept: tuple[int, ...], kind: str, positions: int = 0
) -> torch.Tensor:
    """Reduce the (nnz, *sizes) values of entries to (groups, *sizes), those of each group together.

    Args:
        values: of the entries.
        pattern: of the entries.
        kept: modes in which those of a group agree.
        kind: of reduction: ``"sum"``, ``"mean"``, ``"amax"``, ``"amin"`` or ``"prod"``.
        positions: of a group, of which those without an entry are 0; 0 where entries alone count.
    """
    _, rows, count = groups_of(pattern, kept)
    if kind == "sum":
        return added(values, rows, count)
    each = sizes_of(pattern, kept).view(-1, *[1] * (values.ndim - 1))
    if kind == "mean":
        return added(values, rows, count) / (float(positions) or each.to(values.dtype))

    def reduced(values: torch.Tensor) -> torch.Tensor:
        if values.numel() and _has_pieces(values):
            return _by_pieces(values, pattern, kept, kind)
        return _scattered(values, rows, count, kind)

    out = products(values, reduced) if kind == "prod" else reduced(values)
    if not positions:
        return out
    with_zero = out * 0 if kind == "prod" else out.clamp(**{"min" if kind == "amax" else "max": 0})
    return torch.where(each < positions, with_zero, out)


def products(values: torch.Tensor, multiply: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return the products that a function makes, or raise `DtypeError` where one of int64 does not fit in 64 bits."""
    out = multiply(values)
    if values.dtype == torch.int64 and not transforming():
        refuse_wrapped(out, multiply(values.double()), "a product of integers")
    return out


def sizes_of(pattern: Pattern, kept: tuple[int, ...]) -> torch.Tensor:
    """(groups,) int64: how many entries each has; made once."""
    _, rows, count = groups_of(pattern, kept)
    return pattern._once(("sizes of", kept), lambda: crd.histogram(rows, count))


def gathered(source: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """``source.index_select(0, rows)``, of rows of any width."""
    places = _places(source, rows)
    if places is None:
        return source.index_select(0, rows)
    return source.reshape(-1).gather(0, places).view(rows.numel(), *source.shape[1:])


def added(values: torch.Tensor, rows: torch.Tensor, count: int) -> torch.Tensor:
    """(count, *sizes): sums of the values whose row each is."""
    places = _places(values, rows)
    if places is None:
        return values.new_zeros(count, *values.shape[1:]).index_add(0, rows, values)
    out = values.new_zeros(count * prod(values.shape[1:]))
    return out.scatter_add(0, places, values.reshape(-1)).view(count, *values.shape[1:])


def _places(values: torch.Tensor, rows: torch.Tensor) -> torch.Tensor | None:
    """The place of each single value of narrow rows, on a GPU; None of others."""
    width = prod(values.shape[1:])
    if not values.is_cuda or not 1 < width <= NARROW:
        return None
    return (rows[:, None] * width + torch.arange(width, device=rows.device)).reshape(-1)


def _has_pieces(values: torch.Tensor) -> bool:
    """Tell whether pieces beat a scatter: of wide rows on a CPU where gradients follow, as a scatter has slow ones."""
    narrow = prod(values.shape[1:]) <= NARROW
    return values.is_floating_point() and (values.is_cuda or values.requires_grad or narrow)


def _scattered(values: torch.Tensor, rows: torch.Tensor, count: int, kind: str) -> torch.Tensor:
    if not values.numel():
        return added(values, rows, count)
    out = values.new_zeros(count, *values.shape[1:])
    index = rows.view(-1, *[1] * (values.ndim - 1)).expand_as(values)
    return out.scatter_reduce(0, index, values, kind, include_self=False)


def _by_pieces(values: torch.Tensor, pattern: Pattern, kept: tuple[int, ...], kind: str) -> torch.Tensor:
    order, levels = _pieces(pattern, kept)
    found = (values if order is None else values.index_select(0, order)).reshape(values.shape[0], -1)
    for lengths in levels:
        found = torch.segment_reduce(found, kind.removeprefix("a"), lengths=lengths, axis=0, unsafe=True)
    return found.reshape(-1, *values.shape[1:])


def _pieces(pattern: Pattern, kept: tuple[int, ...]) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """The entries by groups, None where they lie so; and the lengths of pieces, of pieces of these, …"""

    def made() -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        rows = groups_of(pattern, kept).of_entry
        order = None if bool((rows[1:] >= rows[:-1]).all()) else crd.order_of([rows])
        levels, left = [], sizes_of(pattern, kept)
        while int(left.max()) > PIECE:
            pieces = (left + PIECE - 1) // PIECE
            ends = torch.cumsum(pieces, 0)
            lengths = left.new_full((int(ends[-1]),), PIECE)
            lengths[ends - 1] = left - (pieces - 1) * PIECE
            levels.append(lengths)
            left = pieces
        return order, [*levels, left]

    return pattern._once(("pieces of", kept), made)
