"""A path: an einsum contracted a few operands at a time, as one contraction.

In: a `Bound` einsum and its operands, an order of contractions or none. Out: `Path`, whose links are contractions. A
link of two sparse operands is a `Pair`; one of a sparse operand and dense ones is a `Step` like any other; dense
operands are torch's. A sparse operand that is a link alone is made dense, and all links behind it are torch's.

Of one sparse operand `planner.paths.Search` finds the order, where steps are expected to be faster than one pass over
the nonzeros. Of several it is `sparse_order`: a dense operand is contracted into a sparse one, or applied to a product
of sparse ones, whichever is expected to make fewer tasks. Operands with dense modes, or in blocks, are contracted as
they are, two at a time; dense operands join the last two. Otherwise dense modes become coordinates, of intermediate
results too.

Every intermediate result that keeps coordinates of a sparse operand is sparse, and its pattern is known once the path
is compiled, so a call computes values only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from sparsetc.codegen.launch import Values
from sparsetc.contraction.contraction import Contraction
from sparsetc.contraction.guard import Guard, finite
from sparsetc.contraction.operands import Patterns, Tensors, einsum
from sparsetc.contraction.prepare import chosen_for, problem_of
from sparsetc.contraction.request import Request, is_sparse, known_result
from sparsetc.contraction.rewrites import broadcast_dims, without
from sparsetc.device.profile import profile_of
from sparsetc.errors import PlanError
from sparsetc.explain import StepReport
from sparsetc.ir.equation.einsum import Bound, Einsum, distinct, written
from sparsetc.ir.plan import AUTO, ONE_PASS, SIDE, STEPS, Plan, requested
from sparsetc.join.join import JoinOperand, prepared
from sparsetc.planner.candidate import Choice
from sparsetc.planner.paths import Edge, Order, Search, checked_order, sparse_order
from sparsetc.planner.problem import Counts
from sparsetc.planner.registry import by_nonzeros, choose
from sparsetc.runtime.executable import Inspectable
from sparsetc.support import Ints, Names, among, cached_property, memory, outside
from sparsetc.tensor.dtypes import accumulator, add_rows, fitted, summed_dtype
from sparsetc.tensor.kept_values import kept_with
from sparsetc.tensor.pattern import Pattern, followed, transforming
from sparsetc.tensor.sparse_tensor import SparseTensor


def in_steps(request: Request) -> Path | Choice | None:
    """Return a path of several contractions, if it is asked for or expected to be faster than one pass.

    Otherwise return the plan of the pass where it had to be chosen to be compared with, and None where it was not.
    Steps and a pass of torch programs are priced by the same rates; on a GPU, and with native loops, a pass has the
    price of its plan.

    Raises:
        PlanError: a path that is not one of these operands, or steps of an einsum that cannot take any.
    """
    bound, settings = request.bound, request.settings
    wanted, several = requested(settings.plan), len(bound.einsum.sparse) > 1
    given_path, asked = settings.path or wanted.path, wanted == STEPS
    if given_path:
        expanded = several and (by_nonzeros(wanted) or not request.dense_modes)
        return Path(request, expanded, checked_order(given_path, len(request.operands)))
    fault = _fault(request, asked) if asked or wanted == AUTO else "another plan is asked for"
    if fault and not asked:
        return None
    if fault:
        raise PlanError(f'plan {STEPS.name!r} does not apply to "{bound.einsum.text}": {fault}')
    (x,) = request.sparse
    device, pattern = x.device, x.pattern
    backend = settings.effective_backend(device)
    if backend == "triton" and not asked and x.dense_order:
        return None
    if settings.effective_native(device) != "none":
        backend = "numba"

    def steps(one_pass: Choice | None = None) -> Choice | None:
        """Return the order of steps that are faster than one pass, as a plan of no parts but a path; None for none."""
        search = Search(
            bound,
            sparse_order=x.sparse_order,
            fibers=Counts(pattern.coords, pattern.shape, pattern.counts, pattern.cache).distinct,
            nnz=pattern.nnz,
            constants=profile_of(device, settings, backend).constants,
            itemsize=x.dtype.itemsize,
            limit=settings.memory_on(device),
            sparse_result=is_sparse(request.form, bound.einsum, [bound.einsum.sparse_indices[: x.sparse_order]]),
        )
        one, planned = (sum(one_pass.seconds), partial(_seconds_of_pass, request)) if one_pass else (None, None)
        picked = search.picked(asked, one, planned)
        return picked and Choice(replace(STEPS, reason=picked[0], path=picked[1]))

    if backend == "torch" or asked or x.dense_order:
        choice = steps()
    else:
        choice = chosen_for(request, steps)
    if choice is not None and choice.plan.path:
        return Path(request, False, choice.plan.path, choice.plan.reason)
    if asked:
        raise PlanError(f'plan {STEPS.name!r} does not apply to "{bound.einsum.text}": no steps fit the memory limit')
    return choice


def _seconds_of_pass(request: Request, edge: Edge) -> float:
    """Return the seconds of a first pass over the nonzeros as a plan of its own."""
    (x,), e, after = request.sparse, request.bound.einsum, edge.after
    inputs = e.inputs[e.sparse[0]], *(term.letters for term in edge.taken)
    output = e.output if after is None else (*after.sparse, *sorted(after.dense))
    bound = Bound.of(Einsum(inputs, output, (0,), written(inputs, output)), request.bound.by_index)
    dense = [request.like.expand(bound.shape(n)) for n in range(1, len(inputs))]
    form = request.form if after is None else "sparse" if after.sparse else "dense"
    settings = replace(request.settings, plan=ONE_PASS)
    return sum(choose(ONE_PASS, problem_of(Request(bound, [x, *dense], settings, form))).seconds)


def _fault(request: Request, asked: bool) -> str:
    """Say why an einsum is not contracted in steps, if it is not."""
    bound, (x, *others) = request.bound, request.sparse
    e = bound.einsum
    if others:
        return "it has several sparse operands, whose steps are sought in any case"
    if len(e.dense) < 2:
        return "it has fewer than two dense operands"
    if len(e.sparse_indices) < x.order or x.blocksize or not x.is_coalesced:
        return "its sparse operand has a repeated letter, blocks or duplicates"
    if any(broadcast_dims(bound, request.operands, False).values()):
        return "a dense operand broadcasts"
    if 0 in (x.nnz, *(n for _, n in bound.sizes)):
        return "there is nothing to sum"
    if not asked and x.dtype not in (torch.float32, torch.float64):
        return "only floats are searched"
    return ""


@dataclass(frozen=True)
class LinkOperand:
    """An operand of a link while that is compiled: of the einsum, or the result of a link before.

    Attributes:
        operand: a tensor to compile for, whose values are not read.
        as_given: whether its pattern is the one sparse operand's, which each call brings.
        summed: whether it is dense, and holds zeros where a sparse operand has no entries: infinities may not meet it.
    """

    letters: Names
    operand: SparseTensor | Tensor
    as_given: bool = False
    summed: bool = False


@dataclass(frozen=True)
class Link:
    """One contraction of a path. It removes its operands from the list of operands and appends its result.

    Attributes:
        places: the operands that it takes, by their positions in that list, ascending.
        contraction: None for dense operands alone, which torch contracts, and for a sparse one that is made dense.
        patterns: the patterns of its sparse operands; None where it has the call's.
        positions: of the entries in the dense tensor that a sparse operand becomes; None where a link is no such one.
            The tensor is kept with the values where these are a caller's.
        sizes: those of the modes of that tensor which had coordinates.
    """

    places: Ints
    equation: str
    contraction: Contraction | None = None
    patterns: Patterns | None = ()
    positions: Tensor | None = None
    sizes: Ints = ()

    def run(
        self, operands: Tensors, patterns: Patterns, precision: str, packed: Values | None, given: Tensors
    ) -> Tensor:
        """Return the values of a sparse result, or a dense result, from values and dense operands."""
        if self.positions is not None:
            (entries,) = operands
            kept = kept_with(entries) if self.patterns is None and not followed(operands) else None
            key = "dense", *(pattern.number for pattern in patterns)
            dense: Tensor | None = None if kept is None else kept.get(key)
            if dense is None:
                flat = entries.new_zeros((prod(self.sizes), *entries.shape[1:]))
                dense = add_rows(flat, self.positions, entries).reshape(*self.sizes, *entries.shape[1:])
            return dense if kept is None else kept.put(key, dense)  # type: ignore[no-any-return]
        if self.contraction is None:
            return einsum(self.equation, *operands, precision=precision)
        e = self.contraction.bound.einsum
        patterns = patterns if self.patterns is None else self.patterns
        values = [operands[n] for n in e.sparse]
        tables = [operands[n] for n in e.dense]
        return self.contraction.result(patterns, values, tables, packed, given, checked=True)

    def reports(self) -> list[StepReport]:
        """Return the reports of the contraction, for an explanation."""
        if self.positions is not None:
            return [StepReport(self.equation, "dense", "made a dense tensor")]
        if self.contraction is None:
            return [StepReport(self.equation, "torch.einsum", "dense operands")]
        return self.contraction.innermost.reports()  # type: ignore[no-any-return]


class Path(Inspectable):
    """A contraction of several operands, a few at a time.

    Attributes:
        order: the operands of each link.
        links: the contractions, in order.
        holds: what says whether dense operands may meet the zeros of a tensor that was made dense; None where none is.
        _expanded: whether dense modes are made coordinates, where operands have any.
        _expands: whether there are such modes.
        _single: whether one operand is sparse, whose pattern each call brings.
        _like: a number of the dtype that intermediate results have.
        _dropped: dimensions that dense operands are summed along beforehand; `_within` is the einsum without them.
        _guarded: whether a link multiplies dense tensors that hold zeros for want of entries.
        _reader: the link that reads the one sparse operand; None where there are several, or it is made dense.
        _merged: how duplicates of the last link's result are summed; None where there are none.
        _pattern: the pattern of a sparse result; None where `pattern_on` asks the last link for it.
    """

    def __init__(
        self, request: Request, expanded: bool, order: Order | None = None, reason: str = "a few operands at a time"
    ) -> None:
        bound, operands = request.bound, request.operands
        self.bound, self.settings = bound, request.settings
        self.dtype = self.result_dtype = request.like.dtype
        self.device = request.like.device
        self.sparse = request.is_sparse(expanded)
        self._like = torch.zeros((), dtype=summed_dtype(self.dtype), device=self.device)
        e = bound.einsum
        self._expanded = expanded
        self._dropped = _empty_sums(bound)
        self._reason = reason
        self._expands = expanded and any(x.dense_order for x in request.sparse)
        self._within = without(bound, self._dropped)
        self._single = len(e.sparse) == 1
        if self._single:  # what is summed in 16 bits is not rounded on the way
            self._like = self._like.to(accumulator(self.dtype))
        self.links: list[Link] = []
        self._guarded = False
        terms = [self._term(operand, p) for p, operand in enumerate(operands)]
        self.order = self._order_of(terms) if order is None else order
        last = self._compiled(terms).operand
        self.inner = [link.contraction.innermost for link in self.links if link.contraction is not None]
        self._reader = next((link for link in self.links if self._single and link.patterns is None), None)
        guard = Guard(finite)
        looks = self._guarded and self._single
        self.holds = (lambda dense: not transforming() and guard.admits(dense, dense)) if looks else None
        self.empty = any(one.empty for one in self.inner)
        self._merged: JoinOperand | None = None
        self._pattern: Pattern | None = None
        if isinstance(last, SparseTensor) and self._reader is not self.links[-1]:
            # A last link that reads the operand may give the operand's own pattern, and what is kept with a pattern
            # must not refer to it; `pattern_on` asks that link at each call.
            self._arrange(last, [x.expand_dense().pattern if expanded else x.pattern for x in request.sparse])

    def _term(self, operand: SparseTensor | Tensor, position: int) -> LinkOperand:
        letters = self._within.einsum.inputs[position]
        if isinstance(operand, Tensor):
            return LinkOperand(letters, self._like.expand(self._within.shape(position)))
        x = operand.expand_dense() if self._expanded else operand
        pattern = x.pattern if self._single else x.pattern.bare()
        return LinkOperand(
            letters, SparseTensor._make(pattern, self._like.expand(x._values.shape)), as_given=self._single
        )

    def _compiled(self, terms: list[LinkOperand]) -> LinkOperand:
        """Compile the links, in the order in which they run; the result of the last."""
        for number, places in enumerate(self.order):
            rest = [term for n, term in enumerate(terms) if n not in places]
            plan = requested(self.settings.plan).of_step(number, len(self.order))
            terms = [*rest, self._linked(places, [terms[n] for n in places], rest, plan)]
        return terms[0]

    def _order_of(self, terms: Sequence[LinkOperand]) -> Order:
        """The order of several sparse operands; dense ones are ordered with them only where all are expanded."""
        e = self.bound.einsum
        ordered = range(len(terms)) if self._expanded else e.sparse
        others = outside(range(len(terms)), ordered)
        operands = [terms[n].operand for n in ordered]
        entries = [o._values.numel() if isinstance(o, SparseTensor) else o.numel() for o in operands]
        kept = {*e.output, *(c for n in others for c in terms[n].letters)}
        path = sparse_order([terms[n].letters for n in ordered], kept, self.bound.by_index, entries)
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

    def _linked(
        self, places: Ints, chosen: Sequence[LinkOperand], rest: Sequence[LinkOperand], plan: Plan
    ) -> LinkOperand:
        """Compile one link, and give its result: it has the letters that the others and the output need."""
        inputs, operands = tuple(term.letters for term in chosen), [term.operand for term in chosen]
        sparse = tuple(n for n, operand in enumerate(operands) if isinstance(operand, SparseTensor))
        if sparse and len(chosen) == 1 and rest:
            return self._made_dense(places, *chosen)
        needed = {c for term in rest for c in term.letters}.union(self.bound.einsum.output)
        rows = {
            c for term in (chosen if sparse else rest) for c in term.letters[: getattr(term.operand, "sparse_order", 0)]
        }
        kept = among(distinct(c for letters in inputs for c in letters), needed)
        # Coordinates come first, so that rows need not be moved.
        output = (*among(kept, rows), *outside(kept, rows))
        output = output if rest else self.bound.einsum.output
        e = Einsum(inputs, output, sparse, written(inputs, output))
        bound = Bound.of(e, self.bound.by_index)
        summed = any(term.summed for term in chosen)
        if not sparse:
            nbytes = prod(bound.output_shape) * self._like.dtype.itemsize
            memory.check(f"the result of {bound}", nbytes, self.device, self.settings.memory_limit)
            self.links.append(Link(places, e.text))
            self._guarded |= summed
            return LinkOperand(output, self._like.expand(bound.output_shape), summed=summed)
        if self._expanded and plan.is_request:  # one for pairs, of letters that this one need not have
            sides = {SIDE + c for c in self.bound.einsum.indices if c not in e.indices}
            options = tuple(option for option in plan.options if option[0] not in sides)
            plan = replace(plan, options=options) if len(sparse) > 1 else ONE_PASS
        if plan in (AUTO, STEPS) and len(sparse) == 1:
            plan = ONE_PASS
        on_pattern = self.sparse if not rest else any(c in rows for c in output)
        settings = replace(self.settings, plan=plan, path=None)
        compiled = Contraction.compile(bound, operands, settings, "sparse" if on_pattern else "dense")
        patterns = [o.pattern for o in operands if isinstance(o, SparseTensor)]
        as_given = any(term.as_given for term in chosen)
        self.links.append(Link(places, e.text, compiled, None if as_given else patterns))
        pattern = compiled.pattern_on(patterns)
        if pattern is None:
            return LinkOperand(output, self._like.expand(compiled.shape), summed=True)
        result = SparseTensor._make(pattern, self._like.expand(compiled.shape))
        return LinkOperand(output, result.expand_dense() if self._expanded else result)

    def _made_dense(self, places: Ints, term: LinkOperand) -> LinkOperand:
        """Make a sparse operand dense."""
        x, text = term.operand, "".join(term.letters)
        assert isinstance(x, SparseTensor)
        faults = {
            "its result is sparse": self.sparse,
            "it is in blocks": bool(x.blocksize),
            "there are several sparse operands": not self._single,
        }
        if fault := next((fault for fault, applies in faults.items() if applies), ""):
            raise PlanError(f'a step of "{self.bound.einsum.text}" makes "{text}" dense, and {fault}')
        sizes = x.pattern.shape
        nbytes = prod(x.shape) * self._like.dtype.itemsize
        memory.check(f'the dense tensor "{text}"', nbytes, self.device, self.settings.memory_limit)
        as_given = term.as_given and self._like.dtype == self.dtype
        self.links.append(Link(places, f"{text}->{text}", None, None if as_given else (), x.pattern.places, sizes))
        return LinkOperand(term.letters, self._like.expand(x.shape), summed=True)

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
        last = self.links[-1]
        reads_operand = self.sparse and self._reader is last and last.contraction is not None
        return last.contraction.pattern_on(patterns) if reads_operand else self._pattern  # type: ignore[union-attr]

    def packed(self, values: Tensor, flat: Any) -> Values | None:
        """Return the values of the one sparse operand as the link stores them that reads it."""
        if self._reader is None or self._reader.contraction is None or self._like.dtype != self.dtype:
            return None
        return self._reader.contraction.packed([values])

    def result(
        self, patterns: Patterns, values: Tensors, dense: Tensors, packed: Values | None = None, *_: Any
    ) -> Tensor:
        """The result's values on its pattern, or a dense result; differentiable."""
        tensors: list[Any] = [None] * len(self.bound.einsum.inputs)
        for p, entries in zip(self.bound.einsum.sparse, values, strict=True):
            tensors[p] = entries.reshape(-1) if self._expanded else entries
        for p, shape, operand in zip(self.bound.einsum.dense, self.bound.dense_shapes, dense, strict=True):
            full = operand if operand.shape == shape else operand.expand(shape)
            dropped = self._dropped.get(p)
            tensors[p] = full.sum(dropped, dtype=full.dtype) if dropped else full
        operands = [*values, *dense]
        terms = tensors
        dtype = self._like.dtype
        if dtype != self.dtype:
            terms = [term.to(dtype) for term in terms]
        # Values that are `UNREAD` are none here: every link is followed by autograd by itself.
        precision, packed = self.settings.effective_precision(), packed or None
        for link in self.links:
            chosen = list(map(terms.__getitem__, link.places))
            own_packed = packed if link is self._reader else None
            result = link.run(chosen, patterns, precision, own_packed, operands)
            if self._expanded and link.contraction is not None and link.contraction.sparse:
                result = result.reshape(-1)
            for n in reversed(link.places):
                del terms[n]
            terms.append(result)
        (result,) = terms
        if self._merged is not None:
            result = self._merged.values(result, self.settings.deterministic)
        return fitted(
            result[:0] if self.sparse and self.empty else result,
            self.dtype,
            f'the result of "{self.bound.einsum.text}"',
        )

    @property
    def steps(self) -> Sequence[Any]:
        """The steps of all links, in order."""
        return tuple(step for one in self.inner for step in getattr(one, "steps", (one,))) or (self,)

    # -- what a user may look at ------------------------------------------------------------------------------------
    @cached_property
    def backend(self) -> str:
        """The backend of the first link with programs; torch's if none has any."""
        return self.inner[0].backend if self.inner else "torch"

    @property
    def plan(self) -> Plan:
        """The plan of each link, by a name that asks for all of them again.

        Of one sparse operand it is "steps". Of several it is that of the first link of two of them where they are
        contracted by nonzeros, or "scalar" where no two are; "chain" where they are contracted as they are.
        """
        contractions = (link.contraction for link in self.links)
        steps = tuple(None if c is None else c.innermost.plan for c in contractions)  # None: torch's own product
        if self._single:
            return Plan(STEPS.name, steps=steps, path=self.order, reason=self._reason)
        pairs = [step.plan for step in self.steps if step.plan.pairs and self._expanded]
        parts = tuple(part for plan in pairs for part in plan.parts)
        alone = "scalar" if self._expands else "chain"  # given back, it is by nonzeros again
        name, reason = (pairs[0].name, pairs[0].reason) if pairs else (alone, self._reason)
        return Plan(name, parts, False, steps=steps, path=self.order, reason=reason)

    def reports(self) -> list[StepReport]:
        """Return the reports of all links, for an explanation."""
        return [report for link in self.links for report in link.reports()]


def _empty_sums(bound: Bound) -> dict[int, Ints]:
    """Return, by dense operand, its summed dimensions of size 0.

    A sum over nothing is 0 wherever the sparse operands have entries. Were such a letter contracted with a sparse
    operand, or made one of its modes, no entries would be left.
    """
    e = bound.einsum
    empty = [c for c in e.dense_contracted if not bound.by_index[c]]
    return {p: dims for p in e.dense if (dims := tuple(n for n, c in enumerate(e.inputs[p]) if c in empty))}
