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

import torch
from torch import Tensor

from sparsetc.codegen.launch import Values
from sparsetc.contraction.autograd import UNREAD, Multilinear, apply
from sparsetc.contraction.contraction import Contraction, compiled
from sparsetc.contraction.leaf import Leaf
from sparsetc.contraction.operands import Patterns, Tensors, repeated_dims, resolved, stand_ins
from sparsetc.errors import EquationError
from sparsetc.ir.equation.einsum import Bound, Einsum
from sparsetc.ir.equation.rewrite import UPSTREAM, gradient
from sparsetc.options import Options, with_settings
from sparsetc.packing.base import Packed, after_zero
from sparsetc.planner.registry import plan_of_derived
from sparsetc.support import outside
from sparsetc.support.lru import cached_property
from sparsetc.tensor.coords import picked
from sparsetc.tensor.kept_values import gradient_taken
from sparsetc.tensor.pattern import Pattern, followed, lasting
from sparsetc.tensor.sparse_tensor import SparseTensor
from sparsetc.tensor.sums import captured


class Step(Leaf):
    """A leaf with gradients, tangents and batches, which are contractions of the same sparse pattern."""

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
    """

    step: Step
    pattern: Pattern
    ones: bool
    packed: Values | None = None
    given: Tensors | None = None

    def _split(self, tensors: Tensors) -> tuple[Tensor | None, Tensors]:
        return (None, tensors) if self.ones else (tensors[0], tensors[1:])

    def rows(self, tensors: Tensors) -> Tensor:
        """The rows of the step's result, outside autograd."""
        values, dense = self._split(tensors)
        if self.packed is UNREAD:
            return tensors[0].new_zeros(()).expand(self.step.executable.shape)
        return self.step.rows(values, dense, self.packed, self.given)

    def of_any(self) -> StepFunction:
        """The function without packed values."""
        return StepFunction(self.step, self.pattern, self.ones)

    def batched(self, tensors: Tensors, dims: Sequence[int | None], size: int) -> tuple[Tensor, int]:
        """Compute a batch: of dense operands it is one more letter, of values one call follows the other."""
        values, dense = self._split(tensors)
        if not self.ones and dims[0] is not None:
            return super().batched(tensors, dims, size)
        dense_dims = dims if self.ones else dims[1:]
        moved = [t if d is None else t.movedim(d, 0) for t, d in zip(dense, dense_dims, strict=True)]
        batched = self.step.batched(size, [d is not None for d in dense_dims])
        rows, *width = self.step.executable.shape
        return batched.result([self.pattern], [values], moved).reshape(rows, size, *width), 1

    def gradients(self, wanted: Sequence[bool], tensors: Tensors, upstream: Tensor) -> list[Tensor | None]:
        """The gradient for each tensor where it is wanted: an einsum in which it and the result change places."""
        jobs = [self._job(n, tensors, upstream) if w else None for n, w in enumerate(wanted)]
        results = iter(run_all([job for job in jobs if job is not None]))
        gradients = [None if job is None else next(results) for job in jobs]
        if not self.ones and gradients[0] is not None:  # values that were packed here are those of the call before
            gradient_taken(tensors[0])
            gradients[0] = self._of_all(gradients[0])
        return gradients

    def _job(self, n: int, tensors: Tensors, upstream: Tensor) -> Job:
        values, dense = self._split(tensors)
        step = self.step
        e = self.step.raw
        sparse = self.step.output.sparse
        operand = e.dense[n - 1 + self.ones] if n or self.ones else e.sparse[0]
        einsum, sources = gradient(e, operand)
        values = None if operand in e.sparse else values
        conjugate = torch.conj_physical if step.dtype.is_complex else lambda t: t
        if values is not None:
            values = conjugate(picked(values, step.by_slot))
        upstream = upstream if sparse else step.output.letters_apart(upstream)
        others = outside(sources, e.sparse)
        operands = [upstream if s == UPSTREAM else conjugate(dense[e.dense.index(s)]) for s in others]
        pattern = step.slotted if sparse else self.pattern
        if values is None and step.problem.backend == "triton":
            pattern = pattern.of_ones
        return self._compiled(operand, einsum, pattern, operands), pattern, values, operands

    def _of_all(self, values: Tensor) -> Tensor:
        """Put a gradient for values that were sorted by slot back in the order of all values."""
        order = self.step.by_slot
        return values if order is None else torch.empty_like(values).index_copy(0, order, values)

    def _compiled(self, operand: int, e: Einsum, pattern: Pattern, dense: Tensors) -> Contraction:
        """Return the contraction that computes a gradient; it is cached with the pattern."""
        key = ("gradient", self.step.number, operand, *map(repeated_dims, dense))
        of_operand: Contraction | None = pattern.cache.get(key)
        if of_operand is None:
            x = SparseTensor._make(
                pattern, torch.zeros((), dtype=self.step.dtype, device=pattern.device).expand(pattern.nnz)
            )
            others = iter(dense)
            operands = [x if p in e.sparse else next(others) for p in range(len(e.inputs))]
            form = "sparse" if operand in self.step.raw.sparse else "dense"
            # Or that of a thread that was first.
            of_operand = pattern.cache.put(key, compiled(str(e), operands, self.step.derived, form))
        return of_operand


# -- several at once --------------------------------------------------------------------------------------------------

MOST_TOGETHER = 1 << 22
"""Most nonzeros to pack for several steps at once, at 4 bytes each. Not measured: of 3.3 M the host took three times as
long as the kernels (H200, `benchmarks/results/calls.json`)."""


Job = tuple["Contraction", Pattern, Tensor | None, list[Tensor]]
"""A gradient to be computed: a contraction, and what it is called with."""


def run_all(jobs: Sequence[Job]) -> list[Tensor]:
    """The result of every job.

    What several kernels need beside themselves, packed values and zeros to add to, is made for all of them at once: a
    call of torch for each kernel would take more time than the kernels do.
    """
    together = [contraction.leaf.alone and not followed([values, *dense]) for contraction, _, values, dense in jobs]
    if sum(together) < 2:
        return [_alone(*job) for job in jobs]
    joint = [job for job, t in zip(jobs, together, strict=True) if t]
    packed = iter(_packed(joint))
    outputs = iter(_zeros(joint))
    results = []
    for (contraction, pattern, values, dense), t in zip(jobs, together, strict=True):
        if t:
            step, out = contraction.leaf, next(outputs)
            tables = step.tables(contraction.pull([values], dense)[1])
            rows = step.executable.run(step.arrays, next(packed), tables, out, accumulate=out is not None)
            results.append(step.of_rows(rows))
        else:
            results.append(_alone(contraction, pattern, values, dense))
    return results


def _alone(made: Contraction, pattern: Pattern, values: Tensor | None, dense: list[Tensor]) -> Tensor:
    """Return the result of one job. Values packed by an earlier call are reused, except within a CUDA graph."""
    again = values is None or captured(values) or followed([values, *dense])
    packed = None if again else made.packed([values])  # type: ignore[list-item]
    return made.result([pattern], [values], dense, packed)


def _zeros(jobs: Sequence[Job]) -> list[Tensor | None]:
    """Zeros for each job whose kernel only adds to them."""
    runs = [(contraction.leaf.executable, contraction.device) for contraction, *_ in jobs]
    outputs = [run.empty(device) if run.zeroes and not run.stores else None for run, device in runs]
    if added := [out for out in outputs if out is not None]:  # torch refuses no tensors
        torch._foreach_zero_(added)
    return outputs


def _packed(jobs: Sequence[Job]) -> list[Values]:
    """Pack the values of all jobs; with one gather if they are few and of one operand."""
    steps = [(contraction.leaf, job_values) for contraction, _, job_values, _ in jobs]
    with_values = [(step, job_values) for step, job_values in steps if job_values is not None]
    gathered = [part.packed for step, _ in with_values for part in step.parts if not part.packed.in_order]
    values = with_values[0][1] if with_values else None
    together = all(job_values is values and step.dtype == job_values.dtype for step, job_values in with_values)
    if values is None or len(gathered) < 2 or not together or values.numel() > MOST_TOGETHER:
        return [
            step.packed_values(job_values)
            if job_values is None or captured(job_values)
            else step.kept_values(job_values)
            for step, job_values in steps
        ]
    cache = next(pattern.cache for _, pattern, job_values, _ in jobs if job_values is not None)
    key = ("together", *(step.number for step, _ in with_values))
    places, sizes, behind_zero = cache.once(key, lambda: _places(gathered))
    whole = resolved(values.detach() if values.requires_grad else values)
    pieces = iter((after_zero(whole) if behind_zero else whole).index_select(0, places).split_with_sizes(sizes))

    def packed(step: Step) -> Values:
        return [part.packed.pack_values(whole) if part.packed.in_order else next(pieces) for part in step.parts]

    return [step.packed_values(None) if job_values is None else packed(step) for step, job_values in steps]


@lasting()
def _places(storages: Sequence[Packed]) -> tuple[Tensor, list[int], bool]:
    """Return where values of several storages lie among an operand's values, and how many each storage has.

    Places count from a zero that is put before the values, where some storage is padded with it.
    """
    zero = any(p.padded for p in storages)
    moved = [p.gathered + 1 if zero and not p.padded else p.gathered for p in storages]
    # Each storage begins where kernels may expect it, at a multiple of 16 bytes.
    aligned = [torch.nn.functional.pad(p, (0, -p.numel() % 16)).int() for p in moved]
    return torch.cat(aligned), [p.numel() for p in aligned], zero
