"""Warnings that point at the user's line.

In: a message. Out: a `UserWarning` located at the innermost frame that is neither the package's, generated, nor
torch's, so that a reader sees which call of theirs it is about, and warning filters by module work.
"""

from __future__ import annotations

import sys
import warnings
from types import FrameType

PASSED_OVER = frozenset({"sparsetc", "sparsetc_generated", "torch"})
"""Top-level modules whose frames lie between a user and a warning: autograd calls the package from torch's."""

_said: set[str] = set()


def warn(message: str) -> None:
    """Warn, in the name of the package, at the line of the user's that led here."""
    frame = _users_frame(sys._getframe(1))
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    module = frame.f_globals.get("__name__", "<unknown>")
    warnings.warn_explicit(
        f"sparsetc: {message}", UserWarning, frame.f_code.co_filename, frame.f_lineno, module, registry
    )


def warn_once(message: str) -> None:
    """Warn the first time in a process that this message is given."""
    if message not in _said:
        _said.add(message)
        warn(message)


def _users_frame(frame: FrameType) -> FrameType:
    """The innermost frame outside of the package; the outermost of all where a thread has no other."""
    while str(frame.f_globals.get("__name__")).partition(".")[0] in PASSED_OVER and frame.f_back is not None:
        frame = frame.f_back
    return frame
