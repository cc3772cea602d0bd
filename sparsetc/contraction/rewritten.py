"""An einsum that runs as another one: a rewrite around a contraction.

In: a `Rewrite`, and the contraction of the einsum that it gives. Out: `Rewritten`. The rewrite is linear in each
operand and in the result, so gradients go through its transpose, which autograd knows.
"""

from __future__ import annotations

from typing import Protocol

import torch

from sparsetc.codegen.launch import Values
from sparsetc.contraction.autograd import following, transposed
from sparsetc.contraction.canonical import Operands, Patterns, dense_of_call
from sparsetc.contraction.contraction import Contraction
from sparsetc.contraction.dense import Tensors
from sparsetc.ir.equation.einsum import Bound
from sparsetc.options import Options
from sparsetc.tensor.pattern import Pattern
from sparsetc.tensor.sparse_tensor import SparseTensor


class Rewrite(Protocol):
    """An einsum as another one."""

    @property
    def patterns(self) -> Patterns:
        """The patterns of the other einsum's sparse operands."""

    def pull(self, values: Tensors, dense: Tensors) -> tuple[Tensors, Tensors]:
        """The other einsum's values and dense operands, of those of the one written; differentiable."""

    def push(self, result: torch.Tensor) -> torch.Tensor:
        """A dense result of the one written, of that of the other; differentiable."""

    def result_pattern(self, patterns: Patterns, other: Pattern | None, empty: bool) -> Pattern | None:
        """The pattern of a sparse result, or None of a dense one.

        Args:
            patterns: of the operands as written, the first of which the result may have.
            other: the pattern of the other einsum's result; None of a dense one.
            empty: whether no nonzeros take part in the other einsum.
        """


class Rewritten(Contraction):
    """A contraction of another einsum, on the way to which each operand and the result are rewritten."""

    def __init__(
        self, bound: Bound, operands: Operands, settings: Options, form: str, rewrite: Rewrite, inner: Contraction
    ) -> None:
        super().__init__(bound, operands, settings, form)
        self.rewrite, self.contraction, self.inner = rewrite, inner, (inner,)
        self.empty, self.result_dtype = inner.empty, inner.result_dtype
        patterns = [o.pattern for o in operands if isinstance(o, SparseTensor)]
        pattern = rewrite.result_pattern(patterns, inner.pattern_on(rewrite.patterns), inner.empty)
        self.sparse, self._own, self.shape = pattern is not None, pattern is patterns[0], bound.output_shape
        self._pattern = pattern
        if pattern is not None:
            self._pattern = pattern.bare() if self._own else pattern
            self.shape = pattern.values_shape(bound.output_shape[pattern.order :])

    def pattern_on(self, patterns: Patterns) -> Pattern | None:
        """The first operand's own pattern where all of its entries are kept, or the one found when this was made."""
        return patterns[0] if self._own else self._pattern

    def result(self, patterns: Patterns, values: Tensors, dense: Tensors, packed: Values | None = None) -> torch.Tensor:
        """A dense result, or a sparse one's values; differentiable."""
        pulled = self._pull(values, dense)
        return self._push(self.contraction.result(self.rewrite.patterns, *pulled))

    def _pull(self, values: Tensors, dense: Tensors) -> tuple[Tensors, Tensors]:
        return self.rewrite.pull(values, dense_of_call(self.bound, dense, self.dtype, self.device))

    def _push(self, result: torch.Tensor) -> torch.Tensor:
        if not self.sparse:
            return self.rewrite.push(result)
        if 0 in self.shape:  # where no entries are left, the other result may be one number, 0
            result = result.reshape(-1)[:0]
        return result.reshape(self.shape)

    def gradient(
        self, patterns: Patterns, operand: int, values: Tensors, dense: Tensors, upstream: torch.Tensor
    ) -> torch.Tensor:
        """The gradient for one of values and dense operands, given that of the result; outside autograd."""
        count, dense_count = len(values), len(self.contraction.bound.einsum.dense)
        with following():
            result = upstream.new_empty(self.contraction.shape).requires_grad_()
            (of_result,) = torch.autograd.grad(self._push(result), result, upstream)

        def pull(*tensors: torch.Tensor) -> Tensors:
            pulled = self._pull(tensors[:count], tensors[count:])
            return [*pulled[0], *pulled[1]]

        def gradient(n: int, pulled: Tensors) -> torch.Tensor:
            sparse = len(pulled) - dense_count
            return self.contraction.gradient(self.rewrite.patterns, n, pulled[:sparse], pulled[sparse:], of_result)

        return transposed(pull, [*values, *dense], operand, gradient)
