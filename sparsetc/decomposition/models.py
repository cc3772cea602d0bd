"""CP and Tucker: what decompositions return, and what they start from.

In: weights or a core, and factor matrices. Out: frozen records that unpack as tensorly's ``(weights, factors)`` and
``(core, factors)``, and what a user asks of a model: its norm, its entries, a file of it, the same in other libraries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from sparsetc.decomposition.factored import (
    Factored,
    check_alike,
    check_memory,
    pyttb_ktensor,
    pyttb_ttensor,
    tensorly_cp,
    tensorly_tucker,
)
from sparsetc.decomposition.linear import divisor, hadamard, signs_of_largest
from sparsetc.errors import DecompositionError, ShapeError


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
    """

    KIND, HEAD, NUMBERS = "CP", "weights", ("fits", "log_likelihoods")
    weights: torch.Tensor
    factors: tuple[torch.Tensor, ...]
    fits: tuple[float, ...] = ()
    stopped: str = ""
    log_likelihoods: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "factors", tuple(self.factors))
        if not self.factors:
            raise ShapeError("a CP model needs a factor for each mode, found none")
        for mode, factor in enumerate(self.factors):
            _check_cp_factor(factor, mode, self.weights)

    # -- what it is ---------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """The number of components."""
        return self.weights.shape[0]

    def __repr__(self) -> str:
        known = self.rank > 0 and not self.weights.is_meta
        weights = "weights {:.4g} to {:.4g}, ".format(*self.weights.aminmax()) if known else ""
        size = f"shape={self.shape}, rank={self.rank}{self._run()}"
        return f"CP({size}, {weights}dtype={self.dtype}, device={self.device})"

    # -- entries ------------------------------------------------------------------------------------------------------

    def norm(self) -> torch.Tensor:
        """``|M|``, a float64 scalar on the model's device; computed from the factors' Gram matrices."""
        grams = torch.stack([f.double().T @ f.double() for f in self.factors])
        weights = self.weights.double()
        return (weights @ hadamard(grams) @ weights).clamp(min=0).sqrt()

    def to_dense(self, memory_limit: int | str | None = None) -> torch.Tensor:
        """The tensor in full: strided, of ``shape``.

        Raises:
            OutOfMemoryError: it would take more than ``memory_limit`` bytes (by default what the options say).
        """
        check_memory(self.shape, self.dtype, self.device, memory_limit)
        half = min(range(1, self.order + 1), key=lambda n: prod(self.shape[:n]) + prod(self.shape[n:]))
        left = _khatri_rao((self.factors[0] * self.weights, *self.factors[1:half]))
        right = _khatri_rao(self.factors[half:]) if half < self.order else torch.ones_like(self.weights)[None]
        return (left @ right.T).reshape(self.shape)

    @property
    def _width(self) -> int:
        return self.rank

    def _entries(self, at: torch.Tensor) -> torch.Tensor:
        product = self.weights
        for factor, rows in zip(self.factors, at, strict=True):
            product = product * factor[rows]
        return product.sum(-1)

    # -- the same model, otherwise ------------------------------------------------------------------------------------

    def arranged(self) -> CP:
        """The model as a reader wants it: columns of unit length, components by falling weight, weights positive.

        The entry of the largest magnitude is positive in every column but those of the last mode, which take the signs.
        """
        weights, factors = self.weights, []
        for mode, factor in enumerate(self.factors):
            norms = torch.linalg.vector_norm(factor, dim=0)
            weights = weights * norms
            signs = signs_of_largest(factor)
            if mode < self.order - 1:
                weights = weights * signs
                norms = norms * signs
            factors.append(factor / divisor(norms))
        factors[-1] = factors[-1] * torch.where(weights < 0, -1, 1).to(factors[-1].dtype)
        order = torch.argsort(weights.abs(), descending=True, stable=True)
        return replace(self, weights=weights.abs()[order], factors=tuple(f[:, order] for f in factors))

    def to_tensorly(self) -> Any:
        """A ``tensorly.cp_tensor.CPTensor`` of tensorly's current backend; ImportError without tensorly."""
        return tensorly_cp(self.weights, self.factors)

    def to_pyttb(self) -> Any:
        """A ``pyttb.ktensor``, in float64; ImportError without pyttb."""
        return pyttb_ktensor(self.weights, self.factors)


def _check_cp_factor(factor: Any, mode: int, weights: Any) -> None:
    if not isinstance(weights, torch.Tensor) or not isinstance(factor, torch.Tensor):
        found = type(factor if isinstance(weights, torch.Tensor) else weights).__name__
        raise DecompositionError(f"weights and factors of a CP model are torch tensors, found {found}")
    if weights.ndim != 1 or factor.ndim != 2 or factor.shape[1] != weights.shape[0]:
        raise ShapeError(
            f"a CP model has weights (rank,) and factors (size, rank), found {tuple(weights.shape)} and, for mode "
            f"{mode}, {tuple(factor.shape)}"
        )
    check_alike(factor, mode, weights, "CP", "the weights have", "the weights are")


def _khatri_rao(factors: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """(product of sizes, rank): all products of a row of each, the last factor's rows fastest."""
    product = factors[0]
    for factor in factors[1:]:
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
    """

    KIND, HEAD, NUMBERS = "Tucker", "core", ("fits",)
    core: torch.Tensor
    factors: tuple[torch.Tensor, ...]
    fits: tuple[float, ...] = ()
    stopped: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "factors", tuple(self.factors))
        if not isinstance(self.core, torch.Tensor) or self.core.ndim != len(self.factors) or not self.factors:
            found = (
                f"shape {tuple(self.core.shape)}" if isinstance(self.core, torch.Tensor) else type(self.core).__name__
            )
            raise ShapeError(f"the core must be a tensor of {len(self.factors)} modes, one a factor, found {found}")
        for mode, factor in enumerate(self.factors):
            _check_tucker_factor(factor, mode, self.core)

    # -- what it is ---------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> tuple[int, ...]:
        """Sizes of the core."""
        return tuple(self.core.shape)

    def __repr__(self) -> str:
        known = self.core.numel() and not self.core.is_meta
        core = f"core up to {float(self.core.abs().max()):.4g}, " if known else ""
        size = f"shape={self.shape}, rank={self.rank}{self._run()}"
        return f"Tucker({size}, {core}dtype={self.dtype}, device={self.device})"

    # -- entries ------------------------------------------------------------------------------------------------------

    def norm(self) -> torch.Tensor:
        """``|M|``, a float64 scalar on the model's device: of the core, seen through the factors' Gram matrices."""
        core = self.core.double()
        seen = _multiplied(core, [f.double().T @ f.double() for f in self.factors])
        return (seen * core).sum().clamp(min=0).sqrt()

    def to_dense(self, memory_limit: int | str | None = None) -> torch.Tensor:
        """The tensor in full: strided, of ``shape``.

        Raises:
            OutOfMemoryError: it would take more than ``memory_limit`` bytes (by default what the options say).
        """
        check_memory(self.shape, self.dtype, self.device, memory_limit)
        return _multiplied(self.core, self.factors)

    @property
    def _width(self) -> int:
        return prod(self.rank[1:])

    def _entries(self, at: torch.Tensor) -> torch.Tensor:
        rows = self.factors[0][at[0]] @ self.core.reshape(self.rank[0], -1)
        for mode in range(1, self.order):  # (part, ranks of this mode, those of later ones)
            rows = rows.unflatten(1, (self.rank[mode], prod(self.rank[mode + 1 :])))
            rows = (self.factors[mode][at[mode]][:, None] @ rows)[:, 0]
        return rows[:, 0]

    # -- the same model, otherwise ------------------------------------------------------------------------------------

    def to_tensorly(self) -> Any:
        """A ``tensorly.tucker_tensor.TuckerTensor`` of tensorly's current backend; ImportError without tensorly."""
        return tensorly_tucker(self.core, self.factors)

    def to_pyttb(self) -> Any:
        """A ``pyttb.ttensor``, in float64; ImportError without pyttb."""
        return pyttb_ttensor(self.core, self.factors)


def _check_tucker_factor(factor: Any, mode: int, core: torch.Tensor) -> None:
    if not isinstance(factor, torch.Tensor):
        raise DecompositionError(f"factors of a Tucker model are torch tensors, found {type(factor).__name__}")
    if factor.ndim != 2 or factor.shape[1] != core.shape[mode]:
        raise ShapeError(
            f"the factor of mode {mode} must have shape (size, {core.shape[mode]}), as the core has, found "
            f"{tuple(factor.shape)}"
        )
    check_alike(factor, mode, core, "Tucker", "the core has", "the core is")


def _multiplied(core: torch.Tensor, matrices: Any) -> torch.Tensor:
    """The core times a (size, rank) matrix along each mode."""
    for mode, matrix in enumerate(matrices):
        core = torch.tensordot(matrix, core.movedim(mode, 0), 1).movedim(0, mode)
    return core
