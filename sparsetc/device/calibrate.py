"""The profile of the GPU at hand, measured: `calibrate`.

In: a CUDA device. Out: its `DeviceProfile`, and a record of it that later processes plan with (`device/profile.py`).
Times are medians of CUDA events around single launches with the L2 cache cleared in between. What no short probe shows
alone is the default GPU's, some of it scaled by what was measured (`device/profile.py`).

A `Probe` is a short piece of work, a kernel or a call of torch, with the bytes or operations that it does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from textwrap import indent
from typing import Any

import torch
from torch import Tensor

from sparsetc.device import profile
from sparsetc.device.profile import DeviceProfile, default_gpu, machine_of, portable
from sparsetc.errors import DeviceError
from sparsetc.explain import aligned
from sparsetc.ir.plan import DOTS, F16X3
from sparsetc.options import PRECISIONS
from sparsetc.support.checks import check_memory
from sparsetc.support.entry import matmul_precision

ROW = 32
"""Columns of a row: 128 bytes of float32."""
SIDE, DEEP = 64, 16
"""Rows and columns of a dot's operands."""
FORMS = ((32, 2), (64, 4), (128, 4))
"""(rows at once, warps) of gathers and additions; the best of them counts."""
NEAR_ROWS = 256
"""Rows of the table that stays in the L1 cache: 32 KB."""
KEPT_TASK = 13
"""Bytes of a kept task: 5 of the list, and float32 values of y and of the result."""
TASKS_A_RUN = 32
"""Tasks whose places in the result rise."""
BLOCK = 64
INNER = 32
PAIRS = 64
"""Rows, or columns, and inner positions of a block of the two operands; pairs of one program."""
BLOCK_DOTS = {"f16x3": F16X3, **DOTS, "float64": "ieee"}
"""The multiplication of pairs of blocks, by ``precision=``; ``f16x3`` is for values in two halves."""
SPARSE = 16
"""Places of an array for each value that is scattered to it and gathered from it."""


@dataclass(frozen=True)
class ProbeSizes:
    """The amounts of work of the probes: on an H200 0.1 to 4 ms each, 1.4 GB of device memory at most.

    Attributes:
        streamed: elements read, in blocks of `block`.
        table: rows of the table gathered from and added to: 12.8 MB.
        sums: entries of the result that tasks are added to.
        product: rows, inner side and columns of a dense product, those to which a contraction of `benchmarks/pair.py`
            unfolds.
        pairs: pairs of blocks.
        blocks: blocks of either operand: 42 MB of both, as many as those of `benchmarks/switches.py` take.
        moved: elements of the array that torch zeroes, scatters to and gathers from.
        calls: calls of torch, one after another.
    """

    streamed: int = 1 << 28
    block: int = 8192
    table: int = 100_000
    gathered: int = 1 << 24
    added: int = 1 << 23
    programs: int = 1 << 12
    steps: int = 256
    started: tuple[int, int] = (1 << 16, 1 << 18)
    tasks: int = 1 << 24
    sums: int = 1 << 22
    product: tuple[int, int, int] = (6700, 686, 6700)
    pairs: int = 1 << 18
    blocks: int = 2560
    moved: int = 1 << 26
    calls: int = 256

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that any one probe, and its timer, take at most."""
        return 4 * (self.streamed + self.gathered) + (1 << 28)


Launch = partial


def launch_of(
    kernel: Any, grid: int, *arguments: Tensor | int, warps: int = 4, stages: int = 1, **constants: object
) -> Launch:
    """Return a launch of a kernel on the current device, which returns before it has run."""
    options = {"num_warps": warps, "num_stages": stages}
    return partial(kernel.run, *arguments, grid=(grid,), warmup=False, **options, **constants)


Probe = tuple[str, int, Sequence[Callable[[], object]]]
"""The field of a profile, and for tables the precision behind it; bytes, operations or calls; the ways to do these, of
which the fastest counts."""


def probes(device: torch.device, sizes: ProbeSizes, machine: str) -> Iterator[Probe]:
    """Kernels for each rate that is work a second; a probe's arrays are made when its turn comes."""
    from sparsetc.device import calibration_kernels as kernels

    source, blocks = torch.ones(sizes.streamed, device=device), sizes.streamed // sizes.block
    sums = torch.zeros(blocks, device=device)
    read = launch_of(kernels.stream, blocks, source, sums, BLOCK=sizes.block, warps=8)
    yield "memory", 4 * sizes.streamed, (read,)
    del source, read

    rows = torch.randint(0, sizes.table, (sizes.gathered,), dtype=torch.int32, device=device)
    values = torch.ones(sizes.table, ROW, device=device)
    gathers = []
    for block, warps in FORMS:
        grid = sizes.gathered // (block * 8)
        sums = torch.zeros(grid * ROW, device=device)
        gathers.append(launch_of(kernels.gather, grid, rows, values, sums, BLOCK=block, ROW=ROW, STEPS=8, warps=warps))
    yield "l2", 4 * ROW * sizes.gathered, tuple(gathers)

    adds = [
        launch_of(kernels.add, sizes.added // block, rows, values, BLOCK=block, ROW=ROW, warps=warps)
        for block, warps in FORMS
    ]
    yield "add", 4 * ROW * sizes.added, tuple(adds)

    near = torch.randint(0, NEAR_ROWS, (sizes.programs * 32,), dtype=torch.int32, device=device)
    values, sums = torch.ones(NEAR_ROWS, ROW, device=device), torch.zeros(sizes.programs * ROW, device=device)
    constants = {"BLOCK": 32, "ROW": ROW, "TABLE": NEAR_ROWS, "STEPS": sizes.steps}
    launch = launch_of(kernels.gather_near, sizes.programs, near, values, sums, **constants)
    yield "l1", 4 * ROW * 32 * sizes.steps * sizes.programs, (launch,)

    pair, out = torch.full((2,), 0.5, device=device), torch.zeros(sizes.programs * 1024, device=device)
    launch = launch_of(kernels.multiply, sizes.programs, pair, out, BLOCK=1024, STEPS=4 * sizes.steps)
    yield "multiply", 2 * 1024 * 4 * sizes.steps * sizes.programs, (launch,)

    matrix, sums = torch.full((SIDE, DEEP), 0.25, device=device), torch.zeros(sizes.programs * SIDE, device=device)
    for precision in dict.fromkeys(portable(name, machine) for name in default_gpu().dot):
        sides: dict[str, Any] = {"SIDE": SIDE, "DEEP": DEEP, "PRECISION": precision}
        launch = launch_of(kernels.dot, sizes.programs, matrix, sums, sizes.steps, **sides)
        yield f"dot {precision}", 2 * SIDE * SIDE * DEEP * sizes.steps * sizes.programs, (launch,)
    yield "task_bytes", KEPT_TASK * sizes.tasks, (_tasks(kernels, device, sizes),)
    launches = {name: _pairs(kernels, device, sizes, name, portable(dot, machine)) for name, dot in BLOCK_DOTS.items()}
    for name, launch in launches.items():
        yield f"block_dot {name}", 2 * BLOCK * BLOCK * INNER * sizes.pairs, (launch,)
    yield "near_blocks", 2 * 4 * BLOCK * INNER * sizes.pairs, (launches["high"], launches["medium"])


def _tasks(kernels: Any, device: torch.device, sizes: ProbeSizes) -> Launch:
    """Return the probe of kept tasks: within a run positions rise from a random one, as in a row of a result."""
    runs = torch.randint(1, 8, (sizes.tasks // TASKS_A_RUN, TASKS_A_RUN), dtype=torch.int32, device=device)
    runs[:, 0] = torch.randint(0, sizes.sums, (runs.shape[0],), dtype=torch.int32, device=device)
    places = (torch.cumsum(runs, 1, dtype=torch.int32) % sizes.sums).flatten()
    words = torch.randint(0, 256, (sizes.tasks,), dtype=torch.uint8, device=device)
    values, sums = (torch.ones(max(256, sizes.sums), device=device) for _ in range(2))
    steps = {"BLOCK": 128, "TABLE": sizes.sums, "STEPS": 16}
    return launch_of(kernels.tasks, sizes.tasks // (128 * 16), words, places, values, sums, **steps)


def _pairs(kernels: Any, device: torch.device, sizes: ProbeSizes, name: str, precision: str) -> Launch:
    """Pairs of blocks, which lie in cache; halves of 16 bits are two blocks."""
    dtype = {"f16x3": torch.float16, "float64": torch.float64}.get(name, torch.float32)
    shape = sizes.blocks * (2 if name == "f16x3" else 1), BLOCK, INNER
    left, right = (torch.ones(shape, dtype=dtype, device=device) for _ in range(2))
    numbers = torch.randint(0, sizes.blocks, (sizes.pairs, 2), dtype=torch.int32, device=device)
    grid = sizes.pairs // PAIRS
    out = torch.zeros(grid * BLOCK, dtype=torch.float64 if name == "float64" else torch.float32, device=device)
    constants: dict[str, Any] = {"PAIRS": PAIRS, "SIDE": BLOCK, "INNER": INNER, "PRECISION": precision}
    stages = 2 if name == "f16x3" else 3
    return launch_of(kernels.pairs, grid, numbers, left, right, out, stages=stages, **constants)


def torch_probes(device: torch.device, sizes: ProbeSizes) -> Iterator[Probe]:
    """Calls of torch, which contractions of two sparse operands make beside their kernels."""
    rows, inner, columns = sizes.product
    for name in (*PRECISIONS, "float64"):
        dtype = torch.float64 if name == "float64" else torch.float32
        left, right = (torch.ones(shape, dtype=dtype, device=device) for shape in ((rows, inner), (inner, columns)))

        def product(left: Tensor = left, right: Tensor = right, name: str = name) -> Tensor:
            with matmul_precision(name if name in PRECISIONS else "highest"):
                return left @ right

        yield f"product {name}", 2 * rows * inner * columns, (product,)

    places = torch.arange(0, sizes.moved, SPARSE, device=device)
    array, values = torch.zeros(sizes.moved, device=device), torch.ones(places.numel(), device=device)

    def moved() -> Tensor:
        """Zero an array and scatter to it, as operands are; zero it and gather from it, as results are."""
        _scattered(array, places, values)
        return array.zero_().index_select(0, places)

    yield "moved", 2 * 4 * sizes.moved, (moved,)

    few = array[: SPARSE * SPARSE]
    one = values[:SPARSE]
    least = places[:SPARSE]

    def calls() -> None:
        for _ in range(0, sizes.calls, 4):
            _scattered(few, least, one).index_select(0, least).add_(one)

    yield "call", sizes.calls, (calls,)


def _scattered(array: Tensor, places: Tensor, values: Tensor) -> Tensor:
    """The array of zeros but for the values at their places."""
    return array.zero_().index_copy_(0, places, values)


def starts(device: torch.device, sizes: ProbeSizes) -> tuple[Launch, Launch, Launch]:
    """Return launches of one, of few and of many programs without work.

    They read where their work lies, since `DeviceProfile.program` counts that too; one warp each, as most work items
    take.
    """
    from sparsetc.device.calibration_kernels import find_work

    pointers = torch.zeros(sizes.started[1] + 1, dtype=torch.int32, device=device)
    one, few, many = (launch_of(find_work, n, pointers, pointers[:1], warps=1) for n in (1, *sizes.started))
    return one, few, many


L2_SHARE = 5 / 6
"""Share of the L2 cache that rows of a table can count on: the default is 50 MB of an H200's 60."""
TIMED_MS = 40
"""Milliseconds for which a launch is repeated."""
_BYTES = (1e12, "TB/s")
_OPERATIONS = (1e12, "T operations a second")
_MICROSECONDS = (1e-6, "us")
UNITS = {
    **dict.fromkeys(("memory", "l2", "l1", "add", "task_bytes", "near_blocks", "moved"), _BYTES),
    **dict.fromkeys(("multiply", "dot", "product", "block_dot"), _OPERATIONS),
    **dict.fromkeys(("launch", "call"), _MICROSECONDS),
    **dict.fromkeys(("program", "native", "torch"), (1e-9, "ns")),
    "l2_bytes": (1e6, "MB"),
    "warps": (1, "at once"),
    "warp_size": (1, "threads"),
}
"""(scale, unit) in which the table prints a number."""


def measure(sizes: ProbeSizes | None = None) -> DeviceProfile:
    """The profile of the current CUDA device; nothing is kept. Errors: as of `calibration.calibrate`, but of files."""
    if not torch.cuda.is_available():
        raise DeviceError("calibrate measures a GPU, or a CPU with numba, and finds none here; nothing was measured")
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise DeviceError("calibrate times compiled kernels; unset TRITON_INTERPRET and start again")
    sizes = sizes or ProbeSizes()
    device = torch.device("cuda", torch.cuda.current_device())
    check_memory("calibrating", sizes.nbytes, device)
    machine = machine_of(device)
    timed = chain(probes(device, sizes, machine), torch_probes(device, sizes))
    rate = {name: work / _seconds(launches) for name, work, launches in timed}
    launch, few, many = (_seconds([one]) for one in starts(device, sizes))
    if many <= few:
        raise DeviceError("more programs took less time: something else runs on this GPU. Nothing was kept")
    rate |= {"launch": launch, "program": (many - few) / (sizes.started[1] - sizes.started[0])}
    rate["call"] = 1 / rate["call"]
    usual = default_gpu()
    rate |= {f"dot {name}": rate[f"dot {portable(name, machine)}"] for name in usual.dot}
    numbers: dict[str, Any] = {name: _rounded(rate[name]) for name in profile.MEASURED if name in rate}
    for table in ("dot", "product", "block_dot"):
        numbers[table] = {name: _rounded(rate[f"{table} {name}"]) for name in getattr(usual, table)}
    return profile.calibrated(torch.cuda.get_device_name(device), profile.today(), numbers | _sizes(device))


def keep(measured: DeviceProfile) -> Path:
    """Write the record, with the versions that measured; returns its path. `OSError`: it cannot be written."""
    kind = "hip" if torch.version.hip else "cuda"
    on_gpu = {} if measured.loops else {"driver": _driver(), kind: getattr(torch.version, kind)}
    compiler = "numba" if measured.loops else "triton"
    versions = {"torch": str(torch.__version__), compiler: import_module(compiler).__version__}
    return profile.write(measured, on_gpu | versions)


def table(of_device: DeviceProfile) -> str:
    """Return a table of the numbers: as measured, and the default device's."""
    default = profile.numbers_of(profile.usual_loops() if of_device.loops else default_gpu())
    rows = [("field", "measured", "default", "")]
    for name, numbers in profile.numbers_of(of_device).items():
        scale, unit = UNITS[name]
        usual = default[name]
        if not isinstance(numbers, Mapping):
            name, numbers, usual = "", {name: numbers}, {name: usual}
        each = ((f"{name} {key}".strip(), numbers[key] / scale, usual[key] / scale) for key in numbers)
        rows += [(field, f"{measured:.4g}", f"{default:.4g}", unit) for field, measured, default in each]
    return indent(aligned(rows, left=(0, 3)), "  ")


def _seconds(launches: Sequence[Callable[[], object]]) -> float:
    """Seconds of the fastest of the launches."""
    from triton.testing import do_bench

    return min(float(do_bench(one, warmup=10, rep=TIMED_MS, return_mode="median")) for one in launches) * 1e-3


def _rounded(rate: float) -> float:
    """The rate to four digits: more would not come out the same again."""
    return float(f"{rate:.4g}")


# -- the device -------------------------------------------------------------------------------------------------------


def _sizes(device: torch.device) -> dict[str, int]:
    """Return the driver's numbers: the usable share of the L2 cache, concurrent warps, and threads of a warp.

    Where torch does not say one, it is the default GPU's.
    """
    properties, usual = torch.cuda.get_device_properties(device), default_gpu()
    return {
        "l2_bytes": int(getattr(properties, "L2_cache_size", 0) * L2_SHARE) or usual.l2_bytes,
        "warps": usual.rules["issued"] * getattr(properties, "multi_processor_count", 0) or usual.warps,
        "warp_size": getattr(properties, "warp_size", 0) or usual.warp_size,
    }


def _driver() -> str | None:
    """Version of the GPU's driver, where Linux shows it."""
    try:
        return Path(f"/sys/module/{'amdgpu' if torch.version.hip else 'nvidia'}/version").read_text().strip()
    except OSError:
        return None
