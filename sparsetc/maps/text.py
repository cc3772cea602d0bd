"""The inputs of a walk's generated text: names of arguments, sizes, loads.

In: a `Walk` and a `Layout`. Out: a `Text`, which `loop.Loop` and `printer.Printer` add statements to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sparsetc.errors import PlanError
from sparsetc.ir.program.text import Lines
from sparsetc.maps.body import Derivative, Walk
from sparsetc.maps.elementwise import Argument
from sparsetc.support import NamedInts, Names

LOWEST = "-1e30"
"""The initial maximum of a row: finite, so that its difference from a score of minus infinity is no NaN."""
LEAST_DOT = 16
"""Rows from which tiles are multiplied by dots; a side of a dot has so many positions at least."""


@dataclass(frozen=True)
class Layout:
    """The properties of data that a walk's generated text depends on.

    Attributes:
        height: rows of a window.
        width: columns of a tile.
        gathered: whether tiles hold any columns, and not neighbouring ones.
        even: whether no tile reaches past the last column.
        full: whether there are full tiles.
        in_runs: whether the full tiles of a window are neighbours, so that their numbers are not read.
        part: whether there are partial tiles.
        numbered: whether entries have numbers.
        ordered: whether these are brought to the pattern's order.
        cut: whether some windows are several items.
        wide: whether addresses in a table pass 32 bits.
        sizes: of each table's rows.
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

    height: int
    width: int
    gathered: bool
    even: bool
    full: bool
    in_runs: bool
    part: bool
    numbered: bool
    ordered: bool
    cut: bool
    wide: bool
    sizes: NamedInts
    precision: str
    stages: int
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
    """The lines of a walk's kernel, and what they name."""

    def __init__(self, walk: Walk, layout: Layout) -> None:
        super().__init__()
        self.walk = walk
        self.layout = layout
        self.sizes = dict(layout.sizes)
        self.dots = layout.height >= LEAST_DOT
        self.shape = f"[{layout.height if self.dots else layout.lines}, {layout.width}]"
        self.derivatives: dict[tuple[str, str], str] = {}
        function = walk.function
        outputs = dict.fromkeys([a[0] for a in walk.accumulated] + [s[0] for s in walk.stored])
        apart = self._apart()
        self.weights: dict[str, Argument] = {}
        self.factors: dict[str, float] = {}
        for output in outputs:
            whole = function.outputs[output], 1.0
            self.weights[output], self.factors[output] = whole if output in apart else function.peeled(output)
        self.score_factor = 1.0
        if walk.online and function.peeled("p")[1] > 0:  # which a maximum can be multiplied by
            self.weights["p"], self.score_factor = function.peeled("p")
        read = walk.read(self.weights.values())
        read |= {term.product for _, term, _ in walk.accumulated if isinstance(term, Derivative)}
        self.placed = {name: place for name, place in walk.places.items() if name in read}
        self.products = {name: tables for name, tables in walk.products.items() if name in read}
        self.vectors = {name: side for name, side in walk.vectors.items() if name in read}
        plain = self.dots and layout.ptx
        self.read_in_place = [name for name in self.placed if plain and name not in layout.whole]
        self.row_sums = {name: tables for name, tables in walk.sums.items() if name in read}
        self.less = {name: less for name, (_, _, less) in self.row_sums.items() if less}
        tables = [own for own, _ in self.products.values()] + [t for of in self.row_sums.values() for t in of[:2]]
        self.own = list(dict.fromkeys(tables))
        self.shared = list(dict.fromkeys(walk.inner[name].shared for name in self.products if name in walk.inner))
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
        if self.by_entry and not layout.numbered:
            raise PlanError("a walk that reads or writes entries needs row tiles whose entries have numbers")

    def _apart(self) -> set[str]:
        """Return the outputs with a constant factor: stored ones, online softmax, and sums of several factors."""
        walk = self.walk
        if walk.online:
            return {output for output, *_ in walk.accumulated}
        factors: dict[str, set[float]] = {}
        for output, _, destination in walk.accumulated:
            factors.setdefault(destination, set()).add(walk.function.peeled(output)[1])
        several = {output for output, _, destination in walk.accumulated if len(factors[destination]) > 1}
        return several | {output for output, *_ in walk.stored}

    def lane(self, table: str) -> str:
        return f"lane_{padded(self.sizes[table], self.dots)}"

    def short(self, size: int) -> bool:
        """True if a tile has positions past the end of a table's row."""
        return padded(size, self.dots) != size

    def load(self, address: str, conditions: Sequence[str]) -> str:
        """A load, under conditions if there are any."""
        masked = f", mask={' & '.join(conditions)}, other=0.0" if conditions else ""
        return f"tl.load({address}{masked})"

    def by_line(self, head: str) -> str:
        """The heads of a program's lines, of which each has a row of a tile; the head of a program's rows."""
        return head if self.dots else f"{head}[:, None]"

    def row_address(self, table: str, head: str, row: str, lane: str = "") -> str:
        """The addresses of rows of a head of a table or a result: own rows, or each line's "col"."""
        units = f" * {dict(self.layout.units)[table]}" if table in dict(self.layout.units) else ""
        of_head = f"{head} * {table}_head{units}"
        if table in self.layout.apart:
            batch = f"{head} // {table}_heads * {table}_batch{units}"
            of_head = f"{batch} + {head} % {table}_heads * {table}_head{units}"
        at = f"{row}.to(tl.int64)" if self.layout.wide else row
        lane = lane or self.lane(table)
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

    def numbers(self) -> list[str]:
        """The arguments that are numbers."""
        named = ["item_count", "rows", "columns", *([] if self.dots else ["parts"])]
        named += ["windows", "pattern_head", "part_head"] if self.layout.stacked else []
        named += [f"{name}_step" for name in (*self.vectors, *self.less.values()) if name in self.layout.stepped]
        return named + [f"{name}_size" for name in self.placed] + self.strides(self.tensors())

    def strides(self, names: Iterable[str]) -> list[str]:
        """The arguments that say how far heads and rows of tensors are apart."""
        of_rows = {*self.own, *self.other, *(name for name, size in self.results.items() if size)}
        kinds = {name: ["head", *(["row"] if name in of_rows else [])] for name in names}
        apart = ["batch", "heads"]
        return [f"{n}_{k}" for n, all_of in kinds.items() for k in all_of + (apart if n in self.layout.apart else [])]

    def tensors(self) -> list[str]:
        """The tables, vectors and results; the last one is written."""
        tables = dict.fromkeys([*self.own, *self.other])
        return [*tables, *self.vectors, *self.less.values(), *self.shared, *self.targets()]

    def pointers(self) -> list[str]:
        """The arguments that are tensors, but for index arrays; the last one is written."""
        seed = ["seed"] if self.walk.dropout else []
        return [*self.slots(), *seed, *self.tensors()]

    def targets(self) -> list[str]:
        """Return the names of all written outputs, in order."""
        online = ["lse_out"] if self.walk.online else []
        return [*online, *self.row_sums, *self.walk.targets]

    def slots(self) -> list[str]:
        """The arrays of partial sums of windows that are cut."""
        online = ["top_slots", "sum_slots"] if self.walk.online else []
        return [*online, *(f"{name}_slots" for name in self.results)] if self.layout.cut else []

    def arrays(self) -> list[str]:
        """The index arrays that are read."""
        layout, numbered = self.layout, bool(self.by_entry)
        read = {
            "full_col": layout.full,
            "full_base": layout.full and numbered,
            "part_col": layout.part,
            "bits": layout.part,
            "part_base": layout.part and numbered,
            "order": layout.ordered and numbered,
        }
        return ["items", *(name for name, is_read in read.items() if is_read)]
