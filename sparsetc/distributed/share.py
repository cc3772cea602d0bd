"""One rank's part of an einsum: on its box, with the rows of dense operands that its box reads.

In: an einsum of the whole tensor, and its cut. Out: a `Share`: what letters are cut, how dense operands are narrowed,
and where each rank's block of the result lies. It sends nothing, and knows no kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from sparsetc.distributed.cut import Box, Cut
from sparsetc.errors import EquationError, ShapeError
from sparsetc.ir.equation.einsum import Bound
from sparsetc.support import Ints, outside
from sparsetc.support.lru import cached_property


@dataclass(frozen=True)
class Share:
    """An einsum of one sharded sparse operand.

    Attributes:
        bound: the einsum of the whole tensor.
    """

    bound: Bound
    cut: Cut

    @cached_property
    def position(self) -> int:
        """The number of the sparse operand."""
        return self.bound.einsum.sparse[0]

    @cached_property
    def modes(self) -> dict[str, int]:
        """The letters that are cut with their mode, and so are cut in dense operands and in the result."""
        letters = self.bound.einsum.inputs[self.position]
        return {c: m for m, c in enumerate(letters) if m in self.cut.modes and letters.count(c) == 1}

    @cached_property
    def whole(self) -> Ints:
        """Modes that are cut although their letter repeats: a diagonal is found by coordinates of the whole."""
        return outside(self.cut.modes, {*self.modes.values()})

    @cached_property
    def placed(self) -> Ints:
        """The modes by which the result is cut."""
        return tuple(self.modes[c] for c in self.bound.einsum.output if c in self.modes)

    @cached_property
    def summing(self) -> tuple[Ints, ...]:
        """Group the ranks that compute parts of the sums of the same block of the result."""
        return self.cut.sharing(self.placed)

    def block(self, rank: int) -> Box:
        """Return the box of the result that a rank computes."""
        ranges, e = self.cut.ranges(rank), self.bound.einsum
        return tuple(
            ranges[self.modes[c]] if c in self.modes else (0, n)
            for c, n in zip(e.output, self.bound.output_shape, strict=True)
        )

    def narrowed(self, dense: Sequence[Tensor], rank: int) -> list[Tensor]:
        """Return views of the rows of dense operands that a rank reads; broadcast dimensions stay as they are.

        Raises:
            EquationError: not as many as the einsum has.
            ShapeError: of a shape that does not fit the einsum.
        """
        e, ranges = self.bound.einsum, self.cut.ranges(rank)
        if len(dense) != len(e.dense):
            raise EquationError(f'"{e.text}" takes {len(e.dense)} dense operands, found {len(dense)}')
        operands = []
        for position, operand in zip(e.dense, dense, strict=True):
            term, sizes = e.inputs[position], self.bound.shape(position)
            shape = tuple(operand.shape)
            if len(shape) != len(sizes) or any(n not in (1, size) for n, size in zip(shape, sizes, strict=True)):
                raise ShapeError(f'operand {position + 1} of "{e.text}" must have shape {sizes}, found {shape}')
            for dim, letter in enumerate(term):
                if letter in self.modes and operand.shape[dim] != 1:
                    start, stop = ranges[self.modes[letter]]
                    operand = operand.narrow(dim, start, stop - start)
            operands.append(operand)
        return operands
