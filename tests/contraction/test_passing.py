"""Einsums of patterns that come and go: by torch's operations on entries as they were given, without a kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import sparsetc as stc
from sparsetc import api
from sparsetc.contraction import passing
from sparsetc.support import files
from sparsetc.tensor import readings

SIZES = {"i": 7, "j": 5, "k": 6, "r": 4, "s": 3}
EQUATIONS = [
    *("ij,jr->ir", "ij,jr->ri", "ij,rj->ir", "ij,ir->jr", "ij,j->i", "ij,j->", "ij,jr->r", "ij,jrs->sir"),
    *("ijk,jr,kr->ir", "ijk,jr,ks->ris", "ijk,jkr->ir", "ijk,kjr->ir", "ijk,ir,kr->jr", "ijk,k,j->i", "ij,ij->"),
    *("ij,jr,s->irs", "ij,irj->r", "ijk,kr->jr"),
]


@pytest.fixture(autouse=True)
def _in_force(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(passing, "IN_A_ROW", 3)
    _forget()
    yield
    _forget()


def _forget() -> None:
    passing.last_uses.clear()
    readings.passing.clear()


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The einsums that kernels are compiled for."""
    texts: list[str] = []
    compiled = api.compiled

    def noting(text: str, *arguments: Any, **once: Any) -> Any:
        texts.append(text)
        return compiled(text, *arguments, **once)

    monkeypatch.setattr(api, "compiled", noting)
    return texts


def entries(letters: str, seed: int = 0, count: int = 40) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """Coordinates in no order, of which some are the same, values and a shape."""
    g, shape = torch.Generator().manual_seed(seed), tuple(SIZES[c] for c in letters)
    coords = torch.stack([torch.randint(n, (count,), generator=g) for n in shape])
    return coords, torch.randn(count, generator=g, dtype=torch.float64), shape


def dense(equation: str, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """The dense operands."""
    g = torch.Generator().manual_seed(seed + 1000)
    terms = equation.split("->")[0].split(",")[1:]
    return [torch.randn([SIZES[c] for c in term], generator=g, dtype=torch.float64).to(dtype) for term in terms]


def whole(coords: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor, in float64, by torch."""
    return torch.zeros(shape, dtype=torch.float64).index_put(tuple(coords), values.double(), accumulate=True)


def until_passing(equation: str, dtype: torch.dtype = torch.float32) -> None:
    """Use an einsum with as many patterns as it takes."""
    letters = equation.split(",")[0]
    for seed in range(passing.IN_A_ROW + 1):
        coords, values, shape = entries(letters, 100 + seed)
        stc.einsum(equation, stc.SparseTensor(coords, values.to(dtype), shape), *dense(equation, dtype), output="dense")


TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("ordered", [False, True], ids=["any order", "sorted"])
@pytest.mark.parametrize("dtype", [*TOLERANCE, torch.complex64], ids=str)
@pytest.mark.parametrize("equation", EQUATIONS)
def test_results_and_gradients(equation: str, dtype: torch.dtype, ordered: bool, compilations: list[str]) -> None:
    until_passing(equation, dtype)
    compilations.clear()
    coords, values, shape = entries(equation.split(",")[0])
    if ordered:
        coords = whole(coords, values, shape).nonzero().T.contiguous()
        values = values[: coords.shape[1]]
    learned = values.to(dtype).requires_grad_()
    operands = [d.requires_grad_() for d in dense(equation, dtype)]
    result = stc.einsum(equation, stc.SparseTensor(coords, learned, shape), *operands, output="dense")
    assert not compilations
    wide = torch.complex128 if dtype.is_complex else torch.float64
    exact = [t.detach().to(wide).requires_grad_() for t in (learned, *operands)]
    full = torch.zeros(shape, dtype=wide).index_put(tuple(coords), exact[0], accumulate=True)
    expected = torch.einsum(equation, full, *exact[1:])
    close = {"rtol": TOLERANCE.get(dtype, 1e-5), "atol": 20 * TOLERANCE.get(dtype, 1e-5)}
    assert result.dtype == dtype
    assert result.is_contiguous()
    torch.testing.assert_close(result.to(wide), expected, **close)
    upstream = torch.ones_like(expected)
    found = torch.autograd.grad(result, [learned, *operands], upstream.to(dtype))
    for one, other in zip(found, torch.autograd.grad(expected, exact, upstream), strict=True):
        torch.testing.assert_close(one.to(wide), other, **close)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("equation", ["ij,jr->ir", "ij,rj->ir", "ijk,jr,kr->ir"])
def test_values_that_do_not_learn(
    equation: str, native: bool, compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A native loop adds their rows where there are enough."""
    if native:
        pytest.importorskip("numba")
        monkeypatch.setattr(files, "ENOUGH", 0)
    until_passing(equation)
    compilations.clear()
    coords, values, shape = entries(equation.split(",")[0])
    operands = [d.requires_grad_() for d in dense(equation, torch.float64)]
    until_passing(equation, torch.float64)
    compilations.clear()
    result = stc.einsum(equation, stc.SparseTensor(coords, values, shape), *operands)
    expected = torch.einsum(equation, whole(coords, values, shape), *operands)
    torch.testing.assert_close(result, expected)
    for one, other in zip(
        torch.autograd.grad(result.square().sum(), operands),
        torch.autograd.grad(expected.square().sum(), operands),
        strict=True,
    ):
        torch.testing.assert_close(one, other)
    assert not compilations


def test_a_pattern_that_stays_has_a_kernel(compilations: list[str]) -> None:
    until_passing("ij,jr->ir")
    coords, values, shape = entries("ij")
    x, (b,) = stc.SparseTensor(coords, values.float(), shape), dense("ij,jr->ir", torch.float32)
    compilations.clear()
    for use in range(passing.FEW + 3):
        torch.testing.assert_close(stc.einsum("ij,jr->ir", x, b), whole(coords, values, shape).float() @ b)
        assert len(compilations) == (use >= passing.FEW)
    following = stc.SparseTensor(*entries("ij", 1))
    following = following.to(torch.float32)
    stc.einsum("ij,jr->ir", following, b)  # the last stayed, so this one may
    assert len(compilations) == 2


def test_the_same_coordinates_are_the_same_pattern(compilations: list[str]) -> None:
    """Weights that are new at each step on one graph: it is used more often than a few times."""
    until_passing("ij,jr->ir")
    coords, values, shape = entries("ij")
    (b,) = dense("ij,jr->ir", torch.float32)
    compilations.clear()
    for step in range(passing.FEW + 3):
        weights = values.float() + step
        found = stc.einsum("ij,jr->ir", stc.SparseTensor(coords, weights, shape), b)
        torch.testing.assert_close(found, (whole(coords, weights, shape).float() @ b), rtol=1e-5, atol=1e-4)
    assert len(compilations) == 1
    assert stc.SparseTensor(coords, values, shape).pattern is stc.SparseTensor(coords, values, shape).pattern


ASKED: list[dict[str, Any]] = [
    *({"plan": "coo"}, {"deterministic": True}, {"memory_limit": "1GB"}, {"backend": "torch"}, {"tune": "calls"})
]


@pytest.mark.parametrize("settings", ASKED, ids=str)
def test_what_is_asked_for_is_compiled(settings: dict[str, Any], compilations: list[str]) -> None:
    until_passing("ij,jr->ir")
    x, (b,) = stc.SparseTensor(*entries("ij")).to(torch.float32), dense("ij,jr->ir", torch.float32)
    compilations.clear()
    stc.einsum("ij,jr->ir", x, b, **settings)
    with stc.options(**settings):
        stc.einsum("ij,jr->ir", x.with_values(x.values), b)
    assert compilations


OTHERS = ["ij,ir,jr->ij", "ij,jr,rs->is", "ii,ir->ir", "ij,jr->", "ij->i"]


@pytest.mark.parametrize("equation", OTHERS)
def test_other_einsums_are_compiled(equation: str, compilations: list[str]) -> None:
    shape = 7, 7 if equation.startswith("ii") else 5
    for seed in range(6):
        coords, values, _ = entries("ij", seed)
        x = stc.SparseTensor(coords, values, shape)
        operands = dense(equation, torch.float64)
        found = stc.einsum(equation, x, *operands)
        found = found.to_dense() if isinstance(found, stc.SparseTensor) else found
        torch.testing.assert_close(found, torch.einsum(equation, whole(coords, values, shape), *operands))
    assert len(compilations) == 6


READERS: dict[str, Callable[[stc.SparseTensor], Any]] = {
    "coords": lambda x: x.coords,
    "values": lambda x: x.values,
    "dense": lambda x: x.to_dense(),
    "nnz": lambda x: x.nnz,
    "order": lambda x: (x.order, x.shape, x.dtype, x.device, x.requires_grad, x.is_coalesced, x.dense_order),
    "sum": lambda x: x.sum(1),
    "scaled": lambda x: (2 * x).to_dense(),
    "torch": lambda x: x.to_torch().to_dense(),
    "copy": lambda x: x.cpu().to(torch.float32).values,
    "repr": repr,
}


@pytest.mark.parametrize("reader", READERS)
def test_a_tensor_is_what_it_was(reader: str) -> None:
    coords, values, shape = entries("ij")
    wanted = READERS[reader](stc.SparseTensor(coords.clone(), values, shape))
    until_passing("ij,jr->ir", torch.float64)
    x = stc.SparseTensor(coords, values, shape)
    assert x._unsorted is not None
    found = READERS[reader](x)
    assert torch.equal(found, wanted) if isinstance(found, torch.Tensor) else str(found) == str(wanted)
    stc.einsum("ij,jr->ir", x, *dense("ij,jr->ir", torch.float64))


def test_values_are_those_that_were_given() -> None:
    until_passing("ij,jr->ir")
    coords, values, shape = entries("ij")
    values = values.float()
    x, (b,), expected = (
        stc.SparseTensor(coords, values, shape),
        dense("ij,jr->ir", torch.float32),
        whole(coords, values, shape),
    )
    coords.zero_()
    values.zero_()
    torch.testing.assert_close(x @ b, expected.float() @ b)
    torch.testing.assert_close(x.to_dense(), expected.float())
    torch.testing.assert_close(x @ b, expected.float() @ b)


def test_gradients_of_a_tensor_that_is_read_where_none_are_made() -> None:
    until_passing("ij,jr->ir", torch.float64)
    coords, values, shape = entries("ij")
    leaf = values.clone().requires_grad_()
    x = stc.SparseTensor(coords, leaf, shape)
    assert x.requires_grad
    with torch.no_grad():
        still = stc.SparseTensor(coords, leaf, shape)
        assert x.nnz == still.nnz
    assert not still.requires_grad
    x.to_dense().square().sum().backward()
    again = values.clone().requires_grad_()
    whole(coords, again, shape).square().sum().backward()
    torch.testing.assert_close(leaf.grad, again.grad)


def test_errors_are_those_of_kernels() -> None:
    until_passing("ij,jr->ir")
    x = stc.SparseTensor(*entries("ij")).to(torch.float32)
    with pytest.raises(stc.CoordinateError, match="out of range in mode 1"):
        stc.SparseTensor(entries("ij")[0], torch.ones(40), (7, 2))
    with pytest.raises(stc.ShapeError):
        stc.einsum("ij,jr->ir", x, torch.ones(6, 4))
    with pytest.raises(stc.DtypeError):
        stc.einsum("ij,jr->ir", x, torch.ones(5, 4).double())
    with pytest.raises(stc.EquationError):
        stc.einsum("ij,jr->iq", x, torch.ones(5, 4))
    with pytest.raises(AttributeError, match="no attribute 'maximum_of'"):
        _ = x.maximum_of  # type: ignore[attr-defined]


def test_in_a_graph_that_is_traced() -> None:
    until_passing("ij,jr->ir")
    coords, values, shape = entries("ij")
    (b,) = dense("ij,jr->ir", torch.float32)
    x = stc.SparseTensor(coords, values.float(), shape)
    assert x._unsorted is not None
    traced = torch.compile(lambda x, b: stc.einsum("ij,jr->ir", x, b).relu(), backend="eager")
    torch.testing.assert_close(traced(x, b), (whole(coords, values, shape).float() @ b).relu())


def test_autocast_and_transforms() -> None:
    until_passing("ij,jr->ir")
    coords, values, shape = entries("ij")
    (b,) = dense("ij,jr->ir", torch.float32)
    expected = whole(coords, values, shape).float() @ b
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = stc.SparseTensor(coords, values.float(), shape) @ b.bfloat16()
    torch.testing.assert_close(found, whole(coords, values, shape).float() @ b.bfloat16().float())
    learned = values.float().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (found,) = torch.autograd.grad((stc.SparseTensor(coords, learned, shape) @ b).sum(), [learned])
    torch.testing.assert_close(found, b.sum(1)[coords[1]])
    x = stc.SparseTensor(coords, values.float(), shape)
    batched = torch.func.vmap(lambda c: stc.einsum("ij,jr->ir", x, c))(torch.stack([b, 2 * b]))
    torch.testing.assert_close(batched, torch.stack([expected, 2 * expected]))


def test_no_entries() -> None:
    until_passing("ij,jr->ir")
    x = stc.SparseTensor(torch.zeros(2, 0, dtype=torch.int64), torch.zeros(0), (7, 5))
    assert torch.equal(x @ torch.ones(5, 4), torch.zeros(7, 4))


def test_threads_that_ask_at_once() -> None:
    until_passing("ij,jr->ir", torch.float64)
    coords, values, shape = entries("ij")
    expected = whole(coords, values, shape)
    for _ in range(20):
        x = stc.SparseTensor(coords.clone(), values, shape)
        with ThreadPoolExecutor(4) as pool:
            asked = [stc.SparseTensor.to_dense] * 3 + [lambda y: y.values.sum()]
            found = [future.result() for future in [pool.submit(ask, x) for ask in asked]]
        for dense_form in found[:3]:
            torch.testing.assert_close(dense_form, expected)
        torch.testing.assert_close(found[3], values.sum())


def test_a_default_device(compilations: list[str]) -> None:
    until_passing("ijk,jr,kr->ir", torch.float64)
    compilations.clear()
    coords, values, shape = entries("ijk")
    x, factors = stc.SparseTensor(coords, values, shape), dense("ijk,jr,kr->ir", torch.float64)
    with torch.device("meta"):
        found = stc.einsum("ijk,jr,kr->ir", x, *factors)
    torch.testing.assert_close(found, torch.einsum("ijk,jr,kr->ir", whole(coords, values, shape), *factors))
    assert not compilations


def test_forward_mode_and_second_gradients() -> None:
    until_passing("ij,jr->ir", torch.float64)
    coords, values, shape = entries("ij")
    (b,) = dense("ij,jr->ir", torch.float64)
    x, expected = stc.SparseTensor(coords, values, shape), whole(coords, values, shape)
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(x @ forward_ad.make_dual(b, 2 * b))
        torch.testing.assert_close(found.tangent, 2 * expected @ b)
    for learned in (values, values.clone().requires_grad_()):
        x = stc.SparseTensor(coords.clone(), learned, shape)
        assert torch.autograd.gradgradcheck(lambda c: (x @ c).square(), [b.clone().requires_grad_()])  # noqa: B023


def product_of_pair(equation: str, given: Sequence[Any], form: str) -> torch.Tensor | stc.SparseTensor | None:
    operands = [stc.SparseTensor(*one) for one in given]
    return passing._of_pair(equation, operands, form, list(map(passing._entries, operands)))


@pytest.mark.parametrize("form", ["auto", "dense"])
@pytest.mark.parametrize("equation", ["ij,jk->ki", "ijk,kj->i", "ij,kr->irkj", "ij,ij->ij", "ijk,jks->sji", "ij,jk->"])
def test_pairs_of_entries(equation: str, form: str) -> None:
    """What GPUs take for two sparse operands: the places that pairs reach, ascending, sums and gradients."""
    terms = equation.split("->")[0].split(",")
    (x, xv, xs), (y, yv, ys) = (entries(term, seed, 9) for seed, term in enumerate(terms))
    values = [xv.requires_grad_(), yv.requires_grad_()]
    found = product_of_pair(equation, [(x, values[0], xs), (y, values[1], ys)], form)
    full = [torch.zeros(s, dtype=v.dtype).index_put(tuple(c), v, True) for c, v, s in ((x, xv, xs), (y, yv, ys))]
    expected = torch.einsum(equation, *full)
    if isinstance(found, stc.SparseTensor):
        reached = torch.einsum(equation, *((f != 0).double() for f in full))
        assert torch.equal(found.coords, reached.nonzero().T)
        found = found.to_dense()
    assert found is not None
    torch.testing.assert_close(found, expected)
    upstream = torch.randn(expected.shape, dtype=torch.float64)
    ours, theirs = (torch.autograd.grad(result, values, upstream) for result in (found, expected))
    torch.testing.assert_close(ours, theirs)


def test_pairs_that_kernels_are_for() -> None:
    """Repeated letters, and more shared coordinates than are counted."""
    (x, xv, xs), (y, yv, ys) = entries("jj", 0, 9), entries("jk", 1, 9)
    assert product_of_pair("jj,jk->k", [(x, xv, xs), (y, yv, ys)], "auto") is None
    assert product_of_pair("ij,jk->ik", [(x, xv, (7, 1 << 40)), (y, yv, (1 << 40, 6))], "auto") is None
