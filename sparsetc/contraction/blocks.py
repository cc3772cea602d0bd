"""The rewrite of operands in blocks: an einsum of the blocks, in which each letter of a block's mode becomes two.

In: a `Bound` einsum, some of whose sparse operands are in blocks. Out: `BlockLetters`. In the einsum of blocks they are
entries with dense modes; what a user reads and writes is the einsum as written. A letter i of theirs is that of
positions in a block, and another, I if it is free, that of blocks; and every operand is as that einsum has it:
coordinates of blocks with dense modes, coordinates of nonzeros divided, dense operands with two dimensions for one.
Blocks that meet in a letter with different sides are cut into blocks of the sides' greatest common divisor. A side of 1
needs no second letter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import gcd, prod
from string import ascii_letters

import torch

from sparsetc.contraction.canonical import Dims, Operands, Patterns, Tensors, repeated_dims
from sparsetc.contraction.output import KEEP_SPARSE, SPARE, Letters, is_sparse
from sparsetc.errors import EquationError
from sparsetc.ir.equation.einsum import Bound, Einsum, distinct
from sparsetc.ir.plan import requested
from sparsetc.options import Options
from sparsetc.support import memory
from sparsetc.tensor.blocks import BlockCut, Blocks, inside_only, joined, split
from sparsetc.tensor.pattern import Pattern, lasting
from sparsetc.tensor.sparse_tensor import SparseTensor
from sparsetc.tensor.sums import result_bytes

LAST = 64
"""Side of a block from which on operands in tf32 are copied with the positions that dots sum last: Hopper's matrix
instruction reads both sides along what it sums, and other orders reach its shared memory 4 bytes at a time."""


class CutOperand:
    """A sparse operand as the einsum of blocks has it.

    Attributes:
        coordinates, tables: the letters of its modes, and of its dense modes: positions in blocks, then those it had.
    """

    def __init__(self, einsum: BlockLetters, x: SparseTensor, letters: Letters) -> None:
        """Cut an operand of the einsum as written, where it has these letters."""
        modes, dense = letters[: x.sparse_order], letters[x.sparse_order :]
        self._sides, self._sizes = einsum.sides_of(dense), einsum.written.extents(dense)
        self.coordinates, self.tables = einsum.term(modes), einsum.term(dense)
        self._cut: BlockCut | None = None
        if x.pattern.blocks is None:
            self.pattern = x.pattern.divided(einsum.sides_of(modes))
            return
        self.pattern, self._cut = x.pattern.cut(tuple(einsum.sides.get(c, 1) for c in modes))
        with lasting():
            self._masks = x.pattern.blocks.masks(x.coords)
        self.coordinates = tuple(einsum.blocks.get(c, c) for c in modes)
        self.tables = (*(c for c in modes if c in einsum.sides), *self.tables)

    def values(self, values: torch.Tensor) -> torch.Tensor:
        """The operand's values in that einsum; differentiable."""
        first = 1
        if self._cut is not None:
            values = self._cut.values(inside_only(values, self._masks))
            order, sides = len(self._cut.times), self._cut.blocks.sides
            positions = [side for side in sides if side > 1]
            if 1 in sides:
                values = values.reshape(values.shape[0], *positions, *values.shape[1 + order :])
            first += len(positions)
        return split(values, self._sides, self._sizes, first)


class BlockLetters:
    """The rewrite of an einsum of operands in blocks as that of their blocks.

    Attributes:
        bound, form: that einsum, and the form of its result.
        sides, blocks: of the letters that are cut, which are themselves those of positions: their sides, and the
            letters of blocks.
        rows: for each mode of a sparse result, but the dense ones, the letters that it has coordinates of: two make
            one coordinate, none is 0. None of a dense result.
        by_entries: whether that einsum has to run by entries of its operands, since nonzeros have no coordinates.
    """

    def __init__(self, bound: Bound, operands: Operands, settings: Options, form: str) -> None:
        """Cut the operands.

        Raises:
            EquationError: there are not letters enough.
            OutOfMemoryError: a dense result would pass the memory limit.
        """
        e, blocked = bound.einsum, [o for o in operands if isinstance(o, SparseTensor)]
        self.written, self.device, self.form = bound, blocked[0].device, "dense"
        by_nonzeros = requested(settings.plan).by_nonzeros
        self.sides, self.blocks = ({}, {}) if by_nonzeros else _cuts(e, blocked)
        terms = [e.inputs[p] for p in e.sparse]
        self.operands = [CutOperand(self, x, t) for x, t in zip(blocked, terms, strict=True)]
        self.patterns = [o.pattern for o in self.operands]
        sparse = is_sparse(form, e, [t[: x.sparse_order] for x, t in zip(blocked, terms, strict=True)])
        if not sparse:
            nbytes = prod(bound.output_shape) * result_bytes(blocked[0].dtype)
            memory.check(f"the result of {bound}", nbytes, self.device, settings.memory_limit, KEEP_SPARSE)
        tables = any(o.tables for o in self.operands)
        # What is contracted by nonzeros has coordinates of all letters.
        whole = by_nonzeros or (len(blocked) > 1 and not tables)
        self.by_entries = tables and not whole
        output, self.rows = self.term(e.output), list[Letters]() if sparse else None
        if self.rows is not None:
            coordinates = set(output) if whole else {c for o in self.operands for c in o.coordinates}
            output = self._in_rows(self.rows, coordinates)
            self.form = "sparse" if any(self.rows) else "dense"
        inputs = [self.term(t) for t in e.inputs]
        tf32 = blocked[0].dtype == torch.float32 and settings.effective_precision() == "high"
        for p in e.dense if tf32 else ():
            summed = [c for c in inputs[p] if self.sides.get(c, 0) >= LAST and c not in e.output]
            if inputs[p] == distinct(inputs[p]):
                inputs[p] = (*[c for c in inputs[p] if c not in summed], *summed)
        for p, operand in zip(e.sparse, self.operands, strict=True):
            inputs[p] = (*operand.coordinates, *operand.tables)
        sizes = bound.by_index | self.sides
        grid = {letter: -(-bound.by_index[c] // self.sides[c]) for c, letter in self.blocks.items()}
        self.bound = Bound.of(Einsum(tuple(inputs), output, e.sparse, e.text), sizes | grid)
        self._cuts, self._output_sides = {p: self._cut(p) for p in e.dense}, self.sides_of(e.output)

    def _in_rows(self, rows: list[Letters], coordinates: set[str]) -> Letters:
        """Find the rows of a sparse result; the output of the einsum of blocks, coordinates first.

        The result is in blocks along the letters that have coordinates of blocks alone. A letter without coordinates,
        in front of one that has some, is a block as wide as its mode; those behind are dense modes.
        """
        output, sides = self.written.einsum.output, []
        rows += [tuple(d for d in self.term([c]) if d in coordinates) for c in output]
        del rows[1 + max((n for n, letters in enumerate(rows) if letters), default=0) :]
        for c, letters in zip(output, rows, strict=False):
            side = self.sides.get(c, 1) if len(letters) == 1 else 1
            sides.append(side if letters else max(1, self.written.by_index[c]))
        self._of_result = Blocks(tuple(sides), self.written.extents(output[: len(rows)]))
        width = tuple(d for d in self.term(output) if d not in coordinates)
        return (*(d for letters in rows for d in letters), *width)

    def term(self, letters: Iterable[str]) -> Letters:
        """Letters, each that is cut behind that of its blocks."""
        return tuple(d for c in letters for d in ((self.blocks[c], c) if c in self.blocks else (c,)))

    def sides_of(self, letters: Iterable[str]) -> tuple[int, ...]:
        """The side of each letter; 0 where it is not cut."""
        return tuple(self.sides.get(c, 0) for c in letters)

    def stand_ins(self, operands: Operands, repeated: bool) -> list[SparseTensor | torch.Tensor]:
        """Operands to compile the einsum of blocks for.

        Strides tell one slice repeated only where the operand is a caller's; else a stand-in of its shape will do.
        """
        like = operands[self.written.einsum.sparse[0]]._values.new_zeros(())  # type: ignore[union-attr]
        sparse, stand_ins = iter(self.operands), list[SparseTensor | torch.Tensor]()
        for p, o in enumerate(operands):
            if isinstance(o, SparseTensor):
                x = next(sparse)
                values = like.expand(x.pattern.nnz, *self.bound.extents(x.tables))
                stand_ins.append(SparseTensor._make(x.pattern, values))
            else:
                table = self._table(o if repeated else torch.empty(o.shape, device="meta"), p)
                stand_ins.append(table if repeated else like.expand(table.shape))
        return stand_ins

    def _table(self, operand: torch.Tensor, position: int) -> torch.Tensor:
        """A dense operand with two dimensions for each that is cut; one slice repeated stays one."""
        sides, sizes, order = self._cuts[position]
        for n in repeated_dims(operand):
            if sides[n] and sizes[n] % sides[n]:
                operand = operand.narrow(n, 0, 1)
        table = split(operand, sides, sizes)
        return table if order is None else table.permute(order)

    def _cut(self, position: int) -> tuple[tuple[int, ...], tuple[int, ...], Dims | None]:
        """Return how a dense operand is cut: sides and sizes of its dimensions; the order of what is left, if another.

        It is found once, as calls are many.
        """
        letters, term = self.written.einsum.inputs[position], self.bound.einsum.inputs[position]
        cut = self.term(letters)
        order = None if term == cut else tuple(map(cut.index, term))
        return self.sides_of(letters), self.written.extents(letters), order

    def pull(self, values: Tensors, dense: Tensors) -> tuple[Tensors, Tensors]:
        """Values and dense operands as the einsum of blocks has them; differentiable."""
        of_blocks = [o.values(v) for o, v in zip(self.operands, values, strict=True)]
        return of_blocks, [self._table(d, p) for d, p in zip(dense, self.written.einsum.dense, strict=True)]

    def push(self, result: torch.Tensor) -> torch.Tensor:
        """The dense result of the einsum of blocks as the one written has it; differentiable."""
        return joined(result, self._output_sides, self.written.output_shape)

    def result_pattern(self, patterns: Patterns, other: Pattern | None, empty: bool) -> Pattern | None:
        """The pattern of a sparse result: the operand's own where its blocks are the result's, one each.

        Args:
            patterns: of the operands as written, the first of which the result may have.
            other: that of the einsum of blocks; where this has no coordinates, the result is of one entry, or of none.
            empty: whether no nonzeros take part.
        """
        if self.rows is None:
            return None
        (first, *others), blocks = patterns, self._of_result
        count = 0 if empty or 0 in blocks.shape else 1 if other is None else other.nnz
        lines = iter(() if other is None else other.coords.unbind())
        rows = []
        for letters in self.rows:
            row = next(lines)[:count] if letters else torch.zeros(count, dtype=torch.long, device=self.device)
            rows.append(row * self.sides[letters[1]] + next(lines)[:count] if len(letters) > 1 else row)
        single, coalesced = all(side == 1 for side in blocks.sides), other is None or other.is_coalesced
        pattern = Pattern(torch.stack(rows), blocks.grid, coalesced, None if single else blocks)
        if other is self.patterns[0] and pattern.blocks == first.blocks:
            return first
        e = self.written.einsum
        return first.known((e.inputs, e.output, e.sparse, self.written.sizes, "blocks"), pattern, others)


def _cuts(e: Einsum, operands: Sequence[SparseTensor]) -> tuple[dict[str, int], dict[str, str]]:
    """The letters that operands in blocks ask to be cut: their sides, and the letters of blocks.

    Raises:
        EquationError: there are not letters enough.
    """
    sides: dict[str, int] = {}
    for p, x in zip(e.sparse, operands, strict=True):
        for letter, side in zip(e.inputs[p], x.blocksize, strict=False):  # dense modes have none
            sides[letter] = gcd(sides.get(letter, 0), side)
    sides = {c: side for c, side in sides.items() if side > 1}
    spare = [c for c in ascii_letters if c not in e.indices]
    if len(spare) < len(sides) + len(e.sparse) + SPARE:
        raise EquationError(
            f'"{e.text}" has {len(e.indices)} indices; {len(sides)} of them, of operands in blocks, are taken '
            f"apart into two, and {len(e.sparse) + SPARE} more number blocks, gradients and batches, which passes "
            "the 52 letters there are; take expand_dense() of the operands in blocks"
        )
    blocks = {c: c.swapcase() for c in sides if c.swapcase() in spare}
    others = (c for c in spare if c not in blocks.values())
    return sides, {c: blocks.get(c) or next(others) for c in sides}
