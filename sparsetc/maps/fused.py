"""Bodies on tensors, in one kernel a walk, with gradients.

In: a `Task`, which holds a body and the pairs that it is computed of, and tensors. Out: its result. A first derivative
takes a walk a mode, which computes weights anew from the logarithm of each row's sum. Derivatives of these, and
derivatives in batches, are those of a function that computes the same by other means.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsetc.contraction.autograd import recordable
from sparsetc.explain import TileReport
from sparsetc.maps.body import LOG2E, RESULT, SIDES, Body, Walk, backward, forward
from sparsetc.maps.kernel import UNSAMPLED, Heads, Sides, WalkKernel, sides_of
from sparsetc.maps.pairs import APART, NARROW, SQUARE, Pairs
from sparsetc.maps.torch_walk import TorchWalk
from sparsetc.maps.trace import Untraced
from sparsetc.support import Ints, Names
from sparsetc.support.entry import entry_point, without_autocast
from sparsetc.support.lru import Lru
from sparsetc.support.notices import log
from sparsetc.tensor.pattern import Pattern, followed, transforming
from sparsetc.tensor.sums import accumulator

Tensors = Sequence[Tensor]
Gradients = tuple[list[WalkKernel | TorchWalk], list[tuple[str, str]]]
"""Kernels, and the names of the gradients that they give with those of the inputs."""

NOTHING = -1e29
"""Logarithms of sums of rows that meet nothing are below."""
EXACT = 64
"""Largest row size for running scattered float32 entries row by row at "highest", which makes three dots of one; bodies
without products run so too (GAT of 4 x 32, R-MAT graphs, H100, `benchmarks/results/maps.json`: windows that gather took
1.2 and 1.1 times as long in float32, 1.5 and 1.1 in float16, and backward, which has a product, .6)."""
KEPT = 16
"""Sets of gradients and their strides that kernels are kept for. Not measured."""


@dataclass(frozen=True, eq=False)
class Task:
    """A body on tensors of certain sizes and strides.

    Attributes:
        body: what is computed.
        pairs: of which.
        precision: of float32.
        cache_dir: folder of generated sources.
        name: what generated files are named after.
        backend: ``triton``, or ``torch`` on a CPU.
    """

    body: Body
    pairs: Pairs
    precision: str
    cache_dir: Path | None
    name: str
    backend: str = "triton"

    def kernels(self, tensors: Tensors) -> Kernels:
        """Return the kernels for tensors of these sizes, strides and types, compiled once."""
        pairs = self.pairs
        layout = tuple([(t.shape, t.stride(), t.dtype) for t in tensors])
        key = "maps", self.body, pairs.fastest, layout, self.backend, self.precision, self.cache_dir
        return pairs.kept(key, lambda: Kernels(self, tensors))


class Kernels:
    """The kernels of a task for tensors of given sizes and strides; it holds no tensors.

    Attributes:
        refusal: why there are none; empty where there are.
    """

    def __init__(self, task: Task, tensors: Tensors) -> None:
        pairs, body = task.pairs, task.body
        self.body = body
        self.gradients: Lru[Any, Gradients] = Lru(KEPT)
        named = dict(zip(body.inputs, tensors, strict=True))
        numbered = body.stored or "entries" in body.vectors.values()
        self.heads = _heads(pairs, body, named)
        if task.backend == "torch":
            self.refusal = _unfit_for_tiles(pairs, body)
            sides: Sequence[Sides | None] = [Sides(pairs.side, pairs.side, 0, 0)] * 2
        else:
            sides = _sides(task, named, numbered)
            self.refusal = _refusal(pairs, body, sides)
        if self.refusal:
            return
        forward, backward = (one for one in sides if one)
        self.tiles = [pairs.row_tiles(0, forward, numbered)]
        self.tiles += [pairs.row_tiles(mode, backward, numbered) for mode in (0, 1)]
        self.sides = forward, backward
        self.task = task.backend, task.precision, task.cache_dir, task.name
        self.shape = result_shape(body, pairs, tensors)
        try:
            self.result = self._kernel(0, walk_of(body, 0), {**named, **self.results(tensors)})
        except Untraced as error:
            self.refusal = str(error)

    def _kernel(self, number: int, walk: Walk, tensors: Mapping[str, Tensor]) -> WalkKernel | TorchWalk:
        backend, precision, cache_dir, name = self.task
        if backend == "torch":
            return TorchWalk(walk, self.tiles[number], self.heads, precision)
        kind = f"{name}_{'result' if not number else f'gradients_{SIDES[walk.mode]}'}"
        sides = self.sides[number > 0]
        return WalkKernel(walk, self.tiles[number], tensors, self.heads, sides, precision, cache_dir, kind)

    def reports(self) -> tuple[TileReport, ...]:
        """Return what `explain` says of the tiles of each walk."""
        kinds = "result", "gradients of rows", "gradients of columns"
        reports = []
        for kind, tiles in zip(kinds, self.tiles, strict=True):
            full, part = len(tiles.full_col), len(tiles.part_col)
            met = full * tiles.height * tiles.width + tiles.met
            places = (full + part) * tiles.height * tiles.width
            path = str(getattr(self.result, "path", "")) if kind == "result" else ""
            share = met / max(places, 1)
            reports.append(TileReport(kind, tiles.height, tiles.width, tiles.gathered, full, part, share, path))
        return tuple(reports)

    def results(self, tensors: Tensors) -> dict[str, Tensor]:
        """Return memory for the result and, of a softmax, for ``lse_out``: the logarithms to base 2 of rows' sums."""
        outputs = {RESULT: tensors[0].new_empty(self.shape)}
        if self.body.softmax:
            outputs["lse_out"] = tensors[0].new_empty(self.shape[:2], dtype=accumulator(tensors[0].dtype))
        return outputs

    def gradient_of(self, name: str, tensor: Tensor) -> Tensor:
        """Allocate an input's gradient; for a row shared by all pairs, one row for each row of pairs, summed later."""
        if name in self.body.shared:
            return tensor.new_empty((self.heads.count, self.shape[1], tensor.shape[-1]))
        return torch.empty_like(tensor, memory_format=torch.contiguous_format)

    def of_gradients(self, given: Mapping[str, Tensor], wanted: Names) -> Gradients:
        """Return the kernels that compute the gradients ``grad_…`` of wanted inputs, with all names they use.

        There are none where the map's derivative cannot be traced.

        Args:
            given: inputs, the result, its gradient, and of a softmax `lse`, `delta`, and maybe ``g_lse``, by name.
            wanted: names of inputs.
        """
        key = wanted, "g_lse" in given, given[f"g_{RESULT}"].stride()
        return self.gradients.once(key, lambda: self._of_gradients(given, wanted))

    def _of_gradients(self, given: Mapping[str, Tensor], wanted: Names) -> Gradients:
        of_lse = "g_lse" in given
        try:
            walks = [walk_of(self.body, mode, wanted, of_lse) for mode in (0, 1)]
        except Untraced as error:
            log.debug("gradients run in steps: %s", error)
            return [], []
        if walks[1].targets and self.body.softmax and not walks[0].targets:  # the rows' walk gives delta
            walks[0] = walk_of(self.body, 0, (self.body.inputs[0], *wanted), of_lse)
        targets = [(name, name[len("grad_") :]) for walk in walks for name in walk.targets]
        gradients = {target: self.gradient_of(name, given[name]) for target, name in targets}
        tensors = {**given, **gradients}
        return [self._kernel(n, walk, tensors) for n, walk in enumerate(walks, 1) if walk.targets], targets


def result_shape(body: Body, pairs: Pairs, tensors: Tensors) -> Ints:
    """Return (heads, rows, size), (heads, rows), or (heads of a pattern, entries)."""
    named = dict(zip(body.inputs, tensors, strict=True))
    heads = _heads(pairs, body, named)
    if body.stored:
        assert isinstance(pairs.given, Pattern)
        return heads.parts, pairs.given.nnz
    width = [] if body.table is None else [named[body.table].shape[-1]]
    return (heads.count, pairs.shape[0], *width)


def _heads(pairs: Pairs, body: Body, named: Mapping[str, Tensor]) -> Heads:
    """Return the heads of a body's tensors."""
    of_columns = [named[name].shape[0] for name, mode in body.tables.items() if mode]
    of_columns += [named[name].shape[0] for name, side in body.vectors.items() if side == "columns"]
    parts = [named[name].shape[0] * pairs.patterns for name, side in body.vectors.items() if side == "entries"]
    of_rows = [named[name].shape[0] for name, mode in body.tables.items() if not mode]
    of_rows += [named[name].shape[0] for name, side in body.vectors.items() if side == "rows"]
    count = max(*of_rows, *of_columns, *parts, 1)
    return Heads(count, count // max(of_columns, default=count), pairs.patterns, pairs.fastest)


def _sides(task: Task, named: Mapping[str, Tensor], numbered: bool) -> list[Sides | None]:
    """Return the sides of the tiles of the result's walk, and of those of gradients; None where none fit."""
    pairs, body = task.pairs, task.body
    first, *_ = named.values()
    sizes, dtype = [named[table].shape[-1] for table in body.tables] or [1], first.dtype
    width = min(pairs.width, NARROW if numbered else SQUARE)  # entries are counted in words of 32 bits
    exact = dtype == torch.float32 and task.precision == "highest" and max(sizes) <= EXACT
    sides = []
    for back in (False, True):
        without_dots = exact or not (back or body.products)
        by_row = bool(body.inner) or (width == APART and without_dots)
        chosen = sides_of(sizes, dtype, back, width, by_row)
        if chosen and by_row and max(sizes) <= EXACT and not (back or body.products):
            chosen = replace(chosen, width=UNSAMPLED)
        if chosen and back and numbered and chosen.height > 1:  # numbers of entries take registers
            chosen = replace(chosen, warps=max(chosen.warps, 2))
        sides.append(chosen)
    return sides


def _unfit_for_tiles(pairs: Pairs, body: Body) -> str:
    """Return why a body has no kernels of torch's operations; empty where it has."""
    if body.inner or body.dropout:
        return "on a CPU, dropout and inner functions of products have no kernel"
    if not pairs.side:
        return "on a CPU, most places of its tiles would be empty"
    return ""


def _refusal(pairs: Pairs, body: Body, sides: Sequence[Sides | None]) -> str:
    if None in sides:
        return "rows of tables are longer than a program holds"
    given = pairs.given
    if body.inner and not (isinstance(given, Pattern) and given.blocks is None):
        return "inner functions of products take patterns of entries"
    return ""


@lru_cache(maxsize=256)
def walk_of(body: Body, mode: int, wanted: Names | None = None, of_lse: bool = False) -> Walk:
    """Return a walk of a body, traced once: for gradients of the wanted inputs, or for the result."""
    return forward(body) if wanted is None else backward(body, mode, wanted, of_lse)


def fused(kernels: Kernels, unfused: Callable[..., Any], tensors: Tensors, seed: Tensor | None, with_lse: bool) -> Any:
    """Return the result (heads, rows, size), (heads, rows) or (heads, entries) of a task, and maybe `lse`.

    Args:
        kernels: of the task, for these tensors; without a refusal.
        unfused: the same function of the same tensors by other means, differentiable any number of times.
        tensors: as `Body.inputs` says, of one number of heads, or of a divisor of it for those of columns.
        seed: (1,) int64, of random numbers, where some weights are dropped.
        with_lse: whether the logarithms of rows' sums are wanted too, (heads, rows).
    """
    ready = tuple([recordable(t) for t in tensors])
    if followed(ready):
        return _Fused.apply(kernels, unfused, seed, with_lse, *ready)
    return _returned(kernels, _results(kernels, ready, seed), with_lse)


def rows_whole(tensor: Tensor) -> Tensor:
    """Return the tensor with the elements of a row next to one another."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def _results(kernels: Kernels, tensors: Tensors, seed: Tensor | None) -> dict[str, Tensor]:
    """Return the result and, of a softmax, the logarithm to base 2 of each row's sum, by name."""
    results = kernels.results(tensors)
    named = dict(zip(kernels.body.inputs, tensors, strict=True))
    kernels.result({**named, **results} if seed is None else {**named, **results, "seed": seed})
    return results


def _returned(kernels: Kernels, made: Mapping[str, Tensor], with_lse: bool) -> Any:
    if not with_lse:
        return made[RESULT]
    lse = made["lse_out"]
    return made[RESULT], torch.where(lse > NOTHING, lse / LOG2E, -torch.inf)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: Kernels, unfused: Any, seed: Tensor | None, with_lse: bool, *tensors: Tensor) -> Any:
        results = _results(kernels, tensors, seed)
        ctx.kernels, ctx.unfused = kernels, unfused
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, seed, results[RESULT], results.get("lse_out"))
        return _returned(kernels, results, with_lse)

    @staticmethod
    @entry_point
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, seed, result, lse = ctx.saved_tensors
        wanted = ctx.needs_input_grad[4:]
        present = [g for g in upstream if g is not None]
        if not present:
            return (None,) * (4 + len(tensors))
        batched = transforming() or any(torch._C._functorch.is_legacy_batchedtensor(g) for g in present)
        with without_autocast(result.device):
            gradients = None
            if not (batched or torch.is_grad_enabled()):
                gradients = gradients_by(ctx.kernels, tensors, wanted, seed, result, lse, upstream)
            if gradients is None:
                gradients = gradients_of_steps(ctx.unfused, tensors, wanted, upstream)
        return None, None, None, None, *gradients


def gradients_by(
    kernels: Kernels,
    tensors: Tensors,
    wanted: Sequence[bool],
    seed: Tensor | None,
    result: Tensor,
    lse: Tensor | None,
    upstream: Sequence[Tensor | None],
) -> list[Tensor | None] | None:
    """Compute the wanted gradients, by one walk a mode; None if there are no such kernels.

    Args:
        kernels: of the result.
        tensors: that it was computed of.
        wanted: of which of them.
        seed: as it was.
        result: as it was.
        lse: of a softmax, the logarithms to base 2 of rows' sums.
        upstream: the gradient of the result, and maybe of the logarithms, not both None.
    """
    inputs = kernels.body.inputs
    tables = {**dict(zip(inputs, tensors, strict=True)), RESULT: result}
    of_result, *of_lse = upstream
    tables[f"g_{RESULT}"] = torch.zeros_like(result) if of_result is None else rows_whole(of_result)
    if seed is not None:
        tables["seed"] = seed
    if lse is not None:
        tables |= {"lse": lse, "delta": torch.empty_like(lse)}
    if of_lse and of_lse[0] is not None:
        tables["g_lse"] = rows_whole(of_lse[0])
    names = inputs if all(wanted) else tuple([name for name, want in zip(inputs, wanted, strict=True) if want])
    walks, targets = kernels.of_gradients(tables, names)
    if not walks:
        return None
    gradients = {}
    for target, name in targets:
        gradients[name] = tables[target] = kernels.gradient_of(name, tables[name])
    for kernel in walks:
        kernel(tables)
    for name in kernels.body.shared:
        if name in gradients:
            gradients[name] = gradients[name].sum(1)
    return [gradients[name] if want else None for name, want in zip(inputs, wanted, strict=True)]


def gradients_of_steps(
    unfused: Callable[..., Any], tensors: Tensors, wanted: Sequence[bool], upstream: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Return the gradients that are wanted as functions of the tensors and the upstream ones."""
    further = torch.is_grad_enabled()
    with torch.enable_grad():
        views = [t.view_as(t) for t in tensors]  # apart, where two inputs are one tensor
        results = unfused(*views)
        results = results if isinstance(results, tuple) else (results,)
        present = [(result, g) for result, g in zip(results, upstream, strict=False) if g is not None]
        inputs = [t for t, want in zip(views, wanted, strict=True) if want]
        outputs, upstreams = zip(*present, strict=True)
        gradients = iter(
            torch.autograd.grad(outputs, inputs, upstreams, create_graph=further, materialize_grads=True)
        )  # logarithms of sums use no values
    return [next(gradients) if want else None for want in wanted]
