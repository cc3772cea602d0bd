"""A walk over row tiles -> the text of its Triton module, which can be read alone.

In: a `Walk`, and a `Layout` that says what the text depends on beside it. Out: a `Printed`: the text, and the names of
the arguments of its kernels. Kernel ``walk`` has one program a work item and head. It loads what belongs to the rows of
its window once, goes through the window's full and partial tiles, and writes its sums. Of windows that are cut in
several items it writes partial sums to slots, which kernel ``combine`` adds up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from sparsetc.codegen.triton import signature
from sparsetc.codegen.triton_values import COUNT, POPC
from sparsetc.maps.body import SIDES, Derivative, Walk
from sparsetc.maps.elementwise import number_text
from sparsetc.maps.loop import Loop
from sparsetc.maps.text import LOWEST, Layout, Text, padded
from sparsetc.support import NamedInts, Names

AT_ONCE, MOST_AT_ONCE = 2048, 32
"""Numbers, and slots, that a program adds up at once: 64 registers of a warp at most."""
READ = '''
@triton.jit
def read(pointer):
    """A number each, where it is used: others that products depend on are copied ahead, one by one."""
    asm: tl.constexpr = "ld.global.nc.f32 $0, [$1];"
    return tl.inline_asm_elementwise(asm, "=f,l", [pointer], dtype=tl.float32, is_pure=True, pack=1)
'''
MIXED = '''
@triton.jit
def mixed(x):
    """A hash of 32 bits (lowbias32, Wellons 2018)."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)
'''


@dataclass(frozen=True)
class Printed:
    """Generated text, and what its kernels take, in order.

    Attributes:
        text: of the module.
        arguments: of ``walk``; the last is a result.
        combine: of ``combine``, or none where no window is cut.
    """

    text: str
    arguments: Names
    combine: Names


class Printer(Loop):
    """Prints one walk."""

    def start(self) -> None:
        """Print the place of a program, and everything that belongs to its window."""
        self.put("program = tl.program_id(0)")
        if self.dots:
            self.put("item = items + program % item_count * 6", "window = tl.load(item)")
            self.place()
        else:
            self.lines_of_program()
        if self.far_head == "shared":
            self.put(f"shared = head // {self.layout.group}")
        self.put(f"lane_col = tl.arange(0, {self.layout.width})")
        for size in sorted({padded(self.sizes[t], self.dots) for t in (*self.own, *self.other)}):
            self.put(f"lane_{size} = tl.arange(0, {size})")
        for table in self.own:
            lane, inside = self.lane(table), ["row_ok[:, None]"]
            if self.short(self.sizes[table]):
                inside.append(f"({lane} < {self.sizes[table]})[None, :]")
            self.put(f"{table}_own = {self.load(self.row_address(table, 'head', 'row'), inside)}")
        for name, inner in self.walk.inner.items():
            if name in self.products:
                own = self.products[name][0]
                lane, row = self.lane(own), inner.shared
                inside = [f"({lane} < {self.sizes[own]})[None, :]"] if self.short(self.sizes[own]) else []
                loaded = self.load(f"{row} + head[:, None] * {row}_head + {lane}[None, :]", inside)
                self.put(f"{name}_shared = {loaded}[:, None, :].to(tl.float32)")
        for name, side in self.vectors.items():
            if side == "own":
                loaded = self.load(self.number_address(name, "head", "row"), ["row_ok"])
                self.put(f"{name}_own = {self.number(name, f'{loaded}[:, None]')}")
        for name, (left, right, less) in self.row_sums.items():
            self.put(f"{name}_own = tl.sum({left}_own.to(tl.float32) * {right}_own.to(tl.float32), 1)[:, None]")
            if less:
                loaded = self.load(f"{less} + head * {less}_head + row", ["row_ok"])
                self.put(f"{name}_own -= {loaded}[:, None].to(tl.float32)")
            self.put(f"tl.store(({name} + head * {name}_head + row)[:, None], {name}_own, mask=row_ok[:, None])")
        if self.walk.dropout and self.walk.mode == 0:
            self.salt()
            self.put("near = mixed(salt + row.to(tl.uint32))[:, None]")
        elif self.walk.dropout:
            self.put("near = mixed(row.to(tl.uint32))[:, None]")

    def place(self) -> None:
        """The head and the rows of a program."""
        height = self.layout.height
        self.put(f"lane_row = tl.arange(0, {height})", "part = program // item_count")
        self.head()
        self.put(f"row = window * {height} + lane_row", "row_ok = row < rows")

    def head(self) -> None:
        """The head of a program's window, or those of its lines."""
        if self.layout.stacked:
            self.put("which = window // windows", "window = window % windows")
            self.put("head = (which * pattern_head + part * part_head).to(tl.int64)")
        else:
            self.put("head = part.to(tl.int64)")

    def lines_of_program(self) -> None:
        """The windows of one row that a program takes, and a head of each; the last program skips repeated ones."""
        self.put(f"line = program * {self.layout.lines} + tl.arange(0, {self.layout.lines})")
        self.put("row_ok = line < item_count * parts", "line = tl.minimum(line, item_count * parts - 1)")
        self.put("item = items + line // parts * 6", "window = tl.load(item)", "part = line % parts")
        self.head()
        self.put("row = window")

    def sums(self, whole: bool) -> None:
        """Begin the sums of a window, `whole` or one for each column of a tile."""
        height = self.layout.height if whole else self.layout.lines
        apart = [] if whole else [self.layout.width]
        if self.walk.online:
            self.put(f"top = tl.full([{height}], {LOWEST}, tl.float32)")
            self.put(f"total = tl.zeros({[height, *apart]}, tl.float32)")
        for name, size in self.results.items():
            sides = [height, *apart, *([padded(size, self.dots)] if size else [])]
            self.put(f"{name}_sum = tl.zeros({sides}, tl.float32)")

    def add_columns(self) -> None:
        """Add up what a window of one row has for each column of a tile."""
        if self.walk.online:
            self.put("total = tl.sum(total, 1)")
        self.put(*(f"{name}_sum = tl.sum({name}_sum, 1)" for name in self.results))

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
            lane = f"tl.arange(0, {padded(size, self.dots)})"
            inside = f" & ({lane} < {size})[None, :]" if self.short(size) else ""
            address = self.row_address(name, "head", "row", lane)
            self.put(f"address = {address}", f"tl.store(address, {value}, mask=row_ok[:, None]{inside})")

    def slot_address(self, array: str, size: int, at: str = "at") -> str:
        height, width = self.layout.height, padded(size, self.dots) if size else 1
        if at == "lines":
            return f"{array} + at[:, None] * {width} + tl.arange(0, {width})[None, :]" if size else f"{array} + at"
        within = f"lane_row[:, None] * {width} + tl.arange(0, {width})[None, :]" if size else "lane_row"
        return f"{array} + {at} * {height * width} + {within}"

    def keep(self) -> None:
        """Write the partial sums of an item to its slot."""
        self.put(f"at = slot * {'(tl.num_programs(0) // item_count)' if self.dots else 'parts'} + part")
        kept = {"top_slots": (0, "top"), "sum_slots": (0, "total")} if self.walk.online else {}
        kept |= {f"{name}_slots": (size, f"{name}_sum") for name, size in self.results.items()}
        at = "at" if self.dots else "lines"
        for array, (size, value) in kept.items():
            mask = f", mask=in_slot{'[:, None]' if size else ''}"
            self.put(f"tl.store({self.slot_address(array, size, at)}, {value}{'' if self.dots else mask})")

    def combined(self) -> None:
        """Add up the slots of a window, as many at once as registers hold: one by one each would wait for memory."""
        self.put("program = tl.program_id(0)", "cut = items + program % item_count * 3", "window = tl.load(cut)")
        self.place()
        if not self.dots:
            self.put("head += lane_row")
        self.put("parts = tl.num_programs(0) // item_count")
        self.sums(whole=True)
        elements = self.layout.height * max(padded(size, self.dots) for size in self.results.values())
        at_once = min(max(AT_ONCE // elements, 1), MOST_AT_ONCE)
        self.put("first, last = tl.load(cut + 1), tl.load(cut + 2)", f"for begin in range(first, last, {at_once}):")
        self.indent += 1
        self.put(f"slot = begin + tl.arange(0, {at_once})", "at = slot * parts + part")

        def put_part(array: str, size: int, other: str = "0.0") -> None:
            several = ":, None, None" if size else ":, None"
            address = self.slot_address(f"{array}_slots", size, f"at[{several}]")
            self.put(f"{array}_part = tl.load({address}, mask=(slot < last)[{several}], other={other})")

        if self.walk.online:
            put_part("top", 0, LOWEST)
            put_part("sum", 0)
            self.put("most = tl.maximum(top, tl.max(top_part, 0))", "shrink = tl.exp2(top - most)", "top = most")
            self.put("grow = tl.exp2(top_part - top)", "total = total * shrink + tl.sum(sum_part * grow, 0)")
        for name, size in self.results.items():
            put_part(name, size)
            if self.walk.online:
                each, grow = ("[:, None]", "grow[:, :, None]") if size else ("", "grow")
                self.put(f"{name}_sum = {name}_sum * shrink{each} + tl.sum({name}_part * {grow}, 0)")
            else:
                self.put(f"{name}_sum += tl.sum({name}_part, 0)")
        self.indent -= 1
        self.finish()


@lru_cache(maxsize=256)
def printed(walk: Walk, layout: Layout, name: str) -> Printed:
    """Return the module of a walk, printed once.

    Args:
        walk: what is computed.
        layout: what else the text depends on.
        name: for a reader.
    """
    printer = Printer(walk, layout)
    printer.start()
    printer.sums(whole=printer.dots)
    printer.loops()
    if not printer.dots:
        printer.add_columns()
    if layout.cut and not printer.dots:
        printer.put("slot = tl.load(item + 5)", "in_slot = row_ok & (slot >= 0)")
        printer.keep()
        printer.put("row_ok = row_ok & (slot < 0)")
        printer.finish()
    elif layout.cut:
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
    body, printer.out = printer.out, []
    lines = [f'"""{header(printer, name, "triton")}"""', "", "import triton", "import triton.language as tl", "", ""]
    if layout.part and printer.by_entry:
        lines += [*(POPC if layout.ptx else COUNT).splitlines(), "", ""]
    if printer.read_in_place:
        lines += [*READ.strip().splitlines(), "", ""]
    if walk.dropout:
        lines += [*MIXED.strip().splitlines(), "", ""]
    lines += ["@triton.jit", *signature("def walk", [*arguments], ":"), *body]
    combine: Names = ()
    if layout.cut:
        printer.combined()
        online = ["lse_out"] if walk.online else []
        targets = [*online, *printer.results]
        stacked = ["windows", "pattern_head", "part_head"] if layout.stacked else []
        numbers = ["item_count", "rows", *stacked, *printer.strides(targets)]
        combine = (*numbers, "items", *printer.slots(), *targets)
        lines += ["", "", "@triton.jit", *signature("def combine", [*combine], ":"), *printer.out]
    return Printed("\n".join(lines) + "\n", arguments, combine)


def header(printer: Text, name: str, backend: str) -> str:
    """Return the header comment of a module: its computation, and the memory layout of its arguments."""
    walk, layout = printer.walk, printer.layout
    i, j = ("i", "j") if walk.mode == 0 else ("j", "i")
    kind = "gathered" if layout.gathered else "neighbouring"
    lines = [f"{name}, generated by sparsetc for {backend}.", ""]
    if backend == "triton":
        lines += [
            f"Windows of {layout.height} {SIDES[walk.mode]}, called rows, meet tiles of {layout.width} {kind} columns."
        ]
    lines += [f"For each entry ({i}, {j}) of the pattern:", ""]
    for product, (own, other) in printer.products.items():
        term = f"{own}[{i}, d] {other}[{j}, d]"
        if product in walk.inner:
            term = f"a function of {own}[{i}, d], {other}[{j}, d] and {walk.inner[product].shared}[d]"
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
        if isinstance(table, Derivative):
            summed += f" times the derivative of {table.product}'s function"
        elif table is not None:
            summed += f" {table}[{j}, d]"
        lines.append(f"    {result}[{i}{', d' if table else ''}] += {times}{summed}")
    for output, vector, result in walk.stored:
        lines.append(f"    {result}[{f'n({i}, {j})] +=' if vector else 'entry] ='} {output}[{i}, {j}]")
    lines.append("")
    if backend != "triton":
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


def sizes_of(walk: Walk, tables: Mapping[str, int]) -> NamedInts:
    """Return the sizes of rows of the tables that a walk may read."""
    pairs = [*walk.products.values(), *(of[:2] for of in walk.sums.values())]
    summed = [term for _, term, _ in walk.accumulated if isinstance(term, str)]
    names = dict.fromkeys([t for pair in pairs for t in pair] + summed)
    return tuple((name, tables[name]) for name in names)
