"""Streams natively on a GPU: chunks in pinned memory and in files, within the memory limit, copies behind kernels."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from test_stream import EQUATIONS, PLANS, assert_same, operands, tensor

import sparsetc as stc

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


SOME = ("mttkrp", "ttmc", "ttm, sparse", "ttv of a middle mode, turned", "sampled")
"""Equations that every plan is tried on; natively, each takes seconds to compile."""


@pytest.mark.parametrize(
    ("plan", "name"), [*((p, n) for p in PLANS for n in SOME), *(("auto", n) for n in EQUATIONS if n not in SOME)]
)
def test_as_in_core(plan: str, name: str, tmp_path: Path) -> None:
    equation, path = EQUATIONS[name], tmp_path / "x"
    x, dense = tensor(), operands(equation)
    expected = stc.einsum(equation, x, *dense, plan="coo")
    try:
        stc.compile(equation, x, *dense, plan=plan, backend="triton")  # which compiles nothing
    except stc.PlanError:
        pytest.skip("the plan is not for this einsum")
    with stc.stream_kernel(equation, x, *dense, plan=plan, chunk_bytes=1 << 18) as s:
        assert s.device.type == "cuda"
        found = s(*(d.cuda() for d in dense))
        assert found.device == s.device
        assert_same(found, expected)
        assert_same(s(*dense), expected)  # which are moved there
        s.save(path)
    with stc.open_stream(path) as s:
        assert_same(s(*dense), expected)
        assert_same(s(*dense), expected)


@pytest.mark.parametrize("packed_on", ["cpu", "cuda"])
@pytest.mark.parametrize("equation", ["ijklm,jr,kr->ir", "ijklm,k->ijlm", "ijklm,k->lmj"])
def test_many_chunks(equation: str, packed_on: str) -> None:
    x, dense = tensor(5, 20_000), operands(equation)
    expected = stc.einsum(equation, x, *dense)
    for streams in (1, 2, 3, 5):
        for order in ("size", "given"):
            given = {"streams": streams, "order": order, "packed_on": packed_on, "chunk_bytes": 4096, "plan": "coo"}
            with stc.stream_kernel(equation, x, *dense, **given) as s:
                assert s.chunks > 5
                for _ in range(3):
                    assert_same(s(*dense), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int32])
def test_dtypes(dtype: torch.dtype) -> None:
    x, dense = tensor(5, 4000, dtype), operands("ijklm,jr,kr->ir", dtype)
    expected = stc.einsum("ijklm,jr,kr->ir", x, *dense)
    assert_same(stc.stream("ijklm,jr,kr->ir", x, *dense, plan="coo", chunk_bytes=4096), expected)


def large(nnz: int = 4_000_000) -> stc.SparseTensor:
    """A tensor of 64 MB of coordinates and values in 32 bits."""
    g = torch.Generator().manual_seed(0)
    coords = torch.stack([torch.randint(n, (nnz,), generator=g) for n in (20_000, 3000, 500)])
    return stc.SparseTensor(coords, torch.randint(-3, 4, (nnz,), generator=g).float(), (20_000, 3000, 500))


@pytest.mark.parametrize("equation", ["ijk,jr,kr->ir", "ijk,k->ij", "ijk,j->ki", "ijk,ir,jr,kr->ijk"])
@pytest.mark.parametrize("limit", ["8MiB", "24MiB", "300MiB"])
def test_memory_stays_below_the_limit(equation: str, limit: str) -> None:
    x, most = large(), int(limit[:-3]) << 20
    g = torch.Generator().manual_seed(1)
    sizes = {"i": 20_000, "j": 3000, "k": 500, "r": 8}
    terms = equation.split("->")[0].split(",")[1:]
    dense = [torch.randint(-2, 3, [sizes[c] for c in t], generator=g).float() for t in terms]
    expected = stc.einsum(equation, x, *dense, plan="coo")
    with stc.stream_kernel(equation, x, *dense, plan="coo", memory_limit=limit) as s:
        assert s.device_bytes <= most
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        found = s(*dense)
        assert torch.cuda.max_memory_allocated() - before <= most
        assert (found.device.type == "cuda") == s.resident
        assert_same(found, expected)


def test_nothing_is_held_once_it_is_closed() -> None:
    x, dense = large(), [torch.rand(3000, 8), torch.rand(500, 8)]
    stc.stream("ijk,jr,kr->ir", x, *dense)  # what compiling holds
    before = torch.cuda.memory_allocated()
    with stc.stream_kernel("ijk,jr,kr->ir", x, *dense, chunk_bytes="4MiB") as s:
        s(*dense)
    del s
    assert torch.cuda.memory_allocated() <= before


@pytest.mark.parametrize("error", [RuntimeError("no such chunk"), KeyboardInterrupt()])
def test_a_failing_chunk_leaves_nothing(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    from sparsetc.streaming.engine import Engine

    x, dense = large(), [torch.rand(3000, 8), torch.rand(500, 8)]
    out = torch.full((20_000, 8), 7.0)
    with stc.stream_kernel("ijk,jr,kr->ir", x, *dense, chunk_bytes="2MiB") as s:
        expected = s(*dense)
        find, count = Engine._call, [0]

        def found(self, *given):
            count[0] += 1
            if count[0] == 4:
                raise error
            return find(self, *given)

        with monkeypatch.context() as patch:
            patch.setattr(Engine, "_call", found)
            with pytest.raises(type(error)):
                s(*dense, out=out)
        assert bool((out == 7).all())
        torch.testing.assert_close(s(*dense, out=out), expected.cpu(), rtol=1e-4, atol=1e-3)


def test_copies_hide_behind_kernels() -> None:
    x, dense = large(), [torch.rand(3000, 64, device="cuda"), torch.rand(500, 64, device="cuda")]
    with stc.stream_kernel("ijk,jr,kr->ir", x, *dense, chunk_bytes="8MiB", streams=3) as s:
        for _ in range(3):
            s(*dense)
        times = s.timeline()
        copies = [t.copy for t in times]
        assert all(after[0] >= before[1] - 0.01 for before, after in itertools.pairwise(copies))
        shared = sum(max(0.0, min(t.kernel[1], b) - max(t.kernel[0], a)) for t in times for a, b in copies)
        assert shared > 0


def test_deterministic_sums_are_refused() -> None:
    x, dense = tensor(), operands("ijk,jr,kr->ir")
    with pytest.raises(stc.PlanError, match="not deterministic"):
        stc.stream("ijk,jr,kr->ir", x, *dense, deterministic=True)
    expected = stc.einsum("ijk,jr,kr->ir", x, *dense)
    assert_same(stc.stream("ijk,jr,kr->ir", x, *dense, deterministic=True, device="cpu"), expected)
