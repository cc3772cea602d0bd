"""What torch does to functions from outside: compiled and exported they are one graph; transformed, differentiated."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
import torch
from cases import random_sparse, random_values
from torch.autograd import forward_ad
from torch.library import opcheck

import sparsetc as stc
import sparsetc.contraction.library  # the operators, as a graph that is traced first has them
from sparsetc.contraction import contraction
from sparsetc.contraction.kernel import RESULT

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
def test_a_compiled_function_is_one_graph(
    name: str, x: stc.SparseTensor, b: torch.Tensor, breaks: Callable[[], int]
) -> None:
    f = callers(x, b)[name]
    expected = f(b)
    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    for _ in range(3):
        torch.testing.assert_close(compiled(b), expected)
    assert breaks() == 0


@pytest.mark.parametrize("layout", ["sparse_csr", "sparse_csc", "sparse_bsr"])
def test_a_compiled_function_holds_what_torch_stores(layout: str, b: torch.Tensor, breaks: Callable[[], int]) -> None:
    sides = {"blocksize": (2, 2)} if layout == "sparse_bsr" else {}
    given = torch.eye(8, dtype=torch.float64).to_sparse(layout=getattr(torch, layout), **sides)
    x = stc.SparseTensor.from_torch(given)
    found = torch.compile(lambda b: stc.einsum(SPMM, x, b), backend="eager", fullgraph=True)(b)
    torch.testing.assert_close(found, b)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({"path": [(0, 1), (0, 1)]}, 0),
        ({"path": ((0, 1), (0, 1))}, 0),
        ({"memory_limit": 1e9}, 0),
        ({"memory_limit": np.int64(10**9)}, 4),
        ({"cache_dir": Path}, 4),
    ],
)
def test_settings_are_constants_of_a_graph_or_break_it_before(
    settings: dict[str, Any], most: int, dynamic: bool | None, b: torch.Tensor, tmp_path: Path,
    breaks: Callable[[], int],
) -> None:  # fmt: skip
    """What compiles is not traced, whatever the settings; a break counts in each of the four functions before it."""
    given = {name: tmp_path if value is Path else value for name, value in settings.items()}
    x, c = random_sparse((6, 8), "random", torch.float64), random_values((3, 4), torch.float64, 2)
    compiled = torch.compile(
        lambda b, c: stc.einsum("ij,jr,rs->is", x, b, c, **given), backend="eager", dynamic=dynamic
    )
    torch.testing.assert_close(compiled(b, c), x.to_dense() @ b @ c)
    assert breaks() <= most


def test_what_is_not_compiled_yet_is_compiled_while_tracing(
    x: stc.SparseTensor, b: torch.Tensor, breaks: Callable[[], int]
) -> None:
    compiled = torch.compile(lambda b: stc.einsum(SPMM, x, b.sin()).cos(), backend="aot_eager", fullgraph=True)
    for _ in range(3):
        torch.testing.assert_close(compiled(b), (x.to_dense() @ b.sin()).cos())
    assert breaks() == 0


def test_entries_that_are_left_out_break_the_graph(
    x: stc.SparseTensor, b: torch.Tensor, breaks: Callable[[], int]
) -> None:
    """How many there are is known when the values are."""

    def f(b: torch.Tensor) -> torch.Tensor:
        return stc.einsum("ij,jr->ijr", x, b.relu(), drop_zeros=True).values * 2

    torch.testing.assert_close(torch.compile(f, backend="eager")(b), f(b))


@pytest.mark.parametrize("output", ["ijr", "ir", "ri", "jir", "rij"])
def test_results_of_every_form(output: str, x: stc.SparseTensor, b: torch.Tensor, breaks: Callable[[], int]) -> None:
    """A dense one, one on the operand's own pattern, one of a projected pattern, and one that is sorted again."""

    def f(b: torch.Tensor) -> torch.Tensor:
        found = stc.einsum(f"ij,jr->{output}", x, b.sin())
        return found.values * 2 if isinstance(found, stc.SparseTensor) else found * 2

    expected = f(b)
    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(b), expected)


def test_other_sizes_than_the_last_are_compiled_for(
    x: stc.SparseTensor, b: torch.Tensor, breaks: Callable[[], int]
) -> None:
    compiled = torch.compile(lambda b: stc.einsum(SPMM, x, b) * 2, backend="eager")
    for rank in (3, 4, 5, 3):
        b = random_values((8, rank), torch.float64, rank)
        stc.einsum(SPMM, x, b)
        torch.testing.assert_close(compiled(b), 2 * x.to_dense() @ b)
    assert breaks() == 0


def test_a_graph_keeps_what_it_was_traced_with(x: stc.SparseTensor, b: torch.Tensor, breaks: Callable[[], int]) -> None:
    expected = stc.einsum(SPMM, x, b) * 2
    compiled = torch.compile(lambda b: stc.einsum(SPMM, x, b) * 2, backend="eager", fullgraph=True)
    compiled(b)
    stc.clear_cache()
    torch.testing.assert_close(compiled(b), expected)


@pytest.mark.parametrize("strict", [False, True])
def test_a_kernel_is_exported(strict: bool, x: stc.SparseTensor, b: torch.Tensor, breaks: Callable[[], int]) -> None:
    kernel = stc.compile(SPMM, x, b)

    class Layer(torch.nn.Module):
        def forward(self, b: torch.Tensor) -> torch.Tensor:
            return kernel(b.sin()) * 2  # type: ignore[operator]

    program = torch.export.export(Layer(), (b,), strict=strict)
    torch.testing.assert_close(program.module()(b), 2 * x.to_dense() @ b.sin())
    with pytest.raises(stc.TransformError, match="forward mode cannot look into this exported program"):
        torch.func.jvp(program.module(), (b,), (b,))  # torch takes tangents away before an operator runs


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("output", ["ir", "ijr", "jir"])
def test_an_einsum_is_exported(
    output: str, strict: bool, x: stc.SparseTensor, b: torch.Tensor, breaks: Callable[[], int]
) -> None:
    """One that is not compiled yet: compiling it leaves no trace in the program."""

    class Layer(torch.nn.Module):
        def forward(self, b: torch.Tensor) -> torch.Tensor:
            found = stc.einsum(f"ij,jr->{output}", x, b.sin())
            return found.values if isinstance(found, stc.SparseTensor) else found

    program = torch.export.export(Layer(), (b,), strict=strict)
    torch.testing.assert_close(program.module()(b), Layer()(b))
    assert [str(n.target) for n in program.graph.nodes if n.op == "call_function"] == [
        "aten.sin.default",
        "sparsetc.contract.default",
    ]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("before", ["made", "moved", "loaded", "called"])
@pytest.mark.parametrize("blocksize", [None, (2, 4)])
def test_a_sparse_layer_is_exported(
    before: str, strict: bool, blocksize: tuple[int, int] | None, breaks: Callable[[], int]
) -> None:
    """Whatever was done to it before: what is traced are stand-ins of its places, of which nothing can be counted."""
    dense = [torch.zeros(4, 6).index_put((torch.arange(4), torch.tensor(at)), torch.tensor(2.0)) for at in (1, 5)]
    layer, other = (stc.nn.SparseLinear.from_dense(w, torch.ones(4), blocksize=blocksize) for w in dense)
    given = torch.arange(12.0).reshape(2, 6)
    if before == "moved":
        layer, given = layer.double(), given.double()
    elif before == "loaded":
        layer.load_state_dict(other.state_dict())
    elif before == "called":
        layer(given)
    program = torch.export.export(layer, (given,), strict=strict)
    weight = dense[before == "loaded"].to(given.dtype)
    torch.testing.assert_close(program.module()(given), given @ weight.T + 1)
    assert "sparsetc.contract.default" in [str(node.target) for node in program.graph.nodes]
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(given), given @ weight.T + 1)


EXPORTED = """
import torch, sparsetc as stc
from torch import nn

torch.manual_seed(0)
x = stc.SparseTensor([[0, 0, 1, 3, 4, 4], [1, 3, 0, 3, 2, 4]], torch.rand(6), (5, 5))
blocks = stc.SparseTensor.from_blocks([[0, 1], [1, 0]], torch.rand(2, 4, 4), (8, 8))
twice = stc.SparseTensor([[1, 1], [2, 2]], [1.0, 2.0], (5, 5), coalesce=False)

class Of(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
    def forward(self, *given):
        return self.function(*given)

class Graph(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer, self.adjacency = layer, stc.nn.SparseLinear(x).requires_grad_(False)
    def forward(self, given):
        return self.layer(self.adjacency.weight, given)

square, wide, one = torch.rand(5, 5), torch.rand(8, 8), torch.ones(5, 2)
CASES = {
    "linear": (stc.nn.SparseLinear(x, torch.rand(5)), [square]),
    "blocks": (stc.nn.SparseLinear(blocks), [wide]),
    "graph": (Graph(stc.nn.GraphConv(5, 2)), [square]),
    "gat": (Graph(stc.nn.GATConv(5, 2, heads=2)), [square]),
    "gat2": (Graph(stc.nn.GATv2Conv(5, 2)), [square]),
    "attention": (Of(lambda q: stc.attention(q, q, q, stc.masks.causal())), [square]),
    "map": (Of(lambda q: stc.map_entries(lambda s: s.tanh(), x, products={"s": (q, q)}, values=q)), [square]),
    "sparse result": (Of(lambda b: stc.einsum("ij,jr->ijr", x, b, precision="high").values), [one]),
    "two sparse": (Of(lambda b: stc.einsum("ij,jk->ik", x, x.T).values * b.sum()), [one]),
    "duplicates": (Of(lambda b: stc.einsum("ij,jr->ir", twice, b)), [one]),
}
"""
SAVED = """
def saved(name, folder):
    model, given = CASES[name]
    torch.export.save(torch.export.export(model, tuple(given)), f"{folder}/{name}.pt2")
    given = [one.requires_grad_() for one in given]
    result = model(*given)
    gradients = torch.autograd.grad(result.square().sum(), given)
    torch.save((given, result.detach(), gradients), f"{folder}/{name}.pt")
"""


def test_programs_run_in_a_process_that_imported_the_package_alone(tmp_path: Path) -> None:
    """All layers, exported cold, in one process; the other has none of their kernels."""
    code = f"{EXPORTED}{SAVED}\nfor name in CASES:\n    stc.clear_cache()\n    saved(name, {str(tmp_path)!r})"
    done = processes.run(["-c", code])
    assert done.returncode == 0, done.stderr
    code = f"""
import torch, sparsetc
from pathlib import Path

for path in Path({str(tmp_path)!r}).glob("*.pt2"):
    given, expected, gradients = torch.load(path.with_suffix(".pt"))
    program = torch.export.load(path)
    for made in (program, program.run_decompositions()):
        found = made.module()(*given)
        torch.testing.assert_close(found, expected, msg=lambda said: f"{{path}}: {{said}}")
    of_given = torch.autograd.grad(program.module()(*given).square().sum(), given)
    torch.testing.assert_close(of_given, gradients)
    print(path.stem)
"""
    done = processes.run(["-c", code])
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split("\n")) == 11


@pytest.mark.parametrize("coalesce", [False, True])
def test_a_program_reads_its_coordinates_once(coalesce: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read again after torch counted a change of them; so is a tensor with duplicates."""
    x = stc.SparseTensor([[0, 0, 2], [1, 1 + coalesce, 0]], [1.0, 2.0, 3.0], (4, 3), coalesce=coalesce)

    class Layer(torch.nn.Module):
        def forward(self, b: torch.Tensor) -> torch.Tensor:
            return stc.einsum(SPMM, x, b)

    b = torch.tensor([[1.0, 2], [3, 4], [5, 6]])
    module = torch.export.export(Layer(), (b,)).module()
    torch.testing.assert_close(module(b), x.to_dense() @ b)
    with monkeypatch.context() as patched:
        patched.setattr(stc.SparseTensor, "__init__", lambda *_, **__: pytest.fail("the coordinates are read again"))
        torch.testing.assert_close(module(b), x.to_dense() @ b)
    (coords,) = [a for a in vars(module).values() if isinstance(a, torch.Tensor) and a.dtype == torch.int64]
    coords[0, 2] = 3
    assert module(b).tolist() == [*(x.to_dense() @ b)[:2].tolist(), [0, 0], [3, 6]]


def test_a_program_of_any_number_of_rows_names_no_kernel() -> None:
    attended = stc.masks.causal()

    class Attention(torch.nn.Module):
        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return stc.attention(q, q, q, attended)

    layer = stc.nn.SparseLinear.from_dense(torch.eye(3, 4), torch.ones(3))
    rows = {0: torch.export.Dim("rows")}
    program = torch.export.export(layer, (torch.rand(3, 2, 4),), dynamic_shapes=(rows,))
    for module in (program.module(), program.run_decompositions().module()):
        for count in (3, 1, 5):
            given = torch.rand(count, 2, 4, requires_grad=True)
            torch.testing.assert_close(module(given), given[..., :3] + 1)
    torch.testing.assert_close(torch.autograd.grad(program.module()(given).sum(), given)[0][..., 0], torch.ones(5, 2))
    module = torch.export.export(Attention(), (torch.rand(3, 2, 5, 4),), dynamic_shapes=(rows,)).module()
    for q in (torch.rand(1, 2, 5, 4), torch.rand(7, 2, 5, 4)):
        torch.testing.assert_close(module(q), torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"shapes": [[6, 8]]', '"shapes": []'),
        ('"plan": "auto"', '"cache_dir": "/"'),
        ("{", "{{"),
        ('"result": ["i", "r"]', '"result": [null]'),
        ('"sparse": [0]', '"sparse": [2]'),
        ('"result": ["i", "r"]', '"result": ["x"]'),
        ('"in_blocks": [false]', '"in_blocks": [3]'),
        ('[["i", "j"], ["j", "r"]]', '[["i", "j"], ["j", "r"], ["r"]]'),
        ("float64", "object"),
    ],
)
def test_a_damaged_program_is_refused(x: stc.SparseTensor, b: torch.Tensor, old: str, new: str) -> None:
    class Layer(torch.nn.Module):
        def forward(self, b: torch.Tensor) -> torch.Tensor:
            return stc.einsum(SPMM, x, b)

    program = torch.export.export(Layer(), (b,)).module()
    (node,) = [node for node in program.graph.nodes if "contract" in str(node.target)]
    assert old in node.args[0]
    node.args = (node.args[0].replace(old, new), *node.args[1:])
    program.recompile()
    with pytest.raises(stc.FormatError, match="the program is damaged"):
        program(b)


@pytest.mark.parametrize("grad", [False, True])
def test_what_is_traced_by_torchscript_is_refused(grad: bool) -> None:
    layer = stc.nn.SparseLinear.from_dense(torch.eye(4))
    with (
        torch.set_grad_enabled(grad),
        pytest.raises(stc.TransformError, match=r"jit\.trace records no .* torch\.export"),
    ):
        torch.jit.trace(layer, torch.rand(3, 4))


def test_a_buffer_that_torch_cannot_export_is_refused_by_one_sentence(x: stc.SparseTensor, b: torch.Tensor) -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("x", x)  # type: ignore[arg-type]

        def forward(self, b: torch.Tensor) -> torch.Tensor:
            return stc.einsum(SPMM, self.x, b)

    model = Layer()
    with pytest.raises(stc.DtypeError, match=r"torch\.export takes no SparseTensor as a buffer"):
        torch.export.export(model, (b,))
    attribute = model.x
    del model.x
    model.x = attribute
    assert torch.equal(torch.export.export(model, (b,)).module()(b), model(b))


def test_compiling_and_packing_stay_outside(
    x: stc.SparseTensor, b: torch.Tensor, breaks: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = torch.compile(lambda x, b: stc.einsum("ij,jr->jir", x, b).values * 2, backend="eager")
    seen: list[bool] = []
    build = contraction.parsed
    monkeypatch.setattr(contraction, "parsed", lambda *a, **how: seen.append(_traced()) or build(*a, **how))
    start = time.thread_time()
    compiled(x, b)
    elapsed = time.thread_time() - start
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
    whole = torch.compile(lambda b: stc.einsum(SPMM, x, b, drop_zeros=True) * 2, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="sparsetc plans by what a sparse operand holds"):
        whole(b)


def test_gradients_of_a_compiled_function(x: stc.SparseTensor, b: torch.Tensor, breaks: Callable[[], int]) -> None:
    b.requires_grad_()
    values = x.values.clone().requires_grad_()

    def f(values: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return stc.einsum(SPMM, x.with_values(values), b.sin()).square().sum()

    kernel = stc.compile(SPMM, x, b)

    def g(values: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return kernel(b.sin(), values=[values]).square().sum()  # type: ignore[union-attr]

    expected = torch.autograd.grad(f(values, b), [values, b])
    whole = torch.compile(g, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(whole(values, b), [values, b]), expected)
    torch.testing.assert_close(torch.autograd.grad(torch.compile(f, backend="eager")(values, b), [values, b]), expected)


# --- operators --------------------------------------------------------------------------------------------------------

EQUATIONS = ("ij,jr->ir", "ij,jr->ri", "ij,jr->ijr", "ij,jr->jir", "ij,ir,jr->ij", "ij,kj->ik", "ij,kj,kr->ir")


@pytest.mark.parametrize("equation", EQUATIONS)
def test_operators_keep_torch_s_rules(equation: str, x: stc.SparseTensor) -> None:
    sizes, terms = {"i": 6, "j": 8, "k": 6, "r": 3}, equation.split("->")[0].split(",")
    sparse = [x for t in terms if "r" not in t]
    dense = [random_values(tuple(sizes[c] for c in t), torch.float64, n) for n, t in enumerate(terms) if "r" in t]
    kernel = stc.compile(equation, *sparse, *dense)
    values = [o.values.clone().requires_grad_() for o in sparse]
    given = (kernel.contraction.key, [*values, *(d.requires_grad_() for d in dense)], RESULT)
    opcheck(torch.ops.sparsetc.contract.default, given)
    upstream = torch.ones_like(torch.ops.sparsetc.contract(*given).detach())
    plain = [t.detach() for t in given[1]]
    for operand in range(len(plain)):
        opcheck(torch.ops.sparsetc.contract.default, (given[0], [*plain, upstream], operand))


def test_an_operator_takes_batches(x: stc.SparseTensor, b: torch.Tensor) -> None:
    kernel, batch = stc.compile(SPMM, x, b), random_values((2, 8, 3), torch.float64, 2)
    values = torch.stack([x.values, 2 * x.values])
    call = torch.ops.sparsetc.contract

    def one(values: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return call(kernel.contraction.key, [values, b], RESULT)

    torch.testing.assert_close(torch.func.vmap(one, (None, 0))(x.values, batch), x.to_dense() @ batch)
    expected = torch.stack([x.to_dense() @ batch[0], 2 * x.to_dense() @ batch[1]])
    torch.testing.assert_close(torch.func.vmap(one)(values, batch), expected)
    assert torch.func.vmap(one)(values[:0], batch[:0]).shape == (0, 6, 3)
    compiled, at = torch.compile(spmm(x), fullgraph=True, backend="aot_eager"), torch.autograd.functional.jacobian
    torch.testing.assert_close(at(compiled, b, vectorize=True), at(spmm(x), b))


def test_a_graph_whose_kernel_is_gone_says_so(b: torch.Tensor) -> None:
    x = random_sparse((6, 8), "random", torch.float64)
    key, values = stc.compile(SPMM, x, b).contraction.key, x.values
    del x
    with pytest.raises(stc.TransformError, match="trace again"):
        torch.ops.sparsetc.contract(key, [values, b], RESULT)


@pytest.mark.parametrize("values", [torch.ones(3, dtype=torch.float64), torch.ones(999, dtype=torch.float64)])
def test_an_operator_takes_values_of_its_pattern_alone(
    values: torch.Tensor, x: stc.SparseTensor, b: torch.Tensor
) -> None:
    kernel = stc.compile(SPMM, x, b)
    key = kernel.contraction.key
    with pytest.raises(stc.ShapeError, match="values of the kernel"):
        torch.ops.sparsetc.contract(key, [values, b], RESULT)
    with pytest.raises(stc.ShapeError, match="values of the kernel"):
        torch.ops.sparsetc.contract(key, [values, b, torch.ones(6, 3, dtype=torch.float64)], 1)
    with pytest.raises(stc.ShapeError, match="values of the kernel"):
        torch.ops.sparsetc.contract(key, [x.values.float(), b], RESULT)


# --- torch.func, and forward mode -------------------------------------------------------------------------------------

MTTKRP = "ijk,jr,kr->ir"


@pytest.fixture
def mttkrp() -> tuple[stc.SparseTensor, tuple[torch.Tensor, torch.Tensor]]:
    x = random_sparse((4, 5, 6), "random", torch.float64)
    return x, (random_values((5, 2), torch.float64, 1), random_values((6, 2), torch.float64, 2))


Case = tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]


def cases(x: stc.SparseTensor, factors: tuple[torch.Tensor, torch.Tensor]) -> dict[str, Case]:
    """By name: a function of ours, the same by torch alone, and where to take derivatives."""
    dense, kernel = x.to_dense(), stc.compile(MTTKRP, x, *factors)

    def filled(values: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(dense).index_put(tuple(x.coords), values)

    pair = stc.compile("ijk,ljk->il", x, x, output="dense")
    return {
        "einsum": (lambda *f: stc.einsum(MTTKRP, x, *f), lambda *f: torch.einsum(MTTKRP, dense, *f), factors),
        "kernel": (lambda *f: kernel(*f), lambda *f: torch.einsum(MTTKRP, dense, *f), factors),
        "permuted": (
            lambda *f: stc.einsum("ijk,jr,ks->sri", x, *f),
            lambda *f: torch.einsum("ijk,jr,ks->sri", dense, *f),
            factors,
        ),
        "semi-sparse": (
            lambda b: stc.einsum("ijk,kr->ijr", x, b).to_dense(),
            lambda b: torch.einsum("ijk,kr->ijr", dense, b),
            factors[1:],
        ),
        "values": (
            lambda v: kernel.with_values(v)(*factors),
            lambda v: torch.einsum(MTTKRP, filled(v), *factors),
            (x.values,),
        ),
        "values and factors": (
            lambda v, *f: stc.einsum(MTTKRP, x.with_values(v), *f),
            lambda v, *f: torch.einsum(MTTKRP, filled(v), *f),
            (x.values, *factors),
        ),
        "two sparse operands": (
            lambda v: pair(values=[v, None]),
            lambda v: torch.einsum("ijk,ljk->il", filled(v), dense),
            (x.values,),
        ),
    }


CASES = ("einsum", "kernel", "permuted", "semi-sparse", "values", "values and factors", "two sparse operands")


@pytest.mark.parametrize("name", CASES)
def test_transforms(name: str, mttkrp: Any) -> None:
    f, g, at = cases(*mttkrp)[name]
    places = tuple(range(len(at)))
    for transform in (torch.func.jacrev, torch.func.jacfwd):
        torch.testing.assert_close(transform(f, places)(*at), transform(g, places)(*at))
    found, expected = (
        torch.func.grad(lambda *t, f=h: f(*t).sin().sum(), places)(*at)  # type: ignore[misc]
        for h in (f, g)
    )
    torch.testing.assert_close(found, expected)
    moved = tuple(torch.ones_like(t) for t in at)
    torch.testing.assert_close(torch.func.jvp(f, at, moved), torch.func.jvp(g, at, moved))
    batches = tuple(torch.stack([t, 2 * t, -t], -1) for t in at)
    for dims in (-1, (-1, *(None for _ in at[1:]))):
        given = tuple(b if dims == -1 or n == 0 else t for n, (b, t) in enumerate(zip(batches, at, strict=True)))
        torch.testing.assert_close(torch.func.vmap(f, dims)(*given), torch.func.vmap(g, dims)(*given))


@pytest.mark.parametrize("name", ["einsum", "values", "semi-sparse"])
def test_transforms_of_transforms(name: str, mttkrp: Any) -> None:
    f, g, at = cases(*mttkrp)[name]
    found, expected = (torch.func.hessian(lambda t, f=h: f(t, *at[1:]).pow(3).sum())(at[0]) for h in (f, g))
    torch.testing.assert_close(found, expected)
    batch = torch.stack([at[0], 2 * at[0]])
    found, expected = (
        torch.func.vmap(torch.func.grad(lambda t, f=h: f(t, *at[1:]).sin().sum()))(batch) for h in (f, g)
    )
    torch.testing.assert_close(found, expected)


def test_modes_within_modes(mttkrp: Any) -> None:
    f, g, (b, c) = cases(*mttkrp)["einsum"]
    forward, reverse = torch.func.jacfwd, torch.func.jacrev
    for outer, inner in ((forward, forward), (forward, reverse), (reverse, forward)):
        found, expected = (outer(inner(lambda t, h=h: h(t * b[:, :1], t * c[:, :1])))(b[0, :1]) for h in (f, g))  # type: ignore[misc]
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["values and factors", "semi-sparse", "two sparse operands"])
def test_tangents_of_tangents(name: str, mttkrp: Any) -> None:
    f, g, at = cases(*mttkrp)[name]

    def tangent(h: Callable[..., torch.Tensor], seed: int) -> Callable[..., torch.Tensor]:
        moved = tuple(random_values(tuple(t.shape), t.dtype, seed + n) for n, t in enumerate(at))
        return lambda *t: torch.func.jvp(lambda *t: h(*t).sin(), t, moved)[1]

    found, expected = (tangent(tangent(tangent(h, 9), 6), 3)(*at) for h in (f, g))
    torch.testing.assert_close(found, expected)


def test_forward_mode(mttkrp: Any) -> None:
    x, (b, c) = mttkrp
    for packed in (x, stc.SparseTensor(x.coords, x.values.clone(), x.shape)):
        with forward_ad.dual_level():
            found = forward_ad.unpack_dual(stc.einsum(MTTKRP, packed, forward_ad.make_dual(b, 2 * b), c))
            learned = packed.with_values(forward_ad.make_dual(packed.values, 3 * packed.values))
            other = forward_ad.unpack_dual(stc.einsum(MTTKRP, learned, b, c))
        expected = torch.einsum(MTTKRP, x.to_dense(), b, c)
        torch.testing.assert_close((found.primal, found.tangent), (expected, 2 * expected))
        torch.testing.assert_close((other.primal, other.tangent), (expected, 3 * expected))


def test_what_is_compiled_under_a_transform_serves_outside(b: torch.Tensor) -> None:
    x = random_sparse((6, 8), "random", torch.float64)
    torch.func.jacrev(lambda b: stc.einsum(SPMM, x, b))(b)
    torch.func.vmap(lambda b: stc.einsum("ij,jr->ijr", x, b).values)(b.expand(2, 8, 3))
    b = b.clone().requires_grad_()
    found = stc.einsum(SPMM, x, b)
    torch.testing.assert_close(found, x.to_dense() @ b)
    (gradient,) = torch.autograd.grad(found.sum(), b)
    torch.testing.assert_close(gradient, x.to_dense().sum(0).unsqueeze(1).expand(8, 3))


def spmm(x: stc.SparseTensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda b: stc.einsum(SPMM, x, b)


@pytest.mark.parametrize("strategy", ["reverse-mode", "forward-mode"])
def test_jacobians_in_batches_of_autograd(strategy: str, x: stc.SparseTensor, b: torch.Tensor) -> None:
    pair = stc.compile("ij,kj->ik", x, x, output="dense")
    several = (lambda values: pair(values=[values, None]), (x.values,))
    both = (lambda values, b: stc.einsum("ij,jr->rij", x.with_values(values), b).values, (x.values, b))
    for f, at in ((spmm(x), (b,)), several, both):
        found = torch.autograd.functional.jacobian(f, at, vectorize=True, strategy=strategy)
        torch.testing.assert_close(found, torch.autograd.functional.jacobian(f, at))
        squares = lambda *at, f=f: f(*at).pow(2).sum()  # noqa: E731
        found = torch.autograd.functional.hessian(squares, at, vectorize=True, outer_jacobian_strategy=strategy)
        torch.testing.assert_close(found, torch.autograd.functional.hessian(squares, at))


def test_gradients_in_batches_have_gradients(x: stc.SparseTensor, b: torch.Tensor) -> None:
    b = b.requires_grad_()
    batch = random_values((3, 6, 3), torch.float64, 2)
    (found,) = torch.autograd.grad(spmm(x)(b).pow(3), b, batch, is_grads_batched=True, create_graph=True)
    alone = [torch.autograd.grad(spmm(x)(b).pow(3), b, one, create_graph=True)[0] for one in batch]
    torch.testing.assert_close(found, torch.stack(alone))
    (second,) = torch.autograd.grad(found.pow(2).sum(), b)
    torch.testing.assert_close(second, torch.autograd.grad(sum(g.pow(2).sum() for g in alone), b)[0])


# Equations of a tensor or several with one dense operand, or one that comes twice.
COLD = (
    ("ij,jr->ir", 1, "plain"), ("ij,jr->jir", 1, "plain"), ("ii,ir->r", 1, "plain"), ("ij,ir,jr->ij", 1, "plain"),
    ("ij,j->", 1, "blocks"), ("ij,jr->ijr", 1, "blocks"), ("ii,ir->ir", 1, "blocks"), ("ij,jr->jir", 1, "duplicates"),
    ("ijh,jr->irh", 1, "dense mode"), ("ijh,hr->ijr", 1, "dense mode"),
    ("ij,kj,kr->ir", 2, "plain"), ("ij,kj,kr->ir", 2, "blocks"), ("ijh,kjh,kr->ir", 2, "dense mode"),
    ("ij,kj,kl,lr->ir", 3, "plain"), ("ij,kj,kl,lr->ir", 3, "blocks"), ("ijh,kjh,klh,lr->ir", 3, "dense mode"),
)  # fmt: skip


def of_kind(kind: str) -> tuple[stc.SparseTensor, torch.Tensor]:
    """A tensor of 6 x 6, or 6 x 6 x 2, on a pattern that nothing was made of yet, and the same dense."""
    coords = torch.tensor([[0, 0, 1, 2, 2], [0, 2, 1, 0, 2]])
    if kind == "blocks":
        values = random_values((5, 2, 2), torch.float64, 4)
        grid = torch.zeros(3, 3, 2, 2, dtype=torch.float64).index_put(tuple(coords), values)
        return stc.SparseTensor.from_blocks(coords, values, (6, 6)), grid.permute(0, 2, 1, 3).reshape(6, 6)
    if kind == "duplicates":
        coords = coords[:, [0, 0, 1, 2, 3, 4]]
    width = (2,) if kind == "dense mode" else ()
    values = random_values((coords.shape[1], *width), torch.float64, 4)
    dense = torch.zeros(6, 6, *width, dtype=torch.float64).index_put(tuple(coords), values, accumulate=True)
    return stc.SparseTensor(coords, values, dense.shape, coalesce=kind != "duplicates"), dense


def transformed(f: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Callable[[torch.Tensor], Any]]:
    """Transforms of a function by name, each to be called with a batch of its argument."""
    from torch.fx.experimental.proxy_tensor import make_fx

    grad = torch.func.grad(lambda t: f(t).sin().sum())

    def tangent(t: torch.Tensor) -> Any:
        return torch.func.jvp(f, (t,), (t.cos(),))

    return {
        "vmap": torch.func.vmap(f),
        "grad": lambda batch: grad(batch[0]),
        "vmap of grad": torch.func.vmap(grad),
        "jvp": lambda batch: tangent(batch[0]),
        "vmap of jvp": torch.func.vmap(tangent),
        "jvp of grad": lambda batch: torch.func.jvp(grad, (batch[0],), (batch[1],)),
        "torch.compile": lambda batch: torch.compile(f, backend="eager")(batch[0]),
        "make_fx": lambda batch: make_fx(f)(batch[0])(batch[0]),
    }


@pytest.mark.parametrize("name", transformed(torch.sin))
@pytest.mark.parametrize(("equation", "count", "kind"), COLD)
def test_the_first_call_may_be_a_transform(
    equation: str, count: int, kind: str, name: str, breaks: Callable[[], int]
) -> None:
    """What a first call makes and keeps with a pattern is neither followed nor traced, and serves later calls."""
    tensors = [of_kind(kind) for _ in range(count)]
    last = equation.partition("->")[0].split(",")[count:]
    batch = random_values((2, *({"h": 2, "r": 3}.get(c, 6) for c in last[0])), torch.float64, 5)

    def sparse(t: torch.Tensor) -> torch.Tensor:
        result = stc.einsum(equation, *(x for x, _ in tensors), *[t] * len(last))
        return result.to_dense() if isinstance(result, stc.SparseTensor) else result

    def dense(t: torch.Tensor) -> torch.Tensor:
        return torch.einsum(equation, *(x for _, x in tensors), *[t] * len(last))

    expected = transformed(dense)[name](batch)
    for _ in range(2):
        torch.testing.assert_close(transformed(sparse)[name](batch), expected)
    torch.testing.assert_close(sparse(batch[0]), dense(batch[0]))


@pytest.mark.parametrize(("equation", "count", "kind"), COLD)
def test_a_batch_may_be_empty(equation: str, count: int, kind: str) -> None:
    tensors = [of_kind(kind)[0] for _ in range(count)]
    last = equation.partition("->")[0].split(",")[count:]
    batch = torch.zeros((0, *({"h": 2, "r": 3}.get(c, 6) for c in last[0])), dtype=torch.float64)

    def found(t: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        sparse = (x.with_values(v) for x, v in zip(tensors, values, strict=True))
        return torch.as_tensor(stc.einsum(equation, *sparse, *[t] * len(last), output="dense"))

    shape = found(batch.new_zeros(batch.shape[1:]), *(x.values for x in tensors)).shape
    values = [x.values.expand(0, *x.values.shape) for x in tensors]
    assert torch.func.vmap(found)(batch, *values).shape == (0, *shape)
    assert torch.func.vmap(found, (None, *(0 for _ in values)))(batch.new_zeros(batch.shape[1:]), *values).shape[0] == 0


def test_what_a_pullback_reads_may_have_outlived_its_transform(x: stc.SparseTensor, b: torch.Tensor) -> None:
    vector, scale = b[:, 0].contiguous(), b.new_tensor(2.0)
    for _ in range(3):
        made, back = torch.func.vjp(lambda vector: stc.einsum("ij,j,->i", x, vector, scale), vector)
        (found,) = back(torch.ones_like(made))
        torch.testing.assert_close(found, 2 * x.to_dense().sum(0))


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
