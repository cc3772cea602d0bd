"""Bodies on tensors: by kernels where there are some, else by a function that computes the same in steps.

In: a body, the pairs that it is computed of, tensors, and that function. Out: the result. The log says at level DEBUG
which way was taken, and why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec

import torch
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from sparsetc.maps.body import Body
from sparsetc.maps.fused import Pairs, Task, fused, rows_whole
from sparsetc.maps.trace import Untraced
from sparsetc.options import Options, Settings, of_call
from sparsetc.support.entry import traced_by_modes
from sparsetc.support.notices import log
from sparsetc.tensor.pattern import transforming


def computed(
    body: Body,
    pairs: Pairs,
    tensors: Sequence[torch.Tensor],
    in_steps: Callable[..., torch.Tensor],
    settings: Settings,
    name: str,
) -> torch.Tensor:
    """Return the result (heads, rows, size) of a body.

    Args:
        body: what is computed.
        pairs: of which.
        tensors: tables (heads, rows, size) of one dtype, then vectors (heads, rows or entries), as `inputs_of` says.
        in_steps: the same function of the same tensors, differentiable any number of times.
        settings: of `einsum`; kernels take precision and cache_dir.
        name: for the log and for files.
    """
    options = None if is_dynamo_compiling() else of_call(settings)
    reason = _unfit(tensors, options)
    if options and not reason:
        ready = [*map(rows_whole, tensors)]
        try:
            kernels = Task(body, pairs, options.effective_precision(), options.cache_dir, name).kernels(ready)
            reason = kernels.refusal
        except Untraced as error:
            reason = str(error)
    if not reason:
        log.debug("%s runs in one kernel", name)
        return fused(kernels, in_steps, ready)
    if options:
        log.debug("%s runs in steps: %s", name, reason)
    return in_steps(*tensors)


def _unfit(tensors: Sequence[torch.Tensor], options: Options | None) -> str:
    """Return why kernels cannot be used for such tensors, whatever the body; empty if they may be."""
    first = tensors[0]
    if options is None or traced_by_modes():
        return "a graph is traced"
    if transforming() or forward_ad._current_level >= 0:
        return "forward mode, or a transform of torch.func"
    if options.effective_backend(first.device) != "triton" or not _has_triton():
        return "kernels are Triton's, which does not run here"
    if options.plan != "auto" or options.tune is not None:
        return "a plan or a search of plans was asked for"
    if min(t.numel() for t in tensors) == 0:
        return "an operand has no elements"
    if first.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"operands are {first.dtype}"
    if first.dtype == torch.bfloat16 and not first.is_cuda:
        return "Triton's interpreter has no products of matrices in bfloat16"
    return ""


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
