"""One sweep of alternating least squares over static buffers, whatever the normal equations are.

In: factors, and `Equations` that give each mode's ``A H = B`` for the others as they are. Out: factors updated in place
and the fit, measured from the last mode's equations: no residual tensor is formed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sparsetc.decomposition.kernels import mode_kernels
from sparsetc.decomposition.linear import Update, balancing, fit_of
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


class Sweep:
    """An iteration: each free mode's update, the fit, and columns brought to one length in all free modes.

    Scaled so, a model is determined by its components alone: whoever starts from a result, in whatever form, goes on
    as the run would have. The sum of the squares of the factors, which `l2_reg` weights, is then the least for them.

    Attributes:
        measures: the fit.
    """

    def __init__(
        self, equations: Equations, factors: Sequence[Tensor], free: Sequence[int], update: Update, l2_reg: float
    ) -> None:
        self._equations = equations
        self._factors = factors
        self._free = tuple(free)
        self._update = update
        self._penalty = l2_reg * torch.eye(factors[0].shape[1]).to(equations.norm) if l2_reg else None
        shares = [[float(mode in free) / len(free)] for mode in range(len(factors))]
        self._shares = equations.norm.new_tensor(shares)
        self.measures = equations.norm.new_zeros(1)

    def __call__(self) -> None:
        for mode in self._free:
            factor, gram = self._factors[mode], self._equations.gram(mode)
            penalised = gram if self._penalty is None else gram + self._penalty.to(gram.dtype)
            rhs = self._equations.rhs(mode)
            self._update(factor, penalised, rhs)
            self._equations.updated(mode)
        inner, square = self._equations.inner(mode, rhs), self._equations.model_square(mode, gram)
        self.measures.copy_(fit_of(self._equations.norm, inner, square))
        self.balance()

    def fit_scale(self) -> None:
        """Scale a start to its best fit; if a larger model fits worse, scale it to the norm of X.

        Nonnegative columns that are too long would be cut to 0, and of components that are too long, in a system that
        says little of them, most would stay and cancel.
        """
        mode = self._free[0]
        rhs, gram = self._equations.rhs(mode), self._equations.gram(mode)
        self._equations.updated(mode)
        inner, square = self._equations.inner(mode, rhs), self._equations.model_square(mode, gram)
        fitting = torch.where(inner > 0, inner / square, self._equations.norm / square.sqrt())
        self._factors[mode].mul_(fitting.to(self._factors[mode].dtype).nan_to_num(1, 1, 1))
        self._equations.updated(mode)
        self.balance()

    def balance(self) -> None:
        """Scale components so that they have the same length in all free modes."""
        scales = balancing(self._equations.norms(), self._shares)
        for mode in self._free:
            self._factors[mode].mul_(scales[mode])
        self._equations.scaled(scales)
