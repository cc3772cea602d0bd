"""The scalar path: one multiplication a pair of nonzeros, added up by the result's entry.

In: `Tasks`. Out: the result's values, or the gradient of either operand's: sums over the same tasks. The list of tasks
is a sparse operand of ones, ``T[p, q, z]``, so each sum is an einsum with one sparse operand, lowered and printed like
any other::

    result     pqz,p,q->z     chunks of tasks; z is added to by atomics, which coalesce, as z mostly rises with q
    back to x  pqz,q,z->p     runs of one p, summed in registers
    back to y  pqz,p,z->q     chunks; q is consecutive

Where bits must not depend on the order of atomics, T is stored as fibers of what is summed for, a lane each, and
partial sums have a second pass, as in any deterministic einsum. So it is where there are few sums, since atomics on one
address wait for one another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sparsetc.backends import TRITON
from sparsetc.codegen.parts import PartArrays
from sparsetc.codegen.programs import Programs
from sparsetc.codegen.split_float16 import SplitOperands
from sparsetc.ir.equation.einsum import Bound, Einsum
from sparsetc.ir.lower import Target, lower
from sparsetc.ir.nest.axes import LANE
from sparsetc.ir.nest.values import Ones
from sparsetc.ir.plan import Plan, Schedule, Storage
from sparsetc.ir.program.tile import TileProgram
from sparsetc.join import loops
from sparsetc.join.order import TASK_BYTES
from sparsetc.packing.base import Packed, pack
from sparsetc.planner.candidate import Best, Candidate
from sparsetc.products.problem import JoinPath, JoinProblem, Sizes, Terms
from sparsetc.products.tasks import KEPT_BYTES, NonzeroPairList, Tasks, keeps
from sparsetc.runtime.executable import Arrays, Executable, SecondPass
from sparsetc.support import cached_property
from sparsetc.support.checks import room
from sparsetc.support.entry import bar
from sparsetc.tensor.coords import picked
from sparsetc.tensor.dtypes import accumulator, wide

EINSUMS = {"z": ("p", "q"), "p": ("q", "z"), "q": ("p", "z")}
"""Letters of the two dense operands of each sum, by the letter that is summed for: p of x, q of y, z of the result."""

# Not measured: a lane a thread, so that neighbouring lanes' additions are of one instruction.
CHUNKS = Schedule(warps=4, lanes=128, unroll=4)
"""Schedule of equal chunks."""
RUNS = Schedule(warps=1, lanes=32, unroll=4)
"""Schedule of runs, most of which are short."""
ORDERED = 32
"""Fibers of a block in the deterministic form, which one warp takes."""
FEW, MANY = 1 << 14, 1 << 11
"""Tasks are sorted by sum if there are fewer sums than `FEW` and more tasks a sum than `MANY`: additions to one address
wait for each other (H200: 8,281 sums of 4,046 tasks 0.55 ms against 1.07; 4,096 of 1,024, 0.22 against 0.07; 73,455 of
220, 0.35 against 0.28; 1.4 M of 48, 0.98 against 0.34; `benchmarks/results/switches.json`)."""
CAP = 64
"""Longest fiber of the deterministic form; the second pass adds up the pieces of longer ones."""


def waits(sums: int, tasks: int) -> bool:
    """Return True if so many tasks, added by atomics to so few sums, would wait for one another."""
    return sums < FEW and tasks > MANY * sums


class TaskSum:
    """The sum over tasks for one of x, y and the result (``letter`` p, q or z) of the product of the other two."""

    def __init__(self, p: JoinProblem, tasks: Tasks, letter: str) -> None:
        """Take the sum; its program is generated when it is first asked for, since native loops do without.

        Args:
            p: the contraction that the tasks are of; operands are given in the dtype that its sums are kept in.
            tasks: the tasks to sum over, whose pattern is known.
            letter: ``p``, ``q`` or ``z``, of the tensor that is summed for.
        """
        self.problem = p
        self.tasks = tasks
        self.letter = letter
        self.dtype = accumulator(p.dtype)
        shape = (*tasks.join_order.matched, tasks.nnz)
        self.rows = shape["pqz".index(letter)]
        # Torch adds in order on the CPU, and integers' sums have one value in any.
        wait = waits(self.rows, tasks.join_order.tasks)
        self.ordered = (p.settings.deterministic or wait) and p.backend.atomics and self.dtype.is_floating_point
        terms = (("p", "q", "z"), *((c,) for c in EINSUMS[letter]))
        text = f"pqz,{','.join(EINSUMS[letter])}->{letter}"
        # A program serves all lists whose sizes have the same bits: few operands of new patterns need a new one.
        most = {c: 1 << max(0, n - 1).bit_length() for c, n in zip("pqz", shape, strict=True)}
        self.bound = Bound.of(Einsum(terms, (letter,), (0,), text), most)
        self._kept: tuple[NonzeroPairList, list[Arrays]] | None = None
        self._listed = False

    @cached_property
    def programs(self) -> Programs:
        """The program of the sum."""
        p, (program, arrays) = self.problem, self._bind(self.tasks.none)
        name = f"{p.equation} {'scalar' if self.letter == 'z' else f'scalar_{self.letter}'}"
        device, folder = arrays.parts[0].index[0].device, p.settings.cache_dir
        about = _about(p.equation, self.tasks)
        return Programs([program], self.dtype, p.backend, device, folder, name=name, about=about)

    @cached_property
    def executable(self) -> Executable:
        """The program, ready to run."""
        return Executable(self.programs, max(1, self.rows), (), self.dtype, False)

    def __call__(self, left: Tensor, right: Tensor) -> Tensor:
        """The sums, (matched x,), (matched y,) or (nnz,), from values of the two others in that order, of `dtype`."""
        factors = [left.contiguous(), right.contiguous()]
        real = not left.is_complex() and self.problem.backend.at_once
        if self.letter == "z" and self.tasks.fits and real and (sums := self._natively(*factors)) is not None:
            return sums
        out = left.new_zeros(self.rows)
        with bar(self.tasks.join_order.tasks, f"values of {self.problem.what}", unit="tasks") as at:
            for one in self.tasks:
                for arrays in self._arrays(one):
                    # One addition an entry and list, and lists in order: ordered sums have the same bits each time.
                    self.executable.run(arrays, [None], factors, out, accumulate=True)
                at(one.end)
        return out

    def _natively(self, x: Tensor, y: Tensor) -> Tensor | None:
        """The result's sums by a native loop; None without one. A list of tasks pays from the second call on."""
        tasks, m = self.tasks, self.tasks.join_order
        listed, self._listed = self._listed or tasks.found is None, True
        multiply = tasks.native(loops.products if listed else loops.first_products)
        if multiply is None:
            return None
        out = room(x.device, x.dtype, self.rows)
        sums = torch.zeros(m.join.columns, dtype=wide(out.dtype), device=out.device)
        if listed:
            (one,) = tasks
            multiply(m.ends, m.first, m.row, one.z_word, x, y, sums, out)
        else:
            multiply(*tasks.by_row, tasks.found, x, y, sums, out)
        return out

    def _arrays(self, one: NonzeroPairList) -> list[Arrays]:
        """The arrays of a list that the program reads, made once for a kept list; fibers are of a chunk at a time."""
        if self._kept is not None and self._kept[0] is one:
            return self._kept[1]
        pieces = one.pieces(self.problem.chunk) if self.ordered else (one,)
        arrays = [self._bind(piece)[1] for piece in pieces]
        self._kept = (one, arrays) if self.tasks.fits else None
        return arrays

    def _bind(self, one: NonzeroPairList) -> tuple[TileProgram, Arrays]:
        second, slot = None, None
        if self.ordered:
            packed, second = self._in_fibers(one)
            slot = torch.arange(second.partials, dtype=torch.int32, device=one.z_word.device)
            target = Target(sparse=True, owned=True, rows=max(1, second.partials), index64=packed.index64)
            schedule = Schedule()
        else:
            schedule, packed = (RUNS, one.runs()) if self.letter == "p" else (CHUNKS, one.chunks())
            target = Target(
                rows=self.bound.by_index[self.letter], index64=packed.index64, at_once=self.problem.backend.at_once
            )
        program = lower(self.bound, packed.view, schedule, target, format=packed.format)
        return program, Arrays((PartArrays.of(program, packed, slot),), second)

    def _in_fibers(self, one: NonzeroPairList) -> tuple[Packed, SecondPass]:
        """The list as fibers of what is summed for, a lane each, and how their sums come together."""
        mode = "pqz".index(self.letter)
        leaf = tuple(m for m in range(3) if m != mode)
        storage = Storage((), (mode,), leaf, lanes=ORDERED, max_fiber_len=CAP, max_item_nnz=1024, narrow=True)
        coords = one.coordinates()
        packed = pack(coords, one.shape, "fiber", storage)
        second, ones = SecondPass.of(packed.slots(LANE, coords[mode])), replace(packed.view, values=Ones())
        return replace(packed, view=ones, positions=None, representatives=(None, None)), second

    def ptx(self, target: str) -> str:
        """The assembly of the kernel for a named target; needs no GPU."""
        if self.programs.backend.gpu:
            return self.programs.assembly(target, self._bind(self.tasks.none)[1].parts, self.dtype)
        return TaskSum(replace(self.problem, backend=TRITON), self.tasks, self.letter).ptx(target)


FEW_TASKS, FEW_NATIVE = 4, 8
"""Tasks a nonzero up to which the path is taken unseen: it then costs no more than cutting into blocks does, 45 ns a
nonzero on a CPU, where a native loop takes 4 ns a task."""


class TaskSums(JoinPath):
    """The three sums over one set of tasks, each generated when first needed; those of the result are the path."""

    name = "scalar"
    launches = 4  # values gathered, the kernel, the result zeroed

    @classmethod
    def terms(cls, p: JoinProblem, tasks: int | None = None) -> Terms:
        """The list streamed, for each task a value of y and one of the result; x's values and columns change seldom."""
        tasks, profile = p.join.tasks if tasks is None else tasks, p.profile
        each = (KEPT_BYTES + 2 * p.width) / profile.task_bytes
        if p.settings.deterministic or p.join.rows * p.join.columns < profile.crowded_below:
            each = max(each, profile.crowded)
        again = 0.0 if keeps(tasks, p) else tasks * TASK_BYTES / profile.expanded_bytes
        return {"calls": cls.launches * profile.call, "pairs of nonzeros": tasks * each, "pairs made again": again}

    @classmethod
    def plan_of(cls, p: JoinProblem) -> Plan:
        """Coordinates and values of both operands."""
        return Plan(cls.name, p.parts("coo"), False)

    @classmethod
    def candidates(cls, p: JoinProblem, best: Best) -> list[Candidate]:
        """Return the plan with its price; where tasks are few nothing else is to be counted."""
        (candidate,) = super().candidates(p, best)
        few = FEW_NATIVE if p.settings.has_loops(p.device) else FEW_TASKS
        if p.join.tasks > few * (p.join.x_key.numel() + p.join.y_key.numel()):
            return [candidate]
        best.seconds = 0.0
        return [replace(candidate, plan=replace(candidate.plan, reason=f"at most {few} tasks a nonzero"))]

    def __init__(self, p: JoinProblem, plan: Plan | None = None) -> None:
        self.problem, self.tasks = p, Tasks(p)
        self._made: dict[str, TaskSum] = {}

    def product(self, letter: str, left: Tensor, right: Tensor) -> Tensor:
        """The sum over tasks for p, q or z of the other two, with x and y in the order of their `JoinOperand`s."""
        m = self.tasks.join_order
        entries = {"p": m.x_entry, "q": m.y_entry, "z": None}
        factors = [picked(v, entries[c]) for c, v in zip(EINSUMS[letter], (left, right), strict=True)]
        sums = self.of(letter)(*factors)
        entry, n = entries[letter], {"p": m.join.x.n, "q": m.join.y.n}
        return sums if entry is None else sums.new_zeros(n[letter]).index_copy_(0, entry, sums)

    def of(self, letter: str) -> TaskSum:
        """The sum over tasks for p, q or z."""
        if letter not in self._made:
            self._made[letter] = TaskSum(self.problem, self.tasks, letter)
        return self._made[letter]

    @property
    def generated(self) -> tuple[Programs]:  # type: ignore[override]
        """The program of the result's sums."""
        return (self.of("z").programs,)

    @property
    def sizes(self) -> Sizes:
        """The entries that meet any, and the coordinates of all."""
        m = self.tasks.join_order.join
        return (m.x_key.numel(), m.x.nbytes), (m.y_key.numel(), m.y.nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of the kept tasks."""
        return self.tasks.nbytes

    def places(self) -> Tensor:
        """(nnz,) the distinct places of all tasks: expand, sort, compress."""
        return self.tasks.places()

    def run(self, x: Tensor, y: Tensor, halves: SplitOperands | None = None) -> Tensor:
        """Multiply and add up, task by task."""
        return self.product("z", x, y)

    def ptx(self, target: str) -> str:
        """The assembly of the kernel."""
        return self.of("z").ptx(target)


def _about(equation: str, tasks: Tasks) -> Sequence[str]:
    """Return lines for a reader of the source about its tasks."""
    roles = tasks.join_order.join.roles
    return (
        equation,
        f"{roles}." if str(roles) else "No letters are left.",
        "A task is a pair of nonzeros with equal shared coordinates; X is the list of all, in order.",
        f"    p   nonzeros over {''.join(roles.x) or 'nothing'} that meet any of y",
        f"    q   nonzeros over {''.join(roles.y) or 'nothing'} that meet any of x",
        f"    z   entries of the result over {''.join(roles.result_order) or 'nothing'}, in this order",
        "Sizes are rounded up to powers of two here: the program serves all lists that are no longer.",
    )
