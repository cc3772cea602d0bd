"""A contraction of one sparse operand with dense ones as a differentiable function.

In: a `Request` as rules leave it. Out: `Step`, a differentiable function from values and dense operands to the result.

`StepFunction` is a step of one sparse operand as such a function: its gradients and batches are einsums with the same
sparse pattern. The gradient of a dense operand is a dense result (``"ijk,ir,kr->jr"``), that of the values a sampled
one (``"ijk,jr,kr,ir->ijk"``); both reuse what is packed for the pattern. A sparse output's gradient has a row a slot;
it joins as a dense operand over one more mode of the sparse operand, the slot, so that there is no second sparse one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsetc.codegen.launch import Values
from sparsetc.contraction.autograd import UNREAD, Multilinear, apply
from sparsetc.contraction.compiled_step import CompiledStep
from sparsetc.contraction.contraction import Contraction, compiled
from sparsetc.contraction.operands import Patterns, Tensors, repeated_dims, stand_ins
from sparsetc.errors import EquationError
from sparsetc.ir.equation.einsum import Bound, Einsum
from sparsetc.ir.equation.rewrite import UPSTREAM, gradient
from sparsetc.options import Options, with_settings
from sparsetc.planner.registry import plan_of_derived
from sparsetc.support import outside
from sparsetc.support.lru import cached_property
from sparsetc.tensor.coords import picked
from sparsetc.tensor.kept_values import gradient_taken
from sparsetc.tensor.pattern import Pattern, followed, lasting
from sparsetc.tensor.sparse_tensor import SparseTensor
from sparsetc.tensor.sums import captured


class Step(CompiledStep):
    """A compiled step with gradients, tangents and batches, which are contractions of the same sparse pattern."""

    @cached_property
    def derived(self) -> Options:
        """The settings of gradients and batches."""
        return with_settings(self.settings, {"plan": plan_of_derived(self.settings.plan)})

    def result(
        self,
        patterns: Patterns,
        values: Sequence[Tensor | None],
        dense: Tensors,
        packed: Values | None = None,
        given: Tensors | None = None,
    ) -> Tensor:
        """A dense result, or (rows, *dense sizes) values; differentiable.

        Args:
            patterns: that which the step was compiled for; what is compiled for gradients is kept with it.
            values: (nnz,) of the sparse operand; none for 1 at each nonzero.
            dense: the dense operands.
            packed: the values as `packed` gives them, where the caller has them.
            given: what the dense operands were made of, of which the guard knows its verdict while they stay the same.
        """
        if not followed([*values, *dense]):
            return self.of_rows(self.rows(values[0] if values else None, dense, packed, given))
        # Expanded outside, so that autograd itself sums the gradient of an operand that was broadcast.
        expanded = [d.expand(s) for d, s in zip(dense, self.bound.dense_shapes, strict=True)]
        tensors = [*(v for v in values if v is not None), *expanded]
        at = StepFunction(self, patterns[0], len(tensors) == len(expanded), packed, given or dense)
        return self.of_rows(apply(at, tensors))

    def around(self, whole: Contraction, pattern: Pattern, values: Any, packed: Any, given: Any) -> StepFunction:
        """Return a contraction that has no other innermost as a function for autograd, in place of the step."""
        return StepFunction(self, pattern, values is None, packed, given, whole)

    def batched(self, size: int, which: Sequence[bool]) -> Contraction:
        """Return the contraction with one more mode, the batch, in the result and in the dense operands marked.

        It is their first mode, and that behind the kept modes of the result.
        """
        key = "batch", size, tuple(which)
        compiled: Contraction | None = self._others.get(key)
        if compiled is None:
            e = self.bound.einsum
            letter = self.spare("a batch")
            batched = iter(which)
            inputs = tuple(t if p in e.sparse or not next(batched) else (letter, *t) for p, t in enumerate(e.inputs))
            einsum = Einsum(inputs, (*e.kept, letter, *e.free), e.sparse, e.text)
            bound = Bound.of(einsum, {**self.bound.by_index, letter: size})
            with lasting():
                compiled = Contraction.compile(bound, stand_ins(bound, [self.operand]), self.derived, self.form)
            self._others[key] = compiled
        return compiled

    def spare(self, what: str) -> str:
        """A letter that the einsum has not."""
        e = self.bound.einsum
        if not e.spare:
            raise EquationError(f'{what} of "{e.text}" needs one letter more than the 52 there are')
        return e.spare[0]

    @cached_property
    def raw(self) -> Einsum:
        """The einsum that gives the rows: of kept letters, or of the slot of a sparse output, and dense letters.

        The slot is one more mode of the sparse operand, so that a result's gradient can join as a dense operand.
        """
        e = self.bound.einsum
        if not self.output.sparse:
            return Einsum(e.inputs, (*e.kept, *e.free), e.sparse, e.text)
        slot = self.spare("the gradient")
        inputs = tuple((slot, *t) if p in e.sparse else t for p, t in enumerate(e.inputs))
        return Einsum(inputs, (slot, *e.free), e.sparse, e.text)

    @cached_property
    def by_slot(self) -> Tensor | None:
        """Return the order that sorts the nonzeros by the entry they add to; None if they are sorted."""
        if self.output.slot is None:
            return None
        with lasting():
            return torch.argsort(self.output.slot, stable=True)

    @cached_property
    def slotted(self) -> Pattern:
        """The operand's pattern with one more mode in front: the slot of a sparse result that each nonzero adds to."""
        x = self.operand
        slot = self.output.slot
        order = self.by_slot
        with lasting():
            slot = torch.arange(x.nnz, device=x.device) if slot is None else slot[order]
            coords = x.coords if order is None else x.coords[:, order]
            return Pattern(torch.cat([slot.unsqueeze(0), coords]), (self.output.rows, *x.shape), x.is_coalesced)


@dataclass(frozen=True)
class StepFunction(Multilinear):
    """A step as a function of tensors, for autograd: of values and dense operands, or of dense operands alone.

    Attributes:
        ones: True if values are 1 at each nonzero, and not among the tensors.
        given: the operands of which the dense tensors were made, for the guard.
        whole: the contraction that has no other innermost, where the tensors are those of its calls. Its gradients are
            einsums of these, which are rewritten by themselves; what is converted and put back is no part of torch's
            graph.
    """

    step: Step
    pattern: Pattern
    ones: bool
    packed: Values | None = None
    given: Tensors | None = None
    whole: Contraction | None = None

    def _split(self, tensors: Tensors) -> tuple[Tensor | None, Tensors]:
        return (None, tensors) if self.ones else (tensors[0], tensors[1:])

    def rows(self, tensors: Tensors) -> Tensor:
        """The rows of the step's result, or the contraction's result, outside autograd."""
        values, dense = self._split(tensors)
        if self.whole is not None:
            operands = [values], dense, self.packed, self.given
            result = self.whole.straight(*operands)
            return self.whole.run([self.pattern], *operands) if result is None else result
        if self.packed is UNREAD:
            return tensors[0].new_zeros(()).expand(self.step.executable.shape)
        return self.step.rows(values, dense, self.packed, self.given)

    def of_any(self) -> StepFunction:
        """The function without packed values."""
        return StepFunction(self.step, self.pattern, self.ones, whole=self.whole)

    def batched(self, tensors: Tensors, dims: Sequence[int | None], size: int) -> tuple[Tensor, int]:
        """Compute a batch: of a step's dense operands it is one more letter; else one call follows the other."""
        values, dense = self._split(tensors)
        if self.whole is not None or (not self.ones and dims[0] is not None):
            return super().batched(tensors, dims, size)
        dense_dims = dims if self.ones else dims[1:]
        moved = [t if d is None else t.movedim(d, 0) for t, d in zip(dense, dense_dims, strict=True)]
        batched = self.step.batched(size, [d is not None for d in dense_dims])
        rows, *width = self.step.executable.shape
        return batched.result([self.pattern], [values], moved).reshape(rows, size, *width), 1

    def gradients(self, wanted: Sequence[bool], tensors: Tensors, upstream: Tensor) -> list[Tensor | None]:
        """The gradient for each tensor where it is wanted: an einsum in which it and the result change places."""
        if upstream.ndim != len(self._raw.output):
            upstream = self.step.output.letters_apart(upstream)
        positions = [*(() if self.ones else self._raw.sparse), *self._raw.dense]
        return [self._gradient(p, tensors, upstream) if w else None for p, w in zip(positions, wanted, strict=True)]

    @property
    def _raw(self) -> Einsum:
        """The einsum that gradients are made of."""
        return self.step.raw if self.whole is None else self.whole.bound.einsum

    def _gradient(self, operand: int, tensors: Tensors, upstream: Tensor) -> Tensor:
        """Compute the gradient of one operand by a contraction that is kept with the pattern."""
        step, e, (values, dense) = self.step, self._raw, self._split(tensors)
        pattern, order = self.pattern, None
        sizes: Sequence[int] = (pattern.nnz,)
        if self.whole is not None:
            sizes = self.whole.compiled_for[0][1]
        elif step.output.sparse:
            pattern, order = step.slotted, step.by_slot
        sampled = operand in e.sparse
        einsum, sources = gradient(e, operand)
        conjugate = torch.conj_physical if step.dtype.is_complex else lambda t: t
        weights = None if values is None or sampled else conjugate(picked(values, order))
        others = outside(sources, e.sparse)
        operands = [upstream if s == UPSTREAM else conjugate(dense[e.dense.index(s)]) for s in others]
        if weights is None and (step.problem.backend == "triton" or len(sizes) > 1):
            pattern = pattern.of_ones
        key = "gradient", self.whole and self.whole.key, step.number, operand, *map(repeated_dims, operands)
        contraction: Contraction | None = pattern.cache.get(key)
        if contraction is None:
            x = SparseTensor._make(pattern, torch.zeros((), dtype=step.dtype, device=pattern.device).expand(sizes))
            rest = iter(operands)
            compiled_for = [x if p in einsum.sparse else next(rest) for p in range(len(einsum.inputs))]
            form = "sparse" if sampled else "dense"
            # Or that of a thread that was first.
            contraction = pattern.cache.put(key, compiled(str(einsum), compiled_for, step.derived, form))
        # Values that an earlier call packed are taken again, except within a CUDA graph.
        repacked = weights is None or captured(weights) or followed([weights, *operands])
        packed = None if repacked else contraction.packed([weights])  # type: ignore[list-item]
        result = contraction.result([pattern], [weights], operands, packed)
        if not sampled or values is None:
            return result
        gradient_taken(values)  # those that were packed here are of the call before
        result = result.reshape(values.shape)  # blocks of one position each have no sides in a result
        return result if order is None else torch.empty_like(result).index_copy(0, order, result)
