"""A contraction of operands in blocks: that of the blocks, and views of operands and result around it.

In: a `Bound` einsum, some of whose sparse operands are in blocks. Out: `Blocked`. To the contraction within, blocks are
entries with dense modes; what a user reads and writes is the einsum as written.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch

from sparsetc.codegen.launch import Values
from sparsetc.contraction.base import Compiled, Contraction, Operand, key_of
from sparsetc.contraction.canonical import dense_of_call
from sparsetc.contraction.contraction import of_entries
from sparsetc.contraction.cuts import BlockOutput, CutOperand, Cuts
from sparsetc.contraction.entries import Entries, by_nonzeros, is_sparse
from sparsetc.errors import OutOfMemoryError
from sparsetc.ir.equation.einsum import Bound
from sparsetc.options import Options
from sparsetc.tensor.blocks import joined, split
from sparsetc.tensor.pattern import Pattern
from sparsetc.tensor.sparse_tensor import SparseTensor


class Blocked(Compiled):
    """A contraction of operands in blocks."""

    def __init__(
        self, bound: Bound, operands: Sequence[Operand], settings: Options, form: str, repeated: bool = False
    ) -> None:
        super().__init__(bound, operands, settings, form)
        e, given = bound.einsum, [o for o in operands if isinstance(o, SparseTensor)]
        self._cuts = cuts = Cuts.none(bound) if by_nonzeros(settings) else Cuts.of(bound, operands)
        terms = [e.inputs[p] for p in e.sparse]
        self._operands = [CutOperand.of(cuts, x, t) for x, t in zip(given, terms, strict=True)]
        self.sparse = is_sparse(form, e, [t[: x.sparse_order] for x, t in zip(given, terms, strict=True)])
        if not self.sparse:
            nbytes = prod(bound.output_shape) * self.dtype.itemsize
            settings.check_memory(nbytes, self.device, f"the result of {bound}")
        self._made, self._output = self._compiled(operands, repeated)
        self._arrange([x.pattern for x in given])
        self.key = key_of(self)

    def _compiled(self, operands: Sequence[Operand], repeated: bool) -> tuple[Contraction, BlockOutput | None]:
        """The contraction of blocks, and what becomes of a sparse result."""
        cuts, own, settings = self._cuts, self._operands, self.settings
        tables = any(o.tables for o in own)
        # What is contracted by nonzeros has coordinates of all letters.
        whole = by_nonzeros(settings) or (len(own) > 1 and not tables)
        coordinates = set(cuts.term(self.bound.einsum.output)) if whole else {c for o in own for c in o.coordinates}
        output = BlockOutput.of(cuts, coordinates) if self.sparse else None
        form = "sparse" if output is not None and output.coordinates else "dense"
        einsum = cuts.einsum(own, cuts.term(self.bound.einsum.output) if output is None else output.letters)
        like = torch.zeros((), dtype=self.dtype, device=self.device)
        sparse = (o.stand_in(einsum, like) for o in own)
        views: list[Operand] = [
            next(sparse) if isinstance(o, SparseTensor) else self._view(o, p, repeated) for p, o in enumerate(operands)
        ]
        entries = Entries.of(einsum, views, settings, form)
        if entries is None and tables and not whole:
            raise OutOfMemoryError(
                f'the pairs of blocks that meet in "{self.bound.einsum.text}" would take more than a quarter of the '
                f"{settings.memory_on(self.device):,} bytes that are free on {self.device}; raise the limit with "
                "sparsetc.options(memory_limit=...), or cut an operand into parts and add up their results"
            )
        return of_entries(einsum, views, settings, form, repeated, entries), output

    def _view(self, operand: torch.Tensor, position: int, repeated: bool) -> torch.Tensor:
        """A dense operand of the contraction of blocks to compile it for.

        Strides tell one slice repeated only where the operand is a caller's; else a stand-in of its shape will do.
        """
        if repeated:
            return self._cuts.table(operand, position)
        shape = self._cuts.table(torch.empty(operand.shape, device="meta"), position).shape
        return torch.zeros((), dtype=self.dtype, device=self.device).expand(shape)

    def _arrange(self, patterns: Sequence[Pattern]) -> None:
        """Find the pattern of a sparse result: the operand's own where its blocks are the result's, one each."""
        self._pattern: Pattern | None = None
        self._own = False
        if self._output is None:
            return
        found = self._made.pattern_on([o.pattern for o in self._operands])
        first, *others = patterns
        made = self._output.pattern(self._cuts, found, self._made.empty, self.device)
        self._own = found is self._operands[0].pattern and made.blocks == first.blocks
        e = self.bound.einsum
        key = e.inputs, e.output, e.sparse, self.bound.sizes, self.form
        self._pattern = first.bare() if self._own else first.known(key, made, others)

    # -- calls ------------------------------------------------------------------------------------------------------
    @property
    def empty(self) -> bool:
        """Whether no blocks take part."""
        return self._made.empty

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what `result` gives."""
        if self._output is None or self._pattern is None:
            return self.bound.output_shape
        return self._pattern.values_shape(self._output.dense)

    @property
    def result_dtype(self) -> torch.dtype:
        """The dtype of what `result` gives."""
        return self._made.result_dtype

    def pattern_on(self, patterns: Sequence[Pattern]) -> Pattern | None:
        """The operand's own pattern where all of its blocks are kept, or the one that was found when compiled."""
        return patterns[0] if self._own else self._pattern

    def result(
        self,
        patterns: Sequence[Pattern],
        values: Sequence[torch.Tensor],
        dense: Sequence[torch.Tensor],
        packed: Values | None = None,
    ) -> torch.Tensor:
        """A dense result, or a sparse one's values; differentiable."""
        dense = dense_of_call(self.bound, dense, self.dtype, self.device)
        tables = [self._cuts.table(d, p) for d, p in zip(dense, self.bound.einsum.dense, strict=True)]
        own = [o.values(v) for o, v in zip(self._operands, values, strict=True)]
        found = self._made.result([o.pattern for o in self._operands], own, tables)
        if self._output is None:
            output = self.bound.einsum.output
            return joined(found, self._cuts.sides_of(output), self.bound.output_shape)
        return found.reshape(self.shape) if self._has_entries else found.reshape(-1)[:0].reshape(self.shape)

    @property
    def _has_entries(self) -> bool:
        return self._pattern is None or self._pattern.nnz > 0

    def gradient(
        self,
        patterns: Sequence[Pattern],
        operand: int,
        values: Sequence[torch.Tensor],
        dense: Sequence[torch.Tensor],
        upstream: torch.Tensor,
    ) -> torch.Tensor:
        """The gradient for one of values and dense operands, given that of the result: views are linear."""
        e, count = self.bound.einsum, len(values)
        dense = dense_of_call(self.bound, dense, self.dtype, self.device)
        own = [o.values(v) for o, v in zip(self._operands, values, strict=True)]
        pairs = zip(dense, e.dense, strict=True)
        tables = [self._cuts.table(d, p, whole=n == operand - count) for n, (d, p) in enumerate(pairs)]
        if self._output is None:
            upstream = split(upstream, self._cuts.sides_of(e.output), self.bound.output_shape)
        elif self._has_entries:
            upstream = upstream.reshape(self._made.shape)
        else:
            upstream = upstream.new_zeros(self._made.shape)
        found = self._made.gradient([o.pattern for o in self._operands], operand, own, tables, upstream)
        if operand < count:
            return self._operands[operand].gradient(found, values[operand].shape)
        n = operand - count
        return self._cuts.gradient(found, e.dense[n], dense[n].shape)

    # -- what a user may look at ------------------------------------------------------------------------------------
    @property
    def backend(self) -> str:
        """The backend of the contraction of blocks."""
        return self._made.backend

    @property
    def steps(self) -> Sequence[Any]:
        """The steps of the contraction of blocks."""
        return self._made.steps

    @property
    def plan(self) -> Any:
        """The plan of the contraction of blocks."""
        return self._made.plan

    @property
    def source(self) -> str:
        """The programs of the contraction of blocks."""
        return self._made.source

    @property
    def path(self) -> Path:
        """The file of the first."""
        return self._made.path

    def ptx(self, target: str) -> str:
        """The assembly for a named target."""
        return self._made.ptx(target)

    def explain(self) -> Any:
        """The explanation of the contraction of blocks, under the equation as written."""
        return self._made.explain()
