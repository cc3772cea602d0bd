"""Axes of a nest: what a work item takes in turn, and how much of it at once.

In: integers and names. Out: the axes of a `Nest`; `ir.lower` puts computations into their loops::

    axis := items    # work items, one grid program each, of a range of what the next axis numbers: between pointers, of
                     # equally many nonzeros, or the block of the item's own number
          | each     # tiles, pairs of tiles of two operands, or blocks of `lanes` fibers that lie side by side: the
                     # ids in the item's range, one at a time
          | run      # the item's range of nonzeros, `lanes` consecutive ones at a time, the last of which may be fewer
          | fibers   # the nonzeros of a block, step by step: the next one of each of its `lanes` fibers
          | tile     # positions along a side of a tile, `step` at a time
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from sparsetc.ir.nest.values import Values
from sparsetc.support import Letters, Names

ITEM = 0
LANE = 1
LEAF = 2
LEVELS = ("item", "lane", "leaf")
LANES = "lane"
"""The axis of what lies side by side."""
UNLIMITED = 2**62
"""A chunk that no tensor reaches: one item holds every nonzero."""


@dataclass(frozen=True)
class Axis:
    """The range of a loop, or of the grid.

    Attributes:
        level: the level of what is known in the loop and not outside it.
        sums: the accumulator's name in a program that sums over the axis.
        letter: the einsum letter whose positions along a tile's side the loop takes; empty for all other loops.
        arrays: the index arrays that the loop reads, beside coordinates.
        strays: whether padding has arbitrary coordinates: its zeros may be added to some row, so rows must not be
            stored.
        ordered: whether a result that is added here may have a partial row of its own, for a deterministic second pass
            to sum.
        name: what the loop counts; its pointers are called ``<name>_ptr``.
        lanes: vector width: how many nonzeros, or fibers, are taken side by side; 0 for none.
    """

    level: ClassVar[int] = LEAF
    sums: ClassVar[str] = "total"
    letter: ClassVar[str] = ""
    arrays: ClassVar[Names] = ()
    strays: ClassVar[bool] = False
    ordered: ClassVar[bool] = True

    name: str
    lanes: int = 0

    def describe(self, unroll: int) -> str:
        """Return what the loop goes over, in words."""
        return f"steps of {self.lanes} lanes, {unroll} at a time" if self.lanes else f"{self.name}s, one at a time"

    def range(self, at: Any, arrays: Mapping[str, Any], stored: int) -> tuple[Any, Any]:
        """Return begin and end of the next axis' range for each position in `at`."""
        pointers = arrays[f"{self.name}_ptr"]
        return pointers[at].long(), pointers[at + 1].long()

    def zeros(self, padded: bool) -> bool:
        """Return True if positions without a nonzero are multiplied too; `padded` says if padding is stored."""
        return padded

    def where(self, values: Values, tiles: list[str]) -> list[str]:
        """Return lines for a reader: where values are stored. Those of tiles are given as `tiles`."""
        return [
            f"{name}[n] and word[n] belong to nonzero n; a work item has a range of nonzeros" for name in values.held
        ]

    def taken(self, at: dict[str, Any], step: Any, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Return the positions `at` without the lanes whose fiber has ended at their `step`."""
        return at


@dataclass(frozen=True)
class Items(Axis):
    """Work items, one grid program each, with a range of what the next axis numbers.

    Attributes:
        size: positions of the next axis in every item, but for the last where they are counted; 0 where any number may
            be, between two pointers.
        counts: scalar arguments that a kernel takes for the part, beside the number of its programs.
    """

    level = ITEM

    name: str = "item"
    size: int = 0
    counts: Names = ()

    @property
    def arrays(self) -> Names:  # type: ignore[override]
        return () if self.size else (f"{self.name}_ptr",)

    def range(self, at: Any, arrays: Mapping[str, Any], stored: int) -> tuple[Any, Any]:
        if not self.size:
            return super().range(at, arrays, stored)
        starts = at * self.size
        return starts, starts + (stored - starts).clamp(max=self.size)

    def ends(self, load: Callable[[str, str], str], least: str) -> tuple[str, str]:
        """Return the text of an item's begin and end; `load` prints a load, `least` is the min function's name."""
        n = self.size
        if not n:
            return load(self.arrays[0], "item"), load(self.arrays[0], "item + 1")
        if not self.counts:
            return "item", "item + 1"
        return ("0", "nonzeros") if n == UNLIMITED else (f"item * {n}", f"{least}(start + {n}, nonzeros)")

    def number(self, positions: int, items: int) -> int:
        """Return the number of items for `positions` of the next axis, or `items` if it does not follow from them."""
        return -(-positions // self.size) if self.size else items

    def __str__(self) -> str:
        if self.counts:
            return f"chunks of {self.size}"
        return "blocks" if self.size else self.arrays[0]


@dataclass(frozen=True)
class Each(Axis):
    """The ids in the item's range, one at a time: of a ``tile``, a ``pair``, or a ``block`` of fibers side by side.

    Attributes:
        operands: the two operands for pairs, where an id stands for a tile of each; empty where it is a tile's or
            block's own.
    """

    level, ordered = LANE, False

    operands: Names = ()

    @property
    def arrays(self) -> Names:  # type: ignore[override]
        return tuple(f"{self.name}_{operand}" for operand in self.operands)

    def describe(self, unroll: int) -> str:
        return f"{self.name}s of the item"

    def zeros(self, padded: bool) -> bool:
        return True

    def where(self, values: Values, tiles: list[str]) -> list[str]:
        return tiles


@dataclass(frozen=True)
class Run(Axis):
    """The range of nonzeros that the item has, some consecutive ones at a time."""

    strays = True


@dataclass(frozen=True)
class Fibers(Axis):
    """The steps of a block: a step takes the next nonzero of each of its fibers, which lie side by side."""

    arrays = ("block_ptr", "block_full", "lane_len")
    sums = "fiber_sum"

    def zeros(self, padded: bool) -> bool:
        return False

    def where(self, values: Values, tiles: list[str]) -> list[str]:
        arrays = " and ".join((*values.held, "word"))
        return [f"{arrays} at [block_ptr[block] + step * {self.lanes} + lane]; step < lane_len[lane]"]

    def taken(self, at: dict[str, Any], step: Any, arrays: Mapping[str, Any]) -> dict[str, Any]:
        at["fiber"] = at["block"] * self.lanes + at["lane"]
        live = step < arrays["lane_len"][at["fiber"]]
        return {name: numbers[live] for name, numbers in at.items()}


@dataclass(frozen=True)
class TileLoop(Axis):
    """The positions along a side of a tile, some at a time.

    Attributes:
        size: how many positions there are.
        step: how many are taken at a time.
        unrolled: whether the body is printed once for each step, where it holds no loop.
    """

    size: int = 1
    step: int = 1
    unrolled: bool = True

    @property
    def letter(self) -> str:  # type: ignore[override]
        return self.name

    def describe(self, unroll: int) -> str:
        return f"{self.name} in the tile" + (f", {self.step} at a time" if self.step > 1 else "")


def home(around: Sequence[Axis], over: Letters) -> int:
    """The level at which a sum over loops, one or more, lives: outside of the outermost."""
    level = ITEM
    for axis in around:
        if axis.name in over:
            break
        level = max(level, axis.level)
    return level
