"""The rows of a chunk, by level: where they lie among those of all chunks, and which belong to one above.

In: the view of a tile program. Out: texts over ``i0, i1, b0, b1, n0, n1``: the items of a chunk, their fibers, tiles or
pairs, and their stored nonzeros.
"""

from __future__ import annotations

from sparsetc.codegen.torch_rewriting import rows_of
from sparsetc.ir.nest.axes import Fibers
from sparsetc.ir.program.tile import TileProgram

ENDS = (("i0", "i1"), ("b0", "b1"), ("n0", "n1"))
"""Where the rows of each level begin and end in a chunk."""
RANGES = tuple(":".join(ends) for ends in ENDS)
COUNTS = tuple(f"{end} - {first}" for first, end in ENDS)


class Rows:
    """What a chunk has of each level."""

    def __init__(self, program: TileProgram, device: str) -> None:
        self.p, self.device = program, device
        self.axes = {axis.level: axis for axis in program.view.loops}

    def of(self, level: int) -> int:
        """The level whose positions are the rows of what is made at a level."""
        return rows_of(self.p, level)

    def offsets(self, level: int) -> str:
        """Where the rows of a level begin that belong to each row above, and where the last end, within the chunk."""
        view, (first, end) = self.p.view, ENDS[level]
        if view.chunk and view.levels[0]:
            begins = f"torch.arange(i0, i1 + 1, device={self.device}).mul_({view.chunk})"
            return f"{begins}.sub_({first}).clamp_(max={end} - {first})"
        if view.chunk:
            return f"torch.tensor([0, {end} - {first}], device={self.device})"
        above, last = ENDS[self.above(level)]
        array = "block_ptr" if isinstance(self.axes[level], Fibers) else self.p.arrays[0]
        return f"{array}[{above} : {last} + 1] - {first}"

    def above(self, level: int) -> int:
        """The next level up that has rows."""
        return self.of(level - 1)

    def spread(self, name: str, own: int, level: int) -> str:
        """A row of one level repeated for each row of a deeper one that belongs to it."""
        own, level = self.of(own), self.of(level)
        if own == level:
            return name
        name = self.spread(name, own, self.above(level))
        if self.p.view.chunk and self.p.view.levels[0]:
            return f"{name}.repeat_interleave({self.p.view.chunk}, 0)[: {COUNTS[level]}]"
        return f"{name}.repeat_interleave(torch.diff({self.offsets(level)}), 0, output_size={COUNTS[level]})"
