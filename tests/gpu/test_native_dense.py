"""``plan="dense"`` on a GPU: torch's products in every precision and type, in CUDA graphs, and as they are priced."""

from __future__ import annotations

import pytest
import torch
from cases import Problem, assert_matches, replayed
from test_dense_plan import EQUATIONS, half_full, made

import sparsetc as stc
from sparsetc.codegen.launch import contiguous

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SIZES = {"i": 40, "j": 40, "k": 24, "l": 8, "r": 32, "s": 16}
TOLERANCE = {"highest": 1e-5, "high": 4e-3, "medium": 3e-2}


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("equation", EQUATIONS)
def test_every_einsum(equation: str, precision: str) -> None:
    operands = Problem(equation, SIZES, "dense", torch.float32).operands("cuda")
    kernel = made(equation, *operands, precision=precision)
    assert kernel.plan.name == "dense"
    assert_matches(kernel(*operands[1:]), equation, operands, TOLERANCE[precision])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("equation", ["ij,jr->ir", "ij,j->i", "ijk,jr,kr->ir", "ijk,jr,ks->irs", "ijk,ijr->ikr"])
def test_every_type(equation: str, dtype: torch.dtype) -> None:
    operands = Problem(equation, SIZES, "random", dtype).operands("cuda")
    assert_matches(made(equation, *operands)(*operands[1:]), equation, operands)


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("equation", ["ij,jr->ir", "ijk,jr,kr->ir", "ijk,jr,ks->irs"])
def test_a_call_can_be_captured_in_a_graph(equation: str, precision: str) -> None:
    operands = Problem(equation, SIZES, "dense", torch.float32).operands("cuda")
    kernel = made(equation, *operands, precision=precision)
    kernel(*operands[1:])
    result = replayed(kernel, operands[1:])
    assert_matches(result, equation, operands, TOLERANCE[precision])


def test_zeros_do_not_meet_infinities() -> None:
    x, b = half_full(60, 50).to("cuda"), torch.rand(50, 8, device="cuda")
    b[2, 3] = torch.inf
    found = made("ij,jr->ir", x, b)(b)
    assert torch.equal(found[:, 3].isfinite(), x.to_dense()[:, 2] == 0)


def test_a_half_full_matrix() -> None:
    x, b = half_full(2000, 2000).to("cuda"), torch.rand(2000, 4096, device="cuda")
    for precision in ("high", "medium"):
        kernel = stc.compile("ij,jr->ir", x, b, precision=precision)
        assert kernel.plan.name == "dense"
        assert_matches(kernel(b), "ij,jr->ir", [x, b], TOLERANCE[precision])
        assert torch.equal(kernel(b), kernel(b))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64, torch.bool], ids=str)
def test_operands_in_another_order_are_copied_by_tiles(dtype: torch.dtype) -> None:
    for shape, order in (((16, 4096), (1, 0)), ((300, 7, 401), (0, 2, 1)), ((5, 1000, 3, 30), (2, 3, 0, 1))):
        whole = torch.randint(0, 2, shape, device="cuda").to(dtype)
        view = whole.permute(order)
        assert torch.equal(contiguous(view), view)
        assert contiguous(view).is_contiguous()
        assert torch.equal(contiguous(view[..., 3:]), view[..., 3:])
