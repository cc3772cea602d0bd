"""The normal equations of a CP model whose tensor is cut: MTTKRPs of boxes, summed where ranks share rows.

In: a sharded tensor and factors. Out: `Equations` over this rank's own rows. For each mode a rank holds the rows of its
range, the *block*, as all ranks of the range do; of these it owns an equal share, which it alone updates. Smith &
Karypis, A medium-grained algorithm for sparse tensor factorization, 2016.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from sparsetc.decomposition.als import WholeEquations
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


class Boxed(WholeEquations):
    """The equations of a whole tensor, of which this rank has a box.

    B comes from an MTTKRP of the box, by a reduce-scatter over the ranks of its range, and updated rows go back to
    these by an all-gather, beside which the Gram matrix is made. Gram matrices and inner products are sums over all
    ranks.

    Attributes:
        own: this rank's rows of each factor, changed in place.
    """

    def __init__(
        self,
        x: Sharded,
        rows: Sequence[FactorRows],
        factors: Sequence[torch.Tensor],
        free: Sequence[int],
        **settings: Any,
    ) -> None:
        self._rows, self._ranks, self._waiting = rows, x.ranks, list[Callable[[], None]]()
        self._blocks = [r.block(f) for r, f in zip(rows, factors, strict=True)]
        self.own = [r.own(b) for r, b in zip(rows, self._blocks, strict=True)]
        super().__init__(_padded(x.local, rows), self.own, free, **settings)

    def joined(self) -> Boxed:
        """These equations, once all ranks have theirs: what was made of one rank's rows becomes that of all."""
        self.norm = self._ranks.sum_(self.norm.square()).sqrt()
        self._ranks.sum_(self.grams)
        return self

    def updated(self, mode: int) -> None:
        """Begin to send updated rows to the ranks that share them.

        Until they have arrived, nobody may change them: what a sweep calls before it does waits for them, as does what
        reads blocks.
        """
        self._send(mode)
        super().updated(mode)
        self._ranks.sum_(self.grams[mode])

    def advanced(self, mode: int, inner: torch.Tensor | None) -> None:
        """Begin to send updated rows; make the Gram matrix and the inner product of this rank's rows those of all."""
        self._send(mode)
        self._ranks.sum_(self.grams[mode])
        if inner is not None:
            self._ranks.sum_(inner)

    def scalable(self, free: Sequence[int]) -> list[tuple[int, torch.Tensor]]:
        """Rows of this rank, and blocks; once they have arrived."""
        self._arrived()
        blocks = [(mode, self._blocks[mode]) for mode in free if self._blocks[mode] is not self.own[mode]]
        return super().scalable(free) + blocks

    def scaled(self, scales: torch.Tensor) -> None:
        """Scale Gram matrices, and blocks, as this rank's rows were."""
        super().scaled(scales)
        self._arrived()
        for block, own, scale in zip(self._blocks, self.own, scales, strict=True):
            if block is not own:
                block.mul_(scale)

    def norms(self) -> torch.Tensor:
        """From the Gram matrices, which are those of all rows; columns are scaled next."""
        self._arrived()
        return super().norms()

    def inner(self, mode: int, rhs: torch.Tensor) -> torch.Tensor:
        """The inner product over all rows; a start is scaled next."""
        self._arrived()
        return self._ranks.sum_(super().inner(mode, rhs))

    def rhs(self, mode: int) -> torch.Tensor:
        """B of this rank's rows, summed over the ranks that share them."""
        self._arrived()
        return self._rows[mode].sharing.scattered_sum(self._kernels[mode](self._blocks))

    def whole(self) -> list[torch.Tensor]:
        """The factors, gathered from the ranks that own their rows; collective."""
        self._arrived()
        return [gathered(own, rows, self._ranks) for own, rows in zip(self.own, self._rows, strict=True)]

    def _send(self, mode: int) -> None:
        self._waiting.append(self._rows[mode].sharing.gather_into(self._blocks[mode], self.own[mode]))

    def _arrived(self) -> None:
        while self._waiting:
            self._waiting.pop()()


def prepared(x: Sharded, factors: Sequence[torch.Tensor], free: Sequence[int], what: str, **settings: Any) -> Boxed:
    """The equations, compiled on every rank; collective.

    Raises:
        DistributedError: a rank could not.
    """
    rows = [FactorRows.of(x, mode) for mode in range(x.order)]
    return compiled(x.ranks, what, partial(Boxed, x, rows, factors, free), settings).joined()


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
