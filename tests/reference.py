"""What an einsum is, by code that shares nothing with the compiler: a sum over nonzeros, in float64.

In: an einsum and its operands (`run`, `sampled`), or letters, coordinates and values of each operand (`evaluate`). Out:
the result as a dense tensor, differentiable, and where the patterns of the sparse operands say that it may be other
than 0. Sparse operands are joined on the letters that they share, dense ones gathered for each entry of the join, and
products added up by the kept coordinates. So an element of a dense operand that no nonzero touches is never read, but
by `run`, which has torch sum what is small enough to be dense.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import prod
from typing import Any

import torch

from sparsetc.ir.equation.einsum import Einsum

DENSE = 2**20
"""Elements of sparse operands up to which `run` makes them dense."""
CHUNK = 2**24
"""Elements of the largest intermediate of one chunk of nonzeros: 128 MiB in float64."""


@dataclass(frozen=True)
class Term:
    """An operand as the reference reads it.

    Attributes:
        coords: (order, nnz); None for a dense operand, whose sizes may be 1 where its letter's is larger.
    """

    letters: str
    values: torch.Tensor
    coords: torch.Tensor | None = None


@dataclass(frozen=True)
class ReferenceEntries:
    """Nonzeros of joined sparse operands: a coordinate a letter, and which nonzero of each operand it is."""

    at: dict[str, torch.Tensor]
    sources: tuple[torch.Tensor, ...]

    @property
    def count(self) -> int:
        """How many there are."""
        return self.sources[0].numel()

    def chunk(self, at: slice) -> ReferenceEntries:
        """Some of them."""
        return ReferenceEntries({c: v[at] for c, v in self.at.items()}, tuple(s[at] for s in self.sources))


def wide(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype that the reference computes in, of operands of these."""
    dtype = reduce(torch.promote_types, dtypes)
    return torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64


# -- sparse operands --------------------------------------------------------------------------------------------------


def whole(letters: str, coords: torch.Tensor, values: torch.Tensor) -> Term:
    """A sparse operand whose values may have trailing dense modes, which become coordinates."""
    if values.ndim == 1:
        return Term(letters, values, coords)
    sizes, each = values.shape[1:], prod(values.shape[1:])
    grid = torch.cartesian_prod(*(torch.arange(n, device=coords.device) for n in sizes)).reshape(each, len(sizes)).T
    repeated = coords.repeat_interleave(each, dim=1)
    return Term(letters, values.reshape(-1), torch.cat([repeated, grid.repeat(1, coords.shape[1])]))


def entries_of(term: Term) -> ReferenceEntries:
    """The nonzeros of one operand that lie on the diagonals of its repeated letters."""
    assert term.coords is not None
    keep = torch.ones_like(term.coords[0] if term.letters else term.values, dtype=torch.bool)
    first: dict[str, int] = {}
    for mode, letter in enumerate(term.letters):
        if letter in first:
            keep &= term.coords[mode] == term.coords[first[letter]]
        else:
            first[letter] = mode
    source = torch.nonzero(keep).flatten()
    return ReferenceEntries({c: term.coords[mode, source] for c, mode in first.items()}, (source,))


def joined(left: ReferenceEntries, right: ReferenceEntries) -> ReferenceEntries:
    """The pairs of entries that agree on every letter that both have."""
    agree = torch.ones((left.count, right.count), dtype=torch.bool, device=left.sources[0].device)
    for letter in set(left.at) & set(right.at):
        agree &= left.at[letter].unsqueeze(1) == right.at[letter].unsqueeze(0)
    a, b = torch.nonzero(agree).unbind(1)
    at = {c: v[b] for c, v in right.at.items()} | {c: v[a] for c, v in left.at.items()}
    return ReferenceEntries(at, (*(s[a] for s in left.sources), *(s[b] for s in right.sources)))


def join(terms: Sequence[Term]) -> ReferenceEntries:
    """The entries of all sparse operands together."""
    found, *others = (entries_of(t) for t in terms if t.coords is not None)
    for other in others:
        found = joined(found, other)
    return found


# -- the result -------------------------------------------------------------------------------------------------------


def evaluate(
    terms: Sequence[Term], output: str, sizes: dict[str, int], entries: ReferenceEntries | None = None
) -> torch.Tensor:
    """The dense result, in the values' dtype, which should be wide; differentiable."""
    entries = join(terms) if entries is None else entries
    own = [c for c in dict.fromkeys("".join(t.letters for t in terms)) if c not in entries.at]
    product = terms[0].values.new_ones(1)
    sources = iter(entries.sources)
    for term in terms:
        if term.coords is not None:
            factor = term.values[next(sources)].reshape(-1, *[1] * len(own))
        else:
            factor = _gathered(term, entries, own)
        product = product * factor
    product = product.expand(entries.count, *(sizes[c] for c in own))
    summed = [n + 1 for n, c in enumerate(own) if c not in output]
    if summed:
        product = product.sum(summed)
    kept = [c for c in output if c in entries.at]
    width = [c for c in own if c in output]
    rows = product.new_zeros((prod(sizes[c] for c in kept), *product.shape[1:]))
    rows = rows.index_add(0, _key(entries, kept, sizes), product)
    found = rows.reshape([sizes[c] for c in (*kept, *width)])
    return found.permute([[*kept, *width].index(c) for c in output])


def _gathered(term: Term, entries: ReferenceEntries, own: Sequence[str]) -> torch.Tensor:
    """A dense operand's element for each entry and each place of the letters that only dense operands have."""
    if not term.letters:
        return term.values
    index = []
    for letter, size in zip(term.letters, term.values.shape, strict=True):
        if letter in entries.at:
            place = entries.at[letter].reshape(-1, *[1] * len(own))
        else:
            place = torch.arange(size, device=term.values.device)
            place = place.reshape([-1 if c == letter else 1 for c in ("", *own)])
        index.append(torch.zeros_like(place) if size == 1 else place)
    return term.values[tuple(index)]


def _key(entries: ReferenceEntries, kept: Sequence[str], sizes: dict[str, int]) -> torch.Tensor:
    key = torch.zeros_like(entries.sources[0])
    for letter in kept:
        key = key * sizes[letter] + entries.at[letter]
    return key


def pattern(entries: ReferenceEntries, output: str, sizes: dict[str, int]) -> torch.Tensor:
    """Whether an element of the result has an entry, as a dense tensor of booleans."""
    kept = [c for c in output if c in entries.at]
    width = [c for c in output if c not in entries.at]
    rows = torch.zeros(prod(sizes[c] for c in kept), dtype=torch.bool)
    rows[_key(entries, kept, sizes)] = True
    found = rows.reshape([*(sizes[c] for c in kept), *[1] * len(width)])
    found = found.expand([sizes[c] for c in (*kept, *width)])
    return found.permute([[*kept, *width].index(c) for c in output])


# -- einsums of operands as users have them ---------------------------------------------------------------------------


def run(e: Einsum, *operands: Any, dense: int = DENSE, chunk: int | None = None) -> torch.Tensor:
    """The dense result, in a wide dtype.

    Args:
        e: the einsum.
        operands: torch tensors of any layout, and anything that has ``coords``, ``values`` and ``shape``.
        dense: sparse operands of at most so many elements are densified.
        chunk: nonzeros at a time; by default as many as keep intermediates below `CHUNK`.
    """
    terms, sizes = _terms(e, operands)
    if all(t.coords is None or prod(sizes[c] for c in t.letters) <= dense for t in terms):
        return torch.einsum(str(e), *(_densified(t, sizes) for t in terms))
    return _in_chunks(terms, "".join(e.output), sizes, chunk)


def sampled(e: Einsum, *operands: Any, chunk: int | None = None) -> torch.Tensor:
    """What each nonzero of the one sparse operand adds to the result, which has all of its letters: (nnz, *the others).

    For results that are too large to be dense. Nonzeros are in the operand's own order.
    """
    terms, sizes = _terms(e, operands)
    term = terms[e.sparse[0]]
    assert term.coords is not None
    sizes["#"] = term.coords.shape[1]
    number = torch.arange(sizes["#"], device=term.coords.device).unsqueeze(0)
    terms[e.sparse[0]] = replace(term, letters=f"{term.letters}#", coords=torch.cat([term.coords, number]))
    return _in_chunks(terms, "#" + "".join(e.free), sizes, chunk)


def _terms(e: Einsum, operands: Sequence[Any]) -> tuple[list[Term], dict[str, int]]:
    dtypes = [x.dtype if isinstance(x, torch.Tensor) else x.values.dtype for x in operands]
    dtype, terms = wide(*dtypes), []
    sizes: dict[str, int] = {}
    for letters, x in zip(map("".join, e.inputs), operands, strict=True):
        sizes |= {c: int(n) for c, n in zip(letters, x.shape, strict=True) if sizes.get(c, 1) == 1}
        if isinstance(x, torch.Tensor) and x.layout == torch.strided:
            terms.append(Term(letters, x.to(dtype)))
            continue
        if isinstance(x, torch.Tensor):
            x = x.to_sparse_coo()
            coords, values = x._indices(), x._values()  # not coalesced, which would sum in the narrow dtype
        else:
            coords, values = x.coords, x.values
        terms.append(whole(letters, coords, values.to(dtype)))
    return terms, sizes


def _densified(term: Term, sizes: dict[str, int]) -> torch.Tensor:
    if term.coords is None:
        return term.values
    dense = term.values.new_zeros([sizes[c] for c in term.letters])
    return dense.index_put(tuple(term.coords), term.values, accumulate=True) if term.letters else term.values.sum()


def _in_chunks(terms: Sequence[Term], output: str, sizes: dict[str, int], chunk: int | None) -> torch.Tensor:
    entries = join(terms)
    width = prod(n for c, n in sizes.items() if c not in entries.at)
    size = chunk or max(1, CHUNK // max(1, width))
    starts = range(0, max(1, entries.count), size)
    return reduce(torch.add, (evaluate(terms, output, sizes, entries.chunk(slice(n, n + size))) for n in starts))
