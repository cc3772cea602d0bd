"""The inputs of a walk's generated text: names of arguments, sizes, loads, and the comment at its head.

In: a `Walk` and a `Layout`. Out: a `Text`, which `printer.Printer` and `native_walk.NativeText` add statements to.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from sparsetc.backends import Backend
from sparsetc.ir.program.text import Lines
from sparsetc.maps.body import SIDES, Walk
from sparsetc.maps.elementwise import number_text
from sparsetc.support import NamedInts, Names

LOWEST = "-1e30"
"""The initial maximum of a row: finite, so that its difference from a score of minus infinity is no NaN."""
LEAST_DOT = 16
"""Rows from which tiles are multiplied by dots; a side of a dot has so many positions at least."""


NUMBERS = ("item_count", "rows", "columns", "parts", "windows", "pattern_head", "part_head", "longest")
KINDS = ("head", "row", "step", "size", "batch", "heads")
ARRAYS = ("items", "full_col", "full_base", "part_col", "bits", "part_base", "ptr", "far", "order")
"""Arguments of a walk's text: numbers; numbers of each tensor, as `number_arguments` has them; and index arrays."""


@dataclass(frozen=True)
class Layout:
    """The properties of data that a walk's generated text depends on; by default those of rows of single entries.

    Attributes:
        sizes: of each table's rows.
        ordered: whether the numbers of entries are brought to the pattern's order.
        height: rows of a window.
        width: columns of a tile.
        gathered: whether tiles hold any columns, and not neighbouring ones.
        even: whether no tile reaches past the last column.
        full: whether there are full tiles.
        in_runs: whether the full tiles of a window are neighbours, so that their numbers are not read.
        part: whether there are partial tiles.
        cut: whether some windows are several items.
        wide: whether addresses in a table pass 32 bits.
        precision: of dots of float32.
        stages: tiles that are on their way at once.
        lines: heads of windows of one row that a program takes side by side, a window after another.
        group: heads of rows that share a head of columns.
        stacked: whether heads have patterns of their own, whose windows follow one another.
        apart: tables whose heads lie in two groups, as a layer's do behind rows: a batch and its heads.
        stepped: vectors by row or column whose numbers are not next to one another.
        whole: vectors of whole numbers, which stay whole numbers.
        units: of tables whose rows begin at multiples of so many elements, and not of 16, which Triton sees by itself:
            the numbers of elements between heads and rows are in units of these.
        ptx: whether the target has instructions of PTX.
    """

    sizes: NamedInts
    ordered: bool
    height: int = 1
    width: int = 1
    gathered: bool = True
    even: bool = True
    full: bool = False
    in_runs: bool = False
    part: bool = True
    cut: bool = False
    wide: bool = False
    precision: str = ""
    stages: int = 1
    lines: int = 1
    group: int = 1
    stacked: bool = False
    apart: Names = ()
    stepped: Names = ()
    whole: Names = ()
    units: NamedInts = ()
    ptx: bool = False


def padded(size: int, dots: bool) -> int:
    """Return how many positions a tile has along a row of a table of this size."""
    least = 1 << max(size - 1, 0).bit_length()
    return max(least, LEAST_DOT) if dots else least


class Text(Lines):
    """The lines of a walk's kernel, and what they name.

    Attributes:
        text: of the module, once it is printed.
        arguments: of its function ``walk``, in order; the last is a result.
        combine: of ``combine``; none where no window is cut.
    """

    text: str
    arguments: Names
    combine: Names = ()

    def __init__(self, walk: Walk, layout: Layout) -> None:
        super().__init__()
        self.walk = walk
        self.layout = layout
        self.sizes = dict(layout.sizes)
        self.dots = layout.height >= LEAST_DOT
        self.shape = f"[{layout.height if self.dots else layout.lines}, {layout.width}]"
        self.derivatives: dict[tuple[str, str], str] = {}
        self.weights = {output: argument for output, (argument, _) in walk.weights.items()}
        self.factors = {output: factor for output, (_, factor) in walk.weights.items()}
        self.score_factor = 1.0
        if walk.online and walk.function.peeled("p")[1] > 0:  # which a maximum can be multiplied by
            self.weights["p"], self.score_factor = walk.function.peeled("p")
        self.placed = {name: place for name, place in walk.places.items() if name in walk.reads}
        self.products = {name: tables for name, tables in walk.products.items() if name in walk.reads}
        self.vectors = {name: side for name, side in walk.vectors.items() if name in walk.reads}
        plain = self.dots and layout.ptx
        self.read_in_place = [name for name in self.placed if plain and name not in layout.whole]
        self.row_sums = {name: tables for name, tables in walk.sums.items() if name in walk.reads}
        self.less = {name: less for name, (_, _, less) in self.row_sums.items() if less}
        tables = [own for own, _ in self.products.values()] + [t for of in self.row_sums.values() for t in of[:2]]
        self.own = list(dict.fromkeys(tables))
        self.shared = list(dict.fromkeys(walk.inner[name][1] for name in self.products if name in walk.inner))
        summed = [table for _, table, _ in walk.accumulated if isinstance(table, str)]
        self.other = list(dict.fromkeys([*(other for _, other in self.products.values()), *summed]))
        self.results: dict[str, int] = {}  # a destination and the size of its rows, 0 of a vector
        for _, term, destination in walk.accumulated:
            self.results[destination] = walk.width(term, self.sizes)
        self.far_head = "head"
        if layout.group > 1:
            self.far_head = "reader" if walk.mode else "shared"
        self.row_head = self.far_head if walk.mode else "head"
        self.entry_head = "part" if layout.stacked else self.row_head
        self.by_entry = [name for name, side in self.vectors.items() if side == "entries"]
        self.by_entry += [destination for _, vector, destination in walk.stored if not vector]

    def within(self, size: int, axes: str = "None, :") -> list[str]:
        """The condition of a lane to lie within a row of this size; none if all lanes do."""
        lanes = padded(size, self.dots)
        return [] if lanes == size else [f"(lane_{lanes} < {size})[{axes}]"]

    def load(self, address: str, conditions: Sequence[str]) -> str:
        """A load, under conditions if there are any."""
        masked = f", mask={' & '.join(conditions)}, other=0.0" if conditions else ""
        return f"tl.load({address}{masked})"

    def by_line(self, head: str) -> str:
        """The heads of a program's lines, of which each has a row of a tile; the head of a program's rows."""
        return head if self.dots else f"{head}[:, None]"

    def row_address(self, table: str, head: str, row: str, size: int) -> str:
        """The addresses of rows of this size of a head's table or result: own rows, or each line's "col"."""
        units = f" * {dict(self.layout.units)[table]}" if table in dict(self.layout.units) else ""
        of_head = f"{head} * {table}_head{units}"
        if table in self.layout.apart:
            batch = f"{head} // {table}_heads * {table}_batch{units}"
            of_head = f"{batch} + {head} % {table}_heads * {table}_head{units}"
        at = f"{row}.to(tl.int64)" if self.layout.wide else row
        lane = f"lane_{padded(size, self.dots)}"
        of_row = f"* {table}_row{units}"
        if not self.dots and row == "col":
            return f"{table} + ({of_head})[:, None, None] + {at}[:, :, None] {of_row} + {lane}[None, None, :]"
        of_head = of_head if self.dots else f"({of_head})[:, None]"
        return f"{table} + {of_head} + {at}[:, None] {of_row} + {lane}[None, :]"

    def number_address(self, vector: str, head: str, row: str) -> str:
        """The addresses of a head's numbers by row or column."""
        if vector in self.layout.stepped:
            row = f"{row}.to(tl.int64) * {vector}_step" if self.layout.wide else f"{row} * {vector}_step"
        return f"{vector} + {head} * {vector}_head + {row}"

    def number(self, vector: str, loaded: str) -> str:
        """A loaded number in the type in which it is computed with."""
        return loaded if vector in self.layout.whole else f"{loaded}.to(tl.float32)"

    def numbers(self) -> dict[str, str]:
        """Return the variables of vectors, by row or at a tile."""
        of_row = [*self.row_sums, *(name for name, side in self.vectors.items() if side == "own")]
        return {name: f"{name}_{'own' if name in of_row else 'tile'}" for name in (*self.row_sums, *self.vectors)}

    def argument_names(self, lines: Iterable[str]) -> Names:
        """Return the arguments that lines name: numbers, index arrays, sums and tensors; the last one is written."""
        named = [*self.own, *self.other, *self.vectors, *self.less.values(), *self.shared, *self.targets()]
        tensors = list(dict.fromkeys(named))
        apart = [f"{tensor}_{kind}" for tensor in tensors for kind in KINDS]
        slots = [f"{name}_slots" for name in ("top", "sum", *self.results)]
        used = {*re.findall(r"\w+", "\n".join(lines))}
        return tuple([name for name in (*NUMBERS, *apart, *ARRAYS, *slots, "seed", *tensors) if name in used])

    def targets(self) -> list[str]:
        """Return the names of all written outputs, in order."""
        online = ["lse_out"] if self.walk.online else []
        return [*online, *self.row_sums, *self.walk.targets]


def number_arguments(tensors: Mapping[str, Tensor], units: Mapping[str, int]) -> dict[str, int]:
    """Return the numbers of tensors: how far heads, rows and elements are apart, in units for rows, and sizes."""
    numbers: dict[str, int] = {}
    for name, tensor in tensors.items():
        unit, own_batches = units.get(name, 1), int(tensor.ndim == 4)
        numbers |= {f"{name}_step": tensor.stride(-1), f"{name}_size": tensor.shape[-1]}
        numbers |= {f"{name}_head": tensor.stride(own_batches) // unit, f"{name}_heads": tensor.shape[own_batches]}
        numbers |= {f"{name}_batch": tensor.stride(0) // unit, f"{name}_row": tensor.stride(tensor.ndim - 2) // unit}
    return numbers


def header(printer: Text, name: str, backend: Backend) -> str:
    """Return the header comment of a module: its computation, and the memory layout of its arguments."""
    walk, layout = printer.walk, printer.layout
    i, j = ("i", "j") if walk.mode == 0 else ("j", "i")
    kind = "gathered" if layout.gathered else "neighbouring"
    lines = [f"{name}, generated by sparsetc for {backend.name}.", ""]
    if not backend.loops:
        lines += [
            f"Windows of {layout.height} {SIDES[walk.mode]}, called rows, meet tiles of {layout.width} {kind} columns."
        ]
    lines += [f"For each entry ({i}, {j}) of the pattern:", ""]
    for product, (own, other) in printer.products.items():
        term = f"{own}[{i}, d] {other}[{j}, d]"
        if product in walk.inner:
            term = f"a function of {own}[{i}, d], {other}[{j}, d] and {walk.inner[product][1]}[d]"
        lines.append(f"    {product}[{i}, {j}] = sum over d of {term}")
    for name_of_sum, (left, right, less) in printer.row_sums.items():
        minus = f" - {less}[{i}]" if less else ""
        lines.append(f"    {name_of_sum}[{i}] = sum over d of {left}[{i}, d] {right}[{i}, d]{minus}")
    at = {"own": i, "other": j, "entries": f"{i}, {j}", "places": f"n({i}, {j})"}
    inputs = [*printer.products, *printer.row_sums]
    inputs += [f"{vector}[{at[side]}]" for vector, side in printer.vectors.items()]
    lines.append(f"    {', '.join(printer.weights)} = map of {', '.join(inputs)}")
    if walk.dropout:
        lines.append(
            f"    keep[{i}, {j}] = 0 for a share of {walk.dropout}, drawn by hashes of seed, head, {i} and {j}"
        )
    if walk.online:
        times = "" if printer.score_factor == 1 else f" * {number_text(printer.score_factor)}"
        lines.append(
            f"    p[{i}, {j}] = 2 ** (p[{i}, {j}]{times} - lse_out[{i}]), lse_out the logarithm of the sum for i"
        )
    for output, table, result in walk.accumulated:
        factor = printer.factors[output]
        times = "" if factor == 1 else f"{number_text(factor)} * "
        summed = f"{output}[{i}, {j}]"
        if isinstance(table, tuple):
            summed += f" times the derivative of {table[0]}'s function"
        elif table is not None:
            summed += f" {table}[{j}, d]"
        lines.append(f"    {result}[{i}{', d' if table else ''}] += {times}{summed}")
    for output, vector, result in walk.stored:
        lines.append(f"    {result}[{f'n({i}, {j})] +=' if vector else 'entry] ='} {output}[{i}, {j}]")
    lines.append("")
    if backend.loops:
        lines += ["far[n]: column of entry n; a row's entries are from ptr[row] to ptr[row + 1]"]
        lines += ["order[n]: the number of entry n in the pattern"] if layout.ordered and printer.by_entry else []
        lines.append("x_head, x_row, x_step: elements from one head, row or number of x to the next")
        return "\n".join(lines) + "\n"
    lines += ["items[item] = window, full tiles from, to, partial tiles from, to, slot of a part of a window or -1"]
    if layout.full:
        lines.append("full_col[tile]: a full tile's block of columns, by number")
    if layout.part:
        columns = "columns, some twice" if layout.gathered else "block of columns, by number"
        lines.append(f"part_col[tile]: a partial tile's {columns}")
        lines.append("bits[tile, row]: bit c is set where the row meets the tile's column c")
    if printer.by_entry:
        lines.append("full_base, part_base[tile, row]: the number of the row's first entry in the tile")
    lines.append("x_head, x_row: elements from one head of x, and from one row, to the next")
    if printer.placed:
        lines.append("x_size: numbers that a head of x has; n(i, j) below 0 is counted from their end")
    lines += [f"{name}_head, {name}_row: of {unit} elements" for name, unit in layout.units]
    if layout.stepped:
        lines.append("x_step: elements from one number of x to the next")
    if layout.apart:
        lines.append("x_batch, x_heads: elements from one batch of x to the next, and its heads")
    return "\n".join(lines) + "\n"
