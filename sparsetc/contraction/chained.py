"""A contraction of three sparse operands or more, some with dense modes or in blocks: a pair first, then the rest.

In: a `Bound` einsum. Out: `Chained`. Two sparse operands are contracted into one, whose pattern is known when it is
compiled, and which is in blocks or has dense modes as any result has; what is left is an einsum of one operand less.
So nothing is expanded, and dense operands join the last of the pairs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparsetc.codegen.launch import Values
from sparsetc.contraction.canonical import Operands, Patterns, dense_of_call
from sparsetc.contraction.contraction import Contraction, contraction
from sparsetc.contraction.dense import Tensors
from sparsetc.contraction.output import is_sparse
from sparsetc.contraction.several import of_step, sparse_order
from sparsetc.explain import Explanation
from sparsetc.ir.equation.einsum import Bound, Einsum, distinct
from sparsetc.ir.plan import Plan
from sparsetc.options import Options
from sparsetc.tensor.pattern import Pattern
from sparsetc.tensor.sparse_tensor import SparseTensor
from sparsetc.tensor.sums import fitted, summed_dtype


class Chained(Contraction):
    """A contraction of a pair of sparse operands, and one of its result with the other operands."""

    def __init__(self, bound: Bound, operands: Operands, settings: Options, form: str) -> None:
        super().__init__(bound, operands, settings, form)
        e, given = bound.einsum, [o for o in operands if isinstance(o, SparseTensor)]
        # What is made on the way may need 64 bits where the result does not.
        self._like = torch.zeros((), dtype=summed_dtype(self.dtype), device=self.device)
        stand_ins = [
            SparseTensor._make(p, self._like.expand(x._values.shape)) for p, x in zip(self.bare, given, strict=True)
        ]
        coordinates = [e.inputs[p][: x.sparse_order] for p, x in zip(e.sparse, given, strict=True)]
        self.sparse = is_sparse(form, e, coordinates)
        sizes = [x._values.numel() for x in given]
        terms = [e.inputs[p] for p in e.sparse]
        others = (*e.output, *(c for p in e.dense for c in e.inputs[p]))
        kept = distinct(c for c in others if any(c in t for t in terms))
        self._pair = sparse_order(bound, terms, sizes, kept)[0]
        self.first, letters = self._first(stand_ins, coordinates)
        self.rest = self._rest(stand_ins, operands, letters)
        self.inner, self.empty = (self.first, self.rest), self.first.empty or self.rest.empty
        dense_and_empty = self.first.empty and not self.first.sparse
        found = self.rest.pattern_on(self._left(self.bare)) if dense_and_empty else None
        self._nothing = None if found is None else found.like(found.coords[:, :0], True)
        """The pattern of a sparse result that has none since the pair, whose result is dense, has none that meet."""
        self.shape = self.rest.shape if self._nothing is None else (0, *self.rest.shape[1:])

    def _first(
        self, given: Sequence[SparseTensor], coordinates: Sequence[tuple[str, ...]]
    ) -> tuple[Contraction, tuple[str, ...]]:
        """The contraction of the pair, and its letters: those that others need, with coordinates first."""
        e, pair = self.bound.einsum, self._pair
        positions = [e.sparse[n] for n in pair]
        terms = [e.inputs[p] for p in positions]
        needed = {c for p, t in enumerate(e.inputs) if p not in positions for c in t}.union(e.output)
        rows = distinct(c for n in pair for c in coordinates[n] if c in needed)
        kept = distinct((*rows, *(c for t in terms for c in t if c in needed)))
        bound = Bound.of(Einsum((terms[0], terms[1]), kept, (0, 1), e.text), self.bound.by_index)
        form = "sparse" if rows else "dense"
        return contraction(bound, [given[n] for n in pair], of_step(self.settings, 0, 2), form), kept

    def _rest(self, given: Sequence[SparseTensor], operands: Operands, kept: tuple[str, ...]) -> Contraction:
        """The contraction of the pair's result with all other operands, which it precedes."""
        e = self.bound.einsum
        pattern = self._made_on(self.bare)
        made = self._like.expand(self.first.shape)
        sparse = {p: x for n, (p, x) in enumerate(zip(e.sparse, given, strict=True)) if n not in self._pair}
        others = [*sparse, *e.dense]
        views: list[SparseTensor | torch.Tensor] = [
            made if pattern is None else SparseTensor._make(pattern, made),
            *sparse.values(),
        ]
        views += [self._like.expand(operands[p].shape) for p in e.dense]
        places = tuple(range(int(pattern is None), 1 + len(sparse)))
        einsum = Einsum((kept, *(e.inputs[p] for p in others)), e.output, places, e.text)
        form = "sparse" if self.sparse else "dense"
        return contraction(Bound.of(einsum, self.bound.by_index), views, of_step(self.settings, 1, 2), form)

    def _made_on(self, patterns: Patterns) -> Pattern | None:
        """The pattern of the pair's result."""
        return self.first.pattern_on([patterns[n] for n in self._pair])

    def _left(self, patterns: Patterns) -> list[Pattern]:
        """The patterns of the sparse operands of what is left."""
        made = self._made_on(patterns)
        return [*([] if made is None else [made]), *(p for n, p in enumerate(patterns) if n not in self._pair)]

    # -- calls ------------------------------------------------------------------------------------------------------
    def pattern_on(self, patterns: Patterns) -> Pattern | None:
        """The pattern of a sparse result."""
        return self.rest.pattern_on(self._left(patterns)) if self._nothing is None else self._nothing

    def result(self, patterns: Patterns, values: Tensors, dense: Tensors, packed: Values | None = None) -> torch.Tensor:
        """A dense result, or a sparse one's values; differentiable."""
        dense = dense_of_call(self.bound, dense, self.dtype, self.device)
        own, tables = ([t.to(self._like.dtype) for t in given] for given in (values, dense))
        made = self.first.result([patterns[n] for n in self._pair], [own[n] for n in self._pair], [])
        others = [v for n, v in enumerate(own) if n not in self._pair]
        left = self._left(patterns)
        if len(left) > len(others):
            others.insert(0, made)
        else:
            tables.insert(0, made)
        found = self.rest.result(left, others, tables)
        found = found if self._nothing is None else found[:0]
        return fitted(found, self.dtype, f'the result of "{self.bound.einsum.text}"')

    # -- what a user may look at ------------------------------------------------------------------------------------
    @property
    def plan(self) -> Plan:
        """The plans of both contractions."""
        return Plan("chain", (), False, steps=(self.first.plan, self.rest.plan), reason="a pair of operands at a time")

    def explain(self) -> Explanation:
        """The steps, one after the other."""
        one, reports = self.first.explain(), [step.report() for step in self.steps]
        return self._explained(one.profile, one.measured, reports, self.pattern_on(self.bare))
