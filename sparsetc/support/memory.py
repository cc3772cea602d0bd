"""Numbers of bytes: as users write them, as devices have them free, and the check of the memory limit.

In: a number, or text as in ``"8GB"``, or a device. Out: bytes; or `OutOfMemoryError`, before anything is allocated.
"""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

import torch

from sparsetc.errors import OutOfMemoryError, PlanError

UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
"""Letters before ``B`` or ``iB``, by the power of 1000, or of 1024, that they stand for."""
FREE = 1 << 20
"""Most bytes that are allocated without asking the device for its free memory: to ask takes longer than to allocate
them."""
MOST = 2**63 - 1
"""Bytes that no tensor passes, whatever the limit."""
limit_in_force: ContextVar[int | None] = ContextVar("sparsetc_memory_limit", default=None)
"""The memory limit that `sparsetc.options` has set; None where it has set none."""
limit_of_process: int | None = None
"""The memory limit of all threads, set by `sparsetc.set_options`."""
SIZE = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?)\s*([kmgtp]?)(i?)b?\s*", re.IGNORECASE)


def as_bytes(limit: Any, what: str = "memory_limit") -> int:
    """Bytes, 0 or more, of a whole number or of text: ``"1GB"`` is 10**9, ``"512MiB"`` 512 * 2**20, ``"4096"`` 4096.

    Raises:
        PlanError: anything else, a negative number or an infinite one included.
    """
    match = SIZE.fullmatch(limit) if isinstance(limit, str) else None
    if match and (match[2] or not match[3]):
        number, scale = match[1].replace("_", ""), (1024 if match[3] else 1000) ** UNITS[match[2].lower()]
        return int(float(number) * scale) if "." in number else int(number) * scale
    with suppress(TypeError, ValueError, OverflowError):
        if not isinstance(limit, bool | str) and limit >= 0 and int(limit) == limit:
            return int(limit)
    raise PlanError(f'{what} must be a number of bytes, 0 or more, or text like "512MiB" or "8GB"; found {limit!r:.80}')


SOON = 0.005
"""Seconds for which a device's free memory is taken to stay as it was: a compilation asks for it several times, and the
system's answer takes as long as a tenth of a small one."""
_asked: dict[torch.device, tuple[float, int]] = {}
"""The time of the last answer for each device, and the answer."""


def available_memory(device: torch.device) -> int:
    """Return the bytes that a new tensor on ``device`` may take now; memory cached by torch counts as free."""
    now, answer = time.monotonic(), _asked.get(device)
    if answer is None or now - answer[0] > SOON:
        answer = _asked[device] = now, _free(device)
    return answer[1]


def _free(device: torch.device) -> int:
    if device.type == "cuda":
        # As nested as torch keeps them: memory_reserved() flattens hundreds of counts each time.
        held = torch.cuda.memory_stats_as_nested_dict(device)
        unused = held["reserved_bytes"]["all"]["current"] - held["allocated_bytes"]["all"]["current"] if held else 0
        return int(torch.cuda.mem_get_info(device)[0]) + int(unused)
    try:
        # MemAvailable counts the page cache, which the kernel gives back; SC_AVPHYS_PAGES does not.
        with open("/proc/meminfo", "rb") as lines:
            line = next(line for line in lines if line.startswith(b"MemAvailable"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration, ValueError, IndexError):
        pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
        return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")


available_memory._dynamo_marked_constant = True  # type: ignore[attr-defined]  # of a graph: nothing need be traced


def _limit(limit: int | str | None) -> int | None:
    if limit is not None:
        return as_bytes(limit)
    in_force = limit_in_force.get()
    return limit_of_process if in_force is None else in_force


_limit._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as it has no context variables


def check(what: str, nbytes: int, device: torch.device, limit: int | str | None = None, instead: str = "") -> None:
    """Raise `OutOfMemoryError` when ``what`` would take more bytes than the memory limit allows.

    Everything that makes a dense or an unpacked result calls this before it allocates.

    Args:
        what: what would be made, as the message begins.
        nbytes: bytes at the peak, beyond what is there before.
        device: where they would be taken.
        limit: bytes that may be taken, or text such as ``"8GB"``. Default: what `sparsetc.options` says, else what the
            device has free.
        instead: what can be done other than raising the limit.
    """
    limit = _limit(limit)
    if limit is None:
        if nbytes < FREE:
            return
        limit = available_memory(device)
    if nbytes > min(limit, MOST):
        raise OutOfMemoryError(
            f"{what} would take {nbytes:,} bytes, the limit on {device} is {limit:,}; raise it with "
            f"sparsetc.options(memory_limit=...){instead and ', or '}{instead}"
        )
