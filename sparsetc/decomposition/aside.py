"""Work that a GPU does beside other work: two branches of an iteration, in a CUDA graph or not.

In: calls that read what was there before. Out: the same results; after `join` they may be read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Aside:
    """A second stream of a GPU; on a CPU calls come one after the other, as they are made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def begin(self) -> Iterator[None]:
        """What is called in the block runs after what was called before, and beside what comes after the block."""
        if self._stream is None:
            yield
            return
        # Memory that one block frees is taken by the next, which waits for all that was called before it.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """What is called from here on runs after what the last block called."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
