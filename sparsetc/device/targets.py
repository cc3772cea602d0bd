"""GPUs that text is generated for: what Triton calls them, and what their instructions can do.

In: a target's name, or the arrays that a program reads. Out: the machine that text is printed for: ``cuda``, ``hip`` or
``cpu``; and what it has in place of what it lacks. Text that is compiled for a target is the text that would run there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from sparsetc.errors import PlanError


class Gpu(NamedTuple):
    """A GPU as Triton's compiler takes it."""

    machine: str
    arch: int | str
    warp_size: int


@dataclass(frozen=True)
class Machine:
    """What text may use on GPUs of one maker, or under Triton's interpreter."""

    popcount: bool = False
    """Whether bits are counted by an instruction of PTX."""
    replaced: Mapping[str, str] = field(default_factory=dict)
    """Precisions of dots that there are none of, and those that are taken instead."""
    halves: bool = True
    """Whether float32 is multiplied in halves of 16 bits rather than as it is."""


TARGETS = {
    **{f"sm_{arch}": Gpu("cuda", arch, 32) for arch in (80, 89, 90, 100, 120)},
    **{arch: Gpu("hip", arch, 64) for arch in ("gfx90a", "gfx942", "gfx950")},
}
MACHINES = {
    "cpu": Machine(),
    "cuda": Machine(popcount=True),
    # AMD's matrix units take float32 as it is, and tf32x3 does not compile for them.
    "hip": Machine(replaced={"tf32x3": "ieee", "tf32": "ieee"}, halves=False),
}


def machine_of(device: torch.device) -> str:
    """Return the machine of a device's programs: ``hip`` where torch is AMD's, else ``cuda``, or ``cpu``.

    On the CPU Triton interprets programs, or they are only looked at.
    """
    return "hip" if torch.version.hip is not None else device.type


def portable(precision: str, machine: str) -> str:
    """The precision of dots that a machine has for the one asked for."""
    return MACHINES[machine].replaced.get(precision, precision)


def gpu(target: str) -> Gpu:
    """The GPU of a target's name; `PlanError` where it is not known."""
    if target not in TARGETS:
        raise PlanError(f"unknown target {target!r}; known: {', '.join(TARGETS)}")
    return TARGETS[target]
