"""Walks as operations of torch, a window of rows after another: kernels on a CPU.

In: a `Walk`, and `RowTiles` that are well filled. Out: a function of tensors by name. The columns that a window meets
are gathered side by side, so that its products are products of matrices, and a softmax sees whole rows. Several heads
are computed together as long as their scores stay in a cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from sparsetc.maps.body import KEEP, Walk, keeps
from sparsetc.maps.kernel import Heads
from sparsetc.maps.row_tiles import RowTiles
from sparsetc.support import cached_property
from sparsetc.support.entry import matmul_precision, without_autocast
from sparsetc.tensor.dtypes import accumulator
from sparsetc.tensor.pattern import lasting

CACHED = 1 << 19
"""Scores that are computed at once, 2 MB in float32; gradients, which have two products, take half as many (2048
queries, 8 x 64, one thread, L2 caches of 1 MB: 1 << 17 took .97 to 1.4 times as long, 1 << 20 .9 to 1.1; gradients of a
causal mask by 1 << 19 each up to 1.6, as its memory went back to the system between operations). Of several windows
half as many again, beside the columns that are gathered (blocks of 32 at 10 %: .78 of the time of one by one)."""
NEAR, FAR = "near_hash", "far_hash"
LOWEST = -1e30
"""The least maximum of a row: finite, so that its difference from a score of minus infinity is no NaN."""
WORDS = {torch.float32: torch.int32, torch.float64: torch.int64}
MINUS_INFINITY = {torch.float32: -1 << 23, torch.float64: -1 << 52}
"""The bits of minus infinity. Pairs that do not meet are set by operations on bits: torch's `where` takes 6 times as
long, and products with 0 are NaN of infinities."""


def mixed(x: Tensor) -> Tensor:
    """Return a hash of 32 bits of int32 (lowbias32, Wellons 2018)."""
    for shift, times in ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32))):
        x = (x ^ (x >> shift).bitwise_and_((1 << 32 - shift) - 1)).mul_(times)
    return x ^ (x >> 16).bitwise_and_(0xFFFF)


def multiplied_by(near: Tensor, far: Tensor, share: float, dtype: torch.dtype) -> Tensor:
    """Return 0 for a share of pairs, by hashes of both positions, and what others are multiplied by."""
    least, factor = keeps(share)
    kept = (mixed(near ^ far) ^ -(2**31)).ge_(least - 2**31).to(dtype)  # compared without signs
    return kept.mul_(factor)


@dataclass(frozen=True, eq=False)
class Windows:
    """Some windows of as many columns each, those of full tiles and then those of partial ones.

    Attributes:
        numbers: (windows,) of the windows; neighbouring rows if there is one.
        heads: the heads that have this pattern.
        columns: neighbouring columns, or the numbers of blocks of `unit` columns, window by window.
        count: how many columns each has.
        height: how many rows each has.
        unit: columns that are gathered together.
        full: the full tiles, window by window.
        part: the partial tiles.
    """

    numbers: slice | Tensor
    heads: range
    columns: slice | Tensor
    count: int
    height: int
    unit: int
    full: Tensor
    part: Tensor

    @property
    def size(self) -> int:
        """The number of windows that are computed one by one."""
        return 1 if isinstance(self.numbers, slice) else len(self.numbers)

    def own(self, table: Tensor) -> Tensor:
        """Return the windows' rows of a table or vector, (heads * windows, rows, ...)."""
        of_heads = table[_slice(self.heads)]
        if isinstance(self.numbers, slice):
            return of_heads[:, self.numbers]
        return of_heads.unflatten(1, (-1, self.height)).index_select(1, self.numbers).flatten(0, 1)

    def put(self, result: Tensor, rows: Tensor) -> None:
        """Write the windows' rows of a result."""
        of_heads = result[_slice(self.heads)]
        if isinstance(self.numbers, slice):
            of_heads[:, self.numbers] = rows
        else:
            by_window = rows.to(result.dtype).unflatten(0, (-1, len(self.numbers)))
            of_heads.unflatten(1, (-1, self.height)).index_copy_(1, self.numbers, by_window)

    def other(self, table: Tensor) -> Tensor:
        """Return what a table or vector has for the windows' columns, (heads * windows, columns, ...)."""
        of_heads = table[_slice(self.heads)]
        if isinstance(self.columns, slice):
            return of_heads[:, self.columns]
        units = of_heads.unflatten(1, (-1, self.unit)).index_select(1, self.columns)
        return units.view(len(self.heads) * self.size, self.count, *table.shape[2:])


def _slice(numbers: range) -> slice:
    return slice(numbers.start, numbers.stop, numbers.step)


@cache
def _powers() -> Tensor:
    """Return (8,) the bits of a byte, lowest first; made at a call, as an export may import this module."""
    with lasting():
        return torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8)


class TorchWalk:
    """A walk over row tiles of neighbouring columns."""

    def __init__(self, walk: Walk, tiles: RowTiles, heads: Heads, precision: str) -> None:
        function, self.scales = walk.function.scaled(walk.products)
        self.walk = walk = replace(walk, function=function)
        self.precision = precision
        self.tiles = tiles
        self.heads = heads
        self.far = [*walk.other, *(name for name, side in walk.vectors.items() if side == "other")]
        less = [name for *_, name in walk.sums.values() if name]
        self.names = {*walk.own, *walk.other, *walk.vectors, *less}
        self.at_once = CACHED // max(len(walk.products), 1)

    @cached_property
    def windows(self) -> list[Windows]:
        """The windows that meet any columns, those of as many columns together."""
        tiles, heads = self.tiles, self.heads
        height = tiles.height
        unit = 1 if tiles.columns % tiles.width else tiles.width
        full_ends, part_ends = tiles.full_ptr.tolist(), tiles.part_ptr.tolist()
        windows: list[Windows] = []
        alike: dict[tuple[int, ...], list[tuple[int, Tensor, Tensor, Tensor]]] = {}
        of_patterns: dict[int, range] = {}
        for number in range(tiles.windows * tiles.patterns):
            which, window = divmod(number, tiles.windows)
            full, part = (torch.arange(*ends[number : number + 2]) for ends in (full_ends, part_ends))
            blocks = torch.cat((tiles.full_col[full], tiles.part_col[part])).long()
            columns = (blocks[:, None] * tiles.width + torch.arange(tiles.width)).flatten()
            of_rows = min(height, tiles.rows - window * height)
            rows: slice | Tensor = slice(window * height, window * height + of_rows)
            of_pattern = range(which * heads.parts, (which + 1) * heads.parts)
            if heads.fastest:
                of_pattern = range(which, heads.count, heads.patterns)
            met = blocks if unit > 1 else columns.clamp(max=tiles.columns - 1)
            near = len(columns) > 0 and int(columns[-1]) < tiles.columns and bool((columns.diff() == 1).all())
            if near or unit == 1 or tiles.rows % height:
                chosen = slice(int(columns[0]), int(columns[-1]) + 1) if near else met
                windows.append(Windows(rows, of_pattern, chosen, len(columns), of_rows, unit, full, part))
            else:
                alike.setdefault((which, len(full), len(part)), []).append((window, blocks, full, part))
                of_patterns[which] = of_pattern
        for (which, *counts), members in alike.items():
            count = sum(counts) * tiles.width
            most = max(self.at_once // 2 // (heads.parts * height * max(count, 1)), 1)
            for first in range(0, len(members), most):
                numbers, *lists = zip(*members[first : first + most], strict=True)
                blocks, full, part = map(torch.cat, lists)
                rows = torch.tensor(numbers)
                windows.append(Windows(rows, of_patterns[which], blocks, count, height, unit, full, part))
        return windows

    def __call__(self, tensors: Mapping[str, Tensor]) -> None:
        """Compute, with inputs and results by name."""
        walk, group = self.walk, self.heads.group
        wide = accumulator(tensors[walk.targets[0]].dtype)
        inputs = {name: tensors[name].contiguous() for name in self.names}
        inputs = {name: t.to(wide) if t.is_floating_point() else t for name, t in inputs.items()}
        if walk.dropout:
            inputs |= self._hashes(tensors["seed"])
        if group > 1:  # heads of columns are repeated, and the gradients of each are summed
            inputs = {n: t if len(t) == self.heads.count else t.repeat_interleave(group, 0) for n, t in inputs.items()}
        results = {name: tensors[name] for name in walk.written}
        if group > 1 and walk.mode:
            results = {n: t.new_empty((self.heads.count, *t.shape[1:]), dtype=wide) for n, t in results.items()}
        in_force = torch.get_float32_matmul_precision() == self.precision
        with without_autocast(self.tiles.bits.device), nullcontext() if in_force else matmul_precision(self.precision):
            for windows in self.windows:
                self._compute(windows, wide, inputs, results)
        if group > 1 and walk.mode:
            for name, result in results.items():
                tensors[name].copy_(result.unflatten(0, (-1, group)).sum(1))

    def _hashes(self, seed: Tensor) -> dict[str, Tensor]:
        """Return (heads, positions) hashes of own positions and of others, of which those of rows differ by head."""
        head = (seed.flatten() + torch.arange(self.heads.count)).int()[:, None]
        sizes = self.tiles.rows, self.tiles.columns
        own, other = (torch.arange(size, dtype=torch.int32).expand(len(head), -1) for size in sizes)
        if self.walk.mode:
            return {NEAR: mixed(own), FAR: mixed(mixed(head) + other)}
        return {NEAR: mixed(mixed(head) + own), FAR: mixed(other)}

    def _compute(
        self, windows: Windows, dtype: torch.dtype, inputs: Mapping[str, Tensor], results: Mapping[str, Tensor]
    ) -> None:
        """Compute the rows of some windows, for as many heads at once as stay in a cache."""
        tiles, height = self.tiles, windows.height
        met = torch.empty((windows.size, height, 0), dtype=torch.bool)
        if len(windows.part):
            bits = tiles.bits[windows.part, :height, None].unflatten(0, (windows.size, -1)).contiguous()
            met = (bits.view(torch.uint8)[..., None] & _powers()).ne(0).flatten(3).transpose(1, 2).flatten(2)
        entries = self._entries(windows, met) if self.walk.by_entry else None
        met = met.to(WORDS[dtype]).neg_()
        at_once = max(self.at_once // (windows.size * height * max(windows.count, 1)), 1)
        for first in range(0, len(windows.heads), at_once):
            heads = windows.heads[first : first + at_once]
            parts = slice(first, first + len(heads)) if tiles.patterns > 1 else _slice(heads)
            self._write(replace(windows, heads=heads), parts, met, entries, dtype, inputs, results)

    def _entries(self, windows: Windows, met: Tensor) -> Tensor:
        """Return (windows, rows, columns) the number of each entry, and 0 of pairs that do not meet."""
        tiles, (size, height, _) = self.tiles, met.shape
        assert tiles.full_base is not None
        assert tiles.part_base is not None
        below = met.unflatten(2, (-1, tiles.width)).long()
        full, part = (
            base[which, :height].unflatten(0, (size, -1)).transpose(1, 2)[..., None]
            for base, which in ((tiles.full_base, windows.full), (tiles.part_base, windows.part))
        )
        of_full = (full + torch.arange(tiles.width)).flatten(2)
        of_part = ((part + below.cumsum(3) - below) * below).flatten(2)
        entries = torch.cat((of_full, of_part), 2)
        return entries if tiles.order is None else tiles.order[entries].long()

    def _write(
        self,
        windows: Windows,
        parts: slice,
        met: Tensor,
        entries: Tensor | None,
        dtype: torch.dtype,
        inputs: Mapping[str, Tensor],
        results: Mapping[str, Tensor],
    ) -> None:
        """Compute all results of some windows' rows, whose scores are (heads * windows, rows, columns).

        Args:
            windows: with the heads that are computed together.
            parts: numbers of these heads among those that have the windows' pattern.
            met: (windows, rows, columns of partial tiles) -1 where the pattern has the pair, else 0; as wide as scores.
            entries: (windows, rows, columns) the number of each pair, where a walk reads or writes values of entries.
            dtype: of the scores.
            inputs: by name.
            results: by name.
        """
        walk, shape = self.walk, (len(windows.heads) * windows.size, windows.height, windows.count)
        far = {name: windows.other(inputs[name]) for name in self.far}
        values: dict[str, Tensor] = {}
        for name, (left, right, less) in walk.sums.items():
            total = (windows.own(inputs[left]) * windows.own(inputs[right])).sum(-1)
            if less is not None:
                total -= windows.own(inputs[less])
            windows.put(results[name], total)
            values[name] = total[:, :, None]
        for name, (left, right) in walk.products.items():
            scaled = windows.own(inputs[left]) * self.scales.get(name, 1.0)
            values[name] = torch.bmm(scaled, far[right].transpose(1, 2))
        if walk.dropout:
            near, other = windows.own(inputs[NEAR])[:, :, None], windows.other(inputs[FAR])[:, None]
            values[KEEP] = multiplied_by(near, other, walk.dropout, dtype)
        at: dict[str, Tensor] = {}
        for name, side in walk.vectors.items():
            if side == "entries":
                values[name] = inputs[name][parts][:, entries].flatten(0, 1)
            elif side != "places":
                values[name] = windows.own(inputs[name])[:, :, None] if side == "own" else far[name][:, None, :]
        for name in walk.places:  # alike for all heads
            numbers, place = inputs[name][_slice(windows.heads)], walk.places[name]
            each = place.of({one: values[one][: windows.size] for one in place.reads})
            each = each.long().remainder_(numbers.shape[1])
            at[name] = each.expand(windows.size, *shape[1:]).reshape(1, -1)
            values[name] = numbers[:, at[name][0]].view(shape)
        weights = self._weights(values, shape, met, dtype)
        divisor = None
        if walk.online:
            score, (_, factor) = weights["p"], walk.weights["p"]
            if factor != 1:
                score *= factor
            top = score.amax(-1).clamp_(min=LOWEST) if windows.count else score.new_full(shape[:2], LOWEST)
            weights["p"] = score.sub_(top[:, :, None]).exp2_()
            divisor = weights["p"].sum(-1).clamp_(min=1.0)  # which the greatest score adds
            windows.put(results["lse_out"], top + divisor.log2())
            if walk.dropout:
                weights["p"] *= values[KEEP]
        sums: dict[str, Tensor] = {}
        for output, term, name in walk.accumulated:
            weight = weights[output]
            part = torch.bmm(weight, far[term]) if isinstance(term, str) else weight.sum(-1)
            if walk.factors[name] != 1:
                part *= walk.factors[name]
            sums[name] = sums[name] + part if name in sums else part
        for name, part in sums.items():
            if divisor is not None:
                part /= divisor.view(*divisor.shape, *[1] * (part.ndim - 2))
            windows.put(results[name], part)
        for output, vector, name in walk.stored:
            weight, result = weights[output].unflatten(0, (-1, windows.size)), results[name]
            if vector:
                by_head, of_heads = weight.flatten(1), result[_slice(windows.heads)]
                of_heads.copy_(of_heads.scatter_add(1, at[vector].expand_as(by_head), by_head))
                continue
            assert entries is not None
            stored = torch.nn.functional.pad(met != 0, (windows.count - met.shape[2], 0), value=True)
            result[parts, entries[stored]] = weight[:, stored].to(result.dtype)

    def _weights(
        self, values: Mapping[str, Tensor], shape: tuple[int, int, int], met: Tensor, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Return the outputs of the map; 0 of pairs that do not meet, or minus infinity for a softmax."""
        walk, part = self.walk, met.shape[2]
        vectors = [values[name] for name, side in walk.vectors.items() if side in ("own", "other")]
        computed = walk.function.computed([argument for argument, _ in walk.weights.values()], values, dtype)
        weights = {}
        for output, value in zip(walk.weights, computed, strict=True):
            if value.shape != shape or any(value is one for one in vectors):  # of an input, not to be written to
                value = value.expand(shape).clone(memory_format=torch.contiguous_format)
            if part:
                by_window = value.unflatten(0, (-1, len(met)))[..., shape[2] - part :]
                words = by_window.view(met.dtype)
                words &= met
                if walk.online:
                    words |= ~met & MINUS_INFINITY[value.dtype]
            weights[output] = value
        return weights
