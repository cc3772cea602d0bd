"""Modules of native loops -> calls: compiled by numba, kept on disk, and run by threads of Python.

In: generated text, then the tensors of storages. Out: `Call`. A function is compiled when it first runs on arguments of
some types, and kept beside the sources (`support.compiled`).

The functions hold no lock of Python, so that threads of Python share a part: its items are cut into ranges that hold
about as many nonzeros each. numba's own threads are not used: its OpenMP layer changes how many threads torch has for
good and ends forked children, and its other layer ends a process in which three threads call at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
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
from sparsetc.support.compiled import Kept

RANGES = 4
"""Ranges of items for each thread, if items own the rows they write; a thread that is free takes the next."""


@lru_cache
def _called() -> str:
    """Return the source of the functions that are compiled into native loops."""
    folder = Path(__file__).parents[1] / "runtime"
    return "".join((folder / name).read_text(encoding="utf-8") for name in ("vectors.py", "scalars.py"))


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
    parts = [
        _Part(function, program, part, now)
        for function, program, part, now in zip(functions, programs, arrays, known, strict=True)
    ]

    def call(values: Values, dense: Sequence[Tensor], out: Tensor) -> None:
        threads = min(most, torch.get_num_threads())
        tables, flat = [_flat(table) for table in dense], _flat(out)
        for part, stored in zip(parts, values, strict=True):
            part.run(None if stored is None else _flat(stored), tables, flat, threads)

    return call


def _flat(tensor: Any) -> np.ndarray[Any, Any]:
    array = tensor if isinstance(tensor, np.ndarray) else tensor.numpy(force=True)
    return array.reshape(-1)


class _Part:
    """A part's function, its arrays, and how its items are shared out."""

    def __init__(self, function: Any, program: TileProgram, part: PartArrays, known: PartArrays) -> None:
        self.function = function
        self.program = program
        self.known = known
        named = part.named(program)
        self.fixed = [_flat(named[name]) if name in named else None for name in program.arrays]
        self.place = program.arrays.index("values") if "values" in program.arrays else None
        self.owned = program.result.owned
        self.last = known.stored if program.view.items.counts else known.items
        self.cuts: dict[int, list[int]] = {}

    def run(self, values: Any, tables: Sequence[Any], out: Any, threads: int) -> None:
        """Add the part to a result, or store its rows there."""
        fixed = [*self.fixed]
        if self.place is not None:
            fixed[self.place] = values
        if not self.owned and threads * out.size > self.known.stored * self.program.width:
            threads = 1  # copies of the result would take longer than what is added to it
        arguments = (*fixed, *tables)
        if threads == 1:
            self.function(0, self.last, *arguments, out)
            return
        several = self.owned and not self.program.split  # each range copies panels of its own
        ranges = list(pairwise(self.ends(threads * RANGES if several else threads)))
        into = [out] * len(ranges) if self.owned else np.zeros((len(ranges), out.size), out.dtype)

        def job(number: int) -> Callable[[], None]:
            return lambda: self.function(*ranges[number], *arguments, into[number])

        in_threads(threads, [job(n) for n in range(len(ranges))])
        if not self.owned:
            for one in into:  # in order, so that the same bits come back at every run
                out += one

    def ends(self, ranges: int) -> list[int]:
        """Return where ranges of items, or of nonzeros, begin, and where the last ends."""
        if ranges not in self.cuts:
            self.cuts[ranges] = self._cut(ranges)
        return self.cuts[ranges]

    def _cut(self, ranges: int) -> list[int]:
        view, items = self.program.view, self.last
        if items < 2:
            return [0, items]
        if view.items.size:
            return sorted({items * n // ranges for n in range(ranges + 1)})
        named = self.known.named(self.program)
        first = named[self.program.arrays[0]].long()
        for axis in view.loops[:-1]:
            first = named[f"{axis.name}_ptr"].long()[first]
        return ends(first, ranges)


def ends(first: Tensor, ranges: int) -> list[int]:
    """Return where ranges of items begin that have about as many nonzeros each, and where the last one ends.

    Args:
        first: (items + 1,) int64, the first nonzero of each item, and where those of the last end.
        ranges: how many are asked for.
    """
    last, wanted = len(first) - 1, first[0] + (first[-1] - first[0]) * torch.arange(1, ranges) // ranges
    return sorted({0, last, *torch.searchsorted(first, wanted).clamp(0, last).tolist()})
