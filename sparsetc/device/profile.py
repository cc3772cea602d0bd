"""A device as plans are priced for it: every number that belongs to it, each with where it comes from.

In: a JSON of the package (`profiles/`), or what `calibrate` measured. Out: a frozen `DeviceProfile`. The package has
those of an NVIDIA H200 and an H100; the H200's serves every other GPU that was not calibrated, and that of two CPU
cores the generated torch programs.

What `calibrate` measured is kept in ``<cache directory>/profiles/<GPU>.json``, written under a temporary name and
renamed, for later processes to plan with. A record is read once a process, so that all plans of a process are made by
the same numbers. One that is damaged, another GPU's, or where others may write to it, is passed over with one warning:
a profile changes which plan is chosen, never a result.

Beside it stand the GPUs that text is generated for, by the names of targets, and what their instructions can do. Text
that is compiled for a target is the text that would run there.
"""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timezone
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from sparsetc.backends import BACKENDS
from sparsetc.errors import PlanError
from sparsetc.ir.plan import F16X3
from sparsetc.options import Options, current, in_force
from sparsetc.support import Names, files
from sparsetc.support.entry import on_gpu, warn

TARGETS: dict[str, tuple[str, int | str, int]] = {
    **{f"sm_{arch}": ("cuda", arch, 32) for arch in (80, 89, 90, 100, 120)},
    **{arch: ("hip", arch, 64) for arch in ("gfx90a", "gfx942", "gfx950")},
}
"""GPUs as Triton's compiler takes them: the machine, the architecture, threads of a warp."""


HOST = torch.device("cpu")
"""Where operands are if nothing else is said."""


def machine_of(device: torch.device) -> str:
    """Return Triton's name for the machine of a device's programs: ``hip`` where torch is AMD's, ``cuda``, or ``cpu``.

    On the CPU Triton interprets programs, or they are only looked at.
    """
    return "hip" if torch.version.hip is not None else device.type


def portable(precision: str, machine: str) -> str:
    """Return the precision of dots that a machine has for the one asked for: tf32x3 does not compile for AMD's."""
    return "ieee" if machine == "hip" and precision in ("tf32x3", "tf32") else precision


def has_halves(machine: str) -> bool:
    """Return True if float32 is multiplied in halves of 16 bits; AMD's matrix units take it as it is."""
    return machine != "hip"


def gpu(target: str) -> tuple[str, int | str, int]:
    """Return machine, architecture and warp size of a target by its name; `PlanError` where it is not known."""
    if target not in TARGETS:
        raise PlanError(f"unknown target {target!r}; known: {', '.join(TARGETS)}")
    return TARGETS[target]


MEASUREMENT = "measured:"
"""The beginning of the source of a measured number."""
COMMANDS = ("calibrate", "tune refit")
"""The commands that measure, or fit to measurements, and make a record."""
ASSUMED = "assumed: an NVIDIA H200's"
"""The source of a number that is the default GPU's."""
OTHER = "other"
"""Key, in a table by precision, of the precisions that have none of their own."""


@dataclass(frozen=True, repr=False)
class DeviceProfile:
    """The capabilities of a device, in bytes, operations and seconds.

    `profiles/nvidia-h200.json` says what each number means, `sources` where it comes from: ``measured: `` by what and
    when, or ``assumed: `` whose it is; `measured` names those that were measured.

    Attributes:
        constants: of the cost model's formulas, fitted to whole kernels.
        rules: what schedules and formats go by: sizes of tiles and items, bounds, shares, and tables of them.
        calibrated: day on which `calibrate` measured; empty for a profile of the package.
        loops: where programs are priced by what `Cost.loops` counts, the seconds of each: of native loops and of torch
            programs on a CPU, of these alone on a GPU; else empty.

    Examples:
        >>> from sparsetc.device.profile import default_gpu
        >>> default_gpu().name
        'NVIDIA H200'
    """

    name: str
    memory: float
    l2: float
    l1: float
    add: float
    multiply: float
    dot: Mapping[str, float]
    l2_bytes: int
    l1_bytes: int
    warps: int
    warp_size: int
    launch: float
    program: float
    wait: float
    fiber: float
    expand: float
    tile: float
    tile_share: Mapping[str, float]
    run_share: Mapping[str, float]
    fused_slowdown: Mapping[str, float]
    task_bytes: float
    crowded: float
    crowded_below: int
    expanded_bytes: float
    product: Mapping[str, float]
    block_dot: Mapping[str, float]
    near_blocks: float
    far_blocks: float
    near_bytes: int
    pair_turn: float
    moved: float
    call: float
    constants: Mapping[str, float]
    rules: Mapping[str, Any]
    sources: Mapping[str, str]
    calibrated: str = ""
    loops: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def __hash__(self) -> int:
        """Return a hash of a few fields, as tables have none."""
        return hash((self.name, self.calibrated, self.memory, self.launch))

    @property
    def measured(self) -> Names:
        """The names of the numbers that were measured on the device itself."""
        return tuple(name for name, source in self.sources.items() if source.startswith(MEASUREMENT))

    def matrix(self, precision: str) -> float:
        """Return multiplications and additions a second in dots; f16x3 takes three dots at the rate of bfloat16."""
        return self.dot["bf16"] / 3 if precision == F16X3 else self.dot.get(precision, self.multiply)

    def describe(self) -> str:
        """Return a line about the device, and how many numbers were measured."""
        count = f"{len(self.measured)} of {len(self.sources)} numbers measured"
        if self.calibrated:
            others = "others assumed" if "native" in self.loops else f"others an {default_gpu().name}'s"
            return f"{self.name} (calibrated {self.calibrated}: {count}, {others})"
        return f"{self.name} (default: {count})"

    def __repr__(self) -> str:
        return f"DeviceProfile({self.describe()})"


_NO_NUMBERS = ("name", "constants", "rules", "sources", "calibrated", "loops")
NUMBERS = tuple([f.name for f in fields(DeviceProfile) if f.name not in _NO_NUMBERS])
"""The fields that are numbers, or tables of them. They, the constants and the rules have a source each."""
TABLES = ("dot", "tile_share", "run_share", "fused_slowdown", "product", "block_dot")
"""The fields that are tables by precision."""
_SCALED = {"crowded": "add", "expanded_bytes": "memory", "far_blocks": "memory", "near_bytes": "l2_bytes"}
"""Numbers without a short probe, and the rates they are scaled by: another GPU is assumed to reach the same share of
its own device memory, L2 cache or additions as the default one."""


@lru_cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may have on a GPU; for a CPU, those of an NVIDIA H200."""
    if device.type != "cuda":
        return 227 << 10
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", 0) or properties.shared_memory_per_block


def by_precision(table: Mapping[str, Any], precision: str) -> Any:
    """Return the number of a precision, or that of `OTHER`."""
    return table.get(precision, table[OTHER])


@lru_cache
def default_gpu() -> DeviceProfile:
    """Return the profile of a GPU that was not calibrated: an NVIDIA H200's."""
    return _profile_of("NVIDIA H200", _shipped("nvidia-h200"))


@lru_cache
def cpu() -> DeviceProfile:
    """Return the profile of the CPU cores that the generated torch programs run on."""
    return _profile_of("2 CPU cores", _shipped("cpu"))


@lru_cache
def cpu_name() -> str:
    """Return what the system calls the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(filter(None, named), platform.processor() or "CPU")


def cpu_with_loops() -> DeviceProfile:
    """Return the profile of CPU cores where native loops are priced beside the generated torch programs."""
    path = path_of(cpu_name())
    return (path and _read(path, cpu_name(), usual_loops)) or usual_loops()


@lru_cache
def usual_loops() -> DeviceProfile:
    """Return the profile of a CPU that was not calibrated, with the seconds of its loops."""
    document = _document("cpu")
    return _with_loops(_profile_of(cpu().name, _shipped("cpu") | document["native"]), document["loops"])


def _with_loops(profile: DeviceProfile, entries: Mapping[str, Any]) -> DeviceProfile:
    loops, sources = ({n: entry[key] for n, entry in entries.items()} for key in ("value", "source"))
    every = {**profile.sources, **{f"loops {n}": source for n, source in sources.items()}}
    return replace(profile, loops=loops, sources=every)


def calibrated(name: str, day: str, measured: Mapping[str, Any], command: str = COMMANDS[0]) -> DeviceProfile:
    """Return the profile of a GPU from measured rates, or of a CPU from seconds of loops.

    All other numbers are the default's, or scaled from the measured ones.
    """
    if measured.keys() == usual_loops().loops.keys():
        return _with_loops(replace(usual_loops(), name=name, calibrated=day), _entries(measured, day, command))
    probed, scaled = _document("nvidia-h200")["probed"], {}
    for n, by in _SCALED.items():
        share = probed[by] / measured[by] if n == "crowded" else measured[by] / probed[by]  # seconds, or a rate
        usual = getattr(default_gpu(), n)
        scaled[n] = {"value": type(usual)(usual * share), "source": f"{ASSUMED}, scaled by {by}"}
    return _profile_of(name, scaled | _entries(measured, day, command), day)


def today() -> str:
    """Return the date, as records have it."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%d")


def numbers_of(profile: DeviceProfile) -> Mapping[str, Any]:
    """Return what is measured of a device: the seconds of loops on a CPU, or the rates of a GPU."""
    return profile.loops or {n: getattr(profile, n) for n in MEASURED}


def _entries(measured: Mapping[str, Any], day: str, command: str) -> dict[str, Any]:
    """Return what a command measured on a day as a record holds it."""
    return {n: {"value": value, "source": f"{MEASUREMENT} {command}, {day}"} for n, value in measured.items()}


def _profile_of(name: str, entries: dict[str, Any], day: str = "") -> DeviceProfile:
    """Return the profile of these entries; numbers without an entry are the default GPU's."""
    usual = {n: entry | {"source": ASSUMED} for n, entry in _shipped("nvidia-h200").items()}
    values, sources = ({n: entry[key] for n, entry in (usual | entries).items()} for key in ("value", "source"))
    rules = {n: values.pop(n) for n in _document("nvidia-h200")["rules"]}
    constants = {n: values.pop(n) for n in [*values] if n not in NUMBERS}
    return DeviceProfile(name=name, constants=constants, rules=rules, sources=sources, calibrated=day, **values)


def _shipped(name: str) -> dict[str, Any]:
    """Return the entries of a profile of the package: fields and constants, then rules."""
    document = _document(name)
    return document["fields"] | document["rules"]


@lru_cache
def _document(name: str) -> dict[str, Any]:
    """Return a JSON of `profiles/`: the ``value`` and ``source`` of each number, and what it ``means``."""
    text = (Path(__file__).parent / "profiles" / f"{name}.json").read_text(encoding="utf-8")
    return json.loads(text)  # type: ignore[no-any-return]


VERSION = 2
"""Version of the record's form; a record of another one is passed over."""
RATES = ("memory", "l2", "l1", "add", "multiply", "dot", "launch", "program")
PAIR_RATES = ("task_bytes", "product", "block_dot", "near_blocks", "moved", "call")
SIZES = ("l2_bytes", "warps", "warp_size")
MEASURED = (*RATES, *PAIR_RATES, *SIZES)
"""Fields that a record holds. Others are the default GPU's, also those of a later version of the package."""
DAY = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)
"""The format of a record's date, which `explain()` prints."""
MAX_BYTES = 1 << 16
"""Most bytes of a record; one takes about 2 kB."""
FACTOR = 1e9
"""Between a number and its default at most: none that is further off is a device's, and sums of costs stay finite."""


def path_of(device: str, what: str = "profiles", form: str = "json") -> Path | None:
    """Return where a record of a device of that name lies, in the cache directory in force; None without one."""
    directory = files.cache_folder(current().cache_dir)
    return None if directory is None else _record(directory, what, f"{slug(device)}.{form}")


_record = lru_cache(Path)


@lru_cache
def slug(device: str) -> str:
    """Return the name of a device as a file's: small letters and digits, and hyphens for all else."""
    return re.sub("[^a-z0-9]+", "-", device.lower()).strip("-")


def write(profile: DeviceProfile, software: Mapping[str, str | None]) -> Path:
    """Store measured rates, of a GPU or of a CPU's loops, with the versions of the software. Return the path.

    This process plans with it from here on. Raises `OSError` where the folder cannot be written to, or others may
    write to it.
    """
    numbers, of = numbers_of(profile), "loops " * bool(profile.loops)
    entries = {n: {"value": value, "source": profile.sources[f"{of}{n}"]} for n, value in numbers.items()}
    document = {"version": VERSION, "name": profile.name, "date": profile.calibrated, **software, "fields": entries}
    path = path_of(profile.name)
    if path is None:
        raise FileNotFoundError("profiles are kept below the home directory, and there is none; set SPARSETC_CACHE_DIR")
    files.claim_record(path)
    files.write_private(path, (json.dumps(document, indent=1) + "\n").encode())
    _read.cache_clear()
    return path


@lru_cache
def _read(path: Path, name: str, default: Callable[[], DeviceProfile] = default_gpu) -> DeviceProfile | None:
    """Return the recorded profile of a GPU, or of a CPU, or None. It is cached, so that a warning appears once."""
    usual = default()
    try:
        # every number as a float, since an integer may have more digits than one holds
        return _profile(json.loads(files.read_record(path, MAX_BYTES), parse_int=float), name, usual)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        others = "" if usual.loops else f", an {usual.name}'s"
        warn(
            f"{path} holds no profile of {name} that can be used ({str(error)[:300]}); planning with the "
            f'default{others}. Write it anew with "python -m sparsetc calibrate", or remove it'
        )
        return None


def _profile(document: Any, name: str, usual: DeviceProfile) -> DeviceProfile:
    """Return the profile of a record; `ValueError` says what is wrong with it."""
    known = numbers_of(usual)
    try:
        day, values = document["date"], {n: document["fields"][n]["value"] for n in known}
        by = next(by for by in COMMANDS if document["fields"] == _entries(values, day, by))
        intact = DAY.fullmatch(day) and (document["version"], document["name"]) == (VERSION, name)
    except (KeyError, TypeError, StopIteration):
        intact = False
    if not intact:
        raise ValueError(f"not a record of version {VERSION} of this device, with {', '.join(known)} of one day")
    for n, value in values.items():
        table, numbers = (value, known[n]) if isinstance(known[n], Mapping) else ({"": value}, {"": known[n]})
        if not isinstance(table, dict) or set(table) != set(numbers):
            raise ValueError(f"{n} is not of {', '.join(numbers)}")
        for key, number in table.items():  # which a device must be able to have
            least, most = (0, 1) if usual.loops else (numbers[key] / FACTOR, numbers[key] * FACTOR)
            if not isinstance(number, float) or not least <= number <= most:
                raise ValueError(f"{n} {key}".strip() + f" is {number!r}")
    sizes = {n: max(1, int(values[n])) for n in SIZES if n in values}
    return calibrated(name, day, values | sizes, by)


def of_backend(backend: str, device: torch.device = HOST) -> DeviceProfile:
    """Return the profile that generated programs of a backend are priced by, for operands on a device.

    Programs that are made for a GPU, or run on one, are priced by that of the current CUDA device; by the default GPU's
    without one, or without a record. Torch programs there take the seconds of the default GPU's loops.
    """
    made_for = BACKENDS[backend]
    if device.type != "cuda" and not made_for.gpu:
        return cpu_with_loops() if made_for.loops else cpu()
    gpu = of_gpu(torch.cuda.get_device_name() if torch.cuda.is_available() else "")
    return gpu if made_for.gpu else _with_loops(gpu, _document("nvidia-h200")["loops"])


def of_gpu(name: str) -> DeviceProfile:
    """Return the recorded profile of a GPU, else the package's, else the default one."""
    path = path_of(name) if name else None
    return (path and _read(path, name)) or _of_package(name) or default_gpu()


@lru_cache
def _of_package(gpu: str) -> DeviceProfile | None:
    """Return the profile of a GPU that the package's authors calibrated, None of others; a record as `write` makes."""
    path = Path(__file__).parent / "profiles" / f"{slug(gpu)}.json"
    if slug(gpu) == slug(default_gpu().name) or not path.exists():
        return None
    return _profile(json.loads(path.read_text(encoding="utf-8"), parse_int=float), gpu, default_gpu())


def profile_of(device: torch.device, settings: Options, backend: str = "torch") -> DeviceProfile:
    """Return the profile of `of_backend` for the device that operands are on, recorded where the settings say."""
    with in_force(settings), on_gpu(device):
        return of_backend(backend, device)
