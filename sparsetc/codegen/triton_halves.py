"""Tiles in halves -> the text of three dots of 16-bit numbers for each product of float32.

In: the printer of a function. Out: lines. A value is a high half and a low one; the products of a high half with a low
one are summed apart, since what dots round off their sums is as much smaller as these are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparsetc.codegen.triton_places import whole
from sparsetc.ir.nest.view import LOW
from sparsetc.ir.plan import F16X3
from sparsetc.ir.program import names
from sparsetc.ir.program.tile import Loop, Product, Scale, Tile, Value

if TYPE_CHECKING:
    from sparsetc.codegen.triton_function import FunctionPrinter


def multiplies(printer: FunctionPrinter, s: Product) -> bool:
    """Whether a product is of tiles in halves."""
    return s.dot and printer.p.precision == F16X3


def sums(printer: FunctionPrinter, s: Loop) -> list[Tile]:
    """What a loop adds up by products of tiles in halves."""
    return [inner.out for inner in s.body if isinstance(inner, Product) and multiplies(printer, inner)]


def zero(printer: FunctionPrinter, total: Tile) -> None:
    """The sum of the products with low halves, before a loop."""
    printer.put(f"{total.name}_low = tl.zeros({printer.shape(total)}, {printer.acc})")


def total(printer: FunctionPrinter, total: Tile) -> None:
    """What the products with low halves add, after a loop."""
    printer.put(f"{total.name} += {total.name}_low * {1 / LOW}")


def value(printer: FunctionPrinter, s: Value) -> None:
    """Both halves of a tile."""
    stored = printer.p.stored(s.operand)
    for half in ("high", "low"):
        printer.put(f"{s.out.name}_{half} = {whole(printer, s, stored.array(f'{half}_values'))}")


def scale(printer: FunctionPrinter, s: Scale) -> None:
    """Factors by which the rows of an item's tiles are to be multiplied."""
    (letter,) = s.out.axes
    row = f"tl.load(item_{s.operand} + item){'.to(tl.int64)' if printer.p.index64 else ''}"
    address = f"{row} * {printer.p.axis(letter).size} + {names.side(letter)}"
    array = printer.p.stored(s.operand).array("scales")
    printer.put(f"{s.out.name} = {printer.load(array, address, printer.limit(letter))}")


def product(printer: FunctionPrinter, s: Product) -> None:
    """The dots of high halves with high ones, and of each with a low one."""
    (x,), (y,), name = s.left, s.right, s.out.name
    high, low, how = f"{name}_high", f"{name}_low", f"out_dtype={printer.acc}"
    printer.put(f"{high} = tl.dot({x.name}_high, tl.trans({y.name}_high), {how})")
    printer.put(f"{low} = tl.dot({x.name}_low, tl.trans({y.name}_high), {low}, {how})")
    printer.put(f"{low} = tl.dot({x.name}_high, tl.trans({y.name}_low), {low}, {how})")
    # Of a plain sum with `high` Triton would make the dot's accumulator, and matrix units round towards zero.
    printer.put("# Pairs are summed outside of the dot, which rounds its sums towards zero.")
    printer.put(f"{name} = tl.fma({high}, 1.0, {name})")
