"""Axes of a tile program -> the text of Triton that goes over them: positions of a program, and loops.

In: the printer of a function. Out: lines. Each axis has the text that was measured to be fastest for it: a run and the
steps of a block go in whole groups without a mask, then in groups with one; positions along a side are unrolled, so
that their loads overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

from sparsetc.codegen import triton_values as values
from sparsetc.codegen.triton_layout import TritonPrinter, load, sides_of
from sparsetc.ir.nest.axes import ITEM, LANE, LEAF, Axis, Each, Fibers, Run, TileLoop
from sparsetc.ir.program import names
from sparsetc.ir.program.tile import Add, DenseAxis, Key, Loop, Product, walk

MOST_HELD = 128 << 10
"""Bytes that dots of unrolled positions may hold in all. Each takes shared memory of its own, of which a program has
227 KiB on an H100; and sums of 64-bit products take minutes to compile."""


# -- what a program has ------------------------------------------------------------------------------------------------


def head(printer: TritonPrinter) -> None:
    """The numbers of the program's item and blocks, the positions of each axis, and the range of the item."""
    p = printer.p
    _numbers(printer)
    if p.view.innermost.lanes:
        printer.put(f"lane = tl.arange(0, {p.view.lanes})")
    for axis in p.axes:
        _side(printer, axis) if axis.letter in p.letters else dense(printer, axis)
    values.head(printer)
    ahead(printer, ITEM)
    # One block is a loop that turns once, which Triton gives fewer registers than no loop (32, not 44:
    # kernel_probes.json).
    start, stop = p.view.items.ends(load, "tl.minimum")
    printer.put(f"start = {start}", f"stop = {stop}")


def _numbers(printer: TritonPrinter) -> None:
    """Print the numbers of the program's blocks and of its work item; the slowest block comes last."""
    p, rest = printer.p, "pid"
    for axis in p.split:
        if not axis.slowest:
            along = axis.letter in p.letters
            times = f" * {axis.block}" if along and axis.block > 1 else ""
            name = printer.begin(axis.letter) if along else names.block(axis.letter)
            printer.put(f"{name} = {rest} % {axis.programs}{times}")
            rest = f"({rest} // {axis.programs})"
    slowest = [axis for axis in reversed(p.split) if axis.slowest]  # the first axis is the grid's outermost
    if slowest:
        printer.put(f"items = programs // {prod(axis.programs for axis in p.split)}")
    item = f"{rest} % items" if slowest else bare(rest)
    printer.put(f"item = ({item}).to(tl.int64)" if p.index64 else f"item = {item}")
    rest = f"({rest} // items)"
    for axis in slowest:
        number = bare(rest) if axis is slowest[-1] else f"{rest} % {axis.programs}"
        printer.put(f"{names.block(axis.letter)} = {number}")
        rest = f"({rest} // {axis.programs})"


def ahead(printer: TritonPrinter, level: int) -> None:
    """Load the output rows of items or fibers as soon as they are known, since a load at its use would be waited for.

    H200, TTM of rank 16 to 22 M rows of 1.6 nonzeros: 831 us, 729 so (`benchmarks/results/rows_stored.json`).
    """
    key = printer.p.result.key
    if key.level == level and known_ahead(key):
        at = "item" if level == ITEM else "fiber"
        printer.put(f"slot = {load(key.array, at, printer.guard(level))}")


def known_ahead(key: Key) -> bool:
    """Return True if one number is stored for all of an item, or of a fiber."""
    return key.kind == "slot" and not key.letters and key.level < LEAF


def bare(text: str) -> str:
    """A text without its outermost parentheses."""
    return text[1:-1] if text.startswith("(") else text


def dense(printer: TritonPrinter, axis: DenseAxis) -> None:
    """Print the positions of the program along a dense axis, and the mask of those that exist."""
    base = f"{names.block(axis.letter)} * {axis.block} + " if axis.programs > 1 else ""
    for _ in printer.vectors((axis.letter,)):
        first, length, ragged = printer.vector_of(axis.letter)
        at, ahead = printer.at(axis.letter), f"{first} + " if first else ""
        printer.put(f"{at} = {base}{ahead}tl.arange(0, {length})")
        if ragged:
            printer.put(f"{printer.within(axis.letter)} = {at} < {axis.size}")
            if axis.letter in printer.written:
                printer.put(f"{at} = {at} % {axis.size}")


def _side(printer: TritonPrinter, axis: DenseAxis) -> None:
    """The positions along a side of a tile that the program takes; a loop, or the grid, has others one by one."""
    split = axis in printer.p.split
    if axis.letter in printer.p.looped or (split and axis.block == 1):
        return
    ahead = f"{printer.begin(axis.letter)} + " if split else ""
    vector = axis.letter in printer.spanned
    printer.put(f"{names.side(axis.letter)} = " + (f"{ahead}tl.arange(0, {axis.block})" if vector else "0"))


# -- loops -------------------------------------------------------------------------------------------------------------


def _each(printer: TritonPrinter, s: Loop, axis: Each) -> Iterator[None]:
    with printer.block(f"for {axis.name} in range(start, stop):"):
        if axis.lanes:
            _block(printer, axis.lanes)
        for operand in axis.operands:
            printer.put(f"{operand}_tile = tl.load({axis.name}_{operand} + {axis.name})")
        values.first(printer)
        yield


def _block(printer: TritonPrinter, lanes: int) -> None:
    """Print a block's first nonzero, its steps, the steps in which all lanes have a nonzero, and its fibers."""
    printer.put(
        "first = tl.load(block_ptr + block)",
        f"steps = (tl.load(block_ptr + block + 1) - first) // {lanes}",
        "full = tl.load(block_full + block)",
        f"fiber = block * {lanes} + lane",
        "length = tl.load(lane_len + fiber)",
    )
    ahead(printer, LANE)
    printer.words[LANE].clear()


def _steps(printer: TritonPrinter, s: Loop, axis: Run | Fibers) -> Iterator[None]:
    """Whole groups of steps of a run, or of a block's fibers, without a mask; then the rest with one."""
    lanes = axis.lanes
    schedule = printer.p.schedule
    run = isinstance(axis, Run)
    if not lanes:  # one nonzero after the other; sides of dots are loaded stages ahead
        body = [inner for inner, _ in walk(s.body)]
        dots = any(isinstance(inner, Product) and inner.dot for inner in body)
        # Told of stages, Triton loads ahead what is multiplied by after a dot, and stored, as well: there is no room.
        summed = dots and not any(isinstance(inner, Add) for inner in body)
        span = f"tl.range(start, stop, num_stages={schedule.stages})" if summed else "range(start, stop)"
        with printer.block(f"for pos in {span}:"):
            printer.words[LEAF].clear()
            yield
        return
    if run:
        group = lanes * schedule.unroll
        printer.put(f"full = start + (stop - start) // {group} * {group}")
    name, start, stop, size = ("first", "start", "stop", lanes) if run else ("step", "0", "steps", 1)
    at = "first" if run else f"first + step * {lanes}"
    for copies, first, end in ((schedule.unroll, start, "full"), (schedule.masked_unroll, "full", stop)):
        stride = f", {size * copies}" if size * copies > 1 else ""
        with printer.block(f"for {name} in range({first}, {end}{stride}):"):
            printer.masked, printer.copies = first == "full", copies
            printer.words[LEAF].clear()
            for n in printer.each(LEAF):
                printer.put(f"pos{printer.copy} = {at}{f' + {n * lanes}' if n else ''} + lane")
                if printer.masked:
                    step = f"step + {n}" if n else "step"
                    has = f"pos{printer.copy} < stop" if run else f"{step} < length"
                    printer.put(f"ok{printer.copy} = {has}")
            yield
            printer.masked, printer.copies = False, 1


def _held(printer: TritonPrinter, s: Loop) -> int:
    """Bytes that the dots of a loop's body hold: their sides, or the products of each sum where no unit makes them."""
    held = 0
    for product in s.body:
        if isinstance(product, Product) and product.dot:
            rows, columns = (prod(map(printer.size, axes)) for axes in sides_of(product.out))
            summed = prod(map(printer.size, product.contracted))
            exact = printer.acc == "tl.int64"
            held += rows * summed * columns if exact else (rows + columns) * summed
    return held * (4 if printer.acc == "tl.float32" else 8)


def _tile_loop(printer: TritonPrinter, s: Loop, axis: TileLoop) -> Iterator[None]:
    """Positions along a side; the innermost loop over few is unrolled, so that its loads overlap."""
    unrolled = axis.unrolled and not any(isinstance(inner, Loop) for inner in s.body)
    unrolled = unrolled and axis.size // axis.step * _held(printer, s) <= MOST_HELD
    span, first = "tl.static_range" if unrolled else "range", printer.begin(axis.name)
    stop = f"{axis.size}" if axis.step == 1 else f"0, {axis.size}, {axis.step}"
    with printer.block(f"for {first} in {span}({stop}):"):
        if axis.step > 1:
            printer.put(f"{names.side(axis.name)} = {first} + tl.arange(0, {axis.step})")
        yield


LOOPS: dict[type[Axis], Callable[[TritonPrinter, Loop, Any], Iterator[None]]]
LOOPS = {Run: _steps, Fibers: _steps, TileLoop: _tile_loop, Each: _each}
