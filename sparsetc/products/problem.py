"""A contraction of two sparse operands as the ways to run it see it, and what each of these has to say.

In: a `Join`, an einsum, the types, the settings, and a request for a plan, whose options say the sides of blocks and
how these are stored. Out: `JoinProblem`: what a way is chosen by, and made of. Forms of the operands that take counting
or sorting are made when they are first asked for. `plan_bcb` is a request for blocks. A way is a class, which
`products.WAYS` has by its name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from sparsetc.backends import Backend
from sparsetc.codegen.split_float16 import SplitOperands
from sparsetc.device.profile import DeviceProfile, profile_of
from sparsetc.errors import PlanError
from sparsetc.ir.equation.einsum import Einsum
from sparsetc.ir.plan import JOINS, SIDE, Part, Plan, check_threshold, requested
from sparsetc.join.blocking import Blocking
from sparsetc.join.join import Join
from sparsetc.join.order import TASK_BYTES
from sparsetc.options import Options
from sparsetc.planner.candidate import Best, Candidate
from sparsetc.support import Names, cached_property
from sparsetc.support.checks import check_memory
from sparsetc.tensor.dtypes import accumulator

STORAGES = ("auto", "whole", "bitmap")
CHOSEN: dict[str, Any] = {"storage": ("auto", "auto"), "threshold": None, "formats": ("bcb", "bcb")}
"""Defaults of the options that a request for blocks does not name, beside sides."""


def _checked(plan: Plan) -> Plan:
    """The request; raises `PlanError` where it has options that `plan_bcb` does not take."""
    storages, threshold, formats = (plan.option(name, value) for name, value in CHOSEN.items())
    if not _two_of(STORAGES, storages):
        raise PlanError(f"storage must be one of {', '.join(STORAGES)}, or a pair of them, found {storages!r}")
    check_threshold(threshold, 1)
    for letter, side in _sides(plan).items():
        if not isinstance(side, int) or not 1 <= side < 2**63 or side & (side - 1):
            raise PlanError(f"the side of {letter!r} must be a power of two, below 2**63, found {side!r}")
    if not _two_of(("bcb", "coo"), formats):
        raise PlanError(f'formats must be "bcb" or "coo" for each of two operands, found {formats!r}')
    return plan


def _two_of(known: Names, pair: object) -> bool:
    return isinstance(pair, tuple | list) and len(pair) == 2 and all(f in known for f in pair)


def plan_bcb(
    storage: str | tuple[str, str] = "auto",
    threshold: int | None = None,
    formats: tuple[str, str] = ("bcb", "bcb"),
    **sides: int,
) -> Plan:
    """Make a plan of blocks with sides by letter, as ``plan_bcb(i=8, j=8, k=32)``; other sides are chosen.

    Args:
        storage: how a GPU reads blocks: ``"whole"``, ``"bitmap"`` (bits and packed values, section III-D), or
            ``"auto"``: whole unless that takes more than a quarter of the memory limit, when the larger operand, or
            both, are bitmaps. A pair names one for each operand, in the equation's order. Integers are read whole, and
            so is everything on the CPU.
        threshold: nonzeros that a block of the first operand needs to be multiplied as a block; nonzeros of its other
            blocks are multiplied one by one (``bcb+scalar``). None multiplies all as blocks.
        formats: ``"bcb"`` or ``"coo"`` for each of the two operands, in the equation's order. A nonzero in ``coo``
            meets blocks that have side 1 along the letters that both operands have, and scales them.
        sides: powers of two; letters that both operands keep have side 1 whatever is given.

    Examples:
        >>> x = stc.full((8, 8), 1.0)
        >>> stc.compile("ij,jk->ik", x, x, plan=stc.plans.plan_bcb(i=2, j=4)).plan.parts[0].sides
        {'i': 2, 'j': 4}
    """
    storages = (storage, storage) if isinstance(storage, str) else storage
    named = {"storage": storages, "threshold": threshold, "formats": formats}
    options: list[tuple[str, Any]] = [(SIDE + letter, side) for letter, side in sorted(sides.items())]
    for name, value in named.items():
        value = tuple(value) if isinstance(value, list) else value
        options += [(name, value)] * (value != CHOSEN[name])
    return _checked(Plan("bcb" if threshold is None else "bcb+scalar", options=tuple(options)))


def paired(wanted: Any, letters: Iterable[str] | None = None) -> Plan:
    """The request for a plan of two sparse operands that a name, a request or a plan with parts stands for.

    PlanError where it is none of two sparse operands, or has sides of other letters.
    """
    plan = requested(wanted)
    if not plan.pairs and not (plan.is_request and plan.name in ("auto", *JOINS)):
        raise PlanError(
            f"plan must be auto, {', '.join(JOINS)} or plan_bcb(...) for two sparse operands, found {wanted!r}"
        )
    check_threshold(plan.option("threshold", None), 1)
    if not plan.is_request:
        lengths = [(SIDE + letter, n) for part in plan.parts for letter, n in part.sides.items()]
        storages = tuple("bitmap" if part.bitmap else "whole" for part in plan.parts[:2])
        return Plan(plan.name, options=(*plan.options, ("storage", storages), *lengths))
    named = _sides(_checked(plan)).keys()
    if letters is not None and (unknown := sorted(named - {*letters})):
        raise PlanError(f"the plan gives sides to {', '.join(unknown)}, which the equation does not have")
    return plan


def _sides(request: Plan) -> dict[str, int]:
    """Sides of blocks by letter, as a request names them."""
    return {name.removeprefix(SIDE): n for name, n in request.options if name.startswith(SIDE)}


T = TypeVar("T")
LEAST_CHUNK, CHUNK = 1 << 10, 1 << 23
"""Fewest and most tasks of a chunk: these take 800 MB while they are sorted."""


@dataclass(frozen=True, eq=False)
class JoinProblem:
    """``x,y->output`` of two patterns, and the memory that its result, and the work towards it, may take.

    Attributes:
        wanted: the request for a plan.
        swapped: whether x is the equation's second operand.
        limit: bytes in all.
        unmet: True if these patterns are not known to have met before.
    """

    join: Join
    einsum: Einsum
    wanted: Plan
    dtype: torch.dtype
    backend: Backend
    settings: Options
    device: torch.device
    swapped: bool
    limit: int
    unmet: bool = False

    @property
    def what(self) -> str:
        """The name of the result in errors."""
        return f"the result of {self.equation}"

    def check_least(self) -> None:
        """Raise OutOfMemoryError where counts tell that the result has more entries than fit."""
        if self.join.most_results * self._entry_bytes > self.limit:
            self.check(self.join.least_results(), least=True)

    def check(self, entries: int, least: bool = False) -> None:
        """Raise OutOfMemoryError if a result of so many entries does not fit."""
        count = f"{'at least ' if least else ''}{entries:,} nonzeros"
        self.require(entries * self._entry_bytes, f"{self.what}, {count},")

    def require(self, nbytes: int, what: str) -> None:
        """Raise OutOfMemoryError if so many bytes do not fit; `what` is named in the message."""
        check_memory(what, nbytes, self.device, self.limit)

    @property
    def chunk(self) -> int:
        """The number of tasks taken at a time: in a quarter of the limit, but `LEAST_CHUNK` to `CHUNK` of them."""
        return max(LEAST_CHUNK, min(CHUNK, self.limit // (4 * TASK_BYTES)))

    @property
    def _entry_bytes(self) -> int:
        return 8 * len(self.einsum.output) + self.dtype.itemsize

    @cached_property
    def equation(self) -> str:
        """The einsum, for a reader."""
        return str(self.einsum)

    def option(self, name: str) -> Any:
        """Return an option of the request for blocks, or its default."""
        return self.wanted.option(name, CHOSEN[name])

    @cached_property
    def width(self) -> int:
        """Bytes of a value as sums keep it."""
        return accumulator(self.dtype).itemsize

    @cached_property
    def precision(self) -> str:
        """``highest``, ``high`` or ``medium``."""
        return self.settings.effective_precision()

    @property
    def rated(self) -> str:
        """The precision by which rates are named."""
        return "float64" if self.dtype in (torch.float64, torch.complex128) else self.precision

    @cached_property
    def profile(self) -> DeviceProfile:
        """The profile of the device, or of the GPU that Triton programs of operands on a CPU are made for."""
        return profile_of(self.device, self.settings, self.backend.name)

    @cached_property
    def blocking(self) -> Blocking:
        """The operands cut into blocks, of the sides that are asked for; those of one in ``coo`` have one position."""
        terms = zip(self.einsum.inputs, self.option("formats"), strict=True)
        single = [c for term, name in terms if name == "coo" for c in term]
        return Blocking.of(self.join, _sides(self.wanted) | dict.fromkeys(single, 1))

    def given(self, x_and_y: Sequence[T]) -> tuple[T, ...]:
        """Return what belongs to x and y in the equation's order, or reverse it: swapped if x is the second."""
        return tuple(reversed(x_and_y)) if self.swapped else tuple(x_and_y)

    def parts(self, format: str) -> tuple[Part, ...]:
        """Both operands in a format without blocks, in the equation's order; sizes are known once they are packed."""
        operands = self.given((self.join.x, self.join.y))
        return tuple(Part(format, label="".join(operand.letters), operand=n) for n, operand in enumerate(operands))


Sizes = tuple[tuple[int, int], ...]
"""(nonzeros, bytes of indices) of x and of y as they are read; of a hybrid, those of both its paths."""
Terms = dict[str, float]
"""Seconds of a call, by what takes them."""


class JoinPath:
    """One way to contract two sparse operands, to the values of a result whose pattern it finds.

    Attributes:
        name: of its plans.
        launches: calls of torch that it takes, each of the profile's `call` seconds.
        first: those that it takes before the first call.
        alone: as of `Method`.
        generated: the generated programs that it runs.
    """

    name: ClassVar[str]
    launches: ClassVar[int]
    first: ClassVar[int] = 0
    alone: ClassVar[bool] = True
    generated: Sequence[Any]

    def __init__(self, p: JoinProblem, plan: Plan) -> None:
        raise NotImplementedError

    def places(self) -> Tensor:
        """Find the result's places, (nnz,) ascending, which `run` takes for granted."""
        raise NotImplementedError

    def halves(self, x: Tensor, y: Tensor) -> SplitOperands | None:
        """Return the values of all entries in halves; None where they are multiplied as they are."""
        return None

    def run(self, x: Tensor, y: Tensor, halves: SplitOperands | None = None) -> Tensor:
        """Return the result's values by place, (nnz,), from those of both operands' entries, or from their halves."""
        raise NotImplementedError

    def ptx(self, target: str) -> str:
        """Return the assembly of its kernels for a named target; needs no GPU."""
        raise NotImplementedError

    @property
    def sizes(self) -> Sizes:
        """Return what it reads."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Bytes that it keeps for later calls."""
        raise NotImplementedError

    @classmethod
    def plan_of(cls, p: JoinProblem) -> Plan:
        """Return the plan of a problem, whatever that takes to count."""
        raise NotImplementedError

    @classmethod
    def terms(cls, p: JoinProblem) -> Terms | None:
        """Return what a call takes; None where operands, stored so, do not fit, or there is no kernel for the type."""
        raise NotImplementedError

    @classmethod
    def estimates(cls, p: JoinProblem, best: Best | None = None) -> list[Candidate]:
        """Return its plans with their prices; none where its launches alone take longer than the best so far."""
        best = best or Best()
        launches = cls.launches + cls.first * p.unmet
        allowed = best.allows(cls.name, launches * p.profile.call)
        candidates = cls.candidates(p, best) if allowed else []
        best.take(candidates)
        return candidates

    @classmethod
    def requested(cls, p: JoinProblem, request: Plan) -> Candidate:
        """Return the plan without its price, for which more would have to be counted."""
        return cls.candidate(cls.plan_of(p), None)

    @classmethod
    def candidates(cls, p: JoinProblem, best: Best) -> list[Candidate]:
        """Return the plan with its price."""
        return [cls.candidate(cls.plan_of(p), cls.terms(p))]

    @classmethod
    def candidate(cls, plan: Plan, terms: Terms | None) -> Candidate:
        """Return a plan that takes so long."""
        if terms is None:
            return Candidate(plan, (), plan.name)
        return Candidate(plan, (), plan.name, tuple(terms.values()), terms=tuple(terms))
