"""Autocast kept out: the options say in which precision products are made."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def autocast_off(device: torch.device) -> AbstractContextManager[object]:
    """Autocast off within a ``with`` block, for backward passes: their threads do not always say that it is on."""
    return torch.autocast(device.type, enabled=False)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Autocast off within a ``with`` block, on a device where it is on."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()
