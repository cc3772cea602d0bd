"""Products of dense operands alone, by torch: sums of 16-bit floats in float32, in the precision that options name.

In: an equation and tensors. Out: the result, differentiable.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sparsetc.contraction.autograd import Multilinear, Tensors, apply
from sparsetc.runtime.calls import integer_einsum
from sparsetc.support.entry import matmul_precision, summed_wide, without_autocast
from sparsetc.tensor.pattern import transforming


def einsum(equation: str, *operands: Tensor, precision: str = "highest") -> Tensor:
    """The result of `torch.einsum`, 16-bit floats summed in float32 and rounded once; integers stay in 64 bits."""
    # Torch's own rules serve forward mode and transforms, in the precision in force when they are asked, and a single
    # operand, which the result may be a view of.
    if transforming() or forward_ad._current_level >= 0 or len(operands) == 1:
        return _contracted(equation, precision, operands)
    by_torch = Multilinear(partial(_contracted, equation, precision), partial(_gradients, equation, precision))
    return apply(by_torch, operands)


def _gradients(
    equation: str, precision: str, wanted: Sequence[bool], tensors: Tensors, upstream: Tensor
) -> list[Tensor | None]:
    """The gradients of `einsum`, made as the result is, wherever `backward` is called."""
    again, followed_tensors = torch.is_grad_enabled(), [t for t, w in zip(tensors, wanted, strict=True) if w]
    with torch.enable_grad(), matmul_precision(precision):
        result = _contracted(equation, precision, tensors)
        gradients = iter(torch.autograd.grad(result, followed_tensors, upstream, create_graph=again))
    return [next(gradients) if w else None for w in wanted]


def _contracted(equation: str, precision: str, operands: Tensors) -> Tensor:
    dtype = operands[0].dtype
    with without_autocast(operands[0].device), matmul_precision(precision):
        if dtype in (torch.float16, torch.bfloat16):
            pair = _pair(equation)
            # Of a matrix product, with every summed letter in both, a GPU rounds once.
            if operands[0].is_cuda and pair is not None and all(pair[2] <= set(term) for term in pair[0]):
                with summed_wide():
                    return _product(equation, operands)
            return _product(equation, [o.float() for o in operands]).to(dtype)
        if not (dtype.is_floating_point or dtype.is_complex):  # torch's own mixes types where an index has size 0
            return integer_einsum(equation, *(o.long() for o in operands))
        return _product(equation, operands)


WIDE = 8
"""Least elements behind a mode for contracting it in its place: copying the tensor first took up to twice as long (one
core, 10 shapes of TTM chains)."""


def _product(equation: str, operands: Tensors) -> Tensor:
    """Compute `torch.einsum`; some products of two operands faster, without copying them.

    What sums nothing is multiplied element by element, where torch would take matrices of width 1. A matrix is
    multiplied into a mode that lies within the other operand as many small matrices, into its last mode as one.
    """
    outer = _outer(equation)
    if outer is not None:
        lying, at = outer
        aligned = [o.permute(order)[places] for o, (order, places) in zip(operands, lying, strict=True)]
        # `torch.broadcast_shapes` takes up to 240 us for it (torch 2.13).
        sizes = [m if n == 1 else n for m, n in zip(aligned[0].shape, aligned[1].shape, strict=True)]
        wide = [o.expand(*o.shape[:at], *sizes[at:]).flatten(at) if at < len(sizes) else o for o in aligned]
        return torch.mul(*wide).view(sizes)
    small = int(len(operands) == 2 and operands[0].numel() > operands[1].numel())
    within = _within(equation, small)
    if within is not None:
        behind, turned, order = within
        table, tensor = operands[small], operands[1 - small]
        if behind == tensor.ndim and (behind == 2 or tensor.is_contiguous()):
            return torch.matmul(tensor, table if turned else table.t()).permute(order)
        if tensor.shape[behind:].numel() >= WIDE:
            result = torch.matmul(table.t() if turned else table, tensor.flatten(behind))
            return result.unflatten(-1, tensor.shape[behind:]).permute(order)
    return torch.einsum(equation, *operands)


@lru_cache(maxsize=1024)
def _pair(equation: str) -> tuple[list[str], str, set[str]] | None:
    """The terms of two operands, the output and the letters that are summed; None of other einsums."""
    inputs, output = equation.split("->")
    terms = inputs.split(",")
    if len(terms) != 2 or any(len(set(term)) < len(term) for term in terms):
        return None
    return terms, output, {*terms[0], *terms[1]}.difference(output)


@lru_cache(maxsize=1024)
def _outer(equation: str) -> tuple[list[tuple[list[int], tuple[slice | None, ...]]], int] | None:
    """Return how two operands lie in the output of an einsum that sums nothing; None of other einsums.

    Returns:
        For each operand the order of its modes in the output, and an index with a mode of size 1 for each that it
        lacks; and from which mode on both are written out before, since torch is slow where short ones repeat.
    """
    pair = _pair(equation)
    if pair is None or pair[2]:
        return None
    terms, output, _ = pair
    lying, lacked = list[tuple[list[int], tuple[slice | None, ...]]](), list[int]()
    for term in terms:
        order = [term.index(c) for c in output if c in term]
        lying.append((order, tuple([slice(None) if c in term else None for c in output])))
        lacked.append(next((n for n, c in enumerate(output) if c not in term), len(output)))
    return lying, min(len(output), max(lacked) + 1)


@lru_cache(maxsize=1024)
def _within(equation: str, small: int) -> tuple[int, bool, list[int]] | None:
    """Return how a matrix, the operand of this number, is multiplied into a mode of the other; None if it cannot be.

    Returns:
        The modes up to that one, whether the matrix is transposed, and the order of the result's modes.
    """
    pair = _pair(equation)
    if pair is None:
        return None
    terms, output, summed = pair
    matrix, letters = terms[small], terms[1 - small]
    shared = set(matrix) & set(letters)
    if len(matrix) != 2 or len(shared) != 1 or shared != summed:
        return None
    (mode,) = shared
    result = letters.replace(mode, matrix.replace(mode, ""))
    return letters.index(mode) + 1, matrix[1] != mode, [result.index(c) for c in output]
