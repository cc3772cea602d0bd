"""Bodies on tensors, in one kernel a walk, with gradients.

In: a `Task`, which holds a body and the pairs that it is computed of, and tensors. Out: its result. A first derivative
takes a walk a mode, which computes weights anew from the logarithm of each row's sum. Derivatives of these, and
derivatives in batches, are those of a function that computes the same by other means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from sparsetc import masks
from sparsetc.contraction.autograd import recordable
from sparsetc.maps.body import SIDES, Body, Walk, backward, forward
from sparsetc.maps.kernel import Sides, WalkKernel, sides_of
from sparsetc.maps.row_tiles import RowTiles, gathered, of_pattern, of_tiles, whole_blocks
from sparsetc.support.entry import entry_point, without_autocast
from sparsetc.support.lru import Lru
from sparsetc.tensor.pattern import Pattern, followed, lasting, transforming

Made = TypeVar("Made")
Tensors = Sequence[torch.Tensor]

KEPT = 16
"""Sets of gradients and their strides that kernels are kept for. Not measured."""

SQUARE, NARROW = 64, 32
"""Columns of the tiles that are compared, of 64 rows each, with steps of 32 entries of one row, which are gathered."""
PRICES = {SQUARE: 4.0, NARROW: 2.4, 1: 1.0}
"""What a tile of each width, or a step of a row, costs (H200, float16, 8 x 64, CUDA graphs: narrow tiles took .5 to .7
times as long a tile; an H100: 3.4 ns a square, .9 a step)."""


@dataclass(frozen=True, eq=False)
class Pairs:
    """The pairs that a body is computed of.

    Attributes:
        given: a mask, or a coalesced pattern of two modes, of entries or blocks; of entries if these have numbers.
        shape: queries and keys, or rows and columns.
        device: of the tensors.
    """

    given: Pattern | masks.Mask
    shape: tuple[int, int]
    device: torch.device

    @property
    def width(self) -> int:
        """Columns of the tiles that cost least; 1 where it costs less to gather the entries of each row."""
        if not isinstance(self.given, Pattern):
            return SQUARE
        return self.given._once(("maps", "width"), partial(_cheapest, self.given))

    def kept(self, key: tuple[Any, ...], make: Callable[[], Made]) -> Made:
        """Return what is made for these pairs once: kept with the pattern, or by the mask."""
        if isinstance(self.given, Pattern):
            return self.given._once(key, make)
        of_mask = self.given, self.device, *key
        made: Made | None = masks.kept.get(of_mask)
        if made is None:
            with lasting():
                made = masks.kept.put(of_mask, make())
        return made

    def row_tiles(self, mode: int, sides: Sides, numbered: bool) -> RowTiles:
        """Return the row tiles of a mode, made once."""
        key = "row tiles", mode, sides.height, sides.width, numbered, self.shape
        return self.kept(key, lambda: self._row_tiles(mode, sides.height, sides.width, numbered))

    def _row_tiles(self, mode: int, height: int, width: int, numbered: bool) -> RowTiles:
        given = self.given
        if isinstance(given, Pattern):
            return (gathered if height == 1 else of_pattern)(given, mode, height, width, numbered)
        mask, shape = (given.turned, self.shape[::-1]) if mode else (given, self.shape)
        return of_tiles(*masks.tiles_of(mask, shape, height, width, self.device), shape, height, width)


def _cheapest(pattern: Pattern) -> int:
    """Return the width of tiles, or 1 for rows, by which a pattern costs least."""
    if not whole_blocks(pattern, SQUARE, NARROW):
        return SQUARE  # which is refused
    costs = {}
    for width in (SQUARE, NARROW):
        sides = (1, 1) if pattern.blocks is None else tuple(map(min, pattern.blocks.sides, (SQUARE, width)))
        pieces = pattern if pattern.blocks is None else pattern.cut(sides)[0]
        row, column = (place * side for place, side in zip(pieces.coords, sides, strict=True))
        across = -(-pieces.shape[1] * sides[1] // width)
        costs[width] = PRICES[width] * len(torch.unique(row // SQUARE * across + column // width))
    if pattern.blocks is None:
        costs[1] = PRICES[1] * int((-(-torch.bincount(pattern.coords[0]) // NARROW)).sum())
    return min(costs, key=costs.__getitem__)


@dataclass(frozen=True, eq=False)
class Task:
    """A body on tensors of certain sizes and strides.

    Attributes:
        body: what is computed.
        pairs: of which.
        precision: of float32.
        cache_dir: folder of generated sources.
        name: what generated files are named after.
    """

    body: Body
    pairs: Pairs
    precision: str
    cache_dir: Path | None
    name: str

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the tensors, in order: tables (heads, rows, size), then vectors (heads, rows or entries)."""
        return inputs_of(self.body)

    def kernels(self, tensors: Tensors) -> Kernels:
        """Return what is kept for tensors of these sizes, strides and types.

        Raises:
            Untraced: kernels cannot compute the body's map or its derivative.
        """
        layout = tuple([(t.shape, t.stride(), t.dtype) for t in tensors])
        key = "maps", self.body, self.pairs.shape, layout, self.precision, self.cache_dir
        return self.pairs.kept(key, lambda: Kernels(self, tensors))


class Kernels:
    """The kernels of a task for tensors of certain sizes and strides; it keeps none of them.

    Attributes:
        refusal: why there are none; empty where there are.
    """

    def __init__(self, task: Task, tensors: Tensors) -> None:
        pairs, body = task.pairs, task.body
        self.body, self.inputs = body, task.inputs
        self.gradients: Lru[Any, list[WalkKernel]] = Lru(KEPT)
        tables = [t for name, t in zip(self.inputs, tensors, strict=True) if name not in body.vectors]
        numbered = "entries" in body.vectors.values()
        sizes, dtype = [t.shape[-1] for t in tables], tables[0].dtype
        width = min(pairs.width, NARROW if numbered else SQUARE)  # entries are counted in words of 32 bits
        sides = [sides_of(sizes, dtype, back, width) for back in (False, True)]
        self.refusal = _refusal(pairs, sides)
        if self.refusal:
            return
        forward, backward = (one for one in sides if one)
        self.tiles = [pairs.row_tiles(0, forward, numbered)]
        self.tiles += [pairs.row_tiles(mode, backward, numbered) for mode in (0, 1)]
        self.sides, self.made_by = (forward, backward), (task.precision, task.cache_dir, task.name)
        self.rows = pairs.shape[0]
        named = dict(zip(self.inputs, tensors, strict=True))
        self.result = self._kernel(0, walk_of(body, 0, None), {**named, **self.results(named)})

    def _kernel(self, number: int, walk: Walk, tensors: Mapping[str, torch.Tensor]) -> WalkKernel:
        precision, cache_dir, name = self.made_by
        kind = f"{name}_{'result' if not number else f'gradients_{SIDES[walk.mode]}'}"
        return WalkKernel(walk, self.tiles[number], tensors, self.sides[number > 0], precision, cache_dir, kind)

    def results(self, named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return memory for the result and, of a softmax, for ``lse_out``: the logarithms to base 2 of rows' sums."""
        name, table = self.body.accumulated
        heads, _, size = named[table].shape
        made = {name: named[table].new_empty((heads, self.rows, size))}
        if self.body.softmax:
            made["lse_out"] = named[table].new_empty((heads, self.rows), dtype=torch.float32)
        return made

    def of_gradients(self, given: Mapping[str, torch.Tensor], wanted: tuple[str, ...]) -> list[WalkKernel]:
        """Return the kernels that give ``grad_`` of each wanted input.

        Args:
            given: inputs, the result, its gradient, and of a softmax `lse` and `delta`, by name.
            wanted: names of inputs.
        """
        key = wanted, given[f"g_{self.body.accumulated[0]}"].stride()
        return self.gradients.once(key, lambda: self._of_gradients(given, wanted))

    def _of_gradients(self, given: Mapping[str, torch.Tensor], wanted: tuple[str, ...]) -> list[WalkKernel]:
        walks = [walk_of(self.body, mode, wanted) for mode in (0, 1)]
        if walks[1].targets and self.body.softmax and not walks[0].targets:  # the rows' walk gives delta
            walks[0] = walk_of(self.body, 0, (self.inputs[0], *wanted))
        made = gradients_of([name for walk in walks for name in walk.targets], given)
        return [self._kernel(n, walk, {**given, **made}) for n, walk in enumerate(walks, 1) if walk.targets]


def gradients_of(targets: Iterable[str], given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return memory for gradients ``grad_x`` of inputs x."""
    return {t: torch.empty_like(given[t[len("grad_") :]], memory_format=torch.contiguous_format) for t in targets}


def _refusal(pairs: Pairs, sides: Sequence[Sides | None]) -> str:
    if None in sides:
        return "rows of operands are too long"
    given = pairs.given
    whole = isinstance(given, masks.Mask) or all(s and whole_blocks(given, s.height, s.width) for s in sides)
    return "" if whole else "the sides of blocks neither divide those of tiles nor are divided by them"


@lru_cache(maxsize=64)
def inputs_of(body: Body) -> tuple[str, ...]:
    """Return the names of a body's tables, in order, and of its vectors."""
    tables = dict.fromkeys([*(t for pair in body.products.values() for t in pair), body.accumulated[1]])
    return (*tables, *body.vectors)


@lru_cache(maxsize=64)
def walk_of(body: Body, mode: int, wanted: tuple[str, ...] | None) -> Walk:
    """Return a walk of a body, traced once: for gradients of the wanted inputs, or for the result."""
    return forward(body) if wanted is None else backward(body, mode, wanted)


@entry_point
def fused(kernels: Kernels, unfused: Callable[..., torch.Tensor], tensors: Tensors) -> torch.Tensor:
    """Return the result (heads, rows, size) of a task.

    Args:
        kernels: of the task, for these tensors; without a refusal.
        unfused: the same function of the same tensors by other means, differentiable any number of times.
        tensors: as `Task.inputs` says, of one number of heads, and tables of one dtype.
    """
    ready = tuple([recordable(t) for t in tensors])
    if followed(ready):
        result: torch.Tensor = _Fused.apply(kernels, unfused, *ready)
        return result
    return _results(kernels, ready)[0]


def rows_whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with the elements of a row next to one another."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def _results(kernels: Kernels, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the result and, of a softmax, the logarithm to base 2 of each row's sum."""
    named = dict(zip(kernels.inputs, tensors, strict=True))
    made = kernels.results(named)
    kernels.result({**named, **made})
    return made[kernels.body.accumulated[0]], made.get("lse_out")


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: Kernels, unfused: Any, *tensors: torch.Tensor) -> torch.Tensor:
        result, lse = _results(kernels, tensors)
        ctx.kernels, ctx.unfused = kernels, unfused
        ctx.save_for_backward(*tensors, result, lse)
        return result

    @staticmethod
    @entry_point
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *tensors, result, lse = ctx.saved_tensors
        wanted = ctx.needs_input_grad[2:]
        batched = torch._C._functorch.is_legacy_batchedtensor(upstream) or transforming()
        with without_autocast(upstream.device):
            if batched or torch.is_grad_enabled():
                gradients = _unfused_gradients(ctx.unfused, tensors, wanted, upstream)
            else:
                gradients = _gradients(ctx.kernels, tensors, wanted, upstream, result, lse)
        return None, None, *gradients


def _gradients(
    kernels: Kernels,
    tensors: list[torch.Tensor],
    wanted: tuple[bool, ...],
    upstream: torch.Tensor,
    result: torch.Tensor,
    lse: torch.Tensor | None,
) -> list[torch.Tensor | None]:
    """Return the gradients that are wanted: a walk a mode."""
    names = tuple([name for name, want in zip(kernels.inputs, wanted, strict=True) if want])
    name = kernels.body.accumulated[0]
    tables = {**dict(zip(kernels.inputs, tensors, strict=True)), name: result, f"g_{name}": rows_whole(upstream)}
    if lse is not None:
        tables |= {"lse": lse, "delta": torch.empty_like(lse)}
    walks = kernels.of_gradients(tables, names)
    made = gradients_of([target for kernel in walks for target in kernel.walk.targets], tables)
    tables |= made
    for kernel in walks:
        kernel(tables)
    return [made[f"grad_{name}"] if want else None for name, want in zip(kernels.inputs, wanted, strict=True)]


def _unfused_gradients(
    unfused: Callable[..., torch.Tensor], tensors: list[torch.Tensor], wanted: tuple[bool, ...], upstream: torch.Tensor
) -> list[torch.Tensor | None]:
    """Return the gradients that are wanted as functions of the tensors and the upstream one."""
    further = torch.is_grad_enabled()
    with torch.enable_grad():
        own = [t.view_as(t) for t in tensors]  # apart, where two inputs are one tensor
        result = unfused(*own)
        inputs = [t for t, want in zip(own, wanted, strict=True) if want]
        gradients = iter(torch.autograd.grad(result, inputs, upstream, create_graph=further))
    return [next(gradients) if want else None for want in wanted]
