"""Kernel: a compiled einsum. Made once by `compile`, called often.

In: a canonical einsum, a chosen plan and its packed parts. Out: results, and everything a user may look at: the plan,
the source, its file, the PTX, the explanation. A call checks shapes, allocates its result, launches and returns.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from sparsetc.autograd import differentiable
from sparsetc.canonical import Canonical, as_given, canonicalise
from sparsetc.codegen.launch import BoundPart, TorchLaunch, TritonLaunch, accumulator, machine_of, portable, source_name
from sparsetc.convert import available_memory
from sparsetc.dense import converted, finite, resolved, without_autocast
from sparsetc.errors import DtypeError, PlanError, ShapeError
from sparsetc.explain import Explanation, explain
from sparsetc.formats import Packed, pack
from sparsetc.formats.tiles import item_slots
from sparsetc.integers import fitted, summed_dtype
from sparsetc.ir.lower import lower
from sparsetc.ir.operands import Target
from sparsetc.ir.plan import Part, Plan
from sparsetc.ir.tile import Add, TileProgram, walk
from sparsetc.options import Options, in_force
from sparsetc.output import output_of, without_zeros
from sparsetc.partition import PARTITIONS, shares
from sparsetc.planner.candidates import Setting
from sparsetc.planner.choose import Choice, choose
from sparsetc.planner.ownership import Circumstances, owns
from sparsetc.planner.statistics import Counts
from sparsetc.runtime.second_pass import SecondPass
from sparsetc.runtime.segments import in_order
from sparsetc.tensor import SparseTensor


class Kernel:
    """A compiled einsum; call it with the dense operands, in the equation's order."""

    def __init__(self, canonical: Canonical, x: SparseTensor, settings: Options, output: str) -> None:
        self.canonical, self.settings, self._form = canonical, settings, output
        self.drop_zeros = False
        """Whether calls leave out entries of a sparse result whose value is 0."""
        self.backend = _backend(settings, x)
        self.output = output_of(canonical, x, output)
        self._x, self._values_of, self._version = x, x.values, x.values._version
        precision, *finer = _dot_precisions(settings.effective_precision(), x)
        self.setting = Setting(
            canonical.bound,
            canonical.kept,
            len(canonical.letters),
            self.backend,
            precision,
            settings.deterministic,
            x.values.element_size(),
            x.dtype.is_floating_point,
            available_memory(x.device) if settings.memory_limit is None else settings.memory_limit,
            x.is_coalesced,
            max(1, self.output.rows),
            x.is_coalesced or (self.output.sparse and self.output.rows == canonical.coords.shape[1]),
            tuple(finer),
        )
        settings.check_memory(
            self.output.rows * self.output.width * accumulator(x.dtype).itemsize,
            x.device,
            f"the result of {canonical.written}",
        )
        memory = x._packed if canonical.source is None else {}
        self.counts = Counts(canonical.coords, canonical.shape, memory.setdefault("counts", {}))
        with self._in_place():
            self.choice: Choice = choose(settings.plan, self.setting, self.counts, self.output.sparse)
        self._bind(memory)
        self._pack_values()

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """Under the kernel's own options, on its own GPU: there its rates are looked up."""
        device = self.canonical.device
        with in_force(self.settings), torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            yield

    # -- compilation ------------------------------------------------------------------------------------------------
    def _bind(self, memory: dict[Any, Any]) -> None:
        plan = self.choice.plan
        packed = self._packed_parts(plan, memory)
        if sum(p.nnz for p in packed) != self.canonical.coords.shape[1]:
            raise PlanError(
                f"plan {plan.name!r} has no part for some shares of its partition, which have nonzeros here"
            )
        # A part of nothing is not run.
        self.filled = tuple(n for n, p in enumerate(packed) if p.nnz) or (len(packed) - 1,)
        chosen, stored = [plan.parts[n] for n in self.filled], [packed[n] for n in self.filled]
        parts = [self._bound_part(*one, number) for number, one in enumerate(zip(chosen, stored, strict=True))]
        self._second = None
        if self._needs_second_pass(parts):
            (bound,) = parts
            self._second = SecondPass.of(bound.packed.slots(_key_level(bound.program), self._row_of_nonzeros()))
            parts = [self._bound_part(chosen[0], bound.packed, 0, self._second.partials)]
        self.parts = tuple(parts)
        used = tuple(
            replace(
                part,
                nnz=p.packed.nnz,
                nbytes=p.packed.nbytes + p.packed.stored * self._stored_dtype(p).itemsize,
            )
            for part, p in zip(chosen, parts, strict=True)
        )
        self.plan = self._plan_of(plan, used)
        # Where every row is stored by its one owner, nothing need be zeroed, and nothing narrower need be widened.
        self._owned = self._second is None and all(_add_owned(p.program) for p in parts)
        covered = self.output.sparse
        self._zero = not (self._owned and covered)
        name = source_name(str(self.canonical.bound.einsum), self.backend)
        directory = self.settings.cache_dir
        if self.backend == "torch":
            self.launch: TorchLaunch | TritonLaunch = TorchLaunch(parts, directory, name)
        else:
            self.launch = TritonLaunch(
                parts, self._x.dtype, (plan.fused and len(parts) > 1) or len(parts) == 1, directory, name
            )

    def _plan_of(self, plan: Plan, used: tuple[Part, ...]) -> Plan:
        """The plan of the parts that are run, as ``plan=`` takes it."""
        if len(used) == len(plan.parts):
            return replace(plan, parts=used)
        if len(used) == 1:  # it has all nonzeros
            return replace(plan, parts=used, partition="all", options=(), shares=())
        own = plan.shares or tuple(range(len(plan.parts)))
        return replace(plan, parts=used, shares=tuple(own[n] for n in self.filled))

    def _packed_parts(self, plan: Plan, memory: dict[Any, Any]) -> list[Packed]:
        """Pack the parts, or take them from the tensor's cache, where other einsums may have left them."""
        found = []
        dealt: list[torch.Tensor | None] | None = None
        for number, part in enumerate(plan.parts):
            key = (
                plan.partition,
                plan.options,
                self.canonical.kept if plan.partition != "all" else (),
                plan.shares[number] if plan.shares else number,
                part.format,
                part.layout,
            )
            if key not in memory:
                if dealt is None:
                    dealt = shares(plan, self.canonical.coords, self.canonical.shape, self.canonical.kept)
                own = dealt[number]
                coords = self.canonical.coords if own is None else self.canonical.coords[:, own]
                memory[key] = pack(coords, self.canonical.shape, part.format, part.layout).of(own)
            packed = memory[key]
            if self.canonical.source is not None:
                packed = packed.of(
                    self.canonical.source if packed.source is None else self.canonical.source[packed.source]
                )
            found.append(packed)
        return found

    def _needs_second_pass(self, parts: list[BoundPart]) -> bool:
        """Whether sums must not depend on the order of atomics, and would; integers' never do."""
        if not self.settings.deterministic or self.backend == "torch" or not self._x.dtype.is_floating_point:
            return False
        adds = [s for p in parts for s, _ in walk(p.program.body) if isinstance(s, Add)]
        if all(s.owned for s in adds):
            return False
        if any(p.packed.view.sides for p in parts):
            raise PlanError('dense tiles add by atomics, which is not deterministic; take "coo", "fiber" or "rows"')
        program = parts[0].program
        summed_over_grid = any(a.letter not in program.output_axes for a in program.split)
        if len(parts) > 1 or summed_over_grid:
            raise PlanError(
                f"plan {self.choice.plan.name!r} adds to output rows from several parts or blocks at once, which is "
                'not deterministic; take "coo", "fiber", "rows" or "auto"'
            )
        return True

    def _row_of_nonzeros(self) -> torch.Tensor:
        """(nnz of the operand,) the output row each nonzero adds to."""
        if self.output.sparse:
            return self._slot_of_nonzeros()
        row = torch.zeros(self.canonical.coords.shape[1], dtype=torch.long, device=self._x.device)
        for mode in self.canonical.kept:
            row = row * self.canonical.shape[mode] + self.canonical.coords[mode]
        if self.canonical.source is None:
            return row
        return row.new_zeros(self._x.nnz).index_copy(0, self.canonical.source, row)

    def _bound_part(self, part: Part, packed: Packed, number: int, partial: int = 0) -> BoundPart:
        """Lower one part; `partial` is a number of partial rows, one for each result the part would add."""
        target = Target(
            sparse=self.output.sparse or bool(partial),
            natural=not partial and packed.positions is None and packed.source is None and self.output.slot is None,
            owned=bool(partial) or self._is_owned(packed),
            rows=partial or self.output.rows,
            wide=packed.wide,
        )
        floating = self._x.dtype.is_floating_point or self._x.dtype.is_complex
        program = lower(
            self.canonical.bound,
            packed.view,
            part.schedule if floating else replace(part.schedule, dot=False),  # integers have no matrix instruction
            target,
            number=number,
            format=part.format,
            unroll=part.layout.unroll,
        )
        slot = None
        if program.slot:
            if partial:
                slot = torch.arange(partial, device=self._x.device)
            elif packed.view.sides:
                slot = item_slots(packed, *self._of_part(packed))
            else:
                slot = packed.slots(_key_level(program), self._slot_of_nonzeros())
        if program.dots and self._x.dtype == torch.float64 and self.backend == "triton":
            packed = _wide_words(packed)
        return BoundPart(program, packed, slot)

    def _slot_of_nonzeros(self) -> torch.Tensor:
        slot = self.output.slot
        if slot is None:
            slot = torch.arange(self._x.nnz, device=self._x.device)
        elif self.canonical.source is not None:  # slots are given per kept nonzero; packed parts know the original's
            whole = slot.new_zeros(self._x.nnz)
            whole[self.canonical.source] = slot
            slot = whole
        return slot

    def _of_part(self, packed: Packed) -> tuple[torch.Tensor, torch.Tensor]:
        """(coords, output slots) of a part's nonzeros."""
        slot = self._slot_of_nonzeros()
        coords = self.canonical.coords
        if self.canonical.source is not None:  # the part numbers the original's nonzeros
            whole = coords.new_zeros((coords.shape[0], self._x.nnz))
            whole[:, self.canonical.source] = coords
            coords = whole
        source = packed.source
        return (coords, slot) if source is None else (coords[:, source], slot[source])

    def _is_owned(self, packed: Packed) -> bool:
        """Whether no two work items of any part add to the same output row."""
        whole = len(self.filled) == 1 or PARTITIONS[self.choice.plan.partition].whole_rows
        at = Circumstances(self.canonical.kept, self.backend, self.output.sparse, self.setting.distinct, whole)
        return owns(packed.view, at, cut=packed.cut, padded=packed.padded, items=packed.items)

    def _pack_values(self) -> None:
        self._version = self._values_of._version
        dtype = accumulator(self._x.dtype) if self.backend == "torch" else self._x.dtype
        values = resolved(self._values_of.detach()).to(dtype)
        self._values = [p.packed.pack_values(values).to(self._stored_dtype(p)) for p in self.parts]

    def _stored_dtype(self, part: BoundPart) -> torch.dtype:
        """How a part's values are stored."""
        if self.backend == "torch":
            return accumulator(self._x.dtype)
        return part.value_dtype(self._x.dtype)

    # -- calls ------------------------------------------------------------------------------------------------------
    def __call__(self, *dense: torch.Tensor) -> torch.Tensor | SparseTensor:
        """Run with these dense operands, in the order the equation names them.

        Returns a dense tensor, or a `SparseTensor` where the output keeps the sparse operand's pattern. Gradients flow
        to the dense operands and to the sparse operand's values.
        """
        own = converted(as_given(self.canonical.written, dense), self._x.dtype, self.canonical.device)
        self.canonical.check(own)
        given = self.canonical.slices(own)
        if given is None:  # in full, along a dimension that was broadcast when this was compiled
            return self._unbroadcast.with_values(self._values_of)(*own)
        learned = torch.is_grad_enabled() and self._values_of.requires_grad
        # Changed in place since they were packed; what is learned may be changed through .data, which leaves no trace.
        if learned or self._values_of._version != self._version:
            self._pack_values()
        if learned or (torch.is_grad_enabled() and any(d.requires_grad for d in given)):
            rows = differentiable(self, self._values_of, given)
        else:
            rows = self.run(given)
        return without_zeros(self._wrap(rows)) if self.drop_zeros else self._wrap(rows)

    def run(self, dense: Sequence[torch.Tensor]) -> torch.Tensor:
        """The result as (rows, *dense sizes), of the dense operands of the narrow einsum, outside autograd."""
        with without_autocast(self.canonical.device), in_order(self.settings.deterministic):
            return self._run(dense)

    def _run(self, dense: Sequence[torch.Tensor]) -> torch.Tensor:
        out, x = self.output, self._x
        kept = accumulator(x.dtype)
        narrow_store = self._owned and self.backend == "triton" and x.dtype.is_floating_point
        make = torch.zeros if self._zero else torch.empty
        result = make((out.rows, *out.width_shape), dtype=x.dtype if narrow_store else kept, device=x.device)
        if result.numel() and x.nnz:
            tables = self.canonical.arrange(dense, self.settings)
            if self.backend == "torch" and kept != x.dtype:
                tables = [t.to(kept) for t in tables]
            if all(t.numel() for t in tables):
                if self._reads_zeros and not finite(tables):
                    return self._by_nonzeros.with_values(self._values_of)._run(dense)
                if self._second is None:
                    self.launch(self._values, tables, result)
                else:
                    # Zeros, since what is padding stores nothing.
                    partial = torch.zeros((self._second.partials, *out.width_shape), dtype=kept, device=x.device)
                    self.launch(self._values, tables, partial)
                    self._second(partial, result)
            elif not self._zero:  # a sum over no elements
                result.zero_()
        return fitted(result, self._result_dtype, f'the result of "{self.equation}"')

    @cached_property
    def _reads_zeros(self) -> bool:
        """Whether a part multiplies positions that hold no nonzero, which an infinity would turn into NaN."""
        numbers = self._x.dtype.is_floating_point or self._x.dtype.is_complex
        return numbers and any(
            p.packed.view.sides or (p.packed.padded and not p.packed.view.blocks) for p in self.parts
        )

    @cached_property
    def _by_nonzeros(self) -> Kernel:
        """The same einsum by a plan that multiplies nonzeros alone; made when a dense operand is first not finite."""
        return Kernel(self.canonical, self._x, replace(self.settings, plan="coo"), self._form)

    @property
    def _result_dtype(self) -> torch.dtype:
        """The operands' dtype; of a sum over one operand, that of torch's sums."""
        e = self.canonical.written.einsum
        return summed_dtype(self._x.dtype) if len(e.inputs) == 1 and e.contracted else self._x.dtype

    def _wrap(self, rows: torch.Tensor) -> torch.Tensor | SparseTensor:
        out = self.output
        if out.pattern is None:
            result = rows.reshape((*out.kept_shape, *out.width_shape))
            return result if out.permutation is None else result.permute(out.permutation)
        shape = (*out.kept_shape, *out.width_shape)
        sparse = SparseTensor._make(out.pattern, rows, shape, coalesced=self._x.is_coalesced or out.slot is None)
        if out.permutation is None:
            return sparse
        return sparse.expand_dense().permute(*out.permutation)

    def with_values(self, values: torch.Tensor) -> Kernel:
        """The same kernel for other values of the same pattern: (nnz,), in the sparse operand's order.

        Nothing is planned, packed or generated again; only the values are put in place.
        """
        if not isinstance(values, torch.Tensor) or values.shape != self._values_of.shape:
            found = tuple(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
            raise ShapeError(f"values must have shape {tuple(self._values_of.shape)}, found {found}")
        if values.dtype != self._x.dtype or values.device != self._x.device:
            raise DtypeError(
                f"values must be {self._x.dtype} on {self._x.device}, found {values.dtype} on {values.device}"
            )
        other = copy.copy(self)
        other._values_of = values
        other._pack_values()
        return other

    @cached_property
    def _unbroadcast(self) -> Kernel:
        """The same einsum for dense operands of full size."""
        bound = self.canonical.written
        given = [
            self._x if p in bound.einsum.sparse else self._x.values.new_empty(()).expand(bound.shape(p))
            for p in range(len(bound.einsum.inputs))
        ]
        return Kernel(canonicalise(bound, given, narrow=False), self._x, self.settings, self._form)

    @property
    def operand(self) -> SparseTensor:
        """The sparse operand, with the values in use."""
        return self._x.with_values(self._values_of) if self._values_of is not self._x.values else self._x

    @cached_property
    def slotted_source(self) -> torch.Tensor | None:
        """Which of the sparse operand's nonzeros `slotted_operand` holds, sorted by slot; None for all, as they are."""
        slot, source = self.output.slot, self.canonical.source
        if slot is None:
            return source
        order = torch.argsort(slot, stable=True)
        return order if source is None else source[order]

    @cached_property
    def slotted_operand(self) -> SparseTensor:
        """The operand with one more mode in front: the slot of a sparse output that each nonzero adds to."""
        canonical, source = self.canonical, self.slotted_source
        slot = self.output.slot
        slot = torch.arange(canonical.coords.shape[1], device=self._x.device) if slot is None else slot.sort().values
        values = self._values_of.detach()
        coords = self._x.coords if source is None else self._x.coords[:, source]
        values = values if source is None else values[source]
        shape = (self.output.rows, *canonical.written.shape(canonical.written.einsum.sparse[0]))
        return SparseTensor._make(torch.cat([slot.unsqueeze(0), coords]), values, shape, self._x.is_coalesced)

    # -- what a user may look at ------------------------------------------------------------------------------------
    @property
    def equation(self) -> str:
        """The einsum as written."""
        return self.canonical.written.einsum.text

    @property
    def source(self) -> str:
        """The generated program's text."""
        return self.launch.source

    @property
    def path(self) -> Path:
        """The file it lies in."""
        return self.launch.path

    @property
    def programs(self) -> tuple[TileProgram, ...]:
        """The tile programs of the parts."""
        return tuple(p.program for p in self.parts)

    def ptx(self, target: str = "sm_90") -> str:
        """The assembly for a named target (``sm_80``, ``sm_90``, ``sm_100``, ``gfx942``, …); needs no GPU.

        Where the generated torch programs run, this is that of the Triton kernels which a GPU would run instead.
        """
        kernel = self if isinstance(self.launch, TritonLaunch) else self._triton_twin
        assert isinstance(kernel.launch, TritonLaunch)
        dtype = self._x.dtype
        out = dtype if kernel._owned and dtype.is_floating_point else accumulator(dtype)
        compiled = kernel.launch.compile_for(target, out)
        return "\n".join(c.asm["ptx"] if "ptx" in c.asm else c.asm["amdgcn"] for c in compiled)

    @cached_property
    def _triton_twin(self) -> Kernel:
        """The same einsum planned and packed for a GPU, its kernels generated and never launched."""
        if self._x.dtype.is_complex:
            raise PlanError("complex einsums run the generated torch programs, which have no PTX")
        return Kernel(self.canonical, self._x, replace(self.settings, backend="triton"), self._form)

    def explain(self) -> Explanation:
        """Parts, formats, costs, and why this plan: prints as a table; ``to_dict()`` gives the same as data."""
        with self._in_place():
            return explain(self)

    @cached_property
    def nnz(self) -> int:
        """Nonzeros of the sparse operand."""
        return self._x.nnz

    def __repr__(self) -> str:
        return f'Kernel("{self.equation}", plan {self.plan.name}, {self.backend}, {self.path.name})'


def _backend(settings: Options, x: SparseTensor) -> str:
    backend = settings.effective_backend(x.device)
    # Triton has no complex numbers; torch's own kernels do.
    return "torch" if x.dtype.is_complex else backend


def _dot_precisions(precision: str, x: SparseTensor) -> list[str]:
    """Of dots: what a setting stands for with operands of this type on this machine, then what is more exact."""
    if x.dtype in (torch.float16, torch.bfloat16):
        found = ["tf32"]  # holds both types exactly, and what it rounds a product to is no coarser than the result
    elif x.dtype != torch.float32:
        found = ["ieee"]
    else:
        ladder = {"medium": "bf16", "high": "tf32", "highest": "tf32x3"}
        found = list(ladder.values())[list(ladder).index(precision) :]
    return list(dict.fromkeys(portable(one, machine_of((x.values,))) for one in found))


def _key_level(program: TileProgram) -> int:
    """The level at which a program adds."""
    return next(s.key.level for s, _ in walk(program.body) if isinstance(s, Add))


def _add_owned(program: TileProgram) -> bool:
    return all(s.owned for s, _ in walk(program.body) if isinstance(s, Add))


def _wide_words(packed: Packed) -> Packed:
    """Words of 16 bits as 32: Triton 3.6 and 3.7 abort on a float64 dot of rows addressed by narrower words."""
    arrays = {name: a.int() if a.element_size() == 2 else a for name, a in packed.arrays.items()}
    return replace(packed, arrays=arrays)
