"""What a packed part stores, read back as its view says, all of it at once: along its axes, by its coordinates.

In: a view and its arrays. Out: a number for each value that a kernel reads, along every axis that the view has, and
the coordinates there.
"""

from __future__ import annotations

import torch

from sparsetc.formats import words as word_codec
from sparsetc.ir.nest.axes import Fibers
from sparsetc.ir.nest.coordinates import Reader
from sparsetc.ir.nest.view import Tiles, View

Arrays = dict[str, torch.Tensor]

STORED, PLACE = "stored", "place"
"""Beside the axes: where each value is stored, and its place in its tile, in the order in which tiles are stored."""


def read(view: View, arrays: Arrays, items: int, stored: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(coords (order, nnz), stored places (nnz,)) of all that a kernel reads, by the view's grammar alone."""
    at = positions(view, arrays, items, stored)
    found: dict[int, torch.Tensor] = {}
    reader = Reader(
        at.__getitem__,
        found.__getitem__,
        lambda mode: at[PLACE] // view.strides[mode] % view.sides[mode],
        lambda array, where: word_codec.whole(arrays[array])[where],
    )
    for mode, coordinate in view.coordinates.items():
        found[mode] = at[STORED] * 0 + coordinate.evaluate(reader)
    strided = (mode for mode in view.along if not view.coordinates[mode].sides)
    found |= {mode: view.along[mode].evaluate(reader) for mode in strided}  # last: others may follow from their tiles'
    return torch.stack([found[mode] for mode in range(view.order)]), at[STORED]


def counts(view: View, arrays: Arrays, items: int, stored: int) -> dict[str, int]:
    """How many positions each axis of a part has in all."""
    found = {"item": items}
    for axis in view.loops[:-1]:  # each of its positions has a range of those of the next
        found[axis.name] = arrays[f"{axis.name}_ptr"].numel() - 1
        found["fiber"] = found[axis.name] * view.lanes
    tiles = arrays["value_ptr"].numel() - 1 if view.bitmap else stored // view.volume
    return {**found, view.loops[-1].name: tiles}


def positions(view: View, arrays: Arrays, items: int, stored: int) -> Arrays:
    """The position of every value that is read, by axis; with `STORED` and `PLACE`."""
    device = next(iter(arrays.values())).device if arrays else torch.device("cpu")
    at = {"item": torch.arange(items, device=device)}
    if view.chunk or view.single:
        bounds = _chunks(at["item"], *((1, items) if view.single else (view.chunk, stored)))
    else:
        bounds = _ranges(arrays, at, "item")
    for axis in view.loops:
        at, behind = _along(at, axis.name, *bounds)
        if isinstance(axis, Fibers):
            step, at["lane"] = behind // axis.lanes, behind % axis.lanes
            at["fiber"] = at["block"] * axis.lanes + at["lane"]
            live = step < arrays["lane_len"].long()[at["fiber"]]
            return _stored({name: own[live] for name, own in at.items()}, view, arrays)
        at["lane"] = behind % view.lanes
        bounds = _ranges(arrays, at, axis.name) if axis is not view.loops[-1] else bounds
    return _stored(at, view, arrays)


def _chunks(item: torch.Tensor, chunk: int, stored: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where equal chunks start and end."""
    starts = item * chunk
    return starts, starts + (stored - starts).clamp(max=chunk)


def _ranges(arrays: Arrays, at: Arrays, axis: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the ranges start and end that each position along an axis has."""
    pointers = arrays[f"{axis}_ptr"].long()
    return pointers[at[axis]], pointers[at[axis] + 1]


def _along(at: Arrays, axis: str, starts: torch.Tensor, ends: torch.Tensor) -> tuple[Arrays, torch.Tensor]:
    """Everything in ranges along an axis, with the positions of what they are ranges of; how far each is behind."""
    lengths = ends - starts
    own = torch.repeat_interleave(torch.arange(len(starts), device=starts.device), lengths)
    behind = torch.arange(len(own), device=starts.device) - (torch.cumsum(lengths, 0) - lengths)[own]
    return {name: numbers[own] for name, numbers in at.items()} | {axis: starts[own] + behind}, behind


def _stored(at: Arrays, view: View, arrays: Arrays) -> Arrays:
    """With the values of each tile that is read: of all its positions, or of those that have a bit."""
    number = at[view.loops[-1].name]
    if view.bitmap:
        has, starts = set_positions(arrays["bits"], view)[number], arrays["value_ptr"].long()[number]
    else:
        has, starts = number.new_ones((len(number), view.volume)) == 1, number * view.volume
    own, place = torch.nonzero(has, as_tuple=True)
    stored = starts[own] + (has.cumsum(1) - 1)[own, place]
    return {axis: numbers[own] for axis, numbers in at.items()} | {STORED: stored, PLACE: place}


def set_positions(words: torch.Tensor, tiles: Tiles) -> torch.Tensor:
    """(tiles, volume) bool: which positions have a bit, the lowest bit of a word first."""
    bits = words.long().view(-1, tiles.words, 1) >> torch.arange(tiles.word, device=words.device) & 1
    return bits.flatten(1)[:, : tiles.volume] == 1
