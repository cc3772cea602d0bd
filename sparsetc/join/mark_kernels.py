"""Kernels of the symbolic phase: tasks mark a bit each, bits are counted, and say each task's entry of the result.

In: pointers to the arrays of a `JoinOrder`, and of marks (`Tasks`). Out: arrays of a `NonzeroPairList`, and places. The
module is imported only where kernels run, for it imports triton.

Lists that are kept have fewer than 2**31 tasks, and each matched entry has one, so tasks, entries, columns and counts
take 32 bits; places, and words of marks, take 64.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def ones(word):
    """The number of bits set in words of 32, in parallel (a sum of pairs, of nibbles, of bytes), on any backend."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def tasks_of(pid, BLOCK: tl.constexpr):
    """Return the numbers of a program's tasks.

    What neighbours read by p, q and place lies close together, and a warp reads it at once. Did the compiler know that
    numbers are consecutive, it would give each thread eight in a row.
    """
    return tl.max_contiguous(pid * BLOCK + tl.arange(0, BLOCK), 1)


@triton.jit
def entry_of(ends, t, low, high):
    """Return the entry of x of each task, from low to high: the first whose tasks end beyond the task.

    Lanes without a task find one too, so that what is read by it need not be masked.
    """
    p = low + tl.zeros_like(t)
    left = high - low + 1
    while left > 1:
        half = left // 2
        p += tl.where(tl.load(ends + p + half - 1) <= t, half, 0)
        left -= half
    return p


@triton.jit
def place_of(row, column, columns, p, q, inside):
    """The row and column of the result as one number of 64 bits."""
    return tl.load(row + p).to(tl.int64) * columns + tl.load(column + q, mask=inside, other=0)


@triton.jit(do_not_specialize=["tasks", "entries", "columns"])
def mark(
    ends,
    first,
    row,
    column,
    x_base,
    bits,
    x_word,
    y_shift,
    tasks,
    entries,
    columns,
    FRAME: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Set the bit of the place of each task, and write the list's words of p and q.

    Most marks are set already where tasks are many, and a read is cheaper than an atomic. It passes the L1 cache, which
    would not see what others have set since.
    """
    pid = tl.program_id(0)
    t = tasks_of(pid, BLOCK)
    inside = t < tasks
    then = (pid + 1) * (BLOCK // FRAME)
    low = tl.load(x_base + pid * (BLOCK // FRAME))
    high = tl.load(x_base + then, mask=then < tl.cdiv(tasks, FRAME), other=entries - 1)
    p = entry_of(ends, t, low, high)
    start = tl.load(ends + p - 1, mask=p > 0, other=0).to(tl.int32)
    shift = tl.load(first + p).to(tl.int32) - start
    tl.store(y_shift + p, shift, mask=inside & (t == start))
    base = tl.load(x_base + t // FRAME, mask=inside, other=0)
    tl.store(x_word + t, (p - base).to(tl.uint8), mask=inside)
    place = place_of(row, column, columns, p, t + shift, inside)
    word = bits + (place >> 5)
    bit = tl.full([BLOCK], 1, tl.int32) << (place & 31).to(tl.int32)
    seen = tl.load(word, mask=inside, other=-1, cache_modifier=".cg")
    tl.atomic_or(word, bit, mask=inside & ((seen & bit) == 0), sem="relaxed")


@triton.jit(do_not_specialize=["words"])
def count(bits, counts, words, BLOCK: tl.constexpr):
    """Count the marks of each word."""
    w = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(bits + w, mask=w < words, other=0).to(tl.uint32, bitcast=True)
    tl.store(counts + w, ones(word), mask=w < words)


@triton.jit(do_not_specialize=["words"])
def write_places(bits, upto, places, words, WORDS: tl.constexpr):
    """Write the marked places in order, one lane for each bit of a word."""
    w = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    bit = tl.arange(0, 32)
    word = tl.load(bits + w, mask=w < words, other=0).to(tl.uint32, bitcast=True)
    total = tl.load(upto + w, mask=w < words, other=0)
    rest = word[:, None] >> bit[None, :].to(tl.uint32)  # this bit and those above
    tl.store(places + total[:, None] - ones(rest), w[:, None] * 32 + bit[None, :], mask=(rest & 1) == 1)


@triton.jit(do_not_specialize=["tasks", "columns"])
def write_results(
    row, column, x_base, x_word, y_shift, bits, upto, z_word, tasks, columns, FRAME: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the entry of the result of each task: the number of marks before its own."""
    t = tasks_of(tl.program_id(0), BLOCK)
    inside = t < tasks
    base = tl.load(x_base + t // FRAME, mask=inside, other=0)
    p = base + tl.load(x_word + t, mask=inside, other=0).to(tl.int32)
    q = t + tl.load(y_shift + p, mask=inside, other=0)
    place = place_of(row, column, columns, p, q, inside)
    word = tl.load(bits + (place >> 5), mask=inside, other=0).to(tl.uint32, bitcast=True)
    total = tl.load(upto + (place >> 5), mask=inside, other=0)
    rest = word >> (place & 31).to(tl.uint32)
    tl.store(z_word + t, total - ones(rest), mask=inside)
