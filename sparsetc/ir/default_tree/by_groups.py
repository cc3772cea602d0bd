"""Tiles: the letters' groups as dots, scalings and sums, and how many positions of each a program has at once.

What the rule gives, with C the operands of what a dot sums, B those of what lies beside, D of kept letters alone::

    sum[spread tile](dot[first](C, X) * B) * D
    sum[spread tile](dot[second](dot[first](C, X) * B, E)) * D          # operands that bring dense axes apart
    X * dot[rank](B, C)                                                 # nothing stored is summed: a sampled product

A letter too short for a dot is padded in registers: its positions past the side are masked when loaded.

A tile einsum with dense axes is a matrix product at heart. Some summed letters are contracted by it: their operands'
rows, multiplied together where there are several (a Khatri-Rao or a Kronecker product), are its left side. Other
summed letters are spread: their positions lie beside the kept ones as columns, are scaled by the rows of their
operands and summed in registers. For ``ijk,jr,kr->ir`` on 16x16x16 the product is R x 16 by 16 x 256 (k contracted,
columns j and i), the scaling R x 256, the sum over j. No R x R product is formed to keep its diagonal, and no sum
crosses threads. Where operands bring dense axes apart (``ijk,jr,ks->irs``), a second dot contracts what the first left:
S x 16 by 16 x (i, j), then (i, S) x 16 by 16 x R, kept positions being columns of the first and rows of the second.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from math import prod

from sparsetc.errors import PlanError
from sparsetc.ir.contraction_tree import Dot, Factor, Tree, product, total
from sparsetc.ir.equation.einsum import Bound, joined
from sparsetc.ir.inner import Inner
from sparsetc.ir.nest.nest import ITEM, LEAF
from sparsetc.ir.plan import Schedule, Storage
from sparsetc.ir.program.operands import MIN_DOT, named_operands, printed_sizes
from sparsetc.ir.program.tile import Operand
from sparsetc.support.lru import cached_property

SAMPLED = 4096
"""Most positions of a tile at which a dense product is sampled."""
COLUMNS = 256
"""Most columns of a dot over tiles, but for one that is the whole tensor."""
MATRIX_RATE = 8
"""Multiplications a tensor core does while the others do one (H200, tf32 against fp32 outside dots)."""


@dataclass(frozen=True)
class TileGroups:
    """The letters of a tile, by what becomes of them; each in one group."""

    first: tuple[str, ...] = ()
    """Summed by the first dot; empty where there is none, and positions are multiplied one by one."""
    second: tuple[str, ...] = ()
    """Summed by the second dot, whose left side is what the first left of them."""
    spread: tuple[str, ...] = ()
    """Summed beside the dots: columns of the first, or one position at a time."""
    columns: tuple[str, ...] = ()
    """Kept, all positions at once; with a second dot, as many as a program's matrix has room for."""
    gridded: tuple[str, ...] = ()
    """Kept, one position a program."""
    sampled: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    """Operands, by name, of the two sides of a dot over their dense axes, which is multiplied by what is stored."""

    @property
    def dot(self) -> bool:
        """Whether a dot contracts anything."""
        return bool(self.first)

    @cached_property
    def contracted(self) -> tuple[str, ...]:
        """Letters that a column of the first dot has all positions of: what the second dot sums, and the first."""
        return (*self.second, *self.first)

    @property
    def sequence(self) -> tuple[str, ...]:
        """The order in which a tile's positions are best stored: a dot's columns then lie contiguous, its sum last."""
        return (*self.gridded, *self.spread, *self.columns, *self.contracted)

    def storage(self, letters: Sequence[str], most: int) -> Storage:
        """Tiles of one block of output rows together, `most` positions an item, stored as the dots take them."""

        def modes(*names: str) -> tuple[int, ...]:
            return tuple([letters.index(c) for c in names])

        item, rest = modes(*self.gridded, *self.columns), modes(*self.spread, *self.contracted)
        sequence, contracted = modes(*self.sequence), len(self.contracted)
        return Storage(item, rest, max_item_nnz=most, sequence=sequence, contracted=contracted)


@lru_cache(maxsize=256)
def groups_of(bound: Bound, sides: Sequence[int], dot: bool = True) -> TileGroups:
    """The division of the sparse operand's letters that takes the fewest multiplications.

    Args:
        bound: an einsum whose one sparse operand has distinct letters.
        sides: positions of a tile along each of its modes.
        dot: whether the type has a matrix instruction.
    """
    e = bound.einsum
    side = dict(zip(e.inputs[e.sparse[0]], sides, strict=True))
    return Division(side, printed_sizes(bound), e.output, named_operands(bound)[1]).groups(dot)


class Division:
    """Ways to divide the letters that have sides, of an output and of dense operands."""

    def __init__(
        self,
        side: Mapping[str, int],
        sizes: Mapping[str, int],
        output: Collection[str],
        operands: Sequence[Operand],
        columns: float = COLUMNS,
    ) -> None:
        """Find which letters must stay together.

        Args:
            side: positions of a tile by letter.
            sizes: of all letters.
            output: letters of the result.
            operands: the dense ones.
            columns: most of a dot; one program has no more.
        """
        self.side, self.sizes, self.letters, self.most = side, sizes, tuple(side), columns
        self.kept = tuple([c for c in self.letters if c in output])
        self.summed = tuple([c for c in self.letters if c not in output])
        self.operands, self.output = operands, output
        self.inner = tuple([o for o in operands if set(o.rows) & set(self.summed)])
        """Operands that vary along what is summed; the others scale the result once."""
        tied = {c for o in self.inner for c in o.rows if c in self.kept}
        self.gridded = tuple([c for c in self.kept if c in tied])
        self.free = tuple([c for c in self.kept if c not in tied])
        self.classes = self._classes()

    def groups(self, dot: bool, wide: bool = True) -> TileGroups:
        """The division that takes the fewest multiplications.

        Args:
            dot: whether the type has a matrix instruction.
            wide: whether a program has enough of the dense axes for a dot to sum them.
        """
        if found := [*self.single(), *self.chained()] if dot else []:
            return min(found, key=lambda f: f[0])[1]
        return (self.sampled() if dot and wide else None) or self.elementwise()

    def _classes(self) -> list[tuple[tuple[str, ...], tuple[Operand, ...]]]:
        """Summed letters that must stay together, since an operand has them all, with their operands."""
        groups = joined((set(o.rows) & set(self.summed), o) for o in self.inner)
        named = [(tuple([c for c in self.letters if c in s]), tuple(ops)) for s, ops in groups]
        return sorted(named, key=lambda g: -self.letters.index(g[0][-1]))  # of equals, the last letter is contracted

    def positions(self, letters: Iterable[str]) -> int:
        """Positions of a tile along these letters."""
        return prod([self.side[c] for c in letters])

    def width(self, operands: Sequence[Operand]) -> int:
        """Elements over all dense axes of these operands."""
        return prod([self.sizes[a] for a in {a for o in operands for a in o.axes}])

    def _subsets(self, what: Sequence[object]) -> Iterator[tuple[int, ...]]:
        for n in range(1, len(what) + 1):
            yield from combinations(range(len(what)), n)

    def single(self) -> Iterator[tuple[int, TileGroups]]:
        """Divisions with one dot: all dense axes that vary along summed letters are its rows."""
        axes = {a for o in self.inner for a in o.axes}
        for chosen in self._subsets(self.classes):
            operands = [o for n in chosen for o in self.classes[n][1]]
            if not axes or {a for o in operands for a in o.axes} != axes:
                continue
            first = self._letters(chosen)
            spread = tuple([c for c in self.summed if c not in first])
            columns, gridded = self._columns(self.free)
            wide = self.positions((*columns, *spread))
            if wide < 2 or (not columns and wide < MIN_DOT):
                continue
            rows, deep = self.width(operands), max(MIN_DOT, self.positions(first))
            formed = self.positions(first) * rows if len(operands) > 1 else 0
            scaled = rows * wide if spread else 0
            cost = formed + scaled + rows * max(MIN_DOT, wide) * deep // MATRIX_RATE
            yield cost * self.positions(gridded), TileGroups(first, (), spread, columns, (*self.gridded, *gridded))

    def chained(self) -> Iterator[tuple[int, TileGroups]]:
        """Divisions with two dots, between operands that have no dense axis in common."""
        apart = self._components()
        for chosen in self._subsets(apart[:-1] if len(apart) == 2 else apart):
            for swap in (False, True):
                left = [n for i in chosen for n in apart[i]]
                right = [n for i, ns in enumerate(apart) if i not in chosen for n in ns]
                left, right = (right, left) if swap else (left, right)
                if not left or not right:
                    continue
                one, two = ([o for n in ns for o in self.classes[n][1]] for ns in (left, right))
                first, second = self._letters(left), self._letters(right)
                m, n = self.width(one), self.width(two)
                deep, wide = max(MIN_DOT, self.positions(first)), max(MIN_DOT, self.positions(second))
                formed = (deep * m if len(one) > 1 else 0) + (wide * n if len(two) > 1 else 0)
                spread = tuple(c for c in self.summed if c not in (*first, *second))
                cost = (formed + m * wide * (deep + n) // MATRIX_RATE) * self.positions((*spread, *self.kept))
                yield cost, TileGroups(first, second, spread, self.free, self.gridded)

    def _letters(self, classes: Iterable[int]) -> tuple[str, ...]:
        """The letters of some classes, in their order."""
        own = {c for n in classes for c in self.classes[n][0]}
        return tuple([c for c in self.letters if c in own])

    def _components(self) -> list[list[int]]:
        """Classes with dense axes, those that share an axis together."""
        axes = [{a for o in operands for a in o.axes} for _, operands in self.classes]
        return [ns for _, ns in joined((own, n) for n, own in enumerate(axes) if own)]

    def _columns(self, kept: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """(all positions at once, one a program): as many of the last kept letters as the columns hold."""
        columns: tuple[str, ...] = ()
        for c in reversed(kept):
            if self.positions((c, *columns)) > self.most:
                break
            columns = (c, *columns)
        return columns, tuple(kept[: len(kept) - len(columns)])

    def sampled(self) -> TileGroups | None:
        """The dense product sampled at what is stored: nothing is summed but dense axes, which both sides have."""
        summed = {a for o in self.operands for a in o.axes} - set(self.output)
        wide = [o for o in self.operands if o.rows and set(o.axes) >= summed]
        if self.summed or not summed or len(wide) != len(self.operands) or set(self.output) & set(wide[0].axes):
            return None
        groups = joined((o.rows, o) for o in wide)
        largest = max(groups, key=lambda g: self.positions(tuple(g[0])), default=None)
        if len(groups) < 2 or largest is None:
            return None
        sides = [largest[1], [o for g in groups if g is not largest for o in g[1]]]
        rows = [self.positions({c for o in side for c in o.rows}) for side in sides]
        if min(rows) < MIN_DOT or self.positions(self.letters) > SAMPLED:
            return None
        left, right = (tuple(o.name for o in side) for side in sides)
        return TileGroups((), (), (), self.letters, (), (left, right))

    def elementwise(self) -> TileGroups:
        """No dot: one letter's positions side by side, a kept one where there is one that no operand ties down."""
        vector = max(self.kept or self.letters, key=lambda c: self.side[c], default="")
        columns = (vector,) if vector in self.kept else ()
        gridded = tuple(c for c in self.kept if c not in columns)
        spread = tuple(c for c in self.summed if c != vector)
        second = (vector,) if vector and not columns else ()
        if len(self.letters) != len({*columns, *gridded, *spread, *second}):
            raise PlanError("a tile's letters must be distinct")
        return TileGroups((), second, spread, columns, gridded)


MOST_SUMS = 4096
"""Sums that a warp keeps, 128 a thread: of more, most would be kept in memory."""


def by_groups(inner: Inner, schedule: Schedule) -> Schedule:
    """The schedule with the tree of the groups that take the fewest multiplications, and the roles of positions."""
    inner = inner.by_sides()
    output, wide = (*inner.kept, *inner.output_axes), all(schedule.block(c) >= MIN_DOT for c in inner.summed)
    groups = Division(inner.sides, inner.sizes, output, inner.operands, COLUMNS).groups(schedule.dot, wide)
    block = _Blocks(inner, schedule, groups).found
    turns = tuple([c for c in groups.spread if block[c] < inner.sides[c] or inner.sides[c] == 1])
    take = tuple([(c, n) for c, n in block.items() if n > 1])
    return replace(schedule, tree=_tree(inner, groups, turns), take=take, turns=turns)


def _tree(inner: Inner, g: TileGroups, turns: Sequence[str]) -> Tree:
    """The dots, what they are scaled by, and the sums that are left to the end."""
    within = [o for o in inner.operands if not set(o.rows) <= set(inner.kept)]
    (x,) = map(Factor, inner.stored)
    # Where each tile has a key of its own, its positions in turn are all that is added up.
    loops = inner.loops(LEAF) if inner.key.level == ITEM else ()
    if any(g.sampled):
        left, right = (product(map(Factor, side)) for side in g.sampled)
        return total(product([x, Dot(left, right, inner.summed)]), loops)
    made: Tree = product([x, *_factors(within)])
    if g.dot:
        made = Dot(_rows(within, g.first), x, g.first)
        made = product([made, *_factors(o for o in within if not set(o.rows) & set(g.contracted))])
        made = Dot(made, _rows(within, g.second), g.second) if g.second else made
    spread = sorted(g.spread, key=turns.__contains__)  # what is in registers is summed first
    made = total(made, (*spread, *loops, *(() if g.dot else g.second)))
    return total(product([made, *_factors(o for o in inner.operands if o not in within)]), inner.summed)


def _factors(operands: Iterable[Operand]) -> list[Tree]:
    return [Factor(o.name) for o in operands]


def _rows(operands: Iterable[Operand], letters: Sequence[str]) -> Tree:
    """The side of a dot over these letters: the operands that have any."""
    return product(_factors(o for o in operands if set(o.rows) & set(letters)))


class _Blocks:
    """Positions of each letter that a program has at once, in the order in which letters come."""

    def __init__(self, inner: Inner, schedule: Schedule, groups: TileGroups) -> None:
        self.inner, self.schedule, self.groups, g = inner, schedule, groups, groups
        self.side = {c: 1 << (n - 1).bit_length() for c, n in inner.sides.items()}  # padded to what registers hold
        whole = (*g.first, *g.second, *g.columns)
        self.found = {c: side if c in whole else 1 for c, side in self.side.items()}
        if g.dot:
            for letters in filter(None, (g.first, g.second)):
                self.found[letters[-1]] *= self._missing(letters)
        if g.dot and g.second:
            matrix = prod(map(schedule.block, inner.dense))
            self._fill(g.columns, min(schedule.columns, MOST_SUMS * schedule.warps // matrix))
        one_dot = g.dot and not g.second
        self._fill(g.spread, schedule.columns // self._positions(g.columns) if one_dot else 1)
        if one_dot and g.columns:
            self.found[g.columns[-1]] *= self._missing((*g.columns, *g.spread))

    def _fill(self, letters: Sequence[str], room: int) -> None:
        """Take as many positions of letters as there is room for, of the last most."""
        for c in reversed(letters):
            self.found[c] = max(1, min(self.side[c], room))
            room //= self.found[c]

    def _positions(self, letters: Iterable[str]) -> int:
        return prod([self.found[c] for c in letters])

    def _missing(self, letters: Iterable[str]) -> int:
        """What positions must be multiplied by to be enough for a dot."""
        return max(1, MIN_DOT // self._positions(letters))
