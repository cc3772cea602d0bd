"""Probes of a device so small that they may run in Triton's interpreter, or be timed where the times mean nothing."""

from __future__ import annotations

from sparsetc.device.calibrate import ProbeSizes

TINY = ProbeSizes(
    streamed=64,
    block=32,
    table=16,
    gathered=2048,
    added=256,
    programs=2,
    steps=16,
    started=(2, 4),
    tasks=4096,
    sums=256,
    pairs=128,
    blocks=4,
    product=(3, 4, 5),
    moved=512,
    calls=8,
)
