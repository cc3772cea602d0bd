"""Things made of a tensor's values (packed values, tiles of a mask), kept with it while its values stay the same.

In: a tensor of values, whatever holds it: one SparseTensor or several, or a layer. Out: a bounded mapping, freed with
the tensor; once the values have changed, a new one, which is empty.

On a CPU anyone may write to the memory unseen, through ``.data`` or an ndarray, so the bytes are compared with a copy,
which takes less than a tenth of the time of packing. On a GPU that would take a launch and a wait, so torch's count of
changes is believed. It does not count writes through ``.data``. Optimisers that write so do it after a gradient, and
values that learn are taken for changed after each.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from sparsetc.support import Lru
from sparsetc.tensor.dtypes import WORDS, captured, real_numbers

KEPT = 16
"""Things kept for one tensor of values. Not measured: the storages of four modes, each with those of its gradients."""


_seen: dict[int, tuple[weakref.ref[Tensor], Any, Lru[Any, Any]]] = {}
"""Values that were packed, by their tensors' ids, which are found faster than tensors: the tensor, its `_state` at that
time, and what is kept."""
_captured = WeakTensorKeyDictionary()
"""Packed values that CUDA graphs read: they stay as long as the values live, also when these change."""
_others = 0
"""Number of gradients so far of tensors that are no leaves: each may have changed the values that they were made of."""


def kept_with(values: Tensor) -> Lru[Any, Any] | None:
    """Return the mapping of things kept for the present values; None if nothing can be kept, or need be.

    Nothing can be where changes are not noticed.

    Nothing is kept of values that autograd computed, which the next step computes anew, nor of values that learn while
    a CUDA graph of a training step is captured, which packs them at each replay. A graph without gradients reads what
    was packed when it was captured.
    """
    trained = values.requires_grad and torch.is_grad_enabled() and captured(values)
    if not values.is_leaf or trained or (counted(values) and values.is_inference()):
        return None
    seen, state = _seen.get(id(values)), _state(values)
    if seen is None or seen[0]() is not values or seen[1] != state:
        if captured(values):  # what a graph packs is there at a replay alone
            return None
        key, forget = id(values), _seen.pop  # held, as names of modules are gone when a process ends
        copy = state if counted(values) else bytearray(state)
        seen = weakref.ref(values, lambda _: forget(key, None)), copy, Lru(KEPT)
        _seen[key] = seen
    elif captured(values):
        _captured.setdefault(values, []).append(seen)
    return seen[2]


def counted(values: Tensor) -> bool:
    """Return True if torch's count of changes is believed: on a GPU, where no ndarray has the memory."""
    return values.is_cuda


def gradient_taken(values: Tensor) -> None:
    """Take values that learn for changed from here on: an optimiser may write to them without torch's count."""
    global _others
    if not values.is_leaf:  # a view of the values, or what becomes them
        _others += 1
    elif counted(values):
        _seen.pop(id(values), None)


def _state(values: Tensor) -> Any:
    """Return a thing that is equal as long as the values are the same.

    On a CPU it is their bytes, of the same memory where they lie in order, which tell NaN from NaN and 0 from -0: the C
    library compares them faster than numpy compares numbers. On a GPU it is their storage, since assigning ``.data``
    gives a tensor another one, torch's count of changes, and the number of gradients of tensors that are no leaves.
    """
    if counted(values):
        return weakref.ref(values.untyped_storage()), values._version, _others if values.requires_grad else 0
    real = real_numbers(values).contiguous()
    return real.view(WORDS[real.element_size()]).numpy().data
