"""Any number of operands, two or more of them sparse: contracted two at a time, in an order found once.

In: a `Bound` einsum and its operands. Out: `Several`, a contraction of a `Chain`: links whose patterns are known, and a
function from values and dense operands to a result. A pair of sparse operands is a `PairStep`. A sparse and a dense
operand are a `Step` like any other: so a dense operand is contracted into a sparse one, or applied to a product of
sparse ones, whichever is expected to make fewer tasks. Two dense operands are torch's.

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
from sparsetc.contraction.base import Contraction, Operand, Patterns, Tensors
from sparsetc.contraction.canonical import dense_of_call
from sparsetc.contraction.output import is_sparse
from sparsetc.contraction.pair_step import PairStep
from sparsetc.contraction.step import Step
from sparsetc.device.lookup import of_backend
from sparsetc.errors import PlanError
from sparsetc.explain import Explanation, StepReport, device_name
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
    precision: str
    """Precision of products of dense operands."""
    pattern: Pattern | None = None
    """Pattern of the sparse operand, where one is dense."""

    def run(self, left: torch.Tensor, right: torch.Tensor, sparse_first: bool) -> torch.Tensor:
        """The values of a sparse result, or a dense one, from values of sparse operands and dense ones as they are."""
        if isinstance(self.work, PairStep):
            found = self.work(left, right)
            return found if self.result.letters else found.sum(dtype=found.dtype)  # of one entry, or none
        if self.work is None:
            return tables.einsum(self.equation, left, right, precision=self.precision)
        values, dense = (left, right) if sparse_first else (right, left)
        assert self.pattern is not None
        rows = self.work(self.pattern, values, [dense])
        return rows.reshape(-1) if self.work.output.sparse else self.work.output.shaped(rows)

    def report(self) -> StepReport:
        """What an explanation says of the contraction."""
        if self.work is None:
            return StepReport(self.equation, "torch.einsum", "two dense operands")
        return self.work.report()


class Chain:
    """The contraction of any number of operands: links, in the order in which they run."""

    def __init__(self, bound: Bound, operands: Sequence[SparseTensor | torch.Tensor], settings: Options) -> None:
        self._given, self._gone = bound, _empty_sums(bound)
        self.bound = tables.without(bound, self._gone)
        e = self.bound.einsum
        terms = [ChainOperand(e.inputs[p], o if isinstance(o, SparseTensor) else None) for p, o in enumerate(operands)]
        like = next(o for o in operands if isinstance(o, SparseTensor))
        self.order = contraction_order(self.bound, terms)
        self.links: list[Link] = []
        self._sparse: list[tuple[bool, bool]] = []
        for number, (left, right) in enumerate(self.order):
            chosen = (terms[left], terms[right])
            rest = [t for n, t in enumerate(terms) if n not in (left, right)]
            output = _kept(chosen, rest, e.output)
            own = _of_step(settings, number, len(self.order))
            link = _link((left, right), chosen, output, bound.by_index, like, own)
            self.links.append(link)
            self._sparse.append((chosen[0].pattern is not None, chosen[1].pattern is not None))
            terms = [*rest, link.result]
        (self.result,) = terms
        self._empty = self.result.pattern is not None and any(link.result.empty for link in self.links)
        if self._empty:
            self.result = replace(self.result, pattern=_without_nonzeros(self.result.pattern))

    def run(self, operands: Sequence[torch.Tensor]) -> torch.Tensor:
        """The values of the result, or a dense one, from the values of sparse operands and dense ones as they are."""
        left = [o if p in self.bound.einsum.sparse else self._summed(o, p) for p, o in enumerate(operands)]
        for link, sparse in zip(self.links, self._sparse, strict=True):
            a, b = (left[n] for n in link.places)
            made = link.run(a, b, sparse[0])
            left = [o for n, o in enumerate(left) if n not in link.places] + [made]
        return left[0][:0] if self._empty else left[0]

    def _summed(self, operand: torch.Tensor, position: int) -> torch.Tensor:
        """A dense operand in full, without the letters that it is summed over before all else."""
        full, gone = operand.expand(self._given.shape(position)), self._gone.get(position)
        return full.sum(gone, dtype=full.dtype) if gone else full

    @property
    def pairs(self) -> tuple[PairStep, ...]:
        """The contractions of two sparse operands."""
        return tuple(link.work for link in self.links if isinstance(link.work, PairStep))


def _empty_sums(bound: Bound) -> dict[int, tables.Dims]:
    """For each dense operand, the dimensions of size 0 that are summed over.

    A sum over nothing is 0 wherever the sparse operands have entries. Were such a letter contracted with a sparse
    operand, or made one of its modes, no entries would be left.
    """
    e = bound.einsum
    empty = [c for c in e.dense_contracted if not bound.by_index[c]]
    return {p: own for p in e.dense if (own := tuple(n for n, c in enumerate(e.inputs[p]) if c in empty))}


def _without_nonzeros(x: SparseTensor | None) -> SparseTensor:
    assert x is not None
    return SparseTensor._of(x.coords[:, :0], x.values[:0], x.shape, True)


def contraction_order(bound: Bound, terms: Sequence[ChainOperand]) -> list[tuple[int, int]]:
    """The pairs to contract, by their positions in the list of operands that are left, ascending in each pair."""
    nonzeros = [prod(bound.extents(t.letters)) if t.pattern is None else t.pattern.nnz for t in terms]
    return sparse_order(bound, [t.letters for t in terms], nonzeros, bound.einsum.output)


def sparse_order(
    bound: Bound, terms: Sequence[tuple[str, ...]], nonzeros: Sequence[int], kept: Sequence[str]
) -> list[tuple[int, int]]:
    """The pairs to contract, as `contraction_order` has them, of operands with so many nonzeros; `kept` are letters."""
    if len(terms) == 2:
        return [(0, 1)]
    text = ",".join("".join(t) for t in terms) + "->" + "".join(kept)
    shapes = [bound.extents(t) for t in terms]
    path, _ = opt_einsum.contract_path(text, *shapes, shapes=True, optimize=SparseOrder(nonzeros))
    return [(min(pair), max(pair)) for pair in path]


def _kept(chosen: Sequence[ChainOperand], rest: Sequence[ChainOperand], output: tuple[str, ...]) -> tuple[str, ...]:
    """Letters of a result: in the order of the output for the last link, of the operands for those before."""
    own = dict.fromkeys(c for t in chosen for c in t.letters)
    if not rest:
        return output
    needed = set(output).union(*(t.letters for t in rest))
    return tuple(c for c in own if c in needed)


def _of_step(settings: Options, number: int, steps: int) -> Options:
    """The settings of one link: those given, with its own plan where the plan has one for each."""
    return with_settings(settings, {"plan": requested(settings.plan).of_step(number, steps)})


def _link(
    places: tuple[int, int],
    chosen: tuple[ChainOperand, ChainOperand],
    output: tuple[str, ...],
    sizes: dict[str, int],
    like: SparseTensor,
    settings: Options,
) -> Link:
    equation = f"{''.join(chosen[0].letters)},{''.join(chosen[1].letters)}->{''.join(output)}"
    patterns, precision = [t.pattern for t in chosen], settings.effective_precision()
    if all(p is None for p in patterns):
        return Link(places, equation, None, ChainOperand(output, None), precision)
    if all(p is not None for p in patterns):
        x, y = (p for p in patterns if p is not None)
        pair = PairStep((chosen[0].letters, chosen[1].letters), (x, y), output, sizes, settings)
        zero = torch.zeros((), dtype=like.dtype, device=like.device)
        result = ChainOperand(output, pair.result(zero.expand(pair.nnz)) if output else None, empty=pair.nnz == 0)
        return Link(places, equation, pair, result, precision)
    return _mixed(places, chosen, output, equation, sizes, like, settings)


def _mixed(
    places: tuple[int, int],
    chosen: tuple[ChainOperand, ChainOperand],
    output: tuple[str, ...],
    equation: str,
    sizes: dict[str, int],
    like: SparseTensor,
    settings: Options,
) -> Link:
    """The link of a sparse and a dense operand; the result has its sparse modes first, so it needs no permutation."""
    (position,) = (n for n, t in enumerate(chosen) if t.pattern is not None)
    sparse = chosen[position]
    assert sparse.pattern is not None
    kept = tuple(c for c in dict.fromkeys(sparse.letters) if c in output)
    output = (*kept, *(c for c in output if c not in kept))
    equation = f"{equation.split('->')[0]}->{''.join(output)}"
    inputs = (chosen[0].letters, chosen[1].letters)
    bound = Bound.of(Einsum(inputs, output, (position,), equation), sizes)
    table = torch.empty((), dtype=like.dtype, device=like.device)
    dense = table.expand(bound.shape(1 - position))
    operands = [sparse.pattern if n == position else dense for n in range(2)]
    precision = settings.effective_precision()
    if settings.plan.is_request:  # one for pairs
        settings = with_settings(settings, {"plan": AUTO})
    pattern = sparse.pattern.pattern.bare()  # a chain is kept for its operands' patterns
    step = Step(bound, operands, settings, "sparse" if kept else "dense")
    if not kept:
        term = ChainOperand(output, None, empty=step.canonical.coords.shape[1] == 0)
        return Link(places, equation, step, term, precision, pattern)
    assert step.output.pattern is not None
    zeros = torch.zeros((), dtype=like.dtype, device=like.device).expand(step.executable.shape)
    found = SparseTensor._make(step.output.pattern, zeros).expand_dense()
    return Link(places, equation, step, ChainOperand(output, found), precision, pattern)


class Several(Contraction):
    """A contraction of several sparse operands."""

    def __init__(self, bound: Bound, operands: Sequence[Operand], settings: Options, form: str) -> None:
        e = bound.einsum
        check_pairs(settings.plan, e.indices)  # refused at once where it is not known
        super().__init__(bound, operands, settings, form)
        self.sparse = is_sparse(form, e, [e.inputs[p] for p in e.sparse])
        if not self.sparse:
            nbytes = prod(bound.output_shape) * accumulator(self.dtype).itemsize
            settings.check_memory(nbytes, self.device, f"the result of {bound}")
        operands = [o.expand_dense() if isinstance(o, SparseTensor) else o for o in operands]
        # What is made on the way may need 64 bits where the result does not.
        self._summed = summed_dtype(self.dtype)
        self.chain = Chain(bound, [o.to(self._summed) for o in operands], settings)
        self.inner, last = self.chain.pairs, self.chain.result.pattern
        self.empty = any(link.result.empty for link in self.chain.links) or (last is not None and last.nnz == 0)
        self._arrange([o.pattern for o in operands if isinstance(o, SparseTensor)])
        self.shape = (self.pattern.nnz,) if self.sparse and self.pattern is not None else bound.output_shape

    def _arrange(self, patterns: Patterns) -> None:
        """Find the pattern of the result, and how the values of the last link are brought to it."""
        result, output = self.chain.result, self.bound.einsum.output
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
        terms = [next(given).reshape(-1) if p in e.sparse else next(others) for p in range(len(e.inputs))]
        found = self.chain.run([t.to(self._summed) for t in terms])
        if self._last is not None:
            found = self._fitted(self._last.values(found, self.settings.deterministic))
        else:
            order = tuple(self.chain.result.letters.index(c) for c in e.output)
            found = self._fitted(found.permute(order) if order else found)
        if self.sparse or self.pattern is None:
            return found.reshape(self.shape)
        return SparseTensor._make(self.pattern, found.reshape(-1)).to_dense(self.settings.memory_limit)

    def _fitted(self, found: torch.Tensor) -> torch.Tensor:
        return fitted(found, self.dtype, f'the result of "{self.bound.einsum.text}"')

    # -- what a user may look at ------------------------------------------------------------------------------------
    @property
    def steps(self) -> tuple[PairStep | Step, ...]:
        """The contractions that have a sparse operand."""
        return tuple(link.work for link in self.chain.links if link.work is not None)

    @property
    def backend(self) -> str:
        """The backend that the contractions of sparse operands run on."""
        return next((step.backend for step in self.steps), "torch")

    @property
    def plan(self) -> Plan:
        """The plan of the contraction, with the plan of each link where there are several, named after the first."""
        plans = [step.plan for step in self.inner]
        if len(self.chain.links) == 1 and plans:
            return plans[0]
        parts = tuple(part for plan in plans for part in plan.parts)
        work = [link.work for link in self.chain.links]
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
        plan, own = self.plan, self.steps
        profile = self.inner[0].problem.profile if self.inner else of_backend(own[0].backend) if own else None
        return Explanation(
            *(self.bound.einsum.text, plan.name, plan.reason, self.backend, device_name(self.device)),
            profile.describe() if profile else "",
            profile.measured if profile else (),
            tuple(step.report() for step in self.chain.links),
            prod(self.shape) if self.pattern is None else self.pattern.nnz,
        )
