"""What a plan of one sparse operand is chosen by.

In: a canonical einsum, the rows that it returns, the operand's type, options. Out: `Problem`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from sparsetc.device.targets import MACHINES, machine_of, portable
from sparsetc.ir.equation.einsum import Bound
from sparsetc.ir.plan import DOTS
from sparsetc.options import Options
from sparsetc.planner.statistics import Counts
from sparsetc.support.lru import cached_property
from sparsetc.support.memory import available_memory
from sparsetc.tensor.sparse_tensor import SparseTensor


@dataclass(frozen=True)
class Problem:
    """What a plan is made for."""

    bound: Bound
    kept: tuple[int, ...]
    """Modes of the sparse operand that the output has."""
    order: int
    """How many modes the sparse operand has."""
    backend: str
    precision: str
    """The precision of dots."""
    deterministic: bool
    itemsize: int
    counts: Counts = field(compare=False, repr=False)
    """Counts of the sparse operand's pattern."""
    floating: bool = True
    """Whether a GPU has a matrix instruction for the type."""
    memory_limit: int | None = None
    """Bytes that stored tiles may take; None for what is free."""
    coalesced: bool = True
    """Whether no coordinate occurs twice: tiles hold one value a position."""
    rows: int = 1
    """Rows of the output."""
    distinct: bool = True
    """Whether no two nonzeros have the same coordinates, or each has an output row of its own."""
    finer: tuple[str, ...] = ()
    """Precisions of dots that are more exact than the one asked for, and allowed therefore."""
    products: bool = True
    """Whether the type has a matrix product at all: integers have none."""
    sparse_output: bool = False
    """Whether output rows are those of a pattern."""
    adding: bool = False
    """Whether the nonzeros are some of a larger tensor's, as those of a stream's chunk are."""
    halves: bool = False
    """Whether float32 may be multiplied in halves of 16 bits, where dots are to be as exact as float32."""

    @classmethod
    def of(
        cls,
        bound: Bound,
        rows: int,
        sparse_output: bool,
        x: SparseTensor,
        counts: Counts,
        backend: str,
        settings: Options,
    ) -> Problem:
        """The facts of a canonical einsum with so many output rows.

        Values of its sparse operand `x` are only looked at for their dtype.
        """
        letters = bound.einsum.sparse_indices
        precision, *finer = _dot_precisions(settings.effective_precision(), x)
        return cls(
            bound=bound,
            kept=tuple(letters.index(c) for c in bound.einsum.kept),
            order=len(letters),
            backend=backend,
            precision=precision,
            deterministic=settings.deterministic,
            itemsize=x.dtype.itemsize,
            counts=counts,
            floating=x.dtype.is_floating_point,
            memory_limit=settings.memory_limit,
            coalesced=x.is_coalesced,
            rows=max(1, rows),
            distinct=x.is_coalesced or (sparse_output and rows == counts.nnz),
            finer=tuple(finer),
            products=x.dtype.is_floating_point or x.dtype.is_complex,
            sparse_output=sparse_output,
            halves=backend == "triton" and x.dtype == torch.float32 and MACHINES[machine_of(x.device)].halves,
        )

    @cached_property
    def memory(self) -> int:
        """Bytes that stored tiles may take."""
        return available_memory(self.counts.coords.device) if self.memory_limit is None else self.memory_limit

    @property
    def equation(self) -> str:
        """The einsum as it was written."""
        return self.bound.einsum.text or str(self.bound.einsum)

    @property
    def ordered(self) -> bool:
        """Whether sums that programs add by atomics have to be put in an order: torch has one, integers need none."""
        return self.deterministic and self.backend == "triton" and self.floating

    @cached_property
    def letters(self) -> tuple[str, ...]:
        """The sparse operand's letters, by mode."""
        return self.bound.einsum.sparse_indices

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The sparse operand's sizes, by mode."""
        return self.bound.extents(self.letters)

    @property
    def rest(self) -> tuple[int, ...]:
        """Modes that are summed away."""
        return tuple([m for m in range(self.order) if m not in self.kept])


def _dot_precisions(precision: str, x: SparseTensor) -> list[str]:
    """What a setting stands for in dots of this type on this machine, then what is more exact."""
    if x.dtype in (torch.float16, torch.bfloat16):
        found = ["tf32"]  # holds both types exactly, and what it rounds a product to is no coarser than the result
    elif x.dtype != torch.float32:
        found = ["ieee"]
    else:
        found = list(DOTS.values())[list(DOTS).index(precision) :: -1]
    return list(dict.fromkeys(portable(one, machine_of(x.device)) for one in found))
