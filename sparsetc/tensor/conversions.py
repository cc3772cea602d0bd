"""Conversions of a SparseTensor to other dtypes, by torch's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sparsetc.tensor.attributes import Attributes, Sparse


def _converted(dtype: torch.dtype) -> Callable[[Sparse], Sparse]:
    """The method that converts values."""

    def converted(x: Sparse) -> Sparse:
        return x.to(dtype)

    converted.__doc__ = f"Return the tensor with values cast to {str(dtype).removeprefix('torch.')}."
    return converted


class Typed(Attributes):
    """torch's names for conversions, in a class of their own: annotations elsewhere mean Python's types by them."""

    __slots__ = ()
    float, double, half = map(_converted, (torch.float32, torch.float64, torch.float16))
    bfloat16, int, long, bool = map(_converted, (torch.bfloat16, torch.int32, torch.int64, torch.bool))

    def type(self, dtype: Any = None) -> Any:
        """Convert values to a dtype. Without one, return torch's old name of the values' type."""
        return self._values.type() if dtype is None else self.to(dtype)
