"""Blocking curves: what their points count, what they are made of, how they are printed and drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

import sparsetc as stc
from sparsetc.similarity import curve

# Rows 0, 2 and 3 touch the first two strips of 2 columns, row 1 the last one, which is of 1 column.
MATRIX = torch.tensor([[1, 1, 0, 1, 0], [0, 0, 0, 0, 1], [1, 0, 1, 0, 0], [1, 1, 1, 1, 0.0]])


def test_points_count_groups_blocks_and_values() -> None:
    found = stc.plans.blocking_curve(stc.SparseTensor.from_dense(MATRIX), width=2, taus=(0.5, 1))
    assert (found.shape, found.nnz, found.width, [p.tau for p in found.points]) == ((4, 5), 10, 2, [0.5, 1])
    for p in found.points:
        assert (p.groups, p.blocks, p.stored) == (2, 3, 3 * 2 * 2 + 1 * 2)
        assert p.height == pytest.approx((3 + 3 + 1) / 3)
        assert p.density == pytest.approx(10 / 14)
        assert p.seconds > 0


def test_a_curve_is_a_table() -> None:
    found = stc.plans.blocking_curve(stc.SparseTensor.from_dense(MATRIX), width=2)
    assert isinstance(found, stc.plans.BlockingCurve)
    head, columns, *lines = str(found).splitlines()
    assert head == "blockings of 4 x 5, 10 nonzeros, strips of 2 columns"
    assert columns.split("  ")[1:] == ["tau", "groups", "blocks", "mean height", "density", "stored values", "seconds"]
    assert [line.split()[0] for line in lines] == ["0.1", "0.2", "0.3", "0.4", "0.5", "0.6", "0.7", "0.8", "0.9", "1"]
    assert repr(found) == str(found) != found.table()
    assert len({len(line) for line in (columns, *lines)}) == 1


def test_every_kind_of_sparse_operand_has_a_curve() -> None:
    x = stc.SparseTensor.from_dense(MATRIX)
    expected = [(p.groups, p.stored) for p in stc.plans.blocking_curve(x, width=2, taus=(0.7,)).points]
    rows, columns = x.coords[:, [*range(10), 0, 3]]  # the last ones are given twice
    twice = stc.SparseTensor(torch.stack([rows, columns]), torch.ones(12), (4, 5))
    blocks = MATRIX[:, :4].reshape(2, 2, 2, 2).permute(0, 2, 1, 3).reshape(4, 2, 2)
    blocked = stc.SparseTensor.from_blocks(torch.tensor([[0, 0, 1, 1], [0, 1, 0, 1]]), blocks, (4, 4))
    for same in (x.to_torch(), x.to_torch(torch.sparse_csr), twice, x.with_values(torch.ones(10, dtype=torch.int8))):
        assert [(p.groups, p.stored) for p in stc.plans.blocking_curve(same, width=2, taus=(0.7,)).points] == expected
    assert stc.plans.blocking_curve(blocked, width=2, taus=(1,)).nnz == 16
    across = stc.plans.blocking_curve(stc.SparseTensor.from_dense(MATRIX.T), width=2, taus=(0.7,), mode=1)
    assert [(p.groups, p.stored) for p in across.points] == expected
    assert "rows along mode 1" in str(across)
    tensor = stc.SparseTensor.from_dense(MATRIX[:, :, None].expand(4, 5, 2))
    (point,) = stc.plans.blocking_curve(tensor, width=4, taus=(0.7,)).points
    assert (point.groups, point.density) == (2, pytest.approx(10 / 14))


def test_a_matrix_without_nonzeros() -> None:
    none = stc.SparseTensor(torch.zeros(2, 0, dtype=torch.int64), torch.zeros(0), (3, 4))
    found = stc.plans.blocking_curve(none, taus=(0.5,))
    assert [(p.groups, p.stored, p.density) for p in found.points] == [(0, 0, 0)]
    pytest.importorskip("matplotlib")
    stc.plot.blocking(found)


def test_what_is_refused() -> None:
    x = stc.SparseTensor.from_dense(MATRIX)
    with pytest.raises(stc.DtypeError, match="is of a sparse matrix, found Tensor"):
        stc.plans.blocking_curve(MATRIX)
    for options in ({"width": 0}, {"taus": (0.5, 0.0)}, {"taus": (2,)}, {"mode": 2}, {"mode": -1}):
        with pytest.raises(stc.PlanError):
            stc.plans.blocking_curve(x, **options)


def test_a_bar_is_drawn_where_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[tuple[int, str, bool, str, list[int]]] = []

    @contextmanager
    def bar(total: int, title: str, wanted: bool, unit: str) -> Iterator[Callable[[int], None]]:
        bars.append((total, title, wanted, unit, []))
        yield bars[-1][-1].append

    monkeypatch.setattr(curve, "bar", bar)
    x = stc.SparseTensor.from_dense(MATRIX)
    stc.plans.blocking_curve(x, width=2, taus=(0.5, 0.7))
    stc.plans.blocking_curve(x, width=2, taus=(0.5,), progress=True)
    ours = ("grouping rows", "similarities")
    assert bars == [(2, ours[0], False, ours[1], [1, 2]), (1, ours[0], True, ours[1], [1])]
