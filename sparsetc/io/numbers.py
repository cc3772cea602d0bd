"""Numbers of a file in the dtype that was asked for, none of them changed into something else on the way.

In: tokens of a block of text, or values of another dtype. Out: a tensor, or an error for what the dtype cannot hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import isinf
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsetc.errors import DtypeError
from sparsetc.tensor.dtypes import DTYPES
from sparsetc.tensor.sparse_tensor import SparseTensor

SIX_DIGITS = 6
"""Digits of a number of which float32 holds all."""
_FLOAT32 = torch.finfo(torch.float32)


def column(tokens: Sequence[bytes], dtype: torch.dtype, dtype_open: bool) -> tuple[Tensor, bool, str]:
    """Convert tokens up to the first that is no number of a dtype.

    Args:
        tokens: text without blanks.
        dtype: of the result; floating-point numbers are rounded, an integer must fit (``3.0`` and ``1e3`` will do).
        dtype_open: whether nobody asked for it. Then float32 must hold all digits, and float64 every integer of int64.

    Returns:
        The numbers, whether float32 holds all of their digits, and what is wrong with the next token, if there is one.
    """
    floating, fault = dtype.is_floating_point, ""
    numbers = list[float]()
    try:
        numbers.extend(map(partial(_real, exact=dtype_open) if floating else partial(_whole, dtype=dtype), tokens))
    except ValueError as error:
        fault = str(error)
    wide = torch.from_numpy(np.array(numbers, np.float64 if floating else np.int64))
    result, unfit = converted(wide, dtype)
    first = next(iter(unfit.nonzero().flatten().tolist()), None)
    reason = f"does not fit {dtype}{'; read it with dtype=torch.float64' if floating else ''}"
    single = True
    if dtype_open:
        rounded = ((wide.float() != wide) & ~wide.isnan()).nonzero().flatten().tolist()
        long = next((at for at in rounded if not _is_short(tokens[at], numbers[at])), None)
        single = long is None
        first = long if dtype == torch.float32 else None
        reason = f"has more digits than {dtype} holds; name the dtype to read it as"
    return result[:first], single, fault if first is None else reason


def _real(token: bytes, exact: bool) -> float:
    """Return the nearest float64; with `exact`, ValueError for an int64 that float64 does not hold."""
    try:
        number = float(token.replace(b"_", b"x"))  # Python takes 1_000
    except ValueError:
        raise ValueError("is not a number") from None
    if isinf(number) and b"n" not in token.lower():
        raise ValueError("is beyond the largest float64; write inf for an infinity")
    if exact and 2**53 <= abs(number) <= 2**63 and token[1:].isdigit() and int(token) != number:
        raise ValueError("is an integer that float64 does not hold; name the dtype")
    return number


def _whole(token: bytes, dtype: torch.dtype) -> int:
    """Return an integer of int64, exactly."""
    digits = token[token[:1] in (b"+", b"-") :]
    if digits.isdigit() and len(digits) < 20:
        number = int(token)
    else:
        real = _real(token, exact=False)
        number = int(real) if real.is_integer() and abs(real) < 2**53 else 2**63
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"does not fit {dtype}")
    return number


def _is_short(token: bytes, number: float) -> bool:
    """Return True if float32 holds all digits of a number that it rounds."""
    digits = token.lower().partition(b"e")[0].lstrip(b"+-").replace(b".", b"").lstrip(b"0")
    return len(digits) <= SIX_DIGITS and _FLOAT32.tiny <= abs(number) <= _FLOAT32.max


def check_dtype(path: Any, dtype: torch.dtype | None) -> None:
    """Raise `DtypeError` unless values of a file may be read as a dtype."""
    if dtype not in (None, *DTYPES):
        raise DtypeError(f"{path}: values cannot be read as {dtype}")


def with_dtype(x: SparseTensor, dtype: torch.dtype | None) -> SparseTensor:
    """Return a tensor with values in another dtype, rounded; itself where no dtype is asked for.

    Raises:
        ValueError: a real or an integer dtype cannot hold one of them.
    """
    if dtype is None:
        return x
    if x.dtype.is_complex and not dtype.is_complex:
        raise ValueError(f"complex values cannot be read as {dtype}")
    values, lost = converted(x.values, dtype)
    if bool(lost.any()):
        raise ValueError(f"the value {x.values[lost][0].item()} does not fit {dtype}")
    return x.with_values(values)


def converted(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Values in another dtype, and where that cannot hold them: a finite one is infinite, or an integer is another."""
    result = values.to(dtype)
    if dtype.is_floating_point or dtype.is_complex:
        return result, result.isinf() & ~values.isinf()
    lost = result.to(values.dtype) != values
    if values.is_floating_point():
        lost |= (values >= 2.0**63) | (values < -(2.0**63))  # what becomes of those depends on the processor
    return result, lost
