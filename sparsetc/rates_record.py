"""Rates of a GPU on disk: what `calibrate` measured there, for later processes to plan with.

In: a GPU's `Rates`. Out: ``<cache directory>/rates/<GPU>.json``, and the rates again. A record is written under a
temporary name and renamed. It is read once a process, so that all plans of a process are made by the same rates. One
that is damaged, another GPU's, or where others may write to it, is passed over with one warning: rates change which
plan is chosen, never a result.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from sparsetc import cache_folder, private
from sparsetc.ir.rates import Rates
from sparsetc.options import current
from sparsetc.warn import warn

VERSION = 1
"""Of the record's form; one of another version is passed over."""
MEASURED = ("memory", "l2", "l1", "add", "multiply", "dot", "l2_bytes", "launch", "program")
"""Fields of `Rates` that a record holds. Others keep their defaults, also those of a later version of the package."""
DAY = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)
"""How the date of a record is written, which `explain()` prints."""
MAX_BYTES = 1 << 16
"""Of a record; one takes less than 1 kB."""
FACTOR = 1e9
"""Between a rate and its default at most: none that is further off is a device's, and sums of costs stay finite."""


def of_current_device() -> Rates | None:
    """Rates recorded for the current CUDA device; None without one, or without a record that can be read."""
    if not torch.cuda.is_available():
        return None
    gpu = torch.cuda.get_device_name()
    path = path_of(gpu)
    return None if path is None else _read(path, gpu)


def path_of(gpu: str) -> Path | None:
    """Where the record of a GPU of that name lies, in the cache directory of the options in force; None without one."""
    directory = cache_folder.resolved(current().cache_dir)
    name = f"{re.sub('[^a-z0-9]+', '-', gpu.lower()).strip('-')}.json"
    return None if directory is None else directory / "rates" / name


def write(rates: Rates, software: Mapping[str, str | None]) -> Path:
    """Keep the measured rates, beside the versions of the software that ran; returns the path.

    This process plans with them from here on. Raises `OSError` where the folder cannot be written to, or others may
    write to it.
    """
    path = path_of(rates.name)
    if path is None:
        raise FileNotFoundError("rates are kept below the home directory, and there is none; set SPARSETC_CACHE_DIR")
    measured = {name: getattr(rates, name) for name in MEASURED} | {"dot": dict(rates.dot)}
    document = {"version": VERSION, "gpu": rates.name, "date": rates.calibrated, **software, "rates": measured}
    cache_folder.claim(path.parent.parent)
    private.claim(path.parent, tighten=True)
    private.write(path, (json.dumps(document, indent=1) + "\n").encode())
    _read.cache_clear()
    return path


@lru_cache(maxsize=64)
def _read(path: Path, gpu: str) -> Rates | None:
    """The record's rates, None where there is none; remembered, so that a warning is given once."""
    try:
        data = private.read(path, MAX_BYTES)
        private.check(path.parent.parent)
        private.check(path.parent)
        # every number as a float, since an integer may have more digits than one holds
        return _rates(json.loads(data, parse_int=float), gpu)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        warn(
            f"{path} holds no rates of {gpu} that can be used ({str(error)[:300]}); planning with the defaults, an "
            'H200\'s. Write it anew with "python -m sparsetc calibrate", or remove it'
        )
        return None


def _rates(document: Any, gpu: str) -> Rates:
    """The rates of a record; `ValueError` says what is wrong with it."""
    if not isinstance(document, dict) or document.get("version") != VERSION:
        raise ValueError(f"not a record of version {VERSION}")
    if document.get("gpu") != gpu:
        raise ValueError(f"it is of {document.get('gpu')!r}")
    date, rates = document.get("date"), document.get("rates")
    if not isinstance(date, str) or not DAY.fullmatch(date):
        raise ValueError("it has no date")
    if not isinstance(rates, dict) or set(rates) != set(MEASURED):
        raise ValueError(f"its rates are not {', '.join(MEASURED)}")
    kinds = [kind for kind, _ in Rates().dot]
    if not isinstance(rates["dot"], dict) or set(rates["dot"]) != set(kinds):
        raise ValueError(f"its rates of dot are not {', '.join(kinds)}")
    usual = Rates()
    found: dict[str, Any] = {name: _rate(name, rates[name], getattr(usual, name)) for name in MEASURED if name != "dot"}
    found["l2_bytes"] = int(found["l2_bytes"])
    found["dot"] = tuple((kind, _rate(f"dot, {kind}", rates["dot"][kind], default)) for kind, default in usual.dot)
    return Rates(name=gpu, calibrated=date, **found)


def _rate(name: str, value: Any, usual: float) -> float:
    """The value, if it is a number that a device may have; `ValueError` otherwise."""
    if not isinstance(value, float) or not usual / FACTOR <= value <= usual * FACTOR:
        raise ValueError(f"the rate {name} is {value!r}")
    return value
