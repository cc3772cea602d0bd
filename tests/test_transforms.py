"""What torch does to functions from outside: compiled, their graph breaks once; transformed, they say what to do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch
from cases import random_sparse, random_values
from torch.autograd import forward_ad

import sparsetc as stc

SPMM = "ij,jr->ir"


@pytest.fixture
def x() -> stc.SparseTensor:
    return random_sparse((6, 8), "random", torch.float64)


@pytest.fixture
def b() -> torch.Tensor:
    return random_values((8, 3), torch.float64, 1)


# --- torch.compile ----------------------------------------------------------------------------------------------------


@pytest.fixture
def breaks() -> Iterator[Callable[[], int]]:
    """How often a graph was broken since the test began."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield lambda: sum(counters["graph_break"].values())
    torch._dynamo.reset()


def callers(x: stc.SparseTensor, b: torch.Tensor) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    kernel, pair = stc.compile(SPMM, x, b), stc.compile("ij,kj->ik", x, x, output="dense")
    return {
        "einsum": lambda b: stc.einsum(SPMM, x, b.sin()).cos(),
        "operation": lambda b: stc.spmm(x, b.sin()).cos(),
        "kernel": lambda b: kernel(b.sin()).cos(),
        "contraction": lambda b: b.sum() * pair().cos(),
    }


@pytest.mark.parametrize("name", ["einsum", "operation", "kernel", "contraction"])
def test_a_compiled_function_breaks_its_graph_once(
    name: str, x: stc.SparseTensor, b: torch.Tensor, breaks: Callable[[], int]
) -> None:
    f = callers(x, b)[name]
    expected = f(b)
    compiled = torch.compile(f, backend="eager")
    for _ in range(3):
        torch.testing.assert_close(compiled(b), expected)
    assert breaks() == 1


def test_compiling_and_packing_stay_outside(
    x: stc.SparseTensor, b: torch.Tensor, breaks: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = torch.compile(lambda x, b: stc.einsum("ij,jr->jir", x, b).values * 2, backend="eager")
    seen: list[bool] = []
    build = stc.api._build
    monkeypatch.setattr(stc.api, "_build", lambda *a, **how: seen.append(_traced()) or build(*a, **how))
    start = time.perf_counter()
    compiled(x, b)
    elapsed = time.perf_counter() - start
    assert seen == [False]
    assert breaks() <= 2  # at the call, and at what is asked of its result
    assert elapsed < 20


def _traced() -> bool:
    """Whether Dynamo would look into a function that is called now."""
    from torch._dynamo.eval_frame import set_eval_frame

    prior = set_eval_frame(None)
    set_eval_frame(prior)
    return bool(prior)


def test_a_full_graph_says_why_not(x: stc.SparseTensor, b: torch.Tensor, breaks: Callable[[], int]) -> None:
    whole = torch.compile(lambda b: stc.einsum(SPMM, x, b) * 2, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="sparsetc plans by what a sparse operand holds"):
        whole(b)


def test_gradients_of_a_compiled_function(x: stc.SparseTensor, b: torch.Tensor, breaks: Callable[[], int]) -> None:
    b.requires_grad_()

    def f(b: torch.Tensor) -> torch.Tensor:
        return stc.einsum(SPMM, x, b.sin()).square().sum()

    (expected,) = torch.autograd.grad(f(b), b)
    (found,) = torch.autograd.grad(torch.compile(f, backend="eager")(b), b)
    torch.testing.assert_close(found, expected)


# --- torch.func, and forward mode -------------------------------------------------------------------------------------


def spmm(x: stc.SparseTensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda b: stc.einsum(SPMM, x, b)


def calls(x: stc.SparseTensor, b: torch.Tensor) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """An einsum and a kernel, of dense operands and of values; and a contraction's kernel, of values."""
    kernel, pair = stc.compile(SPMM, x, b), stc.compile("ij,kj->ik", x, x)
    return [
        spmm(x),
        kernel,
        lambda b: kernel.with_values(b.sum() * x.values)(torch.ones(8, 3, dtype=torch.float64)),
        lambda b: stc.einsum("ij->i", x.with_values(b.sum() * x.values)),
        lambda b: pair.with_values(b.sum() * x.values, None)().values,
    ]


def test_transforms_say_what_to_take_instead(x: stc.SparseTensor, b: torch.Tensor) -> None:
    for f in calls(x, b):
        with pytest.raises(stc.TransformError, match=r"torch\.autograd\.grad"):
            torch.func.grad(lambda b, f=f: f(b).sum())(b)
        with pytest.raises(stc.TransformError, match="letter of its own"):
            torch.func.vmap(f)(b.expand(2, 8, 3))
        with pytest.raises(stc.TransformError):
            torch.func.jvp(f, (b,), (b,))
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
            f(forward_ad.make_dual(b, b))


def test_gradients_in_batches_say_so(x: stc.SparseTensor, b: torch.Tensor) -> None:
    pair = stc.compile("ij,kj->ik", x, x, output="dense")
    for f, at in ((spmm(x), b), (lambda values: pair(values=[values, None]), x.values)):
        with pytest.raises(stc.TransformError, match="without vectorize"):
            torch.autograd.functional.jacobian(f, at, vectorize=True)


def test_transforms_of_other_things_do_not_matter(x: stc.SparseTensor, b: torch.Tensor) -> None:
    expected = stc.einsum(SPMM, x, b)
    found = torch.func.vmap(lambda s: s * stc.einsum(SPMM, x, b))(torch.ones(2, dtype=torch.float64))
    torch.testing.assert_close(found, expected.expand(2, 6, 3))
    with forward_ad.dual_level():
        torch.testing.assert_close(stc.einsum(SPMM, x, b), expected)


def test_what_is_recommended_works(x: stc.SparseTensor, b: torch.Tensor) -> None:
    batch = random_values((2, 8, 3), torch.float64, 2)
    found = stc.einsum("ij,bjr->bir", x, batch)
    torch.testing.assert_close(found, torch.einsum("ij,bjr->bir", x.to_dense(), batch))
    jacobian = torch.autograd.functional.jacobian(spmm(x), b)
    torch.testing.assert_close(jacobian, torch.einsum("ij,rs->irjs", x.to_dense(), torch.eye(3, dtype=torch.float64)))
    _, product = torch.autograd.functional.jvp(spmm(x), b, b)
    torch.testing.assert_close(product, x.to_dense() @ b)
