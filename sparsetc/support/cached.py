"""cached_property without a lock, so that no forked child waits for a thread that it does not have.

In: a method. Out: an attribute that is computed when first read, on frozen dataclasses too. Up to Python 3.11
`functools.cached_property` holds a lock of the class while it computes. Two threads that read at once may both compute.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or sys.version_info >= (3, 12):
    from functools import cached_property as cached_property
else:

    class cached_property(functools.cached_property):
        """The value of a method, kept in the instance's ``__dict__`` under the method's name."""

        def __init__(self, method: Callable[[Any], Any]) -> None:
            super().__init__(method)
            self.lock = nullcontext()
