"""An iteration as a CUDA graph: its many small kernels are launched by one call.

In: a function that changes buffers in place, always the same ones, and waits for nothing. Out: the same function, whose
later calls replay a graph on a GPU; elsewhere, and where it cannot be captured, it is called as it is.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

WARM = 2
"""Calls before a graph is captured, in which kernels are compiled and libraries get ready."""


class Captured:
    """A step of an iteration that is captured at its third call on a GPU."""

    def __init__(self, step: Callable[[], None], device: torch.device) -> None:
        self._step, self._device = step, device
        self._graph: torch.cuda.CUDAGraph | None = None
        self._until = WARM if device.type == "cuda" else -1
        """Calls until the graph is captured; -1 for never."""

    def __call__(self) -> None:
        if self._until == 0:
            self._graph = self._capture()
        self._until = max(-1, self._until - 1)
        if self._graph is None:
            self._step()
        else:
            self._graph.replay()

    def _capture(self) -> torch.cuda.CUDAGraph | None:
        """The graph, or None where something in the step cannot be captured; buffers are as they were either way."""
        if torch.cuda.is_current_stream_capturing():
            return None  # the caller's own graph
        graph = torch.cuda.CUDAGraph()
        # A capture that fails leaves its own stream as the current one; the block around it puts back the caller's.
        own = torch.cuda.stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.device(self._device), own, torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._step()
        except RuntimeError:  # a library that waits for the GPU; nothing was run, so nothing was changed
            _free_generator(self._device)
            return None
        return graph


def _free_generator(device: torch.device) -> None:
    """Random numbers of a device as they were: a capture that fails leaves their generator as if it went on."""
    number = torch.cuda.current_device() if device.index is None else device.index
    generator = torch.cuda.default_generators[number]
    generator.graphsafe_set_state(generator.clone_state())
