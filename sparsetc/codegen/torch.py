"""Tile programs -> the text of one torch module: the default without a GPU, and the reference for tests.

In: tile programs of whole axes, of views with one lane, so that nothing is padded. Out: a module with a function a
part, which `TorchPrinter` prints by a walk over its statements, a method each. Each is a function of chunks, in
which every statement is done for all rows of a chunk at once: a tile has a row per item, per fiber, tile or pair, or
per nonzero, by its level, and behind it its axes, those along sides first. A loop becomes a sum over runs of rows. What
is gathered by no coordinate has no rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from string import ascii_letters

from sparsetc.codegen.torch_rows import COUNTS, RANGES, ChunkRows, TorchCoordinates, bags, rows_of, value
from sparsetc.ir.program import names
from sparsetc.ir.program import tile as ir
from sparsetc.ir.program.operands import tables
from sparsetc.ir.program.tile import TileProgram
from sparsetc.support.lru import cached_property


class TorchPrinter(ChunkRows):
    """Prints one tile program as a torch function of chunks."""

    def __init__(self, program: ir.TileProgram, integers: bool = False) -> None:
        super().__init__(program, f"{next(iter(program.view.packed), program.output)}.device")
        self.einsum = "integer_einsum" if integers else "torch.einsum"
        self.bags = bags(program)
        statements = [s for s, _ in program.statements]
        self.decodes = {s.letter: s for s in statements if isinstance(s, ir.Decode) and not s.tile}
        self.gathers = {s.out.name: s for s in statements if isinstance(s, ir.Gather)}
        products = [s for s in statements if isinstance(s, ir.Product)]
        self.read = [t.name for s in products for t in s.inputs]
        # a sum of one tile may be a view of it, where the side is 1
        self.products = {s.out.name for s in products if s.accumulate or len(s.inputs) > 1}
        self.out: list[str] = []

    def put(self, text: str) -> None:
        self.out.append("        " + text)

    def lines(self) -> list[str]:
        p = self.p
        arguments = ["chunks", *p.arrays, *(t.own for o in p.operands for t in tables(o)), p.output]
        self.walk(p.body)
        comment = ["# " + line for line in str(p).splitlines()]
        head = [f"def part_{p.number}({', '.join(arguments)}):", "    for i0, i1, b0, b1, n0, n1 in chunks:"]
        return [*comment, *head, *self.out]

    def walk(self, body: Iterable[ir.Statement]) -> None:
        for s in body:
            match s:
                case ir.Loop():
                    self.walk(s.body)
                case ir.Decode():
                    self.decode(s)
                case ir.Value():
                    self.load(s)
                case ir.Gather():
                    self.gather(s)
                case ir.Product():
                    self.product(s)
                case ir.Add():
                    self.add(s)

    # -- coordinates ------------------------------------------------------------------------------------------------
    def decode(self, s: ir.Decode) -> None:
        """Coordinates, a row each; along a side, of each of its positions."""
        self.put(f"{s.name} = {s.coordinate.text(TorchCoordinates(self, s))}")
        if s.end:
            self.put(f"{names.past(s.letter)} = {s.name} >= {s.end}")
            self.put(f"{s.name} = {s.name}.clamp(max={s.end - 1})")

    def sided(self, letters: Iterable[str]) -> tuple[str, ...]:
        """The sides along which the coordinates of these letters vary, once each."""
        return tuple(dict.fromkeys(side for c in letters for side in self.decodes[c].along))

    def over(self, name: str, letter: str, level: int, letters: Sequence[str], dense: int = 0) -> str:
        """What is known of a letter's coordinates, laid out over rows of a level, sides and so many axes behind."""
        text, sides = self.spread(name, self.decodes[letter].level, level), self.sided(letters)
        along = self.decodes[letter].along
        return _laid_out(text, [":", *(":" if c in along else "None" for c in sides), *("None" for _ in range(dense))])

    def index(self, operand: ir.Operand, level: int) -> str:
        """The rows of an operand that are gathered, of all positions along sides one after another."""
        text, big = "", ".long()" if operand.nrows >= 2**31 else ""
        for letter, extent in zip(operand.rows, operand.extents, strict=True):
            name = self.over(names.at(letter), letter, level, operand.rows) + big
            text = f"({text}) * {extent} + {name}" if text else name
        return self.flat(text, operand.rows)

    def flat(self, text: str, letters: Sequence[str], then: str = "") -> str:
        """Numbers over rows and sides in one row, once more is done to them."""
        if not self.sided(letters):
            return text
        return f"{text}{then}.flatten()" if text.isidentifier() else f"({text}){then}.flatten()"

    # -- loads ------------------------------------------------------------------------------------------------------
    def load(self, s: ir.Value) -> None:
        """Stored values."""
        self.put(f"{s.out.name} = {value(self, s)}")

    def gather(self, s: ir.Gather) -> None:
        """Rows of a dense operand, unless a sum adds them up as they lie there; 0 past the end of a mode."""
        o, level = s.operand, s.out.level
        if s in [rows for rows, _ in self.bags.values()]:
            return
        if not o.rows:
            self.put(f"{s.out.name} = {o.name}.view({self.shape(o.axes) or '()'})")
            return
        table = self.table(o) if o.axes else f"{o.name}.view(-1)"
        rows = f"{table}.index_select(0, {self.index(o, level)})"
        inner = s.out.within
        self.put(f"{s.out.name} = {rows}" + (f".view(-1, {self.shape(inner)})" if inner != o.axes[:1] else ""))
        for letter in o.rows:
            if self.decodes[letter].end:
                past = self.over(names.past(letter), letter, level, o.rows, len(o.axes))
                self.put(f"{s.out.name}.masked_fill_({past}, 0)")

    def table(self, operand: ir.Operand) -> str:
        """An operand as rows."""
        return f"{operand.name}.view(-1, {operand.width})"

    def shape(self, axes: Iterable[str]) -> str:
        return ", ".join(str(self.p.axis(a).size) for a in axes)

    # -- products ---------------------------------------------------------------------------------------------------
    def product(self, s: ir.Product) -> None:
        """The product of tiles; added up over the rows below each of its own, where it accumulates."""
        level = max(rows_of(self.p, t.level) for t in s.inputs)
        axes = s.out.within
        if s.right:
            sides = ((s.left, axes[: s.out.folded]), (s.right, axes[s.out.folded :]))
            texts = [(self.times(tiles, side_axes, level), len(side_axes) > 1) for tiles, side_axes in sides]
            matrices = ", ".join(f"({text}).flatten(1)" if several else text for text, several in texts)
            text = f"run_products({matrices}, {self.offsets(level)})"
            text += f".view(-1, {self.shape(axes)})" if len(axes) > 2 else ""
        elif s in self.bags:
            text = self.bag(s, *self.bags[s], level)
        else:
            text = self.multiplied(s.inputs, axes, level)
            text = f"run_sums({text}, {self.offsets(level)})" if s.accumulate else text
        self.put(f"{s.out.name} = {text}")

    def bag(self, s: ir.Product, rows: ir.Gather, shared: tuple[str, ...], level: int) -> str:
        """Sums of weighted rows of an operand, or of the parts that its rows have for each position of the weights."""
        o, others, axes = rows.operand, tuple(t for t in s.inputs if t.name != rows.out.name), s.out.within
        weights, offsets = self.times(others, shared, level), self.offsets(level)
        call, table = "bag", self.table(o)
        if shared:
            k = self.p.elements(shared)
            call, table = "bags", f"{o.name}.view(-1, {k}, {o.width // k})"
            weights = weights if len(shared) == 1 else f"({weights}).flatten(1)"
        text = f"{call}({self.index(o, level)}, {table}, {offsets}, {weights})"
        if len(axes) == (2 if shared else 1):
            return text
        return f"{text}.view({', '.join(filter(None, ('-1', self.shape(axes))))})"

    def times(self, tiles: tuple[ir.Tile, ...], axes: tuple[str, ...], level: int) -> str:
        """The product over rows of a level and all of the axes: into a factor that has them all, and no other use."""
        tiles = tuple(sorted(tiles, key=lambda t: len(t.within)))
        into = [t for t in tiles if len(tiles) > 1 and self.is_spare(t) and t.within == axes]
        into = [t for t in into if rows_of(self.p, t.level) == rows_of(self.p, level)][:1]
        factors = [self.factor(t, axes, level) for t in tiles if t not in into]
        return into[0].name + "".join(f".mul_({f})" for f in factors) if into else " * ".join(factors)

    def is_spare(self, tile: ir.Tile) -> bool:
        """Whether a tile is a tensor of its own that one product alone reads."""
        gather = self.gathers.get(tile.name)
        fresh = gather.operand.rows if gather else tile.name in self.products
        return bool(fresh) and tile.name not in self.constants and self.read.count(tile.name) == 1

    def multiplied(self, tiles: tuple[ir.Tile, ...], axes: tuple[str, ...], level: int) -> str:
        """The product, summed over the axes that it is not to have.

        Where one factor has all axes, and others have some that are kept, the matrix products of a contraction would
        be of a vector each: multiplying, then adding up, is several times as fast.
        """
        every = {a for t in tiles for a in t.within}
        summed = every - set(axes)
        large = next((t for t in tiles if set(t.within) == every), None)
        if not summed:
            return self.times(tiles, axes, level)
        vectors = any(set(t.within) - summed for t in tiles if t is not large)
        if large is None or not vectors or self.constants.issuperset(t.name for t in tiles):
            return self.contraction(tiles, axes, level)
        text = self.times(tiles, large.within, level)
        return self.summed(f"({text})" if " * " in text else text, large.within, axes)

    def contraction(self, tiles: tuple[ir.Tile, ...], axes: tuple[str, ...], level: int) -> str:
        """The product, summed over the axes that it is not to have."""
        letters = self.einsum_letters
        ordered = sorted(tiles, key=lambda t: -len(t.within))
        named = [(*([] if t.name in self.constants else [""]), *t.within) for t in ordered]
        terms = ["".join(letters[a] for a in axes_of_term) for axes_of_term in named]
        factors = [self.factor(t, t.within, level) for t in ordered]
        rows = "" if self.constants.issuperset(t.name for t in tiles) else letters[""]
        out = rows + "".join(letters[a] for a in axes)
        return f'{self.einsum}("{",".join(terms)}->{out}", {", ".join(factors)})'

    @cached_property
    def einsum_letters(self) -> dict[str, str]:
        """A letter for each axis, its own where it has one, and under the empty name one for rows."""
        letters = {a.letter: a.letter for a in self.p.axes if len(a.letter) == 1}
        free = (c for c in reversed(ascii_letters) if c not in letters)
        return letters | {"": next(free)} | {a.letter: next(free) for a in self.p.axes if a.letter not in letters}

    def factor(self, tile: ir.Tile, axes: tuple[str, ...], level: int) -> str:
        """A factor laid out over rows of a level, unless it has none, and the axes."""
        tile_axes, constant = tile.within, tile.name in self.constants
        name = tile.name if constant else self.spread(tile.name, tile.level, level)
        order = [tile_axes.index(a) for a in axes if a in tile_axes]
        if order != sorted(order):
            numbers = order if constant else [0, *(n + 1 for n in order)]
            name = f"{name}.permute({', '.join(map(str, numbers))})"
        return _laid_out(name, [*([] if constant else [":"]), *(":" if a in tile_axes else "None" for a in axes)])

    @cached_property
    def constants(self) -> set[str]:
        """The names of the tiles that are the same for all rows, and so have none: of operands without sparse letters,
        and products of such tiles.
        """
        without_rows: set[str] = set()
        for s, _ in self.p.statements:
            match s:
                case ir.Gather(out, operand) if not operand.rows:
                    without_rows.add(out.name)
                case ir.Product(out) if not s.accumulate and all(t.name in without_rows for t in s.inputs):
                    without_rows.add(out.name)
        return without_rows

    # -- results ----------------------------------------------------------------------------------------------------
    def add(self, s: ir.Add) -> None:
        """Adds the rows to those of the output, or stores them where no others are added there."""
        p, level = self.p, rows_of(self.p, s.key.level)
        kept = tuple(c for c in p.read_along(s.key.letters) if c in s.source.within)
        numbers = p.width == 1
        shape = "-1" if numbers else f"-1, {p.width}"
        total = self.summed(s.source.name, s.source.within, (*kept, *s.axes))
        if kept or len(s.axes) != (0 if numbers else 1):
            total = f"{total}.reshape({shape})"
        output = f"{p.output}.view({shape})"
        if s.key.kind == "position":
            self.put(f"{output}[{RANGES[level]}] = {total}")
            return
        row = self.output_rows(s.key, level, s.owned)
        if kept and (s.key.kind == "slot" or any(self.decodes[c].end for c in s.key.letters)):
            self.put(f"row = {row}")
            self.put("inside = row >= 0")
            row, total = "row[inside]", f"{total}[inside]"
        self.put(f"{output}.index_copy_(0, {row}, {total})" if s.owned else f"add_rows({output}, {row}, {total})")

    @staticmethod
    def summed(text: str, own: tuple[str, ...], axes: tuple[str, ...]) -> str:
        """A tile of some axes with these in an order, summed over those that it has besides."""
        if late := [str(n + 1) for n, a in enumerate(own) if a not in axes]:
            text += f".sum(({', '.join(late)}))" if len(late) > 1 else f".sum({late[0]})"
        left = [a for a in own if a in axes]
        if left != list(axes):
            text += f".permute({', '.join(map(str, (0, *(left.index(a) + 1 for a in axes))))})"
        return text

    def output_rows(self, key: ir.Key, level: int, owned: bool) -> str:
        """The output's rows, as they are stored or as a sum of coordinates; -1 past the end of a mode."""
        if key.kind == "slot":
            if not key.letters:
                return f"{key.array}[{RANGES[level]}]"
            kept = f"{key.array}.view(-1, {self.p.elements(key.letters)})[{RANGES[level]}]"
            return f"{kept}.flatten(){'.long()' if owned else ''}"
        letters = key.letters
        if not letters:
            return f"torch.zeros({COUNTS[level]}, dtype=torch.int64, device={self.device})"
        wide = ".long()" if not self.sided(letters) and (owned or len(letters) > 1 or self.p.width > 1) else ""
        terms = [
            self.over(names.at(c), c, level, letters) + wide + (f" * {stride}" if stride != 1 else "")
            for c, stride in zip(letters, key.strides, strict=True)
        ]
        past = [self.over(names.past(c), c, level, letters) for c in letters if self.decodes[c].end]
        return self.flat(" + ".join(terms), letters, "".join(f".masked_fill({each}, -1)" for each in past))


def _laid_out(text: str, index: Sequence[str]) -> str:
    """A tensor with the axes of an index that it lacks."""
    return text if all(i == ":" for i in index) else f"{text}[{', '.join(index)}]"


CALLS = "add_rows bag bags expanded integer_einsum matmul_precision multiply run_products run_sums"
"""Names in `runtime.calls` that generated programs may call."""


@lru_cache(maxsize=256)
def module_source(programs: tuple[TileProgram, ...], header: str, integers: bool = False) -> str:
    """The whole file: header and one function a part; `integers` says of what type the operands are."""
    functions = ["\n".join(p.lines(integers) if p.covers else TorchPrinter(p, integers).lines()) for p in programs]
    body = "\n\n\n".join(functions)
    called = set(re.findall(r"(?<!\.)\b(\w+)\(", body))
    used = ", ".join(name for name in CALLS.split() if name in called)
    head = [f'"""{header}"""', *(["import torch"] if "torch." in body else [])]
    head += [f"from sparsetc.runtime.calls import {used}"] if used else []
    return "\n\n".join(head) + f"\n\n\n{body}\n"
