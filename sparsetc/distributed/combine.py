"""Ranks' results brought together, as the cut says: sums over the ranks that share a block, then blocks side by side.

In: each rank's block of a dense result, or its values of a sparse one. Out: the result, or this rank's share of it. All
that is sent is described by `Send`s, which `explain` prints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from sparsetc.distributed.cut import Cut, Range
from sparsetc.distributed.ranks import SUMMED_IN, Ranks
from sparsetc.distributed.shard import Sharded
from sparsetc.distributed.share import Share
from sparsetc.errors import DtypeError
from sparsetc.support.entry import entry_point
from sparsetc.tensor.coords import numbered
from sparsetc.tensor.sparse_tensor import SparseTensor
from sparsetc.tensor.sums import INTEGERS, fitted, refuse_wrapped, wrapped


@dataclass(frozen=True)
class Send:
    """One collective operation of a call.

    Attributes:
        kind: ``reduce-scatter`` or ``all-gather``.
        ranks: how many take part.
        nbytes: bytes that each of them sends, at least: what it has for others, once.
    """

    kind: str
    ranks: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.kind} over {self.ranks} ranks, {self.nbytes:,} bytes from each"


def summed(rows: torch.Tensor, sharing: Ranks, ranks: Ranks, what: str) -> torch.Tensor:
    """Sums of (shares * n, ...) rows over the ranks that share them, of which each gets n, in the dtype they have.

    Raises:
        DtypeError: an integer does not fit, on any rank.
    """
    dtype = rows.dtype
    found = sharing.scattered_sum(rows.to(SUMMED_IN.get(dtype, dtype)))
    if dtype not in INTEGERS:
        return found.to(dtype)
    # Sums over ranks of narrower integers fit in 64 bits.
    close = sharing.scattered_sum(rows.double()) if dtype == torch.int64 else found.double()
    past = ((found.to(dtype) != found) | wrapped(found, close)).any().int()[None]
    if bool(ranks.most(past)):
        fitted(found, dtype, what)
        refuse_wrapped(found, close, what)
        raise DtypeError(
            f"{what} holds on another rank what {dtype} cannot; convert the operands with .to(torch.int64), or from "
            "it with .to(torch.float64)"
        )
    return found.to(dtype)


def summed_bytes(dtype: torch.dtype) -> int:
    """Bytes of an element whose sums over ranks are returned in a dtype; int64 is summed in float64 too."""
    return 16 if dtype == torch.int64 else SUMMED_IN.get(dtype, dtype).itemsize


@dataclass(frozen=True)
class DenseResult:
    """How a dense result is made of blocks.

    Attributes:
        blocks: where the block of each rank lies once it was summed; one of no rows where there are fewer rows than
            ranks.
        shares: ranks that share a block before.
        kept: whether each rank keeps its block, instead of all having the whole.
    """

    shape: tuple[int, ...]
    blocks: tuple[tuple[Range, ...], ...]
    shares: int
    kept: bool

    @classmethod
    def of(cls, share: Share, kept: bool) -> DenseResult:
        """That of an einsum."""
        blocks = [share.block(rank) for rank in range(share.cut.size)]
        for part in share.summing:
            for number, rank in enumerate(part):
                blocks[rank] = _own_rows(blocks[rank], number, len(part))
        return cls(share.bound.output_shape, tuple(blocks), len(share.summing[0]), kept)

    def sends(self, dtype: torch.dtype) -> list[Send]:
        """What a call sends, of a result of this dtype."""
        most, found = max(_elements(block) for block in self.blocks), []
        if self.shares > 1:
            found.append(Send("reduce-scatter", self.shares, most * (self.shares - 1) * summed_bytes(dtype)))
        if not self.kept and len(self.blocks) > 1:
            found.append(Send("all-gather", len(self.blocks), most * dtype.itemsize))
        return found

    def combined(self, local: torch.Tensor, sharing: Ranks, ranks: Ranks, what: str) -> torch.Tensor | Block:
        """The result, or this rank's block of it, of its part of the block that it shares."""
        if not self.shape:
            return _scalar(local, sharing, ranks, what)
        if self.shares > 1:
            share = -(-local.shape[0] // self.shares)
            found = summed(_padded(local, share * self.shares), sharing, ranks, what)
            (start, stop), *_ = self.blocks[ranks.rank]
            local = found.narrow(0, 0, stop - start)
        return Block(local, self, ranks) if self.kept else self.gathered(local, ranks)

    def gathered(self, block: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        """The whole, of every rank's block."""
        if ranks.size == 1:
            return block
        most = max(map(_elements, self.blocks))
        flat = ranks.gathered(_padded(block.reshape(-1), most)).reshape(ranks.size, most)
        out = block.new_empty(self.shape)
        for found, ranges in zip(flat, self.blocks, strict=True):
            at = tuple(slice(*r) for r in ranges)
            out[at] = found[: _elements(ranges)].view([stop - start for start, stop in ranges])
        return out


@dataclass(frozen=True, eq=False)
class Block:
    """A dense result that was not gathered: each rank has a block of it.

    Attributes:
        local: this rank's block, of the sizes of `ranges`.
        result: where all ranks' blocks lie.
    """

    local: torch.Tensor
    result: DenseResult
    ranks: Ranks

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the whole result."""
        return self.result.shape

    @property
    def ranges(self) -> tuple[Range, ...]:
        """The part of each mode of the whole result that this rank has; those of all ranks do not overlap."""
        return self.result.blocks[self.ranks.rank]

    @entry_point
    def gather(self) -> torch.Tensor:
        """The whole result, on every rank; collective."""
        return self.result.gathered(self.local, self.ranks)

    def __repr__(self) -> str:
        return f"Block({self.ranges} of {self.shape}, rank {self.ranks.rank} of {self.ranks.size})"


@dataclass(frozen=True, eq=False)
class SparseResult:
    """How a sparse result stays in shares; where ranks share a block, each keeps a range of the block's entries.

    Attributes:
        cut: how the result lies on the ranks.
        own: this rank's entries; of its values only shape, dtype and device count.
        slot: (n,) which of the block's entries each of this rank's local ones is; None where no block is shared.
        entries: how many entries the block has, padded to equal shares.
    """

    cut: Cut
    own: SparseTensor
    slot: torch.Tensor | None
    entries: int

    def sends(self) -> list[Send]:
        """What a call sends."""
        shares = self.cut.grid[-1]
        row = prod(self.own.values.shape[1:]) * summed_bytes(self.own.dtype)
        own = self.entries // shares
        return [] if self.slot is None else [Send("reduce-scatter", shares, own * row * (shares - 1))]

    def combined(self, local: SparseTensor, sharing: Ranks, ranks: Ranks, what: str) -> Sharded:
        """The result, as shares, of this rank's local one."""
        if self.slot is None:
            return Sharded(self.cut, local, ranks)
        rows = local.values.new_zeros((self.entries, *local.values.shape[1:]))
        found = summed(rows.index_copy_(0, self.slot, local.values), sharing, ranks, what)
        return Sharded(self.cut, self.own.with_values(found[: self.own.nnz]), ranks)


def sparse_result(share: Share, local: SparseTensor, sharing: Ranks, ranks: Ranks) -> SparseResult:
    """The plan of a sparse result; collective.

    Args:
        share: the einsum.
        local: this rank's own result, of any values.
        sharing: the ranks that share its block.
        ranks: all.
    """
    bounds = []
    for letter, n in zip(share.bound.einsum.output, share.bound.output_shape, strict=True):
        bounds.append(share.cut.bounds[share.modes[letter]] if letter in share.modes else (0, n))
    number = {rank: at for part in share.summing for at, rank in enumerate(part)}
    places = []
    for rank, place in enumerate(share.cut.places):
        along = (place[share.modes[c]] if c in share.modes else 0 for c in share.bound.einsum.output)
        places.append((*along, number[rank]))
    cut = Cut(share.bound.output_shape, tuple(bounds), tuple(places), (0,) * ranks.size)
    slot, entries = None, 0
    if sharing.size > 1:
        local, slot, entries = _united(local, sharing)
    counts = ranks.gathered(torch.tensor([local.nnz], device=local.device)).tolist()
    return SparseResult(replace(cut, nnz=tuple(counts)), local, slot, entries)


def _united(local: SparseTensor, sharing: Ranks) -> tuple[SparseTensor, torch.Tensor, int]:
    """The own share of the entries that any rank has, the number of each local one, and how many, padded."""
    counts = sharing.gathered(torch.tensor([local.nnz], device=local.device)).tolist()
    coords = torch.cat(sharing.gathered_unequal(local.coords.T.contiguous(), counts)).T.contiguous()
    found = numbered(coords.unbind(), local.shape[: local.sparse_order], coords.shape[1], coords)
    first = sum(counts[: sharing.rank])
    share = -(-found.count // sharing.size)
    start = min(found.count, share * sharing.rank)
    own = torch.stack(found.coords)[:, start : min(found.count, start + share)].contiguous()
    values = local.values.new_zeros((own.shape[1], *local.values.shape[1:]))
    slot = found.rank[first : first + local.nnz]
    return SparseTensor._of(own, values, local.shape, True), slot, share * sharing.size


def _own_rows(block: tuple[Range, ...], number: int, shares: int) -> tuple[Range, ...]:
    """The ranges of a block, of whose first mode one of so many ranks keeps a part."""
    if not block or shares == 1:
        return block
    (start, stop), *others = block
    share = -(-(stop - start) // shares)
    first = min(stop, start + share * number)
    return (first, min(stop, first + share)), *others


def _elements(block: Sequence[Range]) -> int:
    return prod(stop - start for start, stop in block)


def _padded(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Rows, as many as wanted, zeros at last."""
    if rows.shape[0] == count:
        return rows
    out = rows.new_zeros((count, *rows.shape[1:]))
    out[: rows.shape[0]] = rows
    return out


def _scalar(local: torch.Tensor, sharing: Ranks, ranks: Ranks, what: str) -> torch.Tensor:
    """A result without letters, of which all ranks may have a part; on all of them."""
    if sharing.size == 1:
        return local
    return sharing.gathered(summed(_padded(local[None], sharing.size), sharing, ranks, what))[0]
