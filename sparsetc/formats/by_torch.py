"""Programs of torch's products in place of loops: the order of products, their text, and their price.

In: an einsum, and the order in which its sparse operand is stored. Out: `DenseProduct`, a program that prints calls of
torch. It is one matrix product where that is possible (`products`), else a `torch.einsum` for each dense
operand; or, *sampled*, a product of two dense operands that is read at the nonzeros' positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice, pairwise, permutations
from math import prod
from typing import ClassVar

import torch

from sparsetc.device.profile import DeviceProfile, by_precision
from sparsetc.ir.equation.einsum import Bound
from sparsetc.ir.nest import ITEM, Nest
from sparsetc.ir.plan import ROUNDED, Schedule
from sparsetc.ir.program import (
    ONE,
    SECTOR,
    STORED,
    Add,
    Cost,
    DenseAxis,
    Key,
    Operand,
    Product,
    Statistics,
    Tile,
    TileProgram,
    named_operands,
    printed_sizes,
    stored_of,
)
from sparsetc.planner import ROUNDING
from sparsetc.support import Names, among, cached_property, outside, volume
from sparsetc.tensor.dtypes import accumulator

MOST_ORDERS = 24
"""Orders of dense operands that are compared, at most."""
ARRANGED = 64
"""Multiplications in whose time torch copies an element of an operand, if it cannot multiply it as it lies (one thread:
3.5 M elements, a mode in the middle summed, 24 ms, the first one .6; a GPU streams 8 bytes in the time of 60)."""


# -- what torch multiplies --------------------------------------------------------------------------------------------
def products(bound: Bound, stored: Names, matrices: bool) -> tuple[Product, ...]:
    """Return the products in the order in which they are made, the result's last.

    The stored tensor is multiplied by one operand after another. Or the last is a product of two matrices: the stored
    tensor, (kept, summed) or its transpose, and a right side, (summed, free), that the dense operands make; that is
    possible where the kept modes are stored before or behind the others, no dense operand has one of them, and the
    dense operands have all others. What needs the fewest multiplications is taken.

    Args:
        bound: the einsum.
        stored: letters of the sparse operand, as positions are stored.
        matrices: whether the type has a matrix product.
    """
    output, sizes = bound.einsum.output, printed_sizes(bound)
    kept, free = (tuple([c for c in output if (c in stored) == own]) for own in (True, False))
    x, dense = Tile("values", stored, ITEM), [Tile(o.name, (*o.rows, *o.axes), ITEM) for o in named_operands(bound)[1]]
    choices = [_in_turn([x, *order], (*kept, *free)) for order in islice(permutations(dense), MOST_ORDERS)]
    summed, read = outside(stored, kept), {c for t in dense for c in t.axes}
    right, matrix = (*summed, *free), stored in ((*kept, *summed), (*summed, *kept))
    if matrices and dense and matrix and not read & {*kept} and read >= {*right}:
        right_sides = _in_turn(dense, right) if [t.axes for t in dense] != [right] else ()
        total = Tile("total", (*kept, *free), ITEM, len(kept) if free else 0)
        choices.insert(0, (*right_sides, Product(total, (x,), (right_sides[-1].out if right_sides else dense[0],))))

    def work(s: Product) -> int:
        return volume(sizes, (*s.out.axes, *s.summed)) + ARRANGED * volume(sizes, arranged(s))

    return min(choices, key=lambda own: sum(map(work, own)))


def _in_turn(tiles: Sequence[Tile], result: Names) -> tuple[Product, ...]:
    """Return products of tiles from left to right, each summed over what neither the result nor a later tile has."""
    products: list[Product] = []
    for n in range(min(2, len(tiles)), len(tiles) + 1):
        inputs = (products[-1].out, tiles[n - 1]) if products else tuple(tiles[:n])
        later = {*result}.union(*[t.axes for t in tiles[n:]])
        axes = tuple(dict.fromkeys(c for t in inputs for c in t.axes if c in later))
        products.append(Product(Tile("made", axes if n < len(tiles) else result, ITEM), inputs))
    return tuple(products)


# -- what that costs --------------------------------------------------------------------------------------------------
RATES = {"ieee": "highest", "tf32x3": "highest", "tf32": "high", "bf16": "medium"}
"""The rates of `DeviceProfile.product`, by the precision of dots."""


class ProductCost(Cost):
    """Bytes and flops of torch's products, one after another.

    Flops are those of products of stored values; forming a right side is counted by its bytes and its call, and by its
    flops where it sums. A sampled product is written whole, and read at the entries.

    Attributes:
        moved: bytes that products read and write.
        flops: multiplications and additions; torch pads none.
        tables: elements of dense operands.
        formed: elements of intermediates.
        copied: elements of results that are not made in the order wanted.
        arranged: elements of operands that are copied first.
        summed: positions that a product of matrices sums, one after another.
        lengths: elements of the rows of the matrices that are multiplied.
        result: rows and columns of the last product.
    """

    p: DenseProduct

    def __init__(self, program: DenseProduct) -> None:
        """Count the products; the results of all but the last are intermediates, each written and read once."""
        self.p, self.precision = program, program.schedule.precision
        products = program.each(Product)
        *before, last = products
        of_values = [last] if last.right else products
        multiplied = [last, *(s for s in before if s in of_values or s.summed)]
        self.once = STORED * 2 if program.half else STORED.bytes
        self.output = ONE.bytes * (program.rows * program.width)
        self.flops = sum([2 * program.elements((*s.out.axes, *s.summed)) for s in multiplied])
        self.multiply = ONE * self.flops
        self.sides = {*program.letters}
        self.turn = 0
        self.tables = sum([o.nrows * o.width for o in program.operands])
        self.formed = sum([program.elements(s.out.axes) for s in before])
        self.copied = sum([program.elements(s.out.axes) for s in products if not in_place(s)])
        self.arranged = sum([program.elements(axes) for s in products if (axes := arranged(s))])
        self.moved = self.once + self.output + ONE.bytes * (self.tables + 2 * self.formed)
        self.calls = len(products)
        self.matrices = bool(last.right)
        self.result = (program.rows, program.width)
        summing = [program.elements(s.summed) for s in of_values if s.summed]
        self.summed = sum(summing) if program.dots else 0
        self.lengths = [*summing, *([program.width] if summing else [])]
        if program.sampled:
            left, right = in_order(program.operands, program.letters)
            self.result = left.nrows, right.nrows
            self.summed, self.lengths = left.width, [left.width, right.nrows]
            self.moved = ONE.bytes * (self.tables + prod(self.result))

    def describe(self) -> list[str]:
        """Lines for a reader."""
        if self.p.sampled:
            rows, columns = self.result
            product = f"{self.flops} flops in a product of torch, {rows} x {columns}, read at the entries"
            return [f"reads {self.tables} elements of dense operands", product]
        formed = f", makes {self.formed} on the way" if self.formed else ""
        return [
            f"streams {self.once} bytes, writes {self.output} bytes",
            f"reads {self.tables} elements of dense operands{formed}",
            f"{self.flops} flops in products of torch",
        ]

    def seconds(self, statistics: Statistics, profile: DeviceProfile) -> dict[str, float]:
        """Seconds each resource alone would take."""
        rate = profile.constants["product_memory"] * profile.memory
        dot = self.flops / self._rate(statistics.itemsize, profile)
        seconds = {"memory": self.moved @ statistics.symbols / rate, "dot": dot}
        if self.p.sampled:
            size, entries = statistics.itemsize, statistics.stored
            positions = prod(self.result)
            index = 4 if positions < 2**31 else 8
            weighted = 0 if self.p.is_product else 3 * size * entries
            read = min(size * positions, SECTOR * entries) + entries * (index + size) + weighted
            seconds["entries"] = read / profile.memory
        return seconds

    def stored(self, statistics: Statistics) -> int:
        """Bytes of the result, all of which is stored."""
        return statistics.itemsize * statistics.stored if self.p.sampled else self.output @ statistics.symbols

    def predicted(self, statistics: Statistics, profile: DeviceProfile) -> float:
        """Seconds expected: a product reads while it multiplies; intermediates and rounding take time of their own."""
        size, rounding = statistics.itemsize, 0.0
        constants = profile.constants
        if self.p.half:
            rounding = constants["rounding_call"] + ROUNDING * self.tables / profile.memory
        forming = (self.calls - 1) * profile.launch + 2 * size * self.formed / profile.memory
        each = self.seconds(statistics, profile)
        in_turn = min(self.summed, profile.rules["product_split"])
        multiplied = max(each["memory"], each["dot"]) + constants["product_summed"] * in_turn
        starts = {ROUNDED: constants["product_narrow"], "tf32": constants["product_tf32_start"]}
        start = starts.get(self._unit(size), constants["product_wide"])
        if not self.matrices:  # `torch.einsum` starts each product anew; what it gives is copied in the order wanted
            forming += (self.calls - 1) * start + self.calls * profile.launch + 2 * size * self.copied / profile.memory
            forming += 2 * size * self.arranged / profile.moved
        total = start + forming + rounding + multiplied
        if self.p.sampled:
            total += (1 if self.p.is_product else 2) * profile.launch + each["entries"]
        return total

    def _unit(self, itemsize: int) -> str:
        """The precision of the products, ``bf16`` for two matrices of 16 bits: operands have these, or are rounded."""
        if self.matrices and self.calls == 1 if itemsize == 2 else self.p.half:
            return ROUNDED
        return "tf32" if self.precision == ROUNDED else self.precision  # operands of torch.einsum are not rounded

    def _rate(self, itemsize: int, profile: DeviceProfile) -> float:
        """Flops a second of torch's products of this type and precision, with idle multiprocessors counted."""
        constants, unit = profile.constants, self._unit(itemsize)
        width = 2 if unit == ROUNDED else max(4, itemsize)
        usual = profile.product["float64" if itemsize >= 8 else RATES[unit]]
        by_unit = {"tf32": constants["product_tf32"], "bf16": constants["product_bf16"]}
        share = by_unit.get(unit, 0.0) if itemsize < 8 else 0.0
        if share and any(n * width % profile.rules["aligned"] for n in self.lengths):
            share = constants["product_unaligned"]
        side = by_precision(profile.rules["product_side"], unit)
        processors = max(1, profile.warps // profile.rules["issued"])
        shared = max(1, self.summed // profile.rules["product_split"])  # by so many multiprocessors is a block
        blocks = shared * max(1, prod(-(-n // side) for n in self.result))
        busy = blocks / (processors * -(-blocks // processors))  # the last round leaves some without a block
        return max(usual, share * profile.matrix(unit)) * busy


# -- how torch makes them ---------------------------------------------------------------------------------------------
SETTINGS = {"tf32": "high", "bf16": "high"}
"""Torch's setting for products of float32, by the precision of dots; ``highest`` for all others. At bf16 a product of
matrices is of operands that were rounded before, and any other einsum takes tf32."""


class DenseProduct(TileProgram):
    """A program of torch calls in place of loops; its body, products of whole tensors, is for the cost model."""

    covers: ClassVar[bool] = True
    priced_by: ClassVar[type[ProductCost]] = ProductCost

    @classmethod
    def of(
        cls,
        bound: Bound,
        view: Nest,
        body: tuple[Product, ...],
        schedule: Schedule,
        rows: int,
        format: str,
        number: int,
    ) -> DenseProduct:
        """Return the program of products of an einsum's operands."""
        e, sizes = bound.einsum, printed_sizes(bound)
        output, operands = named_operands(bound)
        return cls(
            equation=str(e),
            number=number,
            format=format,
            view=view,
            letters=e.sparse_indices,
            axes=tuple([DenseAxis(c, sizes[c], sizes[c]) for c in (*e.axes, *e.sparse_indices)]),
            operands=tuple([replace(o, rounded=o.name in schedule.rounded) for o in operands]),
            output=output,
            output_axes=among(e.axes, e.free),
            body=tuple(body),
            schedule=schedule,
            rows=rows,
            at_once=True,
            sparse=(stored_of(view, e.sparse_indices),),
        )

    @cached_property
    def sampled(self) -> bool:
        """True if the product is read at the entries, whose positions are stored."""
        return bool(self.view.lookups[-1])

    @cached_property
    def result(self) -> Add:
        """The store of the last product, which is all of the result."""
        return Add(self.each(Product)[-1].out, Key("row", ITEM), self.output_axes, owned=True)

    @cached_property
    def is_product(self) -> bool:
        """True if the body is one product of two matrices, whose sums torch keeps wide and rounds once.

        Sums that are multiplied by values first stay wide.
        """
        if self.sampled:
            return not self.view.packed
        *before, last = self.each(Product)
        return bool(last.right) and not before

    @cached_property
    def half(self) -> bool:
        """True if values are stored in bfloat16: for a product of two matrices, neither of them a vector."""
        return self.schedule.precision == ROUNDED and bool(self.dots) and not self.sampled

    def lines(self, dtype: torch.dtype) -> list[str]:
        """Return the text of the function, whose loop runs once, or not at all for a tensor without nonzeros."""
        sums = accumulator(dtype)
        integers = sums == torch.int64  # which torch.einsum may sum in too few bits
        out, einsum = self.output, "integer_einsum" if integers else "torch.einsum"
        names = ", ".join(["chunks", *self.arrays, *[o.name for o in self.operands], out])
        text = [
            f'@matmul_precision("{SETTINGS.get(self.schedule.precision, "highest")}")',
            f"def part_{self.number}({names}):",
            "    for _ in chunks:",
        ]
        if self.sampled:
            return [*text, *self._sampled_lines()]
        products = self.each(Product)
        *before, last = products
        plain = [s for s in products if s.right or (in_place(s) and not integers)]
        as_matrix = {t.name for s in plain for t in s.inputs}
        views = [] if last.right else [products[0].inputs[0]]
        views += [Tile(o.name, (*o.rows, *o.axes), ITEM) for o in self.operands if before or not last.right]
        converted = f".to({out}.dtype)" if sums != dtype or self.half or any(o.rounded for o in self.operands) else ""
        for t in views:
            view = converted if t.name in as_matrix else f".view({self._shape(t.axes)}){converted}"
            text += [f"        {t.name} = {t.name}{view}"] if view else []
        for s, following in pairwise(products):
            product = "product({}, {})".format(*self._matrices(s)) if s in plain else _einsum(einsum, s)
            view = f".view({self._shape(s.out.axes)})" if s in plain and following not in plain else ""
            text += [f"        {s.out.name} = {product}{view}"]
        if last not in plain:
            return [*text, f"        {out}.view({self._shape(last.out.axes)}).copy_({_einsum(einsum, last)})"]
        left, right, shape = self._matrices(last)
        if last.right:
            left += converted if before and not self.half else ""  # as wide as the right side
            right += ".to(values.dtype)" if self.half or any(o.rounded for o in self.operands) else ""
        result = out if len(self.output_axes) == 1 and shape == f"{self.rows}, {self.width}" else f"{out}.view({shape})"
        return [*text, f"        multiply({left}, {right}, {result})"]

    def _sampled_lines(self) -> list[str]:
        """Return the lines that multiply two matrices, and read the product at the entries."""
        left, right = in_order(self.operands, self.letters)
        out, summed = self.output, self.operands[0].width
        matrices = f"{left.name}.reshape({left.nrows}, {summed}), {right.name}.reshape({right.nrows}, {summed}).t()"
        return [
            f"        made = {out}.new_empty({left.nrows}, {right.nrows})",
            f"        multiply({matrices}, made)",
            f"        torch.index_select(made.view(-1), 0, word, out={out}.view(-1))",
            *[f"        {out}.view(-1).mul_({name})" for name in self.view.packed],
        ]

    def _matrices(self, s: Product) -> tuple[str, str, str]:
        """Return the text of the two matrices to multiply, and of the shape of their product."""
        (left, right), summed = s.inputs, self.elements(s.summed)
        rows, columns = (self.elements(outside(t.axes, s.summed)) for t in s.inputs)
        turned = left.axes[: len(s.summed)] == s.summed
        first = f"{left.name}.reshape({summed}, {rows}).t()" if turned else f"{left.name}.view({rows}, {summed})"
        as_it_is = len(s.summed) == 1 and len(right.axes) == 2
        return first, right.name if as_it_is else f"{right.name}.reshape({summed}, {columns})", f"{rows}, {columns}"

    def _shape(self, axes: Names) -> str:
        return ", ".join(str(self.axis(c).size) for c in axes) or "()"


def in_order(operands: Sequence[Operand], letters: Names) -> tuple[Operand, Operand]:
    """Return the operand with a result's first mode, and the other."""
    left, right = sorted(operands, key=lambda o: letters[:1] != o.rows[:1])
    return left, right


def in_place(s: Product) -> bool:
    """Return True of a product of two matrices, the left transposed, whose result is as it is wanted."""
    if len(s.inputs) != 2 or not s.summed:
        return False
    (left, right), n = [t.axes for t in s.inputs], len(s.summed)
    return left[:n] == right[:n] == s.summed and s.out.axes == (*left[n:], *right[n:])


def arranged(s: Product) -> Names:
    """Return the axes of the left operand if torch copies it: shared ones are not first, or summed ones in between."""
    left, *others = [t.axes for t in s.inputs]
    shared = tuple([c for c in left if c in s.out.axes and any(c in axes for axes in others)])
    rest, summed = left[len(shared) :], among(left, s.summed)
    as_it_lies = left[: len(shared)] == shared and summed in (rest[: len(summed)], rest[len(rest) - len(summed) :])
    return left if others and not as_it_lies else ()


def _einsum(einsum: str, s: Product) -> str:
    """Return the text of a product; multiply and sum if one operand's axes are the last of the other's."""
    names = [t.name for t in s.inputs]
    left, *others = (t.axes for t in s.inputs)
    kept = among(left, s.out.axes)
    if s.summed and others and left[-len(others[0]) :] == others[0] and kept == s.out.axes:
        dims = ", ".join(str(left.index(c)) for c in s.summed)
        return f"({' * '.join(names)}).sum(({dims},))"
    equation = f"{','.join(''.join(t.axes) for t in s.inputs)}->{''.join(s.out.axes)}"
    return f'{einsum}("{equation}", {", ".join(names)})'
