"""Level 1, WHAT is computed: an einsum with at least one sparse operand.

In: the parser's index names. Out: what every level below asks about the indices. Nothing here knows how an operand is
stored, what it holds or where it lives; a :class:`Bound` gives indices their sizes.

The grammar, as :meth:`Einsum.__str__` prints it::

    einsum  ::=  term ("," term)* "->" term
    term    ::=  index*                         # the empty term is a scalar
    index   ::=  "a" | ... | "z" | "A" | ... | "Z"

with these rules, which the parser checks::

    - every index of the output is an index of some operand, and stands in the output once;
    - an index may repeat inside an operand: only the diagonal takes part;
    - an index that no output has is summed;
    - at least one operand is sparse;
    - (Bound) every index has one size, >= 0; nothing broadcasts any more.

There is no ellipsis, no implicit output and no broadcasting at this level: the parser has spelled them out.

From einsums follow others of the same level: those of gradients (`gradient`), and dense work that is done before the
sparse operand is touched (`dense_products`), with what a caller has to do to the tensors around them. They follow from
index names and sizes alone: no tensor is seen here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations
from math import prod
from string import ascii_letters
from typing import TypeVar

from sparsetc.errors import EquationError
from sparsetc.support import Ints, Letters, NamedInts, Names, among, cached_property, outside

N = TypeVar("N")
T = TypeVar("T")


def distinct(indices: Letters) -> Names:
    """The indices without repeats, in order of first appearance."""
    return tuple(dict.fromkeys(indices))


def joined(things: Iterable[tuple[Iterable[N], T]]) -> list[tuple[set[N], list[T]]]:
    """Things in groups: any two that have a name in common, directly or through others, are together.

    Groups come in the order of their last thing, things of a group in the order in which they were joined.
    """
    groups: list[tuple[set[N], list[T]]] = []
    for names, thing in things:
        names_together: set[N] = set(names)
        apart, together = [], []
        for group in groups:
            if names_together.isdisjoint(group[0]):
                apart.append(group)
            else:
                names_together |= group[0]
                together += group[1]
        groups = [*apart, (names_together, [*together, thing])]
    return groups


def written(inputs: Iterable[Letters], output: Letters) -> str:
    """Return the equation of these indices."""
    return ",".join(map("".join, inputs)) + "->" + "".join(output)


@dataclass(frozen=True)
class Einsum:
    """``output[...] = sum over the other indices of the product of the operands``; see the grammar above.

    Attributes:
        inputs: the index names of each operand.
        output: the index names of the result.
        sparse: the positions of the sparse operands, ascending.
        text: what the user wrote, for messages and headers.
    """

    inputs: tuple[Names, ...]
    output: Names
    sparse: Ints
    text: str = field(default="", compare=False)

    def __str__(self) -> str:
        return written(self.inputs, self.output)

    @cached_property
    def dense(self) -> Ints:
        """The positions of the dense operands, ascending."""
        return outside(range(len(self.inputs)), self.sparse)

    @cached_property
    def tables(self) -> tuple[Names, ...]:
        """The indices of each dense operand."""
        return tuple([self.inputs[p] for p in self.dense])

    @cached_property
    def indices(self) -> Names:
        """All indices in order of first appearance."""
        return distinct(i for term in self.inputs for i in term)

    @cached_property
    def sparse_indices(self) -> Names:
        """The indices of the sparse operands, in order of first appearance."""
        return distinct(i for p in self.sparse for i in self.inputs[p])

    @cached_property
    def kept(self) -> Names:
        """The sparse indices of the output, in its order."""
        return among(self.output, self.sparse_indices)

    @cached_property
    def free(self) -> Names:
        """The dense indices of the output, in its order."""
        return outside(self.output, self.sparse_indices)

    @cached_property
    def contracted(self) -> Names:
        """The indices that are summed, in order of first appearance."""
        return outside(self.indices, self.output)

    @property
    def plain_sum(self) -> bool:
        """True if one operand is summed and nothing else is done, which torch gives integers of 64 bits."""
        return len(self.inputs) == 1 and bool(self.contracted)

    @cached_property
    def has_gradients(self) -> bool:
        """True if gradients are einsums: of one sparse operand, where each letter is in two terms, once in each."""
        terms = *self.inputs, self.output
        counts = Counter(i for term in terms for i in {*term})
        return len(self.sparse) == 1 and min(counts.values(), default=0) > 1 and sum(map(len, terms)) == counts.total()

    @cached_property
    def dense_contracted(self) -> Names:
        """The dense indices that are summed."""
        return outside(self.contracted, self.sparse_indices)

    @cached_property
    def axes(self) -> Names:
        """The dense indices in the order of all tiles: an order in which no operand needs a copy, if there is one.

        Each index follows those before it in the output and in every operand. Where terms disagree, the indices of the
        output come first, then the summed.
        """
        left, ordered = [*self.free, *self.dense_contracted], list[str]()
        terms = self.free, *self.tables

        def follows(index: str) -> bool:
            return any({*term[: term.index(index)]} & {*left} for term in terms if index in term)

        while left:
            ordered.append(next((index for index in left if not follows(index)), left[0]))
            left.remove(ordered[-1])
        return tuple(ordered)

    @property
    def spare(self) -> Names:
        """The letters that are none of its indices."""
        return outside(ascii_letters, self.indices)

    def holders(self, index: str) -> Ints:
        """The positions of the operands that have ``index``."""
        return tuple([p for p, term in enumerate(self.inputs) if index in term])


@dataclass(frozen=True)
class Bound:
    """An einsum whose indices have sizes, in order of first appearance."""

    einsum: Einsum
    sizes: NamedInts

    @classmethod
    def of(cls, einsum: Einsum, sizes: dict[str, int]) -> Bound:
        """Bind the indices of ``einsum``; ``sizes`` may hold more indices than it has."""
        return cls(einsum, tuple((i, sizes[i]) for i in einsum.indices))

    @cached_property
    def by_index(self) -> dict[str, int]:
        """The sizes as a mapping; not to be written to."""
        return dict(self.sizes)

    def extents(self, indices: Letters) -> Ints:
        """The sizes of ``indices``, in their order."""
        return tuple(map(self.by_index.__getitem__, indices))

    def elements(self, indices: Letters) -> int:
        """The number of elements of a dense tensor with these indices."""
        return prod(self.extents(indices))

    def shape(self, position: int) -> Ints:
        """The full shape of an operand: a dense one that broadcasts is to be expanded to it."""
        return self.extents(self.einsum.inputs[position])

    @cached_property
    def dense_shapes(self) -> tuple[Ints, ...]:
        """The full shapes of the dense operands, in order."""
        return tuple(map(self.shape, self.einsum.dense))

    @cached_property
    def output_shape(self) -> Ints:
        """The shape of the result."""
        return self.extents(self.einsum.output)

    def __str__(self) -> str:
        sizes = " ".join(f"{i}={n}" for i, n in self.sizes)
        return f"{self.einsum}  {sizes}".rstrip()


UPSTREAM = -1
"""Among the sources of a gradient: the gradient of the output, which is not an operand."""

GROWTH = 2
"""A dense step may make a tensor at most this many times as large as the tensors it reads.

It is read for each nonzero afterwards, and must not turn a few factors into the dense tensor that nobody wanted.
"""


@lru_cache(maxsize=1024)
def gradient(e: Einsum, operand: int) -> tuple[Einsum, Ints]:
    """Return the einsum that computes the gradient of ``e`` for one operand from `g`, the gradient of the output.

    For a dense operand, `g` takes its place: ``"ijk,jr,kr->ir"`` has ``"ijk,ir,kr->jr"`` for operand 1. For a sparse
    one, its pattern keeps the place and `g` comes last: ``"ijk,jr,kr,ir->ijk"`` for operand 0, sampled at the pattern,
    which has ones as values. A letter that the sparse operand repeats stands in the result once.

    Complex numbers follow torch: the gradient is that of the conjugate, so the other operands are to be conjugated, and
    `g` is not.

    Args:
        e: the einsum. A dense operand repeats no letter, and has none that neither another operand nor the output has:
            `dense_products` leave no other.
        operand: a position.

    Returns:
        The einsum, and for each of its inputs a position in ``e``, or ``UPSTREAM`` for `g`.
    """
    if not 0 <= operand < len(e.inputs):
        raise EquationError(f"{e} has no operand {operand + 1}; expected 1..{len(e.inputs)}")
    inputs, sources = list(e.inputs), list(range(len(e.inputs)))
    if operand in e.sparse:
        inputs.append(e.output)
        sources.append(UPSTREAM)
    else:
        inputs[operand] = e.output
        sources[operand] = UPSTREAM
    sparse = tuple(p for p, s in enumerate(sources) if s in e.sparse)
    return Einsum(tuple(inputs), distinct(e.inputs[operand]), sparse, f"gradient of {e}"), tuple(sources)


DOT = 8
"""Rows and columns from which on the product for a nonzero is a matrix product by itself."""


Worth = Callable[[int, int], float]
"""A function of the rows of a nonzero's product and of the positions that it sums; see `dense_products`."""


def one_each(rows: int, summed: int) -> float:
    """One product for all positions is worth as many as there are nonzeros."""
    return 1.0


def dense_products(
    b: Bound, nonzeros: int = 0, least: int = 0, sampled: Worth = one_each
) -> Iterator[tuple[Ints, str, Bound]]:
    """Do what concerns dense operands alone before the kernel does it once for each nonzero.

    First, in every dense operand: only the diagonal of a repeated index, and no index that it alone has and the output
    has not. Then, pairs of dense operands that share an index which has to be summed and which no sparse operand has
    are contracted, in the order that `opt_einsum` finds for them, as long as the result has at most ``GROWTH`` times
    the elements that the pair has: ``"ijk,jr,rs->iks"`` becomes ``"ijk,js->iks"``; ``"ijk,ir,jr,kr->ijk"`` keeps its
    factors, since contracting two of them would sum nothing and make the tensor larger. A table over several sparse
    modes may grow too where it has no more rows than the sparse operand has nonzeros, and at least so many products pay
    for a step of its own: ``"rij,jd,rdo->io"`` of a few relations becomes ``"rij,rjo->io"``. Products of which nonzeros
    read blocks are made for all positions where these are at most `sampled` times as many as the nonzeros.

    Yields:
        For each dense einsum the positions of its operands, ascending, in the list that those before have left, its
        equation, in the grammar of `torch.einsum`, and what is left: its result takes the place of the first of its
        operands, and the others leave the list.
    """
    for p in b.einsum.dense:
        e = b.einsum
        result = tuple([i for i in distinct(e.inputs[p]) if i in e.output or len(e.holders(i)) > 1])
        if result != e.inputs[p]:
            equation, b = _contracted(b, (p,), result)
            yield (p,), equation, b
    while pair := next((pair for pair in _candidates(b) if _pays(b, pair, nonzeros, least, sampled)), None):
        equation, b = _contracted(b, pair, _pair_result(b.einsum, pair))
        yield pair, equation, b


def _pair_result(e: Einsum, pair: Ints) -> Names:
    """Return the indices of a contracted pair that are still needed, sparse ones first."""
    indices = _indices(e, pair)
    names = (*among(e.sparse_indices, indices), *outside(indices, e.sparse_indices))
    return tuple(i for i in names if i in e.output or any(p not in pair for p in e.holders(i)))


def _indices(e: Einsum, pair: Ints) -> Names:
    return distinct(i for p in pair for i in e.inputs[p])


def _candidates(b: Bound) -> Iterator[Ints]:
    """Pairs of dense operands that share a summed dense index: as `opt_einsum` orders them, then smallest first."""
    e = b.einsum
    groups = sorted(tuple(sorted(held)) for held, _ in joined((e.holders(i), i) for i in e.dense_contracted))
    for group in groups:
        yield from _path_pairs(b, group)
    pairs = [pair for group in groups for pair in combinations(group, 2) if _summed_between(e, pair)]
    yield from sorted(pairs, key=lambda pair: b.elements(_pair_result(e, pair)))


def _path_pairs(b: Bound, group: Ints) -> Iterator[Ints]:
    """The pairs of operands, not of intermediates, in the path that `opt_einsum` finds for a group."""
    if len(group) < 3:  # which has one path
        return
    import opt_einsum  # few einsums have products of dense operands alone

    e = b.einsum
    terms = ",".join("".join(e.inputs[p]) for p in group)
    shapes = [b.shape(p) for p in group]
    path, _ = opt_einsum.contract_path(f"{terms}->{''.join(_pair_result(e, group))}", *shapes, shapes=True)
    left: list[int | None] = list(group)
    for step in path:
        operands = [left[q] for q in step]
        left = [p for q, p in enumerate(left) if q not in step] + [None]
        pair = sorted(p for p in operands if p is not None)
        if len(pair) == len(operands) == 2 and _summed_between(e, tuple(pair)):
            yield tuple(pair)


def _summed_between(e: Einsum, pair: Ints) -> bool:
    return any(i in e.inputs[pair[0]] and i in e.inputs[pair[1]] for i in e.dense_contracted)


def _pays(b: Bound, pair: Ints, nonzeros: int, least: int, sampled: Worth) -> bool:
    """True if contracting two operands pays: it sums an index or has one's size, and its result is small."""
    e = b.einsum
    result = set(_pair_result(e, pair))
    sums = any(i not in result for p in pair for i in e.inputs[p])
    folds = any(result == set(e.inputs[p]) for p in pair)
    sizes = [b.elements(e.inputs[p]) for p in pair]
    # A table over several sparse modes is the sparse operand's own space, of which a sampled product reads little.
    spanned = among(result, e.sparse_indices)
    if nonzeros and len(e.dense) == 2 and e.output == e.sparse_indices and len(spanned) == len(result) > 1:
        return False  # a product that is sampled, or read where it is sampled: plan "dense" does that
    if len(spanned) > 1 and any(b.by_index[i] >= nonzeros > 0 for i in spanned):
        return False  # each nonzero would read a row of its own, and most rows nobody
    left = [b.elements([i for i in e.inputs[p] if i in result and i not in spanned]) for p in pair]
    if sums and len(spanned) > 1 and nonzeros and min(left) >= DOT:  # one product, or one for each nonzero
        summed = b.elements([i for i in _indices(e, pair) if i not in result])
        few = b.elements(spanned) <= sampled(min(left), summed) * nonzeros
        batched = {*e.inputs[pair[0]]} & {*e.inputs[pair[1]]} & result
        if not few or not batched:
            return few
    most = max(sizes) if len(spanned) > 1 else GROWTH * sum(sizes)
    small = len(spanned) > 1 and b.elements(spanned) <= nonzeros and b.elements(_indices(e, pair)) >= least
    return (sums or folds) and (small or b.elements(result) <= most)


def _contracted(b: Bound, positions: Ints, result: Names) -> tuple[str, Bound]:
    """Return the equation of one step, and the einsum that is left after it."""
    e, (first, *gone) = b.einsum, positions
    terms = ",".join("".join(e.inputs[p]) for p in positions)
    order = outside(range(len(e.inputs)), gone)
    inputs = tuple(result if p == first else e.inputs[p] for p in order)
    sparse = tuple(order.index(p) for p in e.sparse)
    return f"{terms}->{''.join(result)}", Bound.of(Einsum(inputs, e.output, sparse, e.text), b.by_index)
