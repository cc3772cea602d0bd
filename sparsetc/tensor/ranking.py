"""The largest and least elements along a mode of a sparse tensor, and where they are.

In: a SparseTensor and a mode. Out: dense tensors of values and of positions in the mode, absent entries being zeros.
Of each row the candidates are its entries and as many of its first absent positions as are asked for; so what is made
is not as long as the mode.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from sparsetc.errors import DtypeError, ShapeError
from sparsetc.support import memory
from sparsetc.tensor import coords as crd
from sparsetc.tensor.pattern import transforming


def topk(x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor]:
    """Return the k largest elements along a mode, or the least, and where they are; in order, of equal ones the first.

    Args:
        x: a SparseTensor of real values.
        k: how many, no more than the mode has positions.
        dim: the mode, in whose place the results have k elements.
        largest: False for the least.
        sorted: is ignored, as they are always in order.

    Returns:
        Dense ``values`` and ``indices``, as of `torch.topk`.

    Raises:
        ShapeError: more elements than there are positions.
        DtypeError: complex values, which have no order.

    Examples:
        >>> stc.eye(3).topk(2).indices
        tensor([[0, 1],
                [1, 0],
                [2, 0]])
    """
    mode = crd.mode_of(x.order, dim, "topk")
    if x.dtype.is_complex:
        raise DtypeError(f"{x.dtype} has no order: compare magnitudes, .abs()")
    if not 0 <= k <= x.shape[mode]:
        raise ShapeError(f"topk: {k} elements of mode {mode}, of size {x.shape[mode]}")
    others = [m for m in range(x.order) if m != mode]
    x = x.expand_dense().permute(*others, mode).coalesce()
    *sizes, size = x.shape
    rows = prod(sizes)
    memory.check(f"the candidates of {rows:,} rows", 96 * (rows * max(k, 1) + x.nnz), x.device)
    matrix = x.reshape(rows, size)
    row, position = matrix._pattern.coords
    # before the absent position number j of a row are j others, and the entries that stand no further than these all
    each = crd.histogram(row, rows)
    start = each.cumsum(0) - each
    number, absent = torch.arange(rows, device=x.device).unsqueeze(1), torch.arange(k, device=x.device)
    ahead = row * (size + 1) + position - torch.arange(x.nnz, device=x.device) + start[row]
    entries = torch.searchsorted(ahead, number * (size + 1) + absent, right=True) - start.unsqueeze(1)
    inside = absent + entries < size
    zeros = torch.stack((number.expand(rows, k)[inside], (absent + entries)[inside]))
    coords = torch.cat((matrix._pattern.coords, zeros), 1)
    values = torch.cat((matrix._values, matrix._values.new_zeros(zeros.shape[1])))
    if transforming() or bool((matrix._values == 0).any()):  # stored zeros, and absent ones, in the order of positions
        by_position = crd.lexsort(coords, (rows, size))
        coords, values = coords[:, by_position], values[by_position]
    row, position = coords
    order = torch.sort(values.detach(), descending=largest, stable=True).indices
    order = order[torch.sort(crd.narrowed(row, rows)[order], stable=True).indices]
    each += inside.sum(1)
    first = order[(each.cumsum(0) - each).unsqueeze(1) + torch.arange(k, device=x.device)]
    ranked = (one[first].reshape(*sizes, k).movedim(-1, mode) for one in (values, position))
    return torch.return_types.topk(tuple(ranked))  # type: ignore[arg-type, return-value]


def extremum(x: Any, dim: Any, keepdim: bool, largest: bool) -> Any:
    """Return the largest or least element; along a mode, values and indices; for two tensors, elementwise."""
    if dim is None:
        return x.amax() if largest else x.amin()
    if not isinstance(dim, int):
        return (torch.maximum if largest else torch.minimum)(x, dim)
    if largest or not x.dtype.is_floating_point:
        values, where = topk(x, 1, dim, largest)
    else:  # NaN is the extremum of either kind, and only the last of the least
        negated, where = topk(-x, 1, dim)
        values = 0 - negated
    if not keepdim:
        values, where = values.squeeze(dim), where.squeeze(dim)
    return (torch.return_types.max if largest else torch.return_types.min)((values, where))


def argument(x: Any, dim: int | None, keepdim: bool, largest: bool) -> Tensor:
    """Return where the largest or least elements are: in a mode, or in row-major order among all."""
    if dim is not None:
        return extremum(x, dim, keepdim, largest).indices  # type: ignore[no-any-return]
    place = extremum(x.reshape(-1), 0, False, largest).indices
    return place.reshape([1] * x.order) if keepdim else place  # type: ignore[no-any-return]
