"""The dense path: operands unfolded over the coordinates that occur, one matrix product, and the pattern read off it.

In: a `Meeting`. Out: the result's values by place. Rows, columns, contracted and batch coordinates are numbered by
those that meet anything, so a tensor whose nonzeros fill a corner of it is unfolded as that corner. The product is
(batch, free of x, contracted) . (batch, contracted, free of y). Zeros are multiplied like any other value: an infinity
or NaN of one operand reaches every entry of its row or column.
"""

from __future__ import annotations

from functools import cached_property

import torch

from sparsetc.numbering import numbered
from sparsetc.pair.meeting import Meeting


class Unfolded:
    """Where each entry of the operands, and of the result, stands in the unfolded ones."""

    def __init__(self, meeting: Meeting) -> None:
        m, roles = meeting, meeting.roles
        self.meeting, self.sizes = m, m.sizes
        n = (m.x_key.numel(), m.y_key.numel())

        def rank(letters: tuple[str, ...]) -> tuple[torch.Tensor, torch.Tensor]:
            """Ranks in x and in y of coordinates that both have."""
            rows = zip(m.x.rows(letters, m.x_live), m.y.rows(letters, m.y_live), strict=True)
            found = numbered([torch.cat(pair) for pair in rows], m.x.extents(letters), sum(n), m.x.like).rank
            return found[: n[0]], found[n[0] :]

        x_batch, y_batch = rank(roles.batch)
        x_inner, y_inner = rank(roles.contracted)
        if roles.batch:
            x_free = numbered(m.x.rows(roles.free_x, m.x_live), m.x.extents(roles.free_x), n[0], m.x.like).rank
        else:
            x_free = m.row.rank
        self.x_line = x_batch * self.sizes.free_x + x_free
        """(live x,) the line of the product that each entry of x is in: one for each row of the result."""
        self.x_at = self.x_line * self.sizes.contracted + x_inner
        self.y_at = (y_batch * self.sizes.contracted + y_inner) * m.columns + m.column.rank

    @cached_property
    def line_of_row(self) -> torch.Tensor:
        """(rows,) the line of the product that holds each row of the result."""
        return self.x_line.new_zeros(self.meeting.rows).index_copy_(0, self.meeting.row.rank, self.x_line)

    def positions(self, places: torch.Tensor) -> torch.Tensor:
        """(n,) where the product holds the results at these places."""
        columns = max(1, self.meeting.columns)
        row = places // columns
        return torch.add(places - row * columns, self.line_of_row[row], alpha=columns)

    def places_of(self, product: torch.Tensor) -> torch.Tensor:
        """(nnz,) the result's places, ascending: where the product of the patterns is not 0."""
        m = self.meeting
        found = torch.nonzero(product).flatten()
        row_of_line = found.new_zeros(self.sizes.batch * self.sizes.free_x)
        row_of_line[self.line_of_row] = torch.arange(m.rows, device=found.device)
        line = found // m.columns
        return torch.sort(torch.add(found - line * m.columns, row_of_line[line], alpha=m.columns)).values
