"""The walk over nonzeros: axes, coordinates and values, of which a `Nest` is made."""

# ruff: noqa: F401
from sparsetc.ir.nest.axes import ITEM, LANE, LANES, LEAF, LEVELS, UNLIMITED, Axis, Each, Fibers, Run, TileLoop, home
from sparsetc.ir.nest.coordinates import (
    AXIS_LEVEL,
    OPERATORS,
    Bits,
    Computed,
    Expression,
    Field,
    Listed,
    Lookup,
    ModeCoordinate,
    Position,
    Reader,
    Writer,
    parsed,
    with_inputs,
    word_bits,
)
from sparsetc.ir.nest.nest import PAIRED, Nest, blocks, pairs, runs, tiles, tiles_along
from sparsetc.ir.nest.values import BIAS, HEAD, LOW, TOP, TYPES, Bitmap, Halves, Values, Whole
