"""The result of a contraction for given values and dense operands, refused where integers passed 64 bits.

In: a contraction and tensors. Out: its result. Programs make integers modulo 2**64, so a result does not tell if it
wrapped. Where the largest magnitudes of the operands leave it open, the same einsum in float64 tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from sparsetc.codegen.launch import Values
from sparsetc.contraction.canonical import dense_of_call
from sparsetc.contraction.looked import Looked
from sparsetc.ir.equation.einsum import Bound
from sparsetc.tensor.pattern import Pattern, lasting, transforming
from sparsetc.tensor.sparse_tensor import SparseTensor
from sparsetc.tensor.sums import INTEGERS, captured, refuse_wrapped

if TYPE_CHECKING:
    from sparsetc.contraction.base import Contraction


def evaluate(
    made: Contraction,
    patterns: Sequence[Pattern],
    values: Sequence[torch.Tensor],
    dense: Sequence[torch.Tensor],
    packed: Values | None = None,
) -> torch.Tensor:
    """Return `made.result` of the same arguments.

    Raises:
        DtypeError: a sum of integers does not fit in 64 bits. Nothing is looked at while a CUDA graph is captured or a
            transform of `torch.func` is active.
    """
    found = made.result(patterns, values, dense, packed)
    if made.sums is not None and not transforming() and not captured(found):
        made.sums.check(made, found, patterns, values, dense)
    return found


class IntegerSums:
    """Whether the sums of a contraction of integers fit in 64 bits, looked at again where operands changed."""

    def __init__(self, terms: int) -> None:
        self.terms = terms
        self._looked = Looked(self._bounded)
        self._in_floats: Contraction | None = None

    @classmethod
    def of(cls, bound: Bound, sparse: Sequence[SparseTensor]) -> IntegerSums | None:
        """Return the check of an einsum; None where operands of their dtype cannot pass 64 bits.

        Args:
            bound: the einsum.
            sparse: its sparse operands, in order.
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
        return cls(terms) if most ** len(e.inputs) * terms > LARGEST else None

    def _bounded(self, operands: Sequence[torch.Tensor]) -> bool:
        """Whether the product of the largest magnitudes, times the number of terms of a sum, fits in 64 bits."""
        if not self.terms or not all(operand.numel() for operand in operands):
            return True
        bound = self.terms
        for low, high in torch.stack([torch.stack(torch.aminmax(operand)) for operand in operands]).tolist():
            bound *= max(-low, high)
        return bound <= LARGEST

    def check(
        self,
        made: Contraction,
        found: torch.Tensor,
        patterns: Sequence[Pattern],
        values: Sequence[torch.Tensor],
        dense: Sequence[torch.Tensor],
    ) -> None:
        """Raise DtypeError unless the result is what its sums are, of these values and dense operands."""
        dense = dense_of_call(made.bound, dense, made.dtype, made.device)
        operands = [*values, *dense]
        # On the CPU an ndarray may have changed the memory, which leaves no trace, and to look waits for nothing.
        if self._looked.holds(operands, operands) if operands[0].is_cuda else self._bounded(operands):
            return
        floats = [t.double() for t in values], [t.double() for t in dense]
        if self._in_floats is None:
            self._in_floats = _in_floats(made, floats[0])
        close = self._in_floats.result(patterns, *floats)
        terms = self._in_floats.result(patterns, *([t.abs() for t in given] for given in floats))
        # Rounding errors stay below 2**63, so that a multiple of 2**64 shows, unless terms are this large.
        blurred = terms * self.terms > 2.0**100
        refuse_wrapped(found, torch.where(blurred, terms, close), f'a sum of "{made.bound.einsum.text}"')


LARGEST = 2**63 - 1


def _in_floats(made: Contraction, values: Sequence[torch.Tensor]) -> Contraction:
    """The contraction of operands of the same patterns and shapes in float64."""
    from sparsetc.contraction.contraction import contraction

    e, like = made.bound.einsum, torch.zeros((), dtype=torch.float64, device=made.device)
    with lasting():
        sparse = iter([SparseTensor._make(made.bare(n), like.expand(v.shape)) for n, v in enumerate(values)])
        operands = [next(sparse) if p in e.sparse else like.expand(made.bound.shape(p)) for p in range(len(e.inputs))]
        return contraction(made.bound, operands, replace(made.settings, plan="auto"), made.form)
