"""Tiles: the letters' groups as dots, scalings and sums.

In: as for `lower`, with a view of tiles. Out: a `DataFlow`, and the letters that are taken in turn. Once placed::

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
from sparsetc.ir.lower.contract import DataFlow
from sparsetc.ir.lower.groups import groups_of
from sparsetc.ir.lower.lowering import DenseLowering, Target
from sparsetc.ir.nest.axes import ITEM, LANE, LEAF, Turns
from sparsetc.ir.operands import MIN_DOT
from sparsetc.ir.plan import Schedule
from sparsetc.ir.tile import DenseAxis, Gather, Operand, Tile, Value
from sparsetc.ir.view import View

MOST_SUMS = 4096
"""Sums that a warp keeps, 128 a thread: of more, most would be kept in memory."""


class TileLowering(DenseLowering):
    """The lowering of dense tiles, and of tiles as bitmaps."""

    def __init__(self, bound: Bound, view: View, schedule: Schedule, target: Target) -> None:
        super().__init__(bound, view, schedule, target)
        self.side = dict(zip(self.letters, view.sides, strict=True))
        self.groups = groups_of(bound, view.sides, schedule.dot)
        self._check_order()
        self.block = self._blocks()
        self.positions = tuple(DenseAxis(c, self.side[c], self.block[c]) for c in self.letters)
        looped = (c for c in self.groups.spread if self.block[c] < self.side[c] or self.side[c] == 1)
        self.turns = tuple(Turns(c, self.side[c], self.block[c]) for c in looped)

    def _check_order(self) -> None:
        """Raise `PlanError` where bits are stored for the dots of another einsum: values would be searched for."""
        view, groups = self.view, self.groups
        stored = [self.letters[m] for m in view.sequence]
        found, wanted = ([c for c in order if self.side[c] > 1] for order in (stored, groups.sequence))
        if view.bitmap and view.contracted and found != wanted:
            raise PlanError(
                f"tiles are stored in the order {''.join(stored)} for dots over {''.join(stored[-view.contracted :])}; "
                f'"{self.equation}" takes them in the order {"".join(groups.sequence)}, with dots over '
                f"{''.join(groups.contracted) or 'nothing'}: plan it anew, or leave out the storage's sequence"
            )

    # -- blocks -----------------------------------------------------------------------------------------------------
    def _blocks(self) -> dict[str, int]:
        """Positions of each letter that a program has at once."""
        g = self.groups
        side = {c: 1 << (n - 1).bit_length() for c, n in self.side.items()}  # padded to what registers hold
        block = {c: side[c] for c in (*g.first, *g.second, *g.columns)} | dict.fromkeys(g.gridded, 1)
        if g.dot:
            for letters in filter(None, (g.first, g.second)):
                block[letters[-1]] *= self._missing(prod(block[c] for c in letters))
        if g.second:
            matrix = prod(a.block for a in self.dense)
            room = min(self.schedule.columns, MOST_SUMS * self.schedule.warps // matrix)
            for c in reversed(g.columns):
                block[c] = max(1, min(side[c], room))
                room //= block[c]
        spare = self.schedule.columns // prod(block[c] for c in g.columns) if g.dot and not g.second else 1
        for c in reversed(g.spread):
            block[c] = max(1, min(side[c], spare))
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

    # -- computations -----------------------------------------------------------------------------------------------
    def contract(self, flow: DataFlow) -> Tile:
        """The dots, what they are scaled by, and the sums that are left to the end."""
        g = self.groups
        for level in (ITEM, LANE):
            flow.statements += self.decodes(level)
        inner = [o for o in self.operands if not set(o.rows) <= set(self.kept)]
        rows = {o: self._gather(flow, o) for o in inner}
        weights = []
        for name, letters in (("w", g.first), ("v", g.second)):
            own = [rows[o] for o in inner if set(o.rows) & set(letters)]
            if g.dot and own:
                weights.append(flow.multiply(name, own) if len(own) > 1 else own[0])
        across, deep = self._axes_of((*g.spread, *g.columns, *g.second)), self._axes_of(g.first)
        x = flow.make(Value(Tile("x", (*across, *deep), LEAF, folded=len(across) if g.dot else 0)))
        if g.dot:
            product = flow.dot("part", weights[:1], [x], g.first)
            product = flow.scale("scaled", product, [rows[o] for o in inner if not set(o.rows) & set(g.contracted)])
            for right in weights[1:]:
                product = flow.dot("total", [product], [right], g.second)
            product = flow.sum("step", product, g.spread)
        else:
            product = flow.multiply("total", (x, *rows.values()))
        home = self.key.level  # of a key that each tile has, a tile's positions in turn are all that is added up
        total = flow.accumulate("total", product, home) if home == ITEM or self.turns else product
        total = flow.sum("summed", total, g.second)
        tails = [self._gather(flow, o) for o in self.operands if o not in inner]
        return flow.multiply("result", (total, *tails)) if tails else total

    def _gather(self, flow: DataFlow, o: Operand) -> Tile:
        own = self._axes_of([c for c in self.letters if c in o.rows])
        name = f"{o.name.lower()}_{''.join((*o.axes, *o.rows)) or 'scalar'}"
        return flow.make(Gather(Tile(name, (*o.axes, *own), self.depth(o.rows)), o))
