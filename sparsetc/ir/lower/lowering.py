"""The one lowering: a tree over the axes of a view -> a verified tile program.

In: an `Inner` einsum and a `Schedule` that has a tree. Out: a `TileProgram`. The tree says what is computed
(`contract`); what is read, and along which axes, follows from the axes of the view and from the positions that the
schedule takes of them. Where each computation stands follows from one rule (`place`):

- A computation stands at the depth where its inputs are known, inside as few loops as that takes. A coordinate is known
  at its level, a position along a tile in the loop that takes it, and a stored value inside all loops.
- An accumulator is zeroed where it lives, before the loop that adds it up, and is read after that loop.
- The computations of one depth keep their order. Those listed before an accumulation that lives there stand before the
  loop, and the others after it.

Where stored values are in halves (`in_halves`), powers of two scale what is gathered before the dot that takes it,
which splits it in registers, and bring the sum back::

    scale_B = 2 ** (14 - exponent of most_B);  unscale_X, unscale_B = 2 ** (exponent of most, most_B - 14)
    scaled_B = rows of B * scale_B
    total += dot of scaled_B, x
    total = total * unscale_X * unscale_B       # one after the other: their product may be no float32
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from sparsetc.errors import PlanError
from sparsetc.ir import contraction_tree
from sparsetc.ir.inner import Inner, X
from sparsetc.ir.lower.contract import Contraction, verify_tree
from sparsetc.ir.nest.nest import ITEM, LEAF, LEVELS, Turns
from sparsetc.ir.plan import F16X3, Schedule
from sparsetc.ir.program import names
from sparsetc.ir.program import tile as ir
from sparsetc.ir.program.tile import (
    Add,
    Decode,
    Gather,
    Loop,
    Product,
    Scale,
    Statement,
    Sum,
    Tile,
    Value,
    Zero,
    level_of,
    made,
    reads,
)
from sparsetc.support.lru import cached_property


def in_halves(total: Tile, statements: Sequence[Statement]) -> tuple[Tile, list[Statement]]:
    """What is added to the output, and the computations that make it.

    Args:
        total: what is to be added.
        statements: in an order of data flow, without loops.

    Raises:
        PlanError: there is another dot than one of stored values with rows of one operand, or it is not added up over
            all tiles at once.
    """
    dot, rows, value = _dot(statements)
    name = rows.operand.name
    into, back = Scale(_number(names.scale(name)), name, into=True), Scale(_number(names.unscale(name)), name)
    own = Scale(_number(names.unscale(X)), value.operand)
    gathered = replace(rows, operand=replace(rows.operand, split=True))
    scaled = Product(replace(rows.out, name=names.scaled(name)), (rows.out, into.out))
    result = replace(dot.out, folded=0)

    def scaled_as(s: Statement) -> list[Statement]:
        if s == rows:
            return [gathered, scaled]
        if s == dot:
            return [
                _with(dot, rows.out, scaled.out),
                Product(result, (dot.out, own.out)),
                Product(result, (result, back.out)),
            ]
        return [_with(s, dot.out, result)]

    found = [new for s in statements for new in scaled_as(s)]
    return result if total == dot.out else total, [into, own, back, *found]


def _number(name: str) -> Tile:
    return Tile(name, (), ITEM)


def _dot(statements: Sequence[Statement]) -> tuple[Product, Gather, Value]:
    """The dot, and what reads its sides."""
    loads = {s.out: s for s in statements if isinstance(s, Gather | Value)}
    dots = [s for s in statements if isinstance(s, Product) and s.dot]
    for dot in dots:
        sides = [loads.get(side[0]) for side in (dot.left, dot.right) if len(side) == 1]
        rows = [s for s in sides if isinstance(s, Gather) and s.operand.rows and not s.operand.rounded]
        values = [s for s in sides if isinstance(s, Value)]
        if len(dots) == len(rows) == len(values) == 1 and dot.accumulate and dot.out.level == ITEM:
            return dot, rows[0], values[0]
    raise PlanError(
        f"in {F16X3} one dot takes stored values and rows of one operand, and is added up over tiles; "
        f"found {', '.join(str(dot.out) for dot in dots) or 'no dot'}"
    )


def _with(s: Statement, old: Tile, new: Tile) -> Statement:
    """A statement that reads one tile in the place of another."""

    def own(tiles: tuple[Tile, ...]) -> tuple[Tile, ...]:
        return tuple(new if t == old else t for t in tiles)

    if isinstance(s, Product):
        return replace(s, left=own(s.left), right=own(s.right))
    if isinstance(s, Sum | Add):
        return replace(s, source=new if s.source == old else s.source)
    return s


class Lowering(Contraction):
    """One part's program in the making."""

    def __init__(self, inner: Inner, schedule: Schedule) -> None:
        """Raises `PlanError` where the schedule's tree is none of the einsum's."""
        assert schedule.tree is not None
        super().__init__(inner, schedule.tree)
        self.schedule, self.view = schedule, inner.view
        self.dense = tuple(map(self._dense, inner.dense))
        self.operand = {o.name: replace(o, rounded=o.name in schedule.rounded) for o in inner.operands}
        gathered = [o.name for o in inner.operands if o.rows]
        if beside := [name for name in schedule.rounded if name not in gathered]:
            read = f"rows are gathered of {', '.join(gathered) or 'nothing'}"
            raise PlanError(f'"{inner.equation}": {beside[0]!r} is rounded, and {read}')
        self.take = dict(schedule.take)
        self.positions = tuple(
            [ir.DenseAxis(c, side, self.take.get(c, 1), inner.folds.get(c, ())) for c, side in inner.sides.items()]
        )
        # The tiles of two operands are longer along a side than what is worth unrolling.
        unrolled, turned = len(inner.stored) == 1, (c for c in schedule.turns if c in inner.sides)
        turns = (Turns(c, size=inner.sides[c], take=self.take.get(c, 1), unrolled=unrolled) for c in turned)
        self.around = (*self.view.loops, *turns)
        verify_tree(inner, schedule, self.around)
        self._check_order()

    def program(self, number: int, format: str) -> ir.TileProgram:
        """The program."""
        inner, schedule = self.inner, self.schedule
        total, computed = self.contract()
        read = {s.operand.name: s.operand for s in computed if isinstance(s, ir.Gather)}
        # Results may be stored where rows have one owner, and no summed axis is split over the grid.
        owned = inner.target.owned and all(a.programs == 1 or a.letter in inner.output_axes for a in self.dense)
        copies = 1 if owned or not isinstance(inner.key, ir.Row) else schedule.copies
        statements = (*computed, ir.Add(total, inner.key, inner.output_axes, owned, copies))
        return ir.TileProgram(
            equation=inner.equation,
            number=number,
            format=format,
            view=self.view,
            letters=inner.letters,
            axes=(*self.dense, *self.positions),
            operands=tuple((self.operand | read).values()),
            output=inner.output,
            output_axes=inner.output_axes,
            body=place(statements, list(map(ir.Loop, self.around))),
            schedule=schedule,
            slot=inner.key.array if isinstance(inner.key, ir.Slot) else "",
            rows=inner.target.rows,
            index64=inner.target.index64,
            whole=inner.target.whole,
            terms=inner.terms,
        )

    def _dense(self, letter: str) -> ir.DenseAxis:
        """A dense axis as the schedule takes it: one of a single block has no slabs, whatever the schedule says."""
        size, block = self.inner.sizes[letter], self.schedule.block(letter)
        pieces = dict(self.schedule.pieces).get(letter, ())
        return ir.DenseAxis(letter, size, block, pieces=pieces, slab=letter in self.schedule.slabs and size > block)

    def contract(self) -> tuple[ir.Tile, list[ir.Statement]]:
        """What is to be added to the output, and the computations that make it."""
        total = self.run()
        for scale in [self.make(self.scale(name)) for name in self.inner.scaled]:
            total = self.make(ir.Product(replace(total, folded=0), (total, scale)))
        return in_halves(total, self.statements) if "most" in self.view.packed else (total, self.statements)

    # -- what is read -----------------------------------------------------------------------------------------------
    def load(self, factor: str) -> ir.Value | ir.Gather:
        """What reads a factor."""
        return self.value(factor) if factor in self.inner.stored else self.gather(factor)

    def value(self, name: str) -> ir.Value:
        """Stored values: what a dot sums is behind the others, as the columns of a matrix."""
        over = next((own for own, side in self._sides if side == name), ())
        axes = tuple([c for c in self.stored_order if c in self.inner.stored[name] and c in self.take])
        rows = tuple([c for c in axes if c not in over])
        columns = tuple([c for c in axes if c in over])
        lanes, folded = self.view.beside[LEAF], len(rows) if columns else 0
        out = ir.Tile(name.lower(), (*lanes, *rows, *columns), LEAF, folded)
        return ir.Value(out, name.lower()) if name != X or len(self.inner.stored) > 1 else ir.Value(out)

    def scale(self, name: str) -> ir.Scale:
        """What the rows of tiles in halves are worth."""
        return ir.Scale(ir.Tile(f"{name.lower()}_scale", self.inner.stored[name][:1], ITEM), name.lower())

    def gather(self, name: str) -> ir.Gather:
        """Rows of a dense operand, one a lane where its rows are known by lane, along the positions of its letters."""
        o = self.operand[name]
        level = self.inner.depth(o.rows)
        lanes, own = self.view.beside[level], tuple([c for c in self.inner.along(o.rows) if c in self.take])
        letters = (*o.axes, *o.rows) if self.inner.sides else (*o.rows, *o.axes)
        return ir.Gather(ir.Tile(f"{name.lower()}_{''.join(letters) or 'scalar'}", (*lanes, *o.axes, *own), level), o)

    def decodes(self, level: int) -> list[ir.Decode]:
        """What reads the coordinates of one level that are wanted; along the sides of a tile, once the tile's are."""
        view, letters, found = self.view, self.inner.letters, []
        for mode in [c.mode for c in view.levels[level] if letters[c.mode] in self._wanted]:
            letter, placed = letters[mode], view.along.get(mode)
            if not view.coordinates[mode].sides:
                found.append(ir.Decode(letter, view.coordinates[mode], level, tile=placed is not None))
            if placed is not None and letter in self._addressed:
                size, along = self.inner.sizes[letter], self.inner.along((letter,))
                found.append(ir.Decode(letter, placed, level, along=along, end=0 if view.within(mode, size) else size))
        return found

    @cached_property
    def _addressed(self) -> set[str]:
        """Letters whose coordinates an operand or the key reads."""
        kept = self.inner.kept if isinstance(self.inner.key, ir.Row) else ()
        return {c for o in self.inner.operands for c in o.rows} | set(kept)

    @cached_property
    def _wanted(self) -> set[str]:
        """Letters whose coordinates are addressed, or read by another coordinate that is."""
        wanted, letters = set(self._addressed), self.inner.letters
        for mode, coordinate in reversed(self.view.coordinates.items()):
            if letters[mode] in wanted:
                wanted |= {letters[m] for m in coordinate.modes}
        return wanted

    # -- the order of a tile's positions ----------------------------------------------------------------------------
    @cached_property
    def _sides(self) -> list[tuple[tuple[str, ...], str]]:
        """(what a dot sums, a side of it) of the sides that are factors."""
        return [(dot.over, str(side)) for dot in self.dots for side in dot.parts]

    @cached_property
    def contracted(self) -> tuple[str, ...]:
        """The letters of positions that dots sum, those of the first dot last."""
        return tuple([c for dot in reversed(self.dots) for c in self.inner.sides if c in dot.over])

    @cached_property
    def stored_order(self) -> tuple[str, ...]:
        """Positions as a dot's side has them: what is summed beside dots, what is kept, what dots sum."""
        summed = {c for node in self.tree.nodes if isinstance(node, contraction_tree.Sum) for c in node.over}
        beside = sorted([c for c in self.inner.sides if c in summed], key=lambda c: c not in self.schedule.turns)
        kept = [c for c in self.inner.sides if c not in summed and c not in self.contracted]
        return (*beside, *kept, *self.contracted)

    def _check_order(self) -> None:
        """Raise `PlanError` where bits are stored for the dots of another tree: values would be searched for."""
        view, inner, values = self.view, self.inner, self.view.values
        stored = [inner.letters[m] for m in values.fixed() if m in view.sided]
        taken = {*self.take, *self.schedule.turns}  # at once or in turn, and not over the grid
        found, wanted = [[c for c in own if inner.sides[c] > 1 and c in taken] for own in (stored, self.stored_order)]
        if stored and found != wanted:
            raise PlanError(
                f"tiles are stored in the order {''.join(stored)} for dots over "
                f"{''.join(stored[-values.contracted :])}; "
                f'"{inner.equation}" takes them in the order {"".join(self.stored_order)}, with dots over '
                f"{''.join(self.contracted) or 'nothing'}: plan it anew, or leave out the storage's sequence"
            )


# -- where each statement stands --------------------------------------------------------------------------------------


def place(statements: Iterable[Statement], around: Sequence[Loop]) -> tuple[Statement, ...]:
    """The statements where they stand, with the loops around them and the zeros of their accumulators.

    Args:
        statements: in an order of data flow, without loops and zeros. A product that accumulates makes an accumulator,
            which lives at the level of its tile.
        around: the loops, outermost first.

    Raises:
        PlanError: a statement reads what none before it makes, or what is complete only after a loop that the
            statement stands in, or adds up over no loop.
    """
    placement = _Placement(around)
    for statement in statements:
        placement.add(statement)
    return placement.body()


class _Placement:
    """Statements that have been placed; depth n is inside the first n loops."""

    def __init__(self, around: Sequence[Loop]) -> None:
        self.around = around
        self.before: list[list[Statement]] = [[] for _ in (None, *around)]
        self.zeros, self.after = [[list(at) for at in self.before] for _ in range(2)]
        self.turn = {loop.letter: n + 1 for n, loop in enumerate(around) if loop.letter}
        levels = [loop.level for loop in around]
        self.depth = [sum(map(level.__ge__, levels)) for level in range(len(LEVELS))]
        """The loops around what is known at each level."""
        self.known: dict[str, int] = {}
        """The depth at which each name is known."""
        self.late: set[str] = set()
        """Names that are known only after the loop at their depth."""

    def add(self, statement: Statement) -> None:
        """Places one statement after all that were placed before it."""
        name, inputs = made(statement) or "add", reads(statement)
        if unknown := {*inputs} - self.known.keys():
            raise PlanError(f"{name}: {', '.join(sorted(unknown))} is not made before it")
        turns = [self.turn.get(c, 0) for c in statement.along] if isinstance(statement, Decode) else ()
        depth = max([self.depth[level_of(statement)], *turns, *map(self.known.__getitem__, inputs)])
        for read in self.late.intersection(inputs):
            if self.known[read] < depth:
                raise PlanError(f"{name} stands in a loop after which {read} is complete")
        after = bool(self.zeros[depth])
        (self.after if after else self.before)[depth].append(statement)
        if isinstance(statement, Product) and statement.accumulate:
            depth, after = self._home(statement, depth), True
        self.known[name] = depth
        self.late |= {name} if after else set()

    def _home(self, statement: Product, depth: int) -> int:
        """The depth at which an accumulator lives, where it is zeroed."""
        home = self.depth[statement.out.level]
        if home >= depth:
            raise PlanError(f"{statement.out} adds up over no loop: what it adds is known where it lives")
        if Zero(statement.out) not in self.zeros[home]:
            self.zeros[home].append(Zero(statement.out))
        return home

    def body(self) -> tuple[Statement, ...]:
        """The statements, nested."""
        body: tuple[Statement, ...] = ()
        for n in reversed(range(len(self.before))):
            inner = (replace(self.around[n], body=body),) if n < len(self.around) else ()
            body = (*self.before[n], *self.zeros[n], *inner, *self.after[n])
        return body
