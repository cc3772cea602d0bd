"""One contraction of two sparse operands: its pattern, fixed once, and its values, computed often and differentiable.

In: two patterns and the letters of operands and result. Out: `PairStep`, a function from the operands' values to the
result's. The gradient of either operand is a sum over the same tasks with the result in that operand's place, so
gradients of gradients follow; they take the scalar path, whatever path the values took.
"""

from __future__ import annotations

from cmath import isfinite
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from sparsetc.autograd import apply, one_by_one
from sparsetc.codegen.split_pairs import EXACT, INEXACT, INFINITE
from sparsetc.dense import resolved
from sparsetc.options import Options
from sparsetc.pair.block_path import BlockPath
from sparsetc.pair.choose import Choice, Question, choose
from sparsetc.pair.cut import Cut
from sparsetc.pair.dense import Unfolded
from sparsetc.pair.equation import Roles, prepared
from sparsetc.pair.hybrid import Half, HybridPath
from sparsetc.pair.meeting import Meeting
from sparsetc.pair.paths import DensePath, NumericPath, ScalarPath
from sparsetc.pair.plans import BcbPlan, PairPart, StepPlan
from sparsetc.pair.scalar import EINSUMS, LETTER, TaskSums
from sparsetc.pair.sums import kept_dtype
from sparsetc.pair.symbolic import Budget, Matching, Pattern, pattern_of
from sparsetc.pair.tasks import Tasks
from sparsetc.runtime.autocast import without_autocast
from sparsetc.runtime.segments import in_order
from sparsetc.tensor import SparseTensor


class Forms:
    """The operands as paths store them, each made when first asked for."""

    def __init__(self, meeting: Meeting, sides: dict[str, int] | None) -> None:
        self.meeting, self.sides = meeting, sides

    @cached_property
    def unfolded(self) -> Unfolded:
        """Their places, were they dense."""
        return Unfolded(self.meeting)

    @cached_property
    def cut(self) -> Cut:
        """Cut into blocks, with the sides that the plan names."""
        return Cut.of(self.meeting, self.sides)


class PairStep:
    """``x,y->output``, compiled for two patterns."""

    def __init__(
        self,
        terms: tuple[Sequence[str], Sequence[str]],
        operands: tuple[SparseTensor, SparseTensor],
        output: Sequence[str],
        sizes: dict[str, int],
        settings: Options,
    ) -> None:
        """Match, choose a path and find the pattern.

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
        self.swapped = bool(output) and output[0] not in terms[0]
        given = list(zip(terms, operands, strict=True))
        (x_letters, x), (y_letters, y) = reversed(given) if self.swapped else given
        self.dtype, self.device, self.settings = x.dtype, x.device, settings
        self.shape = tuple(sizes[c] for c in output)
        roles = Roles.of(x_letters, y_letters, output)
        self.meeting = Meeting.of(
            prepared(x_letters, x.coords, sizes, roles.x, x.is_coalesced),
            prepared(y_letters, y.coords, sizes, roles.y, y.is_coalesced),
            roles,
        )
        limit = settings.memory_on(self.device)
        what = f"the result of {self.equation}"
        self.budget = Budget(settings, self.device, len(self.shape), self.dtype.itemsize, what, limit)
        self.budget.check_least(self.meeting)
        self.backend = "torch" if self.dtype.is_complex else settings.effective_backend(self.device)
        plan = settings.plan
        forms = self.forms = Forms(self.meeting, plan.sides_of(terms) if isinstance(plan, BcbPlan) else None)
        self.question = Question(
            self.meeting, lambda: forms.cut, self.dtype, self.backend, settings, self.budget, self.swapped
        )
        self.choice: Choice = choose(self.question)
        self.path: NumericPath = self._path()
        with without_autocast(self.device):
            places = self.path.places()
        self.budget.check(places.numel())
        self.pattern: Pattern = pattern_of(self.meeting, places)

    @cached_property
    def sums(self) -> TaskSums:
        """Sums over the tasks of all nonzeros: what the scalar path and gradients take, made when first asked for."""
        return self._sums_of(self.meeting)

    @property
    def matching(self) -> Matching:
        """The tasks, in order."""
        return self.sums.tasks.matching

    @property
    def tasks(self) -> Tasks:
        """Their list."""
        return self.sums.tasks

    @property
    def unfolded(self) -> Unfolded:
        """The operands' places, were they dense."""
        return self.forms.unfolded

    @property
    def cut(self) -> Cut:
        """The operands cut into blocks."""
        return self.forms.cut

    def _path(self) -> NumericPath:
        precision = self.settings.effective_precision()
        if self.choice.name == "scalar":
            return ScalarPath(self.sums)
        if self.choice.name == "dense":
            # 16-bit values, held in float32, are exact in tf32.
            exact = self.dtype in (torch.float16, torch.bfloat16) and self.device.type == "cuda"
            precision = "high" if exact and precision == "highest" else precision
            return DensePath(self.unfolded, self.equation, self.budget, precision)
        if self.choice.split is not None:
            return self._hybrid(self.choice.split.threshold, precision)
        return self._block_path(self.cut, precision)

    def _block_path(self, cut: Cut, precision: str) -> BlockPath:
        return BlockPath(cut, self.equation, self.dtype, self.backend, precision, self.choice.bitmaps, self.budget)

    def _hybrid(self, threshold: int, precision: str) -> HybridPath:
        filled = self.question.populations.entries(threshold)
        blocks, rest = self.meeting.only(filled), self.meeting.only(~filled)
        return HybridPath(
            Half(blocks, self._block_path(Cut.of(blocks.part, self.forms.sides), precision)),
            Half(rest, ScalarPath(self._sums_of(rest.part))),
        )

    def _sums_of(self, meeting: Meeting) -> TaskSums:
        tasks = Tasks(Matching.of(meeting), self.budget)
        return TaskSums(tasks, self.equation, kept_dtype(self.dtype), self.backend, self.settings)

    @property
    def plan(self) -> StepPlan:
        """The path, and how it stores blocks, such that nothing is left to choose."""
        if self.choice.name in ("scalar", "dense"):
            return self.choice.name
        cut, storages = self.cut, tuple("bitmap" if b else "whole" for b in self.choice.bitmaps)
        x, y = reversed(storages) if self.swapped else storages
        letters = dict((*cut.rows, *cut.columns, *cut.inner))
        sides = tuple(sorted((c, side) for c, side in letters.items() if c not in self.meeting.roles.batch))
        return BcbPlan(sides, (x, y), self.choice.split.threshold if self.choice.split else None)

    @property
    def parts(self) -> tuple[PairPart, ...]:
        """Both operands as the path reads them, in the equation's order; of a hybrid, of its halves in turn."""
        return tuple(part for path, meeting in self._paths for part in self._stored(path, meeting))

    @property
    def _paths(self) -> list[tuple[NumericPath, Meeting]]:
        if isinstance(self.path, HybridPath):
            return [(half.path, half.share.part) for half in self.path.halves]
        return [(self.path, self.meeting)]

    def _stored(self, path: NumericPath, m: Meeting) -> list[PairPart]:
        width, found = self.dtype.itemsize, []
        for number, side in enumerate((m.x, m.y)):
            label = "".join(side.letters)
            if isinstance(path, BlockPath):
                own, storage = (path.cut.x, path.cut.y)[number], ("whole", "bitmap")[path.bitmaps[number]]
                nbytes = own.nbytes + own.nnz * width
                found.append(PairPart(own.format, label, own.nnz, nbytes, own.sides, storage))
                continue
            n = (m.x_key, m.y_key)[number].numel()
            stored = "coo" if isinstance(path, ScalarPath) else "strided"
            nbytes = n * width + (side.nbytes if stored == "coo" else 0)
            found.append(PairPart(stored, label, n, nbytes))
        return found[::-1] if self.swapped else found

    @property
    def nnz(self) -> int:
        """Entries of the result."""
        return self.pattern.nnz

    def __call__(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """(nnz,) the result's values in lexicographic order, of the operands' values in their own; differentiable."""
        m = self.meeting
        x, y = (right, left) if self.swapped else (left, right)
        deterministic = self.settings.deterministic
        x, y = m.x.values(x, deterministic), m.y.values(y, deterministic)
        by_place = apply(Product(self, "z"), (x, y))
        values = by_place if self.pattern.order is None else by_place.index_select(0, self.pattern.order)
        return values.to(self.dtype)

    def result(self, values: torch.Tensor) -> SparseTensor:
        """The values on their pattern; of a result with at least one mode."""
        return SparseTensor._of(self.pattern.coords, values, self.shape, True)

    def product(self, role: str, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """The sum over tasks for one of x, y and the result z, the `role`, of the product of the other two."""
        left, right = resolved(left), resolved(right)
        with without_autocast(self.device), in_order(self.settings.deterministic):
            if role == "z":
                return self._values(left, right) if self.meeting.tasks else left.new_zeros(0)
            return self._over_tasks(role, left, right)

    def _over_tasks(self, role: str, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        self.tasks.nnz = self.nnz
        return self.sums.product(role, left, right)

    def _values(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """By place, after the one wait of a call: for the verdict on the values.

        Where one is infinite or NaN, nonzero by nonzero: zeros of a block, or of an unfolded operand, are multiplied
        like any other value, and would carry it to entries that it has no part in. Where blocks in parts would be less
        exact than float32, by blocks as they are. While a CUDA graph is captured nothing can be looked at.
        """
        if self.path.name == "scalar" or (not x.dtype.is_floating_point and not x.dtype.is_complex):
            return self.path.run(x, y)
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return self.path.run(x, y)
        parts = self.path.parts(x, y)
        verdict = _verdict(x, y) if parts is None else int(parts.verdict.item())
        if verdict == INFINITE:
            return self._over_tasks("z", x, y)
        if verdict == INEXACT:
            parts = None
        return self.path.run(x, y, parts)

    def ptx(self, target: str) -> str:
        """The assembly of the kernel; PlanError where the step takes the dense path, which has none of its own."""
        return self.path.ptx(target)


def _verdict(x: torch.Tensor, y: torch.Tensor) -> int:
    """On values that are multiplied as they are; sums may overflow where none is infinite: right still, and slow."""
    return EXACT if isfinite((x.sum() + y.sum()).item()) else INFINITE


@dataclass(frozen=True)
class Product:
    """`PairStep.product` as a function of two tensors: an einsum over tasks, as its gradients are in other roles."""

    step: PairStep
    role: str

    def rows(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sums."""
        return self.step.product(self.role, *tensors)

    def of_any(self) -> Product:
        """Itself."""
        return self

    def gradient(self, n: int, tensors: Sequence[torch.Tensor], upstream: torch.Tensor) -> torch.Tensor:
        """The einsum in which the operand and the result change places."""
        factors, role = EINSUMS[self.role], self.role
        other = tensors[1 - n]
        given = {LETTER[role]: upstream.contiguous(), factors[1 - n]: _conjugate(other)}
        wanted = next(r for r, letter in LETTER.items() if letter == factors[n])
        left, right = EINSUMS[wanted]
        return apply(Product(self.step, wanted), (given[left], given[right]))

    def batched(self, tensors: Sequence[torch.Tensor], dims: Sequence[int | None]) -> tuple[torch.Tensor, int]:
        """The sums of a batch, one after the other."""
        return one_by_one(self, tensors, dims)


def _conjugate(t: torch.Tensor) -> torch.Tensor:
    return torch.conj_physical(t) if t.is_complex() else t
