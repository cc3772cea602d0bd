"""Dtypes of values, their names, and conversions of values of other dtypes."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sparsetc.errors import DtypeError
from sparsetc.tensor.sums import INTEGERS

FLOATS = torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128
DTYPES = (*FLOATS, *INTEGERS, torch.bool)
"""The dtypes that values may have."""

SUMMED_IN = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
"""The dtypes that narrow dtypes are summed in: sums of theirs may overflow although no element is infinite."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name that numpy, files and the command line have for a dtype: ``float32``."""
    return str(dtype).removeprefix("torch.")


NAMED = {dtype_name(dtype): dtype for dtype in DTYPES}
"""The dtypes of values, by name."""

WIDER = {torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.int64}
"""Unsigned integers, which torch stores and computes nothing with, each with the dtype that values of it become."""


WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by the number of their bytes."""


def resolved(values: Tensor) -> Tensor:
    """A tensor whose memory reads as its elements do: torch marks negation and conjugation by a bit."""
    return values.resolve_conj().resolve_neg() if values.is_conj() or values.is_neg() else values


def real_numbers(values: Tensor) -> Tensor:
    """Return values without a gradient, with a dimension of real and imaginary parts if they are complex."""
    plain = resolved(values.detach())
    return torch.view_as_real(plain) if plain.is_complex() else plain


def check_dtype(dtype: torch.dtype, given: object = None) -> None:
    """Raise DtypeError unless values may have ``dtype``; the message names the conversion for `given`."""
    if dtype not in DTYPES:
        other = dtype_name(WIDER.get(dtype, torch.float32))
        convert = f'.astype("{other}")' if isinstance(given, np.ndarray) else f".to(torch.{other})"
        raise DtypeError(f"values must be one of {', '.join(NAMED)}; found {dtype}; convert them first: {convert}")


def computable(values: Tensor, given: object = None) -> Tensor:
    """Return values unchanged, or unsigned integers of 16 bits or more in a signed dtype that holds them.

    Raises:
        DtypeError: a dtype that values cannot have, or an integer of 2**63 or more.
    """
    wider = WIDER.get(values.dtype)
    if wider is None:
        check_dtype(values.dtype, given)
        return values
    signed = values.to(wider)
    if values.dtype == torch.uint64 and bool((signed < 0).any()):
        largest = int(signed.min()) % 2**64
        raise DtypeError(
            f"the value {largest} does not fit int64, being 2**63 or more; convert values to float64 first"
        )
    return signed
