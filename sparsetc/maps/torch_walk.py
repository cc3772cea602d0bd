"""Walks as operations of torch, a window of rows after another: kernels on a CPU.

In: a `Walk`, and `RowTiles` that are well filled. Out: a function of tensors by name. The columns that a window meets
are gathered side by side, so that its products are products of matrices, and a softmax sees whole rows. Several heads
are computed together as long as their scores stay in a cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from sparsetc.maps.body import Walk
from sparsetc.maps.elementwise import Argument
from sparsetc.maps.kernel import Heads
from sparsetc.maps.row_tiles import RowTiles
from sparsetc.support.entry import matmul_precision, without_autocast
from sparsetc.support.lru import cached_property
from sparsetc.tensor.pattern import lasting
from sparsetc.tensor.sums import accumulator

CACHED = 1 << 19
"""Scores that are computed at once, 2 MB in float32 (2048 queries, 8 x 64, one thread, L2 caches of 1 MB: 1 << 17 took
.97 to 1.4 times as long, 1 << 20 .9 to 1.1)."""
LOWEST = -1e30
"""The least maximum of a row: finite, so that its difference from a score of minus infinity is no NaN."""
WORDS = {torch.float32: torch.int32, torch.float64: torch.int64}
MINUS_INFINITY = {torch.float32: -1 << 23, torch.float64: -1 << 52}
"""The bits of minus infinity. Pairs that do not meet are set by operations on bits: torch's `where` takes 6 times as
long, and products with 0 are NaN of infinities."""


@dataclass(frozen=True, eq=False)
class Window:
    """Some rows, and the columns that they meet: those of full tiles, then those of partial ones.

    Attributes:
        rows: the rows.
        heads: the heads that have this pattern.
        columns: neighbouring columns, or (columns,) their numbers.
        count: how many columns there are.
        full: the full tiles.
        part: the partial tiles.
    """

    rows: slice
    heads: range
    columns: slice | Tensor
    count: int
    full: slice
    part: slice


@cache
def _powers() -> Tensor:
    """Return (8,) the bits of a byte, lowest first; made at a call, as an export may import this module."""
    with lasting():
        return torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8)


class TorchWalk:
    """A walk over row tiles of neighbouring columns."""

    def __init__(self, walk: Walk, tiles: RowTiles, heads: Heads, precision: str) -> None:
        self.walk = walk
        self.precision = precision
        self.tiles = tiles
        self.heads = heads
        function, self.scales = walk.function.scaled(walk.products)
        self.function = function
        stored = {output for output, _ in walk.stored}
        self.weights: dict[str, Argument] = {}
        self.factors: dict[str, float] = {}
        for output in dict.fromkeys([*stored, *(output for output, *_ in walk.accumulated)]):
            whole = function.outputs[output], 1.0
            apart = output in stored or walk.online
            self.weights[output], self.factors[output] = whole if apart else function.peeled(output)
        self.read = function.inputs(self.weights.values())
        self.numbered = bool(walk.stored) or "entries" in [walk.vectors.get(name) for name in self.read]

    @cached_property
    def windows(self) -> list[Window]:
        """The windows that meet any columns."""
        tiles, heads = self.tiles, self.heads
        full_ends, part_ends = tiles.full_ptr.tolist(), tiles.part_ptr.tolist()
        windows = []
        for number in range(tiles.windows * tiles.patterns):
            which, window = divmod(number, tiles.windows)
            full, part = (slice(ends[number], ends[number + 1]) for ends in (full_ends, part_ends))
            blocks = torch.cat((tiles.full_col[full], tiles.part_col[part])).long()
            columns = (blocks[:, None] * tiles.width + torch.arange(tiles.width)).flatten()
            neighbours: slice | Tensor = columns.clamp(max=tiles.columns - 1)
            if len(columns) and int(columns[-1]) < tiles.columns and bool((columns.diff() == 1).all()):
                neighbours = slice(int(columns[0]), int(columns[-1]) + 1)
            rows = slice(window * tiles.height, min((window + 1) * tiles.height, tiles.rows))
            of_pattern = range(which * heads.parts, (which + 1) * heads.parts)
            if heads.fastest:
                of_pattern = range(which, heads.count, heads.patterns)
            windows.append(Window(rows, of_pattern, neighbours, len(columns), full, part))
        return windows

    def __call__(self, tensors: Mapping[str, Tensor]) -> None:
        """Compute, with inputs and results by name."""
        walk, group = self.walk, self.heads.group
        written = [*walk.targets, *walk.sums, *(["lse_out"] if walk.online else [])]
        wide = accumulator(tensors[written[0]].dtype)
        tables = {t for name in self.read & walk.products.keys() for t in walk.products[name]}
        tables |= {term for _, term, _ in walk.accumulated if isinstance(term, str)}
        tables |= {name for of in walk.sums.values() for name in of if name}
        names = tables | (self.read & walk.vectors.keys() - walk.sums.keys())
        inputs = {name: tensors[name].to(wide).contiguous() for name in names}
        if group > 1:  # heads of columns are repeated, and the gradients of each are summed
            inputs = {n: t if len(t) == self.heads.count else t.repeat_interleave(group, 0) for n, t in inputs.items()}
        results = {name: tensors[name] for name in written}
        if group > 1 and walk.mode:
            results = {n: t.new_empty((self.heads.count, *t.shape[1:]), dtype=wide) for n, t in results.items()}
        in_force = torch.get_float32_matmul_precision() == self.precision
        with without_autocast(self.tiles.bits.device), nullcontext() if in_force else matmul_precision(self.precision):
            for window in self.windows:
                self._window(window, inputs, results)
        if group > 1 and walk.mode:
            for name, result in results.items():
                tensors[name].copy_(result.unflatten(0, (-1, group)).sum(1))

    def _window(self, window: Window, inputs: Mapping[str, Tensor], results: Mapping[str, Tensor]) -> None:
        """Compute the rows of a window, for as many heads at once as stay in a cache."""
        tiles = self.tiles
        height = window.rows.stop - window.rows.start
        bits = tiles.bits[window.part, :height, None].contiguous().view(torch.uint8)
        met = (bits[:, :, :, None] & _powers()).ne(0).flatten(2).transpose(0, 1).flatten(1)
        entries = self._entries(window, met) if self.numbered else None
        met = met.to(WORDS[next(iter(inputs.values())).dtype]).neg_()
        at_once = max(CACHED // (height * max(window.count, 1)), 1)
        for first in range(0, len(window.heads), at_once):
            heads = window.heads[first : first + at_once]
            parts = range(first, first + len(heads)) if tiles.patterns > 1 else heads
            _Scores(self, window, heads, parts, met, entries, inputs).write(results)

    def _entries(self, window: Window, met: Tensor) -> Tensor:
        """Return (rows, columns) the number of each entry, and 0 of pairs that do not meet."""
        tiles = self.tiles
        assert tiles.full_base is not None
        assert tiles.part_base is not None
        below = met.unflatten(1, (-1, tiles.width)).long()
        part = (tiles.part_base[window.part, : len(met)].T[:, :, None] + below.cumsum(2) - below) * below
        full = tiles.full_base[window.full, : len(met)].T[:, :, None] + torch.arange(tiles.width)
        entries = torch.cat((full.flatten(1), part.flatten(1)), 1)
        return entries if tiles.order is None else tiles.order[entries].long()


class _Scores:
    """The scores of a window for some heads.

    Attributes:
        place: these heads, and the window's rows, of tables of rows.
        parts: numbers of these heads among those that have the window's pattern.
        met: (rows, columns of partial tiles) -1 where the pattern has the pair, else 0; as wide as scores.
        entries: (rows, columns) the number of each pair, where a walk reads or writes values of entries.
        inputs: by name.
    """

    def __init__(
        self,
        walk: TorchWalk,
        window: Window,
        heads: range,
        parts: range,
        met: Tensor,
        entries: Tensor | None,
        inputs: Mapping[str, Tensor],
    ) -> None:
        self.kernel = walk
        self.walk = walk.walk
        self.window = window
        self.heads = slice(heads.start, heads.stop, heads.step)
        self.place = self.heads, window.rows
        self.parts = slice(parts.start, parts.stop, parts.step)
        self.met = met
        self.entries = entries
        self.inputs = inputs
        self.dtype = next(iter(inputs.values())).dtype
        self.shape = len(heads), len(met), window.count
        self.gathered: dict[str, Tensor] = {}

    def own(self, name: str) -> Tensor:
        """Return the window's rows of a table or vector."""
        return self.inputs[name][self.place]

    def other(self, name: str) -> Tensor:
        """Return what a table or vector has for the window's columns."""
        if name not in self.gathered:
            table, columns = self.inputs[name][self.heads], self.window.columns
            self.gathered[name] = table[:, columns] if isinstance(columns, slice) else table.index_select(1, columns)
        return self.gathered[name]

    def write(self, results: Mapping[str, Tensor]) -> None:
        """Compute all results of these rows."""
        walk, place = self.walk, self.place
        values: dict[str, Tensor] = {}
        for name, (left, right, less) in walk.sums.items():
            total = (self.own(left) * self.own(right)).sum(-1)
            if less is not None:
                total -= self.own(less)
            results[name][place] = total
            values[name] = total[:, :, None]
        weights = self.weighted(values)
        divisor = None
        if walk.online:
            score = weights["p"]
            top = score.amax(-1).clamp_(min=LOWEST) if self.window.count else score.new_full(self.shape[:2], LOWEST)
            weights["p"] = score.sub_(top[:, :, None]).exp2_()
            divisor = weights["p"].sum(-1).clamp_(min=1.0)  # which the greatest score adds
            results["lse_out"][place] = top + divisor.log2()
        sums: dict[str, Tensor] = {}
        for output, term, name in walk.accumulated:
            weight = weights[output]
            part = torch.bmm(weight, self.other(term)) if isinstance(term, str) else weight.sum(-1)
            if self.kernel.factors[output] != 1:
                part *= self.kernel.factors[output]
            sums[name] = sums[name] + part if name in sums else part
        for name, part in sums.items():
            if divisor is not None:
                part /= divisor.view(*divisor.shape, *[1] * (part.ndim - 2))
            results[name][place] = part
        if walk.stored:
            assert self.entries is not None
            met = torch.nn.functional.pad(self.met != 0, (self.shape[2] - self.met.shape[1], 0), value=True)
            for output, name in walk.stored:
                results[name][self.parts, self.entries[met]] = weights[output][:, met].to(results[name].dtype)

    def weighted(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs of the map; 0 of pairs that do not meet, or minus infinity for a softmax."""
        walk, kernel = self.walk, self.kernel
        for name in kernel.read & walk.products.keys():
            left, right = walk.products[name]
            values[name] = torch.bmm(self.own(left) * kernel.scales.get(name, 1.0), self.other(right).transpose(1, 2))
        for name in kernel.read & walk.vectors.keys():
            side = walk.vectors[name]
            if side == "entries":
                values[name] = self.inputs[name][self.parts][:, self.entries]
            else:
                values[name] = self.own(name)[:, :, None] if side == "own" else self.other(name)[:, None, :]
        weights = {}
        part = self.met.shape[1]
        computed = kernel.function.computed(kernel.weights.values(), values, self.dtype)
        for output, value in zip(kernel.weights, computed, strict=True):
            if value.shape != self.shape or any(value is one for one in values.values()):
                value = value.expand(self.shape).clone(memory_format=torch.contiguous_format)
            if part:
                words = value[:, :, self.shape[2] - part :].view(WORDS[value.dtype])
                words &= self.met
                if walk.online:
                    words |= ~self.met & MINUS_INFINITY[value.dtype]
            weights[output] = value
        return weights
