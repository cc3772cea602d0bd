"""The quotient of a matrix: which strips of columns each row touches, with equal rows compressed (1-SA, section 3.1).

In: the row and the column of every nonzero. Out: a `Quotient`: distinct patterns, each of as many rows as share it.
Rows of equal patterns are found by a hash, as Ashcraft's compression does, and compared strip by strip before they
are taken to be equal. Patterns are numbered by their hashes, so that what is made of them does not depend on the order
of the rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparsetc.tensor import coords as crd
from sparsetc.tensor.numbering import numbered


@dataclass(frozen=True)
class Quotient:
    """Distinct patterns of strips, and the rows that have them. All tensors are int64."""

    rows: torch.Tensor
    """(rows,) the numbers of the rows that have nonzeros, ascending."""
    pattern: torch.Tensor
    """(rows,) the number of each row's pattern."""
    ptr: torch.Tensor
    """(patterns + 1,) where each pattern's strips begin."""
    strips: torch.Tensor
    """The strips of each pattern, ascending; numbered among those that have nonzeros."""
    strip_count: int
    """Strips that have nonzeros."""

    @property
    def count(self) -> int:
        """Distinct patterns."""
        return self.ptr.numel() - 1


def quotient(rows: torch.Tensor, columns: torch.Tensor, n_rows: int, n_columns: int, width: int) -> Quotient:
    """The patterns of rows over strips of `width` columns.

    Args:
        rows: (nnz,) int64, below `n_rows`.
        columns: (nnz,) int64, below `n_columns`; a nonzero may be given more than once.
        n_rows: rows of the matrix.
        n_columns: columns of the matrix.
        width: columns of a strip; the last strip may have fewer.
    """
    nnz = rows.numel()
    row = numbered([rows], [n_rows], nnz, rows, ascending=_rises(rows))
    strip = numbered([columns // width], [-(-n_columns // width)], nnz, rows)
    entries = numbered([row.rank, strip.rank], [max(row.count, 1), max(strip.count, 1)], nnz, rows)
    of_row, strips = entries.coords
    ptr = offsets(torch.bincount(of_row, minlength=row.count))
    pattern, first = _equal_rows(of_row, strips, ptr)
    lengths = (ptr[1:] - ptr[:-1])[first]
    return Quotient(row.coords[0], pattern, offsets(lengths), strips[spans(ptr[first], lengths)], strip.count)


def _rises(numbers: torch.Tensor) -> bool:
    """Whether the numbers never fall; one transfer from the device."""
    return bool((numbers[1:] >= numbers[:-1]).all())


def _equal_rows(of_row: torch.Tensor, strips: torch.Tensor, ptr: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """((rows,) the number of each row's pattern; (patterns,) a row that has each)."""
    hashes = torch.zeros_like(ptr[1:]).index_add_(0, of_row, mixed(strips, 0))
    by_hash, fresh = crd.sorted_runs([hashes])
    run = torch.empty_like(by_hash).scatter_(0, by_hash, torch.cumsum(fresh, 0) - 1)
    first = by_hash[fresh]
    # A row's hash may be that of another pattern: then the row is compressed with none.
    lengths = ptr[1:] - ptr[:-1]
    alike = lengths == lengths[first][run]
    place = torch.arange(strips.numel(), device=ptr.device) - ptr[of_row]
    other = ptr[first][run][of_row] + place
    unlike = strips != strips[other.clamp_(max=max(strips.numel() - 1, 0))]
    alike[of_row[unlike]] = False
    alone = torch.nonzero(~alike).flatten()
    run[alone] = first.numel() + torch.arange(alone.numel(), device=ptr.device)
    return run, torch.cat([first, alone])


# -- arithmetic on ranges and hashes ----------------------------------------------------------------------------------


def offsets(counts: torch.Tensor) -> torch.Tensor:
    """(n + 1,) where each of n ranges begins that lie one behind the other."""
    return torch.cat([counts.new_zeros(1), torch.cumsum(counts, 0)])


def spans(starts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The numbers of ranges, one range behind the other."""
    owner = torch.repeat_interleave(lengths)
    place = torch.arange(owner.numel(), device=starts.device)
    return place + (starts - offsets(lengths)[:-1])[owner]


def mixed(numbers: torch.Tensor, seed: int) -> torch.Tensor:
    """int64 numbers that look random and depend on nothing but the given ones (splitmix64, which wraps)."""
    x = numbers + _signed((seed + 1) * 0x9E3779B97F4A7C15)
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _signed(0x94D049BB133111EB)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _signed(word: int) -> int:
    """The int64 with the low 64 bits of a word."""
    return (word + (1 << 63)) % (1 << 64) - (1 << 63)
