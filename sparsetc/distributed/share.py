"""One rank's part of an einsum: on its box, with the rows of dense operands that it reads; how results are combined.

In: an einsum of the whole tensor, and its cut. Out: a `Share`: what letters are cut, how dense operands are narrowed,
and where each rank's block of the result lies; then the transfers of a call, and what is made of what arrives: sums
over the ranks that share a block, rows where they stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from sparsetc.distributed.cut import Box, Cut, Range, shares
from sparsetc.distributed.ranks import Ranks
from sparsetc.distributed.shard import Sharded
from sparsetc.distributed.transfer import Transfer
from sparsetc.errors import EquationError, ShapeError
from sparsetc.ir.equation.einsum import Bound
from sparsetc.support import Ints, cached_property, outside
from sparsetc.tensor.coords import numbered
from sparsetc.tensor.sparse_tensor import SparseTensor


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


Combined = tuple[tuple[Transfer, ...], Callable[[Tensor], Any]]
"""Transfers of a dense result, or of the values of a sparse one, in order, and what makes the result of the last's."""


def dense_result(share: Share, gather: bool, ranks: Ranks, device: torch.device) -> Combined:
    """Rows as a DTensor, or the whole on every rank, as a result without letters always is."""
    shape, size = share.bound.output_shape, ranks.size
    full = shape or (1,)
    boxes = [share.block(rank) or ((0, 1),) for rank in range(size)]
    whole, rows = [(0, full[0])] * size, shares((0, full[0]), size)
    transfers = []
    if shape and (not gather or len(share.summing) < size):
        transfers.append(Transfer.of_boxes(ranks, boxes, rows, full))
        boxes = [(one, *((0, n) for n in full[1:])) for one in rows]
    if gather or not shape:
        transfers.append(Transfer.of_boxes(ranks, boxes, whole, full))
    placement: Placement = Shard(0) if shape else Replicate()
    stride = tuple(prod(shape[n + 1 :]) for n in range(len(shape)))

    def wrap(part: Tensor) -> Tensor:
        part = part if shape else part.view(())
        if gather or ranks.group is None:
            return part
        return DTensor.from_local(part, ranks.mesh(device), [placement], shape=torch.Size(shape), stride=stride)

    return tuple(transfers), wrap


def sparse_result(share: Share, local: SparseTensor, ranks: Ranks) -> Combined:
    """Entries that stay in shares; where ranks share a block, each keeps a range of the block's entries; collective.

    Args:
        share: the einsum.
        local: this rank's own result, of any values.
        ranks: all.
    """
    modes = [share.modes.get(letter) for letter in share.bound.einsum.output]
    shape = share.bound.output_shape
    bounds = [(0, n) if m is None else share.cut.bounds[m] for m, n in zip(modes, shape, strict=True)]
    number = {rank: at for part in share.summing for at, rank in enumerate(part)}
    along = [tuple(0 if m is None else at[m] for m in modes) for at in share.cut.coordinates]
    part = next(part for part in share.summing if ranks.rank in part)
    local, transfers = _united(local, part, ranks) if len(part) > 1 else (local, ())
    coordinates = tuple((*at, number[rank]) for rank, at in enumerate(along))
    cut = Cut(shape, tuple(bounds), coordinates, tuple(ranks.objects(local.nnz)))
    return transfers, lambda values: Sharded(cut, local.with_values(values), ranks)


def _united(local: SparseTensor, part: Sequence[int], ranks: Ranks) -> tuple[SparseTensor, tuple[Transfer, ...]]:
    """Split the union of these ranks' entries evenly among them; collective.

    Args:
        local: this rank's entries, of any values.
        part: the ranks, this one among them.
        ranks: all ranks.

    Returns:
        This rank's share of the entries, and how their values come to it.
    """
    every, width = range(ranks.size), local.values.shape[1:]
    counts = [n * (rank in part) for rank, n in enumerate(ranks.objects(local.nnz))]
    rows, sent = local.coords.T.repeat(len(part), 1), [local.nnz * (rank in part) for rank in every]
    coords = ranks.exchanged(rows, counts, sent).T.contiguous()
    union = numbered(coords.unbind(), local.shape[: local.sparse_order], coords.shape[1], coords)
    numbers, spans = union.rank.split(counts), dict(zip(part, shares((0, union.count), len(part)), strict=True))

    def within(rank: int, span: Range) -> Tensor:
        """Return (n,) the numbers of a rank's entries within a span of the union, in the order of sending."""
        return numbers[rank][(numbers[rank] >= span[0]) & (numbers[rank] < span[1])].sort().values

    start, stop = spans[ranks.rank]
    numbers_sent = [within(ranks.rank, spans.get(rank, (0, 0))).numel() for rank in every]
    ends = list(accumulate(numbers_sent))
    regions = [(at - start, (at.numel(), *width)) for at in (within(rank, (start, stop)) for rank in every)]
    values = local.values.new_zeros((stop - start, *width))
    transfer = Transfer(
        ranks,
        tuple((end - n, end) for n, end in zip(numbers_sent, ends, strict=True)),
        prod(width),
        tuple(regions),
        tuple(values.shape),
        adds=True,
        order=torch.argsort(numbers[ranks.rank]),
    )
    kept = torch.stack(union.coords)[:, start:stop].contiguous()
    return SparseTensor._of(kept, values, local.shape, True), (transfer,)
