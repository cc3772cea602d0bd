"""Named operations: thin sugar over `einsum`, for a sparse operand of any order, in any mode.

In: a sparse operand `x` (whatever `einsum` takes as one) and dense tensors, or, but for `spmm`, sparse ones in their
place. Out: what `einsum` returns for the equation written from the operands' orders. Each takes `einsum`'s settings
(``plan=``, ``precision=``, ``output=``, …), is differentiable where `einsum` is, and is known by its name in
`OPERATIONS`.

Factor matrices have a row an index of their mode: (size of the mode, rank).
"""

from sparsetc.ops.matrices import contract, min_plus, sddmm, spmm
from sparsetc.ops.products import mttkrp, ttm, ttmc, ttv

__all__ = ["contract", "min_plus", "mttkrp", "sddmm", "spmm", "ttm", "ttmc", "ttv"]
