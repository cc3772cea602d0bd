"""Contraction: an einsum compiled for the patterns of its sparse operands; it holds no values.

In: a compiled step, and the rewrites around it. Out: a `Contraction`, kept with the pattern of its first sparse
operand. A compiled step is a `Step`, of one sparse operand and whatever dense ones there are; a `Pair`, of two sparse
operands; or a `Path`, whose links are contractions. `compile` makes all of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.profiler import record_function

from sparsetc.codegen.parts import Values
from sparsetc.contraction.autograd import UNREAD, apply
from sparsetc.contraction.guard import KINDS, Way, check_sums, looked_at, sums_of_integers, way_of
from sparsetc.contraction.prepare import in_force_on
from sparsetc.contraction.request import (
    Operands,
    Patterns,
    Request,
    Result,
    Rewrite,
    Tensors,
    dense_of_call,
    repeated_dims,
    stand_ins,
)
from sparsetc.contraction.rewrites import Pull, put_back
from sparsetc.device.profile import of_backend
from sparsetc.errors import TransformError
from sparsetc.explain import Explanation, device_name
from sparsetc.ir.equation.einsum import Bound, Einsum
from sparsetc.ir.equation.parse import parse
from sparsetc.ir.plan import ONE_PASS, requested
from sparsetc.options import Options
from sparsetc.planner.registry import by_nonzeros
from sparsetc.support import cached_property
from sparsetc.tensor.dtypes import captured
from sparsetc.tensor.pattern import Labels, Pattern, check_labels, followed, lasting, transforming
from sparsetc.tensor.sparse_tensor import SparseTensor


class Contraction:
    """An einsum compiled for the patterns of its operands: rewrites around the innermost einsum that runs.

    Attributes:
        key: the name by which operators of `torch.library` know the contraction.
        compiled_for: the pattern of each sparse operand, and the shape of its values.
        innermost: what is planned and run: a `Step` of one sparse operand, a `Pair` of two, or a `Path`.
        pull: how operands of the innermost einsum follow from those of a call.
        rewrites: the einsums that are run in its place, and why.
        sparse: whether the result is a SparseTensor.
        linear: whether its gradients are einsums of its operands; those of others follow from its innermost's.
        empty: whether no nonzeros take part, so that the result has no positions, and is 0 where it is dense.
        shape: the shape of what `result` gives.
        result_dtype: the dtype of what `result` gives.
        sums: of integers that may pass 64 bits: how many terms each has, and a guard of operands; None where none can.
        equation: the einsum as written.
        bare: the patterns of the sparse operands, with nothing kept.
        _inner: the pattern of each sparse operand of the innermost einsum, or which one of a call's it is.
        _pattern: the pattern of a sparse result, or which one of a call's it is; None of a dense one.
        _pushes: what is done to the innermost einsum's result.
        _ways: what gives results of kinds of operands that were called before.
        _sought: how many more kinds a way is sought for.
        _holds: what says whether rewrites serve the dense operands of a call; None where they serve all.
    """

    key: str

    compile: ClassVar[Callable[..., Contraction]]
    """`compile.contraction`, which makes leaves and stands above them: it is put here by its module."""

    def __init__(self, request: Request, innermost: Any, rewrites: Sequence[Rewrite], inner: Request) -> None:
        """Find what a call does around the innermost einsum; nothing is kept of the values.

        Args:
            request: the einsum as written.
            innermost: compiled for the einsum that rewrites lead to.
            rewrites: those around it.
            inner: that einsum.
        """
        bound = request.bound
        sparse = request.sparse
        self.bound = bound
        self.settings = request.settings
        self.form = request.form
        self.equation = bound.einsum.text
        self.dtype, self.device = sparse[0].dtype, sparse[0].device
        self.sums = sums_of_integers(bound, sparse)
        patterns = [x.pattern for x in sparse]
        self.bare = [pattern.bare() for pattern in patterns]
        self.compiled_for = tuple((weakref.ref(x._pattern), x._values.shape) for x in sparse)
        self._ways, self._sought = list[Way](), KINDS
        self.innermost = innermost
        ones = [p for p, x in zip(bound.einsum.sparse, sparse, strict=True) if x.pattern.ones]
        self.pull = Pull.of(bound.einsum, rewrites, ones)
        self.rewrites = tuple(f"{rewrite.inner.bound.einsum}   {rewrite.name}" for rewrite in rewrites)
        self._holds = rewrites[0].holds if rewrites else getattr(innermost, "holds", None)
        inner_patterns = [x.pattern for x in inner.sparse]
        self._inner = [_place(pattern, patterns) for pattern in inner_patterns]
        self._as_given = self._inner == [*range(len(patterns))]
        self.empty, self.result_dtype = innermost.empty, innermost.result_dtype
        inner_pattern = innermost.pattern_on(inner_patterns)  # here, and not while a CUDA graph is captured
        pattern, self._pushes = put_back(patterns, rewrites, inner_pattern, self.empty)
        self.sparse, self.shape = pattern is not None, bound.output_shape
        one_step = not (self.sparse or self.empty) and hasattr(innermost, "as_function")
        self.linear = one_step and bound.einsum.has_gradients and patterns[0].is_coalesced
        if pattern is not None:
            self.shape = pattern.values_shape(bound.output_shape[pattern.order :])
        self._pattern = None if pattern is None else _place(pattern, patterns)
        labels = _labels_by_letter(bound.einsum, patterns, 0 if pattern is None else pattern.order)
        if isinstance(self._pattern, Pattern):
            self._pattern.labels = labels

    @property
    def steps(self) -> Sequence[Any]:
        """The contractions that run, in order: steps of one sparse operand, or pairs of two."""
        return getattr(self.innermost, "steps", (self.innermost,))

    @property
    def settled(self) -> bool:
        """True if the plans of all steps are decided; False while candidates take turns in calls."""
        return all(getattr(step, "in_turns", None) is None for step in self.steps)

    @property
    def result_size(self) -> int:
        """Entries of a sparse result, elements of a dense one."""
        return self.shape[0] if self.sparse else prod(self.shape)

    def explain(self) -> Explanation:
        """Steps and their parts, costs, and why this plan."""
        with in_force_on(self.settings, self.device):
            plan = self.innermost.plan
            reports = tuple(self.innermost.reports())
            profile = of_backend(self.innermost.backend, self.device)
            return Explanation(
                self.equation,
                plan.name,
                plan.reason,
                self.innermost.backend,
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
        return self.innermost.packed(values[0], pull.value if pull.of_values else None)  # type: ignore[no-any-return]

    def on_arrays(self, packed: Values) -> Callable[[Any], Any] | None:
        """Return the contraction with these values as a function of ndarrays; None where it is more than a `Step`."""
        more = self.pull.steps or self._pushes or self._holds or self.sums or self.sparse
        return None if more or not hasattr(self.innermost, "on_arrays") else self.innermost.on_arrays(packed)  # type: ignore[no-any-return]

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
        found = self.straight(values, dense, packed, given)
        if found is not None:
            return found
        if not checked:
            dense = dense_of_call(self.bound, dense, self.dtype, self.device)
        if self.linear and packed is not UNREAD and followed([*values, *dense]) and not transforming():
            shapes = self.bound.dense_shapes
            if all(operand.shape == shape for operand, shape in zip(dense, shapes, strict=True)):
                function = self.innermost.as_function(self, patterns[0], values[0], packed, given)
                return apply(function, [*dense] if function.ones else [*values, *dense])
        return self.run(patterns, values, dense, packed, given)

    def straight(
        self, values: Sequence[Any], dense: Tensors, packed: Values | None, given: Tensors | None
    ) -> Tensor | None:
        """The result of operands of a kind that has been called before; None of others, or where autograd follows."""
        if not self._ways or forward_ad._current_level >= 0 or (packed is None and self.pull.values):
            return None
        if given is not None and self.innermost.guard is not None:
            return None
        tensors = [*values, *dense]
        present = tensors if values[0] is not None else dense
        for same, count, learns, run in self._ways:
            if len(present) == count and same(*present) and not (learns and torch.is_grad_enabled()):
                return run(packed or (), tensors)
        return None

    def run(
        self, patterns: Patterns, values: Sequence[Any], dense: Tensors, packed: Values | None, given: Tensors | None
    ) -> Tensor:
        """Run the innermost einsum and the rewrites around it, of operands as the einsum was compiled for."""
        pull = self.pull
        if self._holds is not None and not self._holds(dense):
            return self.in_full.result(patterns, values, dense, None if packed else packed)
        of_call, operands = patterns, (values, dense)
        if self.rewrites:
            beside = bool(packed) and self.innermost.guard is None and not followed([*values, *dense])
            given = given or [*(() if pull.values else [v for v in values if v is not None]), *dense]
            values, dense = pull(values, dense, beside)
        if not self._as_given:
            patterns = [patterns[one] if isinstance(one, int) else one for one in self._inner]
        result = self.innermost.result(patterns, values, dense, packed, given)
        if result is None:
            return self.in_full.result(of_call, *operands, None if packed else packed)
        for push in self._pushes:
            result = push(result)
        if self._sought and self._holds is None and (packed is not None or not pull.values):
            values, dense = operands
            if looked_at(self.innermost, [v for v in values if v is not None] + [*dense]):
                self._sought -= 1
                way = way_of(self.innermost, pull, self._pushes, *operands)
                self._ways += [way] if way else []
        return result

    @cached_property
    def in_full(self) -> Contraction:
        """The contraction without the rewrites, or the steps, that do not serve all dense operands."""
        return self.by(self.dtype) if self.rewrites else self.by(self.dtype, plan=ONE_PASS, path=None)

    @cached_property
    def in_floats(self) -> Contraction:
        """The contraction of integers in float64, which tells if sums fit in 64 bits."""
        # The plan's name alone says if values lie by nonzeros; its parts are for the strides of these operands.
        wanted = requested(self.settings.plan)
        return self.by(torch.float64, plan=wanted.name if by_nonzeros(wanted) else "auto")

    def by(self, dtype: torch.dtype, **changes: Any) -> Contraction:
        """Compile the einsum for another dtype or other settings; none of its operands is one slice repeated."""
        like = torch.zeros((), dtype=dtype, device=self.device)
        with lasting():
            shapes = (shape for _, shape in self.compiled_for)
            sparse = [SparseTensor._make(p, like.expand(s)) for p, s in zip(self.bare, shapes, strict=True)]
            settings = replace(self.settings, **changes)
            return Contraction.compile(self.bound, stand_ins(self.bound, sparse), settings, self.form)

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
            with record_function(f'sparsetc "{self.equation}" {self.innermost.plan.name}'):
                result = self.result(patterns, values, dense, packed, checked=checked)
        else:
            result = self.result(patterns, values, dense, packed, checked=checked)
        if self.sums is not None and not transforming() and not captured(result):
            (terms, fit), dense = self.sums, dense_of_call(self.bound, dense, self.dtype, self.device)
            if not fit.admits([*values, *dense], [*values, *dense]):
                check_sums(partial(self.in_floats.result, patterns), terms, result, (values, dense), self.equation)
        return result


def _place(pattern: Pattern, patterns: Patterns) -> Pattern | int:
    """Return the number of a pattern among some, else the pattern: what is kept for a pattern does not refer to it."""
    return next((n for n, other in enumerate(patterns) if other is pattern), pattern)


def _labels_by_letter(einsum: Einsum, patterns: Patterns, order: int) -> Labels:
    """Return the labels of a result's sparse modes, from operands with the same letters; empty if a mode has none."""
    named: dict[str, Any] = {}
    for position, pattern in zip(einsum.sparse, patterns, strict=True):
        for letter, (name, labels) in zip(einsum.inputs[position], pattern.labels.items(), strict=False):
            check_labels(name, labels, named.setdefault(letter, (name, labels))[1])
            if labels is not None:
                named[letter] = name, labels
    kept = dict(named[letter] for letter in einsum.output[:order] if letter in named)
    return kept if len(kept) == order else {}


known: weakref.WeakValueDictionary[str, Contraction] = weakref.WeakValueDictionary()
"""Contractions by key, for as long as they live: what operators of `torch.library` look them up in."""
T = TypeVar("T")


def wrap(made: Contraction, values: Tensor, patterns: Patterns, drop_zeros: bool = False) -> Result:
    """Make the sparse result of a contraction from its values; a dense one is these."""
    pattern = made.pattern_on(patterns)
    if pattern is None:
        return values
    result = SparseTensor._make(pattern, values)
    return result.drop() if drop_zeros else result


def compiled(text: str, operands: Operands, settings: Options, form: str, once: bool = False) -> Contraction:
    """Return the contraction cached for these patterns, equation and sizes, or compile it.

    One of several patterns that may meet this `once` is kept only if they met before, and little is counted to plan it:
    the places of its result are as large as the result, and writing to new memory takes as long as the products.
    """
    first, *others = (o._pattern for o in operands if isinstance(o, SparseTensor))
    key = key_of(text, operands, settings, form)

    def make(unmet: bool = False) -> Contraction:
        return Contraction.compile(parsed(text, operands), operands, settings, form, True, unmet=unmet)

    if once and others and not settings.timed:
        met = "met", key
        if _found(first, met) is None:
            kept_or_made(first, met, lambda: True, others)
            return make(unmet=True)
    return kept_or_made(first, key, make, others)


def kept(text: str, operands: Operands, settings: Options, form: str) -> Contraction | None:
    """Return the contraction cached for these patterns, equation and sizes; None if there is none."""
    first = next(operand for operand in operands if isinstance(operand, SparseTensor))
    nothing = first._unsorted is not None or first._pattern._cache is None  # as of a pattern that is new
    return None if nothing else _found(first._pattern, key_of(text, operands, settings, form))


def _found(first: Pattern, key: Any) -> Any:
    """Look a key up in what is kept with a pattern; None if it is not there, or a plan cannot be hashed."""
    try:
        return first.cache.get(key)
    except TypeError:
        return None


def kept_or_made(first: Pattern, key: Any, make: Callable[[], T], others: Sequence[Pattern] = ()) -> T:
    """Look a key up in what is kept with a pattern, or make it and keep it for as long as the other patterns live."""
    kept: T | None = _found(first, key)
    if kept is None:
        kept = make()
        with suppress(TypeError):  # a plan that cannot be hashed
            kept = first.cache.put(key, kept, needs=others)
    return kept


def key_of(text: str, operands: Operands, settings: Options, form: str) -> tuple[Any, ...]:
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
    precision = settings.precision or torch.get_float32_matmul_precision()
    return "kernel", text, tuple(kinds), others, settings, form, precision


def parsed(text: str, operands: Operands) -> Bound:
    """The einsum of a text and operands."""
    return parse(text, [tuple(o.shape) for o in operands], [isinstance(o, SparseTensor) for o in operands])
