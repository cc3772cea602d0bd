"""Pairs of tiles: one matrix product a pair, added up over the pairs of an item."""

from __future__ import annotations

from dataclasses import replace

from sparsetc.ir.contraction_tree import Dot, Factor, Sum, product
from sparsetc.ir.inner import Inner
from sparsetc.ir.plan import Schedule
from sparsetc.ir.program.operands import MIN_DOT


def by_pairs(inner: Inner, schedule: Schedule) -> Schedule:
    """A dot over the inner axis; without dots a loop over its positions, each of which is multiplied and added.

    Args:
        inner: two factors of stored values, and no others.
        schedule: whether there are dots.
    """
    x, y = map(Factor, inner.stored)
    loops = tuple(axis.name for axis in inner.view.loops)
    over = tuple(c for c in inner.sides if c not in inner.output_axes)
    if schedule.dot:
        take = tuple((c, max(side, MIN_DOT)) for c, side in inner.sides.items())
        return replace(schedule, tree=Sum(Dot(x, y, over), loops), take=take)
    take = tuple((c, side) for c, side in inner.sides.items() if c not in over)
    return replace(schedule, tree=Sum(product((x, y)), (*over, *loops)), take=take, turns=over)
