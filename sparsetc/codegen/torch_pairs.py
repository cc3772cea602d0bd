"""Tile programs over a task list -> the text of a torch function: batched products over a chunk of pairs.

In: a tile program whose view has pairs, of whole tiles that are not in halves. Out: the lines of its function. As for
tiles of one operand, the schedule is the GPU's affair, and so are 16-bit halves: a torch program's tiles are of the
type that sums are kept in.
"""

from __future__ import annotations

from sparsetc.errors import PlanError
from sparsetc.ir.tile import TileProgram
from sparsetc.ir.view import PAIRED


class PairFunctionPrinter:
    """Prints one part over pairs of whole tiles as a torch function of chunks of pairs."""

    def __init__(self, program: TileProgram) -> None:
        if any(tiles.bitmap or tiles.halves for tiles in program.view.pairs):
            raise PlanError("the torch programs of pairs read whole tiles")
        self.p = program

    def lines(self) -> list[str]:
        p = self.p
        row, column = (p.axis(c).size for c in p.output_axes)
        lines = [f"def part_{p.number}(chunks, {', '.join(p.arrays)}, {p.output}):", "    for n0, n1 in chunks:"]
        for operand in map(p.stored, PAIRED):
            sides = ", ".join(map(str, operand.tiles.sides))
            tiles = f"{operand.array('values')}.view(-1, {sides})"
            lines.append(f"        {operand.name} = {tiles}[pair_{operand.name}[n0:n1]]")
        lines += [
            "        item = torch.searchsorted(pair_ptr, torch.arange(n0, n1, device=pair_ptr.device), right=True) - 1",
            f"        add_rows({p.output}.view(-1, {row}, {column}), item, torch.bmm(x, y.transpose(1, 2)))",
        ]
        return [*("# " + line for line in str(p).splitlines()), *lines]
