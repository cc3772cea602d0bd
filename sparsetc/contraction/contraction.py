"""Contraction: an einsum compiled for the patterns of its sparse operands, as a list of steps; it holds no values.

In: equation, operands, options. Out: a `Contraction`, new or kept with the pattern of its first sparse operand. It is
the base of all kinds, with what a kernel asks of them: `Step`, of one sparse operand and whatever dense ones there
are; `Pair`, of two sparse operands; `Path`, whose links are contractions; and `Rewritten`, a contraction of another
einsum, of blocks or of entries with dense modes, with how operands and result are rewritten.
"""

from __future__ import annotations

import itertools
import logging
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.profiler import record_function

from sparsetc.codegen.launch import Values
from sparsetc.contraction.autograd import UNREAD, following
from sparsetc.contraction.canonical import Operands, Patterns, Tensors, check_operand, repeated_dims, stand_in
from sparsetc.contraction.guard import IntegerSums
from sparsetc.contraction.output import KEEP_SPARSE, Result, check_form, is_sparse, without_zeros
from sparsetc.contraction.prepare import Preparation, in_place
from sparsetc.device.profile import of_backend
from sparsetc.explain import Explanation, StepReport, device_name
from sparsetc.ir.equation.einsum import Bound
from sparsetc.ir.equation.parse import parse
from sparsetc.ir.plan import STEPS, requested
from sparsetc.options import Options
from sparsetc.planner.candidate import Choice
from sparsetc.runtime.executable import Inspectable
from sparsetc.support import memory
from sparsetc.support.notices import log_since
from sparsetc.support.progress import bar
from sparsetc.tensor.pattern import Pattern, lasting, transforming
from sparsetc.tensor.sparse_tensor import SparseTensor
from sparsetc.tensor.sums import INTEGERS, captured, result_bytes, summed_dtype

if TYPE_CHECKING:
    from sparsetc.contraction.path import Path

_numbers = itertools.count()


class Contraction(Inspectable, ABC):
    """What a kernel runs: an einsum compiled for the patterns of its operands.

    What `inner` holds, steps or contractions, says all that is not said here.

    Attributes:
        key: the name by which operators of `torch.library` know the contraction.
        compiled_for: the pattern of each sparse operand, and the shape of its values.
        sparse: whether the result is a SparseTensor.
        pattern: the pattern of a sparse result, where it was found when the contraction was compiled.
        rewrites: the einsums that are run in its place, and why.
        empty: whether no nonzeros take part, so that the result has no positions, and is 0 where it is dense.
        shape: the shape of what `result` gives.
        result_dtype: the dtype of what `result` gives.
        sums: what finds sums of integers that pass 64 bits; None where none can.
        equation: the einsum as written.
        number: no other contraction in this process has it.
        bare: the patterns of the sparse operands, with nothing kept.
        kernels: those that live, which have values packed, by the ids of the tensors of these.
    """

    key: str
    compiled_for: tuple[tuple[weakref.ref[Pattern], torch.Size], ...]
    pattern: Pattern | None = None
    rewrites: tuple[str, ...] = ()
    sparse: bool
    empty: bool
    shape: tuple[int, ...]
    result_dtype: torch.dtype

    def __init__(self, bound: Bound, operands: Operands, settings: Options, form: str, expanded: bool = True) -> None:
        """Check dtypes, devices, the form and the size of a dense result; nothing is kept of the values.

        Args:
            bound: the einsum as written.
            operands: its operands.
            settings: plan, precision, memory limit, backend, determinism.
            form: of the output that was asked for: ``auto``, ``dense`` or ``sparse``.
            expanded: whether dense modes become coordinates.

        Raises:
            OutOfMemoryError: a dense result would pass the memory limit.
            DtypeError, DeviceError: operands differ.
            PlanError: the form is not known, or is ``sparse`` of a result without a pattern.
        """
        sparse = [o for o in operands if isinstance(o, SparseTensor)]
        self.bound, self.settings, self.form, self.number = bound, settings, form, next(_numbers)
        self.equation = bound.einsum.text
        self.dtype, self.device = sparse[0].dtype, sparse[0].device
        self.result_dtype = self.dtype
        self.kernels: weakref.WeakValueDictionary[tuple[int, ...], Any] = weakref.WeakValueDictionary()
        for position, operand in enumerate(operands):
            check_operand(operand, position, self.dtype, self.device)
        e = bound.einsum
        check_form(form, e)
        orders = [x.order if expanded else x.sparse_order for x in sparse]
        self.sparse = is_sparse(form, e, [e.inputs[p][:order] for p, order in zip(e.sparse, orders, strict=True)])
        if not self.sparse:
            nbytes = prod(bound.output_shape) * result_bytes(self.dtype)
            memory.check(f"the result of {bound}", nbytes, self.device, settings.memory_limit, KEEP_SPARSE)
        self.sums = IntegerSums.of(bound, sparse) if self.dtype in INTEGERS else None
        self.bare = [x.pattern.bare() for x in sparse]
        # Intermediate sums may need 64 bits where the result does not.
        self._like = torch.zeros((), dtype=summed_dtype(self.dtype), device=self.device)

    def known_pattern(self, patterns: Patterns, pattern: Pattern) -> Pattern:
        """The pattern of a result on these patterns, or its equal that an einsum of the same operands has."""
        (first, *others), e = patterns, self.bound.einsum
        return first.known((e.inputs, e.output, e.sparse, self.bound.sizes), pattern, others)

    @property
    def steps(self) -> Sequence[Any]:
        """The contractions that run no others, in order: of one sparse operand, or of two."""
        return tuple(step for one in self.inner for step in getattr(one, "steps", ())) or (self,)

    @property
    def settled(self) -> bool:
        """Whether the plans of all steps are decided."""
        return all(getattr(one, "settled", True) for one in self.inner)

    @property
    def result_size(self) -> int:
        """Entries of a sparse result, elements of a dense one."""
        return self.shape[0] if self.sparse else prod(self.shape)

    def reports(self) -> list[StepReport]:
        """Return the report of each step, for an explanation."""
        return [report for one in self.inner for report in one.reports()]

    def explain(self) -> Explanation:
        """Steps and their parts, costs, and why this plan."""
        with in_place(self.settings, self.device):
            plan, profile = self.plan, of_backend(self.backend)
            about = self.bound.einsum.text, plan.name, plan.reason, self.backend, device_name(self.device)
            reports = tuple(self.reports())
            nnz = self.result_size if len(reports) > 1 or len(self.bound.einsum.sparse) > 1 else None
            return Explanation(*about, profile.describe(), profile.measured, reports, nnz, self.rewrites)

    def pattern_on(self, patterns: Patterns) -> Pattern | None:
        """The pattern of a sparse result, given those of the operands, one of which it may be; None of a dense one."""
        return self.pattern

    def packed(self, values: Tensors) -> Values | None:
        """Return the sparse operands' values as the storages have them; None where each call reads them as they are."""
        return None

    @abstractmethod
    def result(self, patterns: Patterns, values: Tensors, dense: Tensors, packed: Values | None = None) -> torch.Tensor:
        """A dense result, or a sparse one's values; differentiable. Integers are made modulo 2**64: see `evaluate`."""

    def evaluate(
        self, patterns: Patterns, values: Tensors, dense: Tensors, packed: Values | None = None
    ) -> torch.Tensor:
        """The result of the same arguments.

        Raises:
            DtypeError: a sum of integers does not fit in 64 bits. Nothing is looked at while a CUDA graph is captured
                or a transform of `torch.func` is active.
        """
        with self._profiled() if torch.autograd._profiler_enabled() else nullcontext():
            result = self.result(patterns, values, dense, packed)
        if self.sums is not None and not transforming() and not captured(result):
            self.sums.check(self, result, patterns, values, dense)
        return result

    def _profiled(self) -> record_function:
        """Return a range of torch's profiler, and of NVTX under `torch.autograd.profiler.emit_nvtx`."""
        return record_function(f'sparsetc "{self.equation}" {self.plan.name}')

    def gradient(
        self, patterns: Patterns, operand: int, values: Tensors, dense: Tensors, upstream: torch.Tensor
    ) -> torch.Tensor:
        """The gradient for one of values and dense operands, given that of the result; outside autograd."""
        tensors = [t.detach() for t in (*values, *dense)]
        wanted = tensors[operand].requires_grad_()
        with following():
            result = self.result(patterns, tensors[: len(values)], tensors[len(values) :], UNREAD)
            return torch.autograd.grad(result, wanted, upstream)[0]


known: weakref.WeakValueDictionary[str, Contraction] = weakref.WeakValueDictionary()
"""Contractions by key, for as long as they live: what operators of `torch.library` look them up in."""
T = TypeVar("T")


def wrap(made: Contraction, values: torch.Tensor, patterns: Patterns, drop_zeros: bool = False) -> Result:
    """The result of a contraction on operands of these patterns, from its values."""
    pattern = made.pattern_on(patterns)
    if pattern is None:
        return values
    result = SparseTensor._make(pattern, values)
    return without_zeros(result) if drop_zeros else result


def contraction(
    bound: Bound, operands: Operands, settings: Options, form: str, repeated: bool = False, choice: Choice | None = None
) -> Contraction:
    """Compile an einsum; `repeated` as `canonicalise` takes it, `choice` as `Step` does, where there is one step."""
    # Gradients are made, and copies compiled, in the precision that was in force here.
    settings, start = replace(settings, precision=settings.effective_precision()), time.perf_counter()
    with bar(None, f'compiling "{bound.einsum.text}"'), lasting():
        inputs = [*map(stand_in, operands)]
        path = choice or _path(bound, inputs, settings, form, repeated)
        if isinstance(path, Contraction):
            made: Contraction = path
        else:
            made = _compiled(bound, inputs, settings, form, repeated, path)
    # The name says what the shapes of operands and result follow from, and no other in this process has it: what torch
    # keeps on disk of a graph that the contraction stands in is not to be taken for another's.
    made.key = f"{made.bound} {made.dtype} {made.sparse} {tuple(made.shape)} #{made.number}"
    sparse = (o for o in operands if isinstance(o, SparseTensor))
    made.compiled_for = tuple((weakref.ref(x.pattern), x._values.shape) for x in sparse)
    known[made.key] = made
    log_since(start, logging.INFO, 'compiled "%s", plan %s, on %s', bound.einsum.text, made.plan.name, made.device)
    return made


def _path(bound: Bound, operands: Operands, settings: Options, form: str, repeated: bool) -> Path | Choice | None:
    """Return the path of an einsum, or the plan of one pass; None where that is to be chosen."""
    wanted = requested(settings.plan)
    if len(operands) < 3 and not (settings.path or wanted.path or wanted == STEPS):
        return None
    from sparsetc.contraction.path import in_steps  # which few einsums need

    return in_steps(bound, operands, settings, form, repeated)


def _compiled(
    bound: Bound,
    operands: Operands,
    settings: Options,
    form: str,
    repeated: bool,
    choice: Choice | None = None,
    plain_sum: bool | None = None,
) -> Contraction:
    """Compile an einsum: as it is, a few operands at a time, or as that of blocks, or of entries, where it has one."""
    from sparsetc.contraction.step import Step

    sparse = [o for o in operands if isinstance(o, SparseTensor)]
    if any(x._values.ndim > 1 for x in sparse):
        from sparsetc.contraction.path import Path
        from sparsetc.contraction.rewrites import rewrites_of
        from sparsetc.contraction.rewritten import Rewritten

        if len(sparse) > 2 and not requested(settings.plan).by_nonzeros:
            return Path(bound, operands, settings, form, expanded=False)
        if rewrites := rewrites_of(bound, operands, settings, form, repeated):
            last, plain_sum = rewrites[-1], bound.einsum.plain_sum
            inner = partial(_compiled, last.bound, last.operands, settings, last.form, repeated, None, plain_sum)
            return Rewritten(bound, operands, settings, form, rewrites, inner)
    if len(sparse) == 1:
        step = Step(bound, operands, settings, form, repeated, plain_sum, choice)
        if settings.effective_tune()[0] != "model":
            from sparsetc.contraction.tuned import tune

            tune(step)
        step.pattern_on(step.bare)  # found here, and not while a CUDA graph is captured
        return step
    from sparsetc.products.problem import paired  # imported where an einsum has two sparse operands, which few have

    paired(settings.plan, bound.einsum.indices)  # refused at once where it is not known
    if len(operands) == 2:
        from sparsetc.contraction.pair import Pair

        return Pair(bound, operands, settings, form)
    from sparsetc.contraction.path import Path

    return Path(bound, operands, settings, form, expanded=True)


def compiled(text: str, operands: Operands, settings: Options, form: str) -> Contraction:
    """The contraction kept for these patterns, this equation and these sizes, or a new one."""
    first, *others = (o._pattern for o in operands if isinstance(o, SparseTensor))
    key = _key(text, operands, settings, form)
    return _kept(first, key, lambda: contraction(parsed(text, operands), operands, settings, form, True), others)


def kept(text: str, operands: Operands, settings: Options, form: str) -> Contraction | None:
    """The contraction that is kept for these patterns, this equation and these sizes; None where there is none yet."""
    first = next(o for o in operands if isinstance(o, SparseTensor))
    if first._unsorted is not None:
        return None
    try:
        return first._pattern.cache.get(_key(text, operands, settings, form))  # type: ignore[no-any-return]
    except TypeError:  # a plan that cannot be hashed
        return None


def _kept(first: Pattern, key: Any, make: Callable[[], T], others: Sequence[Pattern] = ()) -> T:
    """What is kept with a pattern by a key, for as long as the others live; made where it is not there."""
    try:
        kept: T | None = first.cache.get(key)
    except TypeError:  # a plan that cannot be hashed
        return make()
    return first.cache.put(key, make(), needs=others) if kept is None else kept


def _key(text: str, operands: Operands, settings: Options, form: str) -> tuple[Any, ...]:
    """What a contraction is kept by, with the pattern of its first sparse operand."""
    # What of an operand, beside its shape, dtype and device, decides how it is read.
    dims = [repeated_dims(o) if isinstance(o, torch.Tensor) else None for o in operands]
    kinds = [(o.shape, o.dtype, o.device) for o in operands]
    others = [weakref.ref(o._pattern) for o in operands if isinstance(o, SparseTensor)][1:]
    return "kernel", text, tuple(kinds), tuple(dims), tuple(others), settings, form, settings.effective_precision()


def parsed(text: str, operands: Operands) -> Bound:
    """The einsum of a text and operands."""
    return parse(text, [tuple(o.shape) for o in operands], [isinstance(o, SparseTensor) for o in operands])


Workload = Sequence[tuple[str, Operands]]
"""Equations with their operands, the first of each being the sparse one."""


def compiled_together(
    workload: Workload, settings: Options, form: str, repeated: bool = False
) -> tuple[Contraction, ...]:
    """Compile einsums of one sparse operand.

    They are planned together where each is one step of a tensor without dense modes and blocks; otherwise each alone.

    Args:
        workload: equations with operands; values are only looked at for their dtypes.
        settings: the plan, the memory limit and all else that is common to them.
        form: of the results, ``auto``, ``dense`` or ``sparse``.
        repeated: as `canonicalise` takes it.
    """
    from sparsetc.planner.workload import choose_together  # which an import of the package does not need

    settings = replace(settings, precision=settings.effective_precision())
    bounds = [parsed(text, operands) for text, operands in workload]
    each_operands = [operands for _, operands in workload]
    x = each_operands[0][0]
    assert isinstance(x, SparseTensor)
    choices: Sequence[tuple[Choice | None, Any]] | None = None
    plain = not x.dense_order and not x.blocksize and all(len(b.einsum.sparse) == 1 for b in bounds)
    if plain:
        with lasting():
            problems = [
                Preparation(b, operands, settings, form, repeated).problem
                for b, operands in zip(bounds, each_operands, strict=True)
            ]
            with in_place(settings, x.device):
                limit = settings.memory_on(x.device)
                choices = choose_together(settings.plan, problems, limit)
    choices = choices or [(None, settings.plan)] * len(bounds)
    return tuple(
        contraction(bound, operands, replace(settings, plan=again), form, repeated, choice)
        for bound, operands, (choice, again) in zip(bounds, each_operands, choices, strict=True)
    )


def kept_together(workload: Workload, settings: Options, form: str) -> tuple[Contraction, ...]:
    """The contractions that are kept with the sparse operand's pattern for this workload, or new ones."""
    x = workload[0][1][0]
    assert isinstance(x, SparseTensor)
    key = ("workload", *(_key(text, operands, settings, form) for text, operands in workload))
    return _kept(x._pattern, key, lambda: compiled_together(workload, settings, form, repeated=True))
