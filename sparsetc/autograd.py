"""Gradients of a compiled einsum: each is again an einsum with the same sparse pattern.

In: a kernel, the sparse operand's values, the dense operands. Out: the kernel's rows, differentiable. The gradient of
a dense operand is a dense result (``"ijk,ir,kr->jr"``), that of the values a sampled one (``"ijk,jr,kr,ir->ijk"``);
both reuse what is packed on the tensor. A sparse output's gradient has a row a slot; it joins as a dense operand over
one more mode of the sparse operand, the slot, so that no second sparse operand is needed. The rewritten einsums are
differentiable themselves, and so are gradients of gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_letters
from typing import TYPE_CHECKING, Any

import torch

from sparsetc.entry import check_upstream, entry_point
from sparsetc.errors import EquationError
from sparsetc.ir.einsum import Einsum
from sparsetc.ir.rewrite import UPSTREAM, Gradient, gradient
from sparsetc.runtime.autocast import autocast_off
from sparsetc.tensor import SparseTensor

if TYPE_CHECKING:
    from sparsetc.kernel import Kernel


def differentiable(kernel: Kernel, values: torch.Tensor, dense: Sequence[torch.Tensor]) -> torch.Tensor:
    """The kernel's rows, with a graph to `values` and to the dense operands, those of the narrow einsum."""
    shapes = [kernel.canonical.narrow.shape(p) for p in kernel.canonical.narrow.einsum.dense]
    # Expanded outside, so that autograd itself sums the gradient of an operand that was broadcast.
    expanded = [d if d.shape == s else d.expand(s) for d, s in zip(dense, shapes, strict=True)]
    return _Rows.apply(kernel, recordable(values), *expanded)


def recordable(values: torch.Tensor) -> torch.Tensor:
    """Values that autograd can save: themselves, or a copy where they were made under ``torch.inference_mode``."""
    return values.clone() if values.is_inference() and not torch.is_inference_mode_enabled() else values


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernel: Kernel, values: torch.Tensor, *dense: torch.Tensor) -> torch.Tensor:
        ctx.kernel = kernel
        ctx.save_for_backward(values, *dense)
        return kernel.run(dense)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        check_upstream(upstream)
        with autocast_off(upstream.device):
            return _Rows._gradients(ctx, upstream)

    @staticmethod
    def _gradients(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        values, *dense = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1:]
        raw = _Raw(ctx.kernel)
        position = raw.einsum.sparse[0]
        grads: list[torch.Tensor | None] = [raw.of_values(values, dense, upstream) if wanted[0] else None]
        others = [p for p in range(len(raw.einsum.inputs)) if p != position]
        for place, p in enumerate(others):
            grads.append(raw.of_dense(p, values, dense, upstream) if wanted[place + 1] else None)
        return (None, *grads)


class _Raw:
    """The einsum that gives a kernel's rows: (kept letters or the slot, dense letters)."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel, canonical = kernel, kernel.canonical
        e = canonical.narrow.einsum
        self.x = kernel.operand
        kept = tuple(c for c in e.output if c in canonical.letters)
        width = tuple(c for c in e.output if c not in canonical.letters)
        self.slots = kernel.output.sparse
        if not self.slots:
            self.einsum = Einsum(e.inputs, (*kept, *width), e.sparse, e.text)
            return
        spare = next((c for c in ascii_letters if c not in e.indices), None)
        if spare is None:
            raise EquationError(f'the gradient of "{e.text}" needs one letter more than the 52 there are')
        (sparse,) = e.sparse
        inputs = tuple((spare, *t) if p == sparse else t for p, t in enumerate(e.inputs))
        self.einsum = Einsum(inputs, (spare, *width), e.sparse, e.text)
        self.x = kernel.slotted_operand

    def shaped(self, upstream: torch.Tensor) -> torch.Tensor:
        """The rows' gradient with an axis for every letter of the raw output."""
        out = self.kernel.output
        return upstream if self.slots else upstream.reshape((*out.kept_shape, *out.width_shape))

    def of_dense(
        self, p: int, values: torch.Tensor, dense: Sequence[torch.Tensor], upstream: torch.Tensor
    ) -> torch.Tensor:
        g = gradient(self.einsum, p)
        result = self._run(g, self._operands(g, self.x.with_values(self._spread(values)), dense, upstream), "dense")
        assert isinstance(result, torch.Tensor)
        names = list(dict.fromkeys(g.target))
        sizes = self.kernel.canonical.narrow.by_index
        for at, letter in enumerate(names):
            if letter in g.broadcast:
                result = result.unsqueeze(at)
        result = result.expand([sizes[c] for c in names])
        if not g.repeated:
            return result
        whole = result.new_zeros([sizes[c] for c in g.target])
        index = torch.meshgrid(*(torch.arange(sizes[c], device=result.device) for c in names), indexing="ij")
        return whole.index_put(tuple(index[names.index(c)] for c in g.target), result)

    def of_values(self, values: torch.Tensor, dense: Sequence[torch.Tensor], upstream: torch.Tensor) -> torch.Tensor:
        g = gradient(self.einsum, self.einsum.sparse[0])
        pattern = self.x.with_values(torch.ones_like(self._spread(values.detach())))
        result = self._run(g, self._operands(g, pattern, dense, upstream), "sparse")
        assert isinstance(result, SparseTensor)
        found = result.values
        source = self._source
        if source is None:
            return found
        # Nonzeros off the diagonal of a repeated letter take no part; uncoalesced ones, and slots, were sorted.
        return torch.zeros_like(values).index_copy(0, source, found)

    def _spread(self, values: torch.Tensor) -> torch.Tensor:
        """Values of the operand used: the slotted one holds only nonzeros that take part, sorted by slot."""
        return values.index_select(0, self._source) if self.slots and self._source is not None else values

    @property
    def _source(self) -> torch.Tensor | None:
        """Which of the kernel's nonzeros the gradient's are."""
        return self.kernel.slotted_source if self.slots else self.kernel.canonical.source

    def _operands(
        self, g: Gradient, x: SparseTensor, dense: Sequence[torch.Tensor], upstream: torch.Tensor
    ) -> list[SparseTensor | torch.Tensor]:
        given = iter(dense)
        original = [x if p in self.einsum.sparse else next(given) for p in range(len(self.einsum.inputs))]
        found = [self.shaped(upstream) if s == UPSTREAM else original[s] for s in g.sources]
        if not x.values.is_complex():
            return found
        return [_conjugate(o) if n in g.conjugated else o for n, o in enumerate(found)]

    @entry_point
    def _run(
        self, g: Gradient, operands: list[SparseTensor | torch.Tensor], output: str
    ) -> SparseTensor | torch.Tensor:
        from sparsetc.api import compiled

        settings = self.kernel.settings
        kernel = compiled(str(g.einsum), operands, settings, output, automatic=True)
        return kernel.called([o for o in operands if isinstance(o, torch.Tensor)])


def _conjugate(operand: SparseTensor | torch.Tensor) -> SparseTensor | torch.Tensor:
    if isinstance(operand, SparseTensor):
        return operand.with_values(torch.conj_physical(operand.values))
    return torch.conj_physical(operand)  # no view: of the values of a torch CSR tensor torch makes none
