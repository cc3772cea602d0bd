"""What contractions have in common: what a kernel asks of them, and what those of each kind would write alike.

In: a `Bound` einsum and its operands. Out: `Contraction`, the interface; `Compiled`, the base of the classes that have
it: `Single` and, for what takes more than a step, `Blocked`, `Chained` and `sparsetc.contraction.several.Several`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path
from typing import Any, Protocol

import torch

from sparsetc.codegen.launch import Values
from sparsetc.contraction.canonical import check_operand
from sparsetc.contraction.evaluate import IntegerSums
from sparsetc.contraction.output import check_form
from sparsetc.ir.equation.einsum import Bound
from sparsetc.options import Options
from sparsetc.tensor.pattern import Pattern
from sparsetc.tensor.sparse_tensor import SparseTensor

Operand = SparseTensor | torch.Tensor
Result = SparseTensor | torch.Tensor


class Contraction(Protocol):
    """What a kernel runs."""

    bound: Bound
    """The einsum as written."""
    settings: Options
    form: str
    """The form of the output that was asked for: ``auto``, ``dense`` or ``sparse``."""
    dtype: torch.dtype
    """The operands' dtype."""
    device: torch.device
    sums: IntegerSums | None
    """What finds sums of integers that pass 64 bits; None where none can."""
    key: str
    """The name by which operators of `torch.library` know the contraction."""

    @property
    def backend(self) -> str:
        """The backend that programs are generated for: ``triton`` or ``torch``."""

    @property
    def steps(self) -> Sequence[Any]:
        """The contractions of which one operand, or two, are sparse, in order."""

    @property
    def plan(self) -> Any:
        """The plan in the form that ``plan=`` takes, to make the same contraction again."""

    @property
    def source(self) -> str:
        """The generated programs."""

    @property
    def path(self) -> Path:
        """The file of the first."""

    @property
    def sparse(self) -> bool:
        """Whether the result is a SparseTensor."""

    @property
    def empty(self) -> bool:
        """Whether no nonzeros take part, so that the result has no positions, and is 0 where it is dense."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what `result` gives."""

    @property
    def result_dtype(self) -> torch.dtype:
        """The dtype of what `result` gives."""

    def bare(self, number: int) -> Pattern:
        """The pattern of a sparse operand, with nothing kept."""

    def pattern_on(self, patterns: Sequence[Pattern]) -> Pattern | None:
        """The pattern of a sparse result, given those of the operands, one of which it may be; None of a dense one."""

    def result(
        self,
        patterns: Sequence[Pattern],
        values: Sequence[torch.Tensor],
        dense: Sequence[torch.Tensor],
        packed: Values | None = None,
    ) -> torch.Tensor:
        """A dense result, or a sparse one's values; differentiable. Integers are made modulo 2**64: see `evaluate`."""

    def gradient(
        self,
        patterns: Sequence[Pattern],
        operand: int,
        values: Sequence[torch.Tensor],
        dense: Sequence[torch.Tensor],
        upstream: torch.Tensor,
    ) -> torch.Tensor:
        """The gradient for one of values and dense operands, given that of the result; outside autograd."""

    def packed(self, operands: Sequence[SparseTensor], known: dict[Any, Any] | None = None) -> Values | None:
        """Values as the storages have them; None where each call reads them as they are.

        Args:
            operands: the sparse operands.
            known: values that other contractions of the same operands packed; those of this one are added.
        """

    def ptx(self, target: str) -> str:
        """The assembly for a named target."""

    def explain(self) -> Any:
        """Why it is as it is."""


class Compiled:
    """A contraction's einsum and the patterns of its operands; values read at each call, gradients by autograd."""

    def __init__(self, bound: Bound, operands: Sequence[Operand], settings: Options, form: str) -> None:
        """Check dtypes, devices and the form; nothing is kept of the values.

        Raises:
            DtypeError, DeviceError: operands differ.
            PlanError: the form is not known, or is ``sparse`` of a result without a pattern.
        """
        given = [o for o in operands if isinstance(o, SparseTensor)]
        self.bound, self.settings, self.form = bound, settings, form
        self.dtype, self.device = given[0].dtype, given[0].device
        for position, operand in enumerate(operands):
            check_operand(operand, position, self.dtype, self.device)
        check_form(form, bound.einsum)
        self.sums = IntegerSums.of(bound, given)
        self._bare = [x.pattern.bare() for x in given]

    @property
    def result_dtype(self) -> torch.dtype:
        """The dtype of the operands, which the result has too."""
        return self.dtype

    def bare(self, number: int) -> Pattern:
        """The pattern of a sparse operand, with nothing kept."""
        return self._bare[number]

    def packed(self, operands: Sequence[SparseTensor], known: dict[Any, Any] | None = None) -> Values | None:
        """None, since values are read at each call."""
        return None

    def gradient(
        self: Contraction,
        patterns: Sequence[Pattern],
        operand: int,
        values: Sequence[torch.Tensor],
        dense: Sequence[torch.Tensor],
        upstream: torch.Tensor,
    ) -> torch.Tensor:
        """The gradient for one of values and dense operands, of the result as autograd follows it.

        Autograd does so in a thread of its own, since operators of a library run where it is off.
        """
        given = [t.detach() for t in (*values, *dense)]
        wanted = given[operand].requires_grad_()

        def found() -> torch.Tensor:
            with torch.enable_grad():
                result = self.result(patterns, given[: len(values)], given[len(values) :])
            return torch.autograd.grad(result, wanted, upstream)[0]

        with ThreadPoolExecutor(1) as one:
            return one.submit(copy_context().run, found).result()


def key_of(made: Contraction) -> str:
    """A name for a contraction that no other in this process has.

    It says what the shapes of operands and result follow from, so that what torch keeps on disk of a graph that it
    stands in is not taken for another's.
    """
    return f"{made.bound} {made.dtype} {made.sparse} {tuple(made.shape)} #{next(_numbers)}"


_numbers = itertools.count()
