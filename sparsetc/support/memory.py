"""Numbers of bytes as a user writes them.

In: a number, or text as in ``"8GB"``. Out: bytes.
"""

from __future__ import annotations

import math
import re
from typing import Any

from sparsetc.errors import PlanError

UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
"""Letters before ``B`` or ``iB``, by the power of 1000, or of 1024, that they stand for."""
SIZE = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?)\s*([kmgtp]?)(i?)b?\s*", re.IGNORECASE)


def as_bytes(limit: Any) -> int:
    """Bytes, 0 or more, of a whole number or of text: ``"1GB"`` is 10**9, ``"512MiB"`` 512 * 2**20, ``"4096"`` 4096.

    Raises:
        PlanError: anything else, a negative number or an infinite one included.
    """
    found = _of_text(limit) if isinstance(limit, str) else _of_number(limit)
    if found is None:
        raise PlanError(
            f'memory_limit must be a number of bytes, 0 or more, or text like "512MiB" or "8GB"; found {limit!r:.80}'
        )
    return found


def _of_text(text: str) -> int | None:
    match = SIZE.fullmatch(text)
    if match is None or (match[3] and not match[2]):
        return None
    number, scale = match[1].replace("_", ""), (1024 if match[3] else 1000) ** UNITS[match[2].lower()]
    return int(float(number) * scale) if "." in number else int(number) * scale


def _of_number(number: Any) -> int | None:
    try:
        if isinstance(number, bool) or not math.isfinite(number) or number < 0 or int(number) != number:
            return None
        return int(number)
    except (TypeError, ValueError, OverflowError):
        return None
