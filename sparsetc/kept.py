"""What is kept for a pattern: everything that was found out about it, or made of it, and does not depend on values.

In: nothing; the levels above fill it. Out: `Kept`, shared by all tensors of a pattern, gone with the last of them. What
lies here must not refer to a tensor of the pattern, nor to this: memory would return by the cyclic collector only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from sparsetc.lru import Lru

if TYPE_CHECKING:
    from sparsetc.formats import Packed
    from sparsetc.kernel import Kernel
    from sparsetc.pair.kernel import PairKernel

KERNELS = 64
"""Kernels kept for one pattern by `einsum`, and by gradients."""
PAIRS = 16
"""Kernels of several sparse operands kept with the first; each holds a pattern, and maybe a task list."""
PARTS = 32
"""Packed parts. Not measured: four modes, each packed for its own output and for two gradients, and as much again."""
EXPANDED = 2
"""Patterns of semi-sparse tensors with their dense modes spelled out, by the sizes of those."""
VALUES = 16
"""Packed values kept with one tensor."""


@contextmanager
def lasting() -> Iterator[None]:
    """A block that makes tensors which outlive a call: they serve under any mode, and no graph is recorded."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class Kept:
    """Caches of one pattern, made when first asked for: most tensors are results that nothing is compiled for."""

    @cached_property
    def counts(self) -> dict[Any, Any]:
        """Distinct coordinates and the like, for the planner; as many as there are sets of modes."""
        return {}

    @cached_property
    def kernels(self) -> Lru[Any, Kernel]:
        """Kernels by equation, shapes and settings, with no operand."""
        return Lru(KERNELS)

    @cached_property
    def pairs(self) -> Lru[Any, PairKernel]:
        """Kernels of several sparse operands, each kept only while the patterns of the others live."""
        return Lru(PAIRS)

    @cached_property
    def parts(self) -> Lru[Any, Packed]:
        """Packed parts by how nonzeros were dealt, and by format and storage."""
        return Lru(PARTS)

    @cached_property
    def expanded(self) -> Lru[tuple[int, ...], tuple[torch.Tensor, Kept]]:
        """Coordinates with dense modes spelled out, and what is kept for them, by the sizes of those modes."""
        return Lru(EXPANDED)

    def clear(self) -> None:
        """Forget everything."""
        self.__dict__.clear()
