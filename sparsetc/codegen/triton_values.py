"""Stored values -> the text that loads them, and results -> the text that adds them to the output, or stores them.

In: the printer of a function, and a `Value` or an `Add` statement. Out: lines. Each kind of storage has its own text,
here and in `triton_bitmaps` and `triton_halves`. A row of the output is known by coordinates, by a number stored for
each nonzero, item or kept position, or is that of the nonzero or the item itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING

from sparsetc.codegen import triton_bitmaps as bitmaps
from sparsetc.codegen import triton_halves as halves
from sparsetc.codegen.triton_layout import ADDRESS64, Term, sides_of, whole, widened
from sparsetc.ir.nest.nest import ITEM, LEAF
from sparsetc.ir.nest.values import Bitmap, Halves, Ones, ScaledHalves, Values, Whole
from sparsetc.ir.program import names
from sparsetc.ir.program.tile import LANES, Add, Position, Row, Slot, Value

if TYPE_CHECKING:
    from sparsetc.codegen.triton import FunctionPrinter

    Texts = dict[type[Values], Callable[[FunctionPrinter, Value], None]]


def statements(printer: FunctionPrinter) -> list[Value]:
    """The statements that read stored values, one an operand."""
    return [s for s, _ in printer.p.statements if isinstance(s, Value)]


def head(printer: FunctionPrinter) -> None:
    """Numbers that all tiles share."""
    for s in statements(printer):
        for name, group in zip(("across", "along"), sides_of(s.out), strict=True):
            if len(group) > 1:
                printer.put(f"{name} = tl.arange(0, {printer.positions(group)})")
        HEADS.get(type(printer.p.stored(s.operand).values), lambda *_: None)(printer, s)


def first(printer: FunctionPrinter) -> None:
    """Where the values of the turn's tiles begin, of those stored as bitmaps."""
    for s in statements(printer):
        FIRSTS.get(type(printer.p.stored(s.operand).values), lambda *_: None)(printer, s)


def value(printer: FunctionPrinter, s: Value) -> None:
    """The values at the positions that a program, or a turn of a loop, has."""
    TEXTS[type(printer.p.stored(s.operand).values)](printer, s)


def _tile(printer: FunctionPrinter, s: Value) -> None:
    printer.put(f"{s.out.name} = {whole(printer, s, printer.p.stored(s.operand).array('values'))}{widened(printer, s)}")


def _nonzeros(printer: FunctionPrinter, s: Value) -> None:
    for u in printer.each(LEAF):
        printer.put(f"{s.out.name}{u} = {printer.load('values', f'pos{u}', printer.guard(LEAF, u))}{printer.widen}")


def _ones(printer: FunctionPrinter, s: Value) -> None:
    """The 1s of a step: 0 where a lane holds nothing."""
    for u in printer.each(LEAF):
        every = f"tl.full([{printer.p.view.lanes}], 1, {printer.acc})"
        printer.put(f"{s.out.name}{u} = {f'ok{u}.to({printer.acc})' if printer.masked else every}")


# What loads each kind of stored values; what else some need: numbers that all tiles share, where a tile's values begin.
TEXTS: Texts = {Values: _nonzeros, Whole: _tile, Ones: _ones, Bitmap: bitmaps.value}
TEXTS |= {Halves: halves.value, ScaledHalves: halves.value}
HEADS: Texts = {Bitmap: bitmaps.head}
FIRSTS: Texts = {Bitmap: bitmaps.first}


SLOT = "slot"
"""What the number of the row that an item, or each fiber of a block, adds to is called."""


def ahead(printer: FunctionPrinter, level: int) -> None:
    """Load the rows that items, or fibers, add to when these are known: what is loaded when it is needed is waited for.

    H200, TTM of rank 16 to 22 M rows of 1.6 nonzeros: 831 us, 729 so (`benchmarks/results/rows_stored.json`).
    """
    for s, _ in printer.p.statements:
        if isinstance(s, Add) and isinstance(s.key, Slot) and s.key.level == level and _known_ahead(s.key):
            at = "item" if level == ITEM else "fiber"
            printer.put(f"{SLOT} = {printer.load(s.key.array, at, printer.guard(level, ''))}")


def _known_ahead(key: Slot) -> bool:
    """Whether one number is stored for all of an item, or of a fiber."""
    return not key.letters and key.level < LEAF


def add(printer: FunctionPrinter, s: Add, u: str) -> None:
    """Add to, or store, rows of the output, once the axes that neither they nor their key have are summed."""
    keyed = printer.own(s.key.letters, s.source.axes, s.key.level)
    value, axes = printer.summed(s.source, u, (*keyed, *s.axes))
    terms, conditions = _rows(printer, s, keyed, axes, u)
    if s.copies > 1:
        copy = f"(item % {s.copies}).to(tl.int64)" if _wide(printer, s) else f"item % {s.copies}"
        terms = [f"{copy} * {printer.p.rows * printer.p.width}", *terms]
    address = printer.address([*terms, *printer.columns(s.axes, axes)])
    mask = printer.all_of([*conditions, *printer.bounds(s.axes, axes)])
    given = f"{printer.p.output} + {address}, {value}{f', mask={mask}' if mask else ''}"
    printer.put(f"tl.store({given})" if s.owned else f'tl.atomic_add({given}, sem="relaxed")')


def _rows(
    printer: FunctionPrinter, s: Add, keyed: Sequence[str], axes: Sequence[str], u: str
) -> tuple[list[str], list[str]]:
    """(terms of the addresses of output rows, conditions), by the kind of the key."""
    p, key = printer.p, s.key
    wide = _wide(printer, s)
    cast = ".to(tl.int64)" if wide else ""
    lanes = printer.placed(printer.guard(key.level, u), (LANES,), axes)
    at = ("item", "fiber", f"pos{u}")[key.level]
    if isinstance(key, Row):
        strides = ((c, printer.own((c,), axes, key.level), stride * p.width) for c, stride in key.terms)
        each = [Term(printer.coordinate(c, u), own, stride) for c, own, stride in strides]
        return printer.terms(each, axes, wide), [lanes, *(printer.inside(c, axes) for c in key.letters)]
    if isinstance(key, Position):
        return [printer.placed(f"{at}{cast}", keyed, axes, p.width)], [lanes]
    if key.letters:
        return _slots(printer, key, axes, wide)
    row = SLOT if _known_ahead(key) else printer.load(key.array, at, printer.guard(key.level, u))
    return [printer.placed(f"{row}{cast}", keyed, axes, p.width)], [lanes]


def _wide(printer: FunctionPrinter, s: Add) -> bool:
    """Whether addresses in the output, all copies of it, need 64 bits."""
    return s.copies * printer.p.rows * printer.p.width >= ADDRESS64


def _slots(printer: FunctionPrinter, key: Slot, axes: Sequence[str], wide: bool) -> tuple[list[str], list[str]]:
    """Terms and conditions of a sparse output, whose slots are stored a kept position; -1 is none."""
    p, places = printer.p, tuple(c for c in axes if c in key.letters)
    sizes = [p.axis(c).size for c in key.letters]
    # A loop's number may be a plain one, so that a sum widens it.
    item = "item" if p.index64 else "item.to(tl.int64)"
    terms = [f"{item if key.level == ITEM else '(tile + tl.zeros([], tl.int64))'} * {prod(sizes)}"]
    for n, c in enumerate(key.letters):
        terms.append(printer.placed(names.side(c), printer.own((c,), places), places, prod(sizes[n + 1 :])))
    mask = printer.all_of(printer.placed(printer.limit(c), printer.own((c,), places), places) for c in key.letters)
    mask = f", mask={mask}, other=-1" if mask else ""
    printer.put(f"slot = tl.load({key.array} + {' + '.join(terms)}{mask})")
    spread = f"[{', '.join(':' if a in places else 'None' for a in axes)}]"
    index = spread if 0 < len(places) < len(axes) else ""
    times = f" * {p.width}" if p.width != 1 else ""
    return [f"slot{'.to(tl.int64)' if wide else ''}{index}{times}"], [f"(slot >= 0){index}"]
