"""Rows in programs of torch: those added or multiplied where they lie, and the number that a chunk has.

In: a tile program, and the tensors that it reads. Out: the products that one call of torch makes of rows that are never
gathered; and ranges of a part, of chunks of items that are small enough that what is made stays in the cache.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from sparsetc.codegen.launch import PartArrays
from sparsetc.ir.nest import ITEM, LANE, LEAF
from sparsetc.ir.program import Decode, Gather, Product, Tile, TileProgram
from sparsetc.support import Names


@lru_cache
def bags(program: TileProgram) -> dict[Product, tuple[Gather, Names]]:
    """Find the products that add up rows of an operand where they lie in its table, weighted by the other factors.

    Returns:
        For each, what gathers those rows, and the axes of the weights: none, or the first of the rows' axes, where rows
        have as many elements for each position of these.
    """
    gathers = {s.out.name: s for s in program.each(Gather)}
    products = [s for s in program.each(Product) if s.accumulate and not s.dot]
    weights = (
        (s, gathers[t.name], _weight_axes(program, s, t)) for s in products for t in s.inputs if t.name in gathers
    )
    return {s: (rows, axes) for s, rows, axes in weights if axes is not None}


@lru_cache
def sampled(program: TileProgram) -> dict[Product, tuple[Gather, Gather, Names]]:
    """Find the products of a row of one operand with a row of another, weighted and summed when they are stored.

    Returns:
        For each product, the two gathers, first that of the mode that is stored first, and the axes that are kept.
    """
    gathers = {s.out.name: s for s in program.each(Gather) if s.operand.rows}
    ends = {s.letter for s in program.each(Decode) if s.along or s.end}
    modes = [program.letters[c.mode] for level in program.view.levels for c in level]
    result, products = program.result, {}
    for s in [s for s in program.each(Product) if not s.accumulate and not s.dot]:
        axes = s.out.within
        kept = result.axes if s.out == result.source else axes
        rows = [gathers[t.name] for t in s.inputs if t.name in gathers and t.within == axes]
        numbers = [t for t in s.inputs if not t.within]
        if len(rows) == 2 and len(rows) + len(numbers) == len(s.inputs) and axes[: len(kept)] == kept != axes:
            first, second = sorted(rows, key=lambda g: min(map(modes.index, g.operand.rows)))
            if numbers and not ends & {*first.operand.rows, *second.operand.rows}:
                products[s] = first, second, kept
    return products


def unread(program: TileProgram) -> set[Gather]:
    """Return the gathers that are not run, since a bag or a sampled product reads the rows where they lie."""
    return {rows for rows, _ in bags(program).values()}.union(*[rows[:2] for rows in sampled(program).values()])


def _weight_axes(p: TileProgram, s: Product, rows: Tile) -> Names | None:
    """Return the axes of the factors that weight the rows of another; None if the rows cannot be added up in place."""
    axes, others = rows.within, [tile for tile in s.inputs if tile != rows]
    have = {a for tile in others for a in tile.within}
    shared, apart = axes[: len(have)], axes[len(have) :]
    if rows.level == ITEM or axes != s.out.within or have != set(shared) or set(axes) & set(p.letters):
        return None
    inner = {p.view.rows[tile.level] for tile in others}
    if max(inner, default=ITEM) > p.view.rows[rows.level] or inner <= {ITEM}:
        return None
    return shared if not shared or (apart and p.elements(shared) <= p.elements(apart)) else None


CHUNK = 3 << 19
"""Elements of intermediate results a chunk may make: 16,000 fibers of rank 32 with two factors, each result 2 MB (2
cores: fibers of 4,000 a chunk lost 1.6x to the calls' own time, 64,000 up to 1.25x to memory)."""

FEW = 1 << 19
"""Most elements of all intermediate results for one thread: 0.07 to 0.2 ms. A second core saves a tenth if it is free,
and adds 8 to 80 ms if it is not (SpMM and MTTKRP, 2 busy cores)."""
FEW_NATIVE = 1 << 23
"""Most of native loops: SpMM at 8 columns took 127 us by one thread, 169 by two; at 128, 489 and 328 (2 cores)."""

Range = tuple[int, int, int, int, int, int]


def chunks(program: TileProgram, arrays: PartArrays, most: int = CHUNK) -> list[Range]:
    """Cut a part into ranges of whole items, or of nonzeros of its only item, that make about `most` elements each."""
    view, per = program.view, elements(program)
    items = arrays.items
    stored = arrays.stored
    chunk = program.view.items.size
    if items == 0:
        return []
    if chunk and view.levels[0]:  # items of one size: as many whole ones as fit
        size = max(1, most // (per[LEAF] * chunk))
        bounds = pairwise([*range(0, items, size), items])
        return [(i0, i1, 0, 0, i0 * chunk, min(i1 * chunk, stored)) for i0, i1 in bounds]
    if chunk:
        size = max(1, most // max(per))
        return [(n, n + 1, 0, 0, at, min(at + size, stored)) for n, at in enumerate(range(0, stored, size))]
    # where the fibers, tiles or pairs of each item begin, 0s where it has none, and where its stored nonzeros do
    named = arrays.named(program)
    pointers = named[program.arrays[0]]

    def begin(at: Tensor) -> tuple[Tensor, Tensor]:
        """Return where the fibers and the nonzeros of items begin."""
        first = begins = pointers[at].long()
        for axis in view.loops[:-1]:
            first = named[f"{axis.name}_ptr"][first].long()
        if all(axis.level != LANE for axis in view.loops):
            begins = torch.zeros_like(begins)
        return begins, view.values.begins(named, first)

    def weight(begins: Any, first: Any) -> Any:
        return first * per[LEAF] + begins * per[LANE]

    at = torch.tensor([0, items], device=pointers.device)
    known = [*zip(*[each.tolist() for each in (at, *begin(at))], strict=True)]
    least, greatest = (weight(begins, first) for _, begins, first in known)
    if greatest - least > most:
        every = weight(*begin(torch.arange(items + 1, device=pointers.device)))
        limits = torch.arange(least + most, greatest, most, device=pointers.device)
        at = torch.unique(torch.cat([at, torch.searchsorted(every, limits).clamp(1, items)]))
        known = [*zip(*[each.tolist() for each in (at, *begin(at))], strict=True)]
    return [(i0, i1, b0, b1, n0, n1) for (i0, b0, n0), (i1, b1, n1) in pairwise(known)]


def few(program: TileProgram, arrays: PartArrays, native: bool) -> bool:
    """True if a program makes so few elements that other threads would cost more than they save."""
    read = sum(g.operand.width for *rows, _ in sampled(program).values() for g in rows)
    return arrays.stored * (sum(elements(program)) + read) <= (FEW_NATIVE if native else FEW)


@lru_cache
def elements(p: TileProgram) -> tuple[int, int, int]:
    """Elements that are made for a row of each level."""
    by_level = Counter({ITEM: 1, LANE: 1, LEAF: 1})
    bagged = bags(p)
    dotted = sampled(p)
    skipped = unread(p)
    for s, _ in p.statements:
        if isinstance(s, Product):
            deepest = s.out if s in bagged else max(s.inputs, key=lambda tile: p.view.rows[tile.level])
            by_level[p.view.rows[deepest.level]] += p.elements(dotted[s][2] if s in dotted else s.out.within)
        elif isinstance(s, Gather) and s not in skipped:
            by_level[p.view.rows[s.out.level]] += p.elements(s.out.within)
    return by_level[ITEM], by_level[LANE], by_level[LEAF]
