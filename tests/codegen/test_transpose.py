"""`codegen.launch.contiguous`: which views are matrices turned, and what is copied by torch."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given
from matrix_units import TARGETS
from test_decomposition_aot import compiled
from transpose_cases import views

from sparsetc.codegen.launch import as_matrices, contiguous


@given(views())
def test_matrices_are_the_view_turned(view: torch.Tensor) -> None:
    matrices = as_matrices(tuple(view.shape), view.stride())
    if matrices is None:
        return
    (count, source_matrix, result_matrix), (rows, source_row, _), (columns, _, result_row) = matrices
    assert count * rows * columns == view.numel()
    result = torch.empty(view.shape, dtype=view.dtype)
    source = view.as_strided((count, rows, columns), (source_matrix, source_row, 1))
    result.as_strided((count, columns, rows), (result_matrix, result_row, 1)).copy_(source.transpose(1, 2))
    assert torch.equal(result, view)


def test_orders_that_kernels_are_given_turned() -> None:
    x = torch.empty(6, 5, 4, 3)
    turned = {(1, 0, 2, 3): None, (0, 1, 3, 2): (30, 4, 3), (2, 3, 0, 1): (1, 30, 12), (3, 0, 1, 2): (1, 120, 3)}
    for order, sizes in turned.items():
        matrices = as_matrices(tuple(x.permute(order).shape), x.permute(order).stride())
        assert (matrices and tuple(size for size, *_ in matrices)) == sizes


def test_on_a_cpu_torch_copies() -> None:
    x = torch.rand(300, 200, requires_grad=True)
    assert torch.equal(contiguous(x.T), x.T)
    assert contiguous(x) is x
    contiguous(x.T).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize("target", TARGETS)
def test_the_kernel_compiles(target: str) -> None:
    pytest.importorskip("triton")
    from sparsetc.codegen.kernels import transpose

    for word in ("i8", "i16", "i32", "i64"):
        stack = 8 if target == "sm_80" else 0  # of 16 bits, by Triton 3.8
        compiled(transpose, dict.fromkeys(("source", "result"), f"*{word}"), {}, target, 2, stack)
