"""A device as plans are priced for it: every number that belongs to it, each with where it comes from.

In: a JSON of the package (`profiles/`), or what `calibrate` measured. Out: a frozen `DeviceProfile`. An NVIDIA H200's
serves every GPU that was not calibrated, and that of two CPU cores the generated torch programs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from sparsetc.ir.plan import F16X3

MEASURED = "measured:"
"""What the source of a number that was measured begins with."""
OTHER = "other"
"""Key, in a table by precision, of the precisions that have none of their own."""


@dataclass(frozen=True, repr=False)
class DeviceProfile:
    """What a device can do, in bytes, operations and seconds.

    `sources` says of each number where it comes from, `measured` which were measured.
    """

    name: str
    memory: float
    """Bytes of device memory read a second."""
    l2: float
    """Bytes of rows gathered from the L2 cache a second."""
    l1: float
    """Bytes that the L1 caches deliver a second."""
    add: float
    """Bytes of rows added by atomics a second."""
    multiply: float
    """Multiplications and additions outside dots a second."""
    dot: Mapping[str, float] = field(hash=False)
    """Multiplications and additions in dots a second, by precision."""
    l2_bytes: int
    """Bytes of a table that can count on the L2 cache."""
    l1_bytes: int
    """Bytes of a table that can count on an L1 cache."""
    warps: int
    """Warps that the device issues from at once."""
    warp_size: int
    """Threads of a warp."""
    launch: float
    """Seconds of a launch."""
    program: float
    """Seconds a program takes beside its loads, over the whole device."""
    wait: float
    """Seconds a round of dependent loads takes when memory is busy."""
    fiber: float
    """Seconds a fiber takes beside its nonzeros: its words, then its nonzeros' words, then rows are waited for."""
    expand: float
    """Positions of bitmap tiles that are expanded a second."""
    tile: float
    """Seconds a program's turn over a tile takes beside its dots, over the whole device."""
    tile_share: Mapping[str, float] = field(hash=False)
    """Share of the rate of dots that those of tiles reach, by precision: few positions are contracted at once, and
    scaled between."""
    whole_turn: int
    """Bytes of a tile from which a program's turn over a share of it takes `tile`; over a smaller share, less."""
    whole_tile: int
    """Positions of a tile that a program takes whole from which its turn takes `tile`; that of a smaller one, less."""
    turn_warps: int
    """Warps of a program whose turn over a whole tile takes `tile`; more warps wait longer, fewer less."""
    idle_wait: float
    """Share of `wait` that a load of a round takes where memory is not busy."""
    staged: Mapping[str, int] = field(hash=False)
    """How often a gathered side of a dot passes between registers and shared memory, by precision."""
    fused_slowdown: Mapping[str, float] = field(hash=False)
    """How many times longer scalar programs take in one launch with tiles, whose registers they are given; by the
    precision of the tiles' dots."""
    starting_waits: int
    """Dependent loads before a launch of scalar programs has all its work under way."""
    task_bytes: float
    """Bytes of kept tasks a second: what is stored of each, a value read and a value added to."""
    crowded: float
    """Seconds a task takes, where sums are few or ordered."""
    crowded_below: int
    """Sums below which additions wait for one another."""
    expanded_bytes: float
    """Bytes a second of tasks that are made again at each call."""
    product: Mapping[str, float] = field(hash=False)
    """Multiplications and additions of torch's dense product a second, by `precision=`, and ``float64``."""
    block_dot: Mapping[str, float] = field(hash=False)
    """Multiplications and additions of pairs of blocks a second, padding included, by `precision=`, and ``float64``;
    ``f16x3`` where blocks are in halves of 16 bits."""
    near_blocks: float
    """Bytes of pairs' blocks read a second, where blocks are few."""
    far_blocks: float
    """Bytes of pairs' blocks read a second, where they are so many that neighbours share none in cache."""
    near_bytes: int
    """Bytes of the fewest blocks that are many."""
    pair_turn: float
    """Seconds of a pair of blocks, of those that a program takes one after another."""
    moved: float
    """Bytes that torch zeroes, scatters or gathers a second."""
    call: float
    """Seconds of a call of torch, one of several that follow one another."""
    sources: Mapping[str, str] = field(hash=False)
    """Where each number comes from: ``measured: `` by what, and when, or ``assumed: `` whose it is."""
    calibrated: str = ""
    """Day on which `calibrate` measured; empty for a profile of the package."""

    @property
    def measured(self) -> tuple[str, ...]:
        """The names of the numbers that were measured on the device itself."""
        return tuple(name for name, source in self.sources.items() if source.startswith(MEASURED))

    def matrix(self, precision: str) -> float:
        """Multiplications and additions in dots a second; f16x3 takes three of 16-bit halves, which go as bfloat16."""
        return self.dot["bf16"] / 3 if precision == F16X3 else self.dot.get(precision, self.multiply)

    def describe(self) -> str:
        """The device whose numbers these are, and how many of them were measured, for a reader."""
        count = f"{len(self.measured)} of {len(self.sources)} fields measured"
        if self.calibrated:
            return f"{self.name} (calibrated {self.calibrated}: {count}, others an {default_gpu().name}'s)"
        return f"{self.name} (default: {count})"

    def __repr__(self) -> str:
        return f"DeviceProfile({self.describe()})"


NUMBERS = tuple(f.name for f in fields(DeviceProfile) if f.name not in ("name", "sources", "calibrated"))
"""The fields that are numbers, or tables of them, each with a source."""
TABLES = ("dot", "tile_share", "staged", "fused_slowdown", "product", "block_dot")
"""The fields that are tables by precision."""
_SCALED = {"crowded": "add", "expanded_bytes": "memory", "far_blocks": "memory", "near_bytes": "l2_bytes"}
"""Numbers that no short probe shows, and those by which they are scaled: another GPU is taken to reach the share of its
own device memory, L2 cache or additions that the default one reached of its."""


def by_precision(table: Mapping[str, float], precision: str) -> float:
    """The number of a precision; that of `OTHER` where it has none."""
    return table.get(precision, table[OTHER])


def default_gpu() -> DeviceProfile:
    """The profile of a GPU that was not calibrated: an NVIDIA H200's."""
    return _packaged("nvidia-h200")


def cpu() -> DeviceProfile:
    """The profile of the CPU cores that the generated torch programs run on."""
    return _packaged("cpu")


def calibrated(name: str, day: str, measured: Mapping[str, Any]) -> DeviceProfile:
    """The profile of a GPU by what `calibrate` measured of it; all else is the default GPU's, as it is or scaled."""
    usual = default_gpu()
    values = {n: getattr(usual, n) for n in NUMBERS} | _scaled(usual, measured) | dict(measured)
    whose = f"assumed: an {usual.name}'s"
    sources = {n: f"{whose}, scaled by {_SCALED[n]}" if n in _SCALED else whose for n in NUMBERS}
    sources |= dict.fromkeys(measured, measured_on(day))
    return DeviceProfile(name=name, sources=sources, calibrated=day, **values)


def measured_on(day: str) -> str:
    """The source of what `calibrate` measured on a day."""
    return f"{MEASURED} calibrate, {day}"


def _scaled(usual: DeviceProfile, measured: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of `_SCALED`, by what `calibrate` finds of both GPUs."""
    probed = _document("nvidia-h200")["probed"]
    share = {n: measured[by] / probed[by] for n, by in _SCALED.items()}
    share["crowded"] = probed["add"] / measured["add"]  # seconds
    values = {n: getattr(usual, n) for n in _SCALED}
    return {n: type(value)(value * share[n]) for n, value in values.items()}


@lru_cache
def _packaged(name: str) -> DeviceProfile:
    """A profile that comes with the package."""
    document = _document(name)
    values, sources = ({n: entry[key] for n, entry in document["fields"].items()} for key in ("value", "source"))
    return DeviceProfile(name=document["name"], sources=sources, **values)


@lru_cache
def _document(name: str) -> dict[str, Any]:
    """A JSON of `profiles/`: of each field a ``value`` and its ``source``."""
    text = (Path(__file__).parent / "profiles" / f"{name}.json").read_text(encoding="utf-8")
    document: dict[str, Any] = json.loads(text)
    return document
