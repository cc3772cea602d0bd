"""The accumulation of results once they are made: ``alpha Z + beta out`` (BCB-SpTC, formula (1)).

In: results, sparse or dense. Out: new ones; nothing is changed in place.
"""

from __future__ import annotations

from typing import Any

import torch

from sparsetc.errors import DeviceError, DtypeError, ShapeError
from sparsetc.tensor.sparse_tensor import SparseTensor
from sparsetc.tensor.sums import fitted, refuse_wrapped

Result = torch.Tensor | SparseTensor


def check_accumulation(out: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Raise unless `out` can be added to a result of this shape, dtype and device; before anything is computed."""
    if not isinstance(out, SparseTensor | torch.Tensor):
        raise DtypeError(f"out must be a SparseTensor or a torch tensor, found {type(out).__name__}")
    if tuple(out.shape) != shape:
        raise ShapeError(f"out must have the result's shape {shape}, found {tuple(out.shape)}")
    if out.dtype != dtype:
        raise DtypeError(f"out must have the operands' dtype {dtype}, found {out.dtype}")
    if out.device != device:
        raise DeviceError(f"out is on {out.device}, the operands are on {device}")


def check_scalars(dtype: torch.dtype, **scalars: Any) -> None:
    """Raise DtypeError unless each scalar can multiply values of this dtype and give the same dtype."""
    for name, value in scalars.items():
        whole = isinstance(value, int) and -(2**63) <= value < 2**63
        fits = whole or (isinstance(value, float) and (dtype.is_floating_point or dtype.is_complex))
        if not fits and not (isinstance(value, complex) and dtype.is_complex):
            raise DtypeError(f"{name} must be a number that {dtype} can be multiplied by, found {value!r}")


def accumulated(result: Result, out: Result | None, alpha: Any, beta: Any) -> Result:
    """``alpha * result + beta * out``: on the union of both patterns if both are sparse, dense if either is.

    With ``beta=0`` `out` is not read, as in BLAS. Integers are int64, and refused where they pass it.
    """
    scaled = _times(result, alpha, "alpha")
    if out is None or beta == 0:
        return scaled
    other = _times(out.to(result.dtype), beta, "beta")
    if isinstance(scaled, SparseTensor) and isinstance(other, SparseTensor):
        if scaled.pattern.blocks is None or scaled.pattern.blocks != other.pattern.blocks:
            scaled, other = scaled.expand_dense(), other.expand_dense()
        pattern = scaled.pattern.like(torch.cat([scaled.coords, other.coords], dim=1), False)
        return SparseTensor._make(pattern, torch.cat([scaled.values, other.values])).coalesce()
    dense = [t.to_dense() if isinstance(t, SparseTensor) else t for t in (scaled, other)]
    total = dense[0] + dense[1]
    if total.dtype == torch.int64:
        refuse_wrapped(total, dense[0].double() + dense[1], "an element of alpha times the result and beta times out")
    return total


def _times(z: Any, factor: Any, name: str) -> Any:
    if factor == 1:
        return z
    if isinstance(z, SparseTensor):
        return z.with_values(_times(z.values, factor, name))
    scaled = z * factor
    if scaled.dtype == torch.int64:
        refuse_wrapped(scaled, z.double() * factor, f"an element times {name}={factor}")
    return scaled


def narrowed(result: Result, dtype: torch.dtype, what: str) -> Result:
    """The result in a dtype; DtypeError for an integer that does not fit."""
    if isinstance(result, SparseTensor):
        return result.with_values(fitted(result.values, dtype, what))
    return fitted(result, dtype, what)
