"""One plan for all ranks: what is asked for by name runs wherever a rank's share has a use for it.

In: what compiles for this rank's share. Out: the same, compiled; by "auto" where only other ranks' shares fit the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from sparsetc.distributed.agree import agreed
from sparsetc.distributed.ranks import Ranks
from sparsetc.errors import PlanError

T = TypeVar("T")


def compiled(ranks: Ranks, what: str, make: Callable[..., T], settings: Mapping[str, Any]) -> T:
    """What `make` gives for settings, on every rank; collective.

    A plan that deals a tensor by the length of its rows, for one, is refused where a share has rows of one length.

    Raises:
        PlanError: no rank's share fits the plan.
        DistributedError: a rank failed otherwise.
    """

    def tried() -> T | PlanError:
        try:
            return make(**settings)
        except PlanError as error:
            return error

    found = agreed(ranks, what, tried)
    if not any(fits := ranks.objects(not isinstance(found, PlanError))):
        assert isinstance(found, PlanError)
        raise found
    if all(fits):
        assert not isinstance(found, PlanError)
        return found
    again = agreed(ranks, what, lambda: make(**{**settings, "plan": "auto"}) if isinstance(found, PlanError) else found)
    return again
