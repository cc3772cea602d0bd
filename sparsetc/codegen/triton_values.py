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
from sparsetc.ir.nest.values import Bitmap, Halves, Ones
from sparsetc.ir.program.tile import Value

if TYPE_CHECKING:
    from collections.abc import Callable

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
        if isinstance(printer.p.stored(s.operand).values, Bitmap):
            bitmaps.head(printer, s)


def first(printer: FunctionPrinter) -> None:
    """Where the values of the turn's tiles begin, of those stored as bitmaps."""
    for s in statements(printer):
        if isinstance(printer.p.stored(s.operand).values, Bitmap):
            bitmaps.first(printer, s)


def value(printer: FunctionPrinter, s: Value) -> None:
    """The values at the positions that a program, or a turn of a loop, has."""
    stored = printer.p.stored(s.operand)
    match stored.values:
        case Bitmap():
            bitmaps.value(printer, s)
        case Halves():
            halves.value(printer, s)
        case Ones():
            _each_step(printer, s, lambda u: _ones(printer, u))
        case _ if printer.p.along:
            printer.put(f"{s.out.name} = {whole(printer, s, stored.array('values'))}{widened(printer, s)}")
        case _:
            _each_step(printer, s, lambda u: printer.load("values", f"pos{u}", printer.guard(LEAF, u)) + printer.widen)


def _each_step(printer: FunctionPrinter, s: Value, text: Callable[[str], str]) -> None:
    for u in printer.each(LEAF):
        printer.put(f"{s.out.name}{u} = {text(u)}")


def _ones(printer: FunctionPrinter, u: str) -> str:
    """The 1s of a step: 0 where a lane holds nothing."""
    return f"ok{u}.to({printer.acc})" if printer.masked else f"tl.full([{printer.p.view.lanes}], 1, {printer.acc})"
