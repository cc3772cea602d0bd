"""An einsum that runs as another one: a rewrite around a contraction.

In: a rewrite, and the contraction of the einsum that it gives. Out: `Rewritten`. The rewrite is linear in each
operand and in the result, so gradients go through its transpose, which autograd knows.

`Entries` is the rewrite of one or two sparse operands with dense modes (more are a `Path`), ``X[i,j,h]`` and
``Y[j,k,h]``, as a pattern of ones with the numbers of entries as its first modes, and their values as dense operands.
``X[i,j,h]`` is ``P[n,i,j] V[n,h]``; a product with Y is ``T[n,m,i,k] V[n,h] W[m,h]``, where T has an element for each
pair of entries that meet. So nothing is expanded, and dense modes are letters of a row. `blocks.BlockLetters` is the
rewrite of operands in blocks.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_letters
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import torch

from sparsetc.codegen.launch import Values
from sparsetc.contraction.canonical import Operands, Patterns, Tensors, dense_of_call
from sparsetc.contraction.contraction import Contraction
from sparsetc.contraction.output import SPARE, Letters, is_sparse
from sparsetc.ir.equation.einsum import Bound, Einsum, distinct
from sparsetc.ir.plan import requested
from sparsetc.options import Options
from sparsetc.tensor import coords as crd
from sparsetc.tensor.pattern import Pattern, lasting
from sparsetc.tensor.sparse_tensor import SparseTensor

if TYPE_CHECKING:
    from sparsetc.contraction.blocks import BlockLetters

    Rewrite: TypeAlias = "Entries | BlockLetters"


class Rewritten(Contraction):
    """A contraction that runs another: operands are rewritten for it (`pull`), and its result is put back (`push`)."""

    def __init__(
        self, bound: Bound, operands: Operands, settings: Options, form: str, rewrite: Rewrite, inner: Contraction
    ) -> None:
        super().__init__(bound, operands, settings, form, expanded=False)
        self.rewrite, self.contraction, self.inner = rewrite, inner, (inner,)
        self.empty, self.result_dtype = inner.empty, inner.result_dtype
        patterns = [o.pattern for o in operands if isinstance(o, SparseTensor)]
        pattern = rewrite.result_pattern(patterns, inner.pattern_on(rewrite.patterns), inner.empty)
        self._own, self.shape = pattern is patterns[0], bound.output_shape
        self.pattern = None if self._own else pattern
        if pattern is not None:
            self.shape = pattern.values_shape(bound.output_shape[pattern.order :])

    def pattern_on(self, patterns: Patterns) -> Pattern | None:
        """The first operand's own pattern where all of its entries are kept, or the one found when this was made."""
        return patterns[0] if self._own else self.pattern

    def result(self, patterns: Patterns, values: Tensors, dense: Tensors, packed: Values | None = None) -> torch.Tensor:
        """A dense result, or a sparse one's values; differentiable."""
        pulled = self.rewrite.pull(values, dense_of_call(self.bound, dense, self.dtype, self.device))
        result = self.contraction.result(self.rewrite.patterns, *pulled, packed)
        if not self.sparse:
            return self.rewrite.push(result)
        if 0 in self.shape:  # where no entries are left, the other result may be one number, 0
            result = result.reshape(-1)[:0]
        return result.reshape(self.shape)


SHARE = 4
"""Pairs of entries that meet may take the memory limit divided by this. Not measured."""


@dataclass(frozen=True)
class Entries:
    """The einsum of the entries of operands with dense modes; its last operands are their values.

    Attributes:
        form: the form of the result: ``dense`` or ``sparse``.
        own: True if the result is on the one operand's own pattern: rows of the einsum are its entries.
        patterns: the pattern of ones alone.
    """

    bound: Bound
    form: str
    own: bool
    patterns: tuple[Pattern]
    by_entries: ClassVar[bool] = False

    @classmethod
    def of(cls, bound: Bound, operands: Operands, settings: Options, form: str) -> Entries | None:
        """The einsum of entries.

        None where no operand has dense modes, and where they have to be expanded: the plan works nonzero by nonzero
        (`Plan.by_nonzeros`), too few letters are spare, a sparse result keeps dense modes alone, or the pairs of
        entries take too much memory.
        """
        e = bound.einsum
        sparse = [o for o in operands if isinstance(o, SparseTensor)]
        if not any(x.dense_order for x in sparse) or requested(settings.plan).by_nonzeros:
            return None
        terms = [e.inputs[p] for p in e.sparse]
        coordinates = [t[: x.sparse_order] for t, x in zip(terms, sparse, strict=True)]
        tables = [t[x.sparse_order :] for t, x in zip(terms, sparse, strict=True)]
        kept = any(c in t for c in e.output for t in coordinates)
        spare = [c for c in ascii_letters if c not in e.indices]
        if len(spare) < len(sparse) + SPARE or (form == "sparse" and not kept):
            return None
        numbers = tuple(spare[: len(sparse)])
        on_pattern = is_sparse(form, e, coordinates)
        kept_whole = e.output[: len(coordinates[0])] == coordinates[0] and not _is_empty(sparse[0])
        own = on_pattern and len(sparse) == 1 and kept_whole
        output = e.output[len(coordinates[0]) :] if own else e.output
        dense = [e.inputs[p] for p in e.dense]
        used = {c for t in (output, *dense, *tables) for c in t}
        letters = distinct(c for t in coordinates for c in t if c in used)
        output = (*numbers, *letters, *output) if own else output
        pattern = _pattern(sparse, coordinates, letters, settings)
        if pattern is None:
            return None
        values = [(n, *t) for n, t in zip(numbers, tables, strict=True)]
        einsum = Einsum(((*numbers, *letters), *dense, *values), output, (0,), e.text)
        sizes = bound.by_index | {n: x.nnz for n, x in zip(numbers, sparse, strict=True)}
        return cls(Bound.of(einsum, sizes), "sparse" if on_pattern else "dense", own, (pattern,))

    def stand_ins(self, operands: Operands, repeated: bool) -> list[SparseTensor | torch.Tensor]:
        """Operands to compile that einsum for: the ones, dense operands as they are, tables of values."""
        values = [o._values for o in operands if isinstance(o, SparseTensor)]
        with lasting():
            one = torch.zeros((), dtype=values[0].dtype, device=values[0].device)
            # What is one slice repeated would be compiled as such, and later values need not be: an empty one instead.
            tables = [v if 0 not in v.stride() else one.new_empty(v.shape) for v in values]
            ones = SparseTensor._make(self.patterns[0], one.expand(self.patterns[0].nnz))
        return [ones, *(o for o in operands if not isinstance(o, SparseTensor)), *tables]

    def pull(self, values: Tensors, dense: Tensors) -> tuple[Tensors, Tensors]:
        """Values are dense operands; the pattern of ones has none."""
        return [], [*dense, *values]

    def push(self, result: torch.Tensor) -> torch.Tensor:
        """A dense result is that of the einsum as written."""
        return result

    def result_pattern(self, patterns: Patterns, other: Pattern | None, empty: bool) -> Pattern | None:
        """The pattern of a sparse result."""
        return patterns[0] if self.own else other


def _pattern(
    sparse: Sequence[SparseTensor], terms: Sequence[Letters], letters: Letters, settings: Options
) -> Pattern | None:
    """Numbers of entries, or of pairs that meet, and their coordinates of some letters; kept with the first pattern.

    An operand whose entries have no elements has no nonzeros, so no entry of it takes part. None where pairs take too
    much memory.
    """
    first, *others = (x.pattern for x in sparse)
    key = ("entries", tuple(terms), letters, any(map(_is_empty, sparse)), *map(weakref.ref, others))
    pattern = first.cache.get(key)
    if pattern is None:
        with lasting():
            most = settings.memory_on(first.device) // (SHARE * 8 * (2 + len(letters)))
            numbers = _meeting(sparse, terms, most) if others else [_taking_part(sparse[0], terms[0])]
            if numbers is None:
                return None
            patterns, lines, sizes = (first, *others), list(numbers), [x.nnz for x in sparse]
            for letter in letters:
                n = next(n for n, t in enumerate(terms) if letter in t)
                mode = terms[n].index(letter)
                lines.append(patterns[n].coords[mode].index_select(0, numbers[n]))
                sizes.append(patterns[n].shape[mode])
            pattern = Pattern(torch.stack(lines), tuple(sizes), True)
            pattern.ones = True
            pattern = first.cache.put(key, pattern, needs=others)
    return pattern  # type: ignore[no-any-return]


def _is_empty(x: SparseTensor) -> bool:
    """Return True if entries have no elements: a dense mode has size 0."""
    return 0 in x._values.shape[1:]


def _taking_part(x: SparseTensor, letters: Letters) -> torch.Tensor:
    """(n,) ascending numbers of the entries on the diagonal of repeated letters; none if entries have no elements."""
    numbers = None if _is_empty(x) else crd.on_diagonal(letters, x.coords)
    return torch.arange(0 if _is_empty(x) else x.nnz, device=x.device) if numbers is None else numbers


def _meeting(sparse: Sequence[SparseTensor], terms: Sequence[Letters], most: int) -> list[torch.Tensor] | None:
    """The numbers of both entries of every pair that agrees in shared letters, in lexicographic order.

    None where there are more than `most`.
    """
    from sparsetc.join.join import Join, JoinOperand, Roles, prepared  # which few einsums need
    from sparsetc.join.order import JoinOrder, composed

    shared = tuple(c for c in distinct(terms[0]) if c in terms[1])

    def operand(x: SparseTensor, letters: Letters, number: str) -> JoinOperand:
        coords = torch.stack([torch.arange(x.nnz, device=x.device), *x.coords])[:, : 0 if _is_empty(x) else None]
        sizes = dict(zip((number, *letters), (x.nnz, *x.pattern.shape), strict=True))
        return prepared((number, *letters), coords, sizes, (number, *shared))

    numbers = "number in x", "number in y"
    x, y = (operand(*terms_of) for terms_of in zip(sparse, terms, numbers, strict=True))
    join = Join.of(x, y, Roles.of(x.letters, y.letters, numbers))
    if join.tasks > most:
        return None
    order = JoinOrder.of(join)
    tasks = order.expand(0, join.tasks)
    return [x.coords[0][composed(order.x_entry, tasks.p)], y.coords[0][composed(order.y_entry, tasks.q)]]
