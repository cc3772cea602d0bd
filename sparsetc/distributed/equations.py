"""The normal equations of a CP model whose tensor is cut: MTTKRPs of boxes, summed where ranks share rows.

In: a sharded tensor and factors. Out: `Equations` over this rank's own rows. For each mode a rank holds the rows of its
range, the *block*, as all ranks of the range do; of these it owns an equal share, which it alone updates. Smith &
Karypis, A medium-grained algorithm for sparse tensor factorization, 2016.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from sparsetc.decomposition.als import Equations
from sparsetc.distributed.agree import agreed
from sparsetc.distributed.combine import DenseResult
from sparsetc.distributed.ranks import Ranks
from sparsetc.distributed.shard import Sharded
from sparsetc.errors import PlanError
from sparsetc.tensor.sparse_tensor import SparseTensor

T = TypeVar("T")


def compiled(ranks: Ranks, what: str, make: Callable[..., T], settings: Mapping[str, Any]) -> T:
    """What `make` gives for settings, on every rank; collective.

    A plan that deals a tensor by the length of its rows, for one, is refused where a share has rows of one length.

    Raises:
        PlanError: no rank's share fits the plan.
        DistributedError: a rank failed otherwise.
    """

    def tried() -> T | PlanError:
        try:
            return make(**settings)
        except PlanError as error:
            return error

    found = agreed(ranks, what, tried)
    if not any(fits := ranks.objects(not isinstance(found, PlanError))):
        assert isinstance(found, PlanError)
        raise found
    if all(fits):
        assert not isinstance(found, PlanError)
        return found
    again = agreed(ranks, what, lambda: make(**{**settings, "plan": "auto"}) if isinstance(found, PlanError) else found)
    return again


@dataclass(frozen=True)
class FactorRows:
    """The rows of one mode's factor, as the ranks of this one's range share them.

    Attributes:
        sharing: the ranks that have the range.
        start: the first row of the range, in the factor.
        share: rows that each rank owns; the last may own fewer, and zeros in the place of others.
    """

    sharing: Ranks
    start: int
    stop: int
    share: int

    @classmethod
    def of(cls, x: Sharded, mode: int) -> FactorRows:
        """The rows of a mode of a tensor; collective."""
        sharing, (start, stop) = x.ranks.divided(x.cut.sharing((mode,))), x.ranges[mode]
        return cls(sharing, start, stop, -(-(stop - start) // sharing.size))

    @property
    def padded(self) -> int:
        """Rows of the block, zeros at its end among them."""
        return self.share * self.sharing.size

    def block(self, factor: torch.Tensor) -> torch.Tensor:
        """(padded, rank) the rows of the range."""
        out = factor.new_zeros((self.padded, factor.shape[1]))
        out[: self.stop - self.start] = factor[self.start : self.stop]
        return out

    def own(self, block: torch.Tensor) -> torch.Tensor:
        """The rows of a block that this rank owns: a copy, or the block itself where it owns all."""
        if self.sharing.size == 1:
            return block
        return block.narrow(0, self.share * self.sharing.rank, self.share).clone()


def prepared(
    x: Sharded, factors: Sequence[torch.Tensor], free: Sequence[int], what: str, **settings: Any
) -> tuple[Equations, list[torch.Tensor], Callable[[], list[torch.Tensor]]]:
    """The equations, compiled on every rank; collective.

    B comes from an MTTKRP of this rank's box, by a reduce-scatter over the ranks of its range, and updated rows go back
    to these by an all-gather.

    Returns:
        The equations; this rank's rows of each factor, which are changed in place; and what gathers the factors from
        the ranks that own their rows, collectively.

    Raises:
        DistributedError: a rank could not.
    """
    rows = [FactorRows.of(x, mode) for mode in range(x.order)]

    def make(**settings: Any) -> tuple[Equations, list[torch.Tensor]]:
        blocks = [r.block(f) for r, f in zip(rows, factors, strict=True)]
        shares = [r.own(b) for r, b in zip(rows, blocks, strict=True)]
        return Equations(
            _padded(x.local, rows),
            shares,
            free,
            blocks,
            x.ranks.sum_,
            lambda mode, rhs: rows[mode].sharing.scattered_sum(rhs),
            lambda mode: rows[mode].sharing.gather_into(blocks[mode], shares[mode]),
            **settings,
        ), shares

    equations, shares = compiled(x.ranks, what, make, settings)
    equations.join()

    def gather() -> list[torch.Tensor]:
        equations.arrived()
        return [gathered(part, r, x.ranks) for part, r in zip(shares, rows, strict=True)]

    return equations, shares, gather


def gathered(own: torch.Tensor, rows: FactorRows, ranks: Ranks) -> torch.Tensor:
    """(size, rank) a factor on every rank, of each one's rows."""
    first = min(rows.stop, rows.start + rows.share * rows.sharing.rank)
    last = min(rows.stop, first + rows.share)
    places = torch.tensor([[first, last]], device=own.device)
    width = (0, own.shape[1])
    blocks = tuple(((start, stop), width) for start, stop in ranks.gathered(places).tolist())
    size = max(stop for (_, stop), _ in blocks)
    return DenseResult((size, own.shape[1]), blocks, 1, False).gathered(own[: last - first], ranks)


def _padded(local: SparseTensor, rows: Sequence[FactorRows]) -> SparseTensor:
    """A box whose modes have as many rows as its blocks of factors."""
    shape = tuple(r.padded for r in rows)
    return SparseTensor._of(local.coords, local.values, shape, local.is_coalesced)
