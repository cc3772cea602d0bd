"""What a view must be: every mode read exactly once, by axes that are known, and values stored as their kind allows.

In: a `View`. Out: nothing, or a `FormatError` that names the fault.
"""

from __future__ import annotations

from sparsetc.errors import FormatError
from sparsetc.ir.nest.axes import LEAF
from sparsetc.ir.nest.coordinates import Expression
from sparsetc.ir.nest.view import PAIRED, Tiles, View
from sparsetc.support.names import check_array


def verify(view: View) -> None:
    """Raise `FormatError` unless every mode is read exactly once and the nesting can hold the levels used."""
    modes = [c.mode for level in view.levels for c in level]
    if sorted(modes) != list(range(view.order)):
        raise FormatError(f"a view of order {view.order} must address each mode once, found modes {modes}")
    if view.lane and all(axis.level == LEAF for axis in view.loops):
        raise FormatError("a run of nonzeros has no lanes to share a mode; use blocks")
    if view.lanes < 1 or view.lanes & (view.lanes - 1):
        raise FormatError(f"lanes must be a power of two, found {view.lanes}")
    if view.sides and (len(view.sides) != view.order or view.leaf or view.blocks or view.lanes != 1 or view.chunk):
        raise FormatError("a view of tiles has a side for each mode, and neither leaf modes, blocks, lanes nor chunks")
    _verify_tiles(view)
    if view.pairs and (len(view.pairs) != len(PAIRED) or view.order or view.blocks or view.lanes != 1 or view.chunk):
        raise FormatError("a task list pairs two operands' tiles, and has neither modes, blocks, lanes nor chunks")
    if len({tiles.halves for tiles in view.pairs}) > 1:
        raise FormatError("tiles in halves are those of both operands of a task list, or of neither")
    for tiles in view.pairs:
        _verify_tiles(tiles)
        if any(side & (side - 1) for side in tiles.sides):
            raise FormatError(f"sides of paired tiles must be powers of two, found {tiles.sides}")
        if tiles.halves and len(tiles.sides) != 2:
            raise FormatError("paired tiles in halves are matrices")
    if view.chunk and view.blocks:
        raise FormatError("equal chunks hold no blocks")
    if view.single and not view.blocks:
        raise FormatError("items that are single blocks are made of blocks")
    if view.pattern and view.sides:
        raise FormatError("tiles store their values")
    read: set[int] = set()
    for level, coordinates in enumerate(view.levels):
        for c in coordinates:
            value = view.coordinates[c.mode]
            c.check(level == LEAF)
            _verify_value(c.mode, value, view.axes[: level + 1], read)
            _verify_side(c.mode, level, view)
            if not value.sides:
                read.add(c.mode)


def _verify_tiles(tiles: Tiles) -> None:
    """Raise `FormatError` unless positions are numbered by every mode once, and stored as their kind allows."""
    if tiles.sides and sorted(tiles.sequence) != list(range(len(tiles.sides))):
        raise FormatError(f"a view of tiles stores its positions by every mode once, found modes {tiles.sequence}")
    if any(side < 1 for side in tiles.sides):
        raise FormatError(f"sides of tiles must be 1 or more, found {tiles.sides}")
    if not 0 <= tiles.contracted <= len(tiles.sides):
        raise FormatError(f"a column of a dot contracts some modes of a tile, found {tiles.contracted}")
    if tiles.bitmap and (not tiles.sides or tiles.word not in (8, 16, 32)):
        raise FormatError("a bitmap is of tiles, in words of 8, 16 or 32 bits")
    if tiles.halves and (tiles.bitmap or not tiles.sides):
        raise FormatError("what is in halves are tiles, stored whole")


def _verify_side(mode: int, level: int, view: View) -> None:
    """Raise `FormatError` unless positions are read along one side at most, by lists of its length.

    It is the mode's own, or that of another mode of its level, which that one is read along itself.
    """
    value = view.coordinates[mode]
    if not value.sides:
        return
    (side, *others), where = sorted(value.sides), f"mode {mode} is read along the side of mode"
    if others or not view.sides or side not in view.coordinates:
        raise FormatError(f"{where} {side}; a coordinate of tiles is read along one side of theirs")
    if side != mode and (view.along[side].sides != {side} or view.level_of(side) != level):
        raise FormatError(f"{where} {side}, which is not itself read along it at that level")
    if side != mode and view.sides[mode] != 1:
        raise FormatError(f"{where} {side}, so its own has 1 position, found {view.sides[mode]}")
    wrong = [lookup.each for lookup in value.lookups if lookup.each not in (0, view.sides[side])]
    if wrong:
        has = f"{'has' if side == mode else 'rides along'} a side of {view.sides[side]} positions"
        raise FormatError(f"mode {mode} is listed by {wrong[0]} places, and {has}")


def _verify_value(mode: int, value: Expression, axes: tuple[str, ...], read: set[int]) -> None:
    """Raise `FormatError` unless arrays have names that hide nothing, and what is read is known at the level."""
    for lookup in value.lookups:
        check_array(lookup.array, FormatError)
    if value.modes - read:
        raise FormatError(f"mode {mode} follows from mode {min(value.modes - read)}, which must be read before it")
    if value.axes - {*axes, "lane"}:
        raise FormatError(f"mode {mode} is read at the level of {axes[-1]}, which has no {min(value.axes - {*axes})}")
