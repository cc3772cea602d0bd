"""Kernels that store values in parts; `codegen.split_pairs` says what parts are, and launches.

In: (nnz,) float32 values, and of each the place where it stands in whole tiles; `line`, the row of tiles that each tile
is in. Out: each row's largest magnitude, then parts, scales and the verdict. Imported only where there is a GPU, or
Triton's interpreter, for it imports triton.

Magnitudes are compared as the bits of their absolute values, which are ordered as they are, with infinities and NaN at
the end.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from sparsetc.codegen import split_pairs as rules

BLOCK = tl.constexpr(rules.BLOCK)
INFINITE_BITS = tl.constexpr(rules.INFINITE_BITS)
LEAST_BITS, MOST_BITS = tl.constexpr(rules.LEAST_BITS), tl.constexpr(rules.MOST_BITS)
SPREAD_BITS = tl.constexpr(rules.SPREAD_BITS)
HEAD, BIAS = tl.constexpr(rules.HEAD), tl.constexpr(rules.BIAS)
LOW = tl.constexpr(rules.LOW)
INEXACT, INFINITE = tl.constexpr(rules.INEXACT), tl.constexpr(rules.INFINITE)
COUNTS = ["nnz", "rows", "volume", "inner", "side"]


@triton.jit
def magnitude(v):
    """The bits of absolute values."""
    return v.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def power(exponent):
    """2 ** (exponent - BIAS)."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def exponents(most):
    """Of each row's largest magnitude, biased; such that the powers by which rows are scaled are normal numbers."""
    return tl.maximum(most >> 23, HEAD + 1)


@triton.jit
def rows_of(line, place, inside, volume, inner, side):
    """The row of each place; volume and inner positions of a tile as exponents of two."""
    tile = tl.load(line + (place >> volume), mask=inside, other=0)
    return tile.to(tl.int64) * side + ((place >> inner) & (side - 1))


@triton.jit(do_not_specialize=COUNTS)
def find_most(values, at, line, most, nnz, volume, inner, side):
    """Each row's largest magnitude."""
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = n < nnz
    bits = magnitude(tl.load(values + n, mask=inside, other=0.0))
    row = rows_of(line, tl.load(at + n, mask=inside, other=0), inside, volume, inner, side)
    tl.atomic_max(most + row, bits, mask=inside & (bits > 0), sem="relaxed")


@triton.jit(do_not_specialize=COUNTS)
def split(values, at, line, most, high, low, scales, verdict, nnz, rows, volume, inner, side):
    """Parts of values, scales of rows, and whether any row's values are too far apart, or too large, for parts."""
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    own = n < rows
    tl.store(scales + n, power(exponents(tl.load(most + n, mask=own, other=0)) - HEAD), mask=own)
    inside = n < nnz
    value = tl.load(values + n, mask=inside, other=0.0)
    place = tl.load(at + n, mask=inside, other=0)
    top = tl.load(most + rows_of(line, place, inside, volume, inner, side), mask=inside, other=0)
    scaled = value * power(-exponents(top) + (2 * BIAS + HEAD))
    first = scaled.to(tl.float16)
    tl.store(high + place, first, mask=inside)
    tl.store(low + place, ((scaled - first.to(tl.float32)) * LOW).to(tl.float16), mask=inside)
    bits = magnitude(value)
    far = (bits > 0) & ((bits < top - SPREAD_BITS) | (top < LEAST_BITS) | (top > MOST_BITS))
    infinite = top >= INFINITE_BITS
    found = tl.max(tl.maximum(infinite.to(tl.int32) * INFINITE, far.to(tl.int32) * INEXACT), 0)
    tl.atomic_max(verdict, found, mask=found > 0, sem="relaxed")
