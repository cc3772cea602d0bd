"""How tensors are cut: boundaries, grids, what a cut says of itself; and what the model predicts."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from math import prod
from pathlib import Path

import pytest
import torch

import sparsetc as stc
from sparsetc.distributed import cut
from sparsetc.distributed.ranks import Ranks
from sparsetc.distributed.shard import owners
from sparsetc.tensor import checksum

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import distributed_model as model  # noqa: E402


@pytest.mark.parametrize("ranges", [1, 2, 3, 7])
def test_boundaries_balance_rows_as_well_as_they_can(ranges: int) -> None:
    g = torch.Generator().manual_seed(0)
    for counts in (torch.randint(0, 9, (50,), generator=g), torch.ones(7).long(), torch.zeros(9).long()):
        found = cut.boundaries(counts, ranges)
        assert len(found) == ranges + 1
        assert (found[0], found[-1]) == (0, counts.shape[0])
        assert list(found) == sorted(found)
        parts = [int(counts[a:b].sum()) for a, b in pairwise(found)]
        assert sum(parts) == int(counts.sum())
        assert max(parts) <= int(counts.sum()) / ranges + int(counts.max())


def test_a_row_with_most_nonzeros_is_a_range_of_its_own() -> None:
    assert cut.boundaries(torch.tensor([1, 1, 50, 1, 1]), 2) in ((0, 2, 5), (0, 3, 5))
    assert cut.boundaries(torch.tensor([90, 1, 1]), 3)[-1] == 3


def test_rows_that_are_about_even_are_cut_as_a_dtensor_is() -> None:
    counts = torch.full((1001,), 50)
    counts[3], counts[900] = 55, 40
    assert cut.boundaries(counts, 4) == (0, 251, 502, 753, 1001)
    assert cut.boundaries(torch.zeros(7, dtype=torch.int64), 3) == (0, 3, 6, 7)
    assert cut.boundaries(torch.tensor([4]), 1) == (0, 1)


def test_grids_are_all_there_are_and_send_few_rows_first() -> None:
    shape = (1000, 10, 500)
    found = cut.grids(8, shape, (0, 1, 2), False)
    assert len(found) == 10
    assert all(prod(g) == 8 and g[-1] == 1 for g in found)
    sent = [cut.rows_sent(g, shape) for g in found]
    assert sent == sorted(sent)
    assert found[0] == (4, 1, 2, 1)
    assert cut.grids(8, (3, 2), (0, 1), False) == []
    assert (2, 2, 2) in cut.grids(8, (3, 2), (0, 1), True)
    assert cut.grids(1, shape, (), False) == [(1, 1, 1, 1)]
    assert cut.grids(4, shape, (2,), False) == [(1, 1, 4, 1)]


def test_every_nonzero_has_one_owner_and_parts_are_equal() -> None:
    coords = torch.stack((torch.zeros(11).long(), torch.arange(11)))
    whole = cut.Cut((3, 11), ((0, 3), (0, 11)), tuple((0, 0, part) for part in range(4)), (2, 3, 3, 3))
    assert torch.bincount(owners(coords, whole)).tolist() == list(whole.nnz)
    later = owners(coords[:, 6:], whole, torch.tensor([6]))
    assert torch.equal(later, owners(coords, whole)[6:])


def test_a_cut_says_what_it_is_and_is_checked() -> None:
    own = cut.Cut((4, 6), ((0, 1, 4), (0, 6)), ((0, 0, 0), (1, 0, 0)), (5, 7))
    assert own.grid == (2, 1, 1)
    assert own.modes == (0,)
    assert own.ranges(1) == ((1, 4), (0, 6))
    assert own.sharing((0,)) == ((0,), (1,))
    assert own.sharing((1,)) == ((0, 1),)
    assert str(own).splitlines() == [
        "cut of 4 x 6, 12 nonzeros, over 2 ranks: 2 x 1",
        "  mode 0: rows from 0, 1, to 4",
        "  rank 0: mode 0 0..1: 5 nonzeros",
        "  rank 1: mode 0 1..4: 7 nonzeros",
        "  5 to 7 nonzeros a rank, the most 1.17 x the mean",
    ]
    many = cut.Cut((400,), (tuple(range(0, 401, 10)),), tuple((r, 0) for r in range(40)), (1,) * 40)
    assert len(str(many).splitlines()) == 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.complex64], ids=str)
def test_bits_depend_on_every_element_and_its_place(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x = (torch.arange(60) % 7).to(dtype).reshape(5, 12)
    seen = checksum.bits(x)
    assert checksum.bits(torch.stack((x, x), -1)[..., 0]) == seen
    assert checksum.bits(torch.stack((x[0], x[0]), -1)[:, 0]) == checksum.bits(x[0])
    assert checksum.bits(x[1, 2:8:7]) == checksum.bits(x[1, 2])
    assert checksum.bits(x.T.contiguous().T) == checksum.bits(x.clone()) == seen
    assert checksum.bits(x[:, :1].expand(5, 12)) == checksum.bits(x[:, :1].repeat(1, 12))
    assert checksum.bits(torch.zeros((), dtype=dtype)) == checksum.bits(torch.zeros(3, 0, dtype=dtype)) == 0
    for chunk in (checksum.CHUNK, 4):
        monkeypatch.setattr(checksum, "CHUNK", chunk)
        others = [x.flip(0), x.flip(1), -x]
        for n in range(1, 60):
            others.append(x.clone())
            others[-1].view(-1)[n] += 1
            if n % 7:  # else the same
                others.append(x.clone())
                others[-1].view(-1)[[0, n]] = x.view(-1)[[n, 0]]
        found = [checksum.bits(other) for other in others]
        assert checksum.bits(x) not in found
        assert len(set(found)) == len(found)


def test_one_rank_is_asked_nothing() -> None:
    ranks, x = Ranks(), torch.arange(6.0)
    assert (ranks.rank, ranks.size, ranks.backend) == (0, 1, "alone")
    assert ranks.sum_(x) is x
    assert torch.equal(ranks.gathered(x, [6]), x)
    assert ranks.objects("a") == ["a"]
    one = stc.SparseTensor([[0]], [1.0], (2,))
    with pytest.raises(stc.DistributedError, match="DeviceMesh of one dimension"):
        stc.distributed.shard(one, mesh=object())


def test_the_model_counts_what_its_formulas_say() -> None:
    rates = model.Rates(1e9, 1e10, 1e8, 1e7, 1e-3, rank=2, passes=1, block_passes=1, imbalance=1)
    small = model.TensorSize("small", (100, 40), 10_000)
    alone = model.sweep(small, 1, rates)
    assert alone.seconds == pytest.approx(2 * 10_000 / 1e9 + 2 * 140 * 8 / 1e10)
    four = model.sweep(small, 4, rates)
    assert four.grid == (4, 1, 1)  # 30 rows of 40, thrice a quarter of them to others; none of 100
    assert four.mttkrp == pytest.approx(2 * 2500 / 1e9)
    assert four.sent == pytest.approx(2 * 40 * 8 * 3 / 4 / 1e8)
    assert four.waits == pytest.approx((2 * 2 + 2 * 2 * 2 + 2 * 2) * 1e-3)
    assert model.mttkrp(small, four.grid, 1, rates) == pytest.approx(2500 / 1e9 + 40 * 8 * 0.75 / 1e8 + 2e-3)
    assert model.sweep(small, 16, rates).sent > model.sweep(small, 16, replace(rates, node=16)).sent


def test_the_page_has_the_table_that_the_model_prints() -> None:
    page = (ROOT / "docs" / "how" / "ranks.md").read_text()
    assert model.table() in page
