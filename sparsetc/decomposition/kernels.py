"""The compiled einsums of decompositions: all that they compute of a sparse tensor.

In: a sparse tensor and a rank, or ranks. Out: a kernel a mode, called with the factors of all modes. Each is compiled
before the first iteration of a first run, and kept with the tensor's pattern for others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor

from sparsetc.contraction.compile import kept_together
from sparsetc.contraction.contraction import compiled
from sparsetc.contraction.kernel import Kernel
from sparsetc.contraction.request import Operands
from sparsetc.ops.arguments import equation, letters_of
from sparsetc.options import of_call
from sparsetc.tensor.sparse_tensor import SparseTensor

ModeKernel: TypeAlias = Callable[..., Tensor]
"""An einsum of a sparse tensor with a matrix of every mode but one, called ``kernel(factors, values=None)``: with the
factors of all modes, and with values (nnz,) in the place of the tensor's."""


def mode_kernels(x: SparseTensor, rank: int, modes: Iterable[int], **settings: Any) -> dict[int, ModeKernel]:
    """MTTKRP of each mode, ``"ijk,jr,kr->ir"``: (size of the mode, rank)."""
    letters, rank_letter = letters_of(x.order, 1, "cp")
    return _together(x, letters, [rank_letter] * x.order, [rank] * x.order, dict.fromkeys(modes, rank_letter), settings)


def chain_kernels(
    x: SparseTensor, ranks: Sequence[int], modes: Iterable[int], **settings: Any
) -> dict[int, ModeKernel]:
    """TTM chain of each mode, ``"ijk,jr,ks->irs"``: (size of the mode, ranks of the others)."""
    letters, rank_letters = letters_of(x.order, x.order, "tucker")
    kept = {mode: "".join(c for m, c in enumerate(rank_letters) if m != mode) for mode in modes}
    return _together(x, letters, rank_letters, ranks, kept, settings)


def _together(
    x: SparseTensor,
    letters: str,
    rank_letters: Sequence[str],
    ranks: Sequence[int],
    kept: Mapping[int, str],
    settings: dict[str, Any],
) -> dict[int, ModeKernel]:
    """The einsums of x with a matrix of every mode but one, compiled together; of each mode, the ranks it keeps."""
    others = {mode: [m for m in range(x.order) if m != mode] for mode in kept}
    texts = [equation(letters, [letters[m] + rank_letters[m] for m in others[n]], letters[n] + kept[n]) for n in kept]
    tables = [x.values.new_empty(size, rank) for size, rank in zip(x.shape, ranks, strict=True)]
    operands: list[Operands] = [[x, *(tables[m] for m in others[n])] for n in kept]
    kernels = kept_together(list(zip(texts, operands, strict=True)), of_call(settings), "dense")
    return {mode: partial(_called, Kernel(one, [x]), mode) for mode, one in zip(kept, kernels, strict=True)}


def _called(kernel: Any, mode: int, factors: Sequence[Tensor], values: Any = None) -> Tensor:
    """A kernel of the factors of all modes but one."""
    return kernel(*(f for m, f in enumerate(factors) if m != mode), values=values)  # type: ignore[no-any-return]


def model_kernel(x: SparseTensor, rank: int, **settings: Any) -> Kernel:
    """A CP model times x's values at x's nonzeros, ``"ijk,ir,jr,kr->ijk"``, called with all factors."""
    letters, rank_letter = letters_of(x.order, 1, "cp")
    text = equation(letters, [c + rank_letter for c in letters], letters)
    operands: Operands = [x, *(x.values.new_empty(n, rank) for n in x.shape)]
    return Kernel(compiled(text, operands, of_call(settings), "sparse"), [x])
