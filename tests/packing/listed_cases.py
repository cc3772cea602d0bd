"""A format of tiles whose rows, and whose columns, are lists: groups of rows of any numbers, windows of any columns.

Rows that have nonzeros are dealt to groups by how many they have; a place of a group that is left over holds the size
of the mode, or more. Within a group, and a tile along all modes but the last, the columns that have nonzeros make
windows, listed where `columns` says so.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import prod

import torch

import sparsetc as stc
from sparsetc.ir.nest.coordinates import Listed
from sparsetc.ir.nest.nest import Nest, tiles, tiles_along
from sparsetc.ir.nest.values import Bitmap, Whole
from sparsetc.packing import words
from sparsetc.packing.base import Packed
from sparsetc.packing.words import packed_bits

SIDES = (3, 5, 2, 4)
"""Positions along the first, the second, … mode of a tile."""


@dataclass(frozen=True)
class Grouped:
    """Tiles of listed rows, stored whole or as bitmaps."""

    name: str = "grouped"
    columns: bool = False
    """Whether the last mode is listed too, by each tile."""
    bitmap: bool = False

    def view(self, shape: tuple[int, ...], storage: stc.plans.Storage) -> Nest:
        (row,), rest = storage.item, (*storage.lane, *storage.leaf)
        sides = SIDES[: len(shape)]
        whole = rest[:-1] if self.columns else rest
        lists = (Listed(rest[-1], "columns", sides[rest[-1]]),) if self.columns else ()
        lane = (*words.fields(whole, tiles_along(shape, sides), "tile_word"), *lists)
        values = Bitmap(sides, (row, *rest), word=8) if self.bitmap else Whole(sides, (row, *rest))
        return tiles((Listed(row, "rows", sides[row]),), lane, values)

    def pack(self, coords: torch.Tensor, shape: tuple[int, ...], storage: stc.plans.Storage) -> Packed:
        view = self.view(shape, storage)
        (row,), rest = storage.item, (*storage.lane, *storage.leaf)
        group = self.groups(coords[row].tolist(), view.values.sides[row])
        tiles: dict[tuple[int, ...], dict[int, int]] = defaultdict(dict)
        windows: dict[tuple[int, ...], list[int]] = defaultdict(list)
        at = [tuple(place) for place in coords.T.tolist()]
        for place in at:
            listed = windows[self.beside(view, group, rest, place)]
            listed += [place[rest[-1]]] if place[rest[-1]] not in listed else []
        for n, place in enumerate(at):
            key, along = self.beside(view, group, rest, place), {m: place[m] % view.values.sides[m] for m in rest}
            along[row] = group[place[row]][1]
            last = place[rest[-1]] // view.values.sides[rest[-1]]
            if self.columns:
                last, along[rest[-1]] = divmod(windows[key].index(place[rest[-1]]), view.values.sides[rest[-1]])
            tiles[(*key, last)][sum(along[m] * view.values.strides[m] for m in along)] = n
        return self.packed(storage, shape, coords.shape[1], dict(sorted(tiles.items())), group, windows)

    def groups(self, rows: list[int], side: int) -> dict[int, tuple[int, int]]:
        """The group of each row that has nonzeros, and its place there: rows of many nonzeros first."""
        ranked = sorted(set(rows), key=lambda n: (-rows.count(n), n))
        return {row: divmod(n, side) for n, row in enumerate(ranked)}

    def beside(
        self, view: Nest, group: dict[int, tuple[int, int]], rest: tuple[int, ...], place: tuple[int, ...]
    ) -> tuple[int, ...]:
        """What the tiles of one group share that lie beside one another along the last mode."""
        (row,) = {*range(view.order)} - {*rest}
        return (group[place[row]][0], *(place[m] // view.values.sides[m] for m in rest[:-1]))

    def packed(
        self,
        storage: stc.plans.Storage,
        shape: tuple[int, ...],
        nnz: int,
        tiles: dict[tuple[int, ...], dict[int, int]],
        group: dict[int, tuple[int, int]],
        windows: dict[tuple[int, ...], list[int]],
    ) -> Packed:
        """The arrays of tiles that are in order."""
        view, (row,), rest = self.view(shape, storage), storage.item, (*storage.lane, *storage.leaf)
        items = len({key[0] for key in tiles})
        rows = torch.full((items, view.values.sides[row]), shape[row])
        for number, (own, place) in group.items():
            rows[own, place] = number
        counts = torch.bincount(torch.tensor([key[0] for key in tiles], dtype=torch.long), minlength=items)
        arrays = {"item_ptr": torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int(), "rows": rows.flatten().int()}
        whole = rest[:-1] if self.columns else rest
        of_tiles = {m: torch.tensor([key[1 + n] for key in tiles], dtype=torch.long) for n, m in enumerate(whole)}
        fields = words.fields(whole, tiles_along(shape, view.values.sides), "tile_word")
        arrays |= words.encode([of_tiles.get(m, torch.empty(0)) for m in range(len(shape))], fields)
        if self.columns:
            side, past = view.values.sides[rest[-1]], shape[rest[-1]] + 7  # any number that is no coordinate
            lists = [windows[key[:-1]][key[-1] * side : (key[-1] + 1) * side] for key in tiles]
            flat = [c for own in lists for c in (*own, *[past] * (side - len(own)))]
            arrays["columns"] = torch.tensor(flat, dtype=torch.int32)
        at = [(tile, place, n) for tile, own in enumerate(tiles.values()) for place, n in sorted(own.items())]
        tile, place, source = torch.tensor(at, dtype=torch.long).view(-1, 3).T
        positions = torch.full((len(tiles) * prod(view.values.sides),), -1)
        positions[tile * view.values.volume + place] = source
        if self.bitmap:
            starts = torch.nn.functional.pad(torch.bincount(tile, minlength=len(tiles)).cumsum(0), (1, 0))
            bits = packed_bits(tile, place, len(tiles), view.values.volume, view.values.word).flatten()
            arrays, positions = arrays | {"value_ptr": starts.int(), "bits": bits}, source.contiguous()
        first = torch.tensor([min(own.values()) for own in tiles.values()], dtype=torch.long)
        known = (first[arrays["item_ptr"][:-1].long()] if items else first, first)
        own = (self.name, storage, shape, nnz, view, arrays, positions, positions.numel(), items, known)
        return Packed(*own, padded=positions.numel() != nnz)


FORMATS_OF_LISTS = (
    Grouped(),
    Grouped("windows", columns=True),
    Grouped("grouped_bits", bitmap=True),
    Grouped("window_bits", columns=True, bitmap=True),
)
