"""Gradients of einsums, in every form that torch asks for them: backward, forward mode, `torch.func`.

In: a function that is linear in each of its tensors, and says what einsum its gradient is and how it takes a batch.
Out: its result, differentiable. A gradient is a function of the same kind, so gradients of gradients follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sparsetc.codegen.parts import Values
from sparsetc.errors import TransformError
from sparsetc.support.entry import entry_point, without_autocast
from sparsetc.tensor.pattern import followed, transforming

Tensors = Sequence[Tensor]


class Multilinear:
    """A compiled function of tensors, linear in each of them.

    Attributes:
        rows: the result of tensors, outside autograd.
        gradients: which are wanted, the tensors and the result's gradient -> the gradient for each tensor where it is
            wanted, differentiable. What a tensor holds is not read for its own gradient.
    """

    def __init__(
        self,
        rows: Callable[[Tensors], Tensor],
        gradients: Callable[[Sequence[bool], Tensors, Tensor], list[Tensor | None]],
    ) -> None:
        self.rows = rows
        self.gradients = gradients

    def of_any(self) -> Multilinear:
        """The function with nothing prepared for the tensors that it is first called with."""
        return self

    def batched(self, tensors: Tensors, dims: Sequence[int | None], size: int) -> tuple[Tensor, int]:
        """Compute a differentiable batch of results, given the batch dimension of each tensor; return it with its own.

        Where no other rule is known, they are made one after the other.
        """
        return one_by_one(lambda *own: apply(self.of_any(), own), tensors, dims, size)


UNREAD: Values = ()
"""In place of packed values: no kernel runs, since the result's graph is wanted and not the result."""


def apply(function: Multilinear, tensors: Tensors) -> Tensor:
    """Compute the result, and record a graph if a tensor requires a gradient."""
    if not followed(tensors):
        return function.rows(tensors)
    if transforming():
        return _Transformed.apply(function, *map(recordable, tensors))  # type: ignore[no-any-return]
    return node(_Rows, function, *map(recordable, tensors))  # type: ignore[no-any-return]


FOLLOWED = ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView")


@contextmanager
def following() -> Iterator[None]:
    """Enable autograd in this block, also inside operators of a library, where it is off."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in FOLLOWED:
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded), torch.enable_grad():
        yield


def node(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """``function.apply`` of `recordable` tensors outside transforms, without its checks for them."""
    return super(torch.autograd.Function, function).apply(*arguments)  # type: ignore[misc]


def recordable(tensor: Tensor) -> Tensor:
    """A tensor that autograd can save: itself, or a copy where it was made under ``torch.inference_mode``."""
    tensor = torch._C._functorch.unwrap_if_dead(tensor)
    return tensor.clone() if tensor.is_inference() and not torch.is_inference_mode_enabled() else tensor


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Multilinear, *tensors: Tensor) -> Tensor:
        _remember(ctx, function, tensors)
        return function.rows(tensors).data  # a view that is made here cannot be changed in place, nor have a tangent

    @staticmethod
    @entry_point
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        wanted, tensors = ctx.needs_input_grad[1:], ctx.saved_tensors

        def gradients(upstream: Tensor) -> list[Tensor]:
            return [g for g in ctx.function.gradients(wanted, tensors, upstream) if g is not None]

        with without_autocast(upstream.device):
            gradients_wanted = iter(in_batches(gradients, upstream))
        return None, *(next(gradients_wanted) if w else None for w in wanted)

    @staticmethod
    @entry_point
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> Tensor:
        tensors = [forward_ad.unpack_dual(t).primal for t in ctx.saved_tensors]

        def tangent(*given: Tensor) -> list[Tensor]:
            by_number = zip((n for n, t in enumerate(tangents) if t is not None), given, strict=True)
            return [reduce(add, (apply(ctx.function, [*tensors[:n], t, *tensors[n + 1 :]]) for n, t in by_number))]

        # Torch turns forward mode off here, and with it the tangents of levels further out.
        with forward_ad._set_fwd_grad_enabled(True):
            (tangent_of_result,) = in_batches(tangent, *(t for t in tangents if t is not None))
        return tangent_of_result


class _Transformed(_Rows):
    """The autograd function under `torch.func`; outside of transforms its calls would take three times as long."""

    @staticmethod
    def forward(function: Multilinear, *tensors: Tensor) -> Tensor:  # type: ignore[override]
        return function.rows(tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _remember(ctx, inputs[0], inputs[1:])

    @staticmethod
    @entry_point
    def vmap(info: Any, dims: tuple[Any, ...], function: Multilinear, *tensors: Tensor) -> tuple[Tensor, int]:
        return function.batched(tensors, dims[1:], info.batch_size)


def _remember(ctx: Any, function: Multilinear, tensors: Tensors) -> None:
    ctx.function = function.of_any()
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)


def carry_derivatives(operands: Sequence[Any]) -> bool:
    """Return True if an operand requires a gradient or has a tangent."""
    tensors = [t for t in operands if isinstance(t, Tensor)]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return True
    return forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)


LEVELS = 64
"""Batches within batches that torch has at most."""


def in_batches(function: Callable[..., list[Tensor]], *given: Tensor) -> list[Tensor]:
    """The function's results, of tensors that may be batches as autograd itself makes them (``is_grads_batched``).

    Those are of an older kind than the batches of `torch.func`, which all rules here are for.
    """
    batch = torch._C._functorch.is_legacy_batchedtensor
    if not any(map(batch, given)):
        return function(*given)

    def bare(t: Tensor, level: int) -> Tensor:
        return torch._remove_batch_dim(t, level, 1, 0) if batch(t) else t  # type: ignore[attr-defined, no-any-return]

    for level in range(1, LEVELS + 1):
        plain = [bare(t, level) for t in given]
        if not any(map(batch, plain)):
            break
    else:
        raise TransformError(
            "batches of gradients (is_grads_batched, vectorize) within others cannot look into a sparsetc kernel; take "
            "torch.func.jacrev or torch.func.vmap, which can"
        )
    dims = tuple(0 if batch(t) else None for t in given)
    results: list[Tensor] = torch.func.vmap(function, in_dims=dims)(*plain)
    # Of a batch that lies together, as forward mode asks for.
    return [torch._add_batch_dim(t.contiguous(), 0, level) for t in results]  # type: ignore[attr-defined]


def one_by_one(
    call: Callable[..., Tensor], arguments: Sequence[Any], dims: Sequence[Any], size: int
) -> tuple[Tensor, int]:
    """The results of a batch, a call each."""
    each = [[one_of_batch(n, *args) for args in zip(arguments, dims, strict=True)] for n in range(size or 1)]
    return torch.stack([call(*args) for args in each])[:size], 0


def one_of_batch(n: int, argument: Any, dim: Any) -> Any:
    """Return an argument for one call of a batch: one slice along the batch dimension; zeros of an empty batch.

    Tensors in a list have a dimension each; what has none is the same in all calls.
    """
    if isinstance(argument, list):
        return [one_of_batch(n, *member) for member in zip(argument, dim, strict=True)]
    if dim is None:
        return argument
    return argument.select(dim, n) if argument.shape[dim] else argument.sum(dim, dtype=argument.dtype)
