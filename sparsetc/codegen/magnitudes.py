"""The largest and the smallest magnitude of float32 values other than zero, in one pass: what halves are scaled by.

In: float32 values. Out: a tensor on their device, from which nothing is waited for. Magnitudes are the bits of absolute
values, which are ordered as they are, with infinities and NaN at the end.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import inf

import torch

TOP = 0x7FFFFFFF
"""The largest magnitude that bits can say."""
BLOCK, PROGRAMS = 4096, 1024
"""Values that a program looks at together, and programs at most."""


@dataclass(frozen=True)
class Magnitudes:
    """What was found of one table."""

    most: float
    """The largest magnitude; infinite or NaN where a value is."""
    least: float
    """The smallest but 0; infinite where all are 0."""


def extremes(values: torch.Tensor) -> torch.Tensor:
    """(2,) int32: the bits of the largest magnitude, and how far those of the smallest but 0 are below `TOP`; or 0.

    Args:
        values: float32, of any shape.
    """
    found = torch.zeros(2, dtype=torch.int32, device=values.device)
    if values.numel():
        (launched if values.is_cuda else computed)(values.contiguous(), found)
    return found


def largest(values: torch.Tensor) -> torch.Tensor:
    """(1,) the largest magnitude, float32, on the device; 0 of no values."""
    return extremes(values)[:1].view(torch.float32)


def read(found: list[torch.Tensor]) -> list[Magnitudes]:
    """What `extremes` found of tables of one device, which is waited for once."""
    pairs = torch.stack(found).tolist() if found else []
    return [Magnitudes(_float(most), _float(TOP - least) if least else inf) for most, least in pairs]


def launched(values: torch.Tensor, found: torch.Tensor) -> None:
    """Fill in what is found, by Triton's kernel."""
    from sparsetc.codegen.split_float16_kernels import find

    programs = min(PROGRAMS, -(-values.numel() // BLOCK))
    with torch.cuda.device_of(values):
        find[(programs,)](values, found, values.numel(), programs)


def computed(values: torch.Tensor, found: torch.Tensor) -> None:
    """Fill in what is found, by torch."""
    bits = values.view(torch.int32) & TOP
    found[0] = bits.max()
    found[1] = torch.where(bits > 0, TOP - bits, 0).max()


def _float(bits: int) -> float:
    (value,) = struct.unpack("f", struct.pack("i", bits))
    return float(value)
