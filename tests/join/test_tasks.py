"""The list of tasks of a contraction: what is stored says all, its programs add up what they should, in any pieces."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from cases import assert_matches, random_sparse
from hypothesis import given, settings
from interpret import run_program
from pair_cases import EQUATIONS, SIZES, check_pair, marking, operands, pairs, small_chunks

import sparsetc as stc
from sparsetc.contraction.pair import Pair
from sparsetc.ir.equation.einsum import Bound
from sparsetc.ir.lower import Target, lower
from sparsetc.ir.plan import Schedule
from sparsetc.join.order import JoinOrder
from sparsetc.products import tasks as task_lists
from sparsetc.products.scalar import EINSUMS
from sparsetc.products.tasks import distinct, groups, spans
from sparsetc.testing import check_arrays, read


def step_of(equation: str, given: list[stc.SparseTensor], **settings: object) -> Pair:
    (step,) = stc.compile(equation, *given, plan="scalar", **settings).contraction.steps
    return step


def by_hand(m: JoinOrder) -> torch.Tensor:
    """(3, tasks): p, q and the place of the result, task after task."""
    counts = torch.diff(m.ends, prepend=m.ends.new_zeros(1))
    starts = m.ends - counts
    found = []
    for p in range(m.matched[0]):
        for n in range(int(counts[p])):
            q = int(m.first[p]) + n
            assert int(starts[p]) + n == len(found)
            found.append((p, q, int(m.row[p]) * m.join.columns + int(m.column[q])))
    return torch.tensor(found, dtype=torch.long).reshape(-1, 3).T


@pytest.mark.parametrize("chunk", [1, 3, 50, 1 << 20])
@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("name", ["one-mode", "two-modes", "outer", "inner", "batch", "elementwise", "vectors-outer"])
def test_groups_make_every_task_once_and_find_every_place(name: str, marked: bool, chunk: int) -> None:
    step = step_of(EQUATIONS[name], operands(EQUATIONS[name], "skewed"))
    m, tasks = step.task_sums.tasks.join_order, by_hand(step.task_sums.tasks.join_order)
    places, slot = torch.unique(tasks[2], return_inverse=True)
    with marking(marked):
        made = list(groups(m, chunk))
    pieces, slots, fresh = zip(*made, strict=True)
    assert [g.begin for g in pieces] == [0, *(g.end for g in pieces[:-1])]
    assert torch.equal(torch.cat(fresh), places)
    assert torch.equal(torch.cat([g.p for g in pieces]).long(), tasks[0])
    assert torch.equal(torch.cat([g.q for g in pieces]).long(), tasks[1])
    assert torch.equal(torch.cat(slots).long(), slot)
    assert all(g.end - g.begin <= chunk for g in pieces)


def test_spans_are_of_whole_rows() -> None:
    step = step_of("ijk,klm->ijlm", operands("ijk,klm->ijlm", "skewed"))
    m = step.task_sums.tasks.join_order
    found = list(spans(m, 10))
    assert (found[0][0], found[-1][1]) == (0, m.tasks)
    assert (found[0][2], found[-1][3]) == (0, m.join.rows)
    longest = int(torch.bincount(m.join.row.rank, m.join.counts.double()).max())
    assert longest > 10
    assert all(end - begin <= 10 or last == row + 1 for begin, end, row, last in found)


@pytest.mark.parametrize("key", [[], [3], [0, 1, 2], [5, 5, 5], [7, 0, 7, 2]])
@pytest.mark.parametrize("marked", [False, True])
def test_distinct(key: list[int], marked: bool) -> None:
    with marking(marked):
        fresh, rank = distinct(torch.tensor(key, dtype=torch.int32), 8)
    assert fresh.tolist() == sorted(set(key))
    assert fresh[rank].tolist() == key


@pytest.mark.parametrize("frame", [1, 4, 256])
@pytest.mark.parametrize("name", ["one-mode", "batch", "inner", "outer-permuted"])
def test_a_list_stores_every_task(name: str, frame: int) -> None:
    with mock.patch.object(task_lists, "FRAME", frame):
        step = step_of(EQUATIONS[name], operands(EQUATIONS[name], "skewed"))
        places = step.task_sums.tasks.places()
        (one,) = step.task_sums.tasks
        tasks = by_hand(step.task_sums.tasks.join_order)
        tasks[2] = torch.searchsorted(places, tasks[2].contiguous())
        assert torch.equal(one.coordinates(), tasks)
        for packed in (one.chunks(), one.runs()):
            packed.view.verify()
            check_arrays(packed)
            found, at = read(packed.view, packed.arrays, packed.items, packed.stored)
            assert torch.equal(found, tasks)
            assert torch.equal(at, torch.arange(packed.stored))
        for piece in one.pieces(8):
            assert torch.equal(piece.coordinates(), tasks[:, piece.begin : piece.end])
    assert one.x_word.dtype == torch.uint8
    assert one.z_word.dtype == torch.int32


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.complex64])
@pytest.mark.parametrize("name", ["one-mode", "batch", "outer-permuted"])
def test_native_lists_are_the_same(name: str, dtype: torch.dtype, natively: Callable[[bool], None]) -> None:
    given = operands(EQUATIONS[name], "skewed", dtype=dtype)
    results, lists = [], []
    for native in (True, False):
        natively(native)
        step = step_of(EQUATIONS[name], given)
        kernel = stc.compile(EQUATIONS[name], *given, plan="scalar")
        results += [kernel().values, kernel().values]  # the second by a list, which the first call is without
        places = step.task_sums.tasks.places().long()
        lists.append([places, step._pattern.coords, *(one.coordinates() for one in step.task_sums.tasks)])
    assert all(map(torch.equal, *lists))
    assert torch.equal(results[0], results[1])
    assert_matches(kernel(), EQUATIONS[name], given)
    torch.testing.assert_close(results[0], results[2])


def test_a_new_product_lists_no_tasks_and_makes_no_coordinates(natively: Callable[[bool], None]) -> None:
    natively(True)
    dense = torch.rand(40, 40) * (torch.rand(40, 40) < 0.2)
    x = stc.SparseTensor.from_dense(dense)
    kernel = stc.compile("ij,jk->ik", x, x, plan="scalar")
    product = kernel()
    assert kernel.step.task_sums.tasks._kept is None
    assert not isinstance(product.pattern._coords, torch.Tensor)
    assert product.nnz == int((dense @ dense > 0).sum())
    torch.testing.assert_close(product.to_dense(), dense @ dense)


def test_native_sums_of_float32_lose_no_digits(natively: Callable[[bool], None]) -> None:
    natively(True)
    n = 1 << 16
    x = stc.SparseTensor([[0] * n, range(n)], torch.full((n,), 0.1), (1, n))
    (found,) = stc.einsum("ij,kj->ik", x, x, plan="scalar").values.tolist()
    assert found == pytest.approx(n * torch.tensor(0.1).double().item() ** 2, rel=3e-7)


@pytest.mark.parametrize("letter", EINSUMS)
@pytest.mark.parametrize("lanes", [1, 8])
@pytest.mark.parametrize("item", [4, 2048])
def test_tile_programs_of_the_three_sums(letter: str, lanes: int, item: int) -> None:
    """Level 3 on both views of a list; items of 4 tasks cut runs."""
    equation = "ijk,klm->ijlm"
    with mock.patch.object(task_lists, "ITEM", item):
        step = step_of(equation, operands(equation, "skewed"))
        (one,) = step.task_sums.tasks
        total = step.task_sums.of(letter)
        g = torch.Generator().manual_seed(0)
        sizes = dict(zip("pqz", one.shape, strict=True))
        given = [torch.rand(sizes[c], generator=g, dtype=torch.float64) for c in EINSUMS[letter]]
        coords = one.coordinates()
        where = dict(zip("pqz", coords, strict=True))
        product = given[0][where[EINSUMS[letter][0]]] * given[1][where[EINSUMS[letter][1]]]
        rows = sizes[letter]
        expected = torch.zeros(rows, dtype=torch.float64).index_add_(0, where[letter], product)
        torch.testing.assert_close(total(*given), expected)
        for packed in (one.chunks(), one.runs()):
            bound = Bound.of(total.bound.einsum, sizes)
            program = lower(bound, packed.view, Schedule(lanes=lanes), Target(rows=rows), format="tasks")
            out = torch.zeros(rows, dtype=torch.float64)
            run_program(program, packed.arrays, given[0], given, out, packed.items, packed.stored)
            torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("name", EQUATIONS)
def test_lists_made_again_give_the_same(name: str, chunk: int, kept: bool) -> None:
    with small_chunks(chunk, kept):
        kernel = check_pair(EQUATIONS[name], operands(EQUATIONS[name], "skewed", coalesce=False), plan="scalar")
        (step,) = kernel.contraction.steps
        assert step.task_sums.tasks.fits == (kept or step.task_sums.tasks.join_order.tasks == 0)
        assert step.task_sums.tasks.nbytes == (step.task_sums.tasks.join_order.tasks * 5 if kept else 0)


@settings(max_examples=100)
@given(pairs((torch.float64, torch.int64), ("scalar",)))
def test_any_pair_in_any_pieces(drawn: object) -> None:
    given = drawn.operands()  # type: ignore[attr-defined]
    with drawn.in_pieces(given):  # type: ignore[attr-defined]
        found = stc.einsum(drawn.equation, *given, plan="scalar")  # type: ignore[attr-defined]
    assert_matches(found, drawn.equation, given)  # type: ignore[attr-defined]


def test_gradients_of_lists_made_again() -> None:
    x, y = operands("ijk,klm->ijlm", sizes={**SIZES, "i": 3, "j": 3})
    with small_chunks(7, False):
        kernel = stc.compile("ijk,klm->ijlm", x, y, plan="scalar")
        given = (x.values.clone().requires_grad_(), y.values.clone().requires_grad_())
        assert torch.autograd.gradcheck(lambda a, b: kernel(values=[a, b]).values, given)


def test_one_row_with_most_of_the_tasks() -> None:
    """A row, a column and a contracted index that meet everything, beside rows of one task."""
    n = 300
    ones, at = torch.zeros(n, dtype=torch.long), torch.arange(n)
    coords = torch.unique(
        torch.cat([torch.stack([ones, at]), torch.stack([at, ones]), torch.stack([at, at])], 1), dim=1
    )
    x = stc.SparseTensor(coords, torch.rand(coords.shape[1], dtype=torch.float64), (n, n))
    for chunk in (64, 1 << 20):
        for kept in (True, False):
            with small_chunks(chunk, kept):
                kernel = stc.compile("ij,jk->ik", x, x, plan="scalar")
                found = kernel()
            assert kernel.contraction.steps[0].task_sums.tasks.join_order.tasks > n * n
            torch.testing.assert_close(found.to_dense(), x.to_dense() @ x.to_dense())


def test_a_limit_of_a_few_bytes_a_task_keeps_no_list() -> None:
    x, y = random_sparse((60, 50), "dense", torch.float64, 1), random_sparse((50, 60), "dense", torch.float64, 2)
    limit = 60 * 60 * 24
    kernel = stc.compile("ij,jk->ik", x, y, plan="scalar", memory_limit=limit)
    (step,) = kernel.contraction.steps
    assert step.task_sums.tasks.join_order.tasks == 60 * 60 * 50
    assert not step.task_sums.tasks.fits
    assert len(list(step.task_sums.tasks)) > 60
    torch.testing.assert_close(kernel().to_dense(), x.to_dense() @ y.to_dense())


def test_the_source_says_what_is_stored_and_what_for() -> None:
    kernel = stc.compile("ijk,klm->ijlm", *operands("ijk,klm->ijlm"), plan="scalar")
    for text in ("p   nonzeros over ijk", "q = position + y_shift[p]", "p:8 + x_word_base", 'einsum "n,n->n"'):
        assert text in kernel.source
    step = kernel.contraction.steps[0]
    back = step.task_sums.of("p").programs.source
    assert '"pqz,q,z->p"' in back


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_one_program_serves_patterns_of_like_sizes(backend: str) -> None:
    """What is generated says nothing of the counts of one pattern, so operands of new patterns find it made."""

    def source(seed: int) -> str:
        given = [random_sparse((20, 20, 20), "random", torch.float32, seed + n) for n in (0, 1)]
        return stc.compile("ijk,klm->ijlm", *given, plan="scalar", backend=backend).source

    assert source(0) == source(2)
