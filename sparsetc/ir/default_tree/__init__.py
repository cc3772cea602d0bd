"""The default rule: the tree of a schedule that has none, and the roles of a tile's positions.

In: an `Inner` einsum and a `Schedule`. Out: the schedule with a tree. What is contracted follows from the axes::

    by_levels.py    nonzeros     sums from the innermost loop outwards, a dot over the lanes where two sides have none
                                 of the other's dense axes
    by_groups.py    tiles        the letters of a tile in groups, by the fewest multiplications (`groups.py`)
    by_pairs.py     pairs        one dot, or a loop over what it would sum
"""

from __future__ import annotations

from dataclasses import replace

from sparsetc.ir.default_tree.by_groups import by_groups
from sparsetc.ir.default_tree.by_levels import by_levels
from sparsetc.ir.default_tree.by_pairs import by_pairs
from sparsetc.ir.inner import Inner
from sparsetc.ir.plan import Schedule


def completed(inner: Inner, schedule: Schedule) -> Schedule:
    """The schedule as it is where it has a tree of its author's, else with the one that the rule gives it."""
    schedule = schedule.by_rule()
    if schedule.tree is not None:
        return schedule
    if len(inner.stored) > 1:
        found = by_pairs(inner, schedule)
    elif inner.sides:
        found = by_groups(inner, schedule)
    else:
        found = replace(schedule, tree=by_levels(inner, schedule))
    return replace(found, ruled=(found.tree, found.take, found.turns))
