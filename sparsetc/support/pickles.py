"""How objects are made again from what they pickle as. These names stand in files, so they must not change.

In: tensors and plain data, as a pickle or ``torch.save`` holds them. Out: the object; kernels are compiled again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from sparsetc.errors import FormatError
from sparsetc.ir.contraction_tree import Dot, Factor, Multiply, Sum
from sparsetc.ir.equation.einsum import Bound, Einsum, verify
from sparsetc.ir.plan import Part, Plan, Schedule, Storage
from sparsetc.options import Options, current, with_settings
from sparsetc.tensor import coords as crd
from sparsetc.tensor.blocks import checked
from sparsetc.tensor.inputs import as_coords, as_values
from sparsetc.tensor.pattern import Pattern
from sparsetc.tensor.sparse_tensor import SparseTensor

if TYPE_CHECKING:
    from sparsetc.contraction.kernel import Kernel


def sparse_tensor(coords: Any, values: Any, shape: Any, coalesced: bool) -> SparseTensor:
    """A SparseTensor. Nothing of what a file says is believed: coordinates in range, sorted and unique are checked."""
    found = SparseTensor(coords, values, shape, coalesce=False)
    if not coalesced:
        return found
    own = found.pattern
    if not crd.is_sorted_unique(crd.sort_keys(own.coords, own.shape)):
        raise FormatError("a saved SparseTensor must have sorted, unique coordinates, as it says; it is damaged")
    return SparseTensor._make(Pattern(own.coords, own.shape, True), found._values)


def tensor(pattern: Any, values: Any) -> SparseTensor:
    """A SparseTensor of a Pattern, which several may share; values are checked to be of it."""
    if not isinstance(pattern, Pattern):
        raise FormatError(f"a saved SparseTensor must have a Pattern, found {type(pattern).__name__}; it is damaged")
    own = as_values(values)
    as_coords(pattern.coords, own)
    sides = () if pattern.blocks is None else pattern.blocks.sides
    if tuple(own.shape[1 : 1 + len(sides)]) != sides:
        raise FormatError(f"a saved SparseTensor has blocks of {sides}, and values {tuple(own.shape)}; it is damaged")
    return SparseTensor._make(pattern, own)


def pattern(coords: Any, shape: Any, coalesced: bool) -> Pattern:
    """A Pattern, checked as that of a tensor."""
    stand_in = torch.zeros(()).expand(coords.shape[-1]).to(coords.device)
    return sparse_tensor(coords, stand_in, shape, coalesced).pattern


def pattern_of_blocks(coords: Any, sides: Any, shape: Any, coalesced: bool) -> Pattern:
    """A Pattern of blocks, checked as the others."""
    blocks = checked(crd.checked_shape(sides), crd.checked_shape(shape))
    found = pattern(coords, blocks.grid, coalesced)
    return Pattern(found.coords, found.shape, coalesced, blocks)


# A file from anywhere can then make these by ``torch.load``, which are data that is checked, and nothing else.
torch.serialization.add_safe_globals([pattern, pattern_of_blocks, sparse_tensor, tensor])

Spelled = tuple[tuple[tuple[str, ...], ...], tuple[str, ...], tuple[int, ...], str, tuple[tuple[str, int], ...]]
"""A `Bound` einsum as plain data."""


def spelled(bound: Bound) -> Spelled:
    """A `Bound` einsum as plain data."""
    e = bound.einsum
    return e.inputs, e.output, e.sparse, e.text, bound.sizes


def _operands(spelled: Spelled, sparse: Sequence[SparseTensor]) -> tuple[Bound, list[SparseTensor | torch.Tensor]]:
    """The einsum, and its operands; dense ones as stand-ins of their shapes. Kernels read what these say, so both are
    checked.
    """
    inputs, output, positions, text, sizes = spelled
    einsum = Einsum(inputs, output, positions)
    bound = Bound(replace(einsum, text=text if text.isprintable() else str(einsum)), sizes)
    verify(bound)
    shapes = [bound.shape(p) for p in positions]
    if [o.shape for o in sparse] != shapes:
        raise FormatError(f"a saved kernel of {bound} must have operands of shapes {shapes}; it is damaged")
    given, like = iter(sparse), torch.empty((), dtype=sparse[0].dtype, device=sparse[0].device)
    return bound, [next(given) if p in positions else like.expand(bound.shape(p)) for p in range(len(inputs))]


SAVED = ("precision", "plan", "deterministic", "memory_limit", "backend")
"""Options that are a kernel's own; where source is kept is the business of whoever loads it."""


def settings_of(options: Options) -> dict[str, Any]:
    """A kernel's options as plain data."""
    return {name: getattr(options, name) for name in SAVED if getattr(options, name) is not None}


def kernel(
    equation: Spelled, sparse: Sequence[SparseTensor], settings: dict[str, Any], output: str, drop_zeros: bool = False
) -> Kernel:
    """A kernel of one sparse operand or several, compiled here."""
    from sparsetc.contraction.contraction import contraction
    from sparsetc.contraction.kernel import Kernel

    if set(settings) - set(SAVED):
        raise FormatError(f"a saved kernel has options {', '.join(SAVED)}, found {', '.join(settings)}; it is damaged")
    own = with_settings(replace(Options(), cache_dir=current().cache_dir), settings)
    made = contraction(*_operands(equation, sparse), own, output)
    return Kernel(made, sparse, drop_zeros)


torch.serialization.add_safe_globals([kernel, Plan, Part, Schedule, Storage, Factor, Multiply, Dot, Sum])
