"""Level 2, HOW STORED AND RUN: a plan is the parts of a sparse operand X, each with its storage and its schedule.

In: choices made by `planner`. Out: `Plan`, packed by `formats` and lowered by `ir.lower`. The grammar::

    plan      := name  part+                    # X is the sum of its parts; all add into one output
               | name  part+                    # for two sparse operands: one part each, in each branch of a hybrid
               | name  part+  plan+             # for several contractions: all parts, and one plan per contraction
               | name  options                  # a request: what is not said is chosen
    part      := format(storage)  nonzeros  schedule
    storage   := item modes | lane modes | leaf modes, and the sizes the format cuts by    # what arrays depend on
    schedule  := lanes, unroll, warps, dense blocks, grid order, dot or multiply, precision, tree    # what they do not
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from math import inf
from typing import Any

from sparsetc.errors import PlanError
from sparsetc.ir.contraction_tree import Tree
from sparsetc.support import outside
from sparsetc.support.checks import misfit, state_of

PREFERRED = "preferred"
"""The option of an ``"auto"`` request that names the plan to take if it applies."""
SIDE = "side_"
"""The prefix of parameters that name a block's side along a letter."""

DOTS = {"highest": "tf32x3", "high": "tf32", "medium": "bf16"}
"""The kind of float32 dot, by ``precision=``, the most exact first."""
PRECISIONS = ("ieee", *DOTS.values())
ROUNDED = "bf16"
"""The precision at which dense operands may be rounded before they are read."""
MOST_REGISTERS = 255
MOST_WARPS = 32
MOST_THREADS = 1024
MOST_STEPS = 64
"""Steps of a loop that are taken together, or loaded ahead, at most: generated source has a copy of each."""
F16 = "f16"
"""Precision of dots of 16-bit operands, float16 or bfloat16, that are loaded as they are: sums are of float32. A side
that is computed is of float32, and multiplied in tf32."""
F16X3 = "f16x3"
"""Precision of dots of float32 in halves of 16 bits: three dots, of high and high, high and low, low and high halves.
Stored sides are in halves (`ir.nest.values.Halves`); what is gathered is split in registers."""


def bounded(default: int, called: str, least: int = 1, most: float = inf, power: bool = False) -> Any:
    """Declare a number of a part: its name in errors, its bounds, and whether it is a power of two."""
    return field(default=default, metadata={"allowed": (called, least, most, power)})


@dataclass(frozen=True)
class Storage:
    """The parameters of a format's storage: its arrays depend on them, on coordinates and on the shape alone.

    Parts of one storage are packed once, whatever einsums they serve.

    Attributes:
        item: modes whose coordinates all nonzeros of a work item share.
        lane: modes whose coordinates a fiber or a tile shares.
        leaf: modes that each nonzero has a coordinate of.
        lanes: fibers stored side by side in a block; 1 stores them one after another.
        max_fiber_len: longest fiber of a block; a longer one is cut. 0: never cut.
        max_item_nnz: most nonzeros of one work item (whole blocks where there are blocks). 0: an item is a whole row,
            never cut.
        narrow: words of leaf modes take 16 bits where they fit: for Triton alone, as torch computes with no such words.
        sequence: modes in the order in which a tile's positions are stored, the last running fastest; empty: the
            format's own.
        contracted: how many modes at the end of `sequence` a column of a dot contracts; 0 where the order serves no
            dot.
        params: numbers only the format itself knows: the offsets of a band, the side of a tile.

    Examples:
        >>> stc.plans.Storage(item=(0,), leaf=(1, 2)).levels
        ((0,), (), (1, 2))
    """

    item: tuple[int, ...] = ()
    lane: tuple[int, ...] = ()
    leaf: tuple[int, ...] = ()
    lanes: int = bounded(1, "the number of lanes", power=True)
    max_fiber_len: int = bounded(0, "max_fiber_len", 0)
    max_item_nnz: int = bounded(0, "max_item_nnz", 0)
    narrow: bool = False
    sequence: tuple[int, ...] = ()
    contracted: int = 0
    params: tuple[tuple[str, int], ...] = ()

    def param(self, name: str) -> int:
        """Return a parameter of the format by name."""
        try:
            return dict(self.params)[name]
        except KeyError:
            raise PlanError(f"the storage has no parameter {name!r}; it has {dict(self.params)}") from None

    @property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """The modes by level: item, lane, leaf."""
        return (self.item, self.lane, self.leaf)

    @property
    def order(self) -> int:
        """The number of modes of all levels."""
        return sum(map(len, self.levels))

    @property
    def modes(self) -> list[int]:
        """The modes of all levels, ascending."""
        return sorted(mode for level in self.levels for mode in level)

    def level_fault(self, order: int, letters: Sequence[str] = ()) -> str:
        """Return an error text, empty if every mode stands in exactly one level, and once in `sequence`."""
        if self.order == order:
            fits = not self.sequence or sorted(self.sequence) == self.modes
            return "" if fits else f"the storage's sequence names each of {order} modes once, found {self.sequence}"
        lacking = outside(range(order), self.modes)
        beyond = outside(self.modes, range(order))
        fault = f"the storage has {self.order} modes, the tensor {order}"
        if lacking:
            named = f" ({letters[lacking[0]]!r})" if letters else ""
            return f"{fault}: mode {lacking[0]}{named} is at no level"
        return f"{fault}: there is no mode {beyond[0]}" if beyond else fault


@dataclass(frozen=True)
class Schedule:
    """The parameters by which one tile program runs: every number open to a tuner, and nothing else.

    Attributes:
        warps: warps of a program, a power of two.
        blocks: block size of each dense axis, a power of two; an axis longer than its block is split over the grid.
        dot: contract by `tl.dot` where an axis pair makes a matrix product.
        precision: precision of dots: ieee, tf32x3, tf32 or bf16; f16 for operands of 16 bits; dots of whole tiles may
            also have f16x3.
        stages: depth of software pipelining in loops with dots (H200, gathered TTMc: tf32 ran 1.4 times as fast with 1
            as with 3; `benchmarks/results/ttmc_stages.json`. H100, a side of three tables' rows, rank 8: 39 us with 1,
            145 with 3; `ttmc_runs.json`). Addresses that are loaded themselves take two stages: 3, 5 and 7 hold 1, 2
            and 3 buffers of a step's operands in shared memory.
        registers: most registers of a thread on an NVIDIA GPU; 0 leaves that to the compiler.
        columns: most columns of a dot over tiles by the default rule: of output modes, then of modes that no dot
            contracts.
        lanes: nonzeros of a run that one step takes side by side, or 0: one, whose rows have no axis of lanes, so that
            a dot takes them as they are loaded. Steps over blocks of fibers take `Storage.lanes`.
        unroll: unroll factor of the main loop, in which every lane has a nonzero and nothing is masked.
        masked_unroll: unroll factor of the masked loop that follows: 1 for long fibers, more for short rows.
        vectors: for one dense axis of the output at most: powers of two whose sum is its block, to pad less: 16 + 8 for
            24.
        slowest_axes: dense axes whose block number is the slowest dimension of the grid: all items run for one block
            before the next, so that the rows they gather stay in the L2 cache. For other axes, the blocks of one item
            follow one another. Native loops take one such axis, of the result.
        rounded: dense operands, by their names in trees, that are rounded to bfloat16 once a call: a gathered row is
            half the bytes. Only float32 at precision bf16 is, for Triton; products outside of dots, and all sums, are
            of float32.
        copies: copies of a dense output among which work items spread their atomic additions, and which are summed
            afterwards: with few rows, additions to one copy wait for one another. Only for Triton, and only for results
            that are added.
        threads: of the CPU, by which a torch program runs, no more than torch has; 0 for one where there is little to
            do, else all.
        native: whether a torch program is run as native loops, where all parts of the plan can be and numba is there.
        tree: what is multiplied, contracted by dots and summed, in which order; None is what `default_tree` says.
        tile_sizes: positions that a program holds in registers at once, by letter of a tile: powers of two, 1 for other
            letters.
        tile_loops: letters of a tile that a program loops over, `tile_sizes` positions at a time, outermost first; what
            is in neither is split over the grid.
        ruled: `tree`, `tile_sizes` and `tile_loops` where the default rule gave them: no other einsum reuses them.

    Examples:
        >>> stc.plans.Schedule(warps=4, blocks=(("r", 32),)).block("r")
        32
    """

    warps: int = bounded(1, "the number of warps", most=MOST_WARPS, power=True)
    blocks: tuple[tuple[str, int], ...] = ()
    dot: bool = True
    precision: str = "ieee"
    stages: int = bounded(3, "the number of stages", 0, MOST_STEPS)
    registers: int = bounded(0, "the number of registers", 0, MOST_REGISTERS)
    columns: int = bounded(128, "columns", power=True)
    lanes: int = bounded(1, "the number of lanes", 0, power=True)
    unroll: int = bounded(1, "unroll", 1, MOST_STEPS)
    masked_unroll: int = bounded(1, "masked_unroll", 1, MOST_STEPS)
    vectors: tuple[tuple[str, tuple[int, ...]], ...] = ()
    slowest_axes: tuple[str, ...] = ()
    rounded: tuple[str, ...] = ()
    copies: int = bounded(1, "the number of copies", power=True)
    threads: int = bounded(0, "the number of threads", 0, MOST_THREADS)
    native: bool = False
    tree: Tree | None = None
    tile_sizes: tuple[tuple[str, int], ...] = ()
    tile_loops: tuple[str, ...] = ()
    ruled: tuple[Any, ...] = field(default=(), compare=False, repr=False)

    @property
    def is_ruled(self) -> bool:
        """True if `tree`, `tile_sizes` and `tile_loops` are as the default rule gave them."""
        return bool(self.ruled) and self.ruled == (self.tree, self.tile_sizes, self.tile_loops)

    def by_rule(self) -> Schedule:
        """Return the schedule without a tree, `tile_sizes` and `tile_loops` of the default rule; others stay."""
        return replace(self, tree=None, tile_sizes=(), tile_loops=(), ruled=()) if self.is_ruled else self

    def block(self, axis: str) -> int:
        """Return the number of elements of a dense axis in a program: its block, or the sum of its vectors."""
        try:
            return (dict(self.blocks) | {c: sum(own) for c, own in self.vectors})[axis]
        except KeyError:
            raise PlanError(f"the schedule has no block for axis {axis!r}; it has {dict(self.blocks)}") from None


def in_bf16(rounded: Iterable[str]) -> str:
    """Return the text about operands that are cast to bfloat16."""
    return f"{' and '.join(rounded)} in {ROUNDED}"


@dataclass(frozen=True)
class Part:
    """A disjoint piece of a sparse operand, with its storage and its schedule.

    Attributes:
        format: name of the format.
        storage: modes and sizes that the format stores by.
        schedule: how the part's kernel runs.
        nnz: its nonzeros, once they were counted.
        nbytes: bytes of its index arrays, once they were packed.
        label: what the part holds, e.g. ``rows of 32 nonzeros or more``; of one of two sparse operands, its letters.
        operand: number of the operand that the part stores if there are two sparse ones; None if there is one.

    Examples:
        >>> print(stc.plans.Part("coo", stc.plans.Storage(item=(0,), leaf=(1, 2)), nnz=100))
        coo[0 | - | 1,2]: 100 nonzeros, 1 lanes, 1 warps
    """

    format: str
    storage: Storage = Storage()
    schedule: Schedule = Schedule()
    nnz: int = 0
    nbytes: int = 0
    label: str = ""
    operand: int | None = None

    @property
    def sides(self) -> dict[str, int]:
        """The positions of a block along each letter; empty if one of two sparse operands is not in blocks."""
        return {name[-1]: size for name, size in self.storage.params if name.startswith(SIDE)}

    @property
    def bitmap(self) -> bool:
        """True if blocks of one of two sparse operands are read as bitmaps with packed values, and not whole."""
        return bool(dict(self.storage.params).get("bitmap"))

    def __str__(self) -> str:
        if self.operand is not None:
            sides = "x".join(map(str, self.sides.values()))
            stored = "bitmap" if self.bitmap else "whole"
            blocks = f" in {stored} blocks of {sides}" if sides else ""
            return f"{self.format}[{self.label}]{blocks}: {self.nnz:,} nonzeros"
        modes = " | ".join(",".join(map(str, m)) or "-" for m in self.storage.levels)
        where = f" ({self.label})" if self.label else ""
        lanes = max(self.storage.lanes, self.schedule.lanes)
        size = f"{self.nnz:,} nonzeros, {lanes} lanes, {self.schedule.warps} warps"
        rounded = f", {in_bf16(self.schedule.rounded)}" if self.schedule.rounded else ""
        tree = f", {self.schedule.tree}" if self.schedule.tree else ""
        native = ", native loops" if self.schedule.native else ""
        return f"{self.format}[{modes}]{where}: {size}{native}{rounded}{tree}"


@dataclass(frozen=True)
class Plan:
    """A list of parts whose results add up to the einsum, and why they were chosen; without parts, a request by name.

    A kernel's own plan, given as ``plan=``, makes the same kernel of the same operands.

    Attributes:
        name: name of the plan; of a request, the plan that is asked for.
        parts: the parts, each with its storage and schedule; empty for a request.
        fused: run all parts in one launch, so that a small part cannot leave the GPU idle (HLSTO, section VI-C).
        partition: name of the rule that divides the nonzeros among the parts.
        options: arguments of that rule; in a request, the choices that are already made.
        shares: numbers of the rule's shares that have a part, if others are empty; empty if all have one.
        steps: in a path of several contractions, the plan of each; None for one of dense operands.
        path: in a path of several contractions, the operands of each, as opt_einsum numbers them.
        reason: why the plan was chosen, as `explain` prints it.

    Examples:
        >>> plan = stc.plans.Plan("mine", (stc.plans.Part("coo", stc.plans.Storage(item=(0,), leaf=(1,))),))
        >>> stc.einsum("ij,j->i", stc.eye(2), torch.ones(2), plan=plan)
        tensor([1., 1.])
    """

    name: str
    parts: tuple[Part, ...] = ()
    fused: bool = True
    partition: str = "all"
    options: tuple[tuple[str, Any], ...] = ()
    shares: tuple[int, ...] = ()
    steps: tuple[Plan | None, ...] = ()
    path: tuple[tuple[int, ...], ...] = ()
    reason: str = field(default="", compare=False)

    @property
    def is_request(self) -> bool:
        """True if the plan is a name with options, and its parts are not chosen yet."""
        return not self.parts and not self.steps

    @property
    def pairs(self) -> bool:
        """True if the plan is for two or more sparse operands."""
        return bool(self.steps) or any(p.operand is not None for p in self.parts)

    @property
    def preferred(self) -> str:
        """Return the name of the plan that a request prefers if it applies; empty if there is none."""
        return str(self.option(PREFERRED, "")) if self.name == "auto" else ""

    def option(self, name: str, default: Any) -> Any:
        """Return an option by name, or `default`."""
        return dict(self.options).get(name, default)

    def scheduled(self, change: Callable[[Schedule], Schedule]) -> Plan:
        """Return the plan with the schedule of each part changed; the plan itself if nothing changes."""
        return self.with_schedules([change(part.schedule) for part in self.parts])

    def with_schedules(self, schedules: Sequence[Schedule]) -> Plan:
        """Return the plan with these schedules, one a part; the plan itself if it has them."""
        if [part.schedule for part in self.parts] == [*schedules]:
            return self
        pairs = zip(self.parts, schedules, strict=True)
        return replace(self, parts=tuple([replace(part, schedule=schedule) for part, schedule in pairs]))

    def of_step(self, number: int, steps: int) -> Plan:
        """Return the plan of one contraction of a path. Raise `PlanError` if the plan has another number of steps."""
        plans = (self,) * steps if self.is_request else self.steps or (self,)
        if steps != len(plans):
            raise PlanError(f"the plan is of {len(plans)} contractions, the equation takes {steps}; compile anew")
        return plans[number] or AUTO

    def __repr__(self) -> str:
        if self.is_request:
            return f"Plan({', '.join([repr(self.name), *[f'{name}={value}' for name, value in self.options]])})"
        letters = [f"[{p.label}]" if p.operand is not None else "" for p in self.parts]
        parts = " + ".join(
            f"{p.format}{label}{f' of {p.nnz:,}' if p.nnz else ''}"
            for p, label in zip(self.parts, letters, strict=True)
        )
        path = f"path {list(self.path)}" if self.path else "no parts"
        return f"Plan({self.name!r}, {parts or path})"

    def __str__(self) -> str:
        if self.is_request:
            return repr(self)
        path = [f"  path {list(self.path)}"] if self.path else []
        return "\n".join([f"plan {self.name}", *path, *[f"  part {n}: {p}" for n, p in enumerate(self.parts)]])


RECORDS: dict[str, Any] = {kind.__name__: kind for kind in (Plan, Part, Schedule, Storage)}
"""A plan and its parts, which files hold as their fields, by name."""


AUTO = Plan("auto")
"""The request for the plan that is expected to be fastest."""
ONE_PASS = Plan("one-pass")
"""The request for the fastest plan that passes over the nonzeros once, of one sparse operand."""
STEPS = Plan("steps")
"""The request for the fastest path of several contractions, of one sparse operand."""
JOINS = "scalar", "dense", "bcb", "bcb+scalar"
"""The plans of two sparse operands."""
DENSE = Plan("dense")
"""The request for torch's products of the dense tensor, with positions in blocks and dense modes as coordinates."""


def without_halves(plan: Plan) -> Plan:
    """Return the plan with dots of float32 values in place of dots of halves: as exact, and for all values."""
    return plan.scheduled(lambda own: replace(own, precision=DOTS["highest"]) if own.precision == F16X3 else own)


def requested(wanted: str | Plan) -> Plan:
    """Return the plan given, or the request that a name stands for. Raise `PlanError` for anything else.

    A request's name is checked where it is chosen by, since more names are known there.
    """
    if not isinstance(wanted, str | Plan):
        raise PlanError(f"plan must be a name or a Plan, found {type(wanted).__name__}")
    if isinstance(wanted, str):
        return Plan(wanted)
    if wanted is not ONE_PASS:  # as for every gradient
        verify_fields(wanted)
    return wanted


def check_threshold(threshold: object, least: int) -> None:
    """Raise `PlanError` unless this is a number of nonzeros, `least` or more, or None."""
    if threshold is not None and not (isinstance(threshold, int) and least <= threshold < 2**63):
        raise PlanError(f"threshold must be a number of nonzeros, {least} or more and below 2**63, found {threshold!r}")


def verify_fields(plan: Plan) -> None:
    """Raise `PlanError` naming the first field of a plan, its parts or its steps with a value of the wrong type."""
    _refuse(f"plan {plan.name!r}", misfit(plan, (tuple, list)))
    for number, part in enumerate(plan.parts):
        where = f"plan {plan.name!r}, part {number}"
        _refuse(where, misfit(part) or misfit(part.storage))
        tree = part.schedule.tree
        if not isinstance(tree, Tree | None):
            _refuse(where, f"tree is a Tree, as sparsetc.plans.parse_tree makes it, found {type(tree).__name__}")
        _refuse(where, misfit(part.schedule))
    for step in plan.steps:
        if step is not None:
            verify_fields(step)


def _refuse(where: str, fault: str) -> None:
    if fault:
        raise PlanError(f"{where}: {fault}")


def _verify_plain(value: object) -> None:
    """Raise `PlanError` where a plan, maybe from a file, has a text that could end a comment of generated source."""
    if isinstance(value, str):
        if not value.isprintable() or set(value) & set('"\\'):
            raise PlanError(f"texts of a plan must be printable, without quotes and backslashes, found {value!r}")
    elif isinstance(value, tuple | list):
        for one in value:
            _verify_plain(one)
    elif isinstance(value, Part | Storage | Schedule | Tree):
        _verify_plain([*state_of(value).values()])
    elif not isinstance(value, int | None):
        raise PlanError(f"a plan holds numbers and texts, found {type(value).__name__}")


def verify(plan: Plan) -> None:
    """Raise `PlanError`, naming part and fault, unless a plan for one sparse operand can run."""
    verify_fields(plan)
    if not plan.parts:
        raise PlanError(f"plan {plan.name!r} has no parts")
    _verify_plain(plan.parts)
    if plan.shares and len(plan.shares) != len(plan.parts):
        raise PlanError(f"plan {plan.name!r} has {len(plan.parts)} parts and names {len(plan.shares)} shares")
    for number, part in enumerate(plan.parts):
        where = f"plan {plan.name!r}, part {number} ({part.format})"
        modes = part.storage.modes
        if modes != list(range(len(modes))):
            lacking = next((f"; mode {m} is at none" for m in range(modes[-1]) if m not in modes), "")
            raise PlanError(f"{where}: each mode must be at one level, found {modes}{lacking}")
        storage, schedule = part.storage, part.schedule
        if schedule.precision not in (*PRECISIONS, F16, F16X3):
            named = ", ".join((*PRECISIONS, F16, F16X3))
            raise PlanError(f"{where}: precision {schedule.precision!r} is not one of {named}")
        declared = [(record, f) for record in (storage, schedule) for f in fields(record) if f.metadata]
        for size, what, least, most, power in (
            *[(block, f"the block of axis {axis}", 1, inf, True) for axis, block in schedule.blocks],
            *[
                (length, f"a vector of axis {axis}", 1, inf, True)
                for axis, lengths in schedule.vectors
                for length in lengths
            ],
            *[(getattr(record, f.name), *f.metadata["allowed"]) for record, f in declared],
        ):
            if power and (size < least or size & (size - 1)):
                raise PlanError(f"{where}: {what} must be a power of two, found {size}")
            if not least <= size <= most:
                bound = f"{least} or more" if size < least else f"{most} or less"
                raise PlanError(f"{where}: {what} must be {bound}, found {size}")
        tree = schedule.by_rule().tree
        dots = schedule.dot if tree is None else tree.dots
        if len(schedule.vectors) > 1 or (schedule.vectors and dots):
            raise PlanError(
                f"{where}: one axis at most is taken in several vectors, where nothing is contracted by dots"
            )
        if schedule.rounded and schedule.precision != ROUNDED:
            raise PlanError(f"{where}: operands are rounded at precision {ROUNDED}, not at {schedule.precision}")
        for axis in schedule.slowest_axes:
            if axis not in dict((*schedule.blocks, *schedule.vectors)) or schedule.slowest_axes.count(axis) > 1:
                raise PlanError(f"{where}: slowest_axes names axes that have a block, each once, found {axis!r}")
    if plan.fused and len({p.schedule.warps for p in plan.parts}) > 1:
        raise PlanError(f"plan {plan.name!r}: the parts of one fused launch must agree on the number of warps")
