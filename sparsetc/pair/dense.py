"""The dense path: operands unfolded over the coordinates that occur, one matrix product, and the pattern read off it.

In: a `Matching`. Out: the result's values by place. Rows, columns, contracted and batch coordinates are numbered by
those that meet anything, so a tensor whose nonzeros fill a corner of it is unfolded as that corner. The product is
(batch, free of x, contracted) . (batch, contracted, free of y). Zeros are multiplied like any other value: an infinity
or NaN of one operand reaches every entry of its row or column.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from sparsetc.pair.keys import ranks
from sparsetc.pair.symbolic import Matching


@dataclass(frozen=True)
class Sizes:
    """Extents of the unfolded operands."""

    batch: int
    free_x: int
    contracted: int
    free_y: int

    @property
    def elements(self) -> int:
        """Elements of both operands and the product."""
        pairs = self.free_x * self.contracted + self.contracted * self.free_y + self.free_x * self.free_y
        return self.batch * pairs

    @property
    def flops(self) -> int:
        """Multiplications and additions of the product."""
        return 2 * self.batch * self.free_x * self.contracted * self.free_y


class Unfolded:
    """Where each entry of the operands, and of the result, stands in the unfolded ones."""

    def __init__(self, matching: Matching) -> None:
        m, roles = matching, matching.roles
        self.matching = m
        live_x, live_y = m.x.coords[:, m.x_entry], m.y.coords[:, m.y_entry]

        def rank(letters: tuple[str, ...], both: bool) -> tuple[torch.Tensor, torch.Tensor, int]:
            """(ranks in x, ranks in y, how many) of these letters' coordinates; of x alone unless `both`."""
            own = live_x[[m.x.letters.index(c) for c in letters]]
            if not both:
                found, heads = ranks(own, m.x.extents(letters))
                return found, found, heads.numel()
            other = live_y[[m.y.letters.index(c) for c in letters]]
            found, heads = ranks(torch.cat([own, other], dim=1), m.x.extents(letters))
            return found[: own.shape[1]], found[own.shape[1] :], heads.numel()

        x_batch, y_batch, batch = rank(roles.batch, True)
        x_inner, y_inner, inner = rank(roles.contracted, True)
        x_free, _, free = rank(roles.free_x, False)
        self.sizes = Sizes(batch, free, inner, m.columns)
        self.x_at = (x_batch * free + x_free) * inner + x_inner
        self.y_at = (y_batch * inner + y_inner) * m.columns + m.column
        self.x_line = x_batch * free + x_free
        """(live x,) the line of the product that each entry of x is in: one for each row of the result."""

    @cached_property
    def line_of_row(self) -> torch.Tensor:
        """(rows,) the line of the product that holds each row of the result."""
        return self.x_line[self.matching.row_head]

    def positions(self, places: torch.Tensor) -> torch.Tensor:
        """(n,) where the product holds the results at these places."""
        columns = max(1, self.matching.columns)
        return self.line_of_row[places // columns] * columns + places % columns

    def places_of(self, product: torch.Tensor) -> torch.Tensor:
        """(nnz,) the result's places, ascending: where the product of the patterns is not 0."""
        m = self.matching
        found = torch.nonzero(product).flatten()
        row_of_line = found.new_zeros(self.sizes.batch * self.sizes.free_x)
        row_of_line[self.line_of_row] = torch.arange(m.rows, device=found.device)
        return torch.sort(row_of_line[found // m.columns] * m.columns + found % m.columns).values


@contextlib.contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """The setting of torch for float32 products, for as long as this one takes."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
