"""Guards: a look at the operands of a step, again where one changed, which says if it takes them; and integer sums.

In: dense operands, or values, as the caller has them, and the tables that kernels read. Out: a verdict, for which the
GPU is waited for once: no infinities, values fit for halves. Programs make integers modulo 2**64, so a result does not
tell if it wrapped. Where the largest magnitudes of the operands leave it open, the same einsum in float64 tells, or the
sum of its products' magnitudes where that is too large for float64 to tell; a result that may have wrapped is refused.
"""

from __future__ import annotations

import weakref
from cmath import isfinite
from collections.abc import Callable, Sequence
from functools import reduce
from operator import add

import torch
from torch import Tensor

from sparsetc.codegen.split_float16 import verdicts_on
from sparsetc.contraction.operands import Tensors
from sparsetc.ir.equation.einsum import Bound
from sparsetc.ir.nest.values import EXACT, INFINITE
from sparsetc.tensor.dtypes import SUMMED_IN
from sparsetc.tensor.sparse_tensor import SparseTensor
from sparsetc.tensor.sums import refuse_wrapped


class Guard:
    """The last verdict on operands, which holds as long as each is the same view of a tensor, unchanged.

    A change that leaves no trace in torch's count of versions (through ``.data``, or an ndarray) is not noticed.
    """

    def __init__(self, test: Callable[[Tensors], bool], instead: str = "", **changes: object) -> None:
        """Take a test of tables; the name of what the caller runs where it does not hold, and its settings."""
        self.test = test
        self.instead = instead
        self.changes = changes
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


class IntegerSums:
    """A check that the sums of integers in a contraction fit in 64 bits; it is repeated when operands change."""

    def __init__(self, terms: int) -> None:
        self.terms = terms
        self._guard = Guard(self._bounded)

    @classmethod
    def of(cls, bound: Bound, sparse: Sequence[SparseTensor]) -> IntegerSums | None:
        """Return the check of an einsum of integers; None where operands of their dtype cannot pass 64 bits.

        Args:
            bound: the einsum.
            sparse: its sparse operands, in order.
        """
        dtype, e = sparse[0].dtype, bound.einsum
        terms, left = 1, set(e.contracted)
        for position, x in zip(e.sparse, sparse, strict=True):
            summed = left & set(e.inputs[position])
            nonzeros = x._values.numel()
            terms *= min(nonzeros, bound.elements(summed)) if x.is_coalesced else nonzeros
            left -= summed
        terms *= bound.elements(left)
        most = -torch.iinfo(dtype).min
        return cls(terms) if most ** len(e.inputs) * terms > LARGEST else None

    def _bounded(self, operands: Tensors) -> bool:
        """Return True if the product of the largest magnitudes, times the terms of a sum, fits in 64 bits."""
        if not self.terms or not all(operand.numel() for operand in operands):
            return True
        bound = self.terms
        for low, high in torch.stack([torch.stack(torch.aminmax(operand)) for operand in operands]).tolist():
            bound *= max(-low, high)
        return bound <= LARGEST

    def fit(self, operands: Tensors) -> bool:
        """Return True if magnitudes alone say that no sum passes 64 bits."""
        return self._guard.admits(operands, operands)

    def check(
        self, product: Callable[[Tensors, Tensors], Tensor], found: Tensor, values: Tensors, dense: Tensors, text: str
    ) -> None:
        """Raise DtypeError if a sum of these operands passed 64 bits, or may have: float64 cannot always tell.

        Args:
            product: the einsum of operands in float64.
            found: the result.
            values: of the sparse operands.
            dense: the dense operands.
            text: the equation.
        """
        floats = [t.double() for t in values], [t.double() for t in dense]
        close = product(*floats)
        magnitude = product(*([t.abs() for t in tensors] for tensors in floats))
        # Rounding errors stay below 2**63, so that a multiple of 2**64 shows, unless products are this large.
        blurred = magnitude * self.terms > 2.0**100
        refuse_wrapped(found, torch.where(blurred, magnitude, close), f'a sum of "{text}"')


LARGEST = 2**63 - 1
