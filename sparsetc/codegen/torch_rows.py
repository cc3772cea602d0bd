"""Write what torch programs read as text, and choose how many rows they take at a time.

In: a tile program, its statements and the tensors that it reads. Out: texts over ``i0, i1, b0, b1, n0, n1``: the items
of a chunk, their fibers, tiles or pairs, and their stored nonzeros; and those ranges, of chunks of items that are small
enough that what is made stays in the cache. A chunk's words are slices; what is looked up besides, and the tiles that
pairs name, are by `index_select`. Rows of an operand whose weighted sums one call of torch makes are never gathered.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from sparsetc.ir.nest.coordinates import AXIS_LEVEL, Bits, Lookup, Writer
from sparsetc.ir.nest.nest import ITEM, LANE, LEAF
from sparsetc.ir.nest.values import Bitmap, Ones
from sparsetc.ir.program.tile import Decode, Gather, Product, Tile, TileProgram, Value

if TYPE_CHECKING:
    from sparsetc.codegen.launch import PartArrays


ENDS = (("i0", "i1"), ("b0", "b1"), ("n0", "n1"))
"""Where the rows of each level begin and end in a chunk."""
RANGES = tuple(":".join(ends) for ends in ENDS)
COUNTS = tuple(f"{end} - {first}" for first, end in ENDS)


def rows_of(program: TileProgram, level: int) -> int:
    """The level whose positions are the rows of what is made at a level: positions along a side make no rows."""
    return max([axis.level for axis in program.view.loops if axis.level <= level], default=ITEM)


class ChunkRows:
    """The rows that a chunk has of each level."""

    def __init__(self, program: TileProgram, device: str) -> None:
        self.p, self.device = program, device

    def offsets(self, level: int) -> str:
        """Where the rows of a level begin that belong to each row above, and where the last end, within the chunk."""
        view, (first, end) = self.p.view, ENDS[level]
        if view.items.size and view.levels[0]:
            begins = f"torch.arange(i0, i1 + 1, device={self.device}).mul_({view.items.size})"
            return f"{begins}.sub_({first}).clamp_(max={end} - {first})"
        if view.items.size:
            return f"torch.tensor([0, {end} - {first}], device={self.device})"
        above, last = ENDS[rows_of(self.p, level - 1)]  # the next level up that has rows
        pointers = {axis.level: outer.name for outer, axis in pairwise((view.items, *view.loops))}
        return f"{pointers[level]}_ptr[{above} : {last} + 1] - {first}"

    def spread(self, name: str, own: int, level: int) -> str:
        """A row of one level repeated for each row of a deeper one that belongs to it."""
        own, level = rows_of(self.p, own), rows_of(self.p, level)
        if own == level:
            return name
        name = self.spread(name, own, rows_of(self.p, level - 1))
        if self.p.view.items.size and self.p.view.levels[0]:
            return f"{name}.repeat_interleave({self.p.view.items.size}, 0)[: {COUNTS[level]}]"
        return f"{name}.repeat_interleave(torch.diff({self.offsets(level)}), 0, output_size={COUNTS[level]})"


class TorchCoordinates(Writer):
    """Writes the coordinates of a statement; those along a side are columns beside one another."""

    def __init__(self, rows: ChunkRows, statement: Decode) -> None:
        self.rows, self.level, self.along_side = rows, statement.level, bool(statement.coordinate.sides)
        self.column = "[:, None]" if self.along_side else ""

    def position(self, axis: str) -> str:
        device = self.rows.device
        if axis == "lane":
            return f"torch.zeros(1, dtype=torch.int64, device={device})"  # these programs have one
        at = AXIS_LEVEL[axis]
        return self.rows.spread(f"torch.arange({', '.join(ENDS[at])}, device={device})", at, self.level) + self.column

    def coordinate(self, mode: int) -> str:
        p, letter = self.rows.p, self.rows.p.letters[mode]
        text = self.rows.spread(p.read[letter], p.view.level_of(mode), self.level)
        return f"{text}.long(){self.column}" if self.along_side else text

    def along(self, mode: int) -> str:
        return f"torch.arange({self.rows.p.view.values.sides[mode]}, device={self.rows.device})"

    def bits(self, bits: Bits) -> tuple[str, str]:
        text, last = bits.operations(self.lookup(bits.word))
        return (text[1:-1], ">>") if bits.top and bits.shift and not last else (text, last)

    def lookup(self, lookup: Lookup) -> str:
        if lookup.every != 1:
            where = lookup.where.text(self)
            listed = f"{lookup.array}[{where}].long()"
            return listed if self.along_side else f"{lookup.array}.index_select(0, {where})"
        (level,) = (AXIS_LEVEL[axis] for axis in lookup.axes)
        return self.rows.spread(f"{lookup.array}[{RANGES[level]}]", level, self.level) + self.column


def value(rows: ChunkRows, s: Value) -> str:
    """The values of a statement's tiles, their positions in the order in which they are stored."""
    stored = rows.p.stored(s.operand)
    kind, sides = stored.values, ", ".join(str(stored.values.sides[mode]) for mode in stored.values.sequence)
    if isinstance(kind, Ones):
        return f"torch.ones({COUNTS[rows_of(rows.p, LEAF)]}, dtype={rows.p.output}.dtype, device={rows.device})"
    values, pairs = stored.array("values"), f"pair_{stored.name}[{RANGES[LANE]}]"  # the tiles that pairs name
    if isinstance(kind, Bitmap):
        bits, sizes = f"{stored.array('bits')}.view(-1, {kind.words})", f"{kind.word}, {kind.volume}"
        tiles = f"{bits}[{RANGES[LANE]}], {values}[{RANGES[LEAF]}], {sizes}"
        if stored.name:
            tiles = f"{bits}[{pairs}], {values}, {sizes}, {stored.array('value_ptr')}[{pairs}]"
        return f"expanded({tiles}).view(-1, {sides})"
    if stored.name:
        return f"{values}.view(-1, {sides}).index_select(0, {pairs})"
    return f"{values}[{RANGES[LEAF]}]" + (f".view(-1, {sides})" if sides else "")


def bags(program: TileProgram) -> dict[Product, tuple[Gather, tuple[str, ...]]]:
    """The products that add up rows of an operand as they lie in its table, each weighted by the other factors.

    Returns:
        For each, what gathers those rows, and the axes of the weights: none, or the first of the rows' axes, where rows
        have as many elements for each position of these.
    """
    gathers = {s.out.name: s for s, _ in program.statements if isinstance(s, Gather)}
    products = [s for s, _ in program.statements if isinstance(s, Product) and s.accumulate and not s.dot]
    weights = (
        (s, gathers[t.name], _weight_axes(program, s, t)) for s in products for t in s.inputs if t.name in gathers
    )
    return {s: (rows, axes) for s, rows, axes in weights if axes is not None}


def _weight_axes(p: TileProgram, s: Product, rows: Tile) -> tuple[str, ...] | None:
    """The axes of the factors that weight the rows of another; None where these may not be added up so."""
    axes, others = rows.within, [tile for tile in s.inputs if tile != rows]
    have = {a for tile in others for a in tile.within}
    shared, apart = axes[: len(have)], axes[len(have) :]
    if rows.level == ITEM or axes != s.out.within or have != set(shared) or set(axes) & set(p.letters):
        return None
    inner = {rows_of(p, tile.level) for tile in others}
    if max(inner, default=ITEM) > rows_of(p, rows.level) or inner <= {ITEM}:
        return None
    return shared if not shared or (apart and p.elements(shared) <= p.elements(apart)) else None


CHUNK = 3 << 19
"""Elements of intermediate results a chunk may make: 16,000 fibers of rank 32 with two factors, each result 2 MB (2
cores: fibers of 4,000 a chunk lost 1.6x to the calls' own time, 64,000 up to 1.25x to memory)."""

FEW = 1 << 19
"""Elements of all intermediate results up to which a call takes one thread: 0.07 to 0.2 ms, of which a second core
saves a tenth where it is free, and to which it adds 8 to 80 ms where it is not (SpMM and MTTKRP, 2 busy cores)."""

Range = tuple[int, int, int, int, int, int]


def chunks(program: TileProgram, arrays: PartArrays, most: int = CHUNK) -> list[Range]:
    """Ranges of whole items, or of one item that holds all nonzeros, that make about so many elements each."""
    view, per = program.view, elements(program)
    items, stored, chunk = arrays.items, arrays.stored, program.view.items.size
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
    first = begins = named[program.arrays[0]].long()
    for axis in view.loops[:-1]:
        first = named[f"{axis.name}_ptr"].long()[first]
    if all(axis.level != LANE for axis in view.loops):
        begins = torch.zeros_like(begins)
    first = view.values.begins(named, first)
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


@lru_cache(maxsize=256)
def elements(p: TileProgram) -> tuple[int, int, int]:
    """Elements that are made for a row of each level."""
    by_level, bagged = Counter({ITEM: 1, LANE: 1, LEAF: 1}), bags(p)
    unread = {rows for rows, _ in bagged.values()}
    for s, _ in p.statements:
        if isinstance(s, Product):
            deepest = s.out if s in bagged else max(s.inputs, key=lambda tile: rows_of(p, tile.level))
            by_level[rows_of(p, deepest.level)] += p.elements(s.out.within)
        elif isinstance(s, Gather) and s not in unread:
            by_level[rows_of(p, s.out.level)] += p.elements(s.out.within)
    return by_level[ITEM], by_level[LANE], by_level[LEAF]
