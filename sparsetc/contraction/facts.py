"""What an einsum of one sparse operand is planned by, before anything is packed.

In: a `Bound` einsum, its operands, options. Out: `Facts`, from which a `Step` is made, or several einsums are planned
together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch

from sparsetc.codegen.launch import accumulator
from sparsetc.contraction.canonical import Canonical, canonicalise
from sparsetc.contraction.output import Output, output_of
from sparsetc.ir.equation.einsum import Bound
from sparsetc.options import Options, in_force
from sparsetc.planner.problem import Problem
from sparsetc.planner.statistics import Counts
from sparsetc.tensor.pattern import Pattern
from sparsetc.tensor.sparse_tensor import SparseTensor


@dataclass(frozen=True, eq=False)
class Facts:
    """A canonical einsum, what it returns, and the problem of planning it."""

    x: SparseTensor
    """The sparse operand, of which values are only looked at for their dtype."""
    canonical: Canonical
    own: Pattern
    """The pattern with which storages and counts are kept."""
    output: Output
    problem: Problem

    @classmethod
    def of(
        cls,
        bound: Bound,
        operands: Sequence[SparseTensor | torch.Tensor],
        settings: Options,
        form: str,
        repeated: bool = False,
    ) -> Facts:
        """The facts of an einsum; arguments as of `Step`.

        Raises:
            OutOfMemoryError: the result would pass the memory limit.
        """
        x = operands[bound.einsum.sparse[0]]
        assert isinstance(x, SparseTensor)
        canonical, own = canonicalise(bound, operands, repeated)
        backend = "torch" if x.dtype.is_complex else settings.effective_backend(x.device)
        output = output_of(canonical, x, own, form)
        settings.check_memory(
            output.rows * output.width * accumulator(x.dtype).itemsize,
            x.device,
            f"the result of {canonical.written.einsum.text or canonical.written}",
        )
        counts = Counts(canonical.coords, canonical.shape, own.counts, own.cache)
        problem = Problem.of(canonical.bound, output.rows, output.sparse, x, counts, backend, settings)
        return cls(x, canonical, own, output, problem)


@contextmanager
def in_place(settings: Options, device: torch.device) -> Iterator[None]:
    """A block under these options, on this GPU, whose rates are looked up there."""
    with in_force(settings), torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        yield
