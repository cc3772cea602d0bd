"""The update of a nonnegative factor as a single kernel; `linear` says what it computes, and launches it.

In torch it is three launches of next to no work a column and pass. The module is imported only where there is a GPU, or
Triton's interpreter, for it imports triton.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def update(
    factor, rhs, gram, rows, rank, passes,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, A_ROW: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """Columns one by one, each the best nonnegative one for the others as they are.

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
