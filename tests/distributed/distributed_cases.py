"""What ranks are asked to do in tests of `sparsetc.distributed`: `python distributed_cases.py RANK SIZE FOLDER`.

Four processes are started once, over gloo. Groups of 1, 2, 3 and 4 of them run every check; each rank writes what
became of each to ``FOLDER/RANK.json``. At the end one rank dies, and one does not come.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import pairwise, product
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from cases import TILED
from pyarrow import parquet as pyarrow_parquet
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import sparsetc as stc
from sparsetc import decomposition
from sparsetc import distributed as sd
from sparsetc.distributed.ranks import Ranks
from sparsetc.io import packed

SIZES = (1, 2, 3, 4)
PATIENCE = 5
"""Seconds that the group of the rank that does not come waits for it."""
CHECKS: dict[str, Callable[..., None]] = {}
FEW: set[str] = set()
F64 = torch.float64


def check(function: Callable[..., None]) -> Callable[..., None]:
    """A check of a group, called with its mesh and a folder."""
    CHECKS[function.__name__] = function
    return function


def few(function: Callable[..., None]) -> Callable[..., None]:
    """Decorator of a check that one rank, or three, add nothing to."""
    FEW.add(function.__name__)
    return function


def checked() -> list[tuple[str, int]]:
    """All checks, and the groups that run them."""
    return [(name, n) for n in SIZES for name in CHECKS if n % 2 == 0 or name not in FEW]


def tensor(shape: tuple[int, ...], dtype: torch.dtype = F64, density: float = 0.3, seed: int = 0) -> stc.SparseTensor:
    """The same on every rank."""
    g = torch.Generator().manual_seed(seed)
    kept = torch.rand(shape, generator=g) < density
    values = torch.rand(shape, generator=g, dtype=F64) * 4 + 1
    return stc.SparseTensor.from_dense((values * kept).to(dtype))


def dense(*shape: int, dtype: torch.dtype = F64, seed: int = 1) -> torch.Tensor:
    """The same on every rank."""
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=F64) * 3 + 1).to(dtype)


def whole(found: Any) -> torch.Tensor:
    """A result of any kind as a dense tensor."""
    if isinstance(found, sd.Sharded):
        found = found.gather()
    if isinstance(found, DTensor):
        found = found.full_tensor()
    return found.to_dense() if isinstance(found, stc.SparseTensor) else found


def verify(cut: sd.Cut) -> None:
    """Boundaries rise from 0 to the size of each mode, and each cell of the grid has one rank."""
    for n, b in zip(cut.shape, cut.bounds, strict=True):
        assert (b[0], b[-1], list(b)) == (0, n, sorted(b))
    assert sorted(cut.coordinates) == list(product(*map(range, cut.grid)))
    assert len(cut.nnz) == cut.size == prod(cut.grid)


def compare(
    x: stc.SparseTensor,
    s: sd.Sharded,
    equation: str,
    *operands: torch.Tensor,
    tol: float = 1e-12,
    gather: bool = False,
    **settings: Any,
) -> None:
    """An einsum of the sharded tensor, and torch's of the tensor, or, where dtypes or settings count, our own."""
    if x.dtype == F64:
        expected = torch.einsum(equation, x.to_dense(), *operands)
    else:
        expected = whole(stc.einsum(equation, x, *operands, **settings))
    found = whole(sd.einsum(equation, s, *operands, gather=gather, **settings))
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=tol, atol=tol)


def raises(kind: type[Exception] | tuple[type[Exception], ...], *said: str) -> Any:
    """What pytest's does."""
    import pytest

    return pytest.raises(kind, match=".*".join(said))


SHAPE = (13, 9, 7)
ALONG: tuple[Any, ...] = (None, 0, (0, 2))


@check
def shards_are_the_tensor(mesh: Any, folder: Path) -> None:
    x, ranks = tensor(SHAPE), Ranks(mesh)
    for along in (*ALONG, -1, 1, "ijk,k->ij", "...k,kr->...r"):
        s = sd.shard(x, along, mesh=mesh)
        verify(s.cut)
        assert s.shape == x.shape
        assert s.nnz == x.nnz
        assert s.cut.nnz[ranks.rank] == s.local.nnz
        assert s.local.is_coalesced
        assert s.local.shape == tuple(stop - start for start, stop in s.ranges)
        back = s.gather()
        assert torch.equal(back.coords, x.coords)
        assert torch.equal(back.values, x.values)
        assert f"{ranks.size} rank" in str(s.cut)
    assert sd.shard(x, 0, mesh=mesh).cut.modes == (() if ranks.size == 1 else (0,))


@check
def einsums_are_those_of_one_process(mesh: Any, folder: Path) -> None:
    x = tensor(SHAPE)
    a, b, c = (dense(n, 4, seed=m) for m, n in enumerate(SHAPE))
    u, v, w = (m[:, 0].contiguous() for m in (a, b, c))
    s = dense(7, 3, seed=8)
    cases: list[tuple[Any, ...]] = [
        ("ijk,jr,kr->ir", b, c), ("ijk,ir,kr->jr", a, c), ("ijk,ir,jr->kr", a, b), ("ijk,jr,kr->ri", b, c),
        ("ijk,k->ij", w), ("ijk,i->jk", u), ("ijk,j->ik", v), ("ijk,j,k->i", v, w), ("ijk,i,j,k->", u, v, w),
        ("ijk,jr,ks->irs", b, s), ("ijk,jr->irk", b), ("ijk,jr->rik", b), ("ijk,ir,jr,kr->ijk", a, b, c),
        ("ijk->", ), ("ijk->kij", ), ("ijk->j", ), ("...k,kr->...r", c), ("ijk,jr", b), ("ijk,jr->ijk", b[:1]),
    ]  # fmt: skip
    for along in {2: ALONG, 4: ALONG[2:]}.get(Ranks(mesh).size, ALONG[:1]):
        sharded = sd.shard(x, along, mesh=mesh)
        for number, (equation, *operands) in enumerate(cases):
            compare(x, sharded, equation, *operands, gather=bool((number + len(sharded.cut.modes)) % 2))
    for output in ("dense", "sparse"):
        compare(x, sharded, "ijk,k->ij", w, output=output)
        compare(x, sharded, "ijk->j", output=output)


@check
@few
def operations_are_those_of_one_process(mesh: Any, folder: Path) -> None:
    x, y = tensor(SHAPE), tensor(SHAPE[:2], seed=2)
    s, t = sd.shard(x, mesh=mesh), sd.shard(y, mesh=mesh)
    factors = [dense(n, 3, seed=n) for n in SHAPE]
    calls: list[tuple[Callable[..., Any], Any, Any, list[Any]]] = [
        *((stc.mttkrp, x, s, [factors, m]) for m in range(3)),
        (stc.ttmc, x, s, [factors, 1]),
        (stc.ttm, x, s, [factors[2].T, 2]),
        (stc.ttv, x, s, [dense(SHAPE[0]), 0]),
        (stc.spmm, y, t, [factors[1]]),
        (stc.sddmm, y, t, [factors[0], factors[1]]),
        (stc.contract, x, s, [factors[2], ([2], [0])]),
    ]
    for call, one, several, others in calls:
        torch.testing.assert_close(whole(call(several, *others)), whole(call(one, *others)))
    for found, expected in zip(stc.mttkrp(s, factors), stc.mttkrp(x, factors), strict=True):
        torch.testing.assert_close(whole(found), expected)
    with raises(stc.DistributedError, "alpha"):
        stc.contract(s, factors[2], ([2], [0]), alpha=2)


@check
@few
def any_operand_may_be_the_sharded_one(mesh: Any, folder: Path) -> None:
    x, b = tensor(SHAPE), dense(9, 4)
    s = sd.shard(x, mesh=mesh)
    torch.testing.assert_close(
        whole(sd.einsum("jr,ijk->ikr", b, s)), whole(stc.einsum("jr,ijk->ikr", b, x)), rtol=1e-12, atol=0
    )
    found = whole(sd.einsum(s, [0, 1, 2], b, [1, 3], [0, 2, 3]))
    torch.testing.assert_close(found, whole(stc.einsum("ijk,jr->ikr", x, b)), rtol=1e-12, atol=0)
    torch.testing.assert_close(whole(sd.einsum("ijk,jr->ik", s, b.numpy())), whole(stc.einsum("ijk,jr->ik", x, b)))


@check
@few
def dtypes_and_their_sums(mesh: Any, folder: Path) -> None:
    tolerances = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.int64):
        x, v = tensor((12, 10), dtype), dense(10, 3, dtype=dtype)
        for along in (0, 1):
            s = sd.shard(x, along, mesh=mesh)
            assert torch.equal(whole(s), x.to_dense())
            compare(x, s, "ij,jr->ir", v, tol=tolerances.get(dtype, 1e-5))
    for dtype in (torch.int8, torch.int16, torch.int32):
        x = tensor((12, 10), dtype, 0.2)
        s = sd.shard(x, 1, mesh=mesh)
        compare(x, s, "ij,jr->ir", torch.ones(10, 2, dtype=dtype), gather=True)  # torch's gathering takes no int16
        compare(x, s, "ij->")


@check
@few
def an_integer_sum_that_does_not_fit_fails_everywhere(mesh: Any, folder: Path) -> None:
    x = stc.SparseTensor([[0, 0, 0, 1], [0, 1, 2, 3]], torch.tensor([100, 100, 100, 1], dtype=torch.int8), (5, 4))
    s = sd.shard(x, 1, mesh=mesh)
    with raises(stc.SparsetcError, "cannot"):
        sd.einsum("ij,jr->ir", s, torch.ones(4, 2, dtype=torch.int8))
    compare(x, s, "ij,jr->ir", torch.zeros(4, 2, dtype=torch.int8))  # ranks are still together
    x = stc.SparseTensor([[0, 0, 0, 0, 1], [0, 1, 2, 3, 3]], torch.tensor([2**62] * 4 + [1]), (5, 4))
    s = sd.shard(x, 1, mesh=mesh)
    with raises((stc.DtypeError, stc.DistributedError), "past 64 bits"):  # the rank's own error, or which one's it is
        sd.einsum("ij,jr->ir", s, torch.ones(4, 2, dtype=torch.int64))
    compare(x, s, "ij,jr->ir", torch.tensor([[1, 0], [-1, 0], [1, 1], [0, 0]]))


@check
@few
def every_plan(mesh: Any, folder: Path) -> None:
    x = tensor((40, 33, 20), torch.float32, 0.2)
    b, c = dense(33, 8, dtype=torch.float32), dense(20, 8, dtype=torch.float32)
    m, n = tensor((48, 40), torch.float32, 0.2), dense(40, 8, dtype=torch.float32)
    s, t = sd.shard(x, (0, 1), mesh=mesh), sd.shard(m, mesh=mesh)
    for plan in ("auto", "coo", "rows", "fiber", "hls", "mm-csf"):
        compare(x, s, "ijk,jr,kr->ir", b, c, tol=1e-4, plan=plan)
    for plan in ("coo", "rows", "dense", *TILED):
        compare(m, t, "ij,jr->ir", n, tol=1e-4, plan=plan)
    compare(x, s, "ijk,jr,kr->ir", b, c, tol=1e-4, plan=stc.plans.plan_hls(2), deterministic=True)


@check
def a_plan_that_some_shares_have_no_use_for(mesh: Any, folder: Path) -> None:
    lengths = ([70] + [5] * 14) * 3 + [5] * 28  # long rows in all parts but the last
    x = stc.SparseTensor.from_dense((torch.arange(100) < torch.tensor(lengths)[:, None]) * dense(73, 100))
    s, b = sd.shard(x, 0, mesh=mesh), dense(100, 3)
    compare(x, s, "ij,jr->ir", b, plan="coo+rows")
    short = stc.SparseTensor.from_dense(x.to_dense()[1:15])
    with raises(stc.PlanError, "coo.rows"):  # no share has
        sd.einsum("ij,jr->ir", sd.shard(short, 0, mesh=mesh), b, plan="coo+rows")


@check
@few
def tensors_of_every_kind(mesh: Any, folder: Path) -> None:
    empty = stc.SparseTensor(torch.zeros((3, 0), dtype=torch.int64), torch.zeros(0, dtype=F64), (4, 5, 6))
    one = stc.SparseTensor([[3], [1], [2]], torch.ones(1, dtype=F64), (4, 5, 6))
    for x in (empty, one):
        for along in (None, 0):
            s = sd.shard(x, along, mesh=mesh)
            assert torch.equal(whole(s), x.to_dense())
            compare(x, s, "ijk,jr,kr->ir", dense(5, 2), dense(6, 2))
            compare(x, s, "ijk,i->jk", dense(4))
    vector = tensor((17,))
    compare(vector, sd.shard(vector, mesh=mesh), "i,i->", dense(17))
    compare(vector, sd.shard(vector, mesh=mesh), "i,i->i", dense(17))
    square = tensor((8, 8, 3), density=0.6)
    compare(square, sd.shard(square, mesh=mesh), "iij,j->i", dense(3))
    compare(square, sd.shard(square, 0, mesh=mesh), "iij->ij")
    high = tensor((4, 3, 5, 2, 3))
    compare(high, sd.shard(high, mesh=mesh), "abcde,cr,er->abdr", dense(5, 2), dense(3, 2))


@check
@few
def sides_shorter_than_the_ranks_are_many(mesh: Any, folder: Path) -> None:
    """Also of none: a rank may have one element to send, with the strides of a larger result, or nothing."""
    equations = "ki,ij->kj", "ij,jk->ki", "ij,jk->jki", "ij,ki->jk", "ij,k->ijk", "ij->ji", "ij->"
    for shape in ((3, 3), (1, 4), (4, 1), (1, 1), (0, 3), (3, 0)):
        x, sizes = tensor(shape, density=0.6), {**dict(zip("ij", shape, strict=True)), "k": 3}
        s = sd.shard(x, mesh=mesh)
        for equation in equations:
            terms = equation.partition("->")[0].split(",")
            operands = [s if term == "ij" else dense(*(sizes[c] for c in term)) for term in terms]
            expected = torch.einsum(equation, *(x.to_dense() if o is s else o for o in operands))
            torch.testing.assert_close(whole(sd.einsum(equation, *operands)), expected, rtol=1e-12, atol=0)
    assert torch.equal(Ranks(mesh).first(dense(3, 2).T), dense(3, 2).T)


@check
@few
def dense_modes_and_blocks(mesh: Any, folder: Path) -> None:
    coords = tensor((9, 8)).coords
    x = stc.SparseTensor(coords, dense(coords.shape[1], 5), (9, 8, 5))
    for along in (None, 1):
        s = sd.shard(x, along, mesh=mesh)
        assert torch.equal(whole(s), x.to_dense())
        compare(x, s, "ijh,jr->irh", dense(8, 3))
        compare(x, s, "ijh,hr->ijr", dense(5, 3))
        compare(x, s, "ijh,i->jh", dense(9))
    with raises(stc.ShapeError, "dense"):
        sd.shard(x, 2, mesh=mesh)
    blocks = stc.SparseTensor.from_blocks([[0, 1, 2], [1, 0, 2]], dense(3, 2, 2), (6, 6))
    compare(blocks, sd.shard(blocks, mesh=mesh), "ij,jr->ir", dense(6, 3))


@check
def rows_that_are_uneven_are_divided_into_parts(mesh: Any, folder: Path) -> None:
    ones = torch.arange(40)
    x = stc.SparseTensor(torch.stack((torch.zeros_like(ones), ones)), dense(40), (3, 40))
    s = sd.shard(x, 0, mesh=mesh)
    assert s.cut.imbalance <= 1.1
    assert s.cut.grid[-1] == s.ranks.size
    compare(x, s, "ij,jr->ir", dense(40, 3))
    compare(x, s, "ij,j->ij", dense(40))
    compare(x, s, "ij->j")
    path = folder / f"uneven{s.ranks.size}.parquet"
    written(path, x, s)
    compare(x, sd.shard(path, 0, mesh=mesh), "ij,jr->ir", dense(40, 3))


def written(path: Path, x: stc.SparseTensor, s: sd.Sharded) -> None:
    """A file that the first rank writes."""
    if s.ranks.rank == 0:
        stc.write(path, x)
    s.ranks.objects(None)


@check
def packed_files_are_read_in_parts(mesh: Any, folder: Path) -> None:
    x = tensor((50, 40, 90), torch.float32, 0.9)
    assert x.nnz > 2 * 65536
    s = sd.shard(x, 0, mesh=mesh)
    path = folder / f"big{s.ranks.size}.parquet"
    written(path, x, s)
    read: list[tuple[int, int]] = []
    own = stc.PackedFile.block

    def noted(file: Any, start: int, stop: int) -> Any:
        read.append((start, stop))
        return own(file, start, stop)

    for along in (0, 2, None):
        read.clear()
        stc.PackedFile.block = noted  # type: ignore[method-assign]
        try:
            found = sd.shard(path, along, mesh=mesh)
        finally:
            stc.PackedFile.block = own  # type: ignore[method-assign]
        parts = sorted(part for parts in s.ranks.objects(list(read)) for part in parts)
        assert parts[0][0] == 0
        assert parts[-1][1] == x.nnz
        assert all(one[1] == other[0] for one, other in pairwise(parts))
        assert found.local.is_coalesced
        assert found.cut.imbalance < 1.2
        back = found.gather()
        assert torch.equal(back.coords, x.coords)
        assert torch.equal(back.values, x.values)
    with stc.open_packed(path) as file:
        assert sd.shard(file, mesh=mesh).nnz == x.nnz


@check
def scattered_nonzeros_are_summed(mesh: Any, folder: Path) -> None:
    ranks = Ranks(mesh)
    parts = [tensor(SHAPE, seed=r) for r in range(ranks.size)]
    expected = sum(part.to_dense() for part in parts)
    for along in (None, 1):
        s = sd.shard(parts[ranks.rank], along, mesh=mesh, scattered=True)
        assert torch.allclose(whole(s), expected)
        assert s.nnz == int((expected != 0).sum())


@check
def sparse_results_are_operands(mesh: Any, folder: Path) -> None:
    x = tensor((6, 9, 7, 5))
    for along in (None, 0, 3):
        y = sd.einsum("ijkl,i->jkl", sd.shard(x, along, mesh=mesh), dense(6))
        assert isinstance(y, sd.Sharded)
        verify(y.cut)
        expected = stc.einsum("ijkl,i->jkl", x, dense(6))
        assert y.nnz == expected.nnz
        if along == 0:  # which is summed: entries are dealt evenly
            assert max(y.cut.nnz) == -(-y.nnz // y.ranks.size)
        compare(expected, y, "jkl,kr,lr->jr", dense(7, 3), dense(5, 3))
        again = y.with_values(2 * y.local.values)
        compare(expected.with_values(2 * expected.values), again, "jkl,l->jk", dense(5))


@check
def kernels_say_what_they_send(mesh: Any, folder: Path) -> None:
    x, b, c = tensor(SHAPE), dense(9, 4), dense(7, 4)
    s = sd.shard(x, 0, mesh=mesh)
    kernel = sd.compile("ijk,jr,kr->ir", s, b, c)
    for scale in (1, 2):
        expected = stc.einsum("ijk,jr,kr->ir", x, scale * b, c)
        torch.testing.assert_close(whole(kernel(scale * b, c)), expected, rtol=1e-12, atol=0)
    said = kernel.explain()
    assert said.placed == s.cut.modes
    assert ("all-to-all" in str(said)) == (s.ranks.size > 1)
    assert "plan" in str(said)
    rows, whole_rows = kernel(b, c), sd.compile("ijk,jr,kr->ir", s, b, c, gather=True)(b, c)
    assert torch.equal(whole(rows), whole_rows)
    assert whole_rows.shape == (13, 4)
    assert type(whole_rows) is torch.Tensor
    if mesh is not None:
        assert isinstance(rows, DTensor)
        assert rows.shape == (13, 4)
        assert rows.to_local().shape == torch.empty(13, 4).chunk(s.ranks.size)[s.ranks.rank].shape
    across = sd.compile("ijk,ir,kr->jr", s, dense(13, 4), c).explain()
    assert (across.nbytes > 0) == (s.ranks.size > 1)
    assert sd.compile("ijk,ir,jr,kr->ijk", s, dense(13, 4), b, c).explain().nbytes == 0


@check
@few
def a_dimension_of_a_mesh_is_a_mesh(mesh: Any, folder: Path) -> None:
    if Ranks(mesh).size < max(SIZES):
        return  # a mesh of several dimensions is made by all processes
    both, x = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")), tensor(SHAPE)
    for name in ("a", "b"):
        s = sd.shard(x, mesh=both[name])
        assert s.ranks.size == 2
        compare(x, s, "ijk,jr,kr->ir", dense(9, 4), dense(7, 4))
        assert sd.einsum("ijk,k->i", s, dense(7)).device_mesh == both[name]
        same_models(
            sd.cp_als(s, 2, n_iter_max=2, random_state=0), decomposition.cp_als(x, 2, n_iter_max=2, random_state=0)
        )
    with raises(stc.DistributedError, "DeviceMesh of one dimension"):
        sd.shard(x, mesh=both)


@check
@few
def rows_that_are_even_stay_where_they_are(mesh: Any, folder: Path) -> None:
    x, b, c = tensor((14, 9, 7), density=1), dense(9, 4), dense(7, 4)
    s = sd.shard(x, 0, mesh=mesh)
    n = s.ranks.size
    kernel = sd.compile("ijk,jr,kr->ir", sd.shard(tensor((4 * n, 9, 7), density=1), 0, mesh=mesh), b, c)
    assert s.ranks.objects(kernel.explain().nbytes) == [0] * n
    assert "nothing is sent" in str(kernel.explain())
    compare(x, s, "ijk,jr,kr->ir", b, c)


@check
@few
def results_are_operands(mesh: Any, folder: Path) -> None:
    x = tensor((9, 7, 9))
    s, b, c = sd.shard(x, mesh=mesh), dense(7, 4), dense(9, 4)
    rows = sd.einsum("ijk,jr,kr->ir", s, b, c)
    expected = stc.einsum("ijk,jr,kr->jr", x, b, whole(rows))
    kernel = sd.compile("ijk,jr,kr->jr", s, b, rows)
    for found in (sd.einsum("ijk,jr,kr->jr", s, b, rows), kernel(b, rows)):
        torch.testing.assert_close(whole(found), expected, rtol=1e-12, atol=0)


def same_models(one: decomposition.CP, other: decomposition.CP, tol: float = 1e-7) -> None:
    """Fits and factors."""
    assert len(one.fits) == len(other.fits)
    torch.testing.assert_close(torch.tensor(one.fits), torch.tensor(other.fits), rtol=0, atol=tol)
    for a, b in zip((one.weights, *one.factors), (other.weights, *other.factors), strict=True):
        torch.testing.assert_close(a, b, rtol=100 * tol, atol=100 * tol)


def alone(mesh: Any, x: stc.SparseTensor, rank: int, **settings: Any) -> decomposition.CP:
    """What one process finds, which is the first: the others have its model."""
    ranks = Ranks(mesh)
    found = decomposition.cp_als(x, rank, **settings) if ranks.rank == 0 else None
    return ranks.objects(found)[0]  # type: ignore[no-any-return]


@check
def decompositions_are_those_of_one_process(mesh: Any, folder: Path) -> None:
    x, own, n = tensor(SHAPE), partial(alone, mesh), Ranks(mesh).size
    start = own(x, 4, n_iter_max=2, random_state=1)
    cases: list[dict[str, Any]] = [
        {}, {"nonnegative": True}, {"l2_reg": 0.1, "normalize_factors": False}, {"init": start, "fixed_modes": [1]},
        {"init": start.factors}, {"tol": 1e-3},
    ]  # fmt: skip
    cuts: dict[Any, list[dict[str, Any]]] = {None: cases if n == 2 else cases[:2]}
    cuts |= {0: cases[:1], (1, 2): cases[1:2]} if n in (2, 4) else {}
    for along, some in cuts.items():
        s = sd.shard(x, along, mesh=mesh)
        for case in some:
            settings = {"n_iter_max": 5, "tol": 0, "random_state": 3, **case}
            found, expected = sd.cp_als(s, 4, **settings), own(x, 4, **settings)
            same_models(found, expected)
            assert found.stopped == expected.stopped
            if "fixed_modes" in case:
                assert torch.equal(found.factors[1], start.factors[1])
    going = sd.cp_als(s, 4, n_iter_max=2, tol=0, random_state=3)
    going = sd.cp_als(s, 4, n_iter_max=3, tol=0, init=going)
    expected = own(x, 4, n_iter_max=5, tol=0, random_state=3)
    same_models(going, decomposition.CP(expected.weights, expected.factors, expected.fits[2:]))
    for other in (tensor((15, 4)), tensor((8, 6, 7, 3), torch.float32))[: 2 if n in (2, 4) else 0]:
        s, tol = sd.shard(other, mesh=mesh), 1e-7 if other.dtype == F64 else 1e-4
        same_models(sd.cp_als(s, 2, n_iter_max=3, random_state=0), own(other, 2, n_iter_max=3, random_state=0), tol)


@check
@few
def decompositions_of_odd_tensors(mesh: Any, folder: Path) -> None:
    one = stc.SparseTensor([[3], [1]], torch.ones(1, dtype=F64), (4, 5))
    zero = one.with_values(torch.zeros(1, dtype=F64))
    coords = tensor((9, 8)).coords
    hybrid = stc.SparseTensor(coords, dense(coords.shape[1], 5), (9, 8, 5))
    rows = tensor((3, 40), density=0.6)
    assert Ranks(mesh).size < 4 or sd.shard(rows, 0, mesh=mesh).cut.grid[-1] > 1  # four ranks, three rows
    for x in (one, zero, hybrid, rows):
        found = sd.cp_als(sd.shard(x, 0, mesh=mesh), 2, n_iter_max=3, random_state=0)
        expected = alone(mesh, x, 2, n_iter_max=3, random_state=0)
        # Two components of a tensor of rank 1 make singular systems: there rounding is seen on one process too.
        tol = 1e-4 if x is one else 1e-7
        torch.testing.assert_close(torch.tensor(found.fits), torch.tensor(expected.fits), rtol=0, atol=tol)
        torch.testing.assert_close(found.to_dense(), expected.to_dense(), rtol=100 * tol, atol=100 * tol)
    s = sd.shard(tensor(SHAPE), mesh=mesh)
    drawn = sd.cp_als(s, 2, n_iter_max=2)  # by each rank's own generator: that of rank 0
    assert len({str(fits) for fits in s.ranks.objects(drawn.fits)}) == 1
    bad = stc.SparseTensor([[0, 1], [0, 3]], torch.tensor([1.0, float("nan")]), (2, 5))
    with raises(stc.FormatError, "infinite or NaN"):
        sd.cp_als(sd.shard(bad, mesh=mesh), 2)
    with raises(stc.DecompositionError, "no mask"):
        sd.cp_als(s, 2, mask="observed")
    with raises(stc.DecompositionError, "'random', a CP model"):
        sd.cp_als(s, 2, init="nvecs")


@check
def any_rank_may_end_a_decomposition(mesh: Any, folder: Path) -> None:
    s = sd.shard(tensor(SHAPE), mesh=mesh)
    last, seen = s.ranks.size - 1, []

    def third(model: decomposition.CP, error: float) -> bool:
        seen.append(model.factors[0].shape)
        return s.ranks.rank == last and len(seen) == 3

    model = sd.cp_als(s, 2, tol=0, random_state=0, callback=third)
    assert (model.stopped, len(model.fits), seen[0]) == ("callback", 3, (13, 2))

    def interrupt(model: decomposition.CP, error: float) -> None:
        seen.append(None)
        if s.ranks.rank == last and seen.count(None) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    model = sd.cp_als(s, 2, tol=0, random_state=0, callback=interrupt)
    assert model.stopped == "interrupted"
    assert len(model.fits) in (2, 3)
    if s.ranks.size > 1:
        with raises(stc.DistributedError, "callback: rank 0 of", "failed: ZeroDivisionError"):
            sd.cp_als(s, 2, callback=lambda model, error: 1 // s.ranks.rank)


@check
@few
def what_differs_between_ranks_is_named(mesh: Any, folder: Path) -> None:
    x, ranks = tensor(SHAPE), Ranks(mesh)
    first = ranks.rank == 0
    s = sd.shard(x, mesh=mesh)
    if ranks.size > 1:
        with raises(stc.DistributedError, "different arguments; along: rank 0: 0; rank.*: 1"):
            sd.shard(x, 0 if first else 1, mesh=mesh)
        with raises(stc.DistributedError, "different arguments; shape"):
            sd.shard(x if first else tensor((5, 5)), mesh=mesh)
        for values in (2 * x.values, x.values.flip(0)):
            with raises(stc.DistributedError, "different arguments; the bits of values: rank 0: "):
                sd.shard(x if first else x.with_values(values), mesh=mesh)
        moved = stc.SparseTensor(x.coords.flip(1), x.values, x.shape)
        with raises(stc.DistributedError, "different arguments; the bits of"):
            sd.shard(x if first else moved, mesh=mesh)
        with raises(stc.DistributedError, "different arguments; equation"):
            sd.einsum("ijk,k->ij" if first else "ijk,k->ik", s, dense(7))
        with raises(stc.DistributedError, "different arguments; operands"):
            sd.einsum("ijk,kr->ijr", s, dense(7, 2 + first))
        with raises(stc.DistributedError, "different arguments; settings"):
            sd.compile("ijk,k->ij", s, dense(7), plan="coo" if first else "rows")
        with raises(stc.DistributedError, "different arguments; settings: rank 0: .*memory_limit"):
            sd.einsum("ijk,k->ij", s, dense(7), **({"memory_limit": "1GB"} if first else {}))
        for other in (dense(7).flip(0), dense(7) + torch.eye(7)[6]):
            with raises(stc.DistributedError, "different arguments; the bits of operand 3: rank 0: "):
                sd.einsum("j,ijk,k->ij", dense(9), s, dense(7) if first else other)
        with stc.options(memory_limit="1GB" if first else "2GB", cache_dir=folder / f"sources-{ranks.rank}"):
            compare(x, s, "ijk,k->ij", dense(7))  # which may differ
        failed = f"compile: rank {ranks.size - 1} of {ranks.size} failed: OutOfMemoryError"
        limit = 100 if ranks.rank == ranks.size - 1 else None
        with raises(stc.DistributedError, failed), stc.options(memory_limit=limit):
            sd.einsum("ijk,jr,kr->ir", s, dense(9, 4), dense(7, 4))
        with raises(stc.DistributedError, "different arguments; rank: rank 0: 2"):
            sd.cp_als(s, 2 if first else 3)
    compare(x, s, "ijk,k->ij", dense(7))


@check
def what_fails_on_one_rank_is_said_on_all(mesh: Any, folder: Path) -> None:
    x, ranks = tensor((50, 40, 90), torch.float32, 0.9), Ranks(mesh)
    s, last = sd.shard(x, 0, mesh=mesh), ranks.size - 1
    path = folder / f"damaged{ranks.size}.parquet"
    if ranks.rank == 0:
        with mock.patch.object(packed, "NUMBERS", 1 << 17):  # so that each rank reads row groups of its own
            stc.write(path, x)
        about = pyarrow_parquet.read_metadata(path)
        with open(path, "r+b") as file:
            file.seek(about.row_group(about.num_row_groups - 1).column(3).data_page_offset + 1000)
            file.write(b"\xff" * 64)
    ranks.objects(None)
    if ranks.size == 1:
        with raises(stc.IOFormatError, "damaged"):
            sd.shard(path, mesh=mesh)
        return
    with raises(stc.DistributedError, f"shard: rank {last} of {ranks.size} failed: IOFormatError", "damaged"):
        sd.shard(path, mesh=mesh)
    with raises(stc.DistributedError, f"shard: rank {last} of", "FileNotFoundError"):
        sd.shard(path if ranks.rank < last else folder / "absent.parquet", mesh=mesh)
    own = sd.shard.__module__
    module = sys.modules[own]
    kind = module.SparseTensor  # type: ignore[attr-defined]

    def lacking(*args: Any, **settings: Any) -> Any:
        if ranks.rank == last:
            raise MemoryError("std::bad_alloc")
        return kind(*args, **settings)

    module.SparseTensor = lacking  # type: ignore[attr-defined]
    try:
        with raises(stc.DistributedError, f"rank {last} of {ranks.size} failed: MemoryError"):
            sd.shard(x, mesh=mesh)
    finally:
        module.SparseTensor = kind  # type: ignore[attr-defined]
    assert sd.shard(x, mesh=mesh).nnz == x.nnz  # ranks are still together
    assert s.nnz == x.nnz
    v = dense(90, dtype=torch.float32)
    for wrong, kind in (
        (v.clone().requires_grad_(), "TransformError"),
        (v.to("meta"), "DeviceError"),
        (v.to_sparse(), "DtypeError"),
    ):
        for _ in range(2):  # the kernel is kept after the first
            with raises(stc.DistributedError, f"einsum: rank {last} of {ranks.size} failed: {kind}"):
                sd.einsum("ijk,k->i", s, wrong if ranks.rank == last else v)
            sd.einsum("ijk,k->i", s, v)


@check
@few
def what_fails_on_all_ranks_keeps_its_kind(mesh: Any, folder: Path) -> None:
    x = tensor(SHAPE)
    s = sd.shard(x, mesh=mesh)
    with raises(stc.EquationError, "no operand has"):
        sd.einsum("ijk,k->q", s, dense(7))
    with raises(stc.ShapeError, "size 6|shape"):
        sd.einsum("ijk,k->ij", s, dense(6))
    with raises(stc.EquationError, "one sparse operand"):
        sd.einsum("ijk,ijk->i", s, s)
    with raises(stc.DistributedError, "drop_zeros"):
        sd.einsum("ijk,k->ij", s, dense(7), drop_zeros=True)
    with raises(stc.DistributedError, "reduce='amax'", "gather"):
        sd.einsum("ijk,k->ij", s, dense(7), reduce="amax")
    with raises(stc.KeywordError, "takes no gather"):
        sd.einsum("ijk,k->ij", x, dense(7), gather=True)
    with raises(stc.PlanError, "no plan is called"):
        sd.einsum("ijk,k->ij", s, dense(7), plan="nothing")
    for along in (3, 1.5, (0, "1")):
        with raises(stc.ShapeError, "shard: a tensor of 3 modes has no mode"):
            sd.shard(x, along, mesh=mesh)  # type: ignore[arg-type]
    with raises(stc.DtypeError, "must be sparse"):
        sd.shard(dense(3, 4), mesh=mesh)
    with raises(stc.OutOfMemoryError, "bytes"):
        sd.einsum("ijk,jr,kr->ir", s, dense(9, 4), dense(7, 4), memory_limit=200, gather=True)
    with raises(stc.TransformError, "no gradients"):
        sd.einsum("ijk,k->ij", s, dense(7).requires_grad_())
    with forward_ad.dual_level(), raises(stc.TransformError, "no gradients"):
        sd.einsum("ijk,k->i", s, forward_ad.make_dual(dense(7), dense(7)))
    for wrong in (None, dense(7).to_sparse()):
        with raises(stc.DtypeError, "must be"):
            sd.einsum("ijk,k->ij", s, wrong)
    kernel = sd.compile("ijk,kr->ijr", s, dense(7, 2))
    assert torch.equal(whole(kernel(dense(7, 2).numpy())), whole(kernel(dense(7, 2))))
    with raises(stc.DtypeError, "must be dense"):
        kernel(dense(7, 2).to_sparse())
    with raises(stc.ShapeError, "must have shape"):
        kernel(dense(6, 2))
    with raises(stc.EquationError, "takes 1 dense operand"):
        kernel()


def lost(rank: int, dying: Any, missing: Any, folder: Path) -> None:
    """Rank 1 dies while rank 0 works with it; rank 2 does not come to rank 0 in time."""
    x = tensor(SHAPE)
    if rank < 2:
        dying = DeviceMesh.from_group(dying, "cpu")
    if rank in (0, 2):
        missing = DeviceMesh.from_group(missing, "cpu")
    if rank == 1:
        s = sd.shard(x, mesh=dying)
        sd.cp_als(s, 2, tol=0, random_state=0, callback=lambda model, error: len(model.fits) == 2 and os._exit(7))
    if rank == 2:
        sd.shard(x, mesh=missing)
        while not (folder / "missed").exists():
            time.sleep(0.1)
    if rank != 0:
        return
    later = sd.shard(x, mesh=missing)
    s = sd.shard(x, mesh=dying)
    with raises(stc.DistributedError, "rank 0 of 2: ", "another rank has failed, died, or did not come"):
        sd.cp_als(s, 2, tol=0, random_state=0, callback=lambda model, error: False)
    started = time.perf_counter()
    with raises(stc.DistributedError, "did not come within the group's timeout"):
        sd.einsum("ijk,k->ij", later, dense(7))
    assert time.perf_counter() - started < 60  # and not the two minutes of the other groups
    (folder / "missed").touch()


def main(rank: int, size: int, folder: Path) -> None:
    """One rank."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/init", rank=rank, world_size=size, timeout=timedelta(seconds=120)
    )
    groups = [dist.new_group(list(range(n))) for n in SIZES[:-1]]
    meshes: dict[int, Any] = {n: DeviceMesh.from_group(groups[n - 1], "cpu") for n in SIZES[:-1] if rank < n}
    meshes[size] = None
    dying = dist.new_group([0, 1])
    missing = dist.new_group([0, 2], timeout=timedelta(seconds=PATIENCE))
    became: dict[str, str] = {}
    for name, n in checked():
        if rank < n:
            became[f"{name}-{n}"] = _said(CHECKS[name], meshes[n], folder)
    became["lost-3"] = _said(lost, rank, dying, missing, folder)
    (folder / f"{rank}.json").write_text(json.dumps(became))
    os._exit(0)  # groups that lost a rank cannot be left in order


def _said(function: Callable[..., None], *args: Any) -> str:
    try:
        function(*args)
    except BaseException:  # pytest's own failures too
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
