"""Einsum x tiles -> tile program: the letters' groups (`ir.tile_groups`) as loops, dots and sums.

In: as for `ir.lower`, with a view of tiles. Out: a verified `TileProgram`::

    loop tiles of the item
      w = rows of the operands of the contracted letters, multiplied together
      loop positions of the spread letters, as many at a time as the schedule has columns
        x = values[columns, contracted]
        part = dot w x;  scaled = part * rows of the spread letters' operands;  total += sum of the spread columns
    result = total * rows of the operands that only kept letters index

A letter too short for a dot is padded in registers: its positions past the side are masked when loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from sparsetc.errors import PlanError
from sparsetc.ir.einsum import Bound
from sparsetc.ir.operands import MIN_DOT, Lowering, Target, row_of
from sparsetc.ir.plan import Schedule
from sparsetc.ir.tile import (
    DenseAxis,
    Gather,
    Loop,
    Operand,
    Product,
    Slot,
    Statement,
    Sum,
    Tile,
    TileProgram,
    Value,
    Zero,
)
from sparsetc.ir.tile_groups import groups_of
from sparsetc.ir.view import ITEM, LANE, LEAF, View

MOST_SUMS = 4096
"""Sums that a warp keeps, 128 a thread: of more, most would be kept in memory."""


def lower_tiles(
    bound: Bound, view: View, schedule: Schedule, target: Target, *, number: int = 0, format: str = ""
) -> TileProgram:
    """The tile program of a part of tiles."""
    return _TileLowering(bound, view, schedule, target).program(number, format)


class _TileLowering(Lowering):
    def __init__(self, bound: Bound, view: View, schedule: Schedule, target: Target) -> None:
        super().__init__(bound, view, schedule, target)
        self.side = dict(zip(self.letters, view.sides, strict=True))
        self.groups = groups_of(bound, view.sides, schedule.dot)
        self._check_order()
        self.tails = tuple(o for o in self.operands if set(o.rows) <= set(self.kept))
        self.inner = tuple(o for o in self.operands if o not in self.tails)
        if target.sparse and {self.letters[c.mode] for c in view.item} != set(self.kept):
            raise PlanError("tiles add to a sparse output where their items share the modes it keeps, and no other")
        self.key = Slot("item_slot", ITEM) if target.sparse else row_of(self.kept, self.sizes, ITEM)
        self.block = self._blocks()
        self.positions = tuple(DenseAxis(c, self.side[c], self.block[c]) for c in self.letters)
        self.looped = tuple(c for c in self.groups.spread if self.block[c] < self.side[c] or self.side[c] == 1)
        self.beside = self._axes_of(self.groups.spread)
        """Spread letters of which several positions are columns at once."""

    @property
    def axes(self) -> tuple[DenseAxis, ...]:
        """Dense axes, and the positions of a tile."""
        return (*self.dense_axes, *self.positions)

    def _check_order(self) -> None:
        """Raise `PlanError` where bits are stored for the dots of another einsum: values would be searched for."""
        view, groups = self.view, self.groups
        stored = [self.letters[m] for m in view.sequence]
        found, wanted = ([c for c in order if self.side[c] > 1] for order in (stored, groups.sequence))
        if view.bitmap and view.contracted and found != wanted:
            raise PlanError(
                f"tiles are stored in the order {''.join(stored)} for dots over {''.join(stored[-view.contracted :])}; "
                f'"{self.bound.einsum}" takes them in the order {"".join(groups.sequence)}, with dots over '
                f"{''.join(groups.contracted) or 'nothing'}: plan it anew, or leave out the storage's sequence"
            )

    # -- blocks -----------------------------------------------------------------------------------------------------
    def _blocks(self) -> dict[str, int]:
        """Positions of each letter that a program has at once."""
        g = self.groups
        block = {c: self.side[c] for c in (*g.first, *g.second, *g.columns)} | dict.fromkeys(g.gridded, 1)
        if g.dot:
            for letters in filter(None, (g.first, g.second)):
                block[letters[-1]] *= self._missing(prod(block[c] for c in letters))
        if g.second:
            matrix = prod(a.block for a in self.dense_axes)
            room = min(self.schedule.columns, MOST_SUMS * self.schedule.warps // matrix)
            for c in reversed(g.columns):
                block[c] = max(1, min(self.side[c], room))
                room //= block[c]
        spare = self.schedule.columns // prod(block[c] for c in g.columns) if g.dot and not g.second else 1
        for c in reversed(g.spread):
            block[c] = max(1, min(self.side[c], spare))
            spare //= block[c]
        if g.dot and not g.second and g.columns:
            block[g.columns[-1]] *= self._missing(prod(block[c] for c in (*g.columns, *g.spread)))
        return block

    @staticmethod
    def _missing(positions: int) -> int:
        """What a power of two must be multiplied by to be long enough for a dot."""
        return max(1, MIN_DOT // positions)

    def _axes_of(self, letters: Sequence[str]) -> tuple[str, ...]:
        """The letters of which a program has several positions at once: axes of its tiles."""
        return tuple(c for c in letters if self.block[c] > 1)

    # -- statements -------------------------------------------------------------------------------------------------
    def body(self) -> tuple[Statement, ...]:
        decodes = [self.decodes(level) for level in (ITEM, LANE)]
        gathers = [self._gather(o, LANE) for o in self.inner]
        once = [g for g in gathers if not set(g.operand.rows) & set(self.looped)]
        late = [g for g in gathers if g not in once]
        steps, total, formed = self._steps({g.operand: g.out for g in gathers})
        nest: tuple[Statement, ...] = (*late, *steps)
        for letter in reversed(self.looped):
            nest = (Loop(LEAF, nest, letter),)
        loop = Loop(LANE, (*decodes[1], *once, *formed, *nest))
        return (*decodes[0], Zero(total), loop, *self._finish(total))

    def _gather(self, o: Operand, level: int) -> Gather:
        own = self._axes_of([c for c in self.letters if c in o.rows])
        name = f"{o.name.lower()}_{''.join((*o.axes, *o.rows)) or 'scalar'}"
        return Gather(Tile(name, (*o.axes, *own), level), o)

    def _finish(self, total: Tile) -> list[Statement]:
        """Sums left to the end, the factors that only the output's letters index, and the result."""
        after: list[Statement] = []
        late = [c for c in self.groups.second if c in total.axes]
        if late:
            summed = Tile("summed", tuple(a for a in total.axes if a not in late), ITEM)
            after.append(Sum(summed, total))
            total = summed
        gathers = [self._gather(o, ITEM) for o in self.tails]
        if gathers:
            result = self._tile("result", (total, *(g.out for g in gathers)), ITEM)
            after += [*gathers, Product(result, (total, *(g.out for g in gathers)))]
            total = result
        return [*after, self.add(total)]

    def _steps(self, tiles: dict[Operand, Tile]) -> tuple[list[Statement], Tile, list[Statement]]:
        """(statements of one turn of the innermost loop, the accumulator, what is formed once a tile)."""
        g = self.groups
        if not g.dot:
            x = Value(Tile("x", self._axes_of((*g.columns, *g.second)), LEAF))
            total = self._tile("total", (x.out, *tiles.values()), ITEM)
            return [x, Product(total, (x.out, *tiles.values()), accumulate=True)], total, []
        left, formed = self._weight("w", g.first, tiles)
        kept = self._axes_of(g.columns)
        across = (*kept, *self._axes_of(g.second)) if g.second else (*self._axes_of(g.spread), *kept)
        x = Value(Tile("x", (*across, *self._axes_of(g.first)), LEAF, folded=len(across)))
        axes = tuple(a for a in self.order if a in left.axes)
        scales = tuple(t for o, t in tiles.items() if not set(o.rows) & {*g.first, *g.second})
        if not scales and not self.beside and not g.second:
            total = Tile("total", (*axes, *across), ITEM, folded=len(axes))
            return [x, Product(total, (left,), (x.out,), accumulate=True)], total, formed
        part = Tile("part", (*axes, *across), LEAF, folded=len(axes))
        steps: list[Statement] = [x, Product(part, (left,), (x.out,))]
        if scales and (self.beside or g.second):
            scaled = Tile("scaled", part.axes, LEAF)
            steps.append(Product(scaled, (part, *scales)))
            part, scales = scaled, ()
        if g.second:
            right, more = self._weight("v", g.second, tiles)
            ends = tuple(a for a in self.order if a in right.axes)
            total = Tile("total", (*kept, *axes, *ends), ITEM, folded=len(kept) + len(axes))
            steps.append(Product(total, (part,), (right,), accumulate=True))
            return steps, total, [*formed, *more]
        if self.beside:
            step = Tile("step", (*axes, *kept), LEAF)
            steps.append(Sum(step, part))
            part = step
        total = Tile("total", (*axes, *kept), ITEM)
        return [*steps, Product(total, (part, *scales), accumulate=True)], total, formed

    def _weight(self, name: str, letters: Sequence[str], tiles: dict[Operand, Tile]) -> tuple[Tile, list[Statement]]:
        """The rows that a dot contracts with: those of one operand, or the product of several."""
        own = [t for o, t in tiles.items() if set(o.rows) & set(letters)]
        if len(own) == 1:
            return own[0], []
        axes = tuple(a for a in (*self.order, *letters) if any(a in t.axes for t in own))
        out = Tile(name, axes, LANE)
        return out, [Product(out, tuple(own))]

    def _tile(self, name: str, inputs: Sequence[Tile], level: int) -> Tile:
        present = {a for t in inputs for a in t.axes}
        return Tile(name, tuple(a for a in (*self.order, *self.letters) if a in present), level)
