"""Random einsums through the generated Triton source, under the interpreter."""

from __future__ import annotations

import torch
from cases import assert_matches, poisoned
from hypothesis import given, settings
from test_property import Drawn, problems

import sparsetc as stc

INTERPRETED = {torch.float32, torch.float64, torch.float16, torch.int32, torch.int64}


@settings(max_examples=600)
@given(problems().filter(lambda drawn: drawn.dtype in INTERPRETED))
def test_any_einsum_agrees_with_the_reference(drawn: Drawn) -> None:
    operands = drawn.operands()
    with poisoned(), stc.options(backend="triton"):
        try:
            result = stc.einsum(
                drawn.equation,
                *operands,
                output=drawn.output,
                plan=drawn.plan,
                deterministic=drawn.deterministic,
            )
        except stc.PlanError:
            if drawn.plan not in ("fiber", "rows"):
                raise
            return  # the plan does not apply
    assert_matches(result, drawn.equation, operands)
