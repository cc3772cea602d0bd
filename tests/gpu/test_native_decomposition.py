"""Decompositions natively on a GPU: the same as on the CPU, from CUDA graphs where those are meant to be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decomposition_cases import random_factors, random_tensor

import sparsetc as stc
from sparsetc.decomposition import CP, cp_als, cp_apr, loop, tucker

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

F32, F64 = torch.float32, torch.float64
SHAPE = (60, 50, 40)


@pytest.fixture
def graphs_made(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each capture succeeded."""
    made: list[bool] = []
    capture = loop._capture

    def noted(*arguments: Any) -> Any:
        graph = capture(*arguments)
        made.append(graph is not None)
        return graph

    monkeypatch.setattr(loop, "_capture", noted)
    return made


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize(
    "options",
    [{}, {"nonnegative": True}, {"l2_reg": 0.1}, {"mask": "observed", "l2_reg": 0.1},
     {"mask": "observed", "l2_reg": 0.1, "nonnegative": True}, {"deterministic": True}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("rank", [4, 7, 32, 65])
def test_cp_als_is_that_of_the_cpu(
    rank: int, options: dict[str, Any], dtype: torch.dtype, graphs_made: list[bool]
) -> None:
    x, start = random_tensor(SHAPE, 0.05, dtype), random_factors(SHAPE, rank, dtype)
    expected = cp_als(x, rank, init=start, n_iter_max=11, tol=0, **options)
    found = cp_als(x.cuda(), rank, init=[f.cuda() for f in start], n_iter_max=11, tol=0, **options)
    assert found.fits == pytest.approx(expected.fits, abs=1e-9 if dtype == F64 else 2e-3)
    assert found.weights.is_cuda
    assert graphs_made == [True], "the sweep was not captured"


def test_a_step_that_cannot_be_captured_goes_on_as_it_was(graphs_made: list[bool]) -> None:
    counted, stream = torch.zeros((), device="cuda"), torch.cuda.current_stream()

    def step() -> None:
        counted.add_(1)
        counted.item()  # waits, which a capture does not allow

    call = loop.captured(step, counted.device)
    for _ in range(5):
        call()
    assert graphs_made == [False]
    assert int(counted) == 5
    assert torch.cuda.current_stream() == stream
    assert torch.rand(3, device="cuda").sum().item() > 0  # what random numbers and memory need is as it was


@pytest.mark.parametrize("dtype", [F32, F64])
def test_cp_apr_is_that_of_the_cpu(dtype: torch.dtype, graphs_made: list[bool]) -> None:
    x, start = random_tensor(SHAPE, 0.05, dtype), random_factors(SHAPE, 5, dtype)
    x = x.with_values((x.values * 9).ceil())
    expected = cp_apr(x, 5, init=start, n_iter_max=6, tol=0)
    found = cp_apr(x.cuda(), 5, init=[f.cuda() for f in start], n_iter_max=6, tol=0)
    assert found.log_likelihoods == pytest.approx(expected.log_likelihoods, rel=1e-9 if dtype == F64 else 1e-3)
    assert graphs_made == [True], "the iteration was not captured"


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("init", ["nvecs", "random"])
def test_tucker_is_that_of_the_cpu(init: str, dtype: torch.dtype) -> None:
    x = random_tensor(SHAPE, 0.05, dtype)
    expected = tucker(x, (3, 4, 5), init=init, random_state=0, n_iter_max=5, tol=0)
    found = tucker(x.cuda(), (3, 4, 5), init=init, random_state=0, n_iter_max=5, tol=0)
    assert found.fits == pytest.approx(expected.fits, abs=1e-9 if dtype == F64 else 1e-4)


def test_a_seed_gives_one_start_on_both() -> None:
    x = random_tensor(SHAPE, 0.05)
    starts = [cp_als(y, 4, random_state=3, n_iter_max=0) for y in (x, x.cuda())]
    torch.testing.assert_close(starts[0].factors[1], starts[1].factors[1].cpu())
    generator = torch.Generator("cuda").manual_seed(0)
    assert cp_als(x.cuda(), 4, random_state=generator, n_iter_max=3).weights.is_cuda


@pytest.mark.parametrize("sweeps", [1, 2, 3, 9])
def test_a_callback_and_a_stop_see_every_sweep(sweeps: int) -> None:
    x, seen = random_tensor(SHAPE, 0.05).cuda(), []

    def stop(model: CP, error: float) -> bool:
        seen.append((model, error))
        return len(seen) == sweeps

    found = cp_als(x, 4, random_state=0, tol=0, callback=stop)
    assert (found.stopped, len(found.fits)) == ("callback", sweeps)
    again = cp_als(x, 4, random_state=0, tol=0, n_iter_max=sweeps)
    assert again.fits == pytest.approx([1 - error for _, error in seen])
    torch.testing.assert_close(seen[-1][0].factors[0], again.factors[0])


def test_a_run_ends_within_eight_sweeps_of_its_convergence() -> None:
    x = random_tensor(SHAPE, 0.05)
    expected = cp_als(x, 2, random_state=0, tol=1e-6, n_iter_max=500)
    found = cp_als(x.cuda(), 2, random_state=0, tol=1e-6, n_iter_max=500)
    assert found.stopped == expected.stopped == "converged"
    assert 0 <= len(found.fits) - len(expected.fits) < 8


def test_a_model_moves_and_is_read_there(tmp_path: Any) -> None:
    found = cp_als(random_tensor(SHAPE, 0.05).cuda(), 4, random_state=0, n_iter_max=3)
    found.save(tmp_path / "model.npz")
    loaded = CP.load(tmp_path / "model.npz", device="cuda")
    assert torch.equal(loaded.factors[0], found.factors[0])
    coords = torch.zeros(3, 5, dtype=torch.int64)
    torch.testing.assert_close(found.values_at(coords).cpu(), found.to("cpu").values_at(coords))
    with pytest.raises(stc.DeviceError, match="is on cuda:0, x is on cpu"):
        cp_als(random_tensor(SHAPE, 0.05), 4, init=found)
