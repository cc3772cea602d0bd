"""Sparse operands with dense modes: einsums of their entries, whose values are a table; nothing is expanded."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases import random_sparse, random_values

import sparsetc as stc
from sparsetc.contraction import contraction
from sparsetc.tensor import coords

SIZES = {"i": 5, "j": 6, "k": 7, "h": 3, "g": 2, "d": 4, "a": 2, "b": 3}
EQUATIONS = {  # by the number of dense modes of the first operand
    "ijh,jhd->ihd": 1,
    "ijh,hd->ijd": 1,
    "ijh->i": 1,
    "ijh->h": 1,
    "ijh->": 1,
    "ijh->ij": 1,
    "ijh->ijh": 1,
    "ijh->jih": 1,
    "ijh,id,jd->ijh": 1,
    "ijh,jd,kd->ikh": 1,
    "ih,hd->id": 1,
    "ih,hd->ihd": 1,
    "iih,hd->ihd": 1,
    "iih->ih": 1,
    "iji,jd->id": 1,
    "ijhh,hd->ihd": 2,
    "ijab,jbd->iad": 2,
    "ijkab,kb,ja->ij": 2,
}


@pytest.fixture
def unexpanded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail where an operand is expanded."""

    def expanded(*_: Any) -> None:
        raise AssertionError("an operand was expanded")

    with monkeypatch.context() as patch:
        patch.setattr(coords, "with_dense_modes", expanded)
        yield


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def values_of(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=dtype, generator=generator(seed))
    return torch.randint(-3, 4, shape, dtype=dtype, generator=generator(seed))


def operands_of(
    equation: str, dtype: torch.dtype = torch.float64, nnz: int = 14, coalesce: bool = True
) -> tuple[stc.SparseTensor, list[torch.Tensor]]:
    """A semi-sparse operand with duplicates, and the dense ones."""
    first, *others = equation.split("->")[0].split(",")
    shape = tuple(SIZES[c] for c in first)
    split = len(shape) - EQUATIONS[equation]
    made = torch.stack([torch.randint(0, n, (nnz,), generator=generator(m)) for m, n in enumerate(shape[:split])])
    x = stc.SparseTensor(made, values_of((nnz, *shape[split:]), dtype, 1), shape, coalesce=coalesce)
    return x, [values_of(tuple(SIZES[c] for c in term), dtype, 2 + n) for n, term in enumerate(others)]


def dense(found: Any) -> torch.Tensor:
    return found.to_dense() if isinstance(found, stc.SparseTensor) else found  # type: ignore[no-any-return]


def check(found: Any, equation: str, x: stc.SparseTensor, others: list[torch.Tensor], tolerance: float = 0) -> None:
    wide = torch.complex128 if x.dtype.is_complex else torch.float64
    expected = torch.einsum(equation, x.to_dense().to(wide), *(o.to(wide) for o in others))
    limit = {"rtol": tolerance, "atol": 10 * tolerance} if tolerance else {}
    torch.testing.assert_close(dense(found).to(wide), expected, **limit)


@pytest.mark.usefixtures("unexpanded")
@pytest.mark.parametrize("coalesce", [True, False])
@pytest.mark.parametrize("nnz", [14, 1, 0])
@pytest.mark.parametrize("equation", EQUATIONS)
def test_results(equation: str, nnz: int, coalesce: bool) -> None:
    x, others = operands_of(equation, nnz=nnz, coalesce=coalesce)
    check(stc.einsum(equation, x, *others), equation, x, others)


@pytest.mark.parametrize("equation", ["ijh->hij", "ijh,jd->dih"])
def test_letters_of_rows_in_front_of_coordinates(equation: str) -> None:
    _, *others = equation.split("->")[0].split(",")
    x, _ = operands_of("ijh->ij")
    tables = [values_of(tuple(SIZES[c] for c in term), torch.float64, 2) for term in others]
    check(stc.einsum(equation, x, *tables), equation, x, tables)


@pytest.mark.usefixtures("unexpanded")
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.int8, torch.int64]
)
@pytest.mark.parametrize("equation", ["ijh,jhd->ihd", "ijh->ijh", "ijh->i", "ijab,jbd->iad"])
def test_dtypes(equation: str, dtype: torch.dtype) -> None:
    x, others = operands_of(equation, dtype)
    found = stc.einsum(equation, x, *others)
    summed = not (dtype.is_floating_point or dtype.is_complex) and equation == "ijh->i"
    assert found.dtype == (torch.int64 if summed else dtype)
    rounded = {torch.float16: 4e-3, torch.bfloat16: 3e-2}.get(dtype, 1e-5)
    check(found, equation, x, others, rounded)


def test_a_sum_of_integers_is_one_of_64_bits() -> None:
    x = stc.SparseTensor([[0, 1]], torch.full((2, 3), 100, dtype=torch.int8), (4, 3))
    assert stc.einsum("ih->i", x).tolist() == [300, 300, 0, 0]
    assert stc.einsum("ih->", x).item() == 600


@pytest.mark.usefixtures("unexpanded")
@pytest.mark.parametrize("form", ["auto", "sparse", "dense"])
@pytest.mark.parametrize("equation", ["ijh,jhd->ihd", "ijh->ijh", "ijh,hd->ijd", "ijh->i"])
def test_the_form_of_a_result(equation: str, form: str) -> None:
    x, others = operands_of(equation)
    found = stc.einsum(equation, x, *others, output=form)
    check(found, equation, x, others)
    letters = equation.split("->")[1]
    kept = sum(c in equation.split(",")[0].split("->")[0] for c in letters)
    assert isinstance(found, stc.SparseTensor) == (form == "sparse" or (form == "auto" and kept > 1))
    if isinstance(found, stc.SparseTensor):
        assert found.sparse_order == sum(c in "ij" for c in letters)
        if letters.startswith("ij"):
            assert found.pattern is x.pattern


def test_a_result_on_dense_modes_alone_is_sparse_where_it_is_to_be() -> None:
    x, _ = operands_of("ijh->h")
    found = stc.einsum("ijh->h", x, output="sparse")
    assert isinstance(found, stc.SparseTensor)
    check(found, "ijh->h", x, [])


@pytest.mark.usefixtures("unexpanded")
@pytest.mark.parametrize("layout", ["permuted", "strided", "broadcast", "conjugate"])
def test_layouts_of_values(layout: str) -> None:
    equation = "ijab,jbd->iad"
    x, others = operands_of(equation, torch.complex128)
    v = x.values
    v = {
        "permuted": lambda: v.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        "strided": lambda: v.repeat_interleave(2, 0)[::2],
        "broadcast": lambda: v[:, :1].expand(v.shape),
        "conjugate": lambda: v.conj(),
    }[layout]()
    y = x.with_values(v)
    kernel = stc.compile(equation, x, *others)
    for found in (stc.einsum(equation, y, *others), kernel(*others, values=v), kernel.with_values(v)(*others)):
        check(found, equation, y, others)


@pytest.mark.usefixtures("unexpanded")
@pytest.mark.parametrize("equation", EQUATIONS)
def test_gradients(equation: str) -> None:
    x, others = operands_of(equation, coalesce=equation != "ijh->jih")
    leaves = [t.requires_grad_() for t in (x.values.clone(), *others)]
    kernel = stc.compile(equation, x, *others)
    y = x.with_values(leaves[0])
    expected = torch.einsum(equation, y.to_dense(), *others)
    weights = values_of(tuple(expected.shape), torch.float64, 9)
    wanted = torch.autograd.grad((expected * weights).sum(), leaves, allow_unused=True)
    for found in (stc.einsum(equation, y, *others), kernel(*others, values=leaves[0])):
        got = torch.autograd.grad((dense(found) * weights).sum(), leaves, allow_unused=True)
        for own, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(own, other)


@pytest.mark.usefixtures("unexpanded")
@pytest.mark.parametrize("equation", ["ijh,jhd->ihd", "ijh,jd,kd->ikh", "ijh->jih"])
def test_gradients_of_gradients(equation: str) -> None:
    x, others = operands_of(equation, nnz=5)
    leaves = [t.requires_grad_() for t in (x.values.clone(), *others)]

    def run(values: torch.Tensor, *tables: torch.Tensor) -> torch.Tensor:
        return dense(stc.einsum(equation, x.with_values(values), *tables)).square()

    assert torch.autograd.gradgradcheck(run, tuple(leaves), check_fwd_over_rev=False)


def functions() -> dict[str, Callable[..., Any]]:
    f = torch.func
    return {
        "grad": lambda g: f.grad(lambda *t: g(*t).square().sum(), argnums=(0, 1)),
        "jvp": lambda g: lambda v, b: f.jvp(g, (v, b), (v.cos(), b.sin())),
        "vmap of values": lambda g: lambda v, b: f.vmap(g, (0, None))(torch.stack([v, 2 * v]), b),
        "vmap of both": lambda g: lambda v, b: f.vmap(g, (0, 1))(torch.stack([v, 2 * v]), torch.stack([b, -b], 1)),
        "jacrev": lambda g: f.jacrev(g, (0, 1)),
    }


@pytest.mark.usefixtures("unexpanded")
@pytest.mark.parametrize("transform", functions())
def test_transforms(transform: str) -> None:
    equation = "ijh,jhd->ihd"
    x, (b,) = operands_of(equation)

    def own(values: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        found = stc.einsum(equation, x.with_values(values), b, output="dense")
        assert isinstance(found, torch.Tensor)
        return found

    def reference(values: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        whole = torch.zeros(x.shape, dtype=values.dtype).index_put(tuple(x.coords), values)
        return torch.einsum(equation, whole, b)

    made = functions()[transform]
    torch.testing.assert_close(made(own)(x.values, b), made(reference)(x.values, b))


@pytest.mark.usefixtures("unexpanded")
def test_compiled_functions_and_kernels_in_them() -> None:
    equation = "ijh,jhd->ihd"
    x, (b,) = operands_of(equation)
    kernel = stc.compile(equation, x, b)
    for own in (
        lambda v, b: stc.einsum(equation, x.with_values(v), b).values,
        lambda v, b: kernel(b, values=v).values,
        lambda v, b: stc.einsum("ijh,id->ijd", x.with_values(v), b[:5, 0]).values,
    ):
        graph = torch.compile(own, backend="aot_eager", fullgraph=True)
        leaves = [t.clone().requires_grad_() for t in (x.values * 2, b)]
        found, expected = graph(*leaves), own(*leaves)
        torch.testing.assert_close(found, expected)
        got = torch.autograd.grad(found.square().sum(), leaves)
        torch.testing.assert_close(got, torch.autograd.grad(expected.square().sum(), leaves))


@pytest.mark.usefixtures("unexpanded")
def test_kernels_are_explained_copied_and_made_again() -> None:
    equation = "ijh,jhd->ihd"
    x, others = operands_of(equation)
    kernel = stc.compile(equation, x, *others)
    assert equation in str(kernel.explain())
    assert "def part_0" in kernel.source
    assert kernel.plan.parts[0].nnz == x.nnz
    again = stc.compile(equation, x, *others, plan=kernel.plan)
    assert again.source == kernel.source
    for made in (again, copy.deepcopy(kernel), pickle.loads(pickle.dumps(kernel))):
        check(made(*others), equation, x, others)
    with pytest.raises(stc.ShapeError, match="takes 1 dense operands, found 0"):
        kernel()
    with pytest.raises(stc.ShapeError, match=r"values must have shape \(\d+, 3\)"):
        kernel(*others, values=torch.zeros(x.nnz, 4, dtype=torch.float64))
    assert "f64" in kernel.ptx("sm_90")


@pytest.mark.usefixtures("unexpanded")
def test_values_changed_in_place_are_read_again() -> None:
    equation = "ijh,jhd->ihd"
    x, others = operands_of(equation)
    kernel = stc.compile(equation, x, *others)
    for _ in range(2):
        x.values.mul_(2)
        check(kernel(*others), equation, x, others)
        check(stc.einsum(equation, x, *others), equation, x, others)


@pytest.mark.parametrize("plan", ["coo", "fiber", "hls"])
def test_named_plans(plan: str) -> None:
    equation = "ijh,jhd->ihd"
    x, others = operands_of(equation)
    check(stc.einsum(equation, x, *others, plan=plan), equation, x, others)


# -- contractions within an entry -------------------------------------------------------------------------------------


def test_an_axis_summed_within_an_entry_is_a_matrix_product() -> None:
    equation = "ijab,jbd->iad"
    x, others = operands_of(equation)
    source = stc.compile(equation, x, *others, backend="torch").source
    assert 'torch.einsum("' in source
    sampled = stc.SparseTensor(x.coords, values_of((x.nnz,), torch.float64, 1), x.shape[:2])
    u, v = (values_of((n, 3), torch.float64, n) for n in sampled.shape)
    assert "torch.einsum" not in stc.compile("ij,ir,jr->ij", sampled, u, v).source  # nothing larger would be formed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
def test_rows_weighted_along_a_dense_mode_are_added_up_unmade(dtype: torch.dtype) -> None:
    equation = "ijh,jhd->ihd"
    x, others = operands_of(equation, dtype, 60)
    kernel = stc.compile(equation, x, *others, backend="torch")
    assert "bags(" in kernel.source
    assert "b_jhd = " not in kernel.source
    check(kernel(*others), equation, x, others, 1e-5)


def test_an_axis_summed_after_all_entries() -> None:
    x, _ = operands_of("ijh->i")
    tables = [values_of(shape, torch.float64, n) for n, shape in enumerate(((3, 5), (4,), (2, 3)))]
    check(stc.einsum("ijh,hi,r,sh->sr", x, *tables), "ijh,hi,r,sh->sr", x, tables)


@pytest.mark.usefixtures("unexpanded")
def test_nothing_over_all_axes_is_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    n, side = 2000, 16
    made = torch.stack([torch.randint(0, 300, (n,), generator=generator(m)) for m in range(2)])
    x = stc.SparseTensor(made, values_of((n, side, side), torch.float32, 1), (300, 300, side, side))
    b = values_of((300, side, side), torch.float32, 2)
    kernel = stc.compile("IJij,Jjr->Iir", x, b, output="dense")
    expected = torch.einsum("nij,njr->nir", x.values, b[x.coords[1]])
    whole = torch.zeros(300, side, side).index_add(0, x.coords[0], expected)
    most = 0

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal most
            found = f(*args, **(kwargs or {}))
            most = max([most, *(t.numel() for t in (found,) if isinstance(t, torch.Tensor))])
            return found

    found = kernel(b)
    with Largest():
        kernel(b)
    torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-4)
    assert most <= n * side * side  # as many as there are values, of n * side ** 3 products


# -- two sparse operands ----------------------------------------------------------------------------------------------

PAIRS = {  # dense modes of both
    "ijh,jkh->ikh": (1, 1),
    "ijab,jkbd->ikad": (2, 2),
    "ijh,jk->ikh": (1, 0),
    "ij,jkh->ikh": (0, 1),
    "ijh,ijh->": (1, 1),
    "ijh,ijh->ijh": (1, 1),
    "ijh,hk->ijk": (1, 0),
    "ijh,hjd->id": (1, 1),
    "iih,ij->jh": (1, 0),
    "ijh,ka->ikha": (1, 1),
    "ijh,jkd,ka->iahd": (1, 1),
    "ijh,jhd->d": (1, 1),
    "ijh,jk->kih": (1, 0),
}


def pair_of(equation: str, nnz: int, coalesce: bool) -> tuple[list[stc.SparseTensor], list[torch.Tensor]]:
    first, second, *others = equation.split("->")[0].split(",")
    made = []
    for n, (term, dense_modes) in enumerate(zip((first, second), PAIRS[equation], strict=True)):
        shape = tuple(SIZES[c] for c in term)
        split = len(shape) - dense_modes
        coords = [torch.randint(0, s, (nnz,), generator=generator(9 * n + m)) for m, s in enumerate(shape[:split])]
        values = values_of((nnz, *shape[split:]), torch.float64, n)
        made.append(stc.SparseTensor(torch.stack(coords), values, shape, coalesce=coalesce))
    return made, [values_of(tuple(SIZES[c] for c in term), torch.float64, 5) for term in others]


@pytest.mark.usefixtures("unexpanded")
@pytest.mark.parametrize("coalesce", [True, False])
@pytest.mark.parametrize("nnz", [12, 0])
@pytest.mark.parametrize("equation", PAIRS)
def test_two_sparse_operands(equation: str, nnz: int, coalesce: bool) -> None:
    sparse, others = pair_of(equation, nnz, coalesce)
    leaves = [t.requires_grad_() for t in (*(x.values.clone() for x in sparse), *others)]
    own = [x.with_values(v) for x, v in zip(sparse, leaves, strict=False)]
    expected = torch.einsum(equation, *(x.to_dense() for x in own), *others)
    weights = values_of(tuple(expected.shape), torch.float64, 9)
    wanted = torch.autograd.grad((expected * weights).sum(), leaves)
    kernel = stc.compile(equation, *sparse, *others)
    for found in (stc.einsum(equation, *own, *others), kernel(*others, values=leaves[:2])):
        torch.testing.assert_close(dense(found), expected)
        if isinstance(found, stc.SparseTensor):
            assert found.is_coalesced
        got = torch.autograd.grad((dense(found) * weights).sum(), leaves)
        torch.testing.assert_close(got, wanted)


@pytest.mark.usefixtures("unexpanded")
def test_two_sparse_operands_in_graphs_transforms_and_files() -> None:
    equation = "ijab,jkbd->ikad"
    (x, y), _ = pair_of(equation, 12, True)

    def run(v: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return dense(stc.einsum(equation, x.with_values(v), y.with_values(w)).values)  # type: ignore[union-attr]

    leaves = [t.clone().requires_grad_() for t in (x.values * 2, y.values)]
    found, expected = torch.compile(run, backend="aot_eager", fullgraph=True)(*leaves), run(*leaves)
    torch.testing.assert_close(found, expected)
    got = torch.autograd.grad(found.square().sum(), leaves)
    torch.testing.assert_close(got, torch.autograd.grad(expected.square().sum(), leaves))
    v, w = (t.detach() for t in leaves)
    batch = torch.func.vmap(run, (0, None))(torch.stack([v, 2 * v]), w)
    torch.testing.assert_close(batch, torch.stack([expected, 2 * expected]).detach())
    kernel = stc.compile(equation, x, y)
    again = pickle.loads(pickle.dumps(kernel))
    assert equation in str(again.explain())
    torch.testing.assert_close(dense(again()), dense(kernel()))
    assert kernel.nnz == kernel().nnz
    assert stc.compile(equation, x, y, plan=kernel.plan).source == kernel.source


def test_a_plan_of_two_operands_and_pairs_beyond_memory_expand() -> None:
    equation = "ijh,jkh->ikh"
    (x, y), _ = pair_of(equation, 12, True)
    expected = torch.einsum(equation, x.to_dense(), y.to_dense())
    assert stc.compile(equation, x, y).plan.name not in ("scalar", "dense")
    torch.testing.assert_close(dense(stc.einsum(equation, x, y, plan="scalar")), expected)
    small = stc.compile(equation, x, y, memory_limit=8000)
    torch.testing.assert_close(dense(small()), expected)


def test_three_sparse_operands_with_dense_modes() -> None:
    (x, y), _ = pair_of("ijh,jkh->ikh", 12, True)
    z = stc.SparseTensor([[0, 3], [1, 2]], torch.ones(2, dtype=torch.float64), (7, 4))
    expected = torch.einsum("ijh,jkh,kd->ihd", x.to_dense(), y.to_dense(), z.to_dense())
    torch.testing.assert_close(dense(stc.einsum("ijh,jkh,kd->ihd", x, y, z)), expected)


@pytest.mark.parametrize("equation", ["ijh,jk,kl->il", "ij,jk,klh->il", "ijh,jkh,kl->ilh", "ijh,jk,klg->ilgh"])
def test_a_plan_of_three_operands_is_taken_again(equation: str) -> None:
    sizes, operands = dict(zip("ijklgh", (7, 8, 6, 5, 2, 3), strict=True)), []
    for term in equation.split("->")[0].split(","):
        pattern = random_sparse(tuple(sizes[c] for c in term[:2]), "random", torch.float64, seed=len(operands))
        values = torch.rand(pattern.nnz, *(sizes[c] for c in term[2:]), dtype=torch.float64)
        operands.append(pattern.with_values(values))
    kernel = stc.compile(equation, *operands)
    again = stc.compile(equation, *operands, plan=kernel.plan)
    torch.testing.assert_close(dense(again()), dense(kernel()))
    assert str(again.plan.steps) == str(kernel.plan.steps)


def test_values_with_dense_modes_on_a_pattern_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of several heads, new at each step: planned once, gradients too."""
    x = random_sparse((5, 6), "random", torch.float64)
    q = random_values((6, 3, 2), torch.float64, 1)
    made = []
    original = contraction.parsed
    monkeypatch.setattr(contraction, "parsed", lambda *a, **k: made.append(a[0]) or original(*a, **k))
    for step in range(3):
        heads = random_values((x.nnz, 3), torch.float64, step).requires_grad_()
        y = x.with_values(heads)
        assert y.pattern is x.pattern
        assert y.shape == (5, 6, 3)
        found = stc.einsum("ijh,jhd->ihd", y, q, output="dense")
        (gradient,) = torch.autograd.grad(found.square().sum(), heads)
        dense = torch.zeros(5, 6, 3, dtype=torch.float64).index_put(tuple(x.coords), heads)
        expected = torch.einsum("ijh,jhd->ihd", dense, q)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(gradient, torch.autograd.grad(expected.square().sum(), heads)[0])
        if not step:
            count = len(made)
    assert len(made) == count
    assert y.with_values(x.values).shape == (5, 6)
    with pytest.raises(stc.ShapeError, match=rf"values must have shape \({x.nnz},\), dense modes may follow"):
        x.with_values(torch.ones(3, x.nnz))
    blocks = stc.SparseTensor.from_blocks([[0], [1]], torch.ones(1, 2, 3), (4, 6))
    assert blocks.with_values(torch.ones(1, 2, 3, 7)).shape == (4, 6, 7)
    with pytest.raises(stc.ShapeError, match=r"values must have shape \(1, 2, 3\)"):
        blocks.with_values(torch.ones(1, 3, 2))
