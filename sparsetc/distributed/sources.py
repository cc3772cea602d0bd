"""The nonzeros before a cut, and their way to the ranks that the cut assigns them to.

In: a tensor that every rank has, of which it takes an equal part, other nonzeros on each, or a packed file of which a
rank reads some blocks; then a cut. Out: a `ShardSource`; then this rank's nonzeros. Parts of a box are equal ranges of
its nonzeros in the order in which ranks have them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsetc.distributed.cut import Cut, box_of, shares
from sparsetc.distributed.ranks import Ranks
from sparsetc.errors import DtypeError, ShapeError
from sparsetc.io import memory
from sparsetc.io.parquet import PackedFile
from sparsetc.ir.equation.parse import parse
from sparsetc.support import Ints
from sparsetc.tensor.blocks import without_blocks
from sparsetc.tensor.checksum import bits
from sparsetc.tensor.coords import mode_of
from sparsetc.tensor.sparse_tensor import SparseTensor

Nonzeros = tuple[Tensor, Tensor]
"""(sparse order, n) coordinates and (n, *dense sizes) values."""


@dataclass(frozen=True)
class ShardSource:
    """Nonzeros to be cut, of which each rank has others.

    Attributes:
        shape: sizes of the whole tensor, dense modes last.
        modes: those that may be cut.
        nonzeros: this rank's, on the device where shares will be.
        said: what must be the same on every rank.
    """

    shape: Ints
    modes: Ints
    nonzeros: Nonzeros
    said: dict[str, Any]


def source_of(x: Any, along: Any, ranks: Ranks, device: torch.device | str | None, scattered: bool) -> ShardSource:
    """A source of what a user gave.

    Raises:
        DtypeError: it is no tensor and no packed file.
        ShapeError, EquationError: `along` does not fit it.
        IOFormatError, FileNotFoundError: of a file.
        DeviceError: the group cannot send tensors on the device.
    """
    if isinstance(x, str | os.PathLike):
        with PackedFile(x) as file:
            return source_of(file, along, ranks, device, scattered)
    if isinstance(x, PackedFile):
        to = ranks.device if device is None else torch.device(device)
        ranks.check(to)
        modes = modes_to_cut(along, x.shape, x.order)
        first, last = shares((0, x.nnz), ranks.size)[ranks.rank]
        memory.check(x.path, "this rank's part", (last - first) * x.row_bytes)
        coords, values = x.block(first, last)
        said = {"shape": x.shape, "dtype": x.dtype, "device": to.type, "nnz": x.nnz, "checksum": x.crc}
        return ShardSource(x.shape, modes, (coords.to(to), values.to(to)), said)
    sparse = SparseTensor.coerce(x)
    if sparse is None:
        raise DtypeError(f"shard: x must be sparse, a PackedFile or a path, found {type(x).__name__}")
    sparse = without_blocks(sparse)
    if device is not None:
        sparse = sparse.to(torch.device(device))
    ranks.check(sparse.device)
    modes = modes_to_cut(along, sparse.shape, sparse.sparse_order)
    coords, values = sparse.coords, sparse.values.detach()
    said = {"shape": sparse.shape, "dtype": sparse.dtype, "device": sparse.device.type}
    if not scattered and ranks.size > 1:
        said |= {"nnz": sparse.nnz, "the bits of coordinates": bits(coords), "the bits of values": bits(values)}
        part = slice(*shares((0, sparse.nnz), ranks.size)[ranks.rank])
        coords, values = coords[:, part], values[part]
    return ShardSource(sparse.shape, modes, (coords, values), said)


def modes_to_cut(along: Any, shape: Ints, sparse_order: int) -> Ints:
    """Return the sparse modes that may be cut: the modes given, those kept by an equation, or all."""
    every = tuple(range(sparse_order))
    if along is None:
        return every
    if isinstance(along, str):
        return _kept(along, shape, every) or every
    modes = set()
    for mode in along if isinstance(along, tuple) else (along,):
        at = mode_of(len(shape), mode, "shard")
        if at >= sparse_order:
            raise ShapeError(f"shard: mode {mode} is dense; only modes with coordinates are cut")
        modes.add(at)
    return tuple(sorted(modes))


def _kept(equation: str, shape: Ints, modes: Ints) -> Ints:
    """The modes whose letters the result of an equation keeps, each once in the first term."""
    others = [term.replace("...", "") for term in equation.split("->")[0].split(",")[1:]]
    shapes = [shape, *((1,) * sum(c.isalpha() for c in term) for term in others)]
    einsum = parse(equation, shapes, [True] + [False] * len(others)).einsum
    letters = einsum.inputs[0]
    return tuple(m for m in modes if letters[m] in einsum.output and letters.count(letters[m]) == 1)


def owners(coords: Tensor, cut: Cut, before: Tensor | None = None) -> Tensor:
    """(n,) int64 the rank of each nonzero.

    Args:
        coords: (sparse order, n) of the whole tensor.
        cut: what they are cut by.
        before: (boxes,) int64 how many nonzeros of each box earlier ranks have.
    """
    box, parts = box_of(coords, cut.bounds), cut.grid[-1]
    if parts == 1:
        return box
    counts = torch.tensor(cut.nnz, device=coords.device).view(-1, parts).sum(1)
    order = torch.argsort(box, stable=True)
    sizes = torch.bincount(box, minlength=counts.shape[0])
    first = sizes.cumsum(0) - sizes
    number = torch.empty_like(box)
    number[order] = torch.arange(box.shape[0], device=box.device) - first[box[order]]
    if before is not None:
        number += before[box]
    # Part k has numbers from n k / parts on; what rounds to it from below is the next one's.
    return box * parts + ((number + 1) * parts - 1) // counts[box]


def exchanged(mine: Nonzeros, cut: Cut, ranks: Ranks) -> Nonzeros:
    """Exchange nonzeros by all-to-all. Return this rank's share of the cut, in the order of the sending ranks."""
    coords, values = mine
    before = None
    if cut.grid[-1] > 1:
        per_box = torch.bincount(box_of(coords, cut.bounds), minlength=cut.size // cut.grid[-1]).cpu()
        before = sum(ranks.objects(per_box)[: ranks.rank], torch.zeros_like(per_box)).to(coords.device)
    rank = owners(coords, cut, before)
    counts = ranks.objects(torch.bincount(rank, minlength=ranks.size).tolist())
    order = torch.argsort(rank, stable=True)
    routes = [row[ranks.rank] for row in counts], counts[ranks.rank]
    rows = [ranks.exchanged(row.index_select(0, order), *routes) for row in coords]
    return torch.stack(rows), ranks.exchanged(values.index_select(0, order), *routes)
