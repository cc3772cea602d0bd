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
from sparsetc.kept import lasting
from sparsetc.options import Options
from sparsetc.tensor import SparseTensor

if TYPE_CHECKING:
    from sparsetc.kernel import Kernel
    from sparsetc.pair.kernel import PairKernel


def sparse_tensor(coords: Any, values: Any, shape: Any, coalesced: bool) -> SparseTensor:
    """A SparseTensor. Nothing of what a file says is believed: coordinates in range, sorted and unique are checked."""
    found = SparseTensor(coords, values, shape, coalesce=False)
    if coalesced:
        if not crd.is_sorted_unique(crd.sort_keys(found._coords, found.shape[: found.sparse_order])):
            raise FormatError("a saved SparseTensor must have sorted, unique coordinates, as it says; it is damaged")
        found._coalesced = True
    return found


# A file from anywhere can then make a SparseTensor by ``torch.load``, which is data that is checked, and nothing else.
torch.serialization.add_safe_globals([sparse_tensor])

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


def kernel(equation: Spelled, x: SparseTensor, settings: Options, output: str, drop_zeros: bool = False) -> Kernel:
    """A kernel of one sparse operand."""
    from sparsetc.kernel import compile_bound

    bound, operands = _operands(equation, [x])
    made = compile_bound(bound, operands, settings, output)
    made.drop_zeros = drop_zeros
    return made


def pair_kernel(
    equation: Spelled, sparse: Sequence[SparseTensor], settings: Options, output: str, drop_zeros: bool = False
) -> PairKernel:
    """A kernel of several sparse operands."""
    from sparsetc.pair.kernel import PairKernel

    with lasting():
        made = PairKernel(*_operands(equation, sparse), settings, output)
    made.drop_zeros = drop_zeros
    return made
