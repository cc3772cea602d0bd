"""The one lowering: a tree over the axes of a view -> a tile program.

In: an `Inner` einsum and a `Schedule` that has a tree. Out: a `TileProgram`. The tree says what is computed, in data
flow's order; what is read, and along which axes, follows from the axes of the view and from the positions that the
schedule takes of them; `place` puts each computation into its loops. A product, or a dot, that is summed over loops
becomes an accumulator, which lives outside of them; what it depends on beside is summed in registers, in the order in
which the tree has them. The last sums, over lanes and dense axes, are left to the statement that adds the result.

Where stored values are in halves (`Lowering.split`), powers of two scale what is gathered before the dot that takes it,
which splits it in registers, and bring the sum back::

    scale_B = 2 ** (14 - exponent of most_B);  unscale_X, unscale_B = 2 ** (exponent of most, most_B - 14)
    scaled_B = rows of B * scale_B
    total += dot of scaled_B, x
    total = total * unscale_X * unscale_B       # one after the other: their product may be no float32
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from sparsetc.errors import PlanError
from sparsetc.ir.contraction_tree import Tree, order_of_sums
from sparsetc.ir.equation.einsum import joined
from sparsetc.ir.lower.inner import Inner, X, verify_tree
from sparsetc.ir.nest import ITEM, LEVELS, Axis, TileLoop, home
from sparsetc.ir.plan import F16X3, Schedule
from sparsetc.ir.program import (
    LANES,
    Add,
    DenseAxis,
    Gather,
    Loop,
    Product,
    Reduce,
    Scale,
    Statement,
    Tile,
    TileProgram,
    Value,
    names,
    place,
)
from sparsetc.support import Letters, Names, among, cached_property, outside, volume

Tiles = tuple[Tile, ...]


class Lowering:
    """One part's program in the making.

    Attributes:
        around: the loops of the view, and inside them those over positions of a tile that are taken in turn.
        order: axes in the order in which tiles have them.
        made: the tile of each node of the tree so far.
        last: the node whose tile is the result, but for sums that are left to the statement that adds it.
        split: the operand that is split into halves beside stored ones; empty without one.
        halved: the operands that are read in halves.
        unscales: scales that the sum of the dot in halves is yet to be multiplied by.
    """

    def __init__(self, inner: Inner, schedule: Schedule) -> None:
        """Check a tree that the default rule did not give. Raise `PlanError` if it does not fit the einsum."""
        assert schedule.tree is not None
        self.inner = inner
        self.schedule = schedule
        self.view = inner.view
        self.tree = schedule.tree
        self.order: Names = (LANES, *inner.dense, *inner.sides)
        self.statements: list[Statement] = []
        self.made: dict[Tree, Tile] = {}
        self.dots = self.tree.dots
        self.last = self.tree.parts[0] if self.tree.kind == "sum" and not self._over(self.tree) else self.tree
        self.dense = tuple(map(self._dense, inner.dense))
        rounded, gathered = schedule.rounded, [o.name for o in inner.operands if o.rows]
        if beside := [name for name in rounded if name not in gathered]:
            read = f"rows are gathered of {', '.join(gathered) or 'nothing'}"
            raise PlanError(f'"{inner.equation}": {beside[0]!r} is rounded, and {read}')
        self.split, self.halved = self._halves()
        self.operand = {
            name: replace(o, rounded=name in rounded, split=name == self.split, halves=name in self.halved)
            for name, o in inner.operand.items()
        }
        self.unscales: list[Tile] = []
        self.tile_sizes = dict(schedule.tile_sizes)
        self.positions = tuple(
            [DenseAxis(c, side, self.tile_sizes.get(c, 1), inner.folds.get(c, ())) for c, side in inner.sides.items()]
        )
        # The tiles of two operands are longer along a side than what is worth unrolling.
        unrolled = len(inner.stored) == 1
        step, turned = self.tile_sizes.get, schedule.tile_loops
        loops = (TileLoop(c, size=n, step=step(c, 1), unrolled=unrolled) for c in turned if (n := inner.sides.get(c)))
        self.around = (*self.view.loops, *loops)
        if not schedule.is_ruled:
            verify_tree(inner, schedule, self.around)
        self._check_order()

    def program(self, format: str) -> TileProgram:
        """The program."""
        inner, schedule = self.inner, self.schedule
        total = self.contract()
        # Results may be stored where rows have one owner, and no summed axis is split over the grid.
        owned = inner.target.owned and all(a.letter in inner.output_axes or a.programs == 1 for a in self.dense)
        copies = 1 if owned or inner.key.kind != "row" else schedule.copies
        statements = (*self.statements, Add(total, inner.key, inner.output_axes, owned, copies))
        return TileProgram(
            equation=inner.equation,
            number=0,
            format=format,
            view=self.view,
            letters=inner.letters,
            axes=(*self.dense, *self.positions),
            operands=tuple(self.operand.values()),
            output=inner.output,
            output_axes=inner.output_axes,
            body=place(statements, list(map(Loop, self.around))),
            schedule=schedule,
            slot=inner.key.array,
            rows=inner.target.rows,
            index64=inner.target.index64,
            at_once=inner.target.at_once,
            sparse=tuple(inner.stored.values()),
            strides=inner.target.strides,
        )

    def _dense(self, letter: str) -> DenseAxis:
        """A dense axis as the schedule takes it: one of a single block is not slowest, whatever the schedule says."""
        size, block = self.inner.sizes[letter], self.schedule.block(letter)
        lengths = dict(self.schedule.vectors).get(letter, ())
        return DenseAxis(
            letter, size, block, lengths=lengths, slowest=letter in self.schedule.slowest_axes and size > block
        )

    def contract(self) -> Tile:
        """Make the statements, and return what is to be added to the output."""
        if self.split:
            back = {X: X.lower(), self.split: self.split}
            self.make(Scale(_number(names.scale(self.split)), self.split, into=True))
            self.unscales = [self.make(Scale(_number(names.unscale(name)), operand)) for name, operand in back.items()]
        total = self.run()
        if self.unscales:
            raise self._halves_error()
        halves = [o for o in self.inner.stored.values() if o.name and o.values.halves]
        scales = [self.make(Scale(Tile(o.array("scale"), o.letters[:1], ITEM), o.name)) for o in halves]
        return self._scaled(total, scales)

    # -- halves -----------------------------------------------------------------------------------------------------
    def _halves(self) -> tuple[str, list[str]]:
        """Return the operand to be split into halves beside stored ones, and the operands to be read in halves.

        The latter are both sides of the dot, where all values are 1.
        """
        stored = self.view.values
        if not stored.halves and (self.schedule.precision != F16X3 or self.view.pairs):
            return "", []
        sides = [side.name for side in self.dots[0].parts] if len(self.dots) == 1 else []
        own = among(sides, self.inner.operand)
        rows = [name for name in own if self.inner.operand[name].rows and name not in self.schedule.rounded]
        if stored.halves and rows and X in sides:
            return rows[0], []
        if stored.halves or stored.held or len(own) != 2:
            raise self._halves_error()
        return "", [*own]

    def _halves_error(self) -> PlanError:
        return PlanError(
            f"in {F16X3} one dot takes stored values and rows of one operand, or those of two, and is added up; "
            f"found {', '.join(map(str, self.dots)) or 'no dot'}"
        )

    def _scaled(self, tile: Tile, scales: Iterable[Tile]) -> Tile:
        """The tile, multiplied by one scale after the other: their product may be no float32."""
        for scale in scales:
            folded = 0 if scale.axes else tile.folded
            tile = self.make(Product(replace(tile, folded=folded), (tile, scale)))
        return tile

    # -- what is read -----------------------------------------------------------------------------------------------
    def load(self, name: str) -> Value | Gather:
        """Return the statement that reads stored values, or gathers rows: one a lane if lanes determine them."""
        level = self.inner.levels[name]
        axes, folded = self.layout(name, level)
        axes = (*self.view.beside[level], *axes)
        if name in self.inner.stored:
            return Value(Tile(name.lower(), axes, level, folded), name.lower())
        o = self.operand[name]
        letters = (*o.axes, *o.rows) if self.inner.sides else (*o.rows, *o.axes)
        return Gather(Tile(f"{name.lower()}_{''.join(letters) or 'scalar'}", axes, level, folded), o)

    def layout(self, name: str, level: int) -> tuple[Names, int]:
        """Return the axes of a factor but the lanes, and how many make up the rows if it is loaded as a matrix.

        What the dot of which it is a side sums is behind the others.
        """
        over: Names = next((dot.over for dot in self.dots if name in [side.name for side in dot.parts]), ())
        if name in self.inner.stored:
            axes = [c for c in self.stored_order if c in self.inner.stored[name].letters and c in self.tile_sizes]
            rows, columns = [c for c in axes if c not in over], [c for c in axes if c in over]
            return (*rows, *columns), len(rows) if columns else 0
        o = self.operand[name]
        along = [c for c in self.inner.along(o.rows) if c in self.tile_sizes] if self.inner.sides else ()
        if over and len(o.axes) > 2 and {*over} < {*o.axes} and not along and not self.view.beside[level]:
            # What is summed beside the dot lies before what is kept.
            rows = sorted(outside(o.axes, over), key=lambda c: c not in self.summed)
            return (*rows, *among(o.axes, over)), len(rows)
        return (*o.axes, *along), 0

    # -- the order of a tile's positions ----------------------------------------------------------------------------
    @cached_property
    def summed(self) -> set[str]:
        """The axes that are summed beside dots."""
        return {c for node in self.tree.nodes if node.kind == "sum" for c in node.over}

    @cached_property
    def contracted(self) -> Names:
        """The letters of positions that dots sum; those of the first dot come last."""
        return tuple([c for dot in reversed(self.dots) for c in self.inner.sides if c in dot.over])

    @cached_property
    def stored_order(self) -> Names:
        """Return positions in the order of a dot's side: letters summed outside dots, kept, contracted by dots."""
        summed = self.summed
        sides, turned = self.inner.sides, self.schedule.tile_loops
        beside = sorted([c for c in sides if c in summed], key=lambda c: c not in turned)
        kept = [c for c in sides if c not in summed and c not in self.contracted]
        return (*beside, *kept, *self.contracted)

    def _check_order(self) -> None:
        """Raise `PlanError` where bits are stored for the dots of another tree: values would be searched for."""
        view = self.view
        inner = self.inner
        values = self.view.values
        fixed = values.sequence if values.bitmap and values.contracted else ()  # of others, any order will do
        if not (stored := [inner.letters[m] for m in fixed if m in view.sided]):
            return
        at_hand = {*self.tile_sizes, *self.schedule.tile_loops}  # at once or in turn, and not over the grid
        held, wanted = [
            [c for c in order if inner.sides[c] > 1 and c in at_hand] for order in (stored, self.stored_order)
        ]
        if held != wanted:
            raise PlanError(
                f"tiles are stored in the order {''.join(stored)} for dots over "
                f"{''.join(stored[-values.contracted :])}; "
                f'"{inner.equation}" takes them in the order {"".join(self.stored_order)}, with dots over '
                f"{''.join(self.contracted) or 'nothing'}: plan it anew, or leave out the storage's sequence"
            )

    # -- computations -----------------------------------------------------------------------------------------------

    def make(self, statement: Value | Scale | Gather | Product | Reduce) -> Tile:
        """Add a statement, and return the tile that it makes."""
        self.statements.append(statement)
        return statement.out

    def called(self, name: str) -> str:
        """The name, with a number where it is taken."""
        names_taken, number = {s.out.name for s in self.statements if isinstance(s, Product | Reduce)}, 1
        while (candidate := f"{name}{number}" if number > 1 else name) in names_taken:
            number += 1
        return candidate

    def multiply(self, name: str, left: Tiles, right: Tiles = (), over: Letters = ()) -> Tile:
        """Make the product of tiles, which sums no axis, or the matrix product of two sides.

        Of factors the axes of a dot stay together, and come first. The rows and columns of a matrix product are the
        unsummed axes of each side.
        """
        if right:
            rows, columns = [self._free(side, {*over}) for side in (left, right)]
        else:
            rows = [a for t in left if t.folded for a in t.axes]
            columns = [*outside(self._axes(left), rows)]
        level = max([t.level for t in (*left, *right)])
        out = Tile(self.called(name), (*rows, *columns), level, folded=len(rows) if right else 0)
        return self.make(Product(out, left, right))

    def sum(self, name: str, tile: Tile, over: Letters) -> Tile:
        """Return a tile summed over these axes; the tile itself if it has none of them."""
        axes = outside(tile.axes, {*over})
        return self.make(Reduce(Tile(self.called(name), axes, tile.level), tile)) if axes != tile.axes else tile

    def accumulate(self, name: str, tile: Tile, level: int) -> Tile:
        """The sum of a tile, the last that was made, over the loops inside a level.

        A product is added up by the statement that multiplies.
        """
        product = self.taken_back(tile)
        total = self.make(replace(product, out=replace(tile, name=self.called(name), level=level), accumulate=True))
        scales = self.unscales if product.dot and level == ITEM else []
        self.unscales = self.unscales[len(scales) :]
        return self._scaled(total, scales)

    def taken_back(self, tile: Tile) -> Product:
        """Remove and return the last statement if it is the product that made `tile`; else one of `tile` alone."""
        last = self.statements[-1]
        if isinstance(last, Product) and last.out == tile and not last.accumulate:
            self.statements.pop()
            return last
        return Product(tile, (tile,))

    def _axes(self, tiles: Tiles) -> Names:
        """The axes that tiles have together; one alone keeps the order of its own."""
        present = {a for t in tiles for a in t.axes}
        return among(self.order, present) if len(tiles) > 1 else tiles[0].axes

    def _free(self, side: Tiles, over: set[str]) -> list[str]:
        """The axes of a dot's side that are not summed, positions of a stored tile before dense ones."""
        return sorted(outside(self._axes(side), over), key=self.inner.dense.__contains__)

    # -- the tree ---------------------------------------------------------------------------------------------------
    def run(self) -> Tile:
        """Return the tile to add to the output. Factors are read, and sides of dots formed, as early as possible."""
        late = set(self._late())
        products = [(side, dot) for dot in self.dots for side in dot.parts if side.kind == "product"]
        factors = {node.name: node for node in self.tree.nodes if node.kind == "factor"}
        wanted = [name for name in (*self.inner.stored, *self.inner.operand) if name in factors and name not in late]
        for level in range(len(LEVELS)):
            self.statements += self.inner.decodes[level]
            for name in wanted:
                if self.inner.levels[name] == level:
                    self.tile(factors[name])
            for side, dot in products:
                if self.level(side) == level < self.level(dot):
                    self.tile(side)
        return self.tile(self.tree)

    def level(self, node: Tree) -> int:
        """The level at which a node is known."""
        if node.kind == "factor":
            return self.inner.levels[node.name]
        if node.kind == "sum" and self._loops(node.over):
            return home(self.around, node.over)
        return max(map(self.level, node.parts))

    def _late(self) -> list[str]:
        """Factors that positions of a tile are multiplied by after a sum over loops: they are read then."""
        if not self.inner.sides:
            return []
        products = [node for node in self.tree.nodes if node.kind == "product"]
        after = [p for p in products if any(t.kind == "sum" and self._loops(t.over) for t in p.parts)]
        one = {LANES, *self.inner.dense}  # beside the positions along a stored tile
        along = [p for p in after if any(not one.issuperset(self.load(name).out.axes) for name in p.factors)]
        return [t.name for p in along for t in p.parts if t.kind == "factor"]

    # -- nodes ------------------------------------------------------------------------------------------------------
    def tile(self, node: Tree) -> Tile:
        """Return the tile of a node, made once."""
        if node in self.made:
            return self.made[node]
        match node.kind:
            case "factor":
                tile = self.make(self.load(node.name))
                if node.name == self.split:
                    scale = _number(names.scale(self.split))
                    tile = self.make(Product(replace(tile, name=names.scaled(self.split)), (tile, scale)))
            case "product":
                tile = self.multiply(self._product_name(node), tuple([self.tile(part) for part in node.parts]))
            case "dot":
                left, right = [self._side(side, node) for side in node.parts]
                tile = self.multiply("part", left, right, node.over)
                for name in self.halved:  # each by the scale of the part that a step gathers
                    rows = self.operand[name].rows
                    unscale = Scale(Tile(names.unscale(name), (), self.inner.depth(rows)), name, rows=rows)
                    tile = self._scaled(tile, [self.make(unscale)])
            case "sum":
                tile = self._sum(node)
        self.made[node] = tile
        return tile

    def _side(self, side: Tree, dot: Tree) -> Tiles:
        """Return the factors of a side of a dot; over the lanes every step multiplies them anew."""
        fused = side.kind == "product" and LANES in dot.over and self.level(side) == self.level(dot)
        return tuple([self.tile(part) for part in (side.parts if fused else (side,))])

    def _product_name(self, node: Tree) -> str:
        if {part.kind for part in node.parts} != {"factor"}:
            return "result" if node == self.last else "scaled"
        return next((name for dot, name in zip(self.dots, "wv", strict=False) if node in dot.parts), "term")

    def _loops(self, over: Letters) -> list[Axis]:
        return [axis for axis in self.around if axis.name in over]

    def _over(self, node: Tree) -> Names:
        """Return the axes of a sum, without those that are left to the end."""
        if node != self.tree:
            return node.over
        end = [a == LANES or a in self.inner.dense for a in node.over]
        while end and end[-1]:
            end.pop()
        return node.over[: len(end)]

    def _sum(self, node: Tree) -> Tile:
        """Registers and loops are summed as they come."""
        tile = self.tile(node.parts[0])
        looped = [axis.name for axis in self.around]
        for beside, loops in order_of_sums(self._over(node), looped, tile.axes):
            tile = self.sum("step" if loops else "summed", tile, beside)
            summed: dict[str, list[str]] = {}
            for axis in reversed(self._loops(loops)):
                summed.setdefault(axis.sums, []).append(axis.name)
            for name, together in summed.items():
                tile = self.accumulate(name, tile, home(self.around, together))
        return tile


def _number(name: str) -> Tile:
    return Tile(name, (), ITEM)


# -- whole axes --------------------------------------------------------------------------------------------------------


class WholeLowering(Lowering):
    """One part's program in the making, each of its axes one block, unless native loops cut the result into panels.

    Attributes:
        factors: the factors that each tile is made of, by its name.
    """

    def __init__(self, inner: Inner, schedule: Schedule) -> None:
        super().__init__(inner, schedule)
        cut = [a for a in self.dense if schedule.native and a.slowest and a.letter in inner.output_axes][:1]
        self.dense = tuple([a if a in cut else DenseAxis(a.letter, a.size, a.size) for a in self.dense])
        self.positions = tuple([replace(a, block=a.size) for a in self.positions])
        self.around, self.tile_sizes = self.view.loops, dict(inner.sides)
        stored = (a for name in inner.stored for a in self._stored(name))
        self.order = (LANES, *dict.fromkeys((*stored, *inner.dense, *inner.sides)))
        self.factors: dict[str, frozenset[str]] = {}

    def load(self, name: str) -> Value | Gather:
        s = super().load(name)
        self.factors[s.out.name] = frozenset((name,))
        return s

    def layout(self, name: str, level: int) -> tuple[Names, int]:
        """Return the axes of stored values in order, or of rows along their coordinates; none is a matrix."""
        if name in self.inner.stored:
            return self._stored(name), 0
        o = self.inner.operand[name]
        return (*(self.inner.along(o.rows) if self.inner.sides else ()), *o.axes), 0

    def _stored(self, name: str) -> Names:
        """Return the letters of stored values' positions, in the order of the sequence."""
        stored = self.inner.stored[name]
        return tuple([stored.letters[mode] for mode in stored.values.sequence])

    # -- products, each of which sums the axes that no factor outside of it has, nor the result ----------------------
    def multiply(self, name: str, left: Tiles, right: Tiles = (), over: object = ()) -> Tile:
        """A product; the rows of a matrix product are the axes of its left side."""
        tiles = (*left, *right)
        return self._product(name, tiles, max(t.level for t in tiles), self._within(left) if right else ())

    def sum(self, name: str, tile: Tile, over: object) -> Tile:
        """The tile: lanes are its rows, and its positions were summed by a product, or are when it is added."""
        return tile

    def accumulate(self, name: str, tile: Tile, level: int) -> Tile:
        product = self.taken_back(tile)
        rows = self._within((tile,))[: tile.folded]
        return self._product(name, (*product.left, *product.right), level, rows, accumulate=True)

    def _product(
        self, name: str, tiles: Tiles, level: int, rows: Collection[str] = (), accumulate: bool = False
    ) -> Tile:
        """The product, summed over what nothing after it reads; `rows` are axes of a left side.

        One that would sum no side, and of which a factor has all axes, sums none: it forms nothing larger than that
        factor.
        """
        inside = frozenset().union(*[self.factors[t.name] for t in tiles])
        needed = self.inner.keyed.union(*[axes for name, axes in self.inner.axes.items() if name not in inside])
        axes = self._within(tiles)
        whole = [{*axes} <= {*t.axes} for t in tiles]
        sums = ({*axes} - needed) & self.inner.sides.keys() or True not in whole
        kept = tuple([a for a in axes if a in needed]) if sums else axes
        left, right = self._separate(tiles) if accumulate and kept == axes else (tiles, ())
        if right:
            rows, kept = self._within(left), (*self._within(left), *self._within(right))
        folded = sum(map(rows.__contains__, kept))
        out = Tile(self.called(name), (*self.view.beside[level], *kept), level, folded)
        self.factors[out.name] = inside
        return self.make(Product(out, left, right, accumulate))

    def _separate(self, tiles: Tiles) -> tuple[Tiles, Tiles]:
        """Split factors into two sets without a common axis, to be summed by a matrix product; else (all, none)."""
        groups = [g for g in joined([({*t.axes} - {LANES}, t) for t in tiles]) if g[0]]
        if len(groups) < 2:
            return tiles, ()
        sizes = {a.letter: a.size for a in (*self.dense, *self.positions)}
        axes, largest = max(groups, key=lambda g: volume(sizes, g[0]))
        sides = tuple(largest), outside(tiles, largest)
        for side in sides:
            operands = [self.inner.operand.get(name) for tile in side for name in self.factors[tile.name]]
            if all(o and not o.rows for o in operands):  # the same for all rows: nothing is summed over them
                return tiles, ()
        return sides if self._within(tiles)[0] in axes else sides[::-1]

    def _within(self, tiles: Tiles) -> Names:
        """The axes that tiles have together, but the lanes."""
        axes = {a for t in tiles for a in t.axes} - {LANES}
        return tuple([a for a in (self.order if len(tiles) > 1 else tiles[0].axes) if a in axes])


def lowered(inner: Inner, schedule: Schedule, format: str) -> TileProgram:
    """Return the program of a schedule with a tree."""
    return (WholeLowering if inner.target.at_once else Lowering)(inner, schedule).program(format)
