"""A tree: what it must be to be lowered, then its computations in an order of data flow, without loops and zeros.

In: a `Tree`, the `Inner` einsum that it is of, and the roles of a tile's positions. A tree has every factor once and
sums every axis once, where that can be done; else a `PlanError` names the node and the fault. Out: statements, which
`place` puts into loops. A product, or a dot, that is summed over loops becomes an accumulator, which lives outside of
them; what it depends on beside is summed in registers, in the order in which the tree has them. The last sums, over
lanes and dense axes, are left to the statement that adds the result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from sparsetc.errors import PlanError
from sparsetc.ir.contraction_tree import Dot, Factor, Multiply, Tree
from sparsetc.ir.contraction_tree import Sum as SumNode
from sparsetc.ir.inner import Inner
from sparsetc.ir.nest.nest import ITEM, LEVELS, Axis
from sparsetc.ir.plan import Schedule
from sparsetc.ir.program.tile import LANES, Decode, Gather, Product, Scale, Statement, Sum, Tile, Value


def home(around: Sequence[Axis], over: Collection[str]) -> int:
    """The level at which a sum over loops, one or more, lives: outside of the outermost."""
    level = ITEM
    for axis in around:
        if axis.name in over:
            break
        level = max(level, axis.level)
    return level


def turns_of_sums(
    over: Iterable[str], looped: Collection[str], beside: Collection[str]
) -> list[tuple[list[str], list[str]]]:
    """(axes in registers, loops) that are summed together, one after the other.

    What lies in registers is summed before the loops that are named with it or behind it, and after those before it.
    """
    found: list[tuple[list[str], list[str]]] = [([], [])]
    for axis in over:
        if axis not in looped and found[-1][1]:
            found.append(([], []))
        registers, loops = found[-1]
        registers += [axis] if axis in beside else []
        loops += [axis] if axis in looped else []
    return found


def verify_tree(inner: Inner, schedule: Schedule, around: Sequence[Axis]) -> None:
    """Raise `PlanError` where the schedule's tree is none of this einsum over these loops, or cannot be lowered."""
    assert schedule.tree is not None
    _verify_factors(schedule.tree, inner)
    _verify_roles(inner, schedule)
    found = _Check(schedule.tree, inner, around, dict(schedule.take)).axes(schedule.tree)
    for axis in sorted(found - inner.keyed):
        raise PlanError(f"tree {schedule.tree}: the result has no axis {axis}, which is never summed")
    for axis in sorted(inner.keyed - found):
        raise PlanError(f"tree {schedule.tree}: axis {axis} is summed, which the result keeps")


def _verify_factors(tree: Tree, inner: Inner) -> None:
    known, found = [*inner.stored, *inner.operand], Counter(tree.factors)
    for name, times in found.items():
        if name not in known:
            raise PlanError(f"tree {tree}: there is no factor {name!r}; the einsum has {', '.join(known)}")
        if times > 1:
            raise PlanError(f"tree {tree}: factor {name} occurs {times} times")
    for name in known:
        if name not in found and not (name in inner.stored and inner.may_omit_ones(found)):
            raise PlanError(f"tree {tree}: factor {name} is missing")


def _verify_roles(inner: Inner, schedule: Schedule) -> None:
    """Positions of a tile are at once, in turn or, where the result keeps them, over the grid."""
    take = dict(schedule.take)
    for c in (*take, *schedule.turns):
        if c not in inner.sides:
            raise PlanError(f"the schedule takes positions of {c}, along which nothing stored has a side")
    for c, n in take.items():
        if n < 1 or n & (n - 1):
            raise PlanError(f"positions that are taken at once are a power of two, found {n} of {c}")
    for c, side in inner.sides.items():
        keeps = c in inner.along(inner.kept) or c in inner.output_axes
        if keeps and c in schedule.turns:
            raise PlanError(f"positions of {c} cannot be taken in turn, since the result keeps them")
        if not keeps and c not in schedule.turns and take.get(c, 1) < side:
            raise PlanError(f"the {side} positions of {c} are summed, so they are taken at once or in turn")


class _Check:
    """Goes through a tree from its factors on."""

    def __init__(self, tree: Tree, inner: Inner, around: Sequence[Axis], take: dict[str, int]) -> None:
        self.tree, self.inner, self.around, self.take = tree, inner, around, take
        self.looped = [axis.name for axis in around]

    def fail(self, node: Tree, why: str) -> PlanError:
        return PlanError(f"tree {self.tree}: {node} {why}")

    def axes(self, node: Tree) -> frozenset[str]:
        """The axes on which a node depends."""
        if isinstance(node, Factor):
            return self.inner.axes(node.name)
        parts = [self.axes(part) for part in node.parts]
        found = frozenset().union(*parts)
        over = node.over if isinstance(node, Dot | SumNode) else ()
        for axis in over:
            if over.count(axis) > 1 or any(axis not in part for part in parts):
                raise self.fail(node, f"cannot sum over {axis}, which it has not, or sums twice")
            outside = Counter(self.tree.factors) - Counter(node.factors)
            if late := [name for name in outside if axis in self.inner.axes(name)]:
                raise self.fail(node, f"sums over {axis}, on which {late[0]} depends, a factor outside of it")
        if isinstance(node, Dot):
            self.dot(node, *parts)
        elif isinstance(node, SumNode):
            self.sum(node, found)
        return found - set(over)

    def dot(self, node: Dot, left: frozenset[str], right: frozenset[str]) -> None:
        """The axes of a dot are in registers, and its sides have axes of their own."""
        for axis in node.over:
            if axis in self.looped:
                raise self.fail(node, f"contracts {axis}, whose positions are taken in turn")
        rows, columns = (self.beside(side) - set(node.over) for side in (left, right))
        if rows & columns:
            raise self.fail(node, f"has axis {min(rows & columns)} on both sides, and does not contract it")
        if not rows or not columns:
            raise self.fail(node, f"has a side of no axis but {', '.join(node.over)}")

    def beside(self, axes: frozenset[str]) -> set[str]:
        """Axes among these that are in registers."""
        return {a for a in axes if a == LANES or a in self.take or a in self.inner.dense}

    def sum(self, node: SumNode, axes: frozenset[str]) -> None:
        """Loops are summed from the innermost outwards, dense axes last."""
        dense = [axis for axis in node.over if axis in self.inner.dense]
        if dense and node is not self.tree:
            raise self.fail(node, f"sums over {dense[0]}, which only the whole tree can, or a dot")
        left = set(axes)
        for beside, over in turns_of_sums(node.over, self.looped, self.beside(axes)):
            left -= {*beside, *over}
            if over:
                self.loops(node, over, left)

    def loops(self, node: SumNode, over: Sequence[str], left: Collection[str]) -> None:
        """What is summed over loops depends on no loop inside, and its sum lives where a loop of the view ends."""
        first = min(map(self.looped.index, over))
        if inside := [axis for axis in self.looped[first:] if axis in left]:
            raise self.fail(node, f"sums over {over[0]} before {inside[0]}, whose loop lies inside")
        level = home(self.around, over)
        if sum([axis.level <= level for axis in self.around]) > first:
            raise self.fail(node, f"sums over {over[0]} apart from {self.looped[first - 1]}: both are one sum")


class Contraction:
    """A tree in the making: computations, each of which reads what those before it made, and the tiles of nodes."""

    around: tuple[Axis, ...]
    """The loops, outermost first."""

    def __init__(self, inner: Inner, tree: Tree) -> None:
        """Nothing is computed yet."""
        self.inner, self.tree = inner, tree
        self.order: tuple[str, ...] = (LANES, *inner.dense, *inner.sides)
        """Axes in the order in which tiles have them."""
        self.statements: list[Statement] = []
        self.made: dict[Tree, Tile] = {}
        self.dots = [node for node in tree.nodes if isinstance(node, Dot)]
        # What nothing but the last sums follows is the result.
        self.last = tree.tree if isinstance(tree, SumNode) and not self._over(tree) else tree

    def load(self, factor: str) -> Value | Gather:
        """What reads a factor."""
        raise NotImplementedError

    def decodes(self, level: int) -> list[Decode]:
        """What reads the coordinates of one level."""
        raise NotImplementedError

    def make(self, statement: Value | Scale | Gather | Product | Sum) -> Tile:
        """What a statement makes."""
        self.statements.append(statement)
        return statement.out

    def called(self, name: str) -> str:
        """The name, with a number where it is taken."""
        taken, number = {s.out.name for s in self.statements if isinstance(s, Product | Sum)}, 1
        while (own := f"{name}{number}" if number > 1 else name) in taken:
            number += 1
        return own

    def multiply(self, name: str, factors: Sequence[Tile]) -> Tile:
        """The product of tiles, which sums no axis: the axes of a dot stay together, and come first."""
        axes = [a for t in factors if t.folded for a in t.axes]
        axes += [a for a in self._axes(factors) if a not in axes]
        return self.make(Product(Tile(self.called(name), tuple(axes), _level(factors)), tuple(factors)))

    def dot(self, name: str, left: Sequence[Tile], right: Sequence[Tile], over: Iterable[str]) -> Tile:
        """The matrix product of two sides, whose rows and columns are the axes of each side that are not summed."""
        rows, columns = self._free(left, set(over)), self._free(right, set(over))
        out = Tile(self.called(name), (*rows, *columns), _level((*left, *right)), folded=len(rows))
        return self.make(Product(out, tuple(left), tuple(right)))

    def sum(self, name: str, tile: Tile, over: Iterable[str]) -> Tile:
        """A tile summed over those of the axes that it has; itself where it has none of them."""
        summed = set(over)
        axes = tuple([a for a in tile.axes if a not in summed])
        return self.make(Sum(Tile(self.called(name), axes, tile.level), tile)) if axes != tile.axes else tile

    def accumulate(self, name: str, tile: Tile, level: int) -> Tile:
        """The sum of a tile, the last that was made, over the loops inside a level.

        A product is added up by the statement that multiplies.
        """
        last = self.statements[-1]
        if isinstance(last, Product) and last.out == tile and not last.accumulate:
            self.statements.pop()
            return self.make(replace(last, out=replace(tile, name=self.called(name), level=level), accumulate=True))
        return self.make(Product(replace(tile, name=self.called(name), level=level), (tile,), accumulate=True))

    def _axes(self, tiles: Sequence[Tile]) -> tuple[str, ...]:
        """The axes that tiles have together; one alone keeps the order of its own."""
        present = {a for t in tiles for a in t.axes}
        return tuple([a for a in self.order if a in present]) if len(tiles) > 1 else tiles[0].axes

    def _free(self, side: Sequence[Tile], over: set[str]) -> list[str]:
        """The axes of a dot's side that are not summed, positions of a stored tile before dense ones."""
        return sorted([a for a in self._axes(side) if a not in over], key=self.inner.dense.__contains__)

    # -- the tree ---------------------------------------------------------------------------------------------------
    def run(self) -> Tile:
        """What is to be added to the output: factors are read, and what dots take is multiplied, as soon as known."""
        late = set(self._late())
        factors = (*self.inner.stored, *self.inner.operand)
        wanted = [name for name in factors if name in self.tree.factors and name not in late]
        for level in range(len(LEVELS)):
            self.statements += self.decodes(level)
            for name in wanted:
                if self.inner.levels[name] == level:
                    self.tile(Factor(name))
            for node in self._early(level):
                self.tile(node)
        return self.tile(self.tree)

    def level(self, node: Tree) -> int:
        """The level at which a node is known."""
        if isinstance(node, Factor):
            return self.inner.levels[node.name]
        if isinstance(node, SumNode) and self._loops(node.over):
            return home(self.around, node.over)
        return max(map(self.level, node.parts))

    def _early(self, level: int) -> list[Tree]:
        """The products of factors that a dot takes, and that are known at a level above the dot's."""
        sides = [(side, dot) for dot in self.dots for side in dot.parts if isinstance(side, Multiply)]
        return [side for side, dot in sides if self.level(side) == level < self.level(dot)]

    def _late(self) -> list[str]:
        """Factors that positions of a tile are multiplied by after a sum over loops: they are read then."""
        products = [node for node in self.tree.nodes if isinstance(node, Multiply)]
        after = [p for p in products if any(isinstance(t, SumNode) and self._loops(t.over) for t in p.trees)]
        return [t.name for p in after if any(map(self._along, p.factors)) for t in p.trees if isinstance(t, Factor)]

    def _along(self, factor: str) -> bool:
        """Whether a program has several positions along a stored tile of a factor at once."""
        return bool(set(self.load(factor).out.axes) - {LANES, *self.inner.dense})

    # -- nodes ------------------------------------------------------------------------------------------------------
    def tile(self, node: Tree) -> Tile:
        """The tile of a node, made once."""
        if node not in self.made:
            self.made[node] = self._make(node)
        return self.made[node]

    def _make(self, node: Tree) -> Tile:
        if isinstance(node, Factor):
            return self.make(self.load(node.name))
        if isinstance(node, Multiply):
            return self.multiply(self._product_name(node), [self.tile(part) for part in node.trees])
        if isinstance(node, Dot):
            return self.dot("part", self._side(node.left, node), self._side(node.right, node), node.over)
        assert isinstance(node, SumNode)
        return self._sum(node)

    def _side(self, side: Tree, dot: Dot) -> list[Tile]:
        """What a side of a dot is the product of: over the lanes, which each step has anew, its factors."""
        fused = isinstance(side, Multiply) and LANES in dot.over and self.level(side) == self.level(dot)
        return [self.tile(part) for part in (side.parts if fused else (side,))]

    def _product_name(self, node: Multiply) -> str:
        for dot, name in zip(self.dots, "wv", strict=False):
            if node in dot.parts and all(isinstance(part, Factor) for part in node.trees):
                return name
        if all(isinstance(part, Factor) for part in node.trees):
            return "term"
        return "result" if node == self.last else "scaled"

    def _loops(self, over: Iterable[str]) -> list[Axis]:
        return [axis for axis in self.around if axis.name in over]

    def _over(self, node: SumNode) -> tuple[str, ...]:
        """What a sum is over, without what is left to the end."""
        if node != self.tree:
            return node.over
        end = [a == LANES or a in self.inner.dense for a in node.over]
        while end and end[-1]:
            end.pop()
        return node.over[: len(end)]

    def _sum(self, node: SumNode) -> Tile:
        """Registers and loops are summed as they come."""
        tile = self.tile(node.tree)
        looped = [axis.name for axis in self.around]
        for beside, loops in turns_of_sums(self._over(node), looped, tile.axes):
            tile = self.sum("step" if loops else "summed", tile, beside)
            for name, own in self._named(loops):
                tile = self.accumulate(name, tile, home(self.around, own))
        return tile

    def _named(self, loops: Sequence[str]) -> list[tuple[str, list[str]]]:
        """(what the sum over some loops is called, the loops), the innermost first."""
        found: dict[str, list[str]] = {}
        for axis in reversed(self._loops(loops)):
            found.setdefault(axis.sums, []).append(axis.name)
        return [*found.items()]


def _level(tiles: Iterable[Tile]) -> int:
    """The level at which the product of some tiles is known."""
    return max([t.level for t in tiles])
