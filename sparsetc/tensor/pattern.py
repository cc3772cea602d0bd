"""`Pattern`: the coordinates of a sparse tensor without its values, and everything derived from them.

In: coordinates and sizes. Out: what tensors of one pattern share: counts, packed storages and kernels, in one bounded
cache that goes with the last of them. Nothing in the cache may refer to its pattern: memory would return by the cyclic
collector only.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

from sparsetc.errors import ShapeError, printable
from sparsetc.support import Ints, Lru
from sparsetc.support.entry import entry_point, exporting, traced_by_modes
from sparsetc.tensor import coords as crd
from sparsetc.tensor.blocks import Blocks
from sparsetc.tensor.picture import FIRST, SIDE, as_html, as_text, binned

LONGEST = 40
"""Characters that are shown of a label."""

Made = TypeVar("Made")
P = ParamSpec("P")
Labels: TypeAlias = dict[str, np.ndarray | None]
"""Names of modes, in order, and of each the names of its indices; None where it has numbers alone."""

Coords: TypeAlias = Tensor | Callable[[], Tensor]
"""Coordinates, or a function that makes them."""
KEPT = 128
"""Things kept for one pattern: kernels, packed storages, patterns derived from it. Not measured: four modes, each with
its kernel and those of two gradients, their storages, and as much again for some ranks."""


def check_labels(name: str, ours: np.ndarray | None, theirs: np.ndarray | None) -> None:
    """Raise `ShapeError` if the labels of a mode that two tensors share differ: an index would mean two things."""
    if ours is None or theirs is None or ours is theirs or np.array_equal(ours, theirs):
        return
    raise ShapeError(
        f"mode {name!r} has other labels in the two tensors; make both of one table, or, if positions mean the same, "
        "give one the labels of the other: y.with_labels(x.labels)"
    )


@contextmanager
def lasting() -> Iterator[None]:
    """Make tensors in this block that outlive the call: not traced, not transformed, without gradients."""
    if not (torch.is_inference_mode_enabled() or transforming() or traced_by_modes() or exporting()):
        recorded = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # as `torch.no_grad` does, in a fifth of the time
        try:
            yield
        finally:
            torch._C._set_grad_enabled(recorded)
        return
    no_trace = _disable_current_modes if traced_by_modes() else nullcontext
    no_record = torch._C.DisableTorchFunction if exporting() else nullcontext  # of the settings below, in a program
    # The last, by which no transform of `torch.func` wraps the tensors, holds the state of the others, and ends first.
    no_transform = torch._C._DisableFuncTorch if transforming() else nullcontext
    with no_record(), no_trace(), torch.inference_mode(False), torch.no_grad(), no_transform():
        yield


def transforming() -> bool:
    """True while a transform of `torch.func` is active."""
    return torch._C._are_functorch_transforms_active()


def followed(tensors: Sequence[Tensor | None]) -> bool:
    """Return True if autograd, forward mode or a transform of `torch.func` follows what is done to the tensors."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


class Uses:
    """A count of the einsums that used a pattern, or coordinates without one; held kernels do not count."""

    count = 0


def once(make: Callable[Concatenate[Pattern, P], Made]) -> Callable[Concatenate[Pattern, P], Made]:
    """Decorate a function of a pattern: what it makes for the same other arguments is made once, and kept with it."""
    name = make.__qualname__

    @wraps(make)
    def kept(pattern: Pattern, *arguments: P.args, **named: P.kwargs) -> Made:
        return pattern._once((name, *arguments), lambda: make(pattern, *arguments, **named))

    return kept


class Pattern:
    """The coordinates and sizes of the sparse modes of a tensor.

    A tensor in blocks has coordinates of blocks, and sizes of the grid that they lie in.

    Tensors share a pattern if one was made from the other without a change of coordinates: by
    `SparseTensor.with_values`, by a shallow copy, or as a result at the nonzeros of an operand. Compare patterns with
    ``is``. Kernels and packed storage are kept with the pattern; see `cache_info` and `clear_cache`. A pattern is
    pickled as its coordinates, in 32 bits if they fit.

    Attributes:
        shape: the sizes of the sparse modes; of a tensor in blocks, the sizes of the grid of blocks.
        is_coalesced: True if the entries are known to be lexicographically sorted and unique.
        blocks: the sides of blocks, and the sizes of the modes they lie in; None for single nonzeros.
        nnz: the number of entries, duplicates included.
        device: that the coordinates are on.
        labels: names of modes and of indices, empty where there are none.

    Examples:
        >>> x = stc.eye(3)
        >>> x.with_values([1.0, 2.0, 3.0]).pattern is x.pattern
        True
    """

    __slots__ = (
        "__weakref__",
        "_cache",
        "_coords",
        "_derived",
        "blocks",
        "counts",
        "device",
        "is_coalesced",
        "labels",
        "nnz",
        "number",
        "ones",
        "results",
        "shape",
        "uses",
    )

    labels: Labels
    _coords: Coords
    _cache: Lru[Hashable, Any] | None
    _derived: Lru[Hashable, weakref.ref[Pattern]]
    counts: dict[Any, Any]  # distinct coordinates and the like, for the planner: a few numbers for each set of modes
    number: int  # by which a graph that torch traces knows the pattern
    ones: bool  # of a pattern of the package's own whose values are 1 in every einsum
    results: dict[str, Pattern]  # of sparse results in traced graphs, by the names of the contractions that give them
    uses: Uses

    def __init__(
        self,
        coords: Coords,
        shape: Ints,
        coalesced: bool,
        blocks: Blocks | None = None,
        uses: Uses | None = None,
        labels: Labels | None = None,
        later: tuple[int, torch.device] | None = None,
    ) -> None:
        """Take int64 contiguous coordinates (order, nnz); in range, and sorted and unique if `coalesced`.

        They are those of blocks where there are any, whose grid `shape` is. They may be made when they are first asked
        for, as of products of new patterns few are ever read; `later` has then `nnz` and their device.
        """
        if isinstance(coords, Tensor):
            if coords.is_inference():  # which autograd could not save
                with lasting():
                    coords = coords.clone()
            later = coords.shape[1], coords.device
        assert later is not None
        self.nnz, self.device = later
        self._coords = coords
        self.shape = shape
        self.is_coalesced = coalesced
        self.blocks = blocks
        self.counts = {}
        self._cache = None
        self.number = registered(self)
        self.results = {}
        self._derived = Lru(KEPT)
        self.ones = False
        self.uses = uses or Uses()
        self.labels = labels or {}

    @property
    def coords(self) -> Tensor:
        """The coordinates, (order, nnz) int64, contiguous, 0-based; not to be written to."""
        coords = self._coords
        return coords if isinstance(coords, Tensor) else self._make(coords)

    @entry_point
    def _make(self, make: Callable[[], Tensor]) -> Tensor:
        with lasting():
            self._coords = make()
        return self._coords

    @property
    def order(self) -> int:
        """The number of sparse modes, at least 1."""
        return len(self.shape)

    def __repr__(self) -> str:
        blocks = "" if self.blocks is None else f", blocksize={self.blocks.sides}"
        return f"Pattern(shape={self.shape}, nnz={self.nnz}{blocks}, device={self.device})"

    def _repr_html_(self) -> str:
        rows = {"shape": self.shape, "entries": f"{self.nnz:,}", "device": self.device}
        return as_html("Pattern", rows, binned(self.coords, self.shape, (0, 1), SIDE))

    def first_entries(self, values: Tensor) -> list[str]:
        """Return coordinates (or labels) and values of the first entries as text, a line each; and how many follow."""
        columns = [row.tolist() for row in self.coords[:, :FIRST]]
        for mode, labels in enumerate(self.labels.values()):
            if labels is not None and self.blocks is None:
                columns[mode] = [printable(str(labels[index]))[:LONGEST] for index in columns[mode]]
        shown = zip(zip(*columns, strict=True), values[:FIRST].detach().tolist(), strict=True)
        lines = [f"({', '.join(map(str, place))}{',' * (len(place) == 1)})  {as_text(value)}" for place, value in shown]
        more = values.shape[0] - len(lines)
        return [*lines, f"… {more:,} more"] if more else lines

    # -- what is kept -----------------------------------------------------------------------------------------------

    @property
    def cache(self) -> Lru[Hashable, Any]:
        """The cache of kernels, packed storages and derived patterns; made when first asked for."""
        if self._cache is None:
            self._cache = Lru(KEPT)
            used.add(self)
        return self._cache

    def clear(self) -> None:
        """Drop everything derived from the pattern; kernels held elsewhere keep working."""
        self.counts, self._cache = {}, None
        self._derived.clear()
        used.discard(self)

    @staticmethod
    def numbered(number: int) -> Any:
        """Return the live pattern, or mask, with a number, or None."""
        return _all.get(number)

    def _once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """Make something of the coordinates once, and keep it with the pattern."""
        cached = self.cache.get(key)
        return self._keep(key, make) if cached is None else cached

    @property
    def places(self) -> Tensor:
        """(nnz,) int64 the place of each entry in a dense tensor of the pattern's shape; made once."""
        return self._once("places", lambda: crd.linear_key(self.coords.unbind(), self.shape)[0])

    def _again(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """Make something of the coordinates and of another pattern's; keep it if it was made before.

        Many patterns meet once: what is made then would take memory for as long as this pattern lives.
        """
        if self.cache.get(key) is None:
            self.cache.put(key, True)
            return self._keep(None, make)
        return self._once((key, "again"), make)

    @entry_point  # where a graph that Dynamo traces breaks: it would trace how a thing is made, not the thing
    def _keep(self, key: Hashable, make: Callable[[], Made]) -> Made:
        with lasting():
            result = make()
        return result if key is None else self.cache.put(key, result)  # type: ignore[no-any-return]

    def permuted(self, modes: Ints) -> tuple[Pattern, Tensor | None]:
        """Return the pattern with modes reordered, made once, and the old number of each entry (None if unchanged)."""
        if modes == tuple(range(self.order)):
            return self, None
        return self._permuted(modes)

    @once
    def _permuted(self, modes: Ints) -> tuple[Pattern, Tensor | None]:
        coords = self.coords[list(modes)]
        shape = tuple(self.shape[m] for m in modes)
        order = None
        if self.is_coalesced:
            order = crd.lexsort(coords, shape)
            coords = coords[:, order]
        blocks = None if self.blocks is None else self.blocks.permuted(modes)
        labels = self.labels_of(modes)
        return Pattern(coords.contiguous(), shape, self.is_coalesced, blocks, labels=labels), order

    def labels_of(self, modes: Sequence[int]) -> Labels:
        """Return the labels of some modes, in this order; empty if there are none."""
        named = [*self.labels.items()]
        return dict(named[mode] for mode in modes) if named else {}

    def distinct(self, letters: Sequence[str]) -> tuple[Pattern, Tensor | None]:
        """Return the pattern with one mode a letter, made once, and entries' old numbers (None if unchanged).

        Entries are those on the diagonal of a repeated letter, in lexicographic order; duplicates stay.
        """
        if self.is_coalesced and len(set(letters)) == len(letters):
            return self, None
        first = tuple(map(letters.index, letters))
        modes = tuple(dict.fromkeys(first))
        pattern, entries = self._distinct(first, modes)
        return self if pattern is None else pattern, entries

    @once
    def _distinct(self, first: Ints, modes: Ints) -> tuple[Pattern | None, Tensor | None]:
        coords, shape = self.coords, tuple(self.shape[m] for m in modes)
        entries = crd.on_diagonal(first, coords)
        if entries is not None:
            coords = coords[list(modes)][:, entries]
        if not self.is_coalesced:
            order = crd.lexsort(coords, shape)
            if entries is None and bool((order[1:] > order[:-1]).all()):
                return None, None
            coords, entries = coords[:, order], order if entries is None else entries[order]
        return Pattern(coords.contiguous(), shape, self.is_coalesced), entries

    def expanded(self, sizes: Ints) -> Pattern:
        """Return the pattern with dense modes of these sizes as coordinates, made once."""
        return self._expanded(sizes) if sizes else self

    @once
    def _expanded(self, sizes: Ints) -> Pattern:
        return Pattern(crd.with_dense_modes(self.coords, sizes), self.shape + sizes, self.is_coalesced)

    @once
    def cut(self, sides: Ints) -> tuple[Pattern, Tensor | None]:
        """The coordinates of blocks cut into smaller ones, as entries, and the source of `Blocks.cut`; made once."""
        assert self.blocks is not None
        coords, source = self.blocks.cut(self.coords, self.is_coalesced, sides)
        labels = self.labels if set(sides) == {1} else None
        return Pattern(coords, Blocks(sides, self.blocks.shape).grid, self.is_coalesced, labels=labels), source

    def divided(self, sides: Ints) -> Pattern:
        """Return the pattern with each mode that has a side split in two: blocks, and positions within; made once."""
        return self._divided(sides) if any(sides) else self

    @once
    def _divided(self, sides: Ints) -> Pattern:
        rows: list[Tensor] = []
        shape: list[int] = []
        for row, size, side in zip(self.coords, self.shape, sides, strict=True):
            rows += [row // side, row % side] if side else [row]
            shape += [-(-size // side), side] if side else [size]
        return Pattern(torch.stack(rows), tuple(shape), self.is_coalesced)

    def like(self, coords: Coords, coalesced: bool = True, later: tuple[int, torch.device] | None = None) -> Pattern:
        """A pattern of the same sizes, in the same blocks, with other coordinates."""
        return Pattern(coords, self.shape, coalesced, self.blocks, labels=self.labels, later=later)

    def values_shape(self, dense: Sequence[int]) -> Ints:
        """Return the shape of the values of a tensor with these dense modes."""
        sides = () if self.blocks is None else self.blocks.sides
        return (self.nnz, *sides, *dense)

    def known(self, key: Hashable, made: Pattern, others: Sequence[Pattern] = ()) -> Pattern:
        """A pattern that follows from this one and others: `made`, or its equal of before while anyone has it.

        Args:
            key: how it follows from them.
            made: the pattern.
            others: the others, which the key must not refer to but weakly.
        """
        key = (key, made.is_coalesced, *map(weakref.ref, others))
        kept = self._derived.get(key)
        same = None if kept is None else kept()
        if same is not None and torch.equal(same.coords, made.coords):
            return same
        self._derived.pop(key)
        self._derived.put(key, weakref.ref(made), needs=others)
        return made

    @property
    def of_ones(self) -> Pattern:
        """Return the pattern for einsums whose values are all 1, made once; kernels read no values."""

        def made() -> Pattern:
            pattern = self.bare()
            pattern.ones, pattern.counts = True, self.counts
            return pattern

        return self if self.ones else self._once("ones", made)

    def bare(self) -> Pattern:
        """The coordinates with nothing kept: what is kept for a pattern may refer to it."""
        pattern = self.like(self.coords, self.is_coalesced)
        pattern.ones = self.ones
        return pattern


_numbers = itertools.count(1)
used: weakref.WeakSet[Pattern] = weakref.WeakSet()
"""Patterns that have a cache."""
_all: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""All patterns and masks by number."""


def registered(thing: Any) -> int:
    """Return a number from 1 by which graphs of torch name a pattern or mask as long as it lives."""
    number = next(_numbers)
    _all[number] = thing
    return number


def clear_patterns() -> None:
    """Drop everything derived from patterns; called when a registration may change how it is made."""
    for pattern in list(used):
        pattern.clear()
