"""Modules of native loops -> calls: compiled by numba, kept on disk, and run by threads of Python.

In: generated text, then the tensors of storages. Out: `Call`. A function is compiled when it first runs on arguments of
some types, and kept beside the sources (`support.files`).

The functions hold no lock of Python, so that threads of Python share a part: its items are cut into ranges that hold
about as many nonzeros each. numba's own threads are not used: its OpenMP layer changes how many threads torch has for
good and ends forked children, and its other layer ends a process in which three threads call at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache, partial
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsetc.codegen.launch import Call, PartArrays, Values
from sparsetc.ir.program.tile import TileProgram
from sparsetc.support import at_fork
from sparsetc.support.files import Kept

RANGES = 4
"""Ranges of items for each thread, if items own the rows they write; a thread that is free takes the next."""


@lru_cache
def _called() -> str:
    """Return the source of the functions that are compiled into native loops."""
    return (Path(__file__).parents[1] / "runtime" / "vectors.py").read_text(encoding="utf-8")


def functions(module: ModuleType, names: Sequence[str], source: str, folder: Path | None) -> list[Any]:
    """Return functions of a module, which are compiled when they first run, or found in the folder."""
    each = [getattr(module, name) for name in names]
    for function in each:
        function._cache = Kept(function.__name__, source + _called(), folder)
    return each


# -- threads -----------------------------------------------------------------------------------------------------------


@lru_cache
def _pool() -> ThreadPoolExecutor:
    """Return Python's threads for native functions. A forked child has its own."""
    return ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="sparsetc")


at_fork(after_in_child=_pool.cache_clear)


def in_threads(threads: int, jobs: Sequence[Callable[[], None]]) -> None:
    """Run jobs on this many threads; the calling thread is one of them."""
    left = iter(jobs)

    def some() -> None:
        for job in left:
            job()

    others = [_pool().submit(some) for _ in range(min(threads, len(jobs)) - 1)]
    some()
    for other in others:
        other.result()


def bind(
    functions: Sequence[Any],
    programs: Sequence[TileProgram],
    arrays: Sequence[PartArrays],
    known: Sequence[PartArrays],
    most: int,
) -> Call:
    """Bind native programs to these tensors, run by at most `most` threads; arguments as for `Programs.bind`."""
    parts = [_bound(*part) for part in zip(functions, programs, arrays, known, strict=True)]

    def call(values: Values, dense: Sequence[Tensor], out: Tensor) -> None:
        threads = min(most, torch.get_num_threads())
        tables, flat = [_flat(table) for table in dense], _flat(out)
        for run, stored in zip(parts, values, strict=True):
            run(None if stored is None else _flat(stored), tables, flat, threads)

    return call


def _flat(tensor: Any) -> np.ndarray[Any, Any]:
    array = tensor if isinstance(tensor, np.ndarray) else tensor.numpy(force=True)
    return array.reshape(-1)


def _bound(function: Any, program: TileProgram, part: PartArrays, known: PartArrays) -> Callable[..., None]:
    """Return what adds a part to a result, or stores its rows there, given values, tables, the result and threads."""
    named = part.named(program)
    view, owned = program.view, program.result.owned
    arrays = [_flat(named[name]) if name in named else None for name in program.arrays]
    place = program.arrays.index("values") if "values" in program.arrays else None
    items = known.stored if view.items.counts else known.items

    @cache
    def cut(ranges: int) -> list[tuple[int, int]]:
        """Return ranges of items, or of nonzeros."""
        if items < 2:
            return [(0, items)]
        if view.items.size:
            return list(pairwise(sorted({items * n // ranges for n in range(ranges + 1)})))
        held = known.named(program)
        first = held[program.arrays[0]].long()
        for axis in view.loops[:-1]:
            first = held[f"{axis.name}_ptr"].long()[first]
        return list(pairwise(ends(first, ranges)))

    def run(values: Any, tables: Sequence[Any], out: Any, threads: int) -> None:
        fixed = [*arrays]
        if place is not None:
            fixed[place] = values
        if not owned and threads * out.size > known.stored * program.width:
            threads = 1  # copies of the result would take longer than what is added to it
        arguments = (*fixed, *tables)
        if threads == 1:
            function(0, items, *arguments, out)
            return
        several = owned and not program.split  # each range copies panels of its own
        ranges = cut(threads * RANGES if several else threads)
        into = [out] * len(ranges) if owned else np.zeros((len(ranges), out.size), out.dtype)
        in_threads(threads, [partial(function, *each, *arguments, to) for each, to in zip(ranges, into, strict=True)])
        if not owned:
            for one in into:  # in order, so that the same bits come back at every run
                out += one

    return run


def ends(first: Tensor, ranges: int) -> list[int]:
    """Return where ranges of items begin that have about as many nonzeros each, and where the last one ends.

    Args:
        first: (items + 1,) int64, the first nonzero of each item, and where those of the last end.
        ranges: how many are asked for.
    """
    last, wanted = len(first) - 1, first[0] + (first[-1] - first[0]) * torch.arange(1, ranges) // ranges
    return sorted({0, last, *torch.searchsorted(first, wanted).clamp(0, last).tolist()})
