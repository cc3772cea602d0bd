"""Nonzeros -> chunks: taken from a source, cut so that none is larger than allowed, packed, and handed to a store.

In: a SparseTensor, an open packed file or a user's own source; a compiler, and the sizes that a chunk may have. Out:
`StreamCut`: the chunks, the programs that they share, and where the rows of the result are that they number. Only one
chunk is held unpacked at a time.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, islice, pairwise
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from sparsetc.codegen.parts import PartArrays
from sparsetc.errors import EquationError, IOFormatError, PlanError, TransformError
from sparsetc.io.parquet import PackedFile
from sparsetc.streaming.compiler import Compiler, Nonzeros, Variant
from sparsetc.streaming.store import Put, host_bytes
from sparsetc.support import NamedInts, cached_property
from sparsetc.support.entry import At
from sparsetc.tensor import coords as crd
from sparsetc.tensor.dtypes import resolved
from sparsetc.tensor.sparse_tensor import SparseTensor


@runtime_checkable
class Source(Protocol):
    """Nonzeros that can be taken by number. It may have ``ends``: numbers, rising, that no chunk reaches across."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of all modes."""

    @property
    def nnz(self) -> int:
        """The number of nonzeros."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of the values."""

    def take(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """(order, n) int64 coordinates of nonzeros ``start`` to ``stop``, in lexicographic order, and (n,) values."""


Operand: TypeAlias = SparseTensor | PackedFile | Source
"""A streamed operand: a coalesced tensor without dense modes, or what is read in parts."""
Take = Callable[[int, int], Nonzeros]
"""Returns nonzeros of an operand by number, as `Source.take` does."""

UNPACKED = (".tns", ".mtx", ".gz", ".npz")
"""Suffixes of files that can be packed, and not streamed."""


def operand(x: Any) -> Operand:
    """Return the operand to stream; a path is opened, and is the caller's to close.

    Raises:
        EquationError: it is neither sparse nor a packed file.
        TransformError: its values require a gradient.
        IOFormatError, FileNotFoundError: a path without a packed file.
    """
    if isinstance(x, str | os.PathLike):
        if str(x).lower().endswith(UNPACKED):
            raise IOFormatError(
                f"{x}: a stream takes a packed file, which stc.pack({str(x)!r}, 'x.parquet') makes of it"
            )
        return PackedFile(Path(x))
    if isinstance(x, PackedFile):
        return x
    if not isinstance(x, SparseTensor) and isinstance(x, Source) and hasattr(x, "take"):
        return x
    sparse = None if isinstance(x, Tensor) and x.layout == torch.strided else SparseTensor.coerce(x)
    if sparse is None:
        raise EquationError(
            f"what is streamed is a SparseTensor, a packed file (.parquet) or the path of one, found {type(x).__name__}"
        )
    if torch.is_grad_enabled() and sparse.values.requires_grad:
        raise TransformError(
            "what is streamed has values that require a gradient, which a stream does not give: detach() them, or take "
            "stc.einsum"
        )
    return sparse.expand_dense().coalesce()


def taken_by(x: Operand, kept: Sequence[int] | None) -> tuple[Operand, Take]:
    """Return an operand, and what takes its nonzeros sorted by the modes `kept` if these are given.

    A file whose nonzeros are in another order is read whole.

    Raises:
        EquationError: a source of the caller's is in no such order.
    """
    ordered = kept is None or list(kept) == list(range(len(kept)))
    if isinstance(x, PackedFile) and not ordered:
        x = x.tensor()
    if not isinstance(x, SparseTensor):
        if ordered:
            return x, x.take
        raise EquationError(
            "the result's rows come in order only where it keeps the first modes of what is streamed, which is given "
            "in lexicographic order; give a SparseTensor, or memory for the whole result"
        )
    coords, values = x.coords, resolved(x.values.detach())
    order = None if kept is None or ordered else crd.lexsort(*crd.of_modes(coords, x.shape, kept))

    def take(start: int, stop: int) -> Nonzeros:
        if order is None:
            return coords[:, start:stop].contiguous(), values[start:stop]
        entries = order[start:stop].sort().values
        return coords.index_select(1, entries), values.index_select(0, entries)

    return x.with_values(values), take


FULL = 0.97
"""The share of a chunk to fill, by the bytes per nonzero of the last one; a chunk too large is cut again."""
SAMPLES = 16
"""Ranges to look at, about, for a plan that does not apply to the first chunk."""
ALIGNED = 256
"""Arrays begin at multiples of this many bytes, as those that CUDA allocates do: kernels are specialised to 16."""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "C64": torch.complex64,
    "C128": torch.complex128,
}
"""Dtypes of arrays by the names that files have for them."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class StoredPart:
    """The arrays of a part of a chunk.

    Attributes:
        items: work items that they make.
        arrays: name of the dtype and number of elements of each of `PartArrays.index`, then of the values.
    """

    items: int
    arrays: NamedInts


@dataclass(frozen=True)
class Chunk:
    """Some of the nonzeros of a tensor, packed into one buffer.

    Attributes:
        first: the first row of the result that it adds to, where its rows are numbered from there; else 0.
        rows: how many rows it numbers; 0 where rows are known by coordinates.
        variant: which of the stream's programs it takes.
    """

    nnz: int
    first: int
    rows: int
    variant: int
    parts: tuple[StoredPart, ...]

    @cached_property
    def arrays(self) -> NamedInts:
        """The arrays of all parts."""
        return tuple([array for part in self.parts for array in part.arrays])

    @cached_property
    def offsets(self) -> list[tuple[int, int, int]]:
        """Return (begin, end, begin of the next) of each array in the buffer."""
        sizes = [DTYPES[name].itemsize * count for name, count in self.arrays]
        begins = pairwise(accumulate((-(-size // ALIGNED) * ALIGNED for size in sizes), initial=0))
        return [(begin, begin + size, after) for (begin, after), size in zip(begins, sizes, strict=True)]

    @property
    def nbytes(self) -> int:
        """Bytes of its buffer."""
        return self.offsets[-1][2]

    def tensors(self, buffer: Tensor) -> list[Tensor]:
        """Return all arrays as views of (`nbytes` or more,) uint8."""
        views = zip(self.arrays, self.offsets, strict=True)
        return [buffer[begin:end].view(DTYPES[name]) for (name, _), (begin, end, _) in views]

    def views(self, buffer: Tensor) -> tuple[list[PartArrays], list[Tensor]]:
        """Return the arrays and the values of all parts, as programs are bound to them."""
        tensors = iter(self.tensors(buffer))
        arrays = []
        values = []
        for part in self.parts:
            *index, stored = islice(tensors, len(part.arrays))
            arrays.append(PartArrays(tuple(index), part.items, stored.numel()))
            values.append(stored)
        return arrays, values


@dataclass(frozen=True)
class StreamCut:
    """A tensor in chunks.

    Attributes:
        coords: (kept modes, rows) coordinates of the rows of the result that chunks number; no rows where these are
            known by coordinates.
    """

    chunks: tuple[Chunk, ...]
    variants: tuple[Variant, ...]
    coords: Tensor

    @property
    def largest(self) -> int:
        """Bytes of the largest chunk."""
        return max((c.nbytes for c in self.chunks), default=0)

    @property
    def copies(self) -> int:
        """Number of copies of the result to which programs add."""
        return max((program.result.copies for v in self.variants for program in v.programs), default=1)

    @property
    def window(self) -> int:
        """Most rows that a chunk numbers."""
        return max((c.rows for c in self.chunks), default=0)


def cut(
    source: Operand,
    take: Take,
    compiler: Compiler,
    most: tuple[int, int | None],
    where: torch.device,
    at: At,
    put: Put,
    pinned: bool = False,
) -> StreamCut:
    """Cut, pack and store all nonzeros.

    Args:
        source: of the nonzeros.
        take: takes them, in the order of the result's rows where chunks number these.
        compiler: which packs.
        most: bytes of a chunk, and rows of the result that it may number, None for any.
        where: the device on which chunks are packed.
        at: told how many nonzeros are packed.
        put: takes the buffers of chunks, in order.
        pinned: whether these are in pinned memory.

    Raises:
        PlanError: the plan does not apply, or a single nonzero takes more than a chunk may.
        FormatError: a format does not take a chunk.
    """
    (nbytes, rows), chunks = most, list[Chunk]()
    variants: dict[Variant, int] = {}
    coords = [torch.empty((len(compiler.template.output.kept_shape), 0), dtype=torch.long, device="cpu")]
    count = nbytes * FULL / (4 * len(source.shape) + source.dtype.itemsize)
    compiler.choose((c.to(where), v.to(where)) for c, v in _samples(source, take, max(1, int(count))))
    start = end = 0  # of the nonzeros that follow, and of the rows so far
    while start < source.nnz:
        stop = _stop(source, start, int(count))
        packed = compiler.pack(*(t.to(where) for t in take(start, stop)))
        if packed is not None:
            programs, parts, coords_of_rows = packed
            numbered = 0 if coords_of_rows is None else coords_of_rows.shape[1]
            tensors = [(*arrays.index, values) for arrays, values in parts]
            kinds = [tuple([(NAMES[t.dtype], t.numel()) for t in part]) for part in tensors]
            stored = [StoredPart(arrays.items, kind) for (arrays, _), kind in zip(parts, kinds, strict=True)]
            chunk = Chunk(stop - start, 0, numbered, 0, tuple(stored))
            share = max(chunk.nbytes / nbytes, numbered / rows if rows else 0.0)
            count = (stop - start) / share * FULL
            if share > 1 and stop - start == 1:
                raise PlanError(
                    f"a chunk of one nonzero takes {chunk.nbytes:,} bytes by this plan, more than the {nbytes:,} that "
                    'a chunk may have: raise chunk_bytes= or memory_limit=, or take plan="coo"'
                )
            if share > 1:
                count = min(count, stop - start - 1)
                continue
            buffer = host_bytes(chunk.nbytes, pinned)
            for view, array in zip(chunk.tensors(buffer), chain(*tensors), strict=True):
                view.copy_(array)
            put(buffer)
            first = 0
            if coords_of_rows is not None:  # whose first row may be the last of the chunk before
                coords_of_rows = coords_of_rows.to("cpu")
                shared = int(end > 0 and bool((coords[-1][:, -1] == coords_of_rows[:, 0]).all()))
                coords += [coords_of_rows[:, shared:]] if numbered > shared else []
                first, end = end - shared, end - shared + numbered
            chunks.append(replace(chunk, first=first, variant=variants.setdefault(programs, len(variants))))
        start = stop
        at(start)
    return StreamCut(tuple(chunks), tuple(variants), torch.cat(coords, 1))


def _samples(source: Operand, take: Take, count: int) -> Iterator[Nonzeros]:
    """Yield nonzeros to choose a plan by: a first chunk, then all if in memory, else about `SAMPLES` ranges."""
    yield take(0, _stop(source, 0, count))
    if isinstance(source, SparseTensor):
        yield source.coords, source.values
        return
    step = max(count, source.nnz // SAMPLES)
    for start in range(step, source.nnz, step):
        yield take(start, _stop(source, start, count))


def _stop(source: Operand, start: int, count: int) -> int:
    """Return the end of a chunk of `count` nonzeros, or of fewer up to the source's next end."""
    ends = getattr(source, "ends", None) or ()
    following = ends[bisect_right(ends, start) :][:1]
    return min(start + max(1, count), source.nnz, *following)
