"""What is found of operands by looking at them, once for each that changed: no infinities, and values fit for halves.

In: dense operands, or values, as the caller has them, and the tables that kernels read. Out: a verdict, for which the
GPU is waited for once.
"""

from __future__ import annotations

import weakref
from cmath import isfinite
from collections.abc import Callable, Sequence

import torch

from sparsetc.codegen import magnitudes
from sparsetc.ir.nest.values import may_be_split

_SUMMED = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
"""Dtypes whose sums would overflow where no element is infinite."""


class Looked:
    """What was last found of operands, so that those of a next call need not be looked at again.

    A change that leaves no trace in torch's count of versions (through ``.data``, or an ndarray) is not noticed.
    """

    def __init__(self, test: Callable[[Sequence[torch.Tensor]], bool]) -> None:
        """Nothing is known yet of what the test says of tables."""
        self.test = test
        self._known: tuple[tuple[weakref.ref[torch.Tensor], int], ...] = ()
        self._held = True

    def holds(self, operands: Sequence[torch.Tensor], tables: Sequence[torch.Tensor]) -> bool:
        """Whether the test holds for the tables, which were made of these operands.

        To look waits for the GPU. While a CUDA graph is captured nothing can be looked at, and the answer is yes where
        it is not known.
        """
        known = self._known
        if len(known) == len(operands) and all(
            ref() is operand and operand._version == version
            for operand, (ref, version) in zip(operands, known, strict=True)
        ):
            return self._held
        if tables and tables[0].is_cuda and torch.cuda.is_current_stream_capturing():
            return True
        held = self.test(tables)
        if not any(operand.is_inference() for operand in operands):  # which have no versions
            self._known, self._held = tuple((weakref.ref(operand), operand._version) for operand in operands), held
        return held


def finite(tables: Sequence[torch.Tensor]) -> bool:
    """Whether no element is infinite or NaN; a sum that overflows counts as infinite."""
    if not tables:
        return True
    total, *others = (t.sum(dtype=_SUMMED.get(t.dtype)) for t in tables)
    for other in others:
        total = total + other
    return isfinite(total.item())


def fit_for_halves(tables: Sequence[torch.Tensor], split: Sequence[bool]) -> bool:
    """Whether no element is infinite or NaN, and halves are exact enough for the tables that are `split`; float32.

    The GPU is waited for once.
    """
    found = magnitudes.read([magnitudes.extremes(t) for t in tables])
    return all(
        may_be_split(own.most, own.least) if halved else isfinite(own.most)
        for own, halved in zip(found, split, strict=True)
    )
