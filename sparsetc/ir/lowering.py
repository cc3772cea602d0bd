"""What the lowerings of one sparse operand share: the einsum's names and axes, and the tile program around a body.

In: as for `ir.lower`. Out: a base for `lower` (runs, blocks) and `lower_tiles`, each of which adds the statements.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from sparsetc.errors import PlanError
from sparsetc.ir.einsum import Bound
from sparsetc.ir.operands import Target, dense_axes, named_operands, printed_sizes, stores
from sparsetc.ir.plan import Schedule
from sparsetc.ir.tile import Add, DenseAxis, Key, Slot, Statement, Tile, TileProgram, verify
from sparsetc.ir.view import View


class Lowering(ABC):
    """One part's program in the making."""

    key: Key
    """Where results go; set by the lowering."""

    def __init__(self, bound: Bound, view: View, schedule: Schedule, target: Target) -> None:
        """Raises `PlanError` where the view is not of the sparse operand's order, or a letter repeats."""
        e = bound.einsum
        (sparse,) = e.sparse
        self.letters = e.inputs[sparse]
        if len(self.letters) != view.order or len(set(self.letters)) != view.order:
            raise PlanError(f"a view of order {view.order} cannot serve the sparse operand {''.join(self.letters)!r}")
        self.bound, self.view, self.schedule, self.target = bound, view, schedule, target
        self.sizes = printed_sizes(bound)
        self.order = dense_axes(bound)
        self.dense_axes = tuple(DenseAxis(c, self.sizes[c], schedule.block(c)) for c in self.order)
        self.output, self.operands = named_operands(bound)
        self.output_axes = tuple(c for c in e.output if c not in self.letters)
        self.kept = tuple(c for c in e.output if c in self.letters)

    @abstractmethod
    def body(self) -> tuple[Statement, ...]:
        """The program's statements."""

    @property
    def axes(self) -> tuple[DenseAxis, ...]:
        """The program's axes."""
        return self.dense_axes

    def add(self, source: Tile) -> Add:
        """The result, added or stored where it goes."""
        return Add(source, self.key, self.output_axes, stores(self.target, self.dense_axes, self.output_axes))

    def program(self, number: int, format: str) -> TileProgram:
        """The verified program."""
        made = TileProgram(
            equation=str(self.bound.einsum),
            number=number,
            format=format,
            view=self.view,
            letters=self.letters,
            axes=self.axes,
            operands=self.operands,
            output=self.output,
            output_axes=self.output_axes,
            body=self.body(),
            unroll=self.schedule.unroll,
            masked_unroll=self.schedule.masked_unroll,
            warps=self.schedule.warps,
            stages=self.schedule.stages,
            precision=self.schedule.precision,
            slot=self.key.array if isinstance(self.key, Slot) else "",
            rows=self.target.rows,
            extents=self.bound.extents(self.letters) if self.view.sides else (),
            index64=self.target.index64,
        )
        verify(made)
        return made
