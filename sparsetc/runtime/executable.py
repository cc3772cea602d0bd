"""Executable: generated programs and how their results come together; all tensors are given at each run.

In: tile programs, and the dtypes and sizes they are made for. Out: `run`, a function of flat tensors: the arrays of the
storages, packed values, dense tables, and an output if the caller has one. It knows no sparse tensor, no plan and no
gradient, so what runs can be tested, streamed, or run on another device's arrays alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsetc.codegen.parts import Call, PartArrays, Values, each
from sparsetc.codegen.programs import Programs
from sparsetc.support import Ints
from sparsetc.support.checks import room
from sparsetc.tensor.coords import picked
from sparsetc.tensor.dtypes import dtype_name, segments

Rows = Tensor | None
MOST_SUMMED = 64
"""Rows that one thread sums, one after another, at most. Not measured on a GPU."""


@dataclass(frozen=True)
class SecondPass:
    """The second pass of a deterministic sum: which partial rows make up each output row.

    Atomics add in whatever order programs finish. So each addition has a partial row of its own to store: every work
    item, mostly (or fiber, or nonzero, where a result is added for each), of all parts of a plan. Each output row is
    then summed by one thread a column, so the same bits come back at every run.

    Attributes:
        partials: number of partial rows.
        order: partial rows sorted by output row; None when they are sorted already.
        rows: (runs,) the output rows that have any partial row.
        lengths: how many consecutive rows make up each sum: of the partial rows first, then of their sums, and so on,
            until there is one a run.
        stored: rows that lie before the partial ones: those of the result, of which some parts store their own; or
            none.
    """

    partials: int
    order: Tensor | None
    rows: Tensor
    lengths: tuple[Tensor, ...]
    stored: int = 0

    @classmethod
    def of(cls, row_of_partial: Tensor, stored: int = 0) -> SecondPass:
        """Make the second pass from the output row of every partial row, (partials,) int64; `stored` come first."""
        rising = bool((row_of_partial[1:] >= row_of_partial[:-1]).all())
        order = None if rising else torch.argsort(row_of_partial, stable=True)
        rows, lengths = torch.unique_consecutive(
            row_of_partial if order is None else row_of_partial[order], return_counts=True
        )
        return cls(row_of_partial.numel(), order, rows, tuple(segments(lengths, MOST_SUMMED)), stored)

    def __call__(self, partial: Tensor, out: Tensor, accumulate: bool = False) -> None:
        """Write the sums of (partials, …) partial rows to the rows of (rows, …) `out` that have any, or add them."""
        if not self.partials:  # the width of a row is not known
            return
        flat = partial.reshape(self.partials, -1)
        flat = picked(flat, self.order)
        for lengths in self.lengths:
            flat = torch.segment_reduce(flat, "sum", lengths=lengths, axis=0, unsafe=True)
        rows = out.view(out.shape[0], -1)
        (rows.index_add_ if accumulate else rows.index_copy_)(0, self.rows, flat)


@dataclass(frozen=True)
class Arrays:
    """The tensors that are read beside values and dense operands.

    Attributes:
        second: the partial rows that make up each row of a deterministic sum; None of any other.
        zeroed: (rows,) the rows that are zeros before programs run, every other one being stored; None where all are.
    """

    parts: tuple[PartArrays, ...]
    second: SecondPass | None = None
    zeroed: Tensor | None = None


class Executable:
    """The programs of one step, ready to run."""

    def __init__(
        self, programs: Programs, rows: int, width: Ints, dtype: torch.dtype, covered: bool, strides: Ints | None = None
    ) -> None:
        """Take programs.

        Args:
            programs: the generated programs of all parts.
            rows: how many rows the result has.
            width: sizes of the dense axes of a row.
            dtype: the result's.
            covered: whether the items together reach every row.
            strides: of the result; contiguous where there are none.
        """
        self.strides = strides
        self.programs = programs
        self.shape = (rows, *width)
        self.dtype = dtype
        stored = [p.result.owned for p in programs.programs]
        self.stores = any(stored)
        self.zeroes = not (all(stored) and covered)
        self.copies = max((p.result.copies for p in programs.programs), default=1)
        self._bound: tuple[Arrays, Call, torch.device] | None = None

    def run(
        self,
        arrays: Arrays,
        values: Values,
        dense: Sequence[Tensor],
        out: Tensor | None = None,
        accumulate: bool = False,
    ) -> Tensor:
        """Run, outside autograd; on a GPU without waiting for it.

        Args:
            arrays: of the storages that the programs were made for, or of others of the same form.
            values: (stored,) packed, one tensor a part, or `InHalves`; None of a part whose values are all 1.
            dense: tables, as ``program.operands`` names them; contiguous but for a program that covers the result.
            out: (rows, *width) contiguous, of this executable's dtype; made where there is none.
            accumulate: add to `out` and not overwrite it.

        Returns:
            `out`, or what was made in its place.
        """
        zeroed, second = arrays.zeroed, arrays.second
        apart = self.copies > 1 or (self.stores if second is None else second.stored)  # what is stored would overwrite
        if out is not None and accumulate and apart:
            return out.add_(self.run(arrays, values, dense))
        _, call, device = self.bind(arrays, values, dense)
        if second is not None:
            return self._ordered(partial(call, values, dense), second, zeroed, out, accumulate)
        if self.copies > 1:
            every = torch.zeros((self.copies, *self.shape), dtype=self.dtype, device=device)
            call(values, dense, every)
            return torch.sum(every, 0, out=out)
        zeroes = zeroed is None and self.zeroes
        if out is None:
            out = self.empty(device, zeroes)
        elif zeroes and not accumulate:
            out.zero_()
        if zeroed is not None and zeroed.numel():
            out.index_fill_(0, zeroed, 0)
        call(values, dense, out)
        return out

    def on_arrays(self, arrays: Arrays, values: Values) -> Callable[[Any], Any] | None:
        """Return native loops with these values as a function from their one dense operand to a flat result.

        Both are ndarrays, so a call takes a fraction of the time of `run`. None where there is more than one pass of
        native loops.
        """
        zeroed = arrays.zeroed
        if not self.programs.backend.loops or arrays.second is not None:
            return None
        _, call, _ = self.bind(arrays, values, ())
        stored: Any = [None if one is None else one.numpy() for one in each(values)]
        count, dtype = prod(self.shape), dtype_name(self.dtype)
        make: Any = np.zeros if zeroed is None and self.zeroes else np.empty
        rows = None if zeroed is None or not zeroed.numel() else zeroed.numpy()

        def run(operand: Any) -> Any:
            out = make(count, dtype)
            if rows is not None:
                out.reshape(self.shape)[rows] = 0
            call(stored, [operand], out)
            return out

        return run

    def empty(self, device: torch.device, zeroed: bool = False) -> Tensor:
        """Return a result with the strides that programs write, uninitialised if not `zeroed`."""
        if self.strides is None:
            if not zeroed:
                return room(device, self.dtype, *self.shape)
            return torch.zeros(self.shape, dtype=self.dtype, device=device)
        out = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)
        return out.zero_() if zeroed else out

    def _ordered(
        self, write: Callable[[Tensor], None], second: SecondPass, zeroed: Rows, out: Rows, accumulate: bool
    ) -> Tensor:
        """Partial rows, zeros first since what is padding stores nothing; then their sums.

        Where some parts store rows of the result, all rows of it lie before the partial ones.
        """
        count = second.stored + second.partials
        make = torch.zeros if zeroed is None else torch.empty
        rows = make((count, *self.shape[1:]), dtype=self.dtype, device=second.rows.device)
        if zeroed is not None:
            rows[second.stored :].zero_()
            rows.index_fill_(0, zeroed, 0)
        write(rows)
        stored, added = rows[: second.stored], rows[second.stored :]
        if second.stored:
            second(added, stored)
            return stored if out is None else out.copy_(stored)
        if out is None:
            out = torch.zeros(self.shape, dtype=self.dtype, device=rows.device)
        elif not accumulate:
            out.zero_()
        second(added, out, accumulate)
        return out

    def bind(self, arrays: Arrays, values: Values, dense: Sequence[Tensor]) -> tuple[Arrays, Call, torch.device]:
        """Return these arrays, the programs bound to them, and the device, which are kept for the next call."""
        if self._bound is None or self._bound[0] is not arrays:
            # A storage whose coordinates are all computed has no arrays.
            read = (*(a for part in arrays.parts for a in part.index), *dense, *each(values))
            call, device = self.programs.bind(arrays.parts), next(t.device for t in read if t is not None)
            self._bound = arrays, call, device
        return self._bound
