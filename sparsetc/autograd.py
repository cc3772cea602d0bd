"""Gradients of einsums, in every form that torch asks for them: backward, forward mode, `torch.func`.

In: a function that is linear in each of its tensors, and says what einsum its gradient is and how it takes a batch.
Out: its result, differentiable. A gradient is a function of the same kind, so gradients of gradients follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.autograd import forward_ad

from sparsetc.entry import check_upstream, entry_point
from sparsetc.pattern import transforming
from sparsetc.runtime.autocast import autocast_off


class Multilinear(Protocol):
    """A compiled function of tensors, linear in each of them."""

    def rows(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The result, outside autograd."""

    def of_any(self) -> Multilinear:
        """The function with nothing prepared for the tensors that it is first called with."""

    def gradients(
        self, wanted: Sequence[bool], tensors: Sequence[torch.Tensor], upstream: torch.Tensor
    ) -> list[torch.Tensor | None]:
        """The gradient for each tensor where it is wanted, given the result's; differentiable.

        What a tensor holds is not read for its own gradient.
        """

    def batched(self, tensors: Sequence[torch.Tensor], dims: Sequence[int | None]) -> tuple[torch.Tensor, int]:
        """The results of a batch, differentiable, and their batch dimension, given that of each tensor."""


def apply(function: Multilinear, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The result, with a graph to those tensors that want one."""
    if not followed(tensors):
        return function.rows(tensors)
    kind = _Transformed if transforming() else _Rows
    found: torch.Tensor = kind.apply(function, *map(recordable, tensors))
    return found


def followed(tensors: Sequence[torch.Tensor | None]) -> bool:
    """Whether autograd, forward mode or a transform of `torch.func` follows what is done to the tensors."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return True
    return transforming() or forward_ad._current_level >= 0


def recordable(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that autograd can save: itself, or a copy where it was made under ``torch.inference_mode``."""
    return tensor.clone() if tensor.is_inference() and not torch.is_inference_mode_enabled() else tensor


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Multilinear, *tensors: torch.Tensor) -> torch.Tensor:
        _remember(ctx, function, tensors)
        return function.rows(tensors)

    @staticmethod
    @entry_point
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        check_upstream(upstream)
        tensors = ctx.saved_tensors
        with autocast_off(upstream.device):
            return None, *ctx.function.gradients(ctx.needs_input_grad[1:], tensors, upstream)

    @staticmethod
    @entry_point
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor | None) -> torch.Tensor:
        tensors, total = ctx.saved_tensors, None
        for n, tangent in enumerate(tangents):
            if tangent is not None:
                term = apply(ctx.function, [*tensors[:n], tangent, *tensors[n + 1 :]])
                total = term if total is None else total + term
        assert total is not None
        return total


class _Transformed(_Rows):
    """The form that `torch.func` takes, of which a call takes three times as long outside of it."""

    @staticmethod
    def forward(function: Multilinear, *tensors: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return function.rows(tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _remember(ctx, inputs[0], inputs[1:])

    @staticmethod
    @entry_point
    def vmap(
        info: Any, dims: tuple[Any, ...], function: Multilinear, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, int]:
        return function.batched(tensors, dims[1:])


def _remember(ctx: Any, function: Multilinear, tensors: Sequence[torch.Tensor]) -> None:
    ctx.function = function.of_any()
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)


def one_by_one(
    function: Multilinear, tensors: Sequence[torch.Tensor], dims: Sequence[int | None]
) -> tuple[torch.Tensor, int]:
    """The results of a batch, a call each."""
    size = next(t.shape[d] for t, d in zip(tensors, dims, strict=True) if d is not None)

    def one(n: int) -> torch.Tensor:
        return apply(function, [t if d is None else t.select(d, n) for t, d in zip(tensors, dims, strict=True)])

    if size:
        return torch.stack([one(n) for n in range(size)]), 0
    shaped = [
        t if d is None else t.new_zeros(t.shape[:d] + t.shape[d + 1 :]) for t, d in zip(tensors, dims, strict=True)
    ]
    alike = apply(function, shaped)
    return alike.new_empty((0, *alike.shape)), 0
