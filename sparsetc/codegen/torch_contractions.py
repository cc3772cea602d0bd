"""Tile programs -> tile programs whose products sum what nothing after them reads: a small matrix product a nonzero.

In: a tile program, whose products sum no dense axis. Out: the same sums, each dense axis summed by the last product
that has a factor of it. The torch printer takes these: ``"nij,njr->nir"`` is one call and forms nothing over all axes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from sparsetc.ir.tile import LANES, Add, Gather, Loop, Product, Statement, Sum, Tile, TileProgram, Zero


def contracted(program: TileProgram) -> TileProgram:
    """The program with dense axes summed where products are contractions; itself where none is.

    A product one of whose factors has all axes is none: it forms nothing larger than that factor.
    """
    statements = [s for s, _ in program.statements]
    (add,) = (s for s in statements if isinstance(s, Add))
    gathered = {s.out.name for s in statements if isinstance(s, Gather)}
    last: dict[str, int] = {}  # the last product with a factor of an axis that is summed
    for at, s in enumerate(statements):
        for tile in s.inputs if isinstance(s, Product) else ():
            if tile.name in gathered:
                last |= {a: at for a in tile.axes if a not in (LANES, *add.axes)}
    gone: dict[str, set[str]] = {}  # axes that the tiles of a name have lost
    for at in sorted(set(last.values())):
        product = statements[at]
        assert isinstance(product, Product)
        present = [set(t.axes) - {LANES} for t in product.inputs]
        if product.dot or set().union(*present) in present:
            continue
        made = {s.out.name for s in statements[at:] if isinstance(s, Product | Sum)}
        for name in made:
            gone.setdefault(name, set()).update(a for a, where in last.items() if where == at)
    if not gone:
        return program

    def without(tile: Tile) -> Tile:
        lost = gone.get(tile.name, ())
        return replace(tile, axes=tuple(a for a in tile.axes if a not in lost))

    return replace(program, body=_renewed(program.body, without))


def _renewed(body: tuple[Statement, ...], tile: Callable[[Tile], Tile]) -> tuple[Statement, ...]:
    """The statements with their tiles exchanged."""

    def renewed(s: Statement) -> Statement:
        if isinstance(s, Loop):
            return replace(s, body=_renewed(s.body, tile))
        if isinstance(s, Zero):
            return Zero(tile(s.out))
        if isinstance(s, Product):
            return replace(s, out=tile(s.out), left=tuple(map(tile, s.left)), right=tuple(map(tile, s.right)))
        if isinstance(s, Sum):
            return Sum(tile(s.out), tile(s.source))
        return replace(s, source=tile(s.source)) if isinstance(s, Add) else s

    return tuple(map(renewed, body))
