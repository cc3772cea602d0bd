"""Torch's own matrix products: in the precision that is asked for, and of 16-bit matrices with sums in 32 bits.

In: matrices of one dtype, and what their product is written to. Out: the product, as generated torch programs and
products of dense operands alone take it.
"""

from __future__ import annotations

import torch

from sparsetc.errors import DtypeError
from sparsetc.support.entry import matmul_precision as matmul_precision  # generated programs take both here


def multiply(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
    """Write the product of two matrices of one dtype, whose sums are as wide as `out`.

    Args:
        left: (m, k).
        right: (k, n), of the same dtype.
        out: (m, n), of that dtype, or float32 where the matrices are of 16 bits.

    Raises:
        DtypeError: the matrices are of two dtypes.
    """
    if left.dtype != right.dtype:
        raise DtypeError(f"a product is of matrices of one dtype, found {left.dtype} and {right.dtype}")
    if left.dtype == out.dtype:
        torch.mm(left, right, out=out)
    elif left.is_cuda:
        torch.mm(left, right, out_dtype=out.dtype, out=out)
    else:  # torch has such products on GPUs alone
        torch.mm(left.to(out.dtype), right.to(out.dtype), out=out)
