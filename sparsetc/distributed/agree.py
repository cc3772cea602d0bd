"""Agreement of ranks: they compare arguments before they send, and report failures after each local step.

In: what this rank was given, and a function to run here. Out: its result; or one error on every rank, which names the
ranks that differ or failed. Without this the others would wait for a rank that is gone until the group's timeout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from sparsetc.contraction.tuned import Leader, leader
from sparsetc.distributed.ranks import Ranks
from sparsetc.errors import DistributedError, PlanError
from sparsetc.options import current, of_call

T = TypeVar("T")


def agreed(
    ranks: Ranks,
    what: str,
    function: Callable[[], T],
    arguments: Mapping[str, Any] | None = None,
    same: Callable[[T], Mapping[str, Any]] | None = None,
) -> T:
    """Run a function on every rank that sends nothing itself.

    Args:
        ranks: those that run it.
        what: of which call it is a part, for messages.
        function: gives this rank's result.
        arguments: arguments by name that must be the same on every rank, by what they print as.
        same: gives likewise, where there are several ranks, what must be the same of the result.

    Raises:
        DistributedError: arguments differ, or some ranks failed.
        Exception: a rank's own error where every rank failed.
    """
    if ranks.size == 1:
        return function()
    error: Exception | None = None
    result: Any = None
    checked: dict[str, str] = {}
    try:
        result = function()
        checked = {} if same is None else _printed(same(result))
    except Exception as raised:
        error = raised
    failure = None if error is None else f"{type(error).__name__}: {error}"
    answers = ranks.objects((_printed(arguments or {}), failure, checked))
    _check_same(what, [one for one, *_ in answers])
    failed = {rank: text for rank, (_, text, _) in enumerate(answers) if text is not None}
    if error is not None and len(failed) == ranks.size:
        raise error
    if failed:
        raise DistributedError(f"{what}: {_listed(failed, ranks.size)}") from error
    _check_same(what, [one for *_, one in answers])
    return result  # type: ignore[no-any-return]


def on_all(ranks: Ranks, what: str, make: Callable[..., T], settings: Mapping[str, Any]) -> T:
    """Run `make` with the settings on every rank and return its result; collective.

    A plan that divides a tensor by the length of its rows, for one, is refused where a share has rows of one length.
    Where others take it, the rank's is chosen by cost. Plans that are chosen by time are those of rank 0's share.

    Raises:
        PlanError: no rank's share fits the plan.
        DistributedError: a rank failed otherwise.
    """

    def tried() -> T | PlanError:
        try:
            return make(**settings)
        except PlanError as error:
            return error

    result = _led(ranks, what, tried) if of_call(dict(settings)).timed else agreed(ranks, what, tried)
    fits = ranks.objects(not isinstance(result, PlanError))
    if isinstance(result, PlanError) and not any(fits):
        raise result
    if all(fits):
        return result  # type: ignore[return-value]
    other = {**settings, "plan": "auto"}
    return agreed(ranks, what, lambda: make(**other) if isinstance(result, PlanError) else result)


def _led(ranks: Ranks, what: str, make: Callable[[], T]) -> T:
    """Run `make` on every rank with the plans that rank 0 finds fastest."""
    leads = ranks.rank == 0
    token = leader.set(leader_here := Leader(leads))
    try:
        first = agreed(ranks, what, lambda: make() if leads else None)
        leader_here.plans |= ranks.objects(leader_here.plans)[0]
        followed = agreed(ranks, what, lambda: None if leads else make())
    finally:
        leader.reset(token)
    return first if leads else followed  # type: ignore[return-value]


def alike(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a call, and the options in force, that must be equal on every rank.

    Where source is kept may differ, and how much memory there is, by the options in force.
    """
    options = current()
    printed = {name: getattr(options, name) for name in ("plan", "path", "deterministic", "backend", "tune")}
    printed["precision"] = options.effective_precision()
    return {"settings": printed | {name: value for name, value in settings.items() if name != "cache_dir"}}


def _printed(arguments: Mapping[str, Any]) -> dict[str, str]:
    return {name: repr(value) for name, value in arguments.items()}


def _check_same(what: str, said: Sequence[Mapping[str, str]]) -> None:
    for name in dict.fromkeys(name for one in said for name in one):
        values = [one.get(name, "nothing") for one in said]
        by_value = {value: [rank for rank, other in enumerate(values) if other == value] for value in values}
        if len(by_value) > 1:
            listed = "; ".join(f"{_named(group)} {value:.200}" for value, group in list(by_value.items())[:4])
            raise DistributedError(f"{what}: ranks were given different arguments; {name}: {listed}")


def _listed(failed: Mapping[int, str], size: int) -> str:
    first = "; ".join(f"rank {rank} of {size} failed: {text:.1000}" for rank, text in list(failed.items())[:3])
    return first if len(failed) <= 3 else f"{first}; and {len(failed) - 3} more"


def _named(ranks: list[int]) -> str:
    few = ", ".join(map(str, ranks[:4])) + (", …" if len(ranks) > 4 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {few}:"
