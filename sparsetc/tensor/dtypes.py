"""Dtypes of values, the dtypes that they are summed in, and sums: of rows, in a fixed order if asked, and of integers.

In: rows, or results in int64. Out: their sums, or `DtypeError`. Sums and products of integers are made in 64 bits;
int64 itself is made modulo 2**64, so what wrapped is found in another way: in float64, or by halves.

One thread that adds a million float32 numbers to one another loses four of seven digits. So long sums are made in
segments, and the segments' sums are added up; or in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsetc.errors import DtypeError
from sparsetc.tensor.pattern import transforming

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
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


# -- sums -------------------------------------------------------------------------------------------------------------
LONG = 1024
"""Numbers of float32 that are added to one another, one after another, at most: rounding costs some 1e-6 of a sum."""

_ordered: ContextVar[bool] = ContextVar("sparsetc_ordered", default=False)


@contextmanager
def in_order(wanted: bool) -> Iterator[None]:
    """Have `add_rows` add in the same order at every run within a ``with`` block, where that is wanted."""
    token = _ordered.set(wanted)
    try:
        yield
    finally:
        _ordered.reset(token)


def add_rows(out: Tensor, row: Tensor, values: Tensor) -> Tensor:
    """Add ``values[n]`` to ``out[row[n]]`` for every n, in place.

    On a GPU torch's `index_add_` adds in whatever order threads finish, `index_put_` after a sort.
    """
    if out.is_complex():  # `index_add_` multiplies them by 1, by which an infinity becomes NaN
        add_rows(torch.view_as_real(out), row, torch.view_as_real(values.resolve_conj()))
        return out
    if out.is_cuda and _ordered.get():
        return out.index_put_((row.long(),), values, accumulate=True)
    return out.index_add_(0, row, values)


@lru_cache
def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums: never narrower than float32, and 64 bits for integers."""
    if dtype.is_complex or dtype == torch.float64:
        return dtype
    return torch.float32 if dtype.is_floating_point else torch.int64


def result_bytes(dtype: torch.dtype) -> int:
    """Return the most bytes of a sum: in the accumulator's dtype, and in `dtype` if it is another.

    Sums of integers are made in float64 too, to see whether they wrapped.
    """
    wide = accumulator(dtype)
    return wide.itemsize * (3 if dtype in INTEGERS else 1) + (dtype.itemsize if wide != dtype else 0)


def summed_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a plain sum: int64 for integers and bools, as in torch; else the dtype of the terms."""
    return torch.int64 if accumulator(dtype) == torch.int64 else dtype


@lru_cache
def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of long sums that are added up one after another: 64 bits."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else torch.int64


def summed_rows(values: Tensor, owner: Tensor, count: int) -> Tensor:
    """(count, ...): the sum of each owner's rows of `values`, (n, ...), made in 64 bits; differentiable."""
    terms = values.to(wide(values.dtype))
    return add_rows(terms.new_zeros((count, *values.shape[1:])), owner, terms).to(values.dtype)


def segments(lengths: Tensor, most: int) -> Iterator[Tensor]:
    """Yield the lengths of segments of at most `most` rows of each run, then of runs of segments, until one is left."""
    while lengths.numel() and int(lengths.max()) > most:
        number = (lengths + most - 1) // most
        ends = number.cumsum(0)
        segment_lengths = lengths.new_full((int(ends[-1]),), most)
        segment_lengths[ends - 1] = lengths - (number - 1) * most
        yield segment_lengths
        lengths = number
    yield lengths


def captured(sums: Tensor) -> bool:
    """True while a CUDA graph is captured, when no value can be read."""
    return sums.is_cuda and torch.cuda.is_current_stream_capturing()


def unseen(sums: Tensor) -> bool:
    """Return True if nothing can be looked at: a CUDA graph is captured, or a transform of `torch.func` is active."""
    return transforming() or captured(sums)


def fitted(wide: Tensor, dtype: torch.dtype, what: str) -> Tensor:
    """Return int64 results as integers of `dtype`; other types are cast.

    The check waits for the GPU. While a CUDA graph is captured nothing can be looked at, and integers wrap.

    Raises:
        DtypeError: names `what` and the worst of the values, where one does not fit.
    """
    if dtype not in INTEGERS or wide.dtype == dtype:
        return wide.to(dtype)
    narrow = wide.to(dtype)
    if unseen(wide):
        return narrow
    if not bool((narrow == wide).all()):
        low, high = (int(bound) for bound in torch.aminmax(wide))
        raise _unfit(low if -low > high else high, dtype, what)
    return narrow


def refuse_wrapped(sums: Tensor, close: Tensor, what: str) -> None:
    """Raise DtypeError if integer sums, computed modulo 2**64, wrapped; nothing is looked at while a graph is captured.

    `close` are the same sums in float64, with errors below 2**63.
    """
    if unseen(sums):
        return
    past = (close - sums.double()).abs() > 2.0**63
    if bool(past.any()):
        worst = float(close[past][0])
        raise DtypeError(f"{what} is {worst:.3g}, past 64 bits; convert the operands with .to(torch.float64)")


def exactly(add: Callable[..., Tensor], dtype: torch.dtype, what: str, *terms: Tensor) -> Tensor:
    """Return what a linear function makes of terms, in their dtype or, of integers, in `dtype`.

    Args:
        add: a function of sums and differences alone.
        dtype: of a result of integers.
        what: the result is, for a message.
        terms: of one dtype.

    Raises:
        DtypeError: an integer of the result does not fit, found even where it passes 64 bits.
    """
    if terms[0].is_complex():  # torch multiplies them by 1 to add them, by which an infinity becomes NaN
        parts = (torch.view_as_real(term.resolve_conj()) for term in terms)
        return torch.view_as_complex(add(*parts))
    if dtype not in INTEGERS:
        return add(*terms)
    high, low = zip(*map(halves, terms), strict=True)
    return joined(add(*high), add(*low), dtype, what)


def multiplied(multiply: Callable[..., Tensor], dtype: torch.dtype, *factors: Any) -> Tensor:
    """Return `multiply(*factors)`. Raise `DtypeError` if an integer result does not fit in `dtype`.

    Args:
        multiply: the function.
        dtype: of the result.
        factors: tensors, of integers where the result is of these, and numbers.
    """
    if dtype not in INTEGERS:
        return multiply(*factors)
    whole = [f.long() if isinstance(f, Tensor) else f for f in factors]
    out = multiply(*whole)
    if not unseen(out):
        floats = [f.double() if isinstance(f, Tensor) else f for f in factors]
        refuse_wrapped(out, multiply(*floats), "a product of integers")
    return fitted(out, dtype, "a product of integers")


def halves(values: Tensor) -> tuple[Tensor, Tensor]:
    """Integers as int64 upper and lower halves of 32 bits, sums of which cannot pass 64 bits."""
    whole = values.long()
    return whole >> 32, whole & 0xFFFFFFFF


def joined(high: Tensor, low: Tensor, dtype: torch.dtype, what: str = "a sum of duplicates") -> Tensor:
    """Integers of `dtype` from sums of `halves`; DtypeError for one that does not fit, as `fitted` raises it."""
    high, low = high + (low >> 32), low & 0xFFFFFFFF  # of a sum that fits, the upper half is one of 32 bits
    if unseen(high):
        return ((high << 32) + low).to(dtype)
    limits = torch.iinfo(dtype)
    past = (high > limits.max >> 32) | (high < limits.min >> 32)
    if bool(past.any()):
        at = int(torch.nonzero(past.flatten())[0])
        raise _unfit((int(high.flatten()[at]) << 32) + int(low.flatten()[at]), dtype, what)
    return fitted((high << 32) + low, dtype, what)


def _unfit(number: int, dtype: torch.dtype, what: str) -> DtypeError:
    wider = "float64" if dtype == torch.int64 else "int64"
    return DtypeError(f"{what} holds {number}, which {dtype} cannot; convert the operands with .to(torch.{wider})")
