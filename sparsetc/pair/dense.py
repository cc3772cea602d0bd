"""The dense path: operands unfolded over the coordinates that occur, one matrix product, and its pattern.

In: a `Join`. Out: the result's values by place. Rows, columns, contracted and batch coordinates are numbered by
those of matched entries, so a tensor whose nonzeros fill a corner of it is unfolded as that corner. The product is
(batch, free of x, contracted) . (batch, contracted, free of y). Zeros are multiplied like any other value: an infinity
or NaN of one operand reaches every entry of its row or column.
"""

from __future__ import annotations

import torch

from sparsetc.pair.join import Join
from sparsetc.support.cached import cached_property
from sparsetc.tensor.numbering import numbered


class Unfolded:
    """The positions of the entries of the operands, and of the result, in the unfolded ones."""

    def __init__(self, join: Join) -> None:
        m, roles = join, join.roles
        self.join, self.sizes = m, m.sizes
        n = (m.x_key.numel(), m.y_key.numel())

        def rank(letters: tuple[str, ...]) -> tuple[torch.Tensor, torch.Tensor]:
            """Ranks of the coordinates of x and of y, for letters that both have."""
            rows = zip(m.x.rows(letters, m.x_matched), m.y.rows(letters, m.y_matched), strict=True)
            found = numbered([torch.cat(pair) for pair in rows], m.x.extents(letters), sum(n), m.x.like).rank
            return found[: n[0]], found[n[0] :]

        x_batch, y_batch = rank(roles.batch)
        x_inner, y_inner = rank(roles.contracted)
        if roles.batch:
            x_free = numbered(m.x.rows(roles.free_x, m.x_matched), m.x.extents(roles.free_x), n[0], m.x.like).rank
        else:
            x_free = m.row.rank
        self.x_line = x_batch * self.sizes.free_x + x_free
        """(matched x,) the line of the product, one for each row of the result, that each entry of x is in."""
        self.x_at = self.x_line * self.sizes.contracted + x_inner
        self.y_at = (y_batch * self.sizes.contracted + y_inner) * m.columns + m.column.rank

    @cached_property
    def line_of_row(self) -> torch.Tensor | None:
        """(rows,) the line of the product that holds each row of the result; None where lines are rows."""
        if not self.join.roles.batch:
            return None
        return self.x_line.new_zeros(self.join.rows).index_copy_(0, self.join.row.rank, self.x_line)

    def positions(self, places: torch.Tensor) -> torch.Tensor:
        """(n,) the positions in the product of the results at these places."""
        if self.line_of_row is None:
            return places
        columns = max(1, self.join.columns)
        row = places // columns
        return torch.add(places - row * columns, self.line_of_row[row], alpha=columns)

    def places_of(self, product: torch.Tensor) -> torch.Tensor:
        """(nnz,) the result's places, ascending, where the product of the patterns is not 0."""
        lines = (product != 0).reshape(self.sizes.batch * self.sizes.free_x, self.join.columns)
        rows = lines if self.line_of_row is None else lines.index_select(0, self.line_of_row)
        return torch.nonzero(rows.flatten()).flatten()
