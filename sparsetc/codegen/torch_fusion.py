"""What one call of torch does of several statements: weighted sums of rows of a table that are never gathered.

In: a rewritten tile program. Out: which products are such sums, and of which operand.
"""

from __future__ import annotations

from math import prod

from sparsetc.codegen.torch_rewriting import own_axes, rows_of
from sparsetc.ir.nest.axes import ITEM
from sparsetc.ir.program.tile import Gather, Product, Tile, TileProgram


def bags(program: TileProgram) -> dict[Product, Gather]:
    """The products that add up rows of an operand, each weighted by the other factors, and what gathers those rows.

    Weights have none of the rows' axes, or the first of them, where rows have as many elements for each position of
    these.
    """
    gathers = {s.out.name: s for s, _ in program.statements if isinstance(s, Gather)}
    found = {}
    for s, _ in program.statements:
        if isinstance(s, Product) and s.accumulate and not s.dot:
            own = [gathers[t.name] for t in s.inputs if t.name in gathers and _is_bag(program, s, t)]
            if own:
                found[s] = own[-1]
    return found


def weight_axes(s: Product, rows: Tile) -> tuple[str, ...]:
    """The axes that weights of rows have, the first of theirs."""
    have = {a for tile in s.inputs if tile != rows for a in own_axes(tile)}
    return own_axes(rows)[: len(have)] if have else ()


def _is_bag(p: TileProgram, s: Product, rows: Tile) -> bool:
    """Whether a factor's rows may be added up as they lie in its table."""
    axes, others = own_axes(rows), [tile for tile in s.inputs if tile != rows]
    have, shared = {a for tile in others for a in own_axes(tile)}, weight_axes(s, rows)
    if rows.level == ITEM or axes != own_axes(s.out) or have != set(shared) or set(axes) & set(p.letters):
        return False
    level = rows_of(p, rows.level)
    inner = [rows_of(p, tile.level) for tile in others]
    if any(own > level for own in inner) or all(own == ITEM for own in inner):
        return False
    apart = axes[len(shared) :]
    positions = (prod(p.axis(a).size for a in part) for part in (shared, apart))
    return not shared or (bool(apart) and next(positions) <= next(positions))
