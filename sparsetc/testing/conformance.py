"""The conformance suite of formats: what packing promises, checked on coordinates of the caller's choice.

In: a registered format's name, coordinates, a shape, a storage. Out: nothing, or `FormatError` naming the promise that
is broken. A format of one's own is tested by the same calls as those that come with the package::

    from sparsetc.testing import check_format, pattern
    check_format("mine", pattern("skewed", (30, 40, 50)), (30, 40, 50), Storage(item=(0,), leaf=(1, 2)))

What is checked follows from what a kernel reads: it knows a part by its `Nest` and nothing else, so the nonzeros are
read back by the view's own grammar, which must give what was packed.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from sparsetc.ir.nest.axes import ITEM, LANE
from sparsetc.ir.nest.coordinates import word_bits
from sparsetc.ir.plan import Storage
from sparsetc.packing import words as word_codec
from sparsetc.packing.base import Packed, get_format, pack
from sparsetc.packing.stored import Arrays, check_arrays, positions, read, require
from sparsetc.tensor import coords as crd

Nonzeros = tuple[Tensor, Tensor, Tensor, Tensor]
"""Coordinates, stored places and numbers of the nonzeros read, and a mask over all reads."""


def check_format(name: str, coords: Tensor, shape: tuple[int, ...], storage: Storage) -> Packed:
    """Pack with the named format, check every promise of the interface, and return the result.

    Args:
        name: of a registered format.
        coords: (order, nnz) int64, in lexicographic order, without duplicates.
        shape: sizes of the modes.
        storage: how to pack.

    Raises:
        FormatError: names the promise that is broken.

    Examples:
        >>> coords = stc.testing.pattern("skewed", (4, 5))
        >>> stc.testing.check_format("coo", coords, (4, 5), stc.plans.Storage(item=(0,), leaf=(1,))).nnz
        5
    """
    # A mode of torch makes every call of it slower: entered where it changes something.
    with nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu"):
        packed = pack(coords, shape, name, storage)
        check_view(packed)
        check_arrays(packed)
        nonzeros_read = nonzeros(packed)
        at = positions(packed.view, packed.arrays, packed.items, packed.stored)
        check_read(packed, coords, nonzeros_read)
        check_values(packed, nonzeros_read)
        check_representatives(packed, coords, nonzeros_read, at)
        check_splits(packed, coords, nonzeros_read, at)
        check_bytes(packed)
    return packed


def check_view(packed: Packed) -> None:
    """The view is well formed, is the one the format promises before packing, and its words hold what they must."""
    view = packed.view
    view.verify()
    promised = get_format(packed.format).view(packed.shape, packed.storage)
    require(view == promised, f"packing gave the view {view}, but view() promises {promised}")
    require(view.order == len(packed.shape), f"the view has order {view.order}, the shape {len(packed.shape)}")
    fields = [(mode, field) for mode, c in view.coordinates.items() for field in c.fields]
    for mode, field in fields:
        size = view.stored_shape(packed.shape)[mode]
        bits = word_codec.bits_of(size)
        right = field.width >= bits if field is view.coordinates[mode] else field.width > 0
        require(right, f"mode {mode} of size {size} has {field.width} bits, and takes {bits}")
    for array in {f.word.array for _, f in fields}:
        own = sorted((f for _, f in fields if f.word.array == array), key=lambda f: (f.shift, f.width))
        ends = [f.shift + f.width for f in own]
        overlap = any(f.shift < end for f, end in zip(own[1:], ends, strict=False))
        require(not overlap, f"two modes share bits of {array!r}")
        above = [f for f in own if f.top and any(g.width and g.shift >= f.shift + max(f.width, 1) for g in own)]
        require(not above, f"a mode of {array!r} is said to have no bits above it, and has")
        require(max(ends) <= word_codec.WORD_BITS, f"the words {array!r} need {max(ends)} bits")


def check_read(packed: Packed, coords: Tensor, nonzeros_read: Nonzeros) -> None:
    """Check that the view reads every nonzero once, at its packed position."""
    read_back, _, source, live = nonzeros_read
    require(packed.padded or bool(live.all()), "there is padding, and padded is not set")
    require(
        read_back.shape == coords.shape,
        f"what the view reads: shape {tuple(read_back.shape)}, expected {tuple(coords.shape)}",
    )
    order = torch.argsort(source)
    whole = torch.equal(source[order], torch.arange(coords.shape[1], device=source.device))
    require(whole, f"what the view reads: the positions are not those of all {coords.shape[1]} nonzeros, once each")
    require(torch.equal(read_back[:, order], coords), "what the view reads: coordinates differ from those packed")


def check_values(packed: Packed, nonzeros_read: Nonzeros) -> None:
    """Values are packed to their nonzeros' places, and padding is 0."""
    values = torch.arange(1, packed.nnz + 1, dtype=torch.float64)
    stored = packed.pack_values(values)
    require(stored.shape == (packed.stored,), f"{stored.numel()} values were packed, expected {packed.stored}")
    _, at, source, _ = nonzeros_read
    require(torch.equal(stored[at], values[source]), "values are not packed with their nonzeros")
    padding = torch.ones_like(stored, dtype=torch.bool).index_fill_(0, at, False)
    require(bool((stored[padding] == 0).all()), "padding holds a value other than 0")
    half = torch.arange(0, 2 * packed.nnz, 2)  # the part as every other nonzero of a larger tensor
    spread = torch.zeros(2 * packed.nnz, dtype=torch.float64).index_copy_(0, half, values)
    require(torch.equal(packed.of(half).pack_values(spread), stored), "values of a part of a tensor are misplaced")


def check_representatives(packed: Packed, coords: Tensor, nonzeros_read: Nonzeros, at: Arrays) -> None:
    """Check that the nonzero representing an item or a lane has the coordinates shared by all of it."""
    view = packed.view
    _, _, source, live = nonzeros_read
    for level, coordinates in zip((ITEM, LANE), view.levels, strict=False):
        known = packed.representatives[level]
        modes = [c.mode for c in coordinates if not view.coordinates[c.mode].sides]  # lists are read along a side
        if not modes or known is None:
            require(not modes or level == LANE, "items share modes, which no nonzero stands for")
            continue
        sides = torch.tensor([view.values.sides[m] if m in view.along else 1 for m in modes]).unsqueeze(1)
        shared = coords[modes] // sides
        require(
            torch.equal(shared[:, known[at[view.positions[level]][live]]], shared[:, source]),
            f"a representative of level {level} lacks a coordinate that its nonzeros share",
        )


def check_splits(packed: Packed, coords: Tensor, nonzeros_read: Nonzeros, at: Arrays) -> None:
    """Check the flags for rows shared by two items and fibers shared by two lanes, whose results are added."""
    view = packed.view
    _, _, source, live = nonzeros_read
    rows = [c.mode for c in view.levels[0]]
    fibers = [*rows, *[c.mode for c in view.levels[1]]]
    if not packed.split_rows and not (view.items.counts and not view.levels[0]):
        items = _owners(at[view.positions[ITEM]][live], coords[rows][:, source])
        require(items <= 1, f"a row has {items} items, and split_rows is not set")
    if view.blocks and not packed.split_fibers:
        lanes = _owners(at[view.positions[LANE]][live], coords[fibers][:, source])
        require(lanes <= 1, f"a fiber has {lanes} lanes, and split_fibers is not set")
    if view.values.sides and not packed.split_fibers:
        read_back, _ = read(view, packed.arrays, packed.items, packed.stored)
        inside = torch.stack([own < size for own, size in zip(read_back, packed.shape, strict=True)]).all(0)
        _, starts = crd.sorted_runs(crd.sort_keys(read_back[:, inside], packed.shape))
        require(bool(starts.all()), "positions share their coordinates, and split_fibers is not set")


def _owners(places: Tensor, shared: Tensor) -> int:
    """The most items, or lanes, that nonzeros of the same shared coordinates lie in."""
    if not places.numel():
        return 0
    distinct = torch.unique(torch.cat([torch.zeros_like(places).unsqueeze(0), shared, places.unsqueeze(0)]), dim=1)
    return int(torch.unique(distinct[:-1], dim=1, return_counts=True)[1].max())


def check_bytes(packed: Packed) -> None:
    """`nbytes` is what the arrays take, and index words are no wider than need be."""
    exact = sum(a.nbytes for a in packed.arrays.values())
    require(packed.nbytes == exact, f"nbytes is {packed.nbytes}, expected {exact}")
    for name, array in packed.arrays.items():
        require(array.is_contiguous(), f"array {name!r} is not contiguous")
        integers = name in packed.view.packed or not (array.is_floating_point() or array.is_complex())
        require(integers, f"array {name!r} is of {array.dtype}; arrays of indices are of integers")
        require(array.dtype != torch.int64 or _needs_64(packed, name), f"array {name!r} takes 64 bits needlessly")


def _needs_64(packed: Packed, name: str) -> bool:
    lists = ((mode, c) for mode, c in packed.view.coordinates.items() if c.sides)
    listed = any(packed.shape[mode] >= 1 << 31 and name in (lookup.array for lookup in c.lookups) for mode, c in lists)
    return listed or packed.index64 or any(word_bits(level, name) > 31 for level in packed.view.levels)


def nonzeros(packed: Packed) -> Nonzeros:
    """Return (coords, stored places, numbers, mask) of the nonzeros read; the mask is over all reads.

    Kernels skip the padding of fibers but not that of runs, which is read as zeros at some coordinate of the shape, and
    not that of tiles, where they mask what is past a mode's end: the last positions along it, or a list's last places.
    """
    view = packed.view
    read_back, at = read(view, packed.arrays, packed.items, packed.stored)
    source = at if packed.positions is None else packed.positions[at]
    live = source >= 0
    require(not view.blocks or bool(live.all()), "the view reads a stored place that is padding")
    for mode, size in enumerate(packed.shape):
        own = read_back[mode, live] if mode in view.along else read_back[mode]
        require(bool(((own >= 0) & (own < size)).all()), "the view reads a coordinate outside the shape")
    return read_back[:, live], at[live], source[live], live
