"""Contraction: an einsum compiled for the patterns of its sparse operands; it holds no values.

In: equation, operands, options. Out: a `Contraction`, new or kept with the pattern of its first sparse operand:
rewrites round a leaf, which is a `Step`, of one sparse operand and whatever dense ones there are; a `Pair`, of two
sparse operands; or a `Path`, whose links are contractions.
"""

from __future__ import annotations

import itertools
import logging
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.profiler import record_function

from sparsetc.codegen.launch import Values
from sparsetc.contraction.autograd import UNREAD, following
from sparsetc.contraction.guard import IntegerSums
from sparsetc.contraction.operands import (
    Operands,
    Patterns,
    Tensors,
    check_operand,
    dense_of_call,
    repeated_dims,
    stand_in,
    stand_ins,
)
from sparsetc.contraction.output import Result, check_form, sparse_result, without_zeros
from sparsetc.contraction.pair import Pair
from sparsetc.contraction.prepare import in_place, problem_of
from sparsetc.contraction.request import Request, Rewrite
from sparsetc.contraction.rewrites import Pull, put_back, rewrites_of
from sparsetc.contraction.step import Step
from sparsetc.contraction.tuned import tune
from sparsetc.device.profile import of_backend
from sparsetc.errors import TransformError
from sparsetc.explain import Explanation, device_name
from sparsetc.ir.equation.einsum import Bound, Einsum
from sparsetc.ir.equation.parse import parse
from sparsetc.ir.plan import ONE_PASS, STEPS, requested
from sparsetc.options import Options
from sparsetc.planner.candidate import Choice
from sparsetc.planner.registry import by_nonzeros
from sparsetc.planner.workload import choose_together
from sparsetc.products.problem import paired
from sparsetc.support.notices import log_since
from sparsetc.support.progress import bar
from sparsetc.tensor.pattern import Labels, Pattern, check_labels, followed, lasting, transforming
from sparsetc.tensor.sparse_tensor import SparseTensor
from sparsetc.tensor.sums import INTEGERS, captured

_numbers = itertools.count()


class Contraction:
    """An einsum compiled for the patterns of its operands: rewrites around the leaf that runs.

    Attributes:
        key: the name by which operators of `torch.library` know the contraction.
        compiled_for: the pattern of each sparse operand, and the shape of its values.
        leaf: what is planned and run: a `Step` of one sparse operand, a `Pair` of two, or a `Path`.
        pull: how operands of the leaf follow from those of a call.
        rewrites: the einsums that are run in its place, and why.
        sparse: whether the result is a SparseTensor.
        empty: whether no nonzeros take part, so that the result has no positions, and is 0 where it is dense.
        shape: the shape of what `result` gives.
        result_dtype: the dtype of what `result` gives.
        sums: what finds sums of integers that pass 64 bits; None where none can.
        equation: the einsum as written.
        bare: the patterns of the sparse operands, with nothing kept.
        kernels: those that live, which have values packed, by the ids of the tensors of these.
        _inner: the pattern of each sparse operand of the leaf, or which one of a call's it is.
        _pattern: the pattern of a sparse result, or which one of a call's it is; None of a dense one.
        _pushes: what is done to the leaf's result.
        _holds: what says whether rewrites serve the dense operands of a call; None where they serve all.
    """

    key: str

    def __init__(self, request: Request, choice: Choice | None = None) -> None:
        """Check dtypes, devices, the form and the size of a dense result, and compile; nothing is kept of the values.

        Args:
            request: the einsum as written.
            choice: of the plan, where there is one step.

        Raises:
            OutOfMemoryError: a dense result would pass the memory limit.
            DtypeError, DeviceError: operands differ.
            PlanError: the form is not known, or is ``sparse`` of a result without a pattern.
        """
        bound = request.bound
        settings = request.settings
        sparse = request.sparse
        self.bound = bound
        self.settings = settings
        self.form = request.form
        self.equation = bound.einsum.text
        self.dtype, self.device = sparse[0].dtype, sparse[0].device
        self.kernels: weakref.WeakValueDictionary[tuple[int, ...], Any] = weakref.WeakValueDictionary()
        for position, operand in enumerate(request.operands):
            check_operand(operand, position, self.dtype, self.device)
        check_form(request.form, bound.einsum)
        sparse_result(request, expanded=True)
        self.sums = IntegerSums.of(bound, sparse) if self.dtype in INTEGERS else None
        patterns = [x.pattern for x in sparse]
        self.bare = [pattern.bare() for pattern in patterns]
        self.compiled_for = tuple((weakref.ref(x._pattern), x._values.shape) for x in sparse)
        self._others = dict[str, Contraction]()
        self.leaf: Any
        self.leaf, rewrites, inner = _leaf(request, choice)
        self.pull = Pull.of(bound.einsum, rewrites)
        self.rewrites = tuple(f"{rewrite.inner.bound.einsum}   {rewrite.name}" for rewrite in rewrites)
        self._holds = rewrites[0].holds if rewrites else getattr(self.leaf, "holds", None)
        leaf_patterns = [x.pattern for x in inner.sparse]
        self._inner = [_place(pattern, patterns) for pattern in leaf_patterns]
        self._as_given = self._inner == [*range(len(patterns))]
        self.empty, self.result_dtype = self.leaf.empty, self.leaf.result_dtype
        leaf_pattern = self.leaf.pattern_on(leaf_patterns)  # here, and not while a CUDA graph is captured
        pattern, self._pushes = put_back(patterns, rewrites, leaf_pattern, self.empty)
        self.sparse, self.shape = pattern is not None, bound.output_shape
        if pattern is not None:
            self.shape = pattern.values_shape(bound.output_shape[pattern.order :])
        self._pattern = None if pattern is None else _place(pattern, patterns)
        labels = _labels_by_letter(bound.einsum, patterns, 0 if pattern is None else pattern.order)
        if isinstance(self._pattern, Pattern):
            self._pattern.labels = labels

    @property
    def steps(self) -> Sequence[Any]:
        """The contractions that run, in order: steps of one sparse operand, or pairs of two."""
        return getattr(self.leaf, "steps", (self.leaf,))

    @property
    def settled(self) -> bool:
        """True if the plans of all steps are decided; False while candidates take turns in calls."""
        return all(getattr(step, "trials", None) is None for step in self.steps)

    @property
    def result_size(self) -> int:
        """Entries of a sparse result, elements of a dense one."""
        return self.shape[0] if self.sparse else prod(self.shape)

    def explain(self) -> Explanation:
        """Steps and their parts, costs, and why this plan."""
        with in_place(self.settings, self.device):
            plan = self.leaf.plan
            reports = tuple(self.leaf.reports())
            profile = of_backend(self.leaf.backend)
            return Explanation(
                self.equation,
                plan.name,
                plan.reason,
                self.leaf.backend,
                device_name(self.device),
                profile.describe(),
                profile.measured,
                reports,
                nnz=self.result_size if len(reports) > 1 or len(self.bound.einsum.sparse) > 1 else None,
                rewrites=self.rewrites,
            )

    def pattern_on(self, patterns: Patterns) -> Pattern | None:
        """Return the pattern of a sparse result, given the operands' patterns; None if the result is dense."""
        return patterns[self._pattern] if isinstance(self._pattern, int) else self._pattern

    def packed(self, values: Tensors) -> Values | None:
        """Return the values in the order of the storage; None if each call reads them in the operand's order."""
        pull = self.pull
        if len(values) != 1 or not pull.values:
            return None
        return self.leaf.packed(values[0], pull.value if pull.of_values else None)  # type: ignore[no-any-return]

    def on_arrays(self, packed: Values) -> Callable[[Any], Any] | None:
        """Return the contraction with these values as a function of ndarrays; None where it is more than a `Step`."""
        more = self.pull.steps or self._pushes or self._holds or self.sums or self.sparse
        return None if more or not isinstance(self.leaf, Step) else self.leaf.on_arrays(packed)

    def result(
        self,
        patterns: Patterns,
        values: Sequence[Any],
        dense: Tensors,
        packed: Values | None = None,
        given: Tensors | None = None,
        checked: bool = False,
    ) -> Tensor:
        """A dense result, or a sparse one's values; differentiable. Integers are made modulo 2**64: see `evaluate`.

        `given` is what all operands were made of, where a guard is to know its verdict by that. Dense operands that are
        `checked` are known to be as the einsum was compiled for.
        """
        if not checked:
            dense = dense_of_call(self.bound, dense, self.dtype, self.device)
        if self._holds is not None and not self._holds(dense):
            changes: dict[str, Any] = {} if self.rewrites else {"plan": ONE_PASS, "path": None}
            return self.instead("full", **changes).result(patterns, values, dense, None if packed else packed)
        pull = self.pull
        if self.rewrites:
            beside = bool(packed) and self.leaf.guard is None and not followed([*values, *dense])
            given = given or [*(v for v in values if v is not None and pull.values == ()), *dense]
            values, dense = pull(values, dense, beside)
        if not self._as_given:
            patterns = [patterns[one] if isinstance(one, int) else one for one in self._inner]
        result = self.leaf.result(patterns, values, dense, packed, given)
        for push in self._pushes:
            result = push(result)
        return result

    def instead(self, why: str, dtype: torch.dtype | None = None, **changes: object) -> Contraction:
        """Return this contraction compiled for another dtype or other settings; it is made once for each `why`."""
        other = self._others.get(why)
        if other is None:
            like = torch.zeros((), dtype=dtype or self.dtype, device=self.device)
            with lasting():
                shapes = (shape for _, shape in self.compiled_for)
                sparse = [SparseTensor._make(p, like.expand(s)) for p, s in zip(self.bare, shapes, strict=True)]
                settings = replace(self.settings, **changes)  # type: ignore[arg-type]
                other = contraction(self.bound, stand_ins(self.bound, sparse), settings, self.form)
            self._others[why] = other
        return other

    def evaluate(
        self, patterns: Patterns, values: Tensors, dense: Tensors, packed: Values | None = None, checked: bool = False
    ) -> Tensor:
        """The result of the same arguments.

        Raises:
            DtypeError: a sum of integers does not fit in 64 bits. Nothing is looked at while a CUDA graph is captured
                or a transform of `torch.func` is active.
            TransformError: torch.jit.trace calls.
        """
        if torch._C._get_tracing_state() is not None:
            raise TransformError(
                "torch.jit.trace records no sparse kernels; torch.export.export makes programs of them"
            )
        if torch.autograd._profiler_enabled():
            # A range of torch's profiler, and of NVTX under `torch.autograd.profiler.emit_nvtx`.
            with record_function(f'sparsetc "{self.equation}" {self.leaf.plan.name}'):
                result = self.result(patterns, values, dense, packed, checked=checked)
        else:
            result = self.result(patterns, values, dense, packed, checked=checked)
        if self.sums is not None and not transforming() and not captured(result):
            self.sums.check(self, result, patterns, values, dense)
        return result

    def gradient(self, patterns: Patterns, operand: int, values: Tensors, dense: Tensors, upstream: Tensor) -> Tensor:
        """Return the gradient with respect to one operand, given that of the result; computed outside autograd."""
        tensors = [t.detach() for t in (*values, *dense)]
        wanted = tensors[operand].requires_grad_()
        with following():
            result = self.result(patterns, tensors[: len(values)], tensors[len(values) :], UNREAD)
            return torch.autograd.grad(result, wanted, upstream)[0]


def _place(pattern: Pattern, patterns: Patterns) -> Pattern | int:
    """Return the number of a pattern among some, else the pattern: what is kept for a pattern does not refer to it."""
    return next((n for n, other in enumerate(patterns) if other is pattern), pattern)


def _labels_by_letter(einsum: Einsum, patterns: Patterns, order: int) -> Labels:
    """Return the labels of a result's sparse modes, from operands with the same letters; empty if a mode has none."""
    terms = [einsum.inputs[position] for position in einsum.sparse]
    named: dict[str, Any] = {}
    for term, pattern in zip(terms, patterns, strict=True):
        for letter, (name, labels) in zip(term, pattern.labels.items(), strict=False):
            check_labels(name, labels, named.get(letter, (name, labels))[1])
            if labels is not None or letter not in named:
                named[letter] = name, labels
    kept = dict(named[letter] for letter in einsum.output[:order] if letter in named)
    return kept if len(kept) == order else {}


known: weakref.WeakValueDictionary[str, Contraction] = weakref.WeakValueDictionary()
"""Contractions by key, for as long as they live: what operators of `torch.library` look them up in."""
T = TypeVar("T")


def wrap(made: Contraction, values: Tensor, patterns: Patterns, drop_zeros: bool = False) -> Result:
    """Make the result of a contraction, sparse or dense, from its values."""
    pattern = made.pattern_on(patterns) if made.sparse else None
    if pattern is None:
        return values
    result = SparseTensor._make(pattern, values)
    return without_zeros(result) if drop_zeros else result


def contraction(
    bound: Bound, operands: Operands, settings: Options, form: str, repeated: bool = False, choice: Choice | None = None
) -> Contraction:
    """Compile an einsum. For `repeated` see `Request`; `choice` is for an einsum of a single `Step`."""
    # Gradients are made, and copies compiled, in the precision that was in force here.
    settings, start = replace(settings, precision=settings.effective_precision()), time.perf_counter()
    with bar(None, f'compiling "{bound.einsum.text}"'), lasting():
        new = Contraction(Request(bound, [*map(stand_in, operands)], settings, form, repeated), choice)
    # The name says what the shapes of operands and result follow from, and no other in this process has it: what torch
    # keeps on disk of a graph that the contraction stands in is not to be taken for another's.
    new.key = f"{new.bound} {new.dtype} {new.sparse} {tuple(new.shape)} #{next(_numbers)}"
    known[new.key] = new
    log_since(start, logging.INFO, 'compiled "%s", plan %s, on %s', bound.einsum.text, new.leaf.plan.name, new.device)
    return new


def _leaf(request: Request, choice: Choice | None) -> tuple[Any, list[Rewrite], Request]:
    """Compile the leaf of an einsum. Return it, the rewrites around it, and the einsum that they lead to."""
    wanted, chained = requested(request.settings.plan), len(request.operands) > 2
    order = request.settings.path or wanted.path
    if choice is None and (chained or order or wanted == STEPS):
        from sparsetc.contraction.path import Path, checked_order, in_steps  # which few einsums need

        # Several operands by their entries take a path of what rewrites lead to, below.
        path = None if chained and len(request.sparse) > 1 and by_nonzeros(wanted) else in_steps(request)
        if path is None and len(request.sparse) > 2 and request.dense_modes and not by_nonzeros(wanted):
            path = Path(request, expanded=False)
        if isinstance(path, Path):
            return path, [], request
        choice = path
    rewrites, inner = rewrites_of(request)
    if len(inner.sparse) == 1:
        step = Step(inner, choice)
        _tune(step)
        return step, rewrites, inner
    paired(request.settings.plan, inner.bound.einsum.indices)  # refused at once where it is not known
    if len(inner.operands) == 2:
        pair = Pair(inner)
        _tune(pair)
        pair.find_pattern([x.pattern for x in inner.sparse])
        return pair, rewrites, inner
    return Path(inner, True, checked_order(order, len(inner.operands)) if order else None), rewrites, inner


def _tune(step: Step | Pair) -> None:
    """Choose the plan of a step by time, where options ask for that."""
    if step.settings.effective_tune()[0] != "model":
        tune(step)


def compiled(text: str, operands: Operands, settings: Options, form: str, once: bool = False) -> Contraction:
    """Return the contraction cached for these patterns, equation and sizes, or compile it.

    One of several patterns that may meet this `once` is kept on a CPU only if they met before: the places of its
    result are as large as the result, and writing to new memory takes as long as the products.
    """
    first, *others = (o._pattern for o in operands if isinstance(o, SparseTensor))
    key = _key(text, operands, settings, form)

    def make() -> Contraction:
        return contraction(parsed(text, operands), operands, settings, form, True)

    if once and others and first.device.type == "cpu" and settings.effective_tune()[0] == "model":
        met = "met", key
        if _found(first, met) is None:
            _kept(first, met, lambda: True, others)
            return make()
    return _kept(first, key, make, others)


def kept(text: str, operands: Operands, settings: Options, form: str) -> Contraction | None:
    """Return the contraction cached for these patterns, equation and sizes; None if there is none."""
    for first in operands:
        if isinstance(first, SparseTensor):
            return _found(first._pattern, _key(text, operands, settings, form)) if first._unsorted is None else None
    return None


def _found(first: Pattern, key: Any) -> Any:
    """Look a key up in what is kept with a pattern; None if it is not there, or a plan cannot be hashed."""
    try:
        return first.cache.get(key)
    except TypeError:
        return None


def _kept(first: Pattern, key: Any, make: Callable[[], T], others: Sequence[Pattern] = ()) -> T:
    """Look a key up in what is kept with a pattern, or make it and keep it for as long as the other patterns live."""
    kept: T | None = _found(first, key)
    if kept is None:
        kept = make()
        with suppress(TypeError):  # a plan that cannot be hashed
            kept = first.cache.put(key, kept, needs=others)
    return kept


def _key(text: str, operands: Operands, settings: Options, form: str) -> tuple[Any, ...]:
    """Return the key that a contraction is kept by, with the pattern of its first sparse operand."""
    kinds: list[Any] = []
    patterns: list[Pattern] = []
    for operand in operands:
        if isinstance(operand, SparseTensor):
            patterns.append(operand._pattern)
            kinds.append((operand._values.shape, operand._values.dtype))
        else:  # how it is read depends on the slices that are repeated
            dims = () if operand.is_contiguous() else repeated_dims(operand)
            kinds.append((operand.shape, operand.dtype, operand.device, dims))
    others = tuple(map(weakref.ref, patterns[1:]))
    return "kernel", text, tuple(kinds), others, settings, form, settings.effective_precision()


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
        repeated: as of `Request`.
    """
    settings = replace(settings, precision=settings.effective_precision())
    requests = [Request(parsed(text, operands), operands, settings, form, repeated) for text, operands in workload]
    (x,) = requests[0].sparse
    choices: Sequence[tuple[Choice | None, Any]] | None = None
    if not x.dense_order and not x.blocksize and all(len(r.sparse) == 1 for r in requests):
        with lasting():
            problems = list(map(problem_of, requests))
            with in_place(settings, x.device):
                choices = choose_together(settings.plan, problems, settings.memory_on(x.device))
    choices = choices or [(None, settings.plan)] * len(requests)
    return tuple(
        contraction(r.bound, r.operands, replace(settings, plan=again), form, repeated, choice)
        for r, (choice, again) in zip(requests, choices, strict=True)
    )


def kept_together(workload: Workload, settings: Options, form: str) -> tuple[Contraction, ...]:
    """Return the contractions cached for this workload with the sparse operand's pattern, or compile them."""
    x = workload[0][1][0]
    assert isinstance(x, SparseTensor)
    key = ("workload", *(_key(text, operands, settings, form) for text, operands in workload))
    return _kept(x._pattern, key, lambda: compiled_together(workload, settings, form, repeated=True))
