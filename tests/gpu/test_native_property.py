"""Random einsums, gradients and contractions by the generated Triton kernels, natively."""

from __future__ import annotations

import pytest
import torch

from sparsetc.testing.findings import sweep

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BATCHES = {"einsums": (0, 400, 40), "gradients": (0, 40, 10), "contractions": (0, 100, 20)}
"""First seed, last seed, seeds a test."""


def batches() -> list[tuple[str, range]]:
    """Each kind's seeds, a test's worth at a time."""
    return [(kind, range(n, n + step)) for kind, (a, b, step) in BATCHES.items() for n in range(a, b, step)]


@pytest.mark.parametrize(("kind", "seeds"), batches(), ids=str)
def test_any_case_agrees_with_the_reference(kind: str, seeds: range) -> None:
    assert sweep(kind, seeds, "triton", "cuda") > len(seeds) // 2
