"""The product of stored values in halves with gathered rows: the powers of two that scale both, and bring the sum back.

In: the computations of a program that reads whole tiles in halves. Out: the same, where what is gathered is scaled
before the dot that takes it, which splits it in registers::

    scale_B = 2 ** (14 - exponent of most_B);  unscale_X, unscale_B = 2 ** (exponent of most, most_B - 14)
    scaled_B = rows of B * scale_B
    total += dot of scaled_B, x
    total = total * unscale_X * unscale_B       # one after the other: their product may be no float32
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sparsetc.errors import PlanError
from sparsetc.ir.inner import X
from sparsetc.ir.nest.axes import ITEM
from sparsetc.ir.plan import F16X3
from sparsetc.ir.program import names
from sparsetc.ir.program.tile import Add, Gather, Product, Scale, Statement, Sum, Tile, Value


def in_halves(total: Tile, statements: Sequence[Statement]) -> tuple[Tile, list[Statement]]:
    """What is added to the output, and the computations that make it.

    Args:
        total: what is to be added.
        statements: in an order of data flow, without loops.

    Raises:
        PlanError: there is another dot than one of stored values with rows of one operand, or it is not added up over
            all tiles at once.
    """
    dot, rows, value = _dot(statements)
    name = rows.operand.name
    into, back = Scale(_number(names.scale(name)), name, into=True), Scale(_number(names.unscale(name)), name)
    own = Scale(_number(names.unscale(X)), value.operand)
    gathered = replace(rows, operand=replace(rows.operand, split=True))
    scaled = Product(replace(rows.out, name=names.scaled(name)), (rows.out, into.out))
    result = replace(dot.out, folded=0)

    def made(s: Statement) -> list[Statement]:
        if s == rows:
            return [gathered, scaled]
        if s == dot:
            return [
                _with(dot, rows.out, scaled.out),
                Product(result, (dot.out, own.out)),
                Product(result, (result, back.out)),
            ]
        return [_with(s, dot.out, result)]

    found = [new for s in statements for new in made(s)]
    return result if total == dot.out else total, [into, own, back, *found]


def _number(name: str) -> Tile:
    return Tile(name, (), ITEM)


def _dot(statements: Sequence[Statement]) -> tuple[Product, Gather, Value]:
    """The dot, and what reads its sides."""
    loads = {s.out: s for s in statements if isinstance(s, Gather | Value)}
    dots = [s for s in statements if isinstance(s, Product) and s.dot]
    for dot in dots:
        sides = [loads.get(side[0]) for side in (dot.left, dot.right) if len(side) == 1]
        rows = [s for s in sides if isinstance(s, Gather) and s.operand.rows and not s.operand.rounded]
        values = [s for s in sides if isinstance(s, Value)]
        if len(dots) == len(rows) == len(values) == 1 and dot.accumulate and dot.out.level == ITEM:
            return dot, rows[0], values[0]
    raise PlanError(
        f"in {F16X3} one dot takes stored values and rows of one operand, and is added up over tiles; "
        f"found {', '.join(str(dot.out) for dot in dots) or 'no dot'}"
    )


def _with(s: Statement, old: Tile, new: Tile) -> Statement:
    """A statement that reads one tile in the place of another."""

    def own(tiles: tuple[Tile, ...]) -> tuple[Tile, ...]:
        return tuple(new if t == old else t for t in tiles)

    if isinstance(s, Product):
        return replace(s, left=own(s.left), right=own(s.right))
    if isinstance(s, Sum | Add):
        return replace(s, source=new if s.source == old else s.source)
    return s
