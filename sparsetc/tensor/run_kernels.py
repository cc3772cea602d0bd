"""A copy of runs of entries as one kernel: `loops.runs` on a GPU.

In: runs, and the coordinates and values that they are taken from. Out: theirs, run after run. The module is imported
only where there is a GPU, or Triton's interpreter, for it imports triton.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

BLOCK: tl.constexpr = tl.constexpr(128)
WIDEST = 32
"""Most elements of a value that are copied at once."""


@triton.jit(do_not_specialize=["count_of_runs", "width", "order", "entries", "count"])
def runs(
    kinds,
    first,
    ends,
    coords,
    values,
    count_of_runs,
    width,
    taken,
    taken_values,
    order,
    entries,
    count,
    WIDE: tl.constexpr,
):
    """Copy a block of the entries to take, after a search for their runs: a long run is the work of many programs.

    Of `entries` that are given, `count` are taken, and a value has `width` elements.
    """
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = n < count
    run, end = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64) + count_of_runs
    left = count_of_runs
    while left > 0:  # halves what is left: `run` is the first whose end is further
        middle = (run + end) // 2
        further = tl.load(ends + middle, mask=middle < end, other=count) > n
        run, end = tl.where(further | (run >= end), run, middle + 1), tl.where(further, middle, end)
        left = left // 2
    inside &= run < count_of_runs
    start = tl.load(ends + run - 1, mask=inside & (run > 0), other=0)
    at = tl.load(first + tl.load(kinds + run, mask=inside, other=0), mask=inside, other=0) + n - start
    tl.store(taken + n, run, mask=inside)
    for mode in range(1, order):
        row = tl.load(coords + mode * entries.to(tl.int64) + at, mask=inside)
        tl.store(taken + mode * count.to(tl.int64) + n, row, mask=inside)
    for begin in range(0, width, WIDE):
        c = begin + tl.arange(0, WIDE)
        mask = inside[:, None] & (c < width)[None, :]
        value = tl.load(values + (at * width)[:, None] + c[None, :], mask=mask)
        tl.store(taken_values + (n * width)[:, None] + c[None, :], value, mask=mask)
