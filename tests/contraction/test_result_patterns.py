"""Which positions a sparse result has: those that nonzeros of the sparse operands give, whatever is summed over there.

Operands whose entries have no elements have no nonzeros. A sum over nothing of dense operands is 0 at each position.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from cases import ends, every_wide_shape
from reference import Term, join, pattern, whole

import sparsetc as stc

Operand = stc.SparseTensor | torch.Tensor


def sparse(coords: list[list[int]], shape: tuple[int, ...], *dense: int) -> stc.SparseTensor:
    values = torch.rand(len(coords[0]), *dense)
    return stc.SparseTensor(torch.tensor(coords, dtype=torch.long), values, (*shape, *dense))


def blocks(grid: list[list[int]], *dense: int) -> stc.SparseTensor:
    """Of 2 by 2, at these places of a matrix of 4 by 4."""
    values = torch.rand(len(grid[0]), 2, 2, *dense)
    return stc.SparseTensor.from_blocks(torch.tensor(grid, dtype=torch.long), values, (4, 4, *dense))


def nothing(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


TWO = [[0, 1], [0, 2]]
EMPTY = sparse(TWO, (3, 3), 2, 0)
FULL = sparse(TWO, (3, 3), 2, 3)
MATRIX = sparse([[0, 1], [0, 1]], (3, 3))
VECTOR = sparse([[0, 2]], (3,))
OTHER = sparse([[0, 1]], (3,))


def expected(equation: str, operands: list[Operand]) -> torch.Tensor:
    """Where the reference has an entry."""
    inputs, output = equation.split("->")
    terms, sizes = [], {}
    for letters, o in zip(inputs.split(","), operands, strict=True):
        sizes |= dict(zip(letters, o.shape, strict=True))
        x = o.expand_dense() if isinstance(o, stc.SparseTensor) and o.blocksize else o
        terms.append(whole(letters, x.coords, x.values) if isinstance(x, stc.SparseTensor) else Term(letters, x))
    return pattern(join(terms), output, sizes)


def check(equation: str, operands: list[Operand], **settings: Any) -> None:
    given = [
        o.with_values(o.values.clone().requires_grad_()) if isinstance(o, stc.SparseTensor) else o.requires_grad_()
        for o in (o if isinstance(o, stc.SparseTensor) else o.clone() for o in operands)
    ]
    found = stc.einsum(equation, *given, **settings)
    assert isinstance(found, stc.SparseTensor)
    single, where = found.expand_dense(), torch.zeros(found.shape, dtype=torch.bool)
    where[tuple(single.coords)] = True
    assert torch.equal(where, expected(equation, operands))
    assert torch.equal(found.values, torch.zeros_like(found.values))
    if found.values.requires_grad:
        found.values.sum().backward()


# -- sums over nothing -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["auto", "scalar", "bcb"])
@pytest.mark.parametrize(
    ("equation", "operands"),
    [
        ("r,r,i,i->i", [nothing(0), nothing(0), VECTOR, OTHER]),
        ("w,m,j,w->m", [nothing(0), VECTOR, OTHER, nothing(0)]),
        ("w,m,j,w->m", [nothing(1), VECTOR, OTHER, nothing(0)]),
        ("r,i,j->ij", [nothing(0), VECTOR, OTHER]),
        ("rr,i,j->ij", [nothing(0, 0), VECTOR, OTHER]),
        ("wi,wj,i,j->ij", [nothing(0, 3), nothing(0, 3), VECTOR, OTHER]),
        ("r,s,i,j,s,ri->ij", [nothing(0), nothing(2), VECTOR, OTHER, nothing(2), nothing(0, 3)]),
        ("r,r,i,i,j->i", [nothing(0), nothing(0), VECTOR, OTHER, VECTOR]),
        ("r,i,i,s->irs", [nothing(0), VECTOR, OTHER, nothing(4)]),
    ],
    ids=lambda case: case if isinstance(case, str) else "",
)
def test_a_sum_over_nothing_leaves_the_positions(equation: str, operands: list[Operand], plan: str) -> None:
    if "irs" in equation:  # r is kept
        operands = [nothing(0), *operands[1:]]
    check(equation, operands, plan=plan, output="sparse")


def test_a_sum_over_nothing_of_integers() -> None:
    x = VECTOR.with_values(torch.tensor([3, 4], dtype=torch.int8))
    none = torch.zeros(0, dtype=torch.int8)
    found = stc.einsum("r,r,i,i->i", none, none, x, x)
    assert (found.dtype, found.coords.tolist(), found.values.tolist()) == (torch.int8, [[0, 2]], [0, 0])


# -- entries without elements ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["auto", "sparse"])
@pytest.mark.parametrize(
    ("equation", "operands"),
    [
        ("uijk->iu", [sparse([[0], [0], [0]], (1, 1, 1), 0)]),
        ("ijhk->ij", [EMPTY]),
        ("ijhk->ijh", [EMPTY]),
        ("ijhk->ijhk", [EMPTY]),
        ("ijhk->ikj", [EMPTY]),
        ("iihk->ih", [EMPTY]),
        ("ijhk,hr->ijr", [EMPTY, nothing(2, 4)]),
        ("ijhk,kr->ijr", [EMPTY, nothing(0, 4)]),
        ("ijhk,ij->ij", [EMPTY, MATRIX]),
        ("ij,ijhk->ij", [MATRIX, EMPTY]),
        ("ijhk,ijhl->ijl", [EMPTY, FULL]),
        ("ijhk,jl->il", [EMPTY, MATRIX]),
        ("i,j,ijhk->ij", [VECTOR, VECTOR, EMPTY]),
        ("ijk->ij", [blocks(TWO[:1] * 2, 0)]),
        ("ijk,jl->il", [blocks(TWO[:1] * 2, 0), blocks(TWO[:1] * 2)]),
        ("ijhk->ih", [blocks(TWO[:1] * 2, 3, 0)]),
    ],
    ids=lambda case: case if isinstance(case, str) else "",
)
def test_entries_without_elements_give_no_positions(equation: str, operands: list[Operand], form: str) -> None:
    check(equation, operands, output=form)


def test_a_pattern_serves_values_with_elements_and_without() -> None:
    full = sparse(TWO, (3, 3), 3)
    blocks = stc.einsum("ijk,isr,jtr->ijst", full, nothing(full.shape[0], 32, 0), nothing(full.shape[1], 32, 0))
    assert blocks.shape == (*full.shape[:2], 32, 32)
    assert not blocks.values.any()
    empty = stc.einsum("ijk,kr->ijr", full, nothing(3, 0))
    assert empty.pattern is full.pattern
    for _ in range(2):
        assert stc.einsum("ijk->ij", full).nnz == 2
        assert stc.einsum("ijk->ij", empty).nnz == 0


# -- positions of dense modes alone ------------------------------------------------------------------------------------

ROW, ROW_APART = sparse([[0]], (3,), 2), sparse([[1]], (3,), 2)


@pytest.mark.parametrize(
    ("equation", "operands"),
    [
        ("ijh->h", [blocks([[], []], 3)]),
        ("ijhk->h", [blocks([[0], [1]], 3, 0)]),
        ("iih->h", [blocks([[0], [1]], 3)]),
        ("ijh,jk->h", [blocks([[0], [1]], 3), blocks([[0], [0]])]),
        ("ih,ih,kh->kh", [ROW, ROW_APART, ROW]),
        ("ih,ih,kh->kh", [ROW, ROW, ROW_APART]),
        ("ih,ih,kh,h->h", [ROW, ROW_APART, ROW, nothing(2)]),
        ("ijh,jk,kh->h", [blocks([[0], [1]], 3), blocks([[0], [0]]), sparse([[1]], (4,), 3)]),
        ("ijh,ij,klh->klh", [blocks([[0], [1]], 3), blocks([[0], [0]]), blocks([[1], [1]], 3)]),
    ],
    ids=lambda case: case if isinstance(case, str) else "",
)
def test_where_no_entries_meet_there_are_no_positions(equation: str, operands: list[Operand]) -> None:
    zero = [o.with_values(o.values * 0) if isinstance(o, stc.SparseTensor) else o for o in operands]
    check(equation, zero, output="sparse")
    assert float(stc.einsum(equation, *zero, output="dense").abs().sum()) == 0


@every_wide_shape
@pytest.mark.parametrize("plan", ["auto", "coo", "streamed"])
def test_wide_shapes(plan: str, shape: tuple[int, ...]) -> None:
    """Transposed, and projected on some modes, against a dictionary."""
    at = ends(shape)
    x, letters = stc.SparseTensor(torch.tensor(at).T, torch.arange(1.0, len(at) + 1), shape), "ijklmn"[: len(shape)]
    for output in {letters[::-1], letters[0], letters[:0:-1] or letters}:
        wanted = Counter[tuple[int, ...]]()
        for n, p in enumerate(at):
            wanted[tuple(p[letters.index(c)] for c in output)] += n + 1
        if plan == "streamed":
            found = stc.stream(f"{letters}->{output}", x, output="sparse", chunk_bytes=4096)
        else:
            found = stc.einsum(f"{letters}->{output}", x, output="sparse", plan=plan)
        assert isinstance(found, stc.SparseTensor)
        assert [*map(tuple, found.coords.T.tolist())] == sorted(wanted)
        assert found.values.tolist() == [wanted[p] for p in sorted(wanted)]
