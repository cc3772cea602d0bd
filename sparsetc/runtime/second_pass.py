"""The second pass of a deterministic sum: one partial row a work item, then the items of each output row in order.

In: the output row of every work item. Out: a callable from partial rows to output rows. Atomics add in whatever order
programs finish; here each item stores its own row, and each output row is summed by one thread a column, so the same
bits come back at every run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SecondPass:
    """Which partial rows make up each output row."""

    items: int
    order: torch.Tensor | None
    """Partial rows sorted by output row; None when they are so already."""
    rows: torch.Tensor
    """(runs,) the output rows that have any item."""
    lengths: torch.Tensor
    """(runs,) items of each."""

    @classmethod
    def of(cls, row_of_item: torch.Tensor) -> SecondPass:
        """From the output row of every item, (items,) int64."""
        rising = bool((row_of_item[1:] >= row_of_item[:-1]).all())
        order = None if rising else torch.argsort(row_of_item, stable=True)
        rows, lengths = torch.unique_consecutive(
            row_of_item if order is None else row_of_item[order], return_counts=True
        )
        return cls(row_of_item.numel(), order, rows, lengths)

    def __call__(self, partial: torch.Tensor, out: torch.Tensor) -> None:
        """Write the sums of (items, …) partial rows to the rows of (rows, …) `out` that have any."""
        flat = partial.reshape(self.items, -1)
        flat = flat if self.order is None else flat.index_select(0, self.order)
        sums = torch.segment_reduce(flat, "sum", lengths=self.lengths, axis=0, unsafe=True)
        out.view(out.shape[0], -1).index_copy_(0, self.rows, sums)
