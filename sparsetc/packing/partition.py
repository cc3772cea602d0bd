"""Partitions: rules that divide nonzeros among the parts of a plan, their registry, and the packed parts.

In: coordinates, sizes, a rule's name and options, and the modes the output keeps where the rule asks for them. Out: for
each part, which nonzeros it takes (None for all of them). An einsum is a sum over the nonzeros, so one that goes to
two parts, or to none, makes a wrong result: rules are not believed. Of a plan, `Packed` parts: a part is known by its
share of the nonzeros and by its storage, so einsums whose plans store nonzeros alike share the arrays, and the values
packed for them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from sparsetc.errors import PlanError
from sparsetc.ir.plan import Plan
from sparsetc.packing.base import Packed, pack
from sparsetc.support import Cache, Ints, given_to, signature_of
from sparsetc.support.checks import check_free, check_label, is_own
from sparsetc.tensor.coords import linear_key, of_modes, ranked
from sparsetc.tensor.pattern import clear_patterns

PartitionFunction = Callable[..., list[Tensor | None]]


@dataclass(frozen=True)
class Partition:
    """A registered partition rule with its promises.

    Attributes:
        by_rows: where a nonzero goes depends on the modes that the output keeps.
        whole_rows: the nonzeros of one output row all go to one part, so parts never add to each other's rows.
    """

    name: str
    divide: PartitionFunction
    by_rows: bool
    whole_rows: bool


PARTITIONS: dict[str, Partition] = {}
F = TypeVar("F", bound=PartitionFunction)


def register_partition(
    name: str, *, by_rows: bool = False, whole_rows: bool = False, replace: bool = False
) -> Callable[[F], F]:
    """Decorate ``divide(coords, shape, **options) -> [indices or None, …]``: register it as a partition for plans.

    Args:
        name: one line of printable characters, without quotes and backslashes.
        by_rows: the rule divides by the output's rows: it is called as ``divide(coords, shape, kept, **options)``, with
            the modes that the output keeps. Other rules divide once for all outputs, whose plans then share packed
            parts.
        whole_rows: all nonzeros of an output row go to one part, so one work item may store the row. Such a rule
            divides by rows.
        replace: put the rule in the place of one that comes with the package.

    Raises:
        PlanError: a name that cannot be one, or is taken by the package.

    Examples:
        >>> from sparsetc.plans import Part, Plan, Storage, register_partition
        >>> halve = register_partition("halves")(lambda coords, shape: torch.arange(len(coords.T)).tensor_split(2))
        >>> plan = Plan("two", 2 * (Part("coo", Storage(item=(0,), leaf=(1,))),), partition="halves")
        >>> stc.compile("ij,j->i", stc.eye(4), torch.ones(4), plan=plan).plan
        Plan('two', coo of 2 + coo of 2)
    """
    check_label(name, "a partition", PlanError)

    def register(function: F) -> F:
        held = PARTITIONS.get(name)
        check_free(name, "partition", [held and held.divide], replace, PlanError, function)
        PARTITIONS[name] = Partition(name, function, by_rows or whole_rows, whole_rows)
        clear_patterns()
        return function

    return register


def get_partition(name: str) -> Partition:
    """Return the partition of this name. Raise `PlanError`, which lists the known ones, if there is none."""
    try:
        return PARTITIONS[name]
    except KeyError:
        raise PlanError(f"no partition is called {name!r}; known: {', '.join(sorted(PARTITIONS))}") from None


@register_partition("all")
def everything(coords: Tensor, shape: Ints) -> list[Tensor | None]:
    """One part of everything."""
    return [None]


def divide(
    name: str, coords: Tensor, shape: Ints, kept: Ints, options: dict[str, int], cache: Cache | None = None
) -> list[Tensor | None]:
    """Divide the nonzeros by the named rule.

    Args:
        name: of a registered partition.
        coords: (order, nnz).
        shape: sizes of the modes.
        kept: modes that the output keeps.
        options: the rule's own arguments.
        cache: of the pattern's, which a rule that has a parameter of this name is given too.

    Returns:
        For each part the numbers of its nonzeros, rising; None for all of them.

    Raises:
        PlanError: the rule is not known, does not take these options, gives a nonzero to no part or to several, or
            cuts an output row that it promised to leave whole.
    """
    rule = get_partition(name)
    from_outside = not is_own(rule.divide)  # the package's own keep what they promise
    for option, number in options.items():
        if not from_outside and not (isinstance(number, int) and abs(number) < 2**63):
            raise PlanError(f"partition {name!r} takes numbers of 64 bits, found {option}={number!r}")
    arguments = (coords, shape, kept) if rule.by_rows else (coords, shape)
    kept_with = given_to(rule.divide, cache)
    try:
        signature_of(rule.divide).bind(*arguments, **kept_with, **options)
    except TypeError as error:
        raise PlanError(f"partition {name!r} does not take the options {options}: {error}") from None
    shares = list(rule.divide(*arguments, **kept_with, **options))
    if len(shares) == 1 and shares[0] is None:
        return shares
    nnz = coords.shape[1]
    parts = [_numbers(name, part, coords) for part in shares]
    ordered = _check_each_once(name, parts, nnz)
    if not ordered:  # formats rely on lexicographic order
        parts = [part.sort().values for part in parts]
    if rule.whole_rows and from_outside and sum(part.numel() > 0 for part in parts) > 1:
        row, _ = ranked(*linear_key(*of_modes(coords, shape, kept), coords[0]))
        _check_whole_rows(name, parts, row.long())
    return [None if nnz and part.numel() == nnz else part for part in parts]


def shares_of_plan(plan: Plan, shares: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the share of each part of a plan. Raise `PlanError` if a share with nonzeros has no part."""
    numbers = plan.shares or tuple(range(len(shares)))
    if len(numbers) != len(plan.parts) or not set(numbers) <= set(range(len(shares))):
        raise PlanError(f"plan {plan.name!r} has {len(plan.parts)} parts, its partition makes {len(shares)}")
    left = [n for n, share in enumerate(shares) if n not in numbers and (share is None or share.numel())]
    if left:
        raise PlanError(f"plan {plan.name!r} has no part for share {left[0]} of its partition, which has nonzeros here")
    return [shares[n] for n in numbers]


def _numbers(name: str, part: Tensor | None, coords: Tensor) -> Tensor:
    """(n,) int64: the nonzeros of a part."""
    if part is None:
        return torch.arange(coords.shape[1], device=coords.device)
    if not isinstance(part, Tensor) or part.ndim != 1 or part.dtype not in (torch.int64, torch.int32):
        kind = f"{part.dtype}, shape {tuple(part.shape)}" if isinstance(part, Tensor) else type(part).__name__
        raise PlanError(
            f"partition {name!r} must give each part's nonzeros by their numbers, one-dimensional integers, "
            f"or None for all; found {kind}"
        )
    if part.device != coords.device:
        raise PlanError(f"partition {name!r} gave numbers on {part.device}, the nonzeros are on {coords.device}")
    return part.long()


def _check_each_once(name: str, parts: Sequence[Tensor], nnz: int) -> bool:
    """Raise `PlanError`, naming the first nonzero that is lost or doubled; waits for the device once.

    Returns whether each part's numbers rise.
    """
    numbers = torch.cat([*parts]) if parts else torch.zeros(0, dtype=torch.long, device="cpu")
    if numbers.numel() == nnz == 0:
        return True
    seen = torch.zeros(nnz, dtype=torch.bool, device=numbers.device)
    inside = (numbers >= 0) & (numbers < nnz)
    if nnz:
        seen[numbers.clamp(0, nnz - 1)] = True
    # As many numbers as nonzeros, of which none is missing, are each nonzero once.
    rising = [(part[1:] > part[:-1]).all() for part in parts]
    *once, ordered = torch.stack([inside.all(), seen.all(), torch.stack(rising or [inside.all()]).all()]).tolist()
    if numbers.numel() == nnz and all(once):
        return bool(ordered)
    wrong = f"partition {name!r} must give each of the {nnz:,} nonzeros to one part"
    if not bool(inside.all()):
        raise PlanError(f"{wrong}; it gave nonzero {int(numbers[~inside][0])}, which does not exist")
    times = torch.bincount(numbers, minlength=nnz)
    first = int(torch.nonzero(times != 1)[0])
    raise PlanError(f"{wrong}; nonzero {first} is in {int(times[first])} parts")


def _check_whole_rows(name: str, parts: Sequence[Tensor], row: Tensor) -> None:
    """Raise `PlanError` where two nonzeros of a row went to different parts."""
    owner = torch.empty_like(row)
    for n, part in enumerate(parts):
        owner[part] = n
    of_row = torch.zeros_like(row)
    of_row[row] = owner  # of a row that is cut, that of some nonzero
    apart = of_row[row] != owner
    if bool(apart.any()):
        first = int(torch.nonzero(apart)[0])
        raise PlanError(
            f"partition {name!r} was registered with whole_rows=True, and cut an output row, that of nonzero "
            f"{first}; register it without, or leave rows whole"
        )


def row_numbers(coords: Iterable[Tensor], sizes: Sequence[int]) -> Tensor:
    """(nnz,) a number for each nonzero's output row: its linear index, or its rank where that would be too large.

    Args:
        coords: (nnz,) int64 for each of at least one mode.
        sizes: of the modes.
    """
    key, spread = linear_key(coords, sizes)
    return key if spread <= 8 * key.numel() + (1 << 20) else ranked(key, spread)[0]


# -- parts as they are stored -----------------------------------------------------------------------------------------


def shares_key(partition: str, options: Iterable[tuple[str, Any]], kept: Ints) -> Hashable:
    """Return a key of everything that the shares of a named rule depend on, for an output with these modes."""
    return "shares", partition, tuple(sorted(options)), kept if get_partition(partition).by_rows else ()


def shares(
    partition: str, options: Iterable[tuple[str, Any]], kept: Ints, coords: Tensor, shape: Ints, cache: Cache
) -> list[Tensor | None]:
    """Return the nonzeros of each share, as `divide` gives them, from the cache of the pattern if they are there."""
    key = shares_key(partition, options, kept)
    nonzeros: list[Tensor | None] | None = cache.get(key)
    if nonzeros is None:
        nonzeros = divide(partition, coords, shape, kept, dict(options), cache)
        if len(nonzeros) > 1:
            nonzeros = cache.put(key, nonzeros)
    return nonzeros


def storage_keys(plan: Plan, kept: Ints) -> list[Hashable]:
    """Return a key for the arrays of each part: parts with equal keys are packed once, in any plan."""
    key, numbers = shares_key(plan.partition, plan.options, kept), plan.shares or range(len(plan.parts))
    return [("storage", key, n, p.format, p.storage) for n, p in zip(numbers, plan.parts, strict=True)]


def stored_parts(plan: Plan, coords: Tensor, shape: Ints, kept: Ints, cache: Cache) -> list[Packed]:
    """Return each part of a plan, packed now or taken from the cache.

    Args:
        plan: whose parts are wanted.
        coords: (order, nnz) int64, in lexicographic order.
        shape: sizes of the modes.
        kept: modes that the output keeps.
        cache: of packed parts, and of the shares of partitions. A part of nothing takes no place in it.

    Raises:
        PlanError: the partition breaks its promises, or gives nonzeros to a share that the plan has no part for.
        FormatError: a format does not take its part, or packs it wrongly.
    """
    parts: list[Packed] = []
    each = shares_of_plan(plan, shares(plan.partition, plan.options, kept, coords, shape, cache))
    for part, key, numbers in zip(plan.parts, storage_keys(plan, kept), each, strict=True):
        packed = cache.get(key)
        if packed is None:
            numbers = None if numbers is None or numbers.numel() == coords.shape[1] else numbers  # all of none, too
            held = coords if numbers is None else coords[:, numbers]
            packed = pack(held, shape, part.format, part.storage, cache if numbers is None else None).of(numbers)
            if packed.nnz:
                packed = cache.put(key, packed)
        parts.append(packed)
    return parts
