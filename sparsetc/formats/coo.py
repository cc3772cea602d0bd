"""``coo``: linearised nonzeros, one word each (HLS-S; BLCO), sorted so that the nonzeros of an output row are a run.

        item_word  [ i0      | i0      | i1 | …        the row of each work item
        item_ptr   [ 0         256       301 …         its range of nonzeros; a long row is several items
        word       [ jk jk jk … jk jk … jk … ]         the other modes, ceil(log2 dim) bits each or more
        values     [ v  v  v  … v  v  … v  … ]

With no item modes and a `max_item_nnz`, items are equal chunks in the operand's own order, and no pointers are stored.
With a parameter ``panel_m``, nonzeros of the first so many coordinates of mode m come first, then those of the next:
the rows that are gathered for a panel stay in a CPU's cache.

The plan ``coo`` stores all nonzeros so: by output row, or by output row and one mode more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from operator import itemgetter

import torch

from sparsetc.errors import FormatError
from sparsetc.ir.nest import UNLIMITED, Nest, runs
from sparsetc.ir.plan import DOTS, F16X3, Schedule, Storage
from sparsetc.ir.program.resources import Statistics
from sparsetc.packing import words
from sparsetc.packing.base import Packed, cut_runs, pointers
from sparsetc.packing.words import Nonzeros
from sparsetc.planner import (
    Best,
    Candidate,
    Method,
    Problem,
    add_plans,
    cheapest,
    costs,
    deepened,
    items_of,
    max_item_nnz_of,
    natively,
    price,
    programs_of,
    register_format,
    repeats,
    schedule_of,
    single,
)
from sparsetc.support import Ints, Names, among, outside
from sparsetc.tensor.coords import lexsort

PANEL = "panel_"
"""The prefix of parameters: neighbouring coordinates of a mode that are a panel."""


@register_format
class Coo:
    """Runs of linearised nonzeros."""

    name = "coo"

    def parameters(self, order: int) -> Names:
        """Return ``panel_m`` for each mode."""
        return tuple([f"{PANEL}{mode}" for mode in range(order)])

    def view(self, shape: Ints, storage: Storage) -> Nest:
        """Return runs: a work item is a run with equal item modes; without item modes, an equal chunk."""
        if faults := [f"{name} must be 1 or more, found {size}" for name, size in storage.params if size < 1]:
            raise FormatError(f"format 'coo': {faults[0]}")
        if storage.lane:
            raise FormatError(f"format 'coo' has no lanes that share modes {storage.lane}; put them at other levels")
        leaf = words.fields(storage.leaf, shape, "word")
        item = words.fields(storage.item, shape, "item_word")
        chunk = 0 if item else storage.max_item_nnz or UNLIMITED
        return runs(item, leaf, chunk=chunk, narrow=storage.narrow)

    def pack(self, coords: torch.Tensor, shape: Ints, storage: Storage) -> Packed:
        """Sort by (panel, item, leaf) modes, if that is not the order given; cut runs of `max_item_nnz` nonzeros."""
        nnz, view = coords.shape[1], self.view(shape, storage)
        order = (*storage.item, *storage.leaf) if storage.item else tuple(range(len(shape)))
        nonzeros = Nonzeros.sorted(coords, shape, order)
        for name, size in storage.params:
            mode = int(name.removeprefix(PANEL))
            nonzeros = nonzeros.at(lexsort([nonzeros[mode] // size], [-(-shape[mode] // size)]), gaps=False)
        starts, _, split = cut_runs(nonzeros.starts(storage.item), storage.max_item_nnz)
        first = nonzeros.at(starts, gaps=False)
        arrays = {
            **dict.fromkeys(view.items.arrays, pointers(starts, nnz, nnz)),
            **words.encode(first, view.levels[0]),
            **words.encode(nonzeros, view.levels[2], narrow=storage.narrow),
        }
        return Packed(
            self.name,
            storage,
            shape,
            nnz,
            view,
            arrays,
            positions=nonzeros.numbers,
            stored=nnz,
            items=starts.numel(),
            representatives=(first.numbers, None),
            split_rows=split or bool(storage.params),
        )


def by_rows_and_more(problem: Problem, best: Best) -> Iterator[Candidate]:
    """Yield runs of rows; also runs of rows and one more mode if such runs fill work items of their own."""
    yield (whole := coo(problem))
    yield from _in_panels(problem, whole)
    few = problem.native and problem.rest and problem.nnz < SHORT * problem.counts.distinct(problem.kept)
    if few and problem.counts.longest(problem.kept) <= LONGEST:
        yield _runs(problem, (), schedule_of(problem, blocks=False), 0)
    if problem.halves and problem.ones and problem.precision == DOTS["highest"]:
        in_halves = replace(problem, precisions=(F16X3,))
        # Where it is one dot of two tables.
        if len(problem.einsum.dense) == 2 and schedule_of(in_halves, blocks=False).slowest_axes:
            yield coo(in_halves)
    for mode in problem.rest if problem.rules["long_run"] and len(problem.rest) > 1 else ():
        runs = problem.counts.distinct((*problem.kept, mode))
        if problem.nnz >= problem.rules["long_run"] * runs:
            candidate = coo(problem, (mode,))
            schedule = candidate.plan.parts[0].schedule
            if not schedule.dot or problem.nnz >= problem.rules["long_run_steps"] * max(1, schedule.lanes) * runs:
                yield candidate


def _in_panels(problem: Problem, whole: Candidate) -> Iterator[Candidate]:
    """Yield native chunks in panels of the mode with the largest table, each of about as many rows as a cache holds."""
    (part,), (expected,) = whole.plan.parts, whole.expected
    if not problem.native or part.storage.item:
        return
    others, near = {(c,) for c in problem.letters[1:]}, problem.profile.l1_bytes
    tables = [(g.table_rows * g.held_width * problem.itemsize, g) for g in costs(whole, problem)[0].gathers]
    size, table = max([own for own in tables if own[1].letters in others], key=itemgetter(0), default=(0, None))
    if table and (panels := round(size / near)) > 1:
        (letter,), columns = table.letters, -(-table.table_rows // panels)
        storage = replace(part.storage, params=((f"{PANEL}{problem.letters.index(letter)}", columns),))
        again = tuple([(c, min(problem.nnz, panels * changes)) for c, changes in expected.runs])
        inside = single("coo", storage, part.schedule, replace(expected, runs=again, misses=((letter, ()),)))
        before, after = [natively(price(own, problem), problem).total for own in (whole, inside)]
        if problem.profile.constants["least_gain"] * after < before:
            yield inside


def coo(problem: Problem, also: Ints = ()) -> Candidate:
    """Return the candidate of runs of one output row, or of equal chunks if rows are not shared.

    Modes in `also` are shared by a run too: their factor rows are read once a run, which is then one of several of
    its output row. Rows of entries that are taken one by one are few and long: they are cut if that is priced lower.
    """
    shared = (*problem.kept, *also) if problem.rest else ()
    schedule, n = schedule_of(problem, blocks=False, shared=shared), problem.nnz
    longest = problem.counts.longest(shared)  # which counts rows on the way
    rows = problem.counts.distinct(shared) if shared else 1
    if schedule.lanes:
        return _runs(problem, shared, schedule, max_item_nnz_of(problem, schedule))
    candidates = [
        _runs(problem, shared, spread, most)
        for spread, most in _spreads(problem, schedule, n, rows if shared else n, longest)
        if (not most if shared else most) or (most < longest and not problem.ordered)
    ]
    return cheapest(candidates, problem)


def _runs(problem: Problem, shared: Ints, schedule: Schedule, most: int) -> Candidate:
    """Return the candidate of runs of nonzeros that share modes, cut after `most`; 0 never cuts."""
    leaf = outside(range(problem.order), shared)
    # Words of 16 bits are not copied ahead of their use: a loop over entries would wait for each.
    storage = Storage(shared, (), leaf, max_item_nnz=most, narrow=schedule.lanes > 0)
    n, longest = problem.nnz, problem.counts.longest(shared)
    items = items_of(n, problem.counts.distinct(shared) if shared else 1, most)
    at_once = schedule.lanes * schedule.unroll or schedule.stages // 2
    rounds = min(most or longest, longest) // at_once
    runs = repeats(problem, storage)
    expected = Statistics(items, items, n, n, problem.itemsize, runs, rounds, longest > most > 0)
    return single("coo", storage, schedule, expected)


SHORT = 8
"""Nonzeros a row, on average, below which native loops add each to its row: a processor guesses the end of one row in
two wrong, which takes as long as ten additions (TTV, 300 to 400 K nonzeros: 800, 1150, 900 us by rows, 480, 530, 520
so)..."""
LONGEST = 1 << 13
"""...and nonzeros of the longest row up to which sums that are kept in memory are exact enough."""
NARROW, FEWEST = 64, 4
"""Least columns of a dot when blocks are halved, and least entries when rows are cut, to give a GPU enough programs."""
MORE = 4
"""Programs for each warp scheduler of a GPU, so that one runs while others wait."""


def _spreads(
    problem: Problem, schedule: Schedule, entries: int, rows: int, longest: int
) -> Iterator[tuple[Schedule, int]]:
    """Yield schedules of more and more programs, each with 0, and with the entries of an item if rows are cut for more.

    Narrower columns read each entry again; a cut row makes all sums additions, which zeros have to precede.
    """
    warps, issued = problem.profile.warps, problem.rules["issued"]
    while True:
        blocks, programs = dict(schedule.blocks), programs_of(problem, schedule)
        split = max(among(blocks, problem.einsum.output), key=blocks.__getitem__, default="")
        last = not schedule.slowest_axes or blocks[split] <= NARROW or 2 * rows * programs >= warps
        if last or 2 * issued * rows * programs >= warps:  # half of the multiprocessors have one
            yield deepened(problem, schedule, rows * programs, longest), 0
            yield schedule, max(FEWEST, programs * entries // (MORE * warps))
        if last:
            return
        blocks[split] //= 2
        schedule = replace(schedule, blocks=tuple(blocks.items()), warps=min(4, schedule.warps))


add_plans(Method("coo", by_rows_and_more, coo))
