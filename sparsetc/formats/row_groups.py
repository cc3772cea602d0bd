"""The rows of windows: which modes make them, and in what order they stand side by side.

In: coordinates, and a storage of windows. Out: `Rows`, of which so many at a time are a window.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch

from sparsetc.errors import FormatError
from sparsetc.formats.base import index_dtype
from sparsetc.ir.plan import Storage
from sparsetc.similarity.groups import Groups, group_rows
from sparsetc.support.lru import Lru
from sparsetc.tensor.numbering import narrow_ranks

PARAMETERS = ("height", "width", "tau", "strip")
"""What a storage of windows may name, and a partition that deals by them."""


@dataclass(frozen=True)
class Windowing:
    """Which modes make rows and columns, the sides of a tile, and how rows are grouped."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    height: int
    width: int
    tau: int = 0
    """The similarity of a group's rows, in percent; 0 leaves rows where they are."""
    strip: int = 1
    """Columns of a strip; rows are compared by the strips that they touch."""

    @classmethod
    def of(cls, storage: Storage) -> Windowing:
        """What a storage says; `FormatError` where it is none of windows."""
        if not storage.item or not storage.lane or storage.leaf:
            raise FormatError(f"windows have item modes, and all others at the lane; found {storage}")
        given = dict(storage.params)
        sides = given.get("height", 0), given.get("width", 0)
        if min(sides) < 1:
            raise FormatError(f"windows need a height and a width of 1 or more; found {given}")
        tau, strip = given.get("tau", 0), given.get("strip", sides[1])
        if not 0 <= tau <= 100 or strip < 1:
            raise FormatError(f"tau is in percent, and a strip has 1 column or more; found {given}")
        return cls(storage.item, storage.lane, *sides, tau, strip)

    @property
    def grouping(self) -> Hashable:
        """What groups of rows depend on, beside coordinates and shape: whatever the tiles."""
        return ("similar", self.rows, self.columns, self.strip, self.tau)

    def sides(self, order: int) -> tuple[int, ...]:
        """The sides of a tile, by mode; the other modes of rows, and of columns, are listed along them."""
        return tuple({self.rows[0]: self.height, self.columns[-1]: self.width}.get(m, 1) for m in range(order))


@dataclass(frozen=True)
class Rows:
    """The rows that have nonzeros, as windows take them."""

    rank: torch.Tensor
    """(nnz,) the place of each nonzero's row, int32 where that holds them."""
    count: int

    @classmethod
    def of(cls, coords: torch.Tensor, shape: tuple[int, ...], s: Windowing, cache: Lru[Any, Any] | None = None) -> Rows:
        """The rows in the order of their coordinates, or group by group; a cache keeps the groups.

        What whole windows leave of the groups comes after them, so that no window but those has rows of several groups.
        """
        own, count = _ranks(coords, shape, s.rows)
        if not s.tau:
            return cls(own, count)
        groups = (Lru(1) if cache is None else cache).once(s.grouping, lambda: similar(coords, shape, s))
        order = _in_windows(groups, s.height)
        places = torch.arange(count, dtype=own.dtype, device=order.device)
        rank = torch.empty(count, dtype=own.dtype, device=order.device).scatter_(0, order, places)
        return cls(rank.index_select(0, own), count)

    def listed(self, coordinate: torch.Tensor, height: int, none: int) -> torch.Tensor:
        """(windows * height,) the rows' coordinates, the last window filled up by what stands for none."""
        size, kind = -(-self.count // height) * height, index_dtype(none)
        lists = torch.full((size,), none, dtype=kind, device=coordinate.device)
        return lists.scatter_(0, self.rank.long(), coordinate.to(kind))


def _ranks(coords: torch.Tensor, shape: tuple[int, ...], modes: tuple[int, ...]) -> tuple[torch.Tensor, int]:
    """(nnz,) the number of each nonzero's fiber of these modes, and how many fibers there are."""
    return narrow_ranks((coords[m] for m in modes), [shape[m] for m in modes], coords[0])


def similar(coords: torch.Tensor, shape: tuple[int, ...], s: Windowing) -> Groups:
    """Groups of the rows that have nonzeros, by their numbers; several modes of columns are numbered too."""
    (rows, count), columns, width = _ranks(coords, shape, s.rows), coords[s.columns[-1]], shape[s.columns[-1]]
    if len(s.columns) > 1:
        columns, width = _ranks(coords, shape, s.columns)
    return group_rows(rows.long(), columns.long(), count, width, width=s.strip, tau=s.tau / 100)


def _in_windows(groups: Groups, height: int) -> torch.Tensor:
    """The numbers of the rows: whole windows of each group, then what is left of the groups."""
    size = groups.heights
    group = torch.repeat_interleave(size)
    place = torch.arange(group.numel(), device=group.device) - groups.ptr[:-1][group]
    left = place >= (size - size % height)[group]
    return groups.order[torch.sort(left, stable=True).indices]
