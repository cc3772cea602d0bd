"""A contraction of two or more sparse operands: a chain of links, and the pattern of its result.

In: a `Bound` einsum and its operands. Out: `Several`. The pattern of the result is found when it is made and does not
depend on values, so a call computes values only.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path

import torch

from sparsetc.codegen.launch import Values
from sparsetc.contraction.base import Compiled, Operand, key_of
from sparsetc.contraction.canonical import dense_of_call
from sparsetc.contraction.chain import Chain
from sparsetc.contraction.pair_step import PairStep
from sparsetc.contraction.step import Step
from sparsetc.device.record import of_backend
from sparsetc.errors import PlanError
from sparsetc.explain import Explanation, device_name
from sparsetc.ir.equation.einsum import Bound
from sparsetc.ir.plan import Plan
from sparsetc.options import Options
from sparsetc.pair.join_operand import JoinOperand, prepared
from sparsetc.pair.plans import check_pairs
from sparsetc.pair.sums import kept_dtype
from sparsetc.tensor.pattern import Pattern
from sparsetc.tensor.sparse_tensor import SparseTensor
from sparsetc.tensor.sums import fitted, summed_dtype


class Several(Compiled):
    """A contraction of several sparse operands."""

    def __init__(self, bound: Bound, operands: Sequence[Operand], settings: Options, form: str) -> None:
        e = bound.einsum
        check_pairs(settings.plan, e.indices)  # refused at once where it is not known
        super().__init__(bound, operands, settings, form)
        self.sparse = bool(e.kept) and form != "dense"
        if not self.sparse:
            nbytes = prod(bound.output_shape) * kept_dtype(self.dtype).itemsize
            settings.check_memory(nbytes, self.device, f"the result of {bound}")
        operands = [o.expand_dense() if isinstance(o, SparseTensor) else o for o in operands]
        # What is made on the way may need 64 bits where the result does not.
        self._summed = summed_dtype(self.dtype)
        self.chain = Chain(bound, [o.to(self._summed) for o in operands], settings)
        self._arrange([o.pattern for o in operands if isinstance(o, SparseTensor)])
        self.key = key_of(self)

    def _arrange(self, patterns: Sequence[Pattern]) -> None:
        """Find the pattern of the result, and how the values of the last link are brought to it."""
        result, output = self.chain.result, self.bound.einsum.output
        self.pattern: Pattern | None = None
        self._last: JoinOperand | None = None
        coords = None
        if result.pattern is not None:
            # A link that keeps all of an operand keeps its order and its duplicates too.
            own, alike = result.pattern, result.letters == output
            self._last = prepared(result.letters, own.coords, self.bound.by_index, output, own.is_coalesced and alike)
            as_it_is = alike and self._last.source is None
            coords = own.coords if as_it_is else torch.stack(self._last.coords)
        elif self.sparse:
            shape = self.bound.output_shape
            grid = torch.cartesian_prod(*(torch.arange(n, device=self.device) for n in shape))
            coords = grid.reshape(-1, len(shape)).T.contiguous()
        if coords is not None:
            e, (first, *others) = self.bound.einsum, patterns
            key = e.inputs, output, e.sparse, self.bound.sizes
            self.pattern = first.known(key, Pattern(coords, self.bound.output_shape, True), others)

    # -- calls ------------------------------------------------------------------------------------------------------
    @property
    def empty(self) -> bool:
        """Whether no nonzeros meet."""
        last = self.chain.result.pattern
        return any(link.result.empty for link in self.chain.links) or (last is not None and last.nnz == 0)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what `result` gives."""
        return (self.pattern.nnz,) if self.sparse and self.pattern is not None else self.bound.output_shape

    def pattern_on(self, patterns: Sequence[Pattern]) -> Pattern | None:
        """The pattern that was found when the contraction was compiled."""
        return self.pattern if self.sparse else None

    def result(
        self,
        patterns: Sequence[Pattern],
        values: Sequence[torch.Tensor],
        dense: Sequence[torch.Tensor],
        packed: Values | None = None,
    ) -> torch.Tensor:
        """The result's values on its pattern, or a dense result; differentiable."""
        dense = dense_of_call(self.bound, dense, self.dtype, self.device)
        given, others, e = iter(values), iter(dense), self.bound.einsum
        terms = [next(given).reshape(-1) if p in e.sparse else next(others) for p in range(len(e.inputs))]
        found = self.chain.run([t.to(self._summed) for t in terms])
        if self._last is not None:
            found = self._fitted(self._last.values(found, self.settings.deterministic))
        else:
            order = tuple(self.chain.result.letters.index(c) for c in e.output)
            found = self._fitted(found.permute(order) if order else found)
        if self.sparse or self.pattern is None:
            return found.reshape(self.shape)
        return SparseTensor._make(self.pattern, found.reshape(-1)).to_dense(self.settings.memory_limit)

    def _fitted(self, found: torch.Tensor) -> torch.Tensor:
        return fitted(found, self.dtype, f'the result of "{self.bound.einsum.text}"')

    # -- what a user may look at ------------------------------------------------------------------------------------
    @property
    def steps(self) -> tuple[PairStep | Step, ...]:
        """The contractions that have a sparse operand."""
        return tuple(link.work for link in self.chain.links if link.work is not None)

    @property
    def pairs(self) -> tuple[PairStep, ...]:
        """The contractions of two sparse operands."""
        return self.chain.pairs

    @property
    def backend(self) -> str:
        """The backend that the contractions of sparse operands run on."""
        return next((step.backend for step in self.steps), "torch")

    @property
    def plan(self) -> Plan:
        """The plan of the contraction, with the plan of each link where there are several, named after the first."""
        plans = [step.plan for step in self.pairs]
        if len(self.chain.links) == 1 and plans:
            return plans[0]
        parts = tuple(part for plan in plans for part in plan.parts)
        work = [link.work for link in self.chain.links]
        steps = tuple(None if own is None else own.plan for own in work)  # None: torch's own product
        name, reason = (plans[0].name, plans[0].reason) if plans else ("dense", "nothing sparse is left to pair")
        return Plan(name, parts, False, steps=steps, reason=reason)

    @property
    def source(self) -> str:
        """The generated programs, one after the other."""
        return "\n\n".join(step.path.source for step in self.pairs)

    @property
    def path(self) -> Path:
        """The file of the first contraction's program."""
        if not self.pairs:
            raise PlanError(f'"{self.bound.einsum.text}" contracts no two sparse operands; it has no program')
        return self.pairs[0].path.path

    def ptx(self, target: str) -> str:
        """The assembly of the kernels of every plan but ``"dense"``."""
        if self.dtype.is_complex:
            raise PlanError("complex einsums run the generated torch programs, which have no PTX")
        return "\n".join(step.ptx(target) for step in self.pairs)

    def explain(self) -> Explanation:
        """The steps of the chain: how much matches, the paths and their expected times."""
        plan, own = self.plan, self.steps
        profile = self.pairs[0].problem.profile if self.pairs else of_backend(own[0].backend) if own else None
        return Explanation(
            *(self.bound.einsum.text, plan.name, plan.reason, self.backend, device_name(self.device)),
            profile.describe() if profile else "",
            profile.measured if profile else (),
            tuple(step.report() for step in self.chain.links),
            prod(self.shape) if self.pattern is None else self.pattern.nnz,
        )
