"""Write what is laid out over the rows of a chunk as text, and choose how many rows torch programs take at a time.

In: a tile program, and the tensors that it reads. Out: texts over ``i0, i1, b0, b1, n0, n1``: the items of a chunk,
their fibers, tiles or pairs, and their stored nonzeros; and those ranges, of chunks of items that are small enough that
what is made stays in the cache. A chunk's words are slices; what is looked up besides is by `index_select`. Rows of an
operand whose weighted sums one call of torch makes are never gathered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from sparsetc.codegen.launch import PartArrays
from sparsetc.ir.nest import AXIS_LEVEL, ITEM, LANE, LEAF, Lookup, Writer
from sparsetc.ir.program import Decode, Gather, Operand, Product, Tile, TileProgram, names
from sparsetc.ir.program.text import Lines
from sparsetc.support import Names, among

ENDS = (("i0", "i1"), ("b0", "b1"), ("n0", "n1"))
"""Names of the begin and the end of the rows of each level in a chunk."""
RANGES = tuple(":".join(ends) for ends in ENDS)
COUNTS = tuple(f"{end} - {first}" for first, end in ENDS)


def rows_of(program: TileProgram, level: int) -> int:
    """Return the level whose positions are the rows of a tile made at `level`; positions along a side make no rows."""
    return program.view.rows[level]


class TorchPrinter(Writer, Lines):
    """The text of one tile program as a torch function of chunks, and the rows that a chunk has of each level.

    Attributes:
        einsum: the function that contracts.
        level: of the coordinate that is written.
        column: the index that lays it out over positions along sides; empty where it has none.
        decodes: by letter, the statement that reads the coordinate which addresses rows.
        constants: the names of the tiles that are the same for all rows, and so have none: of operands without sparse
            letters, and products of such tiles.
        spare: the names of tiles that are tensors of their own, which one product alone reads. A sum of one tile may be
            a view of it, where the side is 1.
    """

    def __init__(self, program: TileProgram, integers: bool = False) -> None:
        Lines.__init__(self, indent=2)
        self.p, self.device = program, f"{next(iter(program.view.packed), program.output)}.device"
        self.einsum = "integer_einsum" if integers else "torch.einsum"
        self.level, self.column = LEAF, ""
        self.bags = bags(program)
        self.sampled, self.unread = sampled(program), unread(program)
        self.decodes = program.decodes
        gathers, products = program.each(Gather), program.each(Product)
        self.constants = {s.out.name for s in gathers if not s.operand.rows}
        for s in products:
            if not s.accumulate and self.constants.issuperset(t.name for t in s.inputs):
                self.constants.add(s.out.name)
        read = Counter(t.name for s in products for t in s.inputs)
        fresh = {s.out.name for s in gathers} | {s.out.name for s in products if s.accumulate or len(s.inputs) > 1}
        self.spare = {name for name in fresh if read[name] == 1} - self.constants

    def offsets(self, level: int) -> str:
        """Return the offsets within the chunk of the rows of a level, for each row above; the last end follows."""
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
        """Return a level's rows repeated for each row of a deeper level that belongs to them."""
        own, level = rows_of(self.p, own), rows_of(self.p, level)
        if own == level:
            return name
        name = self.spread(name, own, rows_of(self.p, level - 1))
        if self.p.view.items.size and self.p.view.levels[0]:
            return f"{name}.repeat_interleave({self.p.view.items.size}, 0)[: {COUNTS[level]}]"
        return f"{name}.repeat_interleave(torch.diff({self.offsets(level)}), 0, output_size={COUNTS[level]})"

    # -- coordinates; those along a side are columns beside one another ----------------------------------------------
    def position(self, axis: str) -> str:
        if axis == "lane":
            return f"torch.zeros(1, dtype=torch.int64, device={self.device})"  # these programs have one
        at = AXIS_LEVEL[axis]
        return self.spread(f"torch.arange({', '.join(ENDS[at])}, device={self.device})", at, self.level) + self.column

    def coordinate(self, mode: int) -> str:
        text = self.spread(self.p.read[self.p.letters[mode]], self.p.view.level_of(mode), self.level)
        return f"{text}.long(){self.column}" if self.column else text

    def along(self, mode: int) -> str:
        return f"torch.arange({self.p.view.values.sides[mode]}, device={self.device})"

    def lookup(self, lookup: Lookup) -> str:
        if lookup.every != 1:
            where = lookup.where.text(self)
            return f"{lookup.array}[{where}].long()" if self.column else f"{lookup.array}.index_select(0, {where})"
        (level,) = (AXIS_LEVEL[axis] for axis in lookup.axes)
        return self.spread(f"{lookup.array}[{RANGES[level]}]", level, self.level) + self.column

    # -- what is laid out over rows, sides and axes -------------------------------------------------------------------
    def sided(self, letters: Names) -> Names:
        """The sides along which the coordinates of these letters vary, once each."""
        return tuple(dict.fromkeys(side for c in letters for side in self.decodes[c].along))

    def over(self, name: str, letter: str, level: int, letters: Names, dense: int = 0) -> str:
        """Return a letter's coordinates laid out over rows of a level, then sides, then `dense` axes of size 1."""
        text, sides = self.spread(name, self.decodes[letter].level, level), self.sided(letters)
        along = self.decodes[letter].along
        return _laid_out(text, [":", *[":" if c in along else "None" for c in sides], *["None" for _ in range(dense)]])

    def index(self, operand: Operand, level: int) -> str:
        """The rows of an operand that are gathered, of all positions along sides one after another."""
        text, big = "", ".long()" if operand.nrows >= 2**31 else ""
        for letter, extent in zip(operand.rows, operand.extents, strict=True):
            name = self.over(names.at(letter), letter, level, operand.rows) + big
            text = f"({text}) * {extent} + {name}" if text else name
        return self.flat(text, operand.rows)

    def flat(self, text: str, letters: Names, then: str = "") -> str:
        """Return numbers over rows and sides as one flat tensor, after the call `then`."""
        if not self.sided(letters):
            return text
        return f"{text}{then}.flatten()" if text.isidentifier() else f"({text}){then}.flatten()"

    def table(self, operand: Operand) -> str:
        """An operand as rows."""
        return f"{operand.name}.view(-1, {operand.width})"

    def shape(self, axes: Names) -> str:
        return ", ".join(str(self.p.axis(a).size) for a in axes)

    # -- factors ----------------------------------------------------------------------------------------------------
    def times(self, tiles: tuple[Tile, ...], axes: Names, level: int) -> str:
        """The product over rows of a level and all of the axes: into a factor that has them all, and no other use."""
        tiles = tuple(sorted(tiles, key=lambda t: len(t.within)))
        into = [t for t in tiles if len(tiles) > 1 and t.name in self.spare and t.within == axes]
        into = [t for t in into if rows_of(self.p, t.level) == rows_of(self.p, level)][:1]
        factors = [self.factor(t, axes, level) for t in tiles if t not in into]
        return into[0].name + "".join(f".mul_({f})" for f in factors) if into else " * ".join(factors)

    def factor(self, tile: Tile, axes: Names, level: int) -> str:
        """Return a factor laid out over rows of a level (unless it is constant) and the axes."""
        tile_axes, constant = tile.within, tile.name in self.constants
        name = tile.name if constant else self.spread(tile.name, tile.level, level)
        order = [tile_axes.index(a) for a in axes if a in tile_axes]
        if order != sorted(order):
            numbers = order if constant else [0, *[n + 1 for n in order]]
            name = f"{name}.permute({', '.join(map(str, numbers))})"
        return _laid_out(name, [*([] if constant else [":"]), *[":" if a in tile_axes else "None" for a in axes]])


def _laid_out(text: str, index: Sequence[str]) -> str:
    """A tensor with the axes of an index that it lacks."""
    return text if all(i == ":" for i in index) else f"{text}[{', '.join(index)}]"


def summed(text: str, own: Names, axes: Names) -> str:
    """Return a tile with its axes in the given order, summed over all others."""
    if late := [str(n + 1) for n, a in enumerate(own) if a not in axes]:
        text += f".sum(({', '.join(late)}))" if len(late) > 1 else f".sum({late[0]})"
    left = among(own, axes)
    if left != axes:
        text += f".permute({', '.join(map(str, (0, *[left.index(a) + 1 for a in axes])))})"
    return text


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
    inner = {rows_of(p, tile.level) for tile in others}
    if max(inner, default=ITEM) > rows_of(p, rows.level) or inner <= {ITEM}:
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
            deepest = s.out if s in bagged else max(s.inputs, key=lambda tile: rows_of(p, tile.level))
            by_level[rows_of(p, deepest.level)] += p.elements(dotted[s][2] if s in dotted else s.out.within)
        elif isinstance(s, Gather) and s not in skipped:
            by_level[rows_of(p, s.out.level)] += p.elements(s.out.within)
    return by_level[ITEM], by_level[LANE], by_level[LEAF]
