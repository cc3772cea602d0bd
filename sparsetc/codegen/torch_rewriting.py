"""Tile programs -> tile programs of whole sides, each of whose products sums what nothing after it reads.

In: a tile program as a GPU runs it: positions along a side are taken in turn, and a product sums nothing but the lanes.
Out: the same sums for a walker that takes all at once. A side is an axis like a rank. ``"nij,njr->nir"`` is one call,
which forms nothing over all axes. Sums over the nonzeros of a row, of factors without an axis in common, are dots.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod

from sparsetc.ir.equation.einsum import joined
from sparsetc.ir.lower.place import place
from sparsetc.ir.nest.axes import ITEM
from sparsetc.ir.program.flow import made
from sparsetc.ir.program.tile import (
    LANES,
    Add,
    Gather,
    Loop,
    Product,
    Scale,
    Statement,
    Sum,
    Tile,
    TileProgram,
    Value,
    Zero,
)
from sparsetc.support.cached import cached_property


@lru_cache(maxsize=256)
def whole(program: TileProgram) -> TileProgram:
    """The program without turns, its axes whole and summed as early as they may be."""
    axes = tuple(replace(a, block=a.size, pieces=()) for a in program.axes)
    body = place(_Rewriting(program).statements(), [Loop(axis) for axis in program.view.loops])
    return replace(program, axes=axes, body=body)


def own_axes(tile: Tile) -> tuple[str, ...]:
    """The axes of a tile that lie within a row of it."""
    return tuple(a for a in tile.axes if a != LANES)


def rows_of(program: TileProgram, level: int) -> int:
    """The level whose positions are the rows of what is made at a level: turns along a side make no rows."""
    return max((axis.level for axis in program.view.loops if axis.level <= level), default=ITEM)


def constants(program: TileProgram) -> set[str]:
    """The names of the tiles that are the same for all rows, and so have none.

    These are gathered by no coordinate, as all are for a tile that is the whole tensor, or scales of an operand, or
    products of such tiles.
    """
    found: set[str] = set()
    for s, _ in program.statements:
        match s:
            case Gather(out, operand) if program.spanning or not operand.rows:
                found.add(out.name)
            case Scale(out) if not s.by_row:
                found.add(out.name)
            case Product(out) if not s.accumulate and all(tile.name in found for tile in s.inputs):
                found.add(out.name)
    return found


class _Rewriting:
    """The statements of a program in order of data flow, and what each must keep of its axes."""

    def __init__(self, program: TileProgram) -> None:
        self.p = program
        self.sides = {a.letter for a in program.axes} & set(program.letters)
        self.given = [s for s, _ in program.statements if not isinstance(s, Loop | Zero)]
        self.sources = self._sources()
        self.own = [self._own(s) for s in self.given]
        stored = [a for s, own in zip(self.given, self.own, strict=True) if isinstance(s, Value) for a in own]
        self.order = list(dict.fromkeys((*stored, *(a.letter for a in program.axes))))
        self.needed = self._needed()
        self.tiles: dict[int, Tile] = {}
        """What each of the statements makes, as rewritten."""
        self.found: list[Statement] = []

    def _sources(self) -> list[tuple[int, ...]]:
        """The statements whose tiles each statement reads."""
        latest: dict[str, int] = {}
        sources = []
        for n, s in enumerate(self.given):
            read = s.inputs if isinstance(s, Product) else (s.source,) if isinstance(s, Sum | Add) else ()
            sources.append(tuple(latest[tile.name] for tile in read))
            latest[made(s)] = n
        return sources

    def _own(self, s: Statement) -> tuple[str, ...]:
        """The axes of what is loaded: all of its sides, then all of its dense axes."""
        if isinstance(s, Value):
            stored = self.p.stored(s.operand)
            return tuple(stored.letters[mode] for mode in stored.values.sequence)
        if isinstance(s, Gather):
            return (*(c for c in self.p.read_along(s.operand.rows) if c in self.sides), *s.operand.axes)
        return ()

    def _needed(self) -> list[set[str]]:
        """The axes of each statement's tile that something after it has too, or that the output keeps."""
        spans: list[set[str]] = []  # all axes of what a tile is made from
        for own, sources in zip(self.own, self.sources, strict=True):
            spans.append(set(own).union(*(spans[m] for m in sources)))
        needed: list[set[str]] = [set() for _ in self.given]
        for n, s in reversed(list(enumerate(self.given))):
            kept = {*s.axes, *self.p.read_along(s.key.letters)} if isinstance(s, Add) else needed[n]
            for m in self.sources[n]:
                needed[m] |= kept.union(*(spans[other] for other in self.sources[n] if other != m))
        return needed

    def statements(self) -> list[Statement]:
        """The program's statements, rewritten."""
        for n, s in enumerate(self.given):
            if isinstance(s, Value | Gather):
                self.tiles[n] = self._tile(s.out, self.own[n])
                self.found.append(replace(s, out=self.tiles[n]))
            elif isinstance(s, Sum):  # of lanes, of which there are rows; of positions, that a product has summed
                self.tiles[n] = self.tiles[self.sources[n][0]]
            elif isinstance(s, Product):
                self._product(n, s)
            elif isinstance(s, Add):
                self.found.append(replace(s, source=self.tiles[self.sources[n][0]]))
            else:
                if isinstance(s, Scale):
                    self.tiles[n] = s.out
                self.found.append(s)
        return self.found

    def _product(self, n: int, s: Product) -> None:
        inputs = tuple(self.tiles[m] for m in self.sources[n])
        rows = rows_of(self.p, s.out.level)
        accumulate = s.accumulate and any(rows_of(self.p, tile.level) > rows for tile in inputs)
        axes = self._summed(inputs, self.needed[n])
        if len(inputs) == 1 and axes == own_axes(inputs[0]):
            if not accumulate:
                self.tiles[n] = inputs[0]
                return
            inputs = self._factors(self.sources[n][0], inputs)
        left, right = (inputs, ()) if not accumulate or axes != self._union(inputs) else self._sides(inputs)
        axes = (*self._union(left), *self._union(right)) if right else axes
        folded = len(self._union(left)) if right else 0
        self.tiles[n] = replace(self._tile(s.out, axes), folded=folded)
        self.found.append(Product(self.tiles[n], left, right, accumulate))

    def _factors(self, source: int, inputs: tuple[Tile, ...]) -> tuple[Tile, ...]:
        """The factors of the one tile that is added up, where it was multiplied for nothing else."""
        last = self.found[-1]
        if not isinstance(last, Product) or last.accumulate or last.out is not inputs[0]:
            return inputs
        if sum(sources.count(source) for sources in self.sources) > 1:
            return inputs
        del self.found[-1]
        return last.inputs

    def _summed(self, inputs: Sequence[Tile], needed: set[str]) -> tuple[str, ...]:
        """The axes of a product: all that its factors have, or those that something after it has too.

        A product that sums no side, and one of whose factors has all axes, sums none: it forms nothing larger than
        that factor.
        """
        axes = self._union(inputs)
        gone = set(axes) - needed
        sums = gone & self.sides or not any(set(axes) <= set(tile.axes) for tile in inputs)
        return tuple(a for a in axes if a in needed) if sums else axes

    def _sides(self, inputs: tuple[Tile, ...]) -> tuple[tuple[Tile, ...], tuple[Tile, ...]]:
        """Two sets of factors with no axis in common, so that the sum over rows is a matrix product; or all, and
        none.
        """
        groups = [g for g in joined((own_axes(tile), tile) for tile in inputs) if g[0]]
        if len(groups) < 2:
            return inputs, ()
        axes, largest = max(groups, key=lambda g: prod(self.p.axis(a).size for a in g[0]))
        others = tuple(tile for tile in inputs if tile not in largest)
        if any(all(tile.name in self.constant for tile in side) for side in (largest, others)):
            return inputs, ()  # a side without rows has nothing that is summed over them
        first = self._union(inputs)[0] in axes
        return (tuple(largest), others) if first else (others, tuple(largest))

    @cached_property
    def constant(self) -> set[str]:
        """The names of the tiles that are the same for all rows."""
        return constants(self.p)

    def _union(self, tiles: Iterable[Tile]) -> tuple[str, ...]:
        """The axes that tiles have together; one alone keeps the order of its own."""
        own = list(map(own_axes, tiles))
        return own[0] if len(own) == 1 else tuple(a for a in self.order if any(a in axes for axes in own))

    def _tile(self, tile: Tile, axes: tuple[str, ...]) -> Tile:
        """A tile with other axes, and lanes where those are its rows."""
        lanes = (LANES,) if LANES in tile.axes and tile.level != ITEM else ()
        return replace(tile, axes=(*lanes, *axes), folded=0)
