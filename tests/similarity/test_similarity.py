"""Groups of similar rows (1-SA): the density that is promised, whatever the matrix, and blocks that are found again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paper_algorithms import group_rows_by_definition

import sparsetc as stc
from sparsetc.similarity import groups as similar
from sparsetc.similarity.groups import Groups, group_of_nonzeros, group_rows

BOTH = pytest.mark.parametrize("grouping", [group_rows, group_rows_by_definition], ids=["rounds", "definition"])
Grouping = Callable[..., Groups]


def strips_of(rows: torch.Tensor, columns: torch.Tensor, width: int) -> dict[int, set[int]]:
    """The strips that each row touches."""
    found: dict[int, set[int]] = {}
    for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
        found.setdefault(row, set()).add(column // width)
    return found


def lists_of(groups: Groups) -> list[list[int]]:
    """The rows of each group."""
    return [part.tolist() for part in torch.split(groups.order, groups.heights.tolist())]


def verify(groups: Groups, rows: torch.Tensor, columns: torch.Tensor, width: int, tau: float) -> None:
    """Every row with nonzeros once, in the order promised, and Theorem 1."""
    touched, parts = strips_of(rows, columns, width), lists_of(groups)
    assert sorted(groups.order.tolist()) == sorted(touched)
    assert all(part == sorted(part) for part in parts)
    assert [part[0] for part in parts] == sorted(part[0] for part in parts)
    for part in parts:
        union = set().union(*(touched[row] for row in part))
        filled = sum(len(touched[row]) for row in part)
        assert filled >= tau / 2 * len(part) * len(union) - 1e-9
        nonzeros = {(r, c) for r, c in zip(rows.tolist(), columns.tolist(), strict=True) if r in part}
        assert len(nonzeros) >= tau / (2 * width) * len(part) * width * len(union) - 1e-9


@st.composite
def matrices(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Rows that are copies of a few, with some nonzeros more or less: of which similar ones there are many."""
    n_rows, n_columns = draw(st.integers(1, 40)), draw(st.integers(1, 60))
    kinds = draw(st.lists(st.sets(st.integers(0, n_columns - 1), max_size=20), min_size=1, max_size=5))
    picked = draw(st.lists(st.integers(0, len(kinds) - 1), min_size=n_rows, max_size=n_rows))
    changed = draw(st.sets(st.tuples(st.integers(0, n_rows - 1), st.integers(0, n_columns - 1)), max_size=60))
    nonzeros = {(row, column) for row, kind in enumerate(picked) for column in kinds[kind]} ^ changed
    at = torch.tensor(draw(st.permutations(sorted(nonzeros))), dtype=torch.int64).reshape(-1, 2).T.contiguous()
    return at[0], at[1], n_rows, n_columns


@BOTH
@settings(deadline=None, max_examples=80)
@given(matrix=matrices(), width=st.integers(1, 70), tau=st.floats(0.01, 1))
def test_theorem_1_holds_of_every_group(
    grouping: Grouping, matrix: tuple[torch.Tensor, torch.Tensor, int, int], width: int, tau: float
) -> None:
    rows, columns, *_ = matrix
    verify(grouping(*matrix, width=width, tau=tau), rows, columns, width, tau)


@pytest.mark.parametrize("tau", [0.05, 0.2, 0.5, 0.9])
def test_theorem_1_holds_where_a_tall_group_meets_wider_rows(tau: float) -> None:
    """The paper's example against similarity alone: many rows of one column, and a few of ever more (section 3.2)."""
    tall = torch.stack([torch.arange(400), torch.zeros(400, dtype=torch.int64)])
    wider = torch.tensor([(400 + j, c) for j in range(40) for c in range(j + 1)]).T
    rows, columns = torch.cat([tall, wider], 1)
    for grouping in (group_rows, group_rows_by_definition):
        verify(grouping(rows, columns, 440, 40, width=1, tau=tau), rows, columns, 1, tau)


@settings(deadline=None, max_examples=40)
@given(matrix=matrices(), width=st.integers(1, 20), tau=st.floats(0.05, 1), seed=st.integers(0, 99))
def test_rows_in_another_order_make_the_same_groups(
    matrix: tuple[torch.Tensor, torch.Tensor, int, int], width: int, tau: float, seed: int
) -> None:
    rows, columns, n_rows, n_columns = matrix
    to = torch.randperm(n_rows, generator=torch.Generator().manual_seed(seed))
    before = lists_of(group_rows(rows, columns, n_rows, n_columns, width=width, tau=tau))
    after = lists_of(group_rows(to[rows], columns, n_rows, n_columns, width=width, tau=tau))
    assert sorted(sorted(to[part].tolist()) for part in before) == sorted(after)


def scrambled(n: int, block: int, share: float, density: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A(Δ, θ, ρ) of the paper: (rows, columns, the block that each row was in), rows in a random order."""
    g = torch.Generator().manual_seed(0)
    chosen = torch.rand(n // block, n // block, generator=g) < share
    filled = torch.rand(n, n, generator=g) < density
    rows, columns = torch.nonzero(
        chosen.repeat_interleave(block, 0).repeat_interleave(block, 1) & filled, as_tuple=True
    )
    to = torch.randperm(n, generator=g)
    of = torch.empty(n, dtype=torch.int64).scatter_(0, to, torch.arange(n) // block)
    return to[rows], columns, of


def density_and_height(groups: Groups, rows: torch.Tensor, columns: torch.Tensor, width: int) -> tuple[float, float]:
    """(nonzeros a stored value, mean height of blocks)."""
    touched = strips_of(rows, columns, width)
    parts = lists_of(groups)
    blocks = [len(set().union(*(touched[row] for row in part))) for part in parts]
    area = sum(len(part) * n for part, n in zip(parts, blocks, strict=True))
    return rows.numel() / (area * width), area / sum(blocks)


@pytest.mark.parametrize("density", [0.1, 0.2, 0.5])
def test_scrambled_blocks_are_found_again(density: float) -> None:
    rows, columns, of = scrambled(1024, 32, 0.3, density)
    groups = group_rows(rows, columns, 1024, 1024, width=32, tau=0.6)
    assert sorted(lists_of(groups)) == sorted(torch.nonzero(of == n).flatten().tolist() for n in range(32))


@pytest.mark.parametrize("density", [0.02, 0.05])
def test_scrambled_sparse_blocks_keep_half_of_their_density(density: float) -> None:
    """Rows touch 48 and 81 % of their block's strips."""
    rows, columns, _ = scrambled(2048, 32, 0.15, density)
    groups = group_rows(rows, columns, 2048, 2048, width=32, tau=0.3)
    found, height = density_and_height(groups, rows, columns, 32)
    assert found >= density / 2
    assert height >= 32 * 0.9


def test_a_matrix_by_hand() -> None:
    """Rows 0 and 3 touch 2 strips, row 1 those and a third (similarity 2/3), row 2 another; row 4 is empty."""
    rows = torch.tensor([0, 0, 1, 1, 1, 2, 3, 3])
    columns = torch.tensor([0, 5, 1, 4, 9, 12, 2, 3])
    for tau, by_definition, in_rounds in (
        (0.7, [[0, 3], [1], [2]], [[0, 3], [1], [2]]),  # not similar
        (0.5, [[0, 3], [1], [2]], [[0, 1, 3], [2]]),  # 3 strips exceed 2 / (1 - τ/2); the rows fill 7 of 9
        (0.667, [[0, 3], [1], [2]], [[0, 3], [1], [2]]),
        (0.6666, [[0, 3], [1], [2]], [[0, 1, 3], [2]]),
    ):
        given = (rows, columns, 5, 14)
        assert lists_of(group_rows_by_definition(*given, width=3, tau=tau)) == by_definition
        groups = group_rows(*given, width=3, tau=tau)
        assert lists_of(groups) == in_rounds
    assert group_of_nonzeros(groups, torch.arange(4)).tolist() == [0, 0, 1, 0]
    wide = torch.tensor([0] * 9 + [1] * 10), torch.tensor([*range(9), *range(10)])
    assert lists_of(group_rows_by_definition(*wide, 2, 10, width=1, tau=0.9)) == [[0, 1]]


@BOTH
def test_ragged_matrices(grouping: Grouping) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    for shape in ((0, 0), (5, 0), (0, 5), (5, 5)):
        empty = grouping(none, none, *shape, width=4, tau=0.5)
        assert (empty.count, empty.order.numel()) == (0, 0)
    one = grouping(torch.tensor([3]), torch.tensor([7]), 6, 10, width=4, tau=0.5)
    assert lists_of(one) == [[3]]
    rows, columns = torch.tensor([0, 2, 2, 5]), torch.tensor([9, 0, 3, 1])
    assert lists_of(grouping(rows, columns, 6, 10, width=64, tau=1.0)) == [[0, 2, 5]]  # one strip holds all columns
    assert lists_of(grouping(rows, columns, 6, 10, width=4, tau=1.0)) == [[0], [2, 5]]  # the last strip has 2 columns
    twice = grouping(rows.repeat(2), columns.repeat(2), 6, 10, width=4, tau=1.0)
    assert lists_of(twice) == [[0], [2, 5]]


def test_sizes_beyond_32_bits() -> None:
    rows, columns = torch.tensor([2**61, 7, 7, 2**61]), torch.tensor([2**61, 0, 2**61 + 1, 5])
    groups = group_rows(rows, columns, 2**62, 2**62, width=64, tau=0.9)
    assert lists_of(groups) == [[7, 2**61]]


def test_a_matrix_of_many_strips_takes_memory_by_its_nonzeros() -> None:
    """A bit a row and strip would take 10**13 bytes here. Pairs of rows are alike in 4 strips of 5."""
    g = torch.Generator().manual_seed(0)
    n, size = 20_000, 2**50
    kinds = torch.randint(0, size, (n // 2, 5), generator=g).repeat(2, 1)
    kinds[: n // 2, 0] = torch.randint(0, size, (n // 2,), generator=g)
    to = torch.randperm(n, generator=g)
    groups = group_rows(to.repeat_interleave(5), kinds.flatten(), n, size, width=64, tau=0.6)
    found = group_of_nonzeros(groups, to)
    assert groups.heights.unique().tolist() in ([2], [1, 2])
    assert (found[: n // 2] == found[n // 2 :]).float().mean() > 0.99


def test_rows_of_one_hash_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a hash that is the same for all, rows are compressed with equal ones or with none, and groups stay right."""
    monkeypatch.setattr(similar, "mixed", lambda numbers, seed: torch.zeros_like(numbers))
    rows, columns = torch.tensor([0, 1, 2, 3, 3, 4]), torch.tensor([0, 5, 0, 0, 5, 5])
    _, cluster, found = similar.clusters_of(rows, columns, 5, 6, 1)
    held = [found.strips[a:b].tolist() for a, b in zip(found.ptr[:-1].tolist(), found.ptr[1:].tolist(), strict=True)]
    assert [held[n] for n in cluster.tolist()] == [[0], [1], [0], [0, 1], [1]]


def test_what_is_refused() -> None:
    at = torch.tensor([0, 1])
    for width, tau in ((0, 0.5), (4, 0.0), (4, 1.5), (4, float("nan"))):
        with pytest.raises(stc.PlanError, match=r"found (width|tau)"):
            group_rows(at, at, 2, 2, width=width, tau=tau)
    with pytest.raises(stc.ShapeError):
        group_rows(at, at[:1], 2, 2, width=4, tau=0.5)
    with pytest.raises(stc.DtypeError):
        group_rows(at.int(), at.int(), 2, 2, width=4, tau=0.5)
    with pytest.raises(stc.CoordinateError):
        group_rows(at, at, 2, 1, width=4, tau=0.5)
