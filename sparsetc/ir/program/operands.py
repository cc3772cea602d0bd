"""The dense operands of an einsum with one sparse operand: their names, their axes, and how they are stored.

In: a `Bound` einsum. Out: names that no index letter takes, `Operand`, and the order of dense axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from sparsetc.errors import PlanError
from sparsetc.ir.equation.einsum import Bound
from sparsetc.ir.program.names import most, rounded
from sparsetc.ir.program.tile import Operand, TileProgram

MIN_DOT = 16
"""Smallest side of a `tl.dot` that every supported Triton takes for every type."""


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


MADE = ("", "rounded", "most")
"""What a program may be given of a dense operand: it as it is, in bfloat16, or its largest magnitude."""


class Table(NamedTuple):
    """What programs are given of a dense operand, made once a call where it is not the operand itself."""

    operand: str
    made: str = ""
    """One of `MADE`."""

    @property
    def name(self) -> str:
        """What a launch calls it, which may be given an operand as it is and rounded."""
        return rounded(self.operand) if self.made == "rounded" else self.own

    @property
    def own(self) -> str:
        """What a program calls it."""
        return most(self.operand) if self.made == "most" else self.operand


def tables(o: Operand) -> tuple[Table, ...]:
    """What a program is given of an operand."""
    elements = Table(o.name, "rounded" if o.rounded else "")
    return (elements, Table(o.name, "most")) if o.split else (elements,)


def tables_of(programs: Sequence[TileProgram]) -> tuple[Table, ...]:
    """The tables that a launch of programs is given: of an operand that some have rounded and others have not, both."""
    each = zip(*(p.operands for p in programs), strict=True)
    given = ({t for o in own for t in tables(o)} for own in each)
    return tuple(t for own in given for t in sorted(own, key=lambda t: MADE.index(t.made)))


def dense_axes(bound: Bound) -> tuple[str, ...]:
    """The dense letters in the order all tiles keep them: those of the output first, as there, then the summed ones."""
    e = bound.einsum
    kept = [c for c in e.output if c not in e.sparse_indices]
    return (*kept, *(c for c in e.dense_indices if c not in kept))
