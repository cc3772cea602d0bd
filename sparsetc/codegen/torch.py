"""Tile programs -> the text of one torch module: the default without a GPU, and the reference for tests.

In: tile programs of whole axes (`ir.lower.whole`), of views with one lane, so that nothing is padded. Out: source in
which every statement is done for a whole chunk of items at once. Chunks keep what is made on the way inside the cache.

Of a program whose one tile spans the tensor no coordinate is read: dense operands and the result are tensors as they
lie in memory. Where all is one matrix product, that writes the result; else the result takes a copy of what torch's
einsums make.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from sparsetc.codegen.torch_function import FunctionPrinter
from sparsetc.codegen.torch_rows import value
from sparsetc.ir.program.tile import Add, Decode, Gather, Product, Row, Tile, TileProgram, Value
from sparsetc.support.lru import cached_property

SETTINGS = {"tf32": "high", "bf16": "high"}
"""How float32 is to be multiplied by torch where it is not as exactly as can be, by the precision of dots."""


class Matrices(NamedTuple):
    """A product of stored values and something else, as one of matrices."""

    made: Tile
    """The product."""
    stored: Tile
    """The left side."""
    other: Tile
    """The right side."""
    left: tuple[str, ...]
    """The axes of the rows of the left side, and of the product."""
    inner: tuple[str, ...]
    """The axes that are summed."""
    right: tuple[str, ...]
    """The axes of the columns of the right side, and of the product."""


class SpanningPrinter(FunctionPrinter):
    """Prints the program of a dense tensor."""

    def __init__(self, program: TileProgram, integers: bool = False) -> None:
        super().__init__(program, integers)
        self.half = program.half

    def lines(self) -> list[str]:
        """The function, in a block of the precision that its products are to have."""
        text = super().lines()
        at = next(n for n, line in enumerate(text) if line.startswith("def "))
        setting = SETTINGS.get(self.p.precision, "highest")
        return [*text[:at], f'@matmul_precision("{setting}")', *text[at:]]

    def decode(self, s: Decode) -> None:
        """Nothing: positions are coordinates."""

    def load(self, s: Value) -> None:
        """The stored tensor, as wide as sums are where it is not multiplied as it is."""
        if self.matrices and self.is_narrow:
            m = self.matrices
            self.put(f"{s.out.name} = values.view({self.positions(m.left)}, {self.positions(m.inner)})")
            return
        self.put(f"{s.out.name} = {value(self.rows, s)}.to({self.p.output}.dtype)")

    def gather(self, s: Gather) -> None:
        """An operand as a matrix, where it is a side of the product; else as wide as sums are."""
        if self.matrices and s.out == self.matrices.other:
            sides = f"{self.positions(self.matrices.inner)}, {self.positions(self.matrices.right)}"
            self.put(f"{s.out.name} = {s.operand.name}.view({sides})")
            return
        shape = self.shape(s.out.within) or "()"
        self.put(f"{s.out.name} = {s.operand.name}.view({shape}).to({self.p.output}.dtype)")

    def product(self, s: Product) -> None:
        """The product, unless the result is written by it."""
        if not self.matrices or s.out != self.matrices.made:
            super().product(s)

    def add(self, s: Add) -> None:
        """Writes the result by the matrix product, or takes over what einsums made; slots are as of other tiles."""
        if not isinstance(s.key, Row):
            super().add(s)
        elif self.matrices:
            self.multiply(self.matrices)
        else:
            axes = (*s.key.letters, *s.axes)
            total = self.summed(s.source.name, s.source.within, axes)
            shape = ", ".join(filter(None, ("-1", self.shape(axes))))
            self.put(f"{self.p.output}.view({shape}).{'copy_' if s.owned else 'add_'}({total})")

    # -- one matrix product -----------------------------------------------------------------------------------------
    def multiply(self, m: Matrices) -> None:
        """The product of two matrices, in the dtype of the narrower one."""
        left, inner, right = map(self.positions, m[3:])
        stored = m.stored.name if self.is_narrow else f"{m.stored.name}.view({left}, {inner})"
        other = m.other.name if self.is_direct else f"{m.other.name}.reshape({inner}, {right})"
        rounded = ".to(values.dtype)" if self.half or any(o.rounded for o in self.p.operands) else ""
        self.put(f"multiply({stored}, {other}{rounded}, {self.p.output}.view({left}, {right}))")

    @cached_property
    def matrices(self) -> Matrices | None:
        """What the result is the product of, where both sides lie as matrices do; None of anything else.

        Integers have no matrix product on every device.
        """
        statements = [s for s, _ in self.p.statements]
        (last,) = (s for s in statements if isinstance(s, Add))
        (x,) = (s.out for s in statements if isinstance(s, Value))
        made = next((s for s in statements if isinstance(s, Product) and s.out == last.source), None)
        if made is None or made.accumulate or x not in made.inputs or len(made.inputs) != 2 or self.integers:
            return None
        (other,) = (tile for tile in made.inputs if tile != x)
        if not last.owned or not isinstance(last.key, Row) or not self.is_constant(other):
            return None
        kept, axes = last.key.letters, last.axes
        inner = x.within[len(kept) :]
        fits = x.within == (*kept, *inner) and other.within == (*inner, *axes)
        return Matrices(made.out, x, other, kept, inner, axes) if fits else None

    @cached_property
    def is_direct(self) -> bool:
        """Whether an operand is a side of the matrix product as it is."""
        return self.matrices is not None and self.matrices.other.name in self.gathers

    @cached_property
    def is_narrow(self) -> bool:
        """Whether what is stored is multiplied in its own dtype, and not as wide as sums are.

        What is made of several operands is as wide as sums, and rounded only where the precision says so.
        """
        return self.half or self.is_direct


RUNTIME = {
    "sparsetc.runtime.bitmaps": ("expanded",),
    "sparsetc.runtime.integer_einsum": ("integer_einsum",),
    "sparsetc.runtime.products": ("matmul_precision", "multiply"),
    "sparsetc.runtime.segments": ("add_rows", "bag", "bags", "run_products", "run_sums"),
}
"""What generated programs may call."""


@lru_cache(maxsize=256)
def module_source(programs: tuple[TileProgram, ...], header: str, integers: bool = False) -> str:
    """The whole file: header and one function a part; `integers` says of what type the operands are."""
    printers = [(SpanningPrinter if p.spanning else FunctionPrinter)(p, integers) for p in programs]
    functions = ["\n".join(printer.lines()) for printer in printers]
    body = "\n\n\n".join(functions)
    called = set(re.findall(r"(?<!\.)\b(\w+)\(", body))
    used = {module: [name for name in names if name in called] for module, names in RUNTIME.items()}
    imports = [f"from {module} import {', '.join(own)}" for module, own in used.items() if own]
    head = [f'"""{header}"""']
    head += ["import torch"] if "torch." in body else []
    head += ["\n".join(imports)] if imports else []
    return "\n\n".join(head) + f"\n\n\n{body}\n"
