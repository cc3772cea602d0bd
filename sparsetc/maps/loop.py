"""The loop of a walk over the tiles of a window: loads, products, the map, a softmax on the way, and sums.

In: a `Text`. Out: its lines with the loops.
"""

from __future__ import annotations

from sparsetc.maps.body import KEEP, Derivative
from sparsetc.maps.elementwise import number_text
from sparsetc.maps.text import Text, padded


class Loop(Text):
    """Prints the loops of a walk."""

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

    def salt(self) -> None:
        """Print the salt that makes the random numbers of each head different."""
        self.put(f"salt = mixed((tl.load(seed) + {self.row_head}).to(tl.uint32))")

    def loop(self, kind: str) -> None:
        """The window's full or partial tiles."""
        begin, end = (1, 2) if kind == "full" else (3, 4)
        layout, part = self.layout, kind == "part"
        stages = f", num_stages={layout.stages}"
        self.put(f"begin, end = tl.load(item + {begin}), tl.load(item + {end})")
        if not self.dots:
            self.lines_loop(stages)
            return
        run = layout.in_runs and not part
        if run:
            self.put("first_col = tl.load(full_col + begin, mask=begin < end, other=0) - begin")
        self.put(f"for tile in tl.range(begin, end{stages}):")
        self.indent += 1
        if layout.gathered:
            self.put(f"col = tl.load(part_col + tile * {layout.width} + lane_col)")
        elif run:
            self.put(f"col = (first_col + tile) * {layout.width} + lane_col")
        else:
            self.put(f"col = tl.load({kind}_col + tile) * {layout.width} + lane_col")
        self.bounded, self.loaded = part and not layout.even, set[str]()
        if self.bounded:
            self.put("col_ok = col < columns")
        if part:
            self.put(f"word = tl.load(bits + tile * {layout.height} + lane_row)")
        self.body(part)

    def lines_loop(self, stages: str) -> None:
        """The tiles of a program's lines, as many as the longest has."""
        self.put("tiles = tl.where(row_ok, end - begin, 0)", f"for step in tl.range(0, tl.max(tiles, 0){stages}):")
        self.indent += 1
        self.put("tile, here = begin + step, step < tiles")
        width = self.layout.width
        self.put(f"col = tl.load(part_col + tile[:, None] * {width} + lane_col[None, :], mask=here[:, None], other=0)")
        self.put("word = tl.load(bits + tile, mask=here, other=0)")
        self.bounded, self.loaded = False, set()
        self.body(part=True)

    def body(self, part: bool) -> None:
        """Compute and accumulate a tile."""
        if part:
            self.put("met = ((word[:, None] >> lane_col[None, :]) & 1) != 0")
        names = self.scores() | self.loaded_vectors(part) | {KEEP: KEEP}
        if self.walk.dropout:
            far = f"{self.by_line('salt')} + col.to(tl.uint32)" if self.walk.mode else "col.to(tl.uint32)"
            far = f"mixed({far}){'[None, :]' if self.dots else ''}"
            least, kept = self.walk.keeps
            self.put(f"keep = tl.where(mixed(near ^ {far}) < {least}, 0.0, {number_text(kept)})")
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
                inside.append(f"({lane} < {self.sizes[table]})[{'None, :' if self.dots else 'None, None, :'}]")
            self.put(f"{table}_tile = {self.load(self.row_address(table, self.far_head, 'col'), inside)}")
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
                self.put(f"{name} = tl.sum({own}_own.to(tl.float32)[:, None, :] * {tile}.to(tl.float32), 2)")
        return {name: name for name in self.products}

    def inner(self, name: str, own: str, tile: str) -> None:
        """The sum of an inner function, and the derivatives that are accumulated."""
        function = self.walk.inner[name].function
        self.put(f"{name}_own = {own}_own.to(tl.float32)[:, None, :]", f"{name}_other = {tile}.to(tl.float32)")
        wanted = ["value", *(f"d_{t.by}" for _, t, _ in self.walk.accumulated if isinstance(t, Derivative))]
        inputs = {role: f"{name}_{role}" for role in ("own", "other", "shared")}
        lines, texts = function.statements([function.outputs[output] for output in wanted], inputs, name)
        shape = f"[{self.layout.lines}, {self.layout.width}, {padded(self.sizes[own], self.dots)}]"
        self.put(*lines, f"{name} = tl.sum({texts[0]} + tl.zeros({shape}, tl.float32), 2)")
        self.derivatives.update({(name, output): text for output, text in zip(wanted, texts, strict=True)})

    def loaded_vectors(self, part: bool) -> dict[str, str]:
        """Numbers by column and by entry; the names of all vectors."""
        if self.by_entry:
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
        for name, side in self.vectors.items():
            if side == "other":
                address = self.number_address(name, self.by_line(self.far_head), "col")
                loaded = self.load(address, ["col_ok"] if self.bounded else [])
                self.put(f"{name}_tile = {self.number(name, f'{loaded}[None, :]' if self.dots else loaded)}")
            elif side == "entries":
                loaded = self.load(
                    f"{name} + {self.by_line(self.entry_head)} * {name}_head + entry", ["met"] if part else []
                )
                self.put(f"{name}_tile = {self.number(name, loaded)}")
        of_row = [*self.row_sums, *(name for name, side in self.vectors.items() if side == "own")]
        numbers = {n: f"{n}_{'own' if n in of_row else 'tile'}" for n in (*self.row_sums, *self.vectors)}
        for name, place in self.placed.items():
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
            times = "" if self.score_factor == 1 else f" * {number_text(self.score_factor)}"
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
            if isinstance(table, Derivative):
                derivative = self.derivatives[table.product, f"d_{table.by}"]
                self.put(f"{name}_sum += {weight}[:, :, None] * ({derivative})")
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
