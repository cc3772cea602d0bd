"""Any number of operands, two or more of them sparse: contracted two at a time, in an order found once.

In: a `Bound` einsum and its operands. Out: `Several`, a chain of links whose patterns are all known. A pair of sparse
operands is a `PairStep`. A sparse and a dense operand are a `Step` like any other: so a dense operand is contracted
into a sparse one, or applied to a product of sparse ones, whichever is expected to make fewer tasks. Two dense operands
are torch's.

Every intermediate that keeps a mode of a sparse operand is sparse. A mode that only a dense operand has gets
coordinates like the others. The pattern of the result does not depend on values, so a call computes values only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import opt_einsum
import torch

from sparsetc.codegen.launch import Values, accumulator
from sparsetc.contraction import dense as tables
from sparsetc.contraction.canonical import Operands, Patterns, dense_of_call, stand_ins
from sparsetc.contraction.contraction import Contraction
from sparsetc.contraction.dense import Tensors
from sparsetc.contraction.output import is_sparse
from sparsetc.contraction.pair_step import PairStep
from sparsetc.contraction.step import Step
from sparsetc.device.profile import of_backend
from sparsetc.errors import PlanError
from sparsetc.explain import Explanation, StepReport
from sparsetc.ir.equation.einsum import Bound, Einsum
from sparsetc.ir.plan import AUTO, Plan, requested
from sparsetc.options import Options, with_settings
from sparsetc.pair.contraction_order import SparseOrder
from sparsetc.pair.join import JoinOperand, prepared
from sparsetc.pair.problem import check_pairs
from sparsetc.tensor.pattern import Pattern
from sparsetc.tensor.sparse_tensor import SparseTensor
from sparsetc.tensor.sums import fitted, summed_dtype


@dataclass(frozen=True)
class ChainOperand:
    """An operand of a link, given or intermediate: its letters, and its pattern if it is sparse."""

    letters: tuple[str, ...]
    pattern: SparseTensor | None
    empty: bool = False
    """Whether it is 0 whatever the values: all modes of a sparse operand that has no nonzeros were summed away."""


@dataclass(frozen=True)
class Link:
    """One contraction of two operands; its result is put at the end of the list, which both leave."""

    places: tuple[int, int]
    equation: str
    work: PairStep | Step | None
    """None for two dense operands."""
    result: ChainOperand
    pattern: Pattern | None = None
    """Pattern of the sparse operand, where one is dense."""
    sparse_first: bool = True
    """Whether it is the first of the two."""
    precision: str = "highest"
    """Precision of the product of two dense operands."""

    def run(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """The values of a sparse result, or a dense one, from values of sparse operands and dense ones as they are."""
        if isinstance(self.work, PairStep):
            found = self.work(left, right)
            return found if self.result.letters else found.sum(dtype=found.dtype)  # of one entry, or none
        if self.work is None:
            return tables.einsum(self.equation, left, right, precision=self.precision)
        values, dense = (left, right) if self.sparse_first else (right, left)
        assert self.pattern is not None
        rows = self.work(self.pattern, values, [dense])
        return rows.reshape(-1) if self.work.output.sparse else self.work.output.shaped(rows)

    def report(self) -> StepReport:
        """What an explanation says of the contraction."""
        if self.work is None:
            return StepReport(self.equation, "torch.einsum", "two dense operands")
        return self.work.report()


def _empty_sums(bound: Bound) -> dict[int, tables.Dims]:
    """For each dense operand, the dimensions of size 0 that are summed over.

    A sum over nothing is 0 wherever the sparse operands have entries. Were such a letter contracted with a sparse
    operand, or made one of its modes, no entries would be left.
    """
    e = bound.einsum
    empty = [c for c in e.dense_contracted if not bound.by_index[c]]
    return {p: own for p in e.dense if (own := tuple(n for n, c in enumerate(e.inputs[p]) if c in empty))}


def sparse_order(
    bound: Bound, terms: Sequence[tuple[str, ...]], nonzeros: Sequence[int], kept: Sequence[str]
) -> list[tuple[int, int]]:
    """The pairs to contract, by their positions in the list of operands that are left, ascending in each pair.

    Args:
        bound: the einsum.
        terms: the letters of each operand.
        nonzeros: how many each operand has.
        kept: letters of the result.
    """
    if len(terms) == 2:
        return [(0, 1)]
    text = ",".join("".join(t) for t in terms) + "->" + "".join(kept)
    shapes = [bound.extents(t) for t in terms]
    path, _ = opt_einsum.contract_path(text, *shapes, shapes=True, optimize=SparseOrder(nonzeros))
    return [(min(pair), max(pair)) for pair in path]


def of_step(settings: Options, number: int, steps: int) -> Options:
    """The settings of one contraction of several: those given, with its own plan where the plan has one for each."""
    return with_settings(settings, {"plan": requested(settings.plan).of_step(number, steps)})


class Several(Contraction):
    """A contraction of several sparse operands."""

    def __init__(self, bound: Bound, operands: Operands, settings: Options, form: str) -> None:
        e = bound.einsum
        check_pairs(settings.plan, e.indices)  # refused at once where it is not known
        super().__init__(bound, operands, settings, form)
        self.sparse = is_sparse(form, e, [e.inputs[p] for p in e.sparse])
        if not self.sparse:
            nbytes = prod(bound.output_shape) * accumulator(self.dtype).itemsize
            settings.check_memory(nbytes, self.device, f"the result of {bound}")
        # What is made on the way may need 64 bits where the result does not.
        self._like = torch.zeros((), dtype=summed_dtype(self.dtype), device=self.device)
        self._dropped = _empty_sums(bound)
        self._within = tables.without(bound, self._dropped)
        patterns = [o.expand_dense().pattern if isinstance(o, SparseTensor) else None for o in operands]
        self._chain(patterns)
        self.inner = tuple(link.work for link in self.links if isinstance(link.work, PairStep))
        self._arrange([p for p in patterns if p is not None])
        self.shape = (self.pattern.nnz,) if self.sparse and self.pattern is not None else bound.output_shape

    def _chain(self, patterns: Sequence[Pattern | None]) -> None:
        """Compile the links, in the order in which they run."""
        e = self._within.einsum
        terms = [ChainOperand(t, None if p is None else self._on(p)) for t, p in zip(e.inputs, patterns, strict=True)]
        nonzeros = [prod(self.bound.extents(t.letters)) if t.pattern is None else t.pattern.nnz for t in terms]
        self.order = sparse_order(self._within, [t.letters for t in terms], nonzeros, e.output)
        self.links: list[Link] = []
        for number, places in enumerate(self.order):
            rest = [t for n, t in enumerate(terms) if n not in places]
            settings = of_step(self.settings, number, len(self.order))
            self.links.append(self._link(places, (terms[places[0]], terms[places[1]]), rest, settings))
            terms = [*rest, self.links[-1].result]
        (self._result,) = terms
        last, self.empty = self._result.pattern, any(link.result.empty for link in self.links)
        self._cleared = last is not None and self.empty
        """Whether the result of the last link has positions that it is known to be 0 at."""
        if last is not None and self.empty:
            none = SparseTensor._of(last.coords[:, :0], last.values[:0], last.shape, True)
            self._result = replace(self._result, pattern=none)
        self.empty = self.empty or (last is not None and last.nnz == 0)

    def _on(self, pattern: Pattern, *width: int) -> SparseTensor:
        """A tensor of a pattern, to compile for."""
        return SparseTensor._make(pattern, self._like.expand(pattern.nnz, *width))

    def _link(
        self,
        places: tuple[int, int],
        chosen: tuple[ChainOperand, ChainOperand],
        rest: Sequence[ChainOperand],
        settings: Options,
    ) -> Link:
        """Compile one link; its result has the letters of the output, or those that the rest and the output need."""
        inputs, output = (chosen[0].letters, chosen[1].letters), self._within.einsum.output
        if rest:
            needed = set(output).union(*(t.letters for t in rest))
            output = tuple(c for c in dict.fromkeys((*inputs[0], *inputs[1])) if c in needed)
        x, y = (t.pattern for t in chosen)
        if x is not None and y is not None:
            pair = PairStep(inputs, (x, y), output, self.bound.by_index, settings)
            found = self._on(Pattern(pair.coords, pair.shape, True)) if output else None
            return Link(places, pair.equation, pair, ChainOperand(output, found, pair.nnz == 0))
        terms, sparse = ",".join(map("".join, inputs)), y if x is None else x
        if sparse is None:
            precision = settings.effective_precision()
            return Link(places, f"{terms}->{''.join(output)}", None, ChainOperand(output, None), precision=precision)
        # The result has its sparse modes first, so it needs no permutation.
        position = int(x is None)
        kept = tuple(c for c in dict.fromkeys(inputs[position]) if c in output)
        output = (*kept, *(c for c in output if c not in kept))
        equation = f"{terms}->{''.join(output)}"
        bound = Bound.of(Einsum(inputs, output, (position,), equation), self.bound.by_index)
        if settings.plan.is_request:  # one for pairs
            settings = with_settings(settings, {"plan": AUTO})
        step = Step(bound, stand_ins(bound, [sparse], self._like), settings, "sparse" if kept else "dense")
        result = ChainOperand(output, None, not kept and not step.canonical.coords.shape[1])
        if step.output.pattern is not None:
            found = self._on(step.output.pattern, *step.output.width_shape).expand_dense()
            result = ChainOperand(output, found)
        # A chain is kept for its operands' patterns.
        return Link(places, equation, step, result, sparse.pattern.bare(), position == 0)

    def _arrange(self, patterns: Patterns) -> None:
        """Find the pattern of the result, and how the values of the last link are brought to it."""
        result, output = self._result, self.bound.einsum.output
        self.pattern: Pattern | None = None
        self._last: JoinOperand | None = None
        coords = None
        if result.pattern is not None:
            # A link that keeps all of an operand keeps its order and its duplicates too.
            own, alike = result.pattern, result.letters == output
            self._last = prepared(result.letters, own.coords, self.bound.by_index, output, own.is_coalesced and alike)
            as_it_is = alike and self._last.source is None
            coords = own.coords if as_it_is else torch.stack(self._last.coords)
        elif self.sparse:
            shape = self.bound.output_shape
            grid = torch.cartesian_prod(*(torch.arange(n, device=self.device) for n in shape))
            coords = grid.reshape(-1, len(shape)).T.contiguous()
        if coords is not None:
            e, (first, *others) = self.bound.einsum, patterns
            key = e.inputs, output, e.sparse, self.bound.sizes
            self.pattern = first.known(key, Pattern(coords, self.bound.output_shape, True), others)

    # -- calls ------------------------------------------------------------------------------------------------------
    def pattern_on(self, patterns: Patterns) -> Pattern | None:
        """The pattern that was found when the contraction was compiled."""
        return self.pattern if self.sparse else None

    def result(self, patterns: Patterns, values: Tensors, dense: Tensors, packed: Values | None = None) -> torch.Tensor:
        """The result's values on its pattern, or a dense result; differentiable."""
        dense = dense_of_call(self.bound, dense, self.dtype, self.device)
        given, others, e = iter(values), iter(dense), self.bound.einsum
        terms = [
            (next(given).reshape(-1) if p in e.sparse else self._without_dropped(next(others), p)).to(self._like.dtype)
            for p in range(len(e.inputs))
        ]
        for link in self.links:
            made = link.run(*(terms[n] for n in link.places))
            terms = [*(t for n, t in enumerate(terms) if n not in link.places), made]
        found = terms[0][:0] if self._cleared else terms[0]
        if self._last is not None:
            found = self._last.values(found, self.settings.deterministic)
        elif e.output:
            found = found.permute(tuple(self._result.letters.index(c) for c in e.output))
        found = fitted(found, self.dtype, f'the result of "{e.text}"')
        if self.sparse or self.pattern is None:
            return found.reshape(self.shape)
        return SparseTensor._make(self.pattern, found.reshape(-1)).to_dense(self.settings.memory_limit)

    def _without_dropped(self, operand: torch.Tensor, position: int) -> torch.Tensor:
        """A dense operand in full, without the letters that it is summed over before all else."""
        full, dropped = operand.expand(self.bound.shape(position)), self._dropped.get(position)
        return full.sum(dropped, dtype=full.dtype) if dropped else full

    # -- what a user may look at ------------------------------------------------------------------------------------
    @property
    def steps(self) -> tuple[PairStep | Step, ...]:
        """The contractions that have a sparse operand."""
        return tuple(link.work for link in self.links if link.work is not None)

    @property
    def backend(self) -> str:
        """The backend that the contractions of sparse operands run on."""
        return next((step.backend for step in self.steps), "torch")

    @property
    def plan(self) -> Plan:
        """The plan of the contraction, with the plan of each link where there are several, named after the first."""
        plans = [step.plan for step in self.inner]
        if len(self.links) == 1 and plans:
            return plans[0]
        parts = tuple(part for plan in plans for part in plan.parts)
        work = [link.work for link in self.links]
        steps = tuple(None if own is None else own.plan for own in work)  # None: torch's own product
        name, reason = (plans[0].name, plans[0].reason) if plans else ("dense", "nothing sparse is left to pair")
        return Plan(name, parts, False, steps=steps, reason=reason)

    @property
    def path(self) -> Path:
        """The file of the first contraction's program."""
        if not self.inner:
            raise PlanError(f'"{self.bound.einsum.text}" contracts no two sparse operands; it has no program')
        return super().path

    def ptx(self, target: str) -> str:
        """The assembly of the kernels of every plan but ``"dense"``."""
        if self.dtype.is_complex:
            raise PlanError("complex einsums run the generated torch programs, which have no PTX")
        return super().ptx(target)

    def explain(self) -> Explanation:
        """The steps of the chain: how much matches, the paths and their expected times."""
        steps = self.steps
        profile = self.inner[0].problem.profile if self.inner else of_backend(steps[0].backend) if steps else None
        about = (profile.describe(), profile.measured) if profile else ("", ())
        return self._explained(*about, [link.report() for link in self.links], self.pattern)
