"""The rows of `benchmarks/instead.py`, in one list; each module holds a part of the table."""

from instead_rows import arithmetic, attention, blocks, experts, files, graphs, layers, matrices, tensors

ROWS = [
    *attention.ROWS,
    *layers.ROWS,
    *blocks.ROWS,
    *experts.ROWS,
    *graphs.ROWS,
    *tensors.ROWS,
    *matrices.ROWS,
    *arithmetic.ROWS,
    *files.ROWS,
]
"""All rows, in the order that they are run and recorded."""
