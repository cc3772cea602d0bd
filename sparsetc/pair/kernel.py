"""PairKernel: a compiled einsum of two or more sparse operands. Made once by `compile`, called often.

In: a `Bound` einsum and its operands. Out: results, and what a user may look at: plan, source, its file, the PTX, the
explanation. The pattern of the result is found when the kernel is made and does not depend on values, so a call
computes values only.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from sparsetc import pickles
from sparsetc.autograd import recordable
from sparsetc.canonical import as_given, check_dense, check_operand
from sparsetc.dense import converted
from sparsetc.entry import entry_point
from sparsetc.errors import DtypeError, PlanError, ShapeError
from sparsetc.explain import Explanation, device_name
from sparsetc.integers import fitted, summed_dtype
from sparsetc.ir.einsum import Bound
from sparsetc.ir.plan import Plan
from sparsetc.kernel import Kernel
from sparsetc.options import Options
from sparsetc.output import without_zeros
from sparsetc.pair.chain import Chain
from sparsetc.pair.equation import Side, prepared
from sparsetc.pair.plans import check_pairs
from sparsetc.pair.step import PairStep
from sparsetc.pair.sums import kept_dtype
from sparsetc.tensor import Results, SparseTensor


class PairKernel:
    """A compiled einsum of several sparse operands; call it with the dense ones, in the equation's order.

    It reads the values of its sparse operands at each call. It pickles as its equation, operands and settings, and is
    compiled again where it is loaded.
    """

    def __init__(
        self, bound: Bound, operands: Sequence[SparseTensor | torch.Tensor], settings: Options, output: str
    ) -> None:
        e = bound.einsum
        check_pairs(settings.plan, e.indices)  # refused at once where it is not known
        self.bound, self.settings, self._form = bound, settings, output
        self._pinned = replace(settings, precision=settings.effective_precision())
        self.drop_zeros = False
        """Whether calls leave out entries of a sparse result whose value is 0."""
        first = operands[e.sparse[0]]
        assert isinstance(first, SparseTensor)
        for position, operand in enumerate(operands):
            check_operand(operand, position, first.dtype, first.device)
        self.dtype, self.device = first.dtype, first.device
        self.sparse = _is_sparse(bound, output)
        if not self.sparse:
            nbytes = prod(bound.output_shape) * kept_dtype(self.dtype).itemsize
            settings.check_memory(nbytes, self.device, f"the result of {bound}")
        self._operands = tuple(o for o in operands if isinstance(o, SparseTensor))
        self._values = tuple(o._values for o in self._operands)
        # What is made on the way may need 64 bits where the result does not.
        self._summed = summed_dtype(self.dtype)
        self.chain = Chain(bound, [o.to(self._summed) for o in operands], settings)
        self._arrange()

    def _arrange(self) -> None:
        """The result's pattern, and how the last step's values are brought to it."""
        result, output = self.chain.result, self.bound.einsum.output
        self._pattern: torch.Tensor | None = None
        self._side: Side | None = None
        if result.pattern is not None:
            # A step that keeps all of an operand keeps its order and its duplicates too.
            own, alike = result.pattern, result.letters == output
            self._side = prepared(result.letters, own.coords, self.bound.by_index, output, own.is_coalesced and alike)
            as_it_is = alike and self._side.source is None
            self._pattern = own.coords if as_it_is else torch.stack(self._side.coords)
        elif self.sparse:
            shape = self.bound.output_shape
            grid = torch.cartesian_prod(*(torch.arange(n, device=self.device) for n in shape))
            self._pattern = grid.reshape(-1, len(shape)).T.contiguous()
        self._results = None if self._pattern is None else Results(self._pattern, True)

    # -- calls ------------------------------------------------------------------------------------------------------
    @entry_point
    def __call__(
        self, *dense: torch.Tensor, values: Sequence[torch.Tensor | None] | None = None
    ) -> torch.Tensor | SparseTensor:
        """Run.

        Args:
            dense: the dense operands, if the equation has any.
            values: new values of the sparse operands, (nnz,) each, in their own order; None keeps one's.

        Returns:
            A coalesced `SparseTensor` where the result keeps a mode of a sparse operand, a dense tensor otherwise, or
            where ``output="dense"`` asked for it. Gradients flow to dense operands and to the values of sparse ones.
        """
        return self.called(dense, values)

    def called(
        self, dense: Sequence[torch.Tensor], values: Sequence[torch.Tensor | None] | None = None
    ) -> torch.Tensor | SparseTensor:
        """A call from within."""
        dense = tuple(converted(as_given(self.bound, dense), self.dtype, self.device))
        check_dense(self.bound, dense, self.dtype, self.device)
        given = map(recordable, self._values if values is None else self._checked(values))
        others = iter(dense)
        e = self.bound.einsum
        terms = [next(given) if p in e.sparse else next(others) for p in range(len(e.inputs))]
        found = self.chain.run([t.to(self._summed) for t in terms])
        return without_zeros(self._wrap(found)) if self.drop_zeros else self._wrap(found)

    def _wrap(self, found: torch.Tensor) -> torch.Tensor | SparseTensor:
        if self._side is not None:
            values = self._fitted(self._side.values(found, self.settings.deterministic))
        else:
            order = tuple(self.chain.result.letters.index(c) for c in self.bound.einsum.output)
            found = self._fitted(found.permute(order) if order else found)
            if self._pattern is None:
                return found
            values = found.reshape(-1)
        assert self._results is not None
        made = self._results.of(values, self.bound.output_shape)
        return made if self.sparse else made.to_dense(self.settings.memory_limit)

    def _fitted(self, found: torch.Tensor) -> torch.Tensor:
        return fitted(found, self.dtype, f'the result of "{self.equation}"')

    def _checked(self, values: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor, ...]:
        if len(values) != len(self._values):
            raise ShapeError(f'"{self.equation}" has {len(self._values)} sparse operands, found {len(values)} values')
        found = []
        for own, new, position in zip(self._values, values, self.bound.einsum.sparse, strict=True):
            new = own if new is None else new
            if not isinstance(new, torch.Tensor) or new.shape != own.shape:
                what = tuple(new.shape) if isinstance(new, torch.Tensor) else type(new).__name__
                raise ShapeError(f"values of operand {position + 1} must have shape {tuple(own.shape)}, found {what}")
            if new.dtype != self.dtype or new.device != self.device:
                raise DtypeError(
                    f"values of operand {position + 1} must be {self.dtype} on {self.device}, found {new.dtype} on "
                    f"{new.device}"
                )
            found.append(new)
        return tuple(found)

    def with_values(self, *values: torch.Tensor | None) -> PairKernel:
        """The same kernel for other values of the same patterns: (nnz,) for each sparse operand, None to keep one's.

        Nothing is matched, planned or generated again.
        """
        other = self._twin()
        other._values = self._checked(values)
        return other

    def on(self, operands: Sequence[SparseTensor]) -> PairKernel:
        """The kernel for other sparse operands of its patterns and dtype."""
        other = self._twin()
        other._operands, other._values = tuple(operands), tuple(o._values for o in operands)
        return other

    def bare(self) -> PairKernel:
        """The kernel with no values and nothing that is kept for operands, to be kept with one of them."""
        return self.on([o._bare() for o in self._operands])

    def _twin(self) -> PairKernel:
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def __copy__(self) -> PairKernel:
        return self._twin()

    def __deepcopy__(self, memo: dict[int, Any]) -> PairKernel:
        return self.on([copy.deepcopy(o, memo) for o in self.operands])

    def __reduce__(self) -> tuple[Any, ...]:
        equation = pickles.spelled(self.bound)
        return pickles.pair_kernel, (equation, self.operands, self._pinned, self._form, self.drop_zeros)

    # -- what a user may look at ------------------------------------------------------------------------------------
    @property
    def equation(self) -> str:
        """The einsum as written."""
        return self.bound.einsum.text

    @property
    def operands(self) -> tuple[SparseTensor, ...]:
        """The sparse operands, with the values in use."""
        pairs = zip(self._operands, self._values, strict=True)
        return tuple(o if o._values is v else o.with_values(v) for o, v in pairs)

    @property
    def pattern(self) -> torch.Tensor | None:
        """(modes, nnz) coordinates of the result; None where it keeps no mode of a sparse operand."""
        return self._pattern

    @property
    def nnz(self) -> int:
        """Entries of the result's pattern; elements of a result that has none."""
        return prod(self.bound.output_shape) if self._pattern is None else self._pattern.shape[1]

    @property
    def backend(self) -> str:
        """What the pairs run on."""
        return self.chain.pairs[0].backend if self.chain.pairs else "torch"

    @property
    def plan(self) -> Plan:
        """That of the contraction, or of several: both operands of each contraction of two sparse ones, as they are
        read, and the plan of each; named after the first.

        Given as ``plan=``, it makes the same kernel of the same operands.
        """
        plans = [step.plan for step in self.chain.pairs]
        if len(self.chain.steps) == 1 and plans:
            return plans[0]
        parts = tuple(part for plan in plans for part in plan.parts)
        steps = tuple(s.work.plan if isinstance(s.work, PairStep | Kernel) else None for s in self.chain.steps)
        name, reason = (plans[0].name, plans[0].reason) if plans else ("dense", "nothing sparse is left to pair")
        return Plan(name, parts, False, steps=steps, reason=reason)

    @property
    def source(self) -> str:
        """The generated programs, one after the other."""
        return "\n\n".join(step.path.source for step in self.chain.pairs)

    @property
    def path(self) -> Path:
        """The file of the first contraction's program."""
        if not self.chain.pairs:
            raise PlanError(f'"{self.equation}" contracts no two sparse operands; it has no program')
        return self.chain.pairs[0].path.path

    def ptx(self, target: str = "sm_90") -> str:
        """The assembly for a named target of the kernels of every plan but ``"dense"``; needs no GPU."""
        if self.dtype.is_complex:
            raise PlanError("complex einsums run the generated torch programs, which have no PTX")
        return "\n".join(step.ptx(target) for step in self.chain.pairs)

    def explain(self) -> Explanation:
        """Steps, what meets, the paths and their expected times; ``to_dict()`` gives the same as data."""
        plan, rates = self.plan, self.chain.pairs[0].problem.rates.whose if self.chain.pairs else ""
        return Explanation(
            *(self.equation, plan.name, plan.reason, self.backend, device_name(self.device), rates),
            tuple(step.report() for step in self.chain.steps),
            self.nnz,
        )

    def __repr__(self) -> str:
        return f'PairKernel("{self.equation}", plan {self.plan.name}, {self.backend}, {self.nnz:,} nonzeros)'


def _is_sparse(bound: Bound, form: str) -> bool:
    """Whether the result is a SparseTensor: where it keeps a mode of a sparse operand, unless told otherwise."""
    if form not in ("auto", "dense", "sparse"):
        raise PlanError(f'output must be "auto", "dense" or "sparse", found {form!r}')
    kept = bool(bound.einsum.kept)
    if form == "sparse" and not kept:
        raise PlanError(
            f'"{bound.einsum.text}" keeps no mode of a sparse operand, so its result has no pattern; use output="dense"'
        )
    return kept and form != "dense"
