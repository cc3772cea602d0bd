"""Dense operands that are rounded to bfloat16 once a call: the generated Triton source, run by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from cases import assert_matches, check
from rounded_cases import MIXED, SCALAR, rounding

import sparsetc as stc


@pytest.mark.parametrize("name", SCALAR)
def test_every_format(name: str) -> None:
    """The result is that of rounded operands, to float32."""
    case = SCALAR[name]
    operands = case.problem.operands()
    kernel = case.compiled()
    assert "_bf16" in kernel.source
    assert_matches(kernel(*operands[1:]), case.equation, case.as_read(operands))


@pytest.mark.parametrize("name", MIXED)
def test_parts_that_read_differently(name: str) -> None:
    case = MIXED[name]
    kernel = check(case.problem, tolerance=1e-2, **case.settings)
    operands = case.problem.operands()
    for read in (operands, case.as_read(operands)):
        with pytest.raises(AssertionError, match="elements are off"):
            assert_matches(kernel(*operands[1:]), case.equation, read)


def test_operands_are_rounded_at_each_call() -> None:
    """A call reads what operands hold by then, and leaves them as they are."""
    case = SCALAR["coo"]
    x, b = case.problem.operands()
    kernel = case.compiled()
    for scale in (1.0, 3.0):
        own = b * scale
        before = own.clone()
        assert_matches(kernel(own), case.equation, case.as_read([x, own]))
        assert torch.equal(own, before)


def test_what_is_large_stays_finite() -> None:
    case = SCALAR["coo"]
    x, b = case.problem.operands()
    b = b * 1e37
    assert_matches(case.compiled()(b), case.equation, [x, b], 1e-2)
    b[0, 0] = torch.inf
    found = case.compiled()(b)
    assert torch.equal(found.isfinite(), stc.einsum(case.equation, x, b, backend="torch").isfinite())


def test_gradients_and_order() -> None:
    """A gradient is planned anew; sums in order have the same bits again."""
    case = SCALAR["rows"]
    x, *dense = case.problem.operands()
    own = [d.clone().requires_grad_() for d in dense]
    kernel = stc.compile(case.equation, x, *dense, deterministic=True, **case.settings)
    result = kernel(*own)
    result.sum().backward()
    assert torch.equal(result.detach(), kernel(*dense))
    plain = [d.clone().requires_grad_() for d in dense]
    stc.einsum(case.equation, x, *plain).sum().backward()
    for rounded, exact in zip(own, plain, strict=True):
        torch.testing.assert_close(rounded.grad, exact.grad, rtol=1e-2, atol=1e-2)


def test_medium_through_the_planner() -> None:
    g = torch.Generator().manual_seed(0)
    x = stc.SparseTensor.from_dense((torch.rand(40, 40, generator=g) < 0.1).float())
    b = torch.rand(40, 24, generator=g)
    plan = stc.compile("ij,jr->ir", x, b, plan="coo", precision="medium").plan
    found = stc.einsum("ij,jr->ir", x, b, plan=rounding(plan, "B"))
    assert_matches(found, "ij,jr->ir", [x, b.to(torch.bfloat16).float()])
