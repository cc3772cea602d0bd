"""`Sharded`, a sparse tensor divided among ranks, and `shard`, the function that makes one.

In: a tensor that every rank has, other nonzeros on each, or a packed file of which each rank reads its part. Out: each
rank's share as a SparseTensor of its own, whose coordinates count from where the rank's box begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, ClassVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from sparsetc.distributed.cut import Box, Cut, chosen
from sparsetc.distributed.ranks import Ranks, agreed
from sparsetc.distributed.sources import exchanged, source_of
from sparsetc.errors import ShapeError
from sparsetc.support import memory
from sparsetc.support.entry import entry_point
from sparsetc.support.lru import Cache
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
        agreed(self.ranks, "gather", lambda: memory.check(what, 2 * row * self.nnz, local.device))
        coords = self.ranks.gathered(local.coords.T.contiguous(), self.cut.nnz)
        values = self.ranks.gathered(local.values.detach(), self.cut.nnz)
        return SparseTensor(coords.T.contiguous(), values, self.shape, check=False)

    # What `sparsetc.einsum`, `sparsetc.compile` and `sparsetc.decomposition.cp_als` ask an operand for.
    _compiled: ClassVar[Callable[..., Any]]
    _cp_als: ClassVar[Callable[..., Any]]
    """`kernel.compiled` and `cp.cp_als`, of modules that import this one: the package puts them here; collective."""

    def _einsum(self, args: tuple[Any, ...], **settings: Any) -> Any:
        """`sparsetc.einsum` of arguments with this operand among them; collective.

        The kernel is kept with the operand, but ranks ask each other at each call whether they were given the same:
        loops are for `sparsetc.compile`.
        """
        kernel, dense = self._compiled(args, called=True, **settings)
        return kernel._called(dense)

    def _compile(self, args: tuple[Any, ...], **settings: Any) -> Any:
        """`sparsetc.compile` of arguments with this operand among them; collective."""
        return self._compiled(args, **settings)[0]


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
    source = agreed(ranks, "shard", lambda: source_of(x, modes, ranks, device, scattered), same, lambda it: it.said)
    cut = chosen(source.nonzeros[0], source.shape, source.modes, ranks)
    coords, values = exchanged(source.nonzeros, cut, ranks)

    def share() -> SparseTensor:
        ranges = cut.ranges(ranks.rank)
        starts = torch.tensor([start for start, _ in ranges[: coords.shape[0]]], device=coords.device)
        return SparseTensor(coords - starts[:, None], values, [stop - start for start, stop in ranges], check=False)

    local = agreed(ranks, "shard", share)
    return Sharded(replace(cut, nnz=tuple(ranks.objects(local.nnz))), local, ranks)
