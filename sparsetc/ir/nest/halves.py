"""Float32 values as sums of two float16: which power of two scales them, and what each half holds.

In: float32 values whose magnitudes lie near one another (`may_be_split`). Out: a value v times its scale is
``high + low / LOW``. The scale brings the largest magnitude that shares it to between 2**14 and 2**15::

    high = float16(v * scale)      11 bits      low = float16((v * scale - high) * 2**11)      12 bits more, the sign
                                                                                              among them

A float16 is normal from 2**-14 on, so these 23 bits are there where a value is at least 2**-28 of the largest; of any
other, no more than 2**-50 of the largest is lost.
"""

from __future__ import annotations

from math import inf

import torch

LOW = 2**11
"""Factor that low halves of values are multiplied by: their exponents are then those of the high halves."""
HEAD, BIAS = 14, 127
"""Exponent of the largest magnitude of scaled values; bias of a float32's exponent."""
RANGE = 80
"""Exponent of two: how far from 1 a largest magnitude may be, so that sums of scaled products, multiplied by one scale
after the other, neither overflow nor lose what is normal."""
FAR = 36
"""Exponent of two: how far below the largest magnitude of an operand that has one scale a nonzero may be. None then
loses more than 2**-14 of itself, nor those from 2**-28 of the largest on more than 2**-23."""


def exponents(most: torch.Tensor) -> torch.Tensor:
    """Biased exponents of largest magnitudes, given as int32 bits; such that scales and their inverses are normal."""
    return (most >> 23).clamp(min=HEAD + 1)


def power(exponent: torch.Tensor) -> torch.Tensor:
    """2 ** (exponent - BIAS), of int32, in float32."""
    return (exponent << 23).view(torch.float32)


def scale(most: torch.Tensor, into: bool) -> torch.Tensor:
    """The power of two by which values of a largest magnitude, float32, are scaled; or the inverse, by which scaled
    ones are brought back.
    """
    exponent = exponents(most.view(torch.int32))
    return power(2 * BIAS + HEAD - exponent if into else exponent - HEAD)


def halved(scaled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The high and low halves, float16, of scaled values, float32."""
    high = scaled.half()
    return high, ((scaled - high.float()) * LOW).half()


def largest(values: torch.Tensor) -> torch.Tensor:
    """(1,) the largest magnitude, of float32; 0 of no values."""
    return torch.linalg.vector_norm(values, inf).view(1) if values.numel() else values.new_zeros(1)


def scaled_halves(values: torch.Tensor, most: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The high and low halves, float16, of values that share one scale, (1,) `most` being their largest magnitude."""
    return halved(values * scale(most, into=True))


def may_be_split(most: float, least: float) -> bool:
    """Whether halves are exact enough for an operand of one scale.

    Args:
        most: the largest magnitude; infinite or nan where one of them is.
        least: the smallest but 0; infinite where all are 0.
    """
    return not most or (2.0**-RANGE <= most <= 2.0**RANGE and least >= most * 2.0**-FAR)
