"""Tensors whose nonzeros go to fibers along several modes.

Nothing here imports triton, so that the interpreter's tests may set their environment first.
"""

from __future__ import annotations

import torch
from cases import random_values

import sparsetc as stc


def crossed(order: int, dtype: torch.dtype, size: int = 11) -> stc.SparseTensor:
    """A tensor with a whole fiber along each mode, and so a part for each; no one else has values of float32."""
    fibers = []
    for along in range(order):
        fiber = torch.full((order, size), along)
        fiber[along] = torch.arange(size)
        fibers.append(fiber)
    coords = torch.unique(torch.cat(fibers, 1), dim=1)
    values = random_values((coords.shape[1],), dtype, 1)
    return stc.SparseTensor(coords, values.tolist() if dtype == torch.float32 else values, (size,) * order)
