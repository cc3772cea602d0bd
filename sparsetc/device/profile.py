"""A device as plans are priced for it: every number that belongs to it, each with where it comes from.

In: a JSON of the package (`profiles/`), or what `calibrate` measured. Out: a frozen `DeviceProfile`. An NVIDIA H200's
serves every GPU that was not calibrated, and that of two CPU cores the generated torch programs.

What `calibrate` measured is kept in ``<cache directory>/profiles/<GPU>.json``, written under a temporary name and
renamed, for later processes to plan with. A record is read once a process, so that all plans of a process are made by
the same numbers. One that is damaged, another GPU's, or where others may write to it, is passed over with one warning:
a profile changes which plan is chosen, never a result.

Beside it stand the GPUs that text is generated for, by the names of targets, and what their instructions can do. Text
that is compiled for a target is the text that would run there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sparsetc.errors import PlanError
from sparsetc.ir.plan import F16X3
from sparsetc.options import Options, current, in_force
from sparsetc.support import files
from sparsetc.support.notices import warn


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


MEASUREMENT = "measured:"
"""What the source of a number that was measured begins with."""
ASSUMED = "assumed: an NVIDIA H200's"
"""The source of a number that is the default GPU's."""
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
    staged: Mapping[str, int] = field(hash=False)
    """How often a gathered side of a dot passes between registers and shared memory, by precision."""
    fused_slowdown: Mapping[str, float] = field(hash=False)
    """How many times longer scalar programs take in one launch with tiles, whose registers they are given; by the
    precision of the tiles' dots."""
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
    laws: Mapping[str, float] = field(hash=False)
    """Constants of the cost model's formulas, fitted to whole kernels; `profiles/nvidia-h200.json` says what each
    means."""
    sources: Mapping[str, str] = field(hash=False)
    """Where each number comes from: ``measured: `` by what, and when, or ``assumed: `` whose it is."""
    calibrated: str = ""
    """Day on which `calibrate` measured; empty for a profile of the package."""

    @property
    def measured(self) -> tuple[str, ...]:
        """The names of the numbers that were measured on the device itself."""
        return tuple(name for name, source in self.sources.items() if source.startswith(MEASUREMENT))

    def matrix(self, precision: str) -> float:
        """Multiplications and additions in dots a second; f16x3 takes three of 16-bit halves, which go as bfloat16."""
        return self.dot["bf16"] / 3 if precision == F16X3 else self.dot.get(precision, self.multiply)

    def describe(self) -> str:
        """The device whose numbers these are, and how many of them were measured, for a reader."""
        count = f"{len(self.measured)} of {len(self.sources)} numbers measured"
        if self.calibrated:
            return f"{self.name} (calibrated {self.calibrated}: {count}, others an {default_gpu().name}'s)"
        return f"{self.name} (default: {count})"

    def __repr__(self) -> str:
        return f"DeviceProfile({self.describe()})"


NUMBERS = tuple(f.name for f in fields(DeviceProfile) if f.name not in ("name", "laws", "sources", "calibrated"))
"""The fields that are numbers, or tables of them. They, and the laws, have a source each."""
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
    own = {n: {"value": value, "source": measured_on(day)} for n, value in measured.items()}
    return _profile_of(name, _scaled(measured) | own, day)


def measured_on(day: str) -> str:
    """The source of what `calibrate` measured on a day."""
    return f"{MEASUREMENT} calibrate, {day}"


def _scaled(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Entries of the numbers of `_SCALED`, by what `calibrate` finds of both GPUs."""
    probed = _document("nvidia-h200")["probed"]
    share = {n: measured[by] / probed[by] for n, by in _SCALED.items()}
    share["crowded"] = probed["add"] / measured["add"]  # seconds
    values = {n: getattr(default_gpu(), n) for n in _SCALED}
    return {
        n: {"value": type(value)(value * share[n]), "source": f"{ASSUMED}, scaled by {_SCALED[n]}"}
        for n, value in values.items()
    }


@lru_cache
def _packaged(name: str) -> DeviceProfile:
    """A profile that comes with the package."""
    document = _document(name)
    return _profile_of(document["name"], document["fields"])


def _profile_of(name: str, entries: dict[str, Any], day: str = "") -> DeviceProfile:
    """The profile of entries, each a ``value`` and its ``source``; numbers without an entry are the default GPU's."""
    usual = {n: entry | {"source": ASSUMED} for n, entry in _document("nvidia-h200")["fields"].items()}
    values, sources = ({n: entry[key] for n, entry in (usual | entries).items()} for key in ("value", "source"))
    laws = {n: values.pop(n) for n in usual if n not in NUMBERS}
    return DeviceProfile(name=name, laws=laws, sources=sources, calibrated=day, **values)


@lru_cache
def _document(name: str) -> dict[str, Any]:
    """A JSON of `profiles/`: the ``value`` and ``source`` of each number, and of laws what they mean."""
    text = (Path(__file__).parent / "profiles" / f"{name}.json").read_text(encoding="utf-8")
    document: dict[str, Any] = json.loads(text)
    return document


VERSION = 2
"""Version of the record's form; a record of another one is passed over."""
RATES = ("memory", "l2", "l1", "add", "multiply", "dot", "launch", "program")
PAIR_RATES = ("task_bytes", "product", "block_dot", "near_blocks", "moved", "call")
SIZES = ("l2_bytes", "warps", "warp_size")
MEASURED = (*RATES, *PAIR_RATES, *SIZES)
"""Fields that a record holds. Others are the default GPU's, also those of a later version of the package."""
DAY = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)
"""How the date of a record is written, which `explain()` prints."""
MAX_BYTES = 1 << 16
"""Most bytes of a record; one takes about 2 kB."""
FACTOR = 1e9
"""Between a number and its default at most: none that is further off is a device's, and sums of costs stay finite."""


def read() -> DeviceProfile | None:
    """The profile recorded for the current CUDA device; None without one, or without a record that can be read."""
    if not torch.cuda.is_available():
        return None
    gpu = torch.cuda.get_device_name()
    path = path_of(gpu)
    return None if path is None else _read(path, gpu)


def path_of(gpu: str) -> Path | None:
    """Where the record of a GPU of that name lies, in the cache directory of the options in force; None without one."""
    directory = files.cache_folder(current().cache_dir)
    name = f"{re.sub('[^a-z0-9]+', '-', gpu.lower()).strip('-')}.json"
    return None if directory is None else directory / "profiles" / name


def write(profile: DeviceProfile, software: Mapping[str, str | None]) -> Path:
    """Keep what was measured, beside the versions of the software that ran; returns the path.

    This process plans with it from here on. Raises `OSError` where the folder cannot be written to, or others may
    write to it.
    """
    path = path_of(profile.name)
    if path is None:
        raise FileNotFoundError("profiles are kept below the home directory, and there is none; set SPARSETC_CACHE_DIR")
    entries = {n: {"value": getattr(profile, n), "source": measured_on(profile.calibrated)} for n in MEASURED}
    document = {"version": VERSION, "name": profile.name, "date": profile.calibrated, **software, "fields": entries}
    files.claim(path.parent.parent)
    files.claim(path.parent, tighten=True)
    files.write_private(path, (json.dumps(document, indent=1) + "\n").encode())
    _read.cache_clear()
    return path


@lru_cache(maxsize=64)
def _read(path: Path, gpu: str) -> DeviceProfile | None:
    """The recorded profile, None where there is none; remembered, so that a warning is given once."""
    try:
        data = files.read_private(path, MAX_BYTES)
        files.check(path.parent.parent)
        files.check(path.parent)
        # every number as a float, since an integer may have more digits than one holds
        return _profile(json.loads(data, parse_int=float), gpu)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        warn(
            f"{path} holds no profile of {gpu} that can be used ({str(error)[:300]}); planning with the default, an "
            f'{default_gpu().name}\'s. Write it anew with "python -m sparsetc calibrate", or remove it'
        )
        return None


def _profile(document: Any, gpu: str) -> DeviceProfile:
    """The profile of a record; `ValueError` says what is wrong with it."""
    if not isinstance(document, dict) or document.get("version") != VERSION:
        raise ValueError(f"not a record of version {VERSION}")
    if document.get("name") != gpu:
        raise ValueError(f"it is of {document.get('name')!r}")
    day, entries = document.get("date"), document.get("fields")
    if not isinstance(day, str) or not DAY.fullmatch(day):
        raise ValueError("it has no date")
    if not isinstance(entries, dict) or set(entries) != set(MEASURED):
        raise ValueError(f"its fields are not {', '.join(MEASURED)}")
    return calibrated(gpu, day, {name: _value(name, entries[name], day) for name in MEASURED})


def _value(name: str, entry: Any, day: str) -> Any:
    """What an entry holds: a number, or numbers by precision; `ValueError` where a device cannot have them."""
    if not isinstance(entry, dict) or set(entry) != {"value", "source"} or entry["source"] != measured_on(day):
        raise ValueError(f"{name} is no value that was measured on {day}")
    value, usual = entry["value"], getattr(default_gpu(), name)
    if name not in TABLES:
        number = _number(name, value, usual)
        return max(1, int(number)) if name in SIZES else number
    if not isinstance(value, dict) or set(value) != set(usual):
        raise ValueError(f"{name} is not of the precisions {', '.join(usual)}")
    return {precision: _number(f"{name} {precision}", value[precision], usual[precision]) for precision in usual}


def _number(name: str, value: Any, usual: float) -> float:
    """The value, if it is a number that a device may have; `ValueError` otherwise."""
    if not isinstance(value, float) or not usual / FACTOR <= value <= usual * FACTOR:
        raise ValueError(f"{name} is {value!r}")
    return value


def of_current_device() -> DeviceProfile:
    """The profile of the current CUDA device; the default GPU's without one, or without a record that can be read."""
    return read() or default_gpu()


def of_backend(backend: str) -> DeviceProfile:
    """The profile that generated programs of a backend are priced by: ``torch``'s run on CPU cores."""
    return cpu() if backend == "torch" else of_current_device()


def profile_of(device: torch.device, settings: Options, backend: str = "torch") -> DeviceProfile:
    """The profile of the device that operands are on, recorded where the settings say; elsewhere that of the backend.

    Operands on a CPU, of which Triton programs are made, are priced as on the GPU that these are for.
    """
    with in_force(settings):
        if device.type != "cuda":
            return of_backend(backend)
        with torch.cuda.device(device):
            return of_current_device()
