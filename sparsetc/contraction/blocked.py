"""A contraction of operands in blocks: that of the blocks, in which each letter of a block's mode becomes two.

In: a `Bound` einsum, some of whose sparse operands are in blocks. Out: `Blocked`. To the contraction within, blocks are
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

from sparsetc.codegen.launch import Values
from sparsetc.contraction.canonical import Operands, Patterns, dense_of_call
from sparsetc.contraction.contraction import Contraction, of_entries
from sparsetc.contraction.dense import Tensors, repeated_dims
from sparsetc.contraction.entries import SPARE, Entries, Letters, by_nonzeros
from sparsetc.contraction.output import is_sparse
from sparsetc.errors import EquationError, OutOfMemoryError
from sparsetc.ir.equation.einsum import Bound, Einsum
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

    def table(self, operand: torch.Tensor, position: int, whole: bool = False) -> torch.Tensor:
        """A dense operand with two dimensions for each that is cut; one slice repeated stays one unless `whole`."""
        letters = self.bound.einsum.inputs[position]
        sides, sizes = self.sides_of(letters), self.bound.extents(letters)
        for n in () if whole else repeated_dims(operand):
            if sides[n] and sizes[n] % sides[n]:
                operand = operand.narrow(n, 0, 1)
        return split(operand, sides, sizes)

    def gradient(self, found: torch.Tensor, position: int, shape: torch.Size) -> torch.Tensor:
        """A gradient for a dense operand of this shape, of that for its `whole` table."""
        return joined(found, self.sides_of(self.bound.einsum.inputs[position]), shape)


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

    def values(self, given: torch.Tensor) -> torch.Tensor:
        """The operand's values in that einsum; differentiable."""
        first = 1
        if self.cut is not None:
            given = self.cut.values(inside_only(given, self.masks))
            order = len(self.cut.times)
            positions = [side for side in self.cut.blocks.sides if side > 1]
            given = given.reshape(given.shape[0], *positions, *given.shape[1 + order :])
            first += len(positions)
        return split(given, self.sides, self.sizes, first)

    def gradient(self, found: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """The transpose of `values`: a gradient for values of this shape, of that for those of the einsum of blocks."""
        first = found.ndim - sum(2 if side else 1 for side in self.sides)
        found = joined(found, (*[0] * first, *self.sides), (*found.shape[:first], *self.sizes))
        if self.cut is None:
            return found
        found = found.reshape(found.shape[0], *self.cut.blocks.sides, *self.sizes)
        return inside_only(self.cut.transposed(found, shape[0]), self.masks)

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
        found = [tuple(d for d in cuts.term([c]) if d in coordinates) for c in output]
        last = max((n for n, own in enumerate(found) if own), default=0)
        modes, dense, rows = output[: last + 1], output[last + 1 :], tuple(found[: last + 1])
        sides = []
        for c, own in zip(modes, rows, strict=True):
            of_block = cuts.sides.get(c, 1) if len(own) == 1 else 1
            sides.append(of_block if own else max(1, bound.by_index[c]))
        width = tuple(d for d in cuts.term(output) if d not in coordinates)
        letters = (*(d for own in rows for d in own), *width)
        return cls(letters, rows, Blocks(tuple(sides), bound.extents(modes)), bound.extents(dense))

    def pattern(self, cuts: Cuts, found: Pattern | None, empty: bool, device: torch.device) -> Pattern:
        """The result's pattern, of that of the einsum of blocks.

        Where this has no coordinates, it is of one entry, or of none if the einsum of blocks is `empty`.
        """
        count = 0 if empty or 0 in self.blocks.shape else 1 if found is None else found.nnz
        given = iter(() if found is None else found.coords.unbind())
        rows = []
        for own in self.rows:
            row = next(given)[:count] if own else torch.zeros(count, dtype=torch.long, device=device)
            rows.append(row * cuts.sides[own[1]] + next(given)[:count] if len(own) > 1 else row)
        single = all(side == 1 for side in self.blocks.sides)
        coalesced = found is None or found.is_coalesced
        return Pattern(torch.stack(rows), self.blocks.grid, coalesced, None if single else self.blocks)


class Blocked(Contraction):
    """A contraction of operands in blocks."""

    def __init__(self, bound: Bound, operands: Operands, settings: Options, form: str, repeated: bool = False) -> None:
        super().__init__(bound, operands, settings, form)
        e, given = bound.einsum, [o for o in operands if isinstance(o, SparseTensor)]
        self._cuts = cuts = Cuts(bound, {}, {}) if by_nonzeros(settings) else Cuts.of(bound, operands)
        terms = [e.inputs[p] for p in e.sparse]
        self._operands = [CutOperand.of(cuts, x, t) for x, t in zip(given, terms, strict=True)]
        self.sparse = is_sparse(form, e, [t[: x.sparse_order] for x, t in zip(given, terms, strict=True)])
        if not self.sparse:
            nbytes = prod(bound.output_shape) * self.dtype.itemsize
            settings.check_memory(nbytes, self.device, f"the result of {bound}")
        self._made, self._output = self._compiled(operands, repeated)
        self.inner, self.empty, self.result_dtype = (self._made,), self._made.empty, self._made.result_dtype
        self._arrange([x.pattern for x in given])

    def _compiled(self, operands: Operands, repeated: bool) -> tuple[Contraction, BlockOutput | None]:
        """The contraction of blocks, and what becomes of a sparse result."""
        cuts, own, settings = self._cuts, self._operands, self.settings
        tables = any(o.tables for o in own)
        # What is contracted by nonzeros has coordinates of all letters.
        whole = by_nonzeros(settings) or (len(own) > 1 and not tables)
        coordinates = set(cuts.term(self.bound.einsum.output)) if whole else {c for o in own for c in o.coordinates}
        output = BlockOutput.of(cuts, coordinates) if self.sparse else None
        form = "sparse" if output is not None and any(output.rows) else "dense"
        einsum = cuts.einsum(own, cuts.term(self.bound.einsum.output) if output is None else output.letters)
        like = torch.zeros((), dtype=self.dtype, device=self.device)
        sparse = (o.stand_in(einsum, like) for o in own)
        views: list[SparseTensor | torch.Tensor] = [
            next(sparse) if isinstance(o, SparseTensor) else self._view(o, p, repeated) for p, o in enumerate(operands)
        ]
        entries = Entries.of(einsum, views, settings, form)
        if entries is None and tables and not whole:
            raise OutOfMemoryError(
                f'the pairs of blocks that meet in "{self.bound.einsum.text}" would take more than a quarter of the '
                f"{settings.memory_on(self.device):,} bytes that are free on {self.device}; raise the limit with "
                "sparsetc.options(memory_limit=...), or cut an operand into parts and add up their results"
            )
        return of_entries(einsum, views, settings, form, repeated, entries), output

    def _view(self, operand: torch.Tensor, position: int, repeated: bool) -> torch.Tensor:
        """A dense operand of the contraction of blocks to compile it for.

        Strides tell one slice repeated only where the operand is a caller's; else a stand-in of its shape will do.
        """
        if repeated:
            return self._cuts.table(operand, position)
        shape = self._cuts.table(torch.empty(operand.shape, device="meta"), position).shape
        return torch.zeros((), dtype=self.dtype, device=self.device).expand(shape)

    def _arrange(self, patterns: Patterns) -> None:
        """Find the pattern of a sparse result: the operand's own where its blocks are the result's, one each."""
        self._pattern: Pattern | None = None
        self._own = False
        self.shape = self.bound.output_shape
        if self._output is None:
            return
        found = self._made.pattern_on([o.pattern for o in self._operands])
        first, *others = patterns
        made = self._output.pattern(self._cuts, found, self._made.empty, self.device)
        self._own = found is self._operands[0].pattern and made.blocks == first.blocks
        e = self.bound.einsum
        key = e.inputs, e.output, e.sparse, self.bound.sizes, self.form
        self._pattern = first.bare() if self._own else first.known(key, made, others)
        self.shape = self._pattern.values_shape(self._output.dense)

    # -- calls ------------------------------------------------------------------------------------------------------
    def pattern_on(self, patterns: Patterns) -> Pattern | None:
        """The operand's own pattern where all of its blocks are kept, or the one that was found when compiled."""
        return patterns[0] if self._own else self._pattern

    def result(self, patterns: Patterns, values: Tensors, dense: Tensors, packed: Values | None = None) -> torch.Tensor:
        """A dense result, or a sparse one's values; differentiable."""
        found = self._made.result(*self._given(values, dense))
        if self._output is None:
            output = self.bound.einsum.output
            return joined(found, self._cuts.sides_of(output), self.bound.output_shape)
        return found.reshape(self.shape) if self._has_entries else found.reshape(-1)[:0].reshape(self.shape)

    def _given(
        self, values: Tensors, dense: Tensors, whole: int | None = None
    ) -> tuple[list[Pattern], list[torch.Tensor], list[torch.Tensor]]:
        """What the contraction of blocks is given; the table of one dense operand is `whole`."""
        dense = dense_of_call(self.bound, dense, self.dtype, self.device)
        of_blocks = [o.values(v) for o, v in zip(self._operands, values, strict=True)]
        positions = enumerate(zip(dense, self.bound.einsum.dense, strict=True))
        tables = [self._cuts.table(d, p, whole=n == whole) for n, (d, p) in positions]
        return [o.pattern for o in self._operands], of_blocks, tables

    @property
    def _has_entries(self) -> bool:
        return self._pattern is None or self._pattern.nnz > 0

    def gradient(
        self, patterns: Patterns, operand: int, values: Tensors, dense: Tensors, upstream: torch.Tensor
    ) -> torch.Tensor:
        """The gradient for one of values and dense operands, given that of the result: views are linear."""
        e, count = self.bound.einsum, len(values)
        patterns, values_of_blocks, tables = self._given(values, dense, operand - count)
        if self._output is None:
            upstream = split(upstream, self._cuts.sides_of(e.output), self.bound.output_shape)
        elif self._has_entries:
            upstream = upstream.reshape(self._made.shape)
        else:
            upstream = upstream.new_zeros(self._made.shape)
        found = self._made.gradient(patterns, operand, values_of_blocks, tables, upstream)
        if operand < count:
            return self._operands[operand].gradient(found, values[operand].shape)
        n = operand - count
        return self._cuts.gradient(found, e.dense[n], dense[n].shape)
