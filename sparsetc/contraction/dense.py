"""Dense operands as kernels read them: their bits, strides and broadcasts settled, and products of them alone.

In: strided tensors as the caller has them. Out: tables that lie in memory as their elements read, and results of
einsums over dense operands, made by torch in the precision that the options name and not in autocast's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad

from sparsetc.ir.equation.einsum import Bound, Einsum
from sparsetc.options import Options
from sparsetc.runtime.calls import integer_einsum
from sparsetc.support.precision import autocast_off, matmul_precision, without_autocast
from sparsetc.tensor.pattern import transforming
from sparsetc.tensor.sparse_tensor import SparseTensor

# -- broadcasts -------------------------------------------------------------------------------------------------------

Dims = tuple[int, ...]
Tensors = Sequence[torch.Tensor]
Operand = TypeVar("Operand", torch.Tensor, SparseTensor, torch.Tensor | SparseTensor)


def repeated_dims(operand: torch.Tensor) -> Dims:
    """The dimensions along which a tensor is one slice repeated (stride 0); none where it may want a gradient.

    The gradient of an expanded tensor has an element for each of its own, which that of one slice has not.
    """
    strides = operand.stride()
    if 0 not in strides or operand.requires_grad:
        return ()
    return tuple(n for n, (size, stride) in enumerate(zip(operand.shape, strides, strict=True)) if size > 1 > stride)


def broadcast_dims(bound: Bound, operands: Sequence[torch.Tensor | SparseTensor], repeated: bool) -> dict[int, Dims]:
    """For each dense operand, the dimensions whose letters it need not have: another operand has them in full.

    Args:
        bound: the einsum as written.
        operands: its operands; a size of 1 broadcasts.
        repeated: whether a dimension that is one slice repeated is left out as one of size 1 is.
    """
    e = bound.einsum
    holders = {c: set(e.holders(c)) for c in e.indices}
    dropped: dict[int, Dims] = {}
    for p in e.dense:
        operand, dims = operands[p], []
        alike = repeated_dims(operand) if repeated and isinstance(operand, torch.Tensor) else ()
        for n, (letter, size) in enumerate(zip(e.inputs[p], operand.shape, strict=True)):
            broadcast = n in alike or size == 1 != bound.by_index[letter]
            if broadcast and e.inputs[p].count(letter) == 1 and len(holders[letter]) > 1:
                holders[letter].discard(p)
                dims.append(n)
        dropped[p] = tuple(dims)
    return dropped


def without(bound: Bound, dropped: dict[int, Dims]) -> Bound:
    """The einsum whose dense operands lack these dimensions."""
    e = bound.einsum
    inputs = tuple(
        [tuple([c for n, c in enumerate(term) if n not in dropped.get(p, ())]) for p, term in enumerate(e.inputs)]
    )
    return bound if inputs == e.inputs else Bound.of(Einsum(inputs, e.output, e.sparse, e.text), bound.by_index)


def slices(operand: torch.Tensor, dims: Dims) -> torch.Tensor | None:
    """One slice along each of the dimensions; None where they are not broadcast, and slices differ."""
    if not dims:
        return operand
    repeated = repeated_dims(operand)
    if any(operand.shape[n] != 1 and n not in repeated for n in dims):
        return None
    for n in reversed(dims):
        operand = operand.select(n, 0)
    return operand


# -- tables -----------------------------------------------------------------------------------------------------------


def resolved(operand: torch.Tensor) -> torch.Tensor:
    """A tensor whose memory reads as its elements do: torch marks negation and conjugation by a bit."""
    return operand.resolve_conj().resolve_neg() if operand.is_conj() or operand.is_neg() else operand


def table(operand: torch.Tensor, shape: tuple[int, ...], permutation: Dims | None, settings: Options) -> torch.Tensor:
    """The operand expanded to `shape`, its dimensions in the order a kernel reads them, contiguous.

    Raises:
        OutOfMemoryError: the operand is a broadcast one whose copy would pass the memory limit.
    """
    whole = operand if operand.shape == shape else operand.expand(shape)
    whole = resolved(whole if permutation is None else whole.permute(permutation))
    if whole.is_contiguous():
        return whole
    if 0 in whole.stride():
        what = f"a broadcast operand of shape {tuple(shape)}, which kernels read whole,"
        settings.check_memory(whole.numel() * whole.element_size(), whole.device, what)
    return whole.contiguous()


# -- products of dense operands alone ---------------------------------------------------------------------------------


def promoted(operands: Sequence[Operand]) -> list[Operand]:
    """Operands of one dtype where autocast is on and floats differ: the widest, as torch promotes them.

    Autocast makes layers give narrower floats than the tensors that a caller keeps. Outside of autocast nothing is
    converted unasked.
    """
    if not torch.is_autocast_enabled(operands[0].device.type):
        return list(operands)
    floats = {o.dtype for o in operands if o.dtype.is_floating_point}
    if len(floats) < 2:
        return list(operands)
    widest = reduce(torch.promote_types, floats)
    return [o.to(widest) if o.dtype.is_floating_point else o for o in operands]


def converted(operands: Tensors, dtype: torch.dtype, device: torch.device) -> Tensors:
    """Dense operands of a compiled kernel, floats brought to its dtype where autocast is on."""
    if not dtype.is_floating_point or not torch.is_autocast_enabled(device.type):
        return operands
    return [o.to(dtype) if isinstance(o, torch.Tensor) and o.dtype.is_floating_point else o for o in operands]


def einsum(equation: str, *operands: torch.Tensor, precision: str = "highest") -> torch.Tensor:
    """The result of `torch.einsum`, 16-bit floats summed in float32 and rounded once; integers stay in 64 bits."""
    # Torch's own rules serve forward mode and transforms, in the precision that is in force when they are asked.
    plain = not transforming() and forward_ad._current_level < 0
    if plain and torch.is_grad_enabled() and any(o.requires_grad for o in operands):
        result: torch.Tensor = _Einsum.apply(equation, precision, *operands)
        return result
    return _contracted(equation, precision, operands)


class _Einsum(torch.autograd.Function):
    """`einsum`, whose gradient is made as its result is, wherever `backward` is called."""

    @staticmethod
    def forward(ctx: Any, equation: str, precision: str, *operands: torch.Tensor) -> torch.Tensor:
        ctx.equation, ctx.precision = equation, precision
        ctx.save_for_backward(*operands)
        return _contracted(equation, precision, operands)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        operands, again = ctx.saved_tensors, torch.is_grad_enabled()
        wanted = [o for o, needed in zip(operands, ctx.needs_input_grad[2:], strict=True) if needed]
        with torch.enable_grad(), autocast_off(upstream.device), matmul_precision(ctx.precision):
            result = _contracted(ctx.equation, ctx.precision, operands)
            gradients = iter(torch.autograd.grad(result, wanted, upstream, create_graph=again))
        return (None, None, *(next(gradients) if needed else None for needed in ctx.needs_input_grad[2:]))


def _contracted(equation: str, precision: str, operands: Tensors) -> torch.Tensor:
    dtype = operands[0].dtype
    with without_autocast(operands[0].device), matmul_precision(precision):
        if dtype in (torch.float16, torch.bfloat16):
            return torch.einsum(equation, *(o.float() for o in operands)).to(dtype)
        if not (dtype.is_floating_point or dtype.is_complex):  # torch's own mixes types where an index has size 0
            return integer_einsum(equation, *(o.long() for o in operands))
        return torch.einsum(equation, *operands)
