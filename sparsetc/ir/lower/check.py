"""Checks of a tree before it is lowered: it has every factor once, and sums every axis once where that is possible.

In: a `Tree`, the `Inner` einsum that it is of, and the roles of a tile's positions. Out: nothing, or a `PlanError`
that names the node and the fault.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from sparsetc.errors import PlanError
from sparsetc.ir.contraction_tree import Tree, order_of_sums
from sparsetc.ir.lower.inner import Inner
from sparsetc.ir.nest.axes import Axis, home
from sparsetc.ir.plan import Schedule
from sparsetc.ir.program.tile import LANES
from sparsetc.support import among


def verify_tree(inner: Inner, schedule: Schedule, around: Sequence[Axis]) -> None:
    """Raise `PlanError` if the schedule's tree does not fit this einsum and these loops, or cannot be lowered."""
    assert schedule.tree is not None
    _verify_factors(schedule.tree, inner)
    _verify_roles(inner, schedule)
    axes = _axes_of(schedule.tree, inner, around, dict(schedule.tile_sizes))
    for axis in sorted(axes - inner.keyed):
        raise PlanError(f"tree {schedule.tree}: the result has no axis {axis}, which is never summed")
    for axis in sorted(inner.keyed - axes):
        raise PlanError(f"tree {schedule.tree}: axis {axis} is summed, which the result keeps")


def _verify_factors(tree: Tree, inner: Inner) -> None:
    factors, occurrences = [*inner.stored, *inner.operand], Counter(tree.factors)
    for name, times in occurrences.items():
        if name not in factors:
            raise PlanError(f"tree {tree}: there is no factor {name!r}; the einsum has {', '.join(factors)}")
        if times > 1:
            raise PlanError(f"tree {tree}: factor {name} occurs {times} times")
    for name in factors:
        if name not in occurrences and not (name in inner.stored and inner.may_omit_ones(occurrences)):
            raise PlanError(f"tree {tree}: factor {name} is missing")


def _verify_roles(inner: Inner, schedule: Schedule) -> None:
    """Positions of a tile are at once, in turn or, where the result keeps them, over the grid."""
    tile_sizes = dict(schedule.tile_sizes)
    for c in (*tile_sizes, *schedule.tile_loops):
        if c not in inner.sides:
            raise PlanError(f"the schedule takes positions of {c}, along which nothing stored has a side")
    for c, n in tile_sizes.items():
        if n < 1 or n & (n - 1):
            raise PlanError(f"positions that are taken at once are a power of two, found {n} of {c}")
    for c, side in inner.sides.items():
        keeps = c in inner.along(inner.kept) or c in inner.output_axes
        if keeps and c in schedule.tile_loops:
            raise PlanError(f"positions of {c} cannot be taken in turn, since the result keeps them")
        if not keeps and c not in schedule.tile_loops and tile_sizes.get(c, 1) < side:
            raise PlanError(f"the {side} positions of {c} are summed, so they are taken at once or in turn")


def _axes_of(tree: Tree, inner: Inner, around: Sequence[Axis], tile_sizes: Mapping[str, int]) -> frozenset[str]:
    """Return the axes on which a tree depends. Raise `PlanError` at the first invalid node, factors first."""
    looped = [axis.name for axis in around]

    def fail(node: Tree, why: str) -> PlanError:
        return PlanError(f"tree {tree}: {node} {why}")

    def in_registers(axes: frozenset[str]) -> set[str]:
        return {a for a in axes if a == LANES or a in tile_sizes or a in inner.dense}

    def axes_of(node: Tree) -> frozenset[str]:
        if node.kind == "factor":
            return inner.axes[node.name]
        parts = [axes_of(part) for part in node.parts]
        axes = frozenset().union(*parts)
        for axis in node.over:
            if node.over.count(axis) > 1 or any(axis not in part for part in parts):
                raise fail(node, f"cannot sum over {axis}: it does not depend on it, or sums it twice")
            others = Counter(tree.factors) - Counter(node.factors)
            if late := [name for name in others if axis in inner.axes[name]]:
                raise fail(node, f"sums over {axis}, on which {late[0]} depends, a factor outside of it")
        if node.kind == "dot":
            check_dot(node, *parts)
        elif node.kind == "sum":
            check_sum(node, axes)
        return axes - set(node.over)

    def check_dot(node: Tree, left: frozenset[str], right: frozenset[str]) -> None:
        """The axes of a dot are in registers, and its sides have axes of their own."""
        for axis in node.over:
            if axis in looped:
                raise fail(node, f"contracts {axis}, whose positions are taken in turn")
        rows, columns = (in_registers(side) - set(node.over) for side in (left, right))
        if rows & columns:
            raise fail(node, f"has axis {min(rows & columns)} on both sides, and does not contract it")
        if not rows or not columns:
            raise fail(node, f"has a side of no axis but {', '.join(node.over)}")

    def check_sum(node: Tree, axes: frozenset[str]) -> None:
        """Check that loops are summed from the innermost outwards, dense axes last."""
        dense = among(node.over, inner.dense)
        if dense and node is not tree and inner.view.innermost.lanes:
            raise fail(node, f"sums over {dense[0]}, which only the whole tree can, or a dot")
        left = set(axes)
        for beside, over in order_of_sums(node.over, looped, in_registers(axes)):
            left -= {*beside, *over}
            if not over:
                continue
            # What is summed over loops depends on no loop inside, and its sum lives where a loop of the view ends.
            first = min(map(looped.index, over))
            if inside := among(looped[first:], left):
                raise fail(node, f"sums over {over[0]} before {inside[0]}, whose loop lies inside")
            level = home(around, over)
            if sum([axis.level <= level for axis in around]) > first:
                raise fail(node, f"sums over {over[0]} apart from {looped[first - 1]}: both are one sum")

    return axes_of(tree)
