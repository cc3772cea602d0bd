"""Level 1: its queries, its interpreter and its rewrites, each against dense torch."""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import DENSE, run, sampled

from sparsetc.errors import EquationError
from sparsetc.ir.equation.einsum import GROWTH, UPSTREAM, Bound, Einsum, dense_products, gradient
from sparsetc.ir.equation.parse import parse, parse_arguments


def einsum(text: str, sparse: tuple[int, ...] = (0,)) -> Einsum:
    left, right = text.split("->")
    return Einsum(tuple(tuple(t) for t in left.split(",")), tuple(right), sparse, text)


def bound(text: str, sparse: tuple[int, ...] = (0,), **sizes: int) -> Bound:
    return Bound.of(einsum(text, sparse), sizes)


@dataclass(frozen=True)
class Coo:
    """The least that a sparse operand has to offer."""

    coords: torch.Tensor
    values: torch.Tensor
    shape: tuple[int, ...]

    @classmethod
    def of(cls, x: torch.Tensor, copies: int = 1) -> "Coo":
        return cls(x.nonzero().T.repeat(1, copies), x[x != 0].repeat(copies), tuple(x.shape))

    def to_dense(self) -> torch.Tensor:
        out = torch.zeros(self.shape, dtype=self.values.dtype)
        return out.index_put_(tuple(self.coords), self.values, accumulate=True) if self.shape else self.values.sum()


# --- random equations -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """An equation in torch's grammar with shapes, and which operands are sparse."""

    text: str
    shapes: list[tuple[int, ...]]
    sparse: list[bool]
    seed: int

    def tensors(self, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
        return draw_tensors(self.shapes, self.seed, dtype)

    @property
    def bound(self) -> Bound:
        return parse(self.text, self.shapes, self.sparse)


def draw_tensors(shapes: list[tuple[int, ...]], seed: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Small integers, a third of them zero: every sum is exact."""
    g = torch.Generator().manual_seed(seed)
    parts = [[torch.randint(-1, 2, s, generator=g) for s in shapes] for _ in range(2)]
    if dtype.is_complex:
        return [torch.complex(a.double(), b.double()).to(dtype) for a, b in zip(*parts, strict=True)]
    return [a.to(dtype) for a in parts[0]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    letters = "ijkRa"
    size = {i: draw(st.integers(1, 3)) for i in letters}
    ellipsis = draw(st.lists(st.integers(1, 3), max_size=2))
    count = draw(st.integers(1, 4))
    sparse = draw(st.lists(st.booleans(), min_size=count, max_size=count).filter(any))
    terms, shapes = [], []
    for p in range(count):
        term = draw(st.lists(st.sampled_from(letters), max_size=3))
        ones = set() if sparse[p] else draw(st.sets(st.sampled_from(letters), max_size=2))
        shape = [1 if i in ones else size[i] for i in term]
        if draw(st.integers(0, 3)) == 0:
            covered = ellipsis[len(ellipsis) - draw(st.integers(0, len(ellipsis))) :]
            if not sparse[p] and draw(st.booleans()):
                covered = [1] * len(covered)
            at = draw(st.integers(0, len(term)))
            term[at:at], shape[at:at] = ["..."], covered
        terms.append(draw(st.sampled_from(["", " "])).join(term))
        shapes.append(tuple(shape))
    text = ",".join(terms)
    if draw(st.booleans()):
        known = sorted({i for t in terms for i in t if i.isalpha()})
        output = draw(st.lists(st.sampled_from(known), unique=True, max_size=4)) if known else []
        if draw(st.booleans()):
            output.insert(draw(st.integers(0, len(output))), "...")
        text += draw(st.sampled_from(["->", " -> "])) + "".join(output)
    return Case(text, shapes, sparse, draw(st.integers(0, 1000)))


FEW = settings(max_examples=150, deadline=None)


def expanded(b: Bound, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x.expand(b.shape(p)) for p, x in enumerate(tensors)]


@FEW
@given(cases())
def test_parse_and_run_agree_with_torch(case: Case) -> None:
    tensors, b = case.tensors(), case.bound
    expected = torch.einsum(case.text, *tensors)
    assert b.output_shape == tuple(expected.shape)
    assert [len(b.shape(p)) for p in range(len(tensors))] == [x.ndim for x in tensors]
    torch.testing.assert_close(torch.einsum(str(b.einsum), *expanded(b, tensors)), expected, rtol=0, atol=0)
    torch.testing.assert_close(run(b.einsum, *tensors), expected, rtol=0, atol=0)
    again = parse(str(b.einsum), [b.shape(p) for p in range(len(tensors))], case.sparse)
    assert again == b


@FEW
@given(cases(), st.sampled_from([None, 1, 3]), st.sampled_from([torch.float64, torch.int64, torch.complex128]))
def test_the_sum_over_nonzeros_agrees_with_torch(case: Case, chunk: int | None, dtype: torch.dtype) -> None:
    tensors, e = case.tensors(dtype), case.bound.einsum
    doubled = [2 * x if p in e.sparse else x for p, x in enumerate(tensors)]
    expected = torch.einsum(case.text, *doubled)
    operands = [Coo.of(x, copies=2) if p in e.sparse else x for p, x in enumerate(tensors)]
    for limit in (0, DENSE):
        actual = run(e, *operands, dense=limit, chunk=chunk)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@FEW
@given(cases())
def test_sublists_agree_with_torch(case: Case) -> None:
    tensors = case.tensors()
    left, arrow, right = case.text.replace(" ", "").partition("->")

    def numbers(term: str) -> list[object]:
        labels = [..., *term.replace("...", "")] if term.startswith("...") else list(term.replace("...", ""))
        if "..." in term and not term.startswith("..."):
            labels.insert(term.index("..."), ...)
        return [i if i is ... else ord(i) - ord("A") if i.isupper() else ord(i) - ord("a") + 26 for i in labels]

    args: list[object] = []
    for x, term in zip(tensors, left.split(","), strict=True):
        args += [x, numbers(term)]
    if arrow:
        args.append(numbers(right))
    text, operands = parse_arguments(args)
    b = parse(text, case.shapes, case.sparse)
    torch.testing.assert_close(run(b.einsum, *operands), torch.einsum(*args), rtol=0, atol=0)


# --- queries ----------------------------------------------------------------------------------------------------------


def test_queries() -> None:
    e = einsum("ijk,jr,rs,kt->its")
    assert str(e) == "ijk,jr,rs,kt->its"
    assert e.indices == ("i", "j", "k", "r", "s", "t")
    assert e.dense == (1, 2, 3)
    assert e.sparse_indices == ("i", "j", "k")
    assert e.kept == ("i",)
    assert e.free == ("t", "s")
    assert e.contracted == ("j", "k", "r")
    assert e.dense_contracted == ("r",)
    assert e.holders("r") == (1, 2)


def test_a_bound_einsum_counts_elements() -> None:
    assert bound("ij,jr->ir", i=2, j=3, r=4).elements("ijr") == 24


def test_hashable_and_text_is_not_compared() -> None:
    e = einsum("ij,jr->ir")
    assert e.indices  # what is cached does not take part either
    assert len({e, replace(e, text="ij, jr"), replace(e, sparse=(1,))}) == 2


# --- the reference ----------------------------------------------------------------------------------------------------


def test_run_on_a_shape_that_cannot_be_dense() -> None:
    x = Coo(torch.tensor([[5, 2**39], [1, 2]]), torch.tensor([2.0, 3.0]), (2**40, 4))
    assert run(einsum("ij,jr->r"), x, torch.arange(8.0).reshape(4, 2)).tolist() == [16.0, 21.0]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_run_accepts_torch_layouts_and_hybrid_values() -> None:
    (x, b) = draw_tensors([(4, 6), (6, 3)], 0, torch.float32)
    expected = (x @ b).double()
    for y in (x, x.to_sparse(), x.to_sparse(1), x.to_sparse_csr(), x.to_sparse_csc(), x.to_sparse_bsr((2, 2))):
        for limit in (0, DENSE):
            actual = run(einsum("ij,jk->ik"), y, b, dense=limit)
            torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ((torch.float16, torch.bfloat16), torch.float64),
        ((torch.int32, torch.bool), torch.int64),
        ((torch.int64, torch.float32), torch.float64),
        ((torch.float32, torch.complex64), torch.complex128),
    ],
)
def test_the_reference_is_wide(dtypes: tuple[torch.dtype, torch.dtype], expected: torch.dtype) -> None:
    x, b = torch.ones(2, 3, dtype=dtypes[0]), torch.ones(3, 4, dtype=dtypes[1])
    assert run(einsum("ij,jr->ir"), Coo.of(x), b).dtype == expected


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_narrow_duplicates_are_summed_in_the_wide_dtype() -> None:
    values = torch.tensor([2048.0, 1.0, 1.0], dtype=torch.float16)  # 2048 + 1 is 2048 in float16
    x = Coo(torch.zeros(1, 3, dtype=torch.int64), values, (1,))
    y = torch.sparse_coo_tensor(x.coords, values, (1,))
    for operand in (x, y):
        for limit in (0, DENSE):
            assert run(einsum("i->i"), operand, dense=limit).item() == 2050


@pytest.mark.parametrize("text", ["ijk,ir,jr,kr->ijk", "ijk,jr->kijr", "ij->ji", "ij,jr,rs->sij"])
def test_sampled_agrees_with_the_dense_result(text: str) -> None:
    e = einsum(text)
    x, *rest = draw_tensors([tuple({"r": 4, "s": 2}.get(i, 3) for i in t) for t in e.inputs], 1, torch.float64)
    operand = Coo.of(x)
    dense = torch.einsum(f"{''.join(e.output)}->{''.join(e.inputs[0] + e.free)}", run(e, x, *rest))
    for chunk in (None, 2):
        actual = sampled(e, operand, *rest, chunk=chunk)
        torch.testing.assert_close(actual, dense[tuple(operand.coords)], rtol=0, atol=0)
    empty = sampled(e, Coo.of(torch.zeros_like(x)), *rest)
    assert empty.shape == (0, *dense.shape[x.ndim :])


# --- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "operand", "expected"),
    [
        ("ijk,jr,kr->ir", 0, "ijk,jr,kr,ir->ijk"),
        ("ijk,jr,kr->ir", 1, "ijk,ir,kr->jr"),
        ("ijk,jr,kr->ir", 2, "ijk,jr,ir->kr"),
        ("ij,j->", 1, "ij,->j"),
        ("ij->i", 0, "ij,i->ij"),
        ("iij,j->i", 0, "iij,j,i->ij"),
    ],
)
def test_gradient(text: str, operand: int, expected: str) -> None:
    found, sources = gradient(einsum(text), operand)
    assert str(found) == expected
    assert found.sparse == (0,)
    assert sources.count(UPSTREAM) == 1


def test_gradient_of_no_operand() -> None:
    with pytest.raises(EquationError, match=r"has no operand 3; expected 1\.\.2"):
        gradient(einsum("ij,jr->ir"), 2)


def reduced_by_hand(b: Bound, tensors: list[torch.Tensor]) -> tuple[Bound, list[torch.Tensor]]:
    """What dense work leaves of an einsum, and its operands."""
    left = list(tensors)
    for (first, *gone), equation, reduced in dense_products(b):
        b = reduced
        left[first] = torch.einsum(equation, *(left[p] for p in (first, *gone)))
        for p in reversed(gone):
            del left[p]
    return b, left


def gradient_by_hand(b: Bound, n: int, tensors: list[torch.Tensor], upstream: torch.Tensor) -> torch.Tensor:
    """The gradient for one operand, in dense torch: dense work first, then `gradient`, then back through the work."""
    wanted = tensors[n].detach().requires_grad_()
    left, reduced = reduced_by_hand(b, [*tensors[:n], wanted, *tensors[n + 1 :]])
    (at,) = [p for p, x in enumerate(reduced) if x.requires_grad]
    e, sources = gradient(left.einsum, at)
    ones = torch.ones_like(reduced[at])
    operands = [upstream if s == UPSTREAM else ones if s == at else reduced[s].detach().conj() for s in sources]
    found = torch.einsum(str(e), *operands)
    if e.output != left.einsum.inputs[at]:  # the sparse operand's diagonal
        target = "".join(left.einsum.inputs[at])
        torch.einsum(f"{target}->{''.join(e.output)}", whole := torch.zeros_like(ones)).copy_(found)
        found = whole
    return torch.autograd.grad(reduced[at], wanted, found)[0]


@FEW
@given(cases(), st.sampled_from([torch.float64, torch.complex128]))
def test_gradients_agree_with_autograd(case: Case, dtype: torch.dtype) -> None:
    b = case.bound
    shapes = [b.shape(p) for p in range(len(case.shapes))]
    tensors = [x.requires_grad_() for x in draw_tensors(shapes, case.seed, dtype)]
    out = torch.einsum(str(b.einsum), *tensors)
    (upstream,) = draw_tensors([tuple(out.shape)], case.seed + 1, dtype)
    expected = torch.autograd.grad(out, tensors, upstream)
    for p in range(len(tensors)):
        actual = gradient_by_hand(b, p, [x.detach() for x in tensors], upstream)
        torch.testing.assert_close(actual, expected[p], rtol=0, atol=0)


# --- dense subexpressions ---------------------------------------------------------------------------------------------

LARGE = {"i": 1000, "j": 900, "k": 800, "r": 16, "s": 12}


@pytest.mark.parametrize(
    ("text", "steps", "left"),
    [
        ("ijk,jr,kr->ir", [], "ijk,jr,kr->ir"),
        ("ijk,ir,jr,kr->ijk", [], "ijk,ir,jr,kr->ijk"),
        ("ij,ir,jr->ij", [], "ij,ir,jr->ij"),
        ("ijk,jr,rs->iks", ["jr,rs->js"], "ijk,js->iks"),
        ("ijk,jr,rs,ks->i", ["jr,rs->js"], "ijk,js,ks->i"),
        ("ij,rs,js->ir", ["rs,js->jr"], "ij,jr->ir"),
        ("ij,jr->i", ["jr->j"], "ij,j->i"),
        ("ij,jrr->ir", ["jrr->jr"], "ij,jr->ir"),
        ("ij,jrrs->i", ["jrrs->j"], "ij,j->i"),
        ("ij,r,r,r->i", ["r,r->r", "r,r->"], "ij,->i"),
        ("ij,rs,rs,jr->ir", ["rs,rs->r"], "ij,r,jr->ir"),
    ],
)
def test_dense_subexpressions(text: str, steps: list[str], left: str) -> None:
    b = Bound.of(einsum(text), LARGE)
    products = list(dense_products(b))
    assert [equation for _, equation, _ in products] == steps
    assert str(products[-1][2].einsum if products else b.einsum) == left


@pytest.mark.parametrize(("nonzeros", "steps"), [(899, []), (900, ["jd,rdo->rjo"])])
def test_a_table_of_fewer_rows_than_nonzeros_is_made_first(nonzeros: int, steps: list[str]) -> None:
    b = Bound.of(einsum("rij,jd,rdo->io"), {"r": 9, "i": 50, "j": 100, "d": 8, "o": 8})
    products = 9 * 100 * 8 * 8
    assert [equation for _, equation, _ in dense_products(b, nonzeros, products)] == steps
    assert not list(dense_products(b, nonzeros, products + 1))


@pytest.mark.parametrize(
    ("side", "nonzeros", "sampled", "first"), [(8, 99, 1, False), (8, 100, 1, True), (8, 25, 4, True), (7, 25, 1, True)]
)
def test_blocks_that_are_sampled_are_multiplied_one_by_one(side: int, nonzeros: int, sampled: int, first: bool) -> None:
    b = Bound.of(einsum("aIJ,rJj,rIi->aij"), {"a": nonzeros, "I": 10, "J": 10, "r": 500, "i": side, "j": side})
    steps = [equation for _, equation, _ in dense_products(b, nonzeros, 0, lambda rows, summed: sampled)]
    assert steps == (["rJj,rIi->IJji"] if first else [])


def test_dense_steps_before_the_sparse_operand_move_it() -> None:
    ((positions, equation, left),) = dense_products(Bound.of(einsum("jr,rs,ijk->iks", sparse=(2,)), LARGE))
    assert left.einsum.sparse == (1,)
    assert (positions, equation, str(left)) == ((0, 1), "jr,rs->js", "js,ijk->iks  j=900 s=12 i=1000 k=800")


@FEW
@given(cases(), st.booleans())
def test_dense_subexpressions_change_nothing(case: Case, empty: bool) -> None:
    b = case.bound
    if empty and b.sizes:
        b = Bound.of(b.einsum, {**b.by_index, b.sizes[0][0]: 0})
    shapes = [b.shape(p) for p in range(len(case.shapes))]
    tensors = draw_tensors(shapes, case.seed, torch.float64)
    new, operands = reduced_by_hand(b, tensors)
    assert [tuple(x.shape) for x in operands] == [new.shape(p) for p in range(len(operands))]
    assert [operands[q] is tensors[p] for p, q in zip(b.einsum.sparse, new.einsum.sparse, strict=True)].count(
        False
    ) == 0
    actual = torch.einsum(str(new.einsum), *operands)
    torch.testing.assert_close(actual, torch.einsum(str(b.einsum), *tensors), rtol=0, atol=0)


@FEW
@given(cases(), st.integers(2, 50))
def test_dense_steps_do_not_grow_and_do_not_repeat(case: Case, scale: int) -> None:
    b = Bound.of(case.bound.einsum, {i: n * scale for i, n in case.bound.sizes})
    left = [b.elements(term) for term in b.einsum.inputs]
    rest = b
    for positions, equation, reduced in dense_products(b):
        rest = reduced
        size = b.elements(equation.partition("->")[2])
        assert size <= GROWTH * sum(left[p] for p in positions)
        left[positions[0]] = size
        for p in reversed(positions[1:]):
            del left[p]
    assert not list(dense_products(rest))
