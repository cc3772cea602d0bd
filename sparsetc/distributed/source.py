"""Where the nonzeros that are to be cut come from: a tensor, or this rank's range of blocks of a packed file.

In: what the user gave. Out: a `ShardSource`, checked but not read, and the modes that may be cut.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sparsetc.distributed.agree import bits
from sparsetc.distributed.deal import Nonzeros
from sparsetc.distributed.ranks import Ranks
from sparsetc.errors import DtypeError, ShapeError
from sparsetc.io import memory
from sparsetc.io.parquet import PackedFile
from sparsetc.ir.equation.parse import parse
from sparsetc.tensor.sparse_tensor import SparseTensor


@dataclass(frozen=True)
class ShardSource:
    """Nonzeros to be cut, not read yet.

    Attributes:
        shape: sizes of the whole tensor, dense modes last.
        scattered: whether each rank has others.
        read: this rank's own if they are scattered, else all; on the device where shares will be.
        said: what must be the same on every rank.
    """

    shape: tuple[int, ...]
    sparse_order: int
    scattered: bool
    read: Callable[[], Nonzeros]
    said: dict[str, Any]


def source_of(x: Any, ranks: Ranks, device: torch.device | str | None, scattered: bool) -> ShardSource:
    """A source of what a user gave.

    Raises:
        DtypeError: it is no tensor and no packed file.
        IOFormatError, FileNotFoundError: of a file.
        DeviceError: the group cannot send tensors on the device.
    """
    if isinstance(x, str | os.PathLike):
        with PackedFile(x) as file:
            return _of_file(file, Path(x), ranks, device)
    if isinstance(x, PackedFile):
        return _of_file(x, None, ranks, device)
    sparse = SparseTensor.coerce(x)
    if sparse is None:
        raise DtypeError(f"shard: x must be sparse, a PackedFile or a path, found {type(x).__name__}")
    sparse = (sparse.expand_dense() if sparse.blocksize else sparse).coalesce()
    if device is not None:
        sparse = sparse.to(torch.device(device))
    ranks.check(sparse.device)
    found, own = sparse, (sparse.coords, sparse.values.detach())
    said: dict[str, Any] = {"shape": found.shape, "dtype": found.dtype, "device": found.device.type}
    if not scattered:
        said["nnz"] = found.nnz
        if ranks.size > 1:
            said |= {"the bits of coordinates": bits(found.coords), "the bits of values": bits(own[1])}
    return ShardSource(found.shape, found.sparse_order, scattered, lambda: own, said)


def _of_file(file: PackedFile, path: Path | None, ranks: Ranks, device: torch.device | str | None) -> ShardSource:
    to = ranks.device if device is None else torch.device(device)
    ranks.check(to)

    def own(opened: PackedFile) -> Nonzeros:
        first, last = (opened.nnz * rank // ranks.size for rank in (ranks.rank, ranks.rank + 1))
        memory.check(opened.path, "this rank's part", (last - first) * opened.row_bytes)
        coords, values = opened.block(first, last)
        return coords.to(to), values.to(to)

    def read() -> Nonzeros:
        if path is None:
            return own(file)
        with PackedFile(path) as opened:
            return own(opened)

    said = {"shape": file.shape, "dtype": file.dtype, "device": to.type, "nnz": file.nnz, "checksum": file.crc}
    return ShardSource(file.shape, file.order, True, read, said)


def modes_to_cut(along: Any, source: ShardSource) -> tuple[int, ...]:
    """The modes that may be cut: those given, those that an equation keeps, or all; of dense modes none."""
    order, every = len(source.shape), range(source.sparse_order)
    if along is None:
        return tuple(every)
    if isinstance(along, str):
        return _kept(along, source) or tuple(every)
    found = set()
    for mode in along if isinstance(along, tuple) else (along,):
        if isinstance(mode, bool) or not isinstance(mode, int) or not -order <= mode < order:
            raise ShapeError(f"shard: along has {mode!r:.80}, expected modes {-order}..{order - 1}, or an equation")
        if mode % order >= source.sparse_order:
            raise ShapeError(f"shard: mode {mode} is dense; only modes with coordinates are cut")
        found.add(mode % order)
    return tuple(sorted(found))


def _kept(equation: str, source: ShardSource) -> tuple[int, ...]:
    """The modes whose letters the result of an equation keeps, each once in the first term."""
    others = [piece.replace("...", "") for piece in equation.split("->")[0].split(",")[1:]]
    shapes = [source.shape, *((1,) * sum(c.isalpha() for c in piece) for piece in others)]
    einsum = parse(equation, shapes, [True] + [False] * len(others)).einsum
    own = einsum.inputs[0]
    return tuple(m for m in range(source.sparse_order) if own[m] in einsum.output and own.count(own[m]) == 1)
