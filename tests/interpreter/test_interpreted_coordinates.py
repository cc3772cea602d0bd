"""Coordinates that look up words in tables, under Triton's interpreter."""

from __future__ import annotations

import pytest
from coordinate_cases import Diagonals, check_einsums

from sparsetc.packing.base import FORMATS


def test_lookups_of_words_run_on_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, "diagonals", Diagonals())
    check_einsums("triton")
