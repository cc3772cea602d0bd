"""Operators of `torch.library` for bodies: one node of a graph that torch traces, exports or differentiates.

In: a body with its pairs, known by a key, and tensors. Out: ``sparsetc::mapped``, which gives the result and the
logarithms of rows' sums, and ``sparsetc::mapped_gradients``. Eager calls take the shorter way, `pairwise.computed`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparsetc.contraction.kernel import operators
from sparsetc.errors import TransformError
from sparsetc.maps.body import LOG2E
from sparsetc.maps.fused import gradients_by, gradients_of_steps, result_shape
from sparsetc.options import in_force
from sparsetc.pairwise import Traced, computed, in_steps, kernels_of, known
from sparsetc.support.entry import without_autocast
from sparsetc.tensor.sums import accumulator

LEAST = -1e30
"""The logarithm of a row's sum for kernels, where it is minus infinity."""


def _of(key: str) -> Traced:
    traced = known.get(key)
    if traced is None:
        raise TransformError(
            f"the graph was traced with {key!r}, which this process does not have, or no more; trace it again here"
        )
    return traced


def _run(key: str, tensors: list[Tensor], seed: Tensor | None) -> tuple[Tensor, Tensor]:
    body, pairs, options, name = _of(key)
    with in_force(options), without_autocast(tensors[0].device):
        found = computed(body, pairs, tensors, {}, name, seed, body.softmax)
    result, lse = found if body.softmax else (found, found.new_empty(0))
    return result.contiguous(), lse.to(accumulator(result.dtype)).contiguous()


def _run_gradients(
    key: str,
    tensors: list[Tensor],
    seed: Tensor | None,
    result: Tensor,
    lse: Tensor,
    of_result: Tensor | None,
    of_lse: Tensor | None,
    wanted: list[bool],
) -> list[Tensor]:
    body, pairs, options, name = _of(key)
    with in_force(options), without_autocast(result.device):
        kernels, ready = kernels_of(body, pairs, tensors, options, name)
        gradients = None
        if kernels is not None:
            sums = torch.where(lse.isneginf(), LEAST, lse * LOG2E) if body.softmax else None
            gradients = gradients_by(kernels, ready, wanted, seed, result, sums, (of_result, of_lse))
        if gradients is None:
            steps = partial(in_steps, body, pairs, {}, seed, body.softmax)
            detached = [t.detach().requires_grad_(want) for t, want in zip(tensors, wanted, strict=True)]
            steps_gradients = gradients_of_steps(steps, detached, wanted, (of_result, of_lse))
            gradients = [g if g is None else g.clone(memory_format=torch.contiguous_format) for g in steps_gradients]
    return [g.to(t.dtype) for g, t in zip(gradients, tensors, strict=True) if g is not None]


operators.define("mapped(str key, Tensor[] tensors, Tensor? seed) -> (Tensor, Tensor)")
operators.define(
    "mapped_gradients(str key, Tensor[] tensors, Tensor? seed, Tensor result, Tensor lse, Tensor? of_result, "
    "Tensor? of_lse, bool[] wanted) -> Tensor[]"
)
operators.impl("mapped", _run, "CompositeExplicitAutograd")
operators.impl("mapped_gradients", _run_gradients, "CompositeExplicitAutograd")


@torch.library.register_fake("sparsetc::mapped", lib=operators)
def _shape(key: str, tensors: list[Tensor], seed: Tensor | None) -> tuple[Tensor, Tensor]:
    body, pairs, *_ = _of(key)
    shape = result_shape(body, pairs, tensors)
    sums = shape[:2] if body.softmax else (0,)
    return tensors[0].new_empty(shape), tensors[0].new_empty(sums, dtype=accumulator(tensors[0].dtype))


@torch.library.register_fake("sparsetc::mapped_gradients", lib=operators)
def _shapes_of_gradients(key: str, tensors: list[Tensor], *others: Any) -> list[Tensor]:
    return [t.new_empty(t.shape) for t, want in zip(tensors, others[-1], strict=True) if want]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.key, tensors, seed = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, seed, *output)


def _backward(ctx: Any, of_result: Tensor | None, of_lse: Tensor | None) -> tuple[None, Any, None]:
    *tensors, seed, result, lse = ctx.saved_tensors
    wanted = [*ctx.needs_input_grad[1]]
    if of_result is None and of_lse is None:
        return None, [None for _ in tensors], None
    gradients = iter(
        torch.ops.sparsetc.mapped_gradients(ctx.key, tensors, seed, result, lse, of_result, of_lse, wanted)
    )
    return None, [next(gradients) if want else None for want in wanted], None


torch.library.register_autograd("sparsetc::mapped", _backward, setup_context=_remember, lib=operators)
