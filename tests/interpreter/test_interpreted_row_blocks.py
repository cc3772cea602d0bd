"""Row blocks, a format outside the package: the generated Triton source, run by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from row_block_cases import EQUATIONS, check, sparse_letters

TENSORS = ("ijk,jr,kr->ir", "ijk,jr,ks->irs", "ijk,i->jk", "ijk,ir,jr,kr->kji")
"""Einsums of a tensor; of the others each takes seconds."""


@pytest.mark.parametrize("layout", ["windows", "odd-strips"])
@pytest.mark.parametrize("equation", [e for e in EQUATIONS if len(sparse_letters(e)) == 2 or e in TENSORS])
def test_every_einsum(equation: str, layout: str) -> None:
    check(equation, layout, torch.float32, "triton")
