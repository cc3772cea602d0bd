"""Bodies on tensors, in one kernel a walk, with gradients.

In: a `Task`, which holds a body and the pairs that it is computed of, and tensors. Out: its result. A first derivative
takes a walk a mode, which computes weights anew from the logarithm of each row's sum. Derivatives of these, and
derivatives in batches, are those of a function that computes the same by other means.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sparsetc.contraction.autograd import node, recordable
from sparsetc.maps.body import LOG2E, RESULT
from sparsetc.maps.task import NOTHING, Kernels, Tensors
from sparsetc.support.entry import entry_point, without_autocast
from sparsetc.tensor.pattern import followed, transforming

Results = tuple[Tensor, ...]
"""The result, and maybe the logarithms of rows' sums."""


def fused(
    kernels: Kernels, unfused: Callable[..., Results], tensors: Tensors, seed: Tensor | None, with_lse: bool
) -> Results:
    """Return the result (*heads, rows, size), (*heads, rows) or (*heads, entries) of a task, and maybe `lse`.

    Args:
        kernels: of the task, for these tensors; without a refusal.
        unfused: the same function of the same tensors by other means, differentiable any number of times.
        tensors: as `Body.inputs` says, of one number of heads, or of a divisor of it for those of columns.
        seed: (1,) int64, of random numbers, where some weights are dropped.
        with_lse: whether the logarithms of rows' sums are wanted too, (*heads, rows).
    """
    if followed(tensors):
        return node(_Fused, (kernels, unfused, with_lse), seed, *map(recordable, tensors))  # type: ignore[no-any-return]
    return _returned(kernels.run(tensors, seed), with_lse)


def _returned(results: Mapping[str, Tensor], with_lse: bool) -> Results:
    if not with_lse:
        return (results[RESULT],)
    lse = results["lse_out"]
    return results[RESULT], torch.where(lse > NOTHING, lse / LOG2E, -torch.inf)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: tuple[Kernels, Any, bool], seed: Tensor | None, *tensors: Tensor) -> Any:
        ctx.kernels, ctx.unfused, with_lse = call
        results = ctx.kernels.run(tensors, seed)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, seed, results[RESULT], results.get("lse_out"))
        return _returned(results, with_lse)

    @staticmethod
    @entry_point
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, seed, result, lse = ctx.saved_tensors
        wanted = ctx.needs_input_grad[2:]
        present = [g for g in upstream if g is not None]
        if not present:
            return (None,) * (2 + len(tensors))
        batched = transforming() or any(map(torch._C._functorch.is_legacy_batchedtensor, present))
        with without_autocast(result.device):
            gradients = None
            if not (batched or torch.is_grad_enabled()):
                gradients = gradients_by(ctx.kernels, tensors, wanted, seed, result, lse, upstream)
            if gradients is None:
                gradients = gradients_of_steps(ctx.unfused, tensors, wanted, upstream)
        return None, None, *gradients


def gradients_by(
    kernels: Kernels,
    tensors: Tensors,
    wanted: Sequence[bool],
    seed: Tensor | None,
    result: Tensor,
    lse: Tensor | None,
    upstream: Sequence[Tensor | None],
) -> list[Tensor | None] | None:
    """Compute the wanted gradients, by one walk a mode; None if there are no such kernels.

    Args:
        kernels: of the result.
        tensors: that it was computed of.
        wanted: of which of them.
        seed: as it was.
        result: as it was.
        lse: of a softmax, the logarithms to base 2 of rows' sums.
        upstream: the gradient of the result, and maybe of the logarithms, not both None.
    """
    inputs = kernels.body.inputs
    tables = dict(zip(inputs, tensors, strict=True))
    tables[RESULT] = result
    of_result, *of_lse = upstream
    tables[f"g_{RESULT}"] = torch.zeros_like(result) if of_result is None else kernels.like(of_result, result)
    if seed is not None:
        tables["seed"] = seed
    if lse is not None:
        tables["lse"] = lse
        tables["delta"] = torch.empty_like(lse)
        if of_lse and of_lse[0] is not None:
            tables["g_lse"] = of_lse[0].contiguous()
    walks, targets = kernels.of_gradients(tables, wanted)
    if not walks:
        return None
    gradients: dict[str, Tensor] = {}
    for target, name in targets:
        gradients[name] = tables[target] = kernels.gradient_of(name, tables[name])
    for kernel in walks:
        kernel(tables)
    for name in kernels.body.shared:
        if name in gradients:
            gradients[name] = gradients[name].sum(1)
    return [gradients[name] if want else None for name, want in zip(inputs, wanted, strict=True)]


def gradients_of_steps(
    unfused: Callable[..., Any], tensors: Tensors, wanted: Sequence[bool], upstream: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Return the gradients that are wanted as functions of the tensors and the upstream ones."""
    further = torch.is_grad_enabled()
    with torch.enable_grad():
        views = [t.view_as(t) for t in tensors]  # apart, where two inputs are one tensor
        present = [(result, g) for result, g in zip(unfused(*views), upstream, strict=False) if g is not None]
        inputs = [t for t, want in zip(views, wanted, strict=True) if want]
        outputs, upstreams = zip(*present, strict=True)
        gradients = iter(
            torch.autograd.grad(outputs, inputs, upstreams, create_graph=further, materialize_grads=True)
        )  # logarithms of sums use no values
    return [next(gradients) if want else None for want in wanted]
