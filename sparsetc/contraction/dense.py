"""Products of dense operands alone, by torch: sums of 16-bit floats in float32, in the precision that options name.

In: an equation and tensors. Out: the result, differentiable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from math import prod

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sparsetc.contraction.autograd import Multilinear, Tensors, apply
from sparsetc.runtime.calls import integer_einsum
from sparsetc.support import Ints
from sparsetc.support.entry import matmul_precision, summed_wide, without_autocast
from sparsetc.tensor.pattern import followed, transforming


def einsum(equation: str, *operands: Tensor, precision: str = "highest") -> Tensor:
    """The result of `torch.einsum`, 16-bit floats summed in float32 and rounded once; integers stay in 64 bits."""
    # Torch's own rules serve forward mode and transforms, in the precision in force when they are asked, and a single
    # operand, which the result may be a view of.
    if not followed(operands) or transforming() or forward_ad._current_level >= 0 or len(operands) == 1:
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
            pair = _two_operands(equation)
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
    """Compute `torch.einsum`, some products of two operands faster."""
    return _function_of(equation, *[o.shape for o in operands])(*operands)


@lru_cache(maxsize=1024)
def _function_of(equation: str, *shapes: Ints) -> Callable[..., Tensor]:
    """Return the function that computes an einsum of operands of these shapes, without copying them where it can.

    What sums nothing is multiplied element by element, where torch would take matrices of width 1. A matrix is
    multiplied into a mode that lies within the other operand as many small matrices, into its last mode as one.
    """
    pair = _two_operands(equation)
    if pair is None:
        return partial(torch.einsum, equation)
    terms, output, summed = pair
    if not summed:
        return _outer(terms, output, shapes)
    small = int(prod(shapes[0]) > prod(shapes[1]))
    matrix, letters = terms[small], terms[1 - small]
    shared = set(matrix) & set(letters)
    if len(matrix) != 2 or len(shared) != 1 or shared != summed:
        return partial(torch.einsum, equation)
    (mode,) = shared
    transposed, behind = matrix[1] != mode, letters.index(mode) + 1
    free_size = shapes[small][int(transposed)]
    before, after = shapes[1 - small][: behind - 1], shapes[1 - small][behind:]
    result = letters.replace(mode, matrix.replace(mode, ""))
    order = [result.index(c) for c in output]
    flat, whole = (*before, shapes[1 - small][behind - 1], prod(after)), (*before, free_size, *after)

    def run(*operands: Tensor) -> Tensor:
        table, tensor = operands[small], operands[1 - small]
        if not after and (behind == 2 or tensor.is_contiguous()):
            return torch.matmul(tensor, table if transposed else table.t()).permute(order)
        if flat[-1] >= WIDE:
            return torch.matmul(table.t() if transposed else table, tensor.reshape(flat)).view(whole).permute(order)
        return torch.einsum(equation, *operands)

    return run


@lru_cache(maxsize=1024)
def _two_operands(equation: str) -> tuple[list[str], str, set[str]] | None:
    """The terms of two operands, the output and the letters that are summed; None of other einsums."""
    inputs, output = equation.split("->")
    terms = inputs.split(",")
    if len(terms) != 2 or any(len(set(term)) < len(term) for term in terms):
        return None
    return terms, output, {*terms[0], *terms[1]}.difference(output)


def _outer(terms: Sequence[str], output: str, shapes: Sequence[Ints]) -> Callable[..., Tensor]:
    """Return the function of two operands that multiplies them element by element, each repeated as the output asks.

    From the last mode on that one of them lacks, both are written out before: torch is slow where short ones repeat.
    """
    lacked = [next((n for n, c in enumerate(output) if c not in term), len(output)) for term in terms]
    at, lying = min(len(output), max(lacked) + 1), []
    whole = [1] * len(output)
    for term, shape in zip(terms, shapes, strict=True):
        own = [shape[term.index(c)] if c in term else 1 for c in output]
        order = [term.index(c) for c in output if c in term]
        lying.append((order, tuple([slice(None) if c in term else None for c in output]), own[:at]))
        whole = [m if n == 1 else n for m, n in zip(whole, own, strict=True)]

    def run(*operands: Tensor) -> Tensor:
        aligned = [
            (o.permute(order)[places], before) for o, (order, places, before) in zip(operands, lying, strict=True)
        ]
        wide = [o.expand(*before, *whole[at:]).flatten(at) if at < len(whole) else o for o, before in aligned]
        return torch.mul(*wide).view(whole)

    return run
