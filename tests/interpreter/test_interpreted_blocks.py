"""Einsums of tensors in blocks by the generated Triton source, run by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from block_cases import CASES, check, operands_of

import sparsetc as stc


@pytest.mark.parametrize("name", CASES)
def test_results(name: str) -> None:
    equation, specs = CASES[name]
    operands = operands_of(equation, specs, 6, dtype=torch.float32)
    check(stc.einsum(equation, *operands), equation, operands, 1e-4)
