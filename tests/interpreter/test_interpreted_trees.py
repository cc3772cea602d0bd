"""The generated Triton source of contraction trees, run by Triton's interpreter."""

from __future__ import annotations

from math import prod

import pytest
import torch
from tree_cases import KEYED, TREES, TreeCase

import sparsetc as stc

# A search of bits for each position is slow here, and the same for tiles of any size.
FAST = [case for case in KEYED if case.format == "dense_tile" or prod(case.sides) <= 30]


@pytest.mark.parametrize("case", [*TREES, *FAST], ids=str)
def test_a_tree_means_its_einsum(case: TreeCase) -> None:
    found = case.kernel()(*case.operands()[1])
    found = found.to_dense() if isinstance(found, stc.SparseTensor) else found
    torch.testing.assert_close(found, case.expected())
