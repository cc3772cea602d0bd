"""What a limit of memory allows: nonzeros that are sorted together, and runs that are merged together.

In: bytes, an order and a dtype. Out: a `PackingBudget`. No result depends on it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from sparsetc.errors import OutOfMemoryError
from sparsetc.options import current
from sparsetc.support.memory import as_bytes, available_memory

SHARE = 4
"""The share of free memory that is taken where no limit is given: one part in so many."""
FIXED = 24 * 2**20
"""Bytes for what does not grow with a run: a block of text and its columns, one of each array, checksums, modules."""
LEAST = 32 * 2**20
"""The lowest limit: what is left of it makes runs that are worth a file each."""
SORTED = 128
"""Bytes a nonzero that sorting takes beside two copies: keys, an order, scratch."""
FAN_IN = 64
"""Runs that are merged together at most; each is an open file."""
AT_ONCE = 1024
"""Nonzeros of each of so many runs that are worth a look at all of them; fewer runs are merged where memory is less."""


@dataclass(frozen=True)
class PackingBudget:
    """How much is held at a time.

    Attributes:
        run: nonzeros of a run.
        fan_in: runs merged together, at least 2.
        block: nonzeros of each of them that are held, and that a checksum of a run covers.
    """

    run: int
    fan_in: int
    block: int


def limit(given: Any, before: int | None) -> int:
    """Bytes that packing may take: those given, those that an interrupted call had, or a part of what is free."""
    if given is None:
        given = current().memory_limit
    if given is not None:
        return as_bytes(given)
    free = available_memory(torch.device("cpu"))
    return before if before is not None and before <= free // 2 else max(free // SHARE, LEAST)


def of(path: str | os.PathLike[str], limit: int, order: int, dtype: torch.dtype) -> PackingBudget:
    """What ``limit`` bytes allow; OutOfMemoryError, naming the file, where that is nothing."""
    if limit < LEAST:
        raise OutOfMemoryError(
            f"{os.fspath(path)}: packing takes at least {LEAST:,} bytes of memory, the limit is {limit:,}; raise "
            "memory_limit"
        )
    copy = 8 * order + max(dtype.itemsize, 8)
    free = limit - FIXED
    together = free // (3 * copy + 8 * order + SORTED)  # held rows with their keys, those taken, and these in order
    fan_in = min(max(together // AT_ONCE, 2), FAN_IN)
    return PackingBudget(free // (2 * copy + SORTED), fan_in, together // fan_in)
