"""Softmax over entries and attention over a pattern, against torch's over all positions with minus infinity between."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any

import map_cases
import pytest
import scipy.sparse
import torch
from map_cases import FORMS, READS, SMALL, dense_attention, form_of_attention, reading
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.functional import scaled_dot_product_attention

import sparsetc as stc
from sparsetc import pairwise, sparse_attention
from sparsetc.maps import pairs, scores, torch_walk

F64 = torch.float64


TILES = [*((name, "") for name in map_cases.PATTERNS), ("entries", "one"), ("blocks-of-32", "one")]


@pytest.mark.parametrize(("name", "bias"), TILES)
def test_matrices_of_whole_windows(
    name: str, bias: str, poisoned: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pairs, "ENTRY", 1e9)
    monkeypatch.setattr(torch_walk, "CACHED", 1)  # a head at a time
    given, meets = map_cases.PATTERNS[name]()
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, n, 5, dtype=F64, generator=g).requires_grad_() for n in (*meets.shape, meets.shape[1]))
    added, whole = None, None
    if bias:
        added = torch.randn(int(meets.sum()), dtype=F64, generator=g).requires_grad_()
        whole = torch.zeros(meets.shape, dtype=F64).index_put(tuple(meets.nonzero().T), added)
    with caplog.at_level(logging.DEBUG, "sparsetc"):
        found = stc.attention(q, k, v, given, scale=0.3, bias=added)
    assert "attention runs in one kernel" in caplog.text
    expected = dense_attention(q, k, v, meets, 0.3, whole)
    torch.testing.assert_close(found, expected)
    inputs = [q, k, v] if added is None else [q, k, v, added]
    weights = torch.randn(found.shape, dtype=F64, generator=g)
    both = [torch.autograd.grad(y, inputs, weights) for y in (found, expected)]
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other)


def test_products_of_windows_are_in_the_precision_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    q, seen, plain = torch.randn(2, 70, 16), set[str](), torch.bmm

    def watched(*matrices: torch.Tensor) -> torch.Tensor:
        seen.add(torch.get_float32_matmul_precision())
        return plain(*matrices)

    monkeypatch.setattr(torch, "bmm", watched)
    for precision in ("highest", "medium"):
        stc.attention(q, q, q, stc.masks.causal(), precision=precision)
    assert seen == {"highest", "medium"}
    assert torch.get_float32_matmul_precision() == "highest"


def test_autocast_rounds_no_scores() -> None:
    q = torch.randn(2, 70, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    expected = scaled_dot_product_attention(q, q, q, is_causal=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = stc.attention(q, q, q, stc.masks.causal())
    torch.testing.assert_close(found, expected)
    both = [torch.autograd.grad(y.square().sum(), q)[0] for y in (found, expected)]
    torch.testing.assert_close(*both, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", FORMS)
def test_forms_by_matrices_of_windows(
    name: str, poisoned: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pairs, "ENTRY", 1e9)
    both = form_of_attention(name, torch.device("cpu"))
    with caplog.at_level(logging.DEBUG, "sparsetc"):
        found = both()
    assert "attention runs in one kernel" in caplog.text
    monkeypatch.setattr(pairwise, "_unfit", lambda options: "asked for")
    for one, other in zip(found, both(), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("cached", [1 << 19, 1 << 13])
@pytest.mark.parametrize("form", ["blocks", "entries", "biased", "by-head"])
def test_windows_of_as_many_columns_together(form: str, cached: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_walk, "CACHED", cached)
    monkeypatch.setitem(pairs.NATIVE_PRICES, 64, 1e9)
    monkeypatch.setattr(pairs, "ENTRY", 1.0)
    monkeypatch.setattr(pairs, "LOOPED", 1.0)
    sizes, plain = list[int](), torch_walk.TorchWalk._compute

    def watched(walk: Any, windows: Any, *tensors: Any) -> None:
        sizes.append(windows.size)
        plain(walk, windows, *tensors)

    monkeypatch.setattr(torch_walk.TorchWalk, "_compute", watched)
    g = torch.Generator().manual_seed(0)
    first = torch.randint(6, (2, 8, 1), generator=g)
    table = torch.zeros(2, 8, 8).scatter_(2, torch.cat((first, first + 2), 2), 1.0).bool()
    meets = table.repeat_interleave(32, 1).repeat_interleave(32, 2)
    if form != "blocks":
        meets &= torch.rand(meets.shape, generator=g) < 0.6
    if form != "by-head":
        meets = meets[0]
    given = stc.SparseTensor.from_dense(meets.double(), blocksize=(32, 32) if form == "blocks" else None)
    q, k, v = (torch.randn(2, 256, 8, dtype=F64, generator=g).requires_grad_() for _ in range(3))
    inputs, bias = [q, k, v], None
    if form == "biased":
        inputs.append(torch.randn(2, given.nnz, dtype=F64, generator=g).requires_grad_())
        bias = torch.zeros(2, 256, 256, dtype=F64).masked_scatter(meets.expand(2, -1, -1), inputs[3])
    found = stc.attention(q, k, v, given, bias=None if bias is None else inputs[3])
    scores = q @ k.mT * 8**-0.5 + (0 if bias is None else bias)
    expected = torch.softmax(scores.masked_fill(~meets, -torch.inf), -1) @ v
    upstream = torch.randn(found.shape, dtype=F64, generator=g)
    both = (torch.autograd.grad(result, inputs, upstream) for result in (found, expected))
    for one, other in zip((found, *next(both)), (expected, *next(both)), strict=True):
        torch.testing.assert_close(one, other)
    assert (max(sizes) == 8) == (cached > 1 << 13)


def filled(*shape: int, share: float = 0.5, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g, dtype=F64) * (torch.rand(shape, generator=g) < share)


def reference(x: torch.Tensor, stored: torch.Tensor, dim: int, log: bool = False) -> torch.Tensor:
    full = torch.where(stored, x, -torch.inf)
    found = torch.log_softmax(full, dim) if log else torch.softmax(full, dim)
    return torch.where(stored, found, 0.0)


# -- softmax ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(("shape", "dim"), [((6,), 0), ((5, 7), 1), ((5, 7), 0), ((4, 5, 6), 1), ((4, 5, 6), -1)])
def test_softmax(shape: tuple[int, ...], dim: int, log: bool) -> None:
    dense = filled(*shape)
    x, soft = stc.SparseTensor.from_dense(dense), stc.log_softmax if log else stc.softmax
    found = soft(x, dim)
    assert found.pattern is x.pattern
    torch.testing.assert_close(found.to_dense(), reference(dense, dense != 0, dim, log))
    assert torch.autograd.gradcheck(lambda v: soft(x.with_values(v), dim).values, x.values.clone().requires_grad_())
    assert torch.autograd.gradgradcheck(lambda v: soft(x.with_values(v), dim).values, x.values.clone().requires_grad_())


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_dense_modes_have_a_softmax_each(dim: int) -> None:
    stored = filled(5, 6) != 0
    values = torch.randn(int(stored.sum()), 3, dtype=F64)
    x = stc.SparseTensor(stored.nonzero().T, values, (5, 6, 3))
    found = stc.softmax(x, dim).to_dense()
    torch.testing.assert_close(found, reference(x.to_dense(), stored[:, :, None].expand(5, 6, 3), dim))


def test_blocks_duplicates_and_nothing() -> None:
    dense = filled(8, 8, share=1.0)
    blocks = stc.SparseTensor.from_torch(dense.to_sparse_bsr((2, 4)))
    torch.testing.assert_close(stc.softmax(blocks, 1).to_dense(), torch.softmax(dense, 1))
    twice = stc.SparseTensor([[0, 0, 0], [1, 1, 2]], torch.tensor([1.0, 2.0, 3.0]), (2, 3), coalesce=False)
    torch.testing.assert_close(stc.softmax(twice, 1).to_dense(), torch.tensor([[0, 0.5, 0.5], [0, 0, 0]]))
    empty = stc.SparseTensor(torch.zeros((2, 0), dtype=torch.long), torch.zeros(0), (0, 4))
    assert stc.softmax(empty).nnz == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_large_and_infinite_values(dtype: torch.dtype) -> None:
    x = stc.SparseTensor([[0, 0, 1, 1], [0, 1, 0, 1]], torch.tensor([6e4, 6e4, -torch.inf, 1.0], dtype=dtype), (2, 2))
    found = stc.softmax(x, 1)
    assert found.dtype == dtype
    torch.testing.assert_close(found.to_dense(), torch.tensor([[0.5, 0.5], [0.0, 1.0]], dtype=dtype))


def test_a_row_of_minus_infinity_is_as_one_without_entries() -> None:
    values = torch.tensor([-torch.inf, -torch.inf, 1.0, 3.0], dtype=F64, requires_grad=True)
    x = stc.SparseTensor([[0, 0, 1, 1], [0, 1, 0, 1]], values, (2, 2))
    soft, log = stc.softmax(x, 1).values, stc.log_softmax(x, 1).values
    torch.testing.assert_close(soft[:2], torch.zeros(2, dtype=F64))
    torch.testing.assert_close(soft[2:], torch.softmax(values[2:], 0))
    assert log[:2].tolist() == [-torch.inf, -torch.inf]
    (found,) = torch.autograd.grad(soft[0] + soft[3] ** 2, values)
    (expected,) = torch.autograd.grad(torch.softmax(values[2:], 0)[1] ** 2, values)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("log", [False, True])
def test_forward_mode(log: bool) -> None:
    dense, moved = filled(5, 7), filled(5, 7, share=1.0, seed=1)
    x, soft = stc.SparseTensor.from_dense(dense), stc.log_softmax if log else stc.softmax
    at, along = x.values, moved[dense != 0]
    _, found = torch.func.jvp(lambda v: soft(x.with_values(v), 1).values, (at,), (along,))
    stored = dense != 0
    full, moved = torch.where(stored, dense, -torch.inf), torch.where(stored, moved, 0.0)
    weights = torch.softmax(full, 1)
    mean = (weights * moved).sum(1, keepdim=True)
    expected = moved - mean if log else weights * (moved - mean)
    torch.testing.assert_close(found, expected[stored])
    jacobian = torch.func.jacfwd(lambda v: soft(x.with_values(v), 1).values)(at)
    torch.testing.assert_close(jacobian @ along, found)


def test_what_softmax_refuses() -> None:
    x = stc.SparseTensor.from_dense(torch.eye(3))
    with pytest.raises(stc.ShapeError, match="no mode 2"):
        stc.softmax(x, 2)
    with pytest.raises(stc.DtypeError, match="floating point"):
        stc.log_softmax(x.to(torch.int32))


# -- attention ----------------------------------------------------------------------------------------------------


def operands(heads: tuple[int, ...] = (), rows: int = 10, columns: int = 12) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    sizes = (rows, 8), (columns, 8), (columns, 5)
    return [torch.randn(*heads, *size, generator=g, dtype=F64).requires_grad_() for size in sizes]


@pytest.mark.parametrize("heads", [(), (3,), (2, 3)])
def test_attention_and_its_gradients(heads: tuple[int, ...]) -> None:
    meets = filled(10, 12) != 0
    meets[4] = False  # a query that meets nothing
    given, bias = operands(heads), filled(10, 12, share=1.0)
    found = stc.attention(*given, stc.SparseTensor.from_dense(meets.double()), scale=0.3, bias=bias[meets])
    mask = torch.where(meets, bias, -torch.inf)
    expected = scaled_dot_product_attention(*given, attn_mask=mask, scale=0.3)
    kept = [r for r in range(10) if r != 4]
    torch.testing.assert_close(found[..., kept, :], expected[..., kept, :])
    assert not found[..., 4, :].any()
    both = (torch.autograd.grad(y[..., kept, :].square().sum(), given) for y in (found, expected))
    for own, other in zip(*both, strict=True):
        torch.testing.assert_close(own, other)


def test_results_and_gradients_have_the_order_of_modes_of_their_operands() -> None:
    meets = stc.masks.dense_mask(filled(10, 10) != 0)
    q, k, v = (torch.randn(10, 3, 8, dtype=F64).transpose(0, 1).requires_grad_() for _ in range(3))
    found = stc.attention(q, k, v, meets)
    for one in (found, *torch.autograd.grad(found.sum(), (q, k, v))):
        assert one.transpose(0, 1).is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("deviation", [1.0, 2.0, 4.0])
def test_scores_of_16_bits_are_not_rounded(dtype: torch.dtype, deviation: float) -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v, weights = (
        torch.randn(2, 96, 64, generator=g).mul(size).to(dtype) for size in (deviation, deviation, 1, 1)
    )
    meets = torch.rand(96, 96, generator=g) < 0.3
    meets.fill_diagonal_(True)
    bias = torch.randn(int(meets.sum()), generator=g).to(dtype)
    mask = torch.full((96, 96), -torch.inf, dtype=F64).index_put_(tuple(meets.nonzero().T), bias.double())
    given = [one.clone().requires_grad_() for one in (q, k, v)]
    exact = [one.double().requires_grad_() for one in (q, k, v)]
    found = stc.attention(*given, stc.SparseTensor.from_dense(meets.float()), bias=bias)
    expected = torch.softmax(exact[0] @ exact[1].mT / 8 + mask, -1) @ exact[2]
    assert found.dtype == dtype
    close = {"rtol": torch.finfo(dtype).eps, "atol": 1e-4}  # one rounding, of the result
    torch.testing.assert_close(found, expected.to(dtype), **close)
    both = torch.autograd.grad(found, given, weights), torch.autograd.grad(expected, exact, weights.double())
    for own, other in zip(*both, strict=True):
        torch.testing.assert_close(own, other.to(dtype), **close)


def test_scores_past_the_largest_of_float16() -> None:
    q, v = torch.full((3, 64), 60.0, dtype=torch.float16), torch.rand(3, 2).half()  # products of 230,400
    found = stc.attention(q, q, v, stc.SparseTensor.from_dense(torch.ones(3, 3)))
    torch.testing.assert_close(found, v.float().mean(0).half().expand(3, 2), rtol=1e-3, atol=0)


def test_what_is_not_met_has_no_part() -> None:
    """Keys that a query does not meet, whatever they hold; a bias of minus infinity; entries that are stored zeros."""
    q, k, v = operands()
    meets = filled(10, 12) != 0
    meets[:, 3], meets[4] = False, False
    pattern = stc.SparseTensor.from_dense(meets.double())
    expected = stc.attention(q, k, v, pattern)
    bad = torch.arange(12)[:, None] == 3
    found = stc.attention(q, k.masked_fill(bad, torch.nan), v.masked_fill(bad, torch.inf), pattern)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(stc.attention(q, k, v, pattern.map(torch.zeros_like)), expected)

    full = stc.SparseTensor.from_dense(torch.ones(10, 12))
    mask = torch.where(meets, 0.0, -torch.inf).double()  # row 4 is minus infinity alone
    found = stc.attention(q, k, v, full, bias=mask.flatten())
    theirs = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found, theirs)
    both = (torch.autograd.grad(y.square().sum(), (q, k, v)) for y in (found, expected))
    for own, other in zip(*both, strict=True):
        torch.testing.assert_close(own, other)


def test_a_scale_of_0_gives_means() -> None:
    q, k, v = operands()
    found = stc.attention(q, k, v, stc.SparseTensor.from_dense(torch.ones(10, 12)), scale=0)
    torch.testing.assert_close(found, v.mean(0).expand(10, 5))


@pytest.mark.parametrize("heads", [(), (2,), (2, 0)])
@pytest.mark.parametrize(
    ("rows", "columns", "depth", "width"), [(0, 3, 2, 2), (3, 0, 2, 2), (3, 3, 0, 2), (3, 3, 2, 0)]
)
def test_sides_of_size_0(heads: tuple[int, ...], rows: int, columns: int, depth: int, width: int) -> None:
    sizes = (rows, depth), (columns, depth), (columns, width)
    given = [torch.rand(*heads, *size, dtype=F64).requires_grad_() for size in sizes]
    pairs = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).T
    pattern = stc.SparseTensor(pairs, torch.ones(rows * columns), (rows, columns))
    found = stc.attention(*given, pattern)
    expected = given[2].mean(-2, keepdim=True).nan_to_num(0.0).expand(*heads, rows, width)
    if depth:
        expected = torch.softmax(given[0] @ given[1].mT / depth**0.5, -1) @ given[2]
    torch.testing.assert_close(found, expected)
    assert [g.shape for g in torch.autograd.grad(found.sum(), given)] == [one.shape for one in given]


def test_forward_mode_of_attention() -> None:
    given, pattern = [one.detach() for one in operands()], stc.SparseTensor.from_dense(torch.ones(10, 12).tril())
    moved = [one.cos() for one in given]
    mask = torch.ones(10, 12).tril().bool()
    _, found = torch.func.jvp(lambda *a: stc.attention(*a, pattern), tuple(given), tuple(moved))

    def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.softmax((q @ k.T / 8**0.5).masked_fill(~mask, -torch.inf), 1) @ v

    torch.testing.assert_close(found, torch.func.jvp(dense, tuple(given), tuple(moved))[1])


# -- forms of torch's attention -------------------------------------------------------------------------------------


def four(fewer: int = 4) -> list[torch.Tensor]:
    """Queries of two batches and four heads; keys and values maybe of fewer heads."""
    q, k, v = operands((2, 4))
    return [q, *(one[:, :fewer].detach().requires_grad_() for one in (k, v))]


def check_attention(given: list[torch.Tensor], pattern: Any, meets: torch.Tensor, **form: Any) -> None:
    """Beside torch, with gradients; a query that meets nothing gets zeros."""
    q, k, v = given
    group = q.shape[-3] // k.shape[-3]
    meets = meets.expand(*q.shape[:-1], k.shape[-2])
    scores = q @ k.repeat_interleave(group, -3).mT / q.shape[-1] ** 0.5
    scores = torch.where(meets, scores, -torch.inf).where(meets.any(-1, keepdim=True), 0.0)
    weights = torch.where(meets, scores.softmax(-1), 0.0)
    expected = weights @ v.repeat_interleave(group, -3)
    found = stc.attention(q, k, v, pattern, **form)
    torch.testing.assert_close(found, expected)
    both = (torch.autograd.grad(y.square().sum(), given) for y in (found, expected))
    for own, other in zip(*both, strict=True):
        torch.testing.assert_close(own, other)


PAIRS = torch.rand(2, 4, 10, 12, generator=torch.Generator().manual_seed(3)) < 0.5
STACKS: dict[str, tuple[Any, torch.Tensor]] = {
    "everything": (None, torch.ones((), dtype=torch.bool)),
    "dense": (PAIRS[0, 0], PAIRS[0, 0]),
    "dense-by-head": (PAIRS[0], PAIRS[0]),
    "dense-by-batch": (PAIRS[:, :1], PAIRS[:, :1]),
    "dense-by-both": (PAIRS, PAIRS),
    "padding": (PAIRS[:, :1, :1], PAIRS[:, :1, :1]),
    "sparse-by-head": (stc.SparseTensor.from_dense(PAIRS[0].double()), PAIRS[0]),
    "sparse-by-batch": (stc.SparseTensor.from_dense(PAIRS[:, :1].double()), PAIRS[:, :1]),
    "sparse-by-both": (PAIRS.double().to_sparse(), PAIRS),
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("fewer", [1, 2, 4])
@pytest.mark.parametrize("name", STACKS)
def test_patterns_by_head_and_batch_and_grouped_heads(name: str, fewer: int, is_causal: bool) -> None:
    pattern, meets = STACKS[name]
    if is_causal:
        meets = meets & torch.ones(10, 12, dtype=torch.bool).tril()
    check_attention(four(fewer), pattern, meets, enable_gqa=True, is_causal=is_causal)


def test_block_masks_by_head_and_batch() -> None:
    def meets(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q + b * 3 >= k * (h + 1)) | (q // 7 == k // 5)

    i, j = torch.arange(10)[:, None], torch.arange(12)
    for batches, heads in ((2, 4), (1, 4), (2, 1)):
        mask = create_block_mask(meets, batches, heads, 10, 12, device="cpu", BLOCK_SIZE=4)
        whole = torch.stack([torch.stack([meets(b, h, i, j) for h in range(heads)]) for b in range(batches)])
        check_attention(four(), mask, whole)


def test_log_sums_and_their_gradients() -> None:
    given, meets = four(), PAIRS[0].clone()
    meets[:, 4] = False
    result, lse = stc.attention(*given, meets, return_lse=True)
    scores = (given[0] @ given[1].mT / 8**0.5).masked_fill(~meets, -torch.inf)
    kept = [r for r in range(10) if r != 4]
    torch.testing.assert_close(lse[..., kept], scores.logsumexp(-1)[..., kept])
    assert torch.isinf(lse[..., 4]).all()
    expected = scores[..., kept, :].softmax(-1) @ given[2]
    totals = (
        result[..., kept, :].sum() + lse[..., kept].sin().sum(),
        expected.sum() + scores.logsumexp(-1)[..., kept].sin().sum(),
    )
    for own, other in zip(*(torch.autograd.grad(y, given) for y in totals), strict=True):
        torch.testing.assert_close(own, other)


def test_dropout_drops_a_share_and_keeps_the_mean() -> None:
    q, k, v = torch.zeros(3, 50, 4), torch.zeros(3, 400, 4), torch.ones(3, 400, 1)
    torch.manual_seed(0)
    found = stc.attention(q, k, v, dropout_p=0.25)
    again = stc.attention(q, k, v, dropout_p=0.25)
    assert float(found.mean()) == pytest.approx(1.0, abs=0.01)
    assert float(found.std()) == pytest.approx((1 / 3 / 400) ** 0.5, rel=0.3)
    assert not torch.equal(found, again)
    assert not stc.attention(q, k, v, dropout_p=1.0).any()
    torch.manual_seed(0)
    torch.testing.assert_close(stc.attention(q, k, v, dropout_p=0.25), found)
    with pytest.raises(stc.ShapeError, match="from 0 to 1"):
        stc.attention(q, k, v, dropout_p=1.5)


def test_jagged_nested_tensors() -> None:
    lengths = [3, 0, 5, 2]
    q, k, v = (
        torch.nested.nested_tensor([torch.randn(n, 4, 8, dtype=F64) for n in lengths], layout=torch.jagged).transpose(
            1, 2
        )
        for _ in range(3)
    )
    offsets = q.offsets()
    q, k, v = (torch.nested.nested_tensor_from_jagged(t.values(), offsets, jagged_dim=2) for t in (q, k, v))
    found = stc.attention(q, k, v, is_causal=True)
    for one, *parts in zip(found.unbind(), q.unbind(), k.unbind(), v.unbind(), strict=True):
        torch.testing.assert_close(one, scaled_dot_product_attention(*parts, is_causal=True))
    mask = stc.masks.documents(offsets) & stc.masks.sliding_window(1)
    whole = stc.attention(q.values(), k.values(), v.values(), mask)
    torch.testing.assert_close(stc.attention(q, k, v, stc.masks.sliding_window(1)).values(), whole)


def test_rows_of_blocks() -> None:
    blocks = torch.tensor([[1, 0, 1], [0, 1, 1]], dtype=torch.bool)
    rows = blocks.float().to_sparse_csr()
    pattern = (rows.crow_indices(), rows.col_indices(), 5, 4)
    check_attention(four(), pattern, blocks.repeat_interleave(5, 0).repeat_interleave(4, 1))


def test_what_does_not_follow_the_heads_is_refused() -> None:
    given = [one.reshape(2, 2, 2, *one.shape[-2:]) for one in four()]
    with pytest.raises(stc.ShapeError, match="the first modes, or of the last"):
        stc.attention(*given, PAIRS[:, :2].reshape(2, 1, 2, 10, 12))
    with pytest.raises(stc.ShapeError, match="must broadcast to"):
        stc.attention(*given, PAIRS[0, 0, :5])
    with pytest.raises(stc.ShapeError, match="enable_gqa a divisor"):
        stc.attention(*four(2), None)


SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=F64)
SCORES: dict[str, Callable[..., Any]] = {
    "alibi": lambda score, b, h, i, j: score + (j - i) * 0.5 ** (h + 1),
    "softcap": lambda score, b, h, i, j: torch.tanh(score / 5) * 5,
    "batch": lambda score, b, h, i, j: torch.where(i - j < 3 + b, score * 2, score - 1),
    "reads a tensor": lambda score, b, h, i, j: score + (j - i) * SLOPES[h],
    "reads by query and key": lambda score, b, h, i, j: score + SLOPES[(i - j) % 4],
    "remainders": lambda score, b, h, i, j: score + (41 * (i - j)) % 41 + (i + j) % 5,  # 1 / 41 is rounded
    "quotients": lambda score, b, h, i, j: torch.where(i // 3 == torch.div(j, 4, rounding_mode="floor"), score, -9.0),
    "floors": lambda score, b, h, i, j: score + ((i - j) * 41 / 41).floor() + (((i - j) * 41 / 41) == 2) * 0.5,
    "truncated": lambda score, b, h, i, j: score + torch.div(i - j, 4, rounding_mode="trunc"),
    "bits": lambda score, b, h, i, j: torch.where(((i & 1) == (j & 1)) & (i > 2), score, score - 1),
}


@pytest.mark.parametrize("name", SCORES)
def test_a_function_of_scores(name: str) -> None:
    given, function = four(2), SCORES[name]
    b, h, i, j = (torch.arange(n).view(-1, *[1] * (3 - k)) for k, n in enumerate((2, 4, 10, 12)))
    scores = function(given[0] @ given[1].repeat_interleave(2, 1).mT / 8**0.5, b, h, i, j)
    expected = scores.masked_fill(~PAIRS[0], -torch.inf).softmax(-1) @ given[2].repeat_interleave(2, 1)
    found = stc.attention(*given, PAIRS[0], bias=function, enable_gqa=True)
    torch.testing.assert_close(found, expected)
    both = (torch.autograd.grad(y.square().sum(), given) for y in (found, expected))
    for own, other in zip(*both, strict=True):
        torch.testing.assert_close(own, other)


@pytest.mark.parametrize("name", READS)
def test_a_function_of_scores_that_reads_a_tensor(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pairs, "ENTRY", 1e9)
    monkeypatch.setattr(scores, "AT_ONCE", 1000 if name == "distances" else scores.AT_ONCE)
    inputs, function, dense = reading(name, (2, 2))
    with caplog.at_level(logging.DEBUG, "sparsetc"):
        found = stc.attention(*inputs[:3], SMALL, bias=function)
    assert "attention runs in one kernel" in caplog.text
    expected = dense(SMALL)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    both = (torch.autograd.grad(y.square().sum(), inputs) for y in (found, expected))
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other.to(one.dtype), rtol=1e-4, atol=1e-4)


def test_what_a_function_of_scores_reads_may_change() -> None:
    q, k, v = (torch.randn(2, 10, 4, dtype=F64, generator=torch.Generator().manual_seed(n)) for n in range(3))
    slopes, offsets = torch.rand(2, dtype=F64), torch.rand(10, dtype=F64)
    distance = torch.arange(10) - torch.arange(10)[:, None]

    def check() -> None:
        found = stc.attention(q, k, v, bias=lambda s, b, h, i, j: s + slopes[h] * (j - i) + offsets[j])
        bias = slopes[:, None, None] * distance + offsets
        torch.testing.assert_close(found, scaled_dot_product_attention(q, k, v, bias))

    for change in (lambda: None, lambda: None, lambda: slopes.mul_(2), lambda: offsets.data.neg_()):
        change()
        check()
    slopes.data = torch.rand(2, dtype=F64)
    check()
    with torch.inference_mode():
        check()
    offsets = torch.rand(10, dtype=F64)
    check()


class Alibi(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slopes = torch.nn.Parameter(torch.rand(4, dtype=F64))

    def biased(self, score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score + self.slopes[h] * (j - i)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return stc.attention(q, k, v, stc.masks.causal(), bias=self.biased, enable_gqa=True)


def test_one_function_of_several_modules_reads_each_ones_tensor() -> None:
    q, k, v = four(2)
    for layer in (Alibi(), Alibi()):
        found = []
        for _ in range(2):
            found.append(layer(q, k, v))
            distance = torch.arange(12) - torch.arange(10)[:, None]
            bias = layer.slopes[:, None, None] * distance
            mask = torch.where(distance <= 0, bias, -torch.inf)
            torch.testing.assert_close(found[-1], scaled_dot_product_attention(q, k, v, mask, enable_gqa=True))
            with torch.no_grad():
                layer.slopes.mul_(2)
        layer.slopes = torch.nn.Parameter(torch.zeros(4, dtype=F64))
        plain = stc.attention(q, k, v, stc.masks.causal(), enable_gqa=True)
        torch.testing.assert_close(layer(q, k, v), plain)


def test_a_function_that_reads_a_tensor_in_a_program_and_a_transform() -> None:
    q, k, v = four()
    layer = Alibi()
    with torch.no_grad():
        program = torch.export.export(layer, (q.detach(), k.detach(), v.detach())).module()
        torch.testing.assert_close(program(q, k, v), layer(q, k, v))

    def by_slopes(slopes: torch.Tensor) -> Any:
        return stc.attention(q, k, v, stc.masks.causal(), bias=lambda s, b, h, i, j: s + slopes[h] * (j - i))

    found = torch.func.vmap(by_slopes)(layer.slopes.detach().expand(2, -1))
    torch.testing.assert_close(found[1], layer(q, k, v))


def test_what_is_read_for_a_function_goes_at_once() -> None:
    table, (q, k, v) = torch.rand(4, 23), [t.detach() for t in four()]
    for _ in range(2):
        gc.collect()
        stc.attention(q, k, v, stc.masks.causal(), bias=lambda s, b, h, i, j: s + table[h, i - j])
    assert not gc.collect()


BY_HEADS = {
    "keys that heads share": (4, 2, None),
    "a pattern a head": (4, 4, [stc.masks.causal(), stc.masks.sliding_window(2)] * 2),
    "in order": (4, 4, None),
}


@pytest.mark.parametrize("name", BY_HEADS)
def test_numbers_by_distance_are_listed_for_no_entry_unless_sums_are_ordered(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    heads, fewer, of_heads = BY_HEADS[name]
    g = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(2, n, 70, 8, dtype=F64, generator=g).requires_grad_() for n in (heads, fewer, fewer))
    table = torch.randn(heads, 70, dtype=F64, generator=g).requires_grad_()  # of causal distances alone
    meets = torch.stack([one.dense(70) for one in of_heads or [stc.masks.causal()] * heads])
    given = stc.SparseTensor.from_dense(meets.double()) if of_heads else stc.masks.causal()
    if of_heads:
        table = torch.cat((table, table.flip(1)), 1).detach().requires_grad_()
    calls: list[Any] = []
    listed = sparse_attention.of_entries
    monkeypatch.setattr(sparse_attention, "of_entries", lambda given: calls.append(given) or listed(given))
    monkeypatch.setattr(pairs, "ENTRY", 1e9)
    with caplog.at_level(logging.DEBUG, "sparsetc"):
        settings: Any = {"deterministic": True} if name == "in order" else {}
        found = stc.attention(
            q, k, v, given, bias=lambda s, b, h, i, j: s + table[h, i - j], enable_gqa=True, **settings
        )
    assert "attention runs in one kernel" in caplog.text
    assert bool(calls) == (name == "in order")
    distance = torch.arange(70)[:, None] - torch.arange(70)
    bias = table[:, distance.clamp(min=-70 * bool(of_heads))].masked_fill(~meets, -torch.inf)
    expected = scaled_dot_product_attention(q, k, v, bias, enable_gqa=True)
    torch.testing.assert_close(found, expected)
    both = (torch.autograd.grad(y.square().sum(), (q, k, v, table)) for y in (found, expected))
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other)


TWO_NUMBERS = {
    "remainders": ((7, 5), lambda t: lambda s, b, h, i, j: s + t[i % 7, j % 5]),
    "windows of an image": (
        (2, 11, 15),
        lambda t: lambda s, b, h, i, j: s + t[h, i // 8 - j // 8 + 5, i % 8 - j % 8 + 7],
    ),
    "clamped": ((8, 9, 2), lambda t: lambda s, b, h, i, j: s * t[(i - j).clamp(-9, 3) // 2, i % 9, h].sigmoid()),
}


@pytest.mark.parametrize("name", TWO_NUMBERS)
def test_tables_by_two_whole_numbers_are_listed_for_no_entry(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, biased = TWO_NUMBERS[name]
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 48, 8, dtype=F64, generator=g).requires_grad_() for _ in "qkv")
    table = torch.randn(shape, dtype=F64, generator=g).requires_grad_()
    monkeypatch.setattr(sparse_attention, "of_entries", None)
    monkeypatch.setattr(pairs, "ENTRY", 1e9)
    found = stc.attention(q, k, v, stc.masks.sliding_window(20), bias=biased(table))
    i, j, h = torch.arange(48)[:, None], torch.arange(48), torch.arange(2)[:, None, None]
    scores = biased(table)(q @ k.mT / 8**0.5, 0, h, i, j).masked_fill((i - j).abs() > 20, -torch.inf)
    expected = scores.softmax(-1) @ v
    torch.testing.assert_close(found, expected)
    both = (torch.autograd.grad(y.square().sum(), (q, k, v, table)) for y in (found, expected))
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other)


def test_what_a_function_of_scores_cannot_read() -> None:
    table = torch.rand(5)
    with pytest.raises(IndexError):
        stc.attention(*four(), stc.masks.causal(), bias=lambda s, b, h, i, j: s + table[i])
    with pytest.raises(stc.DeviceError, match="reads a tensor that is not on cpu"):
        stc.attention(*four(), None, bias=lambda s, b, h, i, j: s + META[h])


META = torch.empty(4, device="meta")
exp = torch.empty(4, device="meta")
"""Of the name of a method that a function calls."""


def test_a_tensor_elsewhere_that_is_not_read() -> None:
    q, k, v = four()
    found = stc.attention(q, k, v, stc.masks.causal(), bias=lambda s, b, h, i, j: s + SLOPES[h].exp())
    torch.testing.assert_close(found, stc.attention(q, k, v, stc.masks.causal()))


# -- graphs -----------------------------------------------------------------------------------------------------------

WINDOW = stc.masks.causal() & stc.masks.sliding_window(3)
BY_HEAD = stc.SparseTensor.from_dense(PAIRS[0].double())
ONE = stc.SparseTensor.from_dense(PAIRS[0, 0].double())
GRAPHS: dict[str, Callable[..., Any]] = {
    "mask": lambda q, k, v: stc.attention(2 * q, k, v, WINDOW).sin(),
    "by-head": lambda q, k, v: stc.attention(q, k, v, BY_HEAD) * 2,
    "bias": lambda q, k, v: stc.attention(q, k, v, ONE, bias=v[0, 0, 0, 0].expand(ONE.nnz)),
    "log-sums": lambda q, k, v: sum(t.sin().sum() for t in stc.attention(q, k, v, is_causal=True, return_lse=True)),
    "grouped": lambda q, k, v: stc.attention(q, k[:, :2], v[:, :2], stc.masks.causal(), enable_gqa=True),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_attention_in_a_full_graph(name: str) -> None:
    given, function = four(), GRAPHS[name]
    found, expected = torch.compile(function, backend="aot_eager", fullgraph=True)(*given), function(*given)
    torch.testing.assert_close(found, expected)
    both = (torch.autograd.grad(y.sum(), given) for y in (found, expected))
    for own, other in zip(*both, strict=True):
        torch.testing.assert_close(own, other)


BY_BATCH = stc.SparseTensor.from_dense(PAIRS[:, :1].double())
PADDING = torch.arange(12)[None] < 9
PADDED = stc.masks.dense_mask(PADDING)
EXPORTED: dict[str, Callable[..., Any]] = {
    "mask": lambda q, k, v: stc.attention(q, k, v, WINDOW) + 1,
    "stack": lambda q, k, v: stc.attention(q, k, v, BY_BATCH),
    "table": lambda q, k, v: stc.attention(q, k, v, PADDED),
    "documents": lambda q, k, v: stc.attention(q, k, v, stc.masks.documents([0, 4, 10], [0, 6, 12]), is_causal=True),
    "logarithms": lambda q, k, v: stc.attention(q, k, v, stc.masks.prefix(4), return_lse=True)[1],
    "function": lambda q, k, v: stc.attention(q, k, v, WINDOW, bias=lambda s, b, h, i, j: s * (h + 1) - (i - j) % 3),
    "dropout": lambda q, k, v: stc.attention(q, k, v, WINDOW, dropout_p=0.5),
}


class Exported(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *given: torch.Tensor) -> Any:
        return self.function(*given)


@pytest.mark.parametrize("name", EXPORTED)
def test_attention_is_exported_as_one_node(name: str) -> None:
    """Of which any process makes a kernel, with gradients."""
    given, function = four(), EXPORTED[name]
    module = torch.export.export(Exported(function), tuple(one.detach() for one in given)).module()
    assert [str(n.target) for n in module.graph.nodes if "sparsetc" in str(n.target)] == ["sparsetc.mapped.default"]
    results = []
    for one in (module, function):
        torch.manual_seed(0)
        results.append(one(*given))
    torch.testing.assert_close(*results, check_dtype=False)  # logarithms of a node are float32
    ours, expected = (torch.autograd.grad(y.sum(), given[:2], retain_graph=True) for y in results)
    torch.testing.assert_close(ours, expected)


def test_a_program_of_attention_is_differentiated_twice() -> None:
    """And runs in batches; forward mode, whose tangents torch takes away, is refused."""

    def attend(q: torch.Tensor) -> torch.Tensor:
        return stc.attention(q, q, q, WINDOW)

    q = torch.randn(5, 4, dtype=F64, requires_grad=True)
    program = torch.export.export(Exported(attend), (q.detach(),)).module()
    curvatures = []
    for one in (program, attend):  # the gradient of a result that depends on q
        (first,) = torch.autograd.grad(one(q).square().sum(), q, create_graph=True)
        curvatures.append(torch.autograd.grad(first.square().sum(), q)[0])
    torch.testing.assert_close(*curvatures)
    assert torch.autograd.gradgradcheck(program, q)
    batch = torch.randn(2, 5, 4, dtype=F64)
    torch.testing.assert_close(torch.func.vmap(program)(batch), attend(batch))
    with pytest.raises(stc.TransformError, match="forward mode cannot look into"):
        torch.func.jvp(program, (batch[0],), (batch[1],))


def test_a_graph_of_a_transform_of_attention() -> None:
    slope = torch.func.grad(lambda q: stc.attention(q, q, q, WINDOW).square().sum())
    q = torch.randn(5, 4, dtype=F64)
    torch.testing.assert_close(torch.compile(slope, backend="eager")(q), slope(q))


@pytest.mark.parametrize("scale", [None, 0.5])
def test_a_graph_of_any_sizes_is_one(scale: float | None) -> None:
    q, mask = torch.rand(2, 40, 8), stc.masks.causal()
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q: stc.attention(q, q, q, mask, scale=scale), backend="eager", dynamic=True, fullgraph=True
    )
    torch.testing.assert_close(compiled(q), stc.attention(q, q, q, mask, scale=scale))


def test_attention_is_exported_for_any_length() -> None:
    sizes = {2: torch.export.Dim("rows", min=2)}
    q = torch.rand(1, 2, 9, 4)
    module = torch.export.export(Exported(lambda q: stc.attention(q, q, q, WINDOW)), (q,), dynamic_shapes=((sizes,),))
    longer = torch.rand(1, 2, 30, 4)
    torch.testing.assert_close(module.module()(longer), stc.attention(longer, longer, longer, WINDOW))


def test_attention_that_cannot_be_exported_says_so() -> None:
    given = tuple(one.detach() for one in four())
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"torch.export takes it with strict=False"):
        torch.export.export(Exported(EXPORTED["mask"]), given, strict=True)
    with pytest.raises(stc.TransformError, match=r"stc\.masks\.dense_mask\(pattern\), or .* outside forward"):
        torch.export.export(Exported(lambda q, k, v: stc.attention(q, k, v, PADDING)), given)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"mask": ["band", -3', '"mask": ["table", -3'),
        ('"mask": ["band", -3', '"mask": ["band", "3"'),
        ('"mul"', '"exec"'),
        ('"input", 0', '"input", 7'),
        ("[[0, 1]]", '[["0) or exit("]]'),
        ('"softmax": true', '"softmax": 1'),
        ('"table": 2', '"table": 3'),
        ('"dropout": 0.0', '"dropout": 2.0'),
        ('"plan"', '"cache_dir"'),
        ('"name": "attention"', '"name": "../attention"'),
        ("{", "{{"),
        ("[1]]", "[9]]"),
    ],
)
def test_a_damaged_map_is_refused(old: str, new: str) -> None:
    given = tuple(one.detach() for one in four())
    module = torch.export.export(Exported(lambda q, k, v: stc.attention(q, k, v, WINDOW, scale=0.5)), given).module()
    (node,) = [node for node in module.graph.nodes if "mapped" in str(node.target)]
    assert old in node.args[0]
    node.args = (node.args[0].replace(old, new), *node.args[1:])
    module.recompile()
    with pytest.raises(stc.FormatError, match="the program is damaged"):
        module(*given)


MEETS = (torch.rand(64, 96, generator=torch.Generator().manual_seed(2)) < 0.3).float()
PATTERNS: dict[str, Callable[[], Any]] = {
    "tensor": lambda: stc.SparseTensor.from_dense(MEETS),
    "pattern": lambda: stc.SparseTensor.from_dense(MEETS).pattern,
    "torch": lambda: MEETS.to_sparse(),
    "scipy": lambda: scipy.sparse.csr_matrix(MEETS.numpy()),
    "rows": lambda: (MEETS.to_sparse_csr().crow_indices(), MEETS.to_sparse_csr().col_indices()),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_may_come_as_anything_sparse(name: str) -> None:
    given = operands((2,), 64, 96)
    expected = scaled_dot_product_attention(*given, attn_mask=MEETS.bool())
    torch.testing.assert_close(stc.attention(*given, PATTERNS[name]()), expected)


def test_blocks_are_met_whole() -> None:
    blocks = torch.zeros(64, 96)
    blocks[:32, 16:48], blocks[32:, 64:] = 1.0, 1.0
    found = stc.attention(*(given := operands((), 64, 96)), blocks.to_sparse_bsr((16, 16)))
    torch.testing.assert_close(found, scaled_dot_product_attention(*given, attn_mask=blocks.bool()))


@pytest.mark.parametrize(("rows", "columns"), [(300, 260), (256, 256)])
def test_a_block_mask_of_flex_attention(rows: int, columns: int) -> None:
    def near(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) & (q - k < 200)

    mask, given = create_block_mask(near, None, None, rows, columns, device="cpu"), operands((), rows, columns)
    meets = near(0, 0, torch.arange(rows)[:, None], torch.arange(columns))
    expected = scaled_dot_product_attention(*given, attn_mask=meets).nan_to_num(0.0)
    torch.testing.assert_close(stc.attention(*given, mask), expected)


def test_a_function_of_positions_over_a_mask_at_other_lengths() -> None:
    """The numbers of rows and columns are kept with the mask."""
    mask = stc.masks.prefix(6)
    for rows, columns in ((70, 3), (70, 70), (3, 70), (70, 8)):
        q, k, v = torch.randn(2, rows, 4), torch.randn(2, columns, 4), torch.randn(2, columns, 3)
        found = stc.attention(q, k, v, mask, bias=lambda s, b, h, i, j: s * h + (i - j) * 0.1)
        scores = (
            q @ k.mT / 2 * torch.arange(2)[:, None, None] + (torch.arange(rows)[:, None] - torch.arange(columns)) / 10
        )
        scores = scores.masked_fill(torch.arange(columns) >= 6, -torch.inf)
        torch.testing.assert_close(found, scores.softmax(-1) @ v)


def test_a_boolean_pattern_that_an_ndarray_changed_is_read_again() -> None:
    meets = torch.ones(6, 6, dtype=torch.bool)
    q, k, v = torch.randn(3, 6, 4)
    assert torch.equal(stc.attention(q, k, v, meets), stc.attention(q, k, v, meets))
    meets.numpy()[:, 2:] = False
    torch.testing.assert_close(stc.attention(q, k, v, meets), stc.attention(q, k[:2], v[:2]))


def test_boolean_patterns_without_rows_or_columns() -> None:
    q, k, v = torch.randn(2, 3, 4), torch.randn(2, 0, 4), torch.randn(2, 0, 5)
    assert stc.attention(q, k, v, torch.ones(3, 0, dtype=torch.bool)).tolist() == torch.zeros(2, 3, 5).tolist()
    assert stc.attention(k, q, q, torch.ones(2, 0, 3, dtype=torch.bool)).shape == (2, 0, 4)


@pytest.mark.parametrize("admitted", [True, False])
def test_a_block_mask_whose_function_divides(admitted: bool) -> None:
    """Without partial blocks, for which there is no position to ask it of."""

    def same(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q // 128 * 2 % 4 == k // 128 * 2 % 4) & admitted

    mask, (q, k, v) = create_block_mask(same, None, None, 256, 256, device="cpu"), operands((), 256, 256)
    assert not mask.kv_num_blocks.any()
    found = stc.attention(q, k, v, mask)
    expected = torch.cat([scaled_dot_product_attention(q[s], k[s], v[s]) for s in (slice(128), slice(128, 256))])
    torch.testing.assert_close(found, expected * admitted)
    with pytest.raises(stc.ShapeError, match="do not broadcast"):
        stc.attention(q, k, v, create_block_mask(same, None, 2, 256, 256, device="cpu"))


def test_what_attention_refuses() -> None:
    q, k, v = operands()
    pattern = stc.SparseTensor.from_dense(torch.ones(10, 12))
    for bad in ((q, k[:5], v), (q[0], k, v), (q, k, v[None]), (q, k[:, :3], v)):
        with pytest.raises(stc.ShapeError, match="attention takes q"):
            stc.attention(*bad, pattern)
    with pytest.raises(stc.ShapeError, match="must be \\(10, 12\\)"):
        stc.attention(q, k, v, torch.eye(4).to_sparse())
    for named in ({"scale": "x"}, {"scale": torch.ones(2)}, {"scale": 1j}, {"dropout_p": "x"}):
        with pytest.raises(stc.DtypeError, match=f"attention: {next(iter(named))} must be a number"):
            stc.attention(q, k, v, pattern, **named)  # type: ignore[call-overload]
    table = torch.randn(10, 12, dtype=F64)
    with pytest.raises(stc.ShapeError, match=r"bias must be .* found \(10, 12\); a table .* score \+ table\[i, j\]"):
        stc.attention(q, k, v, pattern, bias=table)
    for bad in (torch.zeros(1, 120), torch.zeros(1)):  # a head too many; one for all entries
        with pytest.raises(stc.ShapeError, match="bias must be"):
            stc.attention(q, k, v, pattern, bias=bad)
    found = stc.attention(q, k, v, pattern, bias=lambda score, b, h, i, j: score + table[i, j])
    torch.testing.assert_close(found, scaled_dot_product_attention(q, k, v, table))
    with pytest.raises(stc.DeviceError, match="must be on cpu"):
        stc.attention(q, k.to("meta"), v.to("meta"), stc.masks.everything())
    with pytest.raises(stc.FormatError, match=r"a mask_mod becomes one by FlexAttention's create_block_mask"):
        stc.attention(q, k, v, lambda b, h, i, j: i >= j)
    with pytest.raises(stc.FormatError, match="no pattern"):
        stc.attention(q, k, v, torch.ones(10, 12))
    for bad in ((q, k.float(), v), (q, k, v.float()), (q.long(), k.long(), v.long())):
        with pytest.raises(stc.DtypeError, match="one floating point dtype"):
            stc.attention(*bad, pattern)
    with pytest.raises(stc.DtypeError, match=r"bias is added .* found torch\.bool"):
        stc.attention(q, k, v, pattern, bias=torch.ones(120, dtype=torch.bool))


def test_settings_reach_both_products(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = []

    def einsum(*args: Any, plan: str, **settings: Any) -> Any:
        plans.append(plan)
        return stc.einsum(*args, plan=plan, **settings)

    monkeypatch.setattr(pairwise, "einsum", einsum)
    stc.attention(*operands(), stc.SparseTensor.from_dense(torch.ones(10, 12)), plan="coo")
    assert plans == ["coo", "coo"]


def test_both_products_compile_for_a_gpu() -> None:
    ones, b = stc.SparseTensor.from_dense(torch.ones(10, 12)), torch.rand(4, 12, 8)
    scores = stc.compile("ij,hid,hjd->ijh", ones, torch.rand(4, 10, 8), b, output="sparse", backend="triton")
    weights = stc.SparseTensor(ones.coords, torch.rand(ones.nnz, 4), (10, 12, 4))
    means = stc.compile("ijh,hjd->hid", weights, b, output="dense", backend="triton")
    assert all(".visible .entry" in kernel.ptx("sm_90") for kernel in (scores, means))


def test_arguments_of_other_kinds_are_refused() -> None:
    q, x = torch.rand(3, 2), stc.eye(3)
    for call, kind in (
        (lambda: stc.attention(q, None, q, x), stc.DtypeError),
        (lambda: stc.attention(q, q, torch.eye(3).to_sparse(), x), stc.DtypeError),
        (lambda: stc.attention(q, q, q, x, bias=1.0), stc.ShapeError),
        (lambda: stc.attention(q, q, q, (torch.tensor([0, 1]), torch.tensor([5]))), stc.FormatError),
    ):
        with pytest.raises(kind, match=r"attention|indptr, indices"):
            call()


@pytest.mark.parametrize("function", [stc.softmax, stc.log_softmax])
def test_softmax_is_over_the_last_mode_of_a_sparse_tensor(function: Any) -> None:
    x = stc.SparseTensor([[0, 0, 1], [0, 0, 1], [0, 2, 1]], [1.0, 2.0, 3.0], (2, 2, 3))
    torch.testing.assert_close(function(x).values, function(x, 2).values)
    assert not torch.equal(function(x).values, function(x, 1).values)
    with pytest.raises(stc.DtypeError, match="takes a SparseTensor, found Tensor"):
        function(torch.eye(2))
