"""Conversions of a SparseTensor to other dtypes, by torch's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sparsetc.tensor.sparse_tensor import SparseTensor


def _converted(dtype: torch.dtype) -> Callable[[Any], SparseTensor]:
    """The method that converts values."""

    def converted(x: Any) -> SparseTensor:
        return x.to(dtype)  # type: ignore[no-any-return]

    converted.__doc__ = f"Return the tensor with values cast to {str(dtype).removeprefix('torch.')}."
    return converted


class Typed:
    """torch's names for conversions, in a class of their own: annotations elsewhere mean Python's types by them."""

    __slots__ = ()
    float, double, half = map(_converted, (torch.float32, torch.float64, torch.float16))
    bfloat16, int, long, bool = map(_converted, (torch.bfloat16, torch.int32, torch.int64, torch.bool))

    def type(self, dtype: Any = None) -> Any:
        """Convert values to a dtype. Without one, return torch's old name of the values' type."""
        x: Any = self
        return x._values.type() if dtype is None else x.to(dtype)
