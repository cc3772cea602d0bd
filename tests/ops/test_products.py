"""Named operations: the equation each writes, against dense float64 einsums; and what each refuses."""

import pytest
import torch

import sparsetc as stc
from sparsetc.ops.arguments import letters_of

LETTERS = "abcdef"


def tensor(*shape, seed=0, density=0.2, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    dense = torch.randn(shape, generator=g, dtype=torch.float64)
    keep = torch.rand(shape, generator=g, dtype=torch.float64) < density
    return stc.SparseTensor.from_dense((dense * keep).to(dtype))


def matrix(*shape, seed=1, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def dense(result):
    return result.to_dense() if isinstance(result, stc.SparseTensor) else result


def close(found, expected):
    torch.testing.assert_close(dense(found), expected, rtol=1e-9, atol=1e-9)


ORDERS = [((7, 6), m) for m in range(2)] + [((5, 6, 7), m) for m in range(3)] + [((4, 5, 3, 6, 4), m) for m in range(5)]


@pytest.mark.parametrize(("shape", "mode"), ORDERS)
def test_mttkrp_any_order_any_mode(shape, mode):
    x = tensor(*shape)
    factors = [None if m == mode else matrix(n, 3, seed=m) for m, n in enumerate(shape)]
    letters = LETTERS[: len(shape)]
    terms = ",".join([letters, *(c + "r" for m, c in enumerate(letters) if m != mode)])
    expected = torch.einsum(f"{terms}->{letters[mode]}r", x.to_dense(), *(f for f in factors if f is not None))
    close(stc.mttkrp(x, factors, mode), expected)
    close(stc.mttkrp(x, factors, mode - len(shape)), expected)


@pytest.mark.parametrize(("shape", "mode"), ORDERS)
def test_ttmc_any_order_any_mode(shape, mode):
    x = tensor(*shape)
    matrices = [matrix(n, 2 + m % 2, seed=m) for m, n in enumerate(shape)]
    letters, ranks = LETTERS[: len(shape)], "uvwxyz"[: len(shape)]
    others = [m for m in range(len(shape)) if m != mode]
    terms = ",".join([letters, *(letters[m] + ranks[m] for m in others)])
    expected = torch.einsum(
        f"{terms}->{letters[mode]}{''.join(ranks[m] for m in others)}", x.to_dense(), *(matrices[m] for m in others)
    )
    close(stc.ttmc(x, matrices, mode), expected)


@pytest.mark.parametrize(("shape", "mode"), ORDERS)
def test_ttm_and_ttv_keep_the_order_of_modes(shape, mode):
    x, letters = tensor(*shape), LETTERS[: len(shape)]
    m, v = matrix(shape[mode], 4), matrix(shape[mode])
    result = stc.ttm(x, m.T, mode)
    close(result, torch.einsum(f"{letters},{letters[mode]}r->{letters.replace(letters[mode], 'r')}", x.to_dense(), m))
    of_factor = stc.ttm(x, m, mode, transpose=True)
    assert torch.equal(*(r.to_dense() if isinstance(r, stc.SparseTensor) else r for r in (of_factor, result)))
    assert isinstance(result, stc.SparseTensor) == (len(shape) > 2)
    if isinstance(result, stc.SparseTensor):
        assert result.dense_order == (1 if mode == len(shape) - 1 else 0)
    result = stc.ttv(x, v, mode)
    close(result, torch.einsum(f"{letters},{letters[mode]}->{letters.replace(letters[mode], '')}", x.to_dense(), v))
    assert isinstance(result, stc.SparseTensor) == (len(shape) > 2)


def test_matrix_products():
    a, b = tensor(9, 7), matrix(7, 5)
    close(stc.spmm(a, b), a.to_dense() @ b)
    close(stc.spmm(a, b[:, 0].contiguous()), a.to_dense() @ b[:, 0])
    left, right = matrix(9, 3), matrix(7, 3, seed=5)
    result = stc.sddmm(a, left, right)
    assert isinstance(result, stc.SparseTensor)
    assert torch.equal(result.coords, a.coords)
    close(result, a.to_dense() * (left @ right.T))


@pytest.mark.parametrize(
    ("shape", "modes"),
    [
        ((5, 3), 0),
        ((7, 3), 1),
        ((6, 7, 3), 2),
        ((5, 6, 7), 3),
        ((6, 4, 5), ((0, 1), (2, 0))),
        ((5, 2), (-3, 0)),
        ((7, 6), ([2, 1], [0, 1])),
    ],
)
def test_contract_is_tensordot(shape, modes):
    x, y = tensor(5, 6, 7), matrix(*shape)
    dims = modes if isinstance(modes, int) else tuple([s] if isinstance(s, int) else list(s) for s in modes)
    close(stc.contract(x, y, modes), torch.tensordot(x.to_dense(), y, dims))


def test_sparse_operands_of_torch_and_settings_are_taken():
    x = tensor(6, 5, 4, dtype=torch.float32)
    b, c = matrix(5, 3, dtype=torch.float32), matrix(4, 3, dtype=torch.float32)
    expected = torch.einsum("ijk,jr,kr->ir", x.to_dense(), b, c)
    for plan in ("coo", "fiber", "rows"):
        torch.testing.assert_close(stc.mttkrp(x.to_torch(), [None, b, c], 0, plan=plan), expected)
    sparse = stc.mttkrp(x, [None, b, c], 0, output="sparse")
    assert isinstance(sparse, stc.SparseTensor)
    torch.testing.assert_close(sparse.to_dense(), expected)


@pytest.mark.parametrize("convert", [lambda f: f, stc.SparseTensor.to_torch, stc.SparseTensor.to_scipy])
@pytest.mark.parametrize("which", [(0, 1, 2), (1,)])
def test_mttkrp_takes_sparse_factors_for_one_mode_and_for_all(convert, which):
    x, factors = tensor(6, 5, 4), [matrix(n, 3) for n in (6, 5, 4)]
    factors = [torch.where(f > 0, f, 0) if m in which else f for m, f in enumerate(factors)]
    given = [convert(stc.SparseTensor.from_dense(f)) if m in which else f for m, f in enumerate(factors)]
    for mode, one in enumerate(stc.mttkrp(x, given)):
        own = stc.mttkrp(x, given, mode)
        alone = set(which) == {mode}
        assert isinstance(one, torch.Tensor) == isinstance(own, torch.Tensor) == alone, "as einsum of two sparse"
        expected = stc.mttkrp(x, factors, mode)
        for found in (one, own):
            close(found, expected)


def test_other_operations_take_sparse_operands():
    x, m = tensor(6, 5, 4), torch.where(matrix(6, 3) > 0, 1.0, 0.0).double()
    expected = torch.einsum("ijk,ir->rjk", x.to_dense(), m)
    close(stc.ttm(x, stc.SparseTensor.from_dense(m.T), 0), expected)
    close(stc.ttv(x, stc.SparseTensor.from_dense(m[:, 0]), 0), expected[0])


def test_gradients_flow_through_an_operation():
    x, b = tensor(6, 5, 4), matrix(5, 3).requires_grad_()
    c = matrix(4, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda b, c: stc.mttkrp(x, [None, b, c], 0), (b, c))


def test_operations_are_registered_by_name():
    assert {"contract", "mttkrp", "sddmm", "spmm", "ttm", "ttmc", "ttv"} <= set(stc.OPERATIONS)
    assert all(stc.OPERATIONS[name].__doc__ for name in ("mttkrp", "contract"))


@pytest.mark.parametrize(("order", "ranks"), [(3, 2), (9, 9), (20, 20), (45, 7), (1, 51)])
def test_letters_are_distinct(order, ranks):
    modes, free = letters_of(order, ranks, "op")
    assert (len(modes), len(free)) == (order, ranks)
    assert len(set(modes + free)) == order + ranks


def x3():
    return tensor(5, 6, 7)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: stc.mttkrp(x3(), [None, matrix(6, 2)], 0), stc.EquationError, "list of 3"),
        (lambda: stc.mttkrp(x3(), matrix(6, 2), 0), stc.EquationError, "found a tensor"),
        (lambda: stc.mttkrp(x3(), [None, None, matrix(7, 2)], 0), stc.ShapeError, r"factors\[1\].*NoneType"),
        (lambda: stc.mttkrp(x3(), [None, matrix(5, 2), matrix(7, 2)], 0), stc.ShapeError, r"factors\[1\].*\(6, rank\)"),
        (lambda: stc.mttkrp(x3(), [None, matrix(6, 2), matrix(7, 3)], 0), stc.ShapeError, "one rank"),
        (lambda: stc.mttkrp(x3(), [None] * 3, 3), stc.ShapeError, "mttkrp: a tensor of 3 modes has no mode 3"),
        (lambda: stc.mttkrp(tensor(5), [None], 0), stc.EquationError, "at least 2 modes"),
        (
            lambda: stc.mttkrp(x3(), [matrix(5, 2), tensor(6, 5), tensor(6, 2)]),
            stc.ShapeError,
            r"\[2\].*found \(6, 2\)",
        ),
        (
            lambda: stc.mttkrp(x3(), [matrix(5, 2), matrix(6, 2), tensor(7, 2, dtype=torch.float32)]),
            stc.DtypeError,
            r"factors\[2\]",
        ),
        (lambda: stc.ttmc(x3(), [None, matrix(6), matrix(7, 2)], 0), stc.ShapeError, r"matrices\[1\]"),
        (lambda: stc.ttm(x3(), matrix(6, 2), 0), stc.ShapeError, r"mode 0.*\(rank, 5\)"),
        (lambda: stc.ttv(x3(), matrix(6, 1), 1), stc.ShapeError, r"mode 1 must have shape \(6,\)"),
        (lambda: stc.spmm(x3(), matrix(6, 2)), stc.ShapeError, "must be a matrix"),
        (lambda: stc.spmm(tensor(5, 6), matrix(5, 2)), stc.ShapeError, "6 rows"),
        (lambda: stc.sddmm(tensor(5, 6), matrix(5, 2), matrix(6, 3)), stc.ShapeError, "one rank"),
        (lambda: stc.contract(x3(), matrix(6, 2), 1), stc.ShapeError, "mode 2 of x has size 7"),
        (lambda: stc.contract(x3(), matrix(7, 2), ((2, 1), (0,))), stc.EquationError, "as many modes"),
        (lambda: stc.contract(x3(), matrix(7, 7), ((2, 2), (0, 1))), stc.EquationError, "named twice"),
        (lambda: stc.contract(x3(), matrix(7, 2), 3), stc.ShapeError, "3 modes cannot be summed"),
        (lambda: stc.contract(x3(), [1.0], 1), stc.ShapeError, "dense torch tensor"),
        (lambda: stc.spmm(matrix(5, 6), matrix(6, 2)), stc.EquationError, "must be sparse"),
    ],
)
def test_refusals_name_the_operand_and_what_was_expected(call, error, says):
    with pytest.raises(error, match=says):
        call()
