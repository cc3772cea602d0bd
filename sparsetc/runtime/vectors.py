"""Functions for generated native loops, compiled by numba: vectors in registers, and unchecked loads.

LLVM unrolls a loop over 16 elements whole before it looks for vectors, and then makes none; a local array it stores and
loads again for every nonzero. So loops are printed with vectors as numbers of their own: a value of type ``Vector`` is
some elements in registers, added and multiplied by ``+`` and ``*``, by numbers too. Places in arrays are int64 and not
negative; numba's own indexing tests each of them for that.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, lower_builtin, models, register_jitable, register_model, type_callable

LENGTHS = (16, 8, 4, 2)
"""Elements of the vectors that there are functions for."""
FLAGS = ("contract", "nsz")
"""The rounding that is allowed: a product and a sum may be one instruction. Infinities and NaN are kept."""

native = njit(nogil=True, error_model="numpy", fastmath={*FLAGS, "reassoc"})
"""The decorator of a native function, which runs beside other threads of Python."""


class Vector(types.Type):
    """Some elements of a type, in registers."""

    def __init__(self, element: Any, length: int) -> None:
        self.element, self.length = element, length
        super().__init__(name=f"Vector({element}, {length})")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, _llvm(vector))


@lru_cache
def _llvm(vector: Vector) -> ir.Type:
    number = ir.IntType(64) if isinstance(vector.element, types.Integer) else None
    if number is None:
        number = ir.FloatType() if vector.element == types.float32 else ir.DoubleType()
    return ir.VectorType(number, vector.length)


def _pointer(context: Any, builder: Any, signature: Any, arguments: Any, kind: Any = None) -> Any:
    """Return a pointer to a place of an array, the first two arguments, as one to a kind of element."""
    array, at = arguments[:2]
    where = context.cast(builder, at, signature.args[1], types.int64)
    pointer = builder.gep(context.make_array(signature.args[0])(context, builder, array).data, [where])
    return pointer if kind is None else builder.bitcast(pointer, kind.as_pointer())


@intrinsic
def load(typing: Any, array: Any, at: Any) -> Any:
    """Return the element of a contiguous array at a place, which is not checked."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _pointer(context, builder, signature, arguments)
        return context.unpack_value(builder, signature.return_type, pointer)

    return array.dtype(array, at), code


@intrinsic
def store(typing: Any, array: Any, at: Any, value: Any) -> Any:
    """Write a number, or a vector of neighbours, to a contiguous array from a place on, which is not checked."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
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
def add_up(typing: Any, vector: Any) -> Any:
    """Return the sum of a vector's elements."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        (vector,), number = signature.args, signature.return_type
        values, length = arguments[0], vector.length
        while length > 1:  # halves are added to one another
            length //= 2
            places = [ir.Constant(ir.VectorType(ir.IntType(32), length), [*range(n, n + length)]) for n in (0, length)]
            undefined = ir.Constant(values.type, ir.Undefined)
            values = _add(builder, number, *(builder.shuffle_vector(values, undefined, half) for half in places))
        return builder.extract_element(values, ir.IntType(32)(0))

    return vector.element(vector), code


def _of_length(length: int) -> tuple[Any, Any]:
    """Return the functions that load `length` neighbours and make `length` zeros of an array's type."""

    @intrinsic
    def load(typing: Any, array: Any, at: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            vector = signature.return_type
            values = builder.load(_pointer(context, builder, signature, arguments, _llvm(vector)))
            values.align = vector.element.bitwidth // 8
            return values

        return Vector(array.dtype, length)(array, at), code

    @intrinsic
    def zeros(typing: Any, array: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return ir.Constant(_llvm(signature.return_type), None)

        return Vector(array.dtype, length)(array), code

    return load, zeros


(load16, zeros16), (load8, zeros8), (load4, zeros4), (load2, zeros2) = map(_of_length, LENGTHS)

# -- operators ---------------------------------------------------------------------------------------------------------


def _add(builder: Any, element: types.Type, left: Any, right: Any) -> Any:
    if isinstance(element, types.Integer):
        return builder.add(left, right)
    return builder.fadd(left, right, flags=FLAGS)


def _multiply(builder: Any, element: types.Type, left: Any, right: Any) -> Any:
    if isinstance(element, types.Integer):
        return builder.mul(left, right)
    return builder.fmul(left, right, flags=FLAGS)


_OPERATIONS: dict[Any, Callable[..., Any]] = {operator.add: _add, operator.iadd: _add, operator.mul: _multiply}


def _typed(left: Any, right: Any) -> Any:
    """Return the vector that an operation on these types gives; None if it is not of this module."""
    vector, other = (left, right) if isinstance(left, Vector) else (right, left)
    fits = isinstance(vector, Vector) and (other == vector or isinstance(other, types.Number))
    return vector if fits else None


def _spread(context: Any, builder: Any, vector: Vector, kind: Any, value: Any) -> Any:
    """Return a number repeated as a vector; a vector is returned as it is."""
    if isinstance(kind, Vector):
        return value
    number, undefined = context.cast(builder, value, kind, vector.element), ir.Constant(_llvm(vector), ir.Undefined)
    first = builder.insert_element(undefined, number, ir.IntType(32)(0))
    places = ir.Constant(ir.VectorType(ir.IntType(32), vector.length), None)
    return builder.shuffle_vector(first, undefined, places)


for _function in _OPERATIONS:
    type_callable(_function)(lambda context: _typed)

    def _code(context: Any, builder: Any, signature: Any, arguments: Any, function: Any = _function) -> Any:
        vector = signature.return_type
        sides = map(partial(_spread, context, builder, vector), signature.args, arguments)
        return _OPERATIONS[function](builder, vector.element, *sides)

    for _sides in ((Vector, Vector), (Vector, types.Number), (types.Number, Vector)):
        lower_builtin(_function, *_sides)(_code)


@register_jitable  # type: ignore[untyped-decorator]
def expand(bits: Any, begins: Any, values: Any, word: int, tile: int, out: Any) -> None:
    """Write to `out` the values of a tile at the positions whose bits are set, in words of `word` bits; 0 elsewhere."""
    first, at = tile * (-(-out.size // word)), begins[tile]
    for position in range(out.size):
        out[position] = 0
        if bits[first + position // word] >> (position % word) & 1:
            out[position] = values[at]
            at += 1


@register_jitable  # type: ignore[untyped-decorator]
def copy(table: Any, first: int, pitch: int, panel: Any, width: int) -> None:
    """Fill a panel with `width` elements of each `pitch` of a table, from `first` on."""
    for row in range(panel.size // width):
        for c in range(width):
            store(panel, row * width + c, load(table, first + row * pitch + c))  # type: ignore[call-arg]
