"""Masks of attention: which pairs meet, their tiles and entries, and attention over them on a CPU."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.functional import scaled_dot_product_attention

import sparsetc as stc
from sparsetc import masks
from sparsetc.maps import mask_tiles
from sparsetc.maps.pairs import pattern_of

CPU = torch.device("cpu")
WRITTEN: dict[str, tuple[masks.Mask, Callable[[Any, Any], Any]]] = {
    "causal": (masks.causal(), lambda i, j: j <= i),
    "causal-offset": (masks.causal(2), lambda i, j: j <= i + 2),
    "window": (masks.sliding_window(3), lambda i, j: abs(i - j) <= 3),
    "window-uneven": (masks.sliding_window(5, 0), lambda i, j: 0 <= i - j <= 5),
    "prefix": (masks.prefix(4), lambda i, j: j < 4),
    "global": (masks.global_tokens(2), lambda i, j: i < 2 or j < 2),
    "dilated": (masks.dilated(3), lambda i, j: (i - j) % 3 == 0),
    "documents": (masks.documents([0, 4, 4, 9]), lambda i, j: (i >= 4) + (i >= 9) == (j >= 4) + (j >= 9)),
    "and": (masks.causal() & masks.dilated(2), lambda i, j: j <= i and (i - j) % 2 == 0),
    "or": (masks.causal() | masks.prefix(6), lambda i, j: j <= i or j < 6),
    "not": (~masks.causal(), lambda i, j: j > i),
    "three": (
        masks.causal() & masks.sliding_window(2) | masks.global_tokens(1),
        lambda i, j: 0 <= i - j <= 2 or not i * j,
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("shape", [(11, 13), (1, 1), (12, 5)])
def test_a_mask_is_what_it_says(name: str, shape: tuple[int, int]) -> None:
    mask, meets = WRITTEN[name]
    expected = torch.tensor([[bool(meets(i, j)) for j in range(shape[1])] for i in range(shape[0])])
    assert torch.equal(mask.dense(*shape), expected)
    assert torch.equal(mask.turned.dense(*shape[::-1]), expected.T)
    assert torch.equal(pattern_of(mask, shape, CPU).coords, expected.nonzero().T)


combined = st.recursive(
    st.sampled_from([mask for mask, _ in WRITTEN.values()]),
    lambda inner: st.one_of(
        st.builds(lambda a, b: a & b, inner, inner),
        st.builds(lambda a, b: a | b, inner, inner),
        st.builds(lambda a: ~a, inner),
    ),
    max_leaves=4,
)


@given(mask=combined, rows=st.integers(1, 200), columns=st.integers(1, 200))
def test_rectangles_err_on_the_safe_side(mask: masks.Mask, rows: int, columns: int) -> None:
    dense = mask.dense(rows, columns)
    tall, wide = torch.arange(0, rows, 7), torch.arange(0, columns, 5)
    i0, j0 = torch.cartesian_prod(tall, wide).T
    rectangle = i0, (i0 + 6).clamp(max=rows - 1), j0, (j0 + 4).clamp(max=columns - 1)
    for n, (a, b, c, d) in enumerate(torch.stack(rectangle).T.tolist()):
        inside = dense[a : b + 1, c : d + 1]
        assert bool(mask.some(rectangle)[n]) or not inside.any()
        assert not mask.full(rectangle)[n] or inside.all()
    assert torch.equal(pattern_of(mask, (rows, columns), CPU).coords, dense.nonzero().T)


def test_masks_that_are_made_alike_are_equal() -> None:
    first, second = (masks.causal() & masks.documents(torch.tensor([0, 3, 5])) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert first != masks.causal() & masks.documents([0, 3, 6])
    assert pattern_of(first, (5, 5), CPU) is pattern_of(second, (5, 5), CPU)
    before = pattern_of(first, (5, 5), CPU)
    stc.clear_cache()
    assert pattern_of(first, (5, 5), CPU) is not before


@pytest.mark.parametrize("name", WRITTEN)
def test_masks_are_pickled_and_copied(name: str) -> None:
    mask = WRITTEN[name][0].turned
    for again in (pickle.loads(pickle.dumps(mask)), copy.deepcopy(mask)):
        assert again == mask
        assert torch.equal(again.dense(9, 7), mask.dense(9, 7))


def test_what_masks_refuse() -> None:
    for call in (
        lambda: masks.sliding_window(-1),
        lambda: masks.sliding_window(1, -1),
        lambda: masks.dilated(0),
        lambda: masks.documents([1, 2]),
        lambda: masks.documents([0, 3, 2]),
        lambda: masks.documents([]),
        lambda: masks.documents([0, 1.5]),  # type: ignore[list-item]
        lambda: masks.documents(None),  # type: ignore[arg-type]
        lambda: masks.prefix("x"),  # type: ignore[arg-type]
        lambda: masks.prefix(-1),
        lambda: masks.global_tokens(None),  # type: ignore[arg-type]
        lambda: masks.dilated(2.5),  # type: ignore[arg-type]
        lambda: masks.causal("x"),  # type: ignore[arg-type]
        lambda: masks.causal().dense("x"),  # type: ignore[arg-type]
        lambda: masks.causal().dense(2, -1),
        lambda: masks.dense_mask(torch.ones(2, 2, 2, dtype=torch.bool)),
        lambda: masks.dense_mask(torch.ones(2, 2)),
        lambda: masks.dense_mask([[True]]),  # type: ignore[arg-type]
    ):
        with pytest.raises(stc.ShapeError):
            call()
    with pytest.raises(TypeError):
        masks.causal() & torch.ones(3, 3)  # type: ignore[operator]


@pytest.mark.parametrize("side", [32, 128])
def test_block_masks_of_flex_attention(side: int) -> None:
    def meets(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) & (q - k <= 100) | (k == 3)

    flex = create_block_mask(meets, None, None, 300, 260, device="cpu", BLOCK_SIZE=side)
    expected = meets(0, 0, torch.arange(300)[:, None], torch.arange(260))
    mask = masks.block_mask(flex)
    assert torch.equal(mask.dense(300, 260), expected)
    assert torch.equal(pattern_of(mask, (300, 260), CPU).coords, expected.nonzero().T)
    assert mask != masks.block_mask(flex)


def test_attention_over_a_mask() -> None:
    q, k, v = (torch.randn(2, n, 8, generator=torch.Generator().manual_seed(n)) for n in (30, 40, 40))
    mask = masks.causal(10) & masks.sliding_window(7, 10) | masks.global_tokens(2)
    expected = scaled_dot_product_attention(q, k, v, attn_mask=mask.dense(30, 40))
    torch.testing.assert_close(stc.attention(q, k, v, mask), expected)
    bias = torch.randn(int(mask.dense(30, 40).sum()))
    added = torch.full((30, 40), -torch.inf)
    added[mask.dense(30, 40)] = bias
    expected = scaled_dot_product_attention(q, k, v, attn_mask=added)
    torch.testing.assert_close(stc.attention(q, k, v, mask, bias=bias), expected)


def test_turned_tiles_are_those_of_the_turned_mask() -> None:
    mask, shape = WRITTEN["three"][0] | masks.documents([0, 40, 100]), (130, 200)
    turned = mask_tiles.turned_tiles(mask_tiles.tiles_of(mask, shape, 64, 64, CPU))
    expected = mask_tiles.tiles_of(mask.turned, shape[::-1], 64, 64, CPU)
    for one, other in zip(turned, expected, strict=True):
        (row, column, *bits), (of_row, of_column, *of_bits) = one, other
        places, order = row * 100 + column, torch.argsort(row * 100 + column)
        of_places, of_order = of_row * 100 + of_column, torch.argsort(of_row * 100 + of_column)
        assert torch.equal(places[order], of_places[of_order])
        assert all(torch.equal(a[order], b[of_order]) for a, b in zip(bits, of_bits, strict=True))
