"""Windows of fibers, a format outside the package: what the tests of all runners share.

A tile is a matrix of fibers by fibers: several modes are listed along each of its two sides, so a place stands for a
pair or a triple of coordinates::

    rows_i, rows_j        [item, place]    the fibers of an item, which have the item modes
    columns_k, columns_l  [tile, place]    the next fibers that the item has, of the lane modes

`aligned` ones have consecutive positions along the mode that carries the columns, and lists of the others.
"""

from __future__ import annotations

from typing import Any

import torch
from cases import OPERATIONS, Problem
from row_block_cases import SIZES, sparse_letters
from row_blocks import listed, place_among

import sparsetc as stc
from sparsetc.ir.nest.coordinates import Listed
from sparsetc.ir.nest.nest import Nest, tiles, tiles_along
from sparsetc.ir.nest.values import Bitmap, Whole
from sparsetc.packing import words
from sparsetc.packing.base import FORMATS, Packed
from sparsetc.packing.words import packed_bits


class FiberWindows:
    """The last item mode and the last lane mode have sides, along which the others ride."""

    name = "fiber_windows"

    def view(self, shape: tuple[int, ...], storage: stc.plans.Storage) -> Nest:
        (*_, row), (*others, column) = storage.item, storage.lane
        height, width = storage.param("height"), storage.param("width")
        sides = tuple({row: height, column: width}.get(mode, 1) for mode in range(len(shape)))
        item = tuple(Listed(mode, f"rows_{mode}", height, along=row) for mode in storage.item)
        lane = tuple(Listed(mode, f"columns_{mode}", width, along=column) for mode in others)
        own = words.fields([column], tiles_along(shape, sides), "tile_word")
        lane += own if storage.param("aligned") else (Listed(column, f"columns_{column}", width),)
        order = (*storage.item, *storage.lane)
        values = Bitmap(sides, order, word=8) if storage.param("bitmap") else Whole(sides, order)
        return tiles(item, lane, values)

    def pack(self, coords: torch.Tensor, shape: tuple[int, ...], storage: stc.plans.Storage) -> Packed:
        view, nonzeros = self.view(shape, storage), torch.arange(coords.shape[1])
        height, width = storage.param("height"), storage.param("width")
        rows, row = torch.unique(coords[list(storage.item)], dim=1, return_inverse=True)
        columns, column = torch.unique(coords[list(storage.lane)], dim=1, return_inverse=True)
        groups, group = -(-rows.shape[1] // height), row // height
        number = place_among(group[None], column)
        along, keys = number % width, torch.stack([group, number // width])
        if storage.param("aligned"):
            own = coords[storage.lane[-1]]
            along, keys = own % width, torch.stack([group, own // width])
            keys = torch.cat([keys, place_among(torch.cat([keys, along[None]]), column)[None]])
        tiles, tile = torch.unique(keys, dim=1, return_inverse=True)
        count = tiles.shape[1]
        arrays = {"item_ptr": torch.searchsorted(tiles[0].contiguous(), torch.arange(groups + 1)).int()}
        for mode, numbers in zip(storage.item, rows, strict=True):
            arrays[f"rows_{mode}"] = listed(torch.arange(len(numbers)), numbers, groups * height, shape[mode])
        for c, numbers in zip(view.levels[1], columns[:, column], strict=True):
            if isinstance(c, Listed):
                arrays[c.array] = listed(tile * width + along, numbers, count * width, shape[c.mode])
            else:
                arrays |= words.encode({c.mode: tiles[1]}, [c])
        place = row % height * width + along
        positions = torch.full((count * view.values.volume,), -1)
        positions[tile * view.values.volume + place] = nonzeros
        if view.values.bitmap:
            starts = torch.nn.functional.pad(torch.bincount(tile, minlength=count).cumsum(0), (1, 0)).int()
            stored = torch.argsort(tile * view.values.volume + place)
            bits = packed_bits(tile[stored], place[stored], count, view.values.volume, view.values.word).flatten()
            arrays, positions = arrays | {"value_ptr": starts, "bits": bits}, positions[positions >= 0]
        heads = torch.zeros(groups, dtype=torch.long).scatter_(0, group, nonzeros)
        own = (self.name, storage, shape, nonzeros.numel(), view, arrays, positions, positions.numel(), groups)
        return Packed(*own, (heads, None), padded=positions.numel() > nonzeros.numel())


FORMATS[FiberWindows.name] = FiberWindows()

LAYOUTS: dict[str, tuple[dict[str, int], tuple[int, ...]]] = {
    "columns": ({"height": 16, "width": 16}, (0,)),
    "rows": ({"height": 16, "width": 16}, (-2, -3)),
    "odd-columns": ({"height": 5, "width": 12}, (1,)),
    "odd-rows": ({"height": 6, "width": 3}, (0, 1)),
    "aligned": ({"height": 3, "width": 4, "aligned": 1}, (0,)),
    "bitmaps": ({"height": 4, "width": 8, "bitmap": 1}, (0,)),
}
"""Parameters, and the modes of which an item has fibers; the others make columns."""

MORE = (
    "ijk,ir,jr,kr->kji",
    "ijk->kij",
    "ijk,jr->irk",
    "ijk,ijr->kr",
    "ijkl,jr,ks->ilrs",
    "ijkl,jr,lr->ikr",
    "ijkl->lj",
)
EQUATIONS = sorted({*OPERATIONS.values(), *MORE})
EQUATIONS = [e for e in EQUATIONS if len(set(sparse_letters(e))) == len(sparse_letters(e)) > 2]


def plan(layout: str, equation: str, precision: str = "ieee") -> stc.plans.Plan:
    """Windows of fibers of one of `LAYOUTS`, for an einsum whose dense axes are some of r, s, t and u."""
    (given, modes), order = LAYOUTS[layout], len(sparse_letters(equation))
    item = tuple(mode % order for mode in modes)
    lane = tuple(mode for mode in range(order) if mode not in item)
    params = tuple(sorted(({"aligned": 0, "bitmap": 0} | given).items()))
    storage = stc.plans.Storage(item=item, lane=lane, params=params)
    schedule = stc.plans.Schedule(2, tuple((c, 16) for c in "rstu" if c in equation), dot=True, precision=precision)
    return stc.plans.Plan(FiberWindows.name, (stc.plans.Part(FiberWindows.name, storage, schedule),))


def operands(equation: str, dtype: torch.dtype) -> list[Any]:
    """A sparse operand of some skewed nonzeros, and dense ones."""
    sizes = {c: SIZES.get(c, 4) for c in filter(str.isalpha, equation)}
    return Problem(equation, sizes, "skewed", dtype).operands()


def check(equation: str, layout: str, dtype: torch.dtype, backend: str) -> None:
    """Compare with torch."""
    x, *dense = operands(equation, dtype)
    found = stc.einsum(equation, x, *dense, plan=plan(layout, equation), backend=backend)
    found = found.to_dense() if isinstance(found, stc.SparseTensor) else found
    expected = torch.einsum(equation, *(o.to(torch.float64) for o in (x.to_dense(), *dense)))
    limit = 1e-5 if dtype == torch.float32 else 1e-12
    assert (found.to(torch.float64) - expected).norm() <= limit * expected.norm() + 1e-30
