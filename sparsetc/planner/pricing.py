"""Prices of candidates: the seconds that a plan is expected to take, and options of a plan that may lower them.

In: a `Candidate` and its `Problem`. Out: seconds of one call, by part, from the tile programs that its parts would be
lowered to, before anything is packed; and whether a row has one owner, which the kernel asks for here too. A candidate
is priced as the backend and the dtype would run it, then with options that may gain: the order of the grid, copies of
the output, native loops, and dense operands that are rounded to bfloat16 once a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from sparsetc.codegen.numba import copied, unprinted
from sparsetc.device.profile import DeviceProfile, by_precision
from sparsetc.errors import PlanError
from sparsetc.ir.lower import Target, drafted
from sparsetc.ir.nest.axes import ITEM, LANE, LEAF
from sparsetc.ir.nest.nest import Nest
from sparsetc.ir.plan import F16, ROUNDED, Plan, Schedule, Storage, in_bf16
from sparsetc.ir.program.cost import Cost, cost_of
from sparsetc.ir.program.operands import named_operands
from sparsetc.ir.program.resources import Statistics
from sparsetc.packing.base import FORMATS, Packed, get_format
from sparsetc.packing.partition import PARTITIONS
from sparsetc.planner.candidate import Candidate
from sparsetc.planner.problem import Problem
from sparsetc.support import Names
from sparsetc.tensor.dtypes import dtype_name


# -- what a candidate costs --------------------------------------------------------------------------------------------
def owns(view: Nest, problem: Problem, how: Packed | Statistics, alone: bool) -> bool:
    """Return True if no two work items of any part add to the same output row.

    Args:
        view: of the part.
        problem: whose output has the rows.
        how: the part as it was packed, or is expected to be.
        alone: whether no other part adds to the same rows.
    """
    kept = set(problem.kept)
    if not alone:
        return False
    padded = how.stored > how.nnz  # by zeros beside the nonzeros
    if padded and view.innermost.strays and (problem.sparse_output or LEAF in map(view.level_of, kept)):
        return False
    shared: set[int] = set()
    for level, coordinates in enumerate(view.levels):
        shared |= {c.mode for c in coordinates}
        if not kept <= shared:
            continue
        if level == ITEM:
            # torch programs cut even one item of all nonzeros into chunks
            several = how.items > 1 or problem.backend.at_once
            chunks = view.items.counts and not view.levels[0] and several
            return shared == kept and not how.split_rows and not chunks
        return shared == kept and (not how.split_fibers if level == LANE else problem.distinct)
    return False


ROUNDING = 4 + 2
"""Bytes read and written to round one element of an operand."""
LARGEST = 4
"""Bytes read of each element to find an operand's largest magnitude."""
CONVERTED = 3
"""Bytes read and written, beside the rest, for each byte of a 16-bit result that is summed in 32 bits."""
HALVING = 4 + 4
"""Bytes read and written to split one element of an operand into two halves."""


def price(candidate: Candidate, problem: Problem) -> Candidate:
    """Return the candidate with the costs of its parts, and the seconds that they are expected to take."""
    of_parts, profile = tuple(costs(candidate, problem)), problem.profile
    seconds = seconds_of(candidate.plan, of_parts, candidate.expected, profile)
    return replace(candidate, costs=of_parts, seconds=seconds)


def seconds_of(
    plan: Plan, parts: Sequence[Cost], statistics: Sequence[Statistics], profile: DeviceProfile
) -> tuple[float, ...]:
    """Return the expected seconds of one call, by part; a part without nonzeros takes 0.

    What a launch takes is its first part's.

    Parts run one after another; a fused launch overlaps only their ends. Torch programs have a launch each.
    Operands that kernels read in another order than the einsum's are copied first, those that parts read rounded are
    rounded, by a call of torch each, and of those that dots split the largest magnitude is found. Rows that no part
    stores are zeros first.
    """
    run = [n for n, s in enumerate(statistics) if s.nnz] or [len(parts) - 1]
    both = [(parts[n], statistics[n]) for n in run]
    kernels = not both[0][0].p.at_once
    scalar = [part.turn is None for part, _ in both]
    beside_tiles = plan.fused and not all(scalar)
    seconds, first = [0.0] * len(parts), run[0]
    starting = profile.constants["starting_waits"] * profile.wait
    launches = [(first, all(scalar))] if plan.fused and kernels else zip(run, scalar, strict=True)
    for n, waits in launches:
        seconds[n] += profile.launch
        if waits:
            seconds[n] += starting
    made = {"rounded": ROUNDING, "split": LARGEST, "halves": HALVING}
    if kernels:
        made["arranged"] = 2 * both[0][1].itemsize
    for how, _, elements in dict.fromkeys([table for part, _ in both for table in part.made]):  # whatever parts read it
        if how in made:
            seconds[first] += profile.launch + made[how] * elements / profile.memory
    output, copies = both[0][0].output @ both[0][1].symbols, max([part.copies for part, _ in both])
    if copies > 1:  # summed once, whatever parts add to them
        seconds[first] += profile.launch + copies * output / profile.l2
    seconds[first] += _zeroed(both, copies * output, output, profile.constants["listed_byte"]) / profile.memory
    if kernels and both[0][1].itemsize == 2 and not all(part.owned for part, _ in both):
        # Sums that are added to are zeros of float32 first, and converted after.
        seconds[first] += 2 * profile.constants["launch_after"] * profile.launch + CONVERTED * output / profile.memory
    for n, (part, sizes), alone in zip(run, both, scalar, strict=True):
        slowed = by_precision(profile.fused_slowdown, part.precision) if alone and beside_tiles else 1.0
        seconds[n] += slowed * part.predicted(sizes, profile)
    return tuple(seconds)


def _zeroed(both: Sequence[tuple[Cost, Statistics]], every: int, output: int, listed_byte: float) -> float:
    """Return the bytes of the result to zero first: all copies, or the rows that no part stores."""
    if not (stored := sum([part.stored(sizes) for part, sizes in both])):
        return every
    if both[0][0].sparse:  # rows that are added to alone are zeroed
        return sum([min(output, part.added_bytes @ sizes.symbols) for part, sizes in both if not part.owned])
    return max(0, min(output, listed_byte * (output - stored) // 1))


def views(candidate: Candidate, problem: Problem) -> list[tuple[Nest, bool]]:
    """Return each part's view, and True if the part is expected to own the rows that it writes."""
    plan, expected = candidate.plan, candidate.expected
    alone = sum([s.nnz > 0 for s in expected]) <= 1 or PARTITIONS[plan.partition].whole_rows
    each = []
    for part, sizes in zip(plan.parts, expected, strict=True):
        view = get_format(part.format).view(problem.shape, part.storage)
        each.append((view, owns(view, problem, sizes, alone)))
    return each


def orderly(candidate: Candidate, problem: Problem) -> bool:
    """Return True if each row has one owner, or a second pass can add the sums of all parts in a fixed order."""
    nests = views(candidate, problem)
    return all(owned for _, owned in nests) or all(view.innermost.ordered for view, _ in nests)


def costs(candidate: Candidate, problem: Problem) -> list[Cost]:
    """Costs of the parts' tile programs, lowered from the views their formats promise."""
    each = []
    for p, (view, owned) in zip(candidate.plan.parts, views(candidate, problem), strict=True):
        # Programs with tiles are priced as a GPU runs them.
        at_once = problem.backend.at_once and not view.values.sides
        given = not (p.storage.lane or p.storage.params or view.values.sides)
        target = Target(problem.sparse_output, given, owned, problem.rows, at_once=at_once, ones=problem.ones)
        lower = getattr(FORMATS[p.format], "lower", None)
        bound = problem.bound
        each.append(
            cost_of(lower(bound, p, target, 0) if lower else drafted(bound, view, p.schedule.by_rule(), target))
        )
    return each


# -- options that may gain --------------------------------------------------------------------------------------------


def priced(candidate: Candidate, problem: Problem) -> Candidate:
    """Return a candidate with its price, the grid's order and copies of the output decided."""
    plan = suited(candidate.plan, problem)
    best = in_order(candidate if plan is candidate.plan else replace(candidate, plan=plan), problem)
    adds = problem.backend.atomics and not problem.deterministic
    if adds and any(cost.met for cost in best.costs):  # elsewhere no addition waits for another
        best = tried(_in_copies, best, problem)
    if problem.native:
        best = (in_panels if problem.only_native else natively)(best, problem)
    # With the trees that were lowered.
    plan = best.plan.with_schedules([replace(cost.p.schedule, native=cost.native) for cost in best.costs])
    if plan.parts[0].schedule.native and all(own.stored >= LONG * own.fibers for own in best.expected):
        plan = plan.scheduled(lambda s: replace(s, unroll=SUMS))
    tiled = any(cost.p.view.values.sides for cost in best.costs)
    cut = any(sizes.split_fibers for sizes in best.expected)  # long rows among short ones, of which lanes wait
    apart = 0.0 if tiled or cut else problem.rules["apart"]
    return replace(best, plan=plan, name=describe(plan, problem), apart=apart)


SUMS, LONG = 4, 32
"""Sums that native loops make side by side of a run of nonzeros, and how long runs are on average then: products of 50
and more nonzeros a row with 4 to 16 columns, and MTTKRP, were 1.1 to 1.8 times as fast, of 3 and 8 a row .8 (one thread
of a Xeon, `benchmarks/results/xeon/native_sums.json`)."""
COMPILED, CALLS = 0.3, 10_000
"""Seconds that numba takes to compile a part, and the number of calls that should make up for them."""


def natively(candidate: Candidate, problem: Problem) -> Candidate:
    """Return the candidate as native loops, where all parts have them and they save more than compiling them costs."""
    total, least = sum(candidate.seconds), COMPILED * len(candidate.costs)
    if total * CALLS <= least or any(unprinted(cost.p) for cost in candidate.costs):
        return candidate
    loops = tuple([cost.natively for cost in candidate.costs])
    seconds = seconds_of(candidate.plan, loops, candidate.expected, problem.profile)
    native = in_panels(replace(candidate, costs=loops, seconds=seconds), problem)
    return native if (total - sum(native.seconds)) * CALLS > least else candidate


PANELS, GAIN = (128, 256, 512), 1.4
"""Bytes of a row in a panel of the result, and the gain that has to be expected of panels: where it was less, R-MAT
graphs of 200 K edges times 256 columns, and MTTKRP of rank 128, were slower so."""


def in_panels(candidate: Candidate, problem: Problem) -> Candidate:
    """Return native loops in panels of the result's longest axis, where rows are expected to stay in a cache so."""
    sizes, e, counts = problem.bound.by_index, problem.bound.einsum, problem.counts
    letter = max(e.free, key=sizes.__getitem__, default="")
    cuts = [n // problem.itemsize for n in PANELS if letter and 2 * n <= sizes[letter] * problem.itemsize]
    if not cuts or not all(cost.native and cost.turn is None for cost in candidate.costs):
        return candidate
    expected = []
    for cost, part, own in zip(candidate.costs, candidate.plan.parts, candidate.expected, strict=True):
        first, gathered = next(iter(part.storage.item), 0), [g.letters[0] for g in cost.gathers if len(g.letters) == 1]
        misses = [(c, counts.misses(first, problem.letters.index(c))) for c in gathered]
        expected.append(replace(own, misses=tuple(misses)))

    def seconds(costs: Sequence[Cost]) -> float:
        return sum([cost.in_panels(own, problem.profile) for cost, own in zip(costs, expected, strict=True)])

    def cut(columns: int, own: Schedule) -> Schedule:
        blocks = tuple((dict(own.blocks) | {letter: columns}).items())
        return replace(own, blocks=blocks, slowest_axes=(letter,), native=True)

    plans = [candidate.plan.scheduled(partial(cut, columns)) for columns in cuts]
    each = [(plan, tuple(costs(replace(candidate, plan=plan), problem))) for plan in plans]
    plan, best = min(each, key=lambda own: seconds(own[1]))
    share = seconds(best) / seconds(candidate.costs)
    nbytes = torch.get_num_threads() * problem.itemsize * max([copied(cost.p) for cost in best])
    if GAIN * share > 1 or nbytes > problem.memory:
        return candidate
    return replace(candidate, plan=plan, costs=best, seconds=tuple([share * own for own in candidate.seconds]))


def in_order(candidate: Candidate, problem: Problem) -> Candidate:
    """Return the candidate priced, with `Schedule.slowest_axes` of each part where a grid is expected to gain."""
    return tried(_by_passes, price(candidate, problem), problem, by_part=True)


def tried(option: Callable[..., Schedule], without: Candidate, problem: Problem, by_part: bool = False) -> Candidate:
    """Return the candidate with an option if its price says that it gains: for each part alone, or for all together."""
    plan = without.plan.with_schedules([option(part.schedule, problem) for part in without.plan.parts])
    if plan is without.plan:
        return without
    other = price(replace(without, plan=plan), problem)
    least_gain, seconds = problem.profile.constants["least_gain"], (without.seconds, other.seconds)
    if not by_part:
        return other if least_gain * sum(seconds[1]) < sum(seconds[0]) else without
    gains = [least_gain * after < before for before, after in zip(*seconds, strict=True)]

    def better(old: Sequence[Any], new: Sequence[Any]) -> tuple[Any, ...]:
        return tuple([after if gain else before for before, after, gain in zip(old, new, gains, strict=True)])

    plan = replace(without.plan, parts=better(without.plan.parts, plan.parts))
    return replace(without, plan=plan, costs=better(without.costs, other.costs), seconds=better(*seconds))


def _by_passes(own: Schedule, problem: Problem) -> Schedule:
    """Make every axis that is split over the grid slowest there, unless the schedule names some."""
    sizes = problem.bound.by_index
    slowest_axes = own.slowest_axes or tuple([c for c in problem.einsum.axes if sizes[c] > own.block(c)])
    return own if slowest_axes == own.slowest_axes else replace(own, slowest_axes=slowest_axes)


def _in_copies(own: Schedule, problem: Problem) -> Schedule:
    """Add to copies of the output, to more where it has fewer rows, so that additions wait less for one another."""
    crowd = max(1, int(problem.profile.constants["uncrowded"]) // problem.rows)
    return replace(own, copies=max(own.copies, min(problem.rules["most_copies"], 1 << crowd.bit_length() - 1)))


def suited(plan: Plan, problem: Problem) -> Plan:
    """Return the plan without options that the backend or the type lacks; with one lane nothing is padded.

    Raises:
        PlanError: a tree has dots, and the type has none.
    """
    backend = problem.backend
    schedules = [p.schedule for p in plan.parts]
    if problem.itemsize != 2 and F16 in [schedule.precision for schedule in schedules]:
        raise PlanError(f"precision {F16} is of operands of 16 bits, found {dtype_name(problem.dtype)}")
    options: dict[str, Any] = {}
    stored: dict[str, Any] = {}
    if backend.at_once:
        options["lanes"] = stored["lanes"] = 1
    if not backend.narrow:
        stored["narrow"] = False
    if not backend.tensor_cores or problem.dtype != torch.float32:  # which alone is rounded
        options["rounded"] = ()
    if not backend.atomics or problem.deterministic:
        options["copies"] = 1
    if not problem.products:
        options["dot"] = False
    if problem.only_native or True in [schedule.native for schedule in schedules]:
        options["native"] = problem.native
    if not options and not stored:
        return plan
    parts = []
    for part in plan.parts:
        tree = part.schedule.tree
        if tree is not None and tree.dots and not problem.products:
            raise PlanError(f"tree {tree}: integers have no matrix product")
        own = {**options, "unroll": 1} if backend.at_once and not part.schedule.native else options
        storage = replace(part.storage, **stored)
        parts.append(replace(part, storage=storage, schedule=replace(part.schedule, **own)))
    return replace(plan, parts=tuple(parts))


def named_levels(storage: Storage, letters: Names) -> str:
    """The modes of each level of a storage, by the letters of all modes."""
    return " | ".join(["".join([letters[mode] for mode in modes]) or "-" for modes in storage.levels])


def describe(plan: Plan, problem: Problem) -> str:
    """A plan's name, and its parts' levels by letters and precisions of dots, on one line."""
    parts = []
    for p in plan.parts:
        how = " native" if p.schedule.native else ""
        for axis in p.schedule.slowest_axes if how else ():
            how += f", {p.schedule.block(axis)} {axis} at a time"
        if p.schedule.dot and problem.backend.tensor_cores:
            how = f" {p.schedule.precision}"
        sizes = ", ".join(f"{name}={size}" for name, size in p.storage.params)
        parts.append(f"{p.format}{f'({sizes})' if sizes else ''}[{named_levels(p.storage, problem.letters)}]{how}")
    rounded = dict.fromkeys(name for p in plan.parts for name in p.schedule.rounded)
    return f"{plan.name}: {' + '.join(parts)}{f', {in_bf16(rounded)}' if rounded else ''}"


def with_rounded(candidate: Candidate, problem: Problem) -> list[Candidate]:
    """Return the candidate priced, and behind it one with rounded operands if that is faster.

    A candidate that has a price is returned alone, as it is.
    """
    if candidate.seconds:
        return [candidate]
    return [priced(own, problem) for own in dict.fromkeys((candidate, rounded(candidate, problem)))]


def rounded(candidate: Candidate, problem: Problem) -> Candidate:
    """Round operands of a candidate one by one, the one that saves most first, while the saving is certain."""
    if not problem.backend.tensor_cores or ROUNDED not in [p.schedule.precision for p in candidate.plan.parts]:
        return candidate
    left = [o.name for o in named_operands(problem.bound)[1] if o.rows]
    best, least = candidate, in_order(candidate, problem).total
    while left:
        others = {name: replace(best, plan=best.plan.scheduled(partial(_cast, name))) for name in left}
        times = {name: in_order(other, problem).total for name, other in others.items()}
        name = min(left, key=times.__getitem__)
        if problem.rules["apart"] * times[name] > least:
            break
        best, least = others[name], times[name]
        left.remove(name)
    return best


def cheapest(candidates: Sequence[Candidate], problem: Problem) -> Candidate:
    """Return the candidate that would be fastest once its operands are rounded; it is returned as it was given."""
    if len(candidates) == 1:
        return candidates[0]
    return min(candidates, key=lambda own: in_order(rounded(own, problem), problem).total)


def _cast(name: str, own: Schedule) -> Schedule:
    """Round one more operand, if the precision allows it."""
    allowed = own.precision == ROUNDED and name not in own.rounded
    return replace(own, rounded=(*own.rounded, name)) if allowed else own
