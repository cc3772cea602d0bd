"""A sum of weighted rows of a table by rows of a result as one kernel, for coordinates in any order.

In: for each entry a row of the result, a row of the table and a weight. Out: sums, added by atomics. The module is
imported only where there is a GPU, or Triton's interpreter, for it imports triton.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

import sparsetc.codegen as shared

ENTRIES, WIDE = tl.constexpr(shared.ENTRIES), tl.constexpr(shared.WIDE)


@triton.jit(do_not_specialize=["count", "width"])
def add_rows(row, column, weights, table, count, width, out):
    """Each program takes a block of entries, and then the one that is as many blocks further as there are programs."""
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
