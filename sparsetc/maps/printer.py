"""A walk over row tiles -> the text of its Triton module, which can be read alone.

In: a `Walk`, and a `Layout` that says what the text depends on beside it. Out: a `Printer`, which has the text, and the
names of the arguments of its kernels. Kernel ``walk`` has one program a work item and head. It loads what belongs to
the rows of its window once, goes through the window's full and partial tiles (loads, products, the map, a softmax on
the way, and sums), and writes its sums. Of windows that are cut in several items it writes partial sums to slots, which
kernel ``combine`` adds up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from sparsetc.backends import TRITON
from sparsetc.codegen.triton import signature
from sparsetc.codegen.triton_values import COUNT, POPC
from sparsetc.ir.program.text import Lines
from sparsetc.maps.body import KEEP, Walk, keeps
from sparsetc.maps.elementwise import number_text
from sparsetc.maps.text import LEAST_DOT, LOWEST, Layout, argument_names, header, padded
from sparsetc.support import Names

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


class Printer(Lines):
    """Prints one walk.

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
        self.results = walk.widths(self.sizes)
        self.dots = layout.height >= LEAST_DOT
        self.shape = f"[{layout.height if self.dots else layout.lines}, {layout.width}]"
        self.derivatives: dict[tuple[str, str], str] = {}
        self.far_head, self.row_head, self.entry_head = layout.heads(walk.mode)
        plain = self.dots and layout.ptx
        self.read_in_place = [name for name in walk.places if plain and name not in layout.whole]

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
        self.lanes(self.sizes[table] for table in (*self.walk.own, *self.walk.other))
        for table in self.walk.own:
            size = self.sizes[table]
            loaded = self.load(self.row_address(table, "head", "row", size), ["row_ok[:, None]", *self.within(size)])
            self.put(f"{table}_own = {loaded}")
        for name, (_, row) in self.walk.inner.items():
            size = self.sizes[self.walk.products[name][0]]
            lane = f"lane_{padded(size, self.dots)}[None, :]"
            loaded = self.load(f"{row} + head[:, None] * {row}_head + {lane}", self.within(size))
            self.put(f"{name}_shared = {loaded}[:, None, :].to(tl.float32)")
        for name, side in self.walk.vectors.items():
            if side == "own":
                loaded = self.load(self.number_address(name, "head", "row"), ["row_ok"])
                self.put(f"{name}_own = {self.number(name, f'{loaded}[:, None]')}")
        for name, (left, right, less) in self.walk.sums.items():
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

    def lanes(self, sizes: Iterable[int]) -> None:
        """The positions along rows of these sizes."""
        for size in sorted({padded(size, self.dots) for size in sizes}):
            self.put(f"lane_{size} = tl.arange(0, {size})")

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

    def loops(self) -> None:
        """The window's tiles; of columns, for each head of rows that shares their head."""
        grouped = self.far_head == "reader"
        with self.block(f"for member in range(0, {self.layout.group}):" if grouped else ""):
            if grouped:
                self.put(f"reader = head * {self.layout.group} + member")
            if self.walk.dropout and self.walk.mode == 1:
                self.salt()
            if self.layout.full:
                self.loop("full")
            if self.layout.part:
                self.loop("part")

    def salt(self) -> None:
        """Print the salt that makes the random numbers of each head different."""
        self.put(f"salt = mixed((tl.load(seed) + {self.row_head}).to(tl.uint32))")

    def loop(self, kind: str) -> None:
        """The window's full or partial tiles."""
        begin, end = (1, 2) if kind == "full" else (3, 4)
        layout, part = self.layout, kind == "part"
        stages = f", num_stages={layout.stages}"
        self.put(f"begin, end = tl.load(item + {begin}), tl.load(item + {end})")
        self.bounded, self.loaded = part and not layout.even, set[str]()
        if not self.dots:
            self.lines_loop(stages)
            return
        run = layout.in_runs and not part
        if run:
            self.put("first_col = tl.load(full_col + begin, mask=begin < end, other=0) - begin")
        with self.block(f"for tile in tl.range(begin, end{stages}):"):
            if layout.gathered:
                self.put(f"col = tl.load(part_col + tile * {layout.width} + lane_col)")
            elif run:
                self.put(f"col = (first_col + tile) * {layout.width} + lane_col")
            else:
                self.put(f"col = tl.load({kind}_col + tile) * {layout.width} + lane_col")
            if self.bounded:
                self.put("col_ok = col < columns")
            if part:
                self.put(f"word = tl.load(bits + tile * {layout.height} + lane_row)")
            self.body(part)

    def lines_loop(self, stages: str) -> None:
        """The tiles of a program's lines, as many as the longest has."""
        self.put("tiles = tl.where(row_ok, end - begin, 0)")
        with self.block(f"for step in tl.range(0, tl.max(tiles, 0){stages}):"):
            self.put("tile, here = begin + step, step < tiles")
            at = f"tile[:, None] * {self.layout.width} + lane_col[None, :]"
            self.put(f"col = tl.load(part_col + {at}, mask=here[:, None], other=0)")
            self.put("word = tl.load(bits + tile, mask=here, other=0)")
            self.body(part=True)

    def body(self, part: bool) -> None:
        """Compute and accumulate a tile."""
        if part:
            self.put("met = ((word[:, None] >> lane_col[None, :]) & 1) != 0")
        names = self.scores() | self.loaded_vectors(part) | {KEEP: KEEP}
        if self.walk.dropout:
            far = f"{self.by_line('salt')} + col.to(tl.uint32)" if self.walk.mode else "col.to(tl.uint32)"
            far = f"mixed({far}){'[None, :]' if self.dots else ''}"
            least, kept = keeps(self.walk.dropout)
            self.put(f"keep = tl.where(mixed(near ^ {far}) < {least}, 0.0, {number_text(kept)})")
        weights = self.walk.weights
        statements, texts = self.walk.function.statements([argument for argument, _ in weights.values()], names)
        self.put(*statements)
        self.gather_sums(dict(zip(weights, texts, strict=True)), part)

    def tile(self, table: str) -> str:
        """The tile of a table of the other mode, which is loaded where it is needed first: registers are few."""
        if table not in self.loaded:
            self.loaded.add(table)
            size, inside = self.sizes[table], ["col_ok[:, None]"] if self.bounded else []
            inside += self.within(size, "None, :" if self.dots else "None, None, :")
            self.put(f"{table}_tile = {self.load(self.row_address(table, self.far_head, 'col', size), inside)}")
        return f"{table}_tile"

    def scores(self) -> dict[str, str]:
        """Products of tiles."""
        for name, (own, other) in self.walk.products.items():
            tile = self.tile(other)
            if name in self.walk.inner:
                self.inner(name, own, tile)
            elif self.dots:
                self.put(f'{name} = tl.dot({own}_own, {tile}.T, input_precision="{self.layout.precision}")')
            else:
                self.put(f"{name} = tl.sum({own}_own.to(tl.float32)[:, None, :] * {tile}.to(tl.float32), 2)")
        return {name: name for name in self.walk.products}

    def inner(self, name: str, own: str, tile: str) -> None:
        """The sum of an inner function, and the derivatives that are accumulated."""
        function, _ = self.walk.inner[name]
        self.put(f"{name}_own = {own}_own.to(tl.float32)[:, None, :]", f"{name}_other = {tile}.to(tl.float32)")
        wanted = ["value", *(t[1] for _, t, _ in self.walk.accumulated if isinstance(t, tuple) and t[0] == name)]
        inputs = {role: f"{name}_{role}" for role in ("own", "other", "shared")}
        lines, texts = function.statements([function.outputs[output] for output in wanted], inputs, name)
        shape = f"[{self.layout.lines}, {self.layout.width}, {padded(self.sizes[own], self.dots)}]"
        self.put(*lines, f"{name} = tl.sum({texts[0]} + tl.zeros({shape}, tl.float32), 2)")
        self.derivatives.update({(name, output): text for output, text in zip(wanted, texts, strict=True)})

    def loaded_vectors(self, part: bool) -> dict[str, str]:
        """Numbers by column and by entry; the names of all vectors."""
        if self.walk.by_entry:
            if part:
                below = "(1 << lane_col[None, :]) - 1"
                at = f"part_base + tile * {self.layout.height} + lane_row"
                base = f"tl.load({at if self.dots else 'part_base + tile, mask=here, other=0'})[:, None]"
                self.put(f"entry = {base} + count(word[:, None] & ({below}))")
            else:
                base = f"tl.load(full_base + tile * {self.layout.height} + lane_row)[:, None]"
                self.put(f"entry = {base} + lane_col[None, :]")
            if self.layout.ordered:
                masked = ", mask=met, other=0" if part else ""
                self.put(f"entry = tl.load(order + entry{masked})")
        for name, side in self.walk.vectors.items():
            if side == "other":
                address = self.number_address(name, self.by_line(self.far_head), "col")
                loaded = self.load(address, ["col_ok"] if self.bounded else [])
                self.put(f"{name}_tile = {self.number(name, f'{loaded}[None, :]' if self.dots else loaded)}")
            elif side == "entries":
                loaded = self.load(
                    f"{name} + {self.by_line(self.entry_head)} * {name}_head + entry", ["met"] if part else []
                )
                self.put(f"{name}_tile = {self.number(name, loaded)}")
        numbers = self.walk.variables()
        for name, place in self.walk.places.items():
            lines, (at,) = place.statements(place.outputs.values(), numbers, f"{name}_of")
            self.put(*lines, f"{name}_at = ({at}).to(tl.int32) + tl.zeros({self.shape}, tl.int32)")
            self.put(f"{name}_at += tl.where({name}_at < 0, {name}_size, 0)")
            address, met = f"{name} + {self.by_line(self.row_head)} * {name}_head + ", ["met"] if part else []
            if name in self.read_in_place:
                loaded = f"read({address}{f'tl.where(met, {name}_at, 0)' if part else f'{name}_at'})"
            else:
                loaded = self.load(f"{address}{name}_at", met)
            self.put(f"{name}_tile = {self.number(name, loaded)}")
        return numbers

    def row_sum(self, weight: str) -> str:
        """A tile's sum over its columns; of a window of one row these stay apart until its last tile."""
        return f"tl.sum({weight}, 1)" if self.dots else weight

    def gather_sums(self, texts: dict[str, str], part: bool) -> None:
        """Add a tile's weights to the sums, and store the results of entries."""
        weights = {}
        if self.walk.online:
            score = f"{texts['p']} + tl.zeros({self.shape}, tl.float32)"
            self.put(f'score = tl.where(met, {score}, float("-inf"))' if part else f"score = {score}")
            _, factor = self.walk.weights["p"]
            times = "" if factor == 1 else f" * {number_text(factor)}"
            self.put(f"most = tl.maximum(top, tl.max(score, 1){times})", f"p = tl.exp2(score{times} - most[:, None])")
            each = "" if self.dots else "[:, None]"
            self.put(
                "shrink = tl.exp2(top - most)", f"total = total * shrink{each} + {self.row_sum('p')}", "top = most"
            )
            deep = "[:, None]" if self.dots else "[:, None, None]"
            for name, size in self.results.items():
                self.put(f"{name}_sum = {name}_sum * shrink{deep if size else each}")
            if self.walk.dropout:
                self.put("p = p * keep")
            weights["p"] = "p"
        else:
            for output, text in texts.items():
                weights[output] = f"{output}_weight"
                whole = f"{text} + tl.zeros({self.shape}, tl.float32)"
                self.put(f"{output}_weight = tl.where(met, {text}, 0.0)" if part else f"{output}_weight = {whole}")
        for output, table, name in self.walk.accumulated:
            weight = weights[output]
            if table is None:
                self.put(f"{name}_sum += {self.row_sum(weight)}")
                continue
            if isinstance(table, tuple):
                self.put(f"{name}_sum += {weight}[:, :, None] * ({self.derivatives[table]})")
                continue
            tile = self.tile(table)
            if self.dots:
                how = f'input_precision="{self.layout.precision}"'
                self.put(f"{name}_sum = tl.dot({weight}.to({tile}.dtype), {tile}, {name}_sum, {how})")
            else:
                self.put(f"{name}_sum += {weight}[:, :, None] * {tile}.to(tl.float32)")
        masked = ", mask=met" if part else ""
        for output, vector, name in self.walk.stored:
            if vector:
                address = f"{name} + {self.by_line(self.row_head)} * {name}_head + {vector}_at"
                self.put(f'tl.atomic_add({address}, {weights[output]}{masked}, sem="relaxed")')
                continue
            value = f"{weights[output]}.to({name}.dtype.element_ty)"
            self.put(f"tl.store({name} + {self.by_line(self.entry_head)} * {name}_head + entry, {value}{masked})")

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
        for name, size in self.results.items():
            value = f"{name}_sum"
            if self.walk.online:
                value += " / divisor[:, None]" if size else " / divisor"
            if self.walk.factors[name] != 1:
                value += f" * {number_text(self.walk.factors[name])}"
            value = f"({value}).to({name}.dtype.element_ty)"
            if not size:
                self.put(f"tl.store({name} + head * {name}_head + row, {value}, mask=row_ok)")
                continue
            inside = " & ".join(["row_ok[:, None]", *self.within(size)])
            self.put(f"address = {self.row_address(name, 'head', 'row', size)}")
            self.put(f"tl.store(address, {value}, mask={inside})")

    def slot_address(self, array: str, size: int, at: str = "at") -> str:
        height, width = self.layout.height, padded(size, self.dots) if size else 1
        if at == "lines":
            return f"{array} + at[:, None] * {width} + tl.arange(0, {width})[None, :]" if size else f"{array} + at"
        within = f"lane_row[:, None] * {width} + tl.arange(0, {width})[None, :]" if size else "lane_row"
        return f"{array} + {at} * {height * width} + {within}"

    def keep(self) -> None:
        """Write the partial sums of an item to its slot."""
        self.put("at = slot * parts + part")
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
        self.lanes(filter(None, self.results.values()))
        self.sums(whole=True)
        elements = self.layout.height * max(padded(size, self.dots) for size in self.results.values())
        at_once = min(max(AT_ONCE // elements, 1), MOST_AT_ONCE)

        def put_part(array: str, size: int, other: str = "0.0") -> None:
            several = ":, None, None" if size else ":, None"
            address = self.slot_address(f"{array}_slots", size, f"at[{several}]")
            self.put(f"{array}_part = tl.load({address}, mask=(slot < last)[{several}], other={other})")

        self.put("first, last = tl.load(cut + 1), tl.load(cut + 2)")
        with self.block(f"for begin in range(first, last, {at_once}):"):
            self.put(f"slot = begin + tl.arange(0, {at_once})", "at = slot * parts + part")
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
        self.finish()


@lru_cache(maxsize=256)
def printed(walk: Walk, layout: Layout, name: str) -> Printer:
    """Return the printer of a walk's module, printed once.

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
    if layout.cut:
        printer.put("slot = tl.load(item + 5)")
    if layout.cut and printer.dots:
        with printer.block("if slot < 0:"):
            printer.finish()
        with printer.block("else:"):
            printer.keep()
    else:
        if layout.cut:
            printer.put("in_slot = row_ok & (slot >= 0)")
            printer.keep()
            printer.put("row_ok = row_ok & (slot < 0)")
        printer.finish()
    body, printer.out = printer.out, []
    printer.arguments = argument_names(walk, body)
    comment = header(walk, layout, name, TRITON)
    lines = [f'"""{comment}"""', "", "import triton", "import triton.language as tl", "", ""]
    if layout.part and walk.by_entry:
        lines += [*(POPC if layout.ptx else COUNT).splitlines(), "", ""]
    if printer.read_in_place:
        lines += [*READ.strip().splitlines(), "", ""]
    if walk.dropout:
        lines += [*MIXED.strip().splitlines(), "", ""]
    lines += ["@triton.jit", *signature("def walk", [*printer.arguments], ":"), *body]
    if layout.cut:
        printer.combined()
        printer.combine = argument_names(walk, printer.out)
        lines += ["", "", "@triton.jit", *signature("def combine", [*printer.combine], ":"), *printer.out]
    printer.text = "\n".join(lines) + "\n"
    return printer
