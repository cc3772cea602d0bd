"""Functions of one number for generated native loops, by the names that `maps.elementwise.TEXT` has for them."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import math
from collections.abc import Sequence
from math import cos, erf, exp, expm1, factorial, log1p, log2, sin, sqrt, tanh

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload, register_jitable
from numpy import floor

__all__ = ["cos", "erf", "exp", "exp2", "expm1", "floor", "log", "log1p", "log2", "maximum", "minimum", "mixed"]
__all__ += ["rsqrt", "sigmoid", "sin", "sqrt", "tanh", "where"]

POWERS = [math.log(2) ** n / factorial(n) for n in range(8)]
"""Taylor's series of 2 ** x, which is right to float32's last digits for x of half a unit."""


def constant(value: float):
    return ir.Constant(ir.FloatType(), float(np.float32(value)))


def _fused(builder, a, b, c):
    """Return a * b + c, rounded once where the machine does that."""
    return builder.fadd(builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))


def _polynomial(builder, factors: Sequence[float], x):
    """Return the sum of factors, the highest power's first, times powers of x."""
    result = constant(factors[0])
    for factor in factors[1:]:
        result = _fused(builder, result, x, constant(factor))
    return result


@intrinsic
def _exp2(typing, x):
    """Return 2 ** x of float32, without a call, so that loops of it are made of vectors; below 2 ** -126 it is 0."""

    def code(context, builder, signature, arguments):
        number, whole, value = ir.FloatType(), ir.IntType(32), arguments[0]
        for sign, end in (("<", -127.0), (">", 128.0)):  # NaN stays
            value = builder.select(builder.fcmp_ordered(sign, value, constant(end)), constant(end), value)
        rounded = builder.call(
            builder.module.declare_intrinsic("llvm.floor", [number]), [builder.fadd(value, constant(0.5))]
        )
        result = _polynomial(builder, POWERS[::-1], builder.fsub(value, rounded))
        exponent = builder.shl(builder.fptosi(rounded, whole), whole(23))
        bits = builder.add(builder.bitcast(result, whole), exponent)
        small = builder.fcmp_ordered("<", value, constant(-126.0))
        return builder.select(small, constant(0.0), builder.bitcast(bits, number))

    return x(x), code


def exp2(x):
    """Return 2 ** x."""
    raise NotImplementedError


@overload(exp2, strict=False)  # type: ignore[untyped-decorator]
def _(x):
    if x == types.float32:
        return lambda x: _exp2(x)  # type: ignore[call-arg]
    return lambda x: np.exp2(x)


LOGARITHM = [-0.130310059, 0.140869141, -0.121483512, 0.139814854, -0.166846126, 0.200120345, -0.2499962, 0.333331972]
LOGARITHM += [-0.5, 1.0, 0.0]
"""Factors of r ** 10 down to r ** 0 in log(1 + r), for r from -1/3 to 1/3 (Juffa's, of least error in float32)."""


@intrinsic
def _log(typing, x):
    """Return the logarithm of a float32 without a call, for loops of vectors."""

    def code(context, builder, signature, arguments):
        number, whole = ir.FloatType(), ir.IntType(32)
        given, tiny = arguments[0], builder.fcmp_ordered("<", arguments[0], constant(2.0**-126))
        value = builder.select(tiny, builder.fmul(given, constant(2.0**23)), given)
        bits = builder.bitcast(value, whole)
        exponent = builder.ashr(builder.sub(bits, whole(0x3F2AAAAB)), whole(23))  # of 2/3 to 4/3
        rest = builder.bitcast(builder.sub(bits, builder.shl(exponent, whole(23))), number)
        rest = builder.fsub(rest, constant(1.0))
        result = _polynomial(builder, LOGARITHM, rest)
        exponent = builder.sitofp(builder.sub(exponent, builder.select(tiny, whole(23), whole(0))), number)
        result = _fused(builder, exponent, constant(math.log(2)), result)
        result = builder.select(builder.fcmp_ordered("<", given, constant(math.inf)), result, given)  # NaN stays
        zero = builder.select(builder.fcmp_ordered("==", given, constant(0.0)), constant(-math.inf), constant(math.nan))
        return builder.select(builder.fcmp_unordered("<=", given, constant(0.0)), zero, result)

    return x(x), code


def log(x):
    """Return the natural logarithm."""
    raise NotImplementedError


@overload(log, strict=False)  # type: ignore[untyped-decorator]
def _(x):
    if x == types.float32:
        return lambda x: _log(x)  # type: ignore[call-arg]
    return lambda x: math.log(x)


@register_jitable  # type: ignore[untyped-decorator]
def maximum(x, y):
    """Return the larger number, or NaN if one is."""
    return x if x > y or x != x else y


@register_jitable  # type: ignore[untyped-decorator]
def minimum(x, y):
    """Return the smaller number, or NaN if one is."""
    return x if x < y or x != x else y


@register_jitable  # type: ignore[untyped-decorator]
def where(condition, x, y):
    """Return x where the condition holds, else y."""
    return x if condition else y


@register_jitable  # type: ignore[untyped-decorator]
def sigmoid(x):
    """Return the logistic function."""
    return 1 / (1 + exp(-x))


@register_jitable  # type: ignore[untyped-decorator]
def rsqrt(x):
    """Return the reciprocal of the root."""
    return 1 / sqrt(x)


@register_jitable  # type: ignore[untyped-decorator]
def mixed(x):
    """Return a hash of 32 bits (lowbias32, Wellons 2018)."""
    x = np.uint32(x)
    x = np.uint32((x ^ (x >> 16)) * 0x7FEB352D)
    x = np.uint32((x ^ (x >> 15)) * 0x846CA68B)
    return np.uint32(x ^ (x >> 16))
