"""Tile programs -> the text of one Triton module: a method prints each kind of statement.

In: the verified tile programs of a plan's parts, and the type of their sums. Out: source that can be read alone: one
function a part, its variables named as in the tile program, and one kernel that runs a part (or, fused, all of them:
programs below the first part's count take the first part, and so on). `triton_values` prints axes and stored values,
`triton_layout` the dimensions and positions of tensors.

Rules the text keeps: no device library, and no inline assembly but for bits that CUDA counts (the interpreter has
neither); memory gathers only; addresses in 64 bits only where an array or its positions can pass 2**31, and for lists
of slots; padding never reaches memory or a sum: it is masked when loaded, or, along axes of results, when stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from textwrap import wrap

from sparsetc.codegen.triton_layout import ADDRESS64, all_of, load, placed, sides_of
from sparsetc.codegen.triton_values import COUNT, POPC, TritonValues, bare, flat, known_ahead
from sparsetc.ir.nest import BIAS, HEAD, ITEM, LOW, TOP
from sparsetc.ir.plan import F16
from sparsetc.ir.program import (
    LANES,
    MADE,
    Add,
    Decode,
    Gather,
    Key,
    Loop,
    Product,
    Reduce,
    TileProgram,
    Zero,
    arguments,
    comments,
    names,
    tables_of,
)
from sparsetc.support import Names, among


def signature(head: str, args: list[str], tail: str) -> list[str]:
    """A head and its arguments in parentheses, over as many lines as it takes."""
    one = f"{head}({', '.join(args)}){tail}"
    if len(one) <= 112:
        return [one]
    lines = wrap(f"{', '.join(args)},", 111, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
    return [f"{head}(", *lines, f"){tail}"]


def counts_of(program: TileProgram) -> list[str]:
    """Return the count arguments of a part's function: `programs` if an axis is slowest, then the kernel's numbers."""
    slowest = any(axis.slowest for axis in program.axes)
    return [*(["programs"] if slowest else []), *numbers_of(program)]


def numbers_of(program: TileProgram) -> list[str]:
    """Return the number arguments of a part's kernel: `nonzeros` for equal chunks, and bounds of coordinates."""
    return [*program.view.items.counts, *map(names.size, program.ends)]


class TritonPrinter(TritonValues):
    """The text of one tile program as a Triton function: a method for each kind of statement."""

    def loop(self, s: Loop) -> None:
        """A loop; its printer yields each time its body is to be printed, with masks or without."""
        for _ in getattr(self, f"over_{type(s.axis).__name__.lower()}")(s, s.axis):
            self.visit(s.body)

    def decode(self, s: Decode) -> None:
        """Print a coordinate; along a side, also the mask of positions inside the tile and the mode."""
        self.level = s.level
        ends = [*map(self.limit, s.along), f"{s.name} < {names.size(s.letter)}" if s.end else ""]
        inside = all_of(ends)
        for _ in self.each(s.level):
            self.put(f"{s.name}{self.copy} = {s.coordinate.text(self)}")
            if inside:
                self.put(f"{names.inside(s.letter)} = {inside}")

    def zero(self, s: Zero) -> None:
        """An accumulator."""
        each = self.vectors(s.out.axes)
        self.put(*[f"{self.named(s.out)} = tl.zeros({self.shape(s.out)}, {self.acc})" for _ in each])

    def reduce(self, s: Reduce) -> None:
        """A tile summed over the axes that the result lacks."""
        each = self.vectors(s.source.axes)
        self.put(*[f"{self.named(s.out)} = {self.summed(s.source, s.out.axes)[0]}" for _ in each])

    def gather(self, s: Gather) -> None:
        """Rows of a dense operand at the coordinates of its letters."""
        o = s.operand
        widen = f".to({self.acc})" if o.rounded else self.widened(s.out)
        if s.out.name in self.bf16:  # what only dots take stays rounded
            widen = ""

        texts = [
            f"{self.named(s.out)}{half} = {load(o.name + half, address, mask)}{widen}"
            for address, mask in self.addresses(s)
            for half in (names.IN_HALVES if o.halves else ("",))
        ]
        self.put(*texts)

    def addresses(self, s: Gather) -> Iterator[tuple[str, str]]:
        """Yield the address of a dense operand's rows and the mask of valid ones, in each unrolled copy of the step."""
        o = s.operand
        level = s.out.level
        axes = s.out.axes
        strides = o.strides[: len(o.rows)] or o.row_strides
        columns = o.strides[len(o.rows) :]
        if s.out.folded:
            by_axis = dict(zip(o.axes, columns, strict=True) if columns else self.p.strided(o.axes))
            terms, mask = self.place(s.out, by_axis, tuple(map(flat, sides_of(s.out))))
            rows = self.rows(zip(o.rows, strides, strict=True), (), level, o.nrows * o.width)
            yield " + ".join([*rows, *terms]), mask
            return
        for _ in self.copied(axes, level):
            rows = self.rows(zip(o.rows, strides, strict=True), axes, level, o.nrows * o.width)
            lanes = placed(self.guard(level), (LANES,), axes) if o.rows else ""
            bounds = [placed(self.within(c), (c,), axes) for c in o.axes if c not in self.written]
            mask = all_of([lanes, *[self.inside(c, axes) for c in o.rows], *bounds])
            yield self.address(rows, o.axes, axes, columns), mask

    def product(self, s: Product) -> None:
        """A product of factors, or of two matrices."""
        for _ in self.copied(s.out.axes, max([t.level for t in s.inputs]) if s.accumulate else s.out.level):
            name, plus = self.named(s.out), "+" if s.accumulate else ""
            if not s.dot and s.out.folded:  # a matrix and numbers
                factors = sorted(s.inputs, key=lambda t: len(t.axes))
                self.put(f"{name} {plus}= {' * '.join(map(self.named, factors))}")
            elif not s.dot:
                self.put(f"{name} {plus}= {self.times(s.inputs, s.out.axes)}")
            elif self.halves:
                self.dots_of_halves(s)
            elif self.acc == "tl.int64":  # no matrix unit multiplies 64-bit integers
                left, right = self.matrices(s, summed_first=True)
                self.put(f"{name} {plus}= tl.sum(({left})[:, :, None] * ({right})[:, None, :], 0)")
            else:
                precision = self.p.schedule.precision if self.acc == "tl.float32" else "ieee"
                precision = precision if precision != F16 else "tf32"  # of a side that is computed
                cast, how = (
                    (".to(tl.bfloat16)", "") if precision == "bf16" else ("", f', input_precision="{precision}"')
                )
                if any(t.name in self.narrow for t in s.inputs):
                    cast, how = "", ""
                left, right = self.matrices(s, cast)
                total = f", {name}" if s.accumulate else ""
                self.put(f"{name} = tl.dot({left}, {right}{total}{how}, out_dtype={self.acc})")

    def matrices(self, s: Product, cast: str = "", summed_first: bool = False) -> list[str]:
        """Texts of a dot's sides: left (rows, summed), or (summed, rows) by `summed_first`; right (summed, columns).

        The axes of each are folded in the order in which its largest factor has them; it is transposed where that is
        the other way round.
        """
        texts = []
        for tiles, free, turned in zip((s.left, s.right), sides_of(s.out), (summed_first, True), strict=True):
            largest = max(tiles, key=lambda t: len(t.axes))
            first = largest.axes[0] in s.contracted
            rows, columns = (s.contracted, free) if first else (free, s.contracted)
            rounded = largest.name in self.bf16 or (self.half and any(v.out == largest for v in self.values))
            to = "" if rounded else cast
            if len(tiles) == 1 and largest.folded == len(rows) and largest.axes == (*rows, *columns):
                text = f"{self.named(largest)}{to}"
            else:
                text = self.times(tiles, (*rows, *columns))
                if len(rows) != 1 or len(columns) != 1:
                    text = f"tl.reshape({text}, {[prod(map(self.size, axes)) for axes in (rows, columns)]})"
                text = f"({text}){to}" if to and " * " in text else text + to
            texts.append(text if turned == first else f"tl.trans({text})")
        return texts

    def dots_of_halves(self, s: Product) -> None:
        """A product of float32 as three dots of float16, in one sum: low by high, high by low, then high by high."""
        name, stored = s.out.name, {value.out for value in self.values} | self.in_halves
        for tile in (t.name for t in s.inputs if t not in stored):
            self.put(
                f"{tile}_high = {tile}.to(tl.float16)",
                f"{tile}_low = (({tile} - {tile}_high.to({self.acc})) * {LOW}).to(tl.float16)",
            )
        (left, right), (left_low, right_low) = (self.matrices(self.half_of(s, half)) for half in ("high", "low"))
        part = f"{name}_part" if s.accumulate else name
        how = f"out_dtype={self.acc}"
        self.put(
            f"{part} = tl.dot({left_low}, {right}, {how})",
            f"{part} = tl.dot({left}, {right_low}, {part}, {how})",
            f"{part} = tl.dot({left}, {right}, {part} * {1 / LOW}, {how})",
        )
        if not s.accumulate:
            return
        # Of a plain sum with the part Triton would make the dot's accumulator, and matrix units round towards zero.
        what = f"{self.p.view.innermost.name}s".capitalize()
        self.put(
            f"# {what} are summed outside of the dot, which rounds its sums towards zero.",
            f"{name} = tl.fma({part}, 1.0, {name})",
        )

    @staticmethod
    def half_of(s: Product, half: str) -> Product:
        """Return the product of the `half` (high or low) of each side."""
        left, right = (tuple(replace(t, name=f"{t.name}_{half}") for t in side) for side in (s.left, s.right))
        return replace(s, left=left, right=right)

    # -- results ----------------------------------------------------------------------------------------------------

    def add(self, s: Add) -> None:
        """Add to, or store, rows of the output, once the axes that neither they nor their key have are summed.

        A row is known by coordinates, or by a number stored for each item, fiber, nonzero or kept position, or has the
        number of the item, fiber or nonzero itself.
        """
        p = self.p
        key = s.key
        elements = s.copies * self.p.rows * self.p.width  # of all copies of the output
        cast = ".to(tl.int64)" if elements >= ADDRESS64 else ""
        keyed = self.own(key.letters, s.source.axes, key.level)
        row_stride, *columns = p.strides or (p.width,)
        for _ in self.copied(s.source.axes, key.level):
            value, axes = self.summed(s.source, (*keyed, *s.axes))
            conditions = [placed(self.guard(key.level), (LANES,), axes)]
            if key.kind == "row":
                each = ((c, n * row_stride) for c, n in zip(key.letters, key.strides, strict=True))
                terms = self.rows(each, axes, key.level, elements)
                conditions += [self.inside(c, axes) for c in key.letters]
            elif key.letters:
                terms, conditions = self.slots(key, axes, cast)
            else:
                row = ("item", "fiber", f"pos{self.copy}")[key.level]
                if key.kind == "slot":
                    row = "slot" if known_ahead(key) else load(key.array, row, self.guard(key.level))
                terms = [placed(f"{row}{cast}", keyed, axes, p.width)]
            if s.copies > 1:
                terms.insert(
                    0, f"{f'(item % {s.copies}){cast}' if cast else f'item % {s.copies}'} * {p.rows * p.width}"
                )
            address = self.address(terms, s.axes, axes, columns)
            mask = all_of([*conditions, *[placed(self.within(c), (c,), axes) for c in s.axes]])
            target = f"{p.output} + {address}, {value}{f', mask={mask}' if mask else ''}"
            self.put(f"tl.store({target})" if s.owned else f'tl.atomic_add({target}, sem="relaxed")')

    def slots(self, key: Key, axes: Names, cast: str) -> tuple[list[str], list[str]]:
        """Return terms and conditions of the slots of a sparse output, stored for each kept position; -1 is no slot."""
        p, places = self.p, among(axes, key.letters)
        # A loop's number may be a plain one, so that a sum widens it.
        item = "item" if p.index64 else "item.to(tl.int64)"
        terms = [f"{item if key.level == ITEM else '(tile + tl.zeros([], tl.int64))'} * {p.elements(key.letters)}"]
        for c, stride in p.strided(key.letters):
            terms.append(placed(names.side(c), self.own((c,), places), places, stride))
        mask = all_of(placed(self.limit(c), self.own((c,), places), places) for c in key.letters)
        mask = f", mask={mask}, other=-1" if mask else ""
        self.put(f"slot = tl.load({key.array} + {' + '.join(terms)}{mask})")
        spread = f"[{', '.join(':' if a in places else 'None' for a in axes)}]"
        index = spread if 0 < len(places) < len(axes) else ""
        times = f" * {p.width}" if p.width != 1 else ""
        return [f"slot{cast}{index}{times}"], [f"(slot >= 0){index}"]


def function(p: TileProgram, sums: str, widen: bool) -> list[str]:
    """The lines of a part's function, first of its program's number; `sums`, `widen` as in `module_source`."""
    printer = TritonPrinter(p, sums, widen)
    printer.head()
    printer.visit(p.body)
    read = ["pid", *counts_of(p), *p.arrays, *arguments(p.operands), p.output]
    return [*comments(p), "@triton.jit", *signature(f"def part_{p.number}", read, ":"), *printer.out]


# -- halves -----------------------------------------------------------------------------------------------------------


def splitting(p: TileProgram, s: Gather) -> list[str]:
    """Return the lines of a kernel that splits an operand into halves.

    Each program takes the part that a step gathers, and scales it by its largest magnitude.
    """
    o, printer = s.operand, TritonPrinter(p, "tl.float32", widen=False)
    printer.written = frozenset()  # what lies past the end has another scale
    number = "pid"
    printer.put("pid = tl.program_id(0)")
    places = [(names.at(letter), count) for letter, count in zip(o.rows, o.extents, strict=True)]
    places += [(names.block(axis.letter), axis.programs) for axis in p.blocks_of(o)]
    for name, count in reversed(places[1:]):
        printer.put(f"{name} = {number} % {count}")
        number = f"({number} // {count})"
    if places:
        printer.put(f"{places[0][0]} = {bare(number)}")
    for letter in o.axes:
        printer.dense(p.axis(letter))
    for group in sides_of(s.out) if s.out.folded else ():
        if len(group) > 1:
            printer.put(f"{flat(group)} = tl.arange(0, {printer.positions(group)})")
    ((address, mask),) = printer.addresses(s)
    printer.put(
        f"at = {address}",
        f"x = {load(o.name, 'at', mask)}",
        f"most = tl.max(tl.max(x.to(tl.int32, bitcast=True) & {TOP}, 1), 0)",
        f"exponent = {2 * BIAS + HEAD} - tl.maximum(most >> 23, {HEAD + 1})",
        "x = x * (exponent << 23).to(tl.float32, bitcast=True)",
        "high = x.to(tl.float16)",
    )
    mask = f", mask={mask}" if mask else ""
    printer.put(
        f"tl.store({o.name}_high + at, high{mask})",
        f"tl.store({o.name}_low + at, ((x - high.to(tl.float32)) * {LOW}).to(tl.float16){mask})",
        f"tl.store({names.most(o.name)} + pid, most.to(tl.float32, bitcast=True))",
    )
    head = signature(f"def {names.split(o.name)}", [o.name, *arguments([o])], ":")
    return ["@triton.jit", *head, *printer.out]


# -- modules -----------------------------------------------------------------------------------------------------------


def module_source(
    programs: tuple[TileProgram, ...], sums: str, widen: bool, header: str, fused: bool, popcount: bool = False
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
    for p in programs:
        for s in p.each(Gather):
            if s.operand.halves:
                lines += ["", *splitting(p, s), ""]
    functions = [line for p in programs for line in ("", *function(p, sums, widen), "")]
    if "count(" in "".join(functions):
        lines += ["", *(POPC if popcount else COUNT).splitlines(), ""]
    lines += functions
    groups = [programs] if fused else [(p,) for p in programs]
    for number, group in enumerate(groups):
        lines += ["", *_kernel(group, "kernel" if len(groups) == 1 else f"kernel_{number}"), ""]
    return "\n".join(lines).rstrip() + "\n"


def _kernel(group: tuple[TileProgram, ...], name: str) -> list[str]:
    """A kernel: its arguments are a part's programs and the numbers that it goes by, then pointers.

    Triton compiles no other kernel where these are others.
    """
    counts = [f"{count}_{p.number}" for p in group for count in ("programs", *numbers_of(p))]
    pointers = [f"{array}_{p.number}" for p in group for array in p.arrays]
    pointers += [*[MADE[made](group[0].operands[n].name) for n, made in tables_of(group)], group[0].output]
    quoted = ", ".join(f'"{c}"' for c in counts)
    lines = [f"@triton.jit(do_not_specialize=[{quoted}])", *signature(f"def {name}", [*counts, *pointers], ":")]
    if len(group) == 1:
        return [*lines, *_call(group[0], "tl.program_id(0)", "    ")]
    lines.append("    pid = tl.program_id(0)")
    for n, p in enumerate(group):
        pid = " - ".join(["pid", *[f"programs_{before.number}" for before in group[:n]]])
        test = f"{'elif' if n else 'if'} {pid} < programs_{p.number}:"
        if p is group[-1]:
            test = "else:"
        lines += [f"    {test}", *_call(p, pid, "        ")]
    return lines


def _call(p: TileProgram, pid: str, indent: str) -> list[str]:
    arrays = [f"{name}_{p.number}" for name in (*counts_of(p), *p.arrays)]
    args = [pid, *arrays, *arguments(p.operands, launch=True), p.output]
    return [indent + line for line in signature(f"part_{p.number}", args, "")]
