"""Kernels that are written by hand: entries read and checked, copies of runs of entries and in another order of modes,
sums of rows, float32 values as float16 halves.

`tensor.readings`, `tensor.indexing`, `contraction.entries`, `codegen.split_float16` and `codegen.launch` launch them
by `run_by_hand`. A transposed copy is of matrices of which rows are contiguous, to those of which columns are.

Of sums, in: for each entry a row of a table and a weight; and a row of the result, or a chain of the entries of each
row. Out: sums, by atomics or row by row. A program takes one piece of work, and then the one that is as
many further as there are programs, so that one kernel serves all patterns.

Of halves, in: of an operand (nnz,) values and their positions in whole tiles; `line`, the row of tiles that each tile
is in; `inner` and `side`, exponents of two. Out: each row's largest magnitude, then halves and the verdict. An operand
without positions has one scale, and its halves are stored in the order of its values, without a verdict. The module is
imported only where there is a GPU, or Triton's interpreter, for it imports triton.

Magnitudes are compared as the bits of their absolute values, which are ordered as they are, with infinities and NaN at
the end.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

import sparsetc.codegen as shared
from sparsetc.ir.nest import values as rules

ROWS, COLUMNS = tl.constexpr(shared.ROWS), tl.constexpr(shared.COLUMNS)
ENTRIES, WIDE, WHOLE = (tl.constexpr(n) for n in (shared.ENTRIES, shared.WIDE, shared.WHOLE))
LOOKED, TOP = tl.constexpr(shared.LOOKED), tl.constexpr(rules.TOP)
BLOCK, GROUP, READ = (tl.constexpr(n) for n in (shared.BLOCK, shared.GROUP, shared.READ))
INFINITE_BITS = tl.constexpr(rules.INFINITE_BITS)
LEAST_BITS, MOST_BITS = tl.constexpr(rules.LEAST_BITS), tl.constexpr(rules.MOST_BITS)
SPREAD_BITS = tl.constexpr(rules.SPREAD << 23)
HEAD = tl.constexpr(rules.HEAD)
BIAS = tl.constexpr(rules.BIAS)
LOW = tl.constexpr(rules.LOW)
INEXACT, INFINITE = tl.constexpr(rules.INEXACT), tl.constexpr(rules.INFINITE)


@triton.jit(do_not_specialize=["order", "count", "size_0", "size_1", "size_2", "size_3"])
def read_entries(coords, outside, order, count, size_0, size_1, size_2, size_3, values, own, copy):
    """Copy (order, count) coordinates and (count,) values; write 1 to `outside` if a coordinate is not in its mode."""
    for first in range(tl.program_id(0) * READ, count, tl.num_programs(0) * READ):
        n = first + tl.arange(0, READ)
        inside = n < count
        tl.store(copy + n, tl.load(values + n, mask=inside), mask=inside)
        for mode in range(order):
            size = tl.where(mode < 2, tl.where(mode == 0, size_0, size_1), tl.where(mode == 2, size_2, size_3))
            at = tl.load(coords + mode * count + n, mask=inside, other=0)
            tl.store(own + mode * count + n, at, mask=inside)
            tl.store(outside + tl.zeros_like(n), 1, mask=(at < 0) | (at >= size))


@triton.jit(do_not_specialize=["count_of_runs", "order", "given", "count"])
def copy_runs(kinds, first, ends, coords, count_of_runs, order, given, count, taken, entries):
    """Do as `loops.runs`: each entry finds its run by a search, so a long run is the work of many programs."""
    for begin in range(tl.program_id(0) * READ, count, tl.num_programs(0) * READ):
        n = begin + tl.arange(0, READ).to(tl.int64)
        inside = n < count
        run, end = tl.zeros([READ], tl.int64), tl.zeros([READ], tl.int64) + count_of_runs
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


@triton.jit
def transpose(source, source_matrix, source_row, result_matrix, result_row, rows, columns, of_rows, of_columns, result):
    """One program a tile of a matrix: read along its rows, and written along its columns.

    In `source` matrices are `source_matrix` elements apart, and a row of one is `source_row` behind the row before; in
    `result` it is columns that are `result_row` apart. A matrix has `of_rows` tiles by `of_columns`.
    """
    program = tl.program_id(0)
    matrix = (program // (of_rows * of_columns)).to(tl.int64)
    row = (program % of_rows * ROWS).to(tl.int64) + tl.arange(0, ROWS)[:, None]
    column = (program // of_rows % of_columns * COLUMNS).to(tl.int64) + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < columns)
    tile = tl.load(source + matrix * source_matrix + row * source_row + column, mask=inside)
    at = result + matrix * result_matrix + column * result_row + row
    tl.store(at, tile, mask=inside)


@triton.jit(do_not_specialize=["count", "width"])
def add_rows(row, column, weights, table, count, width, out):
    """Add each weight times its row of a table to a row of `out`, in its type, a block of entries at a time."""
    kind: tl.constexpr = out.dtype.element_ty
    for first in range(tl.program_id(0) * ENTRIES, count, tl.num_programs(0) * ENTRIES):
        n = first + tl.arange(0, ENTRIES)
        inside = n < count
        to = tl.load(row + n, mask=inside, other=0) * width
        at = tl.load(column + n, mask=inside, other=0) * width
        x = tl.load(weights + n, mask=inside, other=0).to(kind)
        for begin in range(0, width, WIDE):
            c = begin + tl.arange(0, WIDE)
            mask = inside[:, None] & (c < width)[None, :]
            terms = x[:, None] * tl.load(table + at[:, None] + c[None, :], mask=mask, other=0).to(kind)
            tl.atomic_add(out + to[:, None] + c[None, :], terms, mask=mask, sem="relaxed")


@triton.jit(do_not_specialize=["count"])
def chain(row, count, head, after):
    """Make a chain of the entries of each row: `head` is one, or -1, and `after` the next one, of the last itself."""
    for first in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        n = (first + tl.arange(0, BLOCK)).to(tl.int64)
        inside = n < count
        other = tl.atomic_xchg(head + tl.load(row + n, mask=inside, other=0), n, mask=inside, sem="relaxed")
        tl.store(after + n, tl.where(other < 0, n, other), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def sum_rows(head, after, at, weights, table, rows, width, out):
    """Write the sum of each row's entries, which are a chain, made in float32."""
    blocks = tl.cdiv(width, WHOLE)
    for item in range(tl.program_id(0), rows * blocks, tl.num_programs(0)):
        row = (item // blocks).to(tl.int64)
        c = item % blocks * WHOLE + tl.arange(0, WHOLE)
        total = tl.zeros([WHOLE], tl.float32)
        n = tl.load(head + row)
        while n >= 0:
            terms = tl.load(table + tl.load(at + n) * width + c, mask=c < width, other=0)
            total += tl.load(weights + n).to(tl.float32) * terms.to(tl.float32)
            following = tl.load(after + n)
            n = tl.where(following == n, -1, following)
        tl.store(out + row * width + c, total, mask=c < width)


@triton.jit
def magnitude(v):
    """The bits of absolute values."""
    return v.to(tl.int32, bitcast=True) & TOP


@triton.jit(do_not_specialize=["count", "programs"])
def find(count, programs, values, found):
    """Find the extremes of every n-th block in each program, and combine them by two atomics."""
    program, lane = tl.program_id(0), tl.arange(0, LOOKED).to(tl.int64)
    full, wide = count // LOOKED, tl.full([], LOOKED, tl.int64)
    # The last values, of which no block is full, are the first program's.
    at = lane + full * wide
    most = magnitude(tl.load(values + at, mask=(at < count) & (program == 0), other=0))
    least = tl.where(most > 0, TOP - most, 0)
    for block in range(program, full, programs):
        bits = magnitude(tl.load(values + (lane + block * wide)))
        most = tl.maximum(most, bits)
        least = tl.maximum(least, tl.where(bits > 0, TOP - bits, 0))
    tl.atomic_max(found, tl.max(most, 0), sem="relaxed")
    tl.atomic_max(found + 1, tl.max(least, 0), sem="relaxed")


@triton.jit
def rows_of(line, position, inside, inner, side):
    """The row of each position, in its type: there are no more rows than positions."""
    tile = tl.load(line + (position >> (inner + side)), mask=inside, other=0)
    return (tile.to(position.dtype) << side) + ((position >> inner) & ((1 << side) - 1))


@triton.jit
def numbers():
    """Return the numbers of the program's values; a thread's numbers lie far apart, so that a warp reads neighbours.

    Did the compiler know that numbers are consecutive, it would give each thread four in a row, to be read one by one
    all the same, as their count is no multiple of four, and moved between threads for what is addressed by position.
    """
    return tl.max_contiguous(tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK), 1)


@triton.jit
def grouped(values):
    """The values of a program as a matrix with a group in each row."""
    return tl.reshape(values, [BLOCK // GROUP, GROUP])


@triton.jit(do_not_specialize=["nnz", "inner", "side"])
def find_most(nnz, inner, side, values, at, line, most):
    """Find the largest magnitude of each row.

    Where the pattern is sorted neighbours are mostly of one row, and a warp's atomics would meet on one address. So of
    a group with values of two rows at most, the first and the last lane send the largest of either; of any other, each
    lane sends its own.
    """
    n = numbers()
    inside = n < nnz
    bits = magnitude(tl.load(values + n, mask=inside, other=0.0))
    row = rows_of(line, tl.load(at + n, mask=inside, other=0), inside, inner, side)
    bits, row = grouped(bits), grouped(tl.where(bits > 0, row, -1))  # a zero changes nothing
    last = tl.max(row, 1)[:, None]
    first = tl.min(tl.where(bits > 0, row, last), 1)[:, None]
    many = tl.max(((first < row) & (row < last)).to(tl.int32), 1)[:, None] > 0
    of_first = tl.max(tl.where(row == first, bits, 0), 1)[:, None]
    of_last = tl.max(tl.where(row == last, bits, 0), 1)[:, None]
    lane = tl.arange(0, GROUP)[None, :]
    at_end = lane == GROUP - 1
    to = tl.where(many, row, tl.where(at_end, last, first))
    found = tl.where(many, bits, tl.where(at_end, of_last, of_first))
    sends = (many | at_end | ((lane == 0) & (first < last))) & (found > 0)
    # As they were read: of a matrix of addresses the compiler would choose another layout, and move all of it there.
    to = tl.reshape(to, [BLOCK])
    found = tl.reshape(found, [BLOCK])
    sends = tl.reshape(sends, [BLOCK])
    tl.atomic_max(most + to, found, mask=sends, sem="relaxed")


@triton.jit(do_not_specialize=["nnz", "inner", "side"])
def split(nnz, inner, side, values, at, line, most, verdict, high, low):
    """Store halves, and whether any row's values are too far apart, or too large, for halves."""
    n = numbers()
    inside = n < nnz
    value = tl.load(values + n, mask=inside, other=0.0)
    if at is None:
        position, top = n, tl.load(most)
    else:
        position = tl.load(at + n, mask=inside, other=0)
        top = tl.load(most + rows_of(line, position, inside, inner, side), mask=inside, other=0)
    # A scale and its inverse are normal numbers whatever the largest magnitude.
    exponent = -tl.maximum(top >> 23, HEAD + 1) + (2 * BIAS + HEAD)
    scaled = value * (exponent << 23).to(tl.float32, bitcast=True)
    first = scaled.to(tl.float16)
    tl.store(high + position, first, mask=inside)
    tl.store(low + position, ((scaled - first.to(tl.float32)) * LOW).to(tl.float16), mask=inside)
    if verdict is not None:
        bits = magnitude(value)
        far = (bits > 0) & ((bits < top - SPREAD_BITS) | (top < LEAST_BITS) | (top > MOST_BITS))
        infinite = top >= INFINITE_BITS
        found = tl.max(tl.maximum(infinite.to(tl.int32) * INFINITE, far.to(tl.int32) * INEXACT), 0)
        tl.atomic_max(verdict, found, mask=found > 0, sem="relaxed")
