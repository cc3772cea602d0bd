"""The default rule: the tree of a schedule that has none, and the roles of a tile's positions.

In: an `Inner` einsum and a `Schedule`. Out: the schedule with a tree. What is contracted follows from the axes::

    nonzeros    `by_levels`               sums from the innermost loop outwards, a dot over the lanes where two sides
                                          have none of the other's dense axes
    tiles       `by_groups.by_groups`     the letters of a tile in groups, by the fewest multiplications
    pairs       `by_pairs`                one dot, or a loop over what it would sum

Of nonzeros everything follows from the level at which each thing is known. A dense operand is read at the deepest level
of the sparse letters it has; a product is formed at the level of its deepest factor and summed over that level before
the factors of the next one are multiplied in (the distributive law). So a fiber's nonzeros are summed before the factor
row they share is multiplied in: R(2M + 2F) flops instead of 3MR (MM-CSF, section III).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from sparsetc.ir.contraction_tree import Dot, Factor, Sum, Tree, product, total
from sparsetc.ir.default_tree.by_groups import by_groups
from sparsetc.ir.equation.einsum import joined
from sparsetc.ir.inner import Inner
from sparsetc.ir.nest.nest import ITEM, LEAF, LEVELS
from sparsetc.ir.plan import Schedule
from sparsetc.ir.program.operands import MIN_DOT
from sparsetc.ir.program.tile import LANES


def completed(inner: Inner, schedule: Schedule) -> Schedule:
    """Return the schedule, which has no tree, with the tree that the rule gives it."""
    if len(inner.stored) > 1:
        found = by_pairs(inner, schedule)
    elif inner.sides:
        found = by_groups(inner, schedule)
    else:
        found = replace(schedule, tree=by_levels(inner, schedule))
    return replace(found, ruled=(found.tree, found.take, found.turns))


def by_pairs(inner: Inner, schedule: Schedule) -> Schedule:
    """The tree of pairs: a dot over the inner axis, or a loop over its positions, which multiplies and adds each.

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


def by_levels(inner: Inner, schedule: Schedule) -> Tree:
    """The tree of nonzeros; factors known before the key's level is reached are multiplied in there, all at once."""
    reach, factors = inner.key.level, _by_level(inner)
    inputs, outside = factors[LEAF], [axis.level for axis in inner.view.loops]
    for axis in reversed(inner.view.loops):
        outside.pop()
        home = max(outside, default=ITEM)
        if home >= reach:
            # Lanes are summed with the outermost loop that has them.
            lanes = (LANES,) if axis.lanes and not inner.view.beside[home] else ()
            inputs = [_total(inner, schedule, inputs, axis.name, lanes), *factors[home]]
    tree = product(inputs)
    contracted = {a for node in tree.nodes if isinstance(node, Dot) for a in node.over}
    return total(tree, (a for a in inner.summed if a not in contracted))


def _by_level(inner: Inner) -> list[list[Tree]]:
    """The factors that are multiplied in at each level."""
    found: list[list[Tree]] = [[] for _ in LEVELS]
    for level in range(len(LEVELS)):
        own = [Factor(name) for name in inner.operand if inner.levels[name] == level]
        if level == LEAF and not inner.may_omit_ones(inner.operand):
            found[LEAF][:0] = map(Factor, inner.stored)
        found[max(level, inner.key.level)] += own
    return found


def _total(inner: Inner, schedule: Schedule, factors: Sequence[Tree], loop: str, lanes: tuple[str, ...]) -> Tree:
    """The sum of a product over a loop and over the lanes, by a dot where the lanes make one."""
    found = _matrix_product(inner, schedule, factors, lanes) if lanes and schedule.dot else None
    return total(found, (loop,)) if found else total(product(factors), (loop, *lanes))


def _matrix_product(inner: Inner, schedule: Schedule, factors: Sequence[Tree], lanes: tuple[str, ...]) -> Tree | None:
    """Summing the lanes as a matrix product; or the lanes and dense axes together, of blocks that nonzeros gather."""
    if inner.view.lanes >= MIN_DOT and (halves := _matrix_halves(inner, schedule, factors, frozenset())):
        return Dot(product(halves[0]), product(halves[1]), lanes)
    names = {name for tree in factors for name in tree.factors}
    outside = {a for o in inner.operands if o.name not in names for a in o.axes}
    halves = _matrix_halves(inner, schedule, factors, frozenset(inner.summed) - outside)
    if halves is None:
        return None
    left, right = map(product, halves)
    over = [c for c in inner.summed if c not in outside and c in _dense(inner, left) & _dense(inner, right)]
    deep = inner.view.lanes * prod(map(schedule.block, over))
    return Dot(left, right, (*lanes, *over)) if over and inner.view.lanes > 1 and deep >= MIN_DOT else None


def _matrix_halves(
    inner: Inner, schedule: Schedule, factors: Sequence[Tree], summed: frozenset[str]
) -> tuple[list[Tree], list[Tree]] | None:
    """Two sets of factors with no dense axis in common but some that are summed, each with enough of its own."""
    groups = joined((_dense(inner, tree) - summed, tree) for tree in factors)
    sized = sorted([g for g in groups if g[0]], key=lambda g: -prod(map(schedule.block, g[0])))
    if len(sized) < 2:
        return None
    # The largest group is one side; all others, and the values, are multiplied into the other.
    right, left = sized[0][1], [t for g in (*(g for g in groups if not g[0]), *sized[1:]) for t in g[1]]
    sides = [prod(map(schedule.block, axes)) for axes in (set().union(*(g[0] for g in sized[1:])), sized[0][0])]
    return (left, right) if min(sides) >= MIN_DOT else None


def _dense(inner: Inner, tree: Tree) -> set[str]:
    """The dense axes of a tree's factors."""
    return {a for name in tree.factors if name in inner.operand for a in inner.operand[name].axes}
