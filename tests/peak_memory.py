"""How much memory a function takes at its peak, as torch's own allocator of the CPU counts; and packings to measure.

Scratch inside of torch's functions, as that of a sort, is counted too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import sparsetc as stc
from sparsetc.packing.base import FORMATS, pack
from sparsetc.packing.deal import PARTITIONS, deal


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


def storages(order: int) -> Iterator[tuple[str, str, stc.Storage]]:
    """(name, format, storage): what the planner makes of each format, for a GPU and for a CPU."""
    rest = tuple(range(1, order))
    yield "coo, first mode", "coo", stc.Storage((0,), (), rest, max_item_nnz=128, narrow=True)
    yield "coo, last mode", "coo", stc.Storage((order - 1,), (), tuple(range(order - 1)), max_item_nnz=128, narrow=True)
    yield "coo, as given", "coo", stc.Storage((), (), tuple(range(order)), max_item_nnz=128)
    yield "rows", "fiber", stc.Storage((), (order - 1,), tuple(range(order - 1)), 16, 256, 16, narrow=True)
    if order > 2:
        own = (order - 1,), tuple(range(1, order - 1)), (0,)
        yield "fiber, 8 lanes", "fiber", stc.Storage(*own, 8, 32, 128, narrow=True)
        yield "fiber, one lane", "fiber", stc.Storage(*own, max_item_nnz=1 << 16)
        yield "fiber, no root", "fiber", stc.Storage((), tuple(range(1, order)), (0,), 16, 32, 512, narrow=True)
    tiles = stc.Storage((order - 1,), tuple(range(order - 1)), (), max_item_nnz=8 * 4096)
    yield "dense_tile", "dense_tile", tiles
    yield "bitmap_tile", "bitmap_tile", tiles
    for name in ("window", "vbr"):
        sizes = (("height", 16), ("width", 8))
        yield name, name, stc.Storage((order - 1,), tuple(range(order - 1)), (), max_item_nnz=4096, params=sizes)
    sizes = (("height", 16), ("width", 8), ("tau", 40), ("strip", 8))
    yield "window, by similarity", "window", stc.Storage((0,), rest, (), max_item_nnz=4096, params=sizes)


def packings(order: int, nnz: int) -> Iterator[tuple[str, torch.Tensor, Callable[[], Any]]]:
    """(name, coordinates, what packs or deals them)."""
    shape = SHAPES[order]
    for name, format, storage in (own for own in storages(order) if own[1] in FORMATS):
        coords = coordinates(order, nnz, clustered=format != "coo" and "fiber" not in format)
        yield name, coords, lambda c=coords, f=format, s=storage: pack(c, shape, f, s)
    windows = {"threshold": 2, "height": 16, "width": 8}
    rules: list[tuple[str, dict[str, int]]] = [("mixed_mode", {}), ("run_length", {"threshold": nnz // 900})]
    rules += [("threshold", {"threshold": 2}), ("row_similarity", windows)]
    for rule, options in (own for own in rules if own[0] in PARTITIONS):
        coords = coordinates(order, nnz, clustered=rule not in ("mixed_mode", "run_length"))
        yield f"dealt by {rule}", coords, lambda c=coords, r=rule, o=options: deal(r, c, shape, (order - 1,), o)
