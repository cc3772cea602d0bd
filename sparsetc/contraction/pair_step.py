"""A contraction of two sparse operands: its pattern, fixed once, and its values, computed often and differentiable.

In: two patterns and the letters of operands and result. Out: `PairStep`, a function from the operands' values to the
result's. The gradient of either operand is a sum over the same tasks with the result in that operand's place, so
gradients of gradients follow; they take the scalar path, whatever path the values took.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from sparsetc.codegen.split_float16 import EXACT, INFINITE
from sparsetc.contraction.autograd import Multilinear, apply
from sparsetc.contraction.dense import Tensors, resolved
from sparsetc.contraction.guard import finite
from sparsetc.explain import PairReport, in_microseconds
from sparsetc.ir.plan import Plan, requested
from sparsetc.options import Options
from sparsetc.pair.hybrid import HYBRID, METHODS, choose, estimates
from sparsetc.pair.join import Join, Roles, prepared
from sparsetc.pair.problem import NumericPath, PairProblem, sides_of
from sparsetc.pair.scalar import EINSUMS, TaskSums, sums_of
from sparsetc.pair.symbolic import Budget, pattern_of
from sparsetc.planner.candidate import Choice, ranked
from sparsetc.runtime.executable import Listed
from sparsetc.support.precision import without_autocast
from sparsetc.tensor.sparse_tensor import SparseTensor
from sparsetc.tensor.sums import in_order


class PairStep(Listed):
    """``x,y->output``, compiled for two patterns."""

    def __init__(
        self,
        terms: tuple[Sequence[str], Sequence[str]],
        operands: tuple[SparseTensor, SparseTensor],
        output: Sequence[str],
        sizes: dict[str, int],
        settings: Options,
    ) -> None:
        """Join the operands, choose a path and find the pattern.

        Args:
            terms: the letters of each operand; they may repeat, and may be absent from all else.
            operands: their patterns; values are only looked at for their dtype.
            output: the result's letters.
            sizes: of all letters.
            settings: plan, precision, memory limit, backend, determinism.

        Raises:
            PlanError: a plan that is not known here, or does not apply.
            OutOfMemoryError: the result, or what the named plan stores, would pass the memory limit.
        """
        self.equation = f"{','.join(map(''.join, terms))}->{''.join(output)}"
        # Results come row by row of the first operand, so it had better be the one that the output begins with.
        swapped = bool(output) and output[0] not in terms[0]
        given = list(zip(terms, operands, strict=True))
        (x_letters, x), (y_letters, y) = reversed(given) if swapped else given
        self.dtype, self.device, self.settings = x.dtype, x.device, settings
        self.shape = tuple(sizes[c] for c in output)
        roles = Roles.of(x_letters, y_letters, output)
        self.join = Join.of(
            prepared(x_letters, x.coords, sizes, roles.x, x.is_coalesced),
            prepared(y_letters, y.coords, sizes, roles.y, y.is_coalesced),
            roles,
        )
        what, limit = f"the result of {self.equation}", settings.memory_on(self.device)
        budget = Budget(settings, self.device, len(self.shape), self.dtype.itemsize, what, limit)
        budget.check_least(self.join)
        self.backend = "torch" if self.dtype.is_complex else settings.effective_backend(self.device)
        wanted = requested(settings.plan)
        sides, types = sides_of(wanted, terms), (self.dtype, self.backend)
        self.problem = PairProblem(self.join, self.equation, wanted, sides, *types, budget, swapped)
        self.choice: Choice = choose(self.problem)
        self.numeric: NumericPath = METHODS[self.choice.plan.name].prepare(self.problem, self.choice.plan)
        self.inner = (self.numeric,)
        with without_autocast(self.device):
            places = self.numeric.places()
        budget.check(places.numel())
        self.coords, self._order = pattern_of(self.join, places)

    @property
    def sums(self) -> TaskSums:
        """Sums over the tasks of all nonzeros: what the scalar path and gradients take, made when first asked for."""
        return sums_of(self.problem)

    @property
    def plan(self) -> Plan:
        """The plan that was chosen, with how much of both operands each part has."""
        sizes, width, parts = self.numeric.sizes, self.dtype.itemsize, []
        read = [own for n in range(0, len(sizes), 2) for own in self.problem.given(sizes[n : n + 2])]
        for part, (nnz, nbytes) in zip(self.choice.plan.parts, read, strict=True):
            parts.append(replace(part, nnz=nnz, nbytes=nbytes + nnz * width))
        return replace(self.choice.plan, parts=tuple(parts))

    @property
    def nnz(self) -> int:
        """Entries of the result."""
        return self.coords.shape[1]

    def __call__(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """(nnz,) the result's values in lexicographic order, of the operands' values in their own; differentiable."""
        m = self.join
        x, y = (right, left) if self.problem.swapped else (left, right)
        deterministic = self.settings.deterministic
        x, y = m.x.values(x, deterministic), m.y.values(y, deterministic)
        by_place = apply(TaskProduct(self, "z"), (x, y))
        values = by_place if self._order is None else by_place.index_select(0, self._order)
        return values.to(self.dtype)

    def product(self, letter: str, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """The sum over tasks for p of x, q of y or z of the result, the `letter`, of the product of the other two."""
        left, right = resolved(left), resolved(right)
        with without_autocast(self.device), in_order(self.settings.deterministic):
            if letter == "z":
                return self._values(left, right) if self.join.tasks else left.new_zeros(0)
            return self._over_tasks(letter, left, right)

    def _over_tasks(self, letter: str, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        self.sums.tasks.nnz = self.nnz
        return self.sums.product(letter, left, right)

    def _values(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The result's values by place, by the first of three ways that takes such values; waits once to look at them.

        In halves, blocks are multiplied where those are as exact as float32; else as they are. Where a value is
        infinite or NaN, values are computed nonzero by nonzero: zeros of a block, or of an unfolded operand, are
        multiplied like any other value, and would carry it to entries that it has no part in. While a CUDA graph is
        captured nothing can be looked at.
        """
        takes_all = self.choice.plan.name == "scalar" or not (x.dtype.is_floating_point or x.dtype.is_complex)
        if takes_all or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            return self.numeric.run(x, y)
        halves = self.numeric.halves(x, y)
        if halves is None:
            verdict = EXACT if finite((x, y)) else INFINITE
        else:
            verdict = int(halves.verdict.item())
        if verdict == INFINITE:
            return self._over_tasks("z", x, y)
        return self.numeric.run(x, y, halves if verdict == EXACT else None)

    def report(self) -> PairReport:
        """What an explanation says of the contraction."""
        m, sizes, plan = self.join, self.join.sizes, self.plan
        split = HYBRID.split(self.problem) if plan.name == HYBRID.name else None
        filled = [nnz for nnz, _ in self.numeric.sizes[::2]]  # nonzeros of x, of each branch
        return PairReport(
            equation=self.equation,
            plan=plan.name,
            reason=plan.reason,
            path=str(self.path),
            considered=in_microseconds((e.name, e.total) for e in ranked(estimates(self.problem, every=True))),
            roles=str(m.roles),
            tasks=m.tasks,
            pairs=self.problem.blocking.pairs.tasks,
            block=self.problem.blocking.extents,
            unfolded=(sizes.batch, sizes.free_x, sizes.contracted, sizes.free_y),
            nnz=self.nnz,
            nbytes=self.numeric.nbytes,
            threshold=split.threshold if split else 0,
            shares=tuple(zip(filled, (split.blocks.pairs, split.tasks), strict=True)) if split else (),
        )


@dataclass(frozen=True)
class TaskProduct(Multilinear):
    """`PairStep.product` as a function of two tensors: an einsum over tasks, as its gradients are in other roles."""

    step: PairStep
    letter: str

    def rows(self, tensors: Tensors) -> torch.Tensor:
        """The sums over tasks, (entries,) of the tensor that is summed for."""
        return self.step.product(self.letter, *tensors)

    def gradients(self, wanted: Sequence[bool], tensors: Tensors, upstream: torch.Tensor) -> list[torch.Tensor | None]:
        """The gradient for each of both factors where it is wanted."""
        return [self.gradient(n, tensors, upstream) if w else None for n, w in enumerate(wanted)]

    def gradient(self, n: int, tensors: Tensors, upstream: torch.Tensor) -> torch.Tensor:
        """The einsum in which the operand and the result change places."""
        factors = EINSUMS[self.letter]
        given = {self.letter: upstream.contiguous(), factors[1 - n]: torch.conj_physical(tensors[1 - n])}
        left, right = EINSUMS[factors[n]]
        return apply(TaskProduct(self.step, factors[n]), (given[left], given[right]))
