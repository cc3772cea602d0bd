"""The pattern of a result and the list of its tasks by marks: a bit a place, set by each task that adds to it.

In: a `JoinOrder` whose list is kept. Out: `Marks`: the number of results, their places, and the arrays of the list. The
kernels are Triton's, in four launches and a handful of calls of torch, where groups of tasks (`expansion`) take some
hundred; one wait, for the number of results. Two passes over the tasks read and write little more than the list itself:
tasks come row by row, so marks are near those set before; nothing is sorted.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

import torch

from sparsetc.pair.symbolic import Budget, JoinOrder
from sparsetc.support.lru import cached_property

SPREAD = 64
"""Places for each task up to which they are marked: two words of marks and two of counts, which are zeroed, counted,
summed and gone through, about 60 bytes of traffic, beside the sectors that a task's own accesses take; not measured."""
FEW = 1 << 26
"""Places that are marked however few the tasks: 16 MB, less time than launches take."""
WORD = 32
PLACE_BYTES = 2 * 4 / WORD
"""Bytes that a place takes while tasks are marked: its part of a word, and of the count up to it."""

BLOCK = 1024
"""Tasks of a program, and words that one counts: eight a thread, so that as many loads are under way. Not measured."""
WORDS = 64
"""Words whose places a program writes, a lane a bit. Not measured."""


def markable(join_order: JoinOrder, budget: Budget) -> bool:
    """Whether there are kernels for marks, and marks take a quarter of the memory limit or less and are not many."""
    tasks, places = join_order.tasks, join_order.rows * join_order.columns
    fits = places * PLACE_BYTES <= budget.limit / 4
    return tasks > 0 and places <= max(FEW, SPREAD * tasks) and fits and _has_kernels(budget)


def _has_kernels(budget: Budget) -> bool:
    if budget.settings.effective_backend(budget.device) != "triton":
        return False
    return budget.device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


class Marks:
    """The places that tasks reach, as bits, and the words of p and q of the list of all tasks."""

    def __init__(self, join_order: JoinOrder, frame: int) -> None:
        """Mark all places; `frame`, a power of two up to `BLOCK`, is the number of tasks that share a base."""
        self.join_order, self.frame = join_order, frame
        m, tasks, new = join_order, join_order.tasks, join_order.ends.new_empty
        self._column = m.column.to(torch.int32)
        frames = torch.arange(0, tasks, frame, device=m.ends.device)
        self.x_base = torch.searchsorted(m.ends, frames, right=True, out_int32=True)
        """(frames,) int32: p of the first task of each."""
        self.x_word = new(tasks, dtype=torch.uint8)
        """(tasks,) p of each task, less the base of its frame."""
        self.y_shift = new(m.matched[0], dtype=torch.int32)
        """(matched x,) q of a task less its number, by p."""
        self._words = -(-m.rows * m.columns // WORD)
        self._bits = m.ends.new_zeros(self._words, dtype=torch.int32)
        given = (m.ends, m.first, m.row, self._column, self.x_base)
        made = (self._bits, self.x_word, self.y_shift)
        self._launch("mark", tasks, *given, *made, tasks, m.matched[0], m.columns, FRAME=frame, BLOCK=BLOCK)

    @cached_property
    def _upto(self) -> torch.Tensor:
        """(words,) int32, the number of marks up to and with each word."""
        counts = torch.empty_like(self._bits)
        self._launch("count", self._words, self._bits, counts, self._words, BLOCK=BLOCK)
        return counts.cumsum_(0)

    @cached_property
    def results(self) -> int:
        """The number of places that are marked; waits for the device."""
        return int(self._upto[-1])

    def places(self) -> torch.Tensor:
        """(results,) int64, the places that are marked, ascending."""
        found = self.join_order.ends.new_empty(self.results)
        self._launch("write_places", self._words, self._bits, self._upto, found, self._words, WORDS=WORDS)
        return found

    def z_word(self) -> torch.Tensor:
        """(tasks,) int32, the entry of the result that each task adds to."""
        m, tasks = self.join_order, self.join_order.tasks
        found = m.ends.new_empty(tasks, dtype=torch.int32)
        given = (m.row, self._column, self.x_base, self.x_word, self.y_shift, self._bits, self._upto)
        self._launch("write_results", tasks, *given, found, tasks, m.columns, FRAME=self.frame, BLOCK=BLOCK)
        return found

    def _launch(self, name: str, size: int, *arguments: Any, **constants: int) -> None:
        """Run a kernel on as many programs as `size` takes, on the device that the tasks are on."""
        from sparsetc.pair import mark_kernels

        device = self.join_order.ends.device
        programs = -(-size // constants.get("BLOCK", WORDS))
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            getattr(mark_kernels, name)[(programs,)](*arguments, **constants)
