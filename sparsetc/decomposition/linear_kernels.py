"""Small systems of alternating least squares as single kernels; `linear` says what they compute, and launches them.

In: Gram matrices, factors and right-hand sides. Out: an inverse; a nonnegative factor, in place. In torch an inverse is
about fifteen launches of next to no work, a nonnegative factor three a column and pass. The module is imported only
where there is a GPU, or Triton's interpreter, for it imports triton.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def invert(gram, inverse, pivots, rank, share, WIDTH: tl.constexpr, LEAST: tl.constexpr):
    """One program: the inverse of a (rank, rank) float64 matrix H with a share of its diagonal added, by sweeps.

    H is scaled to a diagonal of ones first. No pivot is then below the share but by rounding, so nothing need be
    exchanged and nothing can fail. A sweep (Goodnight 1979) leaves a symmetric matrix symmetric, so a pivot's row is
    its column too; it goes through memory, `pivots` (rank + 1, WIDTH) float64, which takes a third of the time of a sum
    over threads (H200, rank 32: 15 against 51 us, `benchmarks/results/kernel_probes.json`). WIDTH is a power of two
    that the rank fits in, LEAST what is taken for 0 on the diagonal.
    """
    line = tl.arange(0, WIDTH)
    row, column = line[:, None], line[None, :]
    at = row * rank + column
    inside = (row < rank) & (column < rank)
    h = tl.load(gram + at, mask=inside, other=0)
    diagonal = tl.where(row == column, h, 0.0)
    beside, above = tl.sum(diagonal, 1)[:, None], tl.sum(diagonal, 0)[None, :]
    valid = (beside > LEAST) & (above > LEAST)
    scale = tl.where(valid, tl.sqrt(tl.where(valid, beside, 1.0)) * tl.sqrt(tl.where(valid, above, 1.0)), 1.0)
    a = tl.where(row == column, 1.0, tl.where(valid, h / scale, 0.0))
    a += tl.where((row == column) & valid, share, 0.0)  # in float64, unlike 1 + share
    tl.store(pivots + row * 0 + column, a, mask=row == 0)
    for k in range(rank):
        tl.debug_barrier()  # the row is there
        mine = pivots + k * WIDTH
        above = tl.load(mine + line)[None, :]
        left = tl.load(mine + line)[:, None]
        pivot = tl.load(mine + k)
        part = 1.0 / tl.where(pivot < share, share, pivot)  # which keeps NaN
        others = tl.where(column == k, left * part, a - left * (above * part))
        a = tl.where(row == k, tl.where(column == k, -part, above * part), others)
        tl.store(mine + WIDTH + row * 0 + column, a, mask=row == k + 1)
    tl.store(inverse + at, -a / scale, mask=inside)


@triton.jit
def update(
    factor, rhs, gram, rows, rank, passes,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, A_ROW: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """Update columns one by one, each to the best nonnegative column given the others.

    WIDTH is a power of two that the rank fits in, BLOCK the rows of a program, A_ROW whether each row has its own Gram
    matrix, LEAST what is taken for 0 on its diagonal.
    """
    row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (column < rank)[None, :]
    at = row[:, None] * rank + column[None, :]
    mine = tl.load(factor + at, mask=inside, other=0)
    wanted = tl.load(rhs + at, mask=inside, other=0)
    for _ in range(passes):
        for r in range(rank):
            if A_ROW:
                line = tl.load(gram + (row[:, None] * rank + r) * rank + column[None, :], mask=inside, other=0)
            else:
                line = tl.load(gram + r * rank + column, mask=column < rank, other=0)[None, :]
            here = column[None, :] == r
            diagonal = tl.sum(tl.where(here, line, 0), 1)
            old = tl.sum(tl.where(here, mine, 0), 1)
            step = (tl.sum(tl.where(here, wanted, 0), 1) - tl.sum(mine * line, 1)) / tl.where(
                diagonal > LEAST, diagonal, 1
            )
            new = old + tl.where(diagonal > LEAST, step, 0)
            new = tl.where(new < 0, 0, new)  # which keeps NaN
            mine = tl.where(here, new[:, None], mine)
    tl.store(factor + at, mine, mask=inside)
