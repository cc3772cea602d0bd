"""Timing of calls: medians and spreads, measured in turn so that a slow moment of the machine slows all of them alike.

In: functions without arguments. Out: a `Timing` of each. On a GPU times are those of CUDA events around single calls,
with the L2 cache written over in between; on a CPU they are those of its clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sparsetc.support.entry import on_gpu

OVERWRITTEN, TIMES = 1 << 28, 2
"""Bytes written between calls on a GPU, more than its L2 cache, and how often: launches are ready before it is done."""
ROUND = 5
"""Calls of a candidate, one after another, before the next one has its turn."""
QUANTILES = (0.25, 0.5, 0.75)


@dataclass(frozen=True)
class Timing:
    """The time of a call, in seconds.

    Attributes:
        low, median, high: a quarter, a half and three quarters of the calls took this or less.
        calls: how many were timed.
    """

    low: float
    median: float
    high: float
    calls: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        """Summarise the seconds of single calls."""
        rising = sorted(seconds)
        low, median, high = (rising[min(len(rising) - 1, int(q * len(rising)))] for q in QUANTILES)
        return cls(low, median, high, len(rising))

    def beats(self, other: Timing, margin: float) -> bool:
        """True if this is `margin` times as fast as `other`, and the spreads do not overlap."""
        return margin * self.median < other.median and self.high < other.low

    def __str__(self) -> str:
        low, median, high = (f"{1e6 * seconds:.1f}" for seconds in (self.low, self.median, self.high))
        return f"{median} us ({low} to {high} in half of {self.calls} calls)"


def timed(
    calls: Sequence[Callable[[], Any]], device: torch.device, seconds: float, stop: float = float("inf")
) -> list[Timing]:
    """Time calls in turn for `seconds` in all; each several times, or once if calls are long.

    Args:
        calls: none of which is the first of its kind, which compiles.
        device: that they run on.
        seconds: after which no further round begins.
        stop: how many times what the fastest takes a call may take to have a turn again.
    """
    with on_gpu(device):
        once = _on_gpu(device) if device.type == "cuda" else _on_cpu
        end, times = time.perf_counter() + seconds, [once(call, 1) for call in calls]
        for n, (first,) in enumerate(times):
            if ROUND * first <= seconds:
                times[n] = once(calls[n], ROUND)  # without the first, which is slower
        least = [min(runs) for runs in times]
        running = [n for n, seconds in enumerate(least) if seconds <= stop * min(least)]
        while time.perf_counter() < end:
            for n in running:
                times[n] += once(calls[n], ROUND)
        return [Timing.of(runs) for runs in times]


def _on_cpu(call: Callable[[], Any], count: int) -> list[float]:
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds


def _on_gpu(device: torch.device) -> Callable[[Callable[[], Any], int], list[float]]:
    nbytes = min(OVERWRITTEN, torch.cuda.mem_get_info(device)[0] // 4)
    other = torch.empty(nbytes, dtype=torch.int8, device=device)

    def once(call: Callable[[], Any], count: int) -> list[float]:
        spans = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        for start, end in spans:
            for _ in range(TIMES):
                other.zero_()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize(device)
        return [1e-3 * start.elapsed_time(end) for start, end in spans]

    return once
