"""Bodies on tensors, in one kernel a walk, with gradients.

In: a `Task`, which holds a body, the pairs that it is computed of and how it is done without these kernels, and
tensors. Out: its result. A first derivative takes a walk a mode, which computes weights anew from the logarithm of each
row's sum. Derivatives of these, and derivatives in batches, are those of the unfused function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from sparsetc import masks
from sparsetc.contraction.autograd import recordable
from sparsetc.maps.body import Body, Walk, backward, forward
from sparsetc.maps.kernel import Sides, kernel_of, sides_of
from sparsetc.maps.row_tiles import RowTiles, gathered, of_pattern, of_tiles, whole_blocks
from sparsetc.support.entry import entry_point, without_autocast
from sparsetc.support.lru import Lru
from sparsetc.tensor.pattern import Pattern, followed, lasting, transforming

Tensors = tuple[torch.Tensor, ...]

TILE_STEPS = 4
"""Steps of 32 gathered entries that take the time of a tile of 64 x 64: 3.4 ns of random blocks, .9 of a row's entries
(an H100, float16, 8 x 64, many of each)."""
ROW_STEP = 32
"""Entries of a row that are gathered at once."""
TILE = 64
"""Side of the tiles that are counted to choose between both."""


@dataclass(frozen=True, eq=False)
class Pairs:
    """The pairs that a body is computed of.

    Attributes:
        given: a coalesced pattern of two modes, of entries or blocks; or a mask.
        shape: queries and keys, or rows and columns.
        device: of the tensors.
    """

    given: Pattern | masks.Mask
    shape: tuple[int, int]
    device: torch.device

    @property
    def by_rows(self) -> bool:
        """Whether a window is one row whose columns are gathered, which takes less time if entries lie far apart."""
        return isinstance(self.given, Pattern) and self.given._once(("maps", "by rows"), partial(_by_rows, self.given))

    def row_tiles(self, mode: int, sides: Sides, numbered: bool) -> RowTiles:
        """Return the row tiles of a mode, made once."""
        given, height, width = self.given, sides.height, sides.width
        if not isinstance(given, Pattern):
            return self._of_mask(given, mode, height, width)
        make = gathered if height == 1 else of_pattern
        key = "maps", mode, height, width, numbered
        return given._once(key, lambda: make(given, mode, height, width, numbered))

    def _of_mask(self, mask: masks.Mask, mode: int, height: int, width: int) -> RowTiles:
        key = mask, mode, height, width, self.shape, self.device
        tiles = _of_masks.get(key)
        if tiles is None:
            seen, shape = (masks.turned(mask), self.shape[::-1]) if mode else (mask, self.shape)
            with lasting():
                found = masks.tiles_of(seen, shape, height, width, self.device)
                tiles = _of_masks.put(key, of_tiles(*found, shape, height, width))
        return tiles


_of_masks: Lru[Any, RowTiles] = Lru(masks.KEPT)


def _by_rows(pattern: Pattern) -> bool:
    """Return True if steps of a row's entries cost less than the tiles that hold them."""
    if pattern.blocks is not None:
        return False
    row, column = pattern.coords
    across = -(-pattern.shape[1] // TILE)
    tiles = len(torch.unique(row // TILE * across + column // TILE))
    steps = int((-(-torch.bincount(row) // ROW_STEP)).sum())
    return steps < TILE_STEPS * tiles


@dataclass(frozen=True, eq=False)
class Task:
    """A body of one result, ready for tensors.

    Attributes:
        body: what is computed.
        pairs: of which.
        unfused: the same function of the same tensors, by other means: differentiable any number of times.
        precision: of float32.
        cache_dir: folder of generated sources.
        name: what generated files are named after.
    """

    body: Body
    pairs: Pairs
    unfused: Callable[..., torch.Tensor]
    precision: str
    cache_dir: Path | None
    name: str

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the tensors, in order: tables (heads, rows, size), then vectors (heads, rows or entries)."""
        return inputs_of(self.body)

    def sides(self, tensors: Mapping[str, torch.Tensor], backward: bool) -> Sides | None:
        """Return the sides of tiles; None where no kernel is right for such tensors."""
        body = self.body
        tables = [t for name, t in tensors.items() if name not in body.vectors]
        numbered = "entries" in body.vectors.values()
        sizes = [t.shape[-1] for t in tables]
        if isinstance(self.pairs.given, masks.Mask) and numbered:
            return None
        return sides_of(sizes, tables[0].dtype, numbered, backward, self.pairs.by_rows)

    def refusal(self, tensors: Mapping[str, torch.Tensor]) -> str:
        """Return why no kernel is right for such tensors; empty where there is one."""
        for back in (False, True):
            sides = self.sides(tensors, back)
            if sides is None:
                return "rows of tables are too long, or numbers by entry stand beside a mask"
            if isinstance(self.pairs.given, Pattern) and not whole_blocks(self.pairs.given, sides.height, sides.width):
                return "the sides of blocks neither divide those of tiles nor are divided by them"
        return ""


@lru_cache(maxsize=64)
def inputs_of(body: Body) -> tuple[str, ...]:
    """Return the names of a body's tables, in order, and of its vectors."""
    tables = dict.fromkeys([t for pair in body.products.values() for t in pair])
    return (*dict.fromkeys([*tables, *body.accumulated.values()]), *body.vectors)


@lru_cache(maxsize=64)
def walk_of(body: Body, mode: int, wanted: tuple[str, ...] | None) -> Walk:
    """Return a walk of a body, traced once: for gradients of the wanted inputs, or for results."""
    return forward(body) if wanted is None else backward(body, mode, wanted)


@entry_point
def fused(task: Task, *tensors: torch.Tensor) -> torch.Tensor:
    """Return the result (heads, rows, size) of a task whose `refusal` is empty.

    Args:
        task: what is computed.
        tensors: as `Task.inputs` says, of one number of heads, and one dtype but for vectors.
    """
    ready = tuple(recordable(_rows_whole(t)) for t in tensors)
    if followed(ready):
        result: torch.Tensor = _Fused.apply(task, *ready)
        return result
    return _results(task, ready)[0]


def _rows_whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with the elements of a row next to one another."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def _results(task: Task, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the result, and of a softmax the logarithm to base 2 of each row's sum."""
    named = dict(zip(task.inputs, tensors, strict=True))
    ((name, table),) = task.body.accumulated.items()
    columns = named[table]
    heads, rows = columns.shape[0], task.pairs.shape[0]
    result = columns.new_empty((heads, rows, columns.shape[-1]))
    made = {name: result}
    if task.body.softmax:
        made["lse_out"] = columns.new_empty((heads, rows), dtype=torch.float32)
    sides = task.sides(named, backward=False)
    _launch(task, walk_of(task.body, 0, None), sides, named, made)
    return result, made.get("lse_out")


def _launch(
    task: Task, walk: Walk, sides: Sides | None, named: dict[str, torch.Tensor], made: dict[str, torch.Tensor]
) -> None:
    assert sides is not None
    numbered = "entries" in task.body.vectors.values()
    tiles = task.pairs.row_tiles(walk.mode, sides, numbered)
    tensors = {**named, **made}
    kind = "result" if not walk.mode and walk.online else f"gradients_{walk.mode}"
    kernel_of(walk, tiles, tensors, sides, task.precision, task.cache_dir, f"{task.name}_{kind}")(tensors)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, task: Task, *tensors: torch.Tensor) -> torch.Tensor:
        result, lse = _results(task, tensors)
        ctx.task = task
        ctx.save_for_backward(*tensors, result, lse)
        return result

    @staticmethod
    @entry_point
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *tensors, result, lse = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1:]
        batched = torch._C._functorch.is_legacy_batchedtensor(upstream) or transforming()
        with without_autocast(upstream.device):
            if batched or torch.is_grad_enabled():
                gradients = _unfused_gradients(ctx.task, tuple(tensors), wanted, upstream)
            else:
                gradients = _gradients(ctx.task, tuple(tensors), wanted, upstream, result, lse)
        return None, *gradients


def _gradients(
    task: Task,
    tensors: Tensors,
    wanted: tuple[bool, ...],
    upstream: torch.Tensor,
    result: torch.Tensor,
    lse: torch.Tensor | None,
) -> list[torch.Tensor | None]:
    """Return the gradients that are wanted: a walk a mode."""
    named = dict(zip(task.inputs, tensors, strict=True))
    sides = task.sides(named, backward=True)
    names = tuple(name for name, want in zip(task.inputs, wanted, strict=True) if want)
    ((name, _),) = task.body.accumulated.items()
    upstream = _rows_whole(upstream)
    given = {**named, f"g_{name}": upstream}
    if lse is not None:
        given |= {"lse": lse, "delta": (result.float() * upstream).sum(-1)}
    gradients: dict[str, torch.Tensor] = {}
    for mode in (0, 1):
        walk = walk_of(task.body, mode, names)
        targets = [target for *_, target in walk.accumulated] + [target for _, target in walk.stored]
        if not targets:
            continue
        made = {t: torch.empty_like(named[t[5:]], memory_format=torch.contiguous_format) for t in targets}
        _launch(task, walk, sides, given, made)
        gradients |= made
    return [gradients.get(f"grad_{name}") for name in task.inputs]


def _unfused_gradients(
    task: Task, tensors: Tensors, wanted: tuple[bool, ...], upstream: torch.Tensor
) -> list[torch.Tensor | None]:
    """Return the gradients that are wanted as functions of the tensors and the upstream one."""
    further = torch.is_grad_enabled()
    with torch.enable_grad():
        own = [t.view_as(t) for t in tensors]  # apart, where two inputs are one tensor
        result = task.unfused(*own)
        inputs = [t for t, want in zip(own, wanted, strict=True) if want]
        gradients = iter(torch.autograd.grad(result, inputs, upstream, create_graph=further))
    return [next(gradients) if want else None for want in wanted]
