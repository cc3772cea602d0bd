"""Autocast kept out: the options say in which precision products are made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


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
