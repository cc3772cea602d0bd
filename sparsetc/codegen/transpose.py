"""Contiguous copies of views whose last two modes, or blocks of modes, are in the other order.

In: a strided view, as `permute` gives it. Out: a contiguous tensor. Where the view is of matrices whose rows are
contiguous, a kernel of Triton's copies them on a GPU by tiles; torch's own copy reads or writes one element in a sector
of memory, and takes up to four times as long (NVIDIA H100, float16, a CUDA graph of the copy: 4096 x 4096 in 31 us in
place of 129, 256 x 4096 in 7.3 in place of 13.0, 16 x 4096 in 5.4, not 6.1; `benchmarks/results/transpose.json`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from sparsetc.codegen import COLUMNS, ROWS
from sparsetc.codegen.launch import FUSED, by_hand, launch_of
from sparsetc.support import Ints
from sparsetc.tensor.dtypes import WORDS

FEWEST = {1: 1 << 15, 2: 1 << 15, 4: 1 << 16, 8: 1 << 18}
"""Elements, by their bytes, from which on the kernel is launched: of fewer torch's copy takes as long, or less."""


def contiguous(view: Tensor) -> Tensor:
    """Return the tensor contiguous: itself if it is so, else a copy.

    Args:
        view: strided, of any dtype and on any device; a gradient is recorded as by `torch.Tensor.contiguous`.
    """
    recorded = view.requires_grad and torch.is_grad_enabled()
    if not view.is_cuda or recorded or view.is_contiguous() or type(view) is not Tensor:
        return view.contiguous()
    size = view.element_size()
    few = view.numel() < FEWEST.get(size, view.numel() + 1)
    launch = None if few else _launch(view.shape, view.stride(), view.device.type)
    if launch is None:
        return view.contiguous()
    result = torch.empty(view.shape, dtype=view.dtype, device=view.device)
    with torch.cuda.device_of(result):  # Triton launches on the current device
        launch(view.view(WORDS[size]), result.view(WORDS[size]))
    return result


@lru_cache(maxsize=256)
def _launch(shape: Ints, strides: Ints, device: str) -> Callable[..., None] | None:
    """Return a launch of the kernel for views of this shape, called with source and result; None if none can."""
    matrices = as_matrices(shape, strides)
    if matrices is None:
        return None
    (count, source_matrix, result_matrix), (rows, source_row, _), (columns, _, result_row) = matrices
    tiles = -(-rows // ROWS), -(-columns // COLUMNS)
    numbers = source_matrix, source_row, result_matrix, result_row, rows, columns, *tiles
    varied, options = (0, len(numbers) + 1), {"num_warps": 2, "num_stages": 1, **FUSED}
    launch = launch_of(by_hand("transpose"), count * prod(tiles), varied, options)
    return lambda source, result: launch([source, *numbers, result])


Mode = tuple[int, int, int]
"""The size of a mode, its stride in a view, and in a contiguous tensor of the view's shape."""


def as_matrices(shape: Ints, strides: Ints) -> tuple[Mode, Mode, Mode] | None:
    """Return the matrices that a view turns: how many, their rows and their columns; None where it does not.

    The last mode of the view are the rows, which are contiguous in memory; of the view the columns are.
    """
    modes: list[Mode] = []
    behind = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if modes and stride == modes[-1][0] * modes[-1][1]:  # one mode with the one behind it
            modes[-1] = (modes[-1][0] * size, *modes[-1][1:])
        elif size > 1:
            modes.append((size, stride, behind))
        behind *= size
    turned = [n for n, (_, stride, _) in enumerate(modes) if n and stride == 1]
    if not turned or len(modes) > 3 or modes[0][1] == 1:
        return None
    others = [mode for n, mode in enumerate(modes) if n not in (0, turned[0])]
    return others[0] if others else (1, 0, 0), modes[0], modes[turned[0]]
