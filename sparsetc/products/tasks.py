"""The tasks of a contraction as a sparse tensor of ones: ``T[p, q, z]`` where entry p of x matches q of y for result z.

In: a `JoinOrder`, which has counted the tasks. They are made a chunk at a time and grouped by the entry of the result
that each adds to (`TaskGroup`), or found by marks. Chunks are of whole rows: rows come in order, so what a chunk
reaches follows all that was reached before, nothing is sorted twice, and one sort gives both the pattern and each
task's entry of it. A row with more tasks than a chunk is gone through twice, in pieces.

Out: `NonzeroPairList`, packed in two ways, and the views that read it. Nothing is stored that the order of tasks tells:
p rises, by less than a frame within a frame, so a byte says it; q is consecutive while p stays the same; z alone takes
a word. That is 5 bytes a task, read in order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from sparsetc.ir.nest.coordinates import Field, consecutive
from sparsetc.ir.nest.nest import runs
from sparsetc.ir.nest.values import Ones
from sparsetc.ir.plan import Storage
from sparsetc.join import loops
from sparsetc.join.order import JoinOrder
from sparsetc.packing.base import Packed, index_dtype
from sparsetc.packing.words import bits_of
from sparsetc.products.problem import JoinProblem
from sparsetc.support import cached_property
from sparsetc.support.checks import room
from sparsetc.support.entry import bar, on_gpu
from sparsetc.support.files import native
from sparsetc.tensor import coords as crd
from sparsetc.tensor.coords import INT32_MAX

TaskGroup = tuple[int, tuple[Tensor, Tensor], Tensor, Tensor]
"""The number of the first of some consecutive tasks; p and q of each; (n,) the entry of the result that each adds to;
(m,) int64, the places that none before reached, ascending."""


def spans(join_order: JoinOrder, size: int) -> Iterator[tuple[int, int, int, int]]:
    """Divide the tasks into spans of whole rows, each as (begin, end, first row, row after the last).

    Rows are whole: as many as have `size` tasks, or one that has more.
    """
    if not join_order.tasks:
        return
    stops = torch.nonzero(crd.starts_of_runs([join_order.row])).flatten()[1:]
    ends = join_order.ends[torch.cat([stops, stops.new_tensor([join_order.matched[0]])]) - 1].cpu()
    begin, row = 0, 0
    while begin < join_order.tasks:
        last = max(row + 1, int(torch.searchsorted(ends, begin + size, right=True)))
        end = int(ends[last - 1])
        yield begin, end, row, last
        begin, row = end, last


def groups(join_order: JoinOrder, size: int) -> Iterator[TaskGroup]:
    """Divide a join's tasks into groups of about `size`: whole rows, or pieces of a row that has more."""
    narrow, columns = index_dtype(max(join_order.join.rows, join_order.join.columns)), join_order.join.columns
    row, column = join_order.row.to(narrow), join_order.column.to(narrow)
    reached = 0
    for begin, end, first, last in spans(join_order, size):
        spread = (last - first) * columns

        def keyed(piece: tuple[int, int], first: int = first, spread: int = spread) -> tuple[Tensor, ...]:
            """Expand tasks, with their places from the first row's on."""
            p, q = join_order.expand(*piece)
            key = row.index_select(0, p).to(torch.int32 if spread <= INT32_MAX else torch.int64)
            return p, q, key.sub_(first).mul_(columns).add_(column.index_select(0, q))

        pieces = [*pairwise([*range(begin, end, size), end])]
        p, q, key = keyed(pieces[0])
        fresh, slot = distinct(key, spread, reached)
        for piece in pieces[1:]:
            fresh = torch.unique(torch.cat([fresh, distinct(keyed(piece)[2], spread)[0]]))
        places = fresh.long() + first * columns
        if len(pieces) == 1:
            yield begin, (p, q), slot, places
        else:
            for n, piece in enumerate(pieces):
                p, q, key = keyed(piece)
                slot = torch.searchsorted(fresh, key.to(fresh.dtype)) + reached
                yield piece[0], (p, q), slot, places[: 0 if n else None]
        reached += places.numel()


def distinct(key: Tensor, spread: int, offset: int = 0) -> tuple[Tensor, Tensor]:
    """The distinct keys of some below `spread`, ascending, and which of them each key is, counted from `offset`.

    Where few keys are possible each is marked, a byte a possible one, and the marks are counted; else keys are sorted.
    """
    if crd.markable(spread, key.numel()):
        marked = torch.zeros(spread, dtype=torch.bool, device=key.device)
        marked[key] = True
        rank = torch.cumsum(marked, 0, dtype=index_dtype(offset + spread)).add_(offset - 1)
        return torch.nonzero(marked).flatten(), rank.index_select(0, key)
    if crd.is_sorted_unique([key]):
        return key, torch.arange(offset, offset + key.numel(), device=key.device)
    fresh, rank = torch.unique(key, return_inverse=True)
    return fresh, rank.add_(offset)


KEPT_TASKS = (1 << 31) - (1 << 13)
"""Most tasks whose list is kept: as many as 32 bits number."""
KEPT_BYTES = 5
"""Bytes that a kept task takes: the result's entry, and how far p lies above the base of its frame."""
FRAME = 256
"""Tasks with a common base: each matched entry of x has a task, so p rises by less than this in a frame."""
ITEM = 2048
"""Most tasks of a work item. Not measured: some hundred items a multiprocessor where there are 10 M tasks."""


def keeps(tasks: int, p: JoinProblem) -> bool:
    """Return True if the list of so many tasks takes a quarter of the memory limit or less."""
    return tasks <= min(KEPT_TASKS, p.limit // (4 * KEPT_BYTES))


@dataclass(frozen=True)
class NonzeroPairList:
    """The stored list of tasks ``begin .. end``, pairs of nonzeros; positions count from `begin`.

    Attributes:
        x_word: (n,) uint8: p of each task, less the base of its frame.
        x_base: (frames,) p of the first task of each frame.
        y_shift: (matched x,) q of a task less its position, by p.
        z_word: (n,) the entry of the result of each task.
    """

    join_order: JoinOrder
    nnz: int
    begin: int
    end: int
    x_word: Tensor
    x_base: Tensor
    y_shift: Tensor
    z_word: Tensor

    @classmethod
    def room(cls, join_order: JoinOrder, begin: int, end: int) -> NonzeroPairList:
        """A list to be filled, group by group; its `nnz` is the most entries that the result may have."""
        device = join_order.ends.device
        tasks = end - begin
        most = join_order.join.most_results
        entries = index_dtype(max(*join_order.matched, tasks))
        frames = torch.arange(begin, end, FRAME, device=device)
        starts = torch.cat([join_order.ends.new_zeros(1), join_order.ends[:-1]])
        return cls(
            *(join_order, most, begin, end),
            x_word=room(device, torch.uint8, tasks),
            x_base=torch.searchsorted(join_order.ends, frames, right=True).to(entries),
            y_shift=(join_order.first - starts + begin).to(entries),
            z_word=room(device, index_dtype(most), tasks),
        )

    def take(self, begin: int, p: Tensor, slot: Tensor) -> None:
        """Write a group of tasks at their positions."""
        start, stop = begin - self.begin, begin - self.begin + p.numel()
        frame = torch.arange(start, stop, dtype=p.dtype, device=p.device) // FRAME
        self.x_word[start:stop] = p - self.x_base.index_select(0, frame)
        self.z_word[start:stop] = slot

    @property
    def shape(self) -> tuple[int, int, int]:
        """Sizes of T: matched entries of x and of y, entries of the result."""
        return *self.join_order.matched, self.nnz

    @property
    def _result(self) -> Field:
        """Return the entry of the result of each task as a whole word of `index_dtype`'s width."""
        return Field(2, "z_word", 0, 31 if index_dtype(self.nnz) == torch.int32 else 63, True)

    def chunks(self) -> Packed:
        """The list in equal chunks of tasks: balanced, however skewed a contracted index is."""
        n = self.end - self.begin
        arrays = {"x_word": self.x_word, "x_word_base": self.x_base, "y_shift": self.y_shift, "z_word": self.z_word}
        leaf = (Field(0, "x_word", 0, 8, True, FRAME), consecutive(1, "y_shift", 0), self._result)
        view, storage = runs((), leaf, chunk=ITEM, values=Ones()), Storage(leaf=(0, 1, 2), max_item_nnz=ITEM)
        return Packed("tasks", storage, self.shape, n, view, arrays, None, n, -(-n // ITEM))

    def runs(self) -> Packed:
        """Return the list packed in runs of tasks of one entry of x, each run a work item."""
        n, (ptr, word) = self.end - self.begin, self._items
        arrays = {"item_ptr": ptr, "item_word": word, "y_shift": self.y_shift, "z_word": self.z_word}
        storage = Storage(item=(0,), leaf=(1, 2), max_item_nnz=ITEM)
        item, leaf = (
            Field(0, "item_word", 0, bits_of(self.shape[0]), True),
            (consecutive(1, "y_shift", 0), self._result),
        )
        view = runs((item,), leaf, values=Ones(), narrow=True)
        return Packed("tasks", storage, self.shape, n, view, arrays, None, n, word.numel())

    @cached_property
    def _items(self) -> tuple[Tensor, Tensor]:
        """Return pointers and entries of x of the work items: runs of one entry, cut if long."""
        bounds = self.join_order.ends.new_tensor([self.begin, max(self.begin, self.end - 1)])
        low, high = torch.searchsorted(self.join_order.ends, bounds, right=True).tolist()
        high = high + 1 if self.end > self.begin else low
        stops = self.join_order.ends[low:high].clamp(max=self.end) - self.begin
        lengths = torch.diff(stops, prepend=stops.new_zeros(1))
        pieces = (lengths + ITEM - 1) // ITEM
        run, number = crd.in_runs(pieces)
        starts = (stops - lengths)[run] + number * ITEM
        ptr = torch.cat([starts, stops.new_tensor([self.end - self.begin])])
        return ptr.to(index_dtype(self.end - self.begin)), (run + low).to(index_dtype(self.shape[0]))

    def pieces(self, size: int) -> Iterator[NonzeroPairList]:
        """Lists of about `size` of the tasks, whole frames each."""
        size = max(FRAME, size // FRAME * FRAME)
        for start in range(0, self.end - self.begin, size):
            stop = min(start + size, self.end - self.begin)
            yield NonzeroPairList(
                self.join_order,
                self.nnz,
                self.begin + start,
                self.begin + stop,
                self.x_word[start:stop],
                self.x_base[start // FRAME : -(-stop // FRAME)],
                self.y_shift + start,
                self.z_word[start:stop],
            )

    def coordinates(self) -> Tensor:
        """(3, n) int64: p, q and z of every task, in lexicographic order."""
        at = torch.arange(self.end - self.begin, device=self.x_word.device)
        p = self.x_base[at // FRAME].long() + self.x_word
        return torch.stack([p, at + self.y_shift[p], self.z_word.long()])


SPREAD = 64
"""Most places for each task when places are marked: marks and counts are zeroed, counted, summed and read, about 60
bytes of traffic beside the sectors that a task's own accesses take; not measured."""
FEW = 1 << 26
"""Places that are marked however few the tasks: 16 MB, less time than launches take."""
ROW_WORDS = 1 << 17
"""Columns of a row, for each of its tasks, up to which a loop over words of bits of these serves: 32 words of .7 ns. At
16 a task it took .6 s, and sorted groups 3 s; at 72, where each row has one task or two, 200 and 150 ms."""
WORD = 32
PLACE_BYTES = 2 * 4 / WORD
"""Bytes that a place takes while tasks are marked: its part of a word, and of the count up to it."""
BLOCK = 1024
"""Tasks of a program, and words it counts: eight a thread, so that as many loads are under way. Not measured."""
WORDS = 64
"""Words whose places a program writes, a lane a bit. Not measured."""


def markable(p: JoinProblem) -> bool:
    """Return True if there are kernels for marks, and marks are few and fit a quarter of the memory limit."""
    tasks, places = p.join.tasks, p.join.rows * p.join.columns
    fits = places * PLACE_BYTES <= p.limit / 4
    if not tasks or places > max(FEW, SPREAD * tasks) or not fits:
        return False
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    has_kernels = p.device.type == "cuda" or interpreted
    return has_kernels and p.settings.effective_backend(p.device).gpu


class Tasks:
    """All tasks of a join: one stored list if it fits in a share of the memory limit, else lists rebuilt at each use.

    Attributes:
        nnz: number of entries of the result, once its pattern is known.
        found: the places that `places` found by a native loop, which has made no list; else None.
    """

    def __init__(self, p: JoinProblem) -> None:
        self.join_order, self.problem = JoinOrder.of(p.join), p
        self.fits = keeps(p.join.tasks, p)
        self.nnz = 0
        self.found: Tensor | None = None
        self._kept: NonzeroPairList | None = None

    def places(self) -> Tensor:
        """(nnz,) the distinct places of all tasks, ascending; the list is filled on the way if it is kept."""
        if self.fits and markable(self.problem):
            return self._by_marks()
        join = self.join_order.join
        # Results are found row by row where they fit, and a row has few words of columns for each of its tasks.
        few = join.rows * join.columns <= ROW_WORDS * join.tasks and 8 * join.most_results <= self.problem.limit / 4
        if self.fits and few and (find := self.native(loops.results)):
            places = room(self.problem.device, index_dtype(join.rows * join.columns), join.most_results)
            self.nnz = find(*self.by_row, places)
            self.problem.check(self.nnz)
            self.found = places[: self.nnz]
            return self.found
        return self._by_groups()

    def _by_groups(self) -> Tensor:
        """(nnz,) the places, as `places` finds them, by operations of torch."""
        m, done = self.join_order, [self.join_order.ends.new_zeros(0)]
        filling = NonzeroPairList.room(m, 0, m.tasks) if self.fits else None
        self.nnz = 0
        with bar(m.tasks, f"pattern of {self.problem.what}", unit="tasks") as at:
            for begin, (p, _), slot, fresh in groups(m, self.problem.chunk):
                done.append(fresh)
                self.nnz += fresh.numel()
                self.problem.check(self.nnz, least=True)
                if filling is not None:
                    filling.take(begin, p, slot)
                at(begin + p.numel())
        self._kept = None if filling is None else replace(filling, nnz=self.nnz)
        return torch.cat(done)

    def __iter__(self) -> Iterator[NonzeroPairList]:
        if self.fits:
            if self._kept is None:
                self._list()
            assert self._kept is not None
            yield self._kept
            return
        for begin, (p, _), slot, _ in groups(self.join_order, self.problem.chunk):
            alone = NonzeroPairList.room(self.join_order, begin, begin + p.numel())
            alone.take(begin, p, slot)
            yield replace(alone, nnz=self.nnz)

    def native(self, loop: Callable[..., Any]) -> Callable[..., Any] | None:
        """Return a loop over all tasks as machine code; None where the settings or their number rule that out."""
        if not self.problem.settings.has_loops(self.problem.device):
            return None
        return native(loop, self.problem.device, self.join_order.tasks)

    @cached_property
    def by_row(self) -> tuple[Tensor | int, ...]:
        """Return what native loops over the tasks of each row read: see `loops.results`."""
        m = self.join_order
        return m.ends, m.first, m.row, m.column.to(index_dtype(m.join.columns)), m.join.columns

    def _list(self) -> None:
        """Make the list of tasks, of which another path, or a native loop, has found the places."""
        if self.found is None:
            self.places()
        fill = self.native(loops.tasks)
        if self.found is None or fill is None:
            if self._kept is None:
                self._by_groups()
            return
        filled = NonzeroPairList.room(self.join_order, 0, self.join_order.tasks)
        fill(*self.by_row, self.found, FRAME.bit_length() - 1, filled.x_base, filled.x_word, filled.z_word)
        self._kept = replace(filled, nnz=self.nnz)

    def _by_marks(self) -> Tensor:
        """(nnz,) the places, as `places` finds them, by kernels: a bit a place, set by each task that adds to it.

        There are four launches and a handful of calls of torch, where groups of tasks take some hundred, and one wait,
        for the number of results. Two passes over the tasks read and write little more than the list itself: tasks come
        row by row, so marks are near those set before; nothing is sorted.
        """
        m = self.join_order
        tasks = self.join_order.tasks
        new = self.join_order.ends.new_empty
        columns, column = m.join.columns, m.column.to(torch.int32)
        frames = torch.arange(0, tasks, FRAME, device=m.ends.device)
        x_base = torch.searchsorted(m.ends, frames, right=True, out_int32=True)
        x_word, y_shift = new(tasks, dtype=torch.uint8), new(m.matched[0], dtype=torch.int32)
        words = -(-m.join.rows * columns // WORD)
        bits, upto = m.ends.new_zeros(words, dtype=torch.int32), new(words, dtype=torch.int32)
        by_task = {"FRAME": FRAME, "BLOCK": BLOCK}
        arrays = (m.ends, m.first, m.row, column, x_base, bits, x_word, y_shift)
        self._launch("mark", tasks, *arrays, tasks, m.matched[0], columns, **by_task)
        self._launch("count", words, bits, upto, words, BLOCK=BLOCK)
        upto.cumsum_(0)
        self.nnz = int(upto[-1])
        self.problem.check(self.nnz)
        places, z_word = new(self.nnz), new(tasks, dtype=torch.int32)
        self._launch("write_places", words, bits, upto, places, words, WORDS=WORDS)
        arrays = (m.row, column, x_base, x_word, y_shift, bits, upto, z_word)
        self._launch("write_results", tasks, *arrays, tasks, columns, **by_task)
        self._kept = NonzeroPairList(m, self.nnz, 0, tasks, x_word, x_base, y_shift, z_word)
        return places

    def _launch(self, name: str, size: int, *arguments: Any, **constants: int) -> None:
        """Run a kernel on as many programs as `size` takes, on the device that the tasks are on."""
        from sparsetc.join import mark_kernels  # imports triton

        device = self.join_order.ends.device
        programs = -(-size // constants.get("BLOCK", WORDS))
        with on_gpu(device):
            getattr(mark_kernels, name)[(programs,)](*arguments, **constants)

    @property
    def none(self) -> NonzeroPairList:
        """A list of no tasks, by which programs are generated before there are any."""
        return replace(NonzeroPairList.room(self.join_order, 0, 0), nnz=self.nnz)

    @property
    def nbytes(self) -> int:
        """Bytes of the list, if it is kept."""
        return self.join_order.tasks * KEPT_BYTES if self.fits else 0
