"""A contraction of two sparse operands: its pattern, fixed once, and its values, computed often and differentiable.

In: a `Bound` einsum and two operands. Out: `Pair`. The gradient of either operand is a sum over the same tasks with the
result in that operand's place, so gradients of gradients follow; they take the scalar path, whatever path the values
took.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparsetc.contraction.autograd import Multilinear, apply
from sparsetc.contraction.guard import finite
from sparsetc.contraction.request import Patterns, Request, Tensors, known_result
from sparsetc.errors import PlanError
from sparsetc.explain import PairReport, StepReport, in_microseconds
from sparsetc.ir.nest.values import EXACT, INFINITE
from sparsetc.ir.plan import Plan, requested
from sparsetc.join.join import Join, Roles, prepared
from sparsetc.join.order import pattern_of
from sparsetc.planner.candidate import Choice, ranked
from sparsetc.planner.registry import chosen
from sparsetc.products import WAYS
from sparsetc.products.hybrid import HybridPath
from sparsetc.products.problem import JoinProblem, paired
from sparsetc.products.scalar import EINSUMS, TaskSums
from sparsetc.support import cached_property
from sparsetc.support.entry import without_autocast
from sparsetc.tensor.coords import picked
from sparsetc.tensor.dtypes import fitted, in_order, resolved, summed_dtype
from sparsetc.tensor.pattern import Pattern
from sparsetc.tensor.sparse_tensor import SparseTensor


class Pair:
    """A contraction of two sparse operands and nothing else.

    Attributes:
        nnz: entries of the result.
        summed: the dtype that operands are converted to, and the result before the last conversion.
    """

    def __init__(self, request: Request) -> None:
        """Join the operands and choose a method; `find_pattern` is to follow, once the choice is final.

        Args:
            request: ``x,y->output`` without dense modes; letters may repeat, and may be absent from all else.

        Raises:
            PlanError: a plan that is not known here, or does not apply.
            OutOfMemoryError: the result, or what the named plan stores, would pass the memory limit.
        """
        bound, settings = request.bound, request.settings
        self.bound, self.settings = bound, settings
        self.dtype, self.device = request.like.dtype, request.like.device
        self.result_dtype = self.dtype
        self.sparse = request.is_sparse(expanded=True)
        self.summed = summed_dtype(self.dtype)
        e = bound.einsum
        sizes = bound.by_index
        self.equation = str(bound.einsum)
        patterns = [x.pattern for x in request.sparse]
        # Results come row by row of the first operand, so it had better be the one that the output begins with.
        swapped = bool(e.output) and e.output[0] not in e.inputs[0]
        both = list(zip(e.inputs, patterns, strict=True))
        (x_letters, x), (y_letters, y) = reversed(both) if swapped else both
        roles = Roles.of(x_letters, y_letters, e.output)
        self.join = Join.of(
            prepared(x_letters, x.coords, sizes, roles.x, x.is_coalesced),
            prepared(y_letters, y.coords, sizes, roles.y, y.is_coalesced),
            roles,
        )
        backend = settings.effective_backend(self.device, self.summed)
        self.backend = backend.name
        self.problem = JoinProblem(
            join=self.join,
            einsum=e,
            wanted=paired(requested(settings.plan).of_step(0, 1), e.indices),
            dtype=self.summed,
            backend=backend,
            settings=settings,
            device=self.device,
            swapped=swapped,
            limit=settings.memory_on(self.device),
            unmet=request.unmet,
        )
        self.problem.check_least()
        self.empty = not self.join.tasks
        self.take(chosen(self.problem.wanted, self.problem, WAYS))

    def find_pattern(self, patterns: Patterns) -> None:
        """Find the pattern of the result from those of the operands.

        Raises:
            OutOfMemoryError: the result would pass the memory limit.
        """
        with without_autocast(self.device):
            places = self.numeric.places()
        self.problem.check(places.numel())
        self.nnz = places.numel()
        self._pattern, self._order = pattern_of(self.join, places, self.bound.output_shape)
        if self.bound.einsum.output:
            self._pattern = known_result(self.bound, patterns, self._pattern)

    def take(self, choice: Choice) -> None:
        """Multiply by the method of a choice from here on; it is asked for `places` before any values."""
        make = WAYS[choice.plan.name]
        self.numeric = self.task_sums if make is TaskSums else make(self.problem, choice.plan)
        self.choice: Choice = choice

    @cached_property
    def task_sums(self) -> TaskSums:
        """The method `scalar` over the tasks of all nonzeros, for gradients and special values; made at first use."""
        return TaskSums(self.problem)

    @property
    def plan(self) -> Plan:
        """The plan that was chosen, with how much of both operands each part has."""
        sizes = self.numeric.sizes
        width = self.summed.itemsize
        parts = []
        read = [of_operand for n in range(0, len(sizes), 2) for of_operand in self.problem.given(sizes[n : n + 2])]
        for part, (nnz, nbytes) in zip(self.choice.plan.parts, read, strict=True):
            parts.append(replace(part, nnz=nnz, nbytes=nbytes + nnz * width))
        return replace(self.choice.plan, parts=tuple(parts))

    def pattern_on(self, patterns: Patterns) -> Pattern | None:
        """The pattern of a sparse result; None of a dense one."""
        return self._pattern if self.sparse else None

    def result(self, patterns: Patterns, values: Tensors, *_: Any) -> Tensor:
        """The result's values in lexicographic order of its coordinates, or a dense result; differentiable."""
        left, right = (v.to(self.summed) for v in values)
        x, y = (right, left) if self.problem.swapped else (left, right)
        m, deterministic = self.join, self.settings.deterministic
        result = apply(self.product_of("z"), (m.x.values(x, deterministic), m.y.values(y, deterministic)))
        result = picked(result, self._order)
        result = fitted(result.to(self.summed), self.dtype, f'the result of "{self.bound.einsum.text}"')
        if not self.bound.einsum.output:
            return result.sum(dtype=result.dtype)  # of one entry, or none
        return result if self.sparse else SparseTensor._make(self._pattern, result).to_dense(self.settings.memory_limit)

    def product_of(self, letter: str) -> Multilinear:
        """Return `product` as a function of two tensors: an einsum over tasks, as its gradients are in other roles."""
        return Multilinear(lambda tensors: self.product(letter, *tensors), partial(self._gradients, letter))

    def _gradients(
        self, letter: str, wanted: Sequence[bool], tensors: Tensors, upstream: Tensor
    ) -> list[Tensor | None]:
        """The gradient for each of both factors where it is wanted: the factor and the result change places."""
        factors = EINSUMS[letter]

        def gradient(n: int) -> Tensor:
            by_letter = {letter: upstream.contiguous(), factors[1 - n]: torch.conj_physical(tensors[1 - n])}
            return apply(self.product_of(factors[n]), [by_letter[c] for c in EINSUMS[factors[n]]])

        return [gradient(n) if w else None for n, w in enumerate(wanted)]

    def product(self, letter: str, left: Tensor, right: Tensor) -> Tensor:
        """Sum over tasks the product of two of x, y and the result, for the third: `letter` is p, q or z of these."""
        left, right = resolved(left), resolved(right)
        with without_autocast(self.device), in_order(self.settings.deterministic):
            if letter == "z":
                result = self._values(left, right) if self.join.tasks else left.new_zeros(0)
                if result is not None:
                    return result
            self.task_sums.tasks.nnz = self.nnz
            return self.task_sums.product(letter, left, right)

    def _values(self, x: Tensor, y: Tensor) -> Tensor | None:
        """Return the result's values by place, None where they are sums over tasks; waits for the device once.

        In halves, blocks are multiplied where those are as exact as float32; else as they are. Where a value is
        infinite or NaN, values are computed nonzero by nonzero: zeros of a block, or of an unfolded operand, are
        multiplied like any other value, and would carry it to entries that it has no part in. While a CUDA graph is
        captured nothing can be looked at.
        """
        path, takes_all = self.numeric, not (x.dtype.is_floating_point or x.dtype.is_complex)
        if takes_all or isinstance(path, TaskSums) or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            return path.run(x, y)
        halves = path.halves(x, y)
        if halves is not None:
            verdict = int(halves.verdict.item())
        else:
            verdict = EXACT if finite((x, y)) else INFINITE
        if verdict == INFINITE:
            return None
        return path.run(x, y, halves if verdict == EXACT else None)

    @property
    def generated(self) -> Sequence[Any]:
        """The generated programs that it runs."""
        return self.numeric.generated

    def ptx(self, target: str) -> str:
        """The assembly of the kernels of every plan but ``"dense"``."""
        if self.dtype.is_complex:
            raise PlanError("complex einsums run the generated torch programs, which have no PTX")
        return self.numeric.ptx(target)

    def reports(self) -> list[StepReport]:
        """Return the report of the contraction, for an explanation."""
        m, plan = self.join, self.plan
        candidates = ranked([c for method in WAYS.values() for c in method.estimates(self.problem)])
        terms = next((zip(c.terms, c.seconds, strict=False) for c in candidates if c.name == plan.name), ())
        split = HybridPath.split(self.problem) if plan.name == HybridPath.name else None
        filled = [nnz for nnz, _ in self.numeric.sizes[::2]]  # nonzeros of x, of each branch
        report = PairReport(
            equation=self.equation,
            plan=plan.name,
            reason=plan.reason,
            path=str(self.generated[0].path),
            considered=in_microseconds((c.name, c.total) for c in candidates),
            expected=tuple((name, 1e6 * seconds) for name, seconds in terms if seconds),
            roles=str(m.roles),
            tasks=m.tasks,
            pairs=self.problem.blocking.pairs.tasks,
            block=self.problem.blocking.extents,
            unfolded=m.sizes,
            nnz=self.nnz,
            nbytes=self.numeric.nbytes,
            timed=tuple((name, 1e6 * taken) for name, taken in self.choice.measured),
            threshold=split.threshold if split else 0,
            shares=tuple(zip(filled, (split.pairs, split.tasks), strict=True)) if split else (),
        )
        return [report]
