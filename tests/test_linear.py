"""Linear systems: against dense solutions and gradients, and scipy's solvers on the operator of a tensor."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import sparsetc as stc


def positive_definite(dtype: torch.dtype, n: int = 12) -> torch.Tensor:
    g = torch.Generator().manual_seed(0)
    dense = torch.randn(n, n, dtype=dtype, generator=g) * (torch.rand(n, n, generator=g) < 0.3)
    return dense + dense.mH + 10 * torch.diag(torch.linspace(1, 3, n, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("columns", [(), (3,), (0,)])
def test_a_solution_and_its_gradients(columns: tuple[int, ...], dtype: torch.dtype) -> None:
    dense = positive_definite(dtype)
    b = torch.randn(12, *columns, dtype=dtype, generator=torch.Generator().manual_seed(1), requires_grad=True)
    x = stc.SparseTensor.from_dense(dense)
    values = x.values.clone().requires_grad_()
    found = stc.solve(x.with_values(values), b, tol=1e-13)
    followed = torch.zeros(12, 12, dtype=dtype).index_put(tuple(x.coords), values)
    expected = torch.linalg.solve(followed, b)
    torch.testing.assert_close(found, expected)
    weight = torch.randn(expected.shape, dtype=dtype, generator=torch.Generator().manual_seed(2))
    own, theirs = (torch.autograd.grad((y * weight).abs().square().sum(), (values, b)) for y in (found, expected))
    torch.testing.assert_close(own, theirs)


def test_second_derivatives() -> None:
    x = stc.SparseTensor.from_dense(positive_definite(torch.float64, 4))
    b = torch.randn(4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    values = x.values.clone().requires_grad_()
    assert torch.autograd.gradgradcheck(lambda v, b: stc.solve(x.with_values(v), b, tol=1e-14), (values, b))


def test_transforms() -> None:
    dense = positive_definite(torch.float64, 4)
    x = stc.SparseTensor.from_dense(dense)
    b = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    values = x.values

    def ours(v: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return stc.solve(x.with_values(v), b, tol=1e-14)

    def theirs(v: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.linalg.solve(torch.zeros_like(dense).index_put(tuple(x.coords), v), b)

    for call in (
        lambda f: torch.func.vmap(f, (None, 0))(values, b),
        lambda f: torch.func.vmap(f, (1, None))(torch.stack((values, 2 * values), 1), b[0]),
        lambda f: torch.func.jvp(f, (values, b[0]), (values.sin(), b[1])),
        lambda f: torch.func.jacrev(f)(values, b[0]),
        lambda f: torch.func.vmap(torch.func.grad(lambda v, b: f(v, b).sin().sum()), (None, 0))(values, b),
    ):
        torch.testing.assert_close(call(ours), call(theirs))


def test_columns_that_end_at_different_steps() -> None:
    """A column of zeros, one that is solved in a step, and one that is not; also of blocks and of float32."""
    dense = positive_definite(torch.float32)
    b = torch.stack((torch.zeros(12), dense[:, 0], torch.arange(12.0)), 1)
    expected = torch.linalg.solve(dense.double(), b.double()).float()
    for x in (
        stc.SparseTensor.from_dense(dense),
        stc.SparseTensor.from_dense(dense, blocksize=(4, 4)),
        dense.to_sparse(),
    ):
        torch.testing.assert_close(stc.solve(x, b), expected, rtol=1e-4, atol=1e-5)


def test_what_is_not_solved() -> None:
    x = stc.eye(3)
    with pytest.raises(stc.ShapeError, match="as many rows as columns"):
        stc.solve(stc.eye(3, 4), torch.ones(3))
    with pytest.raises(stc.ShapeError, match="as many rows as columns"):
        stc.solve(torch.eye(3), torch.ones(3))
    with pytest.raises(stc.ShapeError, match=r"must have shape \(3,\) or \(3, k\), found \(4,\)"):
        stc.solve(x, torch.ones(4))
    with pytest.raises(stc.DtypeError, match="b has dtype"):
        stc.solve(x, torch.ones(3).double())
    with pytest.raises(stc.DtypeError, match="takes float32, float64"):
        stc.solve(x.long(), torch.ones(3).long())
    with pytest.raises(stc.FormatError, match="diagonal is not positive"):
        stc.solve(stc.eye(3, 3).tril(-1), torch.ones(3))
    with pytest.raises(stc.FormatError, match="x\\* a x < 0"):
        stc.solve(stc.SparseTensor.from_dense(torch.tensor([[1.0, 3.0], [3.0, 1.0]])), torch.tensor([1.0, -1.0]))
    with pytest.warns(UserWarning, match="after 1 steps the residual is"):
        stc.solve(stc.SparseTensor.from_dense(positive_definite(torch.float32)), torch.ones(12), n_iter_max=1)


def test_small_and_infinite_right_sides_and_no_columns() -> None:
    dense = positive_definite(torch.float32)
    x, b = stc.SparseTensor.from_dense(dense), torch.arange(12.0)
    expected = torch.linalg.solve(dense.double(), b.double())
    for scale in (1e-30, 1e30):
        torch.testing.assert_close(stc.solve(x, b * scale).double() / scale, expected, rtol=1e-4, atol=1e-5)
    columns = torch.stack((b, b * torch.nan, b + torch.inf), 1)
    found = stc.solve(x, columns)
    torch.testing.assert_close(found[:, 0].double(), expected, rtol=1e-4, atol=1e-5)
    assert found[:, 1:].isnan().all()
    assert stc.solve(x, columns[:, :0]).shape == (12, 0)
    assert stc.solve(stc.zeros((0, 0)), torch.zeros(0)).shape == (0,)


def test_what_is_not_symmetric_is_noticed() -> None:
    with pytest.warns(UserWarning, match="after 20 steps .* unless the matrix is not symmetric"):
        stc.solve(stc.SparseTensor.from_dense(torch.tensor([[4.0, 1.0], [0.0, 3.0]])), torch.ones(2))
    for settings in ({"tol": -1.0}, {"n_iter_max": -1}):
        with pytest.raises(stc.ShapeError, match="from 0 on"):
            stc.solve(stc.eye(3), torch.ones(3), **settings)


def test_solvers_of_scipy() -> None:
    linalg = pytest.importorskip("scipy.sparse.linalg")
    dense = positive_definite(torch.float64)
    operator = stc.SparseTensor.from_dense(dense).as_linear_operator()
    b = np.arange(12.0)
    np.testing.assert_allclose(linalg.cg(operator, b, rtol=1e-12)[0], np.linalg.solve(dense.numpy(), b))
    largest = np.linalg.eigvalsh(dense.numpy())[-3:]
    np.testing.assert_allclose(linalg.eigsh(operator, 3, return_eigenvectors=False), largest)
    wide = stc.SparseTensor.from_dense(dense[:7]).as_linear_operator()
    np.testing.assert_allclose(linalg.svds(wide, 2)[1][-1], np.linalg.svd(dense[:7].numpy())[1][0])
    np.testing.assert_allclose(linalg.lsqr(wide, b[:7])[0], np.linalg.lstsq(dense[:7].numpy(), b[:7])[0])
    with pytest.raises(stc.DtypeError, match="as_linear_operator"):
        linalg.cg(stc.eye(12), b)
    with pytest.raises(stc.ShapeError, match="is of a matrix"):
        stc.rand((2, 2, 2), nnz=1).as_linear_operator()
