"""Einsum x Part -> tile program: written once, over views, for any order, any mode and any set of dense operands.

In: a `Bound` einsum with one sparse operand whose letters are distinct, the `View` of its packed part and a `Schedule`.
Out: a verified `TileProgram`.

Everything follows from the level at which each thing is known. A dense operand is gathered at the deepest level of the
sparse letters it has; a product is formed at the level of its deepest factor and summed over that level before the
factors of the next one are multiplied in (the distributive law); the result is added at the level of the output's key.
So a fiber's nonzeros are summed before the factor row they share is multiplied in: R(2M + 2F) flops instead of 3MR
(MM-CSF, section III).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from math import prod

from sparsetc.ir.einsum import Bound
from sparsetc.ir.lower_tiles import lower_tiles
from sparsetc.ir.operands import MIN_DOT, Lowering, Target, joined, row_of
from sparsetc.ir.plan import Schedule
from sparsetc.ir.tile import (
    LANES,
    Gather,
    Key,
    Loop,
    Operand,
    Position,
    Product,
    Row,
    Slot,
    Statement,
    Sum,
    Tile,
    TileProgram,
    Value,
    Zero,
)
from sparsetc.ir.view import ITEM, LANE, LEAF, View


def lower(
    bound: Bound, view: View, schedule: Schedule, target: Target, *, number: int = 0, format: str = ""
) -> TileProgram:
    """The tile program of one part; raises `PlanError` when the view cannot serve the einsum."""
    if view.sides:
        return lower_tiles(bound, view, schedule, target, number=number, format=format)
    own = view if view.blocks else replace(view, lanes=schedule.lanes)
    return _Lowering(bound, own, schedule, target).program(number, format)


class _Lowering(Lowering):
    def __init__(self, bound: Bound, view: View, schedule: Schedule, target: Target) -> None:
        super().__init__(bound, view, schedule, target)
        self.level = {self.letters[c.mode]: level for level, own in enumerate(view.levels) for c in own}
        self.key = self._key()

    def _key(self) -> Key:
        level = max((self.level[c] for c in self.kept), default=ITEM)
        if self.target.sparse:
            if self.target.in_operand_order and len(self.kept) == len(self.letters):
                return Position()
            return Slot(("item_slot", "lane_slot", "leaf_slot")[level], level)
        return row_of(self.kept, self.sizes, level)

    def _depth(self, operand: Operand) -> int:
        return max((self.level[c] for c in operand.rows), default=ITEM)

    def _gather(self, operand: Operand) -> Gather:
        level = self._depth(operand)
        axes = operand.axes if level == ITEM else (LANES, *operand.axes)
        suffix = "".join((*operand.rows, *operand.axes))
        return Gather(Tile(f"{operand.name.lower()}_{suffix or 'scalar'}", axes, level), operand)

    @cached_property
    def _wanted(self) -> set[str]:
        """Letters whose coordinates an operand, the key or another coordinate reads."""
        wanted = {c for o in self.operands for c in o.rows}
        if isinstance(self.key, Row):
            wanted |= set(self.kept)
        for mode, coordinate in reversed(self.view.coordinates.items()):
            if self.letters[mode] in wanted:
                wanted |= {self.letters[m] for m in coordinate.modes}
        return wanted

    def _decodes(self, level: int) -> list[Statement]:
        """What reads the coordinates of one level that are wanted."""
        return [d for d in self.decodes(level) if d.letter in self._wanted]

    def _tile(self, name: str, level: int, inputs: tuple[Tile, ...]) -> Tile:
        present = {a for t in inputs for a in t.axes}
        return Tile(name, tuple(a for a in (LANES, *self.order) if a in present), level)

    def body(self) -> tuple[Statement, ...]:
        gathers = {level: [self._gather(o) for o in self.operands if self._depth(o) == level] for level in range(3)}
        # Factors known before the key's level is reached are multiplied in there, all at once.
        reach = self.key.level
        factors: list[list[Tile]] = [[], [], []]
        for level, each in gathers.items():
            factors[max(level, reach)] += [g.out for g in each]
        value = Tile("x", (LANES,), LEAF)
        leaf = self._leaf(value, tuple(factors[LEAF]), gathers[LEAF])
        inner = leaf if not self.view.blocks else self._lanes(leaf, tuple(factors[LANE]), gathers[LANE])
        head = (*self._decodes(ITEM), *gathers[ITEM])
        if reach != ITEM:
            return (*head, *inner)
        total = self._total(inner)
        after: list[Statement] = []
        if factors[ITEM]:
            if LANES in total.axes:
                summed = Tile("summed", total.axes[1:], ITEM)
                after.append(Sum(summed, total))
                total = summed
            inputs = (total, *factors[ITEM])
            extra = tuple(a for a in self.order if a not in total.axes and any(a in t.axes for t in inputs))
            out = Tile("scaled", (*total.axes, *extra), ITEM)
            after.append(Product(out, inputs))
            total = out
        return (*head, *inner, *after, self.add(total))

    @staticmethod
    def _total(inner: tuple[Statement, ...]) -> Tile:
        zero = inner[0]
        assert isinstance(zero, Zero)
        return zero.out

    def _leaf(self, value: Tile, factors: tuple[Tile, ...], gathers: list[Gather]) -> tuple[Statement, ...]:
        """The loop over nonzeros, with its accumulator where the key is above it."""
        # A pattern's 1s are multiplied in only where nothing else says which lanes hold a nonzero.
        given = self.view.pattern and any(t.level == LEAF for t in factors)
        values = () if given else (value,)
        loads = (*self._decodes(LEAF), *map(Value, values), *gathers)
        inputs = (*values, *factors)
        if self.key.level == LEAF:
            out = self._tile("term", LEAF, inputs)
            return (Loop(LEAF, (*loads, Product(out, inputs), self.add(out))),)
        name = "fiber_sum" if self.view.blocks else "total"
        step = self._product(name, LANE if self.view.blocks else ITEM, inputs, contracts=not self.view.blocks)
        return (Zero(step.out), Loop(LEAF, (*loads, step)))

    def _lanes(
        self, leaf: tuple[Statement, ...], factors: tuple[Tile, ...], gathers: list[Gather]
    ) -> tuple[Statement, ...]:
        """The loop over blocks around the loop over steps."""
        head: tuple[Statement, ...] = (*self._decodes(LANE), *gathers)
        if self.key.level == LEAF:
            return (Loop(LANE, (*head, *leaf)),)
        inputs = (self._total(leaf), *factors)
        if self.key.level == LANE:
            if not factors:
                return (Loop(LANE, (*head, *leaf, self.add(inputs[0]))),)
            out = self._tile("scaled", LANE, inputs)
            return (Loop(LANE, (*head, *leaf, Product(out, inputs), self.add(out))),)
        step = self._product("total", ITEM, inputs, contracts=True)
        return (Zero(step.out), Loop(LANE, (*head, *leaf, step)))

    def _product(self, name: str, level: int, inputs: tuple[Tile, ...], contracts: bool) -> Product:
        if contracts and self.schedule.dot:
            halves = self._matrix_halves(inputs)
            if halves:
                left, right = halves
                rows = tuple(a for a in self.order if any(a in t.axes for t in left))
                cols = tuple(a for a in self.order if any(a in t.axes for t in right))
                return Product(Tile(name, (*rows, *cols), level, folded=len(rows)), left, right, accumulate=True)
        return Product(self._tile(name, level, inputs), inputs, accumulate=True)

    def _matrix_halves(self, inputs: tuple[Tile, ...]) -> tuple[tuple[Tile, ...], tuple[Tile, ...]] | None:
        """Two sets of factors with no dense axis in common, so that summing the lanes is a matrix product."""
        if self.view.lanes < MIN_DOT:
            return None
        groups = joined((set(tile.axes) - {LANES}, tile) for tile in inputs)
        sized = sorted((g for g in groups if g[0]), key=lambda g: -prod(self._block(a) for a in g[0]))
        if len(sized) < 2:
            return None
        # The largest group is one side; all others, and the values, are multiplied into the other.
        right = tuple(sized[0][1])
        left = tuple(t for g in (*(g for g in groups if not g[0]), *sized[1:]) for t in g[1])
        sides = [prod(self._block(a) for a in axes) for axes in (set().union(*(g[0] for g in sized[1:])), sized[0][0])]
        return (left, right) if min(sides) >= MIN_DOT else None

    def _block(self, letter: str) -> int:
        return next(a.block for a in self.axes if a.letter == letter)
