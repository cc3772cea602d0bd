"""The second pass of a deterministic sum: one partial row for each addition, then those of each output row in order.

In: the output row of every partial row: of every work item, mostly (or fiber, or nonzero, where a result is added for
each), of all parts of a plan. Out: a callable from partial rows to output rows. Atomics add in whatever order programs
finish; here each addition has a row of its own to store, and each output row is summed by one thread a column, so the
same bits come back at every run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

MOST_SUMMED = 64
"""Rows that one thread sums, one after another, at most. Not measured on a GPU."""


@dataclass(frozen=True)
class SecondPass:
    """Which partial rows make up each output row."""

    partials: int
    order: torch.Tensor | None
    """Partial rows sorted by output row; None when they are so already."""
    rows: torch.Tensor
    """(runs,) the output rows that have any partial row."""
    lengths: tuple[torch.Tensor, ...]
    """How many consecutive rows make up each sum: of the partial rows first, then of their sums, and so on, until
    there is one a run."""
    stored: int = 0
    """Rows that lie before the partial ones: those of the result, of which some parts store their own; or none."""

    @classmethod
    def of(cls, row_of_partial: torch.Tensor, stored: int = 0) -> SecondPass:
        """From the output row of every partial row, (partials,) int64, and how many rows lie before these."""
        rising = bool((row_of_partial[1:] >= row_of_partial[:-1]).all())
        order = None if rising else torch.argsort(row_of_partial, stable=True)
        rows, lengths = torch.unique_consecutive(
            row_of_partial if order is None else row_of_partial[order], return_counts=True
        )
        return cls(row_of_partial.numel(), order, rows, tuple(_in_pieces(lengths)), stored)

    def sums(self, partial: torch.Tensor) -> torch.Tensor:
        """(runs, width) the sums of (partials, …) partial rows, by output row."""
        flat = partial.reshape(self.partials, -1)
        flat = flat if self.order is None else flat.index_select(0, self.order)
        for lengths in self.lengths:
            flat = torch.segment_reduce(flat, "sum", lengths=lengths, axis=0, unsafe=True)
        return flat

    def __call__(self, partial: torch.Tensor, out: torch.Tensor) -> None:
        """Write the sums of (partials, …) partial rows to the rows of (rows, …) `out` that have any."""
        if self.partials:  # of no rows, the width of a row is not known
            out.view(out.shape[0], -1).index_copy_(0, self.rows, self.sums(partial))

    def add(self, partial: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Add the sums to the rows of `out`, which is returned; one addition a row, so the same bits come back."""
        if self.partials:
            out.view(out.shape[0], -1).index_add_(0, self.rows, self.sums(partial))
        return out


def _in_pieces(lengths: torch.Tensor) -> Iterator[torch.Tensor]:
    """(pieces,) lengths of pieces of runs, of `MOST_SUMMED` rows at most; then of runs of such pieces, and so on."""
    while lengths.numel() and int(lengths.max()) > MOST_SUMMED:
        pieces = (lengths + MOST_SUMMED - 1) // MOST_SUMMED
        own = torch.full((int(pieces.sum()),), MOST_SUMMED, dtype=lengths.dtype, device=lengths.device)
        own[pieces.cumsum(0) - 1] = lengths - (pieces - 1) * MOST_SUMMED
        yield own
        lengths = pieces
    yield lengths
