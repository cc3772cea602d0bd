"""Numbers of a file in the dtype that was asked for, none of them changed into something else on the way.

In: tokens of a block of text, or values of another dtype. Out: a tensor, or an error for what the dtype cannot hold.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsetc.errors import DtypeError
from sparsetc.io import digits
from sparsetc.tensor.dtypes import DTYPES
from sparsetc.tensor.sparse_tensor import SparseTensor

SIX_DIGITS = 10**6 - 1
"""The largest number of six digits, which float32 holds all of."""
_FLOAT32 = torch.finfo(torch.float32)


def real(text: digits.Text, start: np.ndarray, end: np.ndarray, dtype: torch.dtype) -> Tensor:
    """Tokens as ``dtype``, floating numbers rounded; `BadToken` for what is no number, or no integer, or too large."""
    reason = f"does not fit {dtype}"
    if dtype.is_floating_point:
        numbers, remedy = digits.floats(text, start, end)[0], "; read it with dtype=torch.float64"
    else:
        numbers, remedy = digits.integers(text, start, end, reason), ""
    converted, lost = _converted(torch.from_numpy(numbers), dtype)
    text.require(~lost.numpy(), start, reason + remedy)
    return converted


def unnamed(text: digits.Text, start: np.ndarray, end: np.ndarray, dtype: torch.dtype) -> tuple[Tensor, bool]:
    """Tokens as ``dtype``, float64 or float32, and whether float32 holds all of their digits: six, or more exactly.

    `BadToken` for what ``dtype`` does not hold: more digits, or for float64 an integer that int64 holds.
    """
    number, mantissa = digits.floats(text, start, end)
    size = np.abs(number)
    large = np.flatnonzero((size >= 2.0**53) & (size <= 2.0**63))
    plain = [text.data[s:e].lstrip(b"+-0") for s, e in zip(start[large].tolist(), end[large].tolist(), strict=True)]
    exact = [not token.isdigit() or int(token) == int(size[at]) for token, at in zip(plain, large, strict=True)]
    text.require(np.array(exact, dtype=bool), start[large], "is an integer that float64 does not hold; name the dtype")
    more = np.flatnonzero((mantissa > SIX_DIGITS) | (size < _FLOAT32.tiny) | (size > _FLOAT32.max))
    with np.errstate(over="ignore"):
        held = number[more].astype(np.float32) == number[more]
    held |= np.isnan(number[more])
    if dtype == torch.float32:
        text.require(held, start[more], f"has more digits than {dtype} holds; name the dtype to read it as")
    return torch.from_numpy(number).to(dtype), bool(held.all())


def check_dtype(path: Any, dtype: torch.dtype | None) -> None:
    """Raise `DtypeError` unless values of a file may be read as a dtype."""
    if dtype not in (None, *DTYPES):
        raise DtypeError(f"{path}: values cannot be read as {dtype}")


def with_dtype(x: SparseTensor, dtype: torch.dtype | None) -> SparseTensor:
    """Return a tensor with values as `cast` gives them; itself where no dtype is asked for."""
    return x if dtype is None else x.with_values(cast(x.values, dtype))


def cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Values in another dtype, rounded; ValueError where a real or an integer dtype cannot hold one of them."""
    if values.is_complex() and not dtype.is_complex:
        raise ValueError(f"complex values cannot be read as {dtype}")
    converted, lost = _converted(values, dtype)
    if bool(lost.any()):
        raise ValueError(f"the value {values[lost][0].item()} does not fit {dtype}")
    return converted


def _converted(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Values in another dtype, and where that cannot hold them: a finite one is infinite, or an integer is another."""
    converted = values.to(dtype)
    if dtype.is_floating_point or dtype.is_complex:
        return converted, converted.isinf() & ~values.isinf()
    lost = converted.to(values.dtype) != values
    if values.is_floating_point():
        lost |= (values >= 2.0**63) | (values < -(2.0**63))  # what becomes of those depends on the processor
    return converted, lost
