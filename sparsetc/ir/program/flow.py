"""The flow of data between statements of a tile program: what each reads and makes, and where it is known.

In: a statement. Out: names and levels, by which statements are placed and checked.
"""

from __future__ import annotations

from sparsetc.ir.nest.axes import ITEM
from sparsetc.ir.program import names
from sparsetc.ir.program.tile import Add, Decode, Gather, Loop, Product, Row, Statement, Sum


def reads(s: Statement) -> tuple[str, ...]:
    """The names of the tiles and coordinates that a statement takes as inputs."""
    if isinstance(s, Product):
        return tuple(t.name for t in s.inputs)
    if isinstance(s, Sum):
        return (s.source.name,)
    if isinstance(s, Gather):
        return tuple(map(names.at, s.operand.rows))
    if isinstance(s, Add):
        return (s.source.name, *map(names.at, s.key.letters if isinstance(s.key, Row) else ()))
    return ()


def made(s: Statement) -> str:
    """The name of what a statement makes; empty where that is no tile and no coordinate."""
    if isinstance(s, Decode):
        return s.name
    return "" if isinstance(s, Loop | Add) else s.out.name


def level_of(s: Statement) -> int:
    """The level at which a statement is executed."""
    if isinstance(s, Product):
        return max((t.level for t in s.inputs), default=ITEM)
    if isinstance(s, Add):
        return s.key.level
    return s.level if isinstance(s, Loop | Decode) else s.out.level
