"""Calibrating on a GPU: every rate is measured, kept and used; on an H200 it is about what the defaults say."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import sparsetc as stc
from sparsetc import rates_record
from sparsetc.ir.cost import Rates, rates_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

FACTOR = 4
"""Within which a rate must be that of the defaults: a probe that measures something else is further off."""


def values(rates: Rates) -> dict[str, float]:
    """Name by name, dots by precision."""
    found = {name: getattr(rates, name) for name in rates_record.MEASURED if name != "dot"}
    return found | {f"dot {name}": rate for name, rate in rates.dot}


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Rates, float]:
    """(cache directory, rates, seconds it took)."""
    directory = tmp_path_factory.mktemp("cache")
    start = time.perf_counter()
    with stc.options(cache_dir=directory):
        rates = stc.calibrate()
    return directory, rates, time.perf_counter() - start


def test_it_takes_less_than_a_minute(calibrated: tuple[Path, Rates, float]) -> None:
    assert calibrated[2] < 60


@pytest.mark.parametrize("name", values(Rates()))
def test_a_rate_is_positive_and_on_an_h200_about_the_default(name: str, calibrated: tuple[Path, Rates, float]) -> None:
    _, rates, _ = calibrated
    found, default = values(rates)[name], values(Rates())[name]
    assert found > 0
    if "H200" in rates.name and "MIG" not in rates.name:
        assert default / FACTOR < found < default * FACTOR


def test_the_record_is_planned_with(calibrated: tuple[Path, Rates, float]) -> None:
    directory, rates, _ = calibrated
    rates_record._read.cache_clear()
    with stc.options(cache_dir=directory):
        assert rates_of("triton") == rates
        assert rates == replace(rates, wait=Rates().wait, fiber=Rates().fiber, l1_bytes=Rates().l1_bytes)
        coords = torch.randint(0, 50, (2, 300), device="cuda")
        x = stc.SparseTensor(coords, torch.rand(300, device="cuda"), (50, 50))
        said = stc.explain("ij,jr->ir", x, torch.rand(50, 8, device="cuda"))
    assert said.rates == f"{torch.cuda.get_device_name()} (calibrated {rates.calibrated})"
