"""The operands and axes of a tile program: the dense ones of an einsum, and sparse ones as their values are read.

In: a `Bound` einsum, or a view and its letters. Out: names that no index letter takes, `Operand`, `DenseAxis` and the
order of dense axes; `Stored`, which says from which arrays values are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from math import prod

from sparsetc.errors import PlanError
from sparsetc.ir.equation.einsum import Bound
from sparsetc.ir.nest import Nest, Values
from sparsetc.ir.program.names import most, rounded
from sparsetc.support import Ints, NamedInts, Names, among, cached_property, outside, row_major, volume

MIN_DOT = 16
"""Smallest side of a `tl.dot` that every supported Triton takes for every type."""
WARPGROUP = 64
"""Rows from which Hopper's instruction multiplies matrices from shared memory, which takes one buffer more; also its
least columns."""


@dataclass(frozen=True)
class DenseAxis:
    """An axis of dense operands only (a rank): its size, and the block of one program.

    Attributes:
        fold: the letters that an axis of a pair of tiles is a fold of, and how many positions of each, row-major.
        lengths: powers of two that add up to the block, where a program takes it in several vectors; empty for one.
        slowest: whether all items run for one block before the next, and not all blocks of one item.
    """

    letter: str
    size: int
    block: int
    fold: NamedInts = ()
    lengths: Ints = ()
    slowest: bool = False

    @cached_property
    def programs(self) -> int:
        """Grid programs the axis is split over."""
        return -(-self.size // self.block)

    @property
    def ragged(self) -> bool:
        """True if the last block reaches past the end."""
        return self.size % self.block != 0

    @cached_property
    def vectors(self) -> tuple[tuple[int, int, bool], ...]:
        """Return the vectors of a program along the axis: first place in the block, length, if it may pass the end."""
        if not self.lengths:
            return ((0, self.block, self.ragged),)
        ends = list(accumulate(self.lengths))
        last = (self.programs - 1) * self.block
        return tuple((end - n, n, last + end > self.size) for n, end in zip(self.lengths, ends, strict=True))


@dataclass(frozen=True)
class Operand:
    """A dense operand: a table of rows, which sparse letters number, of dense letters.

    Attributes:
        width: elements of one row: the product of the sizes of `axes`.
        rounded: whether it is read in bfloat16, to which it is rounded once a call.
        split: whether a dot takes its rows in halves, so that its largest magnitude is found once a call.
        halves: whether dots take it in halves that are made once a call, each part that a step gathers by its largest.
        arranged: whether the einsum has its letters in another order, so that a call copies it.
        strides: how far apart positions of `rows` and of `axes` lie, where it is read in the order that it is given in;
            empty where it lies as (rows, axes).
    """

    name: str
    rows: Names
    extents: Ints
    axes: Names
    width: int
    rounded: bool = False
    split: bool = False
    halves: bool = False
    arranged: bool = False
    strides: Ints = ()

    @cached_property
    def nrows(self) -> int:
        """Rows of the table."""
        return prod(self.extents)

    @cached_property
    def row_strides(self) -> list[int]:
        """Return the distance between positions along each of `rows` in a table of shape (rows, axes)."""
        return [n * self.width for n in row_major(self.extents)]


@dataclass(frozen=True)
class Stored:
    """A sparse operand as a `Value` reads it: the letters along whose sides its values lie, and how they are stored.

    Attributes:
        name: empty where it is the only one.
    """

    name: str
    letters: Names
    values: Values

    def array(self, name: str) -> str:
        """Return the name of one of the operand's arrays or variables."""
        return f"{self.name}_{name}" if self.name else name

    @property
    def held(self) -> Names:
        """The arrays of its values; of tiles in halves, of the high and of the low ones."""
        return tuple(map(self.array, self.values.held))

    def stride(self, letter: str) -> int:
        """Return the distance in storage between neighbouring positions of a letter."""
        return self.values.strides[self.letters.index(letter)]


def stored_of(view: Nest, letters: Names) -> Stored:
    """The one sparse operand of a view, by the letters of its modes."""
    values, sided = view.values, view.sided
    if len(sided) < len(values.sides):  # the other modes ride along these, and have one position
        sequence = tuple([sided.index(mode) for mode in values.sequence if mode in sided])
        values = replace(values, sides=tuple([values.sides[mode] for mode in sided]), sequence=sequence)
    return Stored("", tuple([letters[mode] for mode in sided]), values)


@lru_cache(maxsize=1024)
def printed_sizes(bound: Bound) -> dict[str, int]:
    """Sizes by letter, not to be written to.

    A program over an empty axis is printed, and costed, as if it had one element; it never runs.
    """
    return {c: max(1, n) for c, n in bound.sizes}


def operand_names(bound: Bound) -> tuple[str, Names]:
    """Names of the output and the dense operands: capital letters the equation leaves free (A, then B, C, D, …)."""
    letters = set(bound.einsum.indices)
    free = outside("ABCDEFGHIJKLMNOPQRSTUVW", letters)  # X, Y and Z are sparse ones
    names = [*free, *[f"operand_{n}" for n in range(len(bound.einsum.inputs) + 1)]]
    return names[0], tuple(names[1 : 1 + len(bound.einsum.dense)])


@lru_cache(maxsize=1024)
def named_operands(bound: Bound, as_given: bool = False) -> tuple[str, tuple[Operand, ...]]:
    """The output's name and the dense operands, each as (sparse letters, dense letters).

    Sparse letters come in the sparse operand's order, dense ones in that of `Einsum.axes`.

    Args:
        bound: the einsum.
        as_given: True for programs that read by strides what lies in another order, if `in_runs`.
    """
    e = bound.einsum
    (sparse,) = e.sparse
    sizes = printed_sizes(bound)
    output, names = operand_names(bound)
    operands = []
    for name, position in zip(names, e.dense, strict=True):
        letters = e.inputs[position]
        if len(set(letters)) != len(letters):
            raise PlanError(f"operand {position + 1} repeats a letter; take its diagonal first")
        rows = among(e.inputs[sparse], letters)
        axes = among(e.axes, letters)
        width = volume(sizes, axes)
        written, read = ([c for c in order if sizes[c] > 1] for order in (letters, (*rows, *axes)))
        extents = tuple([sizes[c] for c in rows])
        strided = as_given and in_runs(letters, (*rows, *axes), sizes)
        at = {c: volume(sizes, letters[n + 1 :]) for n, c in enumerate(letters)}
        strides = tuple([at[c] for c in (*rows, *axes)]) if strided else ()
        operands.append(
            Operand(name, rows, extents, axes, width, arranged=written != read and not strided, strides=strides)
        )
    return output, tuple(operands)


RUN = 16
"""Neighbouring elements from which kernels read and write a tensor in another order than theirs as fast as in it: 32
bytes of float16, a sector. A layer of blocks of 64 copied its activations and its result, 48 us each of 132 (H100)."""


def in_runs(given: Names, read: Names, sizes: Mapping[str, int]) -> bool:
    """Return True if letters lie in another order than they are read in, and the last of both is the same long one."""
    lying, wanted = ([c for c in letters if sizes[c] > 1] for letters in (given, read))
    return lying != wanted and lying[-1] == wanted[-1] and sizes[lying[-1]] >= RUN


HALVES = ("high", "low", "most")
"""The tables of a dense operand in halves: both, scaled, and the largest magnitude of each part that a step gathers."""
MADE: dict[str, Callable[[str], str]] = {
    "": str,
    "rounded": rounded,
    "high": "{}_high".format,
    "low": "{}_low".format,
    "most": most,
}
"""Names, by operand, of the tables that may be made of a dense one: itself, in bfloat16, and those of halves."""


def tables(o: Operand) -> Names:
    """Return what is made of one operand, once a call, for a program to read: some of `MADE`."""
    if o.halves:
        return HALVES
    elements = "rounded" if o.rounded else ""
    return (elements, "most") if o.split else (elements,)


def arguments(operands: Iterable[Operand], launch: bool = False) -> list[str]:
    """Return the names of the tables of operands; a launch, which may take one both as it is and cast, tells these."""
    each = [(o.name, made) for o in operands for made in tables(o)]
    return [MADE[made if launch or made != "rounded" else ""](name) for name, made in each]
