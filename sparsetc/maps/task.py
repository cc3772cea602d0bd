"""Tasks, the kernels that one takes for given tensors, and the shapes of the results."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsetc.backends import NUMBA, Backend
from sparsetc.errors import DeviceError
from sparsetc.explain import TileReport
from sparsetc.maps.body import RESULT, SIDES, Body, Walk, backward, forward
from sparsetc.maps.kernel import Heads, WalkKernel, layout_of
from sparsetc.maps.native_walk import ENOUGH, MOST_WIDE, native_walk
from sparsetc.maps.pairs import APART, NARROW, SQUARE, Pairs
from sparsetc.maps.row_tiles import RowEntries, RowTiles
from sparsetc.maps.text import Layout
from sparsetc.maps.torch_walk import TorchWalk
from sparsetc.maps.trace import Untraced
from sparsetc.options import Options
from sparsetc.support import Ints, Lru, Names, installed
from sparsetc.support.entry import log
from sparsetc.tensor.dtypes import accumulator
from sparsetc.tensor.pattern import Pattern

Tensors = Sequence[Tensor]
Kernel = Callable[[Mapping[str, Tensor]], None]
Gradients = tuple[list[Kernel], list[tuple[str, str]]]
"""Kernels, and the names of the gradients that they give with those of the inputs."""

NOTHING = -1e29
"""Bound below which the logarithm of a row's sum lies if the row has no pairs."""
SMALL_ROW = 64
"""Largest row size for running scattered float32 entries row by row at "highest", which makes three dots of one; bodies
without products run so too (GAT of 4 x 32, R-MAT graphs, H100, `benchmarks/results/maps.json`: windows that gather took
1.2 and 1.1 times as long in float32, 1.5 and 1.1 in float16, and backward, which has a product, .6)."""
MOST_OF_BLOCKS = 1 << 22
"""Most entries of a pattern in blocks that go entry by entry in native loops, by lists of 20 bytes an entry."""
KEPT = 16
"""Sets of gradients and their strides that kernels are kept for. Not measured."""


class Task(NamedTuple):
    """A function of pairs, and how it is computed.

    Attributes:
        body: a function of each pair.
        pairs: the pairs of a row and a column that it is computed for.
        options: in force; kernels take backend, precision and cache_dir.
        name: for the log, and what generated files are named after.
    """

    body: Body
    pairs: Pairs
    options: Options
    name: str

    @property
    def backend(self) -> Backend:
        """Triton; or on a CPU torch, or numba for loops where tiles are no use."""
        backend = self.options.effective_backend(self.pairs.device)
        loops = backend.at_once and self.options.has_loops(self.pairs.device)
        return NUMBA if loops else backend

    def kernels(self, tensors: Tensors) -> Kernels:
        """Return the kernels for tensors of these sizes, strides and types, compiled once."""
        options = self.options
        layout = tuple([(t.shape, t.stride(), t.dtype, t.device) for t in tensors])
        how = self.backend.name, options.effective_precision(), options.cache_dir
        key = "maps", self.body, self.pairs.fastest, layout, *how
        return self.pairs.kept(key, lambda: Kernels(self, tensors))


class Kernels:
    """The kernels of a task for tensors of given sizes and strides; it holds no tensors.

    Where an input must be copied first, nothing is compiled here: the caller asks again, for tensors as `taken` gives
    them.

    Attributes:
        refusal: the reason why there are no kernels; empty where there are.
        copied: True for each input that kernels take a copy of: its heads lie in more groups than kernels read, the
            elements of its rows lie apart, or it is of 16 bits on a CPU.
        lead: sizes of the modes of heads.
        entries: what native loops go over, for either mode; empty where kernels go over tiles.
        tiles: what the walks of the result, of gradients of rows, and of those of columns go over.
        layouts: of these three walks.
    """

    def __init__(self, task: Task, tensors: Tensors) -> None:
        body, pairs, options, self.name = task
        self.backend = backend = task.backend
        self.precision = options.effective_precision()
        self.cache_dir = options.cache_dir
        if {t.device for t in tensors} != {pairs.device}:
            raise DeviceError(f"{task.name}: all tensors must be on {pairs.device}, as the first is")
        self.body = body
        self.gradients: Lru[Any, Gradients] = Lru(KEPT)
        self.copied: list[bool] = []
        self.refusal = _unfit_for_kernels(not backend.gpu, pairs.device, tensors)
        if self.refusal:
            return
        self.copied = [self._copied(name, t) for name, t in zip(body.inputs, tensors, strict=True)]
        if any(self.copied):
            return
        named = dict(zip(body.inputs, tensors, strict=True))
        numbered = body.stored or "entries" in body.vectors.values()
        self.lead = lead_of(body, pairs, tensors)
        self.heads = _heads(pairs, body, self.lead, named)
        self.rows = pairs.shape[0]
        self.entries: list[RowEntries] = []
        if not backend.gpu:
            loops = backend.loops and _fit_for_loops(pairs, body, named)
            side = pairs.side(loops)
            if body.inner:
                self.refusal = "on a CPU, inner functions of products have no kernel"
            elif not side:
                self.refusal = "on a CPU, most places of its tiles would be empty"
            if self.refusal and loops:
                self.refusal, self.entries = "", pairs.entries()
            layouts: Sequence[Layout | None] = [Layout(side, side)] * 3
        else:
            layouts = self._layouts_of(pairs, named, numbered)
            if None in layouts:
                self.refusal = "rows of tables are longer than a program holds"
            elif body.inner and not (isinstance(pairs.given, Pattern) and pairs.given.blocks is None):
                self.refusal = "inner functions of products take patterns of entries"
        if self.refusal:
            return
        self.layouts = [one for one in layouts if one]
        self.tiles: list[RowTiles] = []
        if not self.entries:
            self.tiles = [pairs.row_tiles(max(n - 1, 0), one, numbered) for n, one in enumerate(self.layouts)]
        self.shape = result_shape(body, pairs, tensors)
        try:
            self.result, self.path = self._kernel(0, walk_of(body, 0), {**named, **self.results(tensors)})
        except Untraced as error:
            self.refusal = str(error)

    def _layouts_of(self, pairs: Pairs, named: Mapping[str, Tensor], numbered: bool) -> list[Layout | None]:
        """Return the layout of each walk's tiles; None where none fits."""
        body = self.body
        first, *_ = named.values()
        sizes, dtype = [named[table].shape[-1] for table in body.tables] or [1], first.dtype
        width = min(pairs.width, NARROW if numbered else SQUARE)  # entries are counted in words of 32 bits
        exact = dtype == torch.float32 and self.precision == "highest" and max(sizes) <= SMALL_ROW
        layouts = []
        for number in range(3):
            without_dots = exact or not (number or body.products)
            by_row = bool(body.inner) or (width == APART and without_dots)
            chosen = layout_of(sizes, dtype, number, width, by_row)
            if chosen and number and numbered and chosen.height > 1:  # numbers of entries take registers
                chosen = replace(chosen, warps=max(chosen.warps, 2))
            layouts.append(chosen)
        return layouts

    @property
    def loops(self) -> bool:
        """True of native loops over entries."""
        return not self.refusal and bool(self.entries)

    def taken(self, tensors: Tensors) -> Tensors:
        """Return the inputs as kernels take them, copied where `copied` says so."""
        types = [accumulator(t.dtype) if self.backend.widens and t.is_floating_point() else t.dtype for t in tensors]
        return [
            t.to(dtype).contiguous() if copy else t for t, dtype, copy in zip(tensors, types, self.copied, strict=True)
        ]

    def like(self, upstream: Tensor, result: Tensor) -> Tensor:
        """Return the gradient of a result as kernels take it."""
        apart = upstream.stride() != result.stride() and self._copied(RESULT, upstream)
        return upstream.contiguous() if apart else upstream

    def _copied(self, name: str, tensor: Tensor) -> bool:
        own_modes = self._own_modes(name)
        if self.backend.widens and tensor.dtype.itemsize < 4:  # even sums of a result
            return True
        sums = name == RESULT and self.body.table is None and not self.body.stored
        by_position = sums or self.body.vectors.get(name) in SIDES  # which kernels read with a step
        apart = not by_position and rows_whole(tensor) is not tensor
        return apart or len(_groups(tensor, own_modes)) > (own_modes if self.backend.gpu else 1)

    def _kernel(self, number: int, walk: Walk, tensors: Mapping[str, Tensor]) -> tuple[Kernel, Path | str]:
        """Return the kernel of a walk, and its file; inputs have one mode of heads, or as many as `lead`.

        The number is 0 for the walk of the result, 1 for that of gradients of rows, 2 for columns.
        """
        kind = f"{self.name}_{'result' if not number else f'gradients_{SIDES[walk.mode]}'}"
        grouped, heads = self._grouped(tensors), self.heads
        if self.entries:
            return native_walk(walk, self.entries[walk.mode], grouped, heads, self.cache_dir, kind)
        tiles, layout = self.tiles[number], self.layouts[number]
        if not self.backend.gpu:
            walked = TorchWalk(walk, tiles, heads, self.precision)
            return lambda tensors: walked(self._grouped(tensors)), ""
        kernel = WalkKernel(walk, tiles, grouped, heads, layout, self.precision, self.cache_dir, kind)
        return kernel, kernel.path

    def reports(self) -> tuple[TileReport, ...]:
        """Return what `explain` says of the tiles of each walk."""
        kinds, path = ("result", "gradients of rows", "gradients of columns"), str(self.path)
        if self.entries:
            _, _, columns, _ = self.entries[0]
            return (TileReport(kinds[0], 1, 1, True, 0, len(columns), 1.0, path),)
        reports = []
        for kind, tiles in zip(kinds, self.tiles, strict=True):
            full, part = len(tiles.full_col), len(tiles.part_col)
            met = full * tiles.height * tiles.width + tiles.met
            places = (full + part) * tiles.height * tiles.width
            share, of_kind = met / max(places, 1), path if kind == "result" else ""
            reports.append(TileReport(kind, tiles.height, tiles.width, tiles.gathered, full, part, share, of_kind))
        return tuple(reports)

    def _grouped(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return views of the tensors with a mode for each of the groups that their heads lie in."""
        grouped = {}
        for name, tensor in tensors.items():
            own_modes = self._own_modes(name)
            sizes = [size for size, _ in _groups(tensor, own_modes)]
            grouped[name] = tensor.view(*sizes, *tensor.shape[tensor.ndim - own_modes :])
        return grouped

    def _own_modes(self, name: str) -> int:
        """Return how many modes behind those of heads a tensor of kernels has."""
        kind, _, base = name.rpartition("_")
        if base == RESULT:
            return 1 if self.body.table is None else 2
        return 2 if base in self.body.tables or (kind and base in self.body.shared) else 1

    def results(self, tensors: Tensors) -> dict[str, Tensor]:
        """Return memory for the result and, of a softmax, for ``lse_out``: the logarithms to base 2 of rows' sums."""
        first = tensors[0]  # whose order of modes a result has: layers put those of heads behind rows
        alike = self.body.table is not None and first.shape == self.shape
        outputs = {RESULT: rows_whole(torch.empty_like(first)) if alike else first.new_empty(self.shape)}
        if self.body.softmax:
            sums = self.shape[: len(self.lead) + 1]
            outputs["lse_out"] = first.new_empty(sums, dtype=accumulator(first.dtype))
        return outputs

    def run(self, tensors: Tensors, seed: Tensor | None) -> dict[str, Tensor]:
        """Return the result and, of a softmax, the logarithm to base 2 of each row's sum, by name."""
        results = self.results(tensors)
        named = dict(zip(self.body.inputs, tensors, strict=True)) | results
        self.result(named if seed is None else named | {"seed": seed})
        return results

    def gradient_of(self, name: str, tensor: Tensor) -> Tensor:
        """Allocate an input's gradient; for a row shared by all pairs, one row for each row of pairs, summed later."""
        if name in self.body.shared:
            return tensor.new_empty((self.heads.count, self.rows, tensor.shape[-1]))
        if name in self.body.tables:
            return rows_whole(torch.empty_like(tensor))
        if name in self.body.places:
            return torch.zeros_like(tensor, memory_format=torch.contiguous_format)
        return torch.empty_like(tensor, memory_format=torch.contiguous_format)

    def of_gradients(self, tensors: Mapping[str, Tensor], wanted: Sequence[bool]) -> Gradients:
        """Return the kernels that compute the gradients ``grad_…`` of wanted inputs, with all names they use.

        There are none where the map's derivative cannot be traced.

        Args:
            tensors: inputs, the result, its gradient, and of a softmax `lse`, `delta`, and maybe ``g_lse``, by name.
            wanted: for each input, whether its gradient is computed.
        """
        strides = tensors[RESULT].stride(), tensors[f"g_{RESULT}"].stride()  # a graph's results are contiguous
        key = tuple(wanted), "g_lse" in tensors, strides
        return self.gradients.once(key, lambda: self._of_gradients(tensors, wanted))

    def _of_gradients(self, tensors: Mapping[str, Tensor], wanted: Sequence[bool]) -> Gradients:
        of_lse, inputs = "g_lse" in tensors, self.body.inputs
        names = tuple([name for name, want in zip(inputs, wanted, strict=True) if want])
        try:
            walks = [walk_of(self.body, mode, names, of_lse) for mode in (0, 1)]
        except Untraced as error:
            log.debug("gradients run in steps: %s", error)
            return [], []
        if walks[1].targets and self.body.softmax and not walks[0].targets:  # the rows' walk gives delta
            walks[0] = walk_of(self.body, 0, (inputs[0], *names), of_lse)
        targets = [(name, name[len("grad_") :]) for walk in walks for name in walk.targets]
        whole = {**tensors, **{target: self.gradient_of(name, tensors[name]) for target, name in targets}}
        return [self._kernel(n, walk, whole)[0] for n, walk in enumerate(walks, 1) if walk.targets], targets


def _groups(tensor: Tensor, own_modes: int) -> list[tuple[int, int]]:
    """Return the sizes and strides of modes of heads, neighbouring ones joined where their heads are evenly apart."""
    groups: list[tuple[int, int]] = []
    heads = tensor.ndim - own_modes
    for size, stride in zip(tensor.shape[:heads], tensor.stride()[:heads], strict=True):
        if groups and groups[-1][1] == size * stride:
            groups[-1] = groups[-1][0] * size, stride
        elif size > 1:
            groups.append((size, stride))
    return groups or [(1, 0)]


def flattened(body: Body, tensors: Tensors) -> list[Tensor]:
    """Return inputs of a body with one mode of heads."""
    flat = []
    for name, tensor in zip(body.inputs, tensors, strict=True):
        heads = tensor.ndim - 1 - (name in body.tables)
        whole = (prod(tensor.shape[:heads]), *tensor.shape[heads:])
        flat.append(tensor if heads == 1 else tensor.reshape(whole))
    return flat


def lead_of(body: Body, pairs: Pairs, tensors: Tensors) -> Ints:
    """Return the sizes of the modes of heads of a result."""
    leads = []
    for name, tensor in zip(body.inputs, tensors, strict=True):
        lead = tuple(tensor.shape[: tensor.ndim - 1 - (name in body.tables)])
        stacked = body.vectors.get(name) == "entries" and pairs.patterns > 1
        leads.append((prod(lead) * pairs.patterns,) if stacked else lead)
    return max(leads, key=prod)


def result_shape(body: Body, pairs: Pairs, tensors: Tensors) -> Ints:
    """Return (*heads, rows, size), (*heads, rows), or (*heads of a pattern, entries)."""
    named = dict(zip(body.inputs, tensors, strict=True))
    lead = lead_of(body, pairs, tensors)
    if body.stored:
        assert isinstance(pairs.given, Pattern)
        return (*(lead if pairs.patterns == 1 else [prod(lead) // pairs.patterns]), pairs.given.nnz)
    width = [] if body.table is None else [named[body.table].shape[-1]]
    return (*lead, pairs.shape[0], *width)


def _heads(pairs: Pairs, body: Body, lead: Ints, named: Mapping[str, Tensor]) -> Heads:
    """Return the heads of a body's tensors, given the sizes of a result's."""
    of_columns = [prod(named[name].shape[:-2]) for name, mode in body.tables.items() if mode]
    of_columns += [prod(named[name].shape[:-1]) for name, side in body.vectors.items() if side == "columns"]
    count = prod(lead)
    return Heads(count, count // max(of_columns, default=count), pairs.patterns, pairs.fastest)


def _unfit_for_kernels(on_cpu: bool, device: torch.device, tensors: Tensors) -> str:
    """Return why no kernels, of a CPU or of Triton, run on such tensors whatever the body; empty where they do."""
    dtype = tensors[0].dtype
    if (on_cpu and device.type == "cuda") or not (on_cpu or installed("triton")):
        return "kernels are Triton's, which does not run here"
    if min([t.numel() for t in tensors]) == 0:
        return "an operand has no elements"
    if dtype not in (torch.float16, torch.bfloat16, torch.float32, *([torch.float64] if on_cpu else [])):
        return f"operands are {dtype}"
    if dtype == torch.bfloat16 and not on_cpu and os.environ.get("TRITON_INTERPRET") == "1":
        return "Triton's interpreter has no products of matrices in bfloat16"
    return ""


def _fit_for_loops(pairs: Pairs, body: Body, named: Mapping[str, Tensor]) -> bool:
    """Return True if there is enough to do for loops over entries."""
    given = pairs.given
    if not isinstance(given, Pattern):
        return False
    entries = prod(given.values_shape(()))
    if given.blocks is not None and entries > MOST_OF_BLOCKS:
        return False
    tables = [named[name] for name in body.tables]
    widest = max([t.numel() // t.shape[-2] for t in tables], default=1)
    longest = max([t.shape[-1] for t in tables], default=1)
    return entries * widest >= ENOUGH and longest <= MOST_WIDE


@lru_cache(maxsize=256)
def walk_of(body: Body, mode: int, wanted: Names | None = None, of_lse: bool = False) -> Walk:
    """Return a walk of a body, traced once: for gradients of the wanted inputs, or for the result."""
    return forward(body) if wanted is None else backward(body, mode, wanted, of_lse)


def rows_whole(tensor: Tensor) -> Tensor:
    """Return the tensor with the elements of a row next to one another."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()
