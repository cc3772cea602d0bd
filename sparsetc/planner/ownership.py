"""Whether a part's work items store output rows, each being the row's only owner, or add to rows that others add to.

In: a part's view and what is known, or expected, of how it was packed. Out: the answer, which both the kernel and what
prices it before anything is packed ask for here.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparsetc.formats import Packed
from sparsetc.ir.nest.axes import ITEM, LANE, LEAF
from sparsetc.ir.nest.nest import Nest
from sparsetc.ir.program.statistics import Statistics


@dataclass(frozen=True)
class Circumstances:
    """What a view does not say."""

    kept: tuple[int, ...]
    """Modes that the output keeps."""
    sparse_output: bool
    distinct: bool
    """No two nonzeros have the same coordinates, or each has an output row of its own."""
    alone: bool
    """No other part adds to the same rows."""


def owns(view: Nest, at: Circumstances, how: Packed | Statistics, *, padded: bool) -> bool:
    """Whether no two work items of any part add to the same output row.

    Args:
        view: of the part.
        at: output and the other parts.
        how: the part as it was packed, or is expected to be.
        padded: whether zeros are stored beside the nonzeros.
    """
    kept = set(at.kept)
    if not at.alone:
        return False
    if view.spanning and how.items == 1 and how.stored == view.values.volume:
        return True  # one tile has every row once
    if padded and not view.blocks and not view.values.sides and (at.sparse_output or LEAF in map(view.level_of, kept)):
        return False  # runs do not mask padding: its zeros may be added to any row, but stored to none
    shared: set[int] = set()
    for level, coordinates in enumerate(view.levels):
        shared |= {c.mode for c in coordinates}
        if not kept <= shared:
            continue
        if level == ITEM:
            chunks = view.chunk and not view.levels[0] and how.items > 1
            return shared == kept and not how.split_rows and not chunks
        return shared == kept and (not how.split_fibers if level == LANE else at.distinct)
    return False
