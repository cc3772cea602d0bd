"""The kernel that `codegen.magnitudes` launches.

It is imported only where there is a GPU, or Triton's interpreter, for it imports triton.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from sparsetc.codegen import magnitudes as rules

BLOCK, TOP = tl.constexpr(rules.BLOCK), tl.constexpr(rules.TOP)


@triton.jit
def magnitude(v):
    """The bits of absolute values."""
    return v.to(tl.int32, bitcast=True) & TOP


@triton.jit(do_not_specialize=["programs"])
def find(values, found, count, programs):
    """Each program: the extremes of every so many blocks, and two atomics."""
    program, lane = tl.program_id(0), tl.arange(0, BLOCK).to(tl.int64)
    full, wide = count // BLOCK, tl.full([], BLOCK, tl.int64)
    # The last values, of which no block is full, are the first program's.
    at = lane + full * wide
    most = magnitude(tl.load(values + at, mask=(at < count) & (program == 0), other=0))
    least = tl.where(most > 0, TOP - most, 0)
    for block in range(program, full, programs):
        bits = magnitude(tl.load(values + (lane + block * wide)))
        most = tl.maximum(most, bits)
        least = tl.maximum(least, tl.where(bits > 0, TOP - bits, 0))
    tl.atomic_max(found, tl.max(most, 0), sem="relaxed")
    tl.atomic_max(found + 1, tl.max(least, 0), sem="relaxed")
