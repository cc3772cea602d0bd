"""Executables of the generated Triton source alone, run by Triton's interpreter, with and without a second pass."""

from __future__ import annotations

import pytest
import torch
from executable_cases import (
    ADDED_BY_A_SECOND_PASS,
    CASES,
    check_accumulation,
    check_output,
    check_rows_without_nonzeros,
    long_rows_added,
    made,
)

import sparsetc as stc

KINDS = [(name, False) for name in CASES] + [(name, True) for name in ADDED_BY_A_SECOND_PASS]


@pytest.mark.parametrize(("name", "deterministic"), KINDS, ids=str)
def test_outputs_are_made_overwritten_and_added_to(name: str, deterministic: bool) -> None:
    m = made(name, "triton", deterministic)
    assert (m.arrays.second is not None) == deterministic
    check_output(m)
    check_accumulation(m)


def test_rows_without_nonzeros_are_zeroed_before_a_second_pass() -> None:
    plan = long_rows_added("0", "1", most=50)
    assert check_rows_without_nonzeros(plan, "triton", deterministic=True, added=2).second is not None


def test_gradients_of_which_every_row_is_stored() -> None:
    """No zeros are asked for where no kernel adds to any."""
    g = torch.Generator().manual_seed(0)
    matrix = torch.diag(torch.rand(12, generator=g) + 0.5) + torch.diag(torch.rand(11, generator=g) + 0.5, 1)
    x, b = stc.SparseTensor.from_dense(matrix), torch.randn(12, 8, generator=g, requires_grad=True)
    values = x.values.clone().requires_grad_()
    y = stc.einsum("ij,jr->ir", x.with_values(values), b, plan="rows", backend="triton")
    y.square().sum().backward()
    expected = 2 * matrix.T @ (matrix @ b.detach())
    torch.testing.assert_close(b.grad, expected)


def test_rows_without_nonzeros_are_stored_by_items_of_nothing() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.rand(20, 9, generator=g) * (torch.rand(20, 1, generator=g) < 0.7)
    b, sparse = torch.rand(9, 4, generator=g), stc.SparseTensor.from_dense(x)
    k = stc.compile("ij,jr->ir", sparse, b, plan="coo", backend="triton")
    assert k.contraction.innermost.parts[0].packed.items == 20
    torch.testing.assert_close(k(b), x @ b)
    torch.testing.assert_close(stc.einsum("ij,ir->jr", sparse, torch.ones(20, 4)), x.T @ torch.ones(20, 4))
