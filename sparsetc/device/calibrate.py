"""The profile of the GPU at hand, measured: `calibrate`.

In: a CUDA device. Out: its `DeviceProfile`, and a record of it that later processes plan with (`device/record.py`).
Times are medians of CUDA events around single launches with the L2 cache cleared in between. What no short probe shows
alone is the default GPU's, some of it scaled by what was measured (`device/profile.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from sparsetc.device import profile, record
from sparsetc.device.probes import ProbeSizes, probes, starts, torch_probes
from sparsetc.device.profile import DeviceProfile, default_gpu
from sparsetc.device.targets import portable
from sparsetc.errors import DeviceError
from sparsetc.options import current

L2_SHARE = 5 / 6
"""Share of the L2 cache that rows of a table can count on: the default is 50 MB of an H200's 60."""
ISSUED = 4
"""Warps that a multiprocessor issues from at once, on NVIDIA's and AMD's GPUs alike."""
TIMED_MS = 40
"""Milliseconds for which a launch is repeated."""
_BYTES, _OPERATIONS, _MICROSECONDS = (1e12, "TB/s"), (1e12, "T operations a second"), (1e-6, "us")
UNITS = {
    **dict.fromkeys(("memory", "l2", "l1", "add", "task_bytes", "near_blocks", "moved"), _BYTES),
    **dict.fromkeys(("multiply", "dot", "product", "block_dot"), _OPERATIONS),
    **dict.fromkeys(("launch", "call"), _MICROSECONDS),
    "program": (1e-9, "ns"),
    "l2_bytes": (1e6, "MB"),
    "warps": (1, "at once"),
    "warp_size": (1, "threads"),
}
"""(scale, unit) in which the table prints a number."""


def calibrate() -> DeviceProfile:
    """Measure the current CUDA device, and plan with what was found: in this process, and in later ones.

    Takes less than a minute and 1.4 GB of the device's memory; nothing else should run there. Measured are bytes a
    second of device memory, of the L2 and the L1 cache and of atomic additions, operations a second outside dots and
    inside them at each precision, seconds to launch a kernel and to start a program; and for two sparse operands
    torch's dense products, zeros, gathers and calls, sums over pairs of nonzeros, and products of pairs of blocks. The
    record, one for each kind of GPU, lies in ``profiles`` in the cache directory (``$SPARSETC_CACHE_DIR``,
    ``options(cache_dir=)``). Kernels that were compiled before keep their plans.

    Returns:
        the profile, of which ``measured`` names the fields that were measured here, and ``sources`` what all are from.

    Raises:
        DeviceError: there is no GPU, it is too busy to be measured, or Triton interprets (``TRITON_INTERPRET``).
        OutOfMemoryError: the device has too little memory free.
        OSError: the record cannot be written.
    """
    found = measure()
    keep(found)
    return found


def measure(sizes: ProbeSizes | None = None) -> DeviceProfile:
    """The profile of the current CUDA device; nothing is kept. Errors: as of `calibrate`, but of files."""
    if not torch.cuda.is_available():
        raise DeviceError("calibrate measures a GPU, and torch finds none here; nothing was measured or changed")
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise DeviceError("calibrate times compiled kernels; unset TRITON_INTERPRET and start again")
    sizes = sizes or ProbeSizes()
    device = torch.device("cuda", torch.cuda.current_device())
    current().check_memory(sizes.nbytes, device, "calibrating")
    timed = chain(probes(device, sizes, _machine()), torch_probes(device, sizes))
    rate = {p.rate: p.work / _seconds(p.launches) for p in timed}
    launch, few, many = (_seconds([one]) for one in starts(device, sizes))
    if many <= few:
        raise DeviceError("more programs took less time: something else runs on this GPU. Nothing was kept")
    rate |= {"launch": launch, "program": (many - few) / (sizes.started[1] - sizes.started[0])}
    rate["call"] = 1 / rate["call"]
    usual = default_gpu()
    rate |= {f"dot {name}": rate[f"dot {portable(name, _machine())}"] for name in usual.dot}
    found: dict[str, Any] = {name: _rounded(rate[name]) for name in record.MEASURED if name in rate}
    for table in ("dot", "product", "block_dot"):
        found[table] = {name: _rounded(rate[f"{table} {name}"]) for name in getattr(usual, table)}
    day = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    return profile.calibrated(torch.cuda.get_device_name(device), day, found | _sizes(device))


def keep(found: DeviceProfile) -> Path:
    """Write the record, with the versions that measured; returns its path. `OSError`: it cannot be written."""
    import triton

    software = {
        "driver": _driver(),
        _machine(): getattr(torch.version, _machine(), None),
        "torch": str(torch.__version__),
        "triton": str(triton.__version__),
    }
    return record.write(found, software)


def table(found: DeviceProfile) -> str:
    """Number by number: as measured, and the default GPU's."""
    rows = [("field", "measured", "default", "")]
    for name in record.MEASURED:
        (scale, unit), own, usual = UNITS[name], getattr(found, name), getattr(default_gpu(), name)
        if name in profile.TABLES:
            rows += [(f"{name} {p}", _digits(v / scale), _digits(usual[p] / scale), unit) for p, v in own.items()]
        else:
            rows.append((name, _digits(own / scale), _digits(usual / scale), unit))
    widths = [max(len(row[n]) for row in rows) for n in range(3)]
    lines = [
        f"  {row[0].ljust(widths[0])}  {row[1].rjust(widths[1])}  {row[2].rjust(widths[2])}  {row[3]}" for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def _digits(number: float) -> str:
    return f"{number:.4g}"


def _seconds(launches: Sequence[Callable[[], object]]) -> float:
    """Seconds of the fastest of the launches."""
    from triton.testing import do_bench

    return min(float(do_bench(one, warmup=10, rep=TIMED_MS, return_mode="median")) for one in launches) * 1e-3


def _rounded(rate: float) -> float:
    """The rate to four digits: more would not come out the same again."""
    return float(f"{rate:.4g}")


# -- the device -------------------------------------------------------------------------------------------------------


def _machine() -> str:
    """Triton's name for what torch was built for."""
    return "hip" if torch.version.hip else "cuda"


def _sizes(device: torch.device) -> dict[str, int]:
    """What the driver reports: what rows can count on of the L2 cache, warps, and threads of one.

    Where torch does not say one, it is the default GPU's.
    """
    properties, usual = torch.cuda.get_device_properties(device), default_gpu()
    return {
        "l2_bytes": int(getattr(properties, "L2_cache_size", 0) * L2_SHARE) or usual.l2_bytes,
        "warps": ISSUED * getattr(properties, "multi_processor_count", 0) or usual.warps,
        "warp_size": getattr(properties, "warp_size", 0) or usual.warp_size,
    }


def _driver() -> str | None:
    """Version of the GPU's driver, where Linux shows it."""
    try:
        return Path(f"/sys/module/{'amdgpu' if torch.version.hip else 'nvidia'}/version").read_text().strip()
    except OSError:
        return None
