"""`Sharded`, a sparse tensor divided among ranks, and `shard`, the function that makes one.

In: a tensor that every rank has, of which it takes an equal part, other nonzeros on each, or a packed file of which
each rank reads its part. Out: each rank's share as a SparseTensor of its own, whose coordinates count from where the
rank's box begins. Parts of a box are equal ranges of its nonzeros in the order in which ranks have them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from sparsetc.distributed.cut import Box, Cut, box_of, chosen, shares
from sparsetc.distributed.ranks import Ranks, agreed
from sparsetc.errors import DtypeError, ShapeError
from sparsetc.io.memory import check
from sparsetc.io.parquet import PackedFile
from sparsetc.ir.equation.parse import parse
from sparsetc.support import Cache, Ints, later
from sparsetc.support.checks import check_memory
from sparsetc.support.entry import entry_point
from sparsetc.tensor.blocks import without_blocks
from sparsetc.tensor.checksum import bits
from sparsetc.tensor.coords import mode_of
from sparsetc.tensor.sparse_tensor import SparseTensor

KERNELS = 64
"""Kernels kept with one sharded tensor. Not measured."""


@dataclass(frozen=True, eq=False, repr=False)
class Sharded:
    """A sparse tensor divided among ranks, made by `shard` or as the sparse result of an einsum.

    Attributes:
        cut: which rank has what.
        local: this rank's nonzeros, of the shape of its box, on this rank's device.
        ranks: the ranks that have it together.
        kept: what was made of it: kernels by what they were asked for.
    """

    cut: Cut
    local: SparseTensor
    ranks: Ranks
    kept: Cache = field(default_factory=lambda: Cache(KERNELS))

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of all modes of the whole tensor."""
        return self.cut.shape

    @property
    def order(self) -> int:
        """The number of modes."""
        return self.cut.order

    @property
    def nnz(self) -> int:
        """The number of nonzeros of the whole tensor."""
        return sum(self.cut.nnz)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self.local.dtype

    @property
    def device(self) -> torch.device:
        """The device of this rank's share."""
        return self.local.device

    @property
    def ranges(self) -> Box:
        """The range of rows of each mode that this rank's share may have."""
        return self.cut.ranges(self.ranks.rank)

    def __repr__(self) -> str:
        return (
            f"Sharded(shape={self.shape}, nnz={self.nnz}, of which {self.local.nnz} on rank {self.ranks.rank} of "
            f"{self.ranks.size}, dtype={self.dtype}, device={self.device})"
        )

    def with_values(self, values: torch.Tensor) -> Sharded:
        """Return the tensor with other values of this rank's share, of the same shape; sends nothing."""
        local = self.local.with_values(values)
        if local.shape != self.local.shape:
            raise ShapeError(f"values must have shape {tuple(self.local._values.shape)}, found {tuple(values.shape)}")
        return replace(self, local=local, kept=Cache(KERNELS))

    def as_whole(self, modes: Sequence[int]) -> SparseTensor:
        """Return the local share with coordinates of the whole tensor in these modes, which get their whole size."""
        local = self.local
        added = [0] * self.local.sparse_order
        shape = list(self.local.shape)
        for m in modes:
            added[m], shape[m] = self.ranges[m][0], self.shape[m]
        coords = local.coords + torch.tensor(added, device=local.device)[:, None]
        return SparseTensor._of(coords, local.values, tuple(shape), local.is_coalesced)

    @entry_point
    def gather(self) -> SparseTensor:
        """Return the whole tensor on every rank; collective.

        Raises:
            OutOfMemoryError: it would pass the memory limit.
            DistributedError: a rank failed or is gone.
        """
        local = self.as_whole(range(self.local.sparse_order))
        row = 8 * local.sparse_order + local.dtype.itemsize * prod(local.values.shape[1:])
        what = f"the whole of {self!r}"
        agreed(self.ranks, "gather", lambda: check_memory(what, 2 * row * self.nnz, local.device))
        coords = self.ranks.gathered(local.coords.T.contiguous(), self.cut.nnz)
        values = self.ranks.gathered(local.values.detach(), self.cut.nnz)
        return SparseTensor(coords.T.contiguous(), values, self.shape, check=False)

    # What `sparsetc.einsum`, `sparsetc.compile` and `sparsetc.decomposition.cp_als` ask an operand for; collective.
    _compiled = later("distributed.kernel", "compiled")
    _cp_als = later("distributed.cp", "cp_als")

    def _einsum(self, args: tuple[Any, ...], **settings: Any) -> Any:
        """`sparsetc.einsum` of arguments with this operand among them; collective.

        The kernel is kept with the operand, but ranks ask each other at each call whether they were given the same:
        loops are for `sparsetc.compile`.
        """
        kernel, dense = self._compiled(args, called=True, **settings)
        return kernel._called(dense)


@entry_point
def shard(
    x: Any,
    along: str | int | Iterable[int] | None = None,
    *,
    mesh: DeviceMesh | None = None,
    device: torch.device | str | None = None,
    scattered: bool = False,
) -> Sharded:
    """Cut a sparse tensor over the ranks of a mesh; collective.

    Args:
        x: a sparse tensor of any kind that `einsum` takes, the same on every rank; a `PackedFile`, or the path of a
            packed file (.parquet), of which each rank reads its part.
        along: the modes that may be cut: a mode or several; an equation whose first term is x's, for the modes that its
            result keeps, so that no sum crosses ranks; None for all modes, as `cp_als` wants it.
        mesh: a DeviceMesh of one dimension, such as ``DeviceMesh.from_group(group, "cuda")``. None: all processes, or
            one rank if torch.distributed is not initialised.
        device: the device of shares. By default a tensor's own; for a file this process's GPU if the group has NCCL,
            else the CPU.
        scattered: each rank gives other nonzeros, in coordinates of the whole tensor. Equal coordinates are summed.

    Returns:
        This rank's share. Shares are boxes of about equally many nonzeros, in a grid of ranges along modes; the grid is
        the balanced one that sends the fewest rows of factor matrices. If no grid is balanced, a box is divided among
        several ranks, whose results are summed.

    Raises:
        DistributedError: ranks were given different arguments, or some of them failed.
        ShapeError, EquationError, IOFormatError, DeviceError, …: all ranks failed alike.
    """
    ranks = Ranks(mesh)
    modes = tuple(along) if isinstance(along, Iterable) and not isinstance(along, str) else along
    same = {"along": modes, "scattered": scattered}
    source = agreed(ranks, "shard", lambda: source_of(x, modes, ranks, device, scattered), same, lambda it: it[-1])
    shape, cut_modes, nonzeros, _ = source
    cut = chosen(nonzeros[0], shape, cut_modes, ranks)
    coords, values = exchanged(nonzeros, cut, ranks)

    def share() -> SparseTensor:
        ranges = cut.ranges(ranks.rank)
        starts = torch.tensor([start for start, _ in ranges[: coords.shape[0]]], device=coords.device)
        return SparseTensor(coords - starts[:, None], values, [stop - start for start, stop in ranges], check=False)

    local = agreed(ranks, "shard", share)
    return Sharded(replace(cut, nnz=tuple(ranks.objects(local.nnz))), local, ranks)


# -- nonzeros, before the cut and on their way ------------------------------------------------------------------------

Nonzeros = tuple[Tensor, Tensor]
"""(sparse order, n) coordinates and (n, *dense sizes) values."""


Source = tuple[Ints, Ints, Nonzeros, dict[str, Any]]
"""Sizes of the whole tensor, dense modes last; the modes that may be cut; this rank's nonzeros, on the device where
shares will be; and what must be the same on every rank."""


def source_of(x: Any, along: Any, ranks: Ranks, device: torch.device | str | None, scattered: bool) -> Source:
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
        check(x.path, "this rank's part", (last - first) * x.row_bytes)
        coords, values = x.block(first, last)
        said = {"shape": x.shape, "dtype": x.dtype, "device": to.type, "nnz": x.nnz, "checksum": x.crc}
        return x.shape, modes, (coords.to(to), values.to(to)), said
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
    return sparse.shape, modes, (coords, values), said


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
