"""Reading a packed part back: all stored values with their coordinates, along the axes of its view.

In: a view and its arrays. Out: a number for each value that a kernel reads, along every axis that the view has, and
the coordinates there; or a `FormatError`, where a kernel would read outside the arrays, or outside its operands.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from sparsetc.errors import FormatError
from sparsetc.ir.nest import Expression, Nest, Reader
from sparsetc.packing import words as word_codec
from sparsetc.packing.base import Packed
from sparsetc.tensor.coords import in_runs

Arrays = dict[str, Tensor]

STORED, PLACE = "stored", "place"
"""Names, beside those of axes: the position of each stored value, and its place in its tile in the tile's order."""
BITS = 1 << 16
"""Words of bits that are spread out at a time."""


def read(view: Nest, arrays: Arrays, items: int, stored: int) -> tuple[Tensor, Tensor]:
    """Return (coords (order, n), places (n,)) of the n values that a kernel reads, padding included.

    Examples:
        >>> coords = stc.testing.pattern("corners", (4, 5))
        >>> packed = stc.testing.check_format("coo", coords, (4, 5), stc.plans.Storage(item=(0,), leaf=(1,)))
        >>> stc.testing.read(packed.view, packed.arrays, packed.items, packed.stored)[0]
        tensor([[0, 3],
                [0, 4]])
    """
    at = positions(view, arrays, items, stored)
    coords: dict[int, Tensor] = {}
    reader = Reader(
        at.__getitem__,
        coords.__getitem__,
        lambda mode: at[PLACE] // view.values.strides[mode] % view.values.sides[mode],
        lambda array, where: word_codec.whole(arrays[array])[where],
    )
    for mode, coordinate in view.coordinates.items():
        coords[mode] = at[STORED] * 0 + coordinate.evaluate(reader)
    strided = (mode for mode in view.along if not view.coordinates[mode].sides)
    coords |= {mode: view.along[mode].evaluate(reader) for mode in strided}  # last: others may follow from their tiles'
    return torch.stack([coords[mode] for mode in range(view.order)]), at[STORED]


def counts(view: Nest, arrays: Arrays, items: int, stored: int) -> dict[str, int]:
    """Return the number of positions of each axis of a part."""
    by_axis = {"item": items}
    for axis in view.loops[:-1]:  # each of its positions has a range of those of the next
        by_axis[axis.name] = arrays[f"{axis.name}_ptr"].numel() - 1
        by_axis["fiber"] = by_axis[axis.name] * view.lanes
    return {**by_axis, view.innermost.name: view.values.number(arrays, stored)}


def positions(view: Nest, arrays: Arrays, items: int, stored: int) -> Arrays:
    """Return the position of every value that is read, by axis, with `STORED` and `PLACE`."""
    device = next(iter(arrays.values())).device if arrays else torch.device("cpu")
    at = {"item": torch.arange(items, device=device)}
    for above, axis in pairwise((view.items, *view.loops)):
        starts, ends = above.range(at[above.name], arrays, stored)
        position, offset = in_runs(ends - starts)
        at = {name: numbers[position] for name, numbers in at.items()} | {axis.name: starts[position] + offset}
        at["lane"] = offset % view.lanes
        at = axis.taken(at, offset // view.lanes, arrays)
    number = at[view.innermost.name]
    has = view.values.places(arrays, view.values.number(arrays, stored), device)[number]
    where, place = torch.nonzero(has, as_tuple=True)
    place_stored = view.values.begins(arrays, number)[where] + (has.cumsum(1) - 1)[where, place]
    return {axis: numbers[where] for axis, numbers in at.items()} | {STORED: place_stored, PLACE: place}


# -- what kernels rely on ---------------------------------------------------------------------------------------------
def check_arrays(packed: Packed) -> None:
    """Raise `FormatError` unless every array that the view names is there, of its length, and pointers are in order.

    Examples:
        >>> coords, storage = stc.testing.pattern("random", (4, 5)), stc.plans.Storage(item=(0,), leaf=(1,))
        >>> packed = stc.testing.check_format("coo", coords, (4, 5), storage)
        >>> packed.arrays.clear()
        >>> stc.testing.check_arrays(packed)
        Traceback (most recent call last):
        sparsetc.errors.FormatError: the view reads item_ptr, item_word, word, which is missing
    """
    view, arrays = packed.view, packed.arrays
    missing = set(view.arrays) - set(arrays) - {"values"}
    require(not missing, f"the view reads {', '.join(sorted(missing))}, which is missing")
    number = counts(view, arrays, packed.items, packed.stored)
    for lookup in (lookup for c in view.coordinates.values() for lookup in c.lookups):
        words, expected = arrays[lookup.array].numel(), lookup.elements(number, view.stored_shape(packed.shape))
        require(expected in (words, None), f"{lookup.array!r} has {words} words, expected {expected}")
    for name in view.items.arrays:
        _check_pointers(name, arrays[name], packed.items, number[view.loops[0].name])
    items = view.items.number(number[view.loops[0].name], packed.items)
    require(packed.items == items, f"the {view.loops[0].name}s make {items} items, not {packed.items}")
    if "block_ptr" in view.arrays:
        _check_fibers(packed, number["block"])
    if "bits" in view.arrays:
        _check_bits(packed, number[view.innermost.name])


def check_coordinates(packed: Packed) -> None:
    """Raise `FormatError` unless all coordinates that kernels read lie in their modes, or are listed padding of tiles.

    Arrays are such as `check_arrays` lets pass.
    """
    view, shape = packed.view, packed.view.stored_shape(packed.shape)
    number = counts(view, packed.arrays, packed.items, packed.stored)
    for axis, level in zip(view.positions, view.levels, strict=True):
        for mode, e in ((c.mode, view.coordinates[c.mode]) for c in level):
            if e.modes or e.axes - {axis}:  # not known by the position along one axis
                coordinates = read(view, packed.arrays, packed.items, packed.stored)[0][mode]
                size = shape[mode] * view.side(mode)
            else:
                coordinates, size = _along_axis(packed, e, number[axis]), shape[mode]
            least, most = (int(n) for n in coordinates.aminmax()) if coordinates.numel() else (0, 0)
            inside = least >= 0 and (most < size or bool(e.sides))
            require(inside, f"a coordinate of mode {mode} lies outside its size, {packed.shape[mode]}")


def _along_axis(packed: Packed, e: Expression, count: int) -> Tensor:
    """Return the coordinates of an expression at all positions of its one axis, and along a tile's side."""
    view, arrays = packed.view, packed.arrays
    at = torch.arange(count, device=next(iter(arrays.values())).device)
    at = at.unsqueeze(1) if e.sides else at
    reader = Reader(
        lambda _: at,
        lambda mode: at,
        lambda mode: torch.arange(view.values.sides[mode], device=at.device),
        lambda array, where: word_codec.whole(arrays[array]) if where is at else word_codec.whole(arrays[array])[where],
    )
    coordinates = e.evaluate(reader)
    return coordinates if isinstance(coordinates, Tensor) else torch.full_like(at, coordinates)


def _check_pointers(name: str, pointers: Tensor, count: int, end: int) -> None:
    require(pointers.numel() == count + 1 > 0, f"{name} has {pointers.numel()} elements, expected {count + 1}")
    first, last = int(pointers[0]), int(pointers[-1])
    require((first, last) == (0, end), f"{name} goes from {first} to {last}, expected 0 to {end}")
    require(bool((pointers[1:] >= pointers[:-1]).all()), f"{name} falls")


def _check_bits(packed: Packed, tiles: int) -> None:
    """Raise `FormatError` unless every tile has its bitmap words, and a value for each bit that is set."""
    pointers = packed.arrays["value_ptr"]
    words = packed.arrays["bits"]
    values = packed.view.values
    _check_pointers("value_ptr", pointers, tiles, packed.stored)
    expected = tiles * values.words
    require(words.numel() == expected, f"bits has {words.numel()} words, expected {expected}")
    parts = words.flatten().split(max(1, BITS // values.words) * values.words)
    set_in_tile = torch.cat([values.places({"bits": part}, 0, words.device).sum(1) for part in parts])
    require(
        torch.equal(set_in_tile, torch.diff(pointers.long())), "a tile needs one value for each bit set in its bitmap"
    )


def _check_fibers(packed: Packed, blocks: int) -> None:
    """Raise `FormatError` unless fibers fit their blocks, and steps counted as full have no gap."""
    lanes, longest = packed.view.lanes, packed.storage.max_fiber_len
    _check_pointers("block_ptr", packed.arrays["block_ptr"], blocks, packed.stored)
    length = packed.arrays["lane_len"].long()
    full = packed.arrays["block_full"].long()
    require(length.numel() == blocks * lanes, f"lane_len has {length.numel()} elements, expected {blocks * lanes}")
    require(full.numel() == blocks, f"block_full has {full.numel()} elements, expected {blocks}")
    if not blocks:
        return
    spans = torch.diff(packed.arrays["block_ptr"].long())
    table = length.view(blocks, lanes)
    require(bool((spans % lanes == 0).all()), "a block's nonzeros are no multiple of its lanes")
    require(bool((table * lanes <= spans.unsqueeze(1)).all()), "a fiber is longer than its block")
    require(bool((length >= 0).all()), "lane_len has a length below 0")
    require(bool((full.unsqueeze(1) <= table).all()), "block_full counts a step in which a lane has no nonzero")
    most = int(length.max())
    require(not longest or most <= longest, f"a fiber of {most} nonzeros is longer than max_fiber_len, {longest}")


def require(condition: bool, message: str) -> None:
    """Raise `FormatError` unless a condition holds."""
    if not condition:
        raise FormatError(message)
