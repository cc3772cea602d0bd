"""Guards: a look at the operands of a step, again where one changed, which says if it takes them; and straight lines.

In: dense operands, or values, as the caller has them, and the tables that kernels read. Out: a verdict, for which the
GPU is waited for once: no infinities, values fit for halves. Programs make integers modulo 2**64, so a result does not
tell if it wrapped. Where the largest magnitudes of the operands leave it open, the same einsum in float64 tells, or the
sum of its products' magnitudes where that is too large for float64 to tell; a result that may have wrapped is refused.

What one call of a contraction found to do, later ones with operands like its own do again: a `Way` to their result, by
its programs alone. Torch's own guards compare types, sizes, strides, devices and torch's modes at once. Nothing is
converted, and kernels, which are told addresses, read operands where they lie.
"""

from __future__ import annotations

import weakref
from cmath import isfinite
from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import add
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo import guards

from sparsetc.codegen.parts import Values
from sparsetc.codegen.split_float16 import verdicts_on
from sparsetc.contraction.request import Tensors
from sparsetc.contraction.rewrites import Pull
from sparsetc.ir.equation.einsum import Bound
from sparsetc.ir.nest.values import EXACT, INFINITE
from sparsetc.support.checks import room_of
from sparsetc.tensor.dtypes import INTEGERS, SUMMED_IN, captured, refuse_wrapped
from sparsetc.tensor.pattern import followed
from sparsetc.tensor.sparse_tensor import SparseTensor


class Guard:
    """The last verdict on operands, which holds as long as each is the same view of a tensor, unchanged.

    A change that leaves no trace in torch's count of versions (through ``.data``, or an ndarray) is not noticed.
    """

    def __init__(self, test: Callable[[Tensors], bool]) -> None:
        """Take a test of tables."""
        self.test = test
        self._known: tuple[tuple[weakref.ref[Tensor], tuple[object, ...]], ...] = ()
        self._held = True

    def admits(self, operands: Tensors, tables: Tensors) -> bool:
        """Return True if the test holds for the tables made of these operands; unchanged operands are not tested again.

        To look waits for the GPU. While a CUDA graph is captured nothing can be looked at, and the answer is yes where
        it is not known. On a CPU an ndarray may have changed the memory, which leaves no trace, so all are tested.
        """
        if tables and not tables[0].is_cuda:
            return self.test(tables)
        looked_at, origins = self._known, [operand if operand._base is None else operand._base for operand in operands]
        if len(looked_at) == len(operands) and all(
            ref() is origin and seen == _view(operand)
            for operand, origin, (ref, seen) in zip(operands, origins, looked_at, strict=True)
        ):
            return self._held
        if tables and torch.cuda.is_current_stream_capturing():
            return True
        held = self.test(tables)
        if not any(operand.is_inference() for operand in operands):  # which have no versions
            seen = zip(map(weakref.ref, origins), map(_view, operands), strict=True)
            self._known, self._held = tuple(seen), held
        return held


def _view(operand: Tensor) -> tuple[object, ...]:
    """Return what tells a view of a tensor from others, and from itself once the tensor has changed."""
    return operand._version, operand.storage_offset(), operand.shape, operand.stride()


def finite(tables: Tensors) -> bool:
    """Return True if no element is infinite or NaN; a sum that overflows counts as infinite."""
    sums = [t.sum(dtype=SUMMED_IN.get(t.dtype)) for t in tables]
    if sums and sums[0].is_cuda:
        sums = [reduce(add, sums)]  # the GPU is waited for once; to add on a CPU takes as long as a sum
    return all(isfinite(s.item()) for s in sums)


def fit_for_halves(tables: Tensors, split: Sequence[bool]) -> bool:
    """Return True if no element is infinite or NaN, and halves are exact enough for the tables that are `split`.

    Tables are of float32. The GPU is waited for once.
    """
    return all(v == EXACT if halved else v < INFINITE for v, halved in zip(verdicts_on(tables), split, strict=True))


def sums_of_integers(bound: Bound, sparse: Sequence[SparseTensor]) -> tuple[int, Guard] | None:
    """Return how many terms a sum of an einsum of integers has, and a guard of operands for which it fits in 64 bits.

    None where operands of their dtype cannot pass 64 bits.
    """
    dtype, e = sparse[0].dtype, bound.einsum
    if dtype not in INTEGERS:
        return None
    terms, left = 1, set(e.contracted)
    for position, x in zip(e.sparse, sparse, strict=True):
        summed = left & set(e.inputs[position])
        nonzeros = x._values.numel()
        terms *= min(nonzeros, bound.elements(summed)) if x.is_coalesced else nonzeros
        left -= summed
    terms *= bound.elements(left)
    most = -torch.iinfo(dtype).min
    return (terms, Guard(partial(_bounded, terms))) if most ** len(e.inputs) * terms > LARGEST else None


def _bounded(terms: int, operands: Tensors) -> bool:
    """Return True if the product of the largest magnitudes, times the terms of a sum, fits in 64 bits."""
    if not terms or not all(operand.numel() for operand in operands):
        return True
    for low, high in torch.stack([torch.stack(torch.aminmax(operand)) for operand in operands]).tolist():
        terms *= max(-low, high)
    return terms <= LARGEST


def check_sums(
    product: Callable[..., Tensor], terms: int, found: Tensor, operands: Sequence[Tensors], text: str
) -> None:
    """Raise DtypeError if a sum passed 64 bits, or may have: float64 cannot always tell.

    Args:
        product: the einsum of operands in float64.
        terms: of a sum.
        found: the result.
        operands: values of the sparse operands, and the dense operands.
        text: the equation.
    """
    floats = [[t.double() for t in tensors] for tensors in operands]
    close = product(*floats)
    magnitude = product(*([t.abs() for t in tensors] for tensors in floats))
    # Rounding errors stay below 2**63, so that a multiple of 2**64 shows, unless products are this large.
    blurred = magnitude * terms > 2.0**100
    refuse_wrapped(found, torch.where(blurred, magnitude, close), f'a sum of "{text}"')


LARGEST = 2**63 - 1


# -- calls like one before ------------------------------------------------------------------------------------------

KINDS = 4
"""Kinds of operands that one contraction knows: with and without gradients, in two orders, in inference mode."""
PLAIN = Tensor, torch.nn.Parameter
Run = Callable[[Values, Sequence[Any]], Tensor | None]
"""A function of packed values, and of the values and dense operands of a call."""
Way = tuple[Callable[..., bool], int, bool, Run]
"""A guard of tensors, how many there are, whether one requires a gradient, and what gives the result."""


def looked_at(innermost: Any, tensors: Tensors) -> bool:
    """Return True if a way to the result is sought for operands of this kind, which have been run once."""
    watched = torch._C._len_torch_dispatch_stack() > 0 or torch._C._is_any_autocast_enabled()
    if watched or getattr(innermost, "in_turns", None) is not None or followed(tensors):
        return False
    # A tensor of a transform that has ended, such as vjp's pullback reads, has no storage to look at.
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return all(type(t) in PLAIN and not captured(t) and not wrapped(t) for t in tensors)


def same_kind(tensors: Tensors) -> Callable[..., bool]:
    """Return a function that says if others are as these in all but their elements, and torch in the same modes.

    That is what Dynamo asks of the inputs of a graph. Two that are one tensor are as none.
    """
    sizes: Any = [[*t.shape] for t in tensors]
    strides: Any = [[*t.stride()] for t in tensors]
    return guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


def way_of(innermost: Any, pull: Pull, pushes: list[Any], values: Sequence[Any], dense: Tensors) -> Way | None:
    """Return a run of the programs on operands like these as they lie; None where a call is more than that."""
    if not getattr(innermost, "only_programs", False):
        return None
    executable, zeroed = innermost.executable, innermost.arrays.zeroed
    tensors = [*values, *dense]
    sources = pull.sources(len(tensors))
    if sources is None or executable.copies > 1:
        return None
    tables = innermost.tables(pull(values, dense, bool(pull.values))[1])
    rows = result = executable.empty(torch.device("meta"))
    try:
        for change in (innermost.of_rows, *pushes):
            result = change(result)
    except RuntimeError:  # a copy by indices, which do not lie there
        return None
    backend, views = executable.programs.backend, list[Any]()
    for read, whole in zip((rows, *tables), (result, *[tensors[n] for n in sources]), strict=True):
        alike = read.shape == whole.shape and read.stride() == whole.stride()
        in_order = alike or not backend.loops or (read.is_contiguous() and whole.is_contiguous())
        same = read.untyped_storage()._cdata == whole.untyped_storage()._cdata and read.numel() == whole.numel()
        if not same or read.storage_offset() != whole.storage_offset() or not in_order:
            return None
        views.append(None if alike else (read.shape, read.stride()))
    as_rows, *as_tables = views
    index = zeroed if zeroed is not None and zeroed.numel() else None
    guard, make = innermost.guard, room_of(result, innermost.device)
    if backend.addressed:
        as_rows, as_tables = None if index is None else as_rows, []
    _, call, _ = executable.bind(innermost.arrays, (), tensors)
    zeroes = zeroed is None and executable.zeroes
    ones = None if pull.values else innermost.packed_values(None)

    def run(packed: Values, tensors: Tensors) -> Tensor | None:
        read = [tensors[n] for n in sources]
        if guard is not None and not guard.admits(read, read):
            return None
        if any(as_tables):
            read = [one.as_strided(*view) if view else one for one, view in zip(read, as_tables, strict=True)]
        out = make()
        written = out if as_rows is None else out.as_strided(*as_rows)
        if zeroes:
            out.zero_()
        elif index is not None:
            written.index_fill_(0, index, 0)
        call(packed if ones is None else ones, read, written)
        return out

    present = tensors if values[0] is not None else dense
    return same_kind(present), len(present), any(t.requires_grad for t in present), run
