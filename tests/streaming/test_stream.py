"""Streams give what `einsum` gives in core: for every plan, cut everywhere, resident or copied back, and from files."""

from __future__ import annotations

import copy
import pickle
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import TILED, assert_matches, random_sparse
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import forward_ad

import sparsetc as stc
from sparsetc.ir.contraction_tree import parse_tree
from sparsetc.streaming import Stream
from sparsetc.streaming.budget import CHUNK, SMALLEST, Budget

PLANS = ("auto", "coo", "rows", "fiber", *TILED, "mm-csf", "coo+rows", "fiber+rows")
EQUATIONS = {
    "mttkrp": "ijk,jr,kr->ir",
    "mttkrp of the last mode": "ijk,ir,jr->kr",
    "ttmc": "ijk,jr,ks->irs",
    "ttm, sparse": "ijk,kr->ijr",
    "ttm of the first mode": "ijk,ir->jkr",
    "ttm, dense letter first": "ijk,jr->rik",
    "ttv": "ijk,k->ij",
    "ttv of the first mode": "ijk,i->jk",
    "ttv of a middle mode, turned": "ijk,j->ki",
    "sampled": "ijk,ir,jr,kr->ijk",
    "sum": "ijk->",
    "sum of two modes": "ijk->j",
    "diagonal": "iik,kr->ir",
    "outer": "ijk,r->ijkr",
    "a table made first, but for chunks": "ijk,jr,krs->is",
}
SIZES = {"i": 11, "j": 11, "k": 9, "r": 5, "s": 3, "l": 4, "m": 3}


def tensor(order: int = 3, nnz: int = 400, dtype: torch.dtype = torch.float32, seed: int = 0) -> stc.SparseTensor:
    """A random tensor whose first rows are long."""
    g = torch.Generator().manual_seed(seed)
    shape = (11, 11, 9, 4, 3)[:order]
    coords = torch.stack([(torch.rand(nnz, generator=g) ** 2 * n).long() for n in shape])
    values = torch.randint(-4, 5, (nnz,), generator=g).to(dtype)
    return stc.SparseTensor(coords, values, shape)


def operands(equation: str, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Random dense operands of an equation, whole numbers so that sums in any order are equal."""
    g = torch.Generator().manual_seed(1)
    terms = equation.split("->")[0].split(",")[1:]
    return [torch.randint(-3, 4, [SIZES[c] for c in t], generator=g).to(dtype) for t in terms]


def in_core(equation: str, x: stc.SparseTensor, *dense: torch.Tensor, **settings: Any) -> Any:
    """What `einsum` gives, as the reference does: the form, pattern and values that a stream's result must have."""
    result = stc.einsum(equation, x, *dense, **settings)
    assert_matches(result, equation, [x, *dense])
    return result


def assert_same(found: object, expected: object) -> None:
    """Equal results, dense or sparse, and patterns of these."""
    if isinstance(expected, stc.SparseTensor):
        assert isinstance(found, stc.SparseTensor)
        assert found.shape == expected.shape
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found.coalesce().coords.cpu(), expected.coalesce().coords)
        torch.testing.assert_close(found.coalesce().values.cpu(), expected.coalesce().values)
        return
    assert isinstance(found, torch.Tensor)
    assert isinstance(expected, torch.Tensor)
    torch.testing.assert_close(found.cpu(), expected)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", EQUATIONS)
def test_as_in_core(plan: str, name: str) -> None:
    equation = EQUATIONS[name]
    x, dense = tensor(), operands(equation)
    try:
        expected = in_core(equation, x, *dense, plan=plan)
    except stc.PlanError:
        with pytest.raises(stc.PlanError):
            stc.stream(equation, x, *dense, plan=plan)
        return
    for chunk in (24_576 if plan in TILED else 4096, None):
        with stc.stream_kernel(equation, x, *dense, plan=plan, chunk_bytes=chunk) as s:
            assert s.nnz <= x.nnz
            assert all(c.nbytes <= (chunk or 1 << 26) for c in s.cut.chunks)
            assert_same(s(*dense), expected)
            assert_same(s(*dense), expected)


@pytest.mark.parametrize("name", EQUATIONS)
@pytest.mark.parametrize("output", ["auto", "dense", "sparse"])
def test_results_that_do_not_fit_are_copied_back(name: str, output: str) -> None:
    equation = EQUATIONS[name]
    x, dense = tensor(), operands(equation)
    if output == "sparse" and equation.endswith("->"):
        with pytest.raises(stc.PlanError, match="no pattern"):
            stc.stream(equation, x, *dense, output=output)
        return
    expected = in_core(equation, x, *dense, output=output)
    held = sum(d.numel() * 4 for d in dense)
    for limit in (held * 2 + 5000, held * 2 + 9000, held * 2 + 20_000, 1 << 30):
        with stc.stream_kernel(equation, x, *dense, output=output, plan="coo", memory_limit=limit) as s:
            assert_same(s(*dense), expected)
            assert s.device_bytes <= limit
            rows = [0 if rows is None else rows.nbytes for *_, rows in s._engine.buffers]
            assert sum(rows) + held <= s.device_bytes


@pytest.mark.parametrize("chunk", range(4096, 4096 + 40 * 7, 7))
def test_cut_everywhere(chunk: int) -> None:
    x, dense = tensor(nnz=900), operands("ijk,ir->jkr")
    expected = in_core("ijk,ir->jkr", x, *dense)
    assert_same(stc.stream("ijk,ir->jkr", x, *dense, plan="coo", chunk_bytes=chunk), expected)


@pytest.mark.parametrize("order", range(1, 6))
@pytest.mark.parametrize("plan", ["auto", "coo", "fiber", "rows"])
def test_orders(order: int, plan: str) -> None:
    letters = "ijklm"[:order]
    x = tensor(order)
    for kept in {letters[:1], letters[-1:], letters[1:], letters[:-1], letters}:
        equation = f"{letters}," + ",".join(f"{c}r" for c in letters) + f"->{kept}r"
        dense = operands(equation)
        try:
            expected = in_core(equation, x, *dense, plan=plan)
        except stc.PlanError:
            continue  # by rows where all modes are kept
        assert_same(stc.stream(equation, x, *dense, plan=plan, chunk_bytes=4096), expected)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int32, torch.int64]
)
@pytest.mark.parametrize("equation", ["ijk,jr,kr->ir", "ijk,k->ij", "ijk->i"])
def test_dtypes(dtype: torch.dtype, equation: str) -> None:
    x, dense = tensor(dtype=dtype), operands(equation, dtype)
    expected = in_core(equation, x, *dense)
    for limit in (None, 16_000):
        assert_same(stc.stream(equation, x, *dense, plan="coo", chunk_bytes=4096, memory_limit=limit), expected)


def test_integers_that_do_not_fit_are_refused() -> None:
    x = tensor(dtype=torch.int8)
    with pytest.raises(stc.DtypeError, match="which torch"):
        stc.stream("ijk,k->i", x, torch.full((9,), 100, dtype=torch.int8), chunk_bytes=4096)


@pytest.mark.parametrize("equation", ["ij,jr->ir", "ij,jr->i", "ij,ir,jr->ij"])
def test_letters_of_size_0(equation: str) -> None:
    x = random_sparse((6, 5), "random", torch.float32)
    dense = [torch.rand({"i": 6, "j": 5}[term[0]], 0) for term in equation.partition("->")[0].split(",")[1:]]
    found, expected = (f(equation, x, *dense) for f in (stc.stream, in_core))
    assert found.shape == expected.shape
    if not isinstance(found, torch.Tensor):
        found, expected = found.to_dense(), expected.to_dense()
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("equation", EQUATIONS.values())
def test_no_nonzeros(equation: str, tmp_path: Path) -> None:
    x = stc.SparseTensor(torch.empty((3, 0), dtype=torch.long), torch.empty(0), (11, 11, 9))
    dense = operands(equation)
    expected = in_core(equation, x, *dense)
    with stc.stream_kernel(equation, x, *dense, file=tmp_path / "x.safetensors") as s:
        assert_same(s(*dense), expected)
        assert s.chunks == 0
        assert s.timeline() == []
    with stc.open_stream(tmp_path / "x.safetensors") as s:
        assert_same(s(*dense), expected)


@given(
    st.integers(0, 2**32), st.integers(1, 120), st.sampled_from(sorted(EQUATIONS.values())), st.sampled_from(PLANS[:6])
)
def test_property(seed: int, nnz: int, equation: str, plan: str) -> None:
    x, dense = tensor(nnz=nnz, seed=seed), operands(equation)
    expected = in_core(equation, x, *dense, plan="coo")
    try:
        found = stc.stream(equation, x, *dense, plan=plan, chunk_bytes=24_576 if plan in TILED else 4096)
    except stc.PlanError:
        return
    assert_same(found, expected)


REPEATED = ("iij", "iji", "jii", "jiik", "iijk", "ijik", "iiijk", "jiikk")


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("output", ["sparse", "dense"])
def test_repeated_letters(plan: str, output: str) -> None:
    r, sizes = random.Random(f"{plan} {output}"), {"i": 7, "j": 200, "k": 9}
    chunks, nnz = 0, 700
    for term in REPEATED:
        letters = "".join(dict.fromkeys(term))
        kept = r.sample(letters, len(letters) - 1)
        equation = f"{term},{letters[0]}r->{''.join(kept)}{r.choice(['r', ''])}"
        g = torch.Generator().manual_seed(r.randrange(1000))
        along = {c: torch.randint(sizes[c], (nnz,), generator=g) for c in letters}
        coords = torch.stack([along[c] for c in term])
        coords[term.rindex("i"), nnz // 4 * 3 :] = 0  # most are on the diagonal, and some are not
        values = torch.randint(1, 5, (nnz,), generator=g).to(torch.float64)
        x = stc.SparseTensor(coords, values, [sizes[c] for c in term])
        dense = torch.randint(-3, 4, (sizes[letters[0]], 3), generator=g).to(torch.float64)
        expected = in_core(equation, x, dense, output=output)
        chunk = 32_768 if plan in TILED else 4096
        for limit in (None, 2 * dense.nbytes + 2 * chunk):
            try:
                s = stc.stream_kernel(
                    equation, x, dense, plan=plan, output=output, chunk_bytes=chunk, memory_limit=limit
                )
            except (stc.PlanError, stc.OutOfMemoryError):
                continue
            with s:
                found = s(dense)
            chunks += s.chunks
            assert_same(found, expected)
            if isinstance(found, stc.SparseTensor):
                assert torch.equal(found.coords, expected.coords)  # and not only once it is coalesced
    assert chunks > 12 or "+" in plan  # which asks for rows that are long and rows that are short


@pytest.mark.parametrize("equation", EQUATIONS.values())
def test_packed_files_are_read_in_blocks(equation: str, tmp_path: Path) -> None:
    x, dense = tensor(), operands(equation)
    path = tmp_path / "x.parquet"
    stc.write(path, x)
    expected = in_core(equation, x, *dense)
    assert_same(stc.stream(equation, path, *dense, chunk_bytes=4096), expected)
    with stc.open_packed(path) as file:
        assert_same(stc.stream(equation, file, *dense, chunk_bytes=4096), expected)
        assert file.nnz == x.nnz  # the caller's file stays open
        file.block(0, 1)


def test_what_may_stand_for_a_sparse_tensor() -> None:
    x, (b,) = tensor(2), operands("ij,jr->ir")
    expected = in_core("ij,jr->ir", x, b)
    assert_same(stc.stream("ij,jr->ir", x.to_dense().to_sparse(), b), expected)
    assert_same(stc.stream("ij,jr->ir", x, b.numpy()), expected)
    uncoalesced = stc.SparseTensor(x.coords.repeat(1, 2), x.values.repeat(2), x.shape, coalesce=False)
    assert_same(stc.stream("ij,jr->ir", uncoalesced, b, chunk_bytes=4096), expected * 2)
    with pytest.raises(stc.EquationError, match="what is streamed is a SparseTensor"):
        stc.stream("ij,jr->ir", x.to_dense(), b)
    with pytest.raises(stc.EquationError, match="operand 2 is sparse too"):
        stc.stream("ij,jr->ir", x, x)


def test_values_that_are_learned_or_conjugated() -> None:
    x, (b,) = tensor(2, dtype=torch.complex64), operands("ij,jr->ir", torch.complex64)
    x, b = x.with_values(x.values * 1j), (b * (1 + 2j)).conj()
    turned = x.with_values(x.values.conj())
    assert_same(stc.stream("ij,jr->ir", turned, b, chunk_bytes=4096), in_core("ij,jr->ir", turned, b))
    learned = x.with_values(x.values.clone().requires_grad_())
    with pytest.raises(stc.TransformError, match="require a gradient"):
        stc.stream("ij,jr->ir", learned, b)
    with torch.no_grad():
        found = stc.stream("ij,jr->ir", learned, b.detach())
        assert not found.requires_grad
        assert_same(found, in_core("ij,jr->ir", x, b))


def test_dense_modes_and_blocks_are_nonzeros() -> None:
    g = torch.Generator().manual_seed(0)
    semi = stc.SparseTensor(torch.tensor([[0, 2, 5], [1, 1, 3]]), torch.rand(3, 4, generator=g), (6, 5, 4))
    blocks = stc.SparseTensor.from_blocks(torch.tensor([[0, 1], [1, 0]]), torch.rand(2, 3, 2, generator=g), (6, 4))
    v, b = torch.rand(5, generator=g), torch.rand(4, 3, generator=g)
    found = stc.stream("ijk,j->ik", semi, v)
    torch.testing.assert_close(found.to_dense(), torch.einsum("ijk,j->ik", semi.to_dense(), v))
    torch.testing.assert_close(stc.stream("ij,jr->ir", blocks, b), blocks.to_dense() @ b)


def test_infinities_reach_only_what_has_nonzeros() -> None:
    x, (b, c) = tensor(), operands("ijk,jr,kr->ir")
    b[3, 1] = float("inf")
    expected = torch.zeros(11, 5)
    for (i, j, k), value in zip(x.coords.T.tolist(), x.values.tolist(), strict=True):
        expected[i] += value * b[j] * c[k]
    for plan in ("coo", *TILED):
        with stc.stream_kernel("ijk,jr,kr->ir", x, b, c, plan=plan, chunk_bytes=8192) as s:
            torch.testing.assert_close(s(b, c), expected, equal_nan=True)
            assert_same(s(b.nan_to_num(posinf=1), c), in_core("ijk,jr,kr->ir", x, b.nan_to_num(posinf=1), c))


def test_the_stream_for_infinities_has_the_options_that_were_in_force() -> None:
    x, b = random_sparse((40, 30), "random", torch.float32), torch.rand(30, 5)
    with stc.options(precision="high", deterministic=True, backend="torch"):
        s = stc.stream_kernel("ij,jr->ir", x, b, plan=stc.plans.plan_hls(1))
    b[0, 0] = float("inf")
    s(b)
    assert s._by_nonzeros is not None
    settings = s._by_nonzeros.compiler.settings
    assert (settings.precision, settings.deterministic) == ("high", True)


def test_a_schedule_that_does_not_fit_is_refused() -> None:
    x, (b, c) = tensor(), operands("ijk,jr,kr->ir")
    plan = stc.compile("ijk,jr,kr->ir", x, b, c, plan="fiber").plan
    tree = parse_tree("sum[nonzero](X * B)")  # without C
    for fault, message in (({"blocks": (("z", 8),)}, "a block of axis 'z'"), ({"tree": tree}, "plan 'fiber' of")):
        wrong = plan.scheduled(lambda schedule, fault=fault: replace(schedule, **fault))
        with pytest.raises(stc.PlanError, match=message):
            stc.stream_kernel("ijk,jr,kr->ir", x, b, c, plan=wrong)


def test_broadcast_operands() -> None:
    x, (b, c) = tensor(), operands("ijk,jr,kr->ir")
    expected = in_core("ijk,jr,kr->ir", x, b[:, :1], c)
    with stc.stream_kernel("ijk,jr,kr->ir", x, b, c) as s:
        assert_same(s(b[:, :1], c), expected)
        assert_same(s(b[:, :1].expand(-1, 5), c), expected)
        with pytest.raises(stc.ShapeError):
            s(b[:, :3], c)
        with pytest.raises(stc.ShapeError):
            s(b)
        with pytest.raises(stc.DtypeError):
            s(b.double(), c)


def test_largest_chunks_come_first() -> None:
    x, dense = tensor(nnz=2000), operands("ijk,jr,kr->ir")
    with stc.stream_kernel("ijk,jr,kr->ir", x, *dense, chunk_bytes=4096) as s:
        sizes = [s.cut.chunks[n].nnz for n in s.order]
        assert sizes == sorted(sizes, reverse=True)
        assert len(sizes) > 2
        by_size = s(*dense)
        times = s.timeline()
        assert [t.chunk for t in times] == list(s.order)
        assert all(0 <= t.copy[0] <= t.copy[1] <= t.kernel[1] for t in times)
    with stc.stream_kernel("ijk,jr,kr->ir", x, *dense, chunk_bytes=4096, order="given") as s:
        assert s.order == tuple(range(s.chunks))
        assert_same(s(*dense), by_size)


def test_one_program_serves_all_chunks() -> None:
    x = tensor(5, nnz=4000)
    for plan in ("coo", "rows", "fiber"):
        for equation in ("ijklm,jr,kr->ir", "ijklm,k->ij"):
            with stc.stream_kernel(equation, x, *operands(equation), plan=plan, chunk_bytes=4096) as s:
                assert s.chunks > 3
                assert len(s.cut.variants) == 1


@pytest.mark.parametrize("plan", ["coo+rows", "fiber+rows", "hls", "auto"])
@pytest.mark.parametrize("rows", [slice(None), slice(None, None, -1)])
def test_chunks_whose_rows_are_of_another_kind(plan: str, rows: slice, tmp_path: Path) -> None:
    """The first chunk chooses a plan of parts that it has; others may have what it has not."""
    full = torch.zeros(200, 60, 9)
    full[:20] = torch.arange(20 * 60 * 9).reshape(20, 60, 9) % 5 + 1  # long rows
    full[20:, 3, 2] = 2.0  # and rows of one nonzero
    x = stc.SparseTensor.from_dense(full.flip(0) if rows.step else full)
    dense = [torch.ones(60, 5), torch.arange(9.0).repeat(5, 1).T]
    expected = in_core("ijk,jr,kr->ir", x, *dense, plan="coo")
    chunk = 1 << 16 if plan in TILED else 8192
    with stc.stream_kernel("ijk,jr,kr->ir", x, *dense, plan=plan, chunk_bytes=chunk) as s:
        assert s.chunks > 1
        assert_same(s(*dense), expected)
    path = tmp_path / "x.parquet"
    stc.write(path, x)
    if plan in ("hls", "auto"):
        assert_same(stc.stream("ijk,jr,kr->ir", path, *dense, plan=plan, chunk_bytes=chunk), expected)


def test_a_plan_that_no_chunk_has_is_refused_for_what_the_tensor_lacks() -> None:
    """The first chunk has short rows only; what is said is true of all of the tensor."""
    full = torch.zeros(2000, 300)
    full[:, 3], full[1990:] = 2.0, 1.0
    x = stc.SparseTensor.from_dense(full)
    with pytest.raises(stc.PlanError, match=r'two modes of the sparse operand or more to be summed; "ij,j->i" sums'):
        stc.stream("ij,j->i", x, torch.ones(300), plan="fiber+rows", chunk_bytes=4096)


def test_a_default_device_is_no_matter(tmp_path: Path) -> None:
    """Chunks, and results that are copied back, are in host memory whatever torch makes tensors on."""
    x, dense = tensor(), operands("ijk,kr->ijr")
    expected = in_core("ijk,kr->ijr", x, *dense)
    with torch.device("meta"):
        for limit in (None, 6000):
            for file in (None, tmp_path / "x"):
                given = {"memory_limit": limit, "file": file, "device": "cpu", "plan": "coo", "output": "dense"}
                with stc.stream_kernel("ijk,kr->ijr", x, *dense, **given) as s:
                    found = s(*dense)
                    assert found.device.type == "cpu"
        with stc.open_stream(tmp_path / "x", device="cpu") as s:
            found = s(*dense)
    torch.testing.assert_close(found, expected.to_dense())


def test_deterministic_sums() -> None:
    x, dense = tensor(), operands("ijk,jr,kr->ir")
    assert_same(
        stc.stream("ijk,jr,kr->ir", x, *dense, deterministic=True, chunk_bytes=4096),
        in_core("ijk,jr,kr->ir", x, *dense),
    )


def test_a_bar_changes_nothing() -> None:
    x, dense = tensor(), operands("ijk,jr,kr->ir")
    for progress in (True, False, None):
        assert_same(
            stc.stream("ijk,jr,kr->ir", x, *dense, progress=progress, chunk_bytes=4096),
            in_core("ijk,jr,kr->ir", x, *dense),
        )


class Slabs:
    """A source of one's own: two slabs of a tensor, none of whose chunks reaches across."""

    def __init__(self, x: stc.SparseTensor) -> None:
        self.x, self.shape, self.nnz, self.dtype = x, x.shape, x.nnz, x.dtype
        self.ends = [x.nnz // 3, x.nnz]

    def take(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert stop <= self.ends[0] or start >= self.ends[0]
        return self.x.coords[:, start:stop], self.x.values[start:stop]


def test_a_source_of_ones_own() -> None:
    x, dense = tensor(), operands("ijk,jr,kr->ir")
    with stc.stream_kernel("ijk,jr,kr->ir", Slabs(x), *dense) as s:
        assert [c.nnz for c in s.cut.chunks] == [x.nnz // 3, x.nnz - x.nnz // 3]
        assert_same(s(*dense), in_core("ijk,jr,kr->ir", x, *dense))
    with pytest.raises(stc.EquationError, match="keeps the first modes"):
        stc.stream("ijk,i->jk", Slabs(x), torch.ones(11))


def test_out_is_written_at_the_end() -> None:
    x, dense = tensor(), operands("ijk,jr,kr->ir")
    expected = in_core("ijk,jr,kr->ir", x, *dense)
    out = torch.full((11, 5), 7.0)
    assert stc.stream("ijk,jr,kr->ir", x, *dense, out=out) is out
    assert_same(out, expected)
    turned = torch.empty(5, 11).t()
    assert_same(stc.stream("ijk,jr,kr->ir", x, *dense, out=turned), expected)
    for wrong in (torch.empty(11, 4), torch.empty(11, 5, dtype=torch.float64), "here"):
        with pytest.raises(stc.ShapeError, match="out= must be a tensor of shape"):
            stc.stream("ijk,jr,kr->ir", x, *dense, out=wrong)
    with pytest.raises(stc.PlanError, match="sparse result"):
        stc.stream("ijk,k->ij", x, torch.ones(9), out=out)


def test_drop_zeros() -> None:
    x = tensor()
    zeros = torch.zeros(9)
    zeros[2] = 1
    expected = in_core("ijk,k->ij", x, zeros, drop_zeros=True)
    found = stc.stream("ijk,k->ij", x, zeros, drop_zeros=True, chunk_bytes=4096)
    assert_same(found, expected)


# -- errors -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("chunk", [0, -1, 100, "x", 1.5, float("nan"), True, [], "1 B"])
def test_bad_chunks(chunk: object) -> None:
    with pytest.raises(stc.PlanError, match="chunk_bytes must be a number of bytes"):
        stc.stream("nonsense", None, chunk_bytes=chunk)  # before all else


@pytest.mark.parametrize("streams", [0, -1, 65, "2", 1.0, True, []])
def test_bad_streams(streams: object) -> None:
    with pytest.raises(stc.PlanError, match="streams must be a whole number from 1 to 64"):
        stc.stream("nonsense", None, streams=streams)


def test_other_errors() -> None:
    x, dense = tensor(), operands("ijk,jr,kr->ir")
    with pytest.raises(stc.PlanError, match='order must be "size" or "given"'):
        stc.stream("ijk,jr,kr->ir", x, *dense, order="sorted")
    with pytest.raises(stc.EquationError):
        stc.stream("ijk,jr,kr->", x)
    with pytest.raises(stc.ShapeError):
        stc.stream("ijk,jr,kr->ir", x, dense[0], dense[0])
    with pytest.raises(stc.DtypeError):
        stc.stream("ijk,jr,kr->ir", x, dense[0].double(), dense[1])
    with pytest.raises(stc.PlanError):
        stc.stream("ijk,jr,kr->ir", x, *dense, plan="bcb")
    with pytest.raises(stc.TransformError, match="gives no gradients"):
        stc.stream("ijk,jr,kr->ir", x, dense[0].requires_grad_(), dense[1])
    with pytest.raises(stc.DeviceError, match="CPU or a CUDA device"):
        stc.stream("ijk,jr,kr->ir", x, *dense, device="meta")
    with pytest.raises(TypeError, match="chunk_bytes"):
        stc.stream("ijk,jr,kr->ir", x, *dense, chunk_byte=3)
    with pytest.raises(FileNotFoundError):
        stc.stream("ijk,jr,kr->ir", "absent.parquet", *dense)


def test_closed() -> None:
    x, dense = tensor(), operands("ijk,jr,kr->ir")
    s = stc.stream_kernel("ijk,jr,kr->ir", x, *dense)
    s(*dense)
    s.close()
    with pytest.raises(stc.PlanError, match="was closed"):
        s(*dense)
    assert isinstance(s, Stream)
    assert "chunks" in repr(s)
    for late in (s.on, lambda: s.save("absent.safetensors")):
        with pytest.raises(stc.PlanError, match="was closed"):
            late()
    one = stc.stream_kernel("ijk,jr,kr->ir", x, *dense)
    other = one.on(order="given")
    one.close()
    with pytest.raises(stc.PlanError, match="was closed"):
        other(*dense)


@pytest.mark.parametrize("name", ["device", "packed_on"])
@pytest.mark.parametrize("value", ["nothing", "meta", f"cuda:{torch.cuda.device_count()}", object()])
def test_devices_that_are_none(name: str, value: object) -> None:
    with pytest.raises(stc.DeviceError):
        stc.stream("ij,j->i", tensor(2), torch.ones(tensor(2).shape[1]), **{name: value})


def test_a_numbered_cpu() -> None:
    x, v = tensor(2), torch.ones(tensor(2).shape[1])
    assert_same(stc.stream("ij,j->i", x, v, device="cpu:0"), in_core("ij,j->i", x, v))


def test_places_for_results_that_cannot_take_one() -> None:
    x, v = tensor(2), torch.ones(tensor(2).shape[1])
    n = x.shape[0]
    with stc.stream_kernel("ij,j->i", x, v, device="cpu") as s:
        with pytest.raises(stc.ShapeError, match="share memory"):
            s(v, out=torch.zeros(1).expand(n))
        with pytest.raises(stc.DeviceError, match="meta"):
            s(v, out=torch.zeros(n, device="meta"))
        with pytest.raises(stc.DtypeError, match="must be a dense tensor"):
            s(v, out=torch.zeros(n).to_sparse())
        wanted = torch.zeros(n, requires_grad=True)
        with pytest.raises(stc.TransformError, match="out= requires a gradient"):
            s(v, out=wanted)
        with torch.no_grad():
            assert s(v, out=wanted) is wanted


def test_operands_of_a_call_that_hold_no_dense_numbers() -> None:
    x, v = tensor(2), torch.ones(tensor(2).shape[1])
    with stc.stream_kernel("ij,j->i", x, v) as s:
        for call in (s, stc.compile("ij,j->i", x, v)):
            with pytest.raises(stc.DtypeError, match="must be dense"):
                call(v.to_sparse())
            with pytest.raises(stc.DeviceError, match="on meta"):
                call(v.to("meta"))


def test_streams_are_not_copied() -> None:
    x, v = tensor(2), torch.ones(tensor(2).shape[1])
    with stc.stream_kernel("ij,j->i", x, v) as s:
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="neither copied nor pickled"):
                copied(s)


def test_operands_that_give_only_their_sizes() -> None:
    x, v = tensor(2), torch.ones(tensor(2).shape[1])
    with stc.stream_kernel("ij,j->i", x, v.to("meta"), device="cpu") as s:
        assert_same(s(v), in_core("ij,j->i", x, v))


def test_transforms_are_refused() -> None:
    x, v = tensor(2), torch.ones(tensor(2).shape[1])
    with stc.stream_kernel("ij,j->i", x, v, device="cpu") as s:
        with pytest.raises(stc.TransformError, match="gives no gradients"):
            torch.func.jvp(s, (v,), (v,))
        with forward_ad.dual_level(), pytest.raises(stc.TransformError, match="gives no gradients"):
            s(forward_ad.make_dual(v, v))
        with pytest.raises(stc.TransformError, match="vmap"):
            torch.func.vmap(s)(torch.stack([v, v]))
        assert_same(s(v), in_core("ij,j->i", x, v))


@pytest.mark.parametrize("nnz", [0, 30])
@pytest.mark.parametrize("plan", ["nope", "bcb"])
def test_a_plan_that_is_none_is_refused_whatever_is_streamed(plan: str, nnz: int) -> None:
    x, b = tensor(nnz=nnz), torch.rand(SIZES["k"], 5)
    with pytest.raises(stc.PlanError, match=plan):
        stc.stream_kernel("ijk,kr->ijr", x, b, plan=plan, device="cpu")


SPACE = Budget('"a test" on cpu', total=0, tensors=0, streams=2, dense=10_000, row=64, finished=112)


@pytest.mark.parametrize("total", [8 << 20, 24 << 20, 80 << 30])
@pytest.mark.parametrize("streams", [1, 2, 64])
def test_room_is_left_for_blocks_of_memory_that_are_larger_than_their_tensors(total: int, streams: int) -> None:
    """Tensors of more than 1 MiB may each take 1 MiB more on a GPU."""
    limit = replace(SPACE, total=total, tensors=8, streams=streams).limit
    tensors = min(limit >> 20, 8 + streams)
    assert limit + (tensors << 20) < total
    assert limit > total // 2 - (1 << 17)


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("rows", [100, 20_000, None])
def test_what_a_budget_allows_is_within_the_limit_and_uses_it(rows: int | None, keeps: bool) -> None:
    kinds = set()
    for total in (12_000, 20_000, 40_000, 10**5, 3 * 10**5, 10**6, 10**7, 10**9):
        for streams in (1, 2, 5):
            own = replace(SPACE, total=total, streams=streams)
            try:
                chunk, numbered = own.cut(rows, CHUNK, keeps)
            except stc.OutOfMemoryError:
                kinds.add("none")
                continue
            kinds.add("whole" if numbered is None else "in pieces")
            result = own.result(rows or 0) if numbered is None else streams * numbered * own.row
            assert own.dense + result + streams * chunk <= total
            free = total - own.dense - (own.result(rows or 0) if numbered is None else 0)
            assert chunk >= max(SMALLEST, min(CHUNK, free // (2 * streams) - SMALLEST))
            if numbered is not None:
                assert streams * (numbered + 1) * own.row > free - streams * chunk
    assert kinds == {"none"} | ({"whole"} if rows is not None else set()) | ({"in pieces"} if keeps else set())


@pytest.mark.parametrize("window", [0, 10])
def test_what_fits_exactly_fits(window: int) -> None:
    made: Any = SimpleNamespace(largest=8192, window=window, copies=1)
    exact = SPACE.dense + 2 * 8192 + SPACE.result(30)
    assert replace(SPACE, total=exact).keeps(made, 30 - window)
    less = replace(SPACE, total=exact - 1)
    if window:
        assert not less.keeps(made, 30 - window)
        made.window = 1000
    with pytest.raises(stc.OutOfMemoryError, match=r"2 chunks 16,384, and the result.* 3,360; the limit is 29,743"):
        less.keeps(made, 30)


def test_bools_are_not_multiplied() -> None:
    x = stc.eye(3).bool()
    for stream in (stc.stream, stc.stream_kernel):
        for dtype in (torch.bool, torch.float32):
            with pytest.raises(stc.DtypeError, match=r"of bools, which are not multiplied: stream \.to"):
                stream("ij,jr->ir", x, torch.ones(3, 2, dtype=dtype))  # type: ignore[operator]
