"""A GPU's profile on disk: what `calibrate` measured there, for later processes to plan with.

In: a GPU's `DeviceProfile`; then a backend, or a device, whose plans are to be priced. Out:
``<cache directory>/profiles/<GPU>.json``, of the form that profiles of the package
have, and the profile again. A record is written under a temporary name and renamed. It is read once a process, so that
all plans of a process are made by the same numbers. One that is damaged, another GPU's, or where others may write to
it, is passed over with one warning: a profile changes which plan is chosen, never a result.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from sparsetc.device.profile import TABLES, DeviceProfile, calibrated, cpu, default_gpu, measured_on
from sparsetc.options import Options, current, in_force
from sparsetc.support import files
from sparsetc.support.warn import warn

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
    files.claim_cache(path.parent.parent)
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
