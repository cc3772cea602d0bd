"""Helpers for tests of the compiler, of what extends it, and of sparse tensors.

`check_format` is the conformance suite of formats. `reference` says what an einsum is, `interpret` what a plan and a
program of tiles are, by plain torch that shares no code with the generated kernels. `assert_close` compares tensors.
"""

from typing import Any

import torch

from sparsetc.packing.stored import check_arrays, read
from sparsetc.tensor.sparse_tensor import SparseTensor
from sparsetc.testing.conformance import PATTERNS, UNBOUNDED, check_format, pattern

__all__ = ["PATTERNS", "UNBOUNDED", "assert_close", "check_arrays", "check_format", "pattern", "read"]


def assert_close(actual: SparseTensor, expected: SparseTensor, **settings: Any) -> None:
    """Raise AssertionError where two sparse tensors differ, as `torch.testing.assert_close`, whose settings these are.

    An entry of one alone is compared with 0. torch's own takes tensors of torch and what is made dense unasked.

    Examples:
        >>> stc.testing.assert_close(stc.eye(3), stc.eye(3) * (1 + 1e-7))
    """
    if actual.shape != expected.shape:
        raise AssertionError(f"the shapes are {actual.shape} and {expected.shape}")
    absent = (abs(actual) + abs(expected)).map(torch.zeros_like)  # of the entries of either
    first, second = ((absent + one).values.to(one.dtype) for one in (actual, expected))
    torch.testing.assert_close(first, second, **settings)
