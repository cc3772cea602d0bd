"""Kernels of several sparse operands, kept with the first of them.

In: an equation, operands, settings. Out: a `PairKernel`, new or kept. What is kept holds for these very patterns of
the other sparse operands, whose tokens are part of the key; only values may differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sparsetc.ir.parse import parse
from sparsetc.options import Options
from sparsetc.pair.kernel import PairKernel
from sparsetc.tensor import SparseTensor

KEPT_KERNELS = 16
"""Kernels kept for one operand; each holds a pattern, and maybe a task list."""


def build_pair(
    text: str, operands: Sequence[SparseTensor | torch.Tensor], settings: Options, output: str
) -> PairKernel:
    """A new kernel."""
    bound = parse(text, [tuple(o.shape) for o in operands], [isinstance(o, SparseTensor) for o in operands])
    return PairKernel(bound, operands, settings, output)


def compiled_pair(
    text: str, operands: Sequence[SparseTensor | torch.Tensor], settings: Options, output: str
) -> PairKernel:
    """The kernel kept for this equation and these patterns, with these values, or a new one."""
    sparse = [o for o in operands if isinstance(o, SparseTensor)]
    key = (
        text,
        tuple((tuple(o.shape), o.dtype, str(o.device), isinstance(o, SparseTensor)) for o in operands),
        tuple(o.pattern_key for o in sparse[1:]),
        settings,
        output,
        settings.effective_precision(),
    )
    try:
        kept: dict[Any, PairKernel] = sparse[0]._packed.setdefault("pairs", {})
        kernel = kept.get(key)
    except TypeError:  # a plan that cannot be hashed
        return build_pair(text, operands, settings, output)
    if kernel is None:
        kernel = kept[key] = build_pair(text, operands, settings, output)
        while len(kept) > KEPT_KERNELS:
            kept.pop(next(iter(kept)))
        return kernel
    return kernel.with_values(*(o.values for o in sparse))
