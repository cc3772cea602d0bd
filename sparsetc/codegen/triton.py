"""Tile programs -> the text of one Triton module, whose functions have a method for each kind of statement.

In: the verified tile programs of a plan's parts, and the type of their sums. Out: source that can be read alone:
one function a part, named as its statements are, and one kernel that runs a part (or, fused, all of them: programs
below the first part's count take the first part, and so on). `triton_loops` prints axes, `triton_values` what is stored
and results, `triton_layout` the dimensions and positions of tensors.

Rules the text keeps: no inline assembly and no device library (the interpreter has neither); memory gathers only;
addresses in 64 bits only where a product of sizes can pass 2**31; padding is masked when loaded, so that it never
reaches memory or a sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain
from math import prod
from textwrap import wrap

from sparsetc.codegen import triton_loops as loops
from sparsetc.codegen import triton_values as values
from sparsetc.codegen.triton_bitmaps import COUNT, POPC
from sparsetc.codegen.triton_layout import ADDRESS64, Layout, TritonCoordinates, sides_of
from sparsetc.ir.nest.nest import ITEM, LANE, LEAF
from sparsetc.ir.program import names
from sparsetc.ir.program import tile as ir
from sparsetc.ir.program.operands import tables, tables_of
from sparsetc.support.lru import cached_property


def signature(head: str, args: list[str], tail: str) -> list[str]:
    """A head and its arguments in parentheses, over as many lines as it takes."""
    one = f"{head}({', '.join(args)}){tail}"
    if len(one) <= 112:
        return [one]
    lines = wrap(f"{', '.join(args)},", 111, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
    return [f"{head}(", *lines, f"){tail}"]


def counts_of(program: ir.TileProgram) -> list[str]:
    """What a part's function is told of its size: its programs where the grid takes slabs, nonzeros of equal chunks."""
    slabs = any(axis.slab for axis in program.axes)
    return [*(["programs"] if slabs else []), *program.view.items.counts]


class TritonPrinter(Layout):
    """Prints one tile program as a Triton function of its program number.

    Attributes:
        widen: the text that brings what is loaded to the type of the sums.
        words: words loaded so far in the scope of each level.
    """

    def __init__(self, program: ir.TileProgram, sums: str, widen: bool) -> None:
        """Take a program, Triton's type of its sums, and whether the operands are narrower than these."""
        super().__init__(program)
        self.acc = sums
        self.widen = f".to({sums})" if widen else ""
        self.out: list[str] = []
        self.indent = 1
        self.masked = False
        self.copies = 1
        self.words: tuple[set[str], ...] = (set(), set(), set())

    # -- text -------------------------------------------------------------------------------------------------------
    def put(self, text: str) -> None:
        self.out.append("    " * self.indent + text)

    def lines(self) -> list[str]:
        p = self.p
        arguments = ["pid", *counts_of(p), *p.arrays, *(t.own for o in p.operands for t in tables(o)), p.output]
        loops.head(self)
        self.nested(p.body)
        comment = ["# " + line for line in str(p).splitlines()]
        return [*comment, "@triton.jit", *signature(f"def part_{p.number}", arguments, ":"), *self.out]

    # -- what is known of the program -------------------------------------------------------------------------------
    @cached_property
    def spanned(self) -> frozenset[str]:
        """Axes of which stored values have several positions at once."""
        return frozenset(a for s in values.statements(self) for a in s.out.axes)

    @cached_property
    def decodes(self) -> dict[str, ir.Decode]:
        """Return, by letter, the statement that reads the coordinate which addresses rows."""
        return {s.letter: s for s, _ in self.p.statements if isinstance(s, ir.Decode) and not s.tile}

    @property
    def half(self) -> bool:
        """Whether the values are stored in bfloat16."""
        return self.p.half and self.acc == "tl.float32" and not self.widen

    # -- copies, vectors and guards ---------------------------------------------------------------------------------
    def each(self, level: int) -> list[str]:
        """Suffixes of the copies a statement is printed for: one a step taken together."""
        return [f"_{n}" for n in range(self.copies)] if level == LEAF and self.copies > 1 else [""]

    def copied(self, axes: Sequence[str], level: int) -> Iterator[str]:
        """The suffixes of a statement over these axes, for each of the vectors that an axis is in."""
        for _ in self.vectors(axes):
            yield from self.each(level)

    def guard(self, level: int, u: str) -> str:
        """The condition under which a lane of this level holds something; empty where all do."""
        if level == LEAF:
            return f"ok{u}" if self.masked else ""
        return "length > 0" if level == LANE and self.p.view.beside[level] else ""

    def inside(self, letter: str, axes: Sequence[str]) -> str:
        """The condition that a coordinate is one of its tile and its mode, laid out over axes; empty where all are."""
        decode = self.decodes[letter]
        guarded = decode.end or any(self.p.axis(c).ragged for c in decode.along)
        return self.placed(names.inside(letter), self.own((letter,), axes), axes) if guarded else ""

    def own(self, letters: Sequence[str], axes: Sequence[str], level: int = LANE) -> tuple[str, ...]:
        """The axes on which a coordinate depends: positions along a side, or the lanes, below the item."""
        sides = chain.from_iterable(self.decodes[c].along if c in self.decodes else (c,) for c in letters)
        return (*self.p.view.beside[level], *dict.fromkeys(filter(axes.__contains__, sides)))

    # -- statements -------------------------------------------------------------------------------------------------
    def nested(self, body: Sequence[ir.Statement]) -> None:
        """Statements in their order."""
        for s in body:
            self.statement(s)

    def statement(self, s: ir.Statement) -> None:
        if isinstance(s, ir.Loop):
            loops.LOOPS[type(s.axis)](self, s, s.axis)
        elif isinstance(s, ir.Decode):
            for u in self.each(s.level):
                self.decode(s, u)
        elif isinstance(s, ir.Value):
            values.value(self, s)
        elif isinstance(s, ir.Scale):
            values.scale(self, s)
        elif isinstance(s, ir.Zero):
            for u in self.copied(s.out.axes, ITEM):
                self.put(f"{self.named(s.out, u)} = tl.zeros({self.shape(s.out)}, {self.acc})")
        elif isinstance(s, ir.Gather):
            for u in self.copied(s.out.axes, s.out.level):
                self.gather(s, u)
        elif isinstance(s, ir.Reduce):
            for u in self.copied(s.source.axes, ITEM):
                self.put(f"{self.named(s.out, u)} = {self.summed(s.source, u, s.out.axes)[0]}")
        elif isinstance(s, ir.Product):
            for u in self.copied(s.out.axes, max([t.level for t in s.inputs]) if s.accumulate else s.out.level):
                self.product(s, u)
        else:
            for u in self.copied(s.source.axes, s.key.level):
                values.add(self, s, u)

    def decode(self, s: ir.Decode, u: str) -> None:
        """A coordinate; of those along a side, also whether they lie inside the tile and the mode."""
        self.put(f"{s.name}{u if s.level == LEAF else ''} = {s.coordinate.text(TritonCoordinates(self, s.level, u))}")
        if inside := self.all_of([*map(self.limit, s.along), f"{s.name} < {s.end}" if s.end else ""]):
            self.put(f"{names.inside(s.letter)} = {inside}")

    def coordinate(self, letter: str, u: str) -> str:
        """The name of a letter's coordinate in a copy of a statement that reads it."""
        level = self.p.view.level_of(self.p.letters.index(letter))
        return f"{names.at(letter)}{u if level == LEAF else ''}"

    def gather(self, s: ir.Gather, u: str) -> None:
        """Rows of a dense operand at the coordinates of its letters."""
        o, level, axes, stride, rows = s.operand, s.out.level, s.out.axes, s.operand.nrows * s.operand.width, []
        for letter, extent in zip(o.rows, o.extents, strict=True):
            stride //= extent
            rows.append((self.coordinate(letter, u), self.own((letter,), axes, level), stride))
        terms = [*self.terms(rows, axes, o.nrows * o.width >= ADDRESS64), *self.columns(o.axes, axes)]
        lanes = self.placed(self.guard(level, u), (ir.LANES,), axes) if o.rows else ""
        bounds = self.bounds([c for c in o.axes if c not in self.written], axes)
        mask = self.all_of([lanes, *(self.inside(c, axes) for c in o.rows), *bounds])
        self.put(f"{self.named(s.out, u)} = {self.load(o.name, self.address(terms), mask)}{self.summable(s)}")

    def summable(self, s: ir.Gather) -> str:
        """What brings gathered rows to the type of the sums, but for those that only dots take, rounded as they are."""
        if not s.operand.rounded:
            return self.widen
        return "" if s.out.name in self.bf16 else f".to({self.acc})"

    @cached_property
    def bf16(self) -> frozenset[str]:
        """The gathered tiles that stay rounded: those that are whole sides of dots in bfloat16, and nothing else."""
        rounded = {s.out.name for s, _ in self.p.statements if isinstance(s, ir.Gather) and s.operand.rounded}
        for s, _ in self.p.statements:
            sides = (s.left, s.right) if isinstance(s, ir.Product) and s.dot else ()
            rounded -= {*ir.flow(s)[1]} - {side[0].name for side in sides if len(side) == 1}
        return frozenset(rounded)

    # -- tile einsums -----------------------------------------------------------------------------------------------
    def product(self, s: ir.Product, u: str) -> None:
        """A product of factors, or of two matrices."""
        name, plus = self.named(s.out, u), "+" if s.accumulate else ""
        if not s.dot:
            self.put(f"{name} {plus}= {self.times(s.inputs, u, s.out.axes)}")
        elif values.in_halves(self, s):
            values.halves_product(self, s, u)
        elif self.acc == "tl.int64":  # no matrix unit multiplies 64-bit integers
            left, right = self.matrices(s, u, summed_first=True)
            self.put(f"{name} {plus}= tl.sum(({left})[:, :, None] * ({right})[:, None, :], 0)")
        else:
            precision = self.p.schedule.precision if self.acc == "tl.float32" else "ieee"
            cast, how = (".to(tl.bfloat16)", "") if precision == "bf16" else ("", f', input_precision="{precision}"')
            left, right = self.matrices(s, u, cast)
            total = f", {name}" if s.accumulate else ""
            self.put(f"{name} = tl.dot({left}, {right}{total}{how}, out_dtype={self.acc})")

    def matrices(self, s: ir.Product, u: str, cast: str = "", summed_first: bool = False) -> tuple[str, str]:
        """Both sides of a dot: (rows, summed), or (summed, rows) where that is asked for, and (summed, columns)."""
        rows, columns = sides_of(s.out)
        left = self.matrix(s.left, s.contracted, rows, u, cast, summed_first)
        return left, self.matrix(s.right, s.contracted, columns, u, cast, True)

    def matrix(
        self, tiles: Sequence[ir.Tile], summed: tuple[str, ...], free: tuple[str, ...], u: str, cast: str, turned: bool
    ) -> str:
        """A side of a dot, its summed axes and the others folded in the order in which its largest factor has them.

        It is transposed where its rows should be summed, as `turned` says, and are not, or the other way round.
        """
        largest = max(tiles, key=lambda t: len(t.axes))
        first = largest.axes[0] in summed
        rows, columns = (summed, free) if first else (free, summed)
        stored = largest.name in self.bf16 or (self.half and any(s.out == largest for s in values.statements(self)))
        cast = "" if stored else cast
        if len(tiles) == 1 and largest.folded == len(rows) and largest.axes == (*rows, *columns):
            text = f"{self.named(largest, u)}{cast}"
        else:
            text = self.times(tiles, u, (*rows, *columns))
            if len(rows) != 1 or len(columns) != 1:
                text = f"tl.reshape({text}, {[prod(map(self.size, axes)) for axes in (rows, columns)]})"
            text = f"({text}){cast}" if cast and " * " in text else text + cast
        return text if turned == first else f"tl.trans({text})"


@lru_cache(maxsize=256)
def module_source(
    programs: tuple[ir.TileProgram, ...], sums: str, widen: bool, header: str, fused: bool, popcount: bool = False
) -> str:
    """Return the whole file: header, one function a part, and the kernels (`kernel`, or `kernel_0`, `kernel_1`, …).

    Args:
        programs: one a part.
        sums: Triton's type of the sums, ``tl.float32``, ``tl.float64`` or ``tl.int64``.
        widen: whether the operands are narrower than the sums.
        header: the module's docstring.
        fused: whether one kernel runs all parts.
        popcount: whether the target counts bits by an instruction of PTX; elsewhere, and under the interpreter, shifts
            and masks do.
    """
    lines = [f'"""{header}"""', "", "import triton", "import triton.language as tl", ""]
    functions = [line for p in programs for line in ("", *TritonPrinter(p, sums, widen).lines(), "")]
    if "count(" in "".join(functions):
        lines += ["", *(POPC if popcount else COUNT).splitlines(), ""]
    lines += functions
    groups = [programs] if fused else [(p,) for p in programs]
    for number, group in enumerate(groups):
        lines += ["", *_kernel(group, "kernel" if len(groups) == 1 else f"kernel_{number}"), ""]
    return "\n".join(lines).rstrip() + "\n"


def _kernel(group: tuple[ir.TileProgram, ...], name: str) -> list[str]:
    """A kernel: its arguments are a part's programs, its nonzeros where items are equal chunks, then pointers."""
    counts = [f"{count}_{p.number}" for p in group for count in ("programs", *p.view.items.counts)]
    pointers = [f"{array}_{p.number}" for p in group for array in p.arrays]
    pointers += [*(t.name for t in tables_of(group)), group[0].output]
    quoted = ", ".join(f'"{c}"' for c in counts)
    lines = [f"@triton.jit(do_not_specialize=[{quoted}])", *signature(f"def {name}", [*counts, *pointers], ":")]
    if len(group) == 1:
        return [*lines, *_call(group[0], "tl.program_id(0)", "    ")]
    lines.append("    pid = tl.program_id(0)")
    for n, p in enumerate(group):
        pid = " - ".join(["pid", *(f"programs_{before.number}" for before in group[:n])])
        test = "else:" if p is group[-1] else f"{'elif' if n else 'if'} {pid} < programs_{p.number}:"
        lines += [f"    {test}", *_call(p, pid, "        ")]
    return lines


def _call(p: ir.TileProgram, pid: str, indent: str) -> list[str]:
    arrays = [f"{name}_{p.number}" for name in (*counts_of(p), *p.arrays)]
    args = [pid, *arrays, *(t.name for o in p.operands for t in tables(o)), p.output]
    return [indent + line for line in signature(f"part_{p.number}", args, "")]
