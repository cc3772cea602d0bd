"""The axes that loops go over: what a work item takes in turn, and how much of it at once.

In: nothing but names and numbers. Out: read by `ir.lower`, which puts computations into loops, and by the walkers of
tile programs, each of which says how it goes over an axis::

    axis := items    # work items, one grid program each, of a range of what the next axis numbers
          | each     # tiles, or pairs of tiles of two operands, one at a time: a range of numbers of the item's
          | blocks   # likewise, blocks of `lanes` fibers that lie side by side
          | run      # the item's range of nonzeros, `lanes` consecutive ones at a time, the last of which may be fewer
          | fibers   # the nonzeros of a block, step by step: the next one of each of its `lanes` fibers
          | turns    # positions along a side of a tile, `take` at a time
"""

from __future__ import annotations

from dataclasses import dataclass

ITEM, LANE, LEAF = 0, 1, 2
LEVELS = ("item", "lane", "leaf")
WHOLE = 2**62
"""A chunk that no tensor reaches: one item holds every nonzero."""


@dataclass(frozen=True)
class Axis:
    """What a loop goes over."""

    name: str
    """What its positions number."""

    @property
    def arrays(self) -> tuple[str, ...]:
        """The arrays that say where it begins and ends."""
        return ()

    @property
    def sums(self) -> str:
        """What a sum over it is called in a program."""
        return "total"

    @property
    def side_by_side(self) -> int:
        """How many of what a turn takes lie in lanes, each with coordinates of its own; 0 where there are no lanes."""
        return 0

    @property
    def level(self) -> int:
        """The level of what is known in the loop and not outside it."""
        return LEAF

    @property
    def letter(self) -> str:
        """The letter whose positions are taken; empty where they are no letter's."""
        return ""


@dataclass(frozen=True)
class Items(Axis):
    """Work items, one grid program each, with a range of what the next axis numbers: between two pointers, or equal."""

    name: str = "item"
    size: int = 0
    """Positions of the next axis that every item has, but for the last: no pointers are stored then; 0: any number."""

    @property
    def arrays(self) -> tuple[str, ...]:
        return () if self.size else (f"{self.name}_ptr",)

    @property
    def level(self) -> int:
        return ITEM


@dataclass(frozen=True)
class Each(Axis):
    """A range of numbers that the item has, one at a time: ``tile``, ``pair`` or ``block``."""

    operands: tuple[str, ...] = ()
    """The operands a tile of each of which a number stands for, where it does not stand for a tile itself."""

    @property
    def arrays(self) -> tuple[str, ...]:
        return tuple(f"{self.name}_{operand}" for operand in self.operands)

    @property
    def level(self) -> int:
        return LANE


@dataclass(frozen=True)
class Blocks(Each):
    """A range of blocks that the item has, each of some fibers side by side."""

    lanes: int = 1

    @property
    def arrays(self) -> tuple[str, ...]:
        return ("block_ptr", "block_full", "lane_len")

    @property
    def side_by_side(self) -> int:
        return self.lanes


@dataclass(frozen=True)
class Run(Axis):
    """The range of nonzeros that the item has, some consecutive ones at a time."""

    lanes: int

    @property
    def side_by_side(self) -> int:
        return self.lanes


@dataclass(frozen=True)
class Fibers(Axis):
    """The steps of a block: a step takes the next nonzero of each of its fibers, which lie side by side."""

    lanes: int

    @property
    def sums(self) -> str:
        return "fiber_sum"

    @property
    def side_by_side(self) -> int:
        return self.lanes


@dataclass(frozen=True)
class Turns(Axis):
    """The positions along a side of a tile, some at a time."""

    size: int
    take: int
    unrolled: bool = True
    """Whether the text of a turn is printed for each, where it holds no loop."""

    @property
    def letter(self) -> str:
        return self.name

    def __str__(self) -> str:
        return f"{self.name} in the tile" + (f", {self.take} at a time" if self.take > 1 else "")
