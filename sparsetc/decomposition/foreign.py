"""Models in the forms of other libraries, and the memory that a model in full would take.

In: weights or a core, and factors. Out: objects of tensorly and pyttb, which are imported here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from math import prod
from typing import Any

import numpy as np
import torch

from sparsetc.options import current
from sparsetc.support.memory import as_bytes


def check_memory(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, limit: int | str | None = None
) -> None:
    """Raise `OutOfMemoryError` where a dense tensor of this shape would pass the limit."""
    nbytes = prod(shape) * dtype.itemsize
    current().check_memory(
        nbytes, device, f"the model in full, {tuple(shape)}", None if limit is None else as_bytes(limit)
    )


def tensorly_cp(weights: torch.Tensor, factors: Sequence[torch.Tensor]) -> Any:
    """A CPTensor."""
    tl = _imported("tensorly")
    return import_module("tensorly.cp_tensor").CPTensor((_of(tl, weights), [_of(tl, f) for f in factors]))


def tensorly_tucker(core: torch.Tensor, factors: Sequence[torch.Tensor]) -> Any:
    """A TuckerTensor."""
    tl = _imported("tensorly")
    return import_module("tensorly.tucker_tensor").TuckerTensor((_of(tl, core), [_of(tl, f) for f in factors]))


def pyttb_ktensor(weights: torch.Tensor, factors: Sequence[torch.Tensor]) -> Any:
    """A ktensor."""
    return _imported("pyttb").ktensor([_array(f) for f in factors], _array(weights))


def pyttb_ttensor(core: torch.Tensor, factors: Sequence[torch.Tensor]) -> Any:
    """A ttensor."""
    pyttb = _imported("pyttb")
    return pyttb.ttensor(pyttb.tensor(_array(core)), [_array(f) for f in factors])


def _of(tl: Any, tensor: torch.Tensor) -> Any:
    """A tensor of tensorly's current backend; torch's own where that is the backend."""
    own = tensor.detach()
    if tl.get_backend() == "pytorch":
        return own.clone()
    own = own.float() if own.dtype == torch.bfloat16 else own  # which numpy does not have
    return tl.tensor(own.cpu().numpy())


def _array(tensor: torch.Tensor) -> np.ndarray:
    return np.array(tensor.detach().cpu().double().numpy(), order="F")


def _imported(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(
            f"{name} is not installed, and a model cannot be given in its form: pip install {name}"
        ) from error
