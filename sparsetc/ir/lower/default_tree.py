"""Lowering by a schedule's own tree or the default rule's: the tree of one that has none, and roles of positions.

In: an einsum, a view and a `Schedule`. Out: a `TileProgram`. What the rule contracts follows from the axes::

    nonzeros    `by_levels`     sums from the innermost loop outwards, a dot over the lanes where two sides have none of
                                the other's dense axes
    tiles       `by_groups`     the letters of a tile in groups, by the fewest multiplications
    pairs       `by_pairs`      one dot, or a loop over what it would sum

Of nonzeros everything follows from the level at which each thing is known. A dense operand is read at the deepest level
of the sparse letters it has; a product is formed at the level of its deepest factor and summed over that level before
the factors of the next one are multiplied in (the distributive law). So a fiber's nonzeros are summed before the factor
row they share is multiplied in: R(2M + 2F) flops instead of 3MR (MM-CSF, section III).

What the rule gives for tiles, with C the operands of what a dot sums, B those of what lies beside, D of kept letters
alone::

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

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, combinations
from math import prod
from typing import TypeVar

from sparsetc.ir.contraction_tree import Tree, dot, factors, product, total
from sparsetc.ir.equation.einsum import Bound, joined
from sparsetc.ir.lower.inner import Fold, Inner, Target
from sparsetc.ir.lower.lowering import lowered
from sparsetc.ir.nest import ITEM, LEAF, LEVELS, Nest, Values
from sparsetc.ir.plan import F16X3, Schedule, Storage
from sparsetc.ir.program import LANES, MIN_DOT, WARPGROUP, Operand, Stored, TileProgram, named_operands, printed_sizes
from sparsetc.support import Ints, Letters, NamedInts, Names, among, cached_property, outside, volume

T = TypeVar("T")
SAMPLED = 4096
"""Most positions of a tile at which a dense product is sampled."""
COLUMNS = 256
"""Most columns of a dot over tiles."""
MATRIX_RATE = 8
"""Multiplications a tensor core does while the others do one (H200, tf32 against fp32 outside dots)."""
MOST_SUMS = 4096
"""Sums that a warp keeps, 128 a thread: of more, most would be kept in memory."""


def lower(
    bound: Bound, view: Nest, schedule: Schedule, target: Target, *, number: int = 0, format: str = ""
) -> TileProgram:
    """Lower one part to its tile program. Raise `PlanError` if the view cannot serve the einsum."""
    return _lowered(bound, view, schedule.by_rule(), target, number, format)


@lru_cache(maxsize=1024)
def _lowered(bound: Bound, view: Nest, schedule: Schedule, target: Target, number: int, format: str) -> TileProgram:
    # Native loops that cut nothing are the same program, which was drafted for its price.
    cut = schedule.native and bool(schedule.slowest_axes)
    program = drafted(bound, view, replace(schedule, native=cut), target)
    run = replace(program.schedule, native=schedule.native)
    return replace(program, number=number, format=format, schedule=run)


@lru_cache(maxsize=1024)
def drafted(bound: Bound, view: Nest, schedule: Schedule, target: Target) -> TileProgram:
    """Lower one part by a schedule without the default rule's tree, and without its number and its format."""
    read = view.taking(1 if target.at_once else schedule.lanes)
    read = read.of_ones() if target.ones else read
    inner = Inner.of(bound, read.in_halves() if schedule.precision == F16X3 else read, target)
    return lowered(inner, completed(inner, schedule), "")


@lru_cache
def lower_pairs(
    equation: str,
    folds: tuple[Fold, Fold, Fold],
    schedule: Schedule,
    target: Target,
    *,
    bitmaps: tuple[bool, bool] = (False, False),
) -> TileProgram:
    """The tile program of a contraction of tiles.

    Args:
        equation: what the reader is told.
        folds: of rows, columns and inner; sides are powers of two. No letter is in two of them.
        schedule: dot or multiply, its precision, warps and stages. f16x3 has both operands stored in halves.
        target: rows of the output, a block each, and whether positions of stored values need 64 bits.
        bitmaps: whether each operand is stored as bitmaps and packed values.

    Raises:
        PlanError, FormatError: sides that are not powers of two, letters that repeat, or bitmaps in f16x3.
    """
    inner = Inner.of_pairs(equation, folds, schedule.precision == F16X3, target, bitmaps)
    formats = ["bcb" if tiles.volume > 1 else "coo" for tiles in inner.view.pairs]
    return lowered(inner, completed(inner, schedule), " x ".join(formats))


def completed(inner: Inner, schedule: Schedule) -> Schedule:
    """Return the schedule, completed with the tree that the default rule gives where it has none."""
    if schedule.tree is not None:
        return schedule
    rule = by_groups if inner.sides else by_levels
    if len(inner.stored) > 1:
        rule = by_pairs
    full = rule(inner, schedule)
    return replace(full, ruled=(full.tree, full.tile_sizes, full.tile_loops))


def by_pairs(inner: Inner, schedule: Schedule) -> Schedule:
    """The tree of pairs: a dot over the inner axis, or a loop over its positions, which multiplies and adds each.

    Args:
        inner: two factors of stored values, and no others.
        schedule: whether there are dots.
    """
    x, y = factors(inner.stored)
    loops = tuple(axis.name for axis in inner.view.loops)
    over = outside(inner.sides, inner.output_axes)
    if schedule.dot:
        tile_sizes = tuple((c, max(side, MIN_DOT)) for c, side in inner.sides.items())
        return replace(schedule, tree=total([dot(x, y, over)], loops), tile_sizes=tile_sizes)
    tile_sizes = tuple((c, side) for c, side in inner.sides.items() if c not in over)
    return replace(schedule, tree=total((x, y), (*over, *loops)), tile_sizes=tile_sizes, tile_loops=over)


def by_levels(inner: Inner, schedule: Schedule) -> Schedule:
    """Return the schedule with the tree of nonzeros; the result's level multiplies in all that is known above it."""
    if tree := _of_entries(inner, schedule):
        return replace(schedule, tree=tree)
    reach, read = inner.key.level, [list[Tree]() for _ in LEVELS]
    stored = () if inner.may_omit_ones(inner.operand) else inner.stored
    for tree in factors([*stored, *sorted(inner.operand, key=inner.levels.__getitem__)]):
        read[max(inner.levels[tree.name], reach)].append(tree)
    inputs, around = read[LEAF], [axis.level for axis in inner.view.loops]
    contracted = set[str]()
    for axis in reversed(inner.view.loops):
        around.pop()
        home = max(around, default=ITEM)
        if home >= reach:
            # Lanes are summed with the outermost loop that has them.
            lanes = axis.lanes > 0 and not inner.view.beside[home]
            step = lanes or (not axis.lanes and axis.level == LEAF)
            matrix = _matrix_product(inner, schedule, inputs) if step and schedule.dot else None
            over = (axis.name, LANES) if lanes and not matrix else (axis.name,)
            contracted |= {*matrix.over} if matrix else set()
            inputs = [total([matrix] if matrix else inputs, over), *read[home]]
    if reach == LEAF and schedule.dot and not inner.view.innermost.lanes:  # a result for each entry
        after = [tree for tree in inputs if not _dense(inner, tree) & {*inner.summed}]
        matrix = _matrix_product(inner, schedule, outside(inputs, after))
        if matrix:
            contracted, inputs = {*matrix.over}, [matrix, *after]
    return replace(schedule, tree=total(inputs, [a for a in inner.summed if a not in contracted]))


def _of_entries(inner: Inner, schedule: Schedule) -> Tree | None:
    """Return the tree of one entry a step, whose dense modes are the sides of a tile, with the dots and sums of tiles.

    None where several nonzeros lie side by side, where a block of an entry is less than the entry, and where one dot
    of two factors is all there is.
    """
    tables = [o for o in inner.operands if {*inner.letters[:1]} <= {*o.rows}]
    if (
        not schedule.dot
        or len(tables) != 1
        or len(inner.operands) < 3
        or inner.view.values.held
        or inner.view.innermost.lanes
    ):
        return None
    (x,) = tables
    side = {c: schedule.block(c) for c in x.axes}
    others = tuple([replace(o, rows=among(o.axes, side), axes=outside(o.axes, side)) for o in inner.operands if o != x])
    if any(inner.levels[o.name] < LEAF for o in others) or any(n < inner.sizes[c] for c, n in side.items()):
        return None
    groups = _divided(tuple(side.items()), tuple(inner.sizes.items()), inner.output_axes, others, True, True)
    if not groups.first or groups.gridded:
        return None
    dense = outside(inner.dense, side)
    stored = {x.name: Stored("", x.axes, Values())}
    tiles = replace(inner, operands=others, stored=stored, kept=inner.output_axes, dense=dense)
    return _tree(tiles, groups, ())


def _matrix_product(inner: Inner, schedule: Schedule, factors: Sequence[Tree]) -> Tree | None:
    """Sum the lanes by a matrix product; or the lanes and dense axes together, of blocks that nonzeros gather."""
    lanes = inner.view.beside[LEAF]
    if lanes and inner.view.lanes >= MIN_DOT and (sides := _matrix_sides(inner, schedule, factors, frozenset())):
        return dot(product(sides[0]), product(sides[1]), (LANES,))
    if not inner.summed:
        return None
    names = {name for tree in factors for name in tree.factors}
    beside = _axes(o for o in inner.operands if o.name not in names)
    sides = _matrix_sides(inner, schedule, factors, frozenset(inner.summed) - beside)
    if sides is None:
        return None
    left, right = map(product, sides)
    over = [c for c in outside(inner.summed, beside) if c in _dense(inner, left) & _dense(inner, right)]
    if not lanes:
        left, right = _as_loaded(inner, schedule, left, right, over)
    deep = inner.view.lanes * prod(map(schedule.block, over))
    single = lanes and inner.view.lanes == 1  # a lane alone is multiplied
    return dot(left, right, (*lanes, *over)) if over and not single and deep >= MIN_DOT else None


def _as_loaded(inner: Inner, schedule: Schedule, left: Tree, right: Tree, over: Letters) -> tuple[Tree, Tree]:
    """Return the left and the right side of a dot of tables, of which the right one is as large or larger.

    Where one is too short for Hopper's instruction, what is summed is last on the left and first on the right, as far
    as they are loaded so: loads ahead of a dot that takes them turned pass through registers, one at a time. Of two as
    long as each other, the right one has what the result has last.
    """
    free = {side: _dense(inner, side) - {*over} for side in (left, right)}
    size = {side: prod(map(schedule.block, axes)) for side, axes in free.items()}
    short, even = size[left] < WARPGROUP, size[left] == size[right]

    def place(side: Tree) -> tuple[bool, int]:
        first = any(inner.operand[name].axes[0] in over for name in side.factors if inner.operand[name].axes)
        return short and first, even * max(map(inner.dense.index, free[side]))

    return tuple(sorted((left, right), key=place))  # type: ignore[return-value]


def _matrix_sides(
    inner: Inner, schedule: Schedule, factors: Sequence[Tree], summed: frozenset[str]
) -> tuple[list[Tree], list[Tree]] | None:
    """Two sets of factors with no dense axis in common but some that are summed, each with enough of its own."""
    groups = joined((_dense(inner, tree) - summed, tree) for tree in factors)
    sized = sorted([g for g in groups if g[0]], key=lambda g: -prod(map(schedule.block, g[0])))
    if len(sized) < 2:
        return None
    # The largest group is one side; all others, and the values, are multiplied into the other.
    right, left = sized[0][1], [t for g in (*[g for g in groups if not g[0]], *sized[1:]) for t in g[1]]
    sides = [prod(map(schedule.block, axes)) for axes in (set().union(*[g[0] for g in sized[1:]]), sized[0][0])]
    return (left, right) if min(sides) >= MIN_DOT else None


def _dense(inner: Inner, tree: Tree) -> set[str]:
    """The dense axes of a tree's factors."""
    return _axes(inner.operand[name] for name in tree.factors if name in inner.operand)


# -- tiles ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TileGroups:
    """The letters of a tile, by what becomes of them; each in one group.

    Attributes:
        first: summed by the first dot; empty where there is none, and positions are multiplied one by one.
        second: summed by the second dot, whose left side is what the first left of them.
        spread: summed beside the dots: columns of the first, or one position at a time.
        columns: kept, all positions at once; with a second dot, as many as a program's matrix has room for.
        gridded: kept, one position a program.
        sampled: operands, by name, of the two sides of a dot over their dense axes, which is multiplied by what is
            stored.
    """

    first: Names = ()
    second: Names = ()
    spread: Names = ()
    columns: Names = ()
    gridded: Names = ()
    sampled: tuple[Names, Names] = ((), ())

    @cached_property
    def contracted(self) -> Names:
        """Return the letters with all positions in one column of the first dot: of the second dot, then the first."""
        return (*self.second, *self.first)

    def storage(self, letters: Names, most: int) -> Storage:
        """Return the storage of tiles: blocks of output rows, `most` positions an item, in the order of the dots."""

        def modes(*names: str) -> Ints:
            return tuple([letters.index(c) for c in names])

        item, rest = modes(*self.gridded, *self.columns), modes(*self.spread, *self.contracted)
        # A dot's columns lie contiguous, what it sums last.
        sequence = modes(*self.gridded, *self.spread, *self.columns, *self.contracted)
        return Storage(item, rest, max_item_nnz=most, sequence=sequence, contracted=len(self.contracted))


@lru_cache
def groups_of(bound: Bound, sides: Ints, dot: bool = True) -> TileGroups:
    """The division of the sparse operand's letters that takes the fewest multiplications.

    Args:
        bound: an einsum whose one sparse operand has distinct letters.
        sides: positions of a tile along each of its modes.
        dot: whether the type has a matrix instruction.
    """
    e = bound.einsum
    side, sizes = tuple(zip(e.inputs[e.sparse[0]], sides, strict=True)), tuple(printed_sizes(bound).items())
    return _divided(side, sizes, e.output, named_operands(bound)[1], dot, True)


@lru_cache
def _divided(
    sides: NamedInts, sizes: NamedInts, output: Names, operands: tuple[Operand, ...], dot: bool, wide: bool
) -> TileGroups:
    """Divide the letters that have sides. Return the division that takes the fewest multiplications.

    Args:
        sides: positions of a tile by letter.
        sizes: of all letters.
        output: letters of the result.
        operands: the dense ones.
        dot: whether the type has a matrix instruction.
        wide: whether a program has enough of the dense axes for a dot to sum them.
    """
    side, size = dict(sides), dict(sizes)
    letters = tuple(side)
    kept, summed = among(letters, output), outside(letters, output)
    inner = [o for o in operands if {*o.rows} & {*summed}]  # the others scale the result once
    gridded = among(kept, {c for o in inner for c in o.rows})
    free = outside(kept, gridded)
    # Summed letters that an operand has together stay together; of equal classes, the last comes first.
    classes = sorted(
        joined(({*o.rows} & {*summed}, o) for o in inner), key=lambda own: -max(map(letters.index, own[0]))
    )

    def width(own: Iterable[Operand]) -> int:
        """Return the number of elements over all dense axes of some operands."""
        return volume(size, _axes(own))

    def joint(some: Iterable[tuple[set[str], list[Operand]]]) -> tuple[Names, list[Operand]]:
        """Return the letters and the operands of some classes."""
        together, own = zip(*some, strict=True)
        return among(letters, set().union(*together)), list(chain(*own))

    def single() -> Iterator[tuple[int, TileGroups]]:
        """Yield divisions with one dot, with their cost: all dense axes that vary along summed letters are its rows."""
        axes, columns = _axes(inner), Names()
        for c in reversed(free):  # as many of the last kept letters as the columns hold
            if volume(side, (c, *columns)) > COLUMNS:
                break
            columns = (c, *columns)
        others = free[: len(free) - len(columns)]
        for chosen in _subsets(classes, len(classes) if axes else 0):
            first, own = joint(chosen)
            spread = outside(summed, first)
            beside = volume(side, (*columns, *spread))
            if _axes(own) != axes or beside < 2 or (not columns and beside < MIN_DOT):
                continue
            rows, deep = width(own), max(MIN_DOT, volume(side, first))
            formed = volume(side, first) * rows if len(own) > 1 else 0
            scaled = rows * beside if spread else 0
            cost = formed + scaled + rows * max(MIN_DOT, beside) * deep // MATRIX_RATE
            yield cost * volume(side, others), TileGroups(first, (), spread, columns, (*gridded, *others))

    def chained() -> Iterator[tuple[int, TileGroups]]:
        """Yield divisions with two dots, with their cost: between operands that have no dense axis in common."""
        groups = ((_axes(own), (together, own)) for together, own in classes)
        apart = [each for _, each in joined(group for group in groups if group[0])]
        for chosen in _subsets(apart, len(apart) - 1):
            first, one = joint(chain(*chosen))
            second, two = joint(chain(*outside(apart, chosen)))
            m, n = width(one), width(two)
            deep, across = max(MIN_DOT, volume(side, first)), max(MIN_DOT, volume(side, second))
            formed = (deep * m if len(one) > 1 else 0) + (across * n if len(two) > 1 else 0)
            spread = outside(summed, (*first, *second))
            cost = (formed + m * across * (deep + n) // MATRIX_RATE) * volume(side, (*spread, *kept))
            yield cost, TileGroups(first, second, spread, free, gridded)

    if dot and (candidates := [*single(), *chained()]):
        return min(candidates, key=lambda candidate: candidate[0])[1]
    if dot and wide and not summed and (sampled := _sampled(side, output, operands)):
        return TileGroups(columns=letters, sampled=sampled)
    # Without a dot, positions of a kept letter, else of a summed one, lie side by side.
    vector = tuple(sorted(kept or letters, key=side.__getitem__, reverse=True)[:1])
    columns, second = (vector, ()) if kept else ((), vector)
    return TileGroups((), second, outside(summed, vector), columns, outside(kept, vector))


def _sampled(side: Mapping[str, int], output: Names, operands: Sequence[Operand]) -> tuple[Names, Names] | None:
    """Return the operands of the two sides of a dense product that is sampled at stored positions, or None.

    It sums axes of both sides.
    """
    summed = _axes(operands) - {*output}
    wide = [o for o in operands if o.rows and {*o.axes} >= summed]
    if not summed or len(wide) != len(operands) or {*output} & {*wide[0].axes}:
        return None
    groups = joined((o.rows, o) for o in wide)
    largest = max(groups, key=lambda group: volume(side, group[0]))
    sides = largest[1], [o for group in groups if group is not largest for o in group[1]]
    rows = [volume(side, {c for o in own for c in o.rows}) for own in sides]
    if len(groups) < 2 or min(rows) < MIN_DOT or prod(side.values()) > SAMPLED:
        return None
    left, right = (tuple([o.name for o in own]) for own in sides)
    return left, right


def _axes(operands: Iterable[Operand]) -> set[str]:
    return {a for o in operands for a in o.axes}


def _subsets(things: Sequence[T], most: int) -> Iterator[tuple[T, ...]]:
    return chain(*[combinations(things, n) for n in range(1, most + 1)])


def by_groups(inner: Inner, schedule: Schedule) -> Schedule:
    """Return the schedule with the tree of the groups that take the fewest multiplications, and roles of positions."""
    # Letters that ride along a side of a tile are one letter with it.
    operands = tuple([replace(o, rows=inner.along(o.rows)) for o in inner.operands])
    inner = replace(inner, operands=operands, kept=inner.along(inner.kept))
    output, wide = (*inner.kept, *inner.output_axes), all(schedule.block(c) >= MIN_DOT for c in inner.summed)
    sides, sizes = tuple(inner.sides.items()), tuple(inner.sizes.items())
    groups = _divided(sides, sizes, output, inner.operands, schedule.dot, wide)
    block = _blocks(inner, schedule, groups)
    tile_loops = tuple([c for c in groups.spread if block[c] < inner.sides[c] or inner.sides[c] == 1])
    tile_sizes = tuple([(c, n) for c, n in block.items() if n > 1])
    return replace(schedule, tree=_tree(inner, groups, tile_loops), tile_sizes=tile_sizes, tile_loops=tile_loops)


def _tree(inner: Inner, g: TileGroups, tile_loops: Names) -> Tree:
    """Build the tree of a tile: its dots, their scale factors, and the sums that are left to the end."""
    within = [o for o in inner.operands if not set(o.rows) <= set(inner.kept)]
    (x,) = factors(inner.stored)
    # Where each tile has a key of its own, its positions in turn are all that is added up.
    loops = tuple([axis.name for axis in inner.view.loops]) if inner.key.level == ITEM else ()
    if any(g.sampled):
        left, right = (product(factors(side)) for side in g.sampled)
        return total([x, dot(left, right, inner.summed)], loops)
    tree = product([x, *_factors(within)])
    if g.first:
        tree = dot(_rows(within, g.first), x, g.first)
        tree = product([tree, *_factors(o for o in within if not set(o.rows) & set(g.contracted))])
        tree = dot(tree, _rows(within, g.second), g.second) if g.second else tree
    spread = sorted(g.spread, key=tile_loops.__contains__)  # what is in registers is summed first
    tree = total([tree], (*spread, *loops, *(() if g.first else g.second)))
    return total([tree, *_factors(outside(inner.operands, within))], inner.summed)


def _factors(operands: Iterable[Operand]) -> list[Tree]:
    return factors([o.name for o in operands])


def _rows(operands: Iterable[Operand], letters: Names) -> Tree:
    """Return the side of a dot over these letters: the product of the operands with any of them."""
    return product(_factors(o for o in operands if set(o.rows) & set(letters)))


def _blocks(inner: Inner, schedule: Schedule, g: TileGroups) -> dict[str, int]:
    """Return how many positions of each letter a program has at once, in the order in which letters come."""
    padded = {c: 1 << (n - 1).bit_length() for c, n in inner.sides.items()}  # to what registers hold
    whole = (*g.first, *g.second, *g.columns)
    block = {c: side if c in whole else 1 for c, side in padded.items()}

    def fill(letters: Names, room: int) -> None:
        """Take as many positions of letters as there is room for, of the last most."""
        for c in reversed(letters):
            block[c] = max(1, min(padded[c], room))
            room //= block[c]

    def pad(letters: Names, columns: Names = ()) -> None:
        """Take more positions of the last letter if there are too few for a dot."""
        if letters:
            block[letters[-1]] *= max(1, MIN_DOT // volume(block, (*columns, *letters)))

    if g.first:
        pad(g.first)
        pad(g.second)
    if g.first and g.second:
        fill(g.columns, min(schedule.columns, MOST_SUMS * schedule.warps // prod(map(schedule.block, inner.dense))))
    elif g.first:
        fill(g.spread, schedule.columns // volume(block, g.columns))
        pad(g.columns, g.spread)
    return block
