"""Operators of `torch.library` for bodies: one node of a graph that torch traces, exports or differentiates.

In: a body with its pairs, known by a key or saved as text, and tensors. Out: ``sparsetc::mapped``, which gives the
result and the logarithms of rows' sums, and ``sparsetc::mapped_gradients``. Eager calls take the shorter way,
`pairwise.computed`. The operators are known from the import on, so that a saved program is read; what they do is
loaded when one runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsetc.contraction.autograd import one_of_batch
from sparsetc.contraction.kernel import operators
from sparsetc.support import later

operators.define("mapped(str key, Tensor[] tensors, Tensor? seed) -> (Tensor, Tensor)")
operators.define(
    "mapped_gradients(str key, Tensor[] tensors, Tensor? seed, Tensor result, Tensor lse, Tensor? of_result, "
    "Tensor? of_lse, bool[] wanted) -> Tensor[]"
)
operators.impl("mapped", later("pairwise", "run_mapped"), "CompositeExplicitAutograd")
operators.impl("mapped_gradients", later("pairwise", "run_gradients"), "CompositeExplicitAutograd")
torch.library.register_fake("sparsetc::mapped", later("pairwise", "shapes_of_mapped"), lib=operators)


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


_second_gradients = later("pairwise", "second_gradients")


def _remember_gradients(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.key, tensors, seed, _, _, of_result, of_lse, ctx.wanted = inputs
    ctx.save_for_backward(*tensors, seed, of_result, of_lse)


def _backward_of_gradients(ctx: Any, upstream: list[Tensor]) -> tuple[Any, ...]:
    *tensors, seed, of_result, of_lse = ctx.saved_tensors
    derived = _second_gradients(ctx.key, tensors, seed, of_result, of_lse, ctx.wanted, upstream)
    of_tensors, of_upstream = derived
    return None, of_tensors, None, None, None, *of_upstream, None


torch.library.register_autograd("sparsetc::mapped", _backward, setup_context=_remember, lib=operators)
torch.library.register_autograd(
    "sparsetc::mapped_gradients", _backward_of_gradients, setup_context=_remember_gradients, lib=operators
)


@torch.library.register_vmap("sparsetc::mapped", lib=operators)
def _batched(info: Any, dims: tuple[Any, ...], *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, int]]:
    each = [[one_of_batch(n, *one) for one in zip(arguments, dims, strict=True)] for n in range(info.batch_size)]
    results = zip(*[torch.ops.sparsetc.mapped(*one) for one in each], strict=True)
    return tuple(map(torch.stack, results)), (0, 0)
