"""Gradients of einsums, in every form that torch asks for them: backward, forward mode, `torch.func`.

In: a function that is linear in each of its tensors, and says what einsum its gradient is and how it takes a batch.
Out: its result, differentiable. A gradient is a function of the same kind, so gradients of gradients follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import add
from typing import Any, Protocol

import torch
from torch.autograd import forward_ad

from sparsetc.contraction.dense import Tensors
from sparsetc.errors import TransformError
from sparsetc.support.entry import entry_point, without_autocast
from sparsetc.tensor.pattern import transforming


class Multilinear(Protocol):
    """A compiled function of tensors, linear in each of them."""

    def rows(self, tensors: Tensors) -> torch.Tensor:
        """The result, outside autograd."""

    def of_any(self) -> Multilinear:
        """The function with nothing prepared for the tensors that it is first called with."""
        return self

    def gradients(self, wanted: Sequence[bool], tensors: Tensors, upstream: torch.Tensor) -> list[torch.Tensor | None]:
        """The gradient for each tensor where it is wanted, given the result's; differentiable.

        What a tensor holds is not read for its own gradient.
        """

    def batched(self, tensors: Tensors, dims: Sequence[int | None]) -> tuple[torch.Tensor, int]:
        """The results of a batch, differentiable, and their batch dimension, given that of each tensor.

        Where no other rule is known, they are made one after the other.
        """
        return one_by_one(self.of_any(), tensors, dims)


def apply(function: Multilinear, tensors: Tensors) -> torch.Tensor:
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


FOLLOWED = ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView")


@contextmanager
def following() -> Iterator[None]:
    """A block that autograd follows, inside of operators of a library too, which run where it is off."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in FOLLOWED:
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded), torch.enable_grad():
        yield


def transposed(
    pull: Callable[..., Tensors], tensors: Tensors, n: int, gradient: Callable[[int, Tensors], torch.Tensor]
) -> torch.Tensor:
    """The gradient for one of the tensors, outside autograd, through a function that is linear in each.

    Args:
        pull: the function; the tensor goes into one of its results alone.
        tensors: its arguments.
        n: which of them.
        gradient: the gradient for a result of the function, given which and all of them.
    """
    arguments = [t.detach() for t in tensors]
    wanted = arguments[n].requires_grad_()
    with following():
        pulled = pull(*arguments)
        ((at, result),) = [(m, t) for m, t in enumerate(pulled) if t.requires_grad]
    of_result = gradient(at, [t.detach() for t in pulled])
    with following():
        return torch.autograd.grad(result, wanted, of_result)[0]


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
        wanted, tensors = ctx.needs_input_grad[1:], ctx.saved_tensors

        def gradients(upstream: torch.Tensor) -> list[torch.Tensor]:
            return [g for g in ctx.function.gradients(wanted, tensors, upstream) if g is not None]

        with without_autocast(upstream.device):
            found = iter(in_batches(gradients, upstream))
        return None, *(next(found) if w else None for w in wanted)

    @staticmethod
    @entry_point
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor | None) -> torch.Tensor:
        tensors = [forward_ad.unpack_dual(t).primal for t in ctx.saved_tensors]

        def tangent(*given: torch.Tensor) -> list[torch.Tensor]:
            own = zip((n for n, t in enumerate(tangents) if t is not None), given, strict=True)
            return [reduce(add, (apply(ctx.function, [*tensors[:n], t, *tensors[n + 1 :]]) for n, t in own))]

        # Torch turns forward mode off here, and with it the tangents of levels further out.
        with forward_ad._set_fwd_grad_enabled(True):
            (found,) = in_batches(tangent, *(t for t in tangents if t is not None))
        return found


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


def _remember(ctx: Any, function: Multilinear, tensors: Tensors) -> None:
    ctx.function = function.of_any()
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)


def carry_derivatives(operands: Sequence[Any]) -> bool:
    """Whether any of these requires a gradient or has a tangent itself, whatever is active around it."""
    given = [t for t in operands if isinstance(t, torch.Tensor)]
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        return True
    return forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in given)


LEVELS = 64
"""Batches within batches that torch has at most."""


def in_batches(function: Callable[..., list[torch.Tensor]], *given: torch.Tensor) -> list[torch.Tensor]:
    """The function's results, of tensors that may be batches as autograd itself makes them (``is_grads_batched``).

    Those are of an older kind than the batches of `torch.func`, which all rules here are for.
    """
    batch = torch._C._functorch.is_legacy_batchedtensor
    if not any(map(batch, given)):
        return function(*given)

    def bare(t: torch.Tensor, level: int) -> torch.Tensor:
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
    found: list[torch.Tensor] = torch.func.vmap(function, in_dims=dims)(*plain)
    # Of a batch that lies together, as forward mode asks for.
    return [torch._add_batch_dim(t.contiguous(), 0, level) for t in found]  # type: ignore[attr-defined]


def one_by_one(function: Multilinear, tensors: Tensors, dims: Sequence[int | None]) -> tuple[torch.Tensor, int]:
    """The results of a batch, a call each."""
    size = next(t.shape[d] for t, d in zip(tensors, dims, strict=True) if d is not None)
    each = [[one_of_batch(n, *own) for own in zip(tensors, dims, strict=True)] for n in range(size or 1)]
    return torch.stack([apply(function, given) for given in each])[:size], 0


def one_of_batch(n: int, argument: Any, dim: Any) -> Any:
    """What an argument is in one call of a batch: one of a tensor along its batch dimension; zeros of no batch.

    Tensors in a list have a dimension each; what has none is the same in all calls.
    """
    if isinstance(argument, list):
        return [one_of_batch(n, *own) for own in zip(argument, dim, strict=True)]
    if dim is None:
        return argument
    return argument.select(dim, n) if argument.shape[dim] else argument.sum(dim, dtype=argument.dtype)
