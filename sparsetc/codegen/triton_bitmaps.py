"""Values of bitmap tiles -> the text that expands them.

In: the printer of a tile function and its `Value` statement. Out: lines. A value's place is that of its tile, the bits
set before its word, and those before it in the word. Where columns are taken in the order stored, as planned layouts
have it, the words of a step are counted at once and a sum over them runs from step to step; else the words of the tile
are gone through one by one, which is slow and always right.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from sparsetc.ir.tile import Loop, Tile, Value, walk

if TYPE_CHECKING:
    from sparsetc.codegen.triton_tiles import TileFunctionPrinter

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


def in_order(printer: TileFunctionPrinter, out: Tile) -> bool:
    """Whether the positions of a step lie together as stored, and steps follow one another."""
    p = printer.p
    split = tuple(a.letter for a in p.split if a.letter in p.letters)
    gridded = tuple(c for c in split if c not in out.axes)
    if gridded != split and p.looped:  # a share of the positions of a letter, again and again
        return False
    looped = tuple(c for c in _letters(printer) if c in p.looped and c not in out.axes)
    taken = [c for c in (*gridded, *looped, *out.axes) if printer.length(c) > 1]
    stored = [p.letters[m] for m in p.view.sequence if p.view.sides[m] > 1]
    whole = not any(printer.padded(c) for c in out.axes)
    return taken == stored and whole and prod(p.axis(c).block for c in out.axes) >= p.view.word


def _letters(printer: TileFunctionPrinter) -> tuple[str, ...]:
    """Looped letters, the outermost first."""
    return tuple(s.letter for s, _ in walk(printer.p.body) if isinstance(s, Loop) and s.letter)


def head(printer: TileFunctionPrinter, out: Tile) -> None:
    """Vectors that all tiles share."""
    if not in_order(printer, out):
        return
    view = printer.p.view
    step = prod(printer.p.axis(c).block for c in out.axes) // view.word
    printer.put(f"words = tl.arange(0, {step})")
    printer.put(f"place = tl.arange(0, {view.word}).to(tl.uint32)")
    printer.put("below = (tl.full([1], 1, tl.uint32) << place) - 1")
    if any(a.letter in printer.p.letters for a in printer.p.split):
        printer.put(f"every = tl.arange(0, {1 << (view.words - 1).bit_length()})")


def first(printer: TileFunctionPrinter) -> None:
    """The tile's first value; of a tile taken in slices, the slice's."""
    p = printer.p
    printer.put("before = tl.load(value_ptr + tile)")
    out = next(s for s, _ in walk(p.body) if isinstance(s, Value)).out
    split = [a.letter for a in p.split if a.letter in p.letters]
    if split and in_order(printer, out):
        skipped = " + ".join(printer.placed(printer.begin(c), (), (), printer.stride(c)) for c in split)
        printer.put(f"skipped = ({skipped}) // {p.view.word}")
        printer.put(f"before += tl.sum(count({word(printer, 'every', 'every < skipped')}), 0)")


def word(printer: TileFunctionPrinter, at: str, mask: str = "") -> str:
    """The load of words of the tile, as unsigned numbers of 32 bits."""
    view = printer.p.view
    tile = "tile.to(tl.int64)" if printer.p.wide else "tile"
    text = printer.load("bits", f"{tile} * {view.words} + {at}", mask)
    return f"{text}.to(tl.uint32, bitcast=True)" if view.word == 32 else f"{text}.to(tl.uint32)"


def value(printer: TileFunctionPrinter, s: Value) -> None:
    """The values at the positions of a step, 0 where there is none."""
    widen = f".to({printer.acc})" if printer.types.widen and not printer.half else ""
    if in_order(printer, s.out):
        _step(printer, s.out, widen)
    else:
        _search(printer, s, widen)


def _step(printer: TileFunctionPrinter, out: Tile, widen: str) -> None:
    p, bits = printer.p, printer.p.view.word
    terms = []
    apart = p.looped | {a.letter for a in p.split}
    for c in p.letters:
        if c in apart:
            terms.append(printer.placed(printer.begin(c), (), (), printer.stride(c) // bits))
        elif c not in out.axes and printer.length(c) > 1:
            terms.append(printer.placed(f"{c}_in", (), (), printer.stride(c) // bits))
    printer.put(f"word = {word(printer, ' + '.join([*terms, 'words']))}")
    printer.put("counts = count(word)")
    printer.put("at = before + tl.cumsum(counts, 0) - counts")
    printer.put("before += tl.sum(counts, 0)")
    printer.put("has = ((word[:, None] >> place[None, :]) & 1) == 1")
    printer.put("at = at[:, None] + count(word[:, None] & below[None, :])")
    printer.put(f"{out.name} = tl.load(values + at, mask=has, other=0){widen}")
    sizes = [printer.positions(group) for group in printer.sides_of(out) if group]
    if sizes[1:] != [bits]:
        printer.put(f"{out.name} = tl.reshape({out.name}, {sizes})")


def _search(printer: TileFunctionPrinter, s: Value, widen: str) -> None:
    p, bits = printer.p, printer.p.view.word
    terms, mask = printer.place(s)
    groups = printer.sides_of(s.out) if s.out.folded else tuple((c,) for c in s.out.axes)
    shape = [printer.positions(g) for g in groups]
    kind = "tl.bfloat16" if printer.half else printer.acc
    printer.put(f"position = {' + '.join(terms) or '0'}")
    if not shape:
        printer.put("position = tl.full([], 0, tl.int32) + position")
    printer.put(f"{s.out.name} = tl.zeros({shape}, {kind})")
    printer.put("passed = before")
    printer.put(f"for number in range({p.view.words}):")
    printer.indent += 1
    printer.put(f"word = {word(printer, 'number')}")
    printer.put(f"within = (position % {bits}).to(tl.uint32)")
    inside = f" & {mask}" if mask else ""
    printer.put(f"has = (position // {bits} == number) & (((word >> within) & 1) == 1){inside}")
    printer.put(
        "behind = count(word & ((tl.full([1], 1, tl.uint32) << within) - 1))"
        if shape
        else "behind = count(word & ((tl.full([], 1, tl.uint32) << within) - 1))"
    )
    printer.put(f"{s.out.name} += tl.load(values + passed + behind, mask=has, other=0){widen}")
    printer.put("passed += count(word)")
    printer.indent -= 1
