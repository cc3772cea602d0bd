"""Write a product of tiles as a nest of loops over its axes, along the last of which it takes vectors.

In: factors, each in registers or in an array. Out: lines of a native loop. Loops over axes that are kept are outside of
those over summed ones; what a loop does not change is multiplied, or loaded, before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from sparsetc.ir.program import REGISTERS, Lines, TileProgram, names
from sparsetc.support import NamedInts, Names, cached_property

LENGTHS = (16, 8, 4, 2, 1)
"""Elements of the vectors that are printed; 1 is a number."""
GROUP = 8
"""Vectors of a row that are printed one after another; a longer row is a loop over half as many."""
TOGETHER = (4, 2, 1)
"""Neighbours whose sums are made in one loop, the most first: a block times a table reads the table's rows less often
(80 blocks of 64 x 64 times 512 columns: 6.8 and 3.6 ms)."""
SUMS = 4
"""Independent partial sums along a row, so that additions do not wait for each other."""


@dataclass(frozen=True)
class Piece:
    """Neighbours along the vector axis that one instruction takes.

    Attributes:
        first: place of the first one, counted from `base` on.
        length: how many there are; 1 for a number.
        base: the variable of a loop over the axis; empty without a loop.
    """

    first: int = 0
    length: int = 1
    base: str = ""

    def called(self, function: str) -> str:
        """Return the name of a function for this number of elements."""
        return function if self.length == 1 else f"{function}{self.length}"


def pieces(size: int, first: int = 0) -> list[Piece]:
    """Return the vectors that make up a row of a size, the longest first."""
    cut = []
    for length in LENGTHS:
        while size >= length:
            cut.append(Piece(first, length))
            first, size = first + length, size - length
    return cut


At = dict[str, "str | int"]
"""Positions along axes: the variable of a loop, or a number where the loop is unrolled."""


@dataclass(frozen=True)
class Factor:
    """Elements that a product reads or writes.

    Attributes:
        name: of an array; or of a number, or what the names of registers begin with.
        strides: how far apart neighbours along each axis are.
        begin: place of the first element in an array, as text; it may read the positions along the sides `along`.
        in_array: whether the elements are in an array, not in variables.
    """

    name: str
    strides: NamedInts = ()
    begin: str = ""
    along: Names = ()
    in_array: bool = True

    @cached_property
    def axes(self) -> frozenset[str]:
        """Axes along which elements differ."""
        return frozenset([axis for axis, _ in self.strides]) | {*self.along}

    def element(self, at: At, piece: Piece, vector: str) -> str:
        """Return the text of an element or vector: a variable's name, or a load from the array."""
        if self.in_array:
            load = piece.called("load") if vector and vector in self.axes else "load"
            return f"{load}({self.name}, {self.place(at, piece, vector)})"
        if not self.strides:
            return self.name
        return f"{self.name}_{piece.first + sum(int(at[a]) * n for a, n in self.strides if a != vector)}"

    def place(self, at: At, piece: Piece, vector: str) -> str:
        """The place of an element in the array."""
        terms, fixed = [self.begin], 0
        for axis, stride in self.strides:
            where = piece.base if axis == vector else at[axis]
            fixed += piece.first if axis == vector else 0
            if isinstance(where, int):
                fixed += where * stride
            elif where:
                terms.append(f"{where} * {stride}" if stride != 1 else where)
        terms = [*filter(None, terms)]
        return " + ".join([*terms, *([str(fixed)] if fixed or not terms else [])])


def zeros(program: TileProgram, piece: Piece) -> str:
    """Return source text for zeros of the result's type."""
    output = program.output
    return f"{output}.dtype.type(0)" if piece.length == 1 else f"{piece.called('zeros')}({output})"


@dataclass
class LoopNest:
    """``target (+)= the product of factors``, summed over the axes that are not kept, where conditions hold.

    Attributes:
        vector: the axis along which vectors lie, or none.
        sign: of the statement, ``=`` or ``+=``.
        inner: the axes that are summed, but the vectors'.
        out: the target, once the place of a row of it is known.
        rows: the positions of neighbours along the last outer axis whose sums are made together; mostly one, at none.
    """

    lines: Lines
    p: TileProgram
    vector: str
    target: Factor
    sign: str
    kept: Names
    conditions: Sequence[str] = ()

    def write(self, factors: Sequence[Factor]) -> None:
        """Print it."""
        self.out = self.target
        self.rows: list[At] = [{}]
        every = frozenset[str]().union(*[factor.axes for factor in (*factors, self.out)])
        axes = [a.letter for a in self.p.axes if a.letter in every]
        vector = self.vector = self.vector if self.vector in axes else ""
        self.unrolled = {a for f in (*factors, self.out) if not f.in_array for a in f.axes}
        outer = [a for a in axes if a in self.kept and a != vector]
        self.inner = [a for a in axes if a not in self.kept and a != vector]
        self.sums_vectors = bool(vector) and vector not in self.kept
        if self.sums_vectors:
            self.over(outer, {}, factors, "", [Piece()], self.summed)
            return
        for head, group in self.groups():
            with self.lines.block(head):
                self.over(outer, {}, factors, "", group, self.kept_row)

    def groups(self) -> list[tuple[str, list[Piece]]]:
        """The heads of loops along the axis of vectors, each with the pieces that one turn takes."""
        if not self.vector:
            return [("", [Piece()])]
        size, length = self.p.axis(self.vector).size, LENGTHS[0]
        turn, held = GROUP // 2 * length, self.vector in self.unrolled
        if held or size < GROUP * length + 1:
            return [("", pieces(size))]
        whole, base = size // turn * turn, names.at(self.vector)
        rest = [("", pieces(size - whole, whole))] if whole < size else []
        return [(f"for {base} in range(0, {whole}, {turn}):", [replace(p, base=base) for p in pieces(turn)]), *rest]

    def loaded(self, factor: Factor, at: At, group: Sequence[Piece]) -> Factor:
        """A row of an array, in registers."""
        name = self.lines.variable("row")
        for piece in group:
            self.lines.put(f"{name}_{piece.first} = {factor.element(at, piece, self.vector)}")
        return Factor(name, tuple([one for one in factor.strides if one[0] == self.vector]), in_array=False)

    def over(
        self,
        axes: Sequence[str],
        at: At,
        factors: Sequence[Factor],
        number: str,
        group: Sequence[Piece],
        then: Callable[[At, Sequence[Factor], str, Sequence[Piece]], None],
    ) -> None:
        """Print loops over axes, before each the product of the numbers that are known; in them `then` prints."""
        lines = self.lines
        left = []
        numbers = [number] if number else []
        for f in factors:
            if f.axes <= at.keys():
                numbers.append(f.element(at, Piece(), self.vector))
            elif f.along and {*f.along} <= at.keys():
                left.append(replace(f, begin=lines.variable("at", f.begin), along=()))
            elif axes and then != self.summed and f.in_array and f.axes <= {*at, self.vector}:  # read again and again
                left.append(self.loaded(f, at, group))
            else:
                left.append(f)
        number = " * ".join(numbers)
        if number and not number.isidentifier() and (axes or len(group) > 1 or self.sums_vectors or self.inner):
            number = lines.variable("f", number)
        if not axes:
            then(at, left, number, group)
            return
        axis, *others = axes
        variable = names.side(axis) if axis in self.p.along else names.at(axis)
        together = self.together(axis, left, group) if not others and then == self.kept_row else 1
        if together > 1:
            with lines.block(f"for {variable} in range(0, {self.p.axis(axis).size}, {together}):"):
                self.rows = [{axis: f"({variable} + {n})" if n else variable} for n in range(together)]
                then(at, left, number, group)
            self.rows = [{}]
            return
        if axis not in self.unrolled:
            with lines.block(f"for {variable} in range({self.p.axis(axis).size}):"):
                self.over(others, {**at, axis: variable}, left, number, group, then)
            return
        for n in range(self.p.axis(axis).size):
            if axis in self.p.along:
                lines.put(f"{variable} = {n}")
            self.over(others, {**at, axis: n}, left, number, group, then)

    def together(self, axis: str, left: Sequence[Factor], group: Sequence[Piece]) -> int:
        """Return how many neighbours along the last outer axis share what inner loops load, in registers."""
        sides = self.out.along or self.conditions or any(f.along for f in left)
        outside = any(axis in f.axes and f.axes.isdisjoint(self.inner) for f in left)  # which is multiplied afterwards
        if not self.inner or sides or outside or axis in self.unrolled:
            return 1
        return next(n for n in TOGETHER if self.p.axis(axis).size % n == 0 and n * len(group) <= max(n == 1, REGISTERS))

    def kept_row(self, at: At, left: Sequence[Factor], number: str, group: Sequence[Piece]) -> None:
        """Print the statement for each piece of a row, after the loops whose sums it takes."""
        with self.lines.block(f"if {' and '.join(self.conditions)}:" if self.conditions else ""):
            self.out = self.target
            if self.out.along and len(group) > 1:
                self.out = replace(self.target, begin=self.lines.variable("to", self.target.begin), along=())
            if not self.inner:
                for piece in group:
                    self.statement(at, piece, [number, *[f.element(at, piece, self.vector) for f in left]])
                return
            sums = [(self.lines.variable("sum"), row) for row in self.rows]
            for name, _ in sums:
                for piece in group:
                    self.lines.put(f"{name}_{piece.first} = {zeros(self.p, piece)}")

            def added(at: At, *inside: Any) -> None:
                for name, row in sums:
                    self.added(lambda piece: f"{name}_{piece.first}", at | row, *inside)  # noqa: B023

            self.over(self.inner, at, left, "", group, added)
            for name, row in sums:
                for piece in group:
                    self.statement(at | row, piece, [number, f"{name}_{piece.first}"])

    def summed(self, at: At, left: Sequence[Factor], number: str, group: Sequence[Piece]) -> None:
        """Print the loops along which vectors are summed, then the statement with their sum."""
        with self.lines.block(f"if {' and '.join(self.conditions)}:" if self.conditions else ""):
            groups, called = self.groups(), partial(self.total, self.lines.variable("sum"))
            totals: dict[str, Piece] = {}
            for _, turn in groups:
                totals |= {called(piece): piece for piece in turn}
            for total, piece in totals.items():
                self.lines.put(f"{total} = {zeros(self.p, piece)}")
            for head, turn in groups:
                with self.lines.block(head):
                    self.over(self.inner, at, left, "", turn, lambda *inside: self.added(called, *inside))
            vectors: dict[int, list[str]] = {}
            for total, piece in totals.items():
                vectors.setdefault(piece.length, []).append(total)
            sums = [f"add_up({' + '.join(each)})" if n > 1 else each[0] for n, each in vectors.items()]
            self.statement(at, Piece(), [number, f"({' + '.join(sums)})" if len(sums) > 1 else sums[0]])

    @staticmethod
    def total(name: str, piece: Piece) -> str:
        """The variable that adds up a piece of each row."""
        beside = piece.first // LENGTHS[0] % SUMS if piece.length == LENGTHS[0] else 0
        return f"{name}_{piece.length}_{beside}"

    def added(
        self, total: Callable[[Piece], str], at: At, left: Sequence[Factor], number: str, group: Sequence[Piece]
    ) -> None:
        """Print what adds the product to the sum of each piece."""
        for piece in group:
            elements = [number, *[f.element(at, piece, self.vector) for f in left]]
            self.lines.put(f"{total(piece)} += {' * '.join(filter(None, elements))}")

    def statement(self, at: At, piece: Piece, elements: Sequence[str]) -> None:
        """Print the statement that stores a product or adds it to the result."""
        out, vector = self.out, self.vector if self.vector in self.out.axes else ""
        value = " * ".join(filter(None, elements)) or f"{self.p.output}.dtype.type(1)"
        if not out.in_array:
            self.lines.put(f"{out.element(at, piece, vector)} {self.sign} {value}")
            return
        if self.sign == "+=":
            value = f"{out.element(at, piece, vector)} + {value}"
        self.lines.put(f"store({out.name}, {out.place(at, piece, vector)}, {value})")
