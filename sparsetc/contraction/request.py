"""The records of rules: an einsum that is to be compiled, and its rewrite as another one.

In: a `Bound` einsum, operands, options. Out: `Request`, and `Rewrite`, which a rule makes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from sparsetc.contraction.operands import Operands, Patterns, Tensors
from sparsetc.ir.equation.einsum import Bound, Einsum
from sparsetc.options import Options
from sparsetc.support import Ints, cached_property
from sparsetc.tensor.pattern import Pattern
from sparsetc.tensor.sparse_tensor import SparseTensor

T = TypeVar("T")
Change = Callable[..., Tensor]
Take = tuple[Ints, Change | None]
"""How an operand of the rewritten einsum is made: the positions of those before that it is made of, and a function of
these. None in place of a function: it is that operand as it is, or, where there are no positions, a pattern of ones,
which has no values."""
Put = Callable[[Patterns, Pattern | None, bool], tuple[Pattern | None, Change | None]]
"""How a result is put back; arguments and results are those of `Rewrite.put`."""


@dataclass(frozen=True)
class Request:
    """An einsum that is to be compiled.

    Attributes:
        bound: the einsum.
        operands: to compile it for; values are only looked at for their dtype.
        settings: plan, precision, memory limit, backend, determinism.
        form: of the result, ``auto``, ``dense`` or ``sparse``.
        repeated: True if these are the operands of one call of `einsum`, not those of a kernel that will take others. A
            dense dimension of stride 0 is then left out as one of size 1 is, so that one slice is read and not copies;
            and the pattern may be one of many that are met once.
        cut: True if the sparse operand is a chunk of a tensor cut up for streaming. All chunks have one einsum, so the
            count of this one's nonzeros decides nothing.
        unmet: True if several patterns are not known to have met before.
        in_blocks: True if dense modes are positions in blocks, which cannot become coordinates.
        written: the einsum that rules began with, whose letters a schedule may name; None where it is this one.
    """

    bound: Bound
    operands: Operands
    settings: Options
    form: str
    repeated: bool = False
    cut: bool = False
    unmet: bool = False
    in_blocks: bool = False
    written: Einsum | None = None

    def once(self, name: str, make: Callable[[], T]) -> T:
        """Return what a function makes of the request, made once a name."""
        kept = vars(self)
        if name not in kept:
            kept[name] = make()
        return kept[name]  # type: ignore[no-any-return]

    @cached_property
    def sparse(self) -> list[SparseTensor]:
        """The sparse operands."""
        return [o for o in self.operands if isinstance(o, SparseTensor)]

    @property
    def dense_modes(self) -> bool:
        """True if an operand has dense modes, or is in blocks."""
        return any(x._values.ndim > 1 for x in self.sparse)

    @property
    def like(self) -> Tensor:
        """A number of the operands' dtype and device, to stand in for operands."""
        x = self.sparse[0]
        return torch.zeros((), dtype=x.dtype, device=x.device)

    @property
    def as_it_is(self) -> list[Take]:
        """Every operand as it is."""
        return [((p,), None) for p in range(len(self.operands))]


@dataclass(frozen=True)
class Rewrite:
    """An einsum run as another.

    Attributes:
        name: for a reader.
        inner: the einsum that it becomes.
        take: how each operand of that one follows from those before.
        put: the pattern of a result, None of a dense one, and how the result follows from the other's; given the
            patterns of the operands before, that of the other's result, and whether no nonzeros take part. None where
            both are the same.
        holds: whether it serves the dense operands of a call; None for all.
    """

    name: str
    inner: Request
    take: Sequence[Take]
    put: Put | None = None
    holds: Callable[[Tensors], bool] | None = None
