"""Nonzeros -> chunks: cut by nonzeros so that none is larger than allowed, packed, and handed to a store.

In: a source, a compiler, a budget. Out: `StreamCut`: the chunks, the programs that they share, and where the rows of
the result are that they number. Only one chunk is held unpacked at a time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from sparsetc.errors import PlanError
from sparsetc.streaming.budget import StreamBudget
from sparsetc.streaming.compiler import Compiler, Variant
from sparsetc.streaming.file import ChunkWriter
from sparsetc.streaming.sources import Source
from sparsetc.streaming.store import Chunk, ChunkMemory, fill, placed
from sparsetc.support.notices import At
from sparsetc.tensor.sparse_tensor import SparseTensor

FULL = 0.97
"""How full a chunk is meant to be, by the bytes per nonzero of the last one; a chunk too large is cut again."""

SAMPLES = 16
"""Ranges, about, that are looked at for a plan that does not apply to the first chunk."""


@dataclass(frozen=True)
class StreamCut:
    """A tensor in chunks.

    Attributes:
        rows: rows of the result that are numbered; 0 where rows are known by coordinates.
        coords: (kept modes, rows) their coordinates.
    """

    chunks: tuple[Chunk, ...]
    variants: tuple[Variant, ...]
    rows: int
    coords: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes of all chunks."""
        return sum(c.nbytes for c in self.chunks)

    @property
    def largest(self) -> int:
        """Bytes of the largest chunk."""
        return max((c.nbytes for c in self.chunks), default=0)

    @property
    def copies(self) -> int:
        """Number of copies of the result to which programs add."""
        return max((v.copies for v in self.variants), default=1)

    @property
    def window(self) -> int:
        """Most rows that a chunk numbers."""
        return max((c.rows for c in self.chunks), default=0)


def cut(
    source: Source,
    compiler: Compiler,
    budget: StreamBudget,
    sink: ChunkMemory | ChunkWriter,
    where: torch.device,
    at: At,
) -> StreamCut:
    """Cut, pack and store all nonzeros.

    Args:
        source: of the nonzeros, in the order of the result's rows where chunks number these.
        compiler: which packs.
        budget: of a chunk.
        sink: takes the bytes of chunks, in order.
        where: the device on which chunks are packed.
        at: told how many nonzeros are packed.

    Raises:
        PlanError: the plan does not apply, or a single nonzero takes more than a chunk may.
        FormatError: a format does not take a chunk.
    """
    chunks: list[Chunk] = []
    variants: dict[Variant, int] = {}
    coords: list[torch.Tensor] = []  # of the rows of all chunks
    ends = getattr(source, "ends", None)
    count = budget.chunk * FULL / (4 * len(source.shape) + source.dtype.itemsize)
    compiler.samples = partial(samples, source, max(1, int(count)))
    start = 0
    while start < source.nnz:
        stop = min(start + max(1, int(count)), source.nnz, _next(ends, start))
        packed = compiler.pack(*(t.to(where) for t in source.take(start, stop)))
        if packed is not None:
            programs, packed_parts, rows = packed
            parts, nbytes = placed(packed_parts)
            numbered = 0 if rows is None else rows.shape[1]
            share = max(nbytes / budget.chunk, numbered / budget.rows if budget.rows else 0.0)
            count = (stop - start) / share * FULL
            if share > 1:
                count = _fewer(stop - start, count, nbytes, budget)
                continue
            buffer = sink.buffer(nbytes)
            fill(buffer, parts, packed_parts)
            sink.put(buffer)
            variant = variants.setdefault(programs, len(variants))
            first = 0 if rows is None else _end(chunks) - _keep(rows.to("cpu"), coords)
            chunks.append(Chunk(stop - start, nbytes, first, numbered, variant, parts))
        start = stop
        at(start)
    compiler.samples = tuple  # the nonzeros are no longer needed
    return StreamCut(tuple(chunks), tuple(variants), _end(chunks), torch.cat(coords, 1) if coords else None)


def _end(chunks: Sequence[Chunk]) -> int:
    """Return the number of rows of the result so far."""
    return chunks[-1].first + chunks[-1].rows if chunks else 0


def _keep(rows: torch.Tensor, coords: list[torch.Tensor]) -> bool:
    """Keep the coordinates of rows that are new; return whether the first of them is the last of the chunk before."""
    shared = bool(coords) and bool((coords[-1][:, -1] == rows[:, 0]).all())
    if rows.shape[1] > shared:
        coords.append(rows[:, int(shared) :].contiguous())
    return shared


def samples(source: Source, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield nonzeros to choose a plan by: all if they are in memory, else about `SAMPLES` ranges of `count`."""
    whole = getattr(source, "x", None)
    if isinstance(whole, SparseTensor):
        yield whole.coords, whole.values
        return
    ends = getattr(source, "ends", None)
    for start in range(0, source.nnz, max(count, source.nnz // SAMPLES)):
        yield source.take(start, min(start + count, source.nnz, _next(ends, start)))


def _next(ends: Sequence[int] | None, start: int) -> int:
    """Return the next number that no chunk may reach across; a large one if there is none."""
    if ends is None or (found := bisect_right(ends, start)) == len(ends):
        return 1 << 62
    return ends[found]


def _fewer(nnz: int, wanted: float, nbytes: int, budget: StreamBudget) -> float:
    """How many nonzeros to take where so many took more than a chunk may."""
    if nnz == 1:
        raise PlanError(
            f"a chunk of one nonzero takes {nbytes:,} bytes by this plan, more than the {budget.chunk:,} that a chunk "
            'may have: raise chunk_bytes= or memory_limit=, or take plan="coo"'
        )
    return min(nnz - 1, wanted)
