"""`Sharded`: a sparse tensor of which each rank has a share, and `shard`, which makes one.

In: a tensor that every rank has, other nonzeros on each, or a packed file of which each rank reads its part. Out: each
rank's share as a SparseTensor of its own, whose coordinates count from where the rank's box begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch

from sparsetc.distributed.agree import agreed
from sparsetc.distributed.choose import chosen
from sparsetc.distributed.cut import Cut, Range
from sparsetc.distributed.deal import Nonzeros, exchanged, moved, taken
from sparsetc.distributed.ranks import Ranks
from sparsetc.distributed.source import ShardSource, modes_to_cut, source_of
from sparsetc.errors import ShapeError
from sparsetc.options import current
from sparsetc.support.entry import entry_point
from sparsetc.support.lru import Lru
from sparsetc.tensor.sparse_tensor import SparseTensor

KERNELS = 64
"""Kernels kept with one sharded tensor. Not measured."""


@dataclass(frozen=True, eq=False, repr=False)
class Sharded:
    """A sparse tensor cut over ranks; `shard` makes one, and so do einsums with a sparse result.

    Attributes:
        cut: which rank has what.
        local: this rank's nonzeros, of the shape of its box, on this rank's device.
        ranks: the ranks that have it together.
        kept: what was made of it: kernels by what they were asked for.
    """

    cut: Cut
    local: SparseTensor
    ranks: Ranks
    kept: Lru[Any, Any] = field(default_factory=lambda: Lru(KERNELS))

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of all modes of the whole tensor."""
        return self.cut.shape

    @property
    def order(self) -> int:
        """The number of modes."""
        return self.cut.order

    @property
    def nnz(self) -> int:
        """Nonzeros of the whole tensor."""
        return sum(self.cut.nnz)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the values."""
        return self.local.dtype

    @property
    def device(self) -> torch.device:
        """Where this rank's share lives."""
        return self.local.device

    @property
    def ranges(self) -> tuple[Range, ...]:
        """The rows of each mode that this rank's share may have."""
        return self.cut.ranges(self.ranks.rank)

    def __repr__(self) -> str:
        return (
            f"Sharded(shape={self.shape}, nnz={self.nnz}, of which {self.local.nnz} on rank {self.ranks.rank} of "
            f"{self.ranks.size}, dtype={self.dtype}, device={self.device})"
        )

    def with_values(self, values: torch.Tensor) -> Sharded:
        """Nonzeros as here with other values of this rank's share, of the same shape; sends nothing."""
        local = self.local.with_values(values)
        if local.shape != self.local.shape:
            raise ShapeError(f"values must have shape {tuple(self.local._values.shape)}, found {tuple(values.shape)}")
        return replace(self, local=local, kept=Lru(KERNELS))

    def as_whole(self, modes: Sequence[int]) -> SparseTensor:
        """The local share with coordinates of the whole tensor in some modes, which then have their whole size."""
        return self.kept.once(("whole", tuple(modes)), lambda: self._as_whole(modes)) if modes else self.local

    def _as_whole(self, modes: Sequence[int]) -> SparseTensor:
        local, added, shape = self.local, [0] * self.local.sparse_order, list(self.local.shape)
        for m in modes:
            added[m], shape[m] = self.ranges[m][0], self.shape[m]
        coords = local.coords + torch.tensor(added, device=local.device)[:, None]
        return SparseTensor._of(coords, local.values, tuple(shape), local.is_coalesced)

    @entry_point
    def gather(self) -> SparseTensor:
        """The whole tensor, on every rank; collective.

        Raises:
            OutOfMemoryError: it would pass the memory limit.
            DistributedError: a rank failed or is gone.
        """
        local, counts = self.as_whole(range(self.local.sparse_order)), self.cut.nnz
        row = 8 * local.sparse_order + local.dtype.itemsize * prod(local.values.shape[1:])
        what = f"the whole of {self!r}"
        agreed(self.ranks, "gather", lambda: current().check_memory(2 * row * self.nnz, local.device, what))
        coords = self.ranks.gathered_unequal(local.coords.T.contiguous(), counts)
        values = self.ranks.gathered_unequal(local.values.detach(), counts)
        return SparseTensor(torch.cat(coords).T.contiguous(), torch.cat(values), self.shape, check=False)


@entry_point
def shard(
    x: Any,
    along: str | int | Iterable[int] | None = None,
    *,
    group: Any = None,
    device: torch.device | str | None = None,
    scattered: bool = False,
) -> Sharded:
    """Cut a sparse tensor over the ranks of a process group; collective.

    Args:
        x: a sparse tensor of any kind that `einsum` takes, the same on every rank; a `PackedFile`, or the path of a
            packed file (.parquet), of which each rank reads its part.
        along: the modes that may be cut: a mode or several; an equation, whose first term is x's, for those that its
            result keeps, so that no sum crosses ranks; None for all modes, as `cp_als` wants it.
        group: the process group; the default one if None, and one rank where torch.distributed was not initialised.
        device: where shares are put. By default a tensor's own device, and for a file this process's GPU where the
            group has NCCL, else the CPU.
        scattered: each rank gives other nonzeros, in coordinates of the whole tensor. Those of equal coordinates are
            summed.

    Returns:
        Shares of about equally many nonzeros, as boxes: a grid of ranges along modes. Of grids the one is taken that
        sends the fewest rows of factor matrices among those that balance. Where rows are so uneven that none does, a
        box's nonzeros are dealt to several ranks, whose results are summed.

    Raises:
        DistributedError: ranks were given different arguments, or some of them failed.
        ShapeError, EquationError, IOFormatError, DeviceError, …: all ranks failed alike.
    """
    ranks, what = Ranks.of(group), "shard"
    several = isinstance(along, Iterable) and not isinstance(along, str)
    given = {"along": tuple(along) if several else along, "scattered": scattered}  # type: ignore[arg-type]

    def opened() -> tuple[ShardSource, tuple[int, ...]]:
        source = source_of(x, ranks, device, scattered)
        return source, modes_to_cut(given["along"], source)

    source, modes = agreed(ranks, what, opened, given)
    mine = agreed(ranks, what, source.read, source.said)
    cut = chosen(mine[0], source.shape, modes, ranks, source.scattered)
    if source.scattered:
        own = exchanged(mine, cut, ranks)
        share = agreed(ranks, what, lambda: _share(own, cut, ranks.rank, False))
        cut = replace(cut, nnz=tuple(ranks.objects(share.nnz)))
    else:
        share = agreed(ranks, what, lambda: _share(taken(mine, cut, ranks.rank), cut, ranks.rank, True))
    return Sharded(cut, share, ranks)


def _share(own: Nonzeros, cut: Cut, rank: int, coalesced: bool) -> SparseTensor:
    """A rank's nonzeros as a tensor of the shape of its box; of a coalesced tensor they are so too."""
    coords, values = moved(own[0], cut, rank), own[1]
    shape = tuple(stop - start for start, stop in cut.ranges(rank))
    if coalesced:
        return SparseTensor._of(coords, values, shape, True)
    return SparseTensor(coords, values, shape, check=False)
