"""Level 1 to level 1: the einsum of a gradient, and dense work that is done before the sparse operand is touched.

In: an `Einsum` or a `Bound`. Out: others of the same level, with what a caller has to do to the tensors around them.
They follow from index names and sizes alone: no tensor is seen here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import combinations

from sparsetc.errors import EquationError
from sparsetc.ir.equation.einsum import Bound, Einsum, distinct, joined
from sparsetc.support import Ints, Names, among, outside

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
