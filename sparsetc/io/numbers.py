"""Real numbers of a text file in the dtype that was asked for, none of them changed into something else on the way.

In: tokens of a block, or values of another dtype. Out: a tensor; or `BadToken`, and for a token what is wrong with it.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal

import numpy as np
import torch

from sparsetc.io import digits

TINY, MOST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
"""The smallest float32 that has all of its digits, and the largest."""
_TO_SIX = 10.0 ** np.minimum(5 - np.floor((np.arange(2048) - 1023) * math.log10(2)), 300)
"""What brings float64 numbers of each exponent to 1e5 and more, and below 2e6."""
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?|[+-]?(?:nan|inf|infinity)", re.ASCII | re.IGNORECASE)


def real(text: digits.Text, start: np.ndarray, end: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """Tokens as ``dtype``; BadToken for one that is no number, is no integer where integers are read, or does not fit.

    Floating numbers are rounded. Only what is written as inf is infinite.
    """
    if not dtype.is_floating_point:
        whole = digits.integers(text, start, end)
        limits = torch.iinfo(dtype)
        if whole.size and not limits.min <= int(whole.min()) <= int(whole.max()) <= limits.max:
            raise digits.BadToken(f"does not fit {dtype}")
        return torch.from_numpy(whole).to(dtype)
    number = torch.from_numpy(digits.floats(text, start, end, exact=dtype == torch.float64)).to(dtype)
    if not math.isfinite(float(number.sum())):  # one pass, where most blocks need no second
        where = number.isinf().numpy()
        if digits.begins_with_digit(text, start[where], end[where]).any():
            raise digits.BadToken(f"beyond the largest {dtype}")
    return number


@np.errstate(all="ignore")  # of infinities, and what float32 makes one
def single(text: digits.Text, start: np.ndarray, end: np.ndarray, number: torch.Tensor) -> bool:
    """Whether tokens, whose float64 numbers these are, lose no digit as float32, which has six and its range.

    One of seven characters is exact, or has six digits beside a point or a sign. One of 14 at most has seven digits or
    more where it is off by 1e-8 from what six make a whole number. BadToken for an integer that int64 holds and float64
    does not.
    """
    size, length = number.abs().numpy(), end - start
    more = (size < TINY) | (size > MOST)
    if length.max() > 7:
        for at in np.flatnonzero((length > 15) & (size >= 2.0**53) & (size <= 2.0**63)).tolist():
            token = text.bytes[start[at] : end[at]].tobytes()
            if token.lstrip(b"+-").isdigit() and int(token) != float(token):
                raise digits.BadToken("an integer that float64 does not hold; name the dtype to read it as")
        whole = size * _TO_SIX[size.view(np.int64) >> 52]
        whole *= np.where(whole < 999_999.5, 1, 0.1)
        more |= (np.abs(whole - np.rint(whole)) > 2e-9) | (length > 14)
    return bool((size[more].astype(np.float32) == size[more]).all())


def fault(token: str, dtype: torch.dtype) -> str | None:
    """What is wrong with a token that should be a real number of ``dtype``, or None where `real` takes it."""
    if not _NUMBER.fullmatch(token):
        return f"the value {_short(token)} is not a number"
    value = float(token)
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        exact = Decimal(token) if token.lstrip("+-").isdigit() else value
        if not (value.is_integer() and limits.min <= exact <= limits.max):
            return f"the value {_short(token)} does not fit {dtype}"
    elif "inf" not in token.lower() and bool(torch.tensor(value, dtype=torch.float64).to(dtype).isinf()):
        remedy = "write inf for an infinity" if math.isinf(value) else "read it with dtype=torch.float64"
        return f"the value {_short(token)} is beyond the largest {dtype}, {torch.finfo(dtype).max:.2g}; {remedy}"
    return None


def cast(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values in another dtype, rounded; BadToken where a real or an integer dtype cannot hold one of them."""
    if values.is_complex() and not dtype.is_complex:
        raise digits.BadToken(f"complex values cannot be read as {dtype}")
    made = values.to(dtype)
    if dtype.is_floating_point or dtype.is_complex:
        lost = made.isinf() & ~values.isinf()
    else:
        lost = made.to(values.dtype) != values
        if values.is_floating_point():
            lost |= (values >= 2.0**63) | (values < -(2.0**63))  # what becomes of those depends on the processor
    if bool(lost.any()):
        raise digits.BadToken(f"the value {values[lost][0].item()} does not fit {dtype}")
    return made


def _short(token: str) -> str:
    return repr(token if len(token) <= 30 else token[:27] + "...")
