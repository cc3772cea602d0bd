"""Gradients of einsums, in every form that torch asks for them: backward, forward mode, `torch.func`.

In: a function that is linear in each of its tensors, and says what einsum its gradient is and how it takes a batch.
Out: its result, differentiable. A gradient is a function of the same kind, so gradients of gradients follow.

`StepFunction` is a step of one sparse operand as such a function: its gradients and batches are einsums with the same
sparse pattern. The gradient of a dense operand is a dense result (``"ijk,ir,kr->jr"``), that of the values a sampled
one (``"ijk,jr,kr,ir->ijk"``); both reuse what is packed for the pattern. A sparse output's gradient has a row a slot;
it joins as a dense operand over one more mode of the sparse operand, the slot, so that there is no second sparse one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sparsetc.codegen.launch import Values
from sparsetc.contraction.operands import Tensors, repeated_dims, resolved
from sparsetc.errors import TransformError
from sparsetc.ir.equation.einsum import Einsum
from sparsetc.ir.equation.rewrite import UPSTREAM, gradient
from sparsetc.packing.base import Packed, after_zero
from sparsetc.support import outside
from sparsetc.support.entry import entry_point, without_autocast
from sparsetc.tensor.coords import picked
from sparsetc.tensor.kept_values import gradient_taken
from sparsetc.tensor.pattern import Pattern, followed, lasting, transforming
from sparsetc.tensor.sparse_tensor import SparseTensor
from sparsetc.tensor.sums import captured

if TYPE_CHECKING:
    from sparsetc.contraction.contraction import Contraction
    from sparsetc.contraction.step import Step


class Multilinear(Protocol):
    """A compiled function of tensors, linear in each of them."""

    def rows(self, tensors: Tensors) -> Tensor:
        """The result, outside autograd."""

    def of_any(self) -> Multilinear:
        """The function with nothing prepared for the tensors that it is first called with."""
        return self

    def gradients(self, wanted: Sequence[bool], tensors: Tensors, upstream: Tensor) -> list[Tensor | None]:
        """The gradient for each tensor where it is wanted, given the result's; differentiable.

        What a tensor holds is not read for its own gradient.
        """

    def batched(self, tensors: Tensors, dims: Sequence[int | None], size: int) -> tuple[Tensor, int]:
        """Compute a differentiable batch of results, given the batch dimension of each tensor; return it with its own.

        Where no other rule is known, they are made one after the other.
        """
        return one_by_one(lambda *own: apply(self.of_any(), own), tensors, dims, size)


UNREAD: Values = ()
"""In place of packed values: no kernel runs, since the result's graph is wanted and not the result."""


def apply(function: Multilinear, tensors: Tensors) -> Tensor:
    """Compute the result, and record a graph if a tensor requires a gradient."""
    if not followed(tensors):
        return function.rows(tensors)
    kind = _Transformed if transforming() else _Rows
    result: Tensor = kind.apply(function, *map(recordable, tensors))
    return result


FOLLOWED = ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView")


@contextmanager
def following() -> Iterator[None]:
    """Enable autograd in this block, also inside operators of a library, where it is off."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in FOLLOWED:
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded), torch.enable_grad():
        yield


def recordable(tensor: Tensor) -> Tensor:
    """A tensor that autograd can save: itself, or a copy where it was made under ``torch.inference_mode``."""
    return tensor.clone() if tensor.is_inference() and not torch.is_inference_mode_enabled() else tensor


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Multilinear, *tensors: Tensor) -> Tensor:
        _remember(ctx, function, tensors)
        return function.rows(tensors)

    @staticmethod
    @entry_point
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        wanted, tensors = ctx.needs_input_grad[1:], ctx.saved_tensors

        def gradients(upstream: Tensor) -> list[Tensor]:
            return [g for g in ctx.function.gradients(wanted, tensors, upstream) if g is not None]

        with without_autocast(upstream.device):
            gradients_wanted = iter(in_batches(gradients, upstream))
        return None, *(next(gradients_wanted) if w else None for w in wanted)

    @staticmethod
    @entry_point
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> Tensor:
        tensors = [forward_ad.unpack_dual(t).primal for t in ctx.saved_tensors]

        def tangent(*given: Tensor) -> list[Tensor]:
            by_number = zip((n for n, t in enumerate(tangents) if t is not None), given, strict=True)
            return [reduce(add, (apply(ctx.function, [*tensors[:n], t, *tensors[n + 1 :]]) for n, t in by_number))]

        # Torch turns forward mode off here, and with it the tangents of levels further out.
        with forward_ad._set_fwd_grad_enabled(True):
            (tangent_of_result,) = in_batches(tangent, *(t for t in tangents if t is not None))
        return tangent_of_result


class _Transformed(_Rows):
    """The autograd function under `torch.func`; outside of transforms its calls would take three times as long."""

    @staticmethod
    def forward(function: Multilinear, *tensors: Tensor) -> Tensor:  # type: ignore[override]
        return function.rows(tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _remember(ctx, inputs[0], inputs[1:])

    @staticmethod
    @entry_point
    def vmap(info: Any, dims: tuple[Any, ...], function: Multilinear, *tensors: Tensor) -> tuple[Tensor, int]:
        return function.batched(tensors, dims[1:], info.batch_size)


def _remember(ctx: Any, function: Multilinear, tensors: Tensors) -> None:
    ctx.function = function.of_any()
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)


def carry_derivatives(operands: Sequence[Any]) -> bool:
    """Return True if an operand requires a gradient or has a tangent."""
    tensors = [t for t in operands if isinstance(t, Tensor)]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return True
    return forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)


LEVELS = 64
"""Batches within batches that torch has at most."""


def in_batches(function: Callable[..., list[Tensor]], *given: Tensor) -> list[Tensor]:
    """The function's results, of tensors that may be batches as autograd itself makes them (``is_grads_batched``).

    Those are of an older kind than the batches of `torch.func`, which all rules here are for.
    """
    batch = torch._C._functorch.is_legacy_batchedtensor
    if not any(map(batch, given)):
        return function(*given)

    def bare(t: Tensor, level: int) -> Tensor:
        return torch._remove_batch_dim(t, level, 1, 0) if batch(t) else t  # type: ignore[attr-defined, no-any-return]

    for level in range(1, LEVELS + 1):
        plain = [bare(t, level) for t in given]
        if not any(map(batch, plain)):
            break
    else:
        raise TransformError(
            "batches of gradients (is_grads_batched, vectorize) within others cannot look into a sparsetc kernel; take "
            "torch.func.jacrev or torch.func.vmap, which can"
        )
    dims = tuple(0 if batch(t) else None for t in given)
    results: list[Tensor] = torch.func.vmap(function, in_dims=dims)(*plain)
    # Of a batch that lies together, as forward mode asks for.
    return [torch._add_batch_dim(t.contiguous(), 0, level) for t in results]  # type: ignore[attr-defined]


def one_by_one(
    call: Callable[..., Tensor], arguments: Sequence[Any], dims: Sequence[Any], size: int
) -> tuple[Tensor, int]:
    """The results of a batch, a call each."""
    each = [[one_of_batch(n, *args) for args in zip(arguments, dims, strict=True)] for n in range(size or 1)]
    return torch.stack([call(*args) for args in each])[:size], 0


def one_of_batch(n: int, argument: Any, dim: Any) -> Any:
    """Return an argument for one call of a batch: one slice along the batch dimension; zeros of an empty batch.

    Tensors in a list have a dimension each; what has none is the same in all calls.
    """
    if isinstance(argument, list):
        return [one_of_batch(n, *member) for member in zip(argument, dim, strict=True)]
    if dim is None:
        return argument
    return argument.select(dim, n) if argument.shape[dim] else argument.sum(dim, dtype=argument.dtype)


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
            from sparsetc.contraction.contraction import compiled

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
