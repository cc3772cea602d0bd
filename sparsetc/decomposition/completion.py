"""Completion: a CP model of the observed entries alone, by one least-squares problem a row.

In: a tensor, and which of its entries are observed. Out: `Equations` whose H is one a row: the sum over the row's
observed entries of the outer squares of the other factors' rows, ``"ijk,jr,kr,js,ks->irs"`` on a pattern of ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparsetc.decomposition import checks
from sparsetc.decomposition.als import Equations
from sparsetc.decomposition.kernels import mode_kernels
from sparsetc.errors import DecompositionError, DeviceError, FormatError, ShapeError
from sparsetc.support import memory
from sparsetc.tensor.inputs import as_dense
from sparsetc.tensor.sparse_tensor import SparseTensor


def observed(x: SparseTensor, mask: Any, name: str) -> SparseTensor:
    """Return the values at all known entries of a mask, 0 where x has no entry.

    Args:
        x: of single nonzeros, coalesced.
        mask: ``"observed"`` for x's own positions, or a sparse or dense tensor that is not 0 at those that are known.
        name: of the decomposition, for messages.

    Raises:
        DecompositionError, ShapeError, DeviceError, FormatError: of a mask that is none, that has NaN or that knows
            nothing, and of known values that are not finite.
    """
    entries = x if isinstance(mask, str) and mask == "observed" else _on_mask(x, _positions(x, mask, name))
    if entries.nnz == 0:
        raise FormatError(f"{name}: the mask has no observed entry")
    checks.check_values(entries.values, name)
    return entries


def _positions(x: SparseTensor, mask: Any, name: str) -> SparseTensor:
    where: Any = None if isinstance(mask, str) else as_dense(mask, f"{name}: mask")
    if isinstance(where, Tensor) and where.layout == torch.strided:
        _check_no_nan(where, name)
        where = SparseTensor.from_dense(where)
    sparse = None if where is None else SparseTensor.coerce(where)
    if sparse is None:
        raise DecompositionError(
            f'{name}: mask must be "observed", or a sparse or dense tensor of x\'s shape, found {mask!r:.80}'
        )
    if sparse.shape != x.shape:
        raise ShapeError(f"{name}: mask must have x's shape {x.shape}, found {sparse.shape}")
    if sparse.device != x.device:
        raise DeviceError(f"{name}: mask is on {sparse.device}, x is on {x.device}; move one of them with .to()")
    _check_no_nan(sparse.values, name)
    return sparse.expand_dense().coalesce()


def _check_no_nan(tensor: Tensor, name: str) -> None:
    """Raise `FormatError` if a mask holds NaN; waits for a GPU once."""
    if bool(tensor.isnan().any()):
        raise FormatError(f"{name}: the mask has NaN; it must be 0 where an entry is not known, as ~x.isnan() is")


def _on_mask(x: SparseTensor, mask: SparseTensor) -> SparseTensor:
    """Return the tensor on the nonzero positions of a mask, found by adding both as two dense modes."""
    values = torch.stack((x.values, torch.zeros_like(x.values)), 1)
    in_mask = torch.stack((torch.zeros_like(mask.values), mask.values != 0), 1).to(x.dtype)
    both = SparseTensor(torch.cat((x.coords, mask.coords), 1), torch.cat((values, in_mask)), (*x.shape, 2), check=False)
    kept = both.values[:, 1] > 0
    return SparseTensor(both.coords[:, kept], both.values[kept, 0], x.shape, check=False)


class Observed(Equations):
    """The equations of observed entries: B is an MTTKRP of their values, H one matrix a row.

    H is symmetric, so an MTTKRP of ones with the ``rank (rank + 1) / 2`` products of two columns is all of it. Gram
    matrices of factors stay those of the start, and are not read.

    Attributes:
        _numbers: which of the products each entry of H is.
    """

    def __init__(self, x: SparseTensor, factors: Sequence[Tensor], free: Sequence[int], **settings: Any) -> None:
        rows, rank = max(x.shape[m] for m in free), factors[0].shape[1]
        nbytes = 3 * rows * rank * rank * x.dtype.itemsize
        memory.check(f"a {rank} x {rank} matrix for each of {rows:,} rows", nbytes, x.device)
        super().__init__(x, factors, free, **settings)
        self._left, self._right = torch.triu_indices(rank, rank, device=x.device)
        ones = x.with_values(torch.ones_like(x.values))
        self._squares = mode_kernels(ones, self._left.numel(), free, **settings)
        numbers = torch.zeros(rank, rank, dtype=torch.int64, device=x.device)
        numbers[self._left, self._right] = torch.arange(self._left.numel(), device=x.device)
        self._numbers = torch.maximum(numbers, numbers.T).flatten()

    def gram(self, mode: int) -> Tensor:
        """H, (size, rank, rank)."""
        rank = self._factors[mode].shape[1]
        # That of the mode itself is not read; it is spared the product.
        products = [f if m == mode else f[:, self._left] * f[:, self._right] for m, f in enumerate(self._factors)]
        compact = self._squares[mode](products)
        return compact[:, self._numbers].view(-1, rank, rank)

    def updated(self, mode: int) -> None:
        """Nothing is kept of factors."""

    def model_square(self, mode: int, gram: Tensor) -> Tensor:
        """The squares of the model at observed entries, from the H of a mode."""
        factor = self._factors[mode]
        return ((factor[:, None] @ gram)[:, 0] * factor).sum(dtype=torch.float64)

    def norms(self) -> Tensor:
        """Return (order, rank) float64 norms of the columns of the present factors."""
        return torch.stack([torch.linalg.vector_norm(f, dim=0, dtype=torch.float64) for f in self._factors])

    def scaled(self, scales: Tensor) -> None:
        """Nothing is kept of factors."""
