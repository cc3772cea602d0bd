"""Equations and sizes, drawn at random.

In: a random generator and bounds. Out: `Drawing`: letters of each operand, which are sparse, letters of the output, and
the size of each letter. Half are any letters on any operand; the others look like what people write: factors along the
modes of the sparse operand, or sparse operands that share a letter with the next.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from math import prod
from random import Random
from string import ascii_letters

HUGE = 10**6
"""The largest size of a letter that a dense operand may have without being broadcast."""


@dataclass(frozen=True)
class Bounds:
    """How large a case may be.

    Attributes:
        nonzeros: most nonzeros of a sparse operand.
        work: products that the reference forms.
        result: elements of the result.
        operand: elements of a dense operand.
    """

    nonzeros: int = 120
    work: int = 60_000
    result: int = 30_000
    operand: int = 5_000
    sizes: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7)
    large: tuple[int, ...] = (8, 9, 15, 16, 17, 31, 33, 40, 64, 70)


SMALL = Bounds(nonzeros=32, work=6_000, result=3_000, operand=1_000, large=(8, 9, 16, 17, 20, 33))
"""For Triton's interpreter, which takes milliseconds a work item."""
LARGE = Bounds(nonzeros=500, work=500_000, result=100_000, operand=20_000)
"""For a GPU."""


@dataclass(frozen=True)
class Drawing:
    """An equation with sizes."""

    terms: tuple[str, ...]
    sparse: tuple[bool, ...]
    output: str
    sizes: dict[str, int]


def drawn_equation(r: Random, bounds: Bounds, sparse: int) -> Drawing:
    """An equation with so many sparse operands."""
    pool = r.sample(ascii_letters, 52)
    if sparse == 1:
        terms, output = _factors(r, pool) if r.random() < 0.4 else _anything(r, pool)
        kinds = [True, *[False] * (len(terms) - 1)]
    else:
        terms, kinds, output = _several(r, pool, sparse)
    order = list(range(len(terms)))
    if r.random() < 0.5:
        r.shuffle(order)
    terms, kinds = [terms[n] for n in order], [kinds[n] for n in order]
    sizes = _sizes(r, bounds, terms, kinds, output)
    if r.random() < 0.15:
        _tie(terms, kinds, sizes)
    return Drawing(tuple(terms), tuple(kinds), output, sizes)


def _tie(terms: list[str], kinds: list[bool], sizes: dict[str, int]) -> None:
    """Give two operands of one kind and order one shape, so that one tensor can be both."""
    for n, m in itertools.combinations(range(len(terms)), 2):
        if kinds[n] == kinds[m] and len(terms[n]) == len(terms[m]) and terms[n]:
            for _ in terms[n]:  # until a letter that both have, in different places, is settled
                for a, b in zip(terms[n], terms[m], strict=True):
                    sizes[a] = sizes[b] = min(sizes[a], sizes[b])
            return


def _order(r: Random) -> int:
    return r.choice((1, 2, 2, 2, 3, 3, 3, 3, 4, 4, 5, 6, 7, 8))


def _sparse_term(r: Random, pool: list[str], order: int) -> str:
    """Distinct letters; one in five repeats some."""
    own = pool[:order]
    if order > 1 and r.random() < 0.2:
        return "".join(r.choice(own[:-1]) for _ in range(order))
    r.shuffle(own)
    return "".join(own)


def _dense_term(r: Random, letters: list[str]) -> str:
    found = [r.choice(letters) for _ in range(r.choice((0, 1, 1, 2, 2, 2, 3, 4)))]
    return "".join(found if r.random() < 0.15 else dict.fromkeys(found))


def _output(r: Random, known: list[str], others: list[str]) -> str:
    """Any letters in any order; often all of the sparse operand's."""
    letters = [*known, *others]
    found = r.sample(letters, r.randint(0, len(letters)))
    if r.random() < 0.2:
        found = list(dict.fromkeys([*known, *found]))
    elif r.random() < 0.1:
        found = letters
    return "".join(found)


def _anything(r: Random, pool: list[str]) -> tuple[list[str], str]:
    term = _sparse_term(r, pool, _order(r))
    known, new = sorted(set(term)), pool[10:13]
    terms = [term, *(_dense_term(r, known + new) for _ in range(r.choice((0, 1, 1, 2, 2, 3, 4))))]
    others = sorted(set("".join(terms[1:])) - set(known))
    return terms, _output(r, known, others)


def _factors(r: Random, pool: list[str]) -> tuple[list[str], str]:
    """MTTKRP, TTM chains, sampled products, products with vectors and what lies between them."""
    order = r.choice((2, 2, 3, 3, 3, 4))
    modes, shared, ranks = pool[:order], pool[10], iter(pool[11:])
    kept = r.sample(range(order), r.randint(0, order))
    style = r.choice(("shared", "shared", "own", "vectors", "mixed"))
    terms = ["".join(modes)]
    for mode in range(order):
        sampled = mode in kept and r.random() < 0.7
        if sampled or r.random() < 0.15 or len(terms) > 4:
            continue
        rank = {"shared": shared, "own": next(ranks), "vectors": ""}.get(style, r.choice(("", shared, next(ranks))))
        terms.append(modes[mode] + rank if r.random() < 0.7 else rank + modes[mode])
    others = [c for c in dict.fromkeys("".join(terms[1:])) if c not in modes and r.random() < 0.8]
    output = [*(modes[m] for m in kept), *others]
    if r.random() < 0.3:
        r.shuffle(output)
    return terms, "".join(output)


def _several(r: Random, pool: list[str], sparse: int) -> tuple[list[str], list[bool], str]:
    terms: list[str] = []
    for n in range(sparse):
        known = sorted(set("".join(terms)))
        order = r.choice((1, 2, 2, 2, 3, 3, 4))
        taken = r.sample(known, min(len(known), r.choice((0, 1, 1, 1, 2, 2, 3))))[:order]
        fresh = pool[5 * n : 5 * n + order - len(taken)]
        own = [*taken, *fresh]
        r.shuffle(own)
        if len(own) > 1 and r.random() < 0.1:
            own[-1] = own[0]
        terms.append("".join(own))
    known, new = sorted(set("".join(terms))), pool[30:32]
    dense = [_dense_term(r, known + new) for _ in range(r.choice((0, 0, 0, 1, 1, 2)))]
    others = sorted(set("".join(dense)) - set(known))
    kinds = [*[True] * sparse, *[False] * len(dense)]
    return [*terms, *dense], kinds, _output(r, known, others)


# -- sizes ------------------------------------------------------------------------------------------------------------


def _sizes(r: Random, bounds: Bounds, terms: list[str], kinds: list[bool], output: str) -> dict[str, int]:
    letters = list(dict.fromkeys("".join(terms)))
    few = bounds.sizes if r.random() < 0.6 else (*bounds.sizes, *bounds.large)
    sizes = {c: r.choice(few) for c in letters}
    if r.random() < 0.04 and letters:
        sizes[r.choice(letters)] = 0
    known = {c for t, sparse in zip(terms, kinds, strict=True) if sparse for c in t}
    limits = [(set(output), bounds.result), (set(letters) - known, bounds.work // 20)]
    limits += [(set(t), bounds.operand) for t, sparse in zip(terms, kinds, strict=True) if not sparse]
    for own, limit in limits:
        while prod(sizes[c] for c in own) > limit:
            largest = max(sorted(own), key=lambda c: sizes[c])
            sizes[largest] //= 2
    alone = [c for c in sorted(known) if not any(c in t for t, s in zip(terms, kinds, strict=True) if not s)]
    summed = [c for c in alone if c not in output]
    if summed and r.random() < 0.05:
        sizes[r.choice(summed)] = r.choice((300, 70_000, 2**20, 2**31 + 5, 2**40))
    return sizes
