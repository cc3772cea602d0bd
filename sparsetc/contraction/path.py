"""A path: an einsum contracted a few operands at a time, as one contraction.

In: a `Bound` einsum and its operands, an order of contractions or none. Out: `Path`, whose links are contractions. A
link of two sparse operands is a `Pair`; one of a sparse operand and dense ones is a `Step` like any other; dense
operands are torch's. A sparse operand that is a link alone is made dense, and all links behind it are torch's.

With one sparse operand `contraction/compile.py` finds the order. With several `order_by_tasks` does: it contracts a
dense operand into a sparse one, or applies it to a product of sparse ones, whichever is expected to make fewer tasks. A
path is `expanded` where dense modes become coordinates, in intermediate results too. Where it is not, operands with
dense modes, or in blocks, are contracted as they are, two at a time; dense operands join the last two.

Every intermediate result that keeps coordinates of a sparse operand is sparse, and its pattern is known once the path
is compiled, so a call computes values only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from sparsetc.codegen.parts import Values
from sparsetc.contraction.contraction import Contraction
from sparsetc.contraction.dense import einsum
from sparsetc.contraction.guard import Guard, finite
from sparsetc.contraction.request import Patterns, Request, Tensors, known_result
from sparsetc.contraction.rewrites import without
from sparsetc.errors import PlanError
from sparsetc.explain import StepReport
from sparsetc.ir.equation.einsum import Bound, Einsum, distinct, written
from sparsetc.ir.plan import AUTO, ONE_PASS, SIDE, STEPS, Plan, requested
from sparsetc.join.join import JoinOperand, prepared
from sparsetc.planner.paths import Order, order_by_tasks
from sparsetc.support import Ints, Names, among, cached_property, outside
from sparsetc.support.checks import check_memory
from sparsetc.tensor.dtypes import accumulator, add_rows, fitted, summed_dtype
from sparsetc.tensor.kept_values import kept_with
from sparsetc.tensor.pattern import Pattern, followed, transforming
from sparsetc.tensor.sparse_tensor import SparseTensor

Term = tuple[Names, SparseTensor | Tensor]
"""Letters, and a tensor to compile for, whose values are not read: of an operand, or of the result of a link before."""
Link = tuple[Callable[..., Tensor], "Contraction | StepReport"]
"""A function of the operands of a link, the patterns of a call, packed values, and the operands of the call; and the
contraction that it runs, or what is said of a link without one."""


def _by_torch(equation: str, precision: str, operands: Tensors, *_: Any) -> Tensor:
    return einsum(equation, *operands, precision=precision)


def _dense(places: Tensor, sizes: Ints, keeps: bool, operands: Tensors, patterns: Patterns, *_: Any) -> Tensor:
    """Return the dense tensor of a sparse operand's values; `keeps` says whether it may be kept with these."""
    (entries,) = operands
    kept = kept_with(entries) if keeps and not followed(operands) else None
    key = "dense", *(pattern.number for pattern in patterns)
    dense: Tensor | None = None if kept is None else kept.get(key)
    if dense is None:
        flat = entries.new_zeros((prod(sizes), *entries.shape[1:]))
        dense = add_rows(flat, places, entries).reshape(*sizes, *entries.shape[1:])
    return dense if kept is None else kept.put(key, dense)  # type: ignore[no-any-return]


def _run_contraction(
    made: Contraction,
    own: Patterns | None,
    flat: bool,
    operands: Tensors,
    patterns: Patterns,
    packed: Values | None,
    given: Tensors,
) -> Tensor:
    """Return a contraction's result of operands with its `own` patterns, or, for None, with those of the call."""
    e = made.bound.einsum
    values = [operands[n] for n in e.sparse]
    tables = [operands[n] for n in e.dense]
    result = made.result(patterns if own is None else own, values, tables, packed, given, checked=True)
    return result.flatten() if flat and made.sparse else result


class Path:
    """A contraction of several operands, a few at a time.

    Attributes:
        order: the operands of each link, by their positions in the list of what is left, ascending.
        links: what runs each contraction, in order, and what is said of it; its operands are removed from that list,
            and its result is appended.
        holds: a test of a call's dense operands: False for an infinity or a NaN, which would meet zeros where the
            sparse operand has no entries; None where no link multiplies a tensor that was made dense.
        _expanded: whether dense modes are made coordinates, where operands have any.
        _single: whether just one operand is sparse: each call brings its pattern.
        _like: a number of the dtype that intermediate results have.
        _dropped: dimensions that dense operands are summed along beforehand.
        _reader: the contraction that reads the one sparse operand; None where there are several, or it is made dense.
        _last: the last link's contraction if an operand of it has the pattern that a call brings; else None.
        _apart: guards of links that multiply dense operands alone, by their numbers: of finite ones they may give an
            infinity, which would meet the same zeros.
        _merged: how duplicates of the last link's result are summed; None where there are none.
        _pattern: the pattern of a sparse result; None where `pattern_on` asks the last link for it.
    """

    def __init__(
        self, request: Request, expanded: bool, order: Order | None = None, reason: str = "a few operands at a time"
    ) -> None:
        bound = request.bound
        self.bound, self.settings = bound, request.settings
        self.dtype = request.like.dtype
        self.result_dtype = summed_dtype(self.dtype) if bound.einsum.plain_sum else self.dtype
        self.device = request.like.device
        self.sparse = request.is_sparse(expanded)
        self._expanded, self._single = expanded, len(request.sparse) == 1
        self._reason = reason
        self._name = STEPS.name
        if not self._single:  # a name which, given as ``plan=``, makes the same kind of path again
            self._name = "scalar" if expanded and any(x.dense_order for x in request.sparse) else "chain"
        # Of one sparse operand, what is summed in 16 bits is not rounded on the way.
        dtype = accumulator(self.dtype) if self._single else summed_dtype(self.dtype)
        self._like = torch.zeros((), dtype=dtype, device=self.device)
        self._dropped = _empty_sums(bound)
        within = without(bound, self._dropped)
        terms = list[Term]()
        for letters, operand in zip(within.einsum.inputs, request.operands, strict=True):
            if isinstance(operand, SparseTensor):
                x = operand.expand_dense() if expanded else operand
                pattern = x.pattern if self._single else x.pattern.bare()
                terms.append((letters, SparseTensor._make(pattern, self._like.expand(x._values.shape))))
            else:
                terms.append((letters, self._like.expand(within.extents(letters))))
        self.order = self._order_of(terms) if order is None else order
        self.links: list[Link] = []
        self._reader: Contraction | None = None
        self._last: Contraction | None = None
        self._apart: dict[int, Guard] = {}
        last, meets_zeros = self._compile_links(terms)
        guard = Guard(finite)
        self.holds = (lambda dense: not transforming() and guard.admits(dense, dense)) if meets_zeros else None
        self.inner = [made.innermost for _, made in self.links if isinstance(made, Contraction)]
        self.empty = any(one.empty for one in self.inner)
        self._merged: JoinOperand | None = None
        self._pattern: Pattern | None = None
        if isinstance(last, SparseTensor) and self._last is None:
            # A last link that reads the operand may give the operand's own pattern, and what is kept with a pattern
            # must not refer to it; `pattern_on` asks that link at each call.
            self._arrange(last, [x.expand_dense().pattern if expanded else x.pattern for x in request.sparse])

    def _compile_links(self, terms: list[Term]) -> tuple[SparseTensor | Tensor, bool]:
        """Compile the links, in the order in which they run.

        Return the last one's result, and True if a link multiplies the dense tensor that the one sparse operand
        becomes: where it has no entry, that tensor has a zero.
        """
        x = next(operand for _, operand in terms if isinstance(operand, SparseTensor))
        became: SparseTensor | Tensor = x
        meets_zeros = False
        for number, places in enumerate(self.order):
            chosen = [terms[n] for n in places]
            rest = [term for n, term in enumerate(terms) if n not in places]
            plan = requested(self.settings.plan).of_step(number, len(self.order))
            terms = [*rest, self._compile_link(chosen, rest, plan, x.pattern if self._single else None)]
            if all(isinstance(operand, Tensor) and operand is not became for _, operand in chosen):
                self._apart[number] = Guard(finite)
            elif any(operand is became for _, operand in chosen):
                meets_zeros |= isinstance(became, Tensor)
                became = terms[-1][1]
        return terms[0][1], meets_zeros and self._single

    def _order_of(self, terms: Sequence[Term]) -> Order:
        """The order of several sparse operands; dense ones are ordered with them only where all are expanded."""
        e = self.bound.einsum
        ordered = range(len(terms)) if self._expanded else e.sparse
        others = outside(range(len(terms)), ordered)
        operands = [terms[n][1] for n in ordered]
        entries = [o._values.numel() if isinstance(o, SparseTensor) else o.numel() for o in operands]
        kept = {*e.output, *(c for n in others for c in terms[n][0])}
        path = order_by_tasks([terms[n][0] for n in ordered], kept, self.bound.by_index, entries)
        order = list[Ints]()
        left = list(ordered)
        every = list(range(len(terms)))
        for number, places in enumerate(path):
            chosen = [left[p] for p in places]
            if number == len(path) - 1:
                chosen += others
            order.append(tuple(sorted(map(every.index, chosen))))
            left, every = ([*outside(numbers, chosen), len(terms) + number] for numbers in (left, every))
        return tuple(order)

    def _compile_link(self, chosen: Sequence[Term], rest: Sequence[Term], plan: Plan, given: Pattern | None) -> Term:
        """Compile one link, and give its result: it has the letters that the others and the output need.

        Args:
            chosen: its operands.
            rest: all others that are left.
            plan: of the link.
            given: the pattern of the one sparse operand, which each call brings.
        """
        inputs, operands = [letters for letters, _ in chosen], [operand for _, operand in chosen]
        sparse = {n: operand for n, operand in enumerate(operands) if isinstance(operand, SparseTensor)}
        patterns = [x.pattern for x in sparse.values()]
        as_given = any(pattern is given for pattern in patterns)
        if sparse and len(chosen) == 1 and rest:
            return self._to_dense(inputs[0], sparse[0], as_given)
        needed = {c for letters, _ in rest for c in letters}.union(self.bound.einsum.output)
        rows = {c for letters, one in (chosen if sparse else rest) for c in letters[: getattr(one, "sparse_order", 0)]}
        kept = among(distinct(c for letters in inputs for c in letters), needed)
        # Coordinates come first, so that rows need not be moved.
        output = (*among(kept, rows), *outside(kept, rows))
        output = output if rest else self.bound.einsum.output
        e = Einsum(tuple(inputs), output, tuple(sparse), written(inputs, output))
        bound = Bound.of(e, self.bound.by_index)
        if not sparse:
            nbytes = prod(bound.output_shape) * self._like.dtype.itemsize
            check_memory(f"the result of {bound}", nbytes, self.device, self.settings.memory_limit)
            report = StepReport(e.text, "torch.einsum", "dense operands")
            self.links.append((partial(_by_torch, e.text, self.settings.effective_precision()), report))
            return output, self._like.expand(bound.output_shape)
        if self._expanded and plan.is_request:  # its blocks may be along letters that this link does not have
            sides = {SIDE + c for c in self.bound.einsum.indices if c not in e.indices}
            options = tuple(option for option in plan.options if option[0] not in sides)
            plan = replace(plan, options=options) if len(sparse) > 1 else ONE_PASS
        if plan in (AUTO, STEPS) and len(sparse) == 1:
            plan = ONE_PASS
        on_pattern = self.sparse if not rest else any(c in rows for c in output)
        settings = replace(self.settings, plan=plan, path=None)
        made = Contraction.compile(bound, operands, settings, "sparse" if on_pattern else "dense")
        self.links.append((partial(_run_contraction, made, None if as_given else patterns, self._expanded), made))
        if as_given:
            self._reader, self._last = self._reader or made, None if rest else made
        pattern, values = made.pattern_on(patterns), self._like.expand(made.shape)
        if pattern is None:
            return output, values
        result = SparseTensor._make(pattern, values)
        return output, result.expand_dense() if self._expanded else result

    def _to_dense(self, letters: Names, x: SparseTensor, as_given: bool) -> Term:
        """Make a sparse operand dense."""
        text = "".join(letters)
        faults = {
            "its result is sparse": self.sparse,
            "it is in blocks": bool(x.blocksize),
            "there are several sparse operands": not self._single,
        }
        if fault := next((fault for fault, applies in faults.items() if applies), ""):
            raise PlanError(f'a step of "{self.bound.einsum.text}" makes "{text}" dense, and {fault}')
        nbytes = prod(x.shape) * self._like.dtype.itemsize
        check_memory(f'the dense tensor "{text}"', nbytes, self.device, self.settings.memory_limit)
        keeps = as_given and self._like.dtype == self.dtype
        report = StepReport(f"{text}->{text}", "dense", "made a dense tensor")
        self.links.append((partial(_dense, x.pattern.places, x.pattern.shape, keeps), report))
        return letters, self._like.expand(x.shape)

    def _arrange(self, last: SparseTensor, patterns: Patterns) -> None:
        """Find the pattern of the path's result from the result of its last link."""
        pattern = last.pattern
        if self._expanded and not pattern.is_coalesced:  # that of an operand all of which is kept
            letters = self.bound.einsum.output
            self._merged = prepared(letters, pattern.coords, self.bound.by_index, letters)
            pattern = Pattern(torch.stack(self._merged.coords), pattern.shape, True)
        if self.empty:  # its positions are known to hold 0
            pattern = pattern.like(pattern.coords[:, :0])
        letters, kept = self.bound.einsum.sparse_indices, self.bound.einsum.output[: pattern.order]
        if self._single and all(c in letters[: patterns[0].order] for c in kept):  # as one pass of this operand has
            self._pattern = patterns[0].known(("modes", tuple(map(letters.index, kept))), pattern)
        else:
            self._pattern = known_result(self.bound, patterns, pattern)

    # -- calls ------------------------------------------------------------------------------------------------------
    def pattern_on(self, patterns: Patterns) -> Pattern | None:
        """The pattern of the result; the one sparse operand's own where its last link keeps that."""
        return self._pattern if self._last is None else self._last.pattern_on(patterns)

    def packed(self, values: Tensor, flat: Any) -> Values | None:
        """Return the values of the one sparse operand as the link stores them that reads it."""
        if self._reader is None or self._like.dtype != self.dtype:
            return None
        return self._reader.packed([values])

    def result(
        self, patterns: Patterns, values: Tensors, dense: Tensors, packed: Values | None = None, *_: Any
    ) -> Tensor | None:
        """The result's values on its pattern, or a dense result; differentiable.

        None where a product of dense operands overflows that would meet zeros, as `holds` refuses an infinity.
        """
        terms: list[Any] = [None] * len(self.bound.einsum.inputs)
        for p, entries in zip(self.bound.einsum.sparse, values, strict=True):
            terms[p] = entries.flatten() if self._expanded else entries
        for p, shape, operand in zip(self.bound.einsum.dense, self.bound.dense_shapes, dense, strict=True):
            full = operand if operand.shape == shape else operand.expand(shape)
            dropped = self._dropped.get(p)
            terms[p] = full.sum(dropped, dtype=full.dtype) if dropped else full
        dtype = self._like.dtype
        if dtype != self.dtype:
            terms = [term.to(dtype) for term in terms]
        operands = [*values, *dense]
        for number, (places, (run, made)) in enumerate(zip(self.order, self.links, strict=True)):
            # `UNREAD`, which is empty, is taken for None: autograd follows each link by itself.
            own_packed = (packed or None) if made is self._reader else None
            result = run([terms[n] for n in places], patterns, own_packed, operands)
            for n in reversed(places):
                del terms[n]
            if self.holds and number in self._apart and not self._apart[number].admits(dense, [result]):
                return None
            terms.append(result)
        (result,) = terms
        if self._merged is not None:
            result = self._merged.values(result, self.settings.deterministic)
        return fitted(
            result[:0] if self.sparse and self.empty else result,
            self.result_dtype,
            f'the result of "{self.bound.einsum.text}"',
        )

    @property
    def steps(self) -> Sequence[Any]:
        """The steps of all links, in order; the path itself where torch does all."""
        return tuple(step for one in self.inner for step in getattr(one, "steps", (one,))) or (self,)

    # -- what a user may look at ------------------------------------------------------------------------------------
    @property
    def generated(self) -> Sequence[Any]:
        """The generated programs of all links, in order; torch's own products have none."""
        return [programs for one in self.inner for programs in one.generated]

    def ptx(self, target: str) -> str:
        """The assembly of all kernels for a named target; needs no GPU."""
        return "\n".join(one.ptx(target) for one in self.inner)

    @cached_property
    def backend(self) -> str:
        """The backend of the first link with programs; torch's if none has any."""
        return self.inner[0].backend if self.inner else "torch"

    @property
    def plan(self) -> Plan:
        """The plan of each link, by a name that asks for all of them again.

        With one sparse operand the name is "steps". With several it is that of the first link that pairs nonzeros; if
        there is none, "scalar" where dense modes became coordinates, and "chain" elsewhere.
        """
        # None: torch's own product.
        steps = tuple(made.innermost.plan if isinstance(made, Contraction) else None for _, made in self.links)
        pairs = [step.plan for step in self.steps if self._expanded and step.plan.pairs]
        if not pairs:
            return Plan(self._name, fused=self._single, steps=steps, path=self.order, reason=self._reason)
        parts = tuple(part for plan in pairs for part in plan.parts)
        return Plan(pairs[0].name, parts, False, steps=steps, path=self.order, reason=pairs[0].reason)

    def reports(self) -> list[StepReport]:
        """Return the reports of all links, for an explanation."""
        each = (made.innermost.reports() if isinstance(made, Contraction) else [made] for _, made in self.links)
        return [report for reports in each for report in reports]


def _empty_sums(bound: Bound) -> dict[int, Ints]:
    """Return, by dense operand, its summed dimensions of size 0.

    A sum over nothing is 0 wherever the sparse operands have entries. Were such a letter contracted with a sparse
    operand, or made one of its modes, no entries would be left.
    """
    e = bound.einsum
    empty = [c for c in e.dense_contracted if not bound.by_index[c]]
    return {p: dims for p in e.dense if (dims := tuple(n for n, c in enumerate(e.inputs[p]) if c in empty))}
