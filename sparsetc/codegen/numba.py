"""Tile programs -> the text of one module of native loops, which numba compiles: the default on a CPU with numba.

In: the tile programs that torch would run, of whole axes and one lane. Out: a module with a function a part, which is
printed by a walk over its statements. A function takes a range of work items, or of nonzeros where items are chunks of
these, so that threads can share a part; it adds to an output of its own, or stores rows that no other item has.

Lanes are a loop. Rows of results stay in registers: an accumulator is one or more vectors along the last dense axis,
each a variable (``total_0`` and ``total_16``), and other axes of it are unrolled; what would take more than `REGISTERS`
vectors is a local array. A gathered row is loaded where it is multiplied; a product that one statement reads is printed
there. Long sums are made in pieces of `LONG` terms (`tensor.dtypes`): ``total_before`` is what was summed before.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from sparsetc.codegen.numba_nests import LENGTHS, Factor, LoopNest, pieces, zeros
from sparsetc.ir.nest import ITEM, Each, Fibers, Lookup, Run, Writer
from sparsetc.ir.program import (
    REGISTERS,
    Add,
    Decode,
    DenseAxis,
    Gather,
    Lines,
    Loop,
    Product,
    Statement,
    Tile,
    TileProgram,
    Value,
    Zero,
    comments,
    flow,
    names,
)
from sparsetc.support import Names
from sparsetc.tensor.dtypes import LONG


def unprinted(program: TileProgram) -> str:
    """Return why a program is left to torch; an empty text where native loops are printed."""
    view = program.view
    if program.covers:
        return "products of whole tensors are torch's"
    if view.pairs or view.values.halves or not program.at_once:
        return "pairs of tiles, and values in halves, have no native loops"
    if not all(type(axis) in (Run, Fibers, Each) and axis.lanes <= 1 for axis in view.loops):
        return "loops of several lanes, and over a tile's side, are not native"
    if view.items.counts and program.result.key.level == ITEM and program.result.key.kind != "row":
        return "results of equal chunks have no native loops"
    return ""


def function(program: TileProgram) -> list[str]:
    """Return the lines of a part's function."""
    text, tables = [], [o.name for o in program.operands]
    for axis in program.split:
        whole = axis.size // axis.block * axis.block
        for begin, end, width in ((0, whole, axis.block), (whole, axis.size, axis.size - whole)):
            text += panels(program, replace(axis, size=width), range(begin, end, axis.block)) if width else []
        tables = [PANEL.format(o.name) if axis.letter in o.axes else o.name for o in program.operands]
    text = text or NumbaPrinter(program, program).items()
    arguments = ["begin", "end", *program.arrays, *tables, program.output]
    return [*comments(program), "@native", f"def part_{program.number}({', '.join(arguments)}):", *text]


PANEL = "every_{}"
"""The name of a table whose panels are copied, each before it is read."""


def copied(program: TileProgram) -> int:
    """Return how many elements the panels of tables have that each thread copies."""
    each = program.operands
    return sum([o.nrows * o.width * a.block // a.size for a in program.split for o in each if a.letter in o.axes])


def panels(program: TileProgram, axis: DenseAxis, firsts: range) -> list[str]:
    """Return lines for each panel of an axis: all items, which read tables as wide as a cache holds."""
    axes = tuple([axis if a.letter == axis.letter else a for a in program.axes])
    panel = replace(program, axes=axes)
    operands = tuple([replace(o, width=panel.elements(o.axes)) for o in program.operands])
    printer = NumbaPrinter(replace(panel, operands=operands), program)
    first = printer.coordinates[axis.letter] = names.first(axis.letter)
    with printer.block(f"for {first} in {firsts}:"):
        for o in [o for o in operands if axis.letter in o.axes]:
            printer.local.append(f"    {o.name} = np.empty({o.nrows * o.width}, {PANEL.format(o.name)}.dtype)")
            beside = panel.elements(o.axes[o.axes.index(axis.letter) + 1 :])
            pitch, width = (own.axis(axis.letter).size * beside for own in (program, panel))
            printer.put(f"copy({PANEL.format(o.name)}, {first} * {beside}, {pitch}, {o.name}, {width})")
        return printer.items()


class NumbaPrinter(Writer, Lines):
    """The text of one tile program as loops over a range of its items.

    Attributes:
        vector: the axis along which vectors lie: the last axis of all rows that have it; empty where there is none.
        stores_vectors: whether it is that of the output's rows too; else these are stored a number at a time.
        as_output: whether tiles have their axes in the output's order, as they have unless vectors were shorter then.
        factors: by the name of a tile, the factors that it is the product of.
        coordinates: by letter, the coordinate that addresses rows; along a side it is read where its position is known.
        nonzero: the variable of the nonzero that is read.
        uncut: those that are cut at the end of their mode, as they are.
        local: lines that make arrays.
        pieces: by axes of a tile in registers, the end of each one's name, and its zeros.
        tables: dense operands by name, as long as a panel of them is.
        strides: how far apart neighbours along the axes of a row of the result are.
    """

    def __init__(self, program: TileProgram, whole: TileProgram) -> None:
        """Prepare the text of a program, or of a panel of the `whole` one."""
        Lines.__init__(self)
        self.p, self.nonzero = program, "n"
        self.width, self.decodes = whole.width, program.decodes
        self.tables = {o.name: o for o in program.operands}
        self.strides = whole.strided(program.result.axes)
        self.factors: dict[str, tuple[Factor, ...]] = {}
        self.coordinates: dict[str, str] = {}
        self.uncut: dict[str, str] = {}
        self.local: list[str] = []
        self.pieces = dict[Names, list[tuple[str, str]]]()
        self.readers = defaultdict[str, list[Statement]](list)
        statements = [s for s, _ in program.statements]
        for s in program.each(Product):
            for tile in s.inputs:
                self.readers[tile.name].append(s)
        self.readers[program.result.source.name].append(program.result)
        tiles = [s.out for s in statements if isinstance(s, Zero | Product)]
        layouts = []
        for self.as_output in (True, False):
            rows = [*(o.axes for o in program.operands), *map(self.laid, tiles)]
            dense = [a.letter for a in reversed(program.axes) if a.letter not in program.along]
            fit = [c for c in dense if all(c not in axes[:-1] for axes in rows)]
            stored = [c for c in fit if c not in program.output_axes[:-1]]
            vector = next(iter(stored or fit), "")
            layouts.append((program.elements(vector), self.as_output, vector, bool(stored)))
        _, self.as_output, self.vector, self.stores_vectors = max(layouts, key=lambda layout: layout[0])

    # -- coordinates ------------------------------------------------------------------------------------------------
    def position(self, axis: str) -> str:
        return {"nonzero": self.nonzero, "fiber": "block", "lane": "0"}.get(axis, axis)

    def coordinate(self, mode: int) -> str:
        return self.p.read[self.p.letters[mode]]

    def along(self, mode: int) -> str:
        return names.side(self.p.letters[mode])

    def lookup(self, lookup: Lookup) -> str:
        return f"load({lookup.array}, {lookup.where.text(self)})"

    def items(self) -> list[str]:
        """Print the loop over a range of items, and return all lines."""
        view, head = self.p.view, "for item in range(begin, end):"
        if view.items.counts:  # equal chunks: any range of nonzeros is one
            head = ""
            self.put("start, stop = begin, end")
        with self.block(head):
            if head and view.loops:
                ends = view.items.ends(lambda array, where: f"load({array}, {where})", "min")
                self.put(f"start, stop = {', '.join(ends)}")
            self.visit(self.p.body)
        return [*self.local, *self.out]

    def row(self, strides: Iterable[tuple[str, int]]) -> str:
        """The sum of coordinates times strides."""
        return " + ".join(f"{self.coordinates[c]} * {n}" if n != 1 else self.coordinates[c] for c, n in strides)

    # -- statements -------------------------------------------------------------------------------------------------
    def loop(self, s: Loop) -> None:
        """A loop over nonzeros, fibers or tiles; what it sums is put aside after every `LONG` terms."""
        name = "n" if s.axis.name == "nonzero" else s.axis.name
        begin, end = "start", "stop"
        if isinstance(s.axis, Fibers):
            begin, end = "first", "last"
            self.put("first, last = load(block_ptr, block), load(block_ptr, block + 1)")
        sums = [inner.out for inner in s.body if isinstance(inner, Product) and inner.accumulate]
        if not sums:
            self.visit(s.body, f"for {name} in range({begin}, {end}):")
            return
        before = [replace(tile, name=f"{tile.name}_before") for tile in sums]
        arrays = any(self.held(tile).in_array for tile in before)
        several = ""
        if arrays:  # whose zeros and sums take time
            several = f"if several_{end}:"
            self.put(f"several_{end} = {end} - {begin} > {LONG}")
        with self.block(several):
            for tile in before:
                self.zero(Zero(tile))
        piece = f"{end}_of_piece"
        self.put(f"{piece} = min({begin} + {LONG}, {end})")
        with self.block("while True:"):
            rest = self.abreast(s, sums, begin, piece) if name == "n" else begin
            self.visit(s.body, f"for {name} in range({rest}, {piece}):")
            self.put(f"if {piece} == {end}:", "    break")
            for one, tile in zip(before, sums, strict=True):
                self.each(tile, "{0} += {1}", one.name, tile.name)
                self.zero(Zero(tile))
            self.put(f"{begin}, {piece} = {piece}, min({piece} + {LONG}, {end})")
        with self.block(several):
            for one, tile in zip(before, sums, strict=True):
                self.each(tile, "{0} += {1}", tile.name, one.name)

    def abreast(self, s: Loop, sums: Sequence[Tile], begin: str, end: str) -> str:
        """Print a loop that takes several nonzeros a turn, each with sums of its own.

        Additions to one vector do not wait for each other then; the sums are added up after the loop. Returns the first
        nonzero that is left.
        """
        turn, held = self.p.schedule.unroll, {tile.name: self.factors[tile.name] for tile in sums}
        if (
            turn == 1
            or any(self.p.elements(tile.within) not in LENGTHS[:-1] for tile in sums)  # LLVM itself adds numbers so
            or any(factor.in_array for (factor,) in held.values())
        ):
            return begin
        others = [{tile: replace(tile, name=f"{tile.name}{n}") for tile in sums} for n in range(1, turn)]
        for tiles in others:
            for tile in tiles.values():
                self.zero(Zero(tile))
        rest = f"rest_of_{end}"
        self.put(f"{rest} = {begin} + ({end} - {begin}) // {turn} * {turn}")
        with self.block(f"for n in range({begin}, {rest}, {turn}):"):
            for n, tiles in enumerate([{}, *others]):
                self.nonzero = f"n + {n}"
                self.factors |= {tile.name: self.factors[other.name] for tile, other in tiles.items()}
                self.visit(s.body)
        self.nonzero = "n"
        self.factors |= held
        for tiles in others:
            for tile, other in tiles.items():
                self.each(tile, "{0} += {1}", tile.name, other.name)
        return rest

    def decode(self, s: Decode) -> None:
        """Print a coordinate; a coordinate along a side is kept as text, which the loop over the side prints."""
        text = s.coordinate.text(self)
        if not s.along:
            self.put(f"{s.name} = {text}")
            self.coordinates.setdefault(s.letter, s.name)
            return
        self.uncut[s.letter] = text
        self.coordinates[s.letter] = f"min({text}, {s.end - 1})" if s.end else f"({text})"

    def value(self, s: Value) -> None:
        """Print the load of stored values: a number, an array for tiles, or a bitmap's values."""
        stored, name = self.p.stored(s.operand), s.out.name
        kind, strides = stored.values, tuple((c, stored.stride(c)) for c in s.out.within)
        if not kind.held:
            self.factors[name] = ()
        elif not kind.sides:
            self.put(f"{name} = load(values, {self.nonzero})")
            self.factors[name] = (Factor(name, in_array=False),)
        elif kind.bitmap:
            self.local.append(f"    {name} = np.empty({kind.volume}, {self.p.output}.dtype)")
            self.put(f"expand(bits, value_ptr, values, {kind.word}, tile, {name})")
            self.factors[name] = (Factor(name, strides),)
        else:
            self.factors[name] = (Factor("values", strides, f"tile * {kind.volume}"),)

    def gather(self, s: Gather) -> None:
        """Print the address of rows of a dense operand, or the load of one number."""
        o, decodes = self.tables[s.operand.name], self.decodes
        along = tuple(dict.fromkeys(side for c in o.rows for side in decodes[c].along))
        begin = self.row(zip(o.rows, o.row_strides, strict=True))
        strides = self.p.strided(o.axes)
        if along:
            self.factors[s.out.name] = (Factor(o.name, strides, begin, along),)
        elif o.axes:
            if begin and not begin.isidentifier():
                self.put(f"{s.out.name} = {begin}")
                begin = s.out.name
            self.factors[s.out.name] = (Factor(o.name, strides, begin),)
        else:
            self.put(f"{s.out.name} = load({o.name}, {begin or 0})")
            self.factors[s.out.name] = (Factor(s.out.name, in_array=False),)

    def laid(self, tile: Tile) -> Names:
        """Return the axes of a tile in the order in which it is kept."""
        axes, output = tile.within, self.p.output_axes
        return tuple([a for a in output if a in axes]) if self.as_output and {*axes} <= {*output} else axes

    def held(self, tile: Tile) -> Factor:
        """Return where a tile of the program is kept: in a number, in registers, or in a local array."""
        axes = self.laid(tile)
        vectors = len(pieces(self.p.elements(axes[-1:]))) * self.p.elements(axes[:-1])
        in_array = bool(axes) and (axes[-1] != self.vector or vectors > REGISTERS or self.rearranged(tile))
        if in_array:
            self.local.append(f"    {tile.name} = np.empty({self.p.elements(axes)}, {self.p.output}.dtype)")
        factor = Factor(tile.name, self.p.strided(axes), in_array=in_array)
        self.factors[tile.name] = (factor,)
        return factor

    def rearranged(self, tile: Tile) -> bool:
        """Return True if the output has the elements of a tile in another order than vectors have them."""
        readers = self.readers[tile.name.removesuffix("_before")]
        return not self.stores_vectors and any(isinstance(s, Add) for s in readers)

    def zero(self, s: Zero) -> None:
        """Zeros, wherever the tile is kept."""
        if s.out.name not in self.factors:
            self.held(s.out)
        self.each(s.out, "{0} = {zeros}", s.out.name)

    def each(self, tile: Tile, text: str, *tiles: str) -> None:
        """A text for each number, register or element of tiles that are kept as one is, given by their names."""
        axes = self.laid(tile)
        if self.factors[tile.name][0].in_array:
            with self.block(f"for e in range({self.p.elements(axes)}):"):
                self.put(text.format(*[f"{name}[e]" for name in tiles], zeros=0))
            return
        if axes not in self.pieces:
            row = self.p.elements(axes[-1:])
            each = [pieces(row, first) for first in range(0, self.p.elements(axes), row)]
            self.pieces[axes] = [(f"_{p.first}" * bool(axes), zeros(self.p, p)) for own in each for p in own]
        texts = [text.format(*[name + end for name in tiles], zeros=zero) for end, zero in self.pieces[axes]]
        self.put(*texts)

    def product(self, s: Product) -> None:
        """A product of factors, unless the one statement that reads it prints it."""
        factors = tuple(f for t in s.inputs for f in self.factors[t.name])
        if s.accumulate:
            self.nest(self.factors[s.out.name][0], "+=", factors, s.out.within)
            return
        reader, *others = self.readers[s.out.name]
        summed = {a for t in s.inputs for a in t.within} - {*s.out.within}
        at_once = isinstance(reader, Add) or (not summed and flow(reader)[2] == flow(s)[2])
        if not others and at_once and not self.rearranged(s.out):
            self.factors[s.out.name] = factors
        else:
            self.nest(self.held(s.out), "=", factors, s.out.within)

    def add(self, s: Add) -> None:
        """Print the addition to (or store of) an output row, or rows along kept sides, within the mode."""
        p, key, first = self.p, s.key, [(c, n) for c, n in self.strides if c in self.coordinates]
        sides = tuple(c for c in p.read_along(key.letters) if c in p.along) if key.letters else ()
        conditions: list[str] = []
        if key.kind == "row":
            begin = self.row((c, n * self.width) for c, n in zip(key.letters, key.strides, strict=True))
            ends = [(c, self.decodes[c]) for c in key.letters]
            conditions += [f"{self.uncut[c]} < {decode.end}" for c, decode in ends if decode.along and decode.end]
        else:
            place = ("item", self.position(p.view.positions[1]), "n")[key.level]
            if key.letters:
                places = [f"{names.side(c)} * {stride}" for c, stride in p.strided(key.letters)]
                place = " + ".join([f"{place} * {p.elements(key.letters)}", *places])
                conditions.append(f"load({key.array}, {place}) >= 0")
            begin = f"load({key.array}, {place})" if key.kind == "slot" else place
            begin += f" * {self.width}" if self.width != 1 else ""
        begin = " + ".join(filter(None, (begin, self.row(first))))
        if not sides and len(pieces(p.width)) > 1 and begin:
            begin = self.variable("to", begin)
        out = Factor(p.output, self.strides, begin, sides)
        self.nest(out, "=" if s.owned else "+=", self.factors[s.source.name], (*sides, *s.axes), conditions)

    def nest(
        self, out: Factor, sign: str, factors: Sequence[Factor], kept: Names, conditions: Sequence[str] = ()
    ) -> None:
        vector = self.vector if self.stores_vectors or out.name != self.p.output else ""
        LoopNest(self, self.p, vector, out, sign, kept, conditions).write(factors)


CALLS = re.compile(r"\b((?:load|zeros)(?:16|8|4|2)?|store|add_up|expand|copy)\(")
"""Functions of `runtime.vectors` that generated loops call."""


def module_source(programs: tuple[TileProgram, ...], header: str) -> str:
    """Return the whole file: header, and one function a part."""
    body = "\n\n\n".join("\n".join(function(p)) for p in programs)
    called = sorted({"native", *CALLS.findall(body)})
    head = [f'"""{header}"""', *(["import numpy as np"] if "np." in body else [])]
    head.append(f"from sparsetc.runtime.vectors import {', '.join(called)}")
    return "\n\n".join(head) + f"\n\n\n{body}\n"
