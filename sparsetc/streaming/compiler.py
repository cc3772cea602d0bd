"""An einsum of a tensor that comes in chunks -> packed chunks, and the few programs that run all of them.

In: a `Bound` einsum, options, and the nonzeros of a chunk. Out: packed chunks. An einsum is linear in its sparse
operand, so a chunk is a tensor of its own. It goes the way of any other, through the same planner, formats and
lowering, but its programs always add, since other chunks add to the same rows. Chunks of one plan therefore have one
program, whatever they hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from sparsetc.codegen.launch import Programs, stored_dtype
from sparsetc.contraction.canonical import Canonical
from sparsetc.contraction.prepare import BoundPart, Preparation, in_place
from sparsetc.errors import FormatError, PlanError
from sparsetc.ir.equation.einsum import Bound
from sparsetc.ir.lower import Target, lower
from sparsetc.ir.plan import AUTO, Part, Plan, requested, without_halves
from sparsetc.ir.program.tile import TileProgram
from sparsetc.options import Options
from sparsetc.packing.base import get_format
from sparsetc.planner.registry import choose
from sparsetc.runtime.executable import copies
from sparsetc.streaming.store import PackedPart
from sparsetc.support.lru import cached_property
from sparsetc.tensor.sparse_tensor import SparseTensor
from sparsetc.tensor.sums import accumulator


@dataclass(frozen=True)
class Variant:
    """Programs that chunks have in common.

    Attributes:
        parts: what the programs were lowered from.
        ordered: for each part, whether a result row is the nonzero's own number.
        wide: for each part, whether stored positions need 64 bits.
        programs: lowered for one row; `Compiler.generate` is told how many there are.
        fused: whether one launch runs all of them.
        reads_zeros: whether positions are multiplied that hold no nonzero, which an infinity would turn into NaN.
    """

    parts: tuple[Part, ...]
    ordered: tuple[bool, ...]
    wide: tuple[bool, ...]
    programs: tuple[TileProgram, ...]
    fused: bool
    reads_zeros: bool

    @property
    def copies(self) -> int:
        """How many copies of the result the programs add to."""
        return max(map(copies, self.programs))


class Compiler:
    """Packs the chunks of one tensor for one einsum.

    Attributes:
        form, copies: the form of chunks' results, and the most copies that programs may add to.
        plan: the plan by which chunks are packed, once it is chosen.
        samples: gives other nonzeros to choose a plan by: coordinates and values, as `pack` takes them.
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
        self.bound, self.dtype, self.target = bound, dtype, target
        self.settings = replace(settings, backend=settings.effective_backend(target), memory_limit=None)
        self.form, self.copies = form, 1
        self.plan: Plan | None = None
        self.samples: Callable[[], Iterable[tuple[torch.Tensor, torch.Tensor]]] = tuple

    @cached_property
    def template(self) -> Preparation:
        """The einsum of a tensor without nonzeros: what is known before any is seen."""
        coords = torch.empty((len(self.shape), 0), dtype=torch.long, device="cpu")
        return self.prepared(self.tensor(coords, torch.empty(0, dtype=self.dtype, device="cpu")))

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the modes of what is streamed."""
        return tuple(self.bound.shape(0))

    @property
    def backend(self) -> str:
        """What runs: ``triton`` or ``torch``."""
        return self.template.problem.backend

    @property
    def canonical(self) -> Canonical:
        """The einsum as it is lowered."""
        return self.template.canonical

    def tensor(self, coords: torch.Tensor, values: torch.Tensor) -> SparseTensor:
        """A chunk as a tensor of its own."""
        return SparseTensor._of(coords, values, self.shape, True)

    def prepared(self, x: SparseTensor) -> Preparation:
        """The einsum of a chunk."""
        like = torch.empty((), dtype=self.dtype, device=x.device)
        dense = [like.expand(self.bound.shape(p)) for p in self.bound.einsum.dense]
        found = Preparation(self.bound, [x, *dense], self.settings, self.form)
        found.problem = replace(found.problem, adding=True)
        return found

    def pack(
        self, coords: torch.Tensor, values: torch.Tensor
    ) -> tuple[Variant, tuple[PackedPart, ...], torch.Tensor | None] | None:
        """A chunk, packed by the plan of the first one; None where none of its nonzeros takes part.

        Args:
            coords: (order, n) int64, in lexicographic order without duplicates.
            values: (n,).

        Returns:
            The programs; the parts; and (kept modes, rows) the coordinates of the chunk's rows of the result, rising,
            or None where rows are known by their coordinates.

        Raises:
            PlanError, FormatError: the plan does not apply.
        """
        x = self.tensor(coords, values)
        with in_place(self.settings, self.target):
            made = self.prepared(x)
            if not made.canonical.coords.shape[1]:
                return None
            chosen, filled, bound = self._bound(made)
            variant = self._variant(chosen, filled, bound, made.output.sparse and made.output.slot is None)
            parts = tuple(self._packed_part(made, p, values) for p in bound)
        rows = None if made.output.pattern is None else made.output.pattern.coords
        return variant, parts, rows

    def _bound(self, made: Preparation) -> tuple[Plan, tuple[int, ...], list[BoundPart]]:
        """The plan of a chunk, its parts that hold nonzeros by number, and these packed and lowered.

        Where the partition deals otherwise here than where the plan was chosen, any plan will do, since a chunk is a
        tensor of its own: one of the same name, or else the one that is expected to be fastest.
        """
        if self.plan is None:
            self.plan = self._chosen(made)
            return self.plan, *made.bound_parts(self.plan)
        own = requested(self.settings.plan)
        named = own if own.is_request else Plan(own.name)
        for wanted in (None, named, AUTO):
            try:
                plan = self.plan if wanted is None else self._fitted(choose(wanted, made.problem).plan)
                return plan, *made.bound_parts(plan)
            except (PlanError, FormatError):
                if wanted is AUTO:
                    raise
        raise AssertionError("the last of the plans raises")

    def _chosen(self, made: Preparation) -> Plan:
        """The plan by which all chunks are packed, chosen by the first, or by other nonzeros where it has none for it.

        A plan of long rows and short ones, for example, is none for a chunk whose rows are all long.
        """
        try:
            return self._fitted(choose(self.settings.plan, made.problem).plan)
        except PlanError as first:
            error = first
            for coords, values in self.samples():
                x = self.tensor(coords, values)  # alive while its counts are asked for
                other = self.prepared(x)
                if other.canonical.coords.shape[1]:
                    try:
                        return self._fitted(choose(self.settings.plan, other.problem).plan)
                    except PlanError as found:
                        error = found  # says more of the whole tensor than what a first chunk lacks
            raise error from None

    def _fitted(self, plan: Plan) -> Plan:
        """A plan for any values: dots in halves depend on them; and of no more copies than there is memory for.

        Raises:
            PlanError: a part is the whole tensor, dense, which no chunk is.
        """
        if any(hasattr(get_format(p.format), "lower") for p in plan.parts):
            raise PlanError(f"plan {plan.name!r} stores a dense tensor whole, which a stream's chunks are not")
        return without_halves(plan.scheduled(lambda own: replace(own, copies=min(self.copies, own.copies))))

    def _variant(self, plan: Plan, filled: Sequence[int], bound: Sequence[BoundPart], in_order: bool) -> Variant:
        """The programs of a chunk, with all that chunks differ in left out."""
        packed = [p.packed for p in bound]
        return Variant(
            tuple(replace(plan.parts[n], nnz=0, nbytes=0, label="") for n in filled),
            tuple(in_order and p.positions is None and p.source is None for p in packed),
            tuple(p.index64 for p in packed),
            tuple(replace(p.program, rows=1) for p in bound),
            plan.fused,
            (self.dtype.is_floating_point or self.dtype.is_complex) and any(p.reads_zeros for p in bound),
        )

    def _packed_part(self, made: Preparation, part: BoundPart, values: torch.Tensor) -> PackedPart:
        """A part's arrays and values."""
        taking_part = made.taking_part(values)
        wide = taking_part.to(accumulator(self.dtype)) if self.backend == "torch" else taking_part
        stored = part.packed.pack_values(wide).to(stored_dtype(part.program, self.dtype, self.backend))
        return part.arrays, stored

    # -- programs ---------------------------------------------------------------------------------------------------
    def lowered(self, parts: Sequence[Part], ordered: Sequence[bool], wide: Sequence[bool]) -> tuple[TileProgram, ...]:
        """The programs of a variant, from what a file has of it.

        Raises:
            PlanError, FormatError: parts that do not fit the einsum.
        """
        c, found = self.canonical, []
        with in_place(self.settings, self.target):
            for number, (part, own, index64) in enumerate(zip(parts, ordered, wide, strict=True)):
                view = get_format(part.format).view(c.shape, part.storage)
                target = Target(self.template.output.sparse, own, False, 1, index64, self.backend == "torch")
                found.append(lower(c.bound, view, part.schedule, target, number=number, format=part.format))
        return tuple(found)

    def generate(self, variant: Variant, rows: int) -> Programs:
        """The generated programs of a variant, for so many rows of the result."""
        programs = [replace(p, rows=rows) for p in variant.programs]
        folder = self.settings.cache_dir
        return Programs(programs, self.dtype, self.backend, self.target, folder, variant.fused)
