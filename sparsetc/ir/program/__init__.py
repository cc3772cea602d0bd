"""Level 3: tile programs, what they read, print as and cost."""

# ruff: noqa: F401
from sparsetc.ir.program.cost import REGISTERS, Cost
from sparsetc.ir.program.operands import (
    HALVES,
    MADE,
    MIN_DOT,
    WARPGROUP,
    DenseAxis,
    Operand,
    Stored,
    arguments,
    named_operands,
    printed_sizes,
    stored_of,
)
from sparsetc.ir.program.resources import ONE, SECTOR, STORED, Statistics
from sparsetc.ir.program.text import Lines, comments, header
from sparsetc.ir.program.tile import (
    LANES,
    Add,
    Decode,
    Gather,
    Key,
    Loop,
    Product,
    Reduce,
    Scale,
    Statement,
    Tile,
    TileProgram,
    Value,
    Zero,
    flow,
    place,
    tables_of,
    walk,
)
