"""What the lowerings share: the names and axes of operands, where results go, and the program around a body.

In: a `Bound` einsum. Out: names that no index letter takes, the order of dense axes, `Target`; and `Lowering`, a base
for `lower` (runs, blocks) and `lower_tiles`, each of which adds the statements.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import TypeVar

from sparsetc.errors import PlanError
from sparsetc.ir.einsum import Bound
from sparsetc.ir.plan import Schedule
from sparsetc.ir.tile import Add, Decode, DenseAxis, Key, Operand, Row, Slot, Statement, Tile, TileProgram, verify
from sparsetc.ir.view import View

MIN_DOT = 16
"""Smallest side of a `tl.dot` that every supported Triton takes for every type."""


@dataclass(frozen=True)
class Target:
    """Where results go: rows of a dense output, slots of a sparse one, or the nonzeros' own positions."""

    sparse: bool = False
    in_operand_order: bool = False
    """Whether the part keeps the operand's own order, so that a nonzero's position is its slot."""
    owned: bool = False
    """Whether no two items add to one row, so that results may be stored."""
    rows: int = 1
    """Rows of the output."""
    index64: bool = False
    """Whether positions of the stored nonzeros need 64 bits."""


N = TypeVar("N")
T = TypeVar("T")


def joined(things: Iterable[tuple[Iterable[N], T]]) -> list[tuple[set[N], list[T]]]:
    """Things in groups: any two that have a name in common, directly or through others, are together.

    Groups come in the order of their last thing, things of a group in the order in which they were joined.
    """
    groups: list[tuple[set[N], list[T]]] = []
    for names, thing in things:
        own = set(names)
        touching = [g for g in groups if g[0] & own]
        groups = [g for g in groups if not g[0] & own]
        groups.append((own.union(*(g[0] for g in touching)), [t for g in touching for t in g[1]] + [thing]))
    return groups


def row_of(kept: tuple[str, ...], sizes: dict[str, int], level: int) -> Row:
    """The key of a dense output: its kept letters' row-major index."""
    strides = [prod(sizes[d] for d in kept[n + 1 :]) for n in range(len(kept))]
    return Row(tuple(zip(kept, strides, strict=True)), level)


def stores(target: Target, axes: tuple[DenseAxis, ...], output_axes: tuple[str, ...]) -> bool:
    """Whether results may be stored: rows have one owner, and no summed axis is split over the grid."""
    return target.owned and all(a.programs == 1 or a.letter in output_axes for a in axes)


def printed_sizes(bound: Bound) -> dict[str, int]:
    """Sizes by letter. A program over an empty axis is printed, and costed, as if it had one element; it never runs."""
    return {c: max(1, n) for c, n in bound.sizes}


def operand_names(bound: Bound) -> tuple[str, tuple[str, ...]]:
    """Names of the output and the dense operands: capital letters the equation leaves free (A, then B, C, D, …)."""
    taken = set(bound.einsum.indices)
    free = [c for c in "ABCDEFGHIJKLMNOPQRSTUVW" if c not in taken]  # X, Y and Z are sparse ones
    names = [*free, *(f"operand_{n}" for n in range(len(bound.einsum.inputs) + 1))]
    return names[0], tuple(names[1 : 1 + len(bound.einsum.dense)])


def named_operands(bound: Bound) -> tuple[str, tuple[Operand, ...]]:
    """The output's name and the dense operands, each stored as (sparse letters, dense letters).

    Sparse letters come in the sparse operand's order, dense ones in that of `dense_axes`.
    """
    e = bound.einsum
    (sparse,) = e.sparse
    sizes, order = printed_sizes(bound), dense_axes(bound)
    output, names = operand_names(bound)
    operands = []
    for name, position in zip(names, e.dense, strict=True):
        letters = e.inputs[position]
        if len(set(letters)) != len(letters):
            raise PlanError(f"operand {position + 1} repeats a letter; take its diagonal first")
        rows = tuple(c for c in e.inputs[sparse] if c in letters)
        axes = tuple(c for c in order if c in letters)
        width = prod(sizes[c] for c in axes)
        operands.append(Operand(name, position, rows, tuple(sizes[c] for c in rows), axes, width))
    return output, tuple(operands)


def dense_axes(bound: Bound) -> tuple[str, ...]:
    """The dense letters in the order all tiles keep them: those of the output first, as there, then the summed ones."""
    e = bound.einsum
    kept = [c for c in e.output if c not in e.sparse_indices]
    return (*kept, *(c for c in e.dense_indices if c not in kept))


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

    def decodes(self, level: int) -> list[Decode]:
        """What reads the coordinates of one level."""
        read = self.view.coordinates
        return [Decode(self.letters[c.mode], read[c.mode], level) for c in self.view.levels[level]]

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
