"""Every format of the package against the conformance suite; the suite against formats that break their promises."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from math import prod

import pytest
import torch
from cases import WIDE
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsetc.errors import FormatError, PlanError
from sparsetc.formats import fiber, register_format
from sparsetc.formats.coo import Coo
from sparsetc.formats.fiber import Fiber
from sparsetc.ir.nest.coordinates import Field
from sparsetc.ir.plan import Storage
from sparsetc.packing import words
from sparsetc.packing.base import FORMATS, Packed, get_format, pack
from sparsetc.testing import PATTERNS, UNBOUNDED, check_format, pattern

SHAPES = {1: (11,), 2: (6, 9), 3: (5, 6, 7), 4: (3, 4, 5, 6), 5: (3, 1, 4, 3, 4), 6: (2, 3, 2, 3, 2, 3)}

OWN = sorted(name for name, known in FORMATS.items() if type(known).__module__.startswith("sparsetc."))
"""The package's formats."""


def check(name: str, coords: torch.Tensor, shape: tuple[int, ...], storage: Storage) -> Packed:
    """Check, unless the format says that it does not take such a storage."""
    try:
        get_format(name).view(shape, storage)
    except (FormatError, PlanError) as error:
        pytest.skip(f"{name} does not take this storage: {error}")
    return check_format(name, coords, shape, storage)


def check_full_steps(packed: Packed, unroll: int) -> None:
    """Of a block's steps in which every lane has a nonzero, as many are left as are taken together."""
    if packed.view.blocks:
        full, left = packed.arrays["block_full"], packed.unrolled(unroll).arrays["block_full"]
        assert bool((left % unroll == 0).all())
        assert bool(((full - left >= 0) & (full - left < unroll)).all())


def takes_lanes(name: str) -> bool:
    """Whether a format lets lanes share a mode."""
    try:
        return get_format(name).view((4, 4), Storage((0,), (1,), (), 4)).blocks
    except (FormatError, PlanError):
        return False


def cut(name: str, modes: tuple[int, ...], items: int, lanes: int) -> tuple[tuple[int, ...], ...] | None:
    """The modes dealt to the three levels: that many to the item, that many to the lane, the rest to the leaf."""
    if lanes and not takes_lanes(name):
        return None
    return modes[:items], modes[items : items + lanes], modes[items + lanes :]


@pytest.mark.parametrize("kind", PATTERNS)
@pytest.mark.parametrize("order", SHAPES)
@pytest.mark.parametrize("name", OWN)
def test_every_order_and_pattern(name: str, order: int, kind: str) -> None:
    shape = SHAPES[order]
    coords = pattern(kind, shape)
    for items in range(order + 1):
        for lanes in range(order + 1 - items):
            levels = cut(name, tuple(range(order)), items, lanes)
            if levels is None:
                continue
            width = (1, 4, 32)[(items + lanes) % 3]
            check(name, coords, shape, Storage(*levels, width, 3, 7, narrow=width > 1))


@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("name", OWN)
def test_every_permutation_of_modes(name: str, order: int) -> None:
    shape = SHAPES[order]
    coords = pattern("skewed", shape)
    for modes in permutations(range(order)):
        for items in range(order + 1):
            for lanes in range(order + 1 - items):
                levels = cut(name, modes, items, lanes)
                if levels is not None:
                    check(name, coords, shape, Storage(*levels, lanes=4, max_item_nnz=16, narrow=True))


@pytest.mark.parametrize("kind", ["dense", "skewed"])
@pytest.mark.parametrize("name", OWN)
def test_every_size_that_cuts(name: str, kind: str) -> None:
    shape = (4, 9, 11)
    coords = pattern(kind, shape)
    for levels in (((), (), (0, 1, 2)), ((0,), (), (1, 2)), ((0,), (1,), (2,)), ((), (0, 1), (2,))):
        if levels[1] and not takes_lanes(name):
            continue
        for lanes in (1, 4, 32):
            for longest in (0, 1, 5):
                for most in (0, 10):
                    packed = check(name, coords, shape, Storage(*levels, lanes, longest, most, lanes > 1))
                    for unroll in (1, 4):
                        check_full_steps(packed, unroll)


@pytest.mark.parametrize(
    ("shape", "kind"), [(s, k) for s in WIDE for k in (UNBOUNDED if prod(s) > 2**64 else ("corners",))], ids=str
)
@pytest.mark.parametrize("name", OWN)
def test_wide_shapes(name: str, shape: tuple[int, ...], kind: str) -> None:
    coords, order = pattern(kind, shape), len(shape)
    modes = tuple(reversed(range(order)))
    for items, lanes in ((0, 0), (1, 0), (0, 1), (1, 1), (order, 0)):
        levels = cut(name, modes, items, lanes)
        if levels is not None and items + lanes <= order:
            packed = check(name, coords, shape, Storage(*levels, lanes=4, max_item_nnz=10, narrow=True))
            if not items and not lanes and all(isinstance(c, Field) for c in packed.view.levels[2]):
                large = sum((n - 1).bit_length() for n in shape) > 70  # tiles have fewer bits
                assert any(name.endswith("word_1") for name in packed.view.arrays) or not large


@settings(max_examples=100)
@given(st.data())
def test_any_storage(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(OWN))
    order = data.draw(st.integers(1, 6))
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=order, max_size=order)))
    modes = tuple(data.draw(st.permutations(range(order))))
    items = data.draw(st.integers(0, order))
    lanes = data.draw(st.integers(0, order - items)) if takes_lanes(name) else 0
    storage = Storage(
        modes[:items],
        modes[items : items + lanes],
        modes[items + lanes :],
        lanes=data.draw(st.sampled_from([1, 2, 8, 32, 128])),
        max_fiber_len=data.draw(st.integers(0, 9)),
        max_item_nnz=data.draw(st.sampled_from([0, 1, 3, 50])),
        narrow=data.draw(st.booleans()),
    )
    unroll = data.draw(st.sampled_from([1, 2, 4]))
    kind = data.draw(st.sampled_from([p for p in sorted(PATTERNS) if p in UNBOUNDED or max(shape) ** order < 5000]))
    try:
        get_format(name).view(shape, storage)
    except (FormatError, PlanError):
        return
    packed = check_format(name, pattern(kind, shape, data.draw(st.integers(0, 99))), shape, storage)
    check_full_steps(packed, unroll)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4, 5), (1, 1), (1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("name", OWN)
def test_modes_of_size_0_and_1(name: str, shape: tuple[int, ...]) -> None:
    order = len(shape)
    for kind in ("empty", "dense"):
        check(name, pattern(kind, shape), shape, Storage((), (), tuple(range(order)), max_item_nnz=8, narrow=True))
        check(name, pattern(kind, shape), shape, Storage((0,), (), tuple(range(1, order)), lanes=2, narrow=True))


# --- words ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "bits"), [(0, 0), (1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (2**31, 31), (2**63 - 1, 63)]
)
def test_bits_of_a_mode(size: int, bits: int) -> None:
    assert words.bits_of(size) == bits


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((256, 256), torch.uint16),
        ((256, 257), torch.int32),
        ((2**15, 2**16), torch.int32),
        ((2**16, 2**16), torch.int64),
    ],
    ids=str,
)
def test_words_are_the_narrowest(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    fields = words.fields((0, 1), shape, "word")
    coords = pattern("corners", shape)
    encoded = words.encode(coords, fields, narrow=True)
    assert encoded["word"].dtype == dtype
    word = words.whole(encoded["word"])
    assert all(torch.equal(bits.of(word), coords[c.mode]) for c in fields for bits in c.fields)


def test_words_sort_as_coordinates_do() -> None:
    shape = (7, 30, 5)
    coords = pattern("skewed", shape)
    word = words.encode(coords, words.fields((0, 1, 2), shape, "word"))["word"]
    assert torch.equal(word, word.sort().values)


# --- the registry, and a suite that finds what is wrong ---------------------------------------------------------------


def test_an_unknown_format_lists_the_known_ones() -> None:
    with pytest.raises(FormatError, match=r"no format is called 'csr5'; known: .*coo, .*fiber"):
        get_format("csr5")


def test_a_panel_of_no_coordinates_is_refused() -> None:
    with pytest.raises(FormatError, match="format 'coo': panel_1 must be 1 or more, found 0"):
        pack(pattern("random", (4, 5)), (4, 5), "coo", Storage(leaf=(0, 1), params=(("panel_1", 0),)))


@pytest.mark.parametrize("item", [(), (0,), (1, 2)])
def test_nonzeros_in_panels_lie_together(item: tuple[int, ...]) -> None:
    shape, leaf = (5, 6, 7), tuple(mode for mode in range(3) if mode not in item)
    for kind in PATTERNS:
        coords = pattern(kind, shape)
        packed = check("coo", coords, shape, Storage(item, (), leaf, max_item_nnz=4, params=(("panel_2", 3),)))
        assert packed.positions is not None
        panels = coords[2, packed.positions] // 3
        assert torch.equal(panels, panels.sort().values)


def test_a_class_that_is_no_format_is_refused() -> None:
    with pytest.raises(FormatError, match="Nothing is not a format"):

        @register_format
        class Nothing:
            name = "nothing"

    assert "nothing" not in FORMATS


def test_a_storage_of_another_order_is_refused() -> None:
    with pytest.raises(FormatError, match="the storage has 3 modes, the tensor 2"):
        pack(pattern("random", (4, 5)), (4, 5), "coo", Storage(leaf=(0, 1, 2)))


@pytest.mark.parametrize("name", [name for name, format in FORMATS.items() if hasattr(format, "parameters")])
def test_a_parameter_that_a_format_does_not_know_is_refused(name: str) -> None:
    with pytest.raises(PlanError, match=f"format '{name}' has no parameter 'sides'; known: "):
        pack(pattern("random", (4, 5)), (4, 5), name, Storage((0,), (1,), params=(("sides", 2),)))


class Broken(Coo):
    """Coo, spoiled after packing."""

    name = "broken"

    def spoil(self, packed: Packed) -> Packed:
        raise NotImplementedError

    def pack(self, coords: torch.Tensor, shape: tuple[int, ...], storage: Storage) -> Packed:
        return replace(self.spoil(super().pack(coords, shape, storage)), format=self.name)


class Shifted(Broken):
    def spoil(self, packed: Packed) -> Packed:
        word = packed.arrays["word"].clone()
        word[0] ^= 1
        return replace(packed, arrays={**packed.arrays, "word": word})


class Short(Broken):
    def spoil(self, packed: Packed) -> Packed:
        return replace(packed, arrays={**packed.arrays, "item_word": packed.arrays["item_word"][:-1]})


class Missing(Broken):
    def spoil(self, packed: Packed) -> Packed:
        return replace(packed, arrays={n: a for n, a in packed.arrays.items() if n != "word"})


class Unordered(Broken):
    def spoil(self, packed: Packed) -> Packed:
        return replace(packed, positions=torch.zeros(packed.nnz, dtype=torch.int64))


class Nobody(Broken):
    def spoil(self, packed: Packed) -> Packed:
        return replace(packed, representatives=(None, None))


class Whole(Broken):
    def spoil(self, packed: Packed) -> Packed:
        assert packed.split_rows
        return replace(packed, split_rows=False)


class Surprising(Broken):
    def spoil(self, packed: Packed) -> Packed:
        return replace(
            packed,
            view=replace(packed.view, loops=tuple(replace(axis, lanes=2 * axis.lanes) for axis in packed.view.loops)),
        )


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Shifted, "what the view reads: coordinates differ"),
        (Short, "'item_word' has .* words, expected"),
        (Missing, "packed no array word"),
        (Unordered, "the positions are not those of all"),
        (Nobody, "format 'broken' gave no `representatives` of items, whose nonzeros share modes"),
        (Whole, "a row has 3 items, and split_rows is not set"),
        (Surprising, r"view\(\) promises"),
    ],
)
def test_the_suite_finds(kind: type[Broken], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, "broken", kind())
    shape = (5, 6, 7)
    with pytest.raises(FormatError, match=message):
        check_format(
            "broken", pattern("random", shape), shape, Storage((0,), (), (1, 2), lanes=4, max_item_nnz=8, narrow=True)
        )


def test_the_suite_finds_fibers_that_are_split_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    class Uncut(Fiber):
        name = "uncut"

        def pack(self, coords: torch.Tensor, shape: tuple[int, ...], storage: Storage) -> Packed:
            return replace(super().pack(coords, shape, storage), format=self.name, split_fibers=False)

    monkeypatch.setitem(FORMATS, "uncut", Uncut())
    shape = (3, 4, 9)
    for longest in (0, 9):
        check_format("uncut", pattern("dense", shape), shape, Storage((0,), (1,), (2,), 2, longest))
    with pytest.raises(FormatError, match="a fiber has 3 lanes, and split_fibers is not set"):
        check_format("uncut", pattern("dense", shape), shape, Storage((0,), (1,), (2,), 2, 4))


def test_long_rows_of_fibers_are_ordered_by_length_a_window_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fiber, "WINDOW", 16)
    shape = (3, 50, 40)
    coords = torch.nonzero(torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.15).T.contiguous()
    for item in ((), (0,)):
        lane = tuple(m for m in (0, 1) if m not in item)
        packed = check_format("fiber", coords, shape, Storage(item, lane, (2,), lanes=8, narrow=True))
        length = packed.arrays["lane_len"]
        assert length.dtype == torch.int16
        if not item:
            for own in length.split(16):
                assert bool((own[1:] <= own[:-1]).all())
            assert bool((length[1:] > length[:-1]).any())


def test_fibers_that_fill_their_lanes_have_no_padding() -> None:
    coords = torch.ones(4, 4, 6).nonzero().T
    storage = Storage((0,), (1,), (2,), lanes=4)
    full = check_format("fiber", coords, (4, 4, 6), storage)
    assert (full.padded, full.stored) == (False, full.nnz)
    assert check_format("fiber", coords[:, coords[1] < 3], (4, 4, 6), storage).padded


def test_padding_of_fibers_is_of_zeros() -> None:
    coords = torch.tensor([[1, 2, 2], [0, 0, 0], [1, 0, 3]])
    packed = pack(coords, (3, 1, 4), "fiber", Storage((), (0,), (1, 2), lanes=4))
    assert packed.positions is not None
    assert packed.arrays["lane_word"].tolist() == [2, 1, 0, 0]
    stored = torch.cat((coords[2], torch.zeros(1, dtype=torch.long)))  # the mode of size 1 takes no bits
    assert packed.arrays["word"].tolist() == stored[packed.positions].tolist()  # -1 is padding


def test_numbers_of_64_bits_pack_the_same_fibers(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many nonzeros that their places need int64: sorting fibers by length does not write over their rows."""
    coords = torch.nonzero(torch.rand(9, 12, 20, generator=torch.Generator().manual_seed(0)) < 0.3).T.contiguous()
    storage = Storage((0,), (1,), (2,), lanes=4, max_fiber_len=3, max_item_nnz=16)
    small = pack(coords, (9, 12, 20), "fiber", storage)
    monkeypatch.setattr("sparsetc.packing.base.INT32_MAX", 0)
    large = pack(coords, (9, 12, 20), "fiber", storage)
    assert large.arrays["block_ptr"].dtype == torch.int64
    for name, array in small.arrays.items():
        assert torch.equal(large.arrays[name].long(), array.long()), name
