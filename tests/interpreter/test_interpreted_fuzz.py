"""Random einsums, gradients and contractions through the generated Triton source, under the interpreter."""

from __future__ import annotations

import pytest
from fuzz.run import sweep


@pytest.mark.parametrize(
    ("kind", "number", "examples"),
    [*(("einsums", n, 80) for n in range(2)), *(("gradients", n, 20) for n in range(2)), ("contractions", 0, 40)],
)
def test_any_case_agrees_with_the_reference(kind: str, number: int, examples: int) -> None:
    assert sweep(kind, number, examples, "triton")["checked"] > examples // 2
