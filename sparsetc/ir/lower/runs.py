"""Runs of nonzeros and blocks of fibers: what is computed, for any order, any mode and any set of dense operands.

In: as for `lower`, with a view of runs or of blocks. Out: a `DataFlow`.

Everything follows from the level at which each thing is known. A dense operand is gathered at the deepest level of the
sparse letters it has; a product is formed at the level of its deepest factor and summed over that level before the
factors of the next one are multiplied in (the distributive law); the result is added at the level of the output's key.
So a fiber's nonzeros are summed before the factor row they share is multiplied in: R(2M + 2F) flops instead of 3MR
(MM-CSF, section III).
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from sparsetc.ir.einsum import Bound
from sparsetc.ir.lower.contract import DataFlow
from sparsetc.ir.lower.lowering import DenseLowering, Target
from sparsetc.ir.nest.axes import ITEM, LANE, LEAF
from sparsetc.ir.operands import MIN_DOT, joined
from sparsetc.ir.plan import Schedule
from sparsetc.ir.tile import LANES, Gather, Operand, Tile, Value
from sparsetc.ir.view import View


class RunLowering(DenseLowering):
    """The lowering of runs of nonzeros and of blocks of fibers."""

    def __init__(self, bound: Bound, view: View, schedule: Schedule, target: Target) -> None:
        super().__init__(bound, view if view.blocks else replace(view, lanes=schedule.lanes), schedule, target)

    def _gather(self, operand: Operand, level: int) -> Gather:
        axes = operand.axes if level == ITEM else (LANES, *operand.axes)
        suffix = "".join((*operand.rows, *operand.axes))
        return Gather(Tile(f"{operand.name.lower()}_{suffix or 'scalar'}", axes, level), operand)

    def contract(self, flow: DataFlow) -> Tile:
        """Sums from the innermost loop outwards, down to the level of the output's key.

        Factors known before the key's level is reached are multiplied in there, all at once.
        """
        reach = self.key.level
        factors: list[list[Tile]] = [[], [], []]
        for level in (ITEM, LANE, LEAF):
            flow.statements += self.decodes(level)
            own = [o for o in self.operands if self.depth(o.rows) == level]
            # A pattern's 1s are multiplied in only where nothing else says which lanes hold a nonzero.
            if level == LEAF and not (self.view.pattern and own):
                factors[LEAF].insert(0, flow.make(Value(Tile("x", (LANES,), LEAF))))
            factors[max(level, reach)] += [flow.make(self._gather(o, level)) for o in own]
        inputs = factors[LEAF]
        for home in (LANE, ITEM) if self.view.blocks else (ITEM,):
            if home >= reach:
                inputs = [self._total(flow, home, inputs), *factors[home]]
        total, *late = inputs
        if reach == LEAF:
            return flow.multiply("term", inputs)
        if late and reach == LANE:
            return flow.multiply("scaled", inputs)
        return flow.scale("scaled", flow.sum("summed", total, (LANES,)), late) if late else total

    def _total(self, flow: DataFlow, home: int, factors: list[Tile]) -> Tile:
        """The sum of a product over the loop inside a level, and, by a dot, over the lanes."""
        sides = self._matrix_halves(factors) if home == ITEM and self.schedule.dot else None
        product = flow.dot("total", *sides, over=(LANES,)) if sides else flow.multiply("total", factors)
        return flow.accumulate("fiber_sum" if home == LANE else "total", product, home)

    def _matrix_halves(self, inputs: list[Tile]) -> tuple[tuple[Tile, ...], tuple[Tile, ...]] | None:
        """Two sets of factors with no dense axis in common, so that summing the lanes is a matrix product."""
        if self.view.lanes < MIN_DOT:
            return None
        block = self.schedule.block
        groups = joined((set(tile.axes) - {LANES}, tile) for tile in inputs)
        sized = sorted((g for g in groups if g[0]), key=lambda g: -prod(map(block, g[0])))
        if len(sized) < 2:
            return None
        # The largest group is one side; all others, and the values, are multiplied into the other.
        right = tuple(sized[0][1])
        left = tuple(t for g in (*(g for g in groups if not g[0]), *sized[1:]) for t in g[1])
        sides = [
            prod(self.schedule.block(a) for a in axes)
            for axes in (set().union(*(g[0] for g in sized[1:])), sized[0][0])
        ]
        return (left, right) if min(sides) >= MIN_DOT else None
