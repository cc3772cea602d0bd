"""Walks as launched kernels: sides of tiles, warps, how far long windows are cut, and argument lists built once.

In: a `Walk`, `RowTiles` and tensors. Out: a function of tensors by name, which launches one kernel, and a second where
windows are cut. What was generated is kept with the row tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsetc.codegen import cache
from sparsetc.codegen.launch import ALIGNED, FUSED, launch_of
from sparsetc.codegen.triton_layout import ADDRESS64
from sparsetc.device.profile import machine_of, portable
from sparsetc.maps.body import Walk
from sparsetc.maps.printer import Printer, printed
from sparsetc.maps.row_tiles import RowTiles
from sparsetc.maps.text import LEAST_DOT, Layout, number_arguments, padded

MULTIPROCESSORS = 132
"""Multiprocessors of an H100 and an H200; long windows are cut to occupy them."""
RESIDENT = 2
"""Programs of dots that a multiprocessor runs at once, by their registers."""
FEWEST_TILES = 8
"""Tiles of an item at least, and of single rows at most (R-MAT graphs, H200: uncut rows took .9 to 1.6 times as long,
items of 16 tiles as long)."""
GATHERED_TILES = 16, 32
"""Least and most tiles of an item of several rows that gather their columns; in between an item has its share of a
multiprocessor's (the same graphs, H100: items of 8 tiles took 1.1 to 1.7 times as long, of 64 up to 1.7)."""
GATHERING = 16
"""Programs of gathered columns that a multiprocessor runs at once."""
UNEVEN = 1.5
"""Windows are cut if the longest has more than this many times its share."""
DOT_PRECISIONS = {"highest": "tf32x3", "high": "tf32", "medium": "tf32"}
"""The kind of float32 dot, by ``precision=``."""


@dataclass(frozen=True)
class Heads:
    """The heads of a call, and the pattern of each in a stack of patterns.

    Attributes:
        count: of rows.
        group: heads of rows that share a head of columns; only of a single pattern.
        patterns: of the stack, 1 where all heads have one pattern.
        fastest: whether the patterns of a stack follow one another head by head, and not once a run of heads.
    """

    count: int
    group: int = 1
    patterns: int = 1
    fastest: bool = False

    @property
    def parts(self) -> int:
        """Heads that have the same pattern."""
        return self.count // self.patterns

    def steps(self) -> dict[str, int]:
        """Return how far the head numbers of two patterns, and of two parts, are apart."""
        pattern, part = (1, self.patterns) if self.fastest else (self.parts, 1)
        return {"pattern_head": pattern, "part_head": part}


def layout_of(sizes: Sequence[int], dtype: torch.dtype, number: int, width: int, by_row: bool = False) -> Layout | None:
    """Return the sides of tiles for tables of these row sizes; None where a program would not fit in registers.

    Args:
        sizes: of the tables' rows.
        dtype: of the tables.
        number: 0 of the walk of the result, 1 of gradients of rows, 2 of columns.
        width: columns of a tile at most; 0 if columns are gathered.
        by_row: whether a window is one row.
    """
    if by_row:
        return ROW_FORMS.get(padded(max(sizes), dots=False))
    size = max(padded(max(sizes), dots=True), SMALLEST)
    if width:
        chosen = FORMS[dtype.itemsize, number].get(size)
        return chosen and replace(chosen, width=min(chosen.width, width))
    return GATHERED[dtype.itemsize, number > 0].get(size) or ROW_FORMS.get(padded(max(sizes), dots=False))


FORMS = {
    (2, 0): {64: Layout(64, 64, 4, 3), 128: Layout(64, 64, 4, 2), 256: Layout(64, 32, 4, 2)},
    (2, 1): {64: Layout(64, 64, 4, 2), 128: Layout(64, 32, 4, 3), 256: Layout(64, 32, 4, 1)},
    (2, 2): {64: Layout(64, 64, 4, 2), 128: Layout(64, 32, 4, 3), 256: Layout(32, 32, 4, 2)},
    (4, 0): {64: Layout(64, 32, 4, 3), 128: Layout(32, 32, 8, 1), 256: Layout(16, 32, 8, 1)},
    (4, 1): {64: Layout(64, 32, 4, 2), 128: Layout(16, 32, 4, 1), 256: Layout(16, 32, 8, 1)},
}
FORMS[4, 2] = FORMS[4, 1]
"""By bytes of an element, number of the walk, and row size: sides by which few registers or none are spilled on sm_90,
as its assembler reports (80 in the last; steps take ten times as long), and two programs or three are on a
multiprocessor (H200, float16, 8 heads, causal, n 2048: of 128 elements 127 us by 3 stages, 129 by 2, 193 by 64 columns
and 8 warps, which share rows; documents 146 and 184; of 256 elements rows 139 us, 261 by 32 at once; columns 245 us,
306 by 1 stage, 223 by 64 at once and 8 warps, for which some cards have too little shared memory)."""
IN_RUNS = {FORMS[2, 1][64]: 3}
"""Stages in place of those of some sides, where full tiles are neighbours (causal masks, 8 x 64, H100: .97 and .91 of
the time of 2 at n = 4096 and 16384; 1.03 where each tile's number is read)."""
GATHERED = {
    (2, False): {64: Layout(16, 32, 1, 3, True), 128: Layout(16, 32, 2, 2, True), 256: Layout(16, 32, 4, 2, True)},
    (2, True): {64: Layout(16, 32, 1, 2, True), 128: Layout(16, 32, 4, 1, True), 256: Layout(16, 32, 8, 1, True)},
    (4, False): {64: Layout(16, 32, 2, 2, True), 128: Layout(16, 32, 4, 1, True), 256: Layout(16, 32, 8, 1, True)},
    (4, True): {64: Layout(16, 32, 4, 1, True), 128: Layout(16, 32, 8, 1, True), 256: Layout(16, 32, 8, 1, True)},
}
"""Likewise of windows that gather their columns (R-MAT graphs, H100, 64 of 16 bits, `benchmarks/results/maps.json`: 32
rows, 64 columns or more warps took 1 to 1.4 times as long, one row 1.3 to 2.9)."""
MOST_LINES, OF_WARP = 4, 1024
"""Lines of a program at most, which wait for memory together, and elements of their tiles that a warp holds."""
ROW_FORMS = {
    1 << n: Layout(1, 8, warps, 1, True, max(min(OF_WARP * warps >> n + 3, MOST_LINES), 1))
    for n, warps in enumerate([1] * 7 + [2] * 2)
}
"""Sides of windows of one row, by row size (GAT of 4 x 16 and 4 x 32, R-MAT graphs and 9 entries a row, H200: 4 lines
of 8 columns took .53 to .77 of the time of one of 32 or 16, 4 of 16 columns .66 to .87)."""
SMALLEST = 64
"""Row size that smaller ones are taken for."""


def _unit(table: Tensor) -> int:
    """Return how many elements, of 16 bytes at most, rows begin at multiples of; 1 where Triton sees that by itself."""
    apart = gcd(*table.stride()[:-1])
    return gcd(apart, ALIGNED // table.dtype.itemsize) if apart % ALIGNED else 1


def most_tiles(tiles: RowTiles, heads: int) -> int:
    """Return how many tiles an item may have where the longest window is far above it; else 0.

    That is a fair share of all tiles, for windows of more than one row.
    """
    share = FEWEST_TILES
    if tiles.gathered and tiles.height > 1:
        least, most = GATHERED_TILES
        share = min(max(least, tiles.tiles * heads // (MULTIPROCESSORS * GATHERING)), most)
    elif tiles.height >= LEAST_DOT:
        share = max(share, -(-tiles.tiles * heads // (MULTIPROCESSORS * RESIDENT)))
    return share if tiles.longest > UNEVEN * share else 0


class WalkKernel:
    """A walk over row tiles, generated and bound to what does not change between calls.

    Attributes:
        source: the generated text and its arguments.
        path: of the text's copy for readers.
    """

    def __init__(
        self,
        walk: Walk,
        tiles: RowTiles,
        tensors: Mapping[str, Tensor],
        heads: Heads,
        layout: Layout,
        precision: str,
        cache_dir: Path | None,
        name: str,
    ) -> None:
        """Generate and bind.

        Args:
            walk: what is computed.
            tiles: that it goes along, of these sides.
            tensors: by name: tables (heads, rows, size) or (batches, heads, rows, size), vectors (heads, rows) or
                (heads, entries), and results; of the sizes and strides of every call. Rows of tables are contiguous,
                vectors by entry and results whole.
            heads: of them.
            layout: of the tiles, and of the launch; properties of data are added.
            precision: ``highest``, ``high`` or ``medium``, of float32.
            cache_dir: folder of generated sources.
            name: what the file is named after.
        """
        self.walk = walk
        self.name = name
        self.device = tiles.full_ptr.device
        self.parts = heads.parts // (heads.group if walk.mode else 1)
        self.items, self.cut, self.slots = tiles.items(most_tiles(tiles, self.parts))
        self.slots *= bool(walk.accumulated)  # items that store each entry share no sums
        self.idle = not len(self.items)
        self.layout = replace(
            layout,
            even=tiles.even,
            full=tiles.full_col.numel() > 0,
            in_runs=tiles.in_runs,
            part=tiles.part_col.numel() > 0,
            ordered=tiles.order is not None,
            cut=self.slots > 0,
            wide=any(t.shape[n] * t.stride(n) >= ADDRESS64 for t in tensors.values() for n in (-1, -2)[: t.ndim - 1]),
            sizes=walk.sizes(tensors),
            precision=DOT_PRECISIONS[precision],
            stages=IN_RUNS.get(layout, layout.stages) if tiles.in_runs else layout.stages,
            group=heads.group,
            stacked=heads.patterns > 1,
            apart=tuple([name for name, t in tensors.items() if t.ndim == 4]),
            stepped=tuple([name for name in walk.vectors if tensors[name].stride(-1) != 1]),
            whole=tuple([name for name in walk.vectors if not tensors[name].is_floating_point()]),
            units=tuple([(name, n) for name, t in tensors.items() if t.ndim > 2 and (n := _unit(t)) > 1]),
        )
        self.source = self.source_for(machine_of(self.device))
        module, self.path = cache.load(self.source.text, cache_dir, name)
        arrays = ("full_col", "part_col", "bits", "full_base", "part_base", "order")
        self.fixed: dict[str, Any] = {array: getattr(tiles, array) for array in arrays}
        self.fixed |= {"items": self.items, "item_count": len(self.items), "rows": tiles.rows, "columns": tiles.columns}
        self.fixed |= {"windows": tiles.windows, "parts": self.parts, **heads.steps()}
        self.fixed |= number_arguments(tensors, dict(self.layout.units))
        self.launch = self._bound(module.walk, self.source.arguments, self.fixed, layout.lines)
        self.run = self._cut if self.slots else self.launch
        if self.slots:
            self.sums = self._sums()
            cut = {**self.fixed, "items": self.cut, "item_count": len(self.cut)}
            self.combine = self._bound(module.combine, self.source.combine, cut, 1)

    def source_for(self, machine: str) -> Printer:
        """Return the text for a machine."""
        layout = replace(self.layout, precision=portable(self.layout.precision, machine), ptx=machine == "cuda")
        return printed(self.walk, layout, self.name)

    def options_for(self, machine: str) -> dict[str, int]:
        """Return what Triton is told of a launch; its compiler for AMD fails at the maximum of one row by one warp."""
        warps = max(self.layout.warps, 2) if machine == "hip" else self.layout.warps
        return {"num_warps": warps, "num_stages": self.layout.stages, **FUSED}

    def _bound(self, kernel: Any, names: Sequence[str], fixed: Mapping[str, Any], lines: int) -> Callable[..., None]:
        """Return a function to launch with: the tensors named last, those not fixed, are its arguments."""
        constants = [fixed[name] for name in names if name in fixed]
        varied = range(len(constants), len(names))
        read, options = itemgetter(*names[len(constants) :]), self.options_for(machine_of(self.device))
        grid = -(-int(fixed["item_count"]) * self.parts // lines)
        launch = launch_of(kernel, grid, options, varied, constants)
        return lambda tensors: launch([*constants, *read(tensors)])

    def __call__(self, tensors: Mapping[str, Tensor]) -> None:
        """Launch with inputs and results by name. Their heads must lie as in the tensors it was made for."""
        if self.idle:
            return
        if self.device.type == "cuda" and self.device.index != torch._C._cuda_getDevice():
            with torch.cuda.device(self.device):  # Triton launches on the current device
                self.run(tensors)
        else:
            self.run(tensors)

    def _cut(self, tensors: Mapping[str, Tensor]) -> None:
        """Launch, and combine the partial sums of cut windows, which lie in one allocation."""
        sums = torch.empty(sum(self.sums.values()), dtype=torch.float32, device=self.device)
        whole = {**tensors, **dict(zip(self.sums, sums.split(list(self.sums.values())), strict=True))}
        self.launch(whole)
        self.combine(whole)

    def _sums(self) -> dict[str, int]:
        """Return how many partial sums each array of windows that are cut has; all begin at multiples of `ALIGNED`."""
        rows, dots = self.slots * self.parts * self.layout.height, self.layout.height >= LEAST_DOT
        widths = {"top": 1, "sum": 1} if self.walk.online else {}
        for name, width in self.walk.widths(dict(self.layout.sizes)).items():
            widths[name] = padded(width, dots) if width else 1
        return {f"{name}_slots": -(-rows * width // ALIGNED) * ALIGNED for name, width in widths.items()}
