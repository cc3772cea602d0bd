"""The runner of tile programs over tiles, or pairs of them: plain torch, one item and one tile at a time.

In and out: as `ir.interpret`, which calls it where a view has sides or pairs. A letter of a sparse operand has a vector
of positions in the tile: all of them where it is an axis, one where it is looped or taken over the grid.
"""

from __future__ import annotations

from math import prod

import torch

from sparsetc.ir.nest.axes import ITEM
from sparsetc.ir.nest.coordinates import Reader
from sparsetc.ir.tile import Add, Decode, Gather, Loop, Row, Scale, Slot, Stored, TileProgram, Value
from sparsetc.ir.view import PAIRED, Tiles

HALVES = "half"
"""The first axis of a tile in halves: high, then low."""


class TileWalk:
    """What differs from runs and blocks: loops over tiles and positions, and what is read where."""

    def __init__(
        self,
        program: TileProgram,
        arrays: dict[str, torch.Tensor],
        values: tuple[torch.Tensor, ...],
        tables: dict[str, torch.Tensor],
        spans: dict[str, slice],
        item: int,
    ) -> None:
        self.program, self.arrays, self.values, self.tables, self.spans = program, arrays, values, tables, spans
        self.item, self.tile = item, 0
        self.block: dict[str, int] = {}
        self.at: dict[str, torch.Tensor] = {}
        self.ends: dict[str, int] = {}
        self.positions = {c: self.span(spans[c].start, program.axis(c).block) for c in program.letters}

    def span(self, start: int, size: int) -> torch.Tensor:
        """So many positions from a first one on."""
        return torch.arange(start, start + size, device=self.values[0].device)

    def turns(self, s: Loop) -> range:
        """The turns of a loop over tiles, or over a letter's positions."""
        if s.letter:
            axis = self.program.axis(s.letter)
            return range(0, axis.size, axis.block)
        ptr = self.arrays[self.program.arrays[0]]
        return range(*(int(ptr[n]) for n in (self.item, self.item + 1)))

    def turn(self, s: Loop, n: int) -> None:
        """Enter one turn."""
        if s.letter:
            self.positions[s.letter] = self.span(n, self.program.axis(s.letter).block)
        else:
            self.tile = n

    def decode(self, s: Decode) -> None:
        """The tile's coordinate of one mode, or the coordinates at the positions along its side."""
        letters = self.program.letters
        reader = Reader(
            lambda axis: self.item if axis == "item" else self.tile,
            lambda mode: self.block[letters[mode]],
            lambda mode: self.positions[letters[mode]].clamp(max=self.side(letters[mode]) - 1),
            lambda array, where: self.arrays[array][where],
        )
        if s.tile:
            self.block[s.letter] = int(s.coordinate.evaluate(reader))
        else:
            self.at[s.letter], self.ends[s.letter] = s.coordinate.evaluate(reader), s.end

    def side(self, letter: str) -> int:
        """Positions of a tile along a letter."""
        return self.program.axis(letter).size

    def coordinate(self, letter: str) -> torch.Tensor:
        """A mode's coordinates at its positions."""
        return self.at[letter]

    def inside(self, letter: str) -> torch.Tensor:
        """Which of a letter's positions are of the tile and of the mode."""
        own, end = self.positions[letter] < self.side(letter), self.ends.get(letter, 0)
        return own & (self.coordinate(letter) < end) if end else own

    def value(self, s: Value) -> torch.Tensor:
        """The tile's values at the positions; 0 past the tile's side."""
        operand = self.program.stored(s.operand)
        tiles = operand.tiles
        halves = (HALVES,) if tiles.halves else ()
        stored = (*halves, *(operand.letters[m] for m in tiles.sequence))
        x = self.whole(operand).view([*(2 for _ in halves), *(tiles.sides[m] for m in tiles.sequence)])
        for axis, letter in enumerate(stored[len(halves) :], start=len(halves)):
            at = self.positions[letter]
            x = x.index_select(axis, at.clamp(max=self.side(letter) - 1))
            past = (at >= self.side(letter)).view(-1, *(1 for _ in range(x.dim() - axis - 1)))
            x = x.masked_fill(past, 0)
        return self.laid_out(x, stored, self.axes(s))

    def axes(self, s: Value) -> tuple[str, ...]:
        """The axes of what `value` gives."""
        return (HALVES, *s.out.axes) if self.program.stored(s.operand).tiles.halves else s.out.axes

    def scale(self, s: Scale) -> torch.Tensor:
        """Factors by which the item's rows of an operand are multiplied; 0 past the tile's side."""
        operand, (letter,) = self.program.stored(s.operand), s.out.axes
        side = self.side(letter)
        first = int(self.arrays[f"item_{s.operand}"][self.item]) * side
        own = self.arrays[operand.array("scales")][first : first + side]
        return torch.cat([own, own.new_zeros(self.program.axis(letter).block - side)])

    def number(self, operand: Stored) -> int:
        """Which of an operand's tiles the turn is at: of a task list, the one that the pair names."""
        return int(self.arrays[f"pair_{operand.name}"][self.tile]) if operand.name else self.tile

    def whole(self, operand: Stored) -> torch.Tensor:
        """All positions of the tile, in the order stored."""
        tiles, tile = operand.tiles, self.number(operand)
        values = self.values[PAIRED.index(operand.name) if operand.name else 0]
        if not tiles.bitmap:
            return values[..., tile * tiles.volume : (tile + 1) * tiles.volume]
        found = values.new_zeros(tiles.volume)
        first = int(self.arrays[operand.array("value_ptr")][tile])
        taken = positions_of(self.arrays[operand.array("bits")].view(-1, tiles.words)[tile], tiles)
        found[taken] = values[first : first + taken.numel()]
        return found

    def gather(self, s: Gather) -> torch.Tensor:
        """A dense operand's rows at the positions; 0 past a mode's end."""
        o = s.operand
        table = self.tables[o.name]
        x = table.view((*o.extents, *table.shape[1:]))
        for axis, letter in enumerate(o.axes, start=len(o.rows)):
            span = self.spans[letter]
            x = x.narrow(axis, span.start, span.stop - span.start)
        for axis, (letter, extent) in enumerate(zip(o.rows, o.extents, strict=True)):
            x = x.index_select(axis, self.coordinate(letter).clamp(max=extent - 1))
            past = (~self.inside(letter)).view(-1, *(1 for _ in range(x.dim() - axis - 1)))
            x = x.masked_fill(past, 0)
        return self.laid_out(x, (*o.rows, *o.axes), s.out.axes)

    @staticmethod
    def laid_out(x: torch.Tensor, axes: tuple[str, ...], wanted: tuple[str, ...]) -> torch.Tensor:
        """Without the axes that are one position only, the others in the order wanted."""
        gone = [n for n, a in enumerate(axes) if a not in wanted]
        left = [a for a in axes if a in wanted]
        return x.squeeze(gone).permute([left.index(a) for a in wanted])

    def add(self, s: Add, total: torch.Tensor, axes: tuple[str, ...], out: torch.Tensor) -> None:
        """Add to (or store) the output rows of the kept positions; those past a mode's end are left out."""
        if isinstance(s.key, Slot):
            kept, row, inside = self.slots(s.key)
        else:
            assert isinstance(s.key, Row)
            kept, row, inside = self.rows(s.key)
        rows = [a for a in kept if a in axes]
        spread = total.permute([axes.index(a) for a in (*rows, *s.axes)]).to(out.dtype)
        flat = spread.reshape(-1, *spread.shape[len(rows) :])
        for n in torch.nonzero(inside.flatten()).flatten().tolist():
            place = out[int(row.flatten()[n])][tuple(self.spans[a] for a in s.axes)]
            place.copy_(flat[n]) if s.owned else place.add_(flat[n])

    def rows(self, key: Row) -> tuple[tuple[str, ...], torch.Tensor, torch.Tensor]:
        """(kept letters, rows of a dense output at their positions, which of them are of the tile and of the mode)."""
        terms = [(self.coordinate(letter), stride) for letter, stride in key.terms]
        kept = tuple(letter for letter, _ in key.terms)
        return kept, self.summed(terms), self.all_inside(kept)

    def slots(self, key: Slot) -> tuple[tuple[str, ...], torch.Tensor, torch.Tensor]:
        """Kept letters, rows and which of them are any, of a sparse output with a row a kept position; -1 is none."""
        kept, owner = key.kept, self.item if key.level == ITEM else self.tile
        sides = [self.side(c) for c in kept]
        places = [
            (self.positions[c].clamp(max=side - 1), prod(sides[n + 1 :]))
            for n, (c, side) in enumerate(zip(kept, sides, strict=True))
        ]
        row = self.arrays[key.array].view(-1, prod(sides))[owner][self.summed(places)]
        return kept, row, self.all_inside(kept) & (row >= 0)

    def all_inside(self, letters: tuple[str, ...]) -> torch.Tensor:
        """`inside`, of several letters' positions."""
        found = torch.ones((), dtype=torch.bool, device=self.values[0].device)
        for letter in letters:
            found = found.unsqueeze(-1) & self.inside(letter)
        return found

    def summed(self, terms: list[tuple[torch.Tensor, int]]) -> torch.Tensor:
        """The sum of vectors times strides, a dimension each."""
        found = torch.zeros((), dtype=torch.long, device=self.values[0].device)
        for at, stride in terms:
            found = found.unsqueeze(-1) + at * stride
        return found


def positions_of(words: torch.Tensor, view: Tiles) -> torch.Tensor:
    """Positions of a tile that have a nonzero, from its words of bits."""
    set_ = (words.unsqueeze(-1) >> torch.arange(view.word, device=words.device)) & 1
    return torch.nonzero(set_.flatten()).flatten()
