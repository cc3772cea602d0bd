"""Tucker: what `tucker` returns, and what it starts from.

In: a core and factor matrices. Out: a frozen record that unpacks as tensorly's ``(core, factors)``, and what a user
asks of a model: its norm, its entries, a file of it, the same in other libraries.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from sparsetc.decomposition.factored import (
    Factored,
    as_coords,
    check_alike,
    check_memory,
    in_chunks,
    pyttb_ttensor,
    tensorly_tucker,
)
from sparsetc.errors import DecompositionError, ShapeError


@dataclass(frozen=True, eq=False, repr=False)
class Tucker(Factored):
    """A tensor as a small core and a matrix a mode: ``M[i, j, k] = sum_rst G[r, s, t] A[i, r] B[j, s] C[k, t]``.

    It unpacks as ``core, factors = model``, as tensorly's does.

    Raises:
        ShapeError, DtypeError, DeviceError: factors that do not fit the core's sizes, dtype and device.
    """

    KIND, HEAD, NUMBERS = "Tucker", "core", ("fits",)
    core: torch.Tensor
    """The core, whose sizes are the ranks."""
    factors: tuple[torch.Tensor, ...]
    """(size, rank of the mode) a mode, of orthonormal columns if `tucker` made it; a list will do."""
    fits: tuple[float, ...] = ()
    """``1 - |X - M| / |X|`` after each iteration of the run that made it."""
    stopped: str = ""
    """Why that run ended, as in `CP`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "factors", tuple(self.factors))
        if not isinstance(self.core, torch.Tensor) or self.core.ndim != len(self.factors) or not self.factors:
            found = (
                f"shape {tuple(self.core.shape)}" if isinstance(self.core, torch.Tensor) else type(self.core).__name__
            )
            raise ShapeError(f"the core must be a tensor of {len(self.factors)} modes, one a factor, found {found}")
        for mode, factor in enumerate(self.factors):
            _check_factor(factor, mode, self.core)

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

    def values_at(self, coords: Any) -> torch.Tensor:
        """(n,) entries of the tensor at ``coords``, computed a part at a time.

        Args:
            coords: (order, n) integers, 0-based; a tensor, an ndarray or nested lists.

        Raises:
            ShapeError, DtypeError, CoordinateError: of coordinates that are not of this tensor.
        """

        def entries(at: torch.Tensor) -> torch.Tensor:
            found = self.factors[0][at[0]] @ self.core.reshape(self.rank[0], -1)
            for mode in range(1, self.order):  # (part, ranks of this mode, those of later ones)
                found = found.unflatten(1, (self.rank[mode], prod(self.rank[mode + 1 :])))
                found = (self.factors[mode][at[mode]][:, None] @ found)[:, 0]
            return found[:, 0]

        return in_chunks(entries, as_coords(coords, self.shape, self.device), prod(self.rank[1:]), self.core)

    # -- the same model, otherwise ------------------------------------------------------------------------------------

    def to_tensorly(self) -> Any:
        """A ``tensorly.tucker_tensor.TuckerTensor`` of tensorly's current backend; ImportError without tensorly."""
        return tensorly_tucker(self.core, self.factors)

    def to_pyttb(self) -> Any:
        """A ``pyttb.ttensor``, in float64; ImportError without pyttb."""
        return pyttb_ttensor(self.core, self.factors)


def _check_factor(factor: Any, mode: int, core: torch.Tensor) -> None:
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
