"""Elementwise functions as data: operations in order, with constants folded, their text in Triton, and their results.

In: operations, one at a time. Out: an `Elementwise`, which a printer asks for the statements of some of its outputs,
and which torch computes.

    operation ::= (name, argument*)                       name: a key of TEXT, or "input" with an input's name
    argument  ::= Ref | number                            Ref: the place of an earlier operation
    output    ::= name: Ref | number
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from sparsetc.support import cached_property

TEXT = {
    "abs": "tl.abs({0})",
    "add": "{0} + {1}",
    "cos": "tl.cos({0})",
    "div": "{0} / {1}",
    "eq": "{0} == {1}",
    "erf": "tl.erf({0})",
    "exp": "tl.exp({0})",
    "exp2": "tl.exp2({0})",
    "expm1": "tl.exp({0}) - 1.0",
    "floor": "tl.floor({0})",
    "ge": "{0} >= {1}",
    "gt": "{0} > {1}",
    "isnan": "{0} != {0}",
    "le": "{0} <= {1}",
    "log": "tl.log({0})",
    "log1p": "tl.log(1.0 + {0})",
    "log2": "tl.log2({0})",
    "logical_and": "{0} & {1}",
    "logical_not": "{0} == 0",
    "logical_or": "{0} | {1}",
    "lt": "{0} < {1}",
    "maximum": "tl.maximum({0}, {1}, tl.PropagateNan.ALL)",
    "minimum": "tl.minimum({0}, {1}, tl.PropagateNan.ALL)",
    "mul": "{0} * {1}",
    "ne": "{0} != {1}",
    "pow": "tl.exp2({1} * tl.log2({0}))",
    "reciprocal": "1.0 / {0}",
    "relu": "tl.maximum({0}, 0.0, tl.PropagateNan.ALL)",
    "rsqrt": "tl.rsqrt({0})",
    "sigmoid": "tl.sigmoid({0})",
    "sign": "tl.where({0} > 0, 1.0, 0.0) - tl.where({0} < 0, 1.0, 0.0)",
    "sin": "tl.sin({0})",
    "sqrt": "tl.sqrt({0})",
    "sub": "{0} - {1}",
    "tanh": "2.0 * tl.sigmoid(2.0 * {0}) - 1.0",
    "where": "tl.where({0}, {1}, {2})",
}
"""Expressions of the operations that kernels have, by torch's names. Arguments are names or numbers."""

INPUT = "input"


class Ref(int):
    """The place of an operation."""


Argument = Ref | float
Operation = tuple[str, tuple[Any, ...]]


def number_text(value: float) -> str:
    """Return a number as Triton's source has it."""
    return repr(value) if math.isfinite(value) else f'float("{value}")'


@dataclass(frozen=True)
class Elementwise:
    """An elementwise function of tensors of one shape, as a list of operations.

    Attributes:
        operations: in an order in which each follows its arguments.
        outputs: by name.
    """

    operations: tuple[Operation, ...]
    outputs: Mapping[str, Argument]

    def peeled(self, output: str) -> tuple[Argument, float]:
        """Return an output without its constant factors, and their product: a sum takes them once, at its end."""
        argument, factor = self.outputs[output], 1.0
        while isinstance(argument, Ref):
            name, arguments = self.operations[argument]
            if name != "mul" or isinstance(arguments[1], Ref):
                break
            argument, factor = arguments[0], factor * arguments[1]
        return argument, factor

    def needed(self, arguments: Iterable[Argument]) -> list[Ref]:
        """Return the operations that these arguments depend on, in order, with the arguments themselves."""
        reached: set[Ref] = set()
        waiting = [a for a in arguments if isinstance(a, Ref)]
        while waiting:
            ref = waiting.pop()
            if ref not in reached:
                reached.add(ref)
                waiting += [a for a in self.operations[ref][1] if isinstance(a, Ref)]
        return sorted(reached)

    def inputs(self, arguments: Iterable[Argument]) -> set[str]:
        """Return the names of the inputs that these arguments depend on."""
        operations = [self.operations[ref] for ref in self.needed(arguments)]
        return {arguments[0] for name, arguments in operations if name == INPUT}

    @cached_property
    def reads(self) -> set[str]:
        """The names of all inputs that outputs depend on."""
        return self.inputs(self.outputs.values())

    def scaled(self, names: Container[str]) -> tuple[Elementwise, dict[str, float]]:
        """Return the function of scaled inputs, and the constant by which each of these is scaled.

        They are the inputs among `names` that are read only to be multiplied by one constant.
        """
        operations, scales = list(self.operations), dict[str, float]()
        for place, (kind, of) in enumerate(self.operations):
            if kind != INPUT or of[0] not in names or any(_is(a, place) for a in self.outputs.values()):
                continue
            readers = {n: o for n, o in enumerate(self.operations) if any(_is(a, place) for a in o[1])}
            factors = {arguments[1] if name == "mul" else None for name, arguments in readers.values()}
            factor = factors.pop() if len(factors) == 1 else None
            if isinstance(factor, float) and not isinstance(factor, Ref):
                scales[of[0]] = factor
                operations = [(kind, of) if n in readers else o for n, o in enumerate(operations)]
        return Elementwise(tuple(operations), self.outputs), scales

    def computed(self, arguments: Iterable[Argument], inputs: Mapping[str, Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Return these outputs of tensors of a type that broadcast."""
        arguments, results = list(arguments), dict[Ref, Tensor]()

        def of(argument: Argument) -> Tensor:
            return results[argument] if isinstance(argument, Ref) else torch.scalar_tensor(argument, dtype=dtype)

        for ref in self.needed(arguments):
            name, operands = self.operations[ref]
            results[ref] = inputs[operands[0]] if name == INPUT else getattr(torch, name)(*map(of, operands))
        return [of(a).to(dtype) for a in arguments]

    def of(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the first output of tensors that broadcast."""
        dtype = reduce(torch.promote_types, [t.dtype for t in inputs.values()])
        return self.computed([*self.outputs.values()][:1], inputs, dtype)[0]

    def statements(
        self,
        arguments: Iterable[Argument],
        names: Mapping[str, str],
        prefix: str = "map",
        expressions: Mapping[str, str] = TEXT,
    ) -> tuple[list[str], list[str]]:
        """Return statements that compute these, one an operation, and the name or number of each of them.

        Args:
            arguments: outputs, or outputs without factors.
            names: the variable of each input.
            prefix: of variables.
            expressions: of operations.
        """
        arguments, variables = list(arguments), dict[Ref, str]()
        lines = []

        def text(argument: Argument) -> str:
            return variables[argument] if isinstance(argument, Ref) else number_text(argument)

        for ref in self.needed(arguments):
            name, operands = self.operations[ref]
            if name == INPUT:
                variables[ref] = names[operands[0]]
                continue
            variables[ref] = f"{prefix}_{int(ref)}"
            lines.append(f"{prefix}_{int(ref)} = {expressions[name].format(*map(text, operands))}")
        return lines, [text(a) for a in arguments]


def _is(argument: Any, place: int) -> bool:
    return isinstance(argument, Ref) and argument == place


FOLDED: dict[str, Callable[[float, float], float]] = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}
COMPARED = frozenset({"eq", "ge", "gt", "le", "lt", "ne"})


class Builder:
    """Collects operations: equal ones once, constants folded, a constant factor as the second argument of `mul`.

    A division by a constant multiplies by its reciprocal, which is rounded: 41 / 41 may be less than 1. So the floor of
    a quotient is corrected by what is left, and not the quotient is compared with a number, but what was divided.
    """

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self._places: dict[Any, Ref] = {}
        self._quotients: dict[Argument, tuple[Argument, float]] = {}

    def add(self, name: str, *arguments: Any) -> Argument:
        """Return the result of an operation, expressed by the kept operations where possible."""
        if name == "neg":
            return self.add("mul", arguments[0], -1.0)
        if name == "div" and not isinstance(arguments[1], Ref):
            return self._quotient(arguments[0], arguments[1])
        if name == "floor" and arguments[0] in self._quotients:
            return self._floor(arguments[0])
        if name in COMPARED and not isinstance(arguments[1], Ref) and arguments[0] in self._quotients:
            value, divisor = self._quotients[arguments[0]]
            return self._kept(name, (value, arguments[1] * divisor))
        if name == "pow" and not isinstance(arguments[1], Ref) and arguments[1] in (1, 2, -1):
            return self._power(arguments[0], int(arguments[1]))
        if name in FOLDED:
            return self._folded(name, arguments[0], arguments[1])
        return self._kept(name, arguments)

    def _quotient(self, value: Argument, divisor: float) -> Argument:
        quotient = self.add("mul", value, 1.0 / divisor if divisor else math.inf)
        if divisor > 0 and math.frexp(divisor)[0] != 0.5 and isinstance(quotient, Ref):
            self._quotients[quotient] = value, divisor
        return quotient

    def _floor(self, quotient: Argument) -> Argument:
        value, divisor = self._quotients[quotient]
        floor = self._kept("floor", (quotient,))
        rest = self.add("sub", value, self.add("mul", floor, divisor))
        lower = self.add("where", self.add("lt", rest, 0.0), self.add("sub", floor, 1.0), floor)
        return self.add("where", self.add("ge", rest, divisor), self.add("add", floor, 1.0), lower)

    def _power(self, base: Argument, exponent: int) -> Argument:
        if exponent == 2:
            return self.add("mul", base, base)
        return base if exponent == 1 else self.add("reciprocal", base)

    def _folded(self, name: str, first: Argument, second: Argument) -> Argument:
        if name != "sub" and not isinstance(first, Ref):
            first, second = second, first
        if isinstance(second, Ref):
            return self._kept(name, (first, second))
        if not isinstance(first, Ref):
            return FOLDED[name](first, second)
        if second == (1 if name == "mul" else 0):
            return first
        before, arguments = self.operations[first]
        if name == before == "mul" and not isinstance(arguments[1], Ref):
            return self._folded("mul", arguments[0], arguments[1] * second)
        return self._kept(name, (first, float(second)))

    def _kept(self, name: str, arguments: tuple[Any, ...]) -> Ref:
        key = name, tuple((type(a), a) for a in arguments)
        if key not in self._places:
            self._places[key] = Ref(len(self.operations))
            self.operations.append((name, arguments))
        return self._places[key]
