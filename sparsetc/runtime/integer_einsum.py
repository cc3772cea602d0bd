"""Einsums of integers, of which torch has no matrix product on a GPU: there, pieces are multiplied and added up.

In: an equation in the grammar of `torch.einsum`, without an ellipsis, and int64 operands. Out: what `torch.einsum`
gives. Sums wrap modulo 2**64, as torch's do, so they have one value in any order; in float64 they would not be exact.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

import torch

ELEMENTS = 1 << 22
"""Elements of the largest product that is made to be summed: 32 MB. Not measured."""

Term = tuple[str, torch.Tensor]
"""Letters and an operand that has them."""


def has_matrix_product(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch multiplies matrices of this dtype on a device of this type: integers on the CPU alone."""
    return device.type == "cpu" or dtype.is_floating_point or dtype.is_complex


def integer_einsum(equation: str, *operands: torch.Tensor) -> torch.Tensor:
    """The result of `torch.einsum` on int64 operands, on any device; no more than `ELEMENTS` are made beside results.

    Args:
        equation: with an output, one letter an index.
        operands: of any sizes; 1 where another operand's is larger, as torch takes them.
    """
    if len(operands) < 2 or has_matrix_product(operands[0].dtype, operands[0].device):
        return torch.einsum(equation, *operands)
    inputs, output = equation.split("->")
    left = list(zip(inputs.split(","), operands, strict=True))
    for places in _path(equation, tuple(o.shape for o in operands)):
        pair = [left.pop(place) for place in sorted(places, reverse=True)]
        needed = output if not left else {c for term in (output, *(t for t, _ in left)) for c in term}
        kept = output if not left else "".join(c for c in dict.fromkeys(pair[1][0] + pair[0][0]) if c in needed)
        left.append((kept, _contracted(pair[1], pair[0], kept)))
    return left[0][1]


@lru_cache(maxsize=256)
def _path(equation: str, shapes: tuple[torch.Size, ...]) -> tuple[tuple[int, ...], ...]:
    """The pairs to contract, by their positions in the list of operands that are left."""
    if len(shapes) == 2:
        return ((0, 1),)
    import opt_einsum  # few products have three factors or more

    path, _ = opt_einsum.contract_path(equation, *shapes, shapes=True)
    return tuple(path)


def _contracted(left: Term, right: Term, kept: str) -> torch.Tensor:
    """The product of two operands, summed over the letters that are not kept."""
    shared = [c for c in dict.fromkeys(left[0]) if c in right[0] and c not in kept]
    letters = [*kept, *shared]
    return _product(_aligned(left, letters), _aligned(right, letters), len(kept))


def _aligned(term: Term, letters: list[str]) -> torch.Tensor:
    """An operand with a dimension for each of the letters, of size 1 where it has not; summed over all others."""
    own, operand = term
    ordered = torch.einsum(f"{own}->{''.join(c for c in letters if c in own)}", operand)  # of one: diagonals and sums
    sizes = iter(ordered.shape)
    return ordered.reshape([next(sizes) if c in own else 1 for c in letters])


def _product(left: torch.Tensor, right: torch.Tensor, kept: int) -> torch.Tensor:
    """The product, broadcast, summed over all dimensions but the first `kept`; of halves where it is too large."""
    shape = torch.broadcast_shapes(left.shape, right.shape)
    if len(shape) == kept:
        return left * right
    if prod(shape) <= ELEMENTS:
        return (left * right).sum(tuple(range(kept, len(shape))))
    axis = max(range(len(shape)), key=shape.__getitem__)
    half = shape[axis] // 2
    parts = []
    for begin, size in ((0, half), (half, shape[axis] - half)):
        cut = [t if t.shape[axis] == 1 else t.narrow(axis, begin, size) for t in (left, right)]
        parts.append(_product(cut[0], cut[1], kept))
    return torch.cat(parts, axis) if axis < kept else parts[0] + parts[1]
