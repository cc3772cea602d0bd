"""Kernels whose times are rates: each keeps one resource of a GPU busy and hardly touches the others.

In: pointers to float32 tables and int32 row numbers. Out: sums, so that nothing is optimised away and tests can check
what was done. Imported only when a GPU is calibrated, for it imports triton.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def stream(source, sums, BLOCK: tl.constexpr):
    """Read a block a program from device memory."""
    pid = tl.program_id(0)
    tl.store(sums + pid, tl.sum(tl.load(source + pid * BLOCK + tl.arange(0, BLOCK)), 0))


@triton.jit
def gather(rows, table, sums, BLOCK: tl.constexpr, ROW: tl.constexpr, STEPS: tl.constexpr):
    """Gather BLOCK rows a step by numbers that are read, as generated programs do."""
    pid = tl.program_id(0)
    r = tl.arange(0, ROW)
    total = tl.zeros([BLOCK, ROW], tl.float32)
    for step in range(STEPS):
        row = tl.load(rows + (pid * STEPS + step) * BLOCK + tl.arange(0, BLOCK))
        total += tl.load(table + row[:, None] * ROW + r[None, :])
    tl.store(sums + pid * ROW + r, tl.sum(total, 0))


@triton.jit
def gather_near(rows, table, sums, BLOCK: tl.constexpr, ROW: tl.constexpr, TABLE: tl.constexpr, STEPS: tl.constexpr):
    """Gather BLOCK rows a step by consecutive numbers, so that the L1 cache delivers table rows only.

    TABLE is a power of two; steps are taken 8 at a time, so that many loads are under way.
    """
    pid = tl.program_id(0)
    r = tl.arange(0, ROW)
    first = tl.load(rows + pid * BLOCK + tl.arange(0, BLOCK))
    total = tl.zeros([BLOCK, ROW], tl.float32)
    for start in range(0, STEPS, 8):
        for step in tl.static_range(8):
            row = (first + start + step) & (TABLE - 1)
            total += tl.load(table + row[:, None] * ROW + r[None, :])
    tl.store(sums + pid * ROW + r, tl.sum(total, 0))


@triton.jit
def add(rows, table, BLOCK: tl.constexpr, ROW: tl.constexpr):
    """Add one to every element of BLOCK rows, by atomics."""
    row = tl.load(rows + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))
    ones = tl.full([BLOCK, ROW], 1.0, tl.float32)
    tl.atomic_add(table + row[:, None] * ROW + tl.arange(0, ROW)[None, :], ones, sem="relaxed")


@triton.jit
def multiply(source, out, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """A multiplication and an addition an element and step, 16 steps at a time; the factor and the summand are read."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    factor = tl.load(source)
    summand = tl.load(source + 1)
    x = tl.zeros([BLOCK], tl.float32)
    for _ in range(0, STEPS, 16):
        for _ in tl.static_range(16):
            x = x * factor + summand
    tl.store(out + at, x)


@triton.jit
def dot(source, sums, steps, SIDE: tl.constexpr, DEEP: tl.constexpr, PRECISION: tl.constexpr):
    """Add a product of a SIDE x DEEP matrix and its transpose `steps` times; the sums of its rows are stored.

    The number of steps is no constant: where it is, ptxas takes more than a minute over the loop.
    """
    m = tl.arange(0, SIDE)
    k = tl.arange(0, DEEP)
    left = tl.load(source + m[:, None] * DEEP + k[None, :])
    right = tl.load(source + m[None, :] * DEEP + k[:, None])
    total = tl.zeros([SIDE, SIDE], tl.float32)
    if PRECISION == "bf16":
        left = left.to(tl.bfloat16)
        right = right.to(tl.bfloat16)
        for _ in range(steps):
            total = tl.dot(left, right, total)
    else:
        for _ in range(steps):
            total = tl.dot(left, right, total, input_precision=PRECISION)
    tl.store(sums + tl.program_id(0) * SIDE + m, tl.sum(total, 1))


@triton.jit
def find_work(pointers, out):
    """Read the range of this program's work, which is empty: all pointers are equal."""
    pid = tl.program_id(0)
    start = tl.load(pointers + pid)
    stop = tl.load(pointers + pid + 1)
    if start < stop:
        tl.store(out, stop - start)


@triton.jit
def tasks(words, places, values, sums, BLOCK: tl.constexpr, TABLE: tl.constexpr, STEPS: tl.constexpr):
    """Add the product of two values for each of BLOCK kept tasks a step, by atomics.

    A task's word says which of 256 values of one operand is its own; those of the other lie side by side. TABLE, the
    number of these and of sums, is a power of two.
    """
    pid = tl.program_id(0)
    for step in range(STEPS):
        at = (pid * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
        product = tl.load(values + tl.load(words + at)) * tl.load(values + (at & (TABLE - 1)))
        tl.atomic_add(sums + tl.load(places + at), product, sem="relaxed")


@triton.jit
def pairs(
    numbers, left, right, out, PAIRS: tl.constexpr, SIDE: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr
):
    """Add the products of PAIRS pairs of blocks, each SIDE x INNER, by their numbers; the sums of rows are stored.

    In f16x3 a block is two of 16 bits, one behind the other, and a product is three.
    """
    pid = tl.program_id(0)
    r = tl.arange(0, SIDE)
    k = tl.arange(0, INNER)
    at_left = r[:, None] * INNER + k[None, :]
    at_right = r[None, :] * INNER + k[:, None]
    kind: tl.constexpr = out.dtype.element_ty
    total = tl.zeros([SIDE, SIDE], kind)
    low = tl.zeros([SIDE, SIDE], kind)
    size: tl.constexpr = SIDE * INNER * (2 if PRECISION == "f16x3" else 1)
    for pair in range(pid * PAIRS, (pid + 1) * PAIRS):
        first = left + tl.load(numbers + 2 * pair) * size + at_left
        second = right + tl.load(numbers + 2 * pair + 1) * size + at_right
        x = tl.load(first)
        y = tl.load(second)
        if PRECISION == "f16x3":
            low = tl.dot(tl.load(first + SIDE * INNER), y, low, out_dtype=kind)
            low = tl.dot(x, tl.load(second + SIDE * INNER), low, out_dtype=kind)
            total = tl.dot(x, y, total, out_dtype=kind)
        elif PRECISION == "bf16":
            total = tl.dot(x.to(tl.bfloat16), y.to(tl.bfloat16), total, out_dtype=kind)
        else:
            total = tl.dot(x, y, total, input_precision=PRECISION, out_dtype=kind)
    tl.store(out + pid * SIDE + r, tl.sum(total + low, 1))
