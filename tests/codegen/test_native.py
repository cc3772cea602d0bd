"""Native loops on a CPU: against the float64 reference, in threads, forks and workers, from a cache of others."""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import folders
import processes
import pytest
import torch
from cases import SIZES, Problem, assert_matches, check

import sparsetc as stc
from sparsetc.codegen import cache
from sparsetc.codegen.numba import unprinted
from sparsetc.device.profile import of_backend
from sparsetc.ir.plan import Part, Plan, Schedule, Storage
from sparsetc.support import files
from sparsetc.support.files import usable

pytest.importorskip("numba")

MTTKRP = "ijk,jr,kr->ir"
EQUATIONS = (
    MTTKRP,
    "ijk,ir,jr->kr",
    "ijkl,jr,kr,lr->ir",
    "ijk,kr->ijr",
    "ijk,k->ij",
    "ijk,jr,ks->irs",
    "ijk,jr,ks->rsi",
    "ij,jr->ri",
    "ij,j->i",
    "ij,ir,jr->ij",
    "ijk->",
    "ij,jrs,sr->ir",
    "ij,jr,rs->is",
    "ij,irs,jrs->ij",
)
WIDE = {**SIZES, "r": 40, "s": 19}
LONG_ROWS = {**SIZES, "r": 200}


@pytest.mark.parametrize("plan", ["coo", "fiber", "coo+rows", "window", "hls"])
@pytest.mark.parametrize("equation", EQUATIONS)
def test_results_are_those_of_the_reference(equation: str, plan: str) -> None:
    try:
        kernel = check(Problem(equation, WIDE if plan == "fiber" else SIZES), plan=plan, backend="numba")
    except stc.PlanError as error:
        assert f'plan "{plan}"' in str(error) or repr(plan) in str(error)  # noqa: PT017
        return
    assert kernel.backend == "numba"


@pytest.mark.parametrize("widths", [(2, 8, 2), (6, 19, 5)])
def test_vectors_along_another_axis_than_the_outputs_last(widths: tuple[int, int, int]) -> None:
    sizes = {**SIZES, "k": 50, "j": 3, **dict(zip("rst", widths, strict=True))}
    kernel = check(Problem("ijkl,jr,ks,lt->irst", sizes), plan="fiber", backend="numba")
    assert "fiber_sum_0 += x * load" in kernel.source


def test_sums_lie_as_the_output_does() -> None:
    """So that rows are stored as vectors, and a row that an inner loop reads again is loaded before it."""
    sizes = {**SIZES, "r": 4, "s": 6, "t": 8}
    kernel = check(Problem("ijk,js,krt->irst", sizes), plan="fiber", backend="numba")
    assert "load8(total" in kernel.source.split("store(A")[-1]
    assert "* row" in kernel.source


def test_sums_along_vectors_within_loops() -> None:
    """As the gradient of blocks has them: rows of both tables are longer than a vector, and summed whole."""
    sizes = {**SIZES, "r": 8, "s": 9, "t": 37}
    for plan in ("coo", "fiber"):
        check(Problem("ij,jrt,ist->irs", sizes), plan=plan, backend="numba")


@pytest.mark.parametrize(("rows", "together"), [(8, 4), (6, 2), (3, 1)])
def test_rows_of_blocks_share_the_tables_rows(rows: int, together: int) -> None:
    coords = torch.tensor([[0, 1, 1], [1, 0, 2]])
    x = stc.SparseTensor.from_blocks(coords, torch.randn(3, rows, 4), (3 * rows, 12))
    table = torch.randn(12, 21)
    kernel = stc.compile("ij,jr->ir", x, table, backend="numba", plan="fiber")
    assert (f"in range(0, {rows}, {together})" in kernel.source) == (together > 1)
    torch.testing.assert_close(kernel(table), x.to_dense() @ table)


@pytest.mark.parametrize("equation", [MTTKRP, "ij,ir,jr->ij", "ij,jr->ir"])
def test_rows_longer_than_registers(equation: str) -> None:
    for plan in ("coo", "window" if equation != "ij,ir,jr->ij" else "auto"):
        assert check(Problem(equation, LONG_ROWS), plan=plan, backend="numba").backend == "numba"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64])
def test_other_types(dtype: torch.dtype) -> None:
    for equation in (MTTKRP, "ij,ir,jr->ij"):
        assert check(Problem(equation, SIZES, dtype=dtype), backend="numba", plan="coo").backend == "numba"


def test_what_it_has_not_runs_as_torch_programs_and_says_so() -> None:
    kernel = check(Problem(MTTKRP, SIZES, dtype=torch.complex64), backend="numba")
    assert kernel.backend == "torch"
    dense = check(Problem(MTTKRP, SIZES), backend="numba", plan="dense")
    assert dense.backend == "torch"
    assert unprinted(dense.programs[0]) == "products of whole tensors are torch's"
    assert "products of whole tensors are torch's" in str(dense.explain())
    assert "numba" in str(check(Problem(MTTKRP, SIZES), backend="numba", plan="coo").explain())


def test_gradients() -> None:
    x, *dense = Problem(MTTKRP, SIZES, dtype=torch.float64).operands()
    values = x.values.clone().requires_grad_()
    tables = [d.clone().requires_grad_() for d in dense]

    def result(values: torch.Tensor, *tables: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = stc.einsum(MTTKRP, x.with_values(values), *tables, backend="numba")
        return out

    assert torch.autograd.gradcheck(result, (values, *tables))


@pytest.mark.parametrize("plan", ["coo", "fiber"])
def test_long_sums_keep_their_digits(plan: str) -> None:
    n = 1 << 21
    coords = torch.stack([torch.zeros(n, dtype=torch.int64), torch.arange(n)])
    x = stc.SparseTensor(coords, torch.full((n,), 0.1), (1, n))
    for width in (1, 20, 300):
        found = stc.einsum("ij,jr->ir", x, torch.ones(n, width), plan=plan, backend="numba")
        assert float((found - n * 0.1).abs().max()) < 1e-5 * n


# -- by price ----------------------------------------------------------------------------------------------------------


def test_auto_takes_native_loops_where_they_repay_what_it_takes_to_compile_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SPARSETC_BACKEND", raising=False)
    x, *dense = large(rank=64)
    kernel = stc.compile(MTTKRP, x, *dense)
    report = kernel.explain()
    assert kernel.backend == "numba"
    assert all(part.schedule.native for part in kernel.plan.parts)
    assert "native" in str(report)
    assert stc.compile(MTTKRP, x, *dense, backend="torch").backend == "torch"
    small = check(Problem(MTTKRP, SIZES))
    assert small.backend == "torch"


def test_a_chosen_plan_makes_the_same_kernel_again() -> None:
    x, *dense = large(rank=64)
    kernel = stc.compile(MTTKRP, x, *dense)
    again = stc.compile(MTTKRP, x, *dense, plan=kernel.plan)
    assert (again.backend, again.source) == ("numba", kernel.source)


def test_native_loops_have_prices_of_their_own() -> None:
    profile = of_backend("numba")
    assert set(profile.loops) == {"native", "torch"}
    assert of_backend("torch").loops == {}
    assert all(profile.sources[f"loops {runner}"].startswith("measured: ") for runner in profile.loops)


# -- threads and processes ---------------------------------------------------------------------------------------------


def large(rank: int = 20) -> list[Any]:
    """Operands of an MTTKRP that threads share."""
    generator = torch.Generator().manual_seed(0)
    coords = torch.stack([torch.randint(0, n, (60_000,), generator=generator) for n in (500, 400, 300)])
    x = stc.SparseTensor(coords, torch.rand(60_000, generator=generator), (500, 400, 300))
    return [x, torch.rand(400, rank, generator=generator), torch.rand(300, rank, generator=generator)]


@pytest.mark.parametrize("plan", ["coo", "fiber", "rows"])
@pytest.mark.parametrize("equation", [MTTKRP, "ijk,ir,jr->kr", "ijk,jr,kr->r", "ijk,ir,jr,kr->ijk"])
def test_threads_give_the_same_bits_and_leave_their_number(equation: str, plan: str) -> None:
    x, *_ = large()
    sizes = {"i": 500, "j": 400, "k": 300, "r": 20}
    dense = [torch.rand([sizes[c] for c in term]) for term in equation.split("->")[0].split(",")[1:]]
    try:
        kernel = stc.compile(equation, x, *dense, backend="numba", plan=plan)
    except stc.PlanError:
        return
    torch.set_num_threads(3)
    results = [kernel(*dense) for _ in range(2)]
    assert torch.get_num_threads() == 3
    assert_matches(results[0], equation, [x, *dense])
    first, again = (r.values if isinstance(r, stc.SparseTensor) else r for r in results)
    assert torch.equal(first, again)


def test_three_threads_at_once() -> None:
    x, *dense = large()
    kernel = stc.compile(MTTKRP, x, *dense, backend="numba")
    expected, results = kernel(*dense), list[torch.Tensor]()

    def call() -> None:
        results.extend(kernel(*dense) for _ in range(20))

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 60
    assert all(torch.equal(result, expected) for result in results)


FORKED = f"""
import os, sys
sys.path[:0] = {[str(Path(__file__).parents[2]), *folders.PATHS]!r}
import torch
import sparsetc as stc
from test_native import MTTKRP, large
torch.set_num_threads(2)
x, *dense = large()
kernel = stc.compile(MTTKRP, x, *dense, backend="numba")
expected = kernel(*dense)
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(kernel(*dense), expected)
    print("both")
else:
    os._exit(not torch.equal(kernel(*dense), expected))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_child_makes_threads_of_its_own() -> None:
    done = processes.run(["-c", FORKED], env={**os.environ}, timeout=120)
    assert done.stdout.strip() == "both", done.stderr


class Products(torch.utils.data.Dataset[torch.Tensor]):
    """Products that a DataLoader's workers make."""

    def __init__(self) -> None:
        self.x, *self.dense = large()
        self.kernel = stc.compile(MTTKRP, self.x, *self.dense, backend="numba")

    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> torch.Tensor:
        result: torch.Tensor = self.kernel(*(d + number for d in self.dense))
        return result


def test_workers_of_a_data_loader() -> None:
    products = Products()
    expected = [products[n] for n in range(len(products))]
    for n, found in enumerate(torch.utils.data.DataLoader(products, batch_size=None, num_workers=2)):
        torch.testing.assert_close(found, expected[n])


# -- what the compiler made, on disk -----------------------------------------------------------------------------------


def compiled(folder: Path) -> tuple[torch.Tensor, Any]:
    """A result, and the function that made it, as in a process that has compiled nothing."""
    cache.clear()
    x, *dense = Problem("ij,jr->ir", SIZES).operands()
    kernel = stc.compile("ij,jr->ir", x, *dense, backend="numba", plan="coo", cache_dir=folder)
    found = kernel(*dense)
    (function,) = kernel.step.executable.programs.native
    return found, function


def test_machine_code_is_kept_and_found_again(tmp_path: Path) -> None:
    found, function = compiled(tmp_path)
    assert not function.stats.cache_hits
    (file,) = tmp_path.glob(f"*{files.COMPILED}")
    assert file.stat().st_mode & 0o777 == 0o600
    again, function = compiled(tmp_path)
    assert function.stats.cache_hits
    assert torch.equal(found, again)


@pytest.mark.parametrize("damage", [b"", b"\x80", b"cos\nsystem\n(S'exit 1'\ntR.", b"x" * 1000])
def test_a_damaged_file_is_compiled_anew(tmp_path: Path, damage: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = compiled(tmp_path)
    (file,) = tmp_path.glob(f"*{files.COMPILED}")
    file.write_bytes(damage)
    if b"system" in damage:
        monkeypatch.setattr(os, "system", lambda command: None)  # the user's own folder is trusted, as Triton's is
    again, function = compiled(tmp_path)
    assert not function.stats.cache_hits
    assert torch.equal(found, again)


@pytest.mark.skipif(os.name != "posix", reason="there are no modes")
def test_what_others_may_write_to_is_not_loaded(tmp_path: Path) -> None:
    found, _ = compiled(tmp_path)
    (file,) = tmp_path.glob(f"*{files.COMPILED}")
    file.chmod(0o666)
    again, function = compiled(tmp_path)
    assert not function.stats.cache_hits
    assert torch.equal(found, again)
    tmp_path.chmod(0o777)
    with pytest.warns(UserWarning, match="cannot write generated source"):
        again, function = compiled(tmp_path)
    assert not function.stats.cache_hits
    assert torch.equal(found, again)


@pytest.mark.skipif(os.name != "posix", reason="there are no modes")
def test_a_folder_that_may_only_be_read_serves(tmp_path: Path) -> None:
    compiled(tmp_path)
    tmp_path.chmod(0o500)
    try:
        assert compiled(tmp_path)[1].stats.cache_hits
    finally:
        tmp_path.chmod(0o700)


def test_machine_code_counts_among_the_files_that_are_removed(tmp_path: Path) -> None:
    compiled(tmp_path)
    assert len(files._files(tmp_path, files.SOURCE)) == 2


# -- without numba -----------------------------------------------------------------------------------------------------


def test_without_numba_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARSETC_BACKEND", raising=False)
    problem = Problem(MTTKRP, SIZES)
    with_it = check(problem, backend="torch")
    monkeypatch.setattr(sys.modules["sparsetc.options"], "installed", lambda _: False)
    without = check(problem)
    assert without.backend == "torch"
    assert (without.plan, without.source) == (with_it.plan, with_it.source)
    with pytest.raises(stc.PlanError, match=r'needs numba, which is not installed: pip install "sparsetc\[cpu\]"'):
        stc.compile(MTTKRP, *problem.operands(), backend="numba")


def test_numba_is_imported_where_a_kernel_is_made() -> None:
    code = "import sys, torch, sparsetc as stc\nstc.spmm(stc.eye(3), torch.ones(3, 2), backend='torch')\n"
    done = processes.run(["-c", f"{code}print('numba' in sys.modules)"], env={**os.environ}, timeout=60)
    assert done.stdout.strip() == "False", done.stderr


def test_a_numba_that_cannot_be_imported_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    usable.cache_clear()
    monkeypatch.setattr(sys.modules["sparsetc.options"], "installed", lambda _: True)
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.warns(UserWarning, match="numba is installed and cannot be imported"):
        kernel = check(Problem(MTTKRP, SIZES), backend="numba", plan="coo")
    assert kernel.backend == "torch"
    assert "numba cannot be imported" in kernel.plan.reason
    usable.cache_clear()


def test_a_native_plan_runs_where_numba_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARSETC_BACKEND", raising=False)
    problem = Problem(MTTKRP, SIZES)
    plan = check(problem, backend="numba", plan="coo").plan
    assert all(part.schedule.native for part in plan.parts)
    monkeypatch.setattr(sys.modules["sparsetc.options"], "installed", lambda _: False)
    assert check(problem, plan=plan).backend == "torch"


def test_few_pairs_of_nonzeros_are_multiplied_one_by_one() -> None:
    """Six products a nonzero: a native loop takes them sooner than blocks are cut, torch programs do not."""
    at = torch.arange(30)
    coords = torch.cat([torch.stack([at, (at + shift * shift) % 30]) for shift in range(12)], 1)
    x = stc.SparseTensor(coords, torch.ones(360), (30, 30))
    native, torch_programs = (stc.compile("ij,jk->ik", x, x, backend=backend) for backend in ("numba", "torch"))
    assert "at most 8 tasks a nonzero" in str(native.explain())
    assert "tasks a nonzero" not in str(torch_programs.explain())
    for kernel in (native, torch_programs):
        torch.testing.assert_close(kernel().to_dense(), x.to_dense() @ x.to_dense())


@pytest.mark.parametrize("output", ["ij", "i", "j"])
@pytest.mark.parametrize("item", [(), (0,)])
def test_results_in_panels(item: tuple[int, ...], output: str) -> None:
    """A row has nonzeros in several panels, so that its sums are added."""
    storage = Storage(item, (), (1,) if item else (0, 1), 1, max_item_nnz=50, params=(("panel_1", 7),))
    part = Part("coo", storage, Schedule(blocks=(("r", 16),)))
    check(Problem(f"ij,ir,jr->{output}", SIZES), plan=Plan("panels", (part,)), backend="numba")


@pytest.mark.parametrize("output", ["ir", "ijr", "isr", "irs", "rij", "jr"])
@pytest.mark.parametrize("plan", ["coo", "coo in chunks", "fiber", "window"])
def test_results_are_made_in_panels_of_their_columns(plan: str, output: str) -> None:
    """The last panel is narrower; tables with columns are copied, whether or not columns come last."""
    wide = {**SIZES, "r": 83, "s": 3}
    problem = Problem(f"ijk,{'jrs' if output == 'isr' else 'jsr'},kr,s->{output}", wide)
    kernel = check(problem, plan=plan.split()[0], backend="numba")

    def cut(part: Part) -> Part:
        blocks = tuple((c, 16 if c == "r" else n) for c, n in part.schedule.blocks)
        storage = Storage((), (), (0, 1, 2), 1, max_item_nnz=70) if "chunks" in plan else part.storage
        return replace(part, storage=storage, schedule=Schedule(blocks=blocks, slowest_axes=("r",), native=True))

    in_panels = check(problem, plan=replace(kernel.plan, parts=tuple(map(cut, kernel.plan.parts))), backend="numba")
    assert "for first_r in range(0, 80, 16):" in in_panels.source
    assert "for first_r in range(80, 83, 16):" in in_panels.source


def test_wide_results_are_made_in_panels_where_a_cache_holds_these() -> None:
    g = torch.Generator().manual_seed(0)

    def compiled(coords: torch.Tensor, columns: int) -> Any:
        x = stc.SparseTensor(coords, torch.rand(coords.shape[1], generator=g), (1000, 5000))
        dense = torch.rand(5000, columns, generator=g)
        kernel = stc.compile("ij,jr->ir", x, dense, plan="coo")
        torch.testing.assert_close(kernel(dense), x.to_dense() @ dense, rtol=1e-5, atol=1e-4)
        return kernel.plan.parts[0].schedule.slowest_axes

    scattered = torch.stack([torch.randint(0, n, (400_000,), generator=g) for n in (1000, 5000)])
    rows = torch.arange(1000).repeat_interleave(100)
    banded = torch.stack([rows, 4 * rows + torch.arange(100).repeat(1000) // 2])
    assert compiled(scattered, 300) == ("r",)
    assert compiled(scattered, 32) == ()
    assert compiled(banded, 300) == ()


@pytest.mark.parametrize("columns", [1, 3, 5, 8, 16])
@pytest.mark.parametrize("plan", ["coo", "fiber", "rows"])
def test_several_nonzeros_of_a_long_run_are_taken_a_turn(plan: str, columns: int) -> None:
    """A row of registers has sums of its own for each; runs are no multiple of a turn, and some are shorter."""
    g = torch.Generator().manual_seed(0)
    lengths = torch.tensor([1, 2, 3, 0, 97, 251, 1100, 38])  # one is longer than a sum that is made in one piece
    coords = torch.stack([torch.arange(8).repeat_interleave(lengths), torch.cat([torch.arange(n) for n in lengths])])
    x = stc.SparseTensor(coords, torch.rand(coords.shape[1], generator=g), (8, 1100))
    dense = torch.rand(1100, columns, generator=g)
    kernel = stc.compile("ij,jr->ir", x, dense, plan=plan, backend="numba")
    torch.testing.assert_close(kernel(dense), x.to_dense() @ dense)
    taken_together = {1: 0, 3: 0, 5: 0, 8: 4, 16: 4}
    assert kernel.source.count("x = load(values, n + ") == taken_together[columns]
    short = stc.compile("ij,jr->ir", stc.SparseTensor(coords[:, :50], torch.rand(50), (8, 1100)), dense, plan=plan)
    assert "n + " not in short.source


def test_panels_count_against_the_memory_limit() -> None:
    g = torch.Generator().manual_seed(0)
    coords = torch.stack([torch.randint(0, n, (300_000,), generator=g) for n in (100, 5000)])
    x, dense = stc.SparseTensor(coords, torch.rand(300_000), (100, 5000)), torch.rand(5000, 300, generator=g)
    plan = stc.compile("ij,jr->ir", x, dense, plan="coo").plan
    assert plan.parts[0].schedule.slowest_axes == ("r",)
    limit = 100 * 300 * 4
    whole = stc.compile("ij,jr->ir", x, dense, plan="coo", memory_limit=limit)
    assert whole.plan.parts[0].schedule.slowest_axes == ()
    with pytest.raises(stc.OutOfMemoryError, match='panels of tables of "ij,jr->ir" would take'):
        stc.compile("ij,jr->ir", x, dense, plan=plan, memory_limit=limit)


def test_sampled_products_of_large_tables_are_made_in_panels() -> None:
    """Rows of one table are gathered in order, those of the other a panel's at a time, which a cache holds."""
    g = torch.Generator().manual_seed(0)
    coords = torch.stack([torch.randint(0, n, (160_000,), generator=g) for n in (2000, 20_000)])
    x = stc.SparseTensor(coords, torch.rand(160_000), (2000, 20_000))
    b, c = torch.rand(2000, 64, generator=g), torch.rand(20_000, 64, generator=g)
    kernel = stc.compile("ij,ir,jr->ij", x, b, c, backend="numba")
    assert kernel.plan.parts[0].storage.params == (("panel_1", 4000),)
    assert "coo(panel_1=4000)[- | - | ij] native" in str(kernel.explain())
    i, j = x.coords
    torch.testing.assert_close(kernel(b, c).values, x.values * (b[i] * c[j]).sum(1))
    assert stc.compile("ij,ir,jr->ij", x, b[:, :8], c[:, :8], backend="numba").plan.parts[0].storage.params == ()


def test_sums_of_few_nonzeros_are_added_one_by_one() -> None:
    """Rows end so often that a processor guesses wrong; a long row is summed by itself, which is more exact."""
    pytest.importorskip("numba")
    ends, b = torch.arange(30_000), torch.rand(9)
    coords = torch.stack([ends // 3 % 100, ends // 300, ends * 7 % 9])
    short = stc.SparseTensor(coords, torch.rand(30_000), (100, 100, 9), coalesce=False).coalesce()
    kernel = stc.compile("ijk,k->ij", short, b, output="sparse", backend="numba")
    assert kernel.plan.parts[0].storage.item == ()
    torch.testing.assert_close(kernel(b).to_dense(), short.to_dense() @ b)
    long = stc.SparseTensor([ends.clamp(min=20_000) - 20_000, ends], torch.rand(30_000), (10_000, 30_000))
    assert stc.compile("ij,j->i", long, torch.rand(30_000), backend="numba").plan.parts[0].storage.item != ()
