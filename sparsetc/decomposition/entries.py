"""Entries of a model at coordinates, a bounded part at a time.

In: coordinates as a user gives them. Out: checked coordinates, and the values that a model's own rule gives at them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sparsetc.errors import DtypeError, ShapeError
from sparsetc.tensor.coords import check_range

CHUNK = 1 << 22
"""Elements of an intermediate result at a time: 16 to 32 MB."""


def as_coords(given: Any, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """(order, n) int64 on a device, checked (one transfer); ShapeError, DtypeError, CoordinateError."""
    try:
        coords = torch.as_tensor(given, device=device)
    except (TypeError, ValueError) as error:
        raise ShapeError(f"coordinates must be a rectangle of integers ({len(shape)}, n): {error}") from None
    if not coords.numel() and not isinstance(given, torch.Tensor):
        coords = coords.long()  # the dtype of empty lists says nothing
    if coords.dtype.is_floating_point or coords.dtype.is_complex or coords.dtype == torch.bool:
        raise DtypeError(f"coordinates are integers, found {coords.dtype}")
    if coords.ndim != 2 or coords.shape[0] != len(shape):
        raise ShapeError(f"coordinates must have shape ({len(shape)}, n), found {tuple(coords.shape)}")
    coords = coords.long()
    check_range(coords, shape, "entry")
    return coords


def in_chunks(
    entries: Callable[[torch.Tensor], torch.Tensor], coords: torch.Tensor, width: int, like: torch.Tensor
) -> torch.Tensor:
    """(n,) what `entries` gives for (order, part) of the coordinates, an entry of which takes `width` elements."""
    step = max(1, CHUNK // max(1, width))
    if coords.shape[1] <= step:
        return entries(coords)
    out = like.new_empty(coords.shape[1])
    for start in range(0, coords.shape[1], step):
        out[start : start + step] = entries(coords[:, start : start + step])
    return out
