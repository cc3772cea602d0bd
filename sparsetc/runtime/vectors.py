"""Functions for generated native loops, compiled by numba: vectors in registers, unchecked loads, and of one number.

LLVM unrolls a loop over 16 elements whole before it looks for vectors, and then makes none; a local array it stores and
loads again for every nonzero. So loops are printed with vectors as numbers of their own: a value of type ``Vector`` is
some elements in registers, added and multiplied by ``+`` and ``*``, by numbers too. Places in arrays are int64 and not
negative; numba's own indexing tests each of them for that.

Functions of one number have the names that `maps.elementwise.TEXT` has for them.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from functools import lru_cache, partial
from math import cos, erf, exp, expm1, factorial, log1p, log2, sin, sqrt, tanh  # noqa: F401

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core.typing.templates import infer, infer_global, make_concrete_template, signature
from numba.extending import intrinsic, lower_builtin, models, overload, register_jitable, register_model
from numpy import floor  # noqa: F401

LENGTHS = (16, 8, 4, 2)
"""Elements of the vectors that there are functions for."""
FLAGS = ("contract", "nsz")
"""The rounding that is allowed: a product and a sum may be one instruction. Infinities and NaN are kept."""

native = njit(nogil=True, error_model="numpy", fastmath={*FLAGS, "reassoc"})
"""The decorator of a native function, which runs beside other threads of Python."""


class Vector(types.Type):
    """Some elements of a type, in registers."""

    def __init__(self, element, length: int) -> None:
        self.element, self.length = element, length
        super().__init__(name=f"Vector({element}, {length})")


@lru_cache
def _llvm(vector: Vector) -> ir.Type:
    number = ir.IntType(64) if isinstance(vector.element, types.Integer) else None
    if number is None:
        number = ir.FloatType() if vector.element == types.float32 else ir.DoubleType()
    return ir.VectorType(number, vector.length)


register_model(Vector)(lambda manager, vector: models.PrimitiveModel(manager, vector, _llvm(vector)))


def _pointer(context, builder, signature, arguments, kind=None):
    """Return a pointer to a place of an array, the first two arguments, as one to a kind of element."""
    array, at = arguments[:2]
    where = context.cast(builder, at, signature.args[1], types.int64)
    pointer = builder.gep(context.make_array(signature.args[0])(context, builder, array).data, [where])
    return pointer if kind is None else builder.bitcast(pointer, kind.as_pointer())


@intrinsic
def load(typing, array, at):
    """Return the element of a contiguous array at a place, which is not checked."""

    def code(context, builder, signature, arguments):
        pointer = _pointer(context, builder, signature, arguments)
        return context.unpack_value(builder, signature.return_type, pointer)

    return array.dtype(array, at), code


@intrinsic
def store(typing, array, at, value):
    """Write a number, or a vector of neighbours, to a contiguous array from a place on, which is not checked."""

    def code(context, builder, signature, arguments):
        array_type, _, kind = signature.args
        if isinstance(kind, Vector):
            pointer = _pointer(context, builder, signature, arguments, _llvm(kind))
            builder.store(arguments[2], pointer, align=kind.element.bitwidth // 8)
        else:
            number = context.cast(builder, arguments[2], kind, array_type.dtype)
            pointer = _pointer(context, builder, signature, arguments)
            context.pack_value(builder, array_type.dtype, number, pointer)
        return context.get_dummy_value()

    return types.void(array, at, value), code


@intrinsic
def add_up(typing, vector):
    """Return the sum of a vector's elements."""

    def code(context, builder, signature, arguments):
        (vector,), number = signature.args, signature.return_type
        values, length = arguments[0], vector.length
        while length > 1:  # halves are added to one another
            length //= 2
            places = [ir.Constant(ir.VectorType(ir.IntType(32), length), [*range(n, n + length)]) for n in (0, length)]
            undefined = ir.Constant(values.type, ir.Undefined)
            values = _made(
                builder, "add", number, *(builder.shuffle_vector(values, undefined, half) for half in places)
            )
        return builder.extract_element(values, ir.IntType(32)(0))

    return vector.element(vector), code


def _of_length(length: int):
    """Return the functions that load `length` neighbours and make `length` zeros of an array's type."""

    @intrinsic
    def load(typing, array, at):
        def code(context, builder, signature, arguments):
            vector = signature.return_type
            values = builder.load(_pointer(context, builder, signature, arguments, _llvm(vector)))
            values.align = vector.element.bitwidth // 8
            return values

        return Vector(array.dtype, length)(array, at), code

    @intrinsic
    def zeros(typing, array):
        def code(context, builder, signature, arguments):
            return ir.Constant(_llvm(signature.return_type), None)

        return Vector(array.dtype, length)(array), code

    return load, zeros


(load16, zeros16), (load8, zeros8), (load4, zeros4), (load2, zeros2) = map(_of_length, LENGTHS)

# -- operators ---------------------------------------------------------------------------------------------------------


def _made(builder, instruction: str, element: types.Type, left, right):
    """Return what an instruction, of integers or of floats, makes of two vectors of elements."""
    if isinstance(element, types.Integer):
        return getattr(builder, instruction)(left, right)
    return getattr(builder, f"f{instruction}")(left, right, flags=FLAGS)


_INSTRUCTIONS = {operator.add: "add", operator.iadd: "add", operator.mul: "mul"}


def _spread(builder, vector: Vector, kind, value):
    """Return a number repeated as a vector; a vector is returned as it is."""
    if isinstance(kind, Vector):
        return value
    undefined = ir.Constant(_llvm(vector), ir.Undefined)
    first = builder.insert_element(undefined, value, ir.IntType(32)(0))
    places = ir.Constant(ir.VectorType(ir.IntType(32), vector.length), None)
    return builder.shuffle_vector(first, undefined, places)


VECTORS = [Vector(kind, length) for kind in (types.float32, types.float64, types.int64) for length in LENGTHS]
_CASES = [signature(v, *sides) for v in VECTORS for sides in ((v, v), (v, v.element), (v.element, v))]
"""The types of the operators: numbers become elements before they are repeated."""

for _function, _instruction in _INSTRUCTIONS.items():
    _template = infer(make_concrete_template(_instruction, _function, _CASES))
    infer_global(_function, types.Function(_template))

    def _code(context, builder, signature, arguments, instruction=_instruction):
        vector = signature.return_type
        sides = map(partial(_spread, builder, vector), signature.args, arguments)
        return _made(builder, instruction, vector.element, *sides)

    for _sides in ((Vector, Vector), (Vector, types.Number), (types.Number, Vector)):
        lower_builtin(_function, *_sides)(_code)


@register_jitable  # type: ignore[untyped-decorator]
def expand(bits, begins, values, word: int, tile: int, out) -> None:
    """Write to `out` the values of a tile at the positions whose bits are set, in words of `word` bits; 0 elsewhere."""
    first, at = tile * (-(-out.size // word)), begins[tile]
    for position in range(out.size):
        out[position] = 0
        if bits[first + position // word] >> (position % word) & 1:
            out[position] = values[at]
            at += 1


@register_jitable  # type: ignore[untyped-decorator]
def copy(table, first: int, pitch: int, panel, width: int) -> None:
    """Fill a panel with `width` elements of each `pitch` of a table, from `first` on."""
    for row in range(panel.size // width):
        for c in range(width):
            store(panel, row * width + c, load(table, first + row * pitch + c))  # type: ignore[call-arg]


# -- functions of one number ------------------------------------------------------------------------------------------

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
