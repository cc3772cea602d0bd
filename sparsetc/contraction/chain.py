"""Any number of operands, two or more of them sparse: contracted two at a time, in an order found once.

In: a `Bound` einsum and its operands. Out: `Chain`: links whose patterns are all known, and a function from values and
dense operands to the result's. A pair of sparse operands is a `PairStep`. A sparse and a dense operand are a `Step`
like any other: so a dense operand is contracted into a sparse one, or applied to a product of sparse ones, whichever is
expected to make fewer tasks. Two dense operands are torch's.

Every intermediate that keeps a mode of a sparse operand is sparse. A mode that only a dense operand has gets
coordinates like the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import opt_einsum
import torch

from sparsetc.contraction import dense as tables
from sparsetc.contraction.pair_step import PairStep
from sparsetc.contraction.step import Step
from sparsetc.explain import StepReport
from sparsetc.ir.equation.einsum import Bound, Einsum
from sparsetc.ir.plan import AUTO, requested
from sparsetc.options import Options, with_settings
from sparsetc.pair.contraction_order import SparseOrder
from sparsetc.tensor.pattern import Pattern
from sparsetc.tensor.sparse_tensor import SparseTensor


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
