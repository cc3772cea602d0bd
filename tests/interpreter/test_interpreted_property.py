"""Random einsums, gradients and contractions through the generated Triton source, under the interpreter."""

from __future__ import annotations

import pytest

from sparsetc.testing.findings import sweep

BATCHES = {"einsums": (0, 1200, 75), "gradients": (0, 100, 20), "contractions": (0, 200, 40)}
"""First seed, last seed, seeds a test."""


def batches() -> list[tuple[str, range]]:
    """Each kind's seeds, a test's worth at a time."""
    return [(kind, range(n, n + step)) for kind, (a, b, step) in BATCHES.items() for n in range(a, b, step)]


@pytest.mark.parametrize(("kind", "seeds"), batches(), ids=str)
def test_any_case_agrees_with_the_reference(kind: str, seeds: range) -> None:
    assert sweep(kind, seeds, "triton") > len(seeds) // 2
