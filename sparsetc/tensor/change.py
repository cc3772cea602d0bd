"""A SparseTensor in another form: its modes permuted, its dense modes and blocks expanded.

In: a SparseTensor. Out: a SparseTensor; see its methods of these names.
"""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Any

from sparsetc.errors import ShapeError

if TYPE_CHECKING:
    from sparsetc.tensor.sparse_tensor import SparseTensor


def permuted(x: SparseTensor, modes: tuple[Any, ...]) -> SparseTensor:
    """See SparseTensor.permute."""
    raw: Any = modes[0] if len(modes) == 1 and isinstance(modes[0], tuple | list) else modes
    try:
        wanted = tuple(m + x.order if m < 0 else m for m in map(index, raw))
    except TypeError:  # no numbers
        wanted = ()
    if sorted(wanted) != list(range(x.order)):
        raise ShapeError(f"permute needs each of the modes 0..{x.order - 1} once, found {tuple(raw)}")
    if wanted == tuple(range(x.order)):
        return x
    split, values = x.sparse_order, x._values
    if any(m >= split for m in wanted[:split]):
        raise ShapeError(
            f"permute{wanted} would move a dense mode ({split}..{x.order - 1}) before a sparse one; "
            "call expand_dense() first"
        )
    pattern, order = x._pattern.permuted(wanted[:split])
    sides = len(x.blocksize)
    dense = (m - split + 1 + sides for m in wanted[split:])
    values = values.permute(0, *(m + 1 for m in wanted[:sides]), *dense)
    return type(x)._make(pattern, values if order is None else values.index_select(0, order))


def expanded(x: SparseTensor) -> SparseTensor:
    """See SparseTensor.expand_dense."""
    if x.blocksize:
        pattern, cut = x._pattern.cut((1,) * x.sparse_order)
        found = cut.values(x._values)
        return expanded(type(x)._make(pattern, found.reshape(pattern.nnz, *found.shape[1 + x.sparse_order :])))
    if not x.dense_order:
        return x
    return type(x)._make(x._pattern.expanded(tuple(x._values.shape[1:])), x._values.reshape(-1))
