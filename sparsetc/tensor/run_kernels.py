"""A copy of runs of entries as one kernel: `loops.runs` on a GPU.

In: runs, and the coordinates and values that they are taken from. Out: theirs, run after run. The module is imported
only where there is a GPU, or Triton's interpreter, for it imports triton.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

BLOCK: tl.constexpr = tl.constexpr(128)


@triton.jit(do_not_specialize=["width", "order", "entries", "count"])
def runs(kinds, first, ends, coords, values, width, taken, taken_values, order, entries, count):
    """Copy a run; of `entries` that are given, `count` are taken, and a value has `width` elements."""
    run = tl.program_id(0)
    begin = tl.load(first + tl.load(kinds + run))
    start = tl.load(ends + run - 1, mask=run > 0, other=0)
    length = tl.load(ends + run) - start
    n = tl.arange(0, BLOCK)
    for at in range(0, length, BLOCK):
        inside = at + n < length
        tl.store(taken + start + at + n, tl.full([BLOCK], run, tl.int64), mask=inside)
        for mode in range(1, order):
            row = tl.load(coords + mode * entries.to(tl.int64) + begin + at + n, mask=inside)
            tl.store(taken + mode * count.to(tl.int64) + start + at + n, row, mask=inside)
    for at in range(0, length * width, BLOCK):
        inside = at + n < length * width
        value = tl.load(values + begin * width + at + n, mask=inside)
        tl.store(taken_values + start * width + at + n, value, mask=inside)
