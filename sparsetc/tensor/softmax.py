"""Softmax over the entries of a sparse tensor that differ in one mode: absent entries count as minus infinity.

In: a SparseTensor and a mode. Out: one of the same pattern. Which entries go together is found once for a pattern.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsetc.errors import DtypeError
from sparsetc.support import Ints
from sparsetc.support.entry import entry_point
from sparsetc.tensor.blocks import without_blocks
from sparsetc.tensor.coords import mode_of
from sparsetc.tensor.dtypes import accumulator
from sparsetc.tensor.groups import gathered, groups_of, reduced_groups
from sparsetc.tensor.pattern import Pattern
from sparsetc.tensor.sparse_tensor import SparseTensor


@entry_point
def softmax(x: SparseTensor, dim: int = -1) -> SparseTensor:
    """Normalise entries along a mode: exponentials over their sum; absent entries count as minus infinity.

    Like `torch.sparse.softmax`, for any order, with dense modes (each position, such as an attention head, has a
    softmax of its own), and differentiable. Duplicates are summed first. Along a sparse mode, entries of minus infinity
    become 0 even if there are no others; torch returns NaN there.

    Args:
        x: floating point; a tensor in blocks is taken nonzero by nonzero.
        dim: the mode along which entries add up to 1. Negative counts from the last mode.

    Returns:
        A SparseTensor with the entries of x.

    Raises:
        DtypeError: values are not floating point.
        ShapeError: no such mode.

    Examples:
        >>> stc.softmax(stc.full((1, 2), 5.0)).values
        tensor([0.5000, 0.5000])
    """
    return _normalised(x, dim, log=False)


@entry_point
def log_softmax(x: SparseTensor, dim: int = -1) -> SparseTensor:
    """Return the logarithm of `softmax`, more exact than taking both; arguments and errors as for `softmax`.

    Examples:
        >>> stc.log_softmax(stc.full((1, 2), 5.0)).values
        tensor([-0.6931, -0.6931])
    """
    return _normalised(x, dim, log=True)


def _normalised(x: SparseTensor, dim: int, log: bool) -> SparseTensor:
    name = "log_softmax" if log else "softmax"
    if not isinstance(x, SparseTensor):
        raise DtypeError(f"{name} takes a SparseTensor, found {type(x).__name__}: of dense tensors it is torch's")
    if not x.dtype.is_floating_point:
        raise DtypeError(f"{name} takes floating point values, found {x.dtype}")
    x = without_blocks(x)
    mode, values = mode_of(x.order, dim, name), x._values.to(accumulator(x.dtype))
    if mode >= x.sparse_order:
        normalised = (torch.log_softmax if log else torch.softmax)(values, mode - x.sparse_order + 1)
    else:
        normalised = _over_groups(values, x.pattern, tuple(m for m in range(x.sparse_order) if m != mode), log)
    return SparseTensor._make(x.pattern, normalised.to(x.dtype))


def _over_groups(values: Tensor, pattern: Pattern, kept: Ints, log: bool) -> Tensor:
    """Return (nnz, *dense sizes) values normalised within each group of entries that agree in the kept modes."""
    group = groups_of(pattern, kept).of_entry
    shifted, _ = _below_largest(values, pattern, kept)
    raised = shifted.exp()
    sums = reduced_groups(raised, pattern, kept, "sum")
    sums = sums.masked_fill(sums == 0, 1.0)  # the largest adds 1, unless all are -inf
    return shifted - gathered(sums.log(), group) if log else raised / gathered(sums, group)


def log_sums(values: Tensor, pattern: Pattern, kept: Ints) -> Tensor:
    """Return (groups, *dense sizes) logarithms of the sums of the exponentials of entries that agree in some modes."""
    shifted, most = _below_largest(values, pattern, kept)
    sums = reduced_groups(shifted.exp(), pattern, kept, "sum")
    nothing = sums == 0
    return torch.where(nothing, -torch.inf, sums.masked_fill(nothing, 1.0).log() + most)


def _below_largest(values: Tensor, pattern: Pattern, kept: Ints) -> tuple[Tensor, Tensor]:
    """Return (nnz, *dense sizes) values less the largest of their group, and the largest; 0 where all are -inf."""
    most = reduced_groups(values.detach(), pattern, kept, "amax")  # what is subtracted changes no result, nor gradient
    most = most.masked_fill(most == -torch.inf, 0.0)
    return values - gathered(most, groups_of(pattern, kept).of_entry), most
