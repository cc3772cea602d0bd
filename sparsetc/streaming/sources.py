"""Sources of nonzeros for streaming: any range can be taken, in the order in which chunks are cut.

In: a SparseTensor, or an open packed file, and the modes that the result keeps where its rows are to come in order.
Out: a `Source`, any range of whose nonzeros can be taken.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from sparsetc.contraction.operands import resolved
from sparsetc.errors import EquationError, IOFormatError, TransformError
from sparsetc.io.parquet import PackedFile
from sparsetc.tensor import coords as crd
from sparsetc.tensor.sparse_tensor import SparseTensor


@runtime_checkable
class Source(Protocol):
    """Nonzeros that can be taken by number. It may have ``ends``: numbers, rising, that no chunk reaches across."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of all modes."""

    @property
    def nnz(self) -> int:
        """The number of nonzeros."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of the values."""

    def take(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """(order, n) int64 coordinates of nonzeros ``start`` to ``stop``, in lexicographic order, and (n,) values."""


class TensorSource:
    """The nonzeros of a tensor in memory."""

    def __init__(self, x: SparseTensor, kept: Sequence[int] | None) -> None:
        """Args: a coalesced tensor without dense modes; the modes by which nonzeros are to be sorted, None for any."""
        self.x = x.with_values(resolved(x.values.detach()))
        self.shape = x.shape
        self.nnz = x.nnz
        self.dtype = x.dtype
        self._order: Tensor | None = None
        if kept is not None and not leading(kept):
            self._order = crd.lexsort(*crd.of_modes(x.coords, x.shape, kept))

    def take(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Nonzeros by number, as of `Source`."""
        x = self.x
        if self._order is None:
            return x.coords[:, start:stop].contiguous(), x.values[start:stop]
        own = self._order[start:stop].sort().values
        return x.coords.index_select(1, own), x.values.index_select(0, own)


def leading(kept: Sequence[int]) -> bool:
    """True if nonzeros in lexicographic order are sorted by these modes."""
    return list(kept) == list(range(len(kept)))


UNPACKED = (".tns", ".mtx", ".gz", ".npz")
"""Suffixes of files that can be packed, and not streamed."""


def operand(x: Any) -> SparseTensor | PackedFile | Source:
    """Return the operand to stream; a path is opened, and is the caller's to close.

    Raises:
        EquationError: it is neither sparse nor a packed file.
        TransformError: its values require a gradient.
        IOFormatError, FileNotFoundError: a path without a packed file.
    """
    if isinstance(x, str | os.PathLike):
        if str(x).lower().endswith(UNPACKED):
            raise IOFormatError(
                f"{x}: a stream takes a packed file, which stc.pack({str(x)!r}, 'x.parquet') makes of it"
            )
        return PackedFile(Path(x))
    if isinstance(x, PackedFile):
        return x
    if not isinstance(x, SparseTensor) and isinstance(x, Source) and hasattr(x, "take"):
        return x
    sparse = None if isinstance(x, Tensor) and x.layout == torch.strided else SparseTensor.coerce(x)
    if sparse is None:
        raise EquationError(
            f"what is streamed is a SparseTensor, a packed file (.parquet) or the path of one, found {type(x).__name__}"
        )
    if torch.is_grad_enabled() and sparse.values.requires_grad:
        raise TransformError(
            "what is streamed has values that require a gradient, which a stream does not give: detach() them, or take "
            "stc.einsum"
        )
    return sparse.expand_dense().coalesce()


def source_of(x: SparseTensor | PackedFile | Source, kept: Sequence[int] | None) -> Source:
    """Return the nonzeros of an operand, sorted by the modes `kept` if these are given.

    A file whose nonzeros are in another order is read whole.

    Raises:
        EquationError: a source of the caller's is in no such order.
    """
    ordered = kept is None or leading(kept)
    if isinstance(x, PackedFile) and not ordered:
        x = x.tensor()
    if isinstance(x, SparseTensor):
        return TensorSource(x, kept)
    if not ordered:
        raise EquationError(
            "the result's rows come in order only where it keeps the first modes of what is streamed, which is given "
            "in lexicographic order; give a SparseTensor, or memory for the whole result"
        )
    return x
