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
from typing import ClassVar

ITEM, LANE, LEAF = 0, 1, 2
LEVELS = ("item", "lane", "leaf")
WHOLE = 2**62
"""A chunk that no tensor reaches: one item holds every nonzero."""


@dataclass(frozen=True)
class Axis:
    """What a loop goes over, or the grid."""

    level: ClassVar[int] = LEAF
    """The level of what is known in the loop and not outside it."""
    sums: ClassVar[str] = "total"
    """What a sum over it is called in a program."""
    letter: ClassVar[str] = ""
    """The letter whose positions are taken; empty where they are no letter's."""

    name: str
    """What its positions number."""
    lanes: int = 0
    """How many of what a turn takes lie side by side, each with coordinates of its own; 0 where there are no lanes."""

    @property
    def arrays(self) -> tuple[str, ...]:
        """The arrays that say where it begins and ends."""
        return ()


@dataclass(frozen=True)
class Items(Axis):
    """Work items, one grid program each, with a range of what the next axis numbers: between two pointers, or equal."""

    level = ITEM

    name: str = "item"
    size: int = 0
    """Positions of the next axis that every item has, but for the last: no pointers are stored then; 0: any number."""

    @property
    def arrays(self) -> tuple[str, ...]:
        return () if self.size else (f"{self.name}_ptr",)


@dataclass(frozen=True)
class Each(Axis):
    """A range of numbers that the item has, one at a time: ``tile``, ``pair`` or ``block``."""

    level = LANE

    operands: tuple[str, ...] = ()
    """The operands a tile of each of which a number stands for, where it does not stand for a tile itself."""

    @property
    def arrays(self) -> tuple[str, ...]:
        return tuple(f"{self.name}_{operand}" for operand in self.operands)


@dataclass(frozen=True)
class Blocks(Each):
    """A range of blocks that the item has, each of some fibers side by side."""

    arrays = ("block_ptr", "block_full", "lane_len")  # type: ignore[assignment]


@dataclass(frozen=True)
class Run(Axis):
    """The range of nonzeros that the item has, some consecutive ones at a time."""


@dataclass(frozen=True)
class Fibers(Axis):
    """The steps of a block: a step takes the next nonzero of each of its fibers, which lie side by side."""

    sums = "fiber_sum"


@dataclass(frozen=True)
class Turns(Axis):
    """The positions along a side of a tile, some at a time."""

    size: int = 1
    take: int = 1
    unrolled: bool = True
    """Whether the text of a turn is printed for each, where it holds no loop."""

    @property
    def letter(self) -> str:  # type: ignore[override]
        return self.name

    def __str__(self) -> str:
        return f"{self.name} in the tile" + (f", {self.take} at a time" if self.take > 1 else "")
