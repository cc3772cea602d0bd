"""A contraction of one sparse operand with dense ones, compiled for a pattern; it holds no values.

In: a `Bound` einsum, the sparse operand's pattern, options. Out: `Step`, a contraction that is planned, packed and
generated once, then a differentiable function from values and dense operands to the result.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from math import prod
from string import ascii_letters
from typing import TYPE_CHECKING, Any

import torch

from sparsetc.codegen import split_float16
from sparsetc.codegen.launch import Values, stored_dtype
from sparsetc.codegen.numba import unprinted
from sparsetc.contraction.autograd import UNREAD, StepFunction, apply
from sparsetc.contraction.canonical import Operands, Patterns, Tensors, resolved, stand_ins
from sparsetc.contraction.contraction import Contraction
from sparsetc.contraction.guard import Guard, finite, fit_for_halves
from sparsetc.contraction.output import arranged
from sparsetc.contraction.prepare import Preparation, Prepared, in_place
from sparsetc.device.profile import gpu, has_halves
from sparsetc.errors import EquationError, PlanError
from sparsetc.explain import StepReport
from sparsetc.ir.equation.einsum import Bound, Einsum
from sparsetc.ir.plan import Plan, without_halves
from sparsetc.options import Options, with_settings
from sparsetc.planner.candidate import Choice
from sparsetc.planner.registry import choose, plan_of_derived
from sparsetc.support.entry import without_autocast
from sparsetc.support.lru import Lru, cached_property
from sparsetc.support.notices import warn_once
from sparsetc.tensor.kept_values import kept_with
from sparsetc.tensor.pattern import Pattern, followed, lasting, transforming
from sparsetc.tensor.sparse_tensor import SparseTensor
from sparsetc.tensor.sums import accumulator, captured, fitted, in_order, summed_dtype

if TYPE_CHECKING:
    from sparsetc.contraction.tuned import Turns
    from sparsetc.planner.symbolic import SymbolicCost


class Step(Contraction, Preparation):
    """A contraction of one sparse operand: ``x,b,c->output``, compiled for the pattern of x.

    Attributes:
        _empty: whether there is nothing to sum.
        turned: calls of all steps in which a candidate had its turn.
        turns: the candidates that take turns in calls; None once the plan is decided.
        _packed_alone: whether only packed values are read where they are given and nothing follows a call, so that the
            values of the entries that take part need not be gathered.
        _repacks: whether packed values are a copy; otherwise parts read values where they are given.
        alone: whether a call is a launch and nothing else, so that calls may share what they need beside it.
    """

    turned = 0

    def __init__(
        self,
        bound: Bound,
        operands: Operands,
        settings: Options,
        form: str,
        repeated: bool = False,
        plain_sum: bool | None = None,
        choice: Choice | None = None,
    ) -> None:
        """Plan, pack and generate.

        Args:
            bound: the einsum.
            operands: its operands; values are only looked at for their dtype.
            settings: plan, precision, memory limit, backend, determinism.
            form: of the output, ``auto``, ``dense`` or ``sparse``.
            repeated: as `canonicalise` takes it, for the operands of one call; their pattern may be one of many.
            plain_sum: whether the result is a sum of one operand, which torch gives integers of 64 bits; None for what
                the einsum says.
            choice: of the plan, where it was chosen together with those of other einsums.
        """
        Contraction.__init__(self, bound, operands, settings, form)
        (self._sizes,) = (tuple(o._values.shape[1:]) for o in operands if isinstance(o, SparseTensor))
        Preparation.__init__(self, bound, operands, settings, form, repeated)
        self._plain_sum = self.canonical.written.einsum.plain_sum if plain_sum is None else plain_sum
        self.result_dtype = summed_dtype(self.dtype) if self._plain_sum else self.dtype
        self.empty, self._others = not self.operand.nnz, dict[object, Step]()
        self.turns: Turns | None = None
        with in_place(settings, self.device):
            recurs = repeated and settings.effective_tune()[0] == "model"
            self.take(choice or choose(settings.plan, self.problem, recurs))
        rows = self.executable.shape if self.output.permutation is None else (prod(self.executable.shape),)
        self.shape = rows if self.sparse else self.canonical.narrow.output_shape
        if self.backend == "torch" and settings.effective_backend(self.device) == "torch":
            warn_once("no GPU: running the generated torch programs on the CPU")

    def take(self, choice: Choice, ready: Step | None = None) -> None:
        """Pack and generate by a choice, or as a step does that was made by it, and run so from here on."""
        self.prepared: Prepared = self.prepare(choice.plan) if ready is None else ready.prepared
        plan, self.filled, self.parts, self.executable, self.arrays = self.prepared
        self.plan = replace(plan, reason=choice.plan.reason)
        self.choice, self.inner = choice, (self.executable.programs,)
        native = self.executable.programs.backend == "numba"
        self.backend = "numba" if native else self.problem.backend
        if self.problem.native == "all" and not native:
            why = next(filter(None, map(unprinted, self.programs)), "numba cannot be imported")
            self.plan = replace(self.plan, reason=f"{self.plan.reason}; as torch programs: {why}")
        self.__dict__.pop("_ones", None)
        self._value_keys = [
            (p.packed.token, stored_dtype(p.program, self.dtype, self.problem.backend), p.program.view.values.halves)
            for p in self.parts
        ]
        self.guard = self._guard()
        whole = self.canonical.narrow is self.canonical.written
        self._packed_alone = self.entries is not None and whole and self.guard is None
        as_given = {key[1:] for key in self._value_keys} == {(self.dtype, False)}
        self._repacks = self.entries is not None or not (as_given and all(p.packed.in_order for p in self.parts))
        sizes = (self.operand.nnz, *self.executable.shape, *(n for _, n in self.canonical.bound.sizes))
        self._empty = 0 in sizes
        self.alone = (
            self.backend == "triton"
            and not (self._empty or self.guard or self.arrays.second)
            and (whole and not self.canonical.reduction.steps)
            and {self.executable.dtype, *(t for _, t, _ in self._value_keys)} == {self.result_dtype}
        )

    def under(self, plan: Plan, cache: Lru[Any, Any]) -> Step:
        """The step by another plan; what is packed for it is kept in a cache of its own."""
        other, counts = copy(self), self.problem.counts
        other.problem = replace(self.problem, counts=counts.cached_in(cache))
        other._others, other.turns = {}, None
        other.take(Choice(plan))
        return other

    @property
    def operands_of_timing(self) -> tuple[torch.dtype, list[tuple[int, ...]]]:
        """The dtype and the shapes of values and dense operands as `ready` takes them."""
        return self.dtype, [(self.operand.nnz,), *self.canonical.bound.dense_shapes]

    def ready(self, operands: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
        """A call of nothing but what runs, on these operands."""
        values, *dense = operands
        return partial(self.rows, values, dense, self.packed_values(values), dense)

    @property
    def settled(self) -> bool:
        """Whether the plan is decided; False while candidates take turns in calls."""
        return self.turns is None

    @cached_property
    def _arranged(self) -> tuple[Pattern | None, torch.Tensor | None]:
        with lasting():
            return arranged(self.output)

    def pattern_on(self, patterns: Patterns) -> Pattern | None:
        """The operand's own pattern where all of its modes are kept."""
        return self._lowered(patterns[0]) if self.output.own else self._arranged[0]

    @cached_property
    def derived(self) -> Options:
        """The settings of gradients and batches."""
        return with_settings(self.settings, {"plan": plan_of_derived(self.settings.plan)})

    def _guard(self) -> Guard | None:
        """What says which operands the step takes; None where it takes all.

        Parts that multiply positions which hold no nonzero take no infinities. Parts in halves of 16 bits take values,
        which come first where there are any, and dense operands that halves are exact enough for. What they do not take
        is run by nonzeros alone, or by the same plan in dots of float32.
        """
        operands, plan = range(len(self.programs[0].operands)), without_halves(self.plan)
        split = [any(p.operands[n].split or p.operands[n].halves for p in self.programs) for n in operands]
        if not any([*split, *(halves for *_, halves in self._value_keys)]):
            floats = self.dtype.is_floating_point or self.dtype.is_complex
            reads_zeros = floats and any(p.reads_zeros for p in self.parts)
            return Guard(finite, "coo", plan="coo") if reads_zeros else None
        return Guard(lambda read: fit_for_halves(read, [True] * (len(read) - len(split)) + split), "floats", plan=plan)

    # -- values -----------------------------------------------------------------------------------------------------
    def packed(self, values: Tensors) -> Values | None:
        """Return the values as the parts store them; packed before, where they have not changed.

        None while a transform of `torch.func` is active, which would follow them.
        """
        if transforming() or self.turns is not None:
            return None
        return self.kept_values(values[0], self.taking_part)

    def kept_values(
        self, values: torch.Tensor, flat: Callable[[torch.Tensor], torch.Tensor] = lambda values: values
    ) -> Values:
        """Return values as the parts store them, packed once for each change; `flat` gives those that take part."""
        if not self._repacks:
            return [resolved(flat(values).detach()).contiguous()] * len(self.parts)
        kept = kept_with(values)
        if kept is None:
            return self.packed_values(flat(values))
        packed = [kept.get(key) for key in self._value_keys]
        if missing := [n for n, stored in enumerate(packed) if stored is None]:
            if captured(values):
                return self.packed_values(flat(values))
            for n, stored in zip(missing, self.packed_values(flat(values), missing), strict=True):
                packed[n] = kept.put(self._value_keys[n], stored)
        return packed

    def packed_values(self, values: torch.Tensor | None, parts: Sequence[int] | None = None) -> Values:
        """(nnz,) values as the parts store them, or as some of them do, by number; 1 at each nonzero of None."""
        if values is None:
            return self._ones
        numbers = range(len(self.parts)) if parts is None else parts
        flat = resolved(values.detach() if values.requires_grad else values)
        flat = flat.to(accumulator(self.dtype) if self.problem.backend == "torch" else self.dtype)
        stored: list[torch.Tensor | split_float16.InHalves | None] = []
        with without_autocast(flat.device):
            if any(self._value_keys[n][2] for n in numbers):
                most = split_float16.largest(flat)
            for n in numbers:
                (_, dtype, in_halves), pack = self._value_keys[n], self.parts[n].packed.pack_values
                packed = pack(flat)
                stored.append(split_float16.split_whole(packed, most) if in_halves else packed.to(dtype))
        return stored

    @cached_property
    def _ones(self) -> Values:
        """The values of the pattern itself: 1 at each nonzero."""
        with lasting():
            return self.packed_values(torch.ones(self.operand.nnz, dtype=self.dtype, device=self.device))

    # -- calls ------------------------------------------------------------------------------------------------------
    def result(self, patterns: Patterns, values: Tensors, dense: Tensors, packed: Values | None = None) -> torch.Tensor:
        """A dense result, or (rows, *dense sizes) values; differentiable. Without values, of 1 at each nonzero."""
        pattern, flat = self._lowered(patterns[0]), values[0] if values else None
        alone = packed and self._packed_alone and not followed([flat, *self.canonical.settled(dense)])
        if not (flat is None or alone):
            flat = self.taking_part(flat)
        return self.of_rows(self(pattern, flat, dense, packed))

    def of_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """A dense result, or a sparse one's values, of (rows, *dense sizes)."""
        if not self.sparse:
            return self.output.shaped(rows)
        order = self._arranged[1]
        return rows if order is None else rows.reshape(-1).index_select(0, order)

    def _lowered(self, pattern: Pattern) -> Pattern:
        """The pattern that was packed, of the operand's: with coordinates of all letters, once each."""
        e = self.bound.einsum
        return pattern.expanded(self._sizes).distinct(e.inputs[e.sparse[0]])[0]

    def __call__(
        self, pattern: Pattern, values: torch.Tensor | None, dense: Tensors, packed: Values | None = None
    ) -> torch.Tensor:
        """(rows, *dense sizes) of values and dense operands; differentiable.

        Args:
            pattern: that the step was compiled for; what is compiled for gradients is kept with it.
            values: (nnz,) of the sparse operand; None for 1 at each nonzero.
            dense: the dense operands, as the einsum was written.
            packed: the values as `pack` makes them, where the caller has them.
        """
        operands = self.canonical.settled(dense)
        sliced = self.canonical.slices(operands)
        if sliced is None:  # in full, along a dimension that was broadcast when this was compiled
            full = self.instead("full", self.canonical.written, {})
            return full(pattern, values, operands, UNREAD if packed is UNREAD else None)
        reduced = self.canonical.reduced(sliced, self.settings)
        if not followed(reduced if values is None else [values, *reduced]):
            return self.rows(values, reduced, packed, sliced)
        # Expanded outside, so that autograd itself sums the gradient of an operand that was broadcast.
        shapes = self.canonical.bound.dense_shapes
        expanded = [d if d.shape == s else d.expand(s) for d, s in zip(reduced, shapes, strict=True)]
        at = StepFunction(self, pattern, values is None, packed, sliced)
        return apply(at, expanded if values is None else [values, *expanded])

    def rows(
        self, values: torch.Tensor | None, dense: Tensors, packed: Values | None = None, given: Tensors | None = None
    ) -> torch.Tensor:
        """The result as (rows, *dense sizes), of the dense operands of the reduced einsum, outside autograd.

        Args:
            values: (nnz,) of the sparse operand; None for 1 at each nonzero.
            dense: the dense operands.
            packed: the values as `pack` makes them, where the caller has them.
            given: what the dense operands were made of, of which the guard knows its verdict while they stay the same.
        """
        device, ordered = self.device, self.settings.deterministic and self.problem.backend == "torch"
        if not ordered and not torch.is_autocast_enabled(device.type):
            return self._rows(values, dense, packed, given)
        with without_autocast(device), in_order(ordered):
            return self._rows(values, dense, packed, given)

    def _rows(
        self, values: torch.Tensor | None, dense: Tensors, packed: Values | None, given: Tensors | None
    ) -> torch.Tensor:
        if self.turns is not None and not captured(self._like):
            return self.turns.rows(values, dense, given)
        run = self.executable
        if self._empty:
            return torch.zeros(run.shape, dtype=self.result_dtype, device=self.device)
        program = self.programs[0]
        tables = self.canonical.arrange(dense, self.settings, not program.covers, program.operands)
        if self.problem.backend == "torch" and run.dtype != self.dtype:
            tables = [t.to(run.dtype) for t in tables]
        if self.guard is not None:
            looked = [values] if values is not None and self.guard.instead == "floats" else []  # 1s are exact
            if not self.guard.admits([*looked, *(given or dense)], [*looked, *tables]):
                return self.instead(self.guard.instead, self.canonical.bound, self.guard.changes).rows(values, dense)
        result = run.run(self.arrays, self.packed_values(values) if packed is None else packed, tables)
        if result.dtype == self.result_dtype:
            return result
        return fitted(result, self.result_dtype, f'the result of "{self.equation}"')

    def instead(self, why: Hashable, bound: Bound, changes: dict[str, object]) -> Step:
        """The step to take in place of this one; made when first asked for.

        Args:
            why: what it is known by.
            bound: its einsum, of the same sparse operand.
            changes: the settings that differ.
        """
        other = self._others.get(why)
        if other is None:
            with lasting():
                operands, settings = stand_ins(bound, [self.operand]), with_settings(self.settings, changes)
                other = Step(bound, operands, settings, self.form, plain_sum=self._plain_sum)
            self._others[why] = other
        return other

    # -- gradients and batches --------------------------------------------------------------------------------------
    def batched(self, size: int, which: Sequence[bool]) -> Step:
        """The step whose dense operands, those named, and result have one more mode in front: a batch."""
        key = "batch", size, tuple(which)
        if key in self._others:
            return self._others[key]
        e, letter, batched = self.canonical.bound.einsum, self.spare("a batch"), iter(which)
        inputs = tuple(t if p in e.sparse or not next(batched) else (letter, *t) for p, t in enumerate(e.inputs))
        einsum = Einsum(inputs, (*e.kept, letter, *e.free), e.sparse, e.text)
        of_batch = Bound.of(einsum, {**self.canonical.bound.by_index, letter: size})
        return self.instead(key, of_batch, {"plan": self.derived.plan})

    def spare(self, what: str) -> str:
        """A letter that the einsum has not."""
        e = self.canonical.bound.einsum
        letter = next((c for c in ascii_letters if c not in e.indices), None)
        if letter is None:
            raise EquationError(f'{what} of "{e.text}" needs one letter more than the 52 there are')
        return letter

    @cached_property
    def raw(self) -> Einsum:
        """The einsum that gives the rows: of kept letters, or of the slot of a sparse output, and dense letters.

        The slot is one more mode of the sparse operand, so that a result's gradient can join as a dense operand.
        """
        e = self.canonical.bound.einsum
        if not self.output.sparse:
            return Einsum(e.inputs, (*e.kept, *e.free), e.sparse, e.text)
        slot = self.spare("the gradient")
        inputs = tuple((slot, *t) if p in e.sparse else t for p, t in enumerate(e.inputs))
        return Einsum(inputs, (slot, *e.free), e.sparse, e.text)

    @cached_property
    def by_slot(self) -> torch.Tensor | None:
        """Numbers of the nonzeros, sorted by the slot of a sparse result that each adds to; None as they are."""
        if self.output.slot is None:
            return None
        with lasting():
            return torch.argsort(self.output.slot, stable=True)

    @cached_property
    def slotted(self) -> Pattern:
        """The operand's pattern with one more mode in front: the slot of a sparse result that each nonzero adds to."""
        x, slot, order = self.operand, self.output.slot, self.by_slot
        with lasting():
            slot = torch.arange(x.nnz, device=x.device) if slot is None else slot[order]
            coords = x.coords if order is None else x.coords[:, order]
            return Pattern(torch.cat([slot.unsqueeze(0), coords]), (self.output.rows, *x.shape), x.is_coalesced)

    # -- what a user may look at ------------------------------------------------------------------------------------
    def ptx(self, target: str) -> str:
        """The assembly for a named target; needs no GPU.

        Where the generated torch programs run, this is that of the Triton kernels which a GPU would run instead.
        """
        generated_programs = self.executable.programs
        if self.guard and self.guard.instead == "floats" and not has_halves(gpu(target)[0]):
            return self.instead(self.guard.instead, self.canonical.bound, self.guard.changes).ptx(target)
        if generated_programs.backend == "triton":
            return generated_programs.assembly(target, self.arrays.parts, self.executable.dtype)
        if self.backend == "triton":
            raise PlanError(f"plan {self.plan.name!r} runs torch's own kernels, which have no PTX; others have")
        if self.dtype.is_complex:
            raise PlanError("complex einsums run the generated torch programs, which have no PTX")
        return self.instead("triton", self.canonical.written, {"backend": "triton"}).ptx(target)

    def cost(self) -> SymbolicCost:
        """What a call costs, as expressions."""
        from sparsetc.planner.report import statistics_of
        from sparsetc.planner.symbolic import symbolic_cost

        with in_place(self.settings, self.device):
            stored = statistics_of(self.choice, [p.packed for p in self.parts], self.filled, self.problem)
            about = self.plan, self.programs, stored, self.problem.backend, self.problem.profile
            return symbolic_cost(self.canonical.bound, *about)

    def reports(self) -> list[StepReport]:
        """Return the report of the step, for an explanation."""
        from sparsetc.planner.report import report  # which a call does not need

        with in_place(self.settings, self.device):
            programs, stored = list(self.programs), [p.packed for p in self.parts]
            about = self.filled, self.problem, str(self.path)
            return [report(self.equation, self.plan, self.choice, programs, stored, *about)]
