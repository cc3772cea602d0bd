"""Sums over consecutive runs of rows: what generated torch programs are made of, and the end of deterministic sums.

In: tensors and offsets (runs + 1,). Out: one row a run. The fastest torch call was chosen by measurement on two x86
cores (`benchmarks/results/kernel_probes.json`): FBGEMM's embedding bag for rows of float32, MKL's sparse product for
float64 and for single elements of float32 (1.1 to 2.3 times faster there), a sorted index_add for every other type and
on a GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
import torch.nn.functional as F

from sparsetc.runtime.integer_einsum import integer_einsum
from sparsetc.tensor.sums import add_rows

LONG_RUN = 32
"""Mean rows a run from which one matrix product a run beats outer products and a sum (2 cores, R = 16)."""
MOST_SUMMED = 64
"""Rows that one thread sums, one after another, at most. Not measured on a GPU."""


def bag(index: torch.Tensor, table: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """(runs, width): for each run, the sum of ``weights[n] * table[index[n]]`` over its elements n.

    Args:
        index: (n,) rows of the table.
        table: (rows, width).
        offsets: (runs + 1,) from 0 to n.
        weights: (n,) of the table's dtype.
    """
    if table.device.type == "cpu" and index.numel() and table.shape[1]:
        if table.dtype == torch.float32 and table.shape[1] > 1:
            index = index.to(offsets.dtype)
            return F.embedding_bag(
                index, table, offsets, mode="sum", per_sample_weights=weights, include_last_offset=True
            )
        if table.dtype in (torch.float32, torch.float64):
            return _csr_product(offsets, index, weights, table)
    rows = table.index_select(0, index.long() if index.dtype == torch.int16 else index)
    return run_sums(rows * weights.unsqueeze(1), offsets)


def bags(index: torch.Tensor, table: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """(runs, k, width): for each run and position m, the sum of ``weights[n, m] * table[index[n], m]`` over its n.

    Args:
        index: (n,) rows of the table.
        table: (rows, k, width).
        offsets: (runs + 1,) from 0 to n.
        weights: (n, k) of the table's dtype.
    """
    rows, k, _ = table.shape
    wide = rows * k >= 2**31
    offsets = offsets.long() if wide else offsets
    first, flat = index.to(torch.int64 if wide else torch.int32) * k, table.flatten(0, 1)
    return torch.stack([bag(first + m, flat, offsets, weights[:, m].contiguous()) for m in range(k)], 1)


def run_sums(rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """(runs, ...): the sum of the rows of each run. rows (n, ...); offsets (runs + 1,) from 0 to n."""
    flat = rows.reshape(rows.shape[0], prod(rows.shape[1:]))
    runs = offsets.numel() - 1
    if flat.device.type == "cpu" and flat.numel() and flat.dtype in (torch.float32, torch.float64):
        index = torch.arange(flat.shape[0], dtype=offsets.dtype, device=flat.device)
        if flat.dtype == torch.float32:
            summed = F.embedding_bag(index, flat, offsets, mode="sum", include_last_offset=True)
        else:
            summed = _csr_product(offsets, index, flat.new_ones(flat.shape[0]), flat)
    else:
        owner = torch.repeat_interleave(
            torch.arange(runs, device=flat.device), torch.diff(offsets).long(), output_size=flat.shape[0]
        )
        summed = add_rows(flat.new_zeros((runs, flat.shape[1])), owner, flat)
    return summed.reshape(runs, *rows.shape[1:])


def run_products(left: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """(runs, M, N): for each run, ``left.T @ right`` over its rows. left (n, M), right (n, N)."""
    runs = offsets.numel() - 1
    if runs and left.shape[0] >= LONG_RUN * runs:
        out = left.new_empty((runs, left.shape[1], right.shape[1]))
        bounds, integers = offsets.tolist(), not (left.is_floating_point() or left.is_complex())
        for run in range(runs):
            rows = slice(bounds[run], bounds[run + 1])
            if integers:
                out[run] = integer_einsum("nm,nr->mr", left[rows], right[rows])
            else:
                torch.mm(left[rows].t(), right[rows], out=out[run])
        return out
    return run_sums(left.unsqueeze(2) * right.unsqueeze(1), offsets)


def _csr_product(
    offsets: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, table: torch.Tensor
) -> torch.Tensor:
    _hush()
    size = (offsets.numel() - 1, table.shape[0])
    # Even given arrays, torch makes a sparse tensor on the default device.
    device = weights.device
    matrix = torch.sparse_csr_tensor(
        offsets, index.to(offsets.dtype), weights, size, device=device, check_invariants=False
    )
    if table.shape[1] == 1:
        return torch.mv(matrix, table.flatten()).unsqueeze(1)
    out = table.new_empty((size[0], table.shape[1]))
    return torch.addmm(out, matrix, table, beta=0, out=out)


@lru_cache(maxsize=1)
def _hush() -> None:
    """Make torch's first CSR tensor where its one warning, that they are in beta, is not shown to the user."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        none = torch.zeros(0, dtype=torch.long, device="cpu")
        torch.sparse_csr_tensor(none.new_zeros(2), none, none, (1, 1), device="cpu")


@dataclass(frozen=True)
class SecondPass:
    """The second pass of a deterministic sum: which partial rows make up each output row.

    Atomics add in whatever order programs finish. So each addition has a partial row of its own to store: every work
    item, mostly (or fiber, or nonzero, where a result is added for each), of all parts of a plan. Each output row is
    then summed by one thread a column, so the same bits come back at every run.
    """

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
