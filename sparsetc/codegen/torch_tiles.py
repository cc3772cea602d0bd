"""Tile programs over dense tiles -> the text of a torch function: one einsum over all tiles of a chunk.

In: a tile program whose view has sides. Out: the lines of its function. The schedule (which letter is looped, which a
dot contracts) is the GPU's affair; here a batch of tiles is one `torch.einsum`.
"""

from __future__ import annotations

from functools import cached_property
from math import prod
from string import ascii_letters

from sparsetc.codegen.torch_coordinates import RANGES, TorchCoordinates
from sparsetc.ir import names
from sparsetc.ir.nest.axes import LANE
from sparsetc.ir.tile import Add, Decode, Gather, Row, Slot, TileProgram


class TileFunctionPrinter:
    """Prints one part of dense tiles as a torch function of chunks."""

    device = "values.device"

    def __init__(self, program: TileProgram) -> None:
        self.p = program
        taken = {*program.letters, *(a.letter for a in program.axes)}
        self.batch = next(c for c in reversed(ascii_letters) if c not in taken)
        self.out: list[str] = []

    def put(self, text: str) -> None:
        self.out.append("        " + text)

    def lines(self) -> list[str]:
        p = self.p
        arguments = ["chunks", *p.arrays, *(o.name for o in p.operands), p.output]
        self.put("tiles = torch.diff(item_ptr[i0 : i1 + 1])")
        for decode in (s for s, _ in p.statements if isinstance(s, Decode)):
            self.decode(decode)
        terms, factors = (
            [self.batch + "".join(p.letters[m] for m in p.view.sequence)],
            [f"{self.values()}.view(-1, {', '.join(str(p.view.sides[m]) for m in p.view.sequence)})"],
        )
        for gather in (s for s, _ in p.statements if isinstance(s, Gather)):
            terms.append(self.gather(gather))
            factors.append(gather.out.name)
        add = next(s for s, _ in p.statements if isinstance(s, Add))
        self.add(add, f'torch.einsum("{",".join(terms)}->%s", {", ".join(factors)})')
        comment = ["# " + line for line in str(p).splitlines()]
        head = [f"def part_{p.number}({', '.join(arguments)}):", "    for i0, i1, b0, b1, n0, n1 in chunks:"]
        return [*comment, *head, *self.out]

    def decode(self, s: Decode) -> None:
        """Coordinates of the chunk's tiles, (tiles,), or of the positions along their sides, (tiles, side)."""
        if s.tile:
            # What other modes give is read a tile at a time, as they are; all else as it is stored, and then spread.
            level = LANE if s.coordinate.modes else s.level
            self.put(f"{s.name} = {self.spread(f'({self.text(s, level)})', level, LANE)}")
            return
        self.put(f"{s.name} = {self.text(s, LANE)}")
        if s.end:
            self.put(f"{names.past(s.letter)} = {s.name} >= {s.end}")
            self.put(f"{s.name} = {s.name}.clamp(max={s.end - 1})")

    def text(self, s: Decode, level: int) -> str:
        return s.coordinate.text(TorchCoordinates(self, level, along=not s.tile))

    @cached_property
    def ends(self) -> set[str]:
        """Letters whose coordinates may pass the end of the mode."""
        return {s.letter for s, _ in self.p.statements if isinstance(s, Decode) and s.end}

    def word(self, array: str, level: int) -> str:
        """The words of an array."""
        return f"{array}[{RANGES[level]}]"

    def coordinate(self, letter: str, level: int) -> str:
        """The coordinate of each tile along a mode."""
        return names.tile(letter)

    @staticmethod
    def spread(name: str, own: int, level: int) -> str:
        """A row per item repeated for each of its tiles."""
        return name if own == level else f"{name}.repeat_interleave(tiles, 0, output_size=b1 - b0)"

    def values(self) -> str:
        """All positions of the chunk's tiles."""
        view = self.p.view
        if not view.bitmap:
            return "values[n0:n1]"
        self.put(f"place = torch.arange({view.word}, device=values.device)")
        self.put(f"has = (bits[b0 * {view.words} : b1 * {view.words}].to(torch.int64)[:, None] >> place) & 1 == 1")
        self.put("tile_values = values.new_zeros(has.shape)")
        self.put("tile_values[has] = values[n0:n1]")
        if view.volume < view.words * view.word:
            self.put(f"tile_values = tile_values.view(-1, {view.words * view.word})[:, : {view.volume}].contiguous()")
        return "tile_values"

    def over(self, letter: str, letters: tuple[str, ...]) -> str:
        """A mode's coordinates, (tiles, side), laid out over (tiles, letters)."""
        if len(letters) == 1:
            return names.at(letter)
        return f"{names.at(letter)}[{', '.join([':', *(':' if c == letter else 'None' for c in letters)])}]"

    def gather(self, s: Gather) -> str:
        o = s.operand
        shape = ", ".join(str(self.p.axis(a).size) for a in o.axes)
        letters = "".join((*o.rows, *o.axes))
        if not o.rows:
            self.put(f"{s.out.name} = {o.name}.view({shape})" if shape else f"{s.out.name} = {o.name}.view(())")
            return letters
        row = ""
        for letter, extent in zip(o.rows, o.extents, strict=True):
            row = f"({row}) * {extent} + {self.over(letter, o.rows)}" if row else self.over(letter, o.rows)
        sizes = ", ".join(["-1", *(str(self.p.axis(c).size) for c in o.rows), *([shape] if shape else [])])
        self.put(f"{s.out.name} = {o.name}.view({o.nrows}, {o.width})[({row}).flatten()].view({sizes})")
        for n, letter in enumerate(o.rows):
            if letter in self.ends:
                index = ", ".join(
                    [":", *(":" if m == n else "None" for m in range(len(o.rows))), *("None" for _ in o.axes)]
                )
                self.put(f"{s.out.name} = {s.out.name}.masked_fill({names.past(letter)}[{index}], 0)")
        return self.batch + letters

    def add(self, s: Add, product: str) -> None:
        if isinstance(s.key, Slot):
            self.add_slots(s, product)
            return
        p, key = self.p, s.key
        assert isinstance(key, Row)
        kept = tuple(letter for letter, _ in key.terms)
        terms = [f"{self.over(c, kept)}" + (f" * {n}" if n != 1 else "") for c, n in key.terms]
        row = (
            f"({' + '.join(terms)}).flatten()"
            if terms
            else "torch.zeros(b1 - b0, dtype=torch.int64, device=values.device)"
        )
        self.put(f"total = {product % (self.batch + ''.join((*kept, *s.axes)))}")
        self.put(f"add_rows({p.output}.view({p.rows}, {p.width}), {row}, total.reshape(-1, {p.width}))")

    def add_slots(self, s: Add, product: str) -> None:
        """To a sparse output: the kept positions of the items' tiles that have a slot."""
        p = self.p
        assert isinstance(s.key, Slot)
        kept = s.key.kept
        count = prod(p.view.sides[p.letters.index(c)] for c in kept)
        self.put(f"total = {product % (self.batch + ''.join((*kept, *s.axes)))}.reshape(-1, {p.width})")
        slot = self.spread(f"{p.slot}.view(-1, {count})[{RANGES[s.key.level]}]", s.key.level, LANE)
        self.put(f"slot = {slot}.flatten()")
        self.put(f"add_rows({p.output}.view({p.rows}, {p.width}), slot[slot >= 0], total[slot >= 0])")
