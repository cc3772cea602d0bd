"""The registry of formats and plans by name, the package's and users', and the choice of a plan for an einsum.

In: a class, a `Method`, or a function from a `Problem` and counts to a `Candidate`, None where it does not apply; and
what a user asks for. Out: an entry of `FORMATS` or `PLANS`; and a `Choice`, with what every plan that was
considered was expected to take, for `explain`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from dataclasses import replace as changed
from functools import partial
from itertools import chain
from math import log2
from typing import Any, TypeVar, overload

from sparsetc.errors import FormatError, PlanError
from sparsetc.ir.plan import DENSE, JOINS, ONE_PASS, PREFERRED, STEPS, Plan, requested, verify
from sparsetc.packing.base import FORMATS, Format, unknown_parameter
from sparsetc.planner.candidate import Best, Candidate, Choice, choice_of
from sparsetc.planner.pricing import orderly, suited, with_rounded
from sparsetc.planner.problem import Counts, Problem
from sparsetc.support import Lru
from sparsetc.support.checks import check_free, check_identifier, check_label
from sparsetc.tensor.pattern import clear_patterns

MakePlan = Callable[[Problem, Counts], Candidate | None]
Other = Callable[[Choice], Choice | None]
F = TypeVar("F", bound=Callable[..., Format])
M = TypeVar("M", bound=MakePlan)


@dataclass(frozen=True)
class Method:
    """A kind of plan, under one name, for an einsum of one sparse operand.

    Attributes:
        candidates: the plans worth considering under ``"auto"``, given the best so far; none where the method does not
            apply. Methods that count more than rows leave out what cannot be faster (`planner.bounds`).
        candidate: the plan of a problem and a request's options; None, or `PlanError`, where it does not
            apply.
        options: the options that a request by the method's name may have.
        alone: True where ``"auto"`` considers the method for one einsum, and not only for several that share a copy.
        shared: True where nonzeros are divided and stored alike for every einsum, so that one packed copy serves them
            all.
        make: the function that a format offers or a user registered.
        kernels: True where ``"auto"`` considers the method for kernels alone, not for programs that take whole axes.
    """

    name: str
    candidates: Callable[[Problem, Best], Iterable[Candidate]]
    candidate: Callable[..., Candidate | None]
    options: tuple[str, ...] = ()
    alone: bool = True
    shared: bool = False
    make: MakePlan | None = None
    kernels: bool = False

    def estimates(self, problem: Any, best: Best | None = None) -> Iterable[Candidate]:
        """Every candidate priced, at the precision asked for and at more exact ones, and with operands rounded.

        A lower precision thus adds candidates and takes none away, so it is never expected to be slower. Those that
        cannot be faster than the best so far may be left out; without it none are.
        """
        by_plan: dict[Plan, list[Candidate]] = {}
        for n in range(0 if self.kernels and problem.backend.at_once else len(problem.precisions)):
            exacter = changed(problem, precisions=problem.precisions[n:]) if n else problem
            for candidate in self.candidates(exacter, best or Best()):
                # Precisions tell only those plans apart whose dots have them.
                key = candidate.plan
                if len(problem.precisions) > 1:
                    key = key.scheduled(lambda s: s if s.dot else changed(s, precision="ieee"))
                if key not in by_plan:
                    by_plan[key] = with_rounded(candidate, problem)
                    if best is not None:
                        best.take(by_plan[key])
        return chain(*by_plan.values())

    def requested(self, problem: Problem, request: Plan) -> Candidate:
        """Return the candidate for a requested plan, operands cast if faster. Raise `PlanError` if there is none."""
        candidate = self.candidate(problem, **dict(request.options))
        if candidate is None:
            said = f'plan {request.name!r} does not apply to "{problem.equation}" on this tensor'
            raise PlanError(f'{said}: the function that makes it gave None, and no candidate; "auto" takes another')
        return with_rounded(candidate, problem)[-1]


PLANS: dict[str, Method] = {}
"""The plans of one sparse operand by name, in the order in which they are considered."""


def add_plans(*methods: Method) -> None:
    """Make methods of the package known."""
    PLANS.update({method.name: method for method in methods})


def made_by(name: str, make: MakePlan, shared: bool = False) -> Method:
    """Return the method of a function that a format offers or a user registers."""

    def candidate(problem: Problem) -> Candidate | None:
        """Return the function's plan, if it has one, by its registered name; `PlanError` where it is malformed."""
        offered = make(problem, problem.counts)
        if offered is None:
            return None
        if not isinstance(offered, Candidate):
            raise PlanError(f"what makes plan {name!r} must give a Candidate or None, found {type(offered).__name__}")
        plan, sizes = changed(offered.plan, name=name), len(offered.expected)
        verify(plan)
        if sizes != len(plan.parts):
            raise PlanError(f"plan {name!r} has {len(plan.parts)} parts, and the expected sizes of {sizes}")
        return changed(offered, plan=plan)

    def candidates(problem: Problem, best: Best) -> Iterable[Candidate]:
        offered = candidate(problem)
        return () if offered is None or (problem.ordered and not orderly(offered, problem)) else (offered,)

    return Method(name, candidates, candidate, shared=shared, make=make)


def register_plan(name: str, *, shared: bool = False, replace: bool = False) -> Callable[[M], M]:
    """Decorate ``make(problem, counts) -> Candidate | None``: register it as a plan.

    Args:
        name: one line of printable characters, without quotes and backslashes; ``plan=`` takes it.
        shared: the plan partitions and stores nonzeros in the same way for every einsum, so that one packed copy
            serves all. Gradients and batches of an einsum that asks for it by name then use it too, if it applies;
            those of other plans are planned anew.
        replace: replace a plan of the package, or of a format.

    Raises:
        PlanError: the name is invalid, or is taken by the package.

    Examples:
        >>> never = stc.plans.register_plan("never")(lambda problem, counts: None)
        >>> stc.spmm(stc.eye(2), torch.ones(2), plan="never")
        Traceback (most recent call last):
        sparsetc.errors.PlanError: plan 'never' does not apply to "ij,j->i" on this tensor: ...
    """
    check_label(name, "a plan", PlanError)

    def register(function: M) -> M:
        check_free(name, "plan", _holders(name), replace, PlanError, function)
        PLANS[name] = made_by(name, function, shared)
        _forget()
        return function

    return register


@overload
def register_format(cls: F) -> F: ...
@overload
def register_format(*, replace: bool) -> Callable[[F], F]: ...
def register_format(cls: F | None = None, *, replace: bool = False) -> F | Callable[[F], F]:
    """Decorate a format's class: register it by its ``name`` for plans, `explain` and the conformance suite.

    Args:
        cls: the class; one instance is made here, without arguments.
        replace: replace a format of the package, or a plan of this name.

    Raises:
        FormatError: the class lacks a method, or its name is no identifier or is taken by the package.

    Examples:
        >>> from sparsetc.formats.coo import Coo
        >>> named = stc.plans.register_format(type("Named", (Coo,), {"name": "named"}))
        >>> part = stc.plans.Part("named", stc.plans.Storage(item=(0,), leaf=(1,)))
        >>> stc.spmm(stc.eye(2), torch.ones(2), plan=stc.plans.Plan("by hand", (part,)))
        tensor([1., 1.])
    """
    if cls is None:
        return partial(register_format, replace=replace)  # type: ignore[call-overload, no-any-return]
    instance, called = cls(), getattr(cls, "__name__", repr(cls))
    missing = [written for part, written in PARTS.items() if not hasattr(instance, part)]
    if missing:
        raise FormatError(f"{called} is not a format: it has no {', no '.join(missing)}")
    name = check_identifier(instance.name, f"a format ({called})", FormatError)
    check_free(name, "the name", _holders(name), replace, FormatError, cls)
    before, FORMATS[name] = FORMATS.get(name), instance
    if offer := getattr(instance, "offer", None):
        PLANS[name] = made_by(name, offer)
    elif before and name in PLANS and PLANS[name].make in (None, getattr(before, "offer", None)):
        del PLANS[name]  # which was for what the format was before
    _forget()
    return cls


def _forget() -> None:
    """Drop what was planned and packed before a plan or a format was registered."""
    clear_patterns()
    kinds.clear()


PARTS = {"name": "name", "view": "view(shape, storage)", "pack": "pack(coords, shape, storage)"}
"""The required parts of a format, each as its author writes it."""


def _holders(name: str) -> list[object]:
    """Return the format and the plan of this name; the functions that users registered are theirs, wherever defined."""
    if name in ("auto", ONE_PASS.name, STEPS.name, *JOINS):
        return [FORMATS.get(name), requested]
    held = PLANS.get(name)
    return [FORMATS.get(name), None if held is None or held.make else held]


def plan_preferring(name: str) -> Plan:
    """Return a request for the plan of this name where it applies, elsewhere for the one expected to be fastest."""
    return Plan("auto", options=((PREFERRED, name),))


def is_shared(name: str) -> bool:
    """Return True if the plan of this name stores nonzeros alike for every einsum."""
    return name in PLANS and PLANS[name].shared


def plan_of_derived(wanted: str | Plan) -> str | Plan:
    """Return the request for einsums that follow from one by this plan, as gradients do: a shared plan, or any.

    A plan that was chosen for one einsum does not serve another, unless it says so.
    """
    plan = requested(wanted)
    name = plan.preferred or plan.name
    return plan_preferring(name) if is_shared(name) else ONE_PASS


# -- the plan that an einsum takes ------------------------------------------------------------------------------------
def choose(wanted: str | Plan, problem: Problem, recurs: bool = False, other: Other | None = None) -> Choice:
    """Choose the plan of one sparse operand: the given one if it has parts, else the cheapest that the request allows.

    That is the plan of its name, or for ``"auto"`` the cheapest that any method estimates; a method that the request
    prefers comes before all others where it applies.

    Args:
        wanted: a plan's name, a request or a plan.
        problem: what it is for.
        recurs: the pattern may be one of many that come and go, so that one choice does for all of a kind.
        other: gives what is faster than the plan that was counted; None where nothing is.

    Raises:
        PlanError: there is no such plan or option, it does not apply, or it is for several sparse operands.
    """
    plan = requested(wanted)
    if plan.pairs or (plan.is_request and plan.name in JOINS and plan.name not in PLANS):
        raise PlanError(
            f'plan {plan.name!r} is for two or more sparse operands, and "{problem.equation}" has one; known for '
            f"one: {_names()}"
        )
    if not plan.is_request:
        verify(plan)
        for number, part in enumerate(plan.parts):
            if fault := part.storage.level_fault(problem.order, problem.letters):
                raise PlanError(f"plan {plan.name!r}, part {number} ({part.format}): {fault}")
            if fault := unknown_parameter(part.format, part.storage, problem.order):
                raise PlanError(f"plan {plan.name!r}, part {number}: {fault}")
        return Choice(changed(suited(plan, problem), reason="given by the caller"))
    check_request(plan)
    return chosen(plan, problem, PLANS, recurs, other)


def chosen(
    request: Plan, problem: Any, methods: Mapping[str, Any], recurs: bool = False, other: Other | None = None
) -> Choice:
    """Return the choice that a request stands for among methods, of a `Problem` or of a join's."""
    if request.name in methods:
        return choice_of([methods[request.name].requested(problem, request)], request.reason or "asked for by name")
    first = methods.get(request.preferred)
    if first and (preferred := list(first.estimates(problem))):
        return choice_of(preferred, "preferred where it applies")

    def counted() -> Choice:
        choice = _counted(problem, methods)
        return (other and other(choice)) or choice

    return recurring(problem, counted) if recurs else counted()


def _counted(problem: Any, methods: Mapping[str, Any]) -> Choice:
    """Choose among all plans that ``"auto"`` considers, by counts of the pattern."""
    best = Best()
    candidates = considered(problem, best, methods)
    reason = "no other can be as fast" if len(candidates) == 1 and best.dismissed else ""
    return changed(choice_of(candidates, reason), dismissed=tuple(best.dismissed.items()))


def check_request(plan: Plan) -> None:
    """Raise `PlanError` if a request for one sparse operand names an unknown plan, or an unknown option of a plan."""
    if not plan.is_request:
        return
    if plan.name not in ("auto", ONE_PASS.name, *PLANS):
        called = repr(plan.name)
        why = "; it is a format without offer, for plans that are made by hand" if plan.name in FORMATS else ""
        raise PlanError(f"plan {called} has no parts, and no plan is called {called}{why}; known: {_names()}")
    options = PLANS[plan.name].options if plan.name in PLANS else (PREFERRED,)
    unknown = [name for name, _ in plan.options if name not in options]
    if unknown:
        raise PlanError(f"plan {plan.name!r} has no option {unknown[0]!r}")


def considered(problem: Any, best: Best, methods: Mapping[str, Any] = PLANS) -> list[Candidate]:
    """Return the candidates of ``"auto"`` for one einsum, without those that cannot beat the best so far."""
    return [candidate for method in methods.values() if method.alone for candidate in method.estimates(problem, best)]


def by_nonzeros(plan: Plan) -> bool:
    """Return True if dense modes are expanded for a plan: it is of a join, or of an operand as a dense tensor."""
    return plan.name in JOINS or plan.name == DENSE.name or any(part.operand is not None for part in plan.parts)


def _names() -> str:
    return ", ".join(("auto", ONE_PASS.name, STEPS.name, *PLANS))


# -- patterns that come and go ----------------------------------------------------------------------------------------
# Similar patterns, each used once or a few times, share one plan. They are of one kind where the einsum and the dense
# sizes are the same, sizes and counts of nonzeros and of rows within two fifths, the longest row within a factor of
# two, and as many nonzeros have a neighbour. A choice is repeated where several patterns in turn took the same plan;
# one in `AGAIN`, later one in `SELDOM`, is counted in full, so that a kind follows what its patterns are like.

AGREED = 3
"""Choices one after the other that must be of one plan before it is repeated."""
AGAIN = 16
"""Patterns of a kind of which one is counted in full; twice as many after each time that it took the same plan..."""
SELDOM = 256
"""...up to so many."""
ROUNDED_BY = 2
"""Steps to a factor of two in which sizes and counts are rounded."""

Kind = tuple[Choice, int, int]
"""The last choice made in full, how many of these in turn were of its plan, and how often it was repeated since."""
kinds: Lru[Hashable, Kind] = Lru(256)
"""The kinds of patterns that were planned last."""


def recurring(problem: Problem, count: Callable[[], Choice]) -> Choice:
    """Return the choice of similar problems if several in turn agreed, else that of `count()`.

    What is asked to be deterministic, or to keep within a memory limit, is planned by its own pattern alone.
    """
    if problem.deterministic or problem.adding or problem.memory_limit is not None or not problem.nnz:
        return count()
    key = _kind_of(problem)
    last, agreed, repeats = kinds.get(key) or (None, 0, 0)
    if last and agreed >= AGREED and repeats < min(AGAIN << agreed - AGREED, SELDOM) - 1:
        _keep(key, (last, agreed, repeats + 1))
        reason = f"as for the last patterns of its kind, {last.plan.reason}"
        return changed(last, plan=changed(last.plan, reason=reason))
    choice = count()
    alike = last is not None and _walks(last) == _walks(choice)
    _keep(key, (choice, agreed * alike + 1, 0))
    return choice


def _keep(key: Hashable, kind: Kind) -> None:
    kinds.pop(key)
    kinds.put(key, kind)


def _walks(choice: Choice) -> list[Any]:
    """Return what tells plans apart for a kind: the formats of their parts, and how each walks the modes."""
    plan = choice.plan
    return [plan.name, plan.path, *[(p.format, p.storage.levels, p.schedule.precision) for p in plan.parts]]


def _kind_of(problem: Problem) -> Hashable:
    einsum, counts = problem.einsum, problem.counts
    sparse, kept = set(einsum.sparse_indices), problem.kept if problem.rest else ()  # a nonzero is no row to count
    sizes = tuple([_rounded(size) if letter in sparse else size for letter, size in problem.bound.sizes])
    longest = counts.longest(kept)  # first, as it counts the rows on the way
    counted = tuple(map(_rounded, (counts.nnz, counts.distinct(kept), problem.rows)))
    shape = _rounded(longest) // 2, round(8 * counts.neighbours)  # which vary more among random patterns
    asked = problem.backend, problem.dtype, problem.precisions, problem.halves, problem.coalesced, problem.sparse_output
    return einsum, sizes, counted, shape, asked, problem.ones, problem.profile


def _rounded(count: int) -> int:
    """The logarithm of a count, in steps."""
    return round(ROUNDED_BY * log2(count)) if count else -1
