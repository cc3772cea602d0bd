"""The conformance suite of formats: what packing promises, checked on coordinates of the caller's choice.

In: a registered format's name, coordinates, a shape, a storage. Out: nothing, or `FormatError` naming the promise that
is broken. A format of one's own is tested by the same calls as those that come with the package::

    from sparsetc.testing import check_format, pattern
    check_format("mine", pattern("skewed", (30, 40, 50)), (30, 40, 50), Storage(item=(0,), leaf=(1, 2)))

What is checked follows from what a kernel reads: it knows a part by its `View` and nothing else, so the nonzeros are
first read back by the view's own grammar, then by the format's `unpack`, and both must give what was packed.
"""

from __future__ import annotations

from math import prod
from random import Random

import torch

from sparsetc.errors import FormatError
from sparsetc.formats import Packed, get_format, pack
from sparsetc.formats import words as word_codec
from sparsetc.ir.interpret_tiles import positions_of
from sparsetc.ir.nest.axes import ITEM, LANE, LEAF
from sparsetc.ir.nest.coordinates import AXIS_LEVEL, Reader
from sparsetc.ir.plan import Storage
from sparsetc.ir.view import View, verify, word_bits
from sparsetc.testing.scatter import SCATTERS, Place, Scatter

POSITION = 3
"""The place of a nonzero in its tile, beside the levels."""

# -- coordinates worth trying -----------------------------------------------------------------------------------------


def _row(shape: Place, most: int, r: Random) -> list[Place]:
    return [(shape[0] - 1, *place[1:]) for place in SCATTERS["random"](shape, most, r)]


PATTERNS: dict[str, Scatter] = {
    **{name: SCATTERS[name] for name in ("empty", "one", "corners", "random", "skewed", "slice", "fiber")},
    "dense": SCATTERS["full"],
    "row": _row,
}
"""No nonzero, one, the first and the last, some; few long rows and many short; one whole slice; one whole fiber; all;
some of the last slice of the first mode."""
UNBOUNDED = ("empty", "one", "corners", "random", "skewed", "row")
"""The patterns whose nonzeros do not grow with the shape."""
MOST = 100
"""The most nonzeros of a pattern that does not grow."""


def pattern(name: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """(order, nnz) coordinates, sorted and unique, of one of `PATTERNS`; none where the shape is empty."""
    most = MOST if name in UNBOUNDED else prod(shape)
    places = PATTERNS[name](shape, most, Random(f"{name} {seed}")) if 0 not in shape else []
    coords = torch.tensor(sorted(set(places)), dtype=torch.int64, device="cpu")
    return coords.reshape(-1, len(shape)).T.contiguous()


# -- the suite --------------------------------------------------------------------------------------------------------


def check_format(name: str, coords: torch.Tensor, shape: tuple[int, ...], storage: Storage) -> Packed:
    """Pack with the named format and check every promise; returns what was packed.

    Args:
        name: of a registered format.
        coords: (order, nnz) int64, in lexicographic order, without duplicates.
        shape: sizes of the modes.
        storage: how to pack.

    Raises:
        FormatError: names the promise that is broken.
    """
    with torch.device("cpu"):
        packed = pack(coords, shape, name, storage)
        check_view(packed)
        check_arrays(packed)
        check_read(packed, coords)
        check_unpack(packed, coords)
        check_values(packed)
        check_representatives(packed, coords)
        check_bytes(packed)
    return packed


def check_view(packed: Packed) -> None:
    """The view is well formed, is the one the format promises before packing, and its words hold what they must."""
    view = packed.view
    verify(view)
    promised = get_format(packed.format).view(packed.shape, packed.storage)
    _require(view == promised, f"packing gave the view {view}, but view() promises {promised}")
    _require(view.order == len(packed.shape), f"the view has order {view.order}, the shape {len(packed.shape)}")
    fields = [(mode, field) for mode, c in view.coordinates.items() for field in c.fields]
    for mode, field in fields:
        size = view.stored_shape(packed.shape)[mode]
        bits = word_codec.bits_of(size)
        right = field.width == bits if field is view.coordinates[mode] else field.width > 0
        _require(right, f"mode {mode} of size {size} takes {field.width} bits, not {bits}")
    for array in {f.word.array for _, f in fields}:
        own = sorted((f for _, f in fields if f.word.array == array), key=lambda f: (f.shift, f.width))
        ends = [f.shift + f.width for f in own]
        overlap = any(f.shift < end for f, end in zip(own[1:], ends, strict=False))
        _require(not overlap, f"two modes share bits of {array!r}")
        above = [f for f in own if f.top and any(g.width and g.shift >= f.shift + max(f.width, 1) for g in own)]
        _require(not above, f"a mode of {array!r} is said to have no bits above it, and has")
        _require(max(ends) <= word_codec.WORD_BITS, f"the words {array!r} need {max(ends)} bits")


def check_arrays(packed: Packed) -> None:
    """Every array the view names is there, of its length, and the pointers are in order."""
    view, arrays = packed.view, packed.arrays
    missing = set(view.arrays) - set(arrays) - {"values"}
    _require(not missing, f"the view reads {', '.join(sorted(missing))}, which packing did not make")
    blocks = arrays["block_ptr"].numel() - 1 if view.blocks else 0
    tiles = tiles_of(view, arrays, packed.stored)
    lengths = {ITEM: packed.items, LANE: tiles or blocks * view.lanes, LEAF: packed.stored}
    for lookup in (lookup for c in view.coordinates.values() for lookup in c.lookups):
        found, expected = arrays[lookup.array].numel(), lookup.elements(lengths, view.stored_shape(packed.shape))
        _require(expected in (found, None), f"{lookup.array!r} has {found} words, expected {expected}")
    if not view.chunk:
        end = blocks if view.blocks else tiles if view.sides else packed.stored
        _check_pointers("item_ptr", arrays["item_ptr"], packed.items, end)
    else:
        items = -(-packed.stored // view.chunk)
        _require(packed.items == items, f"{packed.stored} nonzeros make {items} chunks, not {packed.items} items")
    if view.blocks:
        _check_blocks(packed, blocks)


def _check_pointers(name: str, pointers: torch.Tensor, count: int, end: int) -> None:
    found = pointers.tolist()
    _require(len(found) == count + 1, f"{name} has {len(found)} elements, expected {count + 1}")
    _require(found[0] == 0 and found[-1] == end, f"{name} goes from {found[0]} to {found[-1]}, expected 0 to {end}")
    _require(found == sorted(found), f"{name} falls")


def _check_blocks(packed: Packed, blocks: int) -> None:
    lanes, longest = packed.view.lanes, packed.storage.max_fiber_len
    _check_pointers("block_ptr", packed.arrays["block_ptr"], blocks, packed.stored)
    length = packed.arrays["lane_len"].long()
    full = packed.arrays["block_full"].long()
    _require(length.numel() == blocks * lanes, f"lane_len has {length.numel()} elements, expected {blocks * lanes}")
    _require(full.numel() == blocks, f"block_full has {full.numel()} elements, expected {blocks}")
    _require(int(length.sum()) == packed.nnz, f"lane_len adds up to {int(length.sum())}, not to {packed.nnz} nonzeros")
    if not blocks:
        return
    spans = torch.diff(packed.arrays["block_ptr"].long())
    table = length.view(blocks, lanes)
    _require(bool((spans % lanes == 0).all()), "a block's nonzeros are no multiple of its lanes")
    _require(bool((table.amax(1) * lanes <= spans).all()), "a fiber is longer than its block")
    _require(bool((full <= table.amin(1)).all()), "block_full counts a step in which a lane has no nonzero")
    found = int(length.max())
    _require(not longest or found <= longest, f"a fiber of {found} nonzeros is longer than max_fiber_len, {longest}")


def check_read(packed: Packed, coords: torch.Tensor) -> None:
    """A kernel that follows the view reads every nonzero once, at the position that packing says."""
    found, _, source, live = _nonzeros(packed)
    _require(packed.padded or bool(live.all()), "there is padding, and padded is not set")
    _same(found, source, coords, "what the view reads")


def check_unpack(packed: Packed, coords: torch.Tensor) -> None:
    """Unpacking gives back the coordinates, and which nonzero each of them is."""
    found, positions = get_format(packed.format).unpack(packed)
    _same(found, positions, coords, "unpack")


def check_values(packed: Packed) -> None:
    """Values are packed to their nonzeros' places, and padding is 0."""
    values = torch.arange(1, packed.nnz + 1, dtype=torch.float64)
    stored = packed.pack_values(values)
    _require(stored.shape == (packed.stored,), f"{stored.numel()} values were packed, expected {packed.stored}")
    _, at, source, _ = _nonzeros(packed)
    _require(torch.equal(stored[at], values[source]), "values are not packed with their nonzeros")
    padding = torch.ones_like(stored, dtype=torch.bool).index_fill_(0, at, False)
    _require(bool((stored[padding] == 0).all()), "padding holds a value other than 0")
    half = torch.arange(0, 2 * packed.nnz, 2)  # the part as every other nonzero of a larger tensor
    spread = torch.zeros(2 * packed.nnz, dtype=torch.float64).index_copy_(0, half, values)
    _require(torch.equal(packed.of(half).pack_values(spread), stored), "values of a part of a tensor are misplaced")


def check_representatives(packed: Packed, coords: torch.Tensor) -> None:
    """What is read off the nonzero that stands for an item, or for a lane, is what the item or the lane shares."""
    view, arrays = packed.view, packed.arrays
    found, _, source, live = _nonzeros(packed)
    places = _places(view, arrays, packed.items, packed.stored)
    for level, coordinates in ((ITEM, view.item), (LANE, view.lane)):
        known = packed.representatives[level]
        if not coordinates or known is None:
            _require(
                not coordinates or level == LANE or known is not None, "items share modes, which no nonzero stands for"
            )
            continue
        modes = [c.mode for c in coordinates if not view.coordinates[c.mode].sides]  # lists are read along a side
        shared = (
            coords[modes] // torch.tensor([view.sides[m] for m in modes]).unsqueeze(1) if view.sides else coords[modes]
        )
        _require(
            torch.equal(shared[:, known[places[level][live]]], shared[:, source]),
            f"a representative of level {level} has not what its nonzeros share",
        )
    _require(found.shape[1] == packed.nnz, f"{found.shape[1]} nonzeros are read, expected {packed.nnz}")


def check_bytes(packed: Packed) -> None:
    """`nbytes` is what the arrays take, and index words are no wider than need be."""
    exact = sum(a.numel() * a.element_size() for a in packed.arrays.values())
    _require(packed.nbytes == exact, f"nbytes is {packed.nbytes}, expected {exact}")
    for name, array in packed.arrays.items():
        _require(array.is_contiguous(), f"array {name!r} is not contiguous")
        _require(array.dtype != torch.int64 or _needs_64(packed, name), f"array {name!r} takes 64 bits needlessly")


def _needs_64(packed: Packed, name: str) -> bool:
    return any(word_bits(level, name) > 31 for level in packed.view.levels) or packed.index64


# -- reading a part as a kernel does ----------------------------------------------------------------------------------


def read(view: View, arrays: dict[str, torch.Tensor], items: int, stored: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(coords (order, nnz), stored places (nnz,)) of all nonzeros, by the view's grammar alone."""
    places = _places(view, arrays, items, stored)
    found: dict[int, torch.Tensor] = {}
    for level, coordinates in enumerate(view.levels):
        own = places[level]
        reader = Reader(
            lambda axis: places[LEAF] % view.lanes if axis == "lane" else places[AXIS_LEVEL[axis]],
            found.__getitem__,
            lambda mode: places[POSITION] // view.strides[mode] % view.sides[mode],
            lambda array, where: word_codec.whole(arrays[array])[where],
        )
        for c in coordinates:
            found[c.mode] = own * 0 + view.coordinates[c.mode].evaluate(reader)
    along = {mode: own.evaluate(reader) for mode, own in view.along.items() if not view.coordinates[mode].sides}
    found |= along  # once all are read of their tiles, which others may follow from
    return torch.stack([found[mode] for mode in range(view.order)]), places[LEAF]


def _nonzeros(packed: Packed) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(coords, stored places, numbers, mask) of what is read and is a nonzero; the mask is over all that is read.

    Kernels skip the padding of blocks but not that of runs, which is read as zeros at some coordinate of the shape.
    """
    found, at = read(packed.view, packed.arrays, packed.items, packed.stored)
    source = at if packed.positions is None else packed.positions[at]
    live = source >= 0
    _require(not packed.view.blocks or bool(live.all()), "the view reads a stored place that is padding")
    sizes = torch.tensor(packed.shape, device=found.device).unsqueeze(1)
    inside = found[:, live] if packed.view.sides else found  # a kernel masks the positions past a mode's end
    _require(bool(((inside >= 0) & (inside < sizes)).all()), "the view reads a coordinate outside the shape")
    return found[:, live], at[live], source[live], live


def tiles_of(view: View, arrays: dict[str, torch.Tensor], stored: int) -> int:
    """How many tiles a part stores."""
    if view.bitmap:
        return arrays["value_ptr"].numel() - 1
    return stored // view.volume if view.sides else 0


def _places(view: View, arrays: dict[str, torch.Tensor], items: int, stored: int) -> dict[int, torch.Tensor]:
    """For every nonzero: its item, its fiber (lane of a block), and its stored place."""
    device = next(iter(arrays.values())).device if arrays else torch.device("cpu")
    at = torch.arange(stored, device=device)
    if view.chunk:
        return {ITEM: at // view.chunk, LANE: at, LEAF: at}
    numbers = torch.arange(items, device=device)
    item_of = torch.repeat_interleave(numbers, torch.diff(arrays["item_ptr"].long()))
    if view.bitmap:
        starts = arrays["value_ptr"].long()
        tile = torch.repeat_interleave(torch.arange(starts.numel() - 1, device=device), torch.diff(starts))
        words = arrays["bits"].long().view(-1, view.words)
        place = torch.cat([positions_of(w, view) for w in words]) if len(words) else at
        return {ITEM: item_of[tile], LANE: tile, LEAF: at, POSITION: place}
    if view.sides:
        tile = at // view.volume
        return {ITEM: item_of[tile], LANE: tile, LEAF: at, POSITION: at % view.volume}
    if not view.blocks:
        return {ITEM: item_of, LANE: at, LEAF: at}
    block_ptr = arrays["block_ptr"].long()
    block = torch.repeat_interleave(torch.arange(block_ptr.numel() - 1, device=device), torch.diff(block_ptr))
    behind = at - block_ptr[block]
    fiber = block * view.lanes + behind % view.lanes
    live = behind // view.lanes < arrays["lane_len"].long()[fiber]
    return {ITEM: item_of[block][live], LANE: fiber[live], LEAF: at[live]}


def _same(found: torch.Tensor, positions: torch.Tensor, coords: torch.Tensor, what: str) -> None:
    nnz = coords.shape[1]
    _require(found.shape == coords.shape, f"{what}: shape {tuple(found.shape)}, expected {tuple(coords.shape)}")
    order = torch.argsort(positions)
    whole = torch.equal(positions[order], torch.arange(nnz, device=positions.device))
    _require(whole, f"{what}: the positions are not those of all {nnz} nonzeros, once each")
    _require(torch.equal(found[:, order], coords), f"{what}: coordinates differ from those packed")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise FormatError(message)
