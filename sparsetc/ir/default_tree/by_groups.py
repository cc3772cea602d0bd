"""Tiles: the letters' groups as dots, scalings and sums, and how many positions of each a program has at once.

What the rule gives, with C the operands of what a dot sums, B those of what lies beside, D of kept letters alone::

    sum[spread tile](dot[first](C, X) * B) * D
    sum[spread tile](dot[second](dot[first](C, X) * B, E)) * D          # operands that bring dense axes apart
    X * dot[rank](B, C)                                                 # nothing stored is summed: a sampled product

A letter too short for a dot is padded in registers: its positions past the side are masked when loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf, prod

from sparsetc.ir.contraction_tree import Dot, Factor, Tree, product, total
from sparsetc.ir.default_tree.groups import COLUMNS, TileGroups, divided
from sparsetc.ir.inner import Inner
from sparsetc.ir.nest.axes import ITEM, LEAF
from sparsetc.ir.plan import Schedule
from sparsetc.ir.program.operands import MIN_DOT
from sparsetc.ir.program.tile import Operand

MOST_SUMS = 4096
"""Sums that a warp keeps, 128 a thread: of more, most would be kept in memory."""


def by_groups(inner: Inner, schedule: Schedule) -> Schedule:
    """The schedule with the tree of the groups that take the fewest multiplications, and the roles of positions."""
    inner = inner.by_sides()
    output, wide = (*inner.kept, *inner.output_axes), all(schedule.block(c) >= MIN_DOT for c in inner.summed)
    columns = inf if inner.view.spanning else COLUMNS
    groups = divided(inner.sides, inner.sizes, output, inner.operands, schedule.dot, wide, columns)
    block = _Blocks(inner, schedule, groups).found
    turns = tuple(c for c in groups.spread if block[c] < inner.sides[c] or inner.sides[c] == 1)
    take = tuple((c, n) for c, n in block.items() if n > 1)
    return replace(schedule, tree=_tree(inner, groups, turns), take=take, turns=turns)


def _tree(inner: Inner, g: TileGroups, turns: Sequence[str]) -> Tree:
    """The dots, what they are scaled by, and the sums that are left to the end."""
    within = [o for o in inner.operands if not set(o.rows) <= set(inner.kept)]
    (x,) = map(Factor, inner.stored)
    # Where each tile has a key of its own, its positions in turn are all that is added up.
    loops = inner.loops(LEAF) if inner.key.level == ITEM else ()
    if any(g.sampled):
        left, right = (product(map(Factor, side)) for side in g.sampled)
        return total(product([x, Dot(left, right, inner.summed)]), loops)
    made: Tree = product([x, *_factors(within)])
    if g.dot:
        made = Dot(_rows(within, g.first), x, g.first)
        made = product([made, *_factors(o for o in within if not set(o.rows) & set(g.contracted))])
        made = Dot(made, _rows(within, g.second), g.second) if g.second else made
    spread = sorted(g.spread, key=turns.__contains__)  # what is in registers is summed first
    made = total(made, (*spread, *loops, *(() if g.dot else g.second)))
    return total(product([made, *_factors(o for o in inner.operands if o not in within)]), inner.summed)


def _factors(operands: Iterable[Operand]) -> list[Tree]:
    return [Factor(o.name) for o in operands]


def _rows(operands: Iterable[Operand], letters: Sequence[str]) -> Tree:
    """The side of a dot over these letters: the operands that have any."""
    return product(_factors(o for o in operands if set(o.rows) & set(letters)))


class _Blocks:
    """Positions of each letter that a program has at once, in the order in which letters come."""

    def __init__(self, inner: Inner, schedule: Schedule, groups: TileGroups) -> None:
        self.inner, self.schedule, self.groups, g = inner, schedule, groups, groups
        self.side = {c: 1 << (n - 1).bit_length() for c, n in inner.sides.items()}  # padded to what registers hold
        whole = (*g.first, *g.second, *g.columns)
        self.found = {c: side if c in whole else 1 for c, side in self.side.items()}
        if g.dot:
            for letters in filter(None, (g.first, g.second)):
                self.found[letters[-1]] *= self._missing(letters)
        if g.dot and g.second:
            matrix = prod(map(self._elements, inner.dense))
            self._fill(g.columns, min(schedule.columns, MOST_SUMS * schedule.warps // matrix))
        one_dot = g.dot and not g.second
        self._fill(g.spread, schedule.columns // self._positions(g.columns) if one_dot else 1)
        if one_dot and g.columns:
            self.found[g.columns[-1]] *= self._missing((*g.columns, *g.spread))

    def _fill(self, letters: Sequence[str], room: int) -> None:
        """Take as many positions of letters as there is room for, of the last most."""
        for c in reversed(letters):
            self.found[c] = max(1, min(self.side[c], room))
            room //= self.found[c]

    def _elements(self, axis: str) -> int:
        return sum(self.schedule.pieces_of(axis)) or self.schedule.block(axis)

    def _positions(self, letters: Iterable[str]) -> int:
        return prod(self.found[c] for c in letters)

    def _missing(self, letters: Iterable[str]) -> int:
        """What positions must be multiplied by to be enough for a dot."""
        return max(1, MIN_DOT // self._positions(letters))
