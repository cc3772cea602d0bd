"""The einsum of one work item: stored values and dense operands over the axes of a view.

In: a `Bound` einsum with one sparse operand and the `Nest` of a packed part, which is the view, or the axes of two
operands of tiles; a `Target`. Out: `Inner`, for which a tree is chosen, checked and lowered. `verify_tree` makes sure
that the tree has every factor once, and sums every axis once and where it can; its errors name the node and the fault.

Two operands of tiles, ``x[row, inner] y[column, inner] -> z[row, column]``, are one task list (`Inner.of_pairs`)::

    loop pairs of the item
      x = tile pair_x of X;  y = tile pair_y of Y
      total += dot over inner                # or, without a dot, a loop over inner that multiplies and adds
    store Z[item, row, column] = total

In the precision f16x3 tiles are stored in halves, and the total is multiplied by the scales of its rows, then by those
of its columns: never by their product, which may be no float32. An axis too short for a dot is padded in registers: its
positions past the tile are masked when loaded. One that has no letters is of one position.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod

from sparsetc.errors import FormatError, PlanError
from sparsetc.ir.contraction_tree import Tree, order_of_sums
from sparsetc.ir.equation.einsum import Bound
from sparsetc.ir.nest import (
    ITEM,
    LANES,
    LEAF,
    LEVELS,
    PAIRED,
    Axis,
    Bitmap,
    Halves,
    Nest,
    Whole,
    home,
    pairs,
    with_inputs,
)
from sparsetc.ir.plan import Schedule
from sparsetc.ir.program import Decode, Key, Operand, Stored, named_operands, printed_sizes, stored_of
from sparsetc.support import Ints, Letters, NamedInts, Names, among, cached_property, row_major

X = "X"
"""The name of stored values in a tree."""
Fold = NamedInts
"""(letter, positions) of the letters that make an axis, row-major."""


@dataclass(frozen=True)
class Target:
    """The purpose of a program: where its results go (rows of an output, slots, or nonzeros), and limits.

    Attributes:
        sparse: whether a slot or a nonzero's position says where a result goes, in place of its coordinates.
        in_operand_order: whether the part keeps the operand's own order, so that a nonzero's position is its slot.
        owned: whether no two items add to one row, so that results may be stored.
        rows: rows of the output.
        index64: whether positions of the stored nonzeros need 64 bits.
        at_once: whether torch is to run it, which takes all rows of a level at once, and whole axes.
        ones: whether every value is 1, at every call, so that none is read.
        strides: of the rows of a dense output, and of its dense axes, where it does not lie as (rows, axes).
    """

    sparse: bool = False
    in_operand_order: bool = False
    owned: bool = False
    rows: int = 1
    index64: bool = False
    at_once: bool = False
    ones: bool = False
    strides: Ints = ()


@dataclass(frozen=True, eq=False)
class Inner:
    """The computation of one work item: factors by name, their letters, and the letters that the result keeps.

    Attributes:
        view: the nest, whose axes are walked.
        target: the purpose of the program.
        letters: letters of the sparse operand, by mode; of pairs of tiles, the axes of a pair.
        stored: the sparse operands by name, as factors of stored values.
        sides: positions along a tile's sides, by letter; empty without tiles. Letters that ride along others have none.
        key: where results go.
        output: the name of the output.
        output_axes: letters of the output that the sparse operand has not; of pairs, the free axes.
        operands: the dense operands.
        dense: letters that only dense operands have, in the order in which tiles have them.
        kept: letters of the sparse operand that the output has.
        sizes: of all letters, at least 1 each.
        folds: the letters, with their positions, of an axis along a tile that stands for several.
    """

    equation: str
    view: Nest
    target: Target
    letters: Names
    stored: Mapping[str, Stored]
    sides: Mapping[str, int]
    key: Key
    output: str
    output_axes: Names
    operands: tuple[Operand, ...] = ()
    dense: Names = ()
    kept: Names = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    folds: Mapping[str, NamedInts] = field(default_factory=dict)

    @classmethod
    @lru_cache(maxsize=1024)
    def of(cls, bound: Bound, view: Nest, target: Target) -> Inner:
        """An einsum with one sparse operand; `PlanError` where the view is not of its order, or a letter repeats."""
        e = bound.einsum
        (sparse,) = e.sparse
        letters, sizes = e.inputs[sparse], printed_sizes(bound)
        if not len(letters) == len({*letters}) == len(view.mode_levels):
            raise PlanError(f"a view of order {view.order} cannot serve the sparse operand {''.join(letters)!r}")
        output, operands = named_operands(bound, as_given=not target.at_once)
        stored = stored_of(view, letters)
        return cls(
            equation=str(e),
            view=view,
            target=target,
            letters=letters,
            stored={X: stored},
            sides=dict(zip(stored.letters, stored.values.sides, strict=True)),
            key=_key(letters, e.kept, view, target, sizes),
            output=output,
            output_axes=e.free,
            operands=operands,
            dense=e.axes,
            kept=e.kept,
            sizes=sizes,
        )

    @classmethod
    def of_pairs(
        cls, equation: str, folds: tuple[Fold, Fold, Fold], halves: bool, target: Target, bitmaps: tuple[bool, bool]
    ) -> Inner:
        """An einsum of two operands of tiles; arguments and errors are those of `lower_pairs`."""
        letters = [c for fold in folds for c, _ in fold]
        if len(set(letters)) != len(letters):
            raise PlanError(f"rows, columns and inner positions share no letter, found {''.join(letters)!r}")
        named = dict(zip(map(_name, folds, ("row", "column", "inner")), folds, strict=True))
        (row, column, inner), sides = named, {name: prod(side for _, side in fold) for name, fold in named.items()}
        if halves and any(bitmaps):
            raise FormatError("what is in halves are tiles, stored whole")
        tiles = []
        for c, bitmap in zip((row, column), bitmaps, strict=True):  # row-major, bits in the widest words that they fill
            # Triton lays out a dot's sides by the narrowest load that their addresses depend on, and aborts where that
            # is narrower than 32 bits and the values are of 64 (3.6, 3.7).
            word = max(8, min(32, sides[c] * sides[inner]))
            kind = Halves if halves else Whole
            tiles.append((Bitmap if bitmap else kind)((sides[c], sides[inner]), (0, 1), word=word))
        view = pairs(*tiles)
        view.verify()
        return cls(
            equation=equation,
            view=view,
            target=replace(target, owned=True),
            letters=tuple(named),
            stored={
                name.upper(): Stored(name, (c, inner), tiles)
                for name, c, tiles in zip(PAIRED, (row, column), view.pairs, strict=True)
            },
            sides=sides,
            key=Key("position", ITEM),
            output="Z",
            output_axes=(row, column),
            folds=named,
        )

    def may_omit_ones(self, factors: Letters) -> bool:
        """True if values are all 1 and a tree may leave them out: one of its factors is read for each nonzero."""
        return not self.view.values.held and any(self.levels[name] == LEAF for name in factors)

    @cached_property
    def operand(self) -> dict[str, Operand]:
        """The dense operands by name."""
        return {o.name: o for o in self.operands}

    def depth(self, letters: Names) -> int:
        """Return the level at which the coordinates of all these letters are known."""
        return max([self.view.mode_levels[self.letters.index(c)] for c in letters], default=ITEM)

    def along(self, letters: Names) -> Names:
        """Return the sides of a tile along which the coordinates of these letters vary, once each."""
        return among(self.view.read_along(self.letters, letters), self.sides) if self.sides else ()

    @cached_property
    def levels(self) -> dict[str, int]:
        """The level at which each factor is read."""
        return dict.fromkeys(self.stored, LEAF) | {o.name: self.depth(o.rows) for o in self.operands}

    @cached_property
    def axes(self) -> dict[str, frozenset[str]]:
        """The axes on which each factor depends."""
        read: dict[str, Letters] = {name: o.letters for name, o in self.stored.items()}
        read |= {o.name: (*o.axes, *self.along(o.rows)) for o in self.operands}
        return {name: frozenset((*self.view.walked[level], *read[name])) for name, level in self.levels.items()}

    @cached_property
    def decodes(self) -> list[list[Decode]]:
        """The statements that read the wanted coordinates of each level, those along a tile's side after the tile's."""
        view, letters = self.view, self.letters
        kept = self.kept if self.key.kind == "row" else ()
        addressed = {letters.index(c) for c in (*kept, *[c for o in self.operands for c in o.rows])}
        wanted = with_inputs({*addressed}, view.coordinates)
        levels: list[list[Decode]] = [[] for _ in LEVELS]
        for mode, coordinate in view.coordinates.items():
            letter, level = letters[mode], view.mode_levels[mode]
            placed = view.along.get(mode)
            if mode in wanted and (placed is None or not coordinate.sides):
                levels[level].append(Decode(letter, coordinate, level, tile=placed is not None))
            if mode in addressed and placed is not None:
                size, along = self.sizes[letter], self.along((letter,))
                end = 0 if view.within(mode, size) else size
                levels[level].append(Decode(letter, placed, level, along=along, end=end))
        return levels

    @cached_property
    def keyed(self) -> frozenset[str]:
        """The axes on which the result depends."""
        return frozenset((*self.view.walked[self.key.level], *self.output_axes, *self.along(self.kept)))

    @cached_property
    def summed(self) -> Names:
        """The dense axes that the output lacks."""
        return tuple([a for a in self.dense if a not in self.output_axes])


def _name(fold: Fold, role: str) -> str:
    """Return the name of an axis: its letters, or its role if it has none; never the name of the lanes or pairs."""
    name = "".join(c for c, _ in fold) or f"one_{role}"
    return f"{name}_{role}" if name in (LANES, "pair") else name


def _key(letters: Names, kept: Names, view: Nest, target: Target, sizes: Mapping[str, int]) -> Key:
    """Return the key of results; it is known at the level that has all letters of the output."""
    level = max([view.mode_levels[letters.index(c)] for c in kept], default=ITEM)
    if not target.sparse:  # the row-major index of the kept letters
        return Key("row", level, kept, tuple(row_major([sizes[c] for c in kept])))
    sides = {letters[mode] for mode in view.sided}
    if target.in_operand_order and not sides and len(kept) == len(letters):
        return Key("position", LEAF)
    along = among(view.read_along(letters, kept), sides)
    return Key("slot", level, along, array=f"{LEVELS[level]}_slot")


def verify_tree(inner: Inner, schedule: Schedule, around: Sequence[Axis]) -> None:
    """Raise `PlanError` if the schedule's tree does not fit this einsum and these loops, or cannot be lowered."""
    tree = schedule.tree
    assert tree is not None
    factors, occurrences = [*inner.stored, *inner.operand], Counter(tree.factors)
    for name, times in occurrences.items():
        if name not in factors:
            raise PlanError(f"tree {tree}: there is no factor {name!r}; the einsum has {', '.join(factors)}")
        if times > 1:
            raise PlanError(f"tree {tree}: factor {name} occurs {times} times")
    for name in factors:
        if name not in occurrences and not (name in inner.stored and inner.may_omit_ones(occurrences)):
            raise PlanError(f"tree {tree}: factor {name} is missing")
    _verify_roles(inner, schedule)
    axes = _axes_of(tree, inner, around, dict(schedule.tile_sizes))
    for axis in sorted(axes - inner.keyed):
        raise PlanError(f"tree {tree}: the result has no axis {axis}, which is never summed")
    for axis in sorted(inner.keyed - axes):
        raise PlanError(f"tree {tree}: axis {axis} is summed, which the result keeps")


def _verify_roles(inner: Inner, schedule: Schedule) -> None:
    """Check that positions along each side are taken at once, in turn or, if the result keeps them, over the grid."""
    tile_sizes = dict(schedule.tile_sizes)
    for c in (*tile_sizes, *schedule.tile_loops):
        if c not in inner.sides:
            raise PlanError(f"the schedule takes positions of {c}, along which nothing stored has a side")
    for c, n in tile_sizes.items():
        if n < 1 or n & (n - 1):
            raise PlanError(f"positions that are taken at once are a power of two, found {n} of {c}")
    for c, side in inner.sides.items():
        keeps = c in inner.along(inner.kept) or c in inner.output_axes
        if keeps and c in schedule.tile_loops:
            raise PlanError(f"positions of {c} cannot be taken in turn, since the result keeps them")
        if not keeps and c not in schedule.tile_loops and tile_sizes.get(c, 1) < side:
            raise PlanError(f"the {side} positions of {c} are summed, so they are taken at once or in turn")


def _axes_of(tree: Tree, inner: Inner, around: Sequence[Axis], tile_sizes: Mapping[str, int]) -> frozenset[str]:
    """Return the axes on which a tree depends. Raise `PlanError` at the first invalid node, factors first."""
    looped = [axis.name for axis in around]

    def fail(node: Tree, why: str) -> PlanError:
        return PlanError(f"tree {tree}: {node} {why}")

    def in_registers(axes: frozenset[str]) -> set[str]:
        return {a for a in axes if a == LANES or a in tile_sizes or a in inner.dense}

    def axes_of(node: Tree) -> frozenset[str]:
        if node.kind == "factor":
            return inner.axes[node.name]
        parts = [axes_of(part) for part in node.parts]
        axes = frozenset().union(*parts)
        for axis in node.over:
            if node.over.count(axis) > 1 or any(axis not in part for part in parts):
                raise fail(node, f"cannot sum over {axis}: it does not depend on it, or sums it twice")
            others = Counter(tree.factors) - Counter(node.factors)
            if late := [name for name in others if axis in inner.axes[name]]:
                raise fail(node, f"sums over {axis}, on which {late[0]} depends, a factor outside of it")
        if node.kind == "dot":
            check_dot(node, *parts)
        elif node.kind == "sum":
            check_sum(node, axes)
        return axes - set(node.over)

    def check_dot(node: Tree, left: frozenset[str], right: frozenset[str]) -> None:
        """Check that the axes of a dot are in registers, and its sides have axes of their own."""
        for axis in node.over:
            if axis in looped:
                raise fail(node, f"contracts {axis}, whose positions are taken in turn")
        rows, columns = (in_registers(side) - set(node.over) for side in (left, right))
        if rows & columns:
            raise fail(node, f"has axis {min(rows & columns)} on both sides, and does not contract it")
        if not rows or not columns:
            raise fail(node, f"has a side of no axis but {', '.join(node.over)}")

    def check_sum(node: Tree, axes: frozenset[str]) -> None:
        """Check that loops are summed from the innermost outwards, dense axes last."""
        dense = among(node.over, inner.dense)
        if dense and node is not tree and inner.view.innermost.lanes:
            raise fail(node, f"sums over {dense[0]}, which only the whole tree can, or a dot")
        left = set(axes)
        for beside, over in order_of_sums(node.over, looped, in_registers(axes)):
            left -= {*beside, *over}
            if not over:
                continue
            # What is summed over loops depends on no loop inside, and its sum lives where a loop of the view ends.
            first = min(map(looped.index, over))
            if inside := among(looped[first:], left):
                raise fail(node, f"sums over {over[0]} before {inside[0]}, whose loop lies inside")
            level = home(around, over)
            if sum([axis.level <= level for axis in around]) > first:
                raise fail(node, f"sums over {over[0]} apart from {looped[first - 1]}: both are one sum")

    return axes_of(tree)
