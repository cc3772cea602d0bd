"""What is true of every call from outside, in one place: how torch's own machinery meets it.

In: a function that users call. Out: the same function, which Dynamo does not look into, which refuses what it cannot
transform, and which raises `OutOfMemoryError` where torch, numpy or Python had no memory left.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd import forward_ad

from sparsetc.errors import OutOfMemoryError, SparsetcError, TransformError

P = ParamSpec("P")
R = TypeVar("R")

OPAQUE = "sparsetc plans by what a sparse operand holds, so it runs outside compiled graphs, between two of them"
"""Why Dynamo stops here, for its own messages."""

# Importing Dynamo takes a second, so it is asked only where it runs: to leave alone whatever the function calls.
_unseen = cache(torch.compiler.disable)
_modules = sys.modules
_transforming = torch._C._are_functorch_transforms_active


def entry_point(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator of what users call."""

    @wraps(function)
    def entry(*args: P.args, **kwargs: P.kwargs) -> R:
        # Dynamo cannot break a graph within try, so it leaves this frame as it is.
        try:
            if _transforming() or forward_ad._current_level >= 0:
                _check_transforms((args, kwargs))
            if "torch._dynamo" in _modules:
                return _unseen(function)(*args, **kwargs)
            return function(*args, **kwargs)
        except (MemoryError, RuntimeError) as error:
            if not _lacks_memory(error):
                raise
            raise OutOfMemoryError(_lack(error)) from error

    # What `torch.compiler.disable` marks its functions with: one break of the graph, before anything is traced.
    entry._torchdynamo_disable = True  # type: ignore[attr-defined]
    entry._torchdynamo_disable_msg = OPAQUE  # type: ignore[attr-defined]
    return entry


_NO_MEMORY = re.compile(r"can't allocate memory|out of memory|bad_alloc", re.IGNORECASE)


def _lacks_memory(error: MemoryError | RuntimeError) -> bool:
    """Whether it is an allocation's error, and not our own: torch's are RuntimeErrors, told by their text alone."""
    return not isinstance(error, SparsetcError) and (
        isinstance(error, MemoryError) or _NO_MEMORY.search(str(error)) is not None
    )


def _lack(error: MemoryError | RuntimeError) -> str:
    said = str(error).strip().splitlines()
    return (
        f"memory ran out ({said[0] if said else type(error).__name__}); free some, take fewer columns of the dense "
        "operands at a time, or cut the sparse operand in parts and add up their results"
    )


_INSTEAD = (
    "cannot look into a sparsetc kernel. For gradients take torch.autograd.grad or backward(), one at a time, which "
    'can; in place of vmap give the batch a letter of its own, as in "ij,bjr->bir"; for Jacobians call '
    "torch.autograd.functional.jacobian without vectorize"
)


def check_upstream(gradient: torch.Tensor) -> None:
    """Raise `TransformError` where autograd gives a batch of gradients as if it were one."""
    if torch._C._functorch.is_legacy_batchedtensor(gradient):
        raise TransformError(f"torch's batched gradients (is_grads_batched, vectorize) {_INSTEAD}")


def _check_transforms(given: object) -> None:
    for tensor in _tensors(given):
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            raise TransformError(f"torch.func (grad, vmap, jvp, ...) {_INSTEAD}")
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
            raise TransformError(
                "sparsetc has no forward-mode gradients; take reverse mode (torch.autograd.grad), or "
                "torch.autograd.functional.jvp, which is made of it"
            )


def _tensors(given: object) -> Iterator[torch.Tensor]:
    """Operands among arguments: of a call of a kernel, its own too."""
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, list | tuple | dict):
        for one in given.values() if isinstance(given, dict) else given:
            yield from _tensors(one)
    else:
        own: Any = given
        for name in ("_values", "operand", "operands"):
            if hasattr(type(own), name):
                yield from _tensors(getattr(own, name, ()))  # a tensor that is being made has none yet
