"""Indexing of sparse tensors: ints, slices, ``...``, None, labels, index tensors and masks of modes.

In: a SparseTensor without blocks, and a list of indices. Out: a SparseTensor, a dense tensor or an element,
differentiable; see `SparseTensor.__getitem__`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

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
Taken = tuple[Pattern, Tensor | None]
"""A pattern taken from another, and (n,) int64 the entries it took, in order; None for all in their order."""


def sorted_pattern(rows: Tensor, shape: tuple[int, ...], entries: Tensor | None) -> Taken:
    """Sort unique coordinates into a coalesced pattern; return it, and the entries in its order."""
    if not crd.is_coalesced(rows, shape):
        order = crd.lexsort(rows, shape)
        rows, entries = rows[:, order], order if entries is None else entries[order]
    return Pattern(rows.contiguous(), shape, True), entries


def indexed(x: Any, keys: list[Any]) -> Any:
    """Return the elements at a list of indices; see `SparseTensor.__getitem__`."""
    keys = _of_all_modes(keys, x)
    picked = [n for n, key in enumerate(k for k in keys if k is not None) if isinstance(key, Tensor)]
    if len(picked) > 1:
        return _picked(x, keys, picked)
    labels, sizes = _labels_at(x._pattern.labels, keys), list(x.shape)
    coords, values, first, sizes[0] = _index_first(x, keys[0])
    copied = first is not keys[0]
    kept: Tensor | None = None  # which of these entries are left, in order; None for all
    rows, shape = list[Tensor](), list[int]()  # of the modes so far, as the result has them
    index, at = None, 0
    in_order = True
    mode, axis = 0, 1  # the next one, and the next dense one of the values
    for key in (first, *keys[1:]):
        if mode >= x.sparse_order:
            if isinstance(key, slice) and key != WHOLE:  # of which torch takes none with a step below 0
                key = torch.tensor(range(*key.indices(sizes[mode])), dtype=torch.int64, device=values.device)
            values = values[tuple([WHOLE] * axis + [key])]
            axis += not isinstance(key, int)
        elif key is None:
            rows.append(torch.zeros_like(crd.picked(coords[0], kept)))
            shape.append(1)
        else:
            row, size = crd.picked(coords[mode], kept), sizes[mode]
            if isinstance(key, Tensor):
                index, at = key, len(rows)
            elif key != WHOLE:
                inside, row, size = _sliced(row, key, size, not mode and not rows)
                in_order &= isinstance(key, int) or key.step is None or key.step > 0
                if inside is not None and not bool(inside.all()):
                    inside = inside.nonzero()[:, 0]
                    kept = inside if kept is None else kept.index_select(0, inside)
                    row, *rows = (r.index_select(0, inside) for r in (row, *rows))
            if not isinstance(key, int):
                rows.append(row)
                shape.append(size)
        mode += key is not None
    if index is not None:
        which = _select(rows, shape, at, index, in_order)
        kept = which if kept is None else crd.picked(kept, which)
    if kept is not None or not copied:
        values = values.clone() if kept is None else values.index_select(0, kept)
    if not rows:
        return values.sum(0, dtype=values.dtype)  # of one, or of none
    whole = copied and all(isinstance(key, slice) and key == WHOLE for key in keys[1 : x.sparse_order])
    coords, new = coords if whole else torch.stack(rows), tuple(shape)
    pattern, order = (Pattern(coords, new, True), None) if in_order else sorted_pattern(coords, new, None)
    pattern.labels = labels
    return x._make(pattern, crd.picked(values, order))


def _of_all_modes(keys: Sequence[Any], x: Any) -> list[Any]:
    """Return a checked index for each mode, whole slices for those without, and None for new modes."""
    keys = [_index(key, x) for key in keys]
    count = sum(key is not None and key is not Ellipsis for key in keys)
    if count > x.ndim or sum(key is Ellipsis for key in keys) > 1:
        raise ShapeError(f"{count} indices, and {sum(key is Ellipsis for key in keys)} of …, for {x.ndim} modes")
    at = next((n for n, key in enumerate(keys) if key is Ellipsis), len(keys))
    keys[at : at + 1] = [WHOLE] * (x.ndim - count)
    modes = iter(enumerate(x.shape))
    return [key if key is None else _within(key, *next(modes), x._pattern) for key in keys]


def _index_first(x: Any, key: Any) -> tuple[Tensor, Tensor, Any, int]:
    """Take the run of entries for an index of the slowest mode.

    Returns:
        Their coordinates, (order, n), and values; what is left of the index, and the size of the mode: all of an index
        tensor, which slices with steps may become, and then entries are copies.
    """
    size, coords = x.shape[0], x._pattern.coords
    if isinstance(key, slice) and key.step not in (None, 1):
        indices = key.indices(size)
        if len(range(*indices)) <= x.nnz:
            key = torch.from_numpy(np.arange(*indices)).to(x.device)
    if isinstance(key, Tensor):
        return *_runs(x._pattern, key, x._values), WHOLE, key.numel()
    run = WHOLE if key is None else slice(*_range(coords[0], key, size))
    return coords[:, run], x._values[run], key, size


def _select(rows: list[Tensor], shape: list[int], at: int, index: Tensor, in_order: bool) -> Tensor | None:
    """Take the entries at indexed positions of a mode, repeated as the index is; its row becomes places in the index.

    Args:
        rows: coordinates of the entries; those of the result at the end.
        shape: sizes of the modes; those of the result at the end.
        at: the number of the mode.
        index: (n,) positions.
        in_order: whether the entries are in the order of the rows, as they shall be at the end.

    Returns:
        (entries,) the number of each entry before; None for all in their order.
    """
    row, size = rows[at], shape[at]
    which: Tensor | None = None
    counts = torch.bincount(index, minlength=size) if size <= row.numel() + index.numel() else None
    if counts is not None and (not size or int(counts.max()) < 2):
        places = torch.full_like(counts, -1).index_copy_(0, index, torch.arange(index.numel(), device=row.device))
        place = places.index_select(0, row)
        if index.numel() < size:
            which = torch.nonzero(place >= 0).flatten()
            place = place.index_select(0, which)
    else:
        order = torch.sort(index, stable=True)
        kinds = None if counts is None else row
        if counts is not None:
            first = torch.cumsum(counts, 0) - counts
        else:
            first, last = (torch.searchsorted(order.values, row, right=right) for right in (False, True))
            counts = last - first
        (which,), place = _enumerated(kinds, first, counts, row.unsqueeze(0), order.indices)
    shape[at] = index.numel()
    before = [crd.picked(r, which) for r in rows[:at]]
    if in_order and not crd.is_sorted_unique([index]):
        sorting = crd.lexsort([*before, place], shape[: at + 1])  # the rows before stay as they are
        place = place.index_select(0, sorting)
        which = sorting if which is None else which.index_select(0, sorting)
    rows[:] = *before, place, *(crd.picked(r, which) for r in rows[at + 1 :])
    return which


def _labels_at(labels: Labels, keys: Sequence[Any]) -> Labels:
    """Return the labels at indices of all modes; none if an index makes a new mode, which has no name."""
    if not labels or any(key is None for key in keys):  # a GPU is not asked where there are none
        return {}
    places = [key.cpu().numpy() if isinstance(key, Tensor) else key for key in keys]
    named = zip(labels.items(), places, strict=False)
    return {name: of if of is None else of[key] for (name, of), key in named if not isinstance(key, int)}


def _range(row: Tensor, key: Any, size: int) -> tuple[int, int]:
    """The first of the entries, in order, that an int or a slice of the first mode can take, and the end of them."""
    if isinstance(key, int):
        key = slice(key, key + 1)
    if not isinstance(key, slice) or key == WHOLE:
        return 0, row.numel()
    positions = range(*key.indices(size))
    low, high = (min(positions[0], positions[-1]), max(positions[0], positions[-1]) + 1) if positions else (0, 0)
    first, end = torch.searchsorted(row, row.new_tensor([low, high])).tolist()
    return first, max(first, end)


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
    try:
        if isinstance(key, bool | np.bool_) or getattr(key, "dtype", None) == torch.bool:
            raise TypeError
        return operator.index(key)
    except TypeError:
        raise ShapeError(f"indices are ints, slices, …, None, tensors and masks, found {type(key).__name__}") from None


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


def _within(index: Any, mode: int, size: int, pattern: Pattern) -> Any:
    """An index of a mode, counted from 0, of a mask the positions where it holds; an error past the mode."""
    if isinstance(index, np.ndarray):
        index = _positions_of(index, mode, pattern)
    if isinstance(index, slice) or (isinstance(index, Tensor) and index.dtype != torch.bool and not len(index)):
        return index
    if isinstance(index, Tensor) and index.dtype == torch.bool:
        if len(index) != size:
            raise ShapeError(f"a mask of {len(index)} elements is not one of mode {mode}, of size {size}")
        return index.nonzero()[:, 0]
    low, high = torch.stack(index.aminmax()).tolist() if isinstance(index, Tensor) else (index, index)
    if low < -size or high >= size:
        raise CoordinateError(f"index {low if low < -size else high} is out of range for mode {mode} of size {size}")
    if isinstance(index, Tensor):
        return index if low >= 0 else torch.where(index < 0, index + size, index)
    return index % size


def _sliced(row: Tensor, key: Any, size: int, within: bool) -> tuple[Tensor | None, Tensor, int]:
    """Return which coordinates an int or a slice takes, None for all, their new values, and the new size.

    Args:
        row: the coordinates of a mode.
        key: the int or the slice.
        size: of the mode.
        within: whether no coordinate is before or behind what is taken.
    """
    if isinstance(key, int):
        return None if within else row == key, row, 1
    start, stop, step = key.indices(size)
    n = len(range(start, stop, step))
    place = row - start
    if within and step == 1:
        return None, place, n
    inside = torch.ones_like(row, dtype=torch.bool) if step == 1 else place % step == 0
    place = place if step == 1 else torch.div(place, step, rounding_mode="floor")
    return inside & (place >= 0) & (place < n), place, n


@entry_point
def _runs(pattern: Pattern, index: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return (order, n) coordinates of the entries at indexed rows, the first of them places in the index; and their
    values.
    """
    coords, size = pattern.coords, pattern.shape[0]
    few = SEARCHED * index.numel()
    if size > (max(few, coords.shape[1]) if coords.is_cuda else few):
        row = coords[0]
        first, end = (torch.searchsorted(row, index, right=right) for right in (False, True))
        return _enumerated(None, first, end - first, coords, values)
    return _enumerated(index, *_rows(pattern), coords, values)


@once
def _rows(pattern: Pattern) -> tuple[Tensor, Tensor]:
    """Return the first entry of each row, and how many there are; found once."""
    begins = torch.searchsorted(pattern.coords[0], torch.arange(pattern.shape[0] + 1, device=pattern.device))
    return begins[:-1], begins.diff()


def _enumerated(
    kinds: Tensor | None, first: Tensor, times: Tensor, coords: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the coordinates of the entries of runs, one run after another, and the entries' values.

    Args:
        kinds: (runs,) the kind of each run; None where each is of its own, in their order.
        first: (kinds,) the first entry of a run.
        times: (kinds,) how many entries it has.
        coords: (order, entries), of which the first mode is not read: in its place is the number of an entry's run.
        values: (entries, *dense sizes).
    """
    lengths = crd.picked(times, kinds)
    ends = torch.cumsum(lengths, 0)
    count = int(ends[-1]) if len(ends) else 0
    on_cpu = native(loops.runs, first.device, len(ends) + count * len(coords))
    if on_cpu is None and (transforming() or not first.is_cuda):
        run, entries = crd.in_runs(lengths, count, crd.picked(first, kinds))
        taken = torch.stack([run, *(row.index_select(0, entries) for row in coords[1:])])
        return taken, values.index_select(0, entries)
    taken, entries = (room(first.device, first.dtype, *size, count) for size in ([len(coords)], []))
    kinds = torch.arange(len(first), device=first.device) if kinds is None else kinds
    if on_cpu is not None:
        on_cpu(kinds, first, ends, coords, taken, entries)
    else:
        sizes = len(lengths), *coords.shape, count
        arguments = [kinds.contiguous(), first, ends, coords, *sizes, taken, entries]
        run_by_hand("copy_runs", arguments, max(sizes) > crd.INT32_MAX)
    return taken, values.index_select(0, entries)


def _picked(x: Any, keys: list[Any], picked: list[int]) -> Any:
    """Pick positions by several index tensors of one length, as one mode; see `SparseTensor.__getitem__`."""
    if any(key is None or isinstance(key, int) for key in keys):
        raise ShapeError("several index tensors go with slices alone: take ints and None in a step of their own")
    x = x.expand_dense()
    index = [keys[m] for m in picked]
    if len({i.numel() for i in index}) > 1:
        raise ShapeError(f"index tensors pick together and have one length, found {[i.numel() for i in index]}")
    others = [m for m in range(x.ndim) if m not in picked]
    x = x.permute(*picked, *others)
    both = zip(x._pattern.coords, index, strict=False)
    place, count = crd.linear_key(map(torch.cat, both), x.shape[: len(picked)])
    joined = torch.cat((place[None, : x.nnz], x._pattern.coords[len(picked) :]))
    pattern = Pattern(joined, (count, *x.shape[len(picked) :]), True)
    result = indexed(x._make(pattern, x._values), [place[x.nnz :], *(keys[m] for m in others)])
    if not others:
        return result.to_dense()
    at = picked[0] if picked[-1] - picked[0] == len(picked) - 1 else 0
    return result.permute(*range(1, at + 1), 0, *range(at + 1, result.ndim))
