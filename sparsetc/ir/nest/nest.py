"""The walk over the stored nonzeros of a part: axes, one coordinate a mode, and the storage of values.

In: nothing but integers and names. Out: `Nest`, read by `ir.lower`. The grammar of the level::

    nest        := items loops  mode*  values      # items and loops are axes, see `ir.nest.axes`
    loops       := run      # an item is a range of consecutive nonzeros; `lanes` of them are taken at a step
                 | blocks fibers # an item is a range of blocks; a block is `lanes` fibers side by side (sliced ELL);
                            # step n of a block takes the n-th nonzero of every one of its fibers
                 | tiles    # an item is a range of tiles of some positions a mode; coordinates are of tiles
                 | pairs    # an item is a range of a task list: pairs of tiles, one of each of two operands

The coordinate of a position in a tile is the tile's coordinate times its side, plus the place along the side. A listed
mode has a list of coordinates instead, one for each place along a side: its own, or that of another mode, which it then
*rides* along.

A mode is read at one of three levels: shared by the whole item, shared by one lane (a fiber) or tile, or the nonzero's
own. The further out, the fewer times it is read, and the fewer times a factor row is gathered for it.

Arrays a packed part must hold, beside those of its values (P items, B blocks, N stored entries with padding, T tiles):

    item_ptr (P+1)        first nonzero (run), block or tile of each item; absent where items have equally many
    item_word (P)         coordinates of the item modes
    block_ptr (B+1)       first stored nonzero of each block, a multiple of `lanes`
    block_full (B)        steps of the block in which every lane has a nonzero, rounded down to the unrolling
    lane_len (B*lanes)    nonzeros of each fiber; 0 is an unused lane
    lane_word (B*lanes)   coordinates of the lane modes
    tile_word (T)         coordinates of each tile's own modes
    word (N)              coordinates of the leaf modes
    word_base (N/frame)   what the words of each `frame` positions are offsets from
    shift (size of mode `by`) for each coordinate of that mode: coordinate less position of the consecutive mode
    pair_ptr (P+1)        first pair of each item
    pair_x, pair_y        the tile of each operand that a pair reads; its arrays begin with ``x_`` and ``y_``
    item_x, item_y (P)    for tiles in halves: the row of tiles of each operand that an item's pairs belong to
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

from sparsetc.errors import FormatError
from sparsetc.ir.nest.axes import ITEM, LANE, LANES, LEAF, LEVELS, Axis, Each, Fibers, Items, Run
from sparsetc.ir.nest.coordinates import (
    Along,
    Constant,
    Coordinate,
    Expression,
    Formula,
    Lookup,
    ModeCoordinate,
    expressions,
    lookups,
    words_of,
)
from sparsetc.ir.nest.values import Halves, Ones, Values
from sparsetc.support import Ints, Names, cached_property
from sparsetc.support.checks import check_array

Name = TypeVar("Name")
Modes = tuple[ModeCoordinate, ...]

PAIRED = ("x", "y")
"""The operands of a task list, as the names of their arrays begin."""
VALUES = Values()


def tiles_along(shape: Sequence[int], sides: Sequence[int]) -> Ints:
    """Tiles along each mode; the last may reach past the end."""
    return tuple([-(-n // side) for n, side in zip(shape, sides, strict=True)])


@dataclass(frozen=True)
class Nest:
    """Axes, outermost first; the modes of each level; how values are stored.

    Attributes:
        items: work items: what the range of each is known by.
        loops: what a work item takes in turn, outermost first.
        levels: how each mode is read: by the item, by a fiber or a tile, by the nonzero; in each in the order of
            reading.
        values: how values are stored; pairs have `pairs` instead.
        pairs: tiles as the two operands of a task list store them; empty elsewhere. No mode of such a nest is read.
        narrow: whether words of leaf modes take 16 bits where they fit.
    """

    items: Items
    loops: tuple[Axis, ...]
    levels: tuple[Modes, Modes, Modes] = ((), (), ())
    values: Values = VALUES
    pairs: tuple[Values, ...] = ()
    narrow: bool = False

    @cached_property
    def order(self) -> int:
        """Modes of the operand."""
        return sum(map(len, self.levels))

    @cached_property
    def innermost(self) -> Axis:
        """The loop over nonzeros, or over tiles."""
        return self.loops[-1]

    @cached_property
    def lanes(self) -> int:
        """Fibers of a block; for runs, nonzeros of a step, on which nothing stored depends."""
        return self.innermost.lanes or 1

    @cached_property
    def blocks(self) -> bool:
        """True if fibers lie side by side."""
        return bool(self.beside[LANE])

    @cached_property
    def packed(self) -> Names:
        """The arrays that are made again when values change and the pattern does not."""
        return () if self.pairs else self.values.packed

    def stored_shape(self, shape: Ints) -> Ints:
        """Return the number of tiles along each mode; without tiles, the shape."""
        return tuple([-(-n // self.side(mode)) for mode, n in enumerate(shape)])

    def side(self, mode: int) -> int:
        """Return the side of a tile along a mode; 1 without tiles."""
        return self.values.sides[mode] if self.values.sides else 1

    @cached_property
    def positions(self) -> Names:
        """Return the name of the axis that numbers the positions of each level."""
        return ("item", "tile" if self.values.sides else "fiber", "nonzero")

    @cached_property
    def coordinates(self) -> dict[int, Expression]:
        """The coordinate of each mode, in reading order."""
        return expressions(self.positions, self.levels)

    @cached_property
    def along(self) -> dict[int, Expression]:
        """The coordinates of each mode at the positions of a tile; empty without tiles."""

        def strided(mode: int) -> Expression:
            return Formula("+", Formula("*", Coordinate(mode), Constant(self.values.sides[mode])), Along(mode))

        read = self.coordinates.items() if self.values.sides else ()
        return {mode: coordinate if coordinate.sides else strided(mode) for mode, coordinate in read}

    @cached_property
    def sided(self) -> Ints:
        """Return the modes with an axis of their own in a tile: all except modes that ride along others."""
        return tuple(sorted({mode for expression in self.along.values() for mode in expression.sides}))

    def read_along(self, letters: Sequence[Name], some: Iterable[Name]) -> tuple[Name, ...]:
        """Return letters, once each, with each letter that rides along others replaced by these.

        Args:
            letters: of all modes.
            some: the letters to replace; one that belongs to no mode stays, and without tiles all of them stay.
        """
        along = {letters[mode]: sorted(expression.sides) for mode, expression in self.along.items()}
        return tuple(
            dict.fromkeys(d for c in some for d in (map(letters.__getitem__, along[c]) if c in along else (c,)))
        )

    def within(self, mode: int, size: int) -> bool:
        """Return True if no tile passes the end of a mode of this size, and needs no mask; lists may pass it."""
        return not self.coordinates[mode].sides and size % self.values.sides[mode] == 0

    def taking(self, lanes: int) -> Nest:
        """Return the nest with runs of nonzeros taken `lanes` at a step; other loops have their storage's lanes."""
        return replace(self, loops=(replace(run, lanes=lanes),)) if isinstance(run := self.loops[0], Run) else self

    def of_ones(self) -> Nest:
        """Return the nest for nonzeros that are all 1: it reads no values, except from tiles."""
        return self if self.values.sides or self.pairs else replace(self, values=Ones())

    def in_halves(self) -> Nest:
        """Return the nest whose whole tiles are stored as two float16 a value, with one scale for all; others as is."""
        v = self.values
        if v.bitmap or not v.sides:
            return self
        return replace(self, values=Halves(v.sides, v.sequence, v.contracted))

    @cached_property
    def beside(self) -> list[Names]:
        """The axes of values of a step that lie side by side, for each level: ``("lane",)`` or ``()``."""
        first = min([axis.level for axis in self.loops if axis.lanes], default=len(LEVELS))
        return [(LANES,) * (first <= level) for level in range(len(LEVELS))]

    @cached_property
    def walked(self) -> list[Names]:
        """The axes along which the coordinates of each level vary: loops, outermost first, then `beside`."""
        loops = [[axis.name for axis in self.loops if axis.level <= level] for level in range(len(LEVELS))]
        return [(*names, *beside) for names, beside in zip(loops, self.beside, strict=True)]

    @cached_property
    def rows(self) -> list[int]:
        """The level whose positions are the rows of torch's results at each level; sides make no rows."""
        loops = [axis.level for axis in self.loops]
        return [max([outer for outer in loops if outer <= level], default=ITEM) for level in range(len(LEVELS))]

    @cached_property
    def lookups(self) -> tuple[tuple[Lookup, ...], ...]:
        """Return, for each level, the array lookups of its coordinates."""
        return tuple(lookups([[self.coordinates[c.mode] for c in level] for level in self.levels]))

    @cached_property
    def word_bytes(self) -> list[list[int]]:
        """Bytes of a word of each array of words, by level."""
        words = words_of(self.lookups, self.coordinates.values())
        return [[self._word_bytes(n, level, framed) for n, framed in each] for level, each in enumerate(words)]

    def _word_bytes(self, bits: int, level: int, framed: bool) -> int:
        """Bytes of words with so many bits in use."""
        if bits <= 8 and framed:
            return 1
        if bits <= 16 and level == LEAF and self.narrow:
            return 2
        return 4 if bits <= 31 else 8

    @cached_property
    def mode_levels(self) -> dict[int, int]:
        """The level at which each mode is read."""
        return {c.mode: level for level, coordinates in enumerate(self.levels) for c in coordinates}

    def level_of(self, mode: int) -> int:
        """The level at which `mode` is read."""
        if mode not in self.mode_levels:
            raise FormatError(f"the view addresses no mode {mode}")
        return self.mode_levels[mode]

    @cached_property
    def arrays(self) -> Names:
        """Names of the arrays a packed part of this nest holds, in the order kernels take them."""
        stored = list(zip(PAIRED, self.pairs, strict=False))
        rows = [f"item_{name}" for name, tiles in stored if tiles.halves]
        values = [f"{name}_{array}" for name, tiles in stored for array in tiles.arrays]
        read = [lookup.array for lookups in self.lookups for lookup in lookups]
        walked = [array for axis in self.loops for array in axis.arrays]
        names = (*self.items.arrays, *self.values.structure, *walked, *read, *rows, *values)
        return (*dict.fromkeys(names), *self.packed)

    def verify(self) -> None:
        """Raise `FormatError` unless every mode is read exactly once, by axes that are known."""
        modes = [c.mode for level in self.levels for c in level]
        if sorted(modes) != list(range(len(modes))):
            raise FormatError(f"a nest must address each mode once, found modes {modes}")
        for level, coordinates in enumerate(self.levels[1:], 1):
            if coordinates and all(axis.level != level for axis in self.loops):
                raise FormatError(f"no {LEVELS[level]} shares mode {coordinates[0].mode}; use blocks of fibers")
        lanes = self.innermost.lanes
        if lanes & (lanes - 1) or (not lanes and isinstance(self.innermost, Fibers)):
            raise FormatError(f"lanes must be a power of two, found {lanes}")
        if self.values.sides and len(self.values.sides) != self.order:
            raise FormatError(f"tiles have a side for each mode, found {self.values.sides} of {self.order} modes")
        for values in (self.values, *self.pairs):
            _verify_values(values)
        if len({tiles.halves for tiles in self.pairs}) > 1:
            raise FormatError("tiles in halves are those of both operands of a task list, or of neither")
        for tiles in self.pairs:
            if tiles.halves and len(tiles.sides) != 2:
                raise FormatError("paired tiles in halves are matrices")
            if any(side & (side - 1) for side in tiles.sides):
                raise FormatError(f"sides of paired tiles must be powers of two, found {tiles.sides}")
        modes_known: set[int] = set()
        for level, coordinates in enumerate(self.levels):
            for c in coordinates:
                c.check(level == LEAF)
                self._verify_coordinate(c.mode, level, modes_known)
                if not self.coordinates[c.mode].sides:
                    modes_known.add(c.mode)

    def _verify_coordinate(self, mode: int, level: int, known: set[int]) -> None:
        """Raise `FormatError` unless array names are free and every input of a coordinate is known at its level."""
        value, axes = self.coordinates[mode], self.positions[: level + 1]
        for lookup in value.lookups:
            check_array(lookup.array, FormatError)
        if unread := value.modes - known:
            raise FormatError(f"mode {mode} follows from mode {min(unread)}, which must be read before it")
        if missing := value.axes - {*axes, "lane"}:
            raise FormatError(f"mode {mode} is read at the level of {axes[-1]}, which has no {min(missing)}")
        if value.sides:
            self._verify_side(mode, level, value)

    def _verify_side(self, mode: int, level: int, value: Expression) -> None:
        """Raise `FormatError` unless positions are read along one side at most, by lists of its length.

        It is the mode's own, or that of another mode of its level, which that one is read along itself.
        """
        (side, *others), where = sorted(value.sides), f"mode {mode} is read along the side of mode"
        sides = self.values.sides
        if others or not sides or side not in self.coordinates:
            raise FormatError(f"{where} {side}; a coordinate of tiles is read along one side of theirs")
        if side != mode and (self.along[side].sides != {side} or self.level_of(side) != level):
            raise FormatError(f"{where} {side}, which is not itself read along it at that level")
        if side != mode and sides[mode] != 1:
            raise FormatError(f"{where} {side}, so its own has 1 position, found {sides[mode]}")
        if wrong := [lookup.each for lookup in value.lookups if lookup.each not in (0, sides[side])]:
            has = f"{'has' if side == mode else 'rides along'} a side of {sides[side]} positions"
            raise FormatError(f"mode {mode} is listed by {wrong[0]} places, and {has}")

    def __str__(self) -> str:
        if self.values.sides:
            return str(self.values)
        if self.pairs:
            return f"pairs of {' and '.join(map(str, self.pairs))}"
        nesting = "blocks of fibers" if self.blocks else "runs of nonzeros"
        values = "" if self.values.held else ", no values"
        read = zip(self.positions, self.levels, strict=True)
        modes = [f"{','.join([str(c.mode) for c in each])} by {position}" for position, each in read if each]
        steps = f"{self.innermost.lanes} lanes" if self.innermost.lanes else "one at a time"
        return f"{nesting}, {steps}, modes {', '.join(modes)}{values}"


def _verify_values(v: Values) -> None:
    """Raise `FormatError` unless values of this kind may be stored by their sides, numbered by every mode once."""
    if (v.sides and not v.held) or (not v.sides and (v.bitmap or v.halves)):
        raise FormatError(f"tiles store their values whole, as bitmaps or in halves, and have sides; found {v!r}")
    if sorted(v.sequence) != list(range(len(v.sides))):
        raise FormatError(f"tiles store their positions by every mode once, found modes {v.sequence}")
    if any(side < 1 for side in v.sides):
        raise FormatError(f"sides of tiles must be 1 or more, found {v.sides}")
    if not 0 <= v.contracted <= len(v.sides):
        raise FormatError(f"a dot contracts 0 or more modes of a tile, found {v.contracted}")
    if v.bitmap and v.word not in (8, 16, 32):
        raise FormatError("a bitmap has words of 8, 16 or 32 bits")


@lru_cache(maxsize=1024)
def runs(
    item: Modes = (), leaf: Modes = (), lanes: int = 1, *, chunk: int = 0, values: Values = VALUES, narrow: bool = False
) -> Nest:
    """Return a nest of runs of consecutive nonzeros, `lanes` at a step; with `chunk`, runs of equal length."""
    items, run = Items(size=chunk, counts=("nonzeros",) if chunk else ()), Run("nonzero", lanes)
    return Nest(items, (run,), (item, (), leaf), values, narrow=narrow)


@lru_cache(maxsize=1024)
def blocks(item: Modes, lane: Modes, leaf: Modes, lanes: int, *, alone: bool = False, narrow: bool = False) -> Nest:
    """Blocks of `lanes` fibers side by side; `alone`: every item is the block of its own number."""
    loops = Each("block", lanes), Fibers("nonzero", lanes)
    return Nest(Items(size=int(alone)), loops, (item, lane, leaf), narrow=narrow)


def tiles(item: Modes, tile: Modes, values: Values) -> Nest:
    """Tiles, whose sides and order of positions `values` has."""
    return Nest(Items(), (Each("tile"),), (item, tile, ()), values)


def pairs(x: Values, y: Values) -> Nest:
    """Pairs of tiles of two operands."""
    return Nest(Items("pair"), (Each("pair", operands=PAIRED),), pairs=(x, y))
