"""Tools for tests of the compiler, of extensions, and of sparse tensors.

`check_format` is the conformance suite of formats, `pattern` makes coordinates for it, `assert_close` compares sparse
tensors.
"""

from typing import Any

import torch

from sparsetc.packing.stored import check_arrays, read
from sparsetc.tensor.sparse_tensor import SparseTensor
from sparsetc.testing.conformance import check_format
from sparsetc.testing.patterns import PATTERNS, UNBOUNDED, pattern

__all__ = ["PATTERNS", "UNBOUNDED", "assert_close", "check_arrays", "check_format", "pattern", "read"]


def assert_close(actual: SparseTensor, expected: SparseTensor, **settings: Any) -> None:
    """Raise AssertionError if two sparse tensors differ; settings as for `torch.testing.assert_close`.

    An entry of one alone is compared with 0. torch's own takes tensors of torch and what is made dense unasked.

    Examples:
        >>> stc.testing.assert_close(stc.eye(3), stc.eye(3) * (1 + 1e-7))
    """
    if actual.shape != expected.shape:
        raise AssertionError(f"the shapes are {actual.shape} and {expected.shape}")
    absent = (abs(actual) + abs(expected)).map(torch.zeros_like)  # of the entries of either
    first, second = ((absent + one).values.to(one.dtype) for one in (actual, expected))
    torch.testing.assert_close(first, second, **settings)
