"""Kernels of several sparse operands, kept with the first of them.

In: an equation, operands, settings. Out: a `PairKernel`, new or kept. What is kept holds for these very patterns of
the other sparse operands, as long as these live; only values may differ.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from sparsetc.ir.parse import parse
from sparsetc.kept import lasting
from sparsetc.options import Options
from sparsetc.pair.kernel import PairKernel
from sparsetc.tensor import SparseTensor


def build_pair(
    text: str, operands: Sequence[SparseTensor | torch.Tensor], settings: Options, output: str
) -> PairKernel:
    """A new kernel."""
    bound = parse(text, [tuple(o.shape) for o in operands], [isinstance(o, SparseTensor) for o in operands])
    with lasting():
        return PairKernel(bound, operands, settings, output)


def compiled_pair(
    text: str, operands: Sequence[SparseTensor | torch.Tensor], settings: Options, output: str
) -> PairKernel:
    """The kernel kept for this equation and these patterns, with these values, or a new one."""
    sparse = [o for o in operands if isinstance(o, SparseTensor)]
    key = (
        text,
        tuple([(o.shape, o.dtype, o.device, isinstance(o, SparseTensor)) for o in operands]),
        tuple(weakref.ref(o._packed) for o in sparse[1:]),
        settings,
        output,
        settings.effective_precision(),
    )
    kept = sparse[0]._packed.pairs
    try:
        kernel = kept.get(key)
    except TypeError:  # a plan that cannot be hashed
        return build_pair(text, operands, settings, output)
    if kernel is not None:
        return kernel.on(sparse)
    kernel = build_pair(text, operands, settings, output)
    kept.put(key, kernel.bare(), needs=[o._packed for o in sparse[1:]])
    return kernel
