"""Einsum x dense tiles -> tile program: which position of a tile is looped, which a dot contracts, which is a row.

In: as for `ir.lower`, with a view of tiles. Out: a verified `TileProgram`.

The schedule of a tile einsum is found from its letters alone. One summed letter that stands in a single dense operand
with dense axes is contracted by a dot with it; another letter makes the dot's rows; the remaining summed letters are
looped, and the rows of their operands scale the dot's result (for ``ijk,jr,kr->ir``: a loop over j of a 16x16 by 16xR
product, scaled by row j of B, which needs no reduction). Where a further operand brings dense axes of its own, its
letter makes the rows, and a second dot contracts it (``ijk,jr,ks->irs``: two dots for each i). Kept letters beyond the
dot's rows are taken one position a program, over the grid.
"""

from __future__ import annotations

from math import prod

from sparsetc.errors import PlanError
from sparsetc.ir.einsum import Bound
from sparsetc.ir.operands import MIN_DOT, Target, dense_axes, named_operands, printed_sizes, row_of, stores
from sparsetc.ir.plan import Schedule
from sparsetc.ir.tile import (
    Add,
    Decode,
    DenseAxis,
    Gather,
    Loop,
    Operand,
    Product,
    Statement,
    Sum,
    Tile,
    TileProgram,
    Value,
    Zero,
    verify,
)
from sparsetc.ir.view import ITEM, LANE, LEAF, View


def lower_tiles(
    bound: Bound, view: View, schedule: Schedule, target: Target, *, number: int = 0, format: str = ""
) -> TileProgram:
    """The tile program of a part of dense tiles; `PlanError` where tiles cannot serve the einsum."""
    lowering = _TileLowering(bound, view, schedule, target)
    body = lowering.body()
    program = TileProgram(
        equation=str(bound.einsum),
        number=number,
        format=format,
        view=view,
        letters=lowering.letters,
        axes=(*lowering.axes, *lowering.positions),
        operands=lowering.operands,
        output=lowering.output,
        output_axes=lowering.output_axes,
        body=body,
        unroll=1,
        tail=1,
        warps=schedule.warps,
        stages=schedule.stages,
        precision=schedule.precision,
        rows=target.rows,
        extents=bound.extents(lowering.letters),
        wide=target.wide,
    )
    verify(program)
    return program


class _TileLowering:
    def __init__(self, bound: Bound, view: View, schedule: Schedule, target: Target) -> None:
        e = bound.einsum
        if target.sparse:
            raise PlanError(f'dense tiles add to dense outputs only; "{e}" has a sparse one')
        (sparse,) = e.sparse
        self.letters = e.inputs[sparse]
        self.bound, self.view, self.schedule, self.target = bound, view, schedule, target
        self.side = dict(zip(self.letters, view.sides, strict=True))
        self.sizes = printed_sizes(bound)
        self.order = dense_axes(bound)
        self.axes = tuple(DenseAxis(c, self.sizes[c], schedule.block(c)) for c in self.order)
        self.output, self.operands = named_operands(bound)
        self.output_axes = tuple(c for c in e.output if c not in self.letters)
        self.kept = tuple(c for c in e.output if c in self.letters)
        self.summed = tuple(c for c in self.letters if c not in self.kept)
        self.dot_letter = self._contracted()
        self.chained: Operand | None = None
        self.row_letter = self._rows()
        rest = [c for c in self.letters if c not in (self.dot_letter, self.row_letter)]
        self.gridded = tuple(c for c in rest if c in self.kept)
        self.looped = tuple(c for c in rest if c in self.summed)
        self.positions = tuple(
            DenseAxis(c, self.side[c], 1 if c in self.gridded else self.side[c]) for c in self.letters
        )

    def _holders(self, letter: str) -> list[Operand]:
        return [o for o in self.operands if letter in o.rows]

    def _contracted(self) -> str:
        """The letter a dot contracts: the last summed one whose operand has dense axes and no other letter."""
        for letter in reversed(self.summed):
            holders = self._holders(letter)
            if len(holders) == 1 and holders[0].rows == (letter,) and holders[0].axes:
                return letter
        return self.summed[-1] if self.summed else ""

    def _rows(self) -> str:
        """The letter of the dot's rows: that of an operand with axes of its own, else a kept one, else a summed one."""
        partner = {a for o in self._holders(self.dot_letter) for a in o.axes}
        others = [o for o in self.operands if o.axes and not (set(o.axes) & partner) and self.dot_letter not in o.rows]
        if len(others) > 1 or any(len(o.rows) != 1 or o.rows[0] in self.kept for o in others):
            raise PlanError(
                f'dense tiles take at most two operands with dense axes apart: "{self.bound.einsum}" has more'
            )
        if others and partner:
            self.chained = others[0]
            return others[0].rows[0]
        choice = [*self.kept, *(c for c in self.summed if c != self.dot_letter)]
        return max(choice, key=lambda c: self.side[c], default="")

    def _gather(self, o: Operand) -> Gather:
        own = tuple(c for c in o.rows if c in (self.dot_letter, self.row_letter))
        level = ITEM if not o.rows else LANE
        return Gather(Tile(f"{o.name.lower()}_{''.join((*o.rows, *o.axes)) or 'scalar'}", (*own, *o.axes), level), o)

    def body(self) -> tuple[Statement, ...]:
        decodes = [[Decode(self.letters[c.mode], c, level) for c in self.view.levels[level]] for level in (ITEM, LANE)]
        gathers = [self._gather(o) for o in self.operands]
        constant = [g for g in gathers if not g.operand.rows]
        once = [g for g in gathers if g.operand.rows and not set(g.operand.rows) & set(self.looped)]
        inner = [g for g in gathers if set(g.operand.rows) & set(self.looped)]
        partner = [g.out for g in gathers if self.dot_letter in g.operand.rows]
        others = [g.out for g in gathers if g.out not in partner and g.operand is not self.chained]
        value = Value(Tile("x", tuple(c for c in (self.row_letter, self.dot_letter) if c), LEAF))
        steps, total = self._steps(value.out, partner, others)
        nest: tuple[Statement, ...] = (*inner, value, *steps)
        for letter in reversed(self.looped):
            nest = (Loop(LEAF, nest, letter),)
        keyed = tuple(c for c in (self.row_letter,) if c and c in self.kept and c in total.axes)
        extra = tuple(a for a in total.axes if a in self.letters and a not in keyed)
        tail: list[Statement] = []
        source = total
        if extra:
            source = Tile("summed", tuple(a for a in total.axes if a not in extra), ITEM)
            tail.append(Sum(source, total))
        key, owned = row_of(self.kept, self.sizes, ITEM), stores(self.target, self.axes, self.output_axes)
        add = Add(source, key, self.output_axes, owned)
        loop = Loop(LANE, (*decodes[1], *once, *nest))
        return (*decodes[0], *constant, Zero(total), loop, *tail, add)

    def _steps(self, x: Tile, partner: list[Tile], others: list[Tile]) -> tuple[list[Statement], Tile]:
        """The products of one position of the looped letters, and the accumulator they end in."""
        columns = tuple(a for a in self.order if any(a in t.axes for t in partner))
        axes = (*((self.row_letter,) if self.row_letter else ()), *columns)
        steps: list[Statement] = []
        if self._is_dot(columns):
            if not others and not self.chained:
                total = Tile("total", axes, ITEM, folded=1)
                return [Product(total, (x,), tuple(partner), accumulate=True)], total
            part = Tile("part", axes, LEAF, folded=1)
            steps.append(Product(part, (x,), tuple(partner)))
        elif self.looped and not others:
            # Summed once, at the end: Triton aborts on sums that are added up in an unrolled loop.
            total = self._tile("total", (x, *partner), ITEM)
            return [Product(total, (x, *partner), accumulate=True)], total
        else:
            terms = self._tile("terms", (x, *partner))
            part = Tile("part", axes, LEAF) if self.dot_letter else terms
            steps.append(Product(terms, (x, *partner)))
            if self.dot_letter:
                steps.append(Sum(part, terms))
        if self.chained is None:
            total = self._tile("total", (part, *others), ITEM)
            return [*steps, Product(total, (part, *others), accumulate=True)], total
        if others:
            scaled = self._tile("scaled", (part, *others))
            steps.append(Product(scaled, (part, *others)))
            part = scaled
        left = self._gather(self.chained).out
        total = Tile("total", (*self.chained.axes, *part.axes[1:]), ITEM, folded=len(self.chained.axes))
        return [*steps, Product(total, (left,), (part,), accumulate=True)], total

    def _entangled(self) -> bool:
        """Whether an operand has both the contracted letter and the rows', and is no matrix."""
        return any(self.row_letter in o.rows for o in self._holders(self.dot_letter))

    def _is_dot(self, columns: tuple[str, ...]) -> bool:
        """Whether the letter is contracted by a dot: always where another follows, else where it is large enough."""
        if self.chained:
            return True
        if not columns or not self.row_letter or not self.schedule.dot or self._entangled():
            return False
        blocks = prod(self.schedule.block(c) for c in columns)
        return min(self.side[self.row_letter], self.side[self.dot_letter], blocks) >= MIN_DOT

    def _tile(self, name: str, inputs: tuple[Tile, ...], level: int = LEAF) -> Tile:
        present = {a for t in inputs for a in t.axes}
        order = (*(c for c in (self.row_letter, self.dot_letter) if c), *self.order)
        return Tile(name, tuple(a for a in order if a in present), level)
