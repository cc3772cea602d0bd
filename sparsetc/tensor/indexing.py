"""Indexing of sparse tensors: ints, slices, ``...``, None, labels, index tensors and masks of modes.

In: a SparseTensor without blocks, and a list of indices. Out: a SparseTensor, a dense tensor or an element,
differentiable; see `SparseTensor.__getitem__`. A mode's index is an int or a range, counted from 0, or a tensor, which
is not checked before what it takes is looked up, so that a GPU is waited for once.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import reduce
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from sparsetc.errors import CoordinateError, ShapeError
from sparsetc.support import later
from sparsetc.support.checks import room
from sparsetc.support.entry import entry_point
from sparsetc.support.files import native
from sparsetc.tensor import coords as crd
from sparsetc.tensor import loops
from sparsetc.tensor.inputs import as_tensor
from sparsetc.tensor.pattern import Labels, Pattern, once, transforming

run_by_hand = later("codegen.launch", "run_by_hand")
SEARCHED = 16
"""If a matrix has more than this many times the indexed rows, each indexed row is found by binary search; on a GPU only
if it has fewer entries than rows."""
WHOLE = slice(None)
Key: TypeAlias = int | range | Tensor
"""The index of a mode."""


@entry_point
def indexed(x: Any, keys: list[Any]) -> Any:
    """Return the elements at a list of indices; see `SparseTensor.__getitem__`."""
    keys = _of_all_modes(keys, x)
    result = _at(x, [key for key in keys if key is not None])
    for mode, key in enumerate(key for key in keys if not isinstance(key, int)):
        if key is None:
            result = result.unsqueeze(mode)
    return result


def _at(x: Any, keys: Sequence[Key]) -> Any:
    """Return the elements at one index a mode."""
    picked = [mode for mode, key in enumerate(keys) if isinstance(key, Tensor)]
    if len(picked) > 1:
        return _picked(x, keys, picked)
    order, labels = x.sparse_order, x._pattern.labels
    pattern, entries = _found(x._pattern, keys[:order])
    if isinstance(entries, slice):
        values = _of_dense_modes(x._values[entries], keys[order:], x).clone()
    else:
        values = _of_dense_modes(x._values, keys[order:], x).index_select(0, entries)
    if pattern is None:
        return values.sum(0, dtype=values.dtype)  # of one, or of none
    if labels and pattern is not x._pattern:
        pattern.labels = _labels_at(labels, keys)
    return x._make(pattern, values)


def _found(pattern: Pattern, keys: Sequence[Key]) -> tuple[Pattern | None, slice | Tensor]:
    """Return the pattern at one index a sparse mode, None if no mode is left; and the entries that it takes."""
    coords, sizes = pattern.coords, [*pattern.shape]
    entries: slice | Tensor = WHOLE
    first = keys[0]
    if isinstance(first, range) and first.step != 1 and 0 < len(first) <= pattern.nnz:
        first = _as_index(first, pattern.device)
    if isinstance(first, Tensor) and len(first):
        coords, entries = _runs(pattern, first)
        sizes[0] = len(first)
        first = range(len(first))
    elif _ends(first) != (0, sizes[0]):
        entries = slice(*torch.searchsorted(coords[0], coords.new_tensor(_ends(first))).tolist())
        coords = coords[:, entries]
    keys = [first, *keys[1:]]
    if keys == [*map(range, sizes)]:  # all of each mode
        return pattern if entries is WHOLE else Pattern(coords, tuple(sizes), True), entries
    inside = _inside(coords, keys, sizes)
    entries = _of(entries, inside)
    rows: list[Tensor] = []
    shape: list[int] = []
    ascending, index = True, None
    for mode, key in enumerate(keys):
        if isinstance(key, int):
            continue
        row = crd.picked(coords[mode], inside)
        if isinstance(key, range):
            ascending &= key.step > 0
            row = row - key.start if key.start else row
            row = row if key.step == 1 else torch.div(row, key.step, rounding_mode="floor")
        elif len(key):
            index = len(rows), key, mode, sizes[mode]
        rows.append(row)
        shape.append(len(key))
    if index is not None:
        rows, which, rising = _select(rows, *index)
        entries, ascending = _of(entries, which), ascending and rising
    if not rows:
        return None, entries
    coords, new = torch.stack(rows), tuple(shape)
    if ascending:
        return Pattern(coords, new, True), entries
    order = crd.lexsort(coords, new)
    return Pattern(coords[:, order], new, True), _of(entries, order)


def _as_index(positions: range, device: torch.device) -> Tensor:
    return torch.from_numpy(np.arange(positions.start, positions.stop, positions.step)).to(device)


def _ends(key: Any) -> tuple[int, int]:
    """Return the first position that an int or a range takes, and the number behind the last; 0 and 0 of none."""
    if isinstance(key, int):
        return key, key + 1
    return (min(key[0], key[-1]), max(key[0], key[-1]) + 1) if len(key) else (0, 0)


def _inside(coords: Tensor, keys: Sequence[Key], sizes: Sequence[int]) -> Tensor | None:
    """Return (n,) which entries are at the indices; None for all. The first mode was cut to a run, and of an index
    tensor only none is told.
    """
    masks = []
    for mode, key in enumerate(keys):
        if isinstance(key, Tensor) and len(key):
            continue
        low, high = _ends(key)
        if mode and (low, high) != (0, sizes[mode]):
            row = coords[mode]
            masks += [row == low] if high == low + 1 else [row >= low, row < high]
        if isinstance(key, range) and key.step not in (1, -1):
            masks.append((coords[mode] - low) % key.step == 0)
    if not masks:
        return None
    inside = torch.nonzero(reduce(operator.and_, masks)).flatten()
    return None if len(inside) == len(masks[0]) else inside


def _of(entries: slice | Tensor, which: Tensor | None) -> slice | Tensor:
    """Return some of the entries; None for all."""
    if which is None:
        return entries
    if isinstance(entries, slice):
        return which + entries.start if entries.start else which
    return entries.index_select(0, which)


def _of_dense_modes(values: Tensor, keys: Sequence[Any], x: Any) -> Tensor:
    """Take the values at an index a dense mode."""
    axis = 1
    for mode, key in enumerate(keys, x.sparse_order):
        if isinstance(key, range):
            key = WHOLE if key == range(x.shape[mode]) else _as_index(key, values.device)
        elif isinstance(key, Tensor):
            key = _from_0(key, mode, x.shape[mode])
        values = values[tuple([WHOLE] * axis + [key])]
        axis += not isinstance(key, int)
    return values


def _of_all_modes(keys: Sequence[Any], x: Any) -> list[Any]:
    """Return a checked index for each mode, whole slices for those without, and None for new modes."""
    keys = [_index(key, x) for key in keys]
    count = sum(key is not None and key is not Ellipsis for key in keys)
    if count > x.ndim or sum(key is Ellipsis for key in keys) > 1:
        raise ShapeError(f"{count} indices, and {sum(key is Ellipsis for key in keys)} of …, for {x.ndim} modes")
    at = next((n for n, key in enumerate(keys) if key is Ellipsis), len(keys))
    keys[at : at + 1] = [WHOLE] * (x.ndim - count)
    if sum(isinstance(key, Tensor) for key in keys) > 1 and not all(isinstance(key, Tensor | slice) for key in keys):
        raise ShapeError("several index tensors go with slices alone: take ints and None in a step of their own")
    modes = iter(enumerate(x.shape))
    return [key if key is None else _within(key, *next(modes), x._pattern) for key in keys]


def _select(
    rows: list[Tensor], at: int, index: Tensor, mode: int, size: int
) -> tuple[list[Tensor], Tensor | None, bool]:
    """Take the entries at indexed positions of a mode, repeated as the index is.

    Args:
        rows: coordinates of the entries in the modes that are left.
        at: the place among these of the mode.
        index: (n,) positions, not checked yet.
        mode: its number, for messages.
        size: of the mode.

    Returns:
        The coordinates of those taken, in the mode their places in the index; (entries,) the number of each before,
        None for all; and whether the index rises, so that they are in the order of before.
    """
    row, from_0 = rows[at], index.remainder(size)
    facts = [(from_0[1:] > from_0[:-1]).all()]
    if size <= len(row) + len(index):
        counts = crd.histogram(from_0, size)
        facts.append(counts.max())
    rising, *most = _looked(index, mode, size, *facts)
    which: Tensor | None = None
    if most and most[0] < 2:
        places = row.new_full((size,), -1).index_copy_(0, from_0, torch.arange(len(index), device=row.device))
        place = places.index_select(0, row)
        if len(index) < size:
            which = torch.nonzero(place >= 0).flatten()
            place = place.index_select(0, which)
    else:
        order = torch.sort(from_0, stable=True)
        if most:
            kinds, first = row, torch.cumsum(counts, 0) - counts
        else:
            kinds, (first, last) = None, (torch.searchsorted(order.values, row, right=right) for right in (False, True))
            counts = last - first
        lengths = crd.picked(counts, kinds)
        ends, count = lengths.cumsum(0), int(lengths.sum())
        (which,), found = _enumerated(kinds, first, lengths, ends, count, row.unsqueeze(0))
        place = order.indices.index_select(0, found)
    taken = [place if n == at else crd.picked(other, which) for n, other in enumerate(rows)]
    return taken, which, bool(rising)


def _labels_at(labels: Labels, keys: Sequence[Any]) -> Labels:
    """Return the labels at indices of all modes."""
    places = [key.cpu().numpy() if isinstance(key, Tensor) else key for key in keys]
    named = zip(labels.items(), places, strict=False)
    return {name: of if of is None else of[[*key]] for (name, of), key in named if not isinstance(key, int)}


def _index(key: Any, x: Any) -> Any:
    """Return an index as an int, a slice, None, Ellipsis, an int64 tensor, a mask, or an ndarray of labels."""
    if isinstance(key, slice):
        if key.step == 0 or not all(n is None or hasattr(n, "__index__") for n in (key.start, key.stop, key.step)):
            raise ShapeError(f"a slice is of integers, with a step that is not 0, found {key}")
        return key
    if key is None or key is Ellipsis:
        return key
    if isinstance(key, str) or (isinstance(key, list | np.ndarray) and np.asarray(key).dtype.kind == "U"):
        return np.asarray(key)
    if isinstance(key, np.ndarray) and key.dtype.kind == "u":  # uint8 is a mask in torch alone
        key = key.astype(np.int64)
    if isinstance(key, list | tuple | np.ndarray):
        key = as_tensor(key, "an index", ShapeError) if len(key) else torch.zeros(0, dtype=torch.int64)
    if isinstance(key, Tensor) and key.ndim:
        if key.ndim > 1 or key.is_floating_point() or key.is_complex():
            raise ShapeError(
                f"an index tensor has one mode and integers or bools, found {tuple(key.shape)} {key.dtype}"
            )
        return (key.bool() if key.dtype in (torch.bool, torch.uint8) else key.long()).to(x.device)
    return crd.integer(key, "an index that is no slice, …, None, tensor, mask or label")


def _positions_of(names: np.ndarray, mode: int, pattern: Pattern) -> Any:
    """Return the index of one label of a mode, or an index tensor of several labels."""
    name, mode_labels = [*pattern.labels.items()][mode] if mode < len(pattern.labels) else ("", None)
    if mode_labels is None or mode_labels.dtype.kind != "U":
        raise ShapeError(f"mode {mode} has no labels of text, found {str(names)[:60]!r} as an index")
    positions = {label: position for position, label in reversed([*enumerate(mode_labels.tolist())])}
    try:
        indices = [positions[label] for label in names.ravel().tolist()]
    except KeyError as error:
        raise CoordinateError(f"mode {name!r} has no label {str(error.args[0])[:60]!r}") from None
    return torch.tensor(indices, dtype=torch.int64, device=pattern.device) if names.ndim else indices[0]


def _within(index: Any, mode: int, size: int, pattern: Pattern) -> Key:
    """Return an index of a mode counted from 0, an error past the mode; an index tensor as it is, if there is any.

    Of a mask, the positions where it holds.
    """
    if isinstance(index, np.ndarray):
        index = _positions_of(index, mode, pattern)
    if isinstance(index, slice):
        return range(size)[index]
    if isinstance(index, int):
        _check_within(index, index, mode, size)
        return index % size
    if index.dtype == torch.bool:
        if len(index) != size:
            raise ShapeError(f"a mask of {len(index)} elements is not one of mode {mode}, of size {size}")
        index = index.nonzero()[:, 0]
    if not size and len(index):
        _looked(index, mode, size)
    return index  # type: ignore[no-any-return]


def _check_within(low: int, high: int, mode: int, size: int) -> None:
    if low < -size or high >= size:
        raise CoordinateError(f"index {low if low < -size else high} is out of range for mode {mode} of size {size}")


def _looked(index: Tensor, mode: int, size: int, *facts: Tensor) -> list[int]:
    """Check an index tensor, and read facts of it; by one transfer from the device.

    To count from 0, and to find the facts before, take the index modulo the size.
    """
    low, high, *read = torch.stack((*index.aminmax(), *facts)).tolist()
    _check_within(low, high, mode, size)
    return read


def _from_0(index: Tensor, mode: int, size: int) -> Tensor:
    """Return a checked index tensor, counted from 0."""
    if not len(index):
        return index
    _looked(index, mode, size)
    return index.remainder(size)


def _runs(pattern: Pattern, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return (order, n) coordinates of the entries at indexed rows, the first of them places in the index; and the
    entries.
    """
    coords, size = pattern.coords, pattern.shape[0]
    row = index.remainder(size)
    few = max(SEARCHED * len(index), coords.shape[1] if coords.is_cuda else 0)
    kinds = None if size > few else row
    if kinds is None:
        first, end = (torch.searchsorted(coords[0], row, right=right) for right in (False, True))
        lengths = end - first
    else:
        first, times = _rows(pattern)
        lengths = times.index_select(0, row)
    ends = lengths.cumsum(0)
    (count,) = _looked(index, 0, size, ends[-1])
    return _enumerated(kinds, first, lengths, ends, count, coords)


@once
def _rows(pattern: Pattern) -> tuple[Tensor, Tensor]:
    """Return the first entry of each row, and how many there are; found once."""
    begins = torch.searchsorted(pattern.coords[0], torch.arange(pattern.shape[0] + 1, device=pattern.device))
    return begins[:-1], begins.diff()


def _enumerated(
    kinds: Tensor | None, first: Tensor, lengths: Tensor, ends: Tensor, count: int, coords: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the coordinates of the entries of runs, one run after another, and the entries.

    Args:
        kinds: (runs,) the kind of each run; None where each is of its own, in their order.
        first: (kinds,) the first entry of a run.
        lengths: (runs,) how many entries a run has.
        ends: (runs,) how many it has with those before it.
        count: how many all have.
        coords: (order, entries), of which the first mode is not read: in its place is the number of an entry's run.
    """
    on_cpu = native(loops.runs, first.device, len(ends) + count * len(coords))
    if on_cpu is None and (transforming() or not first.is_cuda):
        run, entries = crd.in_runs(lengths, count, crd.picked(first, kinds))
        return torch.stack([run, *(row.index_select(0, entries) for row in coords[1:])]), entries
    taken, entries = (room(first.device, first.dtype, *size, count) for size in ([len(coords)], []))
    kinds = torch.arange(len(first), device=first.device) if kinds is None else kinds
    if on_cpu is not None:
        on_cpu(kinds, first, ends, coords, taken, entries)
    else:
        sizes = len(ends), *coords.shape, count
        arguments = [kinds.contiguous(), first, ends, coords, *sizes, taken, entries]
        run_by_hand("copy_runs", arguments, max(sizes) > crd.INT32_MAX)
    return taken, entries


def _picked(x: Any, keys: Sequence[Any], picked: list[int]) -> Any:
    """Pick positions by several index tensors of one length, as one mode; see `SparseTensor.__getitem__`."""
    x = x.expand_dense()
    index = [_from_0(keys[m], m, x.shape[m]) for m in picked]
    if len({*map(len, index)}) > 1:
        raise ShapeError(f"index tensors pick together and have one length, found {[*map(len, index)]}")
    others = [m for m in range(x.ndim) if m not in picked]
    x = x.permute(*picked, *others)
    both = zip(x._pattern.coords, index, strict=False)
    place, count = crd.linear_key(map(torch.cat, both), x.shape[: len(picked)])
    joined = torch.cat((place[None, : x.nnz], x._pattern.coords[len(picked) :]))
    pattern = Pattern(joined, (count, *x.shape[len(picked) :]), True)
    result = _at(x._make(pattern, x._values), [place[x.nnz :], *(keys[m] for m in others)])
    if not others:
        return result.to_dense()
    at = picked[0] if picked[-1] - picked[0] == len(picked) - 1 else 0
    return result.permute(*range(1, at + 1), 0, *range(at + 1, result.ndim))
