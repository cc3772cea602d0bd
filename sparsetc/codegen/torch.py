"""Tile programs -> the text of one torch module: the default without a GPU, and the reference for tests.

In: tile programs of whole axes, of views with one lane, so that nothing is padded. Out: a module with a function a
part, which is printed by a walk over its statements. Each is a function of chunks, in which every statement is done
for all rows of a chunk at once: a tile has a row per item, per fiber, tile or pair, or per nonzero, by its level, and
behind it its axes, those along sides first. A loop becomes a sum over runs of rows. What is gathered by no coordinate
has no rows.

Texts are over ``i0, i1, b0, b1, n0, n1``: the items of a chunk, their fibers, tiles or pairs, and their nonzeros as
they are stored. A chunk's words are slices; what is looked up besides is by `index_select`. Rows of an operand whose
weighted sums one call of torch makes are never gathered.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from string import ascii_letters

import torch

from sparsetc.ir.nest import AXIS_LEVEL, ITEM, LANE, LEAF, Lookup, Writer
from sparsetc.ir.program import (
    Add,
    Decode,
    Gather,
    Key,
    Lines,
    Loop,
    Operand,
    Product,
    Tile,
    TileProgram,
    Value,
    Zero,
    arguments,
    comments,
    names,
)
from sparsetc.support import Names, among
from sparsetc.tensor.dtypes import accumulator

ENDS = (("i0", "i1"), ("b0", "b1"), ("n0", "n1"))
"""Names of the begin and the end of the rows of each level in a chunk."""
RANGES = tuple(":".join(ends) for ends in ENDS)
COUNTS = tuple(f"{end} - {first}" for first, end in ENDS)


class TorchPrinter(Writer, Lines):
    """The text of one tile program as a torch function of chunks, and the rows that a chunk has of each level.

    Attributes:
        rows: by level, that whose positions are the rows of a tile made there; positions along a side make no rows.
        einsum: the function that contracts.
        level: of the coordinate that is written.
        column: the index that lays it out over positions along sides; empty where it has none.
        decodes: by letter, the statement that reads the coordinate which addresses rows.
        constants: the names of the tiles that are the same for all rows, and so have none: of operands without sparse
            letters, and products of such tiles.
        spare: the names of tiles that are tensors of their own, which one product alone reads. A sum of one tile may be
            a view of it, where the side is 1.
    """

    def __init__(self, program: TileProgram, integers: bool = False) -> None:
        Lines.__init__(self, indent=2)
        self.p, self.device = program, f"{next(iter(program.view.packed), program.output)}.device"
        self.rows = program.view.rows
        self.einsum = "integer_einsum" if integers else "torch.einsum"
        self.level, self.column = LEAF, ""
        self.bags, self.sampled, self.unread = in_place(program)
        self.decodes = program.decodes
        gathers, products = program.each(Gather), program.each(Product)
        self.constants = {s.out.name for s in gathers if not s.operand.rows}
        for s in products:
            if not s.accumulate and self.constants.issuperset(t.name for t in s.inputs):
                self.constants.add(s.out.name)
        read = Counter(t.name for s in products for t in s.inputs)
        fresh = {s.out.name for s in gathers} | {s.out.name for s in products if s.accumulate or len(s.inputs) > 1}
        self.spare = {name for name in fresh if read[name] == 1} - self.constants

    def offsets(self, level: int) -> str:
        """Return the offsets within the chunk of the rows of a level, for each row above; the last end follows."""
        view, (first, end) = self.p.view, ENDS[level]
        if view.items.size and view.levels[0]:
            begins = f"torch.arange(i0, i1 + 1, device={self.device}).mul_({view.items.size})"
            return f"{begins}.sub_({first}).clamp_(max={end} - {first})"
        if view.items.size:
            return f"torch.tensor([0, {end} - {first}], device={self.device})"
        above, last = ENDS[self.rows[level - 1]]  # the next level up that has rows
        pointers = {axis.level: outer.name for outer, axis in pairwise((view.items, *view.loops))}
        return f"{pointers[level]}_ptr[{above} : {last} + 1] - {first}"

    def spread(self, name: str, own: int, level: int) -> str:
        """Return a level's rows repeated for each row of a deeper level that belongs to them."""
        own, level = self.rows[own], self.rows[level]
        if own == level:
            return name
        name = self.spread(name, own, self.rows[level - 1])
        if self.p.view.items.size and self.p.view.levels[0]:
            return f"{name}.repeat_interleave({self.p.view.items.size}, 0)[: {COUNTS[level]}]"
        return f"{name}.repeat_interleave(torch.diff({self.offsets(level)}), 0, output_size={COUNTS[level]})"

    # -- coordinates; those along a side are columns beside one another ----------------------------------------------
    def position(self, axis: str) -> str:
        if axis == "lane":
            return f"torch.zeros(1, dtype=torch.int64, device={self.device})"  # these programs have one
        at = AXIS_LEVEL[axis]
        return self.spread(f"torch.arange({', '.join(ENDS[at])}, device={self.device})", at, self.level) + self.column

    def coordinate(self, mode: int) -> str:
        text = self.spread(self.p.read[self.p.letters[mode]], self.p.view.level_of(mode), self.level)
        return f"{text}.long(){self.column}" if self.column else text

    def along(self, mode: int) -> str:
        return f"torch.arange({self.p.view.values.sides[mode]}, device={self.device})"

    def lookup(self, lookup: Lookup) -> str:
        if lookup.every != 1:
            where = lookup.where.text(self)
            return f"{lookup.array}[{where}].long()" if self.column else f"{lookup.array}.index_select(0, {where})"
        (level,) = (AXIS_LEVEL[axis] for axis in lookup.axes)
        return self.spread(f"{lookup.array}[{RANGES[level]}]", level, self.level) + self.column

    # -- what is laid out over rows, sides and axes -------------------------------------------------------------------
    def sided(self, letters: Names) -> Names:
        """The sides along which the coordinates of these letters vary, once each."""
        return tuple(dict.fromkeys(side for c in letters for side in self.decodes[c].along))

    def over(self, name: str, letter: str, level: int, letters: Names, dense: int = 0) -> str:
        """Return a letter's coordinates laid out over rows of a level, then sides, then `dense` axes of size 1."""
        text, sides = self.spread(name, self.decodes[letter].level, level), self.sided(letters)
        along = self.decodes[letter].along
        return _laid_out(text, [":", *[":" if c in along else "None" for c in sides], *["None" for _ in range(dense)]])

    def index(self, operand: Operand, level: int) -> str:
        """The rows of an operand that are gathered, of all positions along sides one after another."""
        text, big = "", ".long()" if operand.nrows >= 2**31 else ""
        for letter, extent in zip(operand.rows, operand.extents, strict=True):
            name = self.over(names.at(letter), letter, level, operand.rows) + big
            text = f"({text}) * {extent} + {name}" if text else name
        return self.flat(text, operand.rows)

    def flat(self, text: str, letters: Names, then: str = "") -> str:
        """Return numbers over rows and sides as one flat tensor, after the call `then`."""
        if not self.sided(letters):
            return text
        return f"{text}{then}.flatten()" if text.isidentifier() else f"({text}){then}.flatten()"

    def table(self, operand: Operand) -> str:
        """An operand as rows."""
        return f"{operand.name}.view(-1, {operand.width})"

    def shape(self, axes: Names) -> str:
        return ", ".join(str(self.p.axis(a).size) for a in axes)

    # -- factors ----------------------------------------------------------------------------------------------------
    def times(self, tiles: tuple[Tile, ...], axes: Names, level: int) -> str:
        """The product over rows of a level and all of the axes: into a factor that has them all, and no other use."""
        tiles = tuple(sorted(tiles, key=lambda t: len(t.within)))
        into = [t for t in tiles if len(tiles) > 1 and t.name in self.spare and t.within == axes]
        into = [t for t in into if self.rows[t.level] == self.rows[level]][:1]
        factors = [self.factor(t, axes, level) for t in tiles if t not in into]
        return into[0].name + "".join(f".mul_({f})" for f in factors) if into else " * ".join(factors)

    def factor(self, tile: Tile, axes: Names, level: int) -> str:
        """Return a factor laid out over rows of a level (unless it is constant) and the axes."""
        tile_axes, constant = tile.within, tile.name in self.constants
        name = tile.name if constant else self.spread(tile.name, tile.level, level)
        order = [tile_axes.index(a) for a in axes if a in tile_axes]
        if order != sorted(order):
            numbers = order if constant else [0, *[n + 1 for n in order]]
            name = f"{name}.permute({', '.join(map(str, numbers))})"
        return _laid_out(name, [*([] if constant else [":"]), *[":" if a in tile_axes else "None" for a in axes]])

    # -- statements -------------------------------------------------------------------------------------------------
    def loop(self, s: Loop) -> None:
        """A sum over rows, which `product` makes."""
        self.visit(s.body)

    def zero(self, s: Zero) -> None:
        """Nothing: each sum over rows begins with 0."""

    def decode(self, s: Decode) -> None:
        """Coordinates, a row each; along a side, of each of its positions."""
        self.level, self.column = s.level, "[:, None]" if s.coordinate.sides else ""
        self.put(f"{s.name} = {s.coordinate.text(self)}")
        if s.end:
            self.put(f"{names.past(s.letter)} = {s.name} >= {s.end}", f"{s.name} = {s.name}.clamp(max={s.end - 1})")

    def value(self, s: Value) -> None:
        """The values of tiles, their positions in the order in which they are stored."""
        stored = self.p.stored(s.operand)
        kind, sides = stored.values, ", ".join(str(stored.values.sides[mode]) for mode in stored.values.sequence)
        values, pairs = stored.array("values"), f"pair_{stored.name}[{RANGES[LANE]}]"  # the tiles that pairs name
        if not kind.held:
            count, dtype = COUNTS[self.rows[LEAF]], f"{self.p.output}.dtype"
            text = f"torch.ones({count}, dtype={dtype}, device={self.device})"
        elif kind.bitmap:
            bits, sizes = f"{stored.array('bits')}.view(-1, {kind.words})", f"{kind.word}, {kind.volume}"
            tiles = f"{bits}[{RANGES[LANE]}], {values}[{RANGES[LEAF]}], {sizes}"
            if stored.name:
                tiles = f"{bits}[{pairs}], {values}, {sizes}, {stored.array('value_ptr')}[{pairs}]"
            text = f"expanded({tiles}).view(-1, {sides})"
        elif stored.name:
            text = f"{values}.view(-1, {sides}).index_select(0, {pairs})"
        else:
            text = f"{values}[{RANGES[LEAF]}]" + (f".view(-1, {sides})" if sides else "")
        self.put(f"{s.out.name} = {text}")

    def gather(self, s: Gather) -> None:
        """Print the rows of a dense operand, unless a sum adds them where they lie; 0 past the end of a mode."""
        o, level = s.operand, s.out.level
        if s in self.unread:
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

    def product(self, s: Product) -> None:
        """The product of tiles; added up over the rows below each of its own, where it accumulates."""
        level = max(self.rows[t.level] for t in s.inputs)
        axes = s.out.within
        if s.right:
            sides = ((s.left, axes[: s.out.folded]), (s.right, axes[s.out.folded :]))
            texts = [(self.times(tiles, side_axes, level), len(side_axes) > 1) for tiles, side_axes in sides]
            matrices = ", ".join(f"({text}).flatten(1)" if several else text for text, several in texts)
            text = f"run_products({matrices}, {self.offsets(level)})"
            text += f".view(-1, {self.shape(axes)})" if len(axes) > 2 else ""
        elif s in self.bags:
            text = self.bag(s, *self.bags[s], level)
        elif s in self.sampled:
            text = self.dots(s, *self.sampled[s], level)
        else:
            text = self.multiplied(s.inputs, axes, level)
            text = f"run_sums({text}, {self.offsets(level)})" if s.accumulate else text
        self.put(f"{s.out.name} = {text}")

    def bag(self, s: Product, rows: Gather, shared: Names, level: int) -> str:
        """Print weighted sums of an operand's rows, or of parts of its rows, one for each position of the weights."""
        o = rows.operand
        others = tuple(t for t in s.inputs if t.name != rows.out.name)
        axes = s.out.within
        weights, offsets = self.times(others, shared, level), self.offsets(level)
        call, table = "bag", self.table(o)
        if shared:
            k = self.p.elements(shared)
            call, table = "bags", f"{o.name}.view(-1, {k}, {o.width // k})"
            weights = weights if len(shared) == 1 else f"({weights}).flatten(1)"
        text = f"{call}({self.index(o, level)}, {table}, {offsets}, {weights})"
        return self.viewed(text, axes, 2 if shared else 1)

    def viewed(self, text: str, axes: Names, have: int) -> str:
        """Return a text with `have` axes as rows of `axes`, viewed if the numbers differ."""
        return text if len(axes) == have else f"{text}.view({', '.join(filter(None, ('-1', self.shape(axes))))})"

    def dots(self, s: Product, first: Gather, second: Gather, kept: Names, level: int) -> str:
        """Print weighted products of rows of two operands, summed over the axes that are not kept."""
        k, numbers = self.p.elements(kept), tuple(t for t in s.inputs if not t.within)
        sides = [
            f"{self.index(g.operand, level)}, {g.operand.name}.view(-1, {k}, {g.operand.width // k})"
            for g in (first, second)
        ]
        return self.viewed(f"dots({', '.join(sides)}, {self.times(numbers, (), level)})", kept, 1)

    def multiplied(self, tiles: tuple[Tile, ...], axes: Names, level: int) -> str:
        """The product, summed over the axes that it is not to have.

        Where one factor has all axes, and others have some that are kept, the matrix products of a contraction would
        be of a vector each: multiplying, then adding up, is several times as fast.
        """
        every = {a for t in tiles for a in t.within}
        late = every - set(axes)
        large = next((t for t in tiles if set(t.within) == every), None)
        if not late:
            return self.times(tiles, axes, level)
        vectors = any(set(t.within) - late for t in tiles if t is not large)
        if large is None or not vectors or self.constants.issuperset(t.name for t in tiles):
            return self.contraction(tiles, axes, level)
        text = self.times(tiles, large.within, level)
        return summed(f"({text})" if " * " in text else text, large.within, axes)

    def contraction(self, tiles: tuple[Tile, ...], axes: Names, level: int) -> str:
        """Return the product of tiles, summed over all axes but `axes`: an einsum with one more letter for rows."""
        letters = {a.letter: a.letter for a in self.p.axes if len(a.letter) == 1}
        free = (c for c in reversed(ascii_letters) if c not in letters)
        letters |= {name: next(free) for name in ("", *[a.letter for a in self.p.axes if a.letter not in letters])}
        ordered = sorted(tiles, key=lambda t: -len(t.within))
        named = [(*([] if t.name in self.constants else [""]), *t.within) for t in ordered]
        terms = ["".join(letters[a] for a in axes_of_term) for axes_of_term in named]
        factors = [self.factor(t, t.within, level) for t in ordered]
        rows = "" if self.constants.issuperset(t.name for t in tiles) else letters[""]
        out = rows + "".join(letters[a] for a in axes)
        return f'{self.einsum}("{",".join(terms)}->{out}", {", ".join(factors)})'

    def add(self, s: Add) -> None:
        """Print the addition of rows to the output's rows, or their store if nothing else is added there."""
        p, level = self.p, self.rows[s.key.level]
        within = next((kept for t, (*_, kept) in self.sampled.items() if t.out == s.source), s.source.within)
        kept = among(p.read_along(s.key.letters), within)
        numbers = p.width == 1
        shape = "-1" if numbers else f"-1, {p.width}"
        total = summed(s.source.name, within, (*kept, *s.axes))
        if kept or len(s.axes) != (0 if numbers else 1):
            total = f"{total}.reshape({shape})"
        output = f"{p.output}.view({shape})"
        if s.key.kind == "position":
            self.put(f"{output}[{RANGES[level]}] = {total}")
            return
        row = self.output_rows(s.key, level, s.owned)
        if kept and (s.key.kind == "slot" or any(self.decodes[c].end for c in s.key.letters)):
            self.put(f"row = {row}", "inside = row >= 0")
            row, total = "row[inside]", f"{total}[inside]"
        self.put(f"{output}.index_copy_(0, {row}, {total})" if s.owned else f"add_rows({output}, {row}, {total})")

    def output_rows(self, key: Key, level: int, owned: bool) -> str:
        """Return the text of the output's row numbers: stored, or a sum of coordinates; -1 past the end of a mode."""
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


def summed(text: str, own: Names, axes: Names) -> str:
    """Return a tile with its axes in the given order, summed over all others."""
    if late := [str(n + 1) for n, a in enumerate(own) if a not in axes]:
        text += f".sum(({', '.join(late)}))" if len(late) > 1 else f".sum({late[0]})"
    left = among(own, axes)
    if left != axes:
        text += f".permute({', '.join(map(str, (0, *[left.index(a) + 1 for a in axes])))})"
    return text


# -- rows that one call of torch adds or multiplies where they lie -----------------------------------------------------


Bags = dict[Product, tuple[Gather, Names]]
Sampled = dict[Product, tuple[Gather, Gather, Names]]


@lru_cache
def in_place(program: TileProgram) -> tuple[Bags, Sampled, set[Gather]]:
    """Return `bags`, `sampled`, and the gathers that are not run, since one of these reads the rows where they lie."""
    bagged, dotted = bags(program), sampled(program)
    return bagged, dotted, {rows for rows, _ in bagged.values()}.union(*[rows[:2] for rows in dotted.values()])


def bags(program: TileProgram) -> Bags:
    """Find the products that add up rows of an operand where they lie in its table, weighted by the other factors.

    Returns:
        For each, what gathers those rows, and the axes of the weights: none, or the first of the rows' axes, where rows
        have as many elements for each position of these.
    """
    gathers = {s.out.name: s for s in program.each(Gather)}
    products = [s for s in program.each(Product) if s.accumulate and not s.dot]
    weights = (
        (s, gathers[t.name], _weight_axes(program, s, t)) for s in products for t in s.inputs if t.name in gathers
    )
    return {s: (rows, axes) for s, rows, axes in weights if axes is not None}


def sampled(program: TileProgram) -> Sampled:
    """Find the products of a row of one operand with a row of another, weighted and summed when they are stored.

    Returns:
        For each product, the two gathers, first that of the mode that is stored first, and the axes that are kept.
    """
    gathers = {s.out.name: s for s in program.each(Gather) if s.operand.rows}
    ends = {s.letter for s in program.each(Decode) if s.along or s.end}
    modes = [program.letters[c.mode] for level in program.view.levels for c in level]
    result, products = program.result, {}
    for s in [s for s in program.each(Product) if not s.accumulate and not s.dot]:
        axes = s.out.within
        kept = result.axes if s.out == result.source else axes
        rows = [gathers[t.name] for t in s.inputs if t.name in gathers and t.within == axes]
        numbers = [t for t in s.inputs if not t.within]
        if len(rows) == 2 and len(rows) + len(numbers) == len(s.inputs) and axes[: len(kept)] == kept != axes:
            first, second = sorted(rows, key=lambda g: min(map(modes.index, g.operand.rows)))
            if numbers and not ends & {*first.operand.rows, *second.operand.rows}:
                products[s] = first, second, kept
    return products


def _weight_axes(p: TileProgram, s: Product, rows: Tile) -> Names | None:
    """Return the axes of the factors that weight the rows of another; None if the rows cannot be added up in place."""
    axes, others = rows.within, [tile for tile in s.inputs if tile != rows]
    have = {a for tile in others for a in tile.within}
    shared, apart = axes[: len(have)], axes[len(have) :]
    if rows.level == ITEM or axes != s.out.within or have != set(shared) or set(axes) & set(p.letters):
        return None
    inner = {p.view.rows[tile.level] for tile in others}
    if max(inner, default=ITEM) > p.view.rows[rows.level] or inner <= {ITEM}:
        return None
    return shared if not shared or (apart and p.elements(shared) <= p.elements(apart)) else None


# -- modules -----------------------------------------------------------------------------------------------------------


def function(p: TileProgram, integers: bool) -> list[str]:
    """Return the lines of a program's function over chunks; `integers` says if operands are."""
    printer = TorchPrinter(p, integers)
    printer.visit(p.body)
    names_read = ["chunks", *p.arrays, *arguments(p.operands), p.output]
    head = [f"def part_{p.number}({', '.join(names_read)}):", "    for i0, i1, b0, b1, n0, n1 in chunks:"]
    return [*comments(p), *head, *printer.out]


CALLS = "add_rows bag bags dots expanded integer_einsum matmul_precision multiply product run_products run_sums"
"""Names in `runtime.calls` that generated programs may call."""


def module_source(programs: tuple[TileProgram, ...], header: str, dtype: torch.dtype = torch.float32) -> str:
    """The whole file, for operands of a type: header and one function a part."""
    integers = accumulator(dtype) == torch.int64
    functions = ["\n".join(p.lines(dtype) if p.covers else function(p, integers)) for p in programs]
    body = "\n\n\n".join(functions)
    called = set(re.findall(r"(?<!\.)\b(\w+)\(", body))
    used = ", ".join(among(CALLS.split(), called))
    head = [f'"""{header}"""', *(["import torch"] if "torch." in body else [])]
    head += [f"from sparsetc.runtime.calls import {used}"] if used else []
    return "\n\n".join(head) + f"\n\n\n{body}\n"
