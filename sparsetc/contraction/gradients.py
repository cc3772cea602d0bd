"""Gradients and batches of a step of one sparse operand: each is again an einsum with the same sparse pattern.

In: a step, values, dense operands. Out: `At`, the step as a function that autograd can follow. The gradient of a dense
operand is a dense result (``"ijk,ir,kr->jr"``), that of the values a sampled one (``"ijk,jr,kr,ir->ijk"``); both reuse
what is packed for the pattern. A sparse output's gradient has a row a slot; it joins as a dense operand over one more
mode of the sparse operand, the slot, so that no second sparse operand is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sparsetc.codegen.launch import Values
from sparsetc.contraction.autograd import Multilinear, followed
from sparsetc.contraction.dense import Tensors, repeated_dims, resolved
from sparsetc.ir.equation.einsum import Einsum
from sparsetc.ir.equation.rewrite import UPSTREAM, gradient
from sparsetc.packing.base import Packed, after_zero
from sparsetc.tensor.pattern import Pattern, lasting
from sparsetc.tensor.sparse_tensor import SparseTensor

if TYPE_CHECKING:
    from sparsetc.contraction.step import Step


@dataclass(frozen=True)
class Rule:
    """How the gradient for one operand of a step's raw einsum is computed: by another einsum."""

    einsum: Einsum
    of_values: bool
    dense: tuple[int, ...]
    """Dense inputs of that einsum: dense operands of the step by number, or `UPSTREAM`."""
    source: torch.Tensor | None
    """Numbers of the operand's nonzeros that the gradient's values belong to; None for all, in order."""

    @classmethod
    def of(cls, step: Step, operand: int) -> Rule:
        """The rule of a step."""
        e = step.raw
        einsum, sources = gradient(e, operand)
        numbers = {p: n for n, p in enumerate(e.dense)} | {UPSTREAM: UPSTREAM}
        dense = tuple(numbers[s] for s in sources if s in numbers)
        source = step.slot_source if step.output.sparse else step.canonical.source
        return cls(einsum, operand in e.sparse, dense, source)


@dataclass(frozen=True)
class At(Multilinear):
    """A step as a function of tensors, for autograd: of values and dense operands, or of dense operands alone."""

    step: Step
    pattern: Pattern
    ones: bool
    """Whether values are 1 at each nonzero, and not among the tensors."""
    packed: Values | None = None
    given: Tensors | None = None
    """The operands of which the dense tensors were made, for the guard."""

    def _split(self, tensors: Tensors) -> tuple[torch.Tensor | None, Tensors]:
        return (None, tensors) if self.ones else (tensors[0], tensors[1:])

    def rows(self, tensors: Tensors) -> torch.Tensor:
        """The rows of the step's result, outside autograd."""
        values, dense = self._split(tensors)
        return self.step.rows(values, dense, self.packed, self.given)

    def of_any(self) -> At:
        """The function without packed values."""
        return At(self.step, self.pattern, self.ones)

    def batched(self, tensors: Tensors, dims: Sequence[int | None]) -> tuple[torch.Tensor, int]:
        """Batches of dense operands as one more letter of theirs; of values one after the other."""
        values, dense = self._split(tensors)
        if not self.ones and dims[0] is not None:
            return super().batched(tensors, dims)
        own = dims if self.ones else dims[1:]
        size = next(t.shape[d] for t, d in zip(dense, own, strict=True) if d is not None)
        moved = [t if d is None else t.movedim(d, 0) for t, d in zip(dense, own, strict=True)]
        step = self.step.batched(size, [d is not None for d in own])
        return step(self.pattern, values, moved), 1

    def gradients(self, wanted: Sequence[bool], tensors: Tensors, upstream: torch.Tensor) -> list[torch.Tensor | None]:
        """The gradient for each tensor where it is wanted: an einsum in which it and the result change places."""
        jobs = [self._job(n, tensors, upstream) if w else None for n, w in enumerate(wanted)]
        made = iter(run_all([job for job in jobs if job is not None]))
        return [None if job is None else self._finished(job, next(made)) for job in jobs]

    def _job(self, n: int, tensors: Tensors, upstream: torch.Tensor) -> Job:
        values, dense = self._split(tensors)
        step, e = self.step, self.step.raw
        operand = e.sparse[0] if n == 0 and not self.ones else e.dense[n if self.ones else n - 1]
        rule, output = step.rule(operand), step.output
        upstream = upstream if output.sparse else output.letters_apart(upstream)
        found = [upstream if d == UPSTREAM else dense[d] for d in rule.dense]
        own = None if rule.of_values else values
        if step.dtype.is_complex:
            found = [t if d == UPSTREAM else torch.conj_physical(t) for t, d in zip(found, rule.dense, strict=True)]
            own = None if own is None else torch.conj_physical(own)
        if own is not None and output.sparse and rule.source is not None:
            own = own.index_select(0, rule.source)
        pattern = step.slotted if output.sparse else self.pattern
        return Job(self._step_of(operand, rule, pattern, found), rule, pattern, own, found)

    def _finished(self, job: Job, rows: torch.Tensor) -> torch.Tensor:
        if not job.rule.of_values:
            return job.step.output.shaped(rows)
        if job.rule.source is None:
            return rows
        # Nonzeros off the diagonal of a repeated letter take no part; uncoalesced ones, and slots, were sorted.
        return rows.new_zeros(self.step.nnz).index_copy(0, job.rule.source, rows)

    def _step_of(self, operand: int, rule: Rule, pattern: Pattern, dense: Tensors) -> Step:
        """The gradient's step, kept with the pattern that it is of."""
        key = ("gradient", self.step.number, operand, *map(repeated_dims, dense))
        found = pattern.cache.get(key)
        if found is None:
            from sparsetc.contraction.contraction import compiled

            x = SparseTensor._make(
                pattern, torch.zeros((), dtype=self.step.dtype, device=pattern.device).expand(pattern.nnz)
            )
            given, e = iter(dense), rule.einsum
            operands = [x if p in e.sparse else next(given) for p in range(len(e.inputs))]
            form = "sparse" if rule.of_values else "dense"
            (made,) = compiled(str(e), operands, self.step.derived, form).steps
            found = pattern.cache.put(key, made)
        return found  # type: ignore[no-any-return]


# -- several at once --------------------------------------------------------------------------------------------------

MOST_TOGETHER = 1 << 22
"""Nonzeros up to which values are packed for several steps at once, which takes 4 bytes each. Not measured: of 3.3 M
the host took three times as long as the kernels (H200, `benchmarks/results/calls.json`)."""


@dataclass(frozen=True)
class Job:
    """A gradient to be computed: a step, and what it is called with."""

    step: Step
    rule: Rule
    pattern: Pattern
    values: torch.Tensor | None
    dense: list[torch.Tensor]


def run_all(jobs: Sequence[Job]) -> list[torch.Tensor]:
    """The rows of every job.

    What several kernels need beside themselves, packed values and zeros to add to, is made for all of them at once: a
    call of torch for each kernel would take more time than the kernels do.
    """
    together = [job.step.alone and not followed([job.values, *job.dense]) for job in jobs]
    if sum(together) < 2:
        return [job.step(job.pattern, job.values, job.dense) for job in jobs]
    own = [job for job, t in zip(jobs, together, strict=True) if t]
    packed, outputs = iter(_packed(own)), iter(_zeros(own))
    found = []
    for job, t in zip(jobs, together, strict=True):
        step = job.step
        if t:
            tables = step.canonical.arrange(job.dense, step.settings)
            out = next(outputs)
            found.append(step.executable.run(step.arrays, next(packed), tables, out, accumulate=out is not None))
        else:
            found.append(step(job.pattern, job.values, job.dense))
    return found


def _zeros(jobs: Sequence[Job]) -> list[torch.Tensor | None]:
    """Zeros for each job whose kernel only adds to them."""
    runs = [job.step.executable for job in jobs]
    device = jobs[0].pattern.device
    made = [
        torch.empty(run.shape, dtype=run.dtype, device=device) if run.zeroes and not run.stores else None
        for run in runs
    ]
    if added := [m for m in made if m is not None]:  # torch refuses no tensors
        torch._foreach_zero_(added)
    return made


def _packed(jobs: Sequence[Job]) -> list[Values]:
    """Packed values for each job, gathered by one call where they are those of one operand."""
    own = [job for job in jobs if job.values is not None]
    gathered = [part for job in own for part in job.step.parts if not part.packed.in_order]
    values = own[0].values if own else None
    if values is None or len(gathered) < 2 or not _shared(values, own):
        return [job.step.packed_values(job.values) for job in jobs]
    key, cache = ("together", *(job.step.number for job in own)), own[0].pattern.cache
    places = cache.once(key, lambda: Places.of([part.packed for part in gathered]))
    whole = resolved(values.detach() if values.requires_grad else values)
    found = iter(places.gather(whole))

    def packed(step: Step) -> Values:
        return [part.packed.pack_values(whole) if part.packed.in_order else next(found) for part in step.parts]

    return [job.step.packed_values(None) if job.values is None else packed(job.step) for job in jobs]


def _shared(values: torch.Tensor, jobs: Sequence[Job]) -> bool:
    """Whether these are the values of all jobs, as their steps store them, and few enough."""
    same = all(job.values is values and job.step.dtype == values.dtype for job in jobs)
    return same and values.numel() <= MOST_TOGETHER


@dataclass(frozen=True)
class Places:
    """Where the values of several storages stand among an operand's, one storage after the other."""

    at: torch.Tensor
    sizes: list[int]
    behind_zero: bool
    """Whether they count from a zero that is put before the values, since some storage is padded with it."""

    @classmethod
    @lasting()
    def of(cls, storages: Sequence[Packed]) -> Places:
        """The places of all storages."""
        zero = any(p.padded for p in storages)
        moved = [p.gathered + 1 if zero and not p.padded else p.gathered for p in storages]
        # Each storage begins where kernels may expect it, at a multiple of 16 bytes.
        aligned = [torch.nn.functional.pad(p, (0, -p.numel() % 16)).int() for p in moved]
        return cls(torch.cat(aligned), [p.numel() for p in aligned], zero)

    def gather(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The values of each storage."""
        return (after_zero(values) if self.behind_zero else values).index_select(0, self.at).split(self.sizes)
