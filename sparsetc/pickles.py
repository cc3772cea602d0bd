"""How objects are made again from what they pickle as. These names stand in files, so they must not change.

In: tensors and plain data, as a pickle or ``torch.save`` holds them. Out: the object; kernels are compiled again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from sparsetc import coords as crd
from sparsetc.errors import FormatError
from sparsetc.ir.einsum import Bound, Einsum
from sparsetc.options import Options
from sparsetc.pattern import Pattern
from sparsetc.tensor import SparseTensor

if TYPE_CHECKING:
    from sparsetc.kernel import Kernel


def sparse_tensor(coords: Any, values: Any, shape: Any, coalesced: bool) -> SparseTensor:
    """A SparseTensor. Nothing of what a file says is believed: coordinates in range, sorted and unique are checked."""
    found = SparseTensor(coords, values, shape, coalesce=False)
    if not coalesced:
        return found
    own = found.pattern
    if not crd.is_sorted_unique(crd.sort_keys(own.coords, own.shape)):
        raise FormatError("a saved SparseTensor must have sorted, unique coordinates, as it says; it is damaged")
    return SparseTensor._make(Pattern(own.coords, own.shape, True), found._values)


def pattern(coords: Any, shape: Any, coalesced: bool) -> Pattern:
    """A Pattern, checked as that of a tensor."""
    stand_in = torch.zeros(()).expand(coords.shape[-1]).to(coords.device)
    return sparse_tensor(coords, stand_in, shape, coalesced).pattern


# A file from anywhere can then make these by ``torch.load``, which are data that is checked, and nothing else.
torch.serialization.add_safe_globals([pattern, sparse_tensor])

Spelled = tuple[tuple[tuple[str, ...], ...], tuple[str, ...], tuple[int, ...], str, tuple[tuple[str, int], ...]]
"""A `Bound` einsum as plain data."""


def spelled(bound: Bound) -> Spelled:
    """A `Bound` einsum as plain data."""
    e = bound.einsum
    return e.inputs, e.output, e.sparse, e.text, bound.sizes


def _operands(spelled: Spelled, sparse: Sequence[SparseTensor]) -> tuple[Bound, list[SparseTensor | torch.Tensor]]:
    """The einsum, and its operands; dense ones as stand-ins of their shapes."""
    inputs, output, positions, text, sizes = spelled
    bound, given = Bound(Einsum(inputs, output, positions, text), sizes), iter(sparse)
    like = torch.empty((), dtype=sparse[0].dtype, device=sparse[0].device)
    return bound, [next(given) if p in positions else like.expand(bound.shape(p)) for p in range(len(inputs))]


def kernel(
    equation: Spelled, sparse: Sequence[SparseTensor], settings: Options, output: str, drop_zeros: bool = False
) -> Kernel:
    """A kernel of one sparse operand or several."""
    from sparsetc.contraction import contraction
    from sparsetc.kernel import Kernel

    made = contraction(*_operands(equation, sparse), settings, output)
    return Kernel(made, sparse, drop_zeros)
