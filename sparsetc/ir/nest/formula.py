"""Formulas given as text -> expressions, by a parser that knows numbers, names and operators and nothing else."""

from __future__ import annotations

import ast
import re

from sparsetc.errors import FormatError
from sparsetc.ir.nest.coordinates import OPERATORS, Constant, Coordinate, Expression, Formula, Position
from sparsetc.support.names import shown

FORMULA = re.compile(r"(?:\{(?:m[0-9]+|p|lane)\}|0x[0-9a-fA-F]+|[0-9]+|//|<<|>>|[-+*%&|()]|[ ])+")
"""The signs of a formula: coordinates, numbers, and operators that Triton and torch both read."""
NODES = (ast.BitOr, ast.BitAnd, ast.LShift, ast.RShift, ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod)
SIGNS: dict[type[ast.operator], str] = dict(zip(NODES, OPERATORS, strict=True))


def parsed(formula: str, position: Position) -> Expression:
    """The expression of a formula in ``{m0}, {m1}, …`` (coordinates read before it), ``{p}`` (`position`) and
    ``{lane}``.

    Raises:
        FormatError: it is anything else than numbers and these under operators.
    """
    if isinstance(formula, str) and FORMULA.fullmatch(formula):
        try:  # in parentheses, names that touch are no longer ones
            tree = ast.parse(formula.strip().replace("{", "(").replace("}", ")"), mode="eval")
            return _expression(tree.body, position)
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            pass
    raise FormatError(
        "the formula of a coordinate is printed into generated programs; it may hold {m0}, {m1}, ..., {p}, whole "
        f"numbers, parentheses and + - * // % << >> & |, found {shown(formula)}"
    )


def _expression(node: ast.expr, position: Position) -> Expression:
    match node:
        case ast.Constant(int(value)):
            return Constant(value)
        case ast.Name("p"):
            return position
        case ast.Name("lane"):
            return Position("lane")
        case ast.Name(name):
            return Coordinate(int(name[1:]))
        case ast.BinOp(left, sign, right) if type(sign) in SIGNS:
            return Formula(SIGNS[type(sign)], _expression(left, position), _expression(right, position))
        case ast.UnaryOp(ast.USub(), operand):
            return Formula("-", Constant(0), _expression(operand, position))
        case ast.UnaryOp(ast.UAdd(), operand):
            return _expression(operand, position)
    raise ValueError
