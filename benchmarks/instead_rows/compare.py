"""Relative errors of results that may be dense or sparse, of sparsetc, torch, numpy or scipy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

import sparsetc as stc


def error_of(result: Any, expected: Any) -> float:
    """Return the largest relative error of the results, norm over norm; inf where shapes or patterns differ."""
    pairs = zip(listed(result), listed(expected), strict=False)
    return max(error_of_one(as_torch(one), as_torch(other)) for one, other in pairs)


def listed(results: Any) -> list[Any]:
    """Return several results as a list, and one as a list of one."""
    return list(results) if isinstance(results, tuple | list) else [results]


def as_torch(result: Any) -> torch.Tensor:
    """Return a result as a tensor of torch: strided, or sparse COO."""
    if isinstance(result, stc.SparseTensor):
        return result.to_torch(torch.sparse_coo)
    if hasattr(result, "tocoo"):  # of scipy
        coo = result.tocoo()
        return torch.sparse_coo_tensor(np.stack(coo.coords), coo.data, coo.shape)
    result = torch.as_tensor(result).detach()
    if result.layout == torch.strided:
        return result
    coo = result.to_sparse_coo()  # of a CSR product columns are in any order, though torch calls it coalesced
    return torch.sparse_coo_tensor(coo._indices(), coo._values(), coo.shape, is_coalesced=False)


def error_of_one(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Compare one result: entry by entry if a sparse one is expected, else position by position."""
    if expected.layout == torch.strided:
        result, expected = result.double().to_dense().squeeze(), expected.double().squeeze()
    if result.shape != expected.shape:
        return math.inf
    if expected.layout == torch.strided:
        return float((result - expected).norm() / expected.norm())
    result, expected = result.coalesce(), expected.coalesce()
    if not torch.equal(result.indices(), expected.indices()):
        return math.inf
    return error_of_one(result.values(), expected.values())
