"""The nonnegative update of a factor as one kernel; `linear.hals` says what it computes, and launches it.

In: a factor and a right-hand side, (n, rank), and a Gram matrix, (rank, rank) or one a row. Out: the factor, in place.
Rows do not depend on one another: a program keeps a few of them in registers through all passes, where torch would take
three launches a column and pass. The module is imported only where there is a GPU, or Triton's interpreter, for it
imports triton.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def update(
    factor, rhs, gram, rows, rank, passes, WIDTH: tl.constexpr, BLOCK: tl.constexpr, A_ROW: tl.constexpr
):  # fmt: skip
    """Columns one by one, each the best nonnegative one for the others as they are.

    WIDTH is a power of two that the rank fits in, BLOCK the rows of a program, A_ROW whether each row has its own Gram
    matrix.
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
            step = (tl.sum(tl.where(here, wanted, 0), 1) - tl.sum(mine * line, 1)) / tl.where(diagonal > 0, diagonal, 1)
            new = old + tl.where(diagonal > 0, step, 0)
            new = tl.where(new < 0, 0, new)  # which keeps NaN
            mine = tl.where(here, new[:, None], mine)
    tl.store(factor + at, mine, mask=inside)
