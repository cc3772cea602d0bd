"""Sums: rows added in an order that may be asked for, and integers, which are refused where they do not fit.

In: rows, or results in int64. Out: their sums, or `DtypeError`. Sums and products of integers are made in 64 bits;
int64 itself is made modulo 2**64, so what wrapped is found in another way: in float64, or by halves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache

import torch

from sparsetc.errors import DtypeError

INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)


_ordered: ContextVar[bool] = ContextVar("sparsetc_ordered", default=False)


@contextmanager
def in_order(wanted: bool) -> Iterator[None]:
    """Have `add_rows` add in the same order at every run within a ``with`` block, where that is wanted."""
    token = _ordered.set(wanted)
    try:
        yield
    finally:
        _ordered.reset(token)


def add_rows(out: torch.Tensor, row: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Add ``values[n]`` to ``out[row[n]]`` for every n, in place.

    On a GPU torch's `index_add_` adds in whatever order threads finish, `index_put_` after a sort.
    """
    if out.is_cuda and _ordered.get():
        return out.index_put_((row.long(),), values, accumulate=True)
    return out.index_add_(0, row, values)


@lru_cache
def accumulator(dtype: torch.dtype) -> torch.dtype:
    """How sums of this dtype are kept: never narrower than float32, integers in 64 bits."""
    if dtype.is_complex or dtype == torch.float64:
        return dtype
    return torch.float32 if dtype.is_floating_point else torch.int64


def result_bytes(dtype: torch.dtype) -> int:
    """Return the bytes that a sum takes at most: as it is kept, and as one of this dtype where that is another.

    Sums of integers are made in float64 too, to see whether they wrapped.
    """
    wide = accumulator(dtype)
    return wide.itemsize * (3 if dtype in INTEGERS else 1) + (dtype.itemsize if wide != dtype else 0)


def summed_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a plain sum: int64 of integers, as torch's is; that of the terms otherwise."""
    return torch.int64 if dtype in INTEGERS else dtype


def captured(found: torch.Tensor) -> bool:
    """Whether a CUDA graph is captured, while which nothing can be looked at."""
    return found.is_cuda and torch.cuda.is_current_stream_capturing()


def fitted(wide: torch.Tensor, dtype: torch.dtype, what: str) -> torch.Tensor:
    """int64 results as integers of `dtype`; other types are converted as they are.

    The check waits for the GPU. While a CUDA graph is captured nothing can be looked at, and integers wrap.

    Raises:
        DtypeError: names `what` and the worst of the values, where one does not fit.
    """
    if dtype not in INTEGERS or wide.dtype == dtype:
        return wide.to(dtype)
    narrow = wide.to(dtype)
    if captured(wide):
        return narrow
    if not bool((narrow == wide).all()):
        low, high = (int(bound) for bound in torch.aminmax(wide))
        worst = low if -low > high else high
        raise DtypeError(f"{what} holds {worst}, which {dtype} cannot; convert the operands with .to(torch.int64)")
    return narrow


def wrapped(found: torch.Tensor, close: torch.Tensor) -> torch.Tensor:
    """Return where integers, made modulo 2**64, are other than in float64, whose errors must be below 2**63."""
    return (close - found.double()).abs() > 2.0**63


def refuse_wrapped(found: torch.Tensor, close: torch.Tensor, what: str) -> None:
    """Raise DtypeError where integers wrapped, as `wrapped` says; nothing is looked at while a graph is captured."""
    if captured(found):
        return
    past = wrapped(found, close)
    if bool(past.any()):
        worst = float(close[past][0])
        raise DtypeError(f"{what} is {worst:.3g}, past 64 bits; convert the operands with .to(torch.float64)")


def add_up_exactly(values: torch.Tensor, owner: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
    """The sums of each owner's integers, (count, …) of `dtype`.

    Args:
        values: (n, …) of an integer dtype.
        owner: (n,) int64, which sum each adds to.
        count: how many sums.
        dtype: of the sums.

    Raises:
        DtypeError: a sum does not fit, found even where it passes 64 bits.
    """
    wide = halves(values)
    high, low = (half.new_zeros((count, *values.shape[1:])).index_add(0, owner, half) for half in wide)
    return joined(high, low, dtype)


def halves(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers as int64 upper and lower halves of 32 bits, sums of which cannot pass 64 bits."""
    wide = values.long()
    return wide >> 32, wide & 0xFFFFFFFF


def joined(high: torch.Tensor, low: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Integers of `dtype` from sums of `halves`; DtypeError for one that does not fit."""
    high, low = high + (low >> 32), low & 0xFFFFFFFF  # of a sum that fits, the upper half is one of 32 bits
    limits = torch.iinfo(dtype)
    past = (high > limits.max >> 32) | (high < limits.min >> 32)
    if bool(past.any()):
        at = int(torch.nonzero(past.flatten())[0])
        worst = (int(high.flatten()[at]) << 32) + int(low.flatten()[at])
        raise DtypeError(f"duplicates sum to {worst}, which {dtype} cannot hold; widen values first")
    return fitted((high << 32) + low, dtype, "the sum of duplicates")
