"""Functions for generated native loops, compiled by numba: vectors in registers, and unchecked loads.

LLVM unrolls a loop over 16 elements whole before it looks for vectors, and then makes none; a local array it stores and
loads again for every nonzero. So loops are printed with vectors as numbers of their own: a value of type ``Vector`` is
some elements in registers, added and multiplied by ``+`` and ``*``, by numbers too. Places in arrays are int64 and not
negative; numba's own indexing tests each of them for that.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import operator
from functools import lru_cache, partial

from llvmlite import ir
from numba import njit, types
from numba.core.typing.templates import infer, infer_global, make_concrete_template, signature
from numba.extending import intrinsic, lower_builtin, models, register_jitable, register_model

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
