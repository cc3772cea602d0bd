"""Sparse tensors joined, multiplied out, and made of nothing, against torch's of dense ones."""

from __future__ import annotations

import pytest
import torch
from test_arithmetic import dense, sparse

import sparsetc as stc


@pytest.mark.parametrize("kind", ["nonzeros", "dense modes"])
@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_joined_and_stacked(kind: str, dim: int) -> None:
    given = [dense(seed, (3, 4, 2)) for seed in range(3)]
    tensors = [sparse(x, kind) for x in given]
    torch.testing.assert_close(stc.cat(tensors, dim).to_dense(), torch.cat(given, dim))
    torch.testing.assert_close(stc.stack(tensors, dim).to_dense(), torch.stack(given, dim))
    assert stc.cat(tensors, dim).is_coalesced


def test_kronecker_products() -> None:
    x, y = dense(0, (3, 4)), dense(1, (2, 5))
    torch.testing.assert_close(stc.kron(sparse(x), sparse(y)).to_dense(), torch.kron(x, y))
    values = [sparse(t).values.clone().requires_grad_() for t in (x, y)]
    assert torch.autograd.gradcheck(
        lambda a, b: stc.kron(sparse(x).with_values(a), sparse(y).with_values(b)).values, values
    )


def test_made_of_nothing() -> None:
    torch.testing.assert_close(stc.eye(3, 5).to_dense(), torch.eye(3, 5))
    torch.testing.assert_close(stc.eye(2, dtype=torch.int64).to_dense(), torch.eye(2, dtype=torch.int64))
    assert stc.zeros(2, 3).to_dense().equal(torch.zeros(2, 3))
    assert stc.zeros((2, 3), dtype=torch.float64).dtype == torch.float64


@pytest.mark.parametrize(
    ("shape", "nnz"), [((50, 60), 300), ((3, 4), 12), ((1 << 40, 1 << 40, 7), 1000), ((5000, 5000), 3), ((0, 4), 0)]
)
@pytest.mark.parametrize("draw", [stc.rand, stc.randn])
def test_entries_anywhere(draw: object, shape: tuple[int, ...], nnz: int) -> None:
    made = [draw(shape, nnz=nnz, generator=torch.Generator().manual_seed(s)) for s in (0, 0, 1)]  # type: ignore[operator]
    assert all(x.nnz == nnz and x.shape == shape and x.is_coalesced for x in made)
    assert made[0].coords.equal(made[1].coords)
    assert made[0].values.equal(made[1].values)
    if nnz > 12:
        assert not made[0].coords.equal(made[2].coords)
        assert abs(float(made[0].coords[0].double().mean()) / shape[0] - 0.5) < 0.1


@pytest.mark.parametrize("shape", [(1000, 1000), (3000, 2000), (1 << 40, 1 << 20)])
def test_positions_are_not_biased(shape: tuple[int, ...]) -> None:
    """Of n uniform coordinates the mean is within 5 / sqrt(12 n) of the middle, and a tenth lies in the last tenth."""
    x = stc.rand(shape, nnz=20_000, generator=torch.Generator().manual_seed(0))
    for row, size in zip(x.coords.double(), shape, strict=True):
        assert abs(float(row.mean()) / size - 0.5) < 0.0102
        assert 0.089 < float((row >= 0.9 * size).double().mean()) < 0.111


def test_densities() -> None:
    assert stc.rand((100, 100)).nnz == 100
    assert stc.rand((10, 10), 0.25, dtype=torch.float64).nnz == 25
    assert stc.rand((10, 10), 1.0).nnz == 100
    assert (stc.rand(20, 30).shape, stc.rand(20, 30, nnz=7).nnz, stc.randn(7).shape) == ((20, 30), 7, (7,))
    assert stc.rand(10, 10, density=0.25).nnz == 25
    for wrong in (((10, 10), 0.1, 0.2), ((10, 10), 4), (10, 0.5)):
        with pytest.raises(stc.ShapeError):
            stc.rand(*wrong)


def test_what_is_refused() -> None:
    x = sparse(dense(0))
    for tensors, dim in (([], 0), ([x, x[:, :3]], 0), ([x, torch.ones(3)], 0), ([x, x[None]], 0), ([x], 5)):
        with pytest.raises(stc.ShapeError):
            stc.cat(tensors, dim)  # type: ignore[arg-type]
    with pytest.raises(stc.ShapeError, match="has 0 to 4 nonzeros, found nnz=5"):
        stc.rand((2, 2), nnz=5)
    with pytest.raises(stc.ShapeError, match=r"a density is from 0 to 1, found 1\.5"):
        stc.rand((2, 2), 1.5)


def test_where() -> None:
    x, y = dense(0), dense(1)
    s, t = sparse(x), sparse(y)
    torch.testing.assert_close(stc.where(s > 2, s, t).to_dense(), torch.where(x > 2, x, y))
    torch.testing.assert_close(stc.where(s > 2, 0.1, t).to_dense(), torch.where(x > 2, 0.1, y))
    torch.testing.assert_close(
        stc.where(s != 0, torch.ones(6, dtype=x.dtype), t).to_dense(), torch.where(x != 0, 1.0, y)
    )
    torch.testing.assert_close(stc.where(x > y, s, t).to_dense(), torch.where(x > y, x, y))
    torch.testing.assert_close(stc.where(s > 2, s).to_dense(), torch.where(x > 2, x, 0.0))
    infinite = s.map(lambda values: values / 0)
    assert not stc.where(x > 9, infinite, t).to_dense().isnan().any()
    for wrong, kind in (((s > 2, s, 1), stc.DtypeError), ((s, t[:2]), stc.ShapeError), ((3, s), stc.DtypeError)):
        with pytest.raises(kind, match="where"):
            stc.where(*wrong)


def test_full_and_which_entry_became_which() -> None:
    assert torch.equal(stc.full((2, 3), 4.0).to_dense(), torch.full((2, 3), 4.0))
    assert stc.full((2, 0), 1.0).nnz == 0
    for make in (stc.zeros, stc.rand, lambda shape: stc.full(shape, 1.0)):
        with pytest.raises(stc.FormatError, match="at least one mode"):
            make(())
    values = torch.tensor([1.0, 2.0, 3.0])
    x = stc.SparseTensor([[1, 0, 1]], values, coalesce=False)
    assert x.unique_map().tolist() == [1, 0, 1]
    assert torch.equal(x.coalesce().values, torch.zeros(2).index_add(0, x.unique_map(), values))
    assert x.coalesce().unique_map().tolist() == [0, 1]
