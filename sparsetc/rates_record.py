"""Rates of a GPU on disk: what `calibrate` measured there, for later processes to plan with.

In: a GPU's `Rates`. Out: ``<cache directory>/rates/<GPU>.json``, and the rates again. A record is written under a
temporary name and renamed. It is read once a process, so that all plans of a process are made by the same rates. One
that is damaged, or another GPU's, is passed over with one warning: rates change which plan is chosen, never a result.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from sparsetc.codegen.cache import default_directory
from sparsetc.io.atomic import replacing
from sparsetc.ir.rates import Rates
from sparsetc.options import current

VERSION = 1
"""Of the record's form; one of another version is passed over."""
MEASURED = ("memory", "l2", "l1", "add", "multiply", "dot", "l2_bytes", "launch", "program")
"""Fields of `Rates` that a record holds. Others keep their defaults, also those of a later version of the package."""


def of_current_device() -> Rates | None:
    """Rates recorded for the current CUDA device; None without one, or without a record that can be read."""
    if not torch.cuda.is_available():
        return None
    gpu = torch.cuda.get_device_name()
    return _read(path_of(gpu), gpu)


def path_of(gpu: str) -> Path:
    """Where the record of a GPU of that name lies, in the cache directory of the options in force."""
    directory = (current().cache_dir or default_directory()).expanduser().absolute()
    return directory / "rates" / f"{re.sub('[^a-z0-9]+', '-', gpu.lower()).strip('-')}.json"


def write(rates: Rates, software: Mapping[str, str | None]) -> Path:
    """Keep the measured rates, beside the versions of the software that ran; returns the path.

    This process plans with them from here on. Raises `OSError` where the folder cannot be written to.
    """
    measured = {name: getattr(rates, name) for name in MEASURED} | {"dot": dict(rates.dot)}
    document = {"version": VERSION, "gpu": rates.name, "date": rates.calibrated, **software, "rates": measured}
    path = path_of(rates.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write((json.dumps(document, indent=1) + "\n").encode())
    _read.cache_clear()
    return path


@lru_cache(maxsize=64)
def _read(path: Path, gpu: str) -> Rates | None:
    """The record's rates, None where there is none; remembered, so that a warning is given once."""
    try:
        return _rates(json.loads(path.read_bytes()), gpu)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        warnings.warn(
            f"sparsetc: {path} holds no rates of {gpu} that can be read ({error}); planning with the defaults, an "
            'H200\'s. Write it anew with "python -m sparsetc calibrate", or remove it',
            stacklevel=2,
        )
        return None


def _rates(document: Any, gpu: str) -> Rates:
    """The rates of a record; `ValueError` says what is wrong with it."""
    if not isinstance(document, dict) or document.get("version") != VERSION:
        raise ValueError(f"not a record of version {VERSION}")
    if document.get("gpu") != gpu:
        raise ValueError(f"it is of {document.get('gpu')!r}")
    date, rates = document.get("date"), document.get("rates")
    if not isinstance(date, str) or not date:
        raise ValueError("it has no date")
    if not isinstance(rates, dict) or set(rates) != set(MEASURED):
        raise ValueError(f"its rates are not {', '.join(MEASURED)}")
    kinds = [kind for kind, _ in Rates().dot]
    if not isinstance(rates["dot"], dict) or set(rates["dot"]) != set(kinds):
        raise ValueError(f"its rates of dot are not {', '.join(kinds)}")
    found: dict[str, Any] = {name: _positive(name, rates[name]) for name in MEASURED if name != "dot"}
    found["l2_bytes"] = int(found["l2_bytes"])
    found["dot"] = tuple((kind, _positive(f"dot, {kind}", rates["dot"][kind])) for kind in kinds)
    return Rates(name=gpu, calibrated=date, **found)


def _positive(name: str, value: Any) -> float:
    """The value as a number; `ValueError` unless it is finite and above zero."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (math.isfinite(value) and value > 0):
        raise ValueError(f"the rate {name} is {value!r}")
    return float(value)
