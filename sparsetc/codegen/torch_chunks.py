"""How many rows a torch program takes at a time: chunks of items, small enough that what is made stays in the cache.

In: a tile program and the tensors that it reads. Out: ranges (i0, i1, b0, b1, n0, n1) of items, of their fibers, tiles
or pairs, and of stored nonzeros.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING

import torch

from sparsetc.codegen.torch_reads import bags, rows_of
from sparsetc.ir.nest.axes import ITEM, LANE, LEAF, Fibers
from sparsetc.ir.nest.values import Bitmap
from sparsetc.ir.program.tile import Gather, Product, Tile, TileProgram

if TYPE_CHECKING:
    from sparsetc.codegen.launch import PartArrays

CHUNK = 3 << 19
"""Elements of intermediate results a chunk may make: 16,000 fibers of rank 32 with two factors, each result 2 MB (2
cores: fibers of 4,000 a chunk lost 1.6x to the calls' own time, 64,000 up to 1.25x to memory)."""

FEW = 1 << 19
"""Elements of all intermediate results up to which a call takes one thread: 0.07 to 0.2 ms, of which a second core
saves a tenth where it is free, and to which it adds 8 to 80 ms where it is not (SpMM and MTTKRP of 1,000 to 30,000
nonzeros, rank 16, on 2 cores with other work)."""

Range = tuple[int, int, int, int, int, int]


def chunks(program: TileProgram, arrays: PartArrays, most: int = CHUNK) -> list[Range]:
    """Ranges of whole items, or of one item that holds all nonzeros, that make about so many elements each."""
    view, per = program.view, elements(program)
    items, stored, chunk = arrays.items, arrays.stored, program.view.chunk
    if items == 0:
        return []
    if chunk and view.levels[0]:  # items of one size: as many whole ones as fit
        size = max(1, most // (per[LEAF] * chunk))
        bounds = pairwise([*range(0, items, size), items])
        return [(i0, i1, 0, 0, i0 * chunk, min(i1 * chunk, stored)) for i0, i1 in bounds]
    if chunk:
        size = max(1, most // max(per))
        return [(n, n + 1, 0, 0, at, min(at + size, stored)) for n, at in enumerate(range(0, stored, size))]
    begins, first = _begins(program, arrays)
    weight = first * per[LEAF] + begins * per[LANE]
    weight = weight - weight[0]
    limits = torch.arange(most, int(weight[-1]) + most, most, device=weight.device)
    ends = torch.searchsorted(weight, limits).clamp(1, items)
    at = torch.unique(torch.cat([ends, ends.new_tensor([0, items])]))
    known = zip(*(each.tolist() for each in (at, begins[at], first[at])), strict=True)
    return [(i0, i1, b0, b1, n0, n1) for (i0, b0, n0), (i1, b1, n1) in pairwise(known)]


def few(program: TileProgram, arrays: PartArrays) -> bool:
    """Whether a program makes so few elements that other threads would cost more than they save."""
    return arrays.stored * sum(elements(program)) <= FEW


def _begins(program: TileProgram, arrays: PartArrays) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the fibers, tiles or pairs of each item begin, and where its stored nonzeros do; where it has none, 0s."""
    named, axes = arrays.named(program), {axis.level: axis for axis in program.view.loops}
    begins = named[program.arrays[0]].long()
    if LANE not in axes:
        return torch.zeros_like(begins), begins
    if isinstance(axes.get(LEAF), Fibers):
        return begins, named["block_ptr"].long()[begins]
    if isinstance(program.view.values, Bitmap):
        return begins, named["value_ptr"].long()[begins]
    return begins, begins * program.view.values.volume  # each tile is stored with all positions


@lru_cache(maxsize=256)
def elements(p: TileProgram) -> tuple[int, int, int]:
    """Elements that are made for a row of each level."""
    made, bagged = Counter({ITEM: 1, LANE: 1, LEAF: 1}), bags(p)
    for s, _ in p.statements:
        if isinstance(s, Product):
            deepest = s.out if s in bagged else max(s.inputs, key=lambda tile: rows_of(p, tile.level))
            made[rows_of(p, deepest.level)] += _positions(p, s.out)
        elif isinstance(s, Gather) and s not in bagged.values():
            made[rows_of(p, s.out.level)] += _positions(p, s.out)
    return made[ITEM], made[LANE], made[LEAF]


def _positions(p: TileProgram, tile: Tile) -> int:
    return prod(p.axis(a).size for a in tile.within)
