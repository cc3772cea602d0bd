"""Level 1's interpreter: any einsum, any operands, in float64; slow, simple, and what all else is compared with.

In: an :class:`~sparsetc.ir.equation.einsum.Einsum` and its operands: torch tensors of any layout, and anything that has
``coords`` (order x nnz), ``values``, ``shape`` and ``to_dense()``. Out: a dense tensor, of dtype int64 if all operands
are integers, complex128 if one is complex, float64 otherwise, on the device of the operands.

Two ways, chosen by size: `torch.einsum` on densified operands, and a sum over chunks of the nonzeros of one sparse
operand, with rows of the dense operands gathered for each nonzero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from opt_einsum import get_symbol

from sparsetc.errors import EquationError, OutOfMemoryError, ShapeError, point_at
from sparsetc.ir.equation.einsum import ELEMENT_LIMIT, Einsum, distinct, verify
from sparsetc.tensor.coords import with_dense_modes

DENSE_LIMIT = 2**20
"""Sparse operands with more elements than this are not densified where there is another way."""

CHUNK_ELEMENTS = 2**24
"""Elements of the largest intermediate of one chunk: 128 MiB in float64."""


def run(
    e: Einsum, *operands: Any, limit: int = ELEMENT_LIMIT, dense_limit: int = DENSE_LIMIT, chunk: int | None = None
) -> torch.Tensor:
    """Evaluate ``e`` in float64, complex128 or int64; the result is dense.

    Args:
        e: the einsum.
        operands: one for each input. Dense ones may have size 1 where their index is larger.
        limit: the most elements of the result, or of an operand that has to be densified.
        dense_limit: sparse operands of at most this many elements are densified; 0 asks for the sum over nonzeros.
        chunk: nonzeros at a time; by default as many as keep intermediates below ``CHUNK_ELEMENTS``.

    Raises:
        EquationError: the number of operands, or of their dimensions, is not that of ``e``.
        ShapeError: the operands do not agree on the size of an index.
        OutOfMemoryError: something would have more than ``limit`` elements; nothing has been allocated.
    """
    verify(e)
    sizes = _sizes(e, operands)
    _refuse_above(limit, [sizes[i] for i in e.output], "the result", e)
    dtype = reference_dtype(operands)
    if all(prod(operands[p].shape) <= dense_limit for p in e.sparse) or not e.sparse_indices:
        return torch.einsum(str(e), *(_expanded(e, p, _densified(x, dtype), sizes) for p, x in enumerate(operands)))

    # one operand stays sparse: the one that would be the largest if densified
    main = max(e.sparse, key=lambda p: prod(operands[p].shape))
    plain = list(operands)
    for p in e.sparse:
        if p != main:
            _refuse_above(limit, operands[p].shape, f"operand {p + 1}, densified,", e)
            plain[p] = _densified(operands[p], dtype)
    return _scattered(_Contribution.of(e, main, plain, sizes, dtype), sizes, chunk)


def sampled(e: Einsum, *operands: Any, chunk: int | None = None) -> torch.Tensor:
    """What each nonzero of the one sparse operand contributes, (nnz, *free), where its pattern is that of the result.

    For results that are too large to be dense: ``"ijk,ir,jr,kr->ijk"``, and the gradient of a sparse operand's values.
    The dtype is that of :func:`run`. The nonzeros are in the operand's own order.

    Raises:
        EquationError: more than one operand is sparse, it has a repeated index, or the output lacks one of its indices.
    """
    verify(e)
    sizes = _sizes(e, operands)
    if len(e.sparse) != 1 or len(e.kept) != len(e.inputs[e.sparse[0]]):
        message = "expected one sparse operand, which has each index once, and an output that has all of them"
        raise EquationError(point_at(str(e), str(e).index("->") + 2, message, len(e.output)))
    c = _Contribution.of(e, e.sparse[0], operands, sizes, reference_dtype(operands))
    size = chunk or max(1, CHUNK_ELEMENTS // c.width)
    parts = [product for _, product in c.chunks(size)]
    return torch.cat(parts) if parts else c.values.new_zeros(0, *(sizes[i] for i in c.free))


def reference_dtype(operands: Sequence[Any]) -> torch.dtype:
    """The dtype in which the reference computes with these operands."""
    dtypes = [x.dtype if isinstance(x, torch.Tensor) else x.values.dtype for x in operands]
    if any(d.is_complex for d in dtypes):
        return torch.complex128
    return torch.float64 if any(d.is_floating_point for d in dtypes) else torch.int64


def coordinates(x: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The coordinates (order x nnz, all modes) and the values (nnz) of a sparse operand; duplicates are allowed."""
    if isinstance(x, torch.Tensor):
        x = x.to_sparse_coo()
        coords, values = x._indices(), x._values()  # not coalesced: that would sum in the narrow dtype
    else:
        coords, values = x.coords, x.values
    if values.ndim == 1:
        return coords, values
    # dense modes after the sparse ones: each of their elements is a nonzero
    return with_dense_modes(coords, values.shape[1:]), values.reshape(-1)


@dataclass(frozen=True)
class _Contribution:
    """What each nonzero of one operand adds to the result: an einsum over the chunk's axis and the other indices."""

    einsum: Einsum
    modes: dict[str, torch.Tensor]  # index of the sparse operand -> coordinate of each nonzero
    values: torch.Tensor
    factors: tuple[_Factor, ...]
    free: tuple[str, ...]  # indices of the result that the sparse operand does not have
    width: int  # elements for each nonzero, if nothing is summed before everything is multiplied

    @classmethod
    def of(
        cls, e: Einsum, main: int, operands: Sequence[Any], sizes: dict[str, int], dtype: torch.dtype
    ) -> _Contribution:
        coords, values = coordinates(operands[main])
        modes, values = _on_diagonal(e.inputs[main], coords, values.to(dtype))
        others = [p for p in range(len(e.inputs)) if p != main]
        factors = tuple(
            _Factor.of(e.inputs[p], _expanded(e, p, operands[p].to(dtype), sizes), tuple(modes)) for p in others
        )
        free = tuple(i for i in e.output if i not in modes)
        width = prod(sizes[i] for i in e.indices if i not in modes)
        return cls(e, modes, values, factors, free, max(1, width))

    def chunks(self, size: int) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """For ``size`` nonzeros at a time: their coordinates, and what they add, (nonzeros, *free)."""
        for start in range(0, self.values.numel(), size):
            at = slice(start, start + size)
            modes = {i: c[at] for i, c in self.modes.items()}
            yield modes, self._product(modes, self.values[at])

    def _product(self, modes: dict[str, torch.Tensor], values: torch.Tensor) -> torch.Tensor:
        # letters anew: the sparse indices have become the one axis "a", and torch.einsum knows only 52 letters
        rest = distinct(i for f in self.factors for i in f.rest)
        letter = {i: get_symbol(q + 1) for q, i in enumerate(rest)}
        terms, tensors = ["a"], [values]
        for f in self.factors:
            terms.append(("a" if f.shared else "") + "".join(letter[i] for i in f.rest))
            tensors.append(f.rows(modes))
        return torch.einsum(",".join(terms) + "->a" + "".join(letter[i] for i in self.free), *tensors)


@dataclass(frozen=True)
class _Factor:
    """A dense operand, shared modes in front and flattened, so that a nonzero picks one row of it."""

    shared: tuple[str, ...]
    rest: tuple[str, ...]
    table: torch.Tensor
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, term: tuple[str, ...], x: torch.Tensor, modes: tuple[str, ...]) -> _Factor:
        names = distinct(term)
        shared = tuple(i for i in names if i in modes)
        rest = tuple(i for i in names if i not in modes)
        table = torch.einsum(f"{''.join(term)}->{''.join(shared + rest)}", x)  # diagonals, and a permutation
        sizes = tuple(table.shape[: len(shared)])
        return cls(shared, rest, table.reshape(prod(sizes), *table.shape[len(shared) :]), sizes)

    def rows(self, modes: dict[str, torch.Tensor]) -> torch.Tensor:
        if not self.shared:
            return self.table.squeeze(0)
        return self.table.index_select(0, _linear([modes[i] for i in self.shared], self.sizes))


def _scattered(c: _Contribution, sizes: dict[str, int], chunk: int | None) -> torch.Tensor:
    kept = tuple(i for i in c.einsum.output if i in c.modes)
    kept_sizes, free_sizes = [sizes[i] for i in kept], [sizes[i] for i in c.free]
    out = c.values.new_zeros(prod(kept_sizes), *free_sizes)
    for modes, product in c.chunks(chunk or max(1, CHUNK_ELEMENTS // c.width)):
        if kept:
            out.index_add_(0, _linear([modes[i] for i in kept], kept_sizes), product)
        else:
            out[0] += product.sum(0)
    names = kept + c.free
    return out.reshape([*kept_sizes, *free_sizes]).permute([names.index(i) for i in c.einsum.output])


def _linear(coords: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
    """Row-major positions; below 2**63, since a tensor with that many elements is there to be indexed."""
    position = coords[0].to(torch.int64)
    for c, n in zip(coords[1:], sizes[1:], strict=True):
        position = position * n + c
    return position


def _on_diagonal(
    term: tuple[str, ...], coords: torch.Tensor, values: torch.Tensor
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The nonzeros whose repeated indices agree, as one coordinate vector for each index."""
    keep = torch.ones_like(values, dtype=torch.bool)
    for q, i in enumerate(term):
        if term.index(i) != q:
            keep &= coords[term.index(i)] == coords[q]
    return {i: coords[term.index(i)][keep] for i in distinct(term)}, values[keep]


def _densified(x: Any, dtype: torch.dtype) -> torch.Tensor:
    """Dense, and converted before nonzeros are added up: duplicates are summed in the wide dtype."""
    if isinstance(x, torch.Tensor):
        return x.to(dtype).to_dense()
    coords, values = coordinates(x)
    shape = tuple(x.shape)
    out = values.new_zeros(prod(shape), dtype=dtype)
    at = _linear(list(coords), shape) if shape else torch.zeros_like(values, dtype=torch.int64)
    return out.index_add_(0, at, values.to(dtype)).reshape(shape)


def _expanded(e: Einsum, p: int, x: torch.Tensor, sizes: dict[str, int]) -> torch.Tensor:
    return x.expand([sizes[i] for i in e.inputs[p]])


def _sizes(e: Einsum, operands: Sequence[Any]) -> dict[str, int]:
    text = str(e)
    if len(operands) != len(e.inputs):
        message = f"found {len(operands)} operands; expected {len(e.inputs)}, one for each term"
        raise EquationError(point_at(text, 0, message, text.index("->")))
    sizes: dict[str, int] = {}
    for p, (term, x) in enumerate(zip(e.inputs, operands, strict=True)):
        start = sum(len(t) + 1 for t in e.inputs[:p])
        if len(x.shape) != len(term):
            message = f"operand {p + 1} has {len(x.shape)} dimensions; expected {len(term)}, one for each index"
            raise EquationError(point_at(text, start, message, len(term)))
        for q, (i, n) in enumerate(zip(term, map(int, x.shape), strict=True)):
            known = sizes.get(i, 1)
            if known != 1 and n not in (1, known):
                message = f"operand {p + 1} has size {n} at index {i!r}; expected {known}, as in the operands before it"
                raise ShapeError(point_at(text, start + q, message))
            sizes[i] = n if known == 1 else known
    for p in e.sparse:
        if tuple(operands[p].shape) != tuple(sizes[i] for i in e.inputs[p]):
            raise ShapeError(f"operand {p + 1} of {text} is sparse and would have to broadcast; only dense ones do")
    return sizes


def _refuse_above(limit: int, shape: Sequence[int], what: str, e: Einsum) -> None:
    if prod(shape) > limit:
        raise OutOfMemoryError(
            f"{what} of {e} has shape {tuple(shape)}, {prod(shape)} elements; the reference is limited to {limit}. "
            "Pass a larger limit, or compare a slice of it"
        )
