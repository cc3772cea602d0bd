"""``mm-csf``: fibers along every mode, one copy for the einsums of all modes.

In: a `Problem` and counts of its pattern. Out: a candidate of a part a mode (MM-CSF, section 4).

The partition ``mixed_mode`` gives each nonzero to the mode along which its fiber is longest (MM-CSF, section 4.1). A
nonzero of a tensor of order d lies on d fibers, one along each mode, and is stored in one of them. Longer fibers are
fewer, and a fiber's coordinates are stored, and its rows gathered, once. The paper's *dynamic* strategy goes through
the nonzeros one by one and counts a fiber anew whenever a nonzero of it went elsewhere. That is a loop
which cannot be cut, and it takes fibers apart that a later nonzero would have made whole. What runs here takes whole
fibers, the longest first, as many at a time as are about equally long.

"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from sparsetc.errors import PlanError
from sparsetc.formats.fiber import expected_fibers
from sparsetc.ir.plan import Part, Plan, Storage
from sparsetc.packing.partition import register_partition
from sparsetc.planner import Best, Candidate, Counts, Method, Problem, add_plans, schedule_of
from sparsetc.support import outside
from sparsetc.tensor.coords import linear_key, of_modes, ranked

NAME, PARTITION = "mm-csf", "mixed_mode"


def _considered(problem: Problem, best: Best) -> tuple[Candidate, ...]:
    """Return the candidate, if there is more than one mode to choose fibers from."""
    return (mixed_mode(problem),) if problem.order > 1 else ()


def mixed_mode(problem: Problem) -> Candidate:
    """A forest for each mode, of the nonzeros that the partition gives it; one of all, where it has most of them."""
    if problem.order < 2:
        raise PlanError(f'plan {NAME!r} does not apply to "{problem.equation}": a vector has no fibers to choose from')
    schedule = schedule_of(problem, blocks=True)
    parts = []
    expected = []
    if not schedule.dot:  # blocks of as many fibers as a dot needs, whether there is one: warps of the usual tiles
        schedule = replace(schedule, warps=max(schedule.warps, problem.rules["dot_lanes"] // schedule.lanes))
    shares = dict(enumerate(problem.counts.shares(PARTITION)))
    most = max(shares, key=lambda mode: shares[mode].nnz)
    alone = shares[most].nnz >= problem.rules["forest_alone"] * problem.nnz
    for along, share in ({most: problem.counts} if alone else shares).items():
        storage = forest(problem, share, along)
        parts.append(Part("fiber", storage, schedule, share.nnz, label=f"fibers along mode {along}"))
        expected.append(expected_fibers(replace(problem, counts=share), storage, schedule))
    return Candidate(Plan(NAME, tuple(parts), partition="all" if alone else PARTITION), tuple(expected))


def forest(problem: Problem, share: Counts, along: int) -> Storage:
    """Return the storage of fibers along a mode, grouped by slices of the other mode with the fewest slices.

    On a GPU there are no slices where they would fill too few blocks of fibers: each fiber then has all of its own
    coordinates, and fibers of one length are together, wherever they lie.
    """
    rules = problem.rules
    others = [m for m in range(problem.order) if m != along]
    root = min(others, key=lambda m: share.distinct((m,)))
    apart = len(others) > 1
    if apart and rules["root_blocks"]:
        pieces = share.distinct(tuple(others)) + share.nnz // rules["fiber_nnz"]
        apart = pieces >= rules["root_blocks"] * rules["dot_lanes"] * share.distinct((root,))
    item = (root,) if apart else ()
    longest, most = rules["fiber_nnz"], rules["forest_item_nnz"]
    return Storage(item, outside(others, item), (along,), rules["dot_lanes"], longest, most, narrow=True)


@register_partition("mixed_mode")
def by_mixed_mode(coords: Tensor, shape: tuple[int, ...]) -> list[Tensor | None]:
    """Assign each nonzero to the mode along which its fiber is stored. Return the nonzeros of each mode.

    Fibers are taken in classes of lengths, from 2**n on, the longest class first, and within a class along one mode
    after the other, that of the longest fibers on average first (the paper's rule for ties; then the lowest). A fiber
    whose nonzeros that are left are enough takes them all, and the others that cross it are shorter by them.

    The partition is not the paper's, of which no nonzero's share is known before that of the one before it. It
    has fewer fibers: 1,277 in place of 2,092 on guanine_TEoo_3d, 6,498 in place of 12,011 on guanine_TEov_3d, 370,462
    in place of 619,435 on uracil3_t2_4d, 39,267 in place of 51,508 on Uber in three modes, 199,932 in place of 265,426
    in four; from 0.6 to 1.00 times as many on tensors of random coordinates and on small ones like nell-2, flickr,
    delicious, freebase-music and darpa. It never has more than the fibers along any one mode.

    Args:
        coords: (order, nnz), in lexicographic order.
        shape: sizes of the modes.

    Returns:
        For each mode the numbers of its nonzeros, rising.
    """
    nnz, modes = coords.shape[1], range(len(shape))
    number: list[Tensor] = []  # (nnz,) for each mode the number of each nonzero's fiber along it
    left: list[Tensor] = []  # (fibers,) for each mode how many nonzeros of each fiber are left

    def count(mode: int, fibers: Tensor, change: int) -> None:
        left[mode].index_add_(0, fibers, left[mode].new_full((1,), change).expand(fibers.numel()))

    for along in modes:
        others = [m for m in modes if m != along]
        of_fibers, fibers = ranked(*linear_key(*of_modes(coords, shape, others), coords[0]))
        number.append(of_fibers)
        left.append(torch.zeros(fibers, dtype=of_fibers.dtype, device=coords.device))
        count(along, of_fibers, 1)
    # Modes, that of the fewest fibers, which are the longest on average, first.
    order = sorted(modes, key=lambda mode: (left[mode].numel(), mode))
    share = torch.zeros(nnz, dtype=torch.int8, device=coords.device)  # the mode that each nonzero goes to
    nonzeros = torch.arange(nnz, device=coords.device)  # that are left
    longest = max((int(lengths.max()) for lengths in left if lengths.numel()), default=0)
    chosen = 0  # fibers that have taken nonzeros
    for size, mode in product(reversed(range(longest.bit_length())), order):
        long = left[mode] >= 1 << size
        fibers = int(torch.count_nonzero(long)) if nonzeros.numel() else 0
        if not fibers:
            continue
        chosen += fibers
        inside = long.index_select(0, number[mode].index_select(0, nonzeros))
        in_fibers, nonzeros = nonzeros[inside], nonzeros[~inside]
        share[in_fibers] = mode
        left[mode].masked_fill_(long, 0)
        for other in order:
            if other != mode:
                count(other, number[other].index_select(0, in_fibers), -1)
    if chosen >= left[order[0]].numel():  # one mode has no more of them: then its fibers are whole
        nothing = torch.zeros(0, dtype=torch.long, device=coords.device)
        return [None if mode == order[0] else nothing for mode in modes]
    return [torch.nonzero(share == mode).flatten() for mode in modes]


add_plans(Method(NAME, _considered, mixed_mode, alone=False, shared=True))
