"""CP and Tucker models: the results of decompositions, and their starting points.

In: weights or a core, and factor matrices. Out: frozen records that unpack as tensorly's ``(weights, factors)`` and
``(core, factors)``, and what a user asks of a model: its norm, its entries, a file of it, the same in other libraries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from sparsetc.decomposition.factored import Factored, fortran, imported
from sparsetc.decomposition.linear import normalized, signs_of_largest
from sparsetc.errors import ShapeError


@dataclass(frozen=True, eq=False, repr=False)
class CP(Factored):
    """A tensor as a sum of `rank` outer products: ``M[i, j, k] = sum_r w[r] A[i, r] B[j, r] C[k, r]``.

    It unpacks as ``weights, factors = cp``, as tensorly's does.

    Raises:
        ShapeError, DtypeError, DeviceError: factors that are not matrices of one rank, dtype and device.

    Attributes:
        weights: (rank,) of the factors' dtype.
        factors: (size, rank) a mode; a list will do.
        fits: ``1 - |X - M| / |X|`` after each iteration of the run that made it; with a mask, over observed entries.
        stopped: why that run ended: ``"converged"``, ``"n_iter_max"``, ``"callback"``, ``"interrupted"`` or
            ``"diverged"`` (values overflowed).
        log_likelihoods: the sum of ``x log m - m`` after each iteration of `cp_apr`, without the terms that no model
            changes.

    Examples:
        >>> model = stc.decomposition.CP(torch.ones(1), [torch.ones(2, 1), torch.ones(3, 1)])
        >>> model.rank, model.shape, model.to_dense().sum()
        (1, (2, 3), tensor(6.))
    """

    KIND = "CP"
    HEAD = "weights"
    HISTORIES = ("fits", "log_likelihoods")
    weights: Tensor
    factors: tuple[Tensor, ...]
    fits: tuple[float, ...] = ()
    stopped: str = ""
    log_likelihoods: tuple[float, ...] = ()

    @property
    def rank(self) -> int:
        """The number of components."""
        return self.weights.shape[0]

    def _ranks(self) -> tuple[int, ...]:
        if self.weights.ndim != 1:
            raise ShapeError(f"weights of a CP model have shape (rank,), found {tuple(self.weights.shape)}")
        return (self.rank,) * len(self.factors)

    def norm(self) -> Tensor:
        """Return ``|M|`` as a float64 scalar on the model's device, computed from the Gram matrices of the factors."""
        gram = torch.stack([f.double().T @ f.double() for f in self.factors]).prod(0)
        weights = self.weights.double()
        return (weights @ gram @ weights).clamp(min=0).sqrt()

    @property
    def _half(self) -> int:
        """The number of modes that index rows when the full tensor is made by one matrix product."""
        return min(range(1, self.order + 1), key=lambda n: prod(self.shape[:n]) + prod(self.shape[n:]))

    def _most_elements(self) -> int:
        sides = prod(self.shape[: self._half]) + prod(self.shape[self._half :])
        return prod(self.shape) + 2 * self.rank * sides

    def _dense(self) -> Tensor:
        half = self._half
        left = _khatri_rao(self.weights, self.factors[:half])
        right = _khatri_rao(torch.ones_like(self.weights), self.factors[half:])
        return (left @ right.T).reshape(self.shape)

    def _entries(self, at: Tensor) -> Tensor:
        product = self.weights
        for factor, rows in zip(self.factors, at, strict=True):
            product = product * factor[rows]
        return product.sum(-1)

    def arranged(self) -> CP:
        """Return the model in a canonical form: columns of unit length, positive weights, components by falling weight.

        The entry of the largest magnitude is positive in every column but those of the last mode, which take the signs.
        """
        lengths, units = normalized(self.factors, range(self.order))
        weights, factors = self.weights * lengths, list(units)
        for mode, factor in enumerate(units[:-1]):
            signs = signs_of_largest(factor)
            weights, factors[mode] = weights * signs, factor * signs
        factors[-1] = units[-1] * torch.where(weights < 0, -1, 1).to(self.dtype)
        order = torch.argsort(weights.abs(), descending=True, stable=True)
        return replace(self, weights=weights.abs()[order], factors=tuple(f[:, order] for f in factors))

    def to_pyttb(self) -> Any:
        """Return the model as a ``pyttb.ktensor`` in float64. Raise ImportError without pyttb."""
        return imported("pyttb").ktensor([fortran(f) for f in self.factors], fortran(self.weights))


def _khatri_rao(weights: Tensor, factors: tuple[Tensor, ...]) -> Tensor:
    """(product of sizes, rank): weights times all products of a row of each, the last factor's rows fastest."""
    product = weights[None]
    for factor in factors:
        product = (product[:, None] * factor).flatten(0, 1)
    return product


@dataclass(frozen=True, eq=False, repr=False)
class Tucker(Factored):
    """A tensor as a small core and a matrix a mode: ``M[i, j, k] = sum_rst G[r, s, t] A[i, r] B[j, s] C[k, t]``.

    It unpacks as ``core, factors = model``, as tensorly's does.

    Raises:
        ShapeError, DtypeError, DeviceError: factors that do not fit the core's sizes, dtype and device.

    Attributes:
        core: the core, whose sizes are the ranks.
        factors: (size, rank of the mode) a mode, of orthonormal columns if `tucker` made it; a list will do.
        fits: ``1 - |X - M| / |X|`` after each iteration of the run that made it.
        stopped: why that run ended, as in `CP`.

    Examples:
        >>> model = stc.decomposition.Tucker(torch.ones(1, 1), [torch.ones(2, 1), torch.ones(3, 1)])
        >>> model.rank, model.shape, model.to_dense().sum()
        ((1, 1), (2, 3), tensor(6.))
    """

    KIND = "Tucker"
    HEAD = "core"
    HISTORIES = ("fits",)
    core: Tensor
    factors: tuple[Tensor, ...]
    fits: tuple[float, ...] = ()
    stopped: str = ""

    @property
    def rank(self) -> tuple[int, ...]:
        """Sizes of the core."""
        return tuple(self.core.shape)

    def _ranks(self) -> tuple[int, ...]:
        return self.rank

    def norm(self) -> Tensor:
        """Return ``|M|`` as a float64 scalar on the model's device, from the core and the factors' Gram matrices."""
        core = self.core.double()
        seen = _multiplied(core, [f.double().T @ f.double() for f in self.factors])
        return (seen * core).sum().clamp(min=0).sqrt()

    def _most_elements(self) -> int:
        # of each product the core before and after, and both with the mode in front
        steps = [prod(self.shape[:mode]) * prod(self.rank[mode:]) for mode in range(self.order + 1)]
        return 2 * max(before + after for before, after in pairwise(steps))

    def _dense(self) -> Tensor:
        return _multiplied(self.core, self.factors)

    def _entries(self, at: Tensor) -> Tensor:
        rows = self.factors[0][at[0]] @ self.core.reshape(self.rank[0], -1)
        for mode in range(1, self.order):  # (part, ranks of this mode, those of later ones)
            rows = rows.unflatten(1, (self.rank[mode], prod(self.rank[mode + 1 :])))
            rows = (self.factors[mode][at[mode]][:, None] @ rows)[:, 0]
        return rows[:, 0]

    def to_pyttb(self) -> Any:
        """Return the model as a ``pyttb.ttensor`` in float64. Raise ImportError without pyttb."""
        pyttb = imported("pyttb")
        return pyttb.ttensor(pyttb.tensor(fortran(self.core)), [fortran(f) for f in self.factors])


def _multiplied(core: Tensor, matrices: Any) -> Tensor:
    """The core times a (size, rank) matrix along each mode."""
    for mode, matrix in enumerate(matrices):
        core = torch.tensordot(matrix, core.movedim(mode, 0), 1).movedim(0, mode)
    return core
