"""Compilation of chunks: an einsum of a chunked tensor -> packed chunks, and the few programs that run all of them.

In: a `Bound` einsum, options, and the nonzeros of a chunk. Out: packed chunks. An einsum is linear in its sparse
operand, so a chunk is a tensor of its own. It goes the way of any other, through the same planner, formats and
lowering, but its programs always add, since other chunks add to the same rows. Chunks of one plan therefore have one
program, whatever they hold.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsetc.backends import Backend
from sparsetc.codegen.parts import PartArrays
from sparsetc.codegen.programs import Programs, stored_dtype
from sparsetc.contraction.compile import contraction
from sparsetc.contraction.prepare import BoundPart, bound_parts, in_force_on, verify_axes
from sparsetc.contraction.request import Request, stand_ins
from sparsetc.contraction.rewrites import Pull, rewrites_of
from sparsetc.errors import FormatError, PlanError
from sparsetc.ir.equation.einsum import Bound
from sparsetc.ir.lower import Target, lower
from sparsetc.ir.plan import AUTO, ONE_PASS, Part, Plan, requested, without_halves
from sparsetc.ir.program.tile import TileProgram
from sparsetc.options import Options
from sparsetc.packing.base import get_format
from sparsetc.planner.registry import choose
from sparsetc.tensor.dtypes import accumulator
from sparsetc.tensor.sparse_tensor import SparseTensor

Nonzeros = tuple[Tensor, Tensor]
"""(order, n) int64 coordinates, in lexicographic order without duplicates, and (n,) values."""


@dataclass(frozen=True)
class Variant:
    """The programs that several chunks share.

    Attributes:
        parts: what the programs were lowered from.
        ordered: for each part, whether a result row is the nonzero's own number.
        wide: for each part, whether stored positions need 64 bits.
        fused: whether one launch runs all of them.
        reads_zeros: whether positions are multiplied that hold no nonzero, which an infinity would turn into NaN.
        programs: lowered for one row; `Compiler.generate` is told how many there are.
    """

    parts: tuple[Part, ...]
    ordered: tuple[bool, ...]
    wide: tuple[bool, ...]
    fused: bool
    reads_zeros: bool
    programs: tuple[TileProgram, ...] = ()


class Compiler:
    """A compiler and packer of the chunks of one tensor, for one einsum.

    Attributes:
        form, copies: the form of chunks' results, and the most copies that programs may add to.
        plan: the plan by which chunks are packed, once it is chosen.
        template: the einsum of a tensor without nonzeros: what is known before any is seen; `problem` is that of it.
        pull: the map from the dense operands of a call to those of the lowered einsum.
    """

    def __init__(self, bound: Bound, dtype: torch.dtype, settings: Options, form: str, target: torch.device) -> None:
        """Take an einsum.

        Args:
            bound: whose first operand is what is streamed.
            dtype: of all operands.
            settings: those of the call; its memory limit is that of the device, not of packing.
            form: of the result as chunks have it: ``sparse`` numbers the rows of each.
            target: the device that the chunks are run on.
        """
        self.bound = bound
        self.dtype = dtype
        self.target = target
        self.settings = replace(settings, backend=settings.effective_backend(target).name, memory_limit=None)
        self.form, self.copies = form, 1
        self.plan: Plan | None = None
        no_coords = torch.empty((len(bound.shape(0)), 0), dtype=torch.long, device="cpu")
        self.template, self.pull = self._rewritten(no_coords, torch.empty(0, dtype=dtype, device="cpu"))
        self.problem = self.template.problem

    @property
    def backend(self) -> Backend:
        """The backend of programs."""
        return self.problem.backend

    def _rewritten(self, coords: Tensor, values: Tensor) -> tuple[Request, Pull]:
        """Return the einsum of some nonzeros as a tensor, as rewrites leave it, and the map to its operands."""
        x = SparseTensor._of(coords, values, tuple(self.bound.shape(0)), True)
        like = torch.empty((), dtype=self.dtype, device=x.device)
        dense = [like.expand(shape) for shape in self.bound.dense_shapes]
        request = Request(self.bound, [x, *dense], self.settings, self.form, chunk=True)
        rewrites, inner = rewrites_of(request)
        return inner, Pull.of(self.bound.einsum, rewrites)

    def choose(self, samples: Iterable[Nonzeros]) -> None:
        """Choose the plan of all chunks by the first nonzeros for which it applies.

        One that divides long rows from short ones, for example, does not apply to a chunk of long rows only.

        Raises:
            PlanError: it applies to none of them.
        """
        refused = None
        with in_force_on(self.settings, self.target):
            for coords, values in samples:
                inner, _ = self._rewritten(coords, values)
                if not inner.problem.nnz:
                    continue
                try:
                    self.plan = self._fitted(choose(self.settings.plan, inner.problem).plan)
                    verify_axes(self.plan, inner.bound.einsum, inner.written)
                    self._verify_trees(self.plan)
                    if self.settings.timed:
                        self._tune(coords, values)
                    return
                except PlanError as error:
                    refused = error  # the last says more of the whole tensor than what a first chunk lacks
        if refused is not None:
            raise refused

    def _verify_trees(self, plan: Plan) -> None:
        """Raise `PlanError` where a part's tree does not fit the einsum: `_bound` would take another plan for it."""
        each = (False,) * len(plan.parts)
        try:
            self.lowered(Variant(plan.parts, each, each, plan.fused, False))
        except PlanError as error:
            raise PlanError(f'plan {plan.name!r} of "{self.bound.einsum.text}": {error}') from error

    def _tune(self, coords: Tensor, values: Tensor) -> None:
        """Take the plan that is fastest for some nonzeros as a tensor of their own, if chunks can have it."""
        x = SparseTensor._of(coords.to(self.target), values.to(self.target), tuple(self.bound.shape(0)), True)
        plan = ONE_PASS if requested(self.settings.plan) == AUTO else self.settings.plan
        now = replace(self.settings, tune=self.settings.effective_tune()[1], plan=plan)
        with suppress(PlanError):
            (step,) = contraction(self.bound, stand_ins(self.bound, [x]), now, self.form).steps
            self.plan = self._fitted(step.choice.plan)

    def pack(
        self, coords: Tensor, values: Tensor
    ) -> tuple[Variant, list[tuple[PartArrays, Tensor]], Tensor | None] | None:
        """Pack a chunk by the plan that was chosen.

        Args:
            coords: (order, n) int64, in lexicographic order without duplicates.
            values: (n,).

        Returns:
            None where none of the nonzeros takes part; else the programs; arrays and values of each part; and (kept
            modes, rows) the coordinates of the chunk's rows of the result, rising, or None where rows are known by
            their coordinates.

        Raises:
            PlanError, FormatError: the plan does not apply.
        """
        with in_force_on(self.settings, self.target):
            inner, pull = self._rewritten(coords, values)
            if not inner.problem.nnz:
                return None
            plan, filled, bound = self._bound(inner)
            taking_part = pull.value(values)
            widened = taking_part.to(accumulator(self.dtype)) if self.backend.widens else taking_part
            parts = [
                (part.arrays, part.packed.pack_values(widened).to(stored_dtype(part.program, self.dtype, self.backend)))
                for part in bound
            ]
        output, packed = inner.output, [part.packed for part in bound]
        numbered = output.sparse and output.slot is None
        variant = Variant(
            tuple(replace(plan.parts[n], nnz=0, nbytes=0, label="") for n in filled),
            tuple(numbered and p.positions is None and p.source is None for p in packed),
            tuple(p.index64 for p in packed),
            plan.fused,
            (self.dtype.is_floating_point or self.dtype.is_complex) and any(part.reads_zeros for part in bound),
            tuple(replace(part.program, rows=1) for part in bound),
        )
        return variant, parts, None if output.pattern is None else output.pattern.coords

    def _bound(self, inner: Request) -> tuple[Plan, tuple[int, ...], list[BoundPart]]:
        """Return the plan of a chunk, the numbers of its parts that hold nonzeros, and these parts packed and lowered.

        Where the partition divides otherwise here than where the plan was chosen, any plan will do, since a chunk is a
        tensor of its own: one of the same name, or else the one that is expected to be fastest.
        """
        request = requested(self.settings.plan)
        for wanted in filter(None, (self.plan, request if request.is_request else Plan(request.name), AUTO)):
            try:
                plan = wanted if wanted is self.plan else self._fitted(choose(wanted, inner.problem).plan)
                return plan, *bound_parts(plan, inner.problem, inner.output)
            except (PlanError, FormatError):
                if wanted is AUTO:
                    raise
        raise AssertionError("the last of the plans raises")

    def _fitted(self, plan: Plan) -> Plan:
        """Return a plan for any values, as dots in halves depend on them, of no more copies than there is memory for.

        Raises:
            PlanError: a part is the whole tensor, dense, which no chunk is.
        """
        if any(hasattr(get_format(p.format), "lower") for p in plan.parts):
            raise PlanError(f"plan {plan.name!r} stores a dense tensor whole, which a stream's chunks are not")
        return without_halves(plan.scheduled(lambda own: replace(own, copies=min(self.copies, own.copies))))

    # -- programs ---------------------------------------------------------------------------------------------------
    def lowered(self, variant: Variant) -> tuple[TileProgram, ...]:
        """Return the programs of a variant read from a file.

        Raises:
            PlanError, FormatError, ValueError: parts that do not fit the einsum.
        """
        template, lowered = self.template, []
        with in_force_on(self.settings, self.target):
            for number, (part, own, wide) in enumerate(zip(variant.parts, variant.ordered, variant.wide, strict=True)):
                view = get_format(part.format).view(self.problem.shape, part.storage)
                target = Target(template.output.sparse, own, False, 1, wide, self.backend.at_once)
                lowered.append(lower(template.bound, view, part.schedule, target, number=number, format=part.format))
        return tuple(lowered)

    def generate(self, variant: Variant, rows: int) -> Programs:
        """Generate the programs of a variant for a result of `rows` rows."""
        programs = [replace(p, rows=rows) for p in variant.programs]
        folder = self.settings.cache_dir
        return Programs(programs, self.dtype, self.backend, self.target, folder, variant.fused)
