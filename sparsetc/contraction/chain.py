"""Einsums of two sparse operands or more, and others: contracted a few operands at a time.

In: a `Bound` einsum and its operands. Out: `Chain`, whose links are contractions, in an order found once. A link of
two sparse operands is a `Pair`; one of a sparse and a dense operand is a `Step` like any other, so a dense
operand is contracted into a sparse one, or applied to a product of sparse ones, whichever is expected to make fewer
tasks. Two dense operands are torch's.

Every intermediate result that keeps coordinates of a sparse operand is sparse, and its pattern is known once the chain
is compiled, so a call computes values only. Operands with dense modes, or in blocks, are contracted as they are, two at
a time; dense operands join the last two. Otherwise dense modes become coordinates, of intermediate results too.

The order is not one of dense sizes (`sparse_order`): nonzeros are taken to lie anywhere with equal probability, so a
contraction has as many tasks as pairs of nonzeros are expected to agree, and a result as many nonzeros as tasks are
expected to hit different positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from math import exp, log, log1p

import torch

from sparsetc.codegen.launch import Values
from sparsetc.contraction.canonical import Dims, Operands, Patterns, Tensors, dense_of_call, einsum, without
from sparsetc.contraction.contraction import Contraction, contraction
from sparsetc.contraction.pair import Pair
from sparsetc.explain import StepReport
from sparsetc.ir.equation.einsum import Bound, Einsum, distinct
from sparsetc.ir.plan import AUTO, SIDE, Plan, requested
from sparsetc.join.join import JoinOperand, prepared
from sparsetc.options import Options, with_settings
from sparsetc.tensor.pattern import Pattern
from sparsetc.tensor.sparse_tensor import SparseTensor
from sparsetc.tensor.sums import fitted

MOST_EXHAUSTIVE = 9
"""Operands up to which every order is tried: 3**9 splits."""


Members = tuple[int, ...]
"""Numbers of operands, ascending."""


@dataclass(frozen=True)
class _Estimate:
    """An operand, or a product of some, as it is expected to be; counts are logarithms, as sizes may pass any float.

    Attributes:
        pairs: the contractions that lead to it, in order; `tasks` are those of the last, `cost` is of all.
    """

    members: Members
    letters: frozenset[str]
    nonzeros: float
    tasks: float = 0.0
    cost: float = 0.0
    pairs: tuple[tuple[Members, Members], ...] = ()


def sparse_order(
    inputs: Sequence[Iterable[str]], output: Iterable[str], sizes: dict[str, int], nonzeros: Sequence[int]
) -> list[tuple[int, ...]]:
    """The two operands of each contraction, by position in the list of those left, to whose end results are put.

    It is the order of the fewest expected tasks: the best of all for few operands, pair by pair for many.
    """
    letters, logs = [frozenset(t) for t in inputs], {c: log(max(1, n)) for c, n in sizes.items()}
    terms = [_Estimate((n,), t, log(max(1, count))) for n, (t, count) in enumerate(zip(letters, nonzeros, strict=True))]

    @cache
    def kept(members: Members) -> frozenset[str]:
        """Letters of some operands that the output or another operand has too."""
        outside = frozenset(output).union(*(t for n, t in enumerate(letters) if n not in members))
        return outside & frozenset().union(*(letters[n] for n in members))

    def contracted(a: _Estimate, b: _Estimate) -> _Estimate:
        members = tuple(sorted(a.members + b.members))
        tasks = a.nonzeros + b.nonzeros - sum(logs[c] for c in a.letters & b.letters)
        span = sum(logs[c] for c in kept(members))
        # positions * (1 - exp(-tasks / positions))
        hits = tasks if tasks - span < -30 else span + (log1p(-exp(-exp(tasks - span))) if tasks - span < 30 else 0.0)
        cost, pairs = a.cost + b.cost + exp(min(tasks, 700.0)), (*a.pairs, *b.pairs, (a.members, b.members))
        return _Estimate(members, kept(members), max(0.0, hits), tasks, cost, pairs)

    @cache
    def best(members: Members) -> _Estimate:
        first, *rest = members
        if not rest:
            return terms[first]
        lefts = [(first, *some) for size in range(len(rest)) for some in combinations(rest, size)]
        rights = [tuple(n for n in rest if n not in left) for left in lefts]
        return min(map(contracted, map(best, lefts), map(best, rights)), key=lambda product: product.cost)

    left, path = terms, list[tuple[int, ...]]()
    pairs = iter(best(tuple(range(len(terms)))).pairs) if len(terms) <= MOST_EXHAUSTIVE else None
    while len(left) > 1:
        every = combinations(left, 2)
        a, b = map(best, next(pairs)) if pairs else min(every, key=lambda pair: contracted(*pair).tasks)
        path.append(tuple(sorted((left.index(a), left.index(b)))))
        left = [*(t for t in left if t not in (a, b)), contracted(a, b)]
    return path


Term = tuple[tuple[str, ...], "SparseTensor | torch.Tensor"]
"""An operand of a link, given or intermediate: its letters, and a tensor to compile for."""


@dataclass(frozen=True)
class Link:
    """One contraction of a chain; its result is put at the end of the list of operands, which those it takes leave.

    Attributes:
        places: the operands that it takes, by their positions in that list, ascending.
        contraction: None for dense operands alone, which torch contracts.
        patterns: the patterns of its sparse operands.
    """

    places: tuple[int, ...]
    equation: str
    contraction: Contraction | None
    patterns: Patterns

    def run(self, operands: Tensors, precision: str) -> torch.Tensor:
        """The values of a sparse result, or a dense one, from values of sparse operands and dense ones as they are."""
        if self.contraction is None:
            return einsum(self.equation, *operands, precision=precision)
        e = self.contraction.bound.einsum
        return self.contraction.result(self.patterns, [operands[p] for p in e.sparse], [operands[p] for p in e.dense])

    def reports(self) -> list[StepReport]:
        """Return the reports of the contraction, for an explanation."""
        if self.contraction is None:
            return [StepReport(self.equation, "torch.einsum", "two dense operands")]
        return self.contraction.reports()


class Chain(Contraction):
    """A contraction of several operands, a few at a time.

    Attributes:
        _positions: the operands in the order of the chain's list.
        _expands: whether dense modes are coordinates, as the plan says.
    """

    def __init__(self, bound: Bound, operands: Operands, settings: Options, form: str, expanded: bool) -> None:
        super().__init__(bound, operands, settings, form, expanded)
        e = bound.einsum
        self._expanded, self._dropped = expanded, _empty_sums(bound)
        self._expands = expanded and any(isinstance(o, SparseTensor) and o.dense_order for o in operands)
        self._positions = tuple(range(len(operands))) if expanded else (*e.dense, *e.sparse)
        self._within = without(bound, self._dropped)
        self.links: list[Link] = []
        last = self._compiled([self._term(operands[p], p) for p in self._positions])
        self.inner = [link.contraction for link in self.links if link.contraction is not None]
        self.empty = any(link.empty for link in self.inner)
        self.shape = bound.output_shape
        self._merged: JoinOperand | None = None
        if isinstance(last, SparseTensor):
            sparse = [o for o in operands if isinstance(o, SparseTensor)]
            self._arrange(last, [x.expand_dense().pattern if expanded else x.pattern for x in sparse])

    def _term(self, operand: SparseTensor | torch.Tensor, position: int) -> Term:
        letters = self._within.einsum.inputs[position]
        if isinstance(operand, torch.Tensor):
            return letters, self._like.expand(self._within.shape(position))
        x = operand.expand_dense() if self._expanded else operand
        return letters, SparseTensor._make(x.pattern.bare(), self._like.expand(x._values.shape))

    def _compiled(self, terms: list[Term]) -> SparseTensor | torch.Tensor:
        """Compile the links, in the order in which they run; the result of the last."""
        order = self._order(terms)
        for number, places in enumerate(order):
            rest = [term for n, term in enumerate(terms) if n not in places]
            plan = requested(self.settings.plan).of_step(number, len(order))
            terms = [*rest, self._linked(places, [terms[n] for n in places], rest, plan)]
        return terms[0][1]

    def _order(self, terms: Sequence[Term]) -> list[tuple[int, ...]]:
        """The operands of each link, by position in the list of those that are left."""
        first = 0 if self._expanded else len(self.bound.einsum.dense)
        ordered, others = terms[first:], [c for letters, _ in terms[:first] for c in letters]
        entries = [o._values.numel() if isinstance(o, SparseTensor) else o.numel() for _, o in ordered]
        kept = {*self.bound.einsum.output, *others}
        path = sparse_order([letters for letters, _ in ordered], kept, self.bound.by_index, entries)
        order = [tuple(first + n for n in places) for places in path]
        return [*order[:-1], (*range(first), *order[-1])]

    def _linked(self, places: tuple[int, ...], chosen: Sequence[Term], rest: Sequence[Term], plan: Plan) -> Term:
        """Compile one link, and give its result: it has the letters that the others and the output need."""
        inputs, operands = tuple(letters for letters, _ in chosen), [operand for _, operand in chosen]
        sparse = tuple(n for n, operand in enumerate(operands) if isinstance(operand, SparseTensor))
        needed = {c for letters, _ in rest for c in letters}.union(self.bound.einsum.output)
        rows = {c for n in sparse for c in inputs[n][: operands[n].sparse_order]}  # type: ignore[union-attr]
        kept = [c for c in distinct(c for letters in inputs for c in letters) if c in needed]
        # Coordinates come first, so that rows need not be moved.
        output = (*(c for c in kept if c in rows), *(c for c in kept if c not in rows))
        output = output if rest else self.bound.einsum.output
        e = Einsum(inputs, output, sparse, ",".join(map("".join, inputs)) + "->" + "".join(output))
        bound = Bound.of(e, self.bound.by_index)
        if not sparse:
            self.links.append(Link(places, e.text, None, ()))
            return output, self._like.expand(bound.output_shape)
        if self._expanded and plan.is_request:  # one for pairs, of letters that this one need not have
            sides = {SIDE + c for c in self.bound.einsum.indices if c not in e.indices}
            options = tuple(option for option in plan.options if option[0] not in sides)
            plan = replace(plan, options=options) if len(sparse) > 1 else AUTO
        on_pattern = self.sparse if not rest else any(c in rows for c in output)
        settings = with_settings(self.settings, {"plan": plan})
        compiled = contraction(bound, operands, settings, "sparse" if on_pattern else "dense")
        patterns = [o.pattern for o in operands if isinstance(o, SparseTensor)]
        self.links.append(Link(places, e.text, compiled, patterns))
        pattern = compiled.pattern_on(patterns)
        if pattern is None:
            return output, self._like.expand(compiled.shape)
        result = SparseTensor._make(pattern, self._like.expand(compiled.shape))
        return output, result.expand_dense() if self._expanded else result

    def _arrange(self, last: SparseTensor, patterns: Patterns) -> None:
        """Find the pattern of the result, of that of the last link."""
        pattern, width = last.pattern, last._values.shape[1:]
        if self._expanded and not pattern.is_coalesced:  # that of an operand all of which is kept
            letters = self.bound.einsum.output
            self._merged = prepared(letters, pattern.coords, self.bound.by_index, letters)
            pattern = Pattern(torch.stack(self._merged.coords), pattern.shape, True)
        if self.empty:  # its positions are known to hold 0
            pattern = pattern.like(pattern.coords[:, :0], True)
        self.pattern = self.known_pattern(patterns, pattern)
        self.shape = (pattern.nnz, *width)

    # -- calls ------------------------------------------------------------------------------------------------------
    def result(self, patterns: Patterns, values: Tensors, dense: Tensors, packed: Values | None = None) -> torch.Tensor:
        """The result's values on its pattern, or a dense result; differentiable."""
        e = self.bound.einsum
        tensors = dict(zip(e.sparse, values, strict=True))
        if self._expanded:
            tensors = {p: v.reshape(-1) for p, v in tensors.items()}
        dense = dense_of_call(self.bound, dense, self.dtype, self.device)
        for p, operand in zip(e.dense, dense, strict=True):
            full, dropped = operand.expand(self.bound.shape(p)), self._dropped.get(p)
            tensors[p] = full.sum(dropped, dtype=full.dtype) if dropped else full
        terms = [tensors[p].to(self._like.dtype) for p in self._positions]
        precision = self.settings.effective_precision()
        for link in self.links:
            result = link.run([terms[n] for n in link.places], precision)
            if self._expanded and link.contraction is not None and link.contraction.sparse:
                result = result.reshape(-1)
            terms = [*(t for n, t in enumerate(terms) if n not in link.places), result]
        (result,) = terms
        if self._merged is not None:
            result = self._merged.values(result, self.settings.deterministic)
        return fitted(result[:0] if self.sparse and self.empty else result, self.dtype, f'the result of "{e.text}"')

    # -- what a user may look at ------------------------------------------------------------------------------------
    @property
    def plan(self) -> Plan:
        """The plan of each link, named after the first of two sparse operands where dense modes are coordinates."""
        contractions = (link.contraction for link in self.links)
        steps = tuple(None if c is None else c.plan for c in contractions)  # None: torch's own product
        pairs = [step.plan for step in self.steps if isinstance(step, Pair) and self._expanded]
        parts = tuple(part for plan in pairs for part in plan.parts)
        alone = "scalar" if self._expands else "chain"  # given back, it is by nonzeros again
        name, reason = (pairs[0].name, pairs[0].reason) if pairs else (alone, "a few operands at a time")
        return Plan(name, parts, False, steps=steps, reason=reason)

    def reports(self) -> list[StepReport]:
        """Return the reports of all links, for an explanation."""
        return [report for link in self.links for report in link.reports()]


def _empty_sums(bound: Bound) -> dict[int, Dims]:
    """For each dense operand, the dimensions of size 0 that are summed over.

    A sum over nothing is 0 wherever the sparse operands have entries. Were such a letter contracted with a sparse
    operand, or made one of its modes, no entries would be left.
    """
    e = bound.einsum
    empty = [c for c in e.dense_contracted if not bound.by_index[c]]
    return {p: dims for p in e.dense if (dims := tuple(n for n, c in enumerate(e.inputs[p]) if c in empty))}
