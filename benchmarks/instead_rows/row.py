"""What a row of the yardstick is, and when a result counts as right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Call = Callable[[], Any]

LIMIT = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}
"""Largest relative error that counts as right, by the type of the operands."""
TF32 = 2e-3
"""The same for float32 whose products may be rounded to tf32."""
FRESH = 36
"""Sets of data of a task that takes new data at each call: one is checked, 3 warm up, 30 are timed."""


@dataclass(frozen=True)
class Task:
    """A task that is ready to run.

    Attributes:
        ours: does it by sparsetc. Returns a result or a tuple of results; each may be sparse.
        instead: does it as a user would instead, by the name of each way. The fastest right one is the row's peer.
        expected: computes the same in float64. Results are compared with as many as it returns.
        tolerance: largest relative error, norm over norm.
        fresh: every call takes data that were not seen before, so calls are timed one by one, on the wall only.
    """

    ours: Call
    instead: dict[str, Call]
    expected: Call
    tolerance: float = LIMIT[torch.float32]
    fresh: bool = False


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        name: what is done, with sizes and types; unique within its section.
        section: the part of the table.
        make: makes the task, on `common.DEVICE`.
        on: the devices that the row is for.
        needs: tensors of ``$SPARSETC_DATA`` without which it is left out.
        full: whether only ``--full`` runs it.
    """

    name: str
    section: str
    make: Callable[[], Task]
    on: tuple[str, ...] = ("cuda", "cpu")
    needs: tuple[str, ...] = ()
    full: bool = False

    @property
    def title(self) -> str:
        """Section and name, by which rows are chosen and recorded."""
        return f"{self.section}: {self.name}"


GPU, CPU = ("cuda",), ("cpu",)
