"""What a packed format offers the compiler: how a work item reaches its nonzeros and where each coordinate is read.

In: nothing but integers. Out: `View`, read by `ir.lower`. The grammar of the level::

    view        := item-modes  lane-modes  leaf-modes  nesting  lanes
    nesting     := run      # an item is a range of consecutive nonzeros; `lanes` of them are taken at a step
                 | tiles    # an item is a range of dense tiles of `sides` positions a mode; coordinates are of tiles
                 | pairs    # an item is a range of a task list: pairs of tiles, one of each of two operands
                 | blocks   # an item is a range of blocks; a block is `lanes` fibers side by side (sliced ELL);
                            # step n of a block takes the n-th nonzero of every one of its fibers
    coordinate  := field    # bits shift .. shift+bits of a stored word, added to the base of its frame if it has one
                 | computed # a formula over coordinates read before it
                 | consecutive # the position, shifted by what another mode's coordinate has stored
                 | listed   # of tiles: a list of coordinates, one a position along a side, for each item or tile

Of tiles, all but listed coordinates are of the tile: a position's is that times the side, plus its place along it. A
mode may be listed along another's side, which it then *rides* along: the positions of that side are fibers.

A mode is read at one of three levels: shared by the whole item, shared by one lane (a fiber), or the nonzero's own.
The higher the level, the fewer times it is read, and the fewer times a factor row is gathered for it.

Arrays a packed part must hold, by name (P items, B blocks, N stored nonzeros):

    item_ptr (P+1)        first nonzero (run) or block (blocks) of each item; absent when items are equal chunks, or
                          single blocks
    item_word (P)         coordinates of the item modes
    block_ptr (B+1)       first stored nonzero of each block, a multiple of `lanes`
    block_full (B)        steps of the block in which every lane has a nonzero, rounded down to the unrolling
    lane_len (B*lanes)    nonzeros of each fiber; 0 is an unused lane
    lane_word (B*lanes)   coordinates of the lane modes
    word (N)              coordinates of the leaf modes
    word_base (N/frame)   what the words of each `frame` positions are offsets from
    shift (size of a mode) coordinate less position of a consecutive mode, by that of the mode it follows
    values (N)            the values, 0 where padded; absent where the view is a pattern: every value is 1
    tile_word (T tiles)   coordinates of each tile's own modes; its values follow in the order of `sequence`
    value_ptr (T+1)       first stored nonzero of each tile, where a bitmap says which positions have one
    bits (T*volume/word)  a bit a position, the lowest bit of a word first
    pair_ptr (P+1)        first pair of each item
    pair_x, pair_y        the tile of each operand that a pair reads; its arrays begin with ``x_`` and ``y_``
    high_values (N)       of tiles in halves: of each value the nearest 16-bit float, once its row was scaled
    low_values (N)        what that leaves of it, times `LOW`
    scales (rows*side)    by what the rows of tiles are to be multiplied in turn, a power of two each; tiles that are
                          one above another share none, tiles that are side by side all
    item_x, item_y (P)    of tiles in halves: the row of tiles of each operand that an item's pairs are of
    most (1)              of tiles in halves that no list pairs: the largest magnitude of all values, which says how
                          they were scaled
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TypeVar

from sparsetc.errors import FormatError
from sparsetc.ir.nest.axes import LEAF, LEVELS, Axis, Blocks, Each, Fibers, Run
from sparsetc.ir.nest.coordinates import Along, Bits, Constant, Coordinate, Expression, Formula, Lookup, Position
from sparsetc.ir.nest.formula import parsed
from sparsetc.ir.nest.values import Bitmap, Halves, Ones, ScaledHalves, Values, Whole
from sparsetc.support.cached import cached_property

Name = TypeVar("Name")

PAIRED = ("x", "y")
"""The operands of a task list, as the names of their arrays begin."""

WHOLE = 2**62
"""A chunk that no tensor reaches: one item holds every nonzero."""


@dataclass(frozen=True)
class ModeCoordinate:
    """How the coordinate of `mode` is read."""

    mode: int

    def expression(self, at: Position) -> Expression:
        """The coordinate, where the position of its level is `at`."""
        raise NotImplementedError

    def check(self, leaf: bool) -> None:
        """Raise `FormatError` unless the coordinate may stand at its level, which is the leaf or not."""

    @cached_property
    def fields(self) -> tuple[Bits, ...]:
        """The bits of words that the coordinate is read from."""
        return self.expression(Position("nonzero")).fields


@dataclass(frozen=True)
class Field(ModeCoordinate):
    """Coordinate of `mode`: bits ``shift .. shift + bits`` of `array`; `top` says that no bits lie above it."""

    array: str
    shift: int
    bits: int
    top: bool
    frame: int = 0
    """Positions whose words are offsets from one base (frame of reference), a power of two; 0: words are whole."""

    def expression(self, at: Position) -> Expression:
        bits = Bits(Lookup(self.array, at), self.shift, self.bits, self.top)
        number = Formula(">>", at, Constant(self.frame.bit_length() - 1))
        return Formula("+", bits, Lookup(f"{self.array}_base", number)) if self.frame else bits

    def check(self, leaf: bool) -> None:
        if self.frame and (not leaf or self.frame & (self.frame - 1) or self.frame < 0):
            raise FormatError(f"a frame is of a leaf mode and a power of two of positions, found {self}")


@dataclass(frozen=True)
class Computed(ModeCoordinate):
    """Coordinate of `mode` by an expression, or by a formula in ``{m0}, {m1}, …`` (coordinates read before it) and
    ``{p}`` (its position).

    Nothing is stored for a formula: a banded matrix knows its column from its row and its place in the band. The
    position is that of the item, the lane or the nonzero, by the level at which the coordinate stands. Operators are
    ``+ - * // % >> << & |``, operands of ``//`` and ``%`` not negative.
    """

    formula: str | Expression

    def expression(self, at: Position) -> Expression:
        return self.formula if isinstance(self.formula, Expression) else parsed(self.formula, at)


@dataclass(frozen=True)
class Consecutive(ModeCoordinate):
    """Coordinate of `mode` that rises by one from nonzero to nonzero while that of `by`, read before it, is the same.

    All that is stored is the difference between coordinate and position, once for each coordinate of `by`: so do the
    entries of a row of a compressed matrix lie, and those that meet an entry of another operand.
    """

    array: str
    """Name of the array of differences, one for each coordinate of `by`; they may be negative."""
    by: int

    def expression(self, at: Position) -> Expression:
        return Formula("+", at, Lookup(self.array, Coordinate(self.by)))

    def check(self, leaf: bool) -> None:
        if not leaf:
            raise FormatError(
                f"mode {self.mode} is consecutive by mode {self.by}, which must be read before it, at the leaf"
            )


@dataclass(frozen=True)
class Listed(ModeCoordinate):
    """Coordinates of `mode` at the positions along a side, which each item, or each tile, has its own list of.

    So rows of any numbers make a group, and columns of any numbers a window. A place that stands for no coordinate
    holds the size of the mode, or more. Where several modes are listed along one side, each of its places is a fiber.
    """

    array: str
    """Name of the array of lists, one after another."""
    side: int
    """Places of a list."""
    along: int | None = None
    """The mode whose side the places lie along, where the mode, whose own side is 1, rides along it; None: its own."""

    def expression(self, at: Position) -> Expression:
        place = Along(self.mode if self.along is None else self.along)
        return Lookup(self.array, Formula("+", Formula("*", at, Constant(self.side)), place))


def word_bits(coordinates: Iterable[ModeCoordinate], name: str) -> int:
    """Bits in use of the words called `name`; 31 of those that are read whole."""
    return max((f.shift + f.width for c in coordinates for f in c.fields if f.word.array == name), default=31)


def tiles_along(shape: Sequence[int], sides: Sequence[int]) -> tuple[int, ...]:
    """Tiles along each mode; the last may reach past the end."""
    return tuple(-(-n // side) for n, side in zip(shape, sides, strict=True))


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """How the positions of an operand's tiles are stored."""

    sides: tuple[int, ...] = ()
    """Positions a mode of a tile; empty where there are no tiles."""
    sequence: tuple[int, ...] = ()
    """Modes in the order in which a tile's positions are stored, the last running fastest."""
    bitmap: bool = False
    """Whether only the nonzeros' values of a tile are stored; a bit a position then says which positions they have."""
    word: int = 32
    """Positions that a word of bits stands for: 8, 16 or 32."""
    contracted: int = 0
    """How many modes at the end of `sequence` a column of a dot contracts, as they were stored; 0: no dot."""
    halves: bool = False
    """Whether each value is stored as two of 16 bits, for dots that multiply halves: of operands of a task list, scaled
    by its row (a position of the first mode), elsewhere as all are."""

    @property
    def volume(self) -> int:
        """Positions of a tile."""
        return prod(self.sides)

    @property
    def words(self) -> int:
        """Words of bits a tile."""
        return -(-self.volume // self.word)

    @property
    def strides(self) -> tuple[int, ...]:
        """How far apart two neighbouring positions of a tile are stored, by mode."""
        place = {mode: n for n, mode in enumerate(self.sequence)}
        return tuple(prod(self.sides[m] for m in self.sequence[place[mode] + 1 :]) for mode in range(len(self.sides)))

    @property
    def stored(self) -> Values:
        """How values are stored."""
        if self.halves:
            return Halves()
        return Bitmap(self.words, self.word, self.volume) if self.bitmap else Whole()

    def __str__(self) -> str:
        kind = "bitmap" if self.bitmap else "dense"
        return f"{kind} tiles of {'x'.join(map(str, self.sides))}{' in parts' if self.halves else ''}"


@dataclass(frozen=True)
class View(Tiles):
    """The modes of each level, the nesting, and how many lanes run side by side.

    Where it has sides, the lane modes are those of the tile.
    """

    order: int
    item: tuple[ModeCoordinate, ...]
    lane: tuple[ModeCoordinate, ...]
    leaf: tuple[ModeCoordinate, ...]
    blocks: bool
    lanes: int = 1
    """Fibers of a block; of runs, in a tile program, the nonzeros of a step, which nothing stored depends on."""
    chunk: int = 0
    """Nonzeros an item, where items are equal chunks and no `item_ptr` is stored."""
    single: bool = False
    """Every item is one block, of the same number, and no `item_ptr` is stored."""
    pairs: tuple[Tiles, ...] = ()
    """How the two operands of a task list store their tiles; empty where there is no task list. Of such a view no
    mode is read: which tiles meet, and where results go, is what the list says."""
    pattern: bool = False
    """Every value is 1, and none is stored: an adjacency matrix without weights, a list of what meets. Its runs hold no
    padding, which nothing would tell from a nonzero."""
    narrow: bool = False
    """Words of leaf modes take 16 bits where they fit."""

    @property
    def stored(self) -> Values:
        """How values are stored."""
        return Ones() if self.pattern else ScaledHalves() if self.halves else super().stored

    @property
    def packed(self) -> tuple[str, ...]:
        """The arrays that are made of values, and made anew for others of the same pattern."""
        if self.pattern or self.pairs:
            return ()
        return self.stored.arrays if self.halves else ("values",)

    def stored_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """How many different coordinates of each mode are stored: its tiles, where there are tiles, else its size."""
        return tiles_along(shape, self.sides) if self.sides else tuple(shape)

    @cached_property
    def levels(self) -> tuple[tuple[ModeCoordinate, ...], ...]:
        """Coordinates by level: item, lane, leaf."""
        return (self.item, self.lane, self.leaf)

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The axis whose positions each level has."""
        return ("item", "tile" if self.sides else "fiber", "nonzero")

    @cached_property
    def coordinates(self) -> dict[int, Expression]:
        """Each mode's coordinate, in the order in which they are read."""
        levels = zip(self.axes, self.levels, strict=True)
        return {c.mode: c.expression(Position(axis)) for axis, own in levels for c in own}

    @cached_property
    def along(self) -> dict[int, Expression]:
        """Each mode's coordinates at the positions along its side, by the tile's; empty where there are no sides."""

        def strided(mode: int) -> Expression:
            return Formula("+", Formula("*", Coordinate(mode), Constant(self.sides[mode])), Along(mode))

        read = self.coordinates.items() if self.sides else ()
        return {mode: own if own.sides else strided(mode) for mode, own in read}

    @cached_property
    def sided(self) -> tuple[int, ...]:
        """The modes along whose sides positions are read: those of tiles, but for modes that ride along others."""
        return tuple(sorted({mode for own in self.along.values() for mode in own.sides}))

    @cached_property
    def tiles(self) -> Tiles:
        """How the positions along the sides that are read are stored, those sides numbered from 0 on."""
        if len(self.sided) == len(self.sides):
            return self
        sides, sequence = (tuple(m for m in modes if m in self.sided) for modes in (range(self.order), self.sequence))
        own, order = tuple(self.sides[m] for m in sides), tuple(map(sides.index, sequence))
        return Tiles(sides=own, sequence=order, bitmap=self.bitmap, word=self.word, halves=self.halves)

    def read_along(self, letters: Sequence[Name], some: Iterable[Name]) -> tuple[Name, ...]:
        """The axes along which coordinates are read, once each: letters along whose sides they lie in a tile.

        Args:
            letters: of all modes.
            some: letters; one that is no mode's, and where there are no sides each, stands for itself.
        """
        own = {letters[mode]: [letters[m] for m in sorted(at.sides)] for mode, at in self.along.items()}
        return tuple(dict.fromkeys(axis for c in some for axis in own.get(c, [c])))

    def within(self, mode: int, size: int) -> bool:
        """Whether no coordinate along a mode's side reaches the size of the mode: lists may always hold such."""
        own, side = self.coordinates[mode], self.sides[mode]
        return side <= size if own == Along(mode) else not own.sides and size % side == 0

    @cached_property
    def spanning(self) -> bool:
        """Whether tiles span the whole tensor: the positions along each side are the coordinates of its mode."""
        return bool(self.sides) and all(own == Along(mode) for mode, own in self.coordinates.items())

    @cached_property
    def loops(self) -> tuple[Axis, ...]:
        """What a work item takes in turn, outermost first."""
        if self.pairs:
            return (Each("pair", PAIRED),)
        if self.sides:
            return (Each("tile"),)
        if self.blocks:
            return (Blocks("block", lanes=self.lanes), Fibers("nonzero", self.lanes))
        return (Run("nonzero", self.lanes),)

    def taking(self, lanes: int) -> View:
        """The view by so many lanes, where the storage leaves their number to the schedule: in runs of nonzeros."""
        return replace(self, lanes=lanes) if isinstance(self.loops[0], Run) else self

    def in_halves(self) -> View:
        """The view of values in halves, where these are of tiles that are stored whole."""
        return replace(self, halves=True) if self.sides and not self.bitmap else self

    def lookups(self, level: int) -> tuple[Lookup, ...]:
        """What the coordinates of a level read of arrays."""
        return tuple(lookup for c in self.levels[level] for lookup in self.coordinates[c.mode].lookups)

    @cached_property
    def word_bytes(self) -> tuple[tuple[int, ...], ...]:
        """Bytes of a word of each array of words, by level."""
        read = [dict.fromkeys(w.array for w in self.lookups(level) if w.every == 1) for level in range(len(LEVELS))]
        return tuple(tuple(self._word_bytes(level, name) for name in own) for level, own in enumerate(read))

    def _word_bytes(self, level: int, array: str) -> int:
        bits, values = word_bits(self.levels[level], array), [self.coordinates[c.mode] for c in self.levels[level]]
        framed = (v for v in values if any(lookup.every > 1 for lookup in v.lookups))
        if bits <= 8 and any(array == f.word.array for v in framed for f in v.fields):
            return 1
        return 2 if bits <= 16 and level == LEAF and self.narrow else 4 if bits <= 31 else 8

    def level_of(self, mode: int) -> int:
        """The level at which `mode` is read."""
        for level, coordinates in enumerate(self.levels):
            if any(c.mode == mode for c in coordinates):
                return level
        raise FormatError(f"the view addresses no mode {mode}")

    @cached_property
    def arrays(self) -> tuple[str, ...]:
        """Names of the arrays a packed part of this view holds, in the order kernels take them."""
        if self.pairs:
            own = zip(PAIRED, self.pairs, strict=True)
            values = [f"{name}_{array}" for name, tiles in own for array in tiles.stored.arrays]
            rows = [f"item_{name}" for name, tiles in zip(PAIRED, self.pairs, strict=True) if tiles.halves]
            return ("pair_ptr", *(f"pair_{name}" for name in PAIRED), *rows, *values)
        names = [] if self.chunk or self.single else ["item_ptr"]
        if self.bitmap:
            names += ["value_ptr", "bits"]
        if self.blocks:
            names += ["block_ptr", "block_full", "lane_len"]
        names += [lookup.array for level in range(len(LEVELS)) for lookup in self.lookups(level)]
        return (*dict.fromkeys(names), *self.packed)

    def __str__(self) -> str:
        if self.sides:
            return super().__str__()
        if self.pairs:
            return f"pairs of {' and '.join(map(str, self.pairs))}"

        def modes(coordinates: tuple[ModeCoordinate, ...]) -> str:
            return ",".join(str(c.mode) for c in coordinates) or "-"

        nesting = "blocks of fibers" if self.blocks else "runs of nonzeros"
        values = ", no values" if self.pattern else ""
        levels = " | ".join(map(modes, self.levels))
        return f"{nesting}, {self.lanes} lanes, modes {levels}{values}"
