"""Stored values -> the text that loads them, and results -> the text that adds them to the output, or stores them.

In: the printer of a function, and a `Value` or an `Add` statement. Out: lines. Each kind of storage has its own text,
here and in `triton_bitmaps`. A value in halves is a high half and a low one: stored so, or split in registers. A row of
the output is known by coordinates, by a number stored for each nonzero, item or kept position, or is that of the
nonzero or the item itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from sparsetc.codegen import triton_bitmaps as bitmaps
from sparsetc.codegen.triton_layout import ADDRESS64, sides_of, whole, widened
from sparsetc.ir.nest.nest import ITEM, LEAF
from sparsetc.ir.nest.values import BIAS, HEAD, LOW, Bitmap, Halves, Ones, Values, Whole
from sparsetc.ir.plan import F16X3
from sparsetc.ir.program import names
from sparsetc.ir.program.tile import LANES, Add, Key, Product, Scale, Value

if TYPE_CHECKING:
    from sparsetc.codegen.triton import TritonPrinter


def statements(printer: TritonPrinter) -> list[Value]:
    """The statements that read stored values, one an operand."""
    return [s for s, _ in printer.p.statements if isinstance(s, Value)]


def head(printer: TritonPrinter) -> None:
    """Numbers that all tiles share."""
    for s in statements(printer):
        for name, group in zip(("across", "along"), sides_of(s.out), strict=True):
            if len(group) > 1:
                printer.put(f"{name} = tl.arange(0, {printer.positions(group)})")
        if isinstance(printer.p.stored(s.operand).values, Bitmap):
            bitmaps.head(printer, s)


def first(printer: TritonPrinter) -> None:
    """Where the values of the turn's tiles begin, of those stored as bitmaps."""
    for s in statements(printer):
        if isinstance(printer.p.stored(s.operand).values, Bitmap):
            bitmaps.first(printer, s)


def value(printer: TritonPrinter, s: Value) -> None:
    """The values at the positions that a program, or a turn of a loop, has."""
    TEXTS[type(printer.p.stored(s.operand).values)](printer, s)


def _tile(printer: TritonPrinter, s: Value) -> None:
    printer.put(f"{s.out.name} = {whole(printer, s, printer.p.stored(s.operand).array('values'))}{widened(printer, s)}")


def _nonzeros(printer: TritonPrinter, s: Value) -> None:
    for u in printer.each(LEAF):
        printer.put(f"{s.out.name}{u} = {printer.load('values', f'pos{u}', printer.guard(LEAF, u))}{printer.widen}")


def _ones(printer: TritonPrinter, s: Value) -> None:
    """The 1s of a step: 0 where a lane holds nothing."""
    for u in printer.each(LEAF):
        every = f"tl.full([{printer.p.view.lanes}], 1, {printer.acc})"
        printer.put(f"{s.out.name}{u} = {f'ok{u}.to({printer.acc})' if printer.masked else every}")


def _both(printer: TritonPrinter, s: Value) -> None:
    """Both halves of a tile."""
    stored = printer.p.stored(s.operand)
    for half in ("high", "low"):
        printer.put(f"{s.out.name}_{half} = {whole(printer, s, stored.array(f'{half}_values'))}")


TEXTS: dict[type[Values], Callable[[TritonPrinter, Value], None]]
TEXTS = {Values: _nonzeros, Whole: _tile, Ones: _ones, Bitmap: bitmaps.value, Halves: _both}


# -- dots of halves, three for each product of float32 -----------------------------------------------------------------


def in_halves(printer: TritonPrinter, s: Product) -> bool:
    """Return True for a product of tiles in halves."""
    return s.dot and printer.p.schedule.precision == F16X3


def scale(printer: TritonPrinter, s: Scale) -> None:
    """Factors by which the rows of an item's tiles are to be multiplied, or all of an operand."""
    if not s.out.axes:
        _of_all(printer, s)
        return
    (letter,) = s.out.axes
    row = f"tl.load(item_{s.operand} + item){'.to(tl.int64)' if printer.p.index64 else ''}"
    address = f"{row} * {printer.p.axis(letter).size} + {names.side(letter)}"
    array = printer.p.stored(s.operand).array("scales")
    printer.put(f"{s.out.name} = {printer.load(array, address, printer.limit(letter))}")


def _of_all(printer: TritonPrinter, s: Scale) -> None:
    """The power of two that a largest magnitude asks for, from the bits of its exponent."""
    # What a scalar was multiplied into Triton 3.6 and 3.7 move through shared memory for the dot, both halves; by a
    # vector of one element, it is read as the dot wants it (H200: 2,611 to about 2,000 us,
    # `benchmarks/results/kernel_probes.json`).
    address = f"{printer.p.largest(s)}{' + tl.zeros([1], tl.int32)' * s.into}"
    exponent = f"tl.maximum(tl.load({address}).to(tl.int32, bitcast=True) >> 23, {HEAD + 1})"
    exponent = f"{2 * BIAS + HEAD} - {exponent}" if s.into else f"{exponent} - {HEAD}"
    printer.put(f"{s.out.name} = (({exponent}) << 23).to(tl.float32, bitcast=True)")


def halves_product(printer: TritonPrinter, s: Product, u: str) -> None:
    """The dots of high halves with high ones, and of each with a low one.

    The products of a high half with a low one are summed apart, since what dots round off their sums is as much smaller
    as these are.
    """
    name, stored = s.out.name, {value.out for value in statements(printer)}
    for tile in (t.name for t in s.inputs if t not in stored):
        printer.put(f"{tile}_high = {tile}.to(tl.float16)")
        printer.put(f"{tile}_low = (({tile} - {tile}_high.to({printer.acc})) * {LOW}).to(tl.float16)")
    (left, right), (left_low, right_low) = (printer.matrices(_halves(s, half), u) for half in ("high", "low"))
    high, low, how = f"{name}_high", f"{name}_low", f"out_dtype={printer.acc}"
    printer.put(f"{high} = tl.dot({left}, {right}, {how})")
    printer.put(f"{low} = tl.dot({left_low}, {right}, {low}, {how})")
    printer.put(f"{low} = tl.dot({left}, {right_low}, {low}, {how})")
    # Of a plain sum with `high` Triton would make the dot's accumulator, and matrix units round towards zero.
    what = f"{printer.p.view.loops[-1].name}s".capitalize()
    printer.put(f"# {what} are summed outside of the dot, which rounds its sums towards zero.")
    printer.put(f"{name} = tl.fma({high}, 1.0, {name})")


def _halves(s: Product, half: str) -> Product:
    """The product of one half of each side."""
    left, right = (tuple(replace(t, name=f"{t.name}_{half}") for t in side) for side in (s.left, s.right))
    return replace(s, left=left, right=right)


# -- results -----------------------------------------------------------------------------------------------------------


def ahead(printer: TritonPrinter, level: int) -> None:
    """Load the rows that items, or fibers, add to when these are known: what is loaded when it is needed is waited for.

    H200, TTM of rank 16 to 22 M rows of 1.6 nonzeros: 831 us, 729 so (`benchmarks/results/rows_stored.json`).
    """
    for s, _ in printer.p.statements:
        if isinstance(s, Add) and s.key.level == level and _known_ahead(s.key):
            at = "item" if level == ITEM else "fiber"
            printer.put(f"slot = {printer.load(s.key.array, at, printer.guard(level, ''))}")


def _known_ahead(key: Key) -> bool:
    """Whether one number is stored for all of an item, or of a fiber."""
    return key.kind == "slot" and not key.letters and key.level < LEAF


def add(printer: TritonPrinter, s: Add, u: str) -> None:
    """Add to, or store, rows of the output, once the axes that neither they nor their key have are summed."""
    keyed = printer.own(s.key.letters, s.source.axes, s.key.level)
    value, axes = printer.summed(s.source, u, (*keyed, *s.axes))
    terms, conditions = _rows(printer, s, keyed, axes, u)
    if s.copies > 1:
        copy = f"(item % {s.copies}).to(tl.int64)" if _wide(printer, s) else f"item % {s.copies}"
        terms = [f"{copy} * {printer.p.rows * printer.p.width}", *terms]
    address = printer.address([*terms, *printer.columns(s.axes, axes)])
    mask = printer.all_of([*conditions, *printer.bounds(s.axes, axes)])
    arguments = f"{printer.p.output} + {address}, {value}{f', mask={mask}' if mask else ''}"
    printer.put(f"tl.store({arguments})" if s.owned else f'tl.atomic_add({arguments}, sem="relaxed")')


def _rows(
    printer: TritonPrinter, s: Add, keyed: Sequence[str], axes: Sequence[str], u: str
) -> tuple[list[str], list[str]]:
    """(terms of the addresses of output rows, conditions), by the kind of the key."""
    p, key = printer.p, s.key
    wide = _wide(printer, s)
    cast = ".to(tl.int64)" if wide else ""
    lanes = printer.placed(printer.guard(key.level, u), (LANES,), axes)
    at = ("item", "fiber", f"pos{u}")[key.level]
    if key.kind == "row":
        strides = zip(key.letters, key.strides, strict=True)
        each = ((printer.coordinate(c, u), printer.own((c,), axes, key.level), n * p.width) for c, n in strides)
        return printer.terms(each, axes, wide), [lanes, *(printer.inside(c, axes) for c in key.letters)]
    if key.letters:
        return _slots(printer, key, axes, wide)
    row = "slot" if _known_ahead(key) else printer.load(key.array, at, printer.guard(key.level, u)) if key.array else at
    return [printer.placed(f"{row}{cast}", keyed, axes, p.width)], [lanes]


def _wide(printer: TritonPrinter, s: Add) -> bool:
    """Whether addresses in the output, all copies of it, need 64 bits."""
    return s.copies * printer.p.rows * printer.p.width >= ADDRESS64


def _slots(printer: TritonPrinter, key: Key, axes: Sequence[str], wide: bool) -> tuple[list[str], list[str]]:
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
