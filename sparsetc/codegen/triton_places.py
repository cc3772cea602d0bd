"""Positions of a tile's values -> the text of where they are stored.

In: the printer of a function, and a `Value` statement. Out: terms of addresses, and conditions. Positions along several
sides at once are numbered ``across`` (the columns of a dot) and ``along`` (what it sums).
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from sparsetc.ir.program import names
from sparsetc.ir.program.stored import Stored
from sparsetc.ir.program.tile import Tile, Value

if TYPE_CHECKING:
    from sparsetc.codegen.triton_function import FunctionPrinter


def sides_of(tile: Tile) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(axes of a matrix's rows, of its columns)."""
    return tile.axes[: tile.folded], tile.axes[tile.folded :]


def widened(printer: FunctionPrinter, s: Value) -> str:
    """What brings values to the type of the sums, where they are not in it and must be.

    Dots of two stored operands take narrow values as they are, and add up wide.
    """
    as_they_are = printer.half or (printer.p.stored(s.operand).name and printer.p.dots)
    return "" if as_they_are else printer.widen


def whole(printer: FunctionPrinter, s: Value, array: str) -> str:
    """What loads a tile of which all positions are stored."""
    stored = printer.p.stored(s.operand)
    terms, mask = place(printer, s)
    return printer.load(array, " + ".join([f"{number(printer, stored)} * {stored.values.volume}", *terms]), mask)


def number(printer: FunctionPrinter, stored: Stored) -> str:
    """The number of an operand's tile, as addresses take it."""
    return f"{stored.array('tile')}.to(tl.int64)" if printer.p.index64 else stored.array("tile")


def place(printer: FunctionPrinter, s: Value) -> tuple[list[str], str]:
    """(terms of the positions of a tile of values, the condition that they are of the tile)."""
    stored = printer.p.stored(s.operand)
    groups = sides_of(s.out) if s.out.folded else tuple((c,) for c in s.out.axes)
    called = ("across", "along") if s.out.folded else s.out.axes
    axes = tuple(str(n) for n in range(len(groups)))
    terms, conditions = [], []
    for letter in stored.letters:  # positions that are the same for the whole tile of values
        if letter not in s.out.axes:
            terms.append(printer.placed(names.side(letter), (), axes, stored.stride(letter)))
        elif printer.apart(letter) and len(groups) == 2 and any(letter in g and len(g) > 1 for g in groups):
            terms.append(printer.placed(printer.begin(letter), (), axes, stored.stride(letter)))
    for axis, name, group in zip(axes, called, groups, strict=True):
        text, stride, limit = _flat(printer, stored, name, group)
        terms.append(printer.placed(text, (axis,), axes, stride))
        conditions.append(printer.placed(limit, (axis,), axes))
    return [t for t in terms if t], printer.all_of(conditions)


def _flat(printer: FunctionPrinter, stored: Stored, name: str, letters: tuple[str, ...]) -> tuple[str, int, str]:
    """(positions along several sides as one number, its stride, the condition that they are of the tile)."""
    last = letters[-1]
    if len(letters) == 1:
        return names.side(last), stored.stride(last), printer.limit(last)
    block = [printer.p.axis(c).block for c in letters]
    within = [prod(block[n + 1 :]) for n in range(len(letters))]
    strides = [stored.stride(c) for c in letters]
    terms, limits = [], []
    for n, (letter, w, b, stride) in enumerate(zip(letters, within, block, strides, strict=True)):
        text = f"{name} // {w}" if w > 1 else name
        text = f"{text} % {b}" if n else text
        terms.append(f"({text}) * {stride}" if stride > 1 else text)
        if printer.p.axis(letter).ragged:
            begin = f"{printer.begin(letter)} + " if printer.apart(letter) else ""
            limits.append(f"{begin}{text} < {printer.p.axis(letter).size}")
    limit = " & ".join(f"({own})" for own in limits) if len(limits) > 1 else "".join(limits)
    if all(s == w * strides[-1] for s, w in zip(strides, within, strict=True)):
        return name, strides[-1], limit
    return " + ".join(terms), 1, limit
