"""The facts that a plan is chosen by, for an einsum of one sparse operand: `Problem`, with `Counts` of the pattern.

In: a canonical einsum, the rows that it returns, the operand's coordinates and type, options. Out: `Problem`. Counts
are made when they are first asked for, and kept with the pattern.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from sparsetc.backends import NUMBA, Backend
from sparsetc.device.profile import DeviceProfile, cpu, has_halves, machine_of, of_backend, portable, shared_memory
from sparsetc.ir.equation.einsum import Bound, Einsum
from sparsetc.ir.plan import DOTS, F16
from sparsetc.ir.program.operands import in_runs
from sparsetc.options import Options
from sparsetc.packing.base import VOLUME, sides_of, tile_populations
from sparsetc.packing.partition import row_numbers, shares, shares_key
from sparsetc.support import Cache, Ints, Names, among, cached_property, outside
from sparsetc.support.checks import available_memory
from sparsetc.tensor import coords as crd
from sparsetc.tensor.sparse_tensor import SparseTensor

T = TypeVar("T")

ON_HOST = 1 << 16
"""Most nonzeros of a GPU tensor to count rows and samples of on the host, which waits for no launches: new R-MAT graphs
of 16 K edges took 15 ms in place of 18, random ones of 320 K 25 in place of 24 (NVIDIA H100)."""
NEIGHBOURS = 1024
"""Nonzeros, about, that are looked at to tell how many have a neighbour."""
WINDOW, LEAST = 1 << 18, 1 << 7
"""Nonzeros, at most and at least, that are looked at to tell how soon coordinates come again."""
OWN = 8
"""Entries of the cache of counts that belong to no pattern."""
FEW_ROWS = 4
"""Nonzeros a row on average, at least, where the lengths of rows are kept: they then take an eighth of the pattern."""


class Counts:
    """Counts by sets of modes, each made once: distinct coordinates, longest runs, populations of tiles."""

    def __init__(
        self,
        coords: Tensor,
        shape: Ints,
        memory: dict[Any, Any] | None = None,
        cache: Cache | None = None,
        share: tuple[int, Callable[[], Tensor | None]] | None = None,
    ) -> None:
        """Count nothing yet.

        Args:
            coords: (order, nnz).
            shape: sizes of the modes.
            memory: of a pattern, where counts outlive the object.
            cache: of a pattern, where the shares of partitions, and groups of rows, are found when they are
                packed.
            share: how many of the nonzeros are counted, and a function that gives their numbers, None for all.
        """
        self._coords, self.shape = coords, shape
        self.nnz, self._share = share or (coords.shape[1], lambda: None)
        self._memory = {} if memory is None else memory
        private = Cache(OWN)
        # Weak: the cache keeps kernels, which keep counts.
        self._cache: Callable[[], Cache | None] = (lambda: private) if cache is None else weakref.ref(cache)

    def __reduce__(self) -> tuple[Any, ...]:
        return Counts, (self.coords, self.shape, self._memory)

    def cached_in(self, cache: Cache) -> Counts:
        """Return these counts with another cache for packed arrays."""
        return Counts(self._coords, self.shape, self._memory, cache, (self.nnz, self._share))

    @cached_property
    def _numbers(self) -> Tensor | None:
        """(nnz,) the numbers of the nonzeros; None for all of them."""
        return self._share()

    @property
    def coords(self) -> Tensor:
        """(order, nnz) int64, in lexicographic order; of a share, copied at each access."""
        return self._coords if self._numbers is None else self._coords[:, self._numbers]

    @property
    def cache(self) -> Cache:
        """The pattern's cache; a new one where the pattern is gone."""
        cache = self._cache()
        return Cache(1) if cache is None else cache

    def row(self, mode: int) -> Tensor:
        """(nnz,) int64 coordinates of a mode; on the host where a copy takes less time than counting launches."""
        return self._near[mode]

    @cached_property
    def _near(self) -> Tensor:
        coords = self.coords
        return coords.cpu() if coords.is_cuda and self.nnz <= ON_HOST else coords

    def distinct(self, modes: Ints) -> int:
        """Return the number of different coordinates in these modes."""
        modes = tuple(sorted(modes))
        if not modes or self.nnz == 0:
            return min(self.nnz, 1)
        return self.once(("distinct", modes), lambda: self._count(modes))

    def longest(self, modes: Ints) -> int:
        """Return the most nonzeros with the same coordinates in these modes."""
        if not modes or self.nnz == 0:
            return self.nnz
        modes = tuple(sorted(modes))
        return self.once(("longest", modes), lambda: int(self.lengths(modes).max()))

    @property
    def neighbours(self) -> float:
        """The share of nonzeros, about, that are followed by one with the next coordinate of the last mode."""

        def count() -> float:
            last, step = self.row(-1), max(1, self.nnz // NEIGHBOURS)
            before, after = last[:-1:step], last[1::step]
            return int(torch.count_nonzero(after == before + 1)) / max(1, after.numel())

        return self.once("neighbours", count)

    def lengths(self, modes: Ints) -> Tensor:
        """Return (rows,) the number of nonzeros of each coordinate that occurs in these modes, in lexicographic order.

        They are kept where they take little; how many there are, and the longest, are noted on the way.
        """
        lengths: Tensor | None = self._memory.get(("lengths", modes))
        if lengths is not None:
            return lengths
        rows = [self.row(m) for m in modes]
        if modes == tuple(range(len(modes))):  # a prefix of the sort order: rows are already together
            start = torch.nonzero(crd.starts_of_runs(rows)).flatten()
            lengths = torch.diff(start, append=start.new_tensor([self.nnz]))
        else:
            lengths = torch.bincount(row_numbers(rows, [self.shape[m] for m in modes]))
            lengths = lengths[lengths > 0]
        self.once(("distinct", tuple(sorted(modes))), lengths.numel)
        self.once(("longest", tuple(sorted(modes))), lambda: int(lengths.max()))
        if FEW_ROWS * lengths.numel() <= self.nnz:
            self._memory[("lengths", modes)] = lengths
        return lengths

    def tiles(self) -> Tensor:
        """Count the nonzeros that lie in tiles of each population, of the default sides: (volume + 1,), on the CPU."""

        def count() -> Tensor:
            held = tile_populations(self.coords, self.shape, sides_of(self.shape))
            return torch.bincount(held, minlength=VOLUME + 1).cpu()

        return self.once("tiles", count)

    def once(self, name: Hashable, count: Callable[[], T]) -> T:
        """Return what a function counts of the nonzeros, called once a name."""
        if name not in self._memory:
            self._memory[name] = count()
        counted: T = self._memory[name]
        return counted

    def misses(self, first: int, mode: int) -> tuple[tuple[int, float], ...]:
        """Return the share of nonzeros whose coordinate of a mode is not among the last so many, for numbers of them.

        Nonzeros are those in the middle of an order by the mode `first`. Of twice as many neighbours the second half
        has these new coordinates: as many are missed by a cache that holds about what both halves have.
        """

        def count() -> tuple[tuple[int, float], ...]:
            rows, begin = self.row(first), max(0, self.nnz - WINDOW) // 2
            end = min(begin + WINDOW, self.nnz)
            low, high = (rows.kthvalue(max(1, place)).values for place in (begin + 1, end)) if self.nnz else (0, 0)
            inside = torch.nonzero((rows >= low) & (rows <= high)).flatten()
            seen = self.row(mode)[inside[torch.argsort(rows[inside], stable=True)]][:WINDOW]
            places = torch.arange(len(seen), device=seen.device)
            first_seen = torch.full((self.shape[mode],), len(seen), device=seen.device)
            first_seen.scatter_reduce_(0, seen, places, "amin")
            new = (first_seen[seen] == places).cumsum(0)
            lengths = [1 << n for n in range(LEAST.bit_length() - 1, len(seen).bit_length())]
            met = [int(n) for n in new[[n - 1 for n in lengths]]]
            return tuple((after, (after - before) / n) for n, before, after in zip(lengths, met, met[1:], strict=False))

        return self.once(("misses", first, mode), count)

    def _count(self, modes: Ints) -> int:
        rows, sizes = crd.of_modes(self.coords, self.shape, modes)  # where they are, as most are sorted
        keys = crd.sort_keys(rows, sizes)
        span = prod(sizes)
        if len(keys) == 1 and span <= 16 * self.nnz + (1 << 20):
            seen = torch.zeros(span, dtype=torch.bool, device=keys[0].device)
            seen[keys[0]] = True
            return int(torch.count_nonzero(seen))
        if modes == tuple(range(len(modes))):  # a prefix of the sort order: runs are already together
            return int(torch.count_nonzero(crd.starts_of_runs(keys)))
        fresh = crd.sorted_runs(keys)[1] if len(keys) > 1 else crd.starts_of_runs([torch.sort(keys[0]).values])
        return int(torch.count_nonzero(fresh))

    def short_share(self, kept: Ints, threshold: int) -> tuple[int, int]:
        """(nonzeros, rows) that lie in rows of fewer than `threshold` nonzeros."""

        def count() -> tuple[int, int]:
            lengths = self.lengths(tuple(sorted(kept)))
            short = lengths[lengths < threshold]
            return int(short.sum()), short.numel()

        return self.once(("short", kept, threshold), count) if kept and self.nnz else (0, 0)

    def shares(self, partition: str, kept: Ints = (), **options: Any) -> tuple[Counts, ...]:
        """Return the counts of each share of a partition; the shares are kept for packing.

        Args:
            partition: name of a registered rule.
            kept: modes that the output keeps, which a rule that divides by rows asks for.
            options: the rule's own arguments.

        Raises:
            PlanError: the rule is not known, or breaks its promises.
        """

        def divided() -> list[Tensor | None]:
            return shares(partition, options.items(), kept, self.coords, self.shape, self.cache)

        def count() -> list[tuple[int, dict[Any, Any]]]:
            return [(self.nnz if numbers is None else numbers.numel(), {}) for numbers in divided()]

        held = self.once(shares_key(partition, options.items(), kept), count)
        return tuple(
            Counts(self.coords, self.shape, memory, share=(nnz, lambda n=n: divided()[n]))  # type: ignore[misc]
            for n, (nnz, memory) in enumerate(held)
        )


@dataclass(frozen=True)
class Problem:
    """The facts that a plan is made by: a canonical einsum, its sparse operand's type and pattern, and options.

    Attributes:
        precisions: the precision of dots that is asked for, then more exact ones, which are allowed too.
        counts: counts of the sparse operand's pattern.
        memory_limit: bytes that stored tiles may take; None for what is free.
        halves: True if a float32 product may be made of three products of 16-bit halves.
        coalesced: True if no coordinate occurs twice: tiles hold one value a position.
        rows: rows of the output.
        sparse_output: True if output rows are those of a pattern.
        adding: True if the nonzeros are a chunk of a larger tensor.
        ones: True if every value is 1, and no call has others, so that generated kernels read none.
        native: True if programs of torch may run as native loops.
        only_native: True if they all run so where they can, and not only those that are priced lower.
    """

    bound: Bound
    backend: Backend
    dtype: torch.dtype
    precisions: Names
    counts: Counts = field(compare=False, repr=False)
    deterministic: bool
    memory_limit: int | None
    halves: bool
    coalesced: bool
    rows: int
    sparse_output: bool
    adding: bool = False
    ones: bool = False
    native: bool = False
    only_native: bool = False

    @classmethod
    def of(
        cls, bound: Bound, rows: int, sparse_output: bool, x: SparseTensor, counts: Counts, settings: Options
    ) -> Problem:
        """Collect the facts of an einsum with `rows` output rows.

        Values of its sparse operand `x` are not read.
        """
        device, dtype = x.device, x.dtype
        machine, backend = machine_of(device), settings.effective_backend(device, dtype)
        if dtype in (torch.float16, torch.bfloat16):
            dots = ["tf32"]  # holds both types exactly, and what it rounds a product to is no coarser than the result
        elif dtype != torch.float32:
            dots = ["ieee"]
        else:
            dots = list(DOTS.values())[list(DOTS).index(settings.effective_precision()) :: -1]
        precisions = tuple(dict.fromkeys([portable(dot, machine) for dot in dots]))
        halves = backend.tensor_cores and dtype == torch.float32 and has_halves(machine)
        native = not dtype.is_complex and settings.has_loops(device)
        return cls(
            bound,
            backend,
            dtype,
            precisions,
            counts,
            deterministic=settings.deterministic,
            memory_limit=settings.memory_limit,
            halves=halves,
            coalesced=x.is_coalesced,
            rows=max(1, rows),
            sparse_output=sparse_output,
            ones=x.pattern.ones and not backend.at_once,
            native=native,
            only_native=native and settings.named_backend == NUMBA.name,
        )

    @cached_property
    def nnz(self) -> int:
        """Nonzeros of the sparse operand."""
        return self.counts.nnz

    @cached_property
    def device(self) -> torch.device:
        """The device that the sparse operand is on."""
        return self.counts.coords.device

    @cached_property
    def einsum(self) -> Einsum:
        """The einsum, whatever the sizes."""
        return self.bound.einsum

    @cached_property
    def of_any_pattern(self) -> Problem:
        """The problem without its pattern: what depends on it alone is kept for the next pattern."""
        return replace(self, counts=Counts(self.counts.coords.new_zeros(self.order, 0), self.shape))

    @cached_property
    def profile(self) -> DeviceProfile:
        """The profile of the device that runs the plan, as it was when it was first asked for."""
        return of_backend((NUMBA if self.native else self.backend).name, self.device)

    @cached_property
    def rules(self) -> Mapping[str, Any]:
        """The numbers for schedules and formats: of programs that take whole axes, a CPU's wherever they run."""
        return (cpu() if self.backend.at_once and not self.native else self.profile).rules

    @cached_property
    def precision(self) -> str:
        """The precision of dots."""
        return self.precisions[0]

    @cached_property
    def precision_as_loaded(self) -> str:
        """The precision of dots on operands as they are loaded, without a product in between."""
        return F16 if self.itemsize == 2 else self.precision

    @cached_property
    def shared(self) -> int:
        """Bytes of shared memory that a program may have."""
        return shared_memory(self.device)

    @cached_property
    def itemsize(self) -> int:
        """Bytes of a value."""
        return self.dtype.itemsize

    @cached_property
    def floating(self) -> bool:
        """True if the type is a real floating one."""
        return self.dtype.is_floating_point

    @cached_property
    def products(self) -> bool:
        """True if the dtype has matrix products; integers have none."""
        return self.dtype.is_floating_point or self.dtype.is_complex

    @cached_property
    def distinct(self) -> bool:
        """True if no two nonzeros have the same coordinates, or each has an output row of its own."""
        return self.coalesced or (self.sparse_output and self.rows == max(1, self.counts.nnz))

    @cached_property
    def memory(self) -> int:
        """Bytes that stored tiles may take."""
        return available_memory(self.device) if self.memory_limit is None else self.memory_limit

    @property
    def equation(self) -> str:
        """The einsum as it was written."""
        return self.einsum.text or str(self.einsum)

    @cached_property
    def ordered(self) -> bool:
        """True if atomics would make sums depend on their order, and `deterministic=True` forbids it."""
        return self.deterministic and self.backend.atomics and self.floating

    @cached_property
    def readings(self) -> list[tuple[Ints, Ints | None, bool]]:
        """The shape of each dense operand, the order its dimensions are read in, and if that is done by strides.

        The order is None where the dimensions are in it already. Triton's kernels read an operand in another order by
        its strides, where its elements lie in runs: it is neither permuted nor copied.
        """
        bound, e = self.bound, self.einsum
        each = list[tuple[Ints, Ints | None, bool]]()
        for p in e.dense:
            letters = among((*e.sparse_indices, *e.axes), e.inputs[p])
            order = None if letters == e.inputs[p] else tuple(map(e.inputs[p].index, letters))
            strided = self.backend.addressed and in_runs(e.inputs[p], letters, bound.by_index)
            each.append((bound.shape(p), order, strided))
        return each

    @cached_property
    def letters(self) -> Names:
        """The sparse operand's letters, by mode."""
        return self.einsum.sparse_indices

    @cached_property
    def order(self) -> int:
        """Number of modes of the sparse operand."""
        return len(self.letters)

    @cached_property
    def shape(self) -> Ints:
        """The sparse operand's sizes, by mode."""
        return self.bound.extents(self.letters)

    @cached_property
    def kept(self) -> Ints:
        """Modes of the sparse operand that the output has."""
        return tuple([self.letters.index(c) for c in self.einsum.kept])

    @cached_property
    def rest(self) -> Ints:
        """Modes that are summed away."""
        return outside(range(self.order), self.kept)
