"""The probes' kernels do the work they are timed for, at tiny sizes."""

from __future__ import annotations

import pytest
import torch
from calibration_cases import TINY

from sparsetc.device.calibrate import (
    BLOCK,
    DEEP,
    INNER,
    KEPT_TASK,
    PAIRS,
    ROW,
    SPARSE,
    Launch,
    Probe,
    probes,
    starts,
    torch_probes,
)

CALLS = ("aten::zero_", "aten::index_copy_", "aten::index_select", "aten::add_")
CPU = torch.device("cpu")


def _probes() -> dict[str, Probe]:
    return {probe[0]: probe for probe in probes(CPU, TINY, "cpu")}


def launches(probe: Probe) -> list[Launch]:
    return [one for one in probe[2] if isinstance(one, Launch)]


def _result(launch: Launch) -> torch.Tensor:
    """What it writes: the last tensor it is given."""
    launch()
    return [a for a in launch.args if isinstance(a, torch.Tensor)][-1]


def test_every_element_is_read_once() -> None:
    (one,) = launches(_probes()["memory"])
    assert _result(one).tolist() == [32.0, 32.0]


@pytest.mark.parametrize("rate", ["l2", "l1"])
def test_as_many_rows_are_gathered_as_are_counted(rate: str) -> None:
    probe = _probes()[rate]
    for one in launches(probe):
        assert float(_result(one).sum()) * 4 == probe[1]


def test_as_many_rows_are_added_as_are_counted() -> None:
    probe = _probes()["add"]
    for one in launches(probe):
        table = one.args[-1]
        assert isinstance(table, torch.Tensor)
        table.zero_()
        assert float(_result(one).sum()) * 4 == probe[1]
        counts = torch.bincount(one.args[0][:256].long(), minlength=16)  # type: ignore[union-attr,index]
        assert torch.equal(table, counts[:, None].expand(16, ROW).float())


def test_multiplications_are_followed_by_additions() -> None:
    (one,) = launches(_probes()["multiply"])
    assert _result(one).unique().tolist() == [1.0], "x = x / 2 + 1 / 2, many times"


@pytest.mark.parametrize("precision", ["ieee", "tf32x3", "tf32"])  # the interpreter multiplies bf16's bits as integers
def test_dots_are_added_up(precision: str) -> None:
    (one,) = launches(_probes()[f"dot {precision}"])
    assert _result(one).unique().tolist() == [TINY.steps * DEEP * 64 * 0.0625]


def test_as_many_tasks_are_summed_as_are_counted() -> None:
    probe = _probes()["task_bytes"]
    (one,) = launches(probe)
    words, places, values, sums = (a for a in one.args if isinstance(a, torch.Tensor))
    sums.zero_()
    assert float(_result(one).sum()) * KEPT_TASK == probe[1]
    assert torch.equal(sums, torch.bincount(places.long(), minlength=256).float())
    assert words.element_size() + places.element_size() + 2 * values.element_size() == KEPT_TASK


@pytest.mark.parametrize("name", ["f16x3", "highest", "high", "float64"])  # no bf16, as above
def test_pairs_of_blocks_are_multiplied_and_added_up(name: str) -> None:
    probe = _probes()[f"block_dot {name}"]
    (one,) = launches(probe)
    numbers, *blocks, out = (a for a in one.args if isinstance(a, torch.Tensor))
    assert [b.numel() for b in blocks] == [TINY.blocks * BLOCK * INNER * (2 if name == "f16x3" else 1)] * 2
    assert numbers.shape == (TINY.pairs, 2)
    assert int(numbers.max()) < TINY.blocks
    products = 3 if name == "f16x3" else 1
    assert _result(one).unique().tolist() == [products * BLOCK * INNER * PAIRS]
    assert probe[1] == 2 * BLOCK * BLOCK * INNER * one.keywords["grid"][0] * PAIRS
    assert out.dtype == (torch.float64 if name == "float64" else torch.float32)


def test_torch_is_asked_for_what_is_counted() -> None:
    found = {probe[0]: probe for probe in torch_probes(CPU, TINY)}
    assert list(found) == ["product highest", "product high", "product medium", "product float64", "moved", "call"]
    before = torch.get_float32_matmul_precision()
    for name in ("highest", "high", "medium", "float64"):
        _, _, (one,) = found[f"product {name}"]
        result = one()
        assert isinstance(result, torch.Tensor)
        assert torch.equal(result, torch.full((3, 5), 4.0, dtype=result.dtype))
        assert (result.dtype == torch.float64) == (name == "float64")
    assert torch.get_float32_matmul_precision() == before
    (_, _, (moved,)), (_, count, (calls,)) = found["moved"], found["call"]
    gathered = moved()
    assert isinstance(gathered, torch.Tensor)
    assert torch.equal(gathered, torch.zeros(512 // SPARSE))  # of an array that is zeros again
    with torch.profiler.profile() as profiled:
        calls()
    assert sum(e.count for e in profiled.key_averages() if e.key in CALLS) == count


def test_programs_find_no_work() -> None:
    for one in starts(CPU, TINY):
        assert not _result(one).any()
