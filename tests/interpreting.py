"""Triton's interpreter without what it does for nothing, or again; it takes half of the time that it would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any


def faster() -> None:
    """Compute no checks of overflow, which are not asserted, patch the language once a kernel, and keep types."""
    from triton.language import core
    from triton.runtime import interpreter

    options = interpreter.interpreter_builder.options
    if not options.debug:
        interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
    patch = interpreter._patch_lang

    def patched(function: Any) -> Any:
        """Patch the language for a function that a kernel calls, unless the kernel's own patch is still there."""
        languages = {id(v): v for v in function.__globals__.values() if v in (interpreter.tl, core)}.values()
        if all(not core.is_builtin(language.load) for language in languages):
            return None
        return patch(function)

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        patched(function.fn)
        try:
            return function.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter.InterpretedFunction.__call__ = call
    _keep_types(core, interpreter)


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

    core.tensor.__init__ = make_tensor
    core.block_type.__init__ = make_type
    interpreter._get_np_dtype = kept_type
