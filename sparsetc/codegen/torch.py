"""Tile programs -> the text of one torch module: the default without a GPU, and the reference for tests.

In: the same tile programs that `codegen.triton` prints, of views with one lane (so nothing is padded). Out: source in
which every statement is done for a whole chunk of items at once: a tile of the leaf level has a row per nonzero, one
of the lane level a row per fiber, one of the item level a row per item; a loop becomes a sum over runs of rows.
Chunks keep what is made on the way inside the cache.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

from sparsetc.codegen.torch_contractions import contracted
from sparsetc.codegen.torch_coordinates import RANGES, TorchCoordinates
from sparsetc.codegen.torch_pairs import PairFunctionPrinter
from sparsetc.codegen.torch_tiles import TileFunctionPrinter
from sparsetc.ir import names
from sparsetc.ir.nest.axes import ITEM, LANE, LEAF
from sparsetc.ir.tile import (
    LANES,
    Add,
    Decode,
    Gather,
    Loop,
    Operand,
    Position,
    Product,
    Row,
    Statement,
    Sum,
    Tile,
    TileProgram,
    Value,
)

RUNTIME = ("add_rows", "bag", "bags", "run_products", "run_sums")
"""What generated programs may call."""


@lru_cache(maxsize=256)
def module_source(programs: tuple[TileProgram, ...], header: str) -> str:
    """The whole file: header and one function a part."""
    functions = ["\n".join(_printer(program).lines()) for program in programs]
    body = "\n\n\n".join(functions)
    used = [name for name in RUNTIME if f"{name}(" in body]
    head = [f'"""{header}"""']
    head += ["import torch"] if "torch." in body else []
    head += [f"from sparsetc.runtime.segments import {', '.join(used)}"] if used else []
    return "\n\n".join(head) + f"\n\n\n{body}\n"


def _printer(program: TileProgram) -> PairFunctionPrinter | TileFunctionPrinter | FunctionPrinter:
    if program.view.pairs:
        return PairFunctionPrinter(program)
    return TileFunctionPrinter(program) if program.view.sides else FunctionPrinter(program)


def leaf_elements(program: TileProgram) -> tuple[int, int]:
    """(elements made per nonzero, per fiber): what decides how many items a chunk may take."""
    if program.view.sides:
        return 4, program.width * program.view.volume // max(1, min(program.view.sides))
    per = {ITEM: 1, LANE: 1, LEAF: 1}
    printer = FunctionPrinter(program)
    fused = printer.fused
    for statement, _ in printer.p.statements:
        if isinstance(statement, Gather | Product) and not (
            isinstance(statement, Gather) and statement.out.name in fused
        ):
            level = max(t.level for t in statement.inputs) if isinstance(statement, Product) else statement.out.level
            if isinstance(statement, Product) and any(t.name in fused for t in statement.inputs):
                level = statement.out.level
            per[level] += prod(program.axis(axis).size for axis in statement.out.axes if axis != LANES)
    return per[LEAF], per[LANE]


class FunctionPrinter:
    """Prints one tile program as a torch function of chunks."""

    def __init__(self, program: TileProgram) -> None:
        self.p = contracted(program)
        self.out: list[str] = []
        self.words: set[str] = set()
        # A leaf product of the values and one gathered operand is a bag: the gathered rows are never made.
        self.fused = {
            next(t for t in s.inputs if t.name != "x").name
            for s, _ in self.p.statements
            if isinstance(s, Product) and s.accumulate and not s.dot and self._is_bag(s)
        }
        # Nor where weights have the first axes of the rows, and rows have as many elements for each position of these.
        self.bags = {
            s: gather
            for s, _ in self.p.statements
            if isinstance(s, Product) and s.accumulate and not s.dot and (gather := self._in_bags(s))
        }
        self.fused |= {gather.out.name for gather in self.bags.values()}

    def _is_bag(self, s: Product) -> bool:
        weighted = len(s.inputs) == 2 and s.inputs[0].name == "x" and s.inputs[1].level == LEAF
        return weighted and any(isinstance(g, Gather) and g.out == s.inputs[1] for g, _ in self.p.statements)

    def _in_bags(self, s: Product) -> Gather | None:
        """The factor whose rows are added up, weighted by the other factors, which have its first axes alone."""
        gathers = {g.out.name: g for g, _ in self.p.statements if isinstance(g, Gather)}
        for tile in s.inputs:
            gather, others = gathers.get(tile.name), [t for t in s.inputs if t is not tile]
            axes, own = tile.axes[1:], {a for t in others for a in t.axes} - {LANES}
            shared = axes[: len(own)]
            fits = set(shared) == own and 0 < len(own) < len(axes) and axes == s.out.axes[1:]
            deep = tile.level != ITEM and all(t.level <= tile.level for t in others)
            if gather is None or not fits or not deep or all(t.level == ITEM for t in others):
                continue
            if self._positions(shared) <= self._positions(axes[len(own) :]):
                return gather
        return None

    def _positions(self, axes: tuple[str, ...]) -> int:
        return prod(self.p.axis(a).size for a in axes)

    @property
    def device(self) -> str:
        return f"{self.p.output}.device" if self.p.view.pattern else "values.device"

    def put(self, text: str) -> None:
        self.out.append("        " + text)

    def lines(self) -> list[str]:
        p = self.p
        arguments = ["chunks", *p.arrays, *(o.name for o in p.operands), p.output]
        for statement in p.body:
            self.statement(statement)
        comment = ["# " + line for line in str(p).splitlines()]
        head = [f"def part_{p.number}({', '.join(arguments)}):", "    for i0, i1, b0, b1, n0, n1 in chunks:"]
        return [*comment, *head, *self.out]

    def statement(self, s: Statement) -> None:
        if isinstance(s, Loop):
            for inner in s.body:
                self.statement(inner)
        elif isinstance(s, Decode):
            self.decode(s)
        elif isinstance(s, Value):
            ones = f"torch.ones(n1 - n0, dtype={self.p.output}.dtype, device={self.device})"
            self.put(f"{s.out.name} = {ones if self.p.view.pattern else 'values[n0:n1]'}")
        elif isinstance(s, Gather):
            if s.out.name not in self.fused:
                self.put(f"{s.out.name} = {self.rows(s.operand, s.out.level)}")
        elif isinstance(s, Sum):  # the loop above ended in a sum over each item's rows
            self.put(f"{s.out.name} = {s.source.name}")
        elif isinstance(s, Product):
            self.product(s)
        elif isinstance(s, Add):
            self.add(s)

    def decode(self, s: Decode) -> None:
        self.put(f"{names.at(s.letter)} = {s.coordinate.text(TorchCoordinates(self, s.level))}")

    def word(self, array: str, level: int) -> str:
        """The words of an array, once read."""
        word = f"{array}_bits"
        if word not in self.words:
            self.words.add(word)
            self.put(f"{word} = {array}[{RANGES[level]}]")
        return word

    def coordinate(self, letter: str, level: int) -> str:
        """A coordinate as a vector of `level`: one of a higher level is repeated for all it is shared by."""
        own = self.p.view.level_of(self.p.letters.index(letter))
        return self.spread(names.at(letter), own, level)

    def spread(self, name: str, own: int, level: int) -> str:
        """A row per item (or fiber) repeated for each of its fibers (or nonzeros)."""
        if own == level:
            return name
        if own == ITEM and level == LEAF and self.p.view.blocks:
            return self.spread(self.spread(name, ITEM, LANE), LANE, LEAF)
        if self.p.view.chunk and self.p.view.item:
            return f"{name}.repeat_interleave({self.p.view.chunk}, 0)[: n1 - n0]"
        counts, total = self.offsets(level), {LANE: "b1 - b0", LEAF: "n1 - n0"}[level]
        return f"{name}.repeat_interleave(torch.diff({counts}), 0, output_size={total})"

    def offsets(self, level: int) -> str:
        """Where the runs of `level` begin within the chunk."""
        chunk = self.p.view.chunk
        if chunk and self.p.view.item:
            return f"torch.arange(i0, i1 + 1, device={self.device}).mul_({chunk}).sub_(n0).clamp_(max=n1 - n0)"
        if chunk:
            return f"torch.tensor([0, n1 - n0], device={self.device})"
        if level == LANE:
            return "item_ptr[i0 : i1 + 1] - b0"
        return "block_ptr[b0 : b1 + 1] - n0" if self.p.view.blocks else "item_ptr[i0 : i1 + 1] - n0"

    def index(self, operand: Operand, level: int) -> str:
        text = ""
        for letter, extent in zip(operand.rows, operand.extents, strict=True):
            name = self.coordinate(letter, level)
            big = operand.nrows >= 2**31
            name = f"{name}.long()" if big else name
            text = f"({text}) * {extent} + {name}" if text else name
        return text

    def table(self, operand: Operand) -> str:
        return f"{operand.name}.view({operand.nrows}, {operand.width})"

    def rows(self, operand: Operand, level: int) -> str:
        shape = ", ".join(str(self.p.axis(a).size) for a in operand.axes)
        if not operand.rows:
            return f"{operand.name}.view({shape})" if shape else operand.name
        table = self.table(operand) if shape else f"{operand.name}.view({operand.nrows})"
        gathered = f"{table}.index_select(0, {self.index(operand, level)})"
        return f"{gathered}.view(-1, {shape})" if shape else gathered

    def factor(self, tile: Tile, axes: tuple[str, ...], level: int, leading: bool) -> str:
        """A factor laid out over (rows of `level`, axes)."""
        name = tile.name
        own = [a for a in tile.axes if a != LANES]
        has_rows = tile.level != ITEM or not self._is_constant(tile)
        if has_rows and tile.level < level:
            name = self.spread(name, tile.level, level)
        order = [a for a in axes if a in own]
        if order != own:
            base = 1 if has_rows else 0
            permutation = [own.index(a) + base for a in order]
            name = f"{name}.permute({', '.join(map(str, ([0] if has_rows else []) + permutation))})"
        index = ([":" if has_rows else "None"] if leading else []) + [":" if a in own else "None" for a in axes]
        return name if all(i == ":" for i in index) or not index else f"{name}[{', '.join(index)}]"

    def _is_constant(self, tile: Tile) -> bool:
        """Whether a tile of the item level is the same for all items: gathered by no coordinate at all."""
        return any(
            isinstance(s, Gather) and s.out.name == tile.name and not s.operand.rows for s, _ in self.p.statements
        )

    def times(self, tiles: tuple[Tile, ...], axes: tuple[str, ...], level: int) -> str:
        return " * ".join(self.factor(t, axes, level, leading=True) for t in sorted(tiles, key=lambda t: len(t.axes)))

    def contraction(self, tiles: tuple[Tile, ...], axes: tuple[str, ...], level: int) -> str:
        """The product, summed over the axes that it is not to have."""
        row = self.p.letters[0]  # a letter of no dense axis
        terms, factors = [], []
        for tile in sorted(tiles, key=lambda t: len(t.axes)):
            own = tuple(a for a in tile.axes if a != LANES)
            terms.append(("" if tile.level == ITEM and self._is_constant(tile) else row) + "".join(own))
            factors.append(self.factor(tile, own, level, leading=False))
        return f'torch.einsum("{",".join(terms)}->{row}{"".join(axes)}", {", ".join(factors)})'

    def in_place(self, tiles: tuple[Tile, ...], axes: tuple[str, ...], level: int) -> str:
        """The product, multiplied into the fiber sums where they have all its axes: they are read nowhere else."""
        sums = next((t for t in tiles if t.name == "fiber_sum" and t.axes[1:] == axes), None)
        if sums is None:
            return self.times(tiles, axes, level)
        return "fiber_sum" + "".join(
            f".mul_({self.factor(t, axes, level, leading=True)})" for t in tiles if t is not sums
        )

    def product(self, s: Product) -> None:
        axes = tuple(a for a in s.out.axes if a != LANES)
        contracts = not {a for t in s.inputs for a in t.axes} <= {LANES, *axes}
        if not s.accumulate:
            product = self.contraction if contracts else self.times
            self.put(f"{s.out.name} = {product(s.inputs, axes, s.out.level)}")
            return
        level = max(t.level for t in s.inputs)
        offsets = self.offsets(level)
        if LANES in s.contracted:
            over = tuple(a for a in s.contracted if a != LANES)
            left = self.side(s.left, over, s.out.axes[: s.out.folded], level)
            right = self.side(s.right, over, s.out.axes[s.out.folded :], level)
            offsets = f"({offsets}) * {self._positions(over)}" if over else offsets
            shape = ", ".join(str(self.p.axis(a).size) for a in axes)
            self.put(f"{s.out.name} = run_products({left}, {right}, {offsets}).view(-1, {shape})")
        elif s in self.bags:
            o, others = self.bags[s].operand, tuple(t for t in s.inputs if t.name != self.bags[s].out.name)
            shared = tuple(a for a in o.axes if any(a in t.axes for t in others))
            positions = self._positions(shared)
            weights = f"({self.times(others, shared, level)}).reshape(-1, {positions})"
            table = f"{o.name}.view({o.nrows}, {positions}, {o.width // positions})"
            shape = ", ".join(str(self.p.axis(a).size) for a in axes)
            self.put(f"{s.out.name} = bags({self.index(o, level)}, {table}, {offsets}, {weights}).view(-1, {shape})")
        elif self._is_bag(s):
            gather = next(g for g, _ in self.p.statements if isinstance(g, Gather) and g.out.name == s.inputs[1].name)
            o = gather.operand
            shape = ", ".join(["-1", *(str(self.p.axis(a).size) for a in o.axes)])
            self.put(f"{s.out.name} = bag({self.index(o, level)}, {self.table(o)}, {offsets}, x).view({shape})")
        else:
            product = self.contraction if contracts else self.in_place
            self.put(f"{s.out.name} = run_sums({product(s.inputs, axes, level)}, {offsets})")

    def side(self, tiles: tuple[Tile, ...], over: tuple[str, ...], axes: tuple[str, ...], level: int) -> str:
        """One side of a dot: a row for each nonzero, and for each position of what is contracted beside the lanes."""
        text = self.times(tiles, (*over, *axes), level)
        if over:
            return f"({text}).reshape(-1, {self._positions(axes)})"
        return f"({text}).flatten(1)" if len(axes) > 1 else text

    def add(self, s: Add) -> None:
        p, key, level = self.p, s.key, s.key.level
        axes = [a for a in s.source.axes if a != LANES]
        value = s.source.name
        late = [n + 1 for n, a in enumerate(axes) if a not in s.axes]
        if late:
            value = f"{value}.sum({tuple(late) if len(late) > 1 else late[0]})"
            axes = [a for a in axes if a in s.axes]
        if axes != list(s.axes):
            value = f"{value}.permute({', '.join(map(str, [0] + [axes.index(a) + 1 for a in s.axes]))})"
        count = {ITEM: "i1 - i0", LANE: "b1 - b0", LEAF: "n1 - n0"}[level]
        if not s.axes and not s.owned and isinstance(key, Row) and [stride for _, stride in key.terms] == [1]:
            # Numbers, not rows: torch adds them up several times as fast, and takes indices of 32 bits.
            ((letter, _),) = key.terms
            row = self.coordinate(letter, level)
            self.put(f"add_rows({p.output}.view({p.rows}), {row}, {value})")
            return
        value = f"{value}.reshape({count}, {p.width})"
        output = f"{p.output}.view({p.rows}, {p.width})"
        if isinstance(key, Position):
            self.put(f"{output}[n0:n1] = {value}")
            return
        if isinstance(key, Row):
            terms = [f"{self.coordinate(c, level)}.long()" + (f" * {n}" if n != 1 else "") for c, n in key.terms]
            row = " + ".join(terms) if terms else f"torch.zeros({count}, dtype=torch.int64, device={self.device})"
        else:
            row = f"{key.array}[{RANGES[level]}]"
        if s.owned:
            self.put(f"{output}.index_copy_(0, {row}, {value})")
        else:
            self.put(f"add_rows({output}, {row}, {value})")
