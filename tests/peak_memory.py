"""How much memory a function takes at its peak, as torch's own allocator of the CPU counts, and as the system does.

Scratch inside of torch's functions, as that of a sort, is counted too. And packings, and calls under a memory limit, to
measure.
"""

from __future__ import annotations

import ctypes
import gc
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

import sparsetc as stc
from sparsetc.packing.base import FORMATS, pack
from sparsetc.packing.partition import PARTITIONS, divide
from sparsetc.tensor import coords as crd
from sparsetc.tensor.dtypes import NAMED


def peak(function: Callable[[], Any]) -> tuple[int, int, Any]:
    """(bytes at the peak, bytes that are left, what the function gives), of all that it allocates on the CPU."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        result = function()
    events = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most, held, result


SHAPES = {2: (3_000, 4_000), 3: (2_000, 3_000, 900), 4: (300, 700, 40, 90)}


def coordinates(order: int, nnz: int, clustered: bool) -> torch.Tensor:
    """Distinct coordinates in lexicographic order; clustered ones fill tiles and windows."""
    g = torch.Generator().manual_seed(0)
    shape = SHAPES[order]
    rows = [torch.randint(0, n // (9 if clustered else 1), (nnz,), generator=g) for n in shape]
    if clustered:  # in the first of every few tiles of 16
        rows = [(r // 16 * 16 * 8 + r % 16).clamp_(max=n - 1) for r, n in zip(rows, shape, strict=True)]
    key = rows[0]
    for row, n in zip(rows[1:], shape[1:], strict=True):
        key = key * n + row
    key, found = torch.unique(key), []
    for n in reversed(shape[1:]):
        found.append(key % n)
        key = key // n
    return torch.stack([key, *reversed(found)])


def storages(order: int) -> Iterator[tuple[str, str, stc.plans.Storage]]:
    """(name, format, storage): what the planner makes of each format, for a GPU and for a CPU."""
    rest = tuple(range(1, order))
    yield "coo, first mode", "coo", stc.plans.Storage((0,), (), rest, max_item_nnz=128, narrow=True)
    yield (
        "coo, last mode",
        "coo",
        stc.plans.Storage((order - 1,), (), tuple(range(order - 1)), max_item_nnz=128, narrow=True),
    )
    yield "coo, as given", "coo", stc.plans.Storage((), (), tuple(range(order)), max_item_nnz=128)
    yield "rows", "fiber", stc.plans.Storage((), (order - 1,), tuple(range(order - 1)), 16, 256, 16, narrow=True)
    if order > 2:
        own = (order - 1,), tuple(range(1, order - 1)), (0,)
        yield "fiber, 8 lanes", "fiber", stc.plans.Storage(*own, 8, 32, 128, narrow=True)
        yield "fiber, one lane", "fiber", stc.plans.Storage(*own, max_item_nnz=1 << 16)
        yield "fiber, no root", "fiber", stc.plans.Storage((), tuple(range(1, order)), (0,), 16, 32, 512, narrow=True)
    tiles = stc.plans.Storage((order - 1,), tuple(range(order - 1)), (), max_item_nnz=8 * 4096)
    yield "dense_tile", "dense_tile", tiles
    yield "bitmap_tile", "bitmap_tile", tiles
    sizes: tuple[tuple[str, int], ...] = (("height", 16), ("width", 8))
    yield (
        "window",
        "window",
        stc.plans.Storage((order - 1,), tuple(range(order - 1)), (), max_item_nnz=4096, params=sizes),
    )
    sizes = (("height", 16), ("width", 8), ("tau", 40), ("strip", 8))
    yield "window, by similarity", "window", stc.plans.Storage((0,), rest, (), max_item_nnz=4096, params=sizes)


def packings(order: int, nnz: int) -> Iterator[tuple[str, torch.Tensor, Callable[[], Any]]]:
    """(name, coordinates, what packs or divides them)."""
    shape = SHAPES[order]
    for name, format, storage in (own for own in storages(order) if own[1] in FORMATS):
        coords = coordinates(order, nnz, clustered=format != "coo" and "fiber" not in format)
        yield name, coords, lambda c=coords, f=format, s=storage: pack(c, shape, f, s)
    windows = {"threshold": 2, "height": 16, "width": 8}
    rules: list[tuple[str, dict[str, int]]] = [("mixed_mode", {}), ("run_length", {"threshold": nnz // 900})]
    rules += [("threshold", {"threshold": 2}), ("row_similarity", windows)]
    for rule, options in (own for own in rules if own[0] in PARTITIONS):
        coords = coordinates(order, nnz, clustered=rule not in ("mixed_mode", "run_length"))
        yield f"divided by {rule}", coords, lambda c=coords, r=rule, o=options: divide(r, c, shape, (order - 1,), o)


# -- what a limit of memory allows for, measured as the system does ---------------------------------------------------

SLACK = 64 << 20
"""Bytes that a call may take beside what grows with its operands: blocks of text, tables of a library, a first call."""


class Case(NamedTuple):
    """A call of one kind, on random operands: so many entries of modes of these sizes."""

    kind: str
    shape: tuple[int, ...]
    nnz: int
    dtype: str
    in_order: bool


def _entries(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    coords = torch.stack([torch.randint(n, (case.nnz,), generator=g) for n in case.shape])
    if case.in_order:
        key = torch.unique(crd.linear_key(coords, case.shape)[0])
        coords = torch.stack(torch.unravel_index(key, case.shape))
    return coords, torch.ones(coords.shape[1], dtype=NAMED[case.dtype])


def _of_file(case: Case, folder: Path) -> Callable[[], Any]:
    """A call that reads a file of the case's suffix, written here."""
    (coords, values), path = _entries(case), folder / f"x{case.kind}"
    if case.kind == ".tns":
        lines = np.concatenate((coords.numpy() + 1, values.numpy()[None].real.astype(int))).T.tolist()
        path.write_text("".join(" ".join(map(str, line)) + "\n" for line in lines))
    elif case.kind == ".parquet":
        import pyarrow
        from pyarrow import parquet

        columns = {f"i{m}": row.numpy() for m, row in enumerate(coords)} | {"value": values.numpy()}
        parquet.write_table(pyarrow.table(columns), path)
        return lambda: stc.read(path, columns=list(columns))
    elif case.kind == ".npz":
        np.savez(path, coords=coords.numpy().astype(np.uint16), values=values.numpy(), shape=np.array(case.shape))
    elif case.kind == "csc.npz":
        import scipy.sparse

        scipy.sparse.save_npz(path, scipy.sparse.coo_array((values.numpy(), tuple(coords[:2].numpy()))).tocsc())
    else:  # .mtx holds matrices
        rows = coords[:2] if case.kind.startswith(".mtx") else coords
        shape = case.shape[: len(rows)]
        stc.write(path, stc.SparseTensor(rows, values, shape))
    return lambda: stc.read(path)


def _call(case: Case, folder: Path) -> Callable[[], Any]:
    """What is measured; its operands are made before."""
    if case.kind.startswith(".") or case.kind.endswith(".npz"):
        return _of_file(case, folder)
    if case.kind == "full":
        return lambda: stc.full(case.shape, 1.0, dtype=NAMED[case.dtype])
    if case.kind == "model":
        factors = [torch.ones(n, 7) for n in case.shape]
        return stc.decomposition.CP(torch.ones(7), factors).to_dense
    if case.kind == "core":
        factors = [torch.ones(n, 5) for n in case.shape]
        return stc.decomposition.Tucker(torch.ones([5] * len(factors)), factors).to_dense
    coords, values = _entries(case)
    x = stc.SparseTensor(coords, values, case.shape, coalesce=case.in_order)
    if case.kind == "kron":
        small = stc.full([3] * x.order, 1.0)
        return lambda: stc.kron(x, small)
    if case.kind == "expand":
        rows = x.coalesce()
        rows = rows.with_values(torch.ones(rows.nnz, 5, dtype=rows.dtype))
        return rows.expand_dense
    if case.kind == "blocks":
        sides = [3] * x.order
        blocks = stc.SparseTensor.from_blocks(coords // 3, torch.ones(values.numel(), *sides), case.shape, check=False)
        return blocks.to_dense
    if case.kind == "sum":
        return lambda: x.sum(0, output="dense")
    if case.kind == "einsum":
        letters = "ijk"[: x.order]
        return lambda: stc.einsum(f"{letters}->{letters[::-1]}", x, output="dense")
    return x.to_dense


def _status(name: str) -> int:
    with open("/proc/self/status", encoding="ascii") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def _resident(function: Callable[[], Any]) -> tuple[int, str]:
    """The most bytes of memory that a call has beyond those there are before, and its error of memory if any."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
    before, error = _status("VmRSS"), ""
    try:
        function()
    except stc.OutOfMemoryError as raised:
        error = str(raised)
    return _status("VmHWM") - before, error


def measure(connection: Any) -> None:
    """Answer each `Case` by (limit, bytes at the peak) for the limits that refuse it, up to one that does not."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for case in iter(connection.recv, None):
            small = case._replace(shape=tuple(min(n, 9) for n in case.shape), nnz=20)
            small = case._replace(nnz=20_000) if "." in case.kind else small  # a file that native loops read
            _call(small, Path(folder))()  # whatever is imported, and compiled, on the way
            call, limit, found, error = _call(case, Path(folder)), 1, list[tuple[int, int]](), "none yet"
            while error:
                with stc.options(memory_limit=limit):
                    peak, error = _resident(call)
                found.append((limit, peak))
                said = re.search(r"would take ([\d,]+) bytes", error)
                limit = max(2 * limit, int(said[1].replace(",", "")) if said else 0)
            connection.send(found)
