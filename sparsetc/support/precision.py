"""Settings of torch that products are made under: its precision for float32, and no autocast.

The options say in which precision products are made.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from sparsetc.support.lru import Lock


@contextmanager
def autocast_off(device: torch.device) -> Iterator[None]:
    """Autocast off within a ``with`` block, as `torch.autocast` does it in ten times the time."""
    before = torch.is_autocast_enabled(device.type)
    torch.set_autocast_enabled(device.type, False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device.type, before)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Autocast off within a ``with`` block, on a device where it is on."""
    return autocast_off(device) if torch.is_autocast_enabled(device.type) else _NOTHING


_NOTHING = nullcontext()


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """The setting of torch for float32 products, for as long as a ``with`` block, or a function so decorated, takes.

    The setting is the process's, so threads take turns: else one could restore what another had set for a while.
    """
    with _turns.own:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(precision)
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)


_turns = Lock()
