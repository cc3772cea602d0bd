"""A sparse operand with dense modes as einsums read it: a pattern of its entries times the table of their values.

In: a `Bound` einsum and its one sparse operand, ``X[i,j,h]``. Out: the einsum in which two operands stand for it, the
pattern ``P[n,i,j]`` of ones, whose mode n is the entry's number, and the dense ``V[n,h]``. Nothing is expanded, values
are a dense operand like any other, and dense modes are letters of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_letters
from typing import Any

import torch

from sparsetc.ir.einsum import Bound, Einsum
from sparsetc.output import check_form
from sparsetc.pattern import Pattern, lasting
from sparsetc.tensor import SparseTensor

SPARE = 3
"""Letters that an einsum of entries, its gradients and their batches need beside those of the equation."""


@dataclass(frozen=True)
class Entries:
    """An einsum of one operand with dense modes, and the einsum of its entries, whose last operand is the values."""

    bound: Bound
    form: str
    """The form of the result of that einsum: ``dense`` or ``sparse``."""
    own: bool
    """Whether rows of that result are the operand's entries, so that the result is on the operand's own pattern."""
    modes: tuple[int, ...]
    """The operand's modes that matter beside an entry's number: another operand or the result has their letters."""
    plain_sum: bool
    """Whether the einsum as written is a sum of one operand, which torch gives integers of 64 bits."""

    @classmethod
    def of(cls, bound: Bound, x: SparseTensor, form: str) -> Entries | None:
        """The einsum of entries.

        None where the operand has to be expanded: no letter is left for the number, or the result is to have the
        dense modes alone as its pattern.
        """
        e = bound.einsum
        check_form(form, e)
        (position,) = e.sparse
        letters, dense = e.inputs[position][: x.sparse_order], e.inputs[position][x.sparse_order :]
        kept = tuple(c for c in e.output if c in letters)
        if len(e.indices) + SPARE > len(ascii_letters) or (form == "sparse" and not kept):
            return None
        number = next(c for c in ascii_letters if c not in e.indices)
        modes_kept = sum(c in e.inputs[position] for c in e.output)
        enough = modes_kept >= min(2, len(set(e.inputs[position])))
        sparse = form == "sparse" or (form == "auto" and bool(kept) and enough)
        own = sparse and e.output[: len(letters)] == letters
        output = (number, *e.output[len(letters) :]) if own else e.output
        used = {*output, *dense, *(c for p in e.dense for c in e.inputs[p])}
        modes = tuple(m for m, c in enumerate(letters) if c in used or letters.count(c) > 1)
        inputs = list(e.inputs)
        inputs[position] = (number, *(letters[m] for m in modes))
        einsum = Einsum((*inputs, (number, *dense)), output, e.sparse, e.text)
        return cls(
            Bound.of(einsum, {**bound.by_index, number: x.nnz}),
            "sparse" if sparse and not own else "dense",
            own,
            modes,
            len(e.inputs) == 1 and bool(e.contracted),
        )

    def operands(self, operands: Sequence[SparseTensor | torch.Tensor], x: SparseTensor) -> list[Any]:
        """Operands of that einsum to compile it for, of those as written."""
        pattern, values = numbered(x.pattern, self.modes), x._values
        with lasting():
            one = torch.zeros((), dtype=x.dtype, device=x.device).expand(x.nnz)
            if 0 in values.stride():  # other values will not be one slice repeated
                values = torch.empty(values.shape, dtype=x.dtype, device=x.device)
        given = [SparseTensor._make(pattern, one) if isinstance(o, SparseTensor) else o for o in operands]
        return [*given, values]


def numbered(pattern: Pattern, modes: tuple[int, ...]) -> Pattern:
    """The pattern of some modes with one more in front, the entry's number; made once."""
    found = pattern.cache.get(("numbered", modes))
    if found is None:
        with lasting():
            numbers = torch.arange(pattern.nnz, device=pattern.device).unsqueeze(0)
            coords = torch.cat([numbers, pattern.coords[list(modes)]])
            made = Pattern(coords, (pattern.nnz, *(pattern.shape[m] for m in modes)), True)
            found = pattern.cache.put(("numbered", modes), made)
    return found  # type: ignore[no-any-return]
