"""An einsum that runs as another one: rewrites around a contraction.

In: rewrites, and the contraction of the einsum that the last of them gives. Out: `Rewritten`. How operands are
rewritten is composed once, and so is how the result is put back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

import torch

from sparsetc.codegen.launch import Values
from sparsetc.contraction.canonical import Operands, Patterns, Tensors, dense_of_call
from sparsetc.contraction.contraction import Contraction
from sparsetc.contraction.rewrites import Change, Rewrite
from sparsetc.ir.equation.einsum import Bound
from sparsetc.options import Options
from sparsetc.tensor.pattern import Pattern
from sparsetc.tensor.sparse_tensor import SparseTensor


class Rewritten(Contraction):
    """A contraction that runs another.

    Attributes:
        _take: the operand that each one of the other contraction follows from, and what is done to it.
        _push: what is done to a dense result.
        patterns: the patterns of the other's sparse operands.
        _own: True if the result has the first operand's own pattern.
    """

    def __init__(
        self,
        bound: Bound,
        operands: Operands,
        settings: Options,
        form: str,
        rewrites: Sequence[Rewrite],
        make: Callable[[], Contraction],
    ) -> None:
        super().__init__(bound, operands, settings, form, expanded=False)
        self.contraction = make()
        self.inner = (self.contraction,)
        self.empty, self.result_dtype = self.contraction.empty, self.contraction.result_dtype
        self.rewrites = tuple(f"{rewrite.bound.einsum}   {rewrite.name}" for rewrite in rewrites)
        self._push = [rewrite.push for rewrite in reversed(rewrites) if rewrite.push]
        take: list[tuple[int, list[Change]] | None] = [(p, []) for p in range(len(operands))]
        for rewrite in rewrites:
            sources = [(None if one is None else take[one[0]], one) for one in rewrite.take]
            take = [s and one and (s[0], [*s[1], one[1]] if one[1] else s[1]) for s, one in sources]
        self._take = take
        levels = [_patterns_of(operands), *(_patterns_of(rewrite.operands) for rewrite in rewrites)]
        self.patterns = levels.pop()
        pattern = self.contraction.pattern_on(self.patterns)
        for rewrite in reversed(rewrites):
            patterns = levels.pop()
            pattern = rewrite.put(patterns, pattern, self.empty) if rewrite.put else None
        self._own, self.shape = pattern is patterns[0], bound.output_shape
        self.pattern = None if self._own else pattern
        if pattern is not None:
            self.shape = pattern.values_shape(bound.output_shape[pattern.order :])

    def pattern_on(self, patterns: Patterns) -> Pattern | None:
        """The first operand's own pattern where all of its entries are kept, or the one found when this was made."""
        return patterns[0] if self._own else self.pattern

    def result(self, patterns: Patterns, values: Tensors, dense: Tensors, packed: Values | None = None) -> torch.Tensor:
        """A dense result, or a sparse one's values; differentiable."""
        pulled = self.pull(values, dense_of_call(self.bound, dense, self.dtype, self.device))
        result = self.contraction.result(self.patterns, *pulled, packed)
        if not self.sparse:
            for push in self._push:
                result = push(result)
            return result
        if 0 in self.shape:  # where no entries are left, the other result may be one number, 0
            result = result.reshape(-1)[:0]
        return result.reshape(self.shape)

    def pull(self, values: Tensors, dense: Tensors) -> tuple[Tensors, Tensors]:
        """Values and dense operands as the other contraction has them; differentiable."""
        outer, inner = self.bound.einsum, self.contraction.bound.einsum
        tensors = dict(zip((*outer.sparse, *outer.dense), (*values, *dense), strict=True))
        pulled = dict[int, torch.Tensor]()
        for position, taken in enumerate(self._take):
            if taken is not None:
                source, changes = taken
                pulled[position] = reduce(lambda tensor, change: change(tensor), changes, tensors[source])
        return [pulled[p] for p in inner.sparse if p in pulled], [pulled[p] for p in inner.dense]


def _patterns_of(operands: Operands) -> list[Pattern]:
    return [o.pattern for o in operands if isinstance(o, SparseTensor)]
