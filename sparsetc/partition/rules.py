"""The rules that come with the package: by how full tiles are, by the length and the likeness of rows, by fibers.

``threshold`` (HLS, section V-A) deals nonzeros of well-filled tiles apart from all others, which add to the same output
rows. ``run_length`` deals output rows of many nonzeros apart from rows of few: a long row fills the lanes of a work
item by itself, short rows run side by side, one a lane, and no single kernel serves both
(`benchmarks/results/mttkrp_plans.json`: of 11 M nonzeros in rows of about 4, one row an item took 1.5 ms, one row a
lane 0.43). ``row_similarity`` (1-SA; DTC-SpMM) deals rows whose group makes well-filled tiles apart from rows left
over.

``mixed_mode`` deals each nonzero to the mode along which its fiber is longest (MM-CSF, section 4.1). A nonzero of a
tensor of order d lies on d fibers, one along each mode, and is stored in one of them. Longer fibers are fewer, and a
fiber's coordinates are stored, and its rows gathered, once. The paper's *dynamic* strategy goes through the nonzeros
one by one (`one_by_one`) and counts a fiber anew whenever a nonzero of it went elsewhere. That is a loop which cannot
be cut, and it takes fibers apart that a later nonzero would have made whole. What runs here takes whole fibers, the
longest first, as many at a time as are about equally long.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch

from sparsetc.errors import PlanError
from sparsetc.formats.tiles import sides_of
from sparsetc.formats.windows import PARAMETERS, Rows, Windowing, populations
from sparsetc.ir.nest.nest import tiles_along
from sparsetc.ir.plan import Storage
from sparsetc.partition.base import register_partition, row_numbers
from sparsetc.support.lru import Lru
from sparsetc.tensor.numbering import narrow_ranks


@register_partition("threshold")
def by_threshold(
    coords: torch.Tensor, shape: tuple[int, ...], *, threshold: int, whole: int = 0, **sides: int
) -> list[torch.Tensor | None]:
    """[nonzeros of tiles that hold at least `threshold`, the others]; tiles of the default sides, or of `side_m`.

    With `whole`, tiles of at least so many come first, apart from those of at least `threshold`.
    """
    unknown = set(sides) - {f"side_{mode}" for mode in range(len(shape))}
    if unknown:
        raise PlanError(f"partition 'threshold' takes a threshold, whole and a side_m a mode, found {min(unknown)!r}")
    held = tile_populations(coords, shape, sides_of(shape, tuple(sides.items())))
    bounds = (*((whole,) if whole else ()), threshold)
    part = torch.stack([held < least for least in bounds]).sum(0)
    return [torch.nonzero(part == n).flatten() for n in range(len(bounds) + 1)]


def tile_populations(coords: torch.Tensor, shape: tuple[int, ...], sides: tuple[int, ...]) -> torch.Tensor:
    """(nnz,) for every nonzero, how many its tile holds."""
    if coords.shape[1] == 0:
        return coords.new_zeros(0)
    rows = (row // side for row, side in zip(coords, sides, strict=True))
    tile, _ = narrow_ranks(rows, tiles_along(shape, sides), coords[0])
    return torch.bincount(tile).index_select(0, tile)


@register_partition("run_length", whole_rows=True)
def by_run_length(
    coords: torch.Tensor, shape: tuple[int, ...], kept: tuple[int, ...], *, threshold: int
) -> list[torch.Tensor | None]:
    """[nonzeros of rows with at least `threshold` of them, the others]. A row shares the kept modes' coordinates."""
    lengths = row_lengths(coords, shape, kept)
    long = lengths >= threshold
    return [torch.nonzero(long).flatten(), torch.nonzero(~long).flatten()]


def row_lengths(coords: torch.Tensor, shape: tuple[int, ...], kept: tuple[int, ...]) -> torch.Tensor:
    """(nnz,) for every nonzero, how many share its output row."""
    nnz = coords.shape[1]
    if not kept or nnz == 0:
        return torch.full((nnz,), nnz, device=coords.device)
    row = row_numbers((coords[m] for m in kept), [shape[m] for m in kept])
    return torch.bincount(row)[row]


@register_partition("row_similarity", whole_rows=True)
def by_row_similarity(
    coords: torch.Tensor,
    shape: tuple[int, ...],
    kept: tuple[int, ...],
    *,
    threshold: int,
    cache: Lru[Any, Any] | None = None,
    **params: int,
) -> list[torch.Tensor | None]:
    """[nonzeros of the groups of rows whose tiles hold at least `threshold` on average, the others].

    Args:
        coords: (order, nnz).
        shape: sizes of the modes.
        kept: modes that the output keeps, whose fibers are the rows.
        threshold: nonzeros a tile.
        cache: where groups of rows are kept, and found.
        params: ``height``, ``width``, ``tau`` and ``strip``, as the storage of windows has them; where there is no
            ``tau``, neighbouring rows are a group.

    Raises:
        PlanError: an option of another name, or an output that keeps no mode, or all.
    """
    if unknown := set(params) - set(PARAMETERS):
        raise PlanError(f"windows have a height, a width, tau and a strip, found {min(unknown)!r}")
    others = tuple(m for m in range(len(shape)) if m not in kept)
    if not kept or not others:
        raise PlanError("rows are fibers of the modes that the output keeps, columns those of the others: found none")
    s = Windowing.of(Storage(item=kept, lane=others, params=tuple(params.items())))
    group, nonzeros, tiles = populations(coords, shape, s, Rows.of(coords, shape, s, cache))
    filled = (nonzeros // tiles >= threshold)[group]
    return [torch.nonzero(filled).flatten(), torch.nonzero(~filled).flatten()]


@register_partition("mixed_mode")
def by_mixed_mode(coords: torch.Tensor, shape: tuple[int, ...]) -> list[torch.Tensor | None]:
    """For each mode, the nonzeros that are stored in fibers along it.

    Fibers are taken in classes of lengths, from 2**n on, the longest class first, and within a class along one mode
    after the other, that of the longest fibers on average first (the paper's rule for ties; then the lowest). A fiber
    whose nonzeros that are left are enough takes them all, and the others that cross it are shorter by them.

    The partition is not that of `one_by_one`, of which no nonzero's share is known before that of the one before it. It
    has fewer fibers: 1,277 in place of 2,092 on guanine_TEoo_3d, 6,498 in place of 12,011 on guanine_TEov_3d, 370,462
    in place of 619,435 on uracil3_t2_4d, 39,267 in place of 51,508 on Uber in three modes, 199,932 in place of 265,426
    in four; from 0.6 to 1.00 times as many on tensors of random coordinates and on small ones like nell-2, flickr,
    delicious, freebase-music and darpa. It never has more than the fibers along any one mode.

    Args:
        coords: (order, nnz), in lexicographic order.
        shape: sizes of the modes.

    Returns:
        For each mode the numbers of its nonzeros, rising.
    """
    forests = _Forests(coords, shape)
    best = forests.order[0]
    share = forests.dealt()
    if forests.taken >= forests.fibers[best]:  # one mode has no more of them: then its fibers are whole
        nothing = torch.zeros(0, dtype=torch.long, device=coords.device)
        return [None if mode == best else nothing for mode in range(len(shape))]
    return [torch.nonzero(share == mode).flatten() for mode in range(len(shape))]


class _Forests:
    """The fibers along each mode, and which of their nonzeros are left."""

    def __init__(self, coords: torch.Tensor, shape: tuple[int, ...]) -> None:
        self.nnz, self.device, modes = coords.shape[1], coords.device, range(len(shape))
        self.number: list[torch.Tensor] = []
        """(nnz,) for each mode the number of each nonzero's fiber along it."""
        self.left: list[torch.Tensor] = []
        """(fibers,) for each mode how many nonzeros of each fiber are left."""
        for along in modes:
            others = [m for m in modes if m != along]
            number, count = narrow_ranks([coords[m] for m in others], [shape[m] for m in others], coords[0])
            self.number.append(number)
            self.left.append(torch.zeros(count, dtype=number.dtype, device=self.device))
            self._count(along, number, 1)
        self.fibers = [left.numel() for left in self.left]
        self.order = sorted(modes, key=lambda mode: (self.fibers[mode], mode))
        """Modes, that of the fewest fibers, which are the longest on average, first."""
        self.taken = 0
        """How many fibers have taken nonzeros."""

    def _count(self, mode: int, fibers: torch.Tensor, change: int) -> None:
        own = self.left[mode]
        own.index_add_(0, fibers, own.new_full((1,), change).expand(fibers.numel()))

    def dealt(self) -> torch.Tensor:
        """(nnz,) int8: the mode that each nonzero goes to. Takes all that is left."""
        share = torch.zeros(self.nnz, dtype=torch.int8, device=self.device)
        nonzeros = torch.arange(self.nnz, device=self.device)
        longest = max((int(left.max()) for left in self.left if left.numel()), default=0)
        for size, mode in product(reversed(range(longest.bit_length())), self.order):
            if nonzeros.numel():
                nonzeros = self._take(mode, 1 << size, nonzeros, share)
        return share

    def _take(self, mode: int, least: int, nonzeros: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        """Deal to a mode what is left of its fibers of so many; the numbers of the nonzeros that are left then."""
        long = self.left[mode] >= least
        count = int(torch.count_nonzero(long))
        if not count:
            return nonzeros
        self.taken += count
        inside = long.index_select(0, self.number[mode].index_select(0, nonzeros))
        own = nonzeros[inside]
        share[own] = mode
        self.left[mode].masked_fill_(long, 0)
        for other in self.order:
            if other != mode:
                self._count(other, self.number[other].index_select(0, own), -1)
        return nonzeros[~inside]


def one_by_one(coords: torch.Tensor, shape: tuple[int, ...]) -> list[int]:
    """The mode that each nonzero goes to, by the paper's algorithm 5: a loop over the nonzeros, for small tensors.

    Args:
        coords: (order, nnz), in the order in which nonzeros are dealt.
        shape: sizes of the modes.

    Returns:
        A mode for each nonzero: that along which its fiber has most nonzeros, without those that went elsewhere; of
        equally long ones that of the longest fibers on average, then the lowest.
    """
    modes = range(len(shape))
    lengths: list[dict[tuple[int, ...], int]] = [{} for _ in modes]
    nonzeros = [tuple(c) for c in coords.T.tolist()]
    for c in nonzeros:
        for m in modes:
            fiber = c[:m] + c[m + 1 :]
            lengths[m][fiber] = lengths[m].get(fiber, 0) + 1
    order = sorted(modes, key=lambda m: (len(lengths[m]), m))
    found = []
    for c in nonzeros:
        own = max(order, key=lambda m: lengths[m][c[:m] + c[m + 1 :]])  # the first of equals
        for m in modes:
            if m != own:
                lengths[m][c[:m] + c[m + 1 :]] -= 1
        found.append(own)
    return found
