"""The form of a stream's result: from summed rows to the returned tensor, and checks of `out`.

In: a recipe, a compiler, the chunks. Out: `ResultForm`.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from sparsetc.contraction.output import Result, arranged, is_sparse, without_zeros
from sparsetc.errors import DeviceError, DtypeError, PlanError, ShapeError, TransformError
from sparsetc.streaming.compiler import Compiler
from sparsetc.streaming.contents import Recipe
from sparsetc.streaming.cutting import StreamCut
from sparsetc.tensor.pattern import Pattern, lasting
from sparsetc.tensor.sparse_tensor import SparseTensor
from sparsetc.tensor.sums import fitted, summed_dtype


class ResultForm:
    """The result that a stream returns.

    Attributes:
        shape, dtype: of the result.
        sparse: whether a sparse result was asked for.
        output: shapes, and the pattern where chunks number the rows.
        rows: how many rows are summed.
    """

    def __init__(self, recipe: Recipe, compiler: Compiler, made: StreamCut) -> None:
        bound, template = compiler.bound, compiler.template
        output = template.output
        self._text, self._drops = recipe.equation, recipe.drop_zeros
        self.shape = bound.output_shape
        self.dtype = summed_dtype(compiler.dtype) if bound.einsum.plain_sum else compiler.dtype
        self.sparse = is_sparse(recipe.output, template.bound.einsum, [template.problem.letters])
        self.rows = made.coords.shape[1] if recipe.numbered else output.rows
        self._order: Tensor | None = None
        self._pattern: Pattern | None = None
        if recipe.numbered:
            with lasting():
                output = replace(output, pattern=Pattern(made.coords, output.kept_shape, True), own=False, slot=None)
                if self.sparse:
                    self._pattern, self._order = arranged(output)
        self.output = output

    def of(self, rows: Tensor) -> Result:
        """Return the result of (rows, *dense sizes), on their device."""
        rows, output = fitted(rows, self.dtype, f'the result of "{self._text}"'), self.output
        if self._pattern is not None:
            return self._sparse(rows)
        if output.pattern is None:
            return output.shaped(rows)
        # A dense result that does not fit on the device, of the rows that have nonzeros.
        number = torch.zeros(output.pattern.nnz, dtype=torch.long, device="cpu")
        for n, coords in zip(output.kept_shape, output.pattern.coords, strict=True):
            number = number * n + coords
        whole = torch.zeros((prod(output.kept_shape), *output.width_shape), dtype=rows.dtype, device="cpu")
        whole.index_copy_(0, number, rows.cpu())
        return replace(output, pattern=None).shaped(whole)

    def _sparse(self, rows: Tensor) -> SparseTensor:
        assert self._pattern is not None
        if self._pattern.device != rows.device:  # kept there, so that results share it
            self._pattern = self._pattern.like(self._pattern.coords.to(rows.device), True)
            self._order = None if self._order is None else self._order.to(rows.device)
        values = rows if self._order is None else rows.reshape(-1).index_select(0, self._order)
        result = SparseTensor._make(self._pattern, values)
        return without_zeros(result) if self._drops else result

    def check(self, out: Any) -> None:
        """Raise unless a result can be written to `out`."""
        if self.sparse:
            raise PlanError(f'"{self._text}" has a sparse result, which out= cannot take; use output="dense"')
        if not isinstance(out, Tensor) or (tuple(out.shape), out.dtype) != (self.shape, self.dtype):
            what = f"{tuple(out.shape)}, {out.dtype}" if isinstance(out, Tensor) else type(out).__name__
            raise ShapeError(f"out= must be a tensor of shape {self.shape} and {self.dtype}, found {what}")
        if out.layout != torch.strided:
            raise DtypeError(f"out= must be a dense tensor, found one of layout {out.layout}")
        if out.is_meta:
            raise DeviceError("out= is on meta, where nothing can be written")
        if any(step == 0 and n > 1 for step, n in zip(out.stride(), out.shape, strict=True)):
            raise ShapeError(f"out= was expanded: elements of it share memory; its strides are {out.stride()}")
        if torch.is_grad_enabled() and out.requires_grad:
            raise TransformError("out= requires a gradient, which a stream does not give: detach() it")
