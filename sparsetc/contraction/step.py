"""A contraction of one sparse operand with dense ones: planned, packed and generated once; a differentiable function.

In: a `Request` as rules leave it. Out: `Step`, a function from values and dense operands to the result.

`StepFunction` is a step as such a function for autograd: its gradients and batches are einsums with the same
sparse pattern. The gradient of a dense operand is a dense result (``"ijk,ir,kr->jr"``), that of the values a sampled
one (``"ijk,jr,kr,ir->ijk"``); both reuse what is packed for the pattern. A sparse output's gradient has a row a slot;
it joins as a dense operand over one more mode of the sparse operand, the slot, so that there is no second sparse one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sparsetc.backends import TORCH
from sparsetc.codegen import split_float16
from sparsetc.codegen.numba import unprinted
from sparsetc.codegen.parts import Values
from sparsetc.codegen.programs import stored_dtype
from sparsetc.contraction.autograd import UNREAD, Multilinear, apply
from sparsetc.contraction.contraction import Contraction, compiled
from sparsetc.contraction.guard import Guard, finite, fit_for_halves
from sparsetc.contraction.prepare import dense_tables, in_force_on, prepare, verify_axes
from sparsetc.contraction.request import Patterns, Request, Tensors, arranged, repeated_dims, stand_ins
from sparsetc.device.profile import gpu, has_halves
from sparsetc.errors import EquationError, PlanError
from sparsetc.explain import StepReport
from sparsetc.ir.equation.einsum import UPSTREAM, Bound, Einsum, gradient
from sparsetc.ir.plan import without_halves
from sparsetc.ir.program.tile import TileProgram
from sparsetc.options import Options, with_settings
from sparsetc.planner.candidate import Choice
from sparsetc.planner.registry import choose, plan_of_derived
from sparsetc.planner.report import SymbolicCost, report, statistics_of, symbolic_cost
from sparsetc.support import cached_property, outside
from sparsetc.support.entry import warn_once, without_autocast
from sparsetc.tensor.coords import picked
from sparsetc.tensor.dtypes import accumulator, captured, fitted, in_order, resolved, summed_dtype
from sparsetc.tensor.kept_values import gradient_taken, kept_with
from sparsetc.tensor.pattern import Pattern, followed, lasting, transforming
from sparsetc.tensor.sparse_tensor import SparseTensor

_numbers = itertools.count()


class Step:
    """A contraction of one sparse operand: ``x,b,c->output``, compiled for the pattern of x.

    Its gradients, tangents and batches are contractions of the same pattern.

    Attributes:
        bound: the einsum, as rewrites leave it.
        written: the einsum before rewrites; schedules may name letters of it that rewrites removed.
        operand: the sparse operand, with no values and nothing kept.
        output: where the results go: rows of a dense tensor, or nonzeros of a pattern.
        problem: the einsum as the planner sees it.
        number: no other step in this process has it; gradients are kept under it.
        empty: whether no nonzeros take part.
        result_dtype: the dtype of what `result` gives.
        turned: of the class: the count of calls, of all steps, in which a candidate had its turn.
        in_turns: `rows` by the candidates that are being timed; None once the plan is decided.
        guard: what says which operands the step takes, and `instead` takes others; None where it takes all.
        in_halves: whether values or dense operands are multiplied in halves of 16 bits.
        covers: whether programs store all of the result and read operands in any order.
        is_product: whether packed values are the dense tensor, which torch multiplies once.
        only_programs: whether a call runs programs and nothing else, unless the guard refuses an infinity.
        ordered: whether sums are made in one order, without programs of several threads, as `deterministic` asks.
        _zero: whether the result is all zeros: there are no nonzeros, or a size is 0.
        _pattern: the pattern of a sparse result, None of a dense one; `_order` brings rows to its order.
        _as_rows: whether rows are the result as they lie.
        _repacks: whether packed values are a copy; otherwise parts read values where they are given.
    """

    turned = 0

    def __init__(self, request: Request, choice: Choice | None = None) -> None:
        """Plan, pack and generate.

        Args:
            request: an einsum as `rewrites_of` leaves it.
            choice: of the plan, where it was chosen together with those of other einsums.

        Raises:
            OutOfMemoryError: the result would pass the memory limit.
        """
        settings = self.settings = request.settings
        self.bound = request.bound
        self.written = request.written or request.bound.einsum
        self.operand = request.sparse[0]._bare()
        self.dtype, self.device = self.operand.dtype, self.operand.device
        self.output, self.problem = request.output, request.problem
        self.number = next(_numbers)
        self.equation = self.bound.einsum.text
        self.form = request.form
        self.result_dtype = summed_dtype(self.dtype) if self.written.plain_sum else self.dtype
        self.empty = not self.operand.nnz
        self.ordered = settings.deterministic and not self.problem.backend.atomics
        self._pattern, self._order = arranged(self.output)
        output = self.output
        self._as_rows = output.permutation is None and (output.sparse or len(output.kept_shape) == 1)
        self.in_turns: Callable[[Tensor | None, Tensors, Tensors | None], Tensor] | None = None
        with in_force_on(settings, self.device):
            recurs = request.of_call and not settings.timed
            self.take(choice or choose(settings.plan, self.problem, recurs))
        if self.backend == TORCH.name and self.device.type == "cpu":
            warn_once("no GPU: running the generated torch programs on the CPU")

    def take(self, choice: Choice) -> None:
        """Pack and generate by a choice, and run so from here on."""
        verify_axes(choice.plan, self.bound.einsum, self.written)
        prepared = prepare(choice.plan, self.problem, self.output, self.settings.cache_dir)
        plan, self.filled, self.parts, self.executable, self.arrays = prepared
        self.plan, self.choice = replace(plan, reason=choice.plan.reason), choice
        self.generated = [self.executable.programs]
        runs = self.executable.programs.backend
        native = runs.loops
        self.backend = (runs if native else self.problem.backend).name
        if self.problem.only_native and not native:
            why = next(filter(None, map(unprinted, self.programs)), "numba cannot be imported")
            self.plan = replace(self.plan, reason=f"{self.plan.reason}; as torch programs: {why}")
        for derived in ("_ones", "instead"):
            self.__dict__.pop(derived, None)
        self._value_keys = [
            (p.packed.token, stored_dtype(p.program, self.dtype, self.problem.backend), p.program.view.values.halves)
            for p in self.parts
        ]
        read = [o for p in self.programs for o in p.operands]
        self.in_halves = any(o.split or o.halves for o in read) or any(halves for *_, halves in self._value_keys)
        self.guard = self._guard()
        self.covers = self.programs[0].covers
        as_given = {key[1:] for key in self._value_keys} == {(self.dtype, False)}
        self._repacks = not (as_given and all(p.packed.in_order for p in self.parts))
        first, order = self.programs[0], self.parts[0].packed.storage.sequence
        self.is_product = first.is_product and as_given and not self.output.sparse and [*order] == sorted(order)
        sizes = (self.operand.nnz, *self.executable.shape, *(n for _, n in self.bound.sizes))
        self._zero = 0 in sizes
        types = {self.dtype, self.executable.dtype, *(t for _, t, _ in self._value_keys)}
        self.only_programs = types == {self.result_dtype} and not (
            self._zero or self.arrays.second or self.ordered or self.in_halves
        )

    @property
    def programs(self) -> tuple[TileProgram, ...]:
        """The tile programs of its parts."""
        return self.executable.programs.programs

    def pattern_on(self, patterns: Patterns) -> Pattern | None:
        """The pattern of a sparse result: the operand's own where all of its modes are kept; None of a dense one."""
        return patterns[0] if self.output.own else self._pattern

    def _guard(self) -> Guard | None:
        """Return the guard of the operands that the step takes; None if it takes all.

        Parts that multiply positions which hold no nonzero take no infinities. Parts in halves of 16 bits take values,
        which come first where there are any, and dense operands that halves are exact enough for. What they do not take
        is run by nonzeros alone, or by the same plan in dots of float32.
        """
        if not self.in_halves:
            floats = self.dtype.is_floating_point or self.dtype.is_complex
            return Guard(finite) if floats and any(p.reads_zeros for p in self.parts) else None
        of_parts = zip(*(p.operands for p in self.programs), strict=True)
        split = [any(o.split or o.halves for o in operands) for operands in of_parts]
        return Guard(lambda read: fit_for_halves(read, [True] * (len(read) - len(split)) + split))

    @cached_property
    def instead(self) -> Step:
        """The step for what the guard refuses: by the same plan in dots of float32, or by nonzeros alone."""
        return self.by(plan=without_halves(self.plan) if self.in_halves else "coo")

    def by(self, **changes: object) -> Step:
        """Make the step of the same einsum with other settings."""
        with lasting():
            settings = with_settings(self.settings, changes)
            operands = stand_ins(self.bound, [self.operand])
            return Step(Request(self.bound, operands, settings, self.form, written=self.written))

    # -- values -------------------------------------------------------------------------------------------------------
    def packed(self, values: Tensor, flat: Callable[[Tensor], Tensor] | None = None) -> Values | None:
        """Return the values as the parts store them, kept until they change; None where each call must pack them.

        That is while a transform of `torch.func` is active, which would follow them, and while candidates, which pack
        differently, take turns.

        Args:
            values: as they are kept with their storage.
            flat: gives those of the operand; None where they are these.
        """
        if transforming() or self.in_turns is not None:
            return None
        if flat is None and not self._repacks:
            return [resolved(values.detach()).contiguous()] * len(self.parts)
        flat = flat or (lambda values: values)
        kept = kept_with(values)
        if kept is None:
            return self.packed_values(flat(values))
        packed = [kept.get(key) for key in self._value_keys]
        if missing := [n for n, stored in enumerate(packed) if stored is None]:
            if captured(values):
                return self.packed_values(flat(values))
            with lasting():
                stored = self.packed_values(flat(values), missing)
            for n, one in zip(missing, stored, strict=True):
                packed[n] = kept.put(self._value_keys[n], one)
        return packed

    def packed_values(self, values: Tensor | None, parts: Sequence[int] | None = None) -> Values:
        """Pack (nnz,) values now, for all parts or for some, by number; None stands for 1 at each nonzero."""
        if values is None:
            return self._ones
        numbers = range(len(self.parts)) if parts is None else parts
        flat = resolved(values.detach() if values.requires_grad else values)
        flat = flat.to(accumulator(self.dtype) if self.problem.backend.widens else self.dtype)
        stored: list[Tensor | split_float16.InHalves | None] = []
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
        """The values of the pattern itself: 1 at each nonzero; none where no part reads them."""
        if not any(p.program.view.packed for p in self.parts):
            return [None] * len(self.parts)
        with lasting():
            return self.packed_values(torch.ones(self.operand.nnz, dtype=self.dtype, device=self.device))

    def tables(self, dense: Tensors) -> list[Tensor]:
        """The dense operands as programs read them."""
        return dense_tables(dense, self.problem, contiguous=not self.covers)

    # -- calls --------------------------------------------------------------------------------------------------------
    def of_rows(self, rows: Tensor) -> Tensor:
        """A dense result, or a sparse one's values, of (rows, *dense sizes)."""
        if self._pattern is None:
            return self.output.shaped(rows)
        return rows if self._order is None else rows.flatten().index_select(0, self._order)

    def rows(
        self, values: Tensor | None, dense: Tensors, packed: Values | None = None, given: Tensors | None = None
    ) -> Tensor:
        """The result as (rows, *dense sizes), outside autograd.

        Args:
            values: (nnz,) of the sparse operand; None for 1 at each nonzero.
            dense: the dense operands.
            packed: the values as `packed` gives them, where the caller has them.
            given: what the dense operands were made of, of which the guard knows its verdict while they stay the same.
        """
        if not self.ordered and not torch.is_autocast_enabled(self.device.type):
            return self._rows(values, dense, packed, given)
        with without_autocast(self.device), in_order(self.ordered):
            return self._rows(values, dense, packed, given)

    def on_arrays(self, packed: Values) -> Callable[[Any], Any] | None:
        """Return the step with these values as a function from its one dense operand to the result, which is flat.

        Both are ndarrays, the operand contiguous, of the step's dtype and writeable. None where a step is more than
        native loops.
        """
        run = self.executable
        more = self.guard or self._zero or self.in_turns is not None or not self._as_rows
        if more or run.dtype != self.dtype or [order for _, order, _ in self.problem.readings] != [None]:
            return None
        return run.on_arrays(self.arrays, packed)

    def _rows(self, values: Tensor | None, dense: Tensors, packed: Values | None, given: Tensors | None) -> Tensor:
        turns = self.in_turns  # read once: the call of another thread may decide
        if turns is not None and not captured(self.operand._values):
            return turns(values, dense, given)
        run = self.executable
        if self._zero:
            return torch.zeros(run.shape, dtype=self.result_dtype, device=self.device)
        tables = self.tables(dense)
        if self.problem.backend.widens and run.dtype != self.dtype:
            tables = [t.to(run.dtype) for t in tables]
        if self.guard is not None:
            looked = [values] if values is not None and self.in_halves else []  # 1s are exact
            if not self.guard.admits([*looked, *(given or dense)], [*looked, *tables]):
                return self.instead.rows(values, dense)
        result = run.run(self.arrays, self.packed_values(values) if packed is None else packed, tables)
        if result.dtype == self.result_dtype:
            return result
        return fitted(result, self.result_dtype, f'the result of "{self.equation}"')

    # -- calls that autograd follows ----------------------------------------------------------------------------------
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

    def as_function(self, whole: Contraction, pattern: Pattern, values: Any, packed: Any, given: Any) -> StepFunction:
        """Return the contraction round this step as one function for autograd, its rewrites included."""
        return StepFunction(self, pattern, values is None, packed, given, whole)

    def spare(self, what: str) -> str:
        """Return a letter that no term of the einsum has."""
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

    # -- what a user may look at --------------------------------------------------------------------------------------
    def ptx(self, target: str) -> str:
        """The assembly for a named target; needs no GPU.

        Where the generated torch programs run, this is that of the Triton kernels which a GPU would run instead.
        """
        (generated,) = self.generated
        if self.in_halves and not has_halves(gpu(target)[0]):
            return self.instead.ptx(target)
        if generated.backend.gpu:
            return generated.assembly(target, self.arrays.parts, self.executable.dtype)
        if self.problem.backend.gpu:
            raise PlanError(f"plan {self.plan.name!r} runs torch's own kernels, which have no PTX; others have")
        if self.dtype.is_complex:
            raise PlanError("complex einsums run the generated torch programs, which have no PTX")
        return self.by(backend="triton").ptx(target)

    def cost(self) -> SymbolicCost:
        """Return the cost of a call, as expressions."""
        with in_force_on(self.settings, self.device):
            stored = statistics_of(self.choice, [p.packed for p in self.parts], self.filled, self.problem)
            problem = self.problem
            return symbolic_cost(self.bound, self.plan, self.programs, stored, problem.profile)

    def reports(self) -> list[StepReport]:
        """Return the report of the step, for an explanation."""
        with in_force_on(self.settings, self.device):
            return [
                report(
                    self.equation,
                    self.plan,
                    self.choice,
                    self.programs,
                    [p.packed for p in self.parts],
                    self.filled,
                    self.problem,
                    str(self.generated[0].path),
                )
            ]


@dataclass(frozen=True)
class StepFunction(Multilinear):
    """A step as a function of tensors, for autograd: of values and dense operands, or of dense operands alone.

    Attributes:
        ones: True if values are 1 at each nonzero, and not among the tensors.
        packed: values as the step stores them; `UNREAD` where the graph of the result is wanted and not the result.
        given: the operands of which the dense tensors were made, for the guard.
        contraction: the one round the step, where the tensors are those of its calls; None where they are the step's
            own. Its gradients are einsums of these, which are rewritten by themselves; what is converted and put back
            is no part of torch's graph.
    """

    step: Step
    pattern: Pattern
    ones: bool
    packed: Values | None = None
    given: Tensors | None = None
    contraction: Contraction | None = None

    def _split(self, tensors: Tensors) -> tuple[Tensor | None, Tensors]:
        return (None, tensors) if self.ones else (tensors[0], tensors[1:])

    def rows(self, tensors: Tensors) -> Tensor:
        """The rows of the step's result, or the contraction's result, outside autograd."""
        values, dense = self._split(tensors)
        if self.contraction is not None:
            operands = [values], dense, self.packed, self.given
            result = self.contraction.straight(*operands)
            return self.contraction.run([self.pattern], *operands) if result is None else result
        if self.packed is UNREAD:
            return tensors[0].new_zeros(()).expand(self.step.executable.shape)
        return self.step.rows(values, dense, self.packed, self.given)

    def of_any(self) -> StepFunction:
        """The function without packed values."""
        return StepFunction(self.step, self.pattern, self.ones, contraction=self.contraction)

    def batched(self, tensors: Tensors, dims: Sequence[int | None], size: int) -> tuple[Tensor, int]:
        """Compute a batch: of a step's dense operands it is one more letter; else one call follows the other."""
        values, dense = self._split(tensors)
        if self.contraction is not None or (not self.ones and dims[0] is not None):
            return super().batched(tensors, dims, size)
        dense_dims = dims if self.ones else dims[1:]
        moved = [t if d is None else t.movedim(d, 0) for t, d in zip(dense, dense_dims, strict=True)]
        batched = self._batched(size, [d is not None for d in dense_dims])
        rows, *width = self.step.executable.shape
        return batched.result([self.pattern], [values], moved).reshape(rows, size, *width), 1

    def _batched(self, size: int, which: Sequence[bool]) -> Contraction:
        """Return the contraction with one more mode, the batch, in the result and in the dense operands marked.

        It is their first mode, and that behind the kept modes of the result.
        """
        step, pattern = self.step, self.pattern

        def make() -> Contraction:
            e, letter = step.bound.einsum, step.spare("a batch")
            batched = iter(which)
            inputs = tuple(t if p in e.sparse or not next(batched) else (letter, *t) for p, t in enumerate(e.inputs))
            einsum = Einsum(inputs, (*e.kept, letter, *e.free), e.sparse, e.text)
            bound = Bound.of(einsum, {**step.bound.by_index, letter: size})
            with lasting():
                x = SparseTensor._make(pattern, step.operand._values)
                return Contraction.compile(bound, stand_ins(bound, [x]), step.derived, step.form)

        return pattern.cache.once(("batch", step.number, size, *which), make)  # type: ignore[no-any-return]

    def gradients(self, wanted: Sequence[bool], tensors: Tensors, upstream: Tensor) -> list[Tensor | None]:
        """The gradient for each tensor where it is wanted: an einsum in which it and the result change places."""
        e = self.step.raw if self.contraction is None else self.contraction.bound.einsum  # that gradients are made of
        if upstream.ndim != len(e.output):
            upstream = self.step.output.letters_apart(upstream)
        positions = [*(() if self.ones else e.sparse), *e.dense]
        return [self._gradient(e, p, tensors, upstream) if w else None for p, w in zip(positions, wanted, strict=True)]

    def _gradient(self, e: Einsum, operand: int, tensors: Tensors, upstream: Tensor) -> Tensor:
        """Compute the gradient of one operand of an einsum by a contraction that is kept with the pattern."""
        step, (values, dense) = self.step, self._split(tensors)
        pattern, order = self.pattern, None
        sizes: Sequence[int] = (pattern.nnz,)
        if self.contraction is not None:
            sizes = self.contraction.compiled_for[0][1]  # of the values of its one sparse operand
        elif step.output.sparse:
            pattern, order = step.slotted, step.by_slot
        sampled = operand in e.sparse
        einsum, sources = gradient(e, operand)
        conjugate = torch.conj_physical if step.dtype.is_complex else lambda t: t
        weights = None if values is None or sampled else conjugate(picked(values, order))
        others = outside(sources, e.sparse)
        operands = [upstream if s == UPSTREAM else conjugate(dense[e.dense.index(s)]) for s in others]
        if weights is None and (not step.problem.backend.at_once or len(sizes) > 1):
            pattern = pattern.of_ones
        key = "gradient", self.contraction and self.contraction.key, step.number, operand, *map(repeated_dims, operands)
        contraction: Contraction | None = pattern.cache.get(key)
        if contraction is None:
            x = SparseTensor._make(pattern, torch.zeros((), dtype=step.dtype, device=pattern.device).expand(sizes))
            rest = iter(operands)
            compiled_for = [x if p in einsum.sparse else next(rest) for p in range(len(einsum.inputs))]
            form = "sparse" if sampled else "dense"
            # `put` returns that of another thread, if it was first.
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
