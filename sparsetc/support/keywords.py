"""The answer to a keyword that no function takes: the nearest name that there is, and all others.

In: the unknown names and those of the options. Out: a sentence. Keywords pass through public functions as
``**settings`` until they are checked, so the names that would do are those of the functions on the way there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from difflib import SequenceMatcher
from inspect import Parameter, isfunction, signature, unwrap
from types import CodeType
from typing import Any

NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
CLOSE = 0.55
"""Least likeness of a name that is proposed."""


def refused(unknown: Sequence[str], options: Sequence[str]) -> str:
    """Return what to say of unknown keywords: who was called with them, and what it takes."""
    functions = list(_called())
    own = dict.fromkeys(
        p.name for function in functions for p in signature(function).parameters.values() if p.kind in NAMED
    )
    likest = (max((_likeness(known, name), known) for known in (*own, *options)) for name in unknown)
    near = dict.fromkeys(known for likeness, known in likest if likeness > CLOSE)
    who = f"{functions[0].__name__} takes no" if functions else "there is no option"
    guess = f" (did you mean {', '.join(near)}?)" if near else ""
    arguments = f"; arguments are {', '.join(own)}" if own else ""
    return f"{who} {', '.join(unknown)}{guess}{arguments}; options are {', '.join(options)}"


def _likeness(known: str, name: str) -> float:
    """How much two names share, 0 to 1, letters in order or in any order: ``maxiters`` is like ``n_iter_max``."""
    pairs = (known, name), tuple(sorted(word.replace("_", "")) for word in (known, name))
    return max(SequenceMatcher(None, *pair).ratio() for pair in pairs)


def _called() -> Iterator[Callable[..., Any]]:
    """The public function that the keywords were given to, then those that it handed them to at once."""
    public, frame, calls = _public(), sys._getframe(), []
    while frame is not None:
        calls.append(frame.f_code)
        frame = frame.f_back  # type: ignore[assignment]
    outermost = max((n for n, code in enumerate(calls) if code in public), default=-1)
    for code in reversed(calls[: outermost + 1]):
        if code in public:
            yield public[code]
        elif code.co_argcount or code.co_kwonlyargcount:  # unlike a decorator's (*args, **kwargs)
            return


def _public() -> dict[CodeType, Callable[..., Any]]:
    """Functions that users call, operations that they registered among them."""
    modules = [m for name, m in list(sys.modules.items()) if name.partition(".")[0] == "sparsetc"]
    named = [vars(m).get(name) for m in modules for name in getattr(m, "__all__", ())]
    registered = sys.modules["sparsetc"].OPERATIONS.values()
    return {unwrap(f).__code__: f for f in (*named, *registered) if isfunction(f)}
