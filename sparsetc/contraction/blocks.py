"""The rewrite of operands in blocks: an einsum of the blocks, in which each letter of a block's mode becomes two.

In: a `Bound` einsum, some of whose sparse operands are in blocks. Out: `BlockLetters`. In the einsum of blocks they are
entries with dense modes; what a user reads and writes is the einsum as written. `Cuts` makes of it an einsum in which a
letter i of theirs is that of positions in a block, and another, I if it is free, that of blocks; and every operand as
that einsum has it: coordinates of blocks with dense modes, coordinates of nonzeros divided, dense operands with two
dimensions for one. Blocks that meet in a letter with different sides are cut into blocks of the sides' greatest common
divisor. A side of 1 needs no second letter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import gcd, prod
from string import ascii_letters

import torch

from sparsetc.contraction.canonical import Operands, Patterns, Tensors, repeated_dims
from sparsetc.contraction.output import SPARE, Letters, is_sparse
from sparsetc.errors import EquationError
from sparsetc.ir.equation.einsum import Bound, Einsum
from sparsetc.ir.plan import requested
from sparsetc.options import Options
from sparsetc.tensor.blocks import Blocks, Cut, inside_only, joined, split
from sparsetc.tensor.pattern import Pattern, lasting
from sparsetc.tensor.sparse_tensor import SparseTensor


@dataclass(frozen=True)
class Cuts:
    """The letters that are cut: their sides, and the letters of blocks. They are themselves those of positions."""

    bound: Bound
    """The einsum as written."""
    sides: dict[str, int]
    blocks: dict[str, str]

    @classmethod
    def of(cls, bound: Bound, operands: Operands) -> Cuts:
        """The cuts that the operands in blocks ask for.

        Raises:
            EquationError: there are not letters enough.
        """
        e = bound.einsum
        sides: dict[str, int] = {}
        for p in e.sparse:
            x = operands[p]
            assert isinstance(x, SparseTensor)
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
        return cls(bound, sides, {c: blocks.get(c) or next(others) for c in sides})

    def term(self, letters: Iterable[str]) -> Letters:
        """Letters, each that is cut behind that of its blocks."""
        return tuple(d for c in letters for d in ((self.blocks[c], c) if c in self.blocks else (c,)))

    def sides_of(self, letters: Iterable[str]) -> tuple[int, ...]:
        """The side of each letter; 0 where it is not cut."""
        return tuple(self.sides.get(c, 0) for c in letters)

    def einsum(self, operands: Sequence[CutOperand], output: Letters) -> Bound:
        """The einsum of blocks, with this output."""
        e, sparse = self.bound.einsum, iter((*o.coordinates, *o.tables) for o in operands)
        inputs = tuple(next(sparse) if p in e.sparse else self.term(t) for p, t in enumerate(e.inputs))
        full = self.bound.by_index
        grid = {self.blocks[c]: -(-full[c] // side) for c, side in self.sides.items()}
        return Bound.of(Einsum(inputs, output, e.sparse, e.text), full | grid | self.sides)

    def table(self, operand: torch.Tensor, position: int) -> torch.Tensor:
        """A dense operand with two dimensions for each that is cut; one slice repeated stays one."""
        letters = self.bound.einsum.inputs[position]
        sides, sizes = self.sides_of(letters), self.bound.extents(letters)
        for n in repeated_dims(operand):
            if sides[n] and sizes[n] % sides[n]:
                operand = operand.narrow(n, 0, 1)
        return split(operand, sides, sizes)


@dataclass(frozen=True)
class CutOperand:
    """A sparse operand as the einsum of blocks has it."""

    pattern: Pattern
    coordinates: Letters
    tables: Letters
    """Letters of its dense modes: positions in blocks, then those it had."""
    masks: tuple[torch.Tensor, ...]
    """Which positions of blocks are inside the tensor, a ragged mode each."""
    cut: Cut | None
    """How its blocks become smaller ones; None of single nonzeros."""
    sides: tuple[int, ...]
    """Sides of the letters of the dense modes it had; 0 where one is not cut."""
    sizes: tuple[int, ...]
    """Sizes of these."""

    @classmethod
    def of(cls, cuts: Cuts, x: SparseTensor, letters: Letters) -> CutOperand:
        """The operand of an einsum as written."""
        modes, dense = letters[: x.sparse_order], letters[x.sparse_order :]
        blocks = x.pattern.blocks
        sides, sizes = cuts.sides_of(dense), cuts.bound.extents(dense)
        if blocks is None:
            pattern = x.pattern.divided(cuts.sides_of(modes))
            return cls(pattern, cuts.term(modes), cuts.term(dense), (), None, sides, sizes)
        pattern, cut = x.pattern.cut(tuple(cuts.sides.get(c, 1) for c in modes))
        with lasting():
            masks = blocks.masks(x.coords)
        rows, positions = tuple(cuts.blocks.get(c, c) for c in modes), tuple(c for c in modes if c in cuts.sides)
        return cls(pattern, rows, (*positions, *cuts.term(dense)), masks, cut, sides, sizes)

    def values(self, values: torch.Tensor) -> torch.Tensor:
        """The operand's values in that einsum; differentiable."""
        first = 1
        if self.cut is not None:
            values = self.cut.values(inside_only(values, self.masks))
            order = len(self.cut.times)
            positions = [side for side in self.cut.blocks.sides if side > 1]
            values = values.reshape(values.shape[0], *positions, *values.shape[1 + order :])
            first += len(positions)
        return split(values, self.sides, self.sizes, first)

    def stand_in(self, einsum: Bound, like: torch.Tensor) -> SparseTensor:
        """A tensor of the pattern to compile for."""
        return SparseTensor._make(self.pattern, like.expand(self.pattern.nnz, *einsum.extents(self.tables)))


@dataclass(frozen=True)
class BlockOutput:
    """A sparse result of an einsum of blocks, as the einsum as written has it.

    It is in blocks along the letters that have coordinates of blocks alone. A letter without coordinates, in front of
    one that has some, is a block as wide as its mode; those behind are dense modes.
    """

    letters: Letters
    """The output of the einsum of blocks: coordinates first."""
    rows: tuple[Letters, ...]
    """For each mode but the dense ones, the letters that it has coordinates of: two make one coordinate, none is 0."""
    blocks: Blocks
    """Blocks of these modes."""
    dense: tuple[int, ...]
    """Sizes of the dense modes."""

    @classmethod
    def of(cls, cuts: Cuts, coordinates: set[str]) -> BlockOutput:
        """The result, given the letters that have coordinates in the einsum of blocks."""
        output, bound = cuts.bound.einsum.output, cuts.bound
        coordinates_of = [tuple(d for d in cuts.term([c]) if d in coordinates) for c in output]
        last = max((n for n, letters_of_mode in enumerate(coordinates_of) if letters_of_mode), default=0)
        modes, dense, rows = output[: last + 1], output[last + 1 :], tuple(coordinates_of[: last + 1])
        sides = []
        for c, letters_of_mode in zip(modes, rows, strict=True):
            of_block = cuts.sides.get(c, 1) if len(letters_of_mode) == 1 else 1
            sides.append(of_block if letters_of_mode else max(1, bound.by_index[c]))
        width = tuple(d for d in cuts.term(output) if d not in coordinates)
        letters = (*(d for letters_of_mode in rows for d in letters_of_mode), *width)
        return cls(letters, rows, Blocks(tuple(sides), bound.extents(modes)), bound.extents(dense))

    def pattern(self, cuts: Cuts, of_blocks: Pattern | None, empty: bool, device: torch.device) -> Pattern:
        """The result's pattern, of that of the einsum of blocks.

        Where this has no coordinates, it is of one entry, or of none if the einsum of blocks is `empty`.
        """
        count = 0 if empty or 0 in self.blocks.shape else 1 if of_blocks is None else of_blocks.nnz
        lines = iter(() if of_blocks is None else of_blocks.coords.unbind())
        rows = []
        for letters in self.rows:
            row = next(lines)[:count] if letters else torch.zeros(count, dtype=torch.long, device=device)
            rows.append(row * cuts.sides[letters[1]] + next(lines)[:count] if len(letters) > 1 else row)
        single = all(side == 1 for side in self.blocks.sides)
        coalesced = of_blocks is None or of_blocks.is_coalesced
        return Pattern(torch.stack(rows), self.blocks.grid, coalesced, None if single else self.blocks)


class BlockLetters:
    """The rewrite of an einsum of operands in blocks as that of their blocks."""

    def __init__(self, bound: Bound, operands: Operands, settings: Options, form: str) -> None:
        """Cut the operands.

        Raises:
            EquationError: there are not letters enough.
            OutOfMemoryError: a dense result would pass the memory limit.
        """
        e, blocked = bound.einsum, [o for o in operands if isinstance(o, SparseTensor)]
        self.written, self.device = bound, blocked[0].device
        self.cuts = cuts = Cuts(bound, {}, {}) if requested(settings.plan).by_nonzeros else Cuts.of(bound, operands)
        terms = [e.inputs[p] for p in e.sparse]
        self.operands = [CutOperand.of(cuts, x, t) for x, t in zip(blocked, terms, strict=True)]
        self.patterns = [o.pattern for o in self.operands]
        sparse = is_sparse(form, e, [t[: x.sparse_order] for x, t in zip(blocked, terms, strict=True)])
        if not sparse:
            nbytes = prod(bound.output_shape) * blocked[0].dtype.itemsize
            settings.check_memory(nbytes, self.device, f"the result of {bound}")
        tables = any(o.tables for o in self.operands)
        # What is contracted by nonzeros has coordinates of all letters.
        whole = requested(settings.plan).by_nonzeros or (len(blocked) > 1 and not tables)
        self.by_entries = tables and not whole
        """True if the einsum of blocks has to run by entries of its operands, since nonzeros have no coordinates."""
        output = cuts.term(e.output)
        coordinates = set(output) if whole else {c for o in self.operands for c in o.coordinates}
        self.output = BlockOutput.of(cuts, coordinates) if sparse else None
        self.form = "sparse" if self.output is not None and any(self.output.rows) else "dense"
        self.bound = cuts.einsum(self.operands, output if self.output is None else self.output.letters)

    def stand_ins(self, operands: Operands, repeated: bool) -> list[SparseTensor | torch.Tensor]:
        """Operands to compile the einsum of blocks for.

        Strides tell one slice repeated only where the operand is a caller's; else a stand-in of its shape will do.
        """
        like = operands[self.written.einsum.sparse[0]]._values.new_zeros(())  # type: ignore[union-attr]
        sparse = iter(self.operands)
        return [
            next(sparse).stand_in(self.bound, like)
            if isinstance(o, SparseTensor)
            else self.cuts.table(o, p)
            if repeated
            else like.expand(self.cuts.table(torch.empty(o.shape, device="meta"), p).shape)
            for p, o in enumerate(operands)
        ]

    def pull(self, values: Tensors, dense: Tensors) -> tuple[Tensors, Tensors]:
        """Values and dense operands as the einsum of blocks has them; differentiable."""
        of_blocks = [o.values(v) for o, v in zip(self.operands, values, strict=True)]
        return of_blocks, [self.cuts.table(d, p) for d, p in zip(dense, self.written.einsum.dense, strict=True)]

    def push(self, result: torch.Tensor) -> torch.Tensor:
        """The dense result of the einsum of blocks as the one written has it; differentiable."""
        return joined(result, self.cuts.sides_of(self.written.einsum.output), self.written.output_shape)

    def result_pattern(self, patterns: Patterns, other: Pattern | None, empty: bool) -> Pattern | None:
        """The pattern of a sparse result: the operand's own where its blocks are the result's, one each."""
        if self.output is None:
            return None
        first, *others = patterns
        pattern = self.output.pattern(self.cuts, other, empty, self.device)
        if other is self.patterns[0] and pattern.blocks == first.blocks:
            return first
        e = self.written.einsum
        return first.known((e.inputs, e.output, e.sparse, self.written.sizes, "blocks"), pattern, others)
