"""The normal equations of alternating least squares, over static buffers.

In: a sparse tensor, and factors. Out: `Equations`, which give each mode's ``A H = B`` for the others as they are, and
what a sweep measures from the last mode's: no residual tensor is formed.

Completion fits the observed entries alone, by one least-squares problem a row: its H is one a row, the sum over the
row's observed entries of the outer squares of the other factors' rows, ``"ijk,jr,kr,js,ks->irs"`` on a pattern of ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sparsetc.decomposition import checks
from sparsetc.decomposition.kernels import mode_kernels
from sparsetc.errors import DecompositionError, DeviceError, FormatError, ShapeError
from sparsetc.support.checks import check_memory
from sparsetc.tensor.elementwise import is_strided, where_holds
from sparsetc.tensor.inputs import as_dense
from sparsetc.tensor.sparse_tensor import SparseTensor


class Equations:
    """The normal equations of a CP model, over factors that are changed in place.

    B is an MTTKRP, H the Hadamard product of the other factors' Gram matrices. Of several ranks each has a box of X,
    and in *blocks* the rows of all factors that its box meets; of these it updates a share, which are its factors here.
    B is summed over the ranks that have the same rows, and updated rows go back to these. Gram matrices and inner
    products are sums over all ranks.

    Attributes:
        norm: float64 scalar: ``|X|``, or that of its observed entries.
        grams: (order, rank, rank) float64, of the factors as they are.
    """

    def __init__(
        self,
        x: SparseTensor,
        factors: Sequence[Tensor],
        free: Sequence[int],
        blocks: Sequence[Tensor] | None = None,
        summed: Callable[[Tensor], Tensor] = lambda x: x,
        scattered: Callable[[int, Tensor], Tensor] = lambda mode, rhs: rhs,
        sent: Callable[[int], object] = lambda mode: None,
        **settings: Any,
    ) -> None:
        """Compile the MTTKRPs.

        Args:
            x: the tensor, or this rank's box of it.
            factors: (size, rank) a mode, or this rank's share of the rows.
            free: the modes whose equations are asked for.
            blocks: (rows of the box, rank) a mode, those of `factors` among them; by default the factors themselves.
            summed: what adds up a tensor over all ranks, in place.
            scattered: what adds up a mode's B over the ranks that have its rows; returns this rank's share.
            sent: what sends this rank's share of a mode to the blocks of all ranks that have its rows.
            settings: as for `einsum`.
        """
        self.norm = torch.linalg.vector_norm(x.values, dtype=torch.float64)
        self._factors, self._blocks = factors, factors if blocks is None else blocks
        self._summed = summed
        self._scattered = scattered
        self._sent = sent
        rank = factors[0].shape[1]
        self._kernels = mode_kernels(x, rank, free, **settings)
        self.grams = self.norm.new_empty(len(factors), rank, rank)
        for mode in range(len(factors)):
            self._make_gram(mode)

    def join(self) -> None:
        """Sum the equations of one rank's rows over all ranks."""
        self.norm = self._summed(self.norm.square()).sqrt()
        self._summed(self.grams)

    def gram(self, mode: int) -> Tensor:
        """H, (rank, rank) or (size, rank, rank)."""
        self.grams[mode].fill_(1)  # it is made again once the factor is
        return self.grams.prod(0)

    def rhs(self, mode: int) -> Tensor:
        """B, (size, rank): the MTTKRP."""
        return self._scattered(mode, self._kernels[mode](self._blocks))

    def updated(self, mode: int) -> None:
        """The factor of a mode has changed: send its rows, and make its Gram matrix again."""
        self._sent(mode)
        self._make_gram(mode)
        self._summed(self.grams[mode])

    def model_square(self, mode: int, gram: Tensor) -> Tensor:
        """``|M|^2`` where X is measured, a mode having just been updated by its H."""
        return (gram * self.grams[mode]).sum()

    def norms(self) -> Tensor:
        """(order, rank) float64 lengths of the factors' columns."""
        return self.grams.diagonal(dim1=1, dim2=2).sqrt()

    def scaled(self, scales: Tensor) -> None:
        """The factors' columns were multiplied by (order, rank) scales."""
        self.grams.mul_(scales[:, :, None]).mul_(scales[:, None, :])
        for block, factor, scale in zip(self._blocks, self._factors, scales, strict=True):
            if block is not factor:
                block.mul_(scale)

    def inner(self, mode: int, rhs: Tensor) -> Tensor:
        """Float64 scalar: the sum of the products of B and the factor of a mode."""
        return self._summed((rhs * self._factors[mode]).sum(dtype=torch.float64))

    def _make_gram(self, mode: int) -> None:
        """The Gram matrix of a factor, of this rank's rows."""
        factor = self._factors[mode]
        self.grams[mode].copy_(factor.T @ factor)


def observed(x: SparseTensor, mask: Any) -> SparseTensor:
    """Return the values at all known entries of a mask, 0 where x has no entry.

    Args:
        x: of single nonzeros, coalesced.
        mask: ``"observed"`` for x's own positions, or a sparse or dense tensor that is not 0 at those that are known.

    Raises:
        DecompositionError, ShapeError, DeviceError, FormatError: of a mask that is none, that has NaN or that knows
            nothing, and of known values that are not finite.
    """
    entries = x if isinstance(mask, str) and mask == "observed" else _on_mask(x, mask)
    if entries.nnz == 0:
        raise FormatError("the mask has no observed entry")
    checks.check_values(entries.values)
    return entries


def _on_mask(x: SparseTensor, mask: Any) -> SparseTensor:
    """Return the tensor on the positions at which a mask is not 0."""
    where = as_dense(mask, "mask")
    sparse = SparseTensor.from_dense(where) if is_strided(where) else SparseTensor.coerce(where)
    if sparse is None:
        raise DecompositionError(
            f'mask must be "observed", or a sparse or dense tensor of x\'s shape, found {mask!r:.80}'
        )
    if sparse.shape != x.shape:
        raise ShapeError(f"mask must have x's shape {x.shape}, found {sparse.shape}")
    if sparse.device != x.device:
        raise DeviceError(f"mask is on {sparse.device}, x is on {x.device}; move one of them with .to()")
    if bool(sparse.values.isnan().any()):
        raise FormatError("the mask has NaN; it must be 0 where an entry is not known, as ~x.isnan() is")
    known = sparse.expand_dense().drop()
    zeros: Any = known.with_values(torch.zeros_like(known.values, dtype=x.dtype))
    return zeros + where_holds(x, known, True)  # type: ignore[no-any-return]


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
        check_memory(f"a {rank} x {rank} matrix for each of {rows:,} rows", nbytes, x.device)
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
