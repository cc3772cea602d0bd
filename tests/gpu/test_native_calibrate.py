"""Calibrating on a GPU: every number is measured, kept and used; on an H200 it is about what the defaults say."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import sparsetc as stc
from sparsetc.device import profile as record
from sparsetc.device.profile import TABLES, DeviceProfile, default_gpu, of_backend

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

FACTOR = 4
"""Within which a number must be that of the defaults: a probe that measures something else is further off."""

KEPT = ("wait", "fiber", "l1_bytes", "tile", "expand", "pair_turn")
"""Numbers that no probe shows."""


def values(profile: DeviceProfile) -> dict[str, float]:
    """Name by name, tables by precision."""
    found = {name: getattr(profile, name) for name in record.MEASURED if name not in TABLES}
    tables = {name: getattr(profile, name) for name in record.MEASURED if name in TABLES}
    return found | {f"{name} {p}": rate for name, table in tables.items() for p, rate in table.items()}


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DeviceProfile, float]:
    """(cache directory, profile, seconds it took)."""
    directory = tmp_path_factory.mktemp("cache")
    start = time.perf_counter()
    with stc.options(cache_dir=directory):
        profile = stc.calibrate()
    return directory, profile, time.perf_counter() - start


def test_it_takes_less_than_a_minute(calibrated: tuple[Path, DeviceProfile, float]) -> None:
    assert calibrated[2] < 60


@pytest.mark.parametrize("name", values(default_gpu()))
def test_a_rate_is_positive_and_on_an_h200_about_the_default(
    name: str, calibrated: tuple[Path, DeviceProfile, float]
) -> None:
    _, profile, _ = calibrated
    found, default = values(profile)[name], values(default_gpu())[name]
    assert found > 0
    if "H200" in profile.name and "MIG" not in profile.name:
        assert default / FACTOR < found < default * FACTOR


def test_the_record_is_planned_with(calibrated: tuple[Path, DeviceProfile, float]) -> None:
    directory, profile, _ = calibrated
    record._read.cache_clear()
    with stc.options(cache_dir=directory):
        assert of_backend("triton") == profile
        assert profile == replace(profile, **{name: getattr(default_gpu(), name) for name in KEPT})
        coords = torch.randint(0, 50, (2, 300), device="cuda")
        x = stc.SparseTensor(coords, torch.rand(300, device="cuda"), (50, 50))
        said = stc.explain("ij,jr->ir", x, torch.rand(50, 8, device="cuda"))
    assert said.profile == profile.describe()
    assert profile.describe().startswith(f"{torch.cuda.get_device_name()} (calibrated {profile.calibrated}: ")
