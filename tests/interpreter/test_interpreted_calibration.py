"""The probes' kernels do the work they are timed for, at tiny sizes."""

from __future__ import annotations

import pytest
import torch

from sparsetc.planner.calibrate import DEEP, ROW, Launch, Probe, Sizes, probes, starts

CPU = torch.device("cpu")
SIZES = Sizes(streamed=64, block=32, table=16, gathered=2048, added=256, programs=2, steps=16, started=(2, 4))


def _probes() -> dict[str, Probe]:
    return {p.rate: p for p in probes(CPU, SIZES)}


def _result(launch: Launch) -> torch.Tensor:
    """What it writes: the last tensor it is given."""
    launch()
    return [a for a in launch.arguments if isinstance(a, torch.Tensor)][-1]


def test_every_element_is_read_once() -> None:
    (one,) = _probes()["memory"].launches
    assert _result(one).tolist() == [32.0, 32.0]


@pytest.mark.parametrize("rate", ["l2", "l1"])
def test_as_many_rows_are_gathered_as_are_counted(rate: str) -> None:
    probe = _probes()[rate]
    for one in probe.launches:
        assert float(_result(one).sum()) * 4 == probe.work


def test_as_many_rows_are_added_as_are_counted() -> None:
    probe = _probes()["add"]
    for one in probe.launches:
        table = one.arguments[-1]
        assert isinstance(table, torch.Tensor)
        table.zero_()
        assert float(_result(one).sum()) * 4 == probe.work
        counts = torch.bincount(one.arguments[0][:256].long(), minlength=16)  # type: ignore[union-attr,index]
        assert torch.equal(table, counts[:, None].expand(16, ROW).float())


def test_multiplications_are_followed_by_additions() -> None:
    (one,) = _probes()["multiply"].launches
    assert _result(one).unique().tolist() == [1.0], "x = x / 2 + 1 / 2, many times"


@pytest.mark.parametrize("precision", ["ieee", "tf32x3", "tf32"])  # the interpreter multiplies bf16's bits as integers
def test_dots_are_added_up(precision: str) -> None:
    (one,) = _probes()[f"dot {precision}"].launches
    assert _result(one).unique().tolist() == [SIZES.steps * DEEP * 64 * 0.0625]


def test_programs_find_no_work() -> None:
    for one in starts(CPU, SIZES):
        assert not _result(one).any()
