"""Pickles of tensors, patterns, kernels, plans and trees: functions that reduce them to plain data and restore them.

In: objects; or tensors and plain data, as a pickle or ``torch.save`` holds them. Out: the other; kernels are compiled
again. Importing this module makes the functions known to `copyreg` and to ``torch.load``; nothing else calls them.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from inspect import signature
from typing import Any, TypeVar, get_type_hints

import numpy as np
import torch
from torch import Tensor

from sparsetc.contraction.compile import contraction
from sparsetc.contraction.kernel import SAVED, Kernel, saved_settings
from sparsetc.contraction.request import stand_ins
from sparsetc.errors import FormatError
from sparsetc.ir.contraction_tree import Tree, parse_tree
from sparsetc.ir.equation.einsum import Bound, Einsum
from sparsetc.ir.equation.parse import parse
from sparsetc.ir.plan import RECORDS
from sparsetc.options import Options, current, with_settings
from sparsetc.support import Ints, NamedInts, Names
from sparsetc.support.checks import check_memory, fits, from_state, misfit, quoted, state_of
from sparsetc.tensor import coords as crd
from sparsetc.tensor.blocks import checked
from sparsetc.tensor.inputs import as_coords, as_values
from sparsetc.tensor.pattern import Pattern
from sparsetc.tensor.sparse_tensor import SparseTensor

Restored = TypeVar("Restored")
Reduced = tuple[Callable[..., Restored], tuple[Any, ...]]
Spelled = tuple[tuple[Names, ...], Names, Ints, str, NamedInts]
"""A `Bound` einsum as plain data."""

# -- what is read -----------------------------------------------------------------------------------------------------


def saved(function: Callable[..., Restored]) -> Callable[..., Restored]:
    """Decorate a function that restores an object: arguments are checked against annotations, else `FormatError`.

    ``torch.load`` takes it as it is by default.
    """
    what, parameters = f"a saved {function.__name__.replace('_', ' ')}", signature(function).parameters

    @wraps(function)
    def checked(*arguments: Any) -> Restored:
        kinds = get_type_hints(function)
        least = sum(p.default is p.empty for p in parameters.values())
        if not least <= len(arguments) <= len(parameters):
            raise FormatError(f"{what} has {', '.join(parameters)}, found {len(arguments)} of them; it is damaged")
        for (name, parameter), value in zip(parameters.items(), arguments, strict=False):
            if not fits(value, kinds[name]):
                kind = parameter.annotation
                raise FormatError(f"{what} must have a {kind} as its {name}, found {quoted(value)}; it is damaged")
        return function(*arguments)

    torch.serialization.add_safe_globals([checked])
    return checked


@saved
def tensor(pattern: Pattern, values: Tensor) -> SparseTensor:
    """Restore a SparseTensor of a Pattern (which tensors may share), with checked values."""
    data = as_values(values)
    as_coords(pattern.coords, data)
    sides = () if pattern.blocks is None else pattern.blocks.sides
    if tuple(data.shape[1 : 1 + len(sides)]) != sides:
        raise FormatError(f"a saved SparseTensor has blocks of {sides}, and values {tuple(data.shape)}; it is damaged")
    nbytes = data.nbytes
    if nbytes > data.untyped_storage().nbytes():
        check_memory("the values of a saved SparseTensor, which a file has once for many,", nbytes, data.device)
    return SparseTensor._make(pattern, data)


@saved
def pattern(coords: Tensor, shape: Ints, coalesced: bool) -> Pattern:
    """Restore a Pattern; coordinates are checked to be in range, sorted and unique."""
    if coords.layout != torch.strided or coords.is_quantized:
        raise FormatError(f"a saved Pattern must have plain coordinates, found {coords.layout}; it is damaged")
    if coords.nbytes > coords.untyped_storage().nbytes():
        raise FormatError("a saved Pattern must have coordinates of its own, found one for many; it is damaged")
    stand_in = torch.zeros((), device=coords.device).expand(coords.shape[-1:] or (0,))
    restored = SparseTensor(coords, stand_in, shape, coalesce=False).pattern
    if coalesced and not crd.is_coalesced(restored.coords, restored.shape):
        raise FormatError("a saved Pattern must have sorted, unique coordinates, as it says; it is damaged")
    return Pattern(restored.coords, restored.shape, coalesced)


@saved
def pattern_of_blocks(coords: Tensor, sides: Ints, shape: Ints, coalesced: bool) -> Pattern:
    """Restore a Pattern of blocks, with the same checks."""
    blocks = checked(crd.checked_shape(sides), crd.checked_shape(shape))
    restored = pattern(coords, blocks.grid, coalesced)
    return Pattern(restored.coords, restored.shape, coalesced, blocks)


@saved
def labelled(pattern: Pattern, labels: dict[str, Any]) -> Pattern:
    """Restore a Pattern's labels."""
    try:
        arrays = {name: None if of is None else np.array(of[1], of[0]) for name, of in labels.items()}
    except Exception as error:  # of whatever numpy makes of it
        raise FormatError(f"a saved Pattern must have plain labels: {str(error)[:80]}; it is damaged") from None
    zeros = torch.zeros(pattern.values_shape(()), device=pattern.device)
    return SparseTensor._make(pattern, zeros).with_labels(arrays).pattern


@saved
def kernel(
    equation: Spelled, sparse: tuple[SparseTensor, ...], settings: dict[str, Any], form: str, drop_zeros: bool = False
) -> Kernel:
    """Restore a kernel by compiling it.

    Kernels read what einsum and operands say, so both are checked. Dense operands are stand-ins of their shapes.
    """
    if set(settings) - set(SAVED):
        raise FormatError(f"a saved kernel has options {', '.join(SAVED)}, found {quoted(settings)}; it is damaged")
    if fault := misfit(Options(**settings)):
        raise FormatError(f"a saved kernel has other options: {fault}; it is damaged")
    inputs, output, positions, text, sizes = equation
    einsum = Einsum(inputs, output, positions)
    bound = Bound(replace(einsum, text=text if text.isprintable() else str(einsum)), sizes)
    shapes = [[dict(sizes).get(i, -1) for i in term] for term in inputs]
    parsed = parse(str(einsum), shapes, [p in positions for p in range(len(inputs))])
    if parsed != bound or any(n < 0 for _, n in sizes):
        raise FormatError(f"a saved kernel must have an einsum and sizes of its indices, found {bound}; it is damaged")
    wanted = [bound.shape(p) for p in positions]
    if [o.shape for o in sparse] != wanted:
        raise FormatError(f"a saved kernel of {bound} must have operands of shapes {wanted}; it is damaged")
    operands = stand_ins(bound, sparse)
    options = with_settings(Options(cache_dir=current().cache_dir), settings)
    return Kernel(contraction(bound, operands, options, form), sparse, drop_zeros)


@saved
def tree(text: str) -> Tree:
    """Restore a `Tree` from its text."""
    return parse_tree(text)


@saved
def record(kind: str, state: dict[str, Any]) -> Any:
    """Restore a plan or a part of one from its fields."""
    if kind not in RECORDS:
        raise FormatError(f"a saved record is one of {', '.join(RECORDS)}, found {kind!r}; it is damaged")
    return from_state(RECORDS[kind], state)


# -- what is written --------------------------------------------------------------------------------------------------


def _pattern_reduced(p: Pattern) -> Reduced[Pattern]:
    if p.labels:
        arrays = {name: None if of is None else (str(of.dtype), of.tolist()) for name, of in p.labels.items()}
        plain = p.like(p.coords, p.is_coalesced)
        plain.labels = {}
        return labelled, (plain, arrays)
    # Kept, as a process that is spawned is given the memory itself.
    coords = p._once("narrow", lambda: crd.narrowed(p.coords, max(p.shape)))
    if p.blocks is None:
        return pattern, (coords, p.shape, p.is_coalesced)
    return pattern_of_blocks, (coords, p.blocks.sides, p.blocks.shape, p.is_coalesced)


def _kernel_reduced(k: Kernel) -> Reduced[Kernel]:
    contraction, e = k.contraction, k.contraction.bound.einsum
    equation: Spelled = e.inputs, e.output, e.sparse, e.text, contraction.bound.sizes
    return kernel, (equation, k.operands, saved_settings(contraction), contraction.form, k.drop_zeros)


copyreg.pickle(SparseTensor, lambda x: (tensor, (x.pattern, x.values)))
copyreg.pickle(Pattern, _pattern_reduced)
copyreg.pickle(Kernel, _kernel_reduced)
copyreg.pickle(Tree, lambda t: (tree, (str(t),)))
for _record in RECORDS.values():
    copyreg.pickle(_record, lambda r: (record, (type(r).__name__, state_of(r))))
