"""Gradients and batches of a step of one sparse operand: each is again an einsum with the same sparse pattern.

In: a step, values, dense operands. Out: `At`, the step as a function that autograd can follow. The gradient of a dense
operand is a dense result (``"ijk,ir,kr->jr"``), that of the values a sampled one (``"ijk,jr,kr,ir->ijk"``); both reuse
what is packed for the pattern. A sparse output's gradient has a row a slot; it joins as a dense operand over one more
mode of the sparse operand, the slot, so that no second sparse operand is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from sparsetc.autograd import one_by_one
from sparsetc.codegen.launch import Values
from sparsetc.dense import repeated_dims
from sparsetc.ir.rewrite import UPSTREAM, Gradient, gradient
from sparsetc.options import Options
from sparsetc.pattern import Pattern
from sparsetc.tensor import SparseTensor

if TYPE_CHECKING:
    from sparsetc.step import Step


@dataclass(frozen=True)
class Rule:
    """How the gradient for one operand of a step's raw einsum is computed: by another einsum."""

    gradient: Gradient
    text: str
    settings: Options
    sizes: tuple[int, ...]
    """Sizes of the operand's distinct letters; empty for the sparse operand."""
    source: torch.Tensor | None
    """Numbers of the operand's nonzeros that the gradient's values belong to; None for all, in order."""

    @classmethod
    def of(cls, step: Step, operand: int) -> Rule:
        """The rule of a step."""
        g = gradient(step.raw, operand)
        names = dict.fromkeys(g.target)
        own = () if operand in step.raw.sparse else tuple(step.canonical.narrow.by_index[c] for c in names)
        source = step.slotted.source if step.output.sparse else step.canonical.source
        return cls(g, str(g.einsum), step.automatic, own, source)


@dataclass(frozen=True)
class At:
    """A step as a function of tensors, for autograd: of values and dense operands, or of dense operands alone."""

    step: Step
    pattern: Pattern
    ones: bool
    """Whether values are 1 at each nonzero, and not among the tensors."""
    packed: Values | None = None

    def _split(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, Sequence[torch.Tensor]]:
        return (None, tensors) if self.ones else (tensors[0], tensors[1:])

    def rows(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The step's rows."""
        values, dense = self._split(tensors)
        return self.step.rows(values, dense, self.packed)

    def of_any(self) -> At:
        """The function without packed values."""
        return self if self.packed is None else replace(self, packed=None)

    def batched(self, tensors: Sequence[torch.Tensor], dims: Sequence[int | None]) -> tuple[torch.Tensor, int]:
        """Batches of dense operands as one more letter of theirs; of values one after the other."""
        values, dense = self._split(tensors)
        if not self.ones and dims[0] is not None:
            return one_by_one(self.of_any(), tensors, dims)
        own = dims if self.ones else dims[1:]
        size = next(t.shape[d] for t, d in zip(dense, own, strict=True) if d is not None)
        moved = [t if d is None else t.movedim(d, 0) for t, d in zip(dense, own, strict=True)]
        step = self.step.batched(size, [d is not None for d in own])
        return step(self.pattern, values, moved), 1

    def gradient(self, n: int, tensors: Sequence[torch.Tensor], upstream: torch.Tensor) -> torch.Tensor:
        """The einsum in which the operand and the result change places."""
        values, dense = self._split(tensors)
        step, e = self.step, self.step.raw
        others = iter(dense)
        given = [None if p in e.sparse else next(others) for p in range(len(e.inputs))]
        operand = e.sparse[0] if n == 0 and not self.ones else e.dense[n if self.ones else n - 1]
        rule = step.rule(operand)
        upstream = (
            upstream if step.output.sparse else upstream.reshape((*step.output.kept_shape, *step.output.width_shape))
        )
        conjugate = step.dtype.is_complex
        found = [
            torch.conj_physical(t) if conjugate and place in rule.gradient.conjugated else t
            for place, s in enumerate(rule.gradient.sources)
            if (t := upstream if s == UPSTREAM else given[s]) is not None
        ]
        of_values = operand in e.sparse
        own = None if of_values else values
        if own is not None:
            own = torch.conj_physical(own) if conjugate else own
            if step.output.sparse and rule.source is not None:
                own = own.index_select(0, rule.source)
        pattern = step.slotted.pattern if step.output.sparse else self.pattern
        inner = self._step_of(operand, rule, pattern, found)
        rows = inner(pattern, own, found)
        return self._of_values(rows, rule) if of_values else self._of_dense(rows, inner, rule)

    def _step_of(self, operand: int, rule: Rule, pattern: Pattern, dense: Sequence[torch.Tensor]) -> Step:
        """The gradient's step, kept with the pattern that it is of."""
        key = ("gradient", self.step.number, operand, *map(repeated_dims, dense))
        found = pattern.cache.get(key)
        if found is None:
            from sparsetc.contraction import compiled

            x = SparseTensor._make(
                pattern, torch.zeros((), dtype=self.step.dtype, device=pattern.device).expand(pattern.nnz)
            )
            given, e = iter(dense), rule.gradient.einsum
            operands = [x if p in e.sparse else next(given) for p in range(len(e.inputs))]
            form = "sparse" if operand in self.step.raw.sparse else "dense"
            (made,) = compiled(rule.text, operands, rule.settings, form).steps
            found = pattern.cache.put(key, made)
        return found  # type: ignore[no-any-return]

    def _of_dense(self, rows: torch.Tensor, inner: Step, rule: Rule) -> torch.Tensor:
        result, g = inner.output.shaped(rows), rule.gradient
        names = list(dict.fromkeys(g.target))
        for at, letter in enumerate(names):
            if letter in g.broadcast:
                result = result.unsqueeze(at)
        result = result.expand(rule.sizes)
        if not g.repeated:
            return result
        sizes = dict(zip(names, rule.sizes, strict=True))
        whole = result.new_zeros([sizes[c] for c in g.target])
        index = torch.meshgrid(*(torch.arange(sizes[c], device=result.device) for c in names), indexing="ij")
        return whole.index_put(tuple(index[names.index(c)] for c in g.target), result)

    def _of_values(self, rows: torch.Tensor, rule: Rule) -> torch.Tensor:
        if rule.source is None:
            return rows
        # Nonzeros off the diagonal of a repeated letter take no part; uncoalesced ones, and slots, were sorted.
        return rows.new_zeros(self.step.nnz).index_copy(0, rule.source, rows)
