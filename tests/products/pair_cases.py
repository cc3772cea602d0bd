"""What the tests of contractions of several sparse operands share: equations, operands, the pattern that is expected.

Nothing here imports triton, so that the interpreter's tests may set their environment first.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from cases import PATTERNS, assert_matches, bound_of, poisoned, random_sparse, random_values
from hypothesis import strategies as st
from reference import run

import sparsetc as stc
from sparsetc.join import join
from sparsetc.join import order as join_order
from sparsetc.products import problem
from sparsetc.products import tasks as task_lists
from sparsetc.tensor import coords as crd

SIZES = {"i": 7, "j": 9, "k": 5, "l": 4, "m": 3, "n": 6, "b": 3, "r": 3, "s": 2}
PLANS = ("auto", "scalar", "dense", "bcb", "bcb+scalar")

EQUATIONS = {
    "one-mode": "ijk,klm->ijlm",
    "two-modes": "ijk,ljk->il",
    "three-modes": "ijkb,lkjb->il",
    "inner": "ijk,ijk->",
    "elementwise": "ijk,ijk->ijk",
    "broadcast": "ijk,jk->ijk",
    "broadcast-left": "jk,ijk->kij",
    "outer": "ij,kl->ijkl",
    "outer-permuted": "ij,kl->ljki",
    "matrices": "ij,jk->ik",
    "matrices-permuted": "ij,jk->ki",
    "diagonal": "iij,jk->ik",
    "traces": "ii,jj->",
    "own-letters": "ijk,kl->il",
    "nothing-shared": "ijk,lm->",
    "one-side-gone": "ijk,lm->m",
    "batch": "bij,bjk->bik",
    "batch-last": "ijb,jkb->kib",
    "vectors": "i,i->",
    "vectors-kept": "i,i->i",
    "vectors-outer": "i,j->ji",
    "all-kept": "ij,jk->jik",
    "transposed": "ijk,kji->j",
    "order-5": "ijklm,klmnb->ijnb",
}

CHAINS = {
    "three": "ij,jk,kl->il",
    "four": "ij,jk,kl,lm->im",
    "star": "ij,ik,il->jkl",
    "elementwise": "ij,ij,ij->ij",
    "scalar": "ij,jk,ki->",
    "five": "ij,jk,kl,lm,mn->ni",
}
"""All operands sparse."""

MIXED = {
    "applied-to-the-result": ("ijk,klm,lr->ijmr", (2,)),
    "contracted": ("ijk,ljk,lr->ir", (2,)),
    "scaled": ("ijk,k,ljk->il", (1,)),
    "a-contracted-letter": ("ijk,klm,kr->ijlmr", (2,)),
    "only-dense-letters-left": ("ij,jk,r->r", (2,)),
    "sampled": ("ij,jk,ik->ik", (2,)),
    "a-number": ("ij,jk,->ik", (2,)),
    "summed-dense": ("ij,jk,rs->ik", (2,)),
    "chain": ("ij,jk,kl,ln->", ()),
    "between": ("ij,jr,rk,kl->il", (1, 2)),
}


def operands(
    equation: str,
    pattern: str = "random",
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    coalesce: bool = True,
    dense: tuple[int, ...] = (),
    sizes: dict[str, int] = SIZES,
) -> list[Any]:
    """An operand a term, sparse but for those in `dense`."""
    made: list[Any] = []
    for n, term in enumerate(equation.split("->")[0].split(",")):
        shape = tuple(sizes[c] for c in term)
        if n in dense:
            made.append(random_values(shape, dtype, seed + n + 3))
        else:
            made.append(random_sparse(shape, pattern, dtype, seed + 7 * n, coalesce))
    return made


def structural(equation: str, given: list[Any]) -> torch.Tensor:
    """(modes, nnz) where the patterns alone say that the result may be other than 0, in lexicographic order."""
    ones = [
        stc.SparseTensor(o.coords, torch.ones(o.nnz, dtype=torch.int64), o.shape, coalesce=False)
        if isinstance(o, stc.SparseTensor)
        else torch.ones(o.shape, dtype=torch.int64)
        for o in given
    ]
    return torch.nonzero(run(bound_of(equation, ones).einsum, *ones)).T


def check_pair(equation: str, given: list[Any], **settings: Any) -> stc.Kernel:
    """Compile, call twice on poisoned memory, compare values and pattern with the reference; returns the kernel."""
    kernel = stc.compile(equation, *given, **settings)
    assert isinstance(kernel, stc.Kernel)
    dense = [o for o in given if isinstance(o, torch.Tensor)]
    with poisoned():
        for _ in range(2):
            found = kernel(*dense)
            assert_matches(found, equation, given)
            if isinstance(found, stc.SparseTensor):
                assert found.is_coalesced
                assert torch.equal(found.coords, structural(equation, given))
    return kernel


def small_blocks(equation: str, threshold: int, side: int = 2, storage: str = "auto") -> stc.plans.Plan:
    """The hybrid plan, with sides so small that operands of the tests have many blocks."""
    return stc.plans.plan_bcb(storage, threshold, **dict.fromkeys(sorted(set(equation) - set(",->")), side))


def marking(marked: bool) -> Any:
    """Keys numbered by marks, or by sorting, however many are possible."""
    return mock.patch.object(crd, "markable", lambda keys, n: marked and keys < 1 << 20)


@contextlib.contextmanager
def small_chunks(tasks: int, kept: bool) -> Iterator[None]:
    """Tasks taken, and results put in order, so many at a time; tasks kept for the next call or not."""
    with (
        mock.patch.object(join, "PIECE", tasks),
        mock.patch.object(join_order, "PIECE", tasks),
        mock.patch.multiple(problem, LEAST_CHUNK=tasks, CHUNK=tasks),
        mock.patch.object(task_lists, "KEPT_TASKS", task_lists.KEPT_TASKS if kept else 0),
        marking(kept),
    ):
        yield


def meetings(equation: str, given: list[stc.SparseTensor]) -> int:
    """How many tasks a contraction of two has: entries that meet, once what one of them alone has is summed away."""
    terms, output = equation.split("->")[0].split(","), equation.split("->")[1]
    shared = sorted(set(terms[0]) & set(terms[1]))
    counted = []
    for term, x in zip(terms, given, strict=True):
        row = dict(zip(term, x.coords.tolist(), strict=True))
        alike = torch.stack([own == x.coords[term.rindex(c)] for c, own in zip(term, x.coords, strict=True)]).all(0)
        left = [*shared, *(c for c in row if c not in shared and c in output)]
        entries = {tuple(row[c][n] for c in left) for n in torch.nonzero(alike).flatten().tolist()}
        counted.append(Counter(entry[: len(shared)] for entry in entries))
    return sum(n * counted[1][place] for place, n in counted[0].items())


MOST_PIECES = 500
"""Pieces that the tasks of a drawn pair are taken in, at most: a piece takes a millisecond or two, and a thousandth one
meets what hundreds before it have met.
"""


@dataclass(frozen=True)
class DrawnPair:
    """Two sparse operands, and how to run them."""

    equation: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    patterns: tuple[str, str]
    dtype: torch.dtype
    coalesce: tuple[bool, bool]
    plan: str
    chunk: int
    kept: bool
    same: bool
    seed: int

    def operands(self) -> list[stc.SparseTensor]:
        made = [
            random_sparse(shape, pattern, self.dtype, self.seed + n, coalesce)
            for n, (shape, pattern, coalesce) in enumerate(zip(self.shapes, self.patterns, self.coalesce, strict=True))
        ]
        return [made[0], made[0]] if self.same and self.shapes[0] == self.shapes[1] else made

    def in_pieces(self, given: list[stc.SparseTensor]) -> contextlib.AbstractContextManager[None]:
        """A block in which tasks of these operands are taken so many at a time as was drawn, or more of very many."""
        return small_chunks(max(self.chunk, meetings(self.equation, given) // MOST_PIECES), self.kept)


@st.composite
def pairs(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...], plans: tuple[str, ...] = PLANS) -> DrawnPair:
    """Orders 1 to 5, any roles of letters; one operand in ten has a repeated letter."""
    pool = "ijklmn"[: draw(st.integers(1, 6))]
    terms = []
    for _ in range(2):
        order = draw(st.integers(1, min(5, len(pool))))
        term = "".join(draw(st.permutations(pool)))[:order]
        if order > 1 and draw(st.integers(0, 9)) == 0:
            term = term[:-1] + term[0]
        terms.append(term)
    letters = sorted(set("".join(terms)))
    output = draw(st.lists(st.sampled_from(letters), unique=True, max_size=len(letters)))
    smallest = 0 if draw(st.integers(0, 19)) == 0 else 1
    sizes, room = {}, 40_000
    for c in letters:
        sizes[c] = draw(st.integers(smallest, max(1, min(12, room))))
        room = max(1, room // max(1, sizes[c]))
    names = st.sampled_from(sorted(PATTERNS))
    return DrawnPair(
        f"{','.join(terms)}->{''.join(output)}",
        (tuple(sizes[c] for c in terms[0]), tuple(sizes[c] for c in terms[1])),
        (draw(names), draw(names)),
        draw(st.sampled_from(dtypes)),
        (draw(st.booleans()), draw(st.booleans())),
        draw(st.sampled_from(plans)),
        draw(st.sampled_from([1, 2, 7, 64, 1 << 20])),
        draw(st.booleans()),
        draw(st.integers(0, 4)) == 0,
        draw(st.integers(0, 1000)),
    )


@dataclass(frozen=True)
class DrawnChain:
    """Several operands, two or more of them sparse."""

    equation: str
    shapes: tuple[tuple[int, ...], ...]
    dense: tuple[int, ...]
    patterns: tuple[str, ...]
    dtype: torch.dtype
    coalesce: bool
    plan: str
    seed: int

    def operands(self) -> list[Any]:
        made: list[Any] = []
        for n, (shape, pattern) in enumerate(zip(self.shapes, self.patterns, strict=True)):
            if n in self.dense:
                made.append(random_values(shape, self.dtype, self.seed + n))
            else:
                made.append(random_sparse(shape, pattern, self.dtype, self.seed + n, self.coalesce))
        return made


@st.composite
def chains(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...]) -> DrawnChain:
    """Two to five operands of order 0 (dense ones) to 3 over up to six letters, which may repeat in an operand."""
    count = draw(st.integers(2, 5))
    kinds = draw(st.permutations([True, True, *draw(st.lists(st.booleans(), min_size=count - 2, max_size=count - 2))]))
    pool = "ijklmn"[: draw(st.integers(2, 6))]
    terms = []
    for sparse in kinds:
        letters = st.lists(st.sampled_from(pool), min_size=1 if sparse else 0, max_size=3)
        term = draw(letters)
        terms.append("".join(term if draw(st.integers(0, 5)) == 0 else dict.fromkeys(term)))
    letters = sorted(set("".join(terms)))
    output = draw(st.lists(st.sampled_from(letters), unique=True, max_size=len(letters)))
    sizes, room = {}, 20_000
    for c in letters:
        sizes[c] = draw(st.integers(1, max(1, min(6, room))))
        room = max(1, room // sizes[c])
    return DrawnChain(
        f"{','.join(terms)}->{''.join(output)}",
        tuple(tuple(sizes[c] for c in t) for t in terms),
        tuple(n for n, sparse in enumerate(kinds) if not sparse),
        tuple(draw(st.lists(st.sampled_from(sorted(PATTERNS)), min_size=count, max_size=count))),
        draw(st.sampled_from(dtypes)),
        draw(st.booleans()),
        draw(st.sampled_from(PLANS)),
        draw(st.integers(0, 1000)),
    )
