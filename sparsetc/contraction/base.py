"""What contractions have in common: what a kernel asks of them, and what follows from what each of them runs.

In: a `Bound` einsum and its operands. Out: `Contraction`, the base of the four kinds: `Single`, and for what takes more
than a step `Blocked`, `Chained` and `Several`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from math import prod
from typing import Any

import torch

from sparsetc.codegen.launch import Values
from sparsetc.contraction.canonical import Operands, Patterns, check_operand
from sparsetc.contraction.dense import Tensors
from sparsetc.contraction.guard import IntegerSums
from sparsetc.contraction.output import check_form
from sparsetc.explain import Explanation, StepReport, device_name
from sparsetc.ir.equation.einsum import Bound
from sparsetc.ir.program.tile import TileProgram
from sparsetc.options import Options
from sparsetc.runtime.executable import Listed
from sparsetc.tensor.pattern import Pattern, transforming
from sparsetc.tensor.sparse_tensor import SparseTensor
from sparsetc.tensor.sums import INTEGERS, captured


class Compiled(Listed):
    """What a user may look at, derived from what is run: `inner`, steps or contractions, in order."""

    @property
    def steps(self) -> Sequence[Any]:
        """The contractions of which one operand, or two, are sparse, in order; of one sparse operand there is one."""
        return tuple(step for one in self.inner for step in one.steps)

    @property
    def programs(self) -> tuple[TileProgram, ...]:
        """The tile programs of all steps, one a part; torch's own products have none."""
        return tuple(program for step in self.steps for program in step.programs)

    @property
    def backend(self) -> str:
        """The backend that programs are generated for: ``triton`` or ``torch``."""
        return self.inner[0].backend  # type: ignore[no-any-return]

    @property
    def plan(self) -> Any:
        """How it runs; given as ``plan=``, it makes the same of the same operands."""
        return self.inner[0].plan

    def explain(self) -> Any:
        """Parts or steps, costs, and why this plan: prints as a table; ``to_dict()`` gives the same as data."""
        return self.inner[0].explain()


class Contraction(Compiled, ABC):
    """What a kernel runs: an einsum compiled for the patterns of its operands.

    What `inner` holds, steps or contractions, says all that is not said here.
    """

    key: str
    """The name by which operators of `torch.library` know the contraction."""
    sparse: bool
    """Whether the result is a SparseTensor."""
    empty: bool
    """Whether no nonzeros take part, so that the result has no positions, and is 0 where it is dense."""
    shape: tuple[int, ...]
    """The shape of what `result` gives."""
    result_dtype: torch.dtype
    """The dtype of what `result` gives."""

    def __init__(self, bound: Bound, operands: Operands, settings: Options, form: str) -> None:
        """Check dtypes, devices and the form; nothing is kept of the values.

        Args:
            bound: the einsum as written.
            operands: its operands.
            settings: plan, precision, memory limit, backend, determinism.
            form: of the output that was asked for: ``auto``, ``dense`` or ``sparse``.

        Raises:
            DtypeError, DeviceError: operands differ.
            PlanError: the form is not known, or is ``sparse`` of a result without a pattern.
        """
        given = [o for o in operands if isinstance(o, SparseTensor)]
        self.bound, self.settings, self.form = bound, settings, form
        self.dtype, self.device = given[0].dtype, given[0].device
        self.result_dtype = self.dtype
        for position, operand in enumerate(operands):
            check_operand(operand, position, self.dtype, self.device)
        check_form(form, bound.einsum)
        self.sums = IntegerSums.of(bound, given) if self.dtype in INTEGERS else None
        """What finds sums of integers that pass 64 bits; None where none can."""
        self.bare = [x.pattern.bare() for x in given]
        """The patterns of the sparse operands, with nothing kept."""

    def _explained(
        self, profile: str, measured: tuple[str, ...], steps: Sequence[StepReport], pattern: Pattern | None
    ) -> Explanation:
        """The explanation of several steps, whose times a profile predicts; a sparse result has a pattern."""
        plan, entries = self.plan, prod(self.shape) if pattern is None else pattern.nnz
        about = self.bound.einsum.text, plan.name, plan.reason, self.backend, device_name(self.device)
        return Explanation(*about, profile, measured, tuple(steps), entries)

    @abstractmethod
    def pattern_on(self, patterns: Patterns) -> Pattern | None:
        """The pattern of a sparse result, given those of the operands, one of which it may be; None of a dense one."""

    def packed(self, operands: Sequence[SparseTensor], known: dict[Any, Any] | None = None) -> Values | None:
        """Values as the storages have them; None where each call reads them as they are.

        Args:
            operands: the sparse operands.
            known: values that other contractions of the same operands packed; those of this one are added.
        """
        return None

    @abstractmethod
    def result(self, patterns: Patterns, values: Tensors, dense: Tensors, packed: Values | None = None) -> torch.Tensor:
        """A dense result, or a sparse one's values; differentiable. Integers are made modulo 2**64: see `evaluate`."""

    def evaluate(
        self, patterns: Patterns, values: Tensors, dense: Tensors, packed: Values | None = None
    ) -> torch.Tensor:
        """The result of the same arguments.

        Raises:
            DtypeError: a sum of integers does not fit in 64 bits. Nothing is looked at while a CUDA graph is captured
                or a transform of `torch.func` is active.
        """
        found = self.result(patterns, values, dense, packed)
        if self.sums is not None and not transforming() and not captured(found):
            self.sums.check(self, found, patterns, values, dense)
        return found

    def gradient(
        self, patterns: Patterns, operand: int, values: Tensors, dense: Tensors, upstream: torch.Tensor
    ) -> torch.Tensor:
        """The gradient for one of values and dense operands, given that of the result; outside autograd.

        Where no other rule is known, autograd follows the result, in a thread of its own, since operators of a library
        run where it is off.
        """
        given = [t.detach() for t in (*values, *dense)]
        wanted = given[operand].requires_grad_()

        def found() -> torch.Tensor:
            with torch.enable_grad():
                result = self.result(patterns, given[: len(values)], given[len(values) :])
            return torch.autograd.grad(result, wanted, upstream)[0]

        with ThreadPoolExecutor(1) as one:
            return one.submit(copy_context().run, found).result()
