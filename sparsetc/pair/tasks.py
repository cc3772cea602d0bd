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

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from sparsetc.ir.nest.coordinates import Consecutive, Field
from sparsetc.ir.nest.nest import Nest, runs
from sparsetc.ir.nest.values import Ones
from sparsetc.ir.plan import Storage
from sparsetc.packing.base import Packed, index_dtype
from sparsetc.packing.words import bits_of
from sparsetc.pair.marks import Marks, markable
from sparsetc.pair.symbolic import Budget, Expanded, JoinOrder
from sparsetc.support.lru import cached_property
from sparsetc.support.notices import bar
from sparsetc.tensor import coords as crd
from sparsetc.tensor import numbering
from sparsetc.tensor.coords import INT32_MAX


@dataclass(frozen=True)
class TaskGroup:
    """Consecutive tasks, and the entries of the result that they add to."""

    tasks: Expanded
    slot: torch.Tensor
    """(n,) the entry of the result that each task adds to."""
    fresh: torch.Tensor
    """(m,) int64, ascending: the places that no group before has reached."""


@dataclass(frozen=True)
class Span:
    """All tasks of rows ``row .. last`` of the result: ``begin .. end``."""

    begin: int
    end: int
    row: int
    last: int


def spans(join_order: JoinOrder, size: int) -> Iterator[Span]:
    """Spans of as many whole rows as have `size` tasks, or of one row that has more."""
    if not join_order.tasks:
        return
    starts = join_order.row_starts
    ends = join_order.ends[torch.cat([starts[1:], starts.new_tensor([join_order.matched[0]])]) - 1].cpu()
    begin, row = 0, 0
    while begin < join_order.tasks:
        last = max(row + 1, int(torch.searchsorted(ends, begin + size, right=True)))
        end = int(ends[last - 1])
        yield Span(begin, end, row, last)
        begin, row = end, last


def groups(join_order: JoinOrder, size: int) -> Iterator[TaskGroup]:
    """All tasks of a join in groups of about `size`."""
    narrow = index_dtype(max(join_order.rows, join_order.columns))
    row, column = join_order.row.to(narrow), join_order.column.to(narrow)
    reached = 0
    for span in spans(join_order, size):
        found = _long_row if span.end - span.begin > size else _whole_rows
        for group in found(join_order, span, size, (row, column), reached):
            reached += group.fresh.numel()
            yield group


def _whole_rows(
    join_order: JoinOrder, span: Span, size: int, lines: tuple[torch.Tensor, torch.Tensor], reached: int
) -> Iterator[TaskGroup]:
    row, column = lines
    spread = (span.last - span.row) * join_order.columns
    tasks = join_order.expand(span.begin, span.end)
    key = row.index_select(0, tasks.p).to(torch.int32 if spread <= INT32_MAX else torch.int64)
    key = key.sub_(span.row).mul_(join_order.columns).add_(column.index_select(0, tasks.q))
    fresh, slot = distinct(key, spread, reached)
    yield TaskGroup(tasks, slot, fresh.long() + span.row * join_order.columns)


def _long_row(
    join_order: JoinOrder, span: Span, size: int, lines: tuple[torch.Tensor, torch.Tensor], reached: int
) -> Iterator[TaskGroup]:
    column = lines[1]
    pieces = [(begin, min(begin + size, span.end)) for begin in range(span.begin, span.end, size)]
    fresh = column[:0]
    for piece in pieces:
        own, _ = distinct(column.index_select(0, join_order.expand(*piece).q), join_order.columns)
        fresh = torch.unique(torch.cat([fresh, own.to(fresh.dtype)]))
    places = fresh.long() + span.row * join_order.columns
    for number, piece in enumerate(pieces):
        tasks = join_order.expand(*piece)
        rank = torch.searchsorted(fresh, column.index_select(0, tasks.q))
        yield TaskGroup(tasks, rank + reached, places[:0] if number else places)


def distinct(key: torch.Tensor, spread: int, offset: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The distinct keys of some below `spread`, ascending, and which of them each key is, counted from `offset`.

    Where few keys are possible each is marked, a byte a possible one, and the marks are counted; else keys are sorted.
    """
    if numbering.markable(spread, key.numel()):
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
"""Tasks that share a base: every matched entry of x has a task, so p rises by less than that in a frame."""
ITEM = 2048
"""Most tasks of a work item. Not measured: some hundred items a multiprocessor where there are 10 M tasks."""


def keeps(tasks: int, budget: Budget) -> bool:
    """Whether the list of so many tasks takes a quarter of the memory limit or less."""
    return tasks <= min(KEPT_TASKS, budget.limit // (4 * KEPT_BYTES))


def chunk_view(nnz: int) -> Nest:
    """The view of equal chunks of tasks: balanced, however skewed a contracted index is."""
    leaf = (
        Field(0, "x_word", 0, 8, True, FRAME),
        Consecutive(1, "y_shift", 0),
        _result(nnz),
    )
    return runs((), leaf, chunk=ITEM, values=Ones())


def run_view(entries: int, nnz: int) -> Nest:
    """The view of runs of tasks of one entry of x, which a work item shares."""
    leaf = (Consecutive(1, "y_shift", 0), _result(nnz))
    return runs((Field(0, "item_word", 0, bits_of(entries), True),), leaf, values=Ones(), narrow=True)


def _result(nnz: int) -> Field:
    """The entry of the result as a whole word, of as many bits as `index_dtype` gives it."""
    return Field(2, "z_word", 0, 31 if index_dtype(nnz) == torch.int32 else 63, True)


@dataclass(frozen=True)
class NonzeroPairList:
    """The pairs of nonzeros of tasks ``begin .. end`` as they are stored; positions count from `begin`."""

    join_order: JoinOrder
    nnz: int
    begin: int
    end: int
    x_word: torch.Tensor
    """(n,) uint8: p of each task, less the base of its frame."""
    x_base: torch.Tensor
    """(frames,) p of the first task of each frame."""
    y_shift: torch.Tensor
    """(matched x,) q of a task less its position, by p; set where p has tasks in the list."""
    z_word: torch.Tensor
    """(n,) the entry of the result of each task."""

    @classmethod
    def room(cls, join_order: JoinOrder, begin: int, end: int, most: int) -> NonzeroPairList:
        """A list to be filled, group by group; `most` is the most entries that the result may have."""
        device, tasks = join_order.ends.device, end - begin
        entries = index_dtype(max(*join_order.matched, tasks))
        frames = torch.arange(begin, end, FRAME, device=device)
        return cls(
            *(join_order, most, begin, end),
            x_word=torch.empty(tasks, dtype=torch.uint8, device=device),
            x_base=torch.searchsorted(join_order.ends, frames, right=True).to(entries),
            y_shift=torch.empty(join_order.matched[0], dtype=entries, device=device),
            z_word=torch.empty(tasks, dtype=index_dtype(most), device=device),
        )

    def take(self, group: TaskGroup) -> None:
        """Write a group at the positions of its tasks."""
        made = group.tasks
        start, stop = made.begin - self.begin, made.end - self.begin
        frame = torch.arange(start, stop, dtype=made.p.dtype, device=made.p.device) // FRAME
        self.x_word[start:stop] = made.p - self.x_base.index_select(0, frame)
        self.y_shift[made.first : made.first + made.shift.numel()] = made.shift - start
        self.z_word[start:stop] = group.slot

    @property
    def shape(self) -> tuple[int, int, int]:
        """Sizes of T: matched entries of x and of y, entries of the result."""
        return *self.join_order.matched, self.nnz

    def chunks(self) -> Packed:
        """The list as `chunk_view` reads it."""
        n = self.end - self.begin
        arrays = {"x_word": self.x_word, "x_word_base": self.x_base, "y_shift": self.y_shift, "z_word": self.z_word}
        storage = Storage(leaf=(0, 1, 2), max_item_nnz=ITEM)
        return Packed("tasks", storage, self.shape, n, chunk_view(self.nnz), arrays, None, n, -(-n // ITEM))

    def runs(self) -> Packed:
        """The list as `run_view` reads it."""
        n, (ptr, word) = self.end - self.begin, self._items
        arrays = {"item_ptr": ptr, "item_word": word, "y_shift": self.y_shift, "z_word": self.z_word}
        storage = Storage(item=(0,), leaf=(1, 2), max_item_nnz=ITEM)
        view = run_view(self.shape[0], self.nnz)
        return Packed("tasks", storage, self.shape, n, view, arrays, None, n, word.numel())

    @cached_property
    def _items(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The pointers and the p of work items: runs of one p, split where they are longer than an item."""
        bounds = self.join_order.ends.new_tensor([self.begin, max(self.begin, self.end - 1)])
        low, high = torch.searchsorted(self.join_order.ends, bounds, right=True).tolist()
        high = high + 1 if self.end > self.begin else low
        stops = self.join_order.ends[low:high].clamp(max=self.end) - self.begin
        lengths = torch.diff(stops, prepend=stops.new_zeros(1))
        pieces = (lengths + ITEM - 1) // ITEM
        run = torch.repeat_interleave(pieces)
        number = torch.arange(run.numel(), device=run.device) - (torch.cumsum(pieces, 0) - pieces)[run]
        starts = (stops - lengths)[run] + number * ITEM
        ptr = torch.cat([starts, stops.new_tensor([self.end - self.begin])])
        return ptr.to(index_dtype(self.end - self.begin)), (run + low).to(index_dtype(self.shape[0]))

    def pieces(self, size: int) -> Iterator[NonzeroPairList]:
        """Lists of about `size` of the tasks, whole frames each."""
        size = max(FRAME, size // FRAME * FRAME)
        for start in range(0, self.end - self.begin, size):
            stop = min(start + size, self.end - self.begin)
            arrays = (self.x_word[start:stop], self.x_base[start // FRAME : -(-stop // FRAME)])
            moved = (self.y_shift + start, self.z_word[start:stop])
            yield NonzeroPairList(self.join_order, self.nnz, self.begin + start, self.begin + stop, *arrays, *moved)

    def coordinates(self) -> torch.Tensor:
        """(3, n) int64: p, q and z of every task, in lexicographic order."""
        at = torch.arange(self.end - self.begin, device=self.x_word.device)
        p = self.x_base[at // FRAME].long() + self.x_word
        return torch.stack([p, at + self.y_shift[p], self.z_word.long()])


class Tasks:
    """All tasks as one list, kept, where it fits a share of the memory limit; else as lists made again at each use."""

    def __init__(self, join_order: JoinOrder, budget: Budget) -> None:
        self.join_order, self.budget = join_order, budget
        self.fits = keeps(join_order.tasks, budget)
        self.nnz = 0
        """Number of entries of the result, once its pattern is known."""
        self._kept: NonzeroPairList | None = None

    def places(self) -> torch.Tensor:
        """(nnz,) the distinct places of all tasks, ascending; the list is filled on the way if it is kept."""
        if self._marked:
            marks = Marks(self.join_order, FRAME)
            self.nnz = marks.results
            self.budget.check(self.nnz)
            self._kept = self._list_of(marks)
            return marks.places()
        done = [self.join_order.ends.new_zeros(0)]
        filling = self._room(0, self.join_order.tasks) if self.fits else None
        self.nnz = 0
        with bar(self.join_order.tasks, f"pattern of {self.budget.what}", unit="tasks") as at:
            for group in groups(self.join_order, self.budget.chunk):
                done.append(group.fresh)
                self.nnz += group.fresh.numel()
                self.budget.check(self.nnz, least=True)
                if filling is not None:
                    filling.take(group)
                at(group.tasks.end)
        self._kept = None if filling is None else replace(filling, nnz=self.nnz)
        return torch.cat(done)

    def __iter__(self) -> Iterator[NonzeroPairList]:
        if self._kept is None and self._marked:
            self._kept = self._list_of(Marks(self.join_order, FRAME))
        if self._kept is not None:
            yield self._kept
            return
        filling = self._room(0, self.join_order.tasks) if self.fits else None
        for group in groups(self.join_order, self.budget.chunk):
            if filling is not None:
                filling.take(group)
                continue
            alone = self._room(group.tasks.begin, group.tasks.end)
            alone.take(group)
            yield replace(alone, nnz=self.nnz)
        if filling is not None:
            self._kept = replace(filling, nnz=self.nnz)
            yield self._kept

    @property
    def _marked(self) -> bool:
        """Whether kernels, and not groups of tasks, find the pattern and the list."""
        return self.fits and markable(self.join_order, self.budget)

    def _list_of(self, marks: Marks) -> NonzeroPairList:
        arrays = (marks.x_word, marks.x_base, marks.y_shift, marks.z_word())
        return NonzeroPairList(self.join_order, self.nnz, 0, self.join_order.tasks, *arrays)

    def _room(self, begin: int, end: int) -> NonzeroPairList:
        return NonzeroPairList.room(self.join_order, begin, end, self.join_order.join.most_results)

    @property
    def none(self) -> NonzeroPairList:
        """A list of no tasks, by which programs are generated before there are any."""
        return replace(self._room(0, 0), nnz=self.nnz)

    @property
    def nbytes(self) -> int:
        """Bytes of the list, if it is kept."""
        return self.join_order.tasks * KEPT_BYTES if self.fits else 0
