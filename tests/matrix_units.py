"""The targets that kernels are compiled for ahead of time, and what their matrix units' instructions are called."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import cycle, product
from typing import Any

import torch

CUDA = ("sm_80", "sm_90", "sm_100")
TARGETS = (*CUDA, "gfx942")
OTHERS = tuple(t for t in TARGETS if t != "sm_90")
NATIVE = {"sm_80": r"mma\.sync", "sm_90": r"wgmma\.mma_async", "sm_100": r"tcgen05\.mma", "gfx942": r"v_mfma_"}
"""What a product large enough for a target's own instruction takes."""
MATRIX = NATIVE | {"sm_90": r"wgmma\.mma_async|mma\.sync", "sm_100": r"tcgen05\.mma|wgmma\.mma_async|mma\.sync"}
"""The same of any product: a small one takes the instruction of an older GPU."""


def other_types(instructions: Mapping[str, str]) -> list[tuple[torch.dtype, str, str]]:
    """(dtype, target, instruction) of the floating types beside float32; of float64 on sm_100 nothing is asked."""
    sixteen_bits = (torch.float16, torch.bfloat16)
    return [
        (torch.float64, "sm_80", r"mma\.sync\S*\.f64\.f64"),
        (torch.float64, "sm_90", r"mma\.sync\S*\.f64\.f64"),
        (torch.float64, "gfx942", r"v_mfma_f64"),
        *((dtype, target, instructions[target]) for dtype in sixteen_bits for target in TARGETS),
    ]


def in_turn(cases: Iterable[tuple[Any, ...]], *values: Any) -> list[tuple[Any, ...]]:
    """Each case with one of the values behind it, which take turns (five of two values: each target meets both)."""
    return [(*case, value) for case, value in zip(cases, cycle(values), strict=False)]


def dealt(*factors: Iterable[Any]) -> list[tuple[Any, ...]]:
    """(value of each factor, ..., target): all combinations for sm_90, and each for one of the other targets in turn.

    Every target meets every value of a factor beside another one of three values or more.
    """
    found = []
    for numbered in product(*map(enumerate, factors)):
        turns, values = zip(*numbered, strict=True)
        found += [(*values, target) for target in ("sm_90", OTHERS[sum(turns) % len(OTHERS)])]
    return found
