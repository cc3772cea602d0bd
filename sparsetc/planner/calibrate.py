"""The rates of the GPU at hand, measured: `calibrate`, and the probes it times.

In: a CUDA device. Out: its `Rates`, and a record of them that later processes plan with (`sparsetc/rates_record.py`).
A probe is one kernel or a few forms of it, of which the fastest counts, and the bytes or operations it does. Times are
medians of CUDA events around single launches with the L2 cache cleared in between. What no short kernel shows alone
(`wait`, `fiber`, `l1_bytes`) stays at its default.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from sparsetc import rates_record
from sparsetc.codegen.launch import portable
from sparsetc.errors import DeviceError
from sparsetc.ir.rates import Rates
from sparsetc.options import current

ROW = 32
"""Columns of a row: 128 bytes of float32."""
SIDE, DEEP = 64, 16
"""Rows and columns of a dot's operands."""
FORMS = ((32, 2), (64, 4), (128, 4))
"""(rows at once, warps) of gathers and additions; the best of them counts."""
NEAR_ROWS = 256
"""Rows of the table that stays in the L1 cache: 32 KB."""
L2_SHARE = 5 / 6
"""Of the L2 cache that rows of a table can count on: the default is 50 MB of an H200's 60."""
TIMED_MS = 40
"""For which a launch is repeated."""


UNITS = {
    "memory": (1e12, "TB/s"),
    "l2": (1e12, "TB/s"),
    "l1": (1e12, "TB/s"),
    "add": (1e12, "TB/s"),
    "multiply": (1e12, "T operations a second"),
    "l2_bytes": (1e6, "MB"),
    "launch": (1e-6, "us"),
    "program": (1e-9, "ns"),
}
"""(scale, unit) in which the table prints a rate."""


@dataclass(frozen=True)
class Sizes:
    """How much the probes do: on an H200 0.1 to 4 ms each, 1.4 GB of device memory at most."""

    streamed: int = 1 << 28
    """Elements read, in blocks of `block`."""
    block: int = 8192
    table: int = 100_000
    """Rows of the table gathered from and added to: 12.8 MB."""
    gathered: int = 1 << 24
    added: int = 1 << 23
    programs: int = 1 << 12
    steps: int = 256
    started: tuple[int, int] = (1 << 16, 1 << 18)

    @property
    def nbytes(self) -> int:
        """Of device memory that any one probe takes, and its timer, at most."""
        return 4 * (self.streamed + self.gathered) + (1 << 28)


@dataclass(frozen=True)
class Launch:
    """A kernel with its arguments; called, it starts."""

    kernel: Any
    grid: int
    arguments: tuple[torch.Tensor | int, ...]
    constants: dict[str, int | str]
    warps: int = 4

    def __call__(self) -> None:
        """Start it on the current device; returns before it has run."""
        self.kernel[(self.grid,)](*self.arguments, **self.constants, num_warps=self.warps, num_stages=1)


@dataclass(frozen=True)
class Probe:
    """Launches that do the same `work` (bytes or operations), each in its own way."""

    rate: str
    work: int
    launches: tuple[Launch, ...]


def calibrate() -> Rates:
    """Measure the current CUDA device, and plan with what was found: in this process, and in later ones.

    Takes less than a minute and 1.4 GB of the device's memory; nothing else should run there. Measured are bytes a
    second of device memory, of the L2 and the L1 cache and of atomic additions, operations a second outside dots and
    inside them at each precision, and seconds to launch a kernel and to start a program. The record, one for each kind
    of GPU, lies in ``rates`` in the cache directory (``$SPARSETC_CACHE_DIR``, ``options(cache_dir=)``). Kernels that
    were compiled before keep their plans.

    Raises:
        DeviceError: there is no GPU, it is too busy to be measured, or Triton interprets (``TRITON_INTERPRET``).
        OutOfMemoryError: the device has too little memory free.
        OSError: the record cannot be written.
    """
    rates = measure()
    keep(rates)
    return rates


def measure(sizes: Sizes | None = None) -> Rates:
    """The rates of the current CUDA device; nothing is kept. Errors: as of `calibrate`, but of files."""
    if not torch.cuda.is_available():
        raise DeviceError("calibrate measures a GPU, and torch finds none here; nothing was measured or changed")
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise DeviceError("calibrate times compiled kernels; unset TRITON_INTERPRET and start again")
    sizes = sizes or Sizes()
    device = torch.device("cuda", torch.cuda.current_device())
    current().check_memory(sizes.nbytes, device, "calibrating")
    rate = {p.rate: p.work / _seconds(p.launches) for p in probes(device, sizes)}
    launch, few, many = (_seconds([one]) for one in starts(device, sizes))
    if many <= few:
        raise DeviceError("more programs took less time: something else runs on this GPU. Nothing was kept")
    return Rates(
        name=torch.cuda.get_device_name(device),
        calibrated=datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        memory=_rounded(rate["memory"]),
        l2=_rounded(rate["l2"]),
        l1=_rounded(rate["l1"]),
        add=_rounded(rate["add"]),
        multiply=_rounded(rate["multiply"]),
        dot=tuple((name, _rounded(rate[f"dot {portable(name, _backend())}"])) for name, _ in Rates().dot),
        l2_bytes=_l2_bytes(device),
        launch=_rounded(launch),
        program=_rounded((many - few) / (sizes.started[1] - sizes.started[0])),
    )


def keep(rates: Rates) -> Path:
    """Write the record, with the versions that measured; returns its path. `OSError`: it cannot be written."""
    import triton

    software = {
        "driver": _driver(),
        _backend(): getattr(torch.version, _backend(), None),
        "torch": str(torch.__version__),
        "triton": str(triton.__version__),
    }
    return rates_record.write(rates, software)


def table(rates: Rates) -> str:
    """Rate by rate: as measured, and the default, which is an H200's."""
    default = Rates()
    rows = [("rate", "measured", "default", "")]
    for name in rates_record.MEASURED:
        if name == "dot":
            usual = dict(default.dot)
            rows += [(f"dot {k}", *_pair(v, usual[k], 1e12), "T operations a second") for k, v in rates.dot]
            continue
        scale, unit = UNITS[name]
        rows.append((name, *_pair(getattr(rates, name), getattr(default, name), scale), unit))
    widths = [max(len(row[n]) for row in rows) for n in range(3)]
    lines = [
        f"  {row[0].ljust(widths[0])}  {row[1].rjust(widths[1])}  {row[2].rjust(widths[2])}  {row[3]}" for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def _pair(measured: float, default: float, scale: float) -> tuple[str, str]:
    return f"{measured / scale:.4g}", f"{default / scale:.4g}"


# -- probes -----------------------------------------------------------------------------------------------------------


def probes(device: torch.device, sizes: Sizes) -> Iterator[Probe]:
    """What is timed for each rate that is work a second; a probe's arrays are made when its turn comes."""
    from sparsetc.planner import calibration_kernels as kernels

    source, blocks = torch.ones(sizes.streamed, device=device), sizes.streamed // sizes.block
    read = Launch(kernels.stream, blocks, (source, _zeros(blocks, device)), {"BLOCK": sizes.block}, warps=8)
    yield Probe("memory", 4 * sizes.streamed, (read,))
    del source, read

    rows = torch.randint(0, sizes.table, (sizes.gathered,), dtype=torch.int32, device=device)
    values = torch.ones(sizes.table, ROW, device=device)
    gathers = []
    for block, warps in FORMS:
        grid = sizes.gathered // (block * 8)
        constants: dict[str, int | str] = {"BLOCK": block, "ROW": ROW, "STEPS": 8}
        sums = _zeros(grid * ROW, device)
        gathers.append(Launch(kernels.gather, grid, (rows, values, sums), constants, warps))
    yield Probe("l2", 4 * ROW * sizes.gathered, tuple(gathers))

    adds = [
        Launch(kernels.add, sizes.added // block, (rows, values), {"BLOCK": block, "ROW": ROW}, warps)
        for block, warps in FORMS
    ]
    yield Probe("add", 4 * ROW * sizes.added, tuple(adds))

    near = torch.randint(0, NEAR_ROWS, (sizes.programs * 32,), dtype=torch.int32, device=device)
    values, sums = torch.ones(NEAR_ROWS, ROW, device=device), _zeros(sizes.programs * ROW, device)
    constants = {"BLOCK": 32, "ROW": ROW, "TABLE": NEAR_ROWS, "STEPS": sizes.steps}
    launch = Launch(kernels.gather_near, sizes.programs, (near, values, sums), constants)
    yield Probe("l1", 4 * ROW * 32 * sizes.steps * sizes.programs, (launch,))

    pair, out = torch.full((2,), 0.5, device=device), _zeros(sizes.programs * 1024, device)
    launch = Launch(kernels.multiply, sizes.programs, (pair, out), {"BLOCK": 1024, "STEPS": 4 * sizes.steps})
    yield Probe("multiply", 2 * 1024 * 4 * sizes.steps * sizes.programs, (launch,))

    matrix, sums = torch.full((SIDE, DEEP), 0.25, device=device), _zeros(sizes.programs * SIDE, device)
    for precision in dict.fromkeys(portable(name, _backend()) for name, _ in Rates().dot):
        constants = {"SIDE": SIDE, "DEEP": DEEP, "PRECISION": precision}
        launch = Launch(kernels.dot, sizes.programs, (matrix, sums, sizes.steps), constants)
        yield Probe(f"dot {precision}", 2 * SIDE * SIDE * DEEP * sizes.steps * sizes.programs, (launch,))


def starts(device: torch.device, sizes: Sizes) -> tuple[Launch, Launch, Launch]:
    """Launches of one, of few and of many programs that find nothing to do.

    They read where their work lies, since `Rates.program` counts that too; one warp each, as most work items take.
    """
    from sparsetc.planner.calibration_kernels import find_work

    pointers = torch.zeros(sizes.started[1] + 1, dtype=torch.int32, device=device)
    one, few, many = (Launch(find_work, n, (pointers, pointers[:1]), {}, warps=1) for n in (1, *sizes.started))
    return one, few, many


def _seconds(launches: Sequence[Launch]) -> float:
    """Of the fastest of the launches."""
    from triton.testing import do_bench

    return min(float(do_bench(one, warmup=10, rep=TIMED_MS, return_mode="median")) for one in launches) * 1e-3


def _zeros(count: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(count, device=device)


def _rounded(rate: float) -> float:
    """To four digits: more would not come out the same again."""
    return float(f"{rate:.4g}")


# -- the device -------------------------------------------------------------------------------------------------------


def _backend() -> str:
    """Triton's name for what torch was built for."""
    return "hip" if torch.version.hip else "cuda"


def _l2_bytes(device: torch.device) -> int:
    """What rows can count on of the L2 cache; the default where torch does not say its size."""
    size = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
    return int(size * L2_SHARE) or Rates().l2_bytes


def _driver() -> str | None:
    """Version of the GPU's driver, where Linux shows it."""
    try:
        return Path(f"/sys/module/{'amdgpu' if torch.version.hip else 'nvidia'}/version").read_text().strip()
    except OSError:
        return None
