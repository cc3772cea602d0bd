"""Kernels of coordinates: entries read and checked, and copies of runs; `readings` and `indexing` launch them.

In: coordinates of entries. Out: copies of all of them, or of runs, run after run. The module is imported only where
there is a GPU, or Triton's interpreter, for it imports triton.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

BLOCK: tl.constexpr = tl.constexpr(128)


@triton.jit(do_not_specialize=["order", "count", "size_0", "size_1", "size_2", "size_3"])
def read(coords, outside, order, count, size_0, size_1, size_2, size_3, values, own, copy):
    """Copy (order, count) coordinates and (count,) values; write 1 to `outside` if a coordinate is not in its mode."""
    for first in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        n = first + tl.arange(0, BLOCK)
        inside = n < count
        tl.store(copy + n, tl.load(values + n, mask=inside), mask=inside)
        for mode in range(order):
            size = tl.where(mode < 2, tl.where(mode == 0, size_0, size_1), tl.where(mode == 2, size_2, size_3))
            at = tl.load(coords + mode * count + n, mask=inside, other=0)
            tl.store(own + mode * count + n, at, mask=inside)
            tl.store(outside + tl.zeros_like(n), 1, mask=(at < 0) | (at >= size))


@triton.jit(do_not_specialize=["count_of_runs", "order", "given", "count"])
def runs(kinds, first, ends, coords, count_of_runs, order, given, count, taken, entries):
    """Do as `loops.runs`: each entry finds its run by a search, so a long run is the work of many programs."""
    for begin in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        n = begin + tl.arange(0, BLOCK).to(tl.int64)
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
        tl.store(entries + n, at, mask=inside)
        for mode in range(1, order):
            row = tl.load(coords + mode * given.to(tl.int64) + at, mask=inside)
            tl.store(taken + mode * count.to(tl.int64) + n, row, mask=inside)
