"""The report of an einsum with one sparse operand: parts, costs, rooflines, and the candidates of its choice.

In: a `Choice`, and the parts that it was bound to. Out: an `OperandReport`; and the cost as sympy expressions that
people read, of nonzeros, fibers, items, sizes and the rates of a device (`SymbolicCost`). The code that prices plans
runs on numbers that remember how they were made, so an expression is what is priced, and holds as long as the model's
choices (what fits into a cache, which of two bounds is larger) are those of this kernel.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from sparsetc.device.profile import NUMBERS, DeviceProfile
from sparsetc.errors import PlanError
from sparsetc.explain import OperandReport, PartReport, in_microseconds
from sparsetc.ir.equation.einsum import Bound
from sparsetc.ir.nest import Listed
from sparsetc.ir.nest.axes import LANE
from sparsetc.ir.plan import Plan, in_bf16
from sparsetc.ir.program.cost import cost_of
from sparsetc.ir.program.resources import Count, Statistics
from sparsetc.ir.program.text import tile_einsum
from sparsetc.ir.program.tile import Gather, Loop, Product, Statement, TileProgram
from sparsetc.packing.base import Packed, tiles_of_nonzeros
from sparsetc.packing.stored import counts
from sparsetc.planner.candidate import Choice
from sparsetc.planner.pricing import named_levels, seconds_of
from sparsetc.planner.problem import Problem
from sparsetc.support import outside


def report(
    equation: str,
    plan: Plan,
    choice: Choice,
    programs: Sequence[TileProgram],
    packed: Sequence[Packed],
    filled: Sequence[int],
    problem: Problem,
    path: str,
) -> OperandReport:
    """The report of an einsum with one sparse operand.

    Args:
        equation: as it was written.
        plan: of the parts that are run.
        choice: by which the plan was chosen.
        programs: of the plan's parts.
        packed: the parts' arrays.
        filled: for each part, which one of the chosen plan it is.
        problem: what the plan was made for.
        path: of the generated program.
    """
    profile = problem.profile
    costs = [cost_of(program) for program in programs]
    statistics = statistics_of(choice, packed, filled, problem)
    if choice.seconds:
        seconds = [choice.seconds[n] for n in filled]
    else:  # a plan that the caller gave
        seconds = list(seconds_of(plan, costs, statistics, profile))
    nnz, parts = max(1, sum(p.nnz for p in packed)), []
    for n, (part, program) in enumerate(zip(plan.parts, programs, strict=True)):
        resource, floor = costs[n].roofline(statistics[n], profile)
        products, instruction = program.each(Product), "multiply-add"
        if program.dots:
            instruction = "matrix product" if program.at_once else f"tensor core, {program.schedule.precision}"
        if part.schedule.rounded:
            instruction += f", {in_bf16(part.schedule.rounded)}"
        parts.append(
            PartReport(
                number=n,
                format=part.format,
                levels=named_levels(part.storage, program.letters),
                nnz=part.nnz,
                share=part.nnz / nnz,
                nbytes=part.nbytes,
                einsum=tile_einsum(min(products, key=lambda s: not s.dot)) if products else "n->n",
                instruction=instruction,
                predicted_us=1e6 * seconds[n],
                roofline_us=1e6 * floor,
                bound_by=resource,
                label=part.label,
            )
        )
    return OperandReport(
        equation,
        plan.name,
        plan.reason,
        path,
        considered=in_microseconds(choice.considered),
        dismissed=in_microseconds(choice.dismissed),
        timed=tuple((name, 1e6 * taken) for name, taken in choice.measured),
        launches=1 if plan.fused and not programs[0].at_once else len(packed),
        parts=tuple(parts),
        tiles=_tiles(_populations(packed, problem)),
    )


def statistics_of(
    choice: Choice, packed: Sequence[Packed], filled: Sequence[int], problem: Problem
) -> list[Statistics]:
    """Return the sizes of each part as it was packed, with what only the planner counted."""
    statistics = []
    for n, part in zip(filled, packed, strict=True):
        number = counts(part.view, part.arrays, part.items, part.stored)
        fibers = number.get(part.view.positions[LANE], part.items)
        sizes = Statistics(
            part.items,
            fibers,
            part.stored,
            part.nnz,
            problem.itemsize,
            split_rows=part.split_rows,
            split_fibers=part.split_fibers,
        )
        if choice.expected:
            expected = choice.expected[n]
            sizes = replace(sizes, runs=expected.runs, misses=expected.misses, chain=expected.chain)
        statistics.append(sizes)
    return statistics


def _populations(packed: Sequence[Packed], problem: Problem) -> Tensor:
    """(most + 1,) nonzeros in tiles of each population: in stored windows, or in all of a tensor cut evenly."""
    tiles = [p for p in packed if p.view.along]
    listed = (any(isinstance(at, Listed) for level in p.view.levels for at in level) for p in tiles)
    if not all(listed):
        return problem.counts.tiles()
    populations = [tiles_of_nonzeros(p)[0].bincount().cpu() for p in tiles if p.positions is not None]
    held = torch.cat([torch.zeros(1, dtype=torch.long, device="cpu"), *populations])
    return torch.bincount(held) * torch.arange(int(held.max()) + 1, device="cpu")


def _tiles(histogram: Tensor) -> tuple[tuple[int, int, int], ...]:
    """Count the tiles of each population, in classes of 1, 2 to 3, 4 to 7, … nonzeros."""
    sizes = torch.arange(histogram.numel(), device=histogram.device)
    tiles = histogram // sizes.clamp(min=1)
    classes = []
    for n in range(histogram.numel().bit_length()):
        in_class = (sizes >= 1 << n) & (sizes < 2 << n)
        if int(tiles[in_class].sum()):
            classes.append((1 << n, int(tiles[in_class].sum()), int(histogram[in_class].sum())))
    return tuple(classes)


COUNTED = {"items": "items", "fibers": "fibers", "stored": "nonzeros", "chain": "chain"}
"""The numbers of a part's `Statistics` with a symbol in expressions, and the symbols' names."""


class Traced(float):
    """A number with the symbolic expression it came from; comparisons use the number."""

    __array_ufunc__ = None  # a count times a number is each of its numbers times that
    expression: Any

    def __new__(cls, value: float, expression: Any) -> Traced:
        traced = super().__new__(cls, value)
        traced.expression = expression
        return traced

    def __hash__(self) -> int:
        return hash((float(self), self.expression))  # so that no cache takes it for the number alone

    def __neg__(self) -> Traced:
        return Traced(-float(self), -self.expression)


def _expression(number: Any) -> Any:
    return number.expression if isinstance(number, Traced) else number


def _arithmetic(apply: Callable[[Any, Any], Any], reflected: bool) -> Callable[[Traced, Any], Any]:
    def method(self: Traced, other: Any) -> Any:
        if isinstance(other, Count):
            return Count.of_each([apply(number, self) for number in other])
        left, right = (other, self) if reflected else (self, other)
        return Traced(apply(float(left), float(right)), apply(_expression(left), _expression(right)))

    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "pow"):
    setattr(Traced, f"__{_name}__", _arithmetic(getattr(operator, _name), False))
    setattr(Traced, f"__r{_name}__", _arithmetic(getattr(operator, _name), True))


class SymbolicCost(dict[str, Any]):
    """The work of a call of a kernel: ``bytes``, ``gathered rows``, ``atomics``, ``products`` and ``seconds``.

    Each is a sympy expression: the least bytes moved to and from device memory, rows gathered of dense operands,
    elements added by atomics, multiplications and additions, and the seconds expected of the device. Symbols are the
    sizes by their letters; ``items``, ``fibers``, ``nonzeros`` as they are stored, ``chain`` (rounds of dependent
    loads) and ``runs_<letter>`` of each part, numbered where there are several; ``itemsize``; and the device's numbers.

    Attributes:
        symbols: the value that each symbol has for this kernel.
    """

    symbols: Mapping[Any, float]

    def __missing__(self, name: str) -> Any:
        raise KeyError(f"a cost has {', '.join(self)}, found {name!r}")

    def at(self, **changed: float) -> dict[str, float]:
        """Return the numbers for this kernel with other values of some symbols.

        ``k.cost.at(nonzeros=10**9, r=128)["seconds"]``

        Raises:
            PlanError: there is no symbol of a name, or a number is not above 0.
        """
        by_name = {str(symbol): symbol for symbol in self.symbols}
        if unknown := outside(changed, by_name):
            raise PlanError(f"no symbol is called {unknown[0]!r}; symbols: {', '.join(sorted(by_name))}")
        if wrong := [name for name, number in changed.items() if not isinstance(number, int | float) or not number > 0]:
            raise PlanError(f"{wrong[0]} is a number above 0, found {changed[wrong[0]]!r}")
        values = dict(self.symbols) | {by_name[name]: number for name, number in changed.items()}
        return {name: float(expression.subs(values)) for name, expression in self.items()}

    def __str__(self) -> str:
        where = ", ".join(f"{symbol} = {value:.6g}" for symbol, value in self.symbols.items())
        return "\n".join([*[f"{name:<13} {cost}" for name, cost in self.items()], f"where {where}"])


def symbolic_cost(
    bound: Bound, plan: Plan, programs: Sequence[TileProgram], statistics: Sequence[Statistics], profile: DeviceProfile
) -> SymbolicCost:
    """The costs of the parts of a plan, in all.

    Args:
        bound: the einsum.
        plan: of these parts.
        programs: one a part.
        statistics: of what each part stores.
        profile: the device they are priced for.
    """
    import sympy  # which takes a while to import

    values: dict[Any, float] = {}

    def traced(name: str, value: float) -> Traced:
        symbol = sympy.Symbol(name, positive=True)
        values[symbol] = value
        return Traced(value, symbol)

    def expression(number: Any) -> Any:
        """Return the expression behind a number, with the same rounding up."""
        whole, up = sympy.sympify(_expression(number)), sympy.ceiling
        return whole.replace(sympy.floor, lambda of: -up(-of) if of.could_extract_minus_sign() else sympy.floor(of))

    sizes = {c: traced(c, size) for c, size in bound.sizes if size}
    costs = [cost_of(_of_sizes(program, bound, sizes)) for program in programs]
    stored = [_counted(part, traced, "" if len(programs) == 1 else f"_{n}") for n, part in enumerate(statistics)]
    constants = {name: _rate(name, value, traced) for name, value in profile.constants.items()}
    numbers = {name: _rate(name, getattr(profile, name), traced) for name in NUMBERS}
    rates = replace(profile, constants=constants, **numbers)
    each = [*zip(costs, stored, strict=True)]
    numbers = {
        "bytes": sum(cost.work(part, rates)[0] for cost, part in each),
        "gathered rows": sum(g.rows @ part.symbols for cost, part in each for g in cost.gathers),
        "atomics": sum(cost.added_bytes @ part.symbols / part.itemsize for cost, part in each if not cost.owned),
        "products": sum(cost.work(part, rates)[2] for cost, part in each),
        "seconds": sum(seconds_of(plan, costs, stored, rates)),
    }
    cost = SymbolicCost({name: expression(number) for name, number in numbers.items()})
    used = set().union(*[own.free_symbols for own in cost.values()])
    cost.symbols = {symbol: value for symbol, value in values.items() if symbol in used}
    return cost


def _of_sizes(program: TileProgram, bound: Bound, sizes: Mapping[str, Any]) -> TileProgram:
    """The program with sizes that are traced."""

    def known(letter: str, size: int) -> Any:
        return sizes[letter] if sizes.get(letter) == size else size  # a tile's side is not its mode's size

    axes = tuple(replace(a, size=known(a.letter, a.size)) for a in program.axes)
    operands = []
    for o in program.operands:
        extents = tuple(map(known, o.rows, o.extents))
        operands.append(replace(o, extents=extents, width=prod(sizes.get(c, 1) for c in o.axes)))
    rows = prod(sizes.get(c, 1) for c in bound.einsum.output if c in program.letters)
    named = {o.name: o for o in operands}

    def of(s: Statement) -> Statement:
        if isinstance(s, Loop):
            return replace(s, body=tuple(map(of, s.body)))
        return replace(s, operand=named[s.operand.name]) if isinstance(s, Gather) else s

    traced = replace(program, axes=axes, operands=tuple(operands), body=tuple(map(of, program.body)))
    return replace(traced, rows=rows) if rows == program.rows else traced  # those of a sparse result are its entries


def _counted(statistics: Statistics, traced: Callable[[str, float], Traced], number: str) -> Statistics:
    """The statistics with traced numbers."""
    named: dict[str, Any] = {f: traced(name + number, getattr(statistics, f)) for f, name in COUNTED.items()}
    named["itemsize"] = traced("itemsize", statistics.itemsize)
    named["runs"] = tuple((c, traced(f"runs_{c}{number}", count)) for c, count in statistics.runs)
    return replace(statistics, **named)


def _rate(name: str, value: Any, traced: Callable[[str, float], Traced]) -> Any:
    """A number of a profile, or a table of them, traced."""
    if isinstance(value, Mapping):
        return {key: traced(f"{name}_{key}", v) for key, v in value.items()}
    return traced(name, value)
