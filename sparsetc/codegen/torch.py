"""Tile programs -> the text of one torch module: the default without a GPU, and the reference for tests.

In: tile programs of whole axes, of views with one lane, so that nothing is padded. Out: a module with a function a
part, which is printed by a walk over its statements, a function each. Each is a function of chunks, in
which every statement is done for all rows of a chunk at once: a tile has a row per item, per fiber, tile or pair, or
per nonzero, by its level, and behind it its axes, those along sides first. A loop becomes a sum over runs of rows. What
is gathered by no coordinate has no rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from string import ascii_letters
from typing import Any

import torch

from sparsetc.codegen.torch_rows import COUNTS, RANGES, TorchPrinter, rows_of, summed
from sparsetc.ir.nest import LANE, LEAF, Bitmap, Ones
from sparsetc.ir.program import (
    Add,
    Decode,
    Gather,
    Key,
    Product,
    Statement,
    Tile,
    TileProgram,
    Value,
    comments,
    names,
    tables,
)
from sparsetc.support import Names, among
from sparsetc.tensor.sums import accumulator


def function(p: TileProgram, integers: bool) -> list[str]:
    """Return the lines of a program's function over chunks; `integers` says if operands are."""
    printer = TorchPrinter(p, integers)
    for s, _ in p.statements:
        if type(s) in STATEMENTS:
            STATEMENTS[type(s)](printer, s)
    arguments = ["chunks", *p.arrays, *[t.own for o in p.operands for t in tables(o)], p.output]
    head = [f"def part_{p.number}({', '.join(arguments)}):", "    for i0, i1, b0, b1, n0, n1 in chunks:"]
    return [*comments(p), *head, *printer.out]


def decode(printer: TorchPrinter, s: Decode) -> None:
    """Coordinates, a row each; along a side, of each of its positions."""
    printer.level, printer.column = s.level, "[:, None]" if s.coordinate.sides else ""
    printer.put(f"{s.name} = {s.coordinate.text(printer)}")
    if s.end:
        printer.put(f"{names.past(s.letter)} = {s.name} >= {s.end}", f"{s.name} = {s.name}.clamp(max={s.end - 1})")


def value(printer: TorchPrinter, s: Value) -> None:
    """The values of tiles, their positions in the order in which they are stored."""
    stored = printer.p.stored(s.operand)
    kind, sides = stored.values, ", ".join(str(stored.values.sides[mode]) for mode in stored.values.sequence)
    values, pairs = stored.array("values"), f"pair_{stored.name}[{RANGES[LANE]}]"  # the tiles that pairs name
    if isinstance(kind, Ones):
        count, dtype = COUNTS[rows_of(printer.p, LEAF)], f"{printer.p.output}.dtype"
        text = f"torch.ones({count}, dtype={dtype}, device={printer.device})"
    elif isinstance(kind, Bitmap):
        bits, sizes = f"{stored.array('bits')}.view(-1, {kind.words})", f"{kind.word}, {kind.volume}"
        tiles = f"{bits}[{RANGES[LANE]}], {values}[{RANGES[LEAF]}], {sizes}"
        if stored.name:
            tiles = f"{bits}[{pairs}], {values}, {sizes}, {stored.array('value_ptr')}[{pairs}]"
        text = f"expanded({tiles}).view(-1, {sides})"
    elif stored.name:
        text = f"{values}.view(-1, {sides}).index_select(0, {pairs})"
    else:
        text = f"{values}[{RANGES[LEAF]}]" + (f".view(-1, {sides})" if sides else "")
    printer.put(f"{s.out.name} = {text}")


def gather(printer: TorchPrinter, s: Gather) -> None:
    """Print the rows of a dense operand, unless a sum adds them where they lie; 0 past the end of a mode."""
    o, level = s.operand, s.out.level
    if s in printer.unread:
        return
    if not o.rows:
        printer.put(f"{s.out.name} = {o.name}.view({printer.shape(o.axes) or '()'})")
        return
    table = printer.table(o) if o.axes else f"{o.name}.view(-1)"
    rows = f"{table}.index_select(0, {printer.index(o, level)})"
    inner = s.out.within
    printer.put(f"{s.out.name} = {rows}" + (f".view(-1, {printer.shape(inner)})" if inner != o.axes[:1] else ""))
    for letter in o.rows:
        if printer.decodes[letter].end:
            past = printer.over(names.past(letter), letter, level, o.rows, len(o.axes))
            printer.put(f"{s.out.name}.masked_fill_({past}, 0)")


def product(printer: TorchPrinter, s: Product) -> None:
    """The product of tiles; added up over the rows below each of its own, where it accumulates."""
    level = max(rows_of(printer.p, t.level) for t in s.inputs)
    axes = s.out.within
    if s.right:
        sides = ((s.left, axes[: s.out.folded]), (s.right, axes[s.out.folded :]))
        texts = [(printer.times(tiles, side_axes, level), len(side_axes) > 1) for tiles, side_axes in sides]
        matrices = ", ".join(f"({text}).flatten(1)" if several else text for text, several in texts)
        text = f"run_products({matrices}, {printer.offsets(level)})"
        text += f".view(-1, {printer.shape(axes)})" if len(axes) > 2 else ""
    elif s in printer.bags:
        text = bag(printer, s, *printer.bags[s], level)
    elif s in printer.sampled:
        text = dots(printer, s, *printer.sampled[s], level)
    else:
        text = multiplied(printer, s.inputs, axes, level)
        text = f"run_sums({text}, {printer.offsets(level)})" if s.accumulate else text
    printer.put(f"{s.out.name} = {text}")


def bag(printer: TorchPrinter, s: Product, rows: Gather, shared: Names, level: int) -> str:
    """Print weighted sums of an operand's rows, or of parts of its rows, one for each position of the weights."""
    o = rows.operand
    others = tuple(t for t in s.inputs if t.name != rows.out.name)
    axes = s.out.within
    weights, offsets = printer.times(others, shared, level), printer.offsets(level)
    call, table = "bag", printer.table(o)
    if shared:
        k = printer.p.elements(shared)
        call, table = "bags", f"{o.name}.view(-1, {k}, {o.width // k})"
        weights = weights if len(shared) == 1 else f"({weights}).flatten(1)"
    return viewed(
        printer, f"{call}({printer.index(o, level)}, {table}, {offsets}, {weights})", axes, 2 if shared else 1
    )


def viewed(printer: TorchPrinter, text: str, axes: Names, have: int) -> str:
    """Return a text with `have` axes as rows of `axes`, viewed if the numbers differ."""
    return text if len(axes) == have else f"{text}.view({', '.join(filter(None, ('-1', printer.shape(axes))))})"


def dots(printer: TorchPrinter, s: Product, first: Gather, second: Gather, kept: Names, level: int) -> str:
    """Print weighted products of rows of two operands, summed over the axes that are not kept."""
    k, numbers = printer.p.elements(kept), tuple(t for t in s.inputs if not t.within)
    sides = [
        f"{printer.index(g.operand, level)}, {g.operand.name}.view(-1, {k}, {g.operand.width // k})"
        for g in (first, second)
    ]
    return viewed(printer, f"dots({', '.join(sides)}, {printer.times(numbers, (), level)})", kept, 1)


def multiplied(printer: TorchPrinter, tiles: tuple[Tile, ...], axes: Names, level: int) -> str:
    """The product, summed over the axes that it is not to have.

    Where one factor has all axes, and others have some that are kept, the matrix products of a contraction would
    be of a vector each: multiplying, then adding up, is several times as fast.
    """
    every = {a for t in tiles for a in t.within}
    late = every - set(axes)
    large = next((t for t in tiles if set(t.within) == every), None)
    if not late:
        return printer.times(tiles, axes, level)
    vectors = any(set(t.within) - late for t in tiles if t is not large)
    if large is None or not vectors or printer.constants.issuperset(t.name for t in tiles):
        return contraction(printer, tiles, axes, level)
    text = printer.times(tiles, large.within, level)
    return summed(f"({text})" if " * " in text else text, large.within, axes)


def contraction(printer: TorchPrinter, tiles: tuple[Tile, ...], axes: Names, level: int) -> str:
    """Return the product of tiles, summed over all axes but `axes`: an einsum with one more letter for rows."""
    letters = {a.letter: a.letter for a in printer.p.axes if len(a.letter) == 1}
    free = (c for c in reversed(ascii_letters) if c not in letters)
    letters |= {name: next(free) for name in ("", *[a.letter for a in printer.p.axes if a.letter not in letters])}
    ordered = sorted(tiles, key=lambda t: -len(t.within))
    named = [(*([] if t.name in printer.constants else [""]), *t.within) for t in ordered]
    terms = ["".join(letters[a] for a in axes_of_term) for axes_of_term in named]
    factors = [printer.factor(t, t.within, level) for t in ordered]
    rows = "" if printer.constants.issuperset(t.name for t in tiles) else letters[""]
    out = rows + "".join(letters[a] for a in axes)
    return f'{printer.einsum}("{",".join(terms)}->{out}", {", ".join(factors)})'


def add(printer: TorchPrinter, s: Add) -> None:
    """Print the addition of rows to the output's rows, or their store if nothing else is added there."""
    p, level = printer.p, rows_of(printer.p, s.key.level)
    within = next((kept for t, (*_, kept) in printer.sampled.items() if t.out == s.source), s.source.within)
    kept = among(p.read_along(s.key.letters), within)
    numbers = p.width == 1
    shape = "-1" if numbers else f"-1, {p.width}"
    total = summed(s.source.name, within, (*kept, *s.axes))
    if kept or len(s.axes) != (0 if numbers else 1):
        total = f"{total}.reshape({shape})"
    output = f"{p.output}.view({shape})"
    if s.key.kind == "position":
        printer.put(f"{output}[{RANGES[level]}] = {total}")
        return
    row = output_rows(printer, s.key, level, s.owned)
    if kept and (s.key.kind == "slot" or any(printer.decodes[c].end for c in s.key.letters)):
        printer.put(f"row = {row}", "inside = row >= 0")
        row, total = "row[inside]", f"{total}[inside]"
    printer.put(f"{output}.index_copy_(0, {row}, {total})" if s.owned else f"add_rows({output}, {row}, {total})")


def output_rows(printer: TorchPrinter, key: Key, level: int, owned: bool) -> str:
    """Return the text of the output's row numbers: stored ones, or a sum of coordinates; -1 past the end of a mode."""
    if key.kind == "slot":
        if not key.letters:
            return f"{key.array}[{RANGES[level]}]"
        kept = f"{key.array}.view(-1, {printer.p.elements(key.letters)})[{RANGES[level]}]"
        return f"{kept}.flatten(){'.long()' if owned else ''}"
    letters = key.letters
    if not letters:
        return f"torch.zeros({COUNTS[level]}, dtype=torch.int64, device={printer.device})"
    wide = ".long()" if not printer.sided(letters) and (owned or len(letters) > 1 or printer.p.width > 1) else ""
    terms = [
        printer.over(names.at(c), c, level, letters) + wide + (f" * {stride}" if stride != 1 else "")
        for c, stride in zip(letters, key.strides, strict=True)
    ]
    past = [printer.over(names.past(c), c, level, letters) for c in letters if printer.decodes[c].end]
    return printer.flat(" + ".join(terms), letters, "".join(f".masked_fill({each}, -1)" for each in past))


STATEMENTS: dict[type[Statement], Callable[[TorchPrinter, Any], None]] = {
    Decode: decode,
    Value: value,
    Gather: gather,
    Product: product,
    Add: add,
}
"""The function that prints each kind of statement. A loop is a sum over rows, of which each begins with 0."""

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
