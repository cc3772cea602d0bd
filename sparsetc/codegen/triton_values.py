"""Axes of a tile program, and stored values -> the text of Triton that goes over them and loads them.

In: `Loop`, `Value` and `Scale` statements of a program. Out: lines. Each axis has the text that was
measured to be fastest for it: a run and the steps of a block go in whole groups without a mask, then in groups with
one; positions along a side are unrolled, so that their loads overlap. Each kind of storage has its own text.

A value of a bitmap has its place behind those of the tiles before, the bits set before its word, and those before it in
the word. Where columns are taken in the order stored, as planned layouts have it, the words of a step are counted at
once and a sum over them runs from step to step; else the words of the tile are gone through one by one, which is slow
and always right. A tile that is read whole may be padded: its rows by words that are 0, its columns by places that no
word has bits for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from math import prod

from sparsetc.codegen.triton_layout import TritonLayout, all_of, load, placed, sides_of
from sparsetc.ir.nest import BIAS, HEAD, ITEM, LANE, LEAF, Each, Fibers, Run, TileLoop
from sparsetc.ir.program import Add, DenseAxis, Gather, Key, Loop, Product, Scale, Stored, Tile, Value, names, walk
from sparsetc.support import Names, row_major

MOST_HELD = 128 << 10
"""Bytes that dots of unrolled positions may hold in all. Each takes shared memory of its own, of which a program has
227 KiB on an H100; and sums of 64-bit products take minutes to compile."""


def known_ahead(key: Key) -> bool:
    """Return True if one number is stored for all of an item, or of a fiber."""
    return key.kind == "slot" and not key.letters and key.level < LEAF


def bare(text: str) -> str:
    """A text without its outermost parentheses."""
    return text[1:-1] if text.startswith("(") else text


def _dimensions(tile: Tile) -> tuple[Names, ...]:
    """The axes of each dimension of a tensor of values."""
    return sides_of(tile) if tile.folded else tuple((c,) for c in tile.axes)


def flat(letters: Names) -> str:
    """The name of the numbers of positions along several axes."""
    return f"at_{''.join(letters)}"


COUNT = """@triton.jit
def count(v):
    v = v - ((v >> 1) & 0x55555555)
    v = (v & 0x33333333) + ((v >> 2) & 0x33333333)
    v = (v + (v >> 4)) & 0x0F0F0F0F
    return ((v * 0x01010101) >> 24).to(tl.int32)
"""
"""Bits set in a word of 32, in parallel (a sum of pairs, of nibbles, of bytes)."""
POPC = """@triton.jit
def count(v):
    return tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [v], dtype=tl.int32, is_pure=True, pack=1)
"""


class TritonValues(TritonLayout):
    """The text that goes over axes, and loads stored values and their scales."""

    # -- what a program has -------------------------------------------------------------------------------------------

    def head(self) -> None:
        """The numbers of the program's item and blocks, the positions of each axis, and the range of the item."""
        p = self.p
        self._numbers()
        if p.view.innermost.lanes:
            self.put(f"lane = tl.arange(0, {p.view.lanes})")
        for axis in p.axes:
            self._side(axis) if axis.letter in p.letters else self.dense(axis)
        self.values_head()
        self.ahead(ITEM)
        # One block is a loop that turns once, which Triton gives fewer registers than no loop (32, not 44:
        # kernel_probes.json).
        start, stop = p.view.items.ends(load, "tl.minimum")
        self.put(f"start = {start}", f"stop = {stop}")

    def _numbers(self) -> None:
        """Print the numbers of the program's blocks and of its work item; the slowest block comes last."""
        p, rest = self.p, "pid"
        for axis in p.split:
            if not axis.slowest:
                along = axis.letter in p.letters
                times = f" * {axis.block}" if along and axis.block > 1 else ""
                name = self.begin(axis.letter) if along else names.block(axis.letter)
                self.put(f"{name} = {rest} % {axis.programs}{times}")
                rest = f"({rest} // {axis.programs})"
        slowest = [axis for axis in reversed(p.split) if axis.slowest]  # the first axis is the grid's outermost
        if slowest:
            self.put(f"items = programs // {prod(axis.programs for axis in p.split)}")
        item = f"{rest} % items" if slowest else bare(rest)
        self.put(f"item = ({item}).to(tl.int64)" if p.index64 else f"item = {item}")
        rest = f"({rest} // items)"
        for axis in slowest:
            number = bare(rest) if axis is slowest[-1] else f"{rest} % {axis.programs}"
            self.put(f"{names.block(axis.letter)} = {number}")
            rest = f"({rest} // {axis.programs})"

    def ahead(self, level: int) -> None:
        """Load the output rows of items or fibers as soon as they are known: a load at its use would be waited for.

        H200, TTM of rank 16 to 22 M rows of 1.6 nonzeros: 831 us, 729 so (`benchmarks/results/rows_stored.json`).
        """
        key = self.p.result.key
        if key.level == level and known_ahead(key):
            at = "item" if level == ITEM else "fiber"
            self.put(f"slot = {load(key.array, at, self.guard(level))}")

    def dense(self, axis: DenseAxis) -> None:
        """Print the positions of the program along a dense axis, and the mask of those that exist."""
        base = f"{names.block(axis.letter)} * {axis.block} + " if axis.programs > 1 else ""
        for _ in self.vectors((axis.letter,)):
            first, length, ragged = self.vector_of(axis.letter)
            at, ahead = self.at(axis.letter), f"{first} + " if first else ""
            self.put(f"{at} = {base}{ahead}tl.arange(0, {length})")
            if ragged:
                self.put(f"{self.within(axis.letter)} = {at} < {axis.size}")
                if axis.letter in self.written:
                    self.put(f"{at} = {at} % {axis.size}")

    def _side(self, axis: DenseAxis) -> None:
        """The positions along a side of a tile that the program takes; a loop, or the grid, has others one by one."""
        split = axis in self.p.split
        if axis.letter in self.p.looped or (split and axis.block == 1):
            return
        ahead = f"{self.begin(axis.letter)} + " if split else ""
        vector = axis.letter in self.spanned
        self.put(f"{names.side(axis.letter)} = " + (f"{ahead}tl.arange(0, {axis.block})" if vector else "0"))

    # -- loops --------------------------------------------------------------------------------------------------------

    def over_each(self, s: Loop, axis: Each) -> Iterator[None]:
        with self.block(f"for {axis.name} in range(start, stop):"):
            if axis.lanes:  # a block: its first nonzero, its steps, those in which all lanes have one, its fibers
                self.put(
                    "first = tl.load(block_ptr + block)",
                    f"steps = (tl.load(block_ptr + block + 1) - first) // {axis.lanes}",
                    "full = tl.load(block_full + block)",
                    f"fiber = block * {axis.lanes} + lane",
                    "length = tl.load(lane_len + fiber)",
                )
                self.ahead(LANE)
                self.words[LANE].clear()
            for operand in axis.operands:
                self.put(f"{operand}_tile = tl.load({axis.name}_{operand} + {axis.name})")
            self.values_first()
            yield

    def over_run(self, s: Loop, axis: Run | Fibers) -> Iterator[None]:
        """Whole groups of steps of a run, or of a block's fibers, without a mask; then the rest with one."""
        lanes = axis.lanes
        schedule = self.p.schedule
        run = isinstance(axis, Run)
        if not lanes:  # one nonzero after the other; sides of dots are loaded stages ahead
            body = [inner for inner, _ in walk(s.body)]
            dots = any(isinstance(inner, Product) and inner.dot for inner in body)
            # Told of stages, Triton loads ahead what is multiplied by after a dot, and stored, as well: it has no room.
            summed = dots and not any(isinstance(inner, Add) for inner in body)
            span = f"tl.range(start, stop, num_stages={schedule.stages})" if summed else "range(start, stop)"
            with self.block(f"for pos in {span}:"):
                self.words[LEAF].clear()
                yield
            return
        if run:
            group = lanes * schedule.unroll
            self.put(f"full = start + (stop - start) // {group} * {group}")
        name, start, stop, size = ("first", "start", "stop", lanes) if run else ("step", "0", "steps", 1)
        at = "first" if run else f"first + step * {lanes}"
        for copies, first, end in ((schedule.unroll, start, "full"), (schedule.masked_unroll, "full", stop)):
            stride = f", {size * copies}" if size * copies > 1 else ""
            with self.block(f"for {name} in range({first}, {end}{stride}):"):
                self.masked, self.copies = first == "full", copies
                self.words[LEAF].clear()
                for n in self.each(LEAF):
                    self.put(f"pos{self.copy} = {at}{f' + {n * lanes}' if n else ''} + lane")
                    if self.masked:
                        step = f"step + {n}" if n else "step"
                        has = f"pos{self.copy} < stop" if run else f"{step} < length"
                        self.put(f"ok{self.copy} = {has}")
                yield
                self.masked, self.copies = False, 1

    over_fibers = over_run

    def _held(self, s: Loop) -> int:
        """Bytes that dots of a loop's body hold: their sides, or the products of each sum where no unit makes them."""
        held = 0
        for product in s.body:
            if isinstance(product, Product) and product.dot:
                rows, columns = (prod(map(self.size, axes)) for axes in sides_of(product.out))
                summed = prod(map(self.size, product.contracted))
                exact = self.acc == "tl.int64"
                held += rows * summed * columns if exact else (rows + columns) * summed
        return held * (4 if self.acc == "tl.float32" else 8)

    def over_tileloop(self, s: Loop, axis: TileLoop) -> Iterator[None]:
        """Positions along a side; the innermost loop over few is unrolled, so that its loads overlap."""
        unrolled = axis.unrolled and not any(isinstance(inner, Loop) for inner in s.body)
        unrolled = unrolled and axis.size // axis.step * self._held(s) <= MOST_HELD
        span, first = "tl.static_range" if unrolled else "range", self.begin(axis.name)
        stop = f"{axis.size}" if axis.step == 1 else f"0, {axis.size}, {axis.step}"
        with self.block(f"for {first} in {span}({stop}):"):
            if axis.step > 1:
                self.put(f"{names.side(axis.name)} = {first} + tl.arange(0, {axis.step})")
            yield

    # -- stored values ------------------------------------------------------------------------------------------------

    def values_head(self) -> None:
        """Numbers that all tiles share."""
        gathered = [s.out for s in self.p.each(Gather)]
        groups = dict.fromkeys(group for tile in gathered if tile.folded for group in sides_of(tile))
        for group in (group for group in groups if len(group) > 1):
            self.put(f"{flat(group)} = tl.arange(0, {self.positions(group)})")
        for s in self.values:
            for name, group in zip(("across", "along"), sides_of(s.out), strict=True):
                if len(group) > 1:
                    self.put(f"{name} = tl.arange(0, {self.positions(group)})")
            stored = self.p.stored(s.operand)
            if stored.values.bitmap and (bits := self.counted_bits(s, stored)):
                count, _, places, _ = bits
                place = stored.array("place")
                self.put(
                    f"{stored.array('words')} = tl.arange(0, {count})",
                    f"{place} = tl.arange(0, {places}).to(tl.uint32)",
                    f"{stored.array('below')} = (tl.full([1], 1, tl.uint32) << {place}) - 1",
                )
                if any(a.letter in self.p.letters for a in self.p.split):
                    self.put(f"every = tl.arange(0, {1 << (stored.values.words - 1).bit_length()})")

    def values_first(self) -> None:
        """Print the first value of each tile stored as a bitmap; of a tile taken in slices, the slice's first."""
        for s in self.values:
            stored = self.p.stored(s.operand)
            if stored.values.bitmap:
                before = stored.array("before")
                self.put(f"{before} = tl.load({stored.array('value_ptr')} + {stored.array('tile')})")
                split = [a.letter for a in self.p.split if a.letter in stored.letters]
                if split and self.counted_bits(s, stored):
                    skipped = " + ".join(placed(self.begin(c), (), (), stored.stride(c)) for c in split)
                    self.put(
                        f"skipped = ({skipped}) // {stored.values.word}",
                        f"{before} += tl.sum(count({self._word(stored, 'every', 'every < skipped')}), 0)",
                    )

    def value(self, s: Value) -> None:
        """The values at the positions that a program, or a turn of a loop, has."""
        stored = self.p.stored(s.operand)
        if stored.values.bitmap:
            self._bitmap(s, stored)
        elif stored.values.sides:
            self._whole(s, stored)
        else:
            self._nonzeros(s, stored)

    def _nonzeros(self, s: Value, stored: Stored) -> None:
        """The values of a step, or 1s: 0 where a lane holds nothing."""
        for _ in self.each(LEAF):
            if stored.values.held:
                text = load("values", f"pos{self.copy}", self.guard(LEAF)) + self.widened(s.out)
            elif self.masked:
                text = f"ok{self.copy}.to({self.acc})"
            else:
                text = f"tl.full({self.shape(s.out)}, 1, {self.acc})"
            self.put(f"{self.named(s.out)} = {text}")

    def _whole(self, s: Value, stored: Stored) -> None:
        """Print the load of a tile stored whole; in split float16, of both halves."""
        terms, mask = self._place(s, stored)
        at = " + ".join([f"{self._number(stored)} * {stored.values.volume}", *terms])
        for array, half in zip(stored.held, names.IN_HALVES if stored.values.halves else ("",), strict=True):
            self.put(f"{s.out.name}{half} = {load(array, at, mask)}{'' if half else self._widened(s, stored)}")

    def _widened(self, s: Value, stored: Stored) -> str:
        """Return the conversion of values to the type of the sums; empty if none is needed.

        Dots of two stored operands take narrow values as they are, and add up wide.
        """
        return "" if self.half or (stored.name and self.p.dots) else self.widened(s.out)

    def _number(self, stored: Stored) -> str:
        """The number of an operand's tile, as addresses take it."""
        return f"{stored.array('tile')}.to(tl.int64)" if self.p.index64 else stored.array("tile")

    def _place(self, s: Value, stored: Stored) -> tuple[list[str], str]:
        """Return (terms of the positions of a tile of values, condition that they lie inside the tile)."""
        return self.place(s.out, {c: stored.stride(c) for c in stored.letters}, ("across", "along"))

    def place(self, tile: Tile, strides: Mapping[str, int], called: Names) -> tuple[list[str], str]:
        """Return the terms of the positions of a tile that is loaded whole, and the condition for their existence.

        Args:
            self: of the function.
            tile: what is loaded.
            strides: how far apart positions lie, by letter.
            called: the names of the rows' and of the columns' numbers, where each are positions of several letters.
        """
        groups = _dimensions(tile)
        axes = tuple(str(n) for n in range(len(groups)))
        terms, conditions = [], []
        for letter, stride in strides.items():  # positions that are the same for the whole tile
            if letter not in tile.axes:
                terms.append(placed(names.side(letter), (), axes, stride))
            elif letter in self.apart and len(groups) == 2 and any(letter in g and len(g) > 1 for g in groups):
                terms.append(placed(self.begin(letter), (), axes, stride))
        for axis, name, group in zip(axes, called if tile.folded else tile.axes, groups, strict=True):
            text, stride, limit = self._flat(strides, name, group)
            terms.append(placed(text, (axis,), axes, stride))
            conditions.append(placed(limit, (axis,), axes))
        return [t for t in terms if t], all_of(conditions)

    def _flat(self, strides: Mapping[str, int], name: str, letters: Names) -> tuple[str, int, str]:
        """Return (positions along several sides as one number, its stride, condition that they lie inside the tile)."""
        last = letters[-1]
        if len(letters) == 1:
            return self.at(last), strides[last], self.within(last)
        block = [self.p.axis(c).block for c in letters]
        within = row_major(block)
        each = [strides[c] for c in letters]
        terms, limits = [], []
        for n, (letter, w, b, stride) in enumerate(zip(letters, within, block, each, strict=True)):
            text = f"{name} // {w}" if w > 1 else name
            text = f"{text} % {b}" if n else text
            terms.append(f"({text}) * {stride}" if stride > 1 else text)
            if self.p.axis(letter).ragged:
                begin = f"{self.begin(letter)} + " if letter in self.apart else ""
                limits.append(f"{begin}{text} < {self.p.axis(letter).size}")
        if all(s == w * each[-1] for s, w in zip(each, within, strict=True)):
            return name, each[-1], all_of(limits)
        return " + ".join(terms), 1, all_of(limits)

    # -- bitmaps ------------------------------------------------------------------------------------------------------

    def counted_bits(self, s: Value, stored: Stored) -> tuple[int, int, int, int] | None:
        """Return the groups of bits counted together in one step of a value in order.

        Returns:
            Units that are counted, padding included: a word, or a row where a word has several; positions of one;
            positions that a program has of the tile, padding included; units of the tile where more are counted, else
            0. None where the positions of a step do not lie together as stored, or steps do not follow one another.
        """
        p = self.p
        tiles = stored.values
        axes = s.out.axes
        sides = [self.p.axis(c) for c in s.out.axes]
        before, word = self._before(s, stored), tiles.word
        letters = [c for c in (*before, *axes) if p.axis(c).size > 1]
        if (
            (
                p.looped and any(a.letter in axes for a in p.split)
            )  # a share of the positions of a letter, again and again
            or any(side & (side - 1) for side in tiles.sides)
            or letters != [stored.letters[m] for m in tiles.sequence if tiles.sides[m] > 1]
        ):
            return None
        if not any(side.ragged for side in sides):
            count = self.positions(axes)
            return (count // word, word, word, 0) if count >= word else None
        if before or len(axes) != 2:
            return None
        row, column = sides
        if column.ragged:
            limit = row.size if row.ragged else 0
            return (row.block, column.size, column.block, limit) if column.size <= word else None
        if prod(tiles.sides) < word:
            return None
        return self.positions(axes) // word, word, word, row.size * column.size // word

    def _before(self, s: Value, stored: Stored) -> Names:
        """Letters of which a step has one position, or a part of them: of the grid, then looped, outermost first."""
        loops = (inner.axis.letter for inner in self.p.each(Loop) if inner.axis.letter)
        gridded = (a.letter for a in self.p.split)
        return tuple(c for c in chain(gridded, loops) if c in stored.letters and c not in s.out.axes)

    def _word(self, stored: Stored, at: str, mask: str = "") -> str:
        """The load of words of the tile, as unsigned numbers of 32 bits."""
        tiles = stored.values
        tile = placed(self._number(stored), (), (), tiles.words)
        text = load(stored.array("bits"), f"{tile} + {at}", mask)
        return f"{text}.to(tl.uint32, bitcast=True)" if tiles.word == 32 else f"{text}.to(tl.uint32)"

    def _bitmap(self, s: Value, stored: Stored) -> None:
        """Print the values at the positions of a step of a bitmap, 0 where no bit is set."""
        if not (bits := self.counted_bits(s, stored)):
            self._search(s, stored)
            return
        _, unit, positions, limit = bits
        called = ("word", "counts", "at", "has", "before", "words", "place", "below")
        word, counts, at, has, before, words, place, below = map(stored.array, called)
        mask = f"{words} < {limit}" if limit else ""
        self.put(f"{word} = {self._word(stored, self._word_numbers(s, stored, unit), mask)}")
        if unit < stored.values.word:
            behind = f"({words} * {unit} % {stored.values.word}).to(tl.uint32)"
            self.put(f"{word} = ({word} >> {behind}) & {hex((1 << unit) - 1)}")
        self.put(f"{counts} = count({word})", f"{at} = {before} + tl.cumsum({counts}, 0) - {counts}")
        if self.p.looped:
            self.put(f"{before} += tl.sum({counts}, 0)")
        self.put(
            f"{has} = (({word}[:, None] >> {place}[None, :]) & 1) == 1",
            f"{at} = {at}[:, None] + count({word}[:, None] & {below}[None, :])",
        )
        text = load(stored.array("values"), at, has)
        self.put(f"{s.out.name} = {text}{self._widened(s, stored)}")
        sizes = [self.positions(group) for group in _dimensions(s.out) if group]
        if sizes[1:] != [positions]:
            self.put(f"{s.out.name} = tl.reshape({s.out.name}, {sizes})")

    def _word_numbers(self, s: Value, stored: Stored, unit: int) -> str:
        """The words of the tile that the counted units lie in."""
        bits = stored.values.word
        words = stored.array("words")
        terms = []
        if unit < bits:
            return f"{words} * {unit} // {bits}"
        for c in stored.letters:
            if c in self.apart or (c not in s.out.axes and self.p.axis(c).size > 1):
                at = self.begin(c) if c in self.apart else names.side(c)
                terms.append(placed(at, (), (), stored.stride(c) // bits))
        return " + ".join([*terms, words])

    def _search(self, s: Value, stored: Stored) -> None:
        """The values of a tile whose words are gone through one by one."""
        bits, (terms, mask) = stored.values.word, self._place(s, stored)
        shape = [self.positions(group) for group in _dimensions(s.out)]
        kind = "tl.bfloat16" if self.half else self.acc
        if s.out.name in self.narrow:
            kind = f"{stored.array('values')}.dtype.element_ty"
        self.put(f"position = {' + '.join(terms) or '0'}")
        if not shape:
            self.put("position = tl.full([], 0, tl.int32) + position")
        self.put(f"{s.out.name} = tl.zeros({shape}, {kind})", f"passed = {stored.array('before')}")
        with self.block(f"for number in range({stored.values.words}):"):
            self.put(f"word = {self._word(stored, 'number')}", f"within = (position % {bits}).to(tl.uint32)")
            inside = f" & ({mask})" if mask else ""
            self.put(
                f"has = (position // {bits} == number) & (((word >> within) & 1) == 1){inside}",
                f"behind = count(word & ((tl.full({'[1]' if shape else '[]'}, 1, tl.uint32) << within) - 1))",
            )
            text = load(stored.array("values"), "passed + behind", "has")
            self.put(f"{s.out.name} += {text}{self._widened(s, stored)}", "passed += count(word)")

    # -- scales of halves ---------------------------------------------------------------------------------------------

    def scale(self, s: Scale) -> None:
        """Powers of two that largest magnitudes ask for, from the bits of their exponents: of rows, or all values."""
        array = self.p.largest(s)
        if s.out.axes:
            (letter,), most = s.out.axes, s.out.name
            row = f"tl.load(item_{s.operand} + item){'.to(tl.int64)' if self.p.index64 else ''}"
            address = f"{row} * {self.p.axis(letter).size} + {names.side(letter)}"
            self.put(f"{most} = {load(array, address, self.limit(letter))}")
        elif operand := [o for o in self.p.operands if o.name == s.operand and o.halves]:
            (o,) = operand
            blocks = self.p.blocks_of(o)
            each = row_major([*o.extents, *[axis.programs for axis in blocks]])
            rows = self.rows(zip(o.rows, each, strict=False), (), LEAF, o.nrows * o.width)
            places = zip(blocks, each[len(o.rows) :], strict=True)
            terms = [*rows, *[placed(names.block(axis.letter), (), (), stride) for axis, stride in places]]
            most = load(array, " + ".join(terms) or "0")
        else:
            # What a scalar was multiplied into Triton 3.6 and 3.7 move through shared memory for the dot, both halves;
            # by a vector of one element, it is read as the dot wants it (H200: 2,611 to about 2,000 us,
            # `benchmarks/results/kernel_probes.json`).
            most = f"tl.load({array}{' + tl.zeros([1], tl.int32)' * s.into})"
        exponent = f"tl.maximum({most}.to(tl.int32, bitcast=True) >> 23, {HEAD + 1})"
        exponent = f"{2 * BIAS + HEAD} - {exponent}" if s.into else f"{exponent} - {HEAD}"
        self.put(f"{s.out.name} = (({exponent}) << 23).to(tl.float32, bitcast=True)")
