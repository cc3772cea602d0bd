"""The fuzzer of readers: a short run that finds nothing, and findings where a reader is broken on purpose."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import sparsetc.io as sio
from sparsetc.io import lines, npz
from sparsetc.testing import readers


@pytest.mark.parametrize("seed", range(2))
def test_a_short_run(tmp_path: Path, seed: int) -> None:
    found = [readers.try_one(seed, number, tmp_path) for number in range(80)]
    assert [one for one in found if one] == []


def test_equal_seeds_make_equal_files(tmp_path: Path) -> None:
    cases = [readers.draw(readers.Random(f"7, {number}")) for _ in range(2) for number in range(60)]
    assert [(c.name, c.data, c.dtype) for c in cases[:60]] == [(c.name, c.data, c.dtype) for c in cases[60:]]
    assert len({c.data for c in cases}) == 60


def test_findings_are_reported_once_and_reproduced(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise IndexError("list index out of range")

    monkeypatch.setattr(npz, "read", broken)
    reports: list[str] = []
    assert readers.fuzz_readers(time.monotonic() + 2, 0, reports.append) > 10
    assert len(reports) == 1
    assert reports[0].startswith("# IndexError in broken, test_fuzz_readers.py: list index out of range\n")
    assert reports[0].count("\n") < 10
    monkeypatch.setattr(lines, "BLOCK", lines.BLOCK)  # which the reproducer sets
    with pytest.raises(IndexError):
        exec(reports[0], {})


def test_wrong_values_and_blocks_that_matter_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = sio.read

    def wrong(path: Path, dtype: torch.dtype | None = None) -> object:
        x = right(path, dtype=dtype)
        return x.with_values(x.values + 1) if lines.BLOCK < 1000 else x

    monkeypatch.setattr(sio, "read", wrong)
    found = [readers.try_one(0, number, tmp_path) for number in range(60)]
    assert any(one and "blocks of" in one[0] for one in found)
    monkeypatch.setattr(lines, "BLOCK", 999)
    found = [readers.try_one(0, number, tmp_path) for number in range(60)]
    assert any(one and "other than what was written" in one[0] for one in found)
