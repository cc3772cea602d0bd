"""Einsums and CP-ALS over several GPUs, beside one: TTV and MTTKRP of every mode, and an iteration.

    torchrun --nproc-per-node 2 benchmarks/distributed.py [names of tensors]

Rank 32, float32. Every rank builds the tensor on its own GPU and keeps its share. Milliseconds are medians of calls
that follow one another, on a GPU of a captured graph of the call, the slowest rank's; ``one`` is the whole tensor on
this one GPU, in the same process. ``link`` has what plain collectives of this group reach. No time is reported for a
result that is not that of one GPU.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from common import DEVICE, factors, letters, mttkrp_equation, record, relative_error, tensor
from torch.distributed.tensor import DTensor

import sparsetc as stc
from sparsetc.decomposition import cp_als
from sparsetc.distributed.ranks import Ranks

RANK, SHORT, LONG, CALLS = 32, 8, 136 if DEVICE == "cuda" else 40, 20
LINK_BYTES = 1 << 28 if DEVICE == "cuda" else 1 << 20


def begin() -> Ranks:
    """Join the processes that torchrun started."""
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if "RANK" in os.environ:
        dist.init_process_group("cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo")
    return Ranks()


def wait(ranks: Ranks) -> None:
    """Until all ranks are here and their GPUs have nothing to do."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    ranks.objects(None)


def slowest(ranks: Ranks, value: float) -> float:
    """The largest of all ranks' numbers."""
    return float(max(ranks.objects(value)))


def milliseconds(ranks: Ranks, call: Callable[[], Any]) -> float:
    """Median of as many calls on every rank, which time would not be: a call waits for the other ranks'."""
    for _ in range(3):
        call()
    wait(ranks)
    if DEVICE == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            call()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(CALLS + 1)]
        graph.replay()
        marks[0].record()
        for mark in marks[1:]:
            graph.replay()
            mark.record()
        torch.cuda.synchronize()
        times = [one.elapsed_time(other) for one, other in pairwise(marks)]
    else:
        times = []
        for _ in range(CALLS):
            start = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - start))
    return round(slowest(ranks, statistics.median(times)), 4)


def link(ranks: Ranks) -> dict[str, float]:
    """GB a second that each rank sends in a large all-to-all, and microseconds of a small sum."""
    if ranks.size == 1:
        return {}
    share, small = LINK_BYTES // 4 // ranks.size, torch.ones(1, device=DEVICE)
    counts = [share * (rank != ranks.rank) for rank in range(ranks.size)]
    rows, sent = torch.ones(sum(counts), device=DEVICE), sum(counts) * 4 / 1e6
    return {
        "all_to_all_gb_s": round(sent / milliseconds(ranks, lambda: ranks.exchanged(rows, counts, counts)), 1),
        "small_sum_us": round(1e3 * milliseconds(ranks, lambda: ranks.sum_(small)), 1),
    }


def whole(found: Any) -> Any:
    """A result on every rank."""
    if isinstance(found, stc.distributed.Sharded):
        return found.gather()
    return found.full_tensor() if isinstance(found, DTensor) else found


def ttv(x: stc.SparseTensor, ranks: Ranks, mode: int) -> dict[str, Any]:
    """All modes but the contracted one are cut; the sparse result stays in shares, so nothing is sent."""
    own = letters(x.order)
    text, v = f"{own},{own[mode]}->{own.replace(own[mode], '')}", factors(x, 1)[mode][:, 0].contiguous()
    shared = stc.distributed.shard(x, text)
    kernel, alone = stc.compile(text, shared, v), stc.compile(text, x, v)
    found, expected = whole(kernel(v)), alone(v)
    if isinstance(found, stc.SparseTensor):
        assert torch.equal(found.coords, expected.coords)
        found, expected = found.values, expected.values
    assert slowest(ranks, relative_error(found, expected.double())) < 1e-5
    del found, expected
    one = milliseconds(ranks, lambda: alone(v))
    return row("ttv", mode, shared, kernel, one, milliseconds(ranks, lambda: kernel(v)))


def mttkrp(x: stc.SparseTensor, ranks: Ranks, mode: int) -> dict[str, Any]:
    """Cut by output rows, of which each rank keeps a part; all have the whole in ``gathered_ms``."""
    text, others = mttkrp_equation(x.order, mode), [f for m, f in enumerate(factors(x, RANK)) if m != mode]
    shared = stc.distributed.shard(x, text)
    kernel, gathered = stc.compile(text, shared, *others), stc.compile(text, shared, *others, gather=True)
    alone = stc.compile(text, x, *others)
    expected = alone(*others).double()
    for found in (whole(kernel(*others)), gathered(*others)):
        assert slowest(ranks, relative_error(found, expected)) < 1e-4
    one = milliseconds(ranks, lambda: alone(*others))
    found = row("mttkrp", mode, shared, kernel, one, milliseconds(ranks, lambda: kernel(*others)))
    return found | {"gathered_ms": milliseconds(ranks, lambda: gathered(*others))}


def row(name: str, mode: int, shared: Any, kernel: Any, one: float, ms: float) -> dict[str, Any]:
    """A line of the record."""
    return {
        "what": name,
        "mode": mode,
        "grid": list(shared.cut.grid),
        "imbalance": round(shared.cut.imbalance, 3),
        "sent_bytes": kernel.explain().nbytes,
        "one_ms": one,
        "ms": ms,
        "speedup": round(one / ms, 2),
    }


def iteration(ranks: Ranks, run: Callable[[int], Any]) -> float:
    """Milliseconds a sweep: what a longer run takes more than a shorter one."""

    def seconds(n_iter: int) -> float:
        wait(ranks)
        start = time.perf_counter()
        run(n_iter)
        wait(ranks)
        return time.perf_counter() - start

    run(SHORT)
    short, long = (min(seconds(n) for _ in range(3)) for n in (SHORT, LONG))
    return round(slowest(ranks, 1e3 * (long - short) / (LONG - SHORT)), 4)


def als(x: stc.SparseTensor, ranks: Ranks) -> dict[str, Any]:
    """A sweep on the grid that sends the fewest rows."""
    shared = stc.distributed.shard(x)
    settings: dict[str, Any] = {"tol": 0, "random_state": 0}
    found = cp_als(shared, RANK, n_iter_max=SHORT, **settings)
    expected = cp_als(x, RANK, n_iter_max=SHORT, **settings)
    worst = max(abs(a - b) for a, b in zip(found.fits, expected.fits, strict=True))
    assert slowest(ranks, worst) < 1e-3, (found.fits, expected.fits)
    one = iteration(ranks, lambda n: cp_als(x, RANK, n_iter_max=n, **settings))
    ms = iteration(ranks, lambda n: cp_als(shared, RANK, n_iter_max=n, **settings))
    return {
        "what": "cp_als sweep",
        "grid": list(shared.cut.grid),
        "imbalance": round(shared.cut.imbalance, 3),
        "one_ms": one,
        "ms": ms,
        "speedup": round(one / ms, 2),
        "worst_fit": worst,
    }


def main(names: list[str]) -> None:
    """Every tensor that is there."""
    warnings.simplefilter("ignore")
    ranks = begin()
    rates, rows = link(ranks), []

    def say(found: dict[str, Any]) -> None:
        rows.append(found)
        if ranks.rank == 0:
            print(found, flush=True)

    if ranks.rank == 0:
        print(f"{ranks.size} ranks, {ranks.backend}: {rates}", flush=True)
    for name in names or ["nell-2"]:
        x = tensor(name)
        if x is None:
            continue
        for measured in (mttkrp, ttv):
            for mode in range(x.order):
                say({"tensor": name, "nnz": x.nnz, **measured(x, ranks, mode)})
                stc.clear_cache()
        say({"tensor": name, "nnz": x.nnz, **als(x, ranks)})
    if ranks.rank == 0:
        record(f"distributed_{ranks.size}", rows, ranks=ranks.size, rank=RANK, link=rates)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
