"""Values of bitmap tiles -> the text that expands them.

In: the printer of a tile function and a `Value` statement. Out: lines. A value's place is that of its tile, the bits
set before its word, and those before it in the word. Where columns are taken in the order stored, as planned layouts
have it, the words of a step are counted at once and a sum over them runs from step to step; else the words of the tile
are gone through one by one, which is slow and always right.

A tile that is read whole may be padded: its rows by words that are 0, its columns by places that no word has bits for.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from sparsetc.codegen.triton_layout import dimensions_of, number, place, widened
from sparsetc.ir.program import names
from sparsetc.ir.program.operands import Stored
from sparsetc.ir.program.tile import Loop, Value

if TYPE_CHECKING:
    from sparsetc.codegen.triton import TritonPrinter

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


def counted_bits(printer: TritonPrinter, s: Value) -> tuple[int, int, int, int]:
    """Return which bits are counted together, for one step of a value that is in order.

    Returns:
        Units that are counted, padding included: a word, or a row where a word has several; positions of one; positions
        that a program has of the tile, padding included; units of the tile where more are counted, else 0.
    """
    word, sides = printer.p.stored(s.operand).values.word, [printer.p.axis(c) for c in s.out.axes]
    if sides and sides[-1].ragged:
        row, column = sides
        return row.block, column.size, column.block, row.size if row.ragged else 0
    limit = prod(side.size for side in sides) // word if any(side.ragged for side in sides) else 0
    return printer.positions(s.out.axes) // word, word, word, limit


def in_order(printer: TritonPrinter, s: Value) -> bool:
    """Whether the positions of a step lie together as stored, and steps follow one another."""
    p, stored, axes = printer.p, printer.p.stored(s.operand), s.out.axes
    tiles, sides = stored.values, [p.axis(c) for c in axes]
    if p.looped and any(a.letter in axes for a in p.split):  # a share of the positions of a letter, again and again
        return False
    if any(side & (side - 1) for side in tiles.sides):
        return False
    letters = [c for c in (*_before(printer, s), *axes) if p.axis(c).size > 1]
    if letters != [stored.letters[m] for m in tiles.sequence if tiles.sides[m] > 1]:
        return False
    if not any(side.ragged for side in sides):
        return printer.positions(axes) >= tiles.word
    if _before(printer, s) or len(axes) != 2:
        return False
    return sides[1].size <= tiles.word if sides[1].ragged else prod(tiles.sides) >= tiles.word


def _before(printer: TritonPrinter, s: Value) -> tuple[str, ...]:
    """Letters of which a step has one position, or a part of them: of the grid, then looped, the outermost first."""
    p, letters = printer.p, printer.p.stored(s.operand).letters
    gridded = tuple(a.letter for a in p.split if a.letter in letters and a.letter not in s.out.axes)
    loops = (inner.axis.letter for inner, _ in p.statements if isinstance(inner, Loop) and inner.axis.letter)
    return (*gridded, *(c for c in loops if c in letters and c not in s.out.axes))


def head(printer: TritonPrinter, s: Value) -> None:
    """Vectors that all tiles share."""
    if not in_order(printer, s):
        return
    stored, (count, _, places, _) = printer.p.stored(s.operand), counted_bits(printer, s)
    place, below = stored.array("place"), stored.array("below")
    printer.put(f"{stored.array('words')} = tl.arange(0, {count})")
    printer.put(f"{place} = tl.arange(0, {places}).to(tl.uint32)")
    printer.put(f"{below} = (tl.full([1], 1, tl.uint32) << {place}) - 1")
    if any(a.letter in printer.p.letters for a in printer.p.split):
        printer.put(f"every = tl.arange(0, {1 << (stored.values.words - 1).bit_length()})")


def first(printer: TritonPrinter, s: Value) -> None:
    """The tile's first value; of a tile taken in slices, the slice's."""
    p, stored = printer.p, printer.p.stored(s.operand)
    before = stored.array("before")
    printer.put(f"{before} = tl.load({stored.array('value_ptr')} + {stored.array('tile')})")
    split = [a.letter for a in p.split if a.letter in stored.letters]
    if split and in_order(printer, s):
        skipped = " + ".join(printer.placed(printer.begin(c), (), (), stored.stride(c)) for c in split)
        printer.put(f"skipped = ({skipped}) // {stored.values.word}")
        printer.put(f"{before} += tl.sum(count({word(printer, stored, 'every', 'every < skipped')}), 0)")


def word(printer: TritonPrinter, stored: Stored, at: str, mask: str = "") -> str:
    """The load of words of the tile, as unsigned numbers of 32 bits."""
    tiles = stored.values
    tile = printer.placed(number(printer, stored), (), (), tiles.words)
    text = printer.load(stored.array("bits"), f"{tile} + {at}", mask)
    return f"{text}.to(tl.uint32, bitcast=True)" if tiles.word == 32 else f"{text}.to(tl.uint32)"


def value(printer: TritonPrinter, s: Value) -> None:
    """The values at the positions of a step, 0 where there is none."""
    if in_order(printer, s):
        _step(printer, s)
    else:
        _search(printer, s)


def _step(printer: TritonPrinter, s: Value) -> None:
    out, stored, (_, unit, positions, limit) = s.out, printer.p.stored(s.operand), counted_bits(printer, s)
    called = ("word", "counts", "at", "has", "before", "words", "place", "below")
    word_, counts, at, has, before, words, place, below = map(stored.array, called)
    mask = f"{words} < {limit}" if limit else ""
    printer.put(f"{word_} = {word(printer, stored, _word_numbers(printer, s, unit), mask)}")
    if unit < stored.values.word:
        behind = f"({words} * {unit} % {stored.values.word}).to(tl.uint32)"
        printer.put(f"{word_} = ({word_} >> {behind}) & {hex((1 << unit) - 1)}")
    printer.put(f"{counts} = count({word_})")
    printer.put(f"{at} = {before} + tl.cumsum({counts}, 0) - {counts}")
    if printer.p.looped:
        printer.put(f"{before} += tl.sum({counts}, 0)")
    printer.put(f"{has} = (({word_}[:, None] >> {place}[None, :]) & 1) == 1")
    printer.put(f"{at} = {at}[:, None] + count({word_}[:, None] & {below}[None, :])")
    values = stored.array("values")
    printer.put(f"{out.name} = tl.load({values} + {at}, mask={has}, other=0){widened(printer, s)}")
    sizes = [printer.positions(group) for group in dimensions_of(out) if group]
    if sizes[1:] != [positions]:
        printer.put(f"{out.name} = tl.reshape({out.name}, {sizes})")


def _word_numbers(printer: TritonPrinter, s: Value, unit: int) -> str:
    """The words of the tile that the counted units lie in."""
    p, stored = printer.p, printer.p.stored(s.operand)
    bits, words = stored.values.word, stored.array("words")
    if unit < bits:
        return f"{words} * {unit} // {bits}"
    terms = []
    for c in stored.letters:
        if printer.apart(c):
            terms.append(printer.placed(printer.begin(c), (), (), stored.stride(c) // bits))
        elif c not in s.out.axes and p.axis(c).size > 1:
            terms.append(printer.placed(names.side(c), (), (), stored.stride(c) // bits))
    return " + ".join([*terms, words])


def _search(printer: TritonPrinter, s: Value) -> None:
    stored = printer.p.stored(s.operand)
    tiles, values, bits = stored.values, stored.array("values"), stored.values.word
    terms, mask = place(printer, s)
    shape = [printer.positions(group) for group in dimensions_of(s.out)]
    kind = "tl.bfloat16" if printer.half else printer.acc
    printer.put(f"position = {' + '.join(terms) or '0'}")
    if not shape:
        printer.put("position = tl.full([], 0, tl.int32) + position")
    printer.put(f"{s.out.name} = tl.zeros({shape}, {kind})")
    printer.put(f"passed = {stored.array('before')}")
    printer.put(f"for number in range({tiles.words}):")
    printer.indent += 1
    printer.put(f"word = {word(printer, stored, 'number')}")
    printer.put(f"within = (position % {bits}).to(tl.uint32)")
    inside = f" & ({mask})" if mask else ""
    printer.put(f"has = (position // {bits} == number) & (((word >> within) & 1) == 1){inside}")
    printer.put(f"behind = count(word & ((tl.full({'[1]' if shape else '[]'}, 1, tl.uint32) << within) - 1))")
    printer.put(f"{s.out.name} += tl.load({values} + passed + behind, mask=has, other=0){widened(printer, s)}")
    printer.put("passed += count(word)")
    printer.indent -= 1
