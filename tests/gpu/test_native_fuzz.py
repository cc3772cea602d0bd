"""Random einsums, gradients and contractions by the generated Triton kernels, natively."""

from __future__ import annotations

import pytest
import torch
from fuzz.run import sweep

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize(
    ("kind", "number", "examples"),
    [*(("einsums", n, 80) for n in range(5)), *(("gradients", n, 20) for n in range(2)), ("contractions", 0, 100)],
)
def test_any_case_agrees_with_the_reference(kind: str, number: int, examples: int) -> None:
    assert sweep(kind, number, examples, "triton", "cuda")["checked"] > examples // 2
