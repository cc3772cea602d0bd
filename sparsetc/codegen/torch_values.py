"""Stored values -> torch: how each kind is read, of the tiles or nonzeros of a chunk, or of the tiles that pairs name.

In: a `Value` or a `Scale` of a program. Out: the text that makes its tile.
"""

from __future__ import annotations

from sparsetc.codegen.torch_rows import COUNTS, RANGES, Rows
from sparsetc.ir.nest.axes import LANE, LEAF
from sparsetc.ir.nest.halves import LOW
from sparsetc.ir.nest.values import Bitmap, Halves, Ones, ScaledHalves, Whole
from sparsetc.ir.program.tile import Scale, Stored, Value


def value(rows: Rows, s: Value) -> str:
    """The values of a statement's tiles, their positions in the order in which they are stored."""
    stored = rows.p.stored(s.operand)
    return _READ[type(stored.values)](rows, stored)


def scale(rows: Rows, s: Scale) -> str:
    """What the rows of the items' tiles are to be multiplied by, or all of an operand."""
    if not s.by_row:
        return f"halves.scale({rows.p.largest(s)}, into={s.into})[0]"
    stored = rows.p.stored(s.operand)
    table = f"{stored.array('scales')}.view(-1, {stored.values.sides[0]})"
    return f"{table}.index_select(0, item_{s.operand}[{RANGES[0]}])"


def _whole(rows: Rows, stored: Stored) -> str:
    return _numbers(stored, "values")


def _ones(rows: Rows, stored: Stored) -> str:
    level = rows.of(LEAF)
    return f"torch.ones({COUNTS[level]}, dtype={rows.p.output}.dtype, device={rows.device})"


def _bitmap(rows: Rows, stored: Stored) -> str:
    kind = stored.values
    assert isinstance(kind, Bitmap)
    bits, values = f"{stored.array('bits')}.view(-1, {kind.words})", stored.array("values")
    sizes = f"{kind.word}, {kind.volume}"
    if stored.name:
        begins = f"{stored.array('value_ptr')}[{_pair(stored)}]"
        tiles = f"expanded({bits}[{_pair(stored)}], {values}, {sizes}, {begins})"
    else:
        tiles = f"expanded({bits}[{RANGES[LANE]}], {values}[{RANGES[LEAF]}], {sizes})"
    return f"{tiles}.view(-1, {_sides(stored)})"


def _halves(rows: Rows, stored: Stored) -> str:
    high, low = (f"{_numbers(stored, array)}.float()" for array in ("high_values", "low_values"))
    return f"{high} + {low} / {LOW}"


_READ = {Whole: _whole, Ones: _ones, Bitmap: _bitmap, Halves: _halves, ScaledHalves: _halves}


def _numbers(stored: Stored, array: str) -> str:
    """The numbers of one array, a row a nonzero, or a tile."""
    name, sides = stored.array(array), _sides(stored)
    if stored.name:
        return f"{name}.view(-1, {sides}).index_select(0, {_pair(stored)})"
    return f"{name}[{RANGES[LEAF]}]" + (f".view(-1, {sides})" if sides else "")


def _pair(stored: Stored) -> str:
    """Which tiles of an operand the chunk's pairs are of."""
    return f"pair_{stored.name}[{RANGES[LANE]}]"


def _sides(stored: Stored) -> str:
    return ", ".join(str(stored.values.sides[mode]) for mode in stored.values.sequence)
