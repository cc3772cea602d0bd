"""Parts of a program and their tensors: what a call is given, and how a CPU takes the work items of a part.

In: a tile program, and the tensors that it reads. Out: `PartArrays`, which every backend's programs are bound to; for
torch, ranges of chunks of items that are small enough that what is made of one stays in the cache; of native loops,
`Call`.

numba compiles a function when it first runs on arguments of some types, and keeps it beside the sources
(`support.files`). Functions hold no lock of Python, so that threads of Python share a part: its items are cut into
ranges that hold about as many nonzeros each. numba's own threads are not used: its OpenMP layer changes how many
threads torch has for good and ends forked children, and its other layer ends a process in which three threads call at
once.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import pairwise
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsetc.codegen.torch import in_place
from sparsetc.ir.nest import ITEM, LANE, LEAF
from sparsetc.ir.program import Gather, Product, TileProgram
from sparsetc.packing.base import Packed
from sparsetc.support import at_fork
from sparsetc.support.files import Kept

InHalves = tuple[Tensor, Tensor, Tensor]
"""(stored,) high halves and low halves, and (scales,) float32 the largest magnitudes, which scales follow from."""
Values = Sequence[Tensor | InHalves | None]
"""Packed values, one a part; None of a pattern, which stores none."""
Call = Callable[[Values, Sequence[Tensor], Tensor], None]
"""Programs bound to the arrays of storages: a function of values, tables and output."""


def each(values: Values) -> Sequence[Tensor | None]:
    """The tensors of packed values, as a launch takes them."""
    return [one for packed in values for one in (packed if isinstance(packed, tuple) else (packed,))]


@dataclass(frozen=True)
class PartArrays:
    """The index tensors that a part's program reads, and the number of its work items.

    Attributes:
        index: the arrays that ``program.arrays`` names, in its order, without the values.
    """

    index: tuple[Tensor, ...]
    items: int
    stored: int

    @classmethod
    def of(cls, program: TileProgram, packed: Packed, rows: Tensor | None = None) -> PartArrays:
        """The tensors of a storage, and the result rows of what the program adds, where it reads them."""
        index = [packed.arrays[name] for name in program.view.arrays if name not in program.view.packed]
        return cls((*index, rows) if rows is not None else tuple(index), packed.items, packed.stored)

    def programs(self, program: TileProgram) -> int:
        """Grid programs that the part takes."""
        return self.items * prod(axis.programs for axis in program.split)

    def named(self, program: TileProgram) -> dict[str, Tensor]:
        """The tensors by the names that the program has for them."""
        index = (name for name in program.arrays if name not in program.view.packed)
        return dict(zip(index, self.index, strict=True))


# -- chunks of torch ---------------------------------------------------------------------------------------------------

CHUNK = 3 << 19
"""Elements of intermediate results a chunk may make: 16,000 fibers of rank 32 with two factors, each result 2 MB (2
cores: fibers of 4,000 a chunk lost 1.6x to the calls' own time, 64,000 up to 1.25x to memory)."""

FEW = 1 << 19
"""Most elements of all intermediate results for one thread: 0.07 to 0.2 ms. A second core saves a tenth if it is free,
and adds 8 to 80 ms if it is not (SpMM and MTTKRP, 2 busy cores)."""
FEW_NATIVE = 1 << 23
"""Most of native loops: SpMM at 8 columns took 127 us by one thread, 169 by two; at 128, 489 and 328 (2 cores)."""

Range = tuple[int, int, int, int, int, int]


def chunks(program: TileProgram, arrays: PartArrays, most: int = CHUNK) -> list[Range]:
    """Cut a part into ranges of whole items, or of nonzeros of its only item, that make about `most` elements each."""
    view, per = program.view, elements(program)
    items = arrays.items
    stored = arrays.stored
    chunk = program.view.items.size
    if items == 0:
        return []
    if chunk and view.levels[0]:  # items of one size: as many whole ones as fit
        size = max(1, most // (per[LEAF] * chunk))
        bounds = pairwise([*range(0, items, size), items])
        return [(i0, i1, 0, 0, i0 * chunk, min(i1 * chunk, stored)) for i0, i1 in bounds]
    if chunk:
        size = max(1, most // max(per))
        return [(n, n + 1, 0, 0, at, min(at + size, stored)) for n, at in enumerate(range(0, stored, size))]
    # where the fibers, tiles or pairs of each item begin, 0s where it has none, and where its stored nonzeros do
    named = arrays.named(program)
    pointers = named[program.arrays[0]]

    def begin(at: Tensor) -> tuple[Tensor, Tensor]:
        """Return where the fibers and the nonzeros of items begin."""
        first = begins = pointers[at].long()
        for axis in view.loops[:-1]:
            first = named[f"{axis.name}_ptr"][first].long()
        if all(axis.level != LANE for axis in view.loops):
            begins = torch.zeros_like(begins)
        return begins, view.values.begins(named, first)

    def weight(begins: Any, first: Any) -> Any:
        return first * per[LEAF] + begins * per[LANE]

    at = torch.tensor([0, items], device=pointers.device)
    known = [*zip(*[each.tolist() for each in (at, *begin(at))], strict=True)]
    least, greatest = (weight(begins, first) for _, begins, first in known)
    if greatest - least > most:
        every = weight(*begin(torch.arange(items + 1, device=pointers.device)))
        limits = torch.arange(least + most, greatest, most, device=pointers.device)
        at = torch.unique(torch.cat([at, torch.searchsorted(every, limits).clamp(1, items)]))
        known = [*zip(*[each.tolist() for each in (at, *begin(at))], strict=True)]
    return [(i0, i1, b0, b1, n0, n1) for (i0, b0, n0), (i1, b1, n1) in pairwise(known)]


def few(program: TileProgram, arrays: PartArrays, native: bool) -> bool:
    """True if a program makes so few elements that other threads would cost more than they save."""
    read = sum(g.operand.width for *rows, _ in in_place(program)[1].values() for g in rows)
    return arrays.stored * (sum(elements(program)) + read) <= (FEW_NATIVE if native else FEW)


@lru_cache
def elements(p: TileProgram) -> tuple[int, int, int]:
    """Elements that are made for a row of each level."""
    by_level = Counter({ITEM: 1, LANE: 1, LEAF: 1})
    bagged, dotted, skipped = in_place(p)
    for s, _ in p.statements:
        if isinstance(s, Product):
            deepest = s.out if s in bagged else max(s.inputs, key=lambda tile: p.view.rows[tile.level])
            by_level[p.view.rows[deepest.level]] += p.elements(dotted[s][2] if s in dotted else s.out.within)
        elif isinstance(s, Gather) and s not in skipped:
            by_level[p.view.rows[s.out.level]] += p.elements(s.out.within)
    return by_level[ITEM], by_level[LANE], by_level[LEAF]


# -- native loops -----------------------------------------------------------------------------------------------------

RANGES = 4
"""Ranges of items for each thread, if items own the rows they write; a thread that is free takes the next."""


@lru_cache
def _native_source() -> str:
    """Return the source of the functions that are compiled into native loops."""
    return (Path(__file__).parents[1] / "runtime" / "vectors.py").read_text(encoding="utf-8")


def functions(module: ModuleType, names: Sequence[str], source: str, folder: Path | None) -> list[Any]:
    """Return functions of a module, which are compiled when they first run, or found in the folder."""
    each = [getattr(module, name) for name in names]
    for function in each:
        function._cache = Kept(function.__name__, source + _native_source(), folder)
    return each


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


def bind_native(
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
