"""A copy of matrices in the other order of their modes as one kernel; `transpose` says where, and launches it.

In: matrices of which rows are contiguous. Out: the same, columns contiguous. The module is imported only where there is
a GPU, or Triton's interpreter, for it imports triton.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

import sparsetc.codegen as shared

ROWS, COLUMNS = tl.constexpr(shared.ROWS), tl.constexpr(shared.COLUMNS)


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
