"""Random einsums, gradients and contractions through the generated Triton source, under the interpreter."""

from __future__ import annotations

import pytest
from fuzz.run import sweep

from sparsetc.ir.program import operands


@pytest.mark.parametrize(
    ("kind", "number", "examples"),
    [*(("einsums", n, 80) for n in range(2)), *(("gradients", n, 20) for n in range(2)), ("contractions", 0, 40)],
)
def test_any_case_agrees_with_the_reference(
    kind: str, number: int, examples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By odd numbers operands are read as they lie however few elements are neighbours."""
    if number % 2:
        monkeypatch.setattr(operands, "RUN", 1)
        operands.named_operands.cache_clear()
    assert sweep(kind, number, examples, "triton")["checked"] > examples // 2
