"""Calls in a straight line: what one call of a contraction found to do, later ones with operands like its own do again.

In: a contraction, and operands that it has taken. Out: a `Way` to the result of other operands of the same kind, by its
programs alone. Torch's own guards compare types, sizes, strides, devices and torch's modes at once. Nothing
is converted, and kernels, which are told addresses, read operands where they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo import guards

from sparsetc.codegen.launch import Values
from sparsetc.contraction.operands import Tensors
from sparsetc.contraction.rewrites import Pull
from sparsetc.support.compiled import room_of
from sparsetc.tensor.pattern import followed
from sparsetc.tensor.sums import captured

KINDS = 4
"""Kinds of operands that one contraction knows: with and without gradients, in two orders, in inference mode."""
PLAIN = Tensor, torch.nn.Parameter
Run = Callable[[Values, Sequence[Any]], Tensor | None]
"""A function of packed values, and of the values and dense operands of a call."""
Way = tuple[Callable[..., bool], int, bool, Run]
"""A guard of tensors, how many there are, whether one requires a gradient, and what gives the result."""


def looked_at(innermost: Any, tensors: Tensors) -> bool:
    """Return True if a way to the result is sought for operands of this kind, which have been run once."""
    watched = torch._C._len_torch_dispatch_stack() > 0 or torch._C._is_any_autocast_enabled()
    if watched or getattr(innermost, "trials", None) is not None or followed(tensors):
        return False
    return all(type(t) in PLAIN and not captured(t) for t in tensors)


def same_kind(tensors: Tensors) -> Callable[..., bool]:
    """Return a function that says if others are as these in all but their elements, and torch in the same modes.

    That is what Dynamo asks of the inputs of a graph. Two that are one tensor are as none.
    """
    sizes: Any = [[*t.shape] for t in tensors]
    strides: Any = [[*t.stride()] for t in tensors]
    return guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


def way_of(innermost: Any, pull: Pull, pushes: list[Any], values: Sequence[Any], dense: Tensors) -> Way | None:
    """Return a run of the programs on operands like these as they lie; None where a call is more than that."""
    if not getattr(innermost, "straight", False):
        return None
    executable, zeroed = innermost.executable, innermost.arrays.zeroed
    tensors = [*values, *dense]
    sources = pull.sources(len(tensors))
    if sources is None or executable.copies > 1:
        return None
    tables = innermost.tables(pull(values, dense, bool(pull.values))[1], contiguous=not innermost.covers)
    rows = result = executable.empty(torch.device("meta"))
    try:
        for change in (innermost.of_rows, *pushes):
            result = change(result)
    except RuntimeError:  # a copy by indices, which do not lie there
        return None
    backend, views = executable.programs.backend, list[Any]()
    for read, whole in zip((rows, *tables), (result, *[tensors[n] for n in sources]), strict=True):
        alike = read.shape == whole.shape and read.stride() == whole.stride()
        in_order = alike or backend != "numba" or (read.is_contiguous() and whole.is_contiguous())
        same = read.untyped_storage()._cdata == whole.untyped_storage()._cdata and read.numel() == whole.numel()
        if not same or read.storage_offset() != whole.storage_offset() or not in_order:
            return None
        views.append(None if alike else (read.shape, read.stride()))
    as_rows, *as_tables = views
    index = zeroed if zeroed is not None and zeroed.numel() else None
    guard, make = innermost.guard, room_of(result, innermost.device)
    if backend != "torch":  # given addresses
        as_rows, as_tables = None if index is None else as_rows, []
    _, call, _ = executable.bind(innermost.arrays, (), tensors)
    zeroes = zeroed is None and executable.zeroes
    ones = None if pull.values else innermost.packed_values(None)

    def run(packed: Values, tensors: Tensors) -> Tensor | None:
        read = [tensors[n] for n in sources]
        if guard is not None and not guard.admits(read, read):
            return None
        if any(as_tables):
            read = [one.as_strided(*view) if view else one for one, view in zip(read, as_tables, strict=True)]
        out = make()
        written = out if as_rows is None else out.as_strided(*as_rows)
        if zeroes:
            out.zero_()
        elif index is not None:
            written.index_fill_(0, index, 0)
        call(packed if ones is None else ones, read, written)
        return out

    present = tensors if values[0] is not None else dense
    return same_kind(present), len(present), any(t.requires_grad for t in present), run
