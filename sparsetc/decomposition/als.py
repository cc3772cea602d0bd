"""One sweep of alternating least squares over static buffers, whatever the normal equations are.

In: factors, and `Equations` that give each mode's ``A H = B`` for the others as they are. Out: factors updated in place
and the fit, measured from the last mode's equations: no residual tensor is formed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from sparsetc.decomposition.kernels import mode_kernels
from sparsetc.decomposition.linear import Update, balancing, fit_of, hadamard
from sparsetc.tensor.sparse_tensor import SparseTensor


class Aside:
    """A second stream of a GPU; on a CPU calls come one after the other, as they are made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def begin(self) -> Iterator[None]:
        """What is called in the block runs after what was called before, and beside what comes after the block."""
        if self._stream is None:
            yield
            return
        # Memory that one block frees is taken by the next, which waits for all that was called before it.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """What is called from here on runs after what the last block called."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


class Equations(Protocol):
    """The normal equations of a CP model, over factors that are changed in place.

    Attributes:
        norm: float64 scalar: ``|X|``, or that of its observed entries.
    """

    norm: torch.Tensor

    def gram(self, mode: int) -> torch.Tensor:
        """H of a mode, (rank, rank) or (size, rank, rank)."""

    def rhs(self, mode: int) -> torch.Tensor:
        """B of a mode, (size, rank)."""

    def updated(self, mode: int) -> None:
        """The factor of a mode has changed."""

    def model_square(self, mode: int, gram: torch.Tensor) -> torch.Tensor:
        """``|M|^2`` where X is measured, a mode having just been updated by its H."""

    def norms(self) -> torch.Tensor:
        """(order, rank) float64 lengths of the factors' columns."""

    def scaled(self, scales: torch.Tensor) -> None:
        """The factors' columns were multiplied by (order, rank) scales."""

    def inner(self, mode: int, rhs: torch.Tensor) -> torch.Tensor:
        """Float64 scalar: the sum of the products of B and the factor of a mode."""


class WholeEquations:
    """The equations of the whole tensor: B is an MTTKRP, H the Hadamard product of the other factors' Gram matrices.

    Attributes:
        grams: (order, rank, rank) float64, of the factors as they are.
    """

    def __init__(self, x: SparseTensor, factors: Sequence[torch.Tensor], free: Sequence[int], **settings: Any) -> None:
        self.norm = torch.linalg.vector_norm(x.values, dtype=torch.float64)
        self._factors = factors
        self._kernels = mode_kernels(x, factors[0].shape[1], free, **settings)
        self.grams = torch.stack([self._gram(m) for m in range(len(factors))])

    def gram(self, mode: int) -> torch.Tensor:
        """H, (rank, rank) float64."""
        self.grams[mode].fill_(1)  # it is made again once the factor is
        return hadamard(self.grams)

    def rhs(self, mode: int) -> torch.Tensor:
        """B, the MTTKRP."""
        return self._kernels[mode](self._factors)

    def updated(self, mode: int) -> None:
        """Make the factor's Gram matrix again."""
        self.grams[mode].copy_(self._gram(mode))

    def advanced(self, mode: int, inner: torch.Tensor | None) -> None:
        """The factor of a mode has changed; its Gram matrix is in place, and in `inner` its inner product with B."""

    def scalable(self, free: Sequence[int]) -> list[tuple[int, torch.Tensor]]:
        """The matrices whose columns are scaled with those of the free modes' factors, each with its mode."""
        return [(mode, self._factors[mode]) for mode in free]

    def _gram(self, mode: int) -> torch.Tensor:
        """(rank, rank) float64 Gram matrix of a factor."""
        factor = self._factors[mode]
        return (factor.T @ factor).double()

    def model_square(self, mode: int, gram: torch.Tensor) -> torch.Tensor:
        """The sum of all Gram matrices' Hadamard product."""
        return (gram * self.grams[mode]).sum()

    def norms(self) -> torch.Tensor:
        """From the Gram matrices' diagonals."""
        return self.grams.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt()

    def scaled(self, scales: torch.Tensor) -> None:
        """Scale the Gram matrices as their factors were."""
        self.grams.mul_(scales[:, :, None]).mul_(scales[:, None, :])

    def inner(self, mode: int, rhs: torch.Tensor) -> torch.Tensor:
        """In float64."""
        return inner(rhs, self._factors[mode])


def inner(rhs: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """The sum of the products of two matrices, a float64 scalar."""
    return (rhs * factor).sum(dtype=torch.float64)


class Sweep:
    """An iteration: each free mode's update, the fit, and columns brought to one length in all free modes.

    Scaled so, a model is determined by its components alone: whoever starts from a result, in whatever form, goes on
    as the run would have. The sum of the squares of the factors, which `l2_reg` weights, is then the least for them.

    Attributes:
        measures: the fit.
    """

    def __init__(
        self, equations: Equations, factors: Sequence[torch.Tensor], free: Sequence[int], update: Update, l2_reg: float
    ) -> None:
        self._equations, self._factors, self._free = equations, factors, tuple(free)
        self._update, self._l2_reg = update, l2_reg
        self._aside = Aside(factors[0].device)
        is_free = [[mode in free] for mode in range(len(factors))]
        self._is_free = torch.tensor(is_free, device=factors[0].device)
        self.measures = torch.zeros(1, dtype=torch.float64, device=factors[0].device)

    def __call__(self) -> None:
        for mode in self._free:
            with self._aside.begin():  # on a GPU H is inverted beside the MTTKRP, of which it takes about a half
                system = self._system(mode)
            rhs = self._equations.rhs(mode)
            self._aside.join()
            self._advance(mode, rhs, system)
        self._finish(mode, rhs, system)

    def _system(self, mode: int) -> tuple[torch.Tensor, ...]:
        """H of a mode, and what its update reads of it."""
        gram = self._equations.gram(mode)
        return gram, *self._update.system(gram, self._factors[mode].dtype, self._l2_reg)

    def _advance(self, mode: int, rhs: torch.Tensor, system: tuple[torch.Tensor, ...]) -> None:
        """Update a factor, and what is kept of it."""
        self._update.apply(self._factors[mode], rhs, system[1:])
        self._equations.updated(mode)

    def _finish(self, mode: int, rhs: torch.Tensor, system: tuple[torch.Tensor, ...]) -> None:
        """Measure the fit, of the mode that was updated last, and balance."""
        inner, square = self._equations.inner(mode, rhs), self._equations.model_square(mode, system[0])
        self.measures.copy_(fit_of(self._equations.norm, inner, square))
        self.balance()

    def fit_scale(self) -> None:
        """Scale a start as it fits best, or, where more of it fits worse, to the length of X.

        Nonnegative columns that are too long would be cut to 0, and of components that are too long, in a system that
        says little of them, most would stay and cancel.
        """
        mode = self._free[0]
        rhs, gram = self._equations.rhs(mode), self._equations.gram(mode)
        self._equations.updated(mode)
        inner, square = self._equations.inner(mode, rhs), self._equations.model_square(mode, gram)
        fitting = torch.where(inner > 0, inner / square, self._equations.norm / square.sqrt())
        self._factors[mode].mul_(fitting.nan_to_num(1, 1, 1))
        self._equations.updated(mode)
        self.balance()

    def balance(self) -> None:
        """Scale components so that they have the same length in all free modes."""
        scales = balancing(self._equations.norms(), self._is_free)
        for mode in self._free:
            self._factors[mode].mul_(scales[mode])
        self._equations.scaled(scales)
