"""Where chunks are run.

In: what a caller asks for, and the operands. Out: the CPU, or a GPU that there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sparsetc.errors import DeviceError
from sparsetc.tensor.sparse_tensor import SparseTensor


def device_of(device: Any, dense: Sequence[Any], x: Any) -> torch.device:
    """Where chunks are run: as asked for, where an operand is that is on a GPU, or on the GPU that there is.

    Raises:
        DeviceError: what was asked for is no device, none that chunks are run on, or not there.
    """
    if device is not None:
        found = _named(device)
    else:
        own = [o.device for o in (*dense, x) if isinstance(o, torch.Tensor | SparseTensor)]
        gpu = next((d for d in own if d.type == "cuda"), None)
        found = gpu or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if found.type == "cuda" and found.index is None:
        found = torch.device("cuda", torch.cuda.current_device())
    return found


def _named(device: Any) -> torch.device:
    """The CPU or a GPU that there is, of what a caller calls it."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise DeviceError(f"chunks are streamed to the CPU or a CUDA device, found {device!r:.80}") from None
    if found.type not in ("cpu", "cuda"):
        raise DeviceError(f"chunks are streamed to the CPU or a CUDA device, found {found}")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise DeviceError(f"there is no device {found}; torch sees {torch.cuda.device_count()} CUDA devices")
    return found if found.type == "cuda" else torch.device("cpu")  # "cpu:0" is the same, and compares as another
