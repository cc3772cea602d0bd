"""What a plan of one sparse operand is chosen by: a `Problem`, with `Counts` of the operand's pattern.

In: a canonical einsum, the rows that it returns, the operand's coordinates and type, options. Out: `Problem`. Counts
are made when they are first asked for, and kept with the pattern.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeVar

import torch

from sparsetc.device.profile import has_halves, machine_of, portable
from sparsetc.ir.equation.einsum import Bound
from sparsetc.ir.plan import DOTS
from sparsetc.options import Options
from sparsetc.packing.deal import Dealing, row_numbers
from sparsetc.packing.tiles import VOLUME, sides_of, tile_populations
from sparsetc.support.lru import Lru, cached_property
from sparsetc.support.memory import available_memory
from sparsetc.tensor import coords as crd
from sparsetc.tensor.sparse_tensor import SparseTensor

T = TypeVar("T")

OWN = 8
"""Things kept for counts that no pattern has."""


class Counts:
    """Distinct coordinates of sets of modes, counted once each."""

    def __init__(
        self,
        coords: torch.Tensor,
        shape: tuple[int, ...],
        memory: dict[Any, Any] | None = None,
        cache: Lru[Any, Any] | None = None,
    ) -> None:
        """Nothing is counted yet.

        Args:
            coords: (order, nnz).
            shape: sizes of the modes.
            memory: of a pattern, where counts outlive the object.
            cache: of a pattern, where the shares that partitions deal, and groups of rows, are found when they are
                packed.
        """
        self._coords, self.shape = coords, shape
        self.nnz = coords.shape[1]
        self._memory = {} if memory is None else memory
        own: Lru[Any, Any] = Lru(OWN)
        # Kernels that are kept there have counts.
        self._cache: Callable[[], Lru[Any, Any] | None] = (lambda: own) if cache is None else weakref.ref(cache)

    def __reduce__(self) -> tuple[Any, ...]:
        return Counts, (self.coords, self.shape, self._memory)

    @property
    def coords(self) -> torch.Tensor:
        """(order, nnz) int64, in lexicographic order."""
        return self._coords

    @property
    def cache(self) -> Lru[Any, Any]:
        """What is kept with the pattern; nothing where that has forgotten it."""
        found = self._cache()
        return Lru(1) if found is None else found

    def row(self, mode: int) -> torch.Tensor:
        """(nnz,) int64 coordinates of a mode."""
        return self._coords[mode]

    def distinct(self, modes: tuple[int, ...]) -> int:
        """How many different coordinates the nonzeros have in these modes."""
        modes = tuple(sorted(modes))
        if not modes or self.nnz == 0:
            return min(self.nnz, 1)
        return self.once(("distinct", modes), lambda: self._count(modes))

    def longest(self, modes: tuple[int, ...]) -> int:
        """Most nonzeros that have the same coordinates in these modes; all of them where there are no modes."""
        if not modes or self.nnz == 0:
            return self.nnz
        modes = tuple(sorted(modes))
        return self.once(("longest", modes), lambda: int(self._lengths(modes).max()))

    def tiles(self) -> torch.Tensor:
        """Count the nonzeros that lie in tiles of each population, of the default sides: (volume + 1,), on the CPU."""

        def count() -> torch.Tensor:
            held = tile_populations(self.coords, self.shape, sides_of(self.shape))
            return torch.bincount(held, minlength=VOLUME + 1).cpu()

        return self.once("tiles", count)

    def once(self, name: Hashable, count: Callable[[], T]) -> T:
        """What a method counts of the nonzeros, counted once a name."""
        if name not in self._memory:
            self._memory[name] = count()
        found: T = self._memory[name]
        return found

    def _count(self, modes: tuple[int, ...]) -> int:
        sizes = [self.shape[m] for m in modes]
        keys = crd.sort_keys((self.row(m) for m in modes), sizes)
        span = prod(sizes)
        if len(keys) == 1 and span <= 16 * self.nnz + (1 << 20):
            seen = torch.zeros(span, dtype=torch.bool, device=keys[0].device)
            seen[keys[0]] = True
            return int(torch.count_nonzero(seen))
        if modes == tuple(range(len(modes))):  # a prefix of the sort order: runs are already together
            return int(torch.count_nonzero(crd.starts_of_runs(keys)))
        fresh = crd.sorted_runs(keys)[1] if len(keys) > 1 else crd.starts_of_runs([torch.sort(keys[0]).values])
        return int(torch.count_nonzero(fresh))

    def short_share(self, kept: tuple[int, ...], threshold: int) -> tuple[int, int]:
        """(nonzeros, rows) that lie in rows of fewer than `threshold` nonzeros."""

        def count() -> tuple[int, int]:
            lengths = self._lengths(kept)
            short = lengths[(lengths > 0) & (lengths < threshold)]
            return int(short.sum()), short.numel()

        return self.once(("short", kept, threshold), count) if kept and self.nnz else (0, 0)

    def _lengths(self, modes: tuple[int, ...]) -> torch.Tensor:
        """How many nonzeros have each of the coordinates in these modes."""
        return torch.bincount(row_numbers((self.row(m) for m in modes), [self.shape[m] for m in modes]))

    def shares(self, partition: str, kept: tuple[int, ...] = (), **options: Any) -> tuple[Counts, ...]:
        """Counts of each share that a partition deals; what is dealt here is not dealt again to be packed.

        Args:
            partition: name of a registered rule.
            kept: modes that the output keeps, which a rule that deals by rows asks for.
            options: the rule's own arguments.

        Raises:
            PlanError: the rule is not known, or breaks its promises.
        """
        dealing = Dealing.of(partition, options.items(), kept)

        def count() -> list[tuple[int, dict[Any, Any]]]:
            return [(self.nnz if own is None else own.numel(), {}) for own in self.dealt(dealing)]

        return tuple(Share(self, dealing, n, *held) for n, held in enumerate(self.once(dealing, count)))

    def dealt(self, dealing: Dealing) -> list[torch.Tensor | None]:
        """The numbers of each share's nonzeros; None for all of them."""
        return dealing.shares(self.coords, self.shape, self.cache)


class Share(Counts):
    """Counts of the nonzeros that a partition deals to one part."""

    def __init__(self, whole: Counts, dealing: Dealing, number: int, nnz: int, memory: dict[Any, Any]) -> None:
        self._whole, self._dealing, self._number = whole, dealing, number
        self.shape, self.nnz, self._memory, self._cache = whole.shape, nnz, memory, lambda: None

    @cached_property
    def _own(self) -> torch.Tensor | None:
        """(nnz,) the numbers of the nonzeros; None for all of them."""
        return self._whole.dealt(self._dealing)[self._number]

    @property
    def coords(self) -> torch.Tensor:
        """(order, nnz) int64, in lexicographic order; taken out of all when they are asked for."""
        own = self._own
        return self._whole.coords if own is None else self._whole.coords[:, own]

    def row(self, mode: int) -> torch.Tensor:
        """(nnz,) int64 coordinates of a mode, taken out of all."""
        own = self._own
        return self._whole.row(mode) if own is None else self._whole.row(mode).index_select(0, own)


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
            halves=backend == "triton" and x.dtype == torch.float32 and has_halves(machine_of(x.device)),
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
