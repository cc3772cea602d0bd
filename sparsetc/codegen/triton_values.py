"""Stored values -> the text that loads them: those of nonzeros, of whole tiles, of tiles as bitmaps or in halves.

In: the printer of a function, and a `Value` statement. Out: lines. Each kind of
storage has its own text, here and in `triton_bitmaps` and `triton_halves`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparsetc.codegen import triton_bitmaps as bitmaps
from sparsetc.codegen import triton_halves as halves
from sparsetc.codegen.triton_places import sides_of, whole, widened
from sparsetc.ir.nest.axes import LEAF
from sparsetc.ir.tile import Value

if TYPE_CHECKING:
    from sparsetc.codegen.triton_function import FunctionPrinter


def statements(printer: FunctionPrinter) -> list[Value]:
    """The statements that read stored values, one an operand."""
    return [s for s, _ in printer.p.statements if isinstance(s, Value)]


def head(printer: FunctionPrinter) -> None:
    """Numbers that all tiles share."""
    for s in statements(printer):
        for name, group in zip(("across", "along"), sides_of(s.out), strict=True):
            if len(group) > 1:
                printer.put(f"{name} = tl.arange(0, {printer.positions(group)})")
        if printer.p.stored(s.operand).tiles.bitmap:
            bitmaps.head(printer, s)


def first(printer: FunctionPrinter) -> None:
    """Where the values of the turn's tiles begin, of those stored as bitmaps."""
    for s in statements(printer):
        if printer.p.stored(s.operand).tiles.bitmap:
            bitmaps.first(printer, s)


def value(printer: FunctionPrinter, s: Value) -> None:
    """The values at the positions that a program, or a turn of a loop, has."""
    stored = printer.p.stored(s.operand)
    if stored.tiles.bitmap:
        bitmaps.value(printer, s)
    elif stored.tiles.halves:
        halves.value(printer, s)
    elif stored.tiles.sides:
        printer.put(f"{s.out.name} = {whole(printer, s, stored.array('values'))}{widened(printer, s)}")
    else:
        for u in printer.each(LEAF):
            printer.put(f"{s.out.name}{u} = {_of_nonzeros(printer, u)}")


def _of_nonzeros(printer: FunctionPrinter, u: str) -> str:
    """What loads the values of a step, or makes the 1s that they are."""
    if not printer.p.view.pattern:
        return printer.load("values", f"pos{u}", printer.guard(LEAF, u)) + printer.widen
    return f"ok{u}.to({printer.acc})" if printer.masked else f"tl.full([{printer.p.view.lanes}], 1, {printer.acc})"
