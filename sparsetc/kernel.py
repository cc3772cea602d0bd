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

from sparsetc import pickles
from sparsetc.autograd import differentiable
from sparsetc.canonical import Canonical, canonicalise
from sparsetc.codegen.launch import BoundPart, TorchLaunch, TritonLaunch, accumulator, machine_of, portable, source_name
from sparsetc.convert import available_memory
from sparsetc.dense import Finite, resolved
from sparsetc.entry import entry_point
from sparsetc.errors import DtypeError, PlanError, ShapeError
from sparsetc.explain import Explanation, OperandReport, device_name
from sparsetc.formats import Packed, pack, storage_of
from sparsetc.formats.tiles import item_slots
from sparsetc.integers import fitted, summed_dtype
from sparsetc.ir.cost import rates_of
from sparsetc.ir.einsum import Bound
from sparsetc.ir.lower import lower
from sparsetc.ir.operands import Target
from sparsetc.ir.plan import Part, Plan
from sparsetc.ir.tile import Add, TileProgram, walk
from sparsetc.kept import VALUES, Kept, lasting
from sparsetc.lru import Lru
from sparsetc.options import Options, in_force
from sparsetc.output import Slotted, output_of, without_zeros
from sparsetc.partition import PARTITIONS, shares
from sparsetc.planner.candidates import Setting
from sparsetc.planner.choice import Choice
from sparsetc.planner.choose import choose
from sparsetc.planner.ownership import Circumstances, owns
from sparsetc.planner.statistics import Counts
from sparsetc.runtime.autocast import without_autocast
from sparsetc.runtime.second_pass import SecondPass
from sparsetc.runtime.segments import in_order
from sparsetc.tensor import Results, SparseTensor


class Kernel:
    """A compiled einsum; call it with the dense operands, in the equation's order.

    It has the sparse operand's values packed, and packs them again at a call where torch's count of versions says that
    they changed, or where they require a gradient. Values changed in any other way, as through ``.data`` or through an
    ndarray of the same memory, are for `with_values`; `einsum` sees those too.

    It pickles as its equation, operand and settings, and is compiled again where it is loaded.
    """

    def __init__(self, canonical: Canonical, x: SparseTensor, settings: Options, output: str) -> None:
        self.canonical, self.settings, self._form = canonical, settings, output
        self.drop_zeros = False
        """Whether calls leave out entries of a sparse result whose value is 0."""
        self._pinned = replace(settings, precision=settings.effective_precision())
        self.backend = _backend(settings, x)
        self.output = output_of(canonical, x, output)
        self._x, self._values_of, self._version = x, x._values, version_of(x._values)
        precision, *finer = _dot_precisions(settings.effective_precision(), x)
        self.setting = Setting(
            canonical.bound,
            canonical.kept,
            len(canonical.letters),
            self.backend,
            precision,
            settings.deterministic,
            x.dtype.itemsize,
            x.dtype.is_floating_point,
            available_memory(x.device) if settings.memory_limit is None else settings.memory_limit,
            x.is_coalesced,
            max(1, self.output.rows),
            x.is_coalesced or (self.output.sparse and self.output.rows == canonical.coords.shape[1]),
            tuple(finer),
            x.dtype.is_floating_point or x.dtype.is_complex,
            self.output.sparse,
        )
        settings.check_memory(
            self.output.rows * self.output.width * accumulator(x.dtype).itemsize,
            x.device,
            f"the result of {canonical.written}",
        )
        # What is packed in another order than the operand's is no other kernel's.
        kept = x._packed if canonical.source is None else Kept()
        self.counts = Counts(canonical.coords, canonical.shape, kept.counts)
        self._slotted = Slotted(canonical, self.output, x)
        self._results = self._results_on(x)
        with self._in_place():
            self.choice: Choice = choose(settings.plan, self.setting, self.counts)
        self._bind(kept)
        e = canonical.written.einsum
        plain_sum = len(e.inputs) == 1 and bool(e.contracted)
        self._result_dtype = summed_dtype(x.dtype) if plain_sum else x.dtype
        whole = any(p.packed.view.sides or (p.packed.padded and not p.packed.view.blocks) for p in self.parts)
        self._reads_zeros = whole and (x.dtype.is_floating_point or x.dtype.is_complex)
        """Whether a part multiplies positions that hold no nonzero, which an infinity would turn into NaN."""
        self._finite, self._others = Finite(), dict[str, Kernel]()
        self._value_keys = [(p.packed.token, self._stored_dtype(p)) for p in self.parts]
        self._wide = accumulator(x.dtype) if self.backend == "torch" else x.dtype
        self._values: list[torch.Tensor | None] | None = None
        self._pack_values()

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """Under the kernel's own options, on its own GPU: there its rates are looked up."""
        device = self.canonical.device
        with in_force(self.settings), torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            yield

    # -- compilation ------------------------------------------------------------------------------------------------
    def _bind(self, kept: Kept) -> None:
        plan = self.choice.plan
        packed = self._packed_parts(plan, kept.parts)
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

    def _results_on(self, x: SparseTensor) -> Results | None:
        """What makes sparse results; None where they have the operand's own pattern, and all that is kept for it."""
        pattern = self.output.pattern
        if pattern is None or (pattern is x._coords and not self.output.width_shape):
            return None
        return Results(pattern, x.is_coalesced or self.output.slot is None)

    def _packed_parts(self, plan: Plan, kept: Lru[Any, Packed]) -> list[Packed]:
        """Pack the parts, or take them from what is kept, where other einsums may have left them."""
        found = []
        dealt: list[torch.Tensor | None] | None = None
        for number, part in enumerate(plan.parts):
            key = (
                plan.partition,
                plan.options,
                self.canonical.kept if plan.partition != "all" else (),
                plan.shares[number] if plan.shares else number,
                part.format,
                storage_of(part.format, part.layout),
            )
            packed = kept.get(key)
            if packed is None:
                if dealt is None:
                    dealt = shares(plan, self.canonical.coords, self.canonical.shape, self.canonical.kept)
                own = dealt[number]
                coords = self.canonical.coords if own is None else self.canonical.coords[:, own]
                packed = kept.put(key, pack(coords, self.canonical.shape, part.format, part.layout).of(own))
            packed = packed.read_by(part.layout)
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
        program = lower(
            self.canonical.bound,
            packed.view,
            part.schedule,
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
        own = self._values_of
        self._version = version_of(own)
        held = self._x._held if own is self._x._values else None
        seen = self._x._seen if held is None and own is self._x._values and counted(own) else None
        found = [self._known_values(key, held, seen) for key in self._value_keys]
        if any(f is None for f in found):
            values = resolved(own.detach() if own.requires_grad else own)
            values = values if values.dtype == self._wide else values.to(self._wide)
            with without_autocast(values.device):
                packed = [self._packed_values(n, values, held) for n in range(len(self.parts))]
            self._values = [*packed]
            if seen is not None and self._version is not None:
                seen.update({k: (self._version, v) for k, v in zip(self._value_keys, packed, strict=True)})
                while len(seen) > VALUES:
                    seen.pop(next(iter(seen)), None)
        else:
            self._values = found

    def _known_values(
        self, key: Any, held: Lru[Any, torch.Tensor] | None, seen: dict[Any, tuple[int, torch.Tensor]] | None
    ) -> torch.Tensor | None:
        """A part's values, packed before from the operand's as they are now; None where that is not known."""
        if held is not None:
            return held.get(key)
        version, packed = (seen or {}).get(key, (None, None))
        return packed if version is not None and version == self._version else None

    def _packed_values(self, number: int, values: torch.Tensor, held: Lru[Any, torch.Tensor] | None) -> torch.Tensor:
        """A part's values; they are held where the operand's will stay what they are."""
        _, stored = key = self._value_keys[number]
        packed = self.parts[number].packed.pack_values(values)
        packed = packed if packed.dtype == stored else packed.to(stored)
        return packed if held is None else held.put(key, packed)

    def _stored_dtype(self, part: BoundPart) -> torch.dtype:
        """How a part's values are stored."""
        if self.backend == "torch":
            return accumulator(self._x.dtype)
        return part.value_dtype(self._x.dtype)

    # -- calls ------------------------------------------------------------------------------------------------------
    @entry_point
    def __call__(self, *dense: torch.Tensor) -> torch.Tensor | SparseTensor:
        """Run with these dense operands, in the order the equation names them.

        Returns a dense tensor, or a `SparseTensor` where the output keeps the sparse operand's pattern. Gradients flow
        to the dense operands and to the sparse operand's values.
        """
        return self.called(dense)

    def called(self, dense: Sequence[torch.Tensor]) -> torch.Tensor | SparseTensor:
        """A call from within."""
        own = self.canonical.settled(dense)
        given = self.canonical.slices(own)
        if given is None:  # in full, along a dimension that was broadcast when this was compiled
            return self._unbroadcast.on(self.operand).called(own)
        values = self._values_of
        learned = values.requires_grad
        # Unchanged since they were packed, as far as torch can tell; what is learned may be changed through .data.
        if self._values is None or learned or self._version is None or self._version != values._version:
            self._pack_values()
        if torch.is_grad_enabled() and (learned or any(d.requires_grad for d in given)):
            rows = differentiable(self, values, given)
        else:
            rows = self.run(given)
        return without_zeros(self._wrap(rows)) if self.drop_zeros else self._wrap(rows)

    def run(self, dense: Sequence[torch.Tensor]) -> torch.Tensor:
        """The result as (rows, *dense sizes), of the dense operands of the narrow einsum, outside autograd."""
        device, ordered = self.canonical.device, self.settings.deterministic and self.backend == "torch"
        if not ordered and not torch.is_autocast_enabled(device.type):
            return self._run(dense)
        with without_autocast(device), in_order(ordered):
            return self._run(dense)

    def _run(self, dense: Sequence[torch.Tensor]) -> torch.Tensor:
        out, x = self.output, self._x
        kept = accumulator(x.dtype)
        narrow_store = self._owned and self.backend == "triton" and x.dtype.is_floating_point
        make = torch.zeros if self._zero else torch.empty
        result = make((out.rows, *out.width_shape), dtype=x.dtype if narrow_store else kept, device=x.device)
        if result.numel() and x.nnz:
            assert self._values is not None
            tables = self.canonical.arrange(dense, self.settings)
            if self.backend == "torch" and kept != x.dtype:
                tables = [t.to(kept) for t in tables]
            if all(t.numel() for t in tables):
                if self._reads_zeros and not self._finite.holds(dense, tables):
                    return self._by_nonzeros._run(dense)
                if self._second is None:
                    self.launch(self._values, tables, result)
                else:
                    # Zeros, since what is padding stores nothing.
                    partial = torch.zeros((self._second.partials, *out.width_shape), dtype=kept, device=x.device)
                    self.launch(self._values, tables, partial)
                    self._second(partial, result)
            elif not self._zero:  # a sum over no elements
                result.zero_()
        if result.dtype == self._result_dtype:
            return result
        return fitted(result, self._result_dtype, f'the result of "{self.equation}"')

    @property
    def _by_nonzeros(self) -> Kernel:
        """The same einsum by a plan that multiplies nonzeros alone; made when a dense operand is first not finite."""
        if "coo" not in self._others:
            settings = replace(self.settings, plan="coo")
            with lasting():
                self._others["coo"] = Kernel(self.canonical, self._x, settings, self._form).bare()
        other = self._others["coo"].on(self.operand)
        other._pack_values()
        return other

    def _wrap(self, rows: torch.Tensor) -> torch.Tensor | SparseTensor:
        out = self.output
        if out.pattern is None:
            result = rows.reshape((*out.kept_shape, *out.width_shape))
            return result if out.permutation is None else result.permute(out.permutation)
        x, shape = self._x, (*out.kept_shape, *out.width_shape)
        if self._results is None:
            sparse = SparseTensor._make(x._coords, rows, shape, x._coalesced, x._packed)
        else:
            sparse = self._results.of(rows, shape)
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
        other = self._twin()
        other._values_of = values
        other._pack_values()
        return other

    @property
    def _unbroadcast(self) -> Kernel:
        """The same einsum for dense operands of full size."""
        if "full" not in self._others:
            bound, like = self.canonical.written, self._x._values.detach().new_empty(())
            given = [
                self._x if p in bound.einsum.sparse else like.expand(bound.shape(p))
                for p in range(len(bound.einsum.inputs))
            ]
            with lasting():
                canonical = canonicalise(bound, given)
                self._others["full"] = Kernel(canonical, self._x, self.settings, self._form).bare()
        return self._others["full"].on(self.operand)

    def on(self, x: SparseTensor) -> Kernel:
        """The kernel for another tensor of its pattern and dtype, whose values are packed when it is called."""
        other = self._twin()
        other._x, other._values_of, other._values = x, x._values, None
        return other

    def bare(self) -> Kernel:
        """The kernel with no values, to be kept for the pattern and called `on` a tensor."""
        return self.on(self._x._bare())

    def _twin(self) -> Kernel:
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def __copy__(self) -> Kernel:
        return self._twin()

    def __deepcopy__(self, memo: dict[int, Any]) -> Kernel:
        return self.on(copy.deepcopy(self.operand, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        equation = pickles.spelled(self.canonical.written)
        return pickles.kernel, (equation, self.operand, self._pinned, self._form, self.drop_zeros)

    @property
    def operand(self) -> SparseTensor:
        """The sparse operand, with the values in use."""
        return self._x if self._values_of is self._x._values else self._x.with_values(self._values_of)

    @property
    def slotted_source(self) -> torch.Tensor | None:
        """Which of the sparse operand's nonzeros `slotted_operand` holds, sorted by slot; None for all, as they are."""
        return self._slotted.source

    @property
    def slotted_operand(self) -> SparseTensor:
        """The operand with one more mode in front, and no values.

        The mode is the slot of a sparse output that each nonzero adds to.
        """
        return self._slotted.pattern

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
            plan, rates, where = self.plan, rates_of(self.backend).describe(), device_name(self.canonical.device)
            return Explanation(self.equation, plan.name, plan.reason, self.backend, where, rates, (self.report(),))

    def report(self) -> OperandReport:
        """What an explanation says of this einsum, alone or as a step of several."""
        from sparsetc.planner.report import report  # which a call does not need

        with self._in_place():
            return report(
                *(self.equation, self.plan, self.choice, self.programs, [p.packed for p in self.parts]),
                *(self.filled, self.setting, self.counts, str(self.path)),
            )

    @cached_property
    def nnz(self) -> int:
        """Nonzeros of the sparse operand."""
        return self._x.nnz

    def __repr__(self) -> str:
        return f'Kernel("{self.equation}", plan {self.plan.name}, {self.backend}, {self.path.name})'


def compile_bound(
    bound: Bound,
    operands: Sequence[SparseTensor | torch.Tensor],
    settings: Options,
    output: str,
    repeated: bool = False,
) -> Kernel:
    """A kernel for an einsum with one sparse operand; `repeated` as `canonicalise` takes it."""
    x = operands[bound.einsum.sparse[0]]
    assert isinstance(x, SparseTensor)
    with lasting():
        return Kernel(canonicalise(bound, operands, repeated), x, settings, output)


def counted(values: torch.Tensor) -> bool:
    """Whether torch's count of changes is believed: no ndarray has the memory, and no optimiser writes to ``.data``."""
    return values.is_cuda and not values.requires_grad and not values.is_inference()


def version_of(values: torch.Tensor) -> int | None:
    """How often values were changed in place, as far as torch knows; None for inference tensors, which do not count."""
    return None if values.is_inference() else values._version


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
    return list(dict.fromkeys(portable(one, machine_of((x._values,))) for one in found))


def _key_level(program: TileProgram) -> int:
    """The level at which a program adds."""
    return next(s.key.level for s, _ in walk(program.body) if isinstance(s, Add))


def _add_owned(program: TileProgram) -> bool:
    return all(s.owned for s, _ in walk(program.body) if isinstance(s, Add))


def _wide_words(packed: Packed) -> Packed:
    """Words of 16 bits as 32: Triton 3.6 and 3.7 abort on a float64 dot of rows addressed by narrower words."""
    arrays = {name: a.int() if a.element_size() == 2 else a for name, a in packed.arrays.items()}
    return replace(packed, arrays=arrays)
