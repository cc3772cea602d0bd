"""Triton's interpreter without what it does for nothing, or again; it takes a third of the time that it would.

The language's rules of types say what an operation of two tensors does: which of them are converted, how they are
broadcast, which function of numpy is called. That is looked up once for two types and kept as a `Recipe`, once numpy
alone has given what the interpreter gave. A function's source is rewritten once for all tests that load it.
"""

from __future__ import annotations

import ast
import inspect
import linecache
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from math import prod
from types import CodeType
from typing import Any, NamedTuple

import numpy as np

OPERATIONS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift")
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
NATIVE = {"int1", *(f"{s}int{n}" for s in ("", "u") for n in (8, 16, 32, 64)), "fp16", "fp32", "fp64"}
"""Types that numpy has, so that a conversion is one of numpy's."""


def faster() -> None:
    """Leave out checks of overflow, which are not asserted, and keep what is computed again and again."""
    from triton.language import core
    from triton.runtime import interpreter

    options = interpreter.interpreter_builder.options
    if not options.debug:
        interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
    _patch_once(core, interpreter)
    _keep_types(core, interpreter)
    _keep_sources(interpreter)
    if not options.debug:
        _keep_recipes(core, interpreter)
        _keep_views(core, interpreter)


def _patch_once(core: Any, interpreter: Any) -> None:
    """Patch the language for a function that a kernel calls only where the kernel's own patch is gone."""
    patch = interpreter._patch_lang

    @cache
    def languages(function: Any) -> list[Any]:
        modules = [v for v in function.__globals__.values() if inspect.ismodule(v)]
        return [language for language in (interpreter.tl, core) if language in modules]

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        if any(core.is_builtin(language.store) for language in languages(function.fn)):
            patch(function.fn)
        try:
            return function.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    @cache
    def patches(package: Any) -> list[tuple[str, Callable[..., Any]]]:
        scope = interpreter._LangPatchScope()
        unpatched = [(name, member) for name, member in inspect.getmembers(package) if core.is_builtin(member)]
        for name, member in unpatched:
            interpreter._patch_attr(package, name, member, interpreter.interpreter_builder, scope)
        patched = [(name, getattr(package, name)) for name, _ in unpatched]
        scope.restore()
        return patched

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        for name, member in patches(package):
            if core.is_builtin(getattr(package, name)):
                scope.set_attr(package, name, member)

    interpreter.InterpretedFunction.__call__ = call
    interpreter._patch_builtin = patch_builtin


def _keep_types(core: Any, interpreter: Any) -> None:
    """Make what a tensor's shape and type say once for all tensors of these; a third of the time went there."""
    numpy_type, constexpr = interpreter._get_np_dtype, core.constexpr

    @cache
    def shape_of(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        return core.tuple(map(constexpr, sizes)), constexpr(prod(sizes))

    @cache
    def block_of(element: str, sizes: tuple[int, ...]) -> tuple[Any, int, str]:
        shape = core.tuple(sizes)
        return shape, core.validate_block_shape(shape), f"<{shape}, {element}>"

    def make_tensor(tensor: Any, handle: Any, type: Any) -> None:
        tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
        tensor.shape, tensor.numel = shape_of(tuple(type.shape) if type.is_block() else ())

    def make_type(block: Any, element_ty: Any, shape: Sequence[Any]) -> None:
        sizes = tuple([size.value if isinstance(size, constexpr) else size for size in shape])
        if not sizes:
            raise TypeError("0d block_type is forbidden")
        block.element_ty = element_ty
        block.shape, block.numel, block.name = block_of(element_ty.name, sizes)

    @cache
    def scalar_type(name: str) -> Any:
        return numpy_type(core.dtype(name))

    def kept_type(dtype: Any) -> Any:
        scalar = dtype.element_ty if isinstance(dtype, core.block_type) else dtype
        return numpy_type(scalar) if isinstance(scalar, core.pointer_type) else scalar_type(scalar.name)

    @cache
    def fits(itemsize: int, name: str) -> bool:
        return 8 * itemsize <= max(8, core.dtype(name).primitive_bitwidth)

    def make_handle(handle: Any, data: Any, dtype: Any, attr: dict[str, Any] | None = None) -> None:
        handle.data, handle.dtype, handle.attr = data, dtype, attr or {}
        if isinstance(dtype, core.dtype) and not dtype.is_ptr() and not fits(data.itemsize, dtype.scalar.name):
            raise ValueError(f"elements of {data.itemsize} bytes are no {dtype}")

    core.tensor.__init__ = make_tensor
    core.block_type.__init__ = make_type
    interpreter._get_np_dtype = kept_type
    interpreter.TensorHandle.__init__ = make_handle


# -- sources ----------------------------------------------------------------------------------------------------------


def _keep_sources(interpreter: Any) -> None:
    """Write the conversions of assigned values into a function's tree once for all functions of the same code."""

    @lru_cache(4)  # a file's functions follow one another; trees that stay are what garbage collections look at
    def tree(filename: str, text: str) -> dict[int, ast.FunctionDef]:
        functions = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef))
        return {min(part.lineno for part in (f, *f.decorator_list)): f for f in functions}

    @cache
    def compiled(code: CodeType, filename: str, text: str) -> CodeType:
        function = tree(filename, text)[code.co_firstlineno]
        function.decorator_list = []
        for assigned in assignments(function.body):
            if len(assigned.targets) > 1:
                raise ValueError("Multiple assignments are not supported")
            assigned.value = converted(assigned.value)
        return compile(ast.Module([function], []), filename, "exec")

    def rewritten(rewriter: Any) -> Any:
        function = rewriter.fn
        filename = function.__code__.co_filename
        linecache.checkcache(filename)
        text = "".join(linecache.getlines(filename, function.__globals__))
        if not text:
            return function
        names = {**rewriter.kwargs}
        for key, value in vars(interpreter).items():
            function.__globals__.setdefault(key, value)
        exec(compiled(function.__code__, filename, text), function.__globals__, names)
        return names[function.__name__]

    interpreter.FunctionRewriter.rewrite_ast = rewritten


def assignments(statements: Iterable[ast.stmt]) -> Iterator[ast.Assign]:
    """All assignments among statements, and in what these contain."""
    for statement in statements:
        if isinstance(statement, ast.Assign):
            yield statement
        for part in ("body", "orelse", "finalbody"):
            yield from assignments(getattr(statement, part, ()))


def converted(value: ast.expr) -> ast.expr:
    """The value as a tensor where it is a number: `interpreter_semantic.to_tensor(value, False)`."""
    call = ast.parse("interpreter_semantic.to_tensor(None, False)", mode="eval").body
    assert isinstance(call, ast.Call)
    for node in ast.walk(call):
        ast.copy_location(node, value)
    call.args[0] = value
    return call


# -- operations of two tensors ----------------------------------------------------------------------------------------


class Recipe(NamedTuple):
    """What an operation does to operands of two types.

    Attributes:
        apply: numpy's function of the two operands' elements.
        dtypes: what elements are converted to before.
        constant: the second operand where it is a number.
        element: the type of the result's handle.
        result: the result's other attributes.
    """

    apply: Callable[[Any, Any], Any]
    dtypes: tuple[np.dtype[Any], np.dtype[Any]]
    constant: Any
    element: Any
    result: dict[str, Any]


def _keep_recipes(core: Any, interpreter: Any) -> None:
    """Look up by the types of two operands what an operation does to them."""
    tensor, constexpr, semantic = core.tensor, core.constexpr, interpreter.interpreter_semantic
    noted, made = _noted(interpreter), _maker(core, interpreter)

    def kept(name: str, swapped: bool) -> Callable[..., Any]:
        slow = getattr(tensor, name)
        recipes: dict[Any, Recipe | None] = {}

        def recorded(key: Any, first: Any, second: Any) -> Any:
            noted.clear()
            result = slow(first, second, _semantic=semantic)
            recipes[key] = recipe_of(noted, first, second, result, swapped) if noted else None
            return result

        def operation(first: Any, second: Any, _semantic: Any = None) -> Any:
            if type(second) is constexpr:
                second = second.value
            among = type(second) is tensor
            key = (first.type.name, second.type.name if among else (type(second), second))
            try:
                recipe = recipes[key]
            except KeyError:
                return recorded(key, first, second)
            if recipe is None:
                return slow(first, second, _semantic=semantic)
            one, other = recipe.dtypes
            right = second.handle.data.astype(other, copy=False) if among else recipe.constant
            data = recipe.apply(first.handle.data.astype(one, copy=False), right)
            return made(data, recipe.element, recipe.result)

        return operation

    for name in OPERATIONS:
        setattr(tensor, f"__{name}__", kept(f"__{name}__", False))
        setattr(tensor, f"__r{name}__", kept(f"__r{name}__", True))
    for name in COMPARISONS:
        setattr(tensor, f"__{name}__", kept(f"__{name}__", False))


def _maker(core: Any, interpreter: Any) -> Callable[[Any, Any, dict[str, Any]], Any]:
    """A function of elements, their type and the other attributes of a tensor, which is not checked again."""
    handle_of, tensor = interpreter.TensorHandle, core.tensor

    def made(data: Any, element: Any, attributes: dict[str, Any]) -> Any:
        handle, result = object.__new__(handle_of), object.__new__(tensor)
        handle.data, handle.dtype, handle.attr = data, element, {}
        result.__dict__.update(attributes)
        result.handle = handle
        return result

    return made


def attributes(result: Any) -> dict[str, Any]:
    """All of a tensor but its elements."""
    return {key: value for key, value in vars(result).items() if key != "handle"}


def _noted(interpreter: Any) -> list[Any]:
    """A list that has, after an operation, the last function of numpy that it called and the elements it was given."""
    noted: list[Any] = []
    builder = interpreter.InterpreterBuilder

    def binary_op(self: Any, left: Any, right: Any, op: Any) -> Any:
        noted[:] = op, left.data, right.data
        return own["binary_op"](self, left, right, op)

    def create_addptr(self: Any, pointer: Any, offset: Any) -> Any:
        width = max(1, pointer.get_element_ty().primitive_bitwidth // 8)
        noted[:] = lambda p, o: p + width * o.astype(np.uint64), pointer.data, offset.data
        return own["create_addptr"](self, pointer, offset)

    def create_idiv(self: Any, left: Any, right: Any) -> Any:
        noted[:] = lambda a, b: (a - np.fmod(a, b)) // b, left.data, right.data
        return own["create_idiv"](self, left, right)

    replaced = (binary_op, create_addptr, create_idiv)
    own = {function.__name__: getattr(builder, function.__name__) for function in replaced}
    for function in replaced:
        setattr(builder, function.__name__, function)
    return noted


def recipe_of(noted: Sequence[Any], first: Any, second: Any, result: Any, swapped: bool) -> Recipe | None:
    """The recipe of an operation that gave the result, if numpy alone gives it; None if not."""
    function, left, right = noted
    tensors = [operand for operand in (first, second) if hasattr(operand, "handle")]
    if any(not (operand.dtype.is_ptr() or operand.dtype.name in NATIVE) for operand in tensors):
        return None
    pointers = [hasattr(operand, "handle") and operand.dtype.is_ptr() for operand in (first, second)]
    if pointers[1] or (swapped and not pointers[0]):
        apply, one, other = (lambda a, b: function(b, a)), right, left
    else:
        apply, one, other = function, left, right
    # A number was broadcast: its first element is all of it.
    constant = None if len(tensors) == 2 else other.reshape(-1)[:1].copy()
    data = result.handle.data
    with np.errstate(all="ignore"):
        again = apply(
            first.handle.data.astype(one.dtype),
            second.handle.data.astype(other.dtype) if constant is None else constant,
        )
    equal = np.array_equal(again, data, equal_nan=data.dtype.kind == "f")
    if (again.shape, again.dtype) != (data.shape, data.dtype) or not equal:
        return None
    return Recipe(apply, (one.dtype, other.dtype), constant, result.handle.dtype, attributes(result))


# -- operations of one tensor -----------------------------------------------------------------------------------------


def _keep_views(core: Any, interpreter: Any) -> None:
    """Look up by its type what new axes and a conversion do to a tensor, and what is read at one of pointers."""
    tensor, semantic, made = core.tensor, interpreter.interpreter_semantic, _maker(core, interpreter)
    index, convert, load = tensor.__getitem__, tensor.to, core.load
    axes: dict[Any, tuple[Any, ...]] = {}
    conversions: dict[Any, tuple[Any, ...]] = {}
    reads: dict[Any, tuple[Any, ...]] = {}

    def with_axes(whole: Any, slices: Any, _semantic: Any = None) -> Any:
        parts = slices if isinstance(slices, tuple) else (slices,)
        key = (whole.type.name, *[part is None for part in parts])
        if key not in axes or any(part is not None and part != slice(None) for part in parts):
            result = index(whole, slices, _semantic=semantic)  # which refuses parts of axes
            axes[key] = (*result.type.shape,), result.handle.dtype, attributes(result)
            return result
        shape, *about = axes[key]
        return made(whole.handle.data.reshape(shape), *about)

    def to(source: Any, dtype: Any, *options: Any, _semantic: Any = None, **others: Any) -> Any:
        dtype = core._unwrap_if_constexpr(dtype)
        if options or others or dtype.name not in NATIVE - {"int1"} or source.dtype.name not in NATIVE:
            return convert(source, dtype, *options, _semantic=semantic, **others)
        key = source.type.name, dtype.name
        if key not in conversions:
            result = convert(source, dtype, _semantic=semantic)
            conversions[key] = result.handle.data.dtype, result.handle.dtype, attributes(result)
            return result
        numpy_type, *about = conversions[key]
        return made(source.handle.data.astype(numpy_type, copy=False), *about)

    def loaded(
        pointer: Any, mask: Any = None, other: Any = None, *rest: Any, _semantic: Any = None, **others: Any
    ) -> Any:
        masked, element = type(mask) is tensor, pointer.dtype.element_ty.name
        numbers = type(other) in (int, float, type(None)) and (not other or element in NATIVE)
        if rest or not numbers or element == "int1" or not (masked or mask is None):
            return load(pointer, mask, other, *rest, _semantic=semantic, **others)
        key = (pointer.type.name, masked and mask.type.name, type(other), other, *others.items())
        if key not in reads:
            result = load(pointer, mask, other, _semantic=semantic, **others)
            data = result.handle.data
            absent = np.full(data.shape, other or 0, dtype=data.dtype)
            reads[key] = absent, np.ones(data.shape, dtype=bool), result.handle.dtype, attributes(result)
            return result
        absent, everywhere, *about = reads[key]
        where = mask.handle.data if masked else everywhere
        pointers = pointer.handle.data
        if where.shape != absent.shape:
            where = np.broadcast_to(where, absent.shape)
        if pointers.shape != absent.shape:
            pointers = np.broadcast_to(pointers, absent.shape)
        return made(interpreter._interpreter.load(pointers, where, absent, absent.dtype), *about)

    tensor.__getitem__, tensor.to = with_axes, to
    core.load = interpreter.tl.load = loaded
