"""A walk over row tiles -> the text of its Triton module, which can be read alone.

In: a `Walk`, and a `Layout` that says what the text depends on beside it. Out: a `Printed`: the text, and the names of
the arguments of its kernels. Kernel ``walk`` has one program a work item and head. It loads what belongs to the rows of
its window once, goes through the window's full and partial tiles, and writes its sums. Of windows that are cut in
several items it writes partial sums to slots, which kernel ``combine`` adds up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sparsetc.codegen.triton import signature
from sparsetc.codegen.triton_values import COUNT, POPC
from sparsetc.errors import PlanError
from sparsetc.maps.body import KEEP, SIDES, Derivative, Walk
from sparsetc.maps.elementwise import Argument, number_text

LOWEST = "-1e30"
"""Where the maximum of a row begins: finite, so that the difference from a score of minus infinity is no NaN."""
LEAST_DOT = 16
"""Rows from which tiles are multiplied by dots; a side of a dot has so many positions at least."""
MIXED = '''
@triton.jit
def mixed(x):
    """A hash of 32 bits (lowbias32, Wellons 2018)."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)
'''


@dataclass(frozen=True)
class Layout:
    """What the text depends on beside the walk.

    Attributes:
        height: rows of a window.
        width: columns of a tile.
        gathered: whether tiles hold any columns, and not neighbouring ones.
        even: whether no tile reaches past the last column.
        full: whether there are full tiles.
        part: whether there are partial tiles.
        numbered: whether entries have numbers.
        ordered: whether these are brought to the pattern's order.
        cut: whether some windows are several items.
        wide: whether addresses in a table pass 32 bits.
        sizes: of each table's rows.
        precision: of dots of float32.
        stages: tiles that are on their way at once.
        group: heads of rows that share a head of columns.
        stacked: whether heads have patterns of their own, whose windows follow one another.
        popcount: whether the target counts bits by an instruction of PTX.
    """

    height: int
    width: int
    gathered: bool
    even: bool
    full: bool
    part: bool
    numbered: bool
    ordered: bool
    cut: bool
    wide: bool
    sizes: tuple[tuple[str, int], ...]
    precision: str
    stages: int
    group: int = 1
    stacked: bool = False
    popcount: bool = False


@dataclass(frozen=True)
class Printed:
    """Generated text, and what its kernels take, in order.

    Attributes:
        text: of the module.
        arguments: of ``walk``; the last is a result.
        combine: of ``combine``, or none where no window is cut.
    """

    text: str
    arguments: tuple[str, ...]
    combine: tuple[str, ...]


def padded(size: int, dots: bool) -> int:
    """Return how many positions a tile has along a row of a table of this size."""
    least = 1 << max(size - 1, 0).bit_length()
    return max(least, LEAST_DOT) if dots else least


class _Printer:
    """Prints one walk."""

    def __init__(self, walk: Walk, layout: Layout) -> None:
        self.walk, self.layout, self.sizes = walk, layout, dict(layout.sizes)
        self.dots = layout.height >= LEAST_DOT
        self.lines: list[str] = []
        self.derivatives: dict[tuple[str, str], str] = {}
        self.indent = 1
        function = walk.function
        outputs = dict.fromkeys([a[0] for a in walk.accumulated] + [s[0] for s in walk.stored])
        apart = self._apart()
        self.weights: dict[str, Argument] = {}
        self.factors: dict[str, float] = {}
        for output in outputs:
            whole = function.outputs[output], 1.0
            self.weights[output], self.factors[output] = whole if output in apart else function.peeled(output)
        read = function.inputs(self.weights.values())
        read |= {term.product for _, term, _ in walk.accumulated if isinstance(term, Derivative)}
        self.products = {name: tables for name, tables in walk.products.items() if name in read}
        self.vectors = {name: side for name, side in walk.vectors.items() if name in read}
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
        self.by_entry += [destination for _, destination in walk.stored]
        if self.by_entry and not layout.numbered:
            raise PlanError("a walk that reads or writes entries needs row tiles whose entries have numbers")

    def _apart(self) -> set[str]:
        """Return the outputs that keep their factors: stored ones, of softmax, and of sums that do not share one."""
        walk = self.walk
        if walk.online:
            return {output for output, *_ in walk.accumulated}
        factors: dict[str, set[float]] = {}
        for output, _, destination in walk.accumulated:
            factors.setdefault(destination, set()).add(walk.function.peeled(output)[1])
        several = {output for output, _, destination in walk.accumulated if len(factors[destination]) > 1}
        return several | {output for output, _ in walk.stored}

    # -- text -----------------------------------------------------------------------------------------------------

    def put(self, *lines: str) -> None:
        self.lines += ["    " * self.indent + line for line in lines]

    def lane(self, table: str) -> str:
        return f"lane_{padded(self.sizes[table], self.dots)}"

    def short(self, size: int) -> bool:
        """Whether a tile has positions past the end of a table's row."""
        return padded(size, self.dots) != size

    def load(self, address: str, conditions: Sequence[str]) -> str:
        """A load, under conditions if there are any."""
        masked = f", mask={' & '.join(conditions)}, other=0.0" if conditions else ""
        return f"tl.load({address}{masked})"

    def numbers(self) -> list[str]:
        """The arguments that are numbers."""
        tables = dict.fromkeys([*self.own, *self.other])
        named = ["item_count", "rows", "columns"]
        named += ["windows", "pattern_head", "part_head"] if self.layout.stacked else []
        named += [f"{table}_{kind}" for table in tables for kind in ("head", "row")]
        others = (*self.vectors, *self.less.values(), *self.shared, *self.targets())
        return named + [f"{name}_head" for name in others]

    def pointers(self) -> list[str]:
        """The arguments that are tensors, but for index arrays; the last one is written."""
        seed = ["seed"] if self.walk.dropout else []
        tables = dict.fromkeys([*self.own, *self.other])
        return [*self.slots(), *seed, *tables, *self.vectors, *self.less.values(), *self.shared, *self.targets()]

    def targets(self) -> list[str]:
        """What is written, in order."""
        online = ["lse_out"] if self.walk.online else []
        return [*online, *self.row_sums, *self.walk.targets]

    def slots(self) -> list[str]:
        """The arrays of partial sums of windows that are cut."""
        online = ["top_slots", "sum_slots"] if self.walk.online else []
        return [*online, *(f"{name}_slots" for name in self.results)] if self.layout.cut else []

    def arrays(self) -> list[str]:
        """The index arrays that are read."""
        layout = self.layout
        full = ["full_col", *(["full_base"] if self.by_entry else [])] if layout.full else []
        part = ["part_col", "bits", *(["part_base"] if self.by_entry else [])] if layout.part else []
        return ["items", *full, *part, *(["order"] if self.by_entry and layout.ordered else [])]

    def start(self) -> None:
        """Where a program is, and what belongs to its window."""
        height = self.layout.height
        self.put("program = tl.program_id(0)", "item = items + program % item_count * 6", "window = tl.load(item)")
        self.place(height)
        if self.far_head == "shared":
            self.put(f"shared = head // {self.layout.group}")
        self.put(f"lane_col = tl.arange(0, {self.layout.width})")
        for size in sorted({padded(self.sizes[t], self.dots) for t in (*self.own, *self.other)}):
            self.put(f"lane_{size} = tl.arange(0, {size})")
        at = "row.to(tl.int64)" if self.layout.wide else "row"
        for table in self.own:
            lane, inside = self.lane(table), ["row_ok[:, None]"]
            if self.short(self.sizes[table]):
                inside.append(f"({lane} < {self.sizes[table]})[None, :]")
            address = f"{table} + head * {table}_head + {at}[:, None] * {table}_row + {lane}[None, :]"
            self.put(f"{table}_own = {self.load(address, inside)}")
        for name, inner in self.walk.inner.items():
            if name in self.products:
                own = self.products[name][0]
                lane, row = self.lane(own), inner.shared
                inside = [f"{lane} < {self.sizes[own]}"] if self.short(self.sizes[own]) else []
                loaded = self.load(f"{row} + head * {row}_head + {lane}", inside)
                self.put(f"{name}_shared = {loaded}[None, None, :].to(tl.float32)")
        for name, side in self.vectors.items():
            if side == "own":
                loaded = self.load(f"{name} + head * {name}_head + row", ["row_ok"])
                self.put(f"{name}_own = {loaded}[:, None].to(tl.float32)")
        for name, (left, right, less) in self.row_sums.items():
            self.put(f"{name}_own = tl.sum({left}_own.to(tl.float32) * {right}_own.to(tl.float32), 1)[:, None]")
            if less:
                loaded = self.load(f"{less} + head * {less}_head + row", ["row_ok"])
                self.put(f"{name}_own -= {loaded}[:, None].to(tl.float32)")
            self.put(f"tl.store({name} + head * {name}_head + row[:, None], {name}_own, mask=row_ok[:, None])")

        if self.walk.dropout and self.walk.mode == 0:
            self.salt()
            self.put("near = mixed(salt + row.to(tl.uint32))[:, None]")
        elif self.walk.dropout:
            self.put("near = mixed(row.to(tl.uint32))[:, None]")

    def salt(self) -> None:
        """What tells the random numbers of one head from others."""
        self.put(f"salt = mixed((tl.load(seed) + {self.row_head}).to(tl.uint32))")

    def place(self, height: int) -> None:
        """The head and the rows of a program."""
        if self.layout.stacked:
            self.put("part = program // item_count", "which = window // windows", "window = window % windows")
            self.put("head = (which * pattern_head + part * part_head).to(tl.int64)")
        else:
            self.put("head = (program // item_count).to(tl.int64)")
        self.put(f"lane_row = tl.arange(0, {height})", f"row = window * {height} + lane_row", "row_ok = row < rows")

    def loops(self) -> None:
        """The window's tiles; of columns, for each head of rows that shares their head."""
        grouped = self.far_head == "reader"
        if grouped:
            self.put(f"for member in range(0, {self.layout.group}):")
            self.indent += 1
            self.put(f"reader = head * {self.layout.group} + member")
        if self.walk.dropout and self.walk.mode == 1:
            self.salt()
        if self.layout.full:
            self.loop("full")
        if self.layout.part:
            self.loop("part")
        self.indent -= grouped

    def sums(self) -> None:
        """Begin the sums of a window."""
        height = self.layout.height
        if self.walk.online:
            self.put(f"top = tl.full([{height}], {LOWEST}, tl.float32)", f"total = tl.zeros([{height}], tl.float32)")
        for name, size in self.results.items():
            self.put(f"{name}_sum = tl.zeros([{self.sides(size)}], tl.float32)")

    def sides(self, size: int) -> str:
        """The sides of a sum whose rows have this size, or are single numbers."""
        return f"{self.layout.height}, {padded(size, self.dots)}" if size else str(self.layout.height)

    def loop(self, kind: str) -> None:
        """The window's full or partial tiles."""
        begin, end = (1, 2) if kind == "full" else (3, 4)
        layout, part = self.layout, kind == "part"
        stages = f", num_stages={layout.stages}"
        self.put(f"for tile in tl.range(tl.load(item + {begin}), tl.load(item + {end}){stages}):")
        self.indent += 1
        if layout.gathered:
            self.put(f"col = tl.load(part_col + tile * {layout.width} + lane_col)")
        else:
            self.put(f"col = tl.load({kind}_col + tile) * {layout.width} + lane_col")
        self.bounded, self.loaded = part and not layout.even, set[str]()
        if self.bounded:
            self.put("col_ok = col < columns")
        if part:
            self.put(f"word = tl.load(bits + tile * {layout.height} + lane_row)")
            self.put("met = ((word[:, None] >> lane_col[None, :]) & 1) != 0")
        names = self.scores() | self.loaded_vectors(part) | {KEEP: KEEP}
        if self.walk.dropout:
            far = "salt + col.to(tl.uint32)" if self.walk.mode else "col.to(tl.uint32)"
            share = self.walk.dropout
            kept = 1 / (1 - share) if share < 1 else 0.0
            least = min(int(share * 2**32), 2**32 - 1)
            self.put(f"keep = tl.where(mixed(near ^ mixed({far})[None, :]) < {least}, 0.0, {number_text(kept)})")
        statements, texts = self.walk.function.statements(self.weights.values(), names)
        self.put(*statements)
        self.gather_sums(dict(zip(self.weights, texts, strict=True)), part)
        self.indent -= 1

    def tile(self, table: str) -> str:
        """The tile of a table of the other mode, which is loaded where it is needed first: registers are few."""
        if table not in self.loaded:
            self.loaded.add(table)
            lane, inside = self.lane(table), ["col_ok[:, None]"] if self.bounded else []
            if self.short(self.sizes[table]):
                inside.append(f"({lane} < {self.sizes[table]})[None, :]")
            at = "col.to(tl.int64)" if self.layout.wide else "col"
            address = f"{table} + {self.far_head} * {table}_head + {at}[:, None] * {table}_row + {lane}[None, :]"
            self.put(f"{table}_tile = {self.load(address, inside)}")
        return f"{table}_tile"

    def scores(self) -> dict[str, str]:
        """Products of tiles."""
        for name, (own, other) in self.products.items():
            tile = self.tile(other)
            if name in self.walk.inner:
                self.inner(name, own, tile)
            elif self.dots:
                self.put(f'{name} = tl.dot({own}_own, {tile}.T, input_precision="{self.layout.precision}")')
            else:
                left, right = f"{own}_own[:, None, :].to(tl.float32)", f"{tile}[None, :, :].to(tl.float32)"
                self.put(f"{name} = tl.sum({left} * {right}, 2)")
        return {name: name for name in self.products}

    def inner(self, name: str, own: str, tile: str) -> None:
        """The sum of an inner function, and the derivatives that are accumulated."""
        function = self.walk.inner[name].function
        self.put(f"{name}_own = {own}_own[:, None, :].to(tl.float32)")
        self.put(f"{name}_other = {tile}[None, :, :].to(tl.float32)")
        wanted = ["value", *(f"d_{t.by}" for _, t, _ in self.walk.accumulated if isinstance(t, Derivative))]
        inputs = {role: f"{name}_{role}" for role in ("own", "other", "shared")}
        lines, texts = function.statements([function.outputs[output] for output in wanted], inputs, name)
        shape = f"[{self.layout.height}, {self.layout.width}, {padded(self.sizes[own], self.dots)}]"
        self.put(*lines, f"{name} = tl.sum({texts[0]} + tl.zeros({shape}, tl.float32), 2)")
        self.derivatives.update({(name, output): text for output, text in zip(wanted, texts, strict=True)})

    def loaded_vectors(self, part: bool) -> dict[str, str]:
        """Numbers by column and by entry; the names of all vectors."""
        if self.by_entry:
            if part:
                below = "(1 << lane_col[None, :]) - 1"
                base = f"tl.load(part_base + tile * {self.layout.height} + lane_row)[:, None]"
                self.put(f"entry = {base} + count(word[:, None] & ({below}))")
            else:
                base = f"tl.load(full_base + tile * {self.layout.height} + lane_row)[:, None]"
                self.put(f"entry = {base} + lane_col[None, :]")
            if self.layout.ordered:
                masked = ", mask=met, other=0" if part else ""
                self.put(f"entry = tl.load(order + entry{masked})")
        for name, side in self.vectors.items():
            if side == "other":
                loaded = self.load(f"{name} + {self.far_head} * {name}_head + col", ["col_ok"] if self.bounded else [])
                self.put(f"{name}_tile = {loaded}[None, :].to(tl.float32)")
            elif side == "entries":
                loaded = self.load(f"{name} + {self.entry_head} * {name}_head + entry", ["met"] if part else [])
                self.put(f"{name}_tile = {loaded}.to(tl.float32)")
        own = [*self.row_sums, *(name for name, side in self.vectors.items() if side == "own")]
        return {name: f"{name}_{'own' if name in own else 'tile'}" for name in (*self.row_sums, *self.vectors)}

    def gather_sums(self, texts: dict[str, str], part: bool) -> None:
        """Add a tile's weights to the sums, and store those of entries."""
        shape = f"[{self.layout.height}, {self.layout.width}]"
        weights = {}
        if self.walk.online:
            score = f"{texts['p']} + tl.zeros({shape}, tl.float32)"
            self.put(f'score = tl.where(met, {score}, float("-inf"))' if part else f"score = {score}")
            self.put("most = tl.maximum(top, tl.max(score, 1))", "p = tl.exp2(score - most[:, None])")
            self.put("shrink = tl.exp2(top - most)", "total = total * shrink + tl.sum(p, 1)", "top = most")
            for name, size in self.results.items():
                self.put(f"{name}_sum = {name}_sum * shrink{'[:, None]' if size else ''}")
            if self.walk.dropout:
                self.put("p = p * keep")
            weights["p"] = "p"
        else:
            for output, text in texts.items():
                weights[output] = f"{output}_weight"
                whole = f"{text} + tl.zeros({shape}, tl.float32)"
                self.put(f"{output}_weight = tl.where(met, {text}, 0.0)" if part else f"{output}_weight = {whole}")
        for output, table, name in self.walk.accumulated:
            weight = weights[output]
            if table is None:
                self.put(f"{name}_sum += tl.sum({weight}, 1)")
                continue
            if isinstance(table, Derivative):
                derivative = self.derivatives[table.product, f"d_{table.by}"]
                self.put(f"{name}_sum += tl.sum({weight}[:, :, None] * ({derivative}), 1)")
                continue
            tile = self.tile(table)
            if self.dots:
                how = f'input_precision="{self.layout.precision}"'
                self.put(f"{name}_sum = tl.dot({weight}.to({tile}.dtype), {tile}, {name}_sum, {how})")
            else:
                self.put(f"{name}_sum += tl.sum({weight}[:, :, None] * {tile}[None, :, :].to(tl.float32), 1)")
        for output, name in self.walk.stored:
            masked = ", mask=met" if part else ""
            value = f"{weights[output]}.to({name}.dtype.element_ty)"
            self.put(f"tl.store({name} + {self.entry_head} * {name}_head + entry, {value}{masked})")

    def finish(self) -> None:
        """Write the sums of a window."""
        if self.walk.online:
            self.put("divisor = tl.where(total == 0.0, 1.0, total)")
            self.put("tl.store(lse_out + head * lse_out_head + row, top + tl.log2(divisor), mask=row_ok)")
        factor = {name: self.factors[output] for output, _, name in self.walk.accumulated}
        for name, size in self.results.items():
            value = f"{name}_sum"
            if self.walk.online:
                value += " / divisor[:, None]" if size else " / divisor"
            if factor[name] != 1:
                value += f" * {number_text(factor[name])}"
            value = f"({value}).to({name}.dtype.element_ty)"
            if not size:
                self.put(f"tl.store({name} + head * {name}_head + row, {value}, mask=row_ok)")
                continue
            lane = f"tl.arange(0, {padded(size, self.dots)})[None, :]"
            at = "row.to(tl.int64)" if self.layout.wide else "row"
            inside = f" & ({lane} < {size})" if self.short(size) else ""
            address = f"{name} + head * {name}_head + {at}[:, None] * {size} + {lane}"
            self.put(f"tl.store({address}, {value}, mask=row_ok[:, None]{inside})")

    def slot_address(self, array: str, size: int, slot: str) -> str:
        height, width = self.layout.height, padded(size, self.dots) if size else 1
        within = f"lane_row[:, None] * {width} + tl.arange(0, {width})[None, :]" if size else "lane_row"
        return f"{array} + {slot} * {height * width} + {within}"

    def keep(self) -> None:
        """Write the partial sums of an item to its slot."""
        part = "part" if self.layout.stacked else "head"
        self.put(f"at = slot * (tl.num_programs(0) // item_count) + {part}")
        if self.walk.online:
            self.put(f"tl.store({self.slot_address('top_slots', 0, 'at')}, top)")
            self.put(f"tl.store({self.slot_address('sum_slots', 0, 'at')}, total)")
        for name, size in self.results.items():
            self.put(f"tl.store({self.slot_address(f'{name}_slots', size, 'at')}, {name}_sum)")

    def combined(self) -> None:
        """Add up the slots of a window."""
        part = "part" if self.layout.stacked else "head"
        self.put("program = tl.program_id(0)", "cut = items + program % item_count * 3", "window = tl.load(cut)")
        self.place(self.layout.height)
        self.put("parts = tl.num_programs(0) // item_count")
        self.sums()
        self.put("for slot in range(tl.load(cut + 1), tl.load(cut + 2)):")
        self.indent += 1
        self.put(f"at = slot * parts + {part}")
        if self.walk.online:
            self.put(f"part_top = tl.load({self.slot_address('top_slots', 0, 'at')})")
            self.put(f"part_total = tl.load({self.slot_address('sum_slots', 0, 'at')})")
            self.put("most = tl.maximum(top, part_top)", "shrink = tl.exp2(top - most)")
            self.put("grow = tl.exp2(part_top - most)", "total = total * shrink + part_total * grow", "top = most")
        for name, size in self.results.items():
            part = f"tl.load({self.slot_address(f'{name}_slots', size, 'at')})"
            each = "[:, None]" if size else ""
            if self.walk.online:
                self.put(f"{name}_sum = {name}_sum * shrink{each} + {part} * grow{each}")
            else:
                self.put(f"{name}_sum += {part}")
        self.indent -= 1
        self.finish()


def printed(walk: Walk, layout: Layout, name: str) -> Printed:
    """Return the module of a walk.

    Args:
        walk: what is computed.
        layout: what else the text depends on.
        name: for a reader.
    """
    printer = _Printer(walk, layout)
    printer.start()
    printer.sums()
    printer.loops()
    if layout.cut:
        printer.put("slot = tl.load(item + 5)", "if slot < 0:")
        printer.indent += 1
        printer.finish()
        printer.indent -= 1
        printer.put("else:")
        printer.indent += 1
        printer.keep()
        printer.indent -= 1
    else:
        printer.finish()
    arguments = (*printer.numbers(), *printer.arrays(), *printer.pointers())
    body, printer.lines = printer.lines, []
    lines = [f'"""{_header(printer, name)}"""', "", "import triton", "import triton.language as tl", "", ""]
    if layout.part and printer.by_entry:
        lines += [*(POPC if layout.popcount else COUNT).splitlines(), "", ""]
    if walk.dropout:
        lines += [*MIXED.strip().splitlines(), "", ""]
    lines += ["@triton.jit", *signature("def walk", [*arguments], ":"), *body]
    combine: tuple[str, ...] = ()
    if layout.cut:
        printer.combined()
        online = ["lse_out"] if walk.online else []
        targets = [*online, *printer.results]
        stacked = ["windows", "pattern_head", "part_head"] if layout.stacked else []
        numbers = ["item_count", "rows", *stacked, *(f"{t}_head" for t in targets)]
        combine = (*numbers, "items", *printer.slots(), *targets)
        lines += ["", "", "@triton.jit", *signature("def combine", [*combine], ":"), *printer.lines]
    return Printed("\n".join(lines) + "\n", arguments, combine)


def _header(printer: _Printer, name: str) -> str:
    """Return the lines that tell a reader what a module computes, and how what it reads lies in memory."""
    walk, layout = printer.walk, printer.layout
    i, j = ("i", "j") if walk.mode == 0 else ("j", "i")
    kind = "gathered" if layout.gathered else "neighbouring"
    lines = [
        f"{name}, generated by sparsetc for triton.",
        "",
        f"Windows of {layout.height} {SIDES[walk.mode]}, called rows, meet tiles of {layout.width} {kind} columns.",
        f"For each entry ({i}, {j}) of the pattern:",
        "",
    ]
    for product, (own, other) in printer.products.items():
        term = f"{own}[{i}, d] {other}[{j}, d]"
        if product in walk.inner:
            term = f"a function of {own}[{i}, d], {other}[{j}, d] and {walk.inner[product].shared}[d]"
        lines.append(f"    {product}[{i}, {j}] = sum over d of {term}")
    for name_of_sum, (left, right, less) in printer.row_sums.items():
        minus = f" - {less}[{i}]" if less else ""
        lines.append(f"    {name_of_sum}[{i}] = sum over d of {left}[{i}, d] {right}[{i}, d]{minus}")
    at = {"own": i, "other": j, "entries": f"{i}, {j}"}
    inputs = [*printer.products, *printer.row_sums]
    inputs += [f"{vector}[{at[side]}]" for vector, side in printer.vectors.items()]
    lines.append(f"    {', '.join(printer.weights)} = map of {', '.join(inputs)}")
    if walk.dropout:
        lines.append(
            f"    keep[{i}, {j}] = 0 for a share of {walk.dropout}, drawn by hashes of seed, head, {i} and {j}"
        )
    if walk.online:
        lines.append(f"    p[{i}, {j}] = 2 ** (p[{i}, {j}] - lse_out[{i}]), lse_out the logarithm of the sum for i")
    for output, table, result in walk.accumulated:
        factor = printer.factors[output]
        times = "" if factor == 1 else f"{number_text(factor)} * "
        summed = f"{output}[{i}, {j}]"
        if isinstance(table, Derivative):
            summed += f" times the derivative of {table.product}'s function"
        elif table is not None:
            summed += f" {table}[{j}, d]"
        lines.append(f"    {result}[{i}{', d' if table else ''}] += {times}{summed}")
    lines += [f"    {result}[entry] = {output}[{i}, {j}]" for output, result in walk.stored]
    lines += ["", "items[item] = window, full tiles from, to, partial tiles from, to, slot of a part of a window or -1"]
    if layout.full:
        lines.append("full_col[tile]: the number of a full tile's block of columns")
    if layout.part:
        lines.append(f"part_col[tile]: {'its columns, some twice' if layout.gathered else 'likewise of a partial one'}")
        lines.append("bits[tile, row]: bit c is set where the row meets the tile's column c")
    if printer.by_entry:
        lines.append("full_base, part_base[tile, row]: the number of the row's first entry in the tile")
    lines.append("x_head, x_row: elements from one head of x, and from one row, to the next")
    return "\n".join(lines) + "\n"


def sizes_of(walk: Walk, tables: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """Return the sizes of rows of the tables that a walk may read."""
    pairs = [*walk.products.values(), *(of[:2] for of in walk.sums.values())]
    summed = [term for _, term, _ in walk.accumulated if isinstance(term, str)]
    names = dict.fromkeys([t for pair in pairs for t in pair] + summed)
    return tuple((name, tables[name]) for name in names)
