"""What torch's own modes do to a decomposition: nothing.

In: a decomposition. Out: the same one, which records no gradients and computes in x's dtype whatever autocast says.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def undisturbed(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator of a decomposition: runs it without gradients and without autocast.

    Autocast would round dense products to half precision, which normal equations do not bear, and would hand buffers
    of another dtype to steps in place, which raise.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return function(*args, **kwargs)

    return run
