"""How ranks make sure that they do the same: before they send anything, and after each part that may fail on one alone.

In: what this rank was given, and a function to run here. Out: its result; or one error on every rank, which names the
ranks that differ or failed. Without this the others would wait for a rank that is gone until the group's timeout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from sparsetc.distributed.ranks import Ranks
from sparsetc.errors import DistributedError
from sparsetc.options import current

T = TypeVar("T")


def agreed(ranks: Ranks, what: str, function: Callable[[], T], given: Mapping[str, Any] | None = None) -> T:
    """Run a function on every rank that sends nothing itself.

    Args:
        ranks: those that run it.
        what: of which call it is a part, for messages.
        function: gives this rank's result.
        given: arguments by name that must be the same on every rank, by what they print as.

    Raises:
        DistributedError: arguments differ, or some ranks failed.
        Exception: a rank's own error where every rank failed.
    """
    error: Exception | None = None
    result: Any = None
    try:
        result = function()
    except Exception as raised:
        error = raised
    if ranks.size == 1:
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]
    said = {name: repr(value) for name, value in (given or {}).items()}
    found = ranks.objects((said, None if error is None else f"{type(error).__name__}: {error}"))
    _check_same(what, [one for one, _ in found])
    failed = {rank: text for rank, (_, text) in enumerate(found) if text is not None}
    if error is not None and len(failed) == ranks.size:
        raise error
    if failed:
        raise DistributedError(f"{what}: {_listed(failed, ranks.size)}") from error
    return result  # type: ignore[no-any-return]


def alike(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same on every rank of the settings of a call, and of the options in force.

    Where source is kept and how much memory there is may differ.
    """
    options = current()
    own = {"plan": options.plan, "deterministic": options.deterministic, "backend": options.backend}
    own["precision"] = options.effective_precision()
    given = {name: value for name, value in settings.items() if name not in ("cache_dir", "memory_limit")}
    return {"settings": own | given}


def _check_same(what: str, said: list[dict[str, str]]) -> None:
    names = list(dict.fromkeys(name for one in said for name in one))
    for name in names:
        by_value: dict[str, list[int]] = {}
        for rank, one in enumerate(said):
            by_value.setdefault(one.get(name, "nothing"), []).append(rank)
        if len(by_value) > 1:
            listed = "; ".join(f"{_named(own)} {value:.200}" for value, own in list(by_value.items())[:4])
            raise DistributedError(f"{what}: ranks were given different arguments; {name}: {listed}")


def _listed(failed: Mapping[int, str], size: int) -> str:
    first = "; ".join(f"rank {rank} of {size} failed: {text:.1000}" for rank, text in list(failed.items())[:3])
    return first if len(failed) <= 3 else f"{first}; and {len(failed) - 3} more"


def _named(own: list[int]) -> str:
    few = ", ".join(map(str, own[:4])) + (", …" if len(own) > 4 else "")
    return f"rank{'s' if len(own) > 1 else ''} {few}:"
