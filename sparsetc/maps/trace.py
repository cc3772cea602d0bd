"""Functions of torch operations -> `Elementwise`.

In: a function of named tensors that gives named tensors, all of one shape. Out: its operations, or `Untraced`, which
says what kernels do not have. The function is traced with stand-ins that hold no numbers, so it cannot branch on them.
What is not in the table is taken apart by torch's own decompositions: gelu, leaky_relu, softplus and so on, and the
derivatives that `torch.func.vjp` in the function makes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from inspect import signature
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsetc.errors import KeywordError
from sparsetc.maps.elementwise import INPUT, TEXT, Argument, Builder, Elementwise, Ref
from sparsetc.support import Names

SAME = {"bitwise_and": "logical_and", "bitwise_or": "logical_or", "bitwise_not": "logical_not"}
PASSED = frozenset({"alias", "clone", "detach", "lift_fresh", "lift_fresh_copy", "_to_copy"})
FILLED = {"full": 1, "full_like": 1, "scalar_tensor": 0}
"""Operations that give a constant, and the position of the argument with its value."""
UNWRITTEN = frozenset({"empty", "empty_like", "empty_permuted"})
BUILT = frozenset({"neg", "clamp", "copy", "floor_divide", "ones_like", "remainder", "zeros_like"})
"""Operations that are built of several."""
KNOWN = frozenset({*TEXT, *SAME, *PASSED, *FILLED, *UNWRITTEN, *BUILT})
SIZE = 7
"""Elements of a stand-in; what has another shape is not elementwise."""


class Untraced(Exception):
    """Raised for a function with an operation that kernels lack; the text names it."""


def trace(function: Callable[..., Mapping[str, Tensor]], inputs: Sequence[str]) -> Elementwise:
    """Return the operations of ``function(**inputs)``, by the names of what it returns.

    Raises:
        Untraced: the function cannot be traced, or has an operation that is not elementwise or not in the table.
    """
    names: list[str] = []

    def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
        results = function(**dict(zip(inputs, tensors, strict=True)))
        names[:] = results
        return tuple(results.values())

    graph = graph_of(flat, [torch.full((SIZE,), 0.5) for _ in inputs])
    reader = Reader(graph, inputs)
    return Elementwise(tuple(reader.builder.operations), dict(zip(names, reader.outputs, strict=True)))


def graph_of(function: Callable[..., Any], stand_ins: Sequence[Tensor]) -> torch.fx.GraphModule:
    """Return the operations of a function of tensors like these; what else it reads are attributes of the graph."""
    if not torch.cuda.is_available():  # torch 2.10 crashes if the thread that set this first is gone
        torch._C._ensureCUDADeviceGuardSet()
    with ThreadPoolExecutor(1) as thread:  # where no mode, transform or graph of torch watches, as some do this call
        return thread.submit(_graph, function, stand_ins).result()


def _graph(function: Callable[..., Any], stand_ins: Sequence[Tensor]) -> torch.fx.GraphModule:
    from torch.fx.experimental.proxy_tensor import make_fx  # takes a second to import

    how: dict[str, Any] = {"tracing_mode": "fake", "_allow_non_fake_inputs": True}
    try:
        graph = make_fx(torch.func.functionalize(function), **how)(*stand_ins)
        if any(node.op == "call_function" and name_of(node) not in KNOWN for node in graph.graph.nodes):
            graph = make_fx(graph, decomposition_table=_decompositions(), **how)(*stand_ins)
    except Exception as error:  # of any kind: the function is a user's
        reason = str(error).strip().partition("\n")[0]
        raise Untraced(f"it cannot be traced ({type(error).__name__}: {reason:.160})") from error
    return graph


@cache
def _decompositions() -> dict[Any, Any]:
    """Return torch's decompositions of what the table lacks."""
    from torch._decomp import core_aten_decompositions, decomposition_table

    with_schema = {op: made for op, made in decomposition_table.items() if hasattr(op, "_schema")}
    return core_aten_decompositions() | {op: made for op, made in with_schema.items() if _base(op) not in KNOWN}


def _base(operator: Any) -> str:
    """Return an operator's name without namespace, overload and the mark of writing in place."""
    return str(operator._schema.name.split("::")[1].rstrip("_"))


def name_of(node: torch.fx.Node) -> str:
    """Return the name of an operation, without namespace, overload and the mark of writing in place."""
    schema = getattr(node.target, "_schema", None)
    return str(node.target) if schema is None else _base(node.target)


class Reader:
    """Reads a traced graph, node by node."""

    def __init__(self, graph: torch.fx.GraphModule, inputs: Sequence[str]) -> None:
        self.builder, self.values = Builder(), dict[torch.fx.Node, Any]()
        names = iter(inputs)
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = self.input(node, next(names))
            elif node.op == "get_attr":
                self.values[node] = self.constant(node, getattr(graph, str(node.target)))
            elif node.op == "call_function":
                self.values[node] = self.result(node)
            else:
                self.outputs = [self._argument(a) for a in node.args[0]]

    def input(self, node: torch.fx.Node, name: str) -> Argument:
        """Return an input of the function."""
        return self.builder.add(INPUT, name)

    def constant(self, node: torch.fx.Node, tensor: Tensor) -> Any:
        """Return the number of a tensor that the function makes."""
        if tensor.numel() != 1 or any(not name_of(user).startswith("lift_fresh") for user in node.users):
            raise Untraced(OUTSIDE)
        return float(tensor)

    def _argument(self, argument: Any) -> Any:
        return self.values[argument] if isinstance(argument, torch.fx.Node) else argument

    def result(self, node: torch.fx.Node) -> Any:
        """Return what one operation gives."""
        name, build = SAME.get(name_of(node), name_of(node)), self.builder.add
        arguments: list[Any] = [self._argument(a) for a in node.args]
        if tuple(node.meta["val"].shape) not in ((SIZE,), ()):
            raise Untraced(f"{name} is not elementwise")
        if name in FILLED:
            return float(arguments[FILLED[name]])
        if name in ("zeros_like", "ones_like"):
            return float(name == "ones_like")
        if name in UNWRITTEN:  # to be copied into
            return math.nan
        if name == "copy":
            return arguments[1]
        if name in PASSED:
            return self._converted(node, arguments[0])
        rounding = node.kwargs.get("rounding_mode")
        if name == "floor_divide" or rounding == "floor":
            return self._floor(*arguments)
        if rounding is not None:
            raise Untraced(f"kernels have no division rounded by {rounding}")
        if name == "clamp":
            low, high = [*arguments[1:], None][:2]
            result = arguments[0] if low is None else build("maximum", arguments[0], low)
            return result if high is None else build("minimum", result, high)
        if name == "remainder":
            return build("sub", arguments[0], build("mul", self._floor(*arguments), arguments[1]))
        whole = not (node.meta["val"].dtype == torch.bool or node.meta["val"].dtype.is_floating_point)
        if (name not in TEXT and name != "neg") or (whole and name_of(node) in (*SAME, "pow")):
            raise Untraced(f"kernels have no {name_of(node)}{' of whole numbers' if whole else ''}")
        if node.kwargs.get("alpha", 1) != 1:
            arguments[1] = build("mul", arguments[1], node.kwargs["alpha"])
        return build(name, *arguments)

    def _floor(self, value: Argument, divisor: Any) -> Argument:
        """Return the floor of a quotient, which a constant makes exact."""
        if isinstance(divisor, Ref) or not divisor > 0:
            raise Untraced("kernels divide to whole numbers, and have remainders, by positive constants alone")
        return self.builder.add("floor", self.builder.add("div", value, divisor))

    def _converted(self, node: torch.fx.Node, value: Argument) -> Argument:
        """Return a value in the type of the node: all numbers are float32 as they are, and bool becomes 0 or 1."""
        source: Any = node.args[0]
        before, after = source.meta["val"].dtype, node.meta["val"].dtype
        if before == after or (before != torch.bool and after in FLOATS):
            return value
        if before == torch.bool:
            return self.builder.add("where", value, 1.0, 0.0)
        raise Untraced(f"it converts {before} to {after}")


FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
OUTSIDE = "it reads a tensor that is not among its arguments"


LIBRARIES = {"torch", "math", "numpy", "operator", "builtins"}
"""Modules whose functions stay as they are."""
DEEP = 4
"""Most functions, attributes and elements between a function and a value that it reads."""


def told_apart(function: Callable[..., Any], tensors: list[Tensor] | None = None) -> Hashable:
    """Return a key that is equal for functions with the same code and the same values read; else the function.

    Args:
        function: of a user.
        tensors: to be filled with those that the function reads, whose values are then not part of the key.
    """
    called = function if isinstance(function, FunctionType | MethodType) else vars(type(function)).get("__call__")
    if called is None:
        return function
    if called is not function:
        called = MethodType(called, function)
    try:
        return _read(called, (), DEEP, tensors)
    except (Untraced, AttributeError, ValueError):  # cells without contents, methods without code
        if tensors:
            tensors.clear()
        return function


def _read(value: Any, names: Sequence[str], deep: int, tensors: list[Tensor] | None) -> Hashable:
    """Return a key of all in a value that a function with these names in its code may read."""
    if isinstance(value, Tensor) and tensors is not None:
        places = [n for n, one in enumerate(tensors) if one is value]
        tensors += [] if places else [value]
        return Tensor, *(places or [len(tensors) - 1]), value.dtype, value.ndim, value.numel() == 1
    if isinstance(value, Tensor | np.ndarray):
        raise Untraced(OUTSIDE)
    if value is None or isinstance(value, int | float | complex | str):
        return type(value), value
    home = str(getattr(value, "__module__", None) or getattr(value, "__name__", "")).partition(".")[0]
    if deep and home not in LIBRARIES:

        def key(one: Any, names: Sequence[str] = names) -> Hashable:
            return _read(one, names, deep - 1, tensors)

        if isinstance(value, list | tuple):
            return type(value), *map(key, value)
        if isinstance(value, dict):
            return type(value), *[(name, key(one)) for name, one in value.items()]
        if isinstance(value, MethodType):
            return key(value.__func__), key(value.__self__, value.__func__.__code__.co_names)
        if isinstance(value, FunctionType):
            names = _names(value.__code__)
            outside = [value.__globals__[name] for name in names if name in value.__globals__]
            outside += [cell.cell_contents for cell in value.__closure__ or ()]
            outside += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
            return value.__code__, *[key(one, names) for one in outside]
        before = len(tensors or ())
        try:
            if attributes := [key(getattr(value, name)) for name in names if hasattr(value, name)]:
                return type(value), *attributes
        except Untraced:
            del (tensors or [])[before:]
    try:
        hash(value)
    except TypeError:
        raise Untraced("it reads what may change unseen") from None
    return value  # type: ignore[no-any-return]


@lru_cache(maxsize=256)
def _names(code: CodeType) -> Names:
    """Return the names of globals and attributes in some code, and in that of functions within it, each once."""
    within = [name for one in code.co_consts if isinstance(one, CodeType) for name in _names(one)]
    return tuple(dict.fromkeys([*code.co_names, *within]))


def check_takes(function: Any, what: str, positional: int, names: Sequence[str] = ()) -> None:
    """Raise `KeywordError` unless a function takes so many arguments by position and these by name."""
    try:
        signature(function).bind(*range(positional), **dict.fromkeys(names))
    except TypeError as error:
        arguments = f"arguments named {', '.join(names)}" if names else f"{positional} arguments"
        raise KeywordError(f"{what} calls the function with {arguments}: {error}") from None
    except ValueError:  # a function of C that does not say what it takes
        pass
