"""Sums of weighted rows of a table by rows of a result, each as one kernel for all patterns.

In: for each entry a row of the table and a weight; and a row of the result, or where the entries of each row begin.
Out: sums, of entries in any order by atomics. A program takes one piece of work, and then the one that is as many
further as there are programs. The module is imported only where there is a GPU, or Triton's interpreter, for it imports
triton.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

import sparsetc.codegen as shared

ENTRIES, WIDE, WHOLE = (tl.constexpr(n) for n in (shared.ENTRIES, shared.WIDE, shared.WHOLE))


@triton.jit(do_not_specialize=["count", "width"])
def add_rows(row, column, weights, table, count, width, out):
    """Add each weight times its row of a table to a row of `out`, a block of entries at a time."""
    for first in range(tl.program_id(0) * ENTRIES, count, tl.num_programs(0) * ENTRIES):
        n = first + tl.arange(0, ENTRIES)
        inside = n < count
        to = tl.load(row + n, mask=inside, other=0) * width
        at = tl.load(column + n, mask=inside, other=0) * width
        x = tl.load(weights + n, mask=inside, other=0)
        for begin in range(0, width, WIDE):
            c = begin + tl.arange(0, WIDE)
            mask = inside[:, None] & (c < width)[None, :]
            terms = x[:, None] * tl.load(table + at[:, None] + c[None, :], mask=mask, other=0)
            tl.atomic_add(out + to[:, None] + c[None, :], terms, mask=mask, sem="relaxed")


@triton.jit(do_not_specialize=["rows"])
def sum_rows(begins, at, weights, table, rows, width, out):
    """Write the sum of each row's entries, which follow one another, made in float32."""
    blocks = tl.cdiv(width, WHOLE)
    for item in range(tl.program_id(0), rows * blocks, tl.num_programs(0)):
        row = (item // blocks).to(tl.int64)
        c = item % blocks * WHOLE + tl.arange(0, WHOLE)
        total = tl.zeros([WHOLE], tl.float32)
        for n in range(tl.load(begins + row), tl.load(begins + row + 1)):
            terms = tl.load(table + tl.load(at + n) * width + c, mask=c < width, other=0)
            total += tl.load(weights + n).to(tl.float32) * terms.to(tl.float32)
        tl.store(out + row * width + c, total, mask=c < width)
