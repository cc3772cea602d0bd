"""Tiles in halves -> the text of three dots of 16-bit numbers for each product of float32.

In: the printer of a function. Out: lines. A value is a high half and a low one: stored so, or split in registers. The
products of a high half with a low one are summed apart, since what dots round off their sums is as much smaller as
these are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from sparsetc.codegen.triton_layout import whole
from sparsetc.ir.nest.values import BIAS, HEAD, LOW
from sparsetc.ir.plan import F16X3
from sparsetc.ir.program import names
from sparsetc.ir.program.tile import Loop, Product, Scale, Tile, Value, walk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sparsetc.codegen.triton import FunctionPrinter, Matrix


def multiplies(printer: FunctionPrinter, s: Product) -> bool:
    """Whether a product is of tiles in halves."""
    return s.dot and printer.p.schedule.precision == F16X3


def sums(printer: FunctionPrinter, s: Loop) -> list[Tile]:
    """What a loop adds up by products in halves."""
    return [inner.out for inner, _ in walk(s.body) if isinstance(inner, Product) and multiplies(printer, inner)]


def value(printer: FunctionPrinter, s: Value) -> None:
    """Both halves of a tile."""
    stored = printer.p.stored(s.operand)
    for half in ("high", "low"):
        printer.put(f"{s.out.name}_{half} = {whole(printer, s, stored.array(f'{half}_values'))}")


def scale(printer: FunctionPrinter, s: Scale) -> None:
    """Factors by which the rows of an item's tiles are to be multiplied, or all of an operand."""
    if not s.by_row:
        _of_all(printer, s)
        return
    (letter,) = s.out.axes
    row = f"tl.load(item_{s.operand} + item){'.to(tl.int64)' if printer.p.index64 else ''}"
    address = f"{row} * {printer.p.axis(letter).size} + {names.side(letter)}"
    array = printer.p.stored(s.operand).array("scales")
    printer.put(f"{s.out.name} = {printer.load(array, address, printer.limit(letter))}")


def _of_all(printer: FunctionPrinter, s: Scale) -> None:
    """The power of two that a largest magnitude asks for, from the bits of its exponent."""
    # What a scalar was multiplied into Triton 3.6 and 3.7 move through shared memory for the dot, both halves; by a
    # vector of one element, it is read as the dot wants it (H200: 2,611 to about 2,000 us,
    # `benchmarks/results/kernel_probes.json`).
    address = f"{printer.p.largest(s)}{' + tl.zeros([1], tl.int32)' * s.into}"
    exponent = f"tl.maximum(tl.load({address}).to(tl.int32, bitcast=True) >> 23, {HEAD + 1})"
    exponent = f"{2 * BIAS + HEAD} - {exponent}" if s.into else f"{exponent} - {HEAD}"
    printer.put(f"{s.out.name} = (({exponent}) << 23).to(tl.float32, bitcast=True)")


def product(printer: FunctionPrinter, s: Product, u: str) -> None:
    """The dots of high halves with high ones, and of each with a low one."""
    name, stored = s.out.name, {value.out for value, _ in printer.p.statements if isinstance(value, Value)}
    for tile in (t for t in s.inputs if t not in stored):
        _split(printer, tile.name)
    (left, left_low), (right, right_low) = (_matrices(printer, s, *side, u) for side in printer.factors(s))
    high, low, how = f"{name}_high", f"{name}_low", f"out_dtype={printer.acc}"
    printer.put(f"{high} = tl.dot({left.by(False)}, {right.by(True)}, {how})")
    printer.put(f"{low} = tl.dot({left_low.by(False)}, {right.by(True)}, {low}, {how})")
    printer.put(f"{low} = tl.dot({left.by(False)}, {right_low.by(True)}, {low}, {how})")
    # Of a plain sum with `high` Triton would make the dot's accumulator, and matrix units round towards zero.
    what = f"{printer.p.view.loops[-1].name}s".capitalize()
    printer.put(f"# {what} are summed outside of the dot, which rounds its sums towards zero.")
    printer.put(f"{name} = tl.fma({high}, 1.0, {name})")


def _split(printer: FunctionPrinter, name: str) -> None:
    """Both halves of a tile that was scaled."""
    printer.put(f"{name}_high = {name}.to(tl.float16)")
    printer.put(f"{name}_low = (({name} - {name}_high.to({printer.acc})) * {LOW}).to(tl.float16)")


def _matrices(
    printer: FunctionPrinter, s: Product, side: Sequence[Tile], free: tuple[str, ...], u: str
) -> tuple[Matrix, Matrix]:
    """A side of a dot by its high halves, and by its low ones."""
    (tile,) = side
    high, low = (
        printer.matrix([replace(tile, name=f"{tile.name}_{half}")], s.contracted, free, u) for half in ("high", "low")
    )
    return high, low
